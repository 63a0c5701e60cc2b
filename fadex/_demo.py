"""What the commands compute: the demo, drawing, training. Nothing here knows typer.

An error about a value from the command line is a ``ValueError`` that starts with the option's
name (``"checkpoint: ..."``), as everywhere in the library.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

METHODS = ("taylor1", "ab2", "fade")
ROW_KEYS = (
    "method", "interval", "guidance", "site", "nfe", "num_steps", "rel_error", "psnr",
    "agreement", "seconds", "speedup", "ideal_speedup",
)
_PACKAGES = ("fadex-jax", "jax", "jaxlib", "flax", "numpy", "scikit-learn")


class Demo(NamedTuple):
    """What the demo computed.

    Attributes:
      rows: of :func:`fadex.caching.compare.compare`.
      report: everything of ``report.json``.
      pictures: file name -> figure.
    """

    rows: list[dict[str, Any]]
    report: dict[str, Any]
    pictures: dict[str, Any]


def digits_task(checkpoint: Path | None, samples: int, seed: int, profile_samples: int) -> Any:
    """The digits model with noise and labels, as :func:`fadex.caching.compare.compare` takes it."""
    from fadex.caching.compare import label_task
    from fadex.models import DIGITS_CONFIG, DIGITS_SHAPE, load_digits_dit

    try:
        denoiser, params = load_digits_dit(checkpoint)
    except (ValueError, OSError) as error:
        message = str(error).removeprefix("path: ")
        raise ValueError(
            f"checkpoint: expected a folder written by 'fadex train'; {message}"
        ) from error
    return label_task(
        denoiser, params, shape=DIGITS_SHAPE, num_classes=DIGITS_CONFIG.num_classes,
        samples=samples, seed=seed, profile_samples=profile_samples,
    )


def digits_judge() -> tuple[Callable[[Any], np.ndarray], float]:
    """A classifier trained on the real training digits, and its accuracy on the test digits."""
    from fadex.data import digit_classifier, load_images

    train, test = load_images("digits"), load_images("digits", split="test")
    classify = digit_classifier(train.images, train.labels)

    def judge(images: Any) -> np.ndarray:
        if not np.all(np.isfinite(images)):
            raise ValueError("guidance: gives samples that are not finite with this checkpoint")
        return classify(images)

    return judge, float(np.mean(classify(test.images) == test.labels))


def stage_count(methods: Sequence[str], intervals: int, guidances: int, sites: Sequence[str],
                repeats: int) -> int:
    """How often :func:`fadex.caching.compare.compare` calls ``on_run``."""
    from fadex.caching.compare import method_sites

    programs = 1 + intervals * sum(len(method_sites(name, sites)) for name in methods)
    return guidances * (2 * programs + repeats)


def methods_for(names: Sequence[str], sampler: str, sites: Sequence[str]) -> list[str]:
    """``all`` as the methods that run on this sampler at these sites; other names as they are."""
    from fadex.caching.compare import ALL_METHODS, GRID_METHODS, method_sites
    from fadex.caching.methods import supports

    if "all" not in names:
        return list(names)
    solver = GRID_METHODS[sampler]()
    every = [name for name in ALL_METHODS if supports(name, solver) and method_sites(name, sites)]
    return list(dict.fromkeys([*every, *(name for name in names if name != "all")]))


def clean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with exactly :data:`ROW_KEYS`; JSON has no infinities, so they become None."""
    finite = lambda v: None if isinstance(v, float) and not np.isfinite(v) else v
    return [{key: finite(row[key]) for key in ROW_KEYS} for row in rows]


