r"""Block formats: elements of a few bits that share a scale, and sometimes a scale of scales.

A matrix is cut along its contraction axis into blocks of :math:`b` values. With a block's largest
magnitude :math:`m = \max_j |x_j|` and the tensor scale :math:`g` (1 where a format has none):

.. math:: s = \operatorname{round}_{\text{scale}}\!\Big(\frac{m}{t\,g}\Big), \qquad
          q_j = \operatorname{round}_{\text{element}}\!\Big(\frac{x_j}{s g}\Big), \qquad
          \hat x_j = (q_j\, s)\, g ,

with :math:`t` the largest element value. All of it runs in float32: one division by the product
:math:`s g`, and the values always in the order :math:`(q s) g`. The tensor scale belongs to a
matrix (the last two axes), so that stacked layers are quantized as if one by one. Only the search
passes of formats that choose among scales may multiply by reciprocals.

===========  ========  =====  ======================  ==================  ===================
constructor  element   block  block scale             tensor scale        bits per weight
===========  ========  =====  ======================  ==================  ===================
nvfp4        e2m1      16     e4m3fn                  amax / (6 * 448)    4.5
mxfp4        e2m1      32     e8m0                    none                4.25
mxfp6        e3m2      32     e8m0                    none                6.25
mxfp8        e4m3fn    32     e8m0                    none                8.25
int_group    int2..8   any    float32, float16, ...   none                b + 32 / block
nf4          nf4       64     float32 or e4m3fn       with e4m3fn         4.5 or 4.125
fp8          e4m3fn    axis   float32                 or only this one    8
===========  ========  =====  ======================  ==================  ===================

Sources: NVFP4 as its public reference implementations code it; the OCP microscaling
specification; QLoRA; the usual group-wise integers of GPTQ and AWQ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.core.checks import check_choice, check_int
from fadex.core.kernels import by_platform
from fadex.quant.elements import (
    ELEMENTS,
    NF4_LEVELS,
    Element,
    decode_float,
    decode_int,
    decode_table,
    element_levels,
    encode_float,
    encode_int,
    encode_table,
)

__all__ = ["Format", "fp8", "int_group", "mxfp4", "mxfp6", "mxfp8", "nf4", "nvfp4"]

SCALE_FLOATS = ("float32", "bfloat16", "float16")
SCALE_BYTES = ("e4m3fn", "e8m0", "e3m3")
SCALE_RULES = ("floor", "ceil", "even")
TENSOR = "tensor"
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class Blocks(NamedTuple):
    """What an encoder returns for ``x`` ``[..., K/b, b, N]`` (or ``[..., K/b, b]``).

    Attributes:
      codes: int32 or uint8, the shape of ``x``, not packed.
      scales: one a block, axis ``b`` kept with length 1; uint8 bit patterns or floats; ``None``
        where a tensor has one scale.
      zero_point: uint8 like ``scales``, or ``None``.
    """

    codes: jax.Array
    scales: jax.Array | None
    zero_point: jax.Array | None = None


def hold(value: Any) -> jax.Array:
    """Keep XLA from rewriting the arithmetic around a value (``x / c`` as ``x * (1 / c)``,
    ``a / (b / c)`` as ``a * c / b``) and from computing a block's value for each element."""
    return jax.lax.optimization_barrier(jnp.asarray(value, jnp.float32))


