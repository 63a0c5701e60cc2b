r"""Exact rates of mini-batch momentum on interpolating least squares.

For :math:`f(x) = \frac12 \mathbb E(a^\top x - b)^2` with :math:`a^\top x_* = b` and
:math:`H = \mathbb E\,aa^\top`, one step of heavy ball or Nesterov on ``B`` independent rows is
linear in the error :math:`e_t = x_t - x_*`,

.. math:: e_{t+1} = (1+\beta)\,e_t - \beta\,e_{t-1} - \eta\,\hat H_t\,y_t, \qquad
   \hat H_t = \tfrac1B \sum_{i \le B} a_i a_i^\top, \qquad
   y_t = \begin{cases} e_t \\ (1+\beta)e_t - \beta e_{t-1} \end{cases}

so its second moments follow a linear map whose spectral radius :math:`\rho` is the exact rate:
:math:`\mathbb E\|e_t\|^2 \sim \rho^t`.

**Gaussian rows** ``a ~ N(0, diag(lam))``. The map closes on
:math:`(\mathbb E e_{t,i}^2, \mathbb E e_{t,i}e_{t-1,i}, \mathbb E e_{t-1,i}^2)`, the modes coupled
only through the noise :math:`\frac{\eta^2}{B}\lambda_i(\sum_j \lambda_j \mathbb E y_j^2 +
\lambda_i \mathbb E y_i^2)`. Without noise, mode ``i`` answers a unit kick with :math:`y` whose
squares have the generating function :math:`g_i(z) = \sum_k z^{-k-1} y_{i,k}^2`, positive and
falling for ``z`` beyond the noiseless rate. With noise :math:`s_i = \eta^2\lambda_i^2/B`, rank-one
coupling makes :math:`\rho` the one root beyond it of

.. math:: \sum_i \frac{s_i\,g_i(z)}{1 - s_i\,g_i(z)} = 1,

found here by bisection: ``O(d)`` a step, no eigensolver, so it runs anywhere and under ``vmap``.

**A finite set of rows.** The map acts on the ``(2d)^2`` second moments through
:math:`\mathbb E[\hat H \otimes \hat H] = \frac1B \mathbb E[aa^\top \otimes aa^\top] +
(1 - \frac1B) H \otimes H`; its eigenvalues are computed, which is for small ``d``.

A rate of ``1 - 1e-5`` needs float64: enable x64 around these functions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice, check_shape

STYLES = ("heavy_ball", "nesterov")

# Halvings of the bracket, whose upper end is a few units unless the step is absurd.
_HALVINGS = 64


class BestRate(NamedTuple):
    """The fastest point of a grid."""

    rate: jax.Array  # [], spectral radius of the second-moment map
    learning_rate: jax.Array  # []
    decay: jax.Array  # []


def _mode_polynomials(z, p, q, beta, style):
    """Numerator and denominator of ``g_i(z)`` for ``e_{t+1} = p e_t + q e_{t-1} + kick``."""
    # (zI - T)^-1 (1, 0, 0), T the 3x3 map of the mode; the determinant factors.
    first, second, third = z * (z - q), p * z, z - q
    if style == "nesterov":
        numerator = (
            (1 + beta) ** 2 * first - 2 * beta * (1 + beta) * second + beta**2 * third
        )
    else:
        numerator = first
    return numerator, (z + q) * ((z - q) ** 2 - p * p * z)


def second_moment_rate(
    lam: jax.Array,
    eta: jax.Array | float,
    beta: jax.Array | float,
    batch_size: jax.Array | float,
    style: str = "heavy_ball",
) -> jax.Array:
    r"""Exact rate of :math:`\mathbb E\|e_t\|^2` for Gaussian rows: the map's spectral radius.

    The method is stable in mean square exactly when the rate is below 1. Everything but
    ``style`` may be traced, and has derivatives (of the root, by the implicit function theorem).

    Args:
      lam: ``[d]``, eigenvalues of ``H``, >= 0; zeros are left out, as no step moves there.
      eta: learning rate, > 0.
      beta: momentum in [0, 1).
      batch_size: rows per step, >= 1; need not be an integer.
      style: ``"heavy_ball"`` or ``"nesterov"``.

    Returns:
      A scalar in the dtype of the arguments.

    Raises:
      ValueError: ``lam`` is not a vector, or an unknown ``style``.

    Source: second moments as in Ma, Bassily, Belkin, arXiv 1712.06559, extended to momentum; the
    secular equation is ours.

    Example:
      >>> import jax
      >>> from fadex.optim import second_moment_rate
      >>> with jax.enable_x64(True):  # one mode, no momentum: (1 - eta)^2 + 2 eta^2 / B
      ...     print(f"{second_moment_rate([1.0], 0.5, 0.0, 4):.6f}")
      0.375000
    """
    check_choice("style", style, STYLES)
    lam = jnp.asarray(lam, jnp.result_type(float))
    check_shape("lam", lam, (None,))
    eta, beta, batch_size = (jnp.asarray(v, lam.dtype) for v in (eta, beta, batch_size))
    decay = 1 - eta * lam
    if style == "nesterov":
        p, q, gain = (1 + beta) * decay, -beta * decay, (1 + 2 * beta) ** 2
    else:
        p, q, gain = beta + decay, jnp.broadcast_to(-beta, lam.shape), jnp.ones_like(beta)
    noise = eta**2 * lam**2 / batch_size

    disc = p * p / 4 + q
    real = disc > 0
    # The squared modulus, by branch, so that neither derivative meets a root of zero.
    radius = jnp.abs(p) / 2 + jnp.sqrt(jnp.where(real, disc, 1))
    square = jnp.where(real, radius**2, jnp.abs(q))
    seen = lam > 0
    low = jnp.max(jnp.where(seen, square, 0))
    # The largest absolute row sum of the whole map.
    rows = jnp.abs(p) + jnp.abs(q)
    coupling = gain * (noise + eta**2 * lam * jnp.sum(lam) / batch_size)
    high = jnp.maximum(jnp.max(jnp.maximum(rows**2 + coupling, rows)), 1.0)

    def secular(z):
        """The sum over modes, and whether ``z`` lies beyond all of its poles."""
        numerator, denominator = _mode_polynomials(z, p, q, beta, style)
        slack = jnp.where(seen, denominator - noise * numerator, 1)
        return jnp.sum(noise * numerator / jnp.where(slack > 0, slack, 1)), jnp.all(slack > 0)

    def halve(_, bracket):
        low, high = bracket
        z = (low + high) / 2
        total, regular = secular(z)
        beyond = regular & (total < 1)
        return jnp.where(beyond, low, z), jnp.where(beyond, z, high)

    def excess(z):
        # Without noise there is no equation, and the rate is the noiseless one.
        return jnp.where(jnp.any(noise > 0), secular(z)[0] - 1, z - low)

    def bisect(_, start):
        return jax.lax.fori_loop(0, _HALVINGS, halve, (start, high))[1]

    # Derivatives by the implicit function theorem: bisection has none.
    return jax.lax.custom_root(excess, low, bisect, lambda slope, y: y / slope(jnp.ones_like(y)))


def second_moment_rate_rows(
    rows: jax.Array,
    eta: jax.Array | float,
    beta: jax.Array | float,
    batch_size: jax.Array | float,
    style: str = "heavy_ball",
    *,
    probabilities: jax.Array | None = None,
) -> jax.Array:
    r"""Exact rate of :math:`\mathbb E\|e_t\|^2` for rows drawn from a finite set.

    Directions in which ``H`` vanishes are left out: no step moves there.

    Args:
      rows: ``[m, d]``. The map has ``(2d)^2`` entries a side: meant for ``d`` up to about 8.
      eta, beta, batch_size, style: as in :func:`second_moment_rate`.
      probabilities: ``[m]``, adding up to 1; uniform by default.

    Returns:
      A scalar.

    Raises:
      ValueError: wrong shapes, or an unknown ``style``.

    Source: see :func:`second_moment_rate`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.optim import second_moment_rate_rows
      >>> with jax.enable_x64(True):  # Kaczmarz on orthogonal rows: 1 - 1/d
      ...     print(f"{second_moment_rate_rows(jnp.eye(4), 1.0, 0.0, 1):.6f}")
      0.750000
    """
    check_choice("style", style, STYLES)
    rows = jnp.asarray(rows, jnp.result_type(float))
    check_shape("rows", rows, (None, None))
    m, d = rows.shape
    if probabilities is None:
        probabilities = jnp.full(m, 1 / m, rows.dtype)
    probabilities = jnp.asarray(probabilities, rows.dtype)
    check_shape("probabilities", probabilities, (m,))
    weighted = rows * jnp.sqrt(probabilities)[:, None]
    # Into the eigenbasis of H, where the directions without curvature are coordinates.
    spectrum, basis = jnp.linalg.eigh(weighted.T @ weighted)
    seen = spectrum > d * jnp.finfo(rows.dtype).eps * jnp.max(spectrum)
    rows = (rows @ basis) * seen
    h = jnp.diag(jnp.where(seen, spectrum, 0))

    identity = jnp.diag(seen.astype(rows.dtype))
    ahead = (1 + beta, -beta) if style == "nesterov" else (1.0, 0.0)
    look = jnp.concatenate([ahead[0] * identity, ahead[1] * identity], axis=1)  # [d, 2d]
    mean = jnp.block([[(1 + beta) * identity, -beta * identity],
                      [identity, jnp.zeros((d, d), rows.dtype)]])
    push = jnp.concatenate([identity, jnp.zeros((d, d), rows.dtype)]) * -eta  # [2d, d]
    step = mean + push @ h @ look
    fourth = jnp.einsum("m,mi,mj,mk,ml->ijkl", probabilities, rows, rows, rows, rows)
    # Covariance of H_B y: (E[(a.y)^2 a a^T] - (H y)(H y)^T) / B.
    noise = (fourth - jnp.einsum("ij,kl->ijkl", h, h)) / batch_size
    pushed = jnp.einsum("ai,bk,ijkl,jc,ld->abcd", push, push, noise, look, look)
    whole = jnp.einsum("ac,bd->abcd", step, step) + pushed
    return jnp.max(jnp.abs(jnp.linalg.eigvals(whole.reshape(4 * d * d, 4 * d * d))))


def steps_per_efold(rate: jax.Array | float) -> jax.Array:
    r"""Steps in which :math:`\|e\|` falls by ``e``: :math:`-2/\ln\rho`; infinite for a rate >= 1.

    Args:
      rate: spectral radius of the second-moment map, any shape.

    Returns:
      Steps, of the shape of ``rate``.

    Source: definition.

    Example:
      >>> from fadex.optim import steps_per_efold
      >>> print(f"{steps_per_efold(0.5):.3f} {steps_per_efold(1.0)}")
      2.885 inf
    """
    rate = jnp.asarray(rate)
    stable = rate < 1
    return jnp.where(stable, -2 / jnp.log(jnp.where(stable, rate, 0.5)), jnp.inf)


def best_rate(
    lam: jax.Array,
    batch_size: jax.Array | float,
    learning_rates: jax.Array,
    decays: jax.Array,
    style: str = "heavy_ball",
) -> BestRate:
    """The fastest pair on a grid of learning rates and momenta, by the exact rate.

    Args:
      lam: ``[d]``, eigenvalues of ``H`` of Gaussian rows.
      batch_size: rows per step.
      learning_rates: ``[n]``; ``decays``: ``[k]``, momenta. ``[0.]`` gives the best plain SGD.
      style: ``"heavy_ball"`` or ``"nesterov"``.

    Returns:
      A :class:`BestRate` of scalars.

    Raises:
      ValueError: a grid that is not a vector, or an unknown ``style``.

    Source: brute force over :func:`second_moment_rate`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import best_rate
      >>> float(best_rate(jnp.ones(1), 1e6, jnp.array([0.5, 1.0]), jnp.zeros(1)).learning_rate)
      1.0
    """
    learning_rates, decays = jnp.asarray(learning_rates), jnp.asarray(decays)
    check_shape("learning_rates", learning_rates, (None,))
    check_shape("decays", decays, (None,))
    rates = jax.vmap(
        lambda eta: jax.vmap(
            lambda beta: second_moment_rate(lam, eta, beta, batch_size, style))(decays)
    )(learning_rates)
    row, column = jnp.unravel_index(jnp.argmin(rates), rates.shape)
    return BestRate(rates[row, column], learning_rates[row], decays[column])
