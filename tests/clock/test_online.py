"""Asynchronous clients that the strategy selects: the order of arrivals, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.clock.online import online
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.testing.federations import constants


def test_the_upload_that_is_due_first_arrives_and_of_two_the_older_job():
    """Client 0 needs 2 s for each job and client 1 needs 3 s. At 6 s both return; the job of client 1 began first."""
    problem = constants("linear", sizes=(1, 3), cohort=2).problem
    returned, rounds = [], []

    def build(problem):
        def server_update(state, uploads, cohort, round, key):
            returned.append(cohort)
            return state, {}

        selected = Cohort(jnp.arange(2, dtype=jnp.int32), jnp.asarray([1, 3], jnp.int32))

        def select(state, round, key):
            rounds.append(int(round))
            return selected

        return averaging(problem)._replace(server_update=server_update, select=select, stale="branches")

    keys = jax.random.split(jax.random.key(0), 7)
    seconds = np.tile(np.float32([2, 3]), (8, 1))
    strategy = online(build, problem, seconds, Keys(keys, keys))
    state, arrivals = strategy.init(jax.random.key(0)), []
    for round in range(6):
        state, info = strategy.server_update(state, {}, None, round, jax.random.key(0))
        assert set(rounds) == {round}
        rounds.clear()
        arrivals.append((float(info["clock"]), int(returned[-1].ids[0]), int(returned[-1].sizes[0])))
    assert arrivals == [(2, 0, 1), (3, 1, 3), (4, 0, 1), (6, 1, 3), (6, 0, 1), (8, 0, 1)]
    assert state.job.tolist() == [7, 5]
