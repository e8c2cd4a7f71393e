"""Evaluations as rows of numbers: their columns, and how they are written and read."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from fedjax_mr import files
from fedjax_mr.errors import UserError

MetricsRow = dict[str, Any]

COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds",
)  # fmt: skip
"""The columns of every run, in order: fractions in 0..1, nats, bytes, seconds; a strategy's own columns follow."""


def read_rows(folder: Path | str) -> list[MetricsRow]:
    """Return the evaluations that a run folder holds; a last line that was cut short by a kill is left out.

    Raises:
      UserError: the folder holds no readable ``metrics.jsonl``.
    """
    path = Path(folder) / "metrics.jsonl"
    try:
        whole, _, _ = files.read_text(path).rpartition("\n")
        rows = [files.parse_json(line) for line in whole.splitlines()]
        for number, row in enumerate(rows, 1):
            if not _is_row(row):
                raise ValueError(f"line {number} is no evaluation")
        return rows
    except OSError as error:
        raise UserError(f"{folder} is not a run folder with metrics ({path.name}: {error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None


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
