"""The trained coalitions in a folder: a killed command continues after its last finished block."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.results import locks
from fedjax_mr.results.rows import csv_writer
from fedjax_mr.whatif.coalitions import by_size, of_text, text

TABLE, UPLOADS, FACTS = "coalitions.csv", "uploads.csv", "whatif.json"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of rows with equal columns atomically. Without rows it is empty."""
    with files.atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv_writer(file, rows[0] if rows else ())
        writer.writeheader()
        writer.writerows(rows)


class Table:
    """Rows of numbers by whole numbers and a coalition, in memory and, if there is a folder, in a file.

    Attributes:
      rows: columns of numbers, such as the accuracy, by the keys.
    """

    def __init__(self, path: Path | None, *keys: str) -> None:
        """Continue the table of a file, if there is one.

        Args:
          path: the file, or None.
          keys: names of the whole numbers by which rows are known, such as ``seed``. The coalition is the last key.

        Raises:
          OSError, ValueError, KeyError, TypeError, AttributeError: the file cannot be read or is damaged.
        """
        self.rows: dict[tuple[Any, ...], dict[str, float]] = {}
        self._path, self._keys = path, keys
        if path is None or not path.exists():
            return
        for line in csv.DictReader(untrusted.read_text(path).splitlines()):
            key = (*(int(line.pop(name)) for name in keys), of_text(line.pop("coalition")))
            del line["clients"]
            self.rows[key] = {name: float(value) for name, value in line.items()}

    def add(self, rows: Mapping[tuple[Any, ...], dict[str, float]]) -> None:
        """Add rows, and write the table anew."""
        self.rows |= rows
        if self._path is None:
            return
        lines = [
            dict(zip(self._keys, numbers, strict=True))
            | {"clients": len(coalition), "coalition": text(coalition)}
            | columns
            for (*numbers, coalition), columns in sorted(self.rows.items(), key=lambda row: _place(row[0]))
        ]
        write_csv(self._path, lines)


class Record:
    """The test results of coalitions, in memory and, if there is a folder, in its files.

    Attributes:
      trained: the results of trained coalitions by seed and coalition.
      rebuilt: those of models that are rebuilt from uploads, by seed, round and coalition (`fedjax_mr.whatif.uploads`).
    """

    def __init__(self, folder: Path | str | None, facts: Mapping[str, Any]) -> None:
        """Open a folder, or create it.

        Args:
          folder: where the results are kept, or None.
          facts: what the results depend on, as values for JSON. A folder with other facts is refused.

        Raises:
          UserError: the folder cannot be written, is in use, is damaged or belongs to another federation.
        """
        self._folder, self._lock = None if folder is None else files.expand_home(folder), None
        if self._folder is not None:
            try:
                files.make_folder(self._folder)
            except OSError as error:
                raise UserError(f"cannot create {self._folder} ({error.strerror})") from None
            self._lock = locks.lock_file(self._folder / ".lock")
            self._check(dict(facts))
        try:
            self.trained, self.rebuilt = self._table(TABLE, "seed"), self._table(UPLOADS, "seed", "round")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self._folder} is damaged ({error}): choose another folder") from None

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            os.close(self._lock)

    def _table(self, name: str, *keys: str) -> Table:
        return Table(self._folder and self._folder / name, *keys)

    def _check(self, facts: dict[str, Any]) -> None:
        """Write the facts of a new folder, or compare them with those of an earlier command."""
        assert self._folder is not None
        path = self._folder / FACTS
        if not path.exists():
            with files.atomic_write(path) as temporary:
                temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            return
        try:
            before = untrusted.parse_json(untrusted.read_text(path))
            different = [name for name in facts if before.get(name) != facts[name]]
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{self._folder} is damaged ({error}): choose another folder") from None
        if different:
            name = different[0]
            raise UserError(
                f"{self._folder} holds the coalitions of another federation ({name} was {before.get(name)} and is "
                f"{facts[name]}): choose another folder"
            )


def _place(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The place of a row in its table."""
    *numbers, coalition = key
    return *numbers, by_size(coalition)
