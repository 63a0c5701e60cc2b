"""Weights of published DiTs, by name: read them, load them, write them back.

Two layouts of names are known, both with torch's ``[out, in]`` matrices:

* ``"dit"``: facebookresearch/DiT (``x_embedder.proj.weight``, ``blocks.0.attn.qkv.weight``);
* ``"diffusers_dit"``: ``DiTTransformer2DModel`` of diffusers. Queries, keys and values are
  separate there, and every block holds a copy of the time and label embedders. A DiT has one
  of each, so the copies must agree.

The same weights do not compute the same function in both. diffusers spaces the frequencies
of the time embedding by ``10000^(-i / (half - 1))``, the original and :class:`DiT` by
``10000^(-i / half)``: at ``t = 999`` some angles are off by several radians.
:func:`load_dit` builds the model with the frequencies of the layout unless told otherwise.
Smaller: diffusers adds ``norm_eps`` (1e-5 by default) in the norm before the MLP where the
original and we add 1e-6, and scales positions when the input is not of its ``sample_size``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.core.checks import check_choice, check_int
from fadex.core.pytree import flatten_with_paths, map_with_path
from fadex.models.dit import DiT, DiTConfig
from fadex.models.layers import sincos_2d

__all__ = [
    "LAYOUTS",
    "dit_config_from_state_dict",
    "export_state_dict",
    "load_dit",
    "load_state_dict",
    "read_state_dict",
]

LAYOUTS = ("dit", "diffusers_dit")

# Our layer -> stored layers, whose rows follow one another in ours.
_EMBEDDERS = "transformer_blocks.{}.norm1.emb."
_ROOT = {
    "dit": {
        "patch_embed": ("x_embedder.proj",),
        "time_embed/fc1": ("t_embedder.mlp.0",),
        "time_embed/fc2": ("t_embedder.mlp.2",),
        "class_embed": ("y_embedder.embedding_table",),
        "final_modulation": ("final_layer.adaLN_modulation.1",),
        "final_linear": ("final_layer.linear",),
    },
    "diffusers_dit": {
        "patch_embed": ("pos_embed.proj",),
        "time_embed/fc1": (_EMBEDDERS + "timestep_embedder.linear_1",),
        "time_embed/fc2": (_EMBEDDERS + "timestep_embedder.linear_2",),
        "class_embed": (_EMBEDDERS + "class_embedder.embedding_table",),
        "final_modulation": ("proj_out_1",),
        "final_linear": ("proj_out_2",),
    },
}
_BLOCK = {
    "dit": {
        "attn/qkv": ("blocks.{}.attn.qkv",),
        "attn/proj": ("blocks.{}.attn.proj",),
        "mlp/fc1": ("blocks.{}.mlp.fc1",),
        "mlp/fc2": ("blocks.{}.mlp.fc2",),
        "modulation": ("blocks.{}.adaLN_modulation.1",),
    },
    "diffusers_dit": {
        "attn/qkv": tuple("transformer_blocks.{}.attn1.to_" + part for part in "qkv"),
        "attn/proj": ("transformer_blocks.{}.attn1.to_out.0",),
        "mlp/fc1": ("transformer_blocks.{}.ff.net.0.proj",),
        "mlp/fc2": ("transformer_blocks.{}.ff.net.2",),
        "modulation": ("transformer_blocks.{}.norm1.linear",),
    },
}
# Fixed position tables that files may hold beside the weights.
_POSITIONS = {"dit": "pos_embed", "diffusers_dit": "pos_embed.pos_embed"}


class _Entry(NamedTuple):
    """One leaf of ours (its layers unstacked) and the stored tensors that it is made of."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]  # of each stored tensor
    form: str  # "matrix", "patch" or "plain"
    copies: tuple[str, ...]  # further names that hold the same values


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
      >>> from fadex.models.convert import read_state_dict
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


