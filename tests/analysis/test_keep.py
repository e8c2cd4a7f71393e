"""Ended runs are kept in tables, and commands read a table as they read run folders."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

import similarity
from fedjax_mr.analysis import frame, groups, runs, tables
from fedjax_mr.analysis.__main__ import main as analysis
from fedjax_mr.analysis.command import script
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_rows, read_summary
from fedjax_mr.results import kept
from fedjax_mr.results.kept import KeptRun
from record import documents, keep, pages
from record.command import main

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def both(finished):
    """The folders of two finished runs."""
    return [str(finished(strategy)) for strategy in ("fedavg", "fedmr")]


@pytest.fixture
def table(both, tmp_path):
    """A table of these two runs."""
    path = tmp_path / "results" / "digits.jsonl.gz"
    assert keep.keep(groups.find(both), path) == 2
    return path


def test_the_pages_have_tables_of_kept_runs():
    texts = [documents.read(page) for page in documents.pages(EXPERIMENTS)]
    assert sum(len(pages.TABLE.findall(text)) for text in texts) > 5


def test_every_kept_run_is_read_as_it_was_recorded():
    """Flags of earlier versions have other names today; a method of a plug-in keeps its settings."""
    renamed = {"fedmr_secure", "fedmr_secure_when", "fedmr_secure_share", "fedmr_secure_repetitions"}
    for path in kept.find(EXPERIMENTS / "results"):
        recorded = {flag: value for flag, value in kept.run(path).config.items() if flag not in renamed}
        values = configuration.to_json(configuration.load(path))
        assert {flag: values[flag] for flag in recorded} == recorded, path


def test_kept_runs_name_no_machine():
    results = list((EXPERIMENTS / "results").iterdir())
    assert results and all(path.name.endswith(kept.SUFFIX) and path.stat().st_size < 1_000_000 for path in results)
    for path in kept.find(EXPERIMENTS / "results"):
        run = kept.run(path)
        assert run.config["data_dir"] is None and run.config["run_dir"] is None and run.config["compare_to"] == []
        names = [run.config.get(flag) for flag in ("dataset", "public_from", "partition_file")]
        assert not any("/" in name for name in (*names, (run.summary or {}).get("dataset")) if name)


def test_a_table_has_what_the_run_folders_have(both, table):
    """Every command that reads evaluations says the same of both."""
    assert [line.split()[1] for line in tables.accuracy_table(both).splitlines()[1:]] == ["1", "1"]
    for format in tables.FORMATS:
        assert tables.accuracy_table([table], format=format) == tables.accuracy_table(both, format=format)
    for folder, run in zip(both, sorted(kept.find(table)), strict=True):
        assert read_rows(run) == read_rows(folder) and read_summary(run) == read_summary(folder)
    (one,) = runs.read([f"{table}/fedmr*"])
    assert one.config.strategy == "fedmr" and one.state == "finished" and one.checkpoints() == []


def test_a_table_makes_the_data_frame_of_its_run_folders(both, table):
    pytest.importorskip("pandas")
    columns = ["method", "seed", "state", "round", "accuracy", "loss"]
    assert frame(table)[columns].equals(frame(both)[columns])


def test_pictures_of_kept_runs_are_drawn_beside_the_table(table, capsys):
    assert analysis(["curves", str(table)]) == 0
    assert str(table.parent / "analysis") in capsys.readouterr().out
    assert script(similarity, [f"{table}/fedmr*", f"{table}/fedavg*"]) == 0
    assert str(table.parent / "analysis") in capsys.readouterr().out


def test_keeping_runs_again_changes_nothing(both, table, tmp_path, capsys):
    before = table.read_bytes(), table.stat().st_mtime_ns
    assert keep.keep(groups.find(both), table) == 2
    assert (table.read_bytes(), table.stat().st_mtime_ns) == before
    assert main(["keep", both[1], "--name=other", f"--folder={tmp_path}"]) == 0
    assert main(["keep", both[0], "--name=other", f"--folder={tmp_path}"]) == 0  # one after the other, in another order
    assert "other.jsonl.gz, which has 2" in capsys.readouterr().out
    assert (tmp_path / "results" / "other.jsonl.gz").read_bytes() == before[0]


def test_files_of_samples_and_divisions_are_kept_by_their_names(finished, tmp_path):
    (run,) = runs.read([str(finished("fedmr"))])
    files = {"dataset": "mine.npz", "public_from": "other.npz", "partition_file": "partition.npz"}
    paths = {name: f"/somewhere/{file}" for name, file in files.items()}
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, **paths, architectures_from=("/else/local",)))
    keep.keep([run], tmp_path / "own.jsonl.gz")
    ((config, summary, *_),) = kept.read(tmp_path / "own.jsonl.gz").values()
    assert {name: config[name] for name in files} == files and config["architectures_from"] == ["local"]
    assert summary["dataset"] == "mine.npz"
    assert str(finished("fedmr").parent) not in gzip.decompress((tmp_path / "own.jsonl.gz").read_bytes()).decode()


def test_runs_are_kept_and_tabled(both, tmp_path, capsys):
    for flags in EXPERIMENTS.glob("*.flags"):
        (tmp_path / flags.name).write_text(flags.read_text())
    document = tmp_path / "RESULTS.md"
    document.write_text("Before.\n\n<!-- table digits --target=0.2 -->\nold\n<!-- end -->\n\nAfter.\n")
    assert main(["keep", *both, "--name=digits", f"--folder={tmp_path}"]) == 0
    assert main([f"--folder={tmp_path}"]) == 0
    before, rest = document.read_text().split("<!-- table digits --target=0.2 -->\n")
    shown, after = rest.split("<!-- end -->")
    assert (before, after) == ("Before.\n\n", "\n\nAfter.\n")
    assert shown == tables.accuracy_table(both, format="markdown", target=0.2) + "\n"
    capsys.readouterr()
    assert main([f"--folder={tmp_path}"]) == 0
    assert capsys.readouterr().out == "all pages and flag files are up to date\n"


def test_a_run_kept_by_a_version_with_fewer_options_is_replaced(finished, table):
    (name,) = [each for each in kept.read(table) if each.startswith("fedmr")]
    content = kept.read(table)
    old = content[name]._replace(config={flag: value for flag, value in content[name].config.items()})
    del old.config["fedmr_unit"]
    del content[name]
    keep.write({**content, "fedmr-seed=0-01234567": old}, table)
    assert keep.keep(runs.read([str(finished("fedmr"))]), table) == 2
    assert name in kept.read(table) and "fedmr-seed=0-01234567" not in kept.read(table)


def test_the_numbers_of_a_landscape_are_kept_with_the_run(finished, table, tmp_path):
    (name,) = [each for each in kept.read(table) if each.startswith("fedmr")]
    numbers = tmp_path / "sharpness.json"
    numbers.write_text(json.dumps({"of": "test", "runs": {name: {"rise": 0.5}}}))
    words = ["keep", str(finished("fedmr")), "--name=digits", f"--folder={tmp_path}"]
    assert main([*words, f"--sharpness={numbers}"]) == 0
    assert kept.read(table)[name].sharpness == {"of": "test", "rise": 0.5}
    assert main(words) == 0  # and stay where the run is kept again without them
    assert kept.read(table)[name].sharpness == {"of": "test", "rise": 0.5}


def test_a_diverged_run_is_kept_without_its_message(finished, tmp_path):
    (run,) = runs.read([str(finished("fedavg"))])
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "config.json").write_text((run.path / "config.json").read_text())
    (broken / "diverged.txt").write_text(f"diverged; the checkpoint in {broken} stays\n")
    path = tmp_path / "results" / "digits.jsonl.gz"
    keep.keep(runs.read([str(broken)]), path)
    assert str(tmp_path) not in gzip.decompress(path.read_bytes()).decode()
    page = "<!-- table digits -->\n<!-- end -->\n"
    assert "| fedavg | 1 diverged |" in pages.with_tables(page, tmp_path / "results")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["keep", "run"], "required: --name"),
        (["keep", "run", "--name=x"], "run has not ended (new)"),
        (["keep", "nowhere", "--name=x"], "nowhere is not a run folder and holds none"),
        (["keep", "done", "--name=x", "--sharpness=absent"], "cannot read absent"),
        (["keep", "done", "--name=x", "--sharpness=run/config.json"], "is not a file of studies/landscape.py"),
        (["--folder=absent"], "absent/results is not a run folder and holds none"),
    ],
)
def test_bad_input(finished, tmp_path, monkeypatch, arguments, part, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"strategy": "fedmr"}))
    (tmp_path / "done").symlink_to(finished("fedmr"))
    assert main([*arguments, *([] if "--folder=absent" in arguments else ["--folder=."])]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"not gzip", "is damaged"),
        (gzip.compress(b"{}\n", mtime=0), "is damaged (line 1 is not a kept run)"),
        (gzip.compress(b"[1]\n", mtime=0), "is damaged (line 1 is not a kept run)"),
        (gzip.compress(b"{\n", mtime=0), "is damaged"),
        (gzip.compress(b'{"run": "a", "config": {}, "summary": null, "rows": []}\n' * 2, mtime=0), "it has two runs a"),
        (gzip.compress(b'{"run": "a", "config": {}, "summary": null, "rows": []}\n', mtime=0)[:-5], "is damaged"),
        (gzip.compress(b'{"run": "a", "config": {}, "summary": null, "rows": []}\n', mtime=0), "cannot be read"),
    ],
)
def test_a_damaged_table_is_one_line(tmp_path, content, part, capsys):
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(content)
    assert analysis(["table", str(path)]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1


def test_what_a_table_does_not_have_is_said(table, tmp_path, capsys):
    assert analysis(["table", f"{table}/moon*"]) == 2
    assert f"{table} has no run moon*" in capsys.readouterr().err
    assert analysis(["clients", f"{table}/fedmr*"]) == 2
    assert "has no models: a table of kept runs holds metrics alone" in capsys.readouterr().err
    path = tmp_path / "impossible.jsonl.gz"
    (config, summary, _, _) = next(iter(kept.read(table).values()))
    keep.write({"run": KeptRun(config, summary, [{"accuracy": 0.5}])}, path)
    with pytest.raises(UserError, match=r"run is damaged \(line 1 is not an evaluation\)"):
        read_rows(path / "run")
    keep.write({"run": KeptRun(config, summary, [{"round": 1, "loss": 0.5}])}, path)
    assert analysis(["table", str(path)]) == 2
    assert capsys.readouterr().err == f"fedjax-mr: {path}/run is damaged (an evaluation has no accuracy)\n"
