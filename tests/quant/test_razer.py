import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fadex.quant import (
    calibrate_special_values,
    nvfp4,
    quantize_array,
    quantize_razer,
    razer_e3m3,
    razer_e4m3,
    razer_scales,
    razer_selector,
    special_value_errors,
    to_two_pass,
)

f32 = np.float32
E3M3 = np.array([m / 32 if e == 0 else (8 + m) * 2.0 ** (e - 6) for e in range(8)
                 for m in range(8)][:63])
FORMATS = {"e4m3": razer_e4m3(), "e3m3": razer_e3m3(), "w7": razer_e3m3(7)}
run = jax.jit(
    lambda x, fmt, **kw: (
        q := quantize_array(x, fmt, axis=-2, **kw), q.unpacked(), q.dequantize()
    ),
    static_argnums=1, compiler_options={"xla_backend_optimization_level": 0},
)


@functools.cache
def matrices():
    """``[6, 256, 8]``: Gaussian, heavy-tailed, tiny, huge, awkward blocks, exact multiples."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 256, 8))
    x[1] = rng.standard_t(3, (256, 8))
    x[2] *= 1e-25
    x[3] *= 1e37
    x[4, :16], x[4, 16:32], x[4, 32:48] = 0.0, 0.7, -np.abs(x[4, 32:48])
    x[4, 48:64] = 0.0
    x[4, 50] = 1.5  # a single value
    x[4, 64:80] = -0.0
    x[5] = rng.choice([5.0, -5.0, 6.0, 0.5, -8.0, 7.0, 3.0, 4.5], (256, 8))
    return x.astype(f32)


def scale_of(fmt, ratio):
    if fmt.scale == "e3m3":
        ratio = np.minimum(ratio.astype(np.float64), 28)
        high = np.clip(np.searchsorted(E3M3, ratio), 1, 62)
        below, above = ratio - E3M3[high - 1], E3M3[high] - ratio
        up = (above < below) | ((above == below) & (high % 2 == 0))
        code = np.maximum(np.where(up, high, high - 1), 1)
        return code, E3M3[code].astype(f32)
    code = np.minimum(ratio, f32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    code = np.maximum(code, 1)
    return code, code.view(ml_dtypes.float8_e4m3fn).astype(f32)


def candidates(x, fmt, importance=None):
    """For every special value: selector-free scale code, codes, values, float64 error."""
    blocks = x.reshape(-1, 16, x.shape[-1])
    weight = 1.0 if importance is None else importance.reshape(blocks.shape)
    top, least = (448, 2.0**-9) if fmt.scale == "e4m3fn" else (28, 2.0**-5)
    g = f32(max(np.abs(x).max() / f32(6 * top), f32(2.0**-126 / least))) if x.any() else f32(1)
    m = np.abs(blocks).max(1, keepdims=True)
    out = []
    for v in fmt.specials:
        code, s = scale_of(fmt, m / (f32(max(6, abs(v))) * g))
        z = blocks / (s * g)
        q = np.clip(z, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        near = q.astype(f32)
        codes = np.where(near == 0, 0, q.view(np.uint8))
        special = np.abs(z - f32(v)) < np.abs(z - near)
        codes, values = np.where(special, 8, codes), np.where(special, f32(v), near)
        values = (values * s) * g
        error = (weight * (values.astype(np.float64) - blocks) ** 2).sum(1)
        out.append((code[:, 0], codes, values, error))
    return g, out


@pytest.mark.parametrize("name, weighted", [
    pytest.param("e3m3", False, marks=pytest.mark.smoke), ("e3m3", True), ("e4m3", False),
    ("w7", False)])
def test_encoding_is_the_references_bit_for_bit(name, weighted):
    fmt, x = FORMATS[name], matrices()
    importance = None
    if weighted:
        importance = np.random.default_rng(1).exponential(size=x.shape).astype(f32)
    q, codes, values = run(x, fmt, importance=importance)
    unclear = 0
    for i in range(len(x)):
        g, tries = candidates(x[i], fmt, None if importance is None else importance[i])
        assert q.tensor_scale[i] == g
        errors = np.stack([t[3] for t in tries])
        best = errors.argmin(0)  # the first on a tie
        # Errors are summed in float32: between different values within its rounding, the choice
        # may go either way; where a special value changes nothing, the first must stay.
        made = np.stack([t[2] for t in tries])
        chosen = np.take_along_axis(made, best[None, :, None, :], 0)
        close = ((errors <= errors.min(0) * (1 + 1e-5)) & (made != chosen).any(2)).any(0)
        unclear += close.sum()
        pick = lambda k: np.take_along_axis(
            np.stack([t[k] for t in tries]),
            (best[None] if k == 0 else best[None, :, None, :]), 0)[0]
        want = pick(0) | best << fmt.scale_shift
        np.testing.assert_array_equal(np.where(close, want, q.scales[i]), want)
        for got, k in ((codes[i], 1), (values[i], 2)):
            got, want = np.asarray(got).reshape(-1, 16, 8), pick(k)
            hide = np.broadcast_to(close[:, None], want.shape)
            np.testing.assert_array_equal(np.where(hide, want, got), want)
    assert unclear < 0.03 * q.scales.size


@functools.cache
def populations():
    """65,536 blocks each of Gaussian and Laplace samples."""
    rng = np.random.default_rng(2)
    shape = 1024, 1024
    return rng.standard_normal(shape).astype(f32), rng.laplace(size=shape).astype(f32)


def block_errors(x, fmt):
    q, _, values = run(x, fmt)
    miss = (np.asarray(values, np.float64) - x) ** 2
    return miss.reshape(-1, 16, x.shape[-1]).sum(1), q


@pytest.mark.parametrize("fmt, plain, better", [
    (razer_e4m3(), nvfp4(), (0.62, 0.45)),
    (razer_e3m3(), nvfp4(scale="e3m3"), (0.75, 0.71)),
], ids=["e4m3", "e3m3"])
def test_theorem_1_no_block_is_worse_than_nvfp4_with_the_same_scale(fmt, plain, better):
    for x, share in zip(populations(), better):
        ours, theirs = block_errors(x, fmt)[0], block_errors(x, plain)[0]
        assert (ours > theirs * (1 + 1e-6)).sum() == 0
        assert (ours < theirs).mean() == pytest.approx(share, abs=0.01)  # the spec's figures


def test_theorem_2_both_scales_are_equal_where_the_block_is_not_tiny():
    """6 * 448 = 16 * 6 * 28: bit for bit wherever max|block| >= max|x| / 112."""
    rng = np.random.default_rng(3)
    spread = rng.standard_normal((1024, 1024)).astype(f32)
    spread *= f32(10.0) ** rng.uniform(-4, 0, (64, 1, 1024)).astype(f32).repeat(16, 0).reshape(
        1024, 1024)
    for x in (*populations(), spread):
        m = np.abs(x.reshape(-1, 16, 1024)).max(1)
        large = m >= np.abs(x).max() / f32(112)
        (short, a), (long, b) = block_errors(x, nvfp4(scale="e3m3")), block_errors(x, nvfp4())
        total = lambda q: np.asarray(
            q.fmt.scale_values(q.scales) * q.tensor_scale[..., None, None])
        np.testing.assert_array_equal(total(a)[large], total(b)[large])
        ours = block_errors(x, razer_e3m3())[0]
        assert (ours[large] > long[large] * (1 + 1e-6)).sum() == 0
        np.testing.assert_array_equal(short[large], long[large])
    assert 0.2 < large.mean() < 0.9 and (short != long).any()  # both sides were seen


@pytest.mark.parametrize("fmt", [razer_e4m3(), razer_e3m3(), razer_e3m3(12, 10)],
                         ids=lambda f: f.name)
def test_theorem_3_two_nvfp4_arrays_add_up_to_it(fmt):
    x = matrices() * f32([1, 1, 1, 1e-30, 1, 1])[:, None, None]
    q = run(x, fmt)[0]
    rows = np.random.default_rng(4).standard_normal((6, 3, 256)).astype(f32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def split(q, rows):
        first, second = to_two_pass(q)
        products = [rows @ a.dequantize() for a in (q, first, second)]
        return first, second, [a.dequantize() for a in (q, first, second)], products, [
            a.unpacked() for a in (q, first, second)]

    first, second, (whole, d1, d2), products, codes = split(q, rows)
    for part in (first, second):
        assert part.fmt == (nvfp4() if fmt.scale == "e4m3fn" else nvfp4(scale="e3m3"))
        assert part.nbytes == q.nbytes
        np.testing.assert_array_equal(part.scales, razer_scales(q))
    np.testing.assert_allclose(d1 + d2, whole, rtol=3e-7)
    assert (np.asarray(d2)[np.asarray(codes[0]) != 8] == 0).all()  # only at special positions
    assert (np.asarray(codes[0]) == 8).any()
    scale = np.abs(rows) @ np.abs(whole)
    assert (np.abs(products[0] - products[1] - products[2]) <= 1e-6 * scale).all()


def test_two_passes_need_sums_of_two_magnitudes():
    q = run(matrices(), razer_e4m3())[0]
    for v in (8.5, 9.5, 11.0, 11.5):
        with pytest.raises(ValueError, match=f"special value {v} is no sum of two"):
            to_two_pass(dataclasses.replace(q, fmt=razer_e4m3(v)))
    with pytest.raises(TypeError, match="q: expected a QuantizedArray in a RaZeR format"):
        to_two_pass(dataclasses.replace(q, fmt=nvfp4()))


def test_stored_bytes_are_those_of_nvfp4():
    plain = run(matrices(), nvfp4())[0]
    assert plain.nbytes == plain.size * 4.5 / 8 + 6 * 4
    for fmt in FORMATS.values():
        q = run(matrices(), fmt)[0]
        assert q.nbytes == plain.nbytes and fmt.bits_per_weight() == 4.5
        buffers = lambda q: [(a.shape, a.dtype) for a in jax.tree.leaves(q)]
        assert buffers(q) == buffers(plain)


def test_only_reserved_scale_bytes_decode_to_nan_and_none_is_emitted():
    codes = np.arange(16, dtype=np.uint8)[:, None].repeat(256, 1)
    scales = np.arange(256, dtype=np.uint8)[None]
    decode = jax.jit(lambda codes, scales: [
        f.decode_blocks(codes, scales) for f in (razer_e4m3(), razer_e3m3())])
    decoded = decode(codes, scales)
    for fmt, reserved, values in zip(FORMATS.values(), ([0x7F, 0xFF], []), decoded):
        values = np.asarray(values)
        bad = ~np.isfinite(values)
        assert np.flatnonzero(bad.any(0)).tolist() == reserved
        assert bad[:, reserved].all()
        # Against the definition: e2m1 with code 8 replaced, times the scale.
        table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(f32)
        low = np.arange(256) & ((1 << fmt.scale_shift) - 1)
        scale = (low.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f32)
                 if fmt.scale == "e4m3fn" else np.append(E3M3, 30)[low].astype(f32))
        want = np.broadcast_to(table[:, None], (16, 256)).copy()
        want[8] = np.array(fmt.specials)[np.arange(256) >> fmt.scale_shift]
        np.testing.assert_array_equal(values[~bad], (want * scale)[~bad])
        # The encoder emits neither the reserved codes nor scale zero.
        for x in (matrices(), np.full(matrices().shape, 3e38, f32)):
            low = np.asarray(razer_scales(run(x, fmt)[0]))
            assert low.min() >= 1 and low.max() < (0x7F if fmt.scale == "e4m3fn" else 63)


def column(values, fmt, scale=1.0):
    """Decoded values and selector of one block, static tensor scale."""
    x = np.zeros((16, 1), f32)
    x[: len(values), 0] = values
    q, codes, out = run(x, fmt, tensor_scale=f32(scale))
    return np.asarray(out)[: len(values), 0].tolist(), int(razer_selector(q)[0, 0]), np.asarray(
        codes)[: len(values), 0].tolist()


def test_edge_cases_of_one_block():
    e4m3, e3m3 = razer_e4m3(), razer_e3m3()
    # The only value that is not zero is the largest.
    assert column([0, 6.0], e4m3) == ([0, 6], 0, [0, 7])
    # All of it is the special value times the scale, of either sign.
    values, selector, codes = column([6.0] + [5.0] * 15, e4m3)
    assert values == [6.0] + [5.0] * 15 and selector == 0 and codes == [7] + [8] * 15
    values, selector, codes = column([-6.0] + [-5.0] * 15, e4m3)
    assert values == [-6.0] + [-5.0] * 15 and selector == 1 and codes == [15] + [8] * 15
    values, selector, _ = column([-8.0, 6.0, 6.0, 4.0], e3m3)
    assert values == [-8.0, 6.0, 6.0, 4.0] and selector == 3
    # Midway between 4 and 5 and between 5 and 6: not strictly closer, so the e2m1 value.
    values, selector, codes = column([6, 5, 4.5, 5.5], e4m3)
    assert values == [6, 5, 4, 6] and codes == [7, 8, 6, 7] and selector == 0
    # All negative; zeros of either sign are code 0.
    values, selector, codes = column([-6, -5, -3, -0.0, 0.0, -0.1], e4m3)
    assert values == [-6, -5, -3, 0, 0, 0] and codes == [15, 8, 13, 0, 0, 0] and selector == 1


def test_largest_and_smallest_numbers_of_float32():
    sizes = f32([np.finfo(f32).max, 1e37, np.finfo(f32).tiny, 1e-41])
    x = np.zeros(matrices().shape, f32)
    for i, amax in enumerate(sizes):
        x[i, :, 0], x[i, :4, 1] = amax, [amax, -amax, amax / 2, 0]
    for fmt in FORMATS.values():
        values = np.asarray(run(x, fmt)[2])
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values[:2, :2, 1], x[:2, :2, 1], rtol=0.07)
        # Below the resolution: nothing worse than zero.
        assert (np.abs(values - x)[2:4] <= sizes[2:4, None, None] * 1.001).all()


def test_ragged_single_columns_in_stacks_equal_the_loop():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 41, 1)).astype(f32)
    fmt = razer_e3m3()
    one = jax.jit(lambda x: quantize_array(x, fmt),
                  compiler_options={"xla_backend_optimization_level": 0})
    mapped = jax.jit(jax.vmap(lambda x: quantize_array(x, fmt)),
                     compiler_options={"xla_backend_optimization_level": 0})(x)
    assert mapped.shape == (3, 41, 1) and mapped.scales.shape == (3, 3, 1)
    for i in range(3):
        for a, b in zip(*(jax.tree.leaves(t) for t in (one(x[i]), mapped))):
            np.testing.assert_array_equal(a, b[i])


def test_importance_lowers_the_weighted_error_and_broadcasts():
    x = matrices()
    weight = np.random.default_rng(6).exponential(size=(256, 1)).astype(f32) ** 3
    fmt = razer_e3m3()
    weighted = lambda v: (weight * (np.asarray(v[0], np.float64) - x[0]) ** 2).sum()
    q, _, a = run(x, fmt, importance=np.broadcast_to(weight, x.shape))
    assert weighted(a) < weighted(run(x, fmt)[2])
    shapes = jax.eval_shape(lambda x, w: quantize_array(x, fmt, importance=w), x, weight)
    assert jax.tree.structure(shapes) == jax.tree.structure(q)


@pytest.mark.parametrize("fmt", [razer_e3m3(), razer_e4m3()], ids=lambda f: f.name)
def test_calibration_finds_the_best_values_of_brute_force(fmt):
    x = matrices() * f32([1, 1, 0, 0, 1, 1])[:, None, None]
    tree = {"a": {"kernel": x}, "b": {"kernel": x[::-1] * f32(1.5)}, "bias": np.ones(4, f32)}
    grid = (5.0, 7.0, 8.0) if len(fmt.magnitudes) == 2 else (5.0, 9.0)
    recipe, errors = calibrate_special_values(tree, [("**/kernel", fmt), ("**", None)], grid)
    table = errors["**/kernel"]
    picks = list(itertools.combinations(grid, 2)) if len(fmt.magnitudes) == 2 else [
        (v,) for v in grid]
    assert set(table) == set(picks)
    for pick in picks:
        made = razer_e3m3(pick[1], pick[0]) if len(pick) == 2 else razer_e4m3(pick[0])
        brute = sum(block_errors(tree[k]["kernel"], made)[0].sum() for k in "ab")
        assert table[pick] == pytest.approx(brute, rel=1e-5)
    best = min(table, key=table.get)
    assert recipe.rules[0].target.magnitudes == best and recipe.rules[1].target is None
    # The errors behind it, block by block.
    if len(fmt.magnitudes) == 1:
        got = np.ravel(jax.jit(lambda x: special_value_errors(x, fmt, (5.0,))[0])(x))
        np.testing.assert_allclose(got, np.ravel(block_errors(x, fmt)[0]), rtol=1e-4, atol=1e-9)


def test_calibration_errors_name_the_argument():
    tree = {"kernel": np.ones((64, 32), f32)}
    with pytest.raises(ValueError, match="recipe: no rule with a RaZeR format"):
        calibrate_special_values(tree, nvfp4())
    with pytest.raises(ValueError, match="grid: razer_e3m3 needs two magnitudes"):
        calibrate_special_values(tree, razer_e3m3(), (5.0,))
    with pytest.raises(ValueError, match="grid: 6.0 is an e2m1 magnitude"):
        calibrate_special_values(tree, razer_e3m3(), (5.0, 6.0))


def test_selector_and_scales_are_the_two_parts_of_the_byte():
    x = matrices()
    for fmt in FORMATS.values():
        q = run(x, fmt)[0]
        selector, scales = razer_selector(q), razer_scales(q)
        assert selector.dtype == scales.dtype == jnp.uint8
        np.testing.assert_array_equal((selector << fmt.scale_shift) | scales, q.scales)
        assert len(np.unique(selector)) == len(fmt.specials)  # every value is in use
        np.testing.assert_array_equal(
            fmt.special_values(q.scales), np.array(fmt.specials, f32)[np.asarray(selector)])


def test_errors_name_the_argument():
    x = jnp.ones((32, 4))
    for call, error, message in (
        (lambda: razer_e3m3(6), ValueError, "w: 6.0 is an e2m1 magnitude already"),
        (lambda: razer_e4m3(1.5), ValueError, "v: 1.5 is an e2m1 magnitude already"),
        (lambda: razer_e4m3(12.5), ValueError, r"v: must lie in \[0, 12\], got 12.5"),
        (lambda: razer_e4m3(0), ValueError, "v: must be a positive multiple of 0.5"),
        (lambda: razer_e4m3(-5), ValueError, r"v: must lie in \[0, 12\], got -5"),
        (lambda: razer_e3m3(7.25), ValueError, "w: must be a positive multiple of 0.5 up to 12"),
        (lambda: razer_e3m3("8"), TypeError, "w: expected a real number"),
        (lambda: razer_e3m3(5, 5), ValueError, r"w: equals v \(5.0\)"),
        (lambda: quantize_razer(x, nvfp4()), TypeError, r"fmt: expected razer_e4m3\(\)"),
        (lambda: quantize_razer(x, razer_e4m3(), importance=jnp.ones((3, 4))), ValueError,
         r"importance: shape \(3, 4\) does not broadcast to \(32, 4\)"),
        (lambda: razer_selector(x), TypeError, "q: expected a QuantizedArray in a RaZeR format"),
        (lambda: razer_scales(run(matrices(), nvfp4())[0]), TypeError, "q: expected a Quantized"),
    ):
        with pytest.raises(error, match=message):
            call()
