"""Polar factor: its coefficients, its accuracy against the SVD and peers, and its edges."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from fadex.optim import (
    polar_express_coefficients,
    polar_factor,
    polar_lowrank,
    polar_range_sketch,
)
from fadex.optim.newton_schulz_coefficients import resolve_coefficients

GOLDEN = Path(__file__).parents[1] / "golden" / "polar_peers.npz"
MUON = (3.4445, -4.7750, 2.0315)
# The table that the paper's authors publish (arXiv 2505.16932), before the safety factor.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]


compiled = jax.jit(
    polar_factor, static_argnames=("steps", "coefficients", "method", "dtype", "dims")
)


def polar(g, **options):
    """In numpy at once: picking matrices out of a JAX array would compile for every shape."""
    return np.asarray(compiled(g, **options))


def spectrum(m, n, values, seed=0):
    """A float64 matrix with these singular values, and its polar factor on their range."""
    rng = np.random.default_rng(seed)
    k = min(m, n)
    u = np.linalg.qr(rng.normal(size=(m, k)))[0]
    v = np.linalg.qr(rng.normal(size=(n, k)))[0]
    values = np.asarray(values, np.float64)
    return (u * values) @ v.T, (u * (values > 0)) @ v.T


def normal(*shape, seed=0):
    """Drawn by numpy: an eager draw by JAX would compile for every shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def conditioned(m, n, condition, seed=0):
    return spectrum(m, n, np.geomspace(1, 1 / condition, min(m, n)), seed)


def error(got, expected):
    """Spectral norm of the difference, in float64."""
    return np.linalg.norm(np.asarray(got, np.float64) - expected, 2)


