"""The fused quantization kernel: bit for bit what ``quantize_array`` stores, on any platform."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.core import export_for
from fadex.core.kernels import _GPU_CUSTOM_CALLS
from fadex.quant import (
    fp8,
    int_group,
    mxfp4,
    nf4,
    nvfp4,
    nvfp4_4o6,
    quantize_array,
    razer_e3m3,
)
from fadex.quant.kernels import fused_quantize as kernel

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quantized = jit(quantize_array, static_argnames="fmt")
_dequantized = jit(lambda q: q.dequantize(jnp.float32))
FORMS = {"tpu": kernel.fused_quantize_tpu, "cuda": kernel.fused_quantize_triton}


def matrix(*shape, dtype="float32"):
    """Gaussian, with a tiny row, a block of zeros and ties."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[..., 20, :] *= 1e-30
    x[..., 32:64, 3] = 0
    x[..., 64:80, 4] = np.arange(16) / 4
    return x.astype(jnp.dtype(dtype))


def assert_same(ours, theirs, x):
    """The same bits, but for a few blocks where two encodings are equally good: XLA may divide by
    multiplying, and sums a block's errors in an order of its own."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert a.dtype == b.dtype and a.shape == b.shape
        bits = lambda array: np.atleast_1d(array).view(np.uint8)
        assert np.mean(bits(a) != bits(b)) <= 0.01
    a, b, x = (np.float64(value) for value in (_dequantized(ours), _dequantized(theirs), x))
    block = ours.fmt.block if isinstance(ours.fmt.block, int) else 1
    error = lambda value: np.abs(value - x).reshape(*x.shape[:-2], -1, block, x.shape[-1]).sum(-2)
    np.testing.assert_allclose(error(a), error(b), rtol=1e-5, atol=1e-37)


def fused(platform, fmt, x, g):
    return jit(functools.partial(FORMS[platform], fmt=fmt, interpret=True))(x, g)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("fmt", "shape", "dtype"),
    [
        # More than a whole TPU block of 512.
        pytest.param(nvfp4(), (2, 640, 40), "bfloat16", marks=pytest.mark.smoke),
        (razer_e3m3(), (128, 72), "float32"),
        (nvfp4_4o6(), (128, 8), "float32"),
        (mxfp4(scale_rule="even"), (128, 8), "float32"),
        (nf4(64, double_quant=True), (256, 8), "float32"),
        (int_group(3, 16, symmetric=False, scale="bfloat16"), (128, 8), "float32"),  # two planes
        (int_group(2, 128), (256, 8), "float32"),
        (fp8(per="tensor"), (128, 8), "float32"),
    ],
    ids=lambda value: getattr(value, "name", "x".join(map(str, value))
                              if isinstance(value, tuple) else value),
)
def test_kernel_stores_the_same_bits_up_to_ties(platform, fmt, shape, dtype):
    x = matrix(*shape, dtype=dtype)
    expected = quantized(x, fmt=fmt)
    assert_same(fused(platform, fmt, x, expected.tensor_scale), expected, x)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_is_not_finite_is_kept(platform):
    x = matrix(128, 8)
    x[3, 5], x[40, 2] = np.nan, np.inf
    got = fused(platform, nvfp4(), x, np.float32(0.01))
    got, expected = _dequantized(got), _dequantized(quantized(x, fmt=nvfp4(), tensor_scale=0.01))
    np.testing.assert_array_equal(got, expected)
    lost = np.isnan(got)
    assert lost[:16, 5].all() and lost[32:48, 2].all() and lost.sum() == 32
    # Where no block scale can say NaN, the whole matrix is lost.
    assert np.isnan(_dequantized(fused(platform, fp8(per="tensor"), x, np.float32(0.01)))).all()


def test_dispatch_is_quantize_array_where_there_is_no_kernel():
    x, g = matrix(2, 128, 8), np.float32([0.01, 0.02])
    call = functools.partial(kernel.fused_quantize, fmt=nvfp4())
    expected = quantized(x, fmt=nvfp4(), tensor_scale=g)
    assert_same(jit(lambda x, g: call(x, tensor_scale=g))(x, g), expected, x)
    assert_same(jit(jax.vmap(lambda x, g: call(x, tensor_scale=g)))(x, g), expected, x)


@pytest.mark.smoke
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_to_a_kernel_on_each_platform(platform):
    known = {"tpu": {"tpu_custom_call"}, "cuda": set(_GPU_CUSTOM_CALLS)}[platform]

    def calls(fmt, dtype="bfloat16", on=platform):
        x = jax.ShapeDtypeStruct((256, 136), dtype)
        scale = jax.ShapeDtypeStruct((), jnp.float32) if fmt.has_tensor_scale else None
        f = lambda x, g: kernel.fused_quantize(x, fmt, g)
        found = re.findall(r"custom_call @([\w$.]+)", export_for(on, f, x, scale).mlir_module())
        return len([name for name in found if name in known])

    for fmt in (razer_e3m3(), mxfp4(), nf4(64)):
        assert calls(fmt) == 1
    assert calls(nvfp4(), "float32") == 1 and calls(nvfp4(), on="cpu") == 0
    # Triton rounds no floats; TPUs hold no float16.
    assert calls(int_group(4, 32)) == (platform == "tpu")
    assert calls(int_group(8, 32, scale="float16")) == 0
    assert calls(nvfp4(), "float16") == (platform == "cuda")


def test_bad_arguments_are_named():
    x = np.ones((128, 8), np.float32)
    for message, call in (
        ("tensor_scale: format 'nvfp4' needs one", lambda: kernel.fused_quantize(x, nvfp4())),
        ("tensor_scale: format 'mxfp4' has none", lambda: kernel.fused_quantize(x, mxfp4(), 1.0)),
        ("x: the kernel takes", lambda: kernel.fused_quantize(x[:64], mxfp4())),
        ("x: the kernel takes", lambda: kernel.fused_quantize(x, int_group(4, None))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
