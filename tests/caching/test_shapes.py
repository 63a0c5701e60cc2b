"""Latents of any shape: token sequences, video, images that are not square."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    cached_sample,
    fade_plan,
    make_plan,
    profile_fade,
    profile_least_squares,
    reuse,
    taylorseer,
    uniform_schedule,
)
from fadex.core import Denoiser
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import ab2, ddim, dpmpp_2m, flow_euler, flow_heun, sample, uniform_times

STEPS = 6
TIMES = uniform_times(STEPS)
SCHEDULE = uniform_schedule(STEPS, 3, warmup=2)
SHAPES = {"tokens": (5, 4), "video": (2, 3, 4, 2)}  # [B, N, C] and [B, T, H, W, C]


def pointwise(params, x, t, cond):
    """Acts on every number alone, so a latent may be reshaped freely."""
    t, cond = (a.reshape((-1,) + (1,) * (x.ndim - 1)) for a in (t, cond))
    return params * (jnp.tanh(x) * (1 + jnp.cos(t)) + cond * t)


DENOISER, PARAMS = Denoiser(pointwise), jnp.float32(0.7)
COND, NULL = jnp.array([1.0, -0.5]), jnp.array([0.2, 0.1])
SAMPLERS = {
    "euler": flow_euler(), "heun": flow_heun(), "ab2": ab2(), "2m": dpmpp_2m(), "ddim": ddim(),
}


@pytest.mark.smoke
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_layout_of_a_latent_does_not_matter(name, layout):
    shape = SHAPES[layout]
    x = jax.random.normal(jax.random.key(0), (2, *shape))
    times = np.linspace(900, -1, STEPS + 1).round() if name == "ddim" else TIMES
    run = functools.partial(
        cached_sample, DENOISER, PARAMS, cond=COND, timesteps=times, sampler=SAMPLERS[name],
        guidance=2.0, null_cond=NULL, plan=make_plan(SCHEDULE, taylorseer(1)),
    )
    out, path = run(x, return_trajectory=True)
    assert path.shape == (STEPS + 1, *x.shape)
    flat = run(x.reshape(2, -1))
    np.testing.assert_allclose(out.reshape(2, -1), flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", SHAPES)
def test_every_kind_of_plan_serves_every_layout(layout):
    x = jax.random.normal(jax.random.key(0), (2, *SHAPES[layout]))
    arguments = (DENOISER, PARAMS, x, COND)
    full = sample(*arguments, timesteps=TIMES)
    profiled = dict(timesteps=TIMES, schedule=SCHEDULE)
    errors = {}
    for name, plan in {
        "reuse": make_plan(SCHEDULE, reuse()),
        "taylor1": make_plan(SCHEDULE, taylorseer(1)),
        "fade": fade_plan(profile_fade(*arguments, **profiled)),
        "lsq": profile_least_squares(*arguments, **profiled),
    }.items():
        out = cached_sample(*arguments, timesteps=TIMES, plan=plan)
        errors[name] = float(jnp.linalg.norm(out - full) / jnp.linalg.norm(full))
    assert errors["fade"] < errors["taylor1"] < errors["reuse"] < 0.2
    assert errors["lsq"] < errors["reuse"]


@pytest.mark.smoke
def test_images_need_not_be_square_at_any_site():
    config = DiTConfig(depth=1, width=16, num_heads=2, in_channels=2, num_classes=5)
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: jnp.asarray(0.2 * rng.standard_normal(a.shape), a.dtype),
                          params)
    y, plan = jnp.array([0, 3]), make_plan(SCHEDULE, taylorseer(1))
    for shape, sites in (((4, 8, 2), ("crf",)), ((6, 2, 2), ("output", "module"))):
        x = jax.random.normal(jax.random.key(0), (2, *shape))
        for site in sites:
            out = cached_sample(denoiser, params, x, y, timesteps=TIMES, plan=plan, site=site)
            np.testing.assert_allclose(
                out, by_hand(denoiser, params, x, y, plan, site), rtol=1e-4, atol=1e-4
            )


def by_hand(denoiser, params, x, y, plan, site):
    """The cached run as a loop over steps."""
    plain = jax.jit(denoiser.apply)
    full = jax.jit(denoiser.with_features, static_argnums=4)
    cheap = jax.jit(denoiser.from_features)
    seen = {}
    for s in range(STEPS):
        arguments = (params, x, np.full(2, TIMES[s]), y)
        if SCHEDULE.is_anchor(s):
            if site == "output":
                out = seen[s] = plain(*arguments)
            else:
                out, feats = full(*arguments, (site,))
                seen[s] = feats[site]
        else:
            pos = SCHEDULE.history(s, plan.history)
            out = sum(np.float32(w) * seen[a] for w, a in zip(plan.weights[s], pos))
            out = out if site == "output" else cheap(*arguments, {site: out})
        x = x + (TIMES[s + 1] - TIMES[s]) * out
    return x
