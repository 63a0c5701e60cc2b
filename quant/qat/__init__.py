"""Quantization-aware training: surrogate derivatives as expected zeroth-order estimators."""

from fadex.quant.qat.estimators import KINDS, Estimate, estimate
from fadex.quant.qat.fake_quant import (
    FixedScale,
    fake_quant,
    fake_quant_array,
    fixed_scale,
    surrogate_factor,
)
from fadex.quant.qat.perturbations import (
    BANDWIDTHS,
    PERTURBATIONS,
    InverseSurrogate,
    Kernel,
    Perturbation,
    arctan,
    gaussian,
    laplace,
    make_kernel,
    perturbation_from_surrogate,
    sigmoid,
    ste,
    uniform,
)
from fadex.quant.qat.surrogates import EDGES, scaled_round, surrogate_round, surrogate_weight
from fadex.quant.qat.theory import (
    convergence_bound,
    linearization_error_bound,
    quadratic_expectation,
    second_moment,
    smoothed_quantizer,
    uniform_ripple,
)
from fadex.quant.qat.transform import ZoeSurrogateState, zoe_surrogate

__all__ = [
    "BANDWIDTHS",
    "EDGES",
    "KINDS",
    "PERTURBATIONS",
    "Estimate",
    "FixedScale",
    "InverseSurrogate",
    "Kernel",
    "Perturbation",
    "ZoeSurrogateState",
    "arctan",
    "convergence_bound",
    "estimate",
    "fake_quant",
    "fake_quant_array",
    "fixed_scale",
    "gaussian",
    "laplace",
    "linearization_error_bound",
    "make_kernel",
    "perturbation_from_surrogate",
    "quadratic_expectation",
    "scaled_round",
    "second_moment",
    "sigmoid",
    "smoothed_quantizer",
    "ste",
    "surrogate_factor",
    "surrogate_round",
    "surrogate_weight",
    "uniform",
    "uniform_ripple",
    "zoe_surrogate",
]
