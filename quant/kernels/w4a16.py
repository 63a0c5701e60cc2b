r"""``w4a16``: activations of 16 or 32 bits times weights of 4 bits, decoded on chip.

.. math:: y_{mn} = g \sum_k x_{mk}\, v(c_{kn})\, s_{\lfloor k/b \rfloor n}

Count. Weights move :math:`\tfrac12 + \sigma/b` bytes a value (:math:`\sigma` bytes a block scale:
0.5625 for NVFP4 and RaZeR, 0.531 for MXFP4, 0.625 for int4 in groups of 32 under float32), where
a product with bfloat16 weights moves 2: at most 3.6 times faster while memory is the limit.
Decoding first costs a write and a read of the decoded weight besides, 4.56 bytes a value in all.
:math:`2M` operations a value and about 12 integer operations to decode it: below the ridge of
:mod:`fadex.quant.matmul` (58 rows on an H200, 68 on a TPU v5e) the product is bound by memory,
above it the decoded weight serves all rows.

The body is the format's own ``decode_blocks`` on codes widened to int32, so every 4-bit format
has a kernel: e2m1 under e4m3fn, e3m3 or e8m0 scales, RaZeR's special values, NF4, integers with
and without zero point. In the planar layout byte ``r`` of a tile of 128 holds code ``r`` low and
code ``r + 64`` high, so a tile unpacks into two contiguous halves with no shuffle. Decoded values
meet ``x`` in the dtype of the result (float32 where a TPU would need float16) and are summed in
float32; the tensor scale multiplies the sum.

**TPU form.** Grid ``(batch, M/bm, N/bn, K/bk)``, blocks ``x (bm, bk)``, codes ``(bk/2, bn)``,
scales ``(bk/b, bn)``, ``bm <= 128``. ``bk`` is 512, or so much more that the scales fill whole
tiles of 8, 16 or 32 rows by their width; ``bn`` at least 128, ``bk bn <= 2^18`` else. VMEM in the
usual case (bm = 64, bk = bn = 512, bfloat16): codes 128 KiB, scales 16 KiB and x 64 KiB, each
twice; sum 128 KiB, output 64 KiB twice; the weight as int32, as float32 and as bfloat16, 1 +
1 + 0.5 MiB: under 3.5 MiB of 16; at the largest, bk = 4096 by bn = 128, under 7 MiB. The last
block along ``K`` may hang over: what lies beyond is masked out of both operands.

**GPU form (Triton).** Grid ``(batch * splits, M/bm, N/64)`` with the loop over ``K`` inside, a
tile of 128 at a step as two products of depth 64; ``bm`` is 16, 32 or 64. A few rows make too few
programs to fill the machine, so ``K`` is split until there are four a multiprocessor, and the
partial sums (8 bytes written and read again) are added by XLA: at most ``K / 64 M`` parts, so that
they never move more than 22 % of the weight's bytes; one part from 64 rows on at ``K = 4096``.
Compiled ahead of time for an H100, two stages: bfloat16 at 8 rows takes 12 KiB of shared memory
and 104 (NVFP4) to 128 (RaZeR) registers, at 64 rows 44 KiB and 134; float32 multiplies as three
TF32 products on tensor cores, 24 KiB; no spills.

Neither form's speed has been measured; ``benchmarks/device_kernels.py`` does so. Several TPUs:
XLA does not partition a Mosaic kernel by itself; see :func:`fadex.quant.qmatmul` for what it does
then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.kernels import by_platform
from fadex.quant.formats import TENSOR
from fadex.quant.packing import TILE
from fadex.quant.qarray import QuantizedArray

__all__ = [
    "rows_each",
    "serves",
    "w4a16",
    "w4a16_reference",
    "w4a16_tpu",
    "w4a16_triton",
]

_HALF = TILE // 2
_TPU_DEPTH = 512
_TPU_MAX_DEPTH = 4096
_TPU_ROWS = 128
_TPU_AREA = 1 << 18
_GPU_ROWS = 64
_GPU_COLUMNS = 64
_GPU_PROGRAMS = 528  # four for each of 132 multiprocessors


def _precision(dtype: Any) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def scale_rows(*scales: jax.Array | None) -> int:
    """Rows of a whole TPU tile of the narrowest of these arrays."""
    return max([8 * (4 // jnp.dtype(s.dtype).itemsize) for s in scales if s is not None] or [8])


def tpu_depth(block: int | None, length: int, *scales: jax.Array | None) -> int | None:
    """Rows of a TPU block, so that block scales fill whole tiles; ``None``: nothing fits."""
    depth = _TPU_DEPTH if block is None else max(_TPU_DEPTH, scale_rows(*scales) * block)
    depth = min(depth, length)  # a block as long as the axis may have any size
    return depth if depth <= _TPU_MAX_DEPTH else None


def _block(qw: QuantizedArray) -> int | None:
    """Values that share a scale, ``None`` for the whole axis or matrix."""
    return qw.fmt.block if isinstance(qw.fmt.block, int) else None


def serves(qw: QuantizedArray, dtype: Any) -> bool:
    """Whether the kernels take this weight and result dtype (see :func:`qmatmul`)."""
    block = _block(qw)
    blocks = block is None or TILE % block == 0 or block % TILE == 0
    return (
        qw.axis == -2 and qw.fmt.bits == 4 and qw.layout == "planar" and blocks
        and qw.length == qw.padded and qw.length > 0 and qw.length % TILE == 0
        and qw.codebook is None and qw.rotation is None
        and (qw.scales is None) == (qw.fmt.block == TENSOR)
        and jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
        and 0 not in qw.shape and tpu_depth(block, qw.length, qw.scales, qw.zero_point) is not None
    )


def _check(x: jax.Array, qw: QuantizedArray, dtype: Any) -> None:
    if not serves(qw, dtype):
        raise ValueError(
            f"qw: the kernel takes 4-bit codes in layout 'planar' with K a multiple of {TILE} and "
            f"a block that divides {TILE} or covers K, and results of at most 32 bits; got {qw!r} "
            f"and {jnp.dtype(dtype).name}"
        )


def _matrices(
    x: jax.Array, qw: QuantizedArray
) -> tuple[jax.Array, QuantizedArray, tuple[int, ...]]:
    """``x`` as ``[B, M, K]``, the weight's leaves with one leading axis, the result's shape."""
    length, columns = qw.shape[-2:]
    leading = qw.shape[:-2]
    if math.prod(leading) == 1:
        out = jnp.broadcast_shapes(x.shape[:-2], leading) + x.shape[-2:-1] + (columns,)
        rows = x.reshape(1, math.prod(x.shape[:-1]), length)
    else:
        rows = x[None] if x.ndim == 1 else x
        rows = jnp.broadcast_to(rows, leading + rows.shape[-2:])
        out = leading + x.shape[-2:-1] + (columns,)
        rows = rows.reshape(-1, *rows.shape[-2:])
    flat = lambda a: None if a is None else a.reshape(-1, *a.shape[-2:])
    g = qw.tensor_scale
    return rows, dataclasses.replace(
        qw, codes=flat(qw.codes), scales=flat(qw.scales), zero_point=flat(qw.zero_point),
        tensor_scale=None if g is None else g.reshape(-1),
    ), out


def rows_each(x: jax.Array, qw: QuantizedArray) -> int | None:
    """Rows that meet each matrix of the weight; ``None`` where a matrix would be repeated."""
    leading = qw.shape[:-2]
    if math.prod(leading) == 1:
        return math.prod(x.shape[:-1])
    if jnp.broadcast_shapes(x.shape[:-2], leading) != leading:
        return None
    return x.shape[-2] if x.ndim > 1 else 1


def w4a16_reference(x: jax.Array, qw: QuantizedArray, dtype: Any) -> jax.Array:
    """``x @ qw.dequantize()`` accumulated in float32 and rounded once to ``dtype``."""
    wide = jnp.promote_types(dtype, jnp.float32)
    w = qw.dequantize().astype(dtype)
    return jnp.matmul(x.astype(dtype), w, preferred_element_type=wide).astype(dtype)


def w4a16_tpu(
    x: jax.Array, qw: QuantizedArray, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Pallas TPU form of :func:`w4a16_reference`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    _check(x, qw, dtype)
    fmt, block = qw.fmt, _block(qw)
    x, qw, shape = _matrices(x, qw)
    batch, m, length = x.shape
    n = qw.shape[-1]
    depth = tpu_depth(block, length, qw.scales, qw.zero_point)
    rows = min(m, _TPU_ROWS)
    columns = min(n, max(128, min(512, _TPU_AREA // depth // 128 * 128)))
    steps = pl.cdiv(length, depth)
    group = depth if block is None else block
    # TPUs hold no float16: float32 holds it exactly.
    legal = lambda d: jnp.dtype(jnp.float32 if d == jnp.float16 else d)
    operand = legal(dtype)
    params = [a.astype(legal(a.dtype)) for a in (qw.scales, qw.zero_point) if a is not None]

    def kernel(*refs):
        refs = list(refs)
        g_ref = None if qw.tensor_scale is None else refs.pop(0)
        x_ref, codes_ref = refs[:2]
        scales_ref = None if qw.scales is None else refs[2]
        zero_ref = None if qw.zero_point is None else refs[3]
        out_ref, sum_ref = refs[-2:]
        b, k = pl.program_id(0), pl.program_id(3)

        @pl.when(k == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def per_block(ref):
            if ref is None:
                return None
            value = ref[...]
            value = value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.int32)
            return value[:, None, :]

        packed = codes_ref[...].astype(jnp.int32).reshape(depth // TILE, _HALF, columns)
        codes = jnp.concatenate([packed & 15, packed >> 4], axis=1)
        codes = codes.reshape(depth // group, group, columns)
        w = fmt.decode_blocks(codes, per_block(scales_ref), per_block(zero_ref))
        w = w.reshape(depth, columns)
        left = x_ref[...].astype(operand)
        if length % depth:  # beyond the axis there is whatever memory held, NaN included
            inside = length - k * depth
            w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < inside, w, 0.0)
            column = jax.lax.broadcasted_iota(jnp.int32, left.shape, 1)
            left = jnp.where(column < inside, left, jnp.zeros_like(left))
        sum_ref[...] += jax.lax.dot_general(
            left, w.astype(operand), (((1,), (0,)), ((), ())),
            precision=_precision(operand), preferred_element_type=jnp.float32,
        )

        @pl.when(k == steps - 1)
        def _():
            total = sum_ref[...] if g_ref is None else sum_ref[...] * g_ref[b, 0]
            out_ref[...] = total.astype(out_ref.dtype)

    scales_spec = pl.BlockSpec(
        (None, 1 if block is None else depth // group, columns),
        (lambda b, i, j, k: (b, 0, j)) if block is None else (lambda b, i, j, k: (b, k, j)),
    )
    out = pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(m, rows), pl.cdiv(n, columns), steps),
        in_specs=[
            *([] if qw.tensor_scale is None else [pl.BlockSpec(memory_space=pltpu.SMEM)]),
            pl.BlockSpec((None, rows, depth), lambda b, i, j, k: (b, i, k)),
            pl.BlockSpec((None, depth // 2, columns), lambda b, i, j, k: (b, k, j)),
            *[scales_spec for _ in params],
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda b, i, j, k: (b, i, j)),
        out_shape=jax.ShapeDtypeStruct((batch, m, n), operand),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        interpret=interpret,
    )(*([] if qw.tensor_scale is None else [qw.tensor_scale[:, None]]),
      x.astype(legal(x.dtype)), qw.codes, *params)
    return out.astype(dtype).reshape(shape)


def gpu_splits(m: int, length: int, programs: int) -> int:
    """Parts of ``K``, a divisor of its tiles (see the module)."""
    tiles = length // TILE
    wanted = min(-(-_GPU_PROGRAMS // programs), tiles, max(1, length // (64 * m)))
    return max(d for d in range(1, wanted + 1) if tiles % d == 0)


def w4a16_triton(
    x: jax.Array, qw: QuantizedArray, dtype: Any, *, interpret: bool = False,
    splits: int | None = None,
) -> jax.Array:
    """Pallas Triton form of :func:`w4a16_reference`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    _check(x, qw, dtype)
    fmt, block = qw.fmt, _block(qw)
    x, qw, shape = _matrices(x, qw)
    batch, m, length = x.shape
    n = qw.shape[-1]
    rows = min(_GPU_ROWS, max(16, 1 << (m - 1).bit_length()))
    columns = _GPU_COLUMNS
    grid = (pl.cdiv(m, rows), pl.cdiv(n, columns))
    splits = splits or gpu_splits(m, length, batch * grid[0] * grid[1])
    tiles = length // TILE // splits
    group = _HALF if block is None else min(block, _HALF)
    params = [a for a in (qw.scales, qw.zero_point) if a is not None]
    partial = splits > 1
    precision = _precision(dtype)
    if precision is not None and not interpret:
        # Float32's accuracy from tensor cores; without them the product spills registers.
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3

    def kernel(*refs):
        refs = list(refs)
        g_ref = None if qw.tensor_scale is None else refs.pop(0)
        x_ref, codes_ref = refs[:2]
        scales_ref = None if qw.scales is None else refs[2]
        zero_ref = None if qw.zero_point is None else refs[3]
        out_ref = refs[-1]
        b, part = pl.program_id(0) // splits, pl.program_id(0) % splits
        row = pl.program_id(1) * rows + jnp.arange(rows)[:, None]
        first = pl.program_id(2) * columns
        column = first + jnp.arange(columns)[None, :]
        # Codes as [blocks, values of a block, columns], so that a scale is decoded once.
        column3 = first + jnp.arange(columns)[None, None, :]
        block3 = jnp.arange(_HALF // group)[:, None, None]
        value3 = jnp.arange(group)[None, :, None]
        depth = jnp.arange(_HALF)[None, :]

        def scales_of(ref, start):
            if ref is None:
                return None
            at = block3 * 0 if block is None else start // block + block3
            value = plgpu.load(ref.at[b, at, column3], mask=column3 < n, other=0)
            return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.int32)

        def body(step, total):
            tile = part * tiles + step
            at = tile * _HALF + block3 * group + value3
            packed = plgpu.load(codes_ref.at[b, at, column3], mask=column3 < n, other=0)
            packed = packed.astype(jnp.int32)
            for half in range(2):
                start = tile * TILE + half * _HALF
                w = fmt.decode_blocks(
                    (packed >> 4) if half else (packed & 15),
                    scales_of(scales_ref, start), scales_of(zero_ref, start),
                )
                left = plgpu.load(x_ref.at[b, row, start + depth], mask=row < m, other=0)
                total += jax.lax.dot_general(
                    left.astype(dtype), w.reshape(_HALF, columns).astype(dtype),
                    (((1,), (0,)), ((), ())),
                    precision=precision, preferred_element_type=jnp.float32,
                )
            return total

        zeros = jnp.zeros((rows, columns), jnp.float32)
        total = jax.lax.fori_loop(0, tiles, body, zeros)
        if g_ref is not None and not partial:
            total = total * g_ref[b]
        at = (part, b, row, column) if partial else (b, row, column)
        mask = (row < m) & (column < n)
        plgpu.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)

    out = pl.pallas_call(
        kernel,
        grid=(batch * splits, *grid),
        out_shape=jax.ShapeDtypeStruct(
            (splits, batch, m, n) if partial else (batch, m, n),
            jnp.float32 if partial else dtype,
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=4 if jnp.dtype(dtype).itemsize == 2 else 8, num_stages=2
        ),
        interpret=interpret,
    )(*([] if qw.tensor_scale is None else [qw.tensor_scale]), x, qw.codes, *params)
    if partial:
        out = out.sum(0)
        out = out if qw.tensor_scale is None else out * qw.tensor_scale[:, None, None]
    return out.astype(dtype).reshape(shape)


