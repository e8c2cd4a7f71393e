"""What the uploads of one training run say about its clients: models that are rebuilt from some of them, and slopes."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples
from fedjax_mr.engine.clients import ClientAxis, first_device
from fedjax_mr.engine.placement import place
from fedjax_mr.engine.program import Programs
from fedjax_mr.engine.round import SERVER, RunConstants, round_key
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import Simulator, normalised
from fedjax_mr.engine.trials import OneTrial, of_coalition
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, Variables
from fedjax_mr.strategies.interface import Cohort, Payload, State
from fedjax_mr.terminal import interrupts
from fedjax_mr.whatif.coalitions import Coalition
from fedjax_mr.whatif.record import Record
from fedjax_mr.whatif.vacant import takes_vacant_slots

MOST_CLIENTS = 10  # of a cohort, of which all subsets are tested in each round
NUMBERS = ("influence", "cosine", "local_loss")  # of single clients, see `fedjax_mr.whatif.approximations`
BATCH = 64  # samples


@dataclasses.dataclass(frozen=True)
class UploadPrograms:
    """The programs that rebuild and compare models, on one device.

    Attributes:
      axis: the layout of a single device.
      code: equal for equal code of strategies and networks, see `Simulator.code`.
    """

    axis: ClientAxis
    code: Any

    def rebuilt(
        self,
        constants: RunConstants,
        state: State,
        uploads: Payload,
        cohort: Cohort,
        round: jax.Array,
        subsets: jax.Array,
    ) -> Variables:
        """The deployed models after a round in which only ``subsets`` [A, K] of the cohort had been there: [A, ...]."""
        one = lambda subset: _after(constants, state, uploads, cohort, round, subset)
        return jax.lax.map(one, subsets)

    def numbers(
        self,
        constants: RunConstants,
        state: State,
        uploads: Payload,
        cohort: Cohort,
        round: jax.Array,
        test: Samples,
    ) -> dict[str, jax.Array]:
        """The `NUMBERS` of each client of a round [K]."""
        model = constants.problem.model
        before = constants.strategy.global_model(state)  # type: ignore[misc]
        everyone = jnp.ones(cohort.ids.shape, bool)

        def parameters_after(params: trees.Params) -> trees.Params:
            messages = uploads | {"model": uploads["model"] | {"params": params}}
            return _after(constants, state, messages, cohort, round, everyone)["params"]

        after, pull_back = jax.vjp(parameters_after, uploads["model"]["params"])
        (slopes,) = pull_back(test_gradient(model, before, test))  # of the test loss by each number of each upload
        changes = jax.tree.map(lambda new, old: new - old[None], uploads["model"]["params"], before["params"])
        step = trees.subtract(after, before["params"])
        inner = lambda a, b: jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x * y), a, b))
        norm = lambda tree: jnp.sqrt(trees.squared_norm(tree))
        return {
            "influence": -jax.vmap(inner)(slopes, changes),
            "cosine": jax.vmap(lambda change: inner(change, step) / (norm(change) * norm(step)))(changes),
            "local_loss": jax.lax.map(lambda client: _local_loss(constants, before, client), cohort.ids),
        }


def _after(
    constants: RunConstants, state: State, uploads: Payload, cohort: Cohort, round: jax.Array, subset: jax.Array
) -> Variables:
    """The deployed model after a round, as if the clients of the cohort outside of ``subset`` [K] did not exist."""
    whole = constants.in_round(round)
    absent = jnp.zeros(whole.problem.num_clients, bool).at[cohort.ids].set(~subset)
    only = lambda counts: counts * jnp.expand_dims(~absent, tuple(range(1, counts.ndim))).astype(counts.dtype)
    problem = dataclasses.replace(
        whole.problem,
        present=~absent,
        sizes=only(whole.problem.sizes),
        label_counts=only(whole.problem.label_counts),
    )
    strategy, key = whole._replace(problem=problem).strategy, round_key(whole.key, SERVER, round)
    assert strategy.global_model is not None
    some = cohort._replace(sizes=jnp.where(subset, cohort.sizes, 0))
    new, _ = strategy.server_update(state, trees.fill(uploads, subset), some, round, key)
    return trees.where(jnp.any(subset), strategy.global_model(new), strategy.global_model(state))


def test_gradient(model: Model, variables: Variables, test: Samples) -> trees.Params:
    """The gradient of the mean loss on test samples by the parameters, a batch after the other."""
    count = test.y.shape[0]
    padded = jnp.arange(-(-count // BATCH) * BATCH, dtype=jnp.int32).reshape(-1, BATCH)

    def step(total: trees.Params, rows: jax.Array) -> tuple[trees.Params, None]:
        loss = lambda params: (
            local.score_batch(
                model, variables | {"params": params}, test, jnp.minimum(rows, count - 1), rows < count
            ).loss
        )
        return trees.add(total, jax.grad(loss)(variables["params"])), None

    total, _ = jax.lax.scan(step, trees.zeros_like(variables["params"]), padded)
    return trees.scale(total, 1 / count)


def _local_loss(constants: RunConstants, variables: Variables, client: jax.Array) -> jax.Array:
    """sqrt(n_i) times the mean loss on the client's training samples."""
    score = local.score(constants.problem.model, variables, constants.client(client), batch_size=BATCH)
    return score.loss / jnp.sqrt(jnp.maximum(score.count, 1.0))


