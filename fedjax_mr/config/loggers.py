"""Programs that receive the metrics of a run (``--log``): TensorBoard, Weights & Biases, MLflow, trackio, and a user's.

A row of `LOGGERS` is a function open(run: `LoggedRun`) -> `Log`, such as a class.

TensorBoard's event files are in the run folder. The others write where their settings say (WANDB_MODE, WANDB_DIR,
WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SPACE_ID); the default
name of projects and experiments is fedjax_mr. A run has the name of its folder.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.results.rows import plain_numbers

PROJECT = "fedjax_mr"
MAX_BATCH = 100  # parameters in one request to MLflow


class LoggedRun(NamedTuple):
    """The run whose metrics a log receives."""

    folder: Path  # its folder, which exists
    settings: Mapping[str, Any]  # its settings by flag
    id: str | None = None  # `Log.id` of the log that it continues. None: the log is new
    done: int = 0  # rounds before the first row; with a new log, earlier rows follow


class Log(Protocol):
    """A program that receives the metrics.

    It may have an attribute ``id``, the identifier of the run in this program, which a resumed run gets back. Default:
    the name of the row.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one evaluation."""

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """End the log, with the state of the run (`folder.STATES`) and the numbers of its summary, if it has one."""


class TensorBoard:
    """Event files in ``tensorboard`` of the run folder."""

    needs = "tensorboardX"

    def __init__(self, run: LoggedRun) -> None:
        """Open an event file that replaces the events of older files after ``run.done`` rounds."""
        from tensorboardX import SummaryWriter

        self.id = "tensorboard"
        self._writer = SummaryWriter(str(run.folder / self.id), purge_step=run.done + 1 if run.id else 0)

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

    needs = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        """Begin a run, or continue the one with this identifier."""
        import wandb  # pyright: ignore[reportMissingImports]

        self.id = run.id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=self.id,
            resume="allow",
            config=dict(run.settings),
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

    needs = "mlflow"

    def __init__(self, run: LoggedRun) -> None:
        """Begin a run, or continue the one with this identifier."""
        from mlflow import entities  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._entities, self._client = entities, MlflowClient()
        self._written: set[str] = set()
        if run.id is not None:
            self._client.update_run(run.id, status="RUNNING")
            self.id = run.id
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self.id = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        params = [entities.Param(flag, "none" if value is None else str(value)) for flag, value in run.settings.items()]
        for start in range(0, len(params), MAX_BATCH):
            self._client.log_batch(self.id, params=params[start : start + MAX_BATCH])

    def _experiment(self, name: str) -> str:
        """The identifier of an experiment, which other processes may create at the same time."""
        if existing := self._client.get_experiment_by_name(name):
            return existing.experiment_id
        try:
            return self._client.create_experiment(name)
        except Exception:  # MLflow's stores raise many kinds if another process was faster
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


class Trackio:
    """A run of trackio, on this machine or in the Space that TRACKIO_SPACE_ID names. It has no summary."""

    needs = "trackio"

    def __init__(self, run: LoggedRun) -> None:
        """Begin a run, or continue the one with this name."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run.id or run.folder.name,
            resume="allow" if run.id else "never",
            config=dict(run.settings),
            embed=False,
        )
        self.id = self._run.name

    def write(self, row: Mapping[str, Any]) -> None:
        """Pass the row, at the step of its round, to the thread that writes or sends it."""
        self._run.log(numbers(row), step=row["round"])

    def close(self, state: str, summary: Mapping[str, float]) -> None:
        """Wait until everything is written or sent."""
        self._run.finish()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row or summary, without the round."""
    plain = plain_numbers(values).items()
    return {name: value for name, value in plain if type(value) in (int, float) and name != "round"}


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `LOGGERS`.

    Raises:
      UserError: the row is not a function.
    """
    if not callable(row):
        raise UserError(
            f"fmr.LOGGERS[{name!r}] takes a function open(run) that returns an object with write(row) and "
            "close(state, summary), such as a class"
        )


LOGGERS: Registry[Callable[[LoggedRun], Log]] = Registry(
    "logger",
    "fmr.LOGGERS",
    check_row,
    {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio},
)
"""The values of ``--log``. Those of this package are also its extras; ``needs`` is the Python package of each."""
