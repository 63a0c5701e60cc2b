import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from fadex.quant import element_levels
from fadex.quant.qat import (
    PERTURBATIONS,
    arctan,
    gaussian,
    laplace,
    make_kernel,
    scaled_round,
    sigmoid,
    ste,
    surrogate_round,
    surrogate_weight,
    uniform,
    uniform_ripple,
)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
INT2 = np.array([-1.5, -0.5, 0.5, 1.5])
GRIDS = {"int2": INT2, "e2m1": element_levels("e2m1"), "nf4": element_levels("nf4"),
         "int4": np.arange(-7.0, 8.0)}  # fmt: skip


def brute_force(name, w, levels, delta, thresholds=None):
    """The sum over all thresholds in float64, tails from scipy and hand."""
    tail = {
        "rademacher": lambda a: 0.5 * ((a >= -1) & (a < 1)),
        "uniform": lambda a: np.maximum(3 - a**2, 0) / (4 * math.sqrt(3)),
        "gaussian": lambda a: np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi),
        "laplace": lambda a: 0.5 * np.exp(-math.sqrt(2) * abs(a)) * (abs(a) + math.sqrt(0.5)),
        "arctan": lambda a: 1 / (math.pi * (1 + a**2)),
        "sigmoid": lambda a: 1.5316281462 * special.expit(1.5316281462 * a)
        * special.expit(-1.5316281462 * a),
    }[name]
    levels = np.asarray(levels, np.float64)
    cuts = (levels[1:] + levels[:-1]) / 2 if thresholds is None else thresholds
    d = np.broadcast_to(delta, cuts.shape)
    return (np.diff(levels) / d * tail((np.asarray(w, np.float64)[..., None] - cuts) / d)).sum(-1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] * (n == "gaussian")) for n in PERTURBATIONS],
)
def test_the_sum_over_thresholds_whichever_of_them_are_summed(name):
    """Static radii sum the nearest thresholds on uniform grids, traced ones all of them."""
    w = np.random.default_rng(0).uniform(-9, 9, 2000).astype(np.float32)
    p = PERTURBATIONS[name]
    deltas = np.array([0.3, 0.7])

    @jit
    def run(w, deltas):
        out = {}
        for grid in ("int4", "e2m1"):
            static = [surrogate_weight(w, GRIDS[grid], kernel=make_kernel(p, float(d)))
                      for d in deltas_static]
            relative = surrogate_weight(w, GRIDS[grid], kernel=make_kernel(p, 0.8, "relative"))
            out[grid] = jnp.stack(static), relative
        traced = jax.vmap(
            lambda d: surrogate_weight(w, GRIDS["e2m1"], kernel=make_kernel(p, d)))(deltas)
        wide = surrogate_weight(w, np.arange(-60.0, 61.0), kernel=make_kernel(p, deltas[1]))
        near = surrogate_weight(w, np.arange(-60.0, 61.0), kernel=make_kernel(p, 0.7))
        return out, traced, wide, near

    deltas_static = deltas.tolist()
    out, traced, wide, near = run(w, jnp.asarray(deltas, jnp.float32))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    for grid, (static, relative) in out.items():
        exact = np.stack([brute_force(name, w, GRIDS[grid], d) for d in deltas])
        if name == "rademacher":  # a float32 radius moves the rectangles' ends
            agree = lambda got: np.isclose(got, exact, atol=1e-5).mean() > 0.995
        else:
            agree = lambda got: close(got, exact) is None
        assert agree(static)
        assert grid != "e2m1" or agree(traced)
        half = 0.4 * np.diff(np.asarray(GRIDS[grid], np.float64))
        if name != "rademacher":
            close(relative, brute_force(name, w, GRIDS[grid], half))
    many = brute_force(name, w, np.arange(-60.0, 61.0), 0.7)
    if name != "rademacher":
        close(wide, many)
        close(near, many)


