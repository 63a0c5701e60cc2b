"""Anchors by dynamic programming, against all subsets of a small run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.caching import profile_schedule, uniform_schedule
from fadex.caching.newton import lagrange_weights
from fadex.core import Denoiser
from fadex.sampling import ab2, ddim, flow_heun, timestep_indices, uniform_times

STEPS = 9
BENDING = Denoiser(lambda p, x, t, c: p * (jnp.tanh(2 * x) + jnp.sin(9 * t**3)[:, None]))
X = jax.random.normal(jax.random.key(0), (3, 5))
ONE = jnp.float32(1.0)


def outputs(times):
    x, outs = np.asarray(X, np.float64), []
    for t, u in itertools.pairwise(times):
        outs.append(np.tanh(2 * x) + np.sin(9 * t**3))
        x = x + (u - t) * outs[-1]
    return outs


def cost(anchors, times, outs, kind):
    """The sum of segment errors, written out."""
    total = 0.0
    for i, (s, f) in enumerate(itertools.pairwise(anchors)):
        nodes = [s, *anchors[max(i - 1, 0):i]]
        nodes = [f, *nodes] if kind == "interpolate" else nodes
        error = 0.0
        for q in range(s, f):
            w = lagrange_weights(tuple(times[nodes]), times[q])
            guess = outs[s] if q == s else sum(wj * outs[n] for wj, n in zip(w, nodes))
            error = error + (times[q + 1] - times[q]) * (outs[q] - guess)
        total += np.linalg.norm(error)
    return total


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["forecast", "interpolate"])
def test_no_subset_of_the_steps_is_better(kind):
    times = np.asarray(uniform_times(STEPS), np.float64) ** 1.4
    outs = outputs(times)
    for nfe in (3, 4, 6):
        found = profile_schedule(BENDING, ONE, X, None, timesteps=times, nfe=nfe, kind=kind)
        assert found.nfe == nfe and found.anchors[0] == 0 and found.anchors[-1] == STEPS - 1
        best = min(
            cost([0, *inner, STEPS - 1], times, outs, kind)
            for inner in itertools.combinations(range(1, STEPS - 1), nfe - 2)
        )
        ours = cost(list(found.anchors), times, outs, kind)
        assert ours == pytest.approx(best, rel=1e-3, abs=1e-6)
        uniform = [0, *np.linspace(0, STEPS - 1, nfe).round().astype(int)[1:-1], STEPS - 1]
        assert ours < 0.95 * cost(uniform, times, outs, kind)


def test_small_and_full_budgets():
    times = uniform_times(STEPS)
    run = lambda nfe, steps=STEPS: profile_schedule(
        BENDING, ONE, X, None, timesteps=uniform_times(steps), nfe=nfe
    )
    assert run(2).anchors == (0, STEPS - 1)
    assert run(STEPS) == uniform_schedule(STEPS, 1)
    assert run(1, steps=1).anchors == (0,)
    assert run(2, steps=2).anchors == (0, 1)
    short = profile_schedule(BENDING, ONE, X, None, timesteps=times, nfe=4, max_interval=3)
    assert np.diff(short.anchors).max() <= 3


def test_noise_prediction_samplers_and_multistep_ones_are_served():
    denoiser = Denoiser(lambda p, x, t, c: p * x * jnp.tanh(t / 300.0)[:, None])
    schedule = profile_schedule(
        denoiser, ONE, X, None, timesteps=timestep_indices(12), nfe=5, sampler=ddim()
    )
    assert schedule.nfe == 5
    schedule = profile_schedule(
        BENDING, ONE, X, None, timesteps=uniform_times(12), nfe=5, sampler=ab2()
    )
    assert schedule.nfe == 5


@pytest.mark.parametrize("options, message", [
    (dict(nfe=1), r"nfe: must lie in \[2, 9\]"),
    (dict(nfe=10), r"nfe: must lie in \[2, 9\]"),
    (dict(nfe=0), "nfe: must be >= 1"),
    (dict(kind="spline"), "kind: expected one of"),
    (dict(sampler=flow_heun()), "sampler: needs a deterministic one"),
    (dict(sampler=ddim(eta=1.0)), "sampler: needs a deterministic one"),
    (dict(max_interval=0), "max_interval: must be >= 1"),
    (dict(params=jnp.float32(jnp.nan)), "params: the full run gave values"),
    (dict(timesteps=np.stack([uniform_times(9)] * 3)), "timesteps: expected one grid"),
])
def test_bad_arguments_are_named(options, message):
    arguments = dict(params=ONE, x=X, cond=None, timesteps=uniform_times(STEPS), nfe=4)
    with pytest.raises(ValueError, match=message):
        profile_schedule(BENDING, **{**arguments, **options})
