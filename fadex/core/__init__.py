"""Shared ground: denoiser protocol, checks, kernels by platform, checkpoints, special functions."""

from fadex.core.denoiser import Denoiser, from_linen, from_nnx
from fadex.core.kernels import by_platform, export_for

__all__ = ["Denoiser", "by_platform", "export_for", "from_linen", "from_nnx"]
