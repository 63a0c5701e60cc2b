"""Norms against NumPy formulas, the identities that define duals and sharp operators, and edges."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from fadex.optim import (
    NORM_NAMES,
    NormSpec,
    dual_norm,
    euclidean_constant,
    lmo,
    lmo_with_dual,
    norm,
    norm_upper_bound,
    sharp,
)

# Programs that run for a moment on a few numbers: nearly all of the time would be LLVM's.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
EXACT = {"spectral": "svd", "spectral_conv": "svd", "nuclear": "svd"}
SPECS = [
    NormSpec(n, p=3.0 if n in ("lp", "schatten") else None, method=EXACT.get(n, "auto"))
    for n in NORM_NAMES
]
SPECS += [
    NormSpec("linf", scale="fan_in"), NormSpec("spectral", scale="max", method="svd"),
    NormSpec("spectral", scale="moonlight", method="svd"), NormSpec("spectral", scale=2.5,
    method="svd"), NormSpec("per_input", scale="fan_in"), NormSpec("lp", p=1.3),
    NormSpec("schatten", p=1.5),
]  # fmt: skip
IDS = [f"{s.name}-{s.scale}-{s.p}" for s in SPECS]


def shape_for(spec):
    return (2, 3, 4, 5) if spec.name == "spectral_conv" else (4, 7)


def pair(spec, seed=0):
    rng = np.random.default_rng(seed)
    shape = shape_for(spec)
    return (rng.standard_normal(shape).astype(np.float32) for _ in range(2))


def reference_dual(spec, s):
    """Dual norms in NumPy float64, from the table at the top of fadex.optim.norms."""
    s = np.asarray(s, np.float64)
    m = s.reshape(-1, s.shape[-1])
    k, n = (s.shape[-2], m.shape[1]) if spec.name == "spectral_conv" else m.shape
    sigma = np.linalg.svd(m, compute_uv=False)
    taps = math.prod(s.shape[:-2]) if spec.name == "spectral_conv" else 1
    q = None if spec.p is None else spec.p / (spec.p - 1)
    plain = {
        "l2": lambda: np.sqrt((m**2).sum()), "rms": lambda: np.sqrt(m.size * (m**2).sum()),
        "linf": lambda: np.abs(m).sum(), "l1": lambda: np.abs(m).max(),
        "lp": lambda: (np.abs(m) ** q).sum() ** (1 / q), "spectral": sigma.sum,
        "spectral_conv": sigma.sum, "per_input": lambda: np.sqrt((m**2).sum(1)).sum(),
        "per_output": lambda: np.sqrt((m**2).sum(0)).sum(), "nuclear": sigma.max,
        "schatten": lambda: (sigma**q).sum() ** (1 / q),
    }[spec.name]()  # fmt: skip
    scale = {
        ("linf", "fan_in"): 1 / k, ("spectral", None): math.sqrt(n / k),
        ("spectral", "max"): max(1, math.sqrt(n / k)),
        ("spectral", "moonlight"): 0.2 * math.sqrt(max(n, k)),
        ("spectral_conv", None): math.sqrt(n / k) / taps, ("per_input", None): math.sqrt(n),
        ("per_input", "fan_in"): math.sqrt(n) / k, ("per_output", None): 1 / math.sqrt(k),
    }.get((spec.name, spec.scale), spec.scale if isinstance(spec.scale, float) else 1.0)
    return scale * plain


SCALES = (1.0, -1.0, 7.0, 1e-30, 1e30, 0.0)
POINTS = 300


def extreme(spec):
    """One entry, flat, orthogonal, one row, one column: one is extremal for each norm."""
    shape = shape_for(spec)
    m, n = math.prod(shape[:-1]), shape[-1]
    one, row, column = (np.zeros((m, n), np.float32) for _ in range(3))
    one[0, 0], row[0], column[:, 0] = 1, 1, 1
    points = np.stack([one, np.ones_like(one), np.eye(m, n, dtype=np.float32), row, column])
    return points.reshape(-1, *shape)


@functools.cache
def evaluated(spec):
    """Everything the tests below ask of a norm, from one program: compiling dominates here."""
    s, x = pair(spec)
    rng = np.random.default_rng(1)
    points = np.concatenate(
        [x[None], rng.standard_normal((POINTS - 1, *s.shape)).astype(np.float32), extreme(spec)])

    def program(inputs, points):
        step, dual = jax.vmap(functools.partial(lmo_with_dual, spec))(inputs)
        up = jax.vmap(functools.partial(sharp, spec))(inputs)
        norms = jax.vmap(functools.partial(norm, spec))(
            jnp.concatenate([points, step[:1], up[:1]]))
        return step, dual, up, norms[-2], norms[-1], norms[:-2]

    poisoned = s.copy()
    poisoned[..., 0, 1] = np.nan
    inputs = np.stack([*(np.float32(scale) * s for scale in SCALES), poisoned])
    out = [np.asarray(a) for a in jit(program)(inputs, points)]
    return s, points, *out


def jitted(*functions):
    """The results of several functions of the same arrays, from one program."""
    return jit(lambda *arrays: [f(*arrays) for f in functions])


inner = lambda a, b: float(np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64)))


@pytest.mark.smoke
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_dual_norm_is_the_formula_of_the_table(spec):
    s, _, _, dual, *_ = evaluated(spec)
    np.testing.assert_allclose(dual[0], reference_dual(spec, s), rtol=2e-6)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_identities_of_dual_norm_lmo_and_sharp(spec):
    s, points, step, dual, up, step_norm, up_norm, norms = evaluated(spec)
    close = functools.partial(np.testing.assert_allclose, rtol=3e-6)
    close(step_norm, 1.0)
    close(inner(s, step[0]), -float(dual[0]))
    close(inner(s, up[0]), float(dual[0]) ** 2)
    close(up_norm, dual[0])
    for i, scale in enumerate(SCALES[:3]):
        close(step[i], np.sign(scale) * step[0], rtol=0, atol=1e-5 * np.abs(step[0]).max())
        close(up[i], scale * up[0], rtol=0, atol=1e-4 * np.abs(up[0]).max())
    # Hölder, and with it: no feasible point beats the lmo.
    for x, size in zip(points, norms):
        assert abs(inner(s, x)) <= float(dual[0] * size) * (1 + 1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_zero_nan_tiny_huge_and_half_precision(spec):
    s, _, step, dual, *_ = evaluated(spec)
    assert SCALES[5] == 0 and not np.any(step[5]) and dual[5] == 0
    assert np.isnan(step[6]).any() and np.isnan(dual[6])
    for i in (3, 4):
        np.testing.assert_allclose(step[i], step[0], atol=2e-5 * np.abs(step[0]).max())
        np.testing.assert_allclose(dual[i] / SCALES[i], dual[0], rtol=1e-5)
    for dtype in (jnp.float16, jnp.bfloat16):
        shape = jax.eval_shape(functools.partial(lmo_with_dual, spec), jnp.asarray(s, dtype))
        assert [a.dtype for a in shape] == [dtype, jnp.float32]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_calculated_in_float32(dtype):
    s, _ = pair(SPECS[0])
    half = (1e-4 * s).astype(dtype)  # squares of these vanish in float16
    of = [functools.partial(lmo_with_dual, spec)
          for spec in (NormSpec("l2"), NormSpec("linf"), NormSpec("spectral", steps=2))]
    run = jitted(*of)
    for (step, dual), (same, same_dual) in zip(run(half), run(half.astype(np.float32))):
        assert step.dtype == dtype and dual.dtype == jnp.float32
        # The last bit belongs to the compiler: 16 bits hide it but at a tie.
        np.testing.assert_allclose(step.astype(np.float32), same.astype(dtype).astype(np.float32),
                                   rtol=2.0 ** -8 if dtype == jnp.bfloat16 else 2.0 ** -10)
        assert np.mean(step == same.astype(dtype)) > 0.9
        np.testing.assert_allclose(dual, same_dual, rtol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_euclidean_constant_bounds_the_norm_and_is_attained(spec):
    _, points, *_, norms = evaluated(spec)
    kappa = euclidean_constant(spec, shape_for(spec))
    sizes = np.sqrt((points.astype(np.float64) ** 2).reshape(len(points), -1).sum(1))
    assert np.max(norms[:POINTS] / sizes[:POINTS]) <= kappa * (1 + 1e-6)
    np.testing.assert_allclose(np.max(norms[POINTS:] / sizes[POINTS:]), kappa, rtol=1e-5)


def test_newton_schulz_direction_is_within_its_accuracy_of_the_svd():
    # Condition number 30: polar express with 6 steps stays within 2.6e-3 of 1 there.
    u, _, vt = np.linalg.svd(np.random.default_rng(0).standard_normal((16, 24)))
    s = ((u * np.geomspace(1, 1 / 30, 16)) @ vt[:16]).astype(np.float32)
    step, dual = jit(functools.partial(lmo_with_dual, "spectral"))(s)
    scale = math.sqrt(24 / 16)
    assert np.linalg.norm(step + scale * u @ vt[:16], 2) <= 5e-3 * scale
    np.testing.assert_allclose(dual, scale * np.geomspace(1, 1 / 30, 16).sum(), rtol=5e-3)


def test_nuclear_lmo_by_power_iteration_reaches_the_leading_pair():
    u, _, vt = np.linalg.svd(np.random.default_rng(1).standard_normal((12, 9)))
    s = ((u[:, :9] * 0.8 ** np.arange(9)) @ vt).astype(np.float32)
    of = [functools.partial(lmo_with_dual, NormSpec("nuclear", steps=40), key=key)
          for key in (None, jax.random.key(3))]
    for step, dual in jitted(*of)(s):
        np.testing.assert_allclose(step, -np.outer(u[:, 0], vt[0]), atol=1e-5)
        np.testing.assert_allclose(dual, 1.0, rtol=1e-5)


def test_upper_bound_holds_and_is_tight_to_the_rank_factor():
    rng = np.random.default_rng(0)
    scales = np.array([1e-20, 1.0, 1e20, 0.0], np.float32)[:, None, None]
    squarings = (1, 4)
    run = jitted(*(jax.vmap(functools.partial(norm_upper_bound, "spectral", squarings=k))
                   for k in squarings))
    for shape in [(6, 6), (40, 8), (8, 40)]:
        x = rng.standard_normal(shape).astype(np.float32)
        # The norm's unit is the ball of radius √(N/K) in the largest singular value.
        sigma = np.linalg.svd(x.astype(np.float64), compute_uv=False)
        size = sigma[0] / math.sqrt(shape[1] / shape[0])
        for k, bounds in zip(squarings, run(scales * x)):
            ratio = np.asarray(bounds, np.float64)[:3] / (scales[:3, 0, 0] * size)
            assert np.all(ratio >= 1 - 1e-6)
            assert np.all(ratio <= min(shape) ** 2.0 ** -(k + 1) * (1 + 1e-5))
            power = 2.0 ** (k + 1)
            written = ((sigma / sigma[0]) ** power).sum() ** (1 / power)
            np.testing.assert_allclose(ratio, written, rtol=2e-5)
            assert bounds[3] == 0
    # Rank one: the bound is the norm itself.
    x = np.outer(np.arange(1, 5.0), np.ones(3)).astype(np.float32)
    bound = jit(functools.partial(norm_upper_bound, "spectral"))(x)
    np.testing.assert_allclose(bound, np.linalg.norm(x) / math.sqrt(3 / 4), rtol=1e-5)


@pytest.mark.parametrize("name", ["spectral", "per_input", "per_output", "nuclear"])
def test_stacked_layers_are_layers_of_their_own(name):
    s = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(np.float32)
    of = functools.partial(lmo_with_dual, NormSpec(name, steps=2 if name == "spectral" else None))
    (step, dual), (one, one_dual) = jitted(of, lambda s: of(s[1, 1]))(s)
    assert dual.shape == (3, 2)
    np.testing.assert_allclose(step[1, 1], one, atol=1e-6)
    np.testing.assert_allclose(dual[1, 1], one_dual, rtol=1e-5)


def test_dimension_numbers_choose_the_matrix():
    s = np.random.default_rng(0).standard_normal((6, 2, 4)).astype(np.float32)
    # An attention kernel (d, heads, d_head), one input axis, two output axes; then output axes
    # before input axes, and a stacked axis in the middle; vector norms take the axes, too.
    quick = functools.partial(NormSpec, "spectral", steps=1)
    joined, turned = (quick(dims=MuonDimensionNumbers(*axes)) for axes in ((0, (1, 2)), (2, 0)))
    per_layer = NormSpec("linf", dims=MuonDimensionNumbers((), -1))
    one, flat, (step, dual), alone, sums = jitted(
        lambda s: lmo(joined, s), lambda s: lmo(quick(), s.reshape(6, 8)).reshape(6, 2, 4),
        lambda s: lmo_with_dual(turned, s), lambda s: lmo(quick(), s[:, 1].T),
        lambda s: dual_norm(per_layer, s))(s)
    np.testing.assert_allclose(one, flat, atol=1e-6)
    assert dual.shape == (2,)
    np.testing.assert_allclose(step[:, 1].T, alone, atol=1e-6)
    np.testing.assert_allclose(sums, np.abs(s).sum(-1), rtol=1e-6)


def test_transposition_swaps_inputs_and_outputs():
    s = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    unit = NormSpec("spectral", scale="unit", steps=2)
    rows, columns = (NormSpec(name, scale="unit") for name in ("per_input", "per_output"))
    a, b, c, d = jitted(lambda s: lmo(unit, s.T), lambda s: lmo(unit, s).T,
                        lambda s: lmo(rows, s.T), lambda s: lmo(columns, s).T)(s)
    np.testing.assert_allclose(a, b, atol=2e-6)
    np.testing.assert_allclose(c, d, atol=1e-6)


def test_l1_takes_the_lowest_index_among_ties():
    step = jit(functools.partial(lmo, "l1"))(np.array([1.0, -2.0, 2.0], np.float32))
    np.testing.assert_array_equal(step, [0, 1, 0])


@pytest.mark.parametrize("name", NORM_NAMES)
def test_scalars_single_rows_and_empty_arrays(name):
    spec = NormSpec(name, p=2.5 if name in ("lp", "schatten") else None)
    matrix = name in ("spectral", "spectral_conv", "per_input", "per_output", "nuclear", "schatten")
    of = functools.partial(lmo_with_dual, spec)
    scalar = np.float32(-3.0) if not matrix else np.full((1, 1), -3.0, np.float32)
    # One row: U Vᵀ is g / ‖g‖ with every singular-value norm.
    g = np.array([[3.0, 4.0, 0.0]], np.float32)
    run = jit(lambda s, e, g: (of(s), of(e), lmo(spec, g)))
    (step, dual), (empty, none), row = run(scalar, np.zeros((0, 3), np.float32), g)
    if not matrix:
        assert step == 1 and dual == 3
    assert empty.shape == (0, 3) and none == 0
    if name in ("spectral", "schatten", "nuclear"):
        np.testing.assert_allclose(row / np.linalg.norm(row), [[-0.6, -0.8, 0]], atol=3e-4)


def test_functions_run_under_vmap_and_grad():
    s = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    quick = NormSpec("spectral", steps=2)
    for batched, one in jitted(*(
        lambda s, spec=spec: (jax.vmap(functools.partial(lmo, spec))(s)[2], lmo(spec, s[2]))
        for spec in (quick, "linf", "per_output")
    ))(s):
        np.testing.assert_allclose(batched, one, atol=1e-6)
    # The gradient of a dual norm is -lmo, where it is differentiable.
    exact = NormSpec("spectral", method="svd")
    smooth = (NormSpec("l2"), NormSpec("per_input"), NormSpec("lp", p=3.0))
    found = jitted(*(
        lambda s, a=a, b=b: (jax.grad(functools.partial(dual_norm, a))(s[0]), lmo(b, s[0]))
        for a, b in [*zip(smooth, smooth), (NormSpec("spectral"), exact)]
    ))(s)
    for (grad, step), atol in zip(found, (1e-5, 1e-5, 1e-5, 0.05)):
        np.testing.assert_allclose(grad, -step, atol=atol)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "spectrl"}, "name: expected one of .*'spectral'.*got 'spectrl'"),
        ({"name": "l2", "radius": 0.0}, r"radius: must lie in \(0.0, inf\), got 0.0"),
        ({"name": "l2", "scale": "rms"}, "scale: the norm 'l2' takes .*got 'rms'"),
        ({"name": "rms", "scale": 2.0}, "'rms' takes no scale, got 2.0"),
        ({"name": "linf", "scale": -1.0}, "scale: must lie in"),
        ({"name": "lp"}, "p: belongs to 'lp' and 'schatten' only, got None"),
        ({"name": "l2", "p": 2.0}, "p: belongs to 'lp'"),
        ({"name": "lp", "p": 1.0}, r"p: must lie in \(1.0"),
        ({"name": "spectral", "steps": 0}, "steps: must be >= 1"),
        ({"name": "spectral", "coefficients": (1.0, 2.0)}, "coefficients: expected"),
    ],
)
def test_bad_specifications_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        NormSpec(**arguments)


def test_bad_shapes_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"'spectral' needs a matrix, got .* shape \(4,\)"):
        lmo("spectral", jnp.ones(4))
    with pytest.raises(ValueError, match=r"axes \[3\] do not exist .*\(2, 2\)"):
        lmo(NormSpec("spectral", dims=MuonDimensionNumbers(0, 3)), jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="an axis is named twice"):
        lmo(NormSpec("spectral", dims=MuonDimensionNumbers(0, -2)), jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="dims: expected MuonDimensionNumbers"):
        NormSpec("spectral", dims=(0, 1))


def test_specifications_are_hashable_whatever_they_were_given():
    spec = NormSpec("spectral", dims=MuonDimensionNumbers([0, 1], [2]),
                    coefficients=[[3.4445, -4.7750, 2.0315]] * 5)
    assert hash(spec) == hash(NormSpec("spectral", dims=MuonDimensionNumbers((0, 1), (2,)),
                                       coefficients=((3.4445, -4.7750, 2.0315),) * 5))
