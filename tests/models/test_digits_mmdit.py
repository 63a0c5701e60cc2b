import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fadex.caching import cached_sample, custom_schedule, make_plan, taylorseer
from fadex.core.denoiser import Denoiser
from fadex.core.pytree import flatten_with_paths, map_with_path, tree_bytes, tree_hash
from fadex.data import digit_classifier, load_images
from fadex.models import (
    DIGITS_MMDIT_CONFIG,
    DIGITS_SHAPE,
    NULL_TEXT,
    STYLES,
    MMDiT,
    digits_mmdit,
    digits_null_text,
    digits_text,
    digits_text_batch,
    digits_text_denoiser,
    digits_text_ids,
    from_nnx,
    load_digits_mmdit,
    save_digits_mmdit,
    shipped_mmdit_checkpoint,
    stroke_styles,
)
from fadex.sampling import sample, train_flow, uniform_times

COUNT = 60
FIRST_FEATURES = [-0.47398585, -0.44968799, -1.60068476]  # of the word "digit"


@pytest.fixture(scope="module")
def digits():
    return load_images("digits")


@pytest.fixture(scope="module")
def trained():
    return load_digits_mmdit()


@pytest.fixture(scope="module")
def batch():
    """Noise, text, null text and labels; two samples of each text."""
    cond, null_cond, labels = digits_text_batch(COUNT)
    return jax.random.normal(jax.random.key(7), (COUNT, *DIGITS_SHAPE)), cond, null_cond, labels


SHARED = dict(timesteps=uniform_times(24), guidance=3.0)


@pytest.fixture(scope="module")
def full(trained, batch):
    x, cond, null_cond, _ = batch
    return np.asarray(sample(*trained, x, cond, null_cond=null_cond, **SHARED))


# -- texts ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_texts_are_three_words_and_their_mean():
    cond = digits_text([7, 7, 3], [0, 2, 2])
    txt, pooled = np.asarray(cond["txt"]), np.asarray(cond["pooled"])
    assert txt.shape == (3, 3, 32) and pooled.shape == (3, 32)
    assert np.array_equal(txt[0, :2], txt[1, :2])  # "digit", "seven"
    assert np.array_equal(txt[1, [0, 2]], txt[2, [0, 2]])  # "digit", "bold"
    assert not np.array_equal(txt[0, 2], txt[1, 2])
    np.testing.assert_allclose(pooled, txt.mean(1), rtol=1e-6)
    null = np.asarray(digits_null_text(2)["txt"])
    assert np.array_equal(null[0, 0], null[1, 2]) and not np.array_equal(null[0, 0], txt[0, 0])
    # The table is the same on every machine: its words are fixed bits of a counter generator.
    vocabulary = np.unique(np.concatenate([txt.reshape(-1, 32), null.reshape(-1, 32)]), axis=0)
    assert vocabulary.shape == (6, 32)
    np.testing.assert_allclose(txt[0, 0, :3], FIRST_FEATURES, rtol=1e-6)
    assert abs(txt.mean()) < 0.2 and abs(txt.std() - 1) < 0.2



def test_batches_take_digits_in_turn_and_styles_by_tens():
    cond, null_cond, labels = digits_text_batch(35)
    assert labels.tolist() == [i % 10 for i in range(35)]
    again = digits_text(labels, np.repeat([0, 1, 2, 0], 10)[:35])
    assert tree_hash(cond) == tree_hash(again)
    assert jax.tree.map(jnp.shape, null_cond) == jax.tree.map(jnp.shape, cond)
    ids = np.asarray(digits_text_ids(labels, [0] * 35))
    assert np.unique(ids).tolist() == list(range(0, 30, 3))


