"""The progress of a sweep."""

import contextlib
import sys
from collections.abc import Sequence

from tqdm import tqdm

from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_rows
from fedjax_mr.results.rows import metric_of
from fedjax_mr.sweep.plan import PlannedRun


class Bar:
    """A bar over the rounds of all runs on standard error, with the time left."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        """Show the bar at the current progress of the runs."""
        self._ended = 0
        self._runs = len(runs)
        over = {run.folder: run.state() in ("finished", "diverged") for run in runs}
        self._done = {run.folder: run.config.rounds if over[run.folder] else run.done() for run in runs}
        self._bar = tqdm(
            total=sum(run.config.rounds for run in runs),
            initial=sum(self._done.values()),
            disable=not runs[0].config.progress,
            file=sys.stderr,
            dynamic_ncols=True,
            smoothing=0,
            mininterval=0.2 if sys.stderr.isatty() else 30.0,
            bar_format="{desc} |{bar}| {percentage:3.0f}%{postfix}, {remaining} left",
        )

    def show(self, runs: Sequence[PlannedRun]) -> None:
        """Update the bar with the progress of the current runs."""
        for run in runs:
            self._move(run, run.done())
        first = runs[0].folder
        row = []
        with contextlib.suppress(UserError):  # missing or damaged; the run's process reports that
            row = read_rows(first)[-1:]
        metric = metric_of(row)
        value = row[0][metric.name] if row else None
        shown = "" if value is None else f": {metric.title} {value:.4f}"
        others = f" (of {len(runs)} runs together)" if len(runs) > 1 else ""
        self._bar.set_postfix_str(f"{first.name}{others}{shown}", refresh=sys.stderr.isatty())

    def show_queue(self, running: Sequence[PlannedRun], waiting: int) -> None:
        """Update the bar with the progress of runs on a cluster, and the number of those that have not started."""
        for run in running:
            self._move(run, run.done())
        self._bar.set_postfix_str(f"{len(running)} running, {waiting} waiting", refresh=sys.stderr.isatty())

    def finish(self, run: PlannedRun) -> None:
        """Count a run and all its rounds as finished."""
        self._ended += 1
        self._move(run, run.config.rounds)

    def leave(self, run: PlannedRun) -> None:
        """Count a run that this sweep does not train; its remaining rounds take no time here and leave the total."""
        self._ended += 1
        self._bar.total -= run.config.rounds - self._done[run.folder]
        self._move(run, self._done[run.folder])

    def _move(self, run: PlannedRun, done: int) -> None:
        self._bar.set_description_str(f"{self._ended}/{self._runs} runs", refresh=False)
        self._bar.update(done - self._done[run.folder])
        self._done[run.folder] = done

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(f"fedjax-mr: {line}", file=sys.stderr)

    def close(self) -> None:
        """Stop updating the bar and end its line."""
        self._bar.close()
