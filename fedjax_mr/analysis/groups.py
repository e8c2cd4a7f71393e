"""Find runs in folders and tables, and group them by settings, so that the seeds of a setting form one group."""

import argparse
import collections
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import registry
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment.folder import STATES
from fedjax_mr.results import kept
from fedjax_mr.tasks import Metric

VALIDATION, VALIDATION_LOSS = "validation_", "validation_loss"  # the first one goes on with the first metric
RUNS = "run folder, table of kept runs (NAME.jsonl.gz), TABLE/PATTERN for some of its runs, or folder that holds some"


class Statistic(NamedTuple):
    """Mean and sample standard deviation over the seeds. None if unknown; a single seed has no deviation."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Statistic":
        """The statistic of some values. If one of them is None, mean and deviation are None."""
        values = list(values)
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(None, None)
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs to the arguments of a command that groups seeds."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)


# --- Runs and their settings ------------------------------------------------------------------------------------------


def find(paths: Path | str | Iterable[Path | str]) -> list[RunRecord]:
    """Read the runs at a path or several: run folders, tables of kept runs, or folders that hold some at any depth.

    They are in the order of the paths. The runs of one path are sorted by strategy and by the values of their settings.

    Raises:
      UserError: a path holds no run, or a run cannot be read.
    """
    ordered: dict[Path, RunRecord] = {}
    for path in map(Path, [paths] if isinstance(paths, Path | str) else paths):
        try:
            inside = kept.find(path)
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror})") from None
        if not inside:
            raise UserError(f"{path} is not a run folder and holds none (no config.json, no table NAME{kept.SUFFIX})")
        ordered |= {run.path: run for run in sorted(runs.read(list(map(str, inside))), key=_order)}
    return runs.with_names(ordered.values())


def _order(run: RunRecord) -> tuple[str, list[tuple[str, str, Any]]]:
    values = titles.facts(run.config)
    # The types first: values of two types, such as a number and None, have no order.
    return run.config.strategy, [(flag, type(value).__name__, value) for flag, value in values.items()]


def seeds(config: Config) -> list[int]:
    """The two seeds of a run: of training, and of the partition of the data."""
    return [config.seed, config.seed if config.partition_seed is None else config.partition_seed]


def by_setting(chosen: Sequence[RunRecord]) -> list[tuple[dict[str, Any], list[RunRecord]]]:
    """Group runs by setting, in their order. The runs of one setting differ only in their seeds.

    A setting has the strategy, and the flags whose values differ between the runs that have them. If several runs have
    the same setting and seed, the most advanced one counts, and the last of several that are equally advanced.

    Flags that change rounding alone are part of a setting only if runs with the same seed differ in them: a newer
    version may have another default.
    """
    facts = _without_rounding(chosen, _facts(chosen))
    once = {
        json.dumps([facts[run.path], *seeds(run.config)]): run.path
        for run in sorted(chosen, key=lambda run: STATES.index(run.state))
    }
    chosen = [run for run in chosen if run.path in once.values()]
    decisive = [facts[run.path] for run in chosen]
    flags = list(dict.fromkeys(flag for each in decisive for flag in each))
    groups: dict[str, tuple[dict[str, Any], list[RunRecord]]] = {}
    for each, run in zip(decisive, chosen, strict=True):
        key = json.dumps({flag: each.get(flag, "-") for flag in flags})
        groups.setdefault(key, (each, []))[1].append(run)
    varied = [flag for flag in titles.varied(decisive) if flag != "strategy"]
    objects = [flag for flag in registry.USER_OBJECTS if flag in varied]
    shown = {flag: registry.short_names({each[flag] for each in decisive}) for flag in objects}
    short = lambda flag, value: shown[flag][value] if flag in shown else value
    return [
        ({"strategy": each["strategy"]} | {flag: short(flag, each[flag]) for flag in varied if flag in each}, members)
        for each, members in groups.values()
    ]


def _without_rounding(chosen: Sequence[RunRecord], facts: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """The settings without those that change rounding alone, or as they are if that makes two runs equal."""
    brief = {run.path: _but_rounding(run.config, facts[run.path]) for run in chosen}
    different = lambda settings: len({json.dumps([settings[run.path], *seeds(run.config)]) for run in chosen})
    return brief if different(brief) == different(facts) else facts


def _but_rounding(config: Config, facts: dict[str, Any]) -> dict[str, Any]:
    rounding = {setting.flag for setting, _ in configuration.setting_values(config) if setting.info.rounding}
    return {flag: value for flag, value in facts.items() if flag not in rounding}


def _facts(chosen: Sequence[RunRecord]) -> dict[Path, dict[str, Any]]:
    """The settings of runs by their paths. Kept runs name files without folders; here, so do all that use the same."""
    whole = {run.path: titles.facts(run.config) for run in chosen}
    brief = {run.path: titles.facts(configuration.portable(run.config)) for run in chosen}
    long: dict[tuple[str, str], set[str]] = collections.defaultdict(set)  # the names with folders of a name without
    for path, own in whole.items():
        for flag, value in own.items():
            if brief[path][flag] != value:
                long[flag, json.dumps(brief[path][flag])].add(json.dumps(value))
    several = lambda flag, value: len(long[flag, json.dumps(value)]) > 1
    return {
        path: {flag: own[flag] if several(flag, value) else value for flag, value in brief[path].items()}
        for path, own in whole.items()
    }


class Index:
    """The runs in a folder, at any depth, by their settings. The runs of one setting differ only in their seeds.

    Attributes:
      folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        """Read the settings of all runs.

        Raises:
          UserError: the folder holds no run.
        """
        self.folder = folder
        self._by_setting: dict[str, list[RunRecord]] = {}
        for run in find(folder):
            self._by_setting.setdefault(_key(run.config), []).append(run)

    def settings(self) -> Iterable[list[RunRecord]]:
        """The runs of each setting."""
        return self._by_setting.values()

    def of(self, config: Config) -> list[RunRecord]:
        """The runs that differ from a configuration only in their seeds, or in settings that change rounding alone."""
        return self._by_setting.get(_key(config), [])


