"""The kept results by method and setting, for the pages of the methods and the leaderboard."""

import csv
import functools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_mr.analysis import papers, tables
from fedjax_mr.analysis.groups import Index, Statistic, by_seed
from fedjax_mr.analysis.papers import Published
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.results import kept as tables_of_runs
from fedjax_mr.tasks import Metric

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

from record import comparisons, tuning  # noqa: E402 (the scripts of experiments/ are not installed)

# Rounds of the papers' runs in their code. Runs with fewer rounds are not compared with the papers' values.
PAPER_ROUNDS = {"fedmr_kdd": 500, "fedmr_v1": 500, "fedcross": 500, "pfedhr": 100, "fedme": 500}

# Titles of the data files of kept runs.
DATASETS = {
    "mnist_by_writer": "MNIST by writer", "mnist_reduced": "reduced MNIST", "cifar10_reduced": "reduced CIFAR-10",
    "mnist_reduced_7600": "reduced MNIST of 7,600 images",
}  # fmt: skip
# Settings that decide how much a round computes.
WORK = (
    "dataset", "model", "clients", "cohort", "local_epochs", "batch_size", "mode", "deadline", "adapter", "trainable",
    "compress", "attack", "robust",
)  # fmt: skip
OWN_SAMPLES = "tested on each client's own samples"


class Line(NamedTuple):
    """A method in a setting, over its seeds.

    Attributes:
      strategy: its registered name.
      config: configuration of one of its runs.
      job: settings of the run that do not belong to the method, by flag.
      own: settings of the method that differ from their defaults, by name.
      by_seed: mean of the last ten evaluations of finished runs; accuracies and other fractions in percent.
      metric: the metric by which its runs are judged.
      evaluations: largest number of evaluations of a run.
      bytes: bytes of both directions of a finished run.
      diverged: number of diverged runs.
      published: the papers' values for the setting.
      tables: the tables of its runs.
      budget: the trials among which its setting was chosen, in words. "" if no kept trial chose it.
    """

    strategy: str
    config: Config
    job: dict[str, Any]
    own: dict[str, Any]
    by_seed: dict[str, float]
    metric: Metric
    evaluations: int
    bytes: int
    diverged: int
    published: list[Published]
    tables: list[Path]
    budget: str

    @property
    def statistic(self) -> Statistic:
        """Mean and standard deviation over the seeds."""
        return Statistic.of(self.by_seed.values())

    def verdict(self, number: Published) -> str:
        """The verdict on a paper's value, or the reason why the two are not compared."""
        wanted = PAPER_ROUNDS[number.paper]
        if self.config.rounds < wanted:
            return f"not compared: {self.config.rounds} rounds of {wanted}"
        return comparisons.verdict(self.statistic, number)

    @property
    def compared(self) -> bool:
        """Whether a paper has a value for at most as many rounds."""
        return any(self.config.rounds >= PAPER_ROUNDS[number.paper] for number in self.published)

    @property
    def is_trial(self) -> bool:
        """Whether its runs are trials, which chose a setting and do not rank methods."""
        return all(table.name.endswith(tuning.TRIALS) for table in self.tables)

    def title(self) -> str:
        """The name of the method with its own settings."""
        words = [f"{name.replace('_', ' ')} = {value}" for name, value in self.own.items()]
        return ", ".join([titles.method(titles.facts(self.config)), *words])

    def value(self, *, named: bool = True) -> str:
        """Mean and standard deviation as text. ``named``: with the metric, unless it is the accuracy."""
        text = tables.plus_minus(*self.statistic, digits=2)
        return f"{text} ({self.metric.title})" if named and text and self.metric.name != "accuracy" else text

    def seeds(self) -> str:
        """Number of seeds, and of diverged runs."""
        return str(len(self.by_seed)) + (f" ({self.diverged} diverged)" if self.diverged else "")


@functools.cache
def lines() -> tuple[Line, ...]:
    """All methods in all settings of the kept runs."""
    published = papers.rows()
    return tuple(_line(runs, published) for runs in Index(EXPERIMENTS / "results").settings())


