"""Time grids, samplers as pure step functions, guidance, flow-matching training."""

from fadex.sampling.grids import (
    logit_normal_times,
    resolution_shift,
    shifted_times,
    timestep_indices,
    uniform_times,
)
from fadex.sampling.guidance import guidance_breaks
from fadex.sampling.run import sample
from fadex.sampling.samplers import (
    MultistepState,
    Sampler,
    ab2,
    ddim,
    dpmpp_2m,
    flow_euler,
    flow_heun,
    linear_alphas_cumprod,
)
from fadex.sampling.training import TrainState, flow_matching_loss, train_flow

__all__ = [
    "MultistepState",
    "Sampler",
    "TrainState",
    "ab2",
    "ddim",
    "dpmpp_2m",
    "flow_euler",
    "flow_heun",
    "flow_matching_loss",
    "guidance_breaks",
    "linear_alphas_cumprod",
    "logit_normal_times",
    "resolution_shift",
    "sample",
    "shifted_times",
    "timestep_indices",
    "train_flow",
    "uniform_times",
]
