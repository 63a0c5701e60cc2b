import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

from fadex.optim import (
    curvature_from_rows,
    gauss_newton_rows,
    gradient_rows,
    hessian_vector_product,
    hutchinson_trace,
    interpolation_momentum,
    lambda_max,
    row_norm_bound,
    sgd_interpolation,
)


def pencil(blocks, weights=None):
    """Largest eigenvalue of ``E[H_i^2] v = r E[H_i] v``, by scipy; ``blocks`` ``[m, K, d]``."""
    h_i = np.einsum("ika,ikb->iab", blocks, blocks)
    weights = np.full(len(h_i), 1 / len(h_i)) if weights is None else weights
    second = np.einsum("i,iab,ibc->ac", weights, h_i, h_i)
    return scipy.linalg.eigh(second, np.einsum("i,iab->ab", weights, h_i), eigvals_only=True)[-1]


def flat(rows):
    """Leaves ``[m, K, ...]`` side by side: ``[m, K, d]``."""
    leaves = jax.tree.leaves(rows)
    return np.concatenate([np.reshape(x, (*x.shape[:2], -1)) for x in leaves], -1)


@pytest.mark.smoke
def test_row_norm_bound_is_the_pencils_eigenvalue():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        bound = jax.jit(row_norm_bound, static_argnames="method")
        rows = rng.standard_normal((20, 4)) * np.geomspace(1, 0.05, 4) * rng.pareto(2, (20, 1))
        p = rng.dirichlet(np.ones(20))
        np.testing.assert_allclose(bound(rows, p), pencil(rows[:, None], p), rtol=1e-9)
        # Kaczmarz: normalised rows have R^2 = 1 = trace.
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(bound(unit, p), 1.0, rtol=1e-9)
        assert bound(rows, p) <= bound(rows, p, method="max") + 1e-9
        np.testing.assert_allclose(bound(rows, p, method="max"), (rows**2).sum(1).max())
        # Independent rows: the largest norm, also when the parameters are many.
        wide = rng.standard_normal((4, 20))
        np.testing.assert_allclose(bound(wide, p[:4] / p[:4].sum()), (wide**2).sum(1).max(),
                                   rtol=1e-9)
        # Columns that no row has, and rows of probability zero, do not count.
        padded = np.c_[np.r_[rows, 1e3 * rows[:1]], np.zeros(21)]
        np.testing.assert_allclose(bound(padded, np.r_[p, 0]), bound(rows, p), rtol=1e-9)


def test_gaussian_rows_have_trace_plus_twice_the_largest_eigenvalue():
    # 2e5 rows: E[|a|^2 (v.a)^2] varies by 15 / sqrt(2e5) relative at the most, 3 % in all.
    lam = np.array([1.0, 0.5, 0.1])
    rows = np.random.default_rng(1).standard_normal((200_000, 3)) * np.sqrt(lam)
    exact, gaussian = (float(row_norm_bound(rows, method=m)) for m in ("exact", "gaussian"))
    assert abs(exact / (lam.sum() + 2) - 1) < 0.03
    assert abs(gaussian / (lam.sum() + 2) - 1) < 0.02


@pytest.mark.parametrize("K", [1, 3])
def test_curvature_of_rows_in_a_tree_equals_dense_linear_algebra(K):
    rng = np.random.default_rng(2)
    m = 40
    rows = {"w": rng.standard_normal((m, K, 2, 2)) * rng.pareto(2, (m, 1, 1, 1)),
            "b": rng.standard_normal((m, K)) * 0.3}
    dense = flat(rows)
    h = np.einsum("ika,ikb->ab", dense, dense) / m
    curvature = jax.jit(curvature_from_rows, static_argnames="method")
    with jax.enable_x64(True):
        for method, bound in (
            ("max", max(np.linalg.norm(g, 2) ** 2 for g in dense)),
            ("exact", pencil(dense)),
            ("gaussian", np.trace(h) + 2 * np.linalg.norm(h, 2)),
        ):
            found = curvature(rows, method=method)
            np.testing.assert_allclose(
                found, (bound, np.linalg.norm(h, 2), np.trace(h)), rtol=1e-8)


