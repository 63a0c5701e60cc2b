"""FuCa against its own steps written out in float64, closed forms, and brute force."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    cached_sample,
    custom_schedule,
    fuca_sample,
    fuca_tables,
    make_plan,
    newton,
    place_fuca,
    profile_fuca,
    profile_revision,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.newton import lagrange_weights
from fadex.core import Denoiser
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import (
    ab2,
    ddim,
    flow_heun,
    guidance_breaks,
    linear_alphas_cumprod,
    sample,
    timestep_indices,
    uniform_times,
)


def slope_of(t, sg=0.5):
    """``a(t)`` of the exact velocity ``a(t) x`` for data ``N(0, sg^2)``."""
    return (t - (1 - t) * sg**2) / ((1 - t) ** 2 * sg**2 + t**2)


def written_out(x, times, schedule, velocity, order=2, slope=lambda t: 1 / max(t, 1e-3),
                rule=None, step=None):
    """The steps of the spec in NumPy float64, sums over fine steps and all."""
    rule = taylorseer(1) if rule is None else rule
    step = (lambda x, v, t, u: x + (u - t) * v) if step is None else step
    x = np.asarray(x, np.float64)
    anchors, known = schedule.anchors, {0: velocity(x, times[0])}
    states = {0: x}
    for s, f in itertools.pairwise(anchors):
        ahead = states[s]
        for q in range(s, f):
            pos = schedule.history(s, rule.history)
            v = known[s] if q == s else sum(
                w * known[a] for w, a in zip(rule(pos, q), pos)
            )
            ahead = step(ahead, v, times[q], times[q + 1])
        future = velocity(ahead, times[f])
        nodes = (f, *schedule.history(s, order))
        for q in range(s, f):
            w = lagrange_weights(tuple(times[list(nodes)]), times[q])
            v = w[0] * future + sum(wj * known[a] for wj, a in zip(w[1:], nodes[1:]))
            states[q + 1] = step(states[q], v, times[q], times[q + 1])
        known[f] = future + slope(times[f]) * (states[f] - ahead)
    last = anchors[-1]
    for q in range(last, schedule.num_steps):
        pos = schedule.history(q, rule.history)
        v = known[last] if q == last else sum(w * known[a] for w, a in zip(rule(pos, q), pos))
        states[q + 1] = step(states[q], v, times[q], times[q + 1])
    return np.stack([states[q] for q in range(schedule.num_steps + 1)])


CURVED = Denoiser(lambda p, x, t, c: p * jnp.tanh(x) * (1 + t**2)[:, None])
CURVED_NUMPY = lambda x, t: np.tanh(x) * (1 + t**2)
X = jax.random.normal(jax.random.key(0), (3, 8))
ONE = jnp.float32(1.0)


@pytest.mark.smoke
@pytest.mark.parametrize("schedule", [
    uniform_schedule(20, 4), uniform_schedule(20, 6, warmup=1, cooldown=0),
    custom_schedule(20, [0, 7, 8, 15]), custom_schedule(20, [0]),
], ids=["uniform", "ragged tail", "irregular", "one anchor"])
def test_the_folded_rows_equal_the_steps_written_out(schedule):
    times = uniform_times(20) ** 1.3
    slopes = {
        "none": lambda t: 0.0, "x0": lambda t: 1 / max(t, 1e-3),
        "x0_damped": lambda t: (0.4 if t < 0.5 else 1.0) / max(t, 1e-3),
    }
    for order, rule, revise in (
        (1, taylorseer(1), "x0"), (2, taylorseer(2), "none"), (3, newton(2), "x0_damped"),
    ):
        x, states = fuca_sample(
            CURVED, ONE, X, None, timesteps=times, schedule=schedule, corrector_order=order,
            revise=revise, predictor=make_plan(schedule, rule), return_trajectory=True,
        )
        expected = written_out(X, np.asarray(times, np.float64), schedule, CURVED_NUMPY, order,
                               rule=rule, slope=slopes[revise])
        np.testing.assert_allclose(states, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(x, expected[-1], rtol=2e-4, atol=2e-5)
        short = fuca_sample(
            CURVED, ONE, X, None, timesteps=times, schedule=schedule, corrector_order=order,
            revise=revise, predictor=make_plan(schedule, rule),
        )
        np.testing.assert_allclose(short, x, rtol=1e-5, atol=1e-6)


def fold(times, schedule, velocity, x, **options):
    """Run the host tables in float64."""
    tables = fuca_tables(times, schedule, **options)
    size = tables.predictor.shape[1]
    past = []
    for i, f in enumerate(schedule.anchors):
        ages = np.array([*past, *[np.zeros_like(x)] * (size - len(past))])
        ahead = tables.scale[i] * x + np.tensordot(tables.predictor[i], ages, 1)
        future = velocity(ahead, times[f])
        x = tables.scale[i] * x + np.tensordot(tables.corrector[i], [*ages, future], 1)
        past = [future + tables.slope[i] * (x - ahead), *past][:size]
    ages = np.array([*past, *[np.zeros_like(x)] * (size - len(past))])
    return tables.tail_scale[-1] * x + np.tensordot(tables.tail[-1], ages, 1)


@pytest.mark.smoke
@pytest.mark.parametrize("order, revise, bar", [
    (1, "none", 2.0), (2, "none", 2.5), (2, "x0", 2.5),
])
def test_orders_on_the_gaussian_oracle(order, revise, bar):
    """Error against the run that computes all 960 steps, as the interval halves."""
    steps = 960
    times = np.linspace(1.0, 0.0, steps + 1)
    velocity = lambda x, t: slope_of(t) * x
    full = np.ones(1)
    for t, u in itertools.pairwise(times):
        full = full + (u - t) * velocity(full, t)
    errors = []
    for interval in (48, 24, 12):
        schedule = uniform_schedule(steps, interval)
        got = fold(times, schedule, velocity, np.ones(1), corrector_order=order, revise=revise)
        errors.append(abs(float((got - full)[0])))
    assert np.log2(errors[-2] / errors[-1]) >= bar
    assert errors[0] > errors[1] > errors[2]


def test_velocities_quadratic_in_time_are_exact_for_a_corrector_of_order_two():
    """On an uneven grid too: interpolation is in time, not in steps."""
    times = np.linspace(1.0, 0.0, 31) ** 1.5
    velocity = lambda x, t: 1.0 + 2.0 * t - 3.0 * t**2 + 0.0 * x
    full = sum((u - t) * velocity(0.0, t) for t, u in itertools.pairwise(times))
    schedule = uniform_schedule(30, 5)
    error = lambda order: abs(
        fold(times, schedule, velocity, np.zeros(1), corrector_order=order, revise="none")[0] - full
    )
    assert error(2) <= 1e-12
    assert error(1) > 1e-4


def test_with_every_step_an_anchor_it_is_the_plain_sampler():
    schedule, times = uniform_schedule(12, 1), uniform_times(12)
    ours = fuca_sample(CURVED, ONE, X, None, timesteps=times, schedule=schedule)
    plain = sample(CURVED, ONE, X, None, timesteps=times)
    np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.smoke
def test_noise_predictions_follow_ddim_and_are_revised_by_one_over_sigma():
    abar = linear_alphas_cumprod()
    times = np.asarray(timestep_indices(20), np.float64)
    schedule = uniform_schedule(20, 4)
    alpha = lambda t: np.sqrt(abar[int(t)]) if t >= 0 else 1.0
    sigma = lambda t: np.sqrt(1 - abar[int(t)]) if t >= 0 else 0.0

    def step(x, eps, t, u):
        x0 = (x - sigma(t) * eps) / alpha(t)
        return alpha(u) * x0 + sigma(u) * eps

    # Exact noise prediction for data N(0, 0.5^2): eps = sigma x / (alpha^2/4 + sigma^2).
    exact = lambda x, t: sigma(t) * x / (alpha(t) ** 2 / 4 + sigma(t) ** 2)
    table = jnp.asarray(abar, jnp.float32)

    def apply(params, x, t, cond):
        a = table[jnp.int32(t)][:, None]
        return params * jnp.sqrt(1 - a) * x / (a / 4 + 1 - a)

    denoiser = Denoiser(apply)
    ours = fuca_sample(denoiser, ONE, X, None, timesteps=times, schedule=schedule, sampler=ddim(),
                       revise="x0")
    expected = written_out(X, times, schedule, exact, slope=lambda t: 1 / sigma(t), step=step)
    np.testing.assert_allclose(ours, expected[-1], rtol=2e-3, atol=1e-4)
    damped = fuca_sample(denoiser, ONE, X, None, timesteps=times, schedule=schedule,
                         sampler=ddim())  # the default: 0.4 of it where the noise has the minority
    expected = written_out(
        X, times, schedule, exact, step=step,
        slope=lambda t: (0.4 if sigma(t) < alpha(t) else 1.0) / sigma(t),
    )
    np.testing.assert_allclose(damped, expected[-1], rtol=2e-3, atol=1e-4)
    full = sample(denoiser, ONE, X, None, timesteps=times, sampler=ddim())
    plan = make_plan(schedule, taylorseer(1))
    taylor = cached_sample(denoiser, ONE, X, None, timesteps=times, plan=plan, sampler=ddim())
    assert np.abs(ours - full).max() < np.abs(taylor - full).max()


@pytest.mark.smoke
def test_the_model_runs_once_per_anchor_under_jit_and_vmap(counted):
    counter, denoiser = counted
    schedule, times = uniform_schedule(20, 6), uniform_times(20)
    call = lambda x: fuca_sample(denoiser, ONE, x, None, timesteps=times, schedule=schedule)
    assert counter.count(jax.jit(call), X) == schedule.nfe
    assert counter.count(jax.vmap(call), jnp.stack([X, X])) == schedule.nfe


def test_other_plans_and_values_share_one_program(compiles):
    schedule, times = uniform_schedule(20, 4), uniform_times(20)
    run = functools.partial(fuca_sample, CURVED, timesteps=times, cond=None, schedule=schedule)
    run(params=ONE, x=X)
    scaled, shifted = jnp.float32(1.5), X + 1
    with compiles() as count:
        run(params=scaled, x=shifted, revise="none")
        run(params=ONE, x=X, predictor=make_plan(schedule, newton(1)))
        assert count() == 0


def test_statistics_tell_steps_changes_and_costs(small):
    schedule, times = uniform_schedule(20, 4), uniform_times(20)
    drift = Denoiser(lambda p, x, t, c: p * (1 + t)[:, None] * jnp.ones_like(x))
    x, states, stats = fuca_sample(
        drift, ONE, X, None, timesteps=times, schedule=schedule, return_trajectory=True,
        return_stats=True,
    )
    assert states.shape == (21, *X.shape) and int(stats.nfe) == schedule.nfe
    assert np.flatnonzero(stats.computed).tolist() == list(schedule.anchors)
    values = 1 + np.asarray(times)[list(schedule.anchors)]
    expected = np.abs(np.diff(values)) / values[:-1]
    np.testing.assert_allclose(
        np.asarray(stats.sizes)[list(schedule.anchors[1:])],
        np.repeat(expected[:, None], len(X), 1), rtol=1e-3,
    )
    assert np.isnan(np.asarray(stats.sizes)[list(schedule.skipped)]).all()
    assert stats.estimated_speedup == pytest.approx(20 / schedule.nfe)
    denoiser, params = small
    x = jax.random.normal(jax.random.key(4), (2, 4, 4, 1))
    _, stats = fuca_sample(
        denoiser, params, x, jnp.array([0, 2]), timesteps=uniform_times(9), site="crf",
        schedule=uniform_schedule(9, 3, warmup=2), revise="x0", return_stats=True,
    )
    assert stats.sizes.shape == (9, 2) and 0 < stats.skip_cost < 0.6


def test_gradients_reach_the_condition():
    denoiser = Denoiser(lambda p, x, t, c: p * jnp.tanh(x) + c[:, None])
    loss = lambda c: fuca_sample(
        denoiser, ONE, X, c, timesteps=uniform_times(12), schedule=uniform_schedule(12, 4)
    ).sum()
    c, direction, eps = jnp.zeros(3), jnp.array([1.0, -2.0, 0.5]), 1e-2
    slope = (loss(c + eps * direction) - loss(c - eps * direction)) / (2 * eps)
    assert float(jax.grad(loss)(c) @ direction) == pytest.approx(float(slope), rel=1e-2)


# -- profiling -----------------------------------------------------------------------------


def test_profiled_slopes_are_the_models_own(gaussian):
    """For v = a(t) x the slope along any shift is a(t)."""
    denoiser, params = gaussian
    schedule, times = uniform_schedule(20, 5), uniform_times(20)
    x = jax.random.normal(jax.random.key(2), (4, 16))
    slopes = profile_revision(denoiser, params, x, None, timesteps=times, schedule=schedule)
    gaps = np.diff(schedule.anchors, prepend=0) > 1
    expected = slope_of(np.asarray(times)[list(schedule.anchors)])
    np.testing.assert_allclose(slopes[gaps], expected[gaps], rtol=2e-2, atol=2e-2)
    assert (slopes[~gaps] == 0).all()
    ours = fuca_sample(denoiser, params, x, None, timesteps=times, schedule=schedule,
                       revise="profiled", revision=slopes)
    assert np.isfinite(ours).all()


@pytest.mark.smoke
def test_a_fitted_run_is_exact_where_one_number_per_jump_suffices(gaussian):
    """A linear flow multiplies every sample by one factor: the fit must find it."""
    denoiser, params = gaussian
    schedule, times = uniform_schedule(20, 7), uniform_times(20)
    probe, x = (jax.random.normal(jax.random.key(k), (4, 16)) for k in (5, 6))
    tables = profile_fuca(denoiser, params, probe, None, timesteps=times, schedule=schedule)
    full = sample(denoiser, params, x, None, timesteps=times)
    run = functools.partial(
        fuca_sample, denoiser, params, x, None, timesteps=times, schedule=schedule
    )
    gap = lambda y: float(jnp.linalg.norm(y - full) / jnp.linalg.norm(full))
    assert gap(run(tables=tables)) < 1e-4
    assert gap(run()) > 1e-3


def test_a_fit_is_no_worse_than_its_start_on_its_own_samples():
    schedule, times = uniform_schedule(16, 5), uniform_times(16)
    x = jax.random.normal(jax.random.key(7), (4, 12))
    shared = dict(timesteps=times, schedule=schedule)
    denoiser = Denoiser(lambda p, x, t, c: p * (jnp.tanh(2 * x) + jnp.sin(9 * t**2)[:, None]))
    tables = profile_fuca(denoiser, ONE, x, None, **shared)
    full = sample(denoiser, ONE, x, None, timesteps=times)
    gap = lambda **kw: float(
        jnp.linalg.norm(fuca_sample(denoiser, ONE, x, None, **shared, **kw) - full)
    )
    assert gap(tables=tables) < 0.5 * gap()
    final, states = fuca_sample(
        denoiser, ONE, x, None, **shared, tables=tables, return_trajectory=True
    )
    np.testing.assert_allclose(states[-1], final, atol=1e-5)
    np.testing.assert_allclose(
        final, fuca_sample(denoiser, ONE, x, None, **shared, tables=tables), atol=1e-5
    )


def test_placed_anchors_and_fitted_rows_are_no_worse_than_even_ones(gaussian):
    times = uniform_times(16)
    x = jax.random.normal(jax.random.key(8), (4, 12))
    shared = dict(timesteps=times)
    denoiser = Denoiser(lambda p, x, t, c: p * jnp.tanh(2 * x) * (1 + jnp.exp(-9 * t))[:, None])
    plan = place_fuca(denoiser, ONE, x, None, nfe=5, **shared)
    assert plan.schedule.nfe == 5
    full = sample(denoiser, ONE, x, None, **shared)
    gap = lambda y: float(jnp.linalg.norm(y - full))
    ours = gap(fuca_sample(denoiser, ONE, x, None, **plan._asdict(), **shared))
    even = custom_schedule(16, np.linspace(0, 15, 5).round().astype(int))
    tables = profile_fuca(denoiser, ONE, x, None, schedule=even, **shared)
    assert ours <= 1.001 * gap(
        fuca_sample(denoiser, ONE, x, None, schedule=even, tables=tables, **shared)
    )
    # A linear flow needs one number a jump: every placement is exact.
    denoiser, params = gaussian
    plan = place_fuca(denoiser, params, x, None, nfe=3, **shared)
    ours = fuca_sample(denoiser, params, x, None, **plan._asdict(), **shared)
    np.testing.assert_allclose(ours, sample(denoiser, params, x, None, **shared), rtol=1e-3,
                               atol=1e-4)


# -- inside the model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    from flax import nnx

    config = DiTConfig(depth=2, width=16, num_heads=2, in_channels=1, num_classes=3,
                       scan_layers=True)
    # Drawn on the host: shapes only, no program is compiled for the initial weights.
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(3)
    draw = lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.25, a.dtype)
    return denoiser, jax.tree.map(draw, params)


@pytest.mark.smoke
@pytest.mark.parametrize("revise", ["x0", "head"])
def test_at_the_residual_both_jumps_run_through_the_models_head(small, revise):
    denoiser, params = small
    schedule, times = uniform_schedule(9, 3, warmup=2), uniform_times(9)
    x = jax.random.normal(jax.random.key(4), (2, 4, 4, 1))
    cond = jnp.array([0, 2])
    got, states = fuca_sample(
        denoiser, params, x, cond, timesteps=times, schedule=schedule, site="crf", revise=revise,
        return_trajectory=True,
    )
    full_t = lambda t: jnp.full(2, t)
    head = jax.jit(lambda x, t, f: denoiser.from_features(params, x, t, cond, {"crf": f}))
    whole = jax.jit(lambda x, t: denoiser.with_features(params, x, t, cond, ("crf",)))
    rule, kept = taylorseer(1), {}
    velocity, feats = whole(x, full_t(times[0]))
    kept[0], s, path = feats["crf"], 0, [x]
    for f in schedule.anchors[1:]:
        def through(weights_of, s=s, f=f, velocity=velocity):
            y, states = path[s], []
            for q in range(s, f):
                v = velocity if q == s else head(y, full_t(times[q]), weights_of(q))
                y = y + (times[q + 1] - times[q]) * v
                states.append(y)
            return states

        pos = schedule.history(s, 2)
        ahead = through(
            lambda q, pos=pos: sum(w * kept[a] for w, a in zip(rule(pos, q), pos))
        )[-1]
        future, feats = whole(ahead, full_t(times[f]))
        kept[f] = feats["crf"]
        nodes = (f, *pos)

        def interpolated(q, nodes=nodes):
            w = lagrange_weights(tuple(np.asarray(times)[list(nodes)]), float(times[q]))
            return sum(wj * kept[a] for wj, a in zip(w, nodes))

        path += through(interpolated)
        revised = path[f]
        velocity = (head(revised, full_t(times[f]), kept[f]) if revise == "head"
                    else future + (revised - ahead) / times[f])
        s = f
    path.append(path[-1] + (times[9] - times[8]) * velocity)
    np.testing.assert_allclose(got, path[-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(states, jnp.stack(path), rtol=1e-4, atol=1e-4)


def test_guidance_branches_keep_features_of_their_own(small):
    denoiser, params = small
    schedule, times = uniform_schedule(9, 3), uniform_times(9)
    x = jax.random.normal(jax.random.key(4), (2, 4, 4, 1))
    cond, null = jnp.array([0, 2]), jnp.array([3, 3])
    run = functools.partial(fuca_sample, denoiser, params, x, timesteps=times, schedule=schedule,
                            site="crf", revise="none")
    both = run(cond=cond, null_cond=null, guidance=jnp.ones(2))
    np.testing.assert_allclose(both, run(cond=cond), rtol=1e-4, atol=1e-5)


# -- guidance intervals and wrong arguments --------------------------------------------------


def test_no_jump_is_interpolated_over_an_end_of_the_guidance_interval():
    """Each regime's velocity is constant in time, so every regime must come out exactly."""
    denoiser = Denoiser(lambda p, x, t, c: p * jnp.ones_like(x) * c[:, None])
    times, interval = uniform_times(20), (0.3, 0.7)
    cond, null = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, -1.0, 0.0])
    shared = dict(timesteps=times, guidance=4.0, null_cond=null, guidance_interval=interval)
    schedule = uniform_schedule(20, 5)
    full = sample(denoiser, ONE, X, cond, **shared)
    breaks = guidance_breaks(times, interval)
    broken = schedule.with_breaks(breaks)
    ours = fuca_sample(denoiser, ONE, X, cond, schedule=broken, revise="none", **shared)
    np.testing.assert_allclose(ours, full, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="guided output jumps at the steps"):
        fuca_sample(denoiser, ONE, X, cond, schedule=schedule, **shared)
    with pytest.raises(ValueError, match="guided output jumps at"):
        fuca_sample(denoiser, ONE, X, cond, schedule=schedule.with_anchors(breaks), **shared)


