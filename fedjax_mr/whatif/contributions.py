"""The contribution of each client to a value of coalitions, by several rules.

Letters: N clients, S seeds, M orders. v is the value of a coalition, such as the accuracy of its model [S].

* ``shapley``: the mean gain v(A + i) - v(A) of client i over all orders in which the clients may join (Shapley 1953).
  The contributions of all clients sum to v(all) - v(nobody).
* ``banzhaf``: the mean gain over all coalitions A without the client (Banzhaf 1965; Wang and Jia, AISTATS 2023, show
  that its ranking suffers least from noise).
* ``leave_one_out``: v(all) - v(all without the client).
* ``alone``: v(the client alone) - v(nobody).
* ``orders``: the mean gain over M random orders (Castro et al., Computers & Operations Research 2009).
* ``stratified``: the same over about M orders in which each client has each place equally often (strata as in Castro et
  al., Computers & Operations Research 2017; here the orders are rotations of random ones, and no stratum gets more).
* ``truncated``: as ``orders``, where an order ends at the first coalition whose value is within `TOLERANCE` of v(all),
  in parts of v(all) - v(nobody). The other clients of the order gain 0 (Ghorbani and Zou, ICML 2019).

`fedjax_mr.whatif.approximations` has rules that need a single training run.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from fedjax_mr.whatif.coalitions import Coalition, rotations

Values = Mapping[Coalition, np.ndarray]
"""The value of each coalition for each seed [S]. Higher is better."""

TOLERANCE = 0.05


def contributions(values: Values, count: int, orders: np.ndarray) -> dict[str, np.ndarray]:
    """The contributions of N clients [S, N] by each rule whose coalitions have values.

    Args:
      values: the values of the coalitions; those of nobody and of all clients are among them.
      count: N.
      orders: random orders of the clients [M, N].
    """
    everyone, clients = frozenset(range(count)), range(count)
    found: dict[str, np.ndarray] = {}
    if len(values) == 2**count:
        found |= {"shapley": shapley(values, count), "banzhaf": _exact(values, count, _same)}
    if all(everyone - {client} in values for client in clients):
        found["leave_one_out"] = np.stack([values[everyone] - values[everyone - {each}] for each in clients], axis=-1)
    if all(frozenset({client}) in values for client in clients):
        found["alone"] = np.stack([values[frozenset({each})] - values[frozenset()] for each in clients], axis=-1)
    known = lambda orders: all(frozenset(order[:size].tolist()) in values for order in orders for size in clients)
    if len(orders) and known(orders):
        found |= {"orders": from_orders(values, orders), "truncated": from_orders(values, orders, TOLERANCE)}
    if len(orders) and known(rotations(orders)):
        found["stratified"] = from_orders(values, rotations(orders))
    return found


def shapley(values: Values, count: int) -> np.ndarray:
    """The Shapley values of N clients [S, N], from the values of all their coalitions."""
    return _exact(values, count, _by_orders)


def from_orders(values: Values, orders: np.ndarray, tolerance: float | None = None) -> np.ndarray:
    """The mean gain of each client [S, N] over orders [M, N], truncated if there is a ``tolerance``."""
    everyone = values[frozenset(range(orders.shape[1]))]
    near = np.abs(everyone - values[frozenset()]) * (tolerance or 0.0)
    total = np.zeros((len(everyone), orders.shape[1]))
    for order in orders.tolist():
        before, running = values[frozenset()], np.ones(len(everyone), bool)
        for size, client in enumerate(order, 1):
            if tolerance is not None:
                running &= np.abs(everyone - before) > near
            after = np.where(running, values[frozenset(order[:size])], before)
            total[:, client] += after - before
            before = after
    return total / len(orders)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two rows [N]; equal numbers have their mean rank. NaN if all are equal."""
    ranks = [
        np.mean([np.sum(row[:, None] > row, axis=1), np.sum(row[:, None] >= row, axis=1)], axis=0) for row in (a, b)
    ]
    deviations = [each - each.mean() for each in ranks]
    size = math.sqrt(math.prod(float(each @ each) for each in deviations))
    return float(deviations[0] @ deviations[1]) / size if size else math.nan


def _by_orders(sizes: np.ndarray, count: int) -> np.ndarray:
    """The share of the orders in which a client joins a coalition of ``sizes`` clients."""
    return np.array([1 / (count * math.comb(count - 1, size)) for size in range(count)])[sizes]


def _same(sizes: np.ndarray, count: int) -> np.ndarray:
    """The same weight for all coalitions."""
    return np.full(len(sizes), 1 / 2 ** (count - 1))


def _exact(values: Values, count: int, weight: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Weighted sums of the gains over all coalitions without each client [S, N]."""
    numbers = np.arange(2**count)  # the set bits of a number are the clients of a coalition
    table = np.empty((2**count, len(values[frozenset()])))
    for coalition, value in values.items():
        table[sum(1 << client for client in coalition)] = value
    sizes = np.array([int(number).bit_count() for number in numbers])
    found = np.empty((table.shape[1], count))
    for client in range(count):
        without = numbers[(numbers >> client) & 1 == 0]
        found[:, client] = weight(sizes[without], count) @ (table[without | 1 << client] - table[without])
    return found
