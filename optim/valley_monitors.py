r"""What tells a river valley while training: sharpness, oscillation, progress along the river.

Hessians are never formed: everything goes through products :math:`H v`, each of which costs
about two gradients.

The steps here are textbook methods (power iteration; Lanczos with full reorthogonalization).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_int
from fadex.optim.common import at, check_leaves, zeros_in_state
from fadex.optim.curvature import hessian_vector_product, lambda_max
from fadex.optim.river import check_decay

Loss = Callable[[Any], jax.Array]


def _leaves(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.size]


def _work_dtype(leaf: jax.Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _dot(a: Any, b: Any) -> jax.Array:
    """Inner product over all leaves, in float32 or better."""
    total = jnp.zeros((), jnp.float32)
    for x, y in zip(_leaves(a), _leaves(b), strict=True):
        dtype = _work_dtype(x)
        total = total + jnp.sum(x.astype(dtype) * y.astype(dtype))
    return total


def _rescaled(tree: Any) -> tuple[Any, jax.Array]:
    """``tree / m`` and ``m``, its largest modulus (1 where that is 0 or not finite)."""
    top = jnp.zeros((), jnp.float32)
    for leaf in _leaves(tree):
        top = jnp.maximum(top, jnp.max(jnp.abs(leaf)).astype(_work_dtype(leaf)))
    top = jnp.where((top > 0) & jnp.isfinite(top), top, 1.0)
    return jax.tree.map(lambda x: x.astype(_work_dtype(x)) / top, tree), top


def safe_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves: no square under- or overflows, NaN stays NaN."""
    scaled, top = _rescaled(tree)
    return top * jnp.sqrt(_dot(scaled, scaled))


def oscillation_index(gradient: Any, previous: Any) -> jax.Array:
    r"""Minus the cosine between two successive gradients.

    .. math:: -\frac{\langle g_t, g_{t-1} \rangle}{\|g_t\| \|g_{t-1}\|} \in [-1, 1],

    summed over all leaves. Near 1 the steps bounce between the hill sides, near -1 they follow
    the river, near 0 noise rules (or heavy ball at half its edge of stability).

    Args:
      gradient, previous: equal pytrees of real arrays.

    Returns:
      float32 ``[]`` (float64 for float64 leaves); 0 where a gradient is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import oscillation_index
      >>> print(oscillation_index(jnp.array([3.0, 4.0]), jnp.array([-3.0, 4.0])))
      -0.28
    """
    a, b = _rescaled(gradient)[0], _rescaled(previous)[0]
    size = jnp.sqrt(_dot(a, a)) * jnp.sqrt(_dot(b, b))
    # `size == 0`, not `size > 0`: a NaN must come through
    zero = size == 0
    return jnp.where(zero, 0.0, -_dot(a, b) / jnp.where(zero, 1.0, size))


class OscillationState(NamedTuple):
    """State of :func:`oscillation_monitor`."""

    count: jax.Array  # int32 []: gradients seen
    previous_gradient: Any  # like the gradients
    oscillation_index: jax.Array  # float32 []: running mean, 0 before the second gradient


def oscillation_monitor(decay: Any = 0.9) -> optax.GradientTransformationExtraArgs:
    r"""Passes gradients on and keeps a running mean of their :func:`oscillation_index`.

    .. math:: o_t = o_{t-1} + \frac{1 - d}{1 - d^{t}} (i_t - o_{t-1})

    with :math:`i_t` the index of the gradients :math:`t` and :math:`t - 1`: the exponential
    average without bias towards its start. Put it first in a chain. Above 0.5 the hill sides rule
    the gradient: raise the momentum's decay (:func:`~fadex.optim.suggest`) rather than lower the
    learning rate.

    Args:
      decay: :math:`d` in [0, 1): a number, an array or a schedule.

    Returns:
      ``optax.GradientTransformationExtraArgs``; the mean is read by
      ``optax.tree.get(state, "oscillation_index")``. It holds one copy of the gradient.

    Raises:
      ValueError: ``decay`` outside [0, 1).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fadex.optim import heavy_ball, oscillation_monitor
      >>> opt = optax.chain(oscillation_monitor(), heavy_ball(0.1, 0.9))
      >>> params = jnp.ones(2)
      >>> state = opt.init(params)
      >>> for sign in (1, -1, 1):
      ...     _, state = opt.update(sign * params, state, params)
      >>> print(f'{optax.tree.get(state, "oscillation_index"):.2f}')
      1.00
    """
    check_decay("decay", decay)

    def init_fn(params: Any) -> OscillationState:
        check_leaves("params", params)
        return OscillationState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(lambda p: zeros_in_state(p, jnp.result_type(p)), params),
            jnp.zeros((), jnp.float32),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        pairs = state.count.astype(jnp.float32)  # this one included
        gradient = jax.tree.map(jnp.asarray, updates)
        now = oscillation_index(gradient, state.previous_gradient).astype(jnp.float32)
        d = jnp.asarray(at(decay, state.count), jnp.float32)
        weight = (1 - d) / (1 - d ** jnp.maximum(pairs, 1.0))
        mean = state.oscillation_index
        mean = jnp.where(pairs == 0, mean, mean + weight * (now - mean))
        previous = jax.tree.map(
            lambda g, p: g.astype(p.dtype), gradient, state.previous_gradient
        )
        count = optax.safe_increment(state.count)
        return updates, OscillationState(count, previous, mean)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _hessian_product(loss: Loss, params: Any) -> Callable[[Any], Any]:
    """``v -> H v`` in float32 or better, through products in the dtype of ``params``."""
    exact = hessian_vector_product(loss, params)

    def product(v: Any) -> Any:
        tangent = jax.tree.map(lambda x, p: x.astype(p.dtype), v, params)
        return jax.tree.map(lambda x: x.astype(_work_dtype(x)), exact(tangent))

    return product


