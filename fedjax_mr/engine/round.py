"""One round as pure functions: select -> dispatch -> client_update of each client -> server_update.

`fedjax_mr.engine.rounds` places the data and compiles and runs these functions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client.local import Metrics
from fedjax_mr.client.samples import Array, ClientData, Samples, one_client
from fedjax_mr.engine import checks
from fedjax_mr.engine.clients import ClientAxis, assign, positions
from fedjax_mr.engine.placement import CohortSamples
from fedjax_mr.strategies.interface import Cohort, Info, Memory, Payload, Problem, State, Strategy
from fedjax_mr.strategies.parts import kept_for_validation, select_uniformly
from fedjax_mr.strategies.traffic import Traffic, usual_traffic

# Streams of random keys. A key is folded from the seed, the stream, the round, the client id and the occurrence.
INIT, SELECT, DISPATCH, CLIENT, SERVER, HOST, MEMORY, PERSONAL, CLOCK = range(9)

Build = Callable[[Problem], Strategy]
"""Problem -> strategy, a pytree: the leaves are the numbers of the hyper-parameters (see `settings.bind`)."""


class Federation(NamedTuple):
    """The clients' data on the devices."""

    samples: Samples
    index: Array  # int32: client after client, first its training rows, then its validation rows
    offsets: Array  # [N + 1] int32

    def client(self, client_id: jax.Array | int, validation_size: jax.Array | int = 0) -> ClientData:
        """The data of one client. Its last ``validation_size`` rows are for validation."""
        client_id, offsets = jnp.asarray(client_id, jnp.int32), jnp.asarray(self.offsets)
        kept, start = jnp.asarray(validation_size, jnp.int32), offsets[client_id]
        size = offsets[client_id + 1] - start - kept
        return ClientData(self.samples, self.index, start, size, client_id, kept)


class RunConstants(NamedTuple):
    """The constants of all rounds. Passed to every compiled program, so no program contains them as literals."""

    build: Build
    problem: Problem
    federation: Federation
    key: jax.Array  # the run's key
    running: Any = None  # [T] whether each of several trials is running

    @property
    def strategy(self) -> Strategy:
        """The strategy, built anew at each access, because inside of a program it contains traced numbers."""
        return self.build(self.problem)

    def in_round(self, round: jax.Array) -> "RunConstants":
        """The constants of one round: those of the run with the learning rate of the round."""
        return self._replace(problem=self.problem.in_round(round))

    def client(self, client_id: jax.Array | int) -> ClientData:
        """The data of one client."""
        return self.federation.client(client_id, kept_for_validation(self.problem)[client_id])


class Progress(NamedTuple):
    """The state of a run, which changes in every round."""

    server: State
    memory: Memory  # leaves [N, ...], or a `HostMemory` if it is kept on the host, or None
    round: jax.Array  # number of completed rounds, int32


class Report(NamedTuple):
    """The report of one call. Counts cover the call, all other values its last round."""

    images: jax.Array  # training samples processed in this call
    steps: jax.Array  # optimizer steps in this call
    train_loss: jax.Array  # mean loss over the training samples of the last round, in nats; NaN if none trained
    similarity: jax.Array  # mean pairwise cosine of the uploaded parameters of the last round; NaN if undefined
    bad_client: jax.Array  # id of the first diverged client of the last round, -1 if none
    bad_step: jax.Array  # local step at which it diverged
    traffic: Traffic  # traffic of this call
    info: Info  # values that the strategy reports, of the last round


class ClientRow(NamedTuple):
    """One client's part of a round, sent to the device that trains it."""

    payload: Payload
    memory: Memory
    client_id: jax.Array
    occurrence: jax.Array  # number of earlier draws of this client in this round
    size: jax.Array  # number of training samples; 0 in padding rows
    samples: CohortSamples | None = None  # its samples if the samples are kept on the host, else None
    trial: jax.Array | None = None  # number of its trial, if several train together


class CohortPlan(NamedTuple):
    """The clients of a round, in the strategy's order, and their slots."""

    cohort: Cohort
    slots: jax.Array  # [K'] row of each slot, K in empty slots


