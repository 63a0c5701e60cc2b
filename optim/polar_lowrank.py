r"""The polar factor of a matrix of low rank, through a core as small as the rank.

With orthonormal rows ``Q_x`` and ``Q_d`` that span the row spaces of ``x`` and ``d``,

.. math:: x^T d = Q_x^T C Q_d, \quad C = (Q_x x^T)(d\, Q_d^T), \qquad
          \operatorname{polar}(x^T d) = Q_x^T \operatorname{polar}(C)\, Q_d,

and ``C`` has the singular values of the product, so the iteration on it is the same one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.checks import check_int
from fadex.optim.common import check_hyperparameter
from fadex.optim.kernels.newton_schulz import wide_dot
from fadex.optim.polar import polar_factor


def _scaled(x: jax.Array) -> jax.Array:
    """``x``, its largest entry 1, so that Gram matrices don't overflow."""
    peak = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    shrink = jnp.where(peak > 1, 2.0**-40, 1.0).astype(x.dtype)  # as in polar_factor
    peak = jnp.where(peak == 0, jnp.ones_like(peak), peak * shrink)
    return x * shrink / peak


def _orthonormal_rows(x: jax.Array, rcond: Any) -> jax.Array:
    """Rows ``[..., r, m]`` that are orthonormal or zero and span the row space of ``x``.

    Two passes over a Gram matrix, as in CholeskyQR2: the first by an eigendecomposition,
    which survives rank deficiency where Cholesky gives NaN; the second, on a Gram matrix
    near the identity, by Cholesky, which restores what the first lost to rounding.
    """
    values, vectors = jnp.linalg.eigh(wide_dot(x, x.mT))
    kept = values > rcond * values[..., -1:]
    root = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values, 1)), 0)
    rows = wide_dot((vectors * root[..., None, :]).mT, x)
    gram = wide_dot(rows, rows.mT)
    gram = jnp.where(jnp.eye(gram.shape[-1], dtype=bool) & ~kept[..., None, :], 1, gram)
    lower = jnp.linalg.cholesky(gram)
    return jax.lax.linalg.triangular_solve(lower, rows, left_side=True, lower=True)


def _check_factor(name: str, value: jax.Array) -> jax.Array:
    value = jnp.asarray(value)
    if value.ndim < 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected a real floating-point [..., rank, size], got shape "
            f"{value.shape} and dtype {value.dtype}"
        )
    return value


def _cutoff(rcond: Any, rank: int, dtype: Any) -> Any:
    if rcond is None:
        return rank * float(jnp.finfo(dtype).eps)
    check_hyperparameter("rcond", rcond, minimum=0, maximum=1, schedule=False)
    return rcond


def polar_lowrank(
    x: jax.Array,
    delta: jax.Array,
    *,
    rcond: Any = None,
    steps: int | None = None,
    coefficients: Any = "polar_express",
    method: str = "auto",
    dtype: Any = None,
) -> jax.Array:
    r"""The polar factor of ``x^T delta`` by an ``r x r`` iteration, exact above the cut-off.

    The gradient of a dense kernel is ``x^T delta`` with one row per example (and position):
    inputs ``x`` and back-propagated errors ``delta``. For ``r < min(m, n)`` the cost is that
    of ``r^2 (m + n)`` products and two ``r x r`` eigendecompositions instead of an iteration
    on ``m x n``. By request only: whether that pays depends on how fast the platform
    decomposes. With ``r >= min(m, n)`` the product is formed instead.

    Args:
      x: ``[..., r, m]``.
      delta: ``[..., r, n]``, the same leading axes.
      rcond: eigenvalues of ``x x^T`` (squared singular values of ``x``) below ``rcond``
        times the largest count as zero, likewise for ``delta``, and what is cut maps to
        zero; default ``r`` times the spacing of float32 (or float64), so singular values
        below about ``3e-4 sqrt(r)`` (or ``1.5e-8 sqrt(r)``) of the largest are cut.
      steps, coefficients, method, dtype: as for :func:`polar_factor`.

    Returns:
      ``[..., m, n]`` in the promoted dtype of the factors; zeros without rows.

    Raises:
      TypeError, ValueError: the factors do not fit together, or an argument of
        :func:`polar_factor` is wrong.

    Example:
      >>> x, delta = jnp.eye(2, 5), 3.0 * jnp.eye(2, 4)
      >>> u = polar_lowrank(x, delta)
      >>> bool(jnp.abs(u - jnp.zeros((5, 4)).at[:2, :2].set(jnp.eye(2))).max() < 5e-3)
      True

    A reconstruction: no source gives this form.
    """
    x, delta = _check_factor("x", x), _check_factor("delta", delta)
    if x.shape[:-1] != delta.shape[:-1]:
        raise ValueError(
            f"delta: expected shape {(*x.shape[:-1], 'n')} to fit x, got {delta.shape}"
        )
    rank, m, n = x.shape[-2], x.shape[-1], delta.shape[-1]
    options = dict(steps=steps, coefficients=coefficients, method=method, dtype=dtype)
    out = jnp.promote_types(x.dtype, delta.dtype)
    wide = jnp.promote_types(out, jnp.float32)
    cut = _cutoff(rcond, rank, wide)
    if 0 in x.shape + delta.shape:
        return jnp.zeros((*x.shape[:-2], m, n), out)
    x, delta = _scaled(x.astype(wide)), _scaled(delta.astype(wide))
    if rank >= min(m, n):
        return polar_factor(wide_dot(x.mT, delta), **options).astype(out)
    left, right = _orthonormal_rows(x, cut), _orthonormal_rows(delta, cut)
    core = wide_dot(wide_dot(left, x.mT), wide_dot(delta, right.mT))
    core = polar_factor(core, **options)
    return wide_dot(wide_dot(left.mT, core), right).astype(out)


