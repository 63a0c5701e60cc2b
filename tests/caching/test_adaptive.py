"""The adaptive loop itself, whatever the policy; and the model's passes that stop and resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    adaptive_sample,
    dbcache,
    magcache,
    profile_changes,
    teacache,
)
from fadex.core import Denoiser
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import ab2, flow_heun, sample, uniform_times

STEPS = 12
TIMES = uniform_times(STEPS)
latent = functools.partial(teacache, signal="latent")


def noise(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.smoke
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "listed"])
def test_a_pass_may_stop_behind_any_block_and_resume(scan):
    config = DiTConfig(depth=3, width=16, num_heads=2, in_channels=2, num_classes=5,
                       scan_layers=scan)
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), a.dtype), params)
    args = (noise(2, 4, 4, 2), jnp.array([0.3, 0.7]), jnp.array([1, 4]))

    @jax.jit
    def passes(params):
        found = []
        for blocks in (0, 1, 3):
            hidden = denoiser.begin(params, *args, blocks)
            out, residual = denoiser.finish(params, *args, hidden, blocks)
            found += [out, denoiser.resume(params, *args, hidden, residual)]
        # The first block's attention gets the modulated input: its output says so.
        _, feats = denoiser.with_features(params, *args, ("module",))
        model = nnx.merge(denoiser.apply.graphdef, params)
        first = model.blocks[0] if not scan else nnx.merge(
            nnx.graphdef(model.blocks), jax.tree.map(lambda a: a[0], nnx.state(model.blocks)))
        attention = first.attn(denoiser.modulated(params, *args))
        return denoiser.apply(params, *args), found, feats["module"][0], attention

    full, found, expected, attention = passes(params)
    for out in found:
        np.testing.assert_allclose(out, full, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(attention, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="blocks: must be <= the 3 blocks of the model, got 4"):
        denoiser.begin(params, *args, 4)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("make", "site"),
    [(teacache, "output"), (teacache, "crf"), (dbcache, "output"), (dbcache, "crf"),
     (latent, "output")],
    ids=["tea-output", "tea-crf", "db-output", "db-crf", "latent"],
)
def test_a_threshold_of_zero_equals_the_plain_sampler_bit_for_bit(tiny, make, site):
    denoiser, params, x, y, null = tiny
    sampler = ab2() if make is latent else None
    shared = dict(timesteps=TIMES, sampler=sampler, guidance=2.5, null_cond=null)
    plain = sample(denoiser, params, x, y, **shared)
    out = adaptive_sample(denoiser, params, x, y, policy=make(0.0), site=site, **shared)
    assert jnp.array_equal(out, plain)


def check_vmaps(run, counter, x, y, shapes):
    """As many evaluations, the same decisions and results as for one batch of all samples."""
    whole, stats = run(x, y)
    nfe = int(stats.nfe)
    assert 3 <= nfe <= STEPS - 3
    assert counter.count(run, x, y) == nfe
    for shape in shapes:
        vmapped = run
        for _ in shape[:-1]:
            vmapped = jax.vmap(vmapped)
        vmapped = jax.jit(vmapped)
        args = x.reshape(*shape, *x.shape[1:]), y.reshape(shape)
        assert counter.count(vmapped, *args) == nfe
        out, each = vmapped(*args)
        np.testing.assert_allclose(out.reshape(x.shape), whole, rtol=1e-4, atol=1e-5)
        computed = each.computed.reshape(-1, STEPS)
        np.testing.assert_array_equal(computed, np.broadcast_to(stats.computed, computed.shape))
    return nfe


def layered(counter=lambda t: t):
    """A model in two halves, the second of them counted."""
    return Denoiser(
        lambda p, x, t, c: x,
        begin=lambda p, x, t, c, blocks: x * (1 + blocks * jnp.sin(3 * c * t))[:, None],
        finish=lambda p, x, t, c, h, blocks: (h * counter(t)[:, None], h * t[:, None]),
        resume=lambda p, x, t, c, h, residual: h + residual,
    )


VMAP, VMAP_OF_VMAP = (4, 1), (2, 2, 1)


@pytest.mark.smoke
@pytest.mark.parametrize("reduce, nfe", [("any", 5), ("max", 8), ("mean", 4)])
def test_teacache_computes_as_often_under_vmap_and_vmap_of_vmap_as_in_one_batch(
    counted, reduce, nfe
):
    counter, denoiser = counted
    # Each sample's signal moves at a time of its own: alone, the samples would decide otherwise.
    signal = lambda t, c: 1 + 2 * jax.nn.sigmoid(40 * (c - t))
    denoiser = denoiser._replace(
        modulated=lambda p, x, t, c: jnp.ones_like(x) * signal(t, c)[:, None]
    )
    run = jax.jit(lambda x, y: adaptive_sample(
        denoiser, jnp.float32(1), x, y, timesteps=TIMES, policy=teacache(0.35, reduce=reduce),
        return_stats=True,
    ))
    x, y = noise(4, 6), jnp.array([0.1, 0.35, 0.6, 0.85])
    assert check_vmaps(run, counter, x, y, (VMAP, VMAP_OF_VMAP)) == nfe


def test_dbcache_computes_the_rest_as_often_under_vmap_as_in_one_batch(counted):
    counter, _ = counted
    run = jax.jit(lambda x, y: adaptive_sample(
        layered(counter), jnp.float32(1), x, y, timesteps=TIMES, policy=dbcache(0.6), site="crf",
        return_stats=True,
    ))
    check_vmaps(run, counter, noise(4, 6), jnp.array([0.0, 1.0, 2.0, 4.0]), (VMAP_OF_VMAP,))


@pytest.mark.smoke
def test_a_transformer_computes_as_often_under_vmap_of_vmap_as_in_one_batch(tiny, counted):
    denoiser, params, *_ = tiny
    counter, _ = counted

    def with_features(p, x, t, c, sites):
        return denoiser.with_features(p, x, counter(t), c, sites)

    model = denoiser._replace(with_features=with_features)
    run = jax.jit(lambda x, y: adaptive_sample(
        model, params, x, y, timesteps=TIMES, policy=teacache(1.2), site="crf",
        return_stats=True,
    ))
    check_vmaps(run, counter, noise(4, 4, 4, 2), jnp.arange(4), (VMAP_OF_VMAP,))


def test_any_model_is_served_by_the_latent_signal(counted):
    counter, denoiser = counted
    run = jax.jit(lambda x: adaptive_sample(
        denoiser, jnp.float32(1), x, None, timesteps=TIMES, policy=latent(0.2), return_stats=True
    ))
    x = noise(3, 4)
    nfe = int(run(x)[1].nfe)
    assert 2 < nfe < STEPS and counter.count(run, x) == nfe
    heun = jax.jit(lambda x: adaptive_sample(
        denoiser, jnp.float32(1), x, None, timesteps=TIMES, policy=latent(0.2), return_stats=True,
        sampler=flow_heun(),
    ))
    assert counter.count(heun, x) == int(heun(x)[1].nfe)


def test_numbers_are_operands(gaussian, compiles):
    denoiser, params = gaussian
    run = lambda policy, **kw: jax.block_until_ready(adaptive_sample(
        denoiser, params, noise(3, 4), None, timesteps=TIMES, policy=policy, **kw))
    run(latent(0.1))
    with compiles() as count:
        run(latent(0.3))
        run(latent(0.2, [2.0, 0.0], max_skip=2), warmup=3, cooldown=2)
    assert count() == 0


@pytest.mark.smoke
def test_extrapolation_runs_over_the_last_computed_steps_wherever_they_are(gaussian):
    denoiser, params = gaussian
    x = noise(3, 4)
    velocity = lambda x, s: denoiser.apply(params, x, jnp.full(3, TIMES[s]), None)
    for order in (0, 1, 2):
        out, stats = adaptive_sample(
            denoiser, params, x, None, timesteps=TIMES, policy=latent(0.25), order=order,
            return_stats=True,
        )
        computed = np.flatnonzero(stats.computed)
        assert len(computed) < STEPS - 2
        seen, z = {}, x
        for s in range(STEPS):
            if s in computed:
                seen[s] = v = velocity(z, s)
            else:
                pos = sorted(seen)[::-1][: order + 1]
                v = sum(
                    seen[a] * np.prod([(s - b) / (a - b) for b in pos if b != a]) for a in pos
                )
            z = z + (TIMES[s + 1] - TIMES[s]) * v
        np.testing.assert_allclose(out, z, rtol=1e-4, atol=1e-5)


def test_limits_hold_whatever_the_threshold_says(gaussian):
    denoiser, params = gaussian
    _, stats = adaptive_sample(
        denoiser, params, noise(3, 4), None, timesteps=TIMES, policy=latent(1e9), warmup=2,
        cooldown=1, max_skip=3, return_stats=True,
    )
    assert np.flatnonzero(stats.computed).tolist() == [0, 1, 5, 9, 11]
    assert np.flatnonzero(stats.fixed).tolist() == [0, 1, 11]
    # Step 0 is computed even when nothing says so.
    _, stats = adaptive_sample(
        denoiser, params, noise(3, 4), None, timesteps=TIMES, policy=latent(1e9), warmup=0,
        cooldown=0, return_stats=True,
    )
    assert np.flatnonzero(stats.computed).tolist() == [0]


@pytest.mark.smoke
def test_a_nan_in_one_sample_computes_everything_and_stays_there(gaussian):
    denoiser, params = gaussian
    denoiser = denoiser._replace(modulated=lambda p, x, t, c: x * t[:, None])
    x = noise(3, 4)
    broken = x.at[1, 0].set(jnp.nan)
    for reduce in ("any", "mean", "max"):
        out, stats = adaptive_sample(
            denoiser, params, broken, None, timesteps=TIMES, policy=teacache(1e3, reduce=reduce),
            order=1, return_stats=True,
        )
        assert bool(stats.computed.all())
        np.testing.assert_array_equal(
            out[::2], sample(denoiser, params, x, None, timesteps=TIMES)[::2]
        )
        assert bool(jnp.isnan(out[1]).any())


def test_a_guidance_interval_starts_a_new_history_and_samples_may_have_times_of_their_own():
    denoiser = Denoiser(lambda p, x, t, c: jnp.sin(2 * x) * t[:, None] + c[:, None])
    run = functools.partial(
        adaptive_sample, denoiser, (), noise(3, 4), jnp.ones(3), policy=latent(1e9),
        null_cond=-jnp.ones(3), order=1, return_stats=True, guidance=3.0,
    )
    _, stats = run(timesteps=TIMES, guidance_interval=(0.3, 0.7))
    inside = (TIMES[:-1] >= 0.3) & (TIMES[:-1] <= 0.7)
    jumps = np.flatnonzero(np.diff(inside)) + 1
    assert np.flatnonzero(stats.computed).tolist() == [0, *jumps, STEPS - 1]
    out, _ = run(timesteps=TIMES)
    rows, _ = run(timesteps=np.stack([TIMES, TIMES, TIMES**1.5]))
    np.testing.assert_allclose(rows[:2], out[:2], rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(rows[2] - out[2]).max()) > 1e-3


def test_gradients_flow_and_low_precision_caches_stay_close():
    x, y = noise(4, 6), jnp.array([0.0, 1.0, 2.0, 4.0])
    run = functools.partial(
        adaptive_sample, layered(), (), timesteps=TIMES, policy=dbcache(0.6), site="crf", order=1
    )
    loss = jax.jit(lambda x: jnp.sum(run(x, y) ** 2))
    along = noise(4, 6, seed=1)
    slope = float(jnp.vdot(jax.grad(loss)(x), along))
    # The decisions stand still for a small step, so differences tell the derivative.
    step = 1e-2
    expected = float(loss(x + step * along) - loss(x - step * along)) / (2 * step)
    assert slope == pytest.approx(expected, rel=1e-2) and slope != 0
    exact, rounded = run(x, y), run(x, y, cache_dtype=jnp.bfloat16)
    gap = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
    assert rounded.dtype == exact.dtype and 0 < gap < 0.05


def test_errors_name_the_argument(gaussian, tiny):
    denoiser, params = gaussian
    run = functools.partial(
        adaptive_sample, denoiser, params, noise(3, 4), None, timesteps=TIMES
    )
    for policy, kwargs, message in (
        (teacache(0.1), {}, "policy: teacache with signal 'modulated' .* needs a model with mod"),
        (dbcache(0.1), {}, "policy: dbcache .* needs a model with begin, finish$"),
        (dbcache(0.1), {"site": "crf"}, "needs a model with begin, finish, resume"),
        (latent(0.1), {"site": "module"}, "site: expected one of 'output', 'crf'"),
        (latent(0.1), {"site": "crf"}, "site: model has no with_features"),
        (latent(0.1), {"order": -1}, "order: must be >= 0"),
        (latent(0.1), {"max_skip": -1}, "max_skip: must be >= 0"),
        (latent(0.1), {"warmup": -1}, "warmup: must be >= 0"),
        (magcache(np.ones(9), 0.1), {}, "policy: its ratios are for 9 steps, timesteps have 12"),
    ):
        with pytest.raises(ValueError, match=message):
            run(policy=policy, **kwargs)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match="x: lies on a mesh with Explicit axes"):
        adaptive_sample(denoiser, params, jax.device_put(noise(3, 4), spread), None,
                        timesteps=TIMES, policy=latent(0.1))
    with pytest.raises(TypeError, match="policy: expected a Policy, got float"):
        run(policy=0.1)
    with pytest.raises(ValueError, match="the full run gave values that are not finite"):
        profile_changes(Denoiser(lambda p, x, t, c: x * jnp.nan), 0.0, noise(2, 3), None,
                        timesteps=TIMES, rule=latent(0.1).rule)
