"""FedAvg: average the clients' models, weighted by their numbers of samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, Algorithm 1. BatchNorm statistics are averaged like the parameters, as in the code of FedMR's
authors.
"""

import dataclasses

from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedAvg."""

    weights: str = field(
        "samples",
        "weights of the clients in the mean: their numbers of samples n_i (samples), or equal weights (uniform)",
        choices=("samples", "uniform"),
        source="McMahan et al. 2017, Algorithm 1",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedAvg."""
    return averaging(problem, weights=hyper.weights)
