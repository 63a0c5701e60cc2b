r"""RaZeR: NVFP4 whose redundant code for negative zero stands for a special value of the block.

e2m1 has two zeros, and the block scale, always positive, has unused bits. RaZeR spends both: code
``0b1000`` decodes to a value :math:`v` (in units of the block scale) that the spare bits of the
scale byte select:

* :func:`razer_e4m3`: bit 7 of the e4m3fn scale chooses :math:`v \in \{+5, -5\}` (activations);
* :func:`razer_e3m3`: bits 5..0 are an unsigned e3m3 scale, bits 7..6 choose
  :math:`v \in \{+5, -5, +w, -w\}`, :math:`w = 8` (weights, which bear the shorter scale).

Both take the bytes of NVFP4. With :math:`g = \max|x| / (6 S)`, :math:`S` the largest scale, a block
with largest magnitude :math:`m` tries every :math:`v`:

.. math:: s_v = \operatorname{round}\!\Big(\frac{m}{\max(6, |v|)\, g}\Big), \qquad
          z_j = \frac{x_j}{s_v g}, \qquad
          E_v = s_v^2 \sum_j w_j \min\big(|z_j - \operatorname{e2m1}(z_j)|, |z_j - v|\big)^2,

and keeps the least error, the first on a tie; a value goes to :math:`v` only where that is strictly
closer. Since :math:`v = \pm 5` has NVFP4's scale and one value more, no block gets worse than
NVFP4's with the same scale format; and since :math:`6 \cdot 448 = 16 \cdot 6 \cdot 28` and both
scales have three mantissa bits, the e3m3 scale equals the e4m3 one, bit for bit, in every block
with :math:`m \ge \max|x| / 112`.

Source: RaZeR (arXiv 2501.04052): formats, candidates and rescaling. The order of the selectors, the
decomposition of :func:`to_two_pass` and the calibration objective are ours; its published code
picks the sign of an activation's special value by a comparison in the wrong units, which is not
followed here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_real
from fadex.quant.elements import (
    ELEMENTS,
    decode_float,
    element_levels,
    encode_float,
    round_e2m1,
)
from fadex.quant.formats import Blocks, Format, block_sum, divide, hold, materialize, plain
from fadex.quant.packing import pack
from fadex.quant.qarray import QuantizedArray, blocked, prepare, quantize_array

__all__ = [
    "RaZeR",
    "quantize_razer",
    "razer_e3m3",
    "razer_e4m3",
    "razer_scales",
    "razer_selector",
    "special_value_errors",
    "to_two_pass",
]

_SPECIAL_CODE = 8
_E2M1 = ELEMENTS["e2m1"]
_MAGNITUDES = tuple(float(v) for v in element_levels("e2m1") if v >= 0)


@dataclasses.dataclass(frozen=True)
class RaZeR(Format):
    """The formats of :func:`razer_e4m3` and :func:`razer_e3m3`.

    ``magnitudes`` are those of the special values; the selector sits above the scale's bits.
    """

    magnitudes: tuple[float, ...] = (5.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "magnitudes", tuple(float(m) for m in self.magnitudes))
        super().__post_init__()
        if not isinstance(self.block, int):
            raise ValueError(f"block: a special value belongs to a block, got {self.block!r}")

    @property
    def specials(self) -> tuple[float, ...]:
        """Special values by selector: ``(+v, -v)`` for each magnitude."""
        return tuple(sign * m for m in self.magnitudes for sign in (1, -1))

    @property
    def scale_shift(self) -> int:
        """Bits of the scale below the selector."""
        return 7 if self.scale == "e4m3fn" else 6

    def scale_values(self, scales: jax.Array) -> jax.Array:
        bits = scales.astype(jnp.int32) & ((1 << self.scale_shift) - 1)
        return decode_float(bits, ELEMENTS[self.scale])

    def special_values(self, scales: jax.Array) -> jax.Array:
        """The special value that each scale byte selects, float32."""
        selector = scales.astype(jnp.int32) >> self.scale_shift
        value = jnp.full(scales.shape, self.specials[0], jnp.float32)
        for i, special in enumerate(self.specials[1:], 1):
            value = jnp.where(selector == i, jnp.float32(special), value)
        return value

    def decode_blocks(
        self, codes: jax.Array, scales: jax.Array | None, zero_point: jax.Array | None = None
    ) -> jax.Array:
        del zero_point
        codes = codes.astype(jnp.int32)
        special = jnp.broadcast_to(self.special_values(scales), codes.shape)
        values = jnp.where(codes == _SPECIAL_CODE, special, decode_float(codes, _E2M1))
        return values * self.scale_values(scales)

    def encode_blocks(
        self, x: jax.Array, tensor_scale: jax.Array | None, *, axis: int,
        importance: jax.Array | None = None, hold: Any = hold,
    ) -> Blocks:
        store = materialize if hold is not plain else lambda fn, *args: fn(*args)
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
        bad = ~(largest <= jnp.finfo(jnp.float32).max)
        largest = jnp.where(bad, 0.0, largest)

        def scales(largest: jax.Array, tensor_scale: jax.Array) -> Any:
            return [self._magnitude_scale(m, largest, tensor_scale, hold) for m in self.magnitudes]

        candidates = store(scales, largest, tensor_scale)
        signed = [
            store(
                functools.partial(_signed_error, magnitude=m, axis=axis, hold=hold),
                x, divisor, importance,
            ) * scale * scale
            for m, (_, scale, divisor) in zip(self.magnitudes, candidates)
        ]

        def choose(tensor_scale: jax.Array, candidates: Any, signed: list[jax.Array]) -> Any:
            best = None
            for i, ((stored, _, _), error) in enumerate(zip(candidates, signed)):
                negative = jax.lax.bitcast_convert_type(error, jnp.int32) < 0
                stored = stored | (2 * i + negative.astype(jnp.int32)) << self.scale_shift
                error = jnp.abs(error)
                better = None if best is None else error < best[0]
                best = (error, stored) if best is None else (
                    jnp.where(better, error, best[0]), jnp.where(better, stored, best[1])
                )
            stored = best[1]
            return stored, self.scale_values(stored) * tensor_scale, self.special_values(stored)

        stored, divisor, special = store(choose, tensor_scale, candidates, signed)
        z = divide(x, divisor, hold)
        codes = encode_float(z, _E2M1, saturate=True)
        # The code of negative zero is taken: zeros of either sign are code 0.
        codes = jnp.where(codes == _SPECIAL_CODE, 0, codes)
        a = jnp.abs(z)
        closer = jnp.abs(z - special) < jnp.abs(a - round_e2m1(a))
        codes = jnp.where(closer, _SPECIAL_CODE, codes)
        return Blocks(codes, self.finish_scales(stored, bad))

    def _magnitude_scale(
        self, magnitude: float, largest: jax.Array, tensor_scale: jax.Array, hold: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A block's scale for one special magnitude: stored, its value, times the tensor's."""
        unit = hold(max(6.0, magnitude)) * tensor_scale
        stored = self._encode_scale(divide(hold(largest), unit, hold))
        scale = self.scale_values(stored)
        return stored, scale, hold(scale * tensor_scale)


