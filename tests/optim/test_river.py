import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import (
    heavy_ball,
    hill_contraction,
    hill_variance,
    river_limits,
    river_valley_2d,
    river_valley_nd,
    suggest,
    suggest_step,
)

STEPS = 3000
LANES = 64


@functools.partial(jax.jit, static_argnames=("style", "nesterov"))
def _ride(sharpness, amplitude, slope, rate, decay, style, nesterov):
    @jax.vmap
    def one(sharpness, amplitude, slope, rate, decay):
        valley = river_valley_2d(sharpness, amplitude, 1.0, slope)
        opt = heavy_ball(rate, decay, style, nesterov)

        def body(carry, _):
            x, state, worst = carry
            update, state = opt.update(jax.grad(valley.loss)(x), state, x)
            x = optax.apply_updates(x, update)
            worst = jnp.maximum(worst, jnp.abs(valley.split(x)[1][0]))  # NaN stays
            return (x, state, worst), None

        # half a unit of length up the hill side where the river is straight
        x = valley.join(0.0, jnp.where(amplitude == 0, 0.5, 0.0)[None])
        (x, _, worst), _ = jax.lax.scan(body, (x, opt.init(x), 0.0), None, STEPS)
        u, offset = valley.split(x)
        return u, jnp.abs(offset[0]), worst

    return one(sharpness, amplitude, slope, rate, decay)


def ride(rate, decay, *, sharpness=100.0, amplitude=0.0, slope=0.1, style="polyak",
         nesterov=False):
    """3000 steps each: ``(u, last offset, worst offset)``; all runs are one compiled program."""
    lanes = np.broadcast_arrays(*np.atleast_1d(sharpness, amplitude, slope, rate, decay))
    count = lanes[0].size
    assert count <= LANES
    lanes = [np.resize(np.asarray(x, np.float32), LANES) for x in lanes]
    return [np.asarray(x)[:count] for x in _ride(*lanes, style=style, nesterov=nesterov)]


BETAS = np.array([0.0, 0.5, 0.9, 0.99])


@pytest.mark.smoke
@pytest.mark.parametrize(("style", "nesterov"), [
    ("polyak", False), ("ema", False), ("polyak", True),
])
def test_edge_of_stability_by_bisection(style, nesterov):
    low, high = np.zeros(4), np.full(4, 10.0)
    if style == "ema":
        high = high / (1 - BETAS)
    for _ in range(12):
        rate = (low + high) / 2
        # on a straight river, so only the hill decides
        last = ride(rate / 100.0, BETAS, style=style, nesterov=nesterov)[1]
        stable = last < 0.5  # false for a NaN
        low, high = np.where(stable, rate, low), np.where(stable, high, rate)
    theory = 2 * (1 + BETAS)
    if nesterov:
        theory = theory / (1 + 2 * BETAS)
    if style == "ema":
        theory = theory / (1 - BETAS)
    np.testing.assert_allclose(low, theory, rtol=0.01)
    limits = river_limits(100.0, BETAS, style, nesterov=nesterov)
    np.testing.assert_allclose(limits.max_learning_rate * 100, theory, rtol=1e-5)


def test_momentum_multiplies_the_drift_by_the_gain():
    # straight river at 0.98 of the edge; 3000 steps are too few for beta = 0.99
    betas = BETAS[:3]
    u, _, _ = ride(0.98 * 2 * (1 + betas) / 100, betas)
    np.testing.assert_allclose(u[1:] / u[0], [3.0, 19.0], rtol=0.03)
    np.testing.assert_allclose(river_limits(100.0, betas).drift_gain, [1, 3, 19], rtol=1e-5)


def test_curved_river_is_travelled_ten_times_as_far_at_the_speed_of_the_drift_law():
    grid = np.linspace(0.05, 1.0, 32)
    rate = np.concatenate([grid * 2, grid * 3.8]) / 100
    decay = np.repeat([0.0, 0.9], 32)
    u, _, worst = ride(rate, decay, amplitude=0.3)
    u = np.where(worst <= 0.2, u, -np.inf)  # at every step: NaN is no path either
    plain, momentum = u[:32].argmax(), 32 + u[32:].argmax()
    drift = rate / (1 - decay) * 0.1 * STEPS
    assert u[momentum] >= 10 * u[plain]
    assert 0.85 * drift[momentum] <= u[momentum] <= 1.1 * drift[momentum]
    assert u[plain] <= 1.1 * drift[plain]


