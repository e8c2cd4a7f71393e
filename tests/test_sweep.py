"""A sweep runs the product once, goes on where it was killed, and outlives runs that fail."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr import config as configuration
from fedjax_mr import data, sweep
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import COLUMNS, is_taken, read_rows, run_state, saved_round
from fedjax_mr.sweep import Stopped

TINY = ("--model=logistic", "--rounds=6", "--eval_every=2", "--local_epochs=1", "--noprogress")
PRODUCT = (*TINY, "--strategies=fedavg,fedmr", "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """Replace the process of a run by a function of its strategy -> exit code; collect the runs it is asked for."""

    def install(codes=None):
        asked = []

        def train(runs, look):
            asked.append(runs[0] if len(runs) == 1 else runs)
            code = (codes or {}).get(runs[0].config.strategy, 0)
            for run in runs:
                run.folder.mkdir(parents=True, exist_ok=True)
                configuration.save(run.config, run.folder)
                sweep._log_of(run).write_text("fedjax-mr: what went wrong\n")
                if code == 0:
                    row = dict.fromkeys(COLUMNS, 1.0) | {"round": run.config.rounds, "accuracy": 0.5}
                    (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
                    (run.folder / "summary.json").write_text("{}")
                if code == 3:
                    (run.folder / "diverged.txt").write_text("what went wrong\n")
            look()
            return code

        monkeypatch.setattr(sweep, "run_in_process", train)
        return asked

    return install


# --- The plan --------------------------------------------------------------------------------------------------------


def test_the_product_of_strategies_settings_and_seeds():
    _, runs = sweep.plan([*PRODUCT, "--seeds=0:2,7", "--grid=local_epochs=1,2"])
    found = [(run.config.strategy, run.config.alpha, run.config.local_epochs, run.config.seed) for run in runs]
    assert found == [
        (strategy, alpha, epochs, seed)
        for strategy in ("fedavg", "fedmr")
        for alpha in (0.1, 0.5)
        for epochs in (1, 2)
        for seed in (0, 1, 7)
    ]
    assert len({run.folder for run in runs}) == len(runs)
    assert re.fullmatch(r"runs/fedavg-alpha=0.1-local_epochs=1-seed=0-[0-9a-f]{8}", str(runs[0].folder))


def test_five_trials_are_five_draws_of_the_clients():
    """The partition and the public set follow the seed, and nothing else."""
    flags = ["--strategies=local,fedme", "--seeds=0:5", "--public_share=0.1", "--grid=lr=0.1,0.2"]
    _, runs = sweep.plan(flags)
    key = lambda config: (config.strategy, config.lr, config.seed)
    hashes = {key(run.config): data.federated_data(run.config).hash() for run in runs}
    for (_, _, seed), found in hashes.items():
        assert found == hashes["local", 0.1, seed]
    assert len(set(hashes.values())) == 5


def test_settings_of_other_strategies_do_not_multiply():
    _, runs = sweep.plan(["--strategies=fedavg,fedmr", "--grid", "fedmr_unit=leaf,layer"])
    assert [(run.config.strategy, run.choice) for run in runs] == [
        ("fedavg", {}),
        ("fedmr", {"fedmr_unit": "leaf"}),
        ("fedmr", {"fedmr_unit": "layer"}),
    ]


def test_a_value_brings_others_along():
    grid = "partition=iid,dirichlet+alpha=0.1,dirichlet+alpha=1e+0"
    _, runs = sweep.plan(["--grid", grid, "--grid=model=logistic,mlp+lr=0.1", "--alpha=0.3", "--lr=0.2"])
    assert [(run.config.partition, run.config.alpha, run.config.model, run.config.lr) for run in runs] == [
        ("iid", 0.3, "logistic", 0.2),
        ("iid", 0.3, "mlp", 0.1),
        ("dirichlet", 0.1, "logistic", 0.2),
        ("dirichlet", 0.1, "mlp", 0.1),
        ("dirichlet", 1.0, "logistic", 0.2),
        ("dirichlet", 1.0, "mlp", 0.1),
    ]
    assert runs[3].folder.name.startswith("fedmr-partition=dirichlet-alpha=0.1-model=mlp-lr=0.1-seed=0-")


def test_without_flags_of_its_own_a_sweep_is_one_run():
    _, runs = sweep.plan(["--strategy=fedcross", "--seed=4"])
    assert [(run.config.strategy, run.config.seed, run.choice) for run in runs] == [("fedcross", 4, {})]


def test_a_sweep_may_come_from_a_flag_file():
    Path("table.flags").write_text("--strategies=fedavg,indep\n--seeds=0:3\n--grid=alpha=0.1,1\n--lr=0.01\n")
    _, runs = sweep.plan(["--flagfile=table.flags", "--sweep_dir=here"])
    assert len(runs) == 12
    assert {run.config.lr for run in runs} == {0.01}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--grid", "alhpa=1"], ["alhpa", "did you mean 'alpha'?", "known: ", "local_epochs"]),
        (["--grid", "run_dir=a,b"], ["run_dir", "known: "]),
        (["--grid", "alpha"], ["--grid=alpha names no values"]),
        (["--grid", "alpha=0.1,,1"], ["empty value"]),
        (["--grid", "alpha=0.1,x"], ["--alpha=x", "not a number"]),
        (["--grid", "alpha=0.1,-1"], ["--alpha=-1.0 is out of range"]),
        (["--grid", "model=lenet6"], ["did you mean 'lenet5'?"]),
        (["--grid", "seed=0,1"], ["--seeds=0,1"]),
        (["--grid", "strategy=fedmr"], ["--strategies=fedmr"]),
        (["--grid", "lr=1", "--grid", "lr=2"], ["lr twice"]),
        (["--grid", "partition=iid+aplha=1"], ["aplha", "did you mean 'alpha'?"]),
        (["--grid", "partition=dirichlet+alpha=1", "--grid", "alpha=2"], ["alpha twice"]),
        (["--seeds=3:3"], ["no seeds at '3:3'"]),
        (["--seeds=a"], ["no seeds at 'a'"]),
        (["--strategies=fedav,fedmr"], ["did you mean 'fedavg'?"]),
        (["--strategies=fedavg,"], ["empty value"]),
        (["--run_dir=x"], ["--sweep_dir"]),
        (["--sedes=1"], ["did you mean --seeds?"]),
        (["--flagfile=none.flags"], ["cannot read the flag file"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(arguments, parts, trained, capsys):
    asked = trained()
    assert sweep.main(arguments) == 2
    out, shown = capsys.readouterr()
    assert out == "" and shown.startswith("fedjax-mr: ") and shown.count("\n") == 1
    assert all(part in shown for part in parts), shown
    assert not asked and not list(Path().iterdir())


def test_help_lists_the_sweeps_own_flags(capsys):
    assert sweep.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("--strategies", "--seeds", "--grid", "--dry_run"))


# --- All runs --------------------------------------------------------------------------------------------------------


def test_finished_runs_are_skipped_and_new_ones_added(trained, capsys):
    asked = trained()
    assert sweep.main(PRODUCT) == 0
    assert len(asked) == 8
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4  # the table: a head, and a line per setting
    asked.clear()
    assert sweep.main(PRODUCT) == 0
    assert asked == []
    assert sweep.main([*PRODUCT, "--seeds=0:3"]) == 0
    assert [run.config.seed for run in asked] == [2, 2, 2, 2]


def test_runs_of_another_grid_or_of_a_version_with_fewer_options_are_finished(trained):
    asked = trained()
    assert sweep.main([*TINY, "--seeds=0:2", "--alpha=0.1", "--sweep_dir=runs"]) == 0
    assert len(asked) == 2
    for number, run in enumerate(asked):
        values = json.loads((run.folder / "config.json").read_text())
        del values["fedmr_unit"], values["public_max"]
        (run.folder / "config.json").write_text(json.dumps(values))
        run.folder.rename(f"runs/fedmr-of-an-earlier-version-{number}")
    asked.clear()
    assert sweep.main([*TINY, "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs"]) == 0
    assert [(run.config.alpha, run.config.seed) for run in asked] == [(0.5, 0), (0.5, 1)]


@pytest.mark.parametrize(
    ("codes", "expected"), [({"fedmr": 3}, 3), ({"fedmr": 3, "indep": 2}, 2), ({"fedmr": 3, "indep": 1}, 1)]
)
def test_it_goes_on_when_runs_fail(trained, codes, expected, capsys):
    asked = trained(codes)
    flags = [*TINY, "--strategies=fedmr,indep,fedavg"]
    assert sweep.main(flags) == expected
    assert [run.config.strategy for run in asked] == ["fedmr", "indep", "fedavg"]
    out, shown = capsys.readouterr()
    assert out.splitlines()[-1].split()[:3] == ["fedavg", "1", "6"]
    assert shown.count("what went wrong") == len(codes)


def test_a_diverged_run_is_not_tried_again(trained, capsys):
    asked = trained({"fedmr": 3})
    assert sweep.main([*TINY, "--strategies=fedmr"]) == 3
    assert sweep.main([*TINY, "--strategies=fedmr"]) == 3
    assert len(asked) == 1
    assert "remove its folder to try again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hold", "place"), [("lock", "{}"), ("lock_file", "{}.log")], ids=["training", "about to start it"]
)
def test_a_run_of_another_process_is_left_to_it(hold, place, trained, capsys):
    asked = trained()
    _, (run,) = sweep.plan(TINY)
    run.folder.mkdir(parents=True)
    hold = (
        f"import pathlib, sys; from fedjax_mr.experiment.folder import {hold}\n"
        f"{hold}(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, place.format(run.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        assert sweep.main(TINY) == 2
        other.stdin.close()
    assert "another process is at work in it" in capsys.readouterr().err
    assert asked == []
    assert sweep.main(TINY) == 0 and asked


def test_seeds_of_a_setting_go_together(trained):
    asked = trained()
    assert sweep.main([*PRODUCT, "--seeds=0", "--batch_seeds"]) == 0
    asked.clear()
    assert sweep.main([*PRODUCT, "--seeds=0:3", "--batch_seeds"]) == 0
    assert [[run.config.seed for run in runs] for runs in asked] == [[1, 2]] * 4
    assert [runs[0].choice for runs in asked] == [{"alpha": 0.1}, {"alpha": 0.5}] * 2


def test_seeds_that_are_not_equally_far_go_apart(trained):
    _, runs = sweep.plan([*TINY, "--seeds=0:4"])
    for run, saved in zip(runs, (2, 2, 4, None), strict=True):
        run.folder.mkdir(parents=True)
        configuration.save(run.config, run.folder)
        if saved:
            Checkpoints(run.folder / "checkpoints").save(saved, {"w": np.ones(2)}, {})
    assert [[run.config.seed for run in batch] for batch in sweep.batches(runs)] == [[0, 1], [2], [3]]


def test_the_bar_counts_rounds_of_all_runs(trained, capsys):
    trained()
    assert sweep.main([*PRODUCT, "--progress"]) == 0
    shown = capsys.readouterr().err
    assert "8/8 runs" in shown and "100%" in shown and "left" in shown


@pytest.mark.parametrize(("seconds", "words"), [(8.4, "8 s"), (600, "10 min"), (5000, "83 min"), (7500, "2 h 05 min")])
def test_durations(seconds, words):
    assert sweep.duration(seconds) == f"about {words}"


def test_the_estimate_adds_start_rounds_and_evaluations():
    _, (run,) = sweep.plan(["--rounds=10", "--eval_every=4"])
    cost = sweep.Cost(start=5.0, round=2.0, evaluation=1.0)
    assert cost.of(run.config, 10) == 5 + 20 + 3
    assert cost.of(run.config, 4) == 5 + 8 + 1


def test_kinds_of_runs_are_timed_once(monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(sweep, "calibrate", lambda run: timed.append(run.kind) or sweep.Cost(1.0, 1.0, 0.0))
    grid = ["--grid=local_epochs=1,2", "--grid=partition=iid,classes"]  # the division of the data takes no time
    assert sweep.main([*PRODUCT, *grid, "--dry_run", "--calibrate"]) == 0
    assert sorted(timed) == sorted(f"{name} local_epochs={epochs}" for name in ("fedavg", "fedmr") for epochs in (1, 2))
    out = capsys.readouterr().out
    assert out.startswith("32 runs in runs") and "about 7 s" in out and "together about 4 min" in out
    assert not Path("runs").exists()


def test_a_dry_run_prints_the_plan_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sweep, "calibrate", lambda run: pytest.fail("trained"))
    assert sweep.main(["--strategies=fedavg,pfedhr", "--seeds=0:2", "--rounds=1000", "--dry_run"]) == 0
    out, told = capsys.readouterr()
    assert out.startswith("4 runs in runs") and "1,000 rounds to go\n" in out
    assert out.endswith("together 4,000 rounds; --calibrate estimates their time\n")
    assert told.startswith("--public_share=0.1 for pfedhr and none for the others: ") and told.count("\n") == 1
    assert sweep.main(["--calibrate"]) == 2
    assert capsys.readouterr().err.endswith("give --dry_run, too\n")


# --- Real processes --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # quick: a second signal, with a process that is none of ours
def test_a_run_that_is_stopped_goes_on_from_its_checkpoint():
    _, (run,) = sweep.plan([*TINY, "--rounds=100000", "--checkpoint_every=2"])
    sent = []

    def stop():
        if not sent and run_state(run.folder) == "started" and run.done() >= 2:
            sent.append(signal.SIGTERM)  # a second one would end the run at once
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        sweep.run_in_process([run], stop)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert run_state(run.folder) == "started"
    assert "go on with" in sweep._last_words(run)
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
    assert "go on with" in sweep._last_words(run)
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

    with pytest.raises(Stopped):
        sweep.run_in_process([run], stop)


def test_a_run_that_cannot_start_says_why(capsys):
    assert sweep.main(["--dataset=absent.npz", "--noprogress"]) == 2
    assert "absent.npz" in capsys.readouterr().err


def test_a_sweep_that_cannot_write_says_so(capsys):
    Path("file").touch()
    assert sweep.main([*TINY, "--sweep_dir=file/runs"]) == 2
    assert "cannot write into file/runs" in capsys.readouterr().err


def test_a_run_that_is_killed_has_aborted(monkeypatch, capsys):
    python = Path("python")
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python.resolve()))
    assert sweep.main(TINY) == 1
    assert "it said nothing (exit code 1; " in capsys.readouterr().err


@pytest.mark.slow
def test_seeds_in_one_real_process(capsys):
    _, runs = sweep.plan([*TINY, "--seeds=0:2", "--devices=1"])
    assert sweep.run_in_process(runs, lambda: None) == 0
    assert [run_state(run.folder) for run in runs] == ["finished"] * 2
    assert sweep.main([*TINY, "--seeds=0,1", "--devices=1", "--together=a"]) == 2
    assert "names 1 folders for 2 --seeds" in capsys.readouterr().err


@pytest.mark.slow
def test_two_sweeps_that_start_at_once_share_the_runs():
    command = [sys.executable, "-m", "fedjax_mr.sweep", *TINY, "--seeds=0:4"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert {process.returncode for process in both} <= {0, 2}, said
    for line in "".join(said).splitlines():
        assert "another process is at work in it" in line
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

    assert sweep.main(PRODUCT) == 0
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
