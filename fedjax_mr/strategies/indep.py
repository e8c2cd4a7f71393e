"""Indep: K models circulate among clients and are never combined ("FedMR w/o MR").

Hu et al.: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination, KDD 2024, sections 3.1
and 5.2, Figure 5. Model j goes to the j-th client of the cohort, whose order is random. The deployed model is the
uniform mean. The K models are also tested one by one.
"""

import dataclasses

from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import STARTS, circulating


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Indep."""

    start: str = field(
        "copies",
        "the K initial models: copies of one initialisation, as in FedMR's released code, or independent ones",
        choices=tuple(STARTS),
        source="as fedmr_start",
    )


def build(hyper: Hyper | None, problem: Problem) -> Strategy:
    """Build Indep. Without hyper-parameters, it has their defaults."""
    return circulating(problem, start=STARTS[(hyper or Hyper()).start])._replace(
        individual_models=lambda state: state.models
    )
