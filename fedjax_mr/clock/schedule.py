"""The schedule of asynchronous clients, computed ahead on the host.

Which client starts when, and which upload arrives when, depends on the devices and on random draws, but not on weights
or losses. So the whole sequence of events is known before the training: it is a function of the key of the run.

Words. A *job* is a client, the version of the server's state that it received, and a duration. M jobs are in flight.
The server makes a new *version* of K arrivals. The *staleness* tau of an upload is the number of versions made since
its job started. New jobs start at the server's update (K at once), or at each arrival (one for one; FedBuff, FedAsync).

Waves. A job may be trained at any time between its start and its arrival. So a job waits until a version needs an
upload that is not trained yet; then all jobs in flight that are not trained yet train together, in one batched call.
Results are the same as if every job trained alone at its start.

Ties. Arrivals at the same instant come in the order of their jobs. The server takes K of them, makes its update, and
new jobs start. Only then the other arrivals of this instant come, for the next version. Times are float64.

Busy clients. With ``update``, a client whose job ends at the instant of the update, but is not among the K arrivals,
counts as busy. With ``arrival``, the clients of all K jobs that receive a version are chosen at its update, although
most of these jobs start later. So a client that returns between the update and such a start counts as busy, too.
"""

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import History

REFILLS = ("update", "arrival")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The events of E versions, an argument of the compiled rounds. Round e makes version e + 1 from K arrivals.

    Every job has a slot from its start to the update that uses it. Rows without a job have client N and slot S.
    """

    train_clients: Any  # [E, W] int32: clients that train in round e
    train_slots: Any  # [E, W] int32: their slots
    train_versions: Any  # [E, W] int32: the version that they received
    arrival_clients: Any  # [E, K] int32: clients whose uploads make the version, in the order of their jobs
    arrival_slots: Any  # [E, K] int32
    staleness: Any  # [E, K] int32: tau
    branches: Any  # [E, K] int32: the branches 0..M-1 of the arrivals, which the new jobs continue; None if new jobs
    # start before the update, which a branch cannot
    start_clients: Any  # [E, K] int32: clients that receive version e + 1
    start_slots: Any  # [E, K] int32
    first_clients: Any  # [G, K] int32: clients that receive version 0
    first_slots: Any  # [G, K] int32
    num_slots: int = dataclasses.field(metadata={"static": True})  # S
    in_flight: int = dataclasses.field(metadata={"static": True})  # M


@dataclasses.dataclass(frozen=True)
class Events:
    """The events of a run in simulated time. Only the `Schedule` is needed by compiled programs."""

    schedule: Schedule | None  # None in synchronous rounds
    times: np.ndarray  # [E] float64: seconds at which each version is made
    jobs: np.ndarray  # [J] of JOB: all jobs that started
    cohorts: "Cohorts | None" = None  # in synchronous rounds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohorts:
    """The clients of E synchronous rounds, an argument of the compiled rounds."""

    clients: Any  # [E, K'] int32
    work: Any  # [E, K'] float32: share of its steps that a client's upload contains; 0 if the client is late


JOB = np.dtype([
    ("client", np.int32), ("version", np.int32), ("start", np.float64), ("arrival", np.float64), ("used", np.int32),
])  # fmt: skip
"""A job. ``used`` is the version that its upload made, or 0. A job's number, which decides its duration, is its row."""


@dataclasses.dataclass
class _Job:
    number: int
    client: int
    slot: int
    version: int
    branch: int
    start: float
    arrival: float
    trained: bool = False


Choose = Callable[[int, np.ndarray, int, History], np.ndarray]
"""(number of the draw, which clients are busy [N], how many, what is known) -> clients to start, in order."""
Duration = Callable[[int, int], float]
"""(number of the job, client) -> seconds."""


