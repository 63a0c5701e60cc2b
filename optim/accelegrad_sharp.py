r"""AcceleGrad#: linear coupling of an adaptive anchor with a norm's sharp, mirror or LMO step.

One call sees the gradient :math:`g` at :math:`x_t` (the parameters), the weight
:math:`a = \alpha(t)`, and does

.. math::
  \text{anchor, scalar:}\quad & S \leftarrow S + a^2 \|g\|_*^2, \quad
     \eta = 2D/\sqrt{G^2 + S}, \quad z \leftarrow \Pi(z - a \eta\, g) \\
  \text{anchor, diagonal:}\quad & v \leftarrow v + a^2 g^2, \quad
     z \leftarrow z - \eta_z\, a\, g / (\sqrt v + \epsilon) \\
  \text{geometry, sharp:}\quad & y \leftarrow x_t - \eta\, \mathrm{sharp}(g) \\
  \text{mirror:}\quad & y \leftarrow \arg\min_y \eta\langle g, y\rangle + D_\phi(y, x_t) \\
  \text{lmo:}\quad & y_l \leftarrow x_{t,l} + \gamma_t \rho_l\, \mathrm{lmo}_l(g_l) \\
  \text{clipped lmo:}\quad & y_l \leftarrow x_{t,l}
     + \gamma_t \rho_l \min(1, s\|g_l\|_{l,*})\, \mathrm{lmo}_l(g_l) \\
  \text{coupling:}\quad & x_{t+1} = \tau z + (1 - \tau) y, \qquad \tau = \tau(t + 1).

The oracle takes the raw gradient: there is no momentum buffer in front of it.

Why the scalar anchor keeps the rate O(1/T²) in a norm that is not Euclidean: a sharp step gains
:math:`f(y) \le f(x) - \eta\|g\|_*^2 + \tfrac12 L\eta^2\|g\|_*^2`, and if the anchor's distance
generator ψ is 1-strongly convex in the norm, its regret is
:math:`a\langle g, z_t - u\rangle \le \tfrac12 a^2\eta\|g\|_*^2
+ (D_\psi(u, z_t) - D_\psi(u, z_{t+1}))/\eta`. Both hold the same dual norm, so the proof of
AcceleGrad goes through with ‖·‖₂ replaced by ‖·‖_* in S, which is why S sums dual norms. The
Euclidean ψ is admissible where ‖x‖ <= ‖x‖₂; otherwise the anchor's steps shrink by 1/κ² with
‖x‖ <= κ‖x‖₂ (``anchor_scale``), or the anchor gets a mirror map of its own.

Source: the abstract of *AcceleGrad#*; no paper or code was public. The template, its parts and
the O(1/K²) claim are the abstract's; the formulas are a reconstruction from AcceleGrad (arXiv
1809.02864), linear coupling (arXiv 1407.1537), Scion (arXiv 2502.07529) and its clipped form
(arXiv 2506.01913).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_choice
from fadex.optim.accelegrad import (
    adaptive_step,
    combine,
    gradient_point,
    keep_buffers,
    running_mean,
)
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
    resolve_mask,
    scalar_dtype,
    zeros_in_state,
)
from fadex.optim.linear_coupling import resolve_coupling, resolve_weights
from fadex.optim.mirror_maps import MirrorMap
from fadex.optim.norm_rules import assign_norms
from fadex.optim.norms import norm_upper_bound
from fadex.optim.product_norms import (
    broadcast_specs,
    clip_shares,
    reduce_duals,
    sharp_of,
    spread,
    tree_directions,
    tree_euclidean_constants,
)

__all__ = ["AcceleGradSharpState", "accelegrad_sharp"]

GEOMETRIES = ("sharp", "mirror", "lmo", "clipped_lmo")
ANCHORS = ("scalar", "dual_averaging", "diagonal")


class AcceleGradSharpState(NamedTuple):
    """Iterates of AcceleGrad#; trees mirror the parameters in at least float32."""

    count: jax.Array  # int32, ()
    z: Any  # the anchor iterate
    y: Any  # the geometry iterate, or () with recompute_y
    accumulator: Any  # √S, (), or v, a tree, for the diagonal anchor
    average: Any  # ȳ, or () when it is not kept
    weight_sum: jax.Array  # Σ α, ()
    start: Any  # x_0, or () where neither radius nor dual averaging needs it
    gradient_sum: Any  # Σ α g, or () without dual averaging


