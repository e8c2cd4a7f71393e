"""Compiled rounds with their data, in one loop or one by one: `Rounds` of one trial, `TrialRounds` of several."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.engine.clients import ClientAxis, positions
from fedjax_mr.engine.placement import CohortSamples, HostMemory, HostSamples, place, shapes_at, shared_by_cpus
from fedjax_mr.engine.program import Programs, Stopwatch
from fedjax_mr.engine.round import (
    HOST,
    Build,
    ClientRow,
    CohortPlan,
    Federation,
    Progress,
    Report,
    RunConstants,
    join,
    round_key,
)
from fedjax_mr.engine.trials import OneTrial, SeveralTrials, stack_trials
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import Cohort, Info, Payload, State, kept_models

RemoteTraining = Callable[[int, CohortPlan, ClientRow], tuple[CohortPlan, Any, Info]]
"""Training outside of this process: (round, plan, rows [K', ...]) -> (plan, trained rows, info), on the host."""


class Rounds:
    """The compiled rounds of one strategy on one layout.

    A round runs in one of three ways:
    - fused in one program, which loops over several rounds if the host has no work between them;
    - in three programs (server, clients, server) if the server state is on one device only;
    - in these three programs with the clients' memory on the host.

    Attributes:
      constants: the strategy's numbers, the problem, the data and the run's key, on every device.
      axis: the layout of the clients.
      strategy: the strategy, built once to see which members it has.
      trial: what the programs depend on beside their arguments. Rounds with equal values share them.
      programs: the compiled programs by name. Each is traced once, for clients of all sizes.
    """

    def __init__(
        self,
        constants: RunConstants,
        axis: ClientAxis,
        *,
        trial: OneTrial | None = None,
        memory_on_host: bool = False,
        data_on_host: bool = False,
        remote: RemoteTraining | None = None,
    ) -> None:
        """Place the data; each program is compiled at its first use.

        Args:
          constants: the strategy's numbers, the problem, the data and the run's key, on the host or on any device. The
            strategy is built inside every compiled program.
          axis: the layout.
          trial: the programs. Default: `OneTrial` of the layout.
          memory_on_host: keep the clients' memory on the host (`HostMemory`). Only the rows of the cohort are
            transferred.
          data_on_host: keep the clients' samples on the host. Those of the next cohort are sent during a round.
          remote: trains the clients of a round outside of this process. Requires a layout that is not fused.
        """
        self.axis = axis
        self.trial = trial or OneTrial(axis)
        self.programs = Programs(self.trial)
        self.strategy = self.trial.strategy(constants)
        self._remote = remote
        self._client = constants.client  # reads the samples from the arrays of the caller
        self._place = shapes_at if axis.described else place
        self._memory_on_host = memory_on_host and self.strategy.init_memory is not None
        self._samples: HostSamples | None = None
        self._stopwatch = Stopwatch(waits=not data_on_host)  # waiting would delay the next samples
        if data_on_host:
            samples, index, offsets = constants.federation
            self._samples = HostSamples(samples.x, samples.y, index, offsets, sharding=axis.sharded)
            nothing = samples._replace(x=np.zeros(0, np.float32), y=samples.y[:0])
            constants = constants._replace(federation=Federation(nothing, np.zeros(0, np.int32), offsets))
        if axis.platform == "cpu" and not axis.described:
            constants = shared_by_cpus(constants)
        self.constants = self._place(constants, axis.replicated)
        # The server needs no samples. If its state is on one device, that device has a copy of the other constants.
        constants = self.constants if axis.fused else constants
        small = constants._replace(federation=constants.federation._replace(samples=None, index=None))
        self._server_constants = self._place(small, axis.server_device)
        self._placement = axis.state_placement(self.shapes(), rows=self.stacks)

    def use(self, build: Build) -> None:
        """Replace the numbers of the strategy from the next call on. Their shapes must be the same."""
        self.constants = self.constants._replace(build=self._place(build, self.axis.replicated))
        placed = self._place(build, self.axis.server_device)
        self._server_constants = self._server_constants._replace(build=placed)

    @property
    def data_on_host(self) -> bool:
        """Whether the clients' samples are kept on the host."""
        return self._samples is not None

    @property
    def on_host(self) -> bool:
        """Whether the clients' samples or memories are kept on the host."""
        return self.data_on_host or self._memory_on_host

    @property
    def _in_one_program(self) -> bool:
        """Whether a round is one program, which can compute several."""
        return self.axis.fused and not self.on_host

    @property
    def stacks(self) -> tuple[int, ...]:
        """Leading axes of stacked models: K, N and K'."""
        return self.trial.stacks(self.constants)

    # --- progress

    def init(self) -> Progress:
        """The progress before the first round."""
        if not self._memory_on_host:
            return self.programs.call("start", self._server_constants, out=self._placement)
        placement = self._placement._replace(memory=None)
        progress = self.programs.call("start_without_memory", self._server_constants, out=placement)
        return progress._replace(memory=self._host_memory(0))

    def shapes(self, *, kept: int | None = None) -> Progress:
        """The shapes and dtypes of a progress. Nothing is computed.

        Args:
          kept: the number of clients whose memory is in a `HostMemory`. Default: the memory has leaves [N, ...].
        """
        shapes = self.programs.shapes("start", self._server_constants)
        return shapes if kept is None else shapes._replace(memory=self._host_memory(kept, jax.ShapeDtypeStruct))

    def place(self, progress: Progress) -> Progress:
        """Place a progress, such as one from a checkpoint, on the server's device, and its memory on the host.

        The memory may have leaves [N, ...] or be a `HostMemory`. It becomes what these rounds use.
        """
        memory, is_kept = progress.memory, isinstance(progress.memory, HostMemory)
        if not self._memory_on_host:
            if is_kept:
                memory = memory.read(np.arange(self.constants.problem.num_clients))
            return place(progress._replace(memory=memory), self._placement)
        placed = place(progress._replace(memory=None), self._placement._replace(memory=None))
        ids = memory.ids if is_kept else np.arange(self.constants.problem.num_clients, dtype=np.int32)
        rows = memory.rows if is_kept else memory
        return placed._replace(memory=HostMemory(self._first_memory, *jax.tree.map(np.array, (ids, rows))))

    def _host_memory(self, count: int, array: Callable[..., Any] = np.empty) -> HostMemory:
        """A `HostMemory` of ``count`` clients, whose content is undefined."""
        shapes = self.shapes().memory
        rows = jax.tree.map(lambda leaf: array((count, *leaf.shape[1:]), leaf.dtype), shapes)
        return HostMemory(self._first_memory, array((count,), np.int32), rows)

    def _first_memory(self, ids: np.ndarray) -> Any:
        """The memory of clients ``ids`` [R] before they train: leaves [R, ...], computed K' at a time."""
        count, parts = self.stacks[2], []
        for first in range(0, len(ids), count):
            part = np.resize(ids[first : first + count], count).astype(np.int32)  # repeated to fill the program's rows
            placed = place(part, self.axis.server_device)
            rows = self.programs.call("first_memory", self._server_constants, placed, out=self.axis.server_device)
            parts.append(jax.device_get(rows))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(ids)], *parts)

    def deployed(self, progress: Progress) -> Any:
        """The deployed model, or None if the strategy has none."""
        return self._view("global_model", progress)

    def individual(self, progress: Progress) -> Any:
        """The K stacked models that are tested one by one, or None."""
        return self._view("individual_models", progress)

    def kept_models(self, progress: Progress) -> Any:
        """The models that the server keeps side by side, leaves [K, ...]. Only if `keeps_models`."""
        return self._of_server("kept_models", progress)

    @functools.cached_property
    def keeps_models(self) -> bool:
        """Whether the server keeps several models of one network."""
        found = jax.eval_shape(functools.partial(kept_models, self.strategy), self.shapes().server)
        return found is not None and len(self.constants.problem.model.networks) == 1

    def seconds_per_round(self) -> dict[str, float]:
        """Seconds per round of the clients and of the server, without compilation.

        {} if both run in one program, or if samples are sent ahead.
        """
        return self._stopwatch.seconds_per_round()

    def _view(self, member: str, progress: Progress) -> Any:
        """Apply a member of the strategy to the server state, or return None if the strategy has no such member."""
        return None if getattr(self.strategy, member) is None else self._of_server(member, progress)

    def _of_server(self, program: str, progress: Progress) -> Any:
        return self.programs.call(program, self._server_constants, progress.server, out=self.axis.server_device)

    def trace(self) -> None:
        """Trace a round, which the first call then need not do. Nothing is computed.

        Raises:
          UserError: the network lacks a part that the strategy needs, or a channel does not suit it.
        """
        progress, number = shapes_at((self.shapes(), np.int32(0)), (self._placement, self.axis.server_device))
        if self._in_one_program:
            self.programs.shapes("rounds", self.constants, progress, number, None)
            return
        plan, rows = self.programs.shapes("begin", self._server_constants, progress)
        # As `_call_clients` places them: the same shapes elsewhere are traced again.
        number, rows = shapes_at(number, self.axis.replicated), shapes_at(rows, self.axis.sharded)
        if self._samples is not None:
            rows = rows._replace(samples=self._samples.shapes(*rows.size.shape))
        trained = self.programs.shapes("clients", (self.constants, number), rows)
        self.programs.shapes("finish", self._server_constants, progress, plan, trained)

    def compile(self) -> Programs:
        """Compile the training and evaluation programs for a machine that is not present. Nothing is executed."""
        shapes = self.shapes()
        if self._memory_on_host:  # the devices hold only the memories of a cohort
            row = lambda leaf: jax.ShapeDtypeStruct((self.stacks[2], *leaf.shape[1:]), leaf.dtype)
            shapes = shapes._replace(memory=jax.tree.map(row, shapes.memory))
        progress, _ = self._fused(self._place(shapes, self._placement), 1)
        self.deployed(progress)
        self.individual(progress)
        return self.programs

    # --- many rounds

    def run(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        """Run ``count`` rounds, or fewer if one diverges. Consumes ``progress``.

        Any division of the rounds into calls gives the same numbers.
        """
        if self._in_one_program and self.strategy.between_rounds is None:
            return self._fused(progress, count)
        reports = []
        first = int(np.max(progress.round))
        for number in range(first, first + count):
            progress, report = self._with_samples(progress, number)
            progress, report = self._between_rounds(progress, report, number + 1)
            reports.append(report)
            if np.any(self.trial.watched(self.constants) & (np.asarray(report.bad_client) >= 0)):
                break
        return progress, functools.reduce(join, reports)

    def observed(self, progress: Progress) -> tuple[Progress, Report, Cohort, Payload]:
        """Run one round in three calls. Return, beside its results, the cohort and its messages [K, ...] on the host.

        Consumes ``progress``. Samples and memories must be on the devices.
        """
        plan, rows = self._call_begin(progress)
        trained = jax.device_get(self._call_clients(progress.round, rows, None))
        progress, report = self._call_finish(progress, plan, trained)
        order = np.asarray(positions(plan.slots, plan.cohort.ids.shape[0]))
        return progress, report, jax.device_get(plan.cohort), jax.tree.map(lambda leaf: leaf[order], trained[0])

    def _with_samples(self, progress: Progress, number: int) -> tuple[Progress, Report]:
        """Run round ``number``. If samples are kept on the host, also send those of the next round."""
        if self._samples is None:
            return self._one_round(progress, None)
        samples = self._samples.sent_ahead(number)
        if samples is None:
            samples = self._samples.send(np.asarray(self._ids(progress.server, progress.round)))
        if self.strategy.select is not None:  # the next cohort is known only after this round
            return self._one_round(progress, samples)
        next_ids = self._ids(progress.server, place(np.int32(number + 1), self.axis.server_device))
        progress, report = self._one_round(progress, samples)
        self._samples.send_ahead(number + 1, np.asarray(next_ids))  # while the devices run this round
        return progress, report

    def _ids(self, server: State, round: jax.Array) -> jax.Array:
        """The client id of each slot of a round [K']."""
        return self.programs.call("select", self._server_constants, server, round, out=self.axis.server_device)

    def _between_rounds(self, progress: Progress, report: Report, done: int) -> tuple[Progress, Report]:
        """Call ``between_rounds`` of the strategy on the host after ``done`` rounds, if it has this member."""
        if self.strategy.between_rounds is None:
            return progress, report
        with self._stopwatch.side("server") as results:
            key = round_key(self._server_constants.key, HOST, done)
            on_server = place(progress.server, self.axis.server_device)
            server, info = self.strategy.between_rounds(on_server, done, key, self._client)
            progress = progress._replace(server=place(server, self._placement.server))
            results.append(progress.server)
        return progress, report._replace(info=report.info | info)

    # --- one round, in three ways

    def _one_round(self, progress: Progress, samples: CohortSamples | None) -> tuple[Progress, Report]:
        if self._memory_on_host:
            return self._in_three_calls_with_host_memory(progress, samples)
        return self._fused(progress, 1, samples) if self.axis.fused else self._in_three_calls(progress, samples)

    def _fused(self, progress: Progress, count: int, samples: CohortSamples | None = None) -> tuple[Progress, Report]:
        """Run ``count`` rounds (traced) in one compiled call. With ``samples``, ``count`` must be 1."""
        bound = self._place(np.int32(count), self.axis.server_device)
        out = (self._placement, self.axis.server_device)
        return self.programs.call("rounds", self.constants, progress, bound, samples, donate=(1,), out=out)

    def _in_three_calls(self, progress: Progress, samples: CohortSamples | None) -> tuple[Progress, Report]:
        """Run one round in three compiled calls (server, clients, server). Rows are copied between the devices."""
        plan, rows = self._call_begin(progress)
        if self._remote is None:
            return self._call_finish(progress, plan, self._call_clients(progress.round, rows, samples))
        plan, trained, info = self._remote(int(progress.round), plan, jax.device_get(rows))
        progress, report = self._call_finish(progress, plan, trained)
        return progress, report._replace(info=report.info | info)

    def _in_three_calls_with_host_memory(
        self, progress: Progress, samples: CohortSamples | None
    ) -> tuple[Progress, Report]:
        """Run one round in three compiled calls. Only the memory of its clients is read and written on the host."""
        memory, progress = progress.memory, progress._replace(memory=None)
        plan, rows = self._call_begin(progress)
        rows = rows._replace(memory=memory.read(np.asarray(rows.client_id)))
        trained = self._call_clients(progress.round, rows, samples)
        progress, report = self._call_finish(progress, plan, trained)
        memory.write(np.asarray(plan.cohort.ids), progress.memory)
        return progress._replace(memory=memory), report

    def _call_begin(self, progress: Progress) -> tuple[CohortPlan, ClientRow]:
        with self._stopwatch.side("server") as results:
            args = (self._server_constants, progress)
            plan, rows = self.programs.call("begin", *args, out=self.axis.server_device)
            results.append(rows)
        return plan, rows

    def _call_clients(self, round: jax.Array, rows: ClientRow, samples: CohortSamples | None) -> Any:
        shared = (self.constants, jax.device_put(round, self.axis.replicated))
        if not self.axis.fused:  # between CPU devices: the direct way compiles a slice for every shape
            rows = jax.device_get(rows)  # no copy on CPUs
        rows = jax.device_put(rows, self.axis.sharded, donate=True)._replace(samples=samples)
        with self._stopwatch.side("clients") as results:
            trained = self.programs.call("clients", shared, rows, donate=(1,))
            results.append(trained)
        return trained

    def _call_finish(self, progress: Progress, plan: CohortPlan, trained: Any) -> tuple[Progress, Report]:
        out = (self._placement._replace(memory=self.axis.server_device), self.axis.server_device)
        with self._stopwatch.side("server") as results:
            trained = jax.device_put(trained, self.axis.server_device, donate=True)
            args = (self._server_constants, progress, plan, trained)
            progress, report = self.programs.call("finish", *args, donate=(1,), out=out)
            results.append(report)
        self._stopwatch.rounds += 1
        return progress, report


class TrialRounds(Rounds):
    """The compiled rounds of T trials of one method, see `SeveralTrials`.

    The results equal those of separate runs up to rounding. A progress and a report have leaves [T, ...].
    """

    def __init__(self, all_constants: Sequence[RunConstants], axis: ClientAxis, **options: Any) -> None:
        """Join the data of the trials.

        Args:
          all_constants: the constants of each trial: the same samples with the division, numbers and key of the trial.
          axis: the layout for a cohort of T x K clients.
          options: ``stop_at_divergence`` and ``code`` of `SeveralTrials`.

        Raises:
          UserError: the strategy works on the host between rounds, or the trials differ in more than values.
        """
        if all_constants[0].strategy.between_rounds is not None:
            raise UserError("the strategy works on the host between rounds, so its trials cannot be batched")
        stacked = stack_trials(all_constants)._replace(running=np.ones(len(all_constants), bool))
        super().__init__(stacked, axis, trial=SeveralTrials(axis, **options, count=len(all_constants)))

    def stack(self, progresses: Sequence[Progress]) -> Progress:
        """Stack the progresses of the trials into one with leaves [T, ...]."""
        return self.place(jax.tree.map(lambda *leaves: jnp.stack(leaves), *progresses))

    def keep_running(self, running: Sequence[bool]) -> None:
        """Set which trials are running [T]. The others run no step, and their results are undefined."""
        flags = np.array(running)
        self.constants = self.constants._replace(running=place(flags, self.axis.replicated))
        self._server_constants = self._server_constants._replace(running=place(flags, self.axis.server_device))
