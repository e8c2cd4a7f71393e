"""FedMe: clients exchange personal models, train their own and the received model together, and keep the better one.

Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022. The equations are missing in the
published text; ours are those of the authors' notebooks.

In a round each client i receives the model of another client e_i of its cluster and trains both models by mutual
learning. It switches to the received model if that has a strictly lower loss on the client's validation samples, so
architectures can spread and disappear. It uploads both models. The server averages all trained copies of each model
with equal weights, and returns to each client the average of the model that it selected.

Deviations from the paper:
* Models are compared by their loss on the validation samples, as in the notebooks. Without validation samples, they are
  compared on the training samples, the paper's "local data".
* Averages are uniform, as in the notebooks. The paper says "as in FedAvg".
* Clusters are computed from logits. The paper says outputs (``outputs``).
* The notebooks clip gradients; here this is the setting ``clip_norm``.
* By default, the first of the paper's two uploads is not counted, because the server already has these models
  (``upload_first``).

Deviations from the notebooks:
* k-means++ runs over distinct outputs. The k-means of the notebooks (``kmeans=authors``) collapses to a single cluster
  if two clients with the same model are drawn as initial centres, which is common because models are exchanged.
* If only some clients train in a round, models are exchanged among these.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.client import local, mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.client.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import models_sent, own_starts
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedMe."""

    tuning: bool = field(
        True, "model tuning (MT): a client switches to the received model if it is better", source="Table 6"
    )
    clustering: bool = field(
        True, "model clustering (MC): models are exchanged within clusters of similar outputs", source="Table 6"
    )
    mutual: bool = field(
        True, "deep mutual learning (DML): the own and the received model learn from each other", source="Table 6"
    )
    cluster_rounds: tuple[int, ...] = field(
        (250, 375, 450),
        "rounds at which the number of clusters, initially one, increases by one; clustering needs public data",
        unit="rounds",
        low=1,
        source="the authors' notebooks for CIFAR-10 (500 rounds); FEMNIST (300): 150, 225, 275; Shakespeare (100): "
        "50, 75, 90",
    )
    outputs: str = field(
        "logits",
        "outputs on the public data that are clustered: logits (notebooks) or probabilities",
        choices=("logits", "probabilities"),
        source="the authors' notebooks",
    )
    kmeans: str = field(
        "distinct",
        "clustering: k-means++ over distinct outputs, without empty clusters (distinct), or k-means that starts from "
        "the outputs of random clients; if two of these are equal, all clients end in one cluster (authors)",
        choices=("distinct", "authors"),
        source="Matsuda et al. 2022 say k-means; authors: their notebooks",
    )
    upload_first: bool = field(
        False,
        "count the upload of every personal model before the exchange, as in the paper (5 models per client and "
        "round). By default it is not counted, because the server keeps the models that it returns (4 models)",
        source="ours: only necessary uploads",
    )


class State(NamedTuple):
    """The server's copies of the clients' models, and the clusters of the clients."""

    models: Variables  # leaves [N, ...]
    clusters: jax.Array  # [N] int32


def draw_partners(key: jax.Array, clusters: jax.Array) -> jax.Array:
    """Draw for each of K clients the client whose model it receives [K]; consumes ``key``.

    It is another client of the same cluster (``clusters`` [K]), or any other client if there is none. Draws are
    independent, so a model may go to several clients or to none.
    """
    others = ~jnp.eye(clusters.shape[0], dtype=bool)
    same_cluster = (clusters[:, None] == clusters[None, :]) & others
    pool = jnp.where(jnp.any(same_cluster, axis=1, keepdims=True), same_cluster, others)
    return jax.random.categorical(key, jnp.where(pool, 0.0, -jnp.inf), axis=1).astype(jnp.int32)


def aggregate(models: Variables, received: Variables, partners: jax.Array) -> Variables:
    """The mean of all trained copies of each model [K, ...]: its owner's and those of the clients that received it.

    Args:
      models: the clients' own models after training [K, ...].
      received: the received models after training [K, ...].
      partners: owners of the received models [K].
    """
    count = partners.shape[0]
    holds = (partners[None, :] == jnp.arange(count)[:, None]).astype(jnp.float32)  # [model, client]
    copies = 1.0 + jnp.sum(holds, axis=1)

    def mean(own: jax.Array, others: jax.Array) -> jax.Array:
        if not jnp.issubdtype(own.dtype, jnp.floating):
            return own  # the index of the network
        total = own + jnp.tensordot(holds, others, axes=1, precision=jax.lax.Precision.HIGHEST)
        return total / copies.reshape(-1, *(1,) * (own.ndim - 1))

    return jax.tree.map(mean, models, received)


