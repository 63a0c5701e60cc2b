"""BeziCast: identities of the fit, brute force for the projection, what the guard may do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    GuardConfig,
    bezicast,
    bezicast_plan,
    bezier_weights,
    cached_sample,
    make_plan,
    reuse,
    simplex_projection,
    state_guarded,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.newton import lagrange_weights
from fadex.core import Denoiser
from fadex.sampling import uniform_times

RNG = np.random.default_rng(3)
POSITIONS = [((10, 6, 2), 12), ((5, 4, 3), 8), ((20, 13, 12, 11), 26)]


@pytest.mark.smoke
@pytest.mark.parametrize("pos, s", POSITIONS)
def test_without_ridge_and_at_full_degree_the_curve_is_lagrange_extrapolation(pos, s):
    ours = bezier_weights(pos, s, degree=len(pos) - 1, window=len(pos), ridge=0.0, guard=None)
    np.testing.assert_allclose(ours, lagrange_weights(pos, s), atol=1e-10)


@pytest.mark.parametrize("pos, s", POSITIONS)
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1e-2, 1.0, 1e6])
def test_weights_sum_to_one_and_straight_lines_are_exact_for_every_ridge(pos, s, ridge):
    w = bezier_weights(pos, s, window=len(pos), ridge=ridge, guard=None)
    assert w.sum() == pytest.approx(1.0, abs=1e-10)
    line = 3.0 - 0.7 * np.asarray(pos)
    assert w @ line == pytest.approx(3.0 - 0.7 * s, abs=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_fit_equals_a_dense_solution_of_its_normal_equations(degree):
    from scipy.special import comb

    pos, s, ridge = (20, 16, 12, 8, 4), 23, 0.02
    u = (np.asarray(pos) - 4.0) / (s - 4.0)
    basis = np.array([[comb(degree, i) * v**i * (1 - v) ** (degree - i)
                       for i in range(degree + 1)] for v in u])
    penalty = np.array({1: [[-1, 1]], 2: [[1, -2, 1]],
                        3: [[1, -2, 1, 0], [0, 1, -2, 1]]}[degree], float)
    expected = np.linalg.inv(basis.T @ basis + ridge * penalty.T @ penalty)[-1] @ basis.T
    ours = bezier_weights(pos, s, degree=degree, window=5, ridge=ridge, guard=None)
    np.testing.assert_allclose(ours, expected, atol=1e-10)


def test_a_huge_ridge_leaves_the_least_squares_line_or_the_newest_feature():
    pos, s = (14, 9, 7, 2), 17
    design = np.stack([np.ones(4), pos], axis=1)
    line = np.array([1.0, s]) @ np.linalg.pinv(design)
    ours = bezier_weights(pos, s, window=4, ridge=1e9, guard=None)
    np.testing.assert_allclose(ours, line, atol=1e-7)
    newest = bezier_weights(pos, s, window=4, ridge=1e9, guard=None, toward="newest")
    np.testing.assert_allclose(newest, [1, 0, 0, 0], atol=1e-7)


def test_capacity_is_set_by_the_degree_and_not_by_the_window():
    quadratic = lambda a: 1.0 + 0.3 * a - 0.02 * a**2
    for window in (3, 4, 6):
        pos = tuple(30 - 4 * j for j in range(window))
        w = bezier_weights(pos, 33, degree=2, window=window, ridge=0.0, guard=None)
        assert w @ quadratic(np.asarray(pos, float)) == pytest.approx(quadratic(33.0), abs=1e-9)


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_projection_is_the_nearest_point_of_the_simplex(size):
    w = RNG.normal(size=(20, size)) * 3
    p = simplex_projection(w)
    assert (p >= 0).all()
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(simplex_projection(p), p, atol=1e-12)
    # Brute force: on every face, the projection on its affine hull, where that is feasible.
    for row, ours in zip(w, p):
        best = np.inf
        for count in range(1, size + 1):
            for face in itertools.combinations(range(size), count):
                q = np.zeros(size)
                q[list(face)] = row[list(face)] + (1 - row[list(face)].sum()) / count
                if (q >= 0).all():
                    best = min(best, np.linalg.norm(q - row))
        assert np.linalg.norm(ours - row) == pytest.approx(best, abs=1e-12)
    traced = jax.jit(simplex_projection)(jnp.asarray(w, jnp.float32))
    np.testing.assert_allclose(traced, p, atol=1e-5)


def test_the_guard_only_lowers_the_risk_and_ends_in_the_hull():
    features = RNG.normal(size=(3, 50))
    for pos, s in [((10, 6, 2), 13), ((40, 32, 24), 47)]:
        bare = bezier_weights(pos, s, ridge=0.0, guard=None)
        last = np.abs(bare).sum()
        for scale in (100.0, 4.0, 0.5, 1e-6):
            w = bezier_weights(pos, s, ridge=0.0, guard=GuardConfig(1.0, scale))
            assert w.sum() == pytest.approx(1.0, abs=1e-12)
            assert np.abs(w).sum() <= last + 1e-12
            last = np.abs(w).sum()
        forecast = w @ features
        assert (forecast <= features.max(0) + 1e-9).all()
        assert (forecast >= features.min(0) - 1e-9).all()
    # Below the threshold nothing happens.
    np.testing.assert_array_equal(
        bezier_weights((10, 6, 2), 11, guard=GuardConfig(50.0, 4.0)),
        bezier_weights((10, 6, 2), 11, guard=None),
    )


def test_fewer_anchors_lower_the_degree_and_one_is_reuse():
    schedule = uniform_schedule(12, 4, warmup=1)
    plan = make_plan(schedule, bezicast(ridge=0.0, guard=None))
    np.testing.assert_array_equal(plan.weights[1:4], make_plan(schedule, reuse(), history=3)
                                  .weights[1:4])
    np.testing.assert_allclose(plan.weights[5, :2], taylorseer(1)((4, 0), 5), atol=1e-12)


@pytest.mark.parametrize("options, message", [
    (dict(degree=0), "degree: must be >= 1, got 0"),
    (dict(window=1), "window: must be >= 2, got 1"),
    (dict(ridge=-1.0), "ridge: must lie in"),
    (dict(ridge=float("nan")), "ridge: must be finite"),
    (dict(toward="sky"), "toward: expected one of 'line', 'newest'"),
    (dict(guard=GuardConfig(-1.0, 4.0)), "guard.r0: must lie in"),
    (dict(guard=GuardConfig(2.0, 0.0)), "guard.scale: must lie in"),
    (dict(guard="soft"), "guard: expected one of 'state'"),
    (dict(guard="state", site="head"), "site: expected one of"),
    (dict(site="head"), "site: expected one of"),
    (dict(cache_dtype=jnp.bfloat16), "cache_dtype, state_guard: belong to guard='state'"),
    (dict(guard=None, state_guard=GuardConfig(1.0, 1.0)), "belong to guard='state'"),
    (dict(guard="state", state_guard=GuardConfig(-1.0, 1.0)), "guard.r0: must lie in"),
])
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        bezicast_plan(uniform_schedule(12, 4), **options)


def test_repeated_anchors_and_empty_weights_are_refused():
    with pytest.raises(ValueError, match="schedule: anchors must be distinct"):
        bezier_weights((4, 4, 2), 6)
    with pytest.raises(ValueError, match="s: must differ from the oldest anchor"):
        bezier_weights((10, 6, 2), 2)
    with pytest.raises(ValueError, match="w: expected at least one weight"):
        simplex_projection(np.zeros((3, 0)))
    with pytest.raises(TypeError, match="guard: expected a GuardConfig"):
        bezier_weights((4, 2), 6, guard=3.0)


# -- the guard on each sample's features ---------------------------------------------------

STEPS = 16
SCHEDULE = uniform_schedule(STEPS, 5)
TIMES = uniform_times(STEPS)
CURVED = Denoiser(
    lambda p, x, t, c: p * (jnp.tanh(x) * (1 + t**2)[:, None] + jnp.cos(9 * t * c)[:, None])
)


def run(plan, x, c):
    return cached_sample(CURVED, jnp.float32(1), x, c, timesteps=TIMES, plan=plan)


def reference_run(x, c, guard, window=3, ridge=5e-3):
    """The cached run written out in NumPy float64, the risk taken from the features themselves."""
    x, ring, times = np.asarray(x, np.float64), {}, np.asarray(TIMES, np.float64)
    c = np.asarray(c, np.float64)
    for s in range(STEPS):
        t, dt = times[s], times[s + 1] - times[s]
        if SCHEDULE.is_anchor(s):
            v = np.tanh(x) * (1 + t**2) + np.cos(9 * t * c)[:, None]
            ring[s] = v
        else:
            pos = SCHEDULE.history(s, window)
            w = bezier_weights(pos, s, window=window, ridge=ridge, guard=None)
            features = np.stack([ring[a] for a in pos])
            forecast = np.tensordot(w, features, 1)
            safe = np.tensordot(simplex_projection(w), features, 1)
            change = np.linalg.norm(features[0] - features[1], axis=-1)
            risk = np.linalg.norm(forecast - safe, axis=-1) / change
            pull = 1 - np.exp(-np.maximum(risk - guard.r0, 0) / guard.scale)
            v = forecast + pull[:, None] * (safe - forecast)
        x = x + dt * v
    return x


@pytest.mark.smoke
@pytest.mark.parametrize("guard", [GuardConfig(0.5, 1.0), GuardConfig(1.5, 2.0)])
def test_the_state_guard_equals_its_definition_on_the_features(guard):
    x = jax.random.normal(jax.random.key(0), (5, 12))
    c = jnp.linspace(0.2, 1.0, 5)
    plan = bezicast_plan(SCHEDULE, guard="state", state_guard=guard)
    expected = reference_run(x, c, guard)
    np.testing.assert_allclose(run(plan, x, c), expected, rtol=2e-5, atol=2e-5)
    bare = run(bezicast_plan(SCHEDULE, guard=None), x, c)
    assert np.abs(np.asarray(bare) - expected).max() > 1e-3  # it did bite


def test_the_state_guard_judges_each_sample_alone():
    """A NaN in one sample stays there, and the batch size changes nothing."""
    plan = bezicast_plan(SCHEDULE, guard="state", state_guard=GuardConfig(0.5, 1.0))
    x = jax.random.normal(jax.random.key(1), (4, 12))
    c = jnp.linspace(0.2, 1.0, 4)
    whole = run(plan, x, c)
    np.testing.assert_allclose(run(plan, x[1:2], c[1:2]), whole[1:2], rtol=1e-5, atol=1e-6)
    spoiled = run(plan, x.at[2, 3].set(jnp.nan), c)
    assert np.isnan(spoiled[2]).any()
    keep = np.array([0, 1, 3])
    np.testing.assert_allclose(spoiled[keep], whole[keep], rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(lambda x, c: run(plan, x[None], c[None])[0])(x, c)
    np.testing.assert_allclose(mapped, whole, rtol=1e-5, atol=1e-6)


def test_gradients_pass_the_state_guard():
    """Its square roots meet zero at unfilled windows; that derivative must not be infinite."""
    plan = bezicast_plan(SCHEDULE, guard="state", state_guard=GuardConfig(0.0, 1.0))
    x = jax.random.normal(jax.random.key(2), (3, 5))
    loss = lambda c: (run(plan, x, c) ** 2).sum()
    c, direction, eps = jnp.array([0.3, 0.6, 0.9]), jnp.array([1.0, -1.0, 0.5]), 1e-2
    slope = (loss(c + eps * direction) - loss(c - eps * direction)) / (2 * eps)
    assert float(jax.grad(loss)(c) @ direction) == pytest.approx(float(slope), rel=2e-2)


def test_a_guard_on_huge_features_stays_finite():
    huge = Denoiser(lambda p, x, t, c: p * 1e22 * (1 + jnp.sin(7 * t))[:, None] * jnp.ones_like(x))
    plan = bezicast_plan(SCHEDULE, guard="state")
    out = cached_sample(huge, jnp.float32(1), jnp.zeros((2, 3)), None, timesteps=TIMES, plan=plan)
    assert np.isfinite(out).all()


def test_the_state_guard_serves_any_plan_and_a_constant_feature_is_no_risk():
    still = Denoiser(lambda p, x, t, c: p * jnp.ones_like(x))
    plan = state_guarded(make_plan(SCHEDULE, taylorseer(2)))
    x = jnp.zeros((2, 3))
    out = cached_sample(still, jnp.float32(2), x, None, timesteps=TIMES, plan=plan)
    np.testing.assert_allclose(out, -2.0 * jnp.ones((2, 3)), rtol=1e-5)
    with pytest.raises(ValueError, match=r"plan.weights: expected \[S, K\]"):
        state_guarded(make_plan(SCHEDULE, taylorseer(1)).replace(weights=np.zeros((16, 2, 2))))
