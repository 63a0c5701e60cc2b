import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.optim import (
    best_rate,
    interpolation_momentum,
    second_moment_rate,
    second_moment_rate_rows,
    steps_per_efold,
)

STYLES = ("heavy_ball", "nesterov")
# Zeros are ignored; with them all spectra share their programs.
SPECTRA = {
    "geo": np.r_[np.geomspace(1, 1e-3, 20), np.zeros(40)],
    "flat": np.r_[np.ones(19), 1e-3, np.zeros(40)],
    "pow": np.geomspace(1, 1e-4, 60),
}
BATCHES = (1, 4, 16, 64, 256, 1024)
# Largest c that keeps every bar, with R^2 for Gaussian rows; the default is 1.
FAST = 4 / 3


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


rate_of_rows = jax.jit(second_moment_rate_rows, static_argnames="style")


@functools.partial(jax.jit, static_argnames="style")
def rates(lam, eta, beta, batch_size, style):
    return jax.vmap(functools.partial(second_moment_rate, style=style))(
        lam, eta, beta, batch_size)


@functools.partial(jax.jit, static_argnames="style")
def rule(lam, batch_size, c=1.0, style="heavy_ball", excess=2.0):
    """Steps per e-fold with the rule, and its gamma * mu, for spectra ``[n, d]``.

    ``R^2 = trace + excess * lmax``: 2 is right for Gaussian rows, 0 is the trace alone.
    """

    def one(lam, batch_size):
        mu = jnp.min(jnp.where(lam > 0, lam, jnp.inf))
        r2 = jnp.sum(lam) + excess * jnp.max(lam)
        m = interpolation_momentum(batch_size, r2, jnp.max(lam), mu, style=style, c=c)
        rate = second_moment_rate(lam, m.learning_rate, m.decay, batch_size, style)
        return steps_per_efold(rate), c * batch_size / r2 * mu

    return jax.vmap(one)(lam, batch_size)


def on_spectrum(name, batches, **options):
    # Repeated to one length, for one program.
    count, batches = len(batches), np.resize(np.asarray(batches, float), 14)
    steps, unit = rule(np.tile(SPECTRA[name], (14, 1)), batches, **options)
    return np.asarray(steps)[:count], np.asarray(unit)[:count]


def step_matrix(h, eta, beta, style):
    """The step ``(e_t, e_{t-1}) -> (e_{t+1}, e_t)`` with the mini-batch Hessian ``h``."""
    d = len(h)
    eye = np.eye(d)
    look = np.c_[(1 + beta) * eye, -beta * eye] if style == "nesterov" else np.c_[eye, 0 * eye]
    top = np.c_[(1 + beta) * eye, -beta * eye] - eta * h @ look
    return np.r_[top, np.c_[eye, 0 * eye]]


@pytest.mark.smoke
@pytest.mark.parametrize("style", STYLES)
def test_rate_of_a_row_set_equals_the_enumeration_of_all_batches(style):
    rng = np.random.default_rng(0)
    for d, m, batch_size in ((2, 3, 1), (2, 3, 3), (3, 4, 2)):
        rows, p = rng.standard_normal((m, d)), rng.dirichlet(np.ones(m))
        eta, beta = rng.uniform(0.1, 1.0), rng.uniform(0.2, 0.9)
        total = 0
        for batch in itertools.product(range(m), repeat=batch_size):
            step = step_matrix(rows[list(batch)].T @ rows[list(batch)] / batch_size, eta, beta,
                               style)
            total = total + np.prod(p[list(batch)]) * np.kron(step, step)
        expected = np.abs(np.linalg.eigvals(total)).max()
        found = rate_of_rows(rows, eta, beta, batch_size, style, probabilities=p)
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("style", STYLES)
def test_gaussian_rate_equals_that_of_rows_with_gaussian_fourth_moments(style):
    # Three Gauss-Hermite nodes an axis match all moments up to the fifth.
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    rng = np.random.default_rng(1)
    d, count = 3, 6
    lam = 10 ** rng.uniform(-2, 0, (count, d))
    eta, beta = np.r_[3.0, rng.uniform(0.05, 1.5, count - 1)], rng.uniform(0, 1, count)
    batch = 10 ** rng.uniform(0, 2, count)
    lam[0] = 1.0
    grid = np.stack(np.meshgrid(*[nodes] * d, indexing="ij"), -1).reshape(-1, d)
    p = np.prod(np.meshgrid(*[weights / weights.sum()] * d, indexing="ij"), 0).ravel()
    expected = jax.jit(jax.vmap(
        lambda lam, eta, beta, b: second_moment_rate_rows(
            grid * jnp.sqrt(lam), eta, beta, b, style, probabilities=p)
    ))(lam, eta, beta, batch)
    found = rates(lam, eta, beta, batch, style)
    assert found[0] > 1 and (found < 1).any()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("style", STYLES)