def dit_config_from_state_dict(
    state_dict: Mapping[str, Any], *, num_heads: int, layout: str = "dit", **overrides: Any
) -> DiTConfig:
    """The :class:`DiTConfig` that fits a state dict, read off its shapes.

    Args:
      state_dict: names to arrays; only names and shapes are read.
      num_heads: heads, which no shape shows (16 for DiT-L and DiT-XL).
      layout: ``"dit"`` or ``"diffusers_dit"``.
      **overrides: fields of the config. By default ``time_scale`` is 1 (these models take
        timestep indices), and the last row of the label table is the null label; without
        one give ``class_dropout=0.0``.

    Raises:
      ValueError: names that the sizes are read from are missing, or contradict one another.
    """
    check_choice("layout", layout, LAYOUTS)
    num_heads = check_int("num_heads", num_heads, minimum=1)
    root = {layer: names[0].format(0) + ".weight" for layer, names in _ROOT[layout].items()}
    fc1 = _BLOCK[layout]["mlp/fc1"][0] + ".weight"
    prefix = fc1.partition("{}")[0]
    blocks = {
        part for name in state_dict
        if name.startswith(prefix) and (part := name[len(prefix):].partition(".")[0]).isdigit()
    }
    wanted = {name: 2 for name in (root["class_embed"], root["final_linear"], fc1.format(0))}
    wanted[root["patch_embed"]] = 4
    missing = [name for name in wanted if name not in state_dict]
    if missing:
        raise ValueError(
            f"state_dict: layout {layout!r} needs {', '.join(map(repr, missing))}"
            + _other_layout(state_dict, layout)
        )
    shapes = {name: tuple(np.shape(state_dict[name])) for name in wanted}
    for name, rank in wanted.items():
        if len(shapes[name]) != rank:
            raise ValueError(
                f"state_dict[{name!r}]: expected {rank} axes, got shape {shapes[name]}"
            )
    width, channels, patch, patch_columns = shapes[root["patch_embed"]]
    out_channels, rest = divmod(shapes[root["final_linear"]][0], patch * patch)
    if patch != patch_columns or rest or out_channels not in (channels, 2 * channels):
        raise ValueError(
            f"state_dict: expected a square patch and as many or twice as many output channels "
            f"as inputs, got {root['patch_embed']!r} {shapes[root['patch_embed']]} and "
            f"{root['final_linear']!r} {shapes[root['final_linear']]}"
        )
    rows = shapes[root["class_embed"]][0]
    fields = dict(
        patch_size=patch,
        in_channels=channels,
        depth=len(blocks),
        width=width,
        num_heads=num_heads,
        mlp_ratio=_mlp_ratio(shapes[fc1.format(0)][0], width),
        num_classes=rows - (overrides.get("class_dropout", 0.1) > 0),
        learn_sigma=out_channels == 2 * channels,
        time_scale=1.0,
    )
    return DiTConfig(**{**fields, **overrides})


