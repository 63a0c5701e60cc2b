"""Real training: every optimizer tuned alike on digits and on a character-level transformer.

    python benchmarks/optim_training.py                         # everything that is not there yet
    python benchmarks/optim_training.py --only training --tasks digits_mlp --optimizers adamw
    python benchmarks/optim_training.py --table                 # print what was measured

For each task (``benchmarks/optim_models.py``) and optimizer:

* nine points on a geometric grid around the documented default: of the learning rate alone
  (ratio 10^(1/3)), or 3 x 3 with a second hyperparameter (ratio 10^(1/2)). While a neighbour of
  the best point has not been tried, the window moves onto the best point, at most ``MAX_MOVES``
  times; the points tried are counted and printed;
* the point with the lowest loss on the task's ``select`` split, mean over the tuning seeds (two
  for the transformer, four for the digits), wins;
* it is run on fresh seeds. A seed fixes initial parameters and batches, so optimizers are paired
  by seed, and differences come with 95 % t-intervals of the paired differences;
* the same schedule for all: linear decay to zero.

One program is compiled for each task and optimizer, with hyperparameters as traced arrays, and
runs ``CHUNK`` trainings at a time under ``vmap``. Results are written to
``benchmarks/results/optim_training.json`` after each optimizer and kept under a hash of the
settings, so an interrupted run goes on. The part ``river_lm`` maps where heavy ball is stable on
the transformer, over learning rate and momentum.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from optim_models import TASKS, Task
from scipy import stats

from fadex.core.progress import progress_bar
from fadex.optim import (
    accelegrad,
    accelegrad_eval_params,
    accelegrad_sharp,
    assign_norms,
    heavy_ball,
    scion,
    scion_init,
    weight_dimension_numbers,
)

RESULTS = Path(__file__).parent / "results" / "optim_training.json"
VERSION = 1  # of the protocol: a change makes every result stale
CHUNK = 2  # trainings in one call; more did not run faster on two cores
MAX_MOVES = 3
CURVE_POINTS = 20
RIVAL_PREFIXES = ("muon", "scion")
BASELINE = "accelegrad"

Schedule = Callable[[jax.Array], jax.Array]


class Entry(NamedTuple):
    """An optimizer and the grid that it is tuned on.

    Attributes:
      build: ``(lr, extra, schedule, params) -> transform``; ``lr`` and ``extra`` are traced
        scalars, ``schedule(count)`` falls from 1 to 0, ``params`` are the initial ones, for
        methods that treat parameters by name and shape.
      lr: middle of the learning rate's grid, the documented default where there is one.
      setting: how it is called, for the table. Part of the key: change it with ``build``.
      extra: middle of the grid of a second hyperparameter, or ``None``.
      eval_params: ``(state, params) -> params`` that the model is judged at.
      start: ``(key, params) -> params`` to start from, for methods with an initial set of their
        own; seeds stay paired, initial parameters no longer do.
    """

    build: Callable[[jax.Array, jax.Array, Schedule, Any], optax.GradientTransformation]
    lr: float
    setting: str
    extra: float | None = None
    eval_params: Callable[[Any, Any], Any] = lambda state, params: params
    start: Callable[[jax.Array, Any], Any] = lambda key, params: params


def times(factor: Any, schedule: Schedule) -> Schedule:
    return lambda count: factor * schedule(count)


def _muon(lr: Any, adam_lr: Any, s: Schedule, params: Any) -> optax.GradientTransformation:
    """Muon on the matrices that our spectral norms cover, Adam on the others.

    The set is handed over as a tree: a function would be called again on a tree with masked
    leaves, in which the last matrix is another one.
    """
    return contrib.muon(
        times(lr, s),
        adam_learning_rate=None if adam_lr is None else times(adam_lr, s),
        muon_weight_dimension_numbers=weight_dimension_numbers(assign_norms, params),
    )


def _schedule_free(lr: Any, s: Schedule) -> optax.GradientTransformation:
    # As contrib.schedule_free_adamw is composed, which itself takes no schedule.
    base = optax.chain(
        optax.scale_by_rms(0.999, 1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.scale_by_learning_rate(times(lr, s)),
    )
    return contrib.schedule_free(base, times(lr, s), b1=0.9)


WIDE = functools.partial(assign_norms, radius=10.0)  # weights must fit into their balls

OPTIMIZERS: dict[str, Entry] = {
    "sgd": Entry(lambda lr, _, s, p: optax.sgd(times(lr, s)), 0.1, "optax.sgd"),
    "momentum": Entry(
        lambda lr, _, s, p: optax.sgd(times(lr, s), momentum=0.9), 0.1, "optax.sgd, momentum 0.9"
    ),
    "heavy_ball": Entry(
        lambda lr, gap, s, p: heavy_ball(times(lr, s), decay=1 - gap, style="ema"),
        1.0, "heavy_ball, ema; second: 1 - decay", extra=0.1,
    ),
    "adamw": Entry(lambda lr, _, s, p: optax.adamw(times(lr, s)), 1e-3, "optax.adamw"),
    "schedule_free_adamw": Entry(
        lambda lr, _, s, p: contrib.schedule_free_adamw(lr),
        0.0025, "optax.contrib.schedule_free_adamw, constant rate as documented",
        eval_params=contrib.schedule_free_eval_params,
    ),
    "schedule_free_linear": Entry(
        lambda lr, _, s, p: _schedule_free(lr, s),
        0.0025, "optax.contrib.schedule_free_adamw, with the schedule",
        eval_params=contrib.schedule_free_eval_params,
    ),
    "prodigy": Entry(
        lambda lr, _, s, p: contrib.prodigy(times(lr, s)), 1.0, "optax.contrib.prodigy"
    ),
    "muon": Entry(
        lambda lr, _, s, p: _muon(lr, None, s, p), 0.02, "optax.contrib.muon, Adam at the same rate"
    ),
    "muon_adam": Entry(_muon, 0.02, "optax.contrib.muon; second: Adam's rate", extra=3e-3),
    "scion": Entry(lambda lr, _, s, p: scion(times(lr, s)), 0.03, "scion"),
    "scion_constrained": Entry(
        lambda lr, _, s, p: scion(times(lr, s), norm=WIDE, constrained=True),
        0.003, "scion, constrained to radius 10, from scion_init",
        start=lambda key, params: scion_init(key, params, WIDE),
    ),
    "accelegrad": Entry(
        lambda d, g, s, p: accelegrad(times(d, s), g),
        1.0, "accelegrad, diameter; second: lipschitz", extra=1.0,
        eval_params=accelegrad_eval_params,
    ),
    "accelegrad_sharp_l2": Entry(
        lambda lr, anchor, s, p: accelegrad_sharp(
            times(lr, s), norm="l2", anchor_learning_rate=times(anchor, s)
        ),
        0.03, "accelegrad_sharp, l2 on every array; second: anchor_learning_rate", extra=0.03,
        eval_params=accelegrad_eval_params,
    ),
    "accelegrad_sharp": Entry(
        lambda lr, anchor, s, p: accelegrad_sharp(
            times(lr, s), anchor_learning_rate=times(anchor, s)
        ),
        0.03, "accelegrad_sharp; second: anchor_learning_rate", extra=0.03,
        eval_params=accelegrad_eval_params,
    ),
}


# --- one program for a task and an optimizer


def trainer(task: Task, entry: Entry, schedule: Schedule) -> Callable:
    """``(lr [C], extra [C], seeds [C], data) -> metrics``, each ``[C]`` or ``[C, T]``, jitted."""

    def train(lr, extra, seed, data):
        init_key, data_key = jax.random.split(jax.random.key(seed))
        params = entry.start(jax.random.fold_in(init_key, 1), task.init(init_key))
        optimizer = optax.with_extra_args_support(entry.build(lr, extra, schedule, params))

        def step(carry, x):
            params, state = carry
            value_and_grad = jax.value_and_grad(task.loss, has_aux=True)
            (loss, _), grads = value_and_grad(params, task.batch(x, data))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        xs = task.batches(data_key, data, task.steps)
        (params, state), losses = jax.lax.scan(step, (params, optimizer.init(params)), xs)
        params = entry.eval_params(state, params)
        out = {"batch_loss": losses, "last": losses[-max(task.steps // 10, 1) :].mean()}
        for split in task.splits:
            out[f"{split}_loss"], out[f"{split}_accuracy"] = task.evaluate(params, data, split)
        return out

    return jax.jit(jax.vmap(train, in_axes=(0, 0, 0, None)))


def run_all(
    train: Callable, task: Task, runs: list[tuple[float, float, int]], label: str
) -> list[dict[str, np.ndarray]]:
    """Metrics of each ``(lr, extra, seed)``, ``CHUNK`` at a time; the last chunk is filled up."""
    out = []
    with progress_bar(len(runs), label) as advance:
        for first in range(0, len(runs), CHUNK):
            chunk = runs[first : first + CHUNK]
            filled = chunk + [chunk[-1]] * (CHUNK - len(chunk))
            lr, extra, seeds = zip(*filled)
            found = train(
                jnp.array(lr, jnp.float32), jnp.array(extra, jnp.float32),
                jnp.array(seeds, jnp.uint32), task.data,
            )
            found = jax.device_get(found)
            out += [{name: value[i] for name, value in found.items()} for i in range(len(chunk))]
            advance(len(chunk))
    return out


# --- tuning


class Grid(NamedTuple):
    """A window on a geometric lattice: ``point(i, j)`` is ``(lr, extra)``."""

    entry: Entry
    shape: tuple[int, int]
    ratios: tuple[float, float]

    def point(self, index: tuple[int, int]) -> tuple[float, float]:
        lr, extra = self.entry.lr, self.entry.extra or 0.0
        return lr * self.ratios[0] ** index[0], extra * self.ratios[1] ** index[1]

    def window(self, centre: tuple[int, int]) -> list[tuple[int, int]]:
        spans = [range(c - n // 2, c - n // 2 + n) for c, n in zip(centre, self.shape)]
        return [(i, j) for i in spans[0] for j in spans[1]]

    def open_sides(self, index: tuple[int, int], tried: Iterable) -> list[tuple[int, int]]:
        """Neighbours of ``index``, along the axes that are tuned, which nobody has tried."""
        steps = [(1, 0), (-1, 0)] + ([(0, 1), (0, -1)] if self.shape[1] > 1 else [])
        neighbours = [(index[0] + di, index[1] + dj) for di, dj in steps]
        return [n for n in neighbours if n not in tried]


def make_grid(entry: Entry, points: int) -> Grid:
    if entry.extra is None:
        return Grid(entry, (points, 1), (10 ** (1 / 3), 1.0))
    side = math.isqrt(points)
    if side * side != points:
        raise ValueError(f"points: a second hyperparameter needs a square number, got {points}")
    return Grid(entry, (side, side), (10 ** (1 / 2), 10 ** (1 / 2)))


def score(metrics: list[dict], name: str) -> float:
    """Mean over seeds; a run that diverged counts as infinite."""
    values = [float(m[name]) for m in metrics]
    return float(np.mean(values)) if np.isfinite(values).all() else math.inf


def tune(
    grid: Grid, measure: Callable[[list[tuple[int, int]]], list[float]], max_moves: int
) -> tuple[tuple[int, int], dict[tuple[int, int], float], int]:
    """The best index, all scores, and how often the window moved onto the best point."""
    centre, tried, moves = (0, 0), {}, 0
    while True:
        fresh = [index for index in grid.window(centre) if index not in tried]
        tried.update(zip(fresh, measure(fresh)))
        best = min(tried, key=lambda index: (tried[index], index))
        if not math.isfinite(tried[best]) or not grid.open_sides(best, tried):
            return best, tried, moves
        if moves == max_moves:
            return best, tried, moves
        centre, moves = best, moves + 1


def measure_optimizer(
    task: Task, name: str, entry: Entry, *, points: int, max_moves: int
) -> dict[str, Any]:
    """Tune one optimizer, run the winner on fresh seeds; everything that goes into the file."""
    schedule = optax.linear_schedule(1.0, 0.0, task.steps)
    train = trainer(task, entry, schedule)
    grid, metric = make_grid(entry, points), f"{task.select}_loss"
    scores: dict[tuple[int, int], dict[str, float]] = {}

    def measure(indices):
        runs = [(*grid.point(index), seed) for index in indices for seed in task.tune_seeds]
        found = iter(run_all(train, task, runs, f"{name}: grid"))
        for index in indices:
            of_point = [next(found) for _ in task.tune_seeds]
            names = [key for key in of_point[0] if key != "batch_loss"]
            scores[index] = {key: score(of_point, key) for key in names}
        return [scores[index][metric] for index in indices]

    best, tried, moves = tune(grid, measure, max_moves)
    lr, extra = grid.point(best)
    fresh = run_all(train, task, [(lr, extra, seed) for seed in task.report_seeds], name)
    curve = np.mean([m["batch_loss"] for m in fresh], 0)
    blocks = np.array_split(curve, min(CURVE_POINTS, len(curve)))
    finite = lambda x: float(x) if math.isfinite(x) else None  # JSON has no infinity
    two = entry.extra is not None
    return {
        "setting": entry.setting,
        "grid": [
            {"lr": grid.point(index)[0], **({"extra": grid.point(index)[1]} if two else {}),
             **{key: finite(value) for key, value in found.items()}}
            for index, found in sorted(scores.items())
        ],
        "moves": moves,
        "at_edge": bool(grid.open_sides(best, tried)),
        "best": {"lr": lr, **({"extra": extra} if two else {})},
        "seeds": list(task.report_seeds),
        "report": {
            key: [finite(m[key]) for m in fresh] for key in fresh[0] if key != "batch_loss"
        },
        "curve": [finite(block.mean()) for block in blocks],
    }


# --- the file


def settings_key(*parts: Any) -> str:
    text = json.dumps([VERSION, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_results(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text()) if out.exists() else {"tasks": {}}


def write_results(out: Path, results: dict[str, Any]) -> None:
    results["versions"] = {"jax": jax.__version__, "optax": optax.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, out)


def run(
    out: str | os.PathLike = RESULTS,
    tasks: Iterable[str] = tuple(TASKS),
    optimizers: Iterable[str] | None = None,
    *,
    points: int = 9,
    max_moves: int = MAX_MOVES,
    again: bool = False,
    make_task: dict[str, Callable[[], Task]] = TASKS,
    table: dict[str, Entry] = OPTIMIZERS,
) -> dict[str, Any]:
    """Measure what the file does not hold yet under these settings; return its contents.

    Args:
      out: the JSON file, read first and rewritten after each optimizer.
      tasks: names in ``make_task``.
      optimizers: names in ``table``; default: all.
      points: grid points of each optimizer before the window moves, a square number.
      max_moves: how often the window may move onto its best point.
      again: measure even what is there.
      make_task, table: where the names are looked up.
    """
    out, results = Path(out), read_results(Path(out))
    names = list(table if optimizers is None else optimizers)
    for unknown in [n for n in tasks if n not in make_task] + [n for n in names if n not in table]:
        raise ValueError(f"{unknown!r}: expected tasks of {list(make_task)} and optimizers of "
                         f"{list(table)}")
    for task_name in tasks:
        task = make_task[task_name]()
        about = {**task.about, "steps": task.steps, "select": task.select,
                 "tune_seeds": list(task.tune_seeds), "points": points, "max_moves": max_moves}
        kept = results["tasks"].setdefault(task_name, {"optimizers": {}})
        kept["about"] = about
        for name in names:
            entry = table[name]
            key = settings_key(about, list(task.report_seeds), entry.setting, entry.lr, entry.extra)
            if not again and kept["optimizers"].get(name, {}).get("key") == key:
                continue
            row = measure_optimizer(task, name, entry, points=points, max_moves=max_moves)
            kept["optimizers"][name] = {"key": key, **row}
            write_results(out, results)
            print(f"{task_name}  {summary(name, kept['optimizers'][name])}", flush=True)
    return results


# --- reading it


def paired(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Mean of the paired differences, its standard error, half the 95 % t-interval."""
    difference = np.subtract(ours, theirs)
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return float(difference.mean()), float(error), float(
        error * stats.t.ppf(0.975, len(difference) - 1)
    )


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the paired ratios and its 95 % interval."""
    mean, _, half = paired(np.log(ours), np.log(theirs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def best_rival(rows: dict[str, Any], metric: str) -> str | None:
    """The best of Muon and Scion in the reported seeds (the choice that is hardest on ours)."""
    rivals = {n: r["report"][metric] for n, r in rows.items() if n.startswith(RIVAL_PREFIXES)}
    rivals = {n: np.mean(v) for n, v in rivals.items() if None not in v}
    sign = -1 if metric.endswith("accuracy") else 1
    return min(rivals, key=lambda n: sign * rivals[n]) if rivals else None


def comparisons(rows: dict[str, Any], loss: str, accuracy: str) -> list[dict[str, Any]]:
    """Each optimizer against Euclidean AcceleGrad and against the best of Muon and Scion."""
    out = []
    for name, row in rows.items():
        if None in row["report"][loss]:
            continue
        found: dict[str, Any] = {"optimizer": name}
        for label, pick in (("baseline", lambda _: BASELINE if BASELINE in rows else None),
                            ("rival", lambda metric: best_rival(rows, metric))):
            for metric, compare in ((loss, ratio), (accuracy, paired)):
                other = pick(metric)
                if other in (None, name) or None in rows[other]["report"][metric]:
                    continue
                found[f"{metric} against {label}"] = {
                    "other": other,
                    "value": compare(row["report"][metric], rows[other]["report"][metric]),
                }
        out.append(found)
    return out


def summary(name: str, row: dict[str, Any]) -> str:
    cells = []
    for metric, values in row["report"].items():
        if None in values:
            cells.append(f"{metric} diverged")
        else:
            cells.append(f"{metric} {np.mean(values):.5g}±{np.std(values, ddof=1):.2g}")
    best = ", ".join(f"{k} {v:.3g}" for k, v in row["best"].items())
    edge = ", AT THE EDGE" if row["at_edge"] else ""
    return f"{name:20} {best} ({len(row['grid'])} points{edge})  " + "  ".join(cells)


def render(results: dict[str, Any]) -> str:
    """Markdown tables of all tasks."""
    lines = []
    for task_name, task in results["tasks"].items():
        rows, about = task["optimizers"], task["about"]
        if not rows:
            continue
        # Where the text is long enough the bar speaks of validation loss; the digits' 200
        # pictures have been used to choose, so there it is the test loss.
        split = "valid" if "sha256" in about else "test"
        loss, accuracy = f"{split}_loss", f"{split}_accuracy"
        against = {c["optimizer"]: c for c in comparisons(rows, loss, accuracy)}
        rivals = best_rival(rows, loss), best_rival(rows, accuracy)
        lines += [
            f"### {task_name}",
            "",
            f"{about['model']}; batch {about['batch']}, {about['steps']} steps, chosen by "
            f"{about['select']} loss on seeds {about['tune_seeds']}"
            + (f"; text sha256 {about['sha256']}" if "sha256" in about else "")
            + f". Best of Muon and Scion: {rivals[0]} by loss, {rivals[1]} by accuracy.",
            "",
            "| optimizer | lr | second | points | last batches | valid loss | test loss | "
            f"{split} accuracy, % | {split} loss over AcceleGrad's | over the best of Muon and "
            "Scion | accuracy less theirs, points |",
            "|---" * 11 + "|",
        ]
        mean = lambda row, metric: np.mean([math.inf if v is None else v
                                            for v in row["report"][metric]])
        cell = lambda found, key, form: (
            form(found[key]["value"]) if key in found else "–"
        )
        interval = lambda v: f"{v[0]:.3f} [{v[1]:.3f}, {v[2]:.3f}]"
        points = lambda v: f"{100 * v[0]:+.2f} ± {100 * v[2]:.2f}"
        for name, row in sorted(rows.items(), key=lambda item: mean(item[1], loss)):
            found = against.get(name, {})
            test = row["report"]["test_loss"]
            spread = "" if None in test else f" ± {np.std(test, ddof=1):.2g}"
            cells = [
                name, f"{row['best']['lr']:.2g}",
                f"{row['best']['extra']:.2g}" if "extra" in row["best"] else "–",
                f"{len(row['grid'])}{' (edge)' if row['at_edge'] else ''}",
                f"{mean(row, 'last'):.3g}", f"{mean(row, 'valid_loss'):.4g}",
                f"{mean(row, 'test_loss'):.4g}{spread}",
                f"{100 * mean(row, accuracy):.2f}",
                cell(found, f"{loss} against baseline", interval),
                cell(found, f"{loss} against rival", interval),
                cell(found, f"{accuracy} against rival", points),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--only", choices=("training", "river_lm"), help="one part")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--again", action="store_true", help="measure even what is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    split = lambda text: [name for name in text.split(",") if name]
    # It imports this module by name, which is not the running script's.
    from optim_river_lm import render_river, run_river

    if not args.table and args.only != "river_lm":
        run(args.out, split(args.tasks), split(args.optimizers), again=args.again)
    if not args.table and args.only != "training":
        run_river(args.out, again=args.again)
    results = read_results(args.out)
    print(render(results))
    if "river_lm" in results:
        print(render_river(results["river_lm"]))


if __name__ == "__main__":
    main()
