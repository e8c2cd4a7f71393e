"""Runs of several seeds in one program: their folders, and what they may differ in."""

import dataclasses

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import COLUMNS, run_state
from fedjax_mr.strategies import fedprox

CONFIG = fmr.Config(
    strategy="fedmr", model="logistic", clients=6, cohort=3, rounds=4, eval_every=2, local_epochs=1, devices=1,
    progress=False,
)  # fmt: skip


def test_folders_are_those_of_single_runs(tmp_path):
    """Two seeds together, and one of them alone, leave the same numbers; a stopped batch goes on where it was."""
    configs = [dataclasses.replace(CONFIG, seed=seed, run_dir=str(tmp_path / f"{seed}")) for seed in (0, 5)]
    results = fmr.run_together(configs)
    alone = fmr.run(dataclasses.replace(CONFIG, seed=5, run_dir=str(tmp_path / "alone")))
    columns = [name for name in COLUMNS if name != "seconds"]
    numbers = lambda rows: np.array([[row[name] for name in columns] for row in rows])
    np.testing.assert_allclose(numbers(results[1].rows), numbers(alone.rows), rtol=1e-4, atol=1e-5)
    assert [run_state(config.run_dir) for config in configs] == ["finished"] * 2
    assert results[0].rows != results[1].rows
    assert results[0].summary["seed"] == 0 and results[1].summary["seed"] == 5
    again = fmr.run_together([dataclasses.replace(config, resume=True) for config in configs])
    assert [result.rows for result in again] == [result.rows for result in results]  # nothing was left to do


@pytest.mark.slow
def test_trials_may_differ_in_numbers_and_partition(tmp_path):
    """Every trial equals the same run alone; and the numbers do matter."""
    folder = lambda name: str(tmp_path / name)
    base = dataclasses.replace(
        CONFIG, strategy="fedprox", weight_decay=1e-4, server_optimizer="momentum", server_lr=0.5, partition="dirichlet"
    )
    changes = [
        {},
        {"lr": 0.2, "momentum": 0.9, "seed": 3},
        {"alpha": 5.0, "server_lr": 1.0, "weight_decay": 0.01, "hyper": fedprox.Hyper(mu=1.0)},
    ]
    configs = [dataclasses.replace(base, **each, run_dir=folder(str(i))) for i, each in enumerate(changes)]
    results = fmr.run_together(configs)
    losses = [result.rows[-1]["train_loss"] for result in results]
    assert len(set(losses)) == 3
    for number in (1, 2):
        alone = fmr.run(dataclasses.replace(configs[number], run_dir=folder(f"alone{number}")))
        np.testing.assert_allclose(losses[number], alone.rows[-1]["train_loss"], rtol=1e-5)


def test_the_structure_of_the_numbers_must_be_the_same(tmp_path):
    """A program without momentum is another program."""
    configs = [dataclasses.replace(CONFIG, momentum=m, run_dir=str(tmp_path / f"{m}")) for m in (0.0, 0.5)]
    with pytest.raises(UserError, match="momentum must be zero or absent in all of them or in none"):
        fmr.run_together(configs)


def test_other_settings_must_be_the_same(tmp_path):
    configs = [dataclasses.replace(CONFIG, local_epochs=count, run_dir=str(tmp_path / f"{count}")) for count in (1, 2)]
    with pytest.raises(UserError, match=r"only in seeds, partition and numbers: local_epochs is 1 and 2"):
        fmr.run_together(configs)
    assert not list(tmp_path.iterdir())
