"""Comparisons in an empty folder, with a function in the place of the training."""

import json

import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.results.rows import line_of
from fedjax_mr.sweep.trainer import RunTrainer


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """Replace the training by a function: config -> accuracy, or None if it diverges; collect (strategy, seed)."""

    def install(accuracy, *, bytes=lambda config: 100, after=None):
        asked = []

        def train(trainer, runs, has_ended):
            for run in runs:
                config, folder = run.config, run.folder
                if has_ended(run):
                    continue
                if after is not None and len(asked) == after:
                    raise KeyboardInterrupt
                asked.append((config.strategy, config.seed))
                folder.mkdir(parents=True, exist_ok=True)
                configuration.save(config, folder)
                value = accuracy(config)
                if value is None:
                    (folder / "diverged.txt").write_text("diverged\n")
                    continue
                rows = [
                    dict.fromkeys(COLUMNS, 1.0)
                    | {"round": round, "accuracy": value * round / config.rounds, "personal_accuracy": value / 2}
                    | {"loss": 1 - value, "bytes_down": round * bytes(config), "bytes_up": 0, "images": 10 * round}
                    for round in range(config.eval_every, config.rounds + 1, config.eval_every)
                ]
                (folder / "metrics.jsonl").write_text("".join(map(line_of, rows)))
                (folder / "summary.json").write_text(json.dumps({"ended_by": "rounds"}))

        monkeypatch.setattr(RunTrainer, "train", train)
        return asked

    return install
