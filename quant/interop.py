r"""To and from qwix's ``QArray``, by its fields alone: qwix is never imported.

A ``QArray`` stands for ``(qvalue - zero_point) * scale``, ``scale`` stretched over blocks, codes
one to an array element (4-bit ones in JAX's own 4-bit dtypes, a byte each in most memories). It has
one level of scales, so both of ours are multiplied; and no codes with a meaning of their own, so
RaZeR cannot be held.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.quant.elements import ELEMENTS
from fadex.quant.formats import SCALE_FLOATS, Format
from fadex.quant.packing import pack
from fadex.quant.qarray import QuantizedArray, padded_length
from fadex.quant.razer import RaZeR

__all__ = ["QArrayFields", "from_qwix", "to_qwix"]

_FLOAT_DTYPES = {"e2m1": "float4_e2m1fn", "e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_INT_DTYPES = {2: "int2", 4: "int4", 8: "int8"}


class QArrayFields(NamedTuple):
    """The fields of qwix's ``QArray``, by which ``QArray(**fields._asdict())`` makes one."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    qtype: Any


def to_qwix(q: QuantizedArray, cls: Any = None, *, scale_dtype: Any = jnp.float32) -> Any:
    """Unpack into the fields of qwix's ``QArray``.

    Args:
      q: a quantized array.
      cls: ``qwix.QArray`` or anything called with the same keywords; default
        :class:`QArrayFields`.
      scale_dtype: of the scale, which is also the dtype that a ``QArray`` dequantizes to; fewer
        bits than float32 round the product of both scales.

    Raises:
      ValueError: what a ``QArray`` cannot hold: RaZeR's special values, the half-integer grid of
        two bits, 6-bit floats, a last block that is not whole.

    Example:
      >>> from fadex.quant import from_qwix, int_group, quantize_array, to_qwix
      >>> fields = to_qwix(quantize_array(jnp.ones((64, 4)), int_group(8, 32)))
      >>> fields.qvalue.dtype, fields.scale.shape, from_qwix(fields).fmt.name
      (dtype('int8'), (2, 4), 'int8_g32_full')
    """
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"q: expected a QuantizedArray, got {q!r}")
    fmt, element = q.fmt, ELEMENTS[q.fmt.element]
    if isinstance(fmt, RaZeR):
        raise ValueError(f"q: {fmt.name} has special values, which a QArray cannot hold")
    if fmt.half_integers:
        raise ValueError(f"q: {fmt.name} has a half-integer grid, which a QArray cannot hold")
    if element.kind == "float" and element.name not in _FLOAT_DTYPES:
        raise ValueError(f"q: JAX has no dtype for {element.name}, so a QArray cannot hold it")
    if q.pad:
        raise ValueError(
            f"q: length {q.length} is no multiple of the block {fmt.block}; a QArray has whole "
            "blocks only"
        )
    codes = q.unpacked()
    zero = q.zero_point
    qtype: Any
    if element.kind == "float":
        qtype = jnp.dtype(_FLOAT_DTYPES[element.name])
        values = fmt.decode_values(codes).astype(qtype)
    elif element.kind == "table":
        qtype, values = "nf4", codes.astype(jnp.uint4)
    else:
        values = codes.astype(jnp.int32) - (0 if zero is None else 1 << (fmt.bits - 1))
        if zero is None:
            values = fmt.decode_values(codes).astype(jnp.int32)
        else:
            zero = zero.astype(jnp.int32) - (1 << (fmt.bits - 1))
        qtype = jnp.dtype(_INT_DTYPES.get(fmt.bits, "int8"))
        values = values.astype(qtype)
        zero = None if zero is None else zero.astype(qtype)
        qtype = qtype if fmt.bits in _INT_DTYPES else f"int{fmt.bits}"
    if q.scales is None:
        ones = [1] * q.ndim
        ones[: q.tensor_scale.ndim] = q.tensor_scale.shape
        scale = q.tensor_scale.reshape(ones)
    else:
        scale = fmt.scale_values(q.scales)
        if q.tensor_scale is not None:
            scale = scale * q.tensor_scale.reshape(
                q.tensor_scale.shape + (1,) * (q.ndim - q.tensor_scale.ndim)
            )
    make = QArrayFields if cls is None else cls
    return make(qvalue=values, scale=scale.astype(scale_dtype), zero_point=zero, qtype=qtype)


def _element_of(qvalue: jax.Array, qtype: Any) -> str:
    name = qtype if isinstance(qtype, str) else jnp.dtype(qtype).name
    for element, dtype in _FLOAT_DTYPES.items():
        if name == dtype or qvalue.dtype == jnp.dtype(dtype):
            return element
    if name == "nf4":
        return "nf4"
    if name in ELEMENTS and ELEMENTS[name].kind == "int":
        return name
    raise ValueError(f"qarray: qtype {qtype!r} has no format here")


