"""Train trials rung by rung, and keep the best of each rung."""

import itertools
import time
from collections.abc import Callable, Sequence

from fedjax_mr.errors import UserError
from fedjax_mr.sweep import PlannedRun, slurm
from fedjax_mr.sweep.process import SECONDS_PER_LOOK, is_claimed, log_of
from fedjax_mr.sweep.runs import run_all
from fedjax_mr.tune import scores
from fedjax_mr.tune.plan import Rung, Trial, Tuning


class UnfinishedError(UserError):
    """A run did not finish, so no trial can be chosen."""

    def __init__(self, run: PlannedRun, code: int) -> None:
        """Keep the exit code."""
        super().__init__(f"{run.folder} did not finish; see {log_of(run)}, and run the same command again")
        self.exit_code = code


def train_trials(tuning: Tuning, trials: Sequence[Trial], rounds: int) -> None:
    """Train trials up to a round.

    Raises:
      UnfinishedError: a run failed for another reason than divergence.
      Interrupted: a stop signal was received.
    """
    runs = {run.folder: run for trial in trials for run in trial.until(rounds)}  # two trials may be the same setting
    train(tuning, list(runs.values()), lambda run: scores.of_run(run, rounds) is not None)


def train(tuning: Tuning, runs: Sequence[PlannedRun], has_ended: Callable[[PlannedRun], bool]) -> None:
    """Train runs until all have ended. Runs that another process trains are awaited; if it dies, they are taken over.

    Raises:
      UnfinishedError: a run failed.
      Interrupted: a stop signal was received.
    """
    tune = tuning.tune
    launch = slurm.launcher(tune, tuning.folder) if tune.launcher == "slurm" else None
    while unfinished := [run for run in runs if not has_ended(run)]:
        free = [run for run in unfinished if not is_claimed(run)]
        if not free:
            time.sleep(SECONDS_PER_LOOK)
            continue
        code = run_all(free, batch_seeds=tune.batch_seeds, launch=launch)
        for run in free:
            if not has_ended(run) and not is_claimed(run):
                raise UnfinishedError(run, code or 1)


class Standing(dict[Trial, tuple[int, scores.Score]]):
    """The last rung of each trial, as its rounds, and the score there."""

    def best(self, strategy: str) -> Trial | None:
        """The best trial of a method among those with the most rounds, or None if all have diverged."""
        ended = [(-rounds, score.key, trial.number, trial) for trial, (rounds, score) in self.items()
                 if trial.strategy == strategy and not score.diverged]  # fmt: skip
        return min(ended, key=lambda entry: entry[:3])[-1] if ended else None


def climb(tuning: Tuning, trials: Sequence[Trial]) -> Standing:
    """Train the trials through all rungs.

    Args:
      tuning: the plan.
      trials: the trials of all methods.

    Raises:
      UnfinishedError, Interrupted: as `train_trials`.
    """
    standing, rungs = Standing(), tuning.rungs
    for number, rung in enumerate(rungs):
        tuning.say(f"rung {number + 1} of {len(rungs)}: {len(trials)} trials to round {rung.rounds}")
        train_trials(tuning, trials, rung.rounds)
        for trial in trials:
            score = scores.of_trial(trial, rung.rounds)
            assert score is not None
            standing[trial] = rung.rounds, score
        if number + 1 < len(rungs):
            promoted = (_promoted(standing, trials, strategy, rungs[number + 1]) for strategy in tuning.strategies)
            trials = list(itertools.chain.from_iterable(promoted))
    return standing


def _promoted(standing: Standing, trials: Sequence[Trial], strategy: str, rung: Rung) -> list[Trial]:
    """The best trials of a method, which continue to a rung."""
    ended = [trial for trial in trials if trial.strategy == strategy and not standing[trial][1].diverged]
    return sorted(ended, key=lambda trial: (standing[trial][1].key, trial.number))[: rung.trials]