def plan(axis: ClientAxis, constants: RunConstants, server: State, round: jax.Array) -> CohortPlan:
    """Select the cohort and assign it to slots."""
    strategy, key = constants.strategy, round_key(constants.key, SELECT, round)
    size = constants.problem.cohort_size
    own = None if strategy.select is None else checks.cohort(strategy.select(server, round, key), size)
    cohort = select_uniformly(constants.problem, key) if own is None else own
    return CohortPlan(cohort, assign(axis, cohort.sizes))


def ids_by_slot(constants: RunConstants, plan: CohortPlan) -> jax.Array:
    """The client id of each slot [K']. Empty slots have that of the first row of the cohort."""
    return plan.cohort.ids[jnp.where(plan.slots < constants.problem.cohort_size, plan.slots, 0)]


def start(constants: RunConstants, *, with_memory: bool = True) -> Progress:
    """The progress before the first round. ``with_memory=False`` leaves out the clients' memory."""
    strategy, memory = constants.strategy, None
    if with_memory and strategy.init_memory is not None:
        memory = first_memory(constants, jnp.arange(constants.problem.num_clients, dtype=jnp.int32))
    return Progress(strategy.init(jax.random.fold_in(constants.key, INIT)), memory, jnp.zeros((), jnp.int32))


def first_memory(constants: RunConstants, ids: jax.Array) -> Memory:
    """The memory of clients ``ids`` [R] before the first round: leaves [R, ...]."""
    init_memory, key = constants.strategy.init_memory, jax.random.fold_in(constants.key, MEMORY)
    assert init_memory is not None
    return jax.vmap(lambda client_id: init_memory(key, client_id))(ids)


def begin(axis: ClientAxis, constants: RunConstants, progress: Progress) -> tuple[CohortPlan, ClientRow]:
    """Select and dispatch. Return the plan and the rows [K', ...] in the order of the layout."""
    constants = constants.in_round(progress.round)
    chosen = plan(axis, constants, progress.server, progress.round)
    cohort, slots = chosen
    dispatch_key = round_key(constants.key, DISPATCH, progress.round)
    payloads = dispatch(constants.strategy, progress.server, cohort, dispatch_key)

    is_client = slots < constants.problem.cohort_size
    order = jnp.where(is_client, slots, 0)
    ids = ids_by_slot(constants, chosen)
    rows = ClientRow(
        payload=trees.take(payloads, order),
        memory=trees.take(progress.memory, ids),
        client_id=ids,
        occurrence=_occurrences(cohort.ids)[order],
        size=jnp.where(is_client, cohort.sizes[order], 0),
    )
    return chosen, rows


def dispatch(strategy: Strategy, state: State, cohort: Cohort, key: jax.Array) -> Payload:
    """The payload of each client [K, ...], after an exchange among the clients if the strategy has one."""
    exchange, size = strategy.exchange, cohort.ids.shape[0]
    if exchange is None or not exchange.before_training:
        return checks.payloads(strategy.dispatch(state, cohort, key), size)
    return exchange.mix(checks.payloads(strategy.dispatch(state, cohort, jax.random.fold_in(key, 0)), size), key)[0]


def receive(
    strategy: Strategy,
    state: State,
    messages: Payload,
    payloads: Payload,
    cohort: Cohort,
    round: jax.Array,
    key: jax.Array,
) -> tuple[State, Payload, Info, jax.Array]:
    """The state and the uploads [K, ...] for ``server_update``, info, and a key for it.

    Before they arrive, the clients exchange layers if the strategy has an exchange.
    """
    uploads, exchanged, received = messages, {}, {}
    if strategy.exchange is not None and strategy.exchange.before_upload:
        exchange_key, key = jax.random.split(key)
        uploads, exchanged = strategy.exchange.mix(uploads, exchange_key)
    if strategy.receive is not None:
        state, uploads, received = strategy.receive(state, uploads, payloads, cohort, round, key)
    return state, uploads, exchanged | received, key


def client_key(
    key: jax.Array, round: jax.Array | int, client_id: jax.Array | int, occurrence: jax.Array | int
) -> jax.Array:
    """The key of a client in a round. It does not reveal the key of the run."""
    return jax.random.fold_in(jax.random.fold_in(round_key(key, CLIENT, round), client_id), occurrence)


