"""wip"""
from fadex.caching.foca import foca
from fadex.caching.hicache import hicache
from fadex.caching.kernels import weighted_sum
from fadex.caching.newton import newton
from fadex.caching.plan import Forecaster, ForecastPlan, StepInfo, WeightRule, make_plan, plan_forecaster
from fadex.caching.reuse import reuse
from fadex.caching.sampling import cached_sample
from fadex.caching.schedule import CacheSchedule, custom_schedule, uniform_schedule
from fadex.caching.taylor import taylorseer
