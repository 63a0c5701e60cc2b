"""The README's figures of the optimizers, from the results of their benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"

# (name, import name, source, status, what was measured: a key of ``_measured``)
METHODS = [
    ("AcceleGrad#, scalar anchor", "fadex.optim.accelegrad_sharp(diameter=...)",
     "abstract; a reconstruction", "done", "sharp_scalar"),
    ("AcceleGrad#, training", "fadex.optim.accelegrad_sharp(learning_rate)",
     "abstract; a reconstruction", "done", "sharp_training"),
    ("AcceleGrad", "fadex.optim.accelegrad", "arXiv 1809.02864", "done", "accelegrad"),
    ("Scion, unconstrained, constrained, clipped", "fadex.optim.scion, scion_init, scale_by_lmo",
     "arXiv 2502.07529, 2506.01913", "done", "scion"),
    ("Norms, duals, sharp operators, LMOs", "fadex.optim.NormSpec, lmo, sharp, assign_norms",
     "arXiv 2502.07529", "done", None),
    ("Polar factor", "fadex.optim.polar_factor", "arXiv 2505.16932; Muon, Dion", "done", "polar"),
    ("Polar factor from factors", "fadex.optim.polar_lowrank", "linear algebra", "done",
     "lowrank"),
    ("Momentum for interpolation", "fadex.optim.interpolation_momentum, sgd_interpolation",
     "abstract (arXiv 2605.18609); a derivation", "done", "momentum"),
    ("Randomized Kaczmarz with momentum", "fadex.optim.kaczmarz", "the same, a special case",
     "done", "kaczmarz"),
    ("Coordinate descent with momentum", "fadex.optim.coordinate_descent",
     "the same, a special case", "done", None),
    ("Heavy ball; limits and tuning in river valleys",
     "fadex.optim.heavy_ball, river_limits, suggest, suggest_step",
     "abstract; a derivation", "done", "river"),
    ("Valley monitors", "fadex.optim.oscillation_monitor, sharpness, top_hessian, river_progress",
     "the same", "done", None),
    ("Dual-anchor", "fadex.optim.dual_anchor, dual_anchor_batch_size",
     "arXiv 2404.13228; abstract for noise", "done", "dual_anchor"),
]
TASKS = {"digits_mlp": "digits MLP", "digits_cnn": "digits CNN", "char_lm": "character LM"}
NAMES = {
    "accelegrad_sharp": "AcceleGrad#", "accelegrad_sharp_l2": "AcceleGrad#, l2 geometry",
    "accelegrad": "AcceleGrad (Euclidean)", "scion": "Scion", "scion_constrained":
    "Scion, constrained", "muon": "Muon (optax)", "muon_adam": "Muon (optax), own rate for Adam",
    "adamw": "AdamW (optax)", "sgd": "SGD (optax)", "momentum": "SGD, momentum 0.9 (optax)",
    "heavy_ball": "heavy ball, tuned decay", "prodigy": "Prodigy (optax)",
    "schedule_free_adamw": "schedule-free AdamW (optax)",
    "schedule_free_linear": "schedule-free AdamW (optax), with the schedule",
}  # fmt: skip
OURS = ("accelegrad_sharp", "accelegrad_sharp_l2", "heavy_ball")


def _read(name: str):
    return json.loads((RESULTS / f"{name}.json").read_text())


def _log_ratio(ours, theirs):
    """Geometric mean of paired ratios and its 95 % t-interval."""
    from scipy import stats

    logs = np.log(np.divide(ours, theirs))
    half = logs.std(ddof=1) / math.sqrt(len(logs)) * stats.t.ppf(0.975, len(logs) - 1)
    return tuple(float(math.exp(logs.mean() + k * half)) for k in (0, -1, 1))


def _loss_of(task: str) -> str:
    return "valid_loss" if task == "char_lm" else "test_loss"


def _measured() -> dict[str, str]:
    rates = {(r["problem"], r["method"], r["diameter"]): r for r in _read("optim_rates")["rows"]}
    slope = lambda problem, method="AcceleGrad#": f"{rates[problem, method, 1.0]['slope']:.2f}"
    overhead = {r["optimizer"]: r for r in _read("optim_overhead")["rows"]}
    gain = {r["num_steps"]: r for r in _read("optim_river")["gain"]}
    drift = {r["beta"]: r for r in _read("optim_river")["drift"]}
    edge = max(abs(r["measured"] / r["theory"] - 1) for r in _read("optim_river")["edge"])
    training = _read("optim_training")["tasks"]
    wins = []
    for task, title in TASKS.items():
        rows = training.get(task, {}).get("optimizers", {})
        if "accelegrad_sharp" in rows and "accelegrad" in rows:
            values = [rows[n]["report"][_loss_of(task)] for n in ("accelegrad_sharp", "accelegrad")]
            wins.append(f"{title} {_log_ratio(*values)[0]:.2f}")
    last = max(gain)
    return {
        "sharp_scalar": f"slope of log f over log T: l2 {slope('l2')}, l-infinity "
                        f"{slope('linf, tridiagonal')}, spectral {slope('spectral')}",
        "sharp_training": "loss over Euclidean AcceleGrad's: " + ", ".join(wins),
        "accelegrad": f"slope {slope('l2', 'AcceleGrad')}",
        "scion": f"a step takes {overhead['scion']['ratio']:.2f} x Muon's time",
        "river": f"edge of stability within {100 * edge:.2g} % of theory; drift gain "
                 f"{drift[0.9]['measured']:.1f} at decay 0.9 (theory 19)",
        "dual_anchor": f"noise gain {gain[last]['dual_anchor']:.2f} at {last} steps (Halpern "
                       f"{gain[last]['ohm']:.0f})",
        **_momentum(), **_polar(),
    }


def _momentum() -> dict[str, str]:
    data = _read("optim_momentum")
    rows = [r for r in data["kaczmarz"]["rows"] if r["batch"] <= 32]
    totals = [r["batch"] * r["heavy_ball"] for r in rows]
    problems = data["unstable"]
    counts = problems["unstable"]
    none = counts["heavy_ball c=1.33 s=0.5 R2"] + counts["nesterov c=1.33 s=0.5 R2"]
    trace = counts["heavy_ball c=1.00 s=0.5 trace"]
    law = [r for r in data["digits"]["rows"] if r["batch"] in (64, 128)]
    return {
        "momentum": f"{none} of {problems['problems']} random problems unstable ({trace} with the "
                    "trace for R²); digits MLP, equal examples, loss over batch 16's with 1 - β "
                    "proportional to 1/B (without momentum): " + ", ".join(
                        f"batch {r['batch']} {r['law_over_base'][0]:.2f} "
                        f"({r['no_momentum_over_base'][0]:.1f})" for r in law),
        "kaczmarz": "rows read until 1e-3, batch 1 to 32: largest over smallest "
                    f"{max(totals) / min(totals):.2f}",
    }


def _polar() -> dict[str, str]:
    data = _read("optim_polar")
    auto = [r for r in data["rows"] if r["method"] == "fadex, auto"]
    low = [r for r in data["lowrank"] if r["method"] == "fadex, from the factors"]
    name = lambda r: "x".join(map(str, r["shape"]))
    return {
        "polar": "time over optax's at the same steps: "
                 + ", ".join(f"{name(r)} {r['ratio']:.2f}" for r in auto[1:]),
        "lowrank": "the same for raw gradients of small batches: "
                   + ", ".join(f"{name(r)}, rank {r['rank']} {r['ratio']:.2g}" for r in low),
    }


def render() -> list[str]:
    measured = _measured()
    lines = [
        "",
        "## Optimizers",
        "",
        "Every one is an `optax` transform that chains, vmaps, shards, takes "
        "`inject_hyperparams` and `MultiSteps`, and resumes from Orbax bit for bit "
        "(`python benchmarks/optim.py --only rates,overhead,polar,momentum,river,training` prints "
        "what is quoted):",
        "",
        "| method | import | source | status | measured |",
        "|---|---|---|---|---|",
    ]
    for name, path, source, status, key in METHODS:
        lines.append(
            f"| {name} | `{path}` | {source} | {status} | {measured.get(key, '')} |"
        )
    return [*lines, *_training(), *_claims(), *_overhead()]


def _claims() -> list[str]:
    """What the abstracts claim of training, and what was found, in sentences with numbers."""
    data = _read("optim_training")
    tasks = data["tasks"]
    losses = lambda t, n: tasks[t]["optimizers"][n]["report"][_loss_of(t)]
    scores = lambda t, n: np.array(tasks[t]["optimizers"][n]["report"]["test_accuracy"])
    lines = ["", "What the abstract of AcceleGrad# says of training, and what was found:", ""]
    better = [t for t in TASKS if _log_ratio(losses(t, "accelegrad_sharp"),
                                             losses(t, "accelegrad"))[2] < 1]
    lines.append(
        "- *Improves over Euclidean AcceleGrad*: its loss is lower with the whole interval below 1 "
        f"on {len(better)} of {len(TASKS)} tasks. With the l2 geometry in place of the layers' "
        "norms the ratio to Euclidean AcceleGrad is " + ", ".join(
            "{:.2f} [{:.2f}, {:.2f}] ({})".format(
                *_log_ratio(losses(t, "accelegrad_sharp_l2"), losses(t, "accelegrad")), TASKS[t])
            for t in TASKS) + ": on the digits the adaptive anchor does it, on the text the norms."
    )
    parts = []
    for t in ("digits_mlp", "digits_cnn"):
        rival = max(("muon", "scion"), key=lambda n: scores(t, n).mean())
        gap = 100 * (scores(t, "accelegrad_sharp") - scores(t, rival))
        parts.append(f"{TASKS[t]} {gap.mean():+.2f} points of accuracy against {NAMES[rival]}")
    rival = min(("muon", "scion"), key=lambda n: np.mean(losses("char_lm", n)))
    ratio = _log_ratio(losses("char_lm", "accelegrad_sharp"), losses("char_lm", rival))
    lines.append(
        "- *Competitive with recent non-Euclidean optimizers*: yes on the digits ("
        + "; ".join(parts) + "), no on the text: loss {:.2f} [{:.2f}, {:.2f}] of ".format(*ratio)
        + f"{NAMES[rival]}'s."
    )
    low = [r for r in _read("optim_polar")["lowrank"] if r["method"] == "fadex, from the factors"]
    overhead = {r["optimizer"]: r for r in _read("optim_overhead")["rows"]}
    sharp, scion = overhead["accelegrad_sharp"]["ratio"], overhead["scion"]["ratio"]
    lines.append(
        "- *Raw gradients in spectral oracles reduce polar time and overhead*: with the same "
        f"polar steps a step takes {sharp:.2f} of Muon's time, and so does Scion's with its "
        f"momentum ({scion:.2f}): that is the implementation. What a raw gradient does have is "
        f"low rank: from its two factors the polar factor of a {low[0]['shape'][0]} x "
        f"{low[0]['shape'][1]} gradient of rank {low[0]['rank']} takes {low[0]['ratio']:.2g} of "
        "the time (`polar_lowrank`), which momentum would spoil."
    )
    river = data["river_lm"]["rows"]
    stable = {r["decay"]: r for r in river}
    lines += [
        "",
        "Heavy ball on the character LM (`python benchmarks/optim_training.py --only river_lm`): "
        "the largest stable learning rate in the averaged form grows "
        + ", ".join(f"{stable[d]['largest_stable'] / stable[0.0]['largest_stable']:.1f}x at "
                    f"decay {d:g}" for d in stable if d)
        + "; the best validation loss goes from "
        f"{stable[0.0]['best_valid_loss']:.3f} to {min(r['best_valid_loss'] for r in river):.3f}.",
    ]
    return lines


def _training() -> list[str]:
    data = _read("optim_training")
    tasks = {t: data["tasks"][t] for t in TASKS if data["tasks"].get(t, {}).get("optimizers")}
    rows = {t: task["optimizers"] for t, task in tasks.items()}
    names = [n for n in NAMES if any(n in r for r in rows.values())]
    mean = lambda t, n, metric: float(np.mean(
        [math.inf if v is None else v for v in rows[t][n]["report"][metric]]))
    first = next(reversed(rows))
    names.sort(key=lambda n: mean(first, n, _loss_of(first)) if n in rows[first] else math.inf)
    about = "; ".join(
        f"{TASKS[t]}: {task['about']['model']}, {task['about']['steps']} steps, "
        f"{len(next(iter(rows[t].values()))['seeds'])} fresh seeds" for t, task in tasks.items()
    )
    sha = next((t["about"]["sha256"] for t in tasks.values() if "sha256" in t["about"]), None)
    lines = [
        "",
        "### Training",
        "",
        f"{about}. Every optimizer is tuned on other seeds, from a window of nine points that "
        "moves onto its best one, under the same linear decay; in brackets the loss over "
        "Euclidean AcceleGrad's with the 95 % interval of the paired ratios. The text is the King "
        f"James Bible (sha256 {sha[:16]}…) "
        "(`python benchmarks/optim_training.py`):" if sha else "",
        "",
        "| optimizer | " + " | ".join(
            f"{TASKS[t]}, {_loss_of(t).replace('_', ' ')}"
            + (" | accuracy, %" if t.startswith("digits") else "") for t in rows) + " |",
        "|---" * (1 + len(rows) + sum(t.startswith("digits") for t in rows)) + "|",
    ]
    for n in names:
        cells = []
        for t in rows:
            if n not in rows[t]:
                cells += ["", ""] if t.startswith("digits") else [""]
                continue
            metric = _loss_of(t)
            value = mean(t, n, metric)
            text = f"{value:.3f}" if t == "char_lm" else f"{value:.4f}"
            if not math.isfinite(value):
                text = "diverged"
            elif n != "accelegrad" and "accelegrad" in rows[t]:
                theirs = rows[t]["accelegrad"]["report"][metric]
                text += " ({:.2f} [{:.2f}, {:.2f}])".format(
                    *_log_ratio(rows[t][n]["report"][metric], theirs))
            cells.append(text)
            if t.startswith("digits"):
                cells.append(f"{100 * mean(t, n, 'test_accuracy'):.2f}")
        lines.append(f"| {NAMES[n]} | " + " | ".join(cells) + " |")
    return lines


def _overhead() -> list[str]:
    data = _read("optim_overhead")
    lines = [
        "",
        "### Time of a step",
        "",
        f"Optimizer and parameter update on an MLP {'-'.join(map(str, data['settings']['widths']))}"
        f" in float32 on the CPU; Muon, Scion and AcceleGrad# with the same "
        f"{data['settings']['newton_schulz_steps']} Newton-Schulz steps and coefficients on the "
        "same matrices; median and quartiles of interleaved runs "
        "(`python benchmarks/optim_overhead.py`):",
        "",
        "| optimizer | time | peer |",
        "|---|---|---|",
    ]
    for row in data["rows"]:
        low, high = row["quartiles"]
        name = row["optimizer"].replace("accelegrad_sharp", "AcceleGrad#").replace("scion", "Scion")
        peer = "adamw" if row["peer"] == "adamw" else "contrib.muon"
        lines.append(f"| {name} | {row['ratio']:.2f} x [{low:.2f}, {high:.2f}] | optax {peer} |")
    return lines
