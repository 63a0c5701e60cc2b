r"""``qmatmul``: the product of activations with a weight that stays packed.

.. math:: y = Q_a(x)\, \hat W, \qquad \hat W_{kn} = v(c_{kn})\, s_{\lfloor k/b \rfloor n}\, g

The weight is a :class:`~fadex.quant.QuantizedArray` ``[..., K, N]`` whose blocks lie along
``K``; its values exist only inside the program named ``qmatmul``. Three ways to compute it:

* **kernel** (:mod:`fadex.quant.kernels.w4a16`): 4-bit codes are read as they are stored and
  decoded on chip. A product of ``M`` rows does :math:`2 M K N` operations on
  :math:`(4 + 8/b) K N / 8` bytes of weights, so it is bound by memory below the ridge

  .. math:: M^* = \frac{\text{operations per second}}{\text{bytes per second}} \cdot
            \frac{4 + 8/b}{16} ,

  58 rows on an H200 (989 Tflop/s in bfloat16, 4.8 TB/s) and 68 on a TPU v5e (197, 0.82), at
  ``b = 16``; there it can gain up to ``16 / 4.5 = 3.6`` over bfloat16 weights.
* **dequantized**: above ``PREFILL_ROWS = 64`` rows, for other formats, and on other platforms:
  the weight is decoded once and multiplied by XLA's own product. On CPU this costs one decode
  more than the dense product, and that weight is a temporary.
* **integers**: where both scales are constant along ``K`` (per channel or matrix with per token
  or matrix), codes are multiplied as they are and accumulated exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, is_concrete
from fadex.core.kernels import by_platform
from fadex.quant.elements import ELEMENTS
from fadex.quant.formats import TENSOR, Format
from fadex.quant.kernels import w4a16
from fadex.quant.packing import TILE
from fadex.quant.qarray import QuantizedArray, quantize_array, quantize_dequantize

__all__ = ["qmatmul"]

IMPLS = ("auto", "xla", "pallas_tpu", "pallas_gpu", "interpret")
PREFILL_ROWS = 64
_EXACT = 1 << 24  # float32 holds every integer up to here


# --- activations


def _fake_quantized(x: jax.Array, fmt: Format | None, scale: jax.Array | None) -> jax.Array:
    if fmt is None:
        return x
    return quantize_dequantize(x, fmt, axis=-1, tensor_scale=scale)


def _is_constant_along_k(fmt: Format) -> bool:
    integers = ELEMENTS[fmt.element].kind == "int" and fmt.symmetric and not fmt.half_integers
    return integers and fmt.block in (None, TENSOR)


def _takes_integers(qw: QuantizedArray, activation: Format | None) -> bool:
    if activation is None or not (_is_constant_along_k(activation)
                                  and _is_constant_along_k(qw.fmt)):
        return False
    largest = 1 << (activation.bits + qw.fmt.bits - 2)
    return qw.length * largest < 1 << 31


def _signed(q: QuantizedArray) -> jax.Array:
    """Codes as int8 integers, without padding."""
    shift = 8 - q.fmt.bits
    codes = jax.lax.bitcast_convert_type(q.unpacked(), jnp.int8)
    codes = (codes << shift) >> shift if shift else codes
    return jax.lax.slice_in_dim(codes, 0, q.length, axis=q.ndim + q.axis)


def _scale(q: QuantizedArray) -> jax.Array:
    """The scale of a row or column (kept with length 1), float32."""
    if q.scales is not None:
        return q.fmt.scale_values(q.scales)
    return q.tensor_scale[..., None, None] if q.ndim > 1 else q.tensor_scale[None]


def _integer_dot_wide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


def _integer_dot_cpu(a: jax.Array, b: jax.Array, *, largest: int) -> jax.Array:
    """The same integers by float32 products over chunks of ``K`` short enough to be exact: XLA's
    CPU compiler has fast products for floats alone."""
    length = a.shape[-1]
    chunk = _EXACT // largest
    total = None
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        part = jnp.matmul(
            a[..., start:stop].astype(jnp.float32),
            b[..., start:stop, :].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST,
        )
        if length > chunk:
            part = part.astype(jnp.int32)
        total = part if total is None else total + part
    return total.astype(jnp.int32)


def _integer_product(
    x: jax.Array, qw: QuantizedArray, dtype: Any, activation: Format, scale: jax.Array | None
) -> jax.Array:
    qx = quantize_array(x, activation, axis=-1, tensor_scale=scale)
    a, b = _signed(qx), _signed(qw)
    largest = 1 << (activation.bits + qw.fmt.bits - 2)
    total = by_platform(
        a, b, default=functools.partial(_integer_dot_cpu, largest=largest),
        tpu=_integer_dot_wide, cuda=_integer_dot_wide,
    )
    left, right = _scale(qx), _scale(qw)
    if x.ndim == 1:  # a vector has lost its axis of rows
        right = right[..., 0, :]
    return (total.astype(jnp.float32) * left * right).astype(dtype)


# --- the product


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static options of one product."""

    impl: str
    activation: Format | None
    dtype: Any


