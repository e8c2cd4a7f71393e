"""Train trials rung by rung, and keep the best of each rung.

All trials of a rung end before the best are chosen, so all methods have equal numbers of trials in each rung. Optuna's
`SuccessiveHalvingPruner` decides when a single trial arrives, so its numbers depend on the order in which trials end.
"""

from collections.abc import Sequence

from fedjax_mr.sweep.trainer import RunTrainer
from fedjax_mr.tune import scores
from fedjax_mr.tune.plan import Rung, Trial, Tuning


class Trainer(RunTrainer):
    """Trains the runs of a tuning.

    Attributes:
      tuning: the plan.
    """

    def __init__(self, tuning: Tuning) -> None:
        """Start nothing yet."""
        super().__init__(tuning.tune, tuning.folder)
        self.tuning = tuning

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