def test_secular_root_equals_the_eigenvalue_of_the_assembled_map(style):
    rng = np.random.default_rng(2)
    d, count = 7, 24
    lam = 10 ** rng.uniform(-4, 0, (count, d))
    eta, batch = 10 ** rng.uniform(-3, 0.5, count), 10 ** rng.uniform(0, 3, count)
    beta = rng.choice([0.0, 0.3, 0.9, 0.99, 0.999], count)
    expected = []
    for x, n, b, s in zip(lam, eta, beta, batch):
        shrink = 1 - n * x
        if style == "nesterov":
            p, q, look = (1 + b) * shrink, -b * shrink, [(1 + b) ** 2, -2 * b * (1 + b), b * b]
        else:
            p, q, look = b + shrink, np.full(d, -b), [1, 0, 0]
        whole = np.zeros((d, 3, d, 3))
        i = np.arange(d)
        whole[i, 0, i, :] = np.stack([p * p, 2 * p * q, q * q], -1)
        whole[i, 1, i, 0], whole[i, 1, i, 1], whole[i, 2, i, 0] = p, q, 1
        noise = n * n / s * (np.outer(x, x) + np.diag(x * x))
        whole[:, 0] += noise[:, :, None] * np.asarray(look)
        expected.append(np.abs(np.linalg.eigvals(whole.reshape(3 * d, 3 * d))).max())
    # Near a double root dense eigenvalues lose half of their digits (mpmath sides with ours).
    np.testing.assert_allclose(rates(lam, eta, beta, batch, style), expected, rtol=1e-7)


@pytest.mark.parametrize("style", STYLES)
def test_simulated_second_moments_decay_at_the_exact_rate(style):
    # 60 groups of 500 chains in numpy; the mean of 60 logs against 5 standard errors: one false
    # alarm in two million. From step 12 on the second eigenvalue is forgotten.
    lam, eta, beta, batch_size = np.array([1.0, 0.3]), 0.3, 0.5, 4
    look = beta if style == "nesterov" else 0.0
    rng, moments = np.random.default_rng(0), {}
    e = before = np.ones((60, 500, 2))
    for t in range(1, 25):
        y = e + look * (e - before)
        a = rng.standard_normal((60, 500, batch_size, 2), np.float32) * np.sqrt(lam)
        g = np.einsum("gcbi,gcb->gci", a, np.einsum("gcbj,gcj->gcb", a, y)) / batch_size
        e, before = e + beta * (e - before) - eta * g, e
        moments[t] = np.mean(np.sum(e**2, -1), 1)
    found = np.log(moments[24] / moments[12]) / 12
    expected = np.log(rates(lam[None], *np.array([[eta], [beta], [batch_size]]), style)[0])
    groups = 60
    error = found.std(ddof=1) / np.sqrt(groups)
    assert error < 0.05 * abs(expected)
    assert abs(found.mean() - expected) < 5 * error


