r"""What a cached run did: computed and skipped steps, residual sizes, estimated and measured gain.

With ``S`` steps of which ``C`` are computed, a skipped step that costs ``r`` steps of the plain run
and a computed one that costs ``c`` (matrix products, counted by :func:`matmul_flops`; ``c`` exceeds
1 where a method computes scores or a signal beside the model), the estimate is

.. math:: \text{speed-up} = \frac{S}{C\, c + (S - C)\, r},

which is ``S / NFE`` where skipped steps are free and computed ones are plain. The measured one is
a ratio of medians of interleaved runs, :func:`measure_speedup`. A threshold that decided nothing
is reported as inert: too high (only warm-up, cool-down and the skip limit computed anything) or
too low (nothing was ever skipped).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.schedule import CacheSchedule
from fadex.core.checks import check_int


class CacheStats(flax.struct.PyTreeNode):
    """Statistics of one cached run; a pytree, so runs inside ``jit`` and ``vmap`` return it.

    Attributes:
      computed: bool ``[S]``; the other steps were skipped.
      wanted: bool ``[S]``: the threshold asked for this step. Equal to ``computed`` for a
        static schedule.
      fixed: bool ``[S]``: computed in any case (warm-up, cool-down; every anchor of a static
        schedule). A step that is computed but neither wanted nor fixed met the skip limit.
      sizes: ``[S]`` or ``[S, B]``. Adaptive policies: what the threshold is compared with, per
        step. Static schedules: relative change of the feature since the previous computed
        step (ToCa: to the renewed cache that it replaces), NaN at skipped steps. NaN where
        there is nothing to compare.
      threshold: of the policy, or None.
      skip_cost: cost of a skipped step over that of a step of the plain run, in matrix products.
      compute_cost: the same of a computed step; above 1 where more than the model runs.
      evals_per_step: of the sampler.
      measured_speedup: None until measured.
    """

    computed: Any
    wanted: Any
    fixed: Any
    sizes: Any
    threshold: Any = None
    skip_cost: float = flax.struct.field(pytree_node=False, default=0.0)
    evals_per_step: int = flax.struct.field(pytree_node=False, default=1)
    compute_cost: float = flax.struct.field(pytree_node=False, default=1.0)
    measured_speedup: float | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def num_steps(self) -> int:
        """``S``."""
        return self.computed.shape[-1]

    @property
    def steps_computed(self) -> Any:
        """``C``."""
        return self.computed.sum(-1)

    @property
    def nfe(self) -> Any:
        """Model evaluations, those of a sampler's later stages included."""
        return self.steps_computed + (self.evals_per_step - 1) * self.num_steps

    @property
    def estimated_speedup(self) -> Any:
        """The formula of the module's docstring, with a sampler's later stages always computed."""
        extra = (self.evals_per_step - 1) * self.num_steps
        skipped = self.num_steps - self.steps_computed
        cost = self.steps_computed * self.compute_cost + extra + skipped * self.skip_cost
        return self.num_steps * self.evals_per_step / cost

    @property
    def inert_reason(self) -> str:
        """Why the threshold decided nothing, or an empty string. Reads values: outside ``jit``."""
        if self.threshold is None:
            return ""
        computed, wanted, fixed = (
            np.asarray(a).reshape(-1, self.num_steps)[0]
            for a in (self.computed, self.wanted, self.fixed)
        )
        free = ~fixed
        if not free.any():
            return "every step lies in the warm-up or cool-down, so no threshold could act"
        sizes = np.asarray(self.sizes, np.float64).reshape(-1, *np.shape(self.sizes))
        sizes = sizes[..., free, :] if np.ndim(self.sizes) > np.ndim(self.computed) else (
            sizes[..., free]
        )
        sizes = sizes[np.isfinite(sizes)]
        limit = float(np.max(self.threshold))
        if not (wanted & free).any():
            largest = f" (largest {sizes.max():.3g})" if sizes.size else ""
            acted = "the skip limit" if (computed & free).any() else "nothing"
            return (
                f"threshold {limit:.3g} lies above every observed size{largest}; after the "
                f"warm-up {acted} asked for a computed step"
            )
        if computed.all():
            smallest = f" (smallest {sizes.min():.3g})" if sizes.size else ""
            return f"threshold {limit:.3g} asked for every step{smallest}; nothing was skipped"
        return ""

    @property
    def inert(self) -> bool:
        """Whether the threshold decided nothing."""
        return bool(self.inert_reason)


def plan_stats(
    schedule: CacheSchedule,
    sizes: Any = None,
    *,
    skip_cost: float = 0.0,
    compute_cost: float = 1.0,
    evals_per_step: int = 1,
) -> CacheStats:
    """:class:`CacheStats` of a static schedule, whose decisions are known beforehand.

    Args:
      schedule: the plan's.
      sizes: relative change of the feature between computed steps, ``[S]`` or ``[S, B]`` with
        NaN at skipped steps; NaN everywhere by default.
      skip_cost, compute_cost, evals_per_step: as in :class:`CacheStats`.

    Example:
      >>> from fadex.caching import plan_stats, summary, uniform_schedule
      >>> print(summary(plan_stats(uniform_schedule(10, 4))))
      5 of 10 steps computed (0 1 2 6 9), 5 skipped; estimated speed-up 2.00x
    """
    schedule.validate()
    computed = np.zeros(schedule.num_steps, bool)
    computed[list(schedule.anchors)] = True
    sizes = np.full(schedule.num_steps, np.nan, np.float32) if sizes is None else sizes
    return CacheStats(
        computed=computed, wanted=computed, fixed=computed, sizes=sizes, skip_cost=skip_cost,
        compute_cost=compute_cost, evals_per_step=evals_per_step,
    )