def _kernel_form(x: jax.Array, qw: QuantizedArray, plan: _Plan) -> Any:
    """The form to call as ``form(x, qw, dtype=...)``; ``None``: the decoded weight serves."""
    if plan.impl == "xla" or any(not isinstance(n, int) for n in x.shape + qw.shape):
        return None
    rows = w4a16.rows_each(x, qw)
    served = rows is not None and w4a16.serves(qw, plan.dtype)
    if plan.impl == "auto":
        return None if not served or not 0 < rows <= PREFILL_ROWS else w4a16.w4a16
    if not served or rows == 0:
        raise ValueError(
            f"impl: the kernel of {plan.impl!r} takes 4-bit codes in layout 'planar' with K a "
            f"multiple of {TILE}, a block that divides {TILE} or covers K, and a weight for each "
            f"leading index of the result; got x {x.shape} and {qw!r}"
        )
    return {
        "pallas_tpu": w4a16.w4a16_tpu,
        "pallas_gpu": w4a16.w4a16_triton,
        "interpret": functools.partial(w4a16.w4a16_triton, interpret=True),
    }[plan.impl]


def _with_kernel(x: jax.Array, qw: QuantizedArray, plan: _Plan) -> jax.Array:
    """The product by the form for these shapes, chosen anew when ``vmap`` adds an axis.

    A kernel that is mapped would run once an example: the axis of the examples becomes rows, that
    of a mapped weight a leading axis.
    """
    leaves, structure = jax.tree.flatten(qw)

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _with_form(x, jax.tree.unflatten(structure, leaves), plan)

    @call.def_vmap
    def rule(size: int, batched: list[bool], x: jax.Array, *leaves: jax.Array) -> Any:
        over_x, *over = batched
        if not any(over):
            return _over_rows(x, jax.tree.unflatten(structure, leaves), plan), True
        plain = qw.ndim == 2 and qw.codebook is None and qw.rotation is None
        if all(over) and plain and x.ndim - over_x <= 2:  # experts
            vector = x.ndim - over_x == 1
            rows = x[..., None, :] if vector else x
            out = _with_kernel(rows, jax.tree.unflatten(structure, leaves), plan)
            return out[..., 0, :] if vector else out, True
        axes = [0 if b else None for b in batched]
        return jax.vmap(call.fun, in_axes=axes, axis_size=size)(x, *leaves), True

    return call(x, *leaves)


def _over_rows(x: jax.Array, qw: QuantizedArray, plan: _Plan) -> jax.Array:
    """Products ``[B, ..., N]`` of examples ``[B, ..., K]`` with one weight."""
    if x.ndim == 2:  # vectors
        return jnp.moveaxis(_with_kernel(x, qw, plan), -2, 0)
    x = jnp.moveaxis(x, 0, -3)
    count = x.shape[-3:-1]
    out = _with_kernel(x.reshape(*x.shape[:-3], -1, x.shape[-1]), qw, plan)
    return jnp.moveaxis(out.reshape(*out.shape[:-2], *count, out.shape[-1]), -3, 0)


def _with_form(x: jax.Array, qw: QuantizedArray, plan: _Plan) -> jax.Array:
    form = _kernel_form(x, qw, plan) or w4a16.w4a16_reference
    return form(x, qw, dtype=plan.dtype)


