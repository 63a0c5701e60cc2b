import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    CacheSchedule,
    Forecaster,
    ForecastPlan,
    cached_sample,
    custom_schedule,
    fade_plan,
    hicache,
    make_plan,
    newton,
    plan_forecaster,
    profile_fade,
    profile_least_squares,
    reuse,
    taylorseer,
    uniform_schedule,
)
from fadex.core import Denoiser
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import (
    ab2,
    ddim,
    dpmpp_2m,
    flow_euler,
    flow_heun,
    sample,
    timestep_indices,
    uniform_times,
)

STEPS = 20
TIMES = uniform_times(STEPS)
SCHEDULE = uniform_schedule(STEPS, 5)
PLAN = make_plan(SCHEDULE, taylorseer(1))


def noise(batch=3, shape=(4, 4, 2), seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, *shape))


def by_hand(apply, x, timesteps, plan, step):
    """The cached run as a Python loop over steps; ``step(x, v, t, t_next)``."""
    seen = {}
    for s in range(plan.schedule.num_steps):
        if plan.schedule.is_anchor(s):
            seen[s] = out = apply(x, timesteps[s])
        else:
            pos = plan.schedule.history(s, plan.history)
            out = sum(w * seen[a] for w, a in zip(plan.weights[s], pos))
        x = step(x, out, timesteps[s], timesteps[s + 1])
    return x


def small_dit(**overrides):
    """A DiT with all parameters random, so that every site carries something."""
    fields = dict(depth=2, width=32, num_heads=2, in_channels=2, num_classes=5) | overrides
    build = lambda: DiT(DiTConfig(**fields), rngs=nnx.Rngs(0))
    denoiser, params = from_nnx(nnx.eval_shape(build))
    rng = np.random.default_rng(1)  # drawn on the host: nothing to compile
    draw = lambda a: jnp.asarray(0.2 * rng.standard_normal(a.shape), a.dtype)
    return denoiser, jax.tree.map(draw, params)


@pytest.fixture(scope="module")
def dit():
    return small_dit(scan_layers=True)


@pytest.mark.smoke
@pytest.mark.parametrize("rule", [reuse(), taylorseer(2), newton(2), hicache(2)])
def test_equals_a_loop_over_steps(gaussian, rule):
    denoiser, params = gaussian
    plan = make_plan(SCHEDULE, rule)
    apply = lambda x, t: denoiser.apply(params, x, jnp.full(3, t), None)
    expected = by_hand(apply, noise(), TIMES, plan, lambda x, v, t, u: x + (u - t) * v)
    out = cached_sample(denoiser, params, noise(), None, timesteps=TIMES, plan=plan)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        uniform_schedule(1, 3),
        uniform_schedule(2, 3, warmup=1),
        uniform_schedule(4, 2, warmup=9),
        uniform_schedule(7, 30, warmup=1, cooldown=0),
        uniform_schedule(13, 4),
        custom_schedule(16, [0, 1, 3, 4, 8, 10, 13]),
    ],
    ids=["S=1", "S=2", "W>S", "N>S", "ragged", "irregular"],
)
def test_edge_schedules_equal_the_loop_and_the_trajectory_ends_in_the_result(gaussian, schedule):
    denoiser, params = gaussian
    timesteps = uniform_times(schedule.num_steps)
    plan = make_plan(schedule, taylorseer(1))
    apply = lambda x, t: denoiser.apply(params, x, jnp.full(1, t), None)
    x = noise(batch=1, shape=(4,))
    expected = by_hand(apply, x, timesteps, plan, lambda x, v, t, u: x + (u - t) * v)
    out, path = cached_sample(
        denoiser, params, x, None, timesteps=timesteps, plan=plan, return_trajectory=True
    )
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert path.shape == (schedule.num_steps + 1, *x.shape)
    assert jnp.array_equal(path[0], x) and jnp.array_equal(path[-1], out)


