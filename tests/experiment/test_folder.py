"""The run folder is chosen, kept and cut as promised; metrics and summary are whole."""

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr import files, load
from fedjax_mr.analysis import runs
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import COLUMNS, RunFolder, read_rows, read_summary, run_state, runs_by_settings
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.results.locks import is_taken, lock


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def error_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def row(round, **changes):
    values = {
        "round": round,
        "accuracy": round / 100,
        "loss": 1 / round,
        "train_loss": 0.1,
        "similarity": 0.9,
        "bytes_down": 10 * round,
        "bytes_up": 20 * round,
        "images": 7 * round,
        "seconds": 0.5 * round,
    }
    return values | changes


def begun(config):
    """Open the folder of a new run and begin it."""
    folder = RunFolder.open(config)
    folder.begin(config)
    return folder


def a_run(config, *, rounds=(5, 10), checkpoint=10):
    """Make a run folder with evaluations and a checkpoint."""
    folder = begun(config)
    for round in rounds:
        folder.append(row(round))
    Checkpoints(folder.path / "checkpoints").save(checkpoint, {"w": np.ones(2)}, {})
    return folder.path


def csv_rows(folder):
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- Which folder ----------------------------------------------------------------------------------------------------


def test_new_folders_are_named_from_the_configuration():
    digest = configuration.digest(Config())
    paths = [begun(Config()).path for _ in range(3)]
    assert [str(path) for path in paths] == [f"runs/fedmr-digits-cnn_digits-{digest}-{i}" for i in (1, 2, 3)]
    assert configuration.load(paths[0]) == configuration.parse([])
    assert (paths[0] / "run.flags").exists()
    other = RunFolder.open(Config(seed=1)).path
    assert other.name.endswith("-1") and digest not in other.name
    own = RunFolder.open(Config(dataset="deep/my own-data.npz")).path
    assert own.parent == Path("runs") and "-my_own_data-" in own.name


def test_concurrent_runs_get_different_folders():
    start, paths = threading.Barrier(8), []

    def work():
        start.wait()
        paths.append(RunFolder.open(Config()).path)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 8


def test_run_dir_may_be_new_or_empty():
    assert RunFolder.open(Config(run_dir="a/b")).path == Path("a/b")
    Path("c").mkdir()
    assert not RunFolder.open(Config(run_dir="c")).resumed


def test_a_folder_with_something_in_it_is_refused():
    path = a_run(Config(run_dir="a"))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    message = error_of(RunFolder.open, Config(run_dir="a"))
    assert "a is not empty" in message and "resume=True" in message and "overwrite=True" in message
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_overwrite_removes_the_run_and_nothing_else():
    path = a_run(Config(run_dir="a"))
    for name in ("notes.txt", "summary.json", "curves.png"):
        (path / name).write_text("x")
    folder = begun(Config(run_dir="a", overwrite=True, lr=0.3))
    assert folder.rows() == [] and not folder.resumed
    visible = sorted(each.name for each in path.iterdir() if each.name != ".lock")
    assert visible == ["config.json", "manifest.json", "notes.txt", "run.flags"]
    assert configuration.load(path).lr == 0.3
    folder.append(row(5))
    assert [each["round"] for each in read_rows(path)] == [5]


def test_a_folder_that_a_kill_left_half_begun_is_overwritten(monkeypatch):
    """Whichever file is being removed or named when the process dies: what is left is known as a run folder."""

    class Killed(BaseException):
        pass

    config = Config(run_dir="r", overwrite=True)
    for survived in range(100):
        a_run(config)
        left = iter(range(survived))

        def deadly(function, left=left):
            def call(*arguments, **options):
                if next(left, None) is None:
                    raise Killed
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", deadly(Path.unlink))
            patch.setattr(os, "replace", deadly(os.replace))
            try:
                begun(config)
                break
            except Killed:
                pass
        assert configuration.load(begun(config).path).strategy == config.strategy
    assert 10 < survived < 99


