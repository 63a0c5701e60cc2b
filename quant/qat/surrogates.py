r"""Rounding to a grid with a surrogate derivative: the expectation of zeroth-order estimators.

A quantizer with levels :math:`q_0 < \dots < q_n` and thresholds :math:`t_1 < \dots < t_n` is

.. math:: Q(w) = q_0 + \sum_k D_k H(w - t_k), \qquad D_k = q_k - q_{k-1},

whose derivative is 0 almost everywhere. The antithetic, forward and one-point zeroth-order
estimators with perturbation :math:`\delta z` all have the expectation

.. math:: S(w) = \sum_k D_k\, g_\delta(w - t_k),

with :math:`g_\delta` of :mod:`~fadex.quant.qat.perturbations`. So a surrogate of the derivative
*is* a zeroth-order method without its noise, and the straight-through estimator is the degenerate
case of Rademacher perturbations, :math:`S = 1` between the outer levels.

:math:`H(0) = 1` and cells are half-open, ``[t_k, t_{k+1})``.

Source: ZOE-Grad is known to us by its abstract alone; a reconstruction from its claim that
zeroth-order estimates and surrogate gradients are equivalent in expectation. Scales: LSQ,
Esser et al., "Learned Step Size Quantization", ICLR 2020, is the case of STE.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, is_concrete
from fadex.quant.qat.perturbations import RADEMACHER, Kernel, Perturbation

__all__ = ["EDGES", "scaled_round", "surrogate_round", "surrogate_weight"]

EDGES = ("tail", "hold", "pass")

# Longer sums go into a loop of the compiled program instead of into its text.
_UNROLL = 32
# The largest element of a block sits on the outermost level up to a rounding of its scale.
_SLACK = 2.0**-20


class _Static(NamedTuple):
    """What a surrogate knows at trace time; hashable."""

    levels: tuple[float, ...] | None  # None: an array of levels
    thresholds: tuple[float, ...] | None  # None: midpoints, or an array
    midpoints: bool
    perturbation: Perturbation
    bandwidth: str
    delta: float | None  # None: an array
    edge: str


class _Arrays(NamedTuple):
    """The same, where it is data."""

    levels: Any
    thresholds: Any
    delta: Any


def _concrete(name: str, value: Any) -> np.ndarray | None:
    """As float64, or None for a tracer; the numbers along axis 0 must increase."""
    if isinstance(value, jax.core.Tracer):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "iufV" or not np.isfinite(array := array.astype(np.float64)).all():
        raise ValueError(f"{name}: expected finite real numbers, got {value!r}")
    if array.ndim and (np.diff(array, axis=0) <= 0).any():
        raise ValueError(f"{name}: must increase along the first axis, got {value!r}")
    return array


def _describe(levels, thresholds, kernel, edge) -> tuple[_Static, _Arrays]:
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel: expected a Kernel such as gaussian(0.35), got {kernel!r}")
    if kernel.scheduled:
        raise ValueError(
            "kernel: delta is a schedule; take kernel.at(count), or zoe_surrogate, which counts"
        )
    check_choice("edge", edge, EDGES)
    if np.ndim(levels) < 1 or np.shape(levels)[0] < 2:
        raise ValueError(
            f"levels: expected at least 2 along the first axis, got shape {np.shape(levels)}"
        )
    known = _concrete("levels", levels)
    cuts = None if thresholds is None else _concrete("thresholds", thresholds)
    if thresholds is not None and np.shape(thresholds)[:1] != (np.shape(levels)[0] - 1,):
        raise ValueError(
            f"thresholds: expected {np.shape(levels)[0] - 1} along the first axis for "
            f"{np.shape(levels)[0]} levels, got shape {np.shape(thresholds)}"
        )
    fixed = known is not None and known.ndim == 1
    fixed &= thresholds is None or (cuts is not None and cuts.ndim == 1)
    delta = 1.0 if kernel.delta is None else kernel.delta
    delta = delta if isinstance(delta, float) else None
    static = _Static(
        tuple(known.tolist()) if fixed else None,
        tuple(cuts.tolist()) if fixed and cuts is not None else None,
        thresholds is None, kernel.perturbation, kernel.bandwidth, delta, edge,
    )  # fmt: skip
    arrays = _Arrays(
        None if fixed else levels, None if fixed else thresholds,
        None if delta is not None else kernel.delta,
    )  # fmt: skip
    return static, arrays


def _work_dtype(w: jax.Array) -> Any:
    return jnp.promote_types(w.dtype, jnp.float32)


def _grid(static: _Static, arrays: _Arrays, dtype: Any) -> tuple[Any, Any]:
    """Levels and thresholds: float64 NumPy where static, else arrays of the working dtype."""
    if static.levels is not None:
        levels = np.array(static.levels)
        if static.thresholds is not None:
            return levels, np.array(static.thresholds)
    else:
        levels = jnp.asarray(arrays.levels, dtype)
        if arrays.thresholds is not None:
            return levels, jnp.asarray(arrays.thresholds, dtype)
    return levels, (levels[1:] + levels[:-1]) / 2


def _round_value(static: _Static, arrays: _Arrays, w: jax.Array) -> jax.Array:
    """``Q(w)`` in the working dtype."""
    dtype = _work_dtype(w)
    x = w.astype(dtype)
    levels, thresholds = _grid(static, arrays, dtype)
    n = levels.shape[0] - 1
    if n > _UNROLL and static.levels is not None:
        # Each element reads one level: a search, not n comparisons.
        index = jnp.searchsorted(jnp.asarray(thresholds, dtype), x, side="right")
        return jnp.where(jnp.isnan(x), x, jnp.asarray(levels, dtype)[index])
    shape = jnp.broadcast_shapes(x.shape, levels.shape[1:])
    out = jnp.broadcast_to(jnp.asarray(levels[0], dtype), shape)
    for k in range(n):
        passed = x >= jnp.asarray(thresholds[k], dtype)
        out = jnp.where(passed, jnp.asarray(levels[k + 1], dtype), out)
    # Comparisons with NaN would make it a level.
    return jnp.where(jnp.isnan(x), x, out)


def _weight_value(static: _Static, arrays: _Arrays, w: jax.Array) -> jax.Array:
    """``S(w)`` in the working dtype."""
    dtype = _work_dtype(w)
    x = w.astype(dtype)
    levels, thresholds = _grid(static, arrays, dtype)
    low, high = (jnp.asarray(levels[k], dtype) for k in (0, -1))
    exact_ste = (
        static.perturbation is RADEMACHER and static.bandwidth == "relative"
        and static.delta == 1.0 and static.midpoints
    )  # fmt: skip
    if exact_ste:
        # The rectangles tile [q_0, q_n): no sum whose thresholds are rounded.
        total = ((x >= low) & (x < high)).astype(dtype)
    else:
        total = _sum_kernels(static, arrays, x, levels, thresholds)
    if static.edge != "tail":
        first, last = (jnp.asarray(thresholds[k], dtype) for k in (0, -1))
        held = (x >= last) | (x < first)
        if static.edge == "hold":
            held &= (x <= high + _SLACK * jnp.abs(high)) & (x >= low - _SLACK * jnp.abs(low))
        total = jnp.where(held, jnp.ones((), dtype), total)
    return jnp.where(jnp.isnan(x), x, total)


def _sum_kernels(static, arrays, x, levels, thresholds) -> jax.Array:
    dtype, tail = x.dtype, static.perturbation.tail
    delta = static.delta
    if delta is None:
        delta = jnp.asarray(arrays.delta, dtype)
        delta = jnp.where(delta > 0, delta, jnp.nan)  # make_kernel could not see it
    jumps = levels[1:] - levels[:-1]

    def term(t, jump):
        """D/d F((w - t)/d), with d the radius of this threshold."""
        t = jnp.asarray(t, dtype)
        if static.bandwidth == "absolute":
            return jnp.asarray(jump / delta, dtype) * tail((x - t) / jnp.asarray(delta, dtype))
        half = jnp.asarray(delta * jump / 2, dtype)
        # A codebook that repeats a level has cells of width 0: no jump, no bump.
        some = ~(half <= 0)  # NaN stays
        bump = jnp.asarray(2 / delta, dtype) * tail((x - t) / jnp.where(some, half, 1))
        return jnp.where(some, bump, 0)

    n = jumps.shape[0]
    reach = _reach(static, levels, thresholds)
    if reach is not None and 2 * reach + 1 < n:
        # Uniform grid: the others are too far to be felt.
        step, start, jump = float(jumps[0]), float(thresholds[0]), float(jumps[0])
        centre = jnp.round((x - start) / step)
        total = jnp.zeros((), dtype)
        for offset in range(-reach, reach + 1):
            k = centre + offset
            inside = (k >= 0) & (k <= n - 1)
            total = total + jnp.where(inside, term(start + k * step, jump), 0)
        return total
    if n <= _UNROLL:
        return functools.reduce(jnp.add, (term(thresholds[k], jumps[k]) for k in range(n)))
    cuts = jnp.asarray(thresholds, dtype)
    gaps = jnp.asarray(jumps, dtype)
    shape = jnp.broadcast_shapes(x.shape, cuts.shape[1:], jnp.shape(delta))

    def body(total, cut):
        return total + term(*cut), None

    return jax.lax.scan(body, jnp.zeros(shape, dtype), (cuts, gaps))[0]


def _reach(static: _Static, levels: Any, thresholds: Any) -> int | None:
    """How many thresholds to either side matter, on a uniform grid that is known, else None."""
    if static.levels is None or static.delta is None or math.isinf(static.perturbation.reach):
        return None
    jumps = np.concatenate([np.diff(levels), np.diff(thresholds)])
    if not np.allclose(jumps, jumps[0], rtol=1e-12, atol=0):
        return None
    radius = static.delta * (1 if static.bandwidth == "absolute" else jumps[0] / 2)
    return math.ceil(static.perturbation.reach * radius / jumps[0])


def surrogate_weight(
    w: Any, levels: Any, thresholds: Any = None, *, kernel: Kernel, edge: str = "tail"
) -> jax.Array:
    r"""The surrogate's weight :math:`S(w) = \sum_k D_k\, g_\delta(w - t_k)`.

    Its integral over the line is :math:`q_n - q_0`. On an unclipped grid of step ``s`` with a
    Gaussian it is :math:`1 + 2 \sum_m \cos(2 \pi m (w - t) / s)\, e^{-2 \pi^2 m^2 \delta^2/s^2}`:
    a ripple of 1.4 % at ``delta/s = 0.5``, of 34 % at 0.3.

    The thresholds are summed one after the other, so memory is that of ``w``; on a uniform grid
    only those within the perturbation's reach are (6 radii for a Gaussian).

    Args:
      w: weights in code units (already divided by their scale), real, any shape.
      levels: ``[n + 1]``, increasing; or ``[n + 1, ...]`` with trailing axes that broadcast
        against ``w``, for codebooks that differ from block to block.
      thresholds: ``[n]`` or ``[n, ...]``, increasing; by default the midpoints.
      kernel: such as :func:`~fadex.quant.qat.gaussian`.
      edge: what happens at the outer levels. ``'tail'``: the theorem, half a bump. ``'hold'``:
        1 from the outermost threshold to the outermost level, so the largest weight of a block
        that was scaled by it keeps learning. ``'pass'``: 1 beyond the outermost thresholds, for
        scales that are rounded, which leave the largest weights outside of the grid.

    Returns:
      The shape of ``w``, float32 (float64 for float64), whatever 16-bit type ``w`` has. NaN where
      ``w`` is.

    Raises:
      ValueError: levels or thresholds that do not increase or do not fit, an unknown ``edge``,
        a kernel whose ``delta`` is a schedule.
      TypeError: no kernel.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.quant.qat import gaussian, surrogate_weight
      >>> levels = [-1.5, -0.5, 0.5, 1.5]
      >>> s = surrogate_weight(jnp.array([0.0, 0.5, 1.5]), levels, kernel=gaussian(0.25))
      >>> print([f"{x:.3f}" for x in s.tolist()])  # on a threshold, on a level, at the end
      ['1.597', '0.432', '0.216']
    """
    static, arrays = _describe(levels, thresholds, kernel, edge)
    return _weight_value(static, arrays, jnp.asarray(w, _real(w)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _surrogate_round(static, arrays, w):
    return _round_value(static, arrays, w).astype(w.dtype)


@_surrogate_round.defjvp
def _surrogate_round_jvp(static, primals, tangents):
    arrays, w = primals
    out = _surrogate_round(static, arrays, w)
    weight = _weight_value(static, arrays, w)
    # The levels and the radius get no gradient: the theorem is one for the weights.
    slope = weight * tangents[1].astype(weight.dtype)
    return out, jnp.broadcast_to(slope, out.shape).astype(out.dtype)


def surrogate_round(
    w: Any, levels: Any, thresholds: Any = None, *, kernel: Kernel, edge: str = "tail"
) -> jax.Array:
    r"""Round to the levels; differentiate as if the derivative were :func:`surrogate_weight`.

    A ``custom_jvp``, so forward and reverse mode, ``vmap``, ``scan`` and ``jax.checkpoint`` all
    work. Levels, thresholds and the kernel's radius receive no gradient.

    Args, errors: as :func:`surrogate_weight`.

    Returns:
      ``Q(w)`` in the dtype of ``w``; NaN, as is the derivative, where ``w`` is.

    Example:
      >>> import jax
      >>> from fadex.quant.qat import gaussian, surrogate_round
      >>> q = lambda w: surrogate_round(w, [-1.0, 0.0, 1.0], kernel=gaussian(0.5))
      >>> print(q(0.6), round(float(jax.grad(q)(0.6)), 4))
      1.0 0.853
    """
    static, arrays = _describe(levels, thresholds, kernel, edge)
    return _surrogate_round(static, arrays, jnp.asarray(w, _real(w)))


def scaled_round(
    w: Any,
    scale: Any,
    levels: Any,
    thresholds: Any = None,
    *,
    kernel: Kernel,
    edge: str = "tail",
    gradient_scale: Any = 1.0,
) -> jax.Array:
    r"""Round to a grid whose scale is learned: :math:`Q(w) = s\,R(w/s)`.

    .. math:: \frac{\partial Q}{\partial w} = S(w/s), \qquad
              \frac{\partial Q}{\partial s} = R(w/s) - \frac ws\, S(w/s).

    With :func:`~fadex.quant.qat.ste` the second is the gradient of LSQ.

    Args:
      w: weights, real, any shape.
      scale: :math:`s > 0`, broadcasting against ``w``. Where a traced one has become zero,
        negative or infinite, the result is NaN.
      levels, thresholds, kernel, edge: in code units, as :func:`surrogate_weight`.
      gradient_scale: factor on the gradient to ``scale``; LSQ takes
        :math:`1/\sqrt{N q_{max}}` for ``N`` weights that share it.

    Returns:
      The rounded weights, in the dtype of ``w``.

    Raises:
      ValueError: a ``scale`` that is known and not positive; as :func:`surrogate_weight`.
      TypeError: as :func:`surrogate_weight`.

    Example:
      >>> import jax
      >>> from fadex.quant.qat import scaled_round, ste
      >>> q = lambda s: scaled_round(0.8, s, [-1.0, 0.0, 1.0], kernel=ste())
      >>> print(round(float(jax.grad(q)(1.0)), 4), float(jax.grad(q)(0.5)))  # 1 - 0.8; clipped
      0.2 1.0
    """
    w = jnp.asarray(w, _real(w))
    if is_concrete(scale):
        known = np.asarray(scale, np.float64)
        if not (np.isfinite(known) & (known > 0)).all():
            raise ValueError(f"scale: must be positive and finite everywhere, got {scale!r}")
    scale = jnp.asarray(scale, _work_dtype(w))
    scale = jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.nan)
    held = jax.lax.stop_gradient(scale)
    scale = held + gradient_scale * (scale - held)
    static, arrays = _describe(levels, thresholds, kernel, edge)
    out = scale * _surrogate_round(static, arrays, w.astype(scale.dtype) / scale)
    return out.astype(w.dtype)


def _real(w: Any) -> Any:
    """The dtype of ``w``, float32 for Python numbers; raises for what is not real."""
    dtype = jnp.result_type(w if hasattr(w, "dtype") else jnp.asarray(w))
    if not jnp.issubdtype(dtype, jnp.floating):
        if isinstance(w, (int, float, list, tuple)) and jnp.issubdtype(dtype, jnp.integer):
            return jnp.float32
        raise ValueError(f"w: expected a real floating-point array, got dtype {dtype}")
    return dtype
