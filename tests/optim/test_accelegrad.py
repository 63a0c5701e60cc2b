"""Euclidean AcceleGrad against a NumPy transcription of the paper, and its rate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import accelegrad, accelegrad_eval_params, levy_weights


def reference(grad, x0, steps, diameter, lipschitz, alpha, project=lambda z: z):
    """The iteration of arXiv 1809.02864, in NumPy: gradient points, y's, averages."""
    y = z = x0
    total, mass, mean = 0.0, 0.0, np.zeros_like(x0)
    points, ys = [], []
    for t in range(steps):
        x = z / alpha(t) + (1 - 1 / alpha(t)) * y
        g = grad(x)
        total += alpha(t) ** 2 * (g @ g)
        eta = 2 * diameter(t) / np.sqrt(lipschitz(t) ** 2 + total)
        z = project(z - alpha(t) * eta * g)
        y = x - eta * g
        mass += alpha(t)
        mean = mean + alpha(t) / mass * (y - mean)
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
def test_iterates_are_those_of_the_paper_with_numbers_and_with_schedules():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((6, 6))
    hessian, x0 = matrix @ matrix.T, rng.standard_normal(6)
    ball = lambda z: z * min(1.0, 1.5 / np.linalg.norm(z))
    levy = lambda t: 1.0 if t <= 2 else (t + 1) / 4
    for diameter, lipschitz, weights, alpha, project in (
        (0.7, 0.0, "levy", levy, None),
        (lambda t: 2 / (1 + 0.2 * t), lambda t: 3.0 + t, "linear", lambda t: (t + 2) / 2, ball),
        (lambda t: 0.5 + 0.1 * t, 3.0, *[lambda t: 2 + 0.25 * t] * 2, None),
    ):
        with jax.enable_x64(True):
            opt = accelegrad(
                diameter, lipschitz, weight_schedule=weights, average=True,
                projection=project and (lambda z: z * jnp.minimum(1.0, 1.5 / jnp.linalg.norm(z))),
            )
            x, state, points, ys = jax.jit(
                lambda x, opt=opt: run(opt, lambda x: hessian @ x, x, 40))(x0)
            at = lambda value: value if callable(value) else lambda t: value
            want = reference(lambda x: hessian @ x, x0, 40, at(diameter), at(lipschitz), alpha,
                             project or (lambda z: z))
            np.testing.assert_allclose(points, want[0], rtol=0, atol=1e-11)
            np.testing.assert_allclose(ys, want[1], rtol=0, atol=1e-11)
            np.testing.assert_allclose(state.average, want[2], rtol=0, atol=1e-11)
            np.testing.assert_array_equal(accelegrad_eval_params(state, x), ys[-1])
            np.testing.assert_array_equal(
                accelegrad_eval_params(state, x, "average"), state.average
            )
            np.testing.assert_array_equal(accelegrad_eval_params(state, x, "x"), x)


def test_weights_are_the_papers():
    expected = [1, 1, 1, 1, 5 / 4, 6 / 4]
    np.testing.assert_array_equal([levy_weights(t) for t in range(6)], expected)


def test_diameter_may_be_an_array_or_injected():
    x0 = jnp.array([1.0, -2.0])
    injected = optax.inject_hyperparams(accelegrad)(diameter=0.5)
    state = injected.init(x0)
    updates, state = jax.jit(injected.update)(x0, state, x0)
    plain = jax.jit(lambda d: accelegrad(d).update(x0, accelegrad(d).init(x0), x0)[0])
    np.testing.assert_allclose(updates, plain(jnp.float32(0.5)), rtol=1e-6)
    assert float(state.hyperparams["diameter"]) == 0.5
    assert accelegrad_eval_params(state, x0).shape == (2,)


def test_path_does_not_depend_on_the_scale_of_the_objective():
    # η ~ 1/‖g‖, so c f has the path of f: also where the squares of c leave float32.
    x0, hessian = jnp.array([1.0, -2.0, 0.5]), jnp.array([1.0, 0.3, 0.1])
    paths = jax.jit(jax.vmap(
        lambda c: run(accelegrad(1.0), lambda x: c * (hessian * x), x0, 12)[2]
    ))(jnp.array([1.0, 1e-30, 1e-21, 1e20, 1e30]))
    assert float(jnp.abs(paths[0, -1] - x0).max()) > 0.5
    np.testing.assert_allclose(paths, jnp.broadcast_to(paths[0], paths.shape), atol=1e-5)


def test_donated_iterates_stay_in_their_buffers():
    x = {"w": jnp.ones((8, 64)), "b": jnp.ones(64)}
    opt = accelegrad(1.0, average=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(x, state, g):
        updates, state = opt.update(g, state, x)
        return optax.apply_updates(x, updates), state

    g, kept = jax.tree.map(jnp.copy, x), (x, opt.init(x))
    compiled = step.lower(*kept, g).compile()
    wanted = 4 * sum(leaf.nbytes for leaf in jax.tree.leaves(x))
    assert compiled.memory_analysis().alias_size_in_bytes >= wanted
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kept)]
    kept = compiled(*kept, g)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(kept)] == places


def test_parameters_may_be_python_numbers():
    params = {"a": 1.0, "b": -2.0}
    opt = accelegrad(1.0)
    updates, _ = opt.update(params, opt.init(params), params)
    # The first step goes 2D along -g/‖g‖ from x_0.
    np.testing.assert_allclose(updates["a"], -2 / 5**0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["b"], 4 / 5**0.5, rtol=1e-6)


def test_evaluation_parameters_are_found_through_wrappers_and_masks():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    opt = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(accelegrad(1.0), {"a": True, "b": False})
    )
    state = opt.init(params)
    _, state = jax.jit(opt.update)(jax.tree.map(jnp.ones_like, params), state, params)
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
        ({"weight_schedule": "constant"}, "weight_schedule: 'constant' would couple with τ = 1"),
        ({"weight_schedule": lambda t: 0.5 + t}, r"α\(t\) >= 1 .*got α\(0\) = 0.5"),
        ({"projection": 1.5}, "projection: expected a function, got 1.5"),
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
