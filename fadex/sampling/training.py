r"""Flow-matching training of a denoiser: loss, train step and a resumable loop.

With data ``x_0``, noise ``e`` and ``x_t = (1 - t) x_0 + t e`` the model learns the velocity

.. math:: \min_\theta \; \mathbb E\, \lVert v_\theta(x_t, t, y) - (e - x_0) \rVert^2,

with ``t`` logit-normal (Esser et al., arXiv 2403.03206), labels dropped at random for
classifier-free guidance, and an exponential moving average (EMA) of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fadex.core.checks import check_int, check_real
from fadex.core.denoiser import Denoiser
from fadex.sampling.grids import logit_normal_times


class TrainState(NamedTuple):
    """Everything a run needs to go on: a pytree, saved and restored as one."""

    step: jax.Array  # int32 []
    params: Any
    ema: Any  # like params: the weights to sample with
    opt_state: Any
    key: jax.Array  # raw key data; the draws of step i depend on (key, i) only


def flow_matching_loss(
    denoiser: Denoiser,
    params: Any,
    key: jax.Array,
    x0: jax.Array,
    labels: jax.Array,
    *,
    class_dropout: float = 0.0,
    null_label: int | None = None,
) -> jax.Array:
    """Mean squared velocity error of one batch at random times.

    Args:
      denoiser, params: the model; ``x0`` ``[B, ...]`` data, ``labels`` int ``[B]``.
      key: draws times, noise and dropped labels.
      class_dropout: share of labels replaced by ``null_label``.
    """
    key_t, key_e, key_drop = jax.random.split(key, 3)
    batch = x0.shape[0]
    t = logit_normal_times(key_t, (batch,))
    noise = jax.random.normal(key_e, x0.shape, x0.dtype)
    if class_dropout:
        dropped = jax.random.bernoulli(key_drop, class_dropout, (batch,))
        labels = jnp.where(dropped, null_label, labels)
    wide = t.reshape((batch,) + (1,) * (x0.ndim - 1))
    velocity = denoiser.apply(params, (1 - wide) * x0 + wide * noise, t, labels)
    return jnp.mean(jnp.square(velocity - (noise - x0)))


@functools.partial(
    jax.jit,
    static_argnames=("denoiser", "optimizer", "batch_size", "class_dropout", "null_label", "count"),
    donate_argnames=("state",),
)
def _train_chunk(state, images, labels, ema_decay, *, denoiser, optimizer, batch_size,
                 class_dropout, null_label, count):
    """``count`` optimizer steps in one program."""

    def body(state, _):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        key_batch, key_loss = jax.random.split(key)
        index = jax.random.randint(key_batch, (batch_size,), 0, images.shape[0])
        loss, grads = jax.value_and_grad(
            lambda p: flow_matching_loss(
                denoiser, p, key_loss, images[index], labels[index],
                class_dropout=class_dropout, null_label=null_label,
            )
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # The warm-up of the average keeps the initial weights from weighing on it.
        decay = jnp.minimum(ema_decay, (1.0 + state.step) / (10.0 + state.step))
        ema = optax.incremental_update(params, state.ema, 1.0 - decay)
        return TrainState(state.step + 1, params, ema, opt_state, state.key), loss

    return jax.lax.scan(body, state, None, length=count)


@functools.lru_cache(maxsize=8)
def _default_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    warmup = min(50, steps)
    decay = max(steps, warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, decay)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))


def train_flow(
    denoiser: Denoiser,
    params: Any,
    images: jax.Array,
    labels: jax.Array,
    *,
    key: jax.Array,
    steps: int = 1500,
    batch_size: int = 48,
    learning_rate: float = 3e-3,
    optimizer: optax.GradientTransformation | None = None,
    ema_decay: float = 0.995,
    class_dropout: float = 0.1,
    null_label: int | None = None,
    checkpoint_dir: str | Path | None = None,
    save_every: int = 500,
    on_chunk: Callable[[int, float], None] | None = None,
    chunk: int = 50,
) -> tuple[TrainState, jax.Array]:
    """Train by flow matching; go on from ``checkpoint_dir`` when it holds a checkpoint.

    The draws of a step depend on the key and the step number alone, so an interrupted and
    resumed run ends with the same weights as an uninterrupted one.

    Args:
      images: ``[M, ...]`` float32 in ``[-1, 1]``; labels: int ``[M]``.
      key: a typed PRNG key.
      optimizer: any optax transform; by default AdamW with a clipped gradient and a cosine
        schedule of peak ``learning_rate`` over ``steps``.
      checkpoint_dir: where the state is saved every ``save_every`` steps and at the end.
      on_chunk: called as ``on_chunk(step, mean_loss)`` after every ``chunk`` steps.

    Returns:
      The final state, and the losses of the steps of this call, ``[steps - start]``.

    Raises:
      ValueError: a count below 1, no images, labels that do not match them, or a checkpoint
        from another model.
    """
    steps = check_int("steps", steps, minimum=1)
    batch_size = check_int("batch_size", batch_size, minimum=1)
    check_int("save_every", save_every, minimum=1)
    check_int("chunk", chunk, minimum=1)
    check_real("learning_rate", learning_rate, minimum=0.0, exclusive=True)
    check_real("ema_decay", ema_decay, minimum=0.0, maximum=1.0)
    if not len(images) or len(images) != len(labels):
        raise ValueError(
            f"images: expected as many images as labels and at least one, got {len(images)} "
            f"images and {len(labels)} labels"
        )
    if class_dropout and null_label is None:
        raise ValueError("null_label: required when class_dropout > 0")
    optimizer = optimizer or _default_optimizer(steps, float(learning_rate))
    # Copies: the loop donates its state, and the caller keeps the arrays passed in.
    copy = functools.partial(jax.tree.map, jnp.array)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=copy(params),
        ema=copy(params),
        opt_state=optimizer.init(params),
        key=jnp.array(jax.random.key_data(key)),
    )
    if checkpoint_dir is not None:
        from fadex.core import checkpoint

        checkpoint_dir = Path(checkpoint_dir)
        if checkpoint.exists(checkpoint_dir):
            state = checkpoint.restore(checkpoint_dir, target=state)
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    losses = []
    start = int(state.step)
    while start < steps:
        until_save = save_every - start % save_every
        count = min(chunk, steps - start, until_save)
        state, chunk_losses = _train_chunk(
            state, images, labels, ema_decay, denoiser=denoiser, optimizer=optimizer,
            batch_size=batch_size, class_dropout=class_dropout, null_label=null_label, count=count,
        )
        start += count
        losses.append(chunk_losses)
        if on_chunk is not None:
            on_chunk(start, float(chunk_losses.mean()))
        if checkpoint_dir is not None and (start % save_every == 0 or start == steps):
            checkpoint.save(checkpoint_dir, state, overwrite=True)
    return state, jnp.concatenate(losses) if losses else jnp.zeros(0)
