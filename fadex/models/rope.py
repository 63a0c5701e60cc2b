r"""Rotary position embedding (RoPE) over several position axes.

Source: Su et al., "RoFormer", arXiv 2104.09864; the split of a head into axes as in FLUX.

A head of size ``Dh`` is cut into axes of sizes :math:`d_1 + d_2 + \dots = D_h`, all even. Within
axis ``a``, at position :math:`p_a`, neighbours ``(2i, 2i + 1)`` turn by the angle
:math:`p_a\,\theta^{-2i/d_a}`:

.. math::
   \begin{pmatrix} y_{2i} \\ y_{2i+1} \end{pmatrix} =
   \begin{pmatrix} \cos & -\sin \\ \sin & \cos \end{pmatrix}
   \begin{pmatrix} x_{2i} \\ x_{2i+1} \end{pmatrix}.

The inner product of a rotated query and key depends on the difference of their positions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def image_ids(rows: int, columns: int) -> np.ndarray:
    """Positions ``(0, row, column)`` of image tokens, row by row: float32 ``[N, 3]``.

    Example:
      >>> from fadex.models import image_ids
      >>> image_ids(1, 2).tolist()
      [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    ids = np.stack([np.zeros_like(row), row, column], axis=-1)
    return ids.reshape(rows * columns, 3).astype(np.float32)


def rope_table(ids: Any, axes: Sequence[int], theta: float = 1e4) -> tuple[Any, Any]:
    """Cosines and sines of all angles, float32 ``[..., N, Dh / 2]`` each.

    Args:
      ids: positions ``[..., N, A]``. A NumPy array, as :func:`image_ids` gives, is a constant of
        the program: its angles are taken in float64. Others are taken in float32.
      axes: sizes of the ``A`` axes within a head, all even.
      theta: base of the frequencies.
    """
    if ids.shape[-1] != len(axes):
        raise ValueError(f"ids: expected {len(axes)} positions per token, got shape {ids.shape}")
    xp, dtype = (np, np.float64) if isinstance(ids, np.ndarray) else (jnp, jnp.float32)
    angles = []
    for axis, size in enumerate(axes):
        frequencies = (theta ** (-np.arange(0, size, 2) / size)).astype(dtype)
        angles.append(ids[..., axis, None].astype(dtype) * frequencies)
    angles = xp.concatenate(angles, axis=-1)
    return xp.cos(angles).astype(np.float32), xp.sin(angles).astype(np.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate queries or keys ``[B, N, H, Dh]`` in float32; the tables are ``[B or 1, N, Dh/2]``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.models.rope import apply_rope, image_ids, rope_table
      >>> cos, sin = rope_table(image_ids(2, 3)[None], axes=(2, 4, 4))
      >>> apply_rope(jnp.ones((5, 6, 2, 10)), cos, sin).shape
      (5, 6, 2, 10)
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
