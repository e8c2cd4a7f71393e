"""Two networks that learn from each other: the gradient, and the limits in which they do not."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr.client import local, mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.client.samples import ClientData
from fedjax_mr.tasks import Classification
from fedjax_mr.testing.federations import numbers_like


@pytest.fixture(scope="module")
def constants(federation):
    return federation("linear,perceptron", sizes=(7, 5), cohort=2)


def data_of(constants, client):
    samples, index, offsets = constants.federation
    sizes = np.diff(offsets)
    return ClientData(samples, jnp.asarray(index), np.int32(offsets[client]), np.int32(sizes[client]), np.int32(0))


def start_of(model, seed):
    return numbers_like(model.shapes(), seed)


def train_pair(models, setting, pair, data, weights):
    """Train both networks in one compiled program."""
    train = lambda pair, key: mutual.train_pair(models, setting, pair, data, key, weights=weights)
    return jax.jit(train)(pair, jax.random.key(2))


def train_alone(model, setting, start, data):
    return jax.jit(lambda start, key: local.train(model, setting, start, data, key))(start, jax.random.key(2))


def test_the_gradient_of_each_logit_is_p_minus_onehot_plus_p_minus_q(constants):
    """Against autodiff of the printed losses, for two different networks, in float64."""
    batch_x = np.random.default_rng(0).normal(size=(6, 4, 4, 1))
    labels = np.array([0, 1, 2, 0, 1, 2])
    with jax.enable_x64(True):
        linear, perceptron = constants.problem.model.networks
        models = Pair(linear, perceptron)
        double = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
        pair = Pair(*(double(start_of(model, i)) for i, model in enumerate(models)))
        batch = local.Batch(batch_x, labels, np.ones(6))
        params = Pair(*(each["params"] for each in pair))
        loss = mutual.mutual_loss(models, Pair(Weights(), Weights()))
        found = jax.jit(jax.grad(lambda params: loss(params, Pair({}, {}), batch, jax.random.key(0))[0]))(params)

        @jax.jit
        def by_hand(params):
            forward = [
                jax.vjp(lambda own, model=model: model.apply({"params": own}, batch.x), own)
                for model, own in zip(models, params, strict=True)
            ]
            (p, back_p), (q, back_q) = ((jax.nn.softmax(logits), back) for logits, back in forward)
            wanted = lambda own, other: (2 * own - jax.nn.one_hot(labels, 3) - other) / 6
            return Pair(*back_p(wanted(p, q)), *back_q(wanted(q, p)))

        wanted = by_hand(params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9), found, wanted)


def test_equal_networks_learn_nothing_from_each_other(constants, close):
    model = constants.problem.model.networks[1]
    start, setting, data = start_of(model, 1), constants.problem.local, data_of(constants, 0)
    both, _ = train_pair(Pair(model, model), setting, Pair(start, start), data, Pair(Weights(), Weights()))
    alone, _ = train_alone(model, setting, start, data)
    close(both.first, alone)
    close(both.second, alone)


def test_without_mutual_weights_both_train_alone_and_are_clipped_alone(constants, close):
    """Each network has an optimiser of its own: a joint global norm would clip both together."""
    setting = dataclasses.replace(
        constants.problem.local, rule=optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, 0.5))
    )
    models, data = Pair(*constants.problem.model.networks), data_of(constants, 0)
    starts = Pair(*(start_of(model, i) for i, model in enumerate(models)))
    both, metrics = train_pair(models, setting, starts, data, Pair(Weights(mutual=0.0), Weights(mutual=0.0)))
    losses = 0.0
    for model, start, trained in zip(models, starts, both, strict=True):
        alone, own = train_alone(model, setting, start, data)
        close(trained, alone)
        losses += float(own.loss)
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-5)
    assert int(metrics.images) == 2 * 7


@pytest.mark.parametrize("kinds", [(0, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 0), (1, 1)))])
def test_a_zoo_trains_pairs_as_the_networks_themselves(constants, close, kinds):
    zoo, setting, data = constants.problem.model, constants.problem.local, data_of(constants, 1)
    weights = Pair(Weights(), Weights())
    models = Pair(*(zoo.networks[kind] for kind in kinds))
    starts = Pair(*(start_of(model, i) for i, model in enumerate(models)))
    pack = jax.jit(lambda pair: Pair(*(zoo.pack(own, kind) for own, kind in zip(pair, kinds, strict=True))))
    unpack = jax.jit(lambda pair: Pair(*(zoo.unpack(own, kind) for own, kind in zip(pair, kinds, strict=True))))
    ours, metrics = train_pair(Pair(zoo, zoo), setting, pack(starts), data, weights)
    plain, own = train_pair(models, setting, starts, data, weights)
    close(metrics, own)
    close(unpack(ours), plain)


def fixed(logits, calls):
    """A network with constant logits [B, C], which counts its calls in its state."""

    def train_apply(params, state, x, *, mask, key):
        jax.debug.callback(lambda key: calls.append(key.tolist()), jax.random.key_data(key))
        return jnp.asarray(logits, jnp.float32) + params[None], state + 1

    return SimpleNamespace(train_apply=train_apply, task=Classification(width=2))


def test_the_loss_of_each_network_has_its_own_weights_and_the_other_as_teacher():
    """Shares (3/4, 1/4) and (1/2, 1/2), label 0; the second sample is padding. Each network has a key of its own."""
    calls = []
    models: Any = Pair(fixed([[np.log(3), 0], [9, 9]], calls), fixed([[0, 0], [5, 7]], calls))
    loss = mutual.mutual_loss(models, Pair(Weights(2.0, 3.0), Weights(5.0, 7.0)))
    batch = local.Batch(np.zeros((2, 1), np.float32), np.array([0, 1], np.int32), np.float32([1, 0]))
    params = Pair(np.zeros(1, np.float32), np.zeros(1, np.float32))
    value, states = jax.jit(loss)(params, Pair(10, 20), batch, jax.random.key(0))
    jax.effects_barrier()
    of_second = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)  # KL(second || first)
    of_first = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    expected = 2 * np.log(4 / 3) + 3 * of_second + 5 * np.log(2) + 7 * of_first
    assert float(value) == pytest.approx(expected)
    assert states == Pair(11, 21) and calls[0] != calls[1]
