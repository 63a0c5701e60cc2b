"""Checkpoints that notice damage: Orbax for the arrays, a manifest for everything else.

Orbax restores a file with a flipped bit, or into another dtype, without a word. So ``save``
lays a manifest beside Orbax's files: size and SHA-256 of every file, name, shape and dtype of
every leaf, the tree's structure, static fields, and whatever JSON the caller adds; the
manifest has a checksum of its own. ``restore`` checks all of it before it returns anything.

A checkpoint is a folder::

    arrays/            one Orbax checkpoint: a flat dict, leaf name -> array
    manifest.json      readable without this library
    manifest.sha256    in the form that `sha256sum -c` reads

Leaves may be jax and numpy arrays of any dtype, numpy scalars, typed PRNG keys, Python
scalars, strings and bytes. Files are written to a hidden sibling, read back and compared with
the tree, and only then renamed, so a path either holds a whole checkpoint or none.

One process, one local file system: a tree spread over several hosts is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex._version import __version__
from fadex.core.pytree import (
    flatten_with_paths,
    is_prng_key,
    leaf_bytes,
    to_pure_dict,
    typed_nodes,
)

__all__ = ["CheckpointError", "exists", "read_manifest", "restore", "save", "verify"]

FORMAT = "fadex-checkpoint"
VERSION = 1
_ARRAYS, _MANIFEST, _CHECKSUM = "arrays", "manifest.json", "manifest.sha256"
_BATCH_BYTES = 512 * 2**20  # bounds the host memory that reading takes beside the result
# What Orbax's storage takes as it is; other dtypes (uint4, float8_e4m3, ...) go as bytes.
_STORED_AS_IS = frozenset(
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 "
    "float64 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu complex64 complex128".split()
)
_PYTHON_LEAVES = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes.fromhex,
}


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, of an unknown format, or not what was asked for."""


