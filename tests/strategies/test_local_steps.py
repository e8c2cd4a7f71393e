"""Clients that train steps in place of epochs: what methods, the clock and a run make of them."""

import dataclasses

import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.client import local
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import simulated_time
from fedjax_mr.testing.federations import federated, network_of


def simulator(strategy, **options):
    setting = local.setting(lr=0.1, batch_size=4, **options)
    return fmr.Simulator(
        strategy, network_of("linear"), federated(), cohort=3, local=setting, layout=fmr.Layout(devices=1, lanes=1)
    )


@pytest.mark.parametrize("strategy", ["fedavg", "adaptivefl"])
def test_a_round_counts_steps_and_samples(strategy):
    """Batches of 4 of clients with other sizes: 7 steps each, whatever their sizes are."""
    trained = simulator(strategy, steps=7)
    _, report = trained.run(trained.init(), 2)
    assert int(report.steps) == 2 * 3 * 7
    assert int(report.images) <= 4 * int(report.steps)


@pytest.mark.parametrize("strategy", ["fedrep", "fedmd", "fccl"])
def test_methods_that_count_epochs_refuse_steps(strategy, federation):
    problem = federation("linear").problem
    row = fmr.STRATEGIES[strategy]
    setting = local.setting(steps=3)
    with pytest.raises(UserError, match=f"{strategy} counts epochs: leave out local_steps="):
        row.build(row.hyper(), dataclasses.replace(problem, local=setting))


def test_the_clock_counts_the_steps():
    config = Config(strategy="fedavg", fleet="uniform", local_steps=6, batch_size=4, cohort=2)
    devices, _ = simulated_time.devices_of(config, federated(), network_of("linear"))
    np.testing.assert_array_equal(devices.steps, 6)
