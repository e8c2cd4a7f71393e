"""D-PSGD: no server; each client trains its model and averages it with those of its neighbours.

Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
Decentralized Parallel Stochastic Gradient Descent, NeurIPS 2017, Algorithm 1. In a round, client i takes its local
steps from x_i to y_i. Then x_i becomes the sum over its neighbours j of W_ij y_j (``order=train``). The paper swaps the
two: x_i becomes the sum over j of W_ij x_j, plus y_i - x_i, so that a client may send while it computes
(``order=mix``). Section 4 of the paper allows both orders.

Deviations:
* The paper takes one step of SGD between two averages. Here a round has as many as ``local_epochs`` or ``local_steps``
  say, as in the later analyses of local steps.
* In the paper all clients take part in every round. Here a client that does not take part keeps its model, and its
  neighbours keep the weight of its model for their own.
* BatchNorm statistics are averaged like the parameters.
"""

import dataclasses

from fedjax_mr import trees
from fedjax_mr.settings import field
from fedjax_mr.strategies import graphs
from fedjax_mr.strategies.decentralised import active, consensus, decentralised, only_averages, put_active
from fedjax_mr.strategies.graphs import graph_of
from fedjax_mr.strategies.interface import Problem, Strategy


@dataclasses.dataclass(frozen=True)
class Hyper(graphs.Hyper):
    """Hyper-parameters of D-PSGD."""

    order: str = field(
        "train",
        "average the trained models (train), or the models before the training, to which each client adds the change "
        "of its own training (mix)",
        choices=("train", "mix"),
        source="our choice: on the complete graph it is FedAvg; mix: Algorithm 1 of Lian et al. 2017",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build D-PSGD."""
    graph = graph_of(hyper, problem.num_clients, problem.cohort_size)
    trained_first = decentralised(problem, graph)
    if hyper.order == "train":
        return trained_first

    def server_update(state, uploads, cohort, round, key):
        trained, map = put_active(state.models, uploads["model"], cohort), graph.map(round, active(problem, cohort))
        change = trees.subtract(trained["params"], state.models["params"])
        params = trees.add(trees.mix(state.models["params"], map), change)
        models = trees.mix(trained, map) | {"params": params}
        return state._replace(models=models), consensus(problem, models)

    reason = "with hyper.order=mix clients average what they had before the training: use hyper.order=train"
    return trained_first._replace(server_update=server_update, neighbours=only_averages(reason))
