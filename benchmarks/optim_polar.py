"""Polar factors, ours and the peers', on the same matrices in one run.

    python benchmarks/optim_polar.py
    python benchmarks/optim_polar.py --dtype bfloat16 --repeats 31

Everyone runs the same steps with the same coefficients: five of Muon's. Ours and optax's are
compiled JAX; ``torch.optim.Muon``'s function, ``gram-newton-schulz`` and ``pytorch-optimizer``
run eagerly where they are installed (the extra ``bench-optim``; on the CPU unless torch sees a
GPU, the copy to it not counted), and are left out with a message where not. Reported: the median
over interleaved rounds of each method's time over optax's, and the largest difference from its
result. torch's own function always works in bfloat16 and ``gram-newton-schulz`` in float16.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.optim import polar_factor, polar_lowrank

RESULTS = Path(__file__).parent / "results" / "optim_polar.json"
MUON = (3.4445, -4.7750, 2.0315)
STEPS = 5
SHAPES = [(64, 64), (256, 512), (512, 512), (512, 256), (128, 1024), (768, 3072)]
LOWRANK = [((1024, 1024), 32), ((1024, 1024), 128), ((512, 2048), 32)]
METHODS = ("auto", "xla", "gram")
Program = Callable[[], np.ndarray]


def jax_programs(g: jax.Array, with_svd: bool) -> dict[str, Program]:
    """Compiled methods as functions of nothing that wait for their result."""
    orthogonalize = optax.contrib._muon.orthogonalize_via_newton_schulz
    calls = {"optax": lambda x: orthogonalize(x, jnp.array(MUON), STEPS)}
    for method in METHODS:
        calls[f"fadex, {method}"] = functools.partial(
            polar_factor, coefficients="muon", steps=STEPS, method=method
        )
    if with_svd:
        calls["fadex, svd"] = functools.partial(polar_factor, method="svd")

    def bind(call):
        compiled = jax.jit(call).lower(g).compile()
        return lambda: jax.block_until_ready(compiled(g))

    return {name: bind(call) for name, call in calls.items()}


def torch_programs(g: jax.Array, say: Callable[[str], None]) -> dict[str, Program]:
    """What is installed of the torch packages; ``say`` hears what is not."""
    try:
        import torch
    except ImportError:
        say("torch is not installed: no torch peers")
        return {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.from_numpy(np.array(g, np.float32)).to(device)
    matrix = matrix.to(getattr(torch, g.dtype.name))

    def bind(call):
        def program():
            out = call(matrix)
            if device == "cuda":
                torch.cuda.synchronize()
            return out

        return program

    programs = {}
    try:
        from torch.optim._muon import _zeropower_via_newtonschulz

        programs["torch.optim.Muon"] = bind(
            lambda x: _zeropower_via_newtonschulz(x, MUON, STEPS, 1e-7)
        )
    except ImportError:
        say("this torch has no Muon")
    try:
        from gram_newton_schulz import GramNewtonSchulz

        gram = GramNewtonSchulz(
            ns_use_kernels=False, compile_kwargs=None, ns_coefficients=[MUON] * STEPS
        )
        programs["gram-newton-schulz"] = bind(gram)
    except ImportError:
        say("gram-newton-schulz is not installed")
    try:
        from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

        programs["pytorch-optimizer"] = bind(
            lambda x: zero_power_via_newton_schulz_5(x, STEPS, weights=MUON, dtype=x.dtype)
        )
    except ImportError:
        say("pytorch-optimizer is not installed")
    return programs


def as_numpy(value) -> np.ndarray:
    """float64, whichever framework made it."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, np.float64)


def measure(shape: tuple[int, int], dtype: str, repeats: int, say) -> list[dict]:
    draw = np.random.default_rng(0).normal(size=shape)
    g = jnp.asarray(draw, dtype)
    programs = jax_programs(g, with_svd=min(shape) <= 64 and dtype == "float32")
    programs.update(torch_programs(g, say))
    results = {name: as_numpy(program()) for name, program in programs.items()}
    times = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            program()  # untimed: the other framework's threads and data leave the caches
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    rows = []
    for name in programs:
        ratios = [a / b for a, b in zip(times[name], times["optax"])]
        rows.append({
            "shape": list(shape),
            "method": name,
            "ratio": statistics.median(ratios),
            "quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
            "difference": float(np.abs(results[name] - results["optax"]).max()),
        })
    return rows


def measure_lowrank(shape: tuple[int, int], rank: int, repeats: int) -> list[dict]:
    """A raw gradient of a batch of ``rank`` rows: from its factors, against the whole matrix."""
    rng = np.random.default_rng(0)
    x, delta = (jnp.asarray(rng.normal(size=(rank, n)), jnp.float32) for n in shape)
    orthogonalize = optax.contrib._muon.orthogonalize_via_newton_schulz
    calls = {
        "optax": lambda x, d: orthogonalize(x.T @ d, jnp.array(MUON), STEPS),
        "fadex, auto": lambda x, d: polar_factor(x.T @ d, coefficients="muon", steps=STEPS),
        "fadex, from the factors": lambda x, d: polar_lowrank(
            x, d, coefficients="muon", steps=STEPS),
    }
    programs = {name: jax.jit(call) for name, call in calls.items()}
    for program in programs.values():
        jax.block_until_ready(program(x, delta))
    times = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(x, delta))
            times[name].append(time.perf_counter() - start)
    rows = []
    for name in programs:
        ratios = [a / b for a, b in zip(times[name], times["optax"])]
        low, high = (float(np.quantile(ratios, q)) for q in (0.25, 0.75))
        rows.append({"shape": list(shape), "rank": rank, "method": name,
                     "ratio": statistics.median(ratios), "quartiles": [low, high]})
        print(f"{shape[0]:5d} x {shape[1]:<5d} of rank {rank:<4d} {name:24s} "
              f"{rows[-1]['ratio']:6.3f} x optax [{low:.3f}, {high:.3f}]")
    return rows


def run(
    out: Path | None = None,
    *,
    repeats: int = 21,
    dtype: str = "float32",
    shapes: list[tuple[int, int]] = SHAPES,
) -> dict:
    """Measure all shapes, print a table, write it to ``out`` if given, and return it."""
    said: list[str] = []

    def say(message):
        if message not in said:
            said.append(message)
            print(message)

    result = {
        "settings": {
            "steps": STEPS, "coefficients": "muon", "dtype": dtype, "repeats": repeats,
            "platform": jax.default_backend(),
        },
        "rows": [],
    }
    for shape in shapes:
        rows = measure(shape, dtype, max(5, repeats // 3) if max(shape) > 2000 else repeats, say)
        result["rows"] += rows
        for row in rows:
            low, high = row["quartiles"]
            print(
                f"{shape[0]:5d} x {shape[1]:<5d} {row['method']:20s} {row['ratio']:6.2f} x optax "
                f"[{low:.2f}, {high:.2f}]  difference {row['difference']:.0e}"
            )
    result["missing"] = said
    result["lowrank"] = [
        row for shape, rank in LOWRANK for row in measure_lowrank(shape, rank, max(5, repeats // 3))
    ]
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    # Results of the default setting are kept; the others are for looking.
    run(
        RESULTS if arguments.dtype == "float32" else None,
        repeats=arguments.repeats,
        dtype=arguments.dtype,
    )
