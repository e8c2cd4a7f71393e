"""Partitions of labelled samples among clients: pure functions of the labels and a NumPy generator.

`dirichlet` is the algorithm of the released FedMR code (Hu et al., KDD 2024), `dirichlet_size` that of FedMe
(Matsuda et al., 2022), `shards` that of McMahan et al. (AISTATS 2017), `classes` the two-class setting of pFedHR
(Wang et al., NeurIPS 2023). Deviation: with many clients and few samples, the released code redraws without end. Here
the best of `MAX_DRAWS` draws is repaired, and the caller receives a note.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr.data.federated import Split, offsets_of
from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field

Parts = list[np.ndarray]
"""One row array per client. For very many clients, a `Split` is the cheaper form."""

MIN_SAMPLES = 10  # the released code of FedMR and FedMe redraws until every client has ten samples
MAX_DRAWS = 1000  # the settings of the papers need a few draws; 10,000 clients take seconds
DRAWN_TOGETHER = 4096  # clients for whom `bootstrap_dirichlet` draws at a time; it decides the draws
MOST_ROWS = np.iinfo(np.int32).max
MAX_CELLS = 50_000_000  # limit of clients x classes x draws before a repair: about 2 s

Report = Callable[[str], None]
"""Receives one line for each deviation from the requested partition."""


def _silent(note: str) -> None:
    del note


def iid(labels: np.ndarray, num_clients: int, *, rng: np.random.Generator) -> Parts:
    """Divide all samples at random into N disjoint parts whose sizes differ by at most one.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
    """
    return np.array_split(rng.permutation(len(labels)), num_clients)


def dirichlet(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    alpha: float,
    min_samples: int = MIN_SAMPLES,
    report: Report = _silent,
) -> Parts:
    """Divide each class by Dirichlet(alpha) proportions; a client with M / N samples receives no more.

    All M samples are used. The draw is repeated until every client has ``min_samples``.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      alpha: the concentration. Small values give clients with few classes.
      min_samples: smallest size of a client. At most M // N is used.
      report: called with a note if a repair was needed.
    """
    targets = np.full(num_clients, len(labels) / num_clients)
    return _dirichlet(labels, targets, rng=rng, alpha=alpha, min_samples=min_samples, report=report)


def dirichlet_size(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    alpha: float,
    alpha_size: float,
    min_samples: int = MIN_SAMPLES,
    report: Report = _silent,
) -> Parts:
    """Draw target sizes from Dirichlet(alpha_size), then divide each class like `dirichlet` up to those sizes.

    The targets are soft: the last class of a client may exceed its target.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      alpha: the concentration of the labels (FedMe: 0.5).
      alpha_size: the concentration of the sizes (FedMe: 10).
      min_samples: smallest size of a client. At most M // N is used.
      report: called with a note if a repair was needed.
    """
    targets = np.floor(rng.dirichlet(np.full(num_clients, alpha_size)) * len(labels))
    targets[-1] += len(labels) - targets.sum()
    return _dirichlet(labels, targets, rng=rng, alpha=alpha, min_samples=min_samples, report=report)


def shards(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    shards_per_client: int,
    shard_size: int | None = None,
    report: Report = _silent,
) -> Parts:
    """Sort by label, cut into shards and give ``shards_per_client`` different ones to every client at random.

    All samples are cut into N * shards_per_client shards (McMahan et al.: two per client). With ``shard_size``, shards
    have this size and the remaining ones are unused (pFedHR's code: two of 225 samples; there several clients may
    receive the same shard).

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      shards_per_client: number of shards of each client.
      shard_size: samples of each shard. Default: the size that uses all samples.
      report: called with the number of unused samples.

    Raises:
      UserError: there are too few samples for the shards.
    """
    dealt = num_clients * shards_per_client
    if shard_size is None and dealt > len(labels):
        raise UserError(
            f"partition 'shards': {num_clients} clients x {shards_per_client} shards are more than the {len(labels)} "
            "samples: use a smaller shards_per_client="
        )
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if shard_size is None:
        pieces = np.array_split(by_label, dealt)
    else:
        pieces = list(by_label[: len(labels) // shard_size * shard_size].reshape(-1, shard_size))
        if len(pieces) < dealt:
            raise UserError(
                f"partition 'shards': {num_clients} clients x {shards_per_client} shards of {shard_size} samples are "
                f"more than the {len(labels)} samples: use a smaller shard_size=, or leave it out"
            )
        if unused := len(labels) - dealt * shard_size:
            report(f"partition 'shards': {dealt} shards of {shard_size} leave {unused} of {len(labels)} samples unused")
    hands = rng.permutation(len(pieces))[:dealt].reshape(num_clients, shards_per_client)
    return [rng.permutation(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


def classes(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    classes_per_client: int,
    report: Report = _silent,
) -> Parts:
    """Give every client ``classes_per_client`` different classes and divide each class equally among its clients.

    The numbers of clients per class differ by at most one. If a class has fewer samples than clients, some of its
    clients have no sample of it.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      classes_per_client: number of classes of each client (pFedHR: 2).
      report: called with a note if the samples of a class are unused because no client has the class, or if clients
        have fewer classes because a class has too few samples.

    Raises:
      UserError: there are fewer classes.
    """
    rows = _rows_by_class(labels, rng)
    present = np.array([len(row) > 0 for row in rows])
    if classes_per_client > present.sum():
        raise UserError(
            f"partition 'classes': classes_per_client={classes_per_client} is more than the {present.sum()} classes "
            "that have training samples"
        )
    holders = np.where(present, 0.0, np.inf)
    hands = np.zeros((num_clients, len(rows)), bool)
    for hand in hands:
        order = np.lexsort((rng.random(len(rows)), holders))[:classes_per_client]
        hand[order] = True
        holders[order] += 1
    if unused := int((holders == 0).sum()):
        report(
            f"partition 'classes': {num_clients} clients x {classes_per_client} classes leave {unused} classes unused"
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for row, hand in zip(rows, hands.T, strict=True):
        owners = np.flatnonzero(hand)
        if len(owners):
            for owner, piece in zip(owners, np.array_split(row, len(owners)), strict=True):
                parts[owner].append(piece)
    poor = sum(any(not len(piece) for piece in part) for part in parts)
    if poor:
        scarce = np.flatnonzero([0 < len(row) < count for row, count in zip(rows, hands.sum(0), strict=True)])
        report(
            f"partition 'classes': {poor} of {num_clients} clients have fewer than {classes_per_client} classes, "
            f"because {_few('class', scarce)} {'has' if len(scarce) == 1 else 'have'} fewer samples than clients"
        )
    return [rng.permutation(np.concatenate(part)) for part in parts]


def quantity(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    quantity_power: float,
    min_samples: int = MIN_SAMPLES,
    report: Report = _silent,
) -> Parts:
    """Divide samples at random into parts whose sizes follow a power law: the r-th largest has about r**-power.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      quantity_power: the exponent. 0 gives equal sizes.
      min_samples: smallest size of a client. At most M // N is used.
      report: called with a note if M // N is smaller.
    """
    least = min(min_samples, len(labels) // num_clients)
    if least < min_samples:
        report(_too_few(len(labels), num_clients, least, min_samples))
    weights = np.arange(1, num_clients + 1) ** -float(quantity_power)
    cuts = np.round(np.cumsum(weights) / weights.sum() * (len(labels) - least * num_clients)).astype(int)
    sizes = rng.permutation(np.diff(cuts, prepend=0) + least)
    return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


def bootstrap(labels: np.ndarray, num_clients: int, *, rng: np.random.Generator, samples_per_client: int) -> Split:
    """Let every client draw samples from the whole training set with replacement, so clients may share samples.

    The number of clients is not limited by the number of samples. A client has the same samples for every larger N.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      samples_per_client: number of samples of each client.

    Raises:
      UserError: as `_equal_offsets`.
    """
    offsets = _equal_offsets(num_clients, samples_per_client)
    return Split(rng.integers(len(labels), size=offsets[-1], dtype=np.int32), offsets)


def bootstrap_dirichlet(
    labels: np.ndarray, num_clients: int, *, rng: np.random.Generator, samples_per_client: int, alpha: float
) -> Split:
    """Let every client draw samples with replacement, with class proportions of its own from a Dirichlet distribution.

    It is Dirichlet(alpha C p), where p are the shares of the C classes in the training set: Dirichlet(alpha) if all
    classes have the same size (Hsu, Qi, Brown, arXiv 1909.06335, 2019, up to the factor C). With a large alpha the
    result is like `bootstrap`. The number of clients is not limited by the number of samples. A client has the same
    samples for every larger N.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      samples_per_client: number of samples of each client.
      alpha: the concentration. Small values give clients with few classes.

    Raises:
      UserError: as `_equal_offsets`.
    """
    offsets = _equal_offsets(num_clients, samples_per_client)
    by_label = np.argsort(labels, kind="stable").astype(np.int32)
    class_sizes = np.bincount(labels)
    class_sizes, starts = class_sizes[class_sizes > 0], (np.cumsum(class_sizes) - class_sizes)[class_sizes > 0]
    concentration = alpha * len(class_sizes) * class_sizes / len(labels)
    index = np.empty((num_clients, samples_per_client), np.int32)
    for first in range(0, num_clients, DRAWN_TOGETHER):
        shares = rng.dirichlet(concentration, DRAWN_TOGETHER)
        counts = rng.multinomial(samples_per_client, shares)
        classes = np.repeat(np.tile(np.arange(len(class_sizes)), DRAWN_TOGETHER), counts.ravel())
        places = starts[classes] + rng.integers(class_sizes[classes])
        drawn = rng.permuted(by_label[places].reshape(DRAWN_TOGETHER, samples_per_client), axis=1)
        index[first : first + DRAWN_TOGETHER] = drawn[: num_clients - first]
    return Split(index.ravel(), offsets)


def natural(client: np.ndarray, num_clients: int) -> Parts:
    """Divide samples by their natural client. The rows of a client keep their order.

    Args:
      client: [M] the natural client of each sample, in 0..N-1, or -1 for samples that no client has.
      num_clients: N.
    """
    order = np.argsort(client, kind="stable")
    order = order[np.count_nonzero(client < 0) :]
    return np.split(order, np.cumsum(np.bincount(client[order], minlength=num_clients))[:-1])


def domain(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    domain: np.ndarray,
    alpha: float,
    report: Report = _silent,
) -> Parts:
    """Give every client samples of one domain, and divide each domain among its clients by `dirichlet` over the labels.

    The clients of a domain have consecutive numbers. The numbers of clients per domain differ by at most one.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      domain: [M] the domain of each sample.
      alpha: the concentration of the labels. Large values give clients with the labels of their domain.
      report: called with a note if a repair was needed.

    Raises:
      UserError: there are fewer clients than domains.
    """
    domains = np.unique(domain)
    if num_clients < len(domains):
        raise UserError(f"partition 'domain': {num_clients} clients are fewer than the {len(domains)} domains")
    parts: Parts = []
    for each, clients in zip(domains, np.array_split(np.arange(num_clients), len(domains)), strict=True):
        rows = np.flatnonzero(domain == each)
        parts += [rows[part] for part in dirichlet(labels[rows], len(clients), rng=rng, alpha=alpha, report=report)]
    return parts


def dirichlet_domain(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    domain: np.ndarray,
    alpha: float,
    report: Report = _silent,
) -> Parts:
    """Divide each domain by Dirichlet(alpha) proportions: `dirichlet` with the domains in the place of the labels.

    Args:
      labels: [M] integer labels, which have no influence.
      num_clients: N.
      rng: consumed.
      domain: [M] the domain of each sample.
      alpha: the concentration. Small values give clients with few domains.
      report: called with a note if a repair was needed.
    """
    return dirichlet(domain, num_clients, rng=rng, alpha=alpha, report=report)


def matching(labels: np.ndarray, counts: np.ndarray, *, rng: np.random.Generator) -> Split:
    """Divide further samples so that the clients' shares of each class are proportional to ``counts``.

    With the counts of the training samples, every client receives test samples with its label distribution.

    Args:
      labels: [M] integer labels of the samples to divide.
      counts: [N, C] samples of each client and class.
      rng: consumed.
    """
    rows = _rows_by_class(labels, rng, num_classes=counts.shape[1])

    def columns() -> Iterator[np.ndarray]:
        for row, column in zip(rows, counts.T, strict=True):  # class by class: the whole table may be large
            ends = np.cumsum(column)
            yield np.diff(np.floor(ends * (len(row) / max(ends[-1], 1)) + 1e-9), prepend=0).astype(int)

    return _deal(rows, columns(), len(counts), rng)


_setting = functools.partial(field, group="Partition", compiled="argument")

# fmt: off


@dataclasses.dataclass(frozen=True)
class Dirichlet:
    """The setting of partitions that draw from a Dirichlet distribution."""

    alpha: float = _setting(
        0.5, "Concentration of the Dirichlet distribution. A smaller value makes the clients' labels differ more",
        low=0, open_low=True, source="KDD'24, the middle of its three settings", short=True)


@dataclasses.dataclass(frozen=True)
class DirichletSize(Dirichlet):
    """The settings of `dirichlet_size`."""

    alpha_size: float = _setting(
        10.0, "dirichlet_size: concentration of the clients' sizes", low=0, open_low=True, source="FedMe's code")


@dataclasses.dataclass(frozen=True)
class Shards:
    """The settings of `shards`."""

    shards_per_client: int = _setting(
        2, "shards: label shards of each client", unit="shards", low=1, source="McMahan et al. 2017")
    shard_size: int | None = _setting(
        None, "shards: samples per shard. If omitted, all samples are used", unit="samples", low=1,
        source="pFedHR's code: 225")


@dataclasses.dataclass(frozen=True)
class Classes:
    """The settings of `classes`."""

    classes_per_client: int = _setting(
        2, "classes: number of classes of each client", unit="classes", low=1, source="pFedHR")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The settings of `quantity`."""

    quantity_power: float = _setting(
        1.0, "quantity: the r-th largest client has about r^-power samples", low=0, source="our choice")


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """The settings of `bootstrap`."""

    samples_per_client: int = _setting(
        20, "bootstrap, bootstrap_dirichlet: samples that each client draws with replacement", unit="samples", low=1,
        source="our choice")