@pytest.fixture(scope="module")
def network():
    """A small network with three outputs: ``apply(params, x)``, params, inputs ``[6, 4]``."""
    rng = np.random.default_rng(3)
    params = {"u": rng.standard_normal((3, 4)).astype(np.float32),
              "v": rng.standard_normal(3).astype(np.float32)}
    inputs = rng.standard_normal((6, 4)).astype(np.float32)
    return (lambda p, x: jnp.tanh(p["u"] @ x + p["v"]) * 2), params, inputs


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_gauss_newton_rows_give_the_gauss_newton_matrix(network, loss):
    apply, params, inputs = network
    count = 800

    @jax.jit
    def everything(params, keys):
        jacobian, logits = jax.vmap(
            lambda x: (jax.jacfwd(apply)(params, x), apply(params, x)))(inputs)
        rows = gauss_newton_rows(apply, params, inputs, loss=loss)
        sampled = jax.vmap(lambda key: gauss_newton_rows(
            apply, params, inputs, loss=loss, key=key, num_samples=2))(keys)
        return jacobian, logits, rows, sampled

    jacobian, logits, rows, sampled = everything(params, jax.random.split(jax.random.key(0), count))
    jacobian, logits = flat(jacobian), np.asarray(logits, np.float64)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if loss == "squared":
        weight = np.tile(np.eye(3), (6, 1, 1))
    else:
        weight = np.einsum("ik,kl->ikl", p, np.eye(3)) - np.einsum("ik,il->ikl", p, p)
    expected = np.einsum("ika,ikl,ilb->iab", jacobian, weight, jacobian)
    assert rows["u"].shape == (6, 3, 3, 4)
    dense = flat(rows)
    np.testing.assert_allclose(np.einsum("ika,ikb->iab", dense, dense), expected, atol=2e-5)

    # Random rows: right on average over keys, with E[H_i^2] not below the true one.
    dense = np.concatenate([np.reshape(x, (count, 6, 2, -1)) for x in jax.tree.leaves(sampled)], -1)
    h_i = np.einsum("sika,sikb->siab", dense, dense)
    scale = np.abs(expected).max()
    # Entries vary by less than twice the scale: 5 standard errors.
    assert np.abs(h_i.mean(0) - expected).max() < 5 * 2 * scale / np.sqrt(count)
    for i in range(6):
        gap = np.einsum("sab,sbc->ac", h_i[:, i], h_i[:, i]) / count - expected[i] @ expected[i]
        assert np.linalg.eigvalsh(gap)[0] > -0.02 * np.linalg.norm(expected[i], 2) ** 2


def test_rows_from_gradients_are_those_of_a_squared_residual():
    rng = np.random.default_rng(4)
    inputs, targets = rng.standard_normal((8, 3)), rng.standard_normal(8)
    inputs[0], targets[0] = 0, 0  # fits exactly: no gradient, no row
    params = rng.standard_normal(3)

    def loss(p, example):
        return 0.5 * (p @ example[0] - example[1]) ** 2

    with jax.enable_x64(True):
        rows = jax.jit(functools.partial(gradient_rows, loss))(params, (inputs, targets))
        sign = np.sign(inputs @ params - targets)
        np.testing.assert_allclose(rows[:, 0], inputs * sign[:, None], atol=1e-12)
        # With micro-batches the curvature comes out right on average over residuals: here 40000
        # micro-batches of 4 out of 2 rows with random signs; 0.03 is 6 standard errors.
        base = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]])
        pick = rng.integers(0, 2, (40000, 4))
        residual = np.sign(rng.standard_normal((40000, 4)))

        def mean_loss(p, example):
            a, b = example
            return jnp.mean(0.5 * (a @ p - b) ** 2)

        rows = jax.jit(functools.partial(gradient_rows, mean_loss, micro_batch=4))(
            np.zeros(3), (base[pick], residual))
        h = np.einsum("mka,mkb->ab", rows, rows) / 40000
        np.testing.assert_allclose(h, base.T @ base / 2, atol=0.03)