def test_overwrite_needs_a_run_folder():
    Path("precious").mkdir()
    Path("precious/checkpoints").mkdir()
    Path("precious/metrics.csv").write_text("mine")
    assert "does not look like a run folder" in error_of(RunFolder.open, Config(run_dir="precious", overwrite=True))
    assert Path("precious/metrics.csv").read_text() == "mine"
    assert RunFolder.open(Config(run_dir="new", overwrite=True)).path == Path("new")


@pytest.mark.parametrize("written", [(), ("manifest.json",), ("manifest.json", "metrics.jsonl", "metrics.csv")])
def test_the_remains_of_a_removed_folder_can_be_overwritten(written):
    """Its run may write on while it is being removed."""
    path = a_run(Config(run_dir="a"))
    for each in path.iterdir():
        if each.name not in (".lock", "checkpoints", *written):
            each.unlink()
    assert run_state("a") == "new"
    assert "overwrite=True replaces it" in error_of(RunFolder.open, Config(run_dir="a"))
    (path / "checkpoints" / "best.ckpt").touch()  # of another program, perhaps
    assert run_state("a") == "started"
    assert "does not look like a run folder" in error_of(RunFolder.open, Config(run_dir="a", overwrite=True))
    (path / "checkpoints" / "best.ckpt").unlink()
    begun(Config(run_dir="a", overwrite=True))
    assert not (path / "checkpoints").exists() and (path / "config.json").exists()


def test_half_a_checkpoint_is_also_what_remains_of_a_removed_folder():
    Path("a/checkpoints/.partial-5/arrays").mkdir(parents=True)
    assert run_state("a") == "new"
    begun(Config(run_dir="a", overwrite=True))
    assert not Path("a/checkpoints").exists() and Path("a/config.json").exists()


def test_a_run_folder_that_is_removed_is_not_made_again():
    folder = begun(Config(run_dir="a"))
    checkpoints = Checkpoints("a/checkpoints")
    checkpoints.save(0, {"w": np.ones(2)}, {})
    folder.path.rename("elsewhere")
    assert "No such file or directory" in error_of(checkpoints.save, 5, {"w": np.ones(2)}, {})
    assert "No such file or directory" in error_of(folder.write_info, 5, {"x": np.ones(1)})
    assert not Path("a").exists()


def test_overwrite_follows_no_link_out_of_the_folder():
    path = a_run(Config(run_dir="a"))
    Path("kept").mkdir()
    Path("kept/file").write_text("mine")
    (path / "tensorboard").symlink_to(Path("kept").absolute())
    begun(Config(run_dir="a", overwrite=True))
    assert Path("kept/file").read_text() == "mine" and not (path / "tensorboard").exists()


@pytest.mark.parametrize(
    "name", ["info", "checkpoints", "metrics.jsonl", "config.json", "checkpoints/10", "info/3.npz"]
)
def test_a_run_folder_with_a_link_in_it_is_refused_and_what_it_leads_to_stays(name):
    path = a_run(Config(run_dir="a"))
    Path("a/info").mkdir()
    np.savez("a/info/3.npz", x=1)
    target = Path("outside").absolute()
    (path / name).rename(target)
    if target.is_dir():
        (target / "1.npz").write_text("mine")
        (target / ".partial-thesis").mkdir()
    (path / name).symlink_to(target)
    before = {each: each.stat().st_mtime_ns for each in [target, *target.rglob("*")]}
    for call in (lambda: RunFolder.open(Config(run_dir="a", resume=True)), lambda: load("a"), lambda: runs.read(["a"])):
        assert error_of(call).startswith(f"a/{name} is a symbolic link, which is not allowed in a: replace")
    assert before == {each: each.stat().st_mtime_ns for each in [target, *target.rglob("*")]}


def test_a_lock_or_a_temporary_file_that_is_a_link_leads_nowhere():
    path = a_run(Config(run_dir="a"))
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(Path("made").absolute())
    assert "cannot write into a" in error_of(lock, path)
    Path("kept").write_text("mine")
    Path(f".summary.{os.getpid()}.json").symlink_to("kept")
    with files.atomic_write("summary.json") as temporary:
        temporary.write_text("{}")
    assert not Path("made").exists() and Path("kept").read_text() == "mine"


