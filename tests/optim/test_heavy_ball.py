import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import heavy_ball, scale_by_heavy_ball
from fadex.optim.heavy_ball import GUARD_DECAY

CURVATURE = np.array([1.0, 0.3, 0.02])
START = np.array([1.0, -2.0, 3.0])


def follow(opt, gradients, x0=None):
    """Feed a sequence of gradients ``[T, ...]``: updates ``[T, ...]`` and the states."""
    def body(state, g):
        updates, state = opt.update(g, state)
        return state, (updates, state)

    x0 = jax.tree.map(lambda g: g[0], gradients) if x0 is None else x0
    return jax.lax.scan(body, opt.init(x0), gradients)[1]


def minimise(opt, steps=30):
    """``x_0 .. x_T`` on a quadratic of curvatures ``CURVATURE``."""
    def body(carry, _):
        x, state = carry
        update, state = opt.update(jnp.asarray(CURVATURE) * x, state, x)
        x = optax.apply_updates(x, update)
        return (x, state), x

    x = jnp.asarray(START)
    return jnp.concatenate([x[None], jax.lax.scan(body, (x, opt.init(x)), None, steps)[1]])


@pytest.mark.smoke
@pytest.mark.parametrize(("style", "nesterov"), [
    ("polyak", False), ("ema", False), ("polyak", True), ("ema", True),
])
def test_follows_the_two_term_recursion(style, nesterov):
    eta, beta = 0.4, 0.7
    with jax.enable_x64(True):
        run = jax.jit(lambda eta, beta: minimise(heavy_ball(eta, beta, style, nesterov)))
        path = run(eta / (1 - beta) if style == "ema" else eta, beta)
        assert path.dtype == jnp.float64
    # in NumPy: x_{t+1} = y_t - eta g(y_t) with y_t = x_t + beta (x_t - x_{t-1}), where the
    # gradient is taken at x_t (heavy ball) or at y_t (Nesterov, whose parameters are the y_t)
    x, before, expected = START, START, [START]
    for _ in range(30):
        ahead = x + beta * (x - before)
        x, before = ahead - eta * CURVATURE * (ahead if nesterov else x), x
        expected.append(x + beta * (x - before) if nesterov else x)
    np.testing.assert_allclose(path, expected, rtol=1e-12, atol=1e-12)


def test_equals_optax_where_optax_has_it():
    gradients = jax.random.normal(jax.random.key(0), (20, 7))
    rate = optax.linear_schedule(0.3, 0.01, 20)
    pairs = [
        (heavy_ball(rate, 0.8), optax.sgd(rate, 0.8)),
        (heavy_ball(rate, 0.8, nesterov=True), optax.sgd(rate, 0.8, nesterov=True)),
        (scale_by_heavy_ball(0.8, "ema"), optax.ema(0.8, debias=False)),
        (heavy_ball(rate, 0.0), optax.sgd(rate)),
    ]
    ours, theirs = jax.jit(
        lambda g: [[follow(opt, g)[0] for opt in side] for side in zip(*pairs)]
    )(gradients)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_decay_may_be_a_schedule():
    schedule = lambda t: jnp.minimum(0.1 * t, 0.5)
    gradients = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    for style in ("polyak", "ema"):
        updates, _ = jax.jit(lambda g: follow(scale_by_heavy_ball(schedule, style), g))(gradients)
        m, expected = np.zeros(2), []
        for t, g in enumerate(gradients):
            beta = min(0.1 * t, 0.5)
            m = beta * m + (1 - beta if style == "ema" else 1) * g
            expected.append(m)
        np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)


def guarded(gradients, guard):
    """The guard's rule in NumPy: guarded gradients and running means."""
    mean, out, means = 0.0, [], []
    for t, g in enumerate(np.asarray(gradients, np.float64)):
        norm = np.linalg.norm(g)
        if t and mean > 0 and norm > guard * mean:
            g, norm = g * guard * mean / norm, guard * mean
        mean += max(1 / (t + 1), 1 - GUARD_DECAY) * (norm - mean)
        out.append(g)
        means.append(mean)
    return np.array(out), np.array(means)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_guard_scales_spikes_down_to_its_factor_times_the_running_mean(scale):
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(400, 4))
    gradients[[40, 120]] *= 1000
    gradients[150:] *= 5  # stays large: let through after a while
    expected, means = guarded(gradients, 3.0)
    assert np.any(expected[150:155] != gradients[150:155])
    np.testing.assert_array_equal(expected[350:], gradients[350:])
    run = jax.jit(lambda g, guard: follow(scale_by_heavy_ball(0.0, guard=guard), g))
    updates, states = run(jnp.float32(gradients * scale), 3.0)
    np.testing.assert_allclose(updates / scale, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states.guard_norm / scale, means, rtol=1e-4)
    # momentum is built from guarded gradients
    out, _ = jax.jit(lambda g: follow(heavy_ball(1.0, 0.5, guard=3.0), g))(jnp.float32(gradients))
    m = np.zeros(4)
    for g, update in zip(expected, out):
        m = 0.5 * m + g
        np.testing.assert_allclose(-update, m, rtol=1e-4, atol=1e-4)


