"""Image sets that tensorflow-datasets has prepared, read without tensorflow.

Only sets stored as ``array_record`` are read. ``tfrecord`` would need tensorflow; tfds'
parquet reader ignores the bounds of a sliced split (``train[:10%]`` gives all of train).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from fadex.data.pixels import decode_picture, import_pillow, stack_pictures

_INFO = "dataset_info.json"


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` is a prepared version, or the folder of a set's prepared versions."""
    return (folder / _INFO).is_file() or any(folder.glob(f"*/{_INFO}"))


def _version_key(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", folder.name))


def find_prepared(reference: str, data_dir: str | os.PathLike | None) -> Path:
    """The folder of the prepared version that ``reference`` means.

    Args:
      reference: ``NAME`` or ``NAME/CONFIG``, either with ``:VERSION``; or a path: absolute, or
        relative to the working directory when ``data_dir`` is None. Without a version the
        highest one that is there is taken.
      data_dir: where NAME is looked for; None means tfds' own default, ``$TFDS_DATA_DIR`` or
        else ``~/tensorflow_datasets``.

    Raises:
      ValueError: nothing prepared there, or several configurations and none named.
    """
    if not reference:
        raise ValueError("name: expected a set's name or a path after 'tfds:'")
    path = Path(reference).expanduser()
    if path.is_absolute() or (data_dir is None and is_prepared(path)):
        folder = path
    else:
        if data_dir is None:
            data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
        folder = Path(data_dir).expanduser() / reference.replace(":", "/")
    if (folder / _INFO).is_file():
        return folder
    versions = [
        info.parent
        for pattern in (f"*/{_INFO}", f"*/*/{_INFO}")
        for info in folder.glob(pattern)
        if "incomplete." not in str(info.relative_to(folder))  # a preparation that was cut off
    ]
    if not versions:
        name = "NAME" if path.is_absolute() else reference.split(":")[0]
        raise ValueError(
            f"name: found no prepared tensorflow-datasets set for {reference!r} (looked in "
            f"{folder}); prepare it once, where tensorflow-datasets may download, with "
            f"`tfds.builder({name!r}, file_format='array_record').download_and_prepare()`, or "
            "give data_dir="
        )
    configs = sorted({version.parent for version in versions})
    if len(configs) > 1:
        names = ", ".join(repr(str(config.relative_to(folder))) for config in configs)
        raise ValueError(
            f"name: {folder} holds several configurations ({names}); name one, as in "
            "'tfds:NAME/CONFIG'"
        )
    return max(versions, key=_version_key)


def _import_tfds() -> Any:
    try:
        import array_record  # noqa: F401  (tfds reads through it)
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            "reading a tensorflow-datasets set needs tensorflow-datasets and array_record: "
            "pip install 'fadex-jax[data]'"
        ) from error
    import_pillow()
    return tfds


def _check_features(tfds: Any, features: Any, where: str) -> tuple[int, int | None]:
    """Channels of 'image' and classes of 'label': 0 for unknown, None for no labels."""
    names = sorted(features) if isinstance(features, tfds.features.FeaturesDict) else []
    if "image" not in names:
        raise ValueError(f"{where}: expected a feature 'image', got {names or features}")
    image = features["image"]
    if not isinstance(image, tfds.features.Image) or image.np_dtype != np.uint8:
        raise ValueError(
            f"{where}: expected 'image' to be a uint8 tfds.features.Image, got {image}"
        )
    channels = image.shape[-1]
    if channels not in (1, 3):
        raise ValueError(f"{where}: expected 'image' with 1 or 3 channels, got {image.shape}")
    if "label" not in names:
        return channels, None
    label = features["label"]
    if label.shape != () or not np.issubdtype(label.np_dtype, np.integer):
        raise ValueError(f"{where}: expected 'label' to be one integer, got {label}")
    return channels, getattr(label, "num_classes", None) or 0


def load_prepared(
    folder: Path, split: str, size: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Read one split of the prepared version in ``folder``, in stored order.

    Returns:
      images float32 ``[M, H, W, C]``, labels int32 ``[M]`` (zeros where the set has none) and
      the number of classes.

    Raises:
      ValueError: not stored as array_record, no such split, features that are not an image and
        an integer label, labels outside the classes, damaged files.
      ImportError: tensorflow-datasets, array_record or Pillow is missing.
    """
    tfds = _import_tfds()
    try:
        builder = tfds.builder_from_directory(folder)
        formats = sorted(item.value for item in builder.info.available_file_formats())
    except Exception as error:  # tfds and protobuf have many kinds
        raise ValueError(
            f"{folder}: is not a readable prepared set ({error}); prepare it again"
        ) from error
    name = builder.info.full_name
    where = f"{name} in {folder}"
    if "array_record" not in formats:
        # A set older than the field is tfrecord.
        kind = " and ".join(formats) or "tfrecord"
        raise ValueError(
            f"{where}: is stored as {kind}, which is not read here; convert it once, where "
            f"tensorflow is installed, with `tfds convert_format --dataset_version_dir={folder} "
            "--out_file_format=array_record`, or prepare it again with "
            f"`tfds.builder({builder.name!r}, file_format='array_record')`"
        )
    channels, num_classes = _check_features(tfds, builder.info.features, where)
    splits = ", ".join(repr(key) for key in builder.info.splits)
    try:
        total = builder.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"split: {name} has {splits}, got {split!r} ({reason})") from error
    if not total:
        raise ValueError(f"split: {split!r} of {name} holds no example")

    # The pictures are decoded by our own call: one decoder on every machine, while tfds takes
    # OpenCV where it is installed.
    decoders = {"image": tfds.decode.SkipDecoding()}
    try:
        source = builder.as_data_source(split, decoders=decoders, file_format="array_record")
        # All at once, which takes a third of the time of reading one by one.
        examples = source.__getitems__(list(range(total)))
    except RuntimeError as error:  # array_record's, for missing and damaged files
        raise ValueError(
            f"{where}: the prepared files are damaged ({error}); prepare them again"
        ) from error
    names = [f"{where}: image {index} of {split!r}" for index in range(total)]
    pictures = [
        decode_picture(example["image"], at, channels=channels)
        for example, at in zip(examples, names)
    ]
    labels = [example["label"] if num_classes is not None else 0 for example in examples]
    labels = np.asarray(labels, np.int64)
    count = 1 if num_classes is None else num_classes or int(labels.max()) + 1
    if labels.min() < 0 or labels.max() >= count:
        raise ValueError(
            f"split: {split!r} of {name} has labels from {labels.min()} to {labels.max()}, "
            f"expected 0 to {count - 1} (tfds writes -1 where the label is not public)"
        )
    return stack_pictures(pictures, names, size), labels.astype(np.int32), count
