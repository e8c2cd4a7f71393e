"""FedProx: FedAvg with a proximal term that pulls each client towards the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2,
equation 2.

Deviation from the paper, as in the code of FedMR's authors: clients are selected uniformly and weighted by their
numbers of samples. The paper selects them in proportion to these numbers and takes the plain mean. No client stops
early.
"""

import dataclasses

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import Train, averaging


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedProx."""

    mu: float = field(
        0.01,
        "mu, weight of the proximal term mu/2 |w - w_global|^2; 0 gives FedAvg",
        low=0,
        source="KDD'24: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1 for FEMNIST, from the grid of the FedProx paper",
    )


def proximal_training(problem: Problem, strength: float) -> Train:
    """Training on the loss plus ``strength`` times the squared distance from the received parameters."""
    supervised = local.supervised(problem.model)

    def train(received, data, key):
        def loss(params, state, batch, key):
            value, state = supervised(params, state, batch, key)
            distance = trees.squared_norm(trees.subtract(params, received["params"]))
            return value + strength * distance, state

        return local.train(problem.model, problem.local, received, data, key, loss=loss)

    return train


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedProx."""
    return averaging(problem, train=proximal_training(problem, hyper.mu / 2))
