r"""Heavy ball (classical momentum) in both of its parametrisations, with a guard against spikes.

Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; with
``nesterov`` the form of Sutskever et al., "On the importance of initialization and momentum in
deep learning", ICML 2013. The guard is ours. How to choose learning rate and decay together:
:func:`~fadex.optim.suggest`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_choice
from fadex.optim.common import (
    ScalarOrSchedule,
    at,
    check_dtype,
    check_hyperparameter,
    check_leaves,
    zeros_in_state,
)
from fadex.optim.river import STYLES, check_decay
from fadex.optim.valley_monitors import safe_norm

# Memory of the guard's running mean: about a hundred steps.
GUARD_DECAY = 0.99


class HeavyBallState(NamedTuple):
    """State of :func:`scale_by_heavy_ball`."""

    count: jax.Array  # int32 []: steps made
    momentum: Any  # like params, in the accumulator's dtype
    guard_norm: jax.Array  # float32 []: running mean of the guarded gradients' norms


def scale_by_heavy_ball(
    decay: ScalarOrSchedule = 0.9,
    style: str = "polyak",
    nesterov: bool = False,
    guard: float | jax.Array | None = None,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum without the learning rate.

    .. math:: m \leftarrow \beta m + c g, \qquad
       \text{update} = m \text{ or, for Nesterov, } \beta m + c g,

    with :math:`c = 1` (``"polyak"``) or :math:`c = 1 - \beta` (``"ema"``).

    Args: as in :func:`heavy_ball`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.optim import scale_by_heavy_ball
      >>> opt = scale_by_heavy_ball(0.5)
      >>> state = opt.init(jnp.zeros(()))
      >>> for _ in range(3):
      ...     update, state = opt.update(jnp.ones(()), state)
      >>> print(update)
      1.75
    """
    check_choice("style", style, STYLES)
    check_decay("decay", decay)
    check_dtype("accumulator_dtype", accumulator_dtype)
    if guard is not None:
        check_hyperparameter("guard", guard, minimum=1.0, exclusive=True, schedule=False)

    def init_fn(params: Any) -> HeavyBallState:
        check_leaves("params", params)
        return HeavyBallState(
            jnp.zeros((), jnp.int32),
            zeros_in_state(params, accumulator_dtype),
            jnp.zeros((), jnp.float32),
        )

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates = jax.tree.map(jnp.asarray, updates)
        like = updates if params is None else params
        count, momentum, mean = state
        beta = at(decay, count)
        gain = 1 - beta if style == "ema" else 1.0
        factor = 1.0
        if guard is not None:
            factor, mean = _guard(updates, count, mean, guard)
        # In float32 or better, whatever the gradients' dtype: one rounding per step.
        work = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        fresh = jax.tree.map(lambda g: gain * (factor * work(g)), updates)
        new = jax.tree.map(lambda g, m: beta * work(m) + g, fresh, momentum)
        out = jax.tree.map(lambda g, m: beta * m + g, fresh, new) if nesterov else new
        out = jax.tree.map(lambda x, p: x.astype(jnp.result_type(p)), out, like)
        new = jax.tree.map(lambda x, m: x.astype(m.dtype), new, momentum)
        return out, HeavyBallState(optax.safe_increment(count), new, mean)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _guard(updates, count, mean, guard):
    """Factor for the gradient, and the running mean of norms with this one (guarded) in it."""
    norm = safe_norm(updates).astype(jnp.float32)
    most = guard * mean
    # Nothing to compare the first gradient with, nor a later one while all were 0; a gradient
    # that is not finite passes, for `optax.apply_if_finite` to see.
    spike = (count > 0) & (mean > 0) & (norm > most) & jnp.isfinite(norm)
    factor = jnp.where(spike, most / jnp.where(norm > 0, norm, 1.0), 1.0)
    kept = jnp.where(spike, most, norm)
    # The plain mean while it is young, then an exponential one.
    weight = jnp.maximum(1.0 / (count.astype(jnp.float32) + 1.0), 1.0 - GUARD_DECAY)
    mean = jnp.where(jnp.isfinite(kept), mean + weight * (kept - mean), mean)
    return factor, mean.astype(jnp.float32)


def heavy_ball(
    learning_rate: ScalarOrSchedule,
    decay: ScalarOrSchedule = 0.9,
    style: str = "polyak",
    nesterov: bool = False,
    guard: float | jax.Array | None = None,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Heavy ball: the polyak or the averaged ("ema") form of momentum.

    .. math:: \text{polyak: } m \leftarrow \beta m + g, \quad
       \text{ema: } m \leftarrow \beta m + (1 - \beta) g, \qquad x \leftarrow x - \eta m.

    With a constant learning rate polyak's is
    :math:`x_{t+1} = x_t - \eta g_t + \beta (x_t - x_{t-1})`, and the forms are equal at
    :math:`\eta_\mathrm{ema} = \eta / (1 - \beta)`. In a valley of curvature :math:`\lambda` they
    are stable below :math:`2 (1 + \beta) / \lambda` and :math:`2 (1 + \beta) / ((1 - \beta)
    \lambda)`: see :func:`~fadex.optim.river_limits`.

    Args:
      learning_rate: :math:`\eta`: a number, an array or a schedule.
      decay: :math:`\beta` in [0, 1): a number, an array or a schedule.
      style: ``"polyak"`` or ``"ema"``. Under a schedule of the decay, only ``"ema"`` keeps the
        speed along a river.
      nesterov: use :math:`\beta m + c g` of the new :math:`m`, so the parameters are the
        look-ahead point; stable below :math:`2 (1 + \beta) / ((1 + 2 \beta) \lambda)`.
      guard: a factor > 1. A gradient whose norm (over all leaves) exceeds ``guard`` times the
        running mean of the norms is scaled down to that. The mean takes in the guarded norm, so
        one spike moves it little, while gradients that stay large are let through after a while.
        None: off.
      accumulator_dtype: of the momentum; by default that of the parameters, but float32 at least.

    Returns:
      ``optax.GradientTransformationExtraArgs``. State: the momentum and two scalars, found by
      ``optax.tree.get(state, "momentum")`` and ``"guard_norm"``. Updates have the dtype of the
      parameters where these are passed, else that of the gradients.

    Raises:
      ValueError: a number out of its range, an unknown style, or params that are not real.
      TypeError: no dtype (name ``accumulator_dtype`` in the ``static_args`` of
        ``inject_hyperparams``).

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fadex.optim import heavy_ball, river_valley_2d, suggest
      >>> valley = river_valley_2d(100.0, slope=0.1)
      >>> opt = heavy_ball(*suggest(100.0, effective_step=0.2))
      >>> x = valley.join(0.0, jnp.array([0.2]))
      >>> state = opt.init(x)
      >>> for _ in range(200):
      ...     update, state = opt.update(jax.grad(valley.loss)(x), state)
      ...     x = optax.apply_updates(x, update)
      >>> u, offset = valley.split(x)
      >>> print(f"{u:.2f} {abs(offset[0]):.3f}")     # about 200 * 0.2 * 0.1 along the river
      3.81 0.000
    """
    check_hyperparameter("learning_rate", learning_rate, minimum=0.0)
    return optax.chain(
        scale_by_heavy_ball(decay, style, nesterov, guard, accumulator_dtype),
        optax.scale_by_learning_rate(learning_rate),
    )
