"""The table of accuracies beside one computed by hand, and the formats of tables."""

import csv
import dataclasses
import json

import pytest

from fedjax_mr.analysis import groups, layouts, papers, tables
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedmr

CIFAR = Config(dataset="cifar10", model="lenet5", clients=100, cohort=10, alpha=0.5, rounds=60, eval_every=5)

# Twelve evaluations each, so that the mean of the last ten leaves two out.
# FedMR: last 0.60, 0.62, 0.58, whose mean is 0.60 and sample standard deviation sqrt((0.02^2 + 0.02^2) / 2) = 0.02.
# Last ten: (9 x 0.50 + last) / 10 = 0.510, 0.512, 0.508: mean 0.510, standard deviation 0.002.
FEDMR = [[0.1, 0.65, *[0.5] * 9, 0.60], [0.1, 0.40, *[0.5] * 9, 0.62], [0.1, 0.40, *[0.5] * 9, 0.58]]
FEDAVG = [[0.3] * 12, [0.4] * 12]


@pytest.fixture
def some_runs(keep):
    for strategy, hyper, curves in (("fedmr", fedmr.Hyper(), FEDMR), ("fedavg", None, FEDAVG)):
        for seed, accuracies in enumerate(curves):
            keep(dataclasses.replace(CIFAR, strategy=strategy, hyper=hyper, seed=seed), accuracies)
    return groups.find(["runs"])


def line(lines, name):
    (found,) = [line for line in lines if groups.name(line.setting) == name]
    return found


def test_a_table_computed_by_hand(some_runs):
    lines = tables.accuracy_lines(some_runs, target=0.5, published=papers.rows())
    ours = line(lines, "fedmr")
    assert (ours.finished, ours.diverged, ours.unfinished, ours.rounds) == (3, 0, 0, 60)
    assert ours.of("last") == pytest.approx((0.60, 0.02))
    assert ours.of("best") == pytest.approx((1.85 / 3, 0.0351188), rel=1e-4)  # 0.65, 0.62, 0.58
    assert ours.of("last_10") == pytest.approx((0.510, 0.002))
    # 0.5 is first reached at rounds 10, 15, 15 with 30 bytes per round.
    assert [result["rounds_to_target"] for result in ours.results] == [10, 15, 15]
    assert ours.of("rounds_to_target") == pytest.approx((40 / 3, 2.886751))
    assert ours.of("bytes_to_target") == pytest.approx((400, 86.60254))
    assert ours.published == ("fedmr_kdd", 59.81, 0.60, "FedMR KDD'24, Table 1")
    average = line(lines, "fedavg")
    assert [result["rounds_to_target"] for result in average.results] == [None, None]
    assert average.of("last") == pytest.approx((0.35, 0.0707107))


def test_simulated_seconds_to_a_target(some_runs):
    """Only of runs that have simulated time; the clock of seed s runs at 1 + s seconds per round."""
    for run in some_runs:
        rows = [json.loads(text) for text in (run.path / "metrics.jsonl").read_text().splitlines()]
        if run.config.strategy == "fedmr":
            rows = [row | {"clock": row["round"] * (1.0 + run.config.seed)} for row in rows]
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run.path / "summary.json").write_text("{}")
    lines = tables.accuracy_lines(some_runs, target=0.5)
    assert line(lines, "fedmr").of("seconds_to_target") == pytest.approx((85 / 3, 17.559423))  # 10, 30, 45
    head, *cells = tables.accuracy_cells(lines, target=0.5)
    assert [row[head.index("simulated s to it")] for row in cells] == ["", "28 ± 18"]


def test_the_text_beside_the_paper(some_runs):
    rows = tables.accuracy_cells(tables.accuracy_lines(some_runs, target=0.5, published=papers.rows()), target=0.5)
    cells = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert cells["fedmr"] == {
        "setting": "fedmr",
        "seeds": "3",
        "rounds": "60",
        "last %": "60.00 ± 2.00",
        "best %": "61.67 ± 3.51",
        "last 10 %": "51.00 ± 0.20",
        "rounds to 50 %": "13 ± 3",
        "MB to it": "0.0 ± 0.0",
        "paper %": "59.81 ± 0.60",
        "difference": "-8.81 after 60 rounds",
        "paper": "FedMR KDD'24, Table 1",
    }
    assert cells["fedavg"]["rounds to 50 %"] == "0 of 2 reach it"
    assert cells["fedavg"]["difference"] == "-19.42 after 60 rounds"  # 35 - 54.42


