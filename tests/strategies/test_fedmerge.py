"""FedMerge against its equations, and its special cases."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, fedmerge, fedprox
from fedjax_mr.strategies.fedmerge import Hyper
from fedjax_mr.testing.federations import first_cohort, random_like, tree_equal

HEAD = (0, 1)  # positions of the perceptron's tensors


def test_three_rounds_equal_the_equations(transcription):
    count, strength, step = 3, 0.2, 0.5
    by_hand = transcription("fedmerge", Hyper(models=count, strength=strength, step=step))
    models = [by_hand.read(trees.take(by_hand.progress.server.models, j)) for j in range(count)]
    logits = np.zeros((4, count))
    softmax = lambda rows: np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    mixed = lambda shares: [sum(a * m for a, m in zip(shares, each, strict=True)) for each in zip(*models, strict=True)]

    for clients in by_hand.rounds(3):
        shares = softmax(logits)[clients]
        sent = [mixed(each) for each in shares]
        changes = []
        for i, received in zip(clients, sent, strict=True):

            def proximal(weights, i, received):
                distance = sum(((w - r) ** 2).sum() for w, r in zip(weights, received, strict=True))
                return by_hand.cross_entropy(weights, i) + strength * distance

            trained = by_hand.train(received, i, loss=lambda w, i=i, r=received: proximal(w, i, r))
            changes.append([r - t for r, t in zip(received, trained, strict=True)])
        sizes = np.array(by_hand.sizes_of(clients), np.float64)
        gradient = np.zeros((len(clients), count))
        for row, (received, change) in enumerate(zip(sent, changes, strict=True)):
            for j, model in enumerate(models):
                product = sum(float(((model[k] - received[k]) * change[k]).sum()) for k in HEAD)
                gradient[row, j] = sizes[row] * shares[row, j] * product
        logits[clients] -= step * gradient / np.abs(gradient).max()
        owned = sizes[:, None] * softmax(logits)[clients]
        owned /= owned.sum(axis=0)
        for j in range(count):
            moves = by_hand.mean(changes, owned[:, j])
            models[j] = [leaf - move for leaf, move in zip(models[j], moves, strict=True)]
        np.testing.assert_allclose(by_hand.progress.server.logits, logits, rtol=1e-4, atol=1e-5)
        for j, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.models, j), model)


def test_models_start_independently_and_mixtures_equally(federation):
    network = SimpleNamespace(init=lambda key: {"w": jax.random.uniform(key)}, head_name=lambda: "head")
    strategy = fedmerge.build(Hyper(models=3), dataclasses.replace(federation("linear").problem, model=network))
    states = [strategy.init(jax.random.key(seed)) for seed in (0, 1)]
    assert len(np.unique([state.models["w"] for state in states])) == 6
    np.testing.assert_array_equal(states[0].logits, np.zeros((6, 3)))


def test_a_client_receives_its_own_mixture_of_the_models(federation):
    """Clients 2 and 0 of the cohort (2, 0, 1): softmax(log 3, 0) = (3/4, 1/4), and (1/2, 1/2)."""
    strategy = fedmerge.build(Hyper(models=2), federation("linear").problem)
    logits = np.zeros((6, 2), np.float32)
    logits[2] = np.log([3, 1])
    state = fedmerge.State({"w": np.array([[4.0, 0.0], [8.0, 1.0]], np.float32)}, jnp.asarray(logits))
    sent = strategy.dispatch(state, Cohort(jnp.array([2, 0, 1]), np.ones(3)), None)["model"]["w"]
    np.testing.assert_allclose(sent, [[5, 0.25], [6, 0.5], [6, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(strategy.personal_part(state, 2)["w"], [5, 0.25], rtol=1e-6)


def test_a_model_in_which_no_client_has_a_share_stays_as_it_was(federation):
    problem = federation("linear").problem
    strategy = fedmerge.build(Hyper(models=2), problem)
    state = jax.jit(strategy.init)(jax.random.key(0))
    state = state._replace(logits=state.logits.at[:, 1].set(-200.0))  # exp(-200) is no float32
    uploads = {"model": random_like(trees.broadcast(trees.take(state.models, 0), problem.cohort_size))}
    new, _ = jax.jit(strategy.server_update)(state, uploads, first_cohort(problem), 0, jax.random.key(1))
    assert trees.all_finite(new)
    tree_equal(trees.take(new.models, 1), trees.take(state.models, 1))


@pytest.mark.slow
def test_a_single_model_is_fedprox_and_equal_models_stay_equal(engine, close):
    proximal = engine("fedprox", hyper=fedprox.Hyper(mu=0.02))
    start = proximal.init().server.model
    expected = proximal.run(proximal.init(), 3)[0].server.model
    for count in (1, 2):
        merged = engine("fedmerge", hyper=Hyper(models=count))
        progress = merged.init()
        server = progress.server._replace(models=jax.device_get(trees.broadcast(start, count)))
        progress, _ = merged.run(merged.place(progress._replace(server=server)), 3)
        for row in range(count):
            close(trees.take(progress.server.models, row), expected)
