"""CIFAR-10 and CIFAR-100 from the archives of their authors, without TensorFlow.

TensorFlow Datasets prepares its folders from the same two archives (the binary versions), and the SHA-256 below are
those of its checksums. So both have the same samples in the same order. A row of a file has one byte for each kind of
label, and 3 x 32 x 32 bytes of an image. Nothing is unpickled.
"""

import hashlib
import shutil
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fedjax_mr.errors import UserError

TIMEOUT = 30  # seconds without an answer


class Archive(NamedTuple):
    """An archive: its address and hash, its files in order, and the classes of each label byte of a row."""

    url: str
    sha256: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: dict[str, int]


ARCHIVES = {
    "cifar10": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
        ("cifar-10-batches-bin/test_batch.bin",),
        {"label": 10},
    ),
    "cifar100": Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ("cifar-100-binary/train.bin",),
        ("cifar-100-binary/test.bin",),
        {"coarse_label": 20, "label": 100},
    ),
}


def archive_in(root: Path, name: str) -> Path | None:
    """The archive of a dataset in a folder, or None."""
    path = root / ARCHIVES[name].url.rpartition("/")[2] if name in ARCHIVES else None
    return path if path is not None and path.is_file() else None


def download(name: str, folder: Path) -> Path:
    """Download the archive of a dataset into a folder.

    Raises:
      UserError: the download is not the known archive.
      OSError: it failed.
    """
    archive = ARCHIVES[name]
    path = folder / archive.url.rpartition("/")[2]
    logging.info("downloading %s", archive.url)
    with urllib.request.urlopen(archive.url, timeout=TIMEOUT) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
    _verify(path, archive)
    return path


def decode(path: Path, name: str) -> dict[str, Any]:
    """Images and labels of both parts, and the numbers of classes, for all kinds of labels in the dataset.

    Raises:
      UserError: the file is not the known archive.
    """
    archive = ARCHIVES[name]
    _verify(path, archive)
    found = {}
    with tarfile.open(path) as members:
        for member in members:
            if member.name in (*archive.train, *archive.test) and (file := members.extractfile(member)) is not None:
                found[member.name] = np.frombuffer(file.read(), np.uint8)
    result: dict[str, Any] = {f"{label}_classes": count for label, count in archive.classes.items()}
    for part, names, x in (("train", archive.train, "x"), ("test", archive.test, "test_x")):
        rows = np.concatenate([found[each] for each in names]).reshape(-1, len(archive.classes) + 3 * 32 * 32)
        labels, pixels = np.split(rows, [len(archive.classes)], axis=1)
        result[x] = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        result |= {f"{label}_{part}": labels[:, row].astype(np.int32) for row, label in enumerate(archive.classes)}
    return result


def _verify(path: Path, archive: Archive) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != archive.sha256:
        raise UserError(f"{path} is damaged or not the archive of {archive.url}: delete it and prepare it again")
