import numpy as np
import pytest

from fadex.caching.compare import (
    METHOD_NAMES,
    check_method,
    compare,
    label_task,
    psnr,
    relative_error,
)
from fadex.models import DIGITS_SHAPE

KEYS = {"method", "interval", "guidance", "site", "nfe", "num_steps", "rel_error", "psnr",
        "agreement", "seconds", "speedup", "ideal_speedup"}


@pytest.fixture(scope="module")
def task(digits):
    return label_task(*digits, shape=DIGITS_SHAPE, num_classes=10, samples=6, seed=3,
                      profile_samples=4)


@pytest.mark.smoke
def test_every_method_name_runs_and_rows_hold_all_columns(task):
    rows = compare(task, methods=METHOD_NAMES, intervals=[4], num_steps=10, repeats=1,
                   guidances=[2.0], classify=lambda x: np.zeros(len(x)))
    assert [r["method"] for r in rows] == ["full", *METHOD_NAMES]
    assert all(set(r) == KEYS for r in rows)
    full = rows[0]
    assert full["rel_error"] == 0 and full["psnr"] is None and full["speedup"] == 1
    for row in rows[1:]:
        assert row["ideal_speedup"] == pytest.approx(10 / row["nfe"])
        assert 0 < row["rel_error"] < 1 and row["agreement"] == 1.0
        # Anchors 0, 1, 2, 6, 9 of ten steps; Heun spends its evaluations in pairs.
        assert row["nfe"] == (4 if row["method"] == "heun" else 5)


def test_metrics_by_hand():
    x, y = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[3.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(relative_error(x, y), [4 / 3, 1.0])
    np.testing.assert_allclose(psnr(x, y), 10 * np.log10(4 / np.array([8.0, 0.5])))
    assert psnr(x, x)[0] == np.inf


def test_test_and_profiling_noise_never_coincide(digits):
    for seed in range(3):
        task = label_task(*digits, shape=(2,), num_classes=10, samples=4, seed=seed)
        assert not np.isin(np.asarray(task.x), np.asarray(task.profile_x)).any()


def test_unknown_methods_and_counts_are_refused(task):
    with pytest.raises(ValueError, match="methods: expected some of reuse, .*got 'telepathy'"):
        check_method("telepathy")
    with pytest.raises(ValueError, match="methods: expected some of"):
        compare(task, methods=["telepathy"], intervals=[4])
    with pytest.raises(ValueError, match="repeats: must be >= 1"):
        compare(task, methods=["reuse"], intervals=[4], repeats=0)
    with pytest.raises(ValueError, match="samples: must be >= 1"):
        label_task(task.denoiser, task.params, shape=(2,), num_classes=10, samples=0, seed=0)
