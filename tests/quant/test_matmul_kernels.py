"""``qmatmul`` and its kernel: against numpy in float64, exact integers, derivatives, lowering."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fadex.core import export_for
from fadex.core.kernels import _GPU_CUSTOM_CALLS
from fadex.quant import (
    int_group,
    mxfp4,
    mxfp6,
    nf4,
    nvfp4,
    nvfp4_4o6,
    qmatmul,
    quantize_array,
    razer_e3m3,
    razer_e4m3,
)
from fadex.quant.kernels import w4a16
from fadex.quant.matmul import PREFILL_ROWS, _integer_dot_cpu, _integer_dot_wide

FORMS = {"tpu": w4a16.w4a16_tpu, "cuda": w4a16.w4a16_triton}
CALLS = {"tpu": {"tpu_custom_call"}, "cuda": set(_GPU_CUSTOM_CALLS)}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quantized = jit(quantize_array, static_argnames=("fmt", "axis", "layout"))
_dequantized = jit(lambda q: q.dequantize(jnp.float32))


@functools.cache
def weight(fmt, *shape, dtype="float32", **options):
    return quantized(normal(*shape).astype(jnp.dtype(dtype)), fmt=fmt, **options)


def described(fmt, *shape, dtype="float32", **options):
    """Shapes and dtypes of :func:`weight`, nothing computed."""
    call = functools.partial(quantize_array, fmt=fmt, **options)
    return jax.eval_shape(call, jax.ShapeDtypeStruct(shape, dtype))


def decoded(qw):
    return np.float64(_dequantized(qw))


@functools.cache
def _compiled(options):
    return jit(functools.partial(qmatmul, **dict(options)))


def multiplied(x, qw, **options):
    """``qmatmul``, compiled in a hurry."""
    return _compiled(tuple(options.items()))(x, qw)


def interpreted(form, x, qw, dtype=jnp.float32, **options):
    run = functools.partial(form, dtype=dtype, interpret=True, **options)
    return jit(run)(jnp.asarray(x), qw)


def assert_product(out, x, qw):
    """Within the error of a float32 sum, generous by the usual probabilistic argument."""
    assert out.dtype == jnp.float32
    x, w = np.float64(x), decoded(qw)
    bound = 8 * 2.0**-23 * (np.abs(x) @ np.abs(w)) + 1e-30
    assert (np.abs(out - x @ w) <= bound).all()


# --- the kernel


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        # K beyond a whole TPU block of 512: what hangs over is masked, NaN scales included.
        (nf4(64), (5, 640, 72)),
        (razer_e3m3(), (1, 256, 130)),
        (mxfp4(), (17, 128, 8)),
        pytest.param(nvfp4(), (3, 256, 24), marks=pytest.mark.smoke),
        (int_group(4, 128, symmetric=False, scale="float16"), (3, 256, 24)),
        (int_group(4, None), (2, 128, 24)),
    ],
    ids=lambda value: getattr(value, "name", "x".join(map(str, value))
                              if isinstance(value, tuple) else value),
)
def test_kernel_multiplies_by_what_is_stored(platform, fmt, shape):
    m, k, n = shape
    x, qw = normal(m, k, seed=1), weight(fmt, k, n)
    assert_product(interpreted(FORMS[platform], x, qw), x, qw)


def test_bytes_are_read_as_documented():
    # Stored bytes to product in numpy alone: planar nibbles, e2m1, e4m3, tensor scale.
    k, n = 256, 16
    qw, x = weight(nvfp4(), k, n), normal(4, k, seed=2)
    packed = np.asarray(qw.codes).reshape(k // 128, 64, n)
    codes = np.concatenate([packed & 15, packed >> 4], axis=1).reshape(k, n)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(codes & 8, -1, 1) * table[codes & 7]
    scales = np.asarray(qw.scales).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    dense = values * np.repeat(scales, 16, axis=0) * np.float64(qw.tensor_scale)
    np.testing.assert_array_equal(decoded(qw), np.float32(dense))
    for impl in ("xla", "interpret"):
        assert_product(multiplied(x, qw, impl=impl), x, qw)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_results_of_16_bits_are_rounded_once(platform):
    # Two bits of the element times four of the scale: bfloat16 holds every weight.
    w = normal(128, 8).astype(jnp.bfloat16)
    qw = quantized(w, fmt=razer_e4m3(), tensor_scale=1.0)
    x = normal(3, 128, seed=1).astype(jnp.bfloat16)
    out = interpreted(FORMS[platform], x, qw, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(out), np.float64(x) @ decoded(qw), rtol=2.0**-8,
                               atol=1e-5)


def test_many_rows_take_several_blocks():
    x, qw = normal(130, 128, seed=1), weight(mxfp4(), 128, 8)
    for form in FORMS.values():
        assert_product(interpreted(form, x, qw), x, qw)


def test_split_k_adds_up():
    x, qw = normal(2, 512, seed=1), weight(nvfp4(), 512, 8)
    assert_product(interpreted(w4a16.w4a16_triton, x, qw, splits=2), x, qw)
    assert w4a16.gpu_splits(8, 4096, 64) == 8  # K / 64 M
    assert w4a16.gpu_splits(1, 4096, 64) == 8  # enough programs
    assert w4a16.gpu_splits(64, 4096, 64) == 1
    assert (4096 * 43 // 128) % w4a16.gpu_splits(1, 4096 * 43, 1) == 0


def test_what_the_kernel_takes():
    serves = lambda fmt, *shape, dtype="float32", **kw: w4a16.serves(
        described(fmt, *shape, **kw), dtype
    )
    assert serves(nvfp4(), 128, 8) and serves(nvfp4_4o6(), 128, 8) and serves(nf4(64), 128, 8)
    assert serves(nvfp4(), 128, 8, dtype="bfloat16")
    assert not serves(nvfp4(), 128, 8, dtype="float64")
    assert not serves(nvfp4(), 64, 8) and not serves(nvfp4(), 128, 8, layout="stream")
    assert not serves(mxfp6(), 128, 8)
    assert not serves(int_group(4, 24), 384, 8)


# --- qmatmul


@pytest.mark.smoke
@pytest.mark.parametrize("fmt", [nvfp4(), mxfp6(), int_group(3, 16)], ids=lambda f: f.name)
def test_product_equals_that_with_the_decoded_weight(fmt):
    qw = weight(fmt, 100, 12)  # padded inside
    for shape in ((100,), (3, 100), (2, 3, 100)):
        assert_product(multiplied(normal(*shape, seed=1), qw), normal(*shape, seed=1), qw)


def test_result_dtype_is_that_of_the_decoded_product():
    plain = lambda x, q: jnp.matmul(x, q.dequantize())
    for x, w in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16"),
                 ("int32", "bfloat16"), ("float32", "bfloat16")):
        args = jax.ShapeDtypeStruct((2, 128), x), described(nvfp4(), 128, 4, dtype=w)
        assert jax.eval_shape(qmatmul, *args) == jax.eval_shape(plain, *args)
    x, qw = np.float64(normal(2, 128)), weight(nvfp4(), 128, 4)
    with jax.enable_x64(True):
        out = multiplied(x, qw)
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, x @ decoded(qw), rtol=1e-12, atol=1e-12)


@pytest.mark.smoke
def test_derivatives_are_those_of_the_product():
    x, qw = normal(3, 128, seed=1), weight(razer_e3m3(), 128, 8)
    dense, cotangent = decoded(qw), normal(3, 8, seed=2)
    options = ({"impl": "xla"}, {"impl": "interpret"}, {"activation": razer_e4m3()})

    @jit
    def everything(x, qw):
        loss = lambda x, o: jnp.sum(cotangent * qmatmul(x, qw, **o))
        _, forward = jax.jvp(lambda x: qmatmul(x, qw), (x,), (jnp.ones_like(x),))
        both = jax.grad(lambda x, q: qmatmul(x, q).sum(), (0, 1), allow_int=True)(x, qw)
        return [jax.grad(loss)(x, o) for o in options], forward, both[0], both[1].tensor_scale

    slopes, forward, left, right = everything(x, qw)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for slope in slopes:
        close(slope, cotangent @ dense.T)
    close(forward, np.ones_like(x) @ dense)
    # The weight is a constant, also when it is among the arguments.
    close(left, np.ones((3, 8)) @ dense.T)
    assert float(right) == 0


def test_experts_and_layers():
    qw, x = weight(nvfp4(), 3, 128, 128), normal(3, 2, 128, seed=1)
    w = decoded(qw)

    @jit
    def everything(x, qw):
        kernel = functools.partial(qmatmul, impl="interpret")
        deep, _ = jax.lax.scan(lambda h, q: (jnp.tanh(qmatmul(h, q)), None), x[0], qw)
        return (kernel(x, qw), jax.vmap(kernel)(x, qw), qmatmul(x, qw),
                jax.vmap(qmatmul)(x, qw)), kernel(x[0], qw), deep

    experts, repeated, deep = everything(x, qw)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for out in experts:
        close(out, np.einsum("emk,ekn->emn", np.float64(x), w))
    close(repeated, np.einsum("mk,ekn->emn", np.float64(x[0]), w))
    h = np.float64(x[0])
    for layer in w:
        h = np.tanh(h @ layer)
    close(deep, h)


# --- activations


def test_activations_are_held_in_their_format():
    qw, x = weight(razer_e3m3(), 128, 8), normal(4, 128, seed=1)
    dense = normal(128, 8)
    formats = ((razer_e4m3(), None), (nvfp4(), 0.01), (int_group(8, None), None))

    @jit
    def everything(x, qw, dense):
        slope = jax.grad(lambda x: qmatmul(x, dense, activation=nvfp4()).sum())(x)
        return [qmatmul(x, qw, activation=f, activation_scale=s) for f, s in formats], qmatmul(
            x, dense, activation=nvfp4()
        ), slope

    outs, plain, slope = everything(x, qw, dense)
    held = [decoded(quantized(x, fmt=f, axis=-1, tensor_scale=s)) for f, s in formats]
    for out, values in zip(outs, held):
        np.testing.assert_allclose(out, values @ decoded(qw), rtol=1e-4, atol=1e-4)
    values = decoded(quantized(x, fmt=nvfp4(), axis=-1))
    np.testing.assert_allclose(plain, values @ dense, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope[0], dense.sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_integers_are_multiplied_exactly():
    # 127 * 127 * 2101 is odd and above 2^24: a float32 sum cannot hold it.
    rng = np.random.default_rng(0)
    w = rng.integers(-127, 128, (2101, 6))
    x = rng.integers(-127, 128, (3, 2101))
    w[:, 0], x[0] = 127, 127
    w[:, 1], x[0, 0] = -127, 126
    tensor, channel = int_group(8, "tensor"), int_group(8, None)
    totals = jit(lambda a, b: (_integer_dot_cpu(a, b, largest=1 << 14), _integer_dot_wide(a, b)))
    for total in totals(x.astype(np.int8), w.astype(np.int8)):
        np.testing.assert_array_equal(total, x @ w)
    qw = quantized(np.float32(w), fmt=tensor, tensor_scale=1.0)
    out = multiplied(np.float32(x), qw, activation=tensor, activation_scale=1.0)
    np.testing.assert_array_equal(out, np.float32(x @ w))
    # Scales of a row and of a column leave the sum.
    rows, columns = 2.0 ** rng.integers(-3, 4, (3, 1)), 2.0 ** rng.integers(-3, 4, 6)
    x[:, 0], w[0] = 127, 127
    qw = quantized(np.float32(w * columns), fmt=channel)
    x, exact = np.float32(x * rows), (x @ w) * rows * columns
    np.testing.assert_allclose(multiplied(x, qw, activation=channel), exact, rtol=2.0**-22)
    np.testing.assert_allclose(multiplied(x[0], qw, activation=channel), exact[0], rtol=2.0**-22)


# --- programs


def wide_floats(jaxpr, size):
    """Floating-point arrays of ``size`` elements or more made outside ``qmatmul``."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "qmatmul":
            continue
        found += [v.aval for v in eqn.outvars
                  if jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size >= size]
        for inner in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += wide_floats(inner, size)
    return found


