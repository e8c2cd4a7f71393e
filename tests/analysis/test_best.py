"""The best value of a flag, and how many clients choose each network, beside numbers computed by hand."""

import csv
import json

import pytest

from fedjax_mr.analysis import best, curves, groups, seconds, tables
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.architectures import best_networks
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.strategies import fedme
from record.command import main as record


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def keep(tmp_path):
    """Return a function that makes the folder of a finished run (or of one that diverged) with a summary."""

    def make(config, *, diverged=False, finished=True, **summary):
        folder = tmp_path / "runs" / f"{config.strategy}-{configuration.digest(config)}"
        folder.mkdir(parents=True)
        configuration.save(config, folder)
        row = {"round": 10, "accuracy": 0.5, "bytes_down": 1, "bytes_up": 1, "loss": 1.0}
        measured = {name: value for name, value in summary.items() if name.endswith("accuracy")}
        (folder / "metrics.jsonl").write_text(json.dumps(row | measured) + "\n")
        if diverged:
            (folder / "diverged.txt").write_text("diverged")
        elif finished:
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


# Validation accuracies of a learning rate with seeds 0 and 1.
GRID = {0.01: (0.6, 0.7), 0.1: (0.8, 0.6), 1.0: (0.5, 0.5)}


@pytest.fixture
def grid(keep):
    """FedAvg is best at 0.1 (mean 0.7), FedMe, with all 0.2 higher at 1.0, there (0.7 and 0.7)."""
    for lr, values in GRID.items():
        for seed, value in enumerate(values):
            config = Config(strategy="fedavg", lr=lr, seed=seed)
            keep(config, validation_accuracy=value, personal_accuracy=value - 0.1, finetuned_accuracy=value + 0.1)
            value += 0.3 * (lr == 1.0)
            keep(Config(strategy="fedme", lr=lr, seed=seed, hyper=fedme.Hyper()), validation_accuracy=value,
                 personal_accuracy=value)  # fmt: skip


def test_the_best_learning_rate_of_each_method(grid):
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["lr"]), over=["lr"])
    assert rows == [
        ["setting", "lr", "validation %", "test %", "fine-tuned %", "seeds", "tried"],
        ["fedavg", "0.1", "70.00 ± 14.14", "60.00 ± 14.14", "80.00 ± 14.14", "2", "3"],
        ["fedme", "1.0 (largest)", "80.00 ± 0.00", "80.00 ± 0.00", "", "2", "3"],
    ]


def test_of_equal_accuracies_the_smaller_loss_is_the_best(keep):
    for lr, loss in ((0.01, 1.2), (0.1, 0.9), (1.0, None)):
        known = {} if loss is None else {"validation_loss": loss}
        keep(Config(strategy="fedavg", lr=lr), validation_accuracy=0.6, **known)
    (choice,) = groups.choose(groups.find(["runs"]), over=["lr"])
    assert choice.best.values == {"lr": 0.1}


def test_what_diverged_is_out_and_seeds_must_be_shared(grid, keep):
    for lr in (3.0, 10.0):  # 3.0 would be the best, but for its second seed; 10.0 has not got anywhere
        one = Config(strategy="fedavg", lr=lr)
        keep(one, validation_accuracy=0.9, personal_accuracy=0.9, finished=lr == 3.0)
    keep(Config(strategy="fedavg", lr=3.0, seed=1), diverged=True)
    only = keep(Config(strategy="fedavg", lr=0.3, seed=1), validation_accuracy=0.65, personal_accuracy=0.65)
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["lr"]), over=["lr"])
    # With seed 1 alone, which all have: 0.01 has 0.7 and is the best, shown with the mean of its own seeds.
    assert rows[1] == ["fedavg", "0.01 (least)", "65.00 ± 7.07", "55.00 ± 7.07", "75.00 ± 7.07", "2",
                       "6, 1 diverged, 1 unfinished"]  # fmt: skip
    (only / "summary.json").unlink()
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["lr"]), over=["lr"])
    assert rows[1][:2] == ["fedavg", "0.1"] and rows[1][-1] == "6, 1 diverged, 2 unfinished"