def run_demo(
    *,
    checkpoint: Path | None,
    samples: int,
    steps: int,
    intervals: Sequence[int],
    guidance: float,
    seed: int,
    profile_samples: int,
    warmup: int,
    repeats: int,
    on_stage: Callable[[str], None],
) -> Demo:
    """Profile, sample, compare and draw. ``on_stage`` hears what comes next."""
    started = time.perf_counter()
    on_stage("load the model")
    from fadex.caching import (
        cached_sample,
        fade_plan,
        make_plan,
        profile_fade,
        taylorseer,
        uniform_schedule,
    )
    from fadex.caching.compare import compare
    from fadex.sampling import ab2, sample, uniform_times

    task = digits_task(checkpoint, samples, seed, profile_samples)
    judge, accuracy = digits_judge()
    timesteps = uniform_times(steps)

    on_stage("profile FADE's table")
    shown = intervals[-1]
    schedule = uniform_schedule(steps, shown, warmup=warmup)
    table = profile_fade(
        task.denoiser, task.params, task.profile_x, task.profile_cond, timesteps=timesteps,
        schedule=schedule, guidance=guidance, null_cond=task.profile_null,
    )
    rows = compare(
        task, methods=METHODS, intervals=intervals, guidances=(guidance,), num_steps=steps,
        warmup=warmup, classify=judge, repeats=repeats, on_run=on_stage, keep_samples=True,
    )

    on_stage("follow the trajectories")
    batch = (task.denoiser, task.params, task.x, task.cond)
    shared = dict(guidance=guidance, null_cond=task.null_cond, return_trajectory=True)
    full = sample(*batch, timesteps=timesteps, **shared)[1]
    paths = {"ab2": sample(*batch, timesteps=uniform_times(schedule.nfe), sampler=ab2(),
                           **shared)[1]}
    for name, plan in (("taylor1", make_plan(schedule, taylorseer(1))),
                       ("fade", fade_plan(table))):
        on_stage("follow the trajectories")
        paths[name] = cached_sample(*batch, timesteps=timesteps, plan=plan, **shared)[1]
    curves = {name: trajectory_error(paths[name], full) for name in METHODS}

    on_stage("draw")
    times = np.asarray(timesteps, np.float64)
    report = {
        "rows": clean_rows(rows),
        "settings": {
            "checkpoint": "shipped" if checkpoint is None else str(checkpoint),
            "sampler": "euler", "steps": steps, "intervals": list(intervals),
            "guidance": guidance, "samples": samples, "seed": seed, "warmup": warmup,
            "profile_samples": profile_samples, "repeats": repeats,
        },
        "classifier_test_accuracy": accuracy,
        "fade_table": {
            "interval": shown, "site": table.site, "mode": table.mode,
            "skipped_steps": list(schedule.skipped),
            "alpha": table.params.alpha[list(schedule.skipped), 0].tolist(),
            "lam": table.params.lam[list(schedule.skipped), 0].tolist(),
        },
        "trajectory": {
            "interval": shown, "computed_steps": list(schedule.anchors),
            "curves": {
                name: {"t": t.tolist(), "rel_error": error.tolist()}
                for name, (t, error) in curves.items()
            },
        },
        "machine": machine(),
    }
    pictures = {
        "samples.png": _samples(rows, task, guidance),
        "error.png": _errors(curves, schedule, times, shown, guidance, samples),
    }
    report["seconds"] = time.perf_counter() - started
    return Demo(rows, report, pictures)