def _forward(
    x: jax.Array, qw: QuantizedArray, scale: jax.Array | None, plan: _Plan
) -> jax.Array:
    integers = _takes_integers(qw, plan.activation) and jnp.dtype(plan.dtype) != jnp.float64
    if integers and plan.impl in ("auto", "xla"):
        return _integer_product(x, qw, plan.dtype, plan.activation, scale)
    return _with_kernel(_fake_quantized(x, plan.activation, scale), qw, plan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _product(x: jax.Array, qw: QuantizedArray, scale: Any, plan: _Plan) -> jax.Array:
    return _forward(x, qw, scale, plan)


def _product_jvp(plan: _Plan, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    x, qw, scale = primals
    out = _product(x, qw, scale, plan)

    # Rematerialized, or the decoded weight would be kept from the forward pass to the backward.
    @jax.checkpoint
    def straight_through(dx: jax.Array, qw: QuantizedArray) -> jax.Array:
        return w4a16.w4a16_reference(dx, qw, plan.dtype)

    is_zero = lambda t: type(t) is jax.custom_derivatives.SymbolicZero
    dx = tangents[0]
    if is_zero(dx) or dx.dtype == jax.dtypes.float0:
        return out, jnp.zeros(out.shape, out.dtype)
    return out, straight_through(dx, qw)


_product.defjvp(_product_jvp, symbolic_zeros=True)


# The name under which a program's weights are decoded: see ``test_matmul``.
def _named(x: jax.Array, qw: QuantizedArray, scale: Any, plan: _Plan) -> jax.Array:
    return _product(x, qw, scale, plan)


_named.__name__ = _named.__qualname__ = "qmatmul"
_compiled = jax.jit(_named, static_argnums=3)


def _spans_devices(*trees: Any) -> bool:
    """Whether the compiler is to partition the program, as far as can be known: by the mesh in
    context (axes that ``shard_map`` has taken over do not count) or by where arrays lie. Or whether
    ``shard_map`` asks how each result varies, which a kernel cannot say."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and any(
        size > 1 and kind != jax.sharding.AxisType.Manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
    ):
        return True
    arrays = [a for a in jax.tree.leaves(trees) if isinstance(a, jax.Array)]
    kinds = (getattr(jax.typeof(a), "manual_axis_type", None) for a in arrays)
    if any(getattr(kind, "varying", None) for kind in kinds):
        return True
    return any(len(a.sharding.device_set) > 1 for a in arrays if is_concrete(a))


def _check_shapes(x: Any, shape: tuple[int, ...]) -> None:
    if x.ndim == 0:
        raise ValueError("x: expected at least one axis, got a scalar")
    if len(shape) < 2:
        raise ValueError(f"qw: expected [..., K, N], got shape {shape}")
    if x.shape[-1] != shape[-2]:
        raise ValueError(
            f"x: its last axis must have the {shape[-2]} rows of qw {shape}, got shape {x.shape}"
        )
    try:
        np.broadcast_shapes(x.shape[:-2], shape[:-2])
    except ValueError:
        raise ValueError(
            f"x: leading axes of shape {x.shape} do not broadcast against those of qw {shape}"
        ) from None


def qmatmul(
    x: Any,
    qw: Any,
    *,
    impl: str = "auto",
    activation: Format | None = None,
    activation_scale: Any = None,
) -> jax.Array:
    r"""Product ``x @ qw`` with a quantized weight (see the module).

    Shapes are those of :func:`jax.numpy.matmul`: stacked experts ``[E, M, K] @ [E, K, N]``
    included. The result has the dtype of ``x @ qw.dequantize()``, accumulated in float32. Works
    under ``jit``, ``vmap`` over examples (which become rows) or experts, and ``scan`` over stacked
    layers.

    Several devices: XLA does not partition a kernel by itself (on TPUs it raises
    ``NotImplementedError``). ``'auto'`` therefore takes XLA's product where a mesh of several
    devices is in context (``jax.set_mesh``) outside ``shard_map``, and for arrays that lie on
    several. A ``jit`` whose shardings name the mesh without a context shows neither: set the mesh,
    pass ``impl='xla'``, or call it on the shards under ``jax.shard_map(..., check_vma=False)``,
    which keeps the kernel (with ``check_vma=True`` it is XLA's product: kernels cannot say how
    their results vary).

    Derivatives with respect to ``x``, forwards and backwards, are those of
    :math:`x \hat W`: straight through the quantization of ``x``. ``qw`` and ``activation_scale``
    are constants to differentiation (their derivative is zero); backwards the weight is decoded
    again instead of being kept.

    Args:
      x: ``[..., K]``, real.
      qw: :class:`~fadex.quant.QuantizedArray` ``[..., K, N]`` with block axis -2, or an array,
        which is multiplied as it is.
      impl: ``'auto'``: the kernel on TPU and CUDA where it serves (at most 64 rows, 4-bit codes
        in layout ``'planar'``, ``K`` a multiple of 128, and a block that divides 128 or covers
        ``K``; one device), else XLA's product with the decoded weight; ``'xla'``: always the
        latter; ``'pallas_tpu'`` or ``'pallas_gpu'``: that kernel, or an error where it does not
        serve; ``'interpret'``: the GPU form in interpret mode, for tests. Static.
      activation: format in which ``x`` is held, blocks along ``K``: W4A4, W8A8. With symmetric
        integers whose scales are constant along ``K`` on both sides (``int_group(8, None)``,
        ``int_group(8, 'tensor')``) the codes are multiplied as integers; otherwise the product
        takes ``dequantize(quantize(x))``. Static.
      activation_scale: tensor scale of ``activation``, float32, that was found before
        (static scaling), positive, broadcastable to the leading axes of ``x``; by default it
        follows from ``x``.

    Raises:
      TypeError: ``x`` is quantized or complex; ``qw`` is no array; ``activation`` no format.
      ValueError: shapes that do not fit, a block axis other than -2, an unknown ``impl``, a
        kernel that does not serve, ``activation_scale`` without ``activation``, for a format
        without tensor scale or not positive (where it is known).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.quant import nvfp4, quantize_array
      >>> from fadex.quant.matmul import qmatmul
      >>> w = jax.random.normal(jax.random.key(0), (128, 16))
      >>> x = jax.random.normal(jax.random.key(1), (3, 128))
      >>> qw = quantize_array(w, nvfp4())
      >>> bool(jnp.allclose(qmatmul(x, qw), x @ qw.dequantize(), atol=1e-4))
      True
    """
    check_choice("impl", impl, IMPLS)
    if isinstance(x, QuantizedArray):
        raise TypeError("x: expected an array; for quantized activations pass activation=...")
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"x: expected real numbers, got {x.dtype}")
    if activation is not None and not isinstance(activation, Format):
        raise TypeError(f"activation: expected a Format or None, got {activation!r}")
    if activation is None and activation_scale is not None:
        raise ValueError("activation_scale: needs an activation format")
    if activation is not None and activation_scale is not None:
        if not activation.has_tensor_scale:
            raise ValueError(f"activation_scale: format {activation.name!r} has no tensor scale")
        if is_concrete(activation_scale) and not np.all(np.asarray(activation_scale) > 0):
            raise ValueError(f"activation_scale: must be positive, got {activation_scale}")
        activation_scale = jnp.asarray(activation_scale, jnp.float32)
    if activation is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: expected floating point to be quantized, got {x.dtype}")

    if not isinstance(qw, QuantizedArray):
        if not isinstance(qw, (jax.Array, np.ndarray, jax.core.Tracer)):
            raise TypeError(f"qw: expected a QuantizedArray or an array, got {type(qw).__name__}")
        qw = jnp.asarray(qw)
        _check_shapes(x, qw.shape)
        if activation is not None:
            held = _fake_quantized(x, activation, activation_scale)
            x = x + jax.lax.stop_gradient(held - x)
        return jnp.matmul(x, qw)
    if qw.axis != -2:
        raise ValueError(
            f"qw: expected block axis -2 (the contraction axis of [..., K, N]), got {qw.axis}; "
            "quantize the weight with axis=-2"
        )
    _check_shapes(x, qw.shape)
    dtype = jnp.promote_types(x.dtype, qw.dtype)
    if impl == "auto" and _spans_devices(x, qw):
        impl = "xla"
    return _compiled(x, qw, activation_scale, _Plan(impl, activation, dtype))
