"""Evaluations as rows of numbers, and the summary of a run: written, read, and verified by the folder's manifest."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.results import kept, manifest
from fedjax_mr.tasks import METRICS, Metric

MetricsRow = dict[str, Any]

COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds",
)  # fmt: skip
"""The columns of every run of a classification, in order: fractions in 0..1, nats, bytes, seconds. A strategy's own
columns follow. Other tasks have their metrics in place of the accuracy: the column after the round is the one that
decides which model is best (`metric_of`).
"""

COUNTS = frozenset(COLUMNS) - {"accuracy"}

RESULTS = ("metrics.jsonl", "clients.csv", "summary.json")  # the files of a finished run that depend on each other
MADE_FROM = "made_from"  # entry of version 0.3.0


def read_rows(folder: Path | str) -> list[MetricsRow]:
    """Read the evaluations of a run folder and verify them by its manifest.

    While a run goes on, the manifest covers the evaluations up to the newest checkpoint. A last line without an end,
    from a killed process, is ignored.

    Raises:
      UserError: the folder has no readable ``metrics.jsonl``, or the evaluations have changed.
    """
    if kept_run := kept.run(folder):
        return _possible(kept_run.rows, Path(folder))
    path = Path(folder) / "metrics.jsonl"
    try:
        manifest.require_unchanged(folder, path.name)
        complete, _, _ = untrusted.read_text(path).rpartition("\n")
        return _possible([untrusted.parse_json(line) for line in complete.splitlines()], path)
    except OSError as error:
        raise UserError(f"{folder} is not a run folder with metrics ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


def _possible(rows: list[Any], path: Path) -> list[MetricsRow]:
    """Check that values from a file are evaluations, in the order of their rounds, and return them.

    Raises:
      UserError: a value is not an evaluation.
    """
    before = 0
    for number, row in enumerate(rows, 1):
        reason = None
        if not _is_row(row):
            reason = "is not an evaluation"
        elif row["round"] <= before:
            reason = f"is of round {row['round']}, but the line before is of round {before}"
        elif wrong := [name for name, value in row.items() if name.endswith("accuracy") and not 0 <= (value or 0) <= 1]:
            reason = f"has {wrong[0]} {row[wrong[0]]}, which is not between 0 and 1"
        if reason:
            raise UserError(f"{path} is damaged (line {number} {reason})")
        before = row["round"]
    return rows


def read_summary(folder: Path | str) -> dict[str, Any]:
    """Read the summary of a finished run.

    Raises:
      UserError: the folder has no readable ``summary.json``, or one of its `RESULTS` has changed.
    """
    if (kept_run := kept.run(folder)) and kept_run.summary is not None:
        return dict(kept_run.summary)
    path = Path(folder) / "summary.json"
    try:
        manifest.require_unchanged(folder, *RESULTS)
        summary = files.without_checksum(untrusted.parse_json(untrusted.read_text(path)))
    except OSError as error:
        raise UserError(f"{folder} is not a finished run ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    return {name: value for name, value in summary.items() if name != MADE_FROM}


def metric_of(rows: Sequence[MetricsRow]) -> Metric:
    """The metric that decides which model is best: the first one of the evaluations. Without any, the accuracy.

    A metric of a user whose file is not imported is one of which higher values are better.
    """
    names = (name.removeprefix("validation_") for name in (rows[0] if rows else ()))
    name = next((name for name in names if name not in COUNTS), "accuracy")
    return METRICS.get(name) or Metric(name, lambda *_: None, lambda sums: sums)


def best_row(rows: Sequence[MetricsRow]) -> MetricsRow | None:
    """The first evaluation with the best value of `metric_of` on validation samples, or test samples without them.

    Missing values do not count; without any the result is None.
    """
    metric = metric_of(rows)
    name, sign = _held_out(metric.name, rows), 1 if metric.higher_is_better else -1
    known = [row for row in rows if row.get(name) is not None]
    return max(known, key=lambda row: sign * row[name], default=None)


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
