"""Runs of several seeds in one program: their folders, and what they may differ in."""

import dataclasses

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.analysis import plots
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import COLUMNS, run_state

CONFIG = fmr.Config(
    strategy="fedmr", model="logistic", clients=6, cohort=3, rounds=4, eval_every=2, local_epochs=1, devices=1,
    progress=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    """They have tests of their own, and drawing takes a third of a run this small."""
    for name in ("partition", "curves"):
        monkeypatch.setattr(plots, name, lambda *_, **__: None)


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


def test_other_settings_must_be_the_same(tmp_path):
    configs = [dataclasses.replace(CONFIG, local_epochs=count, run_dir=str(tmp_path / f"{count}")) for count in (1, 2)]
    with pytest.raises(UserError, match=r"only in seeds, partition and numbers: local_epochs is 1 and 2"):
        fmr.run_together(configs)
    assert not list(tmp_path.iterdir())