def test_momentum_converges_at_a_rate_where_gradient_descent_diverges():
    _, last, worst = ride(2.5 / 100, [0.0, 0.9])
    assert not worst[0] < 1e6
    assert last[1] < 1e-4


def test_stationary_variance_of_noisy_hill_sides():
    # 4000 chains, averaged over 300 steps: relative standard error below 1.5 %
    curvature, noise = 100.0, 2.0
    decay = jnp.array([0.9, 0.9, 0.99])
    rate = jnp.array([0.5, 2.5, 3.0]) / curvature

    @jax.jit
    def variance(key):
        valley = river_valley_2d(curvature, slope=0.0, noise_scale=noise)

        def body(carry, key):
            x, momentum, total = carry
            keys = jax.random.split(key, 4000)
            g = jax.vmap(lambda x: jax.vmap(valley.gradient)(keys, x))(x)  # same noise for each
            # the transform is elementwise, so all chains of a setting are one parameter
            momentum, x = jax.vmap(step)(decay, rate, g, momentum, x)
            return (x, momentum, jnp.mean(x[..., 1] ** 2, axis=1)), total

        def step(decay, rate, g, state, x):
            update, state = heavy_ball(rate, decay).update(g, state)
            return state, x + update

        x = jnp.zeros((3, 4000, 2))
        state = jax.vmap(heavy_ball(0.1, 0.9).init)(x)
        _, seen = jax.lax.scan(body, (x, state, jnp.zeros(3)), jax.random.split(key, 1100))
        return seen[-300:].mean(0)

    expected = hill_variance(curvature, rate, decay, noise)
    np.testing.assert_allclose(variance(jax.random.key(0)), expected, rtol=0.05)


def companion(curvature, rate, decay, nesterov):
    shrink = 1 - rate * curvature
    top = [(1 + decay) * shrink, -decay * shrink] if nesterov else [
        1 + decay - rate * curvature, -decay]
    return np.array([top, [1.0, 0.0]])


@pytest.mark.parametrize("nesterov", [False, True])
def test_contraction_is_the_spectral_radius(nesterov):
    for decay in (0.0, 0.3, 0.9, 0.99):
        rates = np.linspace(0.0, 4.5, 40)
        expected = [max(abs(np.linalg.eigvals(companion(1.0, r, decay, nesterov)))) for r in rates]
        got = hill_contraction(1.0, rates, decay, nesterov=nesterov)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-3)
        limits = river_limits(7.0, decay, nesterov=nesterov)
        edge = companion(7.0, float(limits.max_learning_rate), decay, nesterov)
        np.testing.assert_allclose(max(abs(np.linalg.eigvals(edge))), 1.0, rtol=1e-4)
        half = companion(7.0, float(limits.max_learning_rate) / 2, decay, nesterov)
        np.testing.assert_allclose(
            limits.contraction, max(abs(np.linalg.eigvals(half))), atol=1e-3)
        low, high = (float(x) for x in limits.oscillating)
        if decay:
            for rate, inside in ((low * 0.95, False), (low * 1.05, True),
                                 (high * 0.97, True), (high * 1.03, False)):
                roots = np.linalg.eigvals(companion(7.0, rate, decay, nesterov))
                assert np.any(np.imag(roots) != 0) == inside
    if not nesterov:  # at half the edge the roots have modulus sqrt(beta)
        np.testing.assert_allclose(river_limits(3.0, 0.81).contraction, 0.9, rtol=1e-5)


def test_variance_solves_the_lyapunov_equation():
    for decay in (0.0, 0.5, 0.95):
        for rate in (0.01, 0.4, 1.5):
            a = companion(2.0, rate, decay, False)
            q = np.zeros((2, 2))
            q[0, 0] = (rate * 3.0) ** 2
            p = np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel())
            if max(abs(np.linalg.eigvals(a))) < 1:
                np.testing.assert_allclose(
                    hill_variance(2.0, rate, decay, 3.0), p[0], rtol=1e-3)
            else:
                assert np.isinf(hill_variance(2.0, rate, decay, 3.0))