def w4a16(x: jax.Array, qw: QuantizedArray, dtype: Any = None) -> jax.Array:
    """Product with a 4-bit weight by the kernel of the platform the program is lowered for.

    Args:
      x: ``[..., K]``.
      qw: ``[..., K, N]`` with block axis -2, as :func:`serves` accepts it; its leading axes are
        those of the result.
      dtype: of the result, float32, bfloat16 or float16; by default that of
        ``x @ qw.dequantize()``.

    Returns:
      ``[..., M, N]`` as :func:`jax.numpy.matmul` shapes it. For derivatives and everything else
      call :func:`fadex.quant.qmatmul`.

    Raises:
      ValueError: a weight, a shape or a dtype that the kernels do not take.

    Example:
      >>> from fadex.quant import nvfp4, quantize_array
      >>> qw = quantize_array(jnp.eye(128), nvfp4())
      >>> w4a16(jnp.arange(128.0)[None], qw)[0, :4].tolist()
      [0.0, 1.0, 2.0, 3.0]
    """
    dtype = jnp.promote_types(x.dtype, qw.dtype) if dtype is None else jnp.dtype(dtype)
    _check(x, qw, dtype)
    if rows_each(x, qw) is None:
        raise ValueError(
            f"qw: its leading axes must be those of the result, got x {x.shape} and qw {qw.shape}"
        )
    bind = lambda form: functools.partial(form, dtype=dtype)
    return by_platform(
        x, qw, default=bind(w4a16_reference), tpu=bind(w4a16_tpu), cuda=bind(w4a16_triton)
    )
