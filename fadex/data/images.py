"""Image sets by name: scikit-learn's digits, tensorflow-datasets sets, folders of PNGs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fadex.core.checks import check_choice
from fadex.data.folder import load_folder
from fadex.data.pixels import check_size, resize_picture
from fadex.data.prepared import find_prepared, is_prepared, load_prepared

_SPLITS = ("train", "test", "all")
_FORMS = (
    "'digits', 'tfds:NAME' (also NAME/CONFIG and NAME:VERSION), 'folder:PATH', or the path of an "
    "existing folder with PNG files or with a prepared tensorflow-datasets set"
)


class ImageSet(NamedTuple):
    """Images with labels, as NumPy arrays on the host.

    Attributes:
      images: float32 ``[M, H, W, C]`` in [-1, 1], with C = 1 (gray) or 3 (red, green, blue).
      labels: int32 ``[M]`` in ``0 .. num_classes - 1``. A set without labels has zeros and one
        class, so that class-conditional code needs no special case.
      num_classes: the number of classes of the set, whichever split was loaded.
      name: what the set calls itself; ``load_images`` accepts it again.
    """

    images: np.ndarray
    labels: np.ndarray
    num_classes: int
    name: str


def load_images(
    name: str | os.PathLike = "digits",
    *,
    split: str = "train",
    data_dir: str | os.PathLike | None = None,
    size: int | tuple[int, int] | None = None,
) -> ImageSet:
    """Load an image set that is already on this machine. Nothing is ever downloaded.

    ====================  =======================================================================
    ``'digits'``          scikit-learn's 1797 handwritten digits, 8 x 8, ``x / 8 - 1``, 10 classes
    ``'tfds:NAME'``       a set that tensorflow-datasets has prepared as ``array_record``; also
                          ``NAME/CONFIG``, ``NAME:VERSION``, or the path of the prepared version.
                          Features ``image`` and, where there is one, ``label``
    ``'folder:PATH'``     PNG files: flat, or one subfolder for each class (numbered in the order
                          of their names)
    an existing folder    either of the last two, by what it holds
    ====================  =======================================================================

    Pictures of 8 bits become ``x / 127.5 - 1``. A folder that mixes gray and colour becomes
    colour.

    Args:
      name: the set, as in the table.
      split: ``'train'``, ``'test'`` or ``'all'``. Of the digits, every fifth of each class, in
        the set's own order, is test (355 images, 34 to 36 of each class), the rest train
        (1442). A tfds set takes any split expression of tfds (``'validation'``,
        ``'train[:10%]'``); ``'all'`` is all its splits. A folder is one split: ``'train'`` and
        ``'all'`` mean the same and ``'test'`` raises.
      data_dir: for ``'tfds:NAME'``, the folder that holds NAME; default ``$TFDS_DATA_DIR``, else
        ``~/tensorflow_datasets``. The other forms do not use it.
      size: an integer or ``(height, width)`` to resize every picture to (linear interpolation
        with antialiasing, aspect ratio not kept). Without it all pictures must have one size.

    Returns:
      An ``ImageSet``, in a fixed order: the set's own for digits and tfds, by class and file name
      for folders.

    Raises:
      ValueError: an unknown name, a set that is not there or stored in another format, a split
        it does not have, a damaged file, pictures of different sizes; the message says which.
      ImportError: a package is missing; the message names the extra that brings it.

    >>> digits = load_images('digits', split='test')
    >>> digits.images.shape, digits.num_classes
    ((355, 8, 8, 1), 10)
    """
    size = check_size(size)
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"name: expected {_FORMS}, got {name!r}")
    if not isinstance(split, str):
        raise TypeError(f"split: expected a string such as 'train', got {split!r}")
    text = os.fspath(name)
    kind, colon, rest = text.partition(":")
    if text == "digits":
        return _load_digits(split, size)
    if colon and kind == "tfds":
        folder, prepared = find_prepared(rest, data_dir), True
    elif colon and kind == "folder":
        if not rest:
            raise ValueError("name: expected a path after 'folder:'")
        folder, prepared = Path(rest).expanduser(), False
    else:
        folder = Path(text).expanduser()
        if not text or not folder.is_dir():
            raise ValueError(f"name: expected {_FORMS}, got {text!r}")
        prepared = is_prepared(folder)
        folder = find_prepared(str(folder), None) if prepared else folder

    if prepared:
        images, labels, num_classes = load_prepared(folder, split, size)
        return ImageSet(images, labels, num_classes, f"tfds:{folder}")
    check_choice("split", split, _SPLITS)
    if split == "test":
        raise ValueError(
            f"split: a folder has no test split, got 'test' for {folder}; load the folder that "
            "holds the test pictures"
        )
    images, labels, num_classes = load_folder(folder, size)
    return ImageSet(images, labels, num_classes, f"folder:{folder}")


def _load_digits(split: str, size: tuple[int, int] | None) -> ImageSet:
    check_choice("split", split, _SPLITS)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the image set 'digits' comes with scikit-learn: pip install 'fadex-jax[demo]'"
        ) from error
    data = load_digits()
    labels = data.target.astype(np.int32)
    images = (data.images / 8.0 - 1.0).astype(np.float32)[..., None]
    if split != "all":
        # By rank within the class: every fifth of the whole set would take 21 of one class and
        # 52 of another, because the set begins by counting from 0 to 9.
        rank = np.zeros(len(labels), np.int64)
        for label in range(10):
            members = labels == label
            rank[members] = np.arange(members.sum())
        chosen = (rank % 5 == 4) == (split == "test")
        images, labels = images[chosen], labels[chosen]
    if size is not None:
        images = np.stack([resize_picture(image, size) for image in images])
    return ImageSet(images, labels, 10, "digits")
