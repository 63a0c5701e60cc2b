"""Optimizers as optax gradient transformations. No method has landed here yet."""

from fadex.optim.dual_anchor import DualAnchorState, dual_anchor, dual_anchor_batch_size, noise_gain
from fadex.optim.heavy_ball import HeavyBallState, heavy_ball, scale_by_heavy_ball
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
    "DualAnchorState",
    "HeavyBallSetting",
    "HeavyBallState",
    "OscillationState",
    "RiverLimits",
    "RiverProgress",
    "RiverValley",
    "TopHessian",
    "dual_anchor",
    "dual_anchor_batch_size",
    "heavy_ball",
    "hill_contraction",
    "hill_variance",
    "noise_gain",
    "oscillation_index",
    "oscillation_monitor",
    "river_limits",
    "river_progress",
    "river_valley_2d",
    "river_valley_nd",
    "scale_by_heavy_ball",
    "sharpness",
    "suggest",
    "suggest_step",
    "top_hessian",
]
