"""The ``fadex`` command: parses, calls the library, prints tables, writes pictures.

JAX and the library are imported inside the commands, after the arguments have been checked, so
that ``--help`` and a wrong argument answer at once. Every error that a user can cause leaves as
one message on stderr with exit code 2; the group and command classes below see to it.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fadex._version import __version__

# Repeated here because the library's own lists cost an import of JAX; a test compares them.
SAMPLERS = ("euler", "ab2", "dpmpp_2m", "heun")
SITES = ("output", "crf", "module")
METHODS = (
    "reuse", "taylor1", "taylor2", "taylor3", "newton2", "newton3", "hicache1", "hicache2",
    "foca", "dmd", "lsq", "fade", "fade_open", "fade_amplitude", "bezicast", "bezicast_bare",
    "bezicast_state", "fuca", "fuca_x0", "fuca_none", "fuca_fade", "fuca_fade_x0", "fuca_fit",
    "teacache", "teacache_taylor", "dbcache", "dbcache_taylor", "magcache", "toca",
    "taylor1_placed", "fade_placed", "fuca_placed", "ab2_placed",
    "ab2", "dpmpp_2m", "euler", "heun",
)
FADE_METHODS = ("fade", "fade_open", "fade_amplitude")

# Other packages' and typer's copies of click differ; the bases of a public class do not.
UsageError = typer.BadParameter.__mro__[1]
ClickException = typer.BadParameter.__mro__[2]

# Argument names of the library that differ from the option that sets them.
_ALIASES = {
    "guidances": ("guidance",),
    "num_steps": ("steps",),
    "params": ("checkpoint",),
    "site": ("sites",),
    "timesteps": ("steps",),
}


def _bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{option}'")


def _one_line(message: str) -> str:
    """A library message of many lines (a damaged checkpoint lists its files), shortened."""
    first, *rest = [line.strip() for line in message.strip().splitlines() if line.strip()] or [""]
    more = f"; and {len(rest) - 3} more" if len(rest) > 3 else ""
    return " ".join([first, "; ".join(rest[:3])]).strip() + more


def _explain(error: Exception, ctx: Any) -> Exception:
    """A library error as a usage error that names the option, where one is behind it."""
    message = _one_line(str(error)) or type(error).__name__
    options = {param.name: param.opts[0] for param in ctx.command.params if param.opts}
    match = re.match(r"(\w+)[\w.\[\]]*: (.*)", message, re.DOTALL)
    if match:
        for name in (match[1], *_ALIASES.get(match[1], ())):
            if name in options:
                value = ctx.params.get(name)
                said = value is None or str(value) in match[2]
                return _bad(options[name], match[2] if said else f"{match[2]} (got {value})")
    return UsageError(message, ctx=ctx)


class _Command(TyperCommand):
    """Turns errors of the library into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            shown = _explain(error, ctx)
            shown.ctx = ctx
            raise shown from error


class _Group(TyperGroup):
    """Prints a usage error as one line of plain text."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        extra["prog_name"] = "fadex"
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except ClickException as error:
            ctx = getattr(error, "ctx", None)
            where = ctx.command_path if ctx is not None else "fadex"
            print(f"{where}: {_one_line(error.format_message())}", file=sys.stderr)
            sys.exit(2)
        except (typer.Abort, KeyboardInterrupt):
            code = 130
        if code == 130:
            print("fadex: interrupted", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Group, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Feature caching for diffusion transformers: FADE and its rivals on real images.",
)


# -- arguments -----------------------------------------------------------------------------


def _items(option: str, text: str, expected: str) -> list[str]:
    """The items of a list, each once."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        what = "an empty list" if not any(items) else f"an empty item in {text!r}"
        raise _bad(option, f"{what}; expected {expected}.")
    return list(dict.fromkeys(items))


def _names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    expected = f"some of {', '.join(allowed)}, separated by commas"
    items = _items(option, text, expected)
    for item in items:
        if item not in allowed:
            raise _bad(option, f"unknown {item!r}; expected {expected}.")
    return items


def _number(option: str, text: Any, kind: type, low: float, high: float, *, open_low: bool = False,
            expected: str = "") -> Any:
    """``text`` as a finite int or float in ``[low, high]``, without ``low`` if ``open_low``."""
    try:
        number = kind(text)
        if math.isfinite(number) and low <= number <= high and not (open_low and number == low):
            return number
    except (ValueError, OverflowError):
        pass
    if not expected:
        expected = "an integer" if kind is int else "a finite number"
        expected += _range(low, high, open_low)
    raise _bad(option, f"{str(text)!r}; expected {expected}.")


