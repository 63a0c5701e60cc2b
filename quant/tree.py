"""Quantize whole parameter trees by recipe, turn them back, and report what it cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.pytree import flatten_with_paths, map_with_path
from fadex.quant.qarray import QuantizedArray, quantize_array
from fadex.quant.razer import RaZeR, special_value_errors
from fadex.quant.recipes import Recipe, Rule, as_recipe
from fadex.quant.site import QuantizedSite, Site

__all__ = [
    "QuantizationReport",
    "ReportRow",
    "bits_per_weight",
    "calibrate_special_values",
    "combine_quantized",
    "dequantize",
    "partition_quantized",
    "quantization_report",
    "quantize",
]


# What a format alone does not touch: vectors by nature, matrices where layers are stacked.
NO_WEIGHTS = ("bias", "scale", "gain", "gamma", "beta")


def is_quantized(node: Any) -> bool:
    """Whether a tree node is a quantized array (a leaf for the functions of this module)."""
    return isinstance(node, QuantizedArray)


def _stops(node: Any) -> bool:
    return isinstance(node, (QuantizedArray, QuantizedSite))


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, with quantized arrays and sites as leaves, Variables looked into."""
    return flatten_with_paths(tree, is_leaf=_stops)


def _selected(
    tree: Any, recipe: Recipe, min_size: int
) -> dict[str, tuple[Rule, Any, int]]:
    """``path -> (rule, leaf, axis)`` of the leaves that a recipe quantizes."""
    leaves = _leaves(tree)
    chosen: dict[str, tuple[Rule, Any, int]] = {}
    idle: dict[Rule, list[str]] = {}
    for path, rule in recipe.resolve(leaves).items():
        leaf = leaves[path]
        target = rule.target
        if target is None or (isinstance(target, Site) and target.weights is None
                              and target.activations is None):
            continue
        if _stops(leaf):
            raise ValueError(f"tree: {path!r} is quantized already ({leaf!r}); dequantize it first")
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            if rule.catch_all:
                continue
            raise ValueError(
                f"recipe: {rule.pattern!r} matches {path!r}, which is no floating-point array "
                f"({dtype if dtype is not None else type(leaf).__name__})"
            )
        axis = rule.axis_for(path)
        # Biases and gains are no matrices, stacked over layers or not: they stay, as do small
        # leaves.
        name = path.rsplit("/", 1)[-1]
        vector = leaf.ndim < 2 if rule.axis is None or rule.catch_all else False
        fmt = target.weights if isinstance(target, Site) else target
        block = fmt.block if fmt is not None and isinstance(fmt.block, int) else 0
        if rule.catch_all and not vector and 2 * leaf.shape[axis] <= block:
            vector = True  # heads or few channels: padded to a block it would only grow
        if leaf.size < max(min_size, 1) or vector or (rule.catch_all and name in NO_WEIGHTS):
            if leaf.size:
                idle.setdefault(rule, []).append(path)
            continue
        if rule.axis is not None and not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"axis: {axis} of rule {rule.pattern!r} is out of range for {path!r} "
                             f"of shape {leaf.shape}")
        chosen[path] = rule, leaf, axis
    used = {rule for rule, _, _ in chosen.values()}
    for rule, paths in idle.items():
        if recipe.strict and not rule.catch_all and rule not in used:
            raise ValueError(
                f"recipe: {rule.pattern!r} matches only vectors and leaves of fewer than "
                f"min_size={min_size} values, which stay as they are: {', '.join(paths[:5])} "
                "(strict=False lets it pass)"
            )
    return chosen