def _random_like(key: jax.Array, params: Any) -> Any:
    """A random direction; uniform entries, which are cheaper than normal ones, will do."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, max(len(leaves), 1))
    return jax.tree.unflatten(treedef, [
        jax.random.uniform(k, p.shape, _work_dtype(p), -1.0) for k, p in zip(keys, leaves)
    ])


def _unit(tree: Any) -> tuple[Any, jax.Array]:
    """``tree`` (of order 1) over its norm, and the norm; a zero tree stays zero."""
    norm = jnp.sqrt(_dot(tree, tree))
    return jax.tree.map(lambda x: x / jnp.where(norm == 0, 1.0, norm).astype(x.dtype), tree), norm


def sharpness(loss: Loss, params: Any, key: jax.Array, iters: int = 20) -> jax.Array:
    r"""Largest curvature of a loss, by power iteration on Hessian products.

    :func:`~fadex.optim.lambda_max` of the Hessian, with the vectors in float32 or better: the
    eigenvalue of largest modulus, with its sign. The relative error falls like
    :math:`(\lambda_2 / \lambda_1)^{2 \cdot \mathrm{iters}}`; where the two largest lie close
    together, or negative curvature is strong, use :func:`top_hessian`, which takes as many
    products and is never worse.

    Args:
      loss: ``params -> []``, twice differentiable.
      params: pytree of real arrays.
      key: draws the start.
      iters: products :math:`H v` before the last. Static.

    Returns:
      ``[]``; loss / length^2.

    Raises:
      TypeError, ValueError: ``iters`` not an integer >= 1, or params that are not real.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import sharpness
      >>> loss = lambda x: 0.5 * jnp.sum(jnp.array([100.0, 10.0, 1.0]) * x**2)
      >>> print(f"{sharpness(loss, jnp.ones(3), jax.random.key(0)):.3f}")
      100.000
    """
    iters = check_int("iters", iters, minimum=1)
    check_leaves("params", params)
    like = jax.tree.map(lambda p: jnp.zeros(p.shape, _work_dtype(p)), params)
    return lambda_max(_hessian_product(loss, params), like, key, num_steps=iters)


class TopHessian(NamedTuple):
    """Leading eigenpairs of a Hessian, the largest first."""

    values: jax.Array  # [k]
    vectors: Any  # like params, with a leading axis k; orthonormal over all leaves
    residuals: jax.Array  # [k]: ||H v - value v||; no eigenvalue is further away than this


def top_hessian(
    loss: Loss, params: Any, key: jax.Array, k: int = 4, iters: int | None = None
) -> TopHessian:
    r"""The ``k`` algebraically largest eigenpairs of a loss's Hessian, by Lanczos.

    Full reorthogonalization, so no eigenvalue appears twice. Holds ``iters + 1`` copies of the
    parameters while it runs (sharded like the Hessian products) and ``k`` afterwards.

    Args:
      loss: ``params -> []``, twice differentiable.
      params: pytree of real arrays, ``P`` numbers in all.
      key: draws the start.
      k: how many, ``1 <= k <= P``. Static.
      iters: Hessian products, >= k; at most ``P`` are made. Default ``2 k + 16``. Static.

    Returns:
      :class:`TopHessian`. ``residuals`` tells how far it converged.

    Raises:
      TypeError, ValueError: ``k`` or ``iters`` out of range, or params that are not real.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import top_hessian
      >>> loss = lambda x: 0.5 * jnp.sum(jnp.array([100.0, 10.0, 1.0]) * x**2)
      >>> top = top_hessian(loss, jnp.ones(3), jax.random.key(0), k=2)
      >>> [f"{value:.3f}" for value in top.values]
      ['100.000', '10.000']
    """
    check_leaves("params", params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    k = check_int("k", k, minimum=1)
    if k > size:
        raise ValueError(f"k: must be <= {size}, the number of parameters, got {k}")
    m = min(2 * k + 16 if iters is None else check_int("iters", iters, minimum=k), size)
    product = _hessian_product(loss, params)
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))

    def off(basis: Any, w: Any) -> tuple[Any, jax.Array]:
        """``w`` without its part in the span of the rows of ``basis``, and the coefficients."""
        coefs = _overlaps(basis, w)
        return jax.tree.map(lambda x, b: x - jnp.tensordot(coefs.astype(x.dtype), b, 1), w,
                            basis), coefs

    def clean(basis: Any, w: Any, passes: int) -> tuple[Any, jax.Array]:
        """Unit vector off the rows of ``basis``, and the length that was left."""
        def once(_, carry):
            w, length = carry
            w, norm = _unit(off(basis, w)[0])
            return w, length * norm

        return jax.lax.fori_loop(0, passes, once, (w, jnp.ones((), dtype)))

    def body(j, carry):
        basis, diagonal, side, scale = carry
        w = product(jax.tree.map(lambda b: b[j], basis))
        # Everything below is of order 1, whatever the units of the loss.
        scale = jnp.maximum(scale, safe_norm(w))
        w = jax.tree.map(lambda x: x / jnp.where(scale == 0, 1.0, scale).astype(x.dtype), w)
        w, coefs = off(basis, w)
        # The Krylov space is used up (an eigenspace, or a repeated eigenvalue): go on from a
        # fresh direction, uncoupled from the rest.
        lost = _dot(w, w) <= (32 * jnp.finfo(dtype).eps) ** 2
        fresh = _random_like(jax.random.fold_in(key, j + 1), params)
        w = jax.tree.map(lambda x, f: jnp.where(lost, f, x), w, fresh)
        # Twice: against rounding, and since a fresh direction has not been through `off` yet.
        w, norm = clean(basis, w, 2)
        basis = jax.tree.map(lambda b, x: b.at[j + 1].set(x, mode="drop"), basis, w)
        side = side.at[j].set(jnp.where(lost, 0.0, norm) * scale)
        return basis, diagonal.at[j].set(coefs[j] * scale), side, scale

    start = _unit(_random_like(key, params))[0]
    basis = jax.tree.map(lambda x: jnp.zeros((m, *x.shape), x.dtype).at[0].set(x), start)
    zeros = jnp.zeros(m, dtype)
    basis, diagonal, side, _ = jax.lax.fori_loop(
        0, m, body, (basis, zeros, zeros, jnp.zeros((), dtype))
    )
    matrix = jnp.diag(diagonal) + jnp.diag(side[:-1], 1) + jnp.diag(side[:-1], -1)
    values, rotation = jnp.linalg.eigh(matrix)
    values, rotation = values[::-1][:k], rotation[:, ::-1][:, :k]
    vectors = jax.tree.map(lambda b: jnp.tensordot(rotation.T.astype(b.dtype), b, 1), basis)
    return TopHessian(values, vectors, jnp.abs(side[-1] * rotation[-1]))


def _overlaps(basis: Any, tree: Any) -> jax.Array:
    """``[m]``: inner products of ``tree`` with the rows of ``basis``, over all leaves."""
    total = jnp.zeros((), jnp.float32)
    for b, x in zip(_leaves(basis), _leaves(tree), strict=True):
        x = x.astype(b.dtype)
        total = total + jnp.tensordot(b, x, (tuple(range(1, b.ndim)), tuple(range(x.ndim))))
    return total


class RiverProgress(NamedTuple):
    """A movement, split into its part along the river and its part across."""

    movement: Any  # like params: the part along the river
    distance: jax.Array  # []: its length
    hill_distance: jax.Array  # []: length of the part in the hill directions


def river_progress(movement: Any, vectors: Any) -> RiverProgress:
    r"""Movement projected off the leading Hessian directions.

    :math:`r = \Delta - \sum_i v_i \langle v_i, \Delta \rangle`: what remains of a movement when
    the steep directions, between which it bounces, are taken out.

    Args:
      movement: :math:`\Delta`, like the parameters: new minus old parameters, over one step or
        many.
      vectors: orthonormal :math:`v_i`, like the parameters with a leading axis ``k``, from
        :func:`top_hessian`.

    Returns:
      :class:`RiverProgress`; :math:`\mathrm{distance}^2 + \mathrm{hill\_distance}^2 =
      \|\Delta\|^2`.

    Raises:
      ValueError: a leaf of ``vectors`` that is not ``[k, *shape]`` of its leaf in ``movement``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import river_progress
      >>> steep = jnp.array([[0.0, 1.0, 0.0]])
      >>> out = river_progress(jnp.array([3.0, 5.0, 4.0]), steep)
      >>> print(out.distance, out.hill_distance)
      5.0 5.0
    """
    def check(path, x, b):
        if jnp.shape(b)[1:] != jnp.shape(x) or jnp.ndim(b) != jnp.ndim(x) + 1:
            raise ValueError(
                f"vectors{jax.tree_util.keystr(path)}: expected shape (k, "
                f"{', '.join(map(str, jnp.shape(x)))}), got {jnp.shape(b)}"
            )

    jax.tree_util.tree_map_with_path(check, movement, vectors)
    movement = jax.tree.map(lambda x: x.astype(_work_dtype(x)), movement)
    coefs = _overlaps(vectors, movement)
    river = jax.tree.map(
        lambda x, b: x - jnp.tensordot(coefs.astype(x.dtype), b.astype(x.dtype), 1),
        movement, vectors,
    )
    return RiverProgress(river, safe_norm(river), safe_norm(coefs))
