import numpy as np
import pytest

from fadex.caching import CacheSchedule, uniform_schedule
from fadex.caching.compare import (
    GRID_METHODS,
    METHOD_NAMES,
    build_method,
    check_method,
    compare,
    label_task,
    method_plan,
    method_sites,
    psnr,
    relative_error,
)
from fadex.sampling import flow_euler, uniform_times

KEYS = {"method", "interval", "guidance", "site", "nfe", "num_steps", "rel_error", "psnr",
        "agreement", "seconds", "speedup", "ideal_speedup"}
STEPS = 10
SCHEDULE = uniform_schedule(STEPS, 4)  # anchors 0, 1, 2, 6, 9
SHARED = dict(timesteps=uniform_times(STEPS), sampler=flow_euler(), guidance=2.0)
# One method of each mechanism; the others differ from one of these in their weights.
RUN = ("reuse", "taylor1", "hicache2", "foca", "dmd", "lsq", "fade", "bezicast", "bezicast_state",
       "fuca", "fuca_fit", "teacache_taylor",
       "dbcache", "magcache", "toca", "fuca_placed", "ab2_placed", "ab2", "heun")
ADAPTIVE = ("teacache_taylor", "dbcache", "magcache")


@pytest.fixture(scope="module")
def task(tiny):
    return label_task(*tiny[:2], shape=(4, 4, 2), num_classes=5, samples=4, seed=3,
                      profile_samples=4)


@pytest.mark.smoke
def test_every_mechanism_runs_and_rows_hold_all_columns(task):
    rows = compare(task, methods=RUN, intervals=[4], num_steps=STEPS, repeats=1, guidances=[2.0],
                   classify=lambda x: np.zeros(len(x)))
    assert [r["method"] for r in rows] == ["full", *RUN]
    assert all(set(r) == KEYS for r in rows)
    full = rows[0]
    assert full["rel_error"] == 0 and full["psnr"] is None and full["speedup"] == 1
    for row in rows[1:]:
        name, nfe = row["method"], row["nfe"]
        assert 0 < row["rel_error"] < 2 and row["agreement"] == 1.0, row
        if name in ADAPTIVE:  # calibrated on other samples
            assert 1 < nfe <= SCHEDULE.nfe + 1
        else:  # Heun spends its evaluations in pairs
            assert nfe == (4 if name == "heun" else SCHEDULE.nfe)
        if name in (*ADAPTIVE, "toca"):  # skipped steps compute something
            assert row["ideal_speedup"] < STEPS / nfe
        else:
            assert row["ideal_speedup"] == pytest.approx(STEPS / nfe)


def test_the_other_methods_are_built(task):
    for name in set(METHOD_NAMES) - set(RUN) - set(GRID_METHODS):
        if name in ("teacache", "dbcache_taylor", "fuca_fade_x0", "fade_placed", "taylor1_placed"):
            continue  # a mechanism that runs above, with another constant
        if name.startswith("fuca"):
            assert build_method(name, SCHEDULE, task, **SHARED).nfe == SCHEDULE.nfe
        else:
            plan = method_plan(name, SCHEDULE, task, **SHARED)
            assert isinstance(plan.schedule, CacheSchedule) and plan.schedule.nfe == SCHEDULE.nfe
    for name in METHOD_NAMES:
        assert method_sites(name, ("output", "crf", "module"), task.denoiser)


def test_costs_count_what_skipped_steps_compute(task):
    build = lambda name, site: build_method(name, SCHEDULE, task, site=site, **SHARED)
    assert build("taylor1", "output").cost == build("fuca", "output").cost == SCHEDULE.nfe
    crf, module = build("taylor1", "crf"), build("taylor1", "module")
    magcache, fuca = build("magcache", "crf"), build("fuca", "crf")
    assert crf.nfe == module.nfe == fuca.nfe == SCHEDULE.nfe and magcache.nfe <= SCHEDULE.nfe
    for built in (crf, module, magcache, fuca):
        assert built.nfe < built.cost < built.nfe + 0.6 * STEPS
    # A skipped step is the embedding and the head at either site; FuCa runs it twice.
    share = (crf.cost - crf.nfe) / (STEPS - crf.nfe)
    assert magcache.cost == pytest.approx(magcache.nfe + share * (STEPS - magcache.nfe))
    assert fuca.cost == pytest.approx(fuca.nfe + 2 * share * (STEPS - fuca.nfe))
    toca = build("toca", "module")
    assert toca.cost > module.cost


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
