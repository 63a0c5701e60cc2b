r"""Newton-Schulz iteration for the polar factor: kernels that save traffic or arithmetic.

One step on ``X`` ``[m, n]``, ``m <= n``, is :math:`A = X X^T`, :math:`P = b A + c A^2`,
:math:`X \leftarrow a X + P X`: three matrix products, ``4 m^2 n + 2 m^3`` operations. Two
kernels pay, each in its own range of sizes:

**Resident** (small matrices): all ``k`` steps in one program per matrix. Traffic to main memory
falls from ``k (4 m n + 6 m^2)`` values (``X`` read twice and written, read again for ``aX``; ``A``
written, read as left and right operand and for ``bA``; ``P`` written and read) to ``2 m n``, and
``3 k`` launches to one. At 128 x 128 in bfloat16 and 6 steps: 1.9 MiB to 64 KiB. The operations
stay.

**Symmetric product** (large matrices): ``A`` and ``A^2`` are symmetric, so only the blocks on and
below the diagonal are computed: with ``q`` blocks a side, ``(q + 1) / 2q`` of the ``2 m^2 n + 2
m^3`` operations, and ``b A + c A^2`` is formed in the accumulator, which saves ``3 m^2`` values
of traffic. A step costs ``2 m^2 n (1 + s) + 2 m^3 s``, ``s = (q + 1) / 2q``: of the plain step,
71 % at ``m = n = 2048`` (``q = 4``), 75 % for ``n = 8 m``. The last product has no symmetry, and
XLA fuses ``aX`` into it on every platform, so it stays XLA's.

Budgets. TPU resident, bytes of VMEM: in- and out-block double-buffered, one transposed copy, the
float32 product and four ``m x m`` float32 values, ``m n (5 w + 4) + 16 m^2`` for values of ``w``
bytes, held under 12 MiB of the 16 MiB that a program gets. TPU symmetric: tiles of 512 (256
below ``m = 1024``): two operands of 1 MiB in float32, double-buffered, accumulator, addend and
output of 1 MiB each: at most 9 MiB; a tile of ``t`` does ``t / 2`` operations per byte in bfloat16,
256 at 512, where chips need about 240. GPU resident: up to 64 x 128 in 16 bits, 32 x
64 in float32 (whose exact products at 64 x 128 spill 77 KB of registers a thread, by the compiler's
report), padded to powers of two: 16 KiB for each copy of ``X``, 40 KiB of shared memory with both
operands and ``P``. GPU symmetric: 64 x 64 accumulator, 2 stages of two 64 x 32 operands: 32 KiB in
float32.

The GPU forms are lowered and checked in interpret mode; their speed has not been measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.kernels import by_platform

Table = tuple[tuple[float, float, float], ...]

_VMEM_BYTES = 12 << 20
_TPU_LANES = 128
_GPU_TILE = 64
_GPU_DEPTH = 32
_GPU_RESIDENT = (64, 128)
_HALVES_FROM = 512


def precision_of(dtype: Any) -> jax.lax.Precision | None:
    """Full precision for 32 bits and more, which accelerators would else multiply in fewer."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def wide_dtype(dtype: Any) -> Any:
    """The dtype products accumulate in: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def wide_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """``left @ right`` accumulated and returned in float32 or wider, at full precision."""
    return jnp.matmul(
        left,
        right,
        precision=precision_of(left.dtype),
        preferred_element_type=wide_dtype(left.dtype),
    )


def gram_product(x: jax.Array) -> jax.Array:
    """``x @ x.mT``, accumulated in float32; large ones in halves, each side block once."""
    half = x.shape[-2] // 2
    if x.shape[-2] < _HALVES_FROM:
        return wide_dot(x, x.mT)
    upper, lower = x[..., :half, :], x[..., half:, :]
    side = wide_dot(lower, upper.mT)
    rows = (
        jnp.concatenate([wide_dot(upper, upper.mT), side.mT], axis=-1),
        jnp.concatenate([side, wide_dot(lower, lower.mT)], axis=-1),
    )
    return jnp.concatenate(rows, axis=-2)


def symmetric_product_reference(
    x: jax.Array, addend: jax.Array | None = None, *, scale: float = 1.0, weight: float = 0.0
) -> jax.Array:
    """``scale * x @ x.mT + weight * addend`` for ``x`` ``[..., m, k]``, in the dtype of ``x``."""
    out = scale * gram_product(x)
    if addend is not None:
        out = out + weight * addend.astype(out.dtype)
    return out.astype(x.dtype)


def newton_schulz_reference(x: jax.Array, table: Any) -> jax.Array:
    """The plain iteration on ``x`` ``[..., m, n]``, ``m <= n``, singular values at most 1."""
    if x.ndim == 3 and x.shape[0] == 1:
        # A batch of one takes a slower product on CPU.
        return newton_schulz_reference(x[0], table)[None]
    wide = wide_dtype(x.dtype)
    eye = jnp.eye(x.shape[-2], dtype=wide)
    for a, b, c in table:
        gram = gram_product(x).astype(x.dtype)
        poly = b * gram.astype(wide) + c * gram_product(gram)
        if x.dtype == wide:
            # One pass over X less; in 16 bits the rounding of a + P would cost accuracy.
            x = wide_dot(poly + a * eye, x)
        else:
            x = (a * x.astype(wide) + wide_dot(poly.astype(x.dtype), x)).astype(x.dtype)
    return x


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Zeros up to multiples of the tile: they stay zero under odd polynomials, so it's exact."""
    m, n = x.shape[-2:]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -m % rows), (0, -n % columns)])


