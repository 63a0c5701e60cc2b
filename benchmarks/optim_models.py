"""The three training tasks of ``benchmarks/optim_training.py``, as pure functions.

* ``digits_mlp``: 64-128-128-10 on scikit-learn's digits, batch 128, 200 steps;
* ``digits_cnn``: two convolutions and one matrix on the same pictures, batch and steps;
* ``char_lm``: a pre-norm transformer (2 layers, width 64, 4 heads, context 64, learned positions,
  untied head) over the characters of the King James Bible, batch 16, 300 steps.

Parameters are nested dicts in Flax's layout: matrices ``[inputs, outputs]``, convolutions
``[height, width, inputs, outputs]``. Their paths (``layers/0/attn/qkv/kernel``, ``head/kernel``,
``embed/embedding``, ``conv/0/kernel``, ``bias``, ``scale``) are what the optimizers' rules read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fadex.data import batch_indices, load_images, random_windows, spaced_windows, text_corpus


class Task(NamedTuple):
    """What the harness needs to train one model; pure functions and arrays.

    Attributes:
      init: ``key -> params``.
      apply: ``(params, inputs) -> logits``.
      batches: ``(key, data, steps) -> xs``, what ``lax.scan`` hands to ``batch``: drawn from the
        key alone, so that every optimizer sees the same examples under the same seed.
      batch: ``(x, data) -> batch``.
      loss: ``(params, batch) -> (loss, accuracy)``, both means over the batch.
      evaluate: ``(params, data, split) -> (loss, accuracy)`` over a fixed set of examples.
      data: dict of arrays, handed through (never a constant of the program).
      splits: what ``evaluate`` is called with.
      select: the split on whose loss hyperparameters are chosen.
      steps: steps of a run.
      tune_seeds, report_seeds: disjoint.
      about: what is to be recorded beside the results (sizes, the text's digest).
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    batches: Callable[[jax.Array, Any, int], Any]
    batch: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    evaluate: Callable[[Any, Any, str], tuple[jax.Array, jax.Array]]
    data: dict[str, Any]
    splits: tuple[str, ...]
    select: str
    steps: int
    tune_seeds: tuple[int, ...]
    report_seeds: tuple[int, ...]
    about: dict[str, Any]


def kernel(key: jax.Array, *shape: int) -> jax.Array:
    """Gaussian with variance 1 / fan-in (LeCun), the fan-in being all axes but the last."""
    return jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"kernel": kernel(key, inputs, outputs), "bias": jnp.zeros(outputs)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean()


# --- digits


def digits_task(
    init: Callable[[jax.Array], Any],
    apply: Callable[[Any, jax.Array], jax.Array],
    *,
    batch_size: int = 128,
    steps: int = 200,
    about: str,
) -> Task:
    """1200 pictures to train on, 200 to choose by, 397 to test on, at one fixed random split.

    Not by training loss: with every optimizer some large rate fits the training pictures best on
    the tuning seeds and generalises badly (Scion: at ten times its best rate, with a test loss
    twenty times higher).
    """
    digits = load_images("digits", split="all")
    order = np.random.default_rng(0).permutation(len(digits.labels))
    parts = dict(zip(("train", "valid", "test"), np.split(order, [1200, 1400])))
    data = {
        split: (jnp.asarray(digits.images[chosen]), jnp.asarray(digits.labels[chosen]))
        for split, chosen in parts.items()
    }
    loss = lambda params, batch: cross_entropy(apply(params, batch[0]), batch[1])
    return Task(
        init=init,
        apply=apply,
        batches=lambda key, data, steps: batch_indices(
            key, len(data["train"][1]), batch_size, steps
        ),
        batch=lambda rows, data: tuple(part[rows] for part in data["train"]),
        loss=loss,
        evaluate=lambda params, data, split: loss(params, data[split]),
        data=data,
        splits=("train", "valid", "test"),
        select="valid",
        steps=steps,
        # Twice the transformer's: 200 pictures are few to choose by, and a run costs nothing.
        tune_seeds=(0, 1, 2, 3),
        report_seeds=tuple(range(100, 116)),
        about={"model": about, "batch": batch_size, "train": 1200, "valid": 200, "test": 397},
    )


def digits_mlp() -> Task:
    sizes = (64, 128, 128, 10)

    def init(key):
        keys = jax.random.split(key, 3)
        layers = [dense(k, m, n) for k, m, n in zip(keys, sizes, sizes[1:])]
        return {"layers": {"0": layers[0], "1": layers[1]}, "head": layers[2]}

    def apply(params, images):
        x = images.reshape(len(images), -1)
        for layer in params["layers"].values():
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    return digits_task(init, apply, about="64-128-128-10, relu")


def convolve(x: jax.Array, weights: jax.Array, stride: int) -> jax.Array:
    """3 x 3 convolution with zero padding, as one product with the nine shifted pictures.

    Under ``vmap`` over kernels a convolution becomes a grouped one, which CPUs run many times
    slower than this batched product.
    """
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [
        padded[:, i : i + height : stride, j : j + width : stride]
        for i in range(3)
        for j in range(3)
    ]
    return jnp.concatenate(shifted, -1) @ weights.reshape(-1, weights.shape[-1])


def digits_cnn() -> Task:
    def init(key):
        keys = jax.random.split(key, 3)
        first = {"kernel": kernel(keys[0], 3, 3, 1, 16), "bias": jnp.zeros(16)}
        second = {"kernel": kernel(keys[1], 3, 3, 16, 32), "bias": jnp.zeros(32)}
        return {"conv": {"0": first, "1": second}, "head": dense(keys[2], 4 * 32, 10)}

    def apply(params, x):
        for layer in params["conv"].values():
            x = jax.nn.relu(convolve(x, layer["kernel"], 2) + layer["bias"])
        x = x.reshape(len(x), -1)
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    return digits_task(init, apply, about="conv 16, conv 32 (3 x 3, stride 2), dense 10, relu")


# --- characters


def normalize(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return centred / deviation * params["scale"] + params["bias"]


def char_lm(
    corpus: str = "kjv",
    *,
    num_layers: int = 2,
    width: int = 64,
    num_heads: int = 4,
    context: int = 64,
    batch_size: int = 16,
    steps: int = 300,
    eval_windows: int = 256,
) -> Task:
    text = text_corpus(corpus)
    size = len(text.alphabet)
    evaluation = {
        split: spaced_windows(getattr(text, split), eval_windows, context + 1)
        for split in ("valid", "test")
    }
    data = {"train": jnp.asarray(text.train), **evaluation}
    mask = jnp.tril(jnp.ones((context, context), bool))

    def init(key):
        norm = lambda: {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

        def block(key):
            keys = jax.random.split(key, 4)
            return {
                "ln1": norm(),
                "attn": {
                    "qkv": dense(keys[0], width, 3 * width),
                    "out": dense(keys[1], width, width),
                },
                "ln2": norm(),
                "mlp": {
                    "up": dense(keys[2], width, 4 * width),
                    "down": dense(keys[3], 4 * width, width),
                },
            }

        keys = jax.random.split(key, num_layers + 3)
        return {
            "embed": {"embedding": 0.02 * jax.random.normal(keys[0], (size, width))},
            "pos": {"embedding": 0.02 * jax.random.normal(keys[1], (context, width))},
            "layers": {str(i): block(keys[i + 3]) for i in range(num_layers)},
            "norm": norm(),
            "head": dense(keys[2], width, size),
        }

    def attention(params, x):
        heads = (*x.shape[:-1], num_heads, width // num_heads)
        qkv = x @ params["qkv"]["kernel"] + params["qkv"]["bias"]
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, -1))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(heads[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(x.shape)
        return mixed @ params["out"]["kernel"] + params["out"]["bias"]

    def apply(params, ids):
        x = params["embed"]["embedding"][ids] + params["pos"]["embedding"]
        for i in range(num_layers):
            layer = params["layers"][str(i)]
            x = x + attention(layer["attn"], normalize(x, layer["ln1"]))
            h = normalize(x, layer["ln2"]) @ layer["mlp"]["up"]["kernel"]
            h = jax.nn.gelu(h + layer["mlp"]["up"]["bias"])
            x = x + h @ layer["mlp"]["down"]["kernel"] + layer["mlp"]["down"]["bias"]
        return normalize(x, params["norm"]) @ params["head"]["kernel"] + params["head"]["bias"]

    loss = lambda params, windows: cross_entropy(apply(params, windows[:, :-1]), windows[:, 1:])

    def evaluate(params, data, split):
        groups = data[split].reshape(-1, batch_size, context + 1)
        losses, accuracies = jax.lax.map(lambda windows: loss(params, windows), groups)
        return losses.mean(), accuracies.mean()

    return Task(
        init=init,
        apply=apply,
        batches=lambda key, data, steps: jax.random.split(key, steps),
        batch=lambda key, data: random_windows(key, data["train"], batch_size, context + 1),
        loss=loss,
        evaluate=evaluate,
        data=data,
        splits=("valid", "test"),  # the training text is far too long; its last losses are kept
        select="valid",
        steps=steps,
        tune_seeds=(0, 1),
        report_seeds=(100, 101, 102, 103),
        about={
            "model": f"{num_layers} layers, width {width}, {num_heads} heads, context {context}",
            "batch": batch_size, "corpus": corpus, "sha256": text.sha256,
            "eval_windows": eval_windows, "alphabet": size,
        },
    )


def char_lm_large_batch() -> Task:
    """The transformer with eight times the batch and a third of the steps: less noisy gradients."""
    task = char_lm(batch_size=128, steps=100)
    return task._replace(tune_seeds=task.tune_seeds[:1], report_seeds=task.report_seeds[:3])


TASKS = {
    "digits_mlp": digits_mlp, "digits_cnn": digits_cnn, "char_lm": char_lm,
    "char_lm_large_batch": char_lm_large_batch,
}  # fmt: skip
