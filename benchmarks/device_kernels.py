"""Every kernel of the library on an accelerator: correct, and how near to what the device can do.

    python benchmarks/device_kernels.py                  # on a GPU or a TPU, under four minutes
    python benchmarks/device_kernels.py --interpret      # anywhere: tiny sizes, correctness alone

Each kernel runs on arrays well beyond the caches (hundreds of megabytes) and is compared with its
``jnp`` reference on the same device. Reported: the median time of a call within a compiled loop,
the bytes it has to move by that time as a fraction of a measured copy, its operations as a
fraction of a measured bfloat16 product, and how much faster it is than the reference, which XLA
compiles. Entries that would not end in time are listed as skipped. Without an accelerator the
script says so and writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.caching.kernels import weighted_sum_reference, weighted_sum_tpu, weighted_sum_triton
from fadex.models.kernels import (
    gated_forecast_reference,
    gated_forecast_tpu,
    gated_forecast_triton,
)
from fadex.optim.kernels import newton_schulz
from fadex.optim.newton_schulz_coefficients import resolve_coefficients
from fadex.quant import int_group, mxfp4, nf4, nvfp4, quantize_array, razer_e3m3
from fadex.quant.kernels import fused_quantize, w4a16

RESULTS = Path(__file__).parent / "results" / "device_kernels.json"
BUDGET_SECONDS = 225.0
DTYPE = jnp.bfloat16
STEPS = 6


class Entry(NamedTuple):
    """One measurement.

    Attributes:
      kernel, case: its name and the format or size.
      forms: ``{'gpu': f, 'tpu': f}`` of the arguments and ``interpret``.
      reference: the same of the arguments alone.
      make: arguments from a key; runs compiled on the device.
      bytes, flops: what one call has to move and to do.
      tolerance: bound of the largest error in units of the largest result; for packed codes the
        fraction of bytes that may differ.
      mean_tolerance: bound of the mean error in units of the mean magnitude.
    """

    kernel: str
    case: str
    forms: dict[str, Callable[..., Any]]
    reference: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    bytes: float
    flops: float
    tolerance: float
    mean_tolerance: float = float("inf")


def normal(key: jax.Array, *shape: int, dtype: Any = DTYPE) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def caching_entries(tiny: bool) -> Iterator[Entry]:
    snapshots, sites, tokens, width = (3, 2, 16, 128) if tiny else (3, 16, 16384, 1152)

    def arrays(key):
        keys = jax.random.split(key, 4)
        history = normal(keys[0], snapshots, sites, 1, tokens, width)
        weights = jax.random.normal(keys[1], (sites, snapshots))
        return history, weights, normal(keys[2], 1, tokens, width), normal(keys[3], 1, width)

    def sum_arguments(key):
        history, weights, *_ = arrays(key)
        return weights, history

    def gate_arguments(key):
        history, weights, x, gate = arrays(key)
        return x, gate, weights, history

    values = tokens * width
    case = f"{snapshots} x {sites} sites x {tokens} x {width}"
    yield Entry(
        "weighted_sum", case,
        {"gpu": functools.partial(weighted_sum_triton, dtype=DTYPE),
         "tpu": functools.partial(weighted_sum_tpu, dtype=DTYPE)},
        functools.partial(weighted_sum_reference, dtype=DTYPE), sum_arguments,
        2 * (snapshots + 1) * sites * values, 2 * snapshots * sites * values, 1e-2,
    )
    site = sites - 1
    yield Entry(
        "gated_forecast", f"one site of {case}",
        {"gpu": functools.partial(gated_forecast_triton, site=site),
         "tpu": functools.partial(gated_forecast_tpu, site=site)},
        functools.partial(gated_forecast_reference, site=site), gate_arguments,
        2 * (snapshots + 2) * values, (2 * snapshots + 2) * values, 1e-2,
    )


def newton_schulz_entries(tiny: bool) -> Iterator[Entry]:
    table = tuple(map(tuple, resolve_coefficients("polar_express", 2 if tiny else STEPS).tolist()))
    batch, m, n = (2, 16, 32) if tiny else (16384, 64, 128)

    def resident(key):
        x = normal(key, batch, m, n, dtype=jnp.float32)
        return ((x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)).astype(DTYPE),)

    yield Entry(
        "newton_schulz resident", f"{batch} x {m} x {n}, {len(table)} steps",
        {"gpu": functools.partial(newton_schulz.newton_schulz_resident_triton, table=table),
         "tpu": functools.partial(newton_schulz.newton_schulz_resident_tpu, table=table)},
        functools.partial(newton_schulz.newton_schulz_reference, table=table), resident,
        4 * batch * m * n, len(table) * batch * (4 * m * m * n + 2 * m**3), 5e-2,
    )
    side = 150 if tiny else 8192
    tpu = functools.partial(newton_schulz.symmetric_product_tpu, tile=128 if tiny else 512)
    yield Entry(
        "symmetric_product", f"{side} x {side}, half of the blocks",
        {"gpu": newton_schulz.symmetric_product_triton, "tpu": tpu},
        newton_schulz.symmetric_product_reference,
        lambda key: (normal(key, 1, side, side),),
        4 * side * side, side**3, 2e-2,
    )


def matmul_entries(tiny: bool) -> Iterator[Entry]:
    k, n = (256, 72) if tiny else (8192, 28672)
    cases = [(nvfp4(), 8), (razer_e3m3(), 8), (int_group(4, 32), 8)]
    if not tiny:
        cases += [(nvfp4(), 1), (nvfp4(), 64), (mxfp4(), 8), (nf4(64), 8)]
    for fmt, m in cases:

        def make(key, fmt=fmt, m=m):
            left, right = jax.random.split(key)
            return normal(left, m, k), quantize_array(normal(right, k, n), fmt)

        stored = jax.eval_shape(make, jax.random.key(0))[1]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        yield Entry(
            "w4a16", f"{fmt.name}, {m} x {k} x {n}",
            {"gpu": functools.partial(w4a16.w4a16_triton, dtype=DTYPE),
             "tpu": functools.partial(w4a16.w4a16_tpu, dtype=DTYPE)},
            functools.partial(w4a16.w4a16_reference, dtype=DTYPE), make,
            # The largest error may be one place of bfloat16, 2^-7 of a power of two. The mean is
            # that of rounding weights after the tensor scale or before: at most 2^-8 / sqrt(3).
            size + 2 * m * (k + n), 2 * m * k * n, 8e-3, 2.5e-3,
        )


def quantize_entries(tiny: bool) -> Iterator[Entry]:
    k, n = (256, 40) if tiny else (16384, 8192)
    for fmt in (nvfp4(), mxfp4()) if tiny else (nvfp4(), razer_e3m3(), mxfp4(), nf4(64)):

        def make(key, fmt=fmt):
            x = normal(key, k, n)
            amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
            return x, fmt.tensor_scale(amax) if fmt.has_tensor_scale else None

        stored = jax.eval_shape(functools.partial(quantize_array, fmt=fmt),
                                jax.ShapeDtypeStruct((k, n), DTYPE))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        yield Entry(
            "fused_quantize", f"{fmt.name}, {k} x {n}",
            {"gpu": functools.partial(fused_quantize.fused_quantize_triton, fmt=fmt),
             "tpu": functools.partial(fused_quantize.fused_quantize_tpu, fmt=fmt)},
            functools.partial(fused_quantize.fused_quantize_reference, fmt=fmt), make,
            size + 2 * k * n, 0.0, 1e-2,
        )


def entries(tiny: bool) -> Iterator[Entry]:
    for make in (caching_entries, newton_schulz_entries, matmul_entries, quantize_entries):
        yield from make(tiny)


def error_of(ours: Any, theirs: Any) -> jax.Array:
    """Largest difference over the largest result; of packed codes the fraction that differs."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)))
    if len(pairs) > 1:
        different = sum(jnp.sum(a != b, dtype=jnp.float32) for a, b in pairs)
        return different / sum(b.size for _, b in pairs)
    a, b = (value.astype(jnp.float32) for value in pairs[0])
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def mean_error_of(ours: Any, theirs: Any) -> jax.Array:
    """Mean difference over the mean magnitude, of all arrays together."""
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32))
             for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))]
    difference = sum(jnp.sum(jnp.abs(a - b)) for a, b in pairs)
    return difference / sum(jnp.sum(jnp.abs(b)) for _, b in pairs)


