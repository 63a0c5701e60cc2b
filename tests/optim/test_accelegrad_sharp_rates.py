"""Rates of AcceleGrad#: O(1/T²) of the scalar anchor in several norms; certificates under noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.optim import (
    NormSpec,
    accelegrad,
    accelegrad_sharp,
    certificate_schedule,
    pnorm_map,
)


def trajectory(opt, f, x0, steps, grad=None):
    """f at the geometry iterate after every step."""
    grad = grad or jax.grad(f)

    def step(carry, _):
        x, state = carry
        updates, state = opt.update(grad(x), state, x)
        return (jax.tree.map(jnp.add, x, updates), state), f(state.y)

    return jax.lax.scan(step, (x0, opt.init(x0)), None, length=steps)[1]


def slope(values, first=30, last=None):
    t = np.arange(1, len(values) + 1)
    window = (t >= first) & (t <= (last or len(t)))
    return np.polyfit(np.log(t[window]), np.log(np.asarray(values, np.float64)[window]), 1)[0]


# ---------------------------------------------------------------- rates of the scalar anchor


@pytest.mark.smoke
def test_l2_rate_is_accelerated_whatever_the_diameter():
    # A log-uniform spectrum makes power laws exact: f ~ T^-2 accelerated, T^-1 for descent.
    steps, diameters = 10_000, [0.1, 0.5, 1.0, 2.0, 10.0]
    with jax.enable_x64(True):
        spectrum = jnp.geomspace(1e-9, 1, 600)
        x0 = jnp.full(600, 600**-0.5)
        f = lambda x: 0.5 * jnp.sum(spectrum * x * x)
        grad = lambda x: spectrum * x
        run = lambda d: trajectory(accelegrad_sharp(diameter=d), f, x0, steps, grad)
        values = np.asarray(jax.jit(jax.vmap(run))(jnp.array(diameters)))
        euclid = jax.jit(lambda: trajectory(accelegrad(1.0), f, x0, 300, grad))()
        descent = jax.lax.scan(lambda x, _: (x - grad(x), f(x)), x0, None, length=3000)[1]
    for diameter, curve in zip(diameters, values):
        assert slope(curve, last=3000) <= (-1.85 if diameter == 10 else -1.9)
    final = values[:, -1] * steps**2
    print("f(y_T) T² at D =", diameters, final)
    assert np.all(final[1:4] <= 0.2) and final[1:4].max() <= 1.5 * final[1:4].min()
    assert -1.05 <= slope(descent) <= -0.95
    np.testing.assert_allclose(values[2, :300], euclid, rtol=1e-10)


def test_linf_and_spectral_rates_are_accelerated():
    with jax.enable_x64(True):
        size = 1000
        f = lambda x: 0.125 * (
            x[0] ** 2 + jnp.sum(jnp.diff(x) ** 2) + x[-1] ** 2) - 0.25 * x[0]
        best = 1 - jnp.arange(1, size + 1) / (size + 1)
        distance = float(jnp.linalg.norm(best))
        gap = lambda x: f(x) - f(best)
        factors = np.array([0.1, 0.3, 1.0, 3.0, 10.0])
        run = lambda d: trajectory(
            accelegrad_sharp(diameter=d, norm="linf"), gap, jnp.zeros(size), 2000)
        curves = np.asarray(jax.jit(jax.vmap(run))(distance * factors))
        for factor, curve in zip(factors, curves):
            print(f"linf, D = {factor:g} ‖x*‖: slope {slope(curve):.2f}, "
                  f"f T²/‖x*‖² {curve[-1] * 2000**2 / distance**2:.2f}")
        assert slope(curves[2]) <= -1.8

        left, right = jnp.geomspace(1e-5, 1, 24), jnp.geomspace(1e-4, 1, 16)
        f = lambda x: 0.5 * jnp.sum(left[:, None] * right * x * x)
        x0 = jnp.full((24, 16), (24 * 16) ** -0.5)
        spec = NormSpec("spectral", scale="unit", method="svd")
        curve = jax.jit(lambda: trajectory(
            accelegrad_sharp(diameter=1.0, norm=spec), f, x0, 2000))()
        print("spectral: slope", slope(curve))
        assert slope(curve) <= -1.8


def test_constant_step_is_textbook_linear_coupling_and_meets_its_bound():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((8, 8))
    hessian = matrix @ matrix.T
    eta, x0, steps = 1 / np.linalg.norm(hessian, 2), rng.standard_normal(8), 60
    # A large G makes the adaptive step constant: η = 2D/√(G² + S) -> 2D/G.
    opt = accelegrad_sharp(
        diameter=eta * 1e9 / 2, lipschitz=1e9, weight_schedule="linear")
    with jax.enable_x64(True):
        def step(carry, _):
            x, state = carry
            updates, state = opt.update(hessian @ x, state, x)
            return (x + updates, state), state.y
        start = (jnp.asarray(x0), opt.init(jnp.asarray(x0)))
        ys = jax.lax.scan(step, start, None, length=steps)[1]
    y = z = x0
    for t in range(steps):
        a = (t + 2) / 2
        x = z / a + (1 - 1 / a) * y
        y, z = x - eta * hessian @ x, z - a * eta * hessian @ x
        np.testing.assert_allclose(ys[t], y, rtol=0, atol=1e-12)
        value = 0.5 * y @ hessian @ y
        assert value <= 2 * (x0 @ x0) / (eta * (t + 2) ** 2)


READINGS = (
    {"anchor": "dual_averaging"}, {"lagged": True}, {"weight_schedule": "linear"},
    {"radius": 2.0}, {"norm": NormSpec("l2", radius=0.5)},
)


def test_alternative_readings_of_the_template_keep_the_rate():
    with jax.enable_x64(True):
        spectrum = jnp.geomspace(1e-6, 1, 100)
        f = lambda x: 0.5 * jnp.sum(spectrum * x * x)
        run = lambda x: [trajectory(accelegrad_sharp(diameter=1.0, **options), f, x, 300,
                                    lambda x: spectrum * x) for options in READINGS]
        curves = jax.jit(run)(jnp.full(100, 0.1))
    for options, curve in zip(READINGS, curves):
        print(options, slope(curve))
        assert slope(curve, 30, 300) <= -1.6, options


def test_l1_geometry_needs_and_uses_a_mirror_anchor():
    with pytest.raises(ValueError, match="'l1' needs anchor_mirror=pnorm_map"):
        accelegrad_sharp(diameter=1.0, norm="l1")
    with pytest.raises(ValueError, match="'l1' is not bounded"):
        accelegrad_sharp(diameter=1.0, norm=lambda p: "l1").init(jnp.ones(3))
    with jax.enable_x64(True):
        size = 200
        spectrum = jnp.geomspace(1e-5, 1, size)
        target = jnp.zeros(size).at[jnp.array([3, 50, 120])].set(jnp.array([0.5, -0.3, 0.2]))
        f = lambda x: 0.5 * jnp.sum(spectrum * (x - target) ** 2)
        opt = accelegrad_sharp(diameter=1.0, norm="l1", anchor_mirror=pnorm_map(size=size))
        curve = jax.jit(lambda: trajectory(opt, f, jnp.zeros(size), 1500))()
        assert curve[-1] < 1e-3 * curve[0] and slope(curve, 100) <= -1.5


# ------------------------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def logistic():
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.isin(data.target, (3, 8))
    x = jnp.asarray(data.data[chosen] / 16, jnp.float32)
    y = jnp.asarray(np.where(data.target[chosen] == 3, 1.0, -1.0), jnp.float32)
    return x, y


def test_certified_rates_bound_the_last_iterate(logistic):
    x, y = logistic
    loss = lambda w: jnp.mean(jax.nn.softplus(-y * (x @ w["w"] + w["b"])))
    params = {"w": jnp.zeros(64), "b": jnp.zeros(())}

    @jax.vmap  # the schedule takes arrays for both of its numbers
    def curve(initial, power):
        opt = accelegrad_sharp(
            certificate_schedule(initial, power), norm="linf", coupling=0.1,
            anchor_learning_rate=0.1)
        return trajectory(opt, loss, params, 3000)

    curves = jax.jit(curve)(jnp.full(2, 0.1), jnp.array([3 / 4, 2 / 3]))
    for found, certificate in zip((slope(c, 300) for c in curves), (-1 / 4, -1 / 3)):
        print(f"slope over the last decade {found:.2f}, certified {certificate:.2f}")
        assert found <= certificate


def test_noise_plateau_falls_with_the_batch(logistic):
    x, y = logistic
    loss = lambda w, x, y, weights: jnp.vdot(weights, jax.nn.softplus(-y * (x @ w)))
    opt = accelegrad_sharp(0.01, norm="linf", coupling=0.1, anchor_learning_rate=0.1)
    rows = np.random.default_rng(0).integers(len(y), size=(1500, 64))

    def plateau(batch):
        weights = (jnp.arange(64) < batch) / batch  # the first rows of the largest batch

        def step(carry, rows):
            w, state = carry
            updates, state = opt.update(jax.grad(loss)(w, x[rows], y[rows], weights), state, w)
            return (w + updates, state), state.y

        start = (jnp.zeros(64), opt.init(jnp.zeros(64)))
        points = jax.lax.scan(step, start, rows)[1][-500::5]
        full = jnp.full(len(y), 1 / len(y))
        return jnp.mean(jax.vmap(lambda w: loss(w, x, y, full))(points))

    levels = jax.jit(jax.vmap(plateau))(jnp.array([4, 16, 64]))
    print("plateaus at B = 4, 16, 64:", levels)
    assert levels[1] <= 0.7 * levels[0] and levels[2] <= 0.7 * levels[1]
