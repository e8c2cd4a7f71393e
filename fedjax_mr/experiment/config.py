"""The configuration of a run: one dataclass, the checks across its fields, its flags, its copy in the run folder."""

import dataclasses
import functools
import hashlib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.data import SOURCES, files
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import imports, settings
from fedjax_mr.experiment.settings import Owner, Setting
from fedjax_mr.models import MODELS
from fedjax_mr.registry import USER_OBJECTS, is_supplied
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.hyper import LARGEST_BATCH, LARGEST_INT32, field

COMMAND = "python -m fedjax_mr.main"
LOGS = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""The values of ``--log``, each also an extra of this package, and the package that each needs."""
GROUPS = ("Data", "Partition", "Model", "Local training", "Federation", "Evaluation and records", "Engine")

_data, _partition, _model, _training, _federation, _evaluation, _engine = (
    functools.partial(field, group=group, affects_results=group != "Engine") for group in GROUPS
)
_records = functools.partial(_evaluation, affects_results=False)


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of a run; each field but ``hyper`` is a flag. The defaults are the main job.

    ``python -m fedjax_mr.main --help=all`` explains the fields. A default without a source is our choice.

    Attributes:
      hyper: the chosen strategy's own dataclass of settings; None takes its defaults.
    """

    # Of each setting: the default and the help, then the facts.
    # fmt: off
    dataset: str = _data("digits", "data set by name, or the path of one's own .npz file", names=SOURCES, path=True)
    data_dir: str | None = _data(
        None, "folder that holds the data sets; none: each source's usual place", path=True, affects_results=False)
    label_mode: str = _data(
        "fine", "which labels of CIFAR-100: 100 classes (fine) or 20 (coarse)", choices=("fine", "coarse"),
        source="the data set's own labels; the FedMR authors' code trains on the coarse ones")
    offline: bool = _data(False, "never use the network, not even to look for data", affects_results=False)
    min_samples_per_client: int = _data(
        0, "leave out natural clients with fewer samples, training and test together",
        unit="samples", low=0, source="all clients; the FedMR papers' FEMNIST: 100")

    partition: str = _partition(
        "dirichlet", "how the training samples are divided among the clients", source="KDD'24", names=PARTITIONS)
    alpha: float = _partition(
        0.5, "concentration of the Dirichlet distribution: the smaller, the more the clients' labels differ",
        low=0, open_low=True, source="KDD'24, the middle of its three settings")
    clients: int = _partition(
        20, "N, how many clients train; 0: every natural client, or all of --partition_file, where this is the default "
        "of the flag", unit="clients", low=0, source="our choice")
    partition_seed: int | None = _partition(
        None, "seed of the partition alone; none: the same as --seed", low=0, high=LARGEST_INT32)
    alpha_size: float = _partition(
        10.0, "dirichlet_size: concentration of the sizes", low=0, open_low=True, source="FedMe's code")
    shards_per_client: int = _partition(
        2, "shards: label shards of each client", unit="shards", low=1, source="McMahan et al. 2017")
    shard_size: int | None = _partition(
        None, "shards: size of each; none: no sample stays unused", unit="samples", low=1, source="pFedHR's code: 225")
    classes_per_client: int = _partition(
        2, "classes: different classes of each client", unit="classes", low=1, source="pFedHR")
    quantity_power: float = _partition(
        1.0, "quantity: the r-th largest client has about r^-power samples", low=0, source="our choice")
    partition_file: str | None = _partition(
        None, "partition.npz of a run folder, which replaces all other settings of this group, or a JSON file of the "
        "FedMR authors, which replaces --partition", path=True)
    holdout_clients: int = _partition(
        0, "clients beside the N that never train; the deployed model, if the method has one, is also tested on them",
        unit="clients", low=0, source="our choice")
    validation_share: float = _partition(
        0.0, "fraction of its training samples that a client keeps for validation",
        low=0, high=0.9, source="FedMR; FedMe: 0.2 (CIFAR-10), 0.3 (FEMNIST, Shakespeare)")
    client_test_share: float = _partition(
        0.0, "fraction of its samples that becomes a client's own test set; 0: its natural test samples, or a part of "
        "the test set with the client's label proportions", low=0, high=0.9, source="our choice; pFedHR: 0.2")
    public_share: float = _partition(
        0.0, "fraction of the training samples that becomes the server's public set, before the partition",
        low=0, high=0.9, source="FedMR needs none; FedMe and pFedHR: 0.1")
    public_max: int | None = _partition(
        None, "the largest public set; none: no limit", unit="samples", low=1, source="FedMe: 1000")
    public_labels: bool = _partition(True, "the public set keeps its labels", source="FedMe: off")
    public_from: str | None = _partition(
        None, "another data set, by name or .npz, whose training samples are public in place of as many of this "
        "one's, which no client then has", path=True, source="pFedHR's poster has such a comparison")

    model: str = _model(
        "cnn_digits", "network by name; several, with commas between them, for clients of different ones", names=MODELS)
    architectures: str = _model(
        "blocks", "which of several networks each client starts with: runs of clients (blocks), in turn (cyclic), at "
        "random (random), or each client's number, counted from 0, with commas between them",
        source="pFedHR: blocks of 3 clients; FedMe: each client's best one in a local run (--architectures_from)")
    architectures_from: tuple[str, ...] = _model(
        (), "run folder with clients.csv, one for each network in order (repeat the flag), or one folder that holds "
        "runs of --strategy=local with each network and the same clients, for all seeds: every client starts with the "
        "network that had the best validation accuracy (else test accuracy) on its samples; replaces --architectures",
        path=True, source="FedMe")
    init: str = _model(
        "torch", "initialisation of the network: PyTorch's defaults or what its source sets (torch), or Flax's "
        "defaults", choices=("torch", "flax"), source="the FedMR authors' code")
    norm: str = _model(
        "batch", "normalisation layers of networks that have some",
        choices=("batch", "group"), source="the FedMR authors' code")
    authors_state: bool = _model(
        False, "keep the tensors of the authors' ResNet-20 that change no output: a final BatchNorm and batch counters")
    projection: int = _model(
        0, "width of a projection head (dense, ReLU, dense) in front of the classifier; 0: none",
        low=0, high=16_384, source="MOON's paper: 256; the FedCross authors' code: none")

    augment: str = _training(
        "none", "random changes of the training images: cut out of a black frame and mirrored (crop_flip), or none",
        choices=("none", "crop_flip"), source="KDD'24: none")
    augment_pad: int = _training(
        4, "crop_flip: width of the black frame",
        unit="pixels", low=1, high=256, source="the usual one of CIFAR; FedMe's code: 2")
    local_epochs: int = _training(
        5, "passes of a client over its samples per round", unit="epochs", low=1, source="KDD'24")
    batch_size: int = _training(10, "B, samples per step", unit="samples", low=1, high=LARGEST_BATCH)
    optimizer: str = _training(
        "sgd", "the clients' optimizer; its state starts anew every round",
        choices=("sgd", "adam", "adamw"), source="KDD'24")
    lr: float = _training(0.05, "learning rate", low=0, open_low=True)
    momentum: float = _training(
        0.5, "momentum of sgd", low=0, high=1, source="the FedMR authors' code (the paper prints 0.9)")
    weight_decay: float = _training(
        0.0, "factor of the weights that is added to the gradient (sgd, adam) or decoupled from it (adamw)",
        low=0, source="the FedMR authors' code")
    clip_norm: float | None = _training(
        None, "largest L2 norm of a batch's gradient, which is scaled down to it; none: no limit",
        low=0, open_low=True, source="the FedMR authors' code")

    imports: tuple[str, ...] = _federation(
        (), "Python file, or module by its dotted name, that registers methods, networks, data sets or partitions of "
        "one's own; read before all other flags; #HASH behind it accepts that content alone, as run.flags has it",
        flag="import", path=True, affects_results=False, source="our choice")
    strategy: str = _federation("fedmr", "federated method by name", names=STRATEGIES)
    cohort: int = _federation(5, "K, how many clients train in a round", unit="clients", low=1)
    rounds: int = _federation(300, "how many rounds to train", unit="rounds", low=1)
    seed: int = _federation(0, "seed of everything that is drawn at random", low=0, high=LARGEST_INT32)

    server_optimizer: str = _federation(
        "none", "optimizer of the server, which takes a round's change of the global model (of each of the K models, "
        "for methods that keep several) as a negative gradient",
        choices=("none", "momentum", "adam", "yogi", "adagrad"),
        source="our choice; momentum: FedAvgM, Hsu et al. 2019; adam, yogi, adagrad: Reddi et al., ICLR 2021, "
               "Algorithm 2")
    server_lr: float | None = _federation(
        None, "learning rate of --server_optimizer; none: 1 (momentum; 1 - --server_momentum for methods that keep "
        "several models), 0.1 (adam, adagrad) or 0.01 (yogi)", low=0, open_low=True,
        source="Hsu et al. 2019; Flower's FedAdam, FedAdagrad, FedYogi; Reddi et al. 2021 tune it; K models: ours")
    server_momentum: float = _federation(
        0.9, "momentum's beta, and beta_1 of adam, yogi and adagrad",
        low=0, high=1, open_high=True, source="Hsu et al. 2019; Reddi et al. 2021")
    server_beta2: float = _federation(
        0.99, "beta_2 of adam and yogi", low=0, high=1, open_high=True, source="Reddi et al. 2021")
    server_tau: float = _federation(
        1e-3, "tau of adam, yogi and adagrad, which bounds how far they adapt to a weight",
        low=0, open_low=True, source="Reddi et al. 2021")

    eval_every: int = _evaluation(
        5, "rounds between two tests on the whole test set; the last round is always tested", unit="rounds", low=1)
    eval_clients: bool = _evaluation(
        False, "also test on each client's own test samples; methods with personal models always do")
    finetune_epochs: int = _evaluation(
        0, "after the last round, epochs in which each client trains a copy of its personal or the deployed model; "
        "both are then tested on its own test samples", unit="epochs", low=0, source="FedMe: 2")
    checkpoint_every: int | None = _records(
        None, "rounds between two checkpoints; none: at every evaluation", unit="rounds", low=1)
    keep_checkpoints: int = _records(
        2, "how many of the newest checkpoints stay; analyses over the rounds need many", unit="checkpoints", low=1)
    target_accuracy: float | None = _records(
        None, "report the first round that reaches this test accuracy; does not stop", unit="fraction", low=0, high=1)
    stop_at_accuracy: float | None = _evaluation(
        None, "stop at the first evaluation that reaches this test accuracy", unit="fraction", low=0, high=1)
    patience: int | None = _evaluation(
        None, "stop after so many evaluations in a row without a lower validation loss (without --validation_share "
        "test loss); none: never. --local_patience stops clients of Local-only", unit="evaluations", low=1)
    keep_best: bool = _records(
        False, "also keep the checkpoint of the best validation (without --validation_share test) accuracy")
    run_dir: str | None = _records(
        None, "folder of the run; none: one in runs/ that is named from the configuration, with a counter", path=True)
    resume: bool = _records(
        False, "go on from the last checkpoint of --run_dir, or of the newest run of the same configuration; with "
        "other --rounds it ends earlier or later")
    overwrite: bool = _records(False, "replace the run that --run_dir holds")
    compare_to: tuple[str, ...] = _records(
        (), "run folder whose curves are drawn beside this run's; repeat the flag for more", path=True)
    picture_format: str = _records("png", "format of the run's pictures", choices=("png", "pdf", "svg"))
    log: str | None = _records(
        None, "also write the metrics to another program, each an extra of this package; several with commas between "
        "them", names=LOGS)
    tensorboard: bool = _records(False, "the same as --log=tensorboard")
    progress: bool = _records(True, "show a progress bar")
    allow_nonfinite: bool = _records(False, "go on when a loss is not finite instead of stopping at that round")

    lanes: int | None = _engine(
        None, "clients that train side by side on a device; none: 1 on a CPU, elsewhere as many as its memory holds",
        unit="clients", low=1)
    memory: str = _engine(
        "auto", "where the memories of all N clients are kept; auto: on the host if they need over a third of a device",
        choices=("auto", "device", "host"))
    data_placement: str = _engine(
        "auto", "where the clients' samples are kept; host: the cohort's are sent while the round before is trained, "
        "each client filled up to the largest; auto: on the host if they need over a third of a device",
        choices=("auto", "device", "host"))
    devices: int | None = _engine(
        None, "devices that share the clients, of all processes together; none: the smaller of cores and --cohort on "
        "a CPU, all accelerators", unit="devices", low=1, high=65_536)
    coordinator: str | None = _engine(
        None, "host:port of process 0 when several processes share a run; none: as SLURM, Open MPI, Kubernetes or "
        "Cloud TPU say, otherwise one process")
    num_processes: int | None = _engine(
        None, "how many processes share the run; 1: this one is alone, whatever the environment says",
        unit="processes", low=1, high=65_536)
    process_id: int | None = _engine(None, "number of this process, from 0", low=0)
    join_timeout: int = _engine(300, "how long to wait for the other processes", unit="seconds", low=1, high=10**6)
    # fmt: on

    hyper: Any = None

    @property
    def networks(self) -> list[str]:
        """The names in ``model``."""
        return self.model.split(",")

    @property
    def logs(self) -> list[str]:
        """The programs that the metrics are also written to: the names in ``log``, and ``tensorboard``."""
        names = self.log.split(",") if self.log is not None else []
        return list(dict.fromkeys([*names, *(["tensorboard"] if self.tensorboard else [])]))


