"""GitFL: K branches, which clients train in turn, and a master model that branches pull before they are trained again.

Hu, Xia, Yan, Yue, Xia, Huang, Liu, Chen: GitFL: Uncertainty-Aware Real-Time Asynchronous Federated Learning Using
Version Control, RTSS 2023 (arXiv 2211.12049). When a client returns (*push*), its branch gets a new version. The master
is the mean of the branches, weighted by their versions (*merge*). The next client trains a mixture of branch and master
(*pull*): the branch keeps the more weight, the further its version is ahead. A branch that is ahead is sent to slow and
rarely chosen clients.

Sources. The constants and the selection are those of the authors' released code; the paper's formulas were not
available to us. The code counts a version when a client starts, so that branches that have never returned are part of
the master; it also never chooses a client that has just returned (``variant=authors``; with all N clients in flight
no other is idle, so here it is chosen). Here, a version is a finished training. In the first tenth of a budget of
simulated seconds, only curiosity counts. Then its weight falls to 0.05, and grows to 0.5 at the end of the budget,
where the code stops. Later it stays there.

The number of branches is that of the clients in flight. The paper has one arrival per version (``cohort=1``). In
synchronous rounds, all branches return in each round, and clients are selected uniformly: a branch then keeps 10 of 11
parts of itself. ``staleness`` has no effect.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import History, Problem, Strategy
from fedjax_mr.strategies.parts import circulating, copies_of_one, returned

AHEAD, LEAST, MOST = 10.0, 2.0, 50.0  # weight of a branch: clip(AHEAD + version - mean version, LEAST, MOST)
SMALLEST = 1e-6  # weight of a client in the selection
EXPLORATION = 0.1  # share of the budget in which only curiosity counts
REWARD = 0.1  # scale of the reward of versions


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of GitFL."""

    selection: str = field(
        "both",
        "how clients are chosen: by curiosity and versions (both), by one of them, or at random",
        choices=("both", "curiosity", "versions", "random"),
        source="authors' code, gitfl_select_ctrl = 0, 2, 1, -1",
    )
    budget: float = field(
        300_000.0,
        "budget of simulated seconds, in which selection=both shifts its weight",
        low=0,
        open_low=True,
        unit="seconds",
        source="authors' code, physical_time",
    )
    variant: str = field(
        "finished",
        "versions count finished trainings (finished), or started ones, and a client that has just returned is not "
        "chosen unless all others train (authors)",
        choices=("finished", "authors"),
        source="our reading of the paper; authors' code",
    )


class State(NamedTuple):
    """K branches, leaves [K, ...]; M with asynchronous clients."""

    branches: Variables  # newest upload of each
    versions: jax.Array  # v [K] float32


def control(versions: jax.Array) -> jax.Array:
    """The weight of each branch when it pulls the master, whose weight is 1 [K]."""
    return jnp.clip(AHEAD + versions - jnp.mean(versions), LEAST, MOST)


def rewards(hyper: Hyper, history: History, busy: np.ndarray, branch: int) -> np.ndarray:
    """The weights of all clients [N] in the draw of a client for a branch; 0 for those that are busy."""
    curiosity = 1 / np.sqrt(1 + history.starts)
    longest = history.seconds.max()
    ahead = history.versions[branch] - history.versions.mean()
    slow = (history.seconds - history.seconds.mean()) / longest if longest > 0 else np.zeros_like(curiosity)
    reward = REWARD * slow * ahead
    share = min(history.time / float(hyper.budget), 1.0) / 2
    if hyper.selection == "random":
        weights = np.ones_like(curiosity)
    elif hyper.selection == "versions":
        weights = reward
    elif hyper.selection == "curiosity" or history.time < EXPLORATION * float(hyper.budget):
        weights = curiosity
    else:
        weights = share * curiosity + (1 - share) * reward
    return np.where(busy, 0.0, np.maximum(SMALLEST, weights))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build GitFL."""
    first = 1.0 if hyper.variant == "authors" else 0.0

    def init(key):
        return State(copies_of_one(problem, key), jnp.full(problem.num_branches, first))

    def weights(state):
        return jnp.where(jnp.sum(state.versions) > 0, state.versions, 1.0)  # equal before the first push

    def dispatch(state, cohort, key):
        """Pull."""
        rows = jnp.arange(problem.cohort_size) if cohort.branches is None else cohort.branches
        keep = control(state.versions)[rows]
        share = lambda leaf: (keep / (keep + 1)).reshape(-1, *(1,) * (leaf.ndim - 1))
        master = trees.mean(state.branches, weights=weights(state))
        pull = lambda branch, master: share(branch) * branch + (1 - share(branch)) * master[None]
        return {"model": jax.tree.map(pull, trees.take(state.branches, rows), master)}

    def server_update(state, uploads, cohort, round, key):
        """Push."""
        branches = returned(state.branches, uploads["model"], cohort)
        rows = jnp.arange(problem.cohort_size) if cohort.branches is None else cohort.branches
        return State(branches, state.versions.at[rows].add(1.0)), {}

    def choose(history, busy, key):
        clients, chosen = np.arange(len(busy)), []
        rests = np.isin(clients, history.returned) if hyper.variant == "authors" else np.zeros_like(busy)
        draws = np.asarray(jax.random.uniform(key, (len(history.branches),)))
        for branch, draw in zip(history.branches, draws, strict=True):
            not_free = busy if np.all(busy | rests) else busy | rests
            sums = np.cumsum(rewards(hyper, history, not_free, branch))
            chosen.append(int(np.searchsorted(sums, draw * sums[-1], side="right")))
            busy = busy | (clients == chosen[-1])
        return np.array(chosen)

    return circulating(problem)._replace(
        init=init,
        dispatch=dispatch,
        server_update=server_update,
        global_model=lambda state: problem.model.mean(state.branches, weights=weights(state)),
        models=None,
        choose=None if (hyper.selection, hyper.variant) == ("random", "finished") else choose,
    )
