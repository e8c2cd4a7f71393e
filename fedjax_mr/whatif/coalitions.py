"""Sets of clients whose federations are trained. A coalition is a frozenset of the numbers of its clients."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from fedjax_mr.errors import UserError

Coalition = frozenset[int]

KINDS = ("all", "leave_one_out", "orders", "stratified")
MOST_CLIENTS = 16  # of which all subsets are trained: 65,536 federations


def sets_of(kind: str | Iterable[Iterable[int]], count: int, orders: np.ndarray) -> list[Coalition]:
    """The coalitions of a kind, each once, by size. The empty one and that of all clients are always among them.

    Args:
      kind: ``all`` subsets, ``leave_one_out``, the first clients of random ``orders`` or of their rotations
        (``stratified``), or coalitions themselves.
      count: number of clients N.
      orders: random orders of the clients [M, N].

    Raises:
      UserError: another kind, a client that does not exist, or too many clients for all subsets.
    """
    everyone = frozenset(range(count))
    if kind == "all":
        if count > MOST_CLIENTS:
            raise UserError(
                f"all subsets of {count} clients are 2^{count} federations, and at most {MOST_CLIENTS} clients are "
                "possible: use coalitions=orders or leave_one_out"
            )
        found = {frozenset(each) for size in range(count + 1) for each in itertools.combinations(range(count), size)}
    elif kind == "leave_one_out":
        found = {everyone - {client} for client in everyone}
    elif kind in ("orders", "stratified"):
        chosen = orders if kind == "orders" else rotations(orders)
        found = {frozenset(order[:size].tolist()) for order in chosen for size in range(count + 1)}
    elif isinstance(kind, str):
        raise UserError(f"coalitions={kind} is none of {', '.join(KINDS)}")
    else:
        found = {_checked(each, everyone) for each in kind}
    return sorted(found | {frozenset(), everyone}, key=by_size)


def random_orders(count: int, how_many: int, seed: int = 0) -> np.ndarray:
    """Random orders of the clients [how_many, N]."""
    generator = np.random.default_rng(seed)
    return np.array([generator.permutation(count) for _ in range(how_many)]).reshape(how_many, count)


def rotations(orders: np.ndarray) -> np.ndarray:
    """All N rotations of the first orders of [M, N], about M in all: each client has each place equally often."""
    count = orders.shape[1]
    first = orders[: -(-len(orders) // max(1, count))]
    return np.array([np.roll(order, shift) for order in first for shift in range(count)]).reshape(-1, count)


def by_size(coalition: Coalition) -> tuple[int, list[int]]:
    """The place of a coalition in a table."""
    return len(coalition), sorted(coalition)


def text(coalition: Coalition) -> str:
    """A coalition in a table, such as ``0 3 7``."""
    return " ".join(map(str, sorted(coalition)))


def of_text(found: str) -> Coalition:
    """The coalition of a `text`."""
    return frozenset(map(int, found.split()))


def _checked(clients: Iterable[int], everyone: Coalition) -> Coalition:
    coalition = frozenset(clients)
    if unknown := sorted(coalition - everyone, key=str):
        raise UserError(f"a coalition has client {unknown[0]}, but the clients are 0..{len(everyone) - 1}")
    return frozenset(map(int, coalition))


def by_slots(
    wanted: Sequence[tuple[int, Coalition]], cohort: int, *, vacant: bool
) -> dict[int, list[tuple[int, Coalition]]]:
    """Pairs (seed, coalition) by the slots of their cohorts: 0, K, or all clients if they are fewer.

    With ``vacant``, coalitions of fewer than K clients have K slots, too.
    """
    groups: dict[int, list[tuple[int, Coalition]]] = {}
    for seed, coalition in wanted:
        slots = cohort if vacant and coalition else min(cohort, len(coalition))
        groups.setdefault(slots, []).append((seed, coalition))
    return groups