# --- The settings of a run -------------------------------------------------------------------------------------------


def hyper(config: Config) -> Any:
    """Return the chosen strategy's settings: the configuration's, or the strategy's defaults (None if it has none).

    Raises:
      UserError: the strategy is unknown.
    """
    if config.hyper is not None:
        return config.hyper
    owner = _hyper_type(config.strategy)
    return None if owner is None else owner()


def _hyper_type(strategy: str) -> type | None:
    """Return the dataclass of a strategy's own settings, or None if it has none."""
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    return STRATEGIES[strategy].hyper


def _known(strategies: Collection[str] | None = None) -> Iterator[Setting]:
    """Yield the settings of the configuration, then those of the given strategies (None: of all)."""
    yield from settings.settings_of(Config)
    for name, row in STRATEGIES.items():
        if strategies is None or name in strategies:
            yield from settings.settings_of(row.hyper, f"{name}_")


def setting_values(config: Config) -> Iterator[tuple[Setting, Any]]:
    """Yield each setting of a run with its value; those of the strategy come last."""
    yield from settings.values_of(config)
    known = config.hyper is not None or config.strategy in STRATEGIES  # not so in the folder of somebody's own method
    yield from settings.values_of(hyper(config) if known else None, f"{config.strategy}_")


def _build(values: Mapping[str, Any]) -> Config:
    """Return the configuration that has the given values, by flag; an unknown strategy has no settings of its own."""
    strategy = values["strategy"]
    owner = STRATEGIES[strategy].hyper if strategy in STRATEGIES else None
    own = None if owner is None else settings.build(owner, values, f"{strategy}_")
    return dataclasses.replace(settings.build(Config, values), hyper=own)


