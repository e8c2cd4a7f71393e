"""CaBaFL: its server and a plain event loop, written a second time with lists and loops."""

import dataclasses
import functools
import heapq
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cabafl  # experiments/plugins/cabafl.py
import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.clock import online
from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.config import config
from fedjax_mr.engine.round import CLIENT, DISPATCH, HOST, INIT, client_key, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, Cohort, gitfl, parts
from fedjax_mr.testing.federations import constants, simulator, tree_close, tree_equal

ROW = STRATEGIES.pop("cabafl")  # other tests are of the methods of the package
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


@pytest.fixture
def registered(monkeypatch):
    """CaBaFL is among the strategies, as after ``--import``."""
    monkeypatch.setitem(STRATEGIES, "cabafl", ROW)


def test_its_settings_are_flags_of_a_command_that_imports_it(registered):
    assert config.parse(["--strategy=cabafl", "--cabafl_length=3"]).hyper == cabafl.Hyper(length=3)


@pytest.mark.slow
def test_a_run_knows_the_time(registered, tmp_path):
    """A method that chooses its clients one by one: only its state knows the clock."""
    result = fmr.run(
        fmr.Config(
            strategy="cabafl", model="logistic", clients=9, cohort=1, in_flight=3, mode="async", rounds=4, eval_every=2,
            local_epochs=1, devices=1, progress=False, run_dir=str(tmp_path / "run"),
        ),
        record=False,
    )  # fmt: skip
    assert 0 < result.rows[0]["clock"] < result.rows[1]["clock"]


def test_a_run_needs_the_file_to_be_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"strategy": "cabafl"}')
    assert config.load(tmp_path).strategy == "cabafl"  # for tables
    with pytest.raises(UserError, match="strategy=cabafl, which is not registered"):
        config.load_code(tmp_path)


@pytest.mark.parametrize("branches", [None, [2, 0, 1]])
def test_each_client_receives_the_model_of_its_chain_and_uploads_the_trained_one(federation, monkeypatch, branches):
    strategy = cabafl.build(cabafl.Hyper(), federation("linear").problem)
    state = types.SimpleNamespace(models={"w": jnp.array([1.0, 2.0, 6.0])})
    cohort = Cohort(np.arange(3), np.ones(3), branches=None if branches is None else jnp.array(branches))
    sent = strategy.dispatch(state, cohort, jax.random.key(0))
    assert sent["model"]["w"].tolist() == [[1, 2, 6][row] for row in branches or range(3)]
    monkeypatch.setattr(parts.local, "train", lambda model, setting, *received: (received, "metrics"))
    upload = strategy.client_update({"model": "received"}, "memory", "data", 0, "key")
    assert upload == ({"model": ("received", "data", "key")}, "memory", "metrics")


@pytest.mark.slow
def test_the_contract_holds():
    """The command that users run for their own methods."""
    path = Path(__file__).parents[2] / "experiments" / "plugins" / "cabafl.py"
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_mr.testing", f"--import={path}", "-k", "cabafl"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]


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
        cohort = strategy.select(state, 0, None)
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


# Four clients. The sum of their features is (4, 3); the cosines of clients 0 and 1 with it are 4/5 and 3/5.
FEATURES = np.array([[4.0, 0], [0, 3], [0, 0], [0, 0]])


def jobs(*chains):
    """Chains of clients as numbers of jobs [M, 4]."""
    return np.array([np.bincount(chain, minlength=4) for chain in chains], np.int32)


def test_a_cached_model_weighs_the_power_of_its_samples_over_one_minus_its_cosine():
    hyper, sizes = cabafl.Hyper(size_power=0.5), np.array([4, 9, 5, 7])
    cached = np.vstack([jobs([0], [1], [0, 0]), np.zeros((1, 4), int)])
    np.testing.assert_allclose(cabafl.weights(hyper, cached, FEATURES, sizes), [2 / 0.2, 3 / 0.4, 8**0.5 / 0.2, 0])
    assert cabafl.weights(hyper, jobs([0, 1]), FEATURES, sizes) == pytest.approx(13**0.5 / cabafl.SMALLEST)


@pytest.mark.parametrize(
    "row, idle, used, sizes, variance, client",
    [
        (0, [0, 1, 2, 3], [1, 0, 1, 0], [4, 4, 4, 4], 1.0, 1),  # client 1 completes the features of client 0
        (1, [0, 1, 3], [1, 0, 1, 0], [4, 4, 4, 4], 1.0, 0),  # the chain of client 2 is nearest with client 0
        (
            0,
            [2, 3],
            [1, 0, 1, 0],
            [4, 4, 90, 88],
            1.0,
            3,
        ),  # equal features; 92 is nearer to 90 samples than 94
        (0, [1, 2, 3], [1, 9, 0, 1], [4, 4, 4, 4], 0.0, 2),  # only the least used ones are candidates
        (0, [1, 3], [1, 9, 0, 1], [4, 4, 4, 4], 0.0, 3),  # of the idle ones
    ],
)
def test_the_next_client_of_a_chain_balances_its_features_and_the_samples_of_all_chains(
    row, idle, used, sizes, variance, client
):
    hyper, free = cabafl.Hyper(variance=variance), np.isin(np.arange(4), idle)
    assert cabafl.next_client(hyper, row, jobs([0], [2]), free, np.array(used), FEATURES, np.array(sizes)) == client


