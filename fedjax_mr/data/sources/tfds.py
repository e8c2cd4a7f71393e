"""Image sets of TensorFlow Datasets: read from an array_record folder without TensorFlow, prepared with it.

Normalisation, as pixels in 0..1: CIFAR-10, CIFAR-100 (with CIFAR-10's statistics), MNIST and Fashion-MNIST (none) are
those of the released FedMR code (Hu et al., KDD 2024); SVHN and EMNIST, which it does not have, are our choice:
CIFAR-10's and MNIST's. Deviation: EMNIST's images, stored mirrored and lying, are turned upright.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fedjax_mr.data import files
from fedjax_mr.data.cache import cached
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.errors import UserError


class ImageSet(NamedTuple):
    """A data set of TensorFlow Datasets: its version (any with the same first number is read) and pixel statistics."""

    version: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: str = ""  # the default among several configurations


IMAGE_SETS = {
    "cifar10": ImageSet("3.0.2", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar100": ImageSet("3.0.2", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "mnist": ImageSet("3.0.1", (0.1307,), (0.3081,)),
    "fashion_mnist": ImageSet("3.0.1", (0.0,), (1.0,)),
    "svhn_cropped": ImageSet("3.1.0", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "emnist": ImageSet("3.1.0", (0.1307,), (0.3081,), config="byclass"),
}
LABELS = {"fine": "label", "coarse": "coarse_label"}  # the features of a sample, by label mode
CHUNK = 5000  # records in memory at once while decoding
CONNECTION_TIMEOUT = 10  # seconds
TRIES_TO_REMOVE = 20


def load(request: DataRequest) -> Dataset:
    """Return an image set; ``emnist/letters`` names one of several configurations.

    Where the folder is missing, TensorFlow is installed and the network is allowed, it is prepared first.

    Raises:
      UserError: the folder is missing, incomplete, of another version, or of a format that needs TensorFlow.
    """
    name, known = _full_name(request.name)
    root = _root(request.data_dir)
    folder = _version_folder(root / name, name, known)
    if folder is None:
        if elsewhere := _near(root, name, known):
            raise UserError(
                f"{name} is not in {root} but in {elsewhere}: give --data_dir={shlex.quote(str(elsewhere))}"
            )
        if request.offline or not _has_tensorflow():
            raise UserError(f"{name} is not in {root}; get it with: {_prepare_command(name, root)}")
        folder = prepare(request)
    sources = [path for path in folder.iterdir() if path.is_file()]
    values = cached(f"{name}-{folder.name}", sources, lambda: _decode(folder, name))
    label = LABELS[request.label_mode]
    return Dataset(
        name, values["x"], values[f"{label}_train"], values["test_x"], values[f"{label}_test"],
        num_classes=values[f"{label}_classes"], mean=known.mean, std=known.std,
    )  # fmt: skip


def prepare(request: DataRequest) -> Path:
    """Download a data set with its own builder, write it as array_record, and return its folder.

    Everything happens in a temporary folder, whose result is renamed when it is whole and which is removed in any case.

    Raises:
      UserError: TensorFlow is missing, the network is not allowed or not there, or the builder fails.
    """
    name, known = _full_name(request.name)
    root = _root(request.data_dir)
    folder = _version_folder(root / name, name, known)
    if folder is not None:
        return folder
    if not _has_tensorflow():
        raise UserError(f"preparing {name} needs TensorFlow: {_prepare_command(name, root)}")
    if request.offline:
        raise UserError(f"preparing {name} needs the network: leave out --offline")

    def build(temporary: Path) -> Path:
        import tensorflow_datasets

        builder = tensorflow_datasets.builder(name, data_dir=temporary, file_format="array_record", try_gcs=False)
        _check_connection(builder.url_infos or ())
        builder.download_and_prepare()
        return Path(builder.data_dir)

    logging.info("preparing %s in %s", name, root)
    return appear_whole(root, build, name=name)


def _check_connection(urls: Iterable[str]) -> None:
    """Ask each host once, because TensorFlow Datasets would ask ten times, for minutes.

    Raises:
      UserError: one of them cannot be reached.
    """
    import requests  # a quarter of a second to import, and it comes with TensorFlow Datasets

    for host, url in {urllib.parse.urlsplit(url).netloc: url for url in urls}.items():
        try:
            requests.head(url, timeout=CONNECTION_TIMEOUT)  # whatever it answers, it is there
        except requests.RequestException as error:
            reason = "no answer" if isinstance(error, requests.Timeout) else "no connection"
            raise UserError(
                f"{reason} from {host}, where the samples are: is there internet here? A folder that was prepared "
                "elsewhere can be copied"
            ) from error


def appear_whole(root: Path, build: Callable[[Path], Path], *, name: str) -> Path:
    """Let ``build`` fill a temporary folder and move what it returns to the same place under ``root``.

    Raises:
      UserError: ``build`` failed or ``root`` cannot be written.
    """
    temporary, made_for_it = None, []
    try:
        made_for_it = files.make_folder(root)
        temporary = Path(tempfile.mkdtemp(prefix=".preparing-", dir=root))
        made = build(temporary)
        target = root / made.relative_to(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(made, target)
        return target
    except UserError as error:
        raise UserError(f"could not prepare {name} in {root}: {error}") from error
    except Exception as error:  # a builder raises whatever its downloads and parsers raise
        raise UserError(f"could not prepare {name} in {root}: {_brief(error)}") from error
    finally:
        if temporary is not None:
            _remove(temporary)
        for folder in made_for_it:
            with contextlib.suppress(OSError):  # it holds the result, or what others have put there
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a folder, into which the threads of an interrupted download may still write for a moment."""
    for _ in range(TRIES_TO_REMOVE):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _full_name(name: str) -> tuple[str, ImageSet]:
    base, _, config = name.partition("/")
    known = IMAGE_SETS[base]
    config = config or known.config
    return f"{base}/{config}" if config else base, known