def test_every_site_equals_its_loop(dit):
    denoiser, params = dit
    x, y = noise(), jnp.array([0, 3, 5])
    schedule = uniform_schedule(9, 3)
    timesteps = uniform_times(9)
    for site in ("crf", "module"):
        plan = make_plan(schedule, taylorseer(1))
        seen, z = {}, x
        for s in range(9):
            t = jnp.full(3, timesteps[s])
            if schedule.is_anchor(s):
                out, feats = denoiser.with_features(params, z, t, y, (site,))
                seen[s] = feats[site]
            else:
                pos = schedule.history(s, 2)
                forecast = sum(w * seen[a] for w, a in zip(plan.weights[s], pos))
                out = denoiser.from_features(params, z, t, y, {site: forecast})
            z = z + (timesteps[s + 1] - timesteps[s]) * out
        out = cached_sample(denoiser, params, x, y, timesteps=timesteps, plan=plan, site=site)
        np.testing.assert_allclose(out, z, rtol=1e-4, atol=1e-5)
        # Without the fused pass the result is the same.
        plain = denoiser._replace(from_history=None)
        same = cached_sample(plain, params, x, y, timesteps=timesteps, plan=plan, site=site)
        np.testing.assert_allclose(out, same, rtol=1e-5, atol=1e-6)


def test_module_plans_may_weigh_each_site_differently(dit):
    denoiser, params = dit
    schedule = uniform_schedule(9, 3)
    one = make_plan(schedule, taylorseer(1))
    stacked = ForecastPlan(schedule, np.repeat(one.weights[:, None], 4, axis=1))
    other = ForecastPlan(schedule, stacked.weights.copy())
    other.weights[:, 2] = make_plan(schedule, reuse(), history=2).weights
    run = lambda plan: cached_sample(
        denoiser, params, noise(), jnp.zeros(3, int), timesteps=uniform_times(9), plan=plan,
        site="module",
    )
    np.testing.assert_allclose(run(stacked), run(one), rtol=1e-5, atol=1e-6)
    assert np.abs(run(other) - run(one)).max() > 1e-4


@pytest.mark.smoke
@pytest.mark.parametrize("site", ["output", "crf", "module"])
@pytest.mark.parametrize("sampler", [flow_euler(), ab2(), dpmpp_2m()], ids=["euler", "ab2", "2m"])
def test_computing_every_step_equals_the_plain_sampler_bit_for_bit(dit, site, sampler):
    denoiser, params = dit
    y, null = jnp.array([0, 3, 4]), jnp.full(3, 5)
    shared = dict(timesteps=TIMES, sampler=sampler, guidance=2.5, null_cond=null)
    plan = make_plan(uniform_schedule(STEPS, 1), taylorseer(1))
    plain = sample(denoiser, params, noise(), y, **shared)
    cached = cached_sample(denoiser, params, noise(), y, plan=plan, site=site, **shared)
    assert jnp.array_equal(plain, cached)


@pytest.mark.smoke
def test_model_calls_equal_computed_steps_under_jit_vmap_and_vmap_of_vmap(counted):
    counter, denoiser = counted
    run = lambda x: cached_sample(denoiser, jnp.float32(1.0), x, None, timesteps=TIMES, plan=PLAN)
    assert counter.count(run, noise()) == SCHEDULE.nfe
    assert counter.count(jax.jit(run), noise()) == SCHEDULE.nfe
    twice = jnp.stack([noise(), noise(seed=1)])
    assert counter.count(jax.vmap(run), twice) == SCHEDULE.nfe
    assert counter.count(jax.jit(jax.vmap(jax.vmap(run))), twice[None]) == SCHEDULE.nfe
    irregular = make_plan(custom_schedule(STEPS, [0, 1, 3, 4, 8, 10, 13]), taylorseer(1))
    run = lambda x: cached_sample(
        denoiser, jnp.float32(1.0), x, None, timesteps=TIMES, plan=irregular
    )
    assert counter.count(run, noise()) == 7
    full = lambda x: sample(denoiser, jnp.float32(1.0), x, None, timesteps=TIMES)
    assert counter.count(full, noise()) == STEPS


def test_guidance_runs_both_branches_as_one_batch(counted):
    counter, denoiser = counted
    run = lambda x: cached_sample(
        denoiser, jnp.float32(1.0), x, jnp.zeros(3), timesteps=TIMES, plan=PLAN, guidance=3.0,
        null_cond=jnp.ones(3),
    )
    assert counter.count(run, noise()) == SCHEDULE.nfe