def test_no_program_holds_a_decoded_weight_outside_the_product():
    x, qw = normal(3, 2, 128), weight(nvfp4(), 3, 128, 128)

    def loss(x, q, product=qmatmul):
        h, _ = jax.lax.scan(lambda h, q: (jnp.tanh(product(h, q)), None), x[0], q)
        return jnp.sum(h) + jnp.sum(jax.vmap(product)(x, q))

    programs = loss, jax.jit(jax.grad(loss)), jax.vmap(loss, (0, None))
    for f, arg in zip(programs, (x, x, x[None])):
        assert not wide_floats(jax.make_jaxpr(f)(arg, qw).jaxpr, 128 * 128)
    # The search finds what is there.
    bare = functools.partial(loss, product=lambda x, q: x @ q.dequantize())
    for f in (bare, jax.jit(jax.grad(bare))):
        assert wide_floats(jax.make_jaxpr(f)(x, qw).jaxpr, 128 * 128)


@pytest.mark.smoke
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_to_a_kernel_on_each_platform(platform):
    def calls(f, x, q, on=platform):
        found = re.findall(r"custom_call @([\w$.]+)", export_for(on, f, x, q).mlir_module())
        assert set(found) - {"Sharding"} <= CALLS[platform], found
        return len([name for name in found if name != "Sharding"])

    rows = lambda m, k=256, dtype="bfloat16": jax.ShapeDtypeStruct((m, k), dtype)
    for fmt in (razer_e3m3(), nf4(64), int_group(4, 32, symmetric=False)):
        assert calls(qmatmul, rows(3), described(fmt, 256, 136, dtype="bfloat16")) == 1
    qw = described(nvfp4(), 256, 136)
    assert calls(qmatmul, rows(PREFILL_ROWS), qw) == 1
    assert calls(qmatmul, rows(PREFILL_ROWS + 1), qw) == 0
    assert calls(functools.partial(qmatmul, impl="xla"), rows(3), qw) == 0
    assert calls(qmatmul, rows(3), qw, on="cpu") == 0
    assert calls(qmatmul, rows(3, 100), described(nvfp4(), 100, 12)) == 0
    stacked = described(nvfp4(), 2, 256, 136)
    experts = jax.ShapeDtypeStruct((2, 3, 256), jnp.float32)
    assert calls(qmatmul, experts, stacked) == calls(jax.vmap(qmatmul), experts, stacked) == 1
    slope = jax.grad(lambda x, q: jnp.sum(qmatmul(x, q) ** 2))
    assert calls(slope, rows(3), qw) == 1  # forwards; backwards the weight is decoded
    w4a4 = functools.partial(qmatmul, activation=razer_e4m3())
    assert calls(w4a4, rows(3), qw) == 1


