r"""River valleys: test functions, and what their mathematics says about tuning heavy ball.

A river valley has a flat direction :math:`u` (the river, along which training makes progress) and
steep ones :math:`v` (the hill sides), whose floor :math:`c(u)` may bend:

.. math:: f(u, v) = \tfrac12 \sum_i \lambda_i (v_i - c_i(u))^2 + \rho(u).

Heavy ball :math:`x_{t+1} = x_t - \eta g_t + \beta (x_t - x_{t-1})` moves along a river of slope
:math:`p = -\rho'` at the speed :math:`\gamma p`, where :math:`\gamma = \eta / (1 - \beta)` is the
*effective step* (and the learning rate in the form with an averaged gradient). The hill sides
limit :math:`\eta`, not :math:`\gamma`: curvature :math:`\lambda` is stable iff
:math:`\eta \lambda < 2 (1 + \beta)`. So momentum makes the greatest speed
:math:`(1 + \beta) / (1 - \beta)` times that of gradient descent (19 times at 0.9), and between
:math:`\eta \lambda = (1 \mp \sqrt\beta)^2` the hill sides contract by :math:`\sqrt\beta` a step
whatever the learning rate.

Source: the landscape of Wen et al., "Understanding Warmup-Stable-Decay Learning Rates: A River
Valley Loss Landscape Perspective", arXiv 2410.05192. The paper on heavy ball in it is known to us
by its abstract; the formulas and the guidance here are a reconstruction, derived from the linear
recursion of one hill direction.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int
from fadex.optim.common import check_hyperparameter

STYLES = ("polyak", "ema")


class RiverValley(NamedTuple):
    """A river valley. A point is a vector ``[1 + n]``; ``n`` is the number of hill directions."""

    loss: Callable[[jax.Array], jax.Array]  # [1 + n] -> []
    gradient: Callable[[jax.Array, jax.Array], jax.Array]  # (key, [1 + n]) -> [1 + n], with noise
    split: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # x -> u [], v - c(u) [n]
    join: Callable[[Any, Any], jax.Array]  # its inverse
    spectrum: jax.Array  # [n]: curvatures of the hill directions


class RiverLimits(NamedTuple):
    """What heavy ball can do in a valley; scalars (or arrays in the shape of the arguments)."""

    max_learning_rate: jax.Array  # edge of stability, in the units of the style
    max_effective_step: jax.Array  # the same edge as eta / (1 - beta)
    drift_gain: jax.Array  # max_effective_step / that of gradient descent, 2 / sharpness
    contraction: jax.Array  # of the hill direction, per step; above 1 it diverges
    oscillating: tuple[jax.Array, jax.Array]  # learning rates between which its roots are complex


class HeavyBallSetting(NamedTuple):
    """Hyperparameters for :func:`~fadex.optim.heavy_ball`."""

    learning_rate: jax.Array  # [], for style "polyak"
    decay: jax.Array  # []


def _potential(slope: Any) -> Callable[[jax.Array], jax.Array]:
    if callable(slope):
        return slope
    _check_number("slope", slope)
    return lambda u: -slope * u


def _valley(spectrum, floor, slope, noise_scale, rotation=None) -> RiverValley:
    """The valley ``floor: u -> c(u) [n]``; ``rotation`` [1+n, 1+n] takes (u, v) to x."""
    potential = _potential(slope)
    _check_number("noise_scale", noise_scale, minimum=0.0)

    def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inner = x if rotation is None else rotation.T @ x
        return inner[0], inner[1:] - floor(inner[0])

    def join(u: Any, offset: Any) -> jax.Array:
        u = jnp.asarray(u)
        inner = jnp.concatenate([u[None], offset + floor(u)])
        return inner if rotation is None else rotation @ inner

    def loss(x: jax.Array) -> jax.Array:
        u, offset = split(x)
        return 0.5 * jnp.sum(spectrum * offset**2) + potential(u)

    def gradient(key: jax.Array, x: jax.Array) -> jax.Array:
        noise = noise_scale * jax.random.normal(key, x.shape, x.dtype)
        return jax.grad(loss)(x) + (noise if rotation is None else rotation @ noise)

    return RiverValley(loss, gradient, split, join, spectrum)


def river_valley_2d(
    sharpness: Any = 100.0,
    amplitude: Any = 0.0,
    frequency: Any = 1.0,
    slope: Any = 0.1,
    *,
    noise_scale: Any = 0.0,
) -> RiverValley:
    r"""A valley in the plane, :math:`f(u, v) = \frac\lambda2 (v - A \sin \omega u)^2 + \rho(u)`.

    Args:
      sharpness: :math:`\lambda > 0`.
      amplitude, frequency: :math:`A` and :math:`\omega` of the floor; straight by default.
      slope: a number :math:`s` for :math:`\rho(u) = -s u`, or the function :math:`\rho` (convex
        with a minimum, say).
      noise_scale: standard deviation of the noise in ``gradient``: a scalar, or ``[2]`` for
        (u, v).

    All numbers may be traced, so a grid of valleys is one ``vmap``.

    Returns:
      :class:`RiverValley`; points are ``[2]``.

    Raises:
      ValueError: a number out of its range. TypeError: not a number or an array.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import river_valley_2d
      >>> valley = river_valley_2d(100.0, amplitude=0.3, slope=0.5)
      >>> x = valley.join(2.0, jnp.array([0.1]))    # 0.1 up the hill side
      >>> print(f"{valley.loss(x):.2f}")            # 100 / 2 * 0.1**2 - 0.5 * 2
      -0.50
    """
    _check_number("sharpness", sharpness, minimum=0.0, exclusive=True)
    _check_number("amplitude", amplitude)
    _check_number("frequency", frequency)
    floor = lambda u: amplitude * jnp.sin(frequency * u)[None]
    return _valley(jnp.asarray(sharpness)[None], floor, slope, noise_scale)


def river_valley_nd(
    key: jax.Array,
    dim_hill: int,
    spectrum: Any = (10.0, 1000.0),
    curve: Any = (0.3, 1.0),
    *,
    slope: Any = 0.1,
    noise_scale: Any = 0.0,
    rotate: bool = True,
) -> RiverValley:
    r"""A valley with ``n`` hill directions, turned so that no coordinate axis is one of them.

    :math:`f = \frac12 \|\Lambda^{1/2} (v - c(u))\|^2 + \rho(u)` with :math:`(u, v) = Q^\top x`.

    Args:
      key: draws the phases and frequencies of the floor and the rotation :math:`Q`.
      dim_hill: ``n >= 1``.
      spectrum: ``(low, high)`` for ``n`` curvatures log-spaced from high to low, or an array
        ``[n]`` of curvatures, all > 0.
      curve: ``(amplitude, frequency)`` for :math:`c_i(u) = A \sin(\omega_i u + \phi_i)` with
        :math:`\omega_i` uniform within a factor 1/2 .. 3/2 of ``frequency``; or a function
        ``u [] -> c [n]``.
      slope: a number :math:`s` for :math:`\rho(u) = -s u`, or the function :math:`\rho`.
      noise_scale: standard deviation of the noise in ``gradient``: a scalar, or ``[1 + n]`` for
        (u, v).
      rotate: False keeps :math:`Q = I`.

    Returns:
      :class:`RiverValley`; points are ``[1 + n]``.

    Raises:
      ValueError: ``dim_hill`` below 1, or a spectrum that is not positive or has another length.

    Example:
      >>> import jax
      >>> from fadex.optim import river_valley_nd
      >>> valley = river_valley_nd(jax.random.key(0), 3, (1.0, 100.0))
      >>> [f"{curvature:.1f}" for curvature in valley.spectrum]
      ['100.0', '10.0', '1.0']
      >>> u, offset = valley.split(valley.join(0.5, jax.numpy.ones(3)))
      >>> print(f"{u:.3f}", offset.round(3))
      0.500 [1. 1. 1.]
    """
    n = check_int("dim_hill", dim_hill, minimum=1)
    if isinstance(spectrum, tuple):
        if len(spectrum) != 2:
            raise ValueError(f"spectrum: expected (low, high) or an array, got {spectrum!r}")
        for end in spectrum:
            _check_number("spectrum", end, minimum=0.0, exclusive=True)
        low, high = spectrum
        at = jnp.linspace(0.0, 1.0, n)
        spectrum = jnp.exp((1 - at) * jnp.log(high) + at * jnp.log(low))
    else:
        if not isinstance(spectrum, jax.core.Tracer) and not np.all(np.asarray(spectrum) > 0):
            raise ValueError(f"spectrum: every curvature must be > 0, got {spectrum!r}")
        spectrum = jnp.asarray(spectrum)
        if spectrum.shape != (n,):
            raise ValueError(
                f"spectrum: expected shape ({n},) for dim_hill={n}, got {spectrum.shape}"
            )
    phase_key, rate_key, turn_key = jax.random.split(key, 3)
    if callable(curve):
        floor = curve
    else:
        amplitude, frequency = curve
        _check_number("curve", amplitude)
        _check_number("curve", frequency)
        phase = jax.random.uniform(phase_key, (n,), maxval=2 * math.pi)
        rate = jax.random.uniform(rate_key, (n,), minval=0.5, maxval=1.5)
        floor = lambda u: amplitude * jnp.sin(frequency * rate * u + phase)
    rotation = jax.random.orthogonal(turn_key, n + 1) if rotate else None
    return _valley(spectrum, floor, slope, noise_scale, rotation)


def hill_contraction(
    curvature: Any, learning_rate: Any, decay: Any, *, nesterov: bool = False
) -> jax.Array:
    r"""Factor per step by which heavy ball contracts along one hill direction.

    The larger modulus of the roots of :math:`z^2 - p z - q`, where
    :math:`p = 1 + \beta - \eta\lambda, q = -\beta`, and for Nesterov
    :math:`p = (1 + \beta)(1 - \eta\lambda), q = -\beta (1 - \eta\lambda)`.

    Args:
      curvature: :math:`\lambda`, any shape that broadcasts with the others.
      learning_rate: :math:`\eta` of style ``"polyak"``.
      decay: :math:`\beta`.

    Example:
      >>> from fadex.optim import hill_contraction
      >>> print(f"{hill_contraction(100.0, 0.02, 0.81):.3f}")     # sqrt(0.81)
      0.900
    """
    a = jnp.asarray(learning_rate) * curvature
    scale = 1 - a if nesterov else 1.0
    p = (1 + decay) * scale if nesterov else 1 + decay - a
    q = -decay * scale
    under = p**2 / 4 + q
    real = jnp.abs(p) / 2 + jnp.sqrt(jnp.maximum(under, 0.0))
    return jnp.where(under < 0, jnp.sqrt(jnp.maximum(-q, 0.0)), real)


def hill_variance(curvature: Any, learning_rate: Any, decay: Any, noise_scale: Any) -> jax.Array:
    r"""Stationary variance of heavy ball along one hill direction.

    .. math:: \operatorname{Var} v = \frac{\eta s^2 (1 + \beta)}
        {(1 - \beta) \lambda (2 (1 + \beta) - \eta \lambda)},

    infinite beyond the edge of stability. The loss stays :math:`\frac\lambda2 \operatorname{Var}
    v` above the floor. All arguments broadcast.

    Args:
      curvature: :math:`\lambda`; loss / length^2.
      learning_rate: :math:`\eta` of style ``"polyak"``.
      decay: :math:`\beta`.
      noise_scale: standard deviation :math:`s` of the gradient's noise in this direction.

    Example:
      >>> from fadex.optim import hill_variance
      >>> print(f"{hill_variance(100.0, 0.01, 0.0, 2.0):.5f}")   # eta s^2 / (lambda (2 - 1))
      0.00040
    """
    edge = 2 * (1 + decay) - jnp.asarray(learning_rate) * curvature
    inside = (1 - decay) * curvature * jnp.where(edge > 0, edge, 1.0)
    return jnp.where(edge > 0, learning_rate * noise_scale**2 * (1 + decay) / inside, jnp.inf)


def river_limits(
    sharpness: Any,
    beta: Any,
    style: str = "polyak",
    *,
    nesterov: bool = False,
    learning_rate: Any = None,
) -> RiverLimits:
    r"""Edge of stability, greatest drift and contraction of heavy ball in a valley.

    ======================= ============================ ======================================
    quantity                heavy ball                   Nesterov
    ======================= ============================ ======================================
    max :math:`\eta\lambda` :math:`2(1+\beta)`           :math:`2(1+\beta)/(1+2\beta)`
    drift gain              :math:`(1+\beta)/(1-\beta)`  the same, over :math:`1+2\beta`
    oscillating from        :math:`(1-\sqrt\beta)^2`     :math:`((1-\beta)/(1+\beta))^2`
    to                      :math:`(1+\sqrt\beta)^2`     1
    contraction there       :math:`\sqrt\beta`           :math:`\sqrt{\beta(1-\eta\lambda)}`
    ======================= ============================ ======================================

    Args:
      sharpness: largest curvature :math:`\lambda > 0`.
      beta: decay of the momentum, in [0, 1).
      style: units of the learning rates, as in :func:`~fadex.optim.heavy_ball`: ``"polyak"``
        (:math:`\eta`) or ``"ema"`` (:math:`\eta / (1 - \beta)`).
      nesterov: gradient at the look-ahead.
      learning_rate: where ``contraction`` is wanted, in the units of ``style``; None: half the
        edge, where heavy ball has :math:`\sqrt\beta`.

    Returns:
      :class:`RiverLimits`.

    Raises:
      ValueError: a number out of its range, or an unknown style.

    Example:
      >>> from fadex.optim import river_limits
      >>> limits = river_limits(100.0, 0.9)
      >>> print(f"{limits.max_learning_rate:.3f} {limits.max_effective_step:.2f}")
      0.038 0.38
      >>> print(f"{limits.drift_gain:.1f} {limits.contraction:.4f}")
      19.0 0.9487
    """
    _check_number("sharpness", sharpness, minimum=0.0, exclusive=True)
    _check_number("beta", beta)
    if isinstance(beta, numbers.Real):
        check_decay("beta", beta)
    check_choice("style", style, STYLES)
    sharpness, beta = jnp.asarray(sharpness, float), jnp.asarray(beta, float)
    unit = 1 / (1 - beta) if style == "ema" else 1.0
    if nesterov:
        edge = 2 * (1 + beta) / (1 + 2 * beta)
        band = ((1 - beta) / (1 + beta)) ** 2, jnp.ones_like(beta)
    else:
        edge = 2 * (1 + beta)
        band = (1 - jnp.sqrt(beta)) ** 2, (1 + jnp.sqrt(beta)) ** 2
    if learning_rate is None:
        plain = edge / (2 * sharpness)
    else:
        _check_number("learning_rate", learning_rate, minimum=0.0)
        plain = learning_rate / unit
    return RiverLimits(
        max_learning_rate=unit * edge / sharpness,
        max_effective_step=edge / ((1 - beta) * sharpness),
        drift_gain=edge / (2 * (1 - beta)),
        contraction=hill_contraction(sharpness, plain, beta, nesterov=nesterov),
        oscillating=tuple(unit * end / sharpness for end in band),
    )


def suggest(sharpness: Any, effective_step: Any) -> HeavyBallSetting:
    r"""Heavy ball that drifts with the effective step wanted, at half the edge of stability.

    .. math:: \beta = \max\left(0, \frac{\lambda\gamma - 1}{\lambda\gamma + 1}\right), \qquad
       \eta = \gamma (1 - \beta):

    the one pair with :math:`\eta / (1 - \beta) = \gamma` and :math:`\eta\lambda = 1 + \beta`.
    Where :math:`\lambda\gamma \le 1` no momentum is needed; the decay stays below 1, however large
    :math:`\lambda\gamma` is. In other words: the learning rate of
    the averaged form is chosen by the river (:func:`suggest_step`), the decay by the hill sides.

    Args:
      sharpness: :math:`\lambda > 0`, from :func:`~fadex.optim.sharpness`.
      effective_step: :math:`\gamma > 0`; length^2 / loss.

    Returns:
      :class:`HeavyBallSetting` for style ``"polyak"``; for ``"ema"`` the learning rate is
      ``effective_step`` itself.

    Raises:
      ValueError: a number that is not > 0.

    Example:
      >>> from fadex.optim import suggest
      >>> learning_rate, decay = suggest(1000.0, 0.02)
      >>> print(f"{learning_rate:.5f} {decay:.3f}")
      0.00190 0.905
    """
    _check_number("sharpness", sharpness, minimum=0.0, exclusive=True)
    _check_number("effective_step", effective_step, minimum=0.0, exclusive=True)
    step, curvature = jnp.asarray(effective_step, float), jnp.asarray(sharpness, float)
    plain = curvature * step <= 1
    # (s - 1) / (s + 1) with both parts divided by s, safe for huge s; and not taken for tiny ones
    inverse = jnp.where(plain, 1.0, 1 / jnp.where(plain, 1.0, curvature) / step)
    decay = jnp.where(plain, 0.0, (1 - inverse) / (1 + inverse))
    decay = jnp.minimum(decay, 1 - jnp.finfo(decay.dtype).epsneg)
    # gamma (1 - beta) without the cancellation in 1 - beta
    safe = jnp.where(plain, 1.0, step)
    momentum = 1 / (jnp.where(plain, 1.0, curvature) / 2 + 0.5 / safe)
    return HeavyBallSetting(jnp.where(plain, step, momentum), decay)


def suggest_step(
    noise_trace: Any, excess_loss: Any, slope: Any, displacement: Any, steps: Any
) -> jax.Array:
    r"""The effective step that the noise allows and the way along the river asks for.

    .. math:: \gamma = \min\left(\frac{2 E}{\sum_i s_i^2}, \frac{d}{T p}\right).

    At the setting of :func:`suggest` the noise keeps the loss at most :math:`\gamma \sum_i s_i^2
    / 2` above the floor, which is to stay below :math:`E`; and more than :math:`d` need not be
    travelled in :math:`T` steps of :math:`\gamma p`. A decay of the learning rate to 0 over the
    last fifth of the steps removes the excess, so :math:`E` may be generous.

    Args:
      noise_trace: :math:`\sum_i s_i^2`, the trace of the gradient noise's covariance, >= 0.
      excess_loss: :math:`E > 0`, the loss above the floor to be tolerated.
      slope: :math:`p > 0`, loss per length along the river.
      displacement: :math:`d > 0`, the length to travel.
      steps: :math:`T >= 1`.

    Returns:
      :math:`\gamma` ``[]``; learning rate and decay follow by :func:`suggest`.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from fadex.optim import suggest_step
      >>> print(f"{suggest_step(12.0, 0.12, 0.1, 100.0, 10_000):.3f}")
      0.020
    """
    _check_number("noise_trace", noise_trace, minimum=0.0)
    for name, value in (("excess_loss", excess_loss), ("slope", slope),
                        ("displacement", displacement)):
        _check_number(name, value, minimum=0.0, exclusive=True)
    _check_number("steps", steps, minimum=1.0)
    noise_trace = jnp.asarray(noise_trace, float)
    noisy = noise_trace > 0
    by_noise = jnp.where(noisy, 2 * excess_loss / jnp.where(noisy, noise_trace, 1.0), jnp.inf)
    return jnp.minimum(by_noise, jnp.asarray(displacement, float) / (steps * slope))


def check_decay(name: str, value: Any) -> None:
    """Check a decay in [0, 1) if it is a Python number; let arrays and schedules pass."""
    check_hyperparameter(name, value, minimum=0.0)
    if isinstance(value, numbers.Real) and value >= 1:
        raise ValueError(f"{name}: must lie in [0, 1), got {value!r}")


def _check_number(name: str, value: Any, **limits: Any) -> None:
    """As ``check_hyperparameter`` for what is no schedule; arrays of any shape pass."""
    if not isinstance(value, jax.Array | np.ndarray):
        check_hyperparameter(name, value, schedule=False, **limits)
