"""Trials that a sampler of Optuna proposes from the scores of earlier ones: one study per method.

The studies are in ``optuna.log``, which the processes of a tuning share. A process asks for a trial, trains it to the
first rung and tells its score. If a process dies, its trial has no score, and its runs are not claimed by any process.
The next process that looks for work trains it.

Each trial is proposed by a sampler with a seed of its own. A single process that is killed therefore proposes the same
trials as an uninterrupted one, also if ``optuna.log`` is lost: finished runs give their scores again.
"""

import hashlib
import importlib.util
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.sweep.process import SECONDS_PER_LOOK, is_claimed
from fedjax_mr.tune import scores
from fedjax_mr.tune import space as spaces
from fedjax_mr.tune.plan import Trial, Tuning
from fedjax_mr.tune.rungs import Trainer
from fedjax_mr.tune.space import Dimension

STORAGE = "optuna.log"
NEEDS = {"tpe": ("optuna",), "gp": ("optuna", "torch")}
"""The packages of each sampler."""
WORST, WORST_ERROR = 0.0, -1e9  # told for a trial that diverged, so that the sampler avoids its neighbourhood


def _told(score: scores.Score) -> float:
    """The number that the study maximises: a metric of which less is better has its sign changed."""
    if score.value is None:
        return WORST if score.metric.unit == "fraction" else WORST_ERROR
    return score.value if score.metric.higher_is_better else -score.value


def check(sampler: str) -> None:
    """Check that the packages of a sampler are installed.

    Raises:
      UserError: one is missing.
    """
    for package in NEEDS[sampler]:
        if importlib.util.find_spec(package) is None:
            how = "torch" if package == "torch" else "'fedjax_mr[optuna]'"
            raise UserError(f"--sampler={sampler} needs {package}: pip install {how}")


def first_rung(trainer: Trainer, strategies: Sequence[str]) -> list[Trial]:
    """Ask for all trials of some methods and train them to the first rung, together with other processes.

    Raises:
      UserError: Optuna's file is damaged.
      UnfinishedError, Interrupted: as `Trainer.train_trials`.
    """
    tuning = trainer.tuning
    tuning.say(f"trials that Optuna proposes, to round {tuning.rungs[0].rounds}")
    studies = [_Study(tuning, strategy) for strategy in strategies]
    while not all(study.is_complete() for study in studies):
        trials = [trial for study in studies if (trial := study.next()) is not None]
        if not trials:
            time.sleep(SECONDS_PER_LOOK)  # the last ones are trained by other processes
        trainer.train_trials(trials, tuning.rungs[0].rounds)
        for study in studies:
            study.tell()
    return [trial for study in studies for trial in study.trials()]


class _Study:
    """The study of one method."""

    def __init__(self, tuning: Tuning, strategy: str) -> None:
        self.optuna = _optuna()
        self.tuning, self.strategy = tuning, strategy
        self.space = spaces.of_method(tuning.space, strategy)
        self.study: Any = self._open(tuning.folder / STORAGE, _name(tuning, strategy))
        self._planned: dict[int, Trial] = {}

    def _open(self, path: Path, name: str) -> Any:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # An absolute path, because the lock is a link to it, which must not dangle.
            backend = self.optuna.storages.journal.JournalFileBackend(str(path.absolute()))
            storage = self.optuna.storages.JournalStorage(backend)
            return self.optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        except OSError as error:
            raise UserError(f"cannot write into {path.parent} ({error.strerror})") from None
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{path} is damaged ({' '.join(str(error).split())}): remove it; the scores are in the run folders"
            ) from None

    def _records(self) -> list[Any]:
        """Optuna's records of the first T trials that have parameters.

        Processes that ask at the same moment may create more. A record without parameters belongs to a process that
        still asks for them, or was killed then.
        """
        failed, flags = self.optuna.trial.TrialState.FAIL, {each.flag for each in self.space.values()}
        known = self.study.get_trials(deepcopy=False)
        whole = [record for record in known if flags <= record.params.keys() and record.state != failed]
        return whole[: self.tuning.tune.budget]

    def is_complete(self) -> bool:
        """Whether all T trials have a score."""
        records = self._records()
        return len(records) == self.tuning.tune.budget and all(record.state.is_finished() for record in records)

    def trials(self) -> list[Trial]:
        """The trials in the order of their numbers."""
        return [self._trial(record) for record in self._records()]

    def next(self) -> Trial | None:
        """A trial to train: one that no process trains, or a new one. None if none is left."""
        records = self._records()
        for record in records:
            if not record.state.is_finished() and not any(map(is_claimed, self._trial(record).runs)):
                return self._trial(record)
        if len(records) == self.tuning.tune.budget:
            return None
        number = len(records)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about features that may change
            self.study.sampler = self._sampler(_seed(self.tuning.config.seed, number))
            asked = self.study.ask({each.flag: self._distribution(each) for each in self.space.values()})
        if asked.number not in [record.number for record in self._records()]:  # others have asked at the same moment
            self.study.tell(asked.number, state=self.optuna.trial.TrialState.FAIL)
            return None
        return self._trial(asked)

    def tell(self) -> None:
        """Tell the scores of all trials that are trained to the first rung."""
        for record in self._records():
            if not record.state.is_finished():
                score = scores.of_trial(self._trial(record), self.tuning.rungs[0].rounds)
                if score is not None:
                    self.study.tell(record.number, _told(score), skip_if_finished=True)

    def _distribution(self, dimension: Dimension) -> Any:
        of = self.optuna.distributions
        if dimension.values:
            return of.CategoricalDistribution(dimension.values)
        if dimension.whole:
            return of.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
        return of.FloatDistribution(dimension.low, dimension.high, log=dimension.log)

    def _sampler(self, seed: int) -> Any:
        """The sampler. It proposes a quarter of the budget, at least two trials and at most ten, at random."""
        startup = min(10, max(2, self.tuning.tune.budget // 4))
        samplers = self.optuna.samplers
        kind = {"tpe": samplers.TPESampler, "gp": samplers.GPSampler}
        return kind[self.tuning.tune.sampler](seed=seed, n_startup_trials=startup)

    def _trial(self, record: Any) -> Trial:
        if record.number not in self._planned:
            texts = {each: _text(each, record.params[each.flag]) for each in self.space.values()}
            self._planned[record.number] = self.tuning.trial(self.strategy, record.number, spaces.choice(texts))
        return self._planned[record.number]


def _text(dimension: Dimension, value: Any) -> str:
    return value if dimension.values else dimension.text(value)


def _seed(seed: int, number: int) -> int:
    """The seed of the sampler that proposes a trial."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def _name(tuning: Tuning, strategy: str) -> str:
    """The name of a study, with a hash of all that its scores depend on."""
    dimensions = spaces.of_method(tuning.space, strategy).values()
    searched = {flag for each in dimensions for flag in each.flags()}
    config = tuning.run("trials", strategy, tuning.tuning_seeds[0], {}).config
    known = {flag: value for flag, value in configuration.decisive(config).items() if flag not in searched}
    facts: list[Any] = [known | {"seed": 0, "rounds": 1}, [each.line() for each in dimensions], tuning.tuning_seeds]
    facts += [tuning.rungs[0].rounds, tuning.tune.sampler]
    return f"{strategy}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]}"


def _optuna() -> Any:
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