def materialize(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``, stored once: XLA's CPU compiler fuses a block's value into the loop over its
    elements and computes it for each, barrier or not, but it does not look into a branch.

    The branch is always taken; the condition is a value that the compiler does not know.
    """
    def branch(*args: Any) -> Any:
        taken = jax.lax.optimization_barrier(jnp.float32(1.0)) > 0
        shapes = jax.eval_shape(fn, *args)
        zeros = lambda *_: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.cond(taken, fn, zeros, *args)

    return by_platform(*args, default=branch, tpu=fn, cuda=fn)


def divide(a: Any, b: Any, hold: Any = hold) -> jax.Array:
    """``a / b``, rounded once. Where ``b`` is broadcast, XLA multiplies by its reciprocal, barrier
    or not, which is off by an ulp for some and depends on the shapes; it does not see through a
    selection."""
    a = jnp.asarray(a, jnp.float32)
    return a / jnp.where(jnp.isnan(a), 1.0, hold(b))


def plain(value: Any) -> jax.Array:
    """In place of :func:`hold` inside kernels, where the compiler knows no barrier."""
    return jnp.asarray(value, jnp.float32)


def block_sum(
    terms: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array | None, axis: int,
    reduce: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add, unroll: bool = True,
) -> tuple[jax.Array, ...]:
    """Sums over ``axis`` (kept) of the elementwise ``terms(*arrays)``, one per term.

    Blocks are short, so the sum is written out: XLA's CPU compiler vectorizes that loop over the
    other axes, shares what the terms have in common and stores nothing, while its reductions
    compute every term element by element (six times slower for RaZeR's search).
    """
    length = arrays[0].shape[axis]
    if not unroll or length > 32:
        fold = jnp.sum if reduce is jnp.add else jnp.max
        return tuple(fold(term, axis=axis, keepdims=True) for term in terms(*arrays))
    total = None
    for j in range(length):
        part = terms(*(
            None if a is None else jax.lax.slice_in_dim(a, j, j + 1, axis=a.ndim + axis)
            if a.shape[axis] == length else a
            for a in arrays
        ))
        total = part if total is None else tuple(map(reduce, total, part))
    return total


def largest_factor(top: float, dtype: str = "float32") -> float:
    """The largest number of ``dtype`` whose product with ``top`` is finite in float32."""
    high = np.asarray(min(_FLOAT32_MAX / max(top, 1.0), float(jnp.finfo(dtype).max)))
    value = high.astype(dtype)
    with np.errstate(over="ignore"):
        while not np.isfinite(value.astype(np.float32) * np.float32(top)):
            bits = value.view(np.uint32 if value.dtype.itemsize == 4 else np.uint16) - 1
            value = np.asarray(bits).view(value.dtype)
    return float(value)


@dataclasses.dataclass(frozen=True)
class Format:
    """Static description of a block format; equal and hashable by its fields.

    Make one with a constructor of this module (:func:`nvfp4`, :func:`int_group`, ...); the class
    itself runs every format whose scale follows from the largest magnitude, and formats that
    search for their scale derive from it.

    Attributes:
      name: short name for tables and files.
      element: name of the element format.
      block: values that share a scale; ``None``: the whole axis; ``'tensor'``: the whole
        matrix (one float32 scale, no block scales).
      scale: dtype of a block scale, ``'float32'``, ``'bfloat16'``, ``'float16'``, or one of the
        8-bit patterns ``'e4m3fn'``, ``'e8m0'``, ``'e3m3'``.
      two_level: whether a float32 tensor scale maps the largest block scale to the top of
        ``scale``.
      scale_rule: for ``'e8m0'``: ``'floor'``, ``'ceil'`` or ``'even'``.
      symmetric: for integers; without it each block has a zero point.
      full_range: for symmetric integers, whether the lowest code is used.
    """

    name: str
    element: str
    block: int | str | None
    scale: str = "float32"
    two_level: bool = False
    scale_rule: str = ""
    symmetric: bool = True
    full_range: bool = False

    def __post_init__(self) -> None:
        check_choice("element", self.element, tuple(ELEMENTS))
        check_choice("scale", self.scale, SCALE_FLOATS + SCALE_BYTES)
        if self.block is not None and self.block != TENSOR:
            if isinstance(self.block, str):
                raise ValueError(f"block: expected a size, None or 'tensor', got {self.block!r}")
            check_int("block", self.block, minimum=1)
            if self.block % 8:
                raise ValueError(
                    f"block: must be a multiple of 8 (codes fill whole bytes), got {self.block}"
                )

    # --- static facts

    @property
    def _element(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self._element.bits

    @property
    def half_integers(self) -> bool:
        """Whether the grid is ``{-1.5, -.5, .5, 1.5}``: symmetric integers of two bits."""
        return self.element == "int2" and self.symmetric

    @property
    def top(self) -> float:
        """The element value that a block's largest magnitude is mapped to."""
        return 1.5 if self.half_integers else self._element.max

    @property
    def levels(self) -> np.ndarray:
        """Element values in units of the block scale, ascending, float32."""
        if self.half_integers:
            return np.array([-1.5, -0.5, 0.5, 1.5], np.float32)
        if self._element.kind == "int":
            if not self.symmetric:
                return np.arange(2**self.bits, dtype=np.float32)
            levels = element_levels(self.element)
            return levels if self.full_range else levels[1:]
        return element_levels(self.element)

    @property
    def scale_bits(self) -> int:
        """Bits of a block scale (and zero point)."""
        if self.block == TENSOR:
            return 0
        bits = 8 if self.scale in SCALE_BYTES else 8 * jnp.dtype(self.scale).itemsize
        return bits + (0 if self.symmetric else 8)

    @property
    def scale_max(self) -> float:
        """Largest block scale of a two-level format, in units of the tensor scale."""
        return ELEMENTS[self.scale].max if self.scale in SCALE_BYTES else 1.0

    @property
    def scale_tiny(self) -> float:
        return ELEMENTS[self.scale].tiny

    def bits_per_weight(self, block_length: int | None = None) -> float:
        """Bits of a code and its share of the block scale; ``block_length`` where the whole axis
        is the block."""
        block = self.block if isinstance(self.block, int) else block_length
        return self.bits + (self.scale_bits / block if block else 0.0)

    # --- scales

    def tensor_scale(self, amax: jax.Array, hold: Any = hold) -> jax.Array:
        """Tensor scale of a matrix whose largest magnitude is ``amax`` (1 for all zeros).

        Not below ``2^-126 / scale_tiny``, so that the product of both scales stays a normal
        number: matrices below 1e-32 lose resolution instead of turning into NaN.
        """
        target = self.top if self.block == TENSOR else self.top * self.scale_max
        scale = hold(divide(hold(amax), target, hold))
        tiny = _FLOAT32_TINY if self.block == TENSOR else _FLOAT32_TINY / self.scale_tiny
        scale = jnp.minimum(scale, largest_factor(target))
        return jnp.where(amax > 0, jnp.maximum(scale, tiny), jnp.where(amax == 0, 1.0, jnp.nan))

    @property
    def has_tensor_scale(self) -> bool:
        return self.two_level or self.block == TENSOR

    @property
    def nan_in_scale(self) -> bool:
        """Whether a block scale can hold NaN; if not, the tensor scale has to."""
        return self.block != TENSOR and self.scale != "e3m3"

    def scale_values(self, scales: jax.Array) -> jax.Array:
        """Block scales as float32, from what is stored."""
        if self.scale not in SCALE_BYTES:
            return scales.astype(jnp.float32)
        values = decode_float(scales.astype(jnp.int32), ELEMENTS[self.scale])
        if self.scale == "e8m0":  # 2^-127 is no normal number, and accelerators flush it
            values = jnp.where(scales == 0, jnp.float32(2.0**-126), values)
        return values

    def _encode_scale(self, ratio: jax.Array) -> jax.Array:
        """Stored block scale nearest to ``ratio``, never zero."""
        if self.scale not in SCALE_BYTES:
            # Subnormal float16 numbers are exact everywhere; those of 8 exponent bits are not.
            info = jnp.finfo(self.scale)
            low = info.smallest_subnormal if self.scale == "float16" else info.tiny
            high = largest_factor(self.top if self.symmetric else 1.0, self.scale)
            return jnp.clip(ratio, float(low), high).astype(self.scale)
        code = encode_float(ratio, ELEMENTS[self.scale], saturate=True)
        return jnp.maximum(code, 1)

    def _power_of_two(self, largest: jax.Array) -> jax.Array:
        """e8m0 code of a block from the bits of its largest magnitude: ``log2`` may be off by one
        place at powers of two."""
        element = self._element
        bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
        top = int(np.float32(element.max).view(np.int32))
        if self.scale_rule == "even":
            shift = 23 - element.mantissa
            bits = bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)
        exponent = (bits >> 23) - ((top >> 23) - 127)
        if self.scale_rule == "ceil":
            mantissa = (1 << 23) - 1
            exponent = exponent + ((bits & mantissa) > (top & mantissa)).astype(jnp.int32)
        # Up to where the top of the block is still a float32 number.
        return jnp.clip(exponent, 1, 254 - ((top >> 23) - 127))

    # --- elements

    def encode_values(self, z: jax.Array) -> jax.Array:
        """Codes (int32) of values in units of their block scale."""
        element = self._element
        if self.half_integers:
            return encode_int(z - 0.5, 2)
        if element.kind == "int":
            low = None if self.full_range else 1 - (1 << (element.bits - 1))
            return encode_int(z, element.bits, low)
        if element.kind == "table":
            return encode_table(z, NF4_LEVELS)
        return encode_float(z, element, saturate=True)

    def decode_values(self, codes: jax.Array) -> jax.Array:
        """Float32 values of codes in units of their block scale."""
        codes = codes.astype(jnp.int32)
        element = self._element
        if element.kind == "int":
            if not self.symmetric:
                return codes.astype(jnp.float32)
            value = decode_int(codes, element.bits)
            return value + 0.5 if self.half_integers else value
        if element.kind == "table":
            return decode_table(codes & 15, NF4_LEVELS)
        return decode_float(codes, element)

    # --- blocks

    def encode_blocks(
        self,
        x: jax.Array,
        tensor_scale: jax.Array | None,
        *,
        axis: int,
        importance: jax.Array | None = None,
        hold: Any = hold,
    ) -> Blocks:
        """Encode float32 blocks. ``axis`` (negative) is the axis within the block.

        ``tensor_scale`` broadcasts against ``x``. A block with NaN or infinity gets a NaN scale
        where ``nan_in_scale``. ``importance`` matters only to formats that search.
        """
        del importance
        if self.block == TENSOR:
            return Blocks(self.encode_values(divide(x, tensor_scale, hold)), None)
        if not self.symmetric:
            return self._encode_asymmetric(x, axis=axis, hold=hold)
        largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
        bad = ~(largest <= _FLOAT32_MAX)
        largest = jnp.where(bad, 0.0, largest)
        if self.scale == "e8m0":
            stored = self._power_of_two(largest)
            divisor = self.scale_values(stored)
        else:
            unit = hold(self.top) if tensor_scale is None else hold(self.top) * tensor_scale
            stored = self._encode_scale(divide(hold(largest), unit, hold))
            divisor = self.scale_values(stored)
            if tensor_scale is not None:
                divisor = divisor * tensor_scale
        # A power of two has an exact reciprocal; others may round, or vanish (1 / 3e38).
        exact = self.scale == "e8m0"
        codes = self.encode_values(x / hold(divisor) if exact else divide(x, divisor, hold))
        return Blocks(codes, self.finish_scales(stored, bad))

    def finish_scales(self, stored: jax.Array, bad: jax.Array) -> jax.Array:
        """Stored scales with NaN in the blocks that held what is not finite."""
        if self.scale in SCALE_BYTES:
            nan = ELEMENTS[self.scale].nan
            stored = stored if nan is None else jnp.where(bad, nan, stored)
            return stored.astype(jnp.uint8)
        return jnp.where(bad, jnp.asarray(jnp.nan, stored.dtype), stored)

    def _encode_asymmetric(self, x: jax.Array, *, axis: int, hold: Any) -> Blocks:
        top = (1 << self.bits) - 1
        # Zero is among the values, so that it is represented exactly.
        high = jnp.maximum(jnp.max(x, axis=axis, keepdims=True), 0.0)
        low = jnp.minimum(jnp.min(x, axis=axis, keepdims=True), 0.0)
        bad = ~((high <= _FLOAT32_MAX) & (low >= -_FLOAT32_MAX))
        # Halves first: the distance of two float32 numbers can exceed float32.
        half = jnp.where(bad, 0.0, high * 0.5 - low * 0.5)
        scale = self._encode_scale(divide(hold(half), top / 2, hold))
        divisor = hold(scale)
        zero = jnp.clip(jnp.round(divide(-jnp.where(bad, 0.0, low), divisor, hold)), 0, top)
        codes = jnp.clip(jnp.round(divide(x, divisor, hold)) + hold(zero), 0, top)
        codes = jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.int32)
        return Blocks(codes, self.finish_scales(scale, bad), zero.astype(jnp.uint8))

    def decode_blocks(
        self,
        codes: jax.Array,
        scales: jax.Array | None,
        zero_point: jax.Array | None = None,
    ) -> jax.Array:
        """``q * s`` in float32 for codes and the scales as stored (the tensor scale is left to
        the caller). Shapes broadcast. The same body runs in kernels."""
        values = self.decode_values(codes)
        if zero_point is not None:
            values = values - zero_point.astype(jnp.float32)
        return values if scales is None else values * self.scale_values(scales)

    # --- files

    def to_json(self) -> dict[str, Any]:
        """Plain description, from which :func:`fadex.quant.format_from_json` makes it again."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"kind": type(self).__name__, "version": 1, **fields}


# --- constructors


def nvfp4(block: int = 16, *, scale: str = "e4m3fn") -> Format:
    """NVFP4: e2m1 in blocks of 16 with e4m3fn scales under a float32 scale per matrix.

    :math:`g = \\max|x| / 2688`, :math:`s = \\mathrm{e4m3}(m / 6g)`; 4.5 bits per weight.
    ``scale='e3m3'`` takes an unsigned 6-bit scale in its place (stored in a byte).

    Example:
      >>> nvfp4().name, nvfp4().bits_per_weight()
      ('nvfp4', 4.5)
    """
    check_choice("scale", scale, ("e4m3fn", "e3m3"))
    name = ("nvfp4" if scale == "e4m3fn" else "nvfp4_e3m3") + ("" if block == 16 else f"_g{block}")
    return Format(name, "e2m1", block, scale, two_level=True)


def _mx(name: str, element: str, block: int, scale_rule: str) -> Format:
    check_choice("scale_rule", scale_rule, SCALE_RULES)
    suffix = ("" if block == 32 else f"_g{block}") + (
        "" if scale_rule == "floor" else f"_{scale_rule}"
    )
    return Format(name + suffix, element, block, "e8m0", scale_rule=scale_rule)


def mxfp4(*, block: int = 32, scale_rule: str = "floor") -> Format:
    """OCP MXFP4: e2m1 in blocks of 32 under a power of two; 4.25 bits per weight.

    ``scale_rule``: exponent of the block scale from the largest magnitude ``m``: ``'floor'``
    (OCP) :math:`\\lfloor\\log_2 m\\rfloor - e_{max}`, where the top of the block may saturate;
    ``'ceil'`` :math:`\\lceil\\log_2 (m / t)\\rceil`, which never does; ``'even'``: ``m`` is first
    rounded to the mantissa of the element. Exponents are clipped to [-126, 127].
    """
    return _mx("mxfp4", "e2m1", block, scale_rule)


def mxfp6(element: str = "e3m2", *, block: int = 32, scale_rule: str = "floor") -> Format:
    """OCP MXFP6, ``'e3m2'`` or ``'e2m3'``; 6.25 bits per weight. See :func:`mxfp4`."""
    check_choice("element", element, ("e3m2", "e2m3"))
    return _mx(f"mxfp6_{element}", element, block, scale_rule)


def mxfp8(element: str = "e4m3fn", *, block: int = 32, scale_rule: str = "floor") -> Format:
    """OCP MXFP8, ``'e4m3fn'`` or ``'e5m2'``; 8.25 bits per weight. See :func:`mxfp4`."""
    check_choice("element", element, ("e4m3fn", "e5m2"))
    return _mx(f"mxfp8_{element}", element, block, scale_rule)


def int_group(
    bits: int,
    block: int | str | None = 32,
    *,
    symmetric: bool = True,
    full_range: bool = False,
    scale: str = "float32",
) -> Format:
    """Integers of 2 to 8 bits with a floating-point scale per group, channel or matrix.

    Symmetric: :math:`s = m / (2^{b-1}-1)`, codes :math:`\\pm(2^{b-1}-1)`; two bits use the
    half-integer grid :math:`\\{\\pm.5, \\pm1.5\\} s`, :math:`s = m / 1.5`, which keeps all four
    levels. Asymmetric: :math:`s = (\\max - \\min) / (2^b - 1)` over the block and zero,
    :math:`z = \\operatorname{rint}(-\\min / s)`; zero is represented exactly.

    Args:
      bits: 2 to 8.
      block: values that share a scale, a multiple of 8; ``None``: the whole axis (per channel);
        ``'tensor'``: one scale per matrix (symmetric only).
      symmetric: without it, a zero point per block.
      full_range: use the code :math:`-2^{b-1}` as well (symmetric, 3 bits and more).
      scale: ``'float32'``, ``'bfloat16'`` or ``'float16'``.

    Raises:
      ValueError: an argument out of range, or a pair that does not go together.

    Example:
      >>> int_group(4, 32).name, int_group(4, 32, scale='bfloat16').bits_per_weight()
      ('int4_g32', 4.5)
    """
    if not 2 <= check_int("bits", bits) <= 8:
        raise ValueError(f"bits: must lie in [2, 8], got {bits}")
    check_choice("scale", scale, SCALE_FLOATS)
    if block == TENSOR and not symmetric:
        raise ValueError("block: 'tensor' has no zero point; use symmetric=True or block=None")
    if full_range and (not symmetric or bits == 2):
        raise ValueError(
            f"full_range: only symmetric integers of 3 bits and more leave a code out, got "
            f"bits={bits}, symmetric={symmetric}"
        )
    where = {None: "channel", TENSOR: TENSOR}.get(block, f"g{block}")
    name = f"int{bits}_{where}" + ("" if symmetric else "_asym")
    if scale != "float32":
        name += {"bfloat16": "_bf16", "float16": "_f16"}[scale]
    return Format(name + ("_full" if full_range else ""), f"int{bits}", block, scale,
                  symmetric=symmetric, full_range=full_range)


def nf4(block: int = 64, *, double_quant: bool = False) -> Format:
    """NF4, the 16 quantiles of QLoRA, scaled by the block's largest magnitude.

    ``double_quant`` stores the scales as e4m3fn under a float32 scale per matrix:
    ``4 + 8 / block`` bits per weight in place of ``4 + 32 / block``.
    """
    where = "channel" if block is None else f"g{block}"
    if double_quant:
        return Format(f"nf4_{where}_dq", "nf4", block, "e4m3fn", two_level=True)
    return Format(f"nf4_{where}", "nf4", block)


def fp8(element: str = "e4m3fn", *, per: str = "channel") -> Format:
    """8-bit floats under one float32 scale per channel (the whole axis) or per matrix.

    Args:
      element: ``'e4m3fn'`` or ``'e5m2'``.
      per: ``'channel'`` or ``'tensor'``.
    """
    check_choice("element", element, ("e4m3fn", "e5m2"))
    check_choice("per", per, ("channel", TENSOR))
    return Format(f"fp8_{element}_{per}", element, TENSOR if per == TENSOR else None)