def test_heun_forecasts_its_first_evaluation_only(counted):
    counter, denoiser = counted
    run = lambda x: cached_sample(
        denoiser, jnp.float32(1.0), x, None, timesteps=TIMES, plan=PLAN, sampler=flow_heun()
    )
    assert counter.count(run, noise()) == SCHEDULE.nfe + STEPS


def test_vmap_over_seeds_equals_a_loop(dit):
    denoiser, params = dit
    y = jnp.array([0, 3, 4])
    run = lambda x: cached_sample(denoiser, params, x, y, timesteps=TIMES, plan=PLAN)
    stacked = jnp.stack([noise(seed=i) for i in range(3)])
    out = jax.vmap(run)(stacked)
    for i in range(3):
        np.testing.assert_allclose(out[i], run(stacked[i]), rtol=1e-5, atol=1e-6)


def test_plans_sweep_under_vmap_in_one_program(gaussian, counted):
    denoiser, params = gaussian
    plans = [make_plan(SCHEDULE, rule, history=3) for rule in (reuse(), taylorseer(2), newton(2))]
    stacked = ForecastPlan(SCHEDULE, jnp.stack([jnp.asarray(p.weights) for p in plans]))
    run = lambda plan: cached_sample(denoiser, params, noise(), None, timesteps=TIMES, plan=plan)
    out = jax.vmap(run)(stacked)
    for i, plan in enumerate(plans):
        np.testing.assert_allclose(out[i], run(plan), rtol=1e-5, atol=1e-6)
    counter, counting = counted
    run = lambda plan: cached_sample(
        counting, jnp.float32(1.0), noise(), None, timesteps=TIMES, plan=plan
    )
    assert counter.count(jax.vmap(run), stacked) == SCHEDULE.nfe


@pytest.mark.smoke
def test_plans_of_one_schedule_share_one_executable(gaussian, compiles):
    denoiser, params = gaussian
    x, other = noise(shape=(5, 3)), jnp.float32(2.0)
    profile = (denoiser, params, x, None)
    shared = dict(timesteps=TIMES, schedule=SCHEDULE)
    fade = fade_plan(profile_fade(*profile, **shared))
    plans = [make_plan(SCHEDULE, taylorseer(2)), profile_least_squares(*profile, **shared),
             make_plan(SCHEDULE, reuse()), fade]
    run = functools.partial(cached_sample, denoiser, x=x, cond=None)
    with compiles() as count:
        jax.block_until_ready(run(params, timesteps=TIMES, plan=plans[0]))
        assert count() >= 1
    with compiles() as count:
        for plan in plans[1:]:
            jax.block_until_ready(run(params, timesteps=TIMES, plan=plan))
        jax.block_until_ready(run(other, timesteps=TIMES**2, plan=fade))
    assert count() == 0


@pytest.mark.smoke
@pytest.mark.parametrize("sampler", [flow_euler(), ab2(), dpmpp_2m()], ids=["euler", "ab2", "2m"])
def test_half_precision_models_and_latents(sampler):
    if sampler == flow_euler():
        denoiser, params = small_dit(dtype=jnp.bfloat16, scan_layers=True)
    else:  # about what the samplers remember: any model will do
        denoiser = Denoiser(lambda p, x, t, c: p * jnp.tanh(x.astype(p.dtype)))
        params = jnp.bfloat16(0.7)
    y, schedule, times = jnp.array([0, 3, 4]), uniform_schedule(6, 3), uniform_times(6)
    for x in (noise(), noise().astype(jnp.bfloat16)):
        shared = dict(timesteps=times, sampler=sampler)
        table = profile_fade(denoiser, params, x, y, schedule=schedule, **shared)
        plain = sample(denoiser, params, x, y, **shared)
        out = cached_sample(denoiser, params, x, y, plan=fade_plan(table), **shared)
        assert plain.dtype == out.dtype == x.dtype
        assert bool(jnp.all(jnp.isfinite(out.astype(jnp.float32))))


