r"""Which steps to compute: anchors placed by dynamic programming on a profiled run.

A uniform schedule spends evaluations where the model's output hardly bends. From one full run on
a profiling batch, with outputs :math:`v_q`, the error that a segment ``s -> f`` leaves in the
state (for a sampler :math:`x' = A x + B v`) is known for every choice of neighbours,

.. math:: E(a, s, f) = \Big\lVert \sum_{q=s}^{f-1} B_q \Big(v_q - \sum_{j} \ell_j(q)\, v_j \Big)
   \Big\rVert,

with polynomial weights through the nodes ``(s, a)`` when outputs are forecast, or ``(f, s, a)``
when they are interpolated as FuCa does. A dynamic program over pairs of neighbouring anchors
finds the ``n`` anchors with the least sum of errors [design]. All norms come from the triangular
factor of the profiled outputs, ``S x S`` numbers; an orthogonal factor keeps digits that a Gram
matrix would lose.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.profile import full_run
from fadex.caching.schedule import CacheSchedule, custom_schedule
from fadex.core.checks import check_choice, check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import check_run
from fadex.sampling.samplers import Sampler, flow_euler


@jax.jit
def _triangle(outs: jax.Array) -> jax.Array:
    return jnp.linalg.qr(outs.reshape(len(outs), -1).astype(jnp.float32).T, mode="r")


def _lagrange(nodes: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Weights ``[C, Q, n]`` of interpolation through ``nodes [C, n]`` at ``at [C, Q]``."""
    gaps = nodes[:, :, None] - nodes[:, None, :]
    count = nodes.shape[1]
    weights = np.ones((*at.shape, count))
    for j in range(count):
        for i in range(count):
            if i != j:
                weights[..., j] *= (at - nodes[:, None, i]) / gaps[:, None, j, i]
    return weights


