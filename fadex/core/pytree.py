"""Pytrees by path: every leaf has a name such as ``blocks/0/attn/kernel``.

A path is the chain of dictionary keys, attribute names and positions that leads to a leaf,
joined by ``/``. ``flax.nnx`` wraps each array in a ``Variable`` whose only child is called
``value``; that step is left out, so a module's state, the plain dictionary of the same
arrays and a linen parameter tree give the same names.

``None`` and empty containers hold no leaves, as everywhere in JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

__all__ = [
    "flatten_with_paths",
    "is_prng_key",
    "is_variable",
    "leaf_bytes",
    "map_with_path",
    "one_level",
    "param_count",
    "path_str",
    "to_pure_dict",
    "tree_bytes",
    "tree_hash",
    "typed_nodes",
]

_NNX_FIELD = "value"
_NNX_PRIVATE = "_pytree__state"


def is_variable(node: Any) -> bool:
    """Whether ``node`` is an ``nnx.Variable``."""
    # A tree can hold Variables only where somebody has imported nnx; we need not.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def _key_name(key: Any) -> Any:
    """What a key entry carries: a dictionary key, an attribute name or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _is_value_key(key: Any) -> bool:
    return isinstance(key, jax.tree_util.GetAttrKey) and key.name == _NNX_FIELD


def path_str(key_path: tuple[Any, ...]) -> str:
    """Name of a key path as ``jax.tree_util`` gives it, ``'a/b/0/c'``; the root is ``''``.

    A last attribute called ``value`` is dropped, since that is how ``nnx`` Variables show
    themselves. A NamedTuple field of that name looks the same here;
    ``flatten_with_paths`` and ``map_with_path`` see the tree itself and tell them apart.

    >>> leaves, _ = jax.tree_util.tree_flatten_with_path({"a": [1.0, {"b": 2.0}]})
    >>> [path_str(key_path) for key_path, _ in leaves]
    ['a/0', 'a/1/b']
    """
    if key_path and _is_value_key(key_path[-1]):
        key_path = key_path[:-1]
    return _join(key_path)


def _join(key_path: tuple[Any, ...]) -> str:
    return "/".join(str(_key_name(key)) for key in key_path)


def _labelled(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves of ``tree`` in JAX's order with their names, and the tree's structure."""
    stops = is_variable if is_leaf is None else lambda node: is_variable(node) or is_leaf(node)
    pairs = []
    for key_path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=stops):
        if is_variable(node):
            # What a Variable holds may be a tree itself, a quantized array for instance.
            for inner, leaf in jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf):
                pairs.append((_join((*key_path, *inner[1:])), leaf))
        else:
            pairs.append((_join(key_path), node))
    return pairs, jax.tree.structure(tree, is_leaf=is_leaf)


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Leaves by name, in JAX's order; ``is_leaf`` as in ``jax.tree.map``.

    Raises:
      ValueError: two leaves have the same name, as in ``{"a/b": x, "a": {"b": y}}``.

    >>> flatten_with_paths({"w": 1.0, "layers": (2.0, None, 3.0)})
    {'layers/0': 2.0, 'layers/2': 3.0, 'w': 1.0}
    """
    pairs, _ = _labelled(tree, is_leaf)
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tree: several leaves share a path: {', '.join(map(repr, twice))}")
    return leaves


def map_with_path(
    fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``jax.tree.map`` whose function gets the leaf's name first: ``fn(path, leaf, *rest)``.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": [1, 2]})
    {'a': ['a/0=1', 'a/1=2']}
    """
    pairs, structure = _labelled(tree, is_leaf)
    columns = [structure.flatten_up_to(other) for other in rest]
    return structure.unflatten(
        [fn(name, leaf, *others) for (name, leaf), *others in zip(pairs, *columns)]
    )


def param_count(tree: Any) -> int:
    """Number of array elements in the tree; Python scalars are no parameters.

    Abstract leaves (``jax.ShapeDtypeStruct``) count as the arrays that they describe.
    """
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree) if hasattr(x, "shape"))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in the tree, one byte at least per element as numpy stores them.

    A PRNG key counts with its key data; abstract leaves count as the arrays that they describe.
    """
    return sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "shape")
    )