def quantize(
    tree: Any, recipe: Any, *, min_size: int = 1024, layout: str = "planar",
    importance: Any = None, on_nonfinite: str = "propagate",
) -> Any:
    """Quantize the leaves of a tree that a recipe names.

    Args:
      tree: parameters: nested dicts, an ``nnx.State``, any pytree; arrays ``[..., K, N]`` with the
        contraction axis ``-2`` and any leading axes of stacked layers or experts.
      recipe: a :class:`Recipe`, a list of rules, or one format for every leaf. Static.
      min_size: leaves with fewer elements stay as they are, and so do vectors (unless their rule
        names an axis), empty leaves, and what no rule matches. A format alone and the pattern
        ``"**"`` also leave what is called ``bias``, ``scale``, ``gain``, ``gamma`` or ``beta``,
        which stacked layers turn into matrices, integers, and what has at most half a block
        along the block axis (flax's attention kernels ``[D, heads, head_dim]``: name them in a
        rule with axis -3).
      importance: tree like ``tree`` of weights for the squared errors by which formats search for
        their scales (leaves broadcastable to its leaves, or missing), or ``None``.
      layout, on_nonfinite: as in :func:`quantize_array`.

    Returns:
      The tree with a :class:`QuantizedArray` in place of each chosen leaf (a
      :class:`QuantizedSite` where the rule's target is a :class:`Site` with activations). Works
      under ``jax.jit``.

    Raises:
      ValueError: a pattern that matches nothing, a leaf that is quantized already, an integer or
        complex leaf matched by a rule other than ``"**"``, an axis out of range.

    Example:
      >>> from fadex.quant import nvfp4, quantize
      >>> params = {"dense": {"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}}
      >>> quantize(params, [("**/kernel", nvfp4())])["dense"]["kernel"]
      QuantizedArray(nvfp4, shape=(64, 32), axis=-2, layout='planar', dtype=float32)
    """
    recipe = as_recipe(recipe)
    chosen = _selected(tree, recipe, min_size)
    weights = {} if importance is None else flatten_with_paths(importance)

    def convert(path: str, leaf: Any) -> Any:
        if path not in chosen:
            return leaf
        rule, _, axis = chosen[path]
        target = rule.target if isinstance(rule.target, Site) else Site(rule.target)
        weight = leaf
        if target.weights is not None:
            weight = quantize_array(
                leaf, target.weights, axis=axis, layout=layout, on_nonfinite=on_nonfinite,
                importance=weights.get(path),
            )
        # A table is looked up, not multiplied: no activations meet it.
        if target.activations is None or axis != -2:
            return weight
        return QuantizedSite(weight, None, None, activations=target.activations)

    return map_with_path(convert, tree, is_leaf=_stops)


def dequantize(tree: Any, dtype: Any = None) -> Any:
    """Replace every quantized array of a tree by its values, every site by its weight.

    Args:
      tree: any pytree, or one :class:`QuantizedArray`.
      dtype: of the values; default, the dtype each array had.

    Example:
      >>> from fadex.quant import dequantize, nvfp4, quantize
      >>> w = {"kernel": jnp.ones((64, 32))}
      >>> dequantize(quantize(w, nvfp4()))["kernel"].round(4).max().item()
      1.0
    """
    def back(node: Any) -> Any:
        if isinstance(node, QuantizedSite):
            return back(node.weight)
        return node.dequantize(dtype) if is_quantized(node) else node

    return jax.tree.map(back, tree, is_leaf=_stops)


def bits_per_weight(tree: Any) -> float:
    """Bits of all buffers over the number of values they stand for, scales included.

    Example:
      >>> from fadex.quant import bits_per_weight, nvfp4, quantize_array
      >>> q = quantize_array(jnp.ones((1024, 64)), nvfp4())
      >>> round(bits_per_weight(q), 3)
      4.5
    """
    leaves = [_weight(leaf) for leaf in _leaves(tree).values()]
    leaves = [leaf for leaf in leaves if hasattr(leaf, "shape")]
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    if not size:
        raise ValueError("tree: holds no values")
    return 8 * sum(_bytes(leaf) for leaf in leaves) / size


def _weight(node: Any) -> Any:
    return node.weight if isinstance(node, QuantizedSite) else node


def _bytes(leaf: Any) -> int:
    """Bytes of an array, a quantized array, or what describes one."""
    if is_quantized(leaf):
        return leaf.nbytes
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize


def partition_quantized(tree: Any) -> tuple[Any, Any]:
    """Split a tree into what gradients can train and what is packed.

    Codes are bytes: an optimizer that is given them would decay and truncate them, and ``jax.grad``
    refuses them. Differentiate with respect to the first tree, and put both together inside.

    Returns:
      ``(dense, packed)``: two trees of the same structure, each with ``None`` in the place of the
      other's leaves; :func:`combine_quantized` undoes it.

    Example:
      >>> from fadex.quant import combine_quantized, nvfp4, partition_quantized, quantize
      >>> params = quantize({"kernel": jnp.ones((64, 32)), "bias": jnp.ones(32)}, nvfp4())
      >>> dense, packed = partition_quantized(params)
      >>> loss = lambda dense: jnp.sum(combine_quantized(dense, packed)["bias"] ** 2)
      >>> jax.grad(loss)(dense)["kernel"] is None
      True
    """
    dense = jax.tree.map(lambda n: None if _stops(n) else n, tree, is_leaf=_stops)
    packed = jax.tree.map(lambda n: n if _stops(n) else None, tree, is_leaf=_stops)
    return dense, packed