def segment_errors(
    outputs: np.ndarray, gains: np.ndarray, times: np.ndarray, step: int, kind: str, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of all segments that start at ``step`` and are at most ``width`` long.

    Args:
      outputs: ``[S, r]``, coordinates of the profiled outputs.
      gains, times: ``[S]`` and ``[S + 1]``.

    Returns:
      ``[G, H]`` by the distance (1, 2, ..) of the earlier anchor and of the end, and ``[H]`` for a
      start that has no anchor before it.
    """
    steps = len(gains)
    lengths = np.arange(1, min(width, steps - 1 - step) + 1)
    back = np.arange(1, min(width, step) + 1)
    inside = step + np.arange(len(lengths))  # every step that a segment may hold

    def errors(before: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        nodes = [np.full(len(lengths), step)]
        nodes = [step + lengths, *nodes] if kind == "interpolate" else nodes
        nodes = np.stack(nodes + ([step - before] if len(before) else []), axis=1)
        gain = gains[inside] * (inside < step + lengths[:, None])
        at = np.broadcast_to(times[inside], gain.shape)
        weights = (_lagrange(times[nodes], at) * gain[..., None]).sum(1)
        error = gain @ outputs[inside] - np.einsum("cn,cnr->cr", weights, outputs[nodes])
        return np.linalg.norm(error, axis=-1)

    alone = errors(np.zeros(0, int), lengths)
    if not len(back):
        return np.zeros((0, len(lengths))), alone
    pairs = errors(np.repeat(back, len(lengths)), np.tile(lengths, len(back)))
    return pairs.reshape(len(back), len(lengths)), alone


def profile_schedule(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    nfe: int,
    kind: str = "interpolate",
    sampler: Sampler | None = None,
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    max_interval: int = 32,
) -> CacheSchedule:
    """The schedule of ``nfe`` computed steps with the least profiled error.

    Args:
      denoiser, params, x, cond, timesteps, sampler, guidance, null_cond, cfg_channels: as in
        :func:`~fadex.caching.cached_sample`; ``x`` is the profiling batch, and a few samples do.
      nfe: computed steps; the first and the last step are always among them.
      kind: what a segment's error is taken from: ``"interpolate"``, a curve through the anchor
        ahead and the last two (FuCa's own error; in the benchmark the better choice for profiled
        forecasts, too), or ``"forecast"``, a line through the last two.
      max_interval: longest segment considered, unless ``nfe`` demands a longer one.

    Raises:
      ValueError: a bad argument, by name; a sampler with two evaluations a step.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import profile_schedule
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> late = Denoiser(lambda params, x, t, cond: params * jnp.exp(-20 * t)[:, None] + 0 * x)
      >>> profile_schedule(late, jnp.float32(1.0), jnp.ones((2, 4)), None,
      ...                  timesteps=uniform_times(20), nfe=7).anchors
      (0, 11, 14, 16, 17, 18, 19)
    """
    sampler = flow_euler() if sampler is None else sampler
    check_choice("kind", kind, ("forecast", "interpolate"))
    max_interval = check_int("max_interval", max_interval, minimum=1)
    steps = np.shape(timesteps)[-1] - 1
    nfe = check_int("nfe", nfe, minimum=1)
    if nfe > steps or (nfe == 1 and steps > 1):
        raise ValueError(f"nfe: must lie in [2, {steps}] for {steps} steps, got {nfe}")
    if sampler.stochastic or sampler.evals_per_step != 1:
        raise ValueError("sampler: needs a deterministic one with one evaluation a step")
    times, null_cond = check_run(
        x, cond, timesteps, steps, guidance, null_cond, cfg_channels, sampler, None
    )
    if times.ndim > 1:
        raise ValueError("timesteps: expected one grid [S + 1] for the profiling batch")
    if steps == 1:
        return custom_schedule(1, [0])
    _, outs = full_run(
        params, jnp.asarray(x), cond, null_cond, times, guidance, None, denoiser=denoiser,
        sampler=sampler, cfg_channels=cfg_channels,
    )
    triangle = np.asarray(_triangle(outs), np.float64)
    if not np.all(np.isfinite(triangle)):
        raise ValueError("params: the full run gave values that are not finite while profiling")
    times = np.asarray(times, np.float64)
    gains = _gains(sampler, times)
    width = min(max(max_interval, -(-(steps - 1) // (nfe - 1))), steps - 1)
    return custom_schedule(
        steps, _best_anchors(_coordinates(triangle), gains, times, nfe, kind, width)
    )


def _coordinates(triangle: np.ndarray) -> np.ndarray:
    """Outputs ``[S, r]`` in their own principal directions, those of float32 noise left out."""
    _, sizes, directions = np.linalg.svd(triangle, full_matrices=False)
    kept = sizes > 1e-7 * max(sizes[0], 1e-30)
    return (sizes[kept, None] * directions[kept]).T


def _gains(sampler: Sampler, times: np.ndarray) -> np.ndarray:
    """What an error of the output does to the state, at each step, carried to the end.

    A multistep sampler's own memory is left out: its gain is that of its first-order step.
    """
    probe = jnp.zeros((1, 1))
    gains, scales = [], []
    for t, t_next in itertools.pairwise(times):
        state = sampler.init(probe, None)
        step = lambda out, x, t=float(t), u=float(t_next), state=state: float(
            sampler.step(jnp.full((1, 1), out), jnp.full((1, 1), x), t, u, state, None)[0][0, 0]
        )
        gains.append(step(1.0, 0.0))
        scales.append(step(0.0, 1.0))
    later = np.append(np.cumprod(scales[::-1])[::-1][1:], 1.0)
    return np.asarray(gains) * later


def _best_anchors(
    outputs: np.ndarray, gains: np.ndarray, times: np.ndarray, nfe: int, kind: str, width: int
) -> list[int]:
    """Dynamic program over ``cost[count, s, g]``: ``count`` anchors, the last at ``s - g, s``."""
    steps = len(gains)
    cost = np.full((nfe + 1, steps, width + 1), np.inf)
    came = np.zeros((nfe + 1, steps, width + 1), np.int32)
    for s in range(steps - 1):
        pairs, alone = segment_errors(outputs, gains, times, s, kind, width)
        lengths = np.arange(1, len(alone) + 1)
        if s == 0:
            cost[2, lengths, lengths] = alone
            continue
        # Every run that ends at (s - g, s), lengthened to s + h.
        total = cost[2:nfe, s, 1 : len(pairs) + 1, None] + pairs
        cost[3:, s + lengths, lengths] = total.min(axis=1)
        came[3:, s + lengths, lengths] = total.argmin(axis=1) + 1
    gap = int(np.argmin(cost[nfe, steps - 1]))
    anchors, count = [steps - 1], nfe
    while count > 2:
        here = anchors[-1]
        anchors.append(here - gap)
        gap, count = int(came[count, here, gap]), count - 1
    return [*anchors, 0]