def test_the_gaussian_surrogate_is_the_derivative_of_the_smoothed_quantizer():
    """Stein: an independent route through erf and ``jax.grad``, to 1e-6."""
    w = np.linspace(-8, 8, 1601).astype(np.float32)
    with jax.enable_x64(True):
        for grid in GRIDS.values():
            cuts = (np.asarray(grid[1:], np.float64) + grid[:-1]) / 2
            jumps = np.diff(np.asarray(grid, np.float64))

            def smoothed(x, delta, cuts=cuts, jumps=jumps):
                return (jumps * jax.scipy.special.erf((x - cuts) / (delta * 2**0.5))).sum() / 2

            slope = jit(jax.vmap(jax.grad(smoothed), (0, None)))
            ours = jit(lambda w, grid=grid: [
                surrogate_weight(w, grid, kernel=gaussian(d)) for d in (0.15, 0.35, 0.5)])
            for delta, got in zip((0.15, 0.35, 0.5), ours(w)):
                assert got.dtype == jnp.float32
                exact = slope(w.astype(np.float64), delta)
                np.testing.assert_allclose(got, exact, rtol=2e-6, atol=1e-6)


def test_ste_is_exactly_one_between_the_outer_levels():
    rng = np.random.default_rng(0)
    # As an argument of the program: a traced radius would sum rectangles whose ends are rounded.
    weight = jit(lambda w, k: {n: surrogate_weight(w[n], g, kernel=k) for n, g in GRIDS.items()})
    points, inside = {}, {}
    for name, grid in GRIDS.items():
        low, high = grid[0], grid[-1]
        # Levels, thresholds and their neighbours in float32 as well as 10^4 random points.
        special = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]).astype(np.float32)
        special = np.concatenate([special, np.nextafter(special, np.float32(9)),
                                  np.nextafter(special, np.float32(-9))])
        inner = np.concatenate([rng.uniform(low, high, 10_000).astype(np.float32), special])
        inner = inner[(inner >= np.float32(low)) & (inner < np.float32(high))]
        outer = np.array([low - 1e-3, high, high + 1e-3, 50, -50], np.float32)
        points[name] = np.concatenate([inner, outer])
        inside[name] = np.arange(len(points[name])) < len(inner)
    for name, got in weight(points, ste()).items():
        np.testing.assert_array_equal(got, inside[name], err_msg=name)
    # The sum of rectangles, which a traced radius takes, on grids that are exact in binary.
    summed = jit(lambda w, k, n: surrogate_weight(w, GRIDS[n], kernel=k), static_argnums=2)
    half_cells = make_kernel(PERTURBATIONS["rademacher"], 1.0, "relative")
    for name in ("int2", "e2m1"):
        inner = rng.uniform(GRIDS[name][0], GRIDS[name][-1], 10_000).astype(np.float32)
        inner = np.concatenate([inner, GRIDS[name][:-1].astype(np.float32)])
        got = summed(np.append(inner, GRIDS[name][-1]).astype(np.float32), half_cells, name)
        np.testing.assert_array_equal(got, np.arange(len(inner) + 1) < len(inner))


def test_rectangles_are_half_open_as_the_step_function_is():
    """H(0) = 1: at exactly one radius below a threshold the weight counts, above it does not."""
    k = make_kernel(PERTURBATIONS["rademacher"], 0.25)
    got = surrogate_weight(jnp.array([-0.25, 0.0, 0.25, 0.24]), [-0.5, 0.5], kernel=k)
    np.testing.assert_array_equal(got, [2.0, 2.0, 0.0, 2.0])
    assert float(surrogate_round(0.0, [-0.5, 0.5], kernel=k)) == 0.5
    q = surrogate_round(jnp.array([-1.0, 1.0, 0.99999, -1.5]), INT2, kernel=k)
    np.testing.assert_array_equal(q, [-0.5, 1.5, 0.5, -1.5])


@pytest.mark.parametrize("make", [gaussian, uniform, laplace, arctan, sigmoid])
def test_the_mass_is_the_range_of_the_levels_and_each_bump_is_even(make):
    u = np.linspace(-400, 400, 400_001).astype(np.float32)  # the arctan's tail is 1/u^2
    s = jit(lambda u: surrogate_weight(u, [-1.0, 0.5, 2.0], [0.0, 1.0], kernel=make(0.4)))(u)
    s = np.asarray(s, np.float64)
    lost = 2 * 3 * 0.4 / (math.pi * 400) if make is arctan else 0
    assert abs(np.trapezoid(s, u.astype(np.float64)) - (3 - lost)) < 2e-4
    u = np.linspace(0, 3, 50).astype(np.float32)
    up, down = jit(lambda u: [
        surrogate_weight(0.25 + s * u, [-0.5, 1.0], kernel=make(0.4)) for s in (1, -1)])(u)
    np.testing.assert_allclose(up, down, rtol=1e-5, atol=1e-7)


