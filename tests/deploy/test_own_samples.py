"""Clients with their own samples, without processes and Flower: what the run folder records."""

import csv
import json

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.deploy import __main__ as deploy
from fedjax_mr.deploy import check, client, server
from fedjax_mr.deploy.samples import ClientSamples, ServerSamples, divide
from fedjax_mr.errors import TakenError, UserError
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="sync"),
        pytest.param("--mode=async --in_flight=2 --cohort=1 --rounds=20", id="async", marks=pytest.mark.slow),
    ],
)
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


# --- Tables -----------------------------------------------------------------------------------------------------------

HEAD = ["patient", "age", "sex", "pressure", "outcome"]


def patients(path, count, seed, *, outcomes=("mild", "severe"), head=HEAD, **changes):
    """Write a table of patients, and return its columns. ``changes`` are functions of a row's number by column."""
    random, rows = np.random.default_rng(seed), []
    for number in range(count):
        age, sex = round(random.normal(60, 12)), random.choice(["f", "m"])
        pressure = round(random.normal(130, 20)) if number % 7 else ""
        outcome = outcomes[int(age + 10 * (sex == "m") > 65) % len(outcomes)]
        row = dict(zip(HEAD, (f"p{seed}-{number}", age, sex, pressure, outcome), strict=True))
        rows.append(row | {name: change(number) for name, change in changes.items()})
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [*head, *(name for name in changes if name not in head)], extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}


TABLE = "--target=outcome --drop_columns=patient --model=mlp_table --lr=0.05"


def nodes_of_tables(folder, rounds, flags=TABLE):
    """Run a federation of two fake nodes with CSV files."""
    run = {
        "flags": f"{FLAGS} {flags} --rounds={rounds} --run_dir={folder / 'run'}",
        "server-data": f"{folder}/agreed.csv",
    }
    settings = lambda number: {
        "client-id": number,
        "data": str(folder / f"hospital-{number}.csv"),
        "state": str(folder / f"state-{number}"),
    }
    node = lambda number: lambda message: client.answer(message, settings(number), run)
    server.serve(fake_messenger({100: node(0), 101: node(1)}), run)
    return fmr.load(folder / "run")


def test_hospitals_with_tables_train_as_with_prepared_arrays(tmp_path, caplog):
    """The server's rows say how all are prepared; one hospital has one outcome only, and columns in another order."""
    agreed = patients(tmp_path / "agreed.csv", 60, 0)
    split = {"split": lambda number: "test" if number >= 40 else "train"}
    own = [
        patients(tmp_path / "hospital-0.csv", 50, 1, **split),
        patients(tmp_path / "hospital-1.csv", 30, 2, outcomes=("mild",), head=HEAD[::-1], ward=lambda number: "a"),
    ]
    saved = nodes_of_tables(tmp_path, 3, f"{TABLE} --eval_clients --metrics=accuracy,macro_f1")
    preparation = saved.samples.preparation
    assert preparation.columns == ("age", "sex", "pressure") and preparation.class_names == ("mild", "severe")
    known = [float(value) for value in agreed["pressure"] if value != ""]
    assert preparation.fill == (np.median(agreed["age"]), -1, np.median(known))
    assert saved.samples.mean[0] == pytest.approx(np.mean(agreed["age"]))
    assert saved.predict(str(tmp_path / "hospital-0.csv")).shape == (50, 2)

    for number, table in enumerate(own):  # the same by hand
        sex = {"f": 0, "m": 1}
        pressure = [preparation.fill[2] if value == "" else value for value in table["pressure"]]
        x = np.array([table["age"], [sex[each] for each in table["sex"]], pressure], np.float32).T
        y = np.array([outcome == "severe" for outcome in table["outcome"]], int)
        kept = slice(0, 40) if number == 0 else slice(None)
        tested = {"test_x": x[40:], "test_y": y[40:]} if number == 0 else {}
        np.savez(tmp_path / f"client-{number}.npz", x=x[kept], y=y[kept], **tested)
    (tmp_path / "run").rename(tmp_path / "of_tables")
    for number in range(2):
        (tmp_path / f"state-{number}").rename(tmp_path / f"other-{number}")
    serve(tmp_path, 3, tmp_path / "agreed.csv", f"{TABLE} --eval_clients --metrics=accuracy,macro_f1")
    numbers = lambda folder: [
        {name: value for name, value in row.items() if name.partition("_")[0] not in {"seconds", "images"}}
        for row in fmr.load(folder).rows
    ]
    assert numbers(tmp_path / "of_tables") == numbers(tmp_path / "run")
    assert "personal_accuracy" in numbers(tmp_path / "run")[-1]