def _step(x: jax.Array, row: tuple[float, float, float]) -> jax.Array:
    """One iteration on values inside a kernel."""
    a, b, c = row
    dot = functools.partial(
        jax.lax.dot_general,
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    gram = dot(x, x, (((1,), (1,)), ((), ()))).astype(x.dtype)
    poly = b * gram.astype(jnp.float32) + c * dot(gram, gram, (((1,), (0,)), ((), ())))
    out = dot(poly.astype(x.dtype), x, (((1,), (0,)), ((), ())))
    return (a * x.astype(jnp.float32) + out).astype(x.dtype)


def fits_tpu_resident(m: int, n: int, dtype: Any) -> bool:
    """Whether one matrix passes all its steps in VMEM (padded sizes; see the module)."""
    m, n = (-(-size // _TPU_LANES) * _TPU_LANES for size in (m, n))
    width = jnp.dtype(dtype).itemsize
    return m * n * (5 * width + 4) + 16 * m * m <= _VMEM_BYTES


def newton_schulz_resident_tpu(
    x: jax.Array, table: Table, *, interpret: bool = False
) -> jax.Array:
    """Pallas TPU form of the whole iteration, ``x`` ``[B, m, n]``: one program a matrix."""
    from jax.experimental import pallas as pl

    batch, m, n = x.shape
    padded = _padded(x, _TPU_LANES, _TPU_LANES)
    block = pl.BlockSpec((None, *padded.shape[1:]), lambda b: (b, 0, 0))

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        for row in table:
            out_ref[...] = _step(out_ref[...], row)

    out = pl.pallas_call(
        kernel,
        grid=(batch,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(padded.shape, x.dtype),
        interpret=interpret,
    )(padded)
    return out[:, :m, :n]


def fits_triton_resident(m: int, n: int, dtype: Any) -> bool:
    """Whether one matrix passes all its steps in one GPU block's registers."""
    part = 2 if jnp.dtype(dtype).itemsize >= 4 else 1
    return m <= _GPU_RESIDENT[0] // part and n <= _GPU_RESIDENT[1] // part


def newton_schulz_resident_triton(
    x: jax.Array, table: Table, *, interpret: bool = False
) -> jax.Array:
    """Pallas Triton form of the whole iteration, ``x`` ``[B, m, n]``: one block a matrix."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    batch, m, n = x.shape
    # Powers of two, and at least the 16 that a matrix product of Triton needs.
    rows, columns = (max(16, 1 << (size - 1).bit_length()) for size in (m, n))

    def kernel(x_ref, out_ref):
        b = pl.program_id(0)
        i, j = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
        mask = (i < m) & (j < n)
        value = plgpu.load(x_ref.at[b, i, j], mask=mask, other=0)
        for row in table:
            value = _step(value, row)
        plgpu.store(out_ref.at[b, i, j], value, mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(batch,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(x)


def symmetric_product_tpu(
    x: jax.Array,
    addend: jax.Array | None = None,
    *,
    scale: float = 1.0,
    weight: float = 0.0,
    tile: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Pallas TPU form for ``x`` ``[B, m, k]``: the blocks on and below the diagonal.

    The grid runs over the list of these blocks (row and column indices are prefetched
    scalars), so blocks above the diagonal cost neither arithmetic nor traffic.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    batch, m, _ = x.shape
    tile = tile or (512 if m >= 1024 else 256)
    padded = _padded(x, tile, tile)
    size, depth = padded.shape[1] // tile, padded.shape[2] // tile
    rows, columns = (jnp.asarray(index, jnp.int32) for index in np.tril_indices(size))
    precision = precision_of(x.dtype)

    def kernel(rows_ref, columns_ref, left_ref, right_ref, *refs):
        del rows_ref, columns_ref
        *addends, out_ref, sum_ref = refs
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jax.lax.dot_general(
            left_ref[...],
            right_ref[...],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

        @pl.when(k == depth - 1)
        def _():
            total = scale * sum_ref[...]
            for ref in addends:
                total += weight * ref[...].astype(jnp.float32)
            out_ref[...] = total.astype(out_ref.dtype)

    operand = lambda which: pl.BlockSpec(
        (None, tile, tile), lambda b, t, k, *index: (b, index[which][t], k)
    )
    square = pl.BlockSpec((None, tile, tile), lambda b, t, k, i, j: (b, i[t], j[t]))
    addends = () if addend is None else (_padded(addend, tile, tile),)
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, len(rows), depth),
            in_specs=[operand(0), operand(1), *[square for _ in addends]],
            out_specs=square,
            scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, size * tile, size * tile), x.dtype),
        interpret=interpret,
    )(rows, columns, padded, padded, *addends)[:, :m, :m]
    # Above the diagonal there is whatever memory held; a select drops it, NaN included.
    below = jnp.tril(jnp.ones((m, m), bool))
    return jnp.where(below, out, out.mT)


def symmetric_product_triton(
    x: jax.Array,
    addend: jax.Array | None = None,
    *,
    scale: float = 1.0,
    weight: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """Pallas Triton form for ``x`` ``[B, m, k]``: each block below the diagonal stored twice."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    batch, m, depth = x.shape
    side = pl.cdiv(m, _GPU_TILE)
    precision = precision_of(x.dtype)

    def kernel(x_ref, *refs):
        *addends, out_ref = refs
        b, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)

        @pl.when(j <= i)
        def _():
            left = (i * _GPU_TILE + jnp.arange(_GPU_TILE))[:, None]
            right = (j * _GPU_TILE + jnp.arange(_GPU_TILE))[:, None]

            def panel(rows, start):
                columns = (start * _GPU_DEPTH + jnp.arange(_GPU_DEPTH))[None, :]
                mask = (rows < m) & (columns < depth)
                return plgpu.load(x_ref.at[b, rows, columns], mask=mask, other=0)

            def body(start, total):
                return total + jax.lax.dot_general(
                    panel(left, start),
                    panel(right, start),
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )

            zeros = jnp.zeros((_GPU_TILE, _GPU_TILE), jnp.float32)
            total = scale * jax.lax.fori_loop(0, pl.cdiv(depth, _GPU_DEPTH), body, zeros)
            columns = right.reshape(1, _GPU_TILE)
            mask = (left < m) & (columns < m)
            for ref in addends:
                value = plgpu.load(ref.at[b, left, columns], mask=mask, other=0)
                total += weight * value.astype(jnp.float32)
            total = total.astype(out_ref.dtype)
            plgpu.store(out_ref.at[b, left, columns], total, mask=mask)

            @pl.when(j < i)
            def _():
                plgpu.store(out_ref.at[b, columns.reshape(_GPU_TILE, 1), left.reshape(
                    1, _GPU_TILE)], total.T, mask=mask.T)

    addends = () if addend is None else (addend,)
    return pl.pallas_call(
        kernel,
        grid=(batch, side, side),
        out_shape=jax.ShapeDtypeStruct((batch, m, m), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(x, *addends)


def _with_symmetric_product(
    x: jax.Array, table: Table, product: Callable[..., jax.Array]
) -> jax.Array:
    """The iteration whose two symmetric products run in a kernel."""
    wide = wide_dtype(x.dtype)
    for a, b, c in table:
        gram = product(x)
        poly = product(gram, gram, scale=c, weight=b)
        x = (a * x.astype(wide) + wide_dot(poly, x)).astype(x.dtype)
    return x


def newton_schulz_tpu(x: jax.Array, table: Table, *, interpret: bool = False) -> jax.Array:
    """The best TPU form for the size of ``x`` ``[B, m, n]``, ``m <= n``."""
    m, n = x.shape[1:]
    # Below 64 rows padding to 128 lanes more than doubles what XLA's own tiles waste.
    if m >= 64 and fits_tpu_resident(m, n, x.dtype):
        return newton_schulz_resident_tpu(x, table, interpret=interpret)
    if m >= 512:
        product = functools.partial(symmetric_product_tpu, interpret=interpret)
        return _with_symmetric_product(x, table, product)
    return newton_schulz_reference(x, table)


def newton_schulz_triton(x: jax.Array, table: Table, *, interpret: bool = False) -> jax.Array:
    """The best GPU form for the size of ``x`` ``[B, m, n]``, ``m <= n``."""
    m, n = x.shape[1:]
    if fits_triton_resident(m, n, x.dtype):
        return newton_schulz_resident_triton(x, table, interpret=interpret)
    if m >= 512 and x.dtype.itemsize == 2:
        # In float32 the product runs without tensor cores, where the library's is faster.
        product = functools.partial(symmetric_product_triton, interpret=interpret)
        return _with_symmetric_product(x, table, product)
    return newton_schulz_reference(x, table)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _newton_schulz(x: jax.Array, table: Table, default: Callable[..., jax.Array]) -> jax.Array:
    bind = lambda form: functools.partial(form, table=table)
    return by_platform(
        x, default=bind(default), tpu=bind(newton_schulz_tpu), cuda=bind(newton_schulz_triton)
    )


@_newton_schulz.defjvp
def _newton_schulz_jvp(table, default, primals, tangents):
    # Plain products throughout: the derivative needs every iterate anyway.
    return jax.jvp(functools.partial(default, table=table), primals, tangents)


def newton_schulz(
    x: jax.Array,
    table: Any,
    default: Callable[..., jax.Array] = newton_schulz_reference,
) -> jax.Array:
    """Newton-Schulz iteration on ``x`` ``[B, m, n]`` by kernels on TPU and CUDA.

    Args:
      x: ``[B, m, n]``, ``m <= n``, singular values at most 1.
      table: static coefficients ``[k, 3]``.
      default: ``(x, table) -> x`` for other platforms and for derivatives.

    Returns:
      The shape and dtype of ``x``. Differentiable to any order.
    """
    if x.dtype == jnp.float64:
        return default(x, table)
    return _newton_schulz(x, tuple(tuple(map(float, row)) for row in table), default)
