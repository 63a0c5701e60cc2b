r"""Special functions on the host, in float64: Mittag-Leffler and fractional differences.

They feed offline tables (forecast weights), never a jitted program: float32 ratios of
Gamma functions lose four digits, and a table is computed once.
"""

from __future__ import annotations

import math

import numpy as np

from fadex.core.checks import check_int, check_real


def _series_radius(alpha: float) -> float:
    """``|z|^(1/alpha)`` below which the power series serves.

    Its cancellation grows like ``e^radius``; the parabola loses digits where its poles come
    close, which happens at larger radii as ``alpha`` nears 2. Limits found by scanning both
    branches against 60-digit sums.
    """
    if alpha < 1.0:
        return 3.0
    return 5.0 if alpha < 1.4 else 8.0


_DROP = -60.0  # terms below e^-60 change nothing in float64


def mittag_leffler(alpha: float, beta: float, z: np.ndarray | float) -> np.ndarray:
    r"""Two-parameter Mittag-Leffler function on the real line.

    .. math:: E_{\alpha,\beta}(z) = \sum_{i \ge 0} \frac{z^i}{\Gamma(\alpha i + \beta)}

    Near the origin and for ``z >= 0`` the series is summed in logarithms, smallest terms
    first. Elsewhere the Laplace transform
    :math:`\mathcal L\{u^{\beta-1}E_{\alpha,\beta}(-\lambda u^\alpha)\}
    = p^{\alpha-\beta}/(p^\alpha+\lambda)` is inverted at ``u = 1`` by the midpoint rule on a
    parabola, with the two poles' residues added for ``1 < alpha < 2`` when the parabola
    leaves them outside.

    Accuracy: 1e-9 relative to ``max(|E|, 1e-3)`` for ``0.3 <= alpha <= 1.9`` and
    ``z`` in ``[-20, 2]`` (tested against mpmath).

    Args:
      alpha: order, ``0 < alpha < 2``.
      beta: second parameter, ``beta > 0``.
      z: real argument(s), any shape; ``z <= 10`` and ``z^(1/alpha) <= 50`` where positive.

    Returns:
      float64 array shaped like ``z``.

    Raises:
      ValueError: an argument lies outside of that domain.

    Example:
      >>> from fadex.core.special import mittag_leffler
      >>> round(float(mittag_leffler(1.0, 1.0, -2.0)), 12)  # exp(-2)
      0.135335283237
    """
    alpha = check_real("alpha", alpha, minimum=0.0, maximum=2.0, exclusive=True)
    beta = check_real("beta", beta, minimum=0.0)
    if beta == 0.0:
        raise ValueError("beta: must be > 0, got 0.0")
    z = np.asarray(z, np.float64)
    if not np.all(np.isfinite(z)):
        raise ValueError("z: holds values that are not finite")
    if np.any(z > 10.0) or np.any(np.maximum(z, 0.0) ** (1.0 / alpha) > 50.0):
        raise ValueError(
            f"z: must satisfy z <= 10 and z^(1/alpha) <= 50, got a maximum of {z.max()} "
            f"at alpha={alpha}"
        )
    flat = np.atleast_1d(z).ravel()
    radius = np.abs(flat) ** (1.0 / alpha)
    near = (flat >= 0.0) | (radius < _series_radius(alpha))
    out = np.empty_like(flat)
    if near.any():
        out[near] = _series(alpha, beta, flat[near])
    if not near.all():
        out[~near] = _parabola(alpha, beta, flat[~near])
    return out.reshape(z.shape)


def _series(alpha: float, beta: float, z: np.ndarray) -> np.ndarray:
    from scipy.special import gammaln, gammasgn  # as slow to import as all of ours together

    # The largest term sits near i = |z|^(1/alpha)/alpha; past it the Gamma function wins.
    peak = float(np.max(np.abs(z)) ** (1.0 / alpha))
    count = int((4.0 * peak + 80.0) / alpha) + 8
    i = np.arange(count, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_term = i * np.log(np.abs(z))[:, None] - gammaln(alpha * i + beta)
    log_term[:, 0] = -gammaln(beta)  # 0 * log(0) at z = 0
    keep = log_term > _DROP
    sign = np.where(z[:, None] < 0.0, (-1.0) ** i, 1.0) * gammasgn(alpha * i + beta)
    terms = np.where(keep, sign * np.exp(np.where(keep, log_term, 0.0)), 0.0)
    order = np.argsort(np.abs(terms), axis=1)
    return np.take_along_axis(terms, order, axis=1).sum(axis=1)


def _parabola(alpha: float, beta: float, z: np.ndarray) -> np.ndarray:
    nodes = 16 if alpha <= 1.0 else 24
    step = 3.0 / nodes
    mu = np.full_like(z, np.pi * nodes / 12.0)
    residue = np.zeros_like(z)
    if alpha > 1.0:
        pole = np.abs(z) ** (1.0 / alpha) * np.exp(1j * np.pi / alpha)
        # A pole close to the contour costs digits: take the parabola farther from it.
        distance = lambda m: np.abs(np.real(np.sqrt(pole / m)) - 1.0)
        mu = np.where(distance(mu) >= distance(0.6 * mu), mu, 0.6 * mu)
        outside = np.real(np.sqrt(pole / mu)) > 1.0
        value = 2.0 * np.real(pole ** (1.0 - beta) * np.exp(pole)) / alpha
        residue = np.where(outside, value, 0.0)
    y = (np.arange(-nodes, nodes) + 0.5) * step
    path = 1j * y + 1.0
    p = mu[:, None] * path**2
    dp = 2j * mu[:, None] * path
    integrand = np.exp(p) * p ** (alpha - beta) / (p**alpha - z[:, None]) * dp
    return np.real(step / (2j * np.pi) * integrand.sum(axis=1)) + residue


def gl_weights(nu: float, count: int) -> np.ndarray:
    r"""Grunwald-Letnikov weights :math:`g_j = (-1)^j \binom{\nu}{j}`, ``j < count``.

    The fractional difference of order ``nu`` is :math:`\sum_j g_j F(t - jh)`; ``nu = 1``
    gives the backward difference ``1, -1, 0, ...``.

    Example:
      >>> from fadex.core.special import gl_weights
      >>> gl_weights(1.0, 4).tolist() == [1.0, -1.0, 0.0, 0.0]
      True
    """
    nu = check_real("nu", nu)
    count = check_int("count", count, minimum=1)
    weights = np.ones(count)
    for j in range(1, count):
        weights[j] = weights[j - 1] * (1.0 - (nu + 1.0) / j)
    return weights + 0.0  # no negative zeros


def l1_weights(alpha: float, count: int) -> np.ndarray:
    r"""Weights of the L1 scheme for the Caputo derivative, ``0 < alpha < 1``.

    .. math:: D^\alpha F(t_n) \approx h^{-\alpha} \sum_{j<n} b_j (F(t_{n-j})-F(t_{n-j-1})),
       \quad b_j = \frac{(j+1)^{1-\alpha} - j^{1-\alpha}}{\Gamma(2-\alpha)}

    Accurate to :math:`O(h^{2-\alpha})`; exact on straight lines.
    """
    alpha = check_real("alpha", alpha, minimum=0.0, maximum=1.0, exclusive=True)
    count = check_int("count", count, minimum=1)
    j = np.arange(count, dtype=np.float64)
    return ((j + 1.0) ** (1.0 - alpha) - j ** (1.0 - alpha)) / math.gamma(2.0 - alpha)
