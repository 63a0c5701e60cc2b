"""State dicts, whatever the model: read files, check tensors by name, load and write back.

A layout is a list of :class:`Entry`: one leaf of our parameters each, with the names and shapes
of the stored tensors (torch's ``[out, in]`` matrices) that it is made of.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.core.pytree import flatten_with_paths, map_with_path


class Entry(NamedTuple):
    """One leaf of ours (its layers unstacked) and the stored tensors that it is made of."""

    path: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the stored tensors, whose rows follow one another
    form: str = "plain"  # or "matrix", or "patch"
    swapped: bool = False  # the halves of the rows are stored the other way round
    copies: tuple[str, ...] = ()  # further names that hold the same values


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read a weight file into a dictionary of numpy arrays.

    Args:
      path: a ``.safetensors`` file (any floating dtype, bfloat16 included) or an ``.npz``
        (which cannot hold bfloat16).

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: ``.safetensors`` without the safetensors package.
      ValueError: an unknown suffix; a file that is truncated, damaged or of another kind; a
        dtype that numpy cannot hold.

    Example:
      >>> import os, tempfile
      >>> import numpy as np
      >>> from fadex.models import read_state_dict
      >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
      >>> np.savez(path, w=np.ones(2, np.float32))
      >>> read_state_dict(path)
      {'w': array([1., 1.], dtype=float32)}
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        raise ValueError(
            f"path: expected a .safetensors or .npz file, got {str(path)!r}. A torch checkpoint "
            "can be rewritten once with safetensors.torch.save_file(torch.load(path, "
            "map_location='cpu', weights_only=True), 'weights.safetensors')"
        )
    if not path.is_file():
        raise FileNotFoundError(f"path: no weight file at {str(path)!r}")
    return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, NotImplementedError,
            zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"path: {str(path)!r} is not a sound npz file: {error}") from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {str(path)!r} needs the safetensors package: pip install 'fadex-jax[data]'"
        ) from error
    try:
        with safe_open(path, framework="numpy") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"path: {str(path)!r} is not a sound safetensors file: {error}") from error
    except (AttributeError, TypeError) as error:  # float8, or bfloat16 before safetensors 0.5
        raise ValueError(
            f"path: {str(path)!r} holds a dtype that this safetensors cannot give to numpy: {error}"
        ) from error


@dataclasses.dataclass
class Problems:
    """What is wrong with a state dict, collected before anything is raised."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    shapes: list[str] = dataclasses.field(default_factory=list)
    dtypes: list[str] = dataclasses.field(default_factory=list)
    values: list[str] = dataclasses.field(default_factory=list)
    differing: list[str] = dataclasses.field(default_factory=list)
    positions: list[str] = dataclasses.field(default_factory=list)

    def raise_if_any(self, model: str, layout: str, hint: str) -> None:
        titles = {
            "missing": "missing",
            "unexpected": "unexpected",
            "shapes": "wrong shape",
            "dtypes": "not floating point",
            "values": "not finite",
            "differing": f"a {model} has one embedder, but these copies differ",
            "positions": "not the fixed position table",
        }
        lines = [
            f"  {title} ({len(found)}): {', '.join(found)}"
            for field, title in titles.items() if (found := getattr(self, field))
        ]
        if lines:
            head = f"state_dict: does not fit this {model} in layout {layout!r}{hint}"
            raise ValueError("\n".join([head, *lines]))


# A name that only one layout has.
_MARKS = {
    "dit": "x_embedder.proj.weight",
    "diffusers_dit": "pos_embed.proj.weight",
    "flux_bfl": "img_in.weight",
    "flux_diffusers": "context_embedder.weight",
}


def layout_hint(state_dict: Mapping[str, Any], layout: str) -> str:
    """For error messages: the layout that the names look like, when it is another one."""
    for other, name in _MARKS.items():
        if other != layout and name in state_dict:
            return f" (the names look like layout={other!r})"
    return ""


def check_arrays(state_dict: Mapping[str, Any]) -> None:
    """Raise unless every value is an array."""
    for name, value in state_dict.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"state_dict[{name!r}]: expected an array, got {type(value).__name__}; a training "
                "checkpoint holds several state dicts (model, ema, ...), pass one of them"
            )


