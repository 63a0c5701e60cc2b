import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fadex.quant import nvfp4, nvfp4_4o6, quantize_array

f32 = np.float32
run = jax.jit(
    lambda x, fmt, **kw: (
        q := quantize_array(x, fmt, axis=-2, **kw), q.unpacked(), q.dequantize()
    ),
    static_argnums=1, compiler_options={"xla_backend_optimization_level": 0},
)


@functools.cache
def matrices():
    """``[5, 256, 8]``: Gaussian, heavy-tailed, tiny, huge, and awkward blocks."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 256, 8))
    x[1] = rng.standard_t(3, (256, 8))
    x[2] *= 1e-25
    x[3] *= 1e36
    x[4, :16], x[4, 16:32], x[4, 32:48] = 0.0, 0.7, -np.abs(x[4, 32:48])
    x[4, 48:64] = 0.0
    x[4, 50] = 1.5
    return x.astype(f32)


def reference(x, rule, importance=None):
    """Candidates for 6 and 4 in float32, their errors in float64: codes, scale bytes, values of
    both, and the errors."""
    g = (np.abs(x).max() / f32(6 * 256) if x.any() else f32(1)).astype(f32)
    blocks = x.reshape(-1, 16, x.shape[-1])
    weight = 1.0 if importance is None else importance.reshape(blocks.shape)
    m = np.abs(blocks).max(1, keepdims=True)
    out = []
    for top in (6, 4):
        ratio = np.minimum(m / (f32(top) * g), f32(448))
        code = np.maximum(ratio.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), 1)
        s = code.view(ml_dtypes.float8_e4m3fn).astype(f32)
        q = np.clip(blocks / (s * g), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        values = (q.astype(f32) * s) * g
        miss = np.abs(values.astype(np.float64) - blocks)
        error = {"mse": lambda e: (weight * e**2).sum(1), "mae": lambda e: (weight * e).sum(1),
                 "absmax": lambda e: (weight * e).max(1)}[rule](miss)
        out.append((q.view(np.uint8), code[:, 0], values, error))
    return g, *out


@pytest.mark.parametrize(
    "rule", [pytest.param("mse", marks=pytest.mark.smoke), "mae", "absmax"])
def test_each_block_takes_the_better_scale_bit_for_bit(rule):
    x = matrices()
    q, codes, values = run(x, nvfp4_4o6(rule))
    unclear = 0
    for i in range(len(x)):
        g, six, four = reference(x[i], rule)
        assert q.tensor_scale[i] == g
        four_wins = four[3] < six[3]
        # Errors are summed in float32: only where they differ beyond that is the choice sure.
        clear = np.abs(four[3] - six[3]) > 1e-5 * six[3]
        clear |= (six[1] == four[1]) | ((six[3] == 0) & (four[3] == 0))
        unclear += (~clear).sum()
        got = codes[i].reshape(six[0].shape), q.scales[i], values[i].reshape(six[0].shape)
        for a, b6, b4 in zip(got, six, four):
            pick = four_wins if b6.ndim == 2 else four_wins[:, None]
            sure = clear if b6.ndim == 2 else np.broadcast_to(clear[:, None], b6.shape)
            np.testing.assert_array_equal(np.asarray(a)[sure], np.where(pick, b4, b6)[sure])
    assert unclear < 0.05 * q.scales.size
    four_share = float(np.mean(four_wins))
    assert 0.2 < four_share < 0.9


def test_a_tie_keeps_six():
    """Blocks that either scale represents exactly, or that are zero."""
    x = np.zeros((32, 2), f32)
    x[:16, 0] = [0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6, 0, 0, 0, 0, 0]
    x[16, 1] = 1536.0  # g = 1: 6 * 256 and 4 * 384 are both exact
    x[0, 1] = -768.0
    q, codes, values = run(x, nvfp4_4o6())
    np.testing.assert_array_equal(values, x)
    assert q.tensor_scale == 1.0
    assert q.scales.tolist() == [[0x38, 0x70], [1, 0x78]]  # 1, 128; 2^-9, 256
    assert codes[16, 1] == 7


def test_no_block_is_worse_than_with_six_alone():
    x = matrices()
    q, _, values = run(x, nvfp4_4o6())
    six = run(x, nvfp4(), tensor_scale=q.tensor_scale)[2]
    for i in range(len(x)):
        error = lambda v: ((np.asarray(v[i], np.float64) - x[i]) ** 2).reshape(-1, 16, 8).sum(1)
        assert (error(values) <= error(six) * (1 + 1e-6)).all()
    assert (error(values) < error(six)).mean() > 0.2


def test_importance_weighs_the_choice():
    x = matrices()
    weight = np.zeros_like(x)
    weight[:, ::16] = 1.0  # only the first of each block counts
    q, _, values = run(x, nvfp4_4o6(), importance=weight)
    _, six, four = reference(x[0], "mse", weight[0])
    miss = (np.asarray(values[0], np.float64) - x[0]).reshape(16, 16, 8)[:, 0] ** 2
    np.testing.assert_allclose(miss, np.minimum(six[3], four[3]), rtol=1e-5)
    assert (np.asarray(q.scales) != np.asarray(run(x, nvfp4_4o6())[0].scales)).any()


def test_stored_bytes_and_decoding_are_those_of_nvfp4():
    q, _, values = run(matrices(), nvfp4_4o6())
    plain = run(matrices(), nvfp4(), tensor_scale=q.tensor_scale)[0]
    assert q.nbytes == plain.nbytes and q.scales.dtype == jnp.uint8
    again = jax.jit(lambda q: dataclasses.replace(q, fmt=nvfp4()).dequantize())(q)
    np.testing.assert_array_equal(again, values)
    assert int(np.asarray(q.scales).max()) <= 0x7C  # 384: never saturates


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="rule: expected one of 'mse', 'mae', 'absmax'"):
        nvfp4_4o6("best")
