"""Norms of whole trees, and the rules that give each parameter its norm."""

import re

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from fadex.optim import (
    NormSpec,
    assign_norms,
    broadcast_specs,
    dual_norm,
    norm,
    tree_dual_norm,
    tree_lmo,
    tree_norm,
    tree_sharp,
    weight_dimension_numbers,
)

SPECS = {"w": NormSpec("spectral", radius=3.0, method="svd"), "b": NormSpec("linf", radius=0.5)}


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32),
            "b": jnp.asarray(rng.standard_normal(4), jnp.float32)}


def inner(a, b):
    return float(sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))


@pytest.mark.smoke
@pytest.mark.parametrize("product", ["max", "l2"])
def test_product_duals_lmos_and_sharp_operators_by_their_definitions(product):
    g = tree()
    parts = np.array([float(dual_norm(SPECS[k], g[k])) * SPECS[k].radius for k in g])
    want = parts.sum() if product == "max" else np.sqrt((parts**2).sum())
    dual = float(tree_dual_norm(SPECS, g, product=product))
    np.testing.assert_allclose(dual, want, rtol=1e-6)
    step = tree_lmo(SPECS, g, product=product)
    np.testing.assert_allclose(inner(g, step), -dual, rtol=1e-5)
    np.testing.assert_allclose(tree_norm(SPECS, step, product=product), 1.0, rtol=1e-5)
    up = tree_sharp(SPECS, g, product=product)
    np.testing.assert_allclose(inner(g, up), dual**2, rtol=1e-5)
    np.testing.assert_allclose(tree_norm(SPECS, up, product=product), dual, rtol=1e-5)
    # Nothing near or far has a larger ⟨g, x⟩ - ‖x‖²/2.
    objective = jax.jit(
        lambda x: sum(jnp.vdot(g[k], x[k]) for k in g) - tree_norm(SPECS, x, product=product)**2 / 2
    )
    best = float(objective(up))
    for seed in range(40):
        for size in (0.1, 3.0):
            other = jax.tree.map(lambda x, d, size=size: x + size * d, up, tree(seed + 1))
            assert float(objective(other)) < best


def test_stacked_layers_count_one_by_one():
    g = {"w": jax.random.normal(jax.random.key(0), (3, 4, 5))}
    spec = NormSpec("spectral", radius=2.0, method="svd")
    apart = {str(i): g["w"][i] for i in range(3)}
    for product in ("max", "l2"):
        np.testing.assert_allclose(
            tree_dual_norm(spec, g, product=product), tree_dual_norm(spec, apart, product=product),
            rtol=1e-6)
        for fn in (tree_lmo, tree_sharp):
            together, one = fn(spec, g, product=product), fn(spec, apart, product=product)
            for i in range(3):
                np.testing.assert_allclose(together["w"][i], one[str(i)], rtol=2e-5, atol=1e-5)


def test_zero_tiny_and_masked_gradients():
    zero = jax.tree.map(jnp.zeros_like, tree())
    for product in ("max", "l2"):
        assert tree_dual_norm(SPECS, zero, product=product) == 0
        assert not any(np.any(x) for x in jax.tree.leaves(tree_lmo(SPECS, zero, product=product)))
        tiny = jax.tree.map(lambda x: 1e-30 * x, tree())
        np.testing.assert_allclose(
            tree_dual_norm(SPECS, tiny, product=product) * 1e30,
            tree_dual_norm(SPECS, tree(), product=product), rtol=1e-5)
    masked = tree() | {"b": optax.MaskedNode()}
    step = tree_lmo(SPECS, masked)
    assert isinstance(step["b"], optax.MaskedNode)
    np.testing.assert_allclose(norm(SPECS["w"], step["w"]), 3.0, rtol=1e-5)


def test_one_specification_may_stand_for_a_branch():
    params = {"a": {"x": jnp.ones((2, 2)), "y": jnp.ones((2, 3))}, "b": jnp.ones(2)}
    full = broadcast_specs({"a": NormSpec("spectral"), "b": "l2"}, params)
    assert full["a"]["y"].name == "spectral" and full["b"] == NormSpec("l2")
    with pytest.raises(ValueError, match="norm: the tree of specifications must have"):
        broadcast_specs({"a": "l2", "c": "l2"}, params)
    with pytest.raises(TypeError, match="norm: expected a NormSpec .* at 'b', got 3.0"):
        broadcast_specs({"a": "l2", "b": 3.0}, params)
    with pytest.raises(ValueError, match=r"norm of 'b': the norm 'spectral' needs a matrix"):
        broadcast_specs("spectral", params)
    with pytest.raises(ValueError, match="product: expected one of"):
        tree_dual_norm("l2", params, product="sum")


# ------------------------------------------------------------------------------------- rules


