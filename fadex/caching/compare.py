r"""Compare caching methods at equal numbers of model evaluations, on the same noise.

Beside every caching method stands the honest alternative: the same evaluations spent on a
coarser time grid by a plain sampler. Errors are taken to the full run,

.. math:: \frac1B \sum_b \frac{\lVert x_b - x_b^{full} \rVert}{\lVert x_b^{full} \rVert},
   \qquad \mathrm{PSNR} = \frac1B \sum_b 10 \log_{10} \frac{4}{\mathrm{MSE}_b},

for images in ``[-1, 1]``. Times are medians of interleaved runs after compilation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fadex.caching.methods import (
    ALL_METHODS,
    GRID_METHODS,
    METHOD_NAMES,
    PROFILED,
    Task,
    build_method,
    check_method,
    conditioned_task,
    label_task,
    method_plan,
    method_sites,
    supports,
)
from fadex.caching.schedule import uniform_schedule
from fadex.core.checks import check_int
from fadex.sampling.grids import uniform_times
from fadex.sampling.run import sample
from fadex.sampling.samplers import Sampler, flow_euler

__all__ = [
    "ALL_METHODS",
    "GRID_METHODS",
    "METHOD_NAMES",
    "PROFILED",
    "Task",
    "build_method",
    "check_method",
    "compare",
    "conditioned_task",
    "label_task",
    "method_plan",
    "method_sites",
    "psnr",
    "relative_error",
]


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
        have no site and appear once per interval. Adaptive policies get the same evaluations as
        a budget (their thresholds are calibrated on the profiling batch) and cache in a place
        of their own.
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
      ValueError: an unknown method, one that the model or the sampler does not support, or a
        bad count.
    """
    sampler = flow_euler() if sampler is None else sampler
    for name in methods:
        check_method(name)
        if not supports(name, sampler):
            raise ValueError(f"methods: {name!r} does not run on top of this sampler")
        if not method_sites(name, sites, task.denoiser):
            raise ValueError(
                f"methods: {name!r} does not cache at {', '.join(sites)} in this model"
            )
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
            for site in method_sites(method, sites, task.denoiser):
                described = row(method, interval, site, nfe)
                built = build_method(
                    method, schedule, task, timesteps=timesteps, sampler=sampler, site=site,
                    guidance=float(guidance),
                )
                described.update(nfe=built.nfe, ideal_speedup=evals / built.cost)
                runs.append(_Run(described, built.run))
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
