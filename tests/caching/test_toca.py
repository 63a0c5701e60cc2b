import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import cached_sample, make_plan, reuse, toca_sample, uniform_schedule
from fadex.caching.toca import choose_tokens, toca_costs
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import sample, uniform_times

STEPS = 9
TIMES = uniform_times(STEPS)
SCHEDULE = uniform_schedule(STEPS, 4)


def run(tiny, **kwargs):
    denoiser, params, x, y, _ = tiny
    return toca_sample(
        denoiser, params, x, y, **(dict(timesteps=TIMES, schedule=SCHEDULE) | kwargs)
    )


@pytest.fixture(scope="module")
def reported(tiny):
    return run(tiny, return_stats=True)


@pytest.mark.smoke
def test_no_tokens_is_reuse_of_every_module(tiny):
    denoiser, params, x, y, null = tiny
    shared = dict(guidance=2.0, null_cond=null)
    reused = cached_sample(
        denoiser, params, x, y, timesteps=TIMES, plan=make_plan(SCHEDULE, reuse()),
        site="module", **shared,
    )
    np.testing.assert_allclose(run(tiny, ratio=0.0, **shared), reused, rtol=1e-5, atol=1e-6)


def test_computing_every_step_equals_the_plain_sampler_bit_for_bit(tiny):
    denoiser, params, x, y, _ = tiny
    every = uniform_schedule(STEPS, 1)
    np.testing.assert_array_equal(
        run(tiny, schedule=every), sample(denoiser, params, x, y, timesteps=TIMES)
    )


@pytest.mark.smoke
def test_all_tokens_with_exact_attention_are_the_full_pass(tiny):
    denoiser, params, x, y, _ = tiny
    t = jnp.full(3, 0.4)

    @jax.jit
    def both(x):
        out, feats = denoiser.with_features(params, x, t, y, ("module", "attention"))
        stale = feats["module"].at[1::2].set(7.0)  # attention of now, MLPs of never
        tokens = jnp.broadcast_to(jnp.arange(4), (2, 3, 4))
        return out, feats, denoiser.refresh(params, x, t, y, stale, tokens)

    out, feats, (renewed, feature) = both(x)
    np.testing.assert_allclose(renewed, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(feature, feats["module"], rtol=1e-4, atol=1e-5)
    # Attention received: softmax rows sum to one, so the tokens share N between them.
    assert feats["attention"].shape == (2, 3, 4)
    np.testing.assert_allclose(feats["attention"].mean(-1), 1.0, rtol=1e-5)


def test_tokens_are_the_highest_scores_and_none_stays_stale(tiny):
    del tiny
    received = jnp.array([[[4.0, 1.0, 2.0, 1.0]]])
    age = jnp.zeros_like(received)
    seen = []
    for _ in range(6):
        tokens, age = choose_tokens(received, age, 1.0, 1)
        seen.append(int(tokens[0, 0, 0]))
    assert seen[0] == 0 and set(seen) == {0, 1, 2, 3}
    # By hand: score = received / 2 + age.
    score, expected = np.array([2.0, 0.5, 1.0, 0.5]), []
    ages = np.zeros(4)
    for _ in range(6):
        ages += 1
        expected.append(int(np.argmax(score + ages)))
        ages[expected[-1]] = 0
    assert seen == expected
    tokens, _ = choose_tokens(received, age, 0.0, 2)
    assert set(np.asarray(tokens).ravel().tolist()) == {0, 2}


def test_skipped_steps_cost_their_share_of_tokens():
    # Wide enough that products dominate, unrolled so that the compiler's count sees every block.
    config = DiTConfig(depth=2, width=128, num_heads=2, in_channels=2, num_classes=5)
    model = jax.eval_shape(lambda: nnx.split(DiT(config, rngs=nnx.Rngs(0))))
    denoiser, params = from_nnx(nnx.merge(*model))
    tokens, batch = 64, 2
    x = jax.ShapeDtypeStruct((batch, 16, 16, 2), jnp.float32)
    y = jax.ShapeDtypeStruct((batch,), jnp.int32)
    feature = jax.ShapeDtypeStruct((4, batch, tokens, 128), jnp.float32)

    def flops(fn, *args):
        return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]

    t = jnp.float32(0.5)
    plain = flops(lambda p, x, y: denoiser.apply(p, x, t, y), params, x, y)
    full = flops(lambda p, x, y: denoiser.with_features(
        p, x, t, y, ("module", "attention")), params, x, y)
    for ratio in (0.0, 0.25):
        chosen = jax.ShapeDtypeStruct((2, batch, math.ceil(ratio * tokens)), jnp.int32)
        skip = flops(lambda p, x, y, f, k: denoiser.refresh(p, x, t, y, f, k),
                     params, x, y, feature, chosen)
        share, whole = toca_costs(denoiser, params, x, y, ratio=ratio)
        assert share == pytest.approx(skip / plain, rel=0.25)  # products alone against all
        assert whole == pytest.approx(full / plain, rel=0.05) and whole > 1.01
        # MLPs are 16 D^2 of a token's 24 D^2 + 4 N D operations in a block, and more in scores.
        assert share < 0.05 + ratio * 16 / 24


def test_statistics_hold_sizes_at_computed_steps_and_count_the_scored_pass(reported):
    _, stats = reported
    sizes = np.asarray(stats.sizes)
    assert sizes.shape == (STEPS, 3)
    assert tuple(np.flatnonzero(np.isfinite(sizes).all(1))) == SCHEDULE.anchors[1:]
    assert tuple(np.flatnonzero(np.isnan(sizes).all(1))) == (0, *SCHEDULE.skipped)
    computed, skipped = SCHEDULE.nfe, STEPS - SCHEDULE.nfe
    cost = computed * stats.compute_cost + skipped * stats.skip_cost
    assert stats.estimated_speedup == pytest.approx(STEPS / cost) and stats.compute_cost > 1


def test_model_is_not_called_at_skipped_steps_under_vmap(tiny, counted, reported):
    denoiser, params, x, y, _ = tiny
    counter, _ = counted

    def with_features(p, x, t, c, sites):
        return denoiser.with_features(p, x, counter(t), c, sites)

    counting = denoiser._replace(with_features=with_features)
    call = functools.partial(toca_sample, counting, params, timesteps=TIMES, schedule=SCHEDULE)
    vmapped, pair = jax.jit(jax.vmap(call)), (jnp.stack([x, x[::-1]]), jnp.stack([y, y[::-1]]))
    assert counter.count(vmapped, *pair) == SCHEDULE.nfe
    out = vmapped(*pair)
    np.testing.assert_allclose(out[0], reported[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[1][::-1], out[0], rtol=1e-4, atol=1e-5)


def test_errors_name_the_argument(tiny, gaussian):
    with pytest.raises(ValueError, match="ratio: must lie in"):
        run(tiny, ratio=1.5)
    with pytest.raises(ValueError, match="staleness: holds values that are not finite"):
        run(tiny, staleness=np.nan)
    with pytest.raises(ValueError, match="staleness: expected a scalar"):
        run(tiny, staleness=np.ones(2))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match="x: lies on a mesh with Explicit axes"):
        run((*tiny[:2], jax.device_put(tiny[2], spread), *tiny[3:]))
    with pytest.raises(ValueError, match="timesteps: need num_steps"):
        run(tiny, timesteps=TIMES[:-1])
    with pytest.raises(ValueError, match="denoiser: ToCa needs a model with refresh"):
        toca_sample(*gaussian, jnp.ones((2, 3)), None, timesteps=TIMES, schedule=SCHEDULE)
