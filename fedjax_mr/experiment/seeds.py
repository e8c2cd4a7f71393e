"""Several seeds of one setting in ONE compiled program: their clients join the client axis as S x K rows.

Only the server's functions are batched over the seeds (``vmap``); clients train as rows of the ordinary client axis,
each with the data and the key of its seed. The numbers are those of the seeds one by one, to float tolerance.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_mr import config as configuration
from fedjax_mr import data
from fedjax_mr.config import Config
from fedjax_mr.engine import rounds
from fedjax_mr.engine.clients import CLIENTS, ClientAxis, assign, client_axis, map_clients, positions
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.placement import place
from fedjax_mr.engine.program import Program
from fedjax_mr.engine.rounds import Build, Federation, Given, Progress, Report, Row
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment.processes import ALONE
from fedjax_mr.experiment.report import ProgressBar
from fedjax_mr.experiment.run import SECONDS_PER_CALL, Experiment, Result, asked_to_stop, prepare


class SeedRounds:
    """The compiled rounds of S seeds.

    Attributes:
      axis: the layout of all S x K clients.
      programs: the compiled programs by name.
    """

    def __init__(self, build: Build, givens: Sequence[Given], axis: ClientAxis) -> None:
        """Join the data of the seeds.

        Args:
          build: problem -> strategy.
          givens: of each seed: the same samples, divided in its own way, and its own key.
          axis: the layout, for a cohort of S x K.

        Raises:
          UserError: the strategy works on the host between rounds, or the layout has several CPU devices.
        """
        if build(givens[0].problem).between_rounds is not None:
            raise UserError("the strategy works on the host between rounds, so that its seeds cannot be batched")
        if not axis.fused:
            raise UserError("seeds are batched on accelerators or on one CPU device: add --devices=1")
        self.build = build
        self.axis = axis
        self.count = len(givens)
        self.programs: dict[str, Program] = {}
        self.given = place(_joined(givens), axis.replicated)
        # A seed's rows before they are joined: in turn, without padding.
        self._apart = dataclasses.replace(axis, mesh=Mesh(axis.mesh.devices.flat[:1], (CLIENTS,)), lanes=1)

    def init(self) -> Progress:
        """Return the progress of all seeds, leaves [S, ...], before the first round."""
        return self._call(
            "init", lambda given: self._each(given, lambda one: rounds.start(self.build, one)), self.given
        )

    def run(self, progress: Progress, count: int, alive: Sequence[bool]) -> tuple[Progress, Report]:
        """Run ``count`` rounds, fewer if a seed that is alive diverges; ``progress`` is consumed.

        Args:
          progress: leaves [S, ...].
          count: rounds.
          alive: which seeds [S] train; the others do no step, and what is returned for them means nothing.
        """
        bounds = place((np.int32(count), np.array(alive)), self.axis.replicated)
        return self._call("rounds", self._rounds, self.given, progress, *bounds, donate=(1,))

    def compile_seconds(self) -> float:
        """Return the seconds spent in tracing and compiling."""
        return sum(program.compile_seconds for program in self.programs.values())

    def _rounds(self, given: Given, progress: Progress, count: jax.Array, alive: jax.Array) -> tuple[Progress, Report]:
        """Run whole rounds; their number is a traced bound."""

        def body(carry: tuple) -> tuple:
            progress, total, done = carry
            progress, report = self._round(given, progress, alive)
            return progress, rounds.join(total, report), done + 1

        def going_on(carry: tuple) -> jax.Array:
            _, total, done = carry
            return (done < count) & ~jnp.any(alive & (total.bad_client >= 0))

        shapes = jax.eval_shape(self._round, given, progress, alive)[1]
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        blank = blank._replace(bad_client=jnp.full_like(blank.bad_client, -1))
        progress, total, _ = jax.lax.while_loop(going_on, body, (progress, blank, jnp.zeros((), jnp.int32)))
        return progress, total

    def _round(self, given: Given, progress: Progress, alive: jax.Array) -> tuple[Progress, Report]:
        plans, rows = self._each(
            given, lambda one, before: rounds.begin(self.build, self._apart, one, before), progress
        )
        rows = rows._replace(size=jnp.where(alive[:, None], rows.size, 0))
        per_seed = rows.size.shape[1]
        trained = self._train(given, progress.round, jax.tree.map(_flat, rows), per_seed)
        trained = jax.tree.map(lambda leaf: leaf.reshape(self.count, per_seed, *leaf.shape[1:]), trained)
        last = lambda one, *rest: rounds.finish(self.build, one, *rest)
        return self._each(given, last, progress, plans, trained)

    def _train(self, given: Given, round: jax.Array, rows: Row, per_seed: int) -> Any:
        """Train the rows [S K, ...] over the client axis, longest first."""
        count = self.count * per_seed
        slots = assign(self.axis, rows.size)
        order = jnp.where(slots < count, slots, 0)
        laid_out = jax.tree.map(lambda leaf: leaf[order], rows)
        laid_out = laid_out._replace(size=jnp.where(slots < count, laid_out.size, 0))

        def one(shared: tuple[Given, jax.Array], pair: tuple[jax.Array, Row]) -> Any:
            seed, row = pair
            given, round = shared
            return rounds.train(self.build, _of(given, seed), round[seed], row)

        trained = map_clients(self.axis, one)((given, round), (order // per_seed, laid_out))
        return jax.tree.map(lambda leaf: leaf[positions(slots, count)], trained)

    def _each(self, given: Given, function: Callable, *arguments: Any) -> Any:
        """Return ``function(given, ...)`` of every seed, leaves [S, ...]."""
        return jax.vmap(lambda seed, *rest: function(_of(given, seed), *rest))(jnp.arange(self.count), *arguments)

    def _call(self, name: str, program: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
        if name not in self.programs:
            self.programs[name] = Program(program, donate=donate)
        return self.programs[name](*args)


def _flat(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])


def _joined(givens: Sequence[Given]) -> Given:
    """Return what the seeds are given in one: samples once, one flat index array, all else with a leading axis S."""
    first = givens[0]
    lengths = [len(given.federation.index) for given in givens]
    before = np.cumsum([0, *lengths[:-1]]).astype(np.int32)
    longest = max(given.problem.local.max_size for given in givens)
    problem = dataclasses.replace(
        first.problem,
        local=dataclasses.replace(first.problem.local, max_size=longest),
        sizes=jnp.stack([given.problem.sizes for given in givens]),
        label_counts=jnp.stack([given.problem.label_counts for given in givens]),
        architectures=jnp.stack([given.problem.architectures for given in givens]),
        validation_sizes=jax.tree.map(
            lambda *each: jnp.stack(each), *(given.problem.validation_sizes for given in givens)
        ),
    )
    federation = Federation(
        samples=first.federation.samples,
        index=np.concatenate([np.asarray(given.federation.index) for given in givens]),
        offsets=np.stack([given.federation.offsets + start for given, start in zip(givens, before, strict=True)]),
    )
    return Given(problem, federation, jnp.stack([given.key for given in givens]))


def _of(given: Given, seed: jax.Array) -> Given:
    """Return what one seed is given."""
    problem = dataclasses.replace(
        given.problem,
        sizes=given.problem.sizes[seed],
        label_counts=given.problem.label_counts[seed],
        architectures=given.problem.architectures[seed],
        validation_sizes=jax.tree.map(lambda leaf: leaf[seed], given.problem.validation_sizes),
    )
    federation = given.federation._replace(offsets=jnp.asarray(given.federation.offsets)[seed])
    return Given(problem, federation, given.key[seed])


# --- Their runs


def run_seeds(configs: Sequence[Config]) -> list[Result | DivergedError]:
    """Run several seeds of one setting in one compiled program; return each one's result, or why it ended early.

    Each seed has its run folder, as if it had run alone, and can also be resumed alone. One that diverges does not stop
    the others. Seconds are shared out evenly.

    Args:
      configs: the same but for ``seed``, ``partition_seed`` and ``run_dir``.

    Raises:
      UserError: bad input, settings that differ, a strategy that works on the host between rounds, several CPU devices,
        or folders to resume that are at different rounds.
      Interrupted: Ctrl-C or a termination signal; checkpoints were written.
    """
    first = configs[0]
    for config in configs:
        configuration.validate(config)
        own = {name: getattr(config, name) for name in ("seed", "partition_seed", "run_dir")}
        if different := configuration.differences(dataclasses.replace(first, **own), config):
            raise UserError(f"seeds in one program differ in nothing else: {'; '.join(different)}")
    cohort_size = len(configs) * first.cohort
    set_up_jax(devices=first.devices, cohort_size=cohort_size)
    axis = client_axis(devices=first.devices, lanes=first.lanes, cohort_size=cohort_size)
    experiments = [prepare(config, data.prepare(config), ALONE) for config in configs]
    if experiments[0].engine.on_host:
        raise UserError("seeds in one program need the clients' samples and memories on the devices")
    if first.strategy == "centralized":  # its one client is the whole index, in which the seeds are joined
        raise UserError("centralized trains on all rows at once, so that its seeds cannot train in one program")
    if experiments[0].engine.given.problem.public is not None:
        raise UserError("each seed has a public set of its own, so that they cannot train in one program")
    engine = SeedRounds(experiments[0].engine.build, [each.engine.given for each in experiments], axis)
    return _Seeds(experiments, engine).run()


class _Seeds:
    """Experiments that train in one program and are evaluated and kept one by one."""

    def __init__(self, experiments: Sequence[Experiment], engine: SeedRounds) -> None:
        self.experiments = experiments
        self.engine = engine
        self.ended: dict[int, Result | DivergedError] = {}

    def run(self) -> list[Result | DivergedError]:
        """Train until every seed has ended."""
        config = self.experiments[0].config
        with asked_to_stop() as asked:
            progress, done = self._start()
            bar = ProgressBar(config.rounds, done, quiet=not config.progress)
            rounds_per_call = 1
            try:
                while len(self.ended) < len(self.experiments):
                    count = min(rounds_per_call, self.experiments[0].next_event(done) - done)
                    progress, reports, seconds = self._train(progress, count)
                    before, done = done, int(np.max(progress.round))
                    rounds_per_call = max(1, int(SECONDS_PER_CALL * (done - before) / max(seconds, 1e-6)))
                    self._record(progress, reports, done, seconds, stop=bool(asked))
                    speed = sum(each.images for each in self.experiments) / sum(
                        each.train_seconds for each in self.experiments
                    )
                    bar.update(done, images_per_second=speed, row=self.experiments[0].folder.last_row())
                    if asked and len(self.ended) < len(self.experiments):
                        raise self.experiments[min(self._alive())].interrupted(done, asked[0])
            finally:
                bar.close()
        return [self.ended[seed] for seed in range(len(self.experiments))]

    def _alive(self) -> list[int]:
        return [seed for seed in range(len(self.experiments)) if seed not in self.ended]

    def _start(self) -> tuple[rounds.Progress, int]:
        starts = [experiment.start() for experiment in self.experiments]
        rounds_done = [done for _, done in starts]
        if len(set(rounds_done)) > 1:
            raise UserError(f"the seeds to resume have done {rounds_done} rounds: resume them one by one")
        progress = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(one for one, _ in starts))
        return place(progress, self.engine.axis.replicated), rounds_done[0]

    def _train(self, progress: rounds.Progress, count: int) -> tuple[rounds.Progress, rounds.Report, float]:
        alive = [seed not in self.ended for seed in range(len(self.experiments))]
        compiled, started = self.engine.compile_seconds(), time.perf_counter()
        progress, reports = self.engine.run(progress, count, alive)
        reports = jax.device_get(reports)
        compiling = self.engine.compile_seconds() - compiled
        for experiment in self.experiments:
            experiment.compile_seconds_before += compiling / len(self.experiments)
        return progress, reports, time.perf_counter() - started - compiling

    def _record(
        self, progress: rounds.Progress, reports: rounds.Report, done: int, seconds: float, *, stop: bool
    ) -> None:
        alive = self._alive()
        for seed in alive:
            experiment = self.experiments[seed]
            own, report = _one_of(progress, seed), _one_of(reports, seed)
            try:
                experiment.account(done, report, seconds / len(alive))
            except DivergedError as error:
                self.ended[seed] = error
                continue
            experiment.record_due(own, report, done, stop=stop)
            if done == experiment.config.rounds or experiment.reached_the_stop():
                self.ended[seed] = experiment.finish(own, done)


def _one_of(tree: Any, seed: int) -> Any:
    """Return one seed's part of leaves [S, ...]."""
    return jax.tree.map(lambda leaf: leaf[seed], tree)
