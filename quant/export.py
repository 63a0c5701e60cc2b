r"""Quantized trees as plain arrays and a description: files that NumPy alone can read.

``docs/quantized_checkpoints.md`` documents the layout and holds a reader of forty lines that needs
nothing but NumPy. In short: every :class:`~fadex.quant.QuantizedArray` becomes a dictionary of

* ``codes``: uint8, one little-endian bit stream along the block axis (``layout='stream'``);
* ``scales``: uint8 bit patterns or floats; ``tensor_scale``, ``zero_point`` where there are any;

and an entry ``path -> {format, axis, length, layout, dtype, shape}`` in the description. Scales
are raw bytes, so no storage has to know an 8-bit float.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fadex.core import checkpoint
from fadex.core.pytree import flatten_with_paths, is_variable, map_with_path, to_pure_dict
from fadex.quant.formats import Format
from fadex.quant.four_over_six import FourOverSix
from fadex.quant.packing import TILE, pack_unit
from fadex.quant.qarray import QuantizedArray, matrix_ndim, padded_length
from fadex.quant.razer import RaZeR
from fadex.quant.site import QuantizedSite

__all__ = [
    "ExportedTree",
    "format_from_json",
    "from_state",
    "load_quantized",
    "save_quantized",
    "shardings_for",
    "to_state",
]

VERSION = 1
_KEY = "fadex_quantized"
_KINDS: dict[str, Any] = {cls.__name__: cls for cls in (Format, FourOverSix, RaZeR)}
_KINDS["FixedScale"] = "fadex.quant.qat.fake_quant"  # loaded when it is met
_LEAVES = ("codes", "scales", "tensor_scale", "zero_point", "codebook", "rotation")


class ExportedTree(NamedTuple):
    """What :func:`to_state` returns.

    Attributes:
      arrays: the tree in nested dicts, lists and tuples, without static fields.
      meta: JSON-able: ``{"version", "arrays": {path: description}, "sites": {path: ...}}``.
    """

    arrays: Any
    meta: dict[str, Any]


def format_from_json(description: dict[str, Any]) -> Format:
    """The format that ``Format.to_json`` described.

    Raises:
      ValueError: another version, an unknown kind, missing or unknown fields.

    Example:
      >>> from fadex.quant import format_from_json, razer_e3m3
      >>> format_from_json(razer_e3m3(7).to_json()) == razer_e3m3(7)
      True
    """
    fields = dict(description)
    kind, version = fields.pop("kind", None), fields.pop("version", None)
    if version != VERSION:
        raise ValueError(f"format: version {version!r}, this library reads version {VERSION}")
    if kind not in _KINDS:
        raise ValueError(f"format: unknown kind {kind!r}, expected one of {sorted(_KINDS)}")
    kind_class = _KINDS[kind]
    if isinstance(kind_class, str):
        kind_class = getattr(importlib.import_module(kind_class), kind)
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    try:
        return kind_class(**fields)
    except TypeError as error:
        raise ValueError(f"format: {error}") from None


def _stops(node: Any) -> bool:
    return isinstance(node, (QuantizedArray, QuantizedSite))


def to_state(tree: Any) -> ExportedTree:
    """Split a quantized tree into plain arrays and a JSON-able description.

    Args:
      tree: any pytree with :class:`QuantizedArray` and :class:`QuantizedSite` nodes.

    Example:
      >>> from fadex.quant import nvfp4, quantize_array, to_state
      >>> arrays, meta = to_state({"w": quantize_array(jnp.ones((32, 4)), nvfp4())})
      >>> sorted(arrays["w"]), meta["arrays"]["w"]["shape"]
      (['codes', 'scales', 'tensor_scale'], [32, 4])
    """
    arrays_meta: dict[str, Any] = {}
    sites: dict[str, Any] = {}

    def plain(path: str, node: Any) -> Any:
        if isinstance(node, QuantizedSite):
            sites[path] = {"activations": node.activations.to_json()}
            inner = {"weight": plain(f"{path}/weight" if path else "weight", node.weight)}
            return inner if node.scale is None else {**inner, "scale": node.scale}
        if not isinstance(node, QuantizedArray):
            return node
        arrays_meta[path] = {
            "format": node.fmt.to_json(),
            "bits": node.fmt.bits,
            "axis": node.axis,
            "length": node.length,
            "layout": "stream",
            "dtype": jnp.dtype(node.dtype).name,
            "shape": list(node.shape),
        }
        node = node.to_layout("stream")
        return {
            name: leaf for name in _LEAVES if (leaf := getattr(node, name)) is not None
        }

    made = [
        plain(path, node) for path, node in flatten_with_paths(tree, is_leaf=_stops).items()
    ]
    structure = jax.tree.structure(tree, is_leaf=_stops)
    # Containers are made plain while each of our nodes stands as one leaf, by its position.
    skeleton = to_pure_dict(structure.unflatten([_Slot(i) for i in range(len(made))]))
    arrays = jax.tree.map(
        lambda slot: made[slot.index], skeleton, is_leaf=lambda n: isinstance(n, _Slot)
    )
    found: list[str] = []
    known = {**arrays_meta, **sites}
    _walk(arrays, known, found.append)
    unnamed = "" in known and not (_stops(tree) or is_variable(tree))
    if unnamed or sorted(found) != sorted(known):
        raise ValueError("tree: keys that are empty or hold '/' make paths ambiguous: "
                         f"{sorted(known)}")
    return ExportedTree(arrays, {"version": VERSION, "arrays": arrays_meta, "sites": sites})


def _walk(node: Any, known: Any, visit: Any, path: str | None = None) -> None:
    """Visit the paths of ``known`` as :func:`from_state` will meet them."""
    if (path or "") in known and (path is not None or not isinstance(node, dict)
                                  or "codes" in node or "weight" in node):
        visit(path or "")
        inner = f"{path}/weight" if path else "weight"
        if inner in known:
            visit(inner)
        return
    below = lambda key: f"{path}/{key}" if path else str(key)
    children = node.items() if isinstance(node, dict) else (
        enumerate(node) if isinstance(node, (list, tuple)) else ()
    )
    for key, child in children:
        _walk(child, known, visit, below(key))


class _Slot:
    """Place of one leaf."""

    def __init__(self, index: int):
        self.index = index


def _quantized(path: str, leaves: Any, about: dict[str, Any], layout: str) -> QuantizedArray:
    fmt = format_from_json(about["format"])
    if not isinstance(leaves, dict) or "codes" not in leaves:
        raise ValueError(f"state: {path!r} is described as quantized but holds no codes")
    unknown = set(leaves) - set(_LEAVES)
    if unknown:
        raise ValueError(f"state: {path!r} holds unknown arrays {sorted(unknown)}")
    q = QuantizedArray(
        *(leaves.get(name) for name in _LEAVES), fmt=fmt, axis=int(about["axis"]),
        pad=padded_length(int(about["length"]), fmt) - int(about["length"]),
        layout=about["layout"], dtype=jnp.dtype(about["dtype"]),
    )
    if list(q.shape) != list(about["shape"]):
        raise ValueError(f"state: {path!r} has shape {q.shape}, described as {about['shape']}")
    return q.to_layout(layout)


def from_state(arrays: Any, meta: dict[str, Any], *, like: Any = None,
               layout: str = "planar") -> Any:
    """Put a quantized tree together again.

    Args:
      arrays, meta: as :func:`to_state` gave them.
      like: a tree of the original structure, such as the ``nnx.State`` of the dense or quantized
        model, to which the leaves go by path; default: nested dicts, lists and tuples.
      layout: of the packed codes in memory.

    Raises:
      ValueError: another version of the layout, an unknown format, arrays that do not fit their
        description, paths of ``like`` that are missing here.
    """
    if meta.get("version") != VERSION:
        raise ValueError(
            f"meta: version {meta.get('version')!r}, this library reads version {VERSION}"
        )
    quantized, sites = meta["arrays"], meta.get("sites", {})

    def build(path: str, node: Any) -> Any:
        if path in sites:
            if not isinstance(node, dict) or "weight" not in node:
                raise ValueError(f"state: {path!r} is described as a site but holds no weight")
            weight = build(f"{path}/weight" if path else "weight", node["weight"])
            return QuantizedSite(weight, node.get("scale"), None,
                                 activations=format_from_json(sites[path]["activations"]))
        if path in quantized:
            return _quantized(path, node, quantized[path], layout)
        below = lambda key: f"{path}/{key}" if path else str(key)
        if isinstance(node, dict):
            return {key: build(below(key), child) for key, child in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(build(below(i), child) for i, child in enumerate(node))
        return node

    tree = build("", arrays)
    if like is None:
        return tree
    found = flatten_with_paths(tree, is_leaf=_stops)
    wanted = flatten_with_paths(like, is_leaf=_stops)
    missing, left = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or left:
        raise ValueError(f"like: {missing} not in the state; {left} of the state not in like")
    for path, leaf in wanted.items():
        have, want = (tuple(getattr(x, "shape", ())) for x in (found[path], leaf))
        if have != want:
            raise ValueError(f"like: {path!r} has shape {want}, the state's has {have}")
    return map_with_path(lambda path, leaf: found[path], like, is_leaf=_stops)


def save_quantized(
    path: str | os.PathLike[str], tree: Any, *, metadata: Any = None, overwrite: bool = False
) -> Any:
    """Write a quantized tree as an Orbax checkpoint (with a manifest of checksums).

    The arrays are those of :func:`to_state`, readable by Orbax and NumPy alone.

    Args:
      path, metadata, overwrite: as in :func:`fadex.core.checkpoint.save`.
      tree: parameters, quantized in whole or in part.
    """
    arrays, meta = to_state(tree)
    return checkpoint.save(
        path, arrays, metadata={_KEY: meta, "user": metadata}, overwrite=overwrite
    )


def load_quantized(
    path: str | os.PathLike[str], *, like: Any = None, layout: str = "planar",
    sharding: Any = None,
) -> Any:
    """Read what :func:`save_quantized` wrote, after checking every file.

    Args:
      path: the checkpoint folder.
      like, layout: as in :func:`from_state`.
      sharding: a sharding or device for all arrays, or a tree of them for the arrays of
        :func:`to_state`.

    Raises:
      CheckpointError: missing or damaged files, or no quantized checkpoint.
      ValueError: as in :func:`from_state`.

    Example:
      >>> import tempfile
      >>> from fadex.quant import load_quantized, nvfp4, quantize_array, save_quantized
      >>> folder = tempfile.mkdtemp() + "/w"
      >>> _ = save_quantized(folder, {"w": quantize_array(jnp.ones((32, 4)), nvfp4())})
      >>> load_quantized(folder)["w"]
      QuantizedArray(nvfp4, shape=(32, 4), axis=-2, layout='planar', dtype=float32)
    """
    meta = checkpoint.read_manifest(path).get("metadata")
    if not isinstance(meta, dict) or _KEY not in meta:
        raise checkpoint.CheckpointError(
            f"{os.fspath(path)}: no quantized checkpoint; read it with fadex.core.checkpoint"
        )
    arrays = checkpoint.restore(path, sharding=sharding)
    return from_state(arrays, meta[_KEY], like=like, layout=layout)


def shardings_for(q: QuantizedArray, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """Shardings of a quantized array's leaves from the partition of the array it stands for.

    Codes, scales and zero points are cut like the array; the tensor scale like its leading axes.

    Args:
      q: a :class:`QuantizedArray` (arrays or ``jax.ShapeDtypeStruct`` inside).
      mesh: the mesh.
      spec: partition of ``q.shape``.

    Returns:
      A :class:`QuantizedArray` of ``NamedSharding``: for ``jax.device_put`` and ``in_shardings``.

    Raises:
      ValueError: ``spec`` has more entries than axes, or a shard of the block axis would cut a
        block (or a tile of 128 codes in the planar layout).
    """
    if len(spec) > q.ndim:
        raise ValueError(f"spec: {spec} has more entries than the shape {q.shape}")
    entries = list(spec) + [None] * (q.ndim - len(spec))
    names = entries[q.axis]
    if names is not None:
        shards = int(np.prod([mesh.shape[n] for n in np.atleast_1d(names)]))
        block = q.fmt.block if isinstance(q.fmt.block, int) else pack_unit(q.fmt.bits)
        unit = int(np.lcm(block, TILE)) if q.layout == "planar" and q.fmt.bits < 8 else block
        if q.padded % shards or (q.padded // shards) % unit or q.pad:
            raise ValueError(
                f"spec: axis {q.axis} of length {q.length} over {shards} shards does not fall into "
                f"whole units of {unit} ({'tiles' if unit != block else 'blocks'} of "
                f"{q.fmt.name}, layout {q.layout!r})"
            )
    cut = NamedSharding(mesh, PartitionSpec(*entries))
    if q.fmt.block is None:  # one scale a column: nothing to cut along the block axis
        entries[q.axis] = None
    scales = NamedSharding(mesh, PartitionSpec(*entries))
    leading = entries[: q.ndim - matrix_ndim(q.ndim, q.axis)]
    over = NamedSharding(mesh, PartitionSpec(*leading))
    places = dict.fromkeys(_LEAVES, scales) | {"codes": cut, "tensor_scale": over}
    return QuantizedArray(
        *(None if getattr(q, name) is None else places[name] for name in _LEAVES), fmt=q.fmt,
        axis=q.axis, pad=q.pad, layout=q.layout, dtype=q.dtype,
    )
