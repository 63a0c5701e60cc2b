import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    FadeGrid,
    FadeParams,
    cached_sample,
    custom_schedule,
    fade_plan,
    load_lut,
    lut_from_tree,
    lut_to_tree,
    make_plan,
    profile_fade,
    profile_gram,
    profile_least_squares,
    reuse,
    save_lut,
    taylorseer,
    uniform_schedule,
)
from fadex.caching.compare import relative_error
from fadex.caching.profile import gram_errors, optimal_amplitude
from fadex.core import Denoiser, checkpoint
from fadex.core.special import mittag_leffler
from fadex.sampling import ab2, ddim, flow_euler, flow_heun, sample, uniform_times

STEPS = 20
TIMES = uniform_times(STEPS)
SCHEDULE = uniform_schedule(STEPS, 5)


def wiggly(params, x, t, cond):
    """A velocity with curvature in time that depends on the sample."""
    del cond
    t = t.reshape((-1,) + (1,) * (x.ndim - 1))
    return params * (jnp.tanh(x) * (1 + t**2) + 0.5 * jnp.sin(5 * t + x))


DENOISER, PARAMS = Denoiser(wiggly), jnp.float32(1.0)


def noise(batch=8, seed=0):
    return jax.random.normal(jax.random.key(seed), (batch, 4, 4, 1))


def profile(**kwargs):
    arguments = dict(timesteps=TIMES, schedule=SCHEDULE) | kwargs
    return profile_fade(DENOISER, PARAMS, noise(), None, **arguments)


def features():
    """The full run's outputs, by hand."""
    x, out = noise(), []
    for t, u in itertools.pairwise(TIMES):
        out.append(DENOISER.apply(PARAMS, x, jnp.full(8, t), None))
        x = x + (u - t) * out[-1]
    return np.asarray(jnp.stack(out), np.float64)


@pytest.mark.smoke
def test_gram_errors_are_the_errors_of_the_forecasts():
    gram = profile_gram(DENOISER, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE).gram
    f = features()
    rng = np.random.default_rng(0)
    for s in SCHEDULE.skipped:
        pos = SCHEDULE.history(s, 4)
        weights = np.zeros((3, 4))
        weights[:, : len(pos)] = rng.normal(size=(3, len(pos)))
        forecast = np.einsum("ck,k...->c...", weights[:, : len(pos)], f[list(pos)])
        expected = ((forecast - f[s]) ** 2).sum(axis=(1, 2, 3, 4))
        np.testing.assert_allclose(gram_errors(gram[s, 0], weights), expected, rtol=1e-3)
        best = optimal_amplitude(gram[s, 0], weights, low=-99, high=99)
        exact = (forecast * f[s]).sum((1, 2, 3, 4)) / (forecast**2).sum((1, 2, 3, 4))
        np.testing.assert_allclose(best, exact, rtol=1e-3, atol=1e-4)


def test_small_forecast_errors_keep_their_digits():
    # Features that hardly move: raw Gram matrices in float32 would leave nothing but noise.
    still = Denoiser(lambda p, x, t, c: 100.0 + 1e-3 * t[:, None, None, None] ** 2 + 0 * x)
    gram = profile_gram(still, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE).gram
    s = 4
    t = np.asarray(TIMES, np.float64)
    exact = 8 * 16 * (1e-3 * (t[2] ** 2 - t[s] ** 2)) ** 2
    error = gram_errors(gram[s, 0], np.eye(4)[:1])[0]
    assert error == pytest.approx(exact, rel=0.15)


@pytest.mark.smoke
@pytest.mark.parametrize("amplitude", [False, True])
def test_open_profile_is_never_worse_than_reuse_or_taylor_on_its_samples(amplitude):
    lut = profile(mode="open", amplitude=amplitude)
    gram = profile_gram(DENOISER, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE).gram
    ours = fade_plan(lut).weights
    for rule in (reuse(), taylorseer(1), taylorseer(2)):
        theirs = np.pad(make_plan(SCHEDULE, rule).weights, ((0, 0), (0, 4 - rule.history)))
        for s in SCHEDULE.skipped:
            pair = gram_errors(gram[s, 0], np.stack([ours[s], theirs[s]]))
            assert pair[0] <= pair[1] * (1 + 1e-6)


