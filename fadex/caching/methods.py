"""Every caching method by name, built for one task at one budget of model evaluations.

A static method spends the evaluations of its schedule. An adaptive policy decides for itself, so
its threshold is calibrated on the profiling batch: the smallest one that keeps within the budget.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.adaptive import adaptive_sample
from fadex.caching.bezicast import bezicast_plan
from fadex.caching.dbcache import dbcache
from fadex.caching.dmd import dmd
from fadex.caching.fade_table import fade_plan, profile_fade
from fadex.caching.foca import foca
from fadex.caching.fuca import fuca_sample
from fadex.caching.fuca_profile import place_fuca, profile_fuca
from fadex.caching.hicache import hicache
from fadex.caching.least_squares import profile_least_squares
from fadex.caching.magcache import magcache_schedule, profile_magcache
from fadex.caching.newton import newton
from fadex.caching.plan import Forecaster, ForecastPlan, make_plan
from fadex.caching.profile_schedule import profile_schedule
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule
from fadex.caching.taylor import taylorseer
from fadex.caching.teacache import teacache
from fadex.caching.toca import toca_sample
from fadex.core.checks import check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.run import sample
from fadex.sampling.samplers import Sampler, ab2, dpmpp_2m, flow_euler, flow_heun

GRID_METHODS: dict[str, Callable[[], Sampler]] = {
    "ab2": ab2,
    "dpmpp_2m": dpmpp_2m,
    "euler": flow_euler,
    "heun": flow_heun,
}
_RULES: dict[str, Callable[..., Any]] = {
    "taylor": taylorseer,
    "newton": newton,
    "hicache": hicache,
}
PROFILED: dict[str, dict[str, Any]] = {
    "fade": {},
    "fade_open": {"mode": "open"},
    "fade_amplitude": {"amplitude": True},
    "lsq": {},
}
_BEZICAST: dict[str, dict[str, Any]] = {
    "bezicast": {},
    "bezicast_bare": {"guard": None},
    "bezicast_state": {"guard": "state"},
}
_FUCA: dict[str, dict[str, Any]] = {
    "fuca": {},
    "fuca_x0": {"revise": "x0"},
    "fuca_none": {"revise": "none"},
    "fuca_fade": {"predictor": "fade"},
    "fuca_fade_x0": {"predictor": "fade", "revise": "x0"},
    "fuca_fit": {"fit": True},
}
# Methods on anchors placed by profile_schedule, at the budget of the given schedule; the coarse
# grid with steps between the same anchors is the honest rival of the same kind.
_PLACED = {
    "taylor1_placed": "taylor1",
    "fade_placed": "fade_amplitude",
    "fuca_placed": "fuca_fit",
    "ab2_placed": "ab2",
}
# What an adaptive policy reuses, and how far it extrapolates.
_POLICIES: dict[str, dict[str, Any]] = {
    "teacache": {"site": "crf"},
    "teacache_taylor": {"site": "crf", "order": 1},
    "dbcache": {"site": "crf"},
    "dbcache_taylor": {"site": "crf", "order": 1},
}
METHOD_NAMES = (
    "reuse", "taylor1", "taylor2", "taylor3", "newton2", "newton3", "hicache1", "hicache2",
    "foca", "dmd", "lsq", "fade", "fade_open", "fade_amplitude", *_BEZICAST, *_FUCA,
    *_POLICIES, "magcache", "toca", *_PLACED, *GRID_METHODS,
)
#: What ``all`` stands for: every method in its best form, without the ablations.
ALL_METHODS = (
    "reuse", "taylor1", "taylor2", "newton2", "hicache2", "foca", "dmd", "lsq", "fade",
    "fade_amplitude", "bezicast", "fuca", "fuca_fit", "teacache", "teacache_taylor", "magcache",
    "dbcache_taylor", "toca", *_PLACED, "ab2", "dpmpp_2m", "euler", "heun",
)
#: Share of tokens whose MLP ToCa computes at a skipped step.
TOCA_RATIO = 0.2


class Task(NamedTuple):
    """A model with the noise and conditions to compare on.

    Attributes:
      denoiser, params: the model.
      x, cond, null_cond: test noise ``[B, ...]``, its conditions, and the null conditions.
      profile_x, profile_cond: other noise and conditions, for offline profiling.
      profile_null: null conditions of the profiling batch.
    """

    denoiser: Denoiser
    params: Any
    x: jax.Array
    cond: Any
    null_cond: Any
    profile_x: jax.Array
    profile_cond: Any
    profile_null: Any


class Built(NamedTuple):
    """A method ready to run on a task.

    Attributes:
      run: ``run() -> x``, the samples; compiled on its first call.
      nfe: model evaluations that it spends.
      cost: the same in evaluations of the plain run, by matrix products: with what skipped steps
        still compute, and what computed steps compute beside the model. Equal to ``nfe`` for
        static methods at the output.
    """

    run: Callable[[], jax.Array]
    nfe: int
    cost: float


def check_method(name: str) -> str:
    """Return ``name`` when it is a method's; raise ValueError naming all methods."""
    if name not in METHOD_NAMES:
        raise ValueError(f"methods: expected some of {', '.join(METHOD_NAMES)}, got {name!r}")
    return name


