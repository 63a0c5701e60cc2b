r"""The two constants of the momentum rule, measured: ``R^2`` and the largest eigenvalue.

Near interpolation the Hessian of a mean loss is its Gauss-Newton matrix

.. math:: H = \frac1m \sum_i H_i, \qquad H_i = G_i^\top G_i, \qquad G_i = W_i^{1/2} J_i

with :math:`J_i` the Jacobian of the ``K`` outputs of example ``i`` by the parameters and
:math:`W_i` the loss's Hessian by the outputs: rows :math:`a = J` for squared loss, and
:math:`\sqrt{p_k}\,\nabla\log p_k` for cross-entropy (the Fisher matrix). The momentum rule needs

.. math:: \lambda_{\max}(H) \qquad\text{and}\qquad
   R^2 = \min\{r : \mathbb E[H_i^2] \preceq r H\},

for one row ``a`` per example the condition :math:`\mathbb E[\|a\|^2 aa^\top] \preceq R^2 H`. Stack
all rows of the sample in ``A`` and let ``D`` hold the blocks :math:`G_i G_i^\top`. With
:math:`A = U\Sigma V^\top`, the pencil's largest eigenvalue is that of :math:`U^\top D U`, and all
that is needed of the parameters is the Gram matrix :math:`A A^\top` (the tangent kernel).

When the rows are linearly independent, as in an over-parametrised network, ``U`` is square and
``R^2`` is the largest block norm: the safe bound :math:`\max_i \|G_i\|^2` is then exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice, check_int, check_leading_axis, check_shape

_METHODS = ("exact", "max", "gaussian")
_LOSSES = ("squared", "cross_entropy")


class Curvature(NamedTuple):
    """What the momentum rule wants to know about a problem."""

    row_norm_bound: jax.Array  # [], R^2
    lmax: jax.Array  # [], largest eigenvalue of H
    trace: jax.Array  # [], trace of H


def row_norm_bound(
    rows: jax.Array, probabilities: jax.Array | None = None, *, method: str = "exact"
) -> jax.Array:
    r"""``R^2`` of least-squares rows: least with :math:`\mathbb E[\|a\|^2aa^\top] \preceq R^2 H`.

    Args:
      rows: ``[m, d]``. ``"exact"`` takes one thin singular value decomposition.
      probabilities: ``[m]``, adding up to 1; uniform by default.
      method: ``"exact"``: the pencil's largest eigenvalue, over these rows; ``"max"``: the upper
        bound ``max |a_i|^2`` over rows of positive probability; ``"gaussian"``: ``trace(H) + 2
        lmax``, exact for Gaussian rows in the limit of many.

    Returns:
      A scalar in units of curvature.

    Raises:
      ValueError: wrong shapes or an unknown ``method``.

    Source: the definition; the reduction to the left singular vectors is ours.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import row_norm_bound
      >>> rows = jnp.array([[3.0, 4.0], [0.6, 0.8], [1.0, 0.0]])
      >>> for method in ("exact", "max", "gaussian"):
      ...     print(method, f"{row_norm_bound(rows, method=method):.2f}")
      exact 24.08
      max 25.00
      gaussian 26.58
    """
    check_choice("method", method, _METHODS)
    rows = jnp.asarray(rows, jnp.result_type(float))
    check_shape("rows", rows, (None, None))
    if 0 in rows.shape:
        raise ValueError(f"rows: expected at least one row and column, got shape {rows.shape}")
    if probabilities is None:
        probabilities = jnp.full(rows.shape[0], 1 / rows.shape[0], rows.dtype)
    probabilities = jnp.asarray(probabilities, rows.dtype)
    check_shape("probabilities", probabilities, (rows.shape[0],))
    norms = jnp.sum(rows**2, axis=1)
    if method == "max":
        return jnp.max(jnp.where(probabilities > 0, norms, 0))
    u, s, _ = jnp.linalg.svd(rows * jnp.sqrt(probabilities)[:, None], full_matrices=False)
    if method == "gaussian":
        return jnp.sum(s**2) + 2 * s[0] ** 2
    u = u * (s > max(rows.shape) * jnp.finfo(rows.dtype).eps * s[0])
    return jnp.linalg.eigvalsh((u.T * norms) @ u)[-1]


def curvature_from_rows(rows: Any, *, method: str = "max") -> Curvature:
    r"""``R^2``, largest eigenvalue and trace of ``H`` from the rows of a sample of examples.

    The rows are a tree in the shape of the parameters, as :func:`gauss_newton_rows` and
    :func:`gradient_rows` make them. The cost is a Gram matrix of ``m K`` rows and its eigenvalues.
    From ``m`` examples ``lmax`` is overestimated, by about ``trace/m``: the safe side.

    Args:
      rows: tree with leaves ``[m, K, ...]``: ``K`` rows of each of ``m`` examples.
      method: ``"max"``: :math:`R^2 = \max_i \lambda_{\max}(G_iG_i^\top)`, safe for the sample and
        exact where its rows are linearly independent; ``"exact"``: the pencil's eigenvalue over
        the sample, for more examples than parameters; ``"gaussian"``: ``trace + 2 lmax``, what a
        typical example contributes, for data without outliers.

    Returns:
      A :class:`Curvature` of float32 scalars (or wider).

    Raises:
      ValueError: leaves of different sizes, without two leading axes, or an unknown ``method``.

    Source: a reconstruction, see the module.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import curvature_from_rows, interpolation_momentum
      >>> rows = {"w": jnp.array([[[3.0, 4.0]], [[0.6, 0.8]], [[1.0, 0.0]]])}  # m = 3, K = 1
      >>> found = curvature_from_rows(rows)
      >>> print(f"{found.row_norm_bound:.1f} {found.lmax:.2f} {found.trace:.2f}")
      25.0 8.79 9.00
      >>> momentum = interpolation_momentum(32, found.row_norm_bound, found.lmax)
    """
    check_choice("method", method, _METHODS)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(rows)]
    if not leaves or any(leaf.ndim < 2 for leaf in leaves):
        raise ValueError("rows: expected a tree with leaves of shape [m, K, ...], got "
                         f"{jax.tree.map(jnp.shape, rows)}")
    m, k = leaves[0].shape[:2]
    if m * k == 0:
        raise ValueError(f"rows: expected at least one row, got leaves of shape [{m}, {k}, ...]")
    for leaf in leaves:
        if leaf.shape[:2] != (m, k):
            raise ValueError(f"rows: expected leaves of shape [{m}, {k}, ...], got {leaf.shape}")

    def products(leaf):
        flat = leaf.reshape(m * k, -1)
        flat = flat.astype(jnp.promote_types(flat.dtype, jnp.float32))
        return jnp.matmul(flat, flat.T, precision=jax.lax.Precision.HIGHEST)

    gram = sum(products(leaf) for leaf in leaves)
    values, vectors = jnp.linalg.eigh(gram)
    lmax, trace = values[-1] / m, jnp.trace(gram) / m
    if method == "gaussian":
        return Curvature(trace + 2 * lmax, lmax, trace)
    # The blocks G_i G_i^T on the diagonal of the Gram matrix: [m, K, K].
    blocks = jnp.einsum("iaib->iab", gram.reshape(m, k, m, k))
    if method == "max":
        return Curvature(jnp.max(jnp.linalg.eigvalsh(blocks)), lmax, trace)
    vectors = vectors * (values > m * k * jnp.finfo(values.dtype).eps * values[-1])
    grouped = vectors.reshape(m, k, m * k)
    pencil = jnp.einsum("iax,iab,iby->xy", grouped, blocks, grouped,
                        precision=jax.lax.Precision.HIGHEST)
    return Curvature(jnp.linalg.eigvalsh(pencil)[-1], lmax, trace)


def _examples(name: str, tree: Any) -> int:
    """The number of examples: the length of every leaf's first axis, >= 1."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    if not shapes or () in shapes or 0 in [shape[0] for shape in shapes]:
        raise ValueError(f"{name}: expected leaves of shape [m, ...] for m >= 1 examples, got "
                         f"{jax.tree.map(jnp.shape, tree)}")
    check_leading_axis(name, tree, shapes[0][0])
    return shapes[0][0]