@pytest.mark.smoke
def test_closed_profile_beats_taylor_and_open_on_fresh_samples():
    x = noise(32, seed=5)
    full = sample(DENOISER, PARAMS, x, None, timesteps=TIMES)
    run = lambda plan: relative_error(
        cached_sample(DENOISER, PARAMS, x, None, timesteps=TIMES, plan=plan), full
    ).mean()
    closed, opened = run(fade_plan(profile())), run(fade_plan(profile(mode="open")))
    taylor = run(make_plan(SCHEDULE, taylorseer(1)))
    assert closed <= 0.85 * taylor and closed <= 1.02 * opened


def test_closed_weights_reproduce_the_replayed_run():
    errors = []
    for drift in (0.0, 1.0):
        plan = fade_plan(profile(drift=drift))
        full = sample(DENOISER, PARAMS, noise(), None, timesteps=TIMES)
        out = cached_sample(DENOISER, PARAMS, noise(), None, timesteps=TIMES, plan=plan)
        errors.append(relative_error(out, full).mean())
    assert errors[1] < errors[0]  # the drift term is what makes the closed loop work


def test_synthetic_relaxation_is_forecast_five_times_better_than_taylor():
    # F(s) = C + B E_0.6(-0.8 u^0.6) + noise, u in intervals from the first anchor.
    schedule = custom_schedule(16, range(0, 16, 5))
    u = np.arange(16) / 5
    shape = jnp.asarray(mittag_leffler(0.6, 1.0, -0.8 * u**0.6), jnp.float32)

    def relaxation(params, x, t, cond):
        step = jnp.round((1 - t) * 16).astype(int)
        noise = 1e-3 * jax.random.normal(jax.random.key(3), (16, 16))[step]
        value = cond["c"] + cond["b"] * shape[step][:, None] + noise
        return params * value + 0 * x

    denoiser = Denoiser(relaxation)
    cond = {"c": jnp.linspace(-1, 1, 8)[:, None], "b": jnp.linspace(1, 3, 8)[:, None]}
    x = jnp.zeros((8, 16))
    times = uniform_times(16)
    lut = profile_fade(denoiser, PARAMS, x, cond, timesteps=times, schedule=schedule, mode="open")
    plan, taylor = fade_plan(lut), make_plan(schedule, taylorseer(1))
    exact = profile_gram(denoiser, PARAMS, x, cond, timesteps=times, schedule=schedule).gram
    total = lambda w: sum(
        np.sqrt(gram_errors(exact[s, 0], np.pad(w[s], (0, 4 - w.shape[1]))[None])[0])
        for s in schedule.skipped if s > 5
    )
    assert total(plan.weights) <= 0.2 * total(taylor.weights)


def test_one_profiling_sample_is_enough_in_open_mode():
    x = noise(32, seed=5)
    full = sample(DENOISER, PARAMS, x, None, timesteps=TIMES)
    errors = []
    for count in (1, 8):
        lut = profile_fade(DENOISER, PARAMS, noise()[:count], None, timesteps=TIMES,
                           schedule=SCHEDULE, mode="open")
        out = cached_sample(DENOISER, PARAMS, x, None, timesteps=TIMES, plan=fade_plan(lut))
        errors.append(relative_error(out, full).mean())
    assert errors[0] <= 1.1 * errors[1]


def test_integer_parameters_win_ties():
    straight = Denoiser(lambda p, x, t, c: p * x * 0 + t[:, None, None, None])
    lut = profile_fade(straight, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE,
                       mode="open", grid=FadeGrid(orders=(1,)))
    for s in SCHEDULE.skipped:
        np.testing.assert_allclose(fade_plan(lut).weights[s, :2],
                                   taylorseer(1)(SCHEDULE.history(s, 2), s), atol=1e-9)


@pytest.mark.smoke
def test_module_tables_have_a_row_per_layer(digits):
    denoiser, params = digits
    schedule = uniform_schedule(8, 3)
    x, y = jax.random.normal(jax.random.key(0), (4, 8, 8, 1)), jnp.arange(4)
    lut = profile_fade(denoiser, params, x, y, timesteps=uniform_times(8), schedule=schedule,
                       site="module")
    plan = fade_plan(lut)
    assert lut.mode == "open" and plan.weights.shape == (8, 12, 4)
    assert len({tuple(row) for row in plan.weights[4].round(6)}) > 1
    out = cached_sample(denoiser, params, x, y, timesteps=uniform_times(8), plan=plan,
                        site="module")
    assert bool(jnp.all(jnp.isfinite(out)))


