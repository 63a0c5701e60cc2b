r"""Norms of whole parameter trees: products of the layers' norms.

With layer norms :math:`\|\cdot\|_l` and radii :math:`\rho_l`

.. math::
  \text{max:}\quad \|W\| = \max_l \|W_l\|_l / \rho_l, \qquad
      \|g\|_* = \sum_l \rho_l \|g_l\|_{l,*}, \qquad
      \mathrm{sharp}_l = \|g\|_*\, \rho_l\, d_l(g_l) \\
  \text{l2:}\quad \|W\|^2 = \sum_l \|W_l\|_l^2 / \rho_l^2, \qquad
      \|g\|_*^2 = \sum_l \rho_l^2 \|g_l\|_{l,*}^2, \qquad
      \mathrm{sharp}_l = \rho_l^2 \|g_l\|_{l,*}\, d_l(g_l)

and :math:`\mathrm{lmo}_l = -\rho_l d_l(g_l)` for the maximum (Scion, arXiv 2502.07529),
:math:`-\rho_l^2 \|g_l\|_{l,*} d_l(g_l) / \|g\|_*` for the l2 product. Stacked layers (batch axes
of a norm) are layers of their own in either product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice
from fadex.core.pytree import path_str
from fadex.optim.norms import (
    NormSpec,
    direction_and_dual,
    euclidean_constant,
    matrix_view,
    norm,
    polar_of,
    working_array,
)

__all__ = [
    "broadcast_specs",
    "tree_directions",
    "tree_dual_norm",
    "tree_euclidean_constants",
    "tree_lmo",
    "tree_norm",
    "tree_sharp",
]

Specs = Any  # a NormSpec, a norm's name, a tree of NormSpec, or a function of the parameters

_is_spec = lambda x: isinstance(x, (NormSpec, str))


class _Pair(NamedTuple):
    direction: jax.Array
    dual: jax.Array


_is_pair = lambda x: isinstance(x, _Pair)


def broadcast_specs(specs: Specs, params: Any) -> Any:
    """One ``NormSpec`` for each leaf of ``params``.

    Args:
      specs: a ``NormSpec`` or a norm's name for all leaves; a tree of them that is a prefix of
        ``params``; or a function that takes ``params`` and returns such a tree
        (:func:`fadex.optim.assign_norms`).
      params: a parameter tree; only its structure and shapes are read.

    Raises:
      ValueError: the tree of specifications is no prefix of ``params``, or a matrix norm was
        given to a leaf that is no matrix; the message names the path.
      TypeError: a leaf of ``specs`` is neither a ``NormSpec`` nor a name.

    >>> import jax.numpy as jnp
    >>> broadcast_specs("l2", {"w": jnp.ones((2, 3))})["w"].name
    'l2'
    """
    if callable(specs):
        specs = specs(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec):
        if not _is_spec(leaf):
            raise TypeError(f"norm: expected a NormSpec or a norm's name at {path_str(path)!r}, "
                            f"got {leaf!r}")

    def fill(spec: NormSpec | str, part: Any) -> Any:
        spec = NormSpec(spec) if isinstance(spec, str) else spec
        return jax.tree.map(lambda _: spec, part)

    try:
        full = jax.tree.map(fill, specs, params, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "norm: the tree of specifications must have the structure of params or of its upper "
            f"part (one NormSpec may stand for a whole branch): {error}"
        ) from None

    def check(path: tuple, leaf: Any, spec: NormSpec) -> NormSpec:
        try:
            matrix_view(spec, jnp.shape(leaf))
        except ValueError as error:
            raise ValueError(f"norm of {path_str(path)!r}: {error}") from None
        return spec

    return jax.tree_util.tree_map_with_path(check, params, full)


def _uses_polar(spec: NormSpec) -> bool:
    return spec.name in ("spectral", "spectral_conv")


def tree_directions(specs: Any, tree: Any, *, batch_leaves: bool = False) -> tuple[Any, Any]:
    """d(g) on unit balls (radius not applied) and the dual norm, for each leaf.

    Args:
      specs: one ``NormSpec`` for each leaf (:func:`broadcast_specs`).
      tree: arrays; ``optax.MaskedNode`` branches stay as they are.
      batch_leaves: compute the polar factors of matrices with equal shape in one batched call:
        fewer kernel launches on an accelerator. On a CPU separate products are as fast.

    Returns:
      two trees: directions in at least float32, and dual norms with the shape of the leaf's
      batch axes.
    """

    def read(g: jax.Array, spec: NormSpec) -> jax.Array:
        return matrix_view(spec, g.shape).read(working_array(g))

    polars = jax.tree.map(lambda g: None, tree)
    if batch_leaves:
        leaves, treedef = jax.tree.flatten(tree)
        flat_specs = treedef.flatten_up_to(specs)
        groups: dict[tuple, list[int]] = {}
        for i, (g, spec) in enumerate(zip(leaves, flat_specs)):
            if _uses_polar(spec) and g.size:
                m = jax.eval_shape(lambda g, spec=spec: read(g, spec), g)
                key = (m.shape[-2:], m.dtype, spec.steps, spec.coefficients, spec.method)
                groups.setdefault(key, []).append(i)
        found: list[Any] = [None] * len(leaves)
        for members in groups.values():
            matrices = [read(leaves[i], flat_specs[i]) for i in members]
            stacked = jnp.concatenate([m.reshape(-1, *m.shape[-2:]) for m in matrices])
            polar, start = polar_of(flat_specs[members[0]], stacked), 0
            for i, m in zip(members, matrices):
                count = m.size // (m.shape[-1] * m.shape[-2])
                found[i] = polar[start : start + count].reshape(m.shape)
                start += count
        polars = found
    else:
        polars = [None] * len(jax.tree.leaves(tree))

    polar = iter(polars)

    def one(g: jax.Array, spec: NormSpec) -> _Pair:
        view = matrix_view(spec, g.shape)
        d, dual = direction_and_dual(spec, view, view.read(working_array(g)), next(polar), None)
        return _Pair(view.write(d), dual)

    # tree.map visits leaves in the order of tree.leaves, which `polar` follows.
    pairs = jax.tree.map(one, tree, specs)
    return (
        jax.tree.map(lambda p: p.direction, pairs, is_leaf=_is_pair),
        jax.tree.map(lambda p: p.dual, pairs, is_leaf=_is_pair),
    )


def reduce_duals(duals: Any, specs: Any, product: str) -> jax.Array:
    """The dual norm of the product, from the leaves' dual norms."""
    if product == "max":
        parts = jax.tree.map(lambda d, s: jnp.sum(d) * s.radius, duals, specs)
        return sum(jax.tree.leaves(parts), start=jnp.zeros(()))
    # A hypot that neither over- nor underflows: gradients of 1e-30 have norms, too.
    parts = jax.tree.leaves(jax.tree.map(lambda d, s: jnp.ravel(d) * s.radius, duals, specs))
    flat = jnp.concatenate([jnp.zeros((1,)), *parts])
    top = jnp.max(flat)
    return top * jnp.sqrt(jnp.sum((flat / jnp.where(top == 0, 1.0, top)) ** 2))


