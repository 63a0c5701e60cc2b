import pytest

from fadex.caching import CacheSchedule, custom_schedule, uniform_schedule


@pytest.mark.smoke
def test_warmup_interval_and_cooldown():
    schedule = uniform_schedule(20, 5)
    assert schedule.anchors == (0, 1, 2, 7, 12, 17, 19)
    assert schedule.nfe == 7 and len(schedule.skipped) == 13
    assert uniform_schedule(20, 5, warmup=1, cooldown=0).anchors == (0, 5, 10, 15)
    assert schedule.history(9) == (7, 2, 1, 0) and schedule.history(9, 2) == (7, 2)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_short_runs_are_computed_whole_by_the_warmup(steps):
    assert uniform_schedule(steps, 4, warmup=7).anchors == tuple(range(steps))
    assert uniform_schedule(steps, 4, warmup=10**12, cooldown=10**12).nfe == steps


def test_interval_longer_than_the_run():
    assert uniform_schedule(10, 50).anchors == (0, 1, 2, 9)
    assert uniform_schedule(10, 50, warmup=1, cooldown=0).anchors == (0,)


def test_interval_one_computes_everything():
    assert uniform_schedule(9, 1).nfe == 9


def test_custom_anchors_are_sorted_and_clipped():
    assert custom_schedule(6, [4, 0, 2, 9, -1]).anchors == (0, 2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: uniform_schedule(0, 2), "num_steps: must be >= 1, got 0"),
        (lambda: uniform_schedule(5, 0), "interval: must be >= 1, got 0"),
        (lambda: uniform_schedule(5, 2, warmup=0), "warmup: must be >= 1, got 0"),
        (lambda: uniform_schedule(5, 2, cooldown=-1), "cooldown: must be >= 0, got -1"),
        (lambda: custom_schedule(5, [1, 2]), "schedule: anchors must start at 0"),
        (lambda: custom_schedule(5, []), "schedule: anchors must start at 0"),
        (lambda: CacheSchedule(5, (0, 3, 2)).validate(), "schedule: anchors must start at 0, be "
         "increasing"),
        (lambda: CacheSchedule(5, (0, 5)).validate(), "< num_steps=5"),
    ],
)
def test_bad_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
