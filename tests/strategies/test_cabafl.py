"""CaBaFL: its server and a plain event loop, written a second time with lists and loops."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.clock import online
from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.engine.round import CLIENT, DISPATCH, HOST, INIT, client_key, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import cabafl, gitfl
from fedjax_mr.testing.federations import constants, simulator, tree_close, tree_equal

SIZES = (7, 12, 1, 5, 9, 4, 3, 8, 6)
FEDERATION = {"network": "perceptron", "sizes": SIZES, "seed": 1}
KEY, M, E, N = jax.random.key(1), 3, 14, len(SIZES)
HYPER = cabafl.Hyper(length=3, rank=0.5, refresh=2, size_power=0.5, variance=0.005)
SECONDS = np.random.default_rng(0).uniform(1, 9, (M + E, N)).astype(np.float32)


class Server:
    """The server of CaBaFL with lists of clients."""

    def __init__(self, constants, initial, clients):
        self.constants, self.models, self.cache = constants, [initial] * len(clients), [initial] * len(clients)
        self.model, self.step, self.version = initial, [0] * len(clients), 0
        self.clients = list(clients)
        self.chains, self.cached = [[client] for client in clients], [[] for _ in clients]
        self.used, self.history = [int(client in clients) for client in range(N)], []
        self.features = self.measure()

    def measure(self):
        network, sums = self.constants.problem.model, []
        for client in range(N):
            data = self.constants.client(client)
            rows = np.asarray(data.index)[int(data.offset) : int(data.offset) + int(data.size)]
            x = np.asarray(data.samples.x)[rows] * np.asarray(data.samples.scale) + np.asarray(data.samples.shift)
            z = network.features(self.model, x.astype(np.float32).reshape(-1, *network.input_shape))
            sums.append(np.asarray(z).reshape(len(rows), -1).sum(0))
        return np.array(sums, np.float64)

    def cosine(self, chain):
        own, all = sum(self.features[client] for client in chain), self.features.sum(0)
        return float(own @ all / np.sqrt(own @ own) / np.sqrt(all @ all))

    def arrive(self, row, upload, idle, key):
        """One model returns; the client of the next job is chosen among the idle ones."""
        self.models[row] = upload
        self.history.append(self.cosine(self.chains[row]))
        at_most = sorted(self.history).index(self.history[-1]) + 1
        if self.step[row] > HYPER.length // 2 - 1 or at_most / len(self.history) > HYPER.rank:
            self.cache[row], self.cached[row] = upload, list(self.chains[row])
        if self.step[row] == HYPER.length - 1:
            weights = [
                sum(SIZES[client] for client in chain) ** HYPER.size_power / (1 - self.cosine(chain)) if chain else 0.0
                for chain in self.cached
            ]
            shares = [weight / sum(weights) for weight in weights]
            self.model = jax.tree.map(lambda *leaves: sum(map(np.multiply, shares, leaves)), *self.cache)
            self.models[row] = self.cache[row] = self.model
            self.chains[row], self.step[row], self.version = [], 0, self.version + 1
            if self.version % HYPER.refresh == 0:
                self.features = self.measure()
            client = int(np.random.default_rng(np.asarray(jax.random.key_data(key))).choice(idle))
        else:
            self.step[row] += 1
            client = self.balancing(row, idle)
        self.clients[row] = client
        self.chains[row].append(client)
        self.used[client] += 1
        return client

    def balancing(self, row, idle):
        if np.var([count / sum(self.used) for count in self.used]) > HYPER.variance:
            idle = [client for client in idle if self.used[client] == min(self.used[other] for other in idle)]
        values = {}
        for client in idle:
            samples = [sum(SIZES[each] for each in chain) for chain in self.chains]
            samples[row] += SIZES[client]
            variance = np.var([count / sum(samples) for count in samples])
            values[client] = self.cosine([*self.chains[row], client]) - variance
        return max(values, key=lambda client: (values[client], -client))


def key_after(round):
    return round_key(KEY, HOST, round)


def first_clients(count):
    return np.asarray(jax.random.permutation(jax.random.fold_in(jax.random.fold_in(KEY, INIT), 1), N)[:count]).tolist()


def asynchronous(strategy=cabafl, hyper=HYPER, **options):
    versions = np.arange(E + 1)
    keys = Keys(*(jax.vmap(functools.partial(round_key, KEY, stream))(versions) for stream in (DISPATCH, CLIENT)))
    build = lambda hyper, problem: online(functools.partial(strategy.build, hyper), problem, SECONDS, keys)
    return simulator((build, hyper), cohort=M, **FEDERATION | {"devices": 1, "lanes": 1} | options).rounds


@pytest.mark.slow
def test_it_equals_a_plain_event_loop():
    """A heap of arrivals; every job trains alone, at its start."""
    rounds = asynchronous()
    progress, report = rounds.run(rounds.init(), E)
    known = rounds.constants
    strategy = cabafl.build(HYPER, known.problem)
    train = jax.jit(
        lambda model, client, version: strategy.client_update(
            {"model": model}, None, known.client(client), version, client_key(KEY, version, client, 0)
        )[0]["model"]
    )
    server = Server(known, known.problem.model.init(jax.random.fold_in(KEY, INIT)), first_clients(M))
    queue = []

    def start(job, row, now, version):
        client = server.clients[row]
        heapq.heappush(queue, (now + SECONDS[job, client], job, row, train(server.models[row], client, version)))

    for row in range(M):
        start(row, row, 0.0, 0)
    for round in range(E):
        now, _, row, upload = heapq.heappop(queue)
        idle = [client for client in range(N) if client not in [*server.clients[:row], *server.clients[row + 1 :]]]
        server.arrive(row, upload, idle, key_after(round + 1))
        start(M + round, row, now, round + 1)
    state = progress.server.inner
    assert server.version >= 3 and int(state.version) == server.version  # also after new features
    assert np.asarray(state.clients).tolist() == server.clients
    assert np.asarray(state.used).tolist() == server.used
    tree_close(rounds.deployed(progress), server.model)
    np.testing.assert_allclose(report.info["clock"], now, rtol=1e-5)


@pytest.mark.slow
def test_calls_layouts_and_a_checkpoint_in_the_middle_of_waves_change_nothing():
    rounds = asynchronous()
    whole, report = rounds.run(rounds.init(), E)
    parts = rounds.init()
    for count in (1, 4, E - 5):
        parts = rounds.place(jax.device_get(parts))  # as a checkpoint does
        parts, _ = rounds.run(parts, count)
    tree_equal(whole, parts)
    other = asynchronous(devices=2, lanes=2)
    laid_out, _ = other.run(other.place(rounds.init()), E)
    tree_close(jax.device_get(whole), jax.device_get(laid_out))
    clients = np.asarray(whole.server.inner.clients)
    assert len(set(clients.tolist())) == M  # no client is twice in flight
    size, width = trees.num_bytes(rounds.constants.problem.model.shapes()), whole.server.inner.features.shape[1]
    measurements = 1 + int(whole.server.inner.version) // HYPER.refresh - int(whole.server.inner.measured)
    down, up, _ = report.traffic.num_bytes()
    assert (down, up) == ((M + E + N * measurements) * size, E * size + 4 * N * measurements * width)


@pytest.mark.slow
def test_in_synchronous_rounds_the_chains_return_one_after_the_other():
    known = constants(**FEDERATION, cohort=M)
    strategy = cabafl.build(HYPER, known.problem)
    state = jax.jit(strategy.init)(jax.random.fold_in(KEY, INIT))
    server = Server(known, state.model, first_clients(M))
    random = np.random.default_rng(0)
    for round in range(5):
        noisy = lambda leaf: leaf + random.normal(size=leaf.shape).astype(leaf.dtype)
        uploads = [jax.tree.map(noisy, state.model) for _ in range(M)]
        cohort = strategy.select(state, None)
        assert np.asarray(cohort.ids).tolist() == server.clients
        stacked = {"model": jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)}
        state, _ = strategy.server_update(state, stacked, cohort, round, None)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key_after(round + 1))))
        ends = server.step[0] == HYPER.length - 1
        state, _ = strategy.between_rounds(state, round + 1, key_after(round + 1), known.client)
        for row, upload in enumerate(uploads):
            idle = [client for client in range(N) if client not in server.clients[:row]]
            if ends:  # one generator for all of them
                server.arrive(row, upload, [rng.choice(idle)], key_after(round + 1))
            else:
                server.arrive(row, upload, idle, None)
        tree_close(state.model, server.model, rtol=1e-4)
        assert np.asarray(state.clients).tolist() == server.clients
    assert server.version == M


def test_with_one_client_per_chain_the_global_model_is_the_mean_of_the_cache():
    """T = 1 and equal weights: each arrival is cached, and its place becomes the mean."""
    hyper = cabafl.Hyper(length=1)
    features, sizes = np.ones((4, 2)), np.full(4, 5)
    np.testing.assert_allclose(cabafl.weights(hyper, np.eye(3, 4, dtype=int), features, sizes), 5 / cabafl.SMALLEST)
    none = np.eye(3, 4, dtype=int) * np.array([[1], [0], [1]])
    assert (cabafl.weights(hyper, none, features, sizes) > 0).tolist() == [True, False, True]  # never cached: 0


def test_others_are_refused():
    with pytest.raises(UserError, match=r"does not select the client"):
        asynchronous(gitfl, gitfl.Hyper("random")).init()
