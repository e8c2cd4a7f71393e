"""Train runs for a command that needs their results: until all have ended, in this process or in another one."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from fedjax_mr.errors import UserError
from fedjax_mr.sweep import slurm
from fedjax_mr.sweep.plan import PlannedRun, Training
from fedjax_mr.sweep.process import SECONDS_PER_LOOK, Worker, is_claimed, log_of
from fedjax_mr.sweep.runs import Launcher, one_by_one, run_all


class UnfinishedError(UserError):
    """A run did not finish, so its result is not known."""

    def __init__(self, run: PlannedRun, code: int) -> None:
        """Keep the exit code."""
        super().__init__(f"{run.folder} did not finish; see {log_of(run)}, and run the same command again")
        self.exit_code = code


class RunTrainer:
    """Trains runs, on this machine in one process for all of them.

    Attributes:
      settings: how they are trained.
    """

    def __init__(self, settings: Training, folder: Path) -> None:
        """Start nothing yet.

        Args:
          settings: how the runs are trained.
          folder: the folder of the command.
        """
        self.settings = settings
        self._worker = Worker()
        self._launch: Launcher = functools.partial(one_by_one, worker=self._worker)
        if settings.launcher == "slurm":
            self._launch = slurm.launcher(settings, folder)

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the process."""
        self._worker.stop()

    def train(self, runs: Sequence[PlannedRun], has_ended: Callable[[PlannedRun], bool]) -> None:
        """Train runs until all have ended.

        Runs that another process trains are awaited. If it dies, they are taken over.

        Raises:
          UnfinishedError: a run failed.
          Interrupted: a stop signal was received.
        """
        refused: set[Path] = set()
        while unfinished := [run for run in runs if not has_ended(run)]:
            free = [run for run in unfinished if not is_claimed(run)]
            if not free:
                time.sleep(SECONDS_PER_LOOK)
                continue
            code = run_all(free, batch=self.settings.batch, launch=self._launch)
            for run in free:
                if not has_ended(run) and not is_claimed(run):
                    if code != UserError.exit_code or run.folder in refused:
                        raise UnfinishedError(run, code or 1)
                    refused.add(run.folder)  # perhaps because another process used it, which has died since: once more
