"""Partition files: ``partition.npz`` of a run folder, and the JSON files in the released code of FedMR and others."""

import zipfile
from pathlib import Path

import numpy as np

from fedjax_mr import files, untrusted
from fedjax_mr.data import npz
from fedjax_mr.data.federated import Dataset, PartitionPlan, Split
from fedjax_mr.errors import UserError

_LARGEST_ROW = np.iinfo(np.int32).max
_SPLITS = ("train", "validation", "test")
_NAMES = {"fashionmnist": "fashion_mnist"}  # by the authors' name, in lower case and without hyphens


def save(plan: PartitionPlan, path: Path | str) -> None:
    """Write a plan atomically."""
    arrays = {name: np.asarray(value) for name, value in plan._asdict().items() if name not in _SPLITS}
    for name in _SPLITS:
        split: Split = getattr(plan, name)
        arrays |= {f"{name}_index": split.index, f"{name}_offsets": split.offsets}
    # At level 1, a million clients take 2 s; `np.savez_compressed` takes 16 s for a file of the same size.
    with (
        files.atomic_write(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def read(path: Path | str, *, dataset: Dataset | None = None) -> PartitionPlan:
    """Read the ``partition.npz`` of a run folder.

    Args:
      path: the file.
      dataset: the samples that the plan divides. None if they are not available for a comparison.

    Raises:
      UserError: the file is missing, damaged, or belongs to another dataset; or it names rows that do not exist, or
        assigns a sample twice.
    """
    path = _existing(path)
    try:
        arrays = npz.read(path)
        splits = {name: Split(arrays.pop(f"{name}_index"), arrays.pop(f"{name}_offsets")) for name in _SPLITS}
        arrays.setdefault("with_replacement", np.zeros((), bool))  # files of earlier versions have no such entry
        names = ("dataset", "fingerprint", "own_test", "with_replacement")
        single = {name: arrays.pop(name).item() for name in names}
        plan = PartitionPlan(**splits, **single, names=tuple(arrays.pop("names").tolist()), **arrays)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"partition file {path} is damaged or of another kind ({_brief(error)})") from None
    if dataset is not None and plan.fingerprint != dataset.fingerprint():
        raise UserError(
            f"partition file {path} belongs to other data: {plan.dataset} {plan.fingerprint}, "
            f"but this is {dataset.name} {dataset.fingerprint()}"
        )
    try:
        _check(plan, *(_LARGEST_ROW,) * 2 if dataset is None else (len(dataset.y), len(dataset.test_y)))
    except ValueError as error:
        raise UserError(f"partition file {path} is damaged: {error}; use the partition.npz of a run folder") from None
    checked = {name: Split(*(part.astype(np.int32) for part in getattr(plan, name))) for name in _SPLITS}
    return plan._replace(**checked, public=plan.public.astype(np.int64), global_test=plan.global_test.astype(np.int64))


def _check(plan: PartitionPlan, num_samples: int, num_test: int) -> None:
    """Check that a plan assigns each sample at most once. Only a modified file can fail this check.

    Exceptions: the only training row of a client may also be its validation row (`divide`), and clients that draw
    samples with replacement share them.

    Raises:
      ValueError: names the first fault.
    """
    if plan.held_out.ndim != 1 or plan.held_out.dtype != bool or not len(plan.held_out) or plan.held_out.all():
        raise ValueError(f"held_out is {_kind(plan.held_out)}, not one bool per client with at least one False")
    for name in ("own_test", "with_replacement"):
        if not isinstance(value := getattr(plan, name), bool):
            raise ValueError(f"{name} is {value!r}, not True or False")
    clients = len(plan.held_out)
    if len(plan.names) not in (0, clients) or not all(isinstance(name, str) for name in plan.names):
        raise ValueError(f"names holds {len(plan.names)} values, not one name for each of {clients} clients")
    owners = {}
    for name in _SPLITS:
        split: Split = getattr(plan, name)
        limit = num_test if name == "test" and not plan.own_test else num_samples
        _check_rows(f"{name}_index", split.index, limit, repeated=name == "train" and plan.with_replacement)
        offsets = split.offsets
        if offsets.dtype.kind not in "iu" or offsets.shape != (clients + 1,):
            raise ValueError(f"{name}_offsets is {_kind(offsets)}, not {clients + 1} whole numbers")
        ends = offsets.astype(np.int64)
        if ends[0] or ends[-1] != len(split.index) or (np.diff(ends) < 0).any():
            raise ValueError(f"{name}_offsets do not increase from 0 to {len(split.index)}, the length of {name}_index")
        owners[name] = np.repeat(np.arange(clients), np.diff(ends))
    _check_rows("public", plan.public, num_samples)
    _check_rows("global_test", plan.global_test, num_test)
    if not plan.train.sizes.all():
        raise ValueError(f"client {int(np.argmin(plan.train.sizes))} has no training samples")
    single = np.where(plan.train.sizes == 1, plan.train.index[plan.train.offsets[:-1]], -1)
    shared = plan.validation.index == single[owners["validation"]]
    assigned = [
        np.unique(plan.train.index) if plan.with_replacement else plan.train.index,
        plan.validation.index[~shared],
        plan.public,
        *([plan.test.index] if plan.own_test else []),
    ]
    rows, counts = np.unique(np.concatenate(assigned), return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"sample {rows[counts > 1][0]} is assigned twice (to clients or the public set)")


def _check_rows(name: str, rows: np.ndarray, limit: int, *, repeated: bool = False) -> None:
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError(f"{name} is {_kind(rows)}, not a list of whole numbers")
    if len(rows) and (rows.min() < 0 or rows.max() >= limit):
        raise ValueError(f"{name} has rows from {rows.min()} to {rows.max()}, outside 0..{limit - 1}")
    if not repeated and len(np.unique(rows)) != len(rows):
        raise ValueError(f"{name} names a row twice")


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {array.shape}"


def read_authors(path: Path | str, *, dataset: Dataset) -> list[np.ndarray]:
    """Read the training rows of each client from {"dataset": name, "train_data": {client: rows}}.

    Rows refer to the original order of the dataset, which the sources keep where it is known (CIFAR).

    Raises:
      UserError: the file is missing, damaged, or belongs to another dataset.
    """
    path = _existing(path)
    try:
        content = untrusted.parse_json(untrusted.read_text(path), {"dataset": str, "train_data": {int: object}})
        name = content["dataset"]
        parts = [_whole_numbers(client, rows) for client, rows in sorted(content["train_data"].items())]
    except (OSError, ValueError) as error:
        raise UserError(f"partition file {path} is damaged or of another kind ({_brief(error)})") from None
    simple = name.lower().replace("-", "").replace("_", "")
    if _NAMES.get(simple, simple) != dataset.name:
        raise UserError(f"partition file {path} belongs to {name}, but this is {dataset.name}")
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    if not len(rows) or rows.min() < 0 or rows.max() >= len(dataset.y):
        raise UserError(
            f"partition file {path} does not match {name}: it has no rows, or rows outside 0..{len(dataset.y) - 1}"
        )
    if len(np.unique(rows)) != len(rows):
        raise UserError(f"partition file {path} assigns one sample to two clients")
    return parts


def _whole_numbers(client: int, values: list[int]) -> np.ndarray:
    rows = np.array(values)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError(f"rows of client {client} are {_kind(rows)}, not a list of whole numbers")
    return np.minimum(rows, _LARGEST_ROW).astype(np.int64)  # larger numbers are outside every dataset


def _existing(path: Path | str) -> Path:
    if not Path(path).is_file():
        raise UserError(f"partition file {path} does not exist")
    return Path(path)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
