import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import adaptive_sample, dbcache
from fadex.sampling import uniform_times

STEPS = 14
TIMES = uniform_times(STEPS)


@pytest.fixture(scope="module")
def model(tiny):
    denoiser, params, _, y, _ = tiny
    first = jax.jit(lambda x, t: (
        denoiser.begin(params, x, t, y, 0), denoiser.begin(params, x, t, y, 1)
    ))
    rest = jax.jit(lambda x, t, h: denoiser.finish(params, x, t, y, h, 1))
    head = jax.jit(lambda x, t, h, r: denoiser.resume(params, x, t, y, h, r))
    return first, rest, head


@pytest.mark.smoke
@pytest.mark.parametrize("order", [0, 1])
def test_equals_a_loop_with_host_decisions(tiny, model, order):
    denoiser, params, x, y, _ = tiny
    first, rest, head = model
    threshold = 1.2
    z, reference, kept = x, None, {}
    for s in range(STEPS):
        t = jnp.full(3, TIMES[s])
        h0, h1 = first(z, t)
        moved = np.asarray(h1 - h0, np.float64)
        far = reference is None or (
            np.abs(moved - reference).sum((1, 2)) / np.abs(reference).sum((1, 2))
        ).max() >= threshold
        if far or s == STEPS - 1:
            out, residual = rest(z, t, h1)
            kept[s], reference = residual, moved
        else:
            pos = sorted(kept)[::-1][: order + 1]
            weights = [np.prod([(s - b) / (a - b) for b in pos if b != a]) for a in pos]
            out = head(z, t, h1, sum(w * kept[a] for w, a in zip(weights, pos)))
        z = z + (TIMES[s + 1] - TIMES[s]) * out
    result, stats = adaptive_sample(
        denoiser, params, x, y, timesteps=TIMES, policy=dbcache(threshold), site="crf",
        order=order, return_stats=True,
    )
    assert 2 < len(kept) < STEPS - 3
    assert np.flatnonzero(stats.computed).tolist() == sorted(kept)
    np.testing.assert_allclose(result, z, rtol=1e-4, atol=1e-5)
    # One of two blocks runs at skipped steps, and each half of a step embeds time and label anew,
    # a seventh of this small model.
    assert 0.5 < stats.skip_cost < 0.8 and 1 < stats.compute_cost < 1.2


def test_guidance_keeps_a_size_for_each_sample_and_a_decision_for_all(tiny):
    denoiser, params, x, y, null = tiny
    _, stats = adaptive_sample(
        denoiser, params, x, y, timesteps=TIMES, policy=dbcache(0.3), guidance=2.0,
        null_cond=null, return_stats=True,
    )
    assert stats.sizes.shape == (STEPS, 3) and bool(jnp.isfinite(stats.sizes[1:]).all())


def test_errors_name_the_argument():
    for call, message in (
        (lambda: dbcache(-1.0), "threshold: must lie in"),
        (lambda: dbcache(0.1, blocks=0), "blocks: must be >= 1"),
        (lambda: dbcache(0.1, reduce="sum"), "reduce: expected one of"),
        (lambda: dbcache(0.1, max_skip=-1), "max_skip: must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