def _signed_error(
    x: jax.Array, divisor: jax.Array, importance: jax.Array | None, *, magnitude: float,
    axis: int, hold: Any,
) -> jax.Array:
    """Least squared error, in units of the block scale, over ``+v`` and ``-v``, that negative.

    In those units squares neither overflow nor vanish. One array holds both results, since XLA's
    CPU compiler would make a pass over ``x`` for each of two.
    """
    def squares(x: jax.Array, divisor: jax.Array, importance: jax.Array | None) -> Any:
        # A special value is never the nearest to a value of the other sign.
        a = jnp.abs(x / divisor)
        miss = jnp.abs(a - round_e2m1(a))
        near = jnp.minimum(miss, jnp.abs(a - magnitude))
        both = jnp.where(x < 0, miss, near), jnp.where(x < 0, near, miss)
        return tuple(m * m if importance is None else importance * (m * m) for m in both)

    plus, minus = block_sum(
        squares, x, divisor, importance, axis=axis, unroll=hold is not plain
    )
    return jnp.where(minus < plus, -minus, plus)


def _check_special(name: str, value: float) -> float:
    value = check_real(name, value, minimum=0, maximum=12)
    if value == 0 or value * 2 != int(value * 2):
        raise ValueError(f"{name}: must be a positive multiple of 0.5 up to 12, got {value}")
    if value in _MAGNITUDES:
        raise ValueError(
            f"{name}: {value} is an e2m1 magnitude already, so its code would be wasted"
        )
    return value


