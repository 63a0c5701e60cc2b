"""Image sets by name: digits and folders of PNGs, and what importing and missing packages do."""

import io
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from fadex.data import ImageSet, load_images
from fadex.data.pixels import resize_picture, scale_bytes


def png(pixels, **options):
    """A picture's PNG bytes."""
    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(out, "PNG", **options)
    return out.getvalue()


def picture(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def to_bytes(images):
    """The bytes that the floats stand for; exact when scaling was right."""
    return np.round((images.astype(np.float64) + 1) * 127.5).astype(np.uint8)


def assert_well_formed(data: ImageSet):
    assert data.images.dtype == np.float32 and data.images.ndim == 4
    assert data.labels.dtype == np.int32 and data.labels.shape == data.images.shape[:1]
    assert -1 <= data.images.min() and data.images.max() <= 1
    assert 0 <= data.labels.min() and data.labels.max() < data.num_classes


def test_scaling_is_exact_at_the_ends_and_recovers_every_byte():
    every = np.arange(256, dtype=np.uint8)
    scaled = scale_bytes(every)
    assert scaled.dtype == np.float32 and scaled[0] == -1 and scaled[255] == 1
    np.testing.assert_array_equal(to_bytes(scaled), every)
    np.testing.assert_allclose(scaled, np.arange(256) / 127.5 - 1, atol=1e-7)


# --- digits


@pytest.mark.smoke
def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    source, data = load_digits(), load_images("digits", split="all")
    assert_well_formed(data)
    assert data.images.shape == (1797, 8, 8, 1) and data.num_classes == 10
    assert data.name == "digits"
    np.testing.assert_array_equal((data.images[..., 0] + 1) * 8, source.images)
    np.testing.assert_array_equal(data.labels, source.target)


def test_digits_split_is_a_balanced_partition_in_the_sets_own_order():
    whole = load_images(split="all")
    train, test = load_images(), load_images("digits", split="test")
    assert len(train.labels) == 1442 and len(test.labels) == 355
    counts = np.bincount(test.labels)
    assert counts.min() >= 34 and counts.max() <= 36
    # Merging the two by the documented rule gives the whole set back, in order.
    seen, cursor = np.zeros(10, int), {"train": 0, "test": 0}
    for image, label in zip(whole.images, whole.labels):
        part = "test" if seen[label] % 5 == 4 else "train"
        source = test if part == "test" else train
        np.testing.assert_array_equal(source.images[cursor[part]], image)
        assert source.labels[cursor[part]] == label
        seen[label] += 1
        cursor[part] += 1
    assert cursor == {"train": 1442, "test": 355}


def test_digits_resize():
    data = load_images("digits", split="test", size=(12, 16))
    assert_well_formed(data)
    want = jax.image.resize(load_images(split="test").images, (355, 12, 16, 1), "linear")
    np.testing.assert_allclose(data.images, want, atol=1e-5)


# --- folders


def test_flat_folder_in_order_of_names(tmp_path):
    pictures = {name: picture(i, 5, 4) for i, name in enumerate(["b.png", "a.PNG", "c.png"])}
    for name, pixels in pictures.items():
        (tmp_path / name).write_bytes(png(pixels))
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden.png").write_bytes(b"not a picture either")
    (tmp_path / "empty").mkdir()
    for name in (f"folder:{tmp_path}", str(tmp_path), tmp_path):
        data = load_images(name)
        assert_well_formed(data)
        assert data.images.shape == (3, 5, 4, 1) and data.num_classes == 1
        assert data.name == f"folder:{tmp_path}"
        want = [pictures[key] for key in ("a.PNG", "b.png", "c.png")]
        np.testing.assert_array_equal(to_bytes(data.images)[..., 0], want)
        np.testing.assert_array_equal(data.labels, 0)
    np.testing.assert_array_equal(load_images(data.name, split="all").images, data.images)


@pytest.mark.smoke
def test_class_folders_are_numbered_by_name(tmp_path):
    want = []
    for label, name in enumerate(["ant", "bee", "cat"]):
        (tmp_path / name).mkdir()
        for index in range(label + 1):
            want.append((picture(10 * label + index, 3, 6, 3), label))
            (tmp_path / name / f"{index}.png").write_bytes(png(want[-1][0]))
    (tmp_path / ".cache").mkdir()
    data = load_images(f"folder:{tmp_path}")
    assert_well_formed(data)
    assert data.images.shape == (6, 3, 6, 3) and data.num_classes == 3
    np.testing.assert_array_equal(to_bytes(data.images), [pixels for pixels, _ in want])
    np.testing.assert_array_equal(data.labels, [label for _, label in want])


def test_gray_next_to_colour_becomes_colour(tmp_path):
    gray, colour = picture(0, 4, 4), picture(1, 4, 4, 3)
    (tmp_path / "a.png").write_bytes(png(gray))
    (tmp_path / "b.png").write_bytes(png(colour))
    images = to_bytes(load_images(tmp_path).images)
    np.testing.assert_array_equal(images[0], np.repeat(gray[..., None], 3, -1))
    np.testing.assert_array_equal(images[1], colour)


def test_other_png_kinds_read_as_gray_or_colour(tmp_path):
    rgb = picture(0, 4, 4, 3)
    opaque = np.concatenate([rgb, np.full((4, 4, 1), 255, np.uint8)], -1)
    (tmp_path / "a.png").write_bytes(png(opaque))
    palette = Image.fromarray(rgb).quantize(16)
    palette.save(tmp_path / "b.png")
    palette.save(tmp_path / "c.png", transparency=b"\xff" * 16)
    bits = picture(1, 4, 4) > 127
    (tmp_path / "d.png").write_bytes(png(bits))
    images = to_bytes(load_images(tmp_path).images)
    np.testing.assert_array_equal(images[0], rgb)
    np.testing.assert_array_equal(images[1], np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(images[2], images[1])
    np.testing.assert_array_equal(images[3], np.repeat(255 * bits[..., None], 3, -1))


def test_resize_agrees_with_pillow_and_jax(tmp_path):
    for index, shape in enumerate([(6, 9), (16, 16), (31, 7)]):
        pixels = picture(index, *shape)
        (tmp_path / f"{index}.png").write_bytes(png(pixels))
        start = scale_bytes(pixels)
        got = resize_picture(start[..., None], (10, 8))
        pillow = Image.fromarray(start).resize((8, 10), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(got[..., 0], np.asarray(pillow), atol=1e-6)
        theirs = jax.image.resize(start, (10, 8), "linear")
        np.testing.assert_allclose(got[..., 0], theirs, atol=1e-5)
        np.testing.assert_array_equal(load_images(tmp_path, size=(10, 8)).images[index], got)
    data = load_images(tmp_path, size=16)
    assert_well_formed(data)
    assert data.images.shape == (3, 16, 16, 1)
    np.testing.assert_array_equal(data.images[1, ..., 0], scale_bytes(picture(1, 16, 16)))


def test_different_sizes_need_size(tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture(0, 4, 4)))
    (tmp_path / "b.png").write_bytes(png(picture(0, 4, 5)))
    with pytest.raises(ValueError, match=r"b\.png: is 4 x 5 .*a\.png is 4 x 4; give size="):
        load_images(tmp_path)


def test_broken_png_is_named(tmp_path):
    whole = png(picture(0, 8, 8))
    middle = whole.index(b"IDAT") + 20
    flipped = whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :]
    (tmp_path / "a.png").write_bytes(whole)
    other = io.BytesIO()
    Image.fromarray(picture(0, 8, 8)).save(other, "JPEG")
    for data in (whole[: len(whole) // 2], flipped, b"", b"text", other.getvalue()):
        (tmp_path / "bad.png").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad\.png: not a readable PNG"):
            load_images(tmp_path)


def test_pixels_that_eight_bits_cannot_hold_are_refused(tmp_path):
    path = tmp_path / "bad.png"
    clear = picture(0, 4, 4, 4)
    clear[0, 0, 3] = 254
    path.write_bytes(png(clear))
    with pytest.raises(ValueError, match=r"bad\.png: has transparent pixels"):
        load_images(tmp_path)
    path.write_bytes(png(picture(0, 4, 4), transparency=int(picture(0, 4, 4)[0, 0])))
    with pytest.raises(ValueError, match=r"bad\.png: has transparent pixels"):
        load_images(tmp_path)
    path.write_bytes(png(np.full((4, 4), 40000, np.uint16)))
    with pytest.raises(ValueError, match=r"bad\.png: expected gray or colour of 8 bits"):
        load_images(tmp_path)


def test_sixteen_bit_colour_is_refused(tmp_path):
    # Pillow cannot write one, so the file is put together here.
    import struct
    import zlib

    def chunk(kind, body):
        tail = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + tail

    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(range(12))) * 2)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows)
    (tmp_path / "deep.png").write_bytes(data + chunk(b"IEND", b""))
    with pytest.raises(ValueError, match=r"deep\.png: expected .* 8 bits .*, got 16 bits"):
        load_images(tmp_path)


