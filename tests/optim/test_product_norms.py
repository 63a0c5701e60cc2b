"""Norms of whole trees, and the rules that give each parameter its norm."""

import functools
import re

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
    scion,
    tree_dual_norm,
    tree_lmo,
    tree_norm,
    tree_sharp,
    weight_dimension_numbers,
)

# Programs that run for a moment on a few numbers: nearly all of the time would be LLVM's.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
SPECS = {"w": NormSpec("spectral", radius=3.0, method="svd"), "b": NormSpec("linf", radius=0.5)}


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((3, 5)).astype(np.float32),
            "b": rng.standard_normal(4).astype(np.float32)}


def inner(a, b):
    return float(sum(np.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))


@functools.partial(jit, static_argnames=("specs", "product"))
def everything(specs, g, product):
    """Everything the tests below ask of a tree, from one program: compiling dominates here."""
    spec = SPECS if specs is None else specs
    step, up = tree_lmo(spec, g, product=product), tree_sharp(spec, g, product=product)
    size = functools.partial(tree_norm, spec, product=product)
    return tree_dual_norm(spec, g, product=product), step, up, size(step), size(up)


@pytest.mark.smoke
@pytest.mark.parametrize("product", ["max", "l2"])
def test_product_duals_lmos_and_sharp_operators_by_their_definitions(product):
    g = tree()
    dual, step, up, step_size, up_size = everything(None, g, product)
    sigma = np.linalg.svd(g["w"], compute_uv=False)
    parts = np.array([3 * np.sqrt(5 / 3) * sigma.sum(), 0.5 * np.abs(g["b"]).sum()])
    want = parts.sum() if product == "max" else np.sqrt((parts**2).sum())
    np.testing.assert_allclose(dual, want, rtol=1e-6)
    np.testing.assert_allclose(inner(g, step), -dual, rtol=1e-5)
    np.testing.assert_allclose(step_size, 1.0, rtol=1e-5)
    np.testing.assert_allclose(inner(g, up), dual**2, rtol=1e-5)
    np.testing.assert_allclose(up_size, dual, rtol=1e-5)
    # Nothing near or far has a larger ⟨g, x⟩ - ‖x‖²/2.
    objective = jit(jax.vmap(
        lambda x: sum(jnp.vdot(g[k], x[k]) for k in g) - tree_norm(SPECS, x, product=product)**2 / 2
    ))
    others = [jax.tree.map(lambda x, d, size=size: x + size * d, up, tree(seed + 1))
              for seed in range(40) for size in (0.1, 3.0)]
    values = objective(jax.tree.map(lambda *xs: np.stack(xs), up, *others))
    assert np.all(values[1:] < values[0])


@pytest.mark.parametrize("product", ["max", "l2"])
def test_stacked_layers_count_one_by_one(product):
    g = {"w": np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)}
    spec = NormSpec("spectral", radius=2.0, method="svd")
    apart = {str(i): g["w"][i] for i in range(3)}
    together, one = everything(spec, g, product), everything(spec, apart, product)
    np.testing.assert_allclose(together[0], one[0], rtol=1e-6)
    for a, b in zip(together[1:3], one[1:3]):
        for i in range(3):
            np.testing.assert_allclose(a["w"][i], b[str(i)], rtol=2e-5, atol=1e-5)


def test_zero_tiny_and_masked_gradients():
    zero = jax.tree.map(np.zeros_like, tree())
    for product in ("max", "l2"):
        dual, *steps, _, size = everything(None, zero, product)
        assert dual == 0 and size == 0 and not any(np.any(x) for x in jax.tree.leaves(steps))
        tiny = jax.tree.map(lambda x: np.float32(1e-30) * x, tree())
        np.testing.assert_allclose(everything(None, tiny, product)[0] * 1e30,
                                   everything(None, tree(), product)[0], rtol=1e-5)
    masked = tree() | {"b": optax.MaskedNode()}
    _, step, _, size, _ = everything(None, masked, "max")
    assert isinstance(step["b"], optax.MaskedNode)
    np.testing.assert_allclose(size, 1.0, rtol=1e-5)


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


