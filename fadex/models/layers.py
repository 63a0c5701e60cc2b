"""Layers that the transformers share: linear maps, embeddings, attention, modulation.

Letters: ``B`` batch, ``N`` tokens, ``D`` width, ``H`` heads. Kernels are stored
``[in, out]``. Parameters have ``param_dtype``; products run in ``dtype``; normalisation
statistics and the softmax run in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.quant.site import QuantizedSite, is_quantized, site_columns, site_matmul

Dtype = Any
Initializer = Callable[..., jax.Array]


class Linear(nnx.Module):
    """``x @ kernel + bias`` over the last axis.

    The kernel may be a :class:`fadex.quant.QuantizedArray` (or a site with an activation format),
    put there by :func:`fadex.quant.quantize` on the model's parameters: the product then runs on
    the packed codes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        kernel_init: Initializer = nnx.initializers.xavier_uniform(),
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        shape = (in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if use_bias else None
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        y = site_matmul(x.astype(self.dtype), self.kernel[...], dtype=self.dtype)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)

    def columns(self, x: jax.Array, start: int, stop: int) -> jax.Array:
        """The output columns ``start:stop`` alone, at their own cost."""
        kernel = site_columns(self.kernel[...], start, stop)
        y = site_matmul(x.astype(self.dtype), kernel, dtype=self.dtype)
        return y if self.bias is None else y + self.bias[..., start:stop].astype(self.dtype)


class Embed(nnx.Module):
    """Row look-up in a table ``[num, features]``, which may be quantized (its last axis cut into
    blocks, so that only the rows asked for are decoded)."""

    def __init__(
        self,
        num: int,
        features: int,
        *,
        stddev: float = 0.02,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(stddev)
        self.embedding = nnx.Param(init(rngs.params(), (num, features), param_dtype))
        self.dtype = dtype

    def __call__(self, index: jax.Array) -> jax.Array:
        table = self.embedding[...]
        table = table.weight if isinstance(table, QuantizedSite) else table
        rows = table.take(index) if is_quantized(table) else jnp.take(table, index, axis=0)
        return rows.astype(self.dtype)


def layer_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Layer norm over the last axis without scale and shift, statistics in float32."""
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    var = jnp.square(x32 - mean).mean(-1, keepdims=True)
    return ((x32 - mean) * jax.lax.rsqrt(var + eps)).astype(x.dtype)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """``x * (1 + scale) + shift`` with ``shift, scale`` ``[B, D]`` and ``x`` ``[B, N, D]``."""
    return x * (1 + scale[:, None]) + shift[:, None]


def frequency_embedding(t: jax.Array, features: int, max_period: float = 1e4) -> jax.Array:
    """Cosines then sines of ``t * max_period^(-i/half)``: ``[B] -> [B, features]`` in float32."""
    half = features // 2
    freqs = np.exp(-math.log(max_period) * np.arange(half) / half).astype(np.float32)
    angles = t.astype(jnp.float32)[:, None] * freqs
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def sincos_2d(height: int, width: int, features: int) -> np.ndarray:
    """Fixed 2-D position table ``[height * width, features]``, float32.

    The first half of the channels encodes the column index, the second half the row; each
    half is a block of sines followed by a block of cosines.
    """
    if features % 4:
        raise ValueError(f"features: a 2-D position table needs a multiple of 4, got {features}")
    quarter = features // 4
    omega = 1.0 / 1e4 ** (np.arange(quarter, dtype=np.float64) / quarter)

    def encode(position: np.ndarray) -> np.ndarray:
        angles = position.reshape(-1, 1) * omega
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    return np.concatenate([encode(columns), encode(rows)], axis=1).astype(np.float32)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of ``[B, N, H, Dh]`` each; float16 in float32, which CPUs have no product
    for (XLA refuses it under ``jit``)."""
    dtype = q.dtype
    if dtype == jnp.float16:
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask).astype(dtype)


class Attention(nnx.Module):
    """Multi-head self-attention ``[B, N, D] -> [B, N, D]`` with one fused qkv projection."""

    def __init__(self, width: int, num_heads: int, *, dtype: Dtype, param_dtype: Dtype,
                 rngs: nnx.Rngs):
        kwargs = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width, **kwargs)
        self.proj = Linear(width, width, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        return self.proj(attend(q, k, v).reshape(batch, tokens, width))


class Mlp(nnx.Module):
    """Two linear maps with a tanh-approximated GELU between them."""

    def __init__(self, width: int, hidden: int, *, dtype: Dtype, param_dtype: Dtype,
                 rngs: nnx.Rngs):
        kwargs = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.fc1 = Linear(width, hidden, **kwargs)
        self.fc2 = Linear(hidden, width, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=True))


class TimestepEmbedding(nnx.Module):
    """Sinusoidal frequencies of ``t`` through a two-layer MLP: ``[B] -> [B, D]``."""

    def __init__(self, width: int, *, frequencies: int = 256, max_period: float = 1e4,
                 dtype: Dtype, param_dtype: Dtype, rngs: nnx.Rngs):
        self.max_period = max_period
        init = nnx.initializers.normal(0.02)
        kwargs = dict(kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.frequencies = frequencies
        self.fc1 = Linear(frequencies, width, **kwargs)
        self.fc2 = Linear(width, width, **kwargs)

    def __call__(self, t: jax.Array) -> jax.Array:
        features = frequency_embedding(t, self.frequencies, self.max_period)
        return self.fc2(jax.nn.silu(self.fc1(features)))


class RMSNorm(nnx.Module):
    r"""Root mean square norm with a learned scale: ``x / sqrt(mean(x^2) + eps) * scale``."""

    def __init__(self, features: int, *, eps: float = 1e-6, dtype: Dtype, param_dtype: Dtype):
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        return x32.astype(self.dtype) * self.scale[...].astype(self.dtype)


class VectorEmbedding(nnx.Module):
    """Two linear maps with a SiLU between them, for one vector a sample: ``[B, F] -> [B, D]``."""

    def __init__(self, features: int, width: int, *, dtype: Dtype, param_dtype: Dtype,
                 rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        kwargs = dict(kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.fc1 = Linear(features, width, **kwargs)
        self.fc2 = Linear(width, width, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.silu(self.fc1(x)))
