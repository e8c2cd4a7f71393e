"""Decoded datasets in the user's cache folder, so that only the first run decodes the source."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from fedjax_mr import files
from fedjax_mr.data import npz
from fedjax_mr.data.federated import Dataset
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import of_facts

FORMAT = 2  # to be incremented when a loader decodes differently


def cached(name: str, sources: Iterable[Path], build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read the decoded arrays and facts of a source from the cache, or build them if its files have changed.

    Args:
      name: the source, its version and everything else that the result depends on.
      sources: the files that are decoded, identified by path, size and time of modification.
      build: decodes the files into a dictionary of arrays and JSON values. Tuples remain tuples.
    """
    if (folder := files.cache_folder()) is None:
        return build()
    digest = hashlib.sha256(f"{FORMAT} {name}".encode())
    for source in sorted(sources):
        status = source.stat()
        digest.update(f"{source.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    path = folder / "data" / f"{name.replace('/', '-')}-{digest.hexdigest()[:16]}.npz"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logging.warning("ignoring a damaged cache file, %s (%s)", path, error)
    values = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as temporary:
            _write(values, temporary)
    except (OSError, UserError) as error:  # a full disk must not stop a run
        logging.warning("the next run decodes %s again: %s", name, error)
    return values


def cached_dataset(name: str, sources: Iterable[Path], build: Callable[[], Dataset]) -> Dataset:
    """Read a dataset from the cache, or build it, see `cached`."""

    def values() -> dict[str, Any]:
        dataset = build()
        fields = [each.name for each in dataclasses.fields(dataset)]
        found = {each: value for each in fields if (value := getattr(dataset, each)) is not None}
        return found | {"task": dataset.task.facts()}

    found: dict[str, Any] = cached(name, sources, values)
    found["task"] = of_facts(found["task"])
    return Dataset(**found)


def _write(values: dict[str, Any], path: Path) -> None:
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    facts = {name: value for name, value in values.items() if name not in arrays}
    np.savez(path, facts=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, Any]:
    values = npz.read(path)
    facts = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(str(values.pop("facts"))).items()
    }
    return facts | values
