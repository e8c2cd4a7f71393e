"""Real clients in the rounds of the simulator: they train and test their own models on their machines."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.client.local import score_outputs
from fedjax_mr.clock.deadline import means
from fedjax_mr.config.config import Config
from fedjax_mr.deploy import relay, wire
from fedjax_mr.deploy.client_manager import ClientManager
from fedjax_mr.deploy.protocol import RemoteData
from fedjax_mr.deploy.transport import Messenger
from fedjax_mr.deploy.wire import Content
from fedjax_mr.engine.clients import positions
from fedjax_mr.engine.personal import Clients, clients_of, part_of, personal_key
from fedjax_mr.engine.program import Program
from fedjax_mr.engine.round import (
    MEMORY,
    SERVER,
    ClientRow,
    CohortPlan,
    Progress,
    RunConstants,
    begin,
    client_key,
    round_key,
    start,
    train_client,
)
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.method import Chosen, build_chosen, strategy_of
from fedjax_mr.models import Model
from fedjax_mr.settings import LARGEST_INT32
from fedjax_mr.strategies import Problem, Strategy
from fedjax_mr.strategies.interface import Info, LayerExchange

ROUNDING = 1e-3  # how far a fraction of float32 counts above 2^24, such as of pixels, may be outside 0..1


class RemoteClients:
    """Trains real clients, and lets them test their own models on samples that the server never sees.

    The clients keep their memory on their disks. The server's state has instead the round of each client's last valid
    memory, [N] int32, -1 before its first round.

    Attributes:
      manager: the clients.
      at_clients: problem -> the strategy that runs at the clients.
      simulator: the server's part of the rounds.
      programs: the server's compiled programs for single clients.
    """

    def __init__(self, config: Config, federated: RemoteData, model: Model, manager: ClientManager) -> None:
        """Send the facts of the federation to the clients.

        Raises:
          UserError: real clients cannot run the strategy, or clients are missing.
        """
        self.manager, self._finite = manager, not config.allow_nonfinite
        self.programs = {"untrained": Program(self._trained_without_samples), "part": Program(self._part)}
        self.at_clients = strategy_of(config)
        self.simulator = simulator_of(config, federated, model, strategy=self._at_server, remote=self)
        self._constants, problem = self.simulator.rounds.constants, self.simulator.problem
        strategy = self.at_clients(problem)
        self.exchange, self.increments = strategy.exchange, set(strategy.increments)
        if self.exchange is not None and self.exchange.before_training:
            raise UserError("real clients only exchange layers before the upload: set --exchange=before_upload")
        if self.exchange is not None and manager.policy.lost == "untrained":
            raise UserError("an exchange of layers needs all clients of the round: use --lost=wait or --lost=stop")
        self._sent, self._answer = jax.eval_shape(self._one_client, self._constants)
        self._scores = scores_of(problem.model)
        if manager.policy.lost == "untrained":
            self._check_untrained()
        kept = np.zeros(federated.num_clients, int) if federated.validation is None else federated.validation.sizes
        memory_key = jax.random.key_data(jax.random.fold_in(self._constants.key, MEMORY))
        numbers = {"sizes": federated.sizes.astype(np.int32), "validation_sizes": kept.astype(np.int32)}
        numbers |= {"architectures": np.asarray(problem.architectures), "memory_key": np.asarray(memory_key)}
        public = {} if federated.public is None else {"x": federated.public.x}
        if federated.public is not None and federated.public.y is not None:
            public["y"] = np.asarray(federated.public.y, federated.dataset.task.dtype)
        manager.begin({"federation": numbers, "public": public})

    def resume(self, folder: Path, done: int) -> None:
        """Continue after ``done`` rounds of a run folder."""

    def _at_server(self, chosen: Chosen, problem: Problem) -> Strategy:
        """The strategy with the round of each client's memory in place of the memory itself.

        Its exchange, if it has one, does nothing: the clients have exchanged layers before they upload.
        """
        strategy = build_chosen(chosen, problem)
        if strategy.exchange is not None:
            strategy = strategy._replace(exchange=strategy.exchange._replace(mix=lambda uploads, key: (uploads, {})))
        if strategy.init_memory is None:
            return strategy
        return strategy._replace(init_memory=lambda key, client_id: jnp.full((), -1, jnp.int32))

    def _one_client(self, constants: RunConstants) -> Any:
        """One client's payload, and its upload and metrics; called only for their shapes."""
        constants = constants._replace(build=self.at_clients)
        progress = start(constants)
        _, rows = begin(self.simulator.axis, constants, progress)
        row = _row(rows, 0)
        upload, _, metrics = train_client(constants, progress.round, row)
        return row.payload, (upload, metrics)

    def train(self, round: int, plan: CohortPlan, rows: ClientRow) -> tuple[CohortPlan, Any, Info]:
        """Train the clients of a round; return the plan, in which lost clients have no samples, the results and info.

        Raises:
          UserError: a client with a memory was drawn twice; or as `ClientManager.ask`.
        """
        trained, lost = self._train_remotely(round, rows)
        if self.manager.policy.lost != "untrained":
            return plan, trained, {}
        absent = jnp.asarray(lost)[positions(plan.slots, len(lost))]
        sizes = jnp.where(absent, jnp.zeros_like(plan.cohort.sizes), plan.cohort.sizes)
        plan = plan._replace(cohort=plan.cohort._replace(sizes=sizes))
        return plan, trained, {"clients_lost": np.float32(lost.sum())}

    def _train_remotely(self, round: int, rows: ClientRow) -> tuple[Any, np.ndarray]:
        """The results of the clients of the rows [K, ...], and which of them are lost [K].

        Raises:
          UserError: a client with a memory was drawn twice; or as `ClientManager.ask`.
        """
        count = len(rows.client_id)
        if rows.memory is not None and rows.occurrence.any():
            again = rows.client_id[np.argmax(rows.occurrence > 0)]
            raise UserError(f"client {again} was drawn twice in a round, and a real client has one memory")
        trained: list[Any] = [None] * count
        for occurrence in range(int(rows.occurrence.max()) + 1):  # a client has one message at a time
            asked = {int(rows.client_id[row]): row for row in np.flatnonzero(rows.occurrence == occurrence)}
            contents = {client: self._order(round, rows, row) for client, row in asked.items()}
            for client, answer in self.manager.ask(
                "train", round, contents, self._read, wire.size_limit(self._answer)
            ).items():
                trained[asked[client]] = answer
        lost = np.array([each is None for each in trained])
        for row in np.flatnonzero(lost):
            trained[row] = self._untrained(round, _row(rows, row))
        memory = None if rows.memory is None else np.where(lost, rows.memory, np.int32(round))
        if self.exchange is not None:
            models = self._exchanged(round, rows, self.exchange)
            trained = [
                ({**rest, "model": model}, metrics) for (rest, metrics), model in zip(trained, models, strict=True)
            ]
        uploads, metrics = jax.tree.map(lambda *leaves: np.stack(leaves), *trained)
        for name in self.increments & uploads.keys() if lost.any() else ():
            # As of late clients: a mean over all clients is then the mean over those that answered.
            usual = means(uploads[name], jnp.asarray(~lost))
            uploads[name] = jax.device_get(jax.vmap(trees.where)(jnp.asarray(lost), usual, uploads[name]))
        return (uploads, memory, metrics), lost

    def _exchanged(self, round: int, rows: ClientRow, exchange: LayerExchange) -> list[Any]:
        """The models that the clients of the rows [K, ...] upload after an exchange of layers."""
        problem = self._constants.problem
        key, _ = jax.random.split(round_key(self._constants.key, SERVER, round))  # as in `server_update`

        def once(messenger: Messenger, nodes: Mapping[int, int], attempt: int) -> list[Any]:
            return relay.recombine(
                messenger,
                nodes,
                run=self.manager.manifest.run,
                round=round,
                attempt=attempt,
                shapes=problem.model.shapes(),
                layers=problem.layers,
                repetitions=exchange.repetitions,
                key=key,
                timeout=self.manager.policy.reply_timeout,
                beside={"run": self.manager.manifest.record()},
            )

        return self.manager.with_all(round, [int(client) for client in rows.client_id], once)

    def _order(self, round: int, rows: ClientRow, row: Any) -> Content:
        """The content of the training message to the client of a row."""
        key = client_key(self._constants.key, round, rows.client_id[row], rows.occurrence[row])
        last = -1 if rows.memory is None else int(rows.memory[row])
        payload = wire.pack(_row(rows.payload, row))
        return {"payload": payload, "key": {"key": np.asarray(jax.random.key_data(key))}, "numbers": {"last": last}}

    def _read(self, client: int, reply: Content) -> Any:
        """A client's upload and metrics, checked.

        A client whose training diverged has no valid upload. No reply of a single client ends the run at once.

        Raises:
          UserError: they are malformed, not finite, or too large for sums of squares.
        """
        upload, metrics = self._answer
        if self.exchange is not None:
            upload = {name: each for name, each in upload.items() if name != "model"}
        metrics = wire.unpack(reply.get("metrics", {}), metrics, who="its report", finite=False)
        diverged = int(metrics.bad_step) >= 0
        most = LARGEST_INT32 // self._constants.problem.cohort_size  # the round's sum has 32 bits
        if not 0 <= int(metrics.images) <= most or not 0 <= int(metrics.steps) <= most:
            numbers = f"{int(metrics.images)} samples and {int(metrics.steps)} steps"
            raise UserError(f"its report has impossible numbers: {numbers}")
        if self._finite and not diverged and not np.isfinite(metrics.loss):
            raise UserError("its report has a loss that is not finite, but no step at which training diverged")
        if self._finite and diverged:
            raise UserError(
                f"its loss or weights are not finite since its local step {int(metrics.bad_step)}: a smaller --lr or "
                "--clip_norm may help"
            )
        upload = wire.unpack(reply.get("upload", {}), upload, who="its upload", finite=self._finite)
        if self._finite and (names := too_large(upload)):
            raise UserError(f"its upload: {names[0]!r} has numbers that are too large for sums of squares")
        return upload, metrics

    # --- lost clients that count as untrained

    def _check_untrained(self) -> None:
        """Check that a client without samples would send back the model that it received.

        Raises:
          UserError: the strategy's clients send something else.
        """
        sent, (upload, _) = self._sent, self._answer
        shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        if "model" not in sent or "model" not in upload or shapes(sent["model"]) != shapes(upload["model"]):
            raise UserError(
                "--lost=untrained needs a strategy whose clients send back the model they received: use --lost=wait"
            )

    def _untrained(self, round: int, row: ClientRow) -> Any:
        """The upload and metrics of a client without samples: the model that it was sent, and no training.

        Raises:
          UserError: they are not finite, so the round cannot continue without the client.
        """
        row = row._replace(size=np.int32(0))
        upload, metrics = jax.device_get(self.programs["untrained"](self._constants, np.int32(round), row))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(upload) if leaf.dtype.kind == "f"):
            raise UserError(f"round {round + 1} cannot continue without client {row.client_id}: use --lost=wait")
        return upload, metrics

    def _trained_without_samples(self, constants: RunConstants, round: jax.Array, row: ClientRow) -> Any:
        constants = constants._replace(build=self.at_clients)
        memory = constants.strategy.init_memory
        if memory is not None:  # the real one is on the lost client's disk; use that before the first round
            first = memory(jax.random.fold_in(constants.key, MEMORY), row.client_id)
            row = row._replace(memory=first)
        return train_client(constants, round, row)[::2]

    def _part(self, constants: RunConstants, server: Any, client: jax.Array) -> Any:
        return part_of(self.at_clients(constants.problem), server, client)

    # --- tests of the clients' own models, each by its client

    def test(self, progress: Progress) -> Clients:
        """Test each client's own model, or the deployed model if there is only that."""
        return self._run(progress, 0)

    def finetuned(self, progress: Progress, epochs: int) -> Clients:
        """Test copies that each client first trains for some more epochs on its training samples."""
        return self._run(progress, epochs)

    def read(self, client: int, reply: Content, *, epochs: int = 0) -> Any:
        """A client's scores, checked. A value may be NaN, as the AUROC of a client with one class is; a sum may not.

        Only after ``epochs`` of fine-tuning, whose divergence is a result, may sums be anything.

        Raises:
          UserError: they are malformed, not of the samples that the client has, not finite, or impossible fractions.
        """
        member, model = self.manager.members[client], self._constants.problem.model
        finite = self._finite and not epochs
        scores = wire.unpack(reply.get("scores", {}), self._scores, who="its test", finite=finite)
        for score, size in ((scores["test"], member.test_size), (scores["validation"], member.validation_size)):
            if score.count != size:
                raise UserError(f"its test reports {score.count:g} samples, but it has {size}")
            for metric in model.task.metrics:
                value = np.atleast_1d(metric.of(score.metrics[metric.name]))
                impossible = value[(value < -ROUNDING) | (value > 1 + ROUNDING)]
                if metric.unit == "fraction" and len(impossible):
                    raise UserError(f"its test reports {metric.name} {impossible[0]:g}, which is not between 0 and 1")
        if not 0 <= scores["architecture"] < len(model.networks):
            raise UserError(f"its test is of network {scores['architecture']}, but there are {len(model.networks)}")
        return scores

    def _run(self, progress: Progress, epochs: int) -> Clients:
        round, problem, last = int(progress.round), self._constants.problem, progress.memory

        contents = {}
        for client in range(problem.num_clients):
            part = self.programs["part"](self._constants, progress.server, np.int32(client))
            key = jax.random.key_data(personal_key(self._constants.key, round, client))
            contents[client] = {
                "part": wire.pack(jax.device_get(part)),
                "key": {"key": np.asarray(key)},
                "numbers": {"last": -1 if last is None else int(last[client]), "epochs": epochs},
            }
        read = functools.partial(self.read, epochs=epochs)
        answers = self.manager.ask("evaluate", round, contents, read, wire.size_limit(self._scores))
        absent = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._scores)  # its metrics are NaN
        rows = [answers.get(client, absent) for client in range(problem.num_clients)]
        found = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        return clients_of(problem.model.task, found["test"], found["validation"], found["architecture"])


def scores_of(model: Model) -> dict[str, Any]:
    """The shapes of what a client answers to a test, see `CompiledClient.test`."""
    task, sample = model.task, model.input_shape
    outputs = jax.ShapeDtypeStruct((1, *task.outputs(sample)), np.float32)
    targets = jax.ShapeDtypeStruct((1, *task.target_shape(sample)), task.dtype)
    mask = jax.ShapeDtypeStruct((1,), np.float32)
    score = jax.eval_shape(functools.partial(score_outputs, task), outputs, targets, mask)
    return {"test": score, "validation": score, "architecture": jax.ShapeDtypeStruct((), np.int32)}


def too_large(tree: Any) -> list[str]:
    """The paths of the leaves whose sum of squares is not finite in their precision.

    A mean of such numbers may be finite, but no client can train from it.
    """

    def is_large(leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(np.sum(np.square(np.asarray(leaf))))

    with np.errstate(over="ignore", invalid="ignore"):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [
            jax.tree_util.keystr(path, simple=True, separator="/") or "tree" for path, leaf in leaves if is_large(leaf)
        ]


def _row(tree: Any, row: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[row], tree)
