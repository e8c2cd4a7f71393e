"""CaBaFL: chains of clients train M models, and the global model is the mean of a cache of the better-balanced ones.

python -m fedjax_mr.main --import=experiments/plugins/cabafl.py --strategy=cabafl --mode=async --in_flight=10 --cohort=1

An example of a method outside of the package whose choice of clients depends on what the run computes: `select` reads
the state, and with ``stale="branches"`` (`circulating`) the clock computes the events during the run (`clock.online`).

Xia, Hu, Yan, Xie, Li, Li, Zhou, Chen: CaBaFL: Asynchronous Federated Learning via Hierarchical Cache and Feature
Balance, TCAD 2024 (arXiv 2404.12850). A chain is a model that T clients train in turn, starting from the global model
(L2 cache). Clients are compared by their *features*: the sum of the representations of their samples under the global
model. A chain whose clients together have features like those of all clients is balanced. After each client, a model
is copied to the L1 cache if it is trained enough or balanced enough. At the end of a chain, the global model becomes
the mean of the L1 cache, and the chain starts again from it. The next client of a chain is the one that balances it.

Sources. The text was not available to us, so this is the algorithm of the authors' released code, which cannot run: it
reads the exponent of the sizes (``size_power``) and the bound of the variance (``variance``) without ever setting them.
Both are our choice here.

Deviations:
* The representation is the output of the network's ``features``, in the code the flattened output of the convolutions
  for its CNN.
* The weight 1 / (1 - cosine) has no value at 1, so 1 - cosine is at least 1e-6.
* The rank of a cosine is taken among the last 10,000 of them, in the code among all.
* In the code, a chain is not sent again to the client that has just returned it.
* Features cost N models down and N vectors up each time; the code counts N messages.

The server's step is host code between two rounds, because clients measure their features for it. The paper has one
arrival per version (``cohort=1``). In synchronous rounds all chains return in each round, one after the other.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.client.samples import gather
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.fedgh import representation_width
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import circulating, copies_of_one, returned
from fedjax_mr.strategies.traffic import Parcels

MOST_RANKED = 10_000  # cosines that are kept
SMALLEST = 1e-6  # of 1 - cosine


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of CaBaFL."""

    length: int = field(10, "T, clients that train a model before it is aggregated", low=1, source="authors' code, T")
    rank: float = field(
        0.25,
        "gamma: a model that at most T/2 clients have trained enters the L1 cache only if more than this share of all "
        "cosines so far are at most its own",
        low=0,
        high=1,
        source="authors' code, 1 - CB",
    )
    refresh: int = field(50, "aggregations between two measurements of the features", low=1, source="authors' code, CF")
    size_power: float = field(
        1.0, "alpha, exponent of a chain's number of samples in its weight", low=0, source="our choice"
    )
    variance: float = field(
        0.0,
        "sigma: if the clients' shares of all jobs vary more than this, only the least used ones are candidates",
        low=0,
        source="our choice",
    )


class State(NamedTuple):
    """The global model and M chains; N clients, F features."""

    model: Variables  # the global model
    models: Variables  # L2 cache [M, ...]: the model of each chain
    cache: Variables  # L1 cache [M, ...]
    step: jax.Array  # [M] int32, clients that have returned the chain's model
    chain: jax.Array  # [M, N] int32, jobs of each client in the chain, with the present one
    cached: jax.Array  # [M, N] int32, the chain of each model in the L1 cache
    clients: jax.Array  # [M] int32, who trains each model
    arrived: jax.Array  # [M] bool, whether its client has returned in this round
    used: jax.Array  # [N] int32, jobs of each client
    features: jax.Array  # [N, F] sums over a client's samples
    measured: jax.Array  # bool, whether the features are new, for the traffic
    cosines: jax.Array  # [MOST_RANKED] of all models that have returned, the oldest ones replaced
    returns: jax.Array  # int32, number of models that have returned
    version: jax.Array  # int32, number of aggregations


def cosine(vectors: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The cosines [...] of vectors [..., F] with another one [F]; 0 for a zero vector."""
    lengths = np.linalg.norm(vectors, axis=-1) * np.linalg.norm(other)
    return (vectors @ other) / np.where(lengths > 0, lengths, 1.0)


def variance_of_shares(counts: np.ndarray) -> np.ndarray:
    """The variance [...] of each row's shares of its sum; rows [..., R]."""
    return np.var(counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1), axis=-1)


