"""Optimizers as optax gradient transformations, and the geometry they share.

AcceleGrad#, AcceleGrad and Scion on norms of layers; momentum for interpolation; heavy ball in
river valleys; dual-anchor.
"""

from fadex.optim.accelegrad import AcceleGradState, accelegrad, accelegrad_eval_params
from fadex.optim.accelegrad_sharp import AcceleGradSharpState, accelegrad_sharp
from fadex.optim.dual_anchor import DualAnchorState, dual_anchor, dual_anchor_batch_size, noise_gain
from fadex.optim.heavy_ball import HeavyBallState, heavy_ball, scale_by_heavy_ball
from fadex.optim.linear_coupling import certificate_schedule, levy_weights, linear_weights
from fadex.optim.mirror_maps import MirrorMap, entropy_map, pnorm_map
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
    "DualAnchorState",
    "HeavyBallSetting",
    "HeavyBallState",
    "MirrorMap",
    "NormSpec",
    "OscillationState",
    "RiverLimits",
    "RiverProgress",
    "RiverValley",
    "ScionState",
    "TopHessian",
    "accelegrad",
    "accelegrad_eval_params",
    "accelegrad_sharp",
    "assign_norms",
    "broadcast_specs",
    "certificate_schedule",
    "dual_anchor",
    "dual_anchor_batch_size",
    "dual_norm",
    "entropy_map",
    "euclidean_constant",
    "heavy_ball",
    "hill_contraction",
    "hill_variance",
    "levy_weights",
    "linear_weights",
    "lmo",
    "lmo_with_dual",
    "noise_gain",
    "norm",
    "norm_upper_bound",
    "oscillation_index",
    "oscillation_monitor",
    "pnorm_map",
    "polar_factor",
    "river_limits",
    "river_progress",
    "river_valley_2d",
    "river_valley_nd",
    "scale_by_heavy_ball",
    "scale_by_lmo",
    "scion",
    "scion_init",
    "sharp",
    "sharpness",
    "suggest",
    "suggest_step",
    "top_hessian",
    "tree_dual_norm",
    "tree_lmo",
    "tree_norm",
    "tree_sharp",
    "weight_dimension_numbers",
]
