"""FedAWA: FedAvg whose weights are learned on the server, such that the clients' changes agree with their mean.

Shi, Zhao, Zhang, Zhou, Guo, Chang: FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using
Client Vectors, CVPR 2025. With the change tau_k = theta_k - w of client k (its vector), the server minimises

    sum_k lambda_k |tau_k - tau|  +  d,        tau = sum_k lambda_k tau_k,

over the weights lambda = softmax(T), by steps of Adam on T, and the new model is sum_k lambda_k theta_k. T is kept
between rounds, the moments of Adam are not. d keeps the models near w: with cosine distances d(a, b) = 1 - cos(a, b) it
is sum_k lambda_k d(theta_k, w) in the released code (``near=models``), d(sum_k lambda_k theta_k, w) in the paper
(``near=mean``).

Two truths. The formulas are those of the released code and of a reader's notes on the paper, whose own text was not at
hand. Other facts of the code: T starts at the clients' shares of the samples, not at their logarithms, so the first
weights are almost equal. The model is averaged with the weights from before the last step. One step per round moves a
T by at most 0.001. Left out of the code: a factor of the model (``gamma``, 1 by default), SGD in place of Adam, and
Euclidean distances. Left out of the paper: weights for each layer (FedAWA-L), which the code does not have.

Deviations:
* T belongs to a client. In the code it belongs to a place in the cohort, which is the same if all clients take part.
* BatchNorm statistics are averaged with the same weights.
* A late client, with 0 samples, is left out.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

BETAS = (0.5, 0.999)  # of Adam, in the released code


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedAWA."""

    steps: int = field(1, "steps of Adam on the weights in a round", low=1, source="released code")
    lr: float = field(0.001, "learning rate of the weights", low=0, source="released code")
    near: str = field(
        "models",
        "what shall stay near the global model: the clients' models (models), or their mean (mean)",
        choices=("models", "mean"),
        source="released code; mean: the paper",
    )


class State(NamedTuple):
    """The global model and the logits of the weights of all clients."""

    model: Variables
    logits: jax.Array  # T [N]


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedAWA."""

    def init(key):
        sizes = problem.sizes.astype(jnp.float32)
        return State(problem.model.init(key), sizes / jnp.sum(sizes))

    def server_update(state, uploads, cohort, round, key):
        takes_part, old = cohort.sizes > 0, state.model["params"]
        changes = jax.vmap(lambda params: trees.subtract(params, old))(uploads["model"]["params"])
        products, towards, size = trees.gram(changes), _along(changes, old), trees.squared_norm(old)

        def shares(logits):
            return jax.nn.softmax(jnp.where(takes_part, logits, -jnp.inf))

        def cosine(weights):
            """The cosine of w and the mean of the models; of w and each model if ``weights`` is the identity."""
            along = weights @ towards
            square = jnp.sum((weights @ products) * weights, axis=-1) + 2 * along + size
            return (size + along) / jnp.maximum(_root(square) * _root(size), 1e-8)

        def loss(logits):
            weights = shares(logits)
            means = products @ weights
            apart = _root(jnp.diagonal(products) - 2 * means + weights @ means)
            far = 1 - (weights @ cosine(jnp.eye(len(weights))) if hyper.near == "models" else cosine(weights))
            return weights @ apart + far

        adam, logits = optax.adam(hyper.lr, *BETAS), state.logits[cohort.ids]

        def step(_, carry):
            logits, moments, _ = carry
            with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
                updates, moments = adam.update(jax.grad(loss)(logits), moments)
            return logits + updates, moments, shares(logits)

        logits, _, weights = jax.lax.fori_loop(0, hyper.steps, step, (logits, adam.init(logits), shares(logits)))
        model = trees.mean(uploads["model"], weights=weights)
        return State(model, state.logits.at[cohort.ids].set(logits)), {"largest_weight": jnp.max(weights)}

    return averaging(problem)._replace(init=init, server_update=server_update)


def _along(changes: trees.Params, model: trees.Params) -> jax.Array:
    """The inner products of K changes with a model [K]."""
    product = lambda change, leaf: jnp.sum(change * leaf[None], axis=tuple(range(1, change.ndim)))
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(product, changes, model)))


def _root(square: jax.Array) -> jax.Array:
    """The square root; 0, with derivative 0, at and below 0."""
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
