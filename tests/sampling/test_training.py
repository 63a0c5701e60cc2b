import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fadex.core import Denoiser
from fadex.sampling import flow_matching_loss, train_flow


def affine(params, x, t, cond):
    """A velocity field that can represent the exact flow of N(mean, 0) data."""
    del cond
    t = t[:, None]
    return (x - params["mean"]) / jnp.maximum(t, 0.05) * params["scale"]


DENOISER = Denoiser(affine)
START = {"mean": jnp.zeros(2), "scale": jnp.float32(0.5)}
IMAGES = np.tile(np.array([[0.3, -0.6]], np.float32), (16, 1))
LABELS = np.zeros(16, np.int32)


def run(**kwargs):
    arguments = dict(key=jax.random.key(0), steps=60, batch_size=8, class_dropout=0.0,
                     learning_rate=0.05) | kwargs
    return train_flow(DENOISER, START, IMAGES, LABELS, **arguments)


@pytest.mark.smoke
def test_training_finds_the_flow_of_a_point_mass():
    state, losses = run(steps=400, ema_decay=0.9)
    assert float(losses[-20:].mean()) < 0.1 * float(losses[:5].mean())
    np.testing.assert_allclose(state.ema["mean"], IMAGES[0], atol=0.05)
    assert float(state.ema["scale"]) == pytest.approx(1.0, abs=0.05)


def test_loss_of_a_perfect_model_is_zero():
    params = {"mean": jnp.array([0.3, -0.6]), "scale": jnp.float32(1.0)}
    loss = flow_matching_loss(
        Denoiser(lambda p, x, t, c: (x - p["mean"]) / t[:, None]), params, jax.random.key(0),
        jnp.asarray(IMAGES), jnp.asarray(LABELS),
    )
    assert float(loss) < 1e-6


@pytest.mark.smoke
def test_interrupted_training_ends_where_uninterrupted_training_ends(tmp_path):
    whole, losses = run()
    stop = RuntimeError("stop")

    def interrupt(step, loss):
        if step >= 40:
            raise stop

    arguments = dict(checkpoint_dir=tmp_path / "state", save_every=20, chunk=10)
    with pytest.raises(RuntimeError):
        run(on_chunk=interrupt, **arguments)
    resumed, rest = run(**arguments)
    assert len(rest) == 40  # from the checkpoint of step 20
    assert int(resumed.step) == 60
    np.testing.assert_allclose(rest, losses[20:], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), resumed, whole)
    finished, none = run(**arguments)
    assert len(none) == 0 and int(finished.step) == 60


def test_callers_arrays_survive_and_any_optax_transform_serves():
    run(optimizer=optax.sgd(0.1), steps=3)
    assert not START["mean"].is_deleted() and float(START["scale"]) == 0.5


def test_label_dropout_replaces_the_given_share():
    seen = []

    def spy(params, x, t, cond):
        seen.append(cond)
        return x * params["scale"]

    flow_matching_loss(Denoiser(spy), START, jax.random.key(0), jnp.zeros((20_000, 2)),
                       jnp.zeros(20_000, jnp.int32), class_dropout=0.3, null_label=7)
    share = float(jnp.mean(seen[0] == 7))
    assert abs(share - 0.3) < 0.012  # more than three standard errors of 0.0032


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(steps=0), "steps: must be >= 1"),
        (dict(batch_size=0), "batch_size: must be >= 1"),
        (dict(learning_rate=0.0), "learning_rate: must lie in"),
        (dict(ema_decay=1.5), "ema_decay: must lie in"),
        (dict(class_dropout=0.1), "null_label: required"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        run(**kwargs)
    with pytest.raises(ValueError, match="images: expected as many images as labels"):
        train_flow(DENOISER, START, IMAGES, LABELS[:3], key=jax.random.key(0), class_dropout=0.0)
    with pytest.raises(ValueError, match="images: expected as many images as labels and at least"):
        train_flow(DENOISER, START, IMAGES[:0], LABELS[:0], key=jax.random.key(0),
                   class_dropout=0.0)