def test_a_table_that_differs_from_the_servers_is_one_line(tmp_path, capsys, caplog):
    patients(tmp_path / "agreed.csv", 60, 0)
    facts = ServerSamples.read(tmp_path / "agreed.csv", configuration.parse(f"{FLAGS} {TABLE}".split())).facts
    file = tmp_path / "hospital.csv"
    for changes, words in (
        (
            {"head": ["age", "sex", "outcome"]},
            "hospital.csv has no column 'pressure' for the samples: it has age, sex, ",
        ),
        ({"head": ["age", "sex", "pressure"]}, "hospital.csv has no column 'outcome' for the target"),
        ({"outcomes": ("mild", "dead")}, r"column 'outcome' has 'dead' in row \d+, but the classes are mild, severe"),
        ({"age": lambda number: "old"}, "column 'age' has texts, but the training rows have numbers"),
        ({"outcome": lambda number: ""}, "the target is missing in 30 of 30 rows"),
        ({"split": lambda number: "valid"}, "column 'split' has 'valid' in row 0, but it is one of train, validation"),
        ({"split": lambda number: "test"}, "hospital.csv holds no training samples"),
    ):
        patients(file, 30, 3, **changes)
        with pytest.raises(UserError, match=words) as caught:
            ClientSamples.read(file, facts)
        assert "\n" not in str(caught.value)
    patients(file, 30, 3, pressure=lambda number: 13000 + number, sex=lambda number: "x" if number else "f")
    assert ClientSamples.read(file, facts).x[:2, 1].tolist() == [0, -1]
    assert "column 'pressure' has a mean of 1.301e+04, but the server's rows have" in caplog.text
    assert "column 'sex' has 29 values that no training row has (the first is 'x')" in caplog.text
    arrays = ServerSamples.read(doses(tmp_path, task="regression")).facts
    with pytest.raises(UserError, match="is a table, so the server's file must be one, too"):
        ClientSamples.read(file, arrays)
    with pytest.raises(UserError, match=r"agreed\.csv is a table: name the column to predict, --target=COLUMN"):
        ServerSamples.read(tmp_path / "agreed.csv")


@pytest.mark.parametrize(
    ("task", "targets", "values", "dtype"),
    [
        ("regression", ["dose"], {"dose": lambda number: 50 + number}, np.float32),
        ("multilabel", ["fever", "cough"], {"fever": lambda n: n % 2, "cough": lambda n: "" if n % 3 else 1}, np.int32),
        ("survival", ["days", "died"], {"days": lambda number: 10 + number, "died": lambda n: n % 2}, np.float32),
    ],
)
def test_tables_of_other_tasks(tmp_path, task, targets, values, dtype):
    known = {name: (lambda number: number % 2) if name == "cough" else value for name, value in values.items()}
    patients(tmp_path / "agreed.csv", 40, 0, **known)
    patients(tmp_path / "hospital.csv", 12, 1, **values)
    flags = f"{FLAGS} --target={','.join(targets)} --drop_columns=patient,outcome --task={task}"
    facts = ServerSamples.read(tmp_path / "agreed.csv", configuration.parse(flags.split())).facts
    read = ClientSamples.read(tmp_path / "hospital.csv", facts)
    expected = [[-1 if value(n) == "" else value(n) for value in values.values()] for n in range(12)]
    np.testing.assert_array_equal(read.y, expected)
    assert read.y.dtype == dtype and len(read.test_y) == 0


def test_an_app_of_tables_is_checked_where_it_is_written_and_at_the_clients(tmp_path, capsys):
    patients(tmp_path / "agreed.csv", 40, 0)
    arguments = ["new", str(tmp_path / "fed"), *FLAGS.split(), f"--server_data={tmp_path / 'agreed.csv'}"]
    assert deploy.main(arguments) == 2
    assert "agreed.csv is a table: name the column to predict, --target=COLUMN" in capsys.readouterr().err
    assert deploy.main([*arguments, *TABLE.split()]) == 0
    assert 'data="PATH/OF/CLIENT-1.csv"' in capsys.readouterr().out
    patients(tmp_path / "mine.csv", 10, 1, head=["age", "sex", "outcome"])
    node = f'client-id=0 data="{tmp_path / "mine.csv"}" state="{tmp_path / "state"}"'
    (finding,) = check.samples_here(str(tmp_path / "fed"), node)
    assert "mine.csv has no column 'pressure' for the samples" in finding.mistake
    assert list(check.samples_here(None, node)) == []  # without the server's table, nothing is known
