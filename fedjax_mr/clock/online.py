"""Asynchronous clients that a strategy selects from what the run computes, such as activations.

`clock.asynchronous` needs to know all events before the training. If the choice of a client depends on weights, its
duration does too, and so does the order of all later arrivals. Here the events are computed during the run: the state
of the server holds the jobs in flight, and the durations are an array.

The strategy keeps M models that circulate (``stale="branches"``), and `Strategy.select` says which client trains each
of them. A round is one arrival: the client whose upload is due first returns, the server takes the upload, and
``server_update`` or ``between_rounds`` replace the client of this model only.

Waves. A job may be trained at any time between its start and its arrival, because nothing that it receives changes. So
if the upload that is due is not trained, all jobs in flight that are not trained yet train together. Results are the
same as if every job trained alone at its start.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import upload_shapes
from fedjax_mr.clock.asynchronous import VERSION, Keys, client_of_version
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.strategies import interface, parts
from fedjax_mr.strategies.interface import Cohort, Info, Payload, Problem, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic


class State(NamedTuple):
    """The state of the inner strategy, and the jobs of the M models."""

    inner: interface.State
    uploads: Payload  # [M, ...] what the jobs have returned, once they are trained
    trained: jax.Array  # [M] bool
    version: jax.Array  # [M] int32: the version that each job received
    job: jax.Array  # [M] int32: number of each job, which decides its duration
    elapsed: jax.Array  # [M] float32: seconds since its start
    time: jax.Array  # float32: seconds since the start of the run


def online(build: Callable[[Problem], Strategy], problem: Problem, seconds: Any, keys: Keys) -> Strategy:
    """Run a strategy that selects its clients itself with asynchronous clients, one arrival per round.

    Args:
      build: the function problem -> strategy.
      problem: the federation. Its ``cohort_size`` is the number M of clients in flight.
      seconds: the duration of a job by its number and its client [J, N] float32. Jobs have numbers from 0 in the order
        of their starts, so R rounds need M + R.
      keys: the keys of the versions. The key of a job is that of its client and of the version that it received.

    Raises:
      UserError: the strategy does not keep M models or does not select its clients itself, lets clients exchange
        layers, or its clients have different networks.
    """
    in_flight = problem.cohort_size
    of_version = dataclasses.replace(problem, cohort_size=1, in_flight=in_flight)
    inner = build(of_version)
    for impossible, what in (
        (inner.select is None or inner.stale != "branches", "does not select the client of each of M models"),
        (inner.exchange, "lets the clients of a round exchange layers, which needs all of them at the same time"),
        (len(problem.model.networks) > 1, "has clients with different networks"),
        (problem.num_clients < in_flight, f"has {problem.num_clients} clients, too few for in_flight={in_flight}"),
    ):
        if impossible:
            raise UserError(f"asynchronous clients are not possible: the strategy {what}")
    branches = jnp.arange(in_flight, dtype=jnp.int32)

    def clients(state: State) -> jax.Array:
        """The client of each job [M]."""
        assert inner.select is not None
        round = jnp.max(state.version)  # the newest version is that of the last round
        return inner.select(state.inner, round, random_key(0)).ids

    def due(state: State) -> tuple[jax.Array, jax.Array]:
        """The model that returns next, and the seconds until then. In a tie the older job comes first."""
        waits = jnp.asarray(seconds)[state.job, clients(state)] - state.elapsed
        branch = jnp.lexsort((state.job, waits))[0]
        return branch, jnp.maximum(waits[branch], 0.0)

    def wave(state: State) -> jax.Array:
        """The jobs that train in this round [M] bool."""
        return ~state.trained & ~state.trained[due(state)[0]]

    def cohort_of(ids: jax.Array, rows: jax.Array) -> Cohort:
        known = ids < problem.num_clients
        return Cohort(ids, jnp.where(known, problem.sizes[jnp.where(known, ids, 0)], 0), rows)

    def returning(state: State) -> Cohort:
        branch = due(state)[0][None]
        return cohort_of(clients(state)[branch], branch)

    def init(key: jax.Array) -> State:
        uploads = jax.tree.map(
            lambda leaf: jnp.zeros((in_flight, *leaf.shape), leaf.dtype), upload_shapes(inner, of_version)
        )
        zero = jnp.zeros(in_flight, jnp.int32)
        none = jnp.zeros(in_flight)
        return State(inner.init(key), uploads, zero.astype(bool), zero, branches, none, jnp.zeros(()))

    def select(state: State, round: jax.Array, key: jax.Array) -> Cohort:
        return cohort_of(jnp.where(wave(state), clients(state), problem.num_clients), branches)

    def dispatch(state: State, cohort: Cohort, key: jax.Array) -> Payload:
        sent = inner.dispatch(state.inner, cohort_of(clients(state), branches), key)
        return sent | {VERSION: state.version}

    def receive(
        state: State, messages: Payload, payloads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Payload, Info]:
        """Keep what has been trained, and take the upload that is due."""
        trained = wave(state)
        rows = jnp.where(trained, branches, in_flight)
        put = lambda leaf, new: leaf.at[rows].set(new, mode="drop")
        uploads = jax.tree.map(put, state.uploads, messages)
        arrival, own, info = returning(state), state.inner, {}
        sent = {name: each for name, each in payloads.items() if name != VERSION}
        arrived, sent = trees.take((uploads, sent), due(state)[0][None])
        if inner.receive is not None:
            own, arrived, info = inner.receive(own, arrived, sent, arrival, round, key)
        return state._replace(inner=own, uploads=uploads, trained=state.trained | trained), arrived, info

    def server_update(
        state: State, uploads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Info]:
        """Take the upload. The model's next job starts, with the client that is selected until the next round."""
        branch, wait = due(state)
        own, info = inner.server_update(state.inner, uploads, returning(state), round, key)
        state = State(
            own,
            state.uploads,
            state.trained.at[branch].set(False),
            state.version.at[branch].set(round + 1),
            state.job.at[branch].set(in_flight + round),
            (state.elapsed + wait).at[branch].set(0.0),
            state.time + wait,
        )
        return state, info | {"clock": state.time}

    def traffic(usual: Traffic, state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        """A model is sent and an upload arrives in each round. Those of the first M jobs count in the first round."""
        first = jnp.where(round == 0, in_flight, 0)
        shapes = jax.eval_shape(dispatch, state, cohort, keys.dispatch[0])
        sent = {name: each for name, each in shapes.items() if name != VERSION}
        down, up = (trees.num_bytes(each) // in_flight for each in (sent, state.uploads))
        usual = Traffic((Parcels.of(1 + first, down),), (Parcels.of(1, up),), usual.peer)
        return usual if inner.traffic is None else inner.traffic(usual, state.inner, uploads, cohort, round)

    return parts.lifted(inner)._replace(
        init=init,
        dispatch=dispatch,
        client_update=client_of_version(inner, problem, keys),
        server_update=server_update,
        receive=receive,
        select=select,
        traffic=traffic,
    )
