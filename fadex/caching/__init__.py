"""Feature caching for diffusion transformers: schedules, forecasters, plans, cached sampling."""

from fadex.caching.analysis import alpha_from_msd, mean_squared_displacement, msd_exponent
from fadex.caching.bezicast import (
    GuardConfig,
    bezicast,
    bezicast_plan,
    bezier_weights,
    simplex_projection,
    state_guarded,
)
from fadex.caching.bundle import Bundle, load_bundle, save_bundle
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
from fadex.caching.fuca_profile import profile_fuca, profile_revision
from fadex.caching.hicache import hicache
from fadex.caching.kernels import weighted_sum
from fadex.caching.least_squares import least_squares_plan, profile_least_squares
from fadex.caching.newton import newton
from fadex.caching.plan import (
    Forecaster,
    ForecastPlan,
    StepInfo,
    WeightRule,
    make_plan,
    plan_forecaster,
)
from fadex.caching.profile import GramProfile, Replay, profile_gram, replay
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, custom_schedule, uniform_schedule
from fadex.caching.taylor import taylorseer

__all__ = [
    "Bundle",
    "CacheSchedule",
    "ExportedSampler",
    "FadeGrid",
    "FadeLUT",
    "FadeParams",
    "ForecastPlan",
    "Forecaster",
    "FucaTables",
    "GramProfile",
    "GuardConfig",
    "Replay",
    "StepInfo",
    "WeightRule",
    "alpha_from_msd",
    "bezicast",
    "bezicast_plan",
    "bezier_weights",
    "cached_sample",
    "custom_schedule",
    "export_sampler",
    "fade",
    "fade_plan",
    "fade_weights",
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
    "make_plan",
    "mean_squared_displacement",
    "msd_exponent",
    "newton",
    "plan_forecaster",
    "profile_fade",
    "profile_fuca",
    "profile_gram",
    "profile_least_squares",
    "profile_revision",
    "replay",
    "reuse",
    "save_bundle",
    "save_lut",
    "simplex_projection",
    "state_guarded",
    "taylorseer",
    "uniform_schedule",
    "weighted_sum",
]
