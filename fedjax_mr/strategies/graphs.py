"""Graphs of clients that send their models to each other: who averages with whom, and with which weight.

A graph is a matrix of weights W [N, N], or several [T, N, N] that take turns round by round. W_ij is the share of
client j's model in the next model of client i. All rows and all columns sum to one, so averages stay averages and the
mean over all clients does not change. Of an undirected graph with degrees d, the weights are those of Metropolis and
Hastings (Xiao, Boyd, Kim: Distributed average consensus with least-mean-square deviation, JPDC 2007):

    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours, W_ii = 1 - the others.

The exponential graphs are those of Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep
Learning, ICML 2019, with the weights of Ying, Yuan, Chen, Hu, Pan, Yin: Exponential Graph is Provably Efficient for
Decentralized Deep Training, NeurIPS 2021. In ``one_peer``, each client averages with one other in each round. If N is a
power of two, log2(N) rounds average all models exactly.

A user adds a graph as ``fmr.GRAPHS["mine"] = graph``: a graph of networkx with the nodes 0..N-1, a matrix of weights or
of neighbours (0 and 1), or a function ``(num_clients, degree, rng)`` that returns one of these.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Received

Make = Callable[[int, int, np.random.Generator], Any]
"""(N, degree, rng) -> W [N, N] or [T, N, N], neighbours [N, N] of 0 and 1, or a graph of networkx."""
MOST_ADDED = 16  # neighbours whose models are added one after the other; of more, one product of matrices is faster
EXACT = 1e-6  # largest error of a sum of weights


def ring(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """Each client has two neighbours."""
    return _circle(num_clients, np.arange(num_clients))


def torus(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """A grid that closes at its ends, as square as N allows: four neighbours."""
    rows = max(each for each in range(1, int(num_clients**0.5) + 1) if num_clients % each == 0)
    if rows == 1:
        raise UserError(
            f"hyper.graph=torus needs N = rows x columns, but {num_clients} clients have one row: use hyper.graph=ring"
        )
    grid = np.arange(num_clients).reshape(rows, -1)
    return np.maximum.reduce([_circle(num_clients, line) for line in (*grid, *grid.T)])


def complete(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """All clients are neighbours."""
    return 1 - np.eye(num_clients, dtype=int)


def star(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """Client 0 is the neighbour of all others."""
    edges = np.zeros((num_clients, num_clients), int)
    edges[0, 1:] = edges[1:, 0] = 1
    return edges


def regular(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """Each client has ``degree`` random neighbours: random circles through all clients, and pairs if it is odd.

    For a degree of at least N / 2 it is the complement of such a graph. Not all graphs of a degree are equally likely.
    """
    if not 2 <= degree < num_clients or degree * num_clients % 2:
        raise UserError(
            f"hyper.graph=regular has no graph of degree {degree} for {num_clients} clients: it needs a degree of at "
            "least 2 and less than the number of clients, and an even product of both"
        )
    missing = min(degree, num_clients - 1 - degree)
    edges, every = np.zeros((num_clients, num_clients), int), complete(num_clients, degree, rng)
    for left in range(missing, 0, -2):
        order = _random_circle(every - edges, rng)
        edges |= _circle(num_clients, order) if left > 1 else _circle(num_clients, *order.reshape(-1, 2))
    return edges if missing == degree else every - edges


def _random_circle(free: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random order of all clients on a closed line of edges that are ``free`` [N, N].

    Each turn mends one gap and makes none: it reverses a part of the line (Palmer: The hidden algorithm of Ore's
    theorem on Hamiltonian cycles, 1997). There is such a part if each client has at least N / 2 free edges.
    """
    order = rng.permutation(len(free))
    while (gaps := np.flatnonzero(free[order, np.roll(order, -1)] == 0)).size:
        order = np.roll(order, -gaps[0] - 1)  # the gap is now between the last and the first
        ends = np.flatnonzero(free[order[-1], order[:-1]] & free[order[0], order[1:]])
        end = rng.choice(ends) + 1
        order = np.concatenate([order[:end][::-1], order[end:]])
    return order


