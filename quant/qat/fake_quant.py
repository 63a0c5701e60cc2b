r"""Fake quantization: the forward pass sees quantized weights, the backward pass a surrogate.

With a format's block scale :math:`s` (block and tensor scale together) and codebook :math:`Q`,

.. math:: \hat w = s\, Q(w / s), \qquad
          \frac{\partial \hat w}{\partial w} := S(w / s),

where :math:`\hat w` is, bit for bit, what :func:`~fadex.quant.dequantize` makes of
:func:`~fadex.quant.quantize`, and :math:`S` is :func:`~fadex.quant.qat.surrogate_weight` on the
format's levels: integers, e2m1, NF4, and RaZeR's codebook with the special value that each block
has selected. Scales and selectors are held constant unless ``scale_gradient`` is set.

Absolute radii are in code units: steps of 1 for integers, of 0.5 to 2 for e2m1, of about 0.1
within [-1, 1] for NF4. On grids whose cells differ, ``bandwidth="relative"`` gives every cell the
same shape.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_real
from fadex.core.pytree import map_with_path
from fadex.quant.elements import element_levels
from fadex.quant.formats import TENSOR, Blocks, Format
from fadex.quant.qarray import _encode_blocks, blocked, padded_length, prepare, split_blocks
from fadex.quant.qat.perturbations import Kernel, ste
from fadex.quant.qat.surrogates import EDGES, surrogate_weight
from fadex.quant.razer import RaZeR
from fadex.quant.recipes import as_recipe
from fadex.quant.site import Site
from fadex.quant.tree import _selected

__all__ = [
    "FixedScale",
    "fake_quant",
    "fake_quant_array",
    "fixed_scale",
    "surrogate_factor",
]


@dataclasses.dataclass(frozen=True)
class FixedScale(Format):
    """The format of :func:`fixed_scale`."""

    fixed: float = 1.0

    def tensor_scale(self, amax: jax.Array, hold: Any = None) -> jax.Array:
        del hold
        # Not by amax >= 0: of a largest magnitude, compiled programs took that to be true.
        return jnp.where(jnp.isnan(amax), jnp.nan, jnp.float32(self.fixed))


def fixed_scale(bits: int, scale: float) -> FixedScale:
    """Integers on a grid that does not follow the weights: the usual setting of QAT theory.

    Args:
      bits: width, 2 to 8; two bits have the levels ``{-1.5, -.5, .5, 1.5}``.
      scale: the step, in units of the weights; one for the whole matrix.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.quant import quantize_array
      >>> from fadex.quant.qat import fixed_scale
      >>> w = jnp.array([[0.1, 0.3, -9.0, 0.0]]).T
      >>> quantize_array(w, fixed_scale(2, 0.2)).dequantize()[:, 0].round(3).tolist()
      [0.1..., 0.3..., -0.3..., 0.1...]
    """
    check_choice("bits", bits, tuple(range(2, 9)))
    scale = check_real("scale", scale, minimum=0.0, exclusive=True)
    return FixedScale(f"int{bits}_fixed_{scale:g}", f"int{bits}", TENSOR, fixed=scale)


class _Encoded(NamedTuple):
    blocks: jax.Array  # float32, the block axis split in two
    tensor_scale: jax.Array | None  # broadcasting against them
    out: Blocks
    axis: int


def _encode(w: Any, fmt: Format, axis: int) -> _Encoded:
    x, axis = prepare(w, fmt, axis, "w")
    blocks, g, _ = blocked(x, fmt, axis)
    if g is not None:
        g = g.reshape(g.shape + (1,) * (blocks.ndim - g.ndim))
    return _Encoded(blocks, g, _encode_blocks(blocks, g, None, fmt=fmt, axis=axis), axis)


def _join(blocks: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Undo the split and the padding."""
    at = w.ndim + axis
    length = blocks.shape[at] * blocks.shape[at + 1]  # -1 does not serve empty arrays
    joined = blocks.reshape(w.shape[:at] + (length,) + w.shape[at + 1:])
    return jax.lax.slice_in_dim(joined, 0, w.shape[at], axis=at)


def _values(encoded: _Encoded, fmt: Format) -> jax.Array:
    """Dequantized blocks, float32."""
    out = encoded.out
    values = fmt.decode_blocks(out.codes.astype(jnp.uint8), out.scales, out.zero_point)
    return values if encoded.tensor_scale is None else values * encoded.tensor_scale