def mapped(g, table):
    """Each singular value of ``g / ||g||_F`` through the quintics of ``table``, in float64."""
    u, s, vt = np.linalg.svd(np.asarray(g, np.float64), full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in np.asarray(table, np.float64):
        s = s * (a + s * s * (b + s * s * c))
    return (u * s[..., None, :]) @ vt


def worst(table, low=1e-2):
    """``max |1 - p|`` over singular values in ``[low, 1]``, in float64."""
    x = np.geomspace(low, 1, 20_001)
    for a, b, c in table:
        x = x * (a + x * x * (b + x * x * c))
    return np.abs(1 - x).max()


# Coefficients


@pytest.mark.smoke
def test_the_rule_reproduces_the_published_table():
    table = polar_express_coefficients(8, safety=False)
    np.testing.assert_allclose(table[0], PUBLISHED[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(table, PUBLISHED, rtol=0, atol=1e-8)
    powers = 1.01 ** np.array([1, 3, 5])
    safe = polar_express_coefficients(8)
    np.testing.assert_allclose(safe[:7], np.array(PUBLISHED[:7]) / powers, rtol=0, atol=1e-8)
    np.testing.assert_allclose(safe[7], PUBLISHED[7], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("coefficients", "steps", "low", "high"),
    [
        ("muon", 4, 0.317, 0.319),
        ("muon", 5, 0.317, 0.319),
        ("muon", 9, 0.317, 0.319),
        ("dion", 5, 0.031, 0.033),
        ("polar_express", 5, 0.129, 0.131),
        ("polar_express", 6, 2.4e-3, 2.7e-3),
        ("polar_express", 8, 0, 1e-15),
        ((15 / 8, -10 / 8, 3 / 8), 8, 0.056, 0.058),
    ],
)
def test_worst_singular_value_after_each_schedule(coefficients, steps, low, high):
    assert low <= worst(resolve_coefficients(coefficients, steps)) <= high


def test_each_quintic_is_the_best_uniform_approximation():
    # Chebyshev: the error takes its extreme value with alternating sign at four points. The
    # first step fits from the cushion on, scaled; undone, the error must equioscillate.
    a, b, c = polar_express_coefficients(1, lower=0.2, safety=False)[0]
    x = np.linspace(0.2, 1, 200_001)
    residual = 1 - x * (a + x * x * (b + c * x * x))
    turns = np.sign(residual) * (np.abs(residual) > np.abs(residual).max() * (1 - 1e-6))
    signs = turns[turns != 0]
    assert list(signs[np.r_[True, np.diff(signs) != 0]]) == [1, -1, 1, -1]


def test_each_step_passes_on_an_interval_around_one():
    low, high = 1e-3, 1.0
    for a, b, c in polar_express_coefficients(8, safety=False):
        x = np.linspace(low, high, 100_001)
        y = x * (a + x * x * (b + c * x * x))
        assert abs(y.min() + y.max() - 2) < 1e-8 and y.min() >= low
        low, high = y.min(), y.max()
    assert 1 - low < 1e-15


def test_tables_continue_with_the_limit_and_keep_their_rows():
    limit = [15 / 8, -10 / 8, 3 / 8]
    for table in (np.ones((2, 3)), jnp.ones((2, 3))):
        np.testing.assert_array_equal(resolve_coefficients(table, 4)[2:], [limit, limit])
        assert resolve_coefficients(table, None).shape == (2, 3)
    np.testing.assert_array_equal(resolve_coefficients("dion", 6)[5], limit)
    np.testing.assert_array_equal(resolve_coefficients([1.0, 2.0, 3.0], 4), [[1, 2, 3]] * 4)
    assert [len(resolve_coefficients(n, None)) for n in ("polar_express", "muon", "dion")] == [
        6, 5, 5
    ]


# Accuracy


@pytest.mark.smoke
@pytest.mark.parametrize("method", ["xla", "gram"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 5e-3), ("bfloat16", 0.1), ("float16", 2e-2)]
)
def test_within_the_bar_of_the_svd_up_to_condition_100(method, dtype, bound):
    cases = [conditioned(48, 96, condition, 1) for condition in (1, 10, 100)]
    got = polar(np.float32([g for g, _ in cases]), method=method, dtype=dtype)
    assert got.dtype == jnp.float32
    for u, (_, expected) in zip(got, cases):
        assert error(u, expected) <= bound


def test_eight_steps_converge_to_the_svd():
    g, expected = conditioned(24, 40, 30)
    with jax.enable_x64(True):
        got = polar(g, steps=8)
        assert got.dtype == jnp.float64 and error(got, expected) < 1e-12
        assert error(polar(g, method="svd"), expected) < 1e-12


def test_condition_1000_is_out_of_reach_of_six_steps_but_not_of_eight():
    # What the docstring says: 2e-4 of the Frobenius norm is below the range of 6 steps.
    g, expected = conditioned(128, 128, 1e3)
    g = np.float32(g)
    assert 0.4 < error(polar(g), expected) < 0.65
    assert error(polar(g, steps=8), expected) < 2e-2


def test_gram_equals_plain_even_without_rank():
    # Both are p(g) up to rounding; the oracle is p applied to the singular values in float64.
    # Without restarts, or with a single one, the last spectra diverge in eleven steps.
    k = 24
    spectra = [np.geomspace(1, 1e-2, k), np.ones(k), np.geomspace(1, 1e-8, k), np.arange(k) < 4]
    cases = [spectrum(24, 40, values, i) for i, values in enumerate(spectra)]
    g = np.float32([case[0] for case in cases])
    for steps, bound in ((6, 5e-4), (11, 3e-2)):
        plain, gram = polar(g, method="xla", steps=steps), polar(g, method="gram", steps=steps)
        for (exact, _), one, two in zip(cases, plain, gram):
            expected = mapped(exact, resolve_coefficients("polar_express", steps))
            assert error(one, expected) < bound and error(two, expected) < bound


@pytest.mark.parametrize("shape", [(24, 40), (20, 10)])
def test_equals_optax(shape):
    # 20 x 10 is the drift of kozistr/pytorch_optimizer#408: scale and transposition.
    optax_tables = {"muon": MUON, "dion": optax.contrib._muon._DION_NS_COEFFS}

    @jax.jit
    def both(g):
        orthogonalize = optax.contrib._muon.orthogonalize_via_newton_schulz
        theirs = [orthogonalize(g, jnp.array(table), 5) for table in optax_tables.values()]
        ours = [
            [polar_factor(g, coefficients=name, method=m) for m in ("xla", "gram")]
            for name in optax_tables
        ]
        return ours, theirs

    for ours, theirs in zip(*both(normal(*shape))):
        for got in ours:
            np.testing.assert_allclose(got, theirs, rtol=0, atol=1e-5)


def test_equals_peers_written_for_torch():
    # 16-bit peers are held to their own rounding.
    golden = np.load(GOLDEN)
    np.testing.assert_allclose(resolve_coefficients("dion", 5), golden["dion"], atol=1e-12)
    gram = golden["gram_coefficients"]
    call = jax.jit(lambda g: [polar_factor(g, coefficients=c) for c in ("muon", "dion", gram)])
    for i in range(3):
        muon, dion, express = call(golden[f"g{i}"])
        np.testing.assert_allclose(muon, golden[f"pytorch_optimizer{i}"], atol=1e-5)
        np.testing.assert_allclose(dion, golden[f"pytorch_optimizer_dion{i}"], atol=1e-5)
        np.testing.assert_allclose(express, mapped(golden[f"g{i}"], gram), atol=1e-5)
        assert error(express, golden[f"gram_newton_schulz{i}"]) < 2e-2
        assert error(muon, golden[f"torch_muon{i}"]) < 0.1


# Scales and edges


@pytest.mark.smoke
def test_scale_of_the_gradient_does_not_matter():
    # Among them ||g||_F = 1e-9 (NVIDIA-NeMo/Emerging-Optimizers#229).
    g, expected = conditioned(24, 40, 10)
    scales = np.array([1e-34, 1e-30, 1e-20, 1e-9, 1, 1e20, 1e30]) / np.linalg.norm(g)
    scales = np.append(scales, 3.4e38 / np.abs(g).max())
    got = polar(np.float32(g * scales[:, None, None]))
    assert max(error(u, expected) for u in got) < 5e-3
    # 16 bits: up to the largest number, down to the last normal ones.
    for dtype, scales, bound in (
        (jnp.float16, [6e4 / np.abs(g).max(), 1e-2], 2e-2),
        (jnp.bfloat16, [3e38 / np.abs(g).max(), 1e-30], 0.1),
    ):
        matrices = (g * np.array(scales)[:, None, None]).astype(dtype)
        assert np.isfinite(np.float64(matrices)).all()
        got = polar(matrices)
        assert got.dtype == dtype
        assert max(error(u, expected) for u in got) < bound


def test_eps_is_in_the_units_of_the_gradient_like_optax():
    g = normal(12, 20) * np.float32(1e-9)
    orthogonalize = optax.contrib._muon.orthogonalize_via_newton_schulz
    expected = jax.jit(lambda g: orthogonalize(g, jnp.array(MUON), 5))(g)
    got = polar(g, coefficients="muon", eps=1e-8)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert np.abs(got - polar(g, coefficients="muon")).max() > 0.05


@pytest.mark.parametrize("method", ["xla", "gram", "svd", "auto", "pallas"])
def test_zero_nan_and_rank_deficient_matrices(method):
    low_rank, expected = spectrum(12, 30, np.arange(12) < 3)
    poisoned = np.array(low_rank)
    poisoned[3, 4] = np.nan
    infinite = np.array(low_rank)
    infinite[3, 4] = np.inf
    g = np.float32([np.zeros((12, 30)), low_rank, poisoned, infinite])
    got = polar(g, method=method)
    assert not got[0].any()
    assert error(got[1], expected) < 5e-3
    assert np.isnan(got[2:]).all()


def test_zero_in_float16_stays_zero():
    # The denominators that give NaN in google-deepmind/optax#1784.
    got = polar(np.zeros((12, 30), np.float16))
    assert got.dtype == jnp.float16 and not got.any()


@pytest.mark.parametrize("shape", [(1, 7), (7, 1)])
def test_a_single_row_or_column_is_normalized_exactly(shape):
    g = normal(*shape) * np.float32(1e-25)
    wide = np.asarray(g, np.float64)
    np.testing.assert_allclose(polar(g), wide / np.linalg.norm(wide), rtol=1e-6)
    assert not polar(np.zeros_like(g)).any()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 5)])