def test_closed_forms():
    # One mode: E(1 - eta a^2)^2 = (1 - eta lam)^2 + 2 eta^2 lam^2 / B. Without noise, critically
    # damped heavy ball contracts like beta = (1 - sqrt(eta mu))^2.
    lam, eta, batch_size, beta = 0.7, 0.9, 3.0, (1 - np.sqrt(1e-3)) ** 2
    expected = (1 - eta * lam) ** 2 + 2 * (eta * lam) ** 2 / batch_size
    found = rates(np.stack([lam * np.eye(60)[0], SPECTRA["geo"]]),
                  *np.array([[eta, 1.0], [0.0, beta], [batch_size, 1e30]]), "heavy_ball")
    np.testing.assert_allclose(found, [expected, beta], rtol=1e-6)
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)
    # Kaczmarz with orthogonal unit rows forgets one of d directions a step; the directions that
    # no row sees are left out.
    for rows in (np.eye(5), np.diag([1.0, 1, 1, 0, 0])):
        np.testing.assert_allclose(rate_of_rows(rows, 1.0, 0.0, 1), 1 - 1 / 5, rtol=1e-10)
    np.testing.assert_allclose(
        steps_per_efold(jnp.array([np.exp(-2), 1.0, 3.0])), [1, np.inf, np.inf])


