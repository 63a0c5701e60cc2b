r"""TeaCache: compute again when the accumulated change of the first block's input is large.

Source: Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model",
arXiv 2411.19108. With the modulated input :math:`m_s` of the first block,

.. math:: d_s = \frac{\operatorname{mean} |m_s - m_{s-1}|}{\operatorname{mean} |m_{s-1}|},
   \qquad a \leftarrow a + P(d_s),

a step is computed when :math:`a \ge` threshold, and then :math:`a \leftarrow 0`. The polynomial
``P`` turns the change of the input into that of the output; it is fitted once per model
(:func:`fit_teacache`), which makes the threshold a relative change of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.adaptive import (
    NO_LIMIT,
    REDUCTIONS,
    SIGNALS,
    Policy,
    PolicyRule,
    profile_changes,
    signal_change,
)
from fadex.core.checks import check_choice, check_finite, check_int, check_real, is_concrete
from fadex.core.denoiser import Denoiser
from fadex.sampling.samplers import Sampler

# Published for FLUX.1-dev, highest power first.
TEACACHE_FLUX = (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)


class TeaState(NamedTuple):
    """What TeaCache remembers."""

    previous: Any  # the signal of the previous step, computed or not
    total: jax.Array  # float32 [B] ("any") or []: accumulated change since the last computed step


def _init(numbers, signal, *, reduce):
    del numbers
    rows = jax.tree.leaves(signal)[0].shape[:1] if reduce == "any" else ()
    return TeaState(signal, jnp.zeros(rows, jnp.float32))


def _decide(numbers, state, signal, info, *, reduce):
    change = signal_change(signal, state.previous, reduce)
    # The first step has nothing before it; it is computed in any case.
    total = state.total + jnp.where(info.step == 0, 0.0, jnp.polyval(
        jnp.asarray(numbers["coefficients"], jnp.float32), change
    ))
    wanted = ~(total < numbers["threshold"])  # also true for a NaN
    return wanted, total, TeaState(signal, total)


def _settle(state, signal, recompute):
    del signal
    return state._replace(total=jnp.where(recompute, 0.0, state.total))


@functools.lru_cache(maxsize=32)
def _rule(signal: str, reduce: str) -> PolicyRule:
    return PolicyRule(
        name="teacache", signal=signal, blocks=int(signal == "first_block"),
        init=functools.partial(_init, reduce=reduce),
        decide=functools.partial(_decide, reduce=reduce),
        settle=_settle,
    )


def teacache(
    threshold: Any,
    coefficients: Sequence[float] | Any = (1.0, 0.0),
    *,
    reduce: str = "any",
    signal: str = "modulated",
    max_skip: int | None = None,
) -> Policy:
    r"""TeaCache as a policy for :func:`~fadex.caching.adaptive_sample`.

    Args:
      threshold: accumulated change from which a step is computed; an operand. 0 computes all.
      coefficients: of ``P``, highest power first; the identity by default. FLUX.1-dev:
        :data:`TEACACHE_FLUX`; for a model of yours: :func:`fit_teacache`.
      reduce: how a batch decides. ``"any"``: each sample accumulates for itself, and the first to
        cross has all of them computed. ``"mean"``: one statistic of the whole batch, as in the
        paper's code. ``"max"``: the largest change of each step is accumulated.
      signal: ``"modulated"``, or ``"first_block"`` or ``"latent"`` (with any model).
      max_skip: most steps skipped in a row.

    Example:
      >>> from fadex.caching import teacache
      >>> teacache(0.1).rule.signal
      'modulated'
    """
    check_choice("reduce", reduce, REDUCTIONS)
    check_choice("signal", signal, [name for name in SIGNALS if name != "none"])
    check_threshold(threshold)
    check_finite("coefficients", coefficients)
    if np.ndim(coefficients) != 1 or np.shape(coefficients)[0] < 1:
        raise ValueError(
            "coefficients: expected a vector, highest power first, got shape "
            f"{np.shape(coefficients)}"
        )
    numbers = {"threshold": threshold, "coefficients": jnp.asarray(coefficients, jnp.float32)}
    limit = NO_LIMIT if max_skip is None else check_int("max_skip", max_skip, minimum=0)
    return Policy(_rule(signal, reduce), numbers, max_skip=limit)


def fit_teacache(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    degree: int = 4,
    signal: str = "modulated",
    site: str = "crf",
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
) -> np.ndarray:
    """Fit ``P``: from the change of the signal to the change of the feature, step by step.

    One full run on a profiling batch; least squares in float64 on the host, all steps and samples
    weighing the same.

    Args:
      degree: of the polynomial. At least ``degree + 1`` different changes are needed.
      signal, site: as the policy and :func:`~fadex.caching.adaptive_sample` will use them.

    Other arguments are those of :func:`~fadex.caching.adaptive_sample`.

    Returns:
      Coefficients ``[degree + 1]``, highest power first.

    Raises:
      ValueError: too few steps for the degree, or a run that is not finite.
    """
    degree = check_int("degree", degree, minimum=0)
    profile = profile_changes(
        denoiser, params, x, cond, timesteps=timesteps, rule=_rule(signal, "any"), site=site,
        sampler=sampler, guidance=guidance, null_cond=null_cond, cfg_channels=cfg_channels,
        guidance_interval=guidance_interval, key=key,
    )
    # With guidance both branches of the model are points of their own; the guided output is one.
    rows = min(profile.signal.shape[1], profile.feature.shape[1])
    kept = np.isfinite(profile.signal[:, 0])  # neither the first step nor a jump of the output
    before, after = (a[kept, :rows].reshape(-1) for a in (profile.signal, profile.feature))
    if len(np.unique(before)) <= degree:
        raise ValueError(
            f"degree: {degree} needs more than {degree} different changes, the run gave "
            f"{len(np.unique(before))}"
        )
    # Scaled to [0, 1], the Vandermonde matrix keeps its digits.
    scale = before.max()
    fitted = np.polynomial.polynomial.polyfit(before / scale, after, degree)
    return (fitted / scale ** np.arange(degree + 1))[::-1].copy()


def check_threshold(threshold: Any) -> None:
    """Raise for a concrete threshold that is no number >= 0; traced ones pass."""
    if np.ndim(threshold):
        raise ValueError(f"threshold: expected a scalar, got shape {np.shape(threshold)}")
    if is_concrete(threshold):
        array = isinstance(threshold, (jax.Array, np.ndarray))
        check_real("threshold", threshold.item() if array else threshold, minimum=0.0)