def test_tables_for_multistep_samplers():
    x = noise(32, seed=5)
    full = sample(DENOISER, PARAMS, x, None, timesteps=TIMES, sampler=ab2())
    run = lambda plan: relative_error(
        cached_sample(DENOISER, PARAMS, x, None, timesteps=TIMES, plan=plan, sampler=ab2()), full
    ).mean()
    assert run(fade_plan(profile(sampler=ab2()))) <= 0.9 * run(make_plan(SCHEDULE, taylorseer(1)))


def test_time_tables_serve_other_step_counts():
    lut = profile(bins=5)
    assert lut.axis == "time" and lut.params.alpha.shape == (5, 4, 1)
    other = uniform_schedule(30, 5)
    times = uniform_times(30)
    x = noise(32, seed=5)
    full = sample(DENOISER, PARAMS, x, None, timesteps=times)
    run = lambda plan: relative_error(
        cached_sample(DENOISER, PARAMS, x, None, timesteps=times, plan=plan), full
    ).mean()
    ours = run(fade_plan(lut, other, timesteps=times))
    assert ours < run(make_plan(other, taylorseer(1)))
    with pytest.raises(ValueError, match="timesteps: a time table needs them"):
        fade_plan(lut, other)
    with pytest.raises(ValueError, match="timesteps: expected num_steps"):
        fade_plan(lut, other, timesteps=times[:-1])
    for interval in (7, 3):
        with pytest.raises(ValueError, match="schedule: the table was profiled at an interval of"):
            fade_plan(lut, uniform_schedule(30, interval), timesteps=times)
    with pytest.raises(ValueError, match="schedule: skips 5 steps in a row"):
        fade_plan(lut, uniform_schedule(30, 7), timesteps=times, strict=False)
    fade_plan(lut, uniform_schedule(30, 3), timesteps=times, strict=False)


@pytest.mark.smoke
@pytest.mark.parametrize("bins", [None, 4])
def test_tables_survive_a_file_and_an_orbax_checkpoint(tmp_path, bins):
    lut = profile(bins=bins, amplitude=True)
    back = load_lut(save_lut(lut, tmp_path / "sub" / "table.npz"))
    arrays, metadata = lut_to_tree(lut)
    checkpoint.save(tmp_path / "orbax", arrays, metadata=metadata)
    again = lut_from_tree(
        checkpoint.restore(tmp_path / "orbax"),
        checkpoint.read_manifest(tmp_path / "orbax")["metadata"],
    )
    for other in (back, again):
        np.testing.assert_array_equal(fade_plan(other).weights, fade_plan(lut).weights)
        assert other.schedule == lut.schedule and other.grid == lut.grid
        assert other.guidance == lut.guidance and other.model_hash == lut.model_hash


