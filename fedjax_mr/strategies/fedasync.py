"""FedAsync: mix each client's model into the global model as soon as it arrives, the less the staler it is.

Xie, Koyejo, Gupta: Asynchronous Federated Optimization, arXiv 1903.03934, 2019, Algorithm 1. The server mixes models,
not changes, so a stale upload also pulls the global model back towards the older one from which it was trained.

The weight s(tau) of staleness is that of the run: ``staleness`` constant, polynomial (paper: a = 0.5) or hinge (a = 10,
b = 4). The paper has one arrival per version (``cohort=1``). With several, they are mixed one after the other in the
order of their starts. In synchronous rounds no upload is stale.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.settings import field
from fedjax_mr.strategies.fedprox import proximal_training
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, freshness


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedAsync."""

    alpha: float = field(
        0.6,
        "alpha, weight of an upload that is not stale",
        low=0,
        high=1,
        source="paper: 0.6 and 0.9; GitFL's authors: 0.9",
    )
    rho: float = field(
        0.005, "rho, weight of the proximal term rho/2 |w - w_received|^2; 0 disables it", low=0, source="paper"
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedAsync."""

    def server_update(state, uploads, cohort, round, key):
        def mix(model, arrival):
            upload, alpha = arrival
            return trees.interpolate(upload, model, alpha), None

        alphas = jnp.where(cohort.sizes > 0, hyper.alpha * freshness(cohort), 0.0)  # late clients have no samples
        return state._replace(model=jax.lax.scan(mix, state.model, (uploads["model"], alphas))[0]), {}

    train = proximal_training(problem, hyper.rho / 2)
    return averaging(problem, train=train)._replace(server_update=server_update, stale="uploaded")
