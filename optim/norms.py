r"""Norms of weights: their duals, sharp operators and linear minimisation oracles.

For a norm :math:`\|\cdot\|` with dual :math:`\|s\|_* = \max_{\|x\|\le 1}\langle s, x\rangle`

.. math::
  \mathrm{lmo}(s) = \arg\min_{\|x\|\le 1} \langle s, x\rangle, \qquad
  \mathrm{sharp}(s) = \arg\max_x \langle s, x\rangle - \tfrac12\|x\|^2
                    = -\|s\|_*\,\mathrm{lmo}(s).

Both rest on one *direction* :math:`d(s) = -\mathrm{lmo}(s)` of the unit ball, with
:math:`\langle s, d(s)\rangle = \|s\|_*`. Weights are laid out as in Flax: ``(d_in, d_out)``,
``y = x @ W``; convolutions ``(..., c_in, c_out)``. ``K`` is the fan-in, ``N`` the fan-out.

=============  ==========================================  ==================================
name           direction d(s), c the scale                 dual norm
=============  ==========================================  ==================================
l2             c s / ‖s‖_F                                 c ‖s‖_F
rms            s / rms(s)                                  √n ‖s‖_F
linf           c sign(s)                                   c Σ|s|
l1             c sign(s_j) e_j, j = argmax|s|              c max|s|
lp             c sign(s)|s|^(q-1) / ‖s‖_q^(q-1)            c ‖s‖_q, 1/p + 1/q = 1
spectral       c U Vᵀ, s = U Σ Vᵀ; c = √(N/K)              c Σσ
spectral_conv  the same of s as (k·c_in, c_out);           c Σσ
               c = √(c_out/c_in) / k
per_input      c s_i / ‖s_i‖ for each row; c = √N          c Σ_i ‖s_i‖
per_output     c s_j / ‖s_j‖ for each column; c = 1/√K     c Σ_j ‖s_j‖
nuclear        c u₁ v₁ᵀ (power iteration)                  c σ₁
schatten       c U Σ^(q-1) Vᵀ / ‖σ‖_q^(q-1)                c ‖σ‖_q
=============  ==========================================  ==================================

Sources: spectral, sign, column and row norms with their scales: Scion (arXiv 2502.07529); the
polar factor of the spectral norm: :mod:`fadex.optim.polar`; the other scales: Muon and Moonlight
(arXiv 2502.16982).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

from fadex.core.checks import check_choice, check_int, check_real
from fadex.optim.polar import polar_factor

__all__ = [
    "NORM_NAMES",
    "NormSpec",
    "dual_norm",
    "euclidean_constant",
    "lmo",
    "lmo_with_dual",
    "norm",
    "norm_upper_bound",
    "sharp",
]

NORM_NAMES = (
    "l2", "rms", "linf", "l1", "lp",
    "spectral", "spectral_conv", "per_input", "per_output", "nuclear", "schatten",
)  # fmt: skip
_MATRIX = ("spectral", "spectral_conv", "per_input", "per_output", "nuclear", "schatten")
_SCALES = ("unit", "rms", "max", "moonlight", "fan_in")
# Which named scales mean something for which norm; a positive number fits every one but rms.
_ALLOWED = {
    "linf": ("unit", "fan_in"),
    "spectral": ("unit", "rms", "max", "moonlight"),
    "spectral_conv": ("unit", "rms"),
    "per_input": ("unit", "rms", "fan_in"),
    "per_output": ("unit", "rms"),
}
_DEFAULT_SCALE = {
    "spectral": "rms", "spectral_conv": "rms", "per_input": "rms", "per_output": "rms",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """A norm for one parameter: a static, hashable leaf of a tree of specifications.

    Attributes:
      name: one of ``NORM_NAMES``; the table at the top of :mod:`fadex.optim.norms`.
      radius: ρ > 0, the radius of this layer's ball; the functions of this module work on the
        unit ball, products over layers and optimizers apply it.
      scale: c, the size of the unit ball: ``None`` for the norm's own (see the table), a
        positive number, or by shape: ``"unit"`` 1; ``"rms"`` √(N/K) (spectral), √N (per_input),
        1/√K (per_output); ``"max"`` max(1, √(N/K)), also Muon's; ``"moonlight"`` 0.2 √max(K, N);
        ``"fan_in"`` 1/K (linf), √N/K (per_input).
      dims: an ``optax.contrib.MuonDimensionNumbers`` that says which axes are inputs and which
        are outputs; all others are batch axes (stacked layers), each with a norm of its own.
        ``None``: vector norms (l2, rms, linf, l1, lp) take the whole array; spectral_conv takes
        all axes but the last as inputs; other matrix norms take the last two axes and treat
        leading ones as stacked layers.
      p: the exponent of ``lp`` and ``schatten``, in (1, ∞).
      steps: Newton-Schulz steps of the polar factor (spectral norms), power iterations of
        ``nuclear``; ``None`` for 6 and 20.
      coefficients: of the Newton-Schulz iteration, see :func:`fadex.optim.polar_factor`;
        a tuple of triples to stay hashable.
      method: how the polar factor is computed, see :func:`fadex.optim.polar_factor`; for
        ``nuclear``, ``"svd"`` asks for a full decomposition.

    Raises:
      ValueError: an unknown name or scale, a scale that the norm does not have, a radius or
        scale that is not positive, an exponent outside (1, ∞) or where none belongs.

    >>> NormSpec("spectral", radius=50.0, scale="max").radius
    50.0
    """

    name: str
    radius: float = 1.0
    scale: float | str | None = None
    dims: MuonDimensionNumbers | None = None
    p: float | None = None
    steps: int | None = None
    coefficients: str | tuple = "polar_express"
    method: str = "auto"

    def __post_init__(self) -> None:
        check_choice("name", self.name, NORM_NAMES)
        check_real("radius", self.radius, minimum=0.0, exclusive=True)
        if isinstance(self.scale, str):
            allowed = _ALLOWED.get(self.name, ("unit",))
            if self.name == "rms" or self.scale not in allowed:
                raise ValueError(
                    f"scale: the norm {self.name!r} takes "
                    f"{'no scale' if self.name == 'rms' else f'a number or one of {allowed}'}, "
                    f"got {self.scale!r}"
                )
        elif self.scale is not None:
            if self.name == "rms":
                raise ValueError(f"scale: the norm 'rms' takes no scale, got {self.scale!r}")
            check_real("scale", self.scale, minimum=0.0, exclusive=True)
        if (self.name in ("lp", "schatten")) != (self.p is not None):
            raise ValueError(f"p: belongs to 'lp' and 'schatten' only, got {self.p!r} for "
                             f"{self.name!r}")
        if self.p is not None:
            check_real("p", self.p, minimum=1.0, exclusive=True)
        if self.steps is not None:
            check_int("steps", self.steps, minimum=1)
        if self.dims is not None:
            if not isinstance(self.dims, MuonDimensionNumbers):
                raise TypeError(f"dims: expected MuonDimensionNumbers, got {self.dims!r}")
            # Lists would make the specification unhashable.
            object.__setattr__(self, "dims", MuonDimensionNumbers(
                _as_axes(self.dims.reduction_axis), _as_axes(self.dims.output_axis)))
        if not isinstance(self.coefficients, str):
            rows = np.asarray(self.coefficients, np.float64)
            if rows.ndim != 2 or rows.shape[1] != 3:
                raise ValueError(f"coefficients: expected a name or rows of three numbers, got "
                                 f"{self.coefficients!r}")
            object.__setattr__(self, "coefficients", tuple(map(tuple, rows.tolist())))


def _as_axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


class MatrixView(NamedTuple):
    """How an array is read as a batch of matrices ``[b, K, N]``."""

    order: tuple[int, ...]  # batch, input and output axes of the array, in this order
    batch: tuple[int, ...]  # lengths of the batch axes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, int]:
        return math.prod(self.inputs), math.prod(self.outputs)

    def read(self, x: jax.Array) -> jax.Array:
        if self.order != tuple(range(x.ndim)):
            x = x.transpose(self.order)
        return x.reshape(*self.batch, *self.matrix)

    def write(self, m: jax.Array) -> jax.Array:
        x = m.reshape(*self.batch, *self.inputs, *self.outputs)
        if self.order != tuple(range(x.ndim)):
            x = x.transpose(np.argsort(self.order))
        return x


def matrix_view(spec: NormSpec, shape: tuple[int, ...]) -> MatrixView:
    ndim = len(shape)
    if spec.dims is not None:
        outside = [a for a in (*spec.dims.reduction_axis, *spec.dims.output_axis)
                   if not -ndim <= a < ndim]
        if outside:
            raise ValueError(f"dims: axes {outside} do not exist in an array of shape {shape}")
        inputs = tuple(a % ndim for a in spec.dims.reduction_axis)
        outputs = tuple(a % ndim for a in spec.dims.output_axis)
        if len({*inputs, *outputs}) < len(inputs) + len(outputs):
            raise ValueError(f"dims: an axis is named twice in {spec.dims} for shape {shape}")
    elif spec.name in _MATRIX:
        if ndim < 2:
            raise ValueError(
                f"the norm {spec.name!r} needs a matrix, got an array of shape {shape}; "
                "a rule for vectors is NormSpec('rms')"
            )
        outputs = (ndim - 1,)
        inputs = tuple(range(ndim - 1)) if spec.name == "spectral_conv" else (ndim - 2,)
    else:
        outputs = (ndim - 1,) if ndim else ()
        inputs = tuple(range(ndim - 1))
    batch = tuple(a for a in range(ndim) if a not in inputs and a not in outputs)
    sizes = lambda axes: tuple(shape[a] for a in axes)
    return MatrixView((*batch, *inputs, *outputs), sizes(batch), sizes(inputs), sizes(outputs))


def ball_scale(spec: NormSpec, view: MatrixView) -> float:
    """c: the unit ball is c times the plain one."""
    scale = _DEFAULT_SCALE.get(spec.name, "unit") if spec.scale is None else spec.scale
    if not isinstance(scale, str):
        return float(scale)
    k, n = (max(size, 1) for size in view.matrix)
    if scale == "unit":
        return 1.0
    if spec.name == "spectral_conv":
        taps = math.prod(view.inputs[:-1])
        return math.sqrt(n / max(view.inputs[-1], 1)) / max(taps, 1)
    if spec.name == "per_input":
        return math.sqrt(n) / (k if scale == "fan_in" else 1)
    if spec.name == "per_output":
        return 1 / math.sqrt(k)
    if scale == "fan_in":
        return 1 / k
    if scale == "moonlight":
        return 0.2 * math.sqrt(max(k, n))
    return max(1.0, math.sqrt(n / k)) if scale == "max" else math.sqrt(n / k)


def _safe_divide(s: jax.Array, size: jax.Array) -> jax.Array:
    """s / size, and 0 where size is 0; a NaN stays a NaN."""
    zero = size == 0
    return jnp.where(zero, 0.0, s / jnp.where(zero, 1.0, size))


def _unit(s: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """s divided by its 2-norm over ``axes``, and that norm, without under- or overflow."""
    top = jnp.max(jnp.abs(s), axis=axes, keepdims=True, initial=0.0)
    rest = _safe_divide(s, top)
    size = jnp.sqrt(jnp.sum(rest * rest, axis=axes, keepdims=True))
    return _safe_divide(rest, size), top * size


def _power_direction(s: jax.Array, q: float, axes: tuple[int, ...]) -> tuple:
    """sign(s)|s|^(q-1) / ‖s‖_q^(q-1) and ‖s‖_q over ``axes``."""
    top = jnp.max(jnp.abs(s), axis=axes, keepdims=True, initial=0.0)
    rest = _safe_divide(s, top)
    size = jnp.sum(jnp.abs(rest) ** q, axis=axes, keepdims=True) ** (1 / q)
    return _safe_divide(jnp.sign(rest) * jnp.abs(rest) ** (q - 1), size ** (q - 1)), top * size


def _top_pair(s: jax.Array, steps: int, key: jax.Array | None) -> tuple[jax.Array, ...]:
    """The leading singular pair and value of s [..., K, N] by power iteration."""
    top = jnp.max(jnp.abs(s), axis=(-2, -1), keepdims=True, initial=0.0)
    m = _safe_divide(s, top)
    if key is None:
        # The longest row lies in the row space and can't be orthogonal to every direction.
        row = jnp.argmax(jnp.sum(m * m, axis=-1), axis=-1)
        start = jnp.take_along_axis(m, row[..., None, None], axis=-2)[..., 0, :]
    else:
        start = jax.random.normal(key, (*s.shape[:-2], s.shape[-1]), s.dtype)
    unit = lambda x: _unit(x, (-1,))[0]

    def step(_, v):
        return unit(jnp.einsum("...kn,...k->...n", m, unit(jnp.einsum("...kn,...n->...k", m, v))))

    v = jax.lax.fori_loop(0, steps, step, unit(start))
    u, size = _unit(jnp.einsum("...kn,...n->...k", m, v), (-1,))
    return u, v, top[..., 0] * size


def direction_and_dual(
    spec: NormSpec, view: MatrixView, s: jax.Array, polar: jax.Array | None, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """d(s) and ‖s‖_* for matrices s [*batch, K, N]; the dual norm has shape [*batch]."""
    c, name, both = ball_scale(spec, view), spec.name, (-2, -1)
    if s.size == 0:
        return s, jnp.zeros(view.batch, s.dtype)
    if name in ("l2", "rms"):
        c = math.sqrt(max(math.prod(view.matrix), 1)) if name == "rms" else c
        d, dual = _unit(s, both)
    elif name == "linf":
        d, dual = jnp.sign(s), jnp.sum(jnp.abs(s), axis=both, keepdims=True)
    elif name == "l1":
        flat = s.reshape(*s.shape[:-2], -1)
        size = jnp.abs(flat)
        one = jax.nn.one_hot(jnp.argmax(size, axis=-1), flat.shape[-1], dtype=s.dtype)
        # A NaN is the largest entry and has no sign: 0 * NaN keeps the others from hiding it.
        d = (one * jnp.sign(jnp.sum(one * flat, axis=-1, keepdims=True))).reshape(s.shape)
        dual = jnp.max(size, axis=-1, initial=0.0)[..., None, None]
    elif name == "lp":
        d, dual = _power_direction(s, spec.p / (spec.p - 1), both)
    elif name in ("spectral", "spectral_conv"):
        d = polar_of(spec, s) if polar is None else polar
        # The dual norm is a maximum over d: by the envelope theorem its gradient is d, and the
        # derivative of the iteration, which is only nearly a maximiser, stays out.
        dual = jnp.sum(s * jax.lax.stop_gradient(d), axis=both, keepdims=True)
    elif name in ("per_input", "per_output"):
        d, sizes = _unit(s, (-1,) if name == "per_input" else (-2,))
        dual = jnp.sum(sizes, axis=both, keepdims=True)
    elif name == "nuclear" and spec.method != "svd":
        u, v, size = _top_pair(s, spec.steps or 20, key)
        d, dual = u[..., :, None] * v[..., None, :], size[..., None]
    else:
        u, sigma, vt = jnp.linalg.svd(s, full_matrices=False)
        if name == "nuclear":
            weights = (jnp.arange(sigma.shape[-1]) == 0) * (sigma > 0)
            dual = sigma[..., :1, None]
        else:
            weights, dual = _power_direction(sigma, spec.p / (spec.p - 1), (-1,))
            dual = dual[..., None]
        d = (u * weights.astype(s.dtype)[..., None, :]) @ vt
    return c * d, c * dual[..., 0, 0]


def polar_of(spec: NormSpec, s: jax.Array) -> jax.Array:
    """The polar factor of s [..., K, N] as ``spec`` asks for it."""
    coefficients = spec.coefficients
    if not isinstance(coefficients, str):
        coefficients = np.asarray(coefficients)
    steps = {} if spec.steps is None else {"steps": spec.steps}
    return polar_factor(s, coefficients=coefficients, method=spec.method, **steps)


def working_array(x: Any) -> jax.Array:
    """x as an array with at least float32 to calculate in."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def lmo_with_dual(
    spec: NormSpec | str, s: jax.Array, *, key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The linear minimisation oracle and the dual norm in one go; they share their work.

    Args:
      spec: the norm, or its name.
      s: an array, float16 to float64.
      key: starts the power iteration of ``nuclear`` at random; ``None`` starts it at the
        longest row. Other norms ignore it.

    Returns:
      lmo(s) on the unit ball, in the shape and dtype of ``s``, and ‖s‖_* with the shape of the
      batch axes (usually ``()``), at least float32. Zero gives zero; a NaN gives NaNs.
    """
    spec = NormSpec(spec) if isinstance(spec, str) else spec
    view = matrix_view(spec, np.shape(s))
    d, dual = direction_and_dual(spec, view, view.read(working_array(s)), None, key)
    return view.write(-d).astype(jnp.result_type(s)), dual


def lmo(spec: NormSpec | str, s: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
    """argmin of ⟨s, x⟩ over the unit ball of the norm; 0 at s = 0.

    >>> import jax.numpy as jnp
    >>> [float(x) for x in lmo("linf", jnp.array([2.0, -0.5]))]
    [-1.0, 1.0]
    """
    return lmo_with_dual(spec, s, key=key)[0]


def dual_norm(spec: NormSpec | str, s: jax.Array) -> jax.Array:
    """max of ⟨s, x⟩ over the unit ball, one value for each batch entry (usually shape ``()``).

    >>> import jax.numpy as jnp
    >>> float(dual_norm("linf", jnp.array([2.0, -0.5])))
    2.5
    """
    return lmo_with_dual(spec, s)[1]


def sharp(spec: NormSpec | str, s: jax.Array) -> jax.Array:
    """argmax of ⟨s, x⟩ - ‖x‖²/2: the direction of steepest ascent with its natural length.

    >>> import jax.numpy as jnp
    >>> [float(x) for x in sharp("linf", jnp.array([2.0, -0.5]))]
    [2.5, -2.5]
    """
    spec = NormSpec(spec) if isinstance(spec, str) else spec
    view = matrix_view(spec, np.shape(s))
    d, dual = direction_and_dual(spec, view, view.read(working_array(s)), None, None)
    return view.write(dual[..., None, None] * d).astype(jnp.result_type(s))


def norm(spec: NormSpec | str, x: jax.Array) -> jax.Array:
    """‖x‖, one value for each batch entry; matrix norms by singular values.

    >>> import jax.numpy as jnp
    >>> float(norm("linf", jnp.array([2.0, -0.5])))
    2.0
    """
    spec = NormSpec(spec) if isinstance(spec, str) else spec
    view = matrix_view(spec, np.shape(x))
    m, c, both = view.read(working_array(x)), ball_scale(spec, view), (-2, -1)
    if spec.name in ("l2", "rms"):
        c = math.sqrt(max(math.prod(view.matrix), 1)) if spec.name == "rms" else c
        return _unit(m, both)[1][..., 0, 0] / c
    if spec.name == "linf":
        return jnp.max(jnp.abs(m), axis=both, initial=0.0) / c
    if spec.name == "l1":
        return jnp.sum(jnp.abs(m), axis=both) / c
    if spec.name == "lp":
        return _power_direction(m, spec.p, both)[1][..., 0, 0] / c
    if spec.name in ("per_input", "per_output"):
        sizes = _unit(m, (-1,) if spec.name == "per_input" else (-2,))[1]
        return jnp.max(sizes, axis=both, initial=0.0) / c
    sigma = jnp.linalg.svd(m, compute_uv=False)
    if spec.name in ("spectral", "spectral_conv"):
        return jnp.max(sigma, axis=-1, initial=0.0) / c
    if spec.name == "nuclear":
        return jnp.sum(sigma, axis=-1) / c
    return _power_direction(sigma, spec.p, (-1,))[1][..., 0] / c


def norm_upper_bound(spec: NormSpec | str, x: jax.Array, *, squarings: int = 4) -> jax.Array:
    """A bound ‖x‖ <= bound, by products of matrices only where the norm needs singular values.

    Spectral norms: ‖x‖ <= (tr (xᵀx)^m)^(1/2m), m = 2^squarings, which exceeds the norm by at
    most rank^(1/2m). All others: the norm itself.
    """
    spec = NormSpec(spec) if isinstance(spec, str) else spec
    if spec.name not in ("spectral", "spectral_conv"):
        return norm(spec, x)
    view = matrix_view(spec, np.shape(x))
    m = view.read(working_array(x))
    if m.shape[-2] > m.shape[-1]:
        m = jnp.swapaxes(m, -2, -1)
    m, size = _unit(m, (-2, -1))
    gram = m @ jnp.swapaxes(m, -2, -1)
    log = jnp.zeros(gram.shape[:-2], gram.dtype)  # log of what was taken out of gram^(2^i)
    for _ in range(squarings - 1):
        gram, scale = _unit(gram, (-2, -1))
        log = 2 * (log + jnp.log(jnp.where(scale == 0, 1.0, scale))[..., 0, 0])
        gram = gram @ gram
    # tr(gram²) = ‖gram‖_F² closes the last squaring without a product.
    last = jnp.sqrt(jnp.sum(gram * gram, axis=(-2, -1)))
    power = 2.0 ** (1 - squarings) / 2
    bound = jnp.exp(power * log) * last**power * size[..., 0, 0]
    bound = bound * (1 + 16 * jnp.finfo(bound.dtype).eps)  # rounding must not make it too small
    return jnp.where(size[..., 0, 0] == 0, 0.0, bound) / ball_scale(spec, view)


def euclidean_constant(spec: NormSpec | str, shape: tuple[int, ...]) -> float:
    """The least κ with ‖x‖ <= κ ‖x‖₂ for arrays of this shape (one batch entry).

    ½ κ² ‖x‖₂² is then 1-strongly convex in the norm: what a Euclidean anchor needs.

    >>> euclidean_constant("spectral", (16, 64)), euclidean_constant("l1", (9,))
    (0.5, 3.0)
    """
    spec = NormSpec(spec) if isinstance(spec, str) else spec
    view = matrix_view(spec, tuple(shape))
    c, size = ball_scale(spec, view), max(math.prod(view.matrix), 1)
    if spec.name == "rms":
        return 1 / math.sqrt(size)
    if spec.name == "l1":
        return math.sqrt(size) / c
    if spec.name == "nuclear":
        return math.sqrt(max(min(view.matrix), 1)) / c
    if spec.name in ("lp", "schatten") and spec.p < 2:
        count = size if spec.name == "lp" else max(min(view.matrix), 1)
        return count ** (1 / spec.p - 1 / 2) / c
    return 1 / c
