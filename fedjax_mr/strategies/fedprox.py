"""FedProx: FedAvg whose clients are pulled back towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2,
equation 2.

Deviation from the paper, as the authors of FedMR run it: clients are drawn uniformly and weighted by their numbers of
samples (the paper draws them in proportion to these and averages plainly), and none of them stops early.
"""

import dataclasses

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedProx's own setting."""

    mu: float = field(
        0.01,
        "mu, the strength of the proximal term mu/2 |w - w_global|^2",
        low=0,
        source="KDD'24: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1 for FEMNIST, of the FedProx paper's grid",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedProx."""

    def train(received, data, key):
        cross_entropy = local.cross_entropy(problem.model)

        def loss(params, state, batch, key):
            value, state = cross_entropy(params, state, batch, key)
            distance = trees.squared_norm(trees.subtract(params, received["params"]))
            return value + hyper.mu / 2 * distance, state

        return local.train(problem.model, problem.local, received, data, key, loss=loss)

    return averaging(problem, train=train)