def test_tables_are_neither_heads_nor_inputs():
    params = {"k": jnp.zeros((4, 8)), "l": jnp.zeros((8, 8)), "wte": jnp.zeros((50, 8))}
    specs = assign_norms(params)
    # The table is the last path, but the head is l; and with a table nothing is the input.
    assert specs["wte"].name == "per_input" and specs["l"].name == "linf"
    assert specs["k"] == NormSpec("spectral")
    # A name such as unembed holds "embed" and is the head nevertheless.
    specs = assign_norms({"wte": jnp.zeros((50, 8)), "unembed": {"kernel": jnp.zeros((8, 50))},
                          "zz": jnp.zeros((8, 8))})
    assert specs["unembed"]["kernel"] == NormSpec("linf", 10.0, scale="fan_in")
    assert specs["zz"] == NormSpec("spectral")
    specs = assign_norms({"patch_embed": {"kernel": jnp.zeros((4, 4, 3, 8))},
                          "head": jnp.zeros((8, 2))})
    assert specs["patch_embed"]["kernel"].name == "spectral_conv"
    specs = assign_norms({"patch_embed": {"kernel": jnp.zeros((48, 8))}, "head": jnp.zeros((8, 2))})
    assert specs["patch_embed"]["kernel"] == NormSpec("spectral", scale="max")


def test_behind_a_mask_only_a_name_makes_a_head():
    names = []

    def note(params):
        specs = assign_norms(params)
        names.append([s.name for s in jax.tree.leaves(specs)])
        return specs

    params = {"k": jnp.ones((4, 4)), "l": jnp.ones((4, 4)), "m": jnp.ones(4)}
    assert assign_norms(params)["l"].name == "linf"
    for opt in (optax.masked(scion(0.1, norm=note), {"k": True, "l": True, "m": False}),
                optax.partition({"x": scion(0.1, norm=note), "y": optax.sgd(0.1)},
                                {"k": "x", "l": "x", "m": "y"})):
        jax.eval_shape(opt.init, params)
    assert names and all(found == ["spectral", "spectral"] for found in names)
    masked = {"k": jnp.ones((4, 4)), "lm_head": jnp.ones((4, 4)), "m": optax.MaskedNode()}
    specs = assign_norms(masked)
    assert (specs["k"], specs["lm_head"].name) == (NormSpec("spectral"), "linf")


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
    # Leaves without dims follow the defaults: the head with its own radius, tables by rows.
    named = {"wte": jnp.ones((9, 4)), "mlp": jnp.ones((4, 6)), "head": jnp.ones((6, 9))}
    chosen = assign_norms(
        named, dims={"wte": None, "mlp": MuonDimensionNumbers(0, 1), "head": None}, radius=50.0,
        output_radius=3000.0)
    assert chosen["head"] == NormSpec("linf", 3000.0, scale="fan_in")
    assert chosen["wte"] == NormSpec("per_input", 50.0) and chosen["mlp"].name == "spectral"
    # The way back: Muon's update on the same set is ours up to its learning rate.
    assert weight_dimension_numbers(specs, params) == {
        "a": MuonDimensionNumbers((0,), (1, 2)), "w": None, "b": None}
    muon = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=MuonDimensionNumbers(0, (1, 2)))
    g = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    spec = NormSpec("spectral", scale="unit", dims=specs["a"].dims, steps=5, coefficients="muon")
    ours, theirs = jit(lambda g: (tree_lmo(spec, g), muon.update(g, muon.init(g))[0]))(g)
    np.testing.assert_allclose(-ours, theirs, atol=1e-5)
    with pytest.raises(TypeError, match="dims: expected MuonDimensionNumbers or None at 'w'"):
        assign_norms(params, dims={"a": None, "w": 3, "b": None})
    with pytest.raises(ValueError, match="dims: must have the structure of params"):
        assign_norms(params, dims={"a": None})
