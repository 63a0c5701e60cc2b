r"""Classifier-free guidance around a denoiser, with or without features.

.. math:: \hat v = v_\varnothing + g\,(v_c - v_\varnothing)

Both branches run as one batch of ``2B`` samples, conditional first. Features taken inside
the model keep that doubled axis: each branch has cache entries of its own, and neither can
see the other's.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_finite, check_int, check_leading_axis, is_concrete
from fadex.core.denoiser import Denoiser


class Guided(NamedTuple):
    """A denoiser bound to its arguments; built inside a traced program, never passed into one.

    Attributes:
      denoiser, params, cond: the model and what it is conditioned on.
      null_cond: condition of the null branch, or None without guidance.
      guidance: scalar or ``[B]``.
      cfg_channels: leading channels that are guided; None for all of them. The others keep
        the conditional prediction (DiT guides 3 of 4).
    """

    denoiser: Denoiser
    params: Any
    cond: Any
    null_cond: Any
    guidance: jax.Array
    cfg_channels: int | None

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        """Guided output at ``(x, t)``, shaped like ``x``."""
        return self._combine(self.denoiser.apply(self.params, *self._inputs(x, t)), x)

    def with_features(self, x: jax.Array, t: jax.Array, site: str) -> tuple[jax.Array, jax.Array]:
        """Guided output and the feature at ``site`` (both branches)."""
        inputs = self._inputs(x, t)
        out, feats = self.denoiser.with_features(self.params, *inputs, (site,))
        return self._combine(out, x), feats[site]

    def from_features(self, x: jax.Array, t: jax.Array, site: str, feature: Any) -> jax.Array:
        """Guided output of the cheap pass."""
        inputs = self._inputs(x, t)
        out = self.denoiser.from_features(self.params, *inputs, {site: feature})
        return self._combine(out, x)

    def from_history(
        self, x: jax.Array, t: jax.Array, weights: jax.Array, history: jax.Array
    ) -> jax.Array:
        """Guided output of the fused cheap pass."""
        inputs = self._inputs(x, t)
        return self._combine(
            self.denoiser.from_history(self.params, *inputs, weights, history), x
        )

    def _inputs(self, x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        cond = self.cond
        if self.null_cond is not None:
            double = lambda a, b: jnp.concatenate([a, b], axis=0)
            x = double(x, x)
            cond = jax.tree.map(double, cond, self.null_cond)
        return x, jnp.full((x.shape[0],), t, jnp.float32), cond

    def _combine(self, out: jax.Array, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        batch = x.shape[0] * (1 if self.null_cond is None else 2)
        fits = out.ndim == x.ndim and out.shape[:-1] == (batch, *x.shape[1:-1])
        if not fits or out.shape[-1] not in (channels, 2 * channels):
            raise ValueError(
                f"denoiser: expected an output shaped like x {(batch, *x.shape[1:])} (or with "
                f"twice its channels), got {out.shape}"
            )
        out = out[..., :channels]  # a learned variance is no part of the ODE
        if self.null_cond is None:
            return out
        cond, null = jnp.split(out, 2, axis=0)
        scale = jnp.asarray(self.guidance, out.dtype)
        scale = scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim)) if scale.ndim else scale
        guided = null + scale * (cond - null)
        if self.cfg_channels is None:
            return guided
        return jnp.concatenate(
            [guided[..., : self.cfg_channels], cond[..., self.cfg_channels :]], axis=-1
        )


def check_run(
    x: jax.Array,
    cond: Any,
    timesteps: Any,
    num_steps: int | None,
    guidance: Any,
    null_cond: Any,
    cfg_channels: int | None,
    sampler: Any,
    key: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Check the arguments that all samplers share; return timesteps and the null branch.

    A plain guidance of exactly 1 needs no null branch: the formula leaves the conditional
    prediction, so the second half of the batch is not computed.
    """
    shape = jnp.shape(timesteps)
    want = None if num_steps is None else num_steps + 1
    if len(shape) != 1 or shape[0] < 2 or (want is not None and shape[0] != want):
        count = "num_steps + 1" if want is None else f"num_steps + 1 = {want}"
        raise ValueError(
            f"timesteps: need {count} strictly monotone values, got shape {tuple(shape)}"
        )
    if is_concrete(timesteps):
        import numpy as np

        gaps = np.diff(np.asarray(timesteps, np.float64))
        if not (np.all(gaps < 0) or np.all(gaps > 0)):
            raise ValueError(
                f"timesteps: need num_steps + 1 = {shape[0]} strictly monotone values, got "
                f"{np.asarray(timesteps).tolist()}"
            )
    if jnp.ndim(x) < 2 or 0 in jnp.shape(x):
        raise ValueError(
            f"x: expected at least one sample in an array [B, ...], got shape {jnp.shape(x)}"
        )
    batch = jnp.shape(x)[0]
    check_leading_axis("cond", cond, batch)
    check_finite("guidance", guidance)
    if jnp.shape(guidance) not in ((), (batch,)):
        raise ValueError(
            f"guidance: expected a number or one per sample ({batch},), got shape "
            f"{jnp.shape(guidance)}"
        )
    plain = isinstance(guidance, numbers.Real) and guidance == 1.0
    if plain:
        null_cond = None
    elif null_cond is None:
        raise ValueError(
            f"null_cond: required when guidance is not 1 (got {guidance}); it is the condition "
            "of the unguided branch"
        )
    else:
        check_leading_axis("null_cond", null_cond, batch)
        if jax.tree.structure(cond) != jax.tree.structure(null_cond):
            raise ValueError(
                "null_cond: expected the structure of cond, "
                f"{jax.tree.structure(cond)}, got {jax.tree.structure(null_cond)}"
            )
    if cfg_channels is not None:
        check_int("cfg_channels", cfg_channels, minimum=1)
        if cfg_channels > jnp.shape(x)[-1]:
            raise ValueError(
                f"cfg_channels: must be <= the {jnp.shape(x)[-1]} channels of x, "
                f"got {cfg_channels}"
            )
    if sampler.stochastic and key is None:
        raise ValueError("key: required by a stochastic sampler")
    return jnp.asarray(timesteps, jnp.float32), null_cond
