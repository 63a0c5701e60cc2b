import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.quant import (
    QuantizedArray,
    QuantizedSite,
    Recipe,
    Site,
    bits_per_weight,
    calibrate_activations,
    combine_quantized,
    dequantize,
    fp8,
    int_group,
    mxfp4,
    nvfp4,
    nvfp4_4o6,
    partition_quantized,
    quantization_report,
    quantize,
    quantize_array,
    site_matmul,
)

f32 = np.float32
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quantized = functools.partial(
    jit, static_argnums=1, static_argnames=("min_size", "layout", "on_nonfinite")
)(quantize)
dense = jit(dequantize)


def params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(f32)
    return {
        "embedding": normal(40, 32), "step": np.int32(3),
        "layers": {"mlp": {"kernel": normal(2, 64, 32), "bias": normal(2, 32)}},
        "head": {"kernel": normal(64, 16)},
    }


RECIPE = Recipe((
    ("embedding", int_group(8, None)), ("layers/**/kernel", nvfp4()), ("head/*", None),
    ("**", mxfp4()),
))


@pytest.mark.smoke
def test_the_recipe_decides_and_jit_changes_nothing():
    tree = params()
    out = quantized(tree, RECIPE)
    mlp = out["layers"]["mlp"]
    assert (mlp["kernel"].fmt, mlp["kernel"].axis) == (nvfp4(), -2)
    assert (out["embedding"].fmt, out["embedding"].axis) == (int_group(8, None), -1)
    # None leaves, vectors, small leaves and integers stay as they are.
    np.testing.assert_array_equal(out["head"]["kernel"], tree["head"]["kernel"])
    np.testing.assert_array_equal(mlp["bias"], tree["layers"]["mlp"]["bias"])
    assert out["step"] == 3
    eager = quantize(tree, RECIPE)  # not compiled as a whole
    assert eager["head"]["kernel"] is tree["head"]["kernel"]
    assert jax.tree.structure(eager) == jax.tree.structure(out)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(out)):
        np.testing.assert_array_equal(a, b)
    # Each leaf is what quantize_array makes of it, and comes back as its values.
    one = jit(lambda x: quantize_array(x, nvfp4()))(tree["layers"]["mlp"]["kernel"])
    np.testing.assert_array_equal(mlp["kernel"].codes, one.codes)
    back = dense(out)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["embedding"].shape == (40, 32)
    np.testing.assert_allclose(back["embedding"], tree["embedding"], atol=0.02)
    assert dequantize(mlp["kernel"], jnp.bfloat16).dtype == jnp.bfloat16


def test_min_size_layout_axis_and_formats_alone():
    tree = {"a": np.ones((32, 32), f32), "b": np.ones((16, 16), f32), "v": np.ones(2048, f32),
            "empty": np.ones((0, 4), f32)}
    kinds = lambda t: {k for k, v in t.items() if isinstance(v, QuantizedArray)}
    abstract = lambda *a, **kw: jax.eval_shape(lambda t: quantize(t, *a, **kw), tree)
    assert kinds(abstract(nvfp4())) == {"a"}
    assert kinds(abstract(nvfp4(), min_size=0)) == {"a", "b"}  # nothing is in an empty leaf
    assert kinds(abstract([("v", nvfp4(), -1)])) == {"v"}  # a vector whose rule names an axis
    assert abstract([("a", nvfp4(), -1)], layout="stream")["a"].axis == -1
    assert abstract([("a", nvfp4())], layout="stream")["a"].layout == "stream"
    assert kinds(abstract(Recipe([("a", None), ("**", nvfp4())]), min_size=0)) == {"b"}


def test_a_format_alone_leaves_stacked_vectors_and_tables_meet_no_activations():
    stacked = {"kernel": np.ones((8, 64, 32), f32), "bias": np.ones((8, 256), f32),
               "gain": np.ones((8, 256), f32), "embedding": np.ones((64, 32), f32)}
    out = jax.eval_shape(lambda t: quantize(t, Site(nvfp4(), nvfp4())), stacked)
    kinds = {k: type(v) for k, v in out.items()}
    assert kinds["kernel"] is QuantizedSite and kinds["embedding"] is QuantizedArray
    assert kinds["bias"] is kinds["gain"] is jax.ShapeDtypeStruct
    named = jax.eval_shape(lambda t: quantize(t, [("bias", nvfp4(), -1)]), stacked)
    assert isinstance(named["bias"], QuantizedArray)


def test_importance_reaches_the_leaf_of_its_path():
    x = np.random.default_rng(4).standard_normal((64, 32)).astype(f32)
    weight = np.random.default_rng(5).exponential(size=(64, 1)).astype(f32) ** 3
    out = jit(lambda t, w: quantize(t, nvfp4_4o6(), importance=w))(
        {"a": x, "b": x}, {"a": weight})
    want = jit(lambda x, w: quantize_array(x, nvfp4_4o6(), importance=w))(x, weight)
    np.testing.assert_array_equal(out["a"].scales, want.scales)
    assert (np.asarray(out["b"].scales) != np.asarray(want.scales)).any()


