r"""Cached sampling: one jitted program in which skipped steps do not call the model.

The schedule is static, so the run is cut into segments, each an anchor (one model call)
followed by its skipped steps (a weighted sum of ``K`` cached tensors each), run by
``lax.scan``. At the output all segments form one scan, padded to the longest, so the program
holds the model once; inside the model, where a skipped step costs more, segments of equal
length form a scan each (a uniform schedule has at most four: warm-up, body, ragged tail,
cool-down). There is no predicate anywhere: under ``vmap``, and ``vmap`` of ``vmap``, a
skipped step stays skipped, where a ``lax.cond`` with a batched predicate would compute both
branches.

Timesteps, weights and guidance are operands. Plans of one schedule share one executable; at
the output also plans with different numbers of snapshots, up to four.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.plan import (
    Forecaster,
    ForecastPlan,
    StepInfo,
    check_breaks,
    check_sample_axes,
    plan_forecaster,
    ring_slots,
)
from fadex.caching.profile import check_site
from fadex.caching.schedule import CacheSchedule
from fadex.caching.stats import (
    cost_share,
    fold_branches,
    matmul_flops,
    plan_stats,
    relative_change,
    shapes_of,
)
from fadex.core.checks import is_concrete
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import (
    Guided,
    check_interval,
    check_mesh,
    check_run,
    guidance_breaks,
)
from fadex.sampling.run import apply_step, initial_state
from fadex.sampling.samplers import Sampler, flow_euler

_MAX_RUNS = 4
_SHARED_HISTORY = 4


@functools.lru_cache(maxsize=256)
def _layout(schedule: CacheSchedule, merge: bool) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Cut the schedule into runs of segments: steps ``[count, length]`` and which are real.

    A segment is an anchor and the skipped steps behind it. Neighbours of equal length form a
    run, one scan with one copy of the model in the program. With ``merge``, or when an
    irregular schedule would give many runs, all segments form a single run, padded to the
    longest: padded steps repeat their anchor's index and change nothing.
    """
    anchors = np.asarray(schedule.anchors)
    ends = np.append(anchors[1:], schedule.num_steps)
    lengths = ends - anchors
    cuts = [0, *(np.flatnonzero(np.diff(lengths)) + 1), len(lengths)]
    if merge or len(cuts) - 1 > _MAX_RUNS:
        cuts = [0, len(lengths)]
    layout = []
    for first, last in itertools.pairwise(cuts):
        steps = anchors[first:last, None] + np.arange(lengths[first:last].max())
        real = steps < ends[first:last, None]
        layout.append((np.where(real, steps, anchors[first:last, None]).astype(np.int32), real))
    return tuple(layout)


def _feature_functions(model: Guided, site: str, forecaster: Forecaster):
    """``full(x, t) -> (out, feature)`` and ``cheap(x, t, state, info) -> out`` for a site."""
    if site == "output":

        def full(x, t):
            out = model(x, t)
            return out, out

        def cheap(x, t, state, info):
            del t
            return forecaster.predict(state, info).astype(x.dtype)

        return full, cheap

    def full(x, t):
        return model.with_features(x, t, site)

    fused = site == "module" and model.denoiser.from_history is not None
    if fused and forecaster.snapshots is not None:

        def cheap(x, t, state, info):
            weights, history = forecaster.snapshots(state, info)
            sites = history.shape[1]
            weights = jnp.broadcast_to(weights, (sites, weights.shape[-1]))
            return model.from_history(x, t, weights, history)

    else:

        def cheap(x, t, state, info):
            return model.from_features(x, t, site, forecaster.predict(state, info))

    return full, cheap


