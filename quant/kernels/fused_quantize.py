r"""``fused_quantize``: largest magnitude, scale, codes and packing of a weight in one pass.

Count. A weight of ``w`` bytes a value is read once and leaves as ``bits/8 + sigma/b`` bytes
(:math:`\sigma` bytes a block scale): in bfloat16 2 + 0.5625 for NVFP4 and RaZeR. Apart from each
other, scale, codes and packing would move the codes twice more and the blocks once: 2 + 2 + 2 +
0.5625 at best. The operations depend on the format: about 40 a value for NVFP4, 100 for
:math:`\pm 5, \pm 8` of RaZeR, whose candidates all live in registers, so that NVFP4 is bound by
memory and RaZeR is at the ridge (206 operations a byte in tensor cores, but some 14 in the vector
units of an H200). The tensor scale of a two-level format depends on the whole matrix and is an
argument: one that is known (static or delayed scaling) costs nothing, else a reduction reads the
weight a second time.

The body is the format's own ``encode_blocks``, the tile of 128 values packed plane by plane as
:mod:`fadex.quant.packing` says.

**TPU form.** Grid ``(batch, K/bk, N/bn)``: blocks lie along sublanes. ``bk`` is 512, or so much
more that the scales fill whole tiles by their width; ``bk bn <= 2^17`` unless ``bn`` is at its
least, 128; a deeper block is encoded in parts of at most ``2^17`` values, whose codes are stored
at once and whose scales together. VMEM at (512, 256), RaZeR: input 512 KiB in float32, twice,
codes 64 KiB and scales 8 KiB, twice, and about ten values of 512 KiB: under 6.5 MiB of 16; at
(4096, 128), the deepest, input 2 MiB and codes 256 KiB, twice, and the same values: 10 MiB.

**GPU form (Triton).** Grid ``(batch, K/128, N/32)``: 8 warps encode one tile of 128 by 32, so that
each of the arrays that live takes 16 registers of a thread. Compiled ahead of time for an H100,
NVFP4 takes 101 registers and RaZeR 178, neither spills (64 columns spill RaZeR's), with 512 bytes
of shared memory. Encoding integers rounds, for which Triton has no instruction in Pallas, so
integer formats take the plain form there.

Both divide as the platform divides: where that is not to the last place (as on GPUs, 2 units), a
value at a tie may take the neighbouring code. XLA does not partition a TPU kernel: on several
devices call it under ``jax.shard_map(..., check_vma=False)``, or use
:func:`fadex.quant.quantize_array`. The speed of neither form has been measured;
``benchmarks/device_kernels.py`` does so and counts the codes that differ.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.kernels import by_platform
from fadex.quant.elements import ELEMENTS
from fadex.quant.formats import TENSOR, Format, plain
from fadex.quant.kernels.w4a16 import scale_rows
from fadex.quant.packing import TILE, planes
from fadex.quant.qarray import QuantizedArray, quantize_array

__all__ = [
    "fused_quantize",
    "fused_quantize_reference",
    "fused_quantize_tpu",
    "fused_quantize_triton",
    "serves",
]

_TPU_DEPTH = 512
_TPU_MAX_DEPTH = 4096
_TPU_AREA = 1 << 17
_INFINITY = 0x7F800000
_GPU_COLUMNS = 32
_GPU_WARPS = 8


def serves(shape: tuple[int, ...], dtype: Any, fmt: Format) -> bool:
    """Whether the kernels take a weight of this shape ``[..., K, N]``."""
    block = fmt.block
    blocks = block == TENSOR or (isinstance(block, int) and TILE % block == 0)
    return (
        len(shape) >= 2 and 0 not in shape and shape[-2] % TILE == 0 and blocks
        and jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
        and _depth(fmt, shape[-2]) <= _TPU_MAX_DEPTH
    )


def _check(x: jax.Array, fmt: Format, tensor_scale: Any) -> None:
    if not serves(x.shape, x.dtype, fmt):
        raise ValueError(
            f"x: the kernel takes [..., K, N] of at most 32 bits with K a multiple of {TILE} and "
            f"blocks that divide {TILE}; got {x.shape}, {x.dtype} and format {fmt.name!r}"
        )
    if fmt.has_tensor_scale != (tensor_scale is not None):
        want = "needs one" if fmt.has_tensor_scale else "has none"
        raise ValueError(f"tensor_scale: format {fmt.name!r} {want}, got {tensor_scale!r}")


def _scale_dtype(fmt: Format) -> Any:
    return jnp.dtype(jnp.uint8 if fmt.scale in ELEMENTS else fmt.scale)


def _outputs(fmt: Format) -> tuple[Any, ...]:
    """Dtypes of the per-block results: scale, zero point."""
    if fmt.block == TENSOR:
        return ()
    return (_scale_dtype(fmt),) if fmt.symmetric else (_scale_dtype(fmt), jnp.dtype(jnp.uint8))


def _depth(fmt: Format, length: int) -> int:
    block = fmt.block if isinstance(fmt.block, int) else TILE
    rows = scale_rows(*(jnp.zeros((), dtype) for dtype in _outputs(fmt)))
    return min(length, max(_TPU_DEPTH, rows * block))


def _pack(codes: jax.Array, bits: int, add: Any) -> list[jax.Array]:
    """Planar bytes (int32) of whole tiles ``[T, 128, N]``, one array ``[T, rows, N]`` a plane.

    ``add`` joins the parts of a byte, given as ``[T, 8 / width, rows, N]``, shifted already.
    """
    out, low = [], 0
    tiles, _, columns = codes.shape
    for width in planes(bits):
        plane = ((codes >> low) & ((1 << width) - 1)).reshape(
            tiles, 8 // width, TILE * width // 8, columns
        )
        out.append(add(plane, width))
        low += width
    return out


def _encode(
    x: jax.Array, fmt: Format, g: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Codes (int32) of ``x`` ``[K, N]`` and its per-block results ``[K/b, 1, N]``."""
    block = fmt.block if isinstance(fmt.block, int) else TILE
    length, columns = x.shape
    blocks = x.astype(jnp.float32).reshape(length // block, block, columns)
    out = fmt.encode_blocks(blocks, g, axis=-2, hold=plain)
    codes = out.codes.astype(jnp.int32).reshape(length // TILE, TILE, columns)
    scales = out.scales
    if scales is not None and fmt.nan_in_scale:
        # Reductions in kernels drop NaN from a maximum of floats; that of their bits keeps it.
        bits = jax.lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF
        bad = jnp.max(bits, axis=-2, keepdims=True) >= _INFINITY
        scales = fmt.finish_scales(scales, bad)
    return codes, tuple(a for a in (scales, out.zero_point) if a is not None)


def _array(
    x: jax.Array, fmt: Format, g: jax.Array | None, outputs: list[jax.Array]
) -> QuantizedArray:
    leading = x.shape[:-2]
    codes, *rest = (a.reshape(leading + a.shape[1:]) for a in outputs)
    scales, zero = (*rest, None, None)[:2]
    return QuantizedArray(
        codes, scales, g, zero, None, None,
        fmt=fmt, axis=-2, pad=0, layout="planar", dtype=x.dtype,
    )


def _spread(
    x: jax.Array, g: Any, fmt: Format
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """``x`` as ``[B, K, N]``, the tensor scale as stored and as ``[B]``."""
    flat = x.reshape(-1, *x.shape[-2:])
    if g is None:
        return flat, None, None
    g = jnp.broadcast_to(jnp.asarray(g, jnp.float32), x.shape[:-2])
    if not fmt.nan_in_scale:  # no block scale can say NaN, so the tensor scale has to
        g = jnp.where(jnp.isfinite(x).all(axis=(-2, -1)), g, jnp.nan)
    return flat, g, g.reshape(-1)


def fused_quantize_reference(
    x: jax.Array, tensor_scale: jax.Array | None, fmt: Format
) -> QuantizedArray:
    """The same by :func:`fadex.quant.quantize_array`."""
    return quantize_array(x, fmt, tensor_scale=tensor_scale)


def fused_quantize_tpu(
    x: jax.Array, tensor_scale: jax.Array | None, fmt: Format, *, interpret: bool = False
) -> QuantizedArray:
    """Pallas TPU form of :func:`fused_quantize_reference`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    _check(x, fmt, tensor_scale)
    flat, stored, g = _spread(x, tensor_scale, fmt)
    batch, length, n = flat.shape
    depth = _depth(fmt, length)
    block = fmt.block if isinstance(fmt.block, int) else TILE
    columns = min(n, max(128, min(512, _TPU_AREA // depth // 128 * 128)))
    part = max(1, _TPU_AREA // max(columns, 128) // TILE) * TILE
    tile_bytes = TILE * fmt.bits // 8

    def add(plane, width):
        out = plane[:, 0]
        for k in range(1, 8 // width):
            out = out | plane[:, k] << (width * k)
        return out

    def kernel(*refs):
        refs = list(refs)
        g_ref = refs.pop(0) if g is not None else None
        x_ref, codes_ref, *out_refs = refs
        scale = None if g_ref is None else g_ref[pl.program_id(0), 0]
        found = []
        for start in range(0, depth, part):
            stop = min(start + part, depth)
            codes, per_block = _encode(x_ref[start:stop, :], fmt, scale)
            packed = jnp.concatenate(_pack(codes, fmt.bits, add), axis=1)
            packed = packed.reshape((stop - start) * fmt.bits // 8, columns)
            codes_ref[start * fmt.bits // 8 : stop * fmt.bits // 8, :] = packed.astype(jnp.uint8)
            found.append(per_block)
        for ref, *values in zip(out_refs, *found):
            ref[...] = jnp.concatenate(values).reshape(ref.shape).astype(ref.dtype)

    spec = lambda rows: pl.BlockSpec((None, rows, columns), lambda b, i, j: (b, i, j))
    out = pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(length, depth), pl.cdiv(n, columns)),
        in_specs=[
            *([] if g is None else [pl.BlockSpec(memory_space=pltpu.SMEM)]), spec(depth),
        ],
        out_specs=[spec(depth // TILE * tile_bytes), *[spec(depth // block) for _ in
                                                       _outputs(fmt)]],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length // TILE * tile_bytes, n), jnp.uint8),
            *[jax.ShapeDtypeStruct((batch, length // block, n), d) for d in _outputs(fmt)],
        ],
        interpret=interpret,
    )(*([] if g is None else [g[:, None]]), flat)
    return _array(x, fmt, stored, out)


def fused_quantize_triton(
    x: jax.Array, tensor_scale: jax.Array | None, fmt: Format, *, interpret: bool = False
) -> QuantizedArray:
    """Pallas Triton form of :func:`fused_quantize_reference`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    _check(x, fmt, tensor_scale)
    flat, stored, g = _spread(x, tensor_scale, fmt)
    batch, length, n = flat.shape
    block = fmt.block if isinstance(fmt.block, int) else TILE
    columns = _GPU_COLUMNS
    tile_bytes = TILE * fmt.bits // 8

    def add(plane, width):
        # The parts occupy different bits, so that a sum joins them: no slices in Triton.
        shifts = jnp.arange(8 // width)[None, :, None, None] * width
        return jnp.sum(plane << shifts, axis=1)

    def kernel(*refs):
        refs = list(refs)
        g_ref = refs.pop(0) if g is not None else None
        x_ref, codes_ref, *out_refs = refs
        b, tile = pl.program_id(0), pl.program_id(1)
        column = pl.program_id(2) * columns + jnp.arange(columns)[None, :]
        mask = column < n
        row = tile * TILE + jnp.arange(TILE)[:, None]
        value = plgpu.load(x_ref.at[b, row, column], mask=mask, other=0)
        scale = None if g_ref is None else g_ref[b]
        codes, per_block = _encode(value, fmt, scale)
        start = tile * tile_bytes
        for plane in _pack(codes, fmt.bits, add):
            rows = plane.shape[1]
            at = start + jnp.arange(rows)[:, None]
            plane = plane.reshape(rows, columns).astype(jnp.uint8)
            plgpu.store(codes_ref.at[b, at, column], plane, mask=mask)
            start = start + rows
        at = tile * (TILE // block) + jnp.arange(TILE // block)[:, None]
        for ref, value in zip(out_refs, per_block):
            value = value.reshape(TILE // block, columns).astype(ref.dtype)
            plgpu.store(ref.at[b, at, column], value, mask=mask)

    out = pl.pallas_call(
        kernel,
        grid=(batch, length // TILE, pl.cdiv(n, columns)),
        out_shape=[
            jax.ShapeDtypeStruct((batch, length // TILE * tile_bytes, n), jnp.uint8),
            *[jax.ShapeDtypeStruct((batch, length // block, n), d) for d in _outputs(fmt)],
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_GPU_WARPS, num_stages=1),
        interpret=interpret,
    )(*([] if g is None else [g]), flat)
    return _array(x, fmt, stored, out)


def fused_quantize(x: Any, fmt: Format, tensor_scale: Any = None) -> QuantizedArray:
    """Quantize a weight in one pass by the kernel of the platform.

    Args:
      x: ``[..., K, N]``, float32, bfloat16 or float16; ``K`` a multiple of 128. Blocks lie along
        ``K`` (axis -2).
      fmt: a format whose block divides 128, or per matrix. Static.
      tensor_scale: for formats that have one: a positive scalar or the leading axes of ``x``.

    Returns:
      What ``quantize_array(x, fmt, tensor_scale=tensor_scale)`` returns.

    Raises:
      ValueError: a shape, a dtype or a format that the kernels do not take (:func:`serves`), a
        tensor scale that is missing or has no place.

    Example:
      >>> from fadex.quant import mxfp4
      >>> q = fused_quantize(jnp.ones((128, 8)), mxfp4())
      >>> q.codes.shape, q.scales.shape, float(q.dequantize().min())
      ((64, 8), (4, 8), 1.0)
    """
    x = jnp.asarray(x)
    _check(x, fmt, tensor_scale)
    g = None if tensor_scale is None else jnp.asarray(tensor_scale, jnp.float32)
    bind = lambda form: functools.partial(form, fmt=fmt)
    half = "float16" in (fmt.scale, x.dtype.name)  # TPUs hold none
    integers = ELEMENTS[fmt.element].kind == "int"  # see the module
    return by_platform(
        x, g, default=bind(fused_quantize_reference),
        tpu=None if half else bind(fused_quantize_tpu),
        cuda=None if integers else bind(fused_quantize_triton),
    )
