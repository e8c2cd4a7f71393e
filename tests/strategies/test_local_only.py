"""Local-only: a client that does not get better stops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.strategies import local_only
from fedjax_mr.strategies.local_only import Hyper, Memory

ROUNDS, PATIENCE = 6, 1


def test_a_client_stops_for_good_after_its_patience(engine, equal):
    """Beside the same clients without patience, whose losses tell when each of them should have stopped."""
    settings = {"cohort": 6, "lr": 0.3, "momentum": 0.9}
    one, plain = engine("local", "linear", hyper=Hyper(PATIENCE), **settings), engine("local", "linear", **settings)
    problem, (samples, index, offsets) = plain.constants.problem, plain.constants.federation

    @jax.jit
    def losses(models):
        def loss(client):
            data = ClientData(samples, index, offsets[client], problem.sizes[client], client)
            return local.held_out_loss(problem.model, trees.take(models, client), data, batch_size=4)

        return jax.lax.map(loss, jnp.arange(6, dtype=jnp.int32))

    expected, models, course = plain.init(), [], []
    for _ in range(ROUNDS):
        expected, _ = plain.run(expected, 1)
        course.append(np.asarray(losses(expected.memory.model)))
        models.append(jax.tree.map(np.array, expected.memory.model))
    last = []
    for client in range(6):
        lowest, above, trained = np.inf, 0, 0
        while trained < ROUNDS and above <= PATIENCE:
            now = course[trained][client]
            lowest, above, trained = min(lowest, now), above + 1 if now > lowest else 0, trained + 1
        last.append(trained)
    assert min(last) < ROUNDS == max(last), last

    progress, report = one.run(one.init(), ROUNDS)
    for client, trained in enumerate(last):
        equal(trees.take(progress.memory.model, client), trees.take(models[trained - 1], client))
    each_round = problem.local.epochs * np.asarray(problem.sizes)
    assert int(report.images) == int(np.array(last) @ each_round)


def test_a_client_goes_on_from_its_own_model_and_nothing_is_sent(tiny):
    strategy, own = local_only.build(Hyper(), tiny.problem()), tiny.model(np.zeros((2, 2)))
    upload, memory, _ = tiny.train(strategy, {}, Memory(own, jnp.float32(5.0), jnp.int32(2)))
    assert upload == strategy.dispatch(local_only.State(), None, None) == {}
    np.testing.assert_allclose(tiny.head(memory.model), [[0.5, -0.5], [0, 0]])
    assert strategy.personal_model((), memory, None, None) is memory.model


def test_clients_start_from_networks_of_their_own(tiny):
    strategy = local_only.build(Hyper(), tiny.problem())
    first, second = (strategy.init_memory(jax.random.key(0), jnp.int32(client)) for client in (0, 1))
    assert not np.allclose(tiny.head(first.model), tiny.head(second.model))
    assert float(first.lowest) > 1e38 and int(first.above) == 0


@pytest.mark.parametrize(
    "above, lowest, trains, expected",
    [
        # The loss after a step is 0.5, and without a step 0. The patience is two rounds.
        (0, 0.6, True, (0.5, 0)),
        (1, 0.5, True, (0.5, 0)),  # equal is not above
        (2, 0.4, True, (0.4, 3)),
        (2, 0.6, True, (0.5, 0)),  # a lower loss begins a new count
        (3, -1.0, False, (-1.0, 4)),
    ],
)
def test_more_rounds_above_the_lowest_loss_than_the_patience_stop_a_client(
    tiny, monkeypatch, above, lowest, trains, expected
):
    measured = lambda model, variables, data, batch_size: variables["params"]["head"]["dense"]["kernel"][0, 0]
    monkeypatch.setattr(local, "held_out_loss", measured)
    strategy = local_only.build(Hyper(2), tiny.problem())
    memory = Memory(tiny.model(np.zeros((2, 2))), jnp.float32(lowest), jnp.int32(above))
    _, memory, metrics = tiny.train(strategy, {}, memory)
    assert int(metrics.steps) == trains and tiny.head(memory.model)[0, 0] == 0.5 * trains
    assert (float(memory.lowest), int(memory.above)) == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize("patience", [None, 2])
def test_a_client_trains_its_own_model_with_its_key(tiny, monkeypatch, patience):
    monkeypatch.setattr(local, "held_out_loss", lambda *arguments, batch_size: jnp.float32(1.0))
    monkeypatch.setattr(local, "train", lambda model, setting, variables, data, key: ((variables, key), "metrics"))
    strategy, key = local_only.build(Hyper(patience), tiny.problem()), jax.random.key(7)
    memory = Memory("own", jnp.float32(2.0), jnp.int32(0))
    _, memory, metrics = strategy.client_update({}, memory, tiny.client(), jnp.int32(1), key)
    assert (memory.model, metrics) == (("own", key), "metrics")
