"""Feature caching for diffusion transformers: schedules, forecasters, plans, cached sampling."""

from fadex.caching.adaptive import Policy, PolicyRule, adaptive_sample, profile_changes
from fadex.caching.analysis import alpha_from_msd, mean_squared_displacement, msd_exponent
from fadex.caching.bezicast import (
    STATE_GUARD,
    GuardConfig,
    bezicast,
    bezicast_plan,
    bezier_weights,
    simplex_projection,
    state_guarded,
)
from fadex.caching.bundle import Bundle, load_bundle, save_bundle
from fadex.caching.dbcache import dbcache
from fadex.caching.dmd import dmd
from fadex.caching.export import ExportedSampler, export_sampler, load_sampler
from fadex.caching.fade import FadeGrid, FadeParams, fade, fade_weights
from fadex.caching.fade_table import (
    FadeLUT,
    fade_plan,
    load_lut,
    lut_from_tree,
    lut_to_tree,
    profile_fade,
    save_lut,
)
from fadex.caching.foca import foca
from fadex.caching.fuca import FucaTables, fuca_sample, fuca_tables
from fadex.caching.fuca_profile import FucaPlan, place_fuca, profile_fuca, profile_revision
from fadex.caching.hicache import hicache
from fadex.caching.kernels import weighted_sum
from fadex.caching.least_squares import least_squares_plan, profile_least_squares
from fadex.caching.magcache import magcache, magcache_schedule, profile_magcache
from fadex.caching.newton import newton
from fadex.caching.plan import (
    Forecaster,
    ForecastPlan,
    StepInfo,
    WeightRule,
    make_plan,
    plan_forecaster,
)
from fadex.caching.presets import Preset, PresetProfile, preset, profile_preset, run_preset
from fadex.caching.profile import GramProfile, Replay, profile_gram, replay
from fadex.caching.profile_schedule import profile_schedule
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, custom_schedule, uniform_schedule
from fadex.caching.stats import CacheStats, Speedup, measure_speedup, plan_stats, summary
from fadex.caching.taylor import taylorseer
from fadex.caching.teacache import TEACACHE_FLUX, fit_teacache, teacache
from fadex.caching.toca import toca_sample

__all__ = [
    "STATE_GUARD",
    "TEACACHE_FLUX",
    "Bundle",
    "CacheSchedule",
    "CacheStats",
    "ExportedSampler",
    "FadeGrid",
    "FadeLUT",
    "FadeParams",
    "ForecastPlan",
    "Forecaster",
    "FucaPlan",
    "FucaTables",
    "GramProfile",
    "GuardConfig",
    "Policy",
    "PolicyRule",
    "Preset",
    "PresetProfile",
    "Replay",
    "Speedup",
    "StepInfo",
    "WeightRule",
    "adaptive_sample",
    "alpha_from_msd",
    "bezicast",
    "bezicast_plan",
    "bezier_weights",
    "cached_sample",
    "custom_schedule",
    "dbcache",
    "dmd",
    "export_sampler",
    "fade",
    "fade_plan",
    "fade_weights",
    "fit_teacache",
    "foca",
    "fuca_sample",
    "fuca_tables",
    "hicache",
    "least_squares_plan",
    "load_bundle",
    "load_lut",
    "load_sampler",
    "lut_from_tree",
    "lut_to_tree",
    "magcache",
    "magcache_schedule",
    "make_plan",
    "mean_squared_displacement",
    "measure_speedup",
    "msd_exponent",
    "newton",
    "place_fuca",
    "plan_forecaster",
    "plan_stats",
    "preset",
    "profile_changes",
    "profile_fade",
    "profile_fuca",
    "profile_gram",
    "profile_least_squares",
    "profile_magcache",
    "profile_preset",
    "profile_revision",
    "profile_schedule",
    "replay",
    "reuse",
    "run_preset",
    "save_bundle",
    "save_lut",
    "simplex_projection",
    "state_guarded",
    "summary",
    "taylorseer",
    "teacache",
    "toca_sample",
    "uniform_schedule",
    "weighted_sum",
]
