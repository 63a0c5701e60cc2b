"""Quantization-aware training: surrogate derivatives as expected zeroth-order estimators."""

from fadex.quant.qat.estimators import KINDS, Estimate, estimate
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

__all__ = [
    "BANDWIDTHS",
    "EDGES",
    "KINDS",
    "PERTURBATIONS",
    "Estimate",
    "InverseSurrogate",
    "Kernel",
    "Perturbation",
    "arctan",
    "convergence_bound",
    "estimate",
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
    "surrogate_round",
    "surrogate_weight",
    "uniform",
    "uniform_ripple",
]