def is_prng_key(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of typed PRNG keys, or describes one."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_bytes(array: Any) -> np.ndarray:
    """The bytes of an array as a flat uint8 array: row-major, little-endian, no padding bits.

    Dtypes narrower than a byte keep undefined high bits in memory; they are cleared, so
    equal values have equal bytes.
    """
    array = np.asarray(array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    width = re.search(r"(?:int|float)(\d+)", array.dtype.name)
    if width is not None and int(width[1]) < 8:
        raw = raw & np.uint8((1 << int(width[1])) - 1)
    return raw


def tree_hash(tree: Any) -> str:
    """SHA-256 of the tree's content: sorted names, shapes, dtypes and bytes.

    A jax array and a numpy array with the same content hash alike, and so do a module's
    state and the plain dictionary of its arrays. Weak types, shardings and static fields do
    not enter. A Python scalar counts with its type and its ``repr``.

    >>> ours, theirs = {"w": np.zeros(3, np.float32)}, {"w": jax.numpy.zeros(3)}
    >>> tree_hash(ours) == tree_hash(theirs)
    True
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten_with_paths(tree).items()):
        if is_prng_key(leaf):
            kind, content = str(leaf.dtype), leaf_bytes(jax.random.key_data(leaf))
        elif hasattr(leaf, "dtype"):
            kind, content = np.dtype(leaf.dtype).name, leaf_bytes(leaf)
        else:
            kind, content = f"python:{type(leaf).__name__}", repr(leaf).encode()
        shape = ",".join(map(str, np.shape(leaf)))
        # Lengths first, so that no two trees run together to the same stream.
        for part in (name.encode(), f"{kind}[{shape}]".encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def one_level(node: Any) -> list[tuple[Any, Any]] | None:
    """Direct children of a tree node as ``(key, child)`` pairs; ``None`` when it is a leaf."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if len(pairs) == 1 and pairs[0][0] == ():
        return None
    return [
        (_key_name(key_path[0]), child)
        for key_path, child in pairs
        if _key_name(key_path[0]) != _NNX_PRIVATE
    ]


def to_pure_dict(tree: Any, leaf: Callable[[Any], Any] = lambda x: x) -> Any:
    """The same tree in plain containers: nested dicts, lists and tuples.

    Mappings, NamedTuples, dataclasses, ``nnx.State``, ``nnx`` modules and every other
    registered node become dicts by key or field; static fields are left behind, a Variable
    is replaced by what it holds. Lists, tuples and ``None`` stay.

    Args:
      tree: any pytree.
      leaf: applied to every leaf, in JAX's order.

    >>> import optax
    >>> to_pure_dict(optax.TraceState(trace={"w": [1.0, None]}))
    {'trace': {'w': [1.0, None]}}
    """
    if tree is None:
        return None
    children = one_level(tree)
    if children is None:
        return leaf(tree)
    if is_variable(tree):
        return to_pure_dict(children[0][1], leaf) if children else None
    plain = [(key, to_pure_dict(child, leaf)) for key, child in children]
    if isinstance(tree, list):
        return [child for _, child in plain]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(child for _, child in plain)
    if isinstance(tree, Mapping):
        # JAX sorts a dict's keys; the plain dict keeps the order of the original.
        order = {key: position for position, key in enumerate(tree)}
        plain.sort(key=lambda pair: order.get(pair[0], 0))
    return dict(plain)


def typed_nodes(tree: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """NamedTuples and dataclasses in the tree, with the static fields of the latter."""
    children = None if tree is None else one_level(tree)
    if children is None:
        return
    name = f"{type(tree).__module__}.{type(tree).__qualname__}"
    if hasattr(tree, "_fields"):
        yield {"path": path, "type": name}
    elif dataclasses.is_dataclass(tree) and not is_variable(tree):
        dynamic = {str(key) for key, _ in children}
        static = {
            field.name: _static_text(getattr(tree, field.name, None))
            for field in dataclasses.fields(tree) if field.name not in dynamic
        }
        yield {"path": path, "type": name, "static": static}
    for key, child in children:
        below = path if is_variable(tree) else f"{path}/{key}" if path else str(key)
        yield from typed_nodes(child, below)


def _static_text(value: Any) -> str | None:
    """A text that is equal for equal static values, in every process; None when unknown."""
    scalar_type = isinstance(value, type) and issubclass(value, np.generic)
    jax_type = isinstance(getattr(value, "dtype", None), np.dtype) and not hasattr(value, "shape")
    if isinstance(value, np.dtype) or scalar_type or jax_type:
        return f"dtype {np.dtype(value).name}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, (list, tuple)):
        parts = [_static_text(part) for part in value]
        return None if None in parts else f"({', '.join(parts)})"
    if isinstance(value, (set, frozenset)):
        parts = [_static_text(part) for part in value]
        return None if None in parts else f"{{{', '.join(sorted(parts))}}}"
    if isinstance(value, Mapping):
        parts = [(_static_text(k), _static_text(v)) for k, v in value.items()]
        known = all(None not in pair for pair in parts)
        return f"{{{', '.join(f'{k}: {v}' for k, v in sorted(parts))}}}" if known else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, _static_text(getattr(value, f.name))) for f in dataclasses.fields(value)]
        known = all(text is not None for _, text in fields)
        inside = ", ".join(f"{name}={text}" for name, text in fields)
        return f"{type(value).__name__}({inside})" if known else None
    return None  # functions and foreign objects: no text that another process would repeat
