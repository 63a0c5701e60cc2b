import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    CacheSchedule,
    ForecastPlan,
    GuardConfig,
    cached_sample,
    dmd,
    fade_plan,
    lut_from_tree,
    lut_to_tree,
    make_plan,
    plan_forecaster,
    profile_fade,
    profile_least_squares,
    reuse,
    state_guarded,
    taylorseer,
    uniform_schedule,
)
from fadex.core import Denoiser
from fadex.sampling import dpmpp_2m, guidance_breaks, sample, shifted_times, uniform_times

STEPS = 20
TIMES = uniform_times(STEPS)
INTERVAL = (0.23, 0.77)  # guided from step 5 on, and no longer from step 16 on
BREAKS = guidance_breaks(TIMES, INTERVAL)
PLAIN = uniform_schedule(STEPS, 5, warmup=2)
# A second anchor behind each break gives a forecast of first order its two snapshots.
BROKEN = PLAIN.with_breaks(BREAKS).with_anchors([b + 1 for b in BREAKS])
COND, NULL = jnp.array([1.0, 0.5, 2.0]), jnp.array([-2.0, 1.0, 0.3])


def linear(params, x, t, cond):
    """Velocity linear in time, whatever the state: forecasts of first order are exact."""
    del x
    return params * jnp.stack([cond + (2.0 - cond) * t, cond * t - 1.0], axis=-1)


def curved(params, x, t, cond):
    t, cond = t[:, None], cond[:, None]
    return params * (jnp.tanh(x) * (1 + t**2) + cond * t)


def noise(batch=3, width=2, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, width))


def runs(apply, **kwargs):
    shared = dict(timesteps=TIMES, guidance=3.0, null_cond=NULL, guidance_interval=INTERVAL)
    arguments = (Denoiser(apply), jnp.float32(1.0), noise(), COND)
    return (functools.partial(sample, *arguments, **(shared | kwargs)),
            functools.partial(cached_sample, *arguments, **(shared | kwargs)))


def unchecked(schedule, rule):
    """A plan as a forecaster that names its breaks, and is trusted, but looks back over them."""
    plan = make_plan(schedule._replace(breaks=()), rule)
    return plan_forecaster(plan)._replace(schedule=schedule.with_breaks(BREAKS))


@pytest.mark.smoke
def test_forecasts_are_exact_with_breaks_and_wrong_without():
    full, cached = runs(linear)
    for rule in (taylorseer(1), taylorseer(2)):
        np.testing.assert_allclose(cached(plan=make_plan(BROKEN, rule)), full(), atol=2e-6)
    # The same computed steps, but order 2 reaches back over the jump; and so does order 1
    # without the second anchor behind it.
    mixed = cached(plan=unchecked(BROKEN, taylorseer(2)))
    assert np.abs(mixed - full()).max() > 0.05
    anchored = PLAIN.with_anchors(BREAKS)
    mixed = cached(plan=unchecked(anchored, taylorseer(1)))
    assert np.abs(mixed - full()).max() > 0.05
    jitted = jax.jit(lambda g: cached(plan=make_plan(BROKEN, taylorseer(1)), guidance=g))
    np.testing.assert_allclose(jitted(3.0), full(), atol=2e-6)
    with pytest.raises(ValueError, match="plan: .* forecast of step 17 weighs step 11 before it"):
        cached(plan=make_plan(anchored, taylorseer(1)))


@pytest.mark.parametrize("make", [dmd, lambda s: state_guarded(
    make_plan(s, taylorseer(1)), GuardConfig(r0=1e3))], ids=["dmd", "state guard"])
def test_forecasters_must_name_the_breaks_too(make):
    full, cached = runs(linear)
    np.testing.assert_allclose(cached(plan=make(BROKEN)), full(), atol=1e-4)
    advice = "schedule.with_breaks.fadex.sampling.guidance_breaks"
    for schedule, missing in (
        (PLAIN, r"does not compute \[5\]"),
        (BROKEN._replace(breaks=()), r"no breaks at \[5, 16\]"),
        (BROKEN._replace(breaks=(16,)), r"no breaks at \[5\]"),
    ):
        with pytest.raises(ValueError, match=rf"plan: .*{missing}; .*{advice}"):
            cached(plan=make(schedule))
    # Times that are traced can't be checked; inside the model nothing jumps.
    traced = jax.eval_shape(lambda t: cached(plan=make(PLAIN), timesteps=t), jnp.asarray(TIMES))
    assert traced.shape == full().shape


