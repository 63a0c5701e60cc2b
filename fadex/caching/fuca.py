r"""FuCa, Cache-the-Future: predict, evaluate ahead, revise.

Reconstruction from the abstract of FuCa (no paper or code was public): what it states is that
features are computed sparsely at *future* points, that these revise the latent update and the
velocity that belongs to it, and that skipped steps come from interpolation. Ours is a
predictor-evaluate-corrector scheme on the grid of anchors, with one evaluation for each.

Between neighbouring anchors ``s -> f``, with state :math:`x_s`, revised velocities of earlier
anchors and a sampler whose step is affine, :math:`x_{q+1} = A_q x_q + B_q v_q`:

1. *predict* :math:`\tilde x_f`: the run from ``s`` to ``f`` with forecast velocities, by
   TaylorSeer-1 or any plan;
2. *cache the future* :math:`\tilde v_f = v(\tilde x_f, t_f)`, the only evaluation;
3. *revise the state*: the same run, with velocities interpolated in time through the nodes
   ``f, s, a_1, ..`` (``corrector_order + 1`` of them), gives :math:`x_f`. The sum over fine
   steps, not an integral: the target is the run that computes every step;
4. *revise the velocity* without a second evaluation. The clean-data estimate is held fixed
   while the state moves by :math:`\Delta = x_f - \tilde x_f`. For velocities
   :math:`v = (x - D)/t`, for noise predictions :math:`\epsilon = (x - \alpha D)/\sigma`, so

   .. math:: v_f = \tilde v_f + c_f \Delta, \qquad c_f = 1/t_f \quad\text{or}\quad 1/\sigma_f;

5. *recover skipped states* when asked: partial sums of step 3.

Every sum over skipped steps is folded into one row of weights per anchor, so that the device
sees two weighted sums and one model call for each.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.fade_table import sampler_name
from fadex.caching.fuca_crf import run_crf
from fadex.caching.kernels import weighted_sum
from fadex.caching.newton import lagrange_weights
from fadex.caching.plan import ForecastPlan, check_breaks, check_plan, make_plan
from fadex.caching.profile import check_site
from fadex.caching.schedule import CacheSchedule
from fadex.caching.stats import fold_branches, plan_stats, relative_change
from fadex.caching.taylor import taylorseer
from fadex.core.checks import check_choice, check_finite, check_int, is_concrete
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import (
    Guided,
    check_interval,
    check_mesh,
    check_run,
    guidance_breaks,
)
from fadex.sampling.samplers import Sampler, flow_euler

REVISIONS = ("none", "x0", "x0_damped", "profiled", "head")
_DAMPING = 0.4  # of 1/t below t = 0.5, where the model's own slope was measured to fall behind
LARGEST_SLOPE = 1e3


class FucaTables(NamedTuple):
    """Everything about a FuCa run that does not depend on the sample; float64 on the host.

    (A sampler that looks its coefficients up in float32, as ``ddim`` does, gives that precision.)

    Row ``i`` belongs to the ``i``-th anchor ``f``, reached from the anchor ``s`` before it (the
    first row stands still). ``K`` velocities are kept; columns count their age *before* ``f``
    is evaluated (0 is ``s``).

    Attributes:
      scale: ``[A]``, factor of :math:`x_s` in :math:`x_f`.
      predictor: ``[A, K]``, weights of the provisional jump.
      corrector: ``[A, K + 1]``, of the revised jump; the last column belongs to ``f``.
      slope: ``[A]``, :math:`c_f`.
      path_scale, path: ``[A, N]`` and ``[A, N, K + 1]``: the states after ``1 .. N`` fine steps
        of the segment, rows past its end repeat its last one.
      tail_scale, tail: ``[N]`` and ``[N, K]``: the steps behind the last anchor, forecast;
        columns count from the last anchor.
      anchors, breaks, times, sampler: the run that the rows were made for; another is refused.
      guidance: what fitted rows were profiled at; None for rows that follow from the schedule.
    """

    scale: np.ndarray
    predictor: np.ndarray
    corrector: np.ndarray
    slope: np.ndarray
    path_scale: np.ndarray
    path: np.ndarray
    tail_scale: np.ndarray
    tail: np.ndarray
    anchors: tuple[int, ...]
    breaks: tuple[int, ...]
    times: np.ndarray
    sampler: str
    guidance: float | None = None


@functools.lru_cache(maxsize=64)
def _affine_steps(sampler: Sampler, times: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """``A`` and ``B`` of every step; kept, because a sampler may compute them on the device."""
    pairs = [_affine(sampler, t, u) for t, u in itertools.pairwise(times)]
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


@functools.lru_cache(maxsize=4096)
def _affine(sampler: Sampler, t: float, t_next: float) -> tuple[float, float]:
    """``A, B`` of the sampler's step ``x' = A x + B out`` between two times."""
    with jax.ensure_compile_time_eval():
        step = lambda out, x: sampler.step(out, x, float(t), float(t_next), (), None)[0]
        return float(step(0.0, 1.0)), float(step(1.0, 0.0))


def _check_sampler(sampler: Sampler) -> None:
    """FuCa needs a deterministic one-step sampler whose step is affine in state and output."""
    probe = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    if sampler.stochastic:
        raise ValueError(
            "sampler: FuCa revises states that were already passed, which a stochastic sampler "
            "would have to draw again; use a deterministic one (flow_euler, ddim(eta=0))"
        )
    state = jax.eval_shape(lambda x: sampler.init(x, None), probe)
    if sampler.evals_per_step != 1 or jax.tree.leaves(state):
        raise ValueError(
            "sampler: FuCa needs a one-step sampler with one evaluation a step (flow_euler, "
            "ddim(eta=0)): it brings its own multistep corrector"
        )


def fuca_tables(
    timesteps: Any,
    schedule: CacheSchedule,
    *,
    predictor: ForecastPlan | None = None,
    corrector_order: int = 2,
    revise: str = "x0_damped",
    revision: Any = None,
    history: int | None = None,
    sampler: Sampler | None = None,
) -> FucaTables:
    """Fold predictor, corrector and revision into one row of weights per anchor.

    Arguments are those of :func:`fuca_sample`; ``timesteps`` must be concrete. ``history`` keeps
    more velocities than predictor and corrector need, with zero weights.

    Example:
      >>> from fadex.caching import fuca_tables, uniform_schedule
      >>> from fadex.sampling import uniform_times
      >>> tables = fuca_tables(uniform_times(12), uniform_schedule(12, 4))
      >>> tables.corrector.shape  # six anchors; two velocities and the one ahead
      (6, 3)
    """
    sampler = flow_euler() if sampler is None else sampler
    _check_sampler(sampler)
    predictor = _as_plan(schedule, predictor)
    corrector_order = check_int("corrector_order", corrector_order, minimum=1)
    check_choice("revise", revise, REVISIONS)
    times = np.asarray(timesteps, np.float64)
    steps = schedule.num_steps
    weights = np.asarray(predictor.weights, np.float64)
    size = max(predictor.history, corrector_order, check_int("history", history or 1, minimum=1))
    anchors = schedule.anchors
    a, b = _affine_steps(sampler, tuple(times.tolist()))
    widest = max(f - s for s, f in zip(anchors, (*anchors[1:], steps)))

    def run(rows: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Scale and velocity weights after each step of a segment, padded to the widest."""
        scale, total, scales, totals = 1.0, np.zeros(rows.shape[1]), [], []
        for q, row in enumerate(rows, start=first):
            scale, total = a[q] * scale, a[q] * total + b[q] * row
            scales.append(scale)
            totals.append(total)
        repeat = widest - len(rows)
        return np.array(scales + scales[-1:] * repeat), np.stack(totals + totals[-1:] * repeat)

    def forecast_rows(s: int, stop: int) -> np.ndarray:
        """Velocity weights ``[stop - s, size]`` of the steps ``s .. stop - 1``, forecast."""
        rows = np.zeros((stop - s, size))
        rows[0, 0] = 1.0
        rows[1:, : predictor.history] = weights[s + 1 : stop]
        return rows

    count = len(anchors)
    scale, slope = np.ones(count), np.zeros(count)
    jump, corrector = np.zeros((count, size)), np.zeros((count, size + 1))
    path_scale = np.ones((count, widest))
    path = np.zeros((count, widest, size + 1))
    for i, (s, f) in enumerate(itertools.pairwise(anchors), start=1):
        _, totals = run(forecast_rows(s, f), s)
        jump[i] = totals[f - s - 1]
        known = schedule.history(s, corrector_order)
        rows = np.zeros((f - s, size + 1))
        if f in schedule.breaks:
            # The output jumps at f (guidance sets in or ends): nothing to interpolate towards.
            rows[:, :size] = forecast_rows(s, f)
        else:
            nodes = tuple(times[[f, *known]])
            for q in range(s, f):
                w = lagrange_weights(nodes, times[q])
                rows[q - s, -1], rows[q - s, : len(known)] = w[0], w[1:]
        path_scale[i], path[i] = run(rows, s)
        scale[i], corrector[i] = path_scale[i, f - s - 1], path[i, f - s - 1]
        slope[i] = _slope(sampler, float(times[f]), revise)
    if revise == "profiled":
        slope = _profiled_slope(revision, schedule)
    last = anchors[-1]
    tail_scale, tail = run(forecast_rows(last, steps), last)
    return FucaTables(
        scale, jump, corrector, slope, path_scale, path, tail_scale, tail, anchors,
        schedule.breaks, times, sampler_name(sampler),
    )


