"""The table beside one computed by hand."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from fedjax_mr import config as configuration
from fedjax_mr.analysis import table
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedcross, fedmr, pfedhr

CIFAR = Config(dataset="cifar10", model="lenet5", clients=100, cohort=10, alpha=0.5, rounds=60, eval_every=5)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def keep(config, accuracies, *, end="summary.json"):
    """Make a run folder with these accuracies, one per evaluation; 10 bytes down and 20 up per round."""
    folder = Path("runs") / f"{config.strategy}-{configuration.digest(config)}"
    folder.mkdir(parents=True)
    configuration.save(config, folder)
    rounds = [config.eval_every * (i + 1) for i in range(len(accuracies))]
    rows = [
        {"round": at, "accuracy": value, "loss": 1.0, "bytes_down": 10 * at, "bytes_up": 20 * at}
        for at, value in zip(rounds, accuracies, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if end:
        (folder / end).write_text("{}")
    return folder


def with_seeds(strategy, hyper, curves, **changes):
    for seed, accuracies in enumerate(curves):
        keep(dataclasses.replace(CIFAR, strategy=strategy, hyper=hyper, seed=seed, **changes), accuracies)


# Twelve evaluations each, so that the mean of the last ten leaves two out.
# FedMR: last 0.60, 0.62, 0.58, whose mean is 0.60 and sample standard deviation sqrt((0.02^2 + 0.02^2) / 2) = 0.02.
# Last ten: (9 x 0.50 + last) / 10 = 0.510, 0.512, 0.508: mean 0.510, standard deviation 0.002.
FEDMR = [[0.1, 0.65, *[0.5] * 9, 0.60], [0.1, 0.40, *[0.5] * 9, 0.62], [0.1, 0.40, *[0.5] * 9, 0.58]]
FEDAVG = [[0.3] * 12, [0.4] * 12]


@pytest.fixture
def some_runs():
    with_seeds("fedmr", fedmr.Hyper(), FEDMR)
    with_seeds("fedavg", None, FEDAVG)
    return table.find(["runs"])


def line(lines, name):
    (found,) = [line for line in lines if table.name(line.setting) == name]
    return found


def test_a_table_computed_by_hand(some_runs):
    lines = table.lines(some_runs, target=0.5, tables=table.published())
    ours = line(lines, "fedmr")
    assert (ours.finished, ours.diverged, ours.unfinished, ours.rounds) == (3, 0, 0, 60)
    assert ours.last == pytest.approx((0.60, 0.02))
    assert ours.best == pytest.approx((1.85 / 3, 0.0351188), rel=1e-4)  # 0.65, 0.62, 0.58
    assert ours.last_10 == pytest.approx((0.510, 0.002))
    # 0.5 is first reached at rounds 10, 15, 15 with 30 bytes per round.
    assert ours.reached == 3
    assert ours.rounds_to_target == pytest.approx((40 / 3, 2.886751))
    assert ours.bytes_to_target == pytest.approx((400, 86.60254))
    assert ours.published == ("fedmr_kdd", 59.81, 0.60, "FedMR KDD'24, Table 1")
    average = line(lines, "fedavg")
    assert (average.reached, average.rounds_to_target.mean) == (0, None)
    assert average.last == pytest.approx((0.35, 0.0707107))


def test_the_text_beside_the_paper(some_runs):
    rows = table.cells(table.lines(some_runs, target=0.5, tables=table.published()), target=0.5)
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
        "difference": "-8.81",
        "paper": "FedMR KDD'24, Table 1",
    }
    assert cells["fedavg"]["rounds to 50 %"] == "0 of 2 reach it"
    assert cells["fedavg"]["difference"] == "-19.42"  # 35 - 54.42


def test_one_seed_has_no_deviation_and_other_data_no_paper():
    keep(Config(strategy="fedavg"), [0.25, 0.75])
    rows = table.cells(table.lines(table.find(["runs"]), tables=table.published()))
    assert rows == [["setting", "seeds", "rounds", "last %", "best %", "last 10 %"],
                    ["fedavg", "1", "10", "75.00", "75.00", "50.00"]]  # fmt: skip


def test_only_finished_runs_count():
    config = Config(strategy="fedmr", hyper=fedmr.Hyper())
    keep(config, [0.5, 0.5])
    keep(dataclasses.replace(config, seed=1), [0.1], end="diverged.txt")
    keep(dataclasses.replace(config, seed=2), [0.2], end=None)
    (only,) = table.lines(table.find(["runs"]))
    assert (only.finished, only.diverged, only.unfinished, only.last.mean) == (1, 1, 1, 0.5)
    assert table.cells([only])[1][1] == "1, 1 diverged, 1 unfinished"


def test_a_run_that_was_made_twice_is_one_seed():
    """Under another name, by a version without some option, or with another value of what means nothing to it."""
    config = Config(strategy="fedmr", partition="iid")
    first = keep(config, [0.5, 0.5])
    keep(dataclasses.replace(config, seed=1), [0.7, 0.7])
    keep(dataclasses.replace(config, alpha=0.1), [0.2], end=None)  # alpha means nothing to iid; not finished
    values = json.loads((first / "config.json").read_text())
    again = first.rename("runs/fedmr-of-an-earlier-version")
    del values["fedmr_unit"], values["public_max"]
    (again / "config.json").write_text(json.dumps(values))
    keep(config, [0.5, 0.5])
    (only,) = table.lines(table.find(["runs"]))
    assert (only.finished, only.unfinished, only.last.mean) == (2, 0, 0.6)


def test_settings_are_named_by_what_differs():
    for unit in ("leaf", "layer"):
        for alpha in (0.1, 0.5):
            keep(Config(strategy="fedmr", alpha=alpha, hyper=fedmr.Hyper(unit=unit)), [0.5])
    keep(Config(strategy="fedcross", alpha=0.5, hyper=fedcross.Hyper()), [0.5])
    names = [table.name(line.setting) for line in table.lines(table.find(["runs"]))]
    assert sorted(names) == [
        "fedcross alpha=0.5",
        "fedmr alpha=0.1 unit=layer",
        "fedmr alpha=0.1 unit=leaf",
        "fedmr alpha=0.5 unit=layer",
        "fedmr alpha=0.5 unit=leaf",
    ]


REASSEMBLY = {
    "strategy": "pfedhr",
    "hyper": pfedhr.Hyper(public="unlabelled"),
    "dataset": "mnist",
    "model": "pfedhr_m1,pfedhr_m2,pfedhr_m3,pfedhr_m4",
    "clients": 12,
    "cohort": 4,
    "partition": "classes",
    "classes_per_client": 2,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("fedmr_kdd", 59.81)),
        ({"partition": "iid"}, ("fedmr_kdd", 63.74)),
        ({"strategy": "scaffold"}, ("fedmr_v1", 54.50)),
        ({"strategy": "fedavg", "model": "resnet20"}, ("fedmr_kdd", 58.70)),
        ({"strategy": "fedcross"}, ("fedcross", 58.74)),
        ({"strategy": "fedcross", "hyper": fedcross.Hyper(alpha=0.5)}, None),  # Table 2 has it for Dirichlet(1) alone
        ({"strategy": "fedcross", "hyper": fedcross.Hyper(alpha=0.5), "alpha": 1.0}, ("fedcross", 56.81)),
        ({"strategy": "indep"}, None),
        (REASSEMBLY, ("pfedhr", 93.76)),
        (REASSEMBLY | {"classes_per_client": 3}, None),
        (REASSEMBLY | {"model": "pfedhr_m1"}, None),
        (REASSEMBLY | {"clients": 100, "cohort": 10}, None),
        (REASSEMBLY | {"dataset": "mnist_reduced.npz"}, None),
        ({"clients": 20}, None),
        ({"cohort": 5}, None),
        ({"alpha": 0.3}, None),
        ({"alpha": 0.14}, None),
        ({"model": "mlp"}, None),
        ({"dataset": "digits"}, None),
    ],
)
def test_which_number_of_the_papers_stands_beside_a_run(changes, expected):
    found = table.lookup(dataclasses.replace(CIFAR, **{"strategy": "fedmr"} | changes), table.published())
    assert (found and found[:2]) == expected


def test_the_papers_tables_are_complete():
    rows = table.published()
    count = lambda source: sum(row["source"].startswith(source) for row in rows)
    assert [count(name) for name in ("FedMR v1", "FedMR KDD'24", "FedCross, Table 1", "FedCross, Table 2")] == [
        189, 216, 162, 18,
    ]  # fmt: skip
    assert (count("FedMe"), count("pFedHR"), len(rows)) == (24, 36, 645)
    keys = [tuple(value for name, value in row.items() if name not in ("mean", "std")) for row in rows]
    assert len(set(keys)) == len(keys)
    assert all(0 < float(row["mean"]) < 100 for row in rows)


def test_formats():
    rows = [["setting", "last %"], ["fedmr a|b_c", "51.00 ± 0.20"]]
    assert table.markdown(rows) == "| setting | last % |\n| --- | --- |\n| fedmr a\\|b_c | 51.00 ± 0.20 |"
    assert list(csv.reader(table.comma_separated(rows).splitlines())) == rows
    assert "fedmr a|b\\_c & 51.00 $\\pm$ 0.20 \\\\" in table.latex(rows)


def test_the_command(some_runs, capsys):
    assert main(["table", "runs", "--target=0.5", "--format=markdown"]) == 0
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("| setting | seeds | rounds | last % |") and set(rule) == set("|- ") and len(body) == 2
    assert main(["table", "runs", "--format=html"]) == 2
    assert "invalid choice: 'html'" in capsys.readouterr().err


def test_runs_of_a_folder_come_in_the_order_of_their_settings():
    cohorts = [keep(dataclasses.replace(CIFAR, strategy="fedmr", cohort=cohort), [0.5]) for cohort in (100, 5, 20)]
    iid = keep(dataclasses.replace(CIFAR, strategy="fedavg", partition="iid"), [0.5])
    skewed = keep(dataclasses.replace(CIFAR, strategy="fedavg"), [0.5])
    in_order = [skewed, iid, cohorts[1], cohorts[2], cohorts[0]]
    assert [run.path for run in table.find(["runs"])] == in_order
    assert [run.path for run in table.find([iid, "runs"])] == [iid, skewed, *in_order[2:]]  # what is named comes first


def test_a_folder_without_runs():
    Path("empty").mkdir()
    with pytest.raises(UserError, match="empty is no run folder and holds none"):
        table.find(["empty"])