def test_empty_arrays_pass(shape):
    assert polar_factor(jnp.zeros(shape)).shape == shape


# Structure


def test_batch_equals_loop_equals_vmap():
    g = normal(2, 3, 10, 24)
    got = polar(g)
    again = jax.jit(jax.vmap(jax.vmap(polar_factor)))(g)
    np.testing.assert_allclose(got, again, atol=1e-5)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(got[i, j], polar(g[i, j]), atol=1e-5)


@pytest.mark.parametrize("method", ["xla", "gram", "svd"])
def test_transposition_covariance(method):
    g = normal(10, 24)
    np.testing.assert_allclose(polar(g.T, method=method), polar(g, method=method).T, atol=1e-5)


def test_orthogonal_covariance():
    # polar(U g V) = U polar(g) V for orthogonal U, V: what makes it the spectral norm's.
    u, v = (np.linalg.qr(normal(n, n, seed=n))[0] for n in (10, 24))
    g = normal(10, 24)
    np.testing.assert_allclose(polar(u @ g @ v), u @ polar(g) @ v, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "dims", "batch", "rows", "columns"),
    [
        ((3, 3, 4, 10), MuonDimensionNumbers((0, 1, 2), 3), (), (0, 1, 2), (3,)),
        ((3, 3, 4, 10), MuonDimensionNumbers(2, 3), (0, 1), (2,), (3,)),
        ((6, 2, 5), MuonDimensionNumbers(-1, 0), (1,), (2,), (0,)),
        ((4, 6, 5), MuonDimensionNumbers(0, (1, 2)), (), (0,), (1, 2)),
    ],
)
def test_dimension_numbers_move_any_axes(shape, dims, batch, rows, columns):
    # Convolution kernels and attention kernels (pytorch/pytorch#166209 rejects them).
    g = normal(*shape)
    order = batch + rows + columns
    size = lambda axes: int(np.prod([shape[i] for i in axes], dtype=int))
    flat = g.transpose(order).reshape(size(batch), size(rows), size(columns))
    expected = np.stack([mapped(matrix, [MUON] * 5) for matrix in flat])
    expected = expected.reshape([shape[i] for i in order]).transpose(np.argsort(order))
    got = polar(g, dims=dims, coefficients="muon")
    np.testing.assert_allclose(got, expected, atol=1e-5)
    if len(rows) == 3:
        orthogonalize = optax.contrib._muon.orthogonalize_via_newton_schulz
        call = lambda g: orthogonalize(g, jnp.array(MUON), dimension_numbers=dims)
        np.testing.assert_allclose(got, jax.jit(call)(g), atol=1e-5)