def _line(runs: list[RunRecord], published: list[dict[str, str]]) -> Line:
    config = runs[0].config
    facts, prefix = titles.facts(config), f"{config.strategy}_"
    defaults = configuration.decisive(Config(strategy=config.strategy))
    own = {
        flag.removeprefix(prefix): value
        for flag, value in facts.items()
        if flag.startswith(prefix) and value != defaults.get(flag)
    }
    job = {flag: value for flag, value in facts.items() if not flag.startswith(prefix) and flag != "strategy"}
    states = [run.state for run in runs]
    files = sorted({run.path.parent for run in runs})
    finished = [run for run, state in zip(runs, states, strict=True) if state == "finished"]
    evaluations, size = 0, 0
    for run in finished:
        evaluations = max(evaluations, len(run.rows()))
        size = run.summary()["bytes_down"] + run.summary()["bytes_up"]
    return Line(
        config.strategy,
        config,
        job,
        own,
        by_seed(runs),
        runs[0].metric(),
        evaluations,
        size,
        states.count("diverged"),
        papers.lookup_all(config, published),
        files,
        _budget(config, files),
    )


_tuned = functools.cache(tuning.behind)


def _budget(config: Config, tables: Sequence[Path]) -> str:
    chosen = [each for table in tables for each in _tuned(table) if each.chose(config)]
    return chosen[0].budget(config) if chosen else ""


def of(strategy: str) -> list[Line]:
    """The settings in which a method has finished or diverged runs."""
    return [each for each in lines() if each.strategy == strategy and (each.by_seed or each.diverged)]


def data_title(line: Line) -> str:
    """Dataset and partition of a run in words."""
    facts = titles.facts(line.config)
    coarse = " (coarse labels)" if facts.get("label_mode") == "coarse" else ""
    name = titles.dataset(line.config.dataset)
    return f"{DATASETS.get(name, name)}{coarse}, {titles.division(facts)}"


def particulars(lines: Sequence[Line]) -> list[str]:
    """The settings, in words, in which each line differs from lines of the same title. "" if there is no such line.

    Args:
      lines: lines of one method, or one line per table.
    """
    titles_of = [(data_title(line), clients_title(line), json.dumps(line.own)) for line in lines]
    differences = []
    for line, title in zip(lines, titles_of, strict=True):
        same = [other.job for other, another in zip(lines, titles_of, strict=True) if another == title]
        flags = [flag for flag in titles.varied(same) if flag != "eval_clients"]
        words = titles.words(flags, line.job | {"strategy": line.strategy}, brief=True)
        if line.job.get("eval_clients") and len(same) > 1:
            words.append(OWN_SAMPLES)
        differences.append(", ".join(words))
    return differences


def clients_title(line: Line) -> str:
    """Network, clients and rounds of a run in words."""
    clients = f"{line.config.cohort} of {line.config.clients} clients" if line.config.clients else "all natural clients"
    return f"{titles.network(line.config.model)}, {clients}, {line.config.rounds} rounds"


def costs() -> dict[str, dict[str, str]]:
    """The measured times of a round by method: the rows of experiments/costs.csv."""
    with (EXPERIMENTS / "costs.csv").open(encoding="utf-8", newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def seconds(strategy: str) -> tuple[float, int] | None:
    """The median time of a round relative to FedAvg in the same table, and the number of runs.

    None if no table has both methods with the same work of a round, on the same number of devices.
    """
    ratios, count = [], 0
    for table in sorted((EXPERIMENTS / "results").glob(f"*{tables_of_runs.SUFFIX}")):
        times_of: dict[tuple, list[float]] = {}
        for run in tables_of_runs.read(table).values():
            if run.summary is not None:
                work = (str(run.config.get(setting)) for setting in WORK)
                key = (run.config["strategy"], len(run.summary["devices"]), *work)
                times_of.setdefault(key, []).append(run.summary["seconds_per_round"])
        for (name, *job), times in times_of.items():
            if name == strategy and ("fedavg", *job) in times_of:
                ratios.append(statistics.median(times) / statistics.median(times_of["fedavg", *job]))
                count += len(times)
    return (statistics.median(ratios), count) if ratios else None


def same_job(settings: Mapping[str, Any]) -> str:
    """A key that is equal for runs whose accuracies can be compared."""
    return json.dumps(settings, sort_keys=True)
