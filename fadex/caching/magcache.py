r"""MagCache: skip while the profiled growth of the residual explains what skipping does.

Source: Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", arXiv 2506.09045.
One offline run gives the ratios :math:`\gamma_s = \operatorname{mean} \lVert r_s \rVert /
\lVert r_{s-1} \rVert` of the residual's token norms. Since the last computed step,

.. math:: p \leftarrow p\,\gamma_s, \qquad e \leftarrow e + |1 - p|,

and a step is skipped while :math:`e \le` threshold and at most ``max_skip`` steps in a row were.
The first ``retention * S`` steps are always computed.

The ratios are all the rule looks at, so its decisions are known before the run:
:func:`magcache_schedule` takes them on the host, and any forecaster can then follow the schedule.
:func:`magcache` takes the same decisions while sampling, with a threshold that may be traced.

Same rule as diffusers' ``MagCacheConfig`` with two differences: the last step is computed by
default (``cooldown=1``), and ratios of another number of steps are refused, not interpolated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.adaptive import Policy, PolicyRule, profile_changes
from fadex.caching.schedule import CacheSchedule, custom_schedule
from fadex.caching.teacache import check_threshold
from fadex.core.checks import check_finite, check_int, check_real
from fadex.core.denoiser import Denoiser
from fadex.sampling.samplers import Sampler


class MagState(NamedTuple):
    """Accumulated since the last computed step."""

    product: jax.Array  # float32 []
    error: jax.Array  # float32 []


def _init(numbers, signal):
    del numbers, signal
    return MagState(jnp.float32(1.0), jnp.float32(0.0))


def _decide(numbers, state, signal, info):
    del signal
    product = state.product * numbers["ratios"][info.step]
    error = state.error + jnp.abs(1.0 - product)
    return ~(error <= numbers["threshold"]), error, MagState(product, error)


def _settle(state, signal, recompute):
    del signal
    keep = lambda start, value: jnp.where(recompute, start, value)
    return MagState(keep(1.0, state.product), keep(0.0, state.error))


_RULE = PolicyRule(
    name="magcache", signal="none", blocks=0, init=_init, decide=_decide, settle=_settle
)


def profile_magcache(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    site: str = "crf",
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
) -> np.ndarray:
    """The ratios ``[S]`` of a full run on a profiling batch, float64; 1 at step 0.

    At the output they are 1, too, where a guidance interval begins or ends.

    Args:
      site: whose magnitudes are followed: ``"crf"``, or ``"output"`` for a model without it.

    Other arguments are those of :func:`~fadex.caching.adaptive_sample`.
    """
    return profile_changes(
        denoiser, params, x, cond, timesteps=timesteps, rule=_RULE, site=site, sampler=sampler,
        guidance=guidance, null_cond=null_cond, cfg_channels=cfg_channels,
        guidance_interval=guidance_interval, key=key,
    ).ratios


def _check(ratios: Any, threshold: Any, max_skip: int, retention: float) -> int:
    check_finite("ratios", ratios)
    if np.ndim(ratios) != 1 or np.shape(ratios)[0] < 1:
        raise ValueError(f"ratios: expected one per step [S], got shape {np.shape(ratios)}")
    check_threshold(threshold)
    check_int("max_skip", max_skip, minimum=0)
    retention = check_real("retention", retention, minimum=0.0, maximum=1.0)
    return max(int(retention * np.shape(ratios)[0] + 0.5), 1)


def magcache(
    ratios: Any, threshold: Any, *, max_skip: int = 3, retention: float = 0.2
) -> Policy:
    """MagCache as a policy for :func:`~fadex.caching.adaptive_sample`.

    Args:
      ratios: ``[S]``, from :func:`profile_magcache`; an operand.
      threshold: of the accumulated error; an operand.
      max_skip: most steps skipped in a row (``K`` of the paper).
      retention: share of the steps at the start that are always computed.

    Example:
      >>> import numpy as np
      >>> from fadex.caching import magcache
      >>> int(magcache(np.ones(50), 0.06).warmup)
      10
    """
    warmup = _check(ratios, threshold, max_skip, retention)
    numbers = {"threshold": threshold, "ratios": jnp.asarray(ratios, jnp.float32)}
    return Policy(_RULE, numbers, warmup=warmup, max_skip=max_skip)


def magcache_schedule(
    ratios: Any,
    threshold: float,
    *,
    max_skip: int = 3,
    retention: float = 0.2,
    cooldown: int = 1,
) -> CacheSchedule:
    """The decisions of :func:`magcache`, taken on the host as a static schedule.

    Example:
      >>> import numpy as np
      >>> from fadex.caching import magcache_schedule
      >>> magcache_schedule(np.full(10, 0.98), 0.05, retention=0.2).anchors
      (0, 1, 3, 5, 7, 9)
    """
    first = _check(ratios, threshold, max_skip, retention)
    cooldown = check_int("cooldown", cooldown, minimum=0)
    # float32, as on the device: a sum that meets the threshold must meet it in both places.
    ratios, one = np.asarray(ratios, np.float32), np.float32(1.0)
    product, error, skipped = one, np.float32(0.0), 0
    anchors = []
    for s, ratio in enumerate(ratios):
        product = product * ratio
        error = error + np.abs(one - product)
        fixed = s < first or s >= len(ratios) - cooldown
        if fixed or skipped >= max_skip or not error <= np.float32(threshold):
            anchors.append(s)
            product, error, skipped = one, np.float32(0.0), 0
        else:
            skipped += 1
    return custom_schedule(len(ratios), anchors)
