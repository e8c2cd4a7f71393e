"""One round: select -> dispatch -> client_update on the client axis -> server_update, and many of them in a row."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.engine.clients import ClientAxis, assign, map_clients, positions
from fedjax_mr.engine.local import Array, ClientData, Metrics, Samples
from fedjax_mr.engine.placement import HostData, Sent, place
from fedjax_mr.engine.program import Program
from fedjax_mr.strategies.base import (
    Cohort,
    Info,
    Memory,
    Payload,
    Problem,
    State,
    Strategy,
    Traffic,
    kept_for_validation,
    select_uniformly,
    usual_traffic,
)

# Streams of random keys: a key is folded from (seed, stream), then the round, then client id and occurrence.
INIT, SELECT, DISPATCH, CLIENT, SERVER, HOST, MEMORY, PERSONAL = range(8)

Build = Callable[[Problem], Strategy]


class Federation(NamedTuple):
    """The clients' data on the devices."""

    samples: Samples
    index: Array  # int32: each client's training rows, then those that it keeps for validation, client after client
    offsets: Array  # [N + 1] int32


class Given(NamedTuple):
    """What all rounds share: an argument of every compiled program, so that no array is baked into one."""

    problem: Problem
    federation: Federation
    key: jax.Array  # the run's key


class Progress(NamedTuple):
    """Everything that changes from round to round."""

    server: State
    memory: Memory  # leaves [N, ...], or None; NumPy arrays where it lives on the host
    round: jax.Array  # rounds done, int32


class Report(NamedTuple):
    """What one call reports."""

    images: jax.Array  # samples trained in this call
    steps: jax.Array  # optimiser steps done in this call
    train_loss: jax.Array  # mean over the samples trained in the last round, in nats
    similarity: jax.Array  # mean pairwise cosine of the parameters uploaded in the last round; NaN if they have none
    bad_client: jax.Array  # id of the first client of the last round that diverged, -1 if none
    bad_step: jax.Array  # its local step
    traffic: Traffic  # of this call
    info: Info  # what the strategy tells of the last round


class Row(NamedTuple):
    """What travels to the device that trains one client."""

    payload: Payload
    memory: Memory
    client_id: jax.Array
    occurrence: jax.Array  # how often the client was drawn before in this round
    offset: jax.Array
    size: jax.Array  # 0 in padding rows
    validation_size: jax.Array
    sent: Sent | None = None  # its samples, where the federation's are kept on the host


class Plan(NamedTuple):
    """A round before training: who trains (in the strategy's order) and in which slot."""

    cohort: Cohort
    slots: jax.Array  # [K'] row of each slot, K in padding


# --- one round ------------------------------------------------------------------------------------------------------


def plan(build: Build, axis: ClientAxis, given: Given, server: State, round: jax.Array) -> Plan:
    """Select the cohort and lay it out."""
    strategy, key = build(given.problem), _round_key(given.key, SELECT, round)
    cohort = select_uniformly(given.problem, key) if strategy.select is None else strategy.select(server, key)
    return Plan(cohort, assign(axis, cohort.sizes))


def ids_by_slot(given: Given, plan: Plan) -> jax.Array:
    """Return the client of each slot [K']; that of the cohort's first row in padding."""
    return plan.cohort.ids[jnp.where(plan.slots < given.problem.cohort_size, plan.slots, 0)]


def start(build: Build, given: Given) -> Progress:
    """Return the progress before the first round."""
    strategy = build(given.problem)
    memory = strategy.init_memory(jax.random.fold_in(given.key, MEMORY)) if strategy.init_memory else None
    return Progress(strategy.init(jax.random.fold_in(given.key, INIT)), memory, jnp.zeros((), jnp.int32))


