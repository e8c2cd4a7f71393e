"""FedAsync: the ends of its mixing, and its order. tests/clock compares it with a plain event loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.clock import hinge, polynomial
from fedjax_mr.strategies import Cohort, fedasync, fedprox
from fedjax_mr.strategies.parts import GlobalModel

MODEL, UPLOADS = {"params": {"w": jnp.array([1.0, -2.0])}}, jnp.array([[3.0, 5.0], [-1.0, 0.5], [2.0, 2.0]])


def mixed(federation, alpha, freshness=None, sizes=(4, 4, 4)):
    strategy = fedasync.build(fedasync.Hyper(alpha), federation().problem)
    cohort = Cohort(jnp.arange(3), jnp.array(sizes), None, freshness)
    state, _ = strategy.server_update(GlobalModel(MODEL), {"model": {"params": {"w": UPLOADS}}}, cohort, 0, None)
    return np.asarray(state.model["params"]["w"])


def test_alpha_zero_keeps_the_model_and_alpha_one_takes_the_last(federation):
    np.testing.assert_array_equal(mixed(federation, 0.0), MODEL["params"]["w"])
    np.testing.assert_array_equal(mixed(federation, 1.0), UPLOADS[2])
    np.testing.assert_array_equal(mixed(federation, 1.0, sizes=(4, 4, 0)), UPLOADS[1])  # the last one is late


def test_uploads_are_mixed_one_after_the_other_the_less_the_staler(federation):
    for weight in (polynomial(0.5), hinge(10.0, 4.0)):
        fresh = weight(jnp.array([0, 3, 6]))
        expected = np.array([1.0, -2.0])
        for share, upload in zip(0.6 * np.asarray(fresh), np.asarray(UPLOADS), strict=True):
            expected = (1 - share) * expected + share * upload
        np.testing.assert_allclose(mixed(federation, 0.6, fresh), expected, rtol=1e-6)
    np.testing.assert_array_equal(mixed(federation, 0.6), mixed(federation, 0.6, polynomial(0.5)(jnp.zeros(3, int))))


def test_an_upload_weighs_alpha_times_its_freshness_against_the_model(federation):
    """From 1: 0.4 x 1 + 0.6 x 3 = 2.2, then 0.7 x 2.2 - 0.3 x 1 = 1.24, then 0.85 x 1.24 + 0.15 x 2 = 1.354."""
    assert mixed(federation, 0.6, jnp.array([1.0, 0.5, 0.25]))[0] == pytest.approx(1.354)


def test_clients_train_as_those_of_fedprox_and_upload_models_as_they_are(tiny):
    start, problem = {"model": tiny.model([[2.0, 1.0], [0.0, 3.0]])}, tiny.problem(steps=2, lr=0.5)
    strategies = fedasync.build(fedasync.Hyper(rho=0.5), problem), fedprox.build(fedprox.Hyper(mu=0.5), problem)
    ours, expected = (tiny.head(tiny.train(each, start)[0]["model"]) for each in strategies)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert strategies[0].stale == "uploaded"  # the paper mixes models, not changes
