"""Sets prepared by tensorflow-datasets: built here by its own builder, read without tensorflow."""

import io
import json
import shutil
import socket
import sys

import numpy as np
import pytest
from PIL import Image

from fadex.data import load_images

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")


def encode(pixels, kind="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(out, kind)
    return out.getvalue()


def pixels_of(split, index, shape):
    seed = sum(split.encode()) + 1000 * index
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def build(
    data_dir, name, splits, *, shape, label=True, version="1.0.0", config="", edit=None, shards=1
):
    """Prepare a tiny set; unshuffled, so that the stored order is the order of generation.

    ``edit(split, index, example)`` may change an example before it is stored. tfds turns arrays
    into PNG by tensorflow, so the pictures are handed to it encoded.
    """
    label = tfds.features.ClassLabel(num_classes=3) if label is True else label

    def info(self):
        features = {"image": tfds.features.Image(shape=shape), "name": tfds.features.Text()}
        if label is not None:
            features["label"] = label
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def examples(split, count):
        for index in range(count):
            drawn = pixels_of(split, index, tuple(n or 4 for n in shape))
            example = {"image": encode(drawn), "name": f"{split}{index}"}
            if label is not None:
                example["label"] = index % 3
            yield index, edit(split, index, example) if edit else example

    members = {
        "VERSION": tfds.core.Version(version),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config)] if config else [],
        "_info": info,
        "_split_generators": lambda self, _: {k: examples(k, n) for k, n in splits.items()},
        "_generate_examples": lambda self: None,
        "pkg_dir_path": data_dir,
    }
    base = tfds.core.GeneratorBasedBuilder
    kind = type(name.capitalize(), (base,), members, skip_registration=True)
    builder = kind(data_dir=data_dir, file_format="array_record")
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=shards)
    )
    return builder.data_path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A data_dir with a gray set in two versions and a colour one without labels."""
    root = tmp_path_factory.mktemp("tfds")
    build(root, "gray", {"train": 7, "test": 4}, shape=(4, 5, 1))
    build(root, "gray", {"train": 2}, shape=(4, 5, 1), version="0.10.0")
    build(root, "colour", {"train": 3, "validation": 2}, shape=(None, None, 3), label=None)
    return root


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Reading must open no connection."""

    def refuse(*args, **kwargs):
        raise AssertionError("a network connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def to_bytes(images):
    return np.round((images.astype(np.float64) + 1) * 127.5).astype(np.uint8)


def expected(split, count, shape):
    return np.stack([pixels_of(split, index, shape) for index in range(count)])


@pytest.mark.smoke
def test_gray_set_to_the_byte_and_in_stored_order(home):
    data = load_images("tfds:gray", split="test", data_dir=home)
    assert data.images.dtype == np.float32 and data.labels.dtype == np.int32
    assert data.num_classes == 3
    np.testing.assert_array_equal(to_bytes(data.images), expected("test", 4, (4, 5, 1)))
    np.testing.assert_array_equal(data.labels, [0, 1, 2, 0])
    assert "tensorflow" not in sys.modules


def test_the_same_set_by_every_way_of_naming_it(home, monkeypatch):
    want = expected("train", 7, (4, 5, 1))
    version = home / "gray" / "1.0.0"
    monkeypatch.chdir(home)
    monkeypatch.setenv("TFDS_DATA_DIR", str(home))
    names = ["tfds:gray", "tfds:gray:1.0.0", "gray", "gray/1.0.0", version, f"tfds:{version}"]
    for name in names:
        np.testing.assert_array_equal(to_bytes(load_images(name).images), want)
    data = load_images("tfds:gray", data_dir=str(home))
    np.testing.assert_array_equal(load_images(data.name).images, data.images)
    old = load_images("tfds:gray:0.10.0", data_dir=home)
    np.testing.assert_array_equal(to_bytes(old.images), want[:2])


def test_colour_set_without_labels(home):
    data = load_images("tfds:colour", data_dir=home)
    np.testing.assert_array_equal(to_bytes(data.images), expected("train", 3, (4, 4, 3)))
    np.testing.assert_array_equal(data.labels, [0, 0, 0])
    assert data.num_classes == 1
    small = load_images("tfds:colour", data_dir=home, size=2)
    assert small.images.shape == (3, 2, 2, 3)
    # From 4 to 2 pixels the triangle filter weighs its neighbours 1, 3, 3, 1 (cut at the edge).
    weights = np.array([[3, 3, 1, 0], [0, 1, 3, 3]]) / 7
    want = np.einsum("hy,myxc,wx->mhwc", weights, data.images.astype(np.float64), weights)
    np.testing.assert_allclose(small.images, want, atol=1e-6)


def test_splits_of_tfds(home):
    whole = load_images("tfds:gray", split="all", data_dir=home).images
    parts = [load_images("tfds:gray", split=s, data_dir=home).images for s in ("train", "test")]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    part = load_images("tfds:gray", split="train[2:5]", data_dir=home).images
    np.testing.assert_array_equal(part, whole[2:5])
    assert len(load_images("tfds:colour", split="validation", data_dir=home).labels) == 2


def test_split_that_the_set_does_not_have(home):
    there = "split: colour/1.0.0 has 'train', 'validation', got 'test'"
    with pytest.raises(ValueError, match=there):
        load_images("tfds:colour", split="test", data_dir=home)
    with pytest.raises(ValueError, match=r"split: gray/1.0.0 has 'train', 'test', got 'train\["):
        load_images("tfds:gray", split="train[", data_dir=home)
    with pytest.raises(ValueError, match=r"split: 'train\[:0\]' of gray/1.0.0 holds no example"):
        load_images("tfds:gray", split="train[:0]", data_dir=home)


def test_set_that_is_not_prepared(home, tmp_path, monkeypatch):
    with pytest.raises(ValueError) as caught:
        load_images("tfds:mnist", data_dir=home)
    text = str(caught.value)
    assert str(home / "mnist") in text and "tfds.builder('mnist', file_format='array_rec" in text
    with pytest.raises(ValueError, match=r"looked in .*gray/9\.9\.9"):
        load_images("tfds:gray:9.9.9", data_dir=home)
    with pytest.raises(ValueError, match=r"looked in .*nowhere"):
        load_images(f"tfds:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="after 'tfds:'"):
        load_images("tfds:", data_dir=home)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=rf"looked in {tmp_path}/tensorflow_datasets/gray"):
        load_images("tfds:gray")


def test_shards_are_read_in_order(tmp_path):
    folder = build(tmp_path, "sharded", {"train": 10}, shape=(4, 5, 1), shards=3)
    assert len(list(folder.glob("*array_record-*-of-00003"))) == 3
    want = expected("train", 10, (4, 5, 1))
    np.testing.assert_array_equal(to_bytes(load_images(folder).images), want)


def test_configurations(tmp_path):
    for config in ("plain", "noisy"):
        build(tmp_path, "many", {"train": 1}, shape=(4, 4, 1), config=config)
    with pytest.raises(ValueError, match=r"several configurations \('noisy', 'plain'\)"):
        load_images("tfds:many", data_dir=tmp_path)
    for name in ("tfds:many/plain", "tfds:many/plain:1.0.0"):
        assert load_images(name, data_dir=tmp_path).images.shape == (1, 4, 4, 1)


@pytest.fixture
def copy(home, tmp_path):
    """A copy of the gray set that a test may damage."""
    return shutil.copytree(home / "gray" / "1.0.0", tmp_path / "gray" / "1.0.0")


def edit_info(folder, **changes):
    path = folder / "dataset_info.json"
    info = json.loads(path.read_text())
    info.update(changes)
    path.write_text(json.dumps({key: value for key, value in info.items() if value is not None}))


@pytest.mark.parametrize("kind", ["tfrecord", "parquet", "riegeli", None])
def test_other_file_formats_name_the_conversion(copy, kind):
    edit_info(copy, fileFormat=kind)
    with pytest.raises(ValueError, match=f"is stored as {kind or 'tfrecord'}") as caught:
        load_images(copy)
    text = str(caught.value)
    assert f"tfds convert_format --dataset_version_dir={copy} --out_file_format=array_rec" in text
    assert "tfds.builder('gray', file_format='array_record')" in text


def test_set_converted_in_place_is_read(copy):
    edit_info(copy, fileFormat="tfrecord", alternativeFileFormats=["array_record"])
    want = expected("train", 7, (4, 5, 1))
    np.testing.assert_array_equal(to_bytes(load_images(copy).images), want)


def test_damaged_files_are_named(copy):
    shard = next(copy.glob("gray-train*"))
    whole = shard.read_bytes()
    middle = whole.index(b"IDAT")
    flipped = whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :]
    for data in (whole[:200], flipped, b""):
        shard.write_bytes(data)
        with pytest.raises(ValueError, match=rf"gray/1.0.0 in {copy}: .* are damaged"):
            load_images(copy)
    shard.unlink()
    with pytest.raises(ValueError, match=r"damaged .*No such file"):
        load_images(copy)
    (copy / "features.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a readable prepared set"):
        load_images(copy)
    (copy / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="is not a readable prepared set"):
        load_images(copy)


