import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import preset, profile_preset, run_preset, summary
from fadex.caching.presets import METHODS, QUALITIES
from fadex.core import Denoiser
from fadex.sampling import ddim, guidance_breaks, sample, uniform_times

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


# A model without anything inside, and a batch for it: programs that compile in no time.
TOY = Denoiser(lambda p, x, t, c: p * jnp.sin(2 * x) * t[:, None] + c[:, None])
BATCH = (TOY, jnp.float32(1), jax.random.normal(jax.random.key(0), (3, 4)), jnp.ones(3))
toy = functools.partial(run_preset, *BATCH, timesteps=TIMES, quality="high")
toy_profile = functools.partial(profile_preset, *BATCH, timesteps=TIMES, quality="high")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "method",
    ["dmd", "fade", "fuca", "fuca_placed", "lsq", "taylor1", "toca", "teacache", "dbcache"],
)
def test_one_call_samples_and_says_what_it_did(digits, method):
    batch = BATCH
    if method in ("toca", "teacache", "dbcache"):  # cached inside the model
        x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
        batch = (*digits, x, jnp.array([1, 3, 5, 7]))
    full = sample(*batch, timesteps=TIMES)
    out, stats = run_preset(
        *batch, timesteps=TIMES, method=method, quality="high", return_stats=True
    )
    error = np.linalg.norm(out - full) / np.linalg.norm(full)
    assert 0 < error < 0.15, error
    assert 0 < int(stats.nfe) < STEPS and stats.computed.shape == (STEPS,)
    assert 1 < float(stats.estimated_speedup) <= STEPS / int(stats.nfe) * 1.001
    assert f"{int(stats.nfe)} of {STEPS} steps computed" in summary(stats)


@pytest.mark.smoke
def test_a_kept_profile_replaces_the_profiling_run_and_serves_inside_jit(compiles):
    kept = toy_profile(method="magcache")
    assert kept[:4] == ("magcache", "high", STEPS, "output") and kept.value.shape == (STEPS,)
    assert toy_profile(method="foca").value is None
    run = lambda kept: toy(method="magcache", profile=kept)
    expected = run(kept)
    np.testing.assert_array_equal(
        expected, toy(method="magcache", profile_x=BATCH[2], profile_cond=BATCH[3]))
    with compiles() as count:
        jax.block_until_ready(run(kept._replace(value=np.float64(0.5) * kept.value)))
    assert count() == 0
    inside = jax.jit(lambda x: run_preset(
        *BATCH[:2], x, BATCH[3], timesteps=TIMES, quality="high", method="magcache", profile=kept
    ))
    np.testing.assert_allclose(inside(BATCH[2]), expected, rtol=1e-5, atol=1e-6)


def test_profiling_under_jit_is_refused_and_methods_without_it_run():
    call = lambda method: jax.jit(lambda x: run_preset(
        *BATCH[:2], x, BATCH[3], timesteps=TIMES, method=method))
    for method in ("fade", "fuca_placed", "lsq", "magcache", "teacache"):
        with pytest.raises(ValueError, match=f"profile: {method} is profiled on the host"):
            call(method)(BATCH[2])
    with pytest.raises(ValueError, match="profile: fade is profiled on the host"):
        jax.jit(lambda: toy_profile(method="fade").value.weights)()  # closed over, not traced
    assert call("taylor1")(BATCH[2]).shape == (3, 4)


def test_a_profile_of_another_run_is_refused():
    kept = toy_profile(method="magcache")
    for other, said in (
        (dict(method="teacache"), "made for magcache at 'high' over 20 steps, site 'output'"),
        (dict(quality="fast"), "the run is magcache at 'fast'"),
        (dict(timesteps=uniform_times(9)), "the run is magcache at 'high' over 9 steps"),
    ):
        with pytest.raises(ValueError, match=f"profile: .*{said}"):
            toy(**(dict(method="magcache", profile=kept) | other))
    with pytest.raises(TypeError, match="profile: expected a PresetProfile, .* got ndarray"):
        toy(method="magcache", profile=kept.value)


def test_a_model_without_features_is_cached_at_its_output_or_named():
    for method in ("teacache", "magcache"):
        _, stats = toy(method=method, return_stats=True)
        assert 2 < int(stats.nfe) < STEPS and stats.skip_cost == 0
    with pytest.raises(ValueError, match="policy: dbcache .* needs a model with begin, finish$"):
        toy(method="dbcache")
    with pytest.raises(ValueError, match="denoiser: ToCa needs a model with refresh"):
        toy(method="toca")
    with pytest.raises(ValueError, match="site: model has no with_features"):
        toy(method="teacache", site="crf")
    with pytest.raises(ValueError, match="site: expected one of 'module', got 'output'"):
        toy(method="toca", site="output")


def test_schedules_are_broken_where_a_guidance_interval_begins_and_ends():
    guided = dict(guidance=9.0, null_cond=-BATCH[3], guidance_interval=(0.32, 0.62))
    breaks = guidance_breaks(TIMES, (0.32, 0.62))
    full = sample(*BATCH, timesteps=TIMES, **guided)
    for method in ("taylor1", "dmd", "lsq", "fuca", "teacache", "magcache"):
        out, stats = toy(method=method, return_stats=True, **guided)
        assert set(breaks) <= set(np.flatnonzero(stats.computed).tolist()), method
        assert np.linalg.norm(out - full) < 0.1 * np.linalg.norm(full), method
    # Without guidance there is no jump, and no step is added.
    _, stats = toy(method="taylor1", return_stats=True, guidance_interval=(0.32, 0.62))
    assert int(stats.nfe) == preset("taylor1", "high", num_steps=STEPS).schedule.nfe
    with pytest.raises(ValueError, match="guidance_interval: fuca_placed places its anchors"):
        toy(method="fuca_placed", **guided)


def test_stochastic_samplers_take_a_key():
    run = lambda seed: run_preset(
        Denoiser(lambda p, x, t, c: 0.1 * x), (), BATCH[2], None, method="taylor1",
        timesteps=np.linspace(900.0, 0.0, STEPS + 1), sampler=ddim(eta=1.0),
        key=jax.random.key(seed),
    )
    assert bool((run(0) == run(0)).all()) and bool((run(0) != run(1)).any())


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="method: expected one of 'bezicast', 'dbcache'"):
        preset("euler", num_steps=50)
    with pytest.raises(ValueError, match="quality: expected one of 'high', 'balanced', 'fast'"):
        preset("reuse", "ultra", num_steps=50)
    with pytest.raises(ValueError, match="num_steps: must be >= 1"):
        preset("reuse", num_steps=0)