def clip_shares(clip: Any, scope: str, duals: Any, specs: Any) -> Any:
    """min(1, s‖g‖_*) for each layer, of its own norm or of Σ ρ_l‖g_l‖_*; 1 where s is ``None``."""
    if clip is None:
        return jax.tree.map(jnp.ones_like, duals)
    if scope == "global":
        total = reduce_duals(duals, specs, "max")
        return jax.tree.map(
            lambda d: jnp.broadcast_to(jnp.minimum(1.0, clip * total), d.shape), duals
        )
    return jax.tree.map(lambda d: jnp.minimum(1.0, clip * d), duals)


def spread(values: jax.Array, leaf: jax.Array, spec: NormSpec) -> jax.Array:
    """Values of a leaf's batch axes, in a shape that multiplies the leaf."""
    view = matrix_view(spec, leaf.shape)
    full = values.reshape(*values.shape, *(1,) * (leaf.ndim - values.ndim))
    if view.order == tuple(range(leaf.ndim)):
        return full
    back = sorted(range(leaf.ndim), key=view.order.__getitem__)
    return full.transpose(back)


def _prepare(specs: Specs, tree: Any, product: str) -> Any:
    check_choice("product", product, ("max", "l2"))
    return broadcast_specs(specs, tree)


def tree_dual_norm(specs: Specs, tree: Any, *, product: str = "max") -> jax.Array:
    """The dual of the product norm, a scalar.

    >>> import jax.numpy as jnp
    >>> float(tree_dual_norm("linf", {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}))
    6.0
    """
    specs = _prepare(specs, tree, product)
    return reduce_duals(tree_directions(specs, tree)[1], specs, product)


def tree_norm(specs: Specs, tree: Any, *, product: str = "max") -> jax.Array:
    """The product norm, a scalar; layers are measured in units of their radii."""
    specs = _prepare(specs, tree, product)
    parts = jax.tree.leaves(
        jax.tree.map(lambda x, s: jnp.ravel(norm(s, x)) / s.radius, tree, specs)
    )
    flat = jnp.concatenate([jnp.zeros((1,)), *parts])
    return jnp.max(flat) if product == "max" else jnp.sqrt(jnp.sum(flat**2))


def tree_lmo(specs: Specs, tree: Any, *, product: str = "max") -> Any:
    """argmin of ⟨g, W⟩ over the unit ball of the product norm; dtypes of ``tree``."""
    specs = _prepare(specs, tree, product)
    directions, duals = tree_directions(specs, tree)
    if product == "max":
        one = lambda g, d, dual, s: (-s.radius * d).astype(g.dtype)
    else:
        total = reduce_duals(duals, specs, product)
        inverse = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
        one = lambda g, d, dual, s: (
            -(s.radius**2) * spread(dual * inverse, g, s) * d
        ).astype(g.dtype)
    return jax.tree.map(one, tree, directions, duals, specs)


def tree_sharp(specs: Specs, tree: Any, *, product: str = "l2") -> Any:
    """argmax of ⟨g, W⟩ - ‖W‖²/2 in the product norm; dtypes of ``tree``."""
    specs = _prepare(specs, tree, product)
    directions, duals = tree_directions(specs, tree)
    sharps = sharp_of(directions, duals, specs, product)
    return jax.tree.map(lambda g, x: x.astype(g.dtype), tree, sharps)


def sharp_of(directions: Any, duals: Any, specs: Any, product: str) -> Any:
    """The sharp operator of the product norm from directions and dual norms."""
    if product == "max":
        total = reduce_duals(duals, specs, product)
        return jax.tree.map(lambda d, s: total * s.radius * d, directions, specs)
    return jax.tree.map(
        lambda d, dual, s: s.radius**2 * spread(dual, d, s) * d, directions, duals, specs
    )


def tree_euclidean_constants(specs: Any, tree: Any) -> Any:
    """κ_l / ρ_l for each leaf: ½ Σ_l (κ_l/ρ_l)² ‖W_l‖₂² is 1-strongly convex in both products."""
    return jax.tree.map(lambda x, s: euclidean_constant(s, jnp.shape(x)) / s.radius, tree, specs)
