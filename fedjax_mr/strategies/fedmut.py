"""FedMut: clients train K mutants of the global model, displaced forward and backward along its last update.

Hu, Cao, Li, Li, Liu, Li, Chen, Liu: FedMut: Generalized Federated Learning via Stochastic Mutation, AAAI 2024,
Algorithm 1. In every tensor one half of the mutants is displaced forward and the other half backward, by a smaller
distance in early rounds. The halves are drawn independently for every tensor. If K is odd, one client receives the
global model itself.

The radius must suit the clients' learning rate: 4 suits the authors' 0.01. If the mutants are too far away, the updates
that bring them back are larger than the last update and grow from round to round. A smaller radius or gradient clipping
prevents this.

Deviation from the authors' code, unless ``variant=authors``: BatchNorm statistics are not mutated, because a running
variance could become negative.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, unit_permutations


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMut."""

    radius: float = field(
        4.0,
        "alpha, distance of a mutant from the global model in multiples of its last update; 0 gives uniform FedAvg",
        low=0,
        source="code of FedMut; code of FedMR's authors: 5",
    )
    beta: float = field(
        0.3,
        "beta_0, reduction of the backward displacement in the first round",
        low=0,
        high=2,
        source="code of FedMut and of FedMR's authors",
    )
    bound: int = field(
        50,
        "T_b, round at which beta, after a linear decay, reaches 0 and both displacements are equal",
        unit="rounds",
        low=1,
        source="code of FedMut; code of FedMR's authors: 100",
    )
    variant: str = field(
        "paper",
        "paper: only parameters are mutated; authors: BatchNorm statistics are mutated as well",
        choices=("paper", "authors"),
        source="Hu et al., AAAI 2024",
    )


class State(NamedTuple):
    """The global model and the displacement of the next mutants."""

    model: Variables
    change: Variables  # last update; only parameters unless variant=authors
    beta: jax.Array  # b_t


def signs(key: jax.Array, *, num_units: int, count: int, beta: jax.Array) -> jax.Array:
    """Draw the displacement of each unit for ``count`` mutants [num_units, count], in radii; consumes ``key``.

    Each row holds 1 and beta - 1 equally often, in random order. If the count is odd, the last mutant has 0.
    """
    pairs = count // 2
    balanced = jnp.concatenate([jnp.ones(pairs), jnp.full(pairs, 1.0) * (beta - 1)])
    rows = balanced[unit_permutations(key, num_units, 2 * pairs)]
    return jnp.pad(rows, ((0, 0), (0, count - 2 * pairs)))


def mutate(model: Variables, change: Variables, moves: jax.Array) -> Variables:
    """K mutants [K, ...]: model[l] + moves[l, j] change[l] for leaf l and mutant j, moves [leaves, K]."""
    leaves, structure = jax.tree.flatten(model)
    pairs = zip(leaves, jax.tree.leaves(change), moves, strict=True)
    mutants = [jax.vmap(lambda move, leaf=leaf, step=step: leaf + move * step)(move) for leaf, step, move in pairs]
    return jax.tree.unflatten(structure, mutants)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMut.

    Raises:
      UserError: the cohort has a single client.
    """
    if problem.cohort_size < 2:
        raise UserError("fedmut displaces mutants in pairs of opposite directions: cohort= must be at least 2")

    def mutable(model):
        """The collections that are mutated."""
        return model if hyper.variant == "authors" else {"params": model["params"]}

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(mutable(model)), jnp.zeros(()))

    def dispatch(state, cohort, key):
        count = problem.cohort_size
        num_units = len(jax.tree.leaves(state.change))
        moves = hyper.radius * signs(key, num_units=num_units, count=count, beta=state.beta)
        mutants = mutate(mutable(state.model), state.change, moves)
        return {"model": trees.broadcast(state.model, count) | mutants}

    def server_update(state, uploads, cohort, round, key):
        model = trees.mean(uploads["model"])
        remaining = 1 - jnp.minimum(round.astype(jnp.float32) / hyper.bound, 1.0)
        change = {name: trees.subtract(new, state.model[name]) for name, new in mutable(model).items()}
        return State(model, change, hyper.beta * remaining), {}

    return averaging(problem)._replace(init=init, dispatch=dispatch, server_update=server_update)