# --- Flags -----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration that command-line flags describe (without the program's name).

    Flags of strategies other than the chosen one are read and ignored, so that methods can share flag files.

    Raises:
      UserError: an unknown flag, a missing flag file, a value that is no number; ranges are `validate`'s concern.
    """
    return _read(arguments)[0]


def parse_command(arguments: Sequence[str], own: type[Owner]) -> tuple[Config, Owner]:
    """Return the configuration and the settings of a command that has flags of its own beside it.

    Args:
      arguments: the flags, without the program's name.
      own: the command's dataclass of settings, declared by `field`.

    Raises:
      UserError: as `parse`.
    """
    config, values = _read(arguments, settings.settings_of(own))
    return config, settings.build(own, values)


def read_imports(arguments: Sequence[str]) -> None:
    """Import what the flags name by ``--import``, so that the registries have all names.

    Raises:
      UserError: a missing flag file, or as `imports.load`.
    """
    imports.load(settings.given(arguments, "import"))


def _read(arguments: Sequence[str], own: Sequence[Setting] = ()) -> tuple[Config, Mapping[str, Any]]:
    """Return the configuration that flags describe, and all values by flag.

    Clients that have a number of their own, natural ones or a partition file's, are all there by default.
    """
    read_imports(arguments)
    unset = lambda setting: dataclasses.replace(setting, default=None) if setting.flag == "clients" else setting
    values = settings.parse(arguments, [*map(unset, _known()), *own])
    if values["clients"] is None:
        values["clients"] = 0 if values["partition"] == "natural" or values["partition_file"] else Config.clients
    return _build(values), values


def flag_names(strategies: Collection[str] | None = None) -> list[str]:
    """Return the flags that decide about runs of these strategies (None: all); others name folders and the like."""
    return [setting.flag for setting in _known(strategies) if setting.info.affects_results]


# --- The copy in the run folder --------------------------------------------------------------------------------------

# Where a run is kept and which process this is are no part of it: a flag file that repeats the run leaves these out.
_ABOUT_THIS_TIME = ("run_dir", "resume", "overwrite", "coordinator", "num_processes", "process_id")


def to_json(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, flag by flag."""
    return {setting.flag: setting.plain(value) for setting, value in setting_values(config)}


