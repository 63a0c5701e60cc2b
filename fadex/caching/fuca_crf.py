"""FuCa inside the model: the cumulative residual is forecast, cached ahead and interpolated.

The scheme is that of :mod:`fadex.caching.fuca`, with features in place of velocities: the
provisional jump and the revised one both run through the skipped steps, whose outputs come from
the model's head (``from_features``) on a forecast or interpolated feature. ``revise="head"``
follows the revised state by evaluating the head there on the feature cached ahead.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.kernels import weighted_sum
from fadex.caching.newton import lagrange_weights
from fadex.caching.plan import ForecastPlan, ring_slots
from fadex.caching.schedule import CacheSchedule
from fadex.caching.stats import cost_share, matmul_flops, relative_change
from fadex.sampling.guidance import Guided


class _Segment(NamedTuple):
    """One row per anchor ``f``: the skipped steps ``s + 1 .. f - 1`` that lead to it, padded."""

    t: Any  # [A]: time of f
    slope: Any  # [A]
    slot: Any  # [A]: where its feature goes
    t_past: Any  # [A]: time of s
    t_first: Any  # [A]: time of s + 1
    arrives: Any  # [A]: false for the first anchor, which nothing leads to
    skipped: Any  # _Skipped with leading axes [A, N - 1]


class _Skipped(NamedTuple):
    t: Any
    t_next: Any
    real: Any
    predictor: Any  # [.., K]
    history: Any  # [.., K]
    future: Any  # [..]


def _segments(
    times: np.ndarray, schedule: CacheSchedule, plan: ForecastPlan, order: int,
    slope: np.ndarray, size: int,
) -> tuple[_Segment, _Skipped]:
    """Tables in ring order, and the skipped steps behind the last anchor."""
    anchors = (*schedule.anchors, schedule.num_steps)
    widest = max(f - s for s, f in itertools.pairwise(anchors)) - 1
    _, column = ring_slots(schedule, size)
    count = schedule.nfe

    def blank() -> _Skipped:
        zeros = lambda *shape: np.zeros((count + 1, widest, *shape), np.float32)
        return _Skipped(
            zeros(), zeros(), np.zeros((count + 1, widest), bool), zeros(size), zeros(size), zeros()
        )

    table = blank()
    for i in range(1, count + 1):
        s, f = anchors[i - 1], anchors[i]
        known = schedule.history(s, order)
        for j, q in enumerate(range(s + 1, f)):
            table.t[i, j], table.t_next[i, j], table.real[i, j] = times[q], times[q + 1], True
            row = np.zeros(size)
            row[: plan.history] = plan.weights[q]
            table.predictor[i, j] = row[column[s]]
            if i == count or f in schedule.breaks:
                table.history[i, j] = table.predictor[i, j]
                continue
            w = lagrange_weights(tuple(times[[f, *known]]), times[q])
            row = np.zeros(size)
            row[: len(known)] = w[1:]
            table.future[i, j], table.history[i, j] = w[0], row[column[s]]
    at = np.asarray(schedule.anchors)
    past = np.asarray([0, *schedule.anchors[:-1]])
    segments = _Segment(
        t=times[at].astype(np.float32), slope=slope.astype(np.float32),
        slot=(np.arange(count) % size).astype(np.int32), t_past=times[past].astype(np.float32),
        t_first=times[past + 1].astype(np.float32), arrives=np.arange(count) > 0,
        skipped=jax.tree.map(lambda a: a[:count], table),
    )
    return segments, jax.tree.map(lambda a: a[count], table)


_STATIC = ("denoiser", "sampler", "cfg_channels", "head", "return_trajectory", "return_stats")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _program(params, x, cond, null_cond, guidance, interval, segments, tail, ends, *, denoiser,
             sampler, cfg_channels, head, return_trajectory, return_stats):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    out, feature = jax.eval_shape(lambda: model.with_features(x, segments.t[0], "crf"))
    size = tail.predictor.shape[-1]

    def step(velocity, x, t, t_next):
        return sampler.step(velocity, x, t, t_next, (), None)[0].astype(x.dtype)

    def through(x, skipped, feature_of):
        """Run the skipped steps of a segment; ``feature_of(row)`` is what the head gets."""

        def body(x, row):
            velocity = model.from_features(x, row.t, "crf", feature_of(row))
            x = jnp.where(row.real, step(velocity, x, row.t, row.t_next), x)
            return x, x if return_trajectory else None

        return jax.lax.scan(body, x, skipped)

    def forecast(ring):
        return lambda row: weighted_sum(row.predictor, ring)

    def anchor(carry, row):
        x, ring, velocity = carry
        first = jnp.where(row.arrives, step(velocity, x, row.t_past, row.t_first), x)
        ahead, _ = through(first, row.skipped, forecast(ring))
        found, feature = jax.lax.optimization_barrier(model.with_features(ahead, row.t, "crf"))

        def interpolated(skipped):
            past = weighted_sum(skipped.history, ring).astype(jnp.float32)
            return (past + skipped.future * feature.astype(jnp.float32)).astype(feature.dtype)

        revised, states = through(first, row.skipped, interpolated)
        if head:
            found = model.from_features(revised, row.t, "crf", feature)
        else:
            found = (found + row.slope * (revised - ahead)).astype(found.dtype)
        size = relative_change(feature, ring[row.slot - 1]) if return_stats else None
        ring = jax.lax.dynamic_update_index_in_dim(ring, feature.astype(ring.dtype), row.slot, 0)
        kept = jnp.concatenate([first[None], states]) if return_trajectory else None
        return (revised, ring, found), (kept, size)

    start = (
        x, jnp.zeros((size, *feature.shape), feature.dtype), jnp.zeros(out.shape, out.dtype)
    )
    (x, ring, velocity), (states, sizes) = jax.lax.scan(anchor, start, segments)
    first = step(velocity, x, *ends)
    final, after = through(first, tail, forecast(ring))
    if return_trajectory:
        after = jnp.concatenate([first[None], after])
    return final, states, after, sizes


def run_crf(
    operands: tuple, times: Any, schedule: CacheSchedule, plan: ForecastPlan, order: int,
    slope: np.ndarray, *, denoiser, sampler, cfg_channels, head: bool, return_trajectory: bool,
    return_stats: bool,
) -> tuple:
    """The body of :func:`~fadex.caching.fuca_sample` at the site ``"crf"``.

    Returns the samples, the states of the segments and behind the last anchor, sizes, and the
    cost of a skipped step (two passes through the head) over that of a computed one.
    """
    times = np.asarray(times, np.float64)
    size = max(plan.history, order)
    segments, tail = _segments(times, schedule, plan, order, slope, size)
    last = schedule.anchors[-1]
    ends = times[[last, last + 1]].astype(np.float32)
    found = _program(
        *operands, segments, tail, ends, denoiser=denoiser, sampler=sampler,
        cfg_channels=cfg_channels, head=head, return_trajectory=return_trajectory,
        return_stats=return_stats,
    )
    return *found, _head_cost(operands, denoiser, cfg_channels) if return_stats else 0.0


def _head_cost(operands: tuple, denoiser, cfg_channels) -> float:
    params, x, cond, null_cond, guidance, interval = operands
    t = jnp.float32(0.5)

    def cost(params, x, cond, null_cond, *, skip):
        model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
        if not skip:
            return model.with_features(x, t, "crf")
        shape = jax.eval_shape(lambda: model.with_features(x, t, "crf")[1])
        return model.from_features(x, t, "crf", jnp.zeros(shape.shape, shape.dtype))

    args = (params, x, cond, null_cond)
    head, full = (
        matmul_flops(functools.partial(cost, skip=skip), *args) for skip in (True, False)
    )
    return cost_share(2 * head, full)