def gauss_newton_rows(
    apply: Callable[[Any, Any], jax.Array],
    params: Any,
    inputs: Any,
    *,
    loss: str = "squared",
    key: jax.Array | None = None,
    num_samples: int | None = None,
) -> Any:
    r"""Rows of the Gauss-Newton matrix, example by example, for a network.

    .. math:: \text{squared, } \ell = \tfrac12\|f - y\|^2:\; a_{ik} = \nabla f_k(x_i) \qquad
       \text{cross-entropy}:\; a_{ik} = \sqrt{p_k}\,\nabla \log p_k(x_i)

    so :math:`\frac1m \sum_{ik} a_{ik}a_{ik}^\top = H`. All ``K`` rows take ``K`` backward passes an
    example; with ``num_samples = S`` it is ``S`` random ones (Rademacher mixtures of outputs, or
    labels drawn from the model: the Fisher matrix), whose ``H`` is right on average and whose
    :math:`\mathbb E[H_i^2]` is never below the true one on average (Jensen), so ``R^2`` errs to the
    safe side, by up to the number of outputs that matter for ``S = 1``.

    Args:
      apply: ``apply(params, x) -> [K]`` or a scalar, for one example; for cross-entropy the
        logits.
      params: the network's parameters.
      inputs: tree with leaves ``[m, ...]``.
      loss: ``"squared"`` or ``"cross_entropy"``. For squared loss averaged over outputs divide
        the outputs by ``sqrt(K)``.
      key: for the random rows.
      num_samples: ``S``; all rows by default.

    Returns:
      A tree like ``params`` with leaves ``[m, K, ...]`` or ``[m, S, ...]``.

    Raises:
      ValueError: an unknown ``loss``, ``num_samples`` without ``key``, or inputs that disagree in
        their first axis.

    Source: Schraudolph 2002 for the Gauss-Newton matrix; its use for ``R^2`` is ours.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import curvature_from_rows, gauss_newton_rows
      >>> rows = gauss_newton_rows(jnp.dot, jnp.zeros(2), jnp.array([[3.0, 4.0], [1.0, 0.0]]))
      >>> rows.shape, float(curvature_from_rows(rows).row_norm_bound)
      ((2, 1, 2), 25.0)
    """
    check_choice("loss", loss, _LOSSES)
    if num_samples is not None:
        check_int("num_samples", num_samples, minimum=1)
        if key is None:
            raise ValueError(f"key: required to draw num_samples = {num_samples} rows, got None")
    m = _examples("inputs", inputs)

    def one(x, key):
        outputs = jnp.atleast_1d(apply(params, x))
        if loss == "cross_entropy":
            root = jnp.sqrt(jax.nn.softmax(outputs))
        if num_samples is None:
            def scalars(p):
                out = jnp.atleast_1d(apply(p, x))
                return out if loss == "squared" else root * jax.nn.log_softmax(out)
        else:
            if loss == "squared":
                drawn = jax.random.rademacher(key, (num_samples, outputs.size), outputs.dtype)
            else:
                drawn = jax.random.categorical(key, outputs, shape=(num_samples,))

            def scalars(p):
                out = jnp.atleast_1d(apply(p, x))
                found = drawn @ out if loss == "squared" else jax.nn.log_softmax(out)[drawn]
                return found / jnp.sqrt(num_samples).astype(out.dtype)

        return jax.jacrev(scalars)(params)

    keys = None if num_samples is None else jax.random.split(key, m)
    return jax.vmap(one, in_axes=(0, None if keys is None else 0))(inputs, keys)


