"""The programs of a run: pure functions of its constants and its progress, of one trial or of several.

`OneTrial` and `SeveralTrials` are values: all that a program depends on beside its arguments. Runs with equal values
share compiled programs (see `engine.program`). `engine.rounds` calls them.
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
from fedjax_mr.engine.placement import CohortSamples
from fedjax_mr.engine.round import (
    ClientRow,
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
    start,
    train_client,
)
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import State, Strategy, kept_models

Round = Callable[[Progress], tuple[Progress, Report]]


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


@dataclasses.dataclass(frozen=True)
class OneTrial:
    """The programs of one trial on one layout.

    Attributes:
      axis: the layout of the clients.
      stop_at_divergence: whether a call ends after the first round with a non-finite loss or weight.
      code: equal for equal code of strategies and networks, see `Simulator.code`.
    """

    axis: ClientAxis
    stop_at_divergence: bool = True
    code: Hashable = None

    # --- the parts of a round

    def strategy(self, constants: RunConstants) -> Strategy:
        """The strategy, built from its numbers."""
        return constants.strategy

    def start(self, constants: RunConstants) -> Progress:
        """The progress before the first round."""
        return start(constants)

    def begin(self, constants: RunConstants, progress: Progress) -> tuple[Any, ClientRow]:
        """The plan of a round, and the rows [K', ...] of its clients."""
        return begin(self.axis, constants, progress)

    def train_client(self, shared: tuple[RunConstants, jax.Array], row: ClientRow) -> Any:
        """Train one client: (constants, round), its row -> its trained row."""
        return train_client(*shared, row)

    def finish(self, constants: RunConstants, progress: Progress, plan: Any, trained: Any) -> tuple[Progress, Report]:
        """The server's step at the end of a round."""
        return finish(constants, progress, plan, trained)

    def watched(self, constants: RunConstants) -> Any:
        """Whether a call ends after a round with a non-finite loss or weight."""
        del constants
        return self.stop_at_divergence

    def stacks(self, constants: RunConstants) -> tuple[int, ...]:
        """Leading axes of stacked models: K, N and K'."""
        count = constants.problem.cohort_size
        return count, constants.problem.num_clients, self.axis.padded(count)

    # --- whole rounds

    def clients(self, shared: tuple[RunConstants, jax.Array], rows: ClientRow) -> Any:
        """Train the clients of a round: (constants, round), rows [K', ...] -> trained rows."""
        return map_clients(self.axis, self.train_client)(shared, rows)

    def rounds(
        self, constants: RunConstants, progress: Progress, count: jax.Array, samples: CohortSamples | None
    ) -> tuple[Progress, Report]:
        """Run ``count`` rounds (traced), or fewer if one diverges. With ``samples``, ``count`` must be 1."""
        divided = functools.partial(self.axis.by_parameters, rows=self.stacks(constants))

        def one_round(progress: Progress) -> tuple[Progress, Report]:
            plan, rows = self.begin(constants, divided(progress))
            trained = self.clients((constants, progress.round), rows._replace(samples=samples))
            progress, report = self.finish(constants, progress, plan, divided(trained))
            return divided(progress), report

        progress, total = loop(one_round, divided(progress), count, watched=self.watched(constants))
        return divided(progress), total

    # --- around a round

    def start_without_memory(self, constants: RunConstants) -> Progress:
        """The progress before the first round if the clients' memories are kept on the host."""
        return start(constants, with_memory=False)

    def first_memory(self, constants: RunConstants, ids: jax.Array) -> Any:
        """The memory of clients ``ids`` [K'] before they train."""
        return first_memory(constants, ids)

    def select(self, constants: RunConstants, server: State, round: jax.Array) -> jax.Array:
        """The client id of each slot of a round [K']."""
        return ids_by_slot(constants, plan(self.axis, constants, server, round))

    def global_model(self, constants: RunConstants, server: State) -> Any:
        """The deployed model."""
        strategy = constants.strategy
        assert strategy.global_model is not None
        return checks.deployed(strategy.global_model(server), constants.problem.model.shapes())

    def individual_models(self, constants: RunConstants, server: State) -> Any:
        """The K stacked models that are tested one by one."""
        strategy = constants.strategy
        assert strategy.individual_models is not None
        return strategy.individual_models(server)

    def kept_models(self, constants: RunConstants, server: State) -> Any:
        """The models that the server keeps side by side, leaves [K, ...]."""
        return kept_models(constants.strategy, server)


@dataclasses.dataclass(frozen=True)
class SeveralTrials(OneTrial):
    """The programs of T trials of one method. Their clients are T x K rows of one client axis.

    Only the functions of the server are batched over the trials (``vmap``). Each client trains as a row of the client
    axis, with the data, the numbers and the key of its trial. A progress and a report have leaves [T, ...].

    Attributes:
      count: T.
    """

    count: int = 1

    def strategy(self, constants: RunConstants) -> Strategy:
        """The strategy of the first trial."""
        return of_trial(constants, 0).strategy

    def start(self, constants: RunConstants) -> Progress:
        """The progresses before the first round."""
        return self._each(constants, start)

    def begin(self, constants: RunConstants, progress: Progress) -> tuple[Any, ClientRow]:
        """The plans of all trials with the slots of all rows, and the rows in order of decreasing work."""
        # The layout of a trial's rows before they are joined: without padding.
        alone = dataclasses.replace(self.axis, mesh=Mesh(self.axis.mesh.devices.flat[:1], (CLIENTS,)), lanes=1)
        plans, rows = self._each(constants, functools.partial(begin, alone), progress)
        trials = jnp.broadcast_to(jnp.arange(self.count, dtype=jnp.int32)[:, None], rows.size.shape)
        rows = rows._replace(size=jnp.where(constants.running[:, None], rows.size, 0), trial=trials)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
        count = flat.size.shape[0]
        slots = assign(self.axis, flat.size)
        laid_out = trees.take(flat, jnp.where(slots < count, slots, 0))
        return (plans, slots), laid_out._replace(size=jnp.where(slots < count, laid_out.size, 0))

    def train_client(self, shared: tuple[RunConstants, jax.Array], row: ClientRow) -> Any:
        """Train one client with the constants of its trial."""
        constants, round = shared
        return train_client(of_trial(constants, row.trial), round[row.trial], row)

    def finish(self, constants: RunConstants, progress: Progress, plan: Any, trained: Any) -> tuple[Progress, Report]:
        """The servers' steps at the end of a round."""
        plans, slots = plan
        per_trial = plans.slots.shape[1]
        in_order = trees.take(trained, positions(slots, self.count * per_trial))
        rows = jax.tree.map(lambda leaf: leaf.reshape(self.count, per_trial, *leaf.shape[1:]), in_order)
        return self._each(constants, finish, progress, plans, rows)

    def global_model(self, constants: RunConstants, server: State) -> Any:
        """The deployed models, leaves [T, ...]."""
        return self._each(constants, OneTrial(self.axis).global_model, server)

    def watched(self, constants: RunConstants) -> Any:
        """Which trials end the call [T]."""
        return constants.running & self.stop_at_divergence

    def stacks(self, constants: RunConstants) -> tuple[int, ...]:
        """No leaf is divided over its parameters."""
        del constants
        return ()

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
    # On the host, because stacking hundreds of small arrays on a device takes seconds.
    build, problem = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *jax.device_get(arguments))
    one_index = all(each.index is federations[0].index for each in federations)  # of trials that differ in clients
    indexes = federations[0:1] if one_index else federations
    before = np.cumsum([0, *(0 if one_index else len(each.index) for each in federations[:-1])]).astype(np.int32)
    stacked = RunConstants(
        build,
        problem,
        Federation(
            samples=federations[0].samples,
            index=np.concatenate([np.asarray(each.index) for each in indexes]),
            offsets=np.stack([each.offsets + first for each, first in zip(federations, before, strict=True)]),
        ),
        jnp.stack([constants.key for constants in all_constants]),
    )
    return _with_frozen(stacked, frozen)


def of_coalition(constants: RunConstants, clients: Sequence[int], *, vacant: bool = False) -> RunConstants:
    """The constants of the federation of some clients, as if the others did not exist (see `Problem.present`).

    The clients keep their numbers, and so their random keys. The cohort has K of them, or all if they are fewer.

    Args:
      constants: those of all clients.
      clients: the clients that are present.
      vacant: whether the cohort keeps its K slots, of which some are vacant if fewer clients are present. A vacant slot
        trains no step and uploads the mean of the others (`takes_vacant_slots`). Otherwise it has fewer slots.
    """
    whole = constants.problem
    present = np.isin(np.arange(whole.num_clients), np.asarray(clients, int))
    only = lambda counts: None if counts is None else jnp.asarray((np.asarray(counts).T * present).T, jnp.int32)
    problem = dataclasses.replace(
        whole,
        cohort_size=whole.cohort_size if vacant else min(whole.cohort_size, int(present.sum())),
        sizes=only(whole.sizes),
        label_counts=only(whole.label_counts),
        validation_sizes=only(whole.validation_sizes),
        present=jnp.asarray(present),
    )
    return constants._replace(problem=problem)


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
