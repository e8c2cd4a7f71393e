"""FedMe: clients exchange their personal models, train own and received one together, and keep the better.

Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022. The equations are lost in the
published text; they are as in the authors' notebooks.

In a round every client i receives the model of another client e_i of its cluster, trains both by mutual learning, takes
the received one if its loss on the client's held-out samples is strictly lower (so networks spread and die out), and
uploads both. The server averages all trained copies of each model, one for all of equal weight, and returns to each
client the average of the model that it took.

Deviations. From the paper: the loss that decides is on the validation split, as in the notebooks (``validation_share``;
without one, on the training samples, which is the paper's "local data"); averages are uniform, as in the notebooks,
where the paper says "as in FedAvg"; clusters are of logits, where it says outputs (``outputs``); the gradient clipping
of the notebooks is the flag ``clip_norm``; by default the first of the paper's two uploads is not counted, because the
server has these models (``upload_first``). From the notebooks: the clusters come from k-means++ over distinct rows,
because theirs (``kmeans=authors``) falls into one cluster as soon as two clients with the same model, which exchange
brings about, are drawn as first centres; where only some clients take part in a round (``cohort``), models are
exchanged among these.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.engine import local, mutual
from fedjax_mr.engine.mutual import Pair, Weights
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.strategies.base import Parcels, Problem, Strategy, Traffic, models_sent, own_starts
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedMe's own settings."""

    tuning: bool = field(
        True, "model tuning (MT): a client takes the received model where that is better", source="Table 6"
    )
    clustering: bool = field(
        True, "model clustering (MC): models are exchanged within clusters of similar outputs", source="Table 6"
    )
    mutual: bool = field(
        True, "deep mutual learning (DML): own and received model also learn from each other", source="Table 6"
    )
    cluster_rounds: tuple[int, ...] = field(
        (250, 375, 450),
        "rounds before which there is one cluster more, starting from one; the public set must not be empty",
        unit="rounds",
        low=1,
        source="the authors' notebooks for CIFAR-10 (500 rounds); FEMNIST (300): 150, 225, 275; Shakespeare (100): "
        "50, 75, 90",
    )
    outputs: str = field(
        "logits",
        "what is clustered: the models' outputs on the public set as logits (notebooks) or as probabilities",
        choices=("logits", "probabilities"),
        source="the authors' notebooks",
    )
    kmeans: str = field(
        "distinct",
        "how clusters are found: k-means++ over distinct outputs, which never leaves one empty (distinct), or as the "
        "authors' code does, with random clients' outputs as first centres: if two of these are equal, which exchange "
        "brings about, all clients end in one cluster (authors)",
        choices=("distinct", "authors"),
        source="Matsuda et al. 2022 say k-means; authors: their notebooks",
    )
    upload_first: bool = field(
        False,
        "count the upload of every personal model before it is exchanged, as the paper has it (5 models per client and "
        "round); off: the server kept what it returned (4 models)",
        source="what is really needed",
    )


class State(NamedTuple):
    """The clients' models, of which the server has copies, and their clusters."""

    models: Variables  # leaves [N, ...]
    clusters: jax.Array  # [N] int32


def draw_partners(key: jax.Array, clusters: jax.Array) -> jax.Array:
    """Whose model each of K clients receives [K]: another one of its cluster [K], of all if it is alone there.

    Draws are independent, so a model may go to several clients or to none; consumes ``key``.
    """
    others = ~jnp.eye(clusters.shape[0], dtype=bool)
    close = (clusters[:, None] == clusters[None, :]) & others
    pool = jnp.where(jnp.any(close, axis=1, keepdims=True), close, others)
    return jax.random.categorical(key, jnp.where(pool, 0.0, -jnp.inf), axis=1).astype(jnp.int32)


