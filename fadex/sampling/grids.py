r"""Time grids of samplers, and training times.

Flow matching runs from ``t = 1`` (noise) down to ``t = 0`` (data) on ``S + 1`` values.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int, check_real


def uniform_times(num_steps: int) -> np.ndarray:
    """``1 = t_0 > ... > t_S = 0`` in equal steps, float32 ``[S + 1]``.

    Example:
      >>> from fadex.sampling import uniform_times
      >>> uniform_times(4).tolist()
      [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    num_steps = check_int("num_steps", num_steps, minimum=1)
    return np.linspace(1.0, 0.0, num_steps + 1).astype(np.float32)


def shifted_times(num_steps: int, shift: Any) -> np.ndarray:
    r"""Uniform times moved towards the noise, :math:`t \mapsto m t / (1 + (m-1) t)`.

    Args:
      num_steps: sampling steps ``S``.
      shift: ``m > 0``; 3 is the value of SD3, 1 leaves the grid uniform. ``B`` values give a
        grid for each sample, e.g. one :func:`resolution_shift` per resolution in a batch.

    Returns:
      float32 ``[S + 1]``, or ``[B, S + 1]``.

    Source: Esser et al., arXiv 2403.03206.

    Example:
      >>> from fadex.sampling import shifted_times
      >>> shifted_times(2, [1.0, 3.0]).tolist()
      [[1.0, 0.5, 0.0], [1.0, 0.75, 0.0]]
    """
    num_steps = check_int("num_steps", num_steps, minimum=1)
    if np.ndim(shift) == 0:
        m = check_real("shift", shift, minimum=0.0, exclusive=True)
    else:
        if np.ndim(shift) != 1 or np.size(shift) == 0:
            raise ValueError(f"shift: expected a number or [B], got shape {np.shape(shift)}")
        values = [check_real("shift", float(m), minimum=0.0, exclusive=True) for m in shift]
        m = np.array(values)[:, None]
    t = np.linspace(1.0, 0.0, num_steps + 1)
    return (m * t / (1.0 + (m - 1.0) * t)).astype(np.float32)


def resolution_shift(num_tokens: int) -> float:
    r"""Shift :math:`m = e^\mu` for a token count: ``mu`` is 0.5 at 256 and 1.15 at 4096 tokens.

    Linear in between and beyond, as FLUX sets it.
    """
    num_tokens = check_int("num_tokens", num_tokens, minimum=1)
    slope = (1.15 - 0.5) / (4096 - 256)
    return math.exp(0.5 + slope * (num_tokens - 256))


def timestep_indices(
    num_steps: int, *, train_steps: int = 1000, spacing: str = "leading"
) -> np.ndarray:
    """Descending timestep indices of a discrete-time model, closed by -1 (clean data).

    Args:
      num_steps: sampling steps ``S``.
      train_steps: steps of the training schedule.
      spacing: ``"leading"`` counts up from 0 in strides of ``train_steps // S``;
        ``"trailing"`` counts down from ``train_steps - 1``; ``"linspace"`` spans
        ``[0, train_steps - 1]``.

    Returns:
      float32 ``[S + 1]``; the last value -1 stands for the data (``abar = 1``).

    Example:
      >>> from fadex.sampling import timestep_indices
      >>> timestep_indices(4, spacing="trailing").tolist()
      [999.0, 749.0, 499.0, 249.0, -1.0]
    """
    num_steps = check_int("num_steps", num_steps, minimum=1)
    train_steps = check_int("train_steps", train_steps, minimum=1)
    check_choice("spacing", spacing, ("leading", "trailing", "linspace"))
    if num_steps > train_steps:
        raise ValueError(f"num_steps: must be <= train_steps={train_steps}, got {num_steps}")
    if spacing == "leading":
        steps = (np.arange(num_steps) * (train_steps // num_steps))[::-1]
    elif spacing == "trailing":
        steps = np.round(np.arange(train_steps, 0, -train_steps / num_steps))[:num_steps] - 1
    else:
        steps = np.round(np.linspace(0, train_steps - 1, num_steps))[::-1]
    return np.append(steps, -1.0).astype(np.float32)


def logit_normal_times(
    key: jax.Array, shape: tuple[int, ...], *, mean: float = 0.0, std: float = 1.0
) -> jax.Array:
    """Training times ``sigmoid(mean + std * normal)``, dense in the middle of ``(0, 1)``."""
    return jax.nn.sigmoid(mean + std * jax.random.normal(key, shape, jnp.float32))
