"""HypCluster: k models; every client trains the one that fits its samples best, and each is averaged over its own.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning, arXiv 2020.
Clients keep nothing: in every round they receive all k models, and before a test they choose anew.

Deviations. From the code of FedMe's authors: of more than two models theirs takes the last one that is better than the
first; here it is the best. ``start=farthest`` is the start of FedJAX, spread over the first k rounds: in each of these
the clients train from one common initialisation, and the model of the client that the clusters opened so far serve
worst (in the first round: of a random client) opens the next cluster. FedJAX asks all candidates at once, before the
first round.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Problem, Strategy, view
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """HypCluster's own settings."""

    clusters: int = field(2, "k, the number of models", low=1, high=1000, source="FedMe's paper")
    start: str = field(
        "random",
        "where the models start: independent initialisations (random), or the models of clients that the others serve "
        "worst, one cluster in each of the first k rounds (farthest)",
        choices=("random", "farthest"),
        source="the FedMe authors' code; farthest: FedJAX",
    )


class State(NamedTuple):
    """The models."""

    models: Variables  # leaves [k, ...]


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return HypCluster."""
    count, farthest = hyper.clusters, hyper.start == "farthest"
    numbers = jnp.arange(count, dtype=jnp.int32)

    def init(key):
        if farthest:
            return State(trees.broadcast(problem.model.init(key), count))
        return State(jax.vmap(problem.model.init)(jax.random.split(key, count)))

    def dispatch(state, cohort, key):
        return {"models": trees.broadcast(state.models, problem.cohort_size)}

    def losses(models, data):
        """Return the mean loss of each model on a client's training samples [k], in nats."""
        score = lambda variables: local.score(problem.model, variables, data, batch_size=problem.local.batch_size)
        scores = jax.lax.map(score, models)
        return scores.loss / jnp.maximum(scores.count, 1.0)

    def client_update(payload, memory, data, round, key):
        models = payload["models"]
        fit = losses(models, data)
        chosen, upload = jnp.argmin(fit), {}
        if farthest:  # the clusters that are not yet open hold the common initialisation
            fit = jnp.where(numbers < round, fit, jnp.inf)
            chosen = jnp.where(round < count, round, jnp.argmin(fit))
            upload = {"loss": jnp.min(fit)}
        model, metrics = local.train(problem.model, problem.local, trees.take(models, chosen), data, key)
        return upload | {"model": model, "cluster": chosen.astype(jnp.int32)}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        weights = cohort.sizes
        if farthest:  # the rows of a cohort are in random order: in the first round, where all losses are inf, too
            worst = jnp.arange(problem.cohort_size) == jnp.argmax(uploads["loss"])
            weights = jnp.where(round < count, worst.astype(weights.dtype), weights)
        members = uploads["cluster"][None, :] == numbers[:, None]  # [k, K]
        shares = jnp.where(members, weights, 0).astype(jnp.float32)
        means = trees.mix(uploads["model"], shares / jnp.maximum(jnp.sum(shares, axis=1, keepdims=True), 1.0))
        chosen = jnp.any(members, axis=1)

        def unless_nobody(mean, old):
            return jnp.where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), mean, old)

        histogram = jnp.sum(members, axis=1).astype(jnp.float32)
        state = State(jax.tree.map(unless_nobody, means, state.models))
        return state, {f"clients_of_cluster_{number}": histogram[number] for number in range(count)}

    def personal_model(state, memory, data, key):
        return trees.take(state.models, jnp.argmin(losses(state.models, data)))

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        personal_model=personal_model,
        models=view("models", stacked=True),
    )