def _range(low: float, high: float, open_low: bool = False) -> str:
    if low == -math.inf:
        return ""
    if high == math.inf:
        return f" {'>' if open_low else '>='} {low:g}"
    return f" from {low:.10g} to {high:.10g}"


def _numbers(option: str, text: str, kind: type, low: float = -math.inf,
             high: float = math.inf) -> list[Any]:
    expected = "integers" if kind is int else "finite numbers"
    expected += f"{_range(low, high)}, separated by commas"
    return [_number(option, item, kind, low, high, expected=expected)
            for item in _items(option, text, expected)]


# typer's own checks do not name the value in every version; these messages do.


def _integer(option: str, low: int, high: float = math.inf, *, help: str) -> Any:
    parse = lambda text: _number(option, text, int, low, high)
    return typer.Option(option, metavar="INT", parser=parse, help=help)


def _real(option: str, *, positive: bool = False, help: str) -> Any:
    low = 0.0 if positive else -math.inf
    parse = lambda text: _number(option, text, float, low, math.inf, open_low=positive)
    return typer.Option(option, metavar="FLOAT", parser=parse, help=help)


def _choice(option: str, allowed: Sequence[str], *, help: str, **extra: Any) -> Any:
    def parse(text: str) -> str:
        if text not in allowed:
            raise _bad(option, f"unknown {text!r}; expected one of {', '.join(allowed)}.")
        return text

    extra = {"metavar": "|".join(allowed), **extra}
    return typer.Option(option, parser=parse, help=help, **extra)


def _output(option: str, path: Path | None, suffix: str | None = None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if path is None:
        return
    if suffix is not None and path.suffix != suffix:
        raise _bad(option, f"{str(path)!r}; expected a file name that ends in {suffix}.")
    if path.is_dir():
        raise _bad(option, f"{str(path)!r} is a folder; expected a file name.")
    _writable(option, path)


def _writable(option: str, path: Path) -> None:
    path = path.absolute()
    existing = next(p for p in (*path.parents, path) if os.path.lexists(p))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is not a folder"
        raise _bad(option, f"cannot write {str(path)!r}: {existing} {reason}.")
    if path.is_file() and not os.access(path, os.W_OK):
        raise _bad(option, f"cannot write {str(path)!r}: the file is write-protected.")


def _checkpoint_exists(path: Path | None) -> None:
    if path is not None and not path.exists():
        raise _bad(
            "--checkpoint",
            f"no checkpoint at {str(path)!r}; expected a folder written by 'fadex train'.",
        )


# -- options that several commands share -----------------------------------------------------

_MOST_STEPS = 10_000

Checkpoint = Annotated[Path | None, typer.Option(
    "--checkpoint", metavar="DIR", show_default="the shipped digits model",
    help="Model weights: a folder written by 'fadex train'.")]
Steps = Annotated[int, _integer("--steps", 1, _MOST_STEPS, help="Steps of the full run.")]
Interval = Annotated[int, _integer(
    "--interval", 1, _MOST_STEPS, help="Compute every N-th step, forecast the others.")]
Intervals = Annotated[str, typer.Option(
    "--intervals", metavar="LIST", help="Intervals N to compare, separated by commas: every N-th "
    "step is computed, the others are forecast.")]
Warmup = Annotated[int, _integer(
    "--warmup", 1, _MOST_STEPS, help="Computed steps at the start of a run.")]
Guidance = Annotated[float, _real(
    "--guidance", help="Classifier-free guidance; 1 computes no null branch.")]
Seed = Annotated[int, _integer("--seed", 0, 2**32 - 1, help="Seed of the noise.")]
Samples = Annotated[int, _integer("--samples", 1, help="Samples to draw.")]
ProfileSamples = Annotated[int, _integer(
    "--profile-samples", 1, help="Samples of the batch that FADE's table is profiled on.")]
Repeats = Annotated[int, _integer(
    "--repeats", 1, help="Interleaved timed runs of each program; medians are reported.")]
SamplerName = Annotated[str, _choice(
    "--sampler", SAMPLERS, help="Sampler of the full and cached runs.")]
Site = Annotated[str, _choice(
    "--site", SITES, help="What is cached: the model's output, its cumulative residual (crf), or "
    "every attention and MLP output (module).")]


def _version(value: bool) -> None:
    if value:
        print(f"fadex {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _main(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    del version
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(2)


# -- commands ------------------------------------------------------------------------------


@app.command(cls=_Command)
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for samples.png, "
                                      "error.png and report.json.")] = Path("out/demo"),
    samples: Samples = 64,
    steps: Steps = 50,
    intervals: Intervals = "4,6",
    guidance: Guidance = 1.0,
    seed: Seed = 0,
    warmup: Warmup = 3,
    profile_samples: ProfileSamples = 16,
    repeats: Repeats = 5,
    checkpoint: Checkpoint = None,
) -> None:
    """FADE at work: profile, sample, compare with its rivals, draw."""
    numbers = _numbers("--intervals", intervals, int, 1, _MOST_STEPS)
    _checkpoint_exists(checkpoint)
    if out.exists() and not out.is_dir():
        raise _bad("--out", f"{str(out)!r} is a file; expected a folder.")
    _writable("--out", out / "report.json")

    from fadex._demo import METHODS as shown
    from fadex._demo import run_demo, stage_count
    from fadex._pictures import (
        ROWS_LEGEND,
        console,
        method_title,
        print_table,
        rows_table,
        stages,
        write_json,
        write_picture,
    )

    total = 6 + stage_count(shown, len(numbers), 1, ("output",), repeats)
    with stages(total) as stage:
        result = run_demo(
            checkpoint=checkpoint, samples=samples, steps=steps, intervals=numbers,
            guidance=guidance, seed=seed, profile_samples=profile_samples, warmup=warmup,
            repeats=repeats, on_stage=stage,
        )
        for name, figure in result.pictures.items():
            write_picture(out / name, figure)
        write_json(out / "report.json", result.report)
    screen = console()
    accuracy = 100 * result.report["classifier_test_accuracy"]
    print_table(screen, rows_table(result.report["rows"], method_title))
    screen.print(ROWS_LEGEND)
    screen.print(
        f"{samples} samples, seed {seed}; times are medians of {repeats} interleaved runs after "
        "compilation."
    )
    screen.print(
        f"The classifier is right on {accuracy:.1f} % of real digits that it was not trained on."
    )
    by_method = {(row["method"], row["interval"]): row for row in result.rows}
    for n in numbers:
        fade = by_method["fade", n]["rel_error"]
        ratios = [
            f"{fade / by_method[rival, n]['rel_error']:.2f}x {method_title(rival)}"
            for rival in shown if rival != "fade" and by_method[rival, n]["rel_error"]
        ]
        if ratios:
            screen.print(f"FADE's error at N = {n}: {'; '.join(ratios)}.")
    screen.print(f"Computed in {result.report['seconds']:.1f} s. Wrote:")
    for name in (*result.pictures, "report.json"):
        screen.print(f"  {out / name}", soft_wrap=True)