@dataclasses.dataclass(frozen=True)
class BootstrapDirichlet(Bootstrap, Dirichlet):
    """The settings of `bootstrap_dirichlet`."""


@dataclasses.dataclass(frozen=True)
class Natural:
    """The setting of `natural`."""

    min_samples_per_client: int = _setting(
        0, "natural: leave out clients with fewer samples, training and test samples counted together",
        unit="samples", low=0, source="all clients; the FedMR papers' FEMNIST: 100")


# fmt: on


class Partitioner(NamedTuple):
    """A registered partition.

    Attributes:
      divide: (labels [M], N, rng=, and the settings by name) -> the rows of each client.
      settings: the dataclass of its settings, declared with `field`. Default: there are none.
      gets: further arguments of ``divide``: ``domain``, the domain of each sample [M], and ``report`` (see `Report`).
      with_replacement: whether clients may share samples.
      by_label: whether it divides samples by their labels, which some tasks do not have.
    """

    divide: Callable[..., Parts | Split]
    settings: type | None = None
    gets: tuple[str, ...] = ()
    with_replacement: bool = False
    by_label: bool = False


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `PARTITIONS`.

    Raises:
      UserError: the row is not a `Partitioner`, or its settings are no dataclass.
    """
    declared = isinstance(row, Partitioner) and (row.settings is None or dataclasses.is_dataclass(row.settings))
    if not isinstance(row, Partitioner) or not callable(row.divide) or not declared:
        raise UserError(
            f"fmr.PARTITIONS[{name!r}] takes fmr.Partitioner(divide, settings): divide(labels, num_clients, *, rng, "
            "...) returns the rows of each client, and settings is a dataclass with fmr.field(...), or left out"
        )


_OURS: dict[str, Partitioner] = {
    "iid": Partitioner(iid),
    "dirichlet": Partitioner(dirichlet, Dirichlet, ("report",), by_label=True),
    "dirichlet_size": Partitioner(dirichlet_size, DirichletSize, ("report",), by_label=True),
    "shards": Partitioner(shards, Shards, ("report",), by_label=True),
    "classes": Partitioner(classes, Classes, ("report",), by_label=True),
    "quantity": Partitioner(quantity, Quantity, ("report",)),
    "bootstrap": Partitioner(bootstrap, Bootstrap, with_replacement=True),
    "bootstrap_dirichlet": Partitioner(bootstrap_dirichlet, BootstrapDirichlet, with_replacement=True, by_label=True),
    "domain": Partitioner(domain, Dirichlet, ("domain", "report")),
    "dirichlet_domain": Partitioner(dirichlet_domain, Dirichlet, ("domain", "report"), by_label=True),
    "natural": Partitioner(natural, Natural),
}
PARTITIONS = Registry("partition", "fmr.PARTITIONS", check_row, _OURS)
"""All partitions. `natural` is the only one that receives client numbers instead of labels."""


def _rows_by_class(labels: np.ndarray, rng: np.random.Generator, num_classes: int = 0) -> list[np.ndarray]:
    """The shuffled rows of each class 0..C-1."""
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(by_label, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])


def _dirichlet(
    labels: np.ndarray, targets: np.ndarray, *, rng: np.random.Generator, alpha: float, min_samples: int, report: Report
) -> Parts:
    """Draw class counts until every client has ``min_samples``, or repair the best draw; then distribute the rows."""
    class_sizes = np.bincount(labels)
    least = min(min_samples, len(labels) // len(targets))
    draws = int(np.clip(MAX_CELLS // (len(targets) * len(class_sizes)), 1, MAX_DRAWS))
    best = np.zeros((len(targets), len(class_sizes)), int)
    smallest = -1
    for counts in _draw_counts(class_sizes, targets, alpha=alpha, rng=rng, draws=draws):
        if counts.sum(axis=1).min() > smallest:
            best, smallest = counts, int(counts.sum(axis=1).min())
        if smallest >= least:
            break
    if smallest < least:
        moved = _repair(best, least, rng)
        report(
            f"partition: none of {draws} draws gave all {len(targets)} clients {least} samples at alpha {alpha:g} "
            f"(smallest client: {smallest}); moved {moved} samples from the largest clients"
        )
    elif least < min_samples:
        report(_too_few(len(labels), len(targets), least, min_samples))
    return _deal(_rows_by_class(labels, rng), best.T, len(targets), rng).parts()


def _too_few(num_samples: int, num_clients: int, least: int, min_samples: int) -> str:
    return (
        f"partition: {num_samples} samples are too few for {min_samples} samples in each of {num_clients} clients; "
        f"each has at least {least}"
    )


def _few(what: str, numbers: np.ndarray) -> str:
    """At most three numbers as words, such as "class 3" or "classes 1, 2, 5, ..."."""
    listed = ", ".join(map(str, numbers[:3])) + (", ..." if len(numbers) > 3 else "")
    return f"{what} {listed}" if len(numbers) == 1 else f"{what}es {listed}"


def _draw_counts(
    class_sizes: np.ndarray, targets: np.ndarray, *, alpha: float, rng: np.random.Generator, draws: int
) -> Iterator[np.ndarray]:
    """Yield counts [N, C]: the samples of each client and class.

    Only the counts decide whether a draw is accepted, so the rows are shuffled once, after the last draw.
    """
    for _ in range(draws):
        counts = np.zeros((len(targets), len(class_sizes)), int)
        held = np.zeros(len(targets), int)
        for label, size in enumerate(class_sizes):
            shares = rng.dirichlet(np.full(len(targets), alpha)) * (held < targets)
            if shares.sum() <= 0:  # tiny alpha underflowed, or all clients are full: use the one furthest below target
                shares = (held - targets <= (held - targets).min()).astype(float)
            cuts = np.floor(np.cumsum(shares / shares.sum())[:-1] * size).astype(int)
            counts[:, label] = np.diff(cuts, prepend=0, append=size)
            held += counts[:, label]
        yield counts


def _repair(counts: np.ndarray, least: int, rng: np.random.Generator) -> int:
    """Move samples in place from the largest clients to those below ``least``. Return the number of moved samples."""
    sizes = counts.sum(axis=1)
    largest = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    moved = 0
    for client in np.flatnonzero(sizes < least):
        for _ in range(least - sizes[client]):
            size, donor = heapq.heappop(largest)
            label = np.searchsorted(np.cumsum(counts[donor]), rng.integers(-size), side="right")
            counts[donor, label] -= 1
            counts[client, label] += 1
            heapq.heappush(largest, (size + 1, donor))
            moved += 1
    return moved


def _deal(rows: list[np.ndarray], counts: Iterable[np.ndarray], num_clients: int, rng: np.random.Generator) -> Split:
    """Distribute the rows of each class by its counts [N]. The rows of each client are in random order."""
    owners, dealt = [], []
    for row, column in zip(rows, counts, strict=True):
        owners.append(np.repeat(np.arange(num_clients), column))
        dealt.append(row[: len(owners[-1])])
    owner = np.concatenate(owners)
    index = np.concatenate(dealt)[np.argsort(owner, kind="stable")]
    offsets = offsets_of(np.bincount(owner, minlength=num_clients))
    for client in np.flatnonzero(np.diff(offsets) > 1):
        rng.shuffle(index[offsets[client] : offsets[client + 1]])
    return Split(index, offsets)


def _equal_offsets(num_clients: int, samples_per_client: int) -> np.ndarray:
    """The offsets [N + 1] of clients with equal numbers of samples.

    Raises:
      UserError: all clients together have too many samples for the row numbers.
    """
    if num_clients * samples_per_client > MOST_ROWS:
        raise UserError(
            f"{num_clients} clients x samples_per_client={samples_per_client} are more than {MOST_ROWS:,} samples: use "
            "fewer clients or a smaller samples_per_client="
        )
    return np.arange(num_clients + 1, dtype=np.int32) * np.int32(samples_per_client)