def to_flags(config: Config) -> list[str]:
    """Return the flags that make this configuration again, in another run folder."""
    kept = ((setting, value) for setting, value in setting_values(config) if setting.flag not in _ABOUT_THIS_TIME)
    return [line for setting, value in kept for line in setting.as_flags(value)]


def needed_objects(config: Config) -> str:
    """The arguments of `run` that a configuration requires, such as ``dataset=..., model=...``; "" if none."""
    return ", ".join(f"{name}=..." for name in USER_OBJECTS if is_supplied(getattr(config, name)))


def save(config: Config, folder: Path | str) -> None:
    """Write the re-runnable ``run.flags``, by which a run folder is known, and then ``config.json`` into a folder."""
    folder = Path(folder)
    how = f"{COMMAND} --flagfile={shlex.quote(str(folder / 'run.flags'))}"
    if needed := needed_objects(config):  # no flag can stand for them
        how = f"In Python: fmr.run(config, {needed}). This file alone is refused, because it cannot hold them."
    lines = [f"# {how}", *to_flags(config)]
    with files.atomic_write(folder / "run.flags") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    imports.keep(config.imports, folder / imports.FOLDER)
    with files.atomic_write(folder / "config.json") as path:
        path.write_text(json.dumps(files.sealed(to_json(config)), indent=2) + "\n", encoding="utf-8")