def gradient_rows(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, *, micro_batch: int = 1
) -> Any:
    r"""Rows from gradients alone: :math:`a_i = \nabla\ell_i / \sqrt{2\ell_i} =
    \nabla\sqrt{2\ell_i}`.

    A loss with minimum zero is half the square of the residual :math:`\sqrt{2\ell}`. For one
    squared residual an example these are the true rows. For several outputs it is the one
    direction in which the residual points, and for cross-entropy near interpolation half of the
    curvature: an estimate, from a backward pass an example and no access to the outputs.
    ``|a_i|^2 = |grad|^2/(2 loss)`` is the reciprocal of a Polyak step.

    Args:
      loss: ``loss(params, example) -> scalar >= 0``.
      params: where the gradients are taken, near the end of training for preference.
      batch: tree with leaves ``[m, ...]``, one example (or micro-batch) each.
      micro_batch: examples averaged in each ``loss`` value, ``b``. The rows are scaled by
        ``sqrt(b)``: right on average for residuals that are uncorrelated among examples, too long
        for correlated ones.

    Returns:
      A tree like ``params`` with leaves ``[m, 1, ...]`` for :func:`curvature_from_rows`. A loss of
      zero gives a row of zeros.

    Raises:
      ValueError, TypeError: ``micro_batch`` is no positive integer, or leaves of ``batch`` disagree
        in their first axis.

    Source: a reconstruction, see the module.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import gradient_rows
      >>> rows = gradient_rows(lambda p, x: (p @ x - 1) ** 2 / 2, jnp.ones(2) / 2, 3 * jnp.eye(2))
      >>> print(rows[:, 0])
      [[3. 0.]
       [0. 3.]]
    """
    check_int("micro_batch", micro_batch, minimum=1)
    _examples("batch", batch)

    def one(example):
        value, gradient = jax.value_and_grad(loss)(params, example)
        fits = value <= 0
        scale = jnp.where(fits, 0, jnp.sqrt(micro_batch / (2 * jnp.where(fits, 1, value))))
        return jax.tree.map(lambda g: (g * scale.astype(g.dtype))[None], gradient)

    return jax.vmap(one)(batch)


