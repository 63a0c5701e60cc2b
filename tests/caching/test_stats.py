import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    CacheStats,
    adaptive_sample,
    cached_sample,
    make_plan,
    measure_speedup,
    plan_stats,
    reuse,
    summary,
    taylorseer,
    teacache,
    uniform_schedule,
)
from fadex.caching.stats import matmul_flops, relative_change
from fadex.sampling import flow_heun, uniform_times

STEPS = 12
TIMES = uniform_times(STEPS)
SCHEDULE = uniform_schedule(STEPS, 4)


def adaptive(gaussian, threshold, **kwargs):
    denoiser, params = gaussian
    x = jax.random.normal(jax.random.key(0), (3, 4))
    return adaptive_sample(
        denoiser, params, x, None, timesteps=TIMES, return_stats=True,
        policy=teacache(threshold, signal="latent"), **kwargs,
    )[1]


@pytest.mark.smoke
def test_a_threshold_above_every_size_is_reported_as_inert(gaussian):
    """sgl-project/sglang#33828: the default threshold never acted, and nobody was told."""
    stats = adaptive(gaussian, 1e3, max_skip=3)
    assert stats.inert and np.flatnonzero(stats.computed).tolist() == [0, 4, 8, 11]
    text = summary(stats)
    assert "INERT: threshold 1e+03 lies above every observed size (largest" in text
    assert "after the warm-up the skip limit asked for a computed step" in text
    assert "nothing asked for a computed step" in adaptive(gaussian, 1e3).inert_reason
    # The observed sizes are what a working threshold is chosen from.
    working = adaptive(gaussian, float(np.nanmedian(stats.sizes)))
    assert not working.inert and "INERT" not in summary(working)
    assert 4 < int(working.nfe) < STEPS


def test_a_threshold_below_every_size_and_runs_without_a_free_step_are_inert(gaussian):
    stats = adaptive(gaussian, 1e-9)
    assert stats.inert and "asked for every step" in stats.inert_reason
    assert "every step lies in the warm-up" in adaptive(gaussian, 0.1, warmup=STEPS).inert_reason


def test_sizes_are_what_the_threshold_was_compared_with(gaussian):
    stats = adaptive(gaussian, 0.3)
    sizes = np.asarray(stats.sizes)
    assert sizes.shape == (STEPS, 3) and np.isnan(sizes[0]).all()
    np.testing.assert_array_equal(stats.wanted[1:], (sizes[1:] >= 0.3).any(1))
    free = ~np.asarray(stats.fixed)
    np.testing.assert_array_equal(stats.computed[free], stats.wanted[free])


@pytest.mark.smoke
@pytest.mark.parametrize("site", ["output", "crf", "module"])
def test_static_plans_report_their_steps_and_residuals(tiny, site):
    denoiser, params, x, y, null = tiny
    out, path, stats = cached_sample(
        denoiser, params, x, y, timesteps=TIMES, plan=make_plan(SCHEDULE, taylorseer(1)),
        site=site, guidance=2.0, null_cond=null, return_trajectory=True, return_stats=True,
    )
    assert tuple(np.flatnonzero(stats.computed)) == SCHEDULE.anchors
    sizes = np.asarray(stats.sizes)
    assert sizes.shape == (STEPS, 3)
    finite = np.isfinite(sizes).all(1)
    assert tuple(np.flatnonzero(finite)) == SCHEDULE.anchors[1:]
    assert not stats.inert and path.shape == (STEPS + 1, *x.shape)
    if site == "crf":  # reporting changes no sample
        np.testing.assert_array_equal(out, cached_sample(
            denoiser, params, x, y, timesteps=TIMES, plan=make_plan(SCHEDULE, taylorseer(1)),
            site=site, guidance=2.0, null_cond=null,
        ))
    if site == "output":
        assert stats.skip_cost == 0 and stats.estimated_speedup == STEPS / SCHEDULE.nfe
    else:
        assert 0 < stats.skip_cost < 0.3 and stats.estimated_speedup < STEPS / SCHEDULE.nfe


def test_relative_changes_are_l1_per_sample(gaussian):
    denoiser, params = gaussian
    x = jax.random.normal(jax.random.key(0), (3, 4))
    every = uniform_schedule(4, 1)
    times = uniform_times(4)
    _, path, stats = cached_sample(
        denoiser, params, x, None, timesteps=times, plan=make_plan(every, reuse()),
        return_trajectory=True, return_stats=True,
    )
    v = np.stack([denoiser.apply(params, path[s], jnp.full(3, times[s]), None) for s in range(4)])
    expected = np.abs(v[1:] - v[:-1]).sum(-1) / np.abs(v[:-1]).sum(-1)
    np.testing.assert_allclose(stats.sizes[1:], expected, rtol=1e-4)
    pair = {"a": jnp.array([[1.0, 2.0], [0.0, 0.0]]), "b": jnp.array([[1.0], [0.0]])}
    other = {"a": jnp.array([[2.0, 2.0], [0.0, 0.0]]), "b": jnp.array([[4.0], [1.0]])}
    np.testing.assert_allclose(relative_change(other, pair), [1.0, np.inf])
    np.testing.assert_allclose(relative_change(pair, pair), [0.0, 0.0])


def test_speedups_count_skipped_work_and_later_stages():
    stats = plan_stats(SCHEDULE, skip_cost=0.1)
    computed = SCHEDULE.nfe
    assert stats.estimated_speedup == STEPS / (computed + 0.1 * (STEPS - computed))
    scored = plan_stats(SCHEDULE, skip_cost=0.1, compute_cost=1.5)
    assert scored.estimated_speedup == STEPS / (1.5 * computed + 0.1 * (STEPS - computed))
    heun = plan_stats(SCHEDULE, evals_per_step=2)
    assert heun.nfe == computed + STEPS
    assert heun.estimated_speedup == 2 * STEPS / (computed + STEPS)


def test_heun_is_counted_by_the_run_itself(gaussian):
    stats = adaptive(gaussian, 0.3, sampler=flow_heun())
    assert int(stats.nfe) == int(stats.computed.sum()) + STEPS


def test_matrix_products_are_counted_through_loops_and_branches():
    w = jnp.ones((4, 4))
    product = 2 * 3 * 4 * 4

    def loop(x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)[0]

    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert matmul_flops(loop, x) == 5 * product
    branch = lambda x: jax.lax.cond(x.sum() > 0, loop, lambda x: x @ w, x)
    assert matmul_flops(jax.jit(branch), x) == 5 * product
    image = jax.ShapeDtypeStruct((1, 8, 8, 2), jnp.float32)
    kernel = jnp.ones((3, 3, 2, 5))
    conv = lambda x: jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert matmul_flops(conv, image) == 2 * 9 * 2 * 64 * 5


def test_measured_speedups_are_ratios_of_medians_and_show_in_the_summary():
    calls = []
    result = measure_speedup(lambda: calls.append("full"), lambda: calls.append("cached"), 3)
    assert calls == ["full", "cached"] * 4
    assert result.speedup == result.full / result.cached > 0
    stats = plan_stats(SCHEDULE).replace(measured_speedup=1.5)
    assert summary(stats).endswith("estimated speed-up 2.00x, measured 1.50x")
    assert isinstance(stats, CacheStats) and jax.tree.leaves(stats)
