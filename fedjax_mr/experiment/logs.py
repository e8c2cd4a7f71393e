"""Send the metrics of a run to other programs: TensorBoard, Weights & Biases, MLflow (``--log``).

TensorBoard's event files are in the run folder. The others write where their settings say (WANDB_MODE, WANDB_DIR,
WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); the default name of projects and experiments is fedjax_mr.
A run has the name of its folder. ``logs.json`` in the folder stores the identifiers of the run in these programs, so a
resumed run continues them. If a process is killed, repeated rounds may appear twice, with the same numbers.
Weights & Biases writes in a separate process and may lose the last seconds.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedjax_mr import files, untrusted
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import MetricsRow, RunFolder, plain_numbers, read_summary, run_state

OnRow = Callable[[MetricsRow], object]
IDS = "logs.json"
PROJECT = "fedjax_mr"
MAX_BATCH = 100  # parameters in one request to MLflow


class Log(Protocol):
    """A program that receives the metrics.

    Attributes:
      id: the identifier of the run in this program.
    """

    id: str

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one evaluation."""

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """End the log, with the state of the run (`folder.STATES`) and the numbers of its summary, if it has one."""


class TensorBoard:
    """Event files in ``tensorboard`` of the run folder."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, id: str | None, done: int) -> None:
        """Open an event file that replaces the events of older files after ``done`` rounds."""
        from tensorboardX import SummaryWriter

        self.id = "tensorboard"
        self._writer = SummaryWriter(str(folder / self.id), purge_step=done + 1 if id else 0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write and flush."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; the horizontal axis of its metrics is the round."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, id: str | None, done: int) -> None:
        """Begin a run, or continue the one with this ``id``."""
        import wandb  # pyright: ignore[reportMissingImports]

        self.id = id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=self.id,
            resume="allow",
            config=dict(settings),
            reinit="create_new",
            settings=wandb.Settings(console="off"),  # the progress bar is not part of a log
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def write(self, row: Mapping[str, Any]) -> None:
        """Pass the row to the process that writes or sends it."""
        self._run.log({"round": row["round"], **numbers(row)})

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """Wait until everything is written or sent."""
        self._run.summary.update(summary)
        self._run.finish(exit_code=0 if state == "finished" else 1)


class MLflow:
    """A run of MLflow, through its client, which allows several runs in one process."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, id: str | None, done: int) -> None:
        """Begin a run, or continue the one with this ``id``."""
        from mlflow import entities  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._entities, self._client = entities, MlflowClient()
        self._written: set[str] = set()
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            self.id = id
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self.id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [entities.Param(flag, "none" if value is None else str(value)) for flag, value in settings.items()]
        for start in range(0, len(params), MAX_BATCH):
            self._client.log_batch(self.id, params=params[start : start + MAX_BATCH])

    def _experiment(self, name: str) -> str:
        """The identifier of an experiment, which other processes may create at the same time."""
        if existing := self._client.get_experiment_by_name(name):
            return existing.experiment_id
        try:
            return self._client.create_experiment(name)
        except Exception:
            if existing := self._client.get_experiment_by_name(name):
                return existing.experiment_id
            raise

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the row at the step of its round."""
        self._log(numbers(row), row["round"])

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """Write the numbers of the summary that are not columns, and the state of the run."""
        self._log({name: value for name, value in summary.items() if name not in self._written}, 0)
        self._client.set_terminated(self.id, {"finished": "FINISHED", "diverged": "FAILED"}.get(state, "KILLED"))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self.id, [self._entities.Metric(*pair, now, step) for pair in values.items()])
        self._written.update(values)


LOGS: dict[str, Callable[[Mapping[str, Any], Path, str | None, int], Log]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""The values of ``--log``; `config.LOGS` has the packages that they need."""


class Logs:
    """The logs of one run. A log that fails later is reported once and dropped: the run folder has all metrics."""

    def __init__(self) -> None:
        """Create an empty set; `open` begins the logs."""
        self._open: dict[str, Log] = {}
        self._folder: Path | None = None

    def open(self, names: Sequence[str], settings: Mapping[str, Any], folder: RunFolder) -> None:
        """Begin or continue the logs of a run. A new log receives all evaluations so far.

        Args:
          names: names in `LOGS`.
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
                log = LOGS[name](settings, folder.path, known.get(name), rows[-1]["round"] if rows else 0)
                self._open[name] = log
                for row in () if name in known else rows:
                    log.write(row)
            except Exception as error:
                raise UserError(f"--log={name} cannot begin: {_brief(error)}") from error
        ids = known | {name: log.id for name, log in self._open.items()}
        with files.atomic_write(folder.path / IDS) as path:
            path.write_text(json.dumps(ids) + "\n", encoding="utf-8")

    def write(self, row: MetricsRow) -> None:
        """Write an evaluation to every log."""
        self._each(list(self._open), lambda log: log.write(row))

    def close(self) -> None:
        """End all logs."""
        if self._folder is None:
            return
        state = run_state(self._folder)
        summary = numbers(read_summary(self._folder)) if state == "finished" else {}
        self._each(list(self._open), lambda log: log.close(state, summary))
        self._open = {}

    def _each(self, names: Iterable[str], do: Callable[[Log], None]) -> None:
        for name in names:
            try:
                do(self._open[name])
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


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row or summary, without the round."""
    plain = plain_numbers(values).items()
    return {name: value for name, value in plain if type(value) in (int, float) and name != "round"}


def _brief(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
