import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import preset, profile_preset, run_preset, summary
from fadex.caching.presets import METHODS, QUALITIES
from fadex.sampling import sample, uniform_times

STEPS = 20
TIMES = uniform_times(STEPS)


def test_levels_of_a_method_spend_less_and_less():
    for method in METHODS:
        chosen = [preset(method, quality, num_steps=50) for quality in QUALITIES]
        assert [c.quality for c in chosen] == list(QUALITIES)
        if chosen[0].schedule is not None:
            spent = [c.schedule.nfe for c in chosen]
        else:
            spent = [-c.settings["threshold"] for c in chosen]
        assert spent == sorted(spent, reverse=True) and len(set(spent)) == 3


@pytest.mark.smoke
@pytest.mark.parametrize(
    "method", ["taylor1", "dmd", "fuca", "fuca_placed", "toca", "teacache", "magcache", "dbcache"]
)
def test_one_call_samples_and_says_what_it_did(digits, method):
    denoiser, params = digits
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    y = jnp.array([1, 3, 5, 7])
    full = sample(denoiser, params, x, y, timesteps=TIMES)
    out, stats = run_preset(
        denoiser, params, x, y, timesteps=TIMES, method=method, quality="high", return_stats=True
    )
    error = np.linalg.norm(out - full) / np.linalg.norm(full)
    assert 0 < error < 0.15, error
    assert 0 < int(stats.nfe) < STEPS and stats.computed.shape == (STEPS,)
    assert 1 < float(stats.estimated_speedup) <= STEPS / int(stats.nfe) * 1.001
    assert f"{int(stats.nfe)} of {STEPS} steps computed" in summary(stats)


def test_a_kept_profile_replaces_the_profiling_run(digits, compiles):
    denoiser, params = digits
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    y = jnp.array([1, 3, 5, 7])
    chosen = dict(timesteps=TIMES, method="magcache", quality="high")
    ratios = profile_preset(denoiser, params, x, y, **chosen)
    assert ratios.shape == (STEPS,)
    assert profile_preset(denoiser, params, x, y, timesteps=TIMES, method="foca") is None
    run = lambda profile: run_preset(denoiser, params, x, y, profile=profile, **chosen)
    np.testing.assert_array_equal(
        run(ratios), run_preset(denoiser, params, x, y, profile_x=x, profile_cond=y, **chosen)
    )
    with compiles() as count:
        jax.block_until_ready(run(0.5 * ratios))
    assert count() == 0


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="method: expected one of 'bezicast', 'dbcache'"):
        preset("euler", num_steps=50)
    with pytest.raises(ValueError, match="quality: expected one of 'high', 'balanced', 'fast'"):
        preset("reuse", "ultra", num_steps=50)
    with pytest.raises(ValueError, match="num_steps: must be >= 1"):
        preset("reuse", num_steps=0)
