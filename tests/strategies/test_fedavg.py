"""FedAvg: one client step, the mean of the server, and what is sent, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedavg
from fedjax_mr.strategies.parts import GlobalModel


def test_a_client_steps_along_the_gradient_from_the_received_model_and_uploads_the_result(tiny):
    """With x = (1, 0), label 0 and a zero head: the gradient is (-1/2, 1/2), and then sigmoid(-1) instead of 1/2."""
    start = tiny.model(np.zeros((2, 2)))
    for steps, reached in ((1, 0.5), (2, 0.5 + 1 / (1 + np.e))):
        strategy = fedavg.build(fedavg.Hyper(), tiny.problem(steps=steps))
        upload, memory, metrics = tiny.train(strategy, {"model": start}, "untouched")
        np.testing.assert_allclose(tiny.head(upload["model"]), [[reached, -reached], [0, 0]], rtol=1e-6)
        assert (memory, int(metrics.steps)) == ("untouched", steps)


@pytest.mark.parametrize("weights, mean", [("samples", 3.0), ("uniform", 2.0)])
def test_the_server_weights_the_models_by_samples_unless_uniform(tiny, weights, mean):
    strategy = fedavg.build(fedavg.Hyper(weights), tiny.problem())
    uploads = {"model": {"params": {"w": jnp.array([0.0, 4.0])}}}
    state = GlobalModel({"params": {"w": jnp.array(9.0)}})
    new, info = strategy.server_update(state, uploads, Cohort(jnp.array([2, 1]), jnp.array([1, 3])), 0, None)
    assert float(new.model["params"]["w"]) == mean and info == {}
    assert strategy.global_model(new) is new.model


def test_every_client_of_a_round_receives_the_global_model(tiny):
    strategy = fedavg.build(fedavg.Hyper(), tiny.problem())
    sent = strategy.dispatch(GlobalModel({"params": {"w": jnp.array([1.0, 2.0])}}), None, None)
    np.testing.assert_array_equal(sent["model"]["params"]["w"], [[1, 2], [1, 2]])
