"""What the README promises: any Flax model, nnx or linen, in about twenty lines."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from fadex.caching import (
    cached_sample,
    fade_plan,
    make_plan,
    profile_fade,
    taylorseer,
    uniform_schedule,
)
from fadex.models import from_linen, from_nnx
from fadex.sampling import sample, uniform_times

README = Path(__file__).parents[2] / "README.md"


class NnxModel(nnx.Module):
    """Somebody's model; it knows nothing of this library."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 32, rngs=rngs)
        self.outer = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x, t, cond):
        time = jnp.broadcast_to(t[:, None, None, None], (*x.shape[:-1], 1))
        hidden = self.inner(jnp.concatenate([x, time], axis=-1))
        return self.outer(jnp.tanh(hidden + cond[:, None, None, None]))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x, t, cond):
        time = jnp.broadcast_to(t[:, None, None, None], (*x.shape[:-1], 1))
        hidden = linen.Dense(32)(jnp.concatenate([x, time], axis=-1))
        return linen.Dense(3)(jnp.tanh(hidden + cond[:, None, None, None]))


def wrap(kind):
    if kind == "nnx":
        return from_nnx(NnxModel(nnx.Rngs(0)))
    module = LinenModel()
    x = jnp.zeros((1, 8, 8, 3))
    return from_linen(module, module.init(jax.random.key(0), x, jnp.ones(1), jnp.ones(1)))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_any_flax_model_runs_with_fade_at_a_fraction_of_the_evaluations(kind):
    denoiser, params = wrap(kind)
    x, cond = jax.random.normal(jax.random.key(1), (4, 8, 8, 3)), jnp.linspace(0, 1, 4)
    times, schedule = uniform_times(30), uniform_schedule(30, 5)
    full = sample(denoiser, params, x, cond, timesteps=times)
    probe = jax.random.normal(jax.random.key(2), x.shape)
    table = profile_fade(denoiser, params, probe, cond, timesteps=times, schedule=schedule)
    run = lambda plan: cached_sample(denoiser, params, x, cond, timesteps=times, plan=plan)
    error = lambda y: float(jnp.linalg.norm(y - full) / jnp.linalg.norm(full))
    fade, taylor = error(run(fade_plan(table))), error(run(make_plan(schedule, taylorseer(1))))
    assert fade < taylor < 0.05


@pytest.mark.smoke
def test_the_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2, "the README shows code for nnx and for linen"
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