def test_damaged_or_foreign_files_are_refused(tmp_path):
    path = save_lut(profile(), tmp_path / "table.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "flipped.npz").write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is damaged|not a readable FADE table"):
        load_lut(tmp_path / "flipped.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="not a readable FADE table"):
        load_lut(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError, match="path: no FADE table"):
        load_lut(tmp_path / "missing.npz")
    with pytest.raises(ValueError, match="path: expected a name ending in .npz"):
        save_lut(profile(), tmp_path / "table.json")
    arrays, metadata = lut_to_tree(profile())
    with pytest.raises(ValueError, match="lut: format version 99"):
        lut_from_tree(arrays, metadata | {"version": 99})
    with pytest.raises(ValueError, match="lut: expected arrays of one shape"):
        lut_from_tree(arrays | {"errors": arrays["errors"][:-1]}, metadata)
    assert json.dumps(metadata)


def test_tables_that_do_not_fit_the_run_are_refused():
    lut = profile_fade(DENOISER, PARAMS, noise(), jnp.zeros(8), timesteps=TIMES,
                       schedule=SCHEDULE, guidance=2.0, null_cond=jnp.zeros(8))
    with pytest.raises(ValueError, match="lut: profiled for num_steps=20, the schedule has"):
        fade_plan(lut, uniform_schedule(25, 5))
    with pytest.raises(ValueError, match="lut: profiled for anchors"):
        fade_plan(lut, uniform_schedule(20, 4))
    with pytest.raises(ValueError, match=r"guidance: the table was profiled at 2\.0.*uses 3\.0"):
        fade_plan(lut, guidance=3.0)
    fade_plan(lut, guidance=2.4)
    fade_plan(lut, guidance=3.0, strict=False)
    with pytest.raises(ValueError, match="params: not the model the table was profiled on"):
        fade_plan(lut, params=2 * PARAMS)
    fade_plan(lut, params=PARAMS)
    with pytest.raises(ValueError, match="sampler: the table was profiled with 'euler_step"):
        fade_plan(lut, sampler=ab2())
    with pytest.raises(ValueError, match="site: the table was profiled at 'output'"):
        fade_plan(lut, site="crf")
    with pytest.raises(ValueError, match="timesteps: differ"):
        fade_plan(lut, timesteps=TIMES**2)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="mode: expected one of 'open', 'closed'"):
        profile(mode="both")
    inner = DENOISER._replace(with_features=lambda *a: None, from_features=lambda *a: None)
    with pytest.raises(ValueError, match="mode: 'closed' needs site='output', got site='crf'"):
        profile_fade(inner, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE,
                     site="crf", mode="closed")
    with pytest.raises(ValueError, match="site: model has no with_features"):
        profile(site="module")
    with pytest.raises(ValueError, match="drift: must lie in"):
        profile(drift=2.0)
    with pytest.raises(ValueError, match="bins: must be >= 1"):
        profile(bins=0)
    with pytest.raises(ValueError, match="guidance: profile one value at a time"):
        profile(guidance=jnp.ones(8))
    for sampler in (flow_heun(), ddim(eta=1.0)):
        with pytest.raises(ValueError, match="sampler: closed-loop profiling needs"):
            profile(sampler=sampler)
    broken = Denoiser(lambda p, x, t, c: x * jnp.nan)
    for mode in ("open", "closed"):
        with pytest.raises(ValueError, match="params: the full run gave values that are not fin"):
            profile_fade(broken, PARAMS, noise(), None, timesteps=TIMES, schedule=SCHEDULE,
                         mode=mode)
    growing = Denoiser(lambda p, x, t, c: jnp.where(jnp.abs(x) > 8.0, jnp.nan, -9.0 * x))
    quiet = 1e-3 * noise()
    with pytest.raises(ValueError, match="params: the full run|schedule: the replayed run"):
        profile_fade(growing, PARAMS, 1e3 * quiet, None, timesteps=TIMES, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="grid.forms: expected one of"):
        profile(grid=FadeGrid(forms=("riesz",)))


@pytest.mark.smoke
def test_least_squares_is_the_floor_of_linear_forecasts_on_its_samples():
    shared = dict(timesteps=TIMES, schedule=SCHEDULE, history=4)
    free = profile_least_squares(DENOISER, PARAMS, noise(), None, **shared)
    affine = profile_least_squares(DENOISER, PARAMS, noise(), None, affine=True, **shared)
    fade = fade_plan(profile(mode="open", amplitude=True)).weights
    f = features()
    for s in SCHEDULE.skipped:
        pos = SCHEDULE.history(s, 4)
        columns = f[list(pos)].reshape(len(pos), -1).T
        error = lambda w: ((columns @ w[: len(pos)] - f[s].ravel()) ** 2).sum()
        best = error(np.linalg.lstsq(columns, f[s].ravel(), rcond=None)[0])
        size = (columns**2).sum(0).max()
        assert best <= error(free.weights[s]) <= 1.05 * best + 3e-5 * size
        assert error(free.weights[s]) <= error(affine.weights[s]) * 1.001 + 1e-5 * size
        assert error(free.weights[s]) <= error(fade[s]) * 1.001 + 1e-5 * size
        assert affine.weights[s].sum() == pytest.approx(1.0, abs=1e-9)


def test_fade_weights_of_a_table_match_its_cells():
    lut = profile(amplitude=True)
    assert set(np.unique(lut.params.form)) <= {0, 1}
    assert np.all((lut.params.amplitude >= 0.8) & (lut.params.amplitude <= 1.25))
    assert np.isnan(lut.errors[0]) and np.all(np.isfinite(lut.errors[list(SCHEDULE.skipped)]))
    assert isinstance(lut.params, FadeParams) and lut.sampler.startswith("euler_step")
    assert flow_euler() == flow_euler()
