import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import (
    interpolation_momentum,
    momentum_eval_params,
    scale_momentum,
    sgd_interpolation,
    sgd_momentum,
)

STYLES = ("heavy_ball", "nesterov")
PARAMS = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.ones(3), "s": np.float64(0.5),
          "empty": np.zeros((0, 2))}


def gradients(params):
    """Of a fixed ill-conditioned quadratic; for numpy arrays, too."""
    return jax.tree.map(
        lambda p: (p - 0.3) * np.linspace(0.1, 1, p.size).reshape(p.shape).astype(p.dtype), params)


def start(dtype=jnp.float32):
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)


def run(tx, params, steps=8):
    """All parameters along a run, and the last state."""
    def step(carry, _):
        params, state = carry
        updates, state = tx.update(gradients(params), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda p: (lambda c, h: (h, c[1]))(
        *jax.lax.scan(step, (p, tx.init(p)), length=steps)))(params)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.smoke
def test_rule_follows_its_formulas():
    with jax.enable_x64(True):
        # gamma = c B / R^2 below the curvature's limit: no momentum.
        m = interpolation_momentum(2, 10.0, 1.0, 1e-3, c=1.0)
        n = interpolation_momentum(2, 10.0, 1.0, 1e-3)  # the default c is 4/3
        np.testing.assert_allclose(n.learning_rate, 4 / 3 * m.learning_rate, rtol=1e-12)
        np.testing.assert_allclose((m.learning_rate, m.decay), (0.2, 0.0), rtol=1e-12)
        # Above: eta = s / lmax, 1 - beta = s R^2 / (c B lmax), inversely proportional to B.
        for batch_size in (10, 20, 40):
            m = interpolation_momentum(batch_size, 10.0, 2.0, 1e-6, c=1.25, s=0.4)
            np.testing.assert_allclose(m.learning_rate, 0.2, rtol=1e-12)
            np.testing.assert_allclose(1 - m.decay, 1.6 / batch_size, rtol=1e-12)
        # Saturated: beta = (1 - sqrt(eta mu))^2, or 1 - min_decay where mu is unknown.
        m = interpolation_momentum(1e6, 10.0, 1.0, 1e-4)
        np.testing.assert_allclose(m.decay, (1 - np.sqrt(0.5e-4)) ** 2, rtol=1e-12)
        np.testing.assert_allclose(m.saturation, 10.0 * np.sqrt(1e4), rtol=1e-12)
        m = interpolation_momentum(1e6, 10.0, 1.0, min_decay=0.03)
        np.testing.assert_allclose(m.decay, 0.97, rtol=1e-12)
        assert m.saturation == np.inf
        # Kaczmarz with one row is the classical one: R^2 = 1 >= lmax.
        m = interpolation_momentum(1, 1.0, 0.3, 1e-3, c=1.0)
        assert m.learning_rate == 1.0 and m.decay == 0.0


def test_rule_may_be_traced_and_mapped():
    f = jax.jit(jax.vmap(lambda b: interpolation_momentum(b, 10.0, 1.0, 1e-4, c=1.0)))
    m = f(jnp.array([1.0, 16.0, 64.0]))
    np.testing.assert_allclose(m.learning_rate, [0.1, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(m.decay, [0, 1 - 5 / 16, 1 - 5 / 64], rtol=1e-6)


def test_scaled_momentum_is_the_rule_at_the_other_batch_size():
    base = interpolation_momentum(16, 10.0, 1.0)
    for batch_size in (8, 16, 128, 10**6):
        found = scale_momentum(base.decay, 16, batch_size, min_decay=0.01)
        expected = interpolation_momentum(batch_size, 10.0, 1.0, min_decay=0.01).decay
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert scale_momentum(0.5, 16, 4) == 0.0


@pytest.mark.parametrize("nesterov", [False, True])
def test_constant_hyperparameters_give_optax_sgd(nesterov):
    style = STYLES[nesterov]
    # optax adds gradients, we add displacements: equal up to rounding.
    with jax.enable_x64(True):
        ours, _ = run(sgd_momentum(0.7, 0.9, style=style), start(jnp.float64))
        theirs, _ = run(optax.sgd(0.7, momentum=0.9, nesterov=nesterov), start(jnp.float64))
        assert_trees_close(ours, theirs, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("style", STYLES)
def test_schedules_follow_the_recursion_of_the_iterates(style):
    eta, beta, steps = (lambda t: 0.8 / (1 + 0.2 * t)), (lambda t: 0.9 - 0.05 * t), 6
    with jax.enable_x64(True):
        params = start(jnp.float64)
        found, state = run(sgd_momentum(eta, beta, style=style), params, steps)
        # By hand: x_{t+1} = y_t - eta g(y_t) [+ beta_t (x_t - x_{t-1})], in numpy.
        x = before = y = jax.tree.map(np.asarray, params)
        for t in range(steps):
            if style == "heavy_ball":
                new = jax.tree.map(lambda x, b, g: x - eta(t) * g + beta(t) * (x - b), x, before,
                                   gradients(x))
                x, before = new, x
                y = x
            else:
                new = jax.tree.map(lambda y, g: y - eta(t) * g, y, gradients(y))
                y = jax.tree.map(lambda n, x: n + beta(t) * (n - x), new, x)
                x = new
        last = jax.tree.map(lambda h: h[-1], found)
        assert_trees_close(last, y, rtol=1e-12, atol=1e-13)
        assert_trees_close(momentum_eval_params(state, last), x, rtol=1e-12, atol=1e-13)


def test_a_growing_batch_changes_momentum_as_it_goes():
    sizes = lambda t: jnp.where(t < 4, 16.0, 64.0)
    found, _ = run(sgd_interpolation(sizes, 10.0, 1.0), start())
    decay = lambda t: interpolation_momentum(jnp.where(t < 4, 16.0, 64.0), 10.0, 1.0).decay
    expected, _ = run(sgd_momentum(0.5, decay), start())
    assert_trees_close(found, expected, rtol=1e-6, atol=1e-7)
    constant, _ = run(sgd_interpolation(16, 10.0, 1.0), start())
    assert not np.allclose(found["b"][-1], constant["b"][-1])
    np.testing.assert_allclose(found["b"][3], constant["b"][3], rtol=1e-6)


WRAPPERS = {
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1e6), make()),
    "inject": lambda make: optax.inject_hyperparams(make)(),
    "masked": lambda make: optax.masked(make(), {"w": True, "b": False, "s": True, "empty": True}),
    "multi_steps": lambda make: optax.MultiSteps(make(), 2).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(), 3),
}