def transformer():
    z = jnp.zeros
    block = {"attn": {"qkv": {"kernel": z((8, 24))}, "out": {"kernel": z((8, 8))}},
             "norm": {"scale": z(8)}}
    return {"embed": {"embedding": z((50, 8))}, "layers": {"0": block, "10": block, "2": block},
            "head": {"kernel": z((8, 50)), "bias": z(50)}}


def test_default_rules_on_a_transformer():
    specs = assign_norms(transformer(), radius=50.0, output_radius=3000.0, steps=5)
    assert specs["embed"]["embedding"] == NormSpec("per_input", 50.0)
    assert specs["layers"]["2"]["attn"]["qkv"]["kernel"] == NormSpec("spectral", 50.0, steps=5)
    assert specs["layers"]["10"]["norm"]["scale"] == NormSpec("rms", 50.0)
    assert specs["head"]["kernel"] == NormSpec("linf", 3000.0, scale="fan_in")


def test_default_rules_without_names_go_by_natural_order():
    params = {f"dense_{i}": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)} for i in range(12)}
    specs = assign_norms(params)
    assert specs["dense_0"]["kernel"] == NormSpec("spectral", scale="max")
    assert specs["dense_9"]["kernel"] == NormSpec("spectral")
    assert specs["dense_11"]["kernel"].name == "linf"  # the last in natural, not in text order
    assert assign_norms({"w": jnp.zeros((4, 4))})["w"].name == "spectral"  # alone: no head
    conv = assign_norms({"conv": {"kernel": jnp.zeros((3, 4, 8))}, "k": jnp.zeros((3, 3, 4, 8)),
                         "stack": jnp.zeros((6, 4, 8)), "z": jnp.zeros((8, 2))})
    assert conv["conv"]["kernel"].name == conv["k"].name == "spectral_conv"
    assert conv["stack"].name == "spectral" and conv["z"].name == "linf"


def test_nnx_modules_and_abstract_shapes_are_named_alike():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 8, rngs=rngs)
            self.head = nnx.Linear(8, 2, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    specs = assign_norms(state)
    kinds = {jax.tree_util.keystr(p): s.name for p, s in jax.tree_util.tree_leaves_with_path(specs)}
    of = lambda *parts: next(n for p, n in kinds.items() if all(x in p for x in parts))
    assert of("inner", "kernel") == "spectral" and of("head", "kernel") == "linf"
    assert of("inner", "bias") == "rms"


def test_rules_of_ones_own_win_in_order_and_must_cover_everything():
    params = transformer()
    rules = [("head/kernel$", NormSpec("per_output")), (re.compile("kernel"), NormSpec("spectral"))]
    with pytest.raises(ValueError, match="no pattern matches .embed/embedding. of shape"):
        assign_norms(params, rules)
    specs = assign_norms(params, [*rules, (".*", NormSpec("rms"))])
    assert specs["head"]["kernel"].name == "per_output"
    assert specs["layers"]["0"]["attn"]["out"]["kernel"].name == "spectral"
    assert specs["embed"]["embedding"].name == "rms"
    with pytest.raises(ValueError, match="norm of 'head/bias': the norm 'spectral' needs a matrix"):
        assign_norms(params, [(".*", NormSpec("spectral"))])
    with pytest.raises(ValueError, match="radius: must lie in"):
        assign_norms(params, radius=0.0)


def test_muons_dimension_numbers_choose_the_matrices():
    params = {"a": jnp.ones((4, 2, 3)), "w": jnp.ones((4, 6)), "b": jnp.ones(3)}
    dims = {"a": MuonDimensionNumbers(0, (1, 2)), "w": None, "b": None}
    for given in (dims, lambda p: dims):
        specs = assign_norms(params, dims=given, steps=5, coefficients="muon")
        assert specs["a"] == NormSpec("spectral", scale="max", steps=5, coefficients="muon",
                                      dims=MuonDimensionNumbers((0,), (1, 2)))
        assert specs["w"] == NormSpec("linf", 10.0, scale="fan_in") and specs["b"].name == "rms"
    # The way back: Muon's update on the same set is ours up to its learning rate.
    assert weight_dimension_numbers(specs, params) == {
        "a": MuonDimensionNumbers((0,), (1, 2)), "w": None, "b": None}
    muon = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=MuonDimensionNumbers(0, (1, 2)))
    g = jax.random.normal(jax.random.key(0), (4, 2, 3))
    theirs, _ = muon.update(g, muon.init(g))
    spec = NormSpec("spectral", scale="unit", dims=specs["a"].dims, steps=5, coefficients="muon")
    np.testing.assert_allclose(-tree_lmo(spec, g), theirs, atol=1e-5)
    with pytest.raises(TypeError, match="dims: expected MuonDimensionNumbers or None at 'w'"):
        assign_norms(params, dims={"a": None, "w": 3, "b": None})
    with pytest.raises(ValueError, match="dims: must have the structure of params"):
        assign_norms(params, dims={"a": None})
