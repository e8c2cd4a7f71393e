"""What is read from a damaged run folder is refused in one line; going on mends what can be made anew."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import main, sweep
from fedjax_mr.analysis.__main__ import main as analysis
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_rows, read_summary
from fedjax_mr.results import manifest

FLAGS = ["--strategy=fedavg", "--model=logistic", "--clients=4", "--cohort=2", "--local_epochs=1", "--eval_every=2"]
FLAGS += ["--checkpoint_every=2", "--devices=1", "--noprogress"]
X = np.full((1, 8, 8, 1), 0.5, np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("trained") / "run"
    assert main.main([*FLAGS, "--rounds=6", f"--run_dir={place}"]) == 0
    return place


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, "run"))


def replaced(path, pattern, by):
    text = path.read_text()
    changed = re.sub(pattern, by, text, count=1)
    assert changed != text
    path.write_text(changed)


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows_without_seconds(folder):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_rows(folder)]


@pytest.mark.parametrize(
    ("name", "pattern", "by"),
    [
        ("metrics.jsonl", r'"accuracy": 0\.\d', '"accuracy": 0.5'),
        ("metrics.jsonl", r'"round": 4', '"round": 5'),
        ("summary.json", r'"accuracy_mean_last_10": 0\.\d', '"accuracy_mean_last_10": 0.11'),
        ("config.json", r'"seed": 0', '"seed": 7'),
    ],
)
def test_tables_and_load_refuse_what_is_not_as_it_was_written(run, name, pattern, by, capsys):
    replaced(run / name, pattern, by)
    assert analysis(["best", "run", "--over=lr"] if name == "summary.json" else ["table", "run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedjax-mr: run/{name} ") and said.count("\n") == 1
    attribute = "summary" if name == "summary.json" else "rows"
    assert f"run/{name} " in refusal(lambda: getattr(fmr.load("run"), attribute))
    if name != "summary.json":  # which is written anew
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
        assert main.main([*FLAGS, "--rounds=8", "--run_dir=run", "--resume"]) == 2
        assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}


def test_the_samples_and_the_partition_are_those_of_the_checkpoint_and_resuming_writes_them_anew(run, trained, capsys):
    expected = fmr.load("run").predict(X)
    replaced(run / "samples.json", r'"mean": \[\s*0\.5', '"mean": [0.7')
    assert "run/samples.json is damaged or missing: resuming the run" in refusal(lambda: fmr.load("run").predict(X))
    (run / "partition.npz").unlink()
    assert main.main([*FLAGS, "--rounds=6", "--run_dir=run", "--resume"]) == 0
    assert "damaged or missing files of run are written again: samples.json, partition.npz" in capsys.readouterr().err
    assert (run / "partition.npz").read_bytes() == (trained / "partition.npz").read_bytes()
    np.testing.assert_array_equal(fmr.load("run").predict(X), expected)


def test_swapped_checkpoints_are_damaged(run):
    for name, other in (("4", "x"), ("6", "4"), ("x", "6")):
        (run / "checkpoints" / name).rename(run / "checkpoints" / other)
    assert "it is the checkpoint of round 4" in refusal(lambda: fmr.load("run").predict(X))
    assert main.main([*FLAGS, "--rounds=6", "--run_dir=run", "--resume"]) == 2


def test_a_sweep_does_not_count_a_damaged_run_as_done(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, "--rounds=2", "--sweep_dir=runs"]
    (planned,) = sweep.plan(flags)[1]
    assert main.main([*FLAGS, "--rounds=2", f"--run_dir={planned.folder}"]) == 0
    (again,) = sweep.plan(flags)[1]
    assert again.folder == planned.folder
    for name, pattern, by in (
        ("summary.json", r'"rounds": 2', '"rounds": 3'),
        ("metrics.jsonl", r'"loss": ', '"loss": 1'),
        ("config.json", r'"lr": 0', '"lr": 1'),
    ):
        text = (planned.folder / name).read_text()
        replaced(planned.folder / name, pattern, by)
        assert f"{planned.folder / name} " in refusal(lambda: sweep.plan(flags))
        (planned.folder / name).write_text(text)
    values = json.loads((planned.folder / "config.json").read_text()) | {"lr": 3.0}
    (planned.folder / "manifest.json").unlink()
    (planned.folder / "config.json").write_text(json.dumps(values))
    assert "holds a run with other settings: lr: " in refusal(lambda: sweep.plan(flags))


def of_version_0_3(folder):
    """Change a run folder into the form of version 0.3.0, whose checksums stood in the files themselves."""
    (folder / "manifest.json").unlink()
    for name in ("config.json", "summary.json"):
        values = json.loads((folder / name).read_text())
        if name == "summary.json":
            values["made_from"] = {"metrics.jsonl": "a chain of checksums", "clients.csv": "a checksum"}
        checksum = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        (folder / name).write_text(json.dumps({"checksum": checksum, **values}))
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        content = json.loads(path.read_text())["content"]
        content["meta"]["checksums"] = {"evaluations": ["a chain of checksums"], "samples.json": "a checksum"}
        path.write_text(manifest.text_of(**content))


def of_version_0_2(folder):
    """The same of version 0.2, which wrote no checksums beside those of checkpoints."""
    of_version_0_3(folder)
    for name in ("config.json", "summary.json"):
        values = json.loads((folder / name).read_text())
        for added in ("checksum", "made_from"):
            values.pop(added, None)
        (folder / name).write_text(json.dumps(values))
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        content = json.loads(path.read_text())["content"]
        for added in ("checksums", "test_data"):
            del content["meta"][added]
        path.write_text(manifest.text_of(**content))


@pytest.mark.parametrize("version", [of_version_0_3, of_version_0_2])
def test_a_folder_of_an_earlier_version_goes_on_with_the_same_numbers(run, tmp_path, version):
    straight = tmp_path / "straight"
    assert main.main([*FLAGS, "--rounds=8", f"--run_dir={straight}"]) == 0
    version(run)
    assert fmr.load("run").summary["rounds"] == 6 and "made_from" not in fmr.load("run").summary
    assert main.main([*FLAGS, "--rounds=8", "--run_dir=run", "--resume"]) == 0
    assert rows_without_seconds("run") == rows_without_seconds(straight)
    np.testing.assert_array_equal(fmr.load("run").predict(X), fmr.load(straight).predict(X))
    sealed = [set(json.loads((place / "manifest.json").read_text())["content"]["files"]) for place in (run, straight)]
    assert sealed[0] == sealed[1] >= {"config.json", "metrics.jsonl", "summary.json"}


def test_the_settings_and_the_summary_of_version_0_3_still_have_their_checksums(run):
    of_version_0_3(run)
    replaced(run / "config.json", r'"seed": 0', '"seed": 7')
    assert "its values do not fit its checksum" in refusal(lambda: fmr.load("run"))
    replaced(run / "summary.json", r'"rounds": 6', '"rounds": 5')
    assert "its values do not fit its checksum" in refusal(lambda: read_summary("run"))
