"""The plan of a tuning: its settings, rungs, trials and tests."""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.experiment import keeps_validation
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import runs_by_settings
from fedjax_mr.settings import LARGEST_INT32, field
from fedjax_mr.sweep import PlannedRun, grids
from fedjax_mr.sweep.plan import Training, plan_run
from fedjax_mr.tune import space as spaces
from fedjax_mr.tune.space import Choice, Space

VALIDATION_SHARE = 0.2  # of trials without --validation_share
TESTS = 3  # seeds of the tests without --seeds
HALTON = "halton"
SAMPLERS = (HALTON, "tpe", "gp")


@dataclasses.dataclass(frozen=True)
class Tune(Training):
    """The settings of a tuning, in addition to the configuration of its runs."""

    strategies: str | None = field(None, "Methods, separated by commas. If omitted, the one of --strategy")
    budget: int = field(8, "Number of trials T of each method", unit="trials", low=1, high=100_000)
    space: str | None = field(
        None,
        "File with one flag per line and its values or range, such as --lr=0.01,0.1, --lr=log:0.001:0.3 or "
        "--momentum=lin:0:0.9. A flag that only some methods have is searched for these. If omitted, the learning "
        "rate from a tenth to ten times --lr",
        path=True,
    )
    sampler: str = field(
        HALTON,
        "How trials are proposed: points of a scrambled Halton sequence, the same for all methods (halton), or by "
        "Optuna (extra optuna) from the scores of earlier trials, with Parzen estimators (tpe) or a Gaussian process "
        "(gp, which also needs PyTorch). A grid of at most T settings is tried completely, whatever the sampler",
        choices=SAMPLERS,
    )
    eta: int = field(
        3,
        "After a part of the rounds the best 1/eta of the trials continue, as in successive halving. 1 trains all "
        "trials to the end",
        low=1,
        high=1000,
        source="Li et al., Hyperband, JMLR 2018: 3 or 4",
    )
    tuning_seeds: str | None = field(
        None, "Seeds of the trials, such as 0,1 or 0:3. Their scores are averaged. If omitted, the one of --seed"
    )
    seeds: str | None = field(
        None, "Seeds of the tests of the chosen settings. If omitted, the three seeds after those of the trials"
    )
    tune_dir: str = field("runs/tune", "Folder of the trials, the tests and the results", path=True)
    dry_run: bool = field(False, "Print the plan and train nothing")


