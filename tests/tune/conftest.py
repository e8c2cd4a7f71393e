"""Tunings in an empty folder, with a function in the place of the processes that train."""

import dataclasses
import json
import math

import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.checkpoint import MANIFEST
from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.results.rows import line_of, read_rows
from fedjax_mr.sweep import trainer


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quality(config):
    """The best learning rate is 0.1; more rounds help a little. In [0, 1)."""
    return 0.9 / (1 + abs(math.log10(config.lr / 0.1))) * (1 - 0.1 / config.rounds)


@pytest.fixture
def trained(monkeypatch):
    """Replace the training by a function of the configuration; collect (strategy, lr, seed, from, to) of each run.

    The test accuracy is the better the worse the validation accuracy is.
    """

    def install(
        *,
        validation=quality,
        loss=lambda config: 0.5,
        test=lambda config: 1 - quality(config),
        diverges=lambda config: False,
        ended_at=lambda config: None,
        after=(),
    ):
        asked = []

        def run_all(runs, **how):
            for run in runs:
                config, folder = run.config, run.folder
                done = run.done()
                asked.append((config.strategy, config.lr, config.seed, done, config.rounds))
                folder.mkdir(parents=True, exist_ok=True)
                configuration.save(config, folder)
                (folder / "summary.json").unlink(missing_ok=True)
                rows = read_rows(folder) if done else []
                if diverges(config):
                    (folder / "diverged.txt").write_text("diverged\n")
                    continue
                last = ended_at(config)
                for round in range(done + config.eval_every, (last or config.rounds) + 1, config.eval_every):
                    now = dataclasses.replace(config, rounds=round)
                    row = dict.fromkeys(COLUMNS, 1.0) | {"round": round, "accuracy": test(now)}
                    if config.validation_share:
                        row |= {"validation_accuracy": validation(now), "validation_loss": loss(now)}
                    rows.append(row)
                (folder / "metrics.jsonl").write_text("".join(map(line_of, rows)))
                (folder / "checkpoints" / str(config.rounds)).mkdir(parents=True)
                (folder / "checkpoints" / str(config.rounds) / MANIFEST).touch()
                mean = sum(row["accuracy"] for row in rows[-10:]) / len(rows[-10:])
                summary = {"accuracy_mean_last_10": mean, "ended_by": "patience" if last else "rounds"}
                (folder / "summary.json").write_text(json.dumps(summary))
                if len(asked) in after:
                    raise KeyboardInterrupt
            return 0

        monkeypatch.setattr(trainer, "run_all", run_all)
        return asked

    return install
