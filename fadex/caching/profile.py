r"""Offline profiling: what a forecast error would be, for any weights, from one pass.

For weights ``w`` over ``K`` snapshots and a target ``T``, with ``D_j = F(a_j) - T``,

.. math:: \Big\lVert \sum_j w_j F(a_j) - T \Big\rVert^2
   = z^\top E z, \qquad z = (w, \textstyle\sum_j w_j - 1),

where ``E`` is the Gram matrix of ``(D_0, .., D_{K-1}, T)``. Per cell ``(K + 1)^2`` numbers
replace the features, and every candidate costs ``O(K^2)`` on them. Differences to the target
(not raw features) keep the digits: the errors sought are a millionth of the features' norm.

* :func:`profile_gram`: targets from the full run (open loop), at any site.
* :func:`replay`: the cached run itself, cell by cell, with drift-aware targets (closed loop).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.kernels import weighted_sum
from fadex.caching.plan import ring_slots
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_choice, check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_interval, check_run
from fadex.sampling.run import apply_step, initial_state
from fadex.sampling.samplers import Sampler, flow_euler

SITES = ("output", "crf", "module")


class GramProfile(NamedTuple):
    """Open-loop profile of a schedule.

    Attributes:
      schedule, site: what was profiled.
      gram: float64 ``[S, G, K + 1, K + 1]``, sums over the batch; the first ``K`` axes by age
        of the snapshot (0 newest), the last one the target itself. Rows of anchors and
        snapshots that do not exist yet are zero.
      samples: profiled samples.
    """

    schedule: CacheSchedule
    site: str
    gram: np.ndarray
    samples: int


def gram_errors(gram: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Squared forecast errors ``[..., C]`` of weights ``[..., C, K]`` from ``[..., K+1, K+1]``."""
    z = np.concatenate([weights, weights.sum(-1, keepdims=True) - 1.0], axis=-1)
    return np.maximum(np.einsum("...ci,...ij,...cj->...c", z, gram, z), 0.0)


def optimal_amplitude(
    gram: np.ndarray, weights: np.ndarray, *, low: float = 0.8, high: float = 1.25
) -> np.ndarray:
    """Best factor ``<y, T> / <y, y>`` on the forecasts ``y`` of ``weights``, clipped: ``[..., C]``.

    With ``y = sum_j w_j D_j + (sum_j w_j) T`` both products are quadratic forms of the same
    Gram matrix.
    """
    z = np.concatenate([weights, weights.sum(-1, keepdims=True)], axis=-1)
    projected = np.einsum("...ij,...cj->...ci", gram, z)
    norm = np.einsum("...ci,...ci->...c", z, projected)
    return np.clip(projected[..., -1] / np.maximum(norm, 1e-30), low, high)


def extended_gram(snapshots: jax.Array, target: jax.Array, sites: int) -> jax.Array:
    """``E`` ``[G, K+1, K+1]`` of snapshots ``[K, ...]`` and a target ``[...]``, in float32."""
    target = target.astype(jnp.float32)
    stacked = jnp.concatenate([snapshots.astype(jnp.float32) - target, target[None]])
    stacked = stacked.reshape(stacked.shape[0], sites, -1)
    return jnp.einsum("igm,jgm->gij", stacked, stacked, precision="highest")


@functools.partial(
    jax.jit, static_argnames=("denoiser", "sampler", "site", "cfg_channels", "history")
)
def _collect(params, x, cond, null_cond, timesteps, guidance, interval, key, is_anchor, slot, *,
             denoiser, sampler, site, cfg_channels, history):
    """One full run; Gram matrices of every step, in ring order ``[S, G, K+1, K+1]``."""
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)

    def evaluate(x, t):
        if site == "output":
            out = model(x, t)
            return out, out
        return model.with_features(x, t, site)

    feature = jax.eval_shape(lambda: evaluate(x, timesteps[0])[1])
    sites = feature.shape[0] if site == "module" else 1

    def body(carry, xs):
        x, state, ring = carry
        t, t_next, anchor, slot = xs
        out, feature = evaluate(x, t)
        gram = extended_gram(ring, feature, sites)
        written = jax.lax.dynamic_update_index_in_dim(ring, feature, slot, 0)
        ring = jnp.where(anchor, written, ring)
        x, state = apply_step(model, sampler, out, x, state, t, t_next)
        return (x, state, ring), gram

    ring = jnp.zeros((history, *feature.shape), feature.dtype)
    carry = (x, initial_state(sampler, x, key, timesteps[0]), ring)
    _, grams = jax.lax.scan(body, carry, (timesteps[:-1], timesteps[1:], is_anchor, slot))
    return grams