def relative_change(new: Any, old: Any, axis: int = 0) -> jax.Array:
    r"""Per sample :math:`\lVert new - old \rVert_1 / \lVert old \rVert_1`, ``[B]``, in float32.

    Args:
      new, old: arrays, or pytrees of arrays whose norms are then summed.
      axis: where the samples lie.
    """
    rows = lambda a: jnp.moveaxis(a, axis, 0).reshape(a.shape[axis], -1).astype(jnp.float32)
    total = lambda tree: sum(jnp.abs(leaf).sum(-1) for leaf in jax.tree.leaves(tree))
    new, old = jax.tree.map(rows, new), jax.tree.map(rows, old)
    return safe_ratio(total(jax.tree.map(jnp.subtract, new, old)), total(old))


def safe_ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Their ratio; 0 for ``0 / 0`` (nothing moved), infinity for a move away from zero."""
    ratio = numerator / jnp.where(denominator == 0, 1.0, denominator)
    ratio = jnp.where((denominator == 0) & (numerator > 0), jnp.inf, ratio)
    return jnp.where(numerator == 0, 0.0, ratio)


def summary(stats: CacheStats) -> str:
    """One line for people: which steps ran, how large the residuals were, what it gained."""
    computed = np.asarray(stats.computed).reshape(-1, stats.num_steps)[0]
    steps = np.flatnonzero(computed)
    shown = " ".join(map(str, steps if len(steps) <= 24 else [*steps[:20], "...", steps[-1]]))
    text = (
        f"{len(steps)} of {stats.num_steps} steps computed ({shown}), "
        f"{stats.num_steps - len(steps)} skipped"
    )
    sizes = np.asarray(stats.sizes, np.float64)
    sizes = sizes[np.isfinite(sizes)]
    if sizes.size:
        low, middle, high = np.quantile(sizes, (0.0, 0.5, 1.0))
        text += f"; sizes {low:.3g} to {high:.3g}, median {middle:.3g}"
        if stats.threshold is not None:
            text += f", threshold {float(np.max(stats.threshold)):.3g}"
    text += f"; estimated speed-up {float(np.mean(stats.estimated_speedup)):.2f}x"
    if stats.measured_speedup is not None:
        text += f", measured {stats.measured_speedup:.2f}x"
    reason = stats.inert_reason
    return f"{text}; INERT: {reason}" if reason else text


class Speedup(NamedTuple):
    """Medians in seconds, and their ratio."""

    full: float
    cached: float
    speedup: float


def measure_speedup(
    full: Callable[[], Any], cached: Callable[[], Any], repeats: int = 5
) -> Speedup:
    """Time two calls in turn and compare their medians; the first call of each is not counted.

    Args:
      full, cached: functions without arguments that return arrays, e.g. lambdas around
        :func:`~fadex.sampling.sample` and :func:`~fadex.caching.cached_sample`.
      repeats: timed runs of each.

    Returns:
      :class:`Speedup`; ``stats.replace(measured_speedup=result.speedup)`` keeps it.
    """
    repeats = check_int("repeats", repeats, minimum=1)
    seconds: tuple[list[float], list[float]] = ([], [])
    for call in (full, cached):
        jax.block_until_ready(call())
    for _ in range(repeats):
        for call, times in zip((full, cached), seconds):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    before, after = map(statistics.median, seconds)
    return Speedup(before, after, before / after)


def fold_branches(sizes: jax.Array, batch: int) -> jax.Array:
    """``[..., 2B]`` of both guidance branches as ``[..., B]``, the larger of the two."""
    if sizes.ndim < 2 or sizes.shape[-1] != 2 * batch:
        return sizes
    return sizes.reshape(*sizes.shape[:-1], 2, batch).max(-2)


def shapes_of(tree: Any) -> Any:
    """The tree with shapes and dtypes in place of arrays (and numbers)."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)


def matmul_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Floating point operations of the matrix products in ``fn(*args)``, found by tracing.

    Scans count every turn, the dearest branch of a ``cond`` counts, a ``while`` counts one turn.
    ``args`` may be :class:`jax.ShapeDtypeStruct` trees; nothing is compiled or run.
    """
    return _jaxpr_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _jaxpr_flops(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [_jaxpr_flops(sub) for sub in _inner_jaxprs(eqn)]
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shared = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2.0 * shared * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
            each = math.prod(kernel) / kernel[out_axis]
            total += 2.0 * each * math.prod(eqn.outvars[0].aval.shape)
        elif eqn.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner) * eqn.params.get("length", 1)
    return total


def _inner_jaxprs(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                found.append(item)
    return found


def cost_share(part: float, plain: float, free: float = 0.0) -> float:
    """Cost of a step over that of a plain one; ``free`` for a model without matrix products."""
    return part / plain if plain else free
