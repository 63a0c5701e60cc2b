r"""DBCache: the first blocks run at every step, and their residual says whether the rest must.

Source: cache-dit's dual block cache (https://github.com/vipshop/cache-dit) and the first-block
cache that it grew from; written anew from the rule. With the residual
:math:`\rho_s = h_F(s) - h_0(s)` of the first ``F`` blocks and that of the last computed step,

.. math:: d_s = \frac{\lVert \rho_s - \rho_{a_0} \rVert_1}{\lVert \rho_{a_0} \rVert_1},

the other blocks are computed when :math:`d_s \ge` threshold; else their cached residual is added
to :math:`h_F(s)`. With ``order=1`` or ``2`` of :func:`~fadex.caching.adaptive_sample` that
residual is extrapolated: cache-dit's hybrid of DBCache and TaylorSeer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fadex.caching.adaptive import NO_LIMIT, REDUCTIONS, Policy, PolicyRule, signal_change
from fadex.caching.teacache import check_threshold
from fadex.core.checks import check_choice, check_int


class DBState(NamedTuple):
    """The first blocks' residual at the last computed step."""

    reference: Any


def _init(numbers, signal):
    del numbers
    return DBState(signal)


def _decide(numbers, state, signal, info, *, reduce):
    del info
    change = signal_change(signal, state.reference, reduce)
    return ~(change < numbers["threshold"]), change, state


def _settle(state, signal, recompute):
    choose = lambda new, old: jnp.where(recompute, new, old)
    return DBState(jax.tree.map(choose, signal, state.reference))


@functools.lru_cache(maxsize=32)
def _rule(blocks: int, reduce: str) -> PolicyRule:
    return PolicyRule(
        name="dbcache", signal="first_block", blocks=blocks, init=_init,
        decide=functools.partial(_decide, reduce=reduce), settle=_settle,
    )


def dbcache(
    threshold: Any, *, blocks: int = 1, reduce: str = "any", max_skip: int | None = None
) -> Policy:
    """DBCache as a policy for :func:`~fadex.caching.adaptive_sample`.

    Args:
      threshold: relative change of the first blocks' residual from which the rest is computed; an
        operand. 0 computes all.
      blocks: ``F``, computed at every step; the model must have ``begin``, ``finish`` and (at
        site ``"crf"``) ``resume``.
      reduce: ``"any"`` or ``"max"``: the sample that moved most decides (the same thing here,
        the statistics keep one size per sample with ``"any"``). ``"mean"``: one ratio of sums over
        the batch, as in cache-dit.
      max_skip: most steps skipped in a row.

    Example:
      >>> from fadex.caching import dbcache
      >>> dbcache(0.08, blocks=2).rule.blocks
      2
    """
    check_choice("reduce", reduce, REDUCTIONS)
    blocks = check_int("blocks", blocks, minimum=1)
    check_threshold(threshold)
    limit = NO_LIMIT if max_skip is None else check_int("max_skip", max_skip, minimum=0)
    return Policy(_rule(blocks, reduce), {"threshold": threshold}, max_skip=limit)
