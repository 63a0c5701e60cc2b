r"""HiCache: TaylorSeer's differences on a basis of scaled Hermite polynomials.

Source: "HiCache: Training-free Acceleration of Diffusion Models via Hermite Polynomial-based
Feature Caching", arXiv 2508.16984. With the ladder :math:`D_i` of TaylorSeer,

.. math:: \hat F(s) = D_0 + \sum_{i=1}^m \frac{D_i}{i!}\, \sigma^i H_i(\sigma (s - a_0)),

:math:`H_i` the physicists' polynomials. The argument is ``+(s - a_0)``; the sign printed in
the paper is a known slip. At ``sigma = 1/sqrt(2)`` order 1 is Taylor of order 1.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.polynomial import hermite

from fadex.caching.plan import WeightRule
from fadex.caching.taylor import difference_ladder
from fadex.core.checks import check_int, check_real


def _weights(pos: tuple[int, ...], s: int, *, order: int, sigma: float) -> np.ndarray:
    ladder = difference_ladder(pos, order)
    x = sigma * (s - pos[0])
    factors = np.array(
        [
            1.0 if i == 0 else sigma**i * hermite.hermval(x, np.eye(i + 1)[i]) / math.factorial(i)
            for i in range(len(ladder))
        ]
    )
    return factors @ ladder


def hicache(order: int = 2, sigma: float = 0.5) -> WeightRule:
    """HiCache of the given order; ``sigma`` in ``(0, 1]`` contracts the polynomials."""
    order = check_int("order", order, minimum=0)
    sigma = check_real("sigma", sigma, minimum=0.0, maximum=1.0)
    if sigma == 0.0:
        raise ValueError("sigma: must be > 0, got 0.0")
    rule = functools.partial(_weights, order=order, sigma=sigma)
    return WeightRule(f"hicache{order}", order + 1, rule)