def _anchor_mask(schedule: CacheSchedule) -> np.ndarray:
    mask = np.zeros(schedule.num_steps, bool)
    mask[list(schedule.anchors)] = True
    return mask


def profile_gram(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    schedule: CacheSchedule,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
    history: int = 4,
) -> GramProfile:
    """Run the full sampler once and keep one small Gram matrix per skipped step and site.

    Arguments are those of :func:`~fadex.caching.cached_sample`; ``history`` is ``K``.
    """
    sampler = flow_euler() if sampler is None else sampler
    schedule.validate()
    history = check_int("history", history, minimum=1)
    check_site(denoiser, site)
    timesteps, null_cond = check_run(
        x, cond, timesteps, schedule.num_steps, guidance, null_cond, cfg_channels, sampler, key
    )
    interval = check_interval(guidance_interval, null_cond)
    slot, column = ring_slots(schedule, history)
    mask = _anchor_mask(schedule)
    grams = _collect(
        params, jnp.asarray(x), cond, null_cond, timesteps, guidance, interval, key, mask, slot,
        denoiser=denoiser, sampler=sampler, site=site, cfg_channels=cfg_channels, history=history,
    )
    gram = np.asarray(grams, np.float64)
    gram = np.stack(
        [[_by_age(site_gram, column[s]) for site_gram in gram[s]] for s in range(len(gram))]
    )
    gram[mask] = 0.0
    known = np.array([len(schedule.history(s, history)) for s in range(schedule.num_steps)])
    absent = np.arange(history)[None, :] >= known[:, None]
    absent = np.concatenate([absent, np.zeros((len(absent), 1), bool)], axis=1)
    gram = np.where((absent[:, None, :, None] | absent[:, None, None, :]), 0.0, gram)
    if not np.all(np.isfinite(gram)):
        raise ValueError("params: the full run gave values that are not finite while profiling")
    return GramProfile(schedule, site, gram, int(jnp.shape(x)[0]))


class Replay(NamedTuple):
    """Outcome of a closed-loop replay.

    Attributes:
      weights: float64 ``[S, K]`` by age of the snapshot; rows of anchors are zero.
      gram: float64 ``[S, 1, K + 1, K + 1]`` against the drift-aware targets.
      rel_error: mean relative error of the replayed samples to those of the full run.
    """

    weights: np.ndarray
    gram: np.ndarray
    rel_error: float


_REPLAY_STATIC = ("denoiser", "sampler", "cfg_channels")


@functools.partial(jax.jit, static_argnames=_REPLAY_STATIC)
def full_run(params, x, cond, null_cond, timesteps, guidance, interval, *, denoiser, sampler,
              cfg_channels):
    """States ``[S + 1, ...]`` and outputs ``[S, ...]`` of the run that computes every step."""
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)

    def body(carry, times):
        x, state = carry
        t, t_next = times
        out = jax.lax.optimization_barrier(model(x, t))
        x, state = apply_step(model, sampler, out, x, state, t, t_next)
        return (x, state), (x, out)

    times = (timesteps[:-1], timesteps[1:])
    start = (x, initial_state(sampler, x, None, timesteps[0]))
    _, (states, outs) = jax.lax.scan(body, start, times)
    return jnp.concatenate([x[None], states]), outs


@functools.partial(jax.jit, static_argnames=_REPLAY_STATIC)
def _replay_anchor(params, carry, ring, slot, t, t_next, cond, null_cond, guidance, interval, *,
                   denoiser, sampler, cfg_channels):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    x, state = carry
    out = model(x, t)
    ring = jax.lax.dynamic_update_index_in_dim(ring, out, slot, 0)
    return apply_step(model, sampler, out, x, state, t, t_next), ring


@functools.partial(jax.jit, static_argnames=("sampler",))
def _replay_gram(carry, ring, out_full, x_next_full, drift, t, t_next, *, sampler):
    """Gram matrix of the snapshots against the drift-aware target at this step."""
    x, state = jax.tree.map(lambda a: a.astype(jnp.float32), carry)
    step = lambda out: sampler.step(out, x, t, t_next, state, None)[0]
    # A step is affine in the model output, x' = A + b v, so one output lands exactly on the
    # full run's next state and undoes the drift that earlier skips left behind.
    base = step(jnp.zeros_like(x))
    landing = (x_next_full - base) / (step(jnp.ones_like(x)) - base)
    out_full = out_full.astype(jnp.float32)
    return extended_gram(ring, out_full + drift * (landing - out_full), 1)[0]