def load(folder: Path | str) -> Config:
    """Return the configuration that a run folder was made with; settings that it lacks have their defaults.

    The code of somebody's own method is not needed: its settings are those that the folder names.

    Raises:
      UserError: the folder holds no readable ``config.json``.
    """
    path = Path(folder) / "config.json"
    try:
        values = files.unsealed(files.parse_json(files.read_text(path)))
        config = _build(values)
        if config.strategy not in STRATEGIES:
            common = {setting.flag for setting in settings.settings_of(Config)}
            others = {flag: value for flag, value in values.items() if flag not in common}
            config = dataclasses.replace(config, hyper=settings.recorded(others, f"{config.strategy}_"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a run folder: it has no config.json") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    known = {setting.flag for setting, _ in setting_values(config)}
    if unknown := [flag for flag in values if flag not in known]:
        raise UserError(f"{path} has settings that this version does not know: {', '.join(unknown)}")
    try:
        for setting, value in setting_values(config):
            setting.check(value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def load_code(folder: Path | str, *, trust: bool = False) -> Config:
    """Return the configuration of a run folder after importing the code that it needs, if ``trust`` allows it.

    Raises:
      UserError: as `load` and `imports.load_recorded`.
    """
    imports.load_recorded(load(folder).imports, Path(folder) / imports.FOLDER, trust=trust)
    return load(folder)


def differences(config: Config, saved: Config) -> list[str]:
    """Return, as ``lr: 0.1 (saved 0.05)``, the settings that can change results and differ."""
    ours, theirs = decisive(config), decisive(saved)
    return [
        f"{flag}: {ours.get(flag, '-')} (saved {theirs.get(flag, '-')})"
        for flag in dict.fromkeys((*ours, *theirs))
        if ours.get(flag, "-") != theirs.get(flag, "-")
    ]


def digest(config: Config) -> str:
    """Return a short hash of all settings that can change results."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()[:8]


def decisive(config: Config) -> dict[str, Any]:
    """Return, as plain values by flag, the settings that can change results."""
    return {
        setting.flag: setting.plain(value) for setting, value in setting_values(config) if setting.info.affects_results
    }
