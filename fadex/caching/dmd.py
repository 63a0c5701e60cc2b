r"""DMD: forecast each sample as a sum of exponentials fitted to its own cached features.

Features along a sampling run follow a slowly varying linear ODE, whose solutions are sums of
exponentials; a polynomial is only their start. Source: Prony's method and its vector form, dynamic
mode decomposition (Schmid, J. Fluid Mech. 656, 2010), as cache-dit's DMD calibrator applies it to
cached features; written anew. With anchors a spacing ``h`` apart, newest first
:math:`F_0, F_1, \dots`, a sum of ``r`` exponentials obeys a recurrence

.. math:: F_{k} = c_1 F_{k+1} + \dots + c_r F_{k+r},

whose coefficients are a least-squares fit over all windows of the history. Its characteristic
roots :math:`\lambda` give the forecast at a fraction :math:`\tau = (s - a_0)/h` of a spacing,

.. math:: \hat F(s) = \sum_{i<r} w_i F_i, \qquad \sum_{i<r} w_i \lambda^{-i} = \lambda^\tau
   \text{ for every root } \lambda.

**Only Gram matrices.** All products of the fit are entries of the ``K x K`` Gram matrix of the
snapshots, per sample. It is formed once per anchor, from differences to the newest snapshot (raw
features agree to three digits; their raw Gram matrix would lose them). Features are touched at
anchors for the Gram matrix, and at skipped steps for a weighted sum of ``r`` of them.

**No eigenvalue solver.** Nonsymmetric ``eig`` exists on CPUs only. For ``r <= 2`` the roots and the
weights are closed forms: with :math:`\lambda_{1,2} = \rho e^{\pm\eta}`,

.. math:: w_0 = \rho^\tau \frac{\sinh((1 + \tau)\eta)}{\sinh \eta}, \qquad
   w_1 = -\rho^{1 + \tau} \frac{\sinh(\tau\eta)}{\sinh \eta},

with sines of the angle for a complex pair, and the limits :math:`1 + \tau`, :math:`\tau` for a
double root (there ``rho = 1`` is Taylor-1). Two roots hold a constant and one decay, or one
oscillation, which is what the few equally spaced anchors of a run can identify.

**Guards**, per sample: the fit needs ``2 r`` equally spaced anchors (the equally spaced suffix of
the history counts; the warm-up's close anchors do not mix with the later ones) and positive or
complex roots within a factor of four per spacing. Otherwise Taylor-1 through the last two anchors,
or reuse with one. A sample that is not finite spoils no other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.kernels import weighted_sum
from fadex.caching.plan import Forecaster, StepInfo, ring_slots
from fadex.caching.profile import extended_gram
from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_choice, check_int

_LARGEST_ROOT = 4.0
_COLLINEAR = 1e-6


class DMDState(NamedTuple):
    """Snapshots and the roots fitted at the newest anchor; ``G`` samples (or sites and samples)."""

    history: jax.Array  # [K, *feature.shape], in ring order
    growth: jax.Array  # float32 [G]: log rho
    discriminant: jax.Array  # float32 [G]: eta^2, negative for a complex pair
    rank: jax.Array  # int32 [G]: 2, 1, or 0 where the fit does not hold


def fit_roots(
    gram: jax.Array, count: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    r"""Roots of the best recurrence from Gram matrices.

    Args:
      gram: ``[G, K + 1, K + 1]`` of ``(F_0 - F_0, F_1 - F_0, .., F_{K-1} - F_0, F_0)`` by age.
      count: int32 scalar, equally spaced snapshots, newest first.
      rank: 1 or 2.

    Returns:
      ``(log rho, eta^2, rank)``, each ``[G]``; see :class:`DMDState`.
    """
    size = gram.shape[-1] - 1
    eye = jnp.eye(size + 1, dtype=jnp.float32)
    snapshots = eye[:size] + eye[size]  # F_k in the basis of the Gram matrix
    # F_k - F_{k+1} on (F_{k+1}, F_{k+1} - F_{k+2}): the same recurrence, without cancellation.
    base = snapshots[1:]
    step = eye[:size][:-1] - eye[:size][1:]
    product = lambda a, b: jnp.einsum("ki,gij,kj->gk", a, gram, b, precision="highest")

    def windows(order):
        return (jnp.arange(size - order) < count - order).astype(jnp.float32)

    def total(values, order):
        # A masked window may hold infinities of a sample that overflowed: select, don't multiply.
        return jnp.where(windows(order) > 0, values, 0.0).sum(-1)

    one = size - 1
    energy = total(product(base[:one], base[:one]), 1)
    ratio = 1.0 + total(product(base[:one], step[:one]), 1) / energy
    single = (jnp.log(ratio), jnp.zeros_like(ratio), jnp.where(ratio > 0, 1, 0))
    if rank == 1:
        return _guard(*single, enough=count >= 2)
    two = size - 2
    b, d, target = base[:two], step[1 : two + 1], step[:two]
    bb, bd, dd = (total(product(*pair), 2) for pair in ((b, b), (b, d), (d, d)))
    bt, dt = (total(product(*pair), 2) for pair in ((b, target), (d, target)))
    det = bb * dd - bd * bd
    collinear = ~(det > _COLLINEAR * bb * dd)
    safe = jnp.where(collinear, 1.0, det)
    alpha = (dd * bt - bd * dt) / safe  # F_k = F_{k+1} + alpha F_{k+1} + beta (F_{k+1} - F_{k+2})
    beta = (bb * dt - bd * bt) / safe
    # z^2 - (1 + alpha + beta) z + beta: half the trace is (1 + alpha + beta)/2, the product beta.
    half = 0.5 * (1.0 + alpha + beta)
    rho = jnp.sqrt(jnp.where(beta > 0, beta, 1.0))
    # half = rho cosh(eta); half^2 - beta without cancellation near a double root at 1.
    square = (0.25 * (1.0 - beta) ** 2 + 0.5 * alpha * (1.0 + beta) + 0.25 * alpha**2) / rho**2
    spread = jnp.sqrt(jnp.abs(square))
    eta = jnp.where(square >= 0, jnp.arcsinh(spread), jnp.arctan2(spread, half / rho))
    holds = (beta > 0) & ((half > 0) | (square < 0))
    pair = (jnp.log(rho), jnp.where(square >= 0, eta**2, -(eta**2)), jnp.where(holds, 2, 0))
    # One exponential alone (or a constant) makes the columns parallel: one root tells all.
    chosen = (jnp.where(collinear, s, p) for s, p in zip(single, pair))
    return _guard(*chosen, enough=count >= 4)


def _guard(growth, discriminant, rank, *, enough):
    spread = jnp.sqrt(jnp.maximum(discriminant, 0.0))
    bounded = jnp.abs(growth) + spread <= np.log(_LARGEST_ROOT)  # false for a NaN
    rank = jnp.where(bounded & enough, rank, 0).astype(jnp.int32)
    clean = lambda a: jnp.where(rank > 0, a, 0.0)
    return clean(growth), clean(discriminant), rank


def root_weights(
    growth: jax.Array, discriminant: jax.Array, rank: jax.Array, tau: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(w_0, w_1)`` of the closed form; Taylor-1 where ``rank`` is 0."""
    scale = jnp.exp(growth * tau)
    eta = jnp.sqrt(jnp.abs(discriminant))
    tiny = eta < 1e-4
    eta = jnp.where(tiny, 1.0, eta)
    quotient = lambda a, f: f(a * eta) / f(eta)
    pick = lambda a: jnp.where(
        tiny, a, jnp.where(discriminant > 0, quotient(a, jnp.sinh), quotient(a, jnp.sin))
    )
    w0 = jnp.where(rank == 1, scale, scale * pick(1.0 + tau))
    w1 = jnp.where(rank == 1, 0.0, -scale * jnp.exp(growth) * pick(tau))
    return jnp.where(rank == 0, 1.0 + tau, w0), jnp.where(rank == 0, -tau, w1)


