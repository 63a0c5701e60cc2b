r"""Element formats: what one code of 2 to 8 bits stands for, encoded and decoded bit for bit.

A minifloat code with exponent field :math:`e`, mantissa field :math:`m` of :math:`M` bits and
bias :math:`\beta` stands for

.. math:: v = \begin{cases} m\, 2^{1-\beta-M} & e = 0 \\ (1 + m\,2^{-M})\, 2^{e-\beta} & e > 0,
          \end{cases}

with the sign in the bit above. Encoding rounds to the nearest value, ties to the even mantissa,
and saturates at the largest finite value. The bodies below use 32-bit integer operations,
comparisons and one float32 addition (no table, no conversion), so the same functions run under
``jit``, eagerly, and inside Pallas kernels.

=======  ====  ======  ====  ===========  ==============  =====================================
name     bits  layout  bias  max finite   min subnormal   specials
=======  ====  ======  ====  ===========  ==============  =====================================
e2m1     4     1|2|1   1     6            0.5             none; 0x8 is -0
e2m3     6     1|2|3   1     7.5          0.125           none
e3m2     6     1|3|2   3     28           0.0625          none
e3m3     6     0|3|3   3     28           2^-5            unsigned; code 63 reserved
e4m3fn   8     1|4|3   7     448          2^-9            0x7F, 0xFF NaN
e5m2     8     1|5|2   15    57344        2^-16           infinities and NaN
e8m0     8     0|8|0   127   2^127        2^-127          0xFF NaN; unsigned, no zero
int2-8   2-8   two's complement, -2^(b-1) .. 2^(b-1)-1
nf4      4     table of 16 quantiles of the normal distribution, exact 0 at index 7
=======  ====  ======  ====  ===========  ==============  =====================================

Sources: the OCP specifications of 8-bit floating point and of microscaling formats; QLoRA for
NF4; e3m3 as RaZeR uses it for block scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice

__all__ = ["ELEMENTS", "Element", "decode_element", "element_levels", "encode_element"]

_INF_BITS = 0x7F800000

# QLoRA's quantiles, in the float32 digits they were published with.
NF4_LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)


@dataclasses.dataclass(frozen=True)
class Element:
    """Static description of an element format.

    Attributes:
      name: as in the table of the module.
      kind: ``'float'``, ``'int'`` or ``'table'``.
      bits: width of a code.
      exponent, mantissa, bias: of a minifloat.
      signed: whether the bit above the exponent is a sign.
      max: largest finite magnitude.
      tiny: smallest positive value.
      nan: magnitude code of NaN, or ``None``.
      inf: magnitude code of infinity, or ``None``.
    """

    name: str
    kind: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    signed: bool = True
    max: float = 0.0
    tiny: float = 0.0
    nan: int | None = None
    inf: int | None = None


def _float(name: str, e: int, m: int, bias: int, top: float, **kwargs: Any) -> Element:
    signed = kwargs.pop("signed", True)
    tiny = kwargs.pop("tiny", 2.0 ** (1 - bias - m))
    return Element(name, "float", e + m + signed, e, m, bias, signed, top, tiny, **kwargs)


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        _float("e2m1", 2, 1, 1, 6.0),
        _float("e2m3", 2, 3, 1, 7.5),
        _float("e3m2", 3, 2, 3, 28.0),
        _float("e3m3", 3, 3, 3, 28.0, signed=False),
        _float("e4m3fn", 4, 3, 7, 448.0, nan=0x7F),
        _float("e5m2", 5, 2, 15, 57344.0, nan=0x7E, inf=0x7C),
        _float("e8m0", 8, 0, 127, 2.0**127, signed=False, tiny=2.0**-127, nan=0xFF),
        *(Element(f"int{b}", "int", b, max=2.0 ** (b - 1) - 1, tiny=1.0) for b in range(2, 9)),
        Element("nf4", "table", 4, max=1.0, tiny=float(NF4_LEVELS[8])),
    )
}


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _round_to_odd(x: np.ndarray) -> np.ndarray:
    """float64 -> float32 so that a later rounding to fewer bits is as if there had been one."""
    with np.errstate(over="ignore", under="ignore"):
        y = x.astype(np.float32)
    finite = np.isfinite(x)
    away = finite & (np.abs(y.astype(np.float64)) > np.abs(x))
    bits = y.view(np.int32) - away  # towards zero: one step down in magnitude
    exact = bits.view(np.float32).astype(np.float64) == x
    return np.where(finite & ~exact, bits | 1, bits).astype(np.int32).view(np.float32)


def as_float32(x: Any) -> jax.Array:
    """``x`` in float32, from float64 so that a later rounding is as if there had been one."""
    if isinstance(x, (float, np.ndarray, np.float64)) and np.asarray(x).dtype == np.float64:
        # Not through float32's own rounding: -431.99999999999994 is -416 in e4m3, not -448.
        return jnp.asarray(_round_to_odd(np.asarray(x)))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"x: expected real numbers, got {x.dtype}")
        return x.astype(jnp.float32)
    if x.dtype == jnp.float64:
        y = x.astype(jnp.float32)
        away = jnp.isfinite(x) & (jnp.abs(y.astype(x.dtype)) > jnp.abs(x))
        bits = jax.lax.bitcast_convert_type(y, jnp.int32) - away.astype(jnp.int32)
        back = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(x.dtype)
        odd = jnp.where(jnp.isfinite(x) & (back != x), bits | 1, bits)
        return jax.lax.bitcast_convert_type(odd, jnp.float32)
    return x.astype(jnp.float32)


def encode_float(x: jax.Array, element: Element, *, saturate: bool = False) -> jax.Array:
    """Codes of float32 ``x`` in a minifloat, int32: the body that kernels share."""
    mantissa, bias = element.mantissa, element.bias
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    a = jnp.minimum(magnitude, _bits_of(element.max))
    shift = 23 - mantissa
    # A power of two has no mantissa to be even: e8m0 rounds ties up.
    even = (1 << (shift - 1)) - 1 + ((a >> shift) & 1) if mantissa else 1 << (shift - 1)
    normal = ((a + even) >> shift) - ((127 - bias) << mantissa)
    if element.exponent < 8:
        # Adding 2^23 quanta leaves the rounded count of quanta in the low bits of the sum.
        magic = 2.0 ** (24 - bias - mantissa)
        value = jax.lax.bitcast_convert_type(a, jnp.float32)
        low = jax.lax.bitcast_convert_type(value + magic, jnp.int32) - _bits_of(magic)
        normal = jnp.where(a < _bits_of(2.0 ** (1 - bias)), low, normal)
    else:
        # Subnormal float32: nearest of 2^-127 and 2^-126, the tie up as everywhere in e8m0.
        normal = jnp.where(a < 0x600000, 0, jnp.where(a < 0x800000, 1, normal))
    if not saturate:
        if element.inf is not None:
            normal = jnp.where(magnitude == _INF_BITS, element.inf, normal)
        elif element.nan is not None:
            normal = jnp.where(magnitude == _INF_BITS, element.nan, normal)
    if element.nan is not None:
        normal = jnp.where(magnitude > _INF_BITS, element.nan, normal)
    if element.signed:
        return normal | ((bits >> 31) & 1) << (element.bits - 1)
    if element.exponent == 8:  # no zero and no sign: neither has a value here
        return jnp.where((bits < 0) | (magnitude == 0), element.nan, normal)
    return jnp.where(bits < 0, 0, normal)


def decode_float(codes: jax.Array, element: Element) -> jax.Array:
    """Values of int32 ``codes`` of a minifloat, float32: the body that kernels share."""
    mantissa, bias = element.mantissa, element.bias
    magnitude = codes & ((1 << (element.bits - element.signed)) - 1)
    bits = (magnitude << (23 - mantissa)) + ((127 - bias) << 23)
    if element.exponent < 8:
        quantum = 2.0 ** (1 - bias - mantissa)
        low = magnitude.astype(jnp.float32) * quantum
        value = jnp.where(
            magnitude < (1 << mantissa), low, jax.lax.bitcast_convert_type(bits, jnp.float32)
        )
        bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    else:
        bits = jnp.where(magnitude == 0, _bits_of(2.0**-127), bits)
    if element.nan is not None:
        if element.inf is not None:
            bits = jnp.where(magnitude == element.inf, _INF_BITS, bits)
            bits = jnp.where(magnitude > element.inf, 0x7FC00000, bits)
        else:
            bits = jnp.where(magnitude == element.nan, 0x7FC00000, bits)
    if element.signed:
        bits = bits | ((codes >> (element.bits - 1)) & 1) << 31
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def round_e2m1(a: jax.Array) -> jax.Array:
    """Nearest e2m1 value of ``a >= 0``, ties to even: adding and taking away ``2^23`` quanta
    rounds to one."""
    magic = jnp.where(a < 2, 0.5, jnp.where(a < 4, 1.0, 2.0)) * jnp.float32(2.0**23)
    return jnp.minimum((a + magic) - magic, 6.0)


def encode_int(x: jax.Array, bits: int, low: int | None = None) -> jax.Array:
    """Nearest integers (ties to even), clipped to the width, as two's complement in int32."""
    low = -(1 << (bits - 1)) if low is None else low
    rounded = jnp.clip(jnp.round(x), low, (1 << (bits - 1)) - 1)
    return jnp.where(jnp.isnan(x), 0, rounded).astype(jnp.int32) & ((1 << bits) - 1)


