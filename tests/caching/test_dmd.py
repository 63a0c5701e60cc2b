"""Oracles: sums of exponentials, whose values at every step are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    StepInfo,
    bezicast_plan,
    cached_sample,
    dmd,
    make_plan,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.dmd import fit_roots, root_weights
from fadex.caching.plan import ring_slots
from fadex.core import Denoiser
from fadex.sampling import uniform_times

STEPS = 32
SCHEDULE = uniform_schedule(STEPS, 4, warmup=1, cooldown=0)
RNG = np.random.default_rng(0)
DIRECTIONS = RNG.normal(size=(2, 40))


def two(first, second):
    """``n -> first^n a + second^n b``, per step; conjugates make it real."""
    a, b = DIRECTIONS
    if np.iscomplexobj(first):
        return lambda n: np.real(first**n * (a + 1j * b))
    return lambda n: first**n * a + (second**n * b if second else 0.0)


MODES = {
    "two decays": two(0.97, 0.9),
    "constant and decay": two(1.0, 0.93),
    "constant and growth": two(1.0, 1.05),
    "damped oscillation": two(0.98 * np.exp(0.15j), None),
    "growing oscillation": two(1.02 * np.exp(0.2j), None),
    "one decay": two(0.95, 0.0),
    "constant": two(1.0, 0.0),
    "straight line": lambda n: DIRECTIONS[0] + 0.05 * n * DIRECTIONS[1],
}


@functools.partial(jax.jit, static_argnames=("forecaster",))
def play(features, table, slots, anchor, *, forecaster):
    """Forecasts at every step of a run whose features ``[S, G, M]`` are given."""

    def body(state, xs):
        feature, row, slot, anchor = xs
        info = StepInfo(jnp.int32(0), jnp.float32(0), slot, row)
        seen = forecaster.observe(state, feature, info)
        state = jax.tree.map(lambda a, b: jnp.where(anchor, a, b), seen, state)
        return state, jnp.where(anchor, feature, forecaster.predict(state, info))

    return jax.lax.scan(body, forecaster.init(features[0]), (features, table, slots, anchor))[1]


def forecasts(features, schedule=SCHEDULE, **options):
    forecaster = dmd(schedule, **options)
    slots, _ = ring_slots(schedule, options.get("history", 6))
    features = jnp.asarray(features, jnp.float32)
    anchor = np.isin(np.arange(schedule.num_steps), schedule.anchors)
    # The functions do not look at the schedule: one program for all of equal length.
    forecaster = forecaster._replace(table=(), schedule=SCHEDULE)
    return play(features, dmd(schedule, **options).table, slots, anchor, forecaster=forecaster)


def relative(out, truth):
    return np.linalg.norm(out - truth, axis=-1) / np.linalg.norm(truth, axis=-1)


@pytest.mark.smoke
def test_exact_on_sums_of_two_exponentials():
    truth = np.stack([[mode(s) for mode in MODES.values()] for s in range(STEPS)])
    errors = relative(np.asarray(forecasts(truth)), truth)
    settled = SCHEDULE.anchors[3]  # four equally spaced anchors
    for name, worst in zip(MODES, errors[settled:].max(0)):
        assert worst < 2e-5, (name, worst)
    # Before, Taylor-1 is not exact on curved ones.
    assert errors[SCHEDULE.anchors[1] + 1 : settled, list(MODES).index("two decays")].max() > 1e-4


def test_rank_one_is_exact_on_one_exponential_and_no_more():
    truth = np.stack([[MODES[name](s) for name in ("one decay", "two decays")]
                      for s in range(STEPS)])
    errors = relative(np.asarray(forecasts(truth, rank=1, history=2)), truth)
    assert errors[SCHEDULE.anchors[1]:, 0].max() < 1e-5
    assert errors[SCHEDULE.anchors[3]:, 1].max() > 1e-4


def test_short_histories_fall_back_to_taylor_then_reuse():
    schedule = uniform_schedule(12, 4)  # 0 1 2 6 10 11: never four equally spaced anchors
    truth = RNG.normal(size=(12, 3, 5)).cumsum(0)
    out = np.asarray(forecasts(truth, schedule))
    plan = make_plan(schedule, taylorseer(1))
    for s in schedule.skipped:
        pos = schedule.history(s, 2)
        expected = sum(w * truth[a] for w, a in zip(plan.weights[s], pos))
        np.testing.assert_allclose(out[s], expected, rtol=1e-4, atol=1e-5)
    alone = uniform_schedule(6, 9, warmup=1, cooldown=0)
    out = forecasts(truth[:6], alone)
    np.testing.assert_allclose(out, np.broadcast_to(out[0], out.shape))


def test_only_the_equally_spaced_suffix_is_fitted():
    # Warm-up anchors are one step apart, the others four: mixing them would spoil the fit.
    schedule = uniform_schedule(STEPS, 4, warmup=3, cooldown=0)
    truth = np.stack([[MODES["damped oscillation"](s)] for s in range(STEPS)])
    errors = relative(np.asarray(forecasts(truth, schedule)), truth)
    assert errors[schedule.anchors[5]:].max() < 2e-5  # 2 6 10 14 are equally spaced


@pytest.mark.smoke
def test_bad_samples_fall_back_and_spoil_no_other():
    good = np.stack([MODES["two decays"](s) for s in range(STEPS)])
    flip = np.where(np.arange(STEPS)[:, None] // 4 % 2, -1.0, 1.0) * DIRECTIONS[0]
    wild = 9.0 ** (np.arange(STEPS)[:, None] / 4) * DIRECTIONS[1]
    nan = np.full_like(good, np.nan)
    out = np.asarray(forecasts(np.stack([good, flip, wild, nan, 0 * good], axis=1)))
    alone = np.asarray(forecasts(good[:, None]))
    np.testing.assert_allclose(out[:, 0], alone[:, 0], rtol=1e-5, atol=1e-6)
    taylor = make_plan(SCHEDULE, taylorseer(1))
    for s in (17, 19, 26):  # a negative root and one beyond the limit: Taylor-1
        pos = SCHEDULE.history(s, 2)
        for column, truth in ((1, flip), (2, wild)):
            expected = sum(w * truth[a] for w, a in zip(taylor.weights[s], pos))
            np.testing.assert_allclose(out[s, column], expected, rtol=1e-3)
    assert np.isnan(out[:, 3]).all() and not out[:, 4].any()


def test_a_linear_model_is_sampled_exactly_and_programs_are_shared(compiles):
    # Euler on x' = diag(p) x multiplies each coordinate by a constant: two exponentials.
    rates = jnp.array([0.7, 0.7, 2.0, 2.0])
    denoiser = Denoiser(lambda p, x, t, c: p * x)
    x = jax.random.normal(jax.random.key(0), (3, 4))
    run = lambda x: cached_sample(denoiser, rates, x, None, timesteps=uniform_times(STEPS),
                                  plan=dmd(uniform_schedule(STEPS, 3, cooldown=0)))
    exact = x * (1 - rates / STEPS) ** STEPS
    taylor = cached_sample(
        denoiser, rates, x, None, timesteps=uniform_times(STEPS),
        plan=make_plan(uniform_schedule(STEPS, 3, cooldown=0), taylorseer(1)),
    )
    out = jax.block_until_ready(run(x))
    assert float(jnp.abs(out - exact).max()) < 0.3 * float(jnp.abs(taylor - exact).max())
    other = jax.block_until_ready(2 * x)
    with compiles() as count:
        jax.block_until_ready(run(other))
    assert count() == 0
    np.testing.assert_allclose(jax.vmap(run)(x[:, None])[:, 0], out, rtol=1e-5, atol=1e-6)
    broken = run(x.at[1].set(jnp.nan))
    np.testing.assert_array_equal(broken[::2], out[::2])


def test_modules_have_fits_of_their_own(tiny):
    denoiser, params, x, y, _ = tiny
    schedule = uniform_schedule(14, 2, warmup=1)
    run = functools.partial(
        cached_sample, denoiser, params, cond=y, timesteps=uniform_times(14), site="module"
    )
    out, stats = run(x, plan=dmd(schedule, axes=2), return_stats=True)
    assert bool(jnp.isfinite(out).all()) and int(stats.nfe) == schedule.nfe
    broken, _ = run(x.at[1].set(jnp.nan), plan=dmd(schedule, axes=2), return_stats=True)
    np.testing.assert_array_equal(broken[::2], out[::2])


@pytest.mark.parametrize("make", [dmd, lambda s, axes=1: bezicast_plan(
    s, guard="state", site="output" if axes == 1 else "module")], ids=["dmd", "state guard"])
def test_forecasters_that_look_at_samples_are_refused_at_another_site(tiny, make):
    denoiser, params, x, y, _ = tiny
    schedule = uniform_schedule(6, 2)
    assert make(schedule).sample_axes == 1 and make(schedule, axes=2).sample_axes == 2
    for site, axes in (("module", 1), ("output", 2), ("crf", 2)):
        right = 3 - axes
        mixed = ", and would mix samples" if site == "module" else ""
        message = (rf"plan: this forecaster takes {axes} leading axes .* site='{site}' has "
                   rf"{right}{mixed}; build it with axes={right} \(bezicast_plan: site='{site}'\)")
        with pytest.raises(ValueError, match=message):
            cached_sample(denoiser, params, x, y, timesteps=uniform_times(6), site=site,
                          plan=make(schedule, axes=axes))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_fit_lowers_for_accelerators(platform):
    # No eigenvalue solver in it: those exist on CPUs only.
    def fit(gram, count, tau):
        return root_weights(*fit_roots(gram, count, 2), tau)

    shapes = (jax.ShapeDtypeStruct((3, 7, 7), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32),
              jax.ShapeDtypeStruct((), jnp.float32))
    assert jax.export.export(jax.jit(jax.vmap(fit, (0, None, None))), platforms=[platform])(
        jax.ShapeDtypeStruct((2, 3, 7, 7), jnp.float32), *shapes[1:])


def test_errors_name_the_argument():
    for options, message in (
        ({"rank": 3}, "rank: expected one of 1, 2"),
        ({"history": 3}, "history: rank 2 needs 4 snapshots, got 3"),
        ({"axes": 0}, "axes: must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dmd(SCHEDULE, **options)
    with pytest.raises(ValueError, match="axes: expected at most the 2 axes"):
        dmd(SCHEDULE, axes=3).init(jnp.ones((2, 3)))
