import math

import jax
import numpy as np
import pytest

from fadex.sampling import logit_normal_times, resolution_shift, shifted_times, uniform_times


@pytest.mark.smoke
def test_grids_run_from_noise_to_data():
    for grid in (uniform_times(7), shifted_times(7, 3.0), shifted_times(1, 0.5)):
        assert grid[0] == 1 and grid[-1] == 0 and np.all(np.diff(grid) < 0)


def test_shift_by_its_formula_and_its_fixed_point():
    t = np.linspace(1, 0, 6)
    np.testing.assert_allclose(shifted_times(5, 3.0), 3 * t / (1 + 2 * t), rtol=1e-6)
    np.testing.assert_array_equal(shifted_times(5, 1.0), uniform_times(5))


def test_resolution_shift_at_its_two_anchors():
    assert resolution_shift(256) == pytest.approx(math.exp(0.5))
    assert resolution_shift(4096) == pytest.approx(math.exp(1.15))


def test_logit_normal_times_have_a_logit_normal_law():
    t = np.asarray(logit_normal_times(jax.random.key(0), (100_000,), mean=0.5, std=2.0))
    logits = np.log(t) - np.log1p(-t)
    # 100k draws: three standard errors are 0.019 for the mean and 0.013 for the deviation.
    assert abs(logits.mean() - 0.5) < 0.02 and abs(logits.std() - 2.0) < 0.02


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda: uniform_times(0), "num_steps: must be >= 1"),
     (lambda: shifted_times(5, 0.0), "shift: must lie in"),
     (lambda: resolution_shift(0), "num_tokens: must be >= 1")],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