def test_suggestion_drifts_as_wanted_at_half_the_edge():
    curvature = np.array([1.0, 10.0, 1e3, 1e6])[:, None]
    step = np.array([1e-4, 0.02, 1.0, 30.0])
    rate, decay = jax.jit(suggest)(curvature, step)
    rate, decay = np.asarray(rate, np.float64), np.asarray(decay, np.float64)
    product = curvature * step
    needed = product > 1
    np.testing.assert_allclose(
        (rate * curvature)[needed], (1 + decay)[needed], rtol=1e-5)
    np.testing.assert_allclose(
        rate[needed], (2 * step / (1 + product))[needed], rtol=1e-5)  # gamma (1 - beta)
    np.testing.assert_allclose(decay[needed], ((product - 1) / (product + 1))[needed], rtol=1e-6)
    assert not np.any(decay[~needed])
    np.testing.assert_allclose(rate[~needed], np.broadcast_to(step, product.shape)[~needed])


def test_suggestion_stays_finite_at_every_scale():
    sharp = jnp.array([1e-30, 1e-30, 1e30, 1e30, 1e20, 1.0])
    step = jnp.array([1e-20, 1e30, 1e-20, 1e30, 1e-20, jnp.nan])
    rate, decay = jax.jit(suggest)(sharp, step)
    wide = np.float64(sharp) * np.float64(step)
    expected = np.float64(step) * np.minimum(1, 2 / (wide + 1))
    np.testing.assert_allclose(rate[:5], expected[:5], rtol=1e-5)
    np.testing.assert_allclose(decay[:5], np.maximum(0, (wide - 1) / (wide + 1))[:5], atol=1e-6)
    assert (decay[:5] >= 0).all() and (decay[:5] < 1).all()
    assert np.isnan(rate[5]) and np.isnan(decay[5])
    assert suggest(1e-30, 1e-20) == (np.float32(1e-20), 0.0)


def test_suggested_step_is_the_smaller_of_noise_and_way():
    np.testing.assert_allclose(suggest_step(8.0, 0.1, 0.5, 100.0, 1000), 0.025, rtol=1e-6)
    np.testing.assert_allclose(suggest_step(8.0, 0.1, 0.5, 10.0, 1000), 0.02, rtol=1e-6)
    np.testing.assert_allclose(suggest_step(0.0, 0.1, 0.5, 10.0, 1000), 0.02, rtol=1e-6)


def test_suggestions_keep_excess_and_drift_in_a_rotated_noisy_valley():
    # 300 chains, averaged over 500 steps: relative standard error of the excess below 3 %
    spectrum, noise, slope = np.array([1000.0, 300.0, 100.0]), 2.0, 0.1
    gamma = float(suggest_step(3 * noise**2, 0.12, slope, 1e9, 1500))
    np.testing.assert_allclose(gamma, 0.02, rtol=1e-5)
    valley = river_valley_nd(
        jax.random.key(1), 3, jnp.asarray(spectrum), (0.0, 1.0), slope=slope,
        noise_scale=jnp.array([0.0, noise, noise, noise]),
    )
    setting = suggest(spectrum.max(), gamma)
    opt = heavy_ball(*setting)

    @jax.jit
    def chains(keys):
        def one(key):
            def body(carry, key):
                x, state = carry
                update, state = opt.update(valley.gradient(key, x), state)
                x = x + update
                u, offset = valley.split(x)
                return (x, state), (u, 0.5 * jnp.sum(valley.spectrum * offset**2))

            x = valley.join(0.0, jnp.zeros(3))
            return jax.lax.scan(body, (x, opt.init(x)), jax.random.split(key, 1500))[1]

        u, excess = jax.vmap(one)(keys)
        return u[:, -1].mean(), excess[:, -500:].mean()

    u, excess = chains(jax.random.split(jax.random.key(2), 300))
    np.testing.assert_allclose(u, gamma * slope * 1500, rtol=0.02)
    variances = [np.linalg.solve(
        np.eye(4) - np.kron(a, a), [(float(setting.learning_rate) * noise) ** 2, 0, 0, 0])[0]
        for a in (companion(c, float(setting.learning_rate), float(setting.decay), False)
                  for c in spectrum)]
    np.testing.assert_allclose(excess, np.sum(spectrum * variances) / 2, rtol=0.05)
    assert excess <= 0.12


