r"""AcceleGrad: an accelerated method that adapts to smoothness and to noise (Euclidean).

With weights :math:`\alpha_t` and couplings :math:`\tau_t = 1/\alpha_t`, from
:math:`x_0 = y_0 = z_0`,

.. math::
  x_{t+1} &= \tau_t z_t + (1 - \tau_t) y_t, \qquad g_t = \nabla f(x_{t+1}) \\
  \eta_t &= 2 D \Big/ \sqrt{G^2 + \textstyle\sum_{i \le t} \alpha_i^2 \|g_i\|^2} \\
  z_{t+1} &= \Pi_K(z_t - \alpha_t \eta_t g_t), \qquad y_{t+1} = x_{t+1} - \eta_t g_t,

output :math:`\bar y_T \propto \sum_t \alpha_t y_{t+1}`. K has diameter D and holds a minimiser.

Source: Levy, Yurtsever, Cevher, *Online Adaptive Methods, Universality and Acceleration*,
NeurIPS 2018, arXiv 1809.02864.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.optim.common import (
    ScalarOrSchedule,
    at,
    check_dtype,
    check_function,
    check_hyperparameter,
    check_leaves,
    copy_to_state,
    displacement,
    need_params,
    scalar_dtype,
)
from fadex.optim.linear_coupling import resolve_coupling, resolve_weights
from fadex.optim.valley_monitors import safe_norm

__all__ = ["AcceleGradState", "accelegrad"]


class AcceleGradState(NamedTuple):
    """Iterates of AcceleGrad; trees mirror the parameters in at least float32."""

    count: jax.Array  # int32, ()
    z: Any  # the anchor (mirror) iterate
    y: Any  # the gradient iterate
    accumulator: jax.Array  # √(Σ α² ‖g‖²), (): the root neither over- nor underflows
    average: Any  # ȳ, or () when it is not kept
    weight_sum: jax.Array  # Σ α, ()


def accelegrad(
    diameter: ScalarOrSchedule = 1.0,
    lipschitz: ScalarOrSchedule = 0.0,
    *,
    projection: Callable[[Any], Any] | None = None,
    weight_schedule: str | Callable[[jax.Array], jax.Array] = "levy",
    average: bool = False,
    resync: str = "auto",
    state_dtype: Any = None,
    update_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Euclidean AcceleGrad as a transform; see the top of this module for the iteration.

    It keeps its own iterates and emits the step between two gradient points, so it must be the
    last of a chain: before it only transforms of the gradient (clipping), never a learning rate
    after it. Judge the model at :func:`fadex.optim.accelegrad_eval_params`.

    Args:
      diameter: D > 0, the distance to cover; a schedule decays the step sizes with it.
      lipschitz: G >= 0, added under the root.
      projection: Π_K on a parameter tree, such as ``optax.projections.projection_l2_ball``
        with its radius bound; default: none.
      weight_schedule: ``"levy"``, ``"linear"`` or a function t -> α_t >= 1.
      average: keep ȳ as well, for 4 more bytes per parameter.
      resync: ``"params"`` takes x_t from the parameters (so projections outside do not
        desynchronise), ``"state"`` from the iterates, ``"auto"`` from the parameters where they
        have 32 bits or more: 16-bit parameters would round every step away.
      state_dtype: of the iterates; default at least float32. 8 bytes per parameter in float32.
      update_dtype: of the emitted step; default the parameters'.

    Raises:
      ValueError: diameter <= 0, lipschitz < 0, an unknown schedule or resync, or an update
        without ``params``.

    >>> import jax, jax.numpy as jnp, optax
    >>> from fadex.optim import accelegrad_eval_params
    >>> opt = accelegrad(diameter=1.0)
    >>> x = jnp.array([1.0, -1.0])
    >>> state = opt.init(x)
    >>> for _ in range(50):
    ...     step, state = opt.update(2 * x, state, x)
    ...     x = optax.apply_updates(x, step)
    >>> bool(jnp.abs(accelegrad_eval_params(state, x)).max() < 1e-2)
    True
    """
    check_hyperparameter("diameter", diameter, minimum=0.0, exclusive=True)
    check_hyperparameter("lipschitz", lipschitz, minimum=0.0)
    if resync not in ("auto", "params", "state"):
        raise ValueError(f"resync: expected 'auto', 'params' or 'state', got {resync!r}")
    if weight_schedule == "constant":
        raise ValueError("weight_schedule: 'constant' would couple with τ = 1 and ignore y; "
                         "accelegrad_sharp(norm='l2') takes a coupling of its own")
    check_function("projection", projection)
    check_dtype("state_dtype", state_dtype)
    check_dtype("update_dtype", update_dtype)
    alpha = resolve_weights(weight_schedule)
    tau = resolve_coupling(None, weight_schedule)

    def init(params):
        check_leaves("params", params)
        z = copy_to_state(params, state_dtype)
        return AcceleGradState(
            count=jnp.zeros((), jnp.int32),
            z=z,
            y=copy_to_state(params, state_dtype),
            accumulator=jnp.zeros((), scalar_dtype(z)),
            average=copy_to_state(params, state_dtype) if average else (),
            weight_sum=jnp.zeros((), scalar_dtype(z)),
        )

    def update(updates, state, params=None, **extra):
        del extra
        need_params(params, "accelegrad")
        t = state.count
        dtype = state.accumulator.dtype
        a = jnp.asarray(alpha(t), dtype)
        x = gradient_point(resync, params, state.z, state.y, tau(t))
        g = jax.tree.map(lambda g, z: jnp.asarray(g, z.dtype), updates, state.z)
        total = jnp.hypot(state.accumulator, a * safe_norm(g).astype(dtype))
        eta = adaptive_step(at(diameter, t), at(lipschitz, t), total)
        z = jax.tree.map(lambda z, g: z - (a * eta).astype(z.dtype) * g, state.z, g)
        if projection is not None:
            z = projection(z)
        y = keep_buffers(jax.tree.map(lambda x, g: x - eta.astype(x.dtype) * g, x, g), state.y)
        weight_sum = state.weight_sum + a
        mean = running_mean(state.average, y, a / weight_sum) if average else ()
        new = combine(z, y, tau(t + 1))
        state = AcceleGradState(optax.safe_increment(t), z, y, total, mean, weight_sum)
        return displacement(new, params, update_dtype), state

    return optax.GradientTransformationExtraArgs(init, update)


