"""FedAvg: average the clients' models, weighted by their numbers of samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, Algorithm 1. BatchNorm statistics are averaged with the rest of the state, as the authors of FedMR
run it.
"""

import dataclasses
from typing import NamedTuple

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.base import Problem, Strategy


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedAvg's own setting."""

    weights: str = field(
        "samples",
        "weights of the clients in the mean: their numbers of samples n_i, or all equal",
        choices=("samples", "uniform"),
        source="McMahan et al. 2017, Algorithm 1",
    )


class State(NamedTuple):
    """The global model."""

    model: Variables


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedAvg."""

    def init(key):
        return State(problem.model.init(key))

    def dispatch(state, cohort, key):
        return {"model": trees.broadcast(state.model, problem.cohort_size)}

    def client_update(payload, memory, data, round, key):
        model, metrics = local.train(problem.model, problem.local, payload["model"], data, key)
        return {"model": model}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        weights = cohort.sizes if hyper.weights == "samples" else None
        return State(trees.mean(uploads["model"], weights=weights)), {}

    return Strategy(init, dispatch, client_update, server_update, global_model=lambda state: state.model)
