r"""The polar factor of a matrix by Newton-Schulz iteration: the spectral norm's direction.

For ``g = U diag(s) V^T`` the polar factor is ``U V^T``: every nonzero singular value becomes 1.
With :math:`X_0 = g / \|g\|_F`, on the short side,

.. math:: A = X X^T, \qquad X \leftarrow a X + (b A + c A^2) X,

which acts on each singular value as ``a x + b x^3 + c x^5``. The Gram form runs the same
recursion on the small square matrix alone (:math:`X_k = Q_k X_0, R_k = X_k X_k^T`):

.. math:: W = a I + b R + c R^2, \qquad Q \leftarrow W Q, \qquad R \leftarrow W R W .
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice
from fadex.optim.common import check_hyperparameter
from fadex.optim.newton_schulz_coefficients import resolve_coefficients

METHODS = ("auto", "xla", "pallas", "gram", "svd")
_GRAM_RATIO = 8
_GRAM_RESTART = 3


def _precision(dtype: Any) -> Any:
    # Accelerators multiply float32 in fewer bits unless asked; 16-bit types are exact inputs.
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def _matmul(left: jax.Array, right: jax.Array, spec: str, dtype: Any = None) -> jax.Array:
    """Batched product, accumulated in at least float32; in ``dtype`` or that of ``left``."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    out = jnp.einsum(
        spec, left, right, precision=_precision(left.dtype), preferred_element_type=wide
    )
    return out.astype(dtype or left.dtype)


def _normalized(g: jax.Array, eps: Any) -> jax.Array:
    """``g / (||g||_F + eps)`` over the last two axes, in float32 or wider, at any scale.

    Dividing by the largest entry first keeps the squares from overflowing or vanishing.
    """
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    peak = jnp.max(jnp.abs(g), axis=(-2, -1), keepdims=True)
    peak = jnp.where(peak == 0, jnp.ones_like(peak), peak)
    g = g / jax.lax.stop_gradient(peak)
    square = jnp.sum(g * g, axis=(-2, -1), keepdims=True)
    # 1 inside the root and infinity after it: a zero matrix and its derivative map to 0.
    norm = jnp.sqrt(jnp.where(square == 0, jnp.ones_like(square), square))
    norm = jnp.where(square == 0, jnp.full_like(norm, jnp.inf), norm)
    return g / (norm if eps is None else norm + eps / peak)


def newton_schulz_reference(x: jax.Array, coefficients: Any) -> jax.Array:
    """The plain iteration on ``x`` ``[B, m, n]``, ``m <= n``, singular values <= 1."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    for a, b, c in coefficients:
        gram = _matmul(x, x, "bmk,bnk->bmn")
        poly = b * gram.astype(wide) + c * _matmul(gram, gram, "bmk,bkn->bmn").astype(wide)
        out = a * x.astype(wide) + _matmul(poly.astype(x.dtype), x, "bmk,bkn->bmn").astype(wide)
        x = out.astype(x.dtype)
    return x


def _newton_schulz_gram(x: jax.Array, coefficients: Any) -> jax.Array:
    """The iteration on Gram matrices, restarted once so that rounding doesn't accumulate.

    The ``m x m`` recursion runs in float32 even for 16-bit ``x``: in bfloat16 the recursion
    on ``R`` is unstable (measured: diverges at condition number 100).
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    eye = jnp.eye(x.shape[-2], dtype=wide)
    product = "bmk,bkn->bmn"
    gram, total = _matmul(x, x, "bmk,bnk->bmn", wide), None
    for step, (a, b, c) in enumerate(coefficients):
        if step == _GRAM_RESTART:
            x, total = _matmul(total.astype(x.dtype), x, product), None
            gram = _matmul(x, x, "bmk,bnk->bmn", wide)
        w = (a * eye + b * gram + c * _matmul(gram, gram, product)).astype(wide)
        total = w if total is None else _matmul(w, total, product)
        if step + 1 < len(coefficients):
            gram = _matmul(_matmul(w, gram, product), w, product)
            gram = (gram + gram.mT) / 2
    return _matmul(total.astype(x.dtype), x, product)