def test_broken_picture_and_hidden_label_in_a_sound_file(tmp_path):
    def edit(split, index, example):
        if split == "broken" and index == 1:
            example["image"] = example["image"][:40]
        return {**example, "label": -1} if split == "hidden" else example

    splits = {"train": 1, "broken": 2, "hidden": 1}
    build(tmp_path, "odd", splits, shape=(4, 4, 1), edit=edit)
    with pytest.raises(ValueError, match=r"image 1 of 'broken': not a readable picture"):
        load_images("tfds:odd", split="broken", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"'hidden' of odd/1.0.0 has labels from -1 to -1"):
        load_images("tfds:odd", split="hidden", data_dir=tmp_path)


def test_stored_picture_takes_the_declared_channels(tmp_path):
    def edit(split, index, example):
        example["image"] = encode(pixels_of("gray", index, (4, 4)), ["PNG", "BMP"][index])
        return example

    # Labels without a declared number of classes: as many as the largest needs.
    label = tfds.features.Scalar(np.int64)
    build(tmp_path, "mixed", {"train": 2}, shape=(None, None, 3), label=label, edit=edit)
    data = load_images("tfds:mixed", data_dir=tmp_path)
    want = np.repeat(expected("gray", 2, (4, 4))[..., None], 3, -1)
    np.testing.assert_array_equal(to_bytes(data.images), want)
    assert data.num_classes == 2 and data.labels.tolist() == [0, 1]


