"""The plan and its time, printed without training."""

from pathlib import Path

import pytest

from fedjax_mr import sweep
from fedjax_mr.sweep import costs
from fedjax_mr.sweep.__main__ import main

TINY = ("--model=logistic", "--rounds=6", "--eval_every=2", "--local_epochs=1", "--noprogress")
PRODUCT = (*TINY, "--strategies=fedavg,fedmr", "--seeds=0:2", "--grid", "alpha=0.1,0.5", "--sweep_dir=runs")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(8.4, "8 s"), (600, "10 min"), (5000, "83 min"), (7199, "2 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds, words):
    assert costs.duration(seconds) == f"about {words}"


def test_the_estimate_adds_start_rounds_and_evaluations():
    _, (run,) = sweep.plan(["--rounds=10", "--eval_every=4"])
    cost = costs.Cost(start=5.0, round=2.0, evaluation=1.0)
    assert cost.of(run.config, 10) == 5 + 20 + 3
    assert cost.of(run.config, 4) == 5 + 8 + 1


def test_kinds_of_runs_are_timed_once(monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(costs, "calibrate", lambda run, worker: timed.append(run.kind) or costs.Cost(1.0, 1.0, 0.0))
    grid = ["--grid=local_epochs=1,2", "--grid=partition=iid,dirichlet"]  # the division of the data takes no time
    assert main([*PRODUCT, *grid, "--dry_run", "--calibrate"]) == 0
    assert sorted(timed) == sorted(f"{name} local_epochs={epochs}" for name in ("fedavg", "fedmr") for epochs in (1, 2))
    out = capsys.readouterr().out
    # 2 methods, 2 seeds, 2 numbers of epochs, 2 values of alpha, which an IID partition has only once
    assert out.startswith("24 runs in runs") and "about 7 s" in out and "about 3 min in total" in out
    assert not Path("runs").exists()


def test_a_dry_run_prints_the_plan_at_once(monkeypatch, capsys):
    monkeypatch.setattr(costs, "calibrate", lambda run, worker: pytest.fail("trained"))
    assert main(["--strategies=fedavg,pfedhr", "--seeds=0:2", "--rounds=1000", "--dry_run"]) == 0
    out, told = capsys.readouterr()
    assert out.startswith("4 runs in runs") and "1,000 rounds left\n" in out
    assert out.endswith("\n4,000 rounds left in total; --calibrate estimates their time\n")
    assert told.startswith("--public_share=0.1 for pfedhr and none for the others: ") and told.count("\n") == 1
    assert main(["--calibrate"]) == 2
    assert capsys.readouterr().err.endswith("add --dry_run\n")
