"""Runs found in folders and grouped by their settings, so that the seeds of a setting stand together."""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr import registry
from fedjax_mr.analysis import runs
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import kept, titles
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.folder import STATES

VALIDATION = "validation_accuracy"
RUNS = "run folder, table of kept runs (NAME.jsonl.gz), TABLE/PATTERN for some of its runs, or folder that holds some"


class Statistic(NamedTuple):
    """Mean and sample standard deviation over the seeds; None where there is nothing to say."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Statistic":
        """Return the statistic of values; if one of them is missing there is none."""
        known = []
        for value in values:
            if value is None:
                return cls(None, None)
            known.append(value)
        if not known:
            return cls(None, None)
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run folders of a command that joins the seeds of a setting."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)


# --- Runs and their settings ------------------------------------------------------------------------------------------


def find(paths: Iterable[Path | str]) -> list[RunRecord]:
    """Return the runs of run folders and of folders that hold some, at any depth.

    They come in the order of the paths, and those of one folder by strategy and by the values of their settings.

    Raises:
      UserError: a path holds no run folder.
    """
    ordered: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = kept.find(path)
        if not inside:
            raise UserError(f"{path} is not a run folder and holds none (no config.json, no NAME{kept.SUFFIX})")
        ordered |= dict.fromkeys(run.path for run in sorted(runs.read(list(map(str, inside))), key=_order))
    return runs.read(list(map(str, ordered)))


def _order(run: RunRecord) -> tuple[str, list[tuple[str, str, Any]]]:
    values = titles.facts(run.config)
    # The types first: values of two types, such as a number and None, have no order.
    return run.config.strategy, [(flag, type(value).__name__, value) for flag, value in values.items()]


def seeds(config: Config) -> list[int]:
    """Return the two seeds of all random draws of a run: its own, and that of its partition."""
    return [config.seed, config.seed if config.partition_seed is None else config.partition_seed]


def by_setting(chosen: Sequence[RunRecord]) -> list[tuple[dict[str, Any], list[RunRecord]]]:
    """Return the runs by setting, in their order; runs of one setting differ in nothing but seeds.

    A setting names the strategy, and the flags whose values differ between runs that know them. Of several runs of
    one setting and seed, one counts: the last of those that are furthest.
    """
    once = {
        json.dumps([titles.facts(run.config), *seeds(run.config)]): run.path
        for run in sorted(chosen, key=lambda run: STATES.index(run.state))
    }
    chosen = [run for run in chosen if run.path in once.values()]
    decisive = [titles.facts(run.config) for run in chosen]
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


class Index:
    """The runs of a folder, at any depth, by their settings; those of one setting differ in nothing but seeds.

    Attributes:
      folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        """Read the settings of all runs.

        Raises:
          UserError: the folder holds none.
        """
        self.folder = folder
        self._by_setting: dict[str, list[RunRecord]] = {}
        for run in find([folder]):
            self._by_setting.setdefault(_key(run.config), []).append(run)

    def settings(self) -> Iterable[list[RunRecord]]:
        """Return the runs of each setting."""
        return self._by_setting.values()

    def of(self, config: Config) -> list[RunRecord]:
        """Return the runs that differ from a configuration in nothing but seeds."""
        return self._by_setting.get(_key(config), [])


def _key(config: Config) -> str:
    return json.dumps(titles.facts(config), sort_keys=True)


def by_seed(runs: Sequence[RunRecord]) -> dict[str, float]:
    """Return the mean of the last ten evaluations in percent of the finished runs, by seed.

    A seed of the partition that is not the run's own stands behind it: ``0/7``.
    """
    found = {}
    for run in sorted(runs, key=lambda run: seeds(run.config)):
        seed, partition_seed = seeds(run.config)
        if run.state == "finished":
            name = str(seed) if seed == partition_seed else f"{seed}/{partition_seed}"
            found[name] = 100 * float(run.summary()["accuracy_mean_last_10"])
    return found


def name(setting: Mapping[str, Any]) -> str:
    """Return a setting in words: the strategy and the flags that differ, such as ``fedmr alpha=0.1 unit=layer``."""
    strategy, *others = setting.items()
    prefix = f"{strategy[1]}_"
    return " ".join([strategy[1], *(f"{flag.removeprefix(prefix)}={value}" for flag, value in others)])


