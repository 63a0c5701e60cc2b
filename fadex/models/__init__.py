"""Flax models, and adapters that turn any Flax model into a denoiser."""

from fadex.core.denoiser import Denoiser, from_linen, from_nnx
from fadex.models.dit import DiT, DiTBlock, DiTConfig, drop_labels

__all__ = ["Denoiser", "DiT", "DiTBlock", "DiTConfig", "drop_labels", "from_linen", "from_nnx"]