@app.command(cls=_Command)
def compare(
    methods: Annotated[str, typer.Option(
        "--methods", metavar="LIST", help=f"Methods, separated by commas: 'all' (every method in "
        f"its best form), or some of {', '.join(METHODS)}. The last {len(SAMPLERS)} are plain "
        "samplers, which spend the same evaluations on a coarser grid.",
    )] = "reuse,taylor1,ab2,fade",
    intervals: Intervals = "4,6",
    guidance: Annotated[str, typer.Option(
        "--guidance", metavar="LIST", help="Classifier-free guidance values, separated by commas; "
        "1 computes no null branch.")] = "1",
    sites: Annotated[str, typer.Option(
        "--sites", metavar="LIST",
        help=f"What is cached, separated by commas: {', '.join(SITES)}.")] = "output",
    steps: Steps = 50,
    sampler: SamplerName = "euler",
    warmup: Warmup = 3,
    samples: Samples = 64,
    seed: Seed = 0,
    profile_samples: ProfileSamples = 16,
    repeats: Repeats = 5,
    checkpoint: Checkpoint = None,
    json_file: Annotated[Path | None, typer.Option(
        "--json", metavar="FILE", show_default="no file", help="Write the rows as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(
        "--plot", metavar="FILE.png", show_default="no picture",
        help="Draw error against speed-up.")] = None,
) -> None:
    """Compare caching methods at equal model evaluations, on the same noise."""
    names = _names("--methods", methods, ("all", *METHODS))
    numbers = _numbers("--intervals", intervals, int, 1, _MOST_STEPS)
    guidances = _numbers("--guidance", guidance, float)
    places = _names("--sites", sites, SITES)
    _output("--json", json_file)
    _output("--plot", plot, ".png")
    _checkpoint_exists(checkpoint)

    from fadex._demo import clean_rows, digits_judge, digits_task, methods_for, stage_count
    from fadex._pictures import (
        ROWS_LEGEND,
        console,
        print_table,
        rows_table,
        stages,
        tradeoff_picture,
        write_json,
        write_picture,
    )
    from fadex.caching.compare import GRID_METHODS
    from fadex.caching.compare import compare as run_compare

    names = methods_for(names, sampler, places)
    task = digits_task(checkpoint, samples, seed, profile_samples)
    judge, _ = digits_judge()
    total = stage_count(names, len(numbers), len(guidances), places, repeats)
    with stages(total) as stage:
        rows = run_compare(
            task, methods=names, intervals=numbers, guidances=guidances, sites=places,
            num_steps=steps, warmup=warmup, sampler=GRID_METHODS[sampler](),
            classify=judge, repeats=repeats, on_run=stage,
        )
    rows = clean_rows(rows)
    if json_file is not None:
        write_json(json_file, rows)
    if plot is not None:
        write_picture(plot, tradeoff_picture(rows, places))
    screen = console()
    print_table(screen, rows_table(rows, str))
    screen.print(ROWS_LEGEND)
    screen.print(
        f"{samples} samples, seed {seed}; times are medians of {repeats} interleaved runs after "
        "compilation."
    )
    for path in (json_file, plot):
        if path is not None:
            screen.print(f"Wrote {path}", soft_wrap=True)


