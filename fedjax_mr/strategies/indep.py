"""Indep: K models that travel from client to client and are never mixed ("FedMR w/o MR").

Hu et al.: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination, KDD 2024, sections 3.1
and 5.2, Figure 5. Model j goes to the j-th client of a
cohort in random order; the deployed model is the uniform mean, and the K models are tested one by one beside it.
"""

from typing import NamedTuple

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, copies_of_one, plain_training, view


class State(NamedTuple):
    """K models, leaves [K, ...]."""

    models: Variables


def build(hyper: None, problem: Problem) -> Strategy:
    """Return Indep; it has no setting of its own."""

    def init(key):
        return State(copies_of_one(problem, key))

    def dispatch(state, cohort, key):
        return {"model": state.models}

    def server_update(state, uploads, cohort, round, key):
        return State(uploads["model"]), {}

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        global_model=lambda state: trees.mean(state.models),
        individual_models=lambda state: state.models,
        models=view("models", stacked=True),
    )
