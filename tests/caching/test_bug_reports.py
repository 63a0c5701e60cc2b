"""Bug reports against other caching libraries, recast as properties of ours.

Each name says the property; the docstring says where users met its absence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    adaptive_sample,
    cached_sample,
    make_plan,
    reuse,
    taylorseer,
    teacache,
    uniform_schedule,
)
from fadex.core import Denoiser
from fadex.sampling import sample, uniform_times

STEPS = 12
TIMES = uniform_times(STEPS)
PLAN = make_plan(uniform_schedule(STEPS, 4), taylorseer(1))


def curved(params, x, t, cond):
    t = t.reshape((-1,) + (1,) * (x.ndim - 1))
    shift = 0.0 if cond is None else cond.reshape((-1,) + (1,) * (x.ndim - 1))
    return params * (jnp.tanh(x) * (1 + t**2) + shift * t)


DENOISER = Denoiser(curved)
run = functools.partial(
    cached_sample, DENOISER, jnp.float32(1.0), timesteps=TIMES, plan=PLAN, cond=None
)


def noise(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.smoke
def test_a_changed_token_count_gets_a_cache_of_its_own():
    """huggingface/diffusers#14829: a cache built for one length met another one."""
    for tokens in (6, 9, 6):
        x = noise(2, tokens, 4)
        # Tokens are independent here, so a run at this length is the start of a longer run.
        longer = run(jnp.concatenate([x, x], axis=1))
        np.testing.assert_allclose(run(x), longer[:, :tokens], rtol=1e-5, atol=1e-6)
    # Within one run the length can't change: a model that does so is refused when traced.
    growing = Denoiser(lambda p, x, t, c: jnp.concatenate([x, x], axis=1))
    with pytest.raises(ValueError, match="denoiser: expected an output shaped like x"):
        cached_sample(growing, 1.0, noise(2, 6, 4), None, timesteps=TIMES, plan=PLAN)


def test_the_plain_sampler_is_untouched_by_cached_runs():
    """huggingface/diffusers#14037: hooks stayed behind when caching was switched off."""
    x = noise(2, 6)
    plain = functools.partial(sample, DENOISER, jnp.float32(1.0), x, None, timesteps=TIMES)
    before = plain()
    run(x)
    np.testing.assert_array_equal(plain(), before)


@pytest.mark.smoke
def test_guidance_branches_need_no_context_and_never_mix():
    """huggingface/diffusers#12012 and #12760: pipelines forgot to say which branch runs."""
    x, cond, null = noise(2, 6), jnp.array([1.0, 2.0]), jnp.array([-1.0, -3.0])
    # At guidance 0 and 1 the guided run must be the run of one branch alone.
    only = lambda c: run(x, cond=c)
    np.testing.assert_allclose(run(x, cond=cond, guidance=0.0, null_cond=null), only(null),
                               rtol=1e-5, atol=1e-6)
    one = jnp.ones(2)  # an array, so both branches really run
    np.testing.assert_allclose(run(x, cond=cond, guidance=one, null_cond=null), only(cond),
                               rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
def test_a_forecaster_that_was_asked_for_is_never_silently_replaced_by_reuse():
    """vllm-project/vllm-omni#4633: the calibrator's settings were dropped without a word."""
    x = noise(2, 6)
    plain_reuse = run(x, plan=make_plan(PLAN.schedule, reuse()))
    assert np.abs(run(x) - plain_reuse).max() > 1e-3
    with pytest.raises(ValueError, match="history: taylor2 needs 3 snapshots, got 1"):
        make_plan(PLAN.schedule, taylorseer(2), history=1)
    with pytest.raises(TypeError, match="plan: expected a ForecastPlan"):
        run(x, plan={"taylor": 1})


def test_cache_memory_is_the_history_and_nothing_else():
    """Shenyi-Z/TaylorSeer#5: factors per module and order blew up memory."""
    size = 64 * 64 * 16
    x = noise(1, 64, 64, 16)
    plan = make_plan(uniform_schedule(STEPS, 4), taylorseer(2))
    call = jax.jit(lambda x: run(x, plan=plan))
    plain = jax.jit(lambda x: sample(DENOISER, jnp.float32(1.0), x, None, timesteps=TIMES))
    memory = lambda f: f.lower(x).compile().memory_analysis().temp_size_in_bytes
    # Four snapshots (what plans up to that length share), and the loop's working buffers.
    assert memory(call) - memory(plain) <= (4 + 4) * size * 4


def test_rounding_noise_of_a_low_precision_cache_is_bounded_by_the_weights():
    """Shenyi-Z/TaylorSeer#5: differences of rounded features were mostly noise."""
    x = noise(2, 32)
    plan = make_plan(uniform_schedule(STEPS, 4), taylorseer(2))
    gap = np.abs(run(x, plan=plan, cache_dtype=jnp.bfloat16) - run(x, plan=plan)).max()
    scale = float(jnp.abs(x).max()) * 2
    bound = 2.0**-8 * np.abs(plan.weights).sum(1).max() * scale
    assert 0 < gap <= bound


@pytest.mark.smoke
def test_skipped_steps_stay_skipped_under_vmap(counted):
    """jax-ml/jax#8409: a cond under vmap computes both branches."""
    counter, denoiser = counted
    call = lambda x: cached_sample(denoiser, jnp.float32(1), x, None, timesteps=TIMES, plan=PLAN)
    assert counter.count(jax.vmap(call), noise(5, 2, 6)) == PLAN.schedule.nfe


def test_memory_does_not_depend_on_how_long_or_where_a_policy_is_active():
    """huggingface/diffusers#13497: a stale activation was kept outside the active range."""
    x = noise(1, 64, 64, 16)

    def memory(steps, **kwargs):
        call = jax.jit(lambda x: adaptive_sample(
            DENOISER, jnp.float32(1.0), x, None, timesteps=uniform_times(steps),
            policy=teacache(0.1, signal="latent"), **kwargs))
        analysis = call.lower(x).compile().memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    base, small = memory(12), 16 * 1024  # tables of the steps grow, by a few numbers each
    assert abs(memory(96) - base) <= small
    assert abs(memory(12, warmup=10, cooldown=2) - base) <= small  # active nowhere
    # Nothing outlives the program: no function of ours holds an array afterwards.
    run = functools.partial(adaptive_sample, DENOISER, jnp.float32(1.0), timesteps=TIMES,
                            policy=teacache(0.1, signal="latent"), cond=None)
    jax.block_until_ready(run(x))
    before = sum(a.nbytes for a in jax.live_arrays())
    jax.block_until_ready(run(x))
    assert sum(a.nbytes for a in jax.live_arrays()) <= before
