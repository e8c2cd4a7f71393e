"""FedALA: each client learns, number by number, how much of the global model it takes over before it trains.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023, Algorithm 1. With its last model theta and the received model w, a client starts its training from

    theta + W (w - theta), element by element, in the last ``layers`` layers,
    w in all other layers.

W, with numbers in 0..1, starts at one and is trained by W <- clip(W - rate (gradient (w - theta)), 0, 1), where the
gradient is that of the client's loss at its start. The first time it is trained until the losses of ten epochs have a
standard deviation below ``threshold``, later for one epoch, each time on a random part of the client's samples. The
server averages. The personal model of a client is its start with the newest global model.

Two truths, paper and released code (FedALA and PFLlib, by the authors). The paper counts layers from the top; the code
counts tensors. In the code all clients learn W in every round, because it initialises every client before each test;
here, as in Algorithm 1, those of the round do, and a test learns W for one epoch without keeping it.

Deviations:
* The first training of W ends after ``most_epochs`` epochs at the latest; in the code it may never end.
* The loss of an epoch is its mean, where the code takes that of the last batch.
* BatchNorm statistics are those of the received model.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

RECENT = 10  # epochs whose losses must agree


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedALA."""

    layers: int = field(1, "p, number of the last layers that are mixed; 0 mixes all", low=0, source="the paper")
    rate: float = field(1.0, "eta, learning rate of W", low=0, source="the paper")
    share: float = field(
        0.8, "s, share of a client's samples on which W is trained", low=0, high=1, open_low=True, source="the paper"
    )
    threshold: float = field(
        0.1,
        "standard deviation of the losses of ten epochs that ends the first training of W",
        low=0,
        source="released code, whose README has 0.01 for the paper",
    )
    most_epochs: int = field(100, "longest first training of W", unit="epochs", low=1, source="our choice")


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables  # theta, after its last training
    weights: list[jax.Array]  # W, like the mixed parameters
    trained: jax.Array  # bool, whether ``model`` has been trained
    settled: jax.Array  # bool, whether W has been trained


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedALA."""
    network, setting, average = problem.model, problem.local.in_epochs(1), averaging(problem)
    loss, shapes = local.supervised(network), network.shapes()
    mixed_leaves = {leaf for layer in problem.layers[-hyper.layers :] for leaf in layer.leaves}
    places = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jax.tree.leaves(shapes))))["params"]
    is_mixed = [place in mixed_leaves for place in jax.tree.leaves(places)]

    def upper(params: Any) -> list[jax.Array]:
        """The parameters that are mixed."""
        return [leaf for leaf, mixed in zip(jax.tree.leaves(params), is_mixed, strict=True) if mixed]

    def start(received: Variables, old: Variables, weights: list[jax.Array]) -> Variables:
        """Theta + W (w - theta) in the last layers, w in the others."""
        params, mixed = received["params"], iter(zip(upper(old["params"]), weights, strict=True))

        def each(w, mixes):
            if not mixes:
                return w
            theta, weight = next(mixed)
            return theta + weight * (w - theta)

        leaves = [each(*pair) for pair in zip(jax.tree.leaves(params), is_mixed, strict=True)]
        return received | {"params": jax.tree.unflatten(jax.tree.structure(params), leaves)}

    def learned(received: Variables, memory: Memory, data: Any, key: jax.Array) -> list[jax.Array]:
        """The weights W after their training; consumes ``key``."""
        old, key = memory.model, jax.random.fold_in(key, 1)
        count = jnp.clip((hyper.share * data.size.astype(jnp.float32)).astype(jnp.int32), jnp.minimum(1, data.size))
        first = jax.random.randint(jax.random.fold_in(key, 0), (), 0, data.size - count + 1)
        part = data._replace(offset=data.offset + first, size=count, work=None)
        apart = [w - theta for w, theta in zip(upper(received["params"]), upper(old["params"]), strict=True)]

        def step(weights, batch, key):
            params, state = local.trained_and_state(start(received, old, weights))
            (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params, state, batch, key)
            moved = zip(weights, upper(gradient), apart, strict=True)
            return [jnp.clip(weight - hyper.rate * g * d, 0.0, 1.0) for weight, g, d in moved], value

        def goes_on(carry):
            number, _, losses = carry
            agree = (number > RECENT) & (jnp.std(losses) < hyper.threshold)
            return memory.trained & jnp.where(memory.settled, number < 1, ~agree & (number < hyper.most_epochs))

        def epoch(carry):
            number, weights, losses = carry
            step_of_weights = local.LocalStep(lambda weights: weights, step, lambda weights: weights)
            weights, metrics = local.run(step_of_weights, setting, weights, part, jax.random.fold_in(key, number + 1))
            mean = metrics.loss / jnp.maximum(metrics.images, 1).astype(jnp.float32)
            return number + 1, weights, jnp.roll(losses, 1).at[0].set(mean)

        begin = (jnp.zeros((), jnp.int32), memory.weights, jnp.zeros(RECENT))
        return jax.lax.while_loop(goes_on, epoch, begin)[1]

    def init_memory(key, client_id):
        """The start of a client without a model is the received one: 0 + 1 (w - 0)."""
        ones = [jnp.ones(leaf.shape, leaf.dtype) for leaf in upper(shapes["params"])]
        return Memory(trees.zeros_like(shapes), ones, jnp.zeros((), bool), jnp.zeros((), bool))

    def client_update(payload, memory, data, round, key):
        received = payload["model"]
        weights = learned(received, memory, data, key)
        first = {"model": start(received, memory.model, weights)}
        upload, _, metrics = average.client_update(first, None, data, round, key)
        return upload, Memory(upload["model"], weights, jnp.ones((), bool), memory.trained), metrics

    def personal_model(state, memory, data, key):
        weights = learned(state.model, memory._replace(settled=jnp.ones((), bool)), data, key)
        return start(state.model, memory.model, weights)

    return average._replace(client_update=client_update, init_memory=init_memory, personal_model=personal_model)
