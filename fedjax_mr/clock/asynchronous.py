"""Asynchronous clients: any strategy, with uploads that arrive after the server has changed.

`asynchronous` turns a strategy into one whose round e makes version e + 1 of the server's state: the jobs of a
`Schedule` that are not trained yet train together, K uploads arrive, and the strategy's own ``server_update`` combines
them. This is the buffered aggregation of FedBuff (Nguyen et al., AISTATS 2022) around the server of any method.

What arrives. The model of an upload is the change D since the job's start. The server adds it to the model that it
would send now, w: the upload becomes w + s(tau) D with the weight s of its staleness tau. Without staleness it is the
upload itself, bit for bit. So FedAvg's mean becomes w + mean of s(tau) D. BatchNorm statistics, which may not be
extrapolated, become (1 - s) now + s uploaded. Other parts of an upload (control variates, prototypes) are not changed.
Strategies that weigh stale uploads themselves, or keep M models that circulate, take uploads as they are
(`Strategy.stale`).

If K jobs are in flight and new ones start at the update, no upload is stale, and the results equal those of synchronous
rounds bit for bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import joined, received, split, upload_shapes
from fedjax_mr.clock.schedule import REFILLS, Schedule
from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field
from fedjax_mr.strategies import interface, parts
from fedjax_mr.strategies.interface import Cohort, Info, Payload, Problem, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic

VERSION = "version"  # entry of the payload: the version that a job received

Weight = Callable[[jax.Array], jax.Array]
"""tau [K] int32 -> s(tau) [K] float32."""


def constant(tau: jax.Array) -> jax.Array:
    """No weight of staleness."""
    return jnp.ones(tau.shape)


def polynomial(exponent: Any) -> Weight:
    """(1 + tau)^-a. FedBuff: a = 0.5. FedAsync: a = 0.5."""
    return lambda tau: (1 + tau).astype(jnp.float32) ** -jnp.float32(exponent)


def hinge(slope: Any, late: Any) -> Weight:
    """1 up to tau = b, then 1 / (a (tau - b) + 1). FedAsync (Xie, Koyejo, Gupta 2019): a = 10, b = 4."""

    def weight(tau: jax.Array) -> jax.Array:
        excess = jnp.maximum(tau.astype(jnp.float32) - late, 0.0)
        return 1 / (slope * excess + 1)

    return weight


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """The settings of asynchronous clients."""

    # fmt: off
    in_flight: int | None = field(
        None, "async: clients M that train at the same time. If omitted, twice --cohort", unit="clients", low=1,
        needs=("mode", "async"), group="Clock")
    refill: str = field(
        "update", "async: new clients start after each update (update), or one after each arrival (arrival)",
        choices=REFILLS, source="our choice; FedBuff and FedAsync: arrival", needs=("mode", "async"), group="Clock")
    # fmt: on


@dataclasses.dataclass(frozen=True)
class StalenessNumbers:
    """The settings of the weights of this package."""

    # fmt: off
    staleness_a: float = field(
        0.5, "async: a of --staleness", low=0, source="FedBuff, Nguyen et al. 2022; FedAsync's hinge: 10",
        needs=("mode", "async"), group="Clock")
    staleness_b: float = field(
        4.0, "async: b of --staleness=hinge", low=0, source="FedAsync, Xie et al. 2019",
        needs=("mode", "async"), group="Clock")
    # fmt: on


class StalenessRow(NamedTuple):
    """A registered weight of stale uploads.

    Attributes:
      build: settings -> (tau [K] int32 -> s(tau) [K] float32). The numbers of the settings may be traced.
      settings: the dataclass of its settings, declared with `field`. Default: there are none.
    """

    build: Callable[[Any], Weight]
    settings: type | None = None


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `STALENESS`. Raises a UserError: it is no `StalenessRow`, or has no dataclass."""
    declared = isinstance(row, StalenessRow) and (row.settings is None or dataclasses.is_dataclass(row.settings))
    if not isinstance(row, StalenessRow) or not callable(row.build) or not declared:
        raise UserError(
            f"fmr.STALENESS[{name!r}] takes fmr.StalenessRow(build, settings): build(settings) returns a function of "
            "tau [K], and settings is a dataclass with fmr.field(...), or left out"
        )


_OURS = {
    "constant": StalenessRow(lambda settings: constant, StalenessNumbers),
    "polynomial": StalenessRow(lambda settings: polynomial(settings.staleness_a), StalenessNumbers),
    "hinge": StalenessRow(lambda settings: hinge(settings.staleness_a, settings.staleness_b), StalenessNumbers),
}
STALENESS = Registry("staleness", "fmr.STALENESS", check_row, _OURS)
"""All weights of stale uploads."""


class Keys(NamedTuple):
    """Keys of the versions, as synchronous rounds have them."""

    dispatch: jax.Array  # [E + 1]
    client: jax.Array  # [E + 1]


