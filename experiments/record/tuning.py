"""Tables of trials, and the table of equal tuning: each method has the same number of trials before it is tested.

The trials behind the runs in ``results/NAME*.jsonl.gz`` are in ``results/NAME_tuning.jsonl.gz``. The chosen setting of
a method is the one with the best validation accuracy.
"""

from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr.analysis import groups, tables
from fedjax_mr.analysis.paired import LEVEL, difference
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.results import kept
from record import comparisons
from record.comparisons import ONE_SETTING, Comparison, Record

TRIALS = f"_tuning{kept.SUFFIX}"  # end of the name of a table of trials
EQUAL = "cifar10_equal"  # the tests of equal tuning
OF_METHOD = ("strategy", "model", "lr")  # beside the flags that carry its name
METHODS = ("fedavg", "fedprox", "scaffold", "fedgamma", "fedmr", "fedcross", "fedmut", "feddyn")


class Tuned(NamedTuple):
    """The chosen setting of a method.

    Attributes:
      config: configuration of the chosen trial.
      values: the searched flags with their chosen values.
      trials: number of trials T.
      diverged: number of diverged trials.
      validation: validation accuracy of the chosen trial in percent.
    """

    config: Config
    values: dict[str, Any]
    trials: int
    diverged: int
    validation: float

    def chose(self, config: Config) -> bool:
        """Whether a run has the chosen setting."""
        return _method(config) == _method(self.config)

    def budget(self, config: Config) -> str:
        """The size of the search in words, with the partition of the data if a run has another one."""
        size = f"{self.trials} trials of {self.config.rounds} rounds"
        division, trial_division = (titles.division(titles.facts(config_of)) for config_of in (self.config, config))
        return size if division == trial_division else f"{size}, {division}"


def _method(config: Config) -> dict[str, Any]:
    """The settings of a run that belong to its method."""
    facts = titles.facts(config)
    return {flag: facts[flag] for flag in facts if flag in OF_METHOD or flag.startswith(f"{config.strategy}_")}


def read(table: Path) -> list[Tuned]:
    """The chosen settings of a table of trials.

    The searched flags of a method are those of its own and the learning rate, if its trials differ in them.

    Raises:
      UserError: the table cannot be read.
    """
    by_strategy: dict[str, list[RunRecord]] = {}
    for run in groups.find([table]):
        by_strategy.setdefault(run.config.strategy, []).append(run)
    lines = []
    for strategy, runs in by_strategy.items():
        differing = titles.varied([titles.facts(run.config) for run in runs])
        searched = [flag for flag in differing if flag == "lr" or flag.startswith(f"{strategy}_")]
        for _, candidates, best in groups.choose(runs, over=searched) if searched else ():
            if best is not None:
                score = best.mean(groups.VALIDATION).mean
                assert score is not None  # a candidate without it is never the best
                diverged = sum(candidate.fault == "diverged" for candidate in candidates)
                lines.append(Tuned(best.runs[0].config, best.values, len(candidates), diverged, 100 * score))
    return lines


def behind(table: Path) -> list[Tuned]:
    """The chosen settings of the tables of trials that belong to a table of runs. A table of trials has none."""
    if table.name.endswith(TRIALS):
        return []
    files = sorted(table.parent.glob(f"*{TRIALS}"))
    table_files = [trials for trials in files if table.name.startswith(trials.name.removesuffix(TRIALS))]
    return [trial for trials in table_files for trial in read(trials)]


def equal_table(record: Record) -> str:
    """Equal tuning: the chosen settings, their tests compared with FedAvg and with the untuned method, and bytes."""
    trials = record.kept.folder / f"{EQUAL}{TRIALS}"
    choices = {trial.config.strategy: trial for trial in read(trials)} if trials.exists() else {}
    tests = {name: comparisons.compare(record.kept, *ONE_SETTING, *_flags(trial)) for name, trial in choices.items()}
    names = sorted(METHODS, key=lambda name: -(tests[name].own.mean or 0.0) if name in tests else 1.0)
    points = [f"points above FedAvg [{LEVEL:.0%} confidence]", "points above untuned"]
    head = ["method", "chosen", "trials", "validation %", "test %", *points, "bytes, times FedAvg's"]
    rows = [_row(record, name, choices.get(name), tests.get(name), tests.get("fedavg")) for name in names]
    return tables.markdown([head, *rows])


def _row(
    record: Record, name: str, tuned: Tuned | None, test: Comparison | None, fedavg: Comparison | None
) -> list[str]:
    title = titles.method({"strategy": name})
    if tuned is None or test is None:
        return [title, f"**{comparisons.NOT_RUN}**", *[""] * 6]
    untuned = comparisons.compare(record.kept, *ONE_SETTING, f"--strategy={name}")
    lead = difference(test.by_seed, fedavg.by_seed) if fedavg is not None and test is not fedavg else None
    gain = difference(test.by_seed, untuned.by_seed)
    values = ", ".join(f"{flag.removeprefix(f'{name}_')} {value}" for flag, value in tuned.values.items())
    count = f"{tuned.trials}, {tuned.diverged} diverged" if tuned.diverged else str(tuned.trials)
    bytes = ""
    if fedavg is not None and test.by_seed and fedavg.by_seed:
        bytes = f"{comparisons.bytes_sent(test) / comparisons.bytes_sent(fedavg):.1f}"
    tested = [comparisons.accuracy_text(test), str(lead or ""), str(gain or ""), bytes]
    return [title, values, count, f"{tuned.validation:.1f}", *tested]


def _flags(tuned: Tuned) -> list[str]:
    return [f"--strategy={tuned.config.strategy}", *(f"--{flag}={value}" for flag, value in tuned.values.items())]
