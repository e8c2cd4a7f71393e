"""The configuration of a run: fields, flags, and the copy in the run folder. `resolve` completes and checks it."""

import dataclasses
import functools
import hashlib
import itertools
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.channel.attacks import Attack
from fedjax_mr.channel.compression import Compression
from fedjax_mr.channel.exchange import Exchange
from fedjax_mr.channel.links import LINKS, LinkRow
from fedjax_mr.channel.privacy import Privacy
from fedjax_mr.channel.robust import Robust
from fedjax_mr.client.training import Training
from fedjax_mr.clock.asynchronous import STALENESS, Asynchronous, StalenessNumbers
from fedjax_mr.clock.deadline import Deadline
from fedjax_mr.clock.fleet import FLEETS
from fedjax_mr.config import imports, settings
from fedjax_mr.config.loggers import LOGGERS
from fedjax_mr.config.settings import Owner, Setting
from fedjax_mr.data import SOURCES, augment, divide, partition
from fedjax_mr.data.augment import AUGMENTATIONS
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.data.sources import table, text, tfds
from fedjax_mr.engine.layout import Layout
from fedjax_mr.errors import UserError
from fedjax_mr.models import MODELS
from fedjax_mr.models.precision import PRECISIONS
from fedjax_mr.models.windows import CONVOLUTIONS
from fedjax_mr.registry import USER_OBJECTS, Registry, is_supplied
from fedjax_mr.results import kept, manifest
from fedjax_mr.settings import LARGEST_INT32, field
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.transforms import ServerOptimizer
from fedjax_mr.tasks import METRICS, TASKS, losses
from fedjax_mr.tasks.losses import LOSSES

COMMAND = "python -m fedjax_mr.main"
GROUPS = (
    "Data",
    "Partition",
    "Model",
    "Local training",
    "Federation",
    "Channel",
    "Clock",
    "Evaluation and records",
    "Engine",
)

_COMPILED = {"Data": "no", "Partition": "argument", "Evaluation and records": "no"}  # the others: see `Info`
_data, _partition, _model, _training, _federation, _channel, _clock, _evaluation, _engine = (
    functools.partial(field, group=group, affects_results=group != "Engine", compiled=_COMPILED.get(group, ""))
    for group in GROUPS
)
_records = functools.partial(_evaluation, affects_results=False)


