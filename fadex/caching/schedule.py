"""Which steps of a sampling run are computed, and which are forecast."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from fadex.core.checks import check_int


class CacheSchedule(NamedTuple):
    """A static schedule: ``num_steps`` steps, of which ``anchors`` are computed.

    Hashable, so jitted samplers take it as a static argument. Build it with
    :func:`uniform_schedule` or :func:`custom_schedule`, which check it.

    Attributes:
      num_steps: sampling steps ``S``.
      anchors: the computed steps, rising from 0.
      breaks: anchors at which the forecast feature jumps (guidance sets in or ends, see
        :func:`~fadex.sampling.guidance_breaks`): no forecast looks back over one.
    """

    num_steps: int
    anchors: tuple[int, ...]
    breaks: tuple[int, ...] = ()

    @property
    def nfe(self) -> int:
        """Computed steps: model evaluations of a sampler with one evaluation a step."""
        return len(self.anchors)

    @property
    def skipped(self) -> tuple[int, ...]:
        """The forecast steps, in order."""
        computed = set(self.anchors)
        return tuple(s for s in range(self.num_steps) if s not in computed)

    def is_anchor(self, step: int) -> bool:
        """Whether ``step`` is computed."""
        return step in self.anchors

    def history(self, step: int, count: int | None = None) -> tuple[int, ...]:
        """The anchors up to ``step``, newest first, at most ``count`` of them.

        They reach back to the newest break at or before ``step``, and no further.
        """
        start = max((b for b in self.breaks if b <= step), default=0)
        past = [a for a in reversed(self.anchors) if start <= a <= step]
        return tuple(past[:count])

    def with_anchors(self, steps: Iterable[int]) -> CacheSchedule:
        """The same schedule with further computed steps.

        Raises:
          ValueError: a step outside ``[0, num_steps)``.
        """
        steps = {check_int("steps", s) for s in steps}
        outside = sorted(s for s in steps if not 0 <= s < self.num_steps)
        if outside:
            raise ValueError(f"steps: must lie in [0, {self.num_steps}), got {outside}")
        return self._replace(anchors=tuple(sorted(steps.union(self.anchors)))).validate()

    def with_breaks(self, steps: Iterable[int]) -> CacheSchedule:
        """The same schedule with further breaks, which are computed, too.

        Example:
          >>> from fadex.caching import uniform_schedule
          >>> schedule = uniform_schedule(12, 4).with_breaks([4])
          >>> schedule.anchors, schedule.history(5), schedule.history(7)
          ((0, 1, 2, 4, 6, 10, 11), (4,), (6, 4))
        """
        steps = tuple(steps)
        breaks = tuple(sorted({*self.breaks, *(int(s) for s in steps)}))
        return self.with_anchors(steps)._replace(breaks=breaks).validate()

    def validate(self) -> CacheSchedule:
        """Return the schedule itself when it is sound; raise ValueError when not."""
        check_int("num_steps", self.num_steps, minimum=1)
        anchors = self.anchors
        rising = all(a < b for a, b in itertools.pairwise(anchors))
        if not anchors or anchors[0] != 0 or not rising or anchors[-1] >= self.num_steps:
            raise ValueError(
                "schedule: anchors must start at 0, be increasing and < num_steps="
                f"{self.num_steps}, got {anchors}"
            )
        breaks = self.breaks
        if any(a >= b for a, b in itertools.pairwise(breaks)) or not set(breaks) <= set(anchors):
            raise ValueError(
                f"schedule: breaks must be increasing and computed steps, got {breaks} with the "
                f"anchors {anchors}"
            )
        return self


def uniform_schedule(
    num_steps: int, interval: int, *, warmup: int = 3, cooldown: int = 1
) -> CacheSchedule:
    """Compute the first ``warmup`` steps, then every ``interval``-th, and the last ``cooldown``.

    The warm-up gives a forecaster of order ``m`` its ``m + 1`` snapshots; the last step is
    computed by default because the velocity bends most there. At long intervals the first window
    behind the warm-up looks far ahead from three neighbours:
    :func:`~fadex.caching.profile_schedule` places the same number of steps better.

    Args:
      num_steps: sampling steps ``S``.
      interval: ``N``; 1 computes every step.
      warmup: computed steps at the start, at least 1; may exceed ``num_steps``.
      cooldown: computed steps at the end; 0 allows the last step to be forecast.

    Example:
      >>> from fadex.caching import uniform_schedule
      >>> uniform_schedule(12, 4).anchors
      (0, 1, 2, 6, 10, 11)
    """
    num_steps = check_int("num_steps", num_steps, minimum=1)
    interval = check_int("interval", interval, minimum=1)
    warmup = check_int("warmup", warmup, minimum=1)
    cooldown = check_int("cooldown", cooldown, minimum=0)
    anchors = {*range(min(warmup, num_steps)), *range(warmup - 1, num_steps, interval)}
    anchors |= set(range(max(num_steps - cooldown, 0), num_steps))
    return CacheSchedule(num_steps, tuple(sorted(anchors)))


def custom_schedule(num_steps: int, anchors: Iterable[int]) -> CacheSchedule:
    """A schedule with the given computed steps, sorted; steps outside ``[0, S)`` are dropped.

    Raises:
      ValueError: step 0 is missing: nothing could be forecast before the first anchor.
    """
    num_steps = check_int("num_steps", num_steps, minimum=1)
    inside = {check_int("anchors", a) for a in anchors}
    inside = {a for a in inside if 0 <= a < num_steps}
    return CacheSchedule(num_steps, tuple(sorted(inside))).validate()