def test_gradient_is_that_of_the_polynomial_map():
    g, t = normal(4, 7), normal(4, 7, seed=1)

    @jax.jit
    def slopes(g, t):
        f = functools.partial(polar_factor, method="xla", steps=4)
        return jax.jvp(f, (g,), (t,))[1], (f(g + 1e-6 * t) - f(g - 1e-6 * t)) / 2e-6

    @functools.partial(jax.jit, static_argnames="method")
    def gradient(g, t, method):
        return jax.grad(lambda x: jnp.vdot(polar_factor(x, method=method, steps=4), t))(g)

    with jax.enable_x64(True):
        wide = np.float64(g), np.float64(t)
        slope, difference = slopes(*wide)
        np.testing.assert_allclose(slope, difference, rtol=1e-5, atol=1e-7)
        plain = gradient(*wide, method="xla")
        np.testing.assert_allclose(np.vdot(plain, wide[1]), np.vdot(slope, wide[1]))
        gram = gradient(*wide, method="gram")
        np.testing.assert_allclose(gram, plain, rtol=1e-8, atol=1e-10)
    # In float32 "pallas" is the form with a derivative rule of its own.
    np.testing.assert_allclose(gradient(g, t, method="pallas"), plain, rtol=1e-3, atol=1e-5)
    assert not np.asarray(gradient(np.zeros_like(g), t, method="pallas")).any()


def test_known_coefficients_are_numbers_and_integers_become_float():
    # Arrays under a trace keep kernels and Gram form as long as their values are known.
    known, whole = jnp.array(MUON), jnp.array([[2, -1, 0]])

    @jax.jit
    def resolved(g):
        assert isinstance(resolve_coefficients(known, 2), np.ndarray)
        return polar_factor(g, coefficients=whole, method="gram")

    g = normal(8, 12)
    expected = mapped(g, [(2, -1, 0)])
    traced = jax.jit(lambda g, table: polar_factor(g, coefficients=table))
    for got in (resolved(g), traced(g, np.array([[2, -1, 0]]))):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_coefficients_may_be_traced():
    g = normal(8, 12)
    tables = np.float32([resolve_coefficients(n, 5) for n in ("muon", "dion")])
    got = jax.jit(jax.vmap(lambda table: polar_factor(g, coefficients=table)))(tables)
    for u, name in zip(np.asarray(got), ("muon", "dion")):
        np.testing.assert_allclose(u, polar(g, coefficients=name), atol=1e-5)


# Low rank


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(4, 20, 33), (30, 20, 33)])
def test_lowrank_equals_the_svd_of_the_product(shape):
    r, m, n = shape
    # At condition 300 one pass over a Gram matrix would leave an error near 1e-2.
    weights = np.geomspace(1, 1 / 300 if r < 20 else 0.1, r, dtype=np.float32)[:, None]
    x, delta = normal(2, r, m) * weights, normal(2, r, n, seed=1)
    low = jax.jit(functools.partial(polar_lowrank, steps=8))
    got = np.asarray(low(x * np.float32(1e-25), delta * np.float32(1e20)))
    for i in range(2):
        u, _, vt = np.linalg.svd(np.float64(x[i]).T @ np.float64(delta[i]), full_matrices=False)
        k = min(shape)
        assert error(got[i], u[:, :k] @ vt[:k]) < (1e-5 if r < 20 else 1e-2)


