"""What server and clients know of each other: files of samples, the roll call, and the problem that follows of it.

A client's samples are an .npz file of arrays ``x`` and ``y``, and where it has them ``validation_x``, ``validation_y``,
``test_x``, ``test_y``. The server's is one of ``test_x`` and ``test_y``, on which the deployed model is tested, and
where a method needs them ``public_x`` (and ``public_y``). It fixes for everybody the kind of the samples and their
normalisation: as ``facts``, which `divide` writes from a data set for a trial, or as ``num_classes``, ``mean`` and
``std``, whose defaults are those of `from_arrays`.
"""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mr.data import FederatedData, files, from_arrays, npz
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.federated import PartitionPlan, Public, consecutive
from fedjax_mr.deploy.wire import Content
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import imports
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.experiment import versions
from fedjax_mr.models import Model

# In these settings, a run of another place may differ.
_ABOUT_THE_PLACE = ("dataset", "import")
MOST_SAMPLES = 2**24  # of one client; all clients fill their samples up to as many as the largest says it has
_SAME_VERSIONS = ("fedjax_mr", "jax", "jaxlib", "flax", "optax")


class Share(NamedTuple):
    """A client's own samples, in the order in which they are trained on."""

    x: np.ndarray  # [n, ...] training samples
    y: np.ndarray  # [n] int32
    validation_x: np.ndarray
    validation_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @classmethod
    def read(cls, path: Path | str, facts: Facts) -> "Share":
        """Read the samples from a file.

        Raises:
          UserError: the file is missing or damaged, or its samples are not of the federation's kind.
        """
        arrays = _read(path)
        parts: list[np.ndarray] = []
        for before in ("", "validation_", "test_"):
            x, y = (arrays.get(before + name) for name in ("x", "y"))
            if (x is None) != (y is None) or (x is None and not before):
                raise UserError(f"{path} needs arrays {before}x and {before}y, of samples and labels")
            if x is None or y is None:
                x, y = np.zeros((0, *facts.shape), facts.dtype), np.zeros(0, np.int32)
            parts += _checked(path, before, x, y, facts)
        if not len(parts[1]):
            raise UserError(f"{path} holds no training samples")
        return cls(*parts)

    def fingerprint(self) -> str:
        """Return a digest of all samples and labels, which never leaves the client."""
        digest = hashlib.sha256()
        for part in self:
            digest.update(f"{part.shape}{part.dtype}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class ServerSamples(NamedTuple):
    """The server's own samples, and the kind of everybody's."""

    facts: Facts
    test_x: np.ndarray
    test_y: np.ndarray
    public: Public | None

    @classmethod
    def read(cls, path: Path | str) -> "ServerSamples":
        """Read the samples from a file.

        Raises:
          UserError: the file is missing or damaged, or its samples are not of the kind that it says.
        """
        arrays = _read(path)
        try:
            x, y = arrays["test_x"], arrays["test_y"]
            if "facts" in arrays:
                facts = Facts.parse(str(arrays["facts"].item()))
            else:
                kind = {name: arrays[name].tolist() for name in ("num_classes", "mean", "std") if name in arrays}
                facts = Facts.of(from_arrays(x, y, x_test=x, y_test=y, name=Path(path).stem, **kind))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no file of a server: it needs test_x and test_y ({error})") from None
        public = None
        if "public_x" in arrays:
            if "public_y" in arrays:
                public = Public(*_checked(path, "public_", arrays["public_x"], arrays["public_y"], facts))
            else:
                public = Public(facts.samples(arrays["public_x"]), None)
        x, y = _checked(path, "test_", x, y, facts)
        return cls(facts, x, y, public)


def _read(path: Path | str) -> dict[str, np.ndarray]:
    try:
        return npz.read(Path(path))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _checked(path: Path | str, before: str, x: np.ndarray, y: np.ndarray, facts: Facts) -> list[np.ndarray]:
    try:
        x = facts.samples(x)
    except UserError as error:
        raise UserError(f"{before}x in {path}: {error}") from None
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or (len(y) and (y.min() < 0 or y.max() >= facts.num_classes)):
        raise UserError(
            f"{before}y in {path} must be {len(x)} labels from 0 to {facts.num_classes - 1}, one per sample"
        )
    return [x, y.astype(np.int32)]


def divide(federated: FederatedData, folder: Path) -> list[Path]:
    """Write the files of a server and of all clients of a divided data set; return their paths, the server's first."""
    dataset, owned = federated.dataset, federated.client_test if federated.test is not None else None
    written = []

    def write(name: str, **arrays: Any) -> None:
        with files.atomic_write(folder / name) as path:
            np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
        written.append(folder / name)

    files.make_folder(folder)
    public = federated.public
    write(
        "server.npz",
        facts=np.array(Facts.of(dataset).text()),
        test_x=dataset.test_x,
        test_y=dataset.test_y,
        public_x=public and public.x,
        public_y=public and public.y,
    )
    for client in range(federated.num_clients):
        rows = {"": (dataset.x, dataset.y, federated.train.rows(client))}
        if federated.validation is not None:
            rows["validation_"] = (dataset.x, dataset.y, federated.validation.rows(client))
        if owned is not None:
            rows["test_"] = (owned.x, owned.y, owned.split.rows(client))
        parts = {f"{name}x": x[own] for name, (x, _, own) in rows.items()}
        write(f"client-{client}.npz", **parts, **{f"{name}y": y[own] for name, (_, y, own) in rows.items()})
    return written


# --- The roll call ---------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """What every request says of its run."""

    run: str
    facts: Facts
    agreement: dict[str, str]
    label_counts: bool

    @classmethod
    def of(cls, content: Content) -> "Request":
        """Return what a request says.

        Raises:
          UserError: it is malformed.
        """
        try:
            record = dict(content["run"])
            facts = Facts.parse(record["facts"])
            agreed = files.parse_json(record["agreement"])
            if not isinstance(agreed, dict) or not all(isinstance(each, str) for each in agreed.values()):
                raise ValueError("agreement")
            return cls(str(record["name"]), facts, agreed, bool(record["label_counts"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"a request of the server is malformed ({error})") from None

    def record(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "name": self.run,
            "facts": self.facts.text(),
            "agreement": json.dumps(self.agreement),
            "label_counts": self.label_counts,
        }


def checked_federation(record: Any, *, client: int) -> dict[str, np.ndarray]:
    """Return the facts of a federation that `begin` tells a client.

    Args:
      record: what the server sent; nothing about it is trusted.
      client: the client's own number.

    Raises:
      UserError: they are malformed.
    """
    names = ("sizes", "validation_sizes", "architectures")
    kinds = {name: np.int32 for name in names} | {"memory_key": np.uint32}
    if not isinstance(record, Mapping) or set(record) != set(kinds):
        raise UserError("the server's facts of the federation are malformed: they are not of this version")
    for name, dtype in kinds.items():
        value = record[name]
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1 or (value < 0).any():
            raise UserError(f"the server's facts of the federation are malformed ({name})")
    count = len(record["sizes"])
    if len(record["memory_key"]) != 2 or any(len(record[name]) != count for name in names):
        raise UserError("the server's facts of the federation are malformed: their lengths differ")
    if client >= count:
        raise UserError(f"the server's federation has {count} clients, and this one has the number {client}")
    if max(int(record[name].max()) for name in names[:2]) > MOST_SAMPLES or not record["sizes"].all():
        raise UserError(f"the server's federation has clients without samples, or with more than {MOST_SAMPLES:,}")
    return dict(record)


def checked_public(record: Any, facts: Facts) -> dict[str, np.ndarray]:
    """Return the public set that `begin` tells a client, as `checked_federation`.

    Raises:
      UserError: it is malformed.
    """
    if not isinstance(record, Mapping) or not set(record) <= {"x", "y"} or ("y" in record and "x" not in record):
        raise UserError("the server's public set is malformed")
    if not all(isinstance(value, np.ndarray) for value in record.values()):
        raise UserError("the server's public set is malformed: it holds something that is no array")
    if "y" in record:
        return dict(
            zip("xy", _checked("the server's message", "public_", record["x"], record["y"], facts), strict=True)
        )
    return {"x": facts.samples(record["x"])} if "x" in record else {}


class Member(NamedTuple):
    """What a client tells of itself at the roll call."""

    client: int
    size: int
    validation_size: int
    test_size: int
    label_counts: tuple[int, ...]  # [C]; empty unless the method needs it

    @property
    def samples(self) -> int:
        """All samples of the client."""
        return self.size + self.validation_size + self.test_size

    def record(self) -> dict[str, Any]:
        """Return it as plain values."""
        return self._asdict() | {"label_counts": list(self.label_counts)}

    @classmethod
    def of(cls, content: Content, *, num_clients: int, num_classes: int, counted: bool) -> "Member":
        """Return what a reply says.

        Args:
          content: the reply; nothing about it is trusted.
          num_clients: N.
          num_classes: C.
          counted: whether label counts were asked for.

        Raises:
          UserError: it is malformed.
        """
        try:
            record = dict(content["member"])
            client, *sizes = (record[name] for name in cls._fields[:4])
            counts = tuple(record["label_counts"])
        except (KeyError, TypeError, ValueError):
            raise UserError("its answer at the roll call is malformed") from None
        numbers = (client, *sizes, *counts)
        if not all(type(each) is int and each >= 0 for each in numbers) or not sizes[0]:
            raise UserError("its answer at the roll call is malformed: sizes are whole numbers, of one sample at least")
        if max(sizes) > MOST_SAMPLES:
            raise UserError(f"it tells {max(sizes):,} samples, and a client has at most {MOST_SAMPLES:,}")
        if client >= num_clients:
            raise UserError(f"it has the client-id {client}, and clients are numbered 0 to {num_clients - 1}")
        if len(counts) != (num_classes if counted else 0) or (counted and sum(counts) != sizes[0]):
            raise UserError(f"client {client} tells {sizes[0]} samples and other label counts")
        return cls(client, sizes[0], sizes[1], sizes[2], counts)


def trusted_flags(flags: str, own_code: str) -> tuple[str, ...]:
    """Return the flags of a run as a client takes them: the code that they import is its operator's, not the server's.

    Args:
      flags: what the server says.
      own_code: the files and modules of the node's settings.

    Raises:
      UserError: they cannot be read, or would read a file or run code of the server's choice.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise UserError(f"the server's flags cannot be read ({error})") from None
    kept = [word for word in words if not word.startswith("--import=")]
    for word in kept:
        if word.startswith("-") and word.lstrip("-").partition("=")[0] in ("flagfile", "import"):
            raise UserError(f"the server's flags hold {word[:40]!r}, which no client follows")
    theirs = [word.partition("=")[2] for word in words if word not in kept and word != "--import=none"]
    if theirs and not own_code:
        raise UserError(
            f"this run needs {', '.join(theirs)}, and no code runs here but that of the node's own configuration: read "
            'it, and add import="FILE.py"'
        )
    return (*(f"--import={each}" for each in imports.split([own_code])), *kept)


def agreement(config: Config, model: Model) -> dict[str, str]:
    """Return what server and clients must have in common, by name: settings, versions, the network's tensors."""
    network = [_layers(network) for network in model.networks]
    return {"settings": digest(config), "network": _digest(network), **common_versions()}


def digest(config: Config) -> str:
    """Return a digest of the settings that server and clients must have in common."""
    settings = {name: value for name, value in configuration.decisive(config).items() if name not in _ABOUT_THE_PLACE}
    return _digest(settings | {"import": imports.hashes(config.imports)})


def common_versions() -> dict[str, str]:
    """Return the versions, by package, that server and clients must have in common."""
    return {name: version for name, version in versions().items() if name in _SAME_VERSIONS}


def disagreement(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str:
    """Return in words how two agreements differ, "" if they do not."""
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
class ToldData(FederatedData):
    """A federation as its server knows it: the clients' rows stand for samples that are elsewhere.

    Attributes:
      told: samples per client and class [N, C]; None if only their numbers are known.
    """

    told: np.ndarray | None = None

    def label_counts(self) -> np.ndarray:
        """The training samples per client and class [N, C]; zeros where the classes are not known."""
        return np.zeros((self.num_clients, self.dataset.num_classes), np.int32) if self.told is None else self.told


def told_data(members: Sequence[Member], samples: ServerSamples) -> ToldData:
    """Return the federation of a roll call; its own samples are the server's test set, which says their range."""
    sizes, kept, tested = (
        np.array([getattr(member, name) for member in members], np.int64)
        for name in ("size", "validation_size", "test_size")
    )
    total = int(sizes.sum())
    facts = samples.facts
    dataset = dataclasses.replace(facts.dataset(total), x=samples.test_x, test_x=samples.test_x, test_y=samples.test_y)
    counts = np.array([member.label_counts for member in members], np.int32)
    train, validation, test = consecutive(sizes), consecutive(kept, first=total), consecutive(tested)
    none = np.zeros(0, np.int64)
    plan = PartitionPlan(
        facts.name, dataset.fingerprint(), train, validation, test, False, np.zeros(len(members), bool), none, (),
        np.arange(len(samples.test_y)),
    )  # fmt: skip
    return ToldData(
        dataset,
        train,
        validation=validation if kept.any() else None,
        test=test if tested.any() else None,
        public=samples.public,
        plan=plan,
        told=counts if counts.size else None,
    )


def network_of(config: Config, facts: Facts) -> Model:
    """Return the configuration's network for samples of a kind."""
    return build_model(config, facts.dataset(1))