def test_compile_time_stays_near_that_of_one_model_step():
    # Counted, not timed: the program holds the model once at the output, and at most four
    # times inside the model.
    traces = []

    def apply(params, x, t, cond):
        traces.append(1)
        return x * params

    denoiser = Denoiser(apply, lambda p, x, t, c, sites: (apply(p, x, t, c), {"crf": x}),
                        lambda p, x, t, c, feats: feats["crf"] * p)
    for site, limit in (("output", 1), ("crf", 4)):
        text = jax.make_jaxpr(lambda x, site=site: cached_sample(
            denoiser, jnp.float32(1), x, None, timesteps=uniform_times(43),
            plan=make_plan(uniform_schedule(43, 5), taylorseer(1)), site=site))(noise())
        assert len(traces) <= limit + 1 and text  # one more trace finds the feature's shape
        traces.clear()


def test_guidance_values_do_not_recompile(dit, compiles):
    denoiser, params = dit
    y, null = jnp.array([0, 3, 4]), jnp.full(3, 5)
    run = lambda g: cached_sample(
        denoiser, params, noise(), y, timesteps=TIMES, plan=PLAN, guidance=g, null_cond=null
    )
    jax.block_until_ready(run(2.0))
    with compiles() as count:
        jax.block_until_ready(run(4.0))
    assert count() == 0


def test_guidance_of_one_needs_no_null_branch_and_per_sample_guidance_works(dit):
    denoiser, params = dit
    y, null = jnp.array([0, 3, 4]), jnp.full(3, 5)
    run = functools.partial(
        cached_sample, denoiser, params, noise(), y, timesteps=TIMES, plan=PLAN
    )
    alone = run()
    for one in (1, 1.0, np.float32(1.0)):
        np.testing.assert_array_equal(run(guidance=one, null_cond=null), alone)
    mixed = run(guidance=jnp.array([1.0, 3.0, 1.0]), null_cond=null)
    np.testing.assert_allclose(mixed[0], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mixed[1], run(guidance=3.0, null_cond=null)[1], rtol=1e-4,
                               atol=1e-5)


@pytest.mark.parametrize("site", ["output", "crf", "module"])
def test_guidance_branches_never_share_cache_entries(dit, site):
    # With cond equal to null both branches agree, so guidance must not change anything.
    denoiser, params = dit
    y = jnp.array([0, 3, 4])
    run = functools.partial(
        cached_sample, denoiser, params, noise(), y, timesteps=TIMES, plan=PLAN, site=site
    )
    np.testing.assert_allclose(run(guidance=7.0, null_cond=y), run(), rtol=1e-4, atol=1e-4)
    # And with different branches the result is that of two caches run by hand at guidance 0.
    null = jnp.full(3, 5)
    np.testing.assert_allclose(
        run(guidance=0.0, null_cond=null),
        cached_sample(denoiser, params, noise(), null, timesteps=TIMES, plan=PLAN, site=site),
        rtol=1e-4, atol=1e-4,
    )


