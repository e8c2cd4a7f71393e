"""Folders of Hugging Face's ``datasets``: texts or images with labels, and optionally a client and a domain of each."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from fedjax_mr import files
from fedjax_mr.data.cache import cached_dataset
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import images, text
from fedjax_mr.data.sources.arrays import from_arrays
from fedjax_mr.errors import UserError

PREFIX = "hf:"  # of the path of a folder
FORMAT = 1  # to be incremented when images are read differently: part of the names of cached images
RESIZE = "resize all: dataset.map(lambda row: {'image': row['image'].resize((WIDTH, HEIGHT))})"

_TEXTS = ("string", "large_string", "string_view")
_NO_TEXTS = ("Image", "Audio", "Video", "Pdf", "Array2D", "Array3D", "Array4D", "Array5D")


def load(request: DataRequest) -> Dataset:
    """Read a folder written by ``save_to_disk``, or one of Parquet files such as ``train-00000-of-00001.parquet``.

    It holds a dataset, or parts train and test. Columns: text or image, label, and optionally client and domain. The
    test part may lack client.

    Raises:
      UserError: the package is missing, the folder is none of ``datasets``, it has other parts or columns, or images
        are damaged or of different sizes.
    """
    try:
        import datasets  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{request.name} needs datasets: pip install 'fedjax-mr[hf]'") from None
    path = files.expand_home(request.name.removeprefix(PREFIX))
    parts = _parts(path)
    # JSON files name the parts, the columns and the classes.
    sources = sorted(each for each in path.rglob("*") if each.suffix in (".arrow", ".json", ".parquet"))
    types = {name: _type(feature) for name, feature in parts["train"].features.items()}
    if "text" not in types and "Image" in types.values():
        kind = f"images{FORMAT}-{path.name}" + ("" if request.task is None else f"-{request.task}")
        return cached_dataset(kind, sources, lambda: _images(path, parts, request))
    return text.cached_texts(path.name, request, sources, lambda: _texts(path, parts, request))


def _parts(path: Path) -> dict[str, Any]:
    """The parts train and test of a folder, as datasets."""
    import datasets  # pyright: ignore[reportMissingImports]

    try:
        parquet = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
        loaded: Any = _of_parquet(parquet) if parquet else datasets.load_from_disk(str(path))
    except Exception as error:  # the parsers of JSON, Arrow and Parquet raise many kinds
        raise UserError(f"{path} is no folder of datasets.save_to_disk ({text.brief(error)})") from None
    parts = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in parts:
        raise UserError(f"{path} has the parts {', '.join(parts)}, but a part train is needed")
    _tell_of_unused_parts(path, list(parts))
    return {each: parts[each] for each in ("train", "test") if each in parts}


def _of_parquet(paths: list[Path]) -> dict[str, Any]:
    """The parts of Parquet files, whose names begin with that of their part."""
    import datasets  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    from datasets.table import InMemoryTable  # pyright: ignore[reportMissingImports]

    names = sorted({path.stem.partition("-")[0] for path in paths})
    tables = {
        name: [pyarrow.parquet.read_table(path) for path in paths if path.stem.partition("-")[0] == name]
        for name in names
    }
    return {name: datasets.Dataset(InMemoryTable(pyarrow.concat_tables(each))) for name, each in tables.items()}


def _texts(path: Path, parts: dict[str, Any], request: DataRequest) -> dict[str, Any]:
    """The arguments of `from_texts`."""
    train, test = _columns(path, parts, "text", list(text.labels(request)))
    arguments = text.arguments(path, train, test, text.ARGUMENTS)
    return arguments | {"num_classes": getattr(parts["train"].features.get("label"), "num_classes", None)}


def _images(path: Path, parts: dict[str, Any], request: DataRequest) -> Dataset:
    """The dataset of images, bytes as in `from_images`."""
    import datasets  # pyright: ignore[reportMissingImports]

    label = parts["train"].features.get("label")
    stored = datasets.Image(decode=False)  # bytes; decoded images would not say how a camera was turned
    parts = {
        name: part.cast_column("image", stored) if "image" in part.column_names else part
        for name, part in parts.items()
    }
    train, test = _columns(path, parts, "image", ["label"])
    opened = {}
    for part, columns in (("train", train), ("test", test)):
        for row, image in enumerate(columns.get("image", ())):
            where = f"{path} ({part}): the image of row {row}"
            if image is None or image["bytes"] is None:
                raise UserError(f"{where} is missing: save the dataset with its images")
            opened[where] = images.opened(io.BytesIO(image["bytes"]), where)
    pixels = np.split(images.stacked(opened, RESIZE), [len(train["image"])])
    train, test = ({**columns, "image": x} if columns else {} for columns, x in zip((train, test), pixels, strict=True))
    arguments = text.arguments(path, train, test, {"image": "x", "label": "y"})
    classes = getattr(label, "num_classes", None)
    dataset = from_arrays(**arguments, name=path.name, task=request.task, num_classes=classes)
    names = tuple(label.names) if classes == dataset.num_classes and "classes" in dataset.task.provides else ()
    return dataclasses.replace(dataset, class_names=names)


def _columns(path: Path, parts: dict[str, Any], sample: str, labels: list[str]) -> list[dict[str, Any]]:
    """The columns of the parts train and test by name; {} for a missing part.

    Args:
      path: the folder, for errors.
      parts: the datasets by part.
      sample: the column of the samples.
      labels: the column of the labels, if there is one.
    """

    def columns(part: str, dataset: Any) -> dict[str, Any]:
        has = dataset.column_names
        if missing := [each for each in (sample, *labels) if each not in has]:
            where, remedy = f"{path} ({part})", _remedy(dataset.features, missing[0])
            raise UserError(f"{where} has the columns {', '.join(has)}, but {missing[0]} is needed; {remedy}")
        if any(_type(dataset.features[each]) in _TEXTS for each in labels):
            raise UserError(f"{path} ({part}) has labels as texts: use dataset.class_encode_column('label')")
        return {each: list(dataset[each]) for each in (sample, *labels, "client", "domain") if each in has}

    return [columns(part, parts[part]) if part in parts else {} for part in ("train", "test")]


def _type(feature: Any) -> str:
    """The type of a column: that of its values, such as ``string``, or the name of its class, such as ``Image``."""
    return feature.dtype if type(feature).__name__ == "Value" else type(feature).__name__


def _remedy(features: dict[str, Any], missing: str) -> str:
    """What to do with a dataset that has no column ``text``, ``image`` or ``label``."""
    types = {name: _type(feature) for name, feature in features.items()}
    texts = [name for name, kind in types.items() if kind in _TEXTS]
    if missing == "text" and (not texts or any(kind in _NO_TEXTS for kind in types.values())):
        return "only texts and images are read from hf: folders, so pass numbers as arrays: fmr.from_arrays(x, y)"
    of_kind = lambda wanted: [name for name, kind in types.items() if kind == wanted]
    likely = {"text": texts, "image": of_kind("Image"), "label": of_kind("ClassLabel")}[missing]
    return f"rename one: dataset.rename_column({repr(likely[0]) if len(likely) == 1 else 'OLD'}, {missing!r})"


def _tell_of_unused_parts(path: Path, parts: list[str]) -> None:
    """Warn of parts of a dataset, such as validation, that are not read."""
    if unused := [part for part in parts if part not in ("train", "test")]:
        remedy = (
            "" if "test" in parts else f"; to test on {unused[0]}, rename it: parts['test'] = parts.pop('{unused[0]}')"
        )
        logging.warning("%s: only train and test are read, not %s%s", path, ", ".join(unused), remedy)