class Rung(NamedTuple):
    """A stage of successive halving: this number of trials of each method is trained up to this round."""

    trials: int
    rounds: int


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One setting of a method.

    Attributes:
      strategy: the method.
      number: its number among the trials of the method, from 0.
      choice: the flags that it sets.
      runs: its runs, one per seed, with all rounds.
    """

    strategy: str
    number: int
    choice: Choice
    runs: tuple[PlannedRun, ...]

    def until(self, rounds: int) -> list[PlannedRun]:
        """Its runs, planned with fewer rounds."""
        return [dataclasses.replace(run, config=dataclasses.replace(run.config, rounds=rounds)) for run in self.runs]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A planned tuning.

    Attributes:
      arguments: the flags of the command.
      config: the configuration that they describe, without the settings of a trial.
      tune: the settings of the tuning.
      strategies: the methods.
      space: the search space.
      rungs: the stages, with ascending rounds.
      tuning_seeds, seeds: seeds of the trials and of the tests; no seed is in both.
    """

    arguments: tuple[str, ...]
    config: Config
    tune: Tune
    strategies: tuple[str, ...]
    space: Space
    rungs: tuple[Rung, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def folder(self) -> Path:
        """The folder of the tuning."""
        return Path(self.tune.tune_dir)

    @property
    def validation_share(self) -> float:
        """The fraction of a client's training samples that trials keep for validation."""
        return self.config.validation_share or VALIDATION_SHARE

    def say(self, line: str) -> None:
        """Print a line about the progress on standard error."""
        if self.config.progress:
            print(f"fedjax-mr: {line}", file=sys.stderr)

    def trial(self, strategy: str, number: int, choice: Choice) -> Trial:
        """Plan a trial.

        Raises:
          UserError: a bad value.
        """
        runs = []
        for seed in self.tuning_seeds:
            run = self.run("trials", strategy, seed, choice)
            begun = self._begun.get(configuration.digest(dataclasses.replace(run.config, rounds=1)))
            runs.append(dataclasses.replace(run, folder=begun[-1]) if begun else run)
        return Trial(strategy, number, choice, tuple(runs))

    @functools.cached_property
    def _begun(self) -> dict[str, list[Path]]:
        """The folders of trials by the digest of their settings; a trial is the same whatever its rounds."""
        return runs_by_settings(self.folder / "trials", rounds=1)

    def tests(self, trial: Trial) -> list[PlannedRun]:
        """Plan the tests of a trial's setting. They are the runs that a sweep with these flags would train."""
        return [self.run("tests", trial.strategy, seed, trial.choice) for seed in self.seeds]

    def run(self, kind: str, strategy: str, seed: int, choice: Choice) -> PlannedRun:
        """Plan one run of the ``trials`` or the ``tests``."""
        more = [f"--validation_share={self.validation_share}"] if kind == "trials" else []
        return plan_run(
            [*self.arguments, *more], Tune, strategy=strategy, seed=seed, chosen=choice, parent=self.folder / kind
        )

    def drawn(self, strategy: str) -> list[Trial]:
        """The trials of a method whose settings do not depend on results."""
        choices = spaces.draw(self.space, strategy, self.tune.budget, self.config.seed)
        return [self.trial(strategy, number, choice) for number, choice in enumerate(choices)]

    def is_drawn(self, strategy: str) -> bool:
        """Whether the trials of a method are known before any is trained."""
        return self.tune.sampler == HALTON or spaces.grid(self.space, strategy, self.tune.budget) is not None


def plan(arguments: Sequence[str]) -> Tuning:
    """Parse a tuning from command-line flags and check it.

    Raises:
      UserError: a bad flag, or a bad value of the space; nothing was trained.
    """
    config, tune = configuration.parse_command(arguments, Tune)
    if config.run_dir or config.overwrite:
        raise UserError("a tuning chooses its run folders inside --tune_dir: remove --run_dir and --overwrite")
    if config.stop_at_accuracy is not None:
        raise UserError("--stop_at_accuracy reads the test accuracy, which a tuning must not use: remove it")
    if config.patience is not None and not config.validation_share:
        raise UserError(
            "--patience would read the test loss in the final runs: also set --validation_share, or omit it"
        )
    if str(config.partition_file).endswith(".npz") and not keeps_validation(federated_data(config)):
        raise UserError(f"{config.partition_file} has no validation samples, so there is nothing to choose on")
    strategies = tuple(dict.fromkeys(grids.split("strategies", tune.strategies, config.strategy)))
    tuning_seeds = tuple(dict.fromkeys(grids.seeds_of(tune.tuning_seeds, "tuning_seeds"))) or (config.seed,)
    after = max(tuning_seeds) + 1
    if tune.seeds is None and after + TESTS > LARGEST_INT32:
        raise UserError(f"no seed follows {max(tuning_seeds)}: set --seeds")
    seeds = tuple(dict.fromkeys(grids.seeds_of(tune.seeds))) or tuple(range(after, after + TESTS))
    if both := sorted(set(seeds) & set(tuning_seeds)):
        raise UserError(f"seed {both[0]} is in --seeds and in the trials' seeds: test on seeds that chose nothing")
    space = spaces.read(tune.space) if tune.space else spaces.default(config)
    rungs = rungs_of(tune.budget, tune.eta, config.rounds, config.eval_every)
    if config.dp_target_epsilon is not None and len(rungs) > 1:
        raise UserError(
            "--dp_target_epsilon chooses the noise for all rounds, and some trials stop earlier: add --eta=1, or set "
            "--dp_noise"
        )
    tuning = Tuning(tuple(arguments), config, tune, strategies, space, rungs, tuning_seeds, seeds)
    _check(tuning)
    return tuning


def rungs_of(trials: int, eta: int, rounds: int, eval_every: int) -> tuple[Rung, ...]:
    """The rungs of successive halving.

    At least two trials reach the last rung, because a single one leaves nothing to choose. Rungs end at a regular
    evaluation, which stays in the metrics of a run that continues.

    Args:
      trials: number of trials at the start.
      eta: the best 1/eta continue; 1 for a single rung.
      rounds: rounds of the last rung.
      eval_every: rounds between evaluations.
    """
    cuts = 0
    while eta > 1 and trials // eta ** (cuts + 1) >= 2:
        cuts += 1
    rungs: dict[int, int] = {}
    for cut in range(cuts + 1):
        evaluations = math.ceil(rounds / eta ** (cuts - cut) / eval_every)
        rungs.setdefault(min(rounds, evaluations * eval_every), trials // eta**cut)
    return tuple(Rung(trials, rounds) for rounds, trials in rungs.items())


def _check(tuning: Tuning) -> None:
    """Check every value of the space before anything is trained."""
    for strategy in tuning.strategies:
        dimensions = spaces.of_method(tuning.space, strategy).values()
        first = {each: each.ends()[0] for each in dimensions}
        points = [first, *(first | {each: value} for each in dimensions for value in each.ends()[1:])]
        for point in points:
            tuning.run("trials", strategy, tuning.tuning_seeds[0], spaces.choice(point))