@dataclasses.dataclass(frozen=True)
class Config(
    Training,
    augment.CropFlip,
    augment.CutMix,
    losses.Weighted,
    losses.Focal,
    losses.Smoothed,
    losses.Huber,
    losses.Quantile,
    tfds.LabelMode,
    text.TextLength,
    table.ColumnNames,
    partition.DirichletSize,
    partition.Shards,
    partition.Classes,
    partition.Quantity,
    partition.BootstrapDirichlet,
    partition.Natural,
    divide.Splits,
    ServerOptimizer,
    Compression,
    Privacy,
    Attack,
    Robust,
    Exchange,
    Deadline,
    Asynchronous,
    StalenessNumbers,
    Layout,
):
    """The configuration of a run. Every field except ``hyper`` and ``rows`` is a flag; ``--help=all`` explains them.

    The defaults train FedMR on the embedded digits. Settings of a source, a partition, a link ... stand in its file.

    Attributes:
      hyper: the strategy's hyper-parameters, an instance of its dataclass. Default: its defaults.
      rows: settings of a user's rows, such as a partition or links: instances of their dataclasses. Default: their
        defaults.
    """

    # Each setting: default, help, range, and the source of the default. Without a source, the default is our choice.
    # fmt: off
    dataset: str = _data(
        "digits", "Dataset by name, the path of a user's .npz, .csv or .jsonl file, or hf:FOLDER for a folder "
        "of Hugging Face's datasets, texts or images", names=SOURCES, path=True, short=True)
    task: str | None = _data(
        None, "Task of the federation: a class per sample, several labels, numbers, a class per pixel, the next token, "
        "or the time of an event. If omitted, the task of the dataset", names=TASKS, compiled="", short=True)
    data_dir: str | None = _data(
        None, "Folder that holds the datasets. If omitted, the usual folder of each source", path=True, local=True,
        affects_results=False, per_process=True, short=True)
    tokenizer: str | None = _data(
        None, "What numbers the tokens of texts: a folder with tokenizer.json, a file .gguf, or bytes, whose tokens "
        "are the 256 bytes. If omitted, the tokenizer of --pretrained, or without it hashes of words", path=True)
    offline: bool = _data(False, "Never use the network, not even to look for data", affects_results=False)

    partition: str = _partition(
        "dirichlet", "Method that divides the training samples among the clients", source="KDD'24", names=PARTITIONS,
        short=True)
    clients: int = _partition(
        20, "Number of clients N. 0 uses every natural client of the dataset, or every client in --partition_file. "
        "Default with natural clients or a file: 0", unit="clients", low=0, source="our choice", compiled="constant",
        short=True)
    partition_seed: int | None = _partition(
        None, "Seed of the partition alone. If omitted, --seed", low=0, high=LARGEST_INT32)
    partition_file: str | None = _partition(
        None, "The partition.npz of a run folder, which replaces all other settings of this group, or a JSON file of "
        "the FedMR authors, which replaces --partition", path=True)
    public_from: str | None = _partition(
        None, "Another dataset, by name or .npz file. Its training samples replace those of the public set. The "
        "clients have the same samples as without this setting",
        path=True, source="pFedHR's poster has such a comparison")

    model: str = _model(
        "cnn_digits", "Network by name, or several separated by commas, for clients with different networks",
        names=MODELS, short=True)
    architectures: str = _model(
        "blocks", "Network that each client starts with, if there are several: consecutive clients share one (blocks), "
        "in turn (cyclic), at random (random), or a comma-separated list with the number of each client's network, "
        "counted from 0",
        source="pFedHR: blocks of 3 clients; FedMe: each client's best one in a local run (--architectures_from)")
    architectures_from: tuple[str, ...] = _model(
        (), "Start every client with the network that had the best validation (or test) accuracy on its samples, which "
        "replaces --architectures. Takes one run folder with clients.csv for each network, in order, or one folder "
        "that holds runs of --strategy=local with each network and the same clients, for all seeds",
        path=True, source="FedMe")
    pretrained: str | None = _model(
        None, "Folder with the weights from which the network starts: written by python -m fedjax_mr.export (its "
        "classifier is not used if the number of classes differs), or for minilm and smollm2_135m with config.json, "
        "model.safetensors and tokenizer.json, which numbers the words of texts. For smollm2_135m also a file .gguf, "
        "which holds both. If omitted, the network starts at random", path=True)
    init: str = _model(
        "torch", "Initialisation of the network: as in PyTorch or in the network's source (torch), or Flax's defaults "
        "(flax)", choices=("torch", "flax"), source="the FedMR authors' code")
    norm: str = _model(
        "batch", "Normalisation layers, for networks that have some",
        choices=("batch", "group"), source="the FedMR authors' code")
    convolution: str = _model(
        "auto", "Convolutions in fewer multiplications: minimal filtering (Winograd), with a few times the rounding "
        "error, where it is estimated to be faster, and none by the padding of images smaller than the kernel "
        "(minimal), so on CPUs only (auto), or never (direct, as in version 0.3.0)", choices=CONVOLUTIONS,
        source="our choice, by measurement", before="direct", rounding=True)
    authors_state: bool = _model(
        False, "Keep the tensors of the authors' ResNet-20 that change no output: a final BatchNorm and batch counters")
    projection: int = _model(
        0, "Width of a projection head (dense, ReLU, dense) before the classifier. 0 disables it",
        low=0, high=16_384, source="MOON's paper: 256; the FedCross authors' code: none")
    remat: bool = _model(
        False, "Compute the activations inside each layer again in the backward pass: less memory, more computation. "
        "Only for networks of Llama's architecture", source="jax.checkpoint")

    variables: str | None = _model(
        None, "Hash of the variables that fmr.run(..., variables=...) received. It cannot be set", compiled="no")
    trainable: str | None = _model(
        None, "Variables that train: patterns of their paths, separated by commas, such as classifier/*. All others "
        "are frozen: never sent, and one copy for all clients. If omitted, all train; with --adapter, the adapters do")
    frozen_dtype: str = _model(
        "float32", "Number type in which frozen matrices are stored: bfloat16 halves their memory. They are computed "
        "with in the type of --precision", choices=PRECISIONS, source="our choice")
    adapter: str = _model(
        "none", "Adapters, which train in place of the network (lora), or none", choices=("none", "lora"))
    lora_rank: int = _model(8, "r, rank of the adapters", low=1, high=4096, source="FedSA-LoRA", needs=("adapter",))
    lora_alpha: float = _model(
        16.0, "alpha: adapters are scaled by alpha / r", low=0, open_low=True, source="FedSA-LoRA", needs=("adapter",),
        static=True)
    lora_targets: str | None = _model(
        None, "Kernels with adapters: patterns of their paths, separated by commas, such as */query/kernel. If "
        "omitted, the queries and values of attention, or without attention all dense kernels but the last",
        source="LoRA, Hu et al. 2022: queries and values", needs=("adapter",))
    lora_head: bool = _model(True, "Train the last layer beside the adapters", needs=("adapter",))
    lora_dropout: float = _model(
        0.0, "Probability that an input of an adapter is zero in training. 0 disables it",
        low=0, high=1, open_high=True, source="peft: 0; codes of federated methods: 0.05 to 0.1",
        needs=("adapter",), static=True)
    lora_rslora: bool = _model(
        False, "rsLoRA: scale adapters by alpha / sqrt(r) in place of alpha / r", source="peft: false",
        needs=("adapter",))

    loss: str | None = _training(
        None, "Loss in training, to which a method adds its own terms. Tests use that of the task. If omitted, that of "
        "the task", names=LOSSES, short=True)
    augment: str = _training(
        "none", "Augmentation of the training images: random crops and horizontal flips (crop_flip), boxes from other "
        "images of the batch (cutmix), both (crop_flip,cutmix), or none",
        names=AUGMENTATIONS, source="KDD'24: none")
    precision: str = _training(
        "float32", "Number type of the forward and backward passes in the clients' training. Variables, losses, "
        "optimizers, the server and tests use float32",
        choices=PRECISIONS, source="mixed precision, Micikevicius et al. 2018")

    imports: tuple[str, ...] = _federation(
        (), "Python file, or module by its dotted name, that registers additional methods, networks, datasets, "
        "tasks, metrics and so on. It is read before all other flags. With #HASH appended, as in run.flags, only a "
        "file with this content is accepted", flag="import", path=True, affects_results=False, source="our choice",
        short=True)
    strategy: str = _federation("fedmr", "Federated method by name", names=STRATEGIES, short=True)
    cohort: int = _federation(5, "Number of clients K that train in each round", unit="clients", low=1, short=True)
    rounds: int = _federation(300, "Number of training rounds", unit="rounds", low=1, compiled="no", at_end=True,
        short=True)
    seed: int = _federation(0, "Seed of all random numbers", low=0, high=LARGEST_INT32, compiled="argument",
        short=True)

    links: str | None = _channel(
        None, "Links of one's own, by name, separated by commas. Those of this package have flags of their own")

    fleet: str | None = _clock(
        None, "Speeds of the clients' devices: all equal (uniform), lognormal, five classes, or a CSV file. The "
        "column clock is then the simulated time in seconds. If omitted: none, and uniform with --mode=async, "
        "--deadline or --over_select",
        names=FLEETS, path=True, short=True)
    mode: str = _clock(
        "sync", "Synchronous rounds (sync), or asynchronous clients (async): a round is then an update of the server "
        "by the next --cohort uploads that arrive", choices=("sync", "async"), short=True)
    staleness: str = _clock(
        "polynomial", "async: weight of an upload that is tau updates late: 1 (constant), (1 + tau)^-a (polynomial), "
        "or 1 up to tau = b and then 1 / (a (tau - b) + 1) (hinge)",
        names=STALENESS, source="FedBuff, Nguyen et al. 2022", needs=("mode", "async"))

    metrics: str | None = _evaluation(
        None, "Numbers of a test, by name, separated by commas. The first one decides which model is best. If omitted, "
        "those of the task", names=METRICS, compiled="", short=True)
    eval_every: int = _evaluation(
        5, "Rounds between evaluations on the whole test set. The last round is always evaluated", unit="rounds", low=1,
        short=True)
    eval_clients: bool = _evaluation(
        False, "Also evaluate on each client's own test samples. Methods with personal models always do", short=True)
    eval_each: bool = _evaluation(
        False, "Also evaluate each model of a server that keeps several (FedMR, FedCross, Indep): columns "
        "model_0_accuracy, model_0_loss, model_1_accuracy and so on")
    finetune_epochs: int = _evaluation(
        0, "Epochs of fine-tuning after the last round: each client trains a copy of its personal model, or of the "
        "deployed one, and both are evaluated on its own test samples. 0 disables it",
        unit="epochs", low=0, source="FedMe: 2", short=True)
    checkpoint_every: int | None = _records(
        None, "Rounds between checkpoints. If omitted, one at every evaluation, but not within 2 seconds of training "
        "after the previous one unless --keep_checkpoints is above 2", unit="rounds", low=1)
    keep_checkpoints: int = _records(
        2, "Number of newest checkpoints to keep. Analyses over the rounds need many", unit="checkpoints", low=1)
    target_accuracy: float | None = _records(
        None, "Report the first round that reaches this test accuracy, or this value of the first of --metrics. "
        "Training continues", at_end=True, short=True)
    stop_at_accuracy: float | None = _evaluation(
        None, "Stop at the first evaluation that reaches this test accuracy, or this value of the first of --metrics")
    patience: int | None = _evaluation(
        None, "Stop after this many consecutive evaluations without a lower validation loss (test loss if there are no "
        "validation samples). If omitted, never. --local_patience stops single clients of Local-only",
        unit="evaluations", low=1)
    keep_best: bool = _records(
        False, "Also keep the checkpoint of the best validation accuracy (test accuracy if there are no validation "
        "samples), or of the first of --metrics", at_end=True)
    run_dir: str | None = _records(
        None, "Run folder. If omitted, a new folder in runs/, named from the configuration and a counter", path=True,
        local=True, repeats=False, short=True)
    resume: bool = _records(
        False, "Resume from the last checkpoint of --run_dir, or of the newest run with the same configuration. A "
        "different --rounds ends the run earlier or later", repeats=False, short=True)
    overwrite: bool = _records(False, "Replace the run in --run_dir", repeats=False, short=True)
    compare_to: tuple[str, ...] = _records(
        (), "Run folder whose curves are drawn beside those of this run", path=True, local=True, at_end=True,
        short=True)
    picture_format: str = _records("png", "Format of the pictures", choices=("png", "pdf", "svg"), at_end=True)
    log: str | None = _records(
        None, "Also write the metrics to other programs, separated by commas. Those of this package are its extras",
        names=LOGGERS, at_end=True)
    tensorboard: bool = _records(False, "Same as --log=tensorboard", at_end=True)
    progress: bool = _records(True, "Show a progress bar", per_process=True)
    allow_nonfinite: bool = _records(False, "Continue if a loss is not finite. By default the run stops at that round")

    coordinator: str | None = _engine(
        None, "host:port of process 0, if several processes share a run. If omitted, it is read from SLURM, Open MPI, "
        "Kubernetes or Cloud TPU, and without these the run has one process", repeats=False, per_process=True)
    num_processes: int | None = _engine(
        None, "Number of processes that share the run. 1 ignores the environment and runs alone",
        unit="processes", low=1, high=65_536, repeats=False, per_process=True)
    process_id: int | None = _engine(None, "Number of this process, from 0", low=0, repeats=False, per_process=True)
    join_timeout: int = _engine(300, "Time to wait for the other processes", unit="seconds", low=1, high=10**6,
        per_process=True)
    # fmt: on

    hyper: Any = None
    rows: tuple[Any, ...] = ()

    @property
    def networks(self) -> list[str]:
        """The names in ``model``."""
        return self.model.split(",")

    @property
    def augmentations(self) -> list[str]:
        """The names in ``augment``."""
        return [] if self.augment == "none" else self.augment.split(",")

    @property
    def metric_names(self) -> list[str]:
        """The names in ``metrics``."""
        return self.metrics.split(",") if self.metrics else []

    @property
    def uses_channel(self) -> bool:
        """Whether messages are compressed, private, attacked, screened or exchanged."""
        return next(links(self), None) is not None

    @property
    def logs(self) -> list[str]:
        """The programs that the metrics are also written to: the names in ``log``, and ``tensorboard``."""
        names = self.log.split(",") if self.log is not None else []
        return list(dict.fromkeys([*names, *(["tensorboard"] if self.tensorboard else [])]))


