"""The digits DiT: a 6-layer model of 8x8 handwritten digits that ships with the package."""

from __future__ import annotations

from typing import Any

from flax import nnx

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
)
NULL_DIGIT = 10


def digits_dit(seed: int = 0, **overrides: Any) -> DiT:
    """A freshly initialised digits DiT (see :data:`DIGITS_CONFIG`)."""
    import dataclasses

    return DiT(dataclasses.replace(DIGITS_CONFIG, **overrides), rngs=nnx.Rngs(seed))
