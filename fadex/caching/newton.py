r"""Newton forecasting: the polynomial through the last ``m + 1`` computed features.

.. math:: w_j(s) = \prod_{i \ne j} \frac{s - a_i}{a_j - a_i}

Equal to TaylorSeer for ``m = 1``; for ``m >= 2`` rising factorials stand in place of powers.
"""

from __future__ import annotations

import functools

import numpy as np

from fadex.caching.plan import WeightRule
from fadex.core.checks import check_int


def lagrange_weights(pos: tuple[int, ...], s: float) -> np.ndarray:
    """Weights of polynomial interpolation through all of ``pos``, evaluated at ``s``."""
    nodes = np.asarray(pos, np.float64)
    weights = np.ones(len(nodes))
    for j, node in enumerate(nodes):
        others = np.delete(nodes, j)
        weights[j] = np.prod((s - others) / (node - others))
    return weights


def _weights(pos: tuple[int, ...], s: int, *, order: int) -> np.ndarray:
    used = pos[: order + 1]
    return np.pad(lagrange_weights(used, s), (0, len(pos) - len(used)))


def newton(order: int = 2) -> WeightRule:
    """Polynomial extrapolation of the given order; it drops where fewer anchors are known."""
    order = check_int("order", order, minimum=0)
    return WeightRule(f"newton{order}", order + 1, functools.partial(_weights, order=order))