def save(
    path: str | os.PathLike[str], tree: Any, *, metadata: Any = None, overwrite: bool = False
) -> Path:
    """Write ``tree`` as a checkpoint folder at ``path``; return its absolute path.

    The folder appears complete or not at all. With ``overwrite`` the old checkpoint stays in
    place until the new one has been written and read back, is then moved aside, and deleted
    last; if the process dies between those renames, ``restore`` finds the old one aside.

    Args:
      path: the folder to create, relative or absolute, on a local file system.
      tree: any pytree: parameters, an optax state, an ``nnx.State``. Arrays may be sharded
        over the devices of this process.
      metadata: anything that JSON can hold; it comes back in ``read_manifest(path)["metadata"]``
        the way JSON gives it back (tuples as lists).
      overwrite: replace a checkpoint that is at ``path``. Anything else there is never replaced.

    Raises:
      FileExistsError: ``path`` exists and ``overwrite`` is false, or is not a checkpoint.
      TypeError: a leaf or the metadata cannot be stored.
      ValueError: two leaves share a name.
      CheckpointError: what was read back differs from the tree; nothing was replaced.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp() + "/step_10"
    >>> _ = save(folder, {"w": jnp.ones((2, 3)), "step": 10}, metadata={"loss": 0.5})
    >>> restore(folder)["step"], read_manifest(folder)["metadata"]
    (10, {'loss': 0.5})
    """
    final = _local_path(path)
    if jax.process_count() > 1:
        raise NotImplementedError("save: several JAX processes; checkpoints are single-process")
    _refuse_to_replace(final, overwrite)
    manifest, arrays = _describe(tree)
    try:
        manifest["metadata"] = json.loads(json.dumps(metadata))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: must be JSON, got {metadata!r}: {error}") from error

    final.parent.mkdir(parents=True, exist_ok=True)
    work = _sibling(final, "writing")
    try:
        work.mkdir()
        if arrays:
            _write_arrays(work / _ARRAYS, arrays)
        manifest["files"] = _file_table(work)
        _write_manifest(work, manifest)
        _compare_with_source(work, manifest, arrays)
        _move_into_place(work, final, overwrite)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for stale in _moved_aside(final):
        shutil.rmtree(stale, ignore_errors=True)
    return final


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something lies at ``path``, or was moved aside by an interrupted overwrite."""
    final = _local_path(path)
    return os.path.lexists(final) or bool(_moved_aside(final))


def restore(path: str | os.PathLike[str], target: Any = None, *, sharding: Any = None) -> Any:
    """Verify the checkpoint at ``path`` and return its tree.

    Args:
      path: a folder that ``save`` wrote.
      target: a tree of the same leaves, which gives the result its types: NamedTuples,
        dataclasses with their static fields, ``nnx.State``. Its leaves may be arrays or
        ``jax.ShapeDtypeStruct``; only their shape, dtype, kind (jax or numpy) and sharding are
        read. Without a target the tree comes back in nested dicts, lists and tuples.
      sharding: where jax arrays go: a ``jax.sharding.Sharding`` or device for all, or a tree
        of them that is a prefix of the result (``None`` in it: the default place). Numpy leaves
        are placed too, Python leaves never. When not given, an array goes where its target
        lives if that is committed or carries a sharding, else uncommitted to the default
        device, however many devices wrote it.

    Raises:
      CheckpointError: nothing there or not a checkpoint; a file missing, extra, truncated or
        altered by as little as a bit; an unknown format version; leaves, shapes, dtypes or
        static fields that differ from ``target`` (all named at once); a 64-bit leaf that would
        become a jax array while ``jax_enable_x64`` is off.
    """
    where = _locate(path)
    manifest = _verify_folder(where)
    entries = manifest["leaves"]
    if target is None:
        numbered = _decode_structure(manifest["structure"])
        order, structure = jax.tree.flatten(numbered)
        wanted = [None] * len(order)
        spread_over = numbered
    else:
        wanted_by_path = flatten_with_paths(target)
        _compare_with_target(where, manifest, target, wanted_by_path)
        position = {entry["path"]: index for index, entry in enumerate(entries)}
        order = [position[name] for name in wanted_by_path]
        wanted = list(wanted_by_path.values())
        structure = jax.tree.structure(target)
        spread_over = target
    places = _spread(sharding, spread_over, len(order))
    plans = {
        index: _plan(entries[index], leaf, place)
        for index, leaf, place in zip(order, wanted, places)
    }
    _check_width(where, entries, plans)

    # Each leaf is placed as it is read, so the host never holds more than a batch of copies.
    leaves = {index: _finish(data, entries[index], *plans[index])
              for index, data in _without_file(entries)}
    for index, data in _read_arrays(where / _ARRAYS, entries):
        leaves[index] = _finish(data, entries[index], *plans[index])
    return structure.unflatten([leaves[index] for index in order])


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the checkpoint at ``path``, after a check of its own checksum.

    Keys: ``format``, ``version``, ``written_by`` (library versions), ``metadata``,
    ``structure``, ``types`` (NamedTuples and dataclasses with static fields), ``leaves``,
    ``files``. The array files are not looked at; ``verify`` does that.

    Raises:
      CheckpointError: no checkpoint, a damaged manifest, or an unknown version.
    """
    return _load_manifest(_locate(path))


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read every file of the checkpoint at ``path`` and compare it with the manifest.

    Returns the manifest. Loads no array and does not import Orbax.

    Raises:
      CheckpointError: names every file that is missing, extra, truncated or altered.
    """
    return _verify_folder(_locate(path))


# -- paths ---------------------------------------------------------------------------------


def _local_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path: expected a str or path, got {path!r}")
    if "://" in text:
        raise ValueError(f"path: expected a local path, got {text!r}")
    # Orbax wants absolute paths, and a link must be written through, not replaced.
    return Path(text).expanduser().resolve()


def _sibling(final: Path, role: str) -> Path:
    return final.parent / f".{final.name}.{role}-{secrets.token_hex(4)}"


def _moved_aside(final: Path) -> list[Path]:
    """Old checkpoints that an interrupted overwrite left beside ``final``, newest first."""
    prefix = f".{final.name}.replaced-"
    if not final.parent.is_dir():
        return []
    found = [p for p in final.parent.iterdir() if p.name.startswith(prefix)]
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)


def _locate(path: str | os.PathLike[str]) -> Path:
    final = _local_path(path)
    if not os.path.lexists(final):
        for aside in _moved_aside(final):
            warnings.warn(
                f"{final}: an overwrite was interrupted; using the checkpoint that it was to "
                f"replace, {aside}",
                stacklevel=3,
            )
            return aside
        raise CheckpointError(f"{final}: no checkpoint here, the path does not exist")
    if not (final / _MANIFEST).is_file() and not (final / _CHECKSUM).is_file():
        orbax = any((final / name).exists() for name in ("_CHECKPOINT_METADATA", "_METADATA"))
        hint = " (an Orbax checkpoint without our manifest: restore it with Orbax)" if orbax else ""
        raise CheckpointError(f"{final}: not a checkpoint, it has no {_MANIFEST}{hint}")
    return final


def _refuse_to_replace(final: Path, overwrite: bool) -> None:
    if not os.path.lexists(final):
        aside = _moved_aside(final)
        if aside and not overwrite:
            raise FileExistsError(
                f"{final}: an interrupted overwrite left its old checkpoint at {aside[0]}; move it "
                "back, or pass overwrite=True to replace it"
            )
        return
    if not overwrite:
        raise FileExistsError(f"{final} exists; pass overwrite=True to replace it")
    if not final.is_dir() or (any(final.iterdir()) and not (final / _MANIFEST).exists()):
        raise FileExistsError(f"{final} exists and is not a checkpoint; it is never replaced")


def _rename(source: Path, destination: Path) -> None:
    os.rename(source, destination)


def _move_into_place(work: Path, final: Path, overwrite: bool) -> None:
    aside = None
    if overwrite and os.path.lexists(final):
        aside = _sibling(final, "replaced")
        _rename(final, aside)
    try:
        _rename(work, final)
    except BaseException as error:
        if aside is not None and not os.path.lexists(final):
            _rename(aside, final)
        if isinstance(error, OSError) and aside is None and os.path.lexists(final):
            raise FileExistsError(f"{final} appeared while the checkpoint was written") from error
        raise
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Ask the system to bring a file or a folder to the disk, where it knows how to."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# -- the manifest --------------------------------------------------------------------------


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    content = json.dumps(manifest, indent=1).encode()
    for name, data in ((_MANIFEST, content), (_CHECKSUM, _checksum_line(content))):
        (folder / name).write_bytes(data)
        _sync(folder / name)
    _sync(folder)


def _checksum_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {_MANIFEST}\n".encode()


def _load_manifest(folder: Path) -> dict[str, Any]:
    try:
        content = (folder / _MANIFEST).read_bytes()
        checksum = (folder / _CHECKSUM).read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: missing file {Path(error.filename).name}") from error
    if checksum != _checksum_line(content):
        raise CheckpointError(f"{folder}: {_MANIFEST} is damaged, its checksum does not match")
    try:
        manifest = json.loads(content)
        name, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {_MANIFEST} is not a checkpoint manifest") from error
    if name != FORMAT or version != VERSION:
        raise CheckpointError(
            f"{folder}: unknown format {name!r} version {version!r}; this library reads "
            f"{FORMAT!r} version {VERSION}"
        )
    return manifest


def _files_below(folder: Path) -> list[str]:
    below = (p for p in (folder / _ARRAYS).rglob("*") if not p.is_dir())
    return sorted(p.relative_to(folder).as_posix() for p in below)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file_table(folder: Path) -> dict[str, dict[str, Any]]:
    table = {}
    for name in _files_below(folder):
        file = folder / name
        table[name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        _sync(file)
    for directory in (folder / _ARRAYS).rglob("*"):
        if directory.is_dir():
            _sync(directory)
    return table


def _verify_folder(folder: Path) -> dict[str, Any]:
    manifest = _load_manifest(folder)
    files, present = manifest["files"], set(_files_below(folder))
    problems = [f"{name}: missing" for name in sorted(files.keys() - present)]
    problems += [f"{name}: not in the manifest" for name in sorted(present - files.keys())]
    for name in sorted(files.keys() & present):
        size, file = files[name]["size"], folder / name
        if file.stat().st_size != size:
            problems.append(f"{name}: {file.stat().st_size} bytes, expected {size}")
        elif _sha256(file) != files[name]["sha256"]:
            problems.append(f"{name}: damaged, its SHA-256 does not match")
    if problems:
        raise CheckpointError(_listing(f"{folder}: the checkpoint is damaged", problems))
    return manifest


def _listing(headline: str, problems: list[str]) -> str:
    return headline + ":\n  " + "\n  ".join(problems)


# -- describing a tree ---------------------------------------------------------------------


def _describe(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest without its file table, and the arrays to store by name."""
    entries, arrays, problems = [], {}, []
    for name, leaf in flatten_with_paths(tree).items():
        try:
            entry, data = _describe_leaf(name, leaf)
        except TypeError as error:
            problems.append(str(error))
            continue
        entries.append(entry)
        if data is not None:
            arrays[name] = data
    if problems:
        raise TypeError(_listing("tree: leaves that a checkpoint cannot hold", problems))
    counter = iter(range(len(entries)))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {
            "fadex": __version__, "jax": jax.__version__, "orbax": version("orbax-checkpoint"),
        },
        "metadata": None,
        "structure": _encode_structure(to_pure_dict(tree, lambda leaf: next(counter))),
        "types": list(typed_nodes(tree)),
        "leaves": entries,
        "files": {},
    }
    return manifest, arrays


