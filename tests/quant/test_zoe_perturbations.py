import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from fadex.quant.qat import (
    PERTURBATIONS,
    Kernel,
    gaussian,
    make_kernel,
    perturbation_from_surrogate,
    sigmoid,
    ste,
    surrogate_weight,
)

SMOOTH = [name for name in PERTURBATIONS if name != "rademacher"]
ZETA_3 = 1.2020569031595942
C_SIGMOID = 7 * ZETA_3 / (2 * math.pi**2)


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def logistic(u):
    return jax.nn.sigmoid(u) * jax.nn.sigmoid(-u)


@pytest.fixture(scope="module")
def sigmoid_inverse():
    return perturbation_from_surrogate(logistic, "logistic")


def density(name):
    """The families' densities, from scipy's distributions where it has them."""
    h = C_SIGMOID**-0.5
    return {
        "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)).pdf,
        "gaussian": stats.norm.pdf,
        "laplace": stats.laplace(scale=math.sqrt(0.5)).pdf,
        "arctan": stats.t(3, scale=3**-0.5).pdf,
        # -h^2 g'(h z) / z of the logistic density.
        "sigmoid": lambda z: h**2 * stats.logistic.pdf(h * z) * np.tanh(h * z / 2) / z,
    }[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.smoke] * (n == "gaussian")) for n in SMOOTH],
)
def test_densities_have_unit_variance_and_the_stated_tails(name):
    p, lam = PERTURBATIONS[name], density(name)
    far = math.sqrt(3) if name == "uniform" else np.inf
    quad = lambda fn, a, b=far: integrate.quad(fn, min(a, b), b, epsabs=1e-11, limit=200)[0]
    tiny = 1e-12
    assert abs(2 * quad(lam, tiny) - 1) < 1e-7
    assert abs(2 * quad(lambda z: z * z * lam(z), tiny) - 1) < 1e-6
    a = np.array([0.0, 0.3, 0.9, 1.7, 2.6, 5.0])
    tails = [quad(lambda z: z * lam(z), max(x, tiny)) for x in a]
    far = min(p.reach, 1e6) * 1.0001
    both = np.concatenate([a, -a, [far]]).astype(np.float32)
    tail, cdf, density_at = jit(lambda a: (p.tail(a), p.cdf(a), p.density(a)))(both)
    np.testing.assert_allclose(tail[:6], tails, rtol=3e-6, atol=1e-7)
    np.testing.assert_array_equal(tail[6:12], tail[:6])
    assert float(tail[12]) < 1e-8
    below = np.array([0.5 + quad(lam, tiny) - quad(lam, max(x, tiny)) for x in a])
    np.testing.assert_allclose(cdf[:12], np.concatenate([below, 1 - below]), atol=2e-6)
    np.testing.assert_allclose(density_at[:6], lam(np.maximum(a, 1e-6)), rtol=1e-5, atol=1e-8)


def test_samples_follow_their_distribution():
    """Kolmogorov-Smirnov, 20 000 draws each: five tests at 1e-4, false alarm 5e-4 in all."""
    keys = jax.random.split(jax.random.key(3), 6)
    draws = jax.device_get(jit(lambda keys: {
        name: p.sample(key, (20_000,)) for key, (name, p) in zip(keys, PERTURBATIONS.items())
    })(keys))
    assert set(np.unique(draws["rademacher"])) == {-1.0, 1.0}
    assert abs(draws["rademacher"].mean()) < 4 / 141
    exact = {
        "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)).cdf,
        "gaussian": stats.norm.cdf,
        "laplace": stats.laplace(scale=math.sqrt(0.5)).cdf,
        "arctan": stats.t(3, scale=3**-0.5).cdf,
    }
    for name, cdf in exact.items():
        assert stats.kstest(draws[name], cdf).pvalue > 1e-4, name
    # Logistic draws accepted with probability 2 tanh(u/2) / u have the sigmoid's density.
    rng = np.random.default_rng(0)
    u = rng.logistic(size=60_000)
    kept = u[rng.random(len(u)) < 2 * np.tanh(u / 2) / u] * math.sqrt(C_SIGMOID)
    assert stats.ks_2samp(draws["sigmoid"], kept).pvalue > 1e-4


