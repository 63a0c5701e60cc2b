"""The training benchmark's machinery, on a task of a few parameters and a few steps."""

import importlib
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 3


@pytest.fixture(scope="module")
def harness():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("optim_training")
    finally:
        sys.path.remove(str(BENCHMARKS))


def quadratic(harness):
    """f(x) = x²/2 from x = 1, whatever the seed but for noise in the gradient's place."""

    def loss(params, shift):
        return 0.5 * jnp.square(params["w"] - shift).sum(), jnp.float32(1)

    return harness.Task(
        init=lambda key: {"w": jnp.ones(1)},
        apply=lambda params, x: params["w"] - x,
        batches=lambda key, data, steps: 0.0 * jax.random.normal(key, (steps, 1)),
        batch=lambda x, data: x,
        loss=loss,
        evaluate=lambda params, data, split: loss(params, data[split]),
        data={"train": jnp.zeros(1), "valid": jnp.zeros(1), "test": jnp.zeros(1)},
        splits=("train", "valid", "test"), select="train", steps=STEPS,
        tune_seeds=(0, 1), report_seeds=(10, 11, 12),
        about={"model": "x²/2", "batch": 1},
    )  # fmt: skip


def table(harness):
    return {
        "sgd": harness.Entry(lambda lr, _, s, p: optax.sgd(lambda t: lr * s(t)), 0.1, "sgd"),
        "momentum": harness.Entry(
            lambda lr, gap, s, p: optax.sgd(lambda t: lr * s(t), momentum=1 - gap),
            0.1, "momentum", extra=0.3,
        ),
    }  # fmt: skip


@pytest.mark.smoke
def test_a_run_is_written_resumed_and_measured_again_when_the_settings_change(harness, tmp_path):
    out, built = tmp_path / "results" / "r.json", []

    def make():
        built.append(1)
        return quadratic(harness)

    call = lambda names, **kw: harness.run(
        out, ["t"], names, make_task={"t": make}, table=table(harness), **{"points": 9, **kw}
    )
    first = call(["sgd"])
    assert json.loads(out.read_text()) == first
    row = first["tasks"]["t"]["optimizers"]["sgd"]
    # The last loss of sgd on x²/2 with rates lr (1, 2/3, 1/3): a product, by hand.
    lr = row["best"]["lr"]
    x = np.prod([1 - lr * s for s in (1, 2 / 3, 1 / 3)])
    np.testing.assert_allclose(row["report"]["train_loss"], [x * x / 2] * 3, rtol=1e-4, atol=1e-9)
    # Every learning rate by the same product: the winner is the grid's best.
    best = min(row["grid"], key=lambda cell: cell["train_loss"])
    assert best["lr"] == lr and not row["at_edge"]
    for cell in row["grid"]:
        x = np.prod([1 - cell["lr"] * s for s in (1, 2 / 3, 1 / 3)])
        np.testing.assert_allclose(cell["train_loss"], x * x / 2, rtol=1e-4, atol=1e-9)

    mark = out.stat().st_mtime_ns
    assert call(["sgd"]) == first and out.stat().st_mtime_ns == mark
    both = call(["sgd", "momentum"])["tasks"]["t"]["optimizers"]
    assert both["sgd"] == row and set(both["momentum"]["best"]) == {"lr", "extra"}
    assert call(["sgd"], max_moves=1)["tasks"]["t"]["optimizers"]["sgd"]["key"] != row["key"]
    text = harness.render(harness.read_results(out))
    assert "| sgd |" in text and "| momentum |" in text


def test_unknown_names_are_refused_before_anything_runs(harness, tmp_path):
    with pytest.raises(ValueError, match="'nothing': expected tasks of"):
        harness.run(tmp_path / "r.json", ["nothing"])
    with pytest.raises(ValueError, match=r"and optimizers of \['sgd', 'momentum'\]"):
        harness.run(tmp_path / "r.json", [], ["adam"], table=table(harness))


def test_the_window_moves_until_the_best_point_has_neighbours(harness):
    entry = harness.Entry(None, 1.0, "", extra=1.0)
    grid = harness.make_grid(entry, 9)
    bowl = lambda target: lambda cells: [
        (i - target[0]) ** 2 + (j - target[1]) ** 2 for i, j in cells
    ]
    best, tried, moves = harness.tune(grid, bowl((0, 0)), 3)
    assert (best, len(tried), moves) == ((0, 0), 9, 0)
    best, tried, moves = harness.tune(grid, bowl((2, -1)), 3)
    assert (best, moves) == ((2, -1), 2) and not grid.open_sides(best, tried)
    best, tried, moves = harness.tune(grid, bowl((9, 0)), 3)
    assert moves == 3 and grid.open_sides(best, tried)  # not found, and it shows
    best, _, moves = harness.tune(grid, lambda cells: [math.inf] * len(cells), 3)
    assert moves == 0  # everything diverged: nothing to move towards


