"""Synchronous rounds in simulated time: a deadline for the uploads, and more clients than needed.

The server asks K' clients and takes the first K uploads that arrive; a deadline ends the round earlier. The upload of a
client that is *late* is dropped. With partial work, a client stops its training in time for the deadline, and its
upload counts. Bonawitz et al.: Towards Federated Learning at Scale, MLSys 2019, describe both for a production system
(K' = 1.3 K). Durations do not depend on weights, so the host knows ahead who is late.

What a dropped upload means. A late client is a client without samples: it runs no step (which also costs nothing), its
memory stays as it was, and the server sees that it has 0 samples. In place of its upload the server sees, as in the
robust rules of `channel.robust`:

- methods with K models: what the client was sent, so its model stays in the pool unchanged;
- methods with one model: the mean of the uploads in time, so a mean over all clients is the mean over those in time.

If no upload of a round is in time, the state of the server stays as it was.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel.base import joined, received, split
from fedjax_mr.client.local import Metrics
from fedjax_mr.client.samples import ClientData
from fedjax_mr.clock.fleet import Seconds
from fedjax_mr.clock.schedule import JOB, Cohorts, Events
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Cohort, Info, Payload, Problem, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Deadline:
    """The settings of synchronous rounds with late clients."""

    # fmt: off
    deadline: float | None = field(
        None, "Seconds after which a synchronous round ends without the clients that are late. If omitted, the server "
        "waits for all uploads", unit="seconds", low=0, open_low=True, group="Clock")
    late: str = field(
        "drop", "Treatment of a client that would miss the --deadline: its upload is dropped (drop), or it uploads the "
        "steps that it has done by then (partial)", choices=("drop", "partial"), needs=("deadline",), group="Clock")
    over_select: float = field(
        1.0, "R: a synchronous round asks R times --cohort clients, rounded up, and takes the first --cohort uploads. "
        "The others are dropped", low=1, high=1000, source="our choice; Bonawitz et al., MLSys 2019: 1.3",
        static=True, group="Clock")
    # fmt: on


def asked(cohort: int, over_select: float) -> int:
    """The number of clients K' = R K, rounded up, that are asked for K uploads."""
    return math.ceil(round(over_select * cohort, 6))


def synchronous(
    clients: np.ndarray,
    seconds: Seconds,
    *,
    cohort: int,
    steps: np.ndarray | None = None,
    deadline: float = np.inf,
) -> Events:
    """Compute the events of synchronous rounds. A round ends with its K-th upload, or with the deadline.

    Args:
      clients: the clients of each round [E, K'], in the order of the strategy.
      seconds: the seconds of their jobs [E, K'].
      cohort: K, uploads that the server takes. If two arrive at the same time, the first in order counts.
      steps: their local steps [E, K']. With them, clients that would be late upload the steps that they have done by
        then. Default: uploads after the deadline are dropped.
      deadline: seconds until the server stops waiting.

    Raises:
      UserError: no client ever meets the deadline.
    """
    late = seconds.total > deadline
    work = np.where(late, 0.0, 1.0)
    if steps is not None:  # every step takes as long as the others
        left = deadline - seconds.download - seconds.upload
        done = np.floor(steps * np.maximum(left, 0) / seconds.compute + 1e-9)
        work = np.where(late, np.minimum(done / np.maximum(steps, 1), 1), 1.0)
    arrival = np.where(work > 0, np.minimum(seconds.total, deadline), np.inf)
    if not np.isfinite(arrival).any():
        fastest = seconds.total.min()
        raise UserError(f"deadline={deadline:g} is met by no client in any round: the fastest takes {fastest:.3g} s")
    rank = np.argsort(np.argsort(arrival, axis=1, kind="stable"), axis=1, kind="stable")
    taken = np.isfinite(arrival) & (rank < cohort)
    last = np.max(arrival, axis=1, where=taken, initial=0)
    ends = np.cumsum(np.where(np.sum(taken, axis=1) == cohort, last, deadline))
    starts, numbers = np.concatenate([[0.0], ends[:-1]])[:, None], np.arange(len(clients))[:, None]
    jobs = np.zeros(clients.shape, JOB)
    jobs["client"], jobs["version"], jobs["start"] = clients, numbers, starts
    jobs["arrival"] = starts + np.where(taken, arrival, seconds.total)
    jobs["used"] = np.where(taken, numbers + 1, 0)
    work = np.where(taken, work, 0).astype(np.float32)
    return Events(None, ends, jobs.reshape(-1), Cohorts(np.asarray(clients, np.int32), work))


