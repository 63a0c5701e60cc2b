import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.core import export_for
from fadex.models import gated_forecast
from fadex.models.kernels import gated_forecast_tpu, gated_forecast_triton

SHAPES = [(2, 16, 64, 3), (3, 7, 20, 1), (2, 1100, 96, 4)]


def arrays(batch, tokens, width, snapshots, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (batch, tokens, width)).astype(dtype)
    gate = jax.random.normal(keys[1], (batch, width)).astype(dtype)
    weights = jax.random.normal(keys[2], (snapshots,))
    history = jax.random.normal(keys[3], (snapshots, batch, tokens, width)).astype(dtype)
    return x, gate, weights, history


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_forms_agree_with_float64(shape, dtype):
    args = arrays(*shape, dtype=dtype)
    x, gate, weights, history = (np.asarray(a, np.float64) for a in args)
    expected = x + gate[:, None] * np.einsum("k,kbnd->bnd", weights, history)
    tolerance = np.abs(expected).max() * (2e-6 if dtype == jnp.float32 else 8e-3)
    for form in (
        gated_forecast,
        lambda *a: gated_forecast_tpu(*a, interpret=True),
        lambda *a: gated_forecast_triton(*a, interpret=True),
    ):
        out = form(*args)
        assert out.dtype == dtype
        assert np.abs(np.asarray(out, np.float64) - expected).max() <= tolerance


@pytest.mark.smoke
def test_a_site_is_read_in_place_out_of_the_stacked_cache():
    x, gate, _, _ = arrays(2, 1100, 96, 3)
    weights = jax.random.normal(jax.random.key(5), (4, 3))
    history = jax.random.normal(jax.random.key(6), (3, 4, *x.shape))
    for site in (0, 3):
        expected = gated_forecast(x, gate, weights[site], history[:, site])
        for form in (gated_forecast, functools.partial(gated_forecast_tpu, interpret=True),
                     functools.partial(gated_forecast_triton, interpret=True)):
            out = form(x, gate, weights, history, site=site)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    call = functools.partial(gated_forecast, site=3)
    for platform in ("tpu", "cuda"):
        text = export_for(platform, call, x, gate, weights, history).mlir_module()
        assert "stablehlo.slice" not in text and "dynamic_slice" not in text
    with pytest.raises(ValueError, match=r"site: must lie in \[0, 4\), got 4"):
        gated_forecast(x, gate, weights, history, site=4)


def test_gradients_match_the_plain_formula():
    args = arrays(*SHAPES[1])
    plain = lambda x, g, w, h: x + g[:, None] * jnp.einsum("k,kbnd->bnd", w, h)
    loss = lambda fn: lambda *a: jnp.sum(jnp.sin(fn(*a)))
    ours = jax.grad(loss(gated_forecast), (0, 1, 2, 3))(*args)
    theirs = jax.grad(loss(plain), (0, 1, 2, 3))(*args)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize(("platform", "call"), [("tpu", "tpu_custom_call"), ("cuda", "triton")])
def test_lowers_to_a_kernel_on_each_platform(platform, call):
    for shape in SHAPES:
        args = arrays(*shape)
        assert call in export_for(platform, gated_forecast, *args).mlir_module()
        assert call not in export_for("cpu", gated_forecast, *args).mlir_module()
    stacked = [jnp.stack([a, a]) for a in arrays(*SHAPES[0])]
    assert call in export_for(platform, jax.vmap(gated_forecast), *stacked).mlir_module()


def test_shapes_that_do_not_fit_are_refused():
    x, gate, weights, history = arrays(*SHAPES[0])
    with pytest.raises(ValueError, match="history: expected x"):
        gated_forecast(x, gate[:, :3], weights, history)
    with pytest.raises(ValueError, match="history: expected x"):
        gated_forecast(x, gate, weights[:2], history)
