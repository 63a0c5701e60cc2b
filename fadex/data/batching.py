"""The order in which a training loop visits its examples, as a function of a key."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fadex.core.checks import check_int


def batch_indices(
    key: jax.Array, num_examples: int, batch_size: int, num_steps: int
) -> jax.Array:
    """Indices of the examples of each step: epochs of fresh permutations.

    Epoch ``e`` is a permutation of ``0 .. num_examples - 1`` drawn from ``fold_in(key, e)`` and
    cut into ``num_examples // batch_size`` whole batches; the rest of that permutation is left
    out, and differs from epoch to epoch. So no batch holds an example twice, no epoch shows one
    twice, and the first ``n`` rows do not depend on ``num_steps``: a run that is resumed with
    the same key goes on where it was.

    Args:
      key: a JAX key.
      num_examples: size of the data set.
      batch_size: examples in each step, at most ``num_examples``.
      num_steps: number of steps, over as many epochs as they need.

    Returns:
      int32 ``[num_steps, batch_size]``. Under ``jax.jit`` every argument but the key is static.

    Raises:
      TypeError, ValueError: a count that is not a positive integer, or a batch larger than the
        data set.

    >>> import jax
    >>> batch_indices(jax.random.key(0), num_examples=5, batch_size=2, num_steps=3).shape
    (3, 2)
    """
    num_examples = check_int("num_examples", num_examples, minimum=1)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    num_steps = check_int("num_steps", num_steps, minimum=1)
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size: must be at most num_examples = {num_examples}, got {batch_size}"
        )
    per_epoch = num_examples // batch_size
    epochs = jnp.arange(-(-num_steps // per_epoch))

    def one_epoch(epoch):
        order = jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)
        return order[: per_epoch * batch_size].reshape(per_epoch, batch_size)

    steps = jax.vmap(one_epoch)(epochs).reshape(-1, batch_size)
    return steps[:num_steps].astype(jnp.int32)