def _key(config: Config) -> str:
    return json.dumps(_but_rounding(config, titles.facts(config)), sort_keys=True)


def by_seed(runs: Sequence[RunRecord]) -> dict[str, float]:
    """The mean of the last ten evaluations of each finished run, by seed; accuracies and other fractions in percent.

    If the partition has another seed, it follows the seed of the run: ``0/7``.
    """
    accuracies = {}
    for run in sorted(runs, key=lambda run: seeds(run.config)):
        seed, partition_seed = seeds(run.config)
        if run.state == "finished":
            name = str(seed) if seed == partition_seed else f"{seed}/{partition_seed}"
            metric = run.metric()
            unit = 100 if metric.unit == "fraction" else 1
            accuracies[name] = unit * float(run.summary()[f"{metric.name}_mean_last_10"])
    return accuracies


def name(setting: Mapping[str, Any]) -> str:
    """A setting as text: the strategy and the flags that differ, such as ``fedmr alpha=0.1 unit=layer``."""
    strategy, *others = setting.items()
    prefix = f"{strategy[1]}_"
    return " ".join([strategy[1], *(f"{flag.removeprefix(prefix)}={value}" for flag, value in others)])


def titles_of(settings: Sequence[tuple[Mapping[str, Any], Sequence[RunRecord]]]) -> list[str]:
    """Names for plots, such as ``FedMR, Dirichlet(0.1)``, of the settings that `by_setting` returns."""
    known = [{**titles.facts(members[0].config), **setting} for setting, members in settings]
    names = [
        ", ".join([titles.method(own), *titles.words(setting, own, brief=True)])
        for (setting, _), own in zip(settings, known, strict=True)
    ]
    return [", ".join(filter(None, each)) for each in zip(names, titles.differences(names, known), strict=True)]