def simulate(
    versions: int,
    *,
    num_clients: int,
    in_flight: int,
    cohort: int,
    refill: str,
    choose: Choose,
    duration: Duration,
) -> Events:
    """Compute the events until ``versions`` versions are made.

    Args:
      versions: E.
      num_clients: N.
      in_flight: M, jobs that run at the same time.
      cohort: K, arrivals per version.
      refill: ``update`` or ``arrival``, see the module.
      choose: selects idle clients.
      duration: the seconds of a job.

    Raises:
      UserError: fewer than K jobs in flight with refill ``update``, or too few clients.
    """
    if refill not in REFILLS:
        raise UserError(f"refill={refill!r} is not one of {', '.join(REFILLS)}")
    if refill == "update" and in_flight < cohort:
        raise UserError(f"in_flight={in_flight} is below cohort={cohort}: a version would never have enough arrivals")
    at_arrival = refill == "arrival" and cohort > 1  # with one arrival per version, both are the same
    # A client with a memory must not start twice within one version, so those that started are excluded, too.
    if num_clients < in_flight + (cohort if at_arrival else 0):
        raise UserError(
            f"{num_clients} clients are too few for in_flight={in_flight} and cohort={cohort}: with refill={refill} "
            f"at least {in_flight + (cohort if at_arrival else 0)} are needed"
        )
    first = in_flight + (cohort - 1 if at_arrival else 0)  # jobs that receive version 0
    groups = -(-first // cohort)
    num_slots = groups * cohort  # at no time do more jobs run, wait to start or wait for the update
    width = in_flight + (cohort if at_arrival else 0)
    free = list(range(num_slots))[::-1]
    queue: list[tuple[float, int, _Job]] = []
    table: list[_Job] = []
    waiting: list[_Job] = []  # jobs that have started and are not trained
    used: dict[int, int] = {}
    busy, started = np.zeros(num_clients, bool), np.zeros(num_clients, bool)
    planned: list[tuple[int, int]] = []  # (client, slot) of jobs that will receive the current version, in order
    empty = lambda *shape, value=0: np.full(shape, value, np.int32)
    train = [empty(versions, width, value=value) for value in (num_clients, num_slots, 0)]
    arrive: list[Any] = [empty(versions, cohort) for _ in range(4)]
    starts = [empty(versions, cohort), empty(versions, cohort)]
    first_rows = [empty(groups, cohort, value=num_clients), empty(groups, cohort, value=num_slots)]
    times = np.zeros(versions)
    draws, now = 0, 0.0
    finished = np.zeros(in_flight, np.int32)  # jobs of each branch
    starts_of, returns_of, seconds = (np.zeros(num_clients) for _ in range(3))

    def plan(count: int, branches: list[int], returned: list[int]) -> list[tuple[int, int]]:
        """Choose clients for the next jobs and reserve their slots."""
        nonlocal draws
        history = History(
            now, np.array(branches), finished, starts_of, seconds / np.maximum(returns_of, 1), np.array(returned, int)
        )
        chosen = choose(draws, busy | started, count, history)
        draws += 1
        started[chosen] = True
        return [(int(client), free.pop()) for client in chosen]

    def start(now: float, version: int, branch: int) -> None:
        client, slot = planned.pop(0)
        job = _Job(len(table), client, slot, version, branch, now, now + duration(len(table), client))
        busy[client] = True
        starts_of[client] += 1
        table.append(job)
        waiting.append(job)
        heapq.heappush(queue, (job.arrival, job.number, job))

    for group in range(groups):
        count = min(cohort, first - group * cohort)
        rows = plan(count, [(group * cohort + row) % in_flight for row in range(count)], [])
        planned += rows
        for row, (client, slot) in enumerate(rows):
            first_rows[0][group, row], first_rows[1][group, row] = client, slot
    for branch in range(in_flight):
        start(0.0, 0, branch)

    for version in range(versions):
        arrived: list[_Job] = []
        while len(arrived) < cohort:
            now, _, job = heapq.heappop(queue)
            busy[job.client] = False
            finished[job.branch] += 1
            returns_of[job.client] += 1
            seconds[job.client] += job.arrival - job.start
            arrived.append(job)
            if at_arrival and len(arrived) < cohort:
                start(now, version, job.branch)
        last = arrived[-1]
        arrived.sort(key=lambda job: job.number)
        if not all(job.trained for job in arrived):
            for row, job in enumerate(waiting):
                train[0][version, row], train[1][version, row] = job.client, job.slot
                train[2][version, row] = job.version
                job.trained = True
            waiting.clear()
        for row, job in enumerate(arrived):
            arrive[0][version, row], arrive[1][version, row] = job.client, job.slot
            arrive[2][version, row], arrive[3][version, row] = version - job.version, job.branch
            used[job.number] = version + 1
            free.append(job.slot)
        times[version] = now
        started[:] = False
        branches = [job.branch for job in arrived]
        planned = plan(cohort, branches, [job.client for job in arrived])
        for row, (client, slot) in enumerate(planned):
            starts[0][version, row], starts[1][version, row] = client, slot
        for branch in [last.branch] if at_arrival else branches:
            start(now, version + 1, branch)
    jobs = np.array([(job.client, job.version, job.start, job.arrival, used.get(job.number, 0)) for job in table], JOB)
    if at_arrival:
        arrive[3] = None
    schedule = Schedule(*train, *arrive, *starts, *first_rows, num_slots=num_slots, in_flight=in_flight)
    return Events(schedule, times, jobs)
