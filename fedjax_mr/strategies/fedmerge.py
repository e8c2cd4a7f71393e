"""FedMerge: the server keeps d global models, and each client receives its own mixture of them.

Chen, Zhou, Long, Jiang, Zhang: Federated Model Merging for Personalization, AAAI 2026. With the rows of A = softmax(W),
client i receives theta_i = sum_j A_ij Theta_j, trains on the loss plus lambda |theta - theta_i|^2 (FedProx with
mu = 2 lambda) and uploads the trained model. g_i is its update, with the sign of a gradient. Then, in this order:

    W_ij decreases in proportion to p_i A_ij <Theta_j - theta_i, g_i>, computed over the head (the last block),
    Theta_j decreases by sum_i b_ij g_i, b_ij = A_ij p_i / (sum_i A_ij p_i) with the new A,

where p_i is the client's share of the samples. There is no global model. The personal model of a client is its mixture.

Deviations from the released code:
* The code repeats small steps of W until an entry has changed by more than 0.01. Here the largest change is exactly
  ``step``.
* The code updates BatchNorm statistics like parameters, so a variance could become negative. Here the statistics of
  Theta_j are the means of the clients' statistics with weights b_ij.
* In the code all clients train in every round. Here a round updates only the rows of its clients.
* In the code clients have no momentum. Here they use the configured optimizer.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.fedprox import proximal_training
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import plain_training


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMerge."""

    models: int = field(5, "d, number of global models on the server", low=1, high=1000, source="code of FedMerge")
    strength: float = field(
        0.01, "lambda, weight of the proximal term lambda |w - w_received|^2", low=0, source="code of FedMerge"
    )
    step: float = field(0.01, "largest change of a mixture's logit in a round", low=0, source="code of FedMerge")


class State(NamedTuple):
    """The global models [d, ...] and the logits of every client's mixture."""

    models: Variables
    logits: jax.Array  # W [N, d]


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMerge."""
    network, head = problem.model, problem.model.head_name()

    def mixtures(state, ids):
        """The mixtures of the clients ``ids`` [R]: shares [R, d] and models [R, ...]."""
        shares = jax.nn.softmax(state.logits[ids])
        return shares, trees.mix(state.models, shares)

    def init(key):
        models = jax.vmap(network.init)(jax.random.split(key, hyper.models))
        return State(models, jnp.zeros((problem.num_clients, hyper.models)))

    def dispatch(state, cohort, key):
        return {"model": mixtures(state, cohort.ids)[1]}

    def server_update(state, uploads, cohort, round, key):
        shares, sent = mixtures(state, cohort.ids)
        weights = cohort.sizes.astype(jnp.float32)[:, None]  # p_i up to a factor, which cancels in both uses
        changes = trees.subtract(sent["params"], uploads["model"]["params"])  # g_i [K, ...]

        def towards(params):  # <Theta_j - theta_i, g_i> for all i [K]
            products = jax.tree.map(
                lambda theta, sent, change: jnp.sum((theta[None] - sent) * change, axis=tuple(range(1, sent.ndim))),
                *(tree[head] for tree in (params, sent["params"], changes)),
            )
            return jax.tree.reduce(jnp.add, products)

        gradient = weights * shares * jax.lax.map(towards, state.models["params"]).T  # [K, d]
        largest = jnp.max(jnp.abs(gradient))
        move = jnp.where(largest > 0, hyper.step / jnp.where(largest > 0, largest, 1.0), 0.0) * gradient
        logits = state.logits.at[cohort.ids].add(-move)

        owned = (weights * jax.nn.softmax(logits[cohort.ids])).T
        total = jnp.sum(owned, axis=1)  # 0 if the shares of all these clients in a model are too small for a float
        owned = owned / jnp.where(total > 0, total, 1.0)[:, None]  # b [d, K]
        models = trees.mix(uploads["model"], owned)
        params = trees.subtract(state.models["params"], trees.mix(changes, owned))
        return State(jax.vmap(trees.where)(total > 0, models | {"params": params}, state.models), logits), {}

    def personal_part(state, client_id):
        shares = jax.nn.softmax(state.logits[client_id][None])
        return jax.tree.map(lambda leaf: leaf[0], trees.mix(state.models, shares))

    return Strategy(
        init,
        dispatch,
        plain_training(problem, train=proximal_training(problem, hyper.strength)),
        server_update,
        personal_part=personal_part,
        personal_model=lambda part, memory, data, key: part,
    )
