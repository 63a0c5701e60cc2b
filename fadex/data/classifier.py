"""A classifier that shares nothing with our models, to judge the digits that they draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fadex.core.checks import check_finite, check_shape


def digit_classifier(images: Any, labels: Any) -> Callable[[Any], np.ndarray]:
    """Train a support vector machine on real images and return its prediction function.

    scikit-learn's ``SVC`` (radial kernel, ``C = 10``, ``gamma = 1 / (pixels * variance)``) on
    the flattened pixels. Training draws no random numbers, so equal data give equal
    predictions. Trained on the train split of ``load_images('digits')`` it is right on at least
    98% of the test split. It always answers with one of the labels it was trained on, on noise
    too: agreement with the labels that were asked for is a sanity check of conditional samples,
    not a measure of their quality.

    Args:
      images: ``[M, H, W, C]`` real images, finite.
      labels: ``[M]`` integers, at least two different ones.

    Returns:
      ``predict(images) -> labels``: images ``[N, H, W, C]`` of the same ``H, W, C`` and scale
      to int32 ``[N]``. It runs on the host and cannot be traced.

    Raises:
      ValueError: shapes that do not fit, values that are not finite, fewer than two classes.
      ImportError: scikit-learn is missing.

    >>> from fadex.data import load_images
    >>> images, labels, _, _ = load_images('digits')
    >>> predict = digit_classifier(images[:200], labels[:200])
    >>> predict(images[:4]), labels[:4]
    (array([0, 1, 2, 3], dtype=int32), array([0, 1, 2, 3], dtype=int32))
    """
    images, labels = np.asarray(images), np.asarray(labels)
    check_shape("images", images, (None, None, None, None))
    check_shape("labels", labels, (images.shape[0],))
    check_finite("images", images)
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"labels: expected integers, got {labels.dtype}")
    if np.unique(labels).size < 2:
        raise ValueError(f"labels: expected at least two classes, got {np.unique(labels)}")
    try:
        from sklearn.svm import SVC
    except ImportError as error:
        raise ImportError(
            "digit_classifier needs scikit-learn: pip install 'fadex-jax[demo]'"
        ) from error
    picture = images.shape[1:]
    machine = SVC(C=10.0).fit(images.reshape(images.shape[0], -1), labels)

    def predict(images: Any) -> np.ndarray:
        images = np.asarray(images)
        check_shape("images", images, (None, *picture))
        check_finite("images", images)
        if not images.shape[0]:
            return np.zeros(0, np.int32)
        return machine.predict(images.reshape(images.shape[0], -1)).astype(np.int32)

    return predict