def nesterov_by_rule(batch_size=32.0, row_norm_bound=10.0, lmax=1.0):
    return sgd_interpolation(batch_size, row_norm_bound, lmax, style="nesterov")


def mixed():
    """Half of the leaves in bfloat16."""
    params = start()
    return params | {k: params[k].astype(jnp.bfloat16) for k in ("w", "s")}


@functools.lru_cache
def bare_run():
    return jax.jit(lambda: run(nesterov_by_rule(), mixed(), 12))()


@pytest.mark.parametrize("name", WRAPPERS)
def test_composes_with_optax(name):
    params = mixed()
    history, state = run(WRAPPERS[name](nesterov_by_rule), params, steps=12)
    assert jax.tree.map(lambda p: p.dtype, history) == jax.tree.map(lambda p: p.dtype, params)
    expected, _ = bare_run()
    if name == "multi_steps":  # two equal gradients make one step
        history = jax.tree.map(lambda h: h[1::2], history)
        expected = jax.tree.map(lambda h: h[:6], expected)
    evaluated = momentum_eval_params(state, jax.tree.map(lambda h: h[-1], history))
    for key in ("w", "b", "s"):
        if name == "masked" and key == "b":  # plain gradients pass through
            np.testing.assert_array_equal(evaluated[key], history[key][-1])
            continue
        tolerance = 0.02 if params[key].dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(*(np.asarray(h[key], np.float32) for h in (history, expected)),
                                   rtol=tolerance, atol=tolerance)
        if key != "s" or name != "multi_steps":
            assert not np.array_equal(evaluated[key], history[key][-1])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_state_keeps_its_structure_and_dtype(style, dtype):
    tx = sgd_momentum(0.1, lambda t: 0.9 - 0.1 * t, style=style)
    params = start(dtype)
    state = tx.init(params)
    updates, new = jax.jit(tx.update)(gradients(params), state)
    describe = functools.partial(
        jax.tree.map, lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)))
    assert describe(state) == describe(new)
    assert all(v.dtype == jnp.float32 for v in jax.tree.leaves(new.velocity))
    assert all(u.dtype == dtype for u in jax.tree.leaves(updates))
    # The state can be described without parameters in memory.
    abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: params))
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, state)
    narrow = sgd_momentum(0.1, 0.9, velocity_dtype=jnp.bfloat16).init(params)
    assert all(v.dtype == jnp.bfloat16 for v in jax.tree.leaves(narrow.velocity))


def test_hyperparameters_and_starts_may_be_mapped():
    def last(eta, beta, shift):
        params = jax.tree.map(lambda p: p + shift, start())
        history, _ = run(sgd_momentum(eta, beta, style="nesterov"), params)
        return jax.tree.map(lambda h: h[-1], history)

    etas, betas, shifts = jnp.array([0.1, 0.5]), jnp.array([0.9, 0.0]), jnp.array([0.0, 1.0])
    mapped = jax.jit(jax.vmap(last))(etas, betas, shifts)
    for i in range(2):
        assert_trees_close(jax.tree.map(lambda x: x[i], mapped), last(etas[i], betas[i], shifts[i]),
                           rtol=1e-5, atol=1e-6)


