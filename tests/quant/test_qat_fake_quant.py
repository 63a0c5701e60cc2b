import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.quant import (
    Recipe,
    Site,
    dequantize,
    element_levels,
    int_group,
    nf4,
    nvfp4,
    quantize,
    quantize_array,
    razer_e3m3,
    razer_e4m3,
)
from fadex.quant.qat import (
    fake_quant,
    fake_quant_array,
    fixed_scale,
    gaussian,
    ste,
    surrogate_factor,
)

FORMATS = {
    "nvfp4": nvfp4(), "razer_e4m3": razer_e4m3(), "razer_e3m3": razer_e3m3(7),
    "nf4_dq": nf4(64, double_quant=True), "int2": int_group(2, 32), "int8": int_group(8, None),
    "int4_asym": int_group(4, 16, symmetric=False), "int3_tensor": int_group(3, "tensor"),
    "fixed": fixed_scale(2, 0.7),
}  # fmt: skip
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def weights():
    """Three stacked matrices whose block axis fills neither its blocks nor its bytes."""
    w = np.array(np.random.default_rng(0).standard_t(4, (3, 41, 6)), np.float32)
    w[1, :16] = 0.0  # a block of zeros
    w[2, 3, 2] = -0.0
    return w


def in_code_units(w, q):
    """Values in code units, by the packed array's own scales: NumPy, float64."""
    fmt = q.fmt
    spread = lambda s: np.repeat(np.asarray(s, np.float64), fmt.block or q.padded, -2)[
        :, : w.shape[-2]
    ]
    scale = np.ones(1) if q.scales is None else spread(fmt.scale_values(q.scales))
    if q.tensor_scale is not None:
        scale = scale * np.asarray(q.tensor_scale, np.float64).reshape(-1, 1, 1)
    units = w / scale
    return units + (0 if q.zero_point is None else spread(q.zero_point)), spread


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] * (n == next(iter(FORMATS)))) for n in FORMATS],
)
def test_forward_is_quantization_bit_for_bit_and_backward_the_surrogate(name):
    fmt, w = FORMATS[name], weights()
    kernel = gaussian(0.4)

    @jit
    def run(w, g):
        value, pull = jax.vjp(lambda w: fake_quant_array(w, fmt, kernel), w)
        return value, pull(g)[0], quantize_array(w, fmt)

    g = np.random.default_rng(1).uniform(0.5, 1.5, w.shape).astype(np.float32)
    value, back, q = run(w, g)
    bits = lambda a: np.asarray(a).view(np.uint32)
    np.testing.assert_array_equal(bits(value), bits(jit(lambda q: q.dequantize())(q)))
    units, spread = in_code_units(w, q)
    # The sum over thresholds in NumPy, with the codebook that each block has.
    levels = np.asarray(fmt.levels, np.float64)[:, None, None, None]
    if name.startswith("razer"):
        special = spread(fmt.special_values(q.scales))
        base = element_levels("e2m1").astype(np.float64)
        books = np.stack([np.sort(np.append(base, v)) for v in special.ravel()])
        levels = books.T.reshape(16, *w.shape)
    cuts = (levels[1:] + levels[:-1]) / 2
    want = np.zeros(w.shape)
    for t, d in zip(cuts, np.diff(levels, axis=0)):
        want += d / 0.4 * np.exp(-(((units - t) / 0.4) ** 2) / 2) / np.sqrt(2 * np.pi)
    want = np.where((units >= cuts[-1]) | (units < cuts[0]), 1, want)
    np.testing.assert_allclose(back / g, want, rtol=2e-3, atol=1e-4)
    # Where values are NaN, the surrogate is, and nowhere else (zeros are no 0/0).
    w = w.copy()
    w[0, 5, 1], w[1, 20, 3], w[2] = np.nan, np.inf, 0.0
    value, back, _ = run(w, g)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(value))
    assert np.isnan(back[0, 5, 1]) and np.isfinite(back[2]).all()


def test_ste_passes_everything_by_default_and_clips_when_told():
    w, fixed = weights(), fixed_scale(2, 0.7)
    free, through, clipped, held = jit(lambda w: (
        surrogate_factor(w, nvfp4(), ste()), surrogate_factor(w, fixed, ste()),
        surrogate_factor(w, fixed, ste(), edge="tail"),
        surrogate_factor(w, nvfp4(), ste(), edge="hold"),
    ))(w)
    assert (np.asarray(free) == 1).all() and (np.asarray(through) == 1).all()
    np.testing.assert_array_equal(
        clipped, (w / np.float32(0.7) >= -1.5) & (w / np.float32(0.7) < 1.5))
    # With e4m3 scales, rounding leaves largest weights outside of the grid: these would die.
    assert 0 < (np.asarray(held) == 0).sum()


def test_an_array_of_radii_broadcasts_against_the_weights_and_not_their_blocks():
    """One radius a layer, a row and a weight, on rows that do not fill their blocks."""
    w, fmt = weights(), int_group(2, 16)
    rng = np.random.default_rng(4)
    radii = [rng.uniform(0.2, 0.6, shape).astype(np.float32)
             for shape in ((3, 1, 1), (41, 1), (3, 41, 6))]

    @jit
    def run(w, radii):
        out = [jax.grad(lambda w, d=d: fake_quant_array(w, fmt, gaussian(d)).sum())(w)
               for d in radii]
        # All weights' surrogates at every weight's own radius, one radius at a time.
        each = lambda d: surrogate_factor(w, fmt, gaussian(d))
        return out, jax.lax.map(each, jnp.concatenate([radii[0].ravel(), radii[1].ravel()]))

    (layers, rows, single), table = jax.tree.map(np.asarray, run(w, radii))
    np.testing.assert_allclose(layers, table[np.arange(3), np.arange(3)], rtol=1e-5, atol=1e-6)
    at = np.arange(41)
    np.testing.assert_allclose(
        rows, np.moveaxis(table[3 + at, :, at], 0, 1), rtol=1e-5, atol=1e-6)
    again = run(w, [*radii[:2], np.broadcast_to(radii[0], w.shape).copy()])[0]
    np.testing.assert_array_equal(again[2], again[0])
    assert not np.array_equal(single, layers)