@pytest.mark.parametrize("style", STYLES)
def test_derivatives_equal_finite_differences(style):
    # At the second point one of the two modes does not oscillate; at the third there is no noise,
    # and the rate is that of the slower mode; zeros in the spectrum count for nothing.
    points = np.array([[1.0, 0.3, 0.0, 0.3, 0.5, 4], [1.0, 0.01, 0.0, 0.3, 0.3, 8],
                       [1.0, 0.5, 0.0, 0.3, 0.5, np.inf]])
    f = lambda x: second_moment_rate(x[:3], x[3], x[4], x[5], style)
    slopes = jax.jit(jax.vmap(jax.grad(f)))(points)
    forward = jax.jit(jax.vmap(jax.jacfwd(f)))(points)
    steps = 1e-6 * np.eye(6)[[0, 1, 3, 4, 5]]
    around = points[:, None, None] + np.stack([steps, -steps], 1)
    found = np.asarray(jax.jit(jax.vmap(jax.vmap(jax.vmap(f))))(around))
    expected = (found[..., 0] - found[..., 1]) / 2e-6
    np.testing.assert_allclose(slopes[:, [0, 1, 3, 4, 5]], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(forward, slopes, rtol=1e-9, atol=1e-12)
    if style == "heavy_ball":
        np.testing.assert_allclose(slopes[0, 3:5], [-0.541, -0.239], atol=5e-4)
        np.testing.assert_allclose(slopes[2, 3:5], [0, 1], atol=1e-9)  # the rate is beta


@pytest.mark.parametrize(("name", "steps"), [
    ("geo", (3280, 818, 195, 71, 49, 46)),
    ("flat", (19002, 4750, 1186, 291, 90, 51)),
    ("pow", (69184, 17296, 4320, 1063, 319, 164)),
])
def test_steps_equal_those_of_an_independent_prototype(name, steps):
    # Dense eigenvalues in numpy, with the trace for R^2: stable on these three spectra.
    found, _ = on_spectrum(name, BATCHES, excess=0.0)
    np.testing.assert_allclose(found, steps, rtol=2e-5, atol=0.51)


@pytest.mark.parametrize("c", [1.0, FAST])
@pytest.mark.parametrize("style", STYLES)
def test_rows_touched_do_not_depend_on_the_batch_below_saturation(style, c):
    for name, lam in SPECTRA.items():
        saturation = lam.sum() / np.sqrt(lam[lam > 0].min())  # lmax is 1
        batches = np.r_[np.geomspace(1, saturation / 8, 12), saturation / 2]
        steps, unit = on_spectrum(name, batches, style=style, c=c)
        law = steps * unit
        assert np.abs(law[:-1] - 1).max() <= 0.05, (name, law)
        assert law[-1] <= 1.5, (name, law)


@functools.partial(jax.jit, static_argnames="momentum")
def best_steps(lam, batch_size, momentum):
    noise = 2 * batch_size / (jnp.sum(lam) + 2 * jnp.max(lam))
    top = jnp.minimum(noise, 4.0 if momentum else 2.0)
    etas = top * jnp.geomspace(1e-2, 1, 32 if momentum else 256)
    decays = 1 - jnp.geomspace(3e-3, 1, 32) if momentum else jnp.zeros(1)
    return steps_per_efold(best_rate(lam, batch_size, etas, decays).rate)


@functools.lru_cache
def grid_steps(name, momentum):
    """Steps per e-fold of the best point of a grid, per batch size."""
    return np.array([best_steps(SPECTRA[name], float(b), momentum) for b in BATCHES])


@pytest.mark.parametrize(("c", "bound"), [(FAST, 2.5), (1.0, 2.6)])
def test_rule_is_close_to_the_best_heavy_ball_of_a_grid(c, bound):
    for name in SPECTRA:
        steps, _ = on_spectrum(name, BATCHES, c=c)
        ratio = steps / grid_steps(name, True)
        assert ratio.max() <= bound, (name, ratio)


@pytest.mark.parametrize(("c", "geo", "power"), [(FAST, 5, 5), (1.0, 7, 3.7)])
def test_momentum_beats_the_best_plain_sgd_at_batch_64(c, geo, power):
    for name, bound in (("geo", geo), ("pow", power)):
        steps, _ = on_spectrum(name, [64], c=c)
        speedup = float(best_steps(SPECTRA[name], 64.0, False)) / steps[0]
        assert speedup >= bound, (name, speedup)


@functools.lru_cache
def random_problems():
    """300 spectra of 1 to 8 eigenvalues in [1e-4, 1], the others zero, and batch sizes."""
    rng = np.random.default_rng(7)
    lam = 10 ** rng.uniform(-4, 0, (300, 8)) * (np.arange(8) < rng.integers(1, 9, (300, 1)))
    return lam, 10 ** rng.uniform(0, np.log10(3000), 300)


@pytest.mark.parametrize("style", STYLES)
def test_rule_is_never_unstable_in_random_problems_and_with_the_trace_it_is(style):
    def unstable(c, excess):
        return int(jnp.sum(jnp.isinf(rule(*random_problems(), c, style, excess)[0])))

    assert unstable(1.0, 2.0) == 0 and unstable(FAST, 2.0) == 0
    assert unstable(1.0, 0.0) >= 10


@pytest.mark.parametrize("style", STYLES)
def test_rule_is_stable_on_row_sets_with_the_exact_constant_and_the_limit_of_c_is_near(style):
    # Orthogonal rows of very different norms: the least forgiving kind.
    rng = np.random.default_rng(3)
    d, count = 3, 60
    norms, p = 10 ** rng.uniform(-2, 0, (count, d)), rng.dirichlet(np.ones(d), count)
    batch = np.floor(10 ** rng.uniform(0, 2.5, count))
    lam = p * norms**2

    @jax.jit
    def rates_of(c):
        def one(norms, p, b, lam):
            m = interpolation_momentum(
                b, jnp.max(norms**2), jnp.max(lam), jnp.min(lam), style=style, c=c)
            return second_moment_rate_rows(jnp.diag(norms), m.learning_rate, m.decay, b, style,
                                           probabilities=p)
        return jax.vmap(one)(norms, p, batch, lam)

    assert rates_of(1.0).max() < 1 and rates_of(FAST).max() < 1
    assert rates_of(1.99).max() > 1


def test_errors_name_the_argument():
    for call, message in (
        (lambda: second_moment_rate(1.0, 0.1, 0.0, 1), r"lam: expected shape \(\*\)"),
        (lambda: second_moment_rate([1.0], 0.1, 0.0, 1, "polyak"), "style: expected one of"),
        (lambda: second_moment_rate_rows([1.0], 0.1, 0.0, 1), "rows: expected shape"),
        (lambda: second_moment_rate_rows(np.eye(2), 0.1, 0.0, 1, probabilities=[1.0]),
         "probabilities: expected shape"),
        (lambda: best_rate([1.0], 1, 0.1, [0.0]), "learning_rates: expected shape"),
        (lambda: best_rate([1.0], 1, [0.1], 0.0), "decays: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
