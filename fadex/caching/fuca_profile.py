r"""Profiling FuCa: the model's own slopes, and jumps fitted to the full run.

The abstract leaves open how a revision signal is weighed. :func:`profile_revision` measures the
slope of the velocity along the corrector's shifts. :func:`profile_fuca` goes further [design]:
it replays the run on a profiling batch, anchor by anchor, and fits what FuCa folds into rows of
weights, each to the state :math:`x^*_f` of the run that computes every step:

.. math::
   p &= \arg\min \lVert A x_s + \textstyle\sum_j p_j v_j - x^*_f \rVert^2, \\
   (c, c_+) &= \arg\min \lVert A x_s + \textstyle\sum_j c_j v_j + c_+ \tilde v_f - x^*_f
               \rVert^2, \\
   c_f &= \langle v^*_f - \tilde v_f, \Delta \rangle / \lVert \Delta \rVert^2 .

The replayed states carry the errors of all earlier jumps, so the fit undoes drift as it goes.
Online nothing changes: the same rows, with other numbers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.fuca import (
    LARGEST_SLOPE,
    FucaTables,
    advance,
    check_fuca,
    device_tables,
    fuca_sample,
    fuca_tables,
)
from fadex.caching.plan import ForecastPlan
from fadex.caching.profile import full_run
from fadex.caching.profile_schedule import profile_schedule
from fadex.caching.schedule import CacheSchedule, custom_schedule
from fadex.core.checks import check_real
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_run
from fadex.sampling.samplers import Sampler, flow_euler


@functools.partial(jax.jit, static_argnames=("denoiser", "cfg_channels"))
def _slopes(params, x, cond, null_cond, guidance, interval, device, *, denoiser, cfg_channels):
    """``<v(x_f) - v~_f, dx> / ||dx||^2`` at every anchor, with the exact velocity kept."""
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    out = jax.eval_shape(model, x, device.t[0])

    def anchor(carry, row):
        x, ring = carry
        ahead, velocity, revised = advance(model, x, ring, row)
        exact = model(revised, row.t)
        wide = lambda a: a.astype(jnp.float32)
        shift, change = wide(revised) - wide(ahead), wide(exact) - wide(velocity)
        slope = jnp.vdot(change, shift) / jnp.maximum(jnp.vdot(shift, shift), 1e-30)
        ring = jax.lax.dynamic_update_index_in_dim(ring, exact.astype(ring.dtype), row.slot, 0)
        return (revised, ring), jnp.where(row.moved, slope, 0.0)

    start = (x, jnp.zeros((device.predictor.shape[-1], *out.shape), out.dtype))
    return jax.lax.scan(anchor, start, device)[1]


def _finite(values: np.ndarray) -> np.ndarray:
    if not np.all(np.isfinite(values)):
        raise ValueError("params: the run gave values that are not finite while profiling")
    return values


def profile_revision(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    predictor: str | ForecastPlan = "taylor1",
    corrector_order: int = 2,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
) -> np.ndarray:
    r"""Slopes :math:`c_f` of the model along the corrector's own shifts, ``[anchors]``.

    .. math:: c_f = \frac{\langle v(x_f) - v(\tilde x_f),\; x_f - \tilde x_f \rangle}
                         {\lVert x_f - \tilde x_f \rVert^2}

    over a profiling batch, which evaluates the model twice at each anchor. Arguments are those
    of :func:`fuca_sample`; the result goes there as ``revision``.

    Raises:
      ValueError: a bad argument, by name, or a run that is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.caching import profile_revision, uniform_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> slopes = profile_revision(denoiser, jnp.float32(0.5), jnp.ones((2, 4)), None,
      ...                           timesteps=uniform_times(20), schedule=uniform_schedule(20, 9))
      >>> [round(float(c), 2) for c in slopes]  # the slope of this model, where steps were skipped
      [0.0, 0.0, 0.0, 0.5, 0.5]
    """
    sampler = flow_euler() if sampler is None else sampler
    null_cond, interval = check_fuca(
        x, cond, timesteps, schedule, guidance, null_cond, cfg_channels, guidance_interval,
        sampler, predictor,
    )
    tables = fuca_tables(
        timesteps, schedule, predictor=predictor, corrector_order=corrector_order,
        revise="none", sampler=sampler,
    )
    device, _, _ = device_tables(tables, schedule, timesteps, False)
    slopes = _slopes(
        params, jnp.asarray(x), cond, null_cond, guidance, interval, device, denoiser=denoiser,
        cfg_channels=cfg_channels,
    )
    slopes = _finite(np.asarray(slopes, np.float64))
    return np.clip(slopes, -LARGEST_SLOPE, LARGEST_SLOPE)


@functools.partial(jax.jit, static_argnames=("denoiser", "cfg_channels"))
def _evaluate(params, x, t, cond, null_cond, guidance, interval, *, denoiser, cfg_channels):
    return Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)(x, t)


@jax.jit
def _triangle(columns, residual):
    """``R`` of the QR factors of ``[columns | residual]``: a least-squares problem in brief.

    An orthogonal factor keeps the digits that the normal equations of nearly parallel
    velocities would lose.
    """
    rows = jnp.stack([*columns, residual]).astype(jnp.float32)
    return jnp.linalg.qr(rows.reshape(len(rows), -1).T, mode="r")


def _correction(columns: list, residual: Any, ridge: float) -> np.ndarray:
    """Weights ``d`` that minimise ``||sum d_j columns_j + residual||^2 + ridge ...``.

    The columns are written as the first one and differences to it, because velocities differ
    by little; ``ridge`` is relative to the size of each of those.
    """
    columns = [column.astype(jnp.float32) for column in columns]
    basis = [columns[0], *(column - columns[0] for column in columns[1:])]
    triangle = np.asarray(_triangle(basis, residual), np.float64)
    triangle = np.pad(triangle, [(0, len(basis) + 1 - len(triangle)), (0, 0)])
    left, right = triangle[:, :-1], triangle[:, -1]
    sizes = np.linalg.norm(left, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    left = np.concatenate([left / sizes, np.sqrt(ridge) * np.eye(len(basis))])
    right = np.concatenate([right, np.zeros(len(basis))])
    scaled = -np.linalg.lstsq(left, right, rcond=None)[0] / sizes
    return np.concatenate([[scaled[0] - scaled[1:].sum()], scaled[1:]])


def profile_fuca(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    predictor: str | ForecastPlan = "taylor1",
    corrector_order: int = 2,
    history: int = 4,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    ridge: float = 1e-6,
) -> FucaTables:
    """Fit FuCa's rows to the full run on a profiling batch; for ``fuca_sample(tables=...)``.

    Args:
      denoiser, params, x, cond, timesteps, schedule, sampler, guidance, null_cond,
        cfg_channels, guidance_interval: as in :func:`fuca_sample`; ``x`` is the profiling batch.
      predictor, corrector_order: the rows that the fit starts from and is drawn to.
      history: past velocities ``K`` that the fitted rows may use (at least what the predictor
        and the corrector need).
      ridge: how strongly, relative to the size of each velocity difference.

    Returns:
      Tables for runs with the same timesteps, schedule, sampler and guidance.

    Raises:
      ValueError: a bad argument, by name, or a full run that is not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import fuca_sample, profile_fuca, uniform_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: params * jnp.tanh(x))
      >>> run = dict(timesteps=uniform_times(20), schedule=uniform_schedule(20, 4))
      >>> x = jax.random.normal(jax.random.key(0), (4, 8))
      >>> tables = profile_fuca(denoiser, jnp.float32(1.0), x, None, **run)
      >>> fuca_sample(denoiser, jnp.float32(1.0), x, None, **run, tables=tables).shape
      (4, 8)
    """
    sampler = flow_euler() if sampler is None else sampler
    ridge = check_real("ridge", ridge, minimum=0.0)
    null_cond, interval = check_fuca(
        x, cond, timesteps, schedule, guidance, null_cond, cfg_channels, guidance_interval,
        sampler, predictor,
    )
    times = jnp.asarray(timesteps, jnp.float32)
    tables = fuca_tables(
        timesteps, schedule, predictor=predictor, corrector_order=corrector_order,
        revise="none", history=history, sampler=sampler,
    )
    x = jnp.asarray(x)
    static = dict(denoiser=denoiser, cfg_channels=cfg_channels)
    states, outs = full_run(
        params, x, cond, null_cond, times, guidance, interval, sampler=sampler, **static
    )
    if not bool(jnp.all(jnp.isfinite(states))):
        raise ValueError("params: the full run gave values that are not finite while profiling")
    size = tables.predictor.shape[1]
    jump, corrector = tables.predictor.copy(), tables.corrector.copy()
    slope, path = np.zeros_like(tables.slope), tables.path.copy()
    total = lambda weights, values: sum(
        float(w) * v.astype(jnp.float32) for w, v in zip(weights, values)
    )
    evaluate = lambda x, t: _evaluate(
        params, x, t, cond, null_cond, guidance, interval, **static
    )
    past = [evaluate(x, times[0])]  # newest first
    anchors = schedule.anchors
    for i in range(1, len(anchors)):
        s, f = anchors[i - 1], anchors[i]
        target, base = states[f], tables.scale[i] * x.astype(jnp.float32)
        known = len(past)
        if f - s > 1:
            residual = base + total(jump[i], past) - target
            jump[i, :known] += _correction(past, residual, ridge)
        ahead = (base + total(jump[i], past)).astype(x.dtype)
        velocity = evaluate(ahead, times[f])
        if f - s > 1 and f in schedule.breaks:
            change = jump[i] - tables.predictor[i]
            corrector[i, :size] = jump[i]
            for q in range(f - s):
                path[i, q, :size] += change * (q + 1) / (f - s)
            path[i, f - s :] = corrector[i]
            x = ahead
        elif f - s > 1:
            columns = [*past, velocity]
            ages = [*range(known), size]
            residual = base + total(corrector[i, ages], columns) - target
            change = _correction(columns, residual, ridge)
            corrector[i, ages] += change
            for q in range(f - s):
                path[i, q, ages] += change * (q + 1) / (f - s)
            path[i, f - s :] = corrector[i]
            revised = (base + total(corrector[i, ages], columns)).astype(x.dtype)
            wide = lambda a: a.astype(jnp.float32)
            shift, wanted = wide(revised) - wide(ahead), wide(outs[f]) - wide(velocity)
            slope[i] = float(jnp.vdot(wanted, shift) / jnp.maximum(jnp.vdot(shift, shift), 1e-30))
            slope[i] = np.clip(slope[i], -LARGEST_SLOPE, LARGEST_SLOPE)
            velocity = (velocity + slope[i] * shift).astype(velocity.dtype)
            x = revised
        else:
            x = ahead
        # At a break the output jumps: nothing older tells what comes.
        past = [velocity] if f in schedule.breaks else [velocity, *past][:size]
    tail, last = tables.tail.copy(), anchors[-1]
    if schedule.num_steps - last > 1:  # forecast to the end: fit that, too
        count = schedule.num_steps - last
        base = tables.tail_scale[count - 1] * x.astype(jnp.float32)
        change = _correction(past, base + total(tail[count - 1], past) - states[-1], ridge)
        for q in range(count):
            tail[q, : len(past)] += change * (q + 1) / count
        tail[count:] = tail[count - 1]
    for part in (jump, corrector, slope, tail):
        _finite(part)
    level = 1.0 if null_cond is None else guidance
    return tables._replace(
        predictor=jump, corrector=corrector, slope=slope, path=path, tail=tail,
        guidance=float(level) if np.ndim(level) == 0 else None,
    )


class FucaPlan(NamedTuple):
    """A schedule with the rows fitted on it: ``fuca_sample(**plan._asdict(), ...)``."""

    schedule: CacheSchedule
    tables: FucaTables


def place_fuca(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    nfe: int,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    history: int = 4,
) -> FucaPlan:
    """Anchors and fitted rows for a budget of evaluations: FuCa at its best here.

    Fits FuCa on four placements of ``nfe`` anchors (both kinds of :func:`profile_schedule`, and
    evenly spread ones with and without a warm-up) and keeps the one whose samples come nearest to
    the full run's on the profiling batch.

    Args:
      denoiser, params, x, cond, timesteps, sampler, guidance, null_cond, cfg_channels: as in
        :func:`fuca_sample`; ``x`` is the profiling batch.
      nfe: model evaluations of a run.
      history: as in :func:`profile_fuca`.

    Raises:
      ValueError: a bad argument, by name (``nfe`` outside ``[2, S]``, a multistep sampler, ...).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import fuca_sample, place_fuca
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: params * jnp.tanh(x))
      >>> x, times = jax.random.normal(jax.random.key(0), (4, 8)), uniform_times(20)
      >>> plan = place_fuca(denoiser, jnp.float32(1.0), x, None, timesteps=times, nfe=6)
      >>> plan.schedule.nfe
      6
      >>> fuca_sample(denoiser, jnp.float32(1.0), x, None, timesteps=times,
      ...             **plan._asdict()).shape
      (4, 8)
    """
    batch = (denoiser, params, x, cond)
    shared = dict(
        timesteps=timesteps, sampler=sampler, guidance=guidance, null_cond=null_cond,
        cfg_channels=cfg_channels,
    )
    placed = [
        profile_schedule(*batch, nfe=nfe, kind=kind, **shared)
        for kind in ("interpolate", "forecast")
    ]
    steps = placed[0].num_steps
    even = lambda first, count: np.linspace(first, steps - 1, count).round().astype(int)
    placed.append(custom_schedule(steps, even(0, nfe)))
    if nfe > 4:  # a warm-up of three, as in uniform_schedule
        placed.append(custom_schedule(steps, [0, 1, *even(2, nfe - 2)]))
    solver = flow_euler() if sampler is None else sampler
    times, null_cond = check_run(
        x, cond, timesteps, steps, guidance, null_cond, cfg_channels, solver, None
    )
    states, _ = full_run(
        params, jnp.asarray(x), cond, null_cond, times, guidance, None, denoiser=denoiser,
        sampler=solver, cfg_channels=cfg_channels,
    )
    best, least = None, np.inf
    for schedule in dict.fromkeys(placed):
        tables = profile_fuca(*batch, schedule=schedule, history=history, **shared)
        out = fuca_sample(*batch, schedule=schedule, tables=tables, **shared)
        error = float(jnp.linalg.norm((out - states[-1]).astype(jnp.float32)))
        if best is None or error < least:
            best, least = FucaPlan(schedule, tables), error
    return best
