r"""BeziCast: Bezier trajectories through cached features, with a guardrail.

Reconstruction from the abstract of BeziCast (no paper or code was public): what it states is a
low-order Bezier curve in time, Tikhonov-stabilised control points, equivalent weights, and a
guard that softly pulls risky forecasts to a simplex-projected one. Steps marked [design] are
ours.

The last ``K`` anchors :math:`a_0 > \dots > a_{K-1}` get the parameter [design]

.. math:: u_j = \frac{a_j - a_{K-1}}{s - a_{K-1}},

which puts the oldest at 0 and the target ``s`` at 1, so that the forecast is the last control
point. Control points minimise

.. math:: \lVert B c - F \rVert^2 + \lambda \lVert R c \rVert^2, \qquad
   B_{ji} = \tbinom{d}{i} u_j^i (1 - u_j)^{d-i},

with ``R`` the second difference of control points (the first for ``d = 1``) [design]:
constants, and for ``d >= 2`` straight lines, are reproduced for every ``lambda``. Being linear
in ``F``, the fit is a row of weights

.. math:: w = e_d^\top (B^\top B + \lambda R^\top R)^{-1} B^\top, \qquad \sum_j w_j = 1.

The guard knows the risk of a row, :math:`r = \lVert w \rVert_1` (1 exactly when the forecast
lies in the convex hull of the cached features), and the conservative row :math:`w_D`, the
Euclidean projection of ``w`` on the simplex:

.. math:: \gamma = 1 - e^{-\max(0,\, r - r_0) / \ell}, \qquad
   w \leftarrow (1 - \gamma)\, w + \gamma\, w_D.

With ``guard="state"`` the risk of each sample is measured on its own features,

.. math:: r_b = \frac{\lVert \hat F - F_D \rVert}{\lVert F(a_0) - F(a_1) \rVert},

both norms being quadratic forms in the ``K x K`` Gram matrix of the cached features, which is
renewed at anchors only: a skipped step costs ``O(B K^2)`` operations more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.plan import (
    Forecaster,
    ForecastPlan,
    StepInfo,
    WeightRule,
    make_plan,
    plan_forecaster,
)
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_choice, check_int, check_real, is_concrete


class GuardConfig(NamedTuple):
    r"""When and how softly the guard bites.

    Attributes:
      r0: risk up to which a forecast stays as it is.
      scale: :math:`\ell`; at a risk of ``r0 + scale`` the forecast has moved 63 % of the way
        to its simplex projection.
    """

    r0: float = 3.0
    scale: float = 8.0


#: Guard of ``guard="state"``, whose risk is in units of the last observed change.
STATE_GUARD = GuardConfig(r0=1.5, scale=2.0)


def simplex_projection(w: Any) -> Any:
    r"""Euclidean projection on the probability simplex, over the last axis.

    .. math:: \arg\min_{p \ge 0,\ \sum p = 1} \lVert p - w \rVert_2

    by sorting (Held, Wolfe & Crowder 1974; Duchi et al. 2008). NumPy in, NumPy out; JAX arrays
    may be traced.

    Example:
      >>> import numpy as np
      >>> from fadex.caching import simplex_projection
      >>> simplex_projection(np.array([1.5, -0.5])).tolist()
      [1.0, 0.0]
    """
    xp = jnp if isinstance(w, jax.Array) else np
    w = xp.asarray(w)
    if w.ndim == 0 or w.shape[-1] == 0:
        raise ValueError(f"w: expected at least one weight on the last axis, got shape {w.shape}")
    descending = -xp.sort(-w, axis=-1)
    count = xp.arange(1, w.shape[-1] + 1)
    excess = xp.cumsum(descending, axis=-1) - 1.0
    # The support is a prefix of the sorted weights; its length is how often this holds.
    support = xp.sum(descending * count > excess, axis=-1, keepdims=True)
    shift = xp.take_along_axis(excess, support - 1, axis=-1) / support
    return xp.maximum(w - shift, 0.0)


def _fit_weights(
    pos: tuple[int, ...], s: float, degree: int, ridge: float, toward: str
) -> np.ndarray:
    """Equivalent weights of the Tikhonov fit through all of ``pos``."""
    nodes = np.asarray(pos, np.float64)
    if s == nodes[-1]:
        raise ValueError(f"s: must differ from the oldest anchor of {pos}, got {s}")
    if len(nodes) == 1:
        return np.ones(1)
    if len(set(pos)) < len(pos):
        raise ValueError(f"schedule: anchors must be distinct, got {pos}")
    d = min(degree, len(nodes) - 1)
    u = (nodes - nodes[-1]) / (s - nodes[-1])
    basis = np.stack(
        [math.comb(d, i) * u**i * (1.0 - u) ** (d - i) for i in range(d + 1)], axis=1
    )
    scale = math.sqrt(ridge)
    if toward == "line":
        penalty = np.diff(np.eye(d + 1), n=2 if d >= 2 else 1, axis=0)
        target = np.zeros((len(penalty), len(nodes)))
    else:
        penalty = np.eye(d + 1)
        target = np.zeros((d + 1, len(nodes)))
        target[:, 0] = 1.0
    # Stacked rows and an orthogonal solver: the normal equations would square the condition.
    left = np.concatenate([basis, scale * penalty])
    right = np.concatenate([np.eye(len(nodes)), scale * target])
    return np.linalg.lstsq(left, right, rcond=None)[0][-1]


def _guarded(w: np.ndarray, guard: GuardConfig) -> np.ndarray:
    risk = np.abs(w).sum()
    pull = -math.expm1(-max(0.0, risk - guard.r0) / guard.scale)
    return (1.0 - pull) * w + pull * simplex_projection(w)


def _weights(pos, s, *, degree, window, ridge, guard, toward):
    used = pos[:window]
    w = _fit_weights(used, s, degree, ridge, toward)
    if guard is not None:
        w = _guarded(w, guard)
    return np.pad(w, (0, len(pos) - len(used)))


def _check(degree, window, ridge, guard, toward):
    if guard is not None:
        if not isinstance(guard, tuple):
            raise TypeError(
                f"guard: expected a GuardConfig, None or 'state', got {type(guard).__name__}"
            )
        guard = GuardConfig(*guard)
        check_real("guard.r0", guard.r0, minimum=0.0)
        check_real("guard.scale", guard.scale, minimum=0.0, exclusive=True)
    return dict(
        degree=check_int("degree", degree, minimum=1),
        window=check_int("window", window, minimum=2),
        ridge=check_real("ridge", ridge, minimum=0.0),
        guard=guard,
        toward=check_choice("toward", toward, ("line", "newest")),
    )


def bezier_weights(
    pos: tuple[int, ...],
    s: int,
    *,
    degree: int = 2,
    window: int = 3,
    ridge: float = 5e-3,
    guard: GuardConfig | None = GuardConfig(),
    toward: str = "line",
) -> np.ndarray:
    r"""Equivalent weights ``[len(pos)]`` of one Bezier forecast, float64.

    Args:
      pos: anchors, newest first; those beyond ``window`` weigh nothing.
      s: the step to forecast.
      degree: ``d`` of the curve, lowered to ``K - 1`` where fewer anchors are known.
      window: ``K``, independent of the degree: more anchors than control points average.
      ridge: :math:`\lambda`. Its default and the guard's were tuned together, on other noise
        than the figures in the README; for another ridge, above all for none, tune the guard
        with it (a bare quadratic through three snapshots has risks that it would cut too hard).
      guard: a :class:`GuardConfig`, or None for the bare fit.
      toward: what a large ridge pulls to: ``"line"`` (curvature of the control polygon) or
        ``"newest"`` (all control points equal to the newest feature, i.e. reuse).

    Raises:
      ValueError: ``degree < 1``, ``window < 2``, ``ridge < 0``, repeated anchors.

    Example:
      >>> from fadex.caching import bezier_weights
      >>> bezier_weights((10, 6, 2), 12, ridge=0.0, guard=None).round(6).tolist()
      [1.875, -1.25, 0.375]
    """
    options = _check(degree, window, ridge, guard, toward)
    return _weights(tuple(pos), s, **options)


def bezicast(
    degree: int = 2,
    window: int = 3,
    ridge: float = 5e-3,
    guard: GuardConfig | None = GuardConfig(),
    toward: str = "line",
) -> WeightRule:
    """BeziCast as a weight rule for :func:`~fadex.caching.make_plan`.

    Arguments as in :func:`bezier_weights`.

    Example:
      >>> from fadex.caching import bezicast, make_plan, uniform_schedule
      >>> make_plan(uniform_schedule(12, 4), bezicast()).history
      3
    """
    options = _check(degree, window, ridge, guard, toward)
    name = f"bezicast{degree}" + ("" if guard is not None else " unguarded")
    return WeightRule(name, options["window"], functools.partial(_weights, **options))


def bezicast_plan(
    schedule: CacheSchedule,
    *,
    degree: int = 2,
    window: int = 3,
    ridge: float = 5e-3,
    guard: GuardConfig | str | None = GuardConfig(),
    toward: str = "line",
    state_guard: GuardConfig = STATE_GUARD,
    site: str = "output",
    cache_dtype: Any = None,
) -> ForecastPlan | Forecaster:
    """BeziCast over a schedule, ready for :func:`~fadex.caching.cached_sample`.

    Args:
      schedule: which steps are computed.
      degree, window, ridge, toward: as in :func:`bezier_weights`.
      guard: a :class:`GuardConfig` for the guard in the table (a :class:`ForecastPlan` comes
        back), None for none, or ``"state"`` for the guard that looks at each sample's features
        (a :class:`~fadex.caching.Forecaster` comes back).
      state_guard: of ``guard="state"``.
      site: where features are cached. ``guard="state"`` depends on it (``"module"`` keeps a
        risk for each feature and sample); a static plan serves every site.
      cache_dtype: of ``guard="state"``, the dtype of the snapshots.

    Raises:
      ValueError: a bad argument, by name, or one that the chosen guard would not use.

    Example:
      >>> from fadex.caching import bezicast_plan, uniform_schedule
      >>> bezicast_plan(uniform_schedule(12, 4)).weights.shape
      (12, 3)
    """
    check_choice("site", site, ("output", "crf", "module"))
    if isinstance(guard, str):
        check_choice("guard", guard, ("state",))
        _check(degree, window, ridge, state_guard, toward)
        bare = make_plan(schedule, bezicast(degree, window, ridge, None, toward))
        axes = 2 if site == "module" else 1
        return state_guarded(bare, GuardConfig(*state_guard), axes=axes, cache_dtype=cache_dtype)
    if cache_dtype is not None or state_guard != STATE_GUARD:
        raise ValueError(
            "cache_dtype, state_guard: belong to guard='state'; a static plan takes its "
            f"cache_dtype in cached_sample (got guard={guard!r})"
        )
    return make_plan(schedule, bezicast(degree, window, ridge, guard, toward))


class GuardedState(NamedTuple):
    """Snapshots and, for each sample, the Gram matrix of their differences to the newest."""

    ring: Any  # RingState: history [K, *feature.shape]
    gram: jax.Array  # float32 [*samples, K, K], both axes in ring order


class _Row(NamedTuple):
    """One step's operands, columns in ring order ``[K]``."""

    weights: jax.Array
    simplex: jax.Array
    change: jax.Array  # +1 at the newest snapshot, -1 at the one before


