"""Every cached sampler holds the model at most four times, and is compiled once.

Compile time follows the size of the program; ``benchmarks/caching.py --only compile`` times it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import (
    adaptive_sample,
    bezicast_plan,
    cached_sample,
    dbcache,
    dmd,
    fuca_sample,
    magcache,
    make_plan,
    newton,
    taylorseer,
    teacache,
    toca_sample,
    uniform_schedule,
)
from fadex.models import DiT, DiTConfig, from_nnx
from fadex.sampling import uniform_times

STEPS = 23
SCHEDULE = uniform_schedule(STEPS, 5)
TIMES = uniform_times(STEPS)


@pytest.fixture(scope="module")
def small():
    config = DiTConfig(depth=3, width=16, num_heads=2, in_channels=1, num_classes=3,
                       scan_layers=True)
    return from_nnx(DiT(config, rngs=nnx.Rngs(0)))


RUNS = {
    "plan": (cached_sample, dict(plan=make_plan(SCHEDULE, taylorseer(1)))),
    "plan, crf": (cached_sample, dict(plan=make_plan(SCHEDULE, taylorseer(1)), site="crf")),
    "plan, module": (cached_sample, dict(plan=make_plan(SCHEDULE, taylorseer(1)), site="module")),
    "guard on features": (cached_sample, dict(plan=bezicast_plan(SCHEDULE, guard="state"))),
    "dmd": (cached_sample, dict(plan=dmd(SCHEDULE))),
    "fuca": (fuca_sample, dict(schedule=SCHEDULE)),
    "fuca, crf": (fuca_sample, dict(schedule=SCHEDULE, site="crf")),
    "teacache": (adaptive_sample, dict(policy=teacache(0.1), site="crf", order=1)),
    "dbcache": (adaptive_sample, dict(policy=dbcache(0.1), site="crf")),
    "magcache": (adaptive_sample, dict(policy=magcache(np.ones(STEPS), 0.1), site="crf")),
    "toca": (toca_sample, dict(schedule=SCHEDULE)),
}
X = jnp.ones((2, 4, 4, 1))
COND = jnp.array([0, 2])


def products(fn, *args):
    """Matrix products in the program of ``fn``, loops counted once."""
    return jax.jit(fn).lower(*args).as_text().count("dot_general")


@pytest.mark.parametrize("name", RUNS)
def test_a_cached_sampler_is_at_most_four_model_steps_long(small, name):
    denoiser, params = small
    sampler, options = RUNS[name]
    step = products(lambda p, x: denoiser.apply(p, x, jnp.ones(2), COND), params, X)
    run = functools.partial(sampler, denoiser, timesteps=TIMES, **options)
    whole = products(lambda p, x: run(p, x, COND), params, X)
    assert step <= whole <= 4 * step


@pytest.mark.smoke
def test_weights_thresholds_and_guidance_do_not_recompile(small, compiles):
    denoiser, params = small
    null = jnp.array([3, 3])
    shared = dict(timesteps=TIMES, null_cond=null)
    policies = [teacache(0.1), teacache(0.3)]
    plans = [make_plan(SCHEDULE, rule) for rule in (taylorseer(1), newton(2))]
    scales = [jnp.float32(2.0), jnp.float32(3.5)]
    weights = [params, jax.tree.map(lambda a: a * 1.01, params)]

    def everything(i):
        args = (denoiser, weights[i], X, COND)
        jax.block_until_ready([
            adaptive_sample(*args, policy=policies[i], site="crf", guidance=scales[i], **shared),
            cached_sample(*args, plan=plans[i], guidance=scales[i], **shared),
            fuca_sample(*args, schedule=SCHEDULE, guidance=scales[i],
                        predictor=make_plan(SCHEDULE, (taylorseer(1), newton(1))[i]), **shared),
        ])

    everything(0)
    with compiles() as count:
        everything(1)
        assert count() == 0
