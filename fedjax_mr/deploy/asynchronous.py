"""Asynchronous real clients: M clients train at the same time, and each K answers make a version of the server.

A real run is the simulation of its own durations. The record of a run holds the seconds that each job took. From these
`clock.simulate` computes everything else: which uploads made which version, who starts next, with which slot. So the
strategy is the one of simulated asynchronous clients (`clock.asynchronous`), and its schedule is filled in as answers
arrive. A killed server computes the same state of affairs from the record, and asks the clients in flight again; they
give the same answers.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import files, untrusted
from fedjax_mr.clock import Events, Schedule
from fedjax_mr.clock.asynchronous import VERSION
from fedjax_mr.config.config import Config
from fedjax_mr.deploy import wire
from fedjax_mr.deploy.client_manager import ClientManager
from fedjax_mr.deploy.protocol import RemoteData
from fedjax_mr.deploy.remote import RemoteClients
from fedjax_mr.engine.round import ClientRow, CohortPlan
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.experiment import keeps_validation, needs_tests_of_clients
from fedjax_mr.experiment.folder import ARRIVALS
from fedjax_mr.experiment.simulated_time import events_of
from fedjax_mr.models import Model
from fedjax_mr.strategies.interface import Cohort, Info


class AsynchronousClients(RemoteClients):
    """Trains real clients of which the slow ones do not hold the others."""

    def __init__(self, config: Config, federated: RemoteData, model: Model, manager: ClientManager) -> None:
        """As `RemoteClients`.

        Raises:
          UserError: also if the clients have models of their own, which the server would have to test meanwhile.
        """
        if manager.policy.lost == "untrained":
            raise UserError(
                "the server does not wait for asynchronous clients, so none counts as lost: use --lost=wait"
            )
        super().__init__(config, federated, model, manager)
        if needs_tests_of_clients(config, self.simulator.rounds) or keeps_validation(federated):
            raise UserError(
                "busy clients cannot test their own models: use --mode=sync, or a method and settings without tests"
            )
        self._config, self._federated, self._model = config, federated, model
        self._seconds: dict[int, float] = {}  # of the jobs whose answers have arrived, by number
        self._answers: dict[int, Any] = {}  # of jobs that no version has used yet
        self._started: float | None = None  # the server's time at the start of the run
        self._record: Path | None = None
        self._now = self._events(0)
        self._show(0, self._now)

    def resume(self, folder: Path, done: int) -> None:
        """Keep the record in a run folder, and continue after ``done`` rounds of it.

        Raises:
          UserError: the record is missing or damaged.
        """
        self._record = folder / ARRIVALS
        if done == 0:
            return
        self._seconds = read_seconds(self._record)
        events = self._events(done)
        if not np.isfinite(events.times).all():
            raise UserError(f"{self._record} is damaged (it lacks jobs of the first {done} versions): start anew")
        used = events.jobs["used"] > 0
        # Answers that no version has used are asked for again.
        self._seconds = {job: self._seconds[job] for job in self._seconds if job < len(used) and used[job]}
        self._now = self._events(done)
        self._show(done, self._now)

    def train(self, round: int, plan: CohortPlan, rows: ClientRow) -> tuple[CohortPlan, Any, Info]:
        """Send the jobs that have started, wait until K answers have arrived, and return those of the next version."""
        now, before = self.manager.now(), self._now
        rows = rows._replace(payload={name: each for name, each in rows.payload.items() if name != VERSION})
        clock = float(before.times[-1]) if round else 0.0
        self._started = now - clock if self._started is None else self._started
        jobs = {int(before.jobs["client"][job]): int(job) for job in np.flatnonzero(before.jobs["used"] == 0)}
        row_of = {int(client): row for row, client in enumerate(rows.client_id) if rows.size[row] > 0}
        version = lambda client: int(before.jobs["version"][jobs[client]])
        waiting = [client for client in jobs if jobs[client] not in self._answers]
        contents = {client: (version(client), self._order(version(client), rows, row_of[client])) for client in waiting}
        count = self._config.cohort - (len(jobs) - len(waiting))
        for client, answer in self.manager.ask_some(
            "train", contents, self._read, count, wire.size_limit(self._answer)
        ).items():
            self._answers[jobs[client]] = answer
            self._seconds[jobs[client]] = self.manager.now() - self._started - float(before.jobs["start"][jobs[client]])
        self._now = self._events(round + 1)
        self._save()
        self._show(round + 1, self._now, arrived=round)
        return self._result(round, self._now)

    def _result(self, round: int, events: Events) -> tuple[CohortPlan, Any, Info]:
        """The plan and the trained rows [W, ...] of the jobs that make a version."""
        width, problem = self._width, self._constants.problem
        used = np.flatnonzero(events.jobs["used"] == round + 1)
        ids = np.full(width, problem.num_clients, np.int32)
        ids[: len(used)] = events.jobs["client"][used]
        sizes = np.where(ids < problem.num_clients, np.append(np.asarray(problem.sizes), 0)[ids], 0).astype(np.int32)
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._answer)
        upload, metrics = nothing
        nothing = upload, metrics._replace(bad_step=np.int32(-1))
        rows = [self._answers.pop(int(job)) for job in used] + [nothing] * (width - len(used))
        uploads, metrics = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        versions = np.zeros(width, np.int32)
        versions[: len(used)] = events.jobs["version"][used]
        memory = None if self.simulator.rounds.strategy.init_memory is None else jnp.asarray(versions)
        cohort = Cohort(jnp.asarray(ids), jnp.asarray(sizes))
        return CohortPlan(cohort, jnp.arange(width, dtype=jnp.int32)), (uploads, memory, metrics), {}

    # --- the schedule

    @functools.cached_property
    def _width(self) -> int:
        return self._constants.problem.cohort_size

    def _events(self, versions: int) -> Events:
        """The events of the first versions, from the seconds of the jobs. Jobs without seconds are in flight."""
        duration = lambda job, client: self._seconds.get(job, math.inf)
        events = events_of(self._config, self._federated, self._model, duration=duration, versions=versions)
        assert events is not None
        return events

    def _show(self, done: int, events: Events, *, arrived: int | None = None) -> None:
        """Tell the compiled rounds who arrives in round ``arrived``, and who is in flight after ``done`` rounds."""
        rounds = self.simulator.rounds
        build = rounds.constants.build
        chosen, *others = build.args
        known: Schedule = jax.tree.map(np.array, chosen.clock.schedule)
        found = events.schedule
        assert found is not None
        for name in ("arrival_clients", "arrival_slots", "staleness", "branches", "start_clients", "start_slots"):
            rows = getattr(found, name, None)
            if rows is not None and done:
                getattr(known, name)[:done] = rows
        slots = _slots(events)
        jobs_of = lambda version: [
            (events.jobs["client"][job], slots[job], events.jobs["version"][job])
            for job in map(int, np.flatnonzero(events.jobs["used"] == version))
        ]
        self._fill(known, done, jobs_of(0))
        if arrived is not None:
            self._fill(known, arrived, jobs_of(arrived + 1))
        clock = dataclasses.replace(chosen.clock, schedule=known)
        chosen = dataclasses.replace(chosen, clock=clock)
        rounds.use(jax.tree_util.Partial(build.func, chosen, *others, **build.keywords))

    def _fill(self, schedule: Schedule, round: int, jobs: list[tuple[int, int, int]]) -> None:
        """Write the jobs (client, slot, version) of a round into a schedule; the other rows are empty."""
        if round >= len(schedule.train_clients):
            return
        for column, empty in zip(
            (schedule.train_clients, schedule.train_slots, schedule.train_versions),
            (self._constants.problem.num_clients, schedule.num_slots, 0),
            strict=True,
        ):
            column[round] = empty
        for row, (client, slot, version) in enumerate(jobs):
            schedule.train_clients[round, row] = client
            schedule.train_slots[round, row] = slot
            schedule.train_versions[round, row] = version

    def _save(self) -> None:
        if self._record is not None:
            with files.atomic_write(self._record) as path:
                path.write_text(json.dumps({"seconds": self._seconds}) + "\n", encoding="utf-8")


def read_seconds(path: Path) -> dict[int, float]:
    """The seconds of the jobs by number, as `AsynchronousClients` has written them.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        seconds = untrusted.read_json(path, {"seconds": {int: float}}, "start anew")["seconds"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing: start anew") from None
    if wrong := [job for job in seconds if job < 0 or seconds[job] < 0]:
        raise UserError(f"{path} is damaged (job {wrong[0]} has {seconds[wrong[0]]} seconds): start anew")
    return seconds


def _slots(events: Events) -> dict[int, int]:
    """The slot of each job, by its number. A client starts at most once per version."""
    schedule = events.schedule
    assert schedule is not None
    starts = {
        (int(client), 0): int(slot)
        for client, slot in zip(schedule.first_clients.flat, schedule.first_slots.flat, strict=True)
    }
    for version, (clients, slots) in enumerate(zip(schedule.start_clients, schedule.start_slots, strict=True), 1):
        starts |= {(int(client), version): int(slot) for client, slot in zip(clients, slots, strict=True)}
    return {
        job: starts[int(client), int(version)]
        for job, (client, version) in enumerate(zip(events.jobs["client"], events.jobs["version"], strict=True))
    }
