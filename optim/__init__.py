"""Optimizers as optax gradient transformations, and the geometry they share.

AcceleGrad#, AcceleGrad and Scion on norms of layers; momentum for interpolation; heavy ball in
river valleys; dual-anchor.
"""

from fadex.optim.accelegrad import AcceleGradState, accelegrad
from fadex.optim.accelegrad_eval import accelegrad_eval_params
from fadex.optim.accelegrad_sharp import AcceleGradSharpState, accelegrad_sharp
from fadex.optim.coordinate_descent import coordinate_descent
from fadex.optim.curvature import (
    Curvature,
    curvature_from_rows,
    gauss_newton_rows,
    gradient_rows,
    hessian_vector_product,
    hutchinson_trace,
    lambda_max,
    row_norm_bound,
)
from fadex.optim.dual_anchor import DualAnchorState, dual_anchor, dual_anchor_batch_size, noise_gain
from fadex.optim.heavy_ball import HeavyBallState, heavy_ball, scale_by_heavy_ball
from fadex.optim.interpolation_oracle import (
    BestRate,
    best_rate,
    second_moment_rate,
    second_moment_rate_rows,
    steps_per_efold,
)
from fadex.optim.kaczmarz import InterpolationResult, kaczmarz, minibatch_least_squares
from fadex.optim.linear_coupling import certificate_schedule, levy_weights, linear_weights
from fadex.optim.mirror_maps import MirrorMap, entropy_map, pnorm_map
from fadex.optim.momentum import (
    Momentum,
    SGDMomentumState,
    interpolation_momentum,
    momentum_eval_params,
    scale_momentum,
    sgd_interpolation,
    sgd_momentum,
)
from fadex.optim.newton_schulz_coefficients import polar_express_coefficients
from fadex.optim.norm_rules import assign_norms, weight_dimension_numbers
from fadex.optim.norms import (
    NORM_NAMES,
    NormSpec,
    dual_norm,
    euclidean_constant,
    lmo,
    lmo_with_dual,
    norm,
    norm_upper_bound,
    sharp,
)
from fadex.optim.polar import polar_factor
from fadex.optim.polar_lowrank import polar_lowrank, polar_range_sketch
from fadex.optim.product_norms import (
    broadcast_specs,
    tree_dual_norm,
    tree_lmo,
    tree_norm,
    tree_sharp,
)
from fadex.optim.river import (
    HeavyBallSetting,
    RiverLimits,
    RiverValley,
    hill_contraction,
    hill_variance,
    river_limits,
    river_valley_2d,
    river_valley_nd,
    suggest,
    suggest_step,
)
from fadex.optim.scion import ScionState, scale_by_lmo, scion, scion_init
from fadex.optim.valley_monitors import (
    OscillationState,
    RiverProgress,
    TopHessian,
    oscillation_index,
    oscillation_monitor,
    river_progress,
    sharpness,
    top_hessian,
)

__all__ = [
    "NORM_NAMES",
    "AcceleGradSharpState",
    "AcceleGradState",
    "BestRate",
    "Curvature",
    "DualAnchorState",
    "HeavyBallSetting",
    "HeavyBallState",
    "InterpolationResult",
    "MirrorMap",
    "Momentum",
    "NormSpec",
    "OscillationState",
    "RiverLimits",
    "RiverProgress",
    "RiverValley",
    "SGDMomentumState",
    "ScionState",
    "TopHessian",
    "accelegrad",
    "accelegrad_eval_params",
    "accelegrad_sharp",
    "assign_norms",
    "best_rate",
    "broadcast_specs",
    "certificate_schedule",
    "coordinate_descent",
    "curvature_from_rows",
    "dual_anchor",
    "dual_anchor_batch_size",
    "dual_norm",
    "entropy_map",
    "euclidean_constant",
    "gauss_newton_rows",
    "gradient_rows",
    "heavy_ball",
    "hessian_vector_product",
    "hill_contraction",
    "hill_variance",
    "hutchinson_trace",
    "interpolation_momentum",
    "kaczmarz",
    "lambda_max",
    "levy_weights",
    "linear_weights",
    "lmo",
    "lmo_with_dual",
    "minibatch_least_squares",
    "momentum_eval_params",
    "noise_gain",
    "norm",
    "norm_upper_bound",
    "oscillation_index",
    "oscillation_monitor",
    "pnorm_map",
    "polar_express_coefficients",
    "polar_factor",
    "polar_lowrank",
    "polar_range_sketch",
    "river_limits",
    "river_progress",
    "river_valley_2d",
    "river_valley_nd",
    "row_norm_bound",
    "scale_by_heavy_ball",
    "scale_by_lmo",
    "scale_momentum",
    "scion",
    "scion_init",
    "second_moment_rate",
    "second_moment_rate_rows",
    "sgd_interpolation",
    "sgd_momentum",
    "sharp",
    "sharpness",
    "steps_per_efold",
    "suggest",
    "suggest_step",
    "top_hessian",
    "tree_dual_norm",
    "tree_lmo",
    "tree_norm",
    "tree_sharp",
    "weight_dimension_numbers",
]
