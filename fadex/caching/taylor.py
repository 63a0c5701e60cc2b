r"""TaylorSeer: Taylor series from backward differences of cached features.

Source: "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers",
arXiv 2503.06923. At every anchor a ladder of differences is renewed,

.. math:: D_0 = F(a_0), \qquad D_{i+1} = \frac{D_i - D_i^{old}}{a_0 - a_1},
   \qquad \hat F(s) = \sum_{i \le m} D_i \frac{(s - a_0)^i}{i!},

where all orders of one renewal divide by the latest spacing, uniform or not.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from fadex.caching.plan import WeightRule
from fadex.core.checks import check_int


def difference_ladder(pos: tuple[int, ...], order: int) -> np.ndarray:
    """Rows ``D_0 .. D_m`` as weights over the anchors ``pos`` (newest first).

    The order drops to ``len(pos) - 1`` where fewer anchors are known.
    """
    order = min(order, len(pos) - 1)
    units = np.eye(len(pos))
    ladder = [units[-1]]
    for j in range(len(pos) - 2, -1, -1):
        spacing = pos[j] - pos[j + 1]
        renewed = [units[j]]
        for i in range(min(order, len(ladder))):
            renewed.append((renewed[i] - ladder[i]) / spacing)
        ladder = renewed
    return np.stack(ladder[: order + 1])


def _weights(pos: tuple[int, ...], s: int, *, order: int) -> np.ndarray:
    ladder = difference_ladder(pos, order)
    x = float(s - pos[0])
    factors = np.array([x**i / math.factorial(i) for i in range(len(ladder))])
    return factors @ ladder


def taylorseer(order: int = 1) -> WeightRule:
    """TaylorSeer of the given order; ``order=0`` is reuse.

    Example:
      >>> from fadex.caching import taylorseer
      >>> taylorseer(1)((10, 6), 12).tolist()
      [1.5, -0.5]
    """
    order = check_int("order", order, minimum=0)
    return WeightRule(f"taylor{order}", order + 1, functools.partial(_weights, order=order))
