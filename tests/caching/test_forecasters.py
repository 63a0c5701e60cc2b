"""Weight rules against recursions written the way their papers state them."""

import math

import numpy as np
import pytest

from fadex.caching import foca, hicache, make_plan, newton, reuse, taylorseer, uniform_schedule
from fadex.caching.newton import lagrange_weights

RNG = np.random.default_rng(0)
SCHEDULE = uniform_schedule(30, 5)
FEATURES = RNG.normal(size=(30, 7)).cumsum(axis=0)


def ladder_forecast(order, basis):
    """TaylorSeer's state machine on features: the ladder renewed at every anchor."""
    ladder, last, out = [], None, {}
    for s in range(SCHEDULE.num_steps):
        if SCHEDULE.is_anchor(s):
            renewed = [FEATURES[s]]
            for i in range(min(order, len(ladder))):
                renewed.append((renewed[i] - ladder[i]) / (s - last))
            ladder, last = renewed, s
        else:
            out[s] = sum(d * basis(i, s - last) / math.factorial(i) for i, d in enumerate(ladder))
    return out


def from_plan(rule, history=None):
    plan = make_plan(SCHEDULE, rule, history=history)
    out = {}
    for s in SCHEDULE.skipped:
        pos = SCHEDULE.history(s, plan.history)
        out[s] = plan.weights[s, : len(pos)] @ FEATURES[list(pos)]
    return out


def assert_same(ours, theirs, steps=None):
    for s in SCHEDULE.skipped if steps is None else steps:
        np.testing.assert_allclose(ours[s], theirs[s], rtol=1e-10, atol=1e-10)


@pytest.mark.smoke
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_taylorseer_equals_its_ladder_through_the_uneven_warmup(order):
    assert_same(from_plan(taylorseer(order)), ladder_forecast(order, lambda i, x: float(x) ** i))


@pytest.mark.smoke
@pytest.mark.parametrize("order", [1, 2, 3])
def test_hicache_equals_its_ladder_on_hermite_polynomials(order):
    sigma = 0.4
    hermite = [lambda x: 1.0, lambda x: 2 * x, lambda x: 4 * x * x - 2,
               lambda x: 8 * x**3 - 12 * x]
    basis = lambda i, x: 1.0 if i == 0 else sigma**i * hermite[i](sigma * x)
    assert_same(from_plan(hicache(order, sigma)), ladder_forecast(order, basis))


def test_hicache_at_one_over_root_two_is_taylor_of_order_one():
    assert_same(from_plan(hicache(1, 1 / math.sqrt(2))), from_plan(taylorseer(1)))


@pytest.mark.smoke
def test_newton_is_exact_on_polynomials_and_taylor_is_its_first_order():
    pos, s = (12, 7, 3, 1), 15
    for degree in range(4):
        values = np.array(pos, float) ** degree
        assert lagrange_weights(pos, s) @ values == pytest.approx(15.0**degree, rel=1e-12)
    assert_same(from_plan(newton(1)), from_plan(taylorseer(1)))
    assert np.abs(newton(2)((9, 6, 3), 11) - taylorseer(2)((9, 6, 3), 11)).max() > 0.1


@pytest.mark.smoke
def test_reuse_repeats_the_newest_anchor():
    ours = from_plan(reuse())
    for s in SCHEDULE.skipped:
        np.testing.assert_array_equal(ours[s], FEATURES[SCHEDULE.history(s)[0]])


@pytest.mark.smoke
def test_foca_started_from_two_anchors_is_taylor_of_order_one():
    assert_same(from_plan(foca()), from_plan(taylorseer(1)))


@pytest.mark.parametrize("variant", ["rolling", "cache_dit"])
def test_foca_recursions_match_a_state_machine(variant):
    divide = variant == "rolling"
    window, anchors, out = [], [], {}
    for s in range(SCHEDULE.num_steps):
        if SCHEDULE.is_anchor(s):
            anchors = [*anchors, (s, FEATURES[s])][-2:]
            window = [*window, (s, FEATURES[s])][-2:]
            continue
        (a1, f1), (a0, f0) = anchors
        (q1, g1), (q0, g0) = window
        slope = (f0 - f1) / (a0 - a1 if divide else 1) + (g0 - g1) / (q0 - q1 if divide else 1)
        elapsed = s - a0
        value = f0 + elapsed / 2 * slope
        if not divide and elapsed > 3:
            share = 3 / elapsed
            value = share * (f0 + 1.5 * slope) + (1 - share) * f0
        out[s] = value
        window = [*window, (s, value)][-2:]
    # While all anchors still fit into the history the recursion is exact.
    steps = [s for s in SCHEDULE.skipped if len(SCHEDULE.history(s)) <= 6]
    assert len(steps) > 10
    assert_same(from_plan(foca(variant)), out, steps)


@pytest.mark.parametrize("rule", [taylorseer(2), newton(2), hicache(2), foca("rolling")])
def test_weights_of_constants_sum_to_one(rule):
    plan = make_plan(SCHEDULE, rule)
    np.testing.assert_allclose(plan.weights[list(SCHEDULE.skipped)].sum(1), 1.0, atol=1e-12)


def test_orders_drop_where_fewer_anchors_are_known():
    schedule = uniform_schedule(12, 4, warmup=1)
    plan = make_plan(schedule, taylorseer(3))
    np.testing.assert_array_equal(plan.weights[2], [1, 0, 0, 0])  # one anchor: reuse
    np.testing.assert_array_equal(plan.weights[6], [1.5, -0.5, 0, 0])  # two: a line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: taylorseer(-1), "order: must be >= 0, got -1"),
        (lambda: hicache(2, 0.0), "sigma: must be > 0"),
        (lambda: hicache(2, 1.5), "sigma: must lie in"),
        (lambda: foca("bdf2"), "variant: expected one of"),
        (lambda: make_plan(SCHEDULE, taylorseer(1), history=0), "history: must be >= 1, got 0"),
        (lambda: make_plan(SCHEDULE, taylorseer(3), history=2), "history: taylor3 needs 4"),
        (lambda: make_plan(SCHEDULE, lambda pos, s: np.full(len(pos), np.nan)), "plan.weights"),
        (lambda: make_plan(SCHEDULE, lambda pos, s: np.ones(9)), "forecaster: expected 3 weights"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