def combine_quantized(dense: Any, packed: Any) -> Any:
    """Undo :func:`partition_quantized`."""
    return jax.tree.map(
        lambda d, p: p if d is None else d, dense, packed,
        is_leaf=lambda n: n is None or _stops(n),
    )


class ReportRow(NamedTuple):
    """One quantized leaf. ``nmse``: squared error over squared values; ``sqnr_db``: its inverse in
    decibels; ``bytes`` of the buffers, ``dense_bytes`` of the original."""

    path: str
    format: str
    shape: tuple[int, ...]
    bits_per_weight: float
    nmse: float
    sqnr_db: float
    bytes: int
    dense_bytes: int


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """Rows by leaf, and their sum; ``str()`` gives a table.

    Attributes:
      rows: one :class:`ReportRow` for each quantized leaf.
      total: the same over all of them.
      untouched_bytes: bytes of the leaves that stayed as they are.
    """

    rows: tuple[ReportRow, ...]
    total: ReportRow
    untouched_bytes: int

    def __str__(self) -> str:
        head = ("path", "format", "shape", "bits/weight", "nMSE", "SQNR dB", "bytes", "of dense")
        body = [
            (r.path, r.format, "x".join(map(str, r.shape)), f"{r.bits_per_weight:.3f}",
             f"{r.nmse:.3e}", f"{r.sqnr_db:.2f}", str(r.bytes),
             f"{r.bytes / max(r.dense_bytes, 1):.3f}")
            for r in (*self.rows, self.total)
        ]
        widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) if i < 3 else cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
            for row in (head, *body)
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:-1], lines[-1],
                          f"not quantized: {self.untouched_bytes} bytes"])


def _error_sums(x: Any, q: QuantizedArray) -> tuple[float, float]:
    x = np.asarray(x, np.float64)
    return float(((np.asarray(q.dequantize(jnp.float32), np.float64) - x) ** 2).sum()), float(
        (x**2).sum()
    )


def _row(path: str, fmt: str, shape: Any, size: int, sums: Any, used: int, dense: int) -> ReportRow:
    error, power = sums
    nmse = error / power if power else (0.0 if error == 0 else float("inf"))
    sqnr = -10 * np.log10(nmse) if nmse > 0 else float("inf")
    return ReportRow(path, fmt, tuple(shape), 8 * used / size if size else 0.0, float(nmse),
                     float(sqnr), int(used), int(dense))


def quantization_report(tree: Any, qtree: Any) -> QuantizationReport:
    """Error and size of each quantized leaf against the tree it came from.

    Args:
      tree: the original parameters.
      qtree: what :func:`quantize` made of them.

    Returns:
      A :class:`QuantizationReport`; ``print`` it for the table. Sums run in float64 on the host.

    Raises:
      ValueError: ``qtree`` holds no quantized leaf, or one that ``tree`` lacks or has in another
        shape.

    Example:
      >>> from fadex.quant import nvfp4, quantization_report, quantize
      >>> params = {"kernel": jnp.arange(2048.0).reshape(64, 32)}
      >>> report = quantization_report(params, quantize(params, nvfp4()))
      >>> report.rows[0].path, round(report.total.bits_per_weight, 2)
      ('kernel', 4.52)
    """
    originals = flatten_with_paths(tree)
    rows, untouched = [], 0
    errors = powers = 0.0
    for path, leaf in _leaves(qtree).items():
        leaf = _weight(leaf)
        if not is_quantized(leaf):
            untouched += _bytes(leaf)
            continue
        original = originals.get(path)
        if original is None or tuple(original.shape) != leaf.shape:
            raise ValueError(
                f"qtree: {path!r} of shape {leaf.shape} is "
                f"{'missing from tree' if original is None else f'{original.shape} in tree'}"
            )
        sums = _error_sums(original, leaf)
        errors, powers = errors + sums[0], powers + sums[1]
        rows.append(_row(path, leaf.fmt.name, leaf.shape, leaf.size, sums, leaf.nbytes,
                         original.nbytes))
    if not rows:
        raise ValueError("qtree: holds no quantized leaf")
    size = sum(int(np.prod(r.shape)) for r in rows)
    total = _row("total", "", (size,), size, (errors, powers), sum(r.bytes for r in rows),
                 sum(r.dense_bytes for r in rows))
    return QuantizationReport(tuple(rows), total, int(untouched))


