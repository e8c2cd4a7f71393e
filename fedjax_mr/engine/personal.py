"""Tests of each client's personal model on the client's test samples, as trained and after fine-tuning."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.client import local
from fedjax_mr.client.local import Score
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.data.federated import FederatedData, Split
from fedjax_mr.engine.clients import ClientAxis, map_clients
from fedjax_mr.engine.evaluation import Tested
from fedjax_mr.engine.placement import HostMemory, place, rows_of
from fedjax_mr.engine.program import Programs
from fedjax_mr.engine.round import PERSONAL, ClientRow, CohortPlan, Federation, Progress, RunConstants, round_key
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.strategies.interface import Info, Memory, Problem, State, Strategy
from fedjax_mr.tasks import Task

SPREADS = ("weighted", "std", "worst10")  # columns about the spread of the first metric over the clients
MOST_TOGETHER = 64  # test samples per step of one client


class Clients(NamedTuple):
    """Test results of each client's model. NaN for a client without samples for which a metric is defined."""

    task: Task
    metrics: dict[str, np.ndarray]  # each metric on its test samples, by name: [N], or [N, C] for one per class
    loss: np.ndarray  # mean loss of the task on its test samples [N]
    count: np.ndarray  # number of its test samples [N]
    validation: dict[str, np.ndarray]  # each metric on its validation samples
    validation_loss: np.ndarray  # mean loss on its validation samples [N]
    architecture: np.ndarray  # number of its network [N]; 0 if all clients have the same

    @property
    def primary(self) -> np.ndarray:
        """The first metric of the task, such as the accuracy [N]."""
        return self.metrics[self.task.primary.name]

    @property
    def accuracy(self) -> np.ndarray:
        """The fraction of each client's test samples whose class is right [N]; see `Tested.accuracy`."""
        return np.asarray(Tested(self.metrics, self.loss).accuracy)

    def columns(self, prefix: str = "personal") -> dict[str, float]:
        """The columns for a row of metrics. Clients without such samples are left out."""
        columns, before = {}, "" if prefix == "personal" else f"{prefix}_"
        if (self.count > 0).any():
            columns = self._means(self.metrics, self.loss, prefix)  # equal weight for each client, as in the papers
            known = ~np.isnan(self.primary)
            values, counts = self.primary[known], self.count[known]
            if len(values):
                columns |= {
                    f"{prefix}_weighted": float(values @ (counts / counts.sum())),  # equal weight for each sample
                    f"{prefix}_std": values.std(),
                    f"{prefix}_worst10": worst_tenth(values, higher_is_better=self.task.primary.higher_is_better),
                }
        if not np.isnan(self.validation_loss).all():
            columns |= self._means(self.validation, self.validation_loss, f"{before}validation")
        return {name: float(value) for name, value in columns.items()}

    def _means(self, metrics: dict[str, np.ndarray], loss: np.ndarray, prefix: str) -> dict[str, float]:
        """The mean of each number over the clients for which it is defined."""
        columns = {name: values for name, values in metrics.items() if values.ndim < 3} | {"loss": loss}
        return self.task.columns({name: _mean_of_known(values) for name, values in columns.items()}, f"{prefix}_")


def _mean_of_known(values: np.ndarray) -> Any:
    """The mean over the clients of values [N] or [N, C] without NaN; NaN if no client has any."""
    if values.ndim > 1:
        return np.array([_mean_of_known(column) for column in values.T])
    known = values[~np.isnan(values)]
    return known.mean() if len(known) else np.nan


def worst_tenth(values: np.ndarray, *, higher_is_better: bool = True) -> float:
    """The mean of the worst tenth of the values (at least one value)."""
    ordered = np.sort(values) if higher_is_better else -np.sort(-values)
    return float(ordered[: math.ceil(len(values) / 10)].mean())


class _ClientToTest(NamedTuple):
    """The data sent to the device that tests one client."""

    memory: Any
    client_id: Any


class _Shared(NamedTuple):
    constants: RunConstants
    server: State
    test: Federation  # the clients' test samples
    round: jax.Array