@app.command(cls=_Command)
def sample(
    out: Annotated[Path, typer.Option(
        "--out", metavar="FILE.png", help="Picture of the samples.")] = Path("samples.png"),
    method: Annotated[str, _choice(
        "--method", ("full", *METHODS), metavar="NAME",
        help=f"'full' for every step, or one of {', '.join(METHODS)}.")] = "fade",
    interval: Interval = 5,
    guidance: Guidance = 1.0,
    samples: Samples = 20,
    labels: Annotated[str, typer.Option(
        "--labels", metavar="LIST",
        help="Digits to draw, separated by commas, taken in turn.")] = "0,1,2,3,4,5,6,7,8,9",
    seed: Seed = 0,
    table: Annotated[Path | None, typer.Option(
        "--table", metavar="FILE.npz", show_default="profiled on the spot",
        help="FADE table written by 'fadex profile' with the same settings.")] = None,
    steps: Steps = 50,
    site: Site = "output",
    sampler: SamplerName = "euler",
    warmup: Warmup = 3,
    profile_samples: ProfileSamples = 16,
    checkpoint: Checkpoint = None,
    npz: Annotated[Path | None, typer.Option(
        "--npz", metavar="FILE.npz", show_default="no file",
        help="Also write the arrays: images in [-1, 1] and labels.")] = None,
) -> None:
    """Draw digits with any method and write them as a picture."""
    _numbers("--labels", labels, int, 0, 9)
    digits = [int(item) for item in labels.split(",")]  # repeated ones count
    _output("--out", out, ".png")
    _output("--npz", npz, ".npz")
    _checkpoint_exists(checkpoint)
    if table is not None and method not in FADE_METHODS:
        raise _bad("--table", f"serves {', '.join(FADE_METHODS)} only, got --method {method}.")
    if table is not None and not table.is_file():
        raise _bad("--table", f"no table at {str(table)!r}; expected a file written by "
                   "'fadex profile'.")

    import numpy as np

    from fadex._demo import draw_digits
    from fadex._pictures import console, grid_picture, method_title, write_file, write_picture

    asked = np.asarray([digits[i % len(digits)] for i in range(samples)], np.int32)
    images, computed = draw_digits(
        method, asked, steps=steps, interval=interval, warmup=warmup, guidance=guidance, seed=seed,
        site=site, sampler=sampler, profile_samples=profile_samples, table=table,
        checkpoint=checkpoint,
    )
    title = f"{method_title(method)}: {computed}\nguidance {guidance:g}, seed {seed}"
    write_picture(out, grid_picture(images, asked.tolist(), title))
    if npz is not None:
        write_file(npz, lambda path: np.savez(path, images=images, labels=asked))
    screen = console()
    screen.print(f"{samples} samples, {method_title(method)}: {computed}.")
    for path in (out, npz):
        if path is not None:
            screen.print(f"Wrote {path}", soft_wrap=True)