def calibrate_special_values(
    tree: Any,
    recipe: Any,
    grid: tuple[float, ...] = (2.5, 3.5, 4.5, 5.0, 5.5, 7.0, 8.0, 9.0, 10.0),
    *,
    min_size: int = 1024,
    importance: Any = None,
) -> tuple[Recipe, dict[str, dict[tuple[float, ...], float]]]:
    """Choose the special magnitudes of a recipe's RaZeR rules by their total squared error.

    For each rule with a RaZeR format, over all leaves that it decides, the error of every pair
    ``(v, w)`` from ``grid`` (every single ``v`` for :func:`razer_e4m3`) is the sum over blocks of
    the smaller of both magnitudes' errors, so ``len(grid)`` encodings serve all pairs.

    Args:
      tree, recipe, min_size: as in :func:`quantize`.
      grid: magnitudes to choose from.
      importance: tree of weights like ``tree`` (leaves broadcastable to its leaves), or ``None``.

    Returns:
      ``(recipe, errors)``: the recipe with the best magnitudes, and for each pattern the squared
      error of every candidate. The paper searches per model; this objective is ours.

    Raises:
      ValueError: no rule with a RaZeR format decides any leaf; a bad magnitude in ``grid``.

    Example:
      >>> from fadex.quant import calibrate_special_values, razer_e3m3
      >>> w = {"kernel": jax.random.normal(jax.random.key(0), (256, 64))}
      >>> recipe, errors = calibrate_special_values(w, razer_e3m3(), (5.0, 7.0, 8.0))
      >>> recipe.rules[0].target.specials
      (5.0, -5.0, 7.0, -7.0)
    """
    from fadex.quant.razer import _check_special, razer_e3m3, razer_e4m3

    recipe = as_recipe(recipe)
    grid = tuple(sorted({_check_special("grid", value) for value in grid}))
    chosen = _selected(tree, recipe, min_size)
    weights = {} if importance is None else flatten_with_paths(importance)
    search = jax.jit(special_value_errors, static_argnums=(1, 2), static_argnames=("axis",))
    rules, table = [], {}
    for rule in recipe.rules:
        site = rule.target if isinstance(rule.target, Site) else Site(rule.target)
        fmt = site.weights
        mine = [(path, leaf, axis) for path, (r, leaf, axis) in chosen.items() if r is rule]
        if not isinstance(fmt, RaZeR) or not mine:
            rules.append(rule)
            continue
        two = len(fmt.magnitudes) == 2
        picks = [(a, b) for i, a in enumerate(grid) for b in grid[i + 1:]] if two else [
            (a, a) for a in grid
        ]
        if not picks:
            raise ValueError(f"grid: {fmt.name} needs two magnitudes at least, got {grid}")
        index = np.array([[grid.index(a), grid.index(b)] for a, b in picks])
        sums = np.zeros(len(picks))
        for path, leaf, axis in mine:
            errors = np.asarray(
                search(leaf, fmt, grid, axis=axis, importance=weights.get(path)), np.float64
            ).reshape(len(grid), -1)
            sums += np.array([np.minimum(errors[i], errors[j]).sum() for i, j in index])
        v, w = picks[int(np.argmin(sums))]
        best = razer_e3m3(w, v, block=fmt.block) if two else razer_e4m3(v, block=fmt.block)
        target = dataclasses.replace(site, weights=best) if isinstance(rule.target, Site) else best
        rules.append(dataclasses.replace(rule, target=target))
        table[getattr(rule.pattern, "pattern", rule.pattern)] = {
            (pick if two else pick[:1]): float(s) for pick, s in zip(picks, sums)
        }
    if not table:
        raise ValueError("recipe: no rule with a RaZeR format decides a leaf of the tree")
    return Recipe(rules, recipe.strict), table
