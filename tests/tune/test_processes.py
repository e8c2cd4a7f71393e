"""Tunings as real processes: killed, resumed, shared."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr.results.locks import is_taken
from fedjax_mr.results.rows import COLUMNS, read_rows
from fedjax_mr.tune import studies
from fedjax_mr.tune.plan import plan

pytestmark = pytest.mark.slow
FLAGS = (
    *("--model=logistic", "--clients=6", "--cohort=3", "--local_epochs=1", "--eval_every=2", "--devices=1"),
    *("--strategies=fedavg,fedmr", "--budget=4", "--eta=2", "--rounds=8", "--seeds=5", "--noprogress"),
)
SAMPLERS = ["halton", pytest.param("tpe", marks=pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs the extra optuna"))]  # fmt: skip


def start(*flags):
    command = [sys.executable, "-m", "fedjax_mr.tune", *FLAGS, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """Wait for a process and return its table."""
    out, told = process.communicate(timeout=900)
    assert process.returncode == 0, told
    return out


def numbers(folder):
    """All evaluations below a folder by the names of the runs, without times."""
    columns = [name for name in (*COLUMNS, "validation_accuracy", "validation_loss") if name != "seconds"]
    runs = sorted(path.parent for path in Path(folder).glob("*/*/config.json"))
    return {f"{run.parent.name}/{run.name}": [[row.get(name) for name in columns] for row in read_rows(run)]
            for run in runs}  # fmt: skip


def kill(process):
    """Kill a tuning and the processes of its runs at once."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    children = [int(child) for each in threads for child in each.read_text().split()]
    for victim in (*children, process.pid):
        os.kill(victim, signal.SIGKILL)
    process.communicate()


def when(process, condition):
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_killed_and_resumed_it_ends_with_the_same_bits(sampler):
    """Killed in a trial of the first rung, in one that continues, and in a test."""
    flags = f"--sampler={sampler}"
    whole = finish(start(flags, "--tune_dir=whole"))
    rows = lambda kind: [len(read_rows(path.parent)) for path in Path("tune", kind).glob("*/metrics.jsonl")]
    for condition in (
        lambda: len(rows("trials")) >= 2,
        lambda: any(count > 2 for count in rows("trials")),
        lambda: rows("tests") != [],
    ):
        process = start(flags, "--tune_dir=tune")
        when(process, condition)
        kill(process)
        for folder in Path("tune").glob("*/*/"):
            while is_taken(folder):  # by a thread that is still ending
                time.sleep(0.05)
    assert finish(start(flags, "--tune_dir=tune")) == whole
    assert numbers("tune") == numbers("whole")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_two_processes_share_a_tuning_and_one_of_them_is_killed(sampler):
    """With Optuna they also share its file. The one that remains finishes all trials; none is trained beyond T."""
    flags = (f"--sampler={sampler}", "--tune_dir=tune")
    both = [start(*flags) for _ in range(2)]
    trials = lambda: {path.parent.name for path in Path("tune/trials").glob("*/config.json")}
    when(both[0], lambda: len(trials()) >= 3)
    kill(both[0])
    table = finish(both[1])
    assert "Best of 4 trials each" in table
    assert [sum(name.startswith(strategy) for name in trials()) for strategy in ("fedavg", "fedmr")] == [4, 4]
    if sampler == "tpe":
        study = studies._Study(plan([*FLAGS, *flags]), "fedavg").study
        assert [trial.state.name for trial in study.trials[:4]] == ["COMPLETE"] * 4
    assert finish(start(*flags)) == table


def test_another_test_set_gives_the_same_scores_and_choices():
    """In real runs: shuffled labels of the test set change the test accuracy and nothing else."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 8)).astype(np.float32)
    y = (x[:, :3] @ [2.0, -1.0, 1.0] > 0).astype(int) + (x[:, 3] > 1)
    for name, labels in (("true", y[300:]), ("shuffled", generator.permutation(y[300:]))):
        np.savez(f"{name}.npz", x=x[:300], y=y[:300], x_test=x[300:], y_test=labels)
        finish(start(f"--dataset={name}.npz", f"--tune_dir={name}"))
    assert Path("true/trials.csv").read_bytes() == Path("shuffled/trials.csv").read_bytes()
    assert Path("true/fedavg.flags").read_bytes() == Path("shuffled/fedavg.flags").read_bytes()
    accuracies = lambda name: sorted(row[1] for rows in numbers(name).values() for row in rows)
    assert accuracies("true") != accuracies("shuffled")
