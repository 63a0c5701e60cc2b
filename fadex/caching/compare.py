r"""Compare caching methods at equal numbers of model evaluations, on the same noise.

Beside every caching method stands the honest alternative: the same evaluations spent on a
coarser time grid by a plain sampler. Errors are taken to the full run,

.. math:: \frac1B \sum_b \frac{\lVert x_b - x_b^{full} \rVert}{\lVert x_b^{full} \rVert},
   \qquad \mathrm{PSNR} = \frac1B \sum_b 10 \log_{10} \frac{4}{\mathrm{MSE}_b},

for images in ``[-1, 1]``. Times are medians of interleaved runs after compilation.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.fade_table import fade_plan, profile_fade
from fadex.caching.foca import foca
from fadex.caching.hicache import hicache
from fadex.caching.least_squares import profile_least_squares
from fadex.caching.newton import newton
from fadex.caching.plan import ForecastPlan, make_plan
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, uniform_schedule
from fadex.caching.taylor import taylorseer
from fadex.core.checks import check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.grids import uniform_times
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
METHOD_NAMES = (
    "reuse", "taylor1", "taylor2", "taylor3", "newton2", "newton3", "hicache1", "hicache2",
    "foca", "lsq", "fade", "fade_open", "fade_amplitude", *GRID_METHODS,
)


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


def check_method(name: str) -> str:
    """Return ``name`` when :func:`compare` knows it; raise ValueError naming all methods."""
    if name not in METHOD_NAMES:
        raise ValueError(f"methods: expected some of {', '.join(METHOD_NAMES)}, got {name!r}")
    return name


def method_plan(
    name: str,
    schedule: CacheSchedule,
    task: Task,
    *,
    timesteps: Any,
    sampler: Sampler,
    site: str = "output",
    guidance: float = 1.0,
) -> ForecastPlan:
    """The plan of a caching method by name, profiled on the task's profiling batch if needed."""
    check_method(name)
    if name in GRID_METHODS:
        raise ValueError(f"methods: {name!r} is a coarse grid, not a forecaster")
    if name in PROFILED:
        arguments = dict(
            timesteps=timesteps, schedule=schedule, sampler=sampler, site=site,
            guidance=guidance, null_cond=task.profile_null, **PROFILED[name],
        )
        batch = (task.denoiser, task.params, task.profile_x, task.profile_cond)
        if name == "lsq":
            return profile_least_squares(*batch, **arguments)
        return fade_plan(profile_fade(*batch, **arguments))
    if name == "reuse":
        return make_plan(schedule, reuse())
    if name == "foca":
        return make_plan(schedule, foca())
    family, order = re.fullmatch(r"([a-z]+)(\d)", name).groups()
    return make_plan(schedule, _RULES[family](int(order)))


def relative_error(x: Any, reference: Any) -> np.ndarray:
    """``||x - reference|| / ||reference||`` of each sample, ``[B]``."""
    x, reference = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (x, reference))
    return np.linalg.norm(x - reference, axis=1) / np.linalg.norm(reference, axis=1)


def psnr(x: Any, reference: Any, *, data_range: float = 2.0) -> np.ndarray:
    """Peak signal-to-noise ratio of each sample in dB, ``[B]``; infinite for equal ones."""
    x, reference = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (x, reference))
    with np.errstate(divide="ignore"):
        return 10.0 * np.log10(data_range**2 / np.mean((x - reference) ** 2, axis=1))


class _Run(NamedTuple):
    row: dict[str, Any]
    call: Callable[[], jax.Array]


def compare(
    task: Task,
    *,
    methods: Sequence[str],
    intervals: Sequence[int],
    guidances: Sequence[float] = (1.0,),
    sites: Sequence[str] = ("output",),
    num_steps: int = 50,
    warmup: int = 3,
    sampler: Sampler | None = None,
    classify: Callable[[Any], np.ndarray] | None = None,
    repeats: int = 5,
    on_run: Callable[[str], None] | None = None,
    keep_samples: bool = False,
) -> list[dict[str, Any]]:
    """Run every method at every interval, guidance and site, against the full run.

    Args:
      task: model, test and profiling batches.
      methods: names out of :data:`METHOD_NAMES`. Coarse grids (``ab2``, ``dpmpp_2m``, ...)
        spend the evaluations of the interval's schedule on a uniform grid of their own; they
        have no site and appear once per interval.
      intervals, guidances, sites: the grid of settings.
      num_steps: steps of the full run.
      warmup: computed steps at the start of a schedule.
      sampler: of the full and cached runs; :func:`~fadex.sampling.flow_euler` by default.
      classify: independent classifier ``images -> labels``; fills the column ``agreement``,
        the share of samples that keep the label of the full run.
      repeats: interleaved timed runs of each program (median).
      on_run: called with a description of what comes next: once as each of the ``R`` programs
        is prepared, once before its first run (which compiles it), and once before each round
        of timed runs; ``2 R + repeats`` calls for each guidance.
      keep_samples: add the final images as ``row["samples"]``.

    Returns:
      Rows ``{method, interval, guidance, site, nfe, num_steps, rel_error, psnr, agreement,
      seconds, speedup, ideal_speedup}``, the full run first for each guidance
      (``method="full"``, ``interval=1``).

    Raises:
      ValueError: an unknown method, or a bad count.
    """
    sampler = flow_euler() if sampler is None else sampler
    for name in methods:
        check_method(name)
    repeats = check_int("repeats", repeats, minimum=1)
    rows = []
    for guidance in guidances:
        runs = _prepare(
            task, methods, intervals, guidance, sites, num_steps, warmup, sampler, on_run
        )
        rows += _measure(runs, repeats, classify, keep_samples, on_run)
    return rows


