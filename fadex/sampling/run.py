"""The plain sampling loop: every step computes the model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_run
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


@functools.partial(
    jax.jit, static_argnames=("denoiser", "sampler", "cfg_channels", "return_trajectory")
)
def _sample(params, x, cond, null_cond, timesteps, guidance, key, *, denoiser, sampler,
            cfg_channels, return_trajectory):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels)

    def body(carry, times):
        x, state = full_step(model, sampler, *carry, *times)
        return (x, state), x if return_trajectory else None

    start = (x, sampler.init(x, key))
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
    key: jax.Array | None = None,
    return_trajectory: bool = False,
) -> Any:
    """Integrate from noise to data, calling the model at every step.

    Args:
      denoiser, params: the model, from :func:`~fadex.models.from_nnx` or ``from_linen``.
      x: initial latents ``[B, ...]``.
      cond: pytree of conditions with leading axis ``B``, or None.
      timesteps: ``[S + 1]``, strictly monotone, as the sampler reads them.
      sampler: :func:`~fadex.sampling.flow_euler` by default.
      guidance: classifier-free guidance, a number or ``[B]``; traced values do not recompile.
      null_cond: condition of the null branch; required unless ``guidance`` is 1.
      cfg_channels: guide the leading channels only.
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
    return _sample(
        params, jnp.asarray(x), cond, null_cond, timesteps, guidance, key, denoiser=denoiser,
        sampler=sampler, cfg_channels=cfg_channels, return_trajectory=return_trajectory,
    )
