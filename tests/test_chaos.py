"""The chaos command in two minutes: nothing that it tries breaks a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FEW = ["--minutes=30", "--kills=2", "--storage=8", "--files=60", "--flags=300", "--messages=500"]
FEW += ["--processes=2", "--sweeps=2", "--surroundings=6", "--folders=40", "--clients=40", "--servers=40"]
FEW += ["--adapters=3", "--clocks=2", "--tune=5", "--slurm=30", "--values=20"]


@pytest.mark.slow
def test_nothing_breaks():
    ended = subprocess.run(
        [sys.executable, ROOT / "experiments" / "lab" / "chaos.py", *FEW], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = [line.split() for line in ended.stdout.splitlines() if line[0] != " "]
    tried = {line[0]: line[1] for line in table}
    rows = ["kills", "storage", "files", "folders", "adapters", "clocks", "flags", "sweeps", "tune", "slurm"]
    assert list(tried) == ["row", *rows, "surroundings", "processes", "messages", "clients", "values", "servers"]
    assert [tried[row] for row in ("kills", "flags", "sweeps", "processes", "tune")] == ["2", "300", "2", "2", "5"]