def with_late_clients(inner: Strategy, problem: Problem, cohorts: Cohorts) -> Strategy:
    """Run the rounds of a strategy with clients that may be late. Info: ``late``, the number of late clients.

    Args:
      inner: the strategy, which selects its clients uniformly.
      problem: the problem of the strategy, in which ``cohort_size`` is K'.
      cohorts: the clients of the rounds, from `synchronous`.

    Raises:
      UserError: the strategy selects its clients itself or lets clients exchange layers, or its server has neither one
        model for all clients nor K models. Tracing a round raises it if clients upload parts of different kinds.
    """
    several = inner.models is not None and inner.models.stacked
    for impossible, what in (
        (inner.select, "selects its clients itself"),
        (inner.exchange, "lets the clients of a round exchange layers, which needs all of them"),
        (inner.models is None or len(problem.model.networks) > 1, "has a server without a model for all clients"),
    ):
        if impossible:
            raise UserError(f"the strategy {what}, so it has no late clients: leave out deadline= and over_select=")

    def work_of(round: jax.Array) -> jax.Array:
        return jnp.asarray(cohorts.work)[jnp.minimum(round, cohorts.work.shape[0] - 1)]

    def counted(cohort: Cohort, round: jax.Array) -> Cohort:
        work = work_of(round)
        return cohort._replace(sizes=jnp.where(work > 0, cohort.sizes, 0), work=work)

    def client_update(payload: Payload, memory: Any, data: ClientData, round: jax.Array, key: jax.Array) -> Any:
        row = jnp.argmax(
            jnp.asarray(cohorts.clients)[jnp.minimum(round, cohorts.clients.shape[0] - 1)] == data.client_id
        )
        work = work_of(round)[row]
        own = data._replace(size=jnp.where(work > 0, data.size, 0), work=work)
        upload, new, metrics = inner.client_update(payload, memory, own, round, key)
        zero = jnp.zeros((), jnp.int32)
        numbers = trees.where(work > 0, metrics._replace(info={}), Metrics(jnp.zeros(()), zero, zero, zero - 1))
        share = jnp.mean((work_of(round) > 0).astype(jnp.float32))  # the engine's mean is then over those in time
        info = jax.tree.map(lambda each: jnp.where(work > 0, each.astype(jnp.float32) / share, 0), metrics.info)
        return upload, trees.where(work > 0, new, memory), numbers._replace(info=info)

    def receive(
        state: Any, messages: Payload, payloads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[Any, Payload, Info]:
        info, in_time = {}, work_of(round) > 0
        if inner.receive is not None:
            state, messages, info = inner.receive(state, messages, payloads, counted(cohort, round), round, key)
        neutral = as_sent(messages, payloads) if several else means(messages, in_time)
        return state, jax.vmap(trees.where)(in_time, messages, neutral), info | {"late": jnp.sum(~in_time)}

    def server_update(
        state: Any, uploads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[Any, Info]:
        new, info = inner.server_update(state, uploads, counted(cohort, round), round, key)
        return trees.where(jnp.any(work_of(round) > 0), new, state), info

    def traffic(usual: Traffic, state: Any, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        """The model is sent to all K' clients. Only the uploads that the server takes count."""
        taken = jnp.sum(work_of(round) > 0, dtype=jnp.int32)
        usual = usual._replace(up=tuple(Parcels.of(taken, each.size) for each in usual.up))
        return usual if inner.traffic is None else inner.traffic(usual, state, uploads, counted(cohort, round), round)

    return inner._replace(client_update=client_update, receive=receive, server_update=server_update, traffic=traffic)


def as_sent(uploads: Payload, payloads: Payload) -> Payload:
    """Uploads [K, ...] of clients that return what they were sent.

    Raises:
      UserError: clients upload a model that they did not receive.
    """
    values, others = split(uploads)
    try:
        reference = received(values, others, payloads)
    except UserError:
        raise UserError(
            "a late client has no upload, because clients choose the model that they upload, or receive it compressed: "
            "leave out deadline= and over_select=, or compress_download="
        ) from None
    statistics = {
        name: {collection: payloads[name][collection] for collection in each} if name in values else each
        for name, each in others.items()
    }
    return joined(reference, statistics)


def means(uploads: Payload, in_time: jax.Array) -> Payload:
    """Uploads [K, ...] that are all the mean of those in time [K].

    Raises:
      UserError: an upload is not only of floating-point numbers, so it has no mean.
    """
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(uploads)):
        raise UserError(
            "the strategy's clients upload different parts of a model, which have no mean: leave out deadline= and "
            "over_select="
        )
    weights = in_time.astype(jnp.float32) / jnp.maximum(jnp.sum(in_time.astype(jnp.float32)), 1)

    def mean(leaf: jax.Array) -> jax.Array:
        here = in_time.reshape(-1, *(1,) * (leaf.ndim - 1))
        total = jnp.tensordot(weights, jnp.where(here, leaf, 0), axes=1, precision=jax.lax.Precision.HIGHEST)
        return jnp.broadcast_to(total, leaf.shape)

    return jax.tree.map(mean, uploads)
