"""The facts that server and clients exchange when a run starts, with checks, and the federation that follows from them.

Neither side trusts the other: everything that is received is checked before it is used.
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mr import untrusted
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.data import FederatedData
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.federated import PartitionPlan, consecutive
from fedjax_mr.deploy.samples import ServerSamples, checked_samples
from fedjax_mr.deploy.wire import Content
from fedjax_mr.engine.devices import settings_of_numbers
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.experiment import versions
from fedjax_mr.models import Model, parts
from fedjax_mr.tasks import with_metrics
from fedjax_mr.tasks.losses import with_loss

# Settings that may differ between machines.
_ABOUT_THE_PLACE = ("dataset", "import")
MAX_SAMPLES = 2**24  # of one client; all clients pad their samples to the reported size of the largest
_SAME_VERSIONS = ("fedjax_mr", "jax", "jaxlib", "flax", "optax")


class RunManifest(NamedTuple):
    """The facts about the run that every message of the server has."""

    run: str
    facts: Facts
    agreement: dict[str, str]
    label_counts: bool

    @classmethod
    def of(cls, content: Content) -> "RunManifest":
        """Read them from a message.

        Raises:
          UserError: they are malformed.
        """
        try:
            record = dict(content["run"])
            facts = Facts.parse(record["facts"])
            agreed = untrusted.parse_json(record["agreement"], {str: str})
            return cls(str(record["name"]), facts, agreed, bool(record["label_counts"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"a request of the server is malformed ({error})") from None

    def record(self) -> dict[str, Any]:
        """Plain values, as they are sent."""
        return {
            "name": self.run,
            "facts": self.facts.text(),
            "agreement": json.dumps(self.agreement),
            "label_counts": self.label_counts,
        }


def checked_federation(record: Any, *, client: int) -> dict[str, np.ndarray]:
    """Check the facts of the federation that the server sends with ``begin``.

    Args:
      record: the received record; nothing about it is trusted.
      client: the client's number.

    Raises:
      UserError: they are malformed.
    """
    names = ("sizes", "validation_sizes", "architectures")
    kinds = {name: np.int32 for name in names} | {"memory_key": np.uint32}
    if not isinstance(record, Mapping) or set(record) != set(kinds):
        raise UserError("the server's facts about the federation are malformed: they are not of this version")
    for name, dtype in kinds.items():
        value = record[name]
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1 or (value < 0).any():
            raise UserError(f"the server's facts about the federation are malformed ({name})")
    count = len(record["sizes"])
    if len(record["memory_key"]) != 2 or any(len(record[name]) != count for name in names):
        raise UserError("the server's facts about the federation are malformed: their lengths differ")
    if client >= count:
        raise UserError(
            f"the server's federation has {count} clients, numbered from 0; this client has the number {client}"
        )
    if max(int(record[name].max()) for name in names[:2]) > MAX_SAMPLES or not record["sizes"].all():
        raise UserError(f"the server's federation has clients without samples, or with more than {MAX_SAMPLES:,}")
    return dict(record)


def checked_public(record: Any, facts: Facts) -> dict[str, np.ndarray]:
    """Check the public set that the server sends with ``begin``, like `checked_federation`.

    Raises:
      UserError: it is malformed.
    """
    if not isinstance(record, Mapping) or not set(record) <= {"x", "y"} or ("y" in record and "x" not in record):
        raise UserError("the server's public set is malformed")
    if not all(isinstance(value, np.ndarray) for value in record.values()):
        raise UserError("the server's public set is malformed: it holds something other than arrays")
    if "y" in record:
        return dict(
            zip("xy", checked_samples("the server's message", "public_", record["x"], record["y"], facts), strict=True)
        )
    return {"x": facts.samples(record["x"])} if "x" in record else {}


class Member(NamedTuple):
    """A client's facts about itself, sent when it joins."""

    client: int
    size: int
    validation_size: int
    test_size: int
    label_counts: tuple[int, ...]  # [C]; empty unless the strategy needs them

    @property
    def samples(self) -> int:
        """All samples of the client."""
        return self.size + self.validation_size + self.test_size

    def record(self) -> dict[str, Any]:
        """Plain values, as they are sent."""
        return self._asdict() | {"label_counts": list(self.label_counts)}

    @classmethod
    def of(cls, content: Content, *, num_clients: int, num_classes: int, counted: bool) -> "Member":
        """Read them from a reply.

        Args:
          content: the reply; nothing about it is trusted.
          num_clients: N.
          num_classes: C.
          counted: whether the server has requested label counts.

        Raises:
          UserError: they are malformed.
        """
        try:
            record = dict(content["member"])
            client, *sizes = (record[name] for name in cls._fields[:4])
            counts = tuple(record["label_counts"])
        except (KeyError, TypeError, ValueError):
            raise UserError("its reply to join is malformed") from None
        numbers = (client, *sizes, *counts)
        if not all(type(each) is int and each >= 0 for each in numbers) or not sizes[0]:
            raise UserError("its reply to join is malformed: sizes must be whole numbers, and at least one sample")
        if max(sizes) > MAX_SAMPLES:
            raise UserError(f"it reports {max(sizes):,} samples; a client has at most {MAX_SAMPLES:,}")
        if client >= num_clients:
            raise UserError(f"it has the client-id {client}; clients are numbered 0 to {num_clients - 1}")
        if len(counts) != (num_classes if counted else 0) or (counted and sum(counts) != sizes[0]):
            raise UserError(f"client {client} reports {sizes[0]} samples, but label counts with another sum or length")
        return cls(client, sizes[0], sizes[1], sizes[2], counts)


