r"""Momentum from the batch size, for models that can fit their data.

Where the data can be interpolated, mini-batch noise vanishes at the solution and limits only the
*effective* step :math:`\gamma = \eta/(1-\beta)`, while curvature limits :math:`\eta`. With ``R^2``
the least constant for which :math:`\mathbb E[\|a\|^2 aa^\top] \preceq R^2 H`, where
:math:`H = \mathbb E\,aa^\top`,

.. math:: \gamma = \frac{cB}{R^2}, \qquad \eta = \min\Bigl(\gamma, \frac{s}{\lambda_{\max}}\Bigr),
   \qquad 1 - \beta = \max\Bigl(\frac{\eta}{\gamma},\; 2\sqrt{\eta\mu} - \eta\mu\Bigr).

So ``1 - beta = s R^2 / (c B lambda_max)``: the memory of momentum grows with the batch, an e-fold
of the error takes :math:`R^2/(cB\mu)` steps, and the number of rows touched does not depend on the
batch size, up to :math:`B_{\mathrm{sat}} = (R^2/\lambda_{\max})\sqrt{\lambda_{\max}/\mu}`. Plain
SGD stops gaining at :math:`B \approx R^2/\lambda_{\max}`.

``R^2`` and not the trace of ``H``: with the trace, spectra of low effective rank diverge.

Source: the setting and the claim are those of Garg and Derezinski, "Perfect Parallelization in
Mini-Batch SGD with Classical Momentum Acceleration" (arXiv 2605.18609), known to us by its
abstract; the rule is a reconstruction, derived from exact second moments
(:mod:`fadex.optim.interpolation_oracle`).
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_choice
from fadex.core.pytree import flatten_with_paths, map_with_path
from fadex.optim.common import (
    ScalarOrSchedule,
    at,
    check_dtype,
    check_hyperparameter,
    check_leaves,
    state_dtype_of,
    zeros_in_state,
)
from fadex.optim.interpolation_oracle import STYLES
from fadex.optim.river import check_decay

# Largest eta * lambda_max without noise, in the limit of beta -> 0 and beta -> 1.
_CURVATURE_LIMITS = {"heavy_ball": 2.0, "nesterov": 4.0 / 3.0}


class Momentum(NamedTuple):
    """Learning rate and momentum for one batch size."""

    learning_rate: jax.Array  # [], eta
    decay: jax.Array  # [], beta
    saturation: jax.Array  # [], the batch size at which more rows stop helping; inf without mu


class SGDMomentumState(NamedTuple):
    """State of :func:`sgd_momentum`."""

    count: jax.Array  # int32 [], steps taken
    lookahead: jax.Array  # [], how many velocities the parameters stand ahead; 0 for heavy ball
    velocity: Any  # like the parameters, float32 or wider: x_t - x_{t-1}


def _check_rule(batch_size, row_norm_bound, lmax, mu, style, c, s, min_decay, schedule):
    check_choice("style", style, STYLES)
    positive = dict(minimum=0.0, exclusive=True, schedule=schedule)
    check_hyperparameter("batch_size", batch_size, minimum=1.0, schedule=schedule)
    check_hyperparameter("row_norm_bound", row_norm_bound, **positive)
    check_hyperparameter("lmax", lmax, **positive)
    if mu is not None:
        check_hyperparameter("mu", mu, **positive)
        if isinstance(mu, numbers.Real) and isinstance(lmax, numbers.Real) and mu > lmax:
            raise ValueError(f"mu: must be <= lmax = {lmax}, got {mu!r}")
    check_hyperparameter("c", c, maximum=2.0, **positive)
    check_hyperparameter("s", s, maximum=_CURVATURE_LIMITS[style], **positive)
    check_hyperparameter("min_decay", min_decay, minimum=0.0, maximum=1.0, schedule=schedule)


def interpolation_momentum(
    batch_size: float | jax.Array,
    row_norm_bound: float | jax.Array,
    lmax: float | jax.Array,
    mu: float | jax.Array | None = None,
    *,
    style: str = "heavy_ball",
    c: float | jax.Array = 4 / 3,
    s: float | jax.Array = 0.5,
    min_decay: float | jax.Array = 0.01,
) -> Momentum:
    r"""Learning rate and momentum for a batch size, where the data can be interpolated.

    .. math:: \gamma = cB/R^2, \quad \eta = \min(\gamma, s/\lambda_{\max}), \quad
       1 - \beta = \max(\eta/\gamma,\; 2\sqrt{\eta\mu} - \eta\mu)

    and :math:`\beta = 0` where :math:`\eta = \gamma`. Without ``mu`` the second term of the maximum
    is ``min_decay``. All arguments but ``style`` may be traced scalars.

    Args:
      batch_size: rows (examples) averaged in one gradient, >= 1.
      row_norm_bound: ``R^2`` in units of curvature: 1 for normalised rows, ``max |a_i|^2`` for
        bounded ones, ``trace(H) + 2 lmax`` for Gaussian ones; for a network see
        :func:`~fadex.optim.curvature_from_rows`.
      lmax: largest eigenvalue of the Hessian of the mean loss.
      mu: smallest (non-zero) one, if known, <= ``lmax``. Above the saturation batch size it sets
        the momentum.
      style: ``"heavy_ball"`` or ``"nesterov"``; the rule is the same, its limits differ.
      c: how much of the noise limit to use, in (0, 2); heavy ball is stable while about
        ``c < 2 - s/(1 + beta)``, which is 1.5 at worst for ``s = 1/2``. The default 4/3 is a third
        faster than 1 and was stable in every random problem tried, with Nesterov, too (1.5 was
        not).
      s: how much of the curvature limit to use, in (0, 2), or (0, 4/3) for Nesterov, which
        was unstable in a third of the random problems at 1.3 and in none at 1.
      min_decay: smallest ``1 - beta`` without ``mu``, in [0, 1].

    Returns:
      A :class:`Momentum`; its ``saturation`` is :math:`(R^2/\lambda_{\max})\sqrt{\lambda_{\max}
      /\mu}`, infinite without ``mu``.

    Raises:
      ValueError, TypeError: a Python number out of range, a schedule, or an unknown ``style``.

    Source: a reconstruction, see the module.

    Example:
      >>> from fadex.optim import interpolation_momentum
      >>> for batch_size in (1, 16, 64):
      ...     m = interpolation_momentum(batch_size, row_norm_bound=10.0, lmax=1.0)
      ...     print(batch_size, f"{m.learning_rate:.3f} {m.decay:.4f}")
      1 0.133 0.0000
      16 0.500 0.7656
      64 0.500 0.9414
    """
    _check_rule(batch_size, row_norm_bound, lmax, mu, style, c, s, min_decay, schedule=False)
    dtype = jnp.result_type(float)
    batch_size, row_norm_bound, lmax, c, s = (
        jnp.asarray(v, dtype) for v in (batch_size, row_norm_bound, lmax, c, s)
    )
    gamma = c * batch_size / row_norm_bound
    eta = jnp.minimum(gamma, s / lmax)
    if mu is None:
        floor = jnp.asarray(min_decay, dtype)
        saturation = jnp.asarray(jnp.inf, dtype)
    else:
        mu = jnp.asarray(mu, dtype)
        floor = 2 * jnp.sqrt(eta * mu) - eta * mu
        saturation = row_norm_bound / jnp.sqrt(lmax * mu)
    decay = jnp.where(gamma <= s / lmax, 0.0, 1 - jnp.maximum(eta / gamma, floor))
    return Momentum(eta, decay, saturation)


def scale_momentum(
    decay: float | jax.Array,
    batch_size: float | jax.Array,
    new_batch_size: float | jax.Array,
    min_decay: float | jax.Array = 0.01,
) -> jax.Array:
    r"""The rule without constants: carry a tuned momentum over to another batch size.

    .. math:: 1 - \beta = \operatorname{clip}\Bigl((1 - \beta_0)\,\frac{B_0}{B},\;
       \text{min\_decay},\; 1\Bigr)

    with the same learning rate. Below the batch size ``B_0 (1 - beta_0)`` no momentum is left, and
    the learning rate has to fall in proportion to ``B``.

    The loss after equal numbers of examples then stays the same (``benchmarks/optim_momentum.py``:
    a digits network, batch 16 to 128), as long as the memory ``1/(1 - beta)`` is a small part of
    the run: as batches grow, the run gets shorter and the memory longer, so choose ``min_decay`` at
    several times ``1/num_steps``. Do not carry over a momentum from the edge of stability.

    Args:
      decay: ``beta_0`` in [0, 1), tuned together with the learning rate at ``batch_size``.
      batch_size, new_batch_size: ``B_0`` and ``B``, >= 1, in rows (examples).
      min_decay: smallest ``1 - beta`` in (0, 1].

    Returns:
      ``beta`` for ``new_batch_size``.

    Raises:
      ValueError, TypeError: a Python number out of range, or a schedule.

    Source: a reconstruction, see the module.

    Example:
      >>> from fadex.optim import scale_momentum
      >>> [round(float(scale_momentum(0.5, 16, b)), 4) for b in (8, 16, 64, 4096)]
      [0.0, 0.5, 0.875, 0.99]
    """
    check_hyperparameter("decay", decay, schedule=False)
    check_decay("decay", decay)
    check_hyperparameter("batch_size", batch_size, minimum=1.0, schedule=False)
    check_hyperparameter("new_batch_size", new_batch_size, minimum=1.0, schedule=False)
    check_hyperparameter("min_decay", min_decay, minimum=0.0, maximum=1.0, schedule=False)
    if isinstance(min_decay, numbers.Real) and min_decay == 0:
        raise ValueError(f"min_decay: must lie in (0, 1], got {min_decay!r}")
    decay = jnp.asarray(decay, jnp.result_type(float))
    return 1 - jnp.clip((1 - decay) * batch_size / new_batch_size, min_decay, 1.0)


def sgd_momentum(
    learning_rate: ScalarOrSchedule,
    decay: ScalarOrSchedule,
    *,
    style: str = "heavy_ball",
    velocity_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD with heavy-ball or Nesterov momentum, with the velocity kept as a displacement.

    .. math:: v_{t+1} = \beta v_t - \eta g_t, \quad x_{t+1} = x_t + v_{t+1}
       \quad\text{(heavy ball)}

    For Nesterov the parameters hold :math:`y_t = x_t + \beta v_t`, where the gradient is taken:
    :math:`x_{t+1} = y_t - \eta g(y_t)`, :math:`v_{t+1} = x_{t+1} - x_t`. The iterate ``x_t`` comes
    from :func:`momentum_eval_params`. With constant hyperparameters this is ``optax.sgd``; when
    the learning rate changes the velocity stays the true displacement, as in
    :math:`x_{t+1} = x_t - \eta_t g_t + \beta_t(x_t - x_{t-1})`, which ``optax.sgd`` rescales.

    The update is a displacement: nothing that rescales it may follow in a chain.

    Args:
      learning_rate: ``eta``, a number, array or schedule.
      decay: ``beta`` in [0, 1], likewise.
      style: ``"heavy_ball"`` or ``"nesterov"``.
      velocity_dtype: dtype of the velocity; by default that of the parameter, at least float32.

    Returns:
      A transform with the state :class:`SGDMomentumState`, 4 bytes a parameter. Updates have the
      dtype of the parameters where these are passed, else that of the gradients.

    Raises:
      ValueError, TypeError: a Python number out of range, an unknown ``style``, no dtype (name
        ``velocity_dtype`` in the ``static_args`` of ``inject_hyperparams``), or (at init)
        parameters that are not real floating-point arrays.

    Source: Polyak 1964; Nesterov 1983.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fadex.optim import sgd_momentum
      >>> tx = sgd_momentum(0.1, 0.9)
      >>> x = jnp.ones(2); state = tx.init(x)
      >>> for _ in range(2):
      ...     updates, state = tx.update(x, state); x = optax.apply_updates(x, updates)
      >>> print(x.round(3))
      [0.72 0.72]
    """
    check_choice("style", style, STYLES)
    check_hyperparameter("learning_rate", learning_rate, minimum=0.0)
    check_hyperparameter("decay", decay, minimum=0.0, maximum=1.0)
    return _momentum_transform(
        lambda count: (at(learning_rate, count), at(decay, count)), style, velocity_dtype
    )


