r"""Least-squares forecasting: the best ``K`` free weights per step on profiling samples.

.. math:: \min_w \Big\lVert \sum_{j<K} w_j F(a_j) - T(s) \Big\rVert^2

The floor of what any linear forecaster with ``K`` snapshots can reach on the profiling
samples (the idea behind learned linear predictors, arXiv 2604.26365), and the honest
baseline for every rule with fewer parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fadex.caching.plan import ForecastPlan
from fadex.caching.profile import GramProfile, profile_gram, replay
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_choice, check_int, check_real
from fadex.core.denoiser import Denoiser


def solve_weights(gram: np.ndarray, known: int, *, affine: bool, ridge: float) -> np.ndarray:
    """Minimise the quadratic form of one cell over its first ``known`` weights.

    Works on ``w = e_0 + u`` (corrections to reuse), where the Gram matrix is small and well
    scaled; the ridge is relative to its mean diagonal. ``affine`` keeps ``sum w = 1``.
    """
    history = len(gram) - 1
    weights = np.zeros(history)
    if known < 1:
        return weights
    # z = (w, sum w - 1) = start + basis u
    free = known - 1 if affine else known
    basis = np.zeros((history + 1, free))
    if affine:
        basis[0], basis[np.arange(1, known), np.arange(free)] = -1.0, 1.0
    else:
        basis[np.arange(known), np.arange(free)] = 1.0
        basis[-1] = 1.0
    start = np.zeros(history + 1)
    start[0] = 1.0
    weights[0] = 1.0
    if free:
        normal = basis.T @ gram @ basis
        normal += ridge * np.trace(normal) / free * np.eye(free)
        # A singular cell (snapshots equal on all samples) has no unique minimiser.
        u = np.linalg.lstsq(normal, -basis.T @ gram @ start, rcond=1e-12)[0]
        weights += (basis @ u)[:history]
    return weights


def least_squares_plan(
    profile: GramProfile, *, history: int = 3, affine: bool = False, ridge: float = 1e-6
) -> ForecastPlan:
    """Least-squares weights for every cell of an open-loop profile.

    Args:
      profile: from :func:`~fadex.caching.profile_gram`.
      history: snapshots ``K`` used, at most those of the profile.
      affine: require ``sum w = 1``.
      ridge: relative Tikhonov term on the corrections to reuse; the default lies just above
        the rounding of a float32 Gram matrix.
    """
    history = check_int("history", history, minimum=1)
    ridge = check_real("ridge", ridge, minimum=0.0)
    steps, sites, size, _ = profile.gram.shape
    if history > size - 1:
        raise ValueError(f"history: the profile holds {size - 1} snapshots, got {history}")
    keep = [*range(history), size - 1]
    weights = np.zeros((steps, sites, history))
    for s in profile.schedule.skipped:
        known = len(profile.schedule.history(s, history))
        for g in range(sites):
            gram = profile.gram[s, g][np.ix_(keep, keep)]
            weights[s, g] = solve_weights(gram, known, affine=affine, ridge=ridge)
    return ForecastPlan(profile.schedule, weights if profile.site == "module" else weights[:, 0])


def profile_least_squares(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    schedule: CacheSchedule,
    mode: str = "open",
    history: int = 3,
    affine: bool = False,
    ridge: float = 1e-6,
    site: str = "output",
    **kwargs: Any,
) -> ForecastPlan:
    """Profile and solve in one call; arguments as in :func:`~fadex.caching.profile_fade`.

    ``mode="closed"`` replays the cached run with drift-aware targets: the practical floor of
    linear forecasting with ``K`` snapshots (greedy over steps, so slightly beatable).
    """
    check_choice("mode", mode, ("open", "closed"))
    shared = dict(schedule=schedule, history=history, **kwargs)
    if mode == "open":
        profile = profile_gram(denoiser, params, x, cond, site=site, **shared)
        return least_squares_plan(profile, history=history, affine=affine, ridge=ridge)
    if site != "output":
        raise ValueError(f"mode: 'closed' needs site='output', got site={site!r}")

    def choose(s, pos, gram):
        return solve_weights(gram, len(pos), affine=affine, ridge=ridge)

    return ForecastPlan(
        schedule, replay(denoiser, params, x, cond, choose=choose, **shared).weights
    )