def _slope(sampler: Sampler, t: float, revise: str) -> float:
    """``c_f`` by a rule, from the step that leads to clean data: ``D = A x + B out``."""
    if revise in ("none", "profiled", "head"):
        return 0.0
    clean = 0.0 if sampler.prediction == "velocity" else -1.0
    a, b = _affine(sampler, t, clean)
    slope = min(-a / b, LARGEST_SLOPE) if b < 0 else 0.0
    # Share of noise, t / (alpha + sigma); for velocities it is the time itself.
    noise = t if sampler.prediction == "velocity" else -b / (1.0 - b)
    return _DAMPING * slope if revise == "x0_damped" and noise < 0.5 else slope


def _profiled_slope(revision: Any, schedule: CacheSchedule) -> np.ndarray:
    shape = (len(schedule.anchors),)
    if revision is None:
        raise ValueError(
            "revision: revise='profiled' needs the slopes that profile_revision returns"
        )
    if np.shape(revision) != shape:
        raise ValueError(
            f"revision: expected one slope for each of {shape[0]} anchors, got shape "
            f"{np.shape(revision)}"
        )
    check_finite("revision", revision)
    return np.asarray(revision, np.float64)


def _as_plan(schedule: CacheSchedule, predictor: Any) -> ForecastPlan:
    schedule.validate()
    if predictor is None or predictor == "taylor1":
        return make_plan(schedule, taylorseer(1))
    if not isinstance(predictor, ForecastPlan):
        raise TypeError(
            "predictor: expected 'taylor1' or a ForecastPlan, got "
            f"{predictor if isinstance(predictor, str) else type(predictor).__name__!r}"
        )
    check_plan(predictor)
    if predictor.schedule != schedule:
        raise ValueError(
            f"predictor: made for another schedule ({predictor.schedule.nfe} anchors of "
            f"{predictor.schedule.num_steps} steps; schedule has {schedule.nfe} of "
            f"{schedule.num_steps})"
        )
    if np.ndim(predictor.weights) != 2:
        raise ValueError(
            f"predictor: expected weights [S, K], got shape {np.shape(predictor.weights)}"
        )
    if not is_concrete(predictor.weights):
        raise ValueError("predictor: its weights must be concrete, they are folded on the host")
    return predictor