def method_sites(name: str, sites: Any, denoiser: Denoiser | None = None) -> tuple[str, ...]:
    """Where a method caches, out of ``sites``; a method with one place of its own goes there.

    With ``denoiser``, places that the model does not offer are left out.
    """
    check_method(name)
    if name in GRID_METHODS or name == "ab2_placed":
        return ("output",)
    if name in _PLACED:
        return method_sites(_PLACED[name], [site for site in sites if site == "output"], denoiser)
    if name in _POLICIES or name == "magcache":
        own = ("crf",)
    elif name == "toca":
        own = ("module",)
    elif name == "fuca_fit" or name in ("fuca_fade", "fuca_fade_x0"):
        own = tuple(site for site in sites if site == "output")
    elif name in _FUCA:
        own = tuple(site for site in sites if site != "module")
    else:
        own = tuple(sites)
    if denoiser is None:
        return own
    inside = denoiser.with_features is not None and denoiser.from_features is not None
    own = tuple(site for site in own if site == "output" or inside)
    needed = {"teacache": "modulated", "dbcache": "begin", "toca": "refresh"}
    wanted = needed.get(name.split("_")[0])
    return own if wanted is None or getattr(denoiser, wanted) is not None else ()


def supports(name: str, sampler: Sampler) -> bool:
    """Whether a method runs on top of a sampler."""
    one_step = sampler.evals_per_step == 1 and not sampler.stochastic
    if name in _PLACED:
        return one_step and (name == "ab2_placed" or supports(_PLACED[name], sampler))
    if name in _FUCA:
        return one_step and not jax.tree.leaves(sampler.init(jnp.zeros((1, 1)), None))
    return one_step or name not in ("fade", "fade_amplitude")


def method_plan(
    name: str,
    schedule: CacheSchedule,
    task: Task,
    *,
    timesteps: Any,
    sampler: Sampler,
    site: str = "output",
    guidance: float = 1.0,
) -> ForecastPlan | Forecaster:
    """The plan of a forecasting method, profiled on the task's profiling batch if needed."""
    check_method(name)
    if name in GRID_METHODS:
        raise ValueError(f"methods: {name!r} is a coarse grid, not a forecaster")
    if name in (*_FUCA, *_POLICIES, *_PLACED, "magcache", "toca"):
        raise ValueError(f"methods: {name!r} has a sampling loop of its own, and no plan")
    if name in PROFILED:
        arguments = dict(
            timesteps=timesteps, schedule=schedule, sampler=sampler, site=site,
            guidance=guidance, null_cond=task.profile_null, **PROFILED[name],
        )
        batch = (task.denoiser, task.params, task.profile_x, task.profile_cond)
        if name == "lsq":
            return profile_least_squares(*batch, **arguments)
        return fade_plan(profile_fade(*batch, **arguments))
    if name in _BEZICAST:
        return bezicast_plan(schedule, site=site, **_BEZICAST[name])
    if name == "reuse":
        return make_plan(schedule, reuse())
    if name == "foca":
        return make_plan(schedule, foca())
    if name == "dmd":
        return dmd(schedule, axes=2 if site == "module" else 1)
    family, order = re.fullmatch(r"([a-z]+)(\d)", name).groups()
    return make_plan(schedule, _RULES[family](int(order)))