def test_only_names_of_rounds_are_removed():
    path = a_run(Config(run_dir="a"))
    for name in (".partial-7", ".discarded-8", ".partial-thesis", ".discarded-", ".partial-7b"):
        (path / "checkpoints" / name).mkdir()
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    folder.write_info(10, {"x": np.ones(1)})
    folder.write_info(5, {"x": np.ones(1)})
    (path / "info" / "notes.npz").write_text("mine")
    folder.keep_info([10])
    Checkpoints(path / "checkpoints").save(15, {"w": np.ones(2)}, {})
    assert {each.name for each in (path / "info").iterdir()} == {"10.npz", "notes.npz"}
    left = {each.name for each in (path / "checkpoints").iterdir()}
    assert left == {"10", "15", ".partial-thesis", ".discarded-", ".partial-7b"}


def test_resume_takes_the_given_folder_or_the_newest_of_the_same_configuration():
    a_run(Config(run_dir="a"))
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    assert folder.resumed and [each["round"] for each in folder.rows()] == [5, 10]
    paths = [a_run(Config()) for _ in range(11)]  # 11 comes after 2
    a_run(Config(seed=1))
    assert RunFolder.open(Config(resume=True)).path == paths[-1]
    assert RunFolder.open(Config(resume=True, lanes=2, progress=False, checkpoint_every=3)).path == paths[-1]
    begun(Config())  # one that was stopped before its first checkpoint
    assert RunFolder.open(Config(resume=True)).path == paths[-1]


def test_a_run_of_a_version_with_fewer_options_is_known_by_its_settings():
    """As the run folder was named before an option with a default was added; the folder's name does not matter."""
    path = a_run(Config())
    values = json.loads((path / "config.json").read_text())
    del values["fedmr_unit"], values["public_max"]
    (path / "manifest.json").unlink()
    old = path.rename("runs/fedmr-digits-cnn_digits-01234567-3")
    (old / "config.json").write_text(json.dumps(values))
    Path("runs/fedmr-digits-cnn_digits-89abcdef-1").mkdir()
    Path("runs/fedmr-digits-cnn_digits-89abcdef-1/config.json").write_text('{"strategy": "fedmr", "of_later": 1}')
    assert RunFolder.open(Config(resume=True)).path == old
    assert runs_by_settings("runs") == {configuration.digest(Config()): [old]}
    assert runs_by_settings("nowhere") == {}
    assert "no run of this configuration" in error_of(RunFolder.open, Config(public_max=5, resume=True))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lr": 0.77}, f"lr: 0.77 (saved {Config().lr})"),
        (
            {"rounds": 7},
            f"a has trained 10 of {Config().rounds} rounds, so it cannot end after --rounds=7: set --rounds to 10",
        ),
        ({"strategy": "fedavg"}, "strategy: fedavg (saved fedmr)"),
        ({"lr": 0.77, "seed": 3}, f"lr: 0.77 (saved {Config().lr}); seed: 3 (saved 0)"),
    ],
)
def test_resuming_a_changed_configuration_is_refused(changes, part):
    a_run(Config(run_dir="a"))
    assert part in error_of(RunFolder.open, Config(run_dir="a", resume=True, **changes))