@dataclasses.dataclass(frozen=True)
class _EarlierNames:
    """Flags of earlier versions, with which the exchange of layers was a setting of FedMR."""

    fedmr_secure: bool = field(False, "--exchange is not none")
    fedmr_secure_when: str = field("before_upload", "--exchange", choices=("before_upload", "before_training", "both"))
    fedmr_secure_share: float = field(0.5, "--exchange_share", low=0, high=1)
    fedmr_secure_repetitions: int = field(1, "--exchange_repetitions", low=1, high=1000)


def _with_todays_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by flag with those of `_EarlierNames` under today's names. An explicit ``exchange`` comes first."""
    earlier = settings.build(_EarlierNames, values)
    names = {setting.flag for setting in settings.settings_of(_EarlierNames)}
    values = {flag: value for flag, value in values.items() if flag not in names}
    if earlier.fedmr_secure and values["strategy"] == "fedmr" and values.get("exchange", "none") == "none":
        for setting, value in settings.values_of(earlier):
            setting.check(value)
        values["exchange"] = earlier.fedmr_secure_when
        values["exchange_share"] = earlier.fedmr_secure_share
        values["exchange_repetitions"] = earlier.fedmr_secure_repetitions
    return values


# --- The settings of a run -------------------------------------------------------------------------------------------


