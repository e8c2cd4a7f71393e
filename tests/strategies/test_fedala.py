"""FedALA against its equations, and its special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.strategies import fedala
from fedjax_mr.strategies.fedala import Hyper


@pytest.mark.parametrize("layers", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_five_rounds_equal_the_equations(transcription, layers):
    """Full batches, so that one epoch of the weights is one step. The first training of W lasts three epochs."""
    hyper = Hyper(layers=layers, rate=8.0, share=1.0, most_epochs=3)
    by_hand = transcription("fedala", hyper)
    torch, mixed = by_hand.torch, slice(0, 2 if layers else 4)  # the classifier's tensors come first
    model = by_hand.read(by_hand.progress.server.model)
    own, weights, learnt, moved = {}, {}, set(), 0.0
    for clients in by_hand.rounds(5):
        trained = []
        for i in clients:
            start = model
            if i in own:
                w = weights.setdefault(i, [torch.ones_like(leaf) for leaf in model[mixed]])
                apart = [g - theta for g, theta in zip(model[mixed], own[i][mixed], strict=True)]

                def begun(w, old=own[i], apart=apart, model=model):
                    upper = [theta + a * d for theta, a, d in zip(old[mixed], w, apart, strict=True)]
                    return [*upper, *model[mixed.stop :]]

                for _ in range(1 if i in learnt else 3):
                    gradient = by_hand.gradient(lambda m, i=i: by_hand.cross_entropy(m, i), begun(w))[mixed]
                    w = [torch.clamp(a - 8.0 * g * d, 0, 1) for a, g, d in zip(w, gradient, apart, strict=True)]
                weights[i], start = w, begun(w)
                moved += sum(float((1 - leaf).sum()) for leaf in w)
                learnt.add(i)
            own[i] = by_hand.train(start, i)
            trained.append(own[i])
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
        for i in own:
            by_hand.check(trees.take(by_hand.progress.memory.model, i), own[i])
        for i, expected in weights.items():
            for ours, theirs in zip(by_hand.progress.memory.weights, expected, strict=True):
                np.testing.assert_allclose(ours[i], theirs, rtol=1e-3, atol=1e-4)
    assert moved > 0.1 and len(learnt) > 1


@pytest.fixture
def trainings(tiny, monkeypatch):
    """(hyper, settled, test) -> the samples (first, number) of each epoch in which a trained client's W is trained."""

    def make(hyper, *, settled, test, key=0):
        problem, seen = tiny.problem((10, 10)), []

        def run(step, setting, start, data, key):
            seen.append((int(data.offset), int(data.size)))
            return start, local.Metrics(jnp.float32(5.0), data.size, jnp.int32(1), jnp.int32(-1))

        monkeypatch.setattr(local, "run", run)
        strategy = fedala.build(hyper, problem)
        state = strategy.init(jax.random.key(0))
        memory = strategy.init_memory(None, None)._replace(
            model=state.model, trained=jnp.ones((), bool), settled=jnp.full((), settled)
        )
        data = tiny.client(np.ones((10, 2)), np.zeros(10))
        with jax.disable_jit():
            if test:
                strategy.personal_model(state, memory, data, jax.random.key(key))
            else:
                strategy.client_update({"model": state.model}, memory, data, jnp.int32(0), jax.random.key(key))
                seen.pop()  # the training of the model
        return seen

    return make


def test_the_weights_train_on_a_random_part_of_the_samples(trainings):
    parts = [trainings(Hyper(share=0.5), settled=True, test=True, key=key)[0] for key in range(6)]
    assert {size for _, size in parts} == {5}
    first = [first for first, _ in parts]
    assert len(set(first)) > 1 and min(first) >= 0 and max(first) <= 5


def test_the_first_training_of_the_weights_ends_when_ten_losses_agree_later_ones_take_an_epoch(trainings):
    assert len(trainings(Hyper(), settled=False, test=False)) == 11  # all losses are equal
    assert len(trainings(Hyper(threshold=0.0, most_epochs=17), settled=False, test=False)) == 17
    assert len(trainings(Hyper(), settled=True, test=False)) == 1
    assert len(trainings(Hyper(), settled=False, test=True)) == 1


def test_with_a_rate_of_zero_the_start_of_a_trained_client_is_the_global_model(federation, close):
    known = federation("normed")
    strategy = fedala.build(Hyper(rate=0.0), known.problem)

    @jax.jit
    def received_and_start(key):
        state = strategy.init(key)
        last = jax.tree.map(lambda leaf: leaf + 1, state.model)
        memory = strategy.init_memory(key, jnp.int32(0))._replace(model=last, trained=jnp.ones((), bool))
        return state.model, strategy.personal_model(state, memory, known.client(0), key)

    received, start = received_and_start(jax.random.key(0))
    close(start, received)


@pytest.mark.slow  # quick: the start
def test_with_a_rate_of_zero_the_clients_start_from_the_global_model(engine, close):
    ours, average = engine("fedala", hyper=Hyper(rate=0.0)), engine("fedavg")
    close(ours.run(ours.init(), 3)[0].server.model, average.run(average.init(), 3)[0].server.model)


def test_a_client_is_tested_with_its_start_and_an_untrained_one_with_the_global_model(engine):
    one = engine("fedala", "linear", hyper=Hyper(layers=0, rate=5.0), cohort=3)
    progress, _ = one.run(one.init(), 1)
    strategy, constants = one.strategy, one.constants

    @jax.jit
    def tested(client, memory):
        return strategy.personal_model(progress.server, memory, constants.client(client), jax.random.key(0))

    trained = np.flatnonzero(jax.device_get(progress.memory.trained))
    others = np.setdiff1d(np.arange(6), trained)
    assert len(trained) and len(others)
    leaves = lambda model: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model["params"])])
    server = leaves(progress.server.model)
    np.testing.assert_array_equal(leaves(tested(others[0], trees.take(progress.memory, others[0]))), server)
    memory = trees.take(progress.memory, trained[0])
    found, old = leaves(tested(trained[0], memory)), leaves(memory.model)
    low, high = np.minimum(old, server), np.maximum(old, server)
    assert np.all(low - 1e-6 <= found) and np.all(found <= high + 1e-6)  # between its own and the global one
    assert np.any(np.abs(found - server) > 1e-6)