def test_resume_without_a_checkpoint_is_refused():
    assert "no folder nowhere" in error_of(RunFolder.open, Config(run_dir="nowhere", resume=True))
    assert "no run of this configuration" in error_of(RunFolder.open, Config(resume=True))
    Path("empty").mkdir()
    assert "empty has no checkpoint; is it" in error_of(RunFolder.open, Config(run_dir="empty", resume=True))
    begun(Config(run_dir="early"))
    (Path("early") / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "no checkpoint; start it anew with" in error_of(RunFolder.open, Config(run_dir="early", resume=True))
    assert RunFolder.open(Config(run_dir="early", overwrite=True)).path == Path("early")


def test_resume_of_something_else_is_refused():
    Path("other").mkdir()
    Checkpoints("other/checkpoints").save(0, {"w": np.ones(1)}, {})
    assert "no config.json" in error_of(RunFolder.open, Config(run_dir="other", resume=True))
    message = error_of(resolve, Config(run_dir="other", resume=True, overwrite=True))
    assert "resume=True" in message and "overwrite=True" in message


@pytest.mark.parametrize("run_dir", ["file", "file/run", "/proc/run"])
def test_unwritable_folders(run_dir):
    Path("file").write_text("")
    assert run_dir in error_of(RunFolder.open, Config(run_dir=run_dir))


def test_unwritable_root():
    Path("runs").write_text("a file in the way")
    assert "cannot write into runs" in error_of(RunFolder.open, Config())


def test_a_run_to_compare_with_must_be_there():
    assert "elsewhere is not a run folder" in error_of(RunFolder.open, Config(compare_to=("elsewhere",)))
    assert not Path("runs").exists()
    a_run(Config(run_dir="a"))
    RunFolder.open(Config(compare_to=("a",)))


def test_a_folder_in_use_is_refused():
    a_run(Config(run_dir="a"))
    hold = (
        "import fcntl, sys; file = open('a/.lock', 'a'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        for mode in ({"resume": True}, {"overwrite": True}):
            assert "another run is at work in a" in error_of(RunFolder.open, Config(run_dir="a", **mode))
        other.communicate()
    assert RunFolder.open(Config(run_dir="a", resume=True)).last_row() == row(10)


def test_a_folder_is_locked_until_it_is_closed():
    """Against runs of the same process, too. Opening and closing its lock file elsewhere changes nothing."""
    a_run(Config(run_dir="a"))
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    assert is_taken("a")
    assert "another run is at work in a" in error_of(RunFolder.open, Config(run_dir="a", resume=True))
    assert is_taken("a")
    folder.close()
    assert not is_taken("a")


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_both_files_hold_every_row():
    folder = RunFolder.open(Config(run_dir="a"))
    assert folder.last_row() is None
    rows = [row(5), row(10, accuracy=np.float32(0.5), loss=np.float64(0.1), images=np.int64(3))]
    for each in rows:
        folder.append(each)
        assert read_rows("a")[-1]["round"] == each["round"]  # on the disk at once
    assert read_rows("a") == folder.rows() == rows
    assert folder.last_row() == rows[-1]
    with Path("a/metrics.csv").open() as file:
        assert file.readline() == ",".join(COLUMNS) + "\n"
    assert [{name: float(text) for name, text in each.items()} for each in csv_rows("a")] == rows
    assert " ".join(COLUMNS) == "round accuracy loss train_loss similarity bytes_down bytes_up images seconds"


def test_more_columns_follow_the_fixed_ones():
    folder = RunFolder.open(Config(run_dir="a"))
    folder.append(row(5, extra=1.5))
    folder.append(row(10))
    folder.append(row(15, late=3))
    assert list(csv_rows("a")[0]) == [*COLUMNS, "extra", "late"]
    assert [(each["extra"], each["late"]) for each in csv_rows("a")] == [("1.5", ""), ("", ""), ("", "3")]
    assert [each["round"] for each in read_rows("a")] == [5, 10, 15]


def test_numbers_that_are_not_finite_stay_valid_json():
    folder = RunFolder.open(Config(run_dir="a"))
    folder.append(row(5, loss=float("nan"), accuracy=np.float32("inf")))
    text = Path("a/metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    assert folder.last_row()["accuracy"] is None and read_rows("a") == folder.rows()
    assert csv_rows("a")[0]["loss"] == ""
    folder.write_summary({"loss_last": float("nan"), "versions": {"x": np.float32(1)}, "list": (np.inf, 2)})
    json.loads(Path("a/summary.json").read_text(), parse_constant=pytest.fail)
    assert read_summary("a") == {"loss_last": None, "versions": {"x": 1.0}, "list": [None, 2]}


def test_rows_newer_than_the_checkpoint_are_cut():
    a_run(Config(run_dir="a"), rounds=(5, 10, 15, 20), checkpoint=10)
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    folder.cut(10, {})
    folder.append(row(15, accuracy=0.77))
    assert [each["round"] for each in read_rows("a")] == [5, 10, 15]
    assert [each["accuracy"] for each in csv_rows("a")] == ["0.05", "0.1", "0.77"]
    folder.cut(0, {})
    assert read_rows("a") == csv_rows("a") == []


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_half_written_last_line_is_left_out(cut_first):
    path = a_run(Config(run_dir="a"), rounds=(5, 10, 15), checkpoint=10)
    text = (path / "metrics.jsonl").read_text()
    for length in range(len(text) - len(text.splitlines()[-1]) - 1, len(text)):
        (path / "metrics.jsonl").write_text(text[:length])
        (path / "metrics.csv").write_text("round,acc")
        folder = RunFolder.open(Config(run_dir="a", resume=True))
        assert [each["round"] for each in folder.rows()] == [5, 10]
        if cut_first:
            folder.cut(10, {})
        folder.append(row(15))
        assert (path / "metrics.jsonl").read_text() == text
        assert [each["round"] for each in csv_rows("a")] == ["5", "10", "15"]
        folder.close()


LINE = json.dumps(row(5)) + "\n"
WRONG_METRICS = {  # of a run whose checkpoint counts 2 of its 3 rows -> what is said
    "emptied": (lambda path: path.write_text(""), "has 0 evaluations up to round 10 and its checkpoint counts 2"),
    "deleted": (Path.unlink, "has 0 evaluations up to round 10 and its checkpoint counts 2"),
    "shortened": (lambda path: path.write_text(LINE), "has 1 evaluations up to round 10"),
    "a row in the middle": (lambda path: path.write_text(LINE + json.dumps(row(15)) + "\n"), "has 1 evaluations"),
    "one row twice": (
        lambda path: path.write_text(LINE + path.read_text()),
        "line 2 is of round 5, but the line before is of round 5",
    ),
    "rows without anything": (lambda path: path.write_text("{}\n{}\n"), "line 1 is not an evaluation"),
    "lists": (lambda path: path.write_text(LINE + "[1,2]\n"), "line 2 is not an evaluation"),
    "a round that is no number": (lambda path: path.write_text('{"round": "5"}\n'), "line 1 is not an evaluation"),
    "texts": (lambda path: path.write_text(LINE.replace("0.05", '"much"')), "line 1 is not an evaluation"),
    "columns": (
        lambda path: path.write_text('{"round": 5}\n{"round": 10}\n'),
        "round 5 has no loss, train_loss",
    ),
    "nested": (lambda path: path.write_text("[" * 200_000 + "\n"), "nested too deeply"),
    "not text": (lambda path: path.write_bytes(b"\xff\n"), "is damaged"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it is not a file"),
}


@pytest.mark.parametrize("case", WRONG_METRICS)
def test_metrics_that_are_not_those_of_the_checkpoint_are_refused(case):
    wrong, message = WRONG_METRICS[case]
    config = Config(run_dir="a")
    folder = begun(config)
    for round in (5, 10, 15):
        folder.append(row(round))
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "10").mkdir()
    (folder.path / "checkpoints" / "10" / "manifest.json").touch()
    folder.to_keep = True
    folder.close()
    wrong(Path("a/metrics.jsonl"))
    before = sorted(Path("a").iterdir())

    def resume():
        with contextlib.closing(RunFolder.open(Config(run_dir="a", resume=True))) as resumed:
            resumed.cut(10, {"rows": 2})

    assert message in error_of(resume)
    assert sorted(Path("a").iterdir()) == before
    begun(Config(run_dir="a", overwrite=True))  # the remedy that is offered
    assert not Path("a/metrics.jsonl").exists()


def sealed(path, rounds, checkpoint):
    """Make a run folder whose manifest covers the evaluations up to a checkpoint."""
    folder = begun(Config(run_dir=path))
    for round in [round for round in rounds if round <= checkpoint]:
        folder.append(row(round))
    folder.seal()
    meta = {"rows": len(folder.rows())}
    Checkpoints(folder.path / "checkpoints").save(checkpoint, {"w": np.ones(2)}, meta)
    for round in rounds[len(folder.rows()) :]:
        folder.append(row(round))
    return folder, meta


def test_every_digit_of_the_evaluations_counts():
    folder, meta = sealed("a", (5, 10, 15), 10)
    path = folder.path / "metrics.jsonl"
    text = path.read_text()
    newer = text.index('{"round": 15')  # than the checkpoint
    assert [each["round"] for each in read_rows("a")] == [5, 10, 15]
    del folder
    for place in (place for place, sign in enumerate(text[:newer]) if sign.isdigit()):
        path.write_text(text[:place] + ("7" if text[place] != "7" else "3") + text[place + 1 :])
        message = error_of(read_rows, "a")
        assert message.startswith("a/metrics.jsonl is damaged (it was changed): put back the whole file")
        assert message == error_of(RunFolder.open, Config(run_dir="a", resume=True))
    path.write_text(text.replace("0.15", "0.16"))
    RunFolder.open(Config(run_dir="a", resume=True)).cut(10, meta)  # forgotten when the run goes on
    assert path.read_text() == text[:newer]


def test_without_the_manifest_a_change_is_taken_as_intended():
    sealed("a", (5, 10), 10)
    text = Path("a/metrics.jsonl").read_text()
    Path("a/metrics.jsonl").write_text(text.replace("0.05", "0.07"))
    assert error_of(read_rows, "a").endswith("if the change was intended, remove manifest.json")
    Path("a/manifest.json").unlink()
    assert read_rows("a")[0]["accuracy"] == 0.07


def test_what_is_appended_to_a_finished_run_is_found():
    folder, _ = sealed("a", (5, 10), 10)
    folder.write_summary({"rounds": 10})
    with Path("a/metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(15)) + "\n")
    for read in (read_rows, read_summary):
        assert "a/metrics.jsonl is damaged (it was changed)" in error_of(read, "a")


def test_a_kill_while_a_run_goes_on_leaves_nothing_that_seems_damaged(monkeypatch):
    """Whichever file is being removed or named when the process dies."""

    class Killed(BaseException):
        pass

    due = lambda round: round % 5 == 0
    for survived in range(100):
        folder, meta = sealed("a", (5, 10, 12), 12)
        folder.write_clients({"client": [0], "accuracy": [0.5]})
        folder.write_summary({"rounds": 12})
        folder.to_keep = True
        folder.close()
        left = iter(range(survived))

        def deadly(function, left=left):
            def call(*arguments, **options):
                if next(left, None) is None:
                    raise Killed
                return function(*arguments, **options)

            return call

        resumed = RunFolder.open(Config(run_dir="a", resume=True))
        died = True
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", deadly(Path.unlink))
            patch.setattr(os, "replace", deadly(os.replace))
            with contextlib.suppress(Killed):
                resumed.cut(12, meta, due=due)
                resumed.extend(200)
                resumed.append(row(15))
                resumed.seal()
                resumed.write_clients({"client": [0], "accuracy": [0.75]})
                resumed.write_summary({"rounds": 15})
                died = False
        resumed.close()
        configuration.load("a")
        again = RunFolder.open(Config(run_dir="a", resume=True, rounds=configuration.load("a").rounds))
        again.cut(12, meta, due=due)
        assert [each["round"] for each in read_rows("a")] == [5, 10]
        again.close()
        shutil.rmtree("a")
        if not died:
            break
    assert 10 < survived < 99


def test_an_extended_run_has_forgotten_the_evaluation_of_its_end():
    folder, meta = sealed("a", (5, 10, 12), 12)
    due = lambda round: round % 5 == 0
    folder.cut(12, meta, due=due)
    folder.append(row(15))
    assert [each["round"] for each in read_rows("a")] == [5, 10, 15]
    folder.cut(12, meta, due=due)  # killed, and going on again
    assert [each["round"] for each in read_rows("a")] == [5, 10]
    text = (folder.path / "metrics.jsonl").read_text()
    (folder.path / "metrics.jsonl").write_text(text.replace("0.1", "0.2"))
    assert "a/metrics.jsonl is damaged (it was changed)" in error_of(read_rows, "a")


def test_an_evaluation_of_a_round_without_one_is_refused_without_checksums_too():
    path = a_run(Config(run_dir="a"), rounds=(5, 10, 15), checkpoint=15)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"round": 10', '"round": 11'))
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    message = error_of(lambda: folder.cut(15, {"rows": 3}, due=lambda round: round % 5 == 0))
    assert "its evaluation of round 11 is not due" in message and len(read_rows("a")) == 3


@pytest.mark.parametrize("change", [("0.1,", "1.1,"), ("0.1,", "-0.1,"), ('"round": 10', '"round": 5')])
def test_impossible_evaluations_are_refused_without_checksums_too(change):
    path = a_run(Config(run_dir="a"))
    (path / "metrics.jsonl").write_text((path / "metrics.jsonl").read_text().replace(*change))
    assert "a/metrics.jsonl is damaged (line 2 " in error_of(read_rows, "a")


def test_every_digit_of_the_summary_counts_and_so_does_what_it_is_made_from():
    folder = begun(Config(run_dir="a"))
    folder.append(row(5))
    folder.write_clients({"client": [0, 1], "accuracy": [0.5, 0.25]})
    folder.write_summary({"accuracy_best": 0.05, "rounds": 5, "list": [1.5, None]})
    assert read_summary("a") == {"accuracy_best": 0.05, "rounds": 5, "list": [1.5, None]}
    for name in ("summary.json", "metrics.jsonl", "clients.csv"):
        path = folder.path / name
        text = path.read_text()
        for place, sign in enumerate(text):
            if sign.isdigit():
                path.write_text(text[:place] + ("7" if sign != "7" else "3") + text[place + 1 :])
                message = error_of(read_summary, "a")
                assert message.startswith(f"a/{name} is damaged (it was changed)")
        path.write_text(text)
    read_summary("a")
    (folder.path / "manifest.json").unlink()  # as in folders of earlier versions
    (folder.path / "summary.json").write_text('{"rounds": 5}')
    assert read_summary("a") == {"rounds": 5}


def test_a_summary_goes_before_the_evaluations_that_it_was_made_from(monkeypatch):
    folder, meta = sealed("a", (5, 10, 12), 12)
    folder.write_summary({"rounds": 12})
    folder.cut(12, meta)
    assert read_summary("a") == {"rounds": 12}  # nothing has changed
    monkeypatch.setattr(RunFolder, "_rewrite", lambda self: 1 / 0)  # killed there
    with pytest.raises(ZeroDivisionError):
        folder.cut(12, meta, due=lambda round: round % 5 == 0)
    assert len(read_rows("a")) == 3 and not (folder.path / "summary.json").exists()


def test_every_digit_of_the_configuration_counts_unless_the_change_is_intended():
    path = begun(Config(run_dir="a", seed=3)).path / "config.json"
    text = path.read_text()
    for place, sign in enumerate(text):
        if sign.isdigit():
            path.write_text(text[:place] + ("7" if sign != "7" else "5") + text[place + 1 :])
            assert error_of(configuration.load, "a").startswith("a/config.json is damaged (it was changed): put back")
    path.write_text(text.replace('"seed": 3', '"seed": 4'))
    Path("a/manifest.json").unlink()
    assert configuration.load("a").seed == 4


def test_every_byte_of_the_manifest_counts():
    folder, _ = sealed("a", (5, 10), 10)
    path = folder.path / "manifest.json"
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert "manifest.json" in error_of(read_rows, "a")
    path.write_bytes(data)
    assert len(read_rows("a")) == 2


def test_surplus_rows_are_cut_and_versions_that_did_not_count_resume():
    a_run(Config(run_dir="a"), rounds=(5, 10, 15), checkpoint=10)
    folder = RunFolder.open(Config(run_dir="a", resume=True))
    folder.cut(10, {"rows": 2})
    assert [each["round"] for each in read_rows("a")] == [5, 10]
    folder.cut(5, {})
    assert [each["round"] for each in read_rows("a")] == [5]


def test_deeply_nested_settings_and_summaries_are_one_line():
    path = a_run(Config(run_dir="a"))
    for name, read in (("config.json", configuration.load), ("summary.json", read_summary)):
        for text in ("[" * 200_000, '{"a":' * 200_000, "[1]"):
            (path / name).write_text(text)
            assert name in error_of(read, path)


# --- What is refused leaves nothing ----------------------------------------------------------------------------------


def everything():
    return {str(path): path.is_file() and path.read_bytes() for path in Path().rglob("*")}


def test_what_is_withdrawn_was_never_there():
    Path("empty").mkdir()
    Path("old").mkdir()
    Path("old/.lock").touch()
    before = everything()
    for run_dir in (None, "new", "new/deep", "empty", "old", "old/new"):
        for begin in (False, True):
            config = Config(run_dir=run_dir)
            folder = begun(config) if begin else RunFolder.open(config)
            if begin:
                folder.append(row(5))
            folder.close()
            assert everything() == before
    kept = begun(Config(run_dir="new"))
    kept.to_keep = True
    kept.close()
    assert Path("new/config.json").exists()


def test_withdrawing_removes_nothing_that_is_older():
    a_run(Config(run_dir="a"))
    Path("a/diverged.txt").write_text("x")
    Path("runs/another").mkdir(parents=True)
    before = everything()
    for config in (Config(run_dir="a", overwrite=True), Config(run_dir="a", resume=True), Config()):
        RunFolder.open(config).close()
        assert everything() == before
    folder = RunFolder.open(Config(run_dir="new"))
    Path("new/mine").touch()
    folder.close()
    assert [path.name for path in Path("new").iterdir()] == ["mine"]


def test_a_full_disk_is_one_line():
    folder = RunFolder.open(Config(run_dir="a"))
    folder.append(row(5))
    for name, write in (
        ("metrics.jsonl", lambda: folder.append(row(10))),
        ("summary.json", lambda: folder.write_summary({})),
    ):
        (Path("a") / name).unlink(missing_ok=True)
        (Path("a") / name).mkdir()  # as unwritable for root as for others
        assert "cannot write" in error_of(write)


def test_a_damaged_file_is_named():
    path = a_run(Config(run_dir="a"))
    (path / "metrics.jsonl").write_text('{"round": 5}\n{"rou\n{"round": 15}\n')
    assert "metrics.jsonl is damaged" in error_of(read_rows, "a")


def test_files_are_replaced_whole(monkeypatch):
    folder = begun(Config(run_dir="a"))
    folder.append(row(1))
    folder.write_summary({"rounds": 1})
    before = sorted(Path("a").iterdir())
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, "write_text", lambda *arguments, **options: 1 / 0)
        folder.write_summary({"rounds": 2})
    assert read_summary("a") == {"rounds": 1}
    assert sorted(Path("a").iterdir()) == before


def test_every_field_that_names_a_folder_is_left_out_of_the_digest():
    same = dataclasses.replace(Config(), run_dir="x", resume=True, compare_to=("y",), data_dir="z")
    assert configuration.digest(same) == configuration.digest(Config())


@pytest.mark.parametrize("name", ["[seed=0]", "back\\slash", "a*"])
def test_folders_that_orbax_takes_for_patterns_are_refused_before_anything_is_made(tmp_path, name):
    with pytest.raises(UserError, match="takes for a pattern; choose another folder"):
        RunFolder.open(Config(run_dir=str(tmp_path / name / "r")))
    assert list(tmp_path.iterdir()) == []