def _label(base: str, *parts: tuple[str, float, float]) -> str:
    return base + "".join(f"_{n}{v}" if v is None else f"_{n}{v:g}"
                          for n, v, default in parts if v != default)


def razer_e4m3(v: float = 5.0, *, block: int = 16) -> RaZeR:
    """RaZeR with an e4m3fn scale, whose sign bit selects ``+v`` or ``-v``: 4.5 bits per weight.

    Args:
      v: special magnitude in units of the block scale, a multiple of 0.5 in (0, 12] that is no
        e2m1 magnitude.
      block: values that share a scale.

    Raises:
      ValueError: ``v`` is out of range, no multiple of 0.5, or an e2m1 magnitude.

    Example:
      >>> razer_e4m3().specials, razer_e4m3().bits_per_weight()
      ((5.0, -5.0), 4.5)
    """
    v = _check_special("v", v)
    name = _label("razer_e4m3", ("v", v, 5.0), ("g", block, 16))
    return RaZeR(name, "e2m1", block, "e4m3fn", two_level=True, magnitudes=(v,))


def razer_e3m3(w: float = 8.0, v: float = 5.0, *, block: int = 16) -> RaZeR:
    """RaZeR with an unsigned e3m3 scale; two bits select ``+v, -v, +w`` or ``-w``.

    4.5 bits per weight. ``w=8`` is the paper's default; ``w=7`` has the smaller squared error on
    most tensors. See :func:`calibrate_special_values`.

    Args:
      w, v: special magnitudes in units of the block scale, as in :func:`razer_e4m3`.
      block: values that share a scale.

    Raises:
      ValueError: a magnitude as in :func:`razer_e4m3`, or ``v == w``.

    Example:
      >>> razer_e3m3().specials, razer_e3m3(7).name
      ((5.0, -5.0, 8.0, -8.0), 'razer_e3m3_w7')
    """
    v, w = _check_special("v", v), _check_special("w", w)
    if v == w:
        raise ValueError(f"w: equals v ({v}), so half of the selectors would be wasted")
    name = _label("razer_e3m3", ("w", w, 8.0), ("v", v, 5.0), ("g", block, 16))
    return RaZeR(name, "e2m1", block, "e3m3", two_level=True, magnitudes=(v, w))


def _check_razer(name: str, q: Any) -> RaZeR:
    if not isinstance(q, QuantizedArray) or not isinstance(q.fmt, RaZeR):
        raise TypeError(f"{name}: expected a QuantizedArray in a RaZeR format, got {q!r}")
    return q.fmt


def quantize_razer(
    x: Any, fmt: RaZeR, *, axis: int = -2, tensor_scale: Any = None, importance: Any = None,
    **kwargs: Any,
) -> QuantizedArray:
    """:func:`quantize_array` for a RaZeR format; ``importance`` weighs the squared errors by which
    a block chooses its special value.

    Raises:
      TypeError: ``fmt`` is no RaZeR format.

    Example:
      >>> x = jnp.array([[6.0, 5.0, -1.0, 0.5] * 4]).T
      >>> q = quantize_razer(x, razer_e4m3(), tensor_scale=1.0)
      >>> q.dequantize()[:4, 0].tolist(), razer_selector(q).tolist()
      ([6.0, 5.0, -1.0, 0.5], [[0]])
    """
    if not isinstance(fmt, RaZeR):
        raise TypeError(f"fmt: expected razer_e4m3() or razer_e3m3(), got {fmt!r}")
    return quantize_array(
        x, fmt, axis=axis, tensor_scale=tensor_scale, importance=importance, **kwargs
    )


