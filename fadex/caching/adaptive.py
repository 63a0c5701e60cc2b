r"""Adaptive caching: whether a step is computed is decided while sampling.

A :class:`Policy` watches a cheap signal of each step (the modulated input of the first block,
the residual of the first blocks, the latents, or nothing) and asks for a computed step when the
signal has moved too far. The run is one ``lax.scan`` over the steps with one ``lax.cond``,

.. math:: \hat F(s) = \begin{cases} F(x_s, t_s) & \text{asked for, forced, or first/last} \\
   \sum_{j \le m} w_j F(a_j) & \text{else,}\end{cases}

with Newton weights over the last ``m + 1`` computed steps (``m = 0`` is reuse).

**Skipped steps stay skipped under vmap.** A ``cond`` whose predicate is batched becomes a
``select`` and evaluates both branches. The decision is therefore reduced over the batch, and over
every axis that ``vmap`` adds, by ``jax.custom_batching.custom_vmap``: the predicate never has a
batch axis. One consequence: members of one ``vmap`` compute and skip together, exactly like the
rows of one batch; sweep thresholds by a loop (they are operands, nothing recompiles).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fadex.caching.kernels import weighted_sum
from fadex.caching.profile import check_site
from fadex.caching.stats import (
    CacheStats,
    cost_share,
    fold_branches,
    matmul_flops,
    relative_change,
    safe_ratio,
    shapes_of,
)
from fadex.core.checks import check_choice, check_int
from fadex.core.denoiser import Denoiser
from fadex.sampling.guidance import Guided, check_interval, check_mesh, check_run
from fadex.sampling.run import apply_step, initial_state
from fadex.sampling.samplers import Sampler, flow_euler

SIGNALS = ("first_block", "latent", "modulated", "none")
REDUCTIONS = ("any", "max", "mean")
NO_LIMIT = 2**30


def _unbatched(reduce: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """``reduce`` over all axes to a scalar, the axes of any surrounding ``vmap`` included."""

    @jax.custom_batching.custom_vmap
    def reduced(values):
        return reduce(values)

    @reduced.def_vmap
    def _(axis_size, in_batched, values):
        del axis_size, in_batched
        return reduced(values), False

    # A decision is piecewise constant; its derivative is zero wherever it exists.
    return lambda values: reduced(jax.lax.stop_gradient(values))


batch_any = _unbatched(jnp.any)
batch_max = _unbatched(jnp.max)
batch_sum = _unbatched(jnp.sum)


def signal_change(new: Any, old: Any, reduce: str) -> jax.Array:
    r"""Relative L1 change of a signal, reduced over the batch as a policy asks for.

    ``"any"``: one number per row, ``[B]`` (``[2B]`` under guidance). ``"max"``: the largest of
    them. ``"mean"``: :math:`\sum |new - old| / \sum |old|` over the whole batch.
    """
    if reduce == "mean":
        total = lambda tree: sum(
            jnp.abs(leaf.astype(jnp.float32)).reshape(leaf.shape[0], -1).sum(-1)
            for leaf in jax.tree.leaves(tree)
        )
        moved = total(jax.tree.map(lambda a, b: a - b.astype(a.dtype), new, old))
        return safe_ratio(batch_sum(moved), batch_sum(total(old)))
    rows = relative_change(new, old)
    return rows if reduce == "any" else batch_max(rows)


class PolicyInfo(NamedTuple):
    """What a policy is told about a step."""

    step: jax.Array  # int32 []
    t: jax.Array  # float32 []


class PolicyRule(NamedTuple):
    """The static half of a policy: pure functions. Hashable; equal rules share a program.

    Attributes:
      name: for tables.
      signal: what ``decide`` gets: ``"modulated"`` (the first block's modulated input),
        ``"first_block"`` (what the first ``blocks`` blocks added), ``"latent"`` (``x`` itself,
        with any model), or ``"none"``.
      blocks: leading blocks that are computed at every step.
      init: ``init(numbers, signal) -> state``, from an example of the signal.
      decide: ``decide(numbers, state, signal, info) -> (wanted, size, state)``: whether the step
        should be computed (bool, ``[B]`` or scalar; any true entry computes it), the number that
        was compared with the threshold, and the state with this step in it.
      settle: ``settle(state, signal, recompute) -> state``, told what really happens: a step is
        also computed because of the warm-up, the cool-down or the skip limit.
    """

    name: str
    signal: str
    blocks: int
    init: Callable[..., Any]
    decide: Callable[..., tuple[jax.Array, jax.Array, Any]]
    settle: Callable[..., Any]


class Policy(flax.struct.PyTreeNode):
    """A :class:`PolicyRule` with its numbers, which are operands and may be traced.

    Attributes:
      rule: static.
      numbers: dict of arrays, ``"threshold"`` among them.
      warmup: steps at the start that are always computed.
      max_skip: most steps skipped in a row.
    """

    rule: PolicyRule = flax.struct.field(pytree_node=False)
    numbers: Any = flax.struct.field(default_factory=dict)
    warmup: Any = 1
    max_skip: Any = NO_LIMIT


class _Cache(NamedTuple):
    """The last ``K`` computed features with their steps, in ring order."""

    history: Any  # pytree of [K, ...]
    positions: jax.Array  # float32 [K]; distinct negative numbers before anything is known
    count: jax.Array  # int32 []: computed steps so far


def _empty_cache(feature: Any, size: int, dtype: Any) -> _Cache:
    zeros = lambda a: jnp.zeros((size, *a.shape), a.dtype if dtype is None else dtype)
    positions = -1.0 - jnp.arange(size, dtype=jnp.float32)
    return _Cache(jax.tree.map(zeros, feature), positions, jnp.int32(0))


def _observe(cache: _Cache, feature: Any, step: jax.Array) -> _Cache:
    slot = cache.count % cache.positions.shape[0]
    write = lambda ring, a: jax.lax.dynamic_update_index_in_dim(
        ring, a.astype(ring.dtype), slot, 0
    )
    return _Cache(
        jax.tree.map(write, cache.history, feature),
        cache.positions.at[slot].set(step.astype(jnp.float32)),
        cache.count + 1,
    )


def newton_weights(positions: jax.Array, known: jax.Array, step: jax.Array) -> jax.Array:
    """Lagrange weights ``[K]`` through the known ``positions``, evaluated at ``step``.

    Positions are data here, in any order; the order of extrapolation drops where fewer are known.
    """
    gaps = positions[:, None] - positions[None, :]
    others = ~jnp.eye(len(positions), dtype=bool) & known[None, :]
    factors = (step - positions)[None, :] / jnp.where(others, gaps, 1.0)
    return jnp.where(known, jnp.where(others, factors, 1.0).prod(axis=1), 0.0)


def _predict(cache: _Cache, feature: Any, step: jax.Array) -> Any:
    """The forecast, in the dtypes of ``feature`` (an example)."""
    size = cache.positions.shape[0]
    if size == 1:
        return jax.tree.map(lambda h, a: h[0].astype(a.dtype), cache.history, feature)
    known = jnp.arange(size) < cache.count
    weights = newton_weights(cache.positions, known, step.astype(jnp.float32))
    return jax.tree.map(lambda h, a: weighted_sum(weights, h, a.dtype), cache.history, feature)


class _Parts(NamedTuple):
    """A step cut in three: what always runs, the computed rest, the skipped rest."""

    probe: Callable[..., tuple[Any, Any]]  # (x, t) -> (signal, hidden)
    compute: Callable[..., tuple[jax.Array, Any]]  # (x, t, hidden) -> (out, feature)
    skip: Callable[..., jax.Array]  # (x, t, hidden, feature) -> out


def _parts(model: Guided, rule: PolicyRule, site: str) -> _Parts:
    blocks = rule.blocks

    def probe(x, t):
        hidden = model.begin(x, t, blocks) if blocks else ()
        if rule.signal == "first_block":
            return jax.tree.map(jnp.subtract, hidden, model.begin(x, t, 0)), hidden
        if rule.signal == "modulated":
            return model.modulated(x, t), hidden
        return x if rule.signal == "latent" else (), hidden

    def compute(x, t, hidden):
        if site == "output":
            out = model.finish(x, t, hidden, blocks)[0] if blocks else model(x, t)
            return out, out
        if blocks:
            return model.finish(x, t, hidden, blocks)
        return model.with_features(x, t, site)

    def skip(x, t, hidden, feature):
        if site == "output":
            return feature
        if blocks:
            return model.resume(x, t, hidden, feature)
        return model.from_features(x, t, site, feature)

    return _Parts(probe, compute, skip)


def _jumps(timesteps, interval):
    """Bool ``[S]``: steps at which the guided output jumps, because the interval begins or ends."""
    inside = (interval[0] <= timesteps[:-1]) & (timesteps[:-1] <= interval[1])
    changed = inside[1:] != inside[:-1]
    return jnp.pad(changed.reshape(changed.shape[0], -1).any(-1), (1, 0))


def _adaptive_sample(params, x, cond, null_cond, timesteps, guidance, interval, policy, warmup,
                     cooldown, key, *, denoiser, sampler, site, cfg_channels, order,
                     cache_dtype, return_trajectory, return_stats):
    """The program. Thresholds, warm-up and skip limit are operands."""
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    rule, numbers = policy.rule, policy.numbers
    parts = _parts(model, rule, site)
    example = lambda: (signal := parts.probe(x, timesteps[0])) and (
        signal[0], *parts.compute(x, timesteps[0], signal[1])
    )
    signal, out, feature = jax.eval_shape(example)
    num_steps = timesteps.shape[0] - 1
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    fixed = (steps < jnp.maximum(jnp.maximum(warmup, policy.warmup), 1)) | (
        steps >= num_steps - cooldown
    )
    # At the output a jump starts a new history; inside the model both branches stay cached.
    jump = None
    if interval is not None and site == "output":
        jump = _jumps(timesteps, interval)
        fixed = fixed | jump

    def body(carry, xs):
        x, state, cache, watch, skipped = carry
        info, t_next, fixed, jump = xs
        if jump is not None:
            cache = cache._replace(count=jnp.where(batch_any(jump), 0, cache.count))
        signal, hidden = jax.lax.optimization_barrier(parts.probe(x, info.t))
        wanted, size, watch = rule.decide(numbers, watch, signal, info)
        wanted = batch_any(wanted)
        recompute = batch_any(wanted | fixed | (skipped >= policy.max_skip))
        watch = rule.settle(watch, signal, recompute)

        def computed(x, hidden, cache):
            out, feature = jax.lax.optimization_barrier(parts.compute(x, info.t, hidden))
            return out, _observe(cache, feature, info.step)

        def forecast(x, hidden, cache):
            predicted = _predict(cache, feature, info.step)
            return parts.skip(x, info.t, hidden, predicted).astype(out.dtype), cache

        output, cache = jax.lax.cond(recompute, computed, forecast, x, hidden, cache)
        x, state = apply_step(model, sampler, output, x, state, info.t, t_next)
        skipped = jnp.where(recompute, 0, skipped + 1)
        kept = (recompute, wanted, fixed, jnp.where(info.step == 0, jnp.nan, size))
        return (x, state, cache, watch, skipped), (
            x if return_trajectory else None, kept if return_stats else None
        )

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), signal)
    carry = (
        x, initial_state(sampler, x, key, timesteps[0]),
        _empty_cache(feature, order + 1, cache_dtype), rule.init(numbers, zeros), jnp.int32(0),
    )
    xs = (PolicyInfo(steps, timesteps[:-1]), timesteps[1:], fixed, jump)
    (final, *_), (states, kept) = jax.lax.scan(body, carry, xs)
    trajectory = jnp.concatenate([x[None], states]) if return_trajectory else None
    return final, trajectory, kept


_STATIC = ("denoiser", "sampler", "site", "cfg_channels", "order", "cache_dtype",
           "return_trajectory", "return_stats")
_run = jax.jit(_adaptive_sample, static_argnames=_STATIC)


def adaptive_sample(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    policy: Policy,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    warmup: int = 1,
    cooldown: int = 1,
    max_skip: int | None = None,
    order: int = 0,
    cache_dtype: Any = None,
    key: jax.Array | None = None,
    return_trajectory: bool = False,
    return_stats: bool = False,
) -> Any:
    r"""Sample with a policy that decides at each step whether the model is computed.

    With a threshold of 0 every step is computed and the result equals
    :func:`fadex.sampling.sample` bit for bit. Under ``vmap`` the model is evaluated as often as
    for one batch with all the samples in it.

    Args:
      denoiser, params, x, cond, timesteps, sampler, guidance, null_cond, cfg_channels, key: as in
        :func:`~fadex.caching.cached_sample`.
      guidance_interval: as in :func:`fadex.sampling.sample`. At ``"output"`` the steps where it
        begins and ends are computed and start a new history.
      policy: from :func:`~fadex.caching.teacache`, ``magcache`` or ``dbcache``, or any
        :class:`Policy`. Its numbers are operands: other thresholds do not recompile.
      site: what a skipped step reuses: ``"output"``, the guided output (with any model), or
        ``"crf"``, the residual of the blocks, which is added to the current embedding before the
        current head.
      warmup, cooldown: steps at the start and the end that are always computed. Step 0 always is.
      max_skip: most steps skipped in a row; that of the policy by default.
      order: order of the Newton extrapolation from the last computed steps; 0 is reuse. Costs
        ``order + 1`` cached features.
      cache_dtype: dtype of the cached features.
      return_trajectory: also return all states ``[S + 1, B, ...]``.
      return_stats: also return :class:`~fadex.caching.CacheStats`.

    Returns:
      ``x`` at the last time; with the flags a tuple ``(x, trajectory, stats)`` of what was asked.

    Raises:
      ValueError: a bad argument by name, or a model without what the policy watches, when
        tracing.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fadex.caching import adaptive_sample, teacache
      >>> from fadex.core import Denoiser
      >>> from fadex.sampling import uniform_times
      >>> denoiser = Denoiser(lambda params, x, t, cond: x * params)
      >>> x, stats = adaptive_sample(
      ...     denoiser, jnp.float32(1.0), jnp.ones((2, 4)), None, timesteps=uniform_times(20),
      ...     policy=teacache(0.15, signal="latent"), return_stats=True)
      >>> int(stats.nfe)
      8
    """
    sampler = flow_euler() if sampler is None else sampler
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: expected a Policy, got {type(policy).__name__}")
    check_policy(denoiser, policy.rule, site)
    check_mesh(x)
    warmup = check_int("warmup", warmup, minimum=0)
    cooldown = check_int("cooldown", cooldown, minimum=0)
    order = check_int("order", order, minimum=0)
    if max_skip is not None:
        policy = policy.replace(max_skip=check_int("max_skip", max_skip, minimum=0))
    timesteps, null_cond = check_run(
        x, cond, timesteps, None, guidance, null_cond, cfg_channels, sampler, key
    )
    _check_numbers(policy, timesteps.shape[0] - 1)
    x = jnp.asarray(x)
    cache_dtype = None if cache_dtype is None else jnp.dtype(cache_dtype)
    static = dict(denoiser=denoiser, site=site, cfg_channels=cfg_channels)
    interval = check_interval(guidance_interval, null_cond)
    final, trajectory, kept = _run(
        params, x, cond, null_cond, timesteps, guidance, interval, policy, warmup, cooldown, key,
        sampler=sampler, order=order, cache_dtype=cache_dtype,
        return_trajectory=return_trajectory, return_stats=return_stats, **static,
    )
    found = (final,)
    if return_trajectory:
        found += (trajectory,)
    if return_stats:
        computed, wanted, fixed, sizes = kept
        leaves, tree = jax.tree.flatten(
            shapes_of((params, x, cond, null_cond, timesteps[0], guidance, interval))
        )
        skip_cost, compute_cost = _costs(tuple(leaves), tree, rule=policy.rule, **static)
        found += (
            CacheStats(
                computed=computed, wanted=wanted, fixed=fixed,
                sizes=fold_branches(sizes, x.shape[0]),
                threshold=policy.numbers.get("threshold"),
                skip_cost=skip_cost,
                compute_cost=compute_cost,
                evals_per_step=sampler.evals_per_step,
            ),
        )
    return found if len(found) > 1 else final


@functools.lru_cache(maxsize=64)
def _costs(leaves, tree, *, denoiser, rule, site, cfg_channels) -> tuple[float, float]:
    """Matrix products of a skipped and of a computed step over those of a plain one."""

    def step(params, x, cond, null_cond, t, guidance, interval, *, kind):
        model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
        if kind == "plain":
            return model(x, t)
        parts = _parts(model, rule, site)
        if rule.signal == "first_block":  # the compiler finds that both passes embed alike
            signal, hidden = (), model.begin(x, t, rule.blocks)
        else:
            signal, hidden = parts.probe(x, t)
        if kind == "full":
            return signal, parts.compute(x, t, hidden)
        feature = jax.eval_shape(lambda: parts.compute(x, t, hidden)[1])
        feature = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), feature)
        return signal, parts.skip(x, t, hidden, feature)

    args = jax.tree.unflatten(tree, leaves)
    skip, full, plain = (
        matmul_flops(functools.partial(step, kind=kind), *args)
        for kind in ("skip", "full", "plain")
    )
    return cost_share(skip, plain), cost_share(full, plain, 1.0)


def check_policy(denoiser: Denoiser, rule: PolicyRule, site: str) -> None:
    """Raise ValueError when the model does not offer what the policy and the site need."""
    check_choice("site", site, ("output", "crf"))
    check_choice("policy.rule.signal", rule.signal, SIGNALS)
    if rule.signal == "first_block" and rule.blocks < 1:
        raise ValueError("policy: the signal 'first_block' needs blocks >= 1")
    needed = {"modulated"} if rule.signal == "modulated" else set()
    if rule.blocks:
        needed |= {"begin", "finish"} | ({"resume"} if site == "crf" else set())
    else:
        check_site(denoiser, site)
    missing = sorted(name for name in needed if getattr(denoiser, name) is None)
    if missing:
        way_out = "" if rule.name != "teacache" else "; signal 'latent' works with any model"
        raise ValueError(
            f"policy: {rule.name} with signal {rule.signal!r} and {rule.blocks} leading blocks "
            f"needs a model with {', '.join(missing)}{way_out}"
        )


def _check_numbers(policy: Policy, num_steps: int) -> None:
    ratios = policy.numbers.get("ratios")
    if ratios is not None and np.shape(ratios)[-1] != num_steps:
        raise ValueError(
            f"policy: its ratios are for {np.shape(ratios)[-1]} steps, timesteps have {num_steps}"
        )


class ChangeProfile(NamedTuple):
    """How signal and feature move from step to step in a run that computes everything.

    Attributes:
      signal: float64 ``[S, B]``, relative L1 change of the policy's signal; row 0 is NaN, and so
        are those where a guidance interval begins or ends and the output jumps.
      feature: float64 ``[S, B]``, the same of the feature.
      ratios: float64 ``[S]``, mean over samples and tokens of the feature's norm over its
        previous norm; 1 at step 0 and at jumps.
    """

    signal: np.ndarray
    feature: np.ndarray
    ratios: np.ndarray


@functools.partial(
    jax.jit, static_argnames=("denoiser", "sampler", "rule", "site", "cfg_channels")
)
def _collect(params, x, cond, null_cond, timesteps, guidance, interval, key, *, denoiser, sampler,
             rule, site, cfg_channels):
    model = Guided(denoiser, params, cond, null_cond, guidance, cfg_channels, interval)
    parts = _parts(model, rule, site)

    def evaluate(x, t):
        signal, hidden = parts.probe(x, t)
        return signal, *parts.compute(x, t, hidden)

    def norms(tree):
        size = lambda a: jnp.linalg.norm(a.astype(jnp.float32), axis=-1).reshape(-1)
        return jnp.concatenate([size(leaf) for leaf in jax.tree.leaves(tree)])

    def body(carry, xs):
        x, state, before = carry
        t, t_next = xs
        signal, out, feature = evaluate(x, t)
        changes = tuple(
            relative_change(new, old) if jax.tree.leaves(new) else jnp.zeros(x.shape[0])
            for new, old in zip((signal, feature), before)
        )
        ratio = (norms(feature) / (norms(before[1]) + 1e-8)).mean()
        x, state = apply_step(model, sampler, out, x, state, t, t_next)
        return (x, state, (signal, feature)), (*changes, ratio)

    signal, _, feature = jax.eval_shape(lambda: evaluate(x, timesteps[0]))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (signal, feature))
    carry = (x, initial_state(sampler, x, key, timesteps[0]), zeros)
    return jax.lax.scan(body, carry, (timesteps[:-1], timesteps[1:]))[1]


def profile_changes(
    denoiser: Denoiser,
    params: Any,
    x: jax.Array,
    cond: Any,
    *,
    timesteps: Any,
    rule: PolicyRule,
    sampler: Sampler | None = None,
    site: str = "output",
    guidance: Any = 1.0,
    null_cond: Any = None,
    cfg_channels: int | None = None,
    guidance_interval: Any = None,
    key: jax.Array | None = None,
) -> ChangeProfile:
    """Run the full sampler once on a profiling batch and record how far each step moves.

    Arguments are those of :func:`adaptive_sample`; ``rule`` says which signal is watched.

    Raises:
      ValueError: the run gave values that are not finite.
    """
    sampler = flow_euler() if sampler is None else sampler
    check_policy(denoiser, rule, site)
    timesteps, null_cond = check_run(
        x, cond, timesteps, None, guidance, null_cond, cfg_channels, sampler, key
    )
    interval = check_interval(guidance_interval, null_cond)
    signal, feature, ratios = (
        np.array(a, np.float64)
        for a in _collect(
            params, jnp.asarray(x), cond, null_cond, timesteps, guidance, interval, key,
            denoiser=denoiser, sampler=sampler, rule=rule, site=site, cfg_channels=cfg_channels,
        )
    )
    # These steps are computed in any case; what happens there says nothing about the others.
    apart = np.arange(len(ratios)) == 0
    if interval is not None and site == "output":
        apart = apart | np.asarray(_jumps(timesteps, interval))
    signal[apart], feature[apart], ratios[apart] = np.nan, np.nan, 1.0
    if not all(np.isfinite(a[~apart]).all() for a in (signal, feature, ratios)):
        raise ValueError("params: the full run gave values that are not finite while profiling")
    return ChangeProfile(signal, feature, ratios)
