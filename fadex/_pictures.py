"""Pictures, tables, bars and files for the command line.

matplotlib and rich are imported by the call that needs them.

Figures are built without pyplot, so nothing global is touched and no window opens.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# One colour per method, the same in every picture (Okabe and Ito's colour-blind safe set).
_COLOURS = {
    "full": "#000000",
    "fade": "#0072B2",
    "taylor1": "#D55E00",
    "ab2": "#009E73",
    "reuse": "#7F7F7F",
    "lsq": "#CC79A7",
    "fuca_fit": "#A50026",
    "fuca": "#E69F00",
    "bezicast": "#56B4E9",
}
_OTHERS = ("#8C564B", "#9467BD", "#BCBD22", "#17BECF", "#1F3B73", "#AA3377")
_NAMES = {
    "full": "Full run",
    "reuse": "Reuse",
    "taylor1": "TaylorSeer-1",
    "taylor2": "TaylorSeer-2",
    "taylor3": "TaylorSeer-3",
    "newton2": "Newton-2",
    "newton3": "Newton-3",
    "hicache1": "HiCache-1",
    "hicache2": "HiCache-2",
    "foca": "FoCa",
    "dmd": "DMD",
    "lsq": "Least squares",
    "fade": "FADE",
    "fade_open": "FADE, open loop",
    "fade_amplitude": "FADE, amplitude",
    "bezicast": "BeziCast",
    "bezicast_bare": "BeziCast, no guard",
    "bezicast_state": "BeziCast, guard on features",
    "fuca": "FuCa",
    "fuca_x0": "FuCa, x0",
    "fuca_none": "FuCa, velocity as it is",
    "fuca_fade": "FuCa on FADE",
    "fuca_fade_x0": "FuCa on FADE, x0",
    "fuca_fit": "FuCa, profiled",
    "teacache": "TeaCache",
    "teacache_taylor": "TeaCache, Taylor-1",
    "dbcache": "First-block cache",
    "dbcache_taylor": "First-block cache, Taylor-1",
    "magcache": "MagCache",
    "toca": "ToCa",
    "taylor1_placed": "TaylorSeer-1, placed",
    "fade_placed": "FADE, placed",
    "fuca_placed": "FuCa, profiled, placed",
    "ab2_placed": "AB2, placed grid",
    "ab2": "AB2, coarse grid",
    "dpmpp_2m": "DPM-Solver++(2M), coarse grid",
    "euler": "Euler, coarse grid",
    "heun": "Heun, coarse grid",
}
_MARKS = "osD^vP<>X*"


def method_title(method: str) -> str:
    """The name of a method for people."""
    return _NAMES.get(method, method)


def _styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """``{method: (colour, marker)}``."""
    spare = iter(_OTHERS * 3)
    colours = {name: _COLOURS.get(name) or next(spare) for name in methods}
    return {name: (colours[name], _MARKS[i % len(_MARKS)]) for i, name in enumerate(methods)}


def mosaic(images: np.ndarray, columns: int, *, gap: int = 1) -> np.ndarray:
    """Tile images ``[M, H, W]`` row by row into one; gaps and missing tiles are NaN."""
    count, height, width = images.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap), np.nan)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet


def _show(axes: Any, sheet: np.ndarray, colours: str, limit: float) -> Any:
    from matplotlib import colormaps

    shown = axes.imshow(
        np.ma.masked_invalid(sheet), cmap=colormaps[colours].with_extremes(bad="white"),
        vmin=-limit, vmax=limit, interpolation="nearest",
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([])
    return shown


class Strip(NamedTuple):
    """One row of the comparison picture.

    Attributes:
      title, note: two lines beside the row.
      images: ``[M, H, W, 1]`` in ``[-1, 1]``.
    """

    title: str
    note: str
    images: np.ndarray


def strips_picture(strips: Sequence[Strip], labels: Sequence[int], title: str) -> Any:
    """Rows of samples; beside each row after the first its difference to the first row."""
    from matplotlib.figure import Figure

    columns = len(labels)
    rows = np.stack([strip.images[..., 0] for strip in strips])  # [R, M, H, W]
    difference = rows - rows[:1]
    # One sample that went astray must not hide the others: the largest differences saturate.
    limit = max(float(np.quantile(np.abs(difference[1:]), 0.995)), 1e-6)
    height, width = rows.shape[2:]
    tile = 0.52  # inches
    label_width, gap, right, top, bottom = 2.15, 0.35, 1.05, 0.95, 0.2
    block = (columns * tile, len(strips) * tile)
    size = (label_width + 2 * block[0] + gap + right, top + block[1] + bottom)
    figure = Figure(figsize=size)

    def place(left, width):
        return figure.add_axes(
            (left / size[0], bottom / size[1], width / size[0], block[1] / size[1])
        )

    left_axes = place(label_width, block[0])
    right_axes = place(label_width + block[0] + gap, block[0])
    difference[0] = np.nan
    sheets = [mosaic(a.reshape(-1, height, width), columns) for a in (rows, difference)]
    _show(left_axes, sheets[0], "gray", 1.0)
    shown = _show(right_axes, sheets[1], "RdBu_r", limit)
    centres = np.arange(columns) * (width + 1) + (width - 1) / 2
    for axes, text in ((left_axes, "samples"), (right_axes, "difference to the full run")):
        axes.xaxis.tick_top()
        axes.set_xticks(centres, [str(label) for label in labels], fontsize=9, color="0.35")
        axes.set_title(text, fontsize=11, pad=6)
    for i, strip in enumerate(strips):
        middle = i * (height + 1) + (height - 1) / 2
        here = dict(transform=left_axes.transData, ha="right")
        left_axes.text(-2, middle, strip.title, va="bottom", fontsize=10, **here)
        left_axes.text(-2, middle + 0.3, strip.note, va="top", fontsize=8, color="0.35", **here)
    right_axes.text(
        sheets[1].shape[1] / 2, (height - 1) / 2, "none: this is the reference", ha="center",
        va="center", fontsize=9, color="0.5",
    )
    bar_axes = figure.add_axes((
        (size[0] - right + 0.15) / size[0], bottom / size[1], 0.13 / size[0], block[1] / size[1]
    ))
    bar = figure.colorbar(shown, cax=bar_axes, extend="both", extendfrac=0.03)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("pixel value (images span -1 to 1)", fontsize=8)
    figure.suptitle(title, fontsize=12, y=1 - 0.12 / size[1], va="top")
    return figure


class Curve(NamedTuple):
    """The error of one method along the trajectory: ``t`` and ``error``, of equal length."""

    method: str
    t: np.ndarray
    error: np.ndarray
    note: str


def error_picture(curves: Sequence[Curve], anchors: Sequence[float], title: str) -> Any:
    """Relative error against time; the times at which cached runs call the model are marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    axes = figure.add_subplot()
    styles = _styles([curve.method for curve in curves])
    for i, t in enumerate(anchors):
        axes.axvline(
            t, color="0.87", lw=1.2, zorder=0,
            label="model computed\n(cached runs)" if i == 0 else None,
        )
    for curve in curves:
        colour, mark = styles[curve.method]
        positive = curve.error > 0  # equal states have no place on a logarithmic axis
        axes.plot(
            curve.t[positive], curve.error[positive], color=colour, marker=mark, ms=3.5, lw=1.6,
            label=f"{method_title(curve.method)}\n{curve.note}",
        )
    axes.set_yscale("log")
    axes.set_xlim(1.02, -0.02)
    axes.set_xlabel("time t  (1 = noise, 0 = image)")
    axes.set_ylabel("relative error of the state to the full run")
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", which="major", color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=9, labelspacing=1.0)
    return figure


