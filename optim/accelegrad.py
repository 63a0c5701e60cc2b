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
    check_hyperparameter,
    check_leaves,
    copy_to_state,
    displacement,
    need_params,
    scalar_dtype,
)
from fadex.optim.linear_coupling import resolve_coupling, resolve_weights

__all__ = ["AcceleGradState", "accelegrad", "accelegrad_eval_params"]


class AcceleGradState(NamedTuple):
    """Iterates of AcceleGrad; trees mirror the parameters in at least float32."""

    count: jax.Array  # int32, ()
    z: Any  # the anchor (mirror) iterate
    y: Any  # the gradient iterate
    accumulator: jax.Array  # Σ α² ‖g‖², ()
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
    after it. Judge the model at :func:`accelegrad_eval_params`.

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
    alpha = resolve_weights(weight_schedule)
    tau = resolve_coupling(None, alpha)

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
        g = jax.tree.map(lambda g, z: g.astype(z.dtype), updates, state.z)
        squares = sum((jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(g)), jnp.zeros((), dtype))
        total = state.accumulator + a * a * squares.astype(dtype)
        eta = adaptive_step(at(diameter, t), at(lipschitz, t), total)
        z = jax.tree.map(lambda z, g: z - (a * eta).astype(z.dtype) * g, state.z, g)
        if projection is not None:
            z = projection(z)
        y = jax.tree.map(lambda x, g: x - eta.astype(x.dtype) * g, x, g)
        weight_sum = state.weight_sum + a
        mean = running_mean(state.average, y, a / weight_sum) if average else ()
        new = combine(z, y, tau(t + 1))
        state = AcceleGradState(optax.safe_increment(t), z, y, total, mean, weight_sum)
        return displacement(new, params, update_dtype), state

    return optax.GradientTransformationExtraArgs(init, update)


def adaptive_step(diameter: Any, lipschitz: Any, total: jax.Array) -> jax.Array:
    """η = 2D/√(G² + S), and 0 while no gradient has been seen, in the dtype of S."""
    root = jnp.sqrt(jnp.square(jnp.asarray(lipschitz, total.dtype)) + total)
    eta = 2 * jnp.asarray(diameter, total.dtype) / jnp.where(root == 0, 1.0, root)
    return jnp.where(root == 0, 0.0, eta)


def combine(z: Any, y: Any, tau: jax.Array) -> Any:
    """τ z + (1 - τ) y."""
    return jax.tree.map(
        lambda z, y: y + jnp.asarray(tau, y.dtype) * (z - y), z, y
    )


def gradient_point(resync: str, params: Any, z: Any, y: Any, tau: jax.Array) -> Any:
    """x_t in the state's dtype: from the parameters, or from the iterates."""

    def one(p: jax.Array, z: jax.Array, y: jax.Array) -> jax.Array:
        wide = jnp.finfo(p.dtype).bits >= 32
        if resync == "params" or (resync == "auto" and wide):
            return p.astype(z.dtype)
        return y + jnp.asarray(tau, y.dtype) * (z - y)

    return jax.tree.map(one, params, z, y)


def running_mean(mean: Any, new: Any, weight: jax.Array) -> Any:
    """mean + weight (new - mean): a weighted average that loses no mass in float32."""
    return jax.tree.map(lambda m, x: m + weight.astype(m.dtype) * (x - m), mean, new)


def accelegrad_eval_params(
    state: Any, params: Any, which: str = "y", *, coupling: float | None = None
) -> Any:
    """The parameters to judge a model at, from the state of AcceleGrad or AcceleGrad#.

    Works through ``optax.chain``, ``optax.masked``, ``optax.inject_hyperparams`` and
    ``optax.MultiSteps``: the iterate is looked up by its name; masked leaves keep ``params``.

    Args:
      state: an optimizer state that holds exactly one AcceleGrad(#) state.
      params: the current parameters, for their dtypes and masked leaves.
      which: ``"y"``, the geometry iterate (default); ``"average"``, ȳ, where it is kept; ``"x"``,
        the gradient point, which is ``params``.
      coupling: τ, for a state without y (``recompute_y=True``): y = (x - τz)/(1 - τ).

    Raises:
      ValueError: an iterate that this state does not hold, or holds more than once.
    """
    if which == "x":
        return params
    if which not in ("y", "average"):
        raise ValueError(f"which: expected 'y', 'average' or 'x', got {which!r}")
    found = [value for _, value in optax.tree.get_all_with_path(state, which)]
    if len(found) != 1:
        raise ValueError(
            f"state: expected one AcceleGrad state, found {len(found)} iterates called {which!r}"
        )
    iterate = found[0]
    if isinstance(iterate, tuple) and iterate == ():
        if which == "average":
            raise ValueError("which: this state keeps no average; pass average=True to the "
                             "optimizer")
        if coupling is None:
            raise ValueError("coupling: this state keeps no y (recompute_y=True); give its "
                             "coupling so that y can be recomputed")
        (z,) = [value for _, value in optax.tree.get_all_with_path(state, "z")]
        iterate = _map_unmasked(lambda z, x: (x - coupling * z) / (1 - coupling), z, params)
    return _map_unmasked(lambda y, p: y, iterate, params)


def _map_unmasked(fn: Callable[..., jax.Array], iterate: Any, params: Any) -> Any:
    """fn(iterate, params) in the dtypes of ``params``; where it is masked, ``params``."""
    masked = lambda x: isinstance(x, optax.MaskedNode)

    def one(value: Any, part: Any) -> Any:
        return part if masked(value) else fn(value, part).astype(part.dtype)

    return jax.tree.map(one, iterate, params, is_leaf=masked)