@functools.partial(jax.jit, static_argnames=("sampler",))
def _replay_skip(carry, ring, weights, t, t_next, *, sampler):
    x, state = carry
    return apply_step(None, sampler, weighted_sum(weights, ring), x, state, t, t_next)


def replay(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    choose: Callable[[int, tuple[int, ...], np.ndarray], np.ndarray],
    timesteps: Any,
    schedule: CacheSchedule,
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    drift: float = 1.0,
    history: int = 4,
) -> Replay:
    r"""Replay the cached run on profiling samples and choose weights cell by cell.

    What counts in the end is the error of the state, and it is made by all skips together.
    At each skipped step the target is therefore not the full run's output :math:`v^*` but

    .. math:: T = v^* + \mu\, (v_{land} - v^*),

    where :math:`v_{land}` takes the *replayed* state to the full run's next state; for Euler
    :math:`v_{land} = v^* + (x^*_s - x_s)/\Delta t_s`.

    Args:
      choose: ``choose(step, pos, gram[K+1, K+1]) -> w[K]`` in host float64; called in order.
      drift: :math:`\mu`; 0 ignores the state error.

    Other arguments are those of :func:`~fadex.caching.cached_sample`. Site ``"output"`` only,
    and samplers with one evaluation a step.
    """
    sampler = flow_euler() if sampler is None else sampler
    schedule.validate()
    history = check_int("history", history, minimum=1)
    if sampler.stochastic or sampler.evals_per_step != 1:
        raise ValueError(
            "sampler: closed-loop profiling needs a deterministic sampler with one evaluation "
            "a step"
        )
    timesteps, null_cond = check_run(
        x, cond, timesteps, schedule.num_steps, guidance, null_cond, cfg_channels, sampler, None
    )
    interval = check_interval(guidance_interval, null_cond)
    x = jnp.asarray(x)
    static = dict(denoiser=denoiser, sampler=sampler, cfg_channels=cfg_channels)
    states, outs = full_run(
        params, x, cond, null_cond, timesteps, guidance, interval, **static
    )
    if not bool(jnp.all(jnp.isfinite(states))):
        raise ValueError("params: the full run gave values that are not finite while profiling")
    slot, column = ring_slots(schedule, history)
    weights = np.zeros((schedule.num_steps, history))
    grams = np.zeros((schedule.num_steps, 1, history + 1, history + 1))
    carry = (x, initial_state(sampler, x, None, timesteps[0]))
    ring = jnp.zeros((history, *x.shape), outs.dtype)
    for s in range(schedule.num_steps):
        t, t_next = timesteps[s], timesteps[s + 1]
        if schedule.is_anchor(s):
            carry, ring = _replay_anchor(
                params, carry, ring, slot[s], t, t_next, cond, null_cond, guidance, interval,
                **static
            )
            continue
        gram = _replay_gram(
            carry, ring, outs[s], states[s + 1], jnp.float32(drift), t, t_next, sampler=sampler
        )
        gram = _by_age(np.asarray(gram, np.float64), column[s])
        if not np.all(np.isfinite(gram)):
            raise ValueError(
                f"schedule: the replayed run diverged before step {s}; compute more steps"
            )
        pos = schedule.history(s, history)
        gram[len(pos) : -1] = 0.0
        gram[:, len(pos) : -1] = 0.0
        grams[s, 0] = gram
        weights[s] = choose(s, pos, gram)
        ordered = jnp.asarray(weights[s][column[s]], jnp.float32)
        carry = _replay_skip(carry, ring, ordered, t, t_next, sampler=sampler)
    final = states[-1]
    gap = jnp.linalg.norm((carry[0] - final).reshape(len(x), -1), axis=1)
    size = jnp.linalg.norm(final.reshape(len(x), -1), axis=1)
    return Replay(weights, grams, float(jnp.mean(gap / size)))


def _by_age(gram: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Reorder ``[K+1, K+1]`` from ring slots to age of the snapshot (0 newest)."""
    order = np.append(np.argsort(column), len(column))
    return gram[np.ix_(order, order)]


def check_site(denoiser: Denoiser, site: str) -> None:
    """Raise ValueError for an unknown site, or one that the model does not offer."""
    check_choice("site", site, SITES)
    for name in ("with_features", "from_features"):
        if site != "output" and getattr(denoiser, name) is None:
            raise ValueError(f"site: model has no {name}, so site={site!r} is not available")
