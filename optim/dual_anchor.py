r"""Dual-anchor: the H-dual of Halpern's method as a gradient transformation with a horizon.

For a nonexpansive :math:`T` and a horizon :math:`N` fixed in advance, :math:`z_0 = 0` and for
:math:`k = 0 .. N - 2`

.. math:: z_{k+1} = \frac{(N - k - 1) z_k + (T y_k - y_k)}{N - k}, \qquad
   y_{k+1} = T y_k - z_{k+1}.

The last iterate satisfies :math:`\|y_{N-1} - T y_{N-1}\| \le 2 \|y_0 - y_\star\| / N`, the best
possible, like that of Halpern's method (OHM); but noise in :math:`T` reaches the residual with a
gain below :math:`\pi^2 / 4 - 1 = 1.467` in variance, however long the horizon, where OHM's gain
grows like :math:`4 N / 3`.

Source: Yoon, Kim, Suh and Ryu, "Optimal Acceleration for Minimax and Fixed-Point Problems is Not
Unique", arXiv 2404.13228 (Dual-OHM). Its stochastic use is a reconstruction: the paper on it is
known to us by its abstract; the noise gain is computed here from the recursion.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.core.checks import check_choice, check_int, check_real
from fadex.optim.common import (
    _STATIC,
    check_dtype,
    check_hyperparameter,
    check_leaves,
    zeros_in_state,
)


class DualAnchorState(NamedTuple):
    """State of :func:`dual_anchor`."""

    count: jax.Array  # int32 []: steps made since the last restart, at most num_steps - 1
    dual_anchor: Any  # z, like params, in the state's dtype


def dual_anchor(
    learning_rate: float | jax.Array,
    num_steps: int,
    sign: Any = None,
    state_dtype: Any = None,
    restart: str = "none",
) -> optax.GradientTransformationExtraArgs:
    r"""Dual-anchor on :math:`T = I - \eta F`, with :math:`F` the gradient (field) that is fed in.

    At step :math:`k = 0 .. N - 2`, with :math:`c = 1 / (N - k)`,

    .. math:: z \leftarrow (1 - c) z - c \eta g, \qquad \text{update} = -\eta g - z.

    So :math:`-z` averages the gradient steps made so far, and its share of the movement is taken
    back, more and more towards the horizon. *Only the last iterate is certified*; on the way
    there the residual may be far above the bound.

    :math:`F` must be :math:`1/L`-cocoercive with :math:`\eta \le 2 / L`: the gradient of a convex
    :math:`L`-smooth loss, or a strongly monotone Lipschitz field such as the saddle field of a
    strongly-convex-strongly-concave game. A field that is merely monotone (a bilinear game) is
    not: the iteration diverges there. Feed :math:`g = (y - T y) / \eta` of a nonexpansive
    :math:`T` instead, a resolvent, or its reflection (the Cayley operator).

    When it pays: for fields that rotate (games), where the plain iteration stalls, and where noise
    rules, since at the same :math:`\eta` it lets through at most 0.41 times the noise variance of
    SGD. Gradient descent on a convex loss converges by itself, without noise to a residual some
    2.5 times smaller than here (logistic regression, same step), so SGD with a step tuned for
    the horizon is better there: ``benchmarks/optim_river.py``.

    Args:
      learning_rate: :math:`\eta`, constant: a number or an array (a tracer will do).
      num_steps: horizon :math:`N >= 2`; ``N - 1`` updates are made. Static.
      sign: for minimax: a pytree (a prefix of the parameters' is enough) of 1 on leaves that
        descend and -1 on those that ascend, so that plain gradients can be fed in.
      state_dtype: of the state; float32 by default, float64 for float64 parameters.
      restart: after ``N - 1`` updates ``"none"`` emits zero updates (the method has no
        continuation), ``"repeat"`` begins anew from where it is.

    Returns:
      ``optax.GradientTransformationExtraArgs`` that emits a displacement: nothing may scale it
      afterwards, so it stands *last* in a chain, behind transformations of the gradient only.
      One copy of the parameters, found by ``optax.tree.get(state, "dual_anchor")``. For
      ``optax.inject_hyperparams`` name ``num_steps``, and ``sign`` and ``state_dtype`` where they
      are given, in ``static_args``. Updates have the dtype of the parameters where these are
      passed, else that of the gradients. Low-precision parameters round each displacement: keep
      float32 ones where the last digits count.

    Raises:
      ValueError: a schedule as learning rate, ``num_steps`` below 2, a sign that is neither 1 nor
        -1, or an unknown restart.
      TypeError: ``num_steps`` that is not an integer, ``sign`` of arrays, or no dtype.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from fadex.optim import dual_anchor
      >>> loss = lambda x: 0.5 * jnp.sum(jnp.array([1.0, 0.01]) * x**2)
      >>> opt = dual_anchor(1.0, num_steps=100)
      >>> x = jnp.ones(2)
      >>> state = opt.init(x)
      >>> for _ in range(99):
      ...     update, state = opt.update(jax.grad(loss)(x), state, x)
      ...     x = optax.apply_updates(x, update)
      >>> bool(jnp.linalg.norm(jax.grad(loss)(x)) <= 2 * 2**0.5 / 100)
      True
    """
    check_hyperparameter(
        "learning_rate", learning_rate, minimum=0.0, exclusive=True, schedule=False
    )
    if isinstance(num_steps, (jax.Array, np.ndarray)):
        raise TypeError(f"num_steps: expected an integer, got {num_steps!r}{_STATIC}")
    check_dtype("state_dtype", state_dtype)
    horizon = check_int("num_steps", num_steps, minimum=2)
    check_choice("restart", restart, ("none", "repeat"))
    for path, value in jax.tree_util.tree_leaves_with_path(sign):
        expected = f"sign{jax.tree_util.keystr(path)}: expected 1 (descent) or -1 (ascent)"
        if isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError(f"{expected}, got {value!r}{_STATIC}")
        if value not in (1, -1):
            raise ValueError(f"{expected}, got {value!r}")

    def init_fn(params: Any) -> DualAnchorState:
        check_leaves("params", params)
        return DualAnchorState(
            jnp.zeros((), jnp.int32), zeros_in_state(params, state_dtype)
        )

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates = jax.tree.map(jnp.asarray, updates)
        k, anchor = state
        like = updates if params is None else params
        signs = jax.tree.broadcast(1 if sign is None else sign, updates)
        # T y - y
        step = jax.tree.map(
            lambda g, z, s: -s * jnp.asarray(learning_rate, z.dtype) * g.astype(z.dtype),
            updates, anchor, signs,
        )
        left = jnp.maximum(horizon - k, 2)  # beyond the horizon any number will do

        def average(z: jax.Array, s: jax.Array) -> jax.Array:
            return z + (s - z) / left.astype(z.dtype)

        new = jax.tree.map(average, anchor, step)
        out = jax.tree.map(lambda s, z, p: (s - z).astype(jnp.result_type(p)), step, new, like)
        if restart == "repeat":
            last = k == horizon - 2
            count = jnp.where(last, 0, k + 1)
            new = jax.tree.map(lambda z: jnp.where(last, 0.0, z).astype(z.dtype), new)
        else:
            done = k >= horizon - 1
            count = jnp.minimum(k + 1, horizon - 1)
            new = jax.tree.map(lambda z, old: jnp.where(done, old, z), new, anchor)
            out = jax.tree.map(lambda u: jnp.where(done, jnp.zeros_like(u), u), out)
        return out, DualAnchorState(count.astype(jnp.int32), new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def noise_gain(num_steps: int, eigenvalue: Any = -1.0) -> np.ndarray:
    r"""Variance of the terminal residual per unit of noise variance in each :math:`T y_k`.

    For a linear :math:`T` and an eigenvalue :math:`t`, independent noise :math:`e_j` of variance
    1 gives the residual :math:`\sum_j (1 - t) h_j(t) e_j`; returned is
    :math:`\sum_j |(1 - t) h_j(t)|^2`. Over the unit disk, which holds every eigenvalue of a
    nonexpansive map, it is largest at :math:`t = -1`, and rises there with the horizon towards
    :math:`\pi^2 / 4 - 1`. Runs on the host in float64, in ``num_steps`` steps.

    Args:
      num_steps: horizon :math:`N >= 2`.
      eigenvalue: :math:`t`, any shape, real or complex.

    Returns:
      float64 in the shape of ``eigenvalue``.

    Raises:
      TypeError, ValueError: ``num_steps`` not an integer >= 2.

    Example:
      >>> from fadex.optim import noise_gain
      >>> print(f"{noise_gain(16):.3f} {noise_gain(1024):.3f}")
      1.405 1.466
    """
    n = check_int("num_steps", num_steps, minimum=2)
    t = np.asarray(eigenvalue, complex)
    # Backwards through y_{k+1} = y_k + a_k (T y_k + e_k - T y_{k-1} - e_{k-1}): `now` and
    # `before` are the weights of y_{k+1} and y_k in the result.
    now, before = np.ones_like(t), np.zeros_like(t)
    later = np.zeros_like(t)  # weight of e_k that step k + 1 takes away
    total = np.zeros(t.shape)
    for k in range(n - 2, -1, -1):
        a = (n - k - 1) / (n - k)
        total += np.abs(now * a - later) ** 2
        later = now * a
        now, before = now * (1 + a * t) + before, -now * a * t
    return np.abs(1 - t) ** 2 * total


def dual_anchor_batch_size(num_steps: int, noise_var: float, target: float) -> int:
    r"""The batch size, the same at every step, that brings the noise below a target.

    The least :math:`b` with :math:`G_N \sigma^2 / b \le \epsilon^2`, where :math:`G_N` is
    :func:`noise_gain`; it hardly depends on :math:`N`. The whole error is at most
    :math:`2 \|y_0 - y_\star\| / (\eta N) + \epsilon` in root mean square: a horizon
    :math:`N \propto 1 / \epsilon` needs :math:`N b \propto \epsilon^{-3}` samples.

    Args:
      num_steps: horizon :math:`N >= 2`.
      noise_var: :math:`\sigma^2 = E \|g - F\|^2` of the gradient of *one* sample, >= 0.
      target: :math:`\epsilon > 0`, root mean square of what the noise adds to :math:`\|F\|` at
        the last iterate.

    Returns:
      :math:`b >= 1`.

    Raises:
      TypeError, ValueError: an argument out of its range.

    Example:
      >>> from fadex.optim import dual_anchor_batch_size
      >>> dual_anchor_batch_size(1000, noise_var=4.0, target=0.1)
      587
    """
    check_int("num_steps", num_steps, minimum=2)
    noise_var = check_real("noise_var", noise_var, minimum=0.0)
    target = check_real("target", target, minimum=0.0, exclusive=True)
    return max(1, math.ceil(float(noise_gain(num_steps)) * noise_var / target**2))
