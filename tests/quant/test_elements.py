import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl

from fadex.quant import ELEMENTS, decode_element, element_levels, encode_element

ORACLES = {
    "e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "e8m0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
encode = jax.jit(encode_element, static_argnums=1, static_argnames=("on_nonfinite",),
                 compiler_options={"xla_backend_optimization_level": 0})
bits = lambda a: np.asarray(a).view(np.uint32)


@functools.cache
def inputs():
    """Finite float32 values: all of bfloat16, all of float16, 2^20 random patterns, and the
    neighbourhood of every decision point of every format."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    narrow = [patterns.view(d).astype(np.float32) for d in (ml_dtypes.bfloat16, np.float16)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint64)
    middles = []
    for name in ELEMENTS:
        levels = element_levels(name).astype(np.float64)
        levels = levels if name != "e8m0" else levels[:-1]
        middles.append(((levels[1:] + levels[:-1]) / 2).astype(np.float32))
        middles.append(levels.astype(np.float32))
    middles = np.unique(np.concatenate(middles))
    near = [middles, *(np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf))]
    x = np.concatenate([*narrow, random.astype(np.uint32).view(np.float32), *near])
    return x[np.isfinite(x)]


def nearest(levels, x, even):
    """Index of the nearest level in float64; a tie goes to an even index if ``even``, else to the
    lower one."""
    levels = np.asarray(levels, np.float64)
    x = np.clip(np.asarray(x, np.float64), levels[0], levels[-1])
    high = np.clip(np.searchsorted(levels, x), 1, len(levels) - 1)
    below, above = x - levels[high - 1], levels[high] - x
    up = (above < below) | ((above == below) & (high % 2 == 0) & even)
    return np.where(up, high, high - 1)


def oracle(name, x):
    """Codes of finite values by something that is not ours."""
    element = ELEMENTS[name]
    if name in ORACLES:
        top = float(ml_dtypes.finfo(ORACLES[name]).max)
        codes = np.clip(x, -top, top).astype(ORACLES[name]).view(np.uint8)
        if name == "e8m0":  # ml_dtypes before 0.7 took all of these up, not only the nearer half
            codes = np.where((x > 2.0**-127) & (x < 1.5 * 2.0**-127), 0, codes)
        return codes
    if name == "e3m3":  # e = 0: m / 32; else (8 + m) 2^(e - 6)
        e, m = np.divmod(np.arange(63), 8)
        return nearest(np.where(e == 0, m / 32, (8 + m) * 2.0 ** (e - 6)), x, even=True)
    if name == "nf4":
        levels = element_levels("nf4").astype(np.float64)
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, x.astype(np.float64), side="left")
    top = (1 << (element.bits - 1)) - 1
    return np.clip(np.rint(x), -top - 1, top).astype(np.int64) & ((1 << element.bits) - 1)


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[pytest.mark.smoke] * (n in ("e2m1", "e4m3fn", "e8m0")))
    for n in ("e2m1", "e2m3", "e3m2", "e3m3", "e4m3fn", "e5m2", "e8m0", "int2", "int3", "int4",
              "int8", "nf4")
])
def test_codes_and_values_are_the_oracles_bit_for_bit(name):
    """Under jit, eagerly and inside an interpreted Pallas kernel; every code decoded."""
    x, codes = inputs(), np.arange(1 << ELEMENTS[name].bits, dtype=np.uint8)
    want = oracle(name, x)

    def body(x_ref, c_ref, codes_ref, values_ref):
        codes_ref[...] = encode_element(x_ref[...], name)
        values_ref[...] = decode_element(c_ref[...], name)

    @jit
    def run(x, codes):
        kernel = pl.pallas_call(body, interpret=True, out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.uint8),
            jax.ShapeDtypeStruct(codes.shape, jnp.float32),
        ))(x, codes)
        return (encode_element(x, name), decode_element(codes, name)), kernel

    few = x[-4096:]  # the decision points
    eager = encode_element(few, name), decode_element(codes, name)
    results = [(x, *pair) for pair in run(x, codes)] + [(few, *eager)]
    for xs, got, values in results:
        assert got.dtype == jnp.uint8 and values.dtype == jnp.float32
        wrong = np.asarray(got) != want[-xs.size:]
        assert not wrong.any(), (xs[wrong][:5], np.asarray(got)[wrong][:5])
        if name in ORACLES:
            exact = codes.view(ORACLES[name]).astype(np.float32)
            # ml_dtypes gives NaN a sign or a payload; ours has neither.
            same = (bits(values) == bits(exact)) | (np.isnan(values) & np.isnan(exact))
            assert same.all()


def test_narrow_and_integer_inputs_are_taken_at_their_exact_value():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = patterns.view(dtype)
        x = x[np.isfinite(x.astype(np.float32))]
        for name in ("e2m1", "e4m3fn"):
            np.testing.assert_array_equal(
                jit(lambda x: encode_element(x, name))(x), oracle(name, x.astype(np.float32)))
    assert encode_element(np.arange(-9, 9), "int4").tolist() == [
        8, *range(8, 16), *range(8), 7]


@pytest.mark.parametrize("name", ["e3m3", "int2", "int5", "nf4"])
def test_codes_without_a_peer_decode_by_their_formula(name):
    code = np.arange(1 << ELEMENTS[name].bits)
    if name == "e3m3":
        e, m = code >> 3, code & 7
        want = np.where(e == 0, m / 32, (8 + m) * 2.0 ** (e - 6))
    elif name == "nf4":
        # QLoRA's construction: quantiles of the normal distribution, 8 above zero and 7 below.
        from statistics import NormalDist

        offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
        side = lambda n: [NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, n)[:-1]]
        want = np.sort([0.0, *side(9), *(-v for v in side(8))])
        want = want / want[-1]
    else:
        want = np.where(code < len(code) // 2, code, code - len(code))
    np.testing.assert_allclose(decode_element(code, name), want, rtol=2e-6, atol=2e-6)
    if name != "nf4":
        np.testing.assert_array_equal(decode_element(code, name), want)
    # Bits above the width are ignored.
    np.testing.assert_array_equal(
        decode_element(code + (len(code) << 3), name), decode_element(code, name))


def test_levels_are_the_distinct_finite_values_of_all_codes():
    @jit
    def run(codes, levels):
        values = {name: decode_element(c, name) for name, c in codes.items()}
        return values, {
            name: decode_element(encode_element(x, name), name) for name, x in levels.items()
        }

    codes = {name: np.arange(1 << e.bits, dtype=np.uint8) for name, e in ELEMENTS.items()}
    decoded, again = run(codes, {name: element_levels(name) for name in ELEMENTS})
    for name, element in ELEMENTS.items():
        codes = np.arange(1 << element.bits, dtype=np.uint8)
        if name in ORACLES:
            values = codes.view(ORACLES[name]).astype(np.float64)
        else:
            values = np.asarray(decoded[name], np.float64)
            values = values[:-1] if name == "e3m3" else values  # code 63 is reserved
        values = np.unique(values[np.isfinite(values)])
        levels = element_levels(name)
        np.testing.assert_array_equal(levels, values)
        if element.kind == "float":
            assert element.max == values[-1] and element.tiny == values[values > 0][0]
        # Every level is its own nearest.
        np.testing.assert_array_equal(again[name], levels)


def test_ties_go_to_the_even_mantissa_and_table_ties_to_the_lower_index():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.5, 1.5, -0.5, -1.5], np.float32)
    got = np.append(element_levels("e2m1")[7:], -element_levels("e2m1")[7:])[encode(x, "e2m1")]
    assert got.tolist() == [0, 1, 1, 2, 2, 4, 4, -4, 0.5, 1.5, -0.5, -1.5]
    assert encode(x, "int4").tolist() == [0, 1, 1, 2, 2, 4, 5, 11, 0, 2, 0, 14]
    # 1.5 quanta lie midway between subnormals; 7.5 quanta round up into the normal numbers.
    assert encode(np.float32([1.5, 7.5, 2.5, 6.5]) / 512, "e4m3fn").tolist() == [2, 8, 2, 6]
    levels = element_levels("nf4").astype(np.float64)
    middle = (levels[1:] + levels[:-1]) / 2
    exact = np.flatnonzero(middle.astype(np.float32) == middle)
    assert exact.size
    assert encode(middle[exact].astype(np.float32), "nf4").tolist() == exact.tolist()


def test_zeros_keep_their_sign_where_the_format_has_one():
    x = np.array([0.0, -0.0, -1e-30], np.float32)
    for name in ("e2m1", "e2m3", "e3m2", "e4m3fn", "e5m2"):
        sign = 1 << (ELEMENTS[name].bits - 1)
        assert encode(x, name).tolist() == [0, sign, sign]
    for name, want in (("e3m3", 0), ("int4", 0), ("nf4", 7), ("e8m0", 255)):
        assert encode(x, name).tolist() == [want] * 3
    assert encode(np.float32([-1.0, -0.01, -9.0]), "e3m3").tolist() == [0, 0, 0]


NAN = np.nan
POLICY = {  # decoded +inf, -inf, NaN; then the same saturating
    "e2m1": ((6, -6, 6), (6, -6, 6)), "e2m3": ((7.5, -7.5, 7.5), (7.5, -7.5, 7.5)),
    "e3m2": ((28, -28, 28), (28, -28, 28)), "e3m3": ((28, 0, 28), (28, 0, 28)),
    "e4m3fn": ((NAN, NAN, NAN), (448, -448, NAN)),
    "e5m2": ((np.inf, -np.inf, NAN), (57344, -57344, NAN)),
    "e8m0": ((NAN, NAN, NAN), (2.0**127, NAN, NAN)),
    "int2": ((1, -2, 0), (1, -2, 0)), "int8": ((127, -128, 0), (127, -128, 0)),
    "nf4": ((1, -1, -1), (1, -1, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY)
def test_values_that_are_not_finite_follow_the_policy(name):
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    for policy, want in zip(("propagate", "saturate"), POLICY[name]):
        codes = encode(x, name, on_nonfinite=policy)
        np.testing.assert_array_equal(decode_element(codes, name), np.float32(want))
    # What is finite and too large saturates under either policy: no NaN, no infinity.
    if name != "e8m0":
        big = np.array([3e38, -3e38, 1e30], np.float32)
        assert np.isfinite(decode_element(encode(big, name), name)).all()


@functools.cache
def float64_inputs():
    """Doubles at decision points of every format, and within an ulp of them, which float32 would
    round onto them."""
    middles = []
    for name in FLOAT64:
        levels = element_levels(name).astype(np.float64)
        middles.append((levels[1:] + levels[:-1]) / 2)
    middles = np.unique(np.concatenate(middles))
    special = [1e300, -1e300, 1e-300, -431.99999999999994, np.nan]
    return np.concatenate([middles, *(np.nextafter(middles, s) for s in (-1e9, 1e9)), special])


def float64_codes(name, x):
    element, levels = ELEMENTS[name], element_levels(name).astype(np.float64)
    if element.kind == "float":
        code = nearest(levels[levels >= 0], np.abs(x) if element.signed else x, even=True)
        return code | np.where(np.signbit(x) & element.signed, 1 << (element.bits - 1), 0)
    code = nearest(levels, x, even=element.kind == "int")
    return code + len(levels) // 2 & (len(levels) - 1) if element.kind == "int" else code


FLOAT64 = ("e2m1", "e4m3fn", "e3m3", "int4", "nf4")


@pytest.mark.parametrize("name", FLOAT64)
def test_float64_is_rounded_once(name):
    x = float64_inputs()
    want = float64_codes(name, x[:-1])
    with np.errstate(over="ignore"):
        twice = oracle(name, np.clip(x[:-1].astype(np.float32), -1e38, 1e38))
    assert (twice != want).any()  # two roundings would be seen
    nan = {"e2m1": 7, "e4m3fn": 127, "e3m3": 62, "int4": 0, "nf4": 0}[name]
    want = np.append(want, nan)
    def run():
        scalars = [encode_element(v, name) for v in (x[0], float(x[0]), [x[0]])]
        return encode_element(x, name), *map(jnp.ravel, scalars)

    for enabled in (False, True):
        with jax.enable_x64(enabled):
            got, *scalars = jit(run)()  # of NumPy arrays and scalars
            np.testing.assert_array_equal(got, want)
            assert [s.item() for s in scalars] == [want[0]] * 3
            if enabled:
                np.testing.assert_array_equal(encode(x, name), want)
                if name == "e4m3fn":
                    eager = encode_element(jnp.asarray(x), name)
                    np.testing.assert_array_equal(eager, want)


def test_errors_name_the_argument():
    for call, error, message in (
        (lambda: encode_element(1.0, "e9m9"), ValueError, "name: expected one of 'e2m1'"),
        (lambda: decode_element(jnp.zeros(2, jnp.uint8), "fp4"), ValueError, "name: expected one"),
        (lambda: element_levels("fp4"), ValueError, "name: expected one of"),
        (lambda: encode_element(1.0, "e2m1", on_nonfinite="raise"), ValueError,
         "on_nonfinite: expected one of"),
        (lambda: encode_element(jnp.ones(2, jnp.complex64), "e2m1"), TypeError,
         "x: expected real numbers, got complex64"),
        (lambda: decode_element(jnp.ones(2), "e2m1"), TypeError,
         "codes: expected integers, got float32"),
    ):
        with pytest.raises(error, match=message):
            call()