def from_qwix(qarray: Any, *, axis: int | None = None, layout: str = "planar") -> QuantizedArray:
    """Pack anything with the fields ``qvalue, scale, zero_point, qtype``.

    Args:
      qarray: qwix's ``QArray``, :class:`QArrayFields` or alike, its arrays concrete or traced
        (``zero_point`` concrete).
      axis: the block axis; default: the one along which several values share a scale, ``-2``
        where that is not unique.
      layout: of the packed codes.

    Raises:
      TypeError: no such fields.
      ValueError: blocks along more than one axis (other than a scale shared by a whole axis), or
        of a size that is no multiple of 8; a qtype without a format here; zero points out of
        range.
    """
    missing = [n for n in ("qvalue", "scale") if not hasattr(qarray, n)]
    if missing:
        raise TypeError(f"qarray: expected the fields of qwix's QArray, missing {missing}")
    qvalue, scale = jnp.asarray(qarray.qvalue), jnp.asarray(qarray.scale)
    zero = getattr(qarray, "zero_point", None)
    qtype = getattr(qarray, "qtype", None)
    element = _element_of(qvalue, qvalue.dtype if qtype is None else qtype)
    if scale.ndim != qvalue.ndim:
        raise ValueError(f"qarray: scale of shape {scale.shape} for values of {qvalue.shape}")
    tiled = [i - qvalue.ndim for i, (n, s) in enumerate(zip(qvalue.shape, scale.shape))
             if 1 < s < n]
    shared = [i - qvalue.ndim for i, (n, s) in enumerate(zip(qvalue.shape, scale.shape)) if s < n]
    if axis is None:
        candidates = tiled or shared
        axis = candidates[0] if len(candidates) == 1 else -2
    if len(tiled) > 1 or (tiled and tiled[0] != axis):
        raise ValueError(
            f"qarray: blocks along axes {tiled}; only one axis, here {axis}, can be cut"
        )
    length, groups = qvalue.shape[axis], scale.shape[axis]
    if length % groups:
        raise ValueError(f"qarray: {groups} scales do not divide axis {axis} of length {length}")
    block = None if groups == 1 else length // groups
    if block is not None and block % 8:
        raise ValueError(f"qarray: blocks of {block}; expected a multiple of 8")
    kind = ELEMENTS[element].kind
    scale_dtype = scale.dtype.name if scale.dtype.name in SCALE_FLOATS else "float32"
    where = "channel" if block is None else f"g{block}"
    suffix = {"float32": "", "bfloat16": "_bf16", "float16": "_f16"}[scale_dtype]
    name = f"{element}_{where}" + ("" if zero is None else "_asym") + suffix
    full = kind == "int" and zero is None and element != "int2"
    if element == "int2" and zero is None:
        raise ValueError("qarray: int2 without zero point: two-bit formats here are half-integer")
    fmt = Format(name + ("_full" if full else ""), element, block, scale_dtype,
                 symmetric=zero is None, full_range=full)
    if kind == "float":
        codes = jax.lax.bitcast_convert_type(qvalue.astype(jnp.dtype(_FLOAT_DTYPES[element])),
                                             jnp.uint4 if element == "e2m1" else jnp.uint8)
        codes = codes.astype(jnp.uint8)
    elif kind == "table":
        codes = qvalue.astype(jnp.uint8)
    else:
        bits = fmt.bits
        integers = qvalue.astype(jnp.int32)
        if zero is not None:
            offset = 1 << (bits - 1)
            integers = integers + offset
            zero = np.asarray(zero).astype(np.int64) + offset
            if zero.min(initial=0) < 0 or zero.max(initial=0) > 255:
                raise ValueError("qarray: zero points outside of [0, 255] after the shift to "
                                 "unsigned codes")
        codes = (integers & ((1 << bits) - 1)).astype(jnp.uint8)
    shape = list(qvalue.shape)
    shape[axis] = groups
    stretch = lambda a: jnp.broadcast_to(jnp.asarray(a), shape)
    padded = padded_length(length, fmt)
    if padded != length:
        codes = jnp.pad(codes, [(0, padded - length if i - codes.ndim == axis else 0)
                                for i in range(codes.ndim)])
    return QuantizedArray(
        pack(codes, fmt.bits, axis=axis, layout=layout) if fmt.bits < 8 else codes,
        stretch(scale.astype(scale_dtype)), None,
        None if zero is None else stretch(jnp.asarray(zero.astype(np.uint8))),
        None, None, fmt=fmt, axis=axis, pad=padded - length, layout=layout, dtype=scale.dtype
        if jnp.issubdtype(scale.dtype, jnp.floating) and scale.dtype.itemsize >= 2
        else jnp.dtype(jnp.float32),
    )


