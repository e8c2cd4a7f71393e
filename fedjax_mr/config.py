"""The configuration of a run: one dataclass, the flags generated from it, its checks, its copy in the run folder."""

import dataclasses
import hashlib
import json
import math
import numbers
import shlex
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from fedjax_mr import files, settings
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.settings import field

COMMAND = "python -m fedjax_mr.main"
GROUPS = ("Data", "Partition", "Model", "Local training", "Federation", "Evaluation and records", "Engine")
Own = typing.TypeVar("Own")
LARGEST_SEED = 2**31 - 1  # what NumPy and JAX (without 64-bit integers) both take


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run is told; every field but ``hyper`` is a flag. The defaults are the main job.

    A default without a source is our choice.

    Attributes:
      hyper: the chosen strategy's own dataclass of settings; None takes its defaults.
    """

    dataset: str = field("digits", "data set by name, or the path of one's own .npz file", group="Data")
    data_dir: str | None = field(
        None, "folder that holds the data sets; none: each source's usual place", group="Data", affects_results=False
    )
    label_mode: str = field(
        "fine",
        "which labels of CIFAR-100: 100 classes (fine) or 20 (coarse)",
        group="Data",
        choices=("fine", "coarse"),
        source="the data set's own labels; the FedMR authors' code trains on the coarse ones",
    )
    offline: bool = field(
        False, "never use the network, not even to look for data", group="Data", affects_results=False
    )

    min_samples_per_client: int = field(
        0,
        "leave out natural clients with fewer samples, training and test together",
        group="Data",
        unit="samples",
        low=0,
        source="all clients; the FedMR papers' FEMNIST: 100",
    )

    partition: str = field(
        "dirichlet", "how the training samples are divided among the clients", group="Partition", source="KDD'24"
    )
    alpha: float = field(
        0.5,
        "concentration of the Dirichlet distribution: the smaller, the more the clients' labels differ",
        group="Partition",
        low=0,
        open_low=True,
        source="KDD'24, the middle of its three settings",
    )
    clients: int = field(
        20,
        "N, how many clients train; 0: every natural client, or all of --partition_file",
        group="Partition",
        unit="clients",
        low=0,
        source="our choice",
    )
    partition_seed: int | None = field(
        None,
        "seed of the partition alone; none: the same as --seed",
        group="Partition",
        low=0,
        high=LARGEST_SEED,
    )

    alpha_size: float = field(
        10.0,
        "dirichlet_size: concentration of the sizes",
        group="Partition",
        low=0,
        open_low=True,
        source="FedMe's code",
    )
    shards_per_client: int = field(
        2, "shards: label shards of each client", group="Partition", unit="shards", low=1, source="McMahan et al. 2017"
    )
    classes_per_client: int = field(
        2, "classes: different classes of each client", group="Partition", unit="classes", low=1, source="pFedHR"
    )
    quantity_power: float = field(
        1.0,
        "quantity: the r-th largest client has about r^-power samples",
        group="Partition",
        low=0,
        source="our choice",
    )
    partition_file: str | None = field(
        None,
        "partition.npz of a run folder, which replaces all other settings of this group, or a JSON file of the FedMR "
        "authors, which replaces --partition",
        group="Partition",
    )
    holdout_clients: int = field(
        0,
        "clients beside the N that never train; the deployed model, if the method has one, is also tested on them",
        group="Partition",
        unit="clients",
        low=0,
        source="our choice",
    )
    validation_share: float = field(
        0.0,
        "fraction of its training samples that a client keeps for validation",
        group="Partition",
        low=0,
        high=0.9,
        source="FedMR; FedMe: 0.2 (CIFAR-10), 0.3 (FEMNIST, Shakespeare)",
    )
    client_test_share: float = field(
        0.0,
        "fraction of its samples that becomes a client's own test set; 0: its natural test samples, or a part of the "
        "test set with the client's label proportions",
        group="Partition",
        low=0,
        high=0.9,
        source="our choice; pFedHR: 0.2",
    )
    public_share: float = field(
        0.0,
        "fraction of the training samples that becomes the server's public set, before the partition",
        group="Partition",
        low=0,
        high=0.9,
        source="FedMR needs none; FedMe and pFedHR: 0.1",
    )
    public_max: int | None = field(
        None, "the largest public set; none: no limit", group="Partition", unit="samples", low=1, source="FedMe: 1000"
    )
    public_labels: bool = field(True, "the public set keeps its labels", group="Partition", source="FedMe: off")
    public_from: str | None = field(
        None,
        "another data set, by name or .npz, whose training samples are public in place of as many of this one's, which "
        "nobody then has",
        group="Partition",
        source="pFedHR's poster has such a comparison",
    )

    model: str = field(
        "cnn_digits", "network by name; several, with commas between them, for clients of different ones", group="Model"
    )
    architectures: str = field(
        "blocks",
        "which of several networks each client starts with: runs of clients (blocks), in turn (cyclic), at random "
        "(random), or each client's number, counted from 0, with commas between them",
        group="Model",
        source="pFedHR: blocks of 3 clients; FedMe: each client's best one in a local run (--architectures_from)",
    )
    architectures_from: tuple[str, ...] = field(
        (),
        "run folder with clients.csv, one for each network in order (repeat the flag), or one folder that holds runs "
        "of --strategy=local with each network and the same clients, for all seeds: every client starts with the "
        "network that had the best validation accuracy (else test accuracy) on its samples; replaces --architectures",
        group="Model",
        source="FedMe",
    )

    init: str = field(
        "torch",
        "initialisation of the network: PyTorch's defaults or what its source sets (torch), or Flax's defaults",
        group="Model",
        choices=("torch", "flax"),
        source="the FedMR authors' code",
    )
    norm: str = field(
        "batch",
        "normalisation layers of networks that have some",
        group="Model",
        choices=("batch", "group"),
        source="the FedMR authors' code",
    )
    authors_state: bool = field(
        False,
        "keep the tensors of the authors' ResNet-20 that change no output: a final BatchNorm and batch counters",
        group="Model",
    )
    projection: int = field(
        0,
        "width of a projection head (dense, ReLU, dense) in front of the classifier; 0: none",
        group="Model",
        low=0,
        source="MOON's paper: 256; the FedCross authors' code: none",
    )

    augment: str = field(
        "none",
        "random changes of the training images: cut out of a black frame and mirrored (crop_flip), or none",
        group="Local training",
        choices=("none", "crop_flip"),
        source="KDD'24: none",
    )
    augment_pad: int = field(
        4,
        "crop_flip: width of the black frame",
        group="Local training",
        unit="pixels",
        low=1,
        source="the usual one of CIFAR; FedMe's code: 2",
    )
    local_epochs: int = field(
        5,
        "passes of a client over its samples per round",
        group="Local training",
        unit="epochs",
        low=1,
        source="KDD'24",
    )
    batch_size: int = field(10, "B, samples per step", group="Local training", unit="samples", low=1)
    optimizer: str = field(
        "sgd",
        "the clients' optimizer; its state starts anew every round",
        group="Local training",
        choices=("sgd", "adam", "adamw"),
        source="KDD'24",
    )
    lr: float = field(0.05, "learning rate", group="Local training", low=0, open_low=True)
    momentum: float = field(
        0.5,
        "momentum of sgd",
        group="Local training",
        low=0,
        high=1,
        source="the FedMR authors' code (the paper prints 0.9)",
    )
    weight_decay: float = field(
        0.0,
        "factor of the weights that is added to the gradient (sgd, adam) or decoupled from it (adamw)",
        group="Local training",
        low=0,
        source="the FedMR authors' code",
    )
    clip_norm: float | None = field(
        None,
        "largest L2 norm of a batch's gradient, which is scaled down to it; none: no limit",
        group="Local training",
        low=0,
        open_low=True,
        source="the FedMR authors' code",
    )

    strategy: str = field("fedmr", "federated method by name", group="Federation")
    cohort: int = field(5, "K, how many clients train in a round", group="Federation", unit="clients", low=1)
    rounds: int = field(300, "how many rounds to train", group="Federation", unit="rounds", low=1)
    seed: int = field(
        0,
        "seed of everything that is drawn at random",
        group="Federation",
        low=0,
        high=LARGEST_SEED,
    )

    eval_every: int = field(
        5,
        "rounds between two tests on the whole test set; the last round is always tested",
        group="Evaluation and records",
        unit="rounds",
        low=1,
    )
    eval_clients: bool = field(
        False,
        "also test on each client's own test samples; methods with personal models always do",
        group="Evaluation and records",
    )
    finetune_epochs: int = field(
        0,
        "after the last round, epochs in which each client trains a copy of its personal or the deployed model; both "
        "are then tested on its own test samples",
        group="Evaluation and records",
        unit="epochs",
        low=0,
        source="FedMe: 2",
    )
    checkpoint_every: int | None = field(
        None,
        "rounds between two checkpoints; none: at every evaluation",
        group="Evaluation and records",
        unit="rounds",
        low=1,
        affects_results=False,
    )
    keep_checkpoints: int = field(
        2,
        "how many of the newest checkpoints stay; analyses over the rounds need many",
        group="Evaluation and records",
        unit="checkpoints",
        low=1,
        affects_results=False,
    )
    target_accuracy: float | None = field(
        None,
        "report the first round that reaches this test accuracy; does not stop",
        group="Evaluation and records",
        unit="fraction",
        low=0,
        high=1,
        affects_results=False,
    )
    stop_at_accuracy: float | None = field(
        None,
        "stop at the first evaluation that reaches this test accuracy",
        group="Evaluation and records",
        unit="fraction",
        low=0,
        high=1,
    )
    run_dir: str | None = field(
        None,
        "folder of the run; none: one in runs/ that is named from the configuration, with a counter",
        group="Evaluation and records",
        affects_results=False,
    )
    resume: bool = field(
        False,
        "go on from the last checkpoint of --run_dir, or of the newest run of the same configuration",
        group="Evaluation and records",
        affects_results=False,
    )
    overwrite: bool = field(
        False, "replace the run that --run_dir holds", group="Evaluation and records", affects_results=False
    )
    compare_to: tuple[str, ...] = field(
        (),
        "run folder whose curves are drawn beside this run's; repeat the flag for more",
        group="Evaluation and records",
        affects_results=False,
    )
    tensorboard: bool = field(
        False, "also write TensorBoard event files", group="Evaluation and records", affects_results=False
    )
    progress: bool = field(True, "show a progress bar", group="Evaluation and records", affects_results=False)
    allow_nonfinite: bool = field(
        False,
        "go on when a loss is not finite instead of stopping at that round",
        group="Evaluation and records",
        affects_results=False,
    )

    lanes: int | None = field(
        None,
        "clients that train side by side on a device; none: 1 on a CPU, all on accelerators",
        group="Engine",
        unit="clients",
        low=1,
        affects_results=False,
    )
    memory: str = field(
        "auto",
        "where the memories of all N clients are kept; auto: on the host if they need over a third of a device",
        group="Engine",
        choices=("auto", "device", "host"),
        affects_results=False,
    )
    data_placement: str = field(
        "auto",
        "where the clients' samples are kept; host: the cohort's are sent while the round before is trained, each "
        "client filled up to the largest; auto: on the host if they need over a third of a device",
        group="Engine",
        choices=("auto", "device", "host"),
        affects_results=False,
    )
    devices: int | None = field(
        None,
        "devices that share the clients, of all processes together; none: the smaller of cores and --cohort on a CPU, "
        "all accelerators",
        group="Engine",
        unit="devices",
        low=1,
        affects_results=False,
    )
    coordinator: str | None = field(
        None,
        "host:port of process 0 when several processes share a run; none: as SLURM, Open MPI, Kubernetes or Cloud TPU "
        "say, otherwise one process",
        group="Engine",
        affects_results=False,
    )
    num_processes: int | None = field(
        None,
        "how many processes share the run; 1: this one is alone, whatever the environment says",
        group="Engine",
        unit="processes",
        low=1,
        affects_results=False,
    )
    process_id: int | None = field(None, "number of this process, from 0", group="Engine", low=0, affects_results=False)

    hyper: Any = None


# --- What the registries and the dataclasses know ------------------------------------------------------------------


def _registry(name: str) -> Mapping[str, Any]:
    """Return the registry whose names a field takes, or {}."""
    match name:  # imported here because the registries bring JAX
        case "strategy":
            from fedjax_mr import strategies

            return strategies.STRATEGIES
        case "dataset":
            from fedjax_mr import data

            return data.SOURCES
        case "partition":
            from fedjax_mr.data import partition

            return partition.PARTITIONS
        case "model":
            from fedjax_mr import models

            return models.MODELS
    return {}


def _owners() -> dict[str, type]:
    """Return every dataclass of settings by the prefix of its flags; the configuration itself has none."""
    rows = _registry("strategy").items()
    return {"": Config} | {f"{name}_": row.hyper for name, row in rows if row.hyper is not None}


def _own_type(strategy: str) -> type | None:
    """Return the dataclass of a strategy's own settings, or None if it has none."""
    rows = _registry("strategy")
    if strategy not in rows:
        raise unknown_name("strategy", strategy, rows)
    return rows[strategy].hyper