def test_the_same_holds_with_a_grid_per_sample():
    times = np.stack([TIMES, shifted_times(STEPS, 1.5), shifted_times(STEPS, 3.0)])
    breaks = guidance_breaks(times, INTERVAL)
    full, cached = runs(curved, timesteps=times)
    schedule = PLAIN.with_breaks(breaks)
    every = schedule.with_anchors(range(STEPS))
    np.testing.assert_array_equal(cached(plan=make_plan(every, taylorseer(1))), full())
    assert np.isfinite(cached(plan=make_plan(schedule, taylorseer(1)))).all()
    with pytest.raises(ValueError, match="plan: the guided output jumps at the steps"):
        cached(plan=make_plan(PLAIN.with_breaks(BREAKS), taylorseer(1)))


@pytest.mark.smoke
def test_profiled_weights_respect_breaks():
    denoiser, x = Denoiser(linear), noise(seed=1)
    shared = dict(timesteps=TIMES, schedule=BROKEN, guidance=3.0, null_cond=NULL,
                  guidance_interval=INTERVAL)
    full, cached = runs(linear)
    table = profile_fade(denoiser, jnp.float32(1.0), x, COND, **shared)
    opened = profile_fade(denoiser, jnp.float32(1.0), x, COND, mode="open", **shared)
    fitted = profile_least_squares(denoiser, jnp.float32(1.0), x, COND, history=2, **shared)
    for plan in (fade_plan(table), fade_plan(opened), fitted):
        for s in BROKEN.skipped:
            known = len(BROKEN.history(s, plan.history))
            assert not plan.weights[s, known:].any()
        np.testing.assert_allclose(cached(plan=plan), full(), atol=1e-3)
    again = lut_from_tree(*lut_to_tree(table))
    assert again.schedule == BROKEN
    with pytest.raises(ValueError, match=r"lut: profiled for breaks \(5, 16\)"):
        fade_plan(table, BROKEN._replace(breaks=()))


def test_computed_and_skipped_steps_leave_the_null_branch_out(counted):
    rows = []

    def tick(t):
        rows.append(t.size)
        return np.zeros_like(t)

    def apply(params, x, t, cond):
        shape = jax.ShapeDtypeStruct(t.shape, t.dtype)
        t = t + jax.pure_callback(tick, shape, t, vmap_method="broadcast_all")
        return curved(params, x, t, cond)

    plan = make_plan(BROKEN, taylorseer(1))
    _, cached = runs(apply, plan=plan)
    jax.block_until_ready(cached())
    guided = sum(INTERVAL[0] <= TIMES[a] <= INTERVAL[1] for a in BROKEN.anchors)
    assert sum(rows) == 3 * (BROKEN.nfe + guided) and len(rows) == BROKEN.nfe
    del counted
    rows.clear()
    jax.block_until_ready(jax.vmap(lambda g: cached(guidance=g))(jnp.array([2.0, 3.0])))
    assert len(rows) == BROKEN.nfe


@pytest.mark.parametrize("sampler", [None, dpmpp_2m()], ids=["euler", "2m"])
def test_computing_every_step_equals_the_plain_sampler_bit_for_bit(sampler):
    full, cached = runs(curved, sampler=sampler)
    every = make_plan(uniform_schedule(STEPS, 1).with_breaks(BREAKS), taylorseer(1))
    np.testing.assert_array_equal(cached(plan=every), full())


