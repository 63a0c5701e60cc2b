import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.optim import (
    heavy_ball,
    oscillation_index,
    oscillation_monitor,
    river_progress,
    river_valley_2d,
    river_valley_nd,
    sharpness,
    top_hessian,
)


def turned(values, seed=0):
    """``Q diag(values) Q'`` with a random rotation."""
    n = len(values)
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    return q @ np.diag(values) @ q.T


def quadratic(matrix):
    """A loss on several leaves with this Hessian ``[9, 9]``, and a point."""
    def loss(p):
        x = jnp.concatenate([p["a"].ravel(), p["b"]])
        return 0.5 * x @ matrix @ x

    return loss, {"a": jnp.ones((2, 3)), "b": jnp.ones(3), "empty": jnp.zeros((0, 2))}


@pytest.mark.smoke
def test_sharpness_is_the_eigenvalue_of_largest_modulus():
    rows = [[50.0, 20, 5, 1, 1, 1, 0.1, 0.1, 0], [20.0, 10, 5, 1, 1, 1, 0, 0, -60]]
    matrices = np.stack([turned(row) for row in rows])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def found(matrix, key):
        return sharpness(*quadratic(matrix), key)

    out = found(jnp.asarray(matrices, jnp.float32), jax.random.split(jax.random.key(0), 8))
    np.testing.assert_allclose(out, np.repeat([[50.0], [-60.0]], 8, axis=1), rtol=1e-4)