def build_method(
    name: str,
    schedule: CacheSchedule,
    task: Task,
    *,
    timesteps: Any,
    sampler: Sampler,
    site: str = "output",
    guidance: float = 1.0,
) -> Built:
    """Profile or calibrate a method for a task; what comes back only samples.

    Args:
      name: one of :data:`METHOD_NAMES`, but for the coarse grids.
      schedule: of static methods; its ``nfe`` is the budget of adaptive ones.
      task: model, test and profiling batches.
      timesteps, sampler, site, guidance: of the runs.
    """
    check_method(name)
    batch = (task.denoiser, task.params, task.x, task.cond)
    probe = (task.denoiser, task.params, task.profile_x, task.profile_cond)
    shared = dict(timesteps=timesteps, sampler=sampler, guidance=guidance)
    test = dict(shared, null_cond=task.null_cond)
    profile = dict(shared, null_cond=task.profile_null)
    steps = schedule.num_steps
    # A two-evaluation sampler computes its second evaluation at skipped steps, too.
    extra = (sampler.evals_per_step - 1) * steps
    nfe = schedule.nfe + extra
    if name in _PLACED:
        if name == "fuca_placed":
            chosen = place_fuca(*probe, nfe=schedule.nfe, **profile)._asdict()
            return Built(lambda: fuca_sample(*batch, **chosen, **test), nfe, nfe)
        placed = profile_schedule(*probe, nfe=schedule.nfe, **profile)
        if name != "ab2_placed":
            return build_method(_PLACED[name], placed, task, site=site, **shared)
        grid = jnp.append(jnp.asarray(timesteps)[jnp.asarray(placed.anchors)], timesteps[-1])
        coarse = dict(test, timesteps=grid, sampler=ab2())
        return Built(lambda: sample(*batch, **coarse), nfe, nfe)
    if name in _FUCA:
        options = dict(_FUCA[name])
        if options.pop("fit", False):
            options["tables"] = profile_fuca(*probe, schedule=schedule, **profile)
        if options.get("predictor") == "fade":
            options["predictor"] = method_plan(
                "fade_open", schedule, task, site="output", **shared
            )
        run = functools.partial(
            fuca_sample, *batch, schedule=schedule, site=site, **options, **test
        )
        return Built(run, nfe, nfe) if site == "output" else _static(run, schedule, extra)
    if name in _POLICIES:
        options = _POLICIES[name]
        make = teacache if name.startswith("teacache") else dbcache
        make = functools.partial(make, reduce="mean")
        policy = make(calibrate(make, probe, schedule.nfe, **options, **profile))
        # One program: statistics cost next to nothing here, another program its compilation.
        run = lambda: adaptive_sample(*batch, policy=policy, return_stats=True, **options, **test)
        stats = run()[1]
        cost = steps * sampler.evals_per_step / float(np.min(stats.estimated_speedup))
        return Built(lambda: run()[0], int(np.max(stats.nfe)), cost)
    if name == "magcache":
        ratios = profile_magcache(*probe, site="crf", **profile)
        chosen = _magcache_within(ratios, schedule.nfe)
        plan = make_plan(chosen, reuse())
        return _static(
            functools.partial(cached_sample, *batch, plan=plan, site="crf", **test), chosen, extra
        )
    if name == "toca":
        return _static(
            functools.partial(toca_sample, *batch, schedule=schedule, ratio=TOCA_RATIO, **test),
            schedule, extra,
        )
    plan = method_plan(name, schedule, task, site=site, **shared)
    run = functools.partial(cached_sample, *batch, plan=plan, site=site, **test)
    return Built(run, nfe, nfe) if site == "output" else _static(run, schedule, extra)