class _Setting(typing.NamedTuple):
    """A field as a flag: ``kind`` is bool, int, float or str; ``repeated`` fields are tuples of it."""

    flag: str
    name: str
    kind: type
    optional: bool
    repeated: bool
    default: Any
    info: settings.Info


def _settings(owner: Any, prefix: str = "") -> Iterator[_Setting]:
    """Yield the settings of a dataclass, in order; fields without `Info` are no settings."""
    hints = typing.get_type_hints(owner if isinstance(owner, type) else type(owner))
    for each in dataclasses.fields(owner):
        info = settings.info(each)
        if info is None:
            continue
        options = [hint for hint in _options(hints[each.name]) if hint is not types.NoneType]
        optional, hint = len(options) < len(_options(hints[each.name])), options[0]
        repeated = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if repeated else hint
        yield _Setting(prefix + each.name, each.name, kind, optional, repeated, each.default, info)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def hyper(config: Config) -> Any:
    """Return the chosen strategy's settings: the configuration's, or the strategy's defaults (None if it has none).

    Raises:
      UserError: the strategy is unknown.
    """
    own = _own_type(config.strategy)
    return own() if config.hyper is None and own is not None else config.hyper


def _values(config: Config) -> Iterator[tuple[_Setting, Any]]:
    """Yield each setting of the run with its value, the chosen strategy's own last."""
    own = hyper(config)
    for owner, prefix in ((config, ""), (own, f"{config.strategy}_")):
        for setting in _settings(owner, prefix) if owner is not None else ():
            yield setting, getattr(owner, setting.name)


