"""Batch order from a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fadex.data import batch_indices


@pytest.mark.smoke
def test_every_epoch_is_a_permutation_cut_into_batches():
    key = jax.random.key(3)
    got = batch_indices(key, 12, 4, 7)
    assert got.shape == (7, 4) and got.dtype == jnp.int32
    epochs = [np.asarray(got[start : start + 3]).ravel() for start in (0, 3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(12))
    assert not np.array_equal(*epochs)
    assert not np.array_equal(got, batch_indices(jax.random.key(4), 12, 4, 7))


def test_the_rest_of_an_epoch_is_left_out_without_repeats():
    got = np.asarray(batch_indices(jax.random.key(0), 11, 4, 40))
    assert got.min() >= 0 and got.max() <= 10
    for epoch in got.reshape(20, 8):
        assert len(set(epoch)) == 8
    # Over 20 epochs every example is met: each misses one epoch with probability 3/11.
    assert set(got.ravel()) == set(range(11))


def test_longer_runs_continue_shorter_ones():
    key = jax.random.key(1)
    long = batch_indices(key, 10, 3, 11)
    for steps in (1, 4):
        np.testing.assert_array_equal(batch_indices(key, 10, 3, steps), long[:steps])


def test_jit_and_vmap_over_keys():
    keys = jax.random.split(jax.random.key(2), 3)
    jitted = jax.jit(batch_indices, static_argnums=(1, 2, 3))
    got = jax.vmap(lambda key: jitted(key, 10, 3, 11))(keys)
    for row, key in zip(got, keys):
        np.testing.assert_array_equal(row, batch_indices(key, 10, 3, 11))


def test_first_position_is_uniform():
    # 2000 epochs over 8 examples; the chi-square statistic has 7 degrees of freedom and exceeds
    # 29.9 with probability 1e-4 (false alarm), for this fixed key never.
    first = np.asarray(batch_indices(jax.random.key(5), 8, 8, 2000))[:, 0]
    counts = np.bincount(first, minlength=8)
    assert ((counts - 250) ** 2 / 250).sum() < 29.9


def test_bad_counts():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="batch_size: must be at most num_examples = 3, got 4"):
        batch_indices(key, 3, 4, 1)
    for bad in ((0, 1, 1), (3, 0, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="must be >= 1"):
            batch_indices(key, *bad)
    with pytest.raises(TypeError, match="num_steps: expected an integer"):
        batch_indices(key, 3, 1, 2.0)