@pytest.mark.parametrize("options, message", [
    (dict(sampler=ddim(eta=0.5)), "sampler: FuCa revises states.*stochastic"),
    (dict(sampler=ab2()), "sampler: FuCa needs a one-step sampler"),
    (dict(sampler=flow_heun()), "sampler: FuCa needs a one-step sampler"),
    (dict(revise="sometimes"), "revise: expected one of"),
    (dict(revise="profiled"), "revision: revise='profiled' needs"),
    (dict(revision=np.ones(7)), "revision: only for revise='profiled'"),
    (dict(revise="profiled", revision=np.ones(2)), "revision: expected one slope for each"),
    (dict(corrector_order=0), "corrector_order: must be >= 1"),
    (dict(site="module"), "site: expected one of 'output', 'crf'"),
    (dict(site="crf"), "site: model has no with_features"),
    (dict(revise="head"), "revise: 'head' evaluates"),
    (dict(predictor=make_plan(uniform_schedule(20, 5), taylorseer(1))),
     "predictor: made for another schedule"),
    (dict(timesteps=uniform_times(19)), "timesteps: need num_steps"),
    (dict(timesteps=np.stack([uniform_times(20)] * 3)), "timesteps: FuCa takes one grid"),
    (dict(x=jnp.zeros((0, 4))), "x: expected at least one sample"),
    (dict(guidance=3.0), "null_cond: required"),
])
def test_bad_arguments_are_named(options, message):
    arguments = dict(x=X, cond=None, timesteps=uniform_times(20), schedule=uniform_schedule(20, 4))
    with pytest.raises(ValueError, match=message):
        fuca_sample(CURVED, ONE, **{**arguments, **options})