def test_a_vanishing_radius_leaves_mass_at_the_thresholds_only():
    for make in (gaussian, uniform, laplace, sigmoid):
        weight = jit(lambda w, make=make: surrogate_weight(w, INT2, kernel=make(1e-3)))
        u = np.linspace(0.95, 1.05, 20_001).astype(np.float32)
        away = np.array([-1.5, -0.5, 0.1, 0.9, 3.0], np.float32)
        s = np.asarray(weight(np.concatenate([u, away])), np.float64)
        assert np.abs(s[-5:]).max() < 1e-6
        assert abs(np.trapezoid(s[:-5], u) - 1) < 1e-3


def test_the_ripple_of_a_uniform_grid_is_its_fourier_series():
    """Poisson's identity, far from the edges; and the figures of three radii."""
    grid = np.arange(-40.0, 41.0)
    x = np.linspace(-0.5, 0.5, 101)
    with jax.enable_x64(True):
        got, want = jit(jax.vmap(lambda delta, x: (
            surrogate_weight(x + 0.5, grid, kernel=gaussian(delta)), uniform_ripple(x, delta),
        ), (0, None)))(np.array([0.15, 0.2, 0.3, 0.5, 1.0]), x)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, atol=1e-12)
    x = x.astype(np.float32)
    at = np.array([0.0, 0.5])
    for ratio, low, high in ((0.5, 0.986, 1.014), (0.3, 0.663, 1.340), (0.2, 0.175, 1.995)):
        ends, got, want = jit(lambda x, ratio=ratio: (
            uniform_ripple(at, ratio),  # in steps of 2, to which the radius scales
            surrogate_weight(2 * x + 1, 2 * grid, kernel=gaussian(2 * ratio)),
            uniform_ripple(x, ratio),
        ))(x)
        np.testing.assert_allclose(ends, [high, low], atol=5e-4)
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_edges():
    w = jnp.array([-2.0, -1.5, -1.2, 0.3, 1.2, 1.5, 1.5000001, 1.6], jnp.float32)
    k = gaussian(0.2)
    tail, hold, through = jit(lambda w: [
        surrogate_weight(w, INT2, kernel=k, edge=edge) for edge in ("tail", "hold", "pass")])(w)
    held = np.array([0, 1, 1, 0, 1, 1, 1, 0], bool)
    np.testing.assert_array_equal(hold, np.where(held, 1, tail))
    held[[0, -1]] = True
    np.testing.assert_array_equal(through, np.where(held, 1, tail))
    assert float(tail[5]) < 0.1  # half a bump is all that the largest weight would get
    np.testing.assert_array_equal(  # STE that clips nothing
        surrogate_weight(w, INT2, kernel=ste(), edge="pass"), np.ones(8))


