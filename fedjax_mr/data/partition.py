"""Ways to divide labelled samples among clients: pure functions of the labels and a NumPy generator.

`dirichlet` is the algorithm of the released FedMR code (Hu et al., KDD 2024), `dirichlet_size` that of FedMe
(Matsuda et al., 2022), `shards` that of McMahan et al. (AISTATS 2017), `classes` the two-class setting of pFedHR
(Wang et al., NeurIPS 2023). Deviation: the released loops redraw for ever when many clients share few samples;
here the best of `MAX_DRAWS` draws is repaired, with a note to the caller.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry

Parts = list[np.ndarray]
"""One row array per client."""

MIN_SAMPLES = 10  # released FedMR and FedMe code: redraw until every client holds ten samples
MAX_DRAWS = 1000  # far above what the papers' settings need (a few draws); 10,000 clients stay within seconds
MAX_CELLS = 50_000_000  # numbers drawn before a hopeless setting is repaired: about 2 s

Report = Callable[[str], None]
"""Receives one line when a partition is not what its name promises."""


def _silent(note: str) -> None:
    del note


def iid(labels: np.ndarray, num_clients: int, *, rng: np.random.Generator) -> Parts:
    """Deal all samples at random into N disjoint parts whose sizes differ by at most one.

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
    """Divide each class by Dirichlet(alpha) proportions; a client that holds M / N samples gets no more.

    All M samples are used. The whole draw is repeated until every client holds ``min_samples``.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      alpha: the concentration; small values give clients of few classes.
      min_samples: the least size of a client; lowered to M // N where M is too small for it.
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

    The targets are soft: the class that fills a client may overshoot them.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      alpha: the concentration of the labels (FedMe: 0.5).
      alpha_size: the concentration of the sizes (FedMe: 10).
      min_samples: the least size of a client; lowered to M // N where M is too small for it.
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
    """Sort by label, cut into shards and deal ``shards_per_client`` different ones to every client at random.

    All samples are cut into N * shards_per_client shards (McMahan et al.: two each), or into shards of ``shard_size``,
    of which those that no client is dealt stay unused (pFedHR's code: two of 225 each; there a shard may go to several
    clients).

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      shards_per_client: the shards of each client.
      shard_size: the samples of each shard; None: as many as use all samples.
      report: called with a note of the samples that stay unused.

    Raises:
      UserError: there are too few samples for so many shards, or for shards of ``shard_size``.
    """
    dealt = num_clients * shards_per_client
    if shard_size is None and dealt > len(labels):
        raise UserError(
            f"partition 'shards': {num_clients} clients x {shards_per_client} shards are more than the {len(labels)} "
            "samples: use a smaller --shards_per_client"
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
                f"more than the {len(labels)} samples: use a smaller --shard_size, or none"
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
    """Give every client ``classes_per_client`` different classes and share each class equally among its holders.

    Every class has the same number of holders, to within one.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      classes_per_client: the classes of each client (pFedHR: 2).
      report: called with a note if some class has no holder, so that its samples stay unused.

    Raises:
      UserError: there are not so many classes.
    """
    rows = _rows_by_class(labels, rng)
    present = np.array([len(row) > 0 for row in rows])
    if classes_per_client > present.sum():
        raise UserError(
            f"partition 'classes': --classes_per_client={classes_per_client} is more than the {present.sum()} classes "
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
    return [rng.permutation(np.concatenate(part)) for part in parts]


def quantity(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: np.random.Generator,
    quantity_power: float,
    min_samples: int = MIN_SAMPLES,
) -> Parts:
    """Deal samples at random into parts whose sizes follow a power law: the r-th largest has about r**-power.

    Args:
      labels: [M] integer labels.
      num_clients: N.
      rng: consumed.
      quantity_power: the exponent; 0 gives equal sizes.
      min_samples: the least size of a client; lowered to M // N where M is too small for it.
    """
    least = min(min_samples, len(labels) // num_clients)
    weights = np.arange(1, num_clients + 1) ** -float(quantity_power)
    cuts = np.round(np.cumsum(weights) / weights.sum() * (len(labels) - least * num_clients)).astype(int)
    sizes = rng.permutation(np.diff(cuts, prepend=0) + least)
    return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


def natural(client: np.ndarray, num_clients: int) -> Parts:
    """Return the samples of each natural client in the order of the file.

    Args:
      client: [M] the natural client of each sample, in 0..N-1.
      num_clients: N.
    """
    order = np.argsort(client, kind="stable")
    return np.split(order, np.cumsum(np.bincount(client, minlength=num_clients))[:-1])


def matching(labels: np.ndarray, counts: np.ndarray, *, rng: np.random.Generator) -> Parts:
    """Divide other samples so that each class is shared in the proportions that the clients' counts have.

    With the training counts it gives every client a test part of its own label distribution.

    Args:
      labels: [M] integer labels of the samples to divide.
      counts: [N, C] samples that each client holds of each class.
      rng: consumed.
    """
    rows = _rows_by_class(labels, rng, num_classes=counts.shape[1])
    totals = np.maximum(counts.sum(axis=0), 1)
    shares = np.floor(np.cumsum(counts, axis=0) * (np.array([len(row) for row in rows]) / totals) + 1e-9)
    return _deal(rows, np.diff(shares, axis=0, prepend=0).astype(int), rng)


class Partitioner(NamedTuple):
    """A registry row: a partition of labels and the names of the settings that it reads."""

    divide: Callable[..., Parts]
    settings: tuple[str, ...] = ()


def check_row(name: str, row: Any) -> None:
    """Check the row of a partition from outside the package.

    Raises:
      UserError: it is no `Partitioner`, or reads settings that there are not.
    """
    known = {setting for each in _OURS.values() for setting in each.settings}
    if not isinstance(row, Partitioner) or not callable(row.divide) or not set(row.settings) <= known:
        raise UserError(
            f"fmr.PARTITIONS[{name!r}] takes fmr.Partitioner(divide, settings): divide(labels, num_clients, *, rng, "
            f"...) returns each client's rows, and settings are some of {', '.join(sorted(known))}"
        )


_OURS: dict[str, Partitioner] = {
    "iid": Partitioner(iid),
    "dirichlet": Partitioner(dirichlet, ("alpha", "report")),
    "dirichlet_size": Partitioner(dirichlet_size, ("alpha", "alpha_size", "report")),
    "shards": Partitioner(shards, ("shards_per_client", "shard_size", "report")),
    "classes": Partitioner(classes, ("classes_per_client", "report")),
    "quantity": Partitioner(quantity, ("quantity_power",)),
    "natural": Partitioner(natural),
}
PARTITIONS = Registry("partition", "fmr.PARTITIONS", check_row, _OURS)
"""Every partition; `natural` alone reads client numbers instead of labels."""


def _rows_by_class(labels: np.ndarray, rng: np.random.Generator, num_classes: int = 0) -> list[np.ndarray]:
    """Return the shuffled rows of each class 0..C-1."""
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    return np.split(by_label, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])


def _dirichlet(
    labels: np.ndarray, targets: np.ndarray, *, rng: np.random.Generator, alpha: float, min_samples: int, report: Report
) -> Parts:
    """Draw class counts until every client holds ``min_samples`` (or repair the best draw), then deal the rows."""
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
            f"partition: no draw of {draws} gave all {len(targets)} clients {least} samples at alpha {alpha:g} "
            f"(smallest client: {smallest}); moved {moved} samples from the largest clients"
        )
    elif least < min_samples:
        report(
            f"partition: {len(labels)} samples do not give {len(targets)} clients {min_samples} each; at least {least}"
        )
    return _deal(_rows_by_class(labels, rng), best, rng)


def _draw_counts(
    class_sizes: np.ndarray, targets: np.ndarray, *, alpha: float, rng: np.random.Generator, draws: int
) -> Iterator[np.ndarray]:
    """Yield [N, C] counts: how many samples of each class every client receives.

    Only the counts decide whether a draw is accepted, so the rows are shuffled once, after the last draw.
    """
    for _ in range(draws):
        counts = np.zeros((len(targets), len(class_sizes)), int)
        held = np.zeros(len(targets), int)
        for label, size in enumerate(class_sizes):
            shares = rng.dirichlet(np.full(len(targets), alpha)) * (held < targets)
            if shares.sum() <= 0:  # a tiny alpha underflows, or everybody is full: the client furthest below its target
                shares = (held - targets <= (held - targets).min()).astype(float)
            cuts = np.floor(np.cumsum(shares / shares.sum())[:-1] * size).astype(int)
            counts[:, label] = np.diff(cuts, prepend=0, append=size)
            held += counts[:, label]
        yield counts


def _repair(counts: np.ndarray, least: int, rng: np.random.Generator) -> int:
    """Move samples, in place, from the largest clients to those below ``least``; return how many were moved."""
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


def _deal(rows: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> Parts:
    """Hand out the rows of each class by the counts [N, C], each client's part in random order."""
    parts: list[list[np.ndarray]] = [[] for _ in counts]
    for row, column in zip(rows, counts.T, strict=True):
        ends = np.cumsum(column)
        for part, start, end in zip(parts, ends - column, ends, strict=True):
            part.append(row[start:end])
    return [rng.permutation(np.concatenate(part)) for part in parts]
