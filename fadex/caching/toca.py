r"""ToCa: at skipped steps the MLPs of a few tokens are computed anew.

Source: Zou et al., "Accelerating Diffusion Transformers with Token-wise Feature Caching",
arXiv 2410.05317. At the anchors of a static schedule the outputs of all attention and MLP layers
are cached. At a skipped step attention is reused, and of each block's ``N`` tokens the
:math:`k = \lceil ratio \cdot N \rceil` with the highest score have their MLP output renewed in the
cache,

.. math:: \text{score}_i = \frac{r_i}{\operatorname{mean} r} + \mu\, n_i,

with ``r`` the attention received at the last anchor (many others depend on such a token) and ``n``
the steps since the token was last computed (no token stays stale for ever). The paper has further
terms: cross-attention (DiT has none) and a bonus for spatially spread choices, left out here; its
ratio varies by layer and step, ours is one number.

``k`` is static, so shapes are: ``lax.top_k``, gather, MLP, scatter. ``ratio=0`` is reuse at the
site ``"module"``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.schedule import CacheSchedule
from fadex.caching.stats import (
    cost_share,
    fold_branches,
    matmul_flops,
    plan_stats,
    relative_change,
    shapes_of,
)
from fadex.core.checks import check_finite, check_real
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_interval, check_mesh, check_run
from fadex.sampling.run import apply_step, initial_state
from fadex.sampling.samplers import Sampler, flow_euler


def choose_tokens(
    received: jax.Array, age: jax.Array, weight: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """The ``count`` tokens of highest score, and the ages afterwards.

    Args:
      received: attention received, ``[L, B, N]``.
      age: steps since each token was computed, ``[L, B, N]``, before this step.
      weight: of the age, ``mu``.
      count: ``k``, static.

    Returns:
      int32 ``[L, B, k]`` and float32 ``[L, B, N]``.
    """
    age = age + 1.0
    if count == 0:
        return jnp.zeros((*received.shape[:-1], 0), jnp.int32), age
    score = received / received.mean(-1, keepdims=True) + weight * age
    tokens = jax.lax.top_k(score, count)[1].astype(jnp.int32)
    chosen = jax.nn.one_hot(tokens, received.shape[-1], dtype=bool).any(-2)
    return tokens, jnp.where(chosen, 0.0, age)


def _toca_sample(params, x, cond, null_cond, timesteps, guidance, interval, staleness, anchor,
                 key, *, denoiser, sampler, ratio, cfg_channels, return_trajectory, return_stats):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    full, cheap = _step_functions(model, ratio)

    def body(carry, xs):
        x, state, cache = carry
        t, t_next, anchor = xs
        # The schedule is no data of the batch: the predicate has no batch axis under vmap.
        out, new = jax.lax.optimization_barrier(
            jax.lax.cond(anchor, full, functools.partial(cheap, staleness), x, t, cache)
        )
        size = relative_change(new[0], cache[0], axis=1) if return_stats else None
        x, state = apply_step(model, sampler, out, x, state, t, t_next)
        return (x, state, new), (x if return_trajectory else None, size)

    _, feature, received = jax.eval_shape(lambda: model.with_attention(x, timesteps[0]))
    cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (feature, received, received))
    carry = (x, initial_state(sampler, x, key, timesteps[0]), cache)
    (final, *_), (states, sizes) = jax.lax.scan(
        body, carry, (timesteps[:-1], timesteps[1:], anchor)
    )
    return final, jnp.concatenate([x[None], states]) if return_trajectory else None, sizes


def _step_functions(model: Guided, ratio: float):
    """``full`` and ``cheap``: ``(x, t, (feature, received, age)) -> (out, cache)``."""

    def full(x, t, cache):
        out, feature, received = model.with_attention(x, t)
        return out, (feature, received, jnp.zeros_like(cache[2]))

    def cheap(staleness, x, t, cache):
        feature, received, age = cache
        count = math.ceil(ratio * received.shape[-1] - 1e-9)
        tokens, age = choose_tokens(received, age, staleness, count)
        out, feature = model.refresh(x, t, feature, tokens)
        return out, (feature, received, age)

    return full, cheap


_STATIC = ("denoiser", "sampler", "ratio", "cfg_channels", "return_trajectory", "return_stats")
_run = jax.jit(_toca_sample, static_argnames=_STATIC)


def toca_costs(
    denoiser: Denoiser, params: Any, x: Any, cond: Any, *, ratio: float, null_cond: Any = None
) -> tuple[float, float]:
    """Matrix products of a skipped and of a computed step over a plain one's; shapes suffice.

    A computed step also finds the attention that each token receives.
    """
    t = jnp.float32(0.5)

    def step(params, x, cond, null_cond, *, kind):
        model = Guided(denoiser, params, cond, null_cond, jnp.float32(2.0), None)
        if kind == "plain":
            return model(x, t)
        full, cheap = _step_functions(model, ratio)
        _, feature, received = jax.eval_shape(lambda: model.with_attention(x, t))
        cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (feature, received, received))
        return cheap(jnp.float32(0.0), x, t, cache) if kind == "skip" else full(x, t, cache)

    shapes = shapes_of((params, x, cond, null_cond))
    skip, full, plain = (
        matmul_flops(functools.partial(step, kind=kind), *shapes)
        for kind in ("skip", "full", "plain")
    )
    return cost_share(skip, plain), cost_share(full, plain, 1.0)


def toca_sample(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    ratio: float = 0.25,
    staleness: Any = 1.0,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
    return_trajectory: bool = False,
    return_stats: bool = False,
) -> Any:
    r"""Sample with reuse at site ``"module"`` and some tokens' MLPs computed at every step.

    Args:
      schedule: which steps are computed whole; static.
      ratio: share of the tokens whose MLPs run at skipped steps, in ``[0, 1]``; static.
      staleness: :math:`\mu`, weight of a token's age in steps against attention received (whose
        mean is 1); an operand. 0 always renews the same tokens between two anchors.

    Other arguments and results are those of :func:`~fadex.caching.cached_sample`.

    Raises:
      ValueError: a bad argument by name, or a model without ``refresh`` (and the site
        ``"attention"`` of ``with_features``).

    Example:
      >>> import jax
      >>> from fadex.caching import toca_sample, uniform_schedule
      >>> from fadex.models import load_digits_dit
      >>> from fadex.sampling import uniform_times
      >>> denoiser, params = load_digits_dit()
      >>> x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
      >>> x, stats = toca_sample(denoiser, params, x, jax.numpy.array([3, 7]),
      ...                        timesteps=uniform_times(8), schedule=uniform_schedule(8, 4),
      ...                        return_stats=True)
      >>> int(stats.nfe), round(stats.skip_cost, 2)
      (5, 0.18)
    """
    sampler = flow_euler() if sampler is None else sampler
    schedule.validate()
    ratio = check_real("ratio", ratio, minimum=0.0, maximum=1.0)
    check_finite("staleness", staleness)
    if np.ndim(staleness):
        raise ValueError(f"staleness: expected a scalar, got shape {np.shape(staleness)}")
    check_mesh(x)
    if denoiser.refresh is None or denoiser.with_features is None:
        raise ValueError("denoiser: ToCa needs a model with refresh and with_features")
    times, null_cond = check_run(
        x, cond, timesteps, schedule.num_steps, guidance, null_cond, cfg_channels, sampler, key
    )
    interval = check_interval(guidance_interval, null_cond)
    anchor = np.zeros(schedule.num_steps, bool)
    anchor[list(schedule.anchors)] = True
    x = jnp.asarray(x)
    final, trajectory, sizes = _run(
        params, x, cond, null_cond, times, guidance, interval, staleness, anchor, key,
        denoiser=denoiser, sampler=sampler, ratio=ratio, cfg_channels=cfg_channels,
        return_trajectory=return_trajectory, return_stats=return_stats,
    )
    found = (final,) + ((trajectory,) if return_trajectory else ())
    if return_stats:
        sizes = fold_branches(sizes, x.shape[0]).at[0].set(jnp.nan)
        sizes = jnp.where(anchor[:, None], sizes, jnp.nan)
        skip, full = toca_costs(denoiser, params, x, cond, ratio=ratio, null_cond=null_cond)
        found += (
            plan_stats(
                schedule, sizes, skip_cost=skip, compute_cost=full,
                evals_per_step=sampler.evals_per_step,
            ),
        )
    return found if len(found) > 1 else final