def hessian_vector_product(
    loss: Callable[[Any], jax.Array], params: Any
) -> Callable[[Any], Any]:
    """``v -> H v`` for the Hessian of ``loss`` at ``params``, by a forward over a backward pass.

    Args:
      loss: ``loss(params) -> scalar``; differentiable twice.
      params: where the Hessian is taken.

    Returns:
      A linear function of trees like ``params``.

    Source: Pearlmutter 1994.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import hessian_vector_product
      >>> print(hessian_vector_product(lambda x: jnp.sum(x**3), jnp.array([1.0, 2.0]))(jnp.ones(2)))
      [ 6. 12.]
    """
    return lambda v: jax.jvp(jax.grad(loss), (params,), (v,))[1]


def _wide(x):
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _dot(a, b):
    """Inner product over all leaves, in float32 or wider."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum(_wide(x) * _wide(y)) for x, y in pairs)


def _rescaled(tree):
    """``tree / top`` in float32 or wider, and ``top``, its largest modulus (1 where that is 0)."""
    leaves = [jnp.max(jnp.abs(_wide(x))) for x in jax.tree.leaves(tree) if jnp.size(x)]
    top = functools.reduce(jnp.maximum, leaves, jnp.zeros((), jnp.float32))
    # Not > 0: a NaN stays one.
    top = jnp.where(top == 0, 1, top)
    # In two halves: for subnormal numbers the reciprocal would overflow.
    root = jnp.sqrt(top)
    return jax.tree.map(lambda x: _wide(x) / root / root, tree), top


def _random_like(draw, key, like):
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([
        draw(k, jnp.shape(x), jnp.result_type(x)) for k, x in zip(keys, leaves)
    ])


def lambda_max(
    product: Callable[[Any], Any], like: Any, key: jax.Array, *, num_steps: int = 20
) -> jax.Array:
    r"""Eigenvalue of largest size of a symmetric operator, by power iteration.

    .. math:: v \leftarrow \frac{Hv}{\|Hv\|}, \qquad \lambda = v^\top H v

    For a positive semidefinite ``H`` the value is never above ``lambda_max``, and below it by a
    relative error of about :math:`\ln d/(2\,\text{num\_steps})` at worst. An indefinite ``H``
    gives the end of the spectrum that is larger in size, with its sign.

    Args:
      product: ``v -> H v`` on trees like ``like``; see :func:`hessian_vector_product`.
      like: a tree of arrays, for its shapes and dtypes.
      key: for the start.
      num_steps: products with ``H``, after which one more gives the value.

    Returns:
      A scalar.

    Raises:
      ValueError, TypeError: ``num_steps`` is no positive integer.

    Source: von Mises 1929; the error after a random start is that of Kuczynski and Wozniakowski
    1992.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import lambda_max
      >>> H = jnp.diag(jnp.array([3.0, 1.0, 0.5]))
      >>> print(f"{lambda_max(lambda v: H @ v, jnp.zeros(3), jax.random.key(0)):.4f}")
      3.0000
    """
    check_int("num_steps", num_steps, minimum=1)

    def unit(v):
        # No square over- or underflows, whatever the units of the loss.
        scaled, _ = _rescaled(v)
        norm = jnp.sqrt(_dot(scaled, scaled))
        norm = jnp.where(norm == 0, 1, norm)
        return jax.tree.map(lambda x, y: (y / norm).astype(x.dtype), v, scaled)

    def step(v, _):
        return unit(product(v)), None

    start = unit(_random_like(jax.random.normal, key, like))
    v, _ = jax.lax.scan(step, start, length=num_steps)
    scaled, top = _rescaled(product(v))
    return top * _dot(v, scaled)


def hutchinson_trace(
    product: Callable[[Any], Any], like: Any, key: jax.Array, *, num_samples: int = 8
) -> jax.Array:
    r"""Trace of a symmetric operator: the mean of :math:`v^\top H v` over random signs ``v``.

    The variance is :math:`2\,(\|H\|_F^2 - \sum_i H_{ii}^2)/\text{num\_samples}`.

    Args:
      product: ``v -> H v`` on trees like ``like``.
      like: a tree of arrays, for its shapes and dtypes.
      key: for the signs.
      num_samples: products with ``H``.

    Returns:
      A scalar.

    Raises:
      ValueError, TypeError: ``num_samples`` is no positive integer.

    Source: Hutchinson 1990.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import hutchinson_trace
      >>> H = jnp.diag(jnp.array([3.0, 1.0, 0.5]))
      >>> print(hutchinson_trace(lambda v: H @ v, jnp.zeros(3), jax.random.key(0)))
      4.5
    """
    check_int("num_samples", num_samples, minimum=1)

    def one(key):
        v = _random_like(jax.random.rademacher, key, like)
        return _dot(v, product(v))

    return jnp.mean(jax.lax.map(one, jax.random.split(key, num_samples)))
