"""Train trials rung by rung, and keep the best of each rung.

All trials of a rung end before the best are chosen, so all methods have equal numbers of trials in each rung. Optuna's
`SuccessiveHalvingPruner` decides when a single trial arrives, so its numbers depend on the order in which trials end.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedjax_mr.errors import UserError
from fedjax_mr.sweep import PlannedRun, slurm
from fedjax_mr.sweep.process import SECONDS_PER_LOOK, Worker, is_claimed, log_of
from fedjax_mr.sweep.runs import Launcher, one_by_one, run_all
from fedjax_mr.tune import scores
from fedjax_mr.tune.plan import Rung, Trial, Tuning


class UnfinishedError(UserError):
    """A run did not finish, so no trial can be chosen."""

    def __init__(self, run: PlannedRun, code: int) -> None:
        """Keep the exit code."""
        super().__init__(f"{run.folder} did not finish; see {log_of(run)}, and run the same command again")
        self.exit_code = code


class Trainer:
    """Trains the runs of a tuning, on this machine in one process for all of them.

    Attributes:
      tuning: the plan.
    """

    def __init__(self, tuning: Tuning) -> None:
        """Start nothing yet."""
        self.tuning = tuning
        self._worker = Worker()
        self._launch: Launcher = functools.partial(one_by_one, worker=self._worker)
        if tuning.tune.launcher == "slurm":
            self._launch = slurm.launcher(tuning.tune, tuning.folder)

    def __enter__(self) -> "Trainer":
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the process."""
        self._worker.stop()

    def train_trials(self, trials: Sequence[Trial], rounds: int) -> None:
        """Train trials up to a round.

        Raises:
          UnfinishedError: a run failed for another reason than divergence.
          Interrupted: a stop signal was received.
        """
        runs = {
            run.folder: run for trial in trials for run in trial.until(rounds)
        }  # two trials may be the same setting
        self.train(list(runs.values()), lambda run: scores.of_run(run, rounds) is not None)

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
            code = run_all(free, batch=self.tuning.tune.batch, launch=self._launch)
            for run in free:
                if not has_ended(run) and not is_claimed(run):
                    if code != UserError.exit_code or run.folder in refused:
                        raise UnfinishedError(run, code or 1)
                    refused.add(run.folder)  # perhaps because another process used it, which has died since: once more


class Standing(dict[Trial, tuple[int, scores.Score]]):
    """The last rung of each trial, as its rounds, and the score there."""

    def best(self, strategy: str) -> Trial | None:
        """The best trial of a method among those with the most rounds, or None if all have diverged."""
        ended = [(-rounds, score.key, trial.number, trial) for trial, (rounds, score) in self.items()
                 if trial.strategy == strategy and not score.diverged]  # fmt: skip
        return min(ended, key=lambda entry: entry[:3])[-1] if ended else None


def climb(trainer: Trainer, trials: Sequence[Trial]) -> Standing:
    """Train the trials of all methods through all rungs.

    Raises:
      UnfinishedError, Interrupted: as `Trainer.train_trials`.
    """
    tuning, standing = trainer.tuning, Standing()
    for number, rung in enumerate(tuning.rungs):
        if number:
            trials = [trial for name in tuning.strategies for trial in _promoted(standing, trials, name, rung)]
        tuning.say(f"rung {number + 1} of {len(tuning.rungs)}: {len(trials)} trials to round {rung.rounds}")
        trainer.train_trials(trials, rung.rounds)
        for trial in trials:
            score = scores.of_trial(trial, rung.rounds)
            assert score is not None
            standing[trial] = rung.rounds, score
    return standing


def _promoted(standing: Standing, trials: Sequence[Trial], strategy: str, rung: Rung) -> list[Trial]:
    """The best trials of a method, which continue to a rung."""
    ended = [trial for trial in trials if trial.strategy == strategy and not standing[trial][1].diverged]
    return sorted(ended, key=lambda trial: (standing[trial][1].key, trial.number))[: rung.trials]