def test_forward_is_the_quantizer_and_both_modes_give_the_surrogate():
    w = jnp.asarray(np.random.default_rng(1).uniform(-2, 2, (6, 5)), jnp.float32)
    k = gaussian(0.35)

    @jit
    def everything(w):
        f = lambda w: surrogate_round(w, INT2, kernel=k)
        total = lambda w: (f(w) * jnp.arange(5)).sum()
        tangent = jnp.ones_like(w)
        scanned = lambda w: jax.lax.scan(lambda c, row: (c + f(row).sum(), f(row)), 0.0, w)[1]
        return {
            "value": f(w), "weight": surrogate_weight(w, INT2, kernel=k),
            "reverse": jax.grad(total)(w), "forward": jax.jvp(f, (w,), (tangent,))[1],
            "vmap": jax.vmap(jax.vmap(jax.grad(f)))(w),
            "scan": jax.grad(lambda w: scanned(w).sum())(w),
            "remat": jax.grad(lambda w: jax.checkpoint(f)(w).sum())(w),
            "linear": jax.linearize(f, w)[1](tangent),
            "over": jax.jvp(jax.grad(lambda w: (f(w) ** 2).sum()), (w,), (tangent,))[1],
        }

    out = everything(w)
    np.testing.assert_array_equal(
        out["value"], INT2[(np.asarray(w)[..., None] >= [-1, 0, 1]).sum(-1)])
    np.testing.assert_allclose(out["reverse"], out["weight"] * np.arange(5), rtol=1e-6)
    for name in ("forward", "vmap", "scan", "remat", "linear"):
        np.testing.assert_allclose(out[name], out["weight"], rtol=1e-6, atol=1e-7, err_msg=name)
    # Second derivatives exist: of the square, 2 (S^2 + Q S'), with S' of a Gaussian bump.
    cuts, x = np.array([-1, 0, 1]), np.asarray(w, np.float64)[..., None]
    slope = (-(x - cuts) / 0.35**2 * np.exp(-((x - cuts) / 0.35) ** 2 / 2)).sum(-1) / (
        0.35 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(
        out["over"], 2 * (np.asarray(out["weight"]) ** 2 + np.asarray(out["value"]) * slope),
        rtol=1e-3, atol=1e-4,
    )


def test_traced_radii_and_codebooks_per_block():
    w = jnp.asarray(np.random.default_rng(2).uniform(-2, 2, (3, 7)), jnp.float32)
    books = np.stack([INT2, 2 * INT2, [-1.0, 0.0, 0.25, 2.0]])  # [block, level]

    @jit
    def run(w, books, deltas):
        traced = lambda w: surrogate_round(w, books.T[:, :, None], kernel=gaussian(deltas[:, None]))
        return traced(w), jax.grad(lambda w: traced(w).sum())(w)

    value, slope = run(w, jnp.asarray(books, jnp.float32), jnp.array([0.2, 0.3, 0.4]))
    for i, delta in enumerate((0.2, 0.3, 0.4)):
        cuts = (books[i, 1:] + books[i, :-1]) / 2
        np.testing.assert_array_equal(
            value[i], books[i][(np.asarray(w[i])[:, None] >= cuts).sum(-1)].astype(np.float32))
        np.testing.assert_allclose(
            slope[i], brute_force("gaussian", w[i], books[i], delta), rtol=1e-4, atol=1e-6)
    # Neither levels nor radius are trained through the rounding.
    off = jit(jax.grad(lambda d, b: surrogate_round(w, b, kernel=gaussian(d)).sum(), (0, 1)))(
        jnp.float32(0.3), jnp.asarray(INT2, jnp.float32))
    assert all(float(jnp.abs(g).max()) == 0 for g in off)


def test_nan_latents_stay_nan_in_value_and_surrogate():
    """Whichever way the grid is searched and summed; infinities are the outermost levels."""
    w = np.array([np.nan, np.inf, -np.inf, 0.3], np.float32)
    wide = np.arange(-60.0, 61.0)

    @jit
    def run(w, delta):
        grids = [(INT2, gaussian(0.3)), (INT2, ste()), (INT2, laplace(0.3)), (wide, uniform(0.3)),
                 (wide, gaussian(delta)), (INT2 + delta, ste())]
        return [[(surrogate_round(w, g, kernel=k), surrogate_weight(w, g, kernel=k, edge=edge))
                 for g, k in grids] for edge in ("tail", "hold", "pass")]

    for beyond, found in zip((0, 0, 1), run(w, np.float32(0.3))):
        for value, weight in found:
            np.testing.assert_array_equal(np.isnan(value), [1, 0, 0, 0])
            np.testing.assert_array_equal(weight[:3], [np.nan, beyond, beyond])
        assert found[0][0][1] == 1.5 and found[3][0][2] == -60
    # A scale that has left its range says so, at its own weights alone.
    value, (dw, ds) = jit(jax.vmap(jax.value_and_grad(
        lambda w, s: scaled_round(w, s, INT2, kernel=gaussian(0.3)), (0, 1))))(
        np.array([0.3, 0.3, 0.3, 0.3, np.nan], np.float32),
        np.array([1.0, 0.0, -1.0, np.inf, 1.0], np.float32))
    for got in (value, dw):
        np.testing.assert_array_equal(np.isnan(got), [0, 1, 1, 1, 1])
    assert np.isfinite(ds[0])


def test_bfloat16_latents_are_weighed_in_float32():
    w = np.linspace(-1.6, 1.6, 64).astype(jnp.bfloat16)

    @jit
    def run(w):
        out, pull = jax.vjp(lambda w: surrogate_round(w, INT2, kernel=gaussian(0.3)), w)
        return surrogate_weight(w, INT2, kernel=gaussian(0.3)), out, pull(jnp.ones_like(out))[0]

    weight, out, got = run(w)
    assert weight.dtype == jnp.float32 and out.dtype == got.dtype == jnp.bfloat16
    exact = brute_force("gaussian", np.asarray(w, np.float32), INT2, 0.3)
    np.testing.assert_allclose(weight, exact, rtol=1e-5)
    np.testing.assert_array_equal(got, np.asarray(weight).astype(got.dtype))


def test_no_array_holds_a_value_for_every_level():
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    for levels in (GRIDS["e2m1"], np.arange(-127.0, 128.0)):
        f = lambda w, delta: surrogate_weight(w, levels, kernel=gaussian(delta))
        for program in (jit(f).lower(w, 0.3), jit(lambda w: f(w, 0.3)).lower(w)):
            assert program.compile().memory_analysis().temp_size_in_bytes < 256**2 * 4 * 4


def test_a_learned_scale_under_ste_has_the_gradient_of_lsq():
    """Esser et al., eq. 3: round(v/s) - v/s inside, the outer level beyond."""
    levels = np.arange(-4.0, 4.0)
    w = np.random.default_rng(3).uniform(-2, 2, 500).astype(np.float32)
    scale = np.float32(0.3)

    @functools.partial(jit, static_argnums=2)
    def both(w, scale, kernel):
        f = lambda w, s: scaled_round(w, s, levels, kernel=kernel)
        each = jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None))
        return each(w, scale)

    value, (dw, ds) = both(w, scale, ste())
    v = (w / scale).astype(np.float64)
    code = np.clip(np.floor(v + 0.5), -4, 3)
    inside = (v >= -4) & (v < 3)
    np.testing.assert_allclose(value, code * scale, rtol=1e-6)
    np.testing.assert_array_equal(dw, inside)
    np.testing.assert_allclose(ds, np.where(inside, code - v, code), atol=1e-5)
    # Any kernel: R - (w/s) S.
    _, (dw, ds) = both(w, scale, gaussian(0.4))
    s = brute_force("gaussian", v, levels, 0.4)
    np.testing.assert_allclose(dw, s, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ds, code - v * s, rtol=1e-4, atol=1e-4)
    # LSQ's factor reaches the scale alone, and changes no value.
    f = jit(lambda g: jax.value_and_grad(
        lambda s: scaled_round(w, s, levels, kernel=ste(), gradient_scale=g).sum())(scale))
    (plain, grad), (same, scaled) = f(1.0), f(0.1)
    assert float(plain) == float(same)
    np.testing.assert_allclose(scaled, 0.1 * grad, rtol=1e-5)