def test_lowrank_survives_repeated_examples_zero_and_nan():
    x, delta = normal(4, 20), normal(4, 33, seed=1)
    x, delta = np.concatenate([x, x[:2]]), np.concatenate([delta, delta[:2]])
    u, _, vt = np.linalg.svd(np.float64(x).T @ np.float64(delta), full_matrices=False)
    poisoned = np.array(x)
    poisoned[0, 0] = np.nan
    low = jax.jit(jax.vmap(functools.partial(polar_lowrank, steps=8), (0, None)))
    got = np.asarray(low(np.stack([x, 0 * x, poisoned]), delta))
    assert error(got[0], u[:, :4] @ vt[:4]) < 1e-5
    assert not got[1].any() and np.isnan(got[2]).all()


def test_lowrank_in_float64_cuts_at_its_own_rounding():
    # Float32's cut-off, 7e-4 here, would lose half of these.
    r, weights = 4, np.geomspace(1, 1e-6, 4)[:, None]
    x, delta = np.float64(normal(r, 20)) * weights, np.float64(normal(r, 33, seed=1))
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(functools.partial(polar_lowrank, method="svd"))(x, delta))
    u, _, vt = np.linalg.svd(x.T @ delta, full_matrices=False)
    assert error(got, u[:, :r] @ vt[:r]) < 1e-7


@pytest.mark.parametrize(("r", "m", "n"), [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 5)])
def test_lowrank_without_rows_or_columns_is_zero(r, m, n):
    x, delta = jnp.ones((2, r, m), jnp.bfloat16), jnp.ones((2, r, n), jnp.bfloat16)
    got = polar_lowrank(x, delta)
    assert got.shape == (2, m, n) and got.dtype == jnp.bfloat16 and not got.any()
    assert polar_range_sketch(jnp.ones((0, 6, 7)), jax.random.key(0), 2).shape == (0, 6, 7)


def test_sketch_of_enough_columns_is_the_polar_factor():
    g, expected = spectrum(40, 64, np.r_[np.geomspace(1, 0.2, 6), np.zeros(34)])
    sketch = jax.jit(lambda g, key: polar_range_sketch(g, key, 10, steps=8))
    for seed in range(8):
        assert error(sketch(np.float32(g), jax.random.key(seed)), expected) < 1e-4
    wide = normal(8, 30)
    full = jax.jit(lambda g: polar_range_sketch(g, jax.random.key(0), 8, steps=1))(wide)
    np.testing.assert_allclose(full, polar(wide, steps=1), atol=1e-5)


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: polar_factor(g[0]), r"g: expected a matrix"),
        (lambda g: polar_factor(g.astype(int)), r"g: expected a real floating-point"),
        (lambda g: polar_factor(g + 1j), r"g: expected a real floating-point"),
        (lambda g: polar_factor(g, method="qr"), r"method: expected one of"),
        (lambda g: polar_factor(g, steps=0), r"steps: must be >= 1, got 0"),
        (lambda g: polar_factor(g, eps=-1.0), r"eps: must lie in"),
        (lambda g: polar_factor(g, coefficients="newton"), r"coefficients: expected one of"),
        (lambda g: polar_factor(g, coefficients=np.ones((2, 4))), r"coefficients: expected a n"),
        (lambda g: polar_factor(g, dims=MuonDimensionNumbers(0, 2)), r"dims: expected Muon"),
        (lambda g: polar_factor(g, dims=MuonDimensionNumbers(0, -2)), r"dims: the axes must be"),
        (lambda g: polar_factor(g, dims=(0, 1)), r"dims: expected MuonDimensionNumbers"),
        (lambda g: polar_express_coefficients(3, lower=2.0), r"lower: must lie in \(0"),
        (lambda g: polar_factor(g, dtype=jnp.int8), r"dtype: expected a real.*int8"),
        (lambda g: polar_factor(g, dtype=jnp.complex64), r"dtype: expected a real.*complex64"),
        (lambda g: polar_factor(g, dtype=jnp.float8_e4m3fn), r"dtype: expected a real.*float8"),
        (lambda g: polar_factor(jnp.asarray(g, jnp.float8_e4m3fn)), r"dtype.*float8.*from g"),
        (lambda g: polar_lowrank(g, g[:2]), r"delta: expected shape"),
        (lambda g: polar_lowrank(g[0], g), r"x: expected a real"),
        (lambda g: polar_lowrank(g, g, rcond=2.0), r"rcond: must lie in"),
        (lambda g: polar_range_sketch(g, jax.random.key(0), 0), r"rank: must be >= 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((3, 4), np.float32))
