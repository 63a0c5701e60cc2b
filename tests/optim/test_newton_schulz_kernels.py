"""Kernels of the Newton-Schulz iteration: against float64, and lowered for TPU and CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.core import export_for
from fadex.core.kernels import _GPU_CUSTOM_CALLS
from fadex.optim import polar_factor
from fadex.optim.kernels import newton_schulz as kernels
from fadex.optim.newton_schulz_coefficients import resolve_coefficients

TABLE = tuple(map(tuple, resolve_coefficients("polar_express", 2).tolist()))
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
RESIDENT = {
    "tpu": kernels.newton_schulz_resident_tpu, "cuda": kernels.newton_schulz_resident_triton
}
SYMMETRIC = {
    "tpu": functools.partial(kernels.symmetric_product_tpu, tile=128),
    "cuda": kernels.symmetric_product_triton,
}

KERNEL_CALLS = {"tpu": {"tpu_custom_call"}, "cuda": set(_GPU_CUSTOM_CALLS)}


def normal(*shape, dtype="float32", seed=0):
    """Drawn by numpy and rounded to ``dtype``."""
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def unit(x):
    wide = np.asarray(x, np.float64)
    return (wide / np.linalg.norm(wide, axis=(1, 2), keepdims=True)).astype(x.dtype)


def iterated(x):
    """The iteration in float64."""
    x = np.asarray(x, np.float64)
    for a, b, c in TABLE:
        gram = x @ x.swapaxes(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.smoke
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 20, 50), "float32"), ((1, 33, 100), "bfloat16"), ((2, 64, 64), "float16")],
)
def test_resident_iteration_agrees_with_float64(platform, shape, dtype):
    x = unit(normal(*shape, dtype=dtype))
    out = RESIDENT[platform](x, TABLE, interpret=True)
    plain = jax.jit(kernels.newton_schulz_reference, static_argnums=1)(x, TABLE)
    assert out.dtype == plain.dtype == jnp.dtype(dtype) and out.shape == shape
    for got in (out, plain):
        assert np.abs(np.asarray(got, np.float64) - iterated(x)).max() <= TOLERANCE[dtype]


@pytest.mark.smoke
@pytest.mark.parametrize("platform", ["tpu", "cuda", "reference"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 150, 70), "float32"), ((1, 260, 130), "bfloat16")]
)
def test_symmetric_product_agrees_with_float64(platform, shape, dtype):
    form = kernels.symmetric_product_reference
    if platform != "reference":
        form = functools.partial(SYMMETRIC[platform], interpret=True)
    x = normal(*shape, dtype=dtype)
    square = normal(shape[0], shape[1], shape[1], dtype=dtype, seed=1)
    square = square + square.swapaxes(1, 2)
    bare, out = jax.jit(lambda x, y: (form(x), form(x, y, scale=-0.5, weight=2.0)))(x, square)
    wide, addend = np.float64(x), np.float64(square)
    product = wide @ wide.swapaxes(1, 2)
    for got, expected in ((bare, product), (out, -0.5 * product + 2 * addend)):
        assert got.dtype == jnp.dtype(dtype)
        bound = TOLERANCE[dtype] * np.abs(expected).max()
        assert np.abs(np.float64(got) - expected).max() <= bound
        np.testing.assert_array_equal(got, np.asarray(got).swapaxes(1, 2))


def test_symmetric_product_in_halves_agrees_with_float64():
    # The form in blocks that the plain iteration takes from 512 rows on.
    x = normal(kernels._HALVES_FROM + 1, 9)
    expected = np.float64(x) @ np.float64(x).T
    got = jax.jit(kernels.gram_product)(x)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (kernels.newton_schulz_tpu, (1, 64, 130)),
        (kernels.newton_schulz_tpu, (1, 20, 50)),
        (kernels.newton_schulz_triton, (2, 40, 50)),
        (kernels.newton_schulz_triton, (1, 20, 150)),
    ],
)
def test_every_choice_by_size_is_the_same_iteration(form, shape):
    x = unit(normal(*shape))
    got = form(jnp.asarray(x), TABLE, interpret=True)
    assert np.abs(np.asarray(got, np.float64) - iterated(x)).max() <= 2e-5


def test_iteration_around_the_symmetric_product():
    x = unit(normal(1, 70, 40))
    product = functools.partial(kernels.symmetric_product_triton, interpret=True)
    got = jax.jit(lambda x: kernels._with_symmetric_product(x, TABLE, product))(x)
    assert np.abs(np.float64(got) - iterated(x)).max() <= 2e-5


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("platform", "kernel", "plain"),
    [
        # Resident and symmetric forms, two of these a step; and the sizes left to XLA.
        ("tpu", {(64, 128): 1, (3, 65, 300): 1, (1024, 1536): 4}, [(20, 10)]),
        ("cuda", {(32, 64): 1, (3, 60, 70): 1, (576, 640): 4}, [(128, 128), (65, 70), (64, 64)]),
    ],
)
def test_lowers_to_a_kernel_on_each_platform(platform, kernel, plain):
    def calls(f, shape, dtype=jnp.float32, on=platform):
        text = export_for(on, f, jax.ShapeDtypeStruct(shape, dtype)).mlir_module()
        found = [name for name in re.findall(r"custom_call @([\w$.]+)", text)
                 if name != "Sharding"]
        # A name alone proves nothing: modules mention their dialect without a call, too.
        assert set(found) <= KERNEL_CALLS[platform], found
        return len(found)

    # "auto" too, since no side is eight times the other.
    first = next(iter(kernel))
    pallas = functools.partial(polar_factor, method="pallas", steps=2)
    auto = functools.partial(polar_factor, steps=2)
    assert {shape: calls(pallas, shape, jnp.bfloat16) for shape in kernel} == kernel
    assert calls(auto, first, jnp.bfloat16) == calls(auto, first) == 1
    assert calls(auto, first, on="cpu") == 0
    assert calls(jax.vmap(auto), (2, *first)) == 1
    assert [calls(auto, shape) for shape in plain] == [0] * len(plain)
    # Coefficients in an array that is known count as constants.
    table = functools.partial(polar_factor, coefficients=jnp.array(TABLE))
    assert calls(table, first) == 1


def test_budgets_hold_the_documented_sizes():
    fits = kernels.fits_tpu_resident
    assert fits(512, 512, jnp.float32) and fits(512, 1024, jnp.bfloat16)
    assert not fits(1024, 1024, jnp.float32) and not fits(512, 2048, jnp.bfloat16)
    fits = kernels.fits_triton_resident
    assert fits(64, 128, jnp.bfloat16) and not fits(65, 128, jnp.bfloat16)
    assert fits(32, 64, jnp.float32) and not fits(64, 128, jnp.float32)
