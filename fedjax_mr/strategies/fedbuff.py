"""FedBuff: average the changes of the next K clients that return, weighted by their staleness.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation, AISTATS
2022, Algorithm 1. The server's step is lr (1/K) sum of s(tau) D, with s(tau) = 1 / sqrt(1 + tau) (``staleness``
polynomial, a = 0.5) and a new client for each one that returns (``refill=arrival``). Any method can have asynchronous
clients by the same rule; this one has the paper's weights and learning rate. In synchronous rounds it is FedAvg with
equal weights and a server learning rate.

Released code. FLSim, of the authors, adds the changes and divides s by s(1): its learning rate is that of the paper
divided by K sqrt(2). It can drop uploads of a staleness above ``max_staleness`` (default 1e10: none); here all count.
FedScale divides by the sum of the s(tau) instead of K (``divide_by=weights``).
"""

import dataclasses

import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, freshness, step_towards


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedBuff."""

    lr: float = field(
        1.0,
        "learning rate of the server; FLSim's is this one divided by K sqrt(2)",
        low=0,
        source="our choice; FLSim's example: 0.7 with momentum 0.9 and K = 10",
    )
    divide_by: str = field(
        "buffer",
        "divisor of the weighted sum of changes: K (buffer), or the sum of the weights s(tau) (weights; FedScale)",
        choices=("buffer", "weights"),
        source="paper, Algorithm 1",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedBuff."""

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads["model"])  # of w + s(tau) D
        rate = hyper.lr / jnp.mean(freshness(cohort)) if hyper.divide_by == "weights" else hyper.lr
        return state._replace(model=step_towards(state.model, mean, rate)), {}

    return averaging(problem)._replace(server_update=server_update)