class State(NamedTuple):
    """The state of the inner strategy, and the slots of S jobs."""

    inner: interface.State
    starts: Payload  # [S, ...] what the jobs were sent
    uploads: Payload  # [S, ...] what they have returned, once they are trained
    version: jax.Array  # int32, number of versions made


def asynchronous(
    build: Callable[[Problem], Strategy],
    problem: Problem,
    schedule: Schedule,
    keys: Keys,
    *,
    weight: Weight = constant,
) -> Strategy:
    """Run a strategy with asynchronous clients.

    Args:
      build: the function problem -> strategy.
      problem: the federation. Its ``cohort_size`` is the number of jobs W that train in one round.
      schedule: the events.
      keys: the keys of the versions. The key of a job is that of its client and of the version that it received.
      weight: the weight of an upload by its staleness.

    Raises:
      UserError: the strategy selects its clients itself, works on the host between rounds, lets clients exchange
        layers, or its clients have different networks; or M models circulate and clients start before the update.
    """
    buffer, num_slots = schedule.arrival_slots.shape[1], schedule.num_slots
    in_flight = schedule.in_flight
    of_version = dataclasses.replace(problem, cohort_size=buffer, in_flight=in_flight)
    inner = build(of_version)
    circulates = inner.stale == "branches"
    if circulates and schedule.branches is None:
        raise UserError("the models of this strategy are sent again after they have been updated: use refill=update")
    for impossible, what in (
        (inner.select, "selects its clients itself, but the schedule does"),
        (inner.between_rounds, "works on the host between rounds"),
        (inner.stale == "lost", "trains another part in each round, and uploads of an earlier round would be lost"),
        (inner.stale == "renewed", "makes new factors of its adapters in each update, to which no older change fits"),
        (inner.exchange, "lets the clients of a round exchange layers, which needs all of them at the same time"),
        (len(problem.model.networks) > 1, "has clients with different networks"),
    ):
        if impossible:
            raise UserError(f"asynchronous clients are not possible: the strategy {what}")

    def cohort_of(clients: jax.Array, branches: jax.Array | None = None, fresh: jax.Array | None = None) -> Cohort:
        known = clients < problem.num_clients
        sizes = jnp.where(known, problem.sizes[jnp.where(known, clients, 0)], 0)
        return Cohort(clients, sizes, branches, fresh)

    def branches_of(round: jax.Array) -> jax.Array | None:
        """The models that return for a version. They are also those that are sent then."""
        return at(schedule.branches, round) if circulates else None

    def arrivals(round: jax.Array) -> Cohort:
        fresh = weight(at(schedule.staleness, round))
        return cohort_of(at(schedule.arrival_clients, round), branches_of(round), fresh)

    def at(rows: Any, round: jax.Array) -> jax.Array:
        return jnp.asarray(rows)[jnp.minimum(round, rows.shape[0] - 1)]

    def put(slots: Payload, where: jax.Array, rows: Payload) -> Payload:
        return jax.tree.map(lambda leaf, new: leaf.at[where].set(new, mode="drop"), slots, rows)

    def init(key: jax.Array) -> State:
        state = inner.init(key)
        clients, slots = jnp.asarray(schedule.first_clients), jnp.asarray(schedule.first_slots)

        def send(group: jax.Array | int, key: jax.Array) -> Payload:
            branches = jnp.minimum(group * buffer + jnp.arange(buffer), in_flight - 1) if circulates else None
            return inner.dispatch(state, cohort_of(clients[group], branches), key)

        def send_next(group: jax.Array, starts: Payload) -> Payload:
            return put(starts, slots[group], send(group, jax.random.fold_in(keys.dispatch[0], group)))

        sent = send(0, keys.dispatch[0])
        starts = jax.tree.map(lambda leaf: jnp.zeros((num_slots, *leaf.shape[1:]), leaf.dtype), sent)
        starts = put(starts, slots[0], sent)
        if len(clients) > 1:  # in a loop: written out, 50 dispatches compile for minutes
            starts = jax.lax.fori_loop(1, len(clients), send_next, starts)
        uploads = jax.tree.map(
            lambda leaf: jnp.zeros((num_slots, *leaf.shape), leaf.dtype), upload_shapes(inner, of_version)
        )
        return State(state, starts, uploads, jnp.zeros((), jnp.int32))

    def select(state: State, round: jax.Array, key: jax.Array) -> Cohort:
        return cohort_of(at(schedule.train_clients, state.version))

    def dispatch(state: State, cohort: Cohort, key: jax.Array) -> Payload:
        sent = trees.take(state.starts, jnp.minimum(at(schedule.train_slots, state.version), num_slots - 1))
        return sent | {VERSION: at(schedule.train_versions, state.version)}

    def receive(
        state: State, messages: Payload, payloads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Payload, Info]:
        """Put the trained jobs into their slots and take the K uploads that arrive."""
        uploads = put(state.uploads, at(schedule.train_slots, round), messages)
        slots = at(schedule.arrival_slots, round)
        arrived, sent = trees.take((uploads, state.starts), slots)
        cohort, info, own = arrivals(round), {}, state.inner
        if inner.receive is not None:
            own, arrived, info = inner.receive(own, arrived, sent, cohort, round, key)
        tau = at(schedule.staleness, round)
        if inner.stale == "rebased":
            now = inner.dispatch(own, cohort, keys.dispatch[round])
            arrived = rebased(arrived, sent, now, tau, weight(tau))
        info = info | {"staleness": jnp.mean(tau.astype(jnp.float32)), "staleness_max": jnp.max(tau)}
        return State(own, state.starts, uploads, state.version), arrived, info

    def server_update(
        state: State, uploads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Info]:
        """Make a version, and send it to the jobs that will receive it."""
        own, info = inner.server_update(state.inner, uploads, arrivals(round), round, key)
        cohort = cohort_of(at(schedule.start_clients, round), branches_of(round))
        sent = inner.dispatch(own, cohort, keys.dispatch[round + 1])
        starts = put(state.starts, at(schedule.start_slots, round), sent)
        return State(own, starts, state.uploads, state.version + 1), info

    def traffic(usual: Traffic, state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        """K models are sent and K uploads arrive in each round. Those of the first M jobs count in the first round.

        Strategies with a count of their own count the jobs whose uploads arrive, also what these were sent.
        """
        down, up = (trees.num_bytes(slots) // num_slots for slots in (state.starts, state.uploads))
        first = jnp.where(round == 0, in_flight, 0)
        usual = Traffic((Parcels.of(buffer + first, down),), (Parcels.of(buffer, up),), usual.peer)
        if inner.traffic is None:
            return usual
        arrived = trees.take(
            put(state.uploads, at(schedule.train_slots, round), uploads), at(schedule.arrival_slots, round)
        )
        return inner.traffic(usual, state.inner, arrived, arrivals(round), round)

    return parts.lifted(inner)._replace(
        init=init,
        dispatch=dispatch,
        client_update=client_of_version(inner, problem, keys),
        server_update=server_update,
        receive=receive,
        select=select,
        traffic=traffic,
    )


def client_of_version(inner: Strategy, problem: Problem, keys: Keys) -> Callable[..., Any]:
    """The ``client_update`` of jobs that received different versions, each with the key of its own version.

    A row without a client returns zeros: many rows of a wave are empty, and many rounds train nothing.
    """

    def client_update(payload: Payload, memory: Any, data: Any, round: jax.Array, key: jax.Array) -> Any:
        version = payload[VERSION]
        sent = {name: each for name, each in payload.items() if name != VERSION}
        own_key = jax.random.fold_in(jax.random.fold_in(keys.client[version], data.client_id), 0)
        train = lambda: inner.client_update(sent, memory, data, version, own_key)

        def skip() -> Any:
            upload, kept, metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(train))
            return upload, kept, metrics._replace(bad_step=jnp.full((), -1, jnp.int32))

        return jax.lax.cond(data.client_id < problem.num_clients, train, skip)

    return client_update


def rebased(uploads: Payload, sent: Payload, now: Payload, tau: jax.Array, weights: jax.Array) -> Payload:
    """Uploads [K, ...] as if their clients had been sent ``now``: now + s (upload - sent) for models.

    Uploads with tau = 0 and weight 1 keep their bits.

    Raises:
      UserError: clients upload a model that they did not receive.
    """
    values, others = split(uploads)
    try:
        reference, current = received(values, others, sent), received(values, others, now)
    except UserError:
        raise UserError(
            "asynchronous clients are not possible: an upload counts as the change of the model that was sent, but the "
            "clients of this strategy choose the model that they upload: use mode=sync"
        ) from None
    fresh = (tau == 0) & (weights == 1)

    def moved(upload: jax.Array, before: jax.Array, now: jax.Array) -> jax.Array:
        column = lambda each: each.reshape(-1, *(1,) * (upload.ndim - 1))
        return jnp.where(column(fresh), upload, now + column(weights) * (upload - before))

    def mixed(upload: jax.Array, now: jax.Array) -> jax.Array:
        share = weights.reshape(-1, *(1,) * (upload.ndim - 1))
        return share * upload + (1 - share) * now if jnp.issubdtype(upload.dtype, jnp.floating) else upload

    models = [name for name in values if name in others]
    for name in models:
        values[name] = jax.tree.map(moved, values[name], reference[name], current[name])
        statistics = {collection: now[name][collection] for collection in others[name]}
        others[name] = jax.tree.map(mixed, others[name], statistics)
    return joined(values, others)