def test_bad_arguments_are_named():
    x, qw = np.ones((2, 128), np.float32), weight(nvfp4(), 128, 8)
    for error, message, call in (
        (ValueError, "impl: expected", lambda: qmatmul(x, qw, impl="cuda")),
        (ValueError, "impl: the kernel", lambda: qmatmul(x, weight(mxfp6(), 128, 8),
                                                        impl="interpret")),
        (ValueError, "x: its last axis", lambda: qmatmul(jnp.ones((2, 64)), qw)),
        (ValueError, "x: its last axis", lambda: qmatmul(jnp.ones((2, 64)), jnp.ones((3, 4)))),
        (ValueError, "x: leading axes", lambda: qmatmul(jnp.ones((3, 2, 128)),
                                                        weight(nvfp4(), 2, 128, 8))),
        (ValueError, "x: expected at least", lambda: qmatmul(jnp.float32(1), qw)),
        (ValueError, "qw: expected block axis -2",
         lambda: qmatmul(x, weight(nvfp4(), 128, 16, axis=-1))),
        (ValueError, "qw: expected \\[...", lambda: qmatmul(x, jnp.ones(128))),
        (TypeError, "qw: expected a Quant", lambda: qmatmul(x, [1.0])),
        (TypeError, "x: expected an array", lambda: qmatmul(qw, qw)),
        (TypeError, "x: expected real", lambda: qmatmul(x * 1j, qw)),
        (TypeError, "x: expected floating", lambda: qmatmul(jnp.ones((2, 128), int), qw,
                                                            activation=nvfp4())),
        (TypeError, "activation: expected", lambda: qmatmul(x, qw, activation="nvfp4")),
        (ValueError, "activation_scale: needs", lambda: qmatmul(x, qw, activation_scale=1.0)),
        (ValueError, "activation_scale: format",
         lambda: qmatmul(x, qw, activation=mxfp4(), activation_scale=1.0)),
        (ValueError, "qw: the kernel takes", lambda: w4a16.w4a16(x, weight(mxfp6(), 128, 8))),
    ):
        with pytest.raises(error, match=message):
            call()
