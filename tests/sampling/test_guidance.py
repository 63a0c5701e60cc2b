import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import cached_sample, make_plan, taylorseer, uniform_schedule
from fadex.core import Denoiser
from fadex.sampling import (
    flow_euler,
    flow_heun,
    guidance_breaks,
    sample,
    shifted_times,
    uniform_times,
)

STEPS = 10
TIMES = uniform_times(STEPS)
INTERVAL = (0.25, 0.75)  # of the times 1, 0.9, ... the five from 0.7 to 0.3


def velocity(params, x, t, cond):
    t, cond = (a.reshape((-1,) + (1,) * (x.ndim - 1)) for a in (t, cond))
    return params * (jnp.sin(x) * t + cond)


DENOISER = Denoiser(velocity)
COND, NULL = jnp.array([1.0, 2.0, 0.5]), jnp.array([-1.0, 0.3, 0.1])


def noise(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


run = functools.partial(
    sample, DENOISER, jnp.float32(1.0), cond=COND, null_cond=NULL, guidance=3.0, timesteps=TIMES
)


class Rows:
    """Counts the samples that a compiled program really hands to the model."""

    def __init__(self):
        self.rows = []
        self.denoiser = Denoiser(lambda p, x, t, c: velocity(p, x, self._count(t), c))

    def _count(self, t):
        def tick(t):
            self.rows.append(t.size)
            return np.zeros_like(t)

        shape = jax.ShapeDtypeStruct(t.shape, t.dtype)
        return t + jax.pure_callback(tick, shape, t, vmap_method="broadcast_all")

    def of(self, fn, *args):
        self.rows.clear()
        jax.block_until_ready(fn(*args))
        return sum(self.rows)


def by_hand(x, timesteps, low, high):
    for t, u in itertools.pairwise(timesteps):
        time = jnp.full(3, t)
        v = velocity(1.0, x, time, COND)
        if low <= t <= high:
            null = velocity(1.0, x, time, NULL)
            v = null + 3.0 * (v - null)
        x = x + (u - t) * v
    return x


@pytest.mark.smoke
def test_guidance_applies_inside_the_interval_only_and_its_ends_belong_to_it():
    x = noise(3, 4)
    np.testing.assert_allclose(
        run(x, guidance_interval=INTERVAL), by_hand(x, TIMES, *INTERVAL), rtol=1e-5, atol=1e-6
    )
    closed = (float(TIMES[7]), float(TIMES[2]))
    np.testing.assert_allclose(
        run(x, guidance_interval=closed), by_hand(x, TIMES, *closed), rtol=1e-5, atol=1e-6
    )
    everywhere = run(x, guidance_interval=(-np.inf, np.inf))
    np.testing.assert_allclose(everywhere, run(x), rtol=1e-6, atol=1e-6)


@pytest.mark.smoke
def test_the_null_branch_is_not_computed_outside_of_the_interval():
    rows = Rows()
    call = functools.partial(
        sample, rows.denoiser, timesteps=TIMES, guidance=3.0, guidance_interval=INTERVAL
    )
    simple = lambda x: call(jnp.float32(1.0), x, COND, null_cond=NULL)
    want = 3 * (STEPS + 5)
    assert rows.of(simple, noise(3, 4)) == want
    # The predicate depends on the step alone, so it stays a branch under every vmap. (Times are
    # not batched there, so the count is that of one run; with both branches it would be 90.)
    two = noise(2, 3, 4)
    assert rows.of(jax.vmap(simple), two) == want
    deep = jax.vmap(jax.vmap(lambda p, x, c: call(p, x, c, null_cond=NULL), (None, 0, None)),
                    (0, None, 0))
    conds = jnp.stack([COND, 2 * COND])
    assert rows.of(jax.jit(deep), jnp.ones(2), two, conds) == want
    heun = lambda x: call(
        jnp.float32(1.0), x, COND, null_cond=NULL, sampler=flow_heun()
    )
    # Each evaluation goes by its own time: first ones at 5 guided times, second ones at 5.
    assert rows.of(heun, noise(3, 4)) == 2 * want


def test_interval_and_guidance_values_do_not_recompile(compiles):
    x = noise(3, 5)
    jax.block_until_ready(run(x, guidance_interval=INTERVAL))
    with compiles() as count:
        jax.block_until_ready(run(x, guidance_interval=(0.1, 0.4), guidance=1.5))
    assert count() == 0


def test_gradients_pass_through_the_interval():
    loss = lambda c: jnp.sum(run(noise(3, 4), cond=c, guidance_interval=INTERVAL) ** 2)
    grad = jax.grad(loss)(COND)
    step = jnp.array([0.0, 1e-2, 0.0])
    slope = (loss(COND + step) - loss(COND - step)) / 2e-2
    assert float(grad[1]) == pytest.approx(float(slope), rel=1e-2)


def test_samples_with_grids_of_their_own_enter_the_interval_on_their_own():
    x = noise(3, 4)
    grids = shifted_times(STEPS, [1.0, 2.0, 5.0])
    out = run(x, timesteps=grids, guidance_interval=INTERVAL)
    for i, grid in enumerate(grids):
        alone = run(x[i : i + 1], cond=COND[i : i + 1], null_cond=NULL[i : i + 1], timesteps=grid,
                    guidance_interval=INTERVAL)
        np.testing.assert_allclose(out[i], alone[0], rtol=1e-6, atol=1e-6)
    rows = Rows()
    call = lambda x: sample(
        rows.denoiser, jnp.float32(1.0), x, COND, null_cond=NULL, guidance=3.0, timesteps=grids,
        guidance_interval=INTERVAL,
    )
    inside = (grids[:, :-1] >= INTERVAL[0]) & (grids[:, :-1] <= INTERVAL[1])
    assert rows.of(call, x) == 3 * (STEPS + int(inside.any(0).sum()))


def test_breaks_are_the_steps_where_guidance_sets_in_or_ends():
    assert guidance_breaks(TIMES, INTERVAL) == (3, 8)
    assert guidance_breaks(TIMES, (0.95, 2.0)) == (1,)
    assert guidance_breaks(TIMES, (-1.0, 2.0)) == guidance_breaks(TIMES, (2.0, 3.0)) == ()
    assert guidance_breaks(TIMES[::-1], INTERVAL) == (3, 8)
    both = np.stack([TIMES, shifted_times(STEPS, 3.0)])
    union = {*guidance_breaks(both[0], INTERVAL), *guidance_breaks(both[1], INTERVAL)}
    assert guidance_breaks(both, INTERVAL) == tuple(sorted(union))


@pytest.mark.smoke
def test_a_distilled_scale_travels_with_the_condition(compiles):
    distilled = Denoiser(
        lambda p, x, t, c: p * (jnp.sin(x) * t[:, None] + (c["y"] * c["guidance"])[:, None])
    )
    plan = make_plan(uniform_schedule(STEPS, 3), taylorseer(1))
    scales = jnp.array([3.5, 3.5, 3.5]), jnp.array([3.5, 1.0, 7.0])
    for run in (sample, functools.partial(cached_sample, plan=plan)):
        call = lambda g: run(
            distilled, jnp.float32(1.0), noise(3, 4), {"y": COND, "guidance": g}, timesteps=TIMES
        )
        first = call(scales[0])
        with compiles() as count:
            second = jax.block_until_ready(call(scales[1]))
        assert count() == 0
        np.testing.assert_array_equal(first[0], second[0])
        assert not np.allclose(first[1:], second[1:])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"guidance_interval: expected two times", dict(guidance_interval=0.5)),
        (r"guidance_interval: expected two times", dict(guidance_interval=(0.1, 0.2, 0.3))),
        (r"guidance_interval: expected low <= high", dict(guidance_interval=(0.8, 0.2))),
        (r"guidance_interval: expected low <= high", dict(guidance_interval=(np.nan, 0.2))),
        (r"timesteps: expected \[S \+ 1\], or a row for each of the 3 samples",
         dict(timesteps=np.stack([TIMES, TIMES]))),
        (r"timesteps\[1\]: need num_steps \+ 1 = 11 strictly monotone",
         dict(timesteps=np.stack([TIMES, TIMES * 0, TIMES]))),
        (r"timesteps: need .* got shape \(1, 3, 11\)", dict(timesteps=np.ones((1, 3, 11)))),
    ],
)
def test_bad_arguments_are_named(message, arguments):
    with pytest.raises(ValueError, match=message):
        run(noise(3, 4), **arguments)


def test_an_interval_without_guidance_changes_nothing():
    x = noise(3, 4)
    plain = sample(DENOISER, jnp.float32(1.0), x, COND, timesteps=TIMES, sampler=flow_euler())
    same = sample(DENOISER, jnp.float32(1.0), x, COND, timesteps=TIMES, guidance_interval=INTERVAL)
    np.testing.assert_array_equal(plain, same)
