"""Flax models, and adapters that turn any Flax model into a denoiser."""

from fadex.core.denoiser import Denoiser, from_linen, from_nnx
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
    "drop_labels",
    "from_linen",
    "from_nnx",
    "gated_forecast",
    "load_digits_dit",
    "save_digits_dit",
    "shipped_checkpoint",
]
