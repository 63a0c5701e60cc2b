"""Weights of published models, by name: read them, load them, write them back.

:func:`load_state_dict` and :func:`export_state_dict` serve both model types. For a DiT two
layouts of names are known (those of an MMDiT: :mod:`fadex.models.convert_flux`), both with
torch's ``[out, in]`` matrices:

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
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fadex.core.checks import check_choice, check_int
from fadex.core.pytree import flatten_with_paths
from fadex.models import convert_flux
from fadex.models.convert_flux import load_mmdit, mmdit_config_from_state_dict
from fadex.models.dit import DiT, DiTConfig
from fadex.models.layers import sincos_2d
from fadex.models.mmdit import MMDiT, MMDiTConfig
from fadex.models.state_dict import (
    Entry,
    Problems,
    assemble,
    check_arrays,
    count_blocks,
    export_leaves,
    layout_hint,
    load_leaves,
    mlp_ratio,
    read_state_dict,
    shapes_of,
    to_numpy,
)

__all__ = [
    "LAYOUTS",
    "dit_config_from_state_dict",
    "export_state_dict",
    "load_dit",
    "load_mmdit",
    "load_state_dict",
    "mmdit_config_from_state_dict",
    "read_state_dict",
]

DIT_LAYOUTS = ("dit", "diffusers_dit")
LAYOUTS = DIT_LAYOUTS + convert_flux.LAYOUTS

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
    check_choice("layout", layout, DIT_LAYOUTS)
    num_heads = check_int("num_heads", num_heads, minimum=1)
    root = {layer: names[0].format(0) + ".weight" for layer, names in _ROOT[layout].items()}
    fc1 = _BLOCK[layout]["mlp/fc1"][0] + ".weight"
    wanted = {name: 2 for name in (root["class_embed"], root["final_linear"], fc1.format(0))}
    wanted[root["patch_embed"]] = 4
    shapes = shapes_of(state_dict, wanted, layout, layout_hint(state_dict, layout))
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
        depth=count_blocks(state_dict, fc1),
        width=width,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio(shapes[fc1.format(0)][0], width),
        num_classes=rows - (overrides.get("class_dropout", 0.1) > 0),
        learn_sigma=out_channels == 2 * channels,
        time_scale=1.0,
    )
    return DiTConfig(**{**fields, **overrides})


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
    model: DiT | DiTConfig | MMDiT | MMDiTConfig,
    state_dict: Mapping[str, Any],
    *,
    layout: str | None = None,
    strict: bool = True,
) -> nnx.State:
    """The parameters of a model from a state dict; nothing is changed in place.

    Args:
      model: a DiT or an MMDiT, or its config; with ``scan_layers`` the blocks come out stacked.
      state_dict: names to arrays (numpy, jax, or torch tensors) of any floating dtype; they
        are cast to the config's ``param_dtype``.
      layout: ``"dit"`` (the default) or ``"diffusers_dit"`` for a DiT, ``"flux_bfl"`` (the
        default) or ``"flux_diffusers"`` for an MMDiT.
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
    config, layout = _config_and_layout(model, layout)
    if isinstance(config, MMDiTConfig):
        return convert_flux.load_params(config, state_dict, layout=layout, strict=strict)
    check_arrays(state_dict)
    problems = Problems()
    entries = list(_entries(config, layout))
    leaves, taken = load_leaves(entries, state_dict, config.param_dtype, problems)
    if _POSITIONS[layout] in state_dict:
        taken.add(_POSITIONS[layout])
        _check_positions(state_dict, _POSITIONS[layout], config.width, problems)
    if strict:
        problems.unexpected += [repr(name) for name in state_dict if name not in taken]
    problems.raise_if_any("DiT", layout, layout_hint(state_dict, layout))
    return assemble(_abstract_params(config), leaves, {"blocks": config.depth})


def export_state_dict(
    model: DiT | DiTConfig | MMDiT | MMDiTConfig,
    params: Any = None,
    *,
    layout: str | None = None,
    input_size: int | None = None,
) -> dict[str, np.ndarray]:
    """The inverse of :func:`load_state_dict`, bit for bit.

    Args:
      model: the model, or its config when ``params`` are given.
      params: its parameters, an ``nnx.State`` or nested dictionaries; the model's own by
        default.
      layout: as in :func:`load_state_dict`.
      input_size: of a DiT alone, the side of the latents, in latent pixels. When given, the
        fixed position table is written too: the original's ``load_state_dict`` asks for it.

    Returns:
      C-contiguous numpy arrays in the dtype of the parameters, as
      ``safetensors.numpy.save_file`` wants them.

    Raises:
      ValueError: parameters that do not fit the config, all named at once.
    """
    config, layout = _config_and_layout(model, layout)
    if params is None:
        if not isinstance(model, nnx.Module):
            name = "a DiTConfig" if isinstance(config, DiTConfig) else "an MMDiTConfig"
            raise ValueError(f"params: required with {name}, which holds no weights")
        params = nnx.state(model, nnx.Param)
    if isinstance(config, MMDiTConfig):
        if input_size is not None:
            raise ValueError(
                f"input_size: only a DiT has a position table, got {input_size} with an MMDiT"
            )
        return convert_flux.export_params(config, params, layout=layout)
    out = export_leaves(_entries(config, layout), params, _abstract_params(config))
    if input_size is not None:
        side, rest = divmod(check_int("input_size", input_size, minimum=1), config.patch_size)
        if rest:
            raise ValueError(
                f"input_size: expected a multiple of patch_size={config.patch_size}, "
                f"got {input_size}"
            )
        out[_POSITIONS[layout]] = sincos_2d(side, side, config.width)[None]
    return out


def _config_and_layout(model: Any, layout: str | None) -> tuple[DiTConfig | MMDiTConfig, str]:
    config = model.config if isinstance(model, (DiT, MMDiT)) else model
    if not isinstance(config, (DiTConfig, MMDiTConfig)):
        raise TypeError(
            "model: expected a DiT or a DiTConfig, an MMDiT or an MMDiTConfig, got "
            f"{type(model).__name__}"
        )
    allowed = DIT_LAYOUTS if isinstance(config, DiTConfig) else convert_flux.LAYOUTS
    return config, check_choice("layout", allowed[0] if layout is None else layout, allowed)


@functools.lru_cache(maxsize=16)
def _abstract_params(config: DiTConfig) -> nnx.State:
    """Shapes and dtypes of the parameters; shared between calls, never changed."""
    return nnx.state(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))), nnx.Param)


def _entries(config: DiTConfig, layout: str) -> Iterator[Entry]:
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
        yield Entry(
            path=path,
            names=tuple(name.format(index) + suffix for name in names),
            shapes=((shape[0] // len(names), *shape[1:]),) * len(names),
            form=form,
            copies=tuple(names[0].format(i) + suffix for i in copies),
        )


def _check_positions(
    state_dict: Mapping[str, Any], name: str, width: int, problems: Problems
) -> None:
    """Compare a stored table ``[1, T, D]`` with ours for a square input, up to its rounding."""
    table = to_numpy(state_dict[name])
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
