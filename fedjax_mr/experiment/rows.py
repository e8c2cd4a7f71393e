"""Evaluations as rows of numbers, and the summary of a run: written, read and verified.

Each checkpoint contains a checksum of the evaluations before it, and ``summary.json`` one of all evaluations and one of
itself, so a changed digit is detected. Folders of version 0.2 and earlier have no checksums; in these only impossible
values are rejected.
"""

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import kept
from fedjax_mr.experiment.checkpoint import Checkpoints

MetricsRow = dict[str, Any]

COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds",
)  # fmt: skip
"""The columns of every run, in order: fractions in 0..1, nats, bytes, seconds. A strategy's own columns follow."""

EVALUATIONS = "evaluations"  # entry of a checkpoint's checksums
INPUTS = "made_from"  # entry of summary.json: checksums of the files from which it was computed
REMEDY = "put back the whole file, or start anew with --overwrite"


def read_rows(folder: Path | str) -> list[MetricsRow]:
    """Read the evaluations of a run folder and verify them by the checksums of the newest checkpoint and the summary.

    A last line without an end, from a killed process, is ignored.

    Raises:
      UserError: the folder has no readable ``metrics.jsonl``, or the evaluations have changed.
    """
    if kept_run := kept.run(folder):
        return _possible(kept_run.rows, Path(folder))
    path, checkpoints = Path(folder) / "metrics.jsonl", Checkpoints(Path(folder) / "checkpoints")
    # Read before the evaluations, because a running process may append some.
    newest = next(
        ((round, meta) for round in reversed(checkpoints.rounds()) if (meta := checkpoints.meta(round))), None
    )
    in_summary = _inputs_of_summary(Path(folder)).get("metrics.jsonl")
    try:
        complete, _, _ = untrusted.read_text(path).rpartition("\n")
        rows = [untrusted.parse_json(line) for line in complete.splitlines()]
        _require_possible(rows)
        sums = checksums(rows)
    except OSError as error:
        raise UserError(f"{folder} is not a run folder with metrics ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if newest is not None:
        require_counted(rows, *newest, path)
    if in_summary not in (None, sums[-1]):
        raise UserError(f"{path} is damaged (its evaluations do not belong to summary.json): {REMEDY}")
    return rows


def _possible(rows: list[Any], path: Path) -> list[MetricsRow]:
    """The evaluations of a kept run.

    Raises:
      UserError: some cannot be evaluations.
    """
    try:
        _require_possible(rows)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    return list(rows)


def _require_possible(rows: list[Any]) -> None:
    """Check that values from a file are evaluations, in the order of their rounds.

    Raises:
      ValueError: a value is not an evaluation.
    """
    before = 0
    for number, row in enumerate(rows, 1):
        if not _is_row(row):
            raise ValueError(f"line {number} is not an evaluation")
        if row["round"] <= before:
            raise ValueError(f"line {number} is of round {row['round']}, but the line before is of round {before}")
        before = row["round"]
        for name, value in row.items():
            if name.endswith("accuracy") and value is not None and not 0 <= value <= 1:
                raise ValueError(f"line {number} has {name} {value}, which is not between 0 and 1")


def checksums(rows: Iterable[MetricsRow]) -> list[str]:
    """The checksums of the first 0, 1, 2, ... evaluations; each includes the previous one."""
    return list(itertools.accumulate(rows, next_checksum, initial=""))


def next_checksum(before: str, row: MetricsRow) -> str:
    """The checksum after one more evaluation; ``before`` is the checksum without it."""
    return hashlib.sha256((before + line_of(row)).encode()).hexdigest()


def require_counted(rows: list[MetricsRow], round: int, meta: Mapping[str, Any], path: Path) -> None:
    """Check that the evaluations start with those that a checkpoint counts.

    The last of these may be missing if it was only made at the end of the run, and the run was extended since.

    Args:
      rows: the evaluations.
      round: round of the checkpoint.
      meta: the dictionary that was saved with the checkpoint.
      path: path of the file, for the error.

    Raises:
      UserError: the evaluations are different.
    """
    if "rows" not in meta or "checksums" not in meta:  # an older version
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
      evaluations: the checksum of all evaluations, from `checksums`.
    """
    inputs = {"metrics.jsonl": evaluations}
    if clients := files.checksum(folder / "clients.csv"):
        inputs["clients.csv"] = clients
    content = files.with_checksum(plain_numbers(summary) | {INPUTS: inputs})
    with files.atomic_write(folder / "summary.json") as path:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_summary(folder: Path | str) -> dict[str, Any]:
    """Read the summary of a finished run.

    Raises:
      UserError: the folder has no readable ``summary.json``, or this file or its inputs have changed.
    """
    if (kept_run := kept.run(folder)) and kept_run.summary is not None:
        return dict(kept_run.summary)
    path = Path(folder) / "summary.json"
    try:
        summary = files.without_checksum(untrusted.parse_json(untrusted.read_text(path)))
    except OSError as error:
        raise UserError(f"{folder} is not a finished run ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if inputs := summary.pop(INPUTS, None):
        read_rows(folder)
        clients = files.checksum(path.with_name("clients.csv"))
        if clients not in (None, inputs.get("clients.csv")):
            raise UserError(
                f"{path.with_name('clients.csv')} is damaged (it does not belong to summary.json): {REMEDY}"
            )
    return summary


def _inputs_of_summary(folder: Path) -> dict[str, str]:
    """The checksums of the files from which a summary was computed; empty without an intact summary."""
    try:
        return (
            files.without_checksum(untrusted.parse_json(untrusted.read_text(folder / "summary.json"))).get(INPUTS) or {}
        )
    except (OSError, ValueError):
        return {}


def best_row(rows: Sequence[MetricsRow]) -> MetricsRow | None:
    """The first evaluation with the best validation accuracy, or test accuracy if there is no validation.

    Missing accuracies do not count; without any the result is None.
    """
    name = _held_out("accuracy", rows)
    known = [row for row in rows if row.get(name) is not None]
    return max(known, key=lambda row: row[name], default=None)


def without_better_loss(rows: Sequence[MetricsRow]) -> int:
    """Number of evaluations since the one with the lowest validation loss, or test loss if there is no validation.

    A missing loss is not lower.
    """
    name = _held_out("loss", rows)
    known = [(row[name], number) for number, row in enumerate(rows) if row.get(name) is not None]
    return len(rows) - 1 - min(known, default=(0.0, -1))[1]


def _held_out(name: str, rows: Sequence[MetricsRow]) -> str:
    """The column of a measure on samples not used for training: validation if there is any, otherwise test."""
    return f"validation_{name}" if any(f"validation_{name}" in row for row in rows) else name


def plain_numbers(value: Any) -> Any:
    """Convert a value for JSON: NumPy and JAX numbers to Python's, and numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {name: plain_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(each) for each in value]
    if hasattr(value, "item"):  # a NumPy or JAX number
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_row(row: Any) -> bool:
    """Whether a value from a file is an evaluation: numbers by name, including the round."""
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        return False
    return all(value is None or isinstance(value, int | float) for value in row.values())


def line_of(row: MetricsRow) -> str:
    """An evaluation as a line of ``metrics.jsonl``."""
    return json.dumps(row, allow_nan=False) + "\n"


def csv_writer(file: TextIO, columns: Iterable[str]) -> csv.DictWriter:
    """A CSV writer of rows with these columns."""
    return csv.DictWriter(file, list(columns), lineterminator="\n")