def exponential(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """Client i receives from i + 1, i + 2, i + 4, ... modulo N, with equal weights. Directed."""
    shifts = [_shift(num_clients, jump) for jump in _jumps(num_clients)]
    return sum(shifts, np.eye(num_clients)) / (1 + len(shifts))


def one_peer(num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """In round t, client i averages with i + 2^(t mod log2 N). Directed, and another in each round."""
    shifts = [_shift(num_clients, jump) for jump in _jumps(num_clients)]
    return (np.eye(num_clients) + np.stack(shifts or [np.eye(num_clients)])) / 2


def _circle(num_clients: int, *lines: np.ndarray) -> np.ndarray:
    """The neighbours [N, N] on closed lines of clients."""
    edges = np.zeros((num_clients, num_clients), int)
    for line in lines:
        following = np.roll(line, -1)
        edges[line, following] = edges[following, line] = line != following
    return edges


def _shift(num_clients: int, jump: int) -> np.ndarray:
    return np.roll(np.eye(num_clients), jump, axis=1)


def _jumps(num_clients: int) -> list[int]:
    return [2**power for power in range((num_clients - 1).bit_length())]


@dataclasses.dataclass(frozen=True)
class _Edges:
    """A graph in a text file: two numbers of clients in each line. A changed file is another graph."""

    path: Path
    changed: int

    def __call__(self, num_clients: int, degree: int, rng: np.random.Generator) -> np.ndarray:
        try:
            pairs = np.loadtxt(self.path, dtype=np.int64, ndmin=2)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the graph {self.path}: {error}") from None
        if pairs.shape[1:] != (2,) or pairs.min() < 0 or pairs.max() >= num_clients:
            raise UserError(f"{self.path} must have two numbers of clients in 0..{num_clients - 1} in each line")
        edges = np.zeros((num_clients, num_clients), int)
        edges[pairs[:, 0], pairs[:, 1]] = edges[pairs[:, 1], pairs[:, 0]] = 1
        return edges


def _row_of(graph: Any) -> Any:
    """A user's row: a function, or what it would return."""
    if callable(graph) and not hasattr(graph, "edges"):
        return graph
    return lambda num_clients, degree, rng: graph


def check_row(name: str, row: Any) -> None:
    """A row of `GRAPHS` is a function, because `Registry.row_of` makes one of everything else."""


GRAPHS: Registry[Make] = Registry(
    "graph",
    "fmr.GRAPHS",
    check_row,
    {row.__name__: row for row in (ring, torus, complete, star, regular, exponential, one_peer)},
    row_of=_row_of,
)
"""All graphs of clients but files."""


@dataclasses.dataclass(frozen=True)
class Hyper:
    """The settings of the graph of a decentralised method."""

    graph: str = field(
        "ring",
        "graph of the clients, by name; or the path of a text file (.txt) with two numbers of neighbouring clients, "
        "counted from 0, in each line",
        names=GRAPHS,
        path=True,
        source="Lian et al. 2017",
    )
    degree: int = field(4, "neighbours of each client in graph=regular", low=2, high=1000, source="our choice")
    graph_seed: int = field(0, "seed of the random numbers of a graph", low=0, source="our choice")


class Graph(NamedTuple):
    """The graph of N clients: T matrices of weights that take turns."""

    weights: np.ndarray  # W [T, N, N] float64; rows and columns sum to one
    ids: np.ndarray  # [T, N, S] int32: the other clients whose models each client receives; itself in empty places
    shares: np.ndarray  # [T, N, S] float32: their weights, 0 in empty places

    @property
    def num_clients(self) -> int:
        """N."""
        return self.weights.shape[-1]

    @property
    def undirected(self) -> bool:
        """Whether neighbours send each other their models with the same weight."""
        return np.allclose(self.weights, np.swapaxes(self.weights, 1, 2), atol=EXACT)

    @property
    def contraction(self) -> float:
        """The largest factor by which a round shrinks the distance of the models from their mean; 0: it averages all.

        For one matrix it is the second singular value of W, and 1 minus it is the spectral gap. For T matrices it is
        that of their product, per round (its T-th root).
        """
        product = functools.reduce(lambda before, weights: weights @ before, self.weights)
        second = np.linalg.svd(product - 1 / self.num_clients, compute_uv=False)[0]
        return float(second ** (1 / len(self.weights))) if second > EXACT else 0.0

    def turn(self, array: np.ndarray, round: jax.Array) -> jax.Array:
        """The part of an array [T, ...] for a round."""
        return jnp.asarray(array)[round % len(array)] if len(array) > 1 else jnp.asarray(array[0])

    def sent(self, round: jax.Array, active: jax.Array) -> jax.Array:
        """The weights [N, S] with which active clients receive the models of active neighbours."""
        shares = self.turn(self.shares, round)
        return jnp.where(active[:, None] & active[self.turn(self.ids, round)], shares, 0.0)

    def received(self, round: jax.Array, active: jax.Array) -> Received:
        """What the clients receive in a round if only the ``active`` clients [N] take part."""
        counts = (self.shares > 0).sum(axis=2)
        sent = self.turn(self.ids, round), self.sent(round, active), self.turn(counts.astype(np.int32), round)
        return Received(*sent, least=int(counts.min()), most=int(counts.max()))

    def map(self, round: jax.Array, active: jax.Array) -> trees.Map:
        """The map of a round if only the ``active`` clients [N] take part.

        A client keeps the weight of a neighbour that does not take part for its own model. In an undirected graph the
        columns still sum to one.
        """
        ids, shares = self.turn(self.ids, round), self.sent(round, active)
        own = jnp.maximum(1 - jnp.sum(shares, axis=1), 0.0)  # not -1e-8, so that no variance becomes negative
        clients = jnp.arange(self.num_clients, dtype=jnp.int32)
        if shares.shape[1] > MOST_ADDED:
            return jnp.diag(own).at[clients[:, None], ids].add(shares)
        return trees.Neighbours(
            jnp.concatenate([clients[:, None], ids], axis=1), jnp.concatenate([own[:, None], shares], axis=1)
        )


def graph_of(hyper: Hyper, num_clients: int, cohort_size: int) -> Graph:
    """The graph of a federation.

    Raises:
      UserError: an unknown graph, one that does not fit N or whose weights do not sum to one, or a directed graph of
        which only some clients take part in a round.
    """
    name = hyper.graph
    if name in GRAPHS:
        make: Make = GRAPHS[name]
    elif name.endswith(".txt"):
        path = Path(name)
        make = _Edges(path, path.stat().st_mtime_ns if path.exists() else 0)
    else:
        raise unknown_name("graph", name, (*GRAPHS, "FILE.txt"))
    graph = _graph(make, f"hyper.graph={name}", num_clients, hyper.degree, hyper.graph_seed)
    if cohort_size < num_clients and not graph.undirected:
        raise UserError(
            f"hyper.graph={name} is directed: without some of its clients the mean over all models would change, so "
            f"set cohort={num_clients} or use an undirected graph"
        )
    return graph


@functools.lru_cache(maxsize=16)  # a strategy is built many times
def _graph(make: Make, where: str, num_clients: int, degree: int, seed: int) -> Graph:
    weights = _weights(make(num_clients, degree, np.random.default_rng([seed, 76])), where, num_clients)
    others = weights * ~np.eye(num_clients, dtype=bool)
    most = int((others > 0).sum(axis=2).max())
    order = np.argsort(others == 0, axis=2, kind="stable")[:, :, :most]  # neighbours first, by their numbers
    shares = np.take_along_axis(others, order, axis=2)
    ids = np.where(shares > 0, order, np.arange(num_clients)[None, :, None])
    return Graph(weights, ids.astype(np.int32), shares.astype(np.float32))


def _weights(made: Any, where: str, num_clients: int) -> np.ndarray:
    """The weights [T, N, N] of what a row made.

    Raises:
      UserError: it has another number of clients, or is neither weights nor an undirected graph.
    """
    if hasattr(made, "edges"):  # of networkx
        if set(made.nodes) != set(range(num_clients)):
            raise UserError(f"{where}: the nodes must be the numbers 0..{num_clients - 1} of the clients")
        edges = np.zeros((num_clients, num_clients), int)
        for one, other, *_ in made.edges:
            edges[one, other] = edges[other, one] = 1
        made = edges
    made = np.asarray(made)
    if made.shape[-2:] != (num_clients, num_clients) or made.ndim not in (2, 3):
        raise UserError(f"{where} has the shape {made.shape}, but the federation has {num_clients} clients")
    if np.isin(made, (0, 1)).all() and made.ndim == 2 and not np.array_equal(made, np.eye(num_clients)):
        return metropolis(made, where)[None]
    weights = made.astype(np.float64).reshape(-1, num_clients, num_clients)
    sums = np.concatenate([weights.sum(axis=1), weights.sum(axis=2)])
    if not (weights >= 0).all() or np.abs(sums - 1).max() > EXACT:
        raise UserError(f"{where}: weights must be at least 0, and each row and each column of them must sum to one")
    return weights


def metropolis(edges: np.ndarray, where: str = "the graph") -> np.ndarray:
    """The weights [N, N] of an undirected graph, given as neighbours [N, N] of 0 and 1.

    Raises:
      UserError: the graph is directed.
    """
    edges = edges.astype(bool) & ~np.eye(len(edges), dtype=bool)
    if not np.array_equal(edges, edges.T):
        raise UserError(f"{where} is directed: pass a matrix of weights whose rows and columns sum to one")
    degrees = edges.sum(axis=1)
    weights = edges / (1 + np.maximum(degrees[:, None], degrees[None, :]))
    return weights + np.diag(1 - weights.sum(axis=1))
