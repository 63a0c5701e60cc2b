r"""Zeroth-order estimates of a derivative: what the surrogates are the expectation of.

With :math:`z` symmetric, :math:`E z^2 = 1`, and a radius :math:`\delta`:

.. math:: G_2 = z\,\frac{f(w + \delta z) - f(w - \delta z)}{2\delta}, \qquad
          G_1 = z\,\frac{f(w + \delta z) - f(w)}{\delta}, \qquad
          G_0 = z\,\frac{f(w + \delta z)}{\delta}.

All three have the same expectation; of a quantizer, elementwise, that is
:func:`~fadex.quant.qat.surrogate_weight`. Of a loss over a whole vector, with independent
:math:`z_i`, it is the gradient of nothing simpler than the loss itself: see
:mod:`~fadex.quant.qat.theory`. One :math:`z` shared by a whole tensor is not offered: its cross
terms do not vanish.

Source: ZOE-Grad is known to us by its abstract alone; the estimators are the classical ones
(Nesterov and Spokoiny, "Random gradient-free minimization of convex functions", 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice, check_int
from fadex.quant.qat.perturbations import Perturbation, check_radius

__all__ = ["KINDS", "Estimate", "estimate"]

KINDS = ("antithetic", "forward", "one_point")


class Estimate(NamedTuple):
    """Mean of ``n`` draws and what is known about its error."""

    mean: jax.Array  # the shape of w
    stderr: jax.Array  # standard deviation of the mean, the shape of w
    second_moment: jax.Array  # mean of the squared draws, the shape of w


def estimate(
    key: jax.Array,
    f: Callable[[jax.Array], jax.Array],
    w: Any,
    perturbation: Perturbation,
    delta: Any,
    n: int,
    kind: str = "antithetic",
    *,
    batch: int = 4096,
) -> Estimate:
    """Zeroth-order estimate of the derivative of ``f`` at ``w``, from ``n`` independent draws.

    Args:
      key: of the draws.
      f: an elementwise function (the result has the shape of ``w``), or a loss (a scalar): then
        every coordinate is perturbed at once, independently, and each multiplies the same
        difference.
      w: the point, any shape.
      perturbation: one of ``PERTURBATIONS``, or from an inverse map.
      delta: radius > 0, in the units of ``w``.
      n: number of draws; static.
      kind: ``'antithetic'`` (two evaluations a draw, the least variance), ``'forward'`` or
        ``'one_point'``.
      batch: draws made at a time under ``vmap``; memory is ``batch`` times that of ``f``.

    Raises:
      ValueError: an unknown ``kind``; ``delta``, ``n`` or ``batch`` not positive; or ``f``
        returns neither a scalar nor the shape of ``w``.

    Example:
      >>> import jax
      >>> from fadex.quant.qat import PERTURBATIONS, estimate
      >>> gauss = PERTURBATIONS["gaussian"]
      >>> got = estimate(jax.random.key(0), lambda w: w**2, 1.5, gauss, 0.1, 20_000)
      >>> print(abs(float(got.mean) - 3.0) < 4 * float(got.stderr))
      True
    """
    check_choice("kind", kind, KINDS)
    n = check_int("n", n, minimum=1)
    batch = min(check_int("batch", batch, minimum=1), n)
    delta = check_radius(delta)
    w = jnp.asarray(w)
    w = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    out = jax.eval_shape(f, w)
    if out.shape not in ((), w.shape):
        raise ValueError(f"f: expected a result of shape () or {w.shape}, got {out.shape}")

    def draw(key):
        z = perturbation.sample(key, w.shape).astype(w.dtype)
        if kind == "antithetic":
            return z * (f(w + delta * z) - f(w - delta * z)) / (2 * delta)
        if kind == "forward":
            return z * (f(w + delta * z) - f(w)) / delta
        return z * f(w + delta * z) / delta

    def body(carry, key):
        count, mean, spread = carry
        fresh = jax.vmap(draw)(jax.random.split(key, batch))
        # The last batch may be wanted only in part.
        wanted = jnp.arange(batch) < n - count
        wanted = wanted.reshape(batch, *(1,) * w.ndim)
        size = jnp.minimum(n - count, batch)
        centre = jnp.sum(jnp.where(wanted, fresh, 0), 0) / size
        around = jnp.sum(jnp.where(wanted, (fresh - centre) ** 2, 0), 0)
        # Two samples joined (Chan): sums of squares would lose the digits of the variance.
        total = count + size
        shift = centre - mean
        mean = mean + shift * (size / total)
        spread = spread + around + shift**2 * (count * (size / total))
        return (total, mean, spread), None

    start = jnp.zeros((), jnp.int32), jnp.zeros_like(w), jnp.zeros_like(w)
    (_, mean, spread), _ = jax.lax.scan(body, start, jax.random.split(key, -(-n // batch)))
    return Estimate(mean, jnp.sqrt(spread / max(n - 1, 1) / n), spread / n + mean**2)
