"""Flax models, and adapters that turn any Flax model into a denoiser."""

from fadex.core.denoiser import Denoiser, from_linen, from_nnx
from fadex.models.convert import (
    dit_config_from_state_dict,
    export_state_dict,
    load_dit,
    load_state_dict,
    read_state_dict,
)
from fadex.models.digits import (
    DIGITS_CONFIG,
    DIGITS_SHAPE,
    NULL_DIGIT,
    digits_dit,
    load_digits_dit,
    save_digits_dit,
    shipped_checkpoint,
)
from fadex.models.dit import DiT, DiTBlock, DiTConfig, drop_labels
from fadex.models.kernels import gated_forecast

__all__ = [
    "DIGITS_CONFIG",
    "DIGITS_SHAPE",
    "NULL_DIGIT",
    "Denoiser",
    "DiT",
    "DiTBlock",
    "DiTConfig",
    "digits_dit",
    "dit_config_from_state_dict",
    "drop_labels",
    "export_state_dict",
    "from_linen",
    "from_nnx",
    "gated_forecast",
    "load_digits_dit",
    "load_dit",
    "load_state_dict",
    "read_state_dict",
    "save_digits_dit",
    "shipped_checkpoint",
]