def test_one_seed_has_no_deviation_and_other_data_no_paper(keep):
    keep(Config(strategy="fedavg"), [0.25, 0.75])
    rows = tables.accuracy_cells(tables.accuracy_lines(groups.find(["runs"]), published=papers.rows()))
    assert rows == [["setting", "seeds", "rounds", "last %", "best %", "last 10 %"],
                    ["fedavg", "1", "10", "75.00", "75.00", "50.00 (all 2)"]]  # fmt: skip


def test_the_accuracy_of_the_best_checkpoint(keep):
    """Chosen by the validation accuracy of the runs that have one; the first of equals. Others keep no checkpoint."""
    config = Config(strategy="fedmr", hyper=fedmr.Hyper(), keep_best=True)
    for seed, validation in enumerate(([0.1, 0.9, 0.9], [0.9, 0.1, 0.2])):
        folder = keep(dataclasses.replace(config, seed=seed), [0.8, 0.3, 0.7])
        rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"validation_accuracy": value} for row, value in zip(rows, validation, strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep(Config(strategy="fedprox", keep_best=True), [0.8, 0.3])
    keep(Config(strategy="fedavg"), [0.8, 0.3])
    head, *cells = tables.accuracy_cells(tables.accuracy_lines(groups.find(["runs"])))
    shown = {row[0]: row[head.index("best checkpoint %")] for row in cells}
    assert shown == {"fedavg": "", "fedmr": "55.00 ± 35.36", "fedprox": "80.00"}  # of 0.3 and 0.8
    assert "55.00 ± 35.36" in layouts.paper_table(["runs"], value="checkpoint")


def test_only_finished_runs_count(keep):
    config = Config(strategy="fedmr", hyper=fedmr.Hyper())
    keep(config, [0.5, 0.5])
    keep(dataclasses.replace(config, seed=1), [0.1], end="diverged.txt")
    keep(dataclasses.replace(config, seed=2), [0.2], end=None)
    (only,) = tables.accuracy_lines(groups.find(["runs"]))
    assert (only.finished, only.diverged, only.unfinished, only.of("last").mean) == (1, 1, 1, 0.5)
    assert tables.accuracy_cells([only])[1][1] == "1, 1 diverged, 1 unfinished"


def test_runs_after_a_round(some_runs, keep):
    """A run that goes on or diverges later counts; one without an evaluation after that round does not."""
    config = next(run.config for run in some_runs if run.config.strategy == "fedmr" and run.config.seed == 2)
    config = dataclasses.replace(config, seed=3)
    keep(config, [0.1, 0.2, 0.3], end="diverged.txt")
    ours = line(tables.accuracy_lines(groups.find(["runs"]), until=15), "fedmr")
    assert (ours.finished, ours.diverged, ours.unfinished, ours.rounds) == (4, 0, 0, 15)
    assert [result["evaluations"] for result in ours.results] == [3, 3, 3, 3]
    assert ours.of("last").mean == pytest.approx(0.45)  # three of 0.5 and one of 0.3
    after = line(tables.accuracy_lines(groups.find(["runs"]), until=60), "fedmr")
    assert (after.finished, after.diverged) == (3, 1)
    with pytest.raises(UserError, match=r"after round 7: choose another --round \(the nearest: 5, 10, 15\)"):
        tables.accuracy_table(["runs"], until=7)


def test_formats():
    rows = [["setting", "last %"], ["fedmr a|b_c", "51.00 ± 0.20"]]
    assert tables.markdown(rows) == "| setting | last % |\n| --- | --- |\n| fedmr a\\|b_c | 51.00 ± 0.20 |"
    assert list(csv.reader(tables.comma_separated(rows).splitlines())) == rows
    assert tables.escaped(r"{\^~") == r"\{\textbackslash{}\^{}\~{}"
    assert "fedmr a|b\\_c & 51.00 $\\pm$ 0.20 \\\\" in tables.latex(rows)
