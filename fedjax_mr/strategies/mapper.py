"""MAPPER: the personal model of a client is an interpolation between its local model and the global model.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning, arXiv 2020
(model interpolation). With the local model l, the global model g and lambda from a grid, the personal model is lambda
l + (1 - lambda) g. The training samples of a client are divided into three random parts A, B and G, which are the same
in every round. The client trains on A for each lambda, selects the lambda with the lowest loss on B, and trains g on G.
It uploads g, which the server averages, and lambda, whose mean is reported.

``mode=paper``: the objective is the loss of the interpolation, so l is trained with lambda times its gradient and g
with (1 - lambda) times its gradient. The client keeps the l of the selected lambda.

``mode=fedme``, as in the code of FedMe's authors: the interpolation itself is trained on A and then on G. l is solved
from the interpolation after A, and g is moved by the change of the interpolation on G. The search is repeated before a
test.

Deviations and choices. The paper does not specify the order of the steps; ours is that of FedMe's authors. The local
model of a client starts as the first global model that the client receives. The random division into parts depends on
the client's number, not on the seed. A client with fewer than three samples uses all of them in each part.
``mode=fedme`` solves and moves only parameters. BatchNorm statistics are those of the last training, because a solved
variance could be negative. With ``mode=paper``, a client that has not trained is tested with the global model.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Metrics
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging

SPLIT = 0  # seed of the division into parts


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of MAPPER."""

    mode: str = field(
        "paper",
        "training of the interpolation: with its true gradients (paper), or as in the code of FedMe's authors (fedme)",
        choices=("paper", "fedme"),
        source="Mansour et al. 2020",
    )
    grid: tuple[float, ...] = field(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "candidate values of lambda, the share of the local model",
        low=0,
        high=1,
        source="code of FedMe's authors",
    )


class Memory(NamedTuple):
    """Memory of one client."""

    own: Variables  # l
    share: jax.Array  # lambda
    trained: jax.Array  # bool, whether the client has trained


class Parts(NamedTuple):
    """The three parts of the training samples of a client."""

    own: ClientData  # A, for the local model
    share: ClientData  # B, for lambda
    shared: ClientData  # G, for the global model


class Interpolation(NamedTuple):
    """An interpolation and its loss."""

    loss: jax.Array  # on B
    share: jax.Array  # lambda
    own: Variables  # l
    model: Variables  # the interpolation


def divide(data: ClientData, max_size: int) -> Parts:
    """Divide the training rows of a client, at most ``max_size``, into three random parts, the same in every round."""
    key = jax.random.fold_in(random_key(SPLIT), data.client_id)
    rows = jnp.asarray(data.index)[data.offset + local.shuffle(key, data.size, max_size)]
    third, few = data.size // 3, data.size < 3

    def part(begin: jax.Array, size: jax.Array) -> ClientData:
        zero = jnp.zeros((), jnp.int32)
        begin, size = jnp.where(few, zero, begin), jnp.where(few, data.size, size)
        return data._replace(index=rows, offset=begin, size=size, validation_size=zero)

    return Parts(part(0 * third, third), part(third, third), part(2 * third, data.size - 2 * third))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build MAPPER.

    Raises:
      UserError: the grid is empty.
    """
    if not hyper.grid:
        raise UserError("mapper needs at least one value of lambda: pass hyper.grid=(0.5,)")
    average = averaging(problem)
    network, setting, through = problem.model, problem.local, hyper.mode == "paper"

    def train(variables, data, key, *, other, share):
        """Train a model on the loss of its interpolation with another model; with share 0 there are no steps."""
        plain = local.supervised(network)

        def loss(params, state, batch, key):
            return plain(trees.interpolate(params, other["params"], share), state, batch, key)

        trainable = data._replace(size=jnp.where(share > 0, data.size, 0))
        return local.train(network, setting, variables, trainable, key, loss=loss)

    def attempt(own, shared, data, share, key):
        """Train the local model and the interpolation for one lambda."""
        if through:
            own, metrics = train(own, data, key, other=shared, share=share)
            return own, trees.interpolate(own, shared, share), metrics
        trainable = data._replace(size=jnp.where(share > 0, data.size, 0))
        model, metrics = local.train(network, setting, trees.interpolate(own, shared, share), trainable, key)
        divisor = jnp.where(share > 0, share, 1.0)
        solve = lambda model, shared: (model - (1 - share) * shared) / divisor
        solved = model | {"params": jax.tree.map(solve, model["params"], shared["params"])}
        return trees.where(share > 0, solved, own), model, metrics

    def search(own, shared, parts, key):
        """The interpolation of the best lambda, and the training metrics of all lambdas."""

        def step(best, numbered):
            number, share = numbered
            own_trained, model, metrics = attempt(own, shared, parts.own, share, jax.random.fold_in(key, number))
            loss = local.score(network, model, parts.share, batch_size=setting.batch_size).loss
            candidate = Interpolation(loss, share, own_trained, model)
            return trees.where(loss < best.loss, candidate, best), metrics

        start = Interpolation(jnp.float32(jnp.inf), jnp.zeros(()), own, shared)
        return jax.lax.scan(step, start, (jnp.arange(len(hyper.grid)), jnp.array(hyper.grid, jnp.float32)))

    def started(memory, shared):
        return trees.where(memory.trained, memory.own, shared)

    def init_memory(key, client_id):
        return Memory(trees.zeros_like(network.shapes()), jnp.zeros(()), jnp.zeros((), bool))

    def client_update(payload, memory, data, round, key):
        shared, parts = payload["model"], divide(data, setting.max_size)
        search_key, key = jax.random.split(key)
        best, tried = search(started(memory, shared), shared, parts, search_key)
        if through:
            model, metrics = train(shared, parts.shared, key, other=best.own, share=1 - best.share)
        else:
            moved, metrics = local.train(network, setting, best.model, parts.shared, key)
            step = trees.subtract(moved["params"], best.model["params"])
            model = moved | {"params": trees.add(shared["params"], step)}
        total = Metrics(
            loss=jnp.sum(tried.loss) + metrics.loss,
            images=jnp.sum(tried.images) + metrics.images,
            steps=jnp.sum(tried.steps) + metrics.steps,
            bad_step=metrics.bad_step,  # a lambda with which training diverged is not selected
        )
        upload = {"model": model, "share": best.share}
        return upload, Memory(best.own, best.share, jnp.ones((), bool)), total

    def server_update(state, uploads, cohort, round, key):
        state, _ = average.server_update(state, uploads, cohort, round, key)
        return state, {"mean_lambda": jnp.mean(uploads["share"])}

    def personal_model(state, memory, data, key):
        own = started(memory, state.model)
        if through:
            return trees.interpolate(own, state.model, memory.share)
        return search(own, state.model, divide(data, setting.max_size), key)[0].model

    return average._replace(
        client_update=client_update,
        server_update=server_update,
        init_memory=init_memory,
        personal_model=personal_model,
    )