@dataclasses.dataclass(frozen=True)
class PersonalPrograms:
    """The programs of a `PersonalEvaluation`.

    Attributes:
      axis: the layout.
      epochs: epochs of fine-tuning before a test.
      together: test samples of a client per step, see `samples_together`.
      code: equal for equal code of strategies and networks, see `Simulator.code`.
    """

    axis: ClientAxis
    epochs: int
    together: int
    code: Hashable

    def personal(self, shared: _Shared, rows: _ClientToTest) -> tuple[Score, Score, jax.Array]:
        """Test clients: rows [R, ...] -> their scores on their test and validation samples, and their networks [R]."""
        return map_clients(self.axis, self._one)(shared, rows)

    def _one(self, shared: _Shared, row: _ClientToTest) -> tuple[Score, Score, jax.Array]:
        constants = shared.constants
        strategy = constants.strategy
        data, test = constants.client(row.client_id), shared.test.client(row.client_id)
        part = part_of(strategy, shared.server, row.client_id)
        key = personal_key(constants.key, shared.round, row.client_id)
        return test_client(
            strategy, constants.problem, part, row.memory, data, test, key, epochs=self.epochs, together=self.together
        )


class TestsOfClients(Protocol):
    """The tests of the personal models of all N clients."""

    def test(self, progress: Progress) -> Clients: ...

    def finetuned(self, progress: Progress, epochs: int) -> Clients: ...


class RemoteClients(TestsOfClients, Protocol):
    """Clients outside of this process, where they train and test their models."""

    def train(self, round: int, plan: CohortPlan, rows: ClientRow) -> tuple[CohortPlan, Any, Info]:
        """Train the rows [K', ...] of a round; see `rounds.RemoteTraining`."""
        ...


