"""The server of real clients: an ordinary run whose clients are on other machines.

The rounds, evaluations, checkpoints and pictures are those of a simulation; `RemoteClients` asks real clients to train
and to test their own models, where a simulation does so on its devices. A checkpoint is written after every round, and
the same command resumes from it.
"""

import contextlib
import dataclasses
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import registry
from fedjax_mr.deploy import relay, wire
from fedjax_mr.deploy.client_manager import ClientManager, ClientPolicy, name_of_run
from fedjax_mr.deploy.protocol import RemoteData, RunManifest, agreement, network_of, remote_data
from fedjax_mr.deploy.samples import ServerSamples
from fedjax_mr.deploy.transport import Messenger
from fedjax_mr.deploy.wire import Content
from fedjax_mr.engine.clients import positions
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.local import Score
from fedjax_mr.engine.personal import Clients, clients_of, part_of, personal_key
from fedjax_mr.engine.program import Programs
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
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import guarantee
from fedjax_mr.experiment.build import Chosen, build_chosen, simulates_time, simulator_of, strategy_of
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.experiment import Experiment, Result, needs_tests_of_clients
from fedjax_mr.experiment.folder import RunFolder, run_state
from fedjax_mr.experiment.messages import flags_in_errors
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import Interrupted, RunLoop
from fedjax_mr.experiment.settings import values_of
from fedjax_mr.models import Model
from fedjax_mr.strategies import STRATEGIES, Problem, Strategy
from fedjax_mr.strategies.base import Info, LayerExchange
from fedjax_mr.strategies.hyper import LARGEST_INT32, field


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of the server, in addition to the configuration of the run. ``new`` writes them into the app."""

    lost: str = field(
        "wait",
        "Reaction to a client whose reply is late or invalid: wait for it and ask again, continue with it untrained "
        "(it counts as a client without samples), or stop",
        choices=("wait", "untrained", "stop"),
    )
    reply_timeout: float = field(600.0, "Time limit for one reply of a client", unit="seconds", low=0, open_low=True)
    node_keys: bool = field(
        False, "The SuperLink authenticates nodes. A client's number belongs to the node key that first used it"
    )
    server_data: str | None = field(
        None,
        "The server's .npz file: the test set, the public set if there is one, and the kind of all samples",
        path=True,
    )

    @classmethod
    def of(cls, run_settings: Mapping[str, Any]) -> "ServerOptions":
        """Read the options from the configuration of the app.

        Raises:
          UserError: a value is invalid, or the file of the server is missing.
        """
        names = [each.name for each in dataclasses.fields(cls)]
        named = {name: run_settings.get(name.replace("_", "-")) for name in names}
        options = cls(**{name: value for name, value in named.items() if value is not None})
        for each, value in values_of(options):
            each.check(value)
        if options.server_data is None:
            raise UserError(
                "the app has no file of the server: set --server_data, or server-data in its pyproject.toml"
            )
        return options


def serve(messenger: Messenger, run_settings: Mapping[str, Any]) -> None:
    """Run a federation of real clients, or resume it.

    Args:
      messenger: sends messages to the nodes.
      run_settings: configuration of the app: ``flags`` for the run, and the options of `ServerOptions`.

    Raises:
      UserError: bad input, or clients are missing or lost and `ClientPolicy` does not allow it.
      DivergedError: a loss or weight is not finite.
    """
    config = configuration.parse(shlex.split(str(run_settings["flags"])))
    try:
        with flags_in_errors(config.strategy):
            run(messenger, resolve(config).config, ServerOptions.of(run_settings))
    except Interrupted as stop:  # Flower only reports subclasses of Exception
        raise UserError(str(stop)) from None


def check_deployable(config: Config) -> None:
    """Check that real clients can run a configuration.

    Raises:
      UserError: they cannot.
    """
    if reason := STRATEGIES[config.strategy].only_simulated:
        raise UserError(f"{config.strategy} cannot run on real clients: {reason}")
    if registry.is_supplied(config.dataset) or registry.is_supplied(config.model):
        raise UserError("networks and samples that were passed in Python cannot run on real clients: use --import")
    if not config.clients:
        raise UserError("real clients need --clients, the number of clients")
    if config.holdout_clients:
        raise UserError("all real clients train: remove --holdout_clients")
    if simulates_time(config):
        raise UserError("real clients have real clocks: remove --mode, --fleet, --deadline and --over_select")
    if config.attack != "none":
        raise UserError("attacks are simulated only: remove --attack")
    if config.dp_clip is not None and config.dp_noise_on == "mean":  # also excludes --dp_poisson
        raise UserError(
            "the server sees every upload of real clients, not only their mean: remove --dp_noise_on and --dp_poisson"
        )
    if config.dp_target_epsilon is not None:
        raise UserError(
            "real clients need to know their noise: find it in a simulation, and replace --dp_target_epsilon by "
            "--dp_noise"
        )


def run(messenger: Messenger, config: Config, options: ServerOptions) -> Result:
    """Run a federation of real clients, or resume it, and return its result. See `serve`."""
    check_deployable(config)
    assert options.server_data is not None
    samples = ServerSamples.read(options.server_data)
    set_up_jax(devices=1, cohort_size=1)
    config = dataclasses.replace(
        config, devices=1, lanes=1, memory="device", data_placement="device", checkpoint_every=1
    )
    if config.run_dir is not None and run_state(config.run_dir) != "new":
        config = dataclasses.replace(config, resume=not config.overwrite)
    folder = RunFolder.open(config)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(folder.withdraw)
        model = network_of(config, samples.facts)
        manifest = RunManifest(
            (name_of_run(folder.path) if folder.resumed else None) or secrets.token_hex(8),
            samples.facts,
            agreement(config, model),
            label_counts=STRATEGIES[config.strategy].label_counts,
        )
        policy = ClientPolicy(options.lost, options.reply_timeout, config.join_timeout, options.node_keys)
        manager = ClientManager(messenger, manifest, num_clients=config.clients, policy=policy)
        if folder.resumed:
            manager.load(folder.path)
        cohort = f"{config.cohort} of {config.clients} clients a round"
        print(f"fedjax-mr: {config.strategy}, {cohort}, {config.rounds} rounds; results in {folder.path}", flush=True)
        federated = remote_data(manager.wait_for_all(), samples)
        guarantee.complete(config, federated, model)  # raises if clipping and noise do not cover what clients upload
        experiment = RemoteExperiment(config, RemoteClients(config, federated, model, manager), folder)
        (end,) = RunLoop([experiment]).run()
    if isinstance(end, DivergedError):
        raise end
    return end


def _say(row: Mapping[str, Any]) -> None:
    """Print an evaluation to the log of the run."""
    accuracy, loss = ("none" if row[name] is None else f"{row[name]:.4f}" for name in ("accuracy", "loss"))
    print(f"fedjax-mr: round {row['round']}: accuracy {accuracy}, loss {loss}", flush=True)


class RemoteExperiment(Experiment):
    """A run of real clients, whose folder also records the clients."""

    knows_cohorts = True

    def __init__(self, config: Config, clients: "RemoteClients", folder: RunFolder) -> None:
        """Set up the run.

        Raises:
          UserError: clients must test their own models, but no client has test samples.
        """
        federated = clients.simulator.federated
        tests = needs_tests_of_clients(config, clients.simulator.rounds)
        if tests and not (federated.test and len(federated.test.index)):
            raise UserError("no client has test samples (test_x and test_y in its file)")
        super().__init__(config, clients.simulator, folder, on_row=_say)
        self._manager = clients.manager

    def _begin(self) -> None:
        super()._begin()
        self._manager.save(self.folder.path)

    def _partition_counts(self) -> np.ndarray:
        counts = self.federated.counts if isinstance(self.federated, RemoteData) else None
        return self.federated.sizes[:, None] if counts is None else counts


# --- The clients -----------------------------------------------------------------------------------------------------


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
        self.programs = Programs()
        self.at_clients = strategy_of(config)
        self.simulator = simulator_of(config, federated, model, strategy=self._at_server, key=None, remote=self)
        self._constants, problem = self.simulator.rounds.constants, self.simulator.problem
        self.exchange = self.at_clients(problem).exchange
        if self.exchange is not None and self.exchange.before_training:
            raise UserError(
                "real clients only exchange layers before the upload: set --fedmr_secure_when=before_upload"
            )
        if self.exchange is not None and manager.policy.lost == "untrained":
            raise UserError("an exchange of layers needs all clients of the round: use --lost=wait or --lost=stop")
        self._sent, self._answer = jax.eval_shape(self._one_client, self._constants)
        score = jax.eval_shape(lambda: Score(*jnp.zeros(3)))
        self._scores = {"test": score, "validation": score, "architecture": jax.ShapeDtypeStruct((), np.int32)}
        if manager.policy.lost == "untrained":
            self._check_untrained()
        kept = np.zeros(federated.num_clients, int) if federated.validation is None else federated.validation.sizes
        memory_key = jax.random.key_data(jax.random.fold_in(self._constants.key, MEMORY))
        numbers = {"sizes": federated.sizes.astype(np.int32), "validation_sizes": kept.astype(np.int32)}
        numbers |= {"architectures": np.asarray(problem.architectures), "memory_key": np.asarray(memory_key)}
        public = {} if federated.public is None else {"x": federated.public.x}
        if federated.public is not None and federated.public.y is not None:
            public["y"] = np.asarray(federated.public.y, np.int32)
        manager.begin({"federation": numbers, "public": public})

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

        Raises:
          UserError: they are malformed or not finite.
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
        if diverged and self._finite and self.manager.policy.lost == "untrained":
            raise UserError(f"its loss or weights are not finite since its local step {int(metrics.bad_step)}")
        finite = self._finite and not diverged  # a client that reports divergence ends the run, as in a simulation
        return wire.unpack(reply.get("upload", {}), upload, who="its upload", finite=finite), metrics

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

        def program(constants: RunConstants, round: jax.Array, row: ClientRow) -> Any:
            constants = constants._replace(build=self.at_clients)
            memory = constants.strategy.init_memory
            if memory is not None:  # the real one is on the lost client's disk; use that before the first round
                first = memory(jax.random.fold_in(constants.key, MEMORY), row.client_id)
                row = row._replace(memory=first)
            return train_client(constants, round, row)[::2]

        row = row._replace(size=np.int32(0))
        upload, metrics = jax.device_get(
            self.programs.call("untrained", program, self._constants, np.int32(round), row)
        )
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(upload) if leaf.dtype.kind == "f"):
            raise UserError(f"round {round + 1} cannot continue without client {row.client_id}: use --lost=wait")
        return upload, metrics

    # --- tests of the clients' own models, each by its client

    def test(self, progress: Progress) -> Clients:
        """Test each client's own model, or the deployed model if there is only that."""
        return self._run(progress, 0)

    def finetuned(self, progress: Progress, epochs: int) -> Clients:
        """Test copies that each client first trains for some more epochs on its training samples."""
        return self._run(progress, epochs)

    def read(self, client: int, reply: Content) -> Any:
        """A client's scores, checked.

        Raises:
          UserError: they are malformed, or of more samples than the client has.
        """
        member, networks = self.manager.members[client], len(self._constants.problem.model.networks)
        scores = wire.unpack(reply.get("scores", {}), self._scores, who="its test", finite=False)
        for score, size in ((scores["test"], member.test_size), (scores["validation"], member.validation_size)):
            if not 0 <= score.correct <= score.count <= size:
                raise UserError(f"its test reports {score.correct:g} of {score.count:g} samples, but it has {size}")
        if not 0 <= scores["architecture"] < networks:
            raise UserError(f"its test is of network {scores['architecture']}, but there are {networks}")
        return scores

    def _run(self, progress: Progress, epochs: int) -> Clients:
        round, problem, last = int(progress.round), self._constants.problem, progress.memory

        def program(constants: RunConstants, server: Any, client: jax.Array) -> Any:
            return part_of(self.at_clients(constants.problem), server, client)

        contents = {}
        for client in range(problem.num_clients):
            part = self.programs.call("part", program, self._constants, progress.server, np.int32(client))
            key = jax.random.key_data(personal_key(self._constants.key, round, client))
            contents[client] = {
                "part": wire.pack(jax.device_get(part)),
                "key": {"key": np.asarray(key)},
                "numbers": {"last": -1 if last is None else int(last[client]), "epochs": epochs},
            }
        answers = self.manager.ask("evaluate", round, contents, self.read)
        absent = jax.tree.map(
            lambda leaf: np.zeros((), leaf.dtype), self._scores
        )  # no samples tested, so the accuracy is NaN
        rows = [answers.get(client, absent) for client in range(problem.num_clients)]
        found = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        return clients_of(found["test"], found["validation"], found["architecture"])


def _row(tree: Any, row: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[row], tree)