def trusted_flags(flags: str, own_code: str) -> tuple[str, ...]:
    """The flags of a run for a client: imports are replaced by those of its operator.

    Args:
      flags: flags sent by the server.
      own_code: files and modules in the node's settings.

    Raises:
      UserError: the flags cannot be read, or would make this client read a file or run code that the server chose.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"the server's flags cannot be read ({error})") from None
    kept = [word for word in words if not word.startswith("--import=")]
    for word in kept:
        if word.startswith("-") and word.lstrip("-").partition("=")[0] in ("flagfile", "import"):
            raise UserError(f"the server's flags contain {word[:40]!r}, which clients do not accept")
    theirs = [word.partition("=")[2] for word in words if word not in kept and word != "--import=none"]
    if theirs and not own_code:
        raise UserError(
            f"this run needs the code of {', '.join(theirs)}, but a client only runs code named in its node settings: "
            'review the code, then add import="FILE.py"'
        )
    return (*(f"--import={each}" for each in imports.split([own_code])), *kept)


def agreement(config: Config, model: Model) -> dict[str, str]:
    """What server and clients must share, by name: settings, network, packages, JAX's settings that change numbers."""
    network: list[Any] = [_layers(network) for network in model.networks]
    if model.frozen:  # each side has its own copy
        network.append(parts.digest(model.frozen))
    return {"settings": digest(config), "network": _digest(network), **common_versions(), **settings_of_numbers()}


def digest(config: Config) -> str:
    """A digest of the settings that server and clients must share."""
    settings = {name: value for name, value in configuration.decisive(config).items() if name not in _ABOUT_THE_PLACE}
    return _digest(settings | {"import": imports.hashes(config.imports)})


def common_versions() -> dict[str, str]:
    """The versions, by package, that server and clients must share."""
    return {name: version for name, version in versions().items() if name in _SAME_VERSIONS}


def disagreement(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str:
    """The differences between two agreements in words, or ""."""
    different = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name} {ours.get(name)} here and {theirs.get(name)} at the server" for name in different)


def _layers(network: Model) -> list[Any]:
    leaves = jax.tree.leaves(network.shapes())
    described = lambda leaf: (list(leaves[leaf].shape), str(leaves[leaf].dtype))
    return [(layer.name, layer.names, [described(leaf) for leaf in layer.leaves]) for layer in network.layers()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- The federation, without its samples -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RemoteData(FederatedData):
    """The federation of a server: its clients' samples are on other machines.

    Attributes:
      counts: samples per client and class [N, C]; None if only their numbers are known.
    """

    counts: np.ndarray | None = None

    def label_counts(self) -> np.ndarray:
        """The training samples per client and class [N, C]; zeros where the classes are not known."""
        return np.zeros((self.num_clients, self.dataset.num_classes), np.int32) if self.counts is None else self.counts


def remote_data(members: Sequence[Member], samples: ServerSamples) -> RemoteData:
    """The federation of clients that have joined. Its samples are the server's test set, which defines their range."""
    sizes, kept, tested = (
        np.array([getattr(member, name) for member in members], np.int64)
        for name in ("size", "validation_size", "test_size")
    )
    total = int(sizes.sum())
    facts, test = samples.facts, {"test_x": samples.test_x, "test_y": samples.test_y}
    # No array of as many masks or texts as clients claim to have; the numbers of classes are part of recorded hashes.
    placeholder = facts.dataset(total if "classes" in facts.learned.provides else 1)
    dataset = dataclasses.replace(placeholder, x=samples.test_x, **test)
    counts = np.array([member.label_counts for member in members], np.int32)
    train, validation, test = consecutive(sizes), consecutive(kept, first=total), consecutive(tested)
    none = np.zeros(0, np.int64)
    plan = PartitionPlan(
        facts.name, dataset.fingerprint(), train, validation, test, False, np.zeros(len(members), bool), none, (),
        np.arange(len(samples.test_y)),
    )  # fmt: skip
    return RemoteData(
        dataset,
        train,
        validation=validation if kept.any() else None,
        test=test if tested.any() else None,
        public=samples.public,
        plan=plan,
        counts=counts if counts.size else None,
    )


def network_of(config: Config, facts: Facts) -> Model:
    """The configuration's network for samples of a kind, with its task, loss and metrics.

    Raises:
      UserError: as `build_model`, or the configuration is for another task.
    """
    dataset, settings = facts.dataset(1), configuration.loss_settings(config)
    if config.task not in (None, dataset.task.name):
        raise UserError(
            f"task={config.task}, but the server's file is for {dataset.task.name}: add an array task to it, or leave "
            "the setting out"
        )
    task = with_metrics(dataset.task, config.metric_names)
    return build_model(config, dataset, task=with_loss(task, config.loss, settings) if config.loss else task)