def _describe_leaf(name: str, leaf: Any) -> tuple[dict[str, Any], Any]:
    where = f"{name or '(the root)'}: "
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{where}a traced value; save outside of jit")
    entry: dict[str, Any] = {"path": name}
    if is_prng_key(leaf) and isinstance(leaf, jax.Array):
        impl = jax.random.key_impl(leaf)
        if not isinstance(impl, str):
            raise TypeError(f"{where}a PRNG key of the unregistered kind {impl}")
        entry |= {"kind": "key", "dtype": str(leaf.dtype), "shape": list(leaf.shape), "impl": impl}
        data = jax.random.key_data(leaf)
        entry["data"] = {"dtype": data.dtype.name, "shape": list(data.shape)}
    elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        kind = "jax" if isinstance(leaf, jax.Array) else \
            "numpy" if isinstance(leaf, np.ndarray) else "numpy scalar"
        dtype = np.dtype(leaf.dtype)
        # Custom dtypes (bfloat16, int4, ...) have kind 'V' like records, but a type of their own.
        if dtype.kind not in "biufcV" or dtype.fields or dtype.type is np.void:
            raise TypeError(f"{where}dtype {dtype} is not numeric")
        entry |= {"kind": kind, "dtype": dtype.name, "shape": list(leaf.shape)}
        if kind == "jax" and leaf.weak_type:
            entry["weak_type"] = True
        data = leaf if kind == "jax" else np.asarray(leaf)
        if dtype.name not in _STORED_AS_IS:
            data = _as_bytes(data)
            entry["data"] = {"dtype": "uint8", "shape": list(data.shape)}
    elif type(leaf).__name__ in _PYTHON_LEAVES and type(leaf).__module__ == "builtins":
        text = leaf.hex() if isinstance(leaf, bytes) else str(leaf)
        return entry | {"kind": "python", "type": type(leaf).__name__, "value": text}, None
    else:
        raise TypeError(f"{where}{type(leaf).__module__}.{type(leaf).__qualname__}")
    if isinstance(data, jax.Array) and not data.is_fully_addressable:
        raise TypeError(f"{where}an array spread over several processes")
    # Orbax refuses arrays without elements; the manifest alone holds them.
    return entry, (data if data.size else None)