def short_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings as text, without the flags that have the same value in all settings of a strategy."""

    def differs(flag: str, strategy: str) -> bool:
        values = [json.dumps(each.get(flag, "-")) for each in settings if each["strategy"] == strategy]
        return flag == "strategy" or len(set(values)) > 1

    return [name({flag: each[flag] for flag in each if differs(flag, each["strategy"])}) for each in settings]


# --- The best of some settings ----------------------------------------------------------------------------------------

FAULTS = ("diverged", "unfinished", "without validation accuracy")


class Candidate(NamedTuple):
    """One combination of values of the compared flags, and its runs, one per seed."""

    values: dict[str, Any]
    runs: list[RunRecord]

    def finished(self) -> dict[str, RunRecord]:
        """The finished runs by their seeds."""
        return {str(seeds(run.config)): run for run in self.runs if run.state == "finished"}

    @property
    def fault(self) -> str:
        """The reason in `FAULTS` why it cannot be the best one; "" if it can."""
        if any(run.state == "diverged" for run in self.runs):
            return "diverged"
        if not self.finished():
            return "unfinished"
        validated = all(_final(run, VALIDATION) is not None for run in self.finished().values())
        return "" if validated else "without validation accuracy"  # a run of an earlier version

    def mean(self, column: str, seeds: Sequence[str] | None = None) -> Statistic:
        """The statistic of a final result over some seeds. Default: all finished ones.

        The columns "" and those that end in ``_`` are of the first metric, such as ``validation_accuracy``.
        """
        finished = self.finished()
        chosen = finished.values() if seeds is None else [finished[seed] for seed in seeds]
        return Statistic.of(_final(run, column) for run in chosen)

    @property
    def metric(self) -> Metric:
        """The metric by which its runs are judged."""
        return next(run.metric() for run in self.runs if run.state == "finished")


class Choice(NamedTuple):
    """A setting, its candidates, and the best of them. The best is None if no candidate has a finished run."""

    setting: dict[str, Any]
    candidates: list[Candidate]
    best: Candidate | None


def end_of(value: Any, tried: Iterable[Any]) -> str:
    """Return "least" or "largest" if a number is at that end of the different numbers that were tried, else ""."""
    numbers = {each for each in tried if isinstance(each, int | float) and not isinstance(each, bool)}
    ends = {"least": min, "largest": max}
    return next((name for name, end in ends.items() if len(numbers) > 1 and value == end(numbers)), "")


def choose(chosen: Sequence[RunRecord], *, over: Sequence[str]) -> list[Choice]:
    """Choose the best candidate of each setting by validation accuracy.

    Args:
      chosen: runs, as `find` returns them.
      over: the flags whose values are compared.

    Raises:
      UserError: no run has one of the flags, or no finished run has a validation accuracy.
    """
    flags = {flag for run in chosen for flag in titles.facts(run.config)}
    for flag in over:
        if flag not in flags:
            raise unknown_name("flag in --over", flag, sorted(flags))
    grids: dict[str, tuple[dict[str, Any], list[Candidate]]] = {}
    for setting, members in by_setting(chosen):
        known = titles.facts(members[0].config)
        values = {flag: known[flag] for flag in over if flag in known}
        others = {flag: value for flag, value in setting.items() if flag not in over}
        grids.setdefault(json.dumps(others), (others, []))[1].append(Candidate(values, members))
    finished = [run for run in chosen if run.state == "finished"]
    if finished and all(_final(run, VALIDATION) is None for run in finished):
        column = f"{VALIDATION}{finished[0].metric().name}"
        raise UserError(f"{finished[0].path} has no {column}: train the runs with --validation_share")
    return [Choice(setting, candidates, _best(candidates)) for setting, candidates in grids.values()]


def _final(run: RunRecord, column: str) -> float | None:
    """A final result of a finished run. None if it is missing."""
    column += run.metric().name if column.endswith("_") or not column else ""
    return (run.summary() | run.rows()[-1]).get(column)


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    candidates = [each for each in candidates if not each.fault]
    if not candidates:
        return None
    common = sorted(set.intersection(*(set(each.finished()) for each in candidates)))
    if not common:
        names = ", ".join(map(str, candidates[0].values))
        raise UserError(
            f"no seed has a run for every value of {names} (see {candidates[0].runs[0].path}): run the same seeds"
        )

    def score(candidate: Candidate) -> tuple[float, float]:
        """Sorts as `fedjax_mr.tune` does: by the first metric, ties by the loss."""
        value, loss = (candidate.mean(column, common).mean for column in (VALIDATION, VALIDATION_LOSS))
        sign = 1 if candidate.metric.higher_is_better else -1
        return sign * (value or 0.0), -math.inf if loss is None else -loss

    return max(candidates, key=score)