def test_errors_name_the_argument():
    k, w = gaussian(0.3), jnp.zeros(2)
    for call, error, message in (
        (lambda: surrogate_weight(w, INT2[::-1], kernel=k), ValueError, "levels: must increase"),
        (lambda: surrogate_weight(w, [1.0], kernel=k), ValueError, "levels: expected at least 2"),
        (lambda: surrogate_weight(w, [0, np.inf], kernel=k), ValueError, "levels: expected finite"),
        (lambda: surrogate_weight(w, INT2, [0.0], kernel=k), ValueError,
         "thresholds: expected 3 along the first axis"),
        (lambda: surrogate_weight(w, INT2, [0.0, 2.0, 1.0], kernel=k), ValueError,
         "thresholds: must increase"),
        (lambda: surrogate_round(w, INT2, kernel=k, edge="clip"), ValueError, "edge: expected one"),
        (lambda: surrogate_round(w, INT2, kernel=0.3), TypeError, "kernel: expected a Kernel"),
        (lambda: surrogate_round(w, INT2, kernel=gaussian(lambda t: 0.3)), ValueError,
         "kernel: delta is a schedule"),
        (lambda: scaled_round(w, 0.0, INT2, kernel=k), ValueError, "scale: must be positive"),
        (lambda: scaled_round(w, jnp.array([1.0, -1.0]), INT2, kernel=k), ValueError,
         "scale: must be positive and finite everywhere"),
        (lambda: surrogate_round(jnp.arange(3), INT2, kernel=k), ValueError,
         "w: expected a real floating-point array, got dtype int32"),
    ):
        with pytest.raises(error, match=message):
            call()