def titles_of(settings: Sequence[tuple[Mapping[str, Any], Sequence[RunRecord]]]) -> list[str]:
    """Return the names of settings, as `by_setting` returns them, in pictures: ``FedMR, Dirichlet(0.1)``."""
    known = [titles.facts(members[0].config) for _, members in settings]
    return [
        ", ".join([titles.method(own), *titles.words(setting, {**own, **setting}, brief=True)])
        for (setting, _), own in zip(settings, known, strict=True)
    ]


def short_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in words, without the flags that have one value in all settings of a strategy."""

    def tells_apart(flag: str, strategy: str) -> bool:
        values = [json.dumps(each.get(flag, "-")) for each in settings if each["strategy"] == strategy]
        return flag == "strategy" or len(set(values)) > 1

    return [name({flag: each[flag] for flag in each if tells_apart(flag, each["strategy"])}) for each in settings]


# --- The best of some settings ----------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """One value of the flags and its runs, one per seed."""

    values: dict[str, Any]
    runs: list[RunRecord]

    def count(self, state: str) -> int:
        """Return how many of the runs are in a state of `STATES`."""
        return sum(run.state == state for run in self.runs)

    def finished(self) -> dict[str, RunRecord]:
        """Return the finished runs by their seeds."""
        return {str(seeds(run.config)): run for run in self.runs if run.state == "finished"}

    def lacks_validation(self) -> bool:
        """Return whether a finished run has no validation accuracy."""
        return not all(map(_validated, self.finished().values()))

    def mean(self, column: str, seeds: Sequence[str] | None = None) -> Statistic:
        """Return the statistic of a last result, over some seeds (None: all that are finished)."""
        finished = self.finished()
        chosen = finished.values() if seeds is None else [finished[seed] for seed in seeds]
        return Statistic.of((run.summary() | run.rows()[-1]).get(column) for run in chosen)


class Choice(NamedTuple):
    """A setting, all values tried in it and the best of them; None if no value has a finished run."""

    setting: dict[str, Any]
    tried: list[Tried]
    best: Tried | None


def choose(chosen: Sequence[RunRecord], *, over: Sequence[str]) -> list[Choice]:
    """Return the choice of each setting.

    Args:
      chosen: as `find` returns them.
      over: the flags whose values are compared.

    Raises:
      UserError: no run knows a flag, or no run that has finished has a validation accuracy.
    """
    flags = {flag for run in chosen for flag in configuration.decisive(run.config)}
    for flag in over:
        if flag not in flags:
            raise unknown_name("flag in --over", flag, sorted(flags))
    grids: dict[str, tuple[dict[str, Any], list[Tried]]] = {}
    for setting, members in by_setting(chosen):
        known = titles.facts(members[0].config)
        values = {flag: known[flag] for flag in over if flag in known}
        rest = {flag: value for flag, value in setting.items() if flag not in over}
        grids.setdefault(json.dumps(rest), (rest, []))[1].append(Tried(values, members))
    finished = [run for run in chosen if run.state == "finished"]
    if finished and not any(_validated(run) for run in finished):
        raise UserError(f"{finished[0].path} has no {VALIDATION}: train with --validation_share")
    return [Choice(setting, tried, _best(tried)) for setting, tried in grids.values()]


def _validated(run: RunRecord) -> bool:
    """Return whether a finished run has a last validation accuracy; those of earlier versions may have none."""
    return (run.summary() | run.rows()[-1]).get(VALIDATION) is not None


def _best(tried: Sequence[Tried]) -> Tried | None:
    candidates = [each for each in tried if each.finished() and not each.count("diverged")]
    candidates = [each for each in candidates if not each.lacks_validation()]
    if not candidates:
        return None
    common = sorted(set.intersection(*(set(each.finished()) for each in candidates)))
    if not common:
        names = ", ".join(map(str, candidates[0].values))
        raise UserError(f"no seed has all values of {names} (see {candidates[0].runs[0].path}): run the same seeds")

    return max(candidates, key=lambda each: each.mean(VALIDATION, common).mean or 0.0)