def _cached_sample(params, x, cond, null_cond, timesteps, guidance, interval, table, slots, key,
                   *, denoiser, sampler, forecaster, site, cfg_channels, return_trajectory,
                   return_stats=False):
    """The program. ``forecaster.table`` is empty; its rows come as the operand ``table``."""
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    full, cheap = _feature_functions(model, site, forecaster)
    feature = jax.eval_shape(lambda: full(x, timesteps[0])[1])
    rows = table.shape[1:-1] if isinstance(table, jax.Array) else ()
    if site == "module" and rows and rows[0] != feature.shape[0]:
        raise ValueError(
            f"plan.weights: expected shape ({forecaster.schedule.num_steps}, K) or "
            f"({forecaster.schedule.num_steps}, {feature.shape[0]}, K), a row for each of the "
            f"model's features, got {rows[0]} rows"
        )

    def skipped_step(carry, xs, cache):
        x, state = carry
        info, t_next, real = xs
        out = cheap(x, info.t, cache, info)
        new = apply_step(model, sampler, out, x, state, info.t, t_next)
        if real is not None:  # a padded segment: steps past its end change nothing
            new = jax.tree.map(lambda a, b: jnp.where(real, a, b), new, carry)
        return new, new[0] if return_trajectory else None

    def segment(carry, xs):
        x, state, cache, before = carry
        info, t_next, real = xs
        first = jax.tree.map(lambda a: a[0], info)
        rest = jax.tree.map(lambda a: a[1:], (info, t_next, real))
        out, feature = jax.lax.optimization_barrier(full(x, first.t))
        cache = forecaster.observe(cache, feature, first)
        size = None
        if return_stats:
            size, before = relative_change(feature, before, axis=samples), feature
        x, state = apply_step(model, sampler, out, x, state, first.t, t_next[0])
        states = x[None]
        (x, state), later = jax.lax.scan(
            lambda c, xs: skipped_step(c, xs, cache), (x, state), rest
        )
        states = jnp.concatenate([states, later]) if return_trajectory else None
        return (x, state, cache, before), (states, size)

    samples = 1 if site == "module" else 0  # the axis of the feature along which they lie
    before = jnp.zeros(feature.shape, feature.dtype) if return_stats else ()
    carry = (x, initial_state(sampler, x, key, timesteps[0]), forecaster.init(feature), before)
    trajectory, sizes = [x[None]], []
    # At the output a forecast is one weighted sum: padding costs next to nothing, and a single
    # run holds (and compiles) the model once.
    merge = site == "output" and sampler.evals_per_step == 1
    for steps, real in _layout(forecaster.schedule, merge):
        info = StepInfo(
            step=jnp.asarray(steps),
            t=timesteps[steps],
            slot=slots[steps],
            row=jax.tree.map(operator.itemgetter(steps), table),
        )
        mask = None if real.all() else jnp.asarray(real)
        carry, (states, size) = jax.lax.scan(segment, carry, (info, timesteps[steps + 1], mask))
        sizes.append(size)
        if return_trajectory:
            trajectory.append(states.reshape(-1, *x.shape)[np.flatnonzero(real)])
    trajectory = jnp.concatenate(trajectory) if return_trajectory else None
    return carry[0], trajectory, jnp.concatenate(sizes) if return_stats else None


def _anchor_stats(sizes, shapes, *, denoiser, sampler, forecaster, site, cfg_channels):
    """:class:`CacheStats` from the anchors' sizes ``[A, rows]``; ``shapes`` of the arguments."""

    def cost(params, x, cond, null_cond, t, guidance, interval, table, *, skip):
        model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
        full, cheap = _feature_functions(model, site, forecaster)
        if not skip:
            return full(x, t)[0]
        feature = jax.eval_shape(lambda: full(x, t)[1])
        row = jax.tree.map(lambda a: a[0], table)
        return cheap(x, t, forecaster.init(feature), StepInfo(jnp.int32(0), t, jnp.int32(0), row))

    share = cost_share(
        *(matmul_flops(functools.partial(cost, skip=skip), *shapes) for skip in (True, False))
    )
    schedule, batch = forecaster.schedule, shapes[1].shape[0]
    sizes = fold_branches(sizes, batch).at[0].set(jnp.nan)
    every = jnp.full((schedule.num_steps, batch), jnp.nan, sizes.dtype)
    return plan_stats(
        schedule, every.at[np.asarray(schedule.anchors)].set(sizes), skip_cost=share,
        evals_per_step=sampler.evals_per_step,
    )


_STATIC = ("denoiser", "sampler", "forecaster", "site", "cfg_channels", "return_trajectory",
           "return_stats")
_run = jax.jit(_cached_sample, static_argnames=_STATIC)
_run_donating = jax.jit(_cached_sample, static_argnames=_STATIC, donate_argnames=("x",))


