"""Products with packed weights on this machine's own platform, against dense ones.

    python benchmarks/formats_matmul.py

Time of ``qmatmul`` over that of ``x @ w`` with the float32 weight, by batch size, in one run: both
compiled, rounds interleaved, the median over the rounds of the ratio within a round. On CPU every
product decodes its weight first (there is no kernel), so the ratio is above one by that decode and
falls with the batch: what packed weights save there is memory, which is printed beside it. The
last rows hold the activations in integers as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fadex.quant import (
    Format,
    int_group,
    mxfp4,
    nf4,
    nvfp4,
    qmatmul,
    quantize_array,
    razer_e3m3,
)

RESULTS = Path(__file__).parent / "results" / "formats_matmul.json"
SIZES = (1024, 2048)
BATCHES = (1, 8, 64, 512)
W8 = int_group(8, None)
CASES: tuple[tuple[str, Format, Format | None], ...] = (
    ("nvfp4", nvfp4(), None),
    ("razer_e3m3", razer_e3m3(), None),
    ("mxfp4", mxfp4(), None),
    ("int4_g32", int_group(4, 32), None),
    ("nf4_g64", nf4(64), None),
    ("int8_channel", W8, None),
    ("int8_channel, int8 activations", W8, W8),
)


def ratios(size: int, batches: tuple[int, ...] = BATCHES, rounds: int = 15) -> list[dict[str, Any]]:
    """Rows of time over dense for ``[M, size] @ [size, size]``."""
    w = jax.random.normal(jax.random.key(0), (size, size))
    quantized = {
        name: jax.jit(quantize_array, static_argnums=1)(w, fmt) for name, fmt, _ in CASES
    }
    rows = []
    for m in batches:
        x = jax.random.normal(jax.random.key(1), (m, size))
        programs = {"dense": (jax.jit(jnp.matmul).lower(x, w).compile(), w)}
        for name, _, activation in CASES:
            call = jax.jit(lambda x, q, a=activation: qmatmul(x, q, activation=a))
            q = quantized[name]
            programs[name] = (call.lower(x, q).compile(), q)
        times: dict[str, list[float]] = {name: [] for name in programs}
        for step in range(rounds + 2):
            for name, (program, right) in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(x, right))
                if step >= 2:
                    times[name].append(time.perf_counter() - start)
        for name, *_ in CASES:
            over = sorted(a / b for a, b in zip(times[name], times["dense"]))
            rows.append({
                "format": name, "size": size, "batch": m,
                "time_over_dense": statistics.median(over),
                "quartiles": [over[len(over) // 4], over[-1 - len(over) // 4]],
                "weight_bytes_over_dense": quantized[name].nbytes / w.nbytes,
            })
    return rows


def run(out: Path | None = RESULTS, *, rounds: int = 15) -> dict[str, Any]:
    report: dict[str, Any] = {"platform": jax.default_backend(), "jax": jax.__version__,
                              "rounds": rounds, "rows": []}
    print(f"time over dense float32 on {report['platform']}, by rows of x")
    for size in SIZES:
        rows = ratios(size, rounds=rounds)
        report["rows"] += rows
        print(f"{f'{size} x {size}':<34}{'bytes':>7}" + "".join(f"{m:>8}" for m in BATCHES))
        for name, *_ in CASES:
            mine = [row for row in rows if row["format"] == name]
            print(f"{name:<34}{mine[0]['weight_bytes_over_dense']:>7.3f}"
                  + "".join(f"{row['time_over_dense']:>8.2f}" for row in mine), flush=True)
    if out is not None:
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(temporary, out)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    run(options.out, rounds=options.rounds)