def test_empty_weights_stay_empty():
    f = jit(lambda w: jax.value_and_grad(
        lambda w: fake_quant_array(w, int_group(4, 16), gaussian(0.4)).sum())(w))
    for shape in ((32, 0), (0, 4)):
        total, slope = f(np.zeros(shape, np.float32))
        assert float(total) == 0 and slope.shape == shape


def test_trees_vmap_scan_remat_and_low_precision():
    w = weights()
    tree = {"layers": w.astype(jnp.bfloat16), "bias": np.ones(6, np.float32), "embedding": w[0]}
    recipe = [("layers", int_group(2, 16)), ("embedding", int_group(3, None)), ("**", None)]

    @jit
    def run(tree):
        out = fake_quant(tree, recipe, gaussian(0.3, "relative"), min_size=0)
        exact = dequantize(quantize(tree, recipe, min_size=0))
        one = lambda w: fake_quant_array(w, int_group(2, 16), gaussian(0.3, "relative"))
        total = lambda f: jax.grad(lambda w: (f(w) ** 2).sum())(w)
        return out, exact, {
            "direct": total(one), "vmap": total(jax.vmap(one)), "remat": total(jax.checkpoint(one)),
            "scan": total(lambda w: jax.lax.scan(lambda c, x: (c, one(x)), 0, w)[1]),
            "forward": jax.jvp(one, (w,), (2 * one(w),))[1],
        }

    out, exact, grads = run(tree)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(exact)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert not np.array_equal(out["embedding"], tree["embedding"])
    for name, got in grads.items():
        np.testing.assert_allclose(got, grads["direct"], rtol=1e-4, atol=1e-4, err_msg=name)
    # Leaves below min_size stay as they are.
    kept = fake_quant(tree, Recipe(recipe, strict=False), ste())
    assert kept["embedding"] is tree["embedding"]


def test_gradients_to_scales_make_the_values_homogeneous_in_a_block():
    """Euler: along w itself the derivative is the value, as scaling a block scales its values."""
    w = weights()[0]
    f = functools.partial(fake_quant_array, surrogate=gaussian(0.4), scale_gradient=True)
    for fmt in (int_group(4, 16), nvfp4()):
        value, along = jit(lambda w, fmt=fmt: jax.jvp(lambda w: f(w, fmt), (w,), (w,)))(w)
        np.testing.assert_allclose(along, value, rtol=1e-4, atol=1e-5)
    # And in reverse: what reaches the largest weight of a block is its own part and the scale's.
    fmt, block = int_group(4, 16), weights()[0][:16, :1]
    g = np.random.default_rng(3).standard_normal((16, 1)).astype(np.float32)
    pull = jit(lambda w: jax.vjp(lambda w: f(w, fmt), w)[1](g)[0])
    s, value = (np.asarray(part, np.float64) for part in jit(lambda w: (
        surrogate_factor(w, fmt, gaussian(0.4)), quantize_array(w, fmt).dequantize()))(block))
    top = np.abs(block[:, 0]).argmax()
    want = (g * s).astype(np.float64)
    want[top, 0] += (g * (value - block * s)).sum() / block[top, 0]
    np.testing.assert_allclose(pull(block), want, rtol=1e-4, atol=1e-5)


def test_errors_name_the_argument():
    w = jnp.ones((32, 4))
    for call, error, message in (
        (lambda: fake_quant_array(w, nvfp4(), 0.3), TypeError, "surrogate: expected a Kernel"),
        (lambda: fake_quant_array(w, nvfp4(), gaussian(lambda t: 0.3)), ValueError,
         "surrogate: delta is a schedule"),
        (lambda: fake_quant_array(w, nvfp4(), gaussian(np.full(32, 0.3, np.float32))), ValueError,
         r"surrogate: delta of shape \(32,\) does not broadcast to the weights' shape \(32, 4\)"),
        (lambda: surrogate_factor(w, nvfp4(), gaussian(np.full((2, 1, 1), 0.3))), ValueError,
         r"surrogate: delta of shape \(2, 1, 1\)"),
        (lambda: fake_quant_array(w, nvfp4(), edge="clip"), ValueError, "edge: expected one of"),
        (lambda: fake_quant_array(w, fixed_scale(2, 1.0), scale_gradient=True), ValueError,
         "scale_gradient: 'int2_fixed_1' has no scale"),
        (lambda: fake_quant_array(jnp.ones(3, jnp.int32), nvfp4()), ValueError,
         "w: expected a floating-point array"),
        (lambda: fake_quant({"k": w}, [("x", nvfp4())]), ValueError, "matches no path"),
        (lambda: fake_quant({"k": w}, Site(nvfp4(), nvfp4()), min_size=0), ValueError,
         "recipe: 'k' has an activation format"),
        (lambda: fixed_scale(2, 0.0), ValueError, "scale: must lie in"),
        (lambda: fixed_scale(1, 1.0), ValueError, "bits: expected one of"),
    ):
        with pytest.raises(error, match=message):
            call()
