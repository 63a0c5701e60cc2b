"""What people do with quantized trees: whole models, iteration, odd keys, training beside."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fadex.models import DIGITS_CONFIG, DIGITS_SHAPE, from_nnx
from fadex.models.dit import DiT
from fadex.models.layers import Embed, Linear
from fadex.quant import (
    QuantizedArray,
    Recipe,
    Site,
    bits_per_weight,
    calibrate_activations,
    combine_quantized,
    fp8,
    from_state,
    int_group,
    mxfp4,
    mxfp6,
    mxfp8,
    nf4,
    nvfp4,
    partition_quantized,
    quantization_report,
    quantize,
    quantize_array,
    razer_e3m3,
    shardings_for,
    site_matmul,
    to_qwix,
    to_state,
)

RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 32)).astype(np.float32)
EXPERTS = np.stack([W, 2 * W])


def packed(tree):
    return [n for n in jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, QuantizedArray))
            if isinstance(n, QuantizedArray)]


def test_a_format_alone_serves_a_model_with_stacked_layers():
    denoiser, params = from_nnx(DiT(DIGITS_CONFIG, rngs=nnx.Rngs(0)))
    q = jax.eval_shape(lambda p: quantize(p, nvfp4()), params)
    assert len(packed(q)) >= 8
    args = (jnp.ones((1, *DIGITS_SHAPE)), jnp.full((1,), 0.5), jnp.array([1]))
    assert jax.eval_shape(denoiser.apply, q, *args).shape == (1, *DIGITS_SHAPE)


def test_stacked_biases_and_gains_stay_with_a_format_alone():
    tree = {"kernel": jnp.ones((12, 64, 64)), "bias": jnp.ones((12, 128)),
            "norm": {"scale": jnp.ones((12, 128))}}
    q = quantize(tree, nvfp4())
    assert isinstance(q["kernel"], QuantizedArray)
    assert q["bias"] is tree["bias"] and q["norm"]["scale"] is tree["norm"]["scale"]
    # A rule that names them is obeyed.
    assert isinstance(quantize(tree, [("bias", nvfp4())])["bias"], QuantizedArray)


def test_iteration_ends_and_indices_are_checked():
    q = quantize_array(EXPERTS, nvfp4())
    assert len(q) == 2 and len(list(q)) == 2
    np.testing.assert_array_equal(list(q)[1].dequantize(), q[1].dequantize())
    np.testing.assert_array_equal(q[-1].dequantize(), q[1].dequantize())
    with pytest.raises(IndexError, match="5 is out of range"):
        q[5]
    with pytest.raises(IndexError, match="those of the matrix"):
        next(iter(quantize_array(W, nvfp4())))


@pytest.mark.parametrize("fmt", [razer_e3m3(), nvfp4(scale="e3m3"), int_group(8, "tensor")],
                         ids=lambda f: f.name)
def test_rows_out_of_range_are_nan_as_in_a_dense_table(fmt):
    q = quantize_array(W, fmt, axis=-1)
    index = jnp.array([[63, 64], [-1, -65]])
    want = jnp.take(q.dequantize(), index, axis=0)
    np.testing.assert_array_equal(q.take(index), want)
    assert np.isnan(want[0, 1]).all() and np.isfinite(want[1, 0]).all()


class Point(NamedTuple):
    value: Any
    other: Any


def test_keys_called_value_are_keys():
    attn = {"attn": {"query": W, "value": W}}
    q = quantize(attn, [("attn/value", nvfp4()), ("**", None)])
    assert isinstance(q["attn"]["value"], QuantizedArray) and q["attn"]["query"] is W
    both = quantize(attn, nvfp4())
    report = quantization_report(attn, both)
    assert [row.path for row in report.rows] == ["attn/query", "attn/value"]
    point = {"a": Point(quantize_array(W, nvfp4()), jnp.ones(3))}
    back = from_state(*to_state(point))
    np.testing.assert_array_equal(back["a"]["value"].dequantize(), point["a"].value.dequantize())
    same = from_state(*to_state(point), like=point)
    assert jax.tree.structure(same) == jax.tree.structure(point)


def test_quantizing_step_by_step_leaves_what_is_packed():
    tree = {"a": W, "b": W}
    first = quantize(tree, [("a", nvfp4()), ("**", None)])
    second = quantize(first, [("b", nf4(32)), ("**", None)])
    assert second["a"] is first["a"] and second["b"].fmt == nf4(32)
    with pytest.raises(ValueError, match="'a' is quantized already"):
        quantize(first, [("a", nvfp4()), ("**", None)])


def test_a_rule_that_quantizes_nothing_is_refused():
    tree = {"bias": jnp.ones(4096), "kernel": jnp.ones((16, 16)), "big": W}
    for pattern in ("bias", "kernel"):
        with pytest.raises(ValueError, match="matches only vectors and leaves of fewer"):
            quantize(tree, [(pattern, nvfp4())])
        assert not packed(quantize(tree, Recipe([(pattern, nvfp4())], strict=False)))
    assert packed(quantize(tree, [("kernel", nvfp4())], min_size=1))
    with pytest.raises(ValueError, match="bad character range"):
        quantize(tree, [("w[z-a]", nvfp4())])
    with pytest.raises(ValueError, match=r"did you mean nvfp4\(\)"):
        quantize(tree, [("big", nvfp4)])


def test_importance_reaches_the_search():
    weights = {"w": np.where(RNG.random(W.shape) < 0.1, 100.0, 0.01).astype(np.float32)}
    q = quantize({"w": W}, razer_e3m3(), importance=weights)["w"]
    want = quantize_array(W, razer_e3m3(), importance=weights["w"])
    np.testing.assert_array_equal(q.scales, want.scales)
    assert (q.scales != quantize_array(W, razer_e3m3()).scales).any()
    with pytest.raises(ValueError, match="negative"):
        quantize_array(W, razer_e3m3(), importance=-1.0)


def test_tables_get_no_activation_format():
    table = Embed(64, 32, rngs=nnx.Rngs(0))
    graph, state = nnx.split(table)
    q = quantize(state, Site(nvfp4(), nvfp4()))
    assert isinstance(q["embedding"].get_value(), QuantizedArray)
    assert nnx.merge(graph, q)(jnp.arange(3)).shape == (3, 32)


def test_biases_train_beside_packed_kernels():
    params = quantize({"kernel": W, "bias": jnp.zeros(32)}, nvfp4())
    dense, codes = partition_quantized(params)
    x = jnp.ones((2, 64))

    def loss(dense):
        p = combine_quantized(dense, codes)
        return jnp.mean((site_matmul(x, p["kernel"]) + p["bias"] - 1.0) ** 2)

    opt = optax.adamw(0.1)
    updates, _ = opt.update(jax.grad(loss)(dense), opt.init(dense), dense)
    stepped = combine_quantized(optax.apply_updates(dense, updates), codes)
    assert float(jnp.abs(stepped["bias"]).min()) > 0.05
    np.testing.assert_array_equal(stepped["kernel"].codes, params["kernel"].codes)


def test_calibration_names_a_site_that_was_not_seen():
    tree = quantize({"a": W, "b": W}, Site(int_group(8, None), int_group(8, "tensor")))
    x = jnp.full((3, 64), 100.0)
    unseen = lambda p, x: site_matmul(x, p["a"]) + jax.lax.stop_gradient(site_matmul(x, p["b"]))
    with pytest.raises(ValueError, match="site 'b'"):
        calibrate_activations(unseen, tree, [x])


def test_experts_share_an_input_with_static_scales_as_with_dynamic_ones():
    q = quantize({"k": EXPERTS}, Site(int_group(8, None), int_group(8, "tensor")))
    x = jnp.asarray(RNG.standard_normal((3, 64)), jnp.float32)
    apply = lambda p, x: site_matmul(x, p["k"])
    static = calibrate_activations(apply, q, [x])
    assert static["k"].scale.shape == (2,)
    np.testing.assert_allclose(apply(static, x), apply(q, x), rtol=1e-5, atol=1e-5)


def test_weights_are_no_constants_of_the_calibration(monkeypatch):
    seen = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **kw: seen.append(jit(f, **kw)) or seen[-1])
    q = quantize({"k": W}, Site(int_group(8, None), int_group(8, "tensor")))
    seen.clear()
    calibrate_activations(lambda p, x: site_matmul(x, p["k"]), q, [jnp.ones((3, 64))])
    probes = [jnp.zeros(2)]
    consts = jax.make_jaxpr(seen[0])(probes, q, (jnp.ones((3, 64)),)).consts
    assert all(np.size(c) < 64 for c in consts)


@pytest.mark.parametrize("fmt", [
    mxfp4(scale_rule="ceil"), mxfp4(scale_rule="even"), mxfp6(scale_rule="ceil"),
    mxfp8(scale_rule="ceil"), int_group(8, 32), int_group(8, "tensor"), nvfp4(), razer_e3m3(),
    int_group(8, 32, scale="bfloat16"), fp8(), nf4(32),
], ids=lambda f: f.name)
def test_finite_numbers_near_the_top_of_float32_stay_finite(fmt):
    top = np.finfo(np.float32).max
    x = (top * np.linspace(0.9, 1, 512)).astype(np.float32).reshape(64, 8)
    got = np.asarray(quantize_array(x, fmt).dequantize())
    assert np.isfinite(got).all()
    assert (np.abs(got / top - x / top) < 0.5).all()


def test_sizes_are_known_before_anything_is_computed():
    abstract = jax.eval_shape(lambda: quantize_array(jnp.zeros((256, 64)), nvfp4()))
    real = quantize_array(jnp.zeros((256, 64)), nvfp4())
    assert abstract.nbytes == real.nbytes == 256 * 64 // 2 + 256 * 64 // 16 + 4
    assert bits_per_weight({"w": abstract}) == bits_per_weight({"w": real})


def test_equality_and_hash_are_those_of_objects():
    a, b = quantize_array(W, nvfp4()), quantize_array(W, nvfp4())
    assert a == a and a != b and len({a, b}) == 2


def test_a_damaged_axis_shows_itself_and_says_why():
    scalar = jax.tree.map(jnp.max, quantize_array(W, nvfp4()))
    assert "nvfp4" in repr(scalar)
    with pytest.raises(ValueError, match="took away an axis"):
        _ = scalar.shape


def test_names_tell_formats_apart():
    formats = [mxfp4(), mxfp4(block=64), mxfp6(block=64), mxfp6(), nf4(), nf4(None), nvfp4(),
               nvfp4(32), nvfp4(scale="e3m3")]
    assert len({f.name for f in formats}) == len(formats)
    with pytest.raises(ValueError, match="block"):
        razer_e3m3(block=None)


def test_float64_is_rounded_once():
    x = np.full((32, 1), -431.99999999999994)
    q = quantize_array(x, fp8(per="tensor"), tensor_scale=1.0)
    assert q.dequantize()[0, 0] == -416
    with jax.enable_x64(True):
        inside = jax.jit(quantize_array, static_argnums=1)(jnp.asarray(x), fp8(per="tensor"),
                                                           tensor_scale=1.0)
        assert inside.dequantize()[0, 0] == -416 and inside.dequantize().dtype == jnp.float64


def test_row_parallel_weights_of_one_scale_a_column():
    mesh = jax.sharding.AbstractMesh((4,), ("k",))
    spec = jax.sharding.PartitionSpec("k")
    for fmt in (int_group(8, None), fp8(per="tensor")):
        q = jax.eval_shape(lambda fmt=fmt: quantize_array(jnp.zeros((1024, 64)), fmt))
        places = shardings_for(q, mesh, spec)
        assert places.codes.spec == jax.sharding.PartitionSpec("k", None)
        if q.scales is not None:
            assert places.scales.spec == jax.sharding.PartitionSpec(None, None)


def test_exchanged_scales_keep_float32():
    q = quantize_array((W * 1e-4).astype(jnp.bfloat16), nvfp4())
    fields = to_qwix(q)
    assert fields.scale.dtype == jnp.float32
    values = fields.qvalue.astype(jnp.float32) * jnp.repeat(fields.scale, 16, axis=0)
    np.testing.assert_allclose(values, q.dequantize(jnp.float32), rtol=3e-7)


def test_a_packed_module_can_be_printed():
    graph, state = nnx.split(nnx.Sequential(Linear(64, 32, rngs=nnx.Rngs(0))))
    for recipe in (nvfp4(), Site(nvfp4(), nvfp4())):
        assert "nvfp4" in repr(nnx.merge(graph, quantize(state, recipe)))


def test_other_peoples_layers_are_told_what_to_do():
    graph, state = nnx.split(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    for recipe in (nvfp4(), Site(nvfp4(), nvfp4())):
        layer = nnx.merge(graph, quantize(state, recipe))
        with pytest.raises(TypeError, match=r"layers .* call dequantize\(\)"):
            layer(jnp.ones((2, 64)))


def test_what_a_block_would_only_pad_stays_with_a_format_alone():
    heads = {"kernel": jnp.ones((128, 4, 32))}
    assert quantize(heads, nvfp4())["kernel"] is heads["kernel"]
    assert quantize(heads, [("kernel", nvfp4(), -3)])["kernel"].shape == (128, 4, 32)


def test_dynamic_sites_stay_so_beside_calibrated_ones():
    tree = quantize({"a": W, "b": W}, [("a", Site(nvfp4(), nvfp4())),
                                       ("b", Site(int_group(8, None), int_group(8, None)))])
    apply = lambda p, x: site_matmul(x, p["a"]) + site_matmul(x, p["b"])
    static = calibrate_activations(apply, tree, [jnp.ones((3, 64))])
    assert static["a"].scale is not None and static["b"].scale is None
    with pytest.raises(TypeError, match="put it in a list"):
        calibrate_activations(apply, tree, jnp.ones((3, 64)))


def test_common_slips_are_named():
    with pytest.raises(TypeError, match=r"did you mean nvfp4\(\)"):
        quantize({"w": W}, nvfp4)
    with pytest.raises(ValueError, match=r"did you mean nvfp4\(\)"):
        Site(nvfp4)
    with pytest.raises(TypeError, match="list of rules such as"):
        quantize({"w": W}, {"**/w": nvfp4()})
    with pytest.raises(ValueError, match="no leaves"):
        quantize({}, [("**/kernel", nvfp4())])
    with pytest.raises(IndexError, match="those of the matrix"):
        quantize_array(W, nvfp4())[0]
