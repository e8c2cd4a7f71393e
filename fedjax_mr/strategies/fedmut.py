"""FedMut: train K mutants of the global model, pushed forth and back along its last change.

Hu, Cao, Li, Li, Liu, Li, Chen, Liu: FedMut: Generalized Federated Learning via Stochastic Mutation, AAAI 2024,
Algorithm 1. For every tensor one half of the mutants goes forth and the other half back, less far in early rounds;
which ones do which is drawn anew for every tensor. With an odd K one client receives the global model itself.

The radius belongs to the clients' learning rate: 4 goes with the authors' 0.01. Where mutants are so far away that they
train back with longer steps than the last ones, changes grow from round to round; a smaller radius or clipped
gradients help.

Deviation from the authors' code, unless ``variant=authors``: BatchNorm statistics are not mutated, as a running
variance could become negative.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging, unit_permutations
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedMut's own settings."""

    radius: float = field(
        4.0,
        "alpha, how many times the global model's last change a mutant is away from it; 0 gives uniform FedAvg",
        low=0,
        source="FedMut's code; the FedMR authors' code: 5",
    )
    beta: float = field(
        0.3,
        "beta_0, by how much the mutants that go back go less far, in the first round",
        low=0,
        high=2,
        source="FedMut's and the FedMR authors' code",
    )
    bound: int = field(
        50,
        "T_b, the round from which mutants go back as far as others go forth; beta falls linearly until then",
        unit="rounds",
        low=1,
        source="FedMut's code; the FedMR authors' code: 100",
    )
    variant: str = field(
        "paper",
        "authors: BatchNorm statistics are mutated as well",
        choices=("paper", "authors"),
        source="Hu et al., AAAI 2024",
    )


class State(NamedTuple):
    """The global model and how the next mutants differ from it."""

    model: Variables
    change: Variables  # of the last round; the parameters alone unless variant=authors
    beta: jax.Array  # b_t


def signs(key: jax.Array, *, num_units: int, count: int, beta: jax.Array) -> jax.Array:
    """By how many radii each of ``count`` mutants moves each unit [num_units, count]; consumes ``key``.

    Every row holds 1 and beta - 1 equally often, in random order; with an odd count the last mutant has 0.
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
      UserError: a round of a single client.
    """
    if problem.cohort_size < 2:
        raise UserError("fedmut mutates the global model in pairs of opposite signs: --cohort must be at least 2")

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
        share_left = 1 - jnp.minimum(round.astype(jnp.float32) / hyper.bound, 1.0)
        change = {name: trees.subtract(new, state.model[name]) for name, new in mutable(model).items()}
        return State(model, change, hyper.beta * share_left), {}

    return averaging(problem)._replace(init=init, dispatch=dispatch, server_update=server_update)
