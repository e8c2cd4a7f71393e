"""Short runs on the digits, shared by the tests of the analysis."""

import functools

import pytest

import fedjax_mr as fmr


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return a function: strategy -> folder of a finished run of four rounds, made once."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def make(strategy):
        config = fmr.Config(
            strategy=strategy, run_dir=str(root / strategy), clients=6, cohort=3, rounds=4, eval_every=1,
            local_epochs=1, devices=1, progress=False,
        )  # fmt: skip
        return fmr.run(config).folder

    return make