def test_other_settings_are_other_lines(keep):
    for alpha in (0.1, 0.5):
        for lr in (0.1, 0.2):
            keep(Config(strategy="fedavg", lr=lr, alpha=alpha), validation_accuracy=alpha * lr, personal_accuracy=0.5)
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["lr"]), over=["lr"])
    assert sorted(row[:2] for row in rows[1:]) == [
        ["fedavg alpha=0.1", "0.2 (largest)"],
        ["fedavg alpha=0.5", "0.2 (largest)"],
    ]
    (row,) = best.cells(groups.choose(groups.find(["runs"]), over=["lr", "alpha"]), over=["lr", "alpha"])[1:]
    assert row[:3] == ["fedavg", "0.2 (largest)", "0.5 (largest)"] and row[-1] == "4"


def test_a_method_without_the_flag_has_one_value(keep):
    keep(Config(strategy="fedavg"), validation_accuracy=0.5, personal_accuracy=0.5)
    keep(Config(strategy="fedme", hyper=fedme.Hyper()), validation_accuracy=0.5, personal_accuracy=0.5)
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["fedme_tuning"]), over=["fedme_tuning"])
    assert sorted(row[:2] for row in rows[1:]) == [["fedavg", "-"], ["fedme", "True"]]


def test_nothing_to_choose_from(keep):
    keep(Config(strategy="fedavg"), diverged=True)
    rows = best.cells(groups.choose(groups.find(["runs"]), over=["lr"]), over=["lr"])
    assert rows == [["setting", "lr", "tried"], ["fedavg", "none", "1, 1 diverged"]]


