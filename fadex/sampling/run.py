"""The plain sampling loop: every step computes the model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_interval, check_run
from fadex.sampling.samplers import Sampler, flow_euler


def full_step(model, sampler: Sampler, x, state, t, t_next):
    """One computed step; the output and the new state are kept as they come out of the model.

    The barriers stop the compiler from fusing the model with what follows it. A step then
    rounds the same in every program that holds it: a cached run that computes all steps
    equals the plain one bit for bit.
    """
    out = jax.lax.optimization_barrier(model(x, t))
    return apply_step(model, sampler, out, x, state, t, t_next)


def apply_step(model, sampler: Sampler, out, x, state, t, t_next):
    """Advance ``x`` by one sampler step with the given (computed or forecast) output."""
    x_next, state = sampler.step(out, x, t, t_next, state, model)
    return jax.lax.optimization_barrier((x_next.astype(x.dtype), state))


def initial_state(sampler: Sampler, x: jax.Array, key: jax.Array | None, t: jax.Array) -> Any:
    """The sampler's state before the first step; ``t`` is any time of the run.

    Where every sample has a time of its own (``t`` is ``[B, 1, ...]``), what a step remembers of
    times becomes one value per sample, too.
    """
    state = sampler.init(x, key)
    if jnp.ndim(t) == 0:
        return state
    step = lambda: sampler.step(x, x, t, t, state, lambda x, t: x)[1]
    grow = lambda a, after: a if a.shape == after.shape else jnp.broadcast_to(a, after.shape)
    return jax.tree.map(grow, state, jax.eval_shape(step))


@functools.partial(
    jax.jit, static_argnames=("denoiser", "sampler", "cfg_channels", "return_trajectory")
)
def _sample(params, x, cond, null_cond, timesteps, guidance, interval, key, *, denoiser, sampler,
            cfg_channels, return_trajectory):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)

    def body(carry, times):
        x, state = full_step(model, sampler, *carry, *times)
        return (x, state), x if return_trajectory else None

    start = (x, initial_state(sampler, x, key, timesteps[0]))
    (out, _), states = jax.lax.scan(body, start, (timesteps[:-1], timesteps[1:]))
    if return_trajectory:
        return out, jnp.concatenate([x[None], states])
    return out


def sample(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
    return_trajectory: bool = False,
) -> Any:
    """Integrate from noise to data, calling the model at every step.

    Args:
      denoiser, params: the model, from :func:`~fadex.models.from_nnx` or ``from_linen``.
      x: initial latents ``[B, ...]``.
      cond: pytree of conditions with leading axis ``B``, or None.
      timesteps: ``[S + 1]``, strictly monotone, as the sampler reads them; or ``[B, S + 1]``,
        a grid for each sample (resolutions of one batch may want different shifts).
      sampler: :func:`~fadex.sampling.flow_euler` by default.
      guidance: classifier-free guidance, a number or ``[B]``; traced values do not recompile.
      null_cond: condition of the null branch; required unless ``guidance`` is 1.
      cfg_channels: guide the leading channels only.
      guidance_interval: ``(low, high)``; guide where ``low <= t <= high`` only, in the units of
        ``timesteps``. Elsewhere the null branch is not computed (with a grid per sample: where
        no sample is inside). Values do not recompile. Source: Kynkäänniemi et al.,
        arXiv 2404.07724.
      key: PRNG key for stochastic samplers.
      return_trajectory: also return all states ``[S + 1, B, ...]``.

    Returns:
      ``x`` at the last time, or ``(x, trajectory)``.

    Raises:
      ValueError: a bad argument, by name, when tracing.
    """
    sampler = flow_euler() if sampler is None else sampler
    timesteps, null_cond = check_run(
        x, cond, timesteps, None, guidance, null_cond, cfg_channels, sampler, key
    )
    interval = check_interval(guidance_interval, null_cond)
    return _sample(
        params, jnp.asarray(x), cond, null_cond, timesteps, guidance, interval, key,
        denoiser=denoiser, sampler=sampler, cfg_channels=cfg_channels,
        return_trajectory=return_trajectory,
    )