def _mlp_ratio(hidden: int, width: int) -> float:
    """A ratio that a :class:`DiTConfig` turns back into ``hidden``, rounding included."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def load_dit(
    state_dict: Mapping[str, Any],
    *,
    num_heads: int,
    layout: str = "dit",
    time_frequencies: str | None = None,
    strict: bool = True,
    **overrides: Any,
) -> DiT:
    """A :class:`DiT` of the right size with the given weights.

    Args:
      state_dict: names to arrays, from :func:`read_state_dict` or a torch module.
      num_heads, layout: as in :func:`dit_config_from_state_dict`; ``overrides`` too, for
        instance ``scan_layers=True`` or ``param_dtype=jnp.bfloat16``.
      time_frequencies: ``"dit"`` or ``"diffusers"``; by default those of the layout, so that
        the model computes what its origin computes. Weights that were trained as a DiT and
        only stored in the other layout want ``"dit"``.
      strict: as in :func:`load_state_dict`.

    Raises:
      ValueError: see :func:`dit_config_from_state_dict` and :func:`load_state_dict`.

    Example:
      The published weights of DiT-XL/2, read from a file:

      >>> from fadex.models import from_nnx
      >>> from fadex.models.convert import load_dit, read_state_dict
      >>> weights = read_state_dict("DiT-XL-2-256x256.safetensors")  # doctest: +SKIP
      >>> model = load_dit(weights, num_heads=16)                    # doctest: +SKIP
      >>> denoiser, params = from_nnx(model)                         # doctest: +SKIP

      A small one, by way of its state dict:

      >>> from flax import nnx
      >>> from fadex.models import DiT, DiTConfig
      >>> from fadex.models.convert import export_state_dict
      >>> config = DiTConfig(depth=2, width=32, num_heads=2, in_channels=1, num_classes=10)
      >>> weights = export_state_dict(DiT(config, rngs=nnx.Rngs(0)))
      >>> load_dit(weights, num_heads=2, time_scale=1000.0).config == config
      True
    """
    if time_frequencies is None:
        time_frequencies = "dit" if layout == "dit" else "diffusers"
    check_choice("time_frequencies", time_frequencies, ("dit", "diffusers"))
    if time_frequencies == "diffusers":
        # diffusers spaces the 128 frequencies so that the last is 1 / 10000 exactly:
        # 10000^(-i / 127) where DiT has 10000^(-i / 128).
        overrides = {"time_max_period": 1e4 ** (128 / 127), **overrides}
    config = dit_config_from_state_dict(
        state_dict, num_heads=num_heads, layout=layout, **overrides
    )
    model = nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, load_state_dict(config, state_dict, layout=layout, strict=strict))
    return model


def load_state_dict(
    model: DiT | DiTConfig,
    state_dict: Mapping[str, Any],
    *,
    layout: str = "dit",
    strict: bool = True,
) -> nnx.State:
    """The parameters of a DiT from a state dict; nothing is changed in place.

    Args:
      model: the DiT, or its config; with ``scan_layers`` the blocks come out stacked.
      state_dict: names to arrays (numpy, jax, or torch tensors) of any floating dtype; they
        are cast to the config's ``param_dtype``.
      layout: ``"dit"`` or ``"diffusers_dit"``.
      strict: False ignores names that the layout does not have. Everything else raises in
        either case.

    Returns:
      The parameters as ``from_nnx(model)[1]`` would give them: for
      ``denoiser.apply(params, ...)``, ``nnx.merge`` and ``nnx.update(model, params)``.

    Raises:
      ValueError: all problems in one message: names that are missing or unexpected, shapes,
        dtypes, values that are not finite, copies of an embedder that differ from block to
        block, a stored position table that is not the fixed one.
      TypeError: a value is no array, as in a training checkpoint of several state dicts.

    Example:
      >>> from flax import nnx
      >>> from fadex.core.pytree import tree_hash
      >>> from fadex.models import DiT, DiTConfig
      >>> from fadex.models.convert import export_state_dict, load_state_dict
      >>> config = DiTConfig(depth=2, width=32, num_heads=2, in_channels=1, num_classes=10)
      >>> model = DiT(config, rngs=nnx.Rngs(0))
      >>> params = load_state_dict(model, export_state_dict(model))
      >>> tree_hash(params) == tree_hash(nnx.state(model))
      True
    """
    check_choice("layout", layout, LAYOUTS)
    config = _config_of(model)
    for name, value in state_dict.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"state_dict[{name!r}]: expected an array, got {type(value).__name__}; a training "
                "checkpoint holds several state dicts (model, ema, ...), pass one of them"
            )
    entries = list(_entries(config, layout))
    problems = _Problems()
    taken: set[str] = set()
    leaves = {}
    for entry in entries:
        parts = []
        for name in entry.names:
            taken.add(name)
            parts.append(_checked(state_dict, name, entry.shape, config.param_dtype, problems))
        for copy in entry.copies:
            taken.add(copy)
            same = _checked(state_dict, copy, entry.shape, config.param_dtype, problems)
            if same is not None and parts[0] is not None and not np.array_equal(same, parts[0]):
                problems.differing.append(f"{copy!r} from {entry.names[0]!r}")
        if all(part is not None for part in parts):
            leaves[entry.path] = _from_stored(entry, parts)
    if _POSITIONS[layout] in state_dict:
        taken.add(_POSITIONS[layout])
        _check_positions(state_dict, _POSITIONS[layout], config.width, problems)
    if strict:
        problems.unexpected += [repr(name) for name in state_dict if name not in taken]
    problems.raise_if_any(layout, _other_layout(state_dict, layout))

    def leaf(path: str, like: Any) -> jax.Array:
        # jnp.array copies: on a CPU jnp.asarray may share memory with the state dict.
        if path in leaves:
            return jnp.array(leaves.pop(path), like.dtype)
        rest = path.removeprefix("blocks/")
        layers = [leaves.pop(f"blocks/{i}/{rest}") for i in range(config.depth)]
        return jnp.array(np.stack(layers), like.dtype)

    return map_with_path(leaf, _abstract_params(config))


def export_state_dict(
    model: DiT | DiTConfig,
    params: Any = None,
    *,
    layout: str = "dit",
    input_size: int | None = None,
) -> dict[str, np.ndarray]:
    """The inverse of :func:`load_state_dict`, bit for bit.

    Args:
      model: the DiT, or its config when ``params`` are given.
      params: its parameters, an ``nnx.State`` or nested dictionaries; the model's own by
        default.
      layout: ``"dit"`` or ``"diffusers_dit"``.
      input_size: side of the latents, in latent pixels. When given, the fixed position table
        is written too: the original's ``load_state_dict`` asks for it.

    Returns:
      C-contiguous numpy arrays in the dtype of the parameters, as
      ``safetensors.numpy.save_file`` wants them.

    Raises:
      ValueError: parameters that do not fit the config, all named at once.
    """
    check_choice("layout", layout, LAYOUTS)
    config = _config_of(model)
    if params is None:
        if not isinstance(model, nnx.Module):
            raise ValueError("params: required with a DiTConfig, which holds no weights")
        params = nnx.state(model, nnx.Param)
    leaves = flatten_with_paths(params)
    wanted = {path: x.shape for path, x in flatten_with_paths(_abstract_params(config)).items()}
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
    for entry in _entries(config, layout):
        if entry.path in leaves:
            array = leaves[entry.path]
        else:
            _, layer, rest = entry.path.split("/", 2)
            array = leaves[f"blocks/{rest}"][int(layer)]
        parts = _to_stored(entry, array)
        out.update(zip(entry.names, parts))
        out.update({copy: parts[0].copy() for copy in entry.copies})
    if input_size is not None:
        side, rest = divmod(check_int("input_size", input_size, minimum=1), config.patch_size)
        if rest:
            raise ValueError(
                f"input_size: expected a multiple of patch_size={config.patch_size}, "
                f"got {input_size}"
            )
        out[_POSITIONS[layout]] = sincos_2d(side, side, config.width)[None]
    return out


def _config_of(model: DiT | DiTConfig) -> DiTConfig:
    if isinstance(model, DiTConfig):
        return model
    if isinstance(model, DiT):
        return model.config
    raise TypeError(f"model: expected a DiT or a DiTConfig, got {type(model).__name__}")


@functools.lru_cache(maxsize=16)
def _abstract_params(config: DiTConfig) -> nnx.State:
    """Shapes and dtypes of the parameters; shared between calls, never changed."""
    return nnx.state(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))), nnx.Param)


def _entries(config: DiTConfig, layout: str) -> Iterator[_Entry]:
    """Every leaf of the DiT, blocks one by one, with where it is stored."""
    unstacked = dataclasses.replace(config, scan_layers=False)
    for path, like in flatten_with_paths(_abstract_params(unstacked)).items():
        layer, _, leaf = path.rpartition("/")
        if layer.startswith("blocks/"):
            _, index, layer = layer.split("/", 2)
            names, copies = _BLOCK[layout][layer], ()
        else:
            names, index = _ROOT[layout][layer], "0"
            copies = range(1, config.depth) if "{}" in names[0] else ()
        suffix = ".bias" if leaf == "bias" else ".weight"
        form = "plain"
        shape = like.shape
        if leaf == "kernel" and layer == "patch_embed":
            form, p = "patch", config.patch_size
            shape = (config.width, config.in_channels, p, p)
        elif leaf == "kernel":
            form, shape = "matrix", shape[::-1]
        yield _Entry(
            path=path,
            names=tuple(name.format(index) + suffix for name in names),
            shape=(shape[0] // len(names), *shape[1:]),
            form=form,
            copies=tuple(names[0].format(i) + suffix for i in copies),
        )


def _from_stored(entry: _Entry, parts: list[np.ndarray]) -> np.ndarray:
    array = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if entry.form == "patch":  # (D, C, p, q) -> (p, q, C, D): the order of our patches
        return array.transpose(2, 3, 1, 0).reshape(-1, array.shape[0])
    return array.T if entry.form == "matrix" else array


def _to_stored(entry: _Entry, array: np.ndarray) -> list[np.ndarray]:
    if entry.form == "patch":
        rows, channels, p, q = entry.shape
        array = array.reshape(p, q, channels, rows).transpose(3, 2, 0, 1)
    elif entry.form == "matrix":
        array = array.T
    # Copies, so that nothing written later shares memory with the parameters.
    return [np.array(part, order="C") for part in np.split(array, len(entry.names))]


@dataclasses.dataclass
class _Problems:
    """What is wrong with a state dict, collected before anything is raised."""

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    shapes: list[str] = dataclasses.field(default_factory=list)
    dtypes: list[str] = dataclasses.field(default_factory=list)
    values: list[str] = dataclasses.field(default_factory=list)
    differing: list[str] = dataclasses.field(default_factory=list)
    positions: list[str] = dataclasses.field(default_factory=list)

    def raise_if_any(self, layout: str, hint: str) -> None:
        titles = {
            "missing": "missing",
            "unexpected": "unexpected",
            "shapes": "wrong shape",
            "dtypes": "not floating point",
            "values": "not finite",
            "differing": "a DiT has one embedder, but these copies differ",
            "positions": "not the fixed position table",
        }
        lines = [
            f"  {title} ({len(found)}): {', '.join(found)}"
            for field, title in titles.items() if (found := getattr(self, field))
        ]
        if lines:
            head = f"state_dict: does not fit this DiT in layout {layout!r}{hint}"
            raise ValueError("\n".join([head, *lines]))


def _other_layout(state_dict: Mapping[str, Any], layout: str) -> str:
    for other in LAYOUTS:
        if other != layout and _ROOT[other]["patch_embed"][0] + ".weight" in state_dict:
            return f" (the names look like layout={other!r})"
    return ""


def _checked(
    state_dict: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any,
    problems: _Problems,
) -> np.ndarray | None:
    """The named tensor as numpy in ``dtype``; None after a problem."""
    if name not in state_dict:
        problems.missing.append(repr(name))
        return None
    value = state_dict[name]
    if tuple(value.shape) != shape:
        problems.shapes.append(f"{name!r} {tuple(value.shape)}, expected {shape}")
        return None
    array = _to_numpy(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        problems.dtypes.append(f"{name!r} {array.dtype}")
        return None
    with np.errstate(over="ignore"):  # what overflows is not finite, and said to be so
        array = array.astype(dtype, copy=False)
    if not np.isfinite(array).all():
        problems.values.append(f"{name!r} in {array.dtype}")
        return None
    return array


def _to_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a torch tensor; numpy cannot read its bfloat16
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _check_positions(
    state_dict: Mapping[str, Any], name: str, width: int, problems: _Problems
) -> None:
    """Compare a stored table ``[1, T, D]`` with ours for a square input, up to its rounding."""
    table = _to_numpy(state_dict[name])
    side = math.isqrt(table.shape[1]) if table.ndim == 3 else 0
    if table.shape != (1, side * side, width) or side == 0:
        problems.positions.append(f"{name!r} {table.shape}, expected (1, side^2, {width})")
        return
    if not jnp.issubdtype(table.dtype, jnp.floating):
        problems.positions.append(f"{name!r} has dtype {table.dtype}")
        return
    error = np.abs(table[0].astype(np.float64) - sincos_2d(side, side, width)).max()
    if not error <= max(1e-5, float(jnp.finfo(table.dtype).eps)):
        problems.positions.append(f"{name!r} differs from it by up to {error:.2g}")