def test_cfg_channels_guide_the_leading_channels_only(dit):
    denoiser, params = dit
    y, null = jnp.array([0, 3, 4]), jnp.full(3, 5)
    one = uniform_times(1)
    plan = make_plan(uniform_schedule(1, 1), reuse())
    run = functools.partial(cached_sample, denoiser, params, noise(), y, timesteps=one, plan=plan)
    partly = run(guidance=3.0, null_cond=null, cfg_channels=1)
    whole = run(guidance=3.0, null_cond=null)
    np.testing.assert_allclose(partly[..., :1], whole[..., :1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(partly[..., 1:], run()[..., 1:], rtol=1e-5, atol=1e-6)


def test_learned_variance_is_split_off_before_caching():
    denoiser, params = small_dit(learn_sigma=True)
    y = jnp.array([0, 3, 4])
    assert denoiser.apply(params, noise(), jnp.ones(3), y).shape == (3, 4, 4, 4)
    for site in ("output", "module"):
        out = cached_sample(denoiser, params, noise(), y, timesteps=uniform_times(6),
                            plan=make_plan(uniform_schedule(6, 2), taylorseer(1)), site=site)
        assert out.shape == (3, 4, 4, 2)


def test_batch_size_never_changes_a_sample(dit):
    denoiser, params = dit
    x, y = noise(batch=6), jnp.arange(6) % 5
    for site in ("output", "crf", "module"):
        run = functools.partial(
            cached_sample, denoiser, params, timesteps=TIMES, plan=PLAN, site=site
        )
        whole = run(x, y)
        for size in (1, 2) if site == "output" else (1,):
            part = run(x[:size], y[:size])
            assert jnp.abs(part - whole[:size]).max() <= 1e-6 * jnp.abs(whole).max()


def test_a_nan_in_one_sample_stays_there(dit):
    denoiser, params = dit
    x, y = noise(), jnp.array([0, 3, 4])
    broken = x.at[1, 0, 0, 0].set(jnp.nan)
    for site in ("output", "crf", "module"):
        run = functools.partial(
            cached_sample, denoiser, params, cond=y, timesteps=TIMES, plan=PLAN, site=site
        )
        clean, out = run(x), run(broken)
        np.testing.assert_array_equal(out[0], clean[0])
        np.testing.assert_array_equal(out[2], clean[2])
        assert jnp.isnan(out[1]).any()


def test_conditions_may_be_dicts_and_gradients_flow_to_them(gaussian):
    del gaussian
    denoiser = Denoiser(
        lambda p, x, t, c: p * (x - c["mean"][:, None]) * c["scale"][:, None] * t[:, None]
    )
    x = noise(shape=(4,))
    cond = {"scale": jnp.array([1.0, 2.0, 0.5]), "mean": jnp.array([0.1, 0.0, -0.3])}

    def loss(cond):
        return jnp.sum(
            cached_sample(denoiser, jnp.float32(1), x, cond, timesteps=TIMES, plan=PLAN) ** 2
        )

    grads = jax.grad(loss)(cond)
    for name in cond:
        assert jnp.all(jnp.isfinite(grads[name])) and jnp.any(grads[name] != 0)
        step = jnp.zeros(3).at[1].set(1e-3)
        ahead, behind = (loss(cond | {name: cond[name] + s * step}) for s in (1, -1))
        assert float(grads[name][1]) == pytest.approx(float(ahead - behind) / 2e-3, rel=2e-2)


def test_gradients_reach_parameters_through_every_site(dit):
    denoiser, params = dit
    y = jnp.array([0, 3, 4])
    schedule = uniform_schedule(6, 2, warmup=1, cooldown=0)  # one scan: the model once
    for site in ("output", "module"):
        grads = jax.grad(lambda p: jnp.sum(cached_sample(
            denoiser, p, noise(), y, timesteps=uniform_times(6),
            plan=make_plan(schedule, taylorseer(1)), site=site) ** 2))(params)
        assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))


def test_bfloat16_caches_stay_close_and_store_raw_snapshots(dit):
    denoiser, params = dit
    y = jnp.array([0, 3, 4])
    for site in ("output", "module"):
        run = functools.partial(
            cached_sample, denoiser, params, noise(), y, timesteps=TIMES, plan=PLAN, site=site
        )
        exact, rounded = run(), run(cache_dtype=jnp.bfloat16)
        assert rounded.dtype == exact.dtype
        gap = jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)
        assert 0 < gap < 0.02


def test_non_square_latents(dit):
    denoiser, params = dit
    x = noise(shape=(4, 8, 2))
    y = jnp.array([0, 3, 4])
    for site in ("output", "crf", "module"):
        out = cached_sample(denoiser, params, x, y, timesteps=TIMES, plan=PLAN, site=site)
        assert out.shape == x.shape and bool(jnp.all(jnp.isfinite(out)))


def test_repeated_runs_are_equal_nothing_survives_a_call(dit):
    denoiser, params = dit
    y = jnp.array([0, 3, 4])
    run = lambda seed: cached_sample(
        denoiser, params, noise(seed=seed), y, timesteps=TIMES, plan=PLAN, sampler=ab2()
    )
    first = run(0)
    run(1)
    np.testing.assert_array_equal(run(0), first)