def hyper(config: Config) -> Any:
    """The strategy's hyper-parameters: those of the configuration, else the defaults. None if it has none."""
    row = STRATEGIES.get(config.strategy)
    return row.hyper() if config.hyper is None and row is not None and row.hyper is not None else config.hyper


def part(config: Config, owner: type[Owner]) -> Owner:
    """The settings of one of the dataclasses that `Config` is made of."""
    dataclass: Any = owner
    return dataclass(**{each.name: getattr(config, each.name) for each in dataclasses.fields(dataclass)})


def settings_of_row(config: Config, name: str, owner: type | None) -> Any:
    """The settings of a row: those of the configuration, else the defaults. None if it has none."""
    if owner is None:
        return next((each for each in config.rows if type(each).__name__ == name), None)  # recorded without its code
    if issubclass(Config, owner):
        return part(config, owner)
    return next((each for each in config.rows if type(each) is owner), None) or owner()


def loss_settings(config: Config) -> Any:
    """The settings of the loss. None if it has none."""
    row = LOSSES.get(config.loss or "")
    return None if row is None or row.settings is None else settings_of_row(config, config.loss or "", row.settings)


def links(config: Config) -> Iterator[tuple[str, LinkRow, Any]]:
    """Yield the name, the row and the settings of each link of the channel."""
    named = config.links.split(",") if config.links else []
    for name, row in LINKS.items():
        values = settings_of_row(config, name, row.settings)
        if row.is_on(values) if row.is_on is not None else name in named:
            yield name, row, values


