import numpy as np
import pytest

from fadex.caching import alpha_from_msd, mean_squared_displacement, msd_exponent

RNG = np.random.default_rng(0)


def fractional_brownian(hurst, steps=256, paths=200):
    """Paths with covariance (s^2H + t^2H - |s - t|^2H) / 2, by Cholesky factor."""
    t = np.arange(1, steps + 1, dtype=float)
    covariance = 0.5 * (t[:, None] ** (2 * hurst) + t ** (2 * hurst)
                        - np.abs(t[:, None] - t) ** (2 * hurst))
    return np.linalg.cholesky(covariance + 1e-12 * np.eye(steps)) @ RNG.normal(size=(steps, paths))


@pytest.mark.smoke
def test_brownian_paths_have_exponent_one():
    # 400 coordinates of 256 steps: the estimate's standard deviation is below 0.01.
    path = RNG.normal(size=(256, 400)).cumsum(axis=0)
    assert msd_exponent(path) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("hurst", [0.3, 0.7])
def test_fractional_brownian_paths_have_exponent_twice_hurst(hurst):
    assert msd_exponent(fractional_brownian(hurst)) == pytest.approx(2 * hurst, abs=0.1)


def test_straight_lines_are_ballistic():
    path = np.arange(40.0)[:, None, None] * RNG.normal(size=(3, 5))
    assert msd_exponent(path) == pytest.approx(2.0, abs=1e-4)
    assert alpha_from_msd(2.0) == 1.0


def test_displacements_by_hand():
    path = np.array([0.0, 1.0, 3.0, 6.0])
    np.testing.assert_allclose(mean_squared_displacement(path, [1, 2]), [14 / 3, 17.0])


def test_bad_input_is_named():
    path = np.arange(5.0)
    with pytest.raises(ValueError, match=r"lags: expected values in \[1, 4\]"):
        msd_exponent(path, (1, 5))
    with pytest.raises(ValueError, match="lags: a slope needs at least two"):
        msd_exponent(path, (1,))
    with pytest.raises(ValueError, match="trajectory: its displacements"):
        msd_exponent(np.zeros((9, 2)))
