import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import accelegrad_sharp, scion
from fadex.quant import Recipe, int_group, nvfp4
from fadex.quant.qat import fake_quant, fixed_scale, gaussian, ste, surrogate_factor, zoe_surrogate

RECIPE = Recipe((
    ("hidden/kernel", int_group(3, 16)), ("out/kernel", int_group(2, 16)), ("**", None)
))  # fmt: skip
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def problem():
    rng = np.random.default_rng(0)
    draw = lambda *s: rng.standard_normal(s).astype(np.float32)
    params = {
        "hidden": {"kernel": draw(32, 24) / 5, "bias": np.zeros(24, np.float32)},
        "out": {"kernel": draw(24, 3) / 5, "bias": np.zeros(3, np.float32)},
    }
    x, y = draw(64, 32), draw(64, 3)

    def loss(p):
        h = jnp.tanh(x @ p["hidden"]["kernel"] + p["hidden"]["bias"])
        return jnp.mean((h @ p["out"]["kernel"] + p["out"]["bias"] - y) ** 2)

    return params, loss


def run(optimizer, gradient, params, steps=6):
    """Parameters after each step, one program."""
    def step(carry, count):
        params, state = carry
        updates, state = optimizer.update(gradient(params, count), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start = jax.tree.map(jnp.asarray, params)
    return jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), jnp.arange(steps))[1])(start)


@pytest.mark.smoke
@pytest.mark.parametrize("make", [
    lambda: optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale(-3e-3)),
    lambda: scion(0.02),
    lambda: accelegrad_sharp(0.02, anchor_learning_rate=0.01),
], ids=["adam_momentum", "scion", "accelegrad_sharp"])  # fmt: skip
def test_the_transform_equals_differentiating_through_fake_quantization(make):
    params, loss = problem()
    kernel = gaussian(optax.linear_schedule(0.5, 0.25, 6))
    dense = functools.partial(fake_quant, recipe=RECIPE, min_size=0)
    by_transform = run(
        optax.chain(zoe_surrogate(RECIPE, kernel, min_size=0), make()),
        lambda p, count: jax.grad(loss)(dense(p)), params,
    )
    by_jvp = run(
        make(),
        lambda p, count: jax.grad(lambda p: loss(dense(p, surrogate=kernel.at(count))))(p), params,
    )
    for got, want in zip(jax.tree.leaves(by_transform), jax.tree.leaves(by_jvp)):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert np.abs(by_jvp["hidden"]["kernel"][-1] - params["hidden"]["kernel"]).max() > 1e-3


def test_composes_with_masks_and_accumulation():
    params, loss = problem()
    grads = jax.tree.map(np.asarray, jax.grad(loss)(params))
    kernel = gaussian(0.35)
    recipe = Recipe((("**/kernel", int_group(2, 16)),))
    mask = {"hidden": {"kernel": True, "bias": False}, "out": {"kernel": False, "bias": True}}

    @jit
    def go(grads, params):
        masked = optax.masked(zoe_surrogate(recipe, kernel, min_size=0), mask)
        once, _ = masked.update(grads, masked.init(params), params)
        every = optax.MultiSteps(
            optax.chain(zoe_surrogate(recipe, kernel, min_size=0), optax.sgd(1.0)), 2)
        step = lambda state, g: every.update(g, state, params)[::-1]
        pair = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), grads)
        both = jax.lax.scan(step, every.init(params), pair)[1]
        first, second = (jax.tree.map(lambda u, i=i: u[i], both) for i in (0, 1))
        factors = {k: surrogate_factor(params[k]["kernel"], int_group(2, 16), kernel)
                   for k in params}
        return once, first, second, factors

    once, first, second, factors = go(grads, params)
    np.testing.assert_allclose(
        once["hidden"]["kernel"], grads["hidden"]["kernel"] * factors["hidden"], rtol=1e-6)
    np.testing.assert_array_equal(once["out"]["kernel"], grads["out"]["kernel"])
    np.testing.assert_array_equal(once["out"]["bias"], grads["out"]["bias"])
    assert all(float(jnp.abs(u).max()) == 0 for u in jax.tree.leaves(first))
    for k in factors:
        np.testing.assert_allclose(
            second[k]["kernel"], -2 * grads[k]["kernel"] * factors[k], rtol=1e-5, atol=1e-7)


def test_states_dtypes_and_traced_radii():
    w = np.random.default_rng(1).standard_normal((4, 32, 8)).astype(np.float32)
    g = jnp.ones(w.shape, jnp.bfloat16)
    assert zoe_surrogate(nvfp4(), ste()).init(w) == optax.EmptyState()
    moving = zoe_surrogate(fixed_scale(2, 1.0), gaussian(lambda t: 0.5 - 0.1 * t), edge="tail",
                           min_size=0)

    @jit
    def go(w, g, deltas):
        state = moving.init(w)
        first, after = moving.update(g, state, w)
        second, last = moving.update(g, after, w)
        sweep = jax.vmap(lambda d: zoe_surrogate(
            nvfp4(), gaussian(d, "relative"), min_size=0).update(g, optax.EmptyState(), w)[0])
        exact = [surrogate_factor(w, fixed_scale(2, 1.0), gaussian(d), edge="tail")
                 for d in (0.5, 0.4)]
        return (first, second), exact, (state, after, last), sweep(deltas)

    updates, exact, states, sweep = go(w, g, jnp.array([0.3, 0.6]))
    for got, want in zip(updates, exact):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=5e-3, atol=1e-6)
    assert [int(s.count) for s in states] == [0, 1, 2]
    assert sweep.shape == (2, *w.shape) and not np.array_equal(sweep[0], sweep[1])


def test_errors_name_the_argument():
    params = {"kernel": jnp.ones((32, 4))}
    tx = zoe_surrogate(nvfp4(), ste(), min_size=0)
    for call, error, message in (
        (lambda: tx.update(params, tx.init(params)), ValueError, "params is required by zoe_surr"),
        (lambda: zoe_surrogate(nvfp4(), 0.3), TypeError, "kernel: expected a Kernel"),
        (lambda: zoe_surrogate(nvfp4(), ste(), edge="clip"), ValueError, "edge: expected one of"),
        (lambda: zoe_surrogate("nvfp4", ste()), TypeError, "recipe: expected a Recipe"),
    ):
        with pytest.raises(error, match=message):
            call()
