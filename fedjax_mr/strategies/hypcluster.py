"""HypCluster: of k models, each client trains the one with the lowest loss, which is averaged over its clients.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning, arXiv 2020.
Clients keep no memory: in every round they receive all k models, and before a test they select a model again.

Deviations. With more than two models, the code of FedMe's authors takes the last model that is better than the first;
here the best model is taken. ``start=farthest`` is the initialisation of FedJAX, spread over the first k rounds. In
each of these rounds, the clients train from one common initialisation. The client with the highest loss on the existing
clusters (in the first round, a random client) then provides the model of the next cluster. FedJAX evaluates all
candidates at once, before the first round.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy, view
from fedjax_mr.strategies.parts import Models


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of HypCluster."""

    clusters: int = field(2, "k, number of models", low=1, high=1000, source="paper of FedMe")
    start: str = field(
        "random",
        "initial models: independent initialisations (random), or trained models of the clients that the existing "
        "clusters fit worst, one in each of the first k rounds (farthest)",
        choices=("random", "farthest"),
        source="code of FedMe's authors; farthest: FedJAX",
    )


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build HypCluster."""
    count, farthest = hyper.clusters, hyper.start == "farthest"
    numbers = jnp.arange(count, dtype=jnp.int32)

    def init(key):
        if farthest:
            return Models(trees.broadcast(problem.model.init(key), count))
        return Models(jax.vmap(problem.model.init)(jax.random.split(key, count)))

    def dispatch(state, cohort, key):
        return {"models": trees.broadcast(state.models, problem.cohort_size)}

    def losses(models, data):
        """Mean loss of each model [k] on the training samples of a client, in nats."""
        score = lambda variables: local.score(problem.model, variables, data, batch_size=problem.local.batch_size)
        scores = jax.lax.map(score, models)
        return scores.loss / jnp.maximum(scores.count, 1.0)

    def client_update(payload, memory, data, round, key):
        models = payload["models"]
        fit = losses(models, data)
        chosen, upload = jnp.argmin(fit), {}
        if farthest:  # clusters from ``round`` on still hold the common initialisation
            fit = jnp.where(numbers < round, fit, jnp.inf)
            chosen = jnp.where(round < count, round, jnp.argmin(fit))
            upload = {"loss": jnp.where(round > 0, jnp.min(fit), 0.0)}  # finite, because links and servers demand it
        model, metrics = local.train(problem.model, problem.local, trees.take(models, chosen), data, key)
        return upload | {"model": model, "cluster": chosen.astype(jnp.int32)}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        weights = cohort.sizes
        if farthest:  # in the first round all losses are 0; argmax takes row 0, which is a random client
            worst = jnp.arange(problem.cohort_size) == jnp.argmax(uploads["loss"])
            weights = jnp.where(round < count, worst.astype(weights.dtype), weights)
        members = uploads["cluster"][None, :] == numbers[:, None]  # [k, K]
        shares = jnp.where(members, weights, 0).astype(jnp.float32)
        means = trees.mix(uploads["model"], shares / jnp.maximum(jnp.sum(shares, axis=1, keepdims=True), 1.0))
        chosen = jnp.any(members, axis=1)

        def mean_or_old(mean, old):
            return jnp.where(chosen.reshape(-1, *(1,) * (old.ndim - 1)), mean, old)

        histogram = jnp.sum(members, axis=1).astype(jnp.float32)
        models = jax.tree.map(mean_or_old, means, state.models)
        return Models(models), {f"clients_of_cluster_{number}": histogram[number] for number in range(count)}

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
