"""Validation samples are always looked at; a run ends when they stop to improve, and its best checkpoint stays."""

import json
from pathlib import Path

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import main as command
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.experiment import Experiment
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.results.rows import best_row, without_better_loss
from fedjax_mr.sweep.__main__ import main as sweep

SMALL = dict(
    model="logistic", strategy="fedavg", clients=6, cohort=3, local_epochs=1, rounds=12, eval_every=1, devices=1,
    lr=0.05, progress=False, validation_share=0.2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(**changes):
    return fmr.run(fmr.Config(**SMALL | changes), record=False)


def forced(monkeypatch, losses, accuracies=None):
    """Let evaluations find these validation losses, of rounds 1, 2, ..., and accuracies."""
    ordinary = Experiment._evaluate

    def evaluate(self, progress, report, done):
        row = ordinary(self, progress, report, done) | {"validation_loss": losses[done - 1]}
        return row | ({} if accuracies is None else {"validation_accuracy": accuracies[done - 1]})

    monkeypatch.setattr(Experiment, "_evaluate", evaluate)


def without_time(result):
    return [row | {"seconds": 0} for row in result.rows]


# --- Validation accuracy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_withheld_samples_are_always_tested(placement):
    """The deployed model's, with each client's own samples in NumPy; the same for samples that the host keeps."""
    result = run(rounds=2, data_placement=placement, run_dir="a")

    assert "personal_accuracy" not in result.rows[-1] and not Path("a/clients.csv").exists()
    assert {"validation_accuracy", "validation_loss"} <= set(result.rows[0])
    federated = federated_data(fmr.Config(**SMALL))
    scores = []
    for client in range(6):
        rows = federated.validation.rows(client)
        logits = np.log(fmr.load("a").predict(federated.dataset.x[rows]))
        right = logits.argmax(1) == federated.dataset.y[rows]
        scores.append((right.mean(), -logits[np.arange(len(rows)), federated.dataset.y[rows]].mean()))
    accuracy, loss = np.mean(scores, axis=0)
    assert result.rows[-1]["validation_accuracy"] == pytest.approx(accuracy)
    assert result.rows[-1]["validation_loss"] == pytest.approx(loss, rel=1e-4)
    assert result.summary["validation_accuracy"] == result.rows[-1]["validation_accuracy"]


@pytest.mark.slow
def test_a_tuning_sweep_is_never_wasted(capsys):
    flags = [f"--{name}={value}" for name, value in SMALL.items() if name not in ("progress", "rounds")]
    assert sweep([*flags, "--rounds=2", "--grid", "lr=0.01,0.1", "--sweep_dir=s"]) == 0
    from fedjax_mr.analysis.__main__ import main as analysis

    assert analysis(["best", "s", "--over=lr"]) == 0
    assert "0.1 (largest)" in capsys.readouterr().out


# --- Patience --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "waited"),
    [([], 0), ([3, 2, 1], 0), ([1, 2, 2], 2), ([2, 1, 1], 1), ([1, None, None], 2), ([None], 1)],
)
def test_evaluations_without_a_better_loss(losses, waited):
    rows = [{"loss": 0.0, "validation_loss": loss} for loss in losses]
    assert without_better_loss(rows) == waited
    assert without_better_loss([{"loss": loss} for loss in losses]) == waited  # no validation: the test loss


def test_the_best_row_is_the_first_of_equals():
    rows = [{"round": n, "accuracy": 1 - n / 10, "validation_accuracy": v} for n, v in enumerate([0.1, 0.5, None, 0.5])]
    assert best_row(rows)["round"] == 1 and best_row([]) is None
    assert best_row([{"round": 5, "accuracy": None}, {"round": 6, "accuracy": 0.2}])["round"] == 6


LOSSES = [5, 4, 3, 3.5, 3.4, 3.3, 1, 1, 1, 1, 1, 1]


