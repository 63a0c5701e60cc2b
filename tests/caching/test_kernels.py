import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import weighted_sum
from fadex.caching.kernels import (
    weighted_sum_reference,
    weighted_sum_tpu,
    weighted_sum_triton,
)
from fadex.core import export_for

SHAPES = [
    ((3, 2, 5, 8, 4), (3,)),
    ((4, 6, 3, 16, 32), (6, 4)),  # a row of weights per site
    ((1, 7, 3), (1,)),  # ragged: not a multiple of a lane
    ((2, 2, 4099, 128), (2, 2)),  # ragged blocks
]


def arrays(history_shape, weight_shape, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0))
    history = jax.random.normal(keys[0], history_shape).astype(dtype)
    return jax.random.normal(keys[1], weight_shape), history


@pytest.mark.smoke
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_forms_agree_with_float64(shapes, dtype):
    weights, history = arrays(*shapes, dtype)
    h64, w64 = np.asarray(history, np.float64), np.asarray(weights, np.float64)
    w64 = np.moveaxis(w64, -1, 0).reshape(
        len(h64), *w64.shape[:-1], *[1] * (h64.ndim - weights.ndim)
    )
    expected = (w64 * h64).sum(0)
    scale = np.abs(w64 * h64).sum(0).max()
    tolerance = scale * (2e-6 if dtype == jnp.float32 else 8e-3)
    for form in (weighted_sum_tpu, weighted_sum_triton):
        out = form(weights, history, dtype, interpret=True)
        assert out.dtype == dtype and out.shape == history.shape[1:]
        assert np.abs(np.asarray(out, np.float64) - expected).max() <= tolerance
    out = weighted_sum(weights, history)
    assert np.abs(np.asarray(out, np.float64) - expected).max() <= tolerance


def test_result_dtype_is_free_and_accumulation_is_float32():
    history = jnp.full((3, 4), 1.0, jnp.bfloat16)
    out = weighted_sum(jnp.array([1.0, 2.0**-10, 2.0**-10]), history, jnp.float32)
    np.testing.assert_array_equal(out, 1.0 + 2.0**-9)


@pytest.mark.smoke
def test_gradients_both_ways():
    weights, history = arrays((3, 2, 8), (2, 3))
    history = history.reshape(3, 2, 8)
    reference = lambda w, h: jnp.einsum("gk,kgm->gm", w, h)
    loss = lambda fn: lambda w, h: jnp.sum(jnp.sin(fn(w, h)))
    for ours, theirs in zip(
        jax.grad(loss(weighted_sum), (0, 1))(weights, history),
        jax.grad(loss(reference), (0, 1))(weights, history),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    tangents = (jnp.ones_like(weights), jnp.cos(history))
    _, ours = jax.jvp(weighted_sum, (weights, history), tangents)
    _, theirs = jax.jvp(reference, (weights, history), tangents)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_vmap_over_weights_and_history():
    weights, history = arrays((5, 3, 2, 6), (5, 3))
    out = jax.vmap(weighted_sum)(weights, history)
    for i in range(5):
        np.testing.assert_allclose(
            out[i], weighted_sum_reference(weights[i], history[i], jnp.float32), rtol=1e-6
        )


@pytest.mark.smoke
@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "triton")])
@pytest.mark.parametrize("shapes", SHAPES[:3])
def test_lowers_to_a_kernel_on_each_platform(platform, call, shapes):
    weights, history = arrays(*shapes)
    assert call in export_for(platform, weighted_sum, weights, history).mlir_module()
    batched = jax.vmap(weighted_sum)
    stacked = (jnp.stack([weights] * 2), jnp.stack([history] * 2))
    assert call in export_for(platform, batched, *stacked).mlir_module()
    assert call not in export_for("cpu", weighted_sum, weights, history).mlir_module()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="weights: expected"):
        weighted_sum(jnp.ones(2), jnp.ones((3, 4)))
    with pytest.raises(ValueError, match="weights: expected"):
        weighted_sum(jnp.ones((5, 3)), jnp.ones((3, 4, 2)))
    with pytest.raises(ValueError, match="weights: expected"):
        weighted_sum(jnp.float32(1.0), jnp.ones((3, 4)))
