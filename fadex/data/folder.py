"""Image sets that are a folder of PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fadex.data.pixels import decode_picture, stack_pictures

# Subfolders with only these names are the splits of a set, not its classes.
_SPLIT_NAMES = {"train", "test", "val", "valid", "validation"}


def png_files(folder: Path) -> list[Path]:
    """The PNG files directly in ``folder``, sorted by name; hidden files are left out."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() == ".png" and not path.name.startswith(".") and path.is_file()
    )


def class_folders(folder: Path) -> list[Path]:
    """The subfolders of ``folder``, sorted by name; hidden ones are left out."""
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def load_folder(
    folder: Path, size: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Read a folder of PNGs: flat, or one subfolder for each class.

    Returns:
      images float32 ``[M, H, W, C]``, labels int32 ``[M]`` and the number of classes. Classes
      are numbered in the order of the subfolders' names, files come class by class in the order
      of their names. A flat folder is one class, labelled 0.

    Raises:
      ValueError: no PNGs, a class without any, PNGs both beside and inside subfolders, splits
        in place of classes, a damaged file, or different sizes and no ``size``.
    """
    if not folder.is_dir():
        raise ValueError(f"name: there is no folder {str(folder)!r}")
    flat, classes = png_files(folder), class_folders(folder)
    found = {path: png_files(path) for path in classes}
    if flat and any(found.values()):
        inside = next(path for path, files in found.items() if files)
        raise ValueError(
            f"name: {folder} holds PNG files and so does its subfolder {inside.name!r}; expected "
            "either a flat folder or one subfolder for each class"
        )
    if not flat and not any(found.values()):
        raise ValueError(
            f"name: found no PNG file in {folder} or in its {len(classes)} subfolders"
        )
    if flat:
        groups = [flat]
    else:
        names = {path.name.lower() for path in classes}
        if "train" in names and names <= _SPLIT_NAMES:
            raise ValueError(
                f"name: the subfolders of {folder} look like splits ({sorted(names)}), not "
                f"classes; load one of them, for example 'folder:{folder / 'train'}'"
            )
        for path, files in found.items():
            if not files:
                raise ValueError(f"name: found no PNG file in the class folder {path}")
        groups = list(found.values())

    files = [path for group in groups for path in group]
    pictures = [
        decode_picture(path.read_bytes(), str(path), formats=("PNG",)) for path in files
    ]
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    images = stack_pictures(pictures, [str(path) for path in files], size)
    return images, labels.astype(np.int32), len(groups)
