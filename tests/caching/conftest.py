"""Shared models: an analytic denoiser that counts its calls, and the shipped digits DiT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.core import Denoiser
from fadex.models import DiT, DiTConfig, from_nnx, load_digits_dit


class Counter:
    """Counts how often a compiled program really runs the model."""

    def __init__(self):
        self.calls = 0

    def _tick(self, t):
        self.calls += 1
        return np.zeros_like(t)

    def __call__(self, t):
        tick = jax.pure_callback(
            self._tick, jax.ShapeDtypeStruct(t.shape, t.dtype), t, vmap_method="broadcast_all"
        )
        return t + tick  # the model needs the result, so the call can't be dropped

    def count(self, fn, *args):
        self.calls = 0
        jax.block_until_ready(fn(*args))
        return self.calls


def gaussian_velocity(params, x, t, cond, sg=0.5):
    """Exact velocity for data ``N(0, sg^2)``; ``params`` scales it."""
    del cond
    t = t.reshape((-1,) + (1,) * (x.ndim - 1))
    slope = (t - (1 - t) * sg**2) / ((1 - t) ** 2 * sg**2 + t**2)
    return params * slope * x


@pytest.fixture
def counted():
    counter = Counter()
    return counter, Denoiser(lambda p, x, t, c: gaussian_velocity(p, x, counter(t), c))


@pytest.fixture(scope="session")
def gaussian():
    return Denoiser(gaussian_velocity), jnp.float32(1.0)


@pytest.fixture(scope="session")
def digits():
    return load_digits_dit()


@pytest.fixture(scope="session")
def tiny():
    """A two-block DiT with all parameters random: ``(denoiser, params, x, labels, null)``."""
    config = DiTConfig(depth=2, width=16, num_heads=2, in_channels=2, num_classes=5,
                       scan_layers=True)
    denoiser, params = from_nnx(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)  # drawn on the host: nothing to compile
    draw = lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.25, a.dtype)
    params = jax.tree.map(draw, params)
    x = jax.random.normal(jax.random.key(2), (3, 4, 4, 2))
    return denoiser, params, x, jnp.array([0, 3, 4]), jnp.full(3, 5)
