"""Train the federations of many coalitions, a block of them in one compiled program."""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mr import trees
from fedjax_mr.config.config import Config
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import memory_errors, set_up_jax
from fedjax_mr.engine.layout import lanes_that_fit, memory_limit
from fedjax_mr.engine.program import memory_needed
from fedjax_mr.engine.round import start
from fedjax_mr.engine.rounds import TrialRounds
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.engine.trials import of_coalition
from fedjax_mr.errors import DivergedError, UserError, unknown_name, usual_arithmetic
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.simulated_time import simulates_time
from fedjax_mr.keys import random_key
from fedjax_mr.models import Variables
from fedjax_mr.tasks import Task
from fedjax_mr.terminal import interrupts
from fedjax_mr.whatif import uploads
from fedjax_mr.whatif.coalitions import Coalition, by_slots, random_orders, sets_of, text
from fedjax_mr.whatif.record import Record
from fedjax_mr.whatif.result import WhatIf
from fedjax_mr.whatif.vacant import takes_vacant_slots

LARGEST_BLOCK = 256  # trials; more save no time on CPUs
MEMORY = 1_000_000_000  # bytes of a block on a CPU; on an accelerator a third of its memory


def what_if(
    federation: Config | Simulator,
    *,
    coalitions: str | Iterable[Iterable[int]] = "all",
    rounds: int | None = None,
    seeds: Sequence[int] | None = None,
    metric: str | None = None,
    orders: int = 20,
    approximations: bool = False,
    block: int | None = None,
    folder: Path | str | None = None,
    progress: bool = False,
) -> WhatIf:
    """Train the federation of each coalition, as if it had been made without the other clients, and test its model.

    All federations share the partition and, per seed, the initial model and each client's random keys. A coalition of
    fewer than K clients has them all in each cohort, a larger one K of them. The empty coalition has the initial model.

    Args:
      federation: all clients, with method, network and local training.
      coalitions: ``all`` subsets, ``leave_one_out``, ``orders`` (the first clients of random orders), ``stratified``
        (those of orders in which each client has each place), or a list of sets of clients. The empty coalition and
        all clients are always added.
      rounds: rounds of each federation. Default: that of the configuration; a simulator needs it.
      seeds: seeds of the training. Default: the one of the configuration, or 0.
      metric: the test result that is the value of a coalition: a metric of the task, or ``loss``. Default: the first
        metric of the task.
      orders: number of random orders M.
      approximations: whether the contributions are also approximated from the uploads of one more training run of all
        clients per seed (`fedjax_mr.whatif.approximations`).
      block: coalitions that train together. Default: as many as fit into memory, at most `LARGEST_BLOCK`.
      folder: folder of the results. With it, an interrupted call continues after its last finished block.
      progress: whether to write the progress to standard error.

    Raises:
      UserError: bad input, a method whose federations cannot train without some clients (see `refusal`), or a folder of
        another federation.
      DivergedError: a loss or weight of a federation is not finite.
    """
    with usual_arithmetic(), memory_errors():
        simulator = federation if isinstance(federation, Simulator) else _simulator(federation)
        if isinstance(federation, Config):
            rounds, seeds = rounds or federation.rounds, (federation.seed,) if seeds is None else seeds
        if reason := refusal(simulator) or (uploads.refusal(simulator) if approximations else ""):
            raise UserError(reason)
        if not isinstance(rounds, int) or rounds < 1:
            raise UserError(f"rounds={rounds!r} must be a whole number of at least 1")
        federated, task = simulator.federated, simulator.model.task
        if metric not in (None, "loss", *(each.name for each in task.metrics)):
            raise unknown_name("metric", metric, [each.name for each in task.metrics] + ["loss"])
        seeds = (0,) if seeds is None else tuple(seeds)
        random = random_orders(federated.num_clients, orders)
        chosen = sets_of(coalitions, federated.num_clients, random)
        record = Record(folder, _facts(simulator, rounds))
        try:
            wanted = [(seed, each) for seed in seeds for each in chosen]
            train(simulator, rounds, wanted, record, block=block, say=_say(len(wanted)) if progress else None)
            if approximations:
                uploads.observe(
                    simulator, rounds, seeds, record, say=_say(len(seeds), "runs observed") if progress else None
                )
        finally:
            record.close()
    result = WhatIf(
        names=federated.names or tuple(map(str, range(federated.num_clients))),
        sizes=federated.sizes,
        seeds=seeds,
        rows={pair: record.trained.rows[pair] for pair in wanted},
        metric=metric or task.primary.name,
        lower=_lower_is_better(task, next(iter(record.trained.rows.values()))),
        orders=random,
        rebuilt={key: row for key, row in record.rebuilt.rows.items() if key[0] in seeds} if approximations else {},
    )
    if folder is not None:
        result.write(folder)
    return result


