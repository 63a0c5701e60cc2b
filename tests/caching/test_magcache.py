import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import (
    adaptive_sample,
    cached_sample,
    magcache,
    magcache_schedule,
    make_plan,
    profile_magcache,
    reuse,
)
from fadex.core import Denoiser
from fadex.sampling import ab2, uniform_times

# Steps that diffusers 0.42.1 computes (MagCacheConfig on a toy transformer of two blocks) for
# RATIOS; keys are (threshold, max_skip_steps, retention_ratio).
RATIOS = np.array([
    1.01, 0.9952, 1.0287, 0.9976, 0.9552, 1.0141, 0.9757, 0.9586, 0.9695, 0.9716, 1.001, 0.9504,
    0.9904, 1.0298, 0.9806, 1.0087, 1.0091, 1.0224, 1.0037, 0.9646, 1.0239, 0.9817, 0.9518, 0.9832,
])
DIFFUSERS = {
    (0.06, 3, 0.2): (0, 1, 2, 3, 4, 7, 9, 12, 16, 20, 22),
    (0.2, 5, 0.1): (0, 1, 7, 11, 17, 23),
    (0.02, 8, 0.0): (0, 2, 4, 6, 7, 8, 9, 11, 13, 15, 17, 19, 20, 22),
    (10.0, 2, 0.3): (0, 1, 2, 3, 4, 5, 6, 9, 12, 15, 18, 21),
}


@pytest.mark.smoke
@pytest.mark.parametrize("setting", DIFFUSERS)
def test_schedule_and_policy_decide_like_diffusers(gaussian, setting):
    denoiser, params = gaussian
    threshold, max_skip, retention = setting
    options = dict(max_skip=max_skip, retention=retention)
    schedule = magcache_schedule(RATIOS, threshold, cooldown=0, **options)
    assert schedule.anchors == DIFFUSERS[setting]
    x = jax.random.normal(jax.random.key(0), (2, 3))
    for cooldown in (0, 1):
        out, stats = adaptive_sample(
            denoiser, params, x, None, timesteps=uniform_times(24), cooldown=cooldown,
            policy=magcache(RATIOS, threshold, **options), return_stats=True,
        )
        schedule = magcache_schedule(RATIOS, threshold, cooldown=cooldown, **options)
        assert tuple(np.flatnonzero(stats.computed)) == schedule.anchors
    static = cached_sample(
        denoiser, params, x, None, timesteps=uniform_times(24), plan=make_plan(schedule, reuse())
    )
    np.testing.assert_allclose(out, static, rtol=1e-5, atol=1e-6)


def test_random_ratios_decide_alike_on_host_and_device(gaussian):
    denoiser, params = gaussian
    rng = np.random.default_rng(0)
    x = jax.random.normal(jax.random.key(0), (2, 3))
    for _ in range(10):
        ratios = 1 + 0.1 * rng.normal(size=24)
        threshold, max_skip = rng.uniform(0, 0.5), int(rng.integers(0, 9))
        _, stats = adaptive_sample(
            denoiser, params, x, None, timesteps=uniform_times(24), return_stats=True,
            policy=magcache(ratios, threshold, max_skip=max_skip),
        )
        schedule = magcache_schedule(ratios, threshold, max_skip=max_skip)
        assert tuple(np.flatnonzero(stats.computed)) == schedule.anchors


def test_profiled_ratios_are_those_of_the_token_norms(tiny):
    denoiser, params, x, y, null = tiny
    times = uniform_times(6)
    ratios = profile_magcache(denoiser, params, x, y, timesteps=times)
    full = jax.jit(lambda z, t: denoiser.with_features(params, z, t, y, ("crf",)))
    z, norms = x, []
    for s in range(6):
        t = np.full(3, times[s], np.float32)
        out, feats = full(z, t)
        norms.append(np.linalg.norm(feats["crf"], axis=-1))
        z = z + (times[s + 1] - times[s]) * out
    expected = [1.0] + [(b / (a + 1e-8)).mean() for a, b in itertools.pairwise(norms)]
    np.testing.assert_allclose(ratios, expected, rtol=1e-4)
    outside = profile_magcache(
        denoiser, params, x, y, timesteps=times, site="output", guidance=2.0, null_cond=null
    )
    assert outside.shape == (6,) and np.isfinite(outside).all()


def test_profiles_take_grids_of_samples_and_multistep_samplers(gaussian):
    denoiser, params = gaussian
    x = jax.random.normal(jax.random.key(0), (2, 3))
    profile = lambda times: profile_magcache(
        denoiser, params, x, None, timesteps=times, site="output", sampler=ab2()
    )
    times = np.asarray(uniform_times(6))
    np.testing.assert_allclose(profile(np.stack([times, times])), profile(times), rtol=1e-5)


def test_a_guidance_interval_is_profiled_as_it_is_sampled():
    denoiser = Denoiser(lambda p, x, t, c: p * jnp.sin(2 * x) + c[:, None])
    x, cond = jax.random.normal(jax.random.key(0), (2, 3)), np.ones(2, np.float32)
    profile = lambda **kw: profile_magcache(
        denoiser, np.float32(1), x, cond, timesteps=uniform_times(6), site="output", **kw
    )
    never = profile(guidance=9.0, null_cond=-cond, guidance_interval=(2.0, 3.0))
    np.testing.assert_allclose(never, profile(), rtol=1e-6)
    half = profile(guidance=9.0, null_cond=-cond, guidance_interval=(0.4, 1.0))
    assert half[4] == 1 and not np.allclose(half[1:4], never[1:4], rtol=1e-2)


def test_errors_name_the_argument():
    for call, message in (
        (lambda: magcache(np.ones((2, 2)), 0.1), "ratios: expected one per step"),
        (lambda: magcache([np.nan], 0.1), "ratios: holds values that are not finite"),
        (lambda: magcache(np.ones(4), -1.0), "threshold: must lie in"),
        (lambda: magcache(np.ones(4), 0.1, retention=1.5), "retention: must lie in"),
        (lambda: magcache_schedule(np.ones(4), 0.1, max_skip=-1), "max_skip: must be >= 0"),
        (lambda: magcache_schedule(np.ones(4), 0.1, cooldown=-1), "cooldown: must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
