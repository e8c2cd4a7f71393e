"""Local-only: a client that does not get better stops."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.samples import ClientData
from fedjax_mr.strategies.local_only import Hyper

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
