"""MAPPER: every client's model lies between its own and the global one, at the place that suits the client best.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning, arXiv 2020
(model interpolation). With l the client's own model, g the global one and lambda from a grid, the client's model is
lambda l + (1 - lambda) g. Its training samples are cut into three random parts, the same in every round: the client
trains on A for each lambda, takes the lambda of the least loss on B, and trains g on G, which is sent and averaged. It
also sends the lambda, whose mean is reported.

``mode=paper``: the objective is the loss of the interpolation, so l is trained with lambda times its gradient and g
with (1 - lambda) times its gradient; l is kept as the best lambda found it. ``mode=fedme``, as the authors of FedMe run
it: the interpolation itself is trained on A and then on G; l is solved back from what A made of it, and g is moved as
far as G moved the interpolation; before a test the search is done anew.

Deviations and choices: the paper leaves the order of the steps to the reader; ours is that of FedMe's authors. A
client's own model starts as the first global model that it receives. The three parts are views on the client's rows,
drawn by the client's number (not by ``--seed``); a client of fewer than three samples uses all of them in each part.
``mode=fedme`` solves and moves parameters alone: BatchNorm statistics are those of the last training, because a
variance that was solved back could be negative.
Until it has trained, a client is tested with the global model (``mode=paper``).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import ClientData, Metrics
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, averaging
from fedjax_mr.strategies.hyper import field

SPLIT = 0  # the seed of the three parts


@dataclasses.dataclass(frozen=True)
class Hyper:
    """MAPPER's own settings."""

    mode: str = field(
        "paper",
        "how the interpolation is trained: by its true gradients (paper), or as the FedMe authors do (fedme)",
        choices=("paper", "fedme"),
        source="Mansour et al. 2020",
    )
    grid: tuple[float, ...] = field(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "values of lambda, the share of the client's own model, of which the best is taken",
        low=0,
        high=1,
        source="the FedMe authors' code",
    )


class Memory(NamedTuple):
    """A client's memory."""

    own: Variables  # l
    share: jax.Array  # lambda
    trained: jax.Array  # whether it has ever trained


class Parts(NamedTuple):
    """The three parts of a client's training samples."""

    own: ClientData  # A, for its own model
    share: ClientData  # B, for lambda
    shared: ClientData  # G, for the global model


class Found(NamedTuple):
    """The best interpolation so far."""

    loss: jax.Array  # on B
    share: jax.Array  # lambda
    own: Variables  # l
    model: Variables  # the interpolation


def divide(data: ClientData, max_size: int) -> Parts:
    """Return three random parts of a client's training rows, the same in every round; ``max_size`` is any client's."""
    key = jax.random.fold_in(jax.random.key(SPLIT), data.client_id)
    rows = jnp.asarray(data.index)[data.offset + local.shuffle(key, data.size, max_size)]
    third, few = data.size // 3, data.size < 3

    def part(begin: jax.Array, size: jax.Array) -> ClientData:
        zero = jnp.zeros((), jnp.int32)
        return ClientData(
            data.samples, rows, jnp.where(few, zero, begin), jnp.where(few, data.size, size), data.client_id
        )

    return Parts(part(0 * third, third), part(third, third), part(2 * third, data.size - 2 * third))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return MAPPER.

    Raises:
      UserError: the grid is empty.
    """
    if not hyper.grid:
        raise UserError("mapper needs at least one value of lambda: --mapper_grid=0.5, and so on")
    average = averaging(problem)
    network, setting, through = problem.model, problem.local, hyper.mode == "paper"

    def train(variables, data, key, *, other, share):
        """Train a model by the loss of its interpolation with another one; nothing is done for the share 0."""
        plain = local.cross_entropy(network)

        def loss(params, state, batch, key):
            return plain(trees.interpolate(params, other["params"], share), state, batch, key)

        trainable = data._replace(size=jnp.where(share > 0, data.size, 0))
        return local.train(network, setting, variables, trainable, key, loss=loss)

    def attempt(own, shared, data, share, key):
        """Return the client's own model and the interpolation, trained for one lambda."""
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
        """Return the best of all lambdas, and what the trainings report."""

        def step(best, numbered):
            number, share = numbered
            candidate, model, metrics = attempt(own, shared, parts.own, share, jax.random.fold_in(key, number))
            loss = local.score(network, model, parts.share, batch_size=setting.batch_size).loss
            found = Found(loss, share, candidate, model)
            return trees.where(loss < best.loss, found, best), metrics

        start = Found(jnp.float32(jnp.inf), jnp.zeros(()), own, shared)
        return jax.lax.scan(step, start, (jnp.arange(len(hyper.grid)), jnp.array(hyper.grid, jnp.float32)))

    def started(memory, shared):
        return trees.where(memory.trained, memory.own, shared)

    def init_memory(key):
        unused = Memory(trees.zeros_like(network.init(key)), jnp.zeros(()), jnp.zeros((), bool))
        return trees.broadcast(unused, problem.num_clients)

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
            bad_step=metrics.bad_step,  # a lambda with which training diverged is not taken
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
