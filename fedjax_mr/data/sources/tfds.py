"""Image datasets of TensorFlow Datasets. Preparing one needs TensorFlow; reading an array_record folder does not.

CIFAR-10 and CIFAR-100 never need it: the archives of their authors are read as they are (`cifar`).

Normalisation, for pixels in 0..1: that of the released FedMR code (Hu et al., KDD 2024) for CIFAR-10, CIFAR-100 (with
the statistics of CIFAR-10), MNIST and Fashion-MNIST (none). That code has no SVHN and EMNIST, which are normalised like
CIFAR-10 and MNIST. Deviation: the images of EMNIST are stored transposed and are turned upright here.
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from tqdm import tqdm

from fedjax_mr import files, untrusted
from fedjax_mr.data.cache import cached
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import cifar
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field


@dataclasses.dataclass(frozen=True)
class LabelMode:
    """The settings of CIFAR-100."""

    label_mode: str = field(
        "fine", "Labels of CIFAR-100: 100 classes (fine) or 20 (coarse)", choices=("fine", "coarse"), group="Data",
        compiled="no", source="the dataset's own labels; the FedMR authors' code trains on the coarse ones",
        needs=("dataset", "cifar100"))  # fmt: skip


class ImageSet(NamedTuple):
    """A dataset of TensorFlow Datasets: its version (all with the same first number are read) and statistics."""

    version: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: str = ""  # the default configuration


IMAGE_SETS = {
    "cifar10": ImageSet("3.0.2", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "cifar100": ImageSet("3.0.2", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "mnist": ImageSet("3.0.1", (0.1307,), (0.3081,)),
    "fashion_mnist": ImageSet("3.0.1", (0.0,), (1.0,)),
    "svhn_cropped": ImageSet("3.1.0", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "emnist": ImageSet("3.1.0", (0.1307,), (0.3081,), config="byclass"),
}
LABELS = {"fine": "label", "coarse": "coarse_label"}  # the feature of a sample, by label mode
CHUNK = 5000  # records in memory at a time during decoding
CONNECTION_TIMEOUT = 10  # seconds
TRIES_TO_REMOVE = 20


def load(request: DataRequest) -> Dataset:
    """An image dataset of TensorFlow Datasets. Names such as ``emnist/letters`` select a configuration.

    CIFAR-10 and CIFAR-100 may also be the archive of their authors. If neither is there, it is prepared first, provided
    that TensorFlow is installed and downloads are allowed.

    Raises:
      UserError: the folder is missing, incomplete, of another version, or in a format that needs TensorFlow.
    """
    name, known = _full_name(request.name)
    root = _root(request.data_dir)
    place = _version_folder(root / name, name, known) or cifar.archive_in(root, name)
    if place is None:
        if elsewhere := _near(root, name, known):
            raise UserError(f"{name} is not in {root} but in {elsewhere}: use data_dir={shlex.quote(str(elsewhere))}")
        if request.offline or not _has_tensorflow():
            raise UserError(f"{name} is not in {root}; get it with: {_prepare_command(name, root)}")
        place = prepare(request)
    sources = [place] if place.is_file() else [path for path in place.iterdir() if path.is_file()]
    decode = cifar.decode if place.is_file() else _decode
    values = cached(f"{name}-{place.name}", sources, lambda: decode(place, name))
    label = LABELS[request.settings.label_mode if isinstance(request.settings, LabelMode) else "fine"]
    return Dataset(
        name, values["x"], values[f"{label}_train"], values["test_x"], values[f"{label}_test"],
        num_classes=values[f"{label}_classes"], mean=known.mean, std=known.std,
    )  # fmt: skip


def prepare(request: DataRequest) -> Path:
    """Download a dataset with its builder, write it as array_record, and return its folder.

    For CIFAR-10 and CIFAR-100, download the archive of their authors instead, and return it. All files are written to a
    temporary folder. The result is moved when it is complete, and the temporary folder is always removed.

    Raises:
      UserError: TensorFlow is missing, downloads are forbidden, the network is unavailable, or the builder fails.
    """
    name, known = _full_name(request.name)
    root = _root(request.data_dir)
    if present := _version_folder(root / name, name, known) or cifar.archive_in(root, name):
        return present
    from_archive = name in cifar.ARCHIVES
    if not from_archive and not _has_tensorflow():
        raise UserError(f"the preparation of {name} needs TensorFlow: {_prepare_command(name, root)}")
    if request.offline:
        raise UserError(f"the preparation of {name} downloads files, which offline=True forbids")

    def build(temporary: Path) -> Path:
        if from_archive:
            return cifar.download(name, temporary)
        import tensorflow_datasets

        builder = tensorflow_datasets.builder(name, data_dir=temporary, file_format="array_record", try_gcs=False)
        _check_connection(builder.url_infos or ())
        builder.download_and_prepare()
        return Path(builder.data_dir)

    logging.info("preparing %s in %s", name, root)
    return build_atomically(root, build, name=name)


def _check_connection(urls: Iterable[str]) -> None:
    """Send one request to each host, because TensorFlow Datasets would retry ten times, for minutes.

    Raises:
      UserError: a host cannot be reached.
    """
    import requests  # imported here because it takes a quarter of a second; installed with TensorFlow Datasets

    for host, url in {urllib.parse.urlsplit(url).netloc: url for url in urls}.items():
        try:
            requests.head(url, timeout=CONNECTION_TIMEOUT)  # any status code shows that the host is reachable
        except requests.RequestException as error:
            reason = "no answer" if isinstance(error, requests.Timeout) else "no connection"
            raise UserError(
                f"{reason} from {host}, which has the samples: check the internet connection, or copy a folder that "
                "was prepared on another machine"
            ) from error


def build_atomically(root: Path, build: Callable[[Path], Path], *, name: str) -> Path:
    """Call ``build`` with a temporary folder, and move the folder that it returns to the same place under ``root``.

    Raises:
      UserError: ``build`` failed or ``root`` cannot be written.
    """
    temporary, created = None, []
    try:
        created = files.make_folder(root)
        temporary = Path(tempfile.mkdtemp(prefix=".preparing-", dir=root))
        result = build(temporary)
        target = root / result.relative_to(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(result, target)
        return target
    except UserError as error:
        raise UserError(f"could not prepare {name} in {root}: {error}") from error
    except Exception as error:  # downloads and parsers raise many kinds
        raise UserError(f"could not prepare {name} in {root}: {_brief(error)}") from error
    finally:
        if temporary is not None:
            _remove(temporary)
        for folder in created:
            with contextlib.suppress(OSError):  # it is not empty: it holds the result, or files of other processes
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Remove a folder. Threads of an interrupted download may still write into it, so try repeatedly."""
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
    return files.expand_home(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def _near(root: Path, name: str, known: ImageSet) -> Path | None:
    """The folder that the user may have meant, if ``root`` is one or two levels too deep or one too high; or None."""
    depth = name.count("/") + 2  # levels of a version, such as emnist/letters/3.1.0, below the right folder
    start = root.absolute()
    candidates = [*start.parents[:depth], *(path.parents[depth - 2] for path in sorted(start.glob(f"*/{name}")))]
    return next((each for each in candidates if _compatible(_versions(each / name), known)), None)


def _has_tensorflow() -> bool:
    return importlib.util.find_spec("tensorflow") is not None


def _prepare_command(name: str, root: Path) -> str:
    arguments = shlex.join([name, f"--data_dir={root}"])
    install = "" if name in cifar.ARCHIVES else "pip install 'fedjax-mr[prepare]' && "
    return f"{install}python -m fedjax_mr.data prepare {arguments}"


def _version_folder(folder: Path, name: str, known: ImageSet) -> Path | None:
    """The newest version with the known first number. TensorFlow Datasets guarantees the same samples for these."""
    versions = _versions(folder)
    compatible = _compatible(versions, known)
    if versions and not compatible:
        names = ", ".join(sorted(path.name for path in versions))
        raise UserError(
            f"{folder} contains version {names} of {name}, but {known.version} is needed; get it with: "
            f"{_prepare_command(name, folder.parents[name.count('/')])}"
        )
    return max(compatible, key=lambda path: [int(part) for part in path.name.split(".")], default=None)


def _versions(folder: Path) -> list[Path]:
    pattern = re.compile(r"\d+\.\d+\.\d+")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []


def _compatible(versions: list[Path], known: ImageSet) -> list[Path]:
    return [path for path in versions if path.name.split(".")[0] == known.version.split(".")[0]]


def _decode(folder: Path, name: str) -> dict[str, Any]:
    """Images and labels of both parts, and the numbers of classes, for all kinds of labels in the dataset."""
    import tensorflow_datasets

    if not hasattr(tensorflow_datasets, "builder_from_directory"):  # without a dependency it lacks parts, silently
        raise UserError(
            f"{folder} was not read: a package that TensorFlow Datasets needs is missing in this Python; "
            "install it (pip check names it)"
        )
    try:
        _require_known_classes(untrusted.read_json(folder / "features.json", dict))
        builder: Any = tensorflow_datasets.builder_from_directory(folder)
        read = _read_tfrecord if builder.info.file_format.value == "tfrecord" else _read_array_record
        if read is _read_tfrecord and not _has_tensorflow():
            raise UserError(
                f"{folder} is a TFRECORD folder, which only TensorFlow can read (pip install 'fedjax-mr[prepare]'); "
                f"or move it away and run: {_prepare_command(name, folder.parents[name.count('/') + 1])}"
            )
        labels = [label for label in LABELS.values() if label == "label" or label in builder.info.features]
        (x, y), (test_x, test_y) = (read(builder, split, labels) for split in ("train", "test"))
        facts = {f"{label}_classes": builder.info.features[label].num_classes for label in labels}
    except UserError:
        raise
    except Exception as error:  # the parsers of JSON, protobuf, array_record and PNG raise many kinds
        raise UserError(
            f"{folder} is incomplete or damaged ({_brief(error)}); delete it and prepare it again"
        ) from error
    if name.startswith("emnist"):
        x, test_x = x.swapaxes(1, 2), test_x.swapaxes(1, 2)
    parts = {f"{label}_{part}": of[label] for part, of in (("train", y), ("test", test_y)) for label in labels}
    return {"x": x, "test_x": test_x} | parts | facts


def _require_known_classes(features: Any) -> None:
    """Check that a description names classes of TensorFlow Datasets alone, which would import any module that it names.

    Raises:
      ValueError: it names another class.
    """
    if isinstance(features, dict):
        for name in ("pythonClassName", "python_class_name", "type"):
            if "." in str(value := features.get(name)) and not str(value).startswith("tensorflow_datasets.core."):
                raise ValueError(f"features.json names {ascii(value)[:80]}, which is not of TensorFlow Datasets")
    for each in features.values() if isinstance(features, dict) else features if isinstance(features, list) else ():
        _require_known_classes(each)


def _read_array_record(builder: Any, split: str, labels: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Read uint8 images and int32 labels by kind, in the original order if the samples have ids."""
    import tensorflow_datasets
    from PIL import Image

    source = builder.as_data_source(split, decoders={"image": tensorflow_datasets.decode.SkipDecoding()})
    x = np.zeros((len(source), *builder.info.features["image"].shape), np.uint8)
    y = {label: np.zeros(len(source), np.int32) for label in labels}
    ids = []
    bar = tqdm(
        _records(source), f"reading {builder.name}, {split}", len(source), leave=False, disable=not sys.stderr.isatty()
    )
    for row, record in enumerate(bar):
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
    """Like `_read_array_record`, for the TFRECORD format. Needs TensorFlow."""
    import tensorflow_datasets

    samples = tensorflow_datasets.as_numpy(builder.as_dataset(split=split, batch_size=-1))
    order = np.argsort(samples["id"], kind="stable") if "id" in samples else np.arange(len(samples["label"]))
    return samples["image"][order], {label: samples[label][order].astype(np.int32) for label in labels}


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