def test_inside_the_model_both_branches_stay_cached_and_no_breaks_are_needed():
    def with_features(params, x, t, cond, sites):
        feature = jnp.tanh(x) * (1 + t[:, None])
        feature = jnp.stack([feature, cond[:, None] * jnp.cos(x)]) if "module" in sites else feature
        return head(params, x, t, cond, {sites[0]: feature}), {sites[0]: feature}

    def head(params, x, t, cond, feats):
        (feature,) = feats.values()
        feature = feature.sum(0) if feature.ndim == 3 else feature
        return params * (feature + cond[:, None] * t[:, None])

    apply = lambda p, x, t, c: with_features(p, x, t, c, ("crf",))[0]
    for site in ("crf", "module"):
        if site == "module":
            apply = lambda p, x, t, c: with_features(p, x, t, c, ("module",))[0]
        denoiser = Denoiser(apply, with_features, head)
        seen, x = {}, noise()
        plan = make_plan(PLAIN, taylorseer(1))
        both, cond = jnp.concatenate, jnp.concatenate([COND, NULL])
        for s, (t, u) in enumerate(itertools.pairwise(TIMES)):
            args = (jnp.float32(1.0), both([x, x]), jnp.full(6, t), cond)
            if PLAIN.is_anchor(s):
                out, feats = with_features(*args, (site,))
                seen[s] = feats[site]
            else:
                pos = PLAIN.history(s, 2)
                out = head(*args, {site: sum(w * seen[a] for w, a in zip(plan.weights[s], pos))})
            c, n = out[:3], out[3:]
            x = x + (u - t) * (n + 3.0 * (c - n) if INTERVAL[0] <= t <= INTERVAL[1] else c)
        out = cached_sample(
            denoiser, jnp.float32(1.0), noise(), COND, timesteps=TIMES, guidance=3.0,
            null_cond=NULL, guidance_interval=INTERVAL, plan=plan, site=site,
        )
        np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-5)


def test_interval_values_and_breaks_do_not_recompile(compiles):
    _, cached = runs(curved)
    anchored = PLAIN.with_anchors([4, 5, 6, 16])
    jax.block_until_ready(cached(plan=make_plan(anchored.with_breaks([5, 16]), taylorseer(1))))
    with compiles() as count:
        plan = make_plan(anchored, taylorseer(1), breaks=[4, 16])
        jax.block_until_ready(cached(plan=plan, guidance_interval=(0.23, 0.82)))
    assert count() == 0


def test_histories_end_at_the_newest_break():
    schedule = CacheSchedule(12, (0, 1, 2, 5, 8, 10), (5, 10)).validate()
    assert schedule.history(4) == (2, 1, 0)
    assert schedule.history(5) == (5,) and schedule.history(9) == (8, 5)
    assert schedule.history(9, 1) == (8,) and schedule.history(11) == (10,)
    assert schedule != schedule._replace(breaks=()) and hash(schedule) == hash(schedule)
    plan = make_plan(schedule, taylorseer(2))
    np.testing.assert_allclose(plan.weights[6], [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(
        plan.weights, make_plan(schedule._replace(breaks=()), taylorseer(2), breaks=[5, 10]).weights
    )


def test_plans_that_do_not_fit_are_refused():
    _, cached = runs(curved)
    advice = "schedule.with_breaks.fadex.sampling.guidance_breaks"
    with pytest.raises(ValueError, match=rf"plan: .*does not compute \[5\]; .*{advice}"):
        cached(plan=make_plan(PLAIN, taylorseer(1)))
    # One snapshot never looks back over anything.
    assert np.isfinite(cached(plan=make_plan(PLAIN.with_anchors(BREAKS), reuse()))).all()
    # Weights count, not where they come from.
    good = make_plan(BROKEN, taylorseer(1))
    assert np.isfinite(cached(plan=ForecastPlan(BROKEN._replace(breaks=()), good.weights))).all()
    for bad, message in (
        (lambda: make_plan(PLAIN, taylorseer(1), breaks=[5]), "schedule: breaks must be incr"),
        (lambda: CacheSchedule(9, (0, 3, 5), (5, 3)).validate(), "schedule: breaks must be"),
        (lambda: PLAIN.with_anchors([20]), r"steps: must lie in \[0, 20\), got \[20\]"),
        (lambda: profile_fade(Denoiser(curved), jnp.float32(1), noise(), COND, schedule=PLAIN,
                              timesteps=np.stack([TIMES] * 3)), "timesteps: profile one grid"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()