def refusal(simulator: Simulator) -> str:
    """Why models of subsets cannot be rebuilt from the uploads of a simulator's rounds; "" if they can."""
    cohort = simulator.problem.cohort_size
    if cohort > MOST_CLIENTS:
        return (
            f"approximations test all subsets of a cohort, and {cohort} clients have too many: at most {MOST_CLIENTS}"
        )
    if not takes_vacant_slots(simulator.rounds.constants):
        return (
            "approximations rebuild models from some of the uploads of a round, which needs a method with one global "
            "model, such as fedavg, and no channel"
        )
    return ""


def observe(
    simulator: Simulator,
    rounds: int,
    seeds: Sequence[int],
    record: Record,
    *,
    say: Callable[[int], None] | None = None,
) -> None:
    """Train the federation of all clients with each seed, and test the models of all subsets of each cohort.

    The results are in ``record.rebuilt``.

    Raises:
      UserError: see `refusal`.
      DivergedError: a loss or weight is not finite.
    """
    if reason := refusal(simulator):
        raise UserError(reason)
    known = {(seed, round) for seed, round, _ in record.rebuilt.rows}
    for number, seed in enumerate(seeds, 1):
        if (seed, rounds - 1) not in known:
            record.rebuilt.add(_run(simulator, rounds, seed))
        if say is not None:
            say(number)


def _run(simulator: Simulator, count: int, seed: int) -> dict[tuple[int, int, Coalition], dict[str, float]]:
    """The rows of one training run, by seed, round and coalition."""
    everyone = range(simulator.problem.num_clients)
    constants = of_coalition(simulator.rounds.constants._replace(key=random_key(seed)), everyone, vacant=True)
    trained = Rounds(constants, simulator.axis, trial=OneTrial(simulator.axis, code=simulator.code))
    axis = first_device()
    programs = Programs(UploadPrograms(axis, simulator.code))
    dataset = simulator.federated.dataset
    test = normalised(dataset, dataset.test_x, dataset.test_y)
    constants, test = place(jax.device_get((constants, test)), axis.replicated)
    slots = simulator.problem.cohort_size
    subsets = np.array(list(itertools.product([False, True], repeat=slots)))  # nobody first, everyone last
    progress, rows = trained.init(), {}
    for round in range(count):
        interrupts.check()
        state = jax.device_get(progress.server)
        progress, report, cohort, uploads = trained.observed(progress)
        if report.bad_client >= 0:
            raise DivergedError(
                f"the federation of all clients diverged with seed {seed}: client {int(report.bad_client)} met a loss "
                "or weight that is not finite (a smaller lr or a clip_norm may help)"
            )
        facts = place((state, uploads, cohort, np.int32(round)), axis.replicated)
        numbers = jax.device_get(programs.call("numbers", constants, *facts, test))
        models = programs.call("rebuilt", constants, *facts, place(subsets, axis.replicated))
        tested = simulator.evaluation.each(jax.device_get(models))
        for number, subset in enumerate(subsets):
            of_one = jax.tree.map(lambda leaf, number=number: leaf[number], tested)
            columns = simulator.model.task.columns(of_one.metrics) | {"loss": float(of_one.loss)}
            alone = np.flatnonzero(subset)[0] if subset.sum() == 1 else None
            columns |= {name: float(numbers[name][alone]) if alone is not None else np.nan for name in NUMBERS}
            rows[seed, round, frozenset(cohort.ids[subset].tolist())] = columns
    return rows