def test_texts_can_be_traced_and_bad_ones_are_named():
    traced = jax.jit(digits_text)(jnp.array([1]), jnp.array([2]))
    assert tree_hash(traced) == tree_hash(digits_text([1], [2]))
    for labels, styles, message in (
        ([10], [0], r"labels: must lie in \[0, 10\), got \[10\]"),
        ([1], [-1], r"styles: must lie in \[0, 3\), got \[-1\]"),
        ([1, 2], [0], r"styles: expected shape \(2\), got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            digits_text(labels, styles)
    with pytest.raises(ValueError, match="count: must be >= 1, got 0"):
        digits_text_batch(0)


def test_styles_split_the_images_of_each_digit_into_thirds(digits):
    styles = stroke_styles(digits.images, digits.labels)
    ink = digits.images.mean((1, 2, 3))
    for label in range(10):
        mine = [ink[(digits.labels == label) & (styles == s)] for s in range(len(STYLES))]
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
        assert mine[0].max() <= mine[1].min() and mine[1].max() <= mine[2].min()
    assert stroke_styles(np.zeros((4, 2)), [1, 1, 1, 5]).tolist() == [0, 1, 2, 0]


# -- the model -----------------------------------------------------------------------------


@pytest.mark.smoke
def test_guided_samples_are_the_digits_that_were_asked_for(digits, full, batch):
    labels = np.asarray(batch[-1])
    right = np.mean(digit_classifier(digits.images, digits.labels)(full) == labels)
    ink = full.mean((1, 2, 3)).reshape(-1, 10).reshape(2, 3, 10).mean((0, 2))
    print(f"agreement with the intended digit {right:.3f}, mean ink by style {ink.round(3)}")
    assert right >= 0.9  # 240 samples of 50 steps: 1.000
    assert ink[0] < ink[1] < ink[2]


@pytest.mark.parametrize("site", ["output", "crf", "module"])
def test_cached_samples_stay_close_to_computed_ones(trained, batch, full, digits, site):
    x, cond, null_cond, labels = batch
    plan = make_plan(custom_schedule(24, (0, 3, 6, 9, 12, 15, 18, 21)), taylorseer(1))
    out = np.asarray(
        cached_sample(*trained, x, cond, null_cond=null_cond, plan=plan, site=site, **SHARED)
    )
    gap = np.linalg.norm((out - full).reshape(COUNT, -1), axis=1)
    gap = (gap / np.linalg.norm(full.reshape(COUNT, -1), axis=1)).mean()
    right = np.mean(digit_classifier(digits.images, digits.labels)(out) == np.asarray(labels))
    print(f"{site}: 8 of 24 steps computed, relative error {gap:.4f}, agreement {right:.3f}")
    assert 0 < gap < 0.1 and right >= 0.9


@pytest.mark.smoke
def test_training_learns_through_both_kinds_of_blocks(digits):
    # Weights drawn by NumPy: drawing them leaf by leaf under JAX costs more than the training.
    shallow = dict(double_depth=1, single_depth=1, scan_layers=False)  # compiles in half the time
    denoiser, abstract = from_nnx(nnx.eval_shape(lambda: digits_mmdit(**shallow)))
    rng = np.random.default_rng(1)

    def leaf(path, like):
        std = 0.0 if "bias" in path or "modulation" in path or "final" in path else 0.1
        return jnp.asarray(std * rng.standard_normal(like.shape) + ("scale" in path), like.dtype)

    params = map_with_path(leaf, abstract)
    ids = digits_text_ids(digits.labels, stroke_styles(digits.images, digits.labels))
    final, losses = train_flow(
        digits_text_denoiser(denoiser), params, digits.images, ids, key=jax.random.key(1),
        steps=40, batch_size=16, null_label=NULL_TEXT, chunk=40,
    )
    losses = np.asarray(losses)
    print(f"loss of steps 1 to 5 {losses[:5].mean():.3f}, 36 to 40 {losses[-5:].mean():.3f}")
    assert np.all(np.isfinite(losses)) and losses[-5:].mean() < 0.95 * losses[:5].mean()
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), final.params, params)
    assert all(jax.tree.leaves(moved))  # text stream, single blocks and norms included


def test_a_denoiser_of_texts_reads_their_ids():
    denoiser = digits_text_denoiser(Denoiser(lambda params, x, t, cond: x + cond["pooled"]))
    out = denoiser.apply(None, jnp.zeros((2, 1)), jnp.ones(2), jnp.array([10, NULL_TEXT]))
    assert jnp.array_equal(out[0], digits_text([3], [1])["pooled"][0])
    assert jnp.array_equal(out[1], digits_null_text(1)["pooled"][0])
    one, two = (from_nnx(nnx.eval_shape(digits_mmdit))[0] for _ in range(2))
    assert digits_text_denoiser(one) == digits_text_denoiser(two)  # nothing compiles twice


# -- weights -------------------------------------------------------------------------------


def test_shipped_weights_are_small_and_fit_the_config(trained):
    files = [f for f in shipped_mmdit_checkpoint().rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 2_000_000
    assert tree_bytes(trained[1]) < 2_000_000
    abstract = nnx.state(nnx.eval_shape(lambda: MMDiT(DIGITS_MMDIT_CONFIG, rngs=nnx.Rngs(0))))
    shapes = lambda tree: {path: x.shape for path, x in flatten_with_paths(tree).items()}
    assert shapes(trained[1]) == shapes(abstract)


def test_weights_are_saved_and_loaded(tmp_path, trained):
    path = save_digits_mmdit(tmp_path / "weights", trained[1], note="a copy")
    assert tree_hash(load_digits_mmdit(path)[1]) == tree_hash(trained[1])
    with pytest.raises(FileExistsError):
        save_digits_mmdit(path, trained[1])
    with pytest.raises(FileNotFoundError, match="path: no checkpoint at"):
        load_digits_mmdit(tmp_path / "nothing")
