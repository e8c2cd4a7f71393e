"""The command predict: a table in, predictions out, calibrated if wanted; bad input is one line."""

import csv

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.predict import main, write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on a table of two drugs whose outcome follows the dose."""
    folder = tmp_path_factory.mktemp("predict")
    rng = np.random.default_rng(0)
    dose = rng.normal(size=200).round(3)
    outcome = np.where(dose + 0.3 * rng.normal(size=200) > 0, "well", "ill")
    rows = [[f"site {row % 4}", dose[row], "ab"[row % 2], outcome[row]] for row in range(200)]
    with (folder / "trial.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["site", "dose", "drug", "outcome"], *rows])
    fmr.run(
        fmr.Config(
            dataset=str(folder / "trial.csv"), target="outcome", client_column="site", partition="natural", clients=0,
            cohort=4, rounds=10, model="mlp_table", validation_share=0.2, loss="weighted", run_dir=str(folder / "run"),
            progress=False, devices=1,
        ),
        record=False,
    )  # fmt: skip
    return folder


def predictions(path):
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


def test_a_table_becomes_classes_with_probabilities(run, capsys):
    new = run / "new.csv"
    new.write_text("drug,remark,dose\na,x,3\nb,y,-3\nc,z,\n")  # another order, another column, a new drug, no dose
    assert main([str(run / "run"), str(new), f"--out={run / 'out.csv'}"]) == 0
    assert "3 predictions in" in capsys.readouterr().out
    head, rows = predictions(run / "out.csv")
    assert head == ["prediction", "p(ill)", "p(well)"] and [row[0] for row in rows[:2]] == ["well", "ill"]
    np.testing.assert_allclose([float(row[1]) + float(row[2]) for row in rows], 1, rtol=1e-5)


def test_calibration_changes_the_probabilities_and_not_the_classes(run, capsys):
    source = str(run / "trial.csv")
    assert main([str(run / "run"), source, f"--out={run / 'plain.csv'}"]) == 0
    assert main([str(run / "run"), source, f"--out={run / 'calibrated.csv'}", "--calibrated"]) == 0
    assert ", temperature " in capsys.readouterr().out
    (_, plain), (_, calibrated) = (predictions(run / f"{name}.csv") for name in ("plain", "calibrated"))
    assert [row[0] for row in plain] == [row[0] for row in calibrated] and plain != calibrated


def test_class_weights_are_taken_out_of_the_probabilities_and_not_out_of_the_decision(run, tmp_path):
    saved = fmr.load(run / "run")
    counts = federated_data(saved.config).label_counts().sum(axis=0)  # of the training samples
    np.testing.assert_allclose(saved.calibrated().weights, counts.sum() / (2 * counts), rtol=1e-12)
    write(tmp_path / "out.csv", np.array([[0.4, 0.6]]), np.array([[0.7, 0.3]]), saved.samples)
    assert predictions(tmp_path / "out.csv")[1] == [["well", "0.7", "0.3"]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{run}/run"], "the following arguments are required: FILE"),
        (["{run}/nothing", "{run}/trial.csv"], "is not a run folder"),
        (["{run}/run", "{run}/few.csv"], "the table has no column 'drug' for the samples: it has dose"),
        (["{run}/run", "{run}/trial.csv", "--client=1"], "fedmr has no personal models"),
        (["{run}/run", "{run}/trial.csv", "--out={run}/no/such/p.csv"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, message):
    (run / "few.csv").write_text("dose\n1\n")
    assert main([each.format(run=run) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