def test_power_iteration_and_traces_of_a_known_hessian():
    # f = |x|^4 / 4 has the Hessian |x|^2 I + 2 x x^T: largest eigenvalue 3 |x|^2.
    x = np.random.default_rng(5).standard_normal(12)
    like = {"a": x[:4].reshape(2, 2), "b": x[4:]}
    x = np.r_[like["a"].ravel(), like["b"]]
    hessian = x @ x * np.eye(12) + 2 * np.outer(x, x)
    v = np.linspace(-1, 1, 12)

    @jax.jit
    def everything(params, v, keys):
        product = hessian_vector_product(
            lambda p: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)) ** 2 / 4, params)
        return (
            ravel_pytree(product(ravel_pytree(params)[1](v)))[0],
            lambda_max(product, params, keys[0]),
            hutchinson_trace(product, params, keys[1], num_samples=512),
        )

    like = jax.tree.map(np.float32, like)
    times_v, largest, trace = everything(like, np.float32(v), jax.random.split(jax.random.key(0)))
    np.testing.assert_allclose(times_v, hessian @ v, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(largest, 3 * x @ x, rtol=1e-5)
    # Rademacher signs: variance 2 (|H|_F^2 - sum of squared diagonal entries), 512 samples.
    deviation = np.sqrt(2 * ((hessian**2).sum() - (np.diag(hessian) ** 2).sum()) / 512)
    assert 0 < abs(trace - np.trace(hessian)) < 5 * deviation
    diagonal = jnp.arange(4.0)
    np.testing.assert_allclose(
        hutchinson_trace(lambda v: diagonal * v, diagonal, jax.random.key(0)), 6.0)
    # A zero operator has no direction to follow.
    assert lambda_max(lambda v: 0 * v, diagonal, jax.random.key(0)) == 0


def test_largest_eigenvalue_at_any_scale_and_in_bfloat16():
    # Powers of two: scaling is exact, so the digits are those at scale 1.
    spectrum = jnp.array([3.0, -1.0, 0.5, 0.0])
    like = {"a": jnp.zeros(3), "b": jnp.zeros(1), "empty": jnp.zeros(0)}
    scales = jnp.array([2.0**-116, 2.0**-83, 1.0, 2.0**83, 2.0**116, jnp.nan])

    @jax.jit
    @jax.vmap
    def found(scale):
        product = lambda v: {"a": scale * spectrum[:3] * v["a"], "b": scale * spectrum[3:] * v["b"],
                             "empty": v["empty"]}
        return lambda_max(product, like, jax.random.key(0))

    out = np.asarray(found(scales))
    np.testing.assert_allclose(out[:5] / np.asarray(scales[:5]), 3.0, rtol=1e-5)
    assert np.isnan(out[5])
    # 4096 equal directions: a sum in bfloat16 would stop growing at 256.
    flat = lambda_max(lambda v: 2 * v, jnp.zeros(4096, jnp.bfloat16), jax.random.key(0))
    assert flat.dtype == jnp.float32
    np.testing.assert_allclose(flat, 2.0, rtol=0.01)


def test_rule_from_estimates_trains_a_network_at_every_batch_size():
    # A student of a teacher that it can express: interpolation.
    def apply(p, x):
        return jnp.dot(p["v"], jnp.tanh(p["u"] @ x)) / 4

    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((256, 4)).astype(np.float32)
    teacher, student = (
        {"u": rng.standard_normal((16, 4)).astype(np.float32),
         "v": rng.standard_normal(16).astype(np.float32)} for _ in range(2)
    )
    batches = {b: rng.integers(0, 256, (8000 // b, b)) for b in (4, 64)}

    @jax.jit
    def everything(teacher, student, inputs):
        targets = jax.vmap(functools.partial(apply, teacher))(inputs)

        def loss(p, index):
            out = jax.vmap(functools.partial(apply, p))(inputs[index])
            return 0.5 * jnp.mean((out - targets[index]) ** 2)

        found = curvature_from_rows(gauss_newton_rows(apply, student, inputs[:64]))

        def final(batch_size, tx):
            def step(carry, index):
                p, state = carry
                updates, state = tx.update(jax.grad(loss)(p, index), state)
                return (optax.apply_updates(p, updates), state), None

            (p, _), _ = jax.lax.scan(step, (student, tx.init(student)), batches[batch_size])
            return loss(p, jnp.arange(256))

        rules = [interpolation_momentum(b, *found[:2]) for b in batches]
        losses = [final(b, sgd_interpolation(b, *found[:2])) for b in batches]
        plain = final(64, optax.sgd(rules[1].learning_rate))
        return loss(student, jnp.arange(256)), losses, plain, [rule.decay for rule in rules]

    first, losses, plain, decays = everything(teacher, student, inputs)
    assert decays[0] < 0.5 < decays[1], decays
    assert max(losses) < 0.05 * first, (losses, first)
    assert losses[1] < 0.7 * plain, (losses, plain)  # measured .56


def test_errors_name_the_argument():
    rows = np.ones((4, 2))
    key = jax.random.key(0)
    for call, message in (
        (lambda: row_norm_bound(rows, method="trace"), "method: expected one of"),
        (lambda: row_norm_bound(rows[0]), "rows: expected shape"),
        (lambda: row_norm_bound(rows[:0]), r"rows: expected at least one row.*\(0, 2\)"),
        (lambda: row_norm_bound(rows[:0], method="max"), r"rows: expected at least one row"),
        (lambda: curvature_from_rows(rows[:0]), r"rows: expected at least one row.*\[0, 2"),
        (lambda: gauss_newton_rows(jnp.dot, rows[0], {}), r"inputs: expected leaves of shape \[m"),
        (lambda: gauss_newton_rows(jnp.dot, rows[0], 1.0), "inputs: expected leaves of shape"),
        (lambda: gradient_rows(jnp.dot, rows[0], rows[:0]), "batch: expected leaves of shape"),
        (lambda: row_norm_bound(rows, np.ones(3)), "probabilities: expected shape"),
        (lambda: curvature_from_rows({}), "rows: expected a tree"),
        (lambda: curvature_from_rows(rows[0]), "rows: expected a tree"),
        (lambda: curvature_from_rows([rows, rows[:2]]), r"rows: expected leaves of shape \[4, 2"),
        (lambda: gauss_newton_rows(jnp.dot, rows[0], rows, loss="l1"), "loss: expected one of"),
        (lambda: gauss_newton_rows(jnp.dot, rows[0], rows, num_samples=2), "key: required"),
        (lambda: gradient_rows(jnp.dot, rows[0], (rows, rows[:2])), "expected a leading axis"),
        (lambda: gradient_rows(jnp.dot, rows[0], rows, micro_batch=0), "micro_batch: must be >= 1"),
        (lambda: lambda_max(lambda v: v, rows, key, num_steps=0), "num_steps: must be >= 1"),
        (lambda: hutchinson_trace(lambda v: v, rows, key, num_samples=0), "num_samples: must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
