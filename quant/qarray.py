r"""``QuantizedArray``: packed codes and their scales as one pytree node.

The value at position :math:`i` of the block axis is

.. math:: \hat x_i = \big(v(c_i)\, s_{\lfloor i/b \rfloor}\big)\, g

with the element value :math:`v` of code :math:`c_i` (less the zero point), the block scale
:math:`s` and the tensor scale :math:`g`. Everything in it decodes from itself and the static
:class:`~fadex.quant.Format`.

No shape is stored: under ``vmap`` or ``scan`` over stacked layers the leaves lose their leading
axes, under ``shard_map`` they are cut, and every property follows. What is static is the padding
of the block axis alone, which is zero for whole blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, is_concrete
from fadex.quant.elements import as_float32
from fadex.quant.formats import Format, materialize
from fadex.quant.packing import LAYOUTS, pack, pack_unit, repack, unpack

__all__ = ["QuantizedArray", "quantize_array", "quantize_dequantize"]

_NO_ARRAY = (
    "a QuantizedArray is not an array: qmatmul and the layers of fadex.models.layers take it as it "
    "is; elsewhere (flax's own layers), call dequantize() for its values"
)
ON_NONFINITE = ("propagate", "saturate", "check")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "tensor_scale", "zero_point", "codebook", "rotation"],
    meta_fields=["fmt", "axis", "pad", "layout", "dtype"],
)
@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, as arrays are
class QuantizedArray:
    """An array in a low-bit format. A pytree node: leaves are arrays, the rest is static.

    Attributes:
      codes: uint8, packed along ``axis`` (see :mod:`fadex.quant.packing`).
      scales: block scales, the array's shape with ``axis`` cut to its number of blocks; uint8 bit
        patterns (e4m3fn, e8m0, e3m3, RaZeR's scale with selector) or floats; ``None`` where a
        matrix has one scale.
      tensor_scale: float32, the leading axes before the matrix, or ``None``.
      zero_point: uint8 like ``scales``, in code units, or ``None``.
      codebook, rotation: for formats that carry one; ``None`` here.
      fmt: the format.
      axis: negative; the axis that is cut into blocks.
      pad: by how much ``axis`` was padded to whole blocks.
      layout: ``'planar'`` or ``'stream'``.
      dtype: what :meth:`dequantize` returns.
    """

    codes: jax.Array
    scales: jax.Array | None
    tensor_scale: jax.Array | None
    zero_point: jax.Array | None
    codebook: jax.Array | None
    rotation: jax.Array | None
    fmt: Format
    axis: int
    pad: int
    layout: str
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.ndim < -self.axis:
            raise ValueError(
                f"a QuantizedArray with block axis {self.axis} has codes of shape "
                f"{self.codes.shape}: a scan or vmap took away an axis of the matrix itself"
            )
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(self))

    @property
    def padded(self) -> int:
        """Length of ``axis`` in whole blocks."""
        # Whole blocks fill whole bytes, so the bytes say how many codes there are.
        return self.codes.shape[self.axis] * 8 // self.fmt.bits

    @property
    def length(self) -> int:
        """Length of ``axis``."""
        return self.padded - self.pad

    def unpacked(self) -> jax.Array:
        """Codes as uint8, one a value, padding included."""
        return unpack(
            self.codes, self.fmt.bits, length=self.padded, axis=self.axis, layout=self.layout
        )

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Values, computed in float32 and rounded once to ``dtype`` (default ``self.dtype``)."""
        blocks = split_blocks(self.unpacked(), self.axis, self.fmt)
        scales = self.scales if self.scales is None else jnp.expand_dims(self.scales, self._inner)
        zero = (
            self.zero_point if self.zero_point is None
            else jnp.expand_dims(self.zero_point, self._inner)
        )
        values = self.fmt.decode_blocks(blocks, scales, zero)
        if self.tensor_scale is not None:
            values = values * _over(self.tensor_scale, values.ndim)
        values = values.reshape(self.codes.shape[: self.ndim + self.axis] + (self.padded,)
                                + self.codes.shape[self.ndim + self.axis + 1:])
        values = jax.lax.slice_in_dim(values, 0, self.length, axis=self.ndim + self.axis)
        return values.astype(self.dtype if dtype is None else dtype)

    @property
    def _inner(self) -> int:
        return self.axis  # of the values inside a block, once the axis is split

    def astype(self, dtype: Any) -> QuantizedArray:
        """The same codes, dequantized to ``dtype`` from now on."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def to_layout(self, layout: str) -> QuantizedArray:
        """The same codes in another packing layout."""
        check_choice("layout", layout, LAYOUTS)
        if layout == self.layout:
            return self
        codes = repack(self.codes, self.fmt.bits, length=self.padded, axis=self.axis,
                       layout=self.layout, to=layout)
        return dataclasses.replace(self, codes=codes, layout=layout)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Index leading axes (layers, experts), those before the matrix; ``...`` gives itself."""
        if index is Ellipsis:
            return self
        parts = index if isinstance(index, tuple) else (index,)
        leading = self.ndim - matrix_ndim(self.ndim, self.axis)
        if len(parts) > leading or any(part is None or part is Ellipsis for part in parts):
            if leading <= 0:
                raise IndexError(f"index: the axes of shape {self.shape} are those of the matrix; "
                                 "call dequantize() to index values")
            raise IndexError(
                f"index: a QuantizedArray of shape {self.shape} with block axis {self.axis} takes "
                f"at most {leading} leading indices, got {index!r}; call dequantize() for more"
            )
        for part, size in zip(parts, self.shape):
            if isinstance(part, (int, np.integer)) and not -size <= part < size:
                raise IndexError(f"index: {part} is out of range for an axis of {size}")
        return jax.tree.map(lambda leaf: leaf[index], self)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        return (self[i] for i in range(len(self)))

    def columns(self, start: int, stop: int) -> QuantizedArray:
        """Columns ``start:stop`` of the last axis, which must not be the block axis."""
        if self.axis == -1:
            raise ValueError("columns: the last axis is the block axis; take rows instead")
        cut = lambda a: None if a is None else a[..., start:stop]
        return dataclasses.replace(
            self, codes=cut(self.codes), scales=cut(self.scales), zero_point=cut(self.zero_point)
        )

    def take(self, index: jax.Array) -> jax.Array:
        """Values of the rows ``index`` of a matrix ``[V, D]``: ``index.shape + (D,)``.

        With block axis -1 only those rows are decoded; otherwise the whole matrix is.
        """
        if self.ndim != 2:
            raise ValueError(f"take: expected a matrix, got shape {self.shape}")
        if self.axis != -1:
            return jnp.take(self.dequantize(), index, axis=0)
        # As jnp.take: from the end where negative, NaN where there is no such row.
        count = self.shape[0]
        index = jnp.where(index < 0, index + count, index)
        rows = lambda a: None if a is None else jnp.take(a, index, axis=0, mode="clip")
        values = dataclasses.replace(
            self, codes=rows(self.codes), scales=rows(self.scales),
            zero_point=rows(self.zero_point),
        ).dequantize()
        return jnp.where(((index >= 0) & (index < count))[..., None], values, jnp.nan)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_NO_ARRAY)

    def __jax_array__(self) -> Any:
        raise TypeError(_NO_ARRAY)

    def __repr__(self) -> str:
        shape = getattr(self.codes, "shape", None)
        if shape is None or len(shape) < -self.axis:
            return f"QuantizedArray({self.fmt.name}, codes={self.codes!r})"
        return (
            f"QuantizedArray({self.fmt.name}, shape={self.shape}, axis={self.axis}, "
            f"layout={self.layout!r}, dtype={jnp.dtype(self.dtype).name})"
        )