# --- Flags -----------------------------------------------------------------------------------------------------------


class _TrueOrFalse(flags.BooleanParser):
    """Reads a flag that is on or off."""

    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("neither true nor false") from None


class _Parser(flags.ArgumentParser):
    """Reads one value of a flag; ``none`` where the field may be None or is a list."""

    def __init__(self, kind: type, optional: bool):
        super().__init__()
        self.kind, self.optional = kind, optional

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str) or (self.kind is str and not self.optional):
            return argument
        if self.optional and argument.strip().lower() in ("none", ""):
            return None
        try:
            return self.kind(argument)
        except ValueError:
            raise ValueError({int: "not a whole number", float: "not a number"}[self.kind]) from None


def parse(arguments: Sequence[str]) -> Config:
    """Return the configuration that command-line flags describe (without the program's name).

    Flags of strategies other than the chosen one are read and ignored, so that methods can share flag files.

    Raises:
      UserError: an unknown flag, a missing flag file, a value that is no number; ranges are `validate`'s concern.
    """
    return _parse(arguments)[0]


def parse_command(arguments: Sequence[str], own: type[Own]) -> tuple[Config, Own]:
    """Return the configuration and the settings of a command that has flags of its own beside it.

    Args:
      arguments: the flags, without the program's name.
      own: the command's dataclass of settings, declared by `settings.field`.

    Raises:
      UserError: as `parse`.
    """
    return _parse(arguments, own)