def test_multistep_samplers_are_fed_by_forecasts(gaussian):
    denoiser, params = gaussian
    plan = make_plan(SCHEDULE, reuse())
    previous = {}

    def step(x, v, t, u):
        # Adams-Bashforth by hand; uniform steps, first one Euler.
        out = x + (u - t) * (v if "v" not in previous else 1.5 * v - 0.5 * previous["v"])
        previous["v"] = v
        return out

    apply = lambda x, t: denoiser.apply(params, x, jnp.full(3, t), None)
    expected = by_hand(apply, noise(), TIMES, plan, step)
    out = cached_sample(denoiser, params, noise(), None, timesteps=TIMES, plan=plan, sampler=ab2())
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_epsilon_models_with_ddim_and_stochastic_sampling(counted):
    counter, _ = counted
    denoiser = Denoiser(lambda p, x, t, c: p * x * jnp.cos(counter(t)[:, None]))
    times = timestep_indices(STEPS)
    run = functools.partial(
        cached_sample, denoiser, jnp.float32(0.5), noise(shape=(4,)), None, timesteps=times,
        plan=PLAN,
    )
    assert counter.count(lambda: run(sampler=ddim())) == SCHEDULE.nfe
    keyed = lambda seed: run(sampler=ddim(eta=1.0), key=jax.random.key(seed))
    assert jnp.array_equal(keyed(0), keyed(0)) and not jnp.array_equal(keyed(0), keyed(1))
    with pytest.raises(ValueError, match="key: required by a stochastic sampler"):
        run(sampler=ddim(eta=1.0))


def test_data_dependent_forecasters_plug_in(gaussian):
    denoiser, params = gaussian
    bridged = plan_forecaster(PLAN)
    run = functools.partial(cached_sample, denoiser, params, noise(), None, timesteps=TIMES)
    np.testing.assert_allclose(run(plan=bridged), run(plan=PLAN), rtol=1e-6, atol=1e-7)
    # A forecaster with a state of its own: the running mean of all computed outputs.
    mean = Forecaster(
        schedule=SCHEDULE,
        init=lambda f: (jnp.zeros(f.shape), jnp.float32(0)),
        observe=lambda state, f, info: (state[0] + f, state[1] + 1),
        predict=lambda state, info: state[0] / state[1],
    )
    seen = []

    def forecast_mean(apply):
        x = noise()
        for s in range(STEPS):
            if SCHEDULE.is_anchor(s):
                seen.append(apply(x, TIMES[s]))
                v = seen[-1]
            else:
                v = sum(seen) / len(seen)
            x = x + (TIMES[s + 1] - TIMES[s]) * v
        return x

    expected = forecast_mean(lambda x, t: denoiser.apply(params, x, jnp.full(3, t), None))
    np.testing.assert_allclose(run(plan=mean), expected, rtol=1e-4, atol=1e-5)


def test_donation_is_the_callers_choice(gaussian):
    denoiser, params = gaussian
    x = noise(shape=(6,))
    run = functools.partial(cached_sample, denoiser, params, timesteps=TIMES, plan=PLAN, cond=None)
    kept = run(x)
    assert not x.is_deleted()
    np.testing.assert_array_equal(run(jnp.array(x), donate_x=True), kept)


@pytest.mark.smoke
def test_a_skipped_step_costs_under_two_percent_of_a_full_step():
    from fadex.caching.plan import StepInfo
    from fadex.caching.sampling import _feature_functions
    from fadex.sampling.guidance import Guided
    from fadex.sampling.run import apply_step

    # Unrolled layers: a scan's body would be counted once, whatever its length.
    config = DiTConfig.named("S/2", depth=3)
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    x, y = noise(batch=1, shape=(32, 32, 4)), jnp.zeros(1, int)
    plan = make_plan(SCHEDULE, taylorseer(2))
    forecaster = plan_forecaster(plan)
    flops = {}
    for site in ("output", "module"):

        def build(params, site=site):
            model = Guided(denoiser, params, y, None, 1.0, None)
            return model, *_feature_functions(model, site, forecaster)

        def full(params, x, t):
            return apply_step(None, flow_euler(), build(params)[1](x, t)[0], x, (), t, t - 0.02)

        def skip(params, x, t, cache, row):
            info = StepInfo(0, t, 0, row)
            out = build(params)[2](x, t, cache, info)
            return apply_step(None, flow_euler(), out, x, (), t, t - 0.02)

        feature = jax.eval_shape(lambda p: build(p)[1](x, jnp.float32(1.0))[1], params)
        cache = jax.eval_shape(forecaster.init, feature)
        cost = lambda fn, *args: jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]
        t, row = jnp.float32(0.5), jnp.ones(3)
        flops[site] = cost(skip, params, x, t, cache, row) / cost(full, params, x, t)
    assert flops["output"] <= 0.002, flops
    assert flops["module"] <= 0.02, flops


