"""The evaluations of runs as a frame."""

import sys

import pytest

from fedjax_mr.analysis import frame
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError


def test_a_row_per_run_and_evaluation(keep):
    pytest.importorskip("pandas")
    keep(Config(strategy="fedavg", alpha=0.1), [0.5, None])
    keep(Config(strategy="fedmr", seed=1), [0.25], end=None)
    found = frame("runs")
    assert list(found)[:6] == ["run", "method", "strategy", "seed", "state", "alpha"] and list(found)[6] == "round"
    assert found["method"].tolist() == ["FedAvg", "FedAvg", "FedMR"] and found["round"].tolist() == [5, 10, 5]
    assert found["state"].tolist() == ["finished", "finished", "new"] and found["alpha"].tolist() == [0.1, 0.1, 0.5]
    assert found["accuracy"].isna().tolist() == [False, True, False]
    means = found.groupby(["method", "alpha"])["accuracy"].mean()
    assert means["FedMR", 0.5] == 0.25
    assert len(frame([path for path in set(found["run"])])) == 3


def test_without_pandas(keep, monkeypatch):
    keep(Config(), [0.5])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"a frame needs pandas: pip install 'fedjax-mr\[pandas\]'"):
        frame("runs")