def grid_picture(images: np.ndarray, labels: Sequence[int], title: str) -> Any:
    """All samples on one sheet, with the label that was asked for above each."""
    from matplotlib.figure import Figure

    count = len(labels)
    columns = min(count, 10) if count <= 100 else int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    tile = 0.62 if count <= 100 else max(0.12, 9.0 / columns)
    gap = 3 if count <= 100 else 1
    width = max(columns * tile, 3.2) + 0.4
    figure = Figure(figsize=(width, rows * tile + 0.75))
    left = (1 - columns * tile / width) / 2
    total = rows * tile + 0.75
    axes = figure.add_axes((left, 0.12 / total, 1 - 2 * left, rows * tile / total))
    _show(axes, mosaic(images[..., 0], columns, gap=gap), "gray", 1.0)
    axes.set_xticks([])
    if count <= 100:
        height, wide = images.shape[1:3]
        for i, label in enumerate(labels):
            row, column = divmod(i, columns)
            axes.text(
                column * (wide + gap) + (wide - 1) / 2, row * (height + gap) - 0.8, str(label),
                ha="center", va="bottom", fontsize=8, color="0.35",
            )
    figure.suptitle(title, fontsize=10, y=1 - 0.08 / total, va="top")
    return figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points ``(speed-up, error)`` that no other point beats in both, by rising speed-up."""
    front: list[tuple[float, float]] = []
    for speed, error in sorted(points, key=lambda p: (-p[0], p[1])):
        if not front or error < front[-1][1]:
            front.append((speed, error))
    return front[::-1]


def tradeoff_picture(rows: Sequence[Mapping[str, Any]], sites: Sequence[str]) -> Any:
    """Relative error against speed-up ``S / NFE``, a panel for each guidance and site.

    Methods that cache in a place of their own, and coarse grids, stand in every panel. The broad
    line is the Pareto front of the panel.

    Args:
      rows: of :func:`fadex.caching.compare.compare`.
      sites: what was cached.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from fadex.caching.compare import method_sites

    rows = [row for row in rows if row["method"] != "full" and row["rel_error"]]
    guidances = list(dict.fromkeys(row["guidance"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    styles = _styles(methods)
    panels = [(guidance, site) for guidance in guidances for site in sites]
    across = len(sites) if len(sites) > 1 else min(len(panels), 3)
    down = -(-len(panels) // across)
    height = max(3.8 * down, 0.21 * len(methods) + 0.8)
    figure = Figure(figsize=(4.4 * across + 2.6, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels):]:
        axes.set_visible(False)
    handles = {}
    for axes, (guidance, site) in zip(grid.flat, panels):
        every = []
        for method in methods:
            places = method_sites(method, (site,))
            points = sorted(
                (row["ideal_speedup"], row["rel_error"]) for row in rows
                if row["method"] == method and row["guidance"] == guidance
                and row["site"] in places
            )
            every += points
            if points:
                colour, mark = styles[method]
                (handles[method],) = axes.plot(
                    *zip(*points), color=colour, marker=mark, ms=4.5, lw=1.3
                )
        if every:
            (handles["front"],) = axes.plot(
                *zip(*pareto_front(every)), color="0.8", lw=7, zorder=0, solid_capstyle="round"
            )
        axes.set_yscale("log")
        axes.set_title(f"guidance {guidance:g}, cached: {site}", fontsize=10)
        axes.set_xlabel("speed-up, steps / evaluations")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.grid(color="0.9", which="major")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error to the full run")
    names = {"front": "Pareto front"}
    figure.legend(
        list(handles.values()), [names.get(name, method_title(name)) for name in handles],
        loc="outside right center", frameon=False, fontsize=8,
    )
    return figure


# -- tables --------------------------------------------------------------------------------


def error_text(value: float | None) -> str:
    """A relative error for people."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}" if value else "0"


def _table(title: str, *headers: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom", no_wrap=True)
    return table


ROWS_LEGEND = (
    "N: every N-th step is computed. evals: model evaluations. ideal: the speed-up if only they "
    "took time. same digit: share of samples that an independent classifier labels as it labels "
    "the full run's."
)


def rows_table(rows: Sequence[Mapping[str, Any]], title: Callable[[str], str]) -> Any:
    """A rich table of comparison rows; settings that all rows share stand above it."""
    shown = {"guidance": "{:g}", "site": "{}"}
    several = [key for key in shown if len({row[key] for row in rows}) > 1]
    shared = [f"{key} {shown[key].format(rows[0][key])}" for key in shown if key not in several]
    table = _table(
        ", ".join([f"{rows[0]['num_steps']} steps", *shared, "compared with the full run"]),
        "method", "N", *several, "model\nevals", "time", "speed-up\nmeasured", "\nideal",
        "rel.\nerror", "PSNR", "same\ndigit",
    )
    table.columns[0].justify = "left"
    before = rows[0]
    for row in rows:
        if any(row[key] != before[key] for key in ("interval", "guidance")):
            table.add_section()
        before = row
        table.add_row(
            title(row["method"]), str(row["interval"]),
            *(shown[key].format(row[key]) for key in several), str(row["nfe"]),
            f"{row['seconds']:.3f} s", f"{row['speedup']:.1f}x", f"{row['ideal_speedup']:.1f}x",
            error_text(row["rel_error"]),
            "-" if row["psnr"] is None else f"{row['psnr']:.1f} dB",
            "-" if row["agreement"] is None else f"{100 * row['agreement']:.1f} %",
        )
    return table


def lut_table(lut: Any) -> Any:
    """A rich table of FADE's operators by skipped step; over several sites median and range."""
    from fadex.caching.fade import FORMS

    sites = lut.params.alpha.shape[-1]
    title = "FADE table" if sites == 1 else f"FADE table: median (range) over {sites} sites"
    table = _table(
        title, "step", "t", "since last\ncomputed", "operator", "alpha", "lambda", "order",
        "factor", "distance\nto target",
    )

    def spread(values: np.ndarray, digits: int) -> str:
        middle = f"{np.median(values):.{digits}f}"
        if values.min() == values.max():
            return middle
        return f"{middle} ({values.min():.{digits}f}..{values.max():.{digits}f})"

    p = lut.params
    for s in lut.schedule.skipped:
        counts = np.bincount(p.form[s].astype(int), minlength=len(FORMS))
        forms = [name if sites == 1 else f"{count} {name}"
                 for name, count in zip(FORMS, counts) if count]
        table.add_row(
            str(s), f"{lut.timesteps[s]:.2f}", str(s - lut.schedule.history(s, 1)[0]),
            ", ".join(forms), spread(p.alpha[s], 2), spread(p.lam[s], 2), spread(p.order[s], 0),
            spread(p.amplitude[s], 2), error_text(float(np.sqrt(np.median(lut.errors[s])))),
        )
    return table


def print_table(screen: Any, table: Any) -> None:
    """Print a table; on a narrow terminal lines break, but no cell is cut short."""
    needed = screen.measure(table, options=screen.options.update(max_width=1000)).maximum
    screen.width = max(screen.width, needed)
    screen.print(table)


# -- console and files ---------------------------------------------------------------------


def console() -> Any:
    """A rich console on stdout."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


@contextmanager
def stages(total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr, on a terminal only; ``stage(text, step=None)`` says what comes next.

    ``stage`` counts its calls, or sets the bar to ``step`` when that is given.
    """
    if not sys.stderr.isatty():
        yield lambda text, step=None: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    shown = Console(stderr=True)
    with progress.Progress(*columns, console=shown, redirect_stdout=False, transient=True) as bar:
        task, calls = bar.add_task("", total=total), itertools.count()

        def stage(text: str, step: int | None = None) -> None:
            bar.update(task, description=text, completed=next(calls) if step is None else step)

        yield stage


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN, no infinity); atomic."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_file(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_picture(path: Path, figure: Any) -> None:
    """Write a figure as PNG; atomic."""
    write_file(path, lambda p: figure.savefig(p, format="png", dpi=150, facecolor="white"))