def trajectory_error(path: Any, full: Any) -> tuple[np.ndarray, np.ndarray]:
    """Times and mean relative error of states ``[n + 1, B, ...]`` to the full run's.

    Both grids are uniform from 1 to 0. Where they differ, the full run is read off between
    its steps by a cubic spline through its states.
    """
    path, full = (np.asarray(a, np.float64).reshape(len(a), np.shape(a)[1], -1)
                  for a in (path, full))
    fraction = np.linspace(0.0, 1.0, len(path))
    reference = full
    if len(path) != len(full):
        from scipy.interpolate import CubicSpline

        reference = CubicSpline(np.linspace(0.0, 1.0, len(full)), full)(fraction)
    gap = np.linalg.norm(path - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    return 1.0 - fraction, gap.mean(axis=1)


def machine() -> dict[str, Any]:
    """Versions and hardware that the measured times belong to."""
    import jax

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    device = jax.devices()[0]
    return {
        "versions": versions, "platform": device.platform, "device": device.device_kind,
        "cpus": os.cpu_count(), "system": platform.platform(),
    }


def _samples(rows, task, guidance):
    from fadex._pictures import Strip, method_title, strips_picture

    labels = np.asarray(task.cond)[:10].tolist()
    strips = []
    for row in rows:
        note = f"{row['nfe']} evaluations"
        if row["method"] != "full":
            note += f", {row['speedup']:.1f}x, error {row['rel_error']:.4f}"
        strips.append(Strip(method_title(row["method"]), note, row["samples"][: len(labels)]))
    return strips_picture(
        strips, labels, f"Digits by label, guidance {guidance:g}: the same noise in every row"
    )


def _errors(curves, schedule, times, interval, guidance, samples):
    from fadex._pictures import Curve, error_picture

    drawn = [
        Curve(name, t, error, f"{schedule.nfe} evaluations, {error[-1]:.4f} at the end")
        for name, (t, error) in curves.items()
    ]
    title = (
        f"Error along the trajectory: {schedule.nfe} of {schedule.num_steps} steps computed "
        f"(N = {interval})\nguidance {guidance:g}, mean of {samples} samples"
    )
    return error_picture(drawn, times[list(schedule.anchors)].tolist(), title)


# -- fadex sample --------------------------------------------------------------------------


def draw_digits(
    method: str,
    labels: np.ndarray,
    *,
    steps: int,
    interval: int,
    warmup: int,
    guidance: float,
    seed: int,
    site: str,
    sampler: str,
    profile_samples: int,
    table: Path | None,
    checkpoint: Path | None,
) -> tuple[np.ndarray, str]:
    """Images ``[B, 8, 8, 1]``, and how many steps were computed, in words."""
    import jax.numpy as jnp

    from fadex.caching import cached_sample, uniform_schedule
    from fadex.caching.compare import GRID_METHODS, build_method
    from fadex.sampling import sample, uniform_times

    task = digits_task(checkpoint, len(labels), seed, profile_samples)
    task = task._replace(cond=jnp.asarray(labels))
    batch = (task.denoiser, task.params, task.x, task.cond)
    solver = GRID_METHODS[sampler]()
    schedule = uniform_schedule(steps, interval, warmup=warmup)
    shared = dict(guidance=guidance, null_cond=task.null_cond)
    if method == "full" or method in GRID_METHODS:
        if method != "full":  # the evaluations of the schedule on a grid of their own
            nfe = schedule.nfe + (solver.evals_per_step - 1) * steps
            solver = GRID_METHODS[method]()
            steps = max(nfe // solver.evals_per_step, 1)
        images = sample(*batch, timesteps=uniform_times(steps), sampler=solver, **shared)
        computed = f"all {steps} steps computed"
    elif table is not None:
        run = dict(timesteps=uniform_times(steps), sampler=solver, site=site)
        plan = _table_plan(table, schedule, guidance=guidance, params=task.params, **run)
        images = cached_sample(*batch, plan=plan, **run, **shared)
        computed = f"{schedule.nfe} of {steps} steps computed"
    else:
        place = _place(method, site, solver, sampler)
        built = build_method(
            method, schedule, task, timesteps=uniform_times(steps), sampler=solver, site=place,
            guidance=guidance,
        )
        images = built.run()
        stages = solver.evals_per_step - 1
        computed = f"{built.nfe - stages * steps} of {steps} steps computed"
        if method == "ab2_placed":  # a grid of its own, like those above
            computed = f"all {built.nfe} steps computed"
    images = np.asarray(images)
    if not np.all(np.isfinite(images)):
        raise ValueError("guidance: gives samples that are not finite with this checkpoint")
    return images, computed


def _place(method, site, solver, sampler):
    """The site of a method, which may have one of its own; errors name the options."""
    from fadex.caching.compare import method_sites
    from fadex.caching.methods import supports

    if not supports(method, solver):
        raise ValueError(f"sampler: {method} does not run on top of {sampler!r}")
    places = method_sites(method, (site,))
    if not places:
        raise ValueError(f"site: {method} does not cache at {site!r}")
    return places[0]


def _table_plan(path, schedule, *, timesteps, sampler, site, guidance, params):
    from fadex.caching import fade_plan, load_lut
    from fadex.caching.compare import GRID_METHODS
    from fadex.caching.fade_table import sampler_name

    try:
        lut = load_lut(path)
    except (ValueError, OSError) as error:
        message = str(error).removeprefix("path: ")
        raise ValueError(f"table: expected a file written by 'fadex profile'; {message}") from error
    if lut.site != site:
        raise ValueError(f"site: {path} was profiled for {lut.site!r}, got {site!r}")
    names = {sampler_name(make()): name for name, make in GRID_METHODS.items()}
    have, want = (names.get(name, name) for name in (lut.sampler, sampler_name(sampler)))
    if have != want:
        raise ValueError(f"sampler: {path} was profiled with {have!r}, got {want!r}")
    try:
        return fade_plan(lut, schedule, timesteps=timesteps, guidance=guidance, params=params)
    except ValueError as error:
        message = str(error).replace(", or pass strict=False", "")
        raise ValueError(f"table: {path} does not fit this run; {message}") from error


# -- fadex train ---------------------------------------------------------------------------

STATE_ARRAYS, _STATE_SETTINGS = "checkpoint", "settings.json"


class TrainSettings(NamedTuple):
    """What decides the weights that a training ends with."""

    data: str
    steps: int
    batch_size: int
    learning_rate: float
    seed: int


class Trained(NamedTuple):
    """What a training says about itself.

    Attributes:
      start: the step it went on from.
      seconds: wall time, compilation included.
      loss, averaged: mean loss of the last ``averaged`` steps; None when none was left to do.
    """

    start: int
    seconds: float
    loss: float | None
    averaged: int


def check_training(
    out: Path, state: Path, settings: TrainSettings, *, resume: bool, overwrite: bool
) -> None:
    """Raise ValueError where the end of a training could not be written, or its state is alien."""
    if os.path.lexists(out):
        if not overwrite:
            raise ValueError(f"out: {out} exists; pass --overwrite to replace it")
        if not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").exists()):
            raise ValueError(f"out: {out} is not a checkpoint; it is never replaced")
    if not os.path.lexists(state) or (state.is_dir() and not any(state.iterdir())):
        return
    try:
        found = json.loads((state / _STATE_SETTINGS).read_text(encoding="utf-8"))
        differing = [
            f"--{key.replace('_', '-')} {found[key]} (now {value})"
            for key, value in settings._asdict().items() if found[key] != value
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"state: {state} exists and is no training state; expected a new folder, or one "
            "written by 'fadex train'"
        ) from error
    if resume and differing:
        raise ValueError(
            f"state: {state} belongs to a run with {', '.join(differing)}; give its settings to "
            "go on, or --no-resume to start anew"
        )


def train_digits(
    out: Path,
    state: Path,
    settings: TrainSettings,
    *,
    resume: bool,
    overwrite: bool,
    save_every: int,
    keep_state: bool,
    on_stage: Callable[..., None],
) -> Trained:
    """Train, going on from ``state`` where it holds anything, and write the averaged weights."""
    import jax

    from fadex._pictures import write_json
    from fadex.models import DIGITS_CONFIG, NULL_DIGIT, digits_dit, from_nnx, save_digits_dit
    from fadex.sampling import train_flow

    images = _training_images(settings.data)
    if not resume:
        _remove_state(state)
    write_json(state / _STATE_SETTINGS, settings._asdict())
    started = time.perf_counter()
    on_stage("compile", 0)
    denoiser, params = from_nnx(digits_dit(settings.seed))
    final, losses = train_flow(
        denoiser, params, images.images, images.labels, key=jax.random.key(settings.seed),
        steps=settings.steps, batch_size=settings.batch_size,
        learning_rate=settings.learning_rate, class_dropout=DIGITS_CONFIG.class_dropout,
        null_label=NULL_DIGIT, checkpoint_dir=state / STATE_ARRAYS, save_every=save_every,
        on_chunk=lambda step, loss: on_stage(f"loss {loss:.3f}", step),
    )
    seconds = time.perf_counter() - started
    last = np.asarray(losses)[-100:]
    loss = float(last.mean()) if len(last) else None
    save_digits_dit(out, final.ema, overwrite=overwrite, **settings._asdict(), loss=loss)
    if not keep_state:
        _remove_state(state)
    return Trained(settings.steps - len(losses), seconds, loss, len(last))


def _remove_state(folder: Path) -> None:
    """Delete what a training put there, and the folder if nothing else is in it."""
    shutil.rmtree(folder / STATE_ARRAYS, ignore_errors=True)
    (folder / _STATE_SETTINGS).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _training_images(name: str) -> Any:
    from fadex.data import load_images
    from fadex.models import DIGITS_CONFIG, DIGITS_SHAPE

    try:
        images = load_images(name)
    except (ValueError, OSError, ImportError) as error:
        raise ValueError(f"data: {re.sub('^(name|split): ', '', str(error))}") from error
    shape, classes = images.images.shape[1:], images.num_classes
    if shape != DIGITS_SHAPE or classes > DIGITS_CONFIG.num_classes:
        size = lambda shape: " x ".join(map(str, shape))
        raise ValueError(
            f"data: expected pictures of {size(DIGITS_SHAPE)} in at most "
            f"{DIGITS_CONFIG.num_classes} classes, got {size(shape)} in {classes} from {name!r}"
        )
    return images