def adaptive_step(diameter: Any, lipschitz: Any, total: jax.Array) -> jax.Array:
    """η = 2D/√(G² + S) from √S, and 0 while no gradient has been seen, in the dtype of √S."""
    root = jnp.hypot(jnp.asarray(lipschitz, total.dtype), total)
    eta = 2 * jnp.asarray(diameter, total.dtype) / jnp.where(root == 0, 1.0, root)
    return jnp.where(root == 0, 0.0, eta)


def keep_buffers(new: Any, old: Any) -> Any:
    """``new``, made to depend on ``old`` in form, so that a donated ``old`` becomes its buffer.

    Nothing reads the old y of float32 parameters. ``jit`` would drop it, and since donated
    buffers are matched in order, every iterate after it would move to another's buffer and be
    copied: twice the time of a step.
    """
    if not jax.tree.leaves(new):
        return new
    return jax.lax.optimization_barrier((new, old))[0]


def combine(z: Any, y: Any, tau: jax.Array) -> Any:
    """τ z + (1 - τ) y."""
    return jax.tree.map(
        lambda z, y: y + jnp.asarray(tau, y.dtype) * (z - y), z, y
    )


def gradient_point(resync: str, params: Any, z: Any, y: Any, tau: jax.Array) -> Any:
    """x_t in the state's dtype: from the parameters, or from the iterates."""

    def one(p: Any, z: jax.Array, y: jax.Array) -> jax.Array:
        wide = jnp.finfo(jnp.result_type(p)).bits >= 32
        if resync == "params" or (resync == "auto" and wide):
            return jnp.asarray(p, z.dtype)
        return y + jnp.asarray(tau, y.dtype) * (z - y)

    return jax.tree.map(one, params, z, y)


def running_mean(mean: Any, new: Any, weight: jax.Array) -> Any:
    """mean + weight (new - mean): a weighted average that loses no mass in float32."""
    return jax.tree.map(lambda m, x: m + weight.astype(m.dtype) * (x - m), mean, new)
