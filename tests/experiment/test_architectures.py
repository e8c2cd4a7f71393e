"""The network that each client starts with, and each client's results, by which the best one is chosen."""

import csv
import dataclasses

import numpy as np
import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.architectures import architectures, best_networks
from fedjax_mr.experiment.run import run


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory, pictures):
    """Two networks of clients that train alone, with validation and fine-tuning, through the front door."""
    folder = tmp_path_factory.mktemp("personal") / "run"
    flags = (
        "--strategy=local --model=logistic,mlp --architectures=cyclic --clients=4 --cohort=4 --rounds=2 --eval_every=1"
    )
    flags += " --local_epochs=1 --validation_share=0.2 --client_test_share=0.2 --finetune_epochs=1"
    flags += " --holdout_clients=1 --noprogress --devices=1"
    config = configuration.parse([*flags.split(), f"--run_dir={folder}"])
    with pictures():
        return run(config), config


def test_a_run_keeps_every_clients_result(digits_run):
    result, _ = digits_run
    with (result.folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["network"] for row in rows] == ["logistic", "mlp"] * 2
    mean = np.mean([float(row["accuracy"]) for row in rows])
    assert result.summary["personal_accuracy"] == pytest.approx(mean) == result.rows[-1]["accuracy"]
    tuned = np.mean([float(row["finetuned_accuracy"]) for row in rows])
    assert result.summary["finetuned_accuracy"] == pytest.approx(tuned)
    assert result.summary["validation_accuracy"] == result.rows[-1]["validation_accuracy"]  # not the fine-tuned one's
    assert 0 <= result.summary["finetuned_validation_accuracy"] <= 1
    assert result.rows[-1]["network_1_mlp"] == 2 and result.rows[-1]["bytes_up"] == 0
    assert (result.folder / "personal.png").stat().st_size > 10_000


def test_each_client_starts_with_its_best_network(digits_run, tmp_path):
    result, config = digits_run
    other = tmp_path / "other"
    other.mkdir()
    lines = (result.folder / "clients.csv").read_text().splitlines()
    header = lines[0].split(",")
    best = [line.split(",") for line in lines[1:]]
    for number, row in enumerate(best):  # better for clients 1 and 3, worse for the others
        row[header.index("validation_accuracy")] = str(number % 2 * 2 - 0.5)
    (other / "clients.csv").write_text("\n".join([lines[0], *map(",".join, best)]) + "\n")
    chosen = dataclasses.replace(config, architectures_from=(str(result.folder), str(other)))
    assert best_networks(chosen.architectures_from, chosen.networks, 4).tolist() == [0, 1, 0, 1]
    with pytest.raises(UserError, match="has 4 clients, not 5"):
        best_networks(chosen.architectures_from, chosen.networks, 5)
    with pytest.raises(UserError, match="no results per client"):
        best_networks(("nowhere", "here"), chosen.networks, 4)


@pytest.mark.parametrize(
    "value, expected",
    [("blocks", [0, 0, 1, 1]), ("cyclic", [0, 1, 0, 1]), ("1,1,0,1", [1, 1, 0, 1])],
)
def test_architectures(value, expected):
    assert architectures(value, 2, 4).tolist() == expected


@pytest.mark.parametrize(
    "value, message", [("0,1", "lists 2 networks up to number 1, but there are 4"), ("cyclc", "did you mean 'cyclic'")]
)
def test_wrong_architectures(value, message):
    with pytest.raises(UserError, match=message):
        architectures(value, 2, 4)