class _Device(NamedTuple):
    """Tables with columns in ring order, float32, leading axis the anchors."""

    scale: Any
    predictor: Any
    history: Any
    future: Any
    slope: Any
    moved: Any  # whether fine steps were skipped on the way
    slot: Any
    t: Any
    path_scale: Any = None
    path: Any = None


def _ring(weights: np.ndarray, newest: np.ndarray, size: int) -> np.ndarray:
    """Columns by age -> by ring slot; ``newest[i]`` is the slot of age 0 (axis -1 of row i)."""
    column = (newest[:, None] - np.arange(size)) % size
    column = column.reshape(column.shape[:1] + (1,) * (weights.ndim - 2) + (size,))
    column = np.broadcast_to(column, weights.shape)
    return np.take_along_axis(weights, column, axis=-1).astype(np.float32)


def device_tables(tables: FucaTables, schedule: CacheSchedule, times, keep_path: bool):
    size = tables.predictor.shape[1]
    rows = np.arange(schedule.nfe)
    newest = (rows - 1) % size  # before this row's own velocity is written
    lengths = np.diff(np.asarray(schedule.anchors), prepend=0)
    history, future = tables.corrector[:, :size], tables.corrector[:, size]
    device = _Device(
        scale=tables.scale.astype(np.float32),
        predictor=_ring(tables.predictor, newest, size),
        history=_ring(history, newest, size),
        future=future.astype(np.float32),
        slope=tables.slope.astype(np.float32),
        moved=lengths > 1,
        slot=(rows % size).astype(np.int32),
        t=np.asarray(times, np.float32)[list(schedule.anchors)],
    )
    last = np.array([(schedule.nfe - 1) % size])
    tail = _ring(tables.tail[None], last, size)[0]
    tail_scale = tables.tail_scale.astype(np.float32)
    if keep_path:
        device = device._replace(
            path_scale=tables.path_scale.astype(np.float32),
            path=(_ring(tables.path[..., :size], newest, size),
                  tables.path[..., size].astype(np.float32)),
        )
    return device, tail_scale, tail