def _as_bytes(array: Any) -> np.ndarray:
    array = np.ascontiguousarray(np.asarray(array))
    itemsize = array.dtype.itemsize
    return array.reshape(-1).view(np.uint8).reshape(*array.shape, itemsize)


def _dtype_of(name: str) -> np.dtype:
    return np.dtype(name)  # ml_dtypes, which JAX imports, has registered the narrow ones


def _stored(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of what lies in the Orbax files for a leaf, if anything does."""
    if entry["kind"] == "python":
        return None
    data = entry.get("data", entry)
    shape = tuple(data["shape"])
    return (data["dtype"], shape) if math.prod(shape) else None


def _encode_structure(node: Any) -> Any:
    if node is None or isinstance(node, int):
        return node
    if isinstance(node, dict):
        return {"dict": [[_encode_key(k), _encode_structure(v)] for k, v in node.items()]}
    return {type(node).__name__: [_encode_structure(child) for child in node]}


def _encode_key(key: Any) -> Any:
    if isinstance(key, tuple):
        return {"tuple": [_encode_key(part) for part in key]}
    return key if key is None or type(key) in (str, int, bool, float) else str(key)


def _decode_structure(node: Any) -> Any:
    """The plain tree with the index of its manifest entry at every leaf."""
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {_decode_key(key): _decode_structure(child) for key, child in node["dict"]}
    kind, children = next(iter(node.items()))
    return {"list": list, "tuple": tuple}[kind](_decode_structure(child) for child in children)


def _decode_key(key: Any) -> Any:
    return tuple(_decode_key(part) for part in key["tuple"]) if isinstance(key, dict) else key


# -- comparing with a target ---------------------------------------------------------------


def _signature(dtype: str, shape: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _saved_text(entry: dict[str, Any]) -> str:
    if entry["kind"] == "python":
        return f"Python {entry['type']}"
    return _signature(entry["dtype"], entry["shape"])


def _target_text(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        name = str(leaf.dtype) if is_prng_key(leaf) else np.dtype(leaf.dtype).name
        return _signature(name, leaf.shape)
    return f"Python {type(leaf).__name__}"


def _fits(entry: dict[str, Any], leaf: Any) -> bool:
    if _saved_text(entry) == _target_text(leaf):
        return True
    # `jax.eval_shape` turns a Python number into a weakly typed scalar.
    numbers = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}
    return (
        entry["kind"] == "python"
        and isinstance(leaf, jax.ShapeDtypeStruct)
        and leaf.shape == ()
        and (leaf.weak_type or entry["type"] == "bool")
        and leaf.dtype.kind in numbers.get(entry["type"], "")
    )


def _compare_with_target(
    where: Path, manifest: dict[str, Any], target: Any, wanted: dict[str, Any]
) -> None:
    saved = {entry["path"]: entry for entry in manifest["leaves"]}
    problems = []
    for name in sorted(saved.keys() | wanted.keys()):
        shown = name or "(the root)"
        if name not in saved:
            problems.append(f"{shown}: not in the checkpoint; target {_target_text(wanted[name])}")
        elif name not in wanted:
            problems.append(f"{shown}: not in the target; checkpoint {_saved_text(saved[name])}")
        elif not _fits(saved[name], wanted[name]):
            have, want = _saved_text(saved[name]), _target_text(wanted[name])
            problems.append(f"{shown}: checkpoint {have}, target {want}")
    statics = {node["path"]: node["static"] for node in manifest["types"] if "static" in node}
    for node in typed_nodes(target):
        before = statics.get(node["path"], {})
        for field, want in node.get("static", {}).items():
            have = before.get(field)
            if have is not None and want is not None and have != want:
                shown = f"{node['path']}/{field}" if node["path"] else field
                problems.append(f"{shown} (static): checkpoint {have}, target {want}")
    if problems:
        raise CheckpointError(_listing(f"{where}: the checkpoint is not what target asks for",
                                       problems))


# -- placing leaves ------------------------------------------------------------------------


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, (jax.sharding.Sharding, jax.Device))


def _spread(sharding: Any, tree: Any, count: int) -> list[Any]:
    """One place per leaf of ``tree`` from a place for all, or from a prefix tree of places."""
    if _is_place(sharding):
        return [sharding] * count
    places: list[Any] = []

    def extend(place: Any, below: Any) -> None:
        if not _is_place(place):
            raise TypeError(f"sharding: expected Sharding, Device or None, got {place!r}")
        places.extend([place] * len(jax.tree.leaves(below)))

    try:
        jax.tree.map(extend, sharding, tree, is_leaf=_is_place)
    except ValueError as error:
        raise ValueError(f"sharding: not a prefix of the tree to restore: {error}") from error
    return places


def _plan(entry: dict[str, Any], leaf: Any, place: Any) -> tuple[str, Any]:
    """What a leaf is to become and where it goes; ``leaf`` is the target's, None without one."""
    kind = entry["kind"]
    if kind == "python":
        return kind, None
    if kind != "key" and leaf is not None:
        if isinstance(leaf, np.ndarray):
            kind = "numpy"
        else:
            kind = "numpy scalar" if isinstance(leaf, np.generic) else "jax"
    if place is None and isinstance(leaf, jax.Array):
        raw = jax.random.key_data(leaf) if kind == "key" else leaf
        place = leaf.sharding if raw.committed else None
    elif place is None:
        place = getattr(leaf, "sharding", None)
        if isinstance(getattr(place, "mesh", None), jax.sharding.AbstractMesh):
            place = None  # a mesh without devices says how, not where
    if place is not None and kind != "key":
        kind = "jax"
    return kind, place


def _check_width(where: Path, entries: list[dict[str, Any]], plans: dict[int, Any]) -> None:
    if jax.config.jax_enable_x64:
        return
    problems = [
        f"{entries[index]['path']}: {_saved_text(entries[index])}"
        for index, (kind, _) in plans.items()
        if kind == "jax" and entries[index]["dtype"] in ("float64", "int64", "uint64", "complex128")
    ]
    if problems:
        raise CheckpointError(_listing(
            f"{where}: 64-bit leaves need jax_enable_x64 to become jax arrays", problems))


def _without_file(entries: list[dict[str, Any]]) -> Iterator[tuple[int, Any]]:
    """Leaves, or their raw data, that the manifest alone holds, with the index of their entry."""
    for index, entry in enumerate(entries):
        if entry["kind"] == "python":
            yield index, _PYTHON_LEAVES[entry["type"]](entry["value"])
        elif _stored(entry) is None:
            data = entry.get("data", entry)
            yield index, np.zeros(data["shape"], _dtype_of(data["dtype"]))


def _finish(data: Any, entry: dict[str, Any], kind: str, place: Any) -> Any:
    if kind == "python":
        return data
    if kind == "key":
        keys = jax.random.wrap_key_data(jnp.asarray(data), impl=entry["impl"])
        return keys if place is None else jax.device_put(keys, place)
    if "data" in entry:
        data = data.reshape(-1).view(_dtype_of(entry["dtype"])).reshape(entry["shape"])
    if kind != "jax":
        return data[()] if kind == "numpy scalar" else data
    array = jax.device_put(data, place)
    if entry.get("weak_type") and array.dtype == jnp.result_type(array.dtype.type(0).item()):
        # Weakly typed storage, filled: JAX has no other public way to such an array.
        weak = jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)
        array = weak if place is None else jax.device_put(weak, place)
    return array


