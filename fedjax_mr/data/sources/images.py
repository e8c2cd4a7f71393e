"""Folders of image files: ``FOLDER/CLASS/*.png``, or ``FOLDER/CLIENT/CLASS/*.png``."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_mr import files
from fedjax_mr.data.federated import Dataset
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
OTHER = {"CLASS": "CLIENT/CLASS", "CLIENT/CLASS": "CLASS"}
GREY = frozenset({"1", "L", "LA"})  # Pillow's names of modes without colours
EIGHT_BITS = GREY | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}


def from_images(
    folder: str | os.PathLike[str],
    *,
    clients: bool = False,
    resize: tuple[int, int] | None = None,
    test: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Dataset:
    """Make a dataset of image files, bytes [M, H, W, 1] if all are grey, else [M, H, W, 3].

    The name of the file's folder is the class; classes are numbered by their sorted names (`Dataset.class_names`).
    Without ``test``, 20 % of the images of each client (or of each class, without clients) become the test set, with a
    constant seed.

    Args:
      folder: the folder of the classes, or with ``clients`` of the clients' folders of classes.
      clients: whether the first level of folders has the natural clients.
      resize: height and width of all images. Default: their own, which must then be the same.
      test: another folder of the same form with the test images.
      name: name of the dataset. Default: that of the folder.

    Raises:
      UserError: there is no such folder, it has no images or another form, a file is damaged or no image of 8 bits, or
        sizes differ.
    """
    parts = [_files(files.expand_home(os.fspath(each)), clients) for each in (folder, *([test] if test else []))]
    class_names = sorted({path.parent.name for part in parts for path in part})
    number = {each: code for code, each in enumerate(class_names)}
    images = {str(path): opened(path, str(path), resize) for part in parts for path in part}
    pixels = stacked(images, "pass resize=(height, width)")
    arguments: dict[str, Any] = {}
    for suffix, part, x in zip(("", "_test"), parts, np.split(pixels, [len(parts[0])]), strict=False):
        arguments |= {f"x{suffix}": x, f"y{suffix}": np.array([number[path.parent.name] for path in part])}
        if clients:
            arguments[f"client{suffix}"] = [path.parent.parent.name for path in part]
    name = name or files.expand_home(os.fspath(folder)).resolve().name
    dataset = from_arrays(name=name, num_classes=len(class_names), **arguments)
    return dataclasses.replace(dataset, class_names=tuple(class_names))


def _files(folder: Path, clients: bool) -> list[Path]:
    """The image files of a folder, sorted."""
    form = "CLIENT/CLASS" if clients else "CLASS"
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of images ({form}/*.png)")
    found = sorted(path for path in folder.glob("*/*/*" if clients else "*/*") if path.suffix.lower() in SUFFIXES)
    if not found:
        other = any(each.suffix.lower() in SUFFIXES for each in folder.glob("*/*" if clients else "*/*/*"))
        hint = f": use clients={not clients}, because its images are in {OTHER[form]}" if other else ""
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            hint = f": use {folder / 'train'}, and test={folder / 'test'}"
        raise UserError(f"{folder} has no images in {form}/*.png{hint}")
    if len({path.parent.name for path in found}) < 2:
        raise UserError(f"{folder} has images of one class only, {found[0].parent.name}: there is nothing to learn")
    return found


def opened(source: Any, name: str, resize: tuple[int, int] | None = None) -> Any:
    """An image of 8 bits, upright and in the wanted size.

    Args:
      source: its file, or an object with its bytes.
      name: where it comes from, for errors.
      resize: see `from_images`.

    Raises:
      UserError: it is damaged, or has other pixels.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(source) as file:
            image = ImageOps.exif_transpose(file)  # cameras store the direction of the picture beside it
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{name} is no readable image ({' '.join(str(error).split())[:120]})") from None
    if image.mode not in EIGHT_BITS:
        raise UserError(f"{name} has pixels of kind {image.mode}, not bytes: scale them to 0..255, or use from_arrays")
    if image.mode in ("P", "PA"):  # a palette cannot be resized
        image = image.convert("RGB")
    return image if resize is None else image.resize((resize[1], resize[0]), Image.Resampling.BILINEAR)


def stacked(images: dict[str, Any], remedy: str) -> np.ndarray:
    """Images by their names as bytes [M, H, W, 1] if all are grey, else [M, H, W, 3].

    Raises:
      UserError: their sizes differ; ends with ``remedy``.
    """
    (first, one), *_ = images.items()
    for name, image in images.items():
        if image.size != one.size:
            sizes = [f"{each.size[1]} x {each.size[0]}" for each in (one, image)]
            raise UserError(f"{first} has {sizes[0]} pixels, but {name} has {sizes[1]}: {remedy}")
    grey = all(image.mode in GREY for image in images.values())
    pixels = np.stack([np.asarray(image.convert("L" if grey else "RGB")) for image in images.values()])
    return pixels[..., None] if grey else pixels