def polar_range_sketch(
    g: jax.Array,
    key: jax.Array,
    rank: int,
    *,
    rcond: Any = None,
    steps: int | None = None,
    coefficients: Any = "polar_express",
    method: str = "auto",
    dtype: Any = None,
) -> jax.Array:
    r"""The polar factor of ``g`` on a random sketch of its range.

    ``Q`` is an orthonormal basis of :math:`g \Omega` for a Gaussian ``Omega`` ``[n, rank]``, and
    the result is :math:`Q \operatorname{polar}(Q^T g)`. Equal to the polar factor with
    probability 1 when ``rank`` is at least the rank of ``g``; else the polar factor of
    :math:`Q Q^T g`, which keeps mostly the large singular values. By request only, for
    ``rank`` well below ``min(m, n)``.

    Args:
      g: ``[..., m, n]``, real floating-point; leading axes are a batch.
      key: one PRNG key; the whole batch shares the sketch.
      rank: columns of the sketch, static, >= 1. Take a few more than the rank sought: a
        sketch of just that many is often so ill-conditioned that the weakest directions are
        cut. From ``min(m, n)`` on it is :func:`polar_factor`.
      rcond: as for :func:`polar_lowrank`, on ``(g Omega)^T (g Omega)``.
      steps, coefficients, method, dtype: as for :func:`polar_factor`.

    Returns:
      The shape and dtype of ``g``.

    Raises:
      TypeError, ValueError: ``g`` is no real matrix, or an argument is out of range.

    Example:
      >>> g = jnp.outer(jnp.arange(1.0, 7.0), jnp.ones(5))
      >>> u = polar_range_sketch(g, jax.random.key(0), rank=2)
      >>> bool(jnp.abs(u - g / jnp.linalg.norm(g)).max() < 5e-3)
      True

    Source: N. Halko, P.-G. Martinsson, J. A. Tropp, "Finding Structure with Randomness",
    https://arxiv.org/abs/0909.4061 (the range finder).
    """
    g = _check_factor("g", g)
    check_int("rank", rank, minimum=1)
    options = dict(steps=steps, coefficients=coefficients, method=method, dtype=dtype)
    wide = jnp.promote_types(g.dtype, jnp.float32)
    cut = _cutoff(rcond, rank, wide)
    if rank >= min(g.shape[-2:]) or g.size == 0:
        return polar_factor(g, **options)
    scaled = _scaled(g.astype(wide))
    omega = jax.random.normal(key, (g.shape[-1], rank), scaled.dtype)
    basis = _orthonormal_rows(wide_dot(scaled, omega).mT, cut)
    core = polar_factor(wide_dot(basis, scaled), **options)
    return wide_dot(basis.mT, core).astype(g.dtype)