def refusal(simulator: Simulator) -> str:
    """Why the federations of a simulator cannot train without some of their clients, in one line; "" if they can."""
    strategy, problem = simulator.rounds.strategy, simulator.problem
    try:
        _ = of_coalition(simulator.rounds.constants, range(problem.num_clients)).strategy
    except UserError as error:
        return f"what_if cannot leave out clients: {error}"
    one_more = dataclasses.replace(problem, num_clients=problem.num_clients + 1)
    state = lambda problem: jax.eval_shape(simulator.rounds.constants.build(problem).init, random_key(0))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(state(each))] for each in (problem, one_more)]
    for applies, reason in (
        (strategy.global_model is None, "deploys no model, so a coalition has no value"),
        (strategy.select is not None, "selects its clients itself, from all of them"),
        (strategy.between_rounds is not None, "works on the host between rounds"),
        (problem.public is not None, "has public samples, of which each federation in a program would keep a copy"),
        (shapes[0] != shapes[1], "keeps something about every client on the server, also about absent ones"),
        (simulator.rounds.on_host, "keeps the samples or memories of its clients on the host"),
    ):
        if applies:
            return f"what_if cannot leave out clients, because the method {reason}"
    return ""


def train(
    simulator: Simulator,
    rounds: int,
    wanted: Sequence[tuple[int, Coalition]],
    record: Record,
    *,
    block: int | None = None,
    say: Callable[[int], None] | None = None,
) -> None:
    """Train and test the coalitions that the record does not have, block after block."""
    missing, cohort = [pair for pair in wanted if pair not in record.trained.rows], simulator.problem.cohort_size
    vacant = any(0 < len(each) < cohort for _, each in missing) and takes_vacant_slots(simulator.rounds.constants)
    groups = by_slots(missing, cohort, vacant=vacant)
    for slots, pairs in groups.items():
        _require_cohort(simulator, slots, pairs[0][1], vacant=vacant)
    for slots, pairs in groups.items():
        if slots == 0:
            record.trained.add({pair: _test(simulator, _initial(simulator, pair[0])) for pair in pairs})
            continue
        count = min(block or _block(simulator, slots), len(pairs))
        for first in range(0, len(pairs), count):
            interrupts.check()
            part = pairs[first : first + count]
            record.trained.add(_train_block(simulator, rounds, part, count, vacant=vacant))
            if say is not None:
                say(sum(pair in record.trained.rows for pair in wanted))


def _train_block(
    simulator: Simulator, rounds: int, pairs: Sequence[tuple[int, Coalition]], count: int, *, vacant: bool
) -> dict[tuple[int, Coalition], dict[str, float]]:
    """Train pairs (seed, coalition) with equally many slots in a program of ``count`` trials, and test them."""
    filled = [*pairs, *[pairs[0]] * (count - len(pairs))]  # all blocks share a program
    of_seed = lambda seed: simulator.rounds.constants._replace(key=random_key(seed))
    constants = [of_coalition(of_seed(seed), sorted(coalition), vacant=vacant) for seed, coalition in filled]
    slots = count * constants[0].problem.cohort_size
    axis = client_axis(devices=simulator.axis.num_devices, lanes=None, cohort_size=slots)
    options = {"stop_at_divergence": False, "code": simulator.code}

    def needed(axis: Any) -> int:
        programs = TrialRounds(constants, dataclasses.replace(axis, described=True), **options).compile()
        return max(memory_needed(programs.compiled(name)) for name in programs)

    if axis.lanes > 1:
        axis = lanes_that_fit(axis, memory_limit(axis), needed)
    together = TrialRounds(constants, axis, **options)
    together.keep_running([number < len(pairs) for number in range(count)])
    state, report = together.run(together.init(), rounds)
    bad = np.asarray(report.bad_client)
    for (seed, coalition), client in zip(pairs, bad, strict=False):
        if client >= 0:
            raise DivergedError(
                f"the federation of clients {text(coalition)} diverged with seed {seed}: client {client} met a loss or "
                "weight that is not finite (a smaller lr or a clip_norm may help)"
            )
    models = jax.device_get(together.deployed(state))
    one = lambda number: jax.tree.map(lambda leaf: leaf[number], models)
    return {pair: _test(simulator, one(number)) for number, pair in enumerate(pairs)}