@dataclasses.dataclass(frozen=True)
class _DMD:
    """The forecaster's functions; comparable, so that equal settings share a program."""

    history: int
    rank: int
    axes: int
    dtype: Any

    def groups(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape[: self.axes])  # the batch may be symbolic, in an export

    def init(self, feature: Any) -> DMDState:
        if len(feature.shape) < self.axes:
            raise ValueError(
                f"axes: expected at most the {len(feature.shape)} axes of the feature, got "
                f"{self.axes}"
            )
        dtype = feature.dtype if self.dtype is None else self.dtype
        zeros = jnp.zeros(self.groups(feature.shape), jnp.float32)
        ring = jnp.zeros((self.history, *feature.shape), dtype)
        return DMDState(ring, zeros, zeros, zeros.astype(jnp.int32))

    def observe(self, state: DMDState, feature: jax.Array, info: StepInfo) -> DMDState:
        feature = feature.astype(state.history.dtype)
        slot = info.row["order"][0]
        ring = jax.lax.dynamic_update_index_in_dim(state.history, feature, slot, 0)
        gram = extended_gram(
            ring.reshape(self.history, self.groups(feature.shape), -1),
            feature.reshape(self.groups(feature.shape), -1), self.groups(feature.shape),
        )
        order = jnp.append(info.row["order"], self.history)
        gram = gram[:, order[:, None], order[None, :]]
        return DMDState(ring, *fit_roots(gram, info.row["count"], self.rank))

    def predict(self, state: DMDState, info: StepInfo) -> jax.Array:
        row = info.row
        # Older snapshots have no weight: only the newest two are read.
        newest = [
            jax.lax.dynamic_index_in_dim(state.history, row["order"][age], 0, keepdims=False)
            for age in (0, 1)
        ]
        w0, w1 = root_weights(state.growth, state.discriminant, state.rank, row["tau"])
        alone = row["known"] < 2
        weights = jnp.stack([jnp.where(alone, 1.0, w0), jnp.where(alone, 0.0, w1)], axis=-1)
        shape = newest[0].shape
        flat = jnp.stack(newest).reshape(2, weights.shape[0], -1)
        return weighted_sum(weights, flat).reshape(shape)


