"""Surrogates in practice: 2-bit training with each of them against the straight-through estimator.

    python benchmarks/qat.py                       # everything that is not there yet
    python benchmarks/qat.py --tasks teacher_mlp --optimizers adam
    python benchmarks/qat.py --table               # print what was measured

Clipped STE lets no gradient through outside of the grid; ``ste, not clipped`` lets all of them.

Tasks (``benchmarks/qat_tasks.py``): a teacher-student MLP and an MLP on digits, all matrices on the
fixed grid {-1.5, -.5, .5, 1.5} s, and a character-level transformer with 2-bit weights in groups
of 32. Everything runs through ``optax.chain(zoe_surrogate(recipe, kernel), optimizer)``; with
``routes`` the same training is also run through ``fake_quant`` and compared.

* Learning rates are tuned for each surrogate alike, STE included: five points, ratio 2, on seeds
  of their own, by the loss that the task names; while the best point is at the end of the window,
  the window moves on.
* The winner runs on fresh seeds. A seed fixes data, initial weights and batches, so surrogates are
  paired by seed; differences to STE come with 95 % t-intervals and paired t.
* Linear decay of the learning rate to zero, for all.

Results go to ``benchmarks/results/qat.json`` after every (task, optimizer, surrogate), so an
interrupted run goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from qat_tasks import TASKS, QatTask
from scipy import stats

from fadex.core.progress import progress_bar
from fadex.quant.qat import Kernel, fake_quant, make_kernel, ste, zoe_surrogate
from fadex.quant.qat.perturbations import PERTURBATIONS

RESULTS = Path(__file__).parent / "results" / "qat.json"
VERSION = 1  # of the protocol: a change makes every result stale
MAX_MOVES = 3
POINTS = 5
RATIO = 2.0


class Surrogate(NamedTuple):
    """A kernel whose radius goes from ``start`` to ``stop`` over a run."""

    family: str
    start: float = 0.0
    stop: float = 0.0
    edge: str | None = None  # None: the task's


def fixed(family: str, delta: float) -> Surrogate:
    return Surrogate(family, delta, delta)


SURROGATES = {
    "ste": Surrogate("ste"),
    "ste, not clipped": Surrogate("ste", edge="pass"),
    "gaussian 0.25": fixed("gaussian", 0.25),
    "gaussian 0.35": fixed("gaussian", 0.35),
    "gaussian 0.5": fixed("gaussian", 0.5),
    "gaussian 0.7": fixed("gaussian", 0.7),
    "gaussian 0.35, not clipped": Surrogate("gaussian", 0.35, 0.35, edge="pass"),
    "gaussian 0.5, not clipped": Surrogate("gaussian", 0.5, 0.5, edge="pass"),
    "gaussian 0.5 to 0.25": Surrogate("gaussian", 0.5, 0.25),
    "uniform 0.35": fixed("uniform", 0.35),
    "uniform 0.6": fixed("uniform", 0.6),
    "laplace 0.35": fixed("laplace", 0.35),
    "arctan 0.35": fixed("arctan", 0.35),
    "sigmoid 0.35": fixed("sigmoid", 0.35),
}  # fmt: skip
FLOAT = "not quantized"  # what the bits cost, for scale
OPTIMIZERS: dict[str, tuple[Callable[[Any], optax.GradientTransformation], str]] = {
    "adam": (optax.adam, "optax.adam"),
    "momentum": (functools.partial(optax.sgd, momentum=0.9), "optax.sgd, momentum 0.9"),
}


def kernel_of(family: str, start: Any, stop: Any, steps: int) -> Kernel:
    """The kernel with a radius that moves linearly; traced ends, so one program per family."""
    if family == "ste":
        return ste()
    moving = lambda count: start + (stop - start) * jnp.minimum(count / steps, 1.0)
    return make_kernel(PERTURBATIONS[family], moving)


def trainer(task: QatTask, optimizer: str, family: str, route: str = "transform") -> Callable:
    """``(lr [C], start [C], stop [C], seeds [C]) -> metrics``, each ``[C]``, jitted."""
    make = OPTIMIZERS[optimizer][0]
    quantized = functools.partial(fake_quant, recipe=task.recipe, min_size=0, edge=task.edge)

    def train(lr, start, stop, seed):
        data_key, init_key, batch_key = jax.random.split(jax.random.key(seed), 3)
        data = task.make_data(data_key)
        params = task.init(init_key)
        rate = optax.linear_schedule(1.0, 0.0, task.steps)
        optimizer = make(lambda count: lr * rate(count))
        kernel = kernel_of(family, start, stop, task.steps) if family != FLOAT else None
        deploy = quantized if family != FLOAT else (lambda params: params)
        if family != FLOAT and route == "transform":
            surrogate = zoe_surrogate(task.recipe, kernel, edge=task.edge, min_size=0)
            optimizer = optax.chain(surrogate, optimizer)

        def step(carry, x):
            params, state = carry
            count, draw = x
            batch = task.batch(draw, data)
            if family == FLOAT or route == "transform":
                loss, grads = jax.value_and_grad(task.loss)(deploy(params), batch)
            else:
                loss, grads = jax.value_and_grad(
                    lambda p: task.loss(quantized(p, surrogate=kernel.at(count)), batch)
                )(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        draws = jax.tree.map(lambda a: a[: task.steps], task.batches(batch_key, data))
        (params, _), losses = jax.lax.scan(
            step, (params, optimizer.init(params)), (jnp.arange(task.steps), draws)
        )
        return {"last": losses[-max(task.steps // 10, 1):].mean(),
                **task.evaluate(deploy(params), data)}

    return jax.jit(jax.vmap(train))


def run_all(train: Callable, task: QatTask, runs: list, label: str) -> list[dict[str, float]]:
    """Metrics of each ``(lr, start, stop, seed)``, ``task.chunk`` at a time."""
    out = []
    with progress_bar(len(runs), label) as advance:
        for first in range(0, len(runs), task.chunk):
            chunk = runs[first : first + task.chunk]
            filled = chunk + [chunk[-1]] * (task.chunk - len(chunk))
            columns = [np.array(c, np.float32) for c in list(zip(*filled))[:3]]
            seeds = np.array([run[3] for run in filled], np.uint32)
            found = jax.device_get(train(*columns, seeds))
            out += [{k: float(v[i]) for k, v in found.items()} for i in range(len(chunk))]
            advance(len(chunk))
    return out


def measure(task: QatTask, optimizer: str, surrogate: Surrogate, label: str, train: Callable
            ) -> dict[str, Any]:
    """Tune the learning rate, run the winner on fresh seeds."""
    ends = surrogate.start, surrogate.stop
    middle, scores, centre, moves = task.rates[optimizer], {}, 0, 0
    point = lambda i: middle * RATIO**i
    while True:
        fresh = [i for i in range(centre - POINTS // 2, centre + POINTS // 2 + 1)
                 if i not in scores]
        runs = [(point(i), *ends, seed) for i in fresh for seed in task.tune_seeds]
        found = iter(run_all(train, task, runs, f"{label}: grid"))
        for i in fresh:
            values = [next(found)[task.select] for _ in task.tune_seeds]
            scores[i] = float(np.mean(values)) if np.isfinite(values).all() else math.inf
        best = min(scores, key=lambda i: (scores[i], i))
        at_edge = best in (min(scores), max(scores))
        if not at_edge or moves == MAX_MOVES:
            break
        centre, moves = best, moves + 1
    fresh = run_all(train, task, [(point(best), *ends, s) for s in task.seeds], label)
    # Six digits are plenty, and JSON has no infinity.
    finite = lambda x: float(f"{x:.6g}") if math.isfinite(x) else None
    return {
        "lr": point(best), "at_edge": at_edge, "seeds": list(task.seeds),
        "grid": [{"lr": point(i), task.select: finite(scores[i])} for i in sorted(scores)],
        "report": {k: [finite(run[k]) for run in fresh] for k in fresh[0]},
    }


# --- the file


def read_results(path: Path) -> dict[str, Any]:
    if path.exists():
        found = json.loads(path.read_text())
        if found.get("version") == VERSION:
            return found
    return {"version": VERSION, "tasks": {}}


def write_results(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    # Lists of numbers on one line.
    text = re.sub(r"\[\s+([^\[\]{}]+?)\s+\]",
                  lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", json.dumps(results, indent=1))
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def run(path: Path, tasks: list[str], optimizers: list[str], again: bool = False) -> None:
    results = read_results(path)
    for task_name in tasks:
        task = TASKS[task_name]()
        entry = results["tasks"].setdefault(task_name, {"about": task.about, "optimizers": {}})
        for optimizer in optimizers:
            if optimizer not in task.rates:
                continue
            rows = entry["optimizers"].setdefault(optimizer, {})
            programs: dict[tuple[str, str], Callable] = {}
            for name in (*task.surrogates, FLOAT):
                if name in rows and not again:
                    continue
                surrogate = SURROGATES.get(name, Surrogate(FLOAT))
                program = surrogate.family, surrogate.edge or task.edge
                if program not in programs:
                    programs[program] = trainer(task._replace(edge=program[1]), optimizer,
                                                surrogate.family)
                label = f"{task_name} {optimizer} {name}"
                rows[name] = measure(task, optimizer, surrogate, label, programs[program])
                write_results(path, results)
                values = rows[name]["report"][task.metric]
                print(f"{label}: lr {rows[name]['lr']:.3g}, {task.metric} "
                      f"{np.mean([math.inf if v is None else v for v in values]):.4f}", flush=True)


def run_routes(path: Path, again: bool = False) -> None:
    """The same training by the transform and through ``fake_quant``, on the digits."""
    results = read_results(path)
    if "routes" in results and not again:
        return
    task = TASKS["digits_mlp"]()._replace(steps=50, chunk=4)
    lr, ends, seeds = 3e-3, (0.5, 0.25), (0, 1, 2, 3)
    columns = [np.full(4, v, np.float32) for v in (lr, *ends)]
    found = [
        jax.device_get(trainer(task, "adam", "gaussian", route)(*columns, np.array(seeds)))
        for route in ("transform", "fake_quant")
    ]
    gap = {k: float(np.abs(found[0][k] - found[1][k]).max()) for k in found[0]}
    results["routes"] = {"steps": task.steps, "seeds": list(seeds), "largest difference": gap}
    write_results(path, results)


# --- tables


def paired(values: list, base: list) -> tuple[float, float, float]:
    """Mean difference, half of its 95 % t-interval, paired t."""
    pairs = [(a, b) for a, b in zip(values, base) if a is not None and b is not None]
    gap = np.array([a - b for a, b in pairs])
    if len(gap) < 2:
        return math.nan, math.nan, math.nan
    error = gap.std(ddof=1) / math.sqrt(len(gap))
    t = gap.mean() / error if error > 0 else 0.0
    return gap.mean(), error * stats.t.ppf(0.975, len(gap) - 1), t


def render(results: dict[str, Any]) -> str:
    """One table a task and optimizer: differences to STE, paired by seed."""
    lines = []
    for task_name, entry in results["tasks"].items():
        about = entry["about"]
        for optimizer, rows in entry["optimizers"].items():
            if "ste" not in rows:
                continue
            base = rows["ste"]["report"]
            losses = [k for k in ("train_loss", "valid_loss", "test_loss") if k in base]
            mean = lambda v: np.mean([math.inf if x is None else x for x in v])
            head = [part for k in losses for part in (
                k.replace("_", " "), "less STE's, %", "t", *(("t, not clipped",)
                if "ste, not clipped" in rows else ()))]
            lines += [
                f"### {task_name}, {OPTIMIZERS[optimizer][1]}", "",
                f"{about['model']}; {about['setting']}; learning rate chosen by "
                f"{about['select']}; {len(rows['ste']['seeds'])} paired seeds, 95 % intervals; "
                "t: paired, against STE and against STE that is not clipped.", "",
                "| " + " | ".join(["surrogate", "lr", *head, "test accuracy, %"]) + " |",
                "|---" * (len(head) + 3) + "|",
            ]
            for name in (n for n in (*SURROGATES, FLOAT) if n in rows):
                report = rows[name]["report"]
                edge = " (edge)" if rows[name]["at_edge"] else ""
                cells = [name, f"{rows[name]['lr']:.2g}{edge}"]
                for k in losses:
                    gap, half, t = paired(report[k], base[k])
                    part = 100 / mean(base[k])
                    cells += [f"{mean(report[k]):.4f}",
                              f"{part * gap:+.2f} ± {part * half:.2f}", f"{t:+.1f}"]
                    if "ste, not clipped" in rows:
                        other = rows["ste, not clipped"]["report"][k]
                        cells.append(f"{paired(report[k], other)[2]:+.1f}")
                cells.append(f"{100 * mean(report['test_accuracy']):.2f}")
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
    if "routes" in results:
        lines.append(f"transform against fake_quant: {results['routes']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--again", action="store_true", help="measure even what is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    split = lambda text: [name for name in text.split(",") if name]
    if not args.table:
        run_routes(args.out, again=args.again)
        run(args.out, split(args.tasks), split(args.optimizers), again=args.again)
    print(render(read_results(args.out)))


if __name__ == "__main__":
    main()