class PersonalEvaluation:
    """The compiled test of all N clients, divided over the client axis."""

    def __init__(self, rounds: Rounds, federated: FederatedData, test: Samples | None) -> None:
        """Place the clients' test samples on the devices.

        Args:
          rounds: the rounds whose clients are tested.
          federated: the clients' data, with the division of the test samples.
          test: the samples that ``federated.client_test`` divides. If None, only validation samples are tested.

        Raises:
          UserError: no client has test samples, or the clients' samples are kept on the host.
        """
        self.rounds = rounds
        self.axis = rounds.axis
        self.programs: dict[int, Programs] = {}  # by the epochs of fine-tuning
        self._constants = rounds.constants
        if rounds.data_on_host:
            if test is not None or rounds.strategy.personal_model is not None:
                raise UserError(
                    "tests of the clients' models need the samples on the device: set data_placement=device"
                )
            self._constants = self._with_validation(federated)
        if test is None:
            self._split = Split(np.zeros(1, np.int32), np.zeros(federated.num_clients + 1, np.int32))
        else:
            self._split = federated.client_test.split
            if not len(self._split.index):
                name = federated.dataset.name
                raise UserError(f"the clients of {name} have no test samples: set client_test_share= above 0")
        self._together = samples_together(self._split, federated.validation)
        known = self._constants.federation.samples if test is None or federated.own_test else test
        self._test = place(Federation(known, *self._split), rounds.axis.replicated)

    def _with_validation(self, federated: FederatedData) -> RunConstants:
        """The constants of the rounds with only the validation samples. The other samples stay on the host."""
        assert federated.validation is not None
        index, offsets = federated.validation
        known = self.rounds.constants.federation.samples
        x, y = federated.dataset.x[index], np.asarray(federated.dataset.y[index], federated.dataset.task.dtype)
        samples = Samples(x, y, known.scale, known.shift).in_rows()
        federation = Federation(samples, np.arange(len(index), dtype=np.int32), offsets)
        return self.rounds.constants._replace(federation=place(federation, self.axis.replicated))

    def test(self, progress: Progress) -> Clients:
        """Test the personal model of every client, or the global model if the strategy has no personal models."""
        return self._run(progress, 0)

    def finetuned(self, progress: Progress, epochs: int) -> Clients:
        """Test copies that each client first fine-tunes on its training samples for ``epochs`` epochs."""
        return self._run(progress, epochs)

    def _run(self, progress: Progress, epochs: int) -> Clients:
        axis, problem = self.axis, self._constants.problem
        count = problem.num_clients
        # Memories on the host may not fit on the devices together, so K' clients at a time are tested.
        size = axis.padded(problem.cohort_size if isinstance(progress.memory, HostMemory) else count)
        order = np.minimum(np.arange(-(-count // size) * size), count - 1)  # the last client is the padding
        server, round = place((progress.server, progress.round), axis.replicated)
        shared = _Shared(self._constants, server, self._test, round)
        if epochs not in self.programs:
            owner = PersonalPrograms(axis, epochs, self._together, self.rounds.trial.code)
            self.programs[epochs] = Programs(owner)
        parts = []
        for ids in order.reshape(-1, size):
            rows = place(_ClientToTest(rows_of(progress.memory, ids), ids.astype(np.int32)), axis.sharded)
            out = self.programs[epochs].call("personal", shared, rows)
            if not out[2].is_fully_addressable:
                out = jax.device_put(out, axis.replicated)
            parts.append(jax.tree.map(np.asarray, out))
        return clients_of(problem.model.task, *jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *parts))


def clients_of(task: Task, test: Score, validation: Score, architecture: np.ndarray) -> Clients:
    """The results of all clients, from their scores [N]."""
    metrics, kept = (task.values_of_each(score.metrics) for score in (test, validation))
    with np.errstate(invalid="ignore"):
        loss, kept_loss = (np.asarray(score.loss) / np.asarray(score.count) for score in (test, validation))
    return Clients(task, metrics, loss, np.asarray(test.count), kept, kept_loss, architecture)


def samples_together(*splits: Split | None) -> int:
    """Samples per step, so that the client with the most of them needs few steps and the others compute little padding.

    A power of two: federations whose largest clients differ little share a program.
    """
    largest = max(int(split.sizes.max(initial=1)) for split in splits if split is not None)
    return min(MOST_TOGETHER, 1 << (largest - 1).bit_length())


def personal_key(key: jax.Array, round: jax.Array | int, client_id: jax.Array | int) -> jax.Array:
    """The key of a client's test after ``round`` rounds. It does not reveal the key of the run."""
    return jax.random.fold_in(round_key(key, PERSONAL, round), client_id)


def part_of(strategy: Strategy, state: State, client_id: jax.Array | int) -> Any:
    """The server's part of a client's personal model, or the global model if the strategy has no personal models.

    Raises:
      UserError: the strategy has neither personal models nor a global model.
    """
    if strategy.personal_model is not None:
        return state if strategy.personal_part is None else strategy.personal_part(state, jnp.asarray(client_id))
    if strategy.global_model is None:
        raise UserError("the strategy has neither a global nor personal models to test")
    return strategy.global_model(state)


def personal_variables(strategy: Strategy, part: Any, memory: Memory, data: ClientData, key: jax.Array) -> Variables:
    """The personal model of a client from the server's part (`part_of`). Consumes ``key``, a `personal_key`."""
    if strategy.personal_model is None:
        return part
    return strategy.personal_model(part, memory, data, jax.random.split(key)[0])


def test_client(
    strategy: Strategy,
    problem: Problem,
    part: Any,
    memory: Memory,
    data: ClientData,
    test: ClientData,
    key: jax.Array,
    *,
    epochs: int = 0,
    together: int = MOST_TOGETHER,
) -> tuple[Score, Score, jax.Array]:
    """The scores of a client on its test and validation samples, and the number of its network.

    Args:
      strategy: the strategy.
      problem: the facts of the federation.
      part: the server's part of the personal model (`part_of`).
      memory: the memory of the client.
      data: the client's data.
      test: the client's test samples.
      key: a `personal_key`; consumed.
      epochs: epochs of fine-tuning on ``data`` before the test.
      together: largest number of samples per step.
    """
    model, variables = problem.model, personal_variables(strategy, part, memory, data, key)
    if epochs:
        setting = problem.local.in_epochs(epochs)
        variables, _ = local.train(model, setting, variables, data, jax.random.split(key)[1])
    held = data._replace(offset=data.offset + data.size, size=data.validation_size)
    size = min(together, local.evaluation_batch(model))
    tested = local.score(model, variables, test, batch_size=size)
    return tested, local.score(model, variables, held, batch_size=size), model.architecture(variables)