def _parse(arguments: Sequence[str], own: type | None = None) -> tuple[Config, Any]:
    owners, values = _owners(), flags.FlagValues()
    for prefix, owner in (*owners.items(), *((("", own),) if own else ())):
        for setting in _settings(owner, prefix):
            _define(values, setting)
    try:
        rest = values(["fedjax-mr", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(error.flagname, list(values)) from None
    except flags.CantOpenFlagFileError as error:
        raise UserError(f"cannot read the flag file: {str(error).rpartition('] ')[2]}") from None
    except (flags.Error, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}: every setting is a flag, --name=value (--help lists them)")

    def read(owner: type, prefix: str = "") -> Any:
        return _build(owner, {each.name: values[each.flag].value for each in _settings(owner, prefix)})

    config, prefix = read(Config), f"{values['strategy'].value}_"
    if prefix in owners:
        config = dataclasses.replace(config, hyper=read(owners[prefix], prefix))
    return config, read(own) if own else None


def flag_names(strategies: Collection[str] | None = None) -> list[str]:
    """Return the flags that decide about runs of these strategies (None: all); others name folders and the like."""
    chosen = _registry("strategy") if strategies is None else strategies
    owners = {prefix: owner for prefix, owner in _owners().items() if not prefix or prefix[:-1] in chosen}
    settings = (setting for prefix, owner in owners.items() for setting in _settings(owner, prefix))
    return [setting.flag for setting in settings if setting.info.affects_results]


def _build(owner: type, chosen: Mapping[str, Any]) -> Any:
    return owner(**{name: _told(value) if isinstance(value, list) else value for name, value in chosen.items()})


def _told(values: list[Any]) -> tuple[Any, ...]:
    """Return the values of a repeated flag; ``none`` clears those before it."""
    cleared = [position for position, value in enumerate(values) if value is None]
    return tuple(values[cleared[-1] + 1 :] if cleared else values)


def _define(values: flags.FlagValues, setting: _Setting) -> None:
    name, default, text = setting.flag, setting.default, setting.info.help
    parser: Any = _Parser(setting.kind, setting.optional or setting.repeated)
    serializer: Any = flags.ArgumentSerializer()
    if setting.kind is bool:
        flags.DEFINE_boolean(name, default, text, flag_values=values)
        values[name].parser = _TrueOrFalse()
    elif setting.repeated:
        flags.DEFINE_multi(parser, serializer, name, list(default), text, flag_values=values)
    else:
        flags.DEFINE(parser, name, default, text, flag_values=values, serializer=serializer)


def _unknown_flag(name: str, known: Collection[str]) -> UserError:
    found = str(unknown_name("flag", name, known)).partition("did you mean '")[2].partition("'")[0]
    hint = f"; did you mean --{found}?" if found else ""
    return UserError(f"unknown flag --{name}{hint} (--help lists all flags)")


# --- Checks ----------------------------------------------------------------------------------------------------------


def validate(config: Config) -> None:
    """Check names, types and ranges.

    Raises:
      UserError: something is wrong; the message names the flag, its value and what is allowed.
    """
    own = _own_type(config.strategy)
    if config.hyper is not None and type(config.hyper) is not own:
        wanted = "has no settings of its own" if own is None else f"takes {_full_name(own)}"
        raise UserError(f"strategy {config.strategy!r} {wanted}, but hyper is a {_full_name(type(config.hyper))}")
    for setting, value in _values(config):
        _check(setting, value)
    for name, kind in (("dataset", "data set"), ("partition", "partition")):
        value, known = getattr(config, name), _registry(name)
        if value not in known and not (name == "dataset" and _is_path(value)):
            raise unknown_name(kind, value, known)
    _check_models(config)
    if 0 < config.clients < config.cohort:  # 0 clients: as many as the data has, which only the data can tell
        raise UserError(
            f"--cohort={config.cohort} is more than --clients={config.clients}: at most all clients train in a round"
        )
    if config.resume and config.overwrite:
        raise UserError("--resume goes on with a run and --overwrite replaces it: leave one of them out")


def _check_models(config: Config) -> None:
    names, strategies = config.model.split(","), _registry("strategy")
    for name in names:
        if name not in _registry("model"):
            raise unknown_name("model", name, _registry("model"))
    if len(names) > 1 and not strategies[config.strategy].several:
        able = ", ".join(name for name, row in strategies.items() if row.several)
        raise UserError(
            f"strategy {config.strategy} needs the same network for all clients, but --model names {len(names)}; for "
            f"clients of different networks there are {able}"
        )
    if len(config.architectures_from) not in (0, 1, len(names)):
        raise UserError(
            f"--architectures_from names {len(config.architectures_from)} runs, but --model {len(names)} networks: "
            "one run for each network, in the same order, or one folder that holds them"
        )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith(".npz")


def _check(setting: _Setting, value: Any) -> None:
    if setting.repeated:
        if not isinstance(value, tuple | list):
            raise UserError(f"--{setting.flag} is {value!r}, but takes a tuple")
        for each in value:
            _check(setting._replace(repeated=False), each)
    elif not _fits(setting, value):
        raise UserError(f"--{setting.flag} is {value!r}, but takes {_KINDS[setting.kind][1]}")
    elif isinstance(value, str):
        _check_text(setting, value)
    elif value is not None and not isinstance(value, bool):
        _check_number(setting, value)


_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}


def _fits(setting: _Setting, value: Any) -> bool:
    if isinstance(value, bool) or value is None:  # a bool is an int to Python
        return setting.kind is bool if isinstance(value, bool) else setting.optional
    return isinstance(value, _KINDS[setting.kind][0])


def _check_text(setting: _Setting, value: str) -> None:
    if value != value.strip() or not value.isprintable():
        raise UserError(f"--{setting.flag}={value!r} has spaces at an end or unprintable characters")
    if setting.info.choices is not None and value not in setting.info.choices:
        raise unknown_name(f"value of --{setting.flag}", value, setting.info.choices)


def _check_number(setting: _Setting, value: float) -> None:
    low, high = setting.info.low, setting.info.high
    too_low = low is not None and (value <= low if setting.info.open_low else value < low)
    too_high = high is not None and value > high
    if too_low or too_high or not math.isfinite(value):
        raise UserError(
            f"--{setting.flag}={value} is out of range (allowed: {_range(setting.info) or 'finite numbers'})"
        )


def _range(info: settings.Info) -> str:
    """Return the allowed range in words, or "" if there is none."""
    low = None if info.low is None else f"{'>' if info.open_low else '>='} {info.low:g}"
    high = None if info.high is None else f"<= {info.high:g}" if info.high != LARGEST_SEED else "< 2^31"
    return " and ".join(part for part in (low, high) if part)


# --- Help ------------------------------------------------------------------------------------------------------------


def help_text(width: int | None = None) -> str:
    """Return the text of ``--help``: every flag by group, with unit, range, default and its source."""
    width = max(40, min(width or shutil.get_terminal_size().columns, 110))
    groups: dict[str, list[_Setting]] = {name: [] for name in GROUPS}
    for prefix, owner in _owners().items():
        for setting in _settings(owner, prefix):
            groups.setdefault(setting.info.group or _title(prefix), []).append(setting)

    intro = (
        "Train a federation in one XLA program. Without flags: FedMR on the embedded digits. Flags are read from left "
        "to right and the last value wins; --flagfile=FILE reads flags from a file at that place. A switch is set by "
        "--name and cleared by --noname; 'none' clears a value that may be missing, and a list."
    )
    usage = f"usage: {COMMAND} [--help] [--flag=value ...] [--flagfile=FILE ...]"
    lines = [*textwrap.wrap(usage, width, subsequent_indent="  "), "", *textwrap.wrap(intro, width)]
    for title, group in groups.items():
        lines += ["", title]
        for setting in group:
            lines += _help_of(setting, width)
    return "\n".join(lines)


def help_of(owner: type, width: int | None = None) -> str:
    """Return the part of ``--help`` on the flags of one dataclass."""
    width = max(40, min(width or shutil.get_terminal_size().columns, 110))
    return "\n".join(line for setting in _settings(owner) for line in _help_of(setting, width))


def _title(prefix: str) -> str:
    name = prefix.removesuffix("_")
    return f"Strategy {name} ({_registry('strategy')[name].paper})"


def _help_of(setting: _Setting, width: int) -> list[str]:
    info = setting.info
    choices = info.choices or _registry(setting.flag)
    placeholder = {bool: "", int: "=INTEGER", float: "=NUMBER", str: "=TEXT"}[setting.kind]
    facts = [info.unit, _range(info), f"one of {', '.join(choices)}" if choices else ""]
    if setting.repeated:
        facts.append("repeatable")
    source = info.source or ("our choice" if setting.flag == setting.name else "")
    default = setting.default
    if setting.kind is bool:
        default = "on" if default else "off"
    elif default in (None, ()):
        default = "none"
    facts.append(f"default {default}" + (f" [{source}]" if source else ""))
    text = f"{info.help} ({'; '.join(fact for fact in facts if fact)})"
    head = f"  --{setting.flag}{placeholder}"
    column = min(34, width // 2)
    body = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
    if len(head) + 2 > column:
        return [head, *(" " * column + line for line in body)]
    return [head.ljust(column) + body[0], *(" " * column + line for line in body[1:])]


# --- The copy in the run folder --------------------------------------------------------------------------------------

# Where a run is kept and which process this is are no part of it: a flag file that repeats the run leaves these out.
_ABOUT_THIS_TIME = ("run_dir", "resume", "overwrite", "coordinator", "num_processes", "process_id")
# In these, processes that share a run may differ.
_ABOUT_THE_PROCESS = ("data_dir", "progress", "coordinator", "num_processes", "process_id")


def to_json(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, flag by flag."""
    return {setting.flag: _plain(setting, value) for setting, value in _values(config)}


def _plain(setting: _Setting, value: Any) -> Any:
    if setting.repeated:
        return [_plain(setting._replace(repeated=False), each) for each in value]
    return None if value is None else setting.kind(value)


def shared(config: Config) -> dict[str, Any]:
    """Return what all processes of a run must be told alike, flag by flag."""
    return {flag: value for flag, value in to_json(config).items() if flag not in _ABOUT_THE_PROCESS}


def to_flags(config: Config) -> list[str]:
    """Return the flags that make this configuration again, in another run folder."""
    lines = []
    for setting, value in _values(config):
        plain = _plain(setting, value)
        if setting.flag in _ABOUT_THIS_TIME:
            continue
        if setting.kind is bool:
            lines.append(f"--{setting.flag}" if plain else f"--no{setting.flag}")
        elif setting.repeated:
            lines += [f"--{setting.flag}={each}" for each in plain] or [f"--{setting.flag}=none"]
        else:
            lines.append(f"--{setting.flag}={'none' if plain is None else plain}")
    return lines


def save(config: Config, folder: Path | str) -> None:
    """Write ``config.json`` and the re-runnable ``run.flags`` into a folder."""
    folder = Path(folder)
    with files.whole(folder / "config.json") as path:
        path.write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")
    lines = [f"# {COMMAND} --flagfile={shlex.quote(str(folder / 'run.flags'))}"]
    lines += to_flags(config)
    with files.whole(folder / "run.flags") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(folder: Path | str) -> Config:
    """Return the configuration that a run folder was made with.

    Raises:
      UserError: the folder holds no readable ``config.json``.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        own, prefix = _own_type(values["strategy"]), f"{values['strategy']}_"

        def read(owner: type, prefix: str = "") -> Any:
            return _build(owner, {s.name: values.pop(s.flag) for s in _settings(owner, prefix) if s.flag in values})

        config = dataclasses.replace(read(Config), hyper=None if own is None else read(own, prefix))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a run folder: it has no config.json") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    if values:
        raise UserError(f"{path} has settings that this version does not know: {', '.join(values)}")
    try:
        for setting, value in _values(config):
            _check(setting, value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


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
    return {setting.flag: _plain(setting, value) for setting, value in _values(config) if setting.info.affects_results}
