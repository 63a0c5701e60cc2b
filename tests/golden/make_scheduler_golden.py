"""Golden trajectories of diffusers' schedulers, against which our samplers are tested.

Run with torch 2.13.0, diffusers 0.42.1 and jax (``pip install 'fadex-jax[torch]'``)::

    python tests/golden/make_scheduler_golden.py

writes ``schedulers.npz`` beside this file. The model is the closed formula

    out(x, t) = tanh(1.3 x - 0.7 t),

read as a velocity (``t`` in [0, 1]) or as noise (``t`` = timestep / 1000), in float32. Each
case ``NAME`` of :data:`CASES` has ``NAME:times``, the ``S + 1`` times as our samplers take
them (a last 0 or -1 stands for clean data), and ``NAME:x``, the states ``[S + 1, 2, 3, 4]``.
``ddim_eta1`` has the injected noise ``ddim_eta1:noise`` too: what ``jax.random`` draws from
key 0, split once a step. ``grid:SPACING:S`` are the timesteps of ``DDIMScheduler`` for ``S``
steps, of which some do not divide 1000.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CASES = (
    "euler_uniform", "euler_shift3", "euler_mu", "euler_default",
    "ddim_leading", "ddim_trailing", "ddim_eta1",
    "dpmpp_trailing", "dpmpp_linspace", "dpmpp_flow", "dpmpp_flow_shift3",
)
STEPS = {"dpmpp_linspace": 12}  # below 15 steps diffusers takes other branches; else 20

SPACINGS = ("leading", "trailing", "linspace")
SIZES = (1, 7, 13, 50, 333, 600)


def start() -> np.ndarray:
    """The initial state ``[2, 3, 4]``."""
    return np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def model(x, t, tanh=np.tanh):
    """The fake model; ``t`` in [0, 1]."""
    return tanh(1.3 * x - 0.7 * t)


def jax_noise(steps: int, shape: tuple[int, ...]) -> np.ndarray:
    """``[steps, *shape]``: the draws of our stochastic samplers from key 0."""
    import jax

    key, noise = jax.random.key(0), []
    for _ in range(steps):
        key, draw = jax.random.split(key)
        noise.append(np.asarray(jax.random.normal(draw, shape, np.float32)))
    return np.stack(noise)


def scheduler(name: str, steps: int):
    """The diffusers scheduler of a case with its timesteps set."""
    from diffusers import (
        DDIMScheduler,
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
    )

    kind, _, variant = name.partition("_")
    if kind == "euler":
        options = {"shift3": dict(shift=3.0), "mu": dict(use_dynamic_shifting=True)}
        found = FlowMatchEulerDiscreteScheduler(**options.get(variant, {}))
        if variant == "default":
            found.set_timesteps(steps)
        else:
            uniform = np.linspace(1.0, 1.0 / steps, steps)
            found.set_timesteps(sigmas=uniform, mu=1.15 if variant == "mu" else None)
        return found
    if kind == "ddim":
        spacing = "trailing" if variant == "trailing" else "leading"
        found = DDIMScheduler(beta_schedule="linear", clip_sample=False, set_alpha_to_one=True,
                              steps_offset=0, timestep_spacing=spacing)
    elif variant.startswith("flow"):
        found = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint",
            prediction_type="flow_prediction", use_flow_sigmas=True,
            flow_shift=3.0 if variant.endswith("shift3") else 1.0,
        )
    else:
        found = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint",
            beta_schedule="linear", timestep_spacing=variant,
        )
    found.set_timesteps(steps)
    return found


def run(name: str) -> dict[str, np.ndarray]:
    """Times, states and noise of one case."""
    import torch

    steps = STEPS.get(name, 20)
    peer = scheduler(name, steps)
    flow = name.startswith("euler") or "flow" in name
    times = peer.sigmas if flow else torch.cat([peer.timesteps.float(), torch.tensor([-1.0])])
    x = torch.from_numpy(start())
    noise = jax_noise(steps, tuple(x.shape)) if name == "ddim_eta1" else None
    states = [x]
    for i, timestep in enumerate(peer.timesteps):
        out = model(x, times[i] if flow else times[i] / 1000.0, torch.tanh)
        extra = {}
        if noise is not None:
            extra = dict(eta=1.0, variance_noise=torch.from_numpy(noise[i]))
        x = peer.step(out, timestep, x, return_dict=False, **extra)[0]
        states.append(x)
    arrays = {f"{name}:times": times.numpy(), f"{name}:x": torch.stack(states).numpy()}
    return arrays if noise is None else arrays | {f"{name}:noise": noise}


def grids() -> dict[str, np.ndarray]:
    """Timesteps by spacing and number of steps."""
    from diffusers import DDIMScheduler

    found = {}
    for spacing in SPACINGS:
        for steps in SIZES:
            peer = DDIMScheduler(timestep_spacing=spacing)
            peer.set_timesteps(steps)
            found[f"grid:{spacing}:{steps}"] = peer.timesteps.numpy().astype(np.int32)
    return found


if __name__ == "__main__":
    arrays = grids()
    for case in CASES:
        arrays |= run(case)
    path = HERE / "schedulers.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(arrays)} arrays")
