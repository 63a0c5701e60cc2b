import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.optim import (
    Momentum,
    coordinate_descent,
    interpolation_momentum,
    kaczmarz,
    minibatch_least_squares,
)

STYLES = ("heavy_ball", "nesterov")
STATIC = ("batch_size", "style", "num_steps", "record", "every")
jitted = jax.jit(kaczmarz, static_argnames=STATIC)
jitted_descent = jax.jit(coordinate_descent, static_argnames=STATIC)


def itself(x):
    return x


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "kaczmarz.npz") as data:
        return dict(data)


@pytest.mark.smoke
@pytest.mark.parametrize("style", STYLES)
def test_one_row_a_step_is_the_peers_randomized_kaczmarz(golden, style):
    with jax.enable_x64(True):
        out = jitted(golden["A"], golden["b"], indices=golden["order"][:, None], style=style,
                     num_steps=300, record=itself)
        np.testing.assert_allclose(out.history, golden["x"][1:], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(out.x, out.history[-1])
        np.testing.assert_allclose(out.velocity, golden["x"][-1] - golden["x"][-2], atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_batches_follow_the_recursion_written_in_numpy(golden, style):
    A, b = golden["A"], golden["b"]
    batches, eta, beta = golden["order"].reshape(60, 5), 0.8, 0.6
    x = before = np.zeros(12)
    for batch in batches:
        y = x + beta * (x - before) if style == "nesterov" else x
        step = sum((b[i] - A[i] @ y) * A[i] / (A[i] @ A[i]) for i in batch) / 5
        x, before = (y if style == "nesterov" else x + beta * (x - before)) + eta * step, x
    with jax.enable_x64(True):
        momentum = Momentum(eta, beta, np.inf)
        out = jitted(A, b, indices=batches, batch_size=5, momentum=momentum, style=style,
                     num_steps=60)
        np.testing.assert_allclose(out.x, x, rtol=1e-10, atol=1e-12)
        assert out.history is None


@pytest.mark.parametrize("style", STYLES)
def test_coordinate_descent_is_kaczmarz_on_the_rows_of_the_square_root(style):
    rng = np.random.default_rng(0)
    root = rng.standard_normal((9, 6)) * np.geomspace(1, 0.2, 6)
    values, vectors = np.linalg.eigh(root.T @ root)
    M, root = root.T @ root, (vectors * np.sqrt(values)) @ vectors.T
    c = M @ rng.standard_normal(6)
    indices = rng.integers(0, 6, (50, 4))
    shared = dict(indices=indices, batch_size=4, style=style, num_steps=50, record=itself)
    with jax.enable_x64(True):
        ours = jitted_descent(M, c, **shared)
        rows = jitted(root, c, **shared)  # z = M^{1/2} x, and a_i . z = (M x)_i
        np.testing.assert_allclose(ours.history @ root, rows.history, rtol=1e-9, atol=1e-10)
        if style == "nesterov":
            return  # one coordinate a step takes no momentum
        one = jitted_descent(M, c, indices=indices[:, :1], num_steps=50, record=itself)
        x = np.zeros(6)
        for i, found in zip(indices[:, 0], one.history):  # exact minimisation along e_i
            x[i] -= (M[i] @ x - c[i]) / M[i, i]
            np.testing.assert_allclose(found, x, atol=1e-12)


def test_rows_are_drawn_with_the_kaczmarz_probabilities():
    # x += eta (b_i - a_i . x) a_i / |a_i|^2 with orthogonal rows and eta = 1: what row 0 has not
    # met after one step tells how often it is drawn. 20000 draws, 5 standard deviations.
    A = jnp.diag(jnp.array([2.0, 1.0, 0.0, 1.0]))
    run = jax.jit(jax.vmap(lambda k: kaczmarz(
        A, jnp.array([2.0, 1.0, 0.0, 1.0]), k, momentum=Momentum(1.0, 0.0, 1.0), num_steps=1).x))
    count = np.asarray(run(jax.random.split(jax.random.key(0), 20000))).sum(0)
    p = np.array([4, 1, 0, 1]) / 6
    assert (np.abs(count - 20000 * p) <= 5 * np.sqrt(20000 * p * (1 - p))).all(), count
    assert count.sum() == 20000  # never the row of zeros


def test_recording_changes_nothing_and_the_rest_of_the_steps_is_taken(golden):
    A, b = (jnp.asarray(golden[k], jnp.float32) for k in "Ab")
    run = functools.partial(jitted, A, b, batch_size=4, momentum=Momentum(0.8, 0.6, np.inf))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    # The rows that a key draws do not depend on where the run is cut for its records.
    key = jax.random.key(3)
    close(run(key=key, num_steps=20).x, run(key=key, num_steps=20, record=itself, every=5).x)
    indices = golden["order"][:92].reshape(23, 4)
    rare, often = (run(indices=indices, num_steps=23, record=itself, every=k) for k in (5, 1))
    assert rare.history.shape == (4, 12) and often.history.shape == (23, 12)
    close(rare.history, often.history[4::5])
    close(rare.x, often.history[-1])


def test_fewer_equations_than_unknowns_give_the_solution_of_least_norm():
    rng = np.random.default_rng(1)
    A = rng.standard_normal((5, 12)).astype(np.float32)
    A[3] = A[0] + A[1]  # dependent, consistent
    b = A @ rng.standard_normal(12).astype(np.float32)
    p = (A**2).sum(1) / (A**2).sum()
    out = jitted(A, b, indices=rng.choice(5, (600, 4), p=p), batch_size=4, num_steps=600)
    np.testing.assert_allclose(out.x, np.linalg.pinv(A, rcond=1e-5) @ b, atol=2e-5)


def test_scale_zero_and_nan_of_the_matrix():
    rng = np.random.default_rng(2)
    A, x = rng.standard_normal((8, 3)), rng.standard_normal(3)
    scales = np.array([1e-34, 1e-20, 1, 1e20, 1e37])[:, None, None]
    # Rows of very different sizes (the last is never drawn), zero, and one bad entry.
    uneven = A * np.r_[np.ones(7), 1e-25][:, None]
    bad = np.stack([A] * 2)
    bad[:, 0, 1] = np.nan, np.inf
    matrices = np.concatenate([A * scales, uneven[None], 0 * A[None], bad]).astype(np.float32)
    targets = np.concatenate([A * scales, uneven[None], 0 * A[None], A[None], A[None]]) @ x
    x0 = jnp.array([1.0, 2.0, 3.0])
    for batch_size, momentum in ((1, "auto"), (2, "auto"), (2, None)):
        f = jax.jit(jax.vmap(lambda A, b: kaczmarz(
            A, b, jax.random.key(0), batch_size=batch_size, momentum=momentum, num_steps=600,
            x0=x0).x))
        out = np.asarray(f(matrices, np.float32(targets)))
        np.testing.assert_allclose(out[:6], np.tile(x, (6, 1)), rtol=1e-4)
        np.testing.assert_array_equal(out[6], x0)
        assert np.isnan(out[7:]).all()


@pytest.fixture(scope="module")
def steps_to_tolerance():
    """``f(batch_size, momentum, style, limit)``: median steps of 6 runs to an error of 1e-3."""
    rng = np.random.default_rng(0)
    A = rng.standard_normal((2000, 30)) * np.geomspace(1, 1 / 20.5, 30)
    A /= np.linalg.norm(A, axis=1, keepdims=True)
    values = np.linalg.eigvalsh(A.T @ A / 2000)
    assert 280 < values[-1] / values[0] < 330
    saturation = 1 / values[-1] * np.sqrt(values[-1] / values[0])
    assert 100 < saturation < 110
    A, x = jnp.asarray(A, jnp.float32), jnp.asarray(rng.standard_normal(30), jnp.float32)
    # The rule's constants once, not an eigenproblem a call.
    constants = jnp.asarray(values[-1], jnp.float32), jnp.asarray(values[0], jnp.float32)

    @functools.lru_cache
    def count(batch_size, momentum, style, limit):
        chosen = momentum
        if momentum == "auto":
            chosen = interpolation_momentum(batch_size, 1.0, *constants, style=style, c=1.0)

        # Rows of equal norm: uniform, drawn here, which saves compiling the generator.
        drawn = np.random.default_rng(1).integers(0, 2000, (6, limit, batch_size))

        def one(indices):
            return kaczmarz(
                A, A @ x, indices=indices, batch_size=batch_size, momentum=chosen, style=style,
                num_steps=limit, record=lambda z: jnp.linalg.norm(z - x) / jnp.linalg.norm(x),
            ).history

        below = np.asarray(jax.jit(jax.vmap(one))(drawn)) < 1e-3
        assert below.any(1).all()
        return np.median(below.argmax(1) + 1)

    return count


def test_rows_touched_stay_constant_as_batches_grow_and_steps_fall(steps_to_tolerance):
    limits = {1: 11000, 4: 3000, 16: 900, 26: 500, 32: 500}
    steps = {b: steps_to_tolerance(b, "auto", "heavy_ball", n) for b, n in limits.items()}
    rows = [b * steps[b] for b in (1, 4, 16, 26)]  # up to a quarter of saturation
    assert max(rows) / min(rows) <= 1.3, rows
    assert steps[1] / steps[32] >= 25, steps


def test_momentum_beats_plain_averaging_of_rows(steps_to_tolerance):
    plain = steps_to_tolerance(32, None, "heavy_ball", 2500)
    assert plain / steps_to_tolerance(32, "auto", "heavy_ball", 500) >= 5
    assert plain / steps_to_tolerance(32, "auto", "nesterov", 500) >= 5


def test_automatic_momentum_is_the_rule_on_the_normalised_rows(golden):
    A, b = golden["A"], golden["b"]
    values = np.linalg.eigvalsh(A.T @ A / (A**2).sum())
    with jax.enable_x64(True):
        chosen = interpolation_momentum(16, 1.0, values[-1], values[0], c=1.0)
        assert 0 < chosen.decay < 1
        indices = golden["order"][:288].reshape(18, 16)
        shared = dict(indices=indices, batch_size=16, num_steps=18)
        auto = jax.jit(kaczmarz, static_argnames=(*STATIC, "momentum"))(
            A, b, momentum="auto", **shared).x
        # The same through the runner that knows nothing of Kaczmarz.
        norms = np.linalg.norm(A, axis=1)
        out = jax.jit(minibatch_least_squares, static_argnames=STATIC)(
            A / norms[:, None], b / norms, momentum=chosen, **shared)
        np.testing.assert_allclose(auto, out.x, rtol=1e-8)


def test_errors_name_the_argument():
    A, b, key = np.eye(3), np.ones(3), jax.random.key(0)
    mean = Momentum(0.5, 0.0, 1.0)
    for call, message in (
        (lambda: kaczmarz(A, b, num_steps=3), "key: expected a key or else indices, got neither"),
        (lambda: kaczmarz(A, b, key, num_steps=3, indices=np.zeros((3, 1), int)), "got both"),
        (lambda: kaczmarz(A, b[:2], key, num_steps=3), r"b: expected shape \(3\)"),
        (lambda: kaczmarz(b, b, key, num_steps=3), "A: expected shape"),
        (lambda: kaczmarz(A, b, key, num_steps=0), "num_steps: must be >= 1"),
        (lambda: kaczmarz(A, b, key, num_steps=3, batch_size=0), "batch_size: must be >= 1"),
        (lambda: kaczmarz(A, b, key, num_steps=3, momentum="polyak"), "momentum: expected one of"),
        (lambda: kaczmarz(A, b, key, num_steps=3, style="adam"), "style: expected one of"),
        (lambda: kaczmarz(A, b, key, num_steps=3, x0=np.ones(2)), "x0: expected shape"),
        (lambda: kaczmarz(A, b, key, num_steps=3, record=itself, every=4), "every: must be <="),
        (lambda: kaczmarz(A, b, num_steps=3, indices=np.zeros((2, 1), int)), "indices: expected"),
        (lambda: kaczmarz(A[:0], b[:0], key, num_steps=3), r"A: expected at least one.*\(0, 3\)"),
        (lambda: kaczmarz(A[:, :0], b, key, num_steps=3), r"A: expected at least one.*\(3, 0\)"),
        (lambda: kaczmarz(A * 1j, b, key, num_steps=3), "A: expected real numbers"),
        (lambda: coordinate_descent(-A, b, key, num_steps=3), "M: expected a positive diagonal"),
        (lambda: coordinate_descent(A + np.eye(3, k=1), b, key, num_steps=3),
         "M: expected a symmetric matrix"),
        (lambda: coordinate_descent(A[:0, :0], b[:0], key, num_steps=3), "M: expected at least"),
        (lambda: coordinate_descent(A[:2], b, key, num_steps=3), "M: expected shape"),
        (lambda: minibatch_least_squares(A, b, key, batch_size=1, momentum=0.9, num_steps=3),
         "momentum: expected a Momentum"),
        (lambda: minibatch_least_squares(A, b, key, batch_size=1, momentum=mean, num_steps=3,
                                         probabilities=np.ones(2)), "probabilities: expected sh"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
