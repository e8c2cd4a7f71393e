"""Sweeps in an empty folder, with a function in the place of their workers."""

import json

import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.folder import COLUMNS
from fedjax_mr.sweep.process import Worker, log_of


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch):
    """Replace the work of a worker by a function of its strategy -> exit code; collect the runs it is asked for."""

    def install(codes=None):
        asked = []

        def train(worker, runs, look):
            asked.append(runs[0] if len(runs) == 1 else runs)
            code = (codes or {}).get(runs[0].config.strategy, 0)
            for run in runs:
                run.folder.mkdir(parents=True, exist_ok=True)
                configuration.save(run.config, run.folder)
                log_of(run).write_text("fedjax-mr: what went wrong\n")
                if code == 0:
                    row = dict.fromkeys(COLUMNS, 1.0) | {"round": run.config.rounds, "accuracy": 0.5}
                    (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
                    (run.folder / "summary.json").write_text("{}")
                if code == 3:
                    (run.folder / "diverged.txt").write_text("what went wrong\n")
            look()
            return code

        monkeypatch.setattr(Worker, "train", train)
        return asked

    return install
