"""Evaluations as rows of numbers, and the summary of a run: how they are written, read and checked.

Every digit counts: each checkpoint holds a checksum of the evaluations before it, ``summary.json`` one of all of them
and one of itself. Folders of version 0.2 and before have none; there only what is impossible is refused.
"""

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedjax_mr.data import files
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints

MetricsRow = dict[str, Any]

COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds",
)  # fmt: skip
"""The columns of every run, in order: fractions in 0..1, nats, bytes, seconds; a strategy's own columns follow."""


EVALUATIONS, MADE_FROM = "evaluations", "made_from"  # entries of a checkpoint's checksums, and of summary.json
REMEDY = "put back the whole file, or start anew with --overwrite"


def read_rows(folder: Path | str) -> list[MetricsRow]:
    """Return the evaluations that a run folder holds; a last line that was cut short by a kill is left out.

    They are compared with the checksums of the newest checkpoint and of the summary.

    Raises:
      UserError: the folder holds no readable ``metrics.jsonl``, or not the evaluations that were written.
    """
    path, checkpoints = Path(folder) / "metrics.jsonl", Checkpoints(Path(folder) / "checkpoints")
    # Before the evaluations are read: a run at work only adds some.
    newest = next(
        ((round, meta) for round in reversed(checkpoints.rounds()) if (meta := checkpoints.meta(round))), None
    )
    with_summary = _made_from(Path(folder)).get("metrics.jsonl")
    try:
        whole, _, _ = files.read_text(path).rpartition("\n")
        rows = [files.parse_json(line) for line in whole.splitlines()]
        _require_possible(rows)
        sums = checksums(rows)
    except OSError as error:
        raise UserError(f"{folder} is not a run folder with metrics ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if newest is not None:
        require_counted(rows, *newest, path)
    if with_summary not in (None, sums[-1]):
        raise UserError(f"{path} is damaged (its evaluations are not those of summary.json): {REMEDY}")
    return rows


def _require_possible(rows: list[Any]) -> None:
    """Check that values that were read are evaluations.

    Raises:
      ValueError: they are not.
    """
    before = 0
    for number, row in enumerate(rows, 1):
        if not _is_row(row):
            raise ValueError(f"line {number} is no evaluation")
        if row["round"] <= before:
            raise ValueError(f"line {number} is of round {row['round']}, but has to be of one after {before}")
        before = row["round"]
        for name, value in row.items():
            if name.endswith("accuracy") and value is not None and not 0 <= value <= 1:
                raise ValueError(f"line {number} has {name} {value}, which is not between 0 and 1")


def checksums(rows: Iterable[MetricsRow]) -> list[str]:
    """Return the checksums of the first 0, 1, 2, ... evaluations; each includes the one before."""
    return list(itertools.accumulate(rows, next_checksum, initial=""))


def next_checksum(before: str, row: MetricsRow) -> str:
    """Return the checksum of evaluations, given the one without the last of them."""
    return hashlib.sha256((before + line_of(row)).encode()).hexdigest()


def require_counted(rows: list[MetricsRow], round: int, meta: Mapping[str, Any], path: Path) -> None:
    """Check that evaluations begin with those that a checkpoint counts.

    The last of these may be missing if only the end of the run was the reason for it and the run was extended since.

    Args:
      rows: the evaluations.
      round: of the checkpoint.
      meta: what was saved with the checkpoint.
      path: of the file, for the error.

    Raises:
      UserError: they do not.
    """
    if "rows" not in meta or "checksums" not in meta:  # of an earlier version
        return
    try:
        known, count = list(meta["checksums"].get(EVALUATIONS, [])), meta["rows"]
        sums = checksums(rows)
        fits = not known or sums[count:][:1] == known[:1]
        extended = sums[count - 1 :][:1] == known[1:] != [] and all(row["round"] > round for row in rows[count - 1 :])
    except (AttributeError, TypeError) as error:
        raise UserError(f"the manifest of checkpoint {round} beside {path} is damaged ({error})") from None
    if not (fits or extended):
        raise UserError(f"{path} is damaged (not the {count} evaluations that checkpoint {round} counts): {REMEDY}")


def write_summary(folder: Path, summary: Mapping[str, Any], evaluations: str) -> None:
    """Write ``summary.json`` with its checksums.

    Args:
      folder: the run folder.
      summary: the results.
      evaluations: the checksum of the evaluations, as `checksums` has it.
    """
    made_from = {"metrics.jsonl": evaluations}
    if clients := files.checksum(folder / "clients.csv"):
        made_from["clients.csv"] = clients
    content = files.sealed(plain_numbers(summary) | {MADE_FROM: made_from})
    with files.atomic_write(folder / "summary.json") as path:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_summary(folder: Path | str) -> dict[str, Any]:
    """Return the summary of a finished run.

    Raises:
      UserError: the folder holds no readable ``summary.json``, or it and the files that it was made from are not those
        that were written.
    """
    path = Path(folder) / "summary.json"
    try:
        summary = files.unsealed(files.parse_json(files.read_text(path)))
    except OSError as error:
        raise UserError(f"{folder} is no finished run ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if made_from := summary.pop(MADE_FROM, None):
        read_rows(folder)
        clients = files.checksum(path.with_name("clients.csv"))
        if clients not in (None, made_from.get("clients.csv")):
            raise UserError(f"{path.with_name('clients.csv')} is damaged (it is not that of summary.json): {REMEDY}")
    return summary


def _made_from(folder: Path) -> dict[str, str]:
    """Return the checksums of the files that a summary was made from; none if there is no whole summary with some."""
    try:
        return files.unsealed(files.parse_json(files.read_text(folder / "summary.json"))).get(MADE_FROM) or {}
    except (OSError, ValueError):
        return {}


def best_row(rows: Sequence[MetricsRow]) -> MetricsRow | None:
    """Return the first evaluation with the best validation accuracy, or test accuracy if no row has one; None if none.

    Accuracies that are missing or not finite do not count.
    """
    name = _held_out("accuracy", rows)
    known = [row for row in rows if row.get(name) is not None]
    return max(known, key=lambda row: row[name], default=None)


def without_better_loss(rows: Sequence[MetricsRow]) -> int:
    """Return how many evaluations have come since the one with the lowest validation loss (or test loss, if none).

    A loss that is missing or not finite is not lower.
    """
    name = _held_out("loss", rows)
    known = [(row[name], number) for number, row in enumerate(rows) if row.get(name) is not None]
    return len(rows) - 1 - min(known, default=(0.0, -1))[1]


def _held_out(name: str, rows: Sequence[MetricsRow]) -> str:
    """Return the column that judges a model without training samples: validation if there is any, else test."""
    return f"validation_{name}" if any(f"validation_{name}" in row for row in rows) else name


def plain_numbers(value: Any) -> Any:
    """Return a value that JSON can hold: Python's own numbers, and None where one is not finite."""
    if isinstance(value, Mapping):
        return {name: plain_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(each) for each in value]
    if hasattr(value, "item"):  # a NumPy or JAX number
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_row(row: Any) -> bool:
    """Return whether a value that was read is an evaluation: numbers by name, among them the round."""
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        return False
    return all(value is None or isinstance(value, int | float) for value in row.values())


def line_of(row: MetricsRow) -> str:
    """Return an evaluation as a line of ``metrics.jsonl``."""
    return json.dumps(row, allow_nan=False) + "\n"


def csv_writer(file: TextIO, columns: Iterable[str]) -> csv.DictWriter:
    """Return a writer of rows with these columns."""
    return csv.DictWriter(file, list(columns), lineterminator="\n")
