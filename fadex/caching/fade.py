r"""FADE: fractional anomalous dynamics extrapolation, as forecast weights.

A reconstruction. The abstract of FADE states that the features of diffusion transformers
evolve like anomalous diffusion, that a fractional operator of Mittag-Leffler type forecasts
them, and that its parameters are looked up in a table profiled offline; the operator itself
is not public. Ours is the exact solution of a fractional relaxation with fractional
polynomial forcing, with Caputo derivative of order :math:`\alpha`,

.. math:: D^\alpha F(t) = -\lambda (F(t) - F(a))
   + \sum_{k=1}^m g_k \frac{(t-a)^{(k-1)\alpha}}{\Gamma((k-1)\alpha + 1)}
   \;\Longrightarrow\; F(t) = F(a) + \sum_{k=1}^m g_k \psi_k(u),

.. math:: \psi_k(u) = u^{k\alpha} E_{\alpha, k\alpha+1}(-\lambda u^\alpha),
   \qquad u = (t-a)/h,

with ``h`` the latest spacing of anchors. Two discrete operators follow:

* ``form="base"``: base ``a`` at the oldest of ``m + 1`` anchors; the weights reproduce every
  solution of the model through them: ``w = V^{-T} b``, ``V_jk = psi_k(u_j)``,
  ``b_k = psi_k(u_s)``.
* ``form="memory"``: Grunwald-Letnikov differences over the last ``n`` anchors, taken
  relative to the oldest so that constants vanish,
  :math:`\nabla^\nu F = \sum_{j<n} g_j^{(\nu)} (F(a_j) - F(a_{n-1}))`, and
  :math:`\hat F = F(a_0) + \sum_{k=1}^m \tau^{k\alpha} E_{\alpha,k\alpha+1}(-\lambda\tau^\alpha)
  \nabla^{k\alpha} F`, :math:`\tau = (s-a_0)/h`.

``alpha = 1, lam = 0`` is polynomial extrapolation (``base``: Newton; ``memory``: TaylorSeer),
``alpha -> 0`` or ``lam -> inf`` is reuse: one dial between the two, profiled per cell.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from fadex.caching.plan import WeightRule
from fadex.caching.taylor import difference_ladder
from fadex.core.checks import check_choice, check_int, check_real
from fadex.core.special import gl_weights, mittag_leffler

FORMS = ("base", "memory")
HISTORY = 4
_MAX_WEIGHT = 50.0  # ||w||_1 past which a candidate is refused


class FadeParams(NamedTuple):
    """Parameters of one cell, or arrays of them over the axes of a table.

    Attributes:
      form: ``"base"`` or ``"memory"`` (0 or 1 in arrays).
      alpha: fractional order in ``(0, 2)``.
      lam: relaxation rate per ``h^alpha``; 0 is pure fractional growth.
      order: terms ``m``; 0 is reuse.
      window: anchors ``n`` of the memory form (``m < n``); unused by the base form.
      amplitude: factor ``rho`` on the forecast, 1 by default.
    """

    form: str | np.ndarray = "base"
    alpha: float | np.ndarray = 1.0
    lam: float | np.ndarray = 0.0
    order: int | np.ndarray = 1
    window: int | np.ndarray = 2
    amplitude: float | np.ndarray = 1.0


class FadeGrid(NamedTuple):
    """Candidates that profiling tries in every cell."""

    alphas: tuple[float, ...] = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
    lams_base: tuple[float, ...] = (-0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    lams_memory: tuple[float, ...] = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
    orders: tuple[int, ...] = (1, 2)
    windows: tuple[int, ...] = (2, 3, 4)
    forms: tuple[str, ...] = FORMS


def psi(k: int, alpha: float, lam: np.ndarray | float, u: np.ndarray | float) -> np.ndarray:
    r""":math:`\psi_k(u) = u^{k\alpha} E_{\alpha,k\alpha+1}(-\lambda u^\alpha)`, broadcast.

    ``psi_0 = 1`` and ``psi_k(0) = 0`` for ``k >= 1``. Entries outside of the domain of
    :func:`~fadex.core.special.mittag_leffler` (fast growth at negative ``lam``) are NaN.
    """
    lam, u = np.broadcast_arrays(np.asarray(lam, np.float64), np.asarray(u, np.float64))
    if k == 0:
        return np.ones(u.shape)
    z = -lam * u**alpha
    inside = (z <= 10.0) & (np.maximum(z, 0.0) ** (1.0 / alpha) <= 50.0)
    value = mittag_leffler(alpha, k * alpha + 1.0, np.where(inside, z, 0.0))
    return np.where(u == 0.0, 0.0, np.where(inside, u ** (k * alpha) * value, np.nan))


def _pad(weights: np.ndarray, count: int) -> np.ndarray:
    width = [(0, 0)] * (weights.ndim - 1) + [(0, count - weights.shape[-1])]
    return np.pad(weights, width)


def _base_weights(pos, s, alpha, lams, order) -> np.ndarray:
    """Base form for a vector of ``lam``: ``[L, len(pos)]``, or NaN without enough anchors."""
    if len(pos) < order + 1:
        return np.full((len(lams), len(pos)), np.nan)
    used = np.asarray(pos[: order + 1], np.float64)
    h = used[0] - used[1] if order else 1.0
    u = np.append(used, s) - used[-1]
    table = np.stack([psi(k, alpha, lams[:, None], u / h) for k in range(order + 1)], axis=-1)
    v, b = table[:, :-1], table[:, -1]
    weights = np.full((len(lams), order + 1), np.nan)
    good = np.all(np.isfinite(table), axis=(1, 2))
    good &= np.abs(np.linalg.det(np.where(good[:, None, None], v, np.eye(order + 1)))) > 1e-12
    if good.any():
        weights[good] = np.linalg.solve(np.swapaxes(v[good], 1, 2), b[good][..., None])[..., 0]
    return _pad(weights, len(pos))


def _memory_weights(pos, s, alpha, lams, order, window) -> np.ndarray:
    """Memory form for a vector of ``lam``: ``[L, len(pos)]``, NaN where it does not apply."""
    nothing = np.full((len(lams), len(pos)), np.nan)
    if len(pos) < window or order >= window:
        return nothing
    used = pos[:window]
    h = used[0] - used[1]
    if any(a - b != h for a, b in itertools.pairwise(used)):
        # Differences of a fixed grid mean nothing on a broken one. The integer operator has
        # a well-known continuation there, TaylorSeer's ladder; the others have none.
        if alpha != 1.0:
            return nothing
        ladder = _pad(difference_ladder(used, order), len(pos))
        scaled = ladder * np.power(float(h), np.arange(len(ladder)))[:, None]
    else:
        rows = [np.eye(window)[0]]
        for k in range(1, order + 1):
            row = gl_weights(k * alpha, window)
            row[-1] -= row.sum()  # relative to the oldest snapshot
            rows.append(row)
        scaled = _pad(np.stack(rows), len(pos))
    tau = (s - used[0]) / h
    factors = np.stack([psi(k, alpha, lams, tau) for k in range(len(scaled))], axis=-1)
    return factors @ scaled


def _family(form, pos, s, alpha, lams, order, window) -> np.ndarray:
    if order == 0:
        return np.tile(np.eye(len(pos))[0], (len(lams), 1))
    if form == "base":
        return _base_weights(pos, s, alpha, lams, order)
    return _memory_weights(pos, s, alpha, lams, order, window)


def check_fade_params(params: FadeParams) -> None:
    """Raise ValueError or TypeError for scalar parameters outside of their domain."""
    check_choice("form", params.form, FORMS)
    check_real("alpha", params.alpha, minimum=0.0, maximum=2.0, exclusive=True)
    check_real("lam", params.lam)
    check_int("order", params.order, minimum=0)
    check_real("amplitude", params.amplitude, minimum=0.0)
    if params.form == "memory":
        check_int("window", params.window, minimum=2)
        if params.order >= params.window:
            raise ValueError(
                f"order: must be < window={params.window} in the memory form, got {params.order}"
            )


def fade_weights(pos: tuple[int, ...], s: int, params: FadeParams) -> np.ndarray:
    """Forecast weights over the anchors ``pos`` (newest first) at step ``s``, float64.

    Where fewer anchors are known than the parameters ask for, the order (and the window)
    drops; where the last ``window`` anchors are not evenly spaced, the memory form with a
    fractional order falls back to the base form, which takes true positions.

    Raises:
      ValueError: parameters outside of their domain, or weights that are not finite.

    Example:
      >>> from fadex.caching import FadeParams, fade_weights
      >>> fade_weights((10, 6), 12, FadeParams(alpha=1.0, lam=0.0)).tolist()  # Taylor
      [1.5, -0.5]
      >>> w = fade_weights((10, 6), 12, FadeParams(alpha=0.5, lam=0.0))  # more careful
      >>> w.round(4).tolist()
      [1.2247, -0.2247]
    """
    check_fade_params(params)
    order = min(params.order, len(pos) - 1)
    window = min(params.window, len(pos))
    lams = np.array([params.lam], np.float64)
    weights = np.array([np.nan])
    if params.form == "memory" and order:
        weights = _family("memory", pos, s, params.alpha, lams, order, window)[0]
    if not np.all(np.isfinite(weights)):
        weights = _family("base", pos, s, params.alpha, lams, order, window)[0]
    if not np.all(np.isfinite(weights)):
        raise ValueError(
            f"params: weights are not finite for anchors {pos}, step {s} and {params}"
        )
    return params.amplitude * weights


def fade(params: FadeParams | None = None) -> WeightRule:
    """FADE with one fixed set of parameters for all cells (no profiling).

    A building block and an ablation; the method itself is :func:`profile_fade`.
    """
    params = FadeParams() if params is None else params
    check_fade_params(params)
    history = max(params.order + 1, params.window if params.form == "memory" else 1)
    return WeightRule("fade", history, functools.partial(_rule, params=params))


def _rule(pos: tuple[int, ...], s: int, *, params: FadeParams) -> np.ndarray:
    return fade_weights(pos, s, params)


class Candidates(NamedTuple):
    """The grid spelled out: flat arrays of parameters, in order of preference."""

    params: FadeParams  # arrays [C]
    groups: tuple[tuple[str, float, int, int, slice], ...]  # (form, alpha, order, window, rows)


@functools.lru_cache(maxsize=16)
def candidates(grid: FadeGrid) -> Candidates:
    """All parameter sets of a grid, reuse included; checked."""
    rows: list[FadeParams] = [FadeParams(order=0)]
    groups: list[tuple[str, float, int, int, slice]] = [("base", 1.0, 0, 1, slice(0, 1))]
    for form in grid.forms:
        check_choice("grid.forms", form, FORMS)
        windows = (1,) if form == "base" else grid.windows
        lams = grid.lams_base if form == "base" else grid.lams_memory
        for alpha in grid.alphas:
            for order in grid.orders:
                for window in windows:
                    if form == "memory" and order >= window:
                        continue
                    start = len(rows)
                    for lam in lams:
                        row = FadeParams(form, float(alpha), float(lam), int(order), int(window))
                        check_fade_params(row)
                        rows.append(row)
                    groups.append((form, alpha, order, window, slice(start, len(rows))))
    columns = FadeParams(
        form=np.array([FORMS.index(r.form) for r in rows], np.int8),
        alpha=np.array([r.alpha for r in rows]),
        lam=np.array([r.lam for r in rows]),
        order=np.array([r.order for r in rows], np.int8),
        window=np.array([r.window for r in rows], np.int8),
        amplitude=np.ones(len(rows)),
    )
    return Candidates(columns, tuple(groups))


def candidate_weights(
    pos: tuple[int, ...], s: int, grid: FadeGrid, history: int = HISTORY
) -> tuple[np.ndarray, np.ndarray]:
    """Weights of all candidates at one cell.

    Returns:
      ``weights [C, history]`` (zeros where refused) and ``valid [C]``. A candidate is
      refused when it has too few or unevenly spaced anchors, when its weights are not
      finite, or when the sum of their magnitudes exceeds 50.
    """
    # Weights depend on the anchors relative to the newest only.
    shifted = tuple(a - pos[0] for a in pos[:history])
    return _candidate_weights(shifted, s - pos[0], grid, history)


@functools.lru_cache(maxsize=4096)
def _candidate_weights(pos, s, grid, history):
    listed = candidates(grid)
    lam = listed.params.lam
    weights = np.full((len(lam), history), np.nan)
    for form, alpha, order, window, rows in listed.groups:
        weights[rows] = _pad(_family(form, pos, s, alpha, lam[rows], order, window), history)
    with np.errstate(invalid="ignore"):
        valid = np.abs(weights).sum(axis=1) <= _MAX_WEIGHT
    return np.where(valid[:, None], weights, 0.0), valid
