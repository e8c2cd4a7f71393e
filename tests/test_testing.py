"""The contract as a command, for methods outside the package."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.core import Tracer

from fedjax_mr.strategies import STRATEGIES, Contract, Row, fedprox
from fedjax_mr.testing import test_contract
from fedjax_mr.testing.__main__ import main

ROOT = Path(__file__).parent.parent
METHOD = """
import fedjax_mr as fmr
from fedjax_mr.strategies import fedavg

def build(hyper, problem):
    base = fedavg.build(fedavg.Hyper(), problem)

    def server_update(state, uploads, cohort, round, key):
        after, info = base.server_update(state, uploads, cohort, round, key)
        return (after if LEARNS else state), info

    return base._replace(server_update=server_update)

fmr.STRATEGIES["mine"] = fmr.Row(build, None, "me, 2026")
"""


@pytest.mark.parametrize("small", [None, fedprox.Hyper(mu=0.5)])
def test_the_row_of_a_strategy_has_the_hyper_parameters_of_the_contract(monkeypatch, engine, small):
    built = []

    def build(hyper, problem):
        if not isinstance(hyper.mu, Tracer):  # outside of a program
            built.append(float(hyper.mu))
        return fedprox.build(hyper, problem)

    monkeypatch.setitem(STRATEGIES, "mine", Row(build, fedprox.Hyper, "me, 2026", contract=Contract(small=small)))
    engine("mine", "linear").shapes()
    engine("mine", "linear", hyper=fedprox.Hyper(mu=0.25)).shapes()
    default = small or fedprox.Hyper()
    assert set(built) == {float(np.float32(default.mu)), 0.25}


def test_label_counts_that_the_row_does_not_name_break_the_contract(monkeypatch, engine):
    test_contract.test_a_server_that_reads_label_counts_says_so(engine, "fedgen")
    monkeypatch.setitem(STRATEGIES, "fedgen", STRATEGIES["fedgen"]._replace(label_counts=False))
    with pytest.raises(AssertionError):
        test_contract.test_a_server_that_reads_label_counts_says_so(engine, "fedgen")


def test_it_says_that_pytest_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["-k", "fedavg"]) == 2
    assert capsys.readouterr() == ("", "fedjax-mr: the contract needs pytest: pip install 'fedjax-mr[test]'\n")


def test_help(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m fedjax_mr.testing [--import=FILE ...]")


BY_MODULE = ["fedjax_mr.testing"]
BY_PYTEST = ["pytest", "-q", "-p", "fedjax_mr_pytest", "--pyargs", "fedjax_mr.testing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learns", "way", "code", "part"),
    [
        ("True", BY_MODULE, 0, "2 passed"),
        ("True", BY_PYTEST, 0, "2 passed"),
        ("False", BY_MODULE, 1, "2 failed"),
        (")", BY_MODULE, 2, "fedjax-mr: mine.py, line 10: SyntaxError: unmatched ')'"),
    ],
)
def test_it_tests_what_a_file_registers(tmp_path, learns, way, code, part):
    (tmp_path / "mine.py").write_text(METHOD.replace("LEARNS", learns))
    command = [sys.executable, "-m", *way, "--import=mine.py", "-k", "mine and loss_falls"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "fedjax_mr/testing/plugin")))}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == code, done.stdout
    assert part in done.stdout and "warning" not in done.stdout
