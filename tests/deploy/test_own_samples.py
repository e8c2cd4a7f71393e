"""Clients with their own samples, without processes and Flower: what the run folder records."""

import json

import numpy as np
import pytest

from fedjax_mr.deploy import client, server
from fedjax_mr.deploy.samples import divide
from fedjax_mr.errors import TakenError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import titles
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.testing.messages import fake_messenger

FLAGS = "--strategy=fedavg --model=logistic --clients=2 --cohort=2 --local_epochs=1 --batch_size=4 --noprogress"


def serve(folder, rounds, server_data):
    """Run a federation of two fake nodes, whose files are in a folder."""
    run = {
        "flags": f"{FLAGS} --rounds={rounds} --run_dir={folder / 'run'}",
        "server-data": str(server_data),
    }
    settings = lambda number: {
        "client-id": number,
        "data": str(folder / f"client-{number}.npz"),
        "state": str(folder / f"state-{number}"),
    }
    node = lambda number: lambda message: client.answer(message, settings(number), run)
    server.serve(fake_messenger({100: node(0), 101: node(1)}), run)
    return json.loads((folder / "run" / "config.json").read_text())


def test_the_dataset_of_the_record_is_the_servers_file(tmp_path):
    """The default of --dataset says nothing about such samples; a resumed run has the same record."""
    random = np.random.default_rng(0)
    for number in range(2):
        x = random.integers(0, 255, (8, 6, 6), np.uint8)
        np.savez(tmp_path / f"client-{number}.npz", x=x, y=np.arange(8) % 2)
    np.savez(tmp_path / "scans.npz", test_x=x, test_y=np.arange(8) % 2, mean=[0.4], std=[0.2])
    for rounds in (1, 2):
        recorded = serve(tmp_path, rounds, tmp_path / "scans.npz")
        assert (recorded["dataset"], recorded["partition"]) == (str(tmp_path / "scans.npz"), "natural")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["dataset"], summary["rounds"]) == (str(tmp_path / "scans.npz"), 2)
    saved = configuration.load(tmp_path / "run")
    assert titles.run(saved) == "FedAvg: scans, natural clients, logistic regression, seed 0"


def test_a_run_that_still_goes_on_is_named(tmp_path, monkeypatch):
    divide(federated_data(configuration.parse(FLAGS.split())), tmp_path)

    def taken(config):
        raise TakenError(f"another process is at work in {config.run_dir}")

    monkeypatch.setattr(server.RunFolder, "open", taken)
    with pytest.raises(TakenError, match=r"at work in .*run; .*flwr ls .*flwr log RUN_ID .*flwr stop RUN_ID "):
        serve(tmp_path, 1, tmp_path / "server.npz")


def test_the_files_of_divide_keep_their_dataset_and_partition(tmp_path):
    divide(federated_data(configuration.parse(FLAGS.split())), tmp_path)
    recorded = serve(tmp_path, 1, tmp_path / "server.npz")
    assert (recorded["dataset"], recorded["partition"]) == ("digits", "dirichlet")
