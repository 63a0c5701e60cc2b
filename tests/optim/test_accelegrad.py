"""Euclidean AcceleGrad against a NumPy transcription of the paper, and its rate."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import accelegrad, accelegrad_eval_params, levy_weights


def reference(grad, x0, steps, diameter, lipschitz=0.0, project=lambda z: z):
    """The iteration of arXiv 1809.02864, in NumPy: gradient points, y's, averages."""
    y = z = x0
    total, mass, mean = 0.0, 0.0, np.zeros_like(x0)
    points, ys = [], []
    for t in range(steps):
        alpha = 1.0 if t <= 2 else (t + 1) / 4
        x = z / alpha + (1 - 1 / alpha) * y
        g = grad(x)
        total += alpha**2 * (g @ g)
        eta = 2 * diameter / np.sqrt(lipschitz**2 + total)
        z = project(z - alpha * eta * g)
        y = x - eta * g
        mass += alpha
        mean = mean + alpha / mass * (y - mean)
        points.append(x)
        ys.append(y)
    return np.array(points), np.array(ys), mean


def run(opt, grad, x0, steps):
    def step(carry, _):
        x, state = carry
        updates, state = opt.update(grad(x), state, x)
        return (optax.apply_updates(x, updates), state), (x, state.y)

    (x, state), (points, ys) = jax.lax.scan(step, (x0, opt.init(x0)), None, length=steps)
    return x, state, points, ys


@pytest.mark.smoke
def test_iterates_are_those_of_the_paper():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((6, 6))
    hessian, x0 = matrix @ matrix.T, rng.standard_normal(6)
    ball = lambda z: z * min(1.0, 1.5 / np.linalg.norm(z))
    with jax.enable_x64(True):
        for diameter, lipschitz, project in ((0.7, 0.0, None), (2.0, 3.0, ball)):
            opt = accelegrad(
                diameter, lipschitz, average=True,
                projection=project and (lambda z: z * jnp.minimum(1.0, 1.5 / jnp.linalg.norm(z))),
            )
            x, state, points, ys = run(opt, lambda x: hessian @ x, jnp.asarray(x0), 40)
            want = reference(
                lambda x: hessian @ x, x0, 40, diameter, lipschitz, project or (lambda z: z)
            )
            np.testing.assert_allclose(points, want[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(ys, want[1], rtol=0, atol=1e-12)
            np.testing.assert_allclose(state.average, want[2], rtol=0, atol=1e-12)
            np.testing.assert_array_equal(accelegrad_eval_params(state, x), ys[-1])
            np.testing.assert_array_equal(
                accelegrad_eval_params(state, x, "average"), state.average
            )
            np.testing.assert_array_equal(accelegrad_eval_params(state, x, "x"), x)


def test_weights_are_the_papers():
    expected = [1, 1, 1, 1, 5 / 4, 6 / 4]
    np.testing.assert_array_equal([levy_weights(t) for t in range(6)], expected)


def test_diameter_may_be_a_schedule_an_array_or_injected():
    x0 = jnp.array([1.0, -2.0])
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    anchors = [run(accelegrad(schedule), lambda x: x, x0, n)[1].z for n in (8, 11, 14)]
    assert np.any(anchors[0] != anchors[1])
    # No step is left after the decay; two programs may differ in the last bit.
    np.testing.assert_allclose(anchors[1], anchors[2], rtol=1e-6)
    injected = optax.inject_hyperparams(accelegrad)(diameter=0.5)
    state = injected.init(x0)
    updates, state = injected.update(x0, state, x0)
    plain, _ = accelegrad(0.5).update(x0, accelegrad(0.5).init(x0), x0)
    np.testing.assert_allclose(updates, plain, rtol=1e-6)
    assert float(state.hyperparams["diameter"]) == 0.5
    assert accelegrad_eval_params(state, x0).shape == (2,)


def test_evaluation_parameters_are_found_through_wrappers_and_masks():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    opt = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(accelegrad(1.0), {"a": True, "b": False})
    )
    state = opt.init(params)
    _, state = opt.update(jax.tree.map(jnp.ones_like, params), state, params)
    found = accelegrad_eval_params(state, params)
    assert found["a"].dtype == jnp.bfloat16 and float(found["a"][0]) < 1
    assert found["b"] is params["b"]
    many = optax.MultiSteps(accelegrad(1.0), 2)
    assert accelegrad_eval_params(many.init(params), params)["b"].shape == (2,)


def test_projection_outside_is_seen_by_the_next_step():
    opt, x = accelegrad(1.0), jnp.array([3.0, 4.0])
    state = opt.init(x)
    _, state = opt.update(x, state, x)
    moved = jnp.array([0.1, 0.2])
    _, state = opt.update(jnp.zeros(2), state, moved)
    np.testing.assert_array_equal(state.y, moved)  # zero gradient: y is where x was


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"diameter": 0.0}, r"diameter: must lie in \(0.0, inf\), got 0.0"),
        ({"diameter": "1"}, "diameter: expected a number"),
        ({"lipschitz": -1.0}, "lipschitz: must lie in"),
        ({"weight_schedule": "levi"}, "weight_schedule: expected one of 'levy'.*got 'levi'"),
        ({"resync": "always"}, "resync: expected"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        accelegrad(**arguments)


def test_bad_calls_say_what_is_wrong():
    opt, x = accelegrad(1.0), jnp.ones(2)
    state = opt.init(x)
    with pytest.raises(ValueError, match="params is required by accelegrad"):
        opt.update(x, state)
    with pytest.raises(ValueError, match=r"params\['n'\].*got dtype int32"):
        opt.init({"n": jnp.arange(3)})
    with pytest.raises(ValueError, match="got dtype complex64"):
        opt.init(jnp.ones(2, jnp.complex64))
    with pytest.raises(ValueError, match="keeps no average; pass average=True"):
        accelegrad_eval_params(state, x, "average")
    with pytest.raises(ValueError, match="which: expected"):
        accelegrad_eval_params(state, x, "w")
    with pytest.raises(ValueError, match="found no AcceleGrad"):
        accelegrad_eval_params(optax.sgd(0.1).init(x), x)
    both = optax.chain(opt, opt).init(x)
    with pytest.raises(ValueError, match="two AcceleGrad states hold"):
        accelegrad_eval_params(both, x)