def test_the_inverse_map_recovers_the_sigmoid_surrogate(sigmoid_inverse):
    found = sigmoid_inverse
    assert abs(found.c - C_SIGMOID) < 1e-8
    assert abs(found.mass - 1) < 1e-8 and abs(found.delta - C_SIGMOID**-0.5) < 1e-7
    u = np.array([0.0, 0.5, 1.0, 2.0], np.float32)
    exact = np.array([0.25, 0.2350037, 0.1966119, 0.1049936])
    at = np.array([-1.0, 0.0, 1e-5, 2.0], np.float32)
    built_in = PERTURBATIONS["sigmoid"]
    # Through the kernel of one threshold, and through the family that is built in.
    weights, functions, z = jit(lambda u, at: (
        [surrogate_weight(u, [-0.5, 0.5], kernel=kernel)
         for kernel in (make_kernel(found.perturbation, found.delta), sigmoid(found.delta))],
        [(p.density(at), p.cdf(at)) for p in (found.perturbation, built_in)],
        found.perturbation.sample(jax.random.key(1), (200_000,)),
    ))(u, at)
    for got in weights:
        np.testing.assert_allclose(got, exact, rtol=2e-6)
    for got, want in zip(*functions):
        np.testing.assert_allclose(got, want, rtol=1e-4)
    # E z [H(u + dz) - H(u - dz)] / 2d over its own samples: z-scores of four points.
    z = np.asarray(z, np.float64)
    for x, want in zip(u, exact):
        moved = (x + found.delta * z >= 0) * 1.0 - (x - found.delta * z >= 0)
        draws = z * moved / (2 * found.delta)
        assert abs(draws.mean() - want) < 4.5 * draws.std() / math.sqrt(len(z))


def test_the_inverse_map_of_the_arctan_surrogate_has_c_1_whatever_its_height():
    found = perturbation_from_surrogate(lambda u: 5 / (1 + u * u))
    assert abs(found.c - 1) < 1e-7 and abs(found.delta - 1) < 1e-7
    assert abs(found.mass - 5 * math.pi) < 1e-6 * found.mass


@pytest.mark.parametrize(("g", "message"), [
    (lambda u: jnp.maximum(1 - jnp.abs(u), 0), "c is infinite"),  # triangle
    (lambda u: 1 / (1 + jnp.abs(u)) ** 2, "c is infinite"),  # fast sigmoid
    (lambda u: jnp.exp(-jnp.abs(u)), "c is infinite"),
    (lambda u: jnp.where(jnp.abs(u) < 1, 0.5, 0.0), "it has jumps"),
    (lambda u: (1 + u * u) ** -0.5, "expected an integrable function"),
    (lambda u: jnp.exp(-((u - 1) ** 2)), "expected an even function"),
    (lambda u: u * u * jnp.exp(-u * u) + 1e-3, "does not increase"),
    (lambda u: -1.0 + 0 * u, "g\\(0\\) > 0"),
])  # fmt: skip
def test_surrogates_that_no_perturbation_induces_raise(g, message):
    with pytest.raises(ValueError, match=f"^g: .*{message}"):
        perturbation_from_surrogate(g)


def test_kernels_are_pytrees_of_their_radius():
    kernel = gaussian(0.5, "relative")
    assert jax.tree.leaves(kernel) == [0.5]
    doubled = jax.tree.map(lambda d: 2 * d, kernel)
    assert doubled == gaussian(1.0, "relative")
    moving = gaussian(lambda count: 0.5 - 0.25 * count / 10)
    assert moving.scheduled and moving.at(5).delta == 0.375
    assert kernel.at(5) is kernel and isinstance(ste(), Kernel)
    assert not jax.tree.leaves(ste())  # nothing to trace, so it is known to be STE everywhere
    assert type(gaussian(np.float32(0.5)).delta) is float
    traced = jit(lambda d: surrogate_weight(0.2, [-1.0, 1.0], kernel=gaussian(d, "relative")))
    np.testing.assert_array_equal(np.isnan(traced(jnp.array([0.3, 0.0, -0.3]))), [0, 1, 1])


def test_kernel_errors_name_the_argument():
    for call, error, message in (
        (lambda: gaussian(0.0), ValueError, "delta: must lie in"),
        (lambda: gaussian(float("nan")), ValueError, "delta: must be finite"),
        (lambda: gaussian(np.float32(0)), ValueError, "delta: must lie in"),
        (lambda: gaussian(jnp.float32(-0.35)), ValueError, "delta: must be positive and finite"),
        (lambda: gaussian(np.array([0.3, np.inf])), ValueError, "delta: must be positive and fin"),
        (lambda: gaussian(np.array([True])), TypeError, "delta: expected real numbers, got dtype"),
        (lambda: gaussian(lambda t: 0.3 - t).at(1), ValueError, "delta: must lie in"),
        (lambda: gaussian("wide"), TypeError, "delta: expected a real number"),
        (lambda: gaussian(0.3, "cells"), ValueError, "bandwidth: expected one of"),
        (lambda: make_kernel("gaussian"), TypeError, "perturbation: expected a Perturbation"),
    ):
        with pytest.raises(error, match=message):
            call()