def begin(build: Build, axis: ClientAxis, given: Given, progress: Progress) -> tuple[Plan, Row]:
    """Select and dispatch: return the plan and the rows [K', ...] in the order of the layout."""
    chosen = plan(build, axis, given, progress.server, progress.round)
    cohort, slots = chosen
    dispatch_key = _round_key(given.key, DISPATCH, progress.round)
    payloads = build(given.problem).dispatch(progress.server, cohort, dispatch_key)

    is_client = slots < given.problem.cohort_size
    order = jnp.where(is_client, slots, 0)
    ids = ids_by_slot(given, chosen)
    rows = Row(
        payload=trees.take(payloads, order),
        memory=trees.take(progress.memory, ids),
        client_id=ids,
        occurrence=_occurrences(cohort.ids)[order],
        offset=jnp.asarray(given.federation.offsets)[ids],
        size=jnp.where(is_client, cohort.sizes[order], 0),
        validation_size=kept_for_validation(given.problem)[ids],
    )
    return chosen, rows


def train(build: Build, given: Given, round: jax.Array, row: Row) -> tuple[Payload, Memory, Metrics]:
    """Train one client."""
    key = _round_key(given.key, CLIENT, round)
    key = jax.random.fold_in(jax.random.fold_in(key, row.client_id), row.occurrence)
    samples, index, offset = given.federation.samples, given.federation.index, row.offset
    if row.sent is not None:
        samples = samples._replace(x=row.sent.x, y=row.sent.y)
        index, offset = jnp.arange(row.sent.y.shape[0], dtype=jnp.int32), jnp.zeros((), jnp.int32)
    data = ClientData(samples, index, offset, row.size, row.client_id, row.validation_size)
    return build(given.problem).client_update(row.payload, row.memory, data, round, key)


def finish(
    build: Build, given: Given, progress: Progress, plan: Plan, trained: tuple[Payload, Memory, Metrics]
) -> tuple[Progress, Report]:
    """Put the trained rows [K', ...] back into the cohort's order and update the server.

    Where the clients' memory is not part of ``progress``, the new one holds the cohort's rows [K, ...] in its place.
    """
    strategy = build(given.problem)
    uploads, memories, metrics = trees.take(trained, positions(plan.slots, given.problem.cohort_size))
    one_network = "model" in uploads and len(given.problem.model.networks) == 1
    similarity = trees.mean_pairwise_cosine(uploads["model"]["params"]) if one_network else jnp.float32(jnp.nan)

    if progress.memory is None:
        memory = trees.agree(memories, plan.cohort.ids)
    else:
        memory = trees.put(progress.memory, plan.cohort.ids, memories)

    key = _round_key(given.key, SERVER, progress.round)
    server, info = strategy.server_update(progress.server, uploads, plan.cohort, progress.round, key)
    traffic = usual_traffic(jax.eval_shape(strategy.dispatch, progress.server, plan.cohort, key), uploads)
    if strategy.traffic is not None:
        traffic = strategy.traffic(traffic, progress.server, uploads, plan.cohort, progress.round)
    images = jnp.sum(metrics.images)
    first_bad = jnp.argmax(metrics.bad_step >= 0)
    report = Report(
        images=images,
        steps=jnp.sum(metrics.steps),
        train_loss=jnp.sum(metrics.loss) / jnp.maximum(images, 1).astype(jnp.float32),
        similarity=similarity,
        bad_client=jnp.where(jnp.any(metrics.bad_step >= 0), plan.cohort.ids[first_bad], -1),
        bad_step=metrics.bad_step[first_bad],
        traffic=traffic,
        info=info,
    )
    return Progress(server, memory, progress.round + 1), report


def _round_key(key: jax.Array, stream: int, round: jax.Array | int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, stream), round)


def _occurrences(ids: jax.Array) -> jax.Array:
    """Return for each of the ids [K] how many earlier ones equal it."""
    earlier = jnp.tril(jnp.ones((ids.shape[0], ids.shape[0]), bool), -1)
    return jnp.sum((ids[:, None] == ids[None, :]) & earlier, axis=1, dtype=jnp.int32)


