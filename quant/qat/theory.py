r"""Closed forms of the theory of zeroth-order surrogates, for tests, plots and choosing a radius.

Notation as in :mod:`~fadex.quant.qat.surrogates`; :math:`\Lambda` is the distribution function
of the perturbation, :math:`F(a) = \int_a^\infty z \lambda`. Expectations are over independent
:math:`z_i`, one per weight. Everything here sums over all thresholds and is meant for small
arrays.

Source: derived for this library (ZOE-Grad is known to us by its abstract alone).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_int
from fadex.quant.qat.perturbations import Kernel, Perturbation
from fadex.quant.qat.surrogates import surrogate_weight

__all__ = [
    "convergence_bound",
    "linearization_error_bound",
    "quadratic_expectation",
    "second_moment",
    "smoothed_quantizer",
    "uniform_ripple",
]


def uniform_ripple(x: Any, ratio: Any, *, terms: int = 8) -> jax.Array:
    r"""The Gaussian surrogate on an unclipped uniform grid, by its Fourier series.

    .. math:: S(w) = 1 + 2 \sum_{m \ge 1} \cos(2 \pi m x)\, e^{-2 \pi^2 m^2 \rho^2}, \qquad
              x = (w - t)/s, \quad \rho = \delta / s.

    Poisson's summation of the bumps: large radii give STE, small ones dead zones between
    thresholds.

    Args:
      x: distance from a threshold in steps, any shape.
      ratio: :math:`\rho`, broadcasting against ``x``.
      terms: of the series; 8 serve down to a ratio of 0.15 in float32.

    Example:
      >>> from fadex.quant.qat import uniform_ripple
      >>> [f"{uniform_ripple(0.0, r):.3f} {uniform_ripple(0.5, r):.3f}" for r in (0.5, 0.3, 0.2)]
      ['1.014 0.986', '1.340 0.663', '1.995 0.175']
    """
    terms = check_int("terms", terms, minimum=1)
    x, ratio = jnp.asarray(x), jnp.asarray(ratio)
    m = jnp.arange(1, terms + 1)
    shape = jnp.broadcast_shapes(x.shape, ratio.shape)
    x, ratio = (jnp.broadcast_to(v, shape)[..., None] for v in (x, ratio))
    series = jnp.cos(2 * math.pi * m * x) * jnp.exp(-2 * (math.pi * m * ratio) ** 2)
    return 1 + 2 * series.sum(-1)


def second_moment(u: Any, delta: Any, jump: Any = 1.0) -> jax.Array:
    r"""Second moment of the antithetic Gaussian estimator at one threshold.

    .. math:: E\,G_2^2 = \frac{D^2}{4 \delta^2}\, 2\,[a \varphi(a) + 1 - \Phi(a)], \qquad
              a = |u| / \delta.

    Args:
      u: distance from the threshold.
      delta: radius.
      jump: :math:`D`, the jump of the step function.
    """
    a = jnp.abs(u) / delta
    density = jnp.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    return jump**2 / (2 * delta**2) * (a * density + jax.scipy.special.ndtr(-a))


def _grid(levels: Any, thresholds: Any) -> tuple[np.ndarray, np.ndarray]:
    levels = np.asarray(levels, np.float64)
    middle = (levels[1:] + levels[:-1]) / 2
    return levels, middle if thresholds is None else np.asarray(thresholds, np.float64)


def _absolute(kernel: Kernel) -> tuple[Perturbation, Any]:
    if kernel.bandwidth != "absolute":
        raise ValueError("kernel: expected an absolute bandwidth: one radius for all thresholds")
    return kernel.perturbation, kernel.delta


def smoothed_quantizer(
    w: Any, levels: Any, thresholds: Any = None, *, kernel: Kernel
) -> jax.Array:
    r"""The mean of a perturbed weight, :math:`m(w) = E\,Q(w + \delta z)`.

    .. math:: m(w) = q_0 + \sum_k D_k \left(1 - \Lambda\!\left(\frac{t_k-w}\delta\right)\right)

    For a Gaussian its derivative is the surrogate's weight; for other perturbations it is not.

    Args: as :func:`~fadex.quant.qat.surrogate_weight`, the kernel with an absolute bandwidth.
    """
    perturbation, delta = _absolute(kernel)
    levels, cuts = _grid(levels, thresholds)
    w = jnp.asarray(w)
    passed = 1 - perturbation.cdf((jnp.asarray(cuts, w.dtype) - w[..., None]) / delta)
    return levels[0] + (jnp.asarray(np.diff(levels), w.dtype) * passed).sum(-1)


def quadratic_expectation(
    w: Any, matrix: Any, vector: Any, levels: Any, thresholds: Any = None, *, kernel: Kernel
) -> jax.Array:
    r"""Expected zeroth-order gradient of :math:`L = \frac12 q^T A q - b^T q` at ``Q(w)``.

    .. math:: E_i = S_i \Big(\sum_{j \ne i} A_{ij} m_j - b_i\Big)
              + A_{ii} \sum_k D_k \bar q_k\, g_\delta(w_i - t_k), \qquad
              \bar q_k = \tfrac12 (q_k + q_{k-1}).

    The surrogate gradient takes :math:`\nabla L` at ``Q(w)`` instead of at the means
    :math:`m_j`: that is the difference between a surrogate and zeroth-order descent on the whole
    loss, and it vanishes for linear losses.

    Args:
      w: ``[p]``, latent weights.
      matrix: ``[p, p]``, symmetric.
      vector: ``[p]``.
      levels, thresholds, kernel: as :func:`smoothed_quantizer`.

    Returns:
      ``[p]``. For a Gaussian it is the gradient of :math:`E L(Q(w + \delta z))`.
    """
    perturbation, delta = _absolute(kernel)
    levels, cuts = _grid(levels, thresholds)
    w = jnp.asarray(w)
    weight = surrogate_weight(w, levels, cuts, kernel=kernel)
    means = smoothed_quantizer(w, levels, cuts, kernel=kernel)
    # Of q^2 / 2 the jumps are D_k times the mean of the two levels.
    jumps = jnp.asarray(np.diff(levels**2) / 2, w.dtype)
    bumps = perturbation.tail((w[:, None] - jnp.asarray(cuts, w.dtype)) / delta) / delta
    diagonal = jnp.diagonal(matrix)
    others = matrix @ means - diagonal * means - vector
    return weight * others + diagonal * (jumps * bumps).sum(-1)


def linearization_error_bound(
    w: Any, levels: Any, thresholds: Any = None, *, kernel: Kernel, lipschitz: Any
) -> jax.Array:
    r"""Distance of the surrogate gradient from the expected zeroth-order gradient, at most.

    For a loss whose gradient is ``M``-Lipschitz,

    .. math:: |E_i - S_i\, \partial_i L(Q(w))| \le \frac{M}{2\delta}\,
              E\big[|z_i|\, \|Q(w + \delta z) - Q(w)\|^2\big],

    evaluated in closed form: for :math:`j \ne i` the factors are independent.

    Args:
      w: ``[p]``.
      levels, thresholds, kernel: as :func:`smoothed_quantizer`.
      lipschitz: :math:`M`, of the loss as a function of the quantized weights.

    Returns:
      ``[p]``.
    """
    perturbation, delta = _absolute(kernel)
    levels, cuts = _grid(levels, thresholds)
    w = jnp.asarray(w)
    a = (jnp.asarray(cuts, w.dtype) - w[:, None]) / delta
    below = perturbation.cdf(a)
    # int_-inf^a |z| lambda: rises from 0 over F(0) at 0 to 2 F(0).
    half, tail = perturbation.tail(jnp.zeros((), w.dtype)), perturbation.tail(a)
    mass = jnp.where(a < 0, tail, 2 * half - tail)
    cells = lambda c, top: jnp.diff(c, axis=-1, prepend=0, append=top)
    now = jnp.asarray(levels, w.dtype)[(w[:, None] >= jnp.asarray(cuts, w.dtype)).sum(-1)]
    moved = (jnp.asarray(levels, w.dtype) - now[:, None]) ** 2
    plain = (moved * cells(below, 1.0)).sum(-1)  # E (Q_j - q_j)^2
    weighted = (moved * cells(mass, 2 * half)).sum(-1)  # E |z_j| (Q_j - q_j)^2
    return lipschitz / (2 * delta) * (weighted + 2 * half * (plain.sum() - plain))


def convergence_bound(
    gap: Any, learning_rate: Any, steps: Any, *, smoothness: Any, bias: Any = 0.0,
    variance: Any = 0.0,
) -> jax.Array:  # fmt: skip
    r"""How small the gradient of the smoothed loss must have become under a biased descent.

    Let :math:`F_\delta(w) = E L(Q(w + \delta z))` have an :math:`L_\delta`-Lipschitz gradient,
    and descend along :math:`\nabla F_\delta + b_t + \xi_t` with :math:`\|b_t\| \le \beta`,
    :math:`E \|\xi_t\|^2 \le \sigma^2` and :math:`\eta \le 1/L_\delta`. Then

    .. math:: \min_{t < T} E \|\nabla F_\delta(w_t)\|^2 \le
              \frac{2 (F_\delta(w_0) - \inf F_\delta)}{\eta T} + \beta^2 + L_\delta \eta \sigma^2.

    For Gaussian perturbations :math:`L_\delta \le \sqrt2\, B / \delta^2` where
    :math:`|L - \text{const}| \le B` on the grid. If ``L`` is ``G``-Lipschitz on the box of the
    grid, of dimension ``p`` and step ``s``,
    :math:`|F_\delta(w) - L(Q(w))| \le G \sqrt p\, (\delta + s)`.

    Args:
      gap: :math:`F_\delta(w_0) - \inf F_\delta`.
      learning_rate: :math:`\eta`.
      steps: ``T``.
      smoothness: :math:`L_\delta`.
      bias: :math:`\beta`, of the surrogate for instance by :func:`linearization_error_bound`.
      variance: :math:`\sigma^2`.
    """
    return 2 * gap / (learning_rate * steps) + bias**2 + smoothness * learning_rate * variance