def test_valley_is_what_its_formula_says():
    valley = river_valley_2d(50.0, 0.3, 2.0, slope=lambda u: (u - 4) ** 2)
    u, v = 0.7, 0.1
    np.testing.assert_allclose(
        valley.loss(jnp.array([u, v])),
        25 * (v - 0.3 * np.sin(1.4)) ** 2 + (u - 4) ** 2, rtol=1e-5)
    # n directions: curvatures and river seen through the rotation, and join inverts split
    slope = 0.25
    keys = jax.random.split(jax.random.key(3), 2)

    @jax.jit
    @jax.vmap
    def look(key):
        valley = river_valley_nd(key, 4, (1.0, 1000.0), (0.4, 1.0), slope=slope)
        x = valley.join(0.9, jnp.arange(4.0))
        floor = valley.join(0.9, jnp.zeros(4))
        other = river_valley_nd(key, 4, (1.0, 1000.0), lambda u: jnp.zeros(4), slope=slope)
        return (valley.split(x), valley.loss(x), jax.hessian(other.loss)(x),
                jnp.linalg.norm(jax.grad(other.loss)(other.join(1.0, jnp.zeros(4)))),
                valley.loss(floor), valley.spectrum, x)

    (u, offset), loss, hessian, gradient, floor, spectrum, x = look(keys)
    np.testing.assert_allclose(u, [0.9, 0.9], rtol=1e-5)
    np.testing.assert_allclose(offset, np.tile(np.arange(4.0), (2, 1)), atol=1e-5)
    np.testing.assert_allclose(spectrum[0], [1000, 100, 10, 1], rtol=1e-4)
    np.testing.assert_allclose(loss, [(100 + 40 + 9) / 2 - slope * 0.9] * 2, rtol=1e-4)
    np.testing.assert_allclose(floor, [-slope * 0.9] * 2, rtol=1e-4)
    np.testing.assert_allclose(gradient, [slope, slope], rtol=1e-3)
    for h in np.asarray(hessian, np.float64):
        np.testing.assert_allclose(
            np.linalg.eigvalsh(h), [0, 1, 10, 100, 1000], rtol=1e-3, atol=1e-3)
    assert np.linalg.norm(x[0] - x[1]) > 0.1  # the keys matter


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: river_valley_2d(-1.0), ValueError, "sharpness.*-1.0"),
    (lambda: river_valley_2d(1.0, noise_scale=-1.0), ValueError, "noise_scale.*-1.0"),
    (lambda: river_valley_2d("a"), TypeError, "sharpness.*'a'"),
    (lambda: river_valley_nd(jax.random.key(0), 0), ValueError, "dim_hill.*0"),
    (lambda: river_valley_nd(jax.random.key(0), 2, jnp.ones(3)), ValueError, r"\(2,\).*\(3,\)"),
    (lambda: river_valley_nd(jax.random.key(0), 2, jnp.zeros(2)), ValueError, "must be > 0"),
    (lambda: river_valley_nd(jax.random.key(0), 2, (1.0, 2.0, 3.0)), ValueError, "low, high"),
    (lambda: river_limits(1.0, 1.0), ValueError, r"beta.*\[0, 1\).*1.0"),
    (lambda: river_limits(1.0, 0.5, "sgd"), ValueError, "style.*'sgd'"),
    (lambda: suggest(0.0, 1.0), ValueError, "sharpness.*0.0"),
    (lambda: suggest(1.0, lambda t: t), ValueError, "effective_step: must stay constant"),
    (lambda: suggest_step(1.0, 0.0, 1.0, 1.0, 1), ValueError, "excess_loss.*0.0"),
    (lambda: suggest_step(1.0, 1.0, 1.0, 1.0, 0), ValueError, "steps"),
])
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