@dataclasses.dataclass(frozen=True)
class _GuardedInit:
    """Comparable, so that equal forecasters share a program."""

    inner: Any
    axes: int

    @property
    def size(self) -> int:
        return self.inner.size

    def __call__(self, feature: Any) -> GuardedState:
        samples = feature.shape[: self.axes]
        gram = jnp.zeros((*samples, self.size, self.size), jnp.float32)
        return GuardedState(self.inner(feature), gram)


@dataclasses.dataclass(frozen=True)
class _GuardedObserve:
    inner: Any
    axes: int

    def __call__(self, state: GuardedState, feature: jax.Array, info: StepInfo) -> GuardedState:
        ring = self.inner(state.ring, feature, info)
        # Weights of a difference sum to zero, so the Gram matrix of differences to the newest
        # snapshot gives the same forms, without the digits that raw features would cancel.
        gaps = ring.history.astype(jnp.float32) - feature.astype(jnp.float32)
        gaps = gaps.reshape(*gaps.shape[: self.axes + 1], -1)
        # The risk is a ratio: a common factor of each sample keeps squares in range.
        size = jax.lax.stop_gradient(jnp.abs(gaps).max((0, -1), keepdims=True))
        gaps = gaps / jnp.where(size > 0, size, 1.0)
        gram = jnp.einsum("i...m,j...m->...ij", gaps, gaps, precision="highest")
        return GuardedState(ring, gram)


