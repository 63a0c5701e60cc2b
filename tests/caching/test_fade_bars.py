"""FADE, BeziCast and FuCa on real images: the shipped digits DiT, noise that profiling never saw.

One model and 48 samples; `benchmarks/caching.py` repeats this over training seeds.
"""

import pytest

from fadex.caching.compare import compare, label_task
from fadex.models import DIGITS_SHAPE


@pytest.fixture(scope="module")
def rows(digits):
    task = label_task(*digits, shape=DIGITS_SHAPE, num_classes=10, samples=48, seed=11,
                      profile_samples=16)
    methods = ["reuse", "taylor1", "taylor2", "ab2", "fade", "fade_amplitude", "bezicast", "fuca",
               "fuca_fit", "fuca_placed"]
    found = compare(task, methods=methods, intervals=[4, 6], guidances=[3.0], repeats=1)
    return {(r["method"], r["interval"]): r["rel_error"] for r in found}


@pytest.mark.smoke
@pytest.mark.parametrize("interval", [4, 6])
def test_fade_beats_taylorseer_and_the_coarse_grid_at_equal_evaluations(rows, interval):
    error = lambda method: rows[method, interval]
    assert error("fade") <= 0.85 * error("taylor1")
    assert error("fade") <= 0.9 * error("taylor2")
    assert error("fade") <= error("ab2")
    assert error("fade") <= 0.5 * error("reuse")
    assert error("fade_amplitude") <= 0.9 * error("taylor1")


@pytest.mark.parametrize("interval", [4, 6])
def test_bezicast_and_fuca_beat_taylorseer_and_the_fitted_forms_lead(rows, interval):
    """Guidance 3; at guidance 1 the margins of the unfitted forms are narrower."""
    error = lambda method: rows[method, interval]
    assert error("bezicast") <= 0.95 * error("taylor1")
    assert error("fuca") <= 0.9 * error("taylor1")
    assert error("fuca_fit") <= 0.7 * error("taylor1")
    others = [rows[m, n] for m, n in rows if n == interval and m not in ("fuca_placed", "full")]
    assert error("fuca_placed") <= 0.9 * min(others)
