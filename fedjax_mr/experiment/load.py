"""Read a run folder: configuration, results, trained networks and predictions. The dataset is not needed."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mr import files, registry
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset, FederatedData, partition_file
from fedjax_mr.data import tokens as numbers
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.federated import PartitionPlan, Public
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.personal import part_of, personal_key, personal_variables
from fedjax_mr.engine.placement import rows_of
from fedjax_mr.engine.round import Progress
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import simulator_of, task
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.experiment import Result
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import REAL_CLIENTS, MetricsRow, read_rows, read_summary
from fedjax_mr.experiment.pretrained import tokenizer_of
from fedjax_mr.experiment.run import run
from fedjax_mr.experiment.simulated_time import most_at_once
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.experiment.user_objects import UserObjects
from fedjax_mr.models import Model, Variables
from fedjax_mr.results import manifest
from fedjax_mr.results.rows import best_row


def load(
    folder: Path | str,
    *,
    model: Any = None,
    variables: Any = None,
    dataset: Dataset | None = None,
    data_dir: str | None = None,
    round: int | None = None,
    best: bool = False,
    trust: bool = False,
) -> "SavedRun":
    """Load a run from its folder. The networks are read at their first use.

    Args:
      folder: the run folder.
      model: the network, if the run was started with ``model=``.
      variables: the variables, if the run was started with ``variables=``.
      dataset: the samples, if the run was started with ``dataset=``. Needed only by `SavedRun.resume` and by the
        personal models of some strategies.
      data_dir: folder of the datasets, needed as ``dataset``. Default: that of the run.
      round: round of the checkpoint. Default: the newest.
      best: whether to load the checkpoint with the best validation accuracy (test accuracy without validation
        samples). The run must have used ``keep_best``.
      trust: whether to run the Python files that the run imported (``--import``), or their copies in the folder. Set it
        only for folders from people you trust. Not needed for code that this process has imported already.

    Raises:
      UserError: not a run folder, a folder with links, untrusted code, no checkpoint of that round, or samples that are
        not those of the run.
    """
    files.refuse_links(folder)
    config, user_objects = configuration.load_code(folder, trust=trust), UserObjects.of(dataset, model, variables)
    for argument, supplied in (("dataset", dataset), ("model", model), ("variables", variables)):
        if supplied is not None and not registry.is_supplied(name := getattr(config, argument) or ""):
            raise UserError(f"{folder} has {argument}={name}: leave out the argument {argument}")
    config = dataclasses.replace(config, dataset=user_objects.dataset_name(config.dataset))
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)
    if best:
        round = _best_round(Path(folder), round)
    elif round is not None:
        Checkpoints(Path(folder) / "checkpoints").require(round)
    return SavedRun(Path(folder), config, user_objects, round)


def _best_round(folder: Path, round: int | None) -> int:
    """The round of the best evaluation.

    Raises:
      UserError: ``round`` is set as well, there is no evaluation, or its checkpoint was not kept.
    """
    if round is not None:
        raise UserError(f"round {round} and the best round exclude each other: choose one")
    row, kept = best_row(read_rows(folder)), Checkpoints(folder / "checkpoints").rounds()
    if row is None:
        raise UserError(f"{folder} has no evaluation with a value of its first metric")
    if row["round"] not in kept:
        raise UserError(
            f"{folder} has no checkpoint of its best evaluation in round {row['round']} (checkpoints of rounds: "
            f"{', '.join(map(str, kept)) or 'none'}): train with keep_best=True"
        )
    return row["round"]


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run that is read from its folder.

    Attributes:
      folder: the run folder.
      config: the configuration of the run.
      user_objects: the user-supplied samples and networks.
      checkpoint_round: round of the checkpoint. Default: the newest.
    """

    folder: Path
    config: Config
    user_objects: UserObjects
    checkpoint_round: int | None = None

    @property
    def rows(self) -> list[MetricsRow]:
        """The evaluations, as in ``metrics.jsonl``."""
        return read_rows(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``. Raises a UserError if the run is not finished."""
        return read_summary(self.folder)

    @functools.cached_property
    def samples(self) -> Facts:
        """Shape, dtype and normalisation of the samples."""
        self._require_intact("samples.json")
        saved = Facts.read(self.folder)  # None in runs of earlier versions, which need the dataset
        return saved or Facts.of(federated_data(self.config, dataset=self.user_objects.dataset).dataset)

    @functools.cached_property
    def model(self) -> Model:
        """The network, or the `Zoo` of several."""
        if registry.is_supplied(self.config.model) and not self.user_objects.modules:
            name = registry.shown(self.config.model)
            raise UserError(
                f"the network {name} of {self.folder} was passed from Python: fmr.load({str(self.folder)!r}, model=...)"
            )
        if self.config.variables is not None and self.user_objects.variables is None:
            folder = str(self.folder)
            raise UserError(f"{folder} started from variables passed from Python: fmr.load({folder!r}, variables=...)")
        return self.user_objects.build(self.config, self._template)[1]

    @property
    def round(self) -> int:
        """The number of rounds that the networks have been trained for."""
        return int(self._progress.round)

    @functools.cached_property
    def deployed(self) -> TrainedNetwork:
        """The deployed model. Raises a UserError if the strategy has none."""
        function = self._rounds.strategy.global_model
        if function is None:
            raise UserError(
                f"{self.config.strategy} deploys no model: .personal(client) is the model of a client (--client)"
            )
        return self._trained(jax.jit(function)(self._progress.server))

    @property
    def variables(self) -> Variables:
        """The deployed model's Flax collections."""
        return self.deployed.variables

    @property
    def module(self) -> Any:
        """The user's Flax module with the variables of the deployed model; see `TrainedNetwork.module`."""
        return self.deployed.module

    def predict(self, x: Any) -> np.ndarray:
        """Predictions of the deployed model for samples [B, ...]; see `TrainedNetwork.predict`."""
        return self.deployed.predict(x)

    def calibrated(self, client: int | None = None) -> TrainedNetwork:
        """The deployed model, or that of a client, with probabilities calibrated on the validation samples.

        The deployed model is calibrated on those of all clients, a client's model on the client's own. Class weights of
        the loss are taken out (``--loss=weighted``).

        Raises:
          UserError: the run has no validation samples, or as `TrainedNetwork.calibrated`.
        """
        network = self.deployed if client is None else self.personal(client)
        federated = federated_data(self.config, dataset=self.user_objects.dataset)
        if federated.validation is None:
            raise UserError(f"{self.folder} has no validation samples for a calibration: train with --validation_share")
        kept = federated.validation
        rows = np.unique(kept.index if client is None else kept.rows(client))
        weights = getattr(task(self.config, federated).criterion, "weights", ())
        return network.calibrated(federated.dataset.x[rows], federated.dataset.y[rows], weights=weights)

    def personal(self, client: int) -> TrainedNetwork:
        """The personal model of a client.

        Raises:
          UserError: the strategy has no personal models, there is no such client, or the model depends on samples that
            are not available.
        """
        rounds, progress, count = self._rounds, self._progress, self._template.num_clients
        if rounds.strategy.personal_model is None:
            raise UserError(f"{self.config.strategy} has no personal models: use .deployed (without --client)")
        if not 0 <= client < count:
            raise UserError(f"there is no client {client}: clients have the numbers 0 to {count - 1}")
        if rounds.strategy.init_memory is not None and self._of_real_clients:
            raise UserError(f"{self.folder} is a run of real clients, who keep their personal models themselves")
        try:
            variables = self._personal(rounds, progress, client, samples=_Absent())
        except _NeedsSamplesError:
            if registry.is_supplied(self.config.dataset) and self.user_objects.dataset is None:
                raise UserError(
                    f"a client's model of {self.config.strategy} depends on the client's samples, which were passed "
                    f"from Python: fmr.load({str(self.folder)!r}, dataset=...)"
                ) from None
            federated = federated_data(self.config, dataset=self.user_objects.dataset)
            variables = self._personal(self._built(federated), progress, client)
        return self._trained(variables, client=client)

    def resume(self, *, dataset: Dataset | None = None, model: Any = None, variables: Any = None) -> Result:
        """Resume the run from its newest checkpoint and return the result.

        Args:
          dataset: the samples of a run that was started with ``dataset=``. Default: those passed to `load`.
          model: the network of a run that was started with ``model=``. Default: that passed to `load`.
          variables: those of a run that was started with ``variables=``. Default: those passed to `load`.

        Raises:
          UserError: as in `run`, which may also raise its other errors.
        """
        config = dataclasses.replace(self.config, run_dir=str(self.folder), resume=True, overwrite=False)
        modules = self.user_objects.modules or None
        return run(
            config,
            dataset=self.user_objects.dataset if dataset is None else dataset,
            model=modules if model is None else model,
            variables=self.user_objects.variables if variables is None else variables,
        )

    def export(self, folder: Path | str, *, client: int | None = None, merged: bool = False) -> Path:
        """Export the deployed model, or that of a client, with `TrainedNetwork.export`. Return the folder."""
        network = self.deployed if client is None else self.personal(client)
        folder, tokenizer = network.export(folder, merged=merged), tokenizer_of(self.config)
        if tokenizer not in (None, numbers.BYTES) and network.has_format:
            numbers.save(tokenizer, folder)
        return folder

    def generate(
        self,
        prompt: str,
        *,
        client: int | None = None,
        chat: bool = False,
        tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Write a text after a prompt with the deployed model, or that of a client; see `models.generation.generate`.

        Args:
          prompt: beginning of the text.
          client: number of a client with a personal model. Default: the deployed model.
          chat: whether the prompt is written in the chat template of the tokenizer.
          tokens: largest number of new tokens.
          temperature: 0 takes the most probable token.
          top_p: share of the most probable tokens that are drawn from.
          seed: that of the draws.

        Raises:
          UserError: the network writes no texts, its tokens are hashes of words, or a number is out of range.
        """
        network = self.deployed if client is None else self.personal(client)
        return network.generate(
            prompt, tokenizer_of(self.config), chat=chat, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed
        )

    # --- parts needed to read a checkpoint

    @property
    def _of_real_clients(self) -> bool:
        """Whether this is a run of real clients, who keep their memories themselves."""
        return (self.folder / REAL_CLIENTS).exists()

    def _require_intact(self, name: str) -> None:
        """Check that a file about the data is unchanged."""
        if manifest.fault(self.folder, manifest.read_run(self.folder), name):
            raise UserError(f"{self.folder / name} is damaged or missing: resuming the run (--resume) writes it again")

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints")

    @functools.cached_property
    def _plan(self) -> PartitionPlan:
        self._require_intact("partition.npz")
        return partition_file.read(self.folder / "partition.npz")

    @functools.cached_property
    def _template(self) -> FederatedData:
        """The federation without its samples: clients of the true sizes, with zeros that are never read."""
        members = np.flatnonzero(~self._plan.held_out)
        sizes = self._plan.train.sizes[members]
        validation = self._plan.validation.sizes[members]
        public = None
        if count := len(self._plan.public):
            placeholder = self.samples.dataset(count)
            x, y = np.zeros((count, *self.samples.shape), self.samples.dtype), placeholder.y
            public = Public(x, y if self.config.public_labels else None)
        rows = self.samples.dataset(max(1, int(sizes.sum())))
        return FederatedData.of_sizes(rows, sizes, validation_sizes=validation, public=public)

    @functools.cached_property
    def _rounds(self) -> Rounds:
        return self._built(self._template)

    def _built(self, federated: FederatedData) -> Rounds:
        # Only shapes matter here. They do not depend on the initial networks, so those runs may be missing.
        config = dataclasses.replace(
            self.config, architectures_from=(), devices=1, lanes=1, memory="device", data_placement="device"
        )
        set_up_jax(devices=None, cohort_size=most_at_once(config))
        return simulator_of(config, federated, self.model).rounds

    @functools.cached_property
    def _progress(self) -> Progress:
        shapes = self._rounds.shapes(kept=self._checkpoints.kept_memories(self.checkpoint_round))
        if shapes.memory is not None and self._of_real_clients:  # the server only stores a round number per client
            shapes = shapes._replace(memory=jax.ShapeDtypeStruct((self._template.num_clients,), np.int32))
        return self._checkpoints.restore_run(shapes, self.checkpoint_round, model=self.model)[0]

    def _personal(self, rounds: Rounds, progress: Progress, client: int, *, samples: Any = None) -> Variables:
        """The personal model of a client, in the common form of all networks (`Model.unpack`).

        Args:
          rounds: the rounds of the run.
          progress: the progress of the checkpoint.
          client: number of the client.
          samples: samples in place of those of ``rounds``.
        """
        strategy = rounds.constants.strategy
        key = personal_key(rounds.constants.key, progress.round, client)
        data = rounds.constants.client(client)
        if samples is not None:
            data = data._replace(samples=samples)
        memory = jax.tree.map(lambda leaf: leaf[0], rows_of(progress.memory, np.array([client])))
        part = lambda server: part_of(strategy, server, client)
        personal = jax.jit(lambda server, memory: personal_variables(strategy, part(server), memory, data, key))
        return personal(progress.server, memory)

    def _trained(self, variables: Variables, *, client: int | None = None) -> TrainedNetwork:
        origin = {"strategy": self.config.strategy, "round": self.round, "client": client}
        return TrainedNetwork.of(self.model, variables, self.samples, **origin)


class _NeedsSamplesError(Exception):
    """A personal model depends on the client's samples."""


class _Absent:
    """Placeholder for missing samples. Raises when they are used."""

    def __getattr__(self, name: str) -> Any:
        raise _NeedsSamplesError
