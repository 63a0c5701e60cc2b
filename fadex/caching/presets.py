"""One call per method and quality level, with settings chosen by measurement.

``"high"`` aims at about 2x, ``"balanced"`` at 3 to 3.5x, ``"fast"`` at 4.5 to 5x over 50 steps;
methods that compute a part of each skipped step (DBCache, and ToCa, whose computed steps score the
tokens, too) reach less. Intervals count steps, so other numbers of steps keep the speed-up and
change the error. The table is printed by ``python benchmarks/presets.py`` (shipped digits DiT, 50
Euler steps, guidance 1, 64 samples): evaluations, estimated speed-up, and mean relative error to
the full run.

=========== =================== =================== ===================
method      high                balanced            fast
=========== =================== =================== ===================
bezicast    27  1.85x  0.0018   15  3.33x  0.0068   10  5.00x  0.0147
dbcache     20  1.97x  0.0034   12  2.66x  0.0093   10  2.92x  0.0146
dmd         27  1.85x  0.0018   15  3.33x  0.0072   10  5.00x  0.0202
fade        27  1.85x  0.0011   15  3.33x  0.0052   10  5.00x  0.0139
foca        27  1.85x  0.0020   15  3.33x  0.0075   10  5.00x  0.0188
fuca        27  1.85x  0.0014   15  3.33x  0.0077   10  5.00x  0.0151
fuca_placed 27  1.85x  0.0010   15  3.33x  0.0021   10  5.00x  0.0052
hicache     27  1.85x  0.0051   15  3.33x  0.0175   10  5.00x  0.0324
lsq         27  1.85x  0.0015   15  3.33x  0.0061   10  5.00x  0.0141
magcache    25  1.99x  0.0094   15  3.28x  0.0164   10  4.86x  0.0344
newton      27  1.85x  0.0018   15  3.33x  0.0082   10  5.00x  0.0304
reuse       27  1.85x  0.0103   15  3.33x  0.0324   10  5.00x  0.0600
taylor1     27  1.85x  0.0020   15  3.33x  0.0075   10  5.00x  0.0188
taylor2     27  1.85x  0.0019   15  3.33x  0.0073   10  5.00x  0.0233
teacache    25  1.96x  0.0023   14  3.43x  0.0077   10  4.71x  0.0159
toca        19  1.78x  0.0112   11  2.49x  0.0255    8  2.93x  0.0408
=========== =================== =================== ===================
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.adaptive import adaptive_sample
from fadex.caching.bezicast import bezicast_plan
from fadex.caching.dbcache import dbcache
from fadex.caching.dmd import dmd
from fadex.caching.fade_table import fade_plan, profile_fade
from fadex.caching.foca import foca
from fadex.caching.fuca import fuca_sample
from fadex.caching.fuca_profile import place_fuca
from fadex.caching.hicache import hicache
from fadex.caching.least_squares import profile_least_squares
from fadex.caching.magcache import magcache, profile_magcache
from fadex.caching.newton import newton
from fadex.caching.plan import make_plan
from fadex.caching.profile import check_site
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, uniform_schedule
from fadex.caching.taylor import taylorseer
from fadex.caching.teacache import fit_teacache, teacache
from fadex.caching.toca import toca_sample
from fadex.core.checks import check_choice, check_int, is_concrete
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import guidance_breaks
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
_STATIC = (*_RULES, "bezicast", "dmd", "fade", "fuca", "fuca_placed", "lsq")
# Profiled on the host, by :func:`profile_preset`.
_PROFILED = ("fade", "fuca_placed", "lsq", "magcache", "teacache")
_ADAPTIVE = ("dbcache", "magcache", "teacache")
# Methods that do not cache at all three sites; the first is the default.
_SITES = {
    "toca": ("module",),
    "fuca": ("output", "crf"),
    "fuca_placed": ("output",),
    **{name: ("crf", "output") for name in _ADAPTIVE},
}
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
      method: one of ``METHODS``: every family of :mod:`fadex.caching`, in the form that did best
        here. Other orders, guards and predictors are options of the methods' own functions.
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


class PresetProfile(NamedTuple):
    """What a method learnt from a profiling batch, and what it was profiled for.

    Attributes:
      method, quality, num_steps, site: of the runs that it serves.
      value: a plan, coefficients or ratios; None for methods that are not profiled.
    """

    method: str
    quality: str
    num_steps: int
    site: str
    value: Any


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
    site: str | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
    profile_x: Any = None,
    profile_cond: Any = None,
    profile_null: Any = None,
    profile: PresetProfile | None = None,
    return_stats: bool = False,
) -> Any:
    """Sample with a method at a quality level; everything else is chosen for you.

    Methods that are profiled (FADE, least squares, FuCa on placed anchors, TeaCache's polynomial,
    MagCache's ratios) run the full sampler on a profiling batch before, on the host: not under
    ``jit``. Keep ``profile`` from :func:`profile_preset` to pay for that only once, or to sample
    inside a program of yours.

    Args:
      denoiser, params, x, cond, timesteps, sampler, guidance, null_cond, cfg_channels, key: as in
        :func:`~fadex.caching.cached_sample`.
      method, quality: see :func:`preset`.
      site: where features are cached. By default ``"output"``; ``"module"`` for ToCa; for DBCache,
        TeaCache and MagCache ``"crf"``, or ``"output"`` with a model that has no features inside.
      guidance_interval: as in :func:`~fadex.caching.cached_sample`; the steps where it begins and
        ends are added to the schedule of a method that caches the output.
      profile_x, profile_cond, profile_null: profiling batch; by default fresh noise shaped like
        ``x`` (normal, of a fixed key) with the conditions of the run.
      profile: what :func:`profile_preset` returned for this method, quality, site and number of
        steps.
      return_stats: also return :class:`~fadex.caching.CacheStats`.

    Raises:
      ValueError: a bad argument, by name; a profile of another run; profiling under ``jit``.

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
    site = _site(method, site, denoiser)
    shared = dict(
        timesteps=timesteps, sampler=sampler, guidance=guidance, cfg_channels=cfg_channels,
        guidance_interval=guidance_interval,
    )
    if profile is not None:
        _check_profile(profile, method, quality, steps, site)
    elif method in _PROFILED:
        _check_host(method, params, x, cond, timesteps, profile_x, profile_cond)
        if profile_x is None:
            profile_x = jax.random.normal(jax.random.key(0), jnp.shape(x), jnp.result_type(x))
            profile_cond, profile_null = cond, null_cond
        profile = profile_preset(
            denoiser, params, profile_x, profile_cond, method=method, quality=quality, site=site,
            null_cond=profile_null, key=key, **shared,
        )
    value = None if profile is None else profile.value
    schedule = _with_breaks(chosen.schedule, timesteps, guidance, guidance_interval, site)
    batch = (denoiser, params, x, cond)
    shared |= dict(null_cond=null_cond, return_stats=return_stats)
    if method == "fuca":
        return fuca_sample(*batch, schedule=schedule, site=site, **shared)
    if method == "fuca_placed":
        _refuse_interval(method, guidance_interval)
        return fuca_sample(*batch, **value._asdict(), **shared)
    if method == "toca":
        return toca_sample(*batch, schedule=schedule, key=key, **chosen.settings, **shared)
    if schedule is not None:
        plan = _plan(method, schedule, value, site)
        return cached_sample(*batch, plan=plan, site=site, key=key, **shared)
    makers = {
        "teacache": lambda **kw: teacache(
            coefficients=value, reduce="mean", signal=_tea_signal(denoiser), **kw
        ),
        "magcache": lambda **kw: magcache(value, **kw),
        "dbcache": lambda **kw: dbcache(reduce="mean", **kw),
    }
    # The three of them gain a factor of two and more from extrapolating what they reuse.
    return adaptive_sample(
        *batch, policy=makers[method](**chosen.settings), site=site, order=1, key=key, **shared
    )


def _site(method: str, site: str | None, denoiser: Denoiser) -> str:
    allowed = _SITES.get(method, ("output", "crf", "module"))
    if site is None:
        site = allowed[0]
        inside = denoiser.with_features is not None and denoiser.from_features is not None
        if method == "dbcache":
            inside = denoiser.resume is not None
        return "output" if method in _ADAPTIVE and not inside else site
    check_choice("site", site, allowed)
    check_site(denoiser, site)
    return site


def _tea_signal(denoiser: Denoiser) -> str:
    """The latents stand in where a model does not tell its first block's modulated input."""
    return "latent" if denoiser.modulated is None else "modulated"


def _with_breaks(schedule, timesteps, guidance, guidance_interval, site):
    """The schedule with the steps at which the guided output jumps."""
    plain = isinstance(guidance, numbers.Real) and guidance == 1.0
    if schedule is None or guidance_interval is None or plain or site != "output":
        return schedule
    if not (is_concrete(timesteps) and is_concrete(guidance_interval)):
        raise ValueError(
            "timesteps, guidance_interval: must be concrete, the schedule is made from them; at "
            "a site inside the model they may be traced"
        )
    return schedule.with_breaks(guidance_breaks(timesteps, guidance_interval))


def _refuse_interval(method: str, guidance_interval: Any) -> None:
    if guidance_interval is not None:
        raise ValueError(
            f"guidance_interval: {method} places its anchors without one; take 'fuca'"
        )


def _check_profile(profile: Any, method: str, quality: str, steps: int, site: str) -> None:
    if not isinstance(profile, PresetProfile):
        raise TypeError(
            "profile: expected a PresetProfile, as profile_preset returns, got "
            f"{type(profile).__name__}"
        )
    have, want = tuple(profile[:4]), (method, quality, steps, site)
    if have != want:
        describe = "{0} at {1!r} over {2} steps, site {3!r}".format
        raise ValueError(f"profile: made for {describe(*have)}, the run is {describe(*want)}")


def _check_host(method: str, *given: Any) -> None:
    # A new array is traced wherever a program is being traced.
    leaves = [*jax.tree.leaves(given), jnp.zeros(())]
    if not all(map(is_concrete, leaves)):
        raise ValueError(
            f"profile: {method} is profiled on the host, which jit, vmap and grad can't do; call "
            "profile_preset outside and pass what it returns"
        )


def _plan(method: str, schedule: CacheSchedule, value: Any, site: str) -> Any:
    if method in ("fade", "lsq"):
        return value
    if method == "bezicast":
        return bezicast_plan(schedule)
    if method == "dmd":
        return dmd(schedule, axes=2 if site == "module" else 1)
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
    sampler: Sampler | None = None,
    site: str | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
) -> PresetProfile:
    """What a method needs from a profiling batch, for the ``profile`` of :func:`run_preset`.

    FADE and least squares: a plan; FuCa on placed anchors: schedule and tables; TeaCache: its
    coefficients; MagCache: its ratios; every other method: nothing, and nothing is run.

    Args: as in :func:`run_preset`, with the profiling batch for ``x`` and ``cond``.

    Raises:
      ValueError: a bad argument, by name; a call under ``jit``, for a method that is profiled.
    """
    steps = jnp.shape(timesteps)[-1] - 1
    chosen = preset(method, quality, num_steps=steps)
    site = _site(method, site, denoiser)
    described = (method, quality, steps, site)
    if method not in _PROFILED:
        return PresetProfile(*described, None)
    _check_host(method, params, x, cond, timesteps, guidance, null_cond)
    batch = (denoiser, params, x, cond)
    options = dict(
        timesteps=timesteps, sampler=sampler, guidance=guidance, null_cond=null_cond,
        cfg_channels=cfg_channels,
    )
    if method == "fuca_placed":
        _refuse_interval(method, guidance_interval)
        return PresetProfile(*described, place_fuca(*batch, nfe=chosen.schedule.nfe, **options))
    options |= dict(site=site, guidance_interval=guidance_interval)
    if method in ("fade", "lsq"):
        schedule = _with_breaks(chosen.schedule, timesteps, guidance, guidance_interval, site)
        options["schedule"] = schedule
        if method == "lsq":
            return PresetProfile(*described, profile_least_squares(*batch, **options))
        return PresetProfile(*described, fade_plan(profile_fade(*batch, **options)))
    if method == "teacache":
        signal = _tea_signal(denoiser)
        value = fit_teacache(
            *batch, degree=min(4, max(steps - 2, 0)), signal=signal, key=key, **options
        )
    else:
        value = profile_magcache(*batch, key=key, **options)
    return PresetProfile(*described, np.asarray(value))
