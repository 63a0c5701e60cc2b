"""Bug reports against other libraries, each as the property whose lack was reported."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fadex.quant import (
    encode_element,
    int_group,
    mxfp4,
    mxfp8,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize_array,
    razer_e3m3,
    razer_e4m3,
)

f32 = np.float32
run = functools.partial(
    jax.jit, static_argnums=1, static_argnames=("axis",),
    compiler_options={"xla_backend_optimization_level": 0},
)(lambda x, fmt, axis=-2, **kw: (
    q := quantize_array(x, fmt, axis=axis, **kw), q.dequantize()))


def test_four_bit_weights_take_half_a_byte_plus_scales():
    # google/qwix#328: int4 arrays stored at one byte per element.
    shape = (256, 64)
    for fmt in (nvfp4(), razer_e3m3(), mxfp4(), int_group(4, 32), nf4(64)):
        q = jax.eval_shape(lambda x: quantize_array(x, fmt), jnp.ones(shape))
        assert q.codes.dtype == jnp.uint8 and q.codes.shape == (128, 64)
    q = run(np.ones(shape, f32), nvfp4())[0]
    assert np.asarray(q.codes).nbytes == 256 * 64 // 2
    assert q.nbytes == 256 * 64 // 2 + 16 * 64 + 4


def test_block_scales_are_never_nan_under_a_stale_tensor_scale_or_in_zero_blocks():
    # NVIDIA/Model-Optimizer#1633 and PR 1397: NaN bytes in NVFP4 block scales.
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(f32)
    x[:16, 0] = 0.0
    for fmt in (nvfp4(), nvfp4_4o6(), razer_e4m3()):
        amax = f32(np.abs(x).max())
        for scale in (amax / f32(6 * 448) / 50, f32(1e-30), amax):
            q, values = run(x, fmt, tensor_scale=scale)
            magnitude = np.asarray(q.scales) & 0x7F
            assert magnitude.max() <= 0x7E and magnitude.min() >= 1  # at most 448, never zero
            assert np.isfinite(values).all() and (np.asarray(values)[:16, 0] == 0).all()


def test_codes_belong_to_the_rounded_scale():
    # NVIDIA/Model-Optimizer PR 2243: codes packed with scales before their rounding to fp8, and
    # scales below 2^-9.
    rng = np.random.default_rng(1)
    x = rng.standard_normal((128, 64)).astype(f32)
    x *= f32(10.0) ** rng.uniform(-9, 0, (8, 64)).astype(f32).repeat(16, 0)
    q, values = run(x, nvfp4())
    s = np.asarray(q.scales).view(ml_dtypes.float8_e4m3fn).astype(f32).repeat(16, 0)
    assert s.min() == 2.0**-9  # blocks below the resolution are there
    unit = s * np.asarray(q.tensor_scale)
    nearest = np.clip(x / unit, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(f32)
    np.testing.assert_array_equal(values, nearest * s * np.asarray(q.tensor_scale))
    # With the unrounded scale the codes would be others.
    m = np.abs(x).reshape(8, 16, 64).max(1).repeat(16, 0)
    other = np.clip(x * 6 / m, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(f32)
    assert (other != nearest).mean() > 0.01


def test_tiny_blocks_do_not_become_nan():
    # flashinfer-ai/flashinfer#2440: MXFP8 NaN for inputs of magnitude 1e-37.
    rng = np.random.default_rng(2)
    for fmt in (mxfp8(), nvfp4(), razer_e3m3(), int_group(4, 32)):
        for size in (1e-37, 1.2e-38, 1e-40):
            x = (rng.standard_normal((64, 4)) * size).astype(f32)
            for dtype in (f32, ml_dtypes.bfloat16) if fmt == mxfp8() else (f32,):
                values = np.asarray(run(x.astype(dtype), fmt)[1], f32)
                assert np.isfinite(values).all()
                assert np.abs(values).max() <= 2 * np.abs(x).max()


@pytest.mark.parametrize("axis", [-1, -2])
def test_every_number_of_rows_keeps_its_scales(axis):
    # flashinfer-ai/flashinfer#3398: scale buffers of zeros for some row counts (384, 512, 1024).
    whole = np.random.default_rng(3).standard_normal((1024, 64)).astype(f32)
    for rows in (1, 17, 384, 512, 1024):
        x = whole[:rows] if axis == -1 else whole[:rows].T.copy()
        q, values = run(x, mxfp8(), axis=axis)
        assert (np.asarray(q.scales) > 0).all()
        assert ((np.asarray(values) - x) ** 2).sum() < 1.5e-3 * (x**2).sum()


@pytest.mark.smoke
def test_overflow_saturates_where_a_cast_gives_nan():
    # jax-ml/ml_dtypes#400: float8_e4m3fn overflows to NaN where hardware saturates.
    x = np.array([465, 1000, 3e38, -1000], f32)
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.isnan(x.astype(ml_dtypes.float8_e4m3fn).astype(f32)).all()
    infinite = f32([np.inf])
    encode = lambda x, **kw: encode_element(x, "e4m3fn", **kw)
    got, saturated, kept = jax.jit(lambda x, y: (
        encode(x), encode(y, on_nonfinite="saturate"), encode(y)))(x, infinite)
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
    assert saturated.tolist() == [0x7E] and kept.tolist() == [0x7F]


def test_float64_is_not_rounded_twice():
    # jax-ml/ml_dtypes PR 401: float64 through float32 to fp8. 432 lies midway between 416 and 448.
    x = np.array([-431.99999999999994, 432.0, 432.00000000000006])
    assert x.astype(f32).tolist() == [-432.0, 432.0, 432.0]
    want = [0xFD, 0x7E, 0x7E]  # -416, 448 (even), 448
    assert jax.jit(lambda: encode_element(x, "e4m3fn"))().tolist() == want
    with jax.enable_x64(True):
        assert jax.jit(encode_element, static_argnums=1)(x, "e4m3fn").tolist() == want


def test_power_of_two_scales_see_every_digit_of_the_largest_value():
    # pytorch/ao PR 4725: float32 -> bfloat16 -> e8m0 carried maxima over a power of two.
    x = np.zeros((32, 60), f32)
    k = np.arange(-30, 30)
    x[0] = 2.0**k * (1 - 2.0**-10)
    assert (x[0].astype(ml_dtypes.bfloat16).astype(f32) == 2.0**k).all()
    q, values = run(x, mxfp4())
    np.testing.assert_array_equal(q.scales[0], k - 1 - 2 + 127)  # floor(log2 x) - 2
    np.testing.assert_array_equal(values[0], 2.0**k * 0.75)  # 7.99 saturates at 6
    ceil = run(x, mxfp4(scale_rule="ceil"))
    np.testing.assert_array_equal(ceil[0].scales[0], k - 2 + 127)  # 2^k / 6 rounds up to 2^(k-2)
    np.testing.assert_array_equal(ceil[1][0], 2.0**k)
