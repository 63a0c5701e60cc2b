"""One call per method and quality level, with settings chosen by measurement.

``"high"`` aims at about 2x, ``"balanced"`` at 3 to 3.5x, ``"fast"`` at 4.5 to 5x over 50 steps;
methods that compute a part of each skipped step (DBCache, ToCa) reach less. Intervals count
steps, so other numbers of steps keep the speed-up and change the error. The table is printed by
``python benchmarks/presets.py`` (shipped digits DiT, 50 Euler steps, guidance 1, 64 samples):
evaluations, estimated speed-up, and mean relative error to the full run.

=========== =================== =================== ===================
method      high                balanced            fast
=========== =================== =================== ===================
bezicast    27  1.85x  0.0018   15  3.33x  0.0068   10  5.00x  0.0147
dbcache     20  1.97x  0.0034   12  2.65x  0.0093   10  2.90x  0.0146
dmd         27  1.85x  0.0018   15  3.33x  0.0072   10  5.00x  0.0202
fade        27  1.85x  0.0011   15  3.33x  0.0052   10  5.00x  0.0139
foca        27  1.85x  0.0020   15  3.33x  0.0075   10  5.00x  0.0188
fuca        27  1.85x  0.0014   15  3.33x  0.0077   10  5.00x  0.0151
fuca_placed 27  1.85x  0.0011   15  3.33x  0.0021   10  5.00x  0.0059
hicache     27  1.85x  0.0051   15  3.33x  0.0175   10  5.00x  0.0324
magcache    25  1.99x  0.0094   15  3.28x  0.0164   10  4.86x  0.0344
newton      27  1.85x  0.0018   15  3.33x  0.0082   10  5.00x  0.0304
reuse       27  1.85x  0.0103   15  3.33x  0.0324   10  5.00x  0.0600
taylor1     27  1.85x  0.0020   15  3.33x  0.0075   10  5.00x  0.0188
taylor2     27  1.85x  0.0019   15  3.33x  0.0073   10  5.00x  0.0233
teacache    25  1.97x  0.0023   14  3.45x  0.0077   10  4.74x  0.0159
toca        19  2.11x  0.0112   11  2.95x  0.0255    8  3.47x  0.0408
=========== =================== =================== ===================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.caching.adaptive import adaptive_sample
from fadex.caching.bezicast import bezicast_plan
from fadex.caching.dbcache import dbcache
from fadex.caching.dmd import dmd
from fadex.caching.fade_table import fade_plan, profile_fade
from fadex.caching.foca import foca
from fadex.caching.fuca import fuca_sample
from fadex.caching.fuca_profile import place_fuca
from fadex.caching.hicache import hicache
from fadex.caching.magcache import magcache, profile_magcache
from fadex.caching.newton import newton
from fadex.caching.plan import make_plan
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, uniform_schedule
from fadex.caching.taylor import taylorseer
from fadex.caching.teacache import fit_teacache, teacache
from fadex.caching.toca import toca_sample
from fadex.core.checks import check_choice, check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.samplers import Sampler

QUALITIES = ("high", "balanced", "fast")
_INTERVALS = {"high": 2, "balanced": 4, "fast": 7}
_RULES = {
    "reuse": reuse,
    "taylor1": lambda: taylorseer(1),
    "taylor2": lambda: taylorseer(2),
    "hicache": lambda: hicache(2),
    "foca": foca,
    "newton": lambda: newton(2),
}
_STATIC = (*_RULES, "bezicast", "dmd", "fade", "fuca", "fuca_placed")
# Per quality; thresholds are relative changes, so they carry over between models in kind.
_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    **{
        name: {quality: {"interval": _INTERVALS[quality]} for quality in QUALITIES}
        for name in _STATIC
    },
    "toca": {
        "high": {"interval": 3, "ratio": 0.25},
        "balanced": {"interval": 6, "ratio": 0.25},
        "fast": {"interval": 10, "ratio": 0.25},
    },
    "teacache": {
        "high": {"threshold": 0.07, "max_skip": 4},
        "balanced": {"threshold": 0.15, "max_skip": 8},
        "fast": {"threshold": 0.26, "max_skip": 12},
    },
    "magcache": {
        "high": {"threshold": 0.02, "max_skip": 4, "retention": 0.06},
        "balanced": {"threshold": 0.09, "max_skip": 8, "retention": 0.06},
        "fast": {"threshold": 0.3, "max_skip": 12, "retention": 0.06},
    },
    "dbcache": {
        "high": {"threshold": 0.15, "max_skip": 2},
        "balanced": {"threshold": 0.25, "max_skip": 4},
        "fast": {"threshold": 0.3, "max_skip": 6},
    },
}
METHODS = tuple(sorted(_SETTINGS))


class Preset(NamedTuple):
    """A method with its settings at one level, ready for :func:`run_preset`.

    Attributes:
      method, quality: by name.
      schedule: of methods that follow one, else None.
      settings: thresholds, skip limits, ratios.
    """

    method: str
    quality: str
    schedule: CacheSchedule | None
    settings: dict[str, Any]


def preset(method: str, quality: str = "balanced", *, num_steps: int) -> Preset:
    """The settings of a method at a quality level.

    Args:
      method: one of ``METHODS``: every method of :mod:`fadex.caching`.
      quality: ``"high"``, ``"balanced"`` or ``"fast"``.
      num_steps: steps of the run.

    Example:
      >>> from fadex.caching import preset
      >>> preset("taylor1", "fast", num_steps=50).schedule.nfe
      10
      >>> preset("teacache", "fast", num_steps=50).settings["threshold"]
      0.26
    """
    check_choice("method", method, METHODS)
    check_choice("quality", quality, QUALITIES)
    num_steps = check_int("num_steps", num_steps, minimum=1)
    settings = dict(_SETTINGS[method][quality])
    interval = settings.pop("interval", None)
    schedule = None if interval is None else uniform_schedule(num_steps, interval)
    return Preset(method, quality, schedule, settings)


def run_preset(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    method: str = "taylor1",
    quality: str = "balanced",
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    profile_x: Any = None,
    profile_cond: Any = None,
    profile_null: Any = None,
    profile: Any = None,
    return_stats: bool = False,
) -> Any:
    """Sample with a method at a quality level; everything else is chosen for you.

    Methods that are profiled (FADE, FuCa on placed anchors, TeaCache's polynomial, MagCache's
    ratios) run the full sampler on a profiling batch before. Keep ``profile`` from
    :func:`profile_preset` to pay for that only once.

    Args:
      denoiser, params, x, cond, timesteps, sampler, guidance, null_cond, cfg_channels: as in
        :func:`~fadex.caching.cached_sample`.
      method, quality: see :func:`preset`.
      profile_x, profile_cond, profile_null: profiling batch; by default fresh noise shaped like
        ``x`` (normal, of a fixed key) with the conditions of the run.
      profile: what :func:`profile_preset` returned for this method and quality.
      return_stats: also return :class:`~fadex.caching.CacheStats`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import run_preset, summary
      >>> from fadex.models import load_digits_dit
      >>> from fadex.sampling import uniform_times
      >>> denoiser, params = load_digits_dit()
      >>> x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
      >>> x, stats = run_preset(denoiser, params, x, jnp.array([3, 7]), method="taylor1",
      ...                       timesteps=uniform_times(20), quality="fast", return_stats=True)
      >>> summary(stats).split(";")[0]
      '6 of 20 steps computed (0 1 2 9 16 19), 14 skipped'
    """
    steps = jnp.shape(timesteps)[-1] - 1
    chosen = preset(method, quality, num_steps=steps)
    shared = dict(timesteps=timesteps, sampler=sampler, guidance=guidance,
                  cfg_channels=cfg_channels)
    if profile is None:
        if profile_x is None:
            profile_x = jax.random.normal(jax.random.key(0), jnp.shape(x), jnp.result_type(x))
            profile_cond, profile_null = cond, null_cond
        profile = profile_preset(
            denoiser, params, profile_x, profile_cond, method=method, quality=quality,
            null_cond=profile_null, **shared,
        )
    batch = (denoiser, params, x, cond)
    shared |= dict(null_cond=null_cond)
    settings, schedule = chosen.settings, chosen.schedule
    if method == "fuca":
        return fuca_sample(*batch, schedule=schedule, return_stats=return_stats, **shared)
    if method == "fuca_placed":
        return fuca_sample(*batch, return_stats=return_stats, **profile._asdict(), **shared)
    if method == "toca":
        return toca_sample(
            *batch, schedule=schedule, return_stats=return_stats, **settings, **shared
        )
    if schedule is not None:
        return cached_sample(
            *batch, plan=_plan(method, schedule, profile), return_stats=return_stats, **shared
        )
    makers = {
        "teacache": lambda: teacache(coefficients=profile, reduce="mean", **settings),
        "magcache": lambda: magcache(profile, **settings),
        "dbcache": lambda: dbcache(reduce="mean", **settings),
    }
    # The three of them gain a factor of two and more from extrapolating what they reuse.
    return adaptive_sample(
        *batch, policy=makers[method](), site="crf", order=1, return_stats=return_stats, **shared
    )


def _plan(method: str, schedule: CacheSchedule, profile: Any) -> Any:
    if method == "fade":
        return profile
    if method == "bezicast":
        return bezicast_plan(schedule)
    if method == "dmd":
        return dmd(schedule)
    return make_plan(schedule, _RULES[method]())


def profile_preset(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    method: str,
    quality: str = "balanced",
    **options: Any,
) -> Any:
    """What a method needs from a profiling batch, for the ``profile`` of :func:`run_preset`.

    FADE: its plan; FuCa on placed anchors: schedule and tables; TeaCache: its coefficients;
    MagCache: its ratios; every other method: None.

    Args:
      options: ``sampler``, ``guidance``, ``null_cond``, ``cfg_channels``.
    """
    chosen = preset(method, quality, num_steps=jnp.shape(timesteps)[-1] - 1)
    batch = (denoiser, params, x, cond)
    if method == "fade":
        return fade_plan(
            profile_fade(*batch, timesteps=timesteps, schedule=chosen.schedule, **options)
        )
    if method == "fuca_placed":
        return place_fuca(*batch, timesteps=timesteps, nfe=chosen.schedule.nfe, **options)
    if method == "teacache":
        return fit_teacache(*batch, timesteps=timesteps, **options)
    if method == "magcache":
        return profile_magcache(*batch, timesteps=timesteps, **options)
    return None
