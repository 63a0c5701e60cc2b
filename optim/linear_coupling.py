"""Weights and couplings shared by AcceleGrad and AcceleGrad#."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.checks import is_concrete
from fadex.optim.common import check_hyperparameter

__all__ = ["certificate_schedule", "levy_weights", "linear_weights"]


def levy_weights(count: jax.Array) -> jax.Array:
    """α_t of AcceleGrad (arXiv 1809.02864): 1 for t <= 2, (t + 1)/4 from t = 3 on.

    >>> [float(levy_weights(t)) for t in (0, 2, 3, 11)]
    [1.0, 1.0, 1.0, 3.0]
    """
    t = jnp.asarray(count, float)
    return jnp.where(t < 3, 1.0, (t + 1) / 4)


def linear_weights(count: jax.Array) -> jax.Array:
    """α_t = (t + 2)/2, the weights of Nesterov's method in its linear-coupling form.

    >>> [float(linear_weights(t)) for t in (0, 2)]
    [1.0, 2.0]
    """
    return (jnp.asarray(count, float) + 2) / 2


def certificate_schedule(
    initial: float | jax.Array, power: float | jax.Array = 0.75
) -> Callable[[Any], jax.Array]:
    r"""γ_t = γ_0 / (t + 1)^p, the step sizes of the rate certificates.

    Under a local μ-KL condition :math:`\|\nabla f\|_* \ge \mu (f - f^*)` the abstract of
    AcceleGrad# gives O(K^(-1/4)) in general (p = 3/4) and O(K^(-1/3)) for the last iterate in a
    cross-entropy regime (p = 2/3). The exponents' assignment is a reconstruction.

    >>> [round(float(certificate_schedule(1.0, 0.5)(t)), 3) for t in (0, 3, 99)]
    [1.0, 0.5, 0.1]
    """
    check_hyperparameter("initial", initial, minimum=0.0, exclusive=True, schedule=False)
    check_hyperparameter("power", power, minimum=0.0, maximum=1.0, schedule=False)
    return lambda count: initial / (jnp.asarray(count, float) + 1) ** power


def resolve_weights(weights: Any) -> Callable[[jax.Array], jax.Array]:
    """A function t -> α_t from a name or a schedule."""
    names = {"levy": levy_weights, "linear": linear_weights,
             "constant": lambda count: jnp.ones(())}
    if callable(weights):
        first = weights(0)
        if is_concrete(first) and not 1 <= float(first) < math.inf:
            raise ValueError(
                f"weight_schedule: α(t) >= 1 makes τ = 1/α a coupling in (0, 1], got α(0) = {first}"
            )
        return weights
    if not isinstance(weights, str) or weights not in names:
        options = ", ".join(map(repr, names))
        raise ValueError(f"weight_schedule: expected one of {options} or a schedule, "
                         f"got {weights!r}")
    return names[weights]


def resolve_coupling(coupling: Any, weights: Any) -> Callable[[jax.Array], jax.Array]:
    """A function t -> τ_t: 1/α_t, a constant in (0, 1], or the given schedule."""
    if coupling is None:
        if weights == "constant":
            raise ValueError(
                "coupling: with weight_schedule='constant' the default 1/α = 1 would ignore the "
                "geometry branch; give a number in (0, 1), such as 0.1"
            )
        alpha = resolve_weights(weights)
        return lambda count: 1 / alpha(count)
    check_hyperparameter("coupling", coupling, minimum=0.0, maximum=1.0)
    if callable(coupling):
        return coupling
    if isinstance(coupling, numbers.Real) and coupling == 0:
        raise ValueError(f"coupling: must lie in (0, 1], got {coupling!r}")
    return lambda count: jnp.asarray(coupling)