# Bound methods are equal when their owner is the same object: one owner per setting, one program.
_functions = functools.lru_cache(maxsize=32)(_DMD)


@functools.lru_cache(maxsize=32)
def _table(schedule: CacheSchedule, history: int) -> dict[str, np.ndarray]:
    """Per step: spacing fraction, equally spaced anchors, known anchors, slot of each age."""
    _, column = ring_slots(schedule, history)
    tau, count, known = [], [], []
    for s in range(schedule.num_steps):
        pos = schedule.history(s, history)
        gaps = -np.diff(pos)
        same = int(np.argmin(np.append(gaps == gaps[0], False))) if len(gaps) else 0
        tau.append((s - pos[0]) / gaps[0] if len(gaps) else 0.0)
        count.append(same + 1)
        known.append(len(pos))
    return {
        "tau": np.asarray(tau, np.float32),
        "count": np.asarray(count, np.int32),
        "known": np.asarray(known, np.int32),
        "order": np.argsort(column, axis=1).astype(np.int32),
    }


def dmd(
    schedule: CacheSchedule,
    *,
    history: int = 6,
    rank: int = 2,
    axes: int = 1,
    cache_dtype: Any = None,
) -> Forecaster:
    """Exponential fit per sample, as a forecaster for :func:`~fadex.caching.cached_sample`.

    Args:
      schedule: static. Equally spaced anchors are what the fit lives on.
      history: snapshots ``K`` of the fit, at least ``2 * rank``. More see further back, where the
        dynamics were others.
      rank: exponentials per sample, 1 or 2 (two roots may be a complex pair).
      axes: leading axes of the feature with a fit of their own: 1 (samples) for the sites
        ``"output"`` and ``"crf"``, 2 (sites and samples) for ``"module"``.
      cache_dtype: dtype of the snapshots.

    Raises:
      ValueError: a history too short for the rank, or a bad number.

    Example:
      >>> import jax.numpy as jnp
      >>> from fadex.caching import cached_sample, dmd, uniform_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> forecaster = dmd(uniform_schedule(20, 3))
      >>> x = cached_sample(denoiser, jnp.float32(1.0), jnp.ones((2, 4)), None,
      ...                   timesteps=uniform_times(20), plan=forecaster)
      >>> round(float(x[0, 0]), 2), round(0.95**20, 2)
      (0.36, 0.36)
    """
    schedule.validate()
    check_choice("rank", rank, (1, 2))
    history = check_int("history", history, minimum=1)
    if history < 2 * rank:
        raise ValueError(f"history: rank {rank} needs {2 * rank} snapshots, got {history}")
    axes = check_int("axes", axes, minimum=1)
    dtype = None if cache_dtype is None else jnp.dtype(cache_dtype)
    functions = _functions(history, rank, axes, dtype)
    return Forecaster(
        schedule=schedule, init=functions.init, observe=functions.observe,
        predict=functions.predict, table=_table(schedule, history), sample_axes=axes,
    )