def _static(run: Callable[..., Any], schedule: CacheSchedule, extra: int) -> Built:
    """A method whose steps are known, with its cost from statistics that are only traced."""
    stats = jax.eval_shape(lambda: run(return_stats=True))[-1]
    skipped = schedule.num_steps - schedule.nfe
    cost = schedule.nfe * stats.compute_cost + skipped * stats.skip_cost
    return Built(run, schedule.nfe + extra, cost + extra)


def calibrate(
    make: Callable[[float], Any], probe: tuple, budget: int, *, rounds: int = 10, **options: Any
) -> float:
    """A threshold with which a policy spends a budget of evaluations.

    Two bisections in the logarithm on the profiling batch find the thresholds from which the
    policy stays within the budget, and within one evaluation less; between them lies the answer,
    as far as possible from spending one more or one less on other samples. Thresholds are
    operands, so one program serves all rounds.

    Args:
      make: ``make(threshold) -> Policy``.
      probe: ``(denoiser, params, x, cond)`` of the profiling batch.
      budget: computed steps allowed.
      rounds: bisections for each end.
      options: of :func:`~fadex.caching.adaptive_sample`.
    """
    budget = check_int("budget", budget, minimum=1)

    @functools.cache
    def spent(power: float) -> int:
        policy = make(jnp.float32(np.exp(power)))
        stats = adaptive_sample(*probe, policy=policy, return_stats=True, **options)[-1]
        return int(np.max(stats.steps_computed))

    def first_within(limit: int) -> float:
        low, high = -12.0, 12.0  # in powers of e: from nothing skipped to everything
        for _ in range(rounds):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if spent(middle) <= limit else (middle, high)
        return high

    enough, one_less = first_within(budget), first_within(budget - 1)
    return float(np.exp(0.5 * (enough + min(one_less, enough + 2.0))))


def _magcache_within(ratios: np.ndarray, budget: int) -> CacheSchedule:
    """MagCache's schedule of at most ``budget`` steps with the smallest threshold, on the host.

    It keeps three steps at the start, like the other schedules: the published fifth of all steps
    would alone exceed most budgets here.
    """
    low, high = -16.0, 8.0
    schedule = lambda power: magcache_schedule(
        ratios, float(np.exp(power)), max_skip=len(ratios), retention=min(3 / len(ratios), 1.0)
    )
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if schedule(middle).nfe <= budget else (middle, high)
    return schedule(high)


def label_task(
    denoiser: Denoiser,
    params: Any,
    *,
    shape: tuple[int, ...],
    num_classes: int,
    samples: int,
    seed: int,
    profile_samples: int = 16,
) -> Task:
    """A :class:`Task` for a class-conditional model: labels in turn, fresh noise by seed.

    Profiling noise comes from another stream than test noise, whatever the seed.
    """
    labels = lambda count: jnp.arange(count, dtype=jnp.int32) % num_classes
    null = lambda count: jnp.full((count,), num_classes, jnp.int32)
    return conditioned_task(
        denoiser, params, lambda count: (labels(count), null(count)), shape=shape,
        samples=samples, seed=seed, profile_samples=profile_samples,
    )


def conditioned_task(
    denoiser: Denoiser,
    params: Any,
    conditions: Callable[[int], tuple[Any, Any]],
    *,
    shape: tuple[int, ...],
    samples: int,
    seed: int,
    profile_samples: int = 16,
) -> Task:
    """A :class:`Task` for any conditions: ``conditions(count) -> (cond, null_cond)``."""
    samples = check_int("samples", samples, minimum=1)
    profile_samples = check_int("profile_samples", profile_samples, minimum=1)
    key, profile_key = jax.random.split(jax.random.key(seed))
    return Task(
        denoiser, params, jax.random.normal(key, (samples, *shape)), *conditions(samples),
        jax.random.normal(profile_key, (profile_samples, *shape)), *conditions(profile_samples),
    )
