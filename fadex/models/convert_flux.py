"""Weights of FLUX and of other MMDiTs in its form, by name.

Two layouts of names are known, both with torch's ``[out, in]`` matrices:

* ``"flux_bfl"``: black-forest-labs/flux (``double_blocks.0.img_attn.qkv.weight``);
* ``"flux_diffusers"``: ``FluxTransformer2DModel`` of diffusers. Queries, keys and values are
  separate there, as is the MLP in the first map of a single block.

They compute the same function with two differences in storage that are undone here. BFL's
``final_layer.adaLN_modulation.1`` gives (shift, scale), diffusers' ``norm_out.linear`` (scale,
shift): every other modulation begins with the shift in both. And BFL's ``linear1`` of a single
block has the rows of ``to_q, to_k, to_v, proj_mlp`` one after another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from fadex.core.checks import check_choice
from fadex.core.pytree import flatten_with_paths
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
    shapes_of,
)

LAYOUTS = ("flux_bfl", "flux_diffusers")

_EMBEDDERS = "time_text_embed."
_ROOT = {
    "flux_bfl": {
        "img_in": ("img_in",),
        "txt_in": ("txt_in",),
        "time_embed/fc1": ("time_in.in_layer",),
        "time_embed/fc2": ("time_in.out_layer",),
        "pooled_embed/fc1": ("vector_in.in_layer",),
        "pooled_embed/fc2": ("vector_in.out_layer",),
        "guidance_embed/fc1": ("guidance_in.in_layer",),
        "guidance_embed/fc2": ("guidance_in.out_layer",),
        "final_modulation": ("final_layer.adaLN_modulation.1",),
        "final_linear": ("final_layer.linear",),
    },
    "flux_diffusers": {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_embed/fc1": (_EMBEDDERS + "timestep_embedder.linear_1",),
        "time_embed/fc2": (_EMBEDDERS + "timestep_embedder.linear_2",),
        "pooled_embed/fc1": (_EMBEDDERS + "text_embedder.linear_1",),
        "pooled_embed/fc2": (_EMBEDDERS + "text_embedder.linear_2",),
        "guidance_embed/fc1": (_EMBEDDERS + "guidance_embedder.linear_1",),
        "guidance_embed/fc2": (_EMBEDDERS + "guidance_embedder.linear_2",),
        "final_modulation": ("norm_out.linear",),
        "final_linear": ("proj_out",),
    },
}


def _prefixed(prefix: str, names: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        layer: tuple(prefix + part for part in ([found] if isinstance(found, str) else found))
        for layer, found in names.items()
    }


# Group of blocks -> layer of ours -> stored layers.
_BLOCKS = {
    "flux_bfl": {
        "double_blocks": _prefixed("double_blocks.{}.", {
            f"{stream}/{ours}": f"{stream}_{stored}"
            for stream in ("img", "txt")
            for ours, stored in {
                "modulation": "mod.lin",
                "qkv": "attn.qkv",
                "norm/query": "attn.norm.query_norm",
                "norm/key": "attn.norm.key_norm",
                "proj": "attn.proj",
                "mlp/fc1": "mlp.0",
                "mlp/fc2": "mlp.2",
            }.items()
        }),
        "single_blocks": _prefixed("single_blocks.{}.", {
            "modulation": "modulation.lin",
            "linear1": "linear1",
            "norm/query": "norm.query_norm",
            "norm/key": "norm.key_norm",
            "linear2": "linear2",
        }),
    },
    "flux_diffusers": {
        "double_blocks": _prefixed("transformer_blocks.{}.", {
            "img/modulation": "norm1.linear",
            "img/qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "img/norm/query": "attn.norm_q",
            "img/norm/key": "attn.norm_k",
            "img/proj": "attn.to_out.0",
            "img/mlp/fc1": "ff.net.0.proj",
            "img/mlp/fc2": "ff.net.2",
            "txt/modulation": "norm1_context.linear",
            "txt/qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "txt/norm/query": "attn.norm_added_q",
            "txt/norm/key": "attn.norm_added_k",
            "txt/proj": "attn.to_add_out",
            "txt/mlp/fc1": "ff_context.net.0.proj",
            "txt/mlp/fc2": "ff_context.net.2",
        }),
        "single_blocks": _prefixed("single_transformer_blocks.{}.", {
            "modulation": "norm.linear",
            "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
            "norm/query": "attn.norm_q",
            "norm/key": "attn.norm_k",
            "linear2": "proj_out",
        }),
    },
}


def mmdit_config_from_state_dict(
    state_dict: Mapping[str, Any], *, layout: str = "flux_bfl", **overrides: Any
) -> MMDiTConfig:
    """The :class:`MMDiTConfig` that fits a state dict, read off its names and shapes.

    Args:
      state_dict: names to arrays; only names and shapes are read.
      layout: ``"flux_bfl"`` or ``"flux_diffusers"``.
      **overrides: fields of the config. The number of heads is read off the norms of queries.
        What no shape shows is as in FLUX: ``patch_size`` 2 (1 where the channels are no multiple
        of 4), ``rope_axes`` (16, 56, 56), which other head sizes than 128 must give.

    Raises:
      ValueError: names that the sizes are read from are missing or contradict one another, or
        ``rope_axes`` must be given.
    """
    check_choice("layout", layout, LAYOUTS)
    root, blocks = _ROOT[layout], _BLOCKS[layout]
    double, single = blocks["double_blocks"], blocks["single_blocks"]
    matrices = {
        "img": root["img_in"], "txt": root["txt_in"], "pooled": root["pooled_embed/fc1"],
        "out": root["final_linear"], "mlp": double["img/mlp/fc1"], "single": single["linear2"],
    }
    names = {key: found[0].format(0) + ".weight" for key, found in matrices.items()}
    scale = double["img/norm/query"][0].format(0) + _scale_suffix(layout)
    ranks = {**dict.fromkeys(names.values(), 2), scale: 1}
    shapes = shapes_of(state_dict, ranks, layout, layout_hint(state_dict, layout))
    of = {key: shapes[name] for key, name in names.items()}
    width, channels = of["img"]
    head = shapes[scale][0]
    if not head or width % head or any(of[key][0] != width for key in ("txt", "single", "pooled")):
        found = ", ".join(f"{name!r} {shapes[name]}" for name in ranks)
        raise ValueError(f"state_dict: the widths contradict one another: {found}")
    outputs = of["out"][0]
    fields = dict(
        patch_size=2 if channels % 4 == 0 and outputs % 4 == 0 else 1,
        in_channels=channels,
        out_channels=None if outputs == channels else outputs,
        double_depth=count_blocks(state_dict, double["img/qkv"][0]),
        single_depth=count_blocks(state_dict, single["linear2"][0]),
        width=width,
        num_heads=width // head,
        mlp_ratio=mlp_ratio(of["mlp"][0], width),
        text_width=of["txt"][1],
        pooled_width=of["pooled"][1],
        guidance_embed=root["guidance_embed/fc1"][0] + ".weight" in state_dict,
    )
    if head != 128 and "rope_axes" not in overrides:
        raise ValueError(
            f"rope_axes: no shape shows them, and only heads of 128 have those of FLUX; give "
            f"three even sizes that sum to {head}"
        )
    return MMDiTConfig(**{**fields, **overrides})


def load_mmdit(
    state_dict: Mapping[str, Any], *, layout: str = "flux_bfl", strict: bool = True,
    **overrides: Any,
) -> MMDiT:
    """An :class:`MMDiT` of the right size with the given weights.

    Args:
      state_dict: names to arrays, from :func:`~fadex.models.read_state_dict` or a torch module.
      layout, overrides: as in :func:`mmdit_config_from_state_dict`; for instance
        ``scan_layers=True`` or ``param_dtype=jnp.bfloat16, dtype=jnp.bfloat16``.
      strict: as in :func:`~fadex.models.load_state_dict`.

    Raises:
      ValueError: see :func:`mmdit_config_from_state_dict` and
        :func:`~fadex.models.load_state_dict`.

    Example:
      The published weights of FLUX.1, read from a file:

      >>> from fadex.models import load_mmdit, read_state_dict
      >>> weights = read_state_dict("flux1-schnell.safetensors")             # doctest: +SKIP
      >>> model = load_mmdit(weights, scan_layers=True,
      ...                    dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)   # doctest: +SKIP

      A small one, by way of its state dict:

      >>> from flax import nnx
      >>> from fadex.models import MMDiT, MMDiTConfig, export_state_dict
      >>> config = MMDiTConfig(double_depth=1, single_depth=1, width=16, num_heads=2, in_channels=4,
      ...                      text_width=8, pooled_width=8, rope_axes=(2, 2, 4))
      >>> weights = export_state_dict(MMDiT(config, rngs=nnx.Rngs(0)), layout="flux_diffusers")
      >>> load_mmdit(weights, layout="flux_diffusers", rope_axes=(2, 2, 4)).config == config
      True
    """
    config = mmdit_config_from_state_dict(state_dict, layout=layout, **overrides)
    model = nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, load_params(config, state_dict, layout=layout, strict=strict))
    return model


def load_params(
    config: MMDiTConfig, state_dict: Mapping[str, Any], *, layout: str, strict: bool
) -> nnx.State:
    """:func:`fadex.models.load_state_dict` of an MMDiT."""
    check_arrays(state_dict)
    problems = Problems()
    entries = list(_entries(config, layout))
    leaves, taken = load_leaves(entries, state_dict, config.param_dtype, problems)
    if strict:
        problems.unexpected += [repr(name) for name in state_dict if name not in taken]
    problems.raise_if_any("MMDiT", layout, layout_hint(state_dict, layout))
    depths = {"double_blocks": config.double_depth, "single_blocks": config.single_depth}
    return assemble(_abstract_params(config), leaves, depths)


def export_params(config: MMDiTConfig, params: Any, *, layout: str) -> dict[str, Any]:
    """:func:`fadex.models.export_state_dict` of an MMDiT."""
    return export_leaves(_entries(config, layout), params, _abstract_params(config))


@functools.lru_cache(maxsize=16)
def _abstract_params(config: MMDiTConfig) -> nnx.State:
    """Shapes and dtypes of the parameters; shared between calls, never changed."""
    return nnx.state(nnx.eval_shape(lambda: MMDiT(config, rngs=nnx.Rngs(0))), nnx.Param)


def _scale_suffix(layout: str) -> str:
    return ".scale" if layout == "flux_bfl" else ".weight"


def _entries(config: MMDiTConfig, layout: str) -> Iterator[Entry]:
    """Every leaf of the MMDiT, blocks one by one, with where it is stored."""
    unstacked = dataclasses.replace(config, scan_layers=False)
    for path, like in flatten_with_paths(_abstract_params(unstacked)).items():
        layer, _, leaf = path.rpartition("/")
        group, index = layer.partition("/")[0], ""
        if group in _BLOCKS[layout]:
            _, index, layer = layer.split("/", 2)
            names = _BLOCKS[layout][group][layer]
        else:
            names = _ROOT[layout][layer]
        shape = like.shape[::-1] if leaf == "kernel" else like.shape
        rows = [shape[0]] if len(names) == 1 else [config.width] * 3
        if len(names) == 4:
            rows.append(config.hidden)
        suffixes = {"kernel": ".weight", "bias": ".bias", "scale": _scale_suffix(layout)}
        yield Entry(
            path=path,
            names=tuple(name.format(index) + suffixes[leaf] for name in names),
            shapes=tuple((count, *shape[1:]) for count in rows),
            form="matrix" if leaf == "kernel" else "plain",
            swapped=layout == "flux_diffusers" and layer == "final_modulation",
        )
