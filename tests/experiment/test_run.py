"""Whole runs: records, resuming after any death, the command, bad input."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import main as command
from fedjax_mr.config import config as configuration
from fedjax_mr.config import loggers
from fedjax_mr.data.federated import DataRequest
from fedjax_mr.data.sources import digits
from fedjax_mr.errors import Interrupted, UserError
from fedjax_mr.experiment import experiment
from fedjax_mr.experiment import run as running
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.experiment import Experiment
from fedjax_mr.experiment.folder import read_summary, run_state
from fedjax_mr.experiment.report import summary_table
from fedjax_mr.experiment.run import RunLoop, interrupted
from fedjax_mr.testing.federations import federated

SMALL = dict(
    model="logistic", clients=6, cohort=3, local_epochs=1, rounds=6, eval_every=2, lr=0.05, devices=1, progress=False,
    checkpoint_every=2,
)  # fmt: skip
FLAGS = [f"--{name}={value}" for name, value in SMALL.items() if name != "progress"]
FLAGS.append("--noprogress")
SUMMARY = [
    "accuracy_last",
    "accuracy_best",
    "accuracy_mean_last_10",
    "loss_last",
    "rounds",
    "rounds_to_target",
    "bytes_down",
    "bytes_up",
    "compile_seconds",
    "seconds_per_round",
    "images_per_second",
    "peak_memory_bytes",
    "strategy",
    "seed",
]
COLUMNS = ["round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "images", "seconds"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers(folder):
    """Return the metric rows without their times."""
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, pictures):
    """An uninterrupted run, which others are compared with."""
    with pictures():
        return fmr.run(fmr.Config(**SMALL, run_dir=str(tmp_path_factory.mktemp("straight"))))


def test_the_run_folder_holds_everything(straight):
    names = {path.name for path in straight.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoints", "config.json", "run.flags", "metrics.jsonl", "metrics.csv", "summary.json", "curves.png",
        "partition.npz", "partition.png", "samples.json", "manifest.json",
    }  # fmt: skip
    summary = json.loads((straight.folder / "summary.json").read_text())
    assert set(SUMMARY) <= set(summary)
    header, *lines = (straight.folder / "metrics.csv").read_text().splitlines()
    assert header.split(",")[: len(COLUMNS)] == COLUMNS
    assert [line.split(",")[0] for line in lines] == ["2", "4", "6"]
    last = straight.rows[-1]
    assert last["bytes_down"] == last["bytes_up"] == 6 * 3 * straight.model.num_parameters() * 4
    assert 0 < last["accuracy"] <= 1
    assert last["images"] > 0
    for name in ("curves.png", "partition.png"):
        assert (straight.folder / name).read_bytes()[:4] == b"\x89PNG"


def test_a_loaded_run_predicts_what_was_tested(straight, equal):
    """Raw samples in, and the data set is not asked for."""
    saved = fmr.load(straight.folder)
    test = digits.load(DataRequest("digits"))
    assert (saved.predict(test.test_x).argmax(axis=1) == test.test_y).mean() == straight.summary["accuracy_last"]
    equal(saved.variables, straight.variables)
    np.testing.assert_array_equal(straight.predict(test.test_x[:5]), saved.predict(test.test_x[:5]))
    assert (saved.summary["rounds"], saved.rows, saved.config.lr) == (6, straight.rows, 0.05)
    for function, message in (
        (lambda: fmr.load("nowhere"), "nowhere is not a run folder"),
        (lambda: fmr.load(straight.folder, model=nn.Dense(10)), "has model=logistic: leave out the argument model"),
        (lambda: fmr.load(straight.folder, round=5), "no checkpoint of round 5 (rounds there: 4, 6)"),
    ):
        with pytest.raises(UserError) as error:
            function()
        assert message in str(error.value)


def test_the_command_gives_the_same_numbers_as_python(straight, tmp_path, capsys):
    assert command.main([*FLAGS, "--run_dir=a"]) == 0
    assert numbers("a") == numbers(straight.folder)
    output = capsys.readouterr().out
    assert "accuracy, last" in output
    assert output.rstrip().endswith("run folder: a")
    assert command.main(["--flagfile=a/run.flags", "--run_dir=b"]) == 0  # the kept flags run again
    assert numbers("b") == numbers("a")


def test_an_exception_in_any_call_loses_only_the_rounds_since_the_checkpoint(straight, monkeypatch, equal):
    """Stop in the middle (as a crash would), resume: the same rows and the same weights, bit for bit."""
    config = fmr.Config(**SMALL, run_dir="a")
    calls = []
    ordinary = Experiment._evaluate

    def crash(self, progress, report, done):
        if done == 4 and not calls:
            calls.append(done)
            raise RuntimeError("power failure")
        return ordinary(self, progress, report, done)

    monkeypatch.setattr(Experiment, "_evaluate", crash)
    with pytest.raises(RuntimeError, match="power failure"):
        fmr.run(config)
    resumed = fmr.run(fmr.Config(**SMALL, run_dir="a", resume=True))
    assert numbers("a") == numbers(straight.folder)
    equal(resumed.variables, straight.variables)


def test_by_default_short_rounds_have_few_checkpoints(straight, monkeypatch, equal):
    """The bits are the same, and a history of checkpoints is complete."""
    config = fmr.Config(**SMALL | {"checkpoint_every": None}, run_dir="a")
    rounds = lambda folder: Checkpoints(Path(folder, "checkpoints").absolute()).rounds()
    result = fmr.run(config)
    assert rounds("a") == [0, 6]
    equal(result.variables, straight.variables)
    fmr.run(dataclasses.replace(config, keep_checkpoints=3, run_dir="b"))
    assert rounds("b") == [2, 4, 6]
    monkeypatch.setattr(experiment, "SECONDS_PER_CHECKPOINT", 0)
    fmr.run(dataclasses.replace(config, run_dir="c"))
    assert rounds("c") == [4, 6]


def test_ctrl_c_saves_and_says_how_to_go_on(straight, monkeypatch, equal):
    ordinary, drawn = RunLoop._advance, []

    def curves(runs, path, *, methods, metric):
        drawn.append((str(path), {name: len(rows) for name, rows in runs.items()}, methods))

    def interrupt(self, progress, count):
        if int(progress.round) == 3 and not self.experiments[0].folder.resumed:
            os.kill(os.getpid(), signal.SIGINT)
        return ordinary(self, progress, 1)

    monkeypatch.setattr(RunLoop, "_advance", interrupt)
    monkeypatch.setattr(experiment.plots, "curves", curves)
    monkeypatch.setattr(Experiment, "next_event", lambda self, done: done + 1)
    said = r"stopped after round 4 of 6, saved; .*--run_dir=a --resume"
    with pytest.raises(Interrupted, match=said) as stop, contextlib.suppress(Exception):  # as a loop over seeds does
        fmr.run(fmr.Config(**SMALL, run_dir="a"))
    assert stop.value.exit_code == 130
    name = "FedMR: digits, Dirichlet(0.5), logistic regression, seed 0"
    assert drawn == [("a/curves.png", {name: 2}, {name: "fedmr"})]  # of the evaluations so far
    resumed = fmr.run(fmr.Config(**SMALL, run_dir="a", resume=True))
    assert numbers("a") == numbers(straight.folder)
    equal(resumed.variables, straight.variables)


def test_a_second_ctrl_c_says_what_is_kept(straight, monkeypatch, capsys, equal):
    ordinary = RunLoop._advance

    def interrupt(self, progress, count):
        if int(progress.round) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return ordinary(self, progress, 1)

    with monkeypatch.context() as patch:
        patch.setattr(RunLoop, "_advance", interrupt)
        assert command.main([*FLAGS, "--run_dir=a"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    said, _, going_on = last.partition("; go on with: python -m fedjax_mr.main ")
    assert said == "fedjax-mr: stopped at once; the checkpoint of round 2 of 6 is kept"
    assert command.main(shlex.split(going_on)) == 0
    equal(fmr.load("a").variables, straight.variables)


def test_resuming_a_finished_run_changes_nothing(straight, monkeypatch, capsys, equal):
    shutil.copytree(straight.folder, "a")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path("a").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "draw", lambda self: pytest.fail("drawn again"))
        assert command.main([*FLAGS, "--run_dir=a", "--resume"]) == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    out, err = capsys.readouterr()
    assert "a is a finished run, so nothing was changed (a --rounds above 6 continues it)\n" in err
    assert out == f"{summary_table(straight.summary)}\nrun folder: a\n"
    again = fmr.run(fmr.Config(**SMALL, run_dir="a", resume=True))
    assert (again.summary, again.rows) == (read_summary("a"), straight.rows)
    equal(again.variables, straight.variables)
    assert command.main([*FLAGS, "--run_dir=a", "--resume", "--target_accuracy=0.01"]) == 0
    assert read_summary("a")["rounds_to_target"] == 2  # another question: the summary is written again


@pytest.mark.slow  # of a key: tests/test_keys.py
def test_a_run_draws_the_same_numbers_whatever_kind_of_key_jax_makes_by_default(straight):
    with jax.default_prng_impl("rbg"):
        assert numbers(fmr.run(fmr.Config(**SMALL, run_dir="rbg"), record=False).folder) == numbers(straight.folder)


def test_other_switches_of_jax_that_change_numbers_are_refused_by_name_at_resume(straight, monkeypatch, capsys):
    resumed = [*FLAGS, f"--run_dir={straight.folder}", "--resume"]
    with jax.threefry_partitionable(False):
        assert command.main(resumed) == 2
    line = "with other settings of JAX (jax_threefry_partitionable was True and is False): set them back, in the"
    assert line in (shown := capsys.readouterr().err) and shown.count("\n") == 1
    known = experiment.versions()
    monkeypatch.setattr(experiment, "versions", lambda: known | {"jax": "9"})
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here --xla_cpu_enable_fast_math=true")
    assert command.main(resumed) == 0
    note, _ = capsys.readouterr().err.splitlines()
    assert f"jax was {known['jax']} and is 9; XLA_FLAGS was " in note and note.endswith(
        "is --xla_cpu_enable_fast_math=true"
    )
    assert straight.summary["jax_settings"]["jax_threefry_partitionable"] == "True"


def test_numbers_of_64_bits_are_refused_by_every_entry(straight, capsys):
    with jax.enable_x64(True):
        assert command.main([*FLAGS, "--run_dir=doubles"]) == 2
        shown = capsys.readouterr().err
        for entry in (lambda: fmr.load(straight.folder).predict(np.zeros((1, 8, 8, 1), np.uint8)), simulator):
            with pytest.raises(UserError, match="JAX computes with 64 bits"):
                entry()
    assert shown.startswith("fedjax-mr: JAX computes with 64 bits, but this package with 32: unset JAX_ENABLE_X64")
    assert shown.count("\n") == 1 and not Path("doubles").exists()


@pytest.mark.parametrize(
    ("switch", "value", "line"),
    [
        ("jax_disable_jit", True, "every round is a compiled program, which JAX_DISABLE_JIT (jax_disable_jit) forbids"),
        ("jax_transfer_guard", "disallow", "which JAX_TRANSFER_GUARD=disallow forbids: unset it, or use log"),
        ("jax_platforms", "nowhere,cpu", "JAX has no device of JAX_PLATFORMS=nowhere,cpu (Unable to initialize"),
    ],
)
def test_switches_of_jax_with_which_nothing_works_are_refused_in_one_line(switch, value, line, monkeypatch, capsys):
    fails = lambda: (_ for _ in ()).throw(RuntimeError("Unable to initialize backend 'nowhere'"))
    monkeypatch.setattr(jax, "devices", fails)  # JAX has started here, with its CPU
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(jax.config.update, switch, jax.config.values[switch])
        jax.config.update(switch, value)
        assert command.main([*FLAGS, "--run_dir=refused"]) == 2
    assert line in (shown := capsys.readouterr().err) and shown.count("\n") == 1 and not Path("refused").exists()


def simulator():
    return fmr.Simulator("fedavg", "logistic", federated(), cohort=2)


@pytest.mark.parametrize("name", ["a b", "a;b", "$(a)", "'[a]' \\"])
def test_the_command_that_goes_on_can_be_pasted_into_a_shell(name):
    path = Path("runs", name)
    ended: Any = types.SimpleNamespace(config=fmr.Config(), folder=types.SimpleNamespace(path=path))
    _, _, command = str(interrupted(ended, "stopped", 2)).partition("go on with: ")
    said = ["python", "-m", "fedjax_mr.main", f"--flagfile={path / 'run.flags'}", f"--run_dir={path}", "--resume"]
    assert shlex.split(command) == said


def test_a_finished_run_is_extended_and_equals_a_straight_one(straight, equal, monkeypatch, capsys):
    """At its first end, round 3 or 5, it was evaluated although that was not due; extending it forgets that."""
    fmr.run(fmr.Config(**SMALL | {"rounds": 3}))
    (folder,) = Path("runs").iterdir()
    assert [row["round"] for row in numbers(folder)] == [2, 3] and run_state(folder) == "finished"

    def fail(self, progress, done):
        raise RuntimeError("killed at the end")

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "finish", fail)
        with pytest.raises(RuntimeError):
            fmr.run(fmr.Config(**SMALL | {"rounds": 5}, resume=True))
    assert [row["round"] for row in numbers(folder)] == [2, 4, 5] and run_state(folder) == "started"
    assert configuration.load(folder).rounds == 5
    with monkeypatch.context() as patch:  # before the first round of the extension
        patch.setattr(RunLoop, "_train", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                fmr.run(fmr.Config(**SMALL, run_dir=str(folder), resume=True))
            assert [row["round"] for row in numbers(folder)] == [2, 4]
    extended = fmr.run(fmr.Config(**SMALL, run_dir=str(folder), resume=True))
    assert numbers(folder) == numbers(straight.folder)
    equal(extended.variables, straight.variables)
    for rounds in (4, 5):
        capsys.readouterr()
        assert command.main([*FLAGS, f"--run_dir={folder}", "--resume", f"--rounds={rounds}"]) == 2
        told = f"{folder} has trained 6 of 6 rounds, so it cannot end after --rounds={rounds}: set --rounds to 6"
        assert told in capsys.readouterr().err
    assert run_state(folder) == "finished" and configuration.load(folder).rounds == 6


def test_a_broken_run_may_end_earlier(straight, equal, monkeypatch):
    def stop_after_three(self, seconds, asked):
        return seconds, signal.SIGTERM

    with monkeypatch.context() as patch:
        patch.setattr(RunLoop, "_agree", stop_after_three)
        with pytest.raises(Interrupted):
            fmr.run(fmr.Config(**SMALL | {"rounds": 60}, run_dir="a"))
    assert Checkpoints(Path("a/checkpoints").absolute()).latest() == 1
    with pytest.raises(
        UserError, match=r"has trained 1 of 60 rounds, .* --rounds=1: set --rounds to more than 1, or start anew"
    ):
        fmr.run(fmr.Config(**SMALL | {"rounds": 1}, run_dir="a", resume=True))
    equal(fmr.run(fmr.Config(**SMALL, run_dir="a", resume=True)).variables, straight.variables)
    assert numbers("a") == numbers(straight.folder)


def test_a_method_of_ones_own_that_fails_before_its_first_round_leaves_no_folder(monkeypatch):
    def fail(self, progress, count):
        raise TypeError("in my_method.py")

    monkeypatch.setattr(RunLoop, "_train", fail)
    for run_dir, blamed in (("theirs", UserError("my_method.py, line 3: TypeError")), ("ours", None)):
        monkeypatch.setattr(running.imports, "blame", lambda error, blamed=blamed: blamed)
        with pytest.raises(TypeError, match=r"in my_method\.py"):
            fmr.run(fmr.Config(**SMALL, run_dir=run_dir))
    assert not Path("theirs").exists() and run_state("ours") == "started"


EXTENDED = {  # methods whose rounds differ from each other, and one that works on the host
    "fedmr": fmr.strategies.fedmr.Hyper(stage1_rounds=2),
    "fedcross": fmr.strategies.fedcross.Hyper(acceleration="pm_da", acceleration_rounds=4, warmup_rounds=1),
    "fedmut": None,
    "fedasam": fmr.strategies.fedasam.Hyper(swa_start=2, swa_cycle=2),
    "moon": None,
    "clusamp": None,
    "fedme": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", EXTENDED)
def test_extending_equals_a_straight_run_whatever_the_method(equal, strategy):
    settings = SMALL | {"model": "cnn_digits", "strategy": strategy, "hyper": EXTENDED[strategy], "eval_every": 4}
    straight = fmr.run(fmr.Config(**settings, run_dir="straight"))
    fmr.run(fmr.Config(**settings | {"rounds": 3}, run_dir="extended"))
    extended = fmr.run(fmr.Config(**settings, run_dir="extended", resume=True))
    assert numbers("extended") == numbers("straight")
    equal(extended.variables, straight.variables)
    equal(extended.state, straight.state)


def test_resume_takes_the_newest_run_of_the_same_configuration():
    first, second = (fmr.run(fmr.Config(**SMALL)).folder for _ in range(2))
    other = fmr.run(fmr.Config(**SMALL | dict(seed=1))).folder
    assert len({first, second, other}) == 3
    assert fmr.run(fmr.Config(**SMALL, resume=True)).folder == second


def test_the_partition_never_depends_on_the_strategy(straight):
    result = fmr.run(fmr.Config(**SMALL, strategy="indep", run_dir="a", eval_each=True))
    assert result.summary["partition_hash"] == straight.summary["partition_hash"]
    row = result.rows[-1]
    each = [row[f"model_{number}_accuracy"] for number in range(3)]
    assert (min(each), max(each)) == (row["individual_min"], row["individual_max"]) and min(each) < max(each)
    assert len({row[f"model_{number}_loss"] for number in range(3)}) == 3
    assert "model_0_accuracy" not in straight.rows[-1]


@pytest.mark.parametrize(
    "devices, lanes", [(2, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 3), (2, 1)))]
)
def test_results_do_not_depend_on_the_layout(straight, close, devices, lanes):
    config = fmr.Config(**SMALL | dict(devices=devices, lanes=lanes), run_dir="a")
    close(fmr.run(config).variables, straight.variables)


def test_held_out_clients_are_tested_at_the_end():
    result = fmr.run(fmr.Config(**SMALL, holdout_clients=2, run_dir="a"))
    assert 0 < result.summary["holdout_accuracy"] < 1
    assert result.summary["holdout_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hypcluster", "local"])
def test_held_out_clients_without_a_deployed_model_are_named(strategy, capsys):
    """The others are tested as if these were not there."""
    config = fmr.Config(**SMALL | {"strategy": strategy, "rounds": 1, "progress": True}, holdout_clients=2, run_dir="a")
    result = fmr.run(config)
    shown = capsys.readouterr().err
    assert f"the 2 clients that never train are not tested: {strategy} deploys no model" in shown
    with pytest.raises(UserError, match=rf"{strategy} deploys no model: fmr.load\('a'\).personal\(client\) is"):
        result.predict(np.zeros((1, 8, 8, 1), np.float32))
    assert "holdout_accuracy" not in result.summary and 0 < result.summary["personal_accuracy"] < 1


def test_ones_own_arrays():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300).astype(np.int32)
    x = (rng.normal(size=(300, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    own = fmr.Dataset("mine", x[:240], y[:240], x[240:], y[240:], num_classes=3)
    result = fmr.run(fmr.Config(**SMALL, run_dir="a"), dataset=own)
    assert result.summary["accuracy_best"] > 0.5


def test_on_row_gets_every_evaluation_and_may_stop_the_run(straight):
    """It is called when the row is in its file; what it raises ends the run, which has lost nothing."""
    config, rows = fmr.Config(**SMALL, run_dir="a"), []

    def stop_at_4(row):
        rows.append(row)
        assert numbers("a")[-1]["round"] == row["round"]
        row["accuracy"] = None  # its own copy
        if row["round"] == 4:
            raise StopIteration("enough")

    with pytest.raises(StopIteration, match="enough"):
        fmr.run(config, on_row=stop_at_4)
    assert run_state("a") == "started" and Checkpoints(Path("a/checkpoints").absolute()).rounds()[-1] == 4

    def go_elsewhere(row):
        rows.append(row)
        os.chdir("/")

    before = Path.cwd()
    result = fmr.run(dataclasses.replace(config, resume=True), on_row=go_elsewhere)
    assert [row["round"] for row in rows] == [2, 4, 6] and rows[-1] == result.rows[-1]
    assert numbers(before / "a") == numbers(straight.folder) and read_summary(before / "a") == result.summary


def test_a_log_that_cannot_begin_leaves_nothing(monkeypatch):
    def fail(*arguments):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", fail)
    with pytest.raises(UserError, match=r"^--log=tensorboard cannot begin: no route to host$"):
        fmr.run(fmr.Config(**SMALL, run_dir="a/b", log="tensorboard"))
    with pytest.raises(UserError, match="on_row is 3, but must be a function of one row"):
        fmr.run(fmr.Config(**SMALL, run_dir="a/b"), on_row=3)
    assert not Path("a").exists()


def test_stopping_and_targets():
    result = fmr.run(fmr.Config(**SMALL, target_accuracy=0.2, stop_at_accuracy=0.2, run_dir="a"))
    assert result.summary["rounds"] == result.summary["rounds_to_target"] < 6
    again = fmr.run(fmr.Config(**SMALL, target_accuracy=0.2, stop_at_accuracy=0.2, run_dir="a", resume=True))
    assert again.summary["rounds"] == result.summary["rounds"]


def test_divergence_stops_at_the_round_and_keeps_the_checkpoint(capsys):
    flags = ["--model=mlp", *FLAGS[1:], "--lr=1e12", "--optimizer=sgd", "--momentum=0.9"]
    assert command.main([*flags, "--run_dir=a"]) == 3
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "diverged: client" in line
    assert "local step" in line
    latest = Checkpoints("a/checkpoints").latest()
    assert latest is not None
    assert f"checkpoint of round {latest}" in line
    assert (run_state("a"), Path("a/diverged.txt").read_text()) == ("diverged", line.removeprefix("fedjax-mr: "))
    assert command.main([*flags, "--run_dir=b", "--allow_nonfinite"]) == 0
    assert json.loads(Path("b/summary.json").read_text())["loss_last"] is None


BAD = {
    "unknown strategy": (["--strategy=fedrm"], "unknown strategy 'fedrm'; did you mean 'fedmr'?"),
    "unknown model": (["--model=cnn_digit"], "did you mean 'cnn_digits'?"),
    "unknown data set": (["--dataset=digit"], "did you mean 'digits'?"),
    "out of range": (["--lr=-1"], "--lr=-1.0 is out of range (allowed: > 0)"),
    "K > N": (["--cohort=30"], "--cohort=30 is more than --clients=20"),
    "empty clients": (["--clients=1438", "--cohort=2"], "1438 clients are more than the 1437 training samples"),
    "resume nothing": (["--resume", "--run_dir=absent"], "cannot resume: there is no folder absent"),
    "unknown flag": (["--stratgy=fedmr"], "unknown flag --stratgy; did you mean --strategy?"),
    "missing flag file": (["--flagfile=exp/none.flags"], "cannot read the flag file"),
    "unwritable": (["--run_dir=file/run"], "cannot write into file/run"),
    "not a run": (["--compare_to=nowhere"], "nowhere is not a run folder"),
    "devices": (["--devices=0"], "--devices=0 is out of range"),
    "tests on the host": (
        ["--model=logistic", "--eval_clients", "--data_placement=host"],
        "need the samples on the device",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, capsys):
    Path("file").write_text("in the way")
    flags, expected = BAD[case]
    assert command.main([*flags, "--noprogress"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert expected in output.err
    assert [path.name for path in Path().iterdir()] == ["file"]


def forget_the_count(manifest):
    content = json.loads(manifest.read_text())["content"]
    del content["meta"]["rows"]
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    manifest.write_text(json.dumps({"content": content, "checksum": checksum}))


def test_imports_of_a_run_that_is_refused_end_silently(monkeypatch):
    def import_ahead():
        raise RuntimeError("can't register atexit after shutdown")  # by concurrent.futures, when Python ends

    monkeypatch.setattr(running.checkpoint, "import_ahead", import_ahead)
    running._import_ahead(True)


def test_a_run_whose_first_checkpoint_fails_leaves_nothing(monkeypatch):
    def full(self, round, tree, meta, *, also=()):
        raise UserError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", full)
    Path("mine").mkdir()
    for run_dir in (None, "a/b", "mine"):
        with pytest.raises(UserError, match="the disk is full"):
            fmr.run(fmr.Config(**SMALL, run_dir=run_dir))
        assert [path.name for path in Path().rglob("*")] == ["mine"]


def test_a_folder_is_refused_before_the_samples_are_loaded(monkeypatch):
    monkeypatch.setattr(running, "federated_data", lambda *a, **k: pytest.fail("loaded"))
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    for settings, message in (
        ({"run_dir": "absent", "resume": True}, "there is no folder absent"),
        ({"run_dir": "full", "resume": True}, "full has no checkpoint; is it a run folder?"),
        ({"run_dir": "full"}, "full is not empty"),
        ({"run_dir": "full", "overwrite": True}, "full does not look like a run folder"),
    ):
        with pytest.raises(UserError, match=message):
            fmr.run(fmr.Config(**SMALL, **settings))
    assert [path.name for path in Path().rglob("*")] == ["full", "mine.txt"]


def test_bad_resumes_are_one_line(straight, capsys):
    config = [*FLAGS, "--run_dir=a"]
    assert command.main(config) == 0
    for flags, expected in (
        (config, "a is not empty: --resume continues the run in it, --overwrite replaces it"),
        (
            [*config, "--resume", "--lr=0.1", "--rounds=9"],
            "which was trained with other settings: lr: 0.1 (saved 0.05). A learning rate that changes during a run is "
            "a part of it: use --lr_schedule, or start a new run from these weights (python -m fedjax_mr.export, then "
            "--pretrained)\n",
        ),
        (
            [*config, "--resume", "--batch_size=3"],
            "which was trained with other settings: batch_size: 3 (saved 10)\n",
        ),
    ):
        capsys.readouterr()
        assert command.main(flags) == 2
        assert expected in capsys.readouterr().err
    for path in Path("a/checkpoints/6").rglob("*"):
        if path.is_file() and path.stat().st_size > 100 and path.name != "manifest.json":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    assert command.main([*config, "--resume"]) == 0
    line = capsys.readouterr().err
    assert "checkpoints/6 is damaged" in line
    assert line.endswith(" and kept as damaged-6; continuing from round 4\n")
    assert line.count("\n") == 1
    assert sorted(path.name for path in Path("a/checkpoints").iterdir()) == ["4", "6", "damaged-6"]
    assert numbers("a") == numbers(straight.folder)
    rows = Path("a/metrics.jsonl").read_text()
    Path("a/metrics.jsonl").write_text(rows.partition("\n")[2])
    capsys.readouterr()
    assert command.main([*config, "--resume"]) == 2
    line = capsys.readouterr().err
    assert "metrics.jsonl is damaged (it was changed): put back the whole file" in line
    assert line.count("\n") == 1
    Path("a/metrics.jsonl").write_text(rows)
    forget_the_count(Path("a/checkpoints/6/manifest.json"))  # as older versions wrote it
    assert command.main([*config, "--resume"]) == 0
    assert numbers("a") == numbers(straight.folder)
    assert command.main([*config, "--overwrite"]) == 0
    assert not Path("a/checkpoints/damaged-6").exists()


def test_a_run_is_not_resumed_with_another_normalisation_or_test_set(capsys):
    x = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    save = lambda test=x, std=1.0: np.savez("mine.npz", x=x, y=y, x_test=test, y_test=y, std=std)
    config = [*FLAGS, "--dataset=./mine.npz", "--run_dir=a"]
    save()
    assert command.main([*config, "--rounds=2"]) == 0
    for changed, said in ({"std": 50.0}, "std was (1.0,) and is (50.0,)"), ({"test": -x}, "the test samples"):
        save(**changed)
        capsys.readouterr()
        assert command.main([*config, "--resume"]) == 2
        line = f"fedjax-mr: a was trained on other data ({said}): restore the dataset, or start a new run\n"
        assert capsys.readouterr().err.endswith(line)
        assert len(numbers("a")) == 1
    save()
    assert command.main([*config, "--resume"]) == 0


# --- the real command -------------------------------------------------------------------------------------------------


def start(*flags, environment=None):
    """Start the real command; by default as its user would, without what the suite sets."""
    environment = environment or {name: os.environ[name] for name in os.environ if name not in ("XLA_FLAGS", "NPROC")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "fedjax_mr.main", *FLAGS, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def wait_for(path, count, process):
    deadline = time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


LONG = ("--rounds=60", "--eval_every=2")


@pytest.mark.slow  # in one process: test_ctrl_c_saves_and_says_how_to_go_on
def test_kill_9_and_resume_end_with_the_same_bits(equal):
    """The killed process compiles like this one, in which the run goes on: bits are compared."""
    process = start(*LONG, "--run_dir=killed", "--devices=2", environment=dict(os.environ))
    wait_for(Path("killed/metrics.jsonl"), 3, process)
    process.kill()
    process.communicate()
    assert 3 <= len(numbers("killed")) < 30
    settings = SMALL | dict(rounds=60, devices=2)
    killed = fmr.run(fmr.Config(**settings, run_dir="killed", resume=True))
    whole = fmr.run(fmr.Config(**settings, run_dir="whole"))
    assert numbers("killed") == numbers("whole")
    equal(killed.state, whole.state)


@pytest.mark.slow  # in one process: test_ctrl_c_saves_and_says_how_to_go_on
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_with_their_code(number, code):
    process = start("--rounds=100000", "--eval_every=2", "--run_dir=stopped")
    wait_for(Path("stopped/metrics.jsonl"), 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert errors.splitlines()[-1].startswith("fedjax-mr: stopped after round ")
    assert errors.splitlines()[-1].endswith("--run_dir=stopped --resume")
    assert "Traceback" not in errors


@pytest.mark.slow  # in test_main, another mistake is refused by the real command
def test_the_real_command_refuses_in_one_line():
    process = start("--strategy=fedrm")
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (2, "")
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_thousands_of_short_rounds_on_two_devices_under_load_never_hang(engine):
    """Collectives between CPU devices of one process can deadlock when cores are busy; the engine has none."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for strategy in ("fedavg", "fedmr"):
            trained = engine(strategy, devices=2)
            progress = trained.init()
            for _ in range(30):
                progress, report = trained.run(progress, 100)
            assert int(progress.round) == 3000
            assert np.isfinite(float(report.train_loss))
            assert jax.tree.leaves(progress.server)[0].shape
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_the_confusion_matrix_is_in_the_summary():
    assert command.main([*FLAGS, "--run_dir=a", "--metrics=accuracy,confusion"]) == 0
    summary = json.loads(Path("a/summary.json").read_text())
    counts = np.array(summary["confusion"])
    assert counts.shape == (10, 10) and counts.sum() == 360
    assert np.trace(counts) / 360 == pytest.approx(summary["accuracy_last"])