def test_tables_of_another_run_are_refused():
    times, schedule = uniform_times(20), uniform_schedule(20, 4)
    tables = fuca_tables(times, schedule)
    run = functools.partial(fuca_sample, CURVED, ONE, X, None)
    shared = dict(timesteps=times, schedule=schedule, tables=tables)
    with pytest.raises(ValueError, match="tables: made for anchors"):
        run(**{**shared, "schedule": uniform_schedule(20, 7)})
    with pytest.raises(ValueError, match="timesteps: the tables were made for another"):
        run(**{**shared, "timesteps": times**1.2})
    with pytest.raises(ValueError, match="sampler: the tables were made for 'euler_step"):
        run(**shared, sampler=ddim())
    for options in (dict(revise="none"), dict(corrector_order=3)):
        with pytest.raises(ValueError, match="tables: they replace predictor"):
            run(**shared, **options)
    with pytest.raises(TypeError, match="tables: expected FucaTables, got dict"):
        run(**{**shared, "tables": {}})
    with pytest.raises(TypeError, match="predictor: expected 'taylor1' or a ForecastPlan"):
        run(timesteps=times, schedule=schedule, predictor="taylor9")
    cond, null = jnp.ones(3), jnp.zeros(3)
    denoiser = Denoiser(lambda p, x, t, c: p * jnp.tanh(x) * (1 + c)[:, None])
    guided = dict(timesteps=times, schedule=schedule, null_cond=null)
    fitted = profile_fuca(denoiser, ONE, X, cond, guidance=3.0, **guided)
    with pytest.raises(ValueError, match="guidance: the tables were profiled at 3, got 1"):
        fuca_sample(denoiser, ONE, X, cond, tables=fitted, timesteps=times, schedule=schedule)
    fuca_sample(denoiser, ONE, X, cond, tables=fitted, guidance=3.2, **guided)


def test_steps_behind_the_last_anchor_are_fitted_too(gaussian):
    denoiser, params = gaussian
    times = uniform_times(16)
    schedule = uniform_schedule(16, 4, cooldown=0)
    assert schedule.anchors[-1] < 15
    x = jax.random.normal(jax.random.key(9), (4, 12))
    shared = dict(timesteps=times, schedule=schedule)
    tables = profile_fuca(denoiser, params, x, None, **shared)
    got, states = fuca_sample(
        denoiser, params, x, None, tables=tables, return_trajectory=True, **shared
    )
    full = sample(denoiser, params, x, None, timesteps=times)
    np.testing.assert_allclose(got, full, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(states[-1], got, rtol=1e-5, atol=1e-6)
    assert np.abs(fuca_sample(denoiser, params, x, None, **shared) - full).max() > 1e-3