def padded_length(length: int, fmt: Format) -> int:
    """``length`` in whole blocks and whole bytes."""
    unit = fmt.block if isinstance(fmt.block, int) else pack_unit(fmt.bits)
    return length + -length % unit


def split_blocks(x: jax.Array, axis: int, fmt: Format) -> jax.Array:
    """``[..., K, ...] -> [..., K/b, b, ...]`` for a padded axis."""
    at = x.ndim + axis
    block = fmt.block if isinstance(fmt.block, int) else max(x.shape[at], 1)
    return x.reshape(x.shape[:at] + (x.shape[at] // block, block) + x.shape[at + 1:])


def _over(tensor_scale: jax.Array, ndim: int) -> jax.Array:
    return tensor_scale.reshape(tensor_scale.shape + (1,) * (ndim - tensor_scale.ndim))


def matrix_ndim(ndim: int, axis: int) -> int:
    """How many trailing axes share a tensor scale: the matrix, with the block axis in it."""
    return min(ndim, max(2, -axis))


def _called(fmt: Any) -> str:
    name = getattr(fmt, "__name__", "")
    return f": did you mean {name}()?" if callable(fmt) and name else ""


def prepare(x: Any, fmt: Format, axis: int, what: str = "x") -> tuple[jax.Array, int]:
    """Check what is to be quantized; returns the array and the negative axis."""
    if isinstance(x, QuantizedArray):
        raise ValueError(f"{what}: is quantized already ({x!r}); dequantize it first")
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt: expected a Format such as nvfp4(), got {fmt!r}{_called(fmt)}")
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        # Not by float32's own rounding, which would round twice.
        x = x if jax.config.jax_enable_x64 else as_float32(x)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{what}: expected a floating-point array, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{what}: expected at least one axis, got a scalar")
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: {axis!r} is out of range for shape {x.shape}")
    return x, axis if axis < 0 else axis - x.ndim


def blocked(
    x: Any,
    fmt: Format,
    axis: int,
    tensor_scale: Any = None,
    importance: Any = None,
    on_nonfinite: str = "propagate",
    axis_name: Any = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Pad and split ``x``; returns float32 blocks, the tensor scale, the split importance."""
    check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
    at = x.ndim + axis
    nd = matrix_ndim(x.ndim, axis)
    batch = x.shape[: x.ndim - nd]
    x = as_float32(x)
    if on_nonfinite == "check":
        from jax.experimental import checkify

        checkify.check(jnp.all(jnp.isfinite(x)), "x: holds values that are not finite")
    elif on_nonfinite == "saturate":
        x = _saturated(x, nd)
    pad = padded_length(x.shape[at], fmt) - x.shape[at]
    widths = [(0, pad if i == at else 0) for i in range(x.ndim)]
    if importance is not None:
        if is_concrete(importance) and np.any(np.asarray(importance) < 0):
            raise ValueError("importance: holds negative weights")
        importance = jnp.asarray(importance, jnp.float32)
        try:
            importance = jnp.broadcast_to(importance, x.shape)
        except ValueError:
            raise ValueError(
                f"importance: shape {importance.shape} does not broadcast to {x.shape}"
            ) from None
        importance = split_blocks(jnp.pad(importance, widths) if pad else importance, axis, fmt)
    blocks = split_blocks(jnp.pad(x, widths) if pad else x, axis, fmt)
    if not fmt.has_tensor_scale:
        if tensor_scale is not None:
            raise ValueError(f"tensor_scale: format {fmt.name!r} has none")
        return blocks, None, importance
    if tensor_scale is None:
        tensor_scale = _dynamic_scale(x, blocks, fmt, axis, nd, axis_name)
    else:
        if is_concrete(tensor_scale) and not np.all(np.asarray(tensor_scale) > 0):
            raise ValueError(f"tensor_scale: must be positive, got {tensor_scale}")
        tensor_scale = jnp.asarray(tensor_scale, jnp.float32)
        try:
            tensor_scale = jnp.broadcast_to(tensor_scale, batch)
        except ValueError:
            raise ValueError(
                f"tensor_scale: shape {tensor_scale.shape} does not broadcast to the leading axes "
                f"{batch} of shape {x.shape}"
            ) from None
        if not fmt.nan_in_scale:
            finite = jnp.isfinite(x).all(axis=tuple(range(x.ndim - nd, x.ndim)))
            tensor_scale = jnp.where(finite, tensor_scale, jnp.nan)
    return blocks, tensor_scale, importance


def _saturated(x: jax.Array, nd: int) -> jax.Array:
    """NaN to zero, infinities to the largest finite magnitude of the matrix."""
    axes = tuple(range(x.ndim - nd, x.ndim))
    finite = jnp.isfinite(x)
    largest = jnp.max(jnp.where(finite, jnp.abs(x), 0.0), axis=axes, keepdims=True, initial=0.0)
    return jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, -largest, largest))


def _dynamic_scale(
    x: jax.Array, blocks: jax.Array, fmt: Format, axis: int, nd: int, axis_name: Any
) -> jax.Array:
    # By blocks, since their largest magnitudes are computed anyway; blocks that are not finite
    # must not take the rest of the matrix with them where a block scale can say NaN.
    largest = jnp.max(jnp.abs(blocks), axis=axis, initial=0.0)
    if fmt.nan_in_scale:
        largest = jnp.where(largest <= jnp.finfo(jnp.float32).max, largest, 0.0)
    else:
        largest = jnp.where(largest <= jnp.finfo(jnp.float32).max, largest, jnp.nan)
    amax = jnp.max(largest, axis=tuple(range(x.ndim - nd, x.ndim)), initial=0.0)
    if axis_name is not None:
        amax = jax.lax.pmax(amax, axis_name)
    return fmt.tensor_scale(amax)


# Compiled as a whole: the branches of formats that search would be compiled again at every call
# outside of jit. Inlined where there is a jit around.
@functools.partial(jax.jit, static_argnames=("fmt", "axis", "stored"), inline=True)
def _encode_blocks(
    blocks: jax.Array, tensor_scale: jax.Array | None, importance: jax.Array | None, *,
    fmt: Format, axis: int, stored: bool = False,
) -> Any:
    def encode(blocks: jax.Array, tensor_scale: Any, importance: Any) -> Any:
        return fmt.encode_blocks(blocks, tensor_scale, axis=axis, importance=importance)

    call = functools.partial(materialize, encode) if stored else encode
    return call(blocks, tensor_scale, importance)


def quantize_array(
    x: Any,
    fmt: Format,
    *,
    axis: int = -2,
    tensor_scale: Any = None,
    importance: Any = None,
    layout: str = "planar",
    on_nonfinite: str = "propagate",
    axis_name: Any = None,
) -> QuantizedArray:
    """Quantize one array.

    Args:
      x: floating-point array; weights ``[..., K, N]`` with the contraction axis ``-2``,
        activations ``[..., K]`` with ``axis=-1``. 16-bit floats widen exactly, float64 is
        rounded to odd at float32, so that its codes are rounded once.
      fmt: the format. Static.
      axis: the axis that is cut into blocks. Static.
      tensor_scale: for two-level and per-matrix formats, a scale to use instead of the one that
        follows from ``x`` (delayed or static scaling), broadcastable to the leading axes.
      importance: weights of the squared error, broadcastable to ``x`` (formats that search).
      layout: ``'planar'`` (kernels) or ``'stream'``. Static.
      on_nonfinite: ``'propagate'``: a block with NaN or infinity decodes to NaN, or its whole
        matrix where block scales have no NaN; ``'saturate'``: NaN counts as zero, infinity as
        the largest finite magnitude of the matrix; ``'check'``: ``jax.experimental.checkify``'s
        error (wrap the caller in ``checkify.checkify``). Static.
      axis_name: name of the mapped axis (``shard_map``, ``vmap``) over which ``x`` is one shard
        of the matrix: the tensor scale is then that of the whole.

    Raises:
      ValueError: not floating point, a scalar, quantized already, ``axis`` out of range, a
        ``tensor_scale`` or ``importance`` of the wrong shape or for a format without.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.quant import nvfp4, quantize_array
      >>> w = jax.random.normal(jax.random.key(0), (64, 8))
      >>> q = quantize_array(w, nvfp4())
      >>> q.shape, q.codes.shape, q.scales.shape, q.nbytes
      ((64, 8), (32, 8), (4, 8), 292)
      >>> bool(jnp.abs(q.dequantize() - w).max() < 0.5)
      True
    """
    check_choice("layout", layout, LAYOUTS)
    x, axis = prepare(x, fmt, axis)
    dtype = x.dtype
    length = x.shape[axis]
    blocks, g, importance = blocked(
        x, fmt, axis, tensor_scale, importance, on_nonfinite, axis_name
    )
    over = None if g is None else _over(g, blocks.ndim)
    # Along the axis that is contiguous in memory, codes must be stored before they are packed:
    # XLA's CPU compiler would compute each where the packing wants it, one by one.
    stored = axis == -1 and fmt.bits < 8
    out = _encode_blocks(blocks, over, importance, fmt=fmt, axis=axis, stored=stored)
    padded = padded_length(length, fmt)
    codes = out.codes.reshape(x.shape[: x.ndim + axis] + (padded,) + x.shape[x.ndim + axis + 1:])
    if fmt.bits < 8:
        codes = pack(codes, fmt.bits, axis=axis, layout=layout)
    squeeze = lambda a: None if a is None else jnp.squeeze(a, axis=axis)
    return QuantizedArray(
        codes.astype(jnp.uint8), squeeze(out.scales), g, squeeze(out.zero_point), None, None,
        fmt=fmt, axis=axis, pad=padded - length, layout=layout, dtype=dtype,
    )


def quantize_dequantize(
    x: Any, fmt: Format, *, axis: int = -1, tensor_scale: Any = None, importance: Any = None,
    on_nonfinite: str = "propagate", axis_name: Any = None,
) -> jax.Array:
    """``quantize_array(x, fmt, ...).dequantize()`` without packing: what activations go through.

    The values are the same bit for bit, in the shape and dtype of ``x``. Arguments and errors are
    those of :func:`quantize_array`; the default axis is the last.

    Example:
      >>> from fadex.quant import nvfp4, quantize_dequantize
      >>> quantize_dequantize(jnp.array([6.0, 2.9, -0.7, 0.0]), nvfp4(), tensor_scale=1.0).tolist()
      [6.0, 3.0, -0.5, 0.0]
    """
    x, axis = prepare(x, fmt, axis)
    blocks, g, importance = blocked(
        x, fmt, axis, tensor_scale, importance, on_nonfinite, axis_name
    )
    over = None if g is None else _over(g, blocks.ndim)
    out = _encode_blocks(blocks, over, importance, fmt=fmt, axis=axis)
    values = fmt.decode_blocks(out.codes, out.scales, out.zero_point)
    values = values if over is None else values * over
    at = x.ndim + axis
    values = values.reshape(x.shape[:at] + (-1,) + x.shape[at + 1:]) if x.size else x
    return jax.lax.slice_in_dim(values, 0, x.shape[at], axis=at).astype(x.dtype)