def _momentum_transform(hyperparameters, style, velocity_dtype):
    """The transform; ``hyperparameters(count)`` is the pair ``(learning rate, decay)``."""
    check_dtype("velocity_dtype", velocity_dtype)
    scalar = jnp.result_type(float)

    def init_fn(params):
        check_leaves("params", params)
        return SGDMomentumState(
            jnp.zeros([], jnp.int32), jnp.zeros([], scalar), zeros_in_state(params, velocity_dtype)
        )

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates = jax.tree.map(jnp.asarray, updates)
        like = updates if params is None else params
        eta, beta = hyperparameters(state.count)
        eta, beta = jnp.asarray(eta), jnp.asarray(beta)
        # With Nesterov the last step ended `lookahead` velocities ahead of x_t.
        carried = state.lookahead if style == "nesterov" else beta

        def advance(g, v):
            return carried.astype(v.dtype) * v - eta.astype(v.dtype) * g.astype(v.dtype)

        velocity = jax.tree.map(advance, updates, state.velocity)
        if style == "nesterov":
            move = jax.tree.map(
                lambda g, v: beta.astype(v.dtype) * v - eta.astype(v.dtype) * g.astype(v.dtype),
                updates, velocity,
            )
            lookahead = beta.astype(state.lookahead.dtype)
        else:
            move, lookahead = velocity, state.lookahead
        move = jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), move, like)
        return move, SGDMomentumState(
            optax.safe_increment(state.count), lookahead, velocity
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def sgd_interpolation(
    batch_size: ScalarOrSchedule,
    row_norm_bound: ScalarOrSchedule,
    lmax: ScalarOrSchedule,
    mu: ScalarOrSchedule | None = None,
    *,
    style: str = "heavy_ball",
    c: ScalarOrSchedule = 4 / 3,
    s: ScalarOrSchedule = 0.5,
    min_decay: ScalarOrSchedule = 0.01,
    velocity_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """:func:`sgd_momentum` with learning rate and momentum from :func:`interpolation_momentum`.

    A schedule of the batch size (a growing batch) changes the momentum as it goes.

    Args:
      batch_size, row_norm_bound, lmax, mu, c, s, min_decay: as in
        :func:`interpolation_momentum`; numbers, arrays or schedules.
      style, velocity_dtype: as in :func:`sgd_momentum`.

    Returns:
      A transform whose update is a displacement: nothing that rescales it may follow.

    Raises:
      ValueError, TypeError: as the two functions.

    Source: a reconstruction, see the module.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fadex.optim import sgd_interpolation
      >>> tx = sgd_interpolation(batch_size=64, row_norm_bound=10.0, lmax=1.0)
      >>> x = jnp.ones(2); state = tx.init(x)
      >>> updates, state = tx.update(x, state)
      >>> print(updates)
      [-0.5 -0.5]
    """
    _check_rule(batch_size, row_norm_bound, lmax, mu, style, c, s, min_decay, schedule=True)

    def hyperparameters(count):
        found = interpolation_momentum(
            at(batch_size, count), at(row_norm_bound, count), at(lmax, count),
            None if mu is None else at(mu, count),
            style=style, c=at(c, count), s=at(s, count), min_decay=at(min_decay, count),
        )
        return found.learning_rate, found.decay

    return _momentum_transform(hyperparameters, style, velocity_dtype)


def momentum_eval_params(state: Any, params: Any) -> Any:
    r"""The iterate ``x_t`` to evaluate at, where Nesterov's parameters hold :math:`y_t`.

    .. math:: x_t = y_t - \beta v_t

    Heavy ball has ``x_t = y_t``, and its parameters come back as they are.

    Args:
      state: an :class:`SGDMomentumState`, or any optimizer state that holds exactly one
        (``chain``, ``masked``, ``inject_hyperparams``, ``MultiSteps``, ``flax.nnx.Optimizer``'s
        ``opt_state``). Leaves are matched by their paths.
      params: the parameters that belong to ``state``.

    Returns:
      A tree like ``params``; masked leaves are those of ``params``.

    Raises:
      ValueError: ``state`` holds no momentum, or more than one, or one of other parameters.

    Source: the change of variables of Nesterov's method, as in ``optax.sgd(nesterov=True)``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from fadex.optim import momentum_eval_params, sgd_momentum
      >>> tx = sgd_momentum(0.1, 0.5, style="nesterov")
      >>> y = jnp.ones(1); updates, state = tx.update(y, tx.init(y))
      >>> print(f"{momentum_eval_params(state, y + updates)[0]:.3f}")  # y_0 - 0.1 g(y_0)
      0.900
    """
    def is_momentum(node):
        return isinstance(node, SGDMomentumState)

    found = [n for n in jax.tree.leaves(state, is_leaf=is_momentum) if is_momentum(n)]
    if len(found) != 1:
        raise ValueError(f"state: expected exactly one SGDMomentumState in it, found {len(found)}")

    velocity = flatten_with_paths(found[0].velocity)
    foreign = sorted(velocity.keys() - flatten_with_paths(params).keys())
    if foreign:
        raise ValueError(f"params: has no leaf {foreign[0]!r}, which the state holds a velocity of")
    lookahead = jnp.asarray(found[0].lookahead)

    def back(path, leaf):
        if path not in velocity:
            return leaf
        p, v = jnp.asarray(leaf), jnp.asarray(velocity[path])
        dtype = state_dtype_of(p)
        return (p.astype(dtype) - lookahead.astype(dtype) * v.astype(dtype)).astype(p.dtype)

    return map_with_path(back, params)
