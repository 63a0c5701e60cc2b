"""The digits DiT: a 6-layer model of 8x8 handwritten digits that ships with the package."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any

from flax import nnx

from fadex.core.denoiser import Denoiser, Params, from_nnx
from fadex.models.dit import DiT, DiTConfig

DIGITS_CONFIG = DiTConfig(
    patch_size=2,
    in_channels=1,
    depth=6,
    width=64,
    num_heads=4,
    num_classes=10,
    class_dropout=0.1,
    time_scale=1000.0,
    scan_layers=True,  # compiles once for all blocks
)
DIGITS_SHAPE = (8, 8, 1)
NULL_DIGIT = 10


def digits_dit(seed: int = 0, **overrides: Any) -> DiT:
    """A freshly initialised digits DiT (:data:`DIGITS_CONFIG`, fields overridden by name)."""
    return DiT(dataclasses.replace(DIGITS_CONFIG, **overrides), rngs=nnx.Rngs(seed))


def shipped_checkpoint() -> Path:
    """Folder of the trained weights inside the installed package."""
    return Path(str(resources.files("fadex") / "assets" / "digits_dit"))


def load_digits_dit(path: str | Path | None = None) -> tuple[Denoiser, Params]:
    """The trained digits DiT as ``(denoiser, params)``.

    Args:
      path: a checkpoint folder written by ``fadex train``; the shipped one by default.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: the checkpoint is damaged or holds another model.

    Example:
      >>> from fadex.models import load_digits_dit
      >>> denoiser, params = load_digits_dit()
    """
    from fadex.core import checkpoint

    path = shipped_checkpoint() if path is None else Path(path)
    if not checkpoint.exists(path):
        raise FileNotFoundError(f"path: no checkpoint at {path}")
    denoiser, params = from_nnx(nnx.eval_shape(digits_dit))  # shapes only, nothing is drawn
    pure = checkpoint.restore(path, target=nnx.to_pure_dict(params))
    nnx.replace_by_pure_dict(params, pure)
    return denoiser, params


def save_digits_dit(
    path: str | Path, params: Params, *, overwrite: bool = False, **metadata: Any
) -> Path:
    """Write weights as a pure dict of arrays; the inverse of :func:`load_digits_dit`.

    Args:
      path: the checkpoint folder to create.
      params: weights of :func:`digits_dit`.
      overwrite: replace a checkpoint that is at ``path``.
      metadata: anything that JSON can hold, kept in the checkpoint's manifest.

    Raises:
      FileExistsError: ``path`` exists and ``overwrite`` is false, or is not a checkpoint.
    """
    from fadex.core import checkpoint

    return checkpoint.save(
        path, nnx.to_pure_dict(params), metadata=metadata or None, overwrite=overwrite
    )
