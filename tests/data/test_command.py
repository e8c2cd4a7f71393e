"""The command ``python -m fedjax_mr.data``: a table, a picture, and errors of one line."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedjax_mr import data, plots
from fedjax_mr.data.__main__ import main
from fedjax_mr.data.partition_table import partition_table


def test_shows_a_partition(tmp_path, capsys):
    assert (
        main(["--clients=8", "--alpha=0.3", "--public_share=0.1", "--holdout_clients=2", f"--run_dir={tmp_path / 'a'}"])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("digits: 8 clients, ")
    assert "public set: 144 labelled samples" in out
    assert "held out: 2 clients" in out
    assert (tmp_path / "a" / "partition.png").read_bytes().startswith(b"\x89PNG")
    again = [f"--partition_file={tmp_path / 'a' / 'partition.npz'}", "--clients=0", f"--run_dir={tmp_path / 'b'}"]
    assert main(again) == 0
    repeated = capsys.readouterr().out
    assert out.partition("saved")[0] == repeated.partition("saved")[0]


def test_a_division_for_several_networks(tmp_path, monkeypatch, capsys):
    """The flag file of a method with several networks is accepted. Nothing is trained. The default folder is used."""
    monkeypatch.chdir(tmp_path)
    assert main(["--model=logistic,mlp", "--clients=4", "--cohort=9", "--picture_format=svg"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digits: 4 clients, ")
    (folder,) = tmp_path.glob("runs/data/digits-dirichlet-*")
    assert {path.name for path in folder.iterdir()} == {"partition.svg", "partition.npz"}
    assert str(folder.relative_to(tmp_path)) in out.splitlines()[-1] and len(list(tmp_path.iterdir())) == 1


def test_all_natural_clients_are_the_default(tmp_path, capsys, monkeypatch):
    """As in README: ``--dataset=mine.npz --partition=natural`` uses all clients; elsewhere the default is 20."""
    monkeypatch.setattr(plots, "partition", lambda *_, **__: None)
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((70, 3), np.float32), y=np.arange(70) % 5, client=np.arange(70) // 10)
    natural = [f"--dataset={path}", "--partition=natural", f"--run_dir={tmp_path}"]
    for flags, clients in (([], 7), (["--clients=4"], 4), (["--clients=0"], 7)):
        assert main([*natural, *flags]) == 0
        assert capsys.readouterr().out.startswith(f"mine: {clients} clients, ")
    assert main([f"--dataset={path}", f"--partition_file={tmp_path / 'partition.npz'}", f"--run_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith("mine: 7 clients, ")
    assert main([*natural, "--clients=20"]) == 2
    line = capsys.readouterr().err
    assert "mine has 7 natural clients with training samples, too few" in line and "--clients=0 takes all" in line


def test_table_counts_samples_and_classes():
    x, y = np.zeros((100, 2), np.float32), np.repeat([0, 1], 50)
    client = np.repeat([0, 1, 2], [50, 30, 20])
    dataset = data.from_arrays(x, y, client=client, x_test=x, y_test=y, name="mine")
    lines = partition_table(data.federate(dataset, partition="natural", num_clients=0)).splitlines()
    assert lines[0] == "mine: 3 clients, 100 training samples, 100 test samples, 2 classes, float32 2"
    assert lines[2].split() == ["training", "samples", "20", "30", "33.3", "50", "12.5", "100"]
    assert lines[4].split() == ["all", "samples", "40", "60", "66.7", "100", "24.9", "200"]
    assert lines[5].split() == ["classes", "1", "1", "1.0", "1", "0.0"]


def test_table_of_a_regression_counts_no_classes():
    x, y = np.zeros((40, 2), np.float32), np.arange(40.0)
    dataset = data.from_arrays(x, y, task="regression", client=np.arange(40) % 4, name="doses")
    table = partition_table(data.federate(dataset, partition="natural", num_clients=0))
    assert table.startswith("doses: 4 clients, 32 training samples, 8 test samples, regression, float32 2\n")
    assert "classes" not in table


def test_table_repeats_what_was_repaired():
    x, y = np.zeros((60, 2), np.float32), np.arange(60) % 10
    federated = data.federate(data.from_arrays(x, y), num_clients=12, alpha=0.01)
    assert federated.notes
    assert federated.notes[0] in partition_table(federated)


@pytest.mark.parametrize(
    ("num_clients", "num_classes"), [(1, 2), (20, 10), (100, 62), pytest.param(3400, 10, marks=pytest.mark.slow)]
)
def test_picture(tmp_path, num_clients, num_classes):
    counts = np.random.default_rng(0).integers(0, 50, (num_clients, num_classes))
    plots.partition(counts, tmp_path / "picture.png", title="so many $clients")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "python -m fedjax_mr.data prepare NAME" in capsys.readouterr().out


def bad(files):
    """Arguments, and words that the error line must contain."""
    np.savez(files / "nan.npz", x=np.full((40, 3), np.nan, np.float32), y=np.arange(40) % 4)
    np.savez(files / "lengths.npz", x=np.zeros((40, 3), np.float32), y=np.arange(39) % 4)
    np.savez(files / "labels.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) - 1)
    np.savez(files / "floats.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) / 2)
    np.savez(files / "clients.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 4, client=np.arange(40) % 4)
    (files / "empty.npz").write_bytes(b"")
    (files / "leaf" / "train").mkdir(parents=True)
    (files / "leaf" / "test").mkdir()
    (files / "leaf" / "train" / "a.json").write_text('{"users": ["a"], ')
    (files / "leaf" / "test" / "a.json").write_text("")
    (files / "tfds" / "mnist" / "1.0.0").mkdir(parents=True)
    (files / "other.json").write_text(json.dumps({"dataset": "cifar10", "train_data": {"0": [1]}}))
    (files / "file").write_text("")
    (files / "mine.csv").write_text("age,ill\n1,2\n")
    return {
        "labels out of range": (["--dataset=labels.npz"], "labels range from -1 to 38"),
        "labels no integers": (["--dataset=floats.npz"], "one integer per sample"),
        "nan": (["--dataset=nan.npz"], "not finite"),
        "different lengths": (["--dataset=lengths.npz"], "40 samples but 39 labels"),
        "empty npz": (["--dataset=empty.npz"], "empty, truncated or not an .npz file"),
        "a table": (["--dataset=mine.csv"], "mine.csv is a table: name the column to predict, --target=COLUMN or"),
        "a folder": (["--dataset=./leaf"], "./leaf is not a dataset: convert your data to a CSV file"),
        "missing npz": (["--dataset=absent.npz"], "absent.npz does not exist"),
        "truncated json": (["--dataset=femnist", "--data_dir=leaf"], "empty, truncated or not a LEAF file"),
        "no leaf folder": (["--dataset=shakespeare"], "shakespeare needs --data_dir"),
        "version": (["--dataset=mnist", "--data_dir=tfds"], "contains version 1.0.0 of mnist, but 3.0.1 is needed"),
        "missing set": (
            ["--dataset=cifar100", "--data_dir=tfds", "--offline"],
            "data prepare cifar100 --data_dir=tfds",
        ),
        "coarse": (["--label_mode=coarse"], "--label_mode=coarse is no setting of --dataset=digits"),
        "alpha": (["--alpha=0"], "--alpha=0.0 is out of range (allowed: > 0)"),
        "too many clients": (["--clients=1438"], "1438 clients are more than the 1437 training samples"),
        "filtered": (
            ["--dataset=clients.npz", "--partition=natural", "--clients=0", "--min_samples_per_client=11"],
            "has 0 natural clients with training samples and at least 11 samples in all",
        ),
        "no natural clients": (["--partition=natural"], "digits has no natural clients"),
        "partition file": (["--partition_file=other.json"], "belongs to cifar10, but this is digits"),
        "no partition file": (["--partition_file=absent.npz"], "absent.npz does not exist"),
        "unwritable": (["--run_dir=file/run"], "cannot write into file/run"),
        "unknown": (["--dataset=cifar11"], "did you mean 'cifar10'?"),
        "prepare nothing": (["prepare"], "prepare takes one name"),
        "prepare unknown": (["prepare", "mnisd"], "did you mean 'mnist'?"),
        "prepare offline": (
            ["prepare", "svhn_cropped", "--offline", "--data_dir=tfds"],
            "the preparation of svhn_cropped needs",
        ),
    }


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, (arguments, words) in bad(tmp_path).items():
        assert main(arguments) == 2, name
        captured = capsys.readouterr()
        assert words in captured.err, name
        assert captured.err.startswith("fedjax-mr: "), name
        assert captured.err.count("\n") == 1, name
        assert captured.out == "", name


NO_CLIENT = "partition 'dirichlet' needs at least 1 client, not 0; 0 is only for natural clients"


def run_the_command(folder, *arguments):
    command = [sys.executable, "-m", "fedjax_mr.data", *arguments, f"--run_dir={folder}"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow  # in test_main and the analysis, real commands start quickly
def test_the_real_command_refuses_in_one_line(tmp_path):
    wrong = run_the_command(tmp_path, "--clients=0")
    assert wrong.returncode == 2
    assert (
        wrong.stderr
        == "fedjax-mr: partition 'dirichlet' needs at least 1 client, not 0; 0 is only for natural clients\n"
    )


@pytest.mark.slow
def test_the_real_command(tmp_path):
    good, wrong = run_the_command(tmp_path, "--clients=4"), run_the_command(tmp_path, "--clients=0")
    assert (good.returncode, wrong.returncode) == (0, 2)
    assert good.stdout.startswith("digits: 4 clients")
    assert (
        wrong.stderr
        == "fedjax-mr: partition 'dirichlet' needs at least 1 client, not 0; 0 is only for natural clients\n"
    )