def _prepare(task, methods, intervals, guidance, sites, num_steps, warmup, sampler, on_run):
    timesteps = uniform_times(num_steps)
    shared = dict(guidance=float(guidance), null_cond=task.null_cond)
    batch = (task.denoiser, task.params, task.x, task.cond)

    def row(method, interval, site, nfe):
        described = dict(
            method=method, interval=interval, guidance=float(guidance), site=site, nfe=nfe,
            num_steps=num_steps, ideal_speedup=num_steps * sampler.evals_per_step / nfe,
        )
        if on_run is not None:
            on_run(f"prepare {_describe(described)}")
        return described

    evals = num_steps * sampler.evals_per_step
    full = lambda: sample(*batch, timesteps=timesteps, sampler=sampler, **shared)
    runs = [_Run(row("full", 1, "output", evals), full)]
    for interval in intervals:
        schedule = uniform_schedule(num_steps, interval, warmup=warmup)
        # A two-evaluation sampler computes its second evaluation at skipped steps, too.
        nfe = schedule.nfe + (sampler.evals_per_step - 1) * num_steps
        for method in methods:
            if method in GRID_METHODS:
                runs.append(_grid_run(row, batch, shared, method, interval, nfe))
                continue
            for site in sites:
                described = row(method, interval, site, nfe)
                plan = method_plan(
                    method, schedule, task, timesteps=timesteps, sampler=sampler, site=site,
                    guidance=float(guidance),
                )
                call = lambda plan=plan, site=site: cached_sample(
                    *batch, timesteps=timesteps, sampler=sampler, plan=plan, site=site, **shared
                )
                runs.append(_Run(described, call))
    return runs


def _grid_run(row, batch, shared, method, interval, nfe):
    grid_sampler = GRID_METHODS[method]()
    steps = max(nfe // grid_sampler.evals_per_step, 1)
    timesteps = uniform_times(steps)
    described = row(method, interval, "output", steps * grid_sampler.evals_per_step)
    call = lambda: sample(*batch, timesteps=timesteps, sampler=grid_sampler, **shared)
    return _Run(described, call)


def _describe(row):
    return f"{row['method']} N={row['interval']} guidance={row['guidance']:g} {row['site']}"


def _measure(runs, repeats, classify, keep_samples, on_run):
    results = []
    for run in runs:
        if on_run is not None:
            on_run(f"compile {_describe(run.row)}")
        results.append(np.asarray(jax.block_until_ready(run.call())))
    seconds: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats):
        if on_run is not None:
            on_run(f"time all, round {repeat + 1} of {repeats}")
        for run, times in zip(runs, seconds):
            start = time.perf_counter()
            jax.block_until_ready(run.call())
            times.append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in seconds]
    labels = None if classify is None else [np.asarray(classify(x)) for x in results]
    rows = []
    for i, (run, x) in enumerate(zip(runs, results)):
        quality = psnr(x, results[0])
        row = dict(run.row)
        row["rel_error"] = float(relative_error(x, results[0]).mean())
        row["psnr"] = None if i == 0 else float(quality.mean())
        row["agreement"] = None if labels is None else float(np.mean(labels[i] == labels[0]))
        row["seconds"] = medians[i]
        row["speedup"] = medians[0] / medians[i]
        if keep_samples:
            row["samples"] = x
        rows.append(row)
    return rows


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
    samples = check_int("samples", samples, minimum=1)
    profile_samples = check_int("profile_samples", profile_samples, minimum=1)
    key, profile_key = jax.random.split(jax.random.key(seed))
    labels = lambda count: jnp.arange(count, dtype=jnp.int32) % num_classes
    null = lambda count: jnp.full((count,), num_classes, jnp.int32)
    return Task(
        denoiser, params,
        jax.random.normal(key, (samples, *shape)), labels(samples), null(samples),
        jax.random.normal(profile_key, (profile_samples, *shape)), labels(profile_samples),
        null(profile_samples),
    )
