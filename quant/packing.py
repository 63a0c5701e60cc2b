r"""Codes of 1 to 16 bits in bytes, at the exact rate, along any axis.

Two layouts, both uint8 and both a permutation of the same bits:

``'stream'`` (files): one little-endian bit stream along the axis; code :math:`i` of :math:`b`
bits lies at bits :math:`ib \dots ib+b-1`. At 4 bits: byte :math:`j` holds code :math:`2j` low and
:math:`2j+1` high (*interleaved* nibbles); at 6 bits four codes fill three bytes.

``'planar'`` (kernels): each tile of :math:`t` codes is stored plane by plane, the width split into
powers of two (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1, 9..16 = 8+rest; low bits in the first, widest
plane). A plane of width :math:`w` puts code :math:`i` of the tile into byte
:math:`i \bmod (tw/8)` at bit :math:`w \lfloor i / (tw/8) \rfloor`. At 4 bits: byte :math:`r` holds
code :math:`r` low and code :math:`r + t/2` high (*split* nibbles), so unpacking is two contiguous
halves with no shuffle between lanes. Where the length is no multiple of :math:`t`, the last tile
is as short as it is.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fadex.core.checks import check_choice, check_int

__all__ = ["pack", "packed_length", "repack", "unpack"]

LAYOUTS = ("stream", "planar")
TILE = 128


def pack_unit(bits: int) -> int:
    """Codes that fill whole bytes together: lengths that are multiples of it waste no bit."""
    return 8 // math.gcd(bits, 8)


def planes(bits: int) -> tuple[int, ...]:
    """Power-of-two widths that add up to ``bits``, widest first."""
    return tuple(w for w in (8, 4, 2, 1) for _ in range(2 if (w, bits) == (8, 16) else 1)
                 if bits & w or (w, bits) == (8, 16))


def packed_length(length: int, bits: int, layout: str = "stream") -> int:
    """Bytes that ``length`` codes take along the axis.

    ``'stream'`` takes ``ceil(length * bits / 8)``; ``'planar'`` rounds ``length`` up to a multiple
    of ``8 / gcd(bits, 8)`` first.

    Example:
      >>> packed_length(128, 3), packed_length(5, 4), packed_length(5, 3, 'planar')
      (48, 3, 3)
    """
    if layout == "planar":
        length += -length % pack_unit(bits)
    return -(-length * bits // 8)


def _check(bits: int, layout: str, tile: int) -> None:
    if not 1 <= check_int("bits", bits) <= 16:
        raise ValueError(f"bits: must lie in [1, 16], got {bits}")
    check_choice("layout", layout, LAYOUTS)
    if check_int("tile", tile, minimum=8) % 8:
        raise ValueError(f"tile: must be a multiple of 8, got {tile}")


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: {axis} is out of range for {ndim} dimensions")
    return axis % ndim


def _resize(x: jax.Array, axis: int, size: int) -> jax.Array:
    have = x.shape[axis]
    if have == size:
        return x
    if have > size:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, size - have if i == axis else 0) for i in range(x.ndim)])


def _split(x: jax.Array, axis: int, *sizes: int) -> jax.Array:
    return x.reshape(x.shape[:axis] + sizes + x.shape[axis + 1:])


def _take(x: jax.Array, axis: int, i: int) -> jax.Array:
    return jax.lax.index_in_dim(x, i, axis=axis, keepdims=False)


def _code_dtype(bits: int) -> Any:
    return jnp.uint8 if bits <= 8 else jnp.uint16


def _join(x: jax.Array, axis: int) -> jax.Array:
    return x.reshape(x.shape[:axis] + (x.shape[axis] * x.shape[axis + 1],) + x.shape[axis + 2:])


def _stream(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    length, unit = codes.shape[axis], pack_unit(bits)
    codes = _resize(codes, axis, length + -length % unit).astype(jnp.uint16)
    codes = _split(codes, axis, codes.shape[axis] // unit, unit)
    out = []
    for j in range(bits * unit // 8):
        byte = None
        for i in range(unit):
            offset = i * bits - 8 * j  # of the code's lowest bit within this byte
            if -bits < offset < 8:
                code = _take(codes, axis + 1, i)
                part = code << offset if offset >= 0 else code >> -offset
                byte = part if byte is None else byte | part
        out.append(byte.astype(jnp.uint8))
    packed = _join(jnp.stack(out, axis=axis + 1), axis)
    return _resize(packed, axis, packed_length(length, bits))


def _unstream(packed: jax.Array, bits: int, axis: int, length: int) -> jax.Array:
    unit = pack_unit(bits)
    size = bits * unit // 8
    packed = _resize(packed, axis, -(-length // unit) * size)
    packed = _split(packed, axis, packed.shape[axis] // size, size)
    out = []
    for i in range(unit):
        code = None
        for j in range(size):
            offset = i * bits - 8 * j
            if -bits < offset < 8:
                byte = _take(packed, axis + 1, j).astype(jnp.uint16)
                part = byte >> offset if offset >= 0 else byte << -offset
                code = part if code is None else code | part
        out.append((code & ((1 << bits) - 1)).astype(_code_dtype(bits)))
    return _resize(_join(jnp.stack(out, axis=axis + 1), axis), axis, length)


def pack_tiles(codes: jax.Array, bits: int, axis: int) -> jax.Array:
    """Planar bytes of whole tiles: ``axis`` holds one tile of codes, then one of bytes."""
    tile = codes.shape[axis]
    if bits == 8:
        return codes.astype(jnp.uint8)
    out, shift = [], 0
    for width in planes(bits):
        rows = tile * width // 8
        plane = codes >> shift if shift else codes
        if shift + width < bits or bits > 8:
            plane = plane & ((1 << width) - 1)
        plane = plane.astype(jnp.uint8)
        byte = None
        for k in range(8 // width):
            part = jax.lax.slice_in_dim(plane, k * rows, (k + 1) * rows, axis=axis)
            part = part << (width * k) if k else part
            byte = part if byte is None else byte | part
        out.append(byte)
        shift += width
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=axis)


def unpack_tiles(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Inverse of :func:`pack_tiles`."""
    if bits == 8:
        return packed
    tile = packed.shape[axis] * 8 // bits
    start, shift, code = 0, 0, None
    for width in planes(bits):
        rows = tile * width // 8
        plane = jax.lax.slice_in_dim(packed, start, start + rows, axis=axis)
        parts = []
        for k in range(8 // width):
            part = plane >> (width * k) if k else plane
            parts.append(part & ((1 << width) - 1) if k + 1 < 8 // width else part)
        plane = jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]
        plane = plane.astype(_code_dtype(bits))
        plane = plane << shift if shift else plane
        code = plane if code is None else code | plane
        start, shift = start + rows, shift + width
    return code


def _planar(codes: jax.Array, bits: int, axis: int, tile: int) -> jax.Array:
    length = codes.shape[axis] + -codes.shape[axis] % pack_unit(bits)
    codes = _resize(codes, axis, length)
    whole = length - length % tile
    parts = []
    if whole:
        body = _split(jax.lax.slice_in_dim(codes, 0, whole, axis=axis), axis, whole // tile, tile)
        parts.append(_join(pack_tiles(body, bits, axis + 1), axis))
    if whole < length:
        parts.append(pack_tiles(jax.lax.slice_in_dim(codes, whole, length, axis=axis), bits, axis))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _unplanar(packed: jax.Array, bits: int, axis: int, length: int, tile: int) -> jax.Array:
    padded = length + -length % pack_unit(bits)
    whole = padded - padded % tile
    cut, size = whole * bits // 8, tile * bits // 8
    parts = []
    if whole:
        body = _split(jax.lax.slice_in_dim(packed, 0, cut, axis=axis), axis, whole // tile, size)
        parts.append(_join(unpack_tiles(body, bits, axis + 1), axis))
    if whole < padded:
        tail = jax.lax.slice_in_dim(packed, cut, padded * bits // 8, axis=axis)
        parts.append(unpack_tiles(tail, bits, axis))
    codes = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
    return _resize(codes, axis, length)


def pack(
    codes: Any, bits: int, *, axis: int = -1, layout: str = "stream", tile: int = TILE
) -> jax.Array:
    """Pack codes along ``axis`` into bytes.

    Args:
      codes: unsigned integers below ``2^bits``, any shape.
      bits: 1 to 16.
      axis: the axis to pack.
      layout: ``'stream'`` or ``'planar'`` (see the module).
      tile: codes of a planar tile, a multiple of 8; pass the same to :func:`unpack`.

    Returns:
      uint8; ``axis`` has ``packed_length(n, bits, layout)`` bytes.

    Raises:
      ValueError: ``bits``, ``layout``, ``tile`` or ``axis`` out of range.
      TypeError: ``codes`` are not integers.

    Example:
      >>> pack(jnp.arange(4), 4).tolist(), pack(jnp.arange(4), 4, layout='planar').tolist()
      ([16, 50], [32, 49])
    """
    _check(bits, layout, tile)
    codes = jnp.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"codes: expected integers, got {codes.dtype}")
    axis = _axis(axis, codes.ndim)
    if codes.shape[axis] == 0:
        return codes.astype(jnp.uint8)
    if layout == "stream":
        return _stream(codes, bits, axis)
    return _planar(codes, bits, axis, tile)


def unpack(
    packed: Any, bits: int, *, length: int, axis: int = -1, layout: str = "stream",
    tile: int = TILE,
) -> jax.Array:
    """Inverse of :func:`pack`: ``length`` codes along ``axis``, uint8 (uint16 above 8 bits).

    Raises:
      ValueError: an argument out of range, or ``axis`` does not hold the bytes that ``length``
        codes take.

    Example:
      >>> unpack(pack(jnp.arange(8), 3), 3, length=8).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _check(bits, layout, tile)
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed: expected uint8, got {packed.dtype}")
    axis = _axis(axis, packed.ndim)
    want = packed_length(check_int("length", length, minimum=0), bits, layout)
    if packed.shape[axis] != want:
        raise ValueError(
            f"length: {length} codes of {bits} bits take {want} bytes in layout {layout!r}, "
            f"the axis has {packed.shape[axis]}"
        )
    if length == 0:
        return packed.astype(_code_dtype(bits))
    if layout == "stream":
        return _unstream(packed, bits, axis, length)
    return _unplanar(packed, bits, axis, length, tile)


def repack(
    packed: Any, bits: int, *, length: int, to: str, axis: int = -1, layout: str,
    tile: int = TILE,
) -> jax.Array:
    """Move packed codes from ``layout`` to the layout ``to``: a permutation of their bits.

    Example:
      >>> repack(pack(jnp.arange(4), 4), 4, length=4, layout='stream', to='planar').tolist()
      [32, 49]
    """
    kwargs = dict(axis=axis, tile=tile)
    codes = unpack(packed, bits, length=length, layout=layout, **kwargs)
    return pack(codes, bits, layout=to, **kwargs)