def test_bad_input_is_one_line(keep, capsys):
    folder = keep(Config(strategy="fedavg", lr=0.1), personal_accuracy=0.5)
    assert main(["best", "runs", "--over=rl"]) == 2
    assert "flag in --over 'rl'" in capsys.readouterr().err
    assert main(["best", "runs", "--over=lr"]) == 2
    error = capsys.readouterr().err
    assert str(folder.name) in error and "--validation_share" in error and error.count("\n") == 1
    (folder / "summary.json").write_text("{")
    assert main(["best", "runs", "--over=lr"]) == 2
    assert "is damaged" in capsys.readouterr().err
    (folder / "summary.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"round": 10, "validation_accuracy": 0.5}\n')
    keep(Config(strategy="fedavg", lr=0.2, seed=1), validation_accuracy=0.5)
    assert main(["best", "runs", "--over=lr"]) == 2
    assert "no seed has a run for every value of lr" in capsys.readouterr().err


def test_the_command_and_the_curves_of_the_best(grid, capsys):
    assert main(["best", "runs", "--over=lr", "--format=csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("fedavg,0.1,70.00")
    assert main(["curves", "runs", "--column=validation_accuracy", "--best=lr", "--out=here"]) == 0
    chosen = [run for choice in groups.choose(groups.find(["runs"]), over=["lr"]) for run in choice.best.runs]
    (series,) = curves.curves(chosen, column="validation_accuracy")[0].values()
    assert {name: means for name, (_, means, _) in series.items()} == {
        "FedAvg, learning rate 0.1 (n = 2)": [pytest.approx(0.7)],
        "FedMe, learning rate 1.0 (n = 2)": [pytest.approx(0.8)],
    }


def test_the_table_has_the_clients_own_accuracies(grid):
    rows = tables.accuracy_cells(tables.accuracy_lines(groups.find(["runs"])))
    assert rows[0] == ["setting", "seeds", "rounds", "last %", "best %", "last 10 %", "clients' own %", "fine-tuned %"]
    cells = {row[0]: row[-2:] for row in rows}
    assert cells["fedavg lr=0.1"] == ["60.00 ± 14.14", "80.00 ± 14.14"] and cells["fedme lr=0.01"][1] == ""


def test_names_leave_out_what_is_the_same_in_all_runs_of_a_strategy():
    settings = [
        {"strategy": "fedavg", "model": "mlp", "alpha": 0.1},
        {"strategy": "fedavg", "model": "mlp", "alpha": 0.5},
        {"strategy": "fedme", "model": "mlp,logistic", "alpha": 0.1, "architectures_from": ["runs"]},
    ]
    assert groups.short_names(settings) == ["fedavg alpha=0.1", "fedavg alpha=0.5", "fedme"]


# --- Seconds ---------------------------------------------------------------------------------------------------------


def test_seconds_of_both_sides(keep, capsys):
    for seed in (0, 1):
        keep(Config(strategy="fedavg", seed=seed), seconds_per_round=3.0, clients_seconds_per_round=2.0 + seed,
             server_seconds_per_round=0.5)  # fmt: skip
    keep(Config(strategy="fedavg", seed=2), finished=False)
    count, parts = seconds.seconds(groups.find(["runs"]))["fedavg"]
    assert (count, parts["clients"].mean, parts["server"], parts["all"].mean) == (2, 2.5, (0.5, 0.0), 3.0)
    assert main(["seconds", "runs", "--out=here"]) == 0
    assert "2.5000 ± 0.7071" in capsys.readouterr().out
    keep(Config(strategy="fedmr"), seconds_per_round=3.0)
    assert main(["seconds", "runs", "--out=there"]) == 0
    assert "not drawn" in capsys.readouterr().out


# --- First networks --------------------------------------------------------------------------------------------------

SIZES = {"logistic": 650, "mlp": 9000, "cnn_digits": 5000}


@pytest.fixture
def alone(keep):
    """Return a function that keeps a run of Local-only: network, seed, the clients' validation accuracies."""

    def make(network, seed, values, **changes):
        config = Config(strategy="local", model=network, seed=seed, clients=len(values), cohort=1, **changes)
        folder = keep(config, partition_hash=f"data{seed}", parameters=SIZES[network],
                      validation_accuracy=sum(values) / len(values))  # fmt: skip
        with (folder / "clients.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerow(["client", "validation_accuracy", "accuracy"])
            writer.writerows([number, value, 1 - value] for number, value in enumerate(values))
        return folder

    return make


@pytest.fixture
def divisions(alone):
    """In seed 0 the networks by size are best for 2, 1, 0 of the clients, in seed 1 for 1, 0, 2."""
    for network, values in {"mlp": (0.5, 0.5, 0.5), "cnn_digits": (0.4, 0.6, 0.7), "logistic": (0.9, 0.6, 0.1)}.items():
        alone(network, 0, values)  # client 1: the first of equals
    for network, values in {"mlp": (0.5, 0.5, 0.5), "cnn_digits": (0.4, 0.4, 0.4), "logistic": (0.9, 0.4, 0.1)}.items():
        alone(network, 1, values)


def test_how_many_clients_choose_each_network(divisions, capsys):
    assert record(["choices", "runs", "--format=csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "trained alone,logistic,cnn_digits,mlp,clients,divisions",
        "local,1.5 ± 0.7,0.5 ± 0.7,1.0 ± 1.4,3,2",
    ]


def test_of_two_runs_the_better_one_counts(divisions, alone, capsys):
    for network, value in (("logistic", 0.95), ("cnn_digits", 0.1)):  # at another learning rate
        alone(network, 0, (value,) * 3, lr=0.3)
    assert record(["choices", "runs", "--format=csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "local,2.0 ± 1.4,0.0 ± 0.0,1.0 ± 1.4,3,2"


def test_fedme_starts_from_these_choices_whatever_the_seed(divisions):
    """One folder serves all seeds: the runs in it are found by the division of the data."""
    config = Config(
        strategy="fedme", model="mlp,cnn_digits,logistic", architectures_from=("runs",), clients=3, cohort=3
    )
    resolve(config)
    assert best_networks(config.architectures_from, config.networks, 3, division="data0").tolist() == [2, 1, 1]
    assert best_networks(config.architectures_from, config.networks, 3, division="data1").tolist() == [2, 0, 0]
    with pytest.raises(UserError, match="runs holds no finished run of strategy=local model=mlp with the same"):
        best_networks(config.architectures_from, config.networks, 3, division="data2")


def test_no_choice_without_all_networks(divisions, alone, capsys):
    missing = alone("mlp", 2, (0.5, 0.5, 0.5))
    assert record(["choices", "runs"]) == 2
    assert f"no finished run trains logistic on the same data as {missing.relative_to(missing.parents[1])}" in (
        capsys.readouterr().err
    )
    other = Config(strategy="fedavg")
    (missing.parent.parent / "others").mkdir()
    configuration.save(other, missing.parent.parent / "others")
    assert record(["choices", "others"]) == 2
    assert "no run is a finished one of --strategy=local" in capsys.readouterr().err
