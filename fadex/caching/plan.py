r"""Forecast plans: a schedule and a table of weights, made once on the host in float64.

Every linear forecaster returns :math:`\hat F(s) = \sum_{j<K} w_j(s) F(a_j)` with weights that
depend on the schedule (and on offline profiling) but never on the sample. All of them
therefore share one program; only the table differs, and the cleverest table costs as much
at run time as the simplest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.kernels import weighted_sum
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_finite, check_int, is_concrete


class WeightRule(NamedTuple):
    """A static forecaster: ``rule(pos, s) -> w[len(pos)]``.

    Attributes:
      name: for tables.
      history: snapshots ``K`` that the rule asks for; it must cope with fewer.
      weights: the function; ``pos`` are the anchors, newest first, ``s`` the step to forecast.
    """

    name: str
    history: int
    weights: Callable[[tuple[int, ...], int], np.ndarray]

    def __call__(self, pos: tuple[int, ...], s: int) -> np.ndarray:
        return self.weights(pos, s)


class ForecastPlan(flax.struct.PyTreeNode):
    """A schedule (static) with its weights (a leaf).

    Plans pass through ``jit`` and ``vmap``: stacking weights as ``[V, S, K]`` sweeps ``V``
    forecasters of one schedule in one program.

    Attributes:
      schedule: which steps are computed.
      weights: ``[S, K]``, or ``[S, G, K]`` with a row per site of a stacked feature; column
        ``j`` belongs to the ``j``-th newest anchor; rows of anchors are zero.
    """

    schedule: CacheSchedule = flax.struct.field(pytree_node=False)
    weights: Any = None

    @property
    def history(self) -> int:
        """Snapshots ``K``."""
        return self.weights.shape[-1]


class StepInfo(NamedTuple):
    """What a forecaster is told about a step; arrays that arrive as scan operands."""

    step: jax.Array  # int32 []
    t: jax.Array  # float32 []; [B, 1, ...] when every sample has a grid of its own
    slot: jax.Array  # int32 []: ring slot of the newest anchor at or before this step
    row: Any  # this step's row of the forecaster's table


class Forecaster(NamedTuple):
    """A forecaster as pure functions; data-dependent methods have this shape too.

    Attributes:
      schedule: static.
      init: ``init(feature) -> state``, from an example of the feature (only its shape and
        dtype count).
      observe: ``observe(state, feature, info) -> state``, at computed steps.
      predict: ``predict(state, info) -> feature``, at skipped steps.
      table: pytree with leading axis ``S``; its rows arrive as ``info.row``.
      snapshots: ``snapshots(state, info) -> (weights, history)`` where the prediction is a
        weighted sum: lets a model fuse it into its own update. Optional.
      sample_axes: static; leading axes of the feature that ``init`` and ``observe`` keep apart,
        for methods that look at each sample. None where the features' values do not count.
        ``cached_sample`` refuses a forecaster made for another site by it.
    """

    schedule: CacheSchedule
    init: Callable[[Any], Any]
    observe: Callable[[Any, Any, StepInfo], Any]
    predict: Callable[[Any, StepInfo], Any]
    table: Any = ()
    snapshots: Callable[[Any, StepInfo], tuple[jax.Array, jax.Array]] | None = None
    sample_axes: int | None = None


def make_plan(
    schedule: CacheSchedule,
    forecaster: WeightRule | Callable[[tuple[int, ...], int], np.ndarray],
    *,
    history: int | None = None,
    breaks: Iterable[int] = (),
) -> ForecastPlan:
    """Tabulate a weight rule over a schedule, in float64 on the host.

    Args:
      schedule: from :func:`~fadex.caching.uniform_schedule` or ``custom_schedule``.
      forecaster: a :class:`WeightRule`, or any function ``(pos, s) -> w[len(pos)]``.
      history: snapshots ``K`` to keep; by default what the rule asks for (3 for a bare
        function).
      breaks: anchors over which no forecast looks back, beside those of the schedule. See
        :func:`~fadex.sampling.guidance_breaks`; ``schedule.with_breaks`` adds the anchors too.

    Raises:
      ValueError: ``history < 1`` or below what the rule needs, a row of the wrong length,
        weights that are not finite, or a break that is not an anchor.

    Example:
      >>> from fadex.caching import make_plan, taylorseer, uniform_schedule
      >>> plan = make_plan(uniform_schedule(12, 4), taylorseer(1))
      >>> plan.weights[8].tolist()  # anchors 6 and 2: two steps past a gap of four
      [1.5, -0.5]
    """
    breaks = {check_int("breaks", b) for b in breaks}
    schedule = schedule._replace(breaks=tuple(sorted(breaks.union(schedule.breaks)))).validate()
    needed = forecaster.history if isinstance(forecaster, WeightRule) else None
    if history is None:
        history = 3 if needed is None else needed
    history = check_int("history", history, minimum=1)
    if needed is not None and history < needed:
        raise ValueError(
            f"history: {forecaster.name} needs {needed} snapshots, got {history}; "
            "a shorter history would silently lower its order"
        )
    weights = np.zeros((schedule.num_steps, history))
    for s in schedule.skipped:
        pos = schedule.history(s, history)
        row = np.asarray(forecaster(pos, s), np.float64)
        if row.shape != (len(pos),):
            raise ValueError(
                f"forecaster: expected {len(pos)} weights for anchors {pos} at step {s}, "
                f"got shape {row.shape}"
            )
        weights[s, : len(pos)] = row
    check_finite("plan.weights", weights)
    return ForecastPlan(schedule, weights)


def ring_slots(schedule: CacheSchedule, history: int) -> tuple[np.ndarray, np.ndarray]:
    """Where snapshots live in a ring buffer of ``history`` slots.

    Returns:
      ``slot[S]``: slot of the newest anchor at or before each step; ``column[S, K]``: for
      each ring slot the age (0 newest) of the snapshot in it, so that
      ``weights[s, column[s]]`` is in ring order and nothing is ever rolled on the device.
    """
    steps = np.arange(schedule.num_steps)
    count = np.searchsorted(np.asarray(schedule.anchors), steps, side="right") - 1
    slot = count % history
    column = (slot[:, None] - np.arange(history)) % history
    return slot.astype(np.int32), column.astype(np.int32)


class RingState(NamedTuple):
    """The last ``K`` computed features, ``[K, *feature.shape]``, in ring order."""

    history: jax.Array


def _ring_observe(state: RingState, feature: jax.Array, info: StepInfo) -> RingState:
    feature = feature.astype(state.history.dtype)
    return RingState(jax.lax.dynamic_update_index_in_dim(state.history, feature, info.slot, 0))


def _ring_predict(state: RingState, info: StepInfo) -> jax.Array:
    return weighted_sum(info.row, state.history)


def _ring_snapshots(state: RingState, info: StepInfo) -> tuple[jax.Array, jax.Array]:
    return info.row, state.history


@dataclasses.dataclass(frozen=True)
class _RingInit:
    """Zeros for ``size`` snapshots; comparable, so that equal plans share a program."""

    size: int
    dtype: Any

    def __call__(self, feature: Any) -> RingState:
        dtype = feature.dtype if self.dtype is None else self.dtype
        return RingState(jnp.zeros((self.size, *feature.shape), dtype))


def plan_forecaster(
    plan: ForecastPlan, *, cache_dtype: Any = None, history: int | None = None
) -> Forecaster:
    """The :class:`Forecaster` that follows a plan: a ring buffer and a weighted sum.

    Args:
      plan: its weights may be traced, and batched under ``vmap``.
      cache_dtype: dtype of the stored snapshots; that of the feature by default. Raw
        snapshots are stored, not differences: differences lose their digits when rounded.
      history: ring slots to keep, at least those of the plan; further ones weigh nothing.
    """
    check_plan(plan)
    size = max(plan.history, history or 0)
    _, column = ring_slots(plan.schedule, size)
    host = is_concrete(plan.weights) and not isinstance(plan.weights, jax.Array)
    xp = np if host else jnp
    weights = np.asarray(plan.weights, np.float64) if host else plan.weights
    column = column if weights.ndim == 2 else column[:, None]
    weights = xp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, size - plan.history)])
    table = xp.take_along_axis(weights, column, axis=-1).astype(xp.float32)
    dtype = None if cache_dtype is None else jnp.dtype(cache_dtype)
    return Forecaster(
        schedule=plan.schedule,
        init=_RingInit(size, dtype),
        observe=_ring_observe,
        predict=_ring_predict,
        table=table,
        snapshots=_ring_snapshots,
    )


def check_plan(plan: ForecastPlan) -> None:
    """Raise ValueError for a plan whose weights do not fit its schedule."""
    plan.schedule.validate()
    shape = np.shape(plan.weights)
    if len(shape) not in (2, 3) or shape[0] != plan.schedule.num_steps or 0 in shape:
        raise ValueError(
            f"plan.weights: expected shape ({plan.schedule.num_steps}, K) or "
            f"({plan.schedule.num_steps}, G, K), got {shape}"
        )
    check_finite("plan.weights", plan.weights)


def check_sample_axes(forecaster: Forecaster, site: str) -> None:
    """Raise ValueError for a forecaster that would take other axes for the samples of a site."""
    have, want = forecaster.sample_axes, 2 if site == "module" else 1
    if have is not None and have != want:
        made = "'module'" if have == 2 else "'output' and 'crf'" if have == 1 else "no site"
        mixed = ", and would mix samples" if have < want else ""
        raise ValueError(
            f"plan: this forecaster takes {have} leading axes of the feature for samples (right "
            f"for {made}), but site={site!r} has {want}{mixed}; build it with axes={want} "
            f"(bezicast_plan: site={site!r})"
        )


def check_breaks(plan: ForecastPlan | Forecaster, breaks: tuple[int, ...]) -> None:
    """Raise ValueError for a plan that forecasts over a jump of the feature at ``breaks``.

    A plan's weights tell. What a forecaster does with old snapshots can't be seen: its schedule
    must name the breaks.
    """
    schedule = plan.schedule
    advice = (
        "build the schedule with schedule.with_breaks(fadex.sampling.guidance_breaks(timesteps, "
        "guidance_interval))"
    )
    missing = [b for b in breaks if not schedule.is_anchor(b)]
    if missing:
        raise ValueError(
            f"plan: the guided output jumps at the steps {breaks}, where guidance_interval begins "
            f"or ends, and the schedule does not compute {missing}; {advice}"
        )
    if isinstance(plan, Forecaster):
        unnamed = [b for b in breaks if b not in schedule.breaks]
        if unnamed:
            raise ValueError(
                f"plan: the guided output jumps at the steps {breaks}, where guidance_interval "
                f"begins or ends, and the forecaster's schedule has no breaks at {unnamed}; "
                f"{advice}"
            )
        return
    if not is_concrete(plan.weights):
        return
    weights = np.asarray(plan.weights)
    whole = schedule._replace(breaks=())
    for s in schedule.skipped if breaks else ():
        start = max((b for b in breaks if b <= s), default=0)
        for j, a in enumerate(whole.history(s, plan.history)):
            if a < start and np.any(weights[s, ..., j]):
                raise ValueError(
                    f"plan: the guided output jumps at step {start}, where guidance_interval "
                    f"begins or ends, and the forecast of step {s} weighs step {a} before it; "
                    f"{advice}"
                )