def _levels(fmt: Format, out: Blocks) -> Any:
    """The codebook in units of the scale; ``[16, ...]`` where blocks choose theirs."""
    if not isinstance(fmt, RaZeR):
        return fmt.levels
    base = element_levels("e2m1")
    tables = np.stack([np.sort(np.append(base, np.float32(v))) for v in fmt.specials])
    selector = out.scales.astype(jnp.int32) >> fmt.scale_shift
    return jnp.moveaxis(jnp.asarray(tables)[selector], -1, 0)


def _check_kernel(kernel: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(kernel, Kernel):
        raise TypeError(f"surrogate: expected a Kernel such as ste(), got {kernel!r}")
    if kernel.scheduled:
        raise ValueError("surrogate: delta is a schedule; take surrogate.at(count)")
    own = np.shape(kernel.delta) if kernel.delta is not None else ()
    try:
        fits = np.broadcast_shapes(own, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"surrogate: delta of shape {own} does not broadcast to the weights' shape {shape}"
        )


def _split_delta(kernel: Kernel, shape: tuple[int, ...], fmt: Format, axis: int) -> Kernel:
    """The kernel with an array of radii for the weights cut into blocks, as the weights are."""
    if kernel.delta is None or not np.ndim(kernel.delta):
        return kernel
    delta = jnp.broadcast_to(jnp.asarray(kernel.delta, jnp.float32), shape)
    at = len(shape) + axis
    pad = padded_length(shape[at], fmt) - shape[at]
    if pad:
        widths = [(0, pad if i == at else 0) for i in range(len(shape))]
        delta = jnp.pad(delta, widths, constant_values=1.0)
    return dataclasses.replace(kernel, delta=split_blocks(delta, axis, fmt))


def _factor(
    encoded: _Encoded, fmt: Format, kernel: Kernel, edge: str, shape: tuple[int, ...]
) -> jax.Array:
    blocks, g, out, axis = encoded
    kernel = _split_delta(kernel, shape, fmt, axis)
    scale = g if out.scales is None else fmt.scale_values(out.scales)
    if out.scales is not None and g is not None:
        scale = scale * g
    units = blocks / scale
    if out.zero_point is not None:
        units = units + out.zero_point.astype(jnp.float32)
    return surrogate_weight(units, _levels(fmt, out), kernel=kernel, edge=edge)


def surrogate_factor(
    w: Any, fmt: Format, surrogate: Kernel, *, axis: int = -2, edge: str = "pass"
) -> jax.Array:
    """What :func:`fake_quant_array` multiplies the gradient with: ``S(w / scale)``, float32.

    NaN in blocks whose values are NaN. Arguments, errors: as :func:`fake_quant_array`.
    """
    _check_kernel(surrogate, np.shape(w))
    encoded = _encode(w, fmt, axis)
    return _join(_factor(encoded, fmt, surrogate, edge, w.shape), w, encoded.axis)


class _Static(NamedTuple):
    fmt: Format
    axis: int
    kernel: Kernel  # its delta cleared where it is an array
    edge: str
    scale_gradient: bool


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fake(static: _Static, delta: Any, w: jax.Array) -> jax.Array:
    encoded = _encode(w, static.fmt, static.axis)
    return _join(_values(encoded, static.fmt), w, encoded.axis).astype(w.dtype)


@_fake.defjvp
def _fake_jvp(static, primals, tangents):
    delta, w = primals
    fmt, kernel = static.fmt, static.kernel
    if delta is not None:
        kernel = dataclasses.replace(kernel, delta=delta)
    encoded = _encode(w, fmt, static.axis)
    values = _values(encoded, fmt)
    factor = _factor(encoded, fmt, kernel, static.edge, w.shape)
    join = lambda blocks: _join(blocks, w, encoded.axis)
    slope = join(factor) * tangents[1].astype(jnp.float32)
    if static.scale_gradient:
        moved, _, _ = blocked(tangents[1], dataclasses.replace(fmt, two_level=False), encoded.axis)
        largest, change = jax.jvp(
            lambda x: jnp.max(jnp.abs(x), axis=encoded.axis, keepdims=True),
            (encoded.blocks,), (moved,),
        )
        relative = jnp.where(largest > 0, change / jnp.where(largest > 0, largest, 1), 0)
        slope = slope + join((values - encoded.blocks * factor) * relative)
    return join(values).astype(w.dtype), slope.astype(w.dtype)


def fake_quant_array(
    w: Any,
    fmt: Format,
    surrogate: Kernel = ste(),
    *,
    axis: int = -2,
    edge: str = "pass",
    scale_gradient: bool = False,
) -> jax.Array:
    r"""Quantize and dequantize one array; differentiate by a surrogate.

    Forward and reverse mode, ``vmap``, ``scan`` and ``jax.checkpoint`` work.

    Args:
      w: weights ``[..., K, N]``.
      fmt: the format. Static.
      surrogate: kernel; its ``delta`` in code units may be traced, and an array that broadcasts
        to the shape of ``w`` (such as ``[L, 1, 1]``: one radius for each stacked layer).
      axis: the axis that is cut into blocks. Static.
      edge: at and beyond the outer levels, as in
        :func:`~fadex.quant.qat.surrogate_weight`. The default lets gradients pass: a scale that
        follows the largest weight clips nothing but the rounding of the scale, and a weight that
        got no gradient there could never come back. With :func:`fixed_scale`, ``"tail"`` is the
        theorem.
      scale_gradient: let gradients reach the weight that sets the scale as well,
        :math:`\partial \hat w_j / \partial \log s = \hat w_j - w_j S_j` (the rounding of the scale
        and the selector are held). Then :math:`\hat w` is homogeneous of degree one in a block,
        as it should be.

    Returns:
      The dequantized values in the dtype of ``w``, bit for bit those of
      ``quantize_array(w, fmt, axis=axis).dequantize()``.

    Raises:
      ValueError, TypeError: as :func:`~fadex.quant.quantize_array` and
        :func:`~fadex.quant.qat.surrogate_weight`; a ``delta`` whose shape does not broadcast to
        that of ``w``; ``scale_gradient`` for a format whose scale is
        not one block's largest magnitude.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.quant import int_group
      >>> from fadex.quant.qat import fake_quant_array, gaussian
      >>> w = jnp.linspace(-1.4, 1.5, 32)[:, None]
      >>> loss = lambda w: fake_quant_array(w, int_group(2, 32), gaussian(0.35)).sum()
      >>> g = jax.grad(loss)(w)
      >>> print(f"{g.min():.2f} {g.max():.2f}")  # on a level, on a threshold
      0.82 1.18
    """
    check_choice("edge", edge, EDGES)
    w, axis = prepare(w, fmt, axis, "w")
    _check_kernel(surrogate, w.shape)
    if scale_gradient and (not fmt.symmetric or fmt.block == TENSOR):
        raise ValueError(f"scale_gradient: {fmt.name!r} has no scale of a block's largest weight")
    delta = None if isinstance(surrogate.delta, float) else surrogate.delta
    kernel = surrogate if delta is None else dataclasses.replace(surrogate, delta=None)
    return _fake(_Static(fmt, axis, kernel, edge, bool(scale_gradient)), delta, w)


def selected_formats(tree: Any, recipe: Any, min_size: int) -> dict[str, tuple[Format, int]]:
    """``path -> (format, axis)`` of the leaves whose weights a recipe quantizes."""
    found = {}
    for path, (rule, _, axis) in _selected(tree, as_recipe(recipe), min_size).items():
        fmt = rule.target
        if isinstance(fmt, Site):
            if fmt.activations is not None:
                raise ValueError(
                    f"recipe: {path!r} has an activation format; surrogates are for weights: name "
                    "the Site's weights alone"
                )
            fmt = fmt.weights
        if fmt is not None:
            found[path] = fmt, axis
    return found


def fake_quant(
    tree: Any,
    recipe: Any,
    surrogate: Kernel = ste(),
    *,
    edge: str = "pass",
    min_size: int = 1024,
    scale_gradient: bool = False,
) -> Any:
    """The tree as it would be after quantization, differentiable by a surrogate.

    Args:
      tree: parameters.
      recipe: as for :func:`~fadex.quant.quantize`. Static.
      surrogate: kernel, such as ``ste()`` or ``gaussian(0.35)``; for a schedule of its radius,
        ``surrogate.at(step)``.
      min_size: as for :func:`~fadex.quant.quantize`; small models want 0.
      edge, scale_gradient: as :func:`fake_quant_array`.

    Returns:
      The tree with dense leaves: ``dequantize(quantize(tree, recipe))`` bit for bit.

    Raises:
      ValueError, TypeError: as :func:`~fadex.quant.quantize`; a site with an activation format.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.quant import nvfp4
      >>> from fadex.quant.qat import fake_quant, gaussian
      >>> params = {"kernel": jnp.ones((64, 32)), "bias": jnp.zeros(32)}
      >>> loss = lambda p: fake_quant(p, nvfp4(), gaussian(0.35, "relative"))["kernel"].sum()
      >>> jax.grad(loss)(params)["kernel"].shape
      (64, 32)
    """
    chosen = selected_formats(tree, recipe, min_size)

    def convert(path: str, leaf: Any) -> Any:
        if path not in chosen:
            return leaf
        fmt, axis = chosen[path]
        return fake_quant_array(
            leaf, fmt, surrogate, axis=axis, edge=edge, scale_gradient=scale_gradient
        )

    return map_with_path(convert, tree)