def test_the_river_map_takes_the_edge_of_the_first_stable_stretch():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        river = importlib.import_module("optim_river_lm")
    finally:
        sys.path.remove(str(BENCHMARKS))
    edge = lambda flags: river.largest_stable([1.0, 2.0, 4.0, 8.0], flags)
    assert edge([False, True, True, False]) == 4.0
    assert edge([True, False, True, False]) == 1.0
    assert edge([True] * 4) == 8.0 and edge([False] * 4) is None
    falling = np.linspace(4, 2, 50)
    assert river.is_stable(falling, entropy=2.9)
    assert not river.is_stable(falling, entropy=1.9)
    assert not river.is_stable(np.where(np.arange(50) == 30, 5.0, falling), entropy=2.9)
    assert not river.is_stable(np.where(np.arange(50) == 30, np.nan, falling), entropy=2.9)


def test_paired_intervals_agree_with_scipys_t_test(harness):
    from scipy import stats

    rng = np.random.default_rng(0)
    a, b = rng.lognormal(size=(2, 8))
    mean, error, half = harness.paired(list(a), list(b))
    theirs = stats.ttest_rel(a, b).confidence_interval(0.95)
    np.testing.assert_allclose([mean - half, mean + half], theirs)
    np.testing.assert_allclose(error, stats.sem(a - b))
    np.testing.assert_allclose(
        harness.ratio(list(a), list(b))[0], stats.gmean(a) / stats.gmean(b)
    )


def test_the_tables_rival_is_the_best_of_muon_and_scion(harness):
    rows = {
        name: {"report": {"test_loss": [loss], "test_accuracy": [accuracy]}}
        for name, loss, accuracy in (
            ("adamw", 0.1, 1.0), ("muon", 0.3, 0.8), ("scion", 0.4, 0.9), ("muon_adam", None, 0.99)
        )
    }  # fmt: skip
    assert harness.best_rival(rows, "test_loss") == "muon"
    assert harness.best_rival(rows, "test_accuracy") == "muon_adam"


def test_models_have_the_paths_that_rules_read_and_start_at_chance(harness):
    from fadex.optim import assign_norms

    for name, about in (
        ("digits_mlp", {"layers/1/kernel": "spectral", "head/kernel": "linf"}),
        ("digits_cnn", {"conv/1/kernel": "spectral_conv", "head/kernel": "linf"}),
    ):
        task = harness.TASKS[name]()
        key = jax.random.key(0)
        specs = jax.tree_util.tree_leaves_with_path(
            assign_norms(jax.eval_shape(task.init, key)), is_leaf=lambda x: hasattr(x, "radius")
        )
        names = {"/".join(k.key for k in path): spec.name for path, spec in specs}
        assert about.items() <= names.items() and names["head/bias"] == "rms"
        shapes = jax.eval_shape(
            lambda key, data: task.batch(task.batches(key, data, 2)[0], data), key, task.data
        )
        assert [part.shape for part in shapes] == [(128, 8, 8, 1), (128,)]
        assert [len(task.data[split][1]) for split in task.splits] == [1200, 200, 397]
        assert not set(task.tune_seeds) & set(task.report_seeds)
    start = jax.jit(lambda key, data: task.evaluate(task.init(key), data, "test"))
    loss, accuracy = start(key, task.data)
    assert 2.0 < loss < 3.5 and accuracy < 0.3


def test_convolution_by_shifted_pictures_is_laxs(harness):
    models = sys.modules["optim_models"]
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(2, 8, 8, 3)), rng.normal(size=(3, 3, 3, 5))

    @jax.jit
    def both(x, weights):
        theirs = lambda stride: jax.lax.conv_general_dilated(
            x, weights, (stride, stride), ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return [(models.convolve(x, weights, n), theirs(n)) for n in (1, 2)]

    for ours, theirs in both(x, weights):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_character_model_looks_only_back(harness, tmp_path):
    words = "the quick brown fox jumps over the lazy dog. "
    (tmp_path / "a.txt").write_text(words * 40)
    task = sys.modules["optim_models"].char_lm(
        str(tmp_path / "a.txt"), num_layers=1, width=8, num_heads=2, context=6, batch_size=2,
        steps=3, eval_windows=4,
    )  # fmt: skip

    # Parameters by NumPy: compiling the random initial ones would be most of this test's time.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32),
        jax.eval_shape(task.init, jax.random.key(0)),
    )

    @jax.jit
    def look(params, data):
        windows = task.batch(task.batches(jax.random.key(1), data, 1)[0], data)

        # Whom the first three outputs looked at: the gradient in the table of positions.
        def first_logits(positions):
            moved = {**params, "pos": {"embedding": positions}}
            return jnp.square(task.apply(moved, windows[:, :-1])[:, :3]).sum()

        seen = jax.grad(first_logits)(params["pos"]["embedding"])
        logits = task.apply(params, data["test"][:, :-1])
        return windows, seen, logits, task.evaluate(params, data, "test")

    windows, seen, logits, (loss, accuracy) = jax.device_get(look(params, task.data))
    assert windows.shape == (2, 7)
    seen = np.abs(seen).sum(-1)
    assert (seen[:3] > 0).all() and (seen[3:] == 0).all()
    targets = np.asarray(task.data["test"])[:, 1:]
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(-1, keepdims=True)
    chosen = np.take_along_axis(shares, targets[..., None], -1)
    np.testing.assert_allclose(loss, -np.log(chosen).mean(), rtol=1e-5)
    np.testing.assert_allclose(accuracy, (logits.argmax(-1) == targets).mean(), rtol=1e-6)
