"""The three tasks of ``benchmarks/qat.py``, as pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optim_models import char_lm, cross_entropy, digits_mlp

from fadex.data import batch_indices
from fadex.quant import Recipe, int_group
from fadex.quant.qat import fixed_scale


class QatTask(NamedTuple):
    """What the harness needs to train one model.

    Attributes:
      init: ``key -> params``.
      make_data: ``key -> data``, drawn anew for each seed where data are synthetic.
      batches: ``(key, data) -> xs`` for ``lax.scan``, one for each step.
      batch: ``(x, data) -> batch``.
      loss: ``(params, batch) -> scalar``.
      evaluate: ``(params, data) -> dict`` with ``test_loss``, ``test_accuracy``, ``metric`` and
        ``select`` among the keys.
      recipe, edge: of the 2-bit weights.
      steps: of a run.
      rates: optimizer -> middle of the grid of learning rates.
      surrogates: names to be run.
      tune_seeds, seeds: disjoint.
      select: the loss by which learning rates are chosen.
      metric: the loss that is reported.
      chunk: trainings in one call.
      about: recorded beside the results.
    """

    init: Callable
    make_data: Callable
    batches: Callable
    batch: Callable
    loss: Callable
    evaluate: Callable
    recipe: Recipe
    edge: str
    steps: int
    rates: dict[str, float]
    surrogates: tuple[str, ...]
    tune_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    select: str
    metric: str
    chunk: int
    about: dict[str, Any]


ALL = ("ste", "ste, not clipped", "gaussian 0.25", "gaussian 0.35", "gaussian 0.5", "gaussian 0.7",
       "gaussian 0.5 to 0.25", "uniform 0.35", "uniform 0.6", "laplace 0.35", "arctan 0.35",
       "sigmoid 0.35", "gaussian 0.35, not clipped", "gaussian 0.5, not clipped")  # fmt: skip


def mlp_apply(params: Any, x: jax.Array) -> jax.Array:
    *hidden, last = params["layers"].values()
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def mlp_init(key: jax.Array, sizes: tuple[int, ...]) -> Any:
    """He's initialisation; the grid's step is its standard deviation."""
    layers = {}
    for i, (m, n) in enumerate(itertools.pairwise(sizes)):
        w = jax.random.normal(jax.random.fold_in(key, i), (m, n)) * np.sqrt(2 / m)
        layers[str(i)] = {"kernel": w, "bias": jnp.zeros(n)}
    return {"layers": layers}


def mlp_recipe(sizes: tuple[int, ...]) -> Recipe:
    rules = [
        (f"layers/{i}/kernel", fixed_scale(2, float(np.sqrt(2 / m))))
        for i, m in enumerate(sizes[:-1])
    ]
    return Recipe(rules)


def teacher_mlp() -> QatTask:
    """Labels of a random teacher of the same shape; both drawn anew for each seed."""
    sizes, count, batch_size, steps = (32, 48, 48, 10), 2048, 128, 800

    def make_data(key):
        teacher_key, train_key, test_key = jax.random.split(key, 3)
        teacher = mlp_init(teacher_key, sizes)

        def sample(key):
            x = jax.random.normal(key, (count, sizes[0]))
            return x, mlp_apply(teacher, x).argmax(-1)

        return {"train": sample(train_key), "test": sample(test_key)}

    loss = lambda params, batch: cross_entropy(mlp_apply(params, batch[0]), batch[1])

    def evaluate(params, data):
        train, test = loss(params, data["train"]), loss(params, data["test"])
        return {"train_loss": train[0], "test_loss": test[0], "test_accuracy": test[1]}

    return QatTask(
        init=lambda key: mlp_init(key, sizes),
        make_data=make_data,
        batches=lambda key, data: batch_indices(key, count, batch_size, steps),
        batch=lambda rows, data: tuple(part[rows] for part in data["train"]),
        loss=lambda params, batch: loss(params, batch)[0],
        evaluate=evaluate,
        recipe=mlp_recipe(sizes), edge="tail", steps=steps,
        rates={"adam": 0.016, "momentum": 0.064},
        surrogates=ALL, tune_seeds=(0, 1, 2, 3), seeds=tuple(range(100, 132)),
        select="train_loss", metric="train_loss", chunk=4,
        about={"model": "teacher-student MLP 32-48-48-10, matrices on a fixed 2-bit grid",
               "setting": f"2048 examples, batch {batch_size}, {steps} steps",
               "select": "train_loss"},
    )  # fmt: skip


def digits() -> QatTask:
    """The optimizers' MLP on digits, matrices in two bits; chosen by validation loss."""
    base = digits_mlp()
    sizes = (64, 128, 128, 10)

    def apply(params, images):
        return mlp_apply(params, images.reshape(len(images), -1))

    loss = lambda params, batch: cross_entropy(apply(params, batch[0]), batch[1])

    def evaluate(params, data):
        found = {split: loss(params, data[split]) for split in base.splits}
        out = {f"{split}_loss": value[0] for split, value in found.items()}
        return {**out, "test_accuracy": found["test"][1]}

    return QatTask(
        init=lambda key: mlp_init(key, sizes),
        make_data=lambda key: base.data,
        batches=lambda key, data: base.batches(key, data, base.steps),
        batch=base.batch,
        loss=lambda params, batch: loss(params, batch)[0],
        evaluate=evaluate,
        recipe=mlp_recipe(sizes), edge="tail", steps=base.steps,
        rates={"adam": 0.008, "momentum": 0.128},
        # 200 pictures are few to choose by: a dozen seeds.
        surrogates=ALL, tune_seeds=tuple(range(12)), seeds=tuple(range(100, 132)),
        select="valid_loss", metric="test_loss", chunk=4,
        about={"model": "MLP 64-128-128-10 on digits, matrices on a fixed 2-bit grid",
               "setting": f"1200 pictures, batch 128, {base.steps} steps",
               "select": "valid_loss"},
    )  # fmt: skip


def char_transformer() -> QatTask:
    """Two layers of width 48 over the King James Bible; the layers' matrices W2 in groups of 32."""
    base = char_lm("kjv", width=48, steps=200)

    def evaluate(params, data):
        found = {split: base.evaluate(params, data, split) for split in base.splits}
        out = {f"{split}_loss": value[0] for split, value in found.items()}
        return {**out, "test_accuracy": found["test"][1]}

    return QatTask(
        init=base.init,
        make_data=lambda key: base.data,
        batches=lambda key, data: base.batches(key, data, base.steps),
        batch=base.batch,
        loss=lambda params, batch: base.loss(params, batch)[0],
        evaluate=evaluate,
        # Scales follow the largest weight of each group, so nothing is clipped.
        recipe=Recipe((("layers/**/kernel", int_group(2, 32)), ("**", None))),
        edge="pass", steps=base.steps, rates={"adam": 0.004, "momentum": 0.25},
        surrogates=("ste", "gaussian 0.35", "gaussian 0.5"),
        tune_seeds=(0, 1), seeds=tuple(range(100, 108)),
        select="valid_loss", metric="valid_loss", chunk=2,
        about={"model": "char transformer, " + base.about["model"] + ", layers W2 g32",
               "setting": f"King James Bible, batch 16, {base.steps} steps",
               "select": "valid_loss", "sha256": base.about["sha256"]},
    )  # fmt: skip


TASKS = {"teacher_mlp": teacher_mlp, "digits_mlp": digits, "char_transformer": char_transformer}