def cluster(outputs: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """k-means clusters [N] of outputs [N, F]. There are at most as many clusters as distinct rows."""
    from sklearn.cluster import KMeans

    count = min(count, len(np.unique(outputs, axis=0)))
    return KMeans(n_clusters=count, n_init="auto", random_state=seed).fit_predict(outputs).astype(np.int32)


def cluster_as_authors(outputs: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """k-means clusters [N] of outputs [N, F] as in the authors' code, where an empty cluster attracts all rows.

    The centre of an empty cluster is NaN, and argmin selects it for every row. With fewer rows than clusters, each row
    has its own.
    """
    count = min(count, len(outputs))
    first = np.random.default_rng(seed).choice(len(outputs), count, replace=False)
    centres, labels = outputs[first].astype(np.float64), np.full(len(outputs), -1)
    for _ in range(300):
        distances = np.stack([((outputs - centre) ** 2).sum(axis=1) for centre in centres])  # [count, N]
        before, labels = labels, np.argmin(distances, axis=0)
        if np.array_equal(before, labels):
            break
        members = [outputs[labels == number] for number in range(count)]
        centres = np.stack([each.mean(axis=0) if len(each) else np.full(outputs.shape[1], np.nan) for each in members])
    return labels.astype(np.int32)


def needs_public(hyper: Hyper) -> bool:
    """Whether FedMe needs public data, which is the case if it clusters the clients."""
    return hyper.clustering and bool(hyper.cluster_rounds)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMe.

    Raises:
      UserError: the cohort has a single client, or clustering is enabled without public data.
    """
    model = problem.model
    if problem.cohort_size < 2:
        raise UserError("fedme exchanges models among the clients of a round: cohort= must be at least 2")
    if needs_public(hyper) and problem.public is None:
        raise UserError(
            "fedme clusters outputs on public data: pass public_share=0.1 (and public_max=), or hyper.clustering=False"
        )
    weights = Weights(mutual=1.0 if hyper.mutual else 0.0)

    def init(key):
        return State(own_starts(problem, key), jnp.zeros(problem.num_clients, jnp.int32))

    def dispatch(state, cohort, key):
        partners = draw_partners(key, state.clusters[cohort.ids])
        own = trees.take(state.models, cohort.ids)
        return {"model": own, "received": trees.take(own, partners), "partner": partners}

    def client_update(payload, memory, data, round, key):
        both = Pair(payload["model"], payload["received"])
        (own, received), metrics = mutual.train_pair(
            Pair(model, model), problem.local, both, data, key, weights=Pair(weights, weights)
        )
        loss = lambda variables: local.held_out_loss(model, variables, data, batch_size=problem.local.batch_size)
        takes = loss(received) < loss(own) if hyper.tuning else jnp.zeros((), bool)
        return {"model": own, "received": received, "partner": payload["partner"], "takes": takes}, memory, metrics

    def selected(uploads):
        """Owner of the model that each client continues with [K]."""
        return jnp.where(uploads["takes"], uploads["partner"], jnp.arange(problem.cohort_size))

    def server_update(state, uploads, cohort, round, key):
        means = aggregate(uploads["model"], uploads["received"], uploads["partner"])
        models = trees.put(state.models, cohort.ids, trees.take(means, selected(uploads)))
        return State(models, state.clusters), {"clients_that_switched": jnp.sum(uploads["takes"]).astype(jnp.float32)}

    def traffic(usual, state, uploads, cohort, round):
        """Down: the received and the returned model. Up: both trained models. Their networks vary."""
        own, received = (models_sent(problem, uploads[name]) for name in ("model", "received"))
        returned = models_sent(problem, trees.take(uploads["model"], selected(uploads)))
        partner, takes = Parcels.of(problem.cohort_size, 4), Parcels.of(problem.cohort_size, 1)
        first = own if hyper.upload_first else ()
        return Traffic(down=(*received, *returned, partner), up=(*first, *own, *received, partner, takes))

    @jax.jit
    def outputs(models, samples):
        x = gather(samples, jnp.arange(samples.x.shape[0]))
        logits = jax.lax.map(lambda variables: model.apply(variables, x), models)
        return model.task.predict(logits) if hyper.outputs == "probabilities" else logits

    def between_rounds(state, round, key, client):
        count = 1 + sum(round >= start for start in hyper.cluster_rounds)
        if count == 1:
            return state, {}  # a single cluster needs no outputs
        rows = np.asarray(outputs(state.models, problem.public)).reshape(problem.num_clients, -1)
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        kmeans = cluster_as_authors if hyper.kmeans == "authors" else cluster
        return state._replace(clusters=jnp.asarray(kmeans(rows, count, seed=seed))), {}

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        personal_part=lambda state, client_id: trees.take(state.models, client_id),
        personal_model=lambda part, memory, data, key: part,
        between_rounds=between_rounds if hyper.clustering and hyper.cluster_rounds else None,
        # The usual count is the same if all networks have one size: a round sends the models that the last one returns.
        traffic=traffic if hyper.upload_first or len(model.networks) > 1 else None,
    )