def test_folders_without_a_clear_reading_are_refused(tmp_path):
    with pytest.raises(ValueError, match="found no PNG file"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        load_images(f"folder:{tmp_path / 'nowhere'}")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with pytest.raises(ValueError, match=r"found no PNG file in .* its 2 subfolders"):
        load_images(f"folder:{tmp_path}")
    (tmp_path / "one" / "a.png").write_bytes(png(picture(0, 4, 4)))
    with pytest.raises(ValueError, match=r"found no PNG file in the class folder .*two"):
        load_images(tmp_path)
    (tmp_path / "a.png").write_bytes(png(picture(0, 4, 4)))
    with pytest.raises(ValueError, match="so does its subfolder 'one'"):
        load_images(tmp_path)


def test_splits_are_not_taken_for_classes(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(png(picture(0, 4, 4)))
    with pytest.raises(ValueError, match=r"look like splits .*load one of them"):
        load_images(tmp_path)
    assert len(load_images(tmp_path / "train").labels) == 1
    with pytest.raises(ValueError, match="a folder has no test split"):
        load_images(tmp_path / "train", split="test")


# --- arguments and packages


@pytest.mark.parametrize("name", ["mnist", "", "digit", "http://host/x.png", "/no/such/folder"])
def test_unknown_name_tells_the_forms(name):
    with pytest.raises(ValueError, match=r"name: expected 'digits', 'tfds:NAME'.*'folder:PATH'"):
        load_images(name)


def test_bad_arguments(tmp_path):
    (tmp_path / "a.png").write_bytes(png(picture(0, 4, 4)))
    with pytest.raises(TypeError, match="name: expected"):
        load_images(3)
    with pytest.raises(TypeError, match="split: expected a string"):
        load_images(split=None)
    for name in ("digits", tmp_path):
        with pytest.raises(ValueError, match="split: expected one of 'train', 'test', 'all'"):
            load_images(name, split="validation")
    with pytest.raises(ValueError, match="name: expected a path after 'folder:'"):
        load_images("folder:")
    for size in (0, 2.0, (1, 2, 3), "8", (4, -1)):
        with pytest.raises((TypeError, ValueError), match=r"^size"):
            load_images(size=size)


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(png(picture(0, 4, 4)))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'fadex-jax\[demo\]'"):
        load_images("digits")
    with pytest.raises(ImportError, match=r"pip install 'fadex-jax\[data\]'"):
        load_images(tmp_path)


def test_importing_the_package_loads_no_optional_package():
    code = (
        "import sys, fadex.data\n"
        "names = ('sklearn', 'tensorflow_datasets', 'PIL', 'tensorflow', 'array_record')\n"
        "print([name for name in names if name in sys.modules])\n"
        "print(fadex.data.__all__ == sorted(fadex.data.__all__))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["[]", "True"]