def test_errors_name_the_argument(gaussian, dit):
    denoiser, params = gaussian
    x = noise()
    run = functools.partial(cached_sample, denoiser, params, x, None)

    def refuses(message, kind=ValueError, **kwargs):
        with pytest.raises(kind, match=message):
            run(**(dict(timesteps=TIMES, plan=PLAN) | kwargs))

    refuses(r"timesteps: need num_steps \+ 1 = 21 strictly monotone", timesteps=TIMES[:-1])
    refuses(r"timesteps: need .* strictly monotone", timesteps=TIMES * 0)
    refuses("timesteps: need", timesteps=np.float32(1))
    refuses("plan: expected a ForecastPlan", TypeError, plan="taylor1")
    refuses(r"plan.weights: expected shape \(20, K\)",
            plan=ForecastPlan(SCHEDULE, np.zeros((19, 2))))
    refuses("plan.weights: holds values", plan=ForecastPlan(SCHEDULE, np.full((20, 2), np.nan)))
    refuses("plan.weights: a row per site needs site='module'",
            plan=ForecastPlan(SCHEDULE, np.zeros((20, 4, 2))))
    refuses("schedule: anchors must start at 0",
            plan=ForecastPlan(CacheSchedule(20, (1, 2)), np.zeros((20, 2))))
    model, weights = dit
    with pytest.raises(ValueError, match=r"plan.weights: expected shape \(20, K\) or \(20, 4, K\)"):
        cached_sample(model, weights, x, jnp.zeros(3, int), timesteps=TIMES, site="module",
                      plan=ForecastPlan(SCHEDULE, np.zeros((20, 3, 2))))
    refuses("site: expected one of 'output', 'crf', 'module', got 'block'", site="block")
    refuses("site: model has no with_features", site="crf")
    refuses("null_cond: required when guidance is not 1", guidance=2.0)
    refuses("guidance: holds values that are not finite", guidance=float("inf"),
            null_cond=jnp.zeros(3))
    refuses(r"guidance: expected a number or one per sample \(3,\)", guidance=jnp.ones(2),
            null_cond=jnp.zeros(3))
    refuses("cfg_channels: must be <= the 2 channels", cfg_channels=3)
    refuses("cfg_channels: must be >= 1", cfg_channels=0)
    for cond in (jnp.zeros(2), {"y": jnp.zeros((4, 1))}):
        with pytest.raises(ValueError, match=r"cond.*: expected a leading axis of length 3"):
            cached_sample(denoiser, params, x, cond, timesteps=TIMES, plan=PLAN)
    with pytest.raises(ValueError, match="null_cond: expected the structure of cond"):
        cached_sample(denoiser, params, x, {"a": jnp.zeros(3)}, timesteps=TIMES, plan=PLAN,
                      guidance=2.0, null_cond={"b": jnp.zeros(3)})
    for bad in (x[:0], jnp.ones(3), jnp.float32(1)):
        with pytest.raises(ValueError, match="x: expected at least one sample"):
            cached_sample(denoiser, params, bad, None, timesteps=TIMES, plan=PLAN)
    single = Denoiser(lambda p, x, t, c: x[:1])
    with pytest.raises(ValueError, match=r"denoiser: expected an output shaped like x \(3, 4, 4"):
        cached_sample(single, params, x, None, timesteps=TIMES, plan=PLAN)
    wrong = Denoiser(lambda p, x, t, c: x[..., :1])
    with pytest.raises(ValueError, match="denoiser: expected an output shaped like x"):
        cached_sample(wrong, params, x, None, timesteps=TIMES, plan=PLAN)
    with pytest.raises(ValueError, match="x: sides must be multiples of patch_size=2"):
        cached_sample(model, weights, noise(shape=(5, 4, 2)), jnp.zeros(3, int), timesteps=TIMES,
                      plan=PLAN)
    # Errors come at trace time, also inside jit.
    with pytest.raises(ValueError, match="site: model has no with_features"):
        jax.jit(lambda x: run(timesteps=TIMES, plan=PLAN, site="crf"))(x)
