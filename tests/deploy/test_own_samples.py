"""Clients with their own samples, without processes and Flower: what the run folder records."""

import json

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.deploy import client, server
from fedjax_mr.deploy.samples import divide
from fedjax_mr.errors import TakenError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import titles
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.testing.messages import fake_messenger

FLAGS = "--strategy=fedavg --model=logistic --clients=2 --cohort=2 --local_epochs=1 --batch_size=4 --noprogress"


def serve(folder, rounds, server_data, flags=""):
    """Run a federation of two fake nodes, whose files are in a folder."""
    run = {
        "flags": f"{FLAGS} --rounds={rounds} --run_dir={folder / 'run'} {flags}",
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


def test_the_model_of_real_clients_keeps_the_preparation_of_a_table(tmp_path):
    flags = f"{FLAGS} --dataset=diabetes"
    federated = federated_data(configuration.parse(flags.split()))
    divide(federated, tmp_path)
    serve(tmp_path, 1, tmp_path / "server.npz", "--dataset=diabetes")
    saved = fmr.load(tmp_path / "run")
    assert saved.samples.preparation == federated.dataset.preparation is not None
    table = {name: np.ones(3) for name in saved.samples.preparation.columns}
    assert saved.predict(table).shape == (3, 1)


def doses(folder, **declared):
    """Write files of two clients with doses in mg, and of a server that declares what they are."""
    random = np.random.default_rng(1)
    for name, before in {"client-0": "", "client-1": "", "server": "test_"}.items():
        x = random.normal(size=(40, 3))
        y = 50 + 9 * x[:, 0]
        own = {"test_x": x[:4], "test_y": y[:4]} if name == "client-1" else {}
        declared_here = declared if before else {}
        np.savez(folder / f"{name}.npz", **{f"{before}x": x, f"{before}y": y}, **own, **declared_here)
    return folder / "server.npz"


@pytest.mark.parametrize("flags", ["", "--mode=async --in_flight=2 --cohort=1 --rounds=20"], ids=["sync", "async"])
def test_own_samples_of_a_regression(tmp_path, flags, capsys):
    """Targets [n] of type float64, in mg; the server's file has their mean and standard deviation."""
    file = doses(tmp_path, task="regression", target_mean=50.0, target_std=9.0, target_unit="mg")
    (tmp_path / "client-1.npz").rename(tmp_path / "with_tests.npz")
    arrays = dict(np.load(tmp_path / "with_tests.npz"))
    kept = arrays if not flags else {name: arrays[name] for name in "xy"}  # asynchronous clients do not test
    np.savez(tmp_path / "client-1.npz", **kept)
    serve(tmp_path, 10, file, f"--lr=0.1 {flags}" + (" --eval_clients" if not flags else ""))
    rows = fmr.load(tmp_path / "run").rows
    assert list(rows[-1])[:4] == ["round", "rmse", "mae", "r2"] and rows[-1]["rmse"] < 1 and rows[-1]["r2"] > 0.99
    assert flags or rows[-1]["personal_rmse"] < 1
    assert "fedjax-mr: round 10: RMSE " in capsys.readouterr().out
    facts = fmr.load(tmp_path / "run").samples
    assert (facts.task.mean, facts.task.std, facts.task.unit) == ((50.0,), (9.0,), "mg")


def test_a_task_that_the_servers_file_does_not_declare_is_one_line(tmp_path):
    """Before anything is trained: for the flags, for the methods, and for a client's targets."""
    file = doses(tmp_path, task="regression")
    for flags, words in {
        "--task=survival": "task=survival, but the server's file is for regression: add an array task",
        "--strategy=fedgen": "fedgen needs a class per sample, but the task is regression",
        "--metrics=accuracy": "metric accuracy needs classes, which regression has not",
        "--loss=weighted": "real clients do not tell their classes: set --loss_weights",
    }.items():
        with pytest.raises(UserError, match=words):
            serve(tmp_path, 1, file, flags)
        assert not (tmp_path / "run").exists()
