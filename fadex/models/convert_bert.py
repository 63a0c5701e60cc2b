"""Weights and configs of BERT encoders, in the files of transformers and sentence-transformers.

Names are those of ``BertModel``: ``encoder.layer.0.attention.self.query.weight`` (torch's
``[out, in]`` matrices), with or without the prefix ``bert.``. The tanh pooler and the
stored ``position_ids`` have no part in sentence vectors; they are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from fadex.core.pytree import flatten_with_paths
from fadex.models.encoder import Encoder, EncoderConfig
from fadex.models.state_dict import (
    Entry,
    Problems,
    assemble,
    check_arrays,
    export_leaves,
    layout_hint,
    load_leaves,
    read_state_dict,
)

_ROOT = {
    "embeddings/words": "embeddings.word_embeddings",
    "embeddings/positions": "embeddings.position_embeddings",
    "embeddings/types": "embeddings.token_type_embeddings",
    "embeddings/norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp/fc1": "intermediate.dense",
    "mlp/fc2": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_PREFIX = "bert."
_PASSED_OVER = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
# transformers' names of activations -> ours.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                "relu": "relu", "silu": "silu", "swish": "silu"}
_FIELDS = {
    "vocabulary": "vocab_size", "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size", "depth": "num_hidden_layers", "width": "hidden_size",
    "num_heads": "num_attention_heads", "hidden": "intermediate_size", "eps": "layer_norm_eps",
}
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
             "pooling_mode_max_tokens": "max"}


def encoder_config(folder: str | os.PathLike[str], **overrides: Any) -> EncoderConfig:
    """The :class:`EncoderConfig` that a model's folder describes.

    Args:
      folder: holds ``config.json``; ``modules.json`` and the pooling's ``config.json`` where the
        model is one of sentence-transformers (without them: mean pooling, no normalisation).
      **overrides: fields of the config.

    Raises:
      FileNotFoundError: no ``config.json``, or a file that ``modules.json`` names.
      ValueError: a file that is damaged or incomplete, or asks for what the encoder has not:
        another model type, relative positions, another activation or pooling, further modules.
    """
    folder = Path(folder).expanduser()
    path = folder / "config.json"
    stored = _read_json(path)
    missing = [name for name in (*_FIELDS.values(), "hidden_act") if name not in stored]
    if missing:
        raise ValueError(f"folder: {str(path)!r} lacks {', '.join(missing)}")
    wanted = {"model_type": "bert", "position_embedding_type": "absolute"}
    for name, value in wanted.items():
        if stored.get(name, value) != value:
            raise ValueError(
                f"folder: {str(path)!r} has {name}={stored[name]!r}, expected {value!r}"
            )
    if stored["hidden_act"] not in _ACTIVATIONS:
        raise ValueError(
            f"folder: {str(path)!r} has hidden_act={stored['hidden_act']!r}, expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    fields = {ours: stored[theirs] for ours, theirs in _FIELDS.items()}
    fields["activation"] = _ACTIVATIONS[stored["hidden_act"]]
    fields |= _sentence_modules(folder)
    return EncoderConfig(**{**fields, **overrides})


def _sentence_modules(folder: Path) -> dict[str, Any]:
    """Pooling and normalisation as ``modules.json`` lists them."""
    fields: dict[str, Any] = {"pooling": "mean", "normalize": False}
    path = folder / "modules.json"
    if not path.is_file():
        return fields
    for module in _read_json(path):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            pooling = _read_json(folder / module["path"] / "config.json")
            on = [name for name, value in pooling.items()
                  if name.startswith("pooling_mode_") and value]
            if len(on) != 1 or on[0] not in _POOLINGS:
                raise ValueError(
                    f"folder: expected one pooling of {', '.join(_POOLINGS)} in "
                    f"{str(folder / module['path'])!r}, got {on}"
                )
            fields["pooling"] = _POOLINGS[on[0]]
        elif kind == "Normalize":
            fields["normalize"] = True
        elif kind != "Transformer":
            raise ValueError(f"folder: {str(path)!r} has a module {kind!r}, which is not known")
    return fields


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"folder: there is no {str(path)!r}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"folder: {str(path)!r} is not sound JSON ({error})") from error


def load_encoder(folder: str | os.PathLike[str], **overrides: Any) -> Encoder:
    """An :class:`Encoder` with the weights of a folder of transformers or sentence-transformers.

    Args:
      folder: ``config.json`` and ``model.safetensors`` (see :func:`encoder_config`).
      **overrides: fields of the config, for instance ``scan_layers=True``.

    Raises:
      FileNotFoundError, ValueError: as :func:`encoder_config`, ``read_state_dict`` and
        :func:`encoder_params`.

    Example:
      >>> from fadex.models import load_encoder
      >>> model = load_encoder("all-MiniLM-L6-v2")  # doctest: +SKIP
    """
    config = encoder_config(folder, **overrides)
    weights = read_state_dict(Path(folder).expanduser() / "model.safetensors")
    model = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
    nnx.update(model, encoder_params(config, weights))
    return model


def encoder_params(
    config: EncoderConfig, state_dict: Mapping[str, Any], *, strict: bool = True
) -> nnx.State:
    """The parameters of an encoder from a state dict.

    Args:
      config: of the encoder; with ``scan_layers`` the layers come out stacked.
      state_dict: names to arrays (numpy, jax or torch) of any floating dtype; cast to
        ``param_dtype``.
      strict: False ignores names that the layout does not have.

    Returns:
      The parameters as :func:`fadex.models.from_encoder` gives them.

    Raises:
      ValueError: all problems in one message: names that are missing or unexpected, shapes,
        dtypes, values that are not finite.
      TypeError: a value is no array.

    Example:
      >>> from flax import nnx
      >>> from fadex.core.pytree import tree_hash
      >>> from fadex.models import Encoder, EncoderConfig, encoder_params, export_encoder
      >>> config = EncoderConfig(vocabulary=9, depth=2, width=8, num_heads=2, hidden=16)
      >>> model = Encoder(config, rngs=nnx.Rngs(0))
      >>> params = encoder_params(config, export_encoder(model))
      >>> tree_hash(params) == tree_hash(nnx.state(model))
      True
    """
    check_arrays(state_dict)
    prefix = _PREFIX if _PREFIX + _ROOT["embeddings/words"] + ".weight" in state_dict else ""
    problems = Problems()
    entries = list(_entries(config, prefix))
    leaves, taken = load_leaves(entries, state_dict, config.param_dtype, problems)
    if strict:
        taken |= {prefix + name for name in _PASSED_OVER}
        problems.unexpected += [repr(name) for name in state_dict if name not in taken]
    problems.raise_if_any("encoder", "bert", layout_hint(state_dict, "bert"))
    return assemble(_abstract_params(config), leaves, {"layers": config.depth})


def export_encoder(
    model: Encoder | EncoderConfig, params: Any = None
) -> dict[str, np.ndarray]:
    """The inverse of :func:`encoder_params`, bit for bit: names of ``BertModel`` to arrays.

    Args:
      model: the encoder, or its config when ``params`` are given.
      params: an ``nnx.State`` or nested dictionaries; the model's own by default. Quantized ones
        go through ``fadex.quant.dequantize`` first.

    Raises:
      ValueError: parameters that do not fit the config, all named at once; a config alone.
      TypeError: neither an encoder nor a config.
    """
    config = model.config if isinstance(model, Encoder) else model
    if not isinstance(config, EncoderConfig):
        raise TypeError(
            f"model: expected an Encoder or an EncoderConfig, got {type(model).__name__}"
        )
    if params is None:
        if not isinstance(model, Encoder):
            raise ValueError("params: required with an EncoderConfig, which holds no weights")
        params = nnx.state(model, nnx.Param)
    return export_leaves(_entries(config, ""), params, _abstract_params(config))


@functools.lru_cache(maxsize=16)
def _abstract_params(config: EncoderConfig) -> nnx.State:
    """Shapes and dtypes of the parameters; shared between calls, never changed."""
    return nnx.state(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))), nnx.Param)


def _entries(config: EncoderConfig, prefix: str) -> Iterator[Entry]:
    """Every leaf of the encoder, layers one by one, with where it is stored."""
    unstacked = dataclasses.replace(config, scan_layers=False)
    for path, like in flatten_with_paths(_abstract_params(unstacked)).items():
        module, _, leaf = path.rpartition("/")
        if module.startswith("layers/"):
            _, index, module = module.split("/", 2)
            name = f"encoder.layer.{index}.{_LAYER[module]}"
        else:
            name = _ROOT[module]
        matrix = leaf == "kernel"
        yield Entry(
            path=path,
            names=(f"{prefix}{name}.{'bias' if leaf == 'bias' else 'weight'}",),
            shapes=(like.shape[::-1] if matrix else like.shape,),
            form="matrix" if matrix else "plain",
        )
