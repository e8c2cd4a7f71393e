"""The logs of a run, see `loggers`.

``logs.json`` in the run folder stores the identifiers of the run in the programs that receive its metrics, so a resumed
run continues them. If a process is killed, repeated rounds may appear twice, with the same numbers. Weights & Biases
writes in a separate process and may lose the last seconds.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.config.loggers import LOGGERS, Log, LoggedRun, numbers
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import MetricsRow, RunFolder, read_summary, run_state

OnRow = Callable[[MetricsRow], object]
IDS = "logs.json"


class Logs:
    """The logs of one run. A log that fails later is reported once and dropped: the run folder has all metrics."""

    def __init__(self) -> None:
        """Create an empty set; `open` begins the logs."""
        self._open: dict[str, Log] = {}
        self._folder: Path | None = None

    def open(self, names: Sequence[str], settings: Mapping[str, Any], folder: RunFolder) -> None:
        """Begin or continue the logs of a run. A new log receives all evaluations so far.

        Args:
          names: names in `LOGGERS`.
          settings: settings of the run, by flag.
          folder: the run folder.

        Raises:
          UserError: a log cannot begin.
        """
        if not names:
            return
        self._folder, known, rows = folder.path, _read_ids(folder.path), folder.rows()
        for name in names:
            try:
                done = rows[-1]["round"] if rows else 0
                log = LOGGERS[name](LoggedRun(folder.path, settings, known.get(name), done))
                self._open[name] = log
                for row in () if name in known else rows:
                    log.write(row)
            except Exception as error:
                raise UserError(f"--log={name} cannot begin: {_brief(error)}") from error
        ids = known | {name: str(getattr(log, "id", name)) for name, log in self._open.items()}
        with files.atomic_write(folder.path / IDS) as path:
            path.write_text(json.dumps(ids) + "\n", encoding="utf-8")

    def write(self, row: MetricsRow) -> None:
        """Write an evaluation to every log."""
        self._each(lambda log: log.write(row))

    def close(self) -> None:
        """End all logs."""
        if self._folder is None:
            return
        state = run_state(self._folder)
        summary = numbers(read_summary(self._folder)) if state == "finished" else {}
        self._each(lambda log: log.close(state, summary))
        self._open = {}

    def _each(self, do: Callable[[Log], None]) -> None:
        for name, log in list(self._open.items()):
            try:
                do(log)
            except Exception as error:
                del self._open[name]
                print(
                    f"fedjax-mr: --log={name} has ended ({_brief(error)}); the run continues, with its metrics in "
                    f"{self._folder}",
                    file=sys.stderr,
                )


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        return untrusted.read_json(folder / IDS, {str: str}, "remove it to begin new logs")
    except FileNotFoundError:
        return {}


def _brief(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
