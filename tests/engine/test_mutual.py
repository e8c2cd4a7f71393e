"""Two networks that learn from each other: the gradient, and the limits in which they do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr.engine import local, mutual
from fedjax_mr.engine.mutual import Pair, Weights


@pytest.fixture(scope="module")
def given(federation):
    return federation("linear,perceptron", sizes=(7, 5), cohort=2)


def data_of(given, client):
    samples, index, offsets = given.federation
    sizes = np.diff(offsets)
    return local.ClientData(
        samples, jnp.asarray(index), jnp.int32(offsets[client]), jnp.int32(sizes[client]), jnp.int32(0)
    )


def test_the_gradient_of_each_logit_is_p_minus_onehot_plus_p_minus_q(given):
    """Against autodiff of the printed losses, for two different networks, in float64."""
    batch_x = np.random.default_rng(0).normal(size=(6, 4, 4, 1))
    labels = np.array([0, 1, 2, 0, 1, 2])
    with jax.enable_x64(True):
        linear, perceptron = given.problem.model.networks
        models = Pair(linear, perceptron)
        double = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), tree)
        pair = Pair(*(double(model.init(jax.random.key(i))) for i, model in enumerate(models)))
        batch = local.Batch(jnp.asarray(batch_x), jnp.asarray(labels), jnp.ones(6))
        params = {name: each["params"] for name, each in pair._asdict().items()}
        loss = mutual.mutual_loss(models, Pair(Weights(), Weights()))
        state = {"first": {}, "second": {}}
        found = jax.jit(jax.grad(lambda params: loss(params, state, batch, jax.random.key(0))[0]))(params)

        triples = zip(Pair._fields, models, pair, strict=True)
        p = {name: jax.nn.softmax(model.apply(variables, batch.x)) for name, model, variables in triples}
        for name, other, model in zip(("first", "second"), ("second", "first"), models, strict=True):
            _, backward = jax.vjp(lambda own, model=model: model.apply({"params": own}, batch.x), params[name])
            (want,) = backward((2 * p[name] - jax.nn.one_hot(labels, 3) - p[other]) / 6)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9), found[name], want)


def test_equal_networks_learn_nothing_from_each_other(given, close):
    model = given.problem.model.networks[1]
    start, setting = model.init(jax.random.key(1)), given.problem.local
    weights = Pair(Weights(), Weights())
    both, _ = mutual.train_pair(
        Pair(model, model), setting, Pair(start, start), data_of(given, 0), jax.random.key(2), weights=weights
    )
    alone, _ = local.train(model, setting, start, data_of(given, 0), jax.random.key(2))
    close(both.first, alone)
    close(both.second, alone)


def test_without_mutual_weights_both_train_alone_and_are_clipped_alone(given, close):
    """Each network has an optimiser of its own: a joint global norm would clip both together."""
    setting = dataclasses.replace(
        given.problem.local, optimizer=optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, 0.5))
    )
    models = Pair(*given.problem.model.networks)
    starts = Pair(*(model.init(jax.random.key(i)) for i, model in enumerate(models)))
    weights = Pair(Weights(mutual=0.0), Weights(mutual=0.0))
    both, metrics = mutual.train_pair(models, setting, starts, data_of(given, 0), jax.random.key(2), weights=weights)
    losses = 0.0
    for model, start, trained in zip(models, starts, both, strict=True):
        alone, own = local.train(model, setting, start, data_of(given, 0), jax.random.key(2))
        close(trained, alone)
        losses += float(own.loss)
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-5)
    assert int(metrics.images) == 2 * 7


@pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (1, 1)])
def test_a_zoo_trains_pairs_as_the_networks_themselves(given, close, kinds):
    zoo, setting = given.problem.model, given.problem.local
    weights = Pair(Weights(), Weights())
    models = Pair(*(zoo.networks[kind] for kind in kinds))
    starts = Pair(*(model.init(jax.random.key(i)) for i, model in enumerate(models)))
    packed = Pair(*(zoo.pack(start, kind) for start, kind in zip(starts, kinds, strict=True)))
    train = jax.jit(
        lambda pair: mutual.train_pair(
            Pair(zoo, zoo), setting, pair, data_of(given, 1), jax.random.key(5), weights=weights
        )
    )
    ours, metrics = train(packed)
    plain, own = mutual.train_pair(models, setting, starts, data_of(given, 1), jax.random.key(5), weights=weights)
    close(metrics, own)
    for kind, mine, theirs in zip(kinds, ours, plain, strict=True):
        close(zoo.unpack(mine, kind), theirs)
