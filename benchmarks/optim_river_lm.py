"""Where heavy ball is stable on a real language model: the part ``river_lm``.

    python benchmarks/optim_training.py --only river_lm

In a valley of curvature λ heavy ball in its ema form is stable below
2 (1 + β) / ((1 - β) λ): (1 + β) / (1 - β) times plain gradient descent's, 19 times at β = 0.9.
Here the same grid of learning rates is run at several β on the character-level transformer
(``char_lm`` of ``benchmarks/optim_models.py``), at a constant rate that decays to zero over the
last fifth of the steps. The bar: the largest stable rate grows at least fourfold from β = 0 to
β = 0.9, and the best validation loss improves.

A run counts as stable when every loss is finite, none after the first tenth exceeds the initial
one, and the last tenth's mean is below the entropy of single characters, i.e. something beyond
character frequencies has been learned. Stable means stable on all seeds; the largest stable rate
is the largest one below the first that is not, once training has begun to work at all.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import optax
from optim_models import Task, char_lm
from optim_training import (
    Entry,
    read_results,
    run_all,
    settings_key,
    times,
    trainer,
    write_results,
)

from fadex.optim import heavy_ball

DECAYS = (0.0, 0.5, 0.9)
RATES = tuple(0.03 * 10 ** (i / 6) for i in range(16))  # 0.03 .. 9.5
SEEDS = (0, 1)


def character_entropy(task: Task) -> float:
    """Nats per character of the training text's frequencies."""
    counts = np.bincount(np.asarray(task.data["train"]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def is_stable(losses: np.ndarray, entropy: float) -> bool:
    tenth = max(len(losses) // 10, 1)
    return bool(
        np.isfinite(losses).all()
        and losses[tenth:].max(initial=-math.inf) <= losses[0]
        and losses[-tenth:].mean() < entropy
    )


def largest_stable(rates: list[float], stable: list[bool]) -> float | None:
    """The largest stable rate below the first one that fails after one that worked."""
    last = None
    for rate, good in zip(rates, stable):
        if good:
            last = rate
        elif last is not None:
            return last
    return last


def run_river(out: str | os.PathLike, *, again: bool = False, task: Task | None = None,
              rates: tuple[float, ...] = RATES) -> dict[str, Any]:
    """Measure the map of stability, unless the file holds it under these settings."""
    out = Path(out)
    results = read_results(out)
    task = char_lm() if task is None else task
    key = settings_key(task.about, task.steps, rates, DECAYS, SEEDS)
    if again or results.get("river_lm", {}).get("key") != key:
        ramp = optax.linear_schedule(1.0, 0.0, task.steps // 5, task.steps - task.steps // 5)
        build = lambda lr, beta, s, params: heavy_ball(times(lr, s), decay=beta, style="ema")
        train = trainer(task, Entry(build, 1.0, ""), ramp)
        entropy, rows = character_entropy(task), []
        for beta in DECAYS:
            runs = [(rate, beta, seed) for rate in rates for seed in SEEDS]
            found = run_all(train, task, runs, f"river, decay {beta}")
            cells = []
            for i, rate in enumerate(rates):
                of_rate = found[i * len(SEEDS) : (i + 1) * len(SEEDS)]
                losses = [m["batch_loss"] for m in of_rate]
                value = float(np.mean([m["valid_loss"] for m in of_rate]))
                worst = max(float(x.max()) - float(x[0]) for x in losses)
                cells.append({
                    "lr": rate,
                    "stable": all(is_stable(x, entropy) for x in losses),
                    "valid_loss": value if math.isfinite(value) else None,
                    "highest_above_initial": worst if math.isfinite(worst) else None,
                })
            usable = [c["valid_loss"] for c in cells if c["valid_loss"] is not None]
            rows.append({
                "decay": beta, "grid": cells,
                "largest_stable": largest_stable(list(rates), [c["stable"] for c in cells]),
                "best_valid_loss": min(usable, default=None),
            })
            print(f"river_lm  decay {beta}: largest stable lr {rows[-1]['largest_stable']}, best "
                  f"validation loss {rows[-1]['best_valid_loss']}", flush=True)
        results["river_lm"] = {"key": key, "about": {**task.about, "steps": task.steps},
                               "entropy": entropy, "rows": rows}
        write_results(out, results)
    return results["river_lm"]


def render_river(found: dict[str, Any]) -> str:
    """Markdown: the largest stable rate and the best loss for each momentum."""
    plain = found["rows"][0]
    lines = [
        "### river_lm",
        "",
        f"{found['about']['model']}; heavy ball (ema) on seeds {list(SEEDS)}, "
        f"{found['about']['steps']} steps; text sha256 {found['about']['sha256']}.",
        "",
        "| decay | largest stable lr | over gradient descent's | (1 + β)/(1 - β) | best lr | best "
        "valid loss |",
        "|---" * 6 + "|",
    ]
    for row in found["rows"]:
        beta, edge = row["decay"], row["largest_stable"]
        growth = edge / plain["largest_stable"] if edge and plain["largest_stable"] else math.nan
        best = min((c for c in row["grid"] if c["valid_loss"] is not None),
                   key=lambda c: c["valid_loss"], default={"lr": math.nan, "valid_loss": math.nan})
        lines.append(
            f"| {beta:g} | {math.nan if edge is None else edge:.3g} | {growth:.2f} | "
            f"{(1 + beta) / (1 - beta):.3g} | {best['lr']:.3g} | {best['valid_loss']:.4f} |"
        )
    return "\n".join(lines)