def test_iterate_of_a_flax_model_is_found_by_path():
    class Net(nnx.Module):
        def __init__(self):
            self.inner, self.scale = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(2))

    model = Net()
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    opt = nnx.Optimizer(model, sgd_momentum(0.1, 0.5, style="nesterov"), wrt=nnx.Param)
    opt.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    params = nnx.state(model, nnx.Param)
    found = momentum_eval_params(opt.opt_state, params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    # x_1 = y_0 - 0.1 g(y_0), and the parameters stand half a velocity further.
    for tree, step in ((found, 0.1), (params, 0.15)):
        assert_trees_close(nnx.to_pure_dict(tree), jax.tree.map(lambda p: p - step, before),
                           rtol=1e-6)
    with pytest.raises(ValueError, match="params: has no leaf 'inner/bias'"):
        momentum_eval_params(opt.opt_state, {"scale": jnp.ones(2)})


@pytest.mark.parametrize("make", [
    lambda: sgd_momentum(0.1, 0.9), lambda: sgd_interpolation(64, 10.0, 1.0)])
def test_updates_have_the_dtype_of_the_parameters_where_these_are_given(make):
    params, tx = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}, make()
    gradient = {"a": jnp.ones(3), "b": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert dtypes(tx.update(gradient, state, params)[0]) == dtypes(params)
    assert dtypes(tx.update(gradient, state)[0]) == dtypes(gradient)


def test_python_numbers_are_parameters_too():
    tx = sgd_momentum(0.1, 0.9, style="nesterov")
    params = {"a": 1.0}
    updates, state = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(updates["a"], -0.19, rtol=1e-6)
    np.testing.assert_allclose(momentum_eval_params(state, {"a": 0.81})["a"], 0.9, rtol=1e-6)


def test_gradients_that_are_not_finite_stay_so():
    tx = sgd_momentum(0.1, 0.9)
    params = start()
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    updates, state = tx.update(bad, tx.init(params))
    assert all(np.isnan(u).all() for u in jax.tree.leaves(updates))
    assert all(np.isnan(v).all() for v in jax.tree.leaves(state.velocity))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params))
    assert all((u == 0).all() for u in jax.tree.leaves(updates))


def test_errors_name_the_argument():
    rule = interpolation_momentum
    for call, message in (
        (lambda: rule(0, 1.0, 1.0), "batch_size: must lie in"),
        (lambda: rule(1, 0.0, 1.0), "row_norm_bound: must lie in"),
        (lambda: rule(1, 1.0, -1.0), "lmax: must lie in"),
        (lambda: rule(1, 1.0, 1.0, 0.0), "mu: must lie in"),
        (lambda: rule(1, 1.0, 1.0, c=2.0), "c: must lie in"),
        (lambda: rule(1, 1.0, 1.0, s=1.4, style="nesterov"), "s: must lie in"),
        (lambda: rule(1, 1.0, 1.0, min_decay=1.5), "min_decay: must lie in"),
        (lambda: rule(1, 1.0, 1.0, style="polyak"), "style: expected one of"),
        (lambda: rule(lambda t: t, 1.0, 1.0), "batch_size: must stay constant"),
        (lambda: rule("1", 1.0, 1.0), "batch_size: expected a number"),
        (lambda: rule(1, 1.0, 1.0, 1.5), "mu: must be <= lmax = 1.0, got 1.5"),
        (lambda: scale_momentum(1.5, 1, 1), "decay: must lie in"),
        (lambda: scale_momentum(1.0, 1, 1), r"decay: must lie in \[0, 1\)"),
        (lambda: scale_momentum(0.5, 1, 1, 0.0), r"min_decay: must lie in \(0, 1\]"),
        (lambda: optax.inject_hyperparams(sgd_momentum)(0.1, 0.9, velocity_dtype=jnp.bfloat16)
         .init(jnp.ones(2)), "velocity_dtype: expected a dtype.*static_args"),
        (lambda: optax.inject_hyperparams(sgd_interpolation)(
            64, 10.0, 1.0, velocity_dtype=jnp.bfloat16).init(jnp.ones(2)),
         "velocity_dtype: expected a dtype.*static_args"),
        (lambda: scale_momentum(0.5, 1, 0), "new_batch_size: must lie in"),
        (lambda: sgd_momentum(-0.1, 0.9), "learning_rate: must lie in"),
        (lambda: sgd_momentum(0.1, 1.1), "decay: must lie in"),
        (lambda: sgd_momentum(0.1, 0.9, style="adam"), "style: expected one of"),
        (lambda: sgd_interpolation(0.5, 1.0, 1.0), "batch_size: must lie in"),
        (lambda: sgd_momentum(0.1, 0.9).init({"i": jnp.arange(3)}),
         r"params\['i'\]: expected a real"),
        (lambda: sgd_momentum(0.1, 0.9).init(jnp.ones(2, complex)), "params: expected a real"),
        (lambda: momentum_eval_params((), jnp.ones(2)), "state: expected exactly one .* found 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
