import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import TEACACHE_FLUX, adaptive_sample, fit_teacache, profile_changes, teacache
from fadex.core import Denoiser
from fadex.sampling import guidance_breaks, uniform_times

STEPS = 16
TIMES = uniform_times(STEPS)


@pytest.fixture(scope="module")
def model(tiny):
    denoiser, params, _, y, _ = tiny
    full = jax.jit(lambda x, t: denoiser.with_features(params, x, t, y, ("crf",)))
    skip = jax.jit(lambda x, t, crf: denoiser.from_features(params, x, t, y, {"crf": crf}))
    signal = jax.jit(lambda x, t: denoiser.modulated(params, x, t, y))
    return full, skip, signal


def by_hand(model, x, threshold, coefficients, reduce):
    """The paper's loop, with host decisions: ``(x, computed steps)``."""
    full, skip, signal = model
    previous, total, crf, computed = None, 0.0, None, []
    for s in range(STEPS):
        t = jnp.full(3, TIMES[s])
        m = np.asarray(signal(x, t), np.float64)
        if previous is not None:
            axes = None if reduce == "mean" else (1, 2)
            change = np.abs(m - previous).mean(axes) / np.abs(previous).mean(axes)
            total = total + np.polyval(coefficients, change)
        if s in (0, STEPS - 1) or np.any(total >= threshold):
            out, feats = full(x, t)
            crf, total = feats["crf"], 0.0
            computed.append(s)
        else:
            out = skip(x, t, crf)
        previous = m
        x = x + (TIMES[s + 1] - TIMES[s]) * out
    return x, computed


@pytest.mark.smoke
@pytest.mark.parametrize("reduce", ["mean", "any"])
def test_equals_the_published_loop(tiny, model, reduce):
    denoiser, params, x, y, _ = tiny
    for threshold, coefficients in ((1.2, (0.0, 1.0, 0.0)), (2.0, (0.2, 1.0, 0.02))):
        expected, computed = by_hand(model, x, threshold, coefficients, reduce)
        out, stats = adaptive_sample(
            denoiser, params, x, y, timesteps=TIMES, site="crf", return_stats=True,
            policy=teacache(threshold, coefficients, reduce=reduce),
        )
        assert 2 < len(computed) < STEPS - 3
        assert np.flatnonzero(stats.computed).tolist() == computed
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        assert stats.sizes.shape == ((STEPS, 3) if reduce == "any" else (STEPS,))


def test_the_fit_finds_the_polynomial_between_signal_and_feature(tiny):
    denoiser, params, x, y, null = tiny
    shared = dict(timesteps=TIMES, site="crf", guidance=2.0, null_cond=null)
    rule = teacache(0.1).rule
    profile = profile_changes(denoiser, params, x, y, rule=rule, **shared)
    coefficients = fit_teacache(denoiser, params, x, y, degree=3, **shared)
    assert coefficients.shape == (4,) and coefficients.dtype == np.float64
    before, after = profile.signal[1:].ravel(), profile.feature[1:].ravel()
    expected = np.polyfit(before, after, 3)  # numpy's own, highest power first
    np.testing.assert_allclose(
        np.polyval(coefficients, before), np.polyval(expected, before), rtol=1e-6
    )
    with pytest.raises(ValueError, match="degree: 200 needs more than 200 different changes"):
        fit_teacache(denoiser, params, x, y, degree=200, **shared)


def test_the_fit_follows_a_guidance_interval_and_leaves_out_its_ends():
    # The output is guided in the middle third: a jump of its own size at both ends.
    denoiser = Denoiser(lambda p, x, t, c: p * x + c[:, None])
    x, cond = jax.random.normal(jax.random.key(0), (3, 4)), jnp.ones(3)
    shared = dict(timesteps=TIMES, guidance=50.0, null_cond=-cond)
    profile = functools.partial(
        profile_changes, denoiser, jnp.float32(1), x, cond, rule=teacache(1.0, signal="latent").rule
    )
    found = profile(guidance_interval=(0.3, 0.6), **shared)
    jumps = guidance_breaks(TIMES, (0.3, 0.6))
    assert tuple(np.flatnonzero(np.isnan(found.feature).all(1))) == (0, *jumps)
    assert (found.ratios[list(jumps)] == 1).all()
    # Before the interval the run is the plain one.
    plain = profile(timesteps=TIMES)
    np.testing.assert_allclose(
        found.feature[1 : jumps[0]], plain.feature[1 : jumps[0]], rtol=1e-5)
    fit = fit_teacache(denoiser, jnp.float32(1), x, cond, signal="latent", site="output", degree=1,
                       guidance_interval=(0.3, 0.6), **shared)
    kept = np.isfinite(found.signal[:, 0])
    expected = np.polyfit(found.signal[kept].ravel(), found.feature[kept].ravel(), 1)
    np.testing.assert_allclose(fit, expected, rtol=1e-4, atol=1e-6)


def test_a_higher_threshold_never_computes_more(gaussian):
    denoiser, params = gaussian
    x = jax.random.normal(jax.random.key(0), (3, 4))
    spent = [
        int(adaptive_sample(
            denoiser, params, x, None, timesteps=TIMES, return_stats=True,
            policy=teacache(threshold, signal="latent"),
        )[1].nfe)
        for threshold in (0.0, 0.05, 0.1, 0.2, 0.4, 1e6)
    ]
    assert spent[0] == STEPS and spent[-1] == 2 and spent == sorted(spent, reverse=True)


def test_errors_name_the_argument():
    assert teacache(0.4, TEACACHE_FLUX).numbers["coefficients"].shape == (5,)
    for call, message in (
        (lambda: teacache(-0.1), "threshold: must lie in"),
        (lambda: teacache(jnp.float32(-1)), "threshold: must lie in"),
        (lambda: teacache(jnp.float32(np.nan)), "threshold: must be finite"),
        (lambda: teacache(np.ones(2)), "threshold: expected a"),
        (lambda: teacache(0.1, reduce="all"), "reduce: expected one of 'any', 'max', 'mean'"),
        (lambda: teacache(0.1, signal="none"), "signal: expected one of"),
        (lambda: teacache(0.1, [[1.0]]), "coefficients: expected a vector"),
        (lambda: teacache(0.1, [np.nan]), "coefficients: holds values that are not finite"),
        (lambda: teacache(0.1, max_skip=-2), "max_skip: must be >= 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_thresholds_may_be_traced(gaussian):
    denoiser, params = gaussian
    x = jnp.ones((2, 3))
    run = functools.partial(
        adaptive_sample, denoiser, params, x, None, timesteps=TIMES, return_stats=True
    )
    nfe = jax.jit(lambda threshold: run(policy=teacache(threshold, signal="latent"))[1].nfe)
    assert int(nfe(0.0)) == STEPS and int(nfe(1e6)) == 2