ROWS: dict[str, Registry] = {
    "dataset": SOURCES,
    "partition": PARTITIONS,
    "augment": AUGMENTATIONS,
    "loss": LOSSES,
    "links": LINKS,
    "fleet": FLEETS,
    "staleness": STALENESS,
}
"""The settings that name rows with settings of their own, several separated by commas."""


def _own_rows(values: Mapping[str, Any]) -> Iterator[tuple[str, type | None]]:
    """Yield the name and the dataclass of settings of each user's row that flags name."""
    for setting, registry in ROWS.items():
        named = values.get(setting, getattr(Config, setting))
        for name in named.split(",") if named else ():
            row = registry.get(name)
            if row is None or (row.settings is not None and not issubclass(Config, row.settings)):
                yield name, row and row.settings


def all_settings(strategies: Collection[str] | None = None) -> Iterator[Setting]:
    """Yield the settings of the configuration, of users' rows, and of some strategies. Default: of all strategies."""
    yield from settings.settings_of(Config)
    for name, row in itertools.chain(*(registry.items() for registry in ROWS.values())):
        if row.settings is not None and not issubclass(Config, row.settings):
            yield from settings.settings_of(row.settings, f"{name}_")
    for name, row in STRATEGIES.items():
        if strategies is None or name in strategies:
            yield from settings.settings_of(row.hyper, f"{name}_")


def setting_values(config: Config) -> Iterator[tuple[Setting, Any]]:
    """Yield each setting of a run with its value; those of the strategy come last."""
    yield from settings.values_of(config)
    for name, owner in _own_rows(vars(config)):
        yield from settings.values_of(settings_of_row(config, name, owner), f"{name}_")
    yield from settings.values_of(hyper(config), f"{config.strategy}_")


