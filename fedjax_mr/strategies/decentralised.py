"""The skeleton of methods without a server: each client keeps its model, and neighbours send theirs to each other.

In a simulation, the models of all N clients are one stack [N, ...]. A "round of the server" is the exchange among
neighbours, and nothing is sent to or from a server.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.graphs import Graph
from fedjax_mr.strategies.interface import Cohort, Combine, Info, Problem, ServerUpdate, Strategy
from fedjax_mr.strategies.parts import Models, plain_training
from fedjax_mr.strategies.traffic import Parcels, Traffic

ONLY_SIMULATED = "its clients send their models to each other, and there is no server to connect to"


def decentralised(problem: Problem, graph: Graph) -> Strategy:
    """Each client trains its model, then averages it with those of its neighbours.

    Other methods replace ``server_update`` and ``neighbours``. All members but ``init`` work with any state that has a
    field ``models``. The model of a client is its personal model. The mean of all models is tested, too.
    """

    def init(key):
        return Models(trees.broadcast(problem.model.init(key), problem.num_clients))

    def dispatch(state, cohort, key):
        return {"model": trees.take(state.models, cohort.ids)}

    def averaged(combine=None):
        def server_update(state, uploads, cohort, round, key):
            trained, taking_part = put_active(state.models, uploads["model"], cohort), active(problem, cohort)
            models, info = trees.mix(trained, graph.map(round, taking_part)), {}
            if combine is not None:
                params, info = combine(trained["params"], graph.received(round, taking_part))
                models = models | {"params": params}
            return state._replace(models=models), consensus(problem, models) | info

        return server_update

    def traffic(usual, state, uploads, cohort, round):
        count = jnp.sum(graph.sent(round, active(problem, cohort)) > 0)
        return Traffic(peer=tuple(Parcels.of(count, each.size) for each in usual.up))

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        averaged(),
        global_model=lambda state: problem.model.mean(state.models, weights=problem.present),
        personal_part=lambda state, client_id: trees.take(state.models, client_id),
        personal_model=lambda part, memory, data, key: part,
        traffic=traffic,
        stale="uploaded",
        neighbours=averaged,
    )


def only_averages(reason: str) -> Callable[[Combine], ServerUpdate]:
    """`Strategy.neighbours` of a method that works with the mean of the neighbours alone."""

    def refuse(combine):
        raise UserError(f"robust rules of neighbours do not suit this method: {reason}")

    return refuse


def active(problem: Problem, cohort: Cohort) -> jax.Array:
    """Which of the N clients take part in a round [N]: those of the cohort, without late ones, which have 0 samples."""
    return jnp.zeros(problem.num_clients, bool).at[cohort.ids].set(cohort.sizes > 0)


def put_active(models: Variables, new: Variables, cohort: Cohort) -> Variables:
    """The models [N, ...] after those of the active clients have become ``new`` [K, ...]."""
    rows = jnp.where(cohort.sizes > 0, cohort.ids, jax.tree.leaves(models)[0].shape[0])
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), models, new)


def consensus(problem: Problem, models: Variables) -> Info:
    """The root mean square distance of the parameters of N models from their mean, as the column ``consensus``."""
    present = jnp.ones(problem.num_clients) if problem.present is None else problem.present.astype(jnp.float32)
    mean = trees.mean(models["params"], weights=present)
    apart = jax.vmap(lambda one: trees.squared_norm(trees.subtract(one, mean)))(models["params"])
    return {"consensus": jnp.sqrt(jnp.sum(present * apart) / jnp.sum(present))}