def _svd_polar(x: jax.Array) -> jax.Array:
    """``U V^T`` by the singular value decomposition, on the numerical range only."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    cut = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
    kept = (s > cut * s[..., :1]).astype(x.dtype)
    # A NaN matrix has NaN factors; 0 * NaN would be right but a cut of NaN compares False.
    kept = jnp.where(jnp.isnan(s), s, kept)
    return _matmul(u * kept[..., None, :], vt, "bmk,bkn->bmn")


def _canonical(shape: tuple[int, ...], dims: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The axis order ``batch + rows + columns`` and the sizes of the two matrix sides."""
    rank = len(shape)
    if dims is None:
        if rank < 2:
            raise ValueError(f"g: expected a matrix [..., m, n], got shape {shape}")
        return tuple(range(rank)), (shape[-2], shape[-1])
    groups = []
    for name in ("reduction_axis", "output_axis"):
        axes = getattr(dims, name, None)
        axes = (axes,) if isinstance(axes, int) else axes
        if axes is None or not all(isinstance(i, int) and -rank <= i < rank for i in axes):
            raise ValueError(
                f"dims: expected MuonDimensionNumbers with axes of shape {shape}, got {dims!r}"
            )
        groups.append(tuple(i % rank for i in axes))
    rows, columns = groups
    if len(set(rows + columns)) != len(rows + columns) or not rows or not columns:
        raise ValueError(f"dims: the axes must be distinct and not empty, got {dims!r}")
    batch = tuple(i for i in range(rank) if i not in rows + columns)
    size = lambda axes: math.prod(shape[i] for i in axes)
    return batch + rows + columns, (size(rows), size(columns))


def polar_factor(
    g: jax.Array,
    *,
    steps: int | None = None,
    coefficients: Any = "polar_express",
    method: str = "auto",
    dtype: Any = None,
    eps: Any = None,
    dims: Any = None,
) -> jax.Array:
    r"""The polar factor :math:`U V^T` of ``g = U diag(s) V^T``, by Newton-Schulz iteration.

    Args:
      g: ``[..., m, n]`` real floating-point, any scale; leading axes are a batch. A zero
        matrix maps to zero, NaN or infinity to NaN, a single row or column to ``g / ||g||``
        exactly, an empty array to itself.
      steps: number of iterations; static. ``None``: 6 for polar express, 5 for ``"muon"`` and
        ``"dion"``, the number of rows for an array. Past a table's end (15/8, -10/8, 3/8).
      coefficients: ``"polar_express"``, ``"muon"``, ``"dion"``, or an array ``[k, 3]``.
      method: ``"xla"``: plain iteration; ``"pallas"``: kernels on TPU and CUDA; ``"gram"``:
        iteration on Gram matrices; ``"svd"``: exact, slow; ``"auto"``: ``"gram"`` where the
        long side is at least 8 times the short one, else kernels where they exist.
      dtype: dtype of the iteration (products accumulate in float32); default that of ``g``.
      eps: added to the Frobenius norm, in the units of ``g``; default none.
      dims: ``optax.contrib.MuonDimensionNumbers``: which axes are the rows (reduction) and
        the columns (output); the others are a batch. Default: the last two.

    Returns:
      The shape and dtype of ``g``.

    Raises:
      TypeError, ValueError: a bad argument, at trace time.

    Example:
      >>> u = polar_factor(jnp.array([[3.0, 0.0], [0.0, 1e-1]]))
      >>> bool(jnp.abs(u - jnp.eye(2)).max() < 5e-3)
      True
    """
    g = jnp.asarray(g)
    if not jnp.issubdtype(g.dtype, jnp.floating):
        raise ValueError(f"g: expected a real floating-point array, got dtype {g.dtype}")
    check_choice("method", method, METHODS)
    if eps is not None:
        check_hyperparameter("eps", eps, minimum=0, schedule=False)
    table = resolve_coefficients(coefficients, steps)
    order, (m, n) = _canonical(g.shape, dims)
    if g.size == 0:
        return g
    moved = g.transpose(order)
    x = _normalized(moved.reshape(-1, m, n), eps)
    compute = jnp.dtype(g.dtype if dtype is None else dtype)
    if min(m, n) > 1:
        tall = m > n
        x = x.mT if tall else x
        short, long = min(m, n), max(m, n)
        if method == "svd":
            x = _svd_polar(x)
        else:
            x = x.astype(compute)
            if method == "auto":
                method = "gram" if long >= _GRAM_RATIO * short else "xla"
            form = _newton_schulz_gram if method == "gram" else newton_schulz_reference
            x = form(x, table)
        x = x.mT if tall else x
    x = x.astype(g.dtype).reshape(moved.shape)
    return x.transpose([order.index(i) for i in range(g.ndim)])
