"""Run folders, shared by the tests of the analysis: short runs on the digits, and made-up evaluations."""

import functools
import json
from pathlib import Path

import pytest

import fedjax_mr as fmr
from fedjax_mr.config import config as configuration


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return a function: strategy -> folder of a finished run of four rounds, made once."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def make(strategy):
        config = fmr.Config(
            strategy=strategy, run_dir=str(root / strategy), clients=6, cohort=3, rounds=4, eval_every=1,
            checkpoint_every=1, local_epochs=1, devices=1, progress=False, model="mlp",
        )  # fmt: skip
        return fmr.run(config).folder

    return make


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Go into an empty folder; return a function that makes the folder of a run in ``runs`` there."""
    monkeypatch.chdir(tmp_path)

    def make(config, accuracies, *, end="summary.json"):
        """Make a run folder with these accuracies, one per evaluation; 10 bytes down and 20 up per round."""
        folder = Path("runs") / f"{config.strategy}-{configuration.digest(config)}"
        folder.mkdir(parents=True)
        configuration.save(config, folder)
        rounds = [config.eval_every * (i + 1) for i in range(len(accuracies))]
        rows = [
            {"round": at, "accuracy": value, "loss": 1.0, "bytes_down": 10 * at, "bytes_up": 20 * at}
            for at, value in zip(rounds, accuracies, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if end:
            (folder / end).write_text("{}")
        return folder

    return make
