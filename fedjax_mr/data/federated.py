"""The data of a federation: one array of samples, and per client a run of rows in a flat index array."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_mr import registry
from fedjax_mr.errors import UserError

MOST_CLASSES = 100_000  # every client's samples are counted by class, and the head of a network has a row for each


class DataRequest(NamedTuple):
    """A request to a source.

    Attributes:
      name: the data set, such as ``emnist`` or ``emnist/letters``.
      data_dir: where its files are; None: the source's usual place.
      label_mode: ``fine`` or ``coarse``.
      offline: whether the network must not be used.
    """

    name: str
    data_dir: str | None = None
    label_mode: str = "fine"
    offline: bool = False


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The samples of a source, not yet divided among clients.

    Attributes:
      name: the source's name.
      x: [M, ...] training samples: uint8 or float32 images and vectors, int32 token sequences.
      y: [M] int32 labels in 0..C-1.
      test_x, test_y: the held-out global test set.
      num_classes: C.
      mean, std: per channel (or one number), of pixels in 0..1 for uint8, of the values themselves for float32;
        a batch becomes (pixel - mean) / std inside the compiled step.
      client: [M] int32, the natural client of each training sample, or None.
      test_client: the same for the test samples, or None.
      client_names: the natural clients' ids by number.
      vocabulary: how many different tokens there are; 0 unless x holds tokens.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    client: np.ndarray | None = None
    test_client: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    vocabulary: int = 0

    def check(self) -> "Dataset":
        """Return the data set itself if it can be trained on.

        Raises:
          UserError: names the first fault: no samples, different lengths, samples without values, labels that are no
            numbers 0..C-1, far too many classes, values that are not finite.
        """
        if self.num_classes > MOST_CLASSES:
            raise UserError(
                f"{self.name}: labels up to {self.num_classes - 1} make {self.num_classes:,} classes, and at most "
                f"{MOST_CLASSES:,} are possible; number the labels 0..C-1"
            )
        for x, y, part in ((self.x, self.y, "training"), (self.test_x, self.test_y, "test")):
            where = f"{self.name}: the {part} set"
            if len(x) != len(y):
                raise UserError(f"{where} has {len(x)} samples but {len(y)} labels")
            if not len(y):
                raise UserError(f"{where} is empty")
            if not x[:1].size:
                raise UserError(f"{where} has samples of shape {x.shape[1:]}, which hold nothing")
            if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
                raise UserError(f"{where} needs one integer label per sample, not {y.dtype} of shape {y.shape}")
            if bad := first_position((y < 0) | (y >= self.num_classes)):
                raise UserError(f"{where} has label {y[bad[0]]} in row {bad[0]}, outside 0..{self.num_classes - 1}")
            if np.issubdtype(x.dtype, np.floating) and (bad := first_position(~np.isfinite(x))):
                raise UserError(f"{where} has a value that is not finite ({x[bad]}) in row {bad[0]}")
        if self.x.shape[1:] != self.test_x.shape[1:]:
            raise UserError(
                f"{self.name}: training samples are {self.x.shape[1:]}, test samples {self.test_x.shape[1:]}"
            )
        return self

    def fingerprint(self) -> str:
        """Return a digest of the labels and of some samples: it tells data sets, versions and orders apart."""
        digest = hashlib.sha256(f"{self.x.shape}{self.x.dtype}{self.num_classes}".encode())
        some = self.x[:: max(1, len(self.x) // 256)]
        for part in (self.y, self.test_y, some):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def recorded_name(self) -> str:
        """Return the name under which samples that were given in Python are recorded, ``given:NAME:HASH``.

        The hash is of everything but the name: all samples and labels, clients and normalisation.
        """
        facts = (self.num_classes, self.mean, self.std, self.client_names, self.vocabulary)
        digest = hashlib.sha256(repr(facts).encode())
        for part in (self.x, self.y, self.test_x, self.test_y, self.client, self.test_client):
            if part is not None:
                digest.update(f"{part.shape}{part.dtype}".encode())
                digest.update(np.ascontiguousarray(part).data)
        return registry.supplied_name(self.name, digest.hexdigest())

    def take(self, rows: np.ndarray, test_rows: np.ndarray) -> "Dataset":
        """Return the data set of some training and test rows, in increasing order of the rows."""
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            test_x=self.test_x[test_rows],
            test_y=self.test_y[test_rows],
            client=None if self.client is None else self.client[rows],
            test_client=None if self.test_client is None else self.test_client[test_rows],
        )


def first_position(wrong: np.ndarray) -> tuple[int, ...] | None:
    """Return the position of the first True, or None."""
    return tuple(int(axis[0]) for axis in np.nonzero(wrong)) if wrong.any() else None


class Split(NamedTuple):
    """Rows of the sample array by client: client i owns ``index[offsets[i]:offsets[i + 1]]``."""

    index: np.ndarray  # [sum of sizes] int32
    offsets: np.ndarray  # [N + 1] int32

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client [N]."""
        return np.diff(self.offsets)

    def rows(self, client: int) -> np.ndarray:
        """Return the rows of one client."""
        return self.index[self.offsets[client] : self.offsets[client + 1]]

    def parts(self) -> list[np.ndarray]:
        """Return the rows of every client."""
        return np.split(self.index, self.offsets[1:-1])

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> "Split":
        """Join one row array per client."""
        sizes = np.array([len(part) for part in parts], np.int32)
        index = np.concatenate(parts).astype(np.int32) if len(parts) else np.zeros(0, np.int32)
        return cls(index, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


class PartitionPlan(NamedTuple):
    """The owners of the source's rows, before the hold-out clients and the public set are taken out.

    N counts the clients that train and those that are held out; `partition_file.save` keeps it in a run folder.
    """

    dataset: str  # the source's name
    fingerprint: str  # of the source's samples
    train: Split  # [N] clients, rows of x
    validation: Split
    test: Split  # rows of x if `own_test`, else of test_x
    own_test: bool
    held_out: np.ndarray  # [N] bool
    public: np.ndarray  # [P] rows of x
    names: tuple[str, ...]  # [N] ids of natural clients; () for others
    global_test: np.ndarray  # [T] rows of test_x that the federation's models are tested on


class Public(NamedTuple):
    """Samples that the server holds and no client trains on."""

    x: np.ndarray  # [P, ...]
    y: np.ndarray | None  # [P] int32; None: unlabelled


class Labelled(NamedTuple):
    """Samples with a split of their rows by client."""

    x: np.ndarray
    y: np.ndarray
    split: Split


@dataclasses.dataclass(frozen=True)
class FederatedData:
    """A data set divided among N clients, with a global test set.

    Attributes:
      dataset: the samples that these clients own, and the global test set.
      train: the clients' training rows.
      validation: rows of x that the clients do not train on, or None.
      test: the clients' own test rows, or None; see `client_test`.
      own_test: whether ``test`` names rows of x (parts of the clients' own samples) rather than of test_x.
      public: the public set, or None.
      holdout: clients that never train, with their own samples, or None.
      names: ids of natural clients [N]; () for others.
      notes: one line for everything in which the division is not what its name promises.
      plan: how this division was made from the source, or None if it was made by hand.
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

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.train.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Training samples per client [N]."""
        return self.train.sizes

    @property
    def client_test(self) -> Labelled:
        """The clients' own test samples; a client may have none.

        Raises:
          UserError: this federation has none.
        """
        if self.test is None:
            raise UserError(f"the clients of {self.dataset.name} have no test samples of their own")
        x, y = (self.dataset.x, self.dataset.y) if self.own_test else (self.dataset.test_x, self.dataset.test_y)
        return Labelled(x, y, self.test)

    def train_and_validation(self) -> Split:
        """Return each client's training rows and, behind them, those that it keeps for validation."""
        if self.validation is None or not len(self.validation.index):
            return self.train
        pairs = zip(self.train.parts(), self.validation.parts(), strict=True)
        return Split.of([np.concatenate(pair) for pair in pairs])

    def label_counts(self) -> np.ndarray:
        """Return the training samples per client and class [N, C]."""
        counts = np.zeros((self.num_clients, self.dataset.num_classes), np.int32)
        owner = np.repeat(np.arange(self.num_clients), self.sizes)
        np.add.at(counts, (owner, self.dataset.y[self.train.index]), 1)
        return counts

    def hash(self) -> str:
        """Return a digest of the samples and of their division."""
        digest = hashlib.sha256(self.dataset.fingerprint().encode())
        for split in (self.train, self.validation, self.test):
            for part in split or ():
                digest.update(np.ascontiguousarray(part).tobytes())
        for other in (self.public.x, self.public.y) if self.public else ():
            digest.update(np.ascontiguousarray(other).tobytes() if other is not None else b"unlabelled")
        if self.holdout:
            digest.update(self.holdout.hash().encode())
        return digest.hexdigest()[:16]

    def pooled(self) -> "FederatedData":
        """Return the same samples in the hands of one client: centralized training."""

        def pool(split: Split | None) -> Split | None:
            return split and Split.of([np.sort(split.index)])

        return dataclasses.replace(
            self, train=Split.of([np.sort(self.train.index)]), validation=pool(self.validation), test=pool(self.test),
            names=(),
        )  # fmt: skip
