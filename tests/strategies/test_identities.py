"""Methods that must coincide: special cases of one are another."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import fedavg, fedmr
from fedjax_mr.strategies.parts import select_uniformly

EQUAL_SIZES = (8, 8, 8, 8)


def after(engine, count):
    return engine.run(engine.init(), count)[0]


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_fedmr_that_never_leaves_stage_one_is_fedavg_with_equal_clients(engine, close, network):
    never = fedmr.Hyper(stage1_rounds=5)
    averaged = after(engine("fedavg", network, sizes=EQUAL_SIZES), 5).server.model
    models = after(engine("fedmr", network, sizes=EQUAL_SIZES, hyper=never), 5).server.models
    for row in range(3):
        close(averaged, trees.take(models, row))


@pytest.mark.slow
def test_fedmr_in_stage_one_is_uniform_fedavg_whatever_the_sizes(engine, close):
    averaged = after(engine("fedavg", "perceptron", hyper=fedavg.Hyper(weights="uniform")), 4).server.model
    models = after(engine("fedmr", "perceptron", hyper=fedmr.Hyper(stage1_rounds=4)), 4).server.models
    close(averaged, trees.take(models, 1))


@pytest.mark.slow
def test_fedmr_of_whole_models_is_indep_up_to_relabelling(engine, close):
    """After one round the K models are the same in another order, and so is their mean."""
    whole = after(engine("fedmr", "perceptron", hyper=fedmr.Hyper(unit="segment", segment=1.0)), 1).server.models
    kept = after(engine("indep", "perceptron"), 1).server.models
    rows = lambda models: np.concatenate([np.asarray(leaf).reshape(3, -1) for leaf in jax.tree.leaves(models)], axis=1)
    ordered = lambda table: table[np.lexsort(table.T[::-1])]
    np.testing.assert_allclose(ordered(rows(whole)), ordered(rows(kept)), atol=1e-6)
    close(trees.mean(whole), trees.mean(kept))


def test_every_unit_of_fedmr_starts_from_one_model_and_then_spreads(engine):
    started = engine("fedmr", "perceptron").init().server.models
    leaf = jax.tree.leaves(started)[0]
    np.testing.assert_array_equal(leaf[0], leaf[1])
    independent = engine("fedmr", "perceptron", hyper=fedmr.Hyper(start="independent")).init().server.models
    kernels = independent["params"]["hidden"]["dense"]["kernel"]
    assert not np.allclose(kernels[0], kernels[1])


@pytest.mark.parametrize(
    "strategy", ["fedavg", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fedmr", "indep"))]
)
def test_one_client_alone_is_plain_sgd(engine, close, strategy):
    """N = K = 1 on a convex model, full batches: the same as gradient descent written by hand, momentum restarted."""
    rate, momentum, epochs, count = 0.1, 0.5, 3, 2
    settings = dict(sizes=(6,), cohort=1, batch_size=6, epochs=epochs, lr=rate, momentum=momentum)
    trained = engine(strategy, "linear", **settings)
    start = trained.deployed(trained.init())["params"]["classifier"]["dense"]
    x = np.asarray(trained.constants.federation.samples.x, np.float64).reshape(6, -1)
    y = np.asarray(trained.constants.federation.samples.y)
    kernel, bias = (np.asarray(start[name], np.float64) for name in ("kernel", "bias"))
    for _ in range(count):
        velocity_kernel, velocity_bias = np.zeros_like(kernel), np.zeros_like(bias)
        for _ in range(epochs):
            logits = x @ kernel + bias
            shares = np.exp(logits - logits.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            shares[np.arange(6), y] -= 1
            velocity_kernel = momentum * velocity_kernel + x.T @ shares / 6
            velocity_bias = momentum * velocity_bias + shares.mean(0)
            kernel, bias = kernel - rate * velocity_kernel, bias - rate * velocity_bias
    expected = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    close(trained.deployed(after(trained, count))["params"]["classifier"]["dense"], expected)


@pytest.mark.parametrize(("clients", "cohort"), [(20, 5), (20, 20), (50_000, 100)])
def test_uniform_selection_takes_the_largest_words(clients, cohort):
    sizes = np.arange(clients, dtype=np.int32)
    problem: Any = SimpleNamespace(num_clients=clients, cohort_size=cohort, sizes=jnp.asarray(sizes), present=None)
    select = jax.jit(lambda key: (select_uniformly(problem, key), jax.random.bits(key, (clients,))))
    for seed in range(5):
        chosen, words = jax.device_get(select(jax.random.key(seed)))
        np.testing.assert_array_equal(chosen.ids, np.argsort(-words.astype(np.int64), kind="stable")[:cohort])
        np.testing.assert_array_equal(chosen.sizes, chosen.ids)
