"""The verdict below a table: the best line against the others, for each problem."""

from pathlib import Path

import pytest

from fedjax_mr.analysis import verdicts
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.analysis.paired import Verdict
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.analysis.tables import Line
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import METRICS

POINTS = verdicts.Unit(100, 2, " points")


@pytest.fixture
def kept(keep):
    """Five seeds of three methods: FedMR is the best with all seeds, FedProx the same as FedAvg but for noise."""
    for seed, of_seed in enumerate((0.5, 0.6, 0.4, 0.55, 0.45)):
        for strategy, gain in (("fedmr", 0.1 + seed / 1000), ("fedavg", 0.0), ("fedprox", 0.001 * (-1) ** seed)):
            keep(Config(strategy=strategy, seed=seed), [of_seed + gain])


def test_the_table_ends_with_the_verdict(kept, capsys):
    assert main(["table", "runs"]) == 0
    *_, empty, verdict, meaning = capsys.readouterr().out.splitlines()
    assert empty == "" and verdict == "verdict: fedmr has the best mean: better than fedprox, fedavg"
    assert "error probability 0.05 however often you look" in meaning and "normal" in meaning


@pytest.mark.parametrize("options", [["--format=csv"], ["--format=markdown"], ["--layout=paper"]])
def test_other_tables_do_not(kept, capsys, options):
    assert main(["table", "runs", *options]) == 0
    assert "verdict:" not in capsys.readouterr().out


def test_two_methods_get_a_sentence_with_numbers(keep, capsys):
    for seed in range(5):
        keep(Config(strategy="fedavg", seed=seed), [0.5 + 0.001 * seed])
        keep(Config(strategy="fedmr", seed=seed), [0.6 + 0.002 * seed])
    assert main(["table", "runs"]) == 0
    assert "verdict: fedmr is better than fedavg: +10.20 points [+9.82, +10.58], 5 seeds" in capsys.readouterr().out


def test_of_many_methods_only_some_are_named(keep, capsys):
    for seed in range(5):
        keep(Config(strategy="fedmr", seed=seed), [0.8 + 0.01 * seed])
        for rate in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            keep(Config(strategy="fedavg", seed=seed, lr=rate), [0.5 + 0.01 * seed - rate / 10])
    assert main(["table", "runs"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("verdict:"))
    assert line.count("fedavg lr=") == 4 and line.endswith(" and 2 more")


def test_only_equal_problems_and_at_least_three_common_seeds_are_compared(keep, capsys):
    for seed in range(5):
        keep(Config(strategy="fedavg", seed=seed), [0.5])
        keep(Config(strategy="fedmr", seed=seed, alpha=0.1), [0.6])  # other data
        keep(Config(strategy="fedprox", seed=seed + 3), [0.6])  # two common seeds
        keep(Config(strategy="scaffold", seed=seed, eval_every=10), [0.6])  # other evaluations
    assert main(["table", "runs"]) == 0
    assert "verdict" not in capsys.readouterr().out


def test_each_problem_has_the_unit_of_its_own_metric():
    def line(name, metric, gain):
        run = RunRecord(Path("run"), "run", Config(strategy="fedavg"))
        results = tuple(
            {"seeds": [seed, seed], "rounds": 5, "metric": METRICS[metric], "last_10": 0.5 + gain * (1 + seed / 100)}
            for seed in range(5)
        )
        return Line({"strategy": name}, (run,), results, 0, 0, None)

    pairs = [line(method, metric, gain) for metric in ("accuracy", "rmse") for method, gain in (("a", 0), ("b", 0.1))]
    accuracy, error, _ = verdicts.below_table(pairs)
    assert accuracy.startswith("verdict: b is better than a: +10.20 points [")
    assert error.startswith("verdict: a is better than b: +0.1020 [")


def test_sentences():
    better = Verdict("better", 5, 0.0123, 0.01, 0.0146, 80.0)
    assert verdicts.sentence("A", "B", better, POINTS) == "A is better than B: +1.23 points [+1.00, +1.46], 5 seeds"
    worse = Verdict("worse", 1, -0.0123, -0.0146, -0.01, 80.0)
    assert verdicts.sentence("A", "B", worse, POINTS) == "B is better than A: +1.23 points [+1.00, +1.46], 1 seed"
    unknown = Verdict("undecided", 2, 0.1, float("-inf"), float("inf"), 1.0)
    assert (
        verdicts.sentence("A", "B", unknown, POINTS) == "undecided: A against B: +10.00 points no interval yet, 2 seeds"
    )


@pytest.mark.parametrize(
    ("column", "lower"),
    [("accuracy", False), ("loss", True), ("personal_accuracy", False), ("validation_loss", True), ("rmse", True),
     ("personal_rmse", True), ("train_loss", True)],
)  # fmt: skip
def test_which_columns_are_better_when_lower(column, lower):
    assert verdicts.lower_is_better(column) == lower


@pytest.mark.parametrize("column", ["acuracy", "seconds", "similarity"])
def test_columns_without_a_better_direction_are_refused(column):
    with pytest.raises(UserError, match=f"unknown metric '{column}'"):
        verdicts.lower_is_better(column)
