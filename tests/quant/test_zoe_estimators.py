"""The equivalence theorem, by Monte Carlo in NumPy that shares no code with the library."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.quant.qat import (
    KINDS,
    PERTURBATIONS,
    convergence_bound,
    estimate,
    gaussian,
    linearization_error_bound,
    make_kernel,
    quadratic_expectation,
    second_moment,
    smoothed_quantizer,
    surrogate_round,
    surrogate_weight,
)

LEVELS = np.array([-1.5, -0.5, 0.5, 1.5])
CUTS = np.array([-1.0, 0.0, 1.0])
POINTS = np.linspace(-2.13, 2.17, 44)  # none where a rectangle of Rademacher's ends
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
H = math.sqrt(2 * math.pi**2 / (7 * 1.2020569031595942))


def numpy_draws(name, rng, n):
    if name == "rademacher":
        return rng.choice([-1.0, 1.0], n)
    if name == "sigmoid":
        u = rng.logistic(size=3 * n)
        return u[rng.random(3 * n) < 2 * np.tanh(u / 2) / u][:n] / H
    return {
        "uniform": lambda: rng.uniform(-math.sqrt(3), math.sqrt(3), n),
        "gaussian": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(scale=math.sqrt(0.5), size=n),
        "arctan": lambda: rng.standard_t(3, n) / math.sqrt(3),
    }[name]()


def quantize(w):
    return LEVELS[(w[..., None] >= CUTS).sum(-1)]


class Histogram:
    """Sums of 1, z and z^2 of the draws between sorted breakpoints: every estimator of a step
    function is constant between its own, so its mean and variance follow without looping."""

    def __init__(self, z, delta):
        ends = (CUTS - POINTS[:, None]) / delta
        self.ends = np.sort(np.concatenate([ends, -ends], 1), 1)  # [points, 6]
        self.all = np.unique(self.ends)
        cell = np.searchsorted(self.all, z, side="right")
        count = len(self.all) + 1
        moments = [np.bincount(cell, weights, count) for weights in (None, z, z * z)]
        self.cumulative = [np.concatenate([[0.0], np.cumsum(m)]) for m in moments]
        self.n, self.delta = len(z), delta

    def estimates(self, kind):
        """Mean and standard error at all points, float64."""
        at = np.searchsorted(self.all, self.ends)  # breakpoint i ends cell i
        bounds = np.concatenate([np.zeros((44, 1), int), at + 1,
                                 np.full((44, 1), len(self.all) + 1)], 1)
        sums = [np.diff(c[bounds], axis=1) for c in self.cumulative[1:]]
        wide = np.concatenate([self.ends[:, :1] - 2, self.ends, self.ends[:, -1:] + 2], 1)
        z = (wide[:, 1:] + wide[:, :-1]) / 2  # somewhere in each cell
        w = POINTS[:, None]
        up = quantize(w + self.delta * z)
        factor = {
            "antithetic": lambda: (up - quantize(w - self.delta * z)) / 2,
            "forward": lambda: up - quantize(w) + 0 * z,
            "one_point": lambda: up,
        }[kind]() / self.delta
        mean = (factor * sums[0]).sum(1) / self.n
        square = (factor**2 * sums[1]).sum(1) / self.n
        return mean, np.sqrt(np.maximum(square - mean**2, 0) / self.n)


@functools.cache
def surrogates():
    """``S`` at the points for every family and radius, one program."""
    @jit
    def run(deltas):
        each = lambda p: jax.vmap(lambda d: surrogate_weight(
            jnp.asarray(POINTS, jnp.float32), LEVELS, kernel=make_kernel(p, d)))(deltas)
        return {name: each(p) for name, p in PERTURBATIONS.items()}

    return {k: np.asarray(v, np.float64) for k, v in run(jnp.array([0.25, 0.5])).items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] * (n == "gaussian")) for n in PERTURBATIONS],
)
def test_all_estimators_have_the_surrogate_as_their_mean(name):
    """2e6 draws, 44 points, 2 radii, 3 estimators: |z-score| < 4.5 everywhere.

    False alarm at most 264 * 6.8e-6 = 0.18 % for each family; seeds are fixed. The absolute bar
    of 5e-3 holds for the antithetic estimator here; the others have several times its variance.
    """
    z = numpy_draws(name, np.random.default_rng(7), 2_000_000)
    for row, delta in zip(surrogates()[name], (0.25, 0.5)):
        found = Histogram(z, delta)
        for kind in KINDS:
            mean, stderr = found.estimates(kind)
            error = np.abs(mean - row)
            assert (error <= 4.5 * stderr + 2e-6).all(), (delta, kind, (error / stderr).max())
            if kind == "antithetic":
                assert error.max() < (2e-6 if name == "rademacher" else 5e-3)


def test_forward_and_one_point_means_agree_to_the_absolute_bar_too():
    """5e-3 at all points, which takes 8e6 draws: the standard error of G0 is up to 3 / sqrt(n)."""
    rng = np.random.default_rng(11)
    found = Histogram(rng.standard_normal(8_000_000, np.float32), 0.5)
    for kind in ("forward", "one_point"):
        assert np.abs(found.estimates(kind)[0] - surrogates()["gaussian"][1]).max() < 5e-3


def test_the_library_estimates_agree_with_theorem_and_moments():
    """One threshold, z-scores below 4.5 at 5 points and 3 kinds (false alarm 1e-4)."""
    w = jnp.array([-0.6, -0.2, 0.0, 0.3, 0.9], jnp.float32)
    step = lambda x: jnp.where(x >= 0, 1.5, -0.5)
    gauss, delta = PERTURBATIONS["gaussian"], 0.4
    found = jit(lambda key: {kind: estimate(key, step, w, gauss, delta, 40_001, kind)
                             for kind in KINDS})(jax.random.key(5))
    exact = 2 * np.exp(-0.5 * (np.asarray(w) / delta) ** 2) / delta / math.sqrt(2 * math.pi)
    spread = {}
    for kind, got in found.items():
        assert (np.abs(got.mean - exact) < 4.5 * got.stderr).all(), kind
        spread[kind] = np.asarray(got.stderr) ** 2 * 40_001
        np.testing.assert_allclose(
            got.second_moment, spread[kind] * (1 - 1 / 40_001) + np.asarray(got.mean) ** 2,
            rtol=1e-4,
        )
    np.testing.assert_allclose(
        second_moment(w, delta, 2.0), spread["antithetic"] + exact**2, rtol=0.06
    )
    # Where Q(w) is 0 the last two would coincide; here it is 1.5 or -0.5.
    assert (spread["antithetic"] < spread["forward"]).all()
    assert not np.isclose(spread["forward"], spread["one_point"], rtol=0.05).any()


def test_the_second_moment_of_the_antithetic_estimator():
    """1e6 draws in NumPy against the closed form, 4.5 standard errors at 3 points."""
    z = np.random.default_rng(0).standard_normal(1_000_000)
    for u, delta in ((0.1, 0.3), (0.0, 0.5), (0.7, 0.5)):
        g = z * ((u + delta * z >= 0) * 1.0 - (u - delta * z >= 0)) / (2 * delta)
        error = abs(float(second_moment(u, delta)) - (g**2).mean())
        assert error < 4.5 * (g**2).std() / math.sqrt(len(z))


# --- losses over several weights

MATRIX = np.array([[2.0, 0.5, -0.3], [0.5, 1.0, 0.4], [-0.3, 0.4, 1.5]])
VECTOR = np.array([0.3, -0.8, 0.5])
W = np.array([0.37, -0.81, 1.2])


def quadratic(q):
    return 0.5 * np.einsum("...i,ij,...j", q, MATRIX, q) - q @ VECTOR


def global_draws(loss, delta, n, seed=0):
    z = np.random.default_rng(seed).standard_normal((n, 3))
    plus, minus = quantize(W + delta * z), quantize(W - delta * z)
    return z, plus, minus, z * ((loss(plus) - loss(minus)) / (2 * delta))[:, None]


def test_the_expected_gradient_of_a_quadratic_loss():
    """5e5 draws at three radii: 9 z-scores below 4.5, and the error below 1e-2."""
    w = jnp.asarray(W, jnp.float32)
    exact = jit(jax.vmap(lambda d: quadratic_expectation(
        w, jnp.asarray(MATRIX), jnp.asarray(VECTOR), LEVELS, kernel=gaussian(d))))
    deltas = np.array([0.1, 0.25, 0.5], np.float32)
    for delta, want in zip(deltas, exact(deltas)):
        *_, g = global_draws(quadratic, delta, 500_000)
        error = np.abs(g.mean(0) - np.asarray(want))
        assert (error < 4.5 * g.std(0) / math.sqrt(len(g))).all() and error.max() < 1e-2
    # For a Gaussian it is the gradient of the smoothed loss, by the product rule alone.
    with jax.enable_x64(True):
        def smoothed(w, matrix, vector):
            d, t = 0.25, np.array(CUTS)
            p = jax.scipy.special.ndtr((w[:, None] - t) / d)
            m = LEVELS[0] + p.sum(-1)
            square = LEVELS[0] ** 2 + (p * np.diff(LEVELS**2)).sum(-1)
            extra = (jnp.diagonal(matrix) * (square - m * m)).sum()
            return 0.5 * (m @ matrix @ m + extra) - m @ vector

        ours, want = jit(lambda w, a, b: (
            quadratic_expectation(w, a, b, LEVELS, kernel=gaussian(0.25)),
            jax.grad(smoothed)(w, a, b),
        ))(W.copy(), MATRIX.copy(), VECTOR.copy())
        np.testing.assert_allclose(ours, want, rtol=1e-12)


def test_of_a_linear_loss_the_surrogate_gradient_is_the_expectation():
    """And of the whole-loss estimator of the library, 4.5 standard errors (3 coordinates)."""
    vector = jnp.asarray(VECTOR, jnp.float32)
    loss = lambda w: surrogate_round(w, LEVELS, kernel=gaussian(0.3)) @ vector
    gauss = PERTURBATIONS["gaussian"]
    slope, exact, got = jit(lambda w, key: (
        jax.grad(loss)(w),
        quadratic_expectation(w, jnp.zeros((3, 3)), -vector, LEVELS, kernel=gaussian(0.3)),
        estimate(key, loss, w, gauss, 0.3, 32_768),
    ))(W.astype(np.float32), jax.random.key(2))
    np.testing.assert_allclose(slope, exact, rtol=1e-5)
    assert (np.abs(got.mean - exact) < 4.5 * got.stderr).all()


def test_the_mean_upstream_gradient_removes_most_of_the_difference():
    @jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def errors(delta, w):
        k = gaussian(delta)
        exact = quadratic_expectation(w, MATRIX, VECTOR, LEVELS, kernel=k)
        weight = surrogate_weight(w, LEVELS, kernel=k)
        at = surrogate_round(w, LEVELS, kernel=k), smoothed_quantizer(w, LEVELS, kernel=k)
        return [jnp.abs(weight * (MATRIX @ q - VECTOR) - exact).max() for q in at]

    w = np.random.default_rng(0).uniform(-1.4, 1.4, (20, 3)).astype(np.float32)
    plain, mean = errors(np.array([0.25, 0.5], np.float32), w)
    assert (mean.max(1) < 0.5 * plain.max(1)).all()


def test_the_linearization_error_stays_below_its_bound():
    """A loss with curvature everywhere, and the bound itself against its own Monte Carlo."""
    a, b = np.array([1.0, -2.0, 0.5]), 0.3
    loss = lambda q: np.logaddexp(0, q @ a + b)
    lipschitz = 0.25 * (a @ a)  # of its gradient: the logistic function's slope is at most 1/4
    w = jnp.asarray(W, jnp.float32)
    closed = jit(lambda d: (
        linearization_error_bound(w, LEVELS, kernel=gaussian(d), lipschitz=lipschitz),
        surrogate_weight(w, LEVELS, kernel=gaussian(d)),
    ))
    for delta in (0.15, 0.3, 0.6):
        z, plus, minus, g = global_draws(loss, delta, 200_000)
        bound, weight = (np.asarray(part, np.float64) for part in closed(delta))
        q = quantize(W)
        moved = ((plus - q) ** 2).sum(1) + ((minus - q) ** 2).sum(1)
        draws = lipschitz / (4 * delta) * np.abs(z) * moved[:, None]
        assert (np.abs(draws.mean(0) - bound) < 4.5 * draws.std(0) / math.sqrt(len(z))).all()
        slope = a / (1 + np.exp(-(q @ a + b)))
        gap = np.abs(g.mean(0) - weight * slope)
        assert (gap < bound).all() and gap.max() > 0.02 * bound.max()


def test_biased_descent_gets_below_its_bound_and_the_floor_falls_with_the_grid():
    """Surrogate descent on random quadratics: min |grad F_d|^2 <= 2 gap / (eta T) + bias^2.

    No start satisfies the bound, so the descent must; where it has converged, the squared
    gradient is of the size of the bias, and less on the finer grid in every case.
    """
    dim, steps, cases = 3, 8000, 8
    rng = np.random.default_rng(1)
    roots = rng.standard_normal((cases, dim, dim))
    matrices = roots @ roots.transpose(0, 2, 1) / dim + 0.3 * np.eye(dim)
    vectors = rng.standard_normal((cases, dim))
    optimum = np.linalg.solve(matrices, vectors[..., None])[..., 0]
    starts = -np.sign(optimum) * rng.uniform(0.8, 1.6, (cases, dim))
    floors = []
    with jax.enable_x64(True):
        for step in (0.5, 0.25):
            levels = np.arange(-1.75, 1.7501, step)
            kernel = gaussian(0.5 * step)
            # |L - const| <= B on the box: the convex loss is largest at a corner.
            corners = np.stack(np.meshgrid(*[[-1.75, 1.75]] * dim), -1).reshape(-1, dim)

            def one(matrix, vector, w, levels=levels, kernel=kernel, corners=corners):
                loss = lambda q: 0.5 * q @ matrix @ q - vector @ q
                best = jnp.linalg.solve(matrix, vector)
                top = jax.vmap(loss)(jnp.asarray(corners)).max()
                half = (top - loss(best)) / 2
                smooth = math.sqrt(2) * half / kernel.delta**2
                rate = 1 / smooth

                def body(w, _):
                    exact = quadratic_expectation(w, matrix, vector, levels, kernel=kernel)
                    q = surrogate_round(w, levels, kernel=kernel)
                    used = surrogate_weight(w, levels, kernel=kernel) * (matrix @ q - vector)
                    error = jnp.linalg.norm(used - exact)
                    return w - rate * used, (jnp.sum(exact**2), error)

                def smoothed_loss(w):
                    m = smoothed_quantizer(w, levels, kernel=kernel)
                    t = (levels[1:] + levels[:-1]) / 2
                    p = jax.scipy.special.ndtr((w[:, None] - t) / kernel.delta)
                    square = levels[0] ** 2 + (p * np.diff(levels**2)).sum(-1)
                    extra = (jnp.diagonal(matrix) * (square - m * m)).sum() / 2
                    return loss(m) + extra

                _, (squares, errors) = jax.lax.scan(body, w, None, steps)
                bound = convergence_bound(
                    smoothed_loss(w) - loss(best), rate, steps, smoothness=smooth,
                    bias=errors.max(),
                )
                late = squares[-steps // 4:].mean(), (errors[-steps // 4:] ** 2).max()
                return squares[0], squares.min(), bound, *late

            first, least, bound, floor, bias = map(
                np.asarray, jit(jax.vmap(one))(matrices, vectors, starts))
            assert (first > bound).all() and (least <= bound).all()
            assert (floor <= bias).all()
            floors.append(floor)
    assert (floors[1] < floors[0]).all() and floors[0].sum() > 2 * floors[1].sum()


def test_errors_name_the_argument():
    gauss, key = PERTURBATIONS["gaussian"], jax.random.key(0)
    square = lambda w: w * w
    for call, error, message in (
        (lambda: estimate(key, square, 1.0, gauss, 0.1, 10, "central"), ValueError, "kind: exp"),
        (lambda: estimate(key, square, 1.0, gauss, 0.0, 10), ValueError, "delta: must lie in"),
        (lambda: estimate(key, square, 1.0, gauss, np.float32(-0.1), 9), ValueError, "delta: must"),
        (lambda: estimate(key, square, 1.0, gauss, 0.1, 0), ValueError, "n: must be >= 1"),
        (lambda: estimate(key, lambda w: w[:2], jnp.ones(3), gauss, 0.1, 4), ValueError,
         r"f: expected a result of shape \(\) or \(3,\), got \(2,\)"),
        (lambda: smoothed_quantizer(jnp.ones(1), LEVELS, kernel=gaussian(0.3, "relative")),
         ValueError, "kernel: expected an absolute bandwidth"),
    ):
        with pytest.raises(error, match=message):
            call()
