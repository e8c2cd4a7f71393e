"""FedDyn: a dynamic regularisation term in each client's loss aligns the clients' optima with the global optimum.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021,
Algorithm 1. Client i keeps its drift h_i, the sum of its changes, which starts at zero. Its gradient is that of the
loss plus alpha (theta - w + h_i). The server adds the mean drift of all N clients to the mean of the K models. In the
paper's notation the client's gradient is -alpha h_i, and the server's h is -alpha times the mean drift.

Deviation from the paper: its networks have no BatchNorm; here BatchNorm statistics are averaged.

Deviations from the released code:
* alpha is the same for all clients. The code divides it by r_i = N n_i / sum n.
* Weight decay and gradient clipping are those of all methods, and clipping applies to the whole dynamic term. The code
  adds alpha theta after clipping.
* The tested model is the server's w, from which training continues. The code tests the mean of the last models of all
  N clients.

alpha = 0.01 comes from an example with weight decay in which all clients train in every round. On the digits (5 of 20
clients, no weight decay) it lets the drifts grow larger than the models, and accuracy falls after 50 rounds. With
alpha = 0.1, accuracy stays close to FedAvg's.
"""

import dataclasses
from typing import NamedTuple

import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import averaging, participation, zero_params


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedDyn."""

    alpha: float = field(
        0.01,
        "alpha, weight of the dynamic term; with 0 the server still adds the mean drift",
        low=0,
        source="the example in the code of Acar et al.; FedSpeed's authors: 0.1",
    )


class State(NamedTuple):
    """The global model and the mean drift of all N clients."""

    model: Variables
    drift: trees.Params


def pull(anchor: trees.Params, strength: float) -> optax.GradientTransformation:
    """A gradient transformation that adds ``strength`` times (parameters - ``anchor``)."""
    return optax.stateless(
        lambda gradient, params: trees.add(gradient, trees.scale(trees.subtract(params, anchor), strength))
    )


def step_of_server(
    problem: Problem, model: Variables, drift: trees.Params, models: Variables, cohort: Cohort
) -> tuple[Variables, trees.Params]:
    """Update the server's model and the mean drift from the uploaded models [K, ...]."""
    mean = trees.mean(models)
    change = trees.subtract(mean["params"], model["params"])
    drift = trees.add(drift, trees.scale(change, participation(problem, cohort)))
    return mean | {"params": trees.add(mean["params"], drift)}, drift


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedDyn."""

    def init(key):
        model = problem.model.init(key)
        return State(model, trees.zeros_like(model["params"]))

    def client_update(payload, memory, data, round, key):
        received, drift = payload["model"], memory
        dynamic = pull(trees.subtract(received["params"], drift), hyper.alpha)
        optimizer = optax.chain(dynamic, problem.local.optimizer)
        model, metrics = local.train(problem.model, problem.local, received, data, key, optimizer=optimizer)
        change = trees.subtract(model["params"], received["params"])
        return {"model": model}, trees.add(drift, change), metrics

    def server_update(state, uploads, cohort, round, key):
        return State(*step_of_server(problem, state.model, state.drift, uploads["model"], cohort)), {}

    return averaging(problem)._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        init_memory=lambda key, client_id: zero_params(problem),
    )