def test_a_run_ends_when_patience_ends_and_resumes_bit_for_bit(monkeypatch, equal, capsys):
    forced(monkeypatch, LOSSES)
    straight = run(patience=3, run_dir="straight")
    assert [row["round"] for row in straight.rows] == [1, 2, 3, 4, 5, 6]
    assert straight.summary["ended_by"] == "patience" and straight.summary["rounds"] == 6
    assert json.loads(Path("straight/summary.json").read_text())["ended_by"] == "patience"

    killed, ordinary = [], Experiment.record_due

    def kill(self, progress, report, done, **options):
        if done == 5 and not killed:
            killed.append(done)
            raise RuntimeError("killed")
        return ordinary(self, progress, report, done, **options)

    monkeypatch.setattr(Experiment, "record_due", kill)
    with pytest.raises(RuntimeError, match="killed"):
        run(patience=3, run_dir="broken")
    resumed = run(patience=3, run_dir="broken", resume=True)
    assert without_time(resumed) == without_time(straight)
    equal(resumed.state, straight.state)
    again = run(patience=3, run_dir="broken", resume=True)  # nothing is left to do
    assert again.summary["rounds"] == 6 and again.summary["ended_by"] == "patience"
    capsys.readouterr()
    flags = [f"--{name}={value}" for name, value in SMALL.items() if name != "progress"]
    assert command.main([*flags, "--noprogress", "--patience=3", "--run_dir=told"]) == 0
    assert "ended early by  " in (out := capsys.readouterr().out) and "--patience" in out


def test_without_patience_all_rounds_are_done(monkeypatch):
    forced(monkeypatch, LOSSES)
    assert run(rounds=8, eval_every=4, run_dir="a").summary["ended_by"] == "rounds"


# --- The best checkpoint ---------------------------------------------------------------------------------------------

ACCURACIES = [0.1, 0.2, 0.9, 0.3, 0.4, 0.9, 0.1, 0.2]


def test_the_best_checkpoint_stays_beside_the_newest_and_is_loaded(monkeypatch, equal, tmp_path):
    forced(monkeypatch, [1.0] * 8, ACCURACIES)
    best = run(rounds=3, keep_best=True, run_dir="short").variables
    result = run(rounds=8, keep_best=True, checkpoint_every=4, keep_checkpoints=1, run_dir="a")
    rounds = Checkpoints(tmp_path / "a" / "checkpoints").rounds
    assert rounds() == [3, 8] and result.summary["best_checkpoint"] == 3  # 3 is due for no other reason
    loaded = fmr.load("a", best=True)
    assert loaded.round == 3
    equal(loaded.variables, best)
    equal(fmr.load("a").variables, result.variables)
    without = run(rounds=8, keep_checkpoints=1, run_dir="b")
    equal(without.variables, result.variables)
    for arguments, message in (
        (
            dict(folder="b", best=True),
            r"best evaluation in round 3 \(checkpoints of rounds: 8\): train with keep_best=True",
        ),
        (dict(folder="a", best=True, round=8), "round 8 and the best round exclude each other"),
    ):
        with pytest.raises(UserError, match=message):
            fmr.load(**arguments)


@pytest.mark.slow
def test_the_best_checkpoint_outlives_a_resumption(monkeypatch, equal):
    forced(monkeypatch, [1.0] * 8, ACCURACIES)
    straight = run(rounds=8, keep_best=True, keep_checkpoints=1, run_dir="a")
    run(rounds=5, keep_best=True, keep_checkpoints=1, run_dir="b")
    resumed = run(rounds=8, keep_best=True, keep_checkpoints=1, run_dir="b", resume=True)
    assert without_time(resumed) == without_time(straight)
    equal(fmr.load("b", best=True).variables, fmr.load("a", best=True).variables)


def test_early_stopping_is_called_patience(capsys):
    assert command.main(["--early_stopping=3"]) == 2
    assert "did you mean --patience?" in capsys.readouterr().err