def decode_int(codes: jax.Array, bits: int) -> jax.Array:
    """Sign-extend two's complement codes; float32."""
    return ((codes << (32 - bits)) >> (32 - bits)).astype(jnp.float32)


def _midpoints(levels: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    wide = levels.astype(np.float64)
    exact = (wide[1:] + wide[:-1]) / 2
    if dtype == np.float64:
        return exact
    near = exact.astype(np.float32)
    # x > midpoint holds for float32 x exactly when x > the largest float32 not above it.
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def encode_table(x: jax.Array, levels: np.ndarray) -> jax.Array:
    """Index of the nearest of sorted ``levels``, ties to the lower one; int32."""
    code = 0
    for middle in _midpoints(levels, x.dtype):
        code = code + (x > middle).astype(np.int32)
    return code


def decode_table(codes: jax.Array, levels: np.ndarray) -> jax.Array:
    """``levels[codes]`` by a tree of selections: no gather, which kernels and SIMD lack."""
    values: list[Any] = [np.float32(v) for v in levels]
    bit = 0
    while len(values) > 1:
        odd = (codes >> bit) & 1 == 1
        values = [jnp.where(odd, b, a) for a, b in zip(values[::2], values[1::2])]
        bit += 1
    return jnp.broadcast_to(values[0], codes.shape).astype(jnp.float32)


def encode_element(x: Any, name: str, *, on_nonfinite: str = "propagate") -> jax.Array:
    """Codes of real numbers in an element format.

    Args:
      x: real array of any shape. 16-bit floats widen exactly; float64 is rounded once, from
        all its digits.
      name: an element format of the module's table.
      on_nonfinite: ``'propagate'``: NaN stays NaN and infinity becomes infinity, or NaN where
        the format has no infinity; ``'saturate'``: infinity becomes the largest finite value,
        and NaN stays NaN where the format has one. Formats without NaN (e2m1, e2m3, e3m2, e3m3)
        give the largest magnitude for either, integers 0 for NaN, NF4 its lowest level for NaN:
        block formats keep what was lost in their scales.

    Returns:
      uint8, the shape of ``x``, the code in the low bits. Unsigned e3m3 takes negative numbers
      to 0; e8m0 takes them, and zero, to NaN.

    Raises:
      ValueError: unknown ``name`` or ``on_nonfinite``.
      TypeError: complex ``x``.

    Example:
      >>> encode_element([0.25, 0.75, 2.4, -7.0], 'e2m1').tolist()
      [0, 2, 4, 15]
      >>> encode_element([1.0, -2.0, 99.0], 'int4').tolist()
      [1, 14, 7]
    """
    check_choice("name", name, tuple(ELEMENTS))
    check_choice("on_nonfinite", on_nonfinite, ("propagate", "saturate"))
    element = ELEMENTS[name]
    x = np.asarray(x) if isinstance(x, (list, tuple, float)) else x
    if element.kind == "table" and getattr(x, "dtype", None) == np.float64:
        # Midpoints of float32 levels need one digit more: compared as they are.
        return jnp.asarray(encode_table(x, NF4_LEVELS), jnp.uint8)
    x = as_float32(x)
    if element.kind == "int":
        codes = encode_int(x, element.bits)
    elif element.kind == "table":
        codes = encode_table(x, NF4_LEVELS)
    else:
        codes = encode_float(x, element, saturate=on_nonfinite == "saturate")
    return codes.astype(jnp.uint8)


def decode_element(codes: Any, name: str) -> jax.Array:
    """Values of codes in an element format, float32 of the same shape.

    Args:
      codes: integer array; bits above the width of the format are ignored.
      name: an element format of the module's table.

    Raises:
      ValueError: unknown ``name``.
      TypeError: ``codes`` are not integers.

    Example:
      >>> decode_element(encode_element([0.3, -1.4, 5.1], 'e2m1'), 'e2m1').tolist()
      [0.5, -1.5, 6.0]
    """
    check_choice("name", name, tuple(ELEMENTS))
    codes = jnp.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"codes: expected integers, got {codes.dtype}")
    element = ELEMENTS[name]
    codes = codes.astype(jnp.int32)
    if element.kind == "int":
        return decode_int(codes, element.bits)
    if element.kind == "table":
        return decode_table(codes & 15, NF4_LEVELS)
    return decode_float(codes, element)


def element_levels(name: str) -> np.ndarray:
    """The distinct finite values of an element format, ascending, float32.

    Example:
      >>> element_levels('e2m1')[7:].tolist()
      [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    check_choice("name", name, tuple(ELEMENTS))
    element = ELEMENTS[name]
    if element.kind == "table":
        return NF4_LEVELS.copy()
    if element.kind == "int":
        return np.arange(-(1 << (element.bits - 1)), 1 << (element.bits - 1), dtype=np.float32)
    magnitude = np.arange(1 << (element.bits - element.signed))
    e, m = magnitude >> element.mantissa, magnitude & ((1 << element.mantissa) - 1)
    scale = 2.0**-element.mantissa
    if element.exponent < 8:
        values = np.where(
            e == 0, m * scale * 2.0 ** (1 - element.bias),
            (1 + m * scale) * 2.0 ** (e - float(element.bias)),
        )
    else:
        values = 2.0 ** (e - float(element.bias))
    values = values[values <= element.max]
    return np.unique(np.concatenate([-values, values]) if element.signed else values).astype(
        np.float32
    )