def join(total: Report, new: Report) -> Report:
    """Return counts added up over the rounds of a call; all else is the last round's."""
    return new._replace(
        images=total.images + new.images,
        steps=total.steps + new.steps,
        traffic=jax.tree.map(jnp.add, total.traffic, new.traffic),
    )


# --- many rounds ----------------------------------------------------------------------------------------------------


class Rounds:
    """The compiled programs of one strategy on one layout.

    Attributes:
      build: problem -> strategy.
      given: the problem, the data and the run's key, on every device.
      axis: the layout of the clients.
      strategy: the strategy, built once for its facts (which members it has).
      programs: the compiled programs by name; each is traced once, whatever the clients' sizes.
    """

    def __init__(
        self,
        build: Build,
        given: Given,
        axis: ClientAxis,
        *,
        stop_at_divergence: bool = True,
        memory_on_host: bool = False,
        data_on_host: bool = False,
    ) -> None:
        """Place the data; each program is compiled at its first use.

        Args:
          build: problem -> strategy; called inside every traced program.
          given: the problem, the data and the run's key, on the host or on any device.
          axis: the layout.
          stop_at_divergence: end a call after the first round with a loss or weight that is not finite.
          memory_on_host: keep what the clients remember in the host's memory; only the cohort's rows travel.
          data_on_host: keep the clients' samples there; the cohort's are sent while the round before is trained.
        """
        self.axis = axis
        self.programs: dict[str, Program] = {}
        self.build = build
        self.strategy = build(given.problem)
        self._stop_at_divergence = stop_at_divergence
        self._memory_on_host = memory_on_host and self.strategy.init_memory is not None
        self._host_data: HostData | None = None
        self._sent: dict[int, Sent] = {}  # by round; at most the next one's
        self._seconds = {"clients": 0.0, "server": 0.0}
        self._rounds_timed = 0
        if data_on_host:
            samples, index, offsets = given.federation
            self._host_data = HostData(samples.x, samples.y, index, offsets, sharding=axis.sharded)
            nothing = samples._replace(x=np.zeros(0, np.float32), y=np.zeros(0, np.int32))
            given = given._replace(federation=Federation(nothing, np.zeros(0, np.int32), offsets))
        self.given = place(given, axis.replicated)
        # The server needs no samples. Where it has a home of its own, the small arrays have a second copy there.
        small = given._replace(federation=given.federation._replace(samples=None))
        self._home_given = place(small, axis.home)
        self._at_rest = axis.at_rest(self.shapes(), rows=self.stacks)

    @property
    def data_on_host(self) -> bool:
        """Whether the clients' samples are kept on the host."""
        return self._host_data is not None

    @property
    def on_host(self) -> bool:
        """Whether the clients' samples or memories are kept on the host."""
        return self._host_data is not None or self._memory_on_host

    def init(self) -> Progress:
        """Return the progress before the first round."""
        if not self._memory_on_host:
            return self._call("init", self._init, self._home_given, out=self._at_rest)
        # Made on the host's processor: all clients' memory need not fit on an accelerator.
        progress = self._call("init", self._init, jax.device_put(self._home_given, jax.devices("cpu")[0]))
        return self.place(progress)

    def shapes(self) -> Progress:
        """Return the shapes and dtypes of a progress; nothing is computed."""
        return jax.eval_shape(self._init, self._home_given)

    def _init(self, given: Given) -> Progress:
        return start(self.build, given)

    def place(self, progress: Progress) -> Progress:
        """Return a progress that came from elsewhere where it belongs: on the server's device, memory on the host."""
        if not self._memory_on_host:
            return place(progress, self._at_rest)
        memory = jax.tree.map(np.array, progress.memory)
        resting = self._at_rest._replace(memory=None)
        return place(progress._replace(memory=None), resting)._replace(memory=memory)

    @property
    def stacks(self) -> tuple[int, ...]:
        """Return the leading axes by which stacked models are known: K, N and K'."""
        count = self.given.problem.cohort_size
        return count, self.given.problem.num_clients, self.axis.padded(count)

    def run(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        """Run ``count`` rounds, fewer if one diverges; ``progress`` is consumed.

        Any division of the rounds into calls gives the same numbers.
        """
        fused = self.axis.fused and not self._memory_on_host
        if fused and self.strategy.between_rounds is None and self._host_data is None:
            return self._fused(progress, count)
        reports = []
        for number in range(int(progress.round), int(progress.round) + count):
            sent, ids_ahead = self._arrived(progress, number), self._ids_ahead(progress, number + 1)
            progress, report = self._fused(progress, 1, sent) if fused else self._in_steps(progress, sent)
            if self._host_data is not None and ids_ahead is not None:  # the devices are at work on this round
                self._sent[number + 1] = self._host_data.send(np.asarray(ids_ahead))
            if self.strategy.between_rounds is not None:
                started = time.perf_counter()
                key = _round_key(self._home_given.key, HOST, number + 1)
                whole = place(progress.server, self.axis.home)
                server, told = self.strategy.between_rounds(whole, number + 1, key)
                report = report._replace(info=report.info | told)
                progress = progress._replace(server=place(server, self._at_rest.server))
                self._seconds["server"] += time.perf_counter() - started
            reports.append(report)
            if self._stop_at_divergence and int(report.bad_client) >= 0:
                break
        return progress, functools.reduce(join, reports)

    def seconds_per_round(self) -> dict[str, float]:
        """Return the seconds of a round on the clients' side and on the server's, without compilation.

        They are known where the two are programs of their own (several CPU devices, samples not sent ahead); else {}.
        """
        if not self._rounds_timed:
            return {}
        return {f"{side}_seconds_per_round": total / self._rounds_timed for side, total in self._seconds.items()}

    @contextlib.contextmanager
    def _timed(self, side: str) -> Iterator[list[Any]]:
        """Add what the body takes to a side's seconds; it lists its results, which are waited for."""
        compiled = lambda: sum(program.compile_seconds for program in self.programs.values())
        results: list[Any] = []
        before, started = compiled(), time.perf_counter()
        yield results
        if self._host_data is None:  # else the next round's samples are sent meanwhile, and nobody waits
            jax.block_until_ready(results)
        self._seconds[side] += time.perf_counter() - started - (compiled() - before)

    def _arrived(self, progress: Progress, round: int) -> Sent | None:
        """Return the samples of a round's clients, sent ahead if that was possible; None if all are on the devices."""
        if self._host_data is None:
            return None
        ahead = self._sent.pop(round, None)
        self._sent.clear()
        return ahead or self._host_data.send(np.asarray(self._ids(progress.server, progress.round)))

    def _ids_ahead(self, progress: Progress, round: int) -> jax.Array | None:
        """Return the clients of a later round, if they follow from the keys alone."""
        if self._host_data is None or self.strategy.select is not None:
            return None
        return self._ids(progress.server, place(np.int32(round), self.axis.home))

    def _ids(self, server: State, round: jax.Array) -> jax.Array:
        def program(given: Given, server: State, round: jax.Array) -> jax.Array:
            return ids_by_slot(given, plan(self.build, self.axis, given, server, round))

        return self._call("select", program, self._home_given, server, round, out=self.axis.home)

    def deployed(self, progress: Progress) -> Any:
        """Return the model that is deployed and tested, or None where a method has none."""
        return self._view("global_model", progress)

    def individual(self, progress: Progress) -> Any:
        """Return the K stacked models that are tested one by one, or None."""
        return self._view("individual_models", progress)

    def _view(self, member: str, progress: Progress) -> Any:
        """Return what a member of the strategy makes of the server's state; None if the strategy has no such member."""
        if getattr(self.strategy, member) is None:
            return None

        def program(given: Given, server: State) -> Any:
            return getattr(self.build(given.problem), member)(server)

        return self._call(member, program, self._home_given, progress.server, out=self.axis.home)

    def train_all(self) -> Callable:
        """Return ((given, round), rows [K', ...]) -> trained rows, over the client axis."""
        return map_clients(self.axis, lambda shared, row: train(self.build, shared[0], shared[1], row))

    def _fused(self, progress: Progress, count: int, sent: Sent | None = None) -> tuple[Progress, Report]:
        """Run whole rounds in one compiled call, one if its samples were ``sent``; their number is a traced bound."""
        divided = functools.partial(self.axis.by_parameters, rows=self.stacks)

        def one_round(given: Given, progress: Progress, sent: Sent | None) -> tuple[Progress, Report]:
            plan, rows = begin(self.build, self.axis, given, divided(progress))
            trained = self.train_all()((given, progress.round), rows._replace(sent=sent))
            progress, report = finish(self.build, given, progress, plan, divided(trained))
            return divided(progress), report

        def program(given: Given, progress: Progress, count: jax.Array, sent: Sent | None) -> tuple[Progress, Report]:
            def body(carry: tuple) -> tuple:
                progress, total, done = carry
                progress, report = one_round(given, progress, sent)
                return progress, join(total, report), done + 1

            def going_on(carry: tuple) -> jax.Array:
                _, total, done = carry
                healthy = (total.bad_client < 0) | (not self._stop_at_divergence)
                return (done < count) & healthy

            shapes = jax.eval_shape(one_round, given, progress, sent)[1]
            blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            blank = blank._replace(bad_client=jnp.full_like(blank.bad_client, -1))
            progress, total, _ = jax.lax.while_loop(going_on, body, (progress, blank, jnp.zeros((), jnp.int32)))
            return progress, total

        bound = place(np.int32(count), self.axis.home)
        out = (self._at_rest, self.axis.home)
        return self._call("rounds", program, self.given, progress, bound, sent, donate=(1,), out=out)

    def _in_steps(self, progress: Progress, sent: Sent | None = None) -> tuple[Progress, Report]:
        """Run one round in three compiled calls: server, clients, server; the rows are copied between their devices."""
        memory = progress.memory
        if self._memory_on_host:
            progress = progress._replace(memory=None)
        first = lambda given, progress: begin(self.build, self.axis, given, progress)
        last = lambda given, *rest: finish(self.build, given, *rest)
        with self._timed("server") as results:
            plan, rows = self._call("begin", first, self._home_given, progress, out=self.axis.home)
            results.append(rows)
        if self._memory_on_host:
            drawn = np.asarray(rows.client_id)
            rows = rows._replace(memory=jax.tree.map(lambda leaf: leaf[drawn], memory))
        shared = (self.given, jax.device_put(progress.round, self.axis.replicated))
        rows = jax.device_put(rows, self.axis.sharded, donate=True)._replace(sent=sent)
        with self._timed("clients") as results:
            trained = self._call("clients", self.train_all(), shared, rows, donate=(1,))
            results.append(trained)
        out = (self._at_rest._replace(memory=self.axis.home), self.axis.home)
        with self._timed("server") as results:
            trained = jax.device_put(trained, self.axis.home, donate=True)
            args = (self._home_given, progress, plan, trained)
            progress, report = self._call("finish", last, *args, donate=(1,), out=out)
            results.append(report)
        self._rounds_timed += self._host_data is None
        if self._memory_on_host:
            ids = np.asarray(plan.cohort.ids)
            for leaf, rows in zip(jax.tree.leaves(memory), jax.tree.leaves(progress.memory), strict=True):
                leaf[ids] = np.asarray(rows)
            progress = progress._replace(memory=memory)
        return progress, report

    def _call(self, name: str, program: Callable, *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        if name not in self.programs:
            self.programs[name] = Program(program, donate=donate, out=out)
        return self.programs[name](*args)
