r"""Scion: steps to the boundary of a norm ball, with and without the constraint.

.. math::
  d \leftarrow (1 - m) d + m g, \qquad
  \text{unconstrained:}\; W_l \leftarrow W_l + \gamma \rho_l\, \mathrm{lmo}_l(d_l), \qquad
  \text{constrained:}\; W_l \leftarrow (1 - \gamma) W_l + \gamma \rho_l\, \mathrm{lmo}_l(d_l)

The clipped form replaces γ by :math:`\gamma\min(1, s\|d\|_*)`: sharp steps while the gradient is
small, LMO steps of fixed length while it is large.

Source: Pethick et al., *Training Deep Learning Models with Norm-Constrained LMOs*, arXiv
2502.07529, and its published code's defaults; clipped: arXiv 2506.01913.
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
    displacement,
    need_params,
    resolve_mask,
    state_dtype_of,
    zeros_in_state,
)
from fadex.optim.newton_schulz_coefficients import polar_express_coefficients
from fadex.optim.norm_rules import assign_norms
from fadex.optim.norms import NormSpec, ball_scale, matrix_view
from fadex.optim.polar import polar_factor
from fadex.optim.product_norms import broadcast_specs, clip_shares, spread, tree_directions

__all__ = ["ScionState", "scale_by_lmo", "scion", "scion_init"]


class ScionState(NamedTuple):
    """Scion keeps one average of gradients: 4 bytes per parameter in float32."""

    count: jax.Array  # int32, ()
    momentum: Any  # d, in at least float32


def _lmo_steps(
    tree: Any, specs: Any, clip: Any, scope: str, batch_leaves: bool
) -> tuple[Any, Any]:
    """ρ_l min(1, s‖d_l‖_*) direction_l for each leaf, and the factors min(...) alone."""
    directions, duals = tree_directions(specs, tree, batch_leaves=batch_leaves)
    shares = clip_shares(clip, scope, duals, specs)
    steps = jax.tree.map(
        lambda d, share, s: s.radius * spread(share, d, s).astype(d.dtype) * d,
        directions, shares, specs,
    )
    return steps, jax.tree.map(lambda d, share, s: spread(share, d, s), directions, shares, specs)


def scale_by_lmo(
    norm: Any = None,
    *,
    clip: ScalarOrSchedule | None = None,
    clip_scope: str = "layer",
    batch_leaves: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The LMO alone, as a piece for a chain: updates become -ρ_l lmo_l(updates).

    Like every ``scale_by_``, it points uphill: a learning rate with its sign follows. Stateless
    but for the count that ``clip`` schedules need.

    Args:
      norm: as for :func:`scion`.
      clip: s of min(1, s‖g‖_*), or ``None``.
      clip_scope: ``"layer"`` or ``"global"``.
      batch_leaves: polar factors of equal shapes in one batched call.

    >>> import jax.numpy as jnp, optax
    >>> opt = optax.chain(scale_by_lmo("linf"), optax.scale_by_learning_rate(0.1))
    >>> step, _ = opt.update(jnp.array([3.0, -2.0]), opt.init(jnp.zeros(2)))
    >>> [round(float(x), 2) for x in step]
    [-0.1, 0.1]
    """
    if clip is not None:
        check_hyperparameter("clip", clip, minimum=0.0, exclusive=True)
    check_choice("clip_scope", clip_scope, ("layer", "global"))
    norm = assign_norms if norm is None else norm

    def init(params: Any) -> optax.ScaleByScheduleState:
        broadcast_specs(norm, params)
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del params, extra
        specs = broadcast_specs(norm, updates)
        now = None if clip is None else at(clip, state.count)
        steps, _ = _lmo_steps(updates, specs, now, clip_scope, batch_leaves)
        steps = jax.tree.map(lambda s, g: s.astype(g.dtype), steps, updates)
        return steps, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def scion(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.1,
    norm: Any = None,
    *,
    constrained: bool = False,
    clip: ScalarOrSchedule | None = None,
    clip_scope: str = "layer",
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    batch_leaves: bool = False,
    momentum_dtype: Any = None,
    update_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Scion, constrained or not, clipped or not; see the top of this module.

    16-bit parameters have no master copy here, as with most optax transforms: steps below half
    a unit in the last place are rounded away. Keep float32 parameters and cast in the model, or
    take :func:`fadex.optim.accelegrad_sharp`, whose iterates are one.

    Args:
      learning_rate: γ, in units of the radii ρ_l.
      momentum: m in (0, 1], the weight of the new gradient: 0.1 is what others call 0.9.
      norm: a ``NormSpec``, a name, a tree of them, or a function of the parameters that returns
        one (for ``optax.inject_hyperparams`` name a function in ``static_args``); default
        :func:`assign_norms`.
      constrained: pull the weights towards 0 by 1 - γ (1 - γ min(1, s‖d‖_*) when clipped), so
        that ‖W_l‖ <= ρ_l stays true once it is; start with :func:`scion_init`. The step then
        depends on ``params``: it must be the last of a chain.
      clip: s of the clipped form, or ``None``.
      clip_scope: ``"layer"`` or ``"global"`` (Σ ρ_l ‖d_l‖_*).
      weight_decay: λ, decoupled: another -γλW, beside the constraint's own pull if there is one.
      mask: a tree of booleans or a function of the parameters: where to decay weights.
      batch_leaves: polar factors of equal shapes in one batched call.
      momentum_dtype: of d; default at least float32.
      update_dtype: of the emitted step; default the parameters'.

    Raises:
      ValueError: values out of range, a norm that does not fit a parameter, or an update without
        ``params``.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros((4, 2))}
    >>> opt = scion(0.1, norm="spectral")
    >>> step, _ = opt.update({"w": jnp.ones((4, 2))}, opt.init(params), params)
    >>> step["w"].shape
    (4, 2)
    """
    check_hyperparameter("learning_rate", learning_rate, minimum=0.0)
    check_hyperparameter("momentum", momentum, minimum=0.0, maximum=1.0)
    if isinstance(momentum, (int, float)) and momentum == 0:
        raise ValueError("momentum: must lie in (0, 1], got 0: no gradient would ever enter")
    check_hyperparameter("weight_decay", weight_decay, minimum=0.0)
    no_decay = isinstance(weight_decay, (int, float)) and weight_decay == 0
    if clip is not None:
        check_hyperparameter("clip", clip, minimum=0.0, exclusive=True)
    check_choice("clip_scope", clip_scope, ("layer", "global"))
    check_dtype("momentum_dtype", momentum_dtype)
    check_dtype("update_dtype", update_dtype)
    norm = assign_norms if norm is None else norm

    def init(params: Any) -> ScionState:
        check_leaves("params", params)
        broadcast_specs(norm, params)
        return ScionState(jnp.zeros((), jnp.int32), zeros_in_state(params, momentum_dtype))

    def update(
        updates: Any, state: ScionState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScionState]:
        del extra
        need_params(params, "scion")
        specs, t = broadcast_specs(norm, params), state.count
        m, rate = at(momentum, t), at(learning_rate, t)
        d = jax.tree.map(
            lambda d, g: d + jnp.asarray(m, d.dtype) * (jnp.asarray(g, d.dtype) - d),
            state.momentum, updates,
        )
        now = None if clip is None else at(clip, t)
        steps, shares = _lmo_steps(d, specs, now, clip_scope, batch_leaves)

        def move(p: jax.Array, step: jax.Array, share: jax.Array, chosen: bool) -> jax.Array:
            p = jnp.asarray(p)
            wide = state_dtype_of(p)
            x, gamma = p.astype(wide), jnp.asarray(rate, wide)
            new = x - gamma * step.astype(wide)
            if constrained:
                new = new - gamma * share.astype(wide) * x
            if not no_decay:
                new = new - gamma * jnp.asarray(at(weight_decay, t), wide) * x * chosen
            return new

        everywhere = jax.tree.map(lambda _: True, params)
        decayed = everywhere if mask is None else _spread_mask(resolve_mask(mask, params), params)
        new = jax.tree.map(move, params, steps, shares, decayed)
        state = ScionState(optax.safe_increment(t), d)
        return displacement(new, params, update_dtype), state

    return optax.GradientTransformationExtraArgs(init, update)


def _spread_mask(mask: Any, params: Any) -> Any:
    """One boolean for each leaf, from a tree that may be an upper part of ``params``."""
    return jax.tree.map(lambda keep, part: jax.tree.map(lambda _: bool(keep), part), mask, params)


def scion_init(key: jax.Array, params: Any, norm: Any = None) -> Any:
    """Parameters on the boundary of their balls, as constrained Scion starts.

    Spectral norms: a random matrix with orthonormal rows or columns, times ρc. ``per_input``,
    ``per_output``: Gaussian rows or columns of the norm's length. ``linf``: ±ρc at random. Other
    norms keep ``params`` (biases and scales are usually 0 and 1).

    Args:
      key: a PRNG key.
      params: the tree to follow in structure, shapes and dtypes.
      norm: as for :func:`scion`.

    >>> import jax, jax.numpy as jnp
    >>> from fadex.optim.norms import norm
    >>> w = scion_init(jax.random.key(0), {"w": jnp.zeros((8, 3))}, "spectral")["w"]
    >>> round(float(norm("spectral", w)), 4)
    1.0
    """
    specs = broadcast_specs(norm or assign_norms, params)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.tree.unflatten(treedef, [jax.random.fold_in(key, i) for i in range(len(leaves))])

    def one(key: jax.Array, p: jax.Array, spec: NormSpec) -> jax.Array:
        if spec.name not in ("spectral", "spectral_conv", "per_input", "per_output", "linf"):
            return p
        view = matrix_view(spec, p.shape)
        shape = (*view.batch, *view.matrix)
        size = spec.radius * ball_scale(spec, view)
        if spec.name == "linf":
            m = jax.random.rademacher(key, shape, jnp.float32)
        else:
            m = jax.random.normal(key, shape, jnp.float32)
            if spec.name.startswith("spectral"):
                # The polar factor of a Gaussian matrix is uniform on the Stiefel manifold, as
                # its QR factor is. Products only: on a CPU, LAPACK calls that run beside each
                # other in one program can wait for each other for ever (jaxlib 0.10).
                m = polar_factor(m, coefficients=polar_express_coefficients(18, 1e-7))
            else:
                axis = -1 if spec.name == "per_input" else -2
                m = m / jnp.linalg.norm(m, axis=axis, keepdims=True)
        return view.write(size * m).astype(p.dtype)

    return jax.tree.map(one, keys, params, specs)
