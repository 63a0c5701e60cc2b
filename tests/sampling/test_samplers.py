import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.core import Denoiser
from fadex.sampling import (
    ab2,
    ddim,
    dpmpp_2m,
    flow_euler,
    flow_heun,
    linear_alphas_cumprod,
    sample,
    timestep_indices,
    uniform_times,
)

SG = 0.5


def gaussian(params, x, t, cond):
    """Exact velocity for data N(0, SG^2): the flow ends in x_0 = SG x_1."""
    del params, cond
    t = t[:, None]
    return (t - (1 - t) * SG**2) / ((1 - t) ** 2 * SG**2 + t**2) * x


def two_points(params, x, t, cond):
    """Exact velocity for data in {-1, +1} with equal weights."""
    del params, cond
    t = jnp.maximum(t[:, None], 1e-3)
    x0 = jnp.tanh(x * (1 - t) / t**2)
    return (x - x0) / t


def error(sampler, steps):
    x = jnp.linspace(-2, 2, 9)[:, None]
    with jax.enable_x64(True):
        x = jnp.asarray(x, jnp.float64)
        out = sample(Denoiser(gaussian), (), x, None, timesteps=uniform_times(steps),
                     sampler=sampler)
        return float(jnp.abs(out - SG * x).max())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sampler", "low", "high"),
    [(flow_euler(), 0.95, 1.05), (flow_heun(), 1.85, 2.2), (ab2(), 1.95, 2.2),
     (dpmpp_2m(), 1.5, 2.2)],
    ids=["euler", "heun", "ab2", "dpmpp_2m"],
)
def test_orders_on_the_gaussian_flow(sampler, low, high):
    coarse, fine = error(sampler, 80), error(sampler, 160)
    assert low <= np.log2(coarse / fine) <= high
    assert fine < 1e-2


@pytest.mark.parametrize(
    "sampler", [flow_euler(), flow_heun(), ab2(), dpmpp_2m()],
    ids=["euler", "heun", "ab2", "dpmpp_2m"],
)
def test_two_point_data_are_reached(sampler):
    x = jnp.concatenate([jnp.linspace(-3, -0.2, 8), jnp.linspace(0.2, 3, 8)])[:, None]
    out = sample(Denoiser(two_points), (), x, None, timesteps=uniform_times(200), sampler=sampler)
    np.testing.assert_allclose(out, jnp.sign(x), atol=2e-2)


def test_ddim_without_noise_is_euler_in_sigma_over_alpha():
    abar = linear_alphas_cumprod()
    sampler = ddim(abar)
    t, u = 700.0, 650.0
    a, b = np.sqrt(abar[700]), np.sqrt(abar[650])
    s, r = np.sqrt(1 - abar[700]), np.sqrt(1 - abar[650])
    x, eps = jnp.linspace(-1, 1, 5), jnp.linspace(2, -1, 5)
    out, _ = sampler.step(eps, x, jnp.float32(t), jnp.float32(u), (), None)
    np.testing.assert_allclose(out / b, x / a + (r / b - s / a) * eps, rtol=1e-6, atol=1e-6)


def test_ddim_with_eta_one_has_the_ancestral_variance():
    abar = linear_alphas_cumprod()
    sampler = ddim(abar, eta=1.0)
    x = jnp.zeros(200_000)
    out, key = sampler.step(x, x, jnp.float32(500), jnp.float32(400), jax.random.key(0), None)
    variance = (1 - abar[400]) / (1 - abar[500]) * (1 - abar[500] / abar[400])
    # 200k draws: the standard error of the variance is 0.3 %, three of them 1 %.
    assert float(jnp.var(out)) == pytest.approx(variance, rel=0.01)
    assert not jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))


def test_first_and_last_steps_of_multistep_methods():
    x, v = jnp.array([1.0, -2.0]), jnp.array([0.5, 0.25])
    for sampler in (ab2(), dpmpp_2m()):
        state = sampler.init(x, None)
        out, state = sampler.step(v, x, jnp.float32(1.0), jnp.float32(0.75), state, None)
        np.testing.assert_allclose(out, x - 0.25 * v, rtol=1e-6)  # first order
        assert bool(jnp.all(jnp.isfinite(out)))
    # Data prediction, last step: exactly the predicted data, no infinite log-SNR anywhere.
    sampler = dpmpp_2m()
    state = sampler.init(x, None)
    for t, u in ((1.0, 0.6), (0.6, 0.3), (0.3, 0.0)):
        before = x
        x, state = sampler.step(v, x, jnp.float32(t), jnp.float32(u), state, None)
    np.testing.assert_allclose(x, before - 0.3 * v, rtol=1e-6)


def test_uneven_steps_keep_second_order_weights():
    sampler = ab2()
    t = [1.0, 0.7, 0.6]
    velocity = lambda t: jnp.float32(2 * t)  # x = t^2: AB2 is exact on linear velocities
    x, state = jnp.float32(1.0), sampler.init(jnp.float32(1.0), None)
    _, state = sampler.step(velocity(t[0]), x, jnp.float32(t[0]), jnp.float32(t[1]), state, None)
    x, _ = sampler.step(velocity(t[1]), jnp.float32(0.49), jnp.float32(t[1]), jnp.float32(t[2]),
                        state, None)
    assert float(x) == pytest.approx(0.36, abs=1e-6)


def test_guided_sampling_is_linear_in_the_branches():
    denoiser = Denoiser(lambda p, x, t, c: c[:, None] * jnp.ones_like(x))
    run = functools.partial(
        sample, denoiser, (), jnp.zeros((2, 3)), jnp.full(2, 2.0), timesteps=uniform_times(4)
    )
    out = run(guidance=3.0, null_cond=jnp.full(2, 1.0))
    np.testing.assert_allclose(out, -(1.0 + 3.0 * (2.0 - 1.0)), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ddim(eta=1.5), "eta: must lie in"),
        (lambda: ddim(np.array([0.1, 0.2])), "alphas_cumprod: expected a decreasing vector"),
        (lambda: dpmpp_2m("x0"), "prediction: expected one of"),
        (lambda: dpmpp_2m("velocity", linear_alphas_cumprod()), "alphas_cumprod: only for"),
        (lambda: timestep_indices(0), "num_steps: must be >= 1"),
        (lambda: timestep_indices(11, train_steps=10), "num_steps: must be <= train_steps=10"),
        (lambda: timestep_indices(5, spacing="karras"), "spacing: expected one of"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_samplers_compare_equal_so_nothing_recompiles():
    assert ddim() == ddim() and dpmpp_2m() == dpmpp_2m() and ab2() == ab2()
    assert ddim() != ddim(eta=0.5)