def _root(data_dir: str | None) -> Path:
    return files.expanded(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def _near(root: Path, name: str, known: ImageSet) -> Path | None:
    """Return the folder that was meant if ``root`` is one or two levels too deep or one too high, or None."""
    depth = name.count("/") + 2  # of a version, such as emnist/letters/3.1.0, below the folder that is meant
    place = root.absolute()
    places = [*place.parents[:depth], *(found.parents[depth - 2] for found in sorted(place.glob(f"*/{name}")))]
    return next((each for each in places if _fitting(_versions(each / name), known)), None)


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


def _prepare_command(name: str, root: Path) -> str:
    arguments = shlex.join([name, f"--data_dir={root}"])
    return f"pip install 'fedjax-mr[prepare]' && python -m fedjax_mr.data prepare {arguments}"


def _version_folder(folder: Path, name: str, known: ImageSet) -> Path | None:
    """Return the newest version that has the known first number (the same samples, says TensorFlow Datasets)."""
    versions = _versions(folder)
    fitting = _fitting(versions, known)
    if versions and not fitting:
        found = ", ".join(sorted(path.name for path in versions))
        raise UserError(
            f"{folder} holds version {found} of {name}, but {known.version} is needed; get it with: "
            f"{_prepare_command(name, folder.parents[name.count('/')])}"
        )
    return max(fitting, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def _versions(folder: Path) -> list[Path]:
    pattern = re.compile(r"\d+\.\d+\.\d+")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []


def _fitting(versions: list[Path], known: ImageSet) -> list[Path]:
    return [path for path in versions if path.name.split(".")[0] == known.version.split(".")[0]]


def _decode(folder: Path, name: str) -> dict[str, Any]:
    """Return the images and, of each kind of labels that there is, those of both parts and the number of classes."""
    import tensorflow_datasets

    try:
        builder: Any = tensorflow_datasets.builder_from_directory(folder)
        read = _read_tfrecord if builder.info.file_format.value == "tfrecord" else _read_array_record
        if read is _read_tfrecord and not _has_tensorflow():
            raise UserError(
                f"{folder} is a TFRECORD folder, which only TensorFlow reads (pip install 'fedjax-mr[prepare]'); "
                f"or move it away and run: {_prepare_command(name, folder.parents[name.count('/') + 1])}"
            )
        labels = [label for label in LABELS.values() if label == "label" or label in builder.info.features]
        (x, y), (test_x, test_y) = (read(builder, split, labels) for split in ("train", "test"))
        facts = {f"{label}_classes": builder.info.features[label].num_classes for label in labels}
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the parsers of JSON, protobuf, array_record and PNG raise
        raise UserError(
            f"{folder} is incomplete or damaged ({_brief(error)}); delete it and prepare it anew"
        ) from error
    if name.startswith("emnist"):
        x, test_x = x.swapaxes(1, 2), test_x.swapaxes(1, 2)
    parts = {f"{label}_{part}": of[label] for part, of in (("train", y), ("test", test_y)) for label in labels}
    return {"x": x, "test_x": test_x} | parts | facts


def _read_array_record(builder: Any, split: str, labels: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return uint8 images and int32 labels by kind, in the original order where samples carry their number."""
    import tensorflow_datasets
    from PIL import Image

    source = builder.as_data_source(split, decoders={"image": tensorflow_datasets.decode.SkipDecoding()})
    x = np.zeros((len(source), *builder.info.features["image"].shape), np.uint8)
    y = {label: np.zeros(len(source), np.int32) for label in labels}
    ids = []
    for row, record in enumerate(_records(source)):
        x[row] = np.asarray(Image.open(io.BytesIO(record["image"]))).reshape(x.shape[1:])
        for label in labels:
            y[label][row] = record[label]
        ids.append(record.get("id", row))
    order = np.argsort(np.array(ids), kind="stable")
    return x[order], {label: values[order] for label, values in y.items()}


def _records(source: Any) -> Iterator[dict[str, Any]]:
    for start in range(0, len(source), CHUNK):
        yield from source.__getitems__(range(start, min(start + CHUNK, len(source))))


def _read_tfrecord(builder: Any, split: str, labels: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return what `_read_array_record` does; needs TensorFlow."""
    import tensorflow_datasets

    whole = tensorflow_datasets.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    order = np.argsort(whole["id"], kind="stable") if "id" in whole else np.arange(len(whole["label"]))
    return whole["image"][order], {label: whole[label][order].astype(np.int32) for label in labels}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