def train_client(constants: RunConstants, round: jax.Array, row: ClientRow) -> tuple[Payload, Memory, Metrics]:
    """Train one client."""
    constants = constants.in_round(round)
    key = client_key(constants.key, round, row.client_id, row.occurrence)
    data = constants.client(row.client_id)
    if row.samples is not None:
        samples = data.samples._replace(x=row.samples.x, y=row.samples.y)
        data = one_client(samples, client_id=row.client_id, validation_size=data.validation_size)
    kept = jnp.where(row.size > 0, data.validation_size, 0)  # an empty slot has no samples
    data = data._replace(size=row.size, validation_size=kept)
    return checks.trained(constants.strategy.client_update(row.payload, row.memory, data, round, key), row.memory)


def finish(
    constants: RunConstants,
    progress: Progress,
    plan: CohortPlan,
    trained: tuple[Payload, Memory, Metrics],
) -> tuple[Progress, Report]:
    """Reorder the trained rows [K', ...] as in the cohort and update the server.

    If ``progress`` has no memory, that of the returned progress holds the rows of the cohort [K, ...].
    """
    constants = constants.in_round(progress.round)
    strategy = constants.strategy
    messages, memories, metrics = trees.take(trained, positions(plan.slots, constants.problem.cohort_size))
    round, state = progress.round, progress.server
    filled = plan.cohort.ids < constants.problem.num_clients  # asynchronous rounds have rows without a client
    if constants.problem.present is not None:  # a cohort of more slots than clients has vacant ones
        filled &= constants.problem.present[plan.cohort.ids]
        messages = trees.fill(messages, filled)
    payloads = dispatch(strategy, state, plan.cohort, round_key(constants.key, DISPATCH, round))  # as in `begin`
    key = round_key(constants.key, SERVER, round)
    state, uploads, received, key = receive(strategy, state, messages, payloads, plan.cohort, round, key)
    seen = messages if strategy.receive is None else uploads
    one_network = "model" in seen and len(constants.problem.model.networks) == 1
    similarity = jnp.float32(jnp.nan)
    if one_network:
        similarity = constants.problem.model.mean_cosine(seen["model"])

    if progress.memory is None:
        memory = trees.agree(memories, plan.cohort.ids)
    else:
        memory = trees.put(progress.memory, plan.cohort.ids, memories)

    server, info = checks.updated(strategy.server_update(state, uploads, plan.cohort, round, key), state)
    traffic = usual_traffic(payloads, messages)
    if strategy.traffic is not None:
        traffic = strategy.traffic(traffic, progress.server, messages, plan.cohort, round)
    images = jnp.sum(metrics.images)
    first_bad = jnp.argmax(metrics.bad_step >= 0)
    report = Report(
        images=images,
        steps=jnp.sum(metrics.steps),
        train_loss=jnp.where(images > 0, jnp.sum(metrics.loss) / jnp.maximum(images, 1).astype(jnp.float32), jnp.nan),
        similarity=similarity,
        bad_client=jnp.where(jnp.any(metrics.bad_step >= 0), plan.cohort.ids[first_bad], -1),
        bad_step=metrics.bad_step[first_bad],
        traffic=traffic,
        info=jax.tree.map(lambda each: jnp.mean(each, where=filled), metrics.info) | info | received,
    )
    return Progress(server, memory, progress.round + 1), report


def join(total: Report, new: Report) -> Report:
    """Add the counts of two reports. All other values are those of ``new``."""
    return new._replace(
        images=total.images + new.images,
        steps=total.steps + new.steps,
        traffic=jax.tree.map(jnp.add, total.traffic, new.traffic),
    )


def round_key(key: jax.Array, stream: int, round: jax.Array | int) -> jax.Array:
    """The key of one stream in one round."""
    return jax.random.fold_in(jax.random.fold_in(key, stream), round)


def _occurrences(ids: jax.Array) -> jax.Array:
    """For each id [K], the number of earlier equal ids."""
    earlier = jnp.tril(jnp.ones((ids.shape[0], ids.shape[0]), bool), -1)
    return jnp.sum((ids[:, None] == ids[None, :]) & earlier, axis=1, dtype=jnp.int32)
