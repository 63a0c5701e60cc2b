"""The independent digit classifier."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from fadex.data import digit_classifier, load_images


@pytest.fixture(scope="module")
def train():
    return load_images("digits")


@pytest.fixture(scope="module")
def predict(train):
    return digit_classifier(train.images, train.labels)


@pytest.mark.smoke
def test_right_on_98_percent_of_the_test_split(predict):
    test = load_images("digits", split="test")
    got = predict(test.images)
    assert got.shape == (355,) and got.dtype == np.int32
    assert np.mean(got == test.labels) >= 0.98
    # On shuffled pixels it is near chance: the score above comes from the pictures.
    shuffled = np.random.default_rng(0).permuted(test.images, axis=0)
    assert np.mean(predict(shuffled) == test.labels) < 0.3


def test_deterministic_and_takes_jax_arrays(train, predict):
    again = digit_classifier(jnp.asarray(train.images), jnp.asarray(train.labels))
    noise = np.random.default_rng(1).uniform(-1, 1, (100, 8, 8, 1)).astype(np.float32)
    np.testing.assert_array_equal(predict(noise), again(jnp.asarray(noise)))
    assert predict(noise[:0]).shape == (0,)


def test_bad_input(train, predict):
    images, labels = train.images[:20], train.labels[:20]
    with pytest.raises(ValueError, match=r"labels: expected shape \(20\)"):
        digit_classifier(images, labels[:19])
    with pytest.raises(ValueError, match="images: expected shape"):
        digit_classifier(images[..., 0], labels)
    with pytest.raises(TypeError, match="labels: expected integers"):
        digit_classifier(images, labels.astype(np.float32))
    with pytest.raises(ValueError, match="labels: expected at least two classes"):
        digit_classifier(images, np.zeros(20, np.int32))
    with pytest.raises(ValueError, match="images: holds values that are not finite"):
        digit_classifier(np.full_like(images, np.nan), labels)
    with pytest.raises(ValueError, match=r"images: expected shape \(\*, 8, 8, 1\)"):
        predict(np.zeros((2, 16, 16, 1), np.float32))
    with pytest.raises(ValueError, match="images: holds values that are not finite"):
        predict(np.full((1, 8, 8, 1), np.inf, np.float32))


def test_missing_package_names_the_extra(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(ImportError, match=r"pip install 'fadex-jax\[demo\]'"):
        digit_classifier(train.images, train.labels)
