r"""``weighted_sum``: the forecast kernel, one pass over the ``K`` cached tensors.

.. math:: \hat F_g = \sum_{k<K} w_{gk} F_{kg}

Cost: ``2 K M`` operations on ``(K + 1) M`` values moved, i.e. ``2K / ((K+1) * bytes)``
operations per byte: 0.75 for ``K = 3`` in bfloat16, far below any accelerator's balance
point, so the floor is the memory time of ``(K + 1) M`` values. XLA reaches it for a single
tensor; the kernel serves the stacked form, where one launch covers all sites ``g`` and the
weights stay in scalar memory.

TPU block: ``(K, 1, rows, 128)`` with at most 1 MiB of snapshots per block, i.e. 2 MiB of
VMEM for the double-buffered input and 0.5 MiB for the output at ``K >= 2`` in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.kernels import by_platform

_BLOCK_BYTES = 1 << 20
_GPU_BLOCK = 1024


def weighted_sum_reference(weights: jax.Array, history: jax.Array, dtype: Any) -> jax.Array:
    """The same in plain ``jnp``; float32 accumulation in the order of ``k``."""
    weights = weights.astype(jnp.float32)
    trailing = (1,) * (history.ndim - weights.ndim)
    total = None
    for k in range(history.shape[0]):
        w = weights[..., k].reshape(weights.shape[:-1] + trailing)
        term = w * history[k].astype(jnp.float32)
        total = term if total is None else total + term
    return total.astype(dtype)


def _canonical(weights: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights as ``[G, K]`` and history as ``[K, G, M]``."""
    groups = math.prod(weights.shape[:-1])
    snapshots = history.shape[0]
    flat = history.reshape(snapshots, groups, -1)
    return weights.reshape(groups, snapshots).astype(jnp.float32), flat


def weighted_sum_tpu(
    weights: jax.Array, history: jax.Array, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Pallas TPU form; rows of 128 lanes where the size allows, else rows of the last axis."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shape = history.shape[1:]
    trailing = shape[weights.ndim - 1 :]
    lanes = 128 if math.prod(trailing) % 128 == 0 else (trailing or (1,))[-1]
    if history.shape[0] * 16 * max(lanes, 128) * history.dtype.itemsize > _BLOCK_BYTES:
        # A long ragged last axis leaves no block that fits; XLA's fused loop serves.
        return weighted_sum_reference(weights, history, dtype)
    weights, flat = _canonical(weights, history)
    snapshots, groups, size = flat.shape
    flat = flat.reshape(snapshots, groups, size // lanes, lanes)
    rows = size // lanes
    block = _BLOCK_BYTES // (snapshots * max(lanes, 128) * flat.dtype.itemsize)
    block = rows if rows <= block else max(16, block // 16 * 16)

    def kernel(w_ref, h_ref, out_ref):
        group = pl.program_id(0)
        total = w_ref[group, 0] * h_ref[0].astype(jnp.float32)
        for k in range(1, snapshots):
            total += w_ref[group, k] * h_ref[k].astype(jnp.float32)
        out_ref[...] = total.astype(out_ref.dtype)

    out = pl.pallas_call(
        kernel,
        grid=(groups, pl.cdiv(rows, block)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((snapshots, None, block, lanes), lambda g, i: (0, g, i, 0)),
        ],
        out_specs=pl.BlockSpec((None, block, lanes), lambda g, i: (g, i, 0)),
        out_shape=jax.ShapeDtypeStruct((groups, rows, lanes), dtype),
        interpret=interpret,
    )(weights, flat)
    return out.reshape(shape)


def weighted_sum_triton(
    weights: jax.Array, history: jax.Array, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Pallas Triton form: flat blocks of 1024, masked at the ragged end."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    shape = history.shape[1:]
    weights, flat = _canonical(weights, history)
    snapshots, groups, size = flat.shape

    def kernel(w_ref, h_ref, out_ref):
        group = pl.program_id(0)
        index = pl.program_id(1) * _GPU_BLOCK + jnp.arange(_GPU_BLOCK)
        mask = index < size
        total = jnp.zeros((_GPU_BLOCK,), jnp.float32)
        for k in range(snapshots):
            value = plgpu.load(h_ref.at[k, group, index], mask=mask, other=0)
            total += w_ref[group, k] * value.astype(jnp.float32)
        plgpu.store(out_ref.at[group, index], total.astype(out_ref.dtype), mask=mask)

    out = pl.pallas_call(
        kernel,
        grid=(groups, pl.cdiv(size, _GPU_BLOCK)),
        out_shape=jax.ShapeDtypeStruct((groups, size), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(weights, flat)
    return out.reshape(shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _weighted_sum(weights: jax.Array, history: jax.Array, dtype: Any) -> jax.Array:
    bind = lambda form: functools.partial(form, dtype=dtype)
    return by_platform(
        weights,
        history,
        default=bind(weighted_sum_reference),
        tpu=bind(weighted_sum_tpu),
        cuda=bind(weighted_sum_triton),
    )


@_weighted_sum.defjvp
def _weighted_sum_jvp(dtype, primals, tangents):
    weights, history = primals
    d_weights, d_history = tangents
    d_out = weighted_sum_reference(d_weights, history, jnp.float32)
    d_out += weighted_sum_reference(weights, d_history, jnp.float32)
    return _weighted_sum(weights, history, dtype), d_out.astype(dtype)


def weighted_sum(weights: jax.Array, history: jax.Array, dtype: Any = None) -> jax.Array:
    r"""Forecast :math:`\sum_k w_k F_k`, accumulated in float32.

    Args:
      weights: ``[K]``, or ``[G, K]`` with one row per site.
      history: ``[K, ...]``, or ``[K, G, ...]`` with the sites behind the snapshots.
      dtype: of the result; that of ``history`` by default.

    Returns:
      Array shaped like ``history[0]``. Differentiable in both arguments, forwards and
      backwards.

    Raises:
      ValueError: the leading axes of ``weights`` and ``history`` do not match.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.caching import weighted_sum
      >>> weighted_sum(jnp.array([2.0, -1.0]), jnp.array([[1.0, 5.0], [2.0, 3.0]])).tolist()
      [0.0, 7.0]
    """
    weights, history = jnp.asarray(weights), jnp.asarray(history)
    want = (weights.shape[-1:] if weights.ndim else ()) + weights.shape[:-1]
    if weights.ndim not in (1, 2) or history.shape[: weights.ndim] != want:
        raise ValueError(
            f"weights: expected [K] or [G, K] for a history [K, ...] or [K, G, ...], "
            f"got weights {weights.shape} and history {history.shape}"
        )
    return _weighted_sum(weights, history, jnp.dtype(dtype or history.dtype))
