"""Linear and Embed on quantized parameters: same apply, packed weights, no dense copy outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.models import DIGITS_CONFIG, DIGITS_SHAPE, from_nnx
from fadex.models.dit import DiT
from fadex.models.layers import Embed, Linear
from fadex.quant import (
    QuantizedArray,
    Site,
    calibrate_activations,
    dequantize,
    int_group,
    nvfp4,
    quantize_array,
    razer_e3m3,
    razer_e4m3,
)
from fadex.quant import quantize as quantize_eagerly

quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def quantize(tree, recipe):
    return quick(lambda tree: quantize_eagerly(tree, recipe))(tree)  # one program for all leaves


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = Embed(40, 64, rngs=rngs)
        self.up = Linear(64, 256, rngs=rngs)
        self.down = Linear(256, 48, rngs=rngs)

    def __call__(self, index):
        return self.down(jnp.tanh(self.up(self.embed(index))))


@pytest.fixture(scope="module")
def net():
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return lambda params, index: nnx.merge(graph, params)(index), state


INDEX = jnp.arange(12).reshape(3, 4)


def inner_jaxprs(jaxpr, name=""):
    """Every equation with the names of the programs around it."""
    for eqn in jaxpr.eqns:
        yield name, eqn
        for value in eqn.params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from inner_jaxprs(sub, f"{name}/{eqn.params.get('name', '')}")


@pytest.mark.smoke
def test_a_quantized_model_equals_the_dense_model_of_its_values(net):
    apply, state = net
    q = quantize(state, [("embed/**", nvfp4()), ("**/kernel", razer_e3m3())])
    assert isinstance(q["up"]["kernel"].get_value(), QuantizedArray)
    assert q["embed"]["embedding"].get_value().axis == -1
    got = quick(apply)(q, INDEX)
    np.testing.assert_allclose(got, quick(apply)(quick(dequantize)(q), INDEX), rtol=2e-5, atol=1e-6)
    assert np.abs(got - apply(state, INDEX)).max() > 1e-3  # it is not the float model


def test_no_dense_weight_appears_outside_qmatmul(net):
    apply, state = net
    dense = {(64, 256), (256, 48), (40, 64)}
    shapes = lambda params, inside: {
        tuple(out.aval.shape)
        for name, eqn in inner_jaxprs(jax.make_jaxpr(apply)(params, INDEX).jaxpr)
        for out in (*eqn.outvars, *eqn.invars)
        if hasattr(out, "aval") and ("qmatmul" in name) == inside
        and jnp.issubdtype(out.aval.dtype, jnp.floating)
    }
    q = quantize(state, [("embed/**", nvfp4()), ("**/kernel", nvfp4())])
    assert not dense & shapes(q, False)
    # The check sees what it should see.
    assert shapes(state, False) >= dense
    assert {(64, 256), (256, 48)} <= shapes(q, True)


def test_columns_of_a_quantized_kernel_are_those_of_the_whole():
    layer = Linear(64, 96, rngs=nnx.Rngs(1))
    layer.kernel.set_value(quantize_array(layer.kernel[...], nvfp4()))
    x = jax.random.normal(jax.random.key(0), (5, 64))
    np.testing.assert_allclose(layer.columns(x, 32, 80), layer(x)[:, 32:80], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [-1, -2])
def test_looked_up_rows_are_those_of_the_dequantized_table(axis):
    table = Embed(40, 64, rngs=nnx.Rngs(0))
    q = quantize_array(table.embedding[...], nvfp4(), axis=axis)
    table.embedding.set_value(q)
    np.testing.assert_array_equal(table(INDEX), q.dequantize()[INDEX])


def test_activations_are_quantized_where_a_site_says_so(net):
    apply, state = net
    w4a4 = quantize(state, [("**/kernel", Site(razer_e3m3(), razer_e4m3())), ("**", None)])
    got = quick(apply)(w4a4, INDEX)
    # The same by hand, from the definition.
    h = state["embed"]["embedding"][...][INDEX]
    for name in ("up", "down"):
        a = quantize_array(h, razer_e4m3(), axis=-1).dequantize()
        h = a @ w4a4[name]["kernel"].get_value().weight.dequantize()
        h = jnp.tanh(h) if name == "up" else h
    np.testing.assert_allclose(got, h, rtol=1e-4, atol=1e-5)


def test_static_scales_come_from_examples_and_serve_w8a8(net):
    apply, state = net
    int8 = Site(int_group(8, None), int_group(8, "tensor"))
    q = quantize(state, [("**/kernel", int8), ("**", None)])
    static = calibrate_activations(apply, q, [INDEX, INDEX + 12])
    seen = max(float(jnp.abs(state["embed"]["embedding"][...][i]).max())
               for i in (INDEX, INDEX + 12))
    np.testing.assert_allclose(static["up"]["kernel"].get_value().scale, seen / 127, rtol=1e-6)
    dense = apply(state, INDEX)
    for params in (q, static):
        np.testing.assert_allclose(quick(apply)(params, INDEX), dense, atol=0.03)


def test_the_diffusion_transformer_runs_on_packed_weights():
    model = DiT(DIGITS_CONFIG, rngs=nnx.Rngs(0))
    denoiser, params = from_nnx(model)
    q = quantize(params, [("**/kernel", nvfp4()), ("**", None)])
    count = sum(isinstance(n, QuantizedArray)
                for n in jax.tree.leaves(q, is_leaf=lambda n: isinstance(n, QuantizedArray)))
    assert count >= 8
    x = jax.random.normal(jax.random.key(0), (2, *DIGITS_SHAPE))
    args = (x, jnp.full((2,), 0.5), jnp.array([1, 2]))
    run = quick(denoiser.apply)
    dense = run(quick(dequantize)(q), *args)
    np.testing.assert_allclose(run(q, *args), dense, rtol=1e-3, atol=1e-4)