@app.command(cls=_Command)
def profile(
    out: Annotated[Path, typer.Option(
        "--out", metavar="FILE.npz", help="The table to write.")] = Path("table.npz"),
    interval: Interval = 5,
    guidance: Guidance = 1.0,
    steps: Steps = 50,
    site: Site = "output",
    mode: Annotated[str | None, _choice(
        "--mode", ("closed", "open"), show_default="closed at the output, open elsewhere",
        help="Fit to the full run (open), or replay the cached run and undo its drift "
        "(closed).")] = None,
    samples: Annotated[int, _integer("--samples", 1, help="Samples to profile on.")] = 16,
    sampler: SamplerName = "euler",
    amplitude: Annotated[bool, typer.Option(
        "--amplitude", show_default="off", help="Also fit a factor on every forecast.")] = False,
    warmup: Warmup = 3,
    seed: Seed = 0,
    checkpoint: Checkpoint = None,
) -> None:
    """Profile FADE's look-up table on one batch and write it."""
    _output("--out", out, ".npz")
    _checkpoint_exists(checkpoint)

    from fadex._demo import digits_task
    from fadex._pictures import console, lut_table, print_table, stages
    from fadex.caching import profile_fade, save_lut, uniform_schedule
    from fadex.caching.compare import GRID_METHODS
    from fadex.sampling import uniform_times

    task = digits_task(checkpoint, 1, seed, samples)
    schedule = uniform_schedule(steps, interval, warmup=warmup)
    with stages(1) as stage:
        stage("profile")
        lut = profile_fade(
            task.denoiser, task.params, task.profile_x, task.profile_cond,
            timesteps=uniform_times(steps), schedule=schedule,
            sampler=GRID_METHODS[sampler](), site=site,
            mode=mode, guidance=guidance,
            null_cond=task.profile_null, amplitude=amplitude,
        )
    save_lut(lut, out)
    screen = console()
    print_table(screen, lut_table(lut))
    targets = {"open": "The target is the feature of the full run.",
               "closed": "The target also undoes the drift of earlier skips."}
    screen.print(targets[lut.mode])
    screen.print(
        f"{schedule.nfe} of {steps} steps are computed, {len(schedule.skipped)} forecast; "
        f"{lut.mode} loop at {lut.site}, {sampler}, guidance {guidance:g}, "
        f"{samples} samples."
    )
    screen.print(f"Wrote {out}", soft_wrap=True)


@app.command(cls=_Command)
def train(
    out: Annotated[Path, typer.Option(
        "--out", metavar="DIR", help="Checkpoint folder to write: the averaged (EMA) weights.")],
    steps: Annotated[int, _integer("--steps", 1, help="Optimizer steps.")] = 1500,
    batch_size: Annotated[int, _integer("--batch-size", 1, help="Images a step.")] = 48,
    learning_rate: Annotated[float, _real(
        "--learning-rate", positive=True, help="Peak of the cosine schedule.")] = 3e-3,
    seed: Annotated[int, _integer(
        "--seed", 0, 2**32 - 1, help="Seed of weights and batches.")] = 0,
    data: Annotated[str, typer.Option(
        "--data", metavar="NAME",
        help="Image set of 8 x 8 gray pictures: digits, tfds:NAME, folder:PATH.")] = "digits",
    state: Annotated[Path | None, typer.Option(
        "--state", metavar="DIR", show_default="OUT.state, removed at the end",
        help="Folder of the training state; an interrupted run goes on from it.")] = None,
    resume: Annotated[bool, typer.Option(
        "--resume/--no-resume", help="Go on from the training state, or start anew.")] = True,
    save_every: Annotated[int, _integer(
        "--save-every", 1, help="Steps between two saves of the training state.")] = 250,
    overwrite: Annotated[bool, typer.Option(
        "--overwrite", show_default="off", help="Replace a checkpoint at OUT.")] = False,
) -> None:
    """Train the digits model by flow matching and write its weights."""
    _writable("--out", out)

    from fadex._demo import STATE_ARRAYS, TrainSettings, check_training, train_digits
    from fadex._pictures import console, stages

    settings = TrainSettings(data, steps, batch_size, learning_rate, seed)
    folder = out.absolute().with_name(out.absolute().name + ".state") if state is None else state
    _writable("--state", folder)
    check_training(out, folder, settings, resume=resume, overwrite=overwrite)
    try:
        with stages(steps) as stage:
            result = train_digits(
                out, folder, settings, resume=resume, overwrite=overwrite, save_every=save_every,
                keep_state=state is not None, on_stage=stage,
            )
    except KeyboardInterrupt:
        if (folder / STATE_ARRAYS).exists():
            print(f"fadex train: the same command goes on from {folder}", file=sys.stderr)
        raise
    screen = console()
    since = "" if result.start == 0 else f", from step {result.start} on"
    screen.print(f"Trained to step {steps} in {result.seconds:.1f} s{since}.")
    if result.loss is not None:
        screen.print(f"Mean loss of the last {result.averaged} steps: {result.loss:.3f}.")
    screen.print(f"Wrote {out}", soft_wrap=True)