def test_dense_and_packed_leaves_part_and_combine():
    out = quantized(params(), RECIPE)
    dense_part, packed = partition_quantized(out)
    assert not any(isinstance(n, QuantizedArray) for n in jax.tree.leaves(
        dense_part, is_leaf=lambda n: isinstance(n, QuantizedArray)))
    assert dense_part["embedding"] is None and packed["head"]["kernel"] is None
    back = combine_quantized(dense_part, packed)
    assert jax.tree.structure(back) == jax.tree.structure(out)
    assert back["embedding"] is out["embedding"]


def test_nnx_modules_and_states_keep_their_kind():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(64, 32, rngs=rngs)

    state = nnx.state(Net(nnx.Rngs(0)))
    plain = {"dense": {"kernel": state["dense"]["kernel"][...]}}
    out = quantized(state, Recipe([("dense/kernel", nvfp4()), ("**", None)]))
    assert type(out) is type(state)
    q = jax.tree.leaves(out, is_leaf=lambda n: isinstance(n, QuantizedArray))
    q = next(n for n in q if isinstance(n, QuantizedArray))
    want = quantized(plain, Recipe([("**", nvfp4())]))["dense"]["kernel"]
    np.testing.assert_array_equal(q.codes, want.codes)
    report = quantization_report(state, out)
    assert [r.path for r in report.rows] == ["dense/kernel"]
    assert jax.tree.structure(dense(out)) == jax.tree.structure(state)


def test_report_figures_are_numpys():
    tree = params()
    out = quantized(tree, RECIPE)
    report = quantization_report(tree, out)
    assert [r.path for r in report.rows] == ["embedding", "layers/mlp/kernel"]
    back = dense(out)
    errors = powers = 0.0
    for row, x, v, q in (
        (report.rows[0], tree["embedding"], back["embedding"], out["embedding"]),
        (report.rows[1], tree["layers"]["mlp"]["kernel"], back["layers"]["mlp"]["kernel"],
         out["layers"]["mlp"]["kernel"]),
    ):
        x, v = x.astype(np.float64), np.asarray(v, np.float64)
        error, power = ((v - x) ** 2).sum(), (x**2).sum()
        errors, powers = errors + error, powers + power
        assert row.nmse == pytest.approx(error / power, rel=1e-12)
        assert row.sqnr_db == pytest.approx(10 * np.log10(power / error), rel=1e-12)
        stored = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(q))
        assert row.bytes == stored and row.dense_bytes == 4 * x.size
        assert row.bits_per_weight == 8 * stored / x.size and row.shape == x.shape
        assert row.format == q.fmt.name
    assert report.total.nmse == pytest.approx(errors / powers, rel=1e-12)
    assert report.total.bytes == sum(r.bytes for r in report.rows)
    assert report.untouched_bytes == 2 * 32 * 4 + 64 * 16 * 4 + 4
    lines = str(report).splitlines()
    assert lines[0].split() == ["path", "format", "shape", "bits/weight", "nMSE", "SQNR", "dB",
                                "bytes", "of", "dense"]
    assert re.match(r"layers/mlp/kernel +nvfp4 +2x64x32 +4\.516 +\S+e-03 +20\.\d\d +2312 +0\.141",
                    lines[3])
    assert lines[-1] == f"not quantized: {report.untouched_bytes} bytes"


def test_bits_per_weight_are_measured_from_the_buffers():
    x = np.ones((1024, 64), f32)
    for fmt, want in ((nvfp4(), 4.5 + 32 / x.size), (mxfp4(), 4.25), (int_group(4, 32), 5.0),
                      (int_group(2, 16, scale="bfloat16"), 3.0)):
        q = quantized({"k": x}, fmt)["k"]
        assert bits_per_weight(q) == want
        # Half a byte each plus scales: what NumPy sees in host memory.
        assert 8 * sum(np.asarray(a).nbytes for a in jax.tree.leaves(q)) == want * x.size
    assert bits_per_weight({"a": q, "b": x}) == (3 + 32) / 2
    with pytest.raises(ValueError, match="tree: holds no values"):
        bits_per_weight({})