def seconds(
    call: Callable[..., Any], args: tuple[Any, ...], size: float, flops: float,
    *, repeats: int = 9,
) -> tuple[float, Any]:
    """Median time of one call within a compiled loop that hides the launch; and its result.

    The loop carries the result, and each round's arguments wait for it, so that the compiler
    neither hoists nor drops a call. Its length is static (a device would ask the host after
    every round otherwise) and such that a fast device takes about 20 milliseconds.
    """
    count = int(min(400, max(4, 0.02 / (size / 3e12 + flops / 5e14 + 1e-9))))

    @jax.jit
    def loop(args):
        def body(_, carry):
            held, _ = jax.lax.optimization_barrier((args, carry))
            return call(*held)

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(call, *args))
        return jax.lax.fori_loop(0, count, body, zeros)

    result = jax.block_until_ready(loop(args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(loop(args))
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times), result


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy and operations a second of a product, both measured."""
    size, side = 1 << 28, 8192
    copy, _ = seconds(lambda x: x + jnp.ones((), x.dtype), (jnp.ones(size, DTYPE),), 4 * size, 0)
    x = normal(jax.random.key(0), side, side)
    product, _ = seconds(lambda x: jnp.matmul(x, x), (x,), 4 * side**2, 2 * side**3)
    return {"copy_bytes_per_second": 4 * size / copy,
            "bfloat16_flop_per_second": 2 * side**3 / product}


def measure(entry: Entry, platform: str, limits: dict[str, float] | None) -> dict[str, Any]:
    """One row; without ``limits`` the form runs in interpret mode and only for correctness."""
    args = jax.block_until_ready(jax.jit(entry.make)(jax.random.key(1)))
    form = functools.partial(entry.forms[platform], interpret=limits is None)
    if limits is None:
        result, expected = jax.jit(form)(*args), jax.jit(entry.reference)(*args)
    else:
        ours, result = seconds(form, args, entry.bytes, entry.flops)
        theirs, expected = seconds(entry.reference, args, entry.bytes, entry.flops)
    errors = jax.jit(lambda a, b: (error_of(a, b), mean_error_of(a, b)))(result, expected)
    error, mean = map(float, errors)
    row = {"kernel": entry.kernel, "case": entry.case, "form": platform, "error": error,
           "mean_error": mean, "correct": error <= entry.tolerance and mean <= entry.mean_tolerance}
    if limits is None:
        return row
    return row | {
        "milliseconds": 1e3 * ours,
        "bytes_per_second": entry.bytes / ours,
        "fraction_of_copy": entry.bytes / ours / limits["copy_bytes_per_second"],
        "flop_per_second": entry.flops / ours,
        "fraction_of_product": entry.flops / ours / limits["bfloat16_flop_per_second"],
        "speedup_over_reference": theirs / ours,
    }


def describe(row: dict[str, Any]) -> str:
    text = f"{row['kernel']:<24} {row['case']:<44} {row.get('form', ''):<4}"
    if "skipped" in row:
        return f"{text} {row['skipped']}"
    text += f" {'ok   ' if row['correct'] else 'WRONG'} error {row['error']:.1e}"
    if "milliseconds" in row:
        text += (f" {row['milliseconds']:9.3f} ms {row['bytes_per_second'] / 1e9:8.0f} GB/s"
                 f" ({row['fraction_of_copy']:5.1%} of copy)"
                 f" {row['flop_per_second'] / 1e12:7.1f} Tflop/s"
                 f" ({row['fraction_of_product']:5.1%} of product)"
                 f" {row['speedup_over_reference']:5.2f} x reference")
    return text


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)


def run(
    *, interpret: bool = False, out: Path | None = None, budget: float = BUDGET_SECONDS,
    say: Callable[[str], None] = functools.partial(print, flush=True),
) -> dict[str, Any]:
    """The report; written to ``out`` after every row."""
    start = time.perf_counter()
    device = jax.devices()[0]
    limits = None if interpret else ceilings()
    report: dict[str, Any] = {
        "device": device.device_kind, "jax": jax.__version__, "ceilings": limits, "rows": [],
    }
    if limits:
        say(f"{device.device_kind}: copy {limits['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"product {limits['bfloat16_flop_per_second'] / 1e12:.0f} Tflop/s")
    platforms = ("tpu", "gpu") if interpret else (device.platform,)
    for entry in entries(interpret):
        for platform in platforms:
            row = {"kernel": entry.kernel, "case": entry.case, "form": platform}
            if time.perf_counter() - start > budget:
                row["skipped"] = "no time left"
            else:
                try:
                    row = measure(entry, platform, limits)
                except Exception as error:  # one kernel that fails must not hide the others
                    row |= {"correct": False, "skipped": f"{type(error).__name__}: "
                                                         f"{str(error)[:300]}"}
            report["rows"].append(row)
            say(describe(row))
            if out is not None:
                write(out, report)
    report["seconds"] = time.perf_counter() - start
    if out is not None:
        write(out, report)
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds")
    options = parser.parse_args(arguments)
    platform = jax.devices()[0].platform
    if platform not in ("gpu", "tpu") and not options.interpret:
        print(f"No GPU or TPU here (JAX runs on {platform}); --interpret checks the kernels "
              "without one, at tiny sizes.")
        return 0
    out = options.out if options.interpret else options.out or RESULTS
    report = run(interpret=options.interpret, out=out, budget=options.budget)
    bad = [row for row in report["rows"] if not row.get("correct", True)]
    print(f"{len(report['rows']) - len(bad)} of {len(report['rows'])} rows in order")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