def cached_sample(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    plan: ForecastPlan | Forecaster,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    cache_dtype: Any = None,
    key: jax.Array | None = None,
    return_trajectory: bool = False,
    return_stats: bool = False,
    donate_x: bool = False,
) -> Any:
    r"""Sample with the model called at the plan's anchors only.

    The sampler stays untouched: it gets forecast outputs at skipped steps, and a multistep
    sampler remembers them like computed ones. With every step an anchor the result equals
    :func:`fadex.sampling.sample` bit for bit.

    Arrays may lie spread over a mesh with ``Auto`` axes (``x``, ``cond``, ``null_cond`` and rows
    of ``timesteps`` along the batch; rows of an image for a model with ``token_sharding``); the
    result and the cache lie as ``x`` does. Without guidance no sample's step talks to another's.

    Args:
      denoiser, params: the model, from :func:`~fadex.models.from_nnx` or ``from_linen``.
      x: initial latents ``[B, ...]``.
      cond: pytree of conditions with leading axis ``B``, or None. A guidance-distilled model
        takes its scale from here, e.g. ``{"y": labels, "guidance": scales}``, both ``[B]``, with
        ``guidance`` left at 1: one branch, and other scales do not recompile.
      timesteps: ``[S + 1]``, strictly monotone; ``S`` is the schedule's ``num_steps``. Or
        ``[B, S + 1]``, a grid for each sample: the schedule is shared, by step.
      plan: from :func:`~fadex.caching.make_plan` or ``fade_plan``, or any
        :class:`~fadex.caching.Forecaster`. Its schedule is static; weights are operands and
        may be traced or batched.
      sampler: :func:`~fadex.sampling.flow_euler` by default. A two-evaluation sampler (Heun)
        has its first evaluation forecast at skipped steps; the second is always computed.
      site: where features are cached. ``"output"``: the guided model output, one tensor like
        ``x``. ``"crf"``: the cumulative residual of the transformer. ``"module"``: every
        attention and MLP output; the last two need a model with ``with_features`` and
        ``from_features``, and keep separate entries for the two guidance branches.
      guidance, null_cond, cfg_channels, key: as in :func:`fadex.sampling.sample`.
      guidance_interval: ``(low, high)``, as in :func:`fadex.sampling.sample`. At ``"output"``
        the null branch is not computed outside of it; the guided output jumps at its ends, so
        the plan needs breaks there (:func:`~fadex.sampling.guidance_breaks`). Inside the model
        both branches stay in the cache: no jump, no breaks, and nothing saved. Of a
        :class:`~fadex.caching.Forecaster` the schedule must name the breaks; times that are
        traced are not checked.
      cache_dtype: dtype of the snapshots, e.g. bfloat16; sums run in float32.
      return_trajectory: also return all states ``[S + 1, B, ...]``.
      return_stats: also return :class:`~fadex.caching.CacheStats`; keeps one more feature.
      donate_x: give up the buffer of ``x`` to the program.

    Returns:
      ``x`` at the last time; with the flags a tuple ``(x, trajectory, stats)`` of what was asked.

    Raises:
      ValueError: a bad argument, by name, when tracing; ``plan`` when it forecasts over an end
        of the guidance interval, or looks at each sample and was made for another site.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import cached_sample, make_plan, taylorseer, uniform_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> plan = make_plan(uniform_schedule(20, 4), taylorseer(1))
      >>> x = cached_sample(denoiser, jnp.float32(1.0), jnp.ones((2, 4)), None,
      ...                   timesteps=uniform_times(20), plan=plan)
      >>> x.shape
      (2, 4)
    """
    sampler = flow_euler() if sampler is None else sampler
    if isinstance(plan, ForecastPlan):
        # At the output snapshots are cheap: plans of up to four share one program.
        shared = _SHARED_HISTORY if site == "output" else None
        forecaster = plan_forecaster(plan, cache_dtype=cache_dtype, history=shared)
        if np.ndim(plan.weights) == 3 and site != "module":
            raise ValueError(
                f"plan.weights: a row per site needs site='module', got site={site!r} with "
                f"weights {np.shape(plan.weights)}"
            )
    elif isinstance(plan, Forecaster):
        forecaster = plan
        if cache_dtype is not None:
            raise ValueError("cache_dtype: belongs to the forecaster, which was built already")
    else:
        raise TypeError(
            f"plan: expected a ForecastPlan or a Forecaster, got {type(plan).__name__}"
        )
    check_site(denoiser, site)
    check_sample_axes(forecaster, site)
    check_mesh(x)
    times, null_cond = check_run(
        x, cond, timesteps, forecaster.schedule.num_steps, guidance, null_cond, cfg_channels,
        sampler, key,
    )
    interval = check_interval(guidance_interval, null_cond)
    known = is_concrete(timesteps) and is_concrete(guidance_interval)
    if interval is not None and site == "output" and known:
        check_breaks(plan, guidance_breaks(timesteps, guidance_interval))
    history = _history_of(forecaster)
    slots, _ = ring_slots(forecaster.schedule, history)
    # Breaks are in the weights already: schedules that differ in nothing else share a program.
    program = forecaster._replace(
        table=(), schedule=forecaster.schedule._replace(breaks=())
    )
    run = _run_donating if donate_x and is_concrete(x) else _run
    x = jnp.asarray(x)
    static = dict(denoiser=denoiser, sampler=sampler, forecaster=program, site=site,
                  cfg_channels=cfg_channels)
    shapes = shapes_of(
        (params, x, cond, null_cond, times[0], guidance, interval, forecaster.table)
    )
    out, trajectory, sizes = run(
        params, x, cond, null_cond, times, guidance, interval, forecaster.table, slots, key,
        return_trajectory=return_trajectory, return_stats=return_stats, **static,
    )
    found = (out,) + ((trajectory,) if return_trajectory else ())
    if return_stats:
        found += (_anchor_stats(sizes, shapes, **static),)
    return found if len(found) > 1 else out


def _history_of(forecaster: Forecaster) -> int:
    """Ring length; a forecaster without one counts slots without wrapping."""
    size = getattr(forecaster.init, "size", None)
    return forecaster.schedule.num_steps if size is None else size