def load_leaves(
    entries: Sequence[Entry], state_dict: Mapping[str, Any], dtype: Any, problems: Problems
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Our leaves by path, as far as they are sound, and the names that were looked at."""
    taken: set[str] = set()
    leaves = {}
    for entry in entries:
        parts = []
        for name, shape in zip(entry.names, entry.shapes):
            taken.add(name)
            parts.append(_checked(state_dict, name, shape, dtype, problems))
        for copy in entry.copies:
            taken.add(copy)
            same = _checked(state_dict, copy, entry.shapes[0], dtype, problems)
            if same is not None and parts[0] is not None and not np.array_equal(same, parts[0]):
                problems.differing.append(f"{copy!r} from {entry.names[0]!r}")
        if all(part is not None for part in parts):
            leaves[entry.path] = _from_stored(entry, parts)
    return leaves, taken


def assemble(
    like: nnx.State, leaves: dict[str, np.ndarray], depths: Mapping[str, int]
) -> nnx.State:
    """Parameters like ``like`` from unstacked leaves; consumes ``leaves``.

    ``depths`` tells how many layers the groups of blocks have that may be stacked, by name.
    """

    def leaf(path: str, like: Any) -> jax.Array:
        # jnp.array copies: on a CPU jnp.asarray may share memory with the state dict.
        if path in leaves:
            return jnp.array(leaves.pop(path), like.dtype)
        group, rest = path.split("/", 1)
        layers = [leaves.pop(f"{group}/{i}/{rest}") for i in range(depths[group])]
        return jnp.array(np.stack(layers), like.dtype)

    return map_with_path(leaf, like)


def export_leaves(
    entries: Sequence[Entry], params: Any, like: nnx.State
) -> dict[str, np.ndarray]:
    """The stored tensors of ``params``, which must fit ``like``."""
    leaves = flatten_with_paths(params)
    wanted = {path: x.shape for path, x in flatten_with_paths(like).items()}
    wrong = [f"{path} (missing)" for path in wanted if path not in leaves]
    wrong += [f"{path} (unexpected)" for path in leaves if path not in wanted]
    wrong += [
        f"{path} {tuple(np.shape(leaf))}, expected {wanted[path]}"
        for path, leaf in leaves.items()
        if path in wanted and tuple(np.shape(leaf)) != wanted[path]
    ]
    if wrong:
        raise ValueError(f"params: do not fit the config: {'; '.join(wrong)}")
    leaves = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    out = {}
    for entry in entries:
        if entry.path in leaves:
            array = leaves[entry.path]
        else:
            group, layer, rest = entry.path.split("/", 2)
            array = leaves[f"{group}/{rest}"][int(layer)]
        parts = _to_stored(entry, array)
        out.update(zip(entry.names, parts))
        out.update({copy: parts[0].copy() for copy in entry.copies})
    return out


def count_blocks(state_dict: Mapping[str, Any], pattern: str) -> int:
    """How many indices fill ``{}`` in names that begin like ``pattern``."""
    prefix = pattern.partition("{}")[0]
    starts = (n[len(prefix):].partition(".")[0] for n in state_dict if n.startswith(prefix))
    return len({part for part in starts if part.isdigit()})


def shapes_of(
    state_dict: Mapping[str, Any], ranks: Mapping[str, int], layout: str, hint: str
) -> dict[str, tuple[int, ...]]:
    """Shapes of the named tensors, which must be there with that many axes."""
    missing = [name for name in ranks if name not in state_dict]
    if missing:
        raise ValueError(
            f"state_dict: layout {layout!r} needs {', '.join(map(repr, missing))}{hint}"
        )
    shapes = {name: tuple(np.shape(state_dict[name])) for name in ranks}
    for name, rank in ranks.items():
        if len(shapes[name]) != rank:
            raise ValueError(
                f"state_dict[{name!r}]: expected {rank} axes, got shape {shapes[name]}"
            )
    return shapes


def mlp_ratio(hidden: int, width: int) -> float:
    """A ratio that a config turns back into ``hidden``, rounding included."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _from_stored(entry: Entry, parts: list[np.ndarray]) -> np.ndarray:
    array = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if entry.swapped:
        array = np.roll(array, array.shape[0] // 2, axis=0)
    if entry.form == "patch":  # (D, C, p, q) -> (p, q, C, D): the order of our patches
        return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
    return array.T if entry.form == "matrix" else array


def _to_stored(entry: Entry, array: np.ndarray) -> list[np.ndarray]:
    if entry.form == "patch":
        rows, channels, p, q = entry.shapes[0]
        array = array.reshape(p, q, channels, rows).transpose(3, 2, 0, 1)
    elif entry.form == "matrix":
        array = array.T
    if entry.swapped:
        array = np.roll(array, array.shape[0] // 2, axis=0)
    cuts = list(itertools.accumulate(shape[0] for shape in entry.shapes))[:-1]
    # Copies, so that nothing written later shares memory with the parameters.
    return [np.array(part, order="C") for part in np.split(array, cuts)]


def _checked(
    state_dict: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any,
    problems: Problems,
) -> np.ndarray | None:
    """The named tensor as numpy in ``dtype``; None after a problem."""
    if name not in state_dict:
        problems.missing.append(repr(name))
        return None
    value = state_dict[name]
    if tuple(value.shape) != shape:
        problems.shapes.append(f"{name!r} {tuple(value.shape)}, expected {shape}")
        return None
    array = to_numpy(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        problems.dtypes.append(f"{name!r} {array.dtype}")
        return None
    with np.errstate(over="ignore"):  # what overflows is not finite, and said to be so
        array = array.astype(dtype, copy=False)
    if not np.isfinite(array).all():
        problems.values.append(f"{name!r} in {array.dtype}")
        return None
    return array


def to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor; numpy cannot read its bfloat16
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)