def _jump(scale, x, weights, ring):
    """``scale x + sum_k w_k v_k``, both in the precision of a float32 sum."""
    total = weighted_sum(weights, ring).astype(jnp.float32)
    return (scale * x.astype(jnp.float32) + total).astype(x.dtype)


def advance(model, x, ring, row: _Device):
    """Predict, cache the future, revise: ``(x~_f, v~_f, x_f)`` for one row of the tables."""
    ahead = _jump(row.scale, x, row.predictor, ring)
    velocity = jax.lax.optimization_barrier(model(ahead, row.t))
    term = row.future * velocity.astype(jnp.float32)
    revised = _jump(row.scale, x, row.history, ring).astype(jnp.float32) + term
    # With nothing skipped the jump is the sampler's own step: no revision, no rounding.
    revised = jnp.where(row.moved, revised, ahead.astype(jnp.float32)).astype(x.dtype)
    return ahead, velocity, revised


def _output_program(params, x, cond, null_cond, guidance, interval, device, tail_scale, tail, *,
                    denoiser, cfg_channels, return_trajectory, return_stats):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    size = tail.shape[-1]
    out = jax.eval_shape(model, x, device.t[0])

    def anchor(carry, row):
        x, ring = carry
        ahead, velocity, revised = advance(model, x, ring, row)
        shift = revised.astype(jnp.float32) - ahead.astype(jnp.float32)
        states = None
        if return_trajectory:
            past, future = row.path
            states = jax.vmap(lambda a, w: _jump(a, x, w, ring))(row.path_scale, past)
            future = future.reshape(-1, *(1,) * x.ndim)
            states = (states + future * velocity.astype(jnp.float32)[None]).astype(x.dtype)
        velocity = (velocity.astype(jnp.float32) + row.slope * shift).astype(ring.dtype)
        size = relative_change(velocity, ring[row.slot - 1]) if return_stats else None
        ring = jax.lax.dynamic_update_index_in_dim(ring, velocity, row.slot, 0)
        return (revised, ring), (states, size)

    start = (x, jnp.zeros((size, *out.shape), out.dtype))
    (x, ring), (states, sizes) = jax.lax.scan(anchor, start, device)
    final = _jump(tail_scale[-1], x, tail[-1], ring)
    after = None
    if return_trajectory:
        after = jax.vmap(lambda a, w: _jump(a, x, w, ring))(tail_scale, tail)
    return final, states, after, sizes


_STATIC = ("denoiser", "cfg_channels", "return_trajectory", "return_stats")
_run_output = jax.jit(_output_program, static_argnames=_STATIC)


