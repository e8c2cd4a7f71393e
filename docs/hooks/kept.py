"""The kept results, by method and setting: what the pages of methods and the leaderboard show."""

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
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import kept as tables_of_runs
from fedjax_mr.experiment import titles
from fedjax_mr.experiment.config import Config

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

from record.comparisons import verdict  # noqa: E402 (the scripts of experiments/ are not installed)

# Rounds of the papers' runs as their code has them; fewer are not compared with the papers' numbers.
PAPER_ROUNDS = {"fedmr_kdd": 500, "fedmr_v1": 500, "fedcross": 500, "pfedhr": 100, "fedme": 500}

# Files of the kept runs, in words.
DATASETS = {
    "mnist_by_writer": "MNIST by writer", "mnist_reduced": "reduced MNIST", "cifar10_reduced": "reduced CIFAR-10",
    "mnist_reduced_7600": "reduced MNIST of 7,600 images",
}  # fmt: skip
OWN_SAMPLES = "tested on each client's own samples"


class Line(NamedTuple):
    """A method in a setting, over its seeds.

    Attributes:
      strategy: its registered name.
      config: of one of its runs.
      job: the settings of the run that are not the method's own, by flag.
      own: the method's own settings that are not the defaults, by name.
      by_seed: the mean of the last ten evaluations in percent, of finished runs.
      evaluations: how many there are at most in a run.
      bytes: both ways, of a finished run.
      diverged: how many runs did.
      published: the papers' numbers for the setting.
    """

    strategy: str
    config: Config
    job: dict[str, Any]
    own: dict[str, Any]
    by_seed: dict[str, float]
    evaluations: int
    bytes: int
    diverged: int
    published: list[Published]

    @property
    def statistic(self) -> Statistic:
        """Mean and standard deviation over the seeds."""
        return Statistic.of(self.by_seed.values())

    def verdict(self, number: Published) -> str:
        """Return whether a paper's number is reached; the reason where the two are not compared."""
        wanted = PAPER_ROUNDS[number.paper]
        if self.config.rounds < wanted:
            return f"not compared: {self.config.rounds} rounds of {wanted}"
        return verdict(self.statistic, number)

    @property
    def compared(self) -> bool:
        """Whether a paper's number stands beside it that is of as many rounds."""
        return any(self.config.rounds >= PAPER_ROUNDS[number.paper] for number in self.published)

    def title(self) -> str:
        """Return the method's name with its own settings."""
        words = [f"{name.replace('_', ' ')} = {value}" for name, value in self.own.items()]
        return ", ".join([titles.method(titles.facts(self.config)), *words])

    def accuracy(self) -> str:
        """Return the mean and the deviation."""
        return tables.plus_minus(*self.statistic, digits=2)

    def seeds(self) -> str:
        """Return how many seeds there are, and how many runs diverged."""
        return str(len(self.by_seed)) + (f" ({self.diverged} diverged)" if self.diverged else "")


@functools.cache
def lines() -> tuple[Line, ...]:
    """Return all methods in all settings of the kept runs."""
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
        evaluations,
        size,
        states.count("diverged"),
        papers.lookup_all(config, published),
    )


def of(strategy: str) -> list[Line]:
    """Return the settings in which a method has finished or diverged runs."""
    return [each for each in lines() if each.strategy == strategy and (each.by_seed or each.diverged)]


def data_title(line: Line) -> str:
    """Return the data and the division of a run in words."""
    facts = titles.facts(line.config)
    coarse = " (coarse labels)" if facts.get("label_mode") == "coarse" else ""
    name = titles.dataset(line.config.dataset)
    return f"{DATASETS.get(name, name)}{coarse}, {titles.division(facts)}"


def particulars(lines: Sequence[Line]) -> list[str]:
    """Return for each line the settings, in words, by which it differs from lines of the same title; "" if none has it.

    Args:
      lines: of one method, or of one table each.
    """
    titles_of = [(data_title(line), clients_title(line), json.dumps(line.own)) for line in lines]
    found = []
    for line, title in zip(lines, titles_of, strict=True):
        same = [other.job for other, another in zip(lines, titles_of, strict=True) if another == title]
        flags = [flag for flag in titles.varied(same) if flag != "eval_clients"]
        words = titles.words(flags, line.job | {"strategy": line.strategy}, brief=True)
        if line.job.get("eval_clients") and len(same) > 1:
            words.append(OWN_SAMPLES)
        found.append(", ".join(words))
    return found


def clients_title(line: Line) -> str:
    """Return the network, the clients and the rounds of a run in words."""
    clients = f"{line.config.cohort} of {line.config.clients} clients" if line.config.clients else "all natural clients"
    return f"{titles.network(line.config.model)}, {clients}, {line.config.rounds} rounds"


def costs() -> dict[str, dict[str, str]]:
    """Return the measured times of a round, by method: the rows of experiments/costs.csv."""
    with (EXPERIMENTS / "costs.csv").open(encoding="utf-8", newline="") as file:
        return {row["strategy"]: row for row in csv.DictReader(file)}


def seconds(strategy: str) -> tuple[float, int] | None:
    """Return the median time of a round in rounds of FedAvg, and the number of runs, from the kept runs of one job.

    None where no table has both methods on the same number of devices.
    """
    ratios, count = [], 0
    for table in sorted((EXPERIMENTS / "results").glob(f"*{tables_of_runs.SUFFIX}")):
        found: dict[tuple, list[float]] = {}
        for summary in (run.summary for run in tables_of_runs.read(table).values() if run.summary is not None):
            key = (summary["strategy"], summary["model"], len(summary["devices"]))
            found.setdefault(key, []).append(summary["seconds_per_round"])
        for (name, *job), times in found.items():
            if name == strategy and ("fedavg", *job) in found:
                ratios.append(statistics.median(times) / statistics.median(found["fedavg", *job]))
                count += len(times)
    return (statistics.median(ratios), count) if ratios else None


def same_job(settings: Mapping[str, Any]) -> str:
    """Return a key that runs share whose accuracies can be compared."""
    return json.dumps(settings, sort_keys=True)