def test_guard_survives_zeros_and_shows_what_is_not_finite():
    g = jnp.array([[0.0, 0.0], [1.0, 0.0], [jnp.nan, 0.0], [jnp.inf, 0.0], [1.0, 1.0]])
    updates, states = jax.jit(lambda g: follow(scale_by_heavy_ball(0.0, guard=2.0), g))(g)
    np.testing.assert_array_equal(updates[:2], g[:2])
    assert jnp.isnan(updates[2, 0])
    assert jnp.all(jnp.isfinite(states.guard_norm))
    opt = scale_by_heavy_ball(0.0, guard=2.0)
    _, state = opt.update(g[1], opt.init(g[0]))
    update, after = opt.update(jnp.array([jnp.inf, 1.0]), state)
    np.testing.assert_array_equal(update, [np.inf, 1.0])
    assert after.guard_norm == state.guard_norm
    # under apply_if_finite such a step is skipped, momentum and all
    opt = optax.apply_if_finite(heavy_ball(0.1, 0.9, guard=2.0), 3)
    state = opt.init(g[0])
    _, state = opt.update(g[1], state)
    update, after = jax.jit(opt.update)(g[2], state)
    np.testing.assert_array_equal(update, jnp.zeros(2))
    np.testing.assert_array_equal(
        optax.tree.get(after, "momentum"), optax.tree.get(state, "momentum")
    )


def test_works_inside_optax():
    """Injected and vmapped hyperparameters, masks, donation."""
    run = jax.jit(jax.vmap(lambda eta, beta: minimise(heavy_ball(eta, beta, guard=5.0), 10)))
    etas, betas = jnp.array([0.1, 0.5]), jnp.array([0.9, 0.0])
    paths = run(etas, betas)
    injected = optax.inject_hyperparams(heavy_ball, static_args=("nesterov",))(0.5, 0.0, guard=5.0)
    np.testing.assert_allclose(jax.jit(lambda: minimise(injected, 10))(), paths[1], rtol=1e-5)
    gradients = {"a": jnp.ones(3), "b": jnp.ones((2, 2)), "empty": jnp.zeros((0, 2))}
    masked = optax.masked(heavy_ball(0.1, guard=2.0), {"a": True, "b": False, "empty": True})
    state = masked.init(gradients)
    update, new = jax.jit(masked.update, donate_argnums=1)(gradients, state)
    np.testing.assert_allclose(update["a"], -0.1 * np.ones(3), rtol=1e-6)
    np.testing.assert_array_equal(update["b"], gradients["b"])
    assert optax.tree.get(state, "momentum")["a"].is_deleted()
    np.testing.assert_allclose(optax.tree.get(new, "guard_norm"), np.sqrt(3), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_state_keeps_its_structure_and_updates_their_dtype(dtype):
    params = {"w": jnp.ones((3, 2), dtype), "s": jnp.ones((), dtype)}
    opt = optax.MultiSteps(
        heavy_ball(optax.constant_schedule(0.1), 0.9, "ema", guard=2.0), 2
    )
    state = opt.init(params)
    assert optax.tree.get(state, "momentum")["w"].dtype == jnp.float32
    assert scale_by_heavy_ball(accumulator_dtype=dtype).init(params).momentum["w"].dtype == dtype
    for _ in range(3):
        updates, new = jax.jit(opt.update)(params, state, params)
        kinds = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype, x.weak_type))
        assert kinds(new) == kinds(state)
        assert jax.tree.map(lambda u: u.dtype, updates) == {"w": dtype, "s": dtype}
        state = new


@pytest.mark.parametrize(("kwargs", "message"), [
    (dict(learning_rate=-0.1), "learning_rate.*-0.1"),
    (dict(learning_rate=0.1, decay=1.0), r"decay.*\[0, 1\).*1.0"),
    (dict(learning_rate=0.1, decay=-0.5), "decay.*-0.5"),
    (dict(learning_rate=0.1, style="nag"), "style.*'polyak', 'ema'.*'nag'"),
    (dict(learning_rate=0.1, guard=1.0), "guard.*1.0"),
    (dict(learning_rate=0.1, guard=lambda t: 2.0), "guard: must stay constant"),
])
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        heavy_ball(**kwargs)


def test_updates_have_the_dtype_of_the_parameters_where_these_are_given():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    gradient = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
    opt = heavy_ball(0.1)
    state = opt.init(params)
    dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert dtypes(opt.update(gradient, state, params)[0]) == dtypes(params)
    assert dtypes(opt.update(gradient, state)[0]) == dtypes(gradient)


def test_python_numbers_are_parameters_too():
    opt, params = heavy_ball(0.1, 0.5, guard=2.0), {"a": 1.0}
    state = opt.init(params)
    for expected in (-0.1, -0.15):
        updates, state = opt.update(params, state, params)
        np.testing.assert_allclose(updates["a"], expected, rtol=1e-6)


def test_dtype_under_injection_is_named():
    opt = optax.inject_hyperparams(heavy_ball)(0.1, accumulator_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="accumulator_dtype: expected a dtype.*static_args"):
        opt.init(jnp.ones(2))


def test_integer_parameters_are_refused():
    with pytest.raises(ValueError, match=r"params\['n'\].*int32"):
        heavy_ball(0.1).init({"n": jnp.arange(3)})