def aggregate(models: Variables, received: Variables, partners: jax.Array) -> Variables:
    """The mean of every model's trained copies [K, ...]: its owner's, and those of all who received it.

    Args:
      models: the clients' own models after training [K, ...].
      received: what each client made of the model that it received [K, ...].
      partners: whose model that was [K].
    """
    count = partners.shape[0]
    holds = (partners[None, :] == jnp.arange(count)[:, None]).astype(jnp.float32)  # [model, client]
    copies = 1.0 + jnp.sum(holds, axis=1)

    def mean(own: jax.Array, others: jax.Array) -> jax.Array:
        if not jnp.issubdtype(own.dtype, jnp.floating):
            return own  # which network it is
        total = own + jnp.tensordot(holds, others, axes=1, precision=jax.lax.Precision.HIGHEST)
        return total / copies.reshape(-1, *(1,) * (own.ndim - 1))

    return jax.tree.map(mean, models, received)


def cluster(outputs: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """The cluster of each row of outputs [N, F]: k-means of at most as many clusters as rows are distinct."""
    from sklearn.cluster import KMeans

    count = min(count, len(np.unique(outputs, axis=0)))
    return KMeans(n_clusters=count, n_init="auto", random_state=seed).fit_predict(outputs).astype(np.int32)


def cluster_as_authors(outputs: np.ndarray, count: int, *, seed: int) -> np.ndarray:
    """The cluster of each row of outputs [N, F] as the authors' code finds it, whose empty clusters take all.

    An empty cluster's centre is not a number, and to that every row is nearest.
    """
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
    """Whether it cannot run without public data: where it clusters the clients."""
    return hyper.clustering and bool(hyper.cluster_rounds)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedMe.

    Raises:
      UserError: a round of a single client, or clusters without a public set.
    """
    model = problem.model
    if problem.cohort_size < 2:
        raise UserError("fedme exchanges models among the clients of a round: --cohort must be at least 2")
    if needs_public(hyper) and problem.public is None:
        raise UserError(
            "fedme clusters outputs on a public set: give --public_share (and --public_max), or --nofedme_clustering"
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

    def chosen(uploads):
        """Whose model each client goes on with [K]."""
        return jnp.where(uploads["takes"], uploads["partner"], jnp.arange(problem.cohort_size))

    def server_update(state, uploads, cohort, round, key):
        means = aggregate(uploads["model"], uploads["received"], uploads["partner"])
        models = trees.put(state.models, cohort.ids, trees.take(means, chosen(uploads)))
        return State(models, state.clusters), {"clients_that_switched": jnp.sum(uploads["takes"]).astype(jnp.float32)}

    def traffic(usual, state, uploads, cohort, round):
        """Down the received model and the one to go on with, up both trained ones; which models these are varies."""
        own, received = (models_sent(problem, uploads[name]) for name in ("model", "received"))
        returned = models_sent(problem, trees.take(uploads["model"], chosen(uploads)))
        partner, takes = Parcels.of(problem.cohort_size, 4), Parcels.of(problem.cohort_size, 1)
        first = own if hyper.upload_first else ()
        return Traffic(down=(*received, *returned, partner), up=(*first, *own, *received, partner, takes))

    @jax.jit
    def outputs(models, samples):
        x = local.gather(samples, jnp.arange(samples.x.shape[0]))
        logits = jax.lax.map(lambda variables: model.apply(variables, x), models)
        return jax.nn.softmax(logits) if hyper.outputs == "probabilities" else logits

    def between_rounds(state, round, key, client):
        count = 1 + sum(round >= start for start in hyper.cluster_rounds)
        if count == 1:
            return state, {}  # one cluster needs no outputs
        rows = np.asarray(outputs(state.models, problem.public)).reshape(problem.num_clients, -1)
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        find = cluster_as_authors if hyper.kmeans == "authors" else cluster
        return state._replace(clusters=jnp.asarray(find(rows, count, seed=seed))), {}

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        personal_part=lambda state, client_id: trees.take(state.models, client_id),
        personal_model=lambda part, memory, data, key: part,
        between_rounds=between_rounds if hyper.clustering and hyper.cluster_rounds else None,
        traffic=traffic,
    )
