"""FedExP: FedAvg with a server step that is larger if the clients' updates point in different directions.

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023, Algorithm 1. Single
iterates oscillate, so the mean of the last two is deployed. Training continues from the last one.

Deviations from the paper: clients are weighted by their numbers of samples, as in its authors' code; the paper weights
them equally (``weights=uniform``). Learning rates do not decay, so epsilon does not decay either.

Deviations from the code of FedMR's authors, unless ``variant=authors``: BatchNorm statistics are averaged and not
extrapolated, because a running variance could become negative. Epsilon is not multiplied by K.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedExP."""

    epsilon: float = field(
        1e-3,
        "epsilon, added to the squared norm of the mean update; large values give FedAvg",
        low=0,
        source="code of FedExP: 1e-3 for CIFAR, 0.1 for EMNIST; code of FedMR's authors: 0.1",
    )
    weights: str = field(
        "samples",
        "weights of the clients: their numbers of samples n_i (samples), or equal weights (uniform)",
        choices=("samples", "uniform"),
        source="code of FedExP and of FedMR's authors; the paper: uniform",
    )
    variant: str = field(
        "paper",
        "paper: Algorithm 1; authors: code of FedMR's authors, with K epsilon and extrapolated BatchNorm statistics",
        choices=("paper", "authors"),
        source="Jhunjhunwala et al. 2023",
    )


class State(NamedTuple):
    """The last two iterates."""

    model: Variables
    previous: Variables


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedExP."""
    epsilon = hyper.epsilon * (problem.cohort_size if hyper.variant == "authors" else 1)

    def init(key):
        model = problem.model.init(key)
        return State(model, model)

    def server_update(state, uploads, cohort, round, key):
        weights = cohort.sizes if hyper.weights == "samples" else (cohort.sizes > 0).astype(jnp.float32)
        old, mean = state.model, trees.mean(uploads["model"], weights=weights)
        deltas = jax.vmap(lambda params: trees.subtract(params, old["params"]))(uploads["model"]["params"])
        delta = trees.mean(deltas, weights=weights)
        mean_square = trees.mean(jax.vmap(trees.squared_norm)(deltas), weights=weights)
        server_lr = jnp.maximum(1.0, mean_square / (2 * (trees.squared_norm(delta) + epsilon)))

        model = mean | {"params": trees.add(old["params"], trees.scale(delta, server_lr))}
        if hyper.variant == "authors":  # as released: a variance can become negative
            step = lambda new, old: trees.add(old, trees.scale(trees.subtract(new, old), server_lr))
            model |= {name: step(mean[name], old[name]) for name in mean if name != "params"}
        return State(model, trees.where(round == 0, model, old)), {"server_lr": server_lr}

    def global_model(state):
        return trees.interpolate(state.model, state.previous, 0.5)

    return averaging(problem)._replace(init=init, server_update=server_update, global_model=global_model)
