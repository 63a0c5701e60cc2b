import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import cached_sample, make_plan, taylorseer, uniform_schedule
from fadex.core import Denoiser
from fadex.sampling import (
    ab2,
    ddim,
    dpmpp_2m,
    flow_euler,
    flow_heun,
    resolution_shift,
    sample,
    shifted_times,
    timestep_indices,
)

STEPS = 9
FLOW = shifted_times(STEPS, [1.0, 3.0, resolution_shift(1024)])
INDICES = np.stack([timestep_indices(STEPS, spacing=s) for s in
                    ("leading", "trailing", "linspace")])
SAMPLERS = {
    "euler": (flow_euler(), FLOW),
    "heun": (flow_heun(), FLOW),
    "ab2": (ab2(), FLOW),
    "dpmpp_2m": (dpmpp_2m(), FLOW),
    "dpmpp_2m_epsilon": (dpmpp_2m("epsilon"), INDICES),
    "ddim": (ddim(), INDICES),
}


def column(a, x):
    return a.reshape((-1,) + (1,) * (x.ndim - 1))


def apply(params, x, t, cond):
    phase = column(jnp.where(t > 1, t / 1000, t), x)  # epsilon models get indices
    return params * (jnp.sin(x) * (1 + phase**2) + column(cond, x) * phase)


def with_features(params, x, t, cond, sites):
    feature = jnp.tanh(x) * (1 + column(t, x))
    if "module" in sites:
        feature = jnp.stack([feature, x])
    return from_features(params, x, t, cond, {sites[0]: feature}), {sites[0]: feature}


def from_features(params, x, t, cond, feats):
    (feature,) = feats.values()
    feature = feature.sum(0) if feature.ndim > x.ndim else feature
    return params * (feature * column(jnp.where(t > 1, t / 1000, t), x) + column(cond, x))


DENOISER = Denoiser(apply, with_features, from_features)
COND, NULL = jnp.array([1.0, 0.2, 0.5]), jnp.array([-1.0, 0.3, 0.1])
X = jax.random.normal(jax.random.key(0), (3, 4, 2))
PLAN = make_plan(uniform_schedule(STEPS, 3, warmup=2), taylorseer(1))


def together_and_alone(fn, timesteps, **kwargs):
    """The batch with a grid per sample, and each sample alone with its own grid."""
    call = functools.partial(fn, DENOISER, jnp.float32(0.5), **kwargs)
    whole = call(X, COND, timesteps=timesteps, null_cond=NULL)
    alone = [
        call(X[i : i + 1], COND[i : i + 1], timesteps=timesteps[i], null_cond=NULL[i : i + 1])
        for i in range(3)
    ]
    return whole, jnp.concatenate(alone)


@pytest.mark.smoke
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_grid_per_sample_equals_each_sample_alone(name):
    sampler, timesteps = SAMPLERS[name]
    whole, alone = together_and_alone(sample, timesteps, sampler=sampler, guidance=2.0)
    scale = float(jnp.abs(alone).max())
    assert jnp.abs(whole - alone).max() <= 1e-6 * scale
    # The grids differ, so it matters which one a sample follows.
    other = sample(DENOISER, jnp.float32(0.5), X, COND, timesteps=timesteps[0], sampler=sampler,
                   guidance=2.0, null_cond=NULL)
    assert jnp.abs(whole - other)[1:].max() > 1e-4 * scale


@pytest.mark.parametrize(
    ("name", "site"),
    [("euler", "output"), ("heun", "crf"), ("ab2", "module"), ("dpmpp_2m", "output"),
     ("ddim", "crf")],
)
def test_a_cached_grid_per_sample_equals_each_sample_alone(name, site):
    sampler, timesteps = SAMPLERS[name]
    whole, alone = together_and_alone(
        cached_sample, timesteps, sampler=sampler, guidance=2.0, plan=PLAN, site=site
    )
    assert jnp.abs(whole - alone).max() <= 1e-6 * float(jnp.abs(alone).max())


def test_equal_grids_per_sample_equal_the_shared_grid():
    for sampler, timesteps in (SAMPLERS["ab2"], SAMPLERS["ddim"]):
        shared = sample(DENOISER, jnp.float32(0.5), X, COND, timesteps=timesteps[1],
                        sampler=sampler)
        rows = sample(DENOISER, jnp.float32(0.5), X, COND,
                      timesteps=np.repeat(timesteps[1:2], 3, axis=0), sampler=sampler)
        np.testing.assert_allclose(rows, shared, rtol=1e-6, atol=1e-6)


def test_stochastic_samplers_and_trajectories_take_a_grid_per_sample():
    sampler = ddim(eta=1.0)
    out, path = sample(
        DENOISER, jnp.float32(0.5), X, COND, timesteps=INDICES, sampler=sampler,
        key=jax.random.key(1), return_trajectory=True,
    )
    assert path.shape == (STEPS + 1, *X.shape) and jnp.array_equal(path[-1], out)
    alone = sample(DENOISER, jnp.float32(0.5), X, COND, timesteps=INDICES[2], sampler=sampler,
                   key=jax.random.key(1))
    np.testing.assert_allclose(out[2], alone[2], rtol=1e-5, atol=1e-6)


def test_grids_per_sample_pass_jit_and_vmap_and_share_a_program(compiles):
    call = lambda times: cached_sample(
        DENOISER, jnp.float32(0.5), X, COND, timesteps=times, plan=PLAN, sampler=ab2()
    )
    first = call(FLOW)
    with compiles() as count:
        jax.block_until_ready(call(FLOW**2))
    assert count() == 0
    np.testing.assert_allclose(jax.jit(call)(FLOW), first, rtol=1e-5, atol=1e-6)
    both = jax.vmap(call)(jnp.stack([FLOW, FLOW**2]))
    np.testing.assert_allclose(both[0], first, rtol=1e-5, atol=1e-6)


def test_one_shift_per_sample_gives_one_grid_per_sample():
    grids = shifted_times(5, [1.0, 3.0])
    np.testing.assert_array_equal(grids[1], shifted_times(5, 3.0))
    assert grids.dtype == np.float32 and grids.shape == (2, 6)
    with pytest.raises(ValueError, match="shift: must lie in"):
        shifted_times(5, [1.0, 0.0])
    with pytest.raises(ValueError, match=r"shift: expected a number or \[B\]"):
        shifted_times(5, [[1.0]])
