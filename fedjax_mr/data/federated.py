"""The data of a federation: one array of samples, and one array of row numbers in which each client owns a range."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr import registry
from fedjax_mr.data import inputs
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import Classification, Task, with_metrics

COUNTED_TOGETHER = 65_536  # clients whose labels are counted at a time, so that the table of a million takes no more
MOST_CLASSES = 100_000  # memory grows with it: label counts are [N, C], and the head of a network has C outputs


class DataRequest(NamedTuple):
    """A request to a source of datasets.

    Attributes:
      name: the dataset, such as ``emnist`` or ``emnist/letters``.
      data_dir: the folder of its files. None means the default folder of the source.
      offline: whether internet access is forbidden.
      tokenizer: the tokenizer of texts, see `tokens.encode`. None means hashed words.
      task: a name of `tasks.TASKS`. None means that of the source.
      settings: the settings of the source, an instance of its dataclass. None if it has none.
    """

    name: str
    data_dir: str | None = None
    offline: bool = False
    tokenizer: str | None = None
    task: str | None = None
    settings: Any = None


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The samples of a source, not yet divided among clients.

    Attributes:
      name: name of the dataset.
      x: [M, ...] training samples: uint8 or float32 images and vectors, int32 token sequences.
      y: [M, ...] targets in the form of the task: for classification [M] int32 labels in 0..C-1.
      test_x, test_y: the global test set.
      num_classes: C, classes, or for other tasks the width of the network's output. 0: that of the task.
      mean, std: normalisation, per channel or one number: a batch becomes (pixel - mean) / std inside the compiled
        step. They refer to pixels in 0..1 for uint8, and to the values as they are for float32.
      client: [M] int32, the natural client of each training sample, or None. -1: it has none.
      test_client: [T] int32, the natural client of each test sample, or None.
      client_names: ids of the natural clients by number.
      domain: [M] int32, the domain (such as the source) of each training sample, or None.
      test_domain: [T] int32, the domain of each test sample, or None.
      domain_names: names of the domains by number.
      vocabulary: number of different tokens. 0 if x does not hold tokens.
      task: what is learned. Default: classification.
      categories: for each column of a table, the number of its categories, or 0 if it holds numbers. (): no table.
      class_names: names of the classes by number, or () if they are unknown.
      preparation: how the rows of a table became x, or None.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    num_classes: int = 0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    client: np.ndarray | None = None
    test_client: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    vocabulary: int = 0
    domain: np.ndarray | None = None
    test_domain: np.ndarray | None = None
    domain_names: tuple[str, ...] = ()
    task: Task = None  # type: ignore[assignment]  # never None after `__post_init__`
    categories: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        task = Classification(width=self.num_classes) if self.task is None else self.task
        if isinstance(task, Classification) and self.num_classes not in (0, task.width):
            task = dataclasses.replace(task, width=self.num_classes)
        object.__setattr__(self, "task", with_metrics(task))
        object.__setattr__(self, "num_classes", self.task.width)

    def __repr__(self) -> str:
        what = f"{self.num_classes} classes" if "classes" in self.task.provides else self.task.name
        shape = "x".join(map(str, self.x.shape[1:])) or "scalars"
        clients = f", {len(self.client_names)} clients" if self.client_names else ""
        return (
            f"Dataset({self.name}: {len(self.y)} training and {len(self.test_y)} test samples, {shape} of "
            f"{self.x.dtype}, {what}{clients})"
        )

    def check(self) -> "Dataset":
        """Check that the dataset can be trained on, and return it.

        Raises:
          UserError: names the first fault: no samples, different lengths, samples without values, labels outside
            0..C-1, too many classes, values that are not finite, test samples of another kind or unit, or a
            normalisation that does not fit the samples.
        """
        if self.num_classes > MOST_CLASSES:
            raise UserError(
                f"{self.name}: labels up to {self.num_classes - 1} mean {self.num_classes:,} classes, but at most "
                f"{MOST_CLASSES:,} are supported; number the labels 0..C-1"
            )
        for x, y, part in ((self.x, self.y, "training"), (self.test_x, self.test_y, "test")):
            where = f"{self.name}: the {part} set"
            if len(x) != len(y):
                raise UserError(f"{where} has {len(x)} samples but {len(y)} labels")
            if not len(y):
                raise UserError(f"{where} is empty")
            if not x[:1].size:
                raise UserError(f"{where} has samples of shape {x.shape[1:]}, which hold no values")
            self.task.check(x, y, where)
            inputs.refuse_not_finite(where, x)
        if self.x.shape[1:] != self.test_x.shape[1:]:
            raise UserError(
                f"{self.name}: training samples are {self.x.shape[1:]}, test samples {self.test_x.shape[1:]}"
            )
        if self.categories and (self.x.ndim != 2 or len(self.categories) != self.x.shape[1]):
            raise UserError(
                f"{self.name}: categories has {len(self.categories)} numbers, but needs one for each column of a table "
                f"[M, F], and x is of shape {self.x.shape}"
            )
        ours, theirs = (inputs.measured(each, self.categories) for each in (self.x, self.test_x))
        inputs.refuse_other_units(self.name, ours, theirs, "test")
        inputs.refuse_normalisation(self)
        return self

    def fingerprint(self) -> str:
        """Digest of the labels and of some samples: it distinguishes datasets, their versions and orders of samples."""
        task = "" if "classes" in self.task.provides else self.task.facts()
        digest = hashlib.sha256(f"{self.x.shape}{self.x.dtype}{self.num_classes}{task}".encode())
        selected = self.x[:: max(1, len(self.x) // 256)]
        for part in (self.y, self.test_y, selected):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def recorded_name(self) -> str:
        """The name that a run folder records for samples passed from Python: ``given:NAME:HASH``.

        The hash covers all samples and labels, the clients, the domains, the normalisation, and the names of classes
        and columns, but not the name of the dataset.
        """
        facts: tuple[Any, ...] = (self.num_classes, self.mean, self.std, self.client_names, self.vocabulary)
        facts += () if "classes" in self.task.provides else (self.task.facts(),)
        facts += tuple(each for each in (self.categories, self.class_names, self.preparation) if each)
        digest = hashlib.sha256(repr(facts).encode())
        of_domains = (self.domain, self.test_domain)
        for part in (self.x, self.y, self.test_x, self.test_y, self.client, self.test_client, *of_domains):
            if part is not None:
                digest.update(f"{part.shape}{part.dtype}".encode())
                digest.update(np.ascontiguousarray(part).data)
        return registry.supplied_name(self.name, digest.hexdigest())

    def groups(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The group of each training and test sample, and their number: classes, or `Task.strata`; else one group."""
        both = np.concatenate([self.y, self.test_y])
        groups, count = self.task.strata(both) or (np.zeros(len(both), np.int32), 1)
        return groups[: len(self.y)], groups[len(self.y) :], count

    def take(self, rows: np.ndarray, test_rows: np.ndarray) -> "Dataset":
        """Select training rows and test rows, both in increasing order."""
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            test_x=self.test_x[test_rows],
            test_y=self.test_y[test_rows],
            client=None if self.client is None else self.client[rows],
            test_client=None if self.test_client is None else self.test_client[test_rows],
            domain=None if self.domain is None else self.domain[rows],
            test_domain=None if self.test_domain is None else self.test_domain[test_rows],
        )


