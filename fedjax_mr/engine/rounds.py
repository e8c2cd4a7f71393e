"""Compiled rounds, in one loop or one by one.

`loop` repeats a round inside a compiled program. `Rounds` runs one trial, `TrialRounds` several in one program.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from fedjax_mr import trees
from fedjax_mr.engine import checks
from fedjax_mr.engine.clients import CLIENTS, ClientAxis, assign, map_clients, positions
from fedjax_mr.engine.placement import CohortSamples, HostMemory, HostSamples, place, shapes_at, shared_by_cpus
from fedjax_mr.engine.program import Programs, Stopwatch, numbers_are_arguments
from fedjax_mr.engine.round import (
    HOST,
    Build,
    ClientRow,
    CohortPlan,
    Federation,
    Progress,
    Report,
    RunConstants,
    begin,
    finish,
    first_memory,
    ids_by_slot,
    join,
    plan,
    round_key,
    start,
    train_client,
)
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import Info, State, Strategy, kept_models

Round = Callable[[Progress], tuple[Progress, Report]]
RemoteTraining = Callable[[int, CohortPlan, ClientRow], tuple[CohortPlan, Any, Info]]
"""Training outside of this process: (round, plan, rows [K', ...]) -> (plan, trained rows, info), on the host."""


def loop(
    one_round: Round, progress: Progress, count: jax.Array, *, watched: jax.Array | bool
) -> tuple[Progress, Report]:
    """Run ``count`` rounds inside a compiled program. Stop earlier if a watched trial diverges.

    Args:
      one_round: progress -> (progress, report).
      progress: the progress of one trial, or of T trials with a leading axis T.
      count: number of rounds; may be traced.
      watched: whether to stop after a round with a non-finite loss or weight; [T] for T trials.
    """
    traced, shapes = jax.make_jaxpr(one_round, return_shape=True)(progress)  # once, for the shapes and for the loop
    again = jaxpr_as_fun(traced)

    def body(carry: tuple) -> tuple:
        progress, total, done = carry
        progress, report = jax.tree.unflatten(jax.tree.structure(shapes), again(*jax.tree.leaves(progress)))
        return progress, join(total, report), done + 1

    def should_continue(carry: tuple) -> jax.Array:
        _, total, done = carry
        return (done < count) & ~jnp.any(watched & (total.bad_client >= 0))

    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[1])
    blank = blank._replace(bad_client=jnp.full_like(blank.bad_client, -1))
    progress, total, _ = jax.lax.while_loop(should_continue, body, (progress, blank, jnp.zeros((), jnp.int32)))
    return progress, total


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
      programs: the compiled programs by name. Each is traced once, for clients of all sizes.
      key: everything that the programs close over, by value. None if no other object shares them.
    """

    def __init__(
        self,
        constants: RunConstants,
        axis: ClientAxis,
        *,
        stop_at_divergence: bool = True,
        memory_on_host: bool = False,
        data_on_host: bool = False,
        key: Hashable = None,
        remote: RemoteTraining | None = None,
    ) -> None:
        """Place the data; each program is compiled at its first use.

        Args:
          constants: the strategy's numbers, the problem, the data and the run's key, on the host or on any device. The
            strategy is built inside every compiled program.
          axis: the layout.
          stop_at_divergence: end a call after the first round with a non-finite loss or weight.
          memory_on_host: keep the clients' memory on the host (`HostMemory`). Only the rows of the cohort are
            transferred.
          data_on_host: keep the clients' samples on the host. Those of the next cohort are sent during a round.
          key: everything that the strategy depends on except its numbers, by value. Rounds with equal keys share
            compiled programs. Default: no sharing, because the strategy may depend on values that no key contains.
          remote: trains the clients of a round outside of this process. Requires a layout that is not fused.
        """
        self.axis = axis
        self.key = None if key is None else (key, axis, stop_at_divergence, memory_on_host, data_on_host)
        self.programs = Programs(platform=axis.platform, only_compiled=axis.described, key=self.key)
        self.strategy = self._strategy(constants)
        self._remote = remote
        self._client = constants.client  # reads the samples from the arrays of the caller
        self._place = shapes_at if axis.described else place
        self._stop_at_divergence = stop_at_divergence
        self._memory_on_host = memory_on_host and self.strategy.init_memory is not None
        self._samples: HostSamples | None = None
        self._stopwatch = Stopwatch(self.programs, waits=not data_on_host)  # waiting would delay the next samples
        if data_on_host:
            samples, index, offsets = constants.federation
            self._samples = HostSamples(samples.x, samples.y, index, offsets, sharding=axis.sharded)
            nothing = samples._replace(x=np.zeros(0, np.float32), y=np.zeros(0, np.int32))
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
    def stacks(self) -> tuple[int, ...]:
        """Leading axes of stacked models: K, N and K'."""
        count = self.constants.problem.cohort_size
        return count, self.constants.problem.num_clients, self.axis.padded(count)

    # --- progress

    def init(self) -> Progress:
        """The progress before the first round."""
        if not self._memory_on_host:
            return self.programs.call("init", self._start, self._server_constants, out=self._placement)
        placement = self._placement._replace(memory=None)
        program = lambda constants: start(constants, with_memory=False)
        progress = self.programs.call("init", program, self._server_constants, out=placement)
        return progress._replace(memory=self._host_memory(0))

    def shapes(self, *, kept: int | None = None) -> Progress:
        """The shapes and dtypes of a progress. Nothing is computed.

        Args:
          kept: the number of clients whose memory is in a `HostMemory`. Default: the memory has leaves [N, ...].
        """
        with numbers_are_arguments():
            shapes = jax.eval_shape(self._start, self._server_constants)
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
            rows = self.programs.call(
                "first_memory", first_memory, self._server_constants, placed, out=self.axis.server_device
            )
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

        def program(constants: RunConstants, server: State) -> Any:
            return kept_models(constants.strategy, server)

        arguments = self._server_constants, progress.server
        return self.programs.call("kept_models", program, *arguments, out=self.axis.server_device)

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
        if getattr(self.strategy, member) is None:
            return None

        def program(constants: RunConstants, server: State) -> Any:
            found = getattr(constants.strategy, member)(server)
            return checks.deployed(found, constants.problem.model.shapes()) if member == "global_model" else found

        return self.programs.call(member, program, self._server_constants, progress.server, out=self.axis.server_device)

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

    # --- the parts of a round, of one trial or of several

    def _strategy(self, constants: RunConstants) -> Strategy:
        return constants.strategy

    def _start(self, constants: RunConstants) -> Progress:
        return start(constants)

    def _begin(self, constants: RunConstants, progress: Progress) -> tuple[CohortPlan, ClientRow]:
        return begin(self.axis, constants, progress)

    def _train_client(self, shared: tuple[RunConstants, jax.Array], row: ClientRow) -> Any:
        return train_client(*shared, row)

    def _finish(self, constants: RunConstants, progress: Progress, plan: Any, trained: Any) -> tuple[Progress, Report]:
        return finish(constants, progress, plan, trained)

    def _watched(self, constants: RunConstants) -> Any:
        """Whether a call ends after a round with a non-finite loss or weight."""
        return self._stop_at_divergence

    # --- many rounds

    def run(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        """Run ``count`` rounds, or fewer if one diverges. Consumes ``progress``.

        Any division of the rounds into calls gives the same numbers.
        """
        if self.axis.fused and not self.on_host and self.strategy.between_rounds is None:
            return self._fused(progress, count)
        reports = []
        first = int(np.max(progress.round))
        for number in range(first, first + count):
            progress, report = self._with_samples(progress, number)
            progress, report = self._between_rounds(progress, report, number + 1)
            reports.append(report)
            if np.any(self._watched(self.constants) & (np.asarray(report.bad_client) >= 0)):
                break
        return progress, functools.reduce(join, reports)

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

        def program(constants: RunConstants, server: State, round: jax.Array) -> jax.Array:
            return ids_by_slot(constants, plan(self.axis, constants, server, round))

        return self.programs.call("select", program, self._server_constants, server, round, out=self.axis.server_device)

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
        divided = functools.partial(self.axis.by_parameters, rows=self.stacks)

        def program(
            constants: RunConstants, progress: Progress, count: jax.Array, samples: CohortSamples | None
        ) -> tuple[Progress, Report]:
            def one_round(progress: Progress) -> tuple[Progress, Report]:
                plan, rows = self._begin(constants, divided(progress))
                trained = self.train_all()((constants, progress.round), rows._replace(samples=samples))
                progress, report = self._finish(constants, progress, plan, divided(trained))
                return divided(progress), report

            progress, total = loop(one_round, divided(progress), count, watched=self._watched(constants))
            return divided(progress), total

        bound = self._place(np.int32(count), self.axis.server_device)
        out = (self._placement, self.axis.server_device)
        return self.programs.call("rounds", program, self.constants, progress, bound, samples, donate=(1,), out=out)

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

    def train_all(self) -> Callable:
        """The function ((constants, round), rows [K', ...]) -> trained rows, over the client axis."""
        return map_clients(self.axis, self._train_client)

    def _call_begin(self, progress: Progress) -> tuple[CohortPlan, ClientRow]:
        with self._stopwatch.side("server") as results:
            chosen, rows = self.programs.call(
                "begin", self._begin, self._server_constants, progress, out=self.axis.server_device
            )
            results.append(rows)
        return chosen, rows

    def _call_clients(self, round: jax.Array, rows: ClientRow, samples: CohortSamples | None) -> Any:
        shared = (self.constants, jax.device_put(round, self.axis.replicated))
        if not self.axis.fused:  # between CPU devices: the direct way compiles a slice for every shape
            rows = jax.device_get(rows)  # no copy on CPUs
        rows = jax.device_put(rows, self.axis.sharded, donate=True)._replace(samples=samples)
        with self._stopwatch.side("clients") as results:
            trained = self.programs.call("clients", self.train_all(), shared, rows, donate=(1,))
            results.append(trained)
        return trained

    def _call_finish(self, progress: Progress, plan: CohortPlan, trained: Any) -> tuple[Progress, Report]:
        out = (self._placement._replace(memory=self.axis.server_device), self.axis.server_device)
        with self._stopwatch.side("server") as results:
            trained = jax.device_put(trained, self.axis.server_device, donate=True)
            args = (self._server_constants, progress, plan, trained)
            progress, report = self.programs.call("finish", self._finish, *args, donate=(1,), out=out)
            results.append(report)
        self._stopwatch.rounds += 1
        return progress, report


class TrialRounds(Rounds):
    """The compiled rounds of T trials of one method. Their clients are T x K rows of one client axis.

    Only the functions of the server are batched over the trials (``vmap``). Each client trains as a row of the client
    axis, with the data, the numbers and the key of its trial. The results equal those of separate runs up to rounding.
    A progress and a report have leaves [T, ...].
    """

    def __init__(
        self,
        all_constants: Sequence[RunConstants],
        axis: ClientAxis,
        *,
        stop_at_divergence: bool = True,
        key: Hashable = None,
    ) -> None:
        """Join the data of the trials.

        Args:
          all_constants: the constants of each trial: the same samples with the division, numbers and key of the trial.
          axis: the layout for a cohort of T x K clients.
          stop_at_divergence: end a call after the first round in which a trial has a non-finite loss or weight.
          key: as in `Rounds`.

        Raises:
          UserError: the strategy works on the host between rounds, or the trials differ in more than values.
        """
        if all_constants[0].strategy.between_rounds is not None:
            raise UserError("the strategy works on the host between rounds, so its trials cannot be batched")
        self.count = len(all_constants)
        # The layout of a trial's rows before they are joined: without padding.
        self._trial_axis = dataclasses.replace(axis, mesh=Mesh(axis.mesh.devices.flat[:1], (CLIENTS,)), lanes=1)
        stacked = stack_trials(all_constants)._replace(running=np.ones(self.count, bool))
        super().__init__(stacked, axis, stop_at_divergence=stop_at_divergence, key=key)

    @property
    def stacks(self) -> tuple[int, ...]:
        """No leaf is divided over its parameters."""
        return ()

    def stack(self, progresses: Sequence[Progress]) -> Progress:
        """Stack the progresses of the trials into one with leaves [T, ...]."""
        return self.place(jax.tree.map(lambda *leaves: jnp.stack(leaves), *progresses))

    def keep_running(self, running: Sequence[bool]) -> None:
        """Set which trials are running [T]. The others run no step, and their results are undefined."""
        flags = np.array(running)
        self.constants = self.constants._replace(running=place(flags, self.axis.replicated))
        self._server_constants = self._server_constants._replace(running=place(flags, self.axis.server_device))

    def _strategy(self, constants: RunConstants) -> Strategy:
        return of_trial(constants, 0).strategy

    def _start(self, constants: RunConstants) -> Progress:
        return self._each(constants, start)

    def _begin(self, constants: RunConstants, progress: Progress) -> Any:
        """The plans of all trials, the slots of all rows, and the rows in order of decreasing work."""
        plans, rows = self._each(constants, functools.partial(begin, self._trial_axis), progress)
        trials = jnp.broadcast_to(jnp.arange(self.count, dtype=jnp.int32)[:, None], rows.size.shape)
        rows = rows._replace(size=jnp.where(constants.running[:, None], rows.size, 0), trial=trials)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
        count = flat.size.shape[0]
        slots = assign(self.axis, flat.size)
        laid_out = trees.take(flat, jnp.where(slots < count, slots, 0))
        return (plans, slots), laid_out._replace(size=jnp.where(slots < count, laid_out.size, 0))

    def _train_client(self, shared: tuple[RunConstants, jax.Array], row: ClientRow) -> Any:
        constants, round = shared
        return train_client(of_trial(constants, row.trial), round[row.trial], row)

    def _finish(self, constants: RunConstants, progress: Progress, plan: Any, trained: Any) -> tuple[Progress, Report]:
        plans, slots = plan
        per_trial = plans.slots.shape[1]
        in_order = trees.take(trained, positions(slots, self.count * per_trial))
        rows = jax.tree.map(lambda leaf: leaf.reshape(self.count, per_trial, *leaf.shape[1:]), in_order)
        return self._each(constants, finish, progress, plans, rows)

    def _watched(self, constants: RunConstants) -> Any:
        return constants.running & self._stop_at_divergence

    def _each(self, constants: RunConstants, function: Callable, *arguments: Any) -> Any:
        """Apply ``function(constants, ...)`` to every trial. The results have leaves [T, ...]."""
        one = lambda trial, *remaining: function(of_trial(constants, trial), *remaining)
        return jax.vmap(one)(jnp.arange(self.count), *arguments)


def stack_trials(all_constants: Sequence[RunConstants]) -> RunConstants:
    """Join the constants of T trials.

    The samples and the frozen variables exist once, there is one flat index array, other arrays get a leading axis T.

    Raises:
      UserError: the trials differ in more than the values of arrays, or have different frozen variables.
    """
    frozen = all_constants[0].problem.model.frozen
    if not all(same_arrays(frozen, each.problem.model.frozen) for each in all_constants):
        raise UserError(
            "trials in one program share the frozen variables of their network: pass them (variables=), because those "
            "of different seeds differ"
        )
    all_constants = [_with_frozen(each, {}) for each in all_constants]
    federations = [constants.federation for constants in all_constants]
    max_size = max(constants.problem.local.max_size for constants in all_constants)
    widened = lambda problem: dataclasses.replace(problem, local=dataclasses.replace(problem.local, max_size=max_size))
    arguments = [(each.build, widened(each.problem)) for each in all_constants]
    kinds = [(jax.tree.structure(each), [leaf.shape for leaf in jax.tree.leaves(each)]) for each in arguments]
    if any(kind != kinds[0] for kind in kinds):
        raise UserError(
            "trials in one program need the same structure: the same number of clients, and a momentum, weight decay "
            "or other optional number in all trials or in none"
        )
    build, problem = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arguments)
    before = np.cumsum([0, *(len(each.index) for each in federations[:-1])]).astype(np.int32)
    stacked = RunConstants(
        build,
        problem,
        Federation(
            samples=federations[0].samples,
            index=np.concatenate([np.asarray(each.index) for each in federations]),
            offsets=np.stack([each.offsets + first for each, first in zip(federations, before, strict=True)]),
        ),
        jnp.stack([constants.key for constants in all_constants]),
    )
    return _with_frozen(stacked, frozen)


def of_trial(constants: RunConstants, trial: Any) -> RunConstants:
    """The constants of one trial from those that `stack_trials` joined."""
    federation = constants.federation._replace(offsets=jnp.asarray(constants.federation.offsets)[trial])
    stacked = _with_frozen(constants, {})
    build, problem = trees.take((stacked.build, stacked.problem), trial)
    own = RunConstants(build, problem, federation, constants.key[trial])
    return _with_frozen(own, constants.problem.model.frozen)


def _with_frozen(constants: RunConstants, frozen: Any) -> RunConstants:
    """The constants with these frozen variables of the network, of which all trials share one copy."""
    model = dataclasses.replace(constants.problem.model, frozen=frozen)
    return constants._replace(problem=dataclasses.replace(constants.problem, model=model))


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, with equal static parts, and the same values."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    same_structure = jax.tree.structure(a) == jax.tree.structure(b)
    return same_structure and all(one is other or np.array_equal(one, other) for one, other in leaves)
