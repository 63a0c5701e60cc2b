import math

import mpmath
import numpy as np
import pytest
from scipy.special import erfcx

from fadex.core.special import gl_weights, l1_weights, mittag_leffler


def reference(alpha, beta, z):
    """The defining series with enough digits for its cancellation."""
    alpha, beta, z = (mpmath.mpf(repr(float(v))) for v in (alpha, beta, z))
    radius = float(abs(z)) ** (1.0 / float(alpha))
    with mpmath.workdps(int(60 + radius / 2)):
        total, i = mpmath.mpf(0), 0
        while True:
            term = z**i / mpmath.gamma(alpha * i + beta)
            total += term
            i += 1
            if i > radius / float(alpha) and abs(term) < mpmath.mpf(10) ** -40:
                return float(total)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.85, 1.0, 1.02, 1.3, 1.6, 1.9])
def test_mittag_leffler_matches_high_precision_sums(alpha):
    z = np.concatenate([np.linspace(-20, -1, 9), [-0.3, 0.0, 0.7, 2.0]])
    if alpha < 0.4:  # the reference needs thousands of digits past |z|^(1/alpha) ~ 400
        z = z[z > -6.5]
    for beta in (1.0, 2.0, alpha, 1 + alpha, 1 + 2 * alpha, 3.0):
        expected = np.array([reference(alpha, beta, v) for v in z])
        error = np.abs(mittag_leffler(alpha, beta, z) - expected)
        assert np.all(error <= 1e-9 * np.maximum(np.abs(expected), 1e-3)), (beta, error.max())


@pytest.mark.smoke
def test_mittag_leffler_closed_forms():
    x = np.linspace(0, 6, 25)
    np.testing.assert_allclose(mittag_leffler(1, 1, -x), np.exp(-x), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mittag_leffler(0.5, 1, -x), erfcx(x), rtol=1e-9)
    np.testing.assert_allclose(mittag_leffler(1, 2, x[1:]), np.expm1(x[1:]) / x[1:], rtol=1e-12)
    near_two = np.nextafter(2.0, 0.0)
    np.testing.assert_allclose(mittag_leffler(near_two, 1, -(x**2)), np.cos(x), atol=1e-9)


def test_mittag_leffler_decreases_and_stays_positive_for_orders_up_to_one():
    z = -np.linspace(0, 20, 201)
    for alpha in (0.3, 0.6, 0.9, 1.0):
        values = mittag_leffler(alpha, 1, z)
        assert np.all(values > 0) and np.all(np.diff(values) < 0)


def test_mittag_leffler_keeps_shapes_and_takes_empty_input():
    assert mittag_leffler(0.7, 1, np.zeros((2, 3))).shape == (2, 3)
    assert mittag_leffler(0.7, 1, 0.5).shape == ()
    assert mittag_leffler(0.7, 1, np.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0.0, 1, 0), "alpha"), ((2.0, 1, 0), "alpha"), ((1, 0.0, 0), "beta"), ((1, 1, 11.0), "z"),
     ((0.3, 1, 5.0), "z"), ((1, 1, np.nan), "z"), ((math.nan, 1, 0), "alpha")],
)
def test_mittag_leffler_names_the_argument_outside_of_its_domain(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        mittag_leffler(*arguments)


def test_fractional_differences_are_binomials():
    np.testing.assert_allclose(gl_weights(2.0, 5), [1, -2, 1, 0, 0], atol=1e-15)
    nu = 0.4
    expected = [float((-1) ** j * mpmath.binomial(nu, j)) for j in range(6)]
    np.testing.assert_allclose(gl_weights(nu, 6), expected, rtol=1e-14)


def test_l1_scheme_is_exact_on_straight_lines():
    alpha, count = 0.6, 7
    derivative = l1_weights(alpha, count).sum()  # h = 1, F(t) = t
    assert derivative == pytest.approx(count ** (1 - alpha) / math.gamma(2 - alpha), rel=1e-13)
