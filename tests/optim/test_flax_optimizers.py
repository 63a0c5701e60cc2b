"""Our optimizers and norm rules on models of Flax: nnx and linen."""

import flax.linen as linen
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from fadex.optim import (
    NormSpec,
    accelegrad,
    accelegrad_eval_params,
    accelegrad_sharp,
    assign_norms,
)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.inner(x)))


class Iterates(nnx.Module):
    """Parameters with the names of an optimizer's own fields."""

    def __init__(self):
        self.y = nnx.Param(jnp.array([1.0, -2.0]))
        self.z = nnx.Param(jnp.array([0.5]))
        self.average = nnx.Param(jnp.array([3.0]))


@pytest.mark.smoke
def test_nnx_optimizer_trains_and_its_model_is_judged_at_the_geometry_iterate():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 3)).astype(np.float32)
    target = np.tanh(x @ np.array([[1.0], [-1.0], [0.5]])).astype(np.float32)
    model = Net(nnx.Rngs(0))
    opt = nnx.Optimizer(
        model, accelegrad_sharp(0.05, norm="linf", coupling=0.1, anchor_learning_rate=0.05),
        wrt=nnx.Param)
    loss = lambda model: jnp.mean((model(x) - target) ** 2)

    @nnx.jit
    def train(model, opt):
        value, grads = nnx.value_and_grad(loss)(model)
        opt.update(model, grads)
        return value

    first = float(train(model, opt))
    for _ in range(60):
        train(model, opt)
    params = nnx.state(model, nnx.Param)
    judged = accelegrad_eval_params(opt.opt_state, params)
    assert jax.tree.structure(judged) == jax.tree.structure(params)
    iterate = optax.tree.get(nnx.as_pure(opt.opt_state), "y")
    np.testing.assert_array_equal(
        judged["inner"]["kernel"].get_value(), iterate["inner"]["kernel"])
    assert np.any(judged["inner"]["kernel"].get_value() != params["inner"]["kernel"].get_value())
    nnx.update(model, judged)
    np.testing.assert_array_equal(model.inner.kernel.get_value(), iterate["inner"]["kernel"])
    assert float(loss(model)) < 0.1 * first


def test_parameters_called_like_the_iterates_are_told_apart():
    model = Iterates()
    opt = nnx.Optimizer(model, accelegrad(1.0, average=True), wrt=nnx.Param)

    @nnx.jit
    def train(model, opt):
        opt.update(model, nnx.grad(
            lambda m: 0.5 * (jnp.sum(m.y**2) + jnp.sum(m.z**2) + m.average[0] ** 2))(model))

    train(model, opt)
    train(model, opt)
    params = nnx.state(model, nnx.Param)
    state = nnx.as_pure(opt.opt_state)
    for which in ("y", "average"):
        found = accelegrad_eval_params(opt.opt_state, params, which)
        for name in ("y", "z", "average"):
            np.testing.assert_array_equal(
                found[name].get_value(), getattr(state, which)[name], err_msg=f"{which} of {name}")
    # The same without Flax.
    plain = {name: params[name].get_value() for name in ("y", "z", "average")}
    transform = accelegrad_sharp(0.1, norm="linf")
    _, after = jax.jit(lambda p: transform.update(p, transform.init(p), p))(plain)
    found = accelegrad_eval_params(after, plain)
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, after.y[name])


def test_groups_of_a_partition_are_found_together_and_two_states_for_one_leaf_are_refused():
    params = {"a": jnp.array([1.0, -1.0]), "b": jnp.array([2.0]), "c": jnp.ones(2)}
    one, two = (accelegrad_sharp(rate, norm="linf", coupling=0.5) for rate in (0.1, 0.2))
    opt = optax.partition({"one": one, "two": two, "sgd": optax.sgd(0.1)},
                          {"a": "one", "b": "two", "c": "sgd"})
    _, state = jax.jit(lambda p: opt.update(p, opt.init(p), p))(params)
    found = accelegrad_eval_params(state, params)
    # From x_0 the geometry step is γ along the signs: s‖g‖ >= 1 clips nothing here.
    np.testing.assert_allclose(found["a"], [0.9, -0.9], rtol=1e-6)
    np.testing.assert_allclose(found["b"], [1.8], rtol=1e-6)
    np.testing.assert_array_equal(found["c"], params["c"])
    both = (one.init(params), two.init({"a": params["a"]}))
    with pytest.raises(ValueError, match="two AcceleGrad states hold 'a'"):
        accelegrad_eval_params(both, params)


# -------------------------------------------------------------------------------- norm rules


def kinds(params):
    """{path: NormSpec} of the default rules, by the leaves' own paths."""
    specs = assign_norms(params)
    return {"/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path): spec
            for path, spec in jax.tree_util.tree_leaves_with_path(specs)}


SPLIT, JOIN = MuonDimensionNumbers((-3,), (-2, -1)), MuonDimensionNumbers((-3, -2), (-1,))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
        return linen.Dense(5, name="head")(x)


class Stack(linen.Module):
    @linen.compact
    def __call__(self, x):
        attend = lambda module, x: (module(x), None)
        layers = linen.scan(attend, variable_axes={"params": 0}, split_rngs={"params": True},
                            length=3)
        x, _ = layers(linen.MultiHeadDotProductAttention(num_heads=2, name="layers"), x)
        return linen.Dense(5, name="head")(x)


@pytest.mark.parametrize("module", [Block, Stack])
def test_attention_kernels_of_linen_join_their_heads(module):
    init = lambda key: module().init(key, jnp.zeros((1, 4, 6)))["params"]
    params = jax.eval_shape(init, jax.random.key(0))
    specs = kinds(params)
    inner = "attention" if module is Block else "layers"
    lead = () if module is Block else (3,)
    for name in ("query", "key", "value"):
        assert params[inner][name]["kernel"].shape == (*lead, 6, 2, 3)
        found = specs[f"{inner}/{name}/kernel"]
        assert (found.name, found.dims) == ("spectral", SPLIT)
    assert params[inner]["out"]["kernel"].shape == (*lead, 2, 3, 6)
    assert specs[f"{inner}/out/kernel"].dims == JOIN
    assert specs["head/kernel"] == NormSpec("linf", 10.0, scale="fan_in")
    assert specs["head/bias"].name == "rms"


def test_attention_kernels_of_nnx_join_their_heads_and_modules_are_named_alike():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.inner = nnx.Linear(6, 8, rngs=rngs)
            self.head = nnx.Linear(8, 2, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    specs = assign_norms(state)
    of = lambda *path: next(
        s for p, s in jax.tree_util.tree_leaves_with_path(specs)
        if all(f"'{part}'" in jax.tree_util.keystr(p) for part in path))
    assert state["attention"]["query"]["kernel"].shape == (6, 2, 3)
    for name in ("query", "key", "value"):
        assert of("attention", name, "kernel").dims == SPLIT
    assert of("attention", "out", "kernel").dims == JOIN
    assert of("inner", "kernel").name == "spectral" and of("head", "kernel").name == "linf"
    assert of("inner", "bias").name == "rms"
