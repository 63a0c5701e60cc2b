r"""Classifier-free guidance around a denoiser, with or without features.

.. math:: \hat v = v_\varnothing + g\,(v_c - v_\varnothing)

Both branches run as one batch of ``2B`` samples, conditional first. Features taken inside
the model keep that doubled axis: each branch has cache entries of its own, and neither can
see the other's.

Guidance may be limited to an interval of times (Kynkäänniemi et al., arXiv 2404.07724). Outside
of it the plain model runs on ``B`` samples: a conditional whose predicate depends on the step
alone stays one under ``vmap``, so the null branch is really left out.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
      interval: float32 ``[2]``, the lowest and the highest time that is guided, or None.

    Times ``t`` of the methods are scalars, or ``[B, 1, ...]`` with one time per sample.
    """

    denoiser: Denoiser
    params: Any
    cond: Any
    null_cond: Any
    guidance: jax.Array
    cfg_channels: int | None
    interval: jax.Array | None = None

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        """Guided output at ``(x, t)``, shaped like ``x``."""
        if self.null_cond is None or self.interval is None:
            return self._apply(x, t)
        alone = self._replace(null_cond=None)
        return jax.lax.cond(jnp.any(self._inside(t)), self._apply, alone._apply, x, t)

    def _apply(self, x: jax.Array, t: jax.Array) -> jax.Array:
        return self._combine(self.denoiser.apply(self.params, *self._inputs(x, t)), x, t)

    def with_features(self, x: jax.Array, t: jax.Array, site: str) -> tuple[jax.Array, jax.Array]:
        """Guided output and the feature at ``site`` (both branches)."""
        inputs = self._inputs(x, t)
        out, feats = self.denoiser.with_features(self.params, *inputs, (site,))
        return self._combine(out, x, t), feats[site]

    def from_features(self, x: jax.Array, t: jax.Array, site: str, feature: Any) -> jax.Array:
        """Guided output of the cheap pass."""
        inputs = self._inputs(x, t)
        out = self.denoiser.from_features(self.params, *inputs, {site: feature})
        return self._combine(out, x, t)

    def from_history(
        self, x: jax.Array, t: jax.Array, weights: jax.Array, history: jax.Array
    ) -> jax.Array:
        """Guided output of the fused cheap pass."""
        inputs = self._inputs(x, t)
        return self._combine(
            self.denoiser.from_history(self.params, *inputs, weights, history), x, t
        )

    def _inputs(self, x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        cond, t = self.cond, jnp.asarray(t, jnp.float32)
        t = t.reshape(x.shape[0]) if t.ndim else t
        if self.null_cond is not None:
            double = lambda a, b: jnp.concatenate([a, b], axis=0)
            x = double(x, x)
            cond = jax.tree.map(double, cond, self.null_cond)
            t = double(t, t) if t.ndim else t
        return x, t if t.ndim else jnp.full((x.shape[0],), t, jnp.float32), cond

    def _inside(self, t: jax.Array) -> jax.Array:
        return (self.interval[0] <= t) & (t <= self.interval[1])

    def _combine(self, out: jax.Array, x: jax.Array, t: jax.Array | None = None) -> jax.Array:
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
        if self.interval is not None:
            if t is None:
                raise ValueError("guidance_interval: not available in this pass of the model")
            guided = jnp.where(self._inside(t), guided, cond)
        if self.cfg_channels is None:
            return guided
        return jnp.concatenate(
            [guided[..., : self.cfg_channels], cond[..., self.cfg_channels :]], axis=-1
        )

    def begin(self, x: jax.Array, t: jax.Array, blocks: int) -> Any:
        """Hidden state behind the first ``blocks`` blocks (both branches)."""
        return self.denoiser.begin(self.params, *self._inputs(x, t), blocks)

    def finish(
        self, x: jax.Array, t: jax.Array, hidden: Any, blocks: int
    ) -> tuple[jax.Array, Any]:
        """Guided output from :meth:`begin` on, and the residual of those blocks."""
        inputs = self._inputs(x, t)
        out, residual = self.denoiser.finish(self.params, *inputs, hidden, blocks)
        return self._combine(out, x, t), residual

    def resume(self, x: jax.Array, t: jax.Array, hidden: Any, residual: Any) -> jax.Array:
        """Guided output of ``hidden`` with a residual kept from an earlier step."""
        inputs = self._inputs(x, t)
        return self._combine(self.denoiser.resume(self.params, *inputs, hidden, residual), x, t)

    def modulated(self, x: jax.Array, t: jax.Array) -> Any:
        """Modulated input of the first block (both branches)."""
        return self.denoiser.modulated(self.params, *self._inputs(x, t))

    def with_attention(
        self, x: jax.Array, t: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Guided output, the ``"module"`` feature, and the attention that tokens receive."""
        inputs = self._inputs(x, t)
        out, feats = self.denoiser.with_features(self.params, *inputs, ("module", "attention"))
        return self._combine(out, x, t), feats["module"], feats["attention"]

    def refresh(
        self, x: jax.Array, t: jax.Array, feature: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Guided output of the cheap pass with some MLPs computed anew, and its feature."""
        inputs = self._inputs(x, t)
        out, feature = self.denoiser.refresh(self.params, *inputs, feature, tokens)
        return self._combine(out, x, t), feature


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
    _check_times(timesteps, num_steps)
    if jnp.ndim(x) < 2 or 0 in jnp.shape(x):
        raise ValueError(
            f"x: expected at least one sample in an array [B, ...], got shape {jnp.shape(x)}"
        )
    batch = jnp.shape(x)[0]
    timesteps = jnp.asarray(timesteps, jnp.float32)
    if timesteps.ndim == 2:
        if timesteps.shape[0] != batch:
            raise ValueError(
                f"timesteps: expected [S + 1], or a row for each of the {batch} samples, got "
                f"shape {timesteps.shape}"
            )
        timesteps = timesteps.T.reshape(timesteps.shape[::-1] + (1,) * (jnp.ndim(x) - 1))
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
    return timesteps, null_cond


def _check_times(timesteps: Any, num_steps: int | None) -> None:
    shape = np.shape(timesteps)
    want = None if num_steps is None else num_steps + 1
    count = "num_steps + 1" if want is None else f"num_steps + 1 = {want}"
    if len(shape) not in (1, 2) or shape[-1] < 2 or (want is not None and shape[-1] != want):
        raise ValueError(
            f"timesteps: need {count} strictly monotone values, got shape {tuple(shape)}"
        )
    if not is_concrete(timesteps):
        return
    values = np.asarray(timesteps, np.float64)
    gaps = np.diff(np.atleast_2d(values))
    bad = np.flatnonzero(~(np.all(gaps < 0, axis=1) | np.all(gaps > 0, axis=1)))
    if bad.size:
        where = "" if values.ndim == 1 else f"[{bad[0]}]"
        raise ValueError(
            f"timesteps{where}: need num_steps + 1 = {shape[-1]} strictly monotone values, got "
            f"{np.atleast_2d(values)[bad[0]].tolist()}"
        )


def check_mesh(x: Any) -> None:
    """Raise ValueError for latents on a mesh whose shardings are part of the types."""
    sharding = jax.typeof(x).sharding
    explicit = jax.sharding.AxisType.Explicit in (sharding.mesh.axis_types or ())
    if explicit and any(axis is not None for axis in sharding.spec):
        raise ValueError(
            "x: lies on a mesh with Explicit axes; make the mesh with axis_types="
            "(jax.sharding.AxisType.Auto,) for each axis, or call through "
            "jax.sharding.auto_axes(run, out_sharding=jax.typeof(x).sharding)"
        )


def check_interval(guidance_interval: Any, null_cond: Any) -> jax.Array | None:
    """The interval as a float32 operand ``[2]``; None when every time or none is guided."""
    if guidance_interval is None:
        return None
    _check_bounds(guidance_interval)
    return None if null_cond is None else jnp.asarray(guidance_interval, jnp.float32)


def _check_bounds(guidance_interval: Any) -> None:
    if np.shape(guidance_interval) != (2,):
        raise ValueError(
            f"guidance_interval: expected two times (low, high), got {guidance_interval!r}"
        )
    if is_concrete(guidance_interval) and not guidance_interval[0] <= guidance_interval[1]:
        raise ValueError(f"guidance_interval: expected low <= high, got {guidance_interval!r}")


def guidance_breaks(timesteps: Any, guidance_interval: Any) -> tuple[int, ...]:
    """Steps at which guidance sets in or ends, i.e. where the guided output jumps.

    A cache of the guided output must compute them, and no forecast may look back over one:
    ``make_plan(schedule.with_breaks(guidance_breaks(timesteps, interval)), rule)``.

    Args:
      timesteps: ``[S + 1]``, or ``[B, S + 1]`` (then the steps of all samples), concrete.
      guidance_interval: ``(low, high)``; guidance applies where ``low <= t <= high``.

    Returns:
      Steps in ``[1, S)``, rising.

    Raises:
      ValueError: a bad argument, by name.

    Example:
      >>> from fadex.sampling import guidance_breaks, uniform_times
      >>> guidance_breaks(uniform_times(10), (0.25, 0.75))
      (3, 8)
    """
    _check_times(timesteps, None)
    _check_bounds(guidance_interval)
    low, high = np.asarray(guidance_interval, np.float32)
    times = np.atleast_2d(np.asarray(timesteps, np.float32))[:, :-1]
    inside = (low <= times) & (times <= high)
    return tuple(int(s) + 1 for s in np.flatnonzero(np.any(np.diff(inside, axis=1), axis=0)))
