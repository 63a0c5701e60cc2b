"""Time of one optimizer step, ours and the peers', on the same tree in one run.

    python benchmarks/optim_overhead.py

AcceleGrad#, Scion and ``optax.contrib.muon`` get the same Newton-Schulz coefficients and steps
on the same set of matrices, chosen through Muon's dimension-number argument. The l-infinity
AcceleGrad# is compared with ``optax.adamw``. Medians of interleaved runs; ratios only.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.optim import accelegrad_sharp, assign_norms, scion, weight_dimension_numbers

RESULTS = Path(__file__).parent / "results" / "optim_overhead.json"
WIDTHS = (256, 512, 512, 256)
STEPS = 5


def tree(widths, key):
    keys = jax.random.split(key, len(widths))
    return {
        f"dense_{i}": {
            "kernel": jax.random.normal(k, (m, n)) / m**0.5, "bias": jnp.zeros(n)
        }
        for i, (k, m, n) in enumerate(zip(keys, widths, widths[1:]))
    }


def optimizers(params, steps=STEPS):
    """name: (transform, the name of the peer it is measured against)."""
    dims = weight_dimension_numbers(
        lambda p: jax.tree_util.tree_map_with_path(
            lambda _, leaf: "spectral" if leaf.ndim == 2 else "rms", p), params
    )
    norms = functools.partial(assign_norms, dims=dims, steps=steps, coefficients="muon")
    batched = {"batch_leaves": True}
    muon = optax.contrib.muon(0.02, ns_steps=steps, muon_weight_dimension_numbers=dims)
    return {
        "adamw": (optax.adamw(1e-3), None),
        "muon": (muon, None),
        "accelegrad_sharp": (accelegrad_sharp(0.1, norm=norms), "muon"),
        "accelegrad_sharp, batched": (accelegrad_sharp(0.1, norm=norms, **batched), "muon"),
        "scion": (scion(0.1, norm=norms), "muon"),
        "accelegrad_sharp, linf": (accelegrad_sharp(0.1, norm="linf"), "adamw"),
        "accelegrad_sharp, linf, y recomputed": (
            accelegrad_sharp(0.1, norm="linf", coupling=0.1, recompute_y=True), "adamw"),
        "accelegrad_sharp, scalar, linf": (accelegrad_sharp(diameter=1.0, norm="linf"), "adamw"),
    }


def measure(widths=WIDTHS, repeats=31, steps=STEPS):
    params = tree(widths, jax.random.key(0))
    grads = jax.tree.map(lambda p: p * 0.1 + 0.01, tree(widths, jax.random.key(1)))
    programs = {}
    for name, (opt, peer) in optimizers(params, steps).items():

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, grads, opt=opt):
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        carry = (jax.tree.map(jnp.copy, params), jax.jit(opt.init)(params))
        carry = jax.block_until_ready(step(*carry, grads))
        programs[name] = [step, carry, peer, []]
    for _ in range(repeats):
        for entry in programs.values():
            step, carry, _, times = entry
            # An untimed step first: the others' data leave the caches.
            carry = jax.block_until_ready(step(*carry, grads))
            start = time.perf_counter()
            entry[1] = jax.block_until_ready(step(*carry, grads))
            times.append(time.perf_counter() - start)
    rows = []
    for name, (_, _, peer, times) in programs.items():
        if peer is None:
            continue
        other = programs[peer][3]
        ratios = sorted(a / b for a, b in zip(times, other))
        rows.append({
            "optimizer": name, "peer": peer, "ratio": statistics.median(ratios),
            "quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
        })
    return rows


def run(out: Path | None = None, repeats: int = 31) -> dict:
    result = {
        "settings": {"widths": list(WIDTHS), "newton_schulz_steps": STEPS, "repeats": repeats,
                     "dtype": "float32", "platform": jax.default_backend()},
        "rows": measure(repeats=repeats),
    }
    for row in result["rows"]:
        low, high = row["quartiles"]
        print(f"{row['optimizer']:40s} {row['ratio']:.2f} x {row['peer']} "
              f"[{low:.2f}, {high:.2f}]")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31)
    run(RESULTS, parser.parse_args().repeats)
