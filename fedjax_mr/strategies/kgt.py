"""K-GT: gradient tracking without a server; corrections remove what the clients' data differ by.

Liu, Lin, Koloskova, Stich: Decentralized Gradient Tracking with Local Steps, Optimization Methods and Software 2024,
Algorithm 1. Client i adds its correction c_i to every gradient of its K local steps from x_i to y_i. With its mean
corrected gradient z_i = (x_i - y_i) / (K eta), neighbours then compute

    c_i <- c_i - z_i + sum over j of W_ij z_j
    x_i <- sum over j of W_ij (x_j - rate K eta z_j)

The corrections sum to zero over the clients. With one local step this is gradient tracking (DIGing with the average
after the step: Nedic, Olshevsky, Shi: Achieving Geometric Convergence for Distributed Optimization over Time-Varying
Graphs, SIAM Journal on Optimization 2017): z_i is the tracked gradient, which becomes W z plus the change of the
client's gradient. K-GT is to D-PSGD as SCAFFOLD is to FedAvg.

Sources. Of the paper only the abstract was at hand. Two public implementations (an optimizer ``K_GT`` in a library for
decentralised training, and a simulator with FlexGT beside it) compute these two equations, with eta_s for ``rate`` and
without momentum in z, and start the corrections at zero.

Deviations:
* The corrections start at zero; the paper starts them at the mean of all clients' gradients minus the client's own.
* The paper has no momentum. Here the step size eta is lr / (1 - momentum), as in our SCAFFOLD.
* A client that does not take part in a round keeps its model and its correction.
* BatchNorm statistics are averaged over the neighbours.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies import graphs
from fedjax_mr.strategies.decentralised import active, consensus, decentralised, only_averages, put_active
from fedjax_mr.strategies.graphs import graph_of
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import step_towards, zero_params
from fedjax_mr.strategies.scaffold import correct, steady_step


@dataclasses.dataclass(frozen=True)
class Hyper(graphs.Hyper):
    """Hyper-parameters of K-GT."""

    rate: float = field(
        1.0,
        "eta_s, factor of a client's change before the average",
        low=0,
        open_low=True,
        source="our choice; Liu et al. 2024 have a step size of its own",
    )


class State(NamedTuple):
    """The models and the corrections of all clients [N, ...]."""

    models: Variables
    corrections: Any  # c, like the parameters


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build K-GT.

    Raises:
      UserError: the optimizer of the clients is not SGD.
    """
    graph, step_size = graph_of(hyper, problem.num_clients, problem.cohort_size), steady_step(problem.local)
    inner = decentralised(problem, graph)

    def init(key):
        return State(inner.init(key).models, trees.broadcast(zero_params(problem), problem.num_clients))

    def dispatch(state, cohort, key):
        return {"model": trees.take(state.models, cohort.ids), "correction": trees.take(state.corrections, cohort.ids)}

    def client_update(payload, memory, data, round, key):
        received = payload["model"]
        optimizer = optax.chain(correct(payload["correction"]), problem.local.optimizer)
        model, metrics = local.train(problem.model, problem.local, received, data, key, optimizer=optimizer)
        steps = jnp.maximum(metrics.steps, 1).astype(jnp.float32)
        gradient = trees.scale(trees.subtract(received["params"], model["params"]), 1 / (steps * step_size))
        return {"model": model, "gradient": gradient}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        taking_part, old = active(problem, cohort), trees.take(state.models, cohort.ids)
        map = graph.map(round, taking_part)
        stepped = jax.vmap(step_towards, in_axes=(0, 0, None))(old, uploads["model"], hyper.rate)
        models = trees.mix(put_active(state.models, stepped, cohort), map)
        gradients = put_active(trees.zeros_like(state.corrections), uploads["gradient"], cohort)
        change = trees.subtract(trees.mix(gradients, map), gradients)
        return State(models, trees.add(state.corrections, change)), consensus(problem, models)

    return inner._replace(
        init=init,
        dispatch=dispatch,
        client_update=client_update,
        server_update=server_update,
        neighbours=only_averages("its corrections sum to zero only with the weights of the graph; use dpsgd"),
    )