def check_fuca(
    x, cond, timesteps, schedule, guidance, null_cond, cfg_channels, guidance_interval, sampler,
    predictor, site="output",
) -> tuple[Any, Any]:
    """Check what sampling and profiling share; return the null branch and the interval."""
    _check_sampler(sampler)
    check_mesh(x)
    if not is_concrete(timesteps):
        raise ValueError("timesteps: FuCa folds them into its tables; pass concrete values")
    if np.ndim(timesteps) == 2:
        raise ValueError(
            "timesteps: FuCa takes one grid [S + 1] for the whole batch; run the groups of "
            "samples that share a grid one after the other"
        )
    schedule.validate()
    _, null_cond = check_run(
        x, cond, timesteps, schedule.num_steps, guidance, null_cond, cfg_channels, sampler, None
    )
    interval = check_interval(guidance_interval, null_cond)
    if interval is not None and site == "output" and is_concrete(guidance_interval):
        breaks = guidance_breaks(timesteps, guidance_interval)
        check_breaks(_as_plan(schedule, predictor), breaks)
        if not set(breaks) <= set(schedule.breaks):
            raise ValueError(
                f"schedule: the guided output jumps at the steps {breaks}; name them with "
                "schedule.with_breaks(fadex.sampling.guidance_breaks(timesteps, "
                "guidance_interval)), or they would be interpolated over"
            )
    return null_cond, interval


def _check_tables(tables, timesteps, schedule, sampler, guidance) -> None:
    """Raise ValueError for tables of another run, saying in what they differ."""
    if (tables.anchors, tables.breaks) != (schedule.anchors, schedule.breaks):
        raise ValueError(
            f"tables: made for anchors {tables.anchors} and breaks {tables.breaks}, the schedule "
            f"has {schedule.anchors} and {schedule.breaks}"
        )
    times = np.asarray(timesteps, np.float64)
    if tables.times.shape != times.shape or not np.allclose(tables.times, times, rtol=1e-5,
                                                            atol=1e-6):
        raise ValueError("timesteps: the tables were made for another time grid")
    if tables.sampler != sampler_name(sampler):
        raise ValueError(
            f"sampler: the tables were made for {tables.sampler!r}, got {sampler_name(sampler)!r}"
        )
    if tables.guidance is None or not is_concrete(guidance) or np.ndim(guidance):
        return
    if abs(float(guidance) - tables.guidance) > 0.25 * max(abs(tables.guidance), 1e-6):
        raise ValueError(
            f"guidance: the tables were profiled at {tables.guidance:g}, got {float(guidance):g}"
        )