def _require_cohort(simulator: Simulator, slots: int, clients: Coalition, *, vacant: bool) -> None:
    """Check, before anything trains, that the method works with so small a cohort."""
    try:
        _ = slots and of_coalition(simulator.rounds.constants, sorted(clients), vacant=vacant).strategy
    except UserError as error:
        raise UserError(f"a federation of {slots} client{'s' * (slots > 1)} cannot train: {error}") from None


def _initial(simulator: Simulator, seed: int) -> Variables:
    """The deployed model before the first round."""
    constants = simulator.rounds.constants._replace(key=random_key(seed))
    return simulator.rounds.deployed(start(constants, with_memory=False))


def _test(simulator: Simulator, variables: Variables) -> dict[str, float]:
    """The columns of a test: the metrics of the task, and the loss."""
    tested = simulator.evaluation.one(variables)
    return simulator.model.task.columns(tested.metrics) | {"loss": float(tested.loss)}


def _block(simulator: Simulator, slots: int) -> int:
    """The number of trials with these slots that fit into memory."""
    model = trees.num_bytes(simulator.model.shapes())
    needed = 2 * trees.num_bytes(simulator.rounds.shapes()) + 5 * slots * model
    return max(1, min(LARGEST_BLOCK, int(min(memory_limit(simulator.axis) / 3, MEMORY) / needed)))


def _simulator(config: Config) -> Simulator:
    """The simulator of a configuration."""
    resolved = resolve(config)
    config = resolved.config
    if simulates_time(config):
        raise UserError("what_if trains synchronous rounds without a clock: leave out the flags of simulated time")
    if config.dp_clip is not None:
        raise UserError(
            "what_if needs the same random numbers in all federations, and differential privacy secret ones"
        )
    if (config.num_processes or 1) > 1:
        raise UserError("what_if runs in one process: leave out num_processes=")
    set_up_jax(devices=config.devices, cohort_size=LARGEST_BLOCK * config.cohort)
    federated = federated_data(config, dataset=resolved.user_objects.dataset)
    config, network = resolved.user_objects.build(config, federated)
    return simulator_of(config, federated, network)


def _facts(simulator: Simulator, rounds: int) -> dict[str, Any]:
    """What the results of coalitions depend on, beside the seed."""
    federated, constants = simulator.federated, simulator.rounds.constants
    structure, leaves = jax.tree.structure(constants), jax.tree.leaves(jax.device_get(constants._replace(key=None)))
    digest = hashlib.sha256(re.sub(r" at 0x\w+", "", str(structure)).encode())
    for leaf in leaves:
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return {
        "clients": federated.num_clients,
        "cohort": simulator.problem.cohort_size,
        "rounds": rounds,
        "network": simulator.model.name,
        "data": federated.hash(),
        "test": federated.test_hash,
        "metrics": [metric.name for metric in simulator.model.task.metrics],
        "settings": digest.hexdigest()[:16],
    }


def _lower_is_better(task: Task, columns: Iterable[str]) -> frozenset[str]:
    """The columns of a test of which lower values are better."""
    names = {metric.name for metric in task.metrics if not metric.higher_is_better} | {"loss"}
    return frozenset(each for each in columns if each in names or re.sub(r"_\d+$", "", each) in names)


def _say(total: int, what: str = "federations trained") -> Callable[[int], None]:
    return lambda done: print(f"fedjax-mr: {done:,} of {total:,} {what}", file=sys.stderr)
