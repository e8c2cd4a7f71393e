"""The trained coalitions in a folder: a killed command continues after its last finished block."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import locks
from fedjax_mr.experiment.rows import csv_writer
from fedjax_mr.whatif.coalitions import Coalition, by_size, of_text, text

TABLE, FACTS = "coalitions.csv", "whatif.json"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table of rows with equal columns atomically. Without rows it is empty."""
    with files.atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv_writer(file, rows[0] if rows else ())
        writer.writeheader()
        writer.writerows(rows)


class Record:
    """The test results of coalitions, in memory and, if there is a folder, in its file ``coalitions.csv``.

    Attributes:
      rows: columns of numbers, such as the accuracy, by seed and coalition.
    """

    def __init__(self, folder: Path | str | None, facts: Mapping[str, Any]) -> None:
        """Open a folder, or create it.

        Args:
          folder: where the results are kept, or None.
          facts: what the results depend on, as values for JSON. A folder with other facts is refused.

        Raises:
          UserError: the folder cannot be written, is in use, is damaged or belongs to another federation.
        """
        self.rows: dict[tuple[int, Coalition], dict[str, float]] = {}
        self._folder, self._lock = None if folder is None else files.expand_home(folder), None
        if self._folder is None:
            return
        try:
            files.make_folder(self._folder)
        except OSError as error:
            raise UserError(f"cannot create {self._folder} ({error.strerror})") from None
        self._lock = locks.lock_file(self._folder / ".lock")
        if (self._folder / FACTS).exists():
            self._continue(dict(facts))
        else:
            with files.atomic_write(self._folder / FACTS) as path:
                path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Release the folder."""
        if self._lock is not None:
            os.close(self._lock)

    def add(self, rows: Mapping[tuple[int, Coalition], dict[str, float]]) -> None:
        """Add the results of a block, and write the table anew."""
        self.rows |= rows
        if self._folder is None:
            return
        lines = [
            {"seed": seed, "clients": len(coalition), "coalition": text(coalition)} | columns
            for (seed, coalition), columns in sorted(self.rows.items(), key=lambda row: (row[0][0], by_size(row[0][1])))
        ]
        write_csv(self._folder / TABLE, lines)

    def _continue(self, facts: dict[str, Any]) -> None:
        """Read the results of an earlier command."""
        assert self._folder is not None
        try:
            before = untrusted.parse_json(untrusted.read_text(self._folder / FACTS))
            if different := [name for name in facts if before.get(name) != facts[name]]:
                name = different[0]
                raise UserError(
                    f"{self._folder} holds the coalitions of another federation ({name} was {before.get(name)} and is "
                    f"{facts[name]}): choose another folder"
                )
            if not (self._folder / TABLE).exists():
                return
            for line in csv.DictReader(untrusted.read_text(self._folder / TABLE).splitlines()):
                seed, coalition = int(line.pop("seed")), of_text(line.pop("coalition"))
                del line["clients"]
                self.rows[seed, coalition] = {name: float(value) for name, value in line.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self._folder} is damaged ({error}): choose another folder") from None