def test_sites_hold_a_weight_and_an_activation_format():
    x = params()["head"]["kernel"]
    out = quantized({"k": x}, Site(nvfp4(), fp8(per="tensor")), min_size=0)["k"]
    assert isinstance(out, QuantizedSite) and out.shape == x.shape and out.dtype == jnp.float32
    assert out.weight.fmt == nvfp4() and out.activations == fp8(per="tensor")
    assert out.scale is None and out.probe is None and out[...] is out
    only_activations = quantize({"k": x}, Site(None, nvfp4()), min_size=0)["k"]
    assert only_activations.weight is x
    only_weights = quantized({"k": x}, Site(nvfp4()), min_size=0)["k"]
    assert isinstance(only_weights, QuantizedArray)
    assert quantize({"k": x}, Site(None, None))["k"] is x
    back = dense({"k": out})["k"]
    np.testing.assert_array_equal(back, dense(only_weights))
    report = quantization_report({"k": x}, {"k": out})
    assert [r.path for r in report.rows] == ["k"]
    # The product is that of both quantized operands.
    rows = np.random.default_rng(1).standard_normal((5, 64)).astype(f32)
    held = jit(lambda x: quantize_array(x, fp8(per="tensor"), axis=-1).dequantize())(rows)
    want = np.asarray(held, np.float64) @ np.asarray(back, np.float64)
    np.testing.assert_allclose(site_matmul(rows, out), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        site_matmul(rows, only_weights), rows @ np.asarray(back), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(site_matmul(rows, x), rows @ x, rtol=1e-5, atol=1e-5)


def test_calibration_finds_the_largest_activation_of_each_site():
    rng = np.random.default_rng(2)
    fmt = fp8(per="tensor")
    tree = {"k": rng.standard_normal((64, 16)).astype(f32)}
    site = quantize(tree, Site(int_group(8, None), fmt), min_size=0)
    batches = [rng.standard_normal((n, 64)).astype(f32) * n for n in (8, 8)]
    batches[1] *= 3
    apply = jax.jit(lambda params, x: jnp.tanh(site_matmul(x, params["k"])))
    out = calibrate_activations(apply, site, batches)
    amax = max(np.abs(b).max() for b in batches)
    assert out["k"].scale == f32(amax) / f32(448) and out["k"].probe is None
    # Static scaling with that scale is dynamic scaling on the batch that set it.
    np.testing.assert_allclose(apply(out, batches[1]), apply(site, batches[1]), rtol=1e-6)
    # A tuple is unpacked.
    again = calibrate_activations(lambda p, x, y: site_matmul(x, p["k"]) + y, site,
                                  [(batches[1], 1.0)])
    assert again["k"].scale == out["k"].scale


def test_calibration_of_stacked_layers_under_scan():
    rng = np.random.default_rng(3)
    tree = {"k": rng.standard_normal((3, 64, 64)).astype(f32) * f32(0.3)}
    site = quantize(tree, Site(None, nvfp4()), min_size=0)
    x = rng.standard_normal((4, 64)).astype(f32)

    def apply(params, x):
        return jax.lax.scan(lambda h, k: (jnp.tanh(site_matmul(h, k)), None), x, params["k"])[0]

    out = calibrate_activations(apply, site, [x])
    want, h = [], x
    for k in tree["k"]:
        want.append(np.abs(h).max() / f32(2688))
        h = np.tanh(h @ k)
    assert out["k"].scale.shape == (3,)
    np.testing.assert_allclose(out["k"].scale, want, rtol=1e-5)


def test_errors_name_the_argument():
    x = np.ones((32, 32), f32)
    q = {"k": jax.eval_shape(lambda x: quantize_array(x, nvfp4()), x)}
    site = {"k": QuantizedSite(x, None, None, activations=mxfp4())}
    good = {"k": QuantizedSite(x, None, None, activations=nvfp4())}
    identity = lambda p, x: x
    for call, error, message in (
        (lambda: quantize(q, nvfp4()), ValueError, "tree: 'k' is quantized already"),
        (lambda: quantize({"k": x}, [("kernel", nvfp4())]), ValueError,
         "recipe: pattern 'kernel' matches no path; .* the paths are k"),
        (lambda: quantize({"k": x.astype(int)}, [("k", nvfp4())]), ValueError,
         r"recipe: 'k' matches 'k', which is no floating-point array \(int64\)"),
        (lambda: quantize({"k": x + 1j}, [("k", nvfp4())]), ValueError, "no floating-point arr"),
        (lambda: quantize({"k": 3.0}, [("k", nvfp4())]), ValueError, r"no floating.*\(float\)"),
        (lambda: quantize({"k": x}, [("k", nvfp4(), -3)]), ValueError,
         r"axis: -3 of rule 'k' is out of range for 'k' of shape \(32, 32\)"),
        (lambda: quantize({"k": x}, "nvfp4"), TypeError, "recipe: expected a Recipe"),
        (lambda: quantization_report({"k": x}, {"k": x}), ValueError, "qtree: holds no quantized"),
        (lambda: quantization_report({"j": x}, q), ValueError, "qtree: 'k' of shape .* missing"),
        (lambda: quantization_report({"k": x[:16]}, q), ValueError, r"\(16, 32\) in tree"),
        (lambda: calibrate_activations(identity, {"k": x}, [x]), ValueError,
         "params: holds no QuantizedSite"),
        (lambda: calibrate_activations(identity, site, [x]), ValueError, "params: mxfp4 scale "),
        (lambda: calibrate_activations(identity, good, []), ValueError, "batches: expected at"),
        (lambda: calibrate_activations(identity, good, [x]), ValueError,
         "params: no floating-point output of apply depends on the site 'k'"),
        (lambda: quantize({"k": x[:8]}, [("k", nvfp4())]), ValueError,
         "recipe: 'k' matches only vectors and leaves of fewer than min_size=1024"),
    ):
        with pytest.raises(error, match=message):
            call()
