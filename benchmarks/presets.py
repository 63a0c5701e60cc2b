"""Every preset on the shipped digits DiT: evaluations, speed-up and error to the full run.

    python benchmarks/presets.py [--methods teacache,dbcache] [--samples 64] [--repeats 0]

Prints the table of :mod:`fadex.caching.presets` and writes ``benchmarks/results/presets.json``.
With ``--repeats`` above 0 the measured speed-up is added (the digits model is so small that a
step costs little more than its overhead: measured figures say little about larger models).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from fadex.caching.compare import relative_error
from fadex.caching.presets import METHODS, QUALITIES, profile_preset, run_preset
from fadex.caching.stats import measure_speedup
from fadex.models import DIGITS_SHAPE, load_digits_dit
from fadex.sampling import sample, uniform_times

RESULTS = Path(__file__).parent / "results" / "presets.json"
STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=0)
    args = parser.parse_args()
    denoiser, params = load_digits_dit()
    noise = lambda seed, count: jax.random.normal(jax.random.key(seed), (count, *DIGITS_SHAPE))
    x, labels = noise(300, args.samples), jnp.arange(args.samples) % 10
    profile_x, profile_labels = noise(100, 16), jnp.arange(16) % 10
    times = uniform_times(STEPS)
    full = lambda: sample(denoiser, params, x, labels, timesteps=times)
    reference = full()
    rows = []
    for method in args.methods.split(","):
        for quality in QUALITIES:
            chosen = dict(timesteps=times, method=method, quality=quality)
            profile = profile_preset(denoiser, params, profile_x, profile_labels, **chosen)
            run = lambda profile=profile, chosen=chosen, **kw: run_preset(
                denoiser, params, x, labels, profile=profile, **chosen, **kw
            )
            out, stats = run(return_stats=True)
            row = dict(
                method=method, quality=quality, nfe=int(stats.nfe),
                estimated_speedup=float(stats.estimated_speedup),
                rel_error=float(relative_error(out, reference).mean()), inert=stats.inert,
            )
            if args.repeats:
                row["measured_speedup"] = measure_speedup(full, run, args.repeats).speedup
            rows.append(row)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(row["method"], row["quality"]) for row in rows}
    rows += [row for row in known if (row["method"], row["quality"]) not in done]
    rows.sort(key=lambda row: (row["method"], QUALITIES.index(row["quality"])))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def table(rows: list[dict]) -> str:
    """The rows as a reStructuredText table, a line per method."""
    edge = "=========== =================== =================== ==================="
    lines = [edge, f"{'method':11} " + " ".join(f"{name:19}" for name in QUALITIES).rstrip(), edge]
    cells = {
        (row["method"], row["quality"]):
            f"{row['nfe']:2}  {row['estimated_speedup']:.2f}x  {row['rel_error']:.4f}"
        for row in rows
    }
    for method in sorted({row["method"] for row in rows}):
        line = " ".join(f"{cells.get((method, name), '-'):19}" for name in QUALITIES)
        lines.append(f"{method:11} {line}".rstrip())
    return "\n".join([*lines, edge])


if __name__ == "__main__":
    main()