def razer_selector(q: QuantizedArray) -> jax.Array:
    """Index into ``q.fmt.specials`` for each block, uint8, the shape of ``q.scales``."""
    fmt = _check_razer("q", q)
    return q.scales >> fmt.scale_shift


def razer_scales(q: QuantizedArray) -> jax.Array:
    """Block scales without their selectors, as bit patterns (e4m3fn or e3m3), uint8."""
    fmt = _check_razer("q", q)
    return q.scales & ((1 << fmt.scale_shift) - 1)


def special_parts(value: float) -> tuple[float, float]:
    """Two e2m1 magnitudes that add up to ``value``, the larger first."""
    for high in reversed(_MAGNITUDES):
        for low in _MAGNITUDES:
            if low <= high and high + low == value:
                return high, low
    raise ValueError(f"special value {value} is no sum of two e2m1 magnitudes")


def to_two_pass(q: QuantizedArray) -> tuple[QuantizedArray, QuantizedArray]:
    """Write a RaZeR array as the sum of two NVFP4 arrays, for hardware that multiplies those.

    Special values split into e2m1 magnitudes (5 = 4 + 1, 7 = 6 + 1, 8 = 6 + 2), so
    ``dequantize(q) = D1 + D2`` and ``x @ W = x @ D1 + x @ D2``; both share the scales, and ``D2``
    is zero except where a special value stands.

    Raises:
      TypeError: ``q`` is no RaZeR array.
      ValueError: a special value is no such sum (8.5, 9.5, 11 and 11.5 are not).

    Example:
      >>> x = jnp.array([[6.0, 5.0, -1.0, 0.5] * 4]).T
      >>> d1, d2 = to_two_pass(quantize_razer(x, razer_e4m3(), tensor_scale=1.0))
      >>> d1.dequantize()[:4, 0].tolist(), d2.dequantize()[:4, 0].tolist()
      ([6.0, 4.0, -1.0, 0.5], [0.0, 1.0, 0.0, 0.0])
    """
    fmt = _check_razer("q", q)
    first, second = [], []
    for special in fmt.specials:
        sign = _SPECIAL_CODE if special < 0 else 0
        high, low = special_parts(abs(special))
        first.append(_MAGNITUDES.index(high) | sign)
        second.append(_MAGNITUDES.index(low) | sign)
    codes = q.unpacked()
    selector = jnp.repeat(razer_selector(q), fmt.block, axis=q.axis)
    special = codes == _SPECIAL_CODE
    name = "nvfp4" if fmt.scale == "e4m3fn" else "nvfp4_e3m3"
    plain = Format(name, "e2m1", fmt.block, fmt.scale, two_level=True)

    def half(table: list[int], elsewhere: Any) -> QuantizedArray:
        chosen = jnp.asarray(np.array(table, np.uint8))[selector]
        packed = pack(jnp.where(special, chosen, elsewhere), 4, axis=q.axis, layout=q.layout)
        return dataclasses.replace(q, codes=packed, scales=razer_scales(q), fmt=plain)

    return half(first, codes), half(second, jnp.uint8(0))


def special_value_errors(
    x: Any, fmt: RaZeR, values: tuple[float, ...], *, axis: int = -2, importance: Any = None
) -> jax.Array:
    """Least squared error of every block with each of ``values`` as its special magnitude.

    ``errors[i]`` is :math:`\\min(E_{+v_i}, E_{-v_i})` per block (the shape of the scales), in the
    units of ``x``; the error of a format with several magnitudes is the minimum over theirs. What
    :func:`calibrate_special_values` adds up.
    """
    x, axis = prepare(x, fmt, axis)
    blocks, g, importance = blocked(x, fmt, axis, None, importance)
    g = g.reshape(g.shape + (1,) * (blocks.ndim - g.ndim))
    largest = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True)
    errors = []
    for magnitude in values:
        _, scale, divisor = fmt._magnitude_scale(float(magnitude), largest, g, hold)
        error = _signed_error(
            blocks, divisor, importance, magnitude=float(magnitude), axis=axis, hold=hold
        )
        errors.append(jnp.squeeze(jnp.abs(error) * jnp.square(scale * g), axis=axis))
    return jnp.stack(errors)