def _build(values: Mapping[str, Any]) -> Config:
    """Make a configuration from values by flag. An unknown strategy, partition or link has no settings of its own."""
    strategy = values["strategy"]
    owner = STRATEGIES[strategy].hyper if strategy in STRATEGIES else None
    chosen = None if owner is None else settings.build(owner, values, f"{strategy}_")
    rows = tuple(settings.build(owner, values, f"{name}_") for name, owner in _own_rows(values) if owner is not None)
    return dataclasses.replace(settings.build(Config, values), hyper=chosen, rows=rows)


def _with_recorded(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration with settings in JSON of a strategy, partition and links whose code is not imported."""
    known = {setting.flag for setting in all_settings()}
    others = {flag: value for flag, value in values.items() if flag not in known}
    rows = [settings.recorded(others, f"{name}_", name) for name, owner in _own_rows(vars(config)) if owner is None]
    if config.strategy not in STRATEGIES:
        config = dataclasses.replace(config, hyper=settings.recorded(others, f"{config.strategy}_"))
    return dataclasses.replace(config, rows=(*config.rows, *(row for row in rows if row is not None)))


# --- Flags -----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> Config:
    """Read a configuration from command-line flags; `resolve` completes and checks it.

    Flags of other strategies are read and ignored, so that methods can share flag files.

    Args:
      arguments: the flags, without the program's name.

    Raises:
      UserError: an unknown flag, a missing flag file, a value that is not a number, or as `imports.load`.
    """
    return _read(arguments)[0]


def parse_command(arguments: Sequence[str], owner: type[Owner]) -> tuple[Config, Owner]:
    """Read a configuration and the settings of a command that has additional flags.

    Args:
      arguments: the flags, without the program's name.
      owner: the command's dataclass of settings, declared by `field`.

    Raises:
      UserError: as `parse`, or a setting of the command is out of range.
    """
    config, values = _read(arguments, settings.settings_of(owner))
    built = settings.build(owner, values)
    for setting, value in settings.values_of(built):
        setting.check(value)
    return config, built


def read_imports(arguments: Sequence[str]) -> None:
    """Import the files and modules of ``--import``, which add names to the registries.

    Raises:
      UserError: a missing flag file, or as `imports.load`.
    """
    imports.load(settings.values_of_flag(arguments, "import"))


def _read(arguments: Sequence[str], additional: Sequence[Setting] = ()) -> tuple[Config, Mapping[str, Any]]:
    """Read a configuration and the values of all flags.

    By default, all natural clients and all clients of a partition file take part.
    """
    read_imports(arguments)
    without_default = lambda setting: _unset(setting) if setting.flag == "clients" else setting
    known = [*map(without_default, all_settings()), *settings.settings_of(_EarlierNames), *additional]
    values = _with_todays_names(settings.parse(arguments, known))
    if values["clients"] is None:
        values["clients"] = 0 if values["partition"] == "natural" or values["partition_file"] else Config.clients
    return _build(values), values


_unset = functools.cache(lambda setting: dataclasses.replace(setting, default=None))


def flag_names(strategies: Collection[str] | None = None) -> list[str]:
    """The flags that can change the results of some strategies. Default: of all strategies."""
    return [setting.flag for setting in all_settings(strategies) if setting.info.affects_results]


# --- The copy in the run folder --------------------------------------------------------------------------------------


def to_json(config: Config) -> dict[str, Any]:
    """The configuration as plain values by flag."""
    return {setting.flag: setting.plain(value) for setting, value in setting_values(config)}


def to_flags(config: Config) -> list[str]:
    """The flags that repeat the run in another run folder."""
    kept = ((setting, value) for setting, value in setting_values(config) if setting.info.repeats)
    return [line for setting, value in kept for line in setting.as_flags(value)]


def needed_objects(config: Config) -> str:
    """The arguments of `run` that a configuration requires, such as ``dataset=..., model=...``; "" if none."""
    return ", ".join(f"{name}=..." for name in USER_OBJECTS if is_supplied(getattr(config, name) or ""))


def save(config: Config, folder: Path | str) -> None:
    """Write ``run.flags``, which marks a run folder and repeats the run, and then ``config.json`` into a folder."""
    folder = Path(folder)
    how = f"{COMMAND} --flagfile={shlex.quote(str(folder / 'run.flags'))}"
    if needed := needed_objects(config):  # no flag can stand for them
        how = f"In Python: fmr.run(config, {needed}). This file alone is rejected, because it cannot hold them."
    lines = [f"# {how}", *to_flags(config)]
    with files.atomic_write(folder / "run.flags") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    imports.keep(config.imports, folder / imports.FOLDER)
    with files.atomic_write(folder / "config.json") as path:
        path.write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")


def load(folder: Path | str) -> Config:
    """Read the configuration of a run folder. Settings that are missing have their defaults, or `Info.before`.

    The code of an imported method is not needed: its hyper-parameters are those that the folder names.

    Raises:
      UserError: the folder holds no readable ``config.json``.
    """
    path = Path(folder) / "config.json"
    try:
        if kept_run := kept.run(folder):
            values = kept_run.config
        else:
            manifest.require_unchanged(folder, path.name)
            values = files.without_checksum(untrusted.parse_json(untrusted.read_text(path)))
        values = _with_todays_names(values)
        config = _with_recorded(_build(_before(values["strategy"]) | values), values)
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


def _before(strategy: str) -> dict[str, Any]:
    """The values, by flag, of runs that were recorded before a setting existed, where they are not the defaults."""
    known = [setting for setting in all_settings([strategy]) if setting.info.before is not None]
    return {setting.flag: setting.info.before for setting in known}


def load_code(folder: Path | str, *, trust: bool = False) -> Config:
    """Read the configuration of a run folder and import the code that it needs, if ``trust`` allows it.

    Raises:
      UserError: as `load` and `imports.load_recorded`, or no code registers the strategy.
    """
    imports.load_recorded(load(folder).imports, Path(folder) / imports.FOLDER, trust=trust)
    config = load(folder)
    if config.strategy not in STRATEGIES:
        raise UserError(
            f"{folder} was trained with strategy={config.strategy}, which is not registered: import its file"
        )
    return config


def differences(config: Config, saved: Config) -> list[str]:
    """The settings that can change results and differ, as ``lr: 0.1 (saved 0.05)``."""
    ours, theirs = decisive(config), decisive(saved)
    return [
        f"{flag}: {ours.get(flag, '-')} (saved {theirs.get(flag, '-')})"
        for flag in dict.fromkeys((*ours, *theirs))
        if ours.get(flag, "-") != theirs.get(flag, "-")
    ]


def different(config: Config, other: Config) -> list[Setting]:
    """The settings of every method in which two configurations differ."""
    pairs = zip(settings.values_of(config), settings.values_of(other), strict=True)
    return [setting for (setting, ours), (_, theirs) in pairs if ours != theirs]


def digest(config: Config) -> str:
    """A short hash of all settings that can change results."""
    return hashlib.sha256(json.dumps(decisive(config), sort_keys=True).encode()).hexdigest()[:8]


def portable(config: Config) -> Config:
    """The configuration without what belongs to one machine: files have their names alone, and no run folder."""
    last = lambda path: None if path is None else Path(path).name
    changes = {}
    for setting, value in settings.values_of(config):
        if setting.info.local:
            changes[setting.name] = setting.default
        elif setting.info.path:
            changes[setting.name] = tuple(map(last, value)) if setting.repeated else last(value)
    return dataclasses.replace(config, **changes)


def portable_name(config: Config) -> str:
    """A name made from the settings of a run; the same on every machine."""
    settings = portable(config)
    return f"{settings.strategy}-seed={settings.seed}-{digest(settings)}"


def decisive(config: Config) -> dict[str, Any]:
    """The settings that can change the results of this run, as plain values by flag.

    Settings that have no effect beside the others are left out, such as the rank of adapters without adapters. So two
    runs that differ in such settings are the same run.
    """
    others = partition_settings() - partition_settings(config.partition)
    return {
        setting.flag: setting.plain(value)
        for setting, value in setting_values(config)
        if setting.info.affects_results and setting.info.has_effect(vars(config)) and setting.flag not in others
    }


def partition_settings(*names: str) -> set[str]:
    """The names of the settings of some partitions. Default: of all partitions."""
    rows = [PARTITIONS[name] for name in names or PARTITIONS if name in PARTITIONS]
    return {each.name for row in rows if row.settings is not None for each in dataclasses.fields(row.settings)}
