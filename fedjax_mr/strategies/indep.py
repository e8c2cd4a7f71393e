"""Indep: K models circulate among clients and are never combined ("FedMR w/o MR").

Hu et al.: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination, KDD 2024, sections 3.1
and 5.2, Figure 5. Model j goes to the j-th client of the cohort, whose order is random. The deployed model is the
uniform mean. The K models are also tested one by one.
"""

from fedjax_mr.strategies.base import Problem, Strategy, circulating


def build(hyper: None, problem: Problem) -> Strategy:
    """Build Indep."""
    return circulating(problem)._replace(individual_models=lambda state: state.models)
