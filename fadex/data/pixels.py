"""From encoded pictures to one float array: decoding, scaling, resizing, stacking."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from fadex.core.checks import check_int

# What Pillow raises on damaged files.
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
_GRAY_MODES = ("1", "L", "LA")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_MODES = ("P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def import_pillow():
    """Pillow's ``Image`` module, or an ImportError that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "reading pictures needs Pillow: pip install 'fadex-jax[data]'"
        ) from error
    return Image


def check_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """``size`` as ``(height, width)``; an integer means a square, None no resizing."""
    if size is None:
        return None
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise ValueError(f"size: expected an integer or (height, width), got {size!r}")
        return (
            check_int("size[0]", size[0], minimum=1),
            check_int("size[1]", size[1], minimum=1),
        )
    return (check_int("size", size, minimum=1),) * 2


def decode_picture(
    data: bytes,
    label: str,
    *,
    channels: int | None = None,
    formats: tuple[str, ...] | None = None,
) -> np.ndarray:
    """Decode one picture to uint8 ``[H, W, 1]`` or ``[H, W, 3]``.

    Args:
      data: the file's bytes.
      label: what to call the picture in an error.
      channels: 1 or 3 to convert; None keeps gray as 1 and colour as 3.
      formats: the formats Pillow may try; None for all it knows.

    Raises:
      ValueError: damaged data, more than 8 bits for a channel, or transparent pixels, whose
        colour would depend on a background that we do not know.
    """
    pillow = import_pillow()
    try:
        # verify() compares the checksums, which decoding alone does not; it uses the image up.
        pillow.open(io.BytesIO(data), formats=formats).verify()
        with pillow.open(io.BytesIO(data), formats=formats) as picture:
            picture.load()
    except _BROKEN as error:
        kind = " or ".join(formats) if formats else "picture"
        raise ValueError(f"{label}: not a readable {kind} ({error})") from error
    # Pillow reads 16-bit colour as 8 bits without a word, so the PNG header is asked: the depth
    # stands behind the signature (8 bytes), the chunk's length and name, the width and height.
    deep = data.startswith(_PNG_SIGNATURE) and data[24] > 8
    if deep or picture.mode not in _GRAY_MODES + _COLOUR_MODES:
        kind = f"{data[24]} bits" if deep else f"Pillow's mode {picture.mode!r}"
        raise ValueError(f"{label}: expected gray or colour of 8 bits for each channel, got {kind}")
    if picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
        with_alpha = picture.convert("RGBA")
        if with_alpha.getchannel("A").getextrema()[0] < 255:
            raise ValueError(f"{label}: has transparent pixels; put it on a background first")
        picture = with_alpha.convert("L" if picture.mode in _GRAY_MODES else "RGB")
    if channels is None:
        channels = 1 if picture.mode in _GRAY_MODES else 3
    pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


@functools.lru_cache(maxsize=256)
def _triangle_weights(length: int, wanted: int) -> np.ndarray:
    """Weights ``[wanted, length]`` of linear interpolation, widened when shrinking."""
    scale = length / wanted
    centers = (np.arange(wanted) + 0.5) * scale
    distance = np.abs(np.arange(length) + 0.5 - centers[:, None])
    weights = np.maximum(0.0, 1.0 - distance / max(scale, 1.0))
    weights /= weights.sum(axis=1, keepdims=True)
    weights = weights.astype(np.float32)
    weights.setflags(write=False)  # the cache hands out one array many times
    return weights


def resize_picture(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize float32 ``[H, W, C]`` to ``size``: separable triangle filter with antialiasing.

    The same filter as Pillow's ``BILINEAR`` and as ``jax.image.resize(..., 'linear')``. The
    weights are positive and sum to 1, so the range of the values is kept; they are clipped to
    [-1, 1] against rounding.
    """
    if picture.shape[:2] == size:
        return picture
    rows = _triangle_weights(picture.shape[0], size[0])
    columns = _triangle_weights(picture.shape[1], size[1])
    out = np.einsum("hy,yxc,wx->hwc", rows, picture, columns, optimize=True)
    return np.clip(out, -1.0, 1.0).astype(np.float32)


def scale_bytes(pixels: np.ndarray) -> np.ndarray:
    """uint8 ``x`` to float32 ``x / 127.5 - 1``: 0 to -1 and 255 to 1, both exactly."""
    out = pixels.astype(np.float32)
    out /= np.float32(127.5)
    out -= np.float32(1)
    return out


def stack_pictures(
    pictures: Sequence[np.ndarray], names: Sequence[str], size: tuple[int, int] | None
) -> np.ndarray:
    """Scale uint8 pictures and stack them to float32 ``[M, H, W, C]``.

    ``C`` is 1 when every picture is gray, else 3, with gray repeated over the channels.

    Raises:
      ValueError: pictures of different sizes and no ``size``; it names the first that differs.
    """
    shape = size or pictures[0].shape[:2]
    channels = max(picture.shape[-1] for picture in pictures)
    out = np.empty((len(pictures), *shape, channels), np.float32)
    for row, picture, name in zip(out, pictures, names):
        if size is None and picture.shape[:2] != shape:
            raise ValueError(
                f"{name}: is {picture.shape[0]} x {picture.shape[1]} (height x width), but "
                f"{names[0]} is {shape[0]} x {shape[1]}; give size= to resize all of them"
            )
        scaled = scale_bytes(picture)
        row[...] = resize_picture(scaled, size) if size else scaled
    return out