def network(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def test_top_hessian_equals_the_dense_eigenpairs_of_a_network():
    keys = jax.random.split(jax.random.key(1), 5)
    params = {"w": jax.random.normal(keys[0], (5, 6)), "b": jnp.zeros(6),
              "v": jax.random.normal(keys[1], (6,))}
    x, y = jax.random.normal(keys[2], (40, 5)), jax.random.normal(keys[3], (40,))
    loss = lambda p: network(p, x, y)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    dense = np.asarray(jax.jit(jax.hessian(lambda z: loss(unravel(z))))(flat), np.float64)
    values, vectors = np.linalg.eigh((dense + dense.T) / 2)

    # too few products for the last of the five: what is not converged says so
    top = jax.jit(lambda p, key: top_hessian(loss, p, key, k=5, iters=16))(params, keys[4])
    np.testing.assert_allclose(top.values[:2], values[::-1][:2], rtol=1e-4)
    true = np.min(np.abs(np.asarray(top.values)[:, None] - values), axis=1)
    assert np.all(true <= np.asarray(top.residuals) + 1e-5 * values[-1])
    assert top.residuals[0] < 1e-4 * values[-1] < 1e-3 * values[-1] < top.residuals[4]
    found = np.stack([jax.flatten_util.ravel_pytree(jax.tree.map(lambda v: v[i], top.vectors))[0]
                      for i in range(5)]).astype(np.float64)
    np.testing.assert_allclose(found @ found.T, np.eye(5), atol=1e-5)
    np.testing.assert_allclose(abs(np.sum(found[:2].T * vectors[:, :-3:-1], axis=0)),
                               np.ones(2), atol=1e-3)
    # the residual is that of the pair
    np.testing.assert_allclose(
        np.linalg.norm(dense @ found[4] - float(top.values[4]) * found[4]), top.residuals[4],
        rtol=0.05)


def test_top_hessian_finds_repeated_eigenvalues():
    rows = np.array([
        [7.0] * 9,  # every Krylov space is a line
        [9.0, 9, 9, 4, 4, 0, 0, 0, 0],
        [3.0, 2, 0, 0, 0, 0, 0, 0, -50],  # the largest, not the largest modulus
        [0.0] * 9,
    ])
    matrices = jnp.asarray(np.stack([turned(row) for row in rows]), jnp.float32)
    top = jax.jit(jax.vmap(
        lambda matrix: top_hessian(*quadratic(matrix), jax.random.key(2), k=9)
    ))(matrices)
    np.testing.assert_allclose(top.values, rows, atol=1e-3)
    flat = np.concatenate([np.reshape(top.vectors["a"], (4, 9, 6)), top.vectors["b"]], axis=2)
    np.testing.assert_allclose(
        flat @ flat.swapaxes(1, 2), np.tile(np.eye(9), (4, 1, 1)), atol=1e-4)
    assert top.vectors["empty"].shape == (4, 9, 0, 2)


def test_bfloat16_parameters_give_the_curvature_to_their_precision():
    curvature = jnp.array([64.0, 8.0, 1.0])
    loss = lambda x: 0.5 * jnp.sum(curvature * x.astype(jnp.float32) ** 2)
    x = jnp.ones(3, jnp.bfloat16)
    sharp, top = jax.jit(lambda x, key: (
        sharpness(loss, x, key), top_hessian(loss, x, key, k=1).values[0]
    ))(x, jax.random.key(0))
    assert sharp.dtype == top.dtype == jnp.float32
    np.testing.assert_allclose([sharp, top], [64.0, 64.0], rtol=0.02)


def follow(opt, gradients):
    def body(state, g):
        out, state = opt.update(g, state)
        return state, (out, optax.tree.get(state, "oscillation_index"))

    return jax.lax.scan(body, opt.init(jax.tree.map(lambda g: g[0], gradients)), gradients)[1]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_monitor_is_the_unbiased_running_mean_of_minus_the_cosine(scale):
    rng = np.random.default_rng(3)
    g = rng.normal(size=(15, 6))
    tree = {"a": g[:, :4].reshape(15, 2, 2), "b": g[:, 4:]}
    tree = jax.tree.map(lambda x: jnp.float32(x * scale), tree)
    out, index = jax.jit(lambda t, d: follow(oscillation_monitor(d), t))(tree, 0.8)
    jax.tree.map(np.testing.assert_array_equal, out, tree)
    pairs = [-a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in itertools.pairwise(g)]
    expected = [0.0] + [
        np.average(pairs[:t + 1], weights=0.8 ** np.arange(t, -1, -1)) for t in range(14)
    ]
    np.testing.assert_allclose(index, expected, rtol=1e-4, atol=1e-5)


def test_monitor_tells_hill_sides_from_the_river():
    # gradient descent: near the edge of stability, and far inside it
    valley = river_valley_2d(100.0, 0.3, 1.0, slope=0.1)

    @jax.jit
    @jax.vmap
    def index(rate):
        opt = optax.chain(oscillation_monitor(), heavy_ball(rate, 0.0))

        def body(carry, _):
            x, state = carry
            update, state = opt.update(jax.grad(valley.loss)(x), state)
            return (x + update, state), None

        x = valley.join(0.0, jnp.array([0.1]))
        (_, state), _ = jax.lax.scan(body, (x, opt.init(x)), None, 100)
        return optax.tree.get(state, "oscillation_index")

    near, inside = index(jnp.array([1.99, 0.5]) / 100)
    assert near > 0.5
    assert inside < -0.9


def test_zero_gradients_and_nan():
    zero, one = jnp.zeros(2), jnp.ones(2)
    assert oscillation_index(zero, one) == 0
    assert oscillation_index(one, zero) == 0
    assert jnp.isnan(oscillation_index(jnp.array([jnp.nan, 1.0]), one))
    np.testing.assert_allclose(oscillation_index(one, -one), 1.0, rtol=1e-6)


def test_monitor_works_inside_optax():
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "s": jnp.ones((), jnp.bfloat16)}
    opt = optax.MultiSteps(optax.chain(
        optax.inject_hyperparams(oscillation_monitor)(decay=optax.constant_schedule(0.5)),
        optax.masked(heavy_ball(0.1), {"w": True, "s": False}),
    ), 2)
    state = opt.init(params)
    update = jax.jit(opt.update)
    kinds = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype, x.weak_type))
    for step in range(4):
        gradient = jax.tree.map(lambda p: p * (-1.0) ** (step // 2), params)
        updates, new = update(gradient, state, params)
        assert kinds(new) == kinds(state)
        assert updates["w"].dtype == jnp.bfloat16
        state = new
    np.testing.assert_allclose(optax.tree.get(state, "oscillation_index"), 1.0, rtol=1e-2)


def test_monitor_takes_python_numbers():
    opt = oscillation_monitor()
    state = opt.init({"a": 1.0})
    for g in (1.0, -1.0):
        _, state = opt.update({"a": g}, state)
    np.testing.assert_allclose(state.oscillation_index, 1.0, rtol=1e-6)


def test_river_progress_projects_the_hill_directions_off():
    valley = river_valley_nd(jax.random.key(4), 3, (50.0, 500.0), (0.0, 1.0))
    x = valley.join(1.0, jnp.array([0.3, -0.1, 0.2]))
    y = valley.join(3.5, jnp.array([0.1, 0.4, 0.0]))

    @jax.jit
    def progress(x, y):
        return river_progress(y - x, top_hessian(valley.loss, x, jax.random.key(5), k=3).vectors)

    out = progress(x, y)
    np.testing.assert_allclose(out.distance, 2.5, rtol=1e-4)
    np.testing.assert_allclose(out.hill_distance, np.linalg.norm([0.2, 0.5, 0.2]), rtol=1e-3)
    # on a tree, against NumPy
    rng = np.random.default_rng(5)
    basis = np.linalg.qr(rng.normal(size=(9, 2)))[0].T
    delta = rng.normal(size=9)
    split = lambda z: {"a": jnp.float32(z[..., :6].reshape(*z.shape[:-1], 2, 3)),
                       "b": jnp.float32(z[..., 6:])}
    out = river_progress(split(delta), split(basis))
    expected = delta - basis.T @ (basis @ delta)
    np.testing.assert_allclose(out.movement["a"].ravel(), expected[:6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.distance**2 + out.hill_distance**2, delta @ delta, rtol=1e-5)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda loss, x, key: sharpness(loss, x, key, 0), ValueError, "iters.*0"),
    (lambda loss, x, key: sharpness(loss, {"n": jnp.arange(3)}, key), ValueError, r"\['n'\].*int"),
    (lambda loss, x, key: top_hessian(loss, x, key, k=4), ValueError, "k: must be <= 3.*4"),
    (lambda loss, x, key: top_hessian(loss, x, key, k=2, iters=1), ValueError, "iters.*>= 2"),
    (lambda loss, x, key: oscillation_monitor(1.0), ValueError, r"decay.*\[0, 1\)"),
    (lambda loss, x, key: river_progress(x, x[None, :2]), ValueError, r"\(k, 3\).*\(1, 2\)"),
])
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(lambda x: jnp.sum(x**2), jnp.ones(3), jax.random.key(0))
