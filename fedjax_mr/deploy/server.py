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
import numpy as np

from fedjax_mr import registry
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import values_of
from fedjax_mr.deploy.asynchronous import AsynchronousClients
from fedjax_mr.deploy.client_manager import ClientManager, ClientPolicy, name_of_run
from fedjax_mr.deploy.protocol import RemoteData, RunManifest, agreement, network_of, remote_data
from fedjax_mr.deploy.remote import RemoteClients, too_large
from fedjax_mr.deploy.samples import ServerSamples
from fedjax_mr.deploy.transport import Messenger
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.engine.simulator import require_task
from fedjax_mr.errors import DivergedError, Interrupted, TakenError, UserError
from fedjax_mr.experiment import guarantee
from fedjax_mr.experiment.experiment import Experiment, Result, needs_tests_of_clients
from fedjax_mr.experiment.folder import RunFolder, run_state
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import RunLoop
from fedjax_mr.experiment.simulated_time import clients_may_be_late
from fedjax_mr.results.rows import metric_of
from fedjax_mr.settings import field
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.tasks.losses import Weighted
from fedjax_mr.terminal.messages import flags_in_errors


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
        "The server's .npz file: the test set, the public set if there is one, and the kind of all samples; or its CSV "
        "file, with --target. Default: data/server.npz in the app's folder",
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
    weights = configuration.loss_settings(config)
    if isinstance(weights, Weighted) and weights.loss_weights == "balanced":
        raise UserError("real clients do not tell their classes: set --loss_weights to one weight per class")
    if config.holdout_clients:
        raise UserError("all real clients train: remove --holdout_clients")
    if config.fleet is not None or clients_may_be_late(config):
        raise UserError("real clients have real clocks: remove --fleet, --deadline and --over_select")
    if config.mode == "async" and config.refill != "update":
        raise UserError("real clients start after an update of the server: remove --refill")
    if config.attack != "none":
        raise UserError("attacks are simulated only: remove --attack")
    if config.dp_clip is not None and config.dp_noise_on == "mean":  # also excludes --dp_poisson
        raise UserError(
            "the server sees every upload of real clients, not only their mean: remove --dp_noise_on and --dp_poisson"
        )
    if config.dp_seed is not None:
        raise UserError("real clients draw their noise from secrets of their own: remove --dp_seed")
    if config.dp_target_epsilon is not None:
        raise UserError(
            "real clients need to know their noise: find it in a simulation, and replace --dp_target_epsilon by "
            "--dp_noise"
        )


def run(messenger: Messenger, config: Config, options: ServerOptions) -> Result:
    """Run a federation of real clients, or resume it, and return its result. See `serve`."""
    check_deployable(config)
    assert options.server_data is not None
    samples = ServerSamples.read(options.server_data, config)
    set_up_jax(devices=1, cohort_size=1)
    model = network_of(config, samples.facts)
    require_task(config.strategy, model.task)
    agreed = agreement(config, model)
    if not samples.divided:
        config = _with_own_samples(config, options.server_data)
    config = dataclasses.replace(
        config, devices=1, lanes=1, memory="device", data_placement="device", checkpoint_every=1
    )
    if config.run_dir is not None and run_state(config.run_dir) != "new":
        config = dataclasses.replace(config, resume=not config.overwrite)
    try:
        folder = RunFolder.open(config)
    except TakenError as error:
        raise TakenError(
            f"{error}; if it is an earlier run, which goes on in the SuperLink: flwr ls FEDERATION shows its RUN_ID, "
            "flwr log RUN_ID FEDERATION follows it, flwr stop RUN_ID FEDERATION ends it"
        ) from None
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(folder.close)
        manifest = RunManifest(
            (name_of_run(folder.path) if folder.resumed else None) or secrets.token_hex(8),
            samples.facts,
            agreed,
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
        kind = AsynchronousClients if config.mode == "async" else RemoteClients
        experiment = RemoteExperiment(config, kind(config, federated, model, manager), folder)
        (end,) = RunLoop([experiment]).run()
    if isinstance(end, DivergedError):
        raise end
    return end


def _with_own_samples(config: Config, server_data: str) -> Config:
    """The configuration of a run whose clients have their own samples, as the run folder records it.

    The dataset is the server's file, and the clients are natural ones. The flags about data and partition, and their
    defaults, describe only the files that ``divide`` writes.
    """
    return dataclasses.replace(config, dataset=server_data, partition="natural", partition_file=None)


def _say(row: Mapping[str, Any]) -> None:
    """Print an evaluation to the log of the run."""
    metric = metric_of([dict(row)])
    value, loss = ("none" if row[name] is None else f"{row[name]:.4f}" for name in (metric.name, "loss"))
    print(f"fedjax-mr: round {row['round']}: {metric.title} {value}, loss {loss}", flush=True)


class RemoteExperiment(Experiment):
    """A run of real clients, whose folder also records the clients."""

    knows_cohorts = True

    def __init__(self, config: Config, clients: RemoteClients, folder: RunFolder) -> None:
        """Set up the run.

        Raises:
          UserError: clients must test their own models, but no client has test samples.
        """
        federated = clients.simulator.federated
        tests = needs_tests_of_clients(config, clients.simulator.rounds)
        if tests and not (federated.test and len(federated.test.index)):
            raise UserError("no client has test samples (test_x and test_y in its file)")
        super().__init__(config, clients.simulator, folder, on_row=_say)
        self._manager, self._clients = clients.manager, clients

    def start(self) -> tuple[Progress, int]:
        progress, done = super().start()
        self._large_at_start = too_large(jax.device_get(progress.server))  # such as an infinite norm
        self._clients.resume(self.folder.path, done)
        return progress, done

    def record_due(self, progress: Progress, report: Report, done: int, *, stop: bool = False) -> None:
        """As `Experiment.record_due`, but a state from which no client could train is not saved.

        Raises:
          UserError: the server's state has become too large or not finite.
        """
        found = [] if self.config.allow_nonfinite else too_large(jax.device_get(progress.server))
        if grown := [name for name in found if name not in self._large_at_start]:
            raise UserError(
                f"round {done}: the server's state has numbers that are not finite or too large ({grown[0]}), so it is "
                f"not saved; the checkpoint of round {self.checkpoints.latest()} in {self.folder.path} is kept "
                "(--robust or --dp_clip bounds what one client can do)"
            )
        super().record_due(progress, report, done, stop=stop)

    def _begin(self) -> None:
        super()._begin()
        self._manager.save(self.folder.path)

    def _partition_counts(self) -> np.ndarray:
        counts = self.federated.counts if isinstance(self.federated, RemoteData) else None
        return self.federated.sizes[:, None] if counts is None else counts
