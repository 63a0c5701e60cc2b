r"""Perturbations of unit variance, and the smoothing kernels that they induce.

A zeroth-order estimator shifts a weight by :math:`\delta z`, with :math:`z` symmetric and
:math:`E z^2 = 1`, and never differentiates. Its expectation at a step function is a sum of bumps,
one at each threshold, whose shape depends on the density :math:`\lambda` of :math:`z` alone:

.. math:: g_\delta(u) = \frac1\delta F\!\left(\frac{|u|}\delta\right), \qquad
          F(a) = \int_a^\infty z\,\lambda(z)\,dz.

:math:`g_\delta` is even, does not increase with :math:`|u|`, and integrates to
:math:`E z^2 = 1`. The families:

=================================  ===========================================  ================
perturbation                       :math:`F(a)`                                 surrogate
=================================  ===========================================  ================
Rademacher :math:`\pm 1`           1/2 for :math:`a < 1`, else 0                rectangle, STE
uniform on :math:`\pm\sqrt3`       :math:`\max(3 - a^2, 0) / (4 \sqrt3)`        parabola
Gaussian                           :math:`e^{-a^2/2} / \sqrt{2 \pi}`            Gaussian
Laplace, scale :math:`1/\sqrt2`    :math:`(a + 2^{-1/2}) e^{-\sqrt2 a} / 2`     rounded peak
:math:`2 / (\pi (1 + z^2)^2)`      :math:`1 / (\pi (1 + a^2))`                  arctan
inverse of the sigmoid surrogate   :math:`h\,\sigma'(h a)`, :math:`h = 1.5316`  logistic density
=================================  ===========================================  ================

Source: ZOE-Grad is known to us by its abstract alone; families and inverse map are a
reconstruction. The Gaussian row is Stein's identity.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_real

__all__ = [
    "BANDWIDTHS",
    "PERTURBATIONS",
    "InverseSurrogate",
    "Kernel",
    "Perturbation",
    "arctan",
    "gaussian",
    "laplace",
    "make_kernel",
    "perturbation_from_surrogate",
    "sigmoid",
    "ste",
    "uniform",
]

BANDWIDTHS = ("absolute", "relative")

# c of the sigmoid surrogate, 7 zeta(3) / (2 pi^2): its perturbation has unit variance at
# delta = 1 / sqrt(c) times the logistic scale.
_ZETA_3 = 1.2020569031595942
SIGMOID_C = 7 * _ZETA_3 / (2 * math.pi**2)
_SIGMOID_H = 1 / math.sqrt(SIGMOID_C)


class Perturbation(NamedTuple):
    """A symmetric random variable of mean 0 and variance 1, as pure functions.

    Attributes:
      sample: ``(key, shape) -> float32``.
      tail: ``F``, elementwise. Its argument is signed, and only atoms look at the sign: at
        ``|a| = 1`` Rademacher's is taken over the half-open interval ``[-1, 1)``, which is what
        a step function with ``H(0) = 1`` answers.
      density: elementwise; zero for what has atoms only.
      cdf: ``P(z <= a)``, elementwise.
      reach: the ``|a|`` beyond which ``tail`` is zero, or below 1e-8; infinite for heavy tails.
      name: for people.
    """

    sample: Callable[[jax.Array, tuple[int, ...]], jax.Array]
    tail: Callable[[jax.Array], jax.Array]
    density: Callable[[jax.Array], jax.Array]
    cdf: Callable[[jax.Array], jax.Array]
    reach: float
    name: str


_SQRT2, _SQRT3 = math.sqrt(2), math.sqrt(3)

RADEMACHER = Perturbation(
    sample=lambda key, shape: jax.random.rademacher(key, shape, jnp.float32),
    tail=lambda a: jnp.where((a >= -1) & (a < 1), 0.5, 0.0).astype(a.dtype),
    density=jnp.zeros_like,
    cdf=lambda a: (0.5 * (a >= -1) + 0.5 * (a >= 1)).astype(a.dtype),
    reach=1.0,
    name="rademacher",
)
UNIFORM = Perturbation(
    sample=lambda key, shape: jax.random.uniform(key, shape, minval=-_SQRT3, maxval=_SQRT3),
    tail=lambda a: jnp.maximum(3 - a * a, 0) / (4 * _SQRT3),
    density=lambda z: jnp.where(jnp.abs(z) <= _SQRT3, 1 / (2 * _SQRT3), 0.0).astype(z.dtype),
    cdf=lambda a: jnp.clip(a / (2 * _SQRT3) + 0.5, 0, 1),
    reach=_SQRT3,
    name="uniform",
)
GAUSSIAN = Perturbation(
    sample=lambda key, shape: jax.random.normal(key, shape),
    tail=lambda a: jnp.exp(-a * a / 2) / math.sqrt(2 * math.pi),
    density=lambda z: jnp.exp(-z * z / 2) / math.sqrt(2 * math.pi),
    cdf=jax.scipy.special.ndtr,
    reach=6.0,
    name="gaussian",
)
LAPLACE = Perturbation(
    sample=lambda key, shape: jax.random.laplace(key, shape) / _SQRT2,
    # Bounded: at infinity the product would be 0 times infinity.
    tail=lambda a: 0.5 * jnp.exp(-_SQRT2 * jnp.abs(a)) * (
        jnp.minimum(jnp.abs(a), 1e4) + 1 / _SQRT2
    ),
    density=lambda z: jnp.exp(-_SQRT2 * jnp.abs(z)) / _SQRT2,
    cdf=lambda a: jnp.where(
        a < 0, 0.5 * jnp.exp(-_SQRT2 * jnp.abs(a)), 1 - 0.5 * jnp.exp(-_SQRT2 * jnp.abs(a))
    ),
    reach=15.0,
    name="laplace",
)
# Student's t with three degrees of freedom, scaled to unit variance.
ARCTAN = Perturbation(
    sample=lambda key, shape: jax.random.t(key, 3.0, shape) / _SQRT3,
    tail=lambda a: 1 / (math.pi * (1 + a * a)),
    density=lambda z: 2 / (math.pi * (1 + z * z) ** 2),
    cdf=lambda a: 0.5 + (jnp.arctan(a) + a / (1 + a * a)) / math.pi,
    reach=math.inf,
    name="arctan",
)


def _logistic(u: jax.Array) -> jax.Array:
    """Density of the logistic distribution; from the small exponential, so it never overflows."""
    e = jnp.exp(-jnp.abs(u))
    return e / (1 + e) ** 2


def _sigmoid_density(z: jax.Array) -> jax.Array:
    u = _SIGMOID_H * z
    # tanh(u/2) / u, whose limit at 0 is 1/2.
    ratio = jnp.where(jnp.abs(u) < 1e-3, 0.5, jnp.tanh(u / 2) / jnp.where(u == 0, 1, u))
    return _SIGMOID_H**3 * _logistic(u) * ratio


@functools.cache
def _sigmoid_table() -> tuple[np.ndarray, np.ndarray]:
    def density(z):
        u = _SIGMOID_H * z
        e = np.exp(-u)
        return _SIGMOID_H**3 * e / (1 + e) ** 2 * np.tanh(u / 2) / u

    return _survival_table(density)


SIGMOID = Perturbation(
    sample=lambda key, shape: _sample_table(key, shape, _sigmoid_table()),
    tail=lambda a: _SIGMOID_H * _logistic(_SIGMOID_H * a),
    density=_sigmoid_density,
    cdf=lambda a: _cdf_table(a, _sigmoid_table()),
    reach=13.0,
    name="sigmoid",
)
PERTURBATIONS: dict[str, Perturbation] = {
    p.name: p for p in (RADEMACHER, UNIFORM, GAUSSIAN, LAPLACE, ARCTAN, SIGMOID)
}


# --- distributions given by their density alone


def _survival_table(density: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """``(log z, log P(|z| > z))``, ascending in z: linear between knots for any power law.

    Gauss-Legendre on each of 4096 cells, equal in ``log z``, from 1e-4 to 1e4.
    """
    edges = np.linspace(math.log(1e-4), math.log(1e4), 4097)
    nodes, weights = np.polynomial.legendre.leggauss(4)
    half = (edges[1] - edges[0]) / 2
    x = edges[:-1, None] + half * (1 + nodes)
    cells = 2 * half * (weights * density(np.exp(x)) * np.exp(x)).sum(1)
    # Summed from the far end, where the small ones are. Below the first knot the density is flat.
    first = 2 * float(density(np.exp(edges[:1]))[0]) * math.exp(edges[0])
    survival = np.append(np.cumsum(cells[::-1])[::-1], 0.0) / (cells.sum() + first)
    kept = survival > 1e-12
    return edges[kept], np.log(survival[kept])


def _sample_table(key: jax.Array, shape: tuple[int, ...], table: tuple) -> jax.Array:
    log_z, log_survival = (jnp.asarray(part, jnp.float32) for part in table)
    sign_key, key = jax.random.split(key)
    survival = 1 - jax.random.uniform(key, shape)  # in (0, 1]
    log_size = jnp.interp(jnp.log(survival), log_survival[::-1], log_z[::-1])
    return jax.random.rademacher(sign_key, shape, jnp.float32) * jnp.exp(log_size)


def _cdf_table(a: jax.Array, table: tuple) -> jax.Array:
    log_z, log_survival = (jnp.asarray(part, a.dtype) for part in table)
    size = jnp.abs(a)
    log_size = jnp.log(jnp.where(size > 0, size, 1))
    survival = jnp.exp(jnp.interp(log_size, log_z, log_survival, right=-jnp.inf))
    # Below the first knot the density is flat.
    edge = jnp.exp(log_z[0])
    survival = jnp.where(
        size < edge, 1 - (1 - jnp.exp(log_survival[0])) * size / edge, survival
    )
    return jnp.where(a < 0, survival / 2, 1 - survival / 2)


class InverseSurrogate(NamedTuple):
    """What :func:`perturbation_from_surrogate` found."""

    perturbation: Perturbation  # of unit variance
    delta: float  # the radius at which its kernel is the surrogate, divided by ``mass``
    c: float  # 2 int_0^inf -g'(z) / z dz of the surrogate divided by ``mass``
    mass: float  # integral of the surrogate over the line


def perturbation_from_surrogate(
    g: Callable[[jax.Array], jax.Array], name: str = "custom"
) -> InverseSurrogate:
    r"""The perturbation whose zeroth-order estimator has a given surrogate as its expectation.

    With :math:`\int g = 1`,

    .. math:: c = 2\int_0^\infty \frac{-g'(z)}{z}\,dz, \qquad \delta = c^{-1/2}, \qquad
              \lambda(z) = \frac{-\delta^2 g'(\delta z)}{z},

    which is a density of unit variance, and its kernel of radius :math:`\delta` is
    :math:`g`. Stretching the surrogate, :math:`g(u/\beta)/\beta`, gives the same perturbation
    with :math:`\beta \delta`. A surrogate with a kink at 0 (triangle, fast sigmoid, two-sided
    exponential) has :math:`c = \infty`: no perturbation of this family has it as its expectation.

    Quadrature in float64 on the host; the derivative by JAX.

    Args:
      g: even, positive and nonincreasing in ``|u|``, integrable; elementwise and made of
        ``jax.numpy``. It may have kinks away from 0 but no jump.
      name: of the perturbation.

    Returns:
      :class:`InverseSurrogate`; ``make_kernel(found.perturbation, found.delta)`` is the surrogate.

    Raises:
      ValueError: ``c`` is infinite, or ``g`` is not even, not nonincreasing, not continuous,
        not integrable.

    Example:
      >>> import jax
      >>> from fadex.quant.qat import perturbation_from_surrogate
      >>> logistic = lambda u: jax.nn.sigmoid(u) * jax.nn.sigmoid(-u)
      >>> found = perturbation_from_surrogate(logistic)
      >>> print(f"{found.c:.6f} {found.delta:.4f}")  # 7 zeta(3) / (2 pi^2)
      0.426278 1.5316
    """
    from scipy import integrate  # as slow to import as all of ours together

    with jax.enable_x64(True):
        value = jax.jit(lambda u: jnp.broadcast_to(g(u), u.shape))
        slope = jax.jit(jax.vmap(jax.grad(lambda u: jnp.reshape(g(u), ()))))
        on = lambda fn, u: np.asarray(
            fn(jnp.ravel(jnp.asarray(u, jnp.float64))), np.float64
        ).reshape(np.shape(u))

        probe = np.exp(np.linspace(math.log(1e-9), math.log(1e6), 400))
        right, left, down = on(value, probe), on(value, -probe), on(slope, probe)
        top = float(on(value, 0.0))
        if not (np.isfinite(right).all() and np.isfinite(top) and top > 0):
            raise ValueError(f"g: expected finite values and g(0) > 0, got g(0) = {top}")
        if not np.allclose(right, left, rtol=1e-9, atol=1e-12 * top):
            raise ValueError("g: expected an even function, got g(-u) != g(u)")
        if (down > 1e-9 * top).any() or (right < 0).any():
            raise ValueError("g: expected a positive function that does not increase with |u|")
        width = float(np.interp(-0.5, -right / top, probe))  # half of the height is lost here
        kink = -float(on(slope, 1e-8 * width)) * width / top
        if kink > 1e-4:
            raise ValueError(
                f"g: c is infinite: the surrogate {name!r} has a kink at 0 (slope "
                f"{-kink * top / width:.3g} on its right), so it is not the expectation of a "
                "zeroth-order estimator"
            )
        # In x = log(u / width): u du turns the ends into decays.
        inner = lambda x: np.exp(x) * width
        panels = np.linspace(-30.0, 25.0, 16)

        def quad(fn):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", integrate.IntegrationWarning)
                return sum(
                    integrate.quad(fn, a, b, epsabs=1e-13 * top, epsrel=1e-11, limit=400)[0]
                    for a, b in itertools.pairwise(panels)
                )

        mass = 2 * quad(lambda x: float(on(value, inner(x))) * inner(x))
        far = inner(panels[-1])
        if not math.isfinite(mass) or float(on(value, far)) * far > 1e-6 * mass:
            raise ValueError("g: expected an integrable function; it decays like 1/u or slower")
        lost = quad(lambda x: -float(on(slope, inner(x))) * inner(x))
        if abs(lost - (top - float(on(value, far)))) > 1e-5 * top:
            raise ValueError("g: expected a continuous function; it has jumps")
        c = 2 * quad(lambda x: -float(on(slope, inner(x)))) / mass
        delta = 1 / math.sqrt(c)
        table = _survival_table(lambda z: -(delta**2) * on(slope, delta * z) / z / mass)

    def density(z):
        shape, u = jnp.shape(z), jnp.ravel(delta * z)
        # -g'(u) / u at 0 is -g''(0); a step away from it serves in float32.
        u = jnp.where(jnp.abs(u) < 1e-3 * width, 1e-3 * width, u)
        down = jax.vmap(jax.grad(lambda v: jnp.reshape(g(v), ())))(u)
        return (-(delta**3) * down / u / mass).reshape(shape)

    perturbation = Perturbation(
        sample=lambda key, shape: _sample_table(key, shape, table),
        tail=lambda a: delta * g(delta * a) / mass,
        density=density,
        cdf=lambda a: _cdf_table(a, table),
        reach=math.inf,
        name=name,
    )
    return InverseSurrogate(perturbation, delta, c, mass)


# --- kernels


@dataclasses.dataclass(frozen=True)
class Kernel:
    r"""A perturbation with its radius: what a surrogate needs to know.

    A pytree whose one leaf is ``delta`` (:func:`ste` has none), so a kernel may be an argument of
    a jitted function and sweeps may ``vmap`` over it.

    Attributes:
      perturbation: the family.
      bandwidth: ``'absolute'``: one radius for all thresholds, the theorem's. ``'relative'``:
        :math:`\delta_k = \kappa D_k / 2` for a jump of :math:`D_k`, so cells of every width have
        the same shape.
      delta: the radius in code units, or :math:`\kappa`: a number, an array that broadcasts
        against the weights, or a schedule (to be resolved by :meth:`at`). ``None``, of
        :func:`ste`: half of each cell, static, so that it stays exact as an argument of ``jit``.
    """

    perturbation: Perturbation
    bandwidth: str
    delta: Any

    @property
    def scheduled(self) -> bool:
        """Whether ``delta`` is a schedule."""
        return callable(self.delta)

    def at(self, count: Any) -> Kernel:
        """The kernel at step ``count`` of its schedule; itself where there is none."""
        if not self.scheduled:
            return self
        return dataclasses.replace(self, delta=check_radius(self.delta(count)))


jax.tree_util.register_dataclass(
    Kernel, data_fields=["delta"], meta_fields=["perturbation", "bandwidth"]
)


def check_radius(delta: Any) -> Any:
    """A radius: a number as ``float``, an array as it is; raises where it is known to be bad."""
    if isinstance(delta, jax.core.Tracer):
        return delta
    if not isinstance(delta, (jax.Array, np.ndarray)):
        return check_real("delta", delta, minimum=0.0, exclusive=True)
    if not (jnp.issubdtype(delta.dtype, jnp.floating) or jnp.issubdtype(delta.dtype, jnp.integer)):
        raise TypeError(f"delta: expected real numbers, got dtype {delta.dtype}")
    values = np.asarray(delta, np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"delta: must be positive and finite everywhere, got {delta!r}")
    return delta


def make_kernel(
    perturbation: Perturbation, delta: Any = 0.35, bandwidth: str = "absolute"
) -> Kernel:
    """A :class:`Kernel` from any perturbation.

    Args:
      perturbation: one of ``PERTURBATIONS`` or of :func:`perturbation_from_surrogate`.
      delta: radius > 0, in steps of the grid (``'absolute'``) or in half-cells (``'relative'``):
        a number, an array or a schedule. On a grid of step 1, useful radii of a Gaussian are 0.25
        to 0.5: smaller ones starve weights far from thresholds, larger ones are STE with
        leaking edges.
      bandwidth: ``'absolute'`` or ``'relative'``.

    Raises:
      ValueError: ``delta`` not positive (a traced one gives NaN instead), or an unknown
        ``bandwidth``.
      TypeError: not a perturbation, or a ``delta`` that is no number, array or schedule.

    Example:
      >>> from fadex.quant.qat import PERTURBATIONS, make_kernel
      >>> make_kernel(PERTURBATIONS["laplace"], 0.5).delta
      0.5
    """
    if not isinstance(perturbation, Perturbation):
        raise TypeError(f"perturbation: expected a Perturbation, got {perturbation!r}")
    check_choice("bandwidth", bandwidth, BANDWIDTHS)
    return Kernel(perturbation, bandwidth, delta if callable(delta) else check_radius(delta))


def gaussian(delta: Any = 0.35, bandwidth: str = "absolute") -> Kernel:
    """Gaussian kernel: the derivative of the quantizer smoothed by a Gaussian (Stein).

    Arguments, errors: as :func:`make_kernel`.

    Example:
      >>> from fadex.quant.qat import gaussian, surrogate_weight
      >>> s = surrogate_weight(0.0, [-1.5, -0.5, 0.5, 1.5], kernel=gaussian(0.35))
      >>> print(f"{s:.4f}")
      1.1783
    """
    return make_kernel(GAUSSIAN, delta, bandwidth)


def uniform(delta: Any = 0.35, bandwidth: str = "absolute") -> Kernel:
    """Parabola (Epanechnikov) on ``sqrt(3) delta``. Arguments: as :func:`make_kernel`."""
    return make_kernel(UNIFORM, delta, bandwidth)


def laplace(delta: Any = 0.35, bandwidth: str = "absolute") -> Kernel:
    """Kernel with exponential tails. Arguments: as :func:`make_kernel`."""
    return make_kernel(LAPLACE, delta, bandwidth)


def arctan(delta: Any = 0.35, bandwidth: str = "absolute") -> Kernel:
    """The arctan surrogate of spiking networks, a Cauchy density of scale ``delta``.

    Arguments: as :func:`make_kernel`.
    """
    return make_kernel(ARCTAN, delta, bandwidth)


def sigmoid(delta: Any = 0.35, bandwidth: str = "absolute") -> Kernel:
    """The sigmoid surrogate, a logistic density of scale ``delta / 1.5316``.

    Arguments: as :func:`make_kernel`.
    """
    return make_kernel(SIGMOID, delta, bandwidth)


def ste() -> Kernel:
    """The clipped straight-through estimator: Rademacher with half of each cell as its radius.

    With midpoint thresholds the rectangles tile the range of the levels, so the surrogate's weight
    is exactly 1 from the lowest level up to (not including) the highest and 0 outside: it does
    not see how far a weight is from its threshold. It has no radius to trace or to sweep.

    Example:
      >>> from fadex.quant.qat import ste, surrogate_weight
      >>> surrogate_weight([-1.6, -1.5, 0.2, 1.4], [-1.5, -0.5, 0.5, 1.5], kernel=ste()).tolist()
      [0.0, 1.0, 1.0, 1.0]
    """
    return Kernel(RADEMACHER, "relative", None)