def _root(square: jax.Array) -> jax.Array:
    """Square root with a derivative of 0 at 0 (an unfilled window, a constant feature)."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


@dataclasses.dataclass(frozen=True)
class _GuardedPredict:
    guard: GuardConfig

    def __call__(self, state: GuardedState, info: StepInfo) -> jax.Array:
        row: _Row = info.row
        history = state.ring.history
        form = lambda v: jnp.einsum("...ij,i,j->...", state.gram, v, v, precision="highest")
        moved, change = _root(form(row.weights - row.simplex)), _root(form(row.change))
        risk = moved / jnp.where(change > 0, change, 1.0)
        pull = -jnp.expm1(-jnp.maximum(risk - self.guard.r0, 0.0) / self.guard.scale)
        weights = row.weights + pull[..., None] * (row.simplex - row.weights)  # [*samples, K]
        total = 0.0
        for k in range(history.shape[0]):
            w = weights[..., k]
            w = w.reshape(w.shape + (1,) * (history.ndim - 1 - w.ndim))
            total = total + w * history[k].astype(jnp.float32)
        return total.astype(history.dtype)


def state_guarded(
    plan: ForecastPlan, guard: GuardConfig = STATE_GUARD, *, axes: int = 1, cache_dtype: Any = None
) -> Forecaster:
    """Any static plan with the per-sample guard of this module.

    Args:
      plan: weights ``[S, K]`` without a guard of their own.
      guard: thresholds on the risk, which is in units of the last observed change.
      axes: leading axes of the feature that count as samples: 1 at ``"output"`` and ``"crf"``,
        2 at ``"module"`` (features and samples).
      cache_dtype: dtype of the snapshots.

    Raises:
      ValueError: weights per site, traced weights, or a bad threshold.

    Example:
      >>> from fadex.caching import make_plan, state_guarded, taylorseer, uniform_schedule
      >>> plan = make_plan(uniform_schedule(12, 4), taylorseer(2))
      >>> state_guarded(plan).table.weights.shape
      (12, 3)
    """
    if np.ndim(plan.weights) != 2:
        raise ValueError(f"plan.weights: expected [S, K], got shape {np.shape(plan.weights)}")
    if not is_concrete(plan.weights):
        raise ValueError("plan.weights: must be concrete, their projections are made on the host")
    _check(1, 2, 0.0, guard, "line")
    axes = check_int("axes", axes, minimum=1)
    weights = np.asarray(plan.weights, np.float64)
    simplex, change = np.zeros_like(weights), np.zeros_like(weights)
    for s in plan.schedule.skipped:
        known = len(plan.schedule.history(s, plan.history))
        simplex[s, :known] = simplex_projection(weights[s, :known])
        if known > 1:
            change[s, :2] = 1.0, -1.0
    parts = [plan_forecaster(plan.replace(weights=part), cache_dtype=cache_dtype)
             for part in (weights, simplex, change)]
    inner = parts[0]
    return Forecaster(
        schedule=plan.schedule,
        init=_GuardedInit(inner.init, axes),
        observe=_GuardedObserve(inner.observe, axes),
        predict=_GuardedPredict(GuardConfig(*guard)),
        table=_Row(*(part.table for part in parts)),
        sample_axes=axes,
    )