def first_position(wrong: np.ndarray) -> tuple[int, ...] | None:
    """The position of the first True, or None."""
    return tuple(int(axis[0]) for axis in np.nonzero(wrong)) if wrong.any() else None


class Split(NamedTuple):
    """Rows of the sample array by client: client i owns the rows ``index[offsets[i]:offsets[i + 1]]``."""

    index: np.ndarray  # [sum of sizes] int32
    offsets: np.ndarray  # [N + 1] int32

    def __repr__(self) -> str:
        return f"Split({len(self.offsets) - 1} clients, {len(self.index)} rows)"

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client [N]."""
        return np.diff(self.offsets)

    def rows(self, client: int) -> np.ndarray:
        """The rows of one client."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]

    def parts(self) -> list[np.ndarray]:
        """The rows of every client, as a list of N arrays."""
        return np.split(self.index, self.offsets[1:-1])

    def of_clients(self, clients: np.ndarray) -> "Split":
        """The rows of some clients [R], in their order."""
        sizes = self.sizes[clients]
        offsets = offsets_of(sizes)
        places = np.repeat(self.offsets[clients] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return Split(self.index[places], offsets)

    def label_counts(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """Samples per client and class [N, C] int32, where ``labels`` are those of all samples."""
        count = len(self.offsets) - 1
        counts = np.empty((count, num_classes), np.int32)
        for first in range(0, count, COUNTED_TOGETHER):
            offsets = self.offsets[first : first + COUNTED_TOGETHER + 1]
            clients = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            cells = clients * num_classes + labels[self.index[offsets[0] : offsets[-1]]]
            found = np.bincount(cells, minlength=(len(offsets) - 1) * num_classes)
            counts[first : first + COUNTED_TOGETHER] = found.reshape(-1, num_classes)
        return counts

    @classmethod
    def of(cls, parts: "Split | Sequence[np.ndarray]") -> "Split":
        """Join one row array per client. A split is returned unchanged."""
        if isinstance(parts, Split):
            return parts
        index = np.concatenate(parts).astype(np.int32) if len(parts) else np.zeros(0, np.int32)
        return cls(index, offsets_of(np.array([len(part) for part in parts], np.int64)))


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """The offsets [N + 1] int32 of clients that have ``sizes`` [N] rows."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def consecutive(sizes: np.ndarray, *, first: int = 0) -> Split:
    """Rows that follow one another from ``first`` on, ``sizes`` [N] of them for each client."""
    offsets = offsets_of(sizes)
    return Split(first + np.arange(offsets[-1], dtype=np.int32), offsets)


class PartitionPlan(NamedTuple):
    """The owners of all rows of a dataset, including the held-out clients and the public set.

    N counts the training clients and the held-out ones. `partition_file.save` writes the plan to a run folder.
    """

    dataset: str  # name of the dataset
    fingerprint: str  # `Dataset.fingerprint` of its samples
    train: Split  # [N] clients, rows of x
    validation: Split
    test: Split  # rows of x if `own_test`, else of test_x
    own_test: bool
    held_out: np.ndarray  # [N] bool
    public: np.ndarray  # [P] rows of x
    names: tuple[str, ...]  # [N] ids of natural clients, or ()
    global_test: np.ndarray  # [T] rows of test_x on which the models of the federation are tested
    with_replacement: bool = False  # whether training rows may occur several times


class Public(NamedTuple):
    """Public samples held by the server. No client trains on them."""

    x: np.ndarray  # [P, ...]
    y: np.ndarray | None  # [P, ...] targets, or None if unlabelled


class Labelled(NamedTuple):
    """Labelled samples and a split of their rows by client."""

    x: np.ndarray
    y: np.ndarray
    split: Split


@dataclasses.dataclass(frozen=True)
class FederatedData:
    """A dataset divided among N clients, with a global test set.

    Attributes:
      dataset: the samples of these clients, and the global test set.
      train: training rows of the clients.
      validation: rows of x that the clients keep for validation, or None.
      test: test rows of the clients, or None; see `client_test`.
      own_test: whether ``test`` refers to rows of x (part of the samples of each client) instead of test_x.
      public: the public set, or None.
      holdout: the clients that never train, with their samples, or None.
      names: ids of natural clients [N], or ().
      notes: one line for each deviation from the requested partition.
      plan: the plan that this federation was assembled from, or None if it was made by hand.
    """

    dataset: Dataset
    train: Split
    validation: Split | None = None
    test: Split | None = None
    own_test: bool = False
    public: Public | None = None
    holdout: "FederatedData | None" = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan: PartitionPlan | None = None

    def __repr__(self) -> str:
        return f"FederatedData({self.num_clients} clients, {len(self.train.index)} rows of {self.dataset!r})"

    @classmethod
    def of_sizes(
        cls,
        dataset: Dataset,
        sizes: np.ndarray,
        *,
        validation_sizes: np.ndarray | None = None,
        public: Public | None = None,
    ) -> "FederatedData":
        """A federation whose samples are elsewhere: the clients' rows follow one another and stand for them.

        Args:
          dataset: as many rows as all clients have, of the right kind and normalisation.
          sizes: training samples per client [N].
          validation_sizes: samples that each client keeps for validation [N].
          public: the public set.
        """
        kept = None if validation_sizes is None or not np.any(validation_sizes) else consecutive(validation_sizes)
        return cls(dataset, consecutive(sizes), validation=kept, public=public)

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.train.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Training samples per client [N]."""
        return self.train.sizes

    @property
    def client_test(self) -> Labelled:
        """The test samples of each client. Some clients may have none.

        Raises:
          UserError: no client has test samples.
        """
        if self.test is None:
            raise UserError(f"the clients of {self.dataset.name} have no test samples of their own")
        x, y = (self.dataset.x, self.dataset.y) if self.own_test else (self.dataset.test_x, self.dataset.test_y)
        return Labelled(x, y, self.test)

    def train_and_validation(self) -> Split:
        """The training rows of each client, followed by its validation rows."""
        if self.validation is None or not len(self.validation.index):
            return self.train
        train, kept = self.train, self.validation
        index = np.empty(len(train.index) + len(kept.index), np.int32)
        index[np.arange(len(train.index)) + np.repeat(kept.offsets[:-1], train.sizes)] = train.index
        index[np.arange(len(kept.index)) + np.repeat(train.offsets[1:], kept.sizes)] = kept.index
        return Split(index, train.offsets + kept.offsets)

    def label_counts(self) -> np.ndarray:
        """Training samples per client and class [N, C], or per client and group, see `Dataset.groups`."""
        groups, _, count = self.dataset.groups()
        return self.train.label_counts(groups, count)

    def hash(self) -> str:
        """Digest of the samples and of their division."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        digest = hashlib.sha256(self.dataset.fingerprint().encode())
        for split in (self.train, self.validation, self.test):
            for part in split or ():
                digest.update(np.ascontiguousarray(part).tobytes())
        for other in (self.public.x, self.public.y) if self.public else ():
            digest.update(np.ascontiguousarray(other).tobytes() if other is not None else b"unlabelled")
        if self.holdout:
            digest.update(self.holdout.hash().encode())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def test_hash(self) -> str:
        """Digest of the global test samples, which `hash` leaves out."""
        return hashlib.sha256(np.ascontiguousarray(self.dataset.test_x).data).hexdigest()[:16]

    def pooled(self) -> "FederatedData":
        """The same samples, all owned by one client, for centralized training."""

        def pool(split: Split | None) -> Split | None:
            return split and Split.of([np.sort(split.index)])

        return dataclasses.replace(
            self, train=Split.of([np.sort(self.train.index)]), validation=pool(self.validation), test=pool(self.test),
            names=(),
        )  # fmt: skip