# -- Orbax ---------------------------------------------------------------------------------


def _write_arrays(folder: Path, arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(arrays))


def _read_arrays(folder: Path, entries: list[dict[str, Any]]) -> Iterator[tuple[int, np.ndarray]]:
    """Stored arrays as numpy, with the index of their entry, a batch of bounded size at a time."""
    batches: list[list[int]] = [[]]
    size = 0
    for index, entry in enumerate(entries):
        if (stored := _stored(entry)) is None:
            continue
        nbytes = math.prod(stored[1]) * _dtype_of(stored[0]).itemsize
        if batches[-1] and size + nbytes > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += nbytes
    if not batches[0]:
        return

    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for batch in batches:
            names = {entries[index]["path"]: index for index in batch}
            # As numpy: the devices that wrote the arrays need not exist here.
            how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            # Orbax takes 40% longer for the same leaves when told that more are there.
            some = len(batches) > 1
            found = checkpointer.restore(folder, ocp.args.PyTreeRestore(
                item=dict.fromkeys(names, 0) if some else None,
                restore_args=how, partial_restore=some))
            for name, index in names.items():
                array = np.asarray(found.pop(name))
                if (array.dtype.name, array.shape) != _stored(entries[index]):
                    raise CheckpointError(
                        f"{folder}: Orbax returned {name} as "
                        f"{_signature(array.dtype.name, array.shape)}, "
                        f"expected {_signature(*_stored(entries[index]))}"
                    )
                yield index, array


def _compare_with_source(work: Path, manifest: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Read a fresh checkpoint back; raise unless it holds the tree, bit for bit."""
    if json.dumps(_load_manifest(work)) != json.dumps(manifest):
        raise CheckpointError(f"{work}: the manifest reads back differently")
    for index, array in _read_arrays(work / _ARRAYS, manifest["leaves"]):
        name = manifest["leaves"][index]["path"]
        if not np.array_equal(leaf_bytes(array), leaf_bytes(arrays[name])):
            raise CheckpointError(f"{work}: {name} reads back differently; nothing was replaced")
