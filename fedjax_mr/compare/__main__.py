"""The command ``python -m fedjax_mr.compare``: train paired seeds of methods until one is better, or they are equal."""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.analysis.ledger import BUDGETS, replay
from fedjax_mr.analysis.paired import ALPHA
from fedjax_mr.compare.train import BLOCK, MOST_SEEDS, UNTIL, compare
from fedjax_mr.compare.tuned import Tuned
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import unequal_shares
from fedjax_mr.settings import field
from fedjax_mr.sweep import PlannedRun, grids
from fedjax_mr.sweep.plan import Training, plan_run
from fedjax_mr.sweep.trainer import RunTrainer
from fedjax_mr.terminal import commands, interrupts
from fedjax_mr.terminal.messages import flags_in_errors

COMMAND = "python -m fedjax_mr.compare"
USAGE = f"""usage: {COMMAND} --strategies=NAMES [--flag=value ...] [--flagfile=FILE ...]

Train methods on paired seeds, block after block, until it is decided which one is better, or that they are equal within
a margin. The same command again continues after a stop or a kill. The runs are described by the flags of
{configuration.COMMAND} (see its --help=all), and the comparison by these:
"""


@dataclasses.dataclass(frozen=True)
class Settings(Training):
    """The settings of a comparison, in addition to the configuration of its runs."""

    batch: bool = field(
        True,
        "Train the runs of a method in a block in one compiled program where that pays. Other runs train one by one",
    )
    strategies: str | None = field(None, "Methods, separated by commas. If omitted, the one of --strategy")
    grid: tuple[str, ...] = field(
        (), "A setting and its values, as in a sweep, such as fedmr_stage1_rounds=0,50. Each value is another method"
    )
    metric: str | None = field(
        None,
        "Column of the evaluations that is compared, such as accuracy, loss or personal_accuracy: the mean of the last "
        "ten evaluations. If omitted, the first metric of the task",
    )
    margin: float | None = field(
        None,
        "Difference that does not matter, in units of the metric. Two methods within it are equal. If omitted, 0.01 "
        "for fractions such as the accuracy, and 0 for other metrics",
        low=0,
    )
    error: float = field(ALPHA, "Probability of any wrong verdict", low=0, high=1, open_low=True, open_high=True)
    until: str = field(
        "decided", "When to stop: when all pairs are decided, or after all seeds (budget)", choices=UNTIL
    )
    most_seeds: int = field(MOST_SEEDS, "Seeds after which a pair is undecided", unit="seeds", low=1, high=10_000)
    block: int = field(BLOCK, "Seeds between two looks", unit="seeds", low=1, high=10_000)
    equal: str = field(
        "rounds",
        "What the methods have the same amount of: rounds, images (training samples), bytes, or clock (simulated "
        "seconds). A longer run counts up to its last evaluation within the amount of the shorter one",
        choices=tuple(BUDGETS),
    )
    tuned: str | None = field(
        None,
        "Folder of python -m fedjax_mr.tune. Each method has the settings that were chosen there on validation "
        "samples, and the comparison has other seeds",
        path=True,
    )
    compare_dir: str = field("runs/compare", "Folder of the runs and of the ledger", path=True)
    replay: str | None = field(
        None, "Ledger whose verdicts are computed again from its values. Nothing is trained", path=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code.

    0: success, decided or not; 1: a run aborted; 2: bad input; 3: a run diverged; 128 + n: signal n.

    Args:
      arguments: flags without the name of the program. Default: those of the command line.
    """
    return commands.of_several_runs(_compare_or_replay, arguments, usage=USAGE, settings=Settings)


def _compare_or_replay(arguments: list[str]) -> None:
    config, settings = configuration.parse_command(arguments, Settings)
    if settings.replay is not None:
        print(replay(settings.replay).table())
        return
    with imports.blamed(), flags_in_errors(config.strategy):
        _compare(arguments, config, settings)


def _compare(arguments: Sequence[str], config: Config, settings: Settings) -> None:
    if config.run_dir or config.overwrite:
        raise UserError("a comparison chooses its run folders inside --compare_dir: remove --run_dir and --overwrite")
    strategies = list(dict.fromkeys(grids.split("strategies", settings.strategies, config.strategy)))
    tuned = Tuned.read(settings.tuned, strategies) if settings.tuned else None
    seed = config.seed if tuned is None else tuned.next_seed(config.seed)
    methods = _configs(arguments, settings, strategies, seed, tuned)
    for note in unequal_shares(methods):
        print(note, file=sys.stderr)
    with RunTrainer(settings, Path(settings.compare_dir)) as trainer:

        def train(runs: Sequence[PlannedRun]) -> None:
            trainer.train(runs, lambda run: run.state() in ("finished", "diverged"))

        result = compare(
            *methods,
            metric=settings.metric,
            margin=settings.margin,
            error=settings.error,
            until=settings.until,
            most_seeds=settings.most_seeds,
            block=settings.block,
            equal=settings.equal,
            folder=settings.compare_dir,
            tuning=None if tuned is None else tuned.facts(),
            train=train,
            progress=config.progress,
        )
    print(result.table())
    print(f"results: {settings.compare_dir}")


def _configs(
    arguments: Sequence[str], settings: Settings, strategies: Sequence[str], seed: int, tuned: Tuned | None
) -> list[Config]:
    """The configurations of the methods: the product of strategies and values of the grid, each once."""
    grid = grids.grid_of(settings.grid, strategies)
    found: dict[str, Config] = {}
    for strategy, values in itertools.product(strategies, itertools.product(*grid)):
        chosen: Mapping[str, Any] = dict(pair for pairs in values for pair in pairs)
        if tuned is not None:
            chosen = {**tuned.choices[strategy], **chosen}
        run = plan_run(
            arguments, Settings, strategy=strategy, seed=seed, chosen=chosen, parent=Path(settings.compare_dir)
        )
        found.setdefault(configuration.digest(run.config), run.config)
    return list(found.values())


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