def test_every_chain_starts_with_a_client_of_its_own_and_an_empty_cache(federation, monkeypatch):
    keys = []
    start = lambda problem, key: keys.append(key) or {"w": jnp.array([7.0, 7.0, 7.0])}
    monkeypatch.setattr(cabafl, "copies_of_one", start)
    monkeypatch.setattr(jax.random, "permutation", lambda key, count: jnp.array([4, 0, 5, 1, 2, 3]))
    key = jax.random.key(0)
    state = cabafl.build(cabafl.Hyper(), federation("linear").problem).init(key)
    assert len(keys) == 1 and keys[0] is key
    assert state.clients.tolist() == [4, 0, 5] and state.used.tolist() == [1, 0, 0, 0, 1, 1]
    assert state.chain.tolist() == np.eye(6)[[4, 0, 5]].tolist() and not state.cached.any()
    assert float(state.model["w"]) == 7 and state.measured and not state.arrived.any()


def after_a_return(federation, *, step, length, rank=0.25, seed=0):
    """The state after client 0 has returned the model of chain 0, which is 10; that of chain 1 is with client 1."""
    problem = federation("linear", sizes=(4, 4, 4, 4), cohort=1).problem
    problem = dataclasses.replace(problem, in_flight=2)
    strategy = cabafl.build(cabafl.Hyper(length=length, rank=rank, variance=1.0), problem)
    start = cabafl.State(
        model={"w": np.float32(1)}, models={"w": jnp.array([2.0, 20.0])}, cache={"w": jnp.array([3.0, 30.0])},
        step=np.array([step, 0]), chain=jobs([0], [1]), cached=jobs([0, 0], [1]), clients=np.array([0, 1]),
        arrived=np.zeros(2, bool), used=np.array([1, 1, 0, 0]), features=FEATURES, measured=np.array(False),
        cosines=np.pad([0.5, 0.9], (0, cabafl.MOST_RANKED - 2)).astype(np.float32), returns=np.int32(2),
        version=np.int32(6),
    )  # fmt: skip
    cohort = strategy.select(start, 0, None)
    assert np.asarray(cohort.ids).tolist() == [0, 1]
    cohort = Cohort(np.array([0]), np.array([4]), branches=jnp.array([0]))
    state, _ = strategy.server_update(start, {"model": {"w": jnp.array([10.0])}}, cohort, 8, None)
    assert state.models["w"].tolist() == [10, 20] and state.arrived.tolist() == [True, False]
    return strategy.between_rounds(state, 9, jax.random.key(seed), None)


@pytest.mark.parametrize(
    "step, length, rank, enters",
    [(0, 4, 0.6, True), (0, 4, 0.7, False), (1, 4, 0.7, False), (2, 4, 0.7, True), (0, 5, 0.7, False)],
)
def test_a_returned_model_enters_the_cache_if_it_is_trained_or_balanced_enough(federation, step, length, rank, enters):
    """Of the cosines 0.5, 0.9 and its own 0.8, two thirds are at most its own. Half of T clients always suffice."""
    state, info = after_a_return(federation, step=step, length=length, rank=rank)
    assert state.cache["w"].tolist() == [10 if enters else 3, 30]
    assert state.cached.tolist() == jobs([0] if enters else [0, 0], [1]).tolist()
    assert state.step.tolist() == [step + 1, 0]
    # Client 1 would be best, but it is busy. The others are equal, so the first one is chosen.
    assert state.clients.tolist() == [0, 1] and state.chain.tolist() == jobs([0, 0], [1]).tolist()
    assert state.used.tolist() == [2, 1, 0, 0] and not state.arrived.any()
    assert int(state.returns) == 3 and state.cosines[:4].tolist() == pytest.approx([0.5, 0.9, 0.8, 0])
    assert float(state.model["w"]) == 1 and float(info["version"]) == 6  # nothing is aggregated


def test_at_the_end_of_a_chain_the_global_model_is_the_mean_of_the_cache_and_the_chain_starts_from_it(federation):
    """Weights 4 / 0.2 and 4 / 0.4: (20 x 10 + 10 x 30) / 30."""
    state, info = after_a_return(federation, step=1, length=2)
    expected = (20 * 10 + 10 * 30) / 30
    assert float(state.model["w"]) == pytest.approx(expected)
    assert state.models["w"].tolist() == pytest.approx([expected, 20])
    assert state.cache["w"].tolist() == pytest.approx([expected, 30])
    assert float(info["version"]) == 7 and state.step.tolist() == [0, 0]
    clients = set()
    for seed in range(6):
        state, _ = after_a_return(federation, step=1, length=2, seed=seed)
        (client,) = np.flatnonzero(state.chain[0])
        clients.add(int(client))
        assert client == state.clients[0]
    assert len(clients) > 1 and 1 not in clients  # a random idle client, alone in the new chain


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
