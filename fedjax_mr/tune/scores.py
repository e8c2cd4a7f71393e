"""The score of a trial: its first metric on validation samples after some rounds. Nothing here reads a test result."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_rows, read_summary, run_state, saved_round
from fedjax_mr.results.rows import metric_of
from fedjax_mr.sweep import PlannedRun
from fedjax_mr.tasks import METRICS, Metric
from fedjax_mr.tune.plan import Trial


class Score(NamedTuple):
    """The result of a trial on validation samples.

    Attributes:
      value: mean of the first metric, such as the accuracy, over the clients and the seeds. None if the trial diverged.
      loss: mean loss of the task. None if unknown.
      metric: the first metric.
    """

    value: float | None
    loss: float | None
    metric: Metric = METRICS["accuracy"]

    @property
    def diverged(self) -> bool:
        """Whether the trial has diverged."""
        return self.value is None

    @property
    def key(self) -> tuple[float, float]:
        """Sorts the best first: by the metric, ties by the loss. A diverged trial is last."""
        sign = -1 if self.metric.higher_is_better else 1
        value = math.inf if self.value is None else sign * self.value
        return value, math.inf if self.loss is None else self.loss


DIVERGED = Score(None, None)


def of_trial(trial: Trial, rounds: int) -> Score | None:
    """The score of a trial after some rounds, or None if it is not trained that far."""
    scores = [of_run(run, rounds) for run in trial.runs]
    if DIVERGED in scores:
        return DIVERGED
    if not all(scores):
        return None
    known = [score for score in scores if score is not None]
    value, loss = _mean([score.value for score in known]), _mean([score.loss for score in known])
    return Score(value, loss, known[0].metric)


def of_run(run: PlannedRun, rounds: int) -> Score | None:
    """The score of a run after some rounds, or None if it is not trained that far.

    Raises:
      UserError: the run has no validation accuracy, was trained further but not evaluated there, or its files are
        damaged.
    """
    state = run_state(run.folder)
    rows = _rows(run)
    at = [row for row in rows if row["round"] == rounds]
    if at and (state == "finished" or (saved_round(run.folder) or 0) >= rounds):  # later rows may be computed again
        return _score(run, at[0])
    if state == "diverged":
        return DIVERGED
    if state == "finished" and rows and read_summary(run.folder).get("ended_by", "rounds") != "rounds":
        return _score(run, rows[-1])  # --patience has ended it earlier
    if state == "finished" and rows and rows[-1]["round"] > rounds:
        raise UserError(
            f"{run.folder} was trained to round {rows[-1]['round']} and not evaluated at round {rounds}: choose rounds "
            "at which it was, or another --tune_dir"
        )
    return None


def rounds_trained(trial: Trial) -> int:
    """The rounds of all runs of a trial, up to their last evaluations."""
    return sum(rows[-1]["round"] for run in trial.runs if (rows := _rows(run)))


def _rows(run: PlannedRun) -> list[dict]:
    if not (run.folder / "metrics.jsonl").exists():
        return []
    rows = read_rows(run.folder)
    metric = metric_of(rows)
    names = {"value": f"validation_{metric.name}", "loss": "validation_loss"}  # all that selection knows of a run
    of = lambda row: {name: row.get(column) for name, column in names.items()}
    return [{"round": row["round"], "metric": metric, **of(row)} for row in rows]


def _score(run: PlannedRun, row: dict) -> Score:
    metric = row["metric"]
    if row["value"] is None:
        raise UserError(
            f"{run.folder} has no validation {metric.title} at round {row['round']}, so it cannot be compared"
        )
    return Score(row["value"], row["loss"], metric)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None