def test_features_that_do_not_fit(copy):
    path = copy / "features.json"
    original = json.loads(path.read_text())

    def write(change):
        spec = json.loads(json.dumps(original))
        change(spec["featuresDict"]["features"])
        path.write_text(json.dumps(spec))

    write(lambda features: features.pop("image"))
    with pytest.raises(ValueError, match=r"expected a feature 'image', got \['label', 'name'\]"):
        load_images(copy)
    write(lambda features: features.update(image=features["name"]))
    with pytest.raises(ValueError, match="expected 'image' to be a uint8"):
        load_images(copy)
    write(lambda features: features["image"]["image"].update(dtype="uint16"))
    with pytest.raises(ValueError, match="expected 'image' to be a uint8"):
        load_images(copy)
    write(lambda features: features["image"]["image"]["shape"].update(dimensions=["4", "5", "4"]))
    with pytest.raises(ValueError, match="with 1 or 3 channels"):
        load_images(copy)
    write(lambda features: features.update(label=features["name"]))
    with pytest.raises(ValueError, match="expected 'label' to be one integer"):
        load_images(copy)


@pytest.mark.parametrize("package", ["tensorflow_datasets", "array_record", "PIL"])
def test_missing_packages_name_the_extra(home, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'fadex-jax\[data\]'"):
        load_images("tfds:gray", data_dir=home)