def weights(hyper: Hyper, cached: np.ndarray, features: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The weights [M] of the L1 cache: (samples of the chain)^alpha / (1 - cosine)."""
    apart = np.maximum(1 - cosine(cached @ features, features.sum(0)), SMALLEST)
    return np.where(cached.any(1), (cached @ sizes) ** float(hyper.size_power) / apart, 0.0)


def next_client(
    hyper: Hyper, row: int, chain: np.ndarray, idle: np.ndarray, used: np.ndarray, features: np.ndarray, sizes: Any
) -> int:
    """The idle client that best balances the chain ``row``: its features, and the numbers of samples of all chains."""
    candidates = np.flatnonzero(idle)
    if variance_of_shares(used) > float(hyper.variance):
        candidates = candidates[used[candidates] == used[candidates].min()]
    balance = cosine(chain[row] @ features + features[candidates], features.sum(0))
    samples = np.tile(chain @ sizes, (len(candidates), 1))
    samples[:, row] += sizes[candidates]
    return int(candidates[np.argmax(balance - variance_of_shares(samples))])


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build CaBaFL."""
    count, num_clients, network = problem.num_branches, problem.num_clients, problem.model
    width, batch_size = representation_width(network), problem.local.batch_size

    def init(key):
        models = copies_of_one(problem, key)
        clients = jax.random.permutation(jax.random.fold_in(key, 1), num_clients)[:count].astype(jnp.int32)
        chain = jax.nn.one_hot(clients, num_clients, dtype=jnp.int32)
        zero = jnp.zeros((), jnp.int32)
        return State(
            model=trees.take(models, zero),
            models=models,
            cache=models,
            step=jnp.zeros(count, jnp.int32),
            chain=chain,
            cached=jnp.zeros_like(chain),
            clients=clients,
            arrived=jnp.zeros(count, bool),
            used=jnp.sum(chain, axis=0),
            features=jnp.zeros((num_clients, width)),
            measured=jnp.ones((), bool),
            cosines=jnp.zeros(MOST_RANKED),
            returns=zero,
            version=zero,
        )

    def select(state, round, key):
        return Cohort(state.clients, problem.sizes[state.clients])

    def server_update(state, uploads, cohort, round, key):
        rows = jnp.arange(count) if cohort.branches is None else cohort.branches
        models = returned(state.models, uploads["model"], cohort)
        return state._replace(models=models, arrived=jnp.zeros(count, bool).at[rows].set(True)), {}

    @jax.jit
    def feature_sums(model, samples, index, offsets, sizes):
        """The features of all clients [N, F]."""

        def of_client(client):
            offset, size = client

            def step(number, total):
                position = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
                rows = index[offset + jnp.minimum(position, size - 1)]
                z = network.features(model, gather(samples, rows)).reshape(batch_size, -1)
                return total + jnp.sum(jnp.where((position < size)[:, None], z, 0.0), axis=0)

            return jax.lax.fori_loop(0, (size + batch_size - 1) // batch_size, step, jnp.zeros(width))

        return jax.lax.map(of_client, (offsets, sizes))

    def measure(model, client):
        data = [client(number) for number in range(num_clients)]
        offsets, sizes = (np.array([int(getattr(each, name)) for each in data]) for name in ("offset", "size"))
        return np.asarray(feature_sums(model, data[0].samples, jnp.asarray(data[0].index), offsets, sizes), np.float64)

    def between_rounds(state, round, key, client):
        """The server's step for each chain that has returned."""
        names = ("step", "chain", "cached", "clients", "used", "cosines")
        step, chain, cached, clients, used, cosines = (np.array(getattr(state, name)) for name in names)
        model, models, cache = state.model, state.models, state.cache
        returns, version, measured = int(state.returns), int(state.version), False
        sizes, rng = np.asarray(problem.sizes), np.random.default_rng(np.asarray(jax.random.key_data(key)))
        features = measure(model, client) if round == 1 else np.asarray(state.features, np.float64)
        waiting = np.asarray(state.arrived).copy()

        for row in map(int, np.flatnonzero(waiting)):
            similarity = np.float32(cosine(chain[row] @ features, features.sum(0)))
            cosines[returns % MOST_RANKED], returns = similarity, returns + 1
            rank = (1 + np.sum(cosines[:returns] < similarity)) / min(returns, MOST_RANKED)
            if step[row] >= hyper.length // 2 or rank > float(hyper.rank):  # from L2 to L1
                cache, cached[row] = put(cache, row, trees.take(models, jnp.int32(row))), chain[row]
            idle = np.ones(num_clients, bool)
            idle[clients[~waiting]] = False
            if step[row] < hyper.length - 1:
                step[row] += 1
                clients[row] = next_client(hyper, row, chain, idle, used, features, sizes)
            else:
                model = trees.mean(cache, weights=jnp.asarray(weights(hyper, cached, features, sizes)))
                models, cache, version = put(models, row, model), put(cache, row, model), version + 1
                step[row], chain[row] = 0, 0
                if version % hyper.refresh == 0:
                    features, measured = measure(model, client), True
                clients[row] = rng.choice(np.flatnonzero(idle))
            chain[row, clients[row]] += 1
            used[clients[row]] += 1
            waiting[row] = False

        arrays = {
            "step": step, "chain": chain, "cached": cached, "clients": clients, "arrived": waiting, "used": used,
            "features": features.astype(np.float32), "measured": measured, "cosines": cosines,
            "returns": np.int32(returns), "version": np.int32(version),
        }  # fmt: skip
        state = State(model, models, cache, **{name: jnp.asarray(array) for name, array in arrays.items()})
        return state, {"version": np.float32(version)}

    def traffic(usual, state, uploads, cohort, round):
        """Also the measurement of the features before this round."""
        measured = num_clients * state.measured.astype(jnp.int32)
        down = Parcels.of(measured, trees.num_bytes(network.shapes()))
        return usual._replace(down=(*usual.down, down), up=(*usual.up, Parcels.of(measured, 4 * width)))

    return circulating(problem)._replace(
        init=init,
        select=select,
        server_update=server_update,
        between_rounds=between_rounds,
        global_model=lambda state: state.model,
        traffic=traffic,
        models=None,
    )


def put(models: Variables, row: int, model: Variables) -> Variables:
    """Stacked models [M, ...] with another one in a row."""
    return jax.tree.map(lambda leaf, new: leaf.at[row].set(new), models, model)


fmr.STRATEGIES["cabafl"] = fmr.Row(
    build,
    Hyper,
    "Xia et al., TCAD 2024",
    title="CaBaFL",
    only_simulated="its server measures the features of all clients, also of those that do not train",
    contract=fmr.Contract(small=Hyper(length=2, refresh=2)),
)