def accelegrad_sharp(
    learning_rate: ScalarOrSchedule | None = None,
    *,
    diameter: ScalarOrSchedule | None = None,
    geometry: str | None = None,
    anchor: str | None = None,
    norm: Any = None,
    anchor_learning_rate: ScalarOrSchedule = 0.03,
    clip: ScalarOrSchedule | None = 3.0,
    clip_scope: str = "layer",
    product: str | None = None,
    weight_schedule: str | Callable[[jax.Array], jax.Array] = "levy",
    coupling: ScalarOrSchedule | None = None,
    lipschitz: ScalarOrSchedule = 0.0,
    lagged: bool = False,
    radius: float | None = None,
    projection: Callable[[Any], Any] | None = None,
    anchor_scale: float | str = "auto",
    anchor_mirror: MirrorMap | None = None,
    mirror: MirrorMap | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    constrained: bool = False,
    eps: float = 1e-8,
    average: bool = False,
    recompute_y: bool = False,
    resync: str = "auto",
    batch_leaves: bool = False,
    state_dtype: Any = None,
    accumulator_dtype: Any = None,
    update_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AcceleGrad#; see the top of :mod:`fadex.optim.accelegrad_sharp` for the iteration.

    Two specialisations are the defaults. With ``diameter`` (or neither argument): the scalar
    anchor with the sharp geometry in ``norm="l2"``, parameter-free but for D, rate O(1/T²) on
    smooth convex problems. With ``learning_rate``: the diagonal AdaGrad anchor with the clipped
    LMO and norms by :func:`assign_norms`, the variant for training networks.

    It keeps its own iterates and emits the step between two gradient points: it must be the last
    of a chain. Before it only transforms of the gradient, never a learning rate after it. Under
    ``optax.masked`` and ``optax.partition`` scalars such as S are per group. Judge the model at
    :func:`accelegrad_eval_params`. ``optax.inject_hyperparams`` takes every function for a
    schedule: name ``norm``, ``mask``, ``projection`` and dtypes in its ``static_args``.

    The scalar anchor works at any scale of the gradients; v holds squares, so α|g| should lie
    between 1e-19 and 1e19 in float32.

    Memory: z, y and v in float32 are 12 bytes per parameter (8 with a scalar anchor; Adam 8,
    Muon 4). ``recompute_y=True`` drops y, ``accumulator_dtype=jnp.bfloat16`` halves v, ``average``
    adds 4. For 16-bit parameters the iterates are the master copy.

    Args:
      learning_rate: γ_t, the step of the LMO geometries in units of ρ_l, or η of ``sharp`` and
        ``mirror`` beside a diagonal anchor. The raw-gradient LMO has a noise floor: decay it.
      diameter: D > 0 of the scalar anchor; η also scales its sharp and mirror steps.
      geometry: ``"sharp"``, ``"mirror"``, ``"lmo"``, ``"clipped_lmo"``.
      anchor: ``"scalar"``, ``"diagonal"``, or ``"dual_averaging"``, the scalar one in the form
        z = x_0 - η Σ α_i g_i.
      norm: a ``NormSpec``, a name, a tree of them, or a function of the parameters that returns
        one, such as ``functools.partial(assign_norms, radius=2.0)``. Default: ``"l2"``, for the
        LMO geometries :func:`assign_norms`.
      anchor_learning_rate: η_z of the diagonal anchor.
      clip: s > 0 of the clipped LMO: the step is shorter than γρ where s‖g_l‖_* < 1. ``None``
        never clips.
      clip_scope: ``"layer"`` clips by each layer's dual norm, ``"global"`` by Σ ρ_l ‖g_l‖_*.
      product: of the layers' norms, for the sharp step and for S: ``"l2"``, or ``"max"``, the
        default of the LMO geometries.
      weight_schedule: α: ``"levy"``, ``"linear"`` (t + 2)/2, ``"constant"``, or a function
        t -> α_t >= 1.
      coupling: τ in (0, 1], a number or schedule; default 1/α.
      lipschitz: G >= 0, added under the root of the scalar anchor.
      lagged: take η from S before this gradient entered (after the first step).
      radius: project the anchor onto the ball ‖z - x_0‖₂ <= radius.
      projection: Π of the anchor on a parameter tree, instead.
      anchor_scale: a factor on the scalar anchor's steps; ``"auto"``: 1 where ‖x‖ <= ‖x‖₂,
        else 1/κ².
      anchor_mirror: a mirror map for the scalar anchor instead of ψ = ½‖·‖₂².
      mirror: φ of the mirror geometry.
      weight_decay: λ: y starts from (1 - γλ) x (the decoupled form of AdamW).
      mask: a tree of booleans or a function of the parameters: where to decay weights.
      constrained: the Frank-Wolfe form y <- x + γ c (ρ lmo(g) - x), c = min(1, s‖g‖_*) or 1, with
        z pulled back radially into the balls: ‖y_l‖ <= ρ_l and ‖x_l‖ <= ρ_l stay true once they
        are, for γ <= 1. The pull needs ‖z_l‖: matrix products for the spectral norms, a singular
        value decomposition at every step for ``nuclear`` and ``schatten``.
      eps: ε of the diagonal anchor.
      average: keep ȳ.
      recompute_y: keep no y; y = (x - τz)/(1 - τ). For a constant coupling below 0.5 and
        parameters with 32 bits or more.
      resync: where x_t comes from, ``"auto"``, ``"params"`` or ``"state"``; see
        :func:`fadex.optim.accelegrad`.
      batch_leaves: polar factors of equal shapes in one batched call.
      state_dtype: of z and y; default at least float32.
      accumulator_dtype: of v; default ``state_dtype``.
      update_dtype: of the emitted step; default the parameters'.

    Raises:
      ValueError: ``learning_rate`` and ``diameter`` together where the geometry uses only one,
        a missing one, the ℓ1 norm with a Euclidean anchor, values out of range, a norm that
        does not fit a parameter, or an update without ``params``.

    >>> import jax, jax.numpy as jnp, optax
    >>> from fadex.optim import accelegrad_eval_params
    >>> opt = accelegrad_sharp(diameter=1.0, norm="linf")
    >>> x = jnp.array([1.0, -1.0])
    >>> state = opt.init(x)
    >>> for _ in range(100):
    ...     step, state = opt.update(2 * x, state, x)
    ...     x = optax.apply_updates(x, step)
    >>> bool(jnp.abs(accelegrad_eval_params(state, x)).max() < 1e-2)
    True
    """
    training = learning_rate is not None
    anchor = check_choice("anchor", anchor or ("diagonal" if training else "scalar"), ANCHORS)
    geometry = check_choice(
        "geometry", geometry or ("clipped_lmo" if training else "sharp"), GEOMETRIES
    )
    diagonal, lmo_step = anchor == "diagonal", geometry in ("lmo", "clipped_lmo")
    needs_rate, needs_diameter = diagonal or lmo_step, not diagonal
    if training and not needs_rate:
        raise ValueError(
            f"learning_rate: the {anchor} anchor with the {geometry} geometry takes its steps from "
            "diameter alone; give one of the two"
        )
    if needs_rate and not training:
        raise ValueError(f"learning_rate: needed by the {geometry} geometry with a {anchor} anchor")
    if diameter is not None and not needs_diameter:
        raise ValueError(
            "diameter: the diagonal anchor takes its steps from learning_rate and "
            "anchor_learning_rate; give one of learning_rate and diameter"
        )
    diameter = 1.0 if diameter is None else diameter
    for name, value, low, open_ in (
        ("learning_rate", 1.0 if learning_rate is None else learning_rate, 0.0, False),
        ("diameter", diameter, 0.0, True),
        ("anchor_learning_rate", anchor_learning_rate, 0.0, False),
        ("clip", 1.0 if clip is None else clip, 0.0, True),
        ("lipschitz", lipschitz, 0.0, False),
        ("weight_decay", weight_decay, 0.0, False),
    ):
        check_hyperparameter(name, value, minimum=low, exclusive=open_)
    check_hyperparameter("eps", eps, minimum=0.0, schedule=False)
    check_choice("clip_scope", clip_scope, ("layer", "global"))
    product = check_choice("product", product or ("max" if lmo_step else "l2"), ("max", "l2"))
    check_choice("resync", resync, ("auto", "params", "state"))
    if (mirror is None) == (geometry == "mirror"):
        raise ValueError("mirror: a MirrorMap belongs to geometry='mirror' and only there, "
                         f"got {mirror!r} with geometry={geometry!r}")
    if constrained and not lmo_step:
        raise ValueError(f"constrained: needs an LMO geometry, got {geometry!r}")
    if diagonal and anchor_mirror is not None:
        raise ValueError("anchor_mirror: belongs to a scalar anchor, got the diagonal one")
    if anchor == "dual_averaging" and anchor_mirror is not None:
        raise ValueError("anchor_mirror: dual averaging is written for the Euclidean anchor")
    automatic = isinstance(anchor_scale, str)
    if automatic:
        check_choice("anchor_scale", anchor_scale, ("auto",))
    else:
        check_hyperparameter(
            "anchor_scale", anchor_scale, minimum=0.0, exclusive=True, schedule=False
        )
    if radius is not None:
        check_hyperparameter("radius", radius, minimum=0.0, exclusive=True, schedule=False)
        if projection is not None:
            raise ValueError("radius: give radius or projection, not both")
    if recompute_y:
        if callable(coupling) or coupling is None or (
            isinstance(coupling, (int, float)) and not 0 < coupling < 0.5
        ):
            raise ValueError(
                "recompute_y: y = (x - τz)/(1 - τ) needs a constant coupling in (0, 0.5), "
                f"got coupling={coupling!r}"
            )
    check_function("projection", projection)
    for name, value in (("state_dtype", state_dtype), ("update_dtype", update_dtype),
                        ("accumulator_dtype", accumulator_dtype)):
        check_dtype(name, value)
    if norm is None:
        norm = assign_norms if lmo_step else "l2"
    alpha = resolve_weights(weight_schedule)
    tau = resolve_coupling(coupling, weight_schedule)
    averaging = anchor == "dual_averaging"

    def check_norms(params: Any) -> Any:
        specs = broadcast_specs(norm, params)
        l1 = any(s.name == "l1" for s in jax.tree.leaves(specs))
        if l1 and not diagonal and anchor_mirror is None and automatic:
            raise ValueError(
                "norm: 'l1' is not bounded by the Euclidean norm without a factor √d, so a "
                "Euclidean anchor loses the rate; give anchor_mirror=pnorm_map(size=d) (or "
                "entropy_map() on the simplex), or an anchor_scale of your own"
            )
        return specs

    if isinstance(norm, str) or not callable(norm):
        # What can be said without parameters is said when the transform is built.
        check_norms_early(norm, diagonal or anchor_mirror is not None or not automatic)

    def init(params: Any) -> AcceleGradSharpState:
        check_leaves("params", params)
        check_norms(params)
        if recompute_y:
            for leaf in jax.tree.leaves(params):
                dtype = jnp.result_type(leaf)
                if jnp.finfo(dtype).bits < 32:
                    raise ValueError(
                        f"recompute_y: needs parameters with 32 bits or more, got {dtype}"
                    )
        copy = lambda wanted: copy_to_state(params, state_dtype) if wanted else ()
        z = copy(True)
        zero = jnp.zeros((), scalar_dtype(z))
        return AcceleGradSharpState(
            count=jnp.zeros((), jnp.int32),
            z=z,
            y=copy(not recompute_y),
            accumulator=zeros_in_state(params, accumulator_dtype or state_dtype)
            if diagonal else zero,
            average=copy(average),
            weight_sum=jnp.zeros_like(zero),
            start=copy(radius is not None or averaging),
            gradient_sum=zeros_in_state(params, state_dtype) if averaging else (),
        )

    def update(
        updates: Any, state: AcceleGradSharpState, params: Any = None, **extra: Any
    ) -> tuple[Any, AcceleGradSharpState]:
        del extra
        need_params(params, "accelegrad_sharp")
        specs, t, dtype = check_norms(params), state.count, state.weight_sum.dtype
        a = jnp.asarray(alpha(t), dtype)
        g = jax.tree.map(lambda g, z: jnp.asarray(g, z.dtype), updates, state.z)
        if recompute_y:
            x = jax.tree.map(lambda p, z: jnp.asarray(p, z.dtype), params, state.z)
        else:
            x = gradient_point(resync, params, state.z, state.y, tau(t))
        directions, duals = (
            (None, None) if geometry == "mirror" and diagonal
            else tree_directions(specs, g, batch_leaves=batch_leaves)
        )

        # The adaptive anchor.
        start, gradient_sum = state.start, state.gradient_sum
        if diagonal:
            total = jax.tree.map(
                lambda v, g: v + jnp.square(a.astype(g.dtype) * g).astype(v.dtype),
                state.accumulator, g,
            )
            rate = jnp.asarray(at(anchor_learning_rate, t), dtype) * a
            z = jax.tree.map(
                lambda z, g, v: z - rate.astype(z.dtype) * g
                / (jnp.sqrt(v.astype(z.dtype)) + jnp.asarray(eps, z.dtype)),
                state.z, g, total,
            )
            eta = None
        else:
            size = reduce_duals(duals, specs, product).astype(dtype)
            total = jnp.hypot(state.accumulator, a * size)
            past = jnp.where(state.accumulator == 0, total, state.accumulator) if lagged else total
            eta = adaptive_step(at(diameter, t), at(lipschitz, t), past)
            if anchor_mirror is not None:
                z = anchor_mirror.step(state.z, g, a * eta)
            else:
                factors = _anchor_factors(anchor_scale, specs, params)
                if averaging:
                    gradient_sum = jax.tree.map(
                        lambda s, g: s + a.astype(s.dtype) * g, state.gradient_sum, g
                    )
                    origin, push, rate = start, gradient_sum, eta
                else:
                    origin, push, rate = state.z, g, a * eta
                z = jax.tree.map(
                    lambda z, g, f: z - (rate * f).astype(z.dtype) * g, origin, push, factors
                )
        if radius is not None:
            z = _into_ball(z, start, radius)
        elif projection is not None:
            z = projection(z)

        # The geometry branch.
        gamma = eta if not needs_rate else jnp.asarray(at(learning_rate, t), dtype)
        decay = jnp.asarray(at(weight_decay, t), dtype)
        kept = x if _is_zero(weight_decay) else _decay(x, gamma * decay, mask, params)
        if geometry == "mirror":
            y = mirror.step(kept, g, gamma)
        elif geometry == "sharp":
            sharps = sharp_of(directions, duals, specs, product)
            y = jax.tree.map(lambda x, d: x - gamma.astype(x.dtype) * d.astype(x.dtype),
                             kept, sharps)
        else:
            clip_now = None if geometry == "lmo" or clip is None else at(clip, t)
            shares = clip_shares(clip_now, clip_scope, duals, specs)
            # Where the step is clipped the pull towards 0 is, too: a point where the gradient
            # vanishes stays.
            target = lambda x, d, s: s.radius * d.astype(x.dtype) + (x if constrained else 0)
            y = jax.tree.map(
                lambda kept, x, d, share, s: kept
                - spread((gamma * share).astype(x.dtype), x, s) * target(x, d, s),
                kept, x, directions, shares, specs,
            )
            if constrained:
                z = _pull(z, specs)

        if not recompute_y:
            y = keep_buffers(y, state.y)

        # The coupling.
        weight_sum = state.weight_sum + a
        mean = running_mean(state.average, y, a / weight_sum) if average else ()
        new = combine(z, y, tau(t + 1))
        state = AcceleGradSharpState(
            optax.safe_increment(t), z, () if recompute_y else y, total, mean, weight_sum,
            start, gradient_sum,
        )  # fmt: skip
        return displacement(new, params, update_dtype), state

    return optax.GradientTransformationExtraArgs(init, update)


def check_norms_early(norm: Any, admissible: bool) -> None:
    """The ℓ1 norm with a Euclidean anchor is refused before any parameter is seen."""
    names = [getattr(s, "name", s) for s in jax.tree.leaves(
        norm, is_leaf=lambda x: hasattr(x, "radius") or isinstance(x, str))]
    if "l1" in names and not admissible:
        raise ValueError(
            "norm: 'l1' needs anchor_mirror=pnorm_map(size=d) (or entropy_map() on the simplex): "
            "‖x‖_1 <= ‖x‖_2 does not hold, so a Euclidean anchor loses the rate"
        )


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _anchor_factors(anchor_scale: Any, specs: Any, params: Any) -> Any:
    if not isinstance(anchor_scale, str):
        return jax.tree.map(lambda _: jnp.asarray(anchor_scale), params)
    constants = tree_euclidean_constants(specs, params)
    return jax.tree.map(lambda kappa: jnp.asarray(min(1.0, kappa**-2)), constants)


def _into_ball(z: Any, center: Any, radius: float) -> Any:
    offset = jax.tree.map(jnp.subtract, z, center)
    distance = optax.tree.norm(offset)
    factor = jnp.minimum(1.0, radius / jnp.where(distance == 0, 1.0, distance))
    return jax.tree.map(lambda c, o: c + factor.astype(o.dtype) * o, center, offset)


def _decay(x: Any, amount: jax.Array, mask: Any, params: Any) -> Any:
    chosen = resolve_mask(mask, params)
    shrink = lambda x: (1 - amount).astype(x.dtype) * x
    if chosen is None:
        return jax.tree.map(shrink, x)
    return jax.tree.map(
        lambda keep, part: jax.tree.map(shrink, part) if keep else part, chosen, x
    )


def _pull(z: Any, specs: Any) -> Any:
    """Scale each layer of z back into its ball of radius ρ_l."""

    def one(z: jax.Array, spec: Any) -> jax.Array:
        size = norm_upper_bound(spec, z) / spec.radius
        return spread(1 / jnp.maximum(size, 1.0), z, spec).astype(z.dtype) * z

    return jax.tree.map(one, z, specs)