def fuca_sample(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    predictor: str | ForecastPlan = "taylor1",
    corrector_order: int = 2,
    revise: str = "x0_damped",
    revision: Any = None,
    tables: FucaTables | None = None,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    return_trajectory: bool = False,
    return_stats: bool = False,
) -> Any:
    r"""Sample with one model call per anchor, each revising the steps that led to it.

    Args:
      denoiser, params, x, cond, guidance, null_cond, cfg_channels, guidance_interval: as in
        :func:`~fadex.caching.cached_sample`; at the ends of a guidance interval the schedule
        needs breaks, and no jump is interpolated over one.
      timesteps: ``[S + 1]``, concrete (they are folded into the tables on the host).
      schedule: anchors; a schedule that computes its last step ends on a plain step.
      predictor: ``"taylor1"``, or any :class:`~fadex.caching.ForecastPlan` of this schedule
        with weights ``[S, K]`` (FADE, BeziCast, ...).
      corrector_order: order of the interpolation through the future node. 1 is the trapezoidal
        rule, 2 (default) adds the anchor before; 3 was measured to be unstable at ``N >= 6``.
      revise: how the velocity follows the revised state: ``"none"``, ``"x0"`` (clean-data
        estimate fixed), ``"x0_damped"`` (0.4 of that in the half nearer to the data; better on
        most settings of the benchmark, hence the default; at short intervals the others may
        win),
        ``"profiled"`` with ``revision`` from :func:`profile_revision`, or at the site ``"crf"``
        ``"head"``: the head evaluated once more, on the revised state.
      revision: slopes :math:`c_f`, one for each anchor, for ``revise="profiled"``.
      tables: from :func:`profile_fuca` or :func:`place_fuca`, in place of the four arguments
        above; at the output. Tables of another schedule, time grid, sampler or guidance (by more
        than a quarter) are refused.
      sampler: a deterministic one-step sampler: :func:`~fadex.sampling.flow_euler` (default),
        ``ddim(eta=0)``.
      site: ``"output"``, or ``"crf"``: forecasts and interpolates the cumulative residual, and
        evaluates the model's head at every skipped step, twice.
      return_trajectory: also return the recovered states ``[S + 1, B, ...]``.
      return_stats: also return :class:`~fadex.caching.CacheStats`, with the relative change of
        the revised velocity (at ``"crf"`` of the feature) from anchor to anchor.

    Returns:
      ``x`` at the last time; with the flags a tuple ``(x, trajectory, stats)`` of what was asked.

    Raises:
      ValueError: a stochastic or multistep sampler; a predictor of another schedule; any other
        bad argument, by name.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.caching import fuca_sample, uniform_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> x = fuca_sample(denoiser, jnp.float32(1.0), jnp.ones((2, 4)), None,
      ...                 timesteps=uniform_times(20), schedule=uniform_schedule(20, 4))
      >>> x.shape
      (2, 4)
    """
    sampler = flow_euler() if sampler is None else sampler
    check_choice("site", site, ("output", "crf"))
    check_site(denoiser, site)
    null_cond, interval = check_fuca(
        x, cond, timesteps, schedule, guidance, null_cond, cfg_channels, guidance_interval,
        sampler, predictor if site == "output" else None, site,
    )
    if revision is not None and revise != "profiled":
        raise ValueError(f"revision: only for revise='profiled', got revise={revise!r}")
    shared = dict(
        denoiser=denoiser, cfg_channels=cfg_channels, return_trajectory=return_trajectory,
        return_stats=return_stats,
    )
    x = jnp.asarray(x)
    if revise == "profiled" and site == "crf":
        raise ValueError("revise: 'profiled' slopes are measured at site='output'")
    if revise == "head" and site != "crf":
        raise ValueError("revise: 'head' evaluates the model's head, at site='crf' only")
    if tables is None:
        tables = fuca_tables(
            timesteps, schedule, predictor=predictor, corrector_order=corrector_order,
            revise=revise, revision=revision, sampler=sampler,
        )
    else:
        if not isinstance(tables, FucaTables):
            raise TypeError(
                f"tables: expected FucaTables, got {type(tables).__name__}; pass a FucaPlan as "
                "**plan._asdict()"
            )
        plain = (revise, predictor, corrector_order) == ("x0_damped", "taylor1", 2)
        if site != "output" or not plain:
            raise ValueError(
                "tables: they replace predictor, corrector_order and revise, and serve "
                "site='output'"
            )
        _check_tables(tables, timesteps, schedule, sampler, guidance)
    if site == "crf":
        final, states, after, sizes, cost = run_crf(
            (params, x, cond, null_cond, guidance, interval), timesteps, schedule,
            _as_plan(schedule, predictor), corrector_order, tables.slope, sampler=sampler,
            head=revise == "head", **shared,
        )
    else:
        device, tail_scale, tail = device_tables(tables, schedule, timesteps, return_trajectory)
        final, states, after, sizes = _run_output(
            params, x, cond, null_cond, guidance, interval, device, tail_scale, tail, **shared
        )
        cost = 0.0
    found = (final,)
    if return_trajectory:
        found += (_recovered(x, states, after, schedule),)
    if return_stats:
        rows = jnp.full((schedule.num_steps, sizes.shape[1]), jnp.nan)
        rows = rows.at[np.asarray(schedule.anchors[1:], np.int32)].set(sizes[1:])
        found += (plan_stats(schedule, fold_branches(rows, len(x)), skip_cost=cost),)
    return found if len(found) > 1 else final


def _recovered(x, states, after, schedule: CacheSchedule) -> jax.Array:
    """The trajectory ``[S + 1, B, ...]`` from the padded segments of a run."""
    pieces = [x[None]]
    anchors = (*schedule.anchors, schedule.num_steps)
    for i in range(1, schedule.nfe):
        pieces.append(states[i, : anchors[i] - anchors[i - 1]])
    pieces.append(after[: schedule.num_steps - schedule.anchors[-1]])
    return jnp.concatenate(pieces)
