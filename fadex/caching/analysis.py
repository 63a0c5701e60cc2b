r"""Is a feature trajectory anomalous? Mean squared displacements and their exponent.

.. math:: \mathrm{MSD}(l) = \langle \lVert F_{s+l} - F_s \rVert^2 \rangle_s \sim l^\gamma

``gamma = 1`` is normal diffusion, below 1 sub-, above 1 super-diffusive; 2 is ballistic: a
smooth path that integer-order forecasts follow well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def mean_squared_displacement(trajectory: Any, lags: Sequence[int]) -> np.ndarray:
    """``MSD(l)`` of a path ``[S, ...]`` for each lag: mean over starts, sum over coordinates."""
    trajectory = jnp.asarray(trajectory)
    steps = trajectory.shape[0]
    if not lags or any(not 1 <= lag < steps for lag in lags):
        raise ValueError(f"lags: expected values in [1, {steps - 1}], got {list(lags)}")
    flat = trajectory.reshape(steps, -1)
    values = [jnp.mean(jnp.sum(jnp.square(flat[lag:] - flat[:-lag]), axis=-1)) for lag in lags]
    return np.asarray(jnp.stack(values), np.float64)


def msd_exponent(trajectory: Any, lags: Sequence[int] = (1, 2, 4, 8)) -> float:
    """Exponent ``gamma``: least-squares slope of ``log MSD`` over ``log lag``.

    Raises:
      ValueError: fewer than two lags, a lag outside of the path, or a path that stands still.

    Example:
      >>> import numpy as np
      >>> from fadex.caching.analysis import msd_exponent
      >>> round(msd_exponent(np.arange(50.0)[:, None]), 6)  # a straight line
      2.0
    """
    if len(set(lags)) < 2:
        raise ValueError(f"lags: a slope needs at least two different lags, got {list(lags)}")
    msd = mean_squared_displacement(trajectory, lags)
    if not np.all(np.isfinite(msd)) or np.any(msd <= 0):
        raise ValueError("trajectory: its displacements must be finite and not zero")
    return float(np.polyfit(np.log(np.asarray(lags, np.float64)), np.log(msd), 1)[0])


def alpha_from_msd(gamma: float) -> float:
    """Fractional order ``gamma / 2`` suggested by an MSD exponent, kept inside ``(0, 2)``.

    A reading of "anomalous dynamics" that needs no profiling; expect it to be worse than a
    profiled order.
    """
    return float(np.clip(gamma / 2.0, 0.05, 1.95))
