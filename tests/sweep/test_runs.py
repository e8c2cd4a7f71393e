"""A sweep runs the product once, goes on where it was killed, and outlives runs that fail."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr import sweep
from fedjax_mr.analysis import runs
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import Interrupted, TakenError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import COLUMNS, read_rows, run_state, saved_round
from fedjax_mr.results.locks import is_taken
from fedjax_mr.sweep import process as process_of_a_run
from fedjax_mr.sweep import runs as runs_of_a_sweep
from fedjax_mr.sweep.__main__ import main
from fedjax_mr.sweep.bar import Bar
from fedjax_mr.sweep.process import Worker, last_words, log_of
from fedjax_mr.sweep.runs import batches
from record.keep import keep

TINY = ("--model=logistic", "--rounds=6", "--eval_every=2", "--local_epochs=1", "--noprogress")
PRODUCT = (*TINY, "--strategies=fedavg,fedmr", "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs")


def test_finished_runs_are_skipped_and_new_ones_added(trained, capsys):
    asked = trained()
    assert main(PRODUCT) == 0
    assert len(asked) == 8
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4  # the table: a head, and a line per setting
    asked.clear()
    assert main(PRODUCT) == 0
    assert asked == []
    assert main([*PRODUCT, "--seeds=0:3"]) == 0
    assert [run.config.seed for run in asked] == [2, 2, 2, 2]


def test_runs_of_another_grid_or_of_a_version_with_fewer_options_are_finished(trained):
    asked = trained()
    assert main([*TINY, "--seeds=0:2", "--alpha=0.1", "--sweep_dir=runs"]) == 0
    assert len(asked) == 2
    for number, run in enumerate(asked):
        values = json.loads((run.folder / "config.json").read_text())
        del values["fedmr_unit"], values["public_max"]
        (run.folder / "config.json").write_text(json.dumps(values))
        run.folder.rename(f"runs/fedmr-of-an-earlier-version-{number}")
    asked.clear()
    assert main([*TINY, "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs"]) == 0
    assert [(run.config.alpha, run.config.seed) for run in asked] == [(0.5, 0), (0.5, 1)]


def test_runs_whose_metrics_are_kept_are_not_trained_again(trained, capsys):
    """However deep they lie, and from whichever folder the data came; a run of the sweep's own comes first."""
    asked = trained({"indep": 3})
    own = ["--partition_file=here/own.npz", "--dataset=digits"]
    assert main([*TINY, *own, "--strategies=fedavg,fedmr,indep", "--sweep_dir=before"]) == 3
    keep(runs.read([str(run.folder) for run in asked]), Path("results/some.jsonl.gz"))
    again = [*TINY, "--partition_file=there/own.npz", "--data_dir=there", "--sweep_dir=now", "--kept=results"]
    _, planned = sweep.plan([*again, "--strategies=fedavg,fedmr,indep,fedexp"])
    assert [run.folder.parts[0] for run in planned] == ["results", "results", "results", "now"]
    asked.clear()
    capsys.readouterr()
    assert main([*again, "--strategies=fedavg,fedexp"]) == 0
    assert [run.config.strategy for run in asked] == ["fedexp"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2  # the table has the kept run, too
    assert main([*again[:-1], "--strategies=fedavg"]) == 0
    _, planned = sweep.plan([*again, "--strategies=fedavg"])
    assert planned[0].folder.parts[0] == "now"


@pytest.mark.parametrize(
    ("codes", "expected"), [({"fedmr": 3}, 3), ({"fedmr": 3, "indep": 2}, 2), ({"fedmr": 3, "indep": 1}, 1)]
)
def test_it_goes_on_when_runs_fail(trained, codes, expected, capsys):
    asked = trained(codes)
    flags = [*TINY, "--strategies=fedmr,indep,fedavg"]
    assert main(flags) == expected
    assert [run.config.strategy for run in asked] == ["fedmr", "indep", "fedavg"]
    out, shown = capsys.readouterr()
    assert out.splitlines()[-1].split()[:3] == ["fedavg", "1", "6"]
    assert shown.count("what went wrong") == len(codes)


def test_a_diverged_run_is_not_tried_again(trained, capsys):
    asked = trained({"fedmr": 3})
    assert main([*TINY, "--strategies=fedmr"]) == 3
    assert main([*TINY, "--strategies=fedmr"]) == 3
    assert len(asked) == 1
    assert "remove its folder to train it again" in capsys.readouterr().err


@pytest.mark.slow
def test_the_remains_of_a_removed_folder_do_not_block_a_sweep(monkeypatch):
    """With the real command: checkpoints alone were taken for a run to go on with, in vain and for ever."""

    def train(worker, runs, look):
        module, arguments = process_of_a_run.command_of(runs)
        return importlib.import_module(module).main(arguments)

    monkeypatch.setattr(Worker, "train", train)
    _, (run,) = sweep.plan(TINY)
    run.folder.mkdir(parents=True)
    Checkpoints(run.folder / "checkpoints").save(2, {"w": np.ones(2)}, {})
    assert run_state(run.folder) == "new"
    assert main(TINY) == 0
    assert run_state(run.folder) == "finished"


@pytest.mark.parametrize(
    ("hold", "place"),
    [
        pytest.param("lock", "{}", id="training"),
        pytest.param("lock_file", "{}.log", id="about to start it", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_another_process_is_left_to_it(hold, place, trained, capsys):
    asked = trained()
    _, (run,) = sweep.plan(TINY)
    run.folder.mkdir(parents=True)
    hold = (
        f"import pathlib, sys; from fedjax_mr.results.locks import {hold}\n"
        f"{hold}(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, place.format(run.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        assert main(TINY) == 2
        other.stdin.close()
    assert "another process uses it" in capsys.readouterr().err
    assert asked == []
    assert main(TINY) == 0 and asked


def test_a_run_that_another_process_finishes_meanwhile_is_no_failure(trained, monkeypatch, capsys):
    asked = trained()
    _, (theirs, _) = sweep.plan([*TINY, "--seeds=0:2"])

    @contextlib.contextmanager
    def claimed(run):
        if run.config.seed == 0:
            raise TakenError("by another process")
        Worker().train([theirs], lambda: None)
        yield

    monkeypatch.setattr(runs_of_a_sweep, "claimed", claimed)
    assert main([*TINY, "--seeds=0:2"]) == 0
    assert [run.config.seed for run in asked] == [0, 1]
    out, told = capsys.readouterr()
    assert "another process uses it" in told and out.splitlines()[-1].split()[:2] == ["fedmr", "2"]


def test_seeds_of_a_setting_go_together(trained):
    asked = trained()
    assert main([*PRODUCT, "--seeds=0", "--batch"]) == 0
    asked.clear()
    assert main([*PRODUCT, "--seeds=0:3", "--batch"]) == 0
    assert [[(run.choice["alpha"], run.config.seed) for run in runs] for runs in asked] == [
        [(0.1, 1), (0.1, 2), (0.5, 1), (0.5, 2)]
    ] * 2


def test_seeds_that_are_not_equally_far_go_apart(trained):
    _, runs = sweep.plan([*TINY, "--seeds=0:4"])
    for run, saved in zip(runs, (2, 2, 4, None), strict=True):
        run.folder.mkdir(parents=True)
        configuration.save(run.config, run.folder)
        if saved:
            Checkpoints(run.folder / "checkpoints").save(saved, {"w": np.ones(2)}, {})
    assert [[run.config.seed for run in batch] for batch in batches(runs)] == [[0, 1], [2], [3]]


def test_rounds_of_another_process_do_not_shorten_the_time_left(capsys):
    _, runs = sweep.plan([*TINY, "--progress", "--rounds=100", "--seeds=0:3"])
    bar = Bar(runs)
    bar.leave(runs[0])
    bar.finish(runs[1])
    bar.close()
    assert "2/3 runs" in (shown := capsys.readouterr().err) and "50%" in shown and "67%" not in shown


def test_the_bar_counts_rounds_of_all_runs(trained, capsys):
    trained()
    assert main([*PRODUCT, "--progress"]) == 0
    shown = capsys.readouterr().err
    assert "8/8 runs" in shown and "100%" in shown and "left" in shown


def test_a_process_that_ended_before_its_log_began_has_last_words():
    _, (run, *_) = sweep.plan([*TINY])
    assert last_words(run) == "its process has ended before it began to train"


@pytest.mark.slow  # quick: a second signal, with a process that is none of ours
def test_a_run_that_is_stopped_goes_on_from_its_checkpoint():
    _, (run,) = sweep.plan([*TINY, "--rounds=100000", "--checkpoint_every=2"])
    sent = []

    def stop():
        if not sent and run_state(run.folder) == "started" and run.done() >= 2:
            sent.append(signal.SIGTERM)  # a second one would end the run at once
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped, Worker() as worker:
        worker.train([run], stop)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert run_state(run.folder) == "started"
    assert "go on with" in last_words(run)
    latest = Checkpoints(run.folder / "checkpoints").latest()
    assert latest is not None and latest >= 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_ends_with_its_sweep_and_is_saved(number):
    """As a shell starts it in the background: SIGINT is ignored by whoever does not say otherwise."""
    flags = [*TINY, "--rounds=1000000", "--eval_every=50"]
    _, (run,) = sweep.plan(flags)
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "fedjax_mr.sweep", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not run.done():
            assert process.poll() is None
            time.sleep(0.05)
        assert is_taken(run.folder)
        process.send_signal(number)
        process.wait(60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 60
    while is_taken(run.folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run_state(run.folder) == "started"
    assert "go on with" in last_words(run)
    assert (saved_round(run.folder) or 0) >= run.done() >= 50


def test_a_second_signal_ends_a_run_at_once(monkeypatch):
    python = Path("python")
    python.write_text("#!/bin/sh\ntrap '' TERM INT\ntouch ready\nwhile true; do sleep 0.1; done\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python.resolve()))
    _, (run,) = sweep.plan(TINY)

    def stop():
        if Path("ready").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted), Worker() as worker:
        worker.train([run], stop)


def test_a_run_that_cannot_start_says_why(capsys):
    assert main(["--dataset=absent.npz", "--noprogress"]) == 2
    assert "absent.npz" in capsys.readouterr().err


def test_a_sweep_that_cannot_write_says_so(capsys):
    Path("file").touch()
    assert main([*TINY, "--sweep_dir=file/runs"]) == 2
    assert "cannot write into file/runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "kills", "said"),
    [
        ("KILL", [3, 3], "killed by SIGKILL (exit code 1; "),
        ("KILL", [3, 4], "killed by SIGKILL: the memory was exhausted; a smaller --batch_size, --cohort or --lanes"),
        ("KILL", [None], "killed by SIGKILL (exit code 1; "),
        ("SEGV", [3, 4], "killed by SIGSEGV (exit code 1; "),
        ("40", [3], "killed by signal 40 (exit code 1; "),
    ],
)
def test_a_run_that_is_killed_has_aborted_and_the_signal_is_named(number, kills, said, monkeypatch, capsys):
    """Also after words of its own, which stay in its log."""
    python, kills = Path("python"), iter(kills)
    python.write_text(f"#!/bin/sh\necho its own words\nkill -{number} $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python.resolve()))
    monkeypatch.setattr(process_of_a_run, "_kills_for_memory", lambda: next(kills))
    assert main(TINY) == 1
    assert said in capsys.readouterr().err
    (log,) = Path("runs/sweep").glob("*.log")
    assert log.read_text().startswith("its own words\nfedjax-mr: killed by ")


JOBS = """
import os, pathlib, signal, sys, time, warnings

def main(arguments):
    what, place = arguments
    place = pathlib.Path(place)
    before = place.read_text().split() if place.exists() else []
    place.write_text(" ".join([*before, str(os.getpid())]))
    print(f"its words: {what}", flush=True)
    warnings.warn("shown once")
    if what == "abort":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fails beside others" and "jobs.others" in sys.modules:
        raise ValueError("too many others")
    sys.modules["jobs.others"] = sys
    return int(what) if what.isdecimal() else 0
"""


@pytest.fixture
def in_a_worker(monkeypatch, tmp_path):
    """Let a real worker do these jobs in the place of runs; return their codes, processes and logs."""

    def train(*jobs):
        _, runs = sweep.plan([*TINY, f"--seeds=0:{len(jobs)}"])
        names = {run.folder: job for run, job in zip(runs, jobs, strict=True)}
        command = lambda runs: ("jobs", [names[runs[0].folder], str(tmp_path / f"seed{runs[0].config.seed}")])
        monkeypatch.setattr(process_of_a_run, "command_of", command)
        with Worker() as worker:
            codes = [worker.train([run], lambda: None) for run in runs]
        return (
            codes,
            [Path(f"seed{run.config.seed}").read_text().split() for run in runs],
            [log_of(run).read_text() for run in runs],
        )

    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(process_of_a_run.__file__).parents[2]}")
    return train


def test_runs_share_a_process(in_a_worker):
    codes, ids, logs = in_a_worker("ok", "3")
    assert codes == [0, 3]
    assert ids[0] == ids[1] and len(ids[0]) == 1
    assert [log.count("its words") for log in logs] == [1, 1]


@pytest.mark.slow
def test_runs_share_a_process_and_one_that_dies_takes_no_other_with_it(in_a_worker):
    codes, ids, logs = in_a_worker("ok", "3", "abort", "ok", "2", "ok", "fails beside others")
    assert codes == [0, 3, 1, 0, 2, 0, 0]
    first, diverged, aborted, after, refused, last, alone = ids
    assert first == diverged == aborted[:1] and len(first) == 1
    # What failed in a used process was tried again in a fresh one, which then trains no other if it fails again.
    assert len({*aborted, *after, *refused, *last}) == len([*aborted, *after, *refused[1:], *last]) == 5
    assert after == refused[:1] and last == alone[:1] and len(alone) == 2
    tries = [1, 1, 2, 1, 2, 1, 2]
    assert (
        [log.count("its words") for log in logs] == [log.count("UserWarning: shown once") for log in logs] == tries
    ), logs
    assert logs[2].count("fedjax-mr: killed by SIGKILL") == 2 and logs[6].count("Traceback") == 1


@pytest.mark.parametrize("limit", ["MOST_RUNS", "MOST_MAPS", "MOST_BYTES"])
def test_a_worker_is_replaced_before_it_reaches_a_limit(limit, monkeypatch):
    monkeypatch.setattr(process_of_a_run, "MOST_BYTES", 1024**5)
    monkeypatch.setattr(process_of_a_run, "MOST_MAPS", 65_530)
    assert not process_of_a_run.is_worn(1)
    monkeypatch.setattr(process_of_a_run, limit, 1)
    assert process_of_a_run.is_worn(1)


@pytest.mark.slow
def test_seeds_in_one_real_process():
    _, runs = sweep.plan([*TINY, "--seeds=0:2", "--devices=1"])
    with Worker() as worker:
        assert worker.train(runs, lambda: None) == 0
    assert [run_state(run.folder) for run in runs] == ["finished"] * 2
    assert "not together" not in log_of(runs[0]).read_text()


@pytest.mark.slow
def test_runs_that_cannot_train_in_one_program_train_one_by_one():
    """CluSamp works on the host between rounds."""
    flags = [*TINY, "--strategy=clusamp", "--seeds=0:2", "--devices=1"]
    _, runs = sweep.plan(flags)
    with Worker() as worker:
        assert worker.train(runs, lambda: None) == 0
    assert [run_state(run.folder) for run in runs] == ["finished"] * 2
    assert "not together: the strategy works on the host between rounds" in log_of(runs[0]).read_text()


@pytest.mark.slow
def test_two_sweeps_that_start_at_once_share_the_runs():
    command = [sys.executable, "-m", "fedjax_mr.sweep", *TINY, "--seeds=0:4"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert {process.returncode for process in both} <= {0, 2}, said
    for line in "".join(said).splitlines():
        assert "another process uses it" in line
    _, runs = sweep.plan([*TINY, "--seeds=0:4"])
    assert [run_state(run.folder) for run in runs] == ["finished"] * 4


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed(capsys):
    """The product as real processes; sweep and run die at once in the third run; the same command finishes it all."""
    with subprocess.Popen([sys.executable, "-m", "fedjax_mr.sweep", *PRODUCT], stdout=subprocess.DEVNULL) as process:
        _, runs = sweep.plan(PRODUCT)
        while run_state(runs[2].folder) == "new":
            assert process.poll() is None
            time.sleep(0.05)
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")  # any of them may have started the run
        children = [child for each in threads for child in each.read_text().split()]
        for victim in (*map(int, children), process.pid):
            os.kill(victim, signal.SIGKILL)
    while is_taken(runs[2].folder):  # by a killed process, as long as one of its threads is still ending
        time.sleep(0.05)
    before = [run_state(run.folder) for run in runs]
    assert before[:2] == ["finished", "finished"] and "new" in before
    stamps = [(run.folder / "summary.json").stat().st_mtime_ns for run in runs[:2]]

    assert main(PRODUCT) == 0
    assert [run_state(run.folder) for run in runs] == ["finished"] * 8
    assert [(run.folder / "summary.json").stat().st_mtime_ns for run in runs[:2]] == stamps
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in table[1:]] == [
        [strategy, f"alpha={alpha}", "2"] for strategy in ("fedavg", "fedmr") for alpha in (0.1, 0.5)
    ]
    alone = Path("alone")
    flags = configuration.to_flags(runs[2].config)
    subprocess.run([sys.executable, "-m", "fedjax_mr.main", *flags, f"--run_dir={alone}"], check=True)
    columns = [name for name in COLUMNS if name != "seconds"]
    numbers = lambda folder: [[row[name] for name in columns] for row in read_rows(folder)]
    assert numbers(runs[2].folder) == numbers(alone)
