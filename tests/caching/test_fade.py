import numpy as np
import pytest

from fadex.caching import (
    FadeGrid,
    FadeParams,
    fade,
    fade_weights,
    make_plan,
    newton,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.fade import candidate_weights, candidates, psi
from fadex.core.special import mittag_leffler

EVEN, UNEVEN, TARGET = (15, 10, 5, 0), (15, 10, 4, 1), 18


@pytest.mark.smoke
@pytest.mark.parametrize("order", [1, 2, 3])
def test_integer_parameters_reduce_to_taylorseer_and_newton(order):
    memory = fade_weights(EVEN, TARGET, FadeParams("memory", 1.0, 0.0, order, 4))
    taylor = taylorseer(order)(EVEN, TARGET)
    np.testing.assert_allclose(memory, taylor, atol=1e-12)
    for pos in (EVEN, UNEVEN):
        base = fade_weights(pos, TARGET, FadeParams("base", 1.0, 0.0, order))
        np.testing.assert_allclose(base, newton(order)(pos, TARGET), atol=1e-12)


@pytest.mark.smoke
@pytest.mark.parametrize(("alpha", "lam"), [(0.6, 0.8), (0.4, 2.0), (1.3, 0.5), (0.7, 0.0)])
def test_base_form_is_exact_on_fractional_relaxations(alpha, lam):
    # F(s) = C + B E_alpha(-lam ((s - a) / h)^alpha), and at lam = 0 a power of s - a.
    def value(s):
        u = (s - 0) / 5.0
        if lam == 0.0:
            return 3.0 - 2.0 * u**alpha
        return float(3.0 - 2.0 * mittag_leffler(alpha, 1.0, -lam * u**alpha))

    weights = fade_weights((5, 0), 8, FadeParams("base", alpha, lam, 1))
    assert weights @ [value(5), value(0)] == pytest.approx(value(8), abs=1e-12)


def test_base_form_of_order_two_spans_the_forced_relaxation():
    alpha, lam = 0.8, 0.6

    def value(s):
        u = np.array([s / 4.0])
        return float((1.0 + 2.0 * psi(1, alpha, lam, u) - 0.7 * psi(2, alpha, lam, u))[0])

    weights = fade_weights((8, 4, 0), 11, FadeParams("base", alpha, lam, 2))
    assert weights @ [value(8), value(4), value(0)] == pytest.approx(value(11), abs=1e-11)


@pytest.mark.smoke
def test_alpha_and_lam_dial_towards_reuse():
    for params in (FadeParams("base", 1e-3, 0.0, 1), FadeParams("base", 1.0, 60.0, 1)):
        np.testing.assert_allclose(fade_weights((5, 0), 8, params), [1, 0], atol=1e-3)
    w1 = fade_weights((5, 0), 8, FadeParams("base", 0.5, 0.0, 1))[1]
    assert w1 == pytest.approx(1 - 1.6**0.5, abs=1e-12)  # 1 - (1 + tau)^alpha


def test_exponential_integrator_functions_at_alpha_one():
    u, lam = np.array([0.5, 1.0, 2.5]), 0.7
    np.testing.assert_allclose(psi(1, 1.0, lam, u), (1 - np.exp(-lam * u)) / lam, rtol=1e-12)
    assert psi(2, 1.0, lam, np.array([0.0])) == 0.0 and psi(0, 1.0, lam, np.array([0.0])) == 1.0


@pytest.mark.parametrize("form", ["base", "memory"])
def test_constants_are_reproduced(form):
    for alpha in (0.25, 0.7, 1.0, 1.5):
        for order in (1, 2):
            weights = fade_weights(EVEN, TARGET, FadeParams(form, alpha, 0.5, order, 3))
            assert weights.sum() == pytest.approx(1.0, abs=1e-11)


def test_uneven_spacing_falls_back_to_true_positions():
    memory = fade_weights(UNEVEN, TARGET, FadeParams("memory", 0.7, 0.5, 2, 3))
    base = fade_weights(UNEVEN, TARGET, FadeParams("base", 0.7, 0.5, 2))
    np.testing.assert_array_equal(memory, base)
    integer = fade_weights(UNEVEN, TARGET, FadeParams("memory", 1.0, 0.0, 2, 3))
    np.testing.assert_allclose(integer[:3], taylorseer(2)(UNEVEN[:3], TARGET), atol=1e-12)


def test_candidates_contain_reuse_taylor_one_and_taylor_two_in_every_cell():
    grid = FadeGrid()
    for pos in (EVEN, UNEVEN, (12, 2, 1, 0), (2, 1, 0)):
        s = pos[0] + 3
        weights, valid = candidate_weights(pos, s, grid)
        assert weights.shape == (len(candidates(grid).params.lam), 4)
        assert np.all(np.abs(weights).sum(1) <= 50) and np.all(weights[~valid] == 0)
        for order in (0, 1, 2):
            row = np.pad(taylorseer(order)(pos[: order + 1], s), (0, 3 - order))
            distance = np.abs(weights[valid] - row).max(axis=1).min()
            assert distance < 1e-12, (pos, order, distance)


def test_candidate_weights_are_those_of_the_parameters():
    grid = FadeGrid()
    listed = candidates(grid).params
    weights, valid = candidate_weights(EVEN, TARGET, grid)
    for i in np.flatnonzero(valid)[::37]:
        form = ("base", "memory")[listed.form[i]]
        params = FadeParams(form, float(listed.alpha[i]), float(listed.lam[i]),
                            int(listed.order[i]), max(int(listed.window[i]), 2))
        np.testing.assert_allclose(weights[i], fade_weights(EVEN, TARGET, params), atol=1e-12)


def test_fixed_parameters_make_a_rule():
    schedule = uniform_schedule(20, 4)
    fixed = make_plan(schedule, fade(FadeParams("base", 1.0, 0.0, 1)))
    np.testing.assert_allclose(fixed.weights, make_plan(schedule, taylorseer(1)).weights,
                               atol=1e-12)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (FadeParams(form="caputo"), "form"),
        (FadeParams(alpha=0.0), "alpha"),
        (FadeParams(alpha=2.0), "alpha"),
        (FadeParams(lam=float("nan")), "lam"),
        (FadeParams(order=-1), "order"),
        (FadeParams("memory", order=2, window=2), "order"),
        (FadeParams("memory", window=1), "window"),
    ],
)
def test_parameters_outside_of_their_domain_are_named(params, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        fade_weights(EVEN, TARGET, params)


def test_weights_that_overflow_are_refused():
    with pytest.raises(ValueError, match="params: weights are not finite"):
        fade_weights((5, 0), 8, FadeParams("base", 0.3, -8.0, 1))
