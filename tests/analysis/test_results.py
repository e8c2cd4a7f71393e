"""The pages say what the kept metrics say."""

import dataclasses
import json
from pathlib import Path

import pytest

from fedjax_mr.analysis import groups, pages, results, runs, tables
from fedjax_mr.analysis.__main__ import main
from fedjax_mr.experiment.kept import SHARPNESS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text("Before.\n\n<!-- table digits --target=0.2 -->\nold\n<!-- end -->\n\nAfter.\n")
    return path


def test_the_tables_are_those_of_the_kept_runs():
    texts = {page: pages.read(page) for page in pages.with_notebook(EXPERIMENTS / "RESULTS.md")}
    assert sum(len(results.TABLE.findall(text)) for text in texts.values()) > 5
    for page, text in texts.items():
        assert results.fill(text, EXPERIMENTS / "results") == text, f"{page}: run python -m fedjax_mr.analysis results"


def test_kept_runs_are_small_and_name_no_machine():
    kept = [path for path in (EXPERIMENTS / "results").rglob("*") if path.is_file()]
    names = {"config.json", "metrics.jsonl", "summary.json", "diverged.txt", SHARPNESS}
    assert {path.name for path in kept} <= names
    for path in kept:
        assert path.stat().st_size < 100_000
        if path.name == "config.json":
            values = json.loads(path.read_text())
            assert values["data_dir"] is None and values["run_dir"] is None and values["compare_to"] == []
            assert "/" not in f"{values.get('public_from')}{values.get('partition_file')}"
        if path.name in ("config.json", "summary.json"):
            assert "/" not in json.loads(path.read_text())["dataset"]


def test_files_of_samples_and_divisions_are_kept_by_their_names(finished, tmp_path):
    (run,) = runs.read([str(finished("fedmr"))])
    files = {"dataset": "mine.npz", "public_from": "other.npz", "partition_file": "partition.npz"}
    paths = {name: f"/somewhere/{file}" for name, file in files.items()}
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, **paths, architectures_from=("/else/local",)))
    kept = results.keep(run, tmp_path)
    config, summary = (json.loads((kept / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert {name: config[name] for name in files} == files and config["architectures_from"] == ["local"]
    assert summary["dataset"] == "mine.npz"


def test_runs_are_kept_and_tabled(finished, document, capsys):
    folders = [str(finished(strategy)) for strategy in ("fedavg", "fedmr")]
    assert main(["results", *folders, "--name=digits", f"--document={document}"]) == 0
    before, rest = document.read_text().split("<!-- table digits --target=0.2 -->\n")
    shown, after = rest.split("<!-- end -->")
    assert (before, after) == ("Before.\n\n", "\n\nAfter.\n")
    assert shown == tables.accuracy_table(folders, format="markdown", target=0.2) + "\n"
    kept = groups.find([document.parent / "results" / "digits"])
    assert len(kept) == 2 and all("seed=0" in run.path.name for run in kept)
    assert main(["results", f"--document={document}"]) == 0
    assert shown in document.read_text()
    assert "1 tables" in capsys.readouterr().out


def test_a_run_kept_by_a_version_with_fewer_options_is_replaced(finished, tmp_path):
    (run,) = runs.read([str(finished("fedmr"))])
    kept = results.keep(run, tmp_path / "kept")
    values = json.loads((kept / "config.json").read_text())
    del values["fedmr_unit"], values["checksum"]
    old = kept.rename(tmp_path / "kept" / "fedmr-seed=0-01234567")
    (old / "config.json").write_text(json.dumps(values))
    (tmp_path / "kept" / "notes").mkdir()
    assert results.keep(run, tmp_path / "kept") == kept
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {kept.name, "notes"}


def test_a_diverged_run_is_kept_without_its_message(finished, document, tmp_path):
    (run,) = runs.read([str(finished("fedavg"))])
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "config.json").write_text((run.path / "config.json").read_text())
    (broken / "diverged.txt").write_text(f"diverged; the checkpoint in {broken} stays\n")
    (only,) = runs.read([str(broken)])
    kept = results.keep(only, tmp_path / "results" / "digits")
    assert str(tmp_path) not in "".join(path.read_text() for path in kept.iterdir())
    assert "| fedavg | 0, 1 diverged |" in results.fill(document.read_text(), tmp_path / "results")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--name=x"], "give both or none"),
        (["run"], "give both or none"),
        (["run", "--name=x"], "run has not ended (new)"),
        ([], "results/digits is no run folder and holds none"),
        (["--document=absent.md"], "cannot read absent.md"),
    ],
)
def test_bad_input(document, tmp_path, monkeypatch, arguments, part, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"strategy": "fedmr"}))
    before = document.read_text()
    assert main(["results", f"--document={document}", *arguments]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1
    assert document.read_text() == before
