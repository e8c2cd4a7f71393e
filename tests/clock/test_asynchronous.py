"""Asynchronous clients: the synchronous method as a special case, and a plain event loop as the reference."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.clock import asynchronous, choice, constant, hinge, polynomial, simulate
from fedjax_mr.clock.asynchronous import Keys, State, rebased
from fedjax_mr.clock.online import State as OnlineState
from fedjax_mr.clock.online import online
from fedjax_mr.engine.round import CLIENT, DISPATCH, INIT, SELECT, SERVER, client_key, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, fedasync, fedbuff, fedcross, fedmr, gitfl, on_any_network
from fedjax_mr.strategies.interface import Cohort, History, Strategy
from fedjax_mr.strategies.traffic import Traffic
from fedjax_mr.testing import federations as testing
from fedjax_mr.testing.federations import default_hyper, make_engine, simulator, tree_close, tree_equal

SIZES = (7, 12, 1, 5, 9, 4, 3, 8, 6, 2, 5, 7)
FEDERATION = {"network": "normed", "sizes": SIZES, "seed": 1, "devices": 1, "lanes": 1}
KEY, E = jax.random.key(1), 6
QUICK = ("fedavg",)
IMPOSSIBLE = {"centralized", "adaptivefl", "clusamp", "pfedhr", "hypcluster", "ifca", "fedme"}


def seconds(job, client):
    return 1 + client % 3 + (job * 0.37) % 1


def chooser(strategy=None):
    key_of = lambda number: round_key(KEY, SELECT, number)
    return (
        choice.uniformly(key_of) if strategy is None or strategy.choose is None else choice.by(strategy.choose, key_of)
    )


def events(in_flight, buffer, refill, duration=seconds, choose=None):
    choose = choose or chooser()
    return simulate(
        E, num_clients=len(SIZES), in_flight=in_flight, cohort=buffer, refill=refill, choose=choose, duration=duration
    )


@functools.cache
def keys():
    of_stream = lambda stream: jax.vmap(functools.partial(round_key, KEY, stream))(np.arange(E + 1))
    return jax.jit(lambda: Keys(of_stream(DISPATCH), of_stream(CLIENT)))()


def engine(strategy, in_flight, buffer, refill, *, weight=constant, hyper=None, duration=seconds, **options):
    row, hyper = STRATEGIES[strategy], default_hyper(strategy) if hyper is None else hyper
    problem = testing.constants("perceptron", sizes=SIZES).problem
    choose = chooser(row.build(hyper, problem)) if strategy == "gitfl" else chooser()
    found = events(in_flight, buffer, refill, duration, choose)

    def build(hyper, problem):
        return asynchronous(functools.partial(row.build, hyper), problem, found.schedule, keys(), weight=weight)

    cohort = found.schedule.train_clients.shape[1]
    return simulator((build, hyper), cohort=cohort, **FEDERATION | options).rounds


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in on_any_network()],
)
def test_with_as_many_jobs_as_arrivals_it_is_the_synchronous_method(strategy):
    """Whatever the durations: no upload is stale. Bit for bit, with BatchNorm, dropout and memories."""
    if strategy in IMPOSSIBLE:
        with pytest.raises(UserError, match=r"asynchronous clients are not possible|upload"):
            engine(strategy, 3, 3, "update").init()
        return
    hyper = gitfl.Hyper("random") if strategy == "gitfl" else default_hyper(strategy)
    plain = make_engine(strategy, cohort=3, hyper=hyper, **FEDERATION)
    expected, plain_report = plain.run(plain.init(), E)
    late = engine(strategy, 3, 3, "update", weight=polynomial(0.5), hyper=hyper)
    progress, report = late.run(late.init(), E)
    tree_equal(progress.server.inner, expected.server)
    tree_equal(progress.memory, expected.memory)
    assert report.info["staleness_max"] == 0
    assert report.traffic.num_bytes()[1] == plain_report.traffic.num_bytes()[1]


def test_a_method_that_trains_another_part_in_each_round_is_refused():
    with pytest.raises(UserError, match=r"the strategy trains another part in each round, and uploads .* lost"):
        engine("rolora", 3, 3, "update", network="adapted").init()


def test_clients_that_upload_a_model_of_their_own_making_are_refused_in_the_words_of_the_clock():
    """As in FLoRA, whose clients draw the adapter themselves."""
    made = {"model": {"params": {"lora_a": np.ones((2, 3), np.float32)}}}
    with pytest.raises(UserError, match=r"^asynchronous clients are not possible: .* use mode=sync$"):
        rebased(made, {"model": {"params": {}}}, {"model": {"params": {}}}, np.zeros(2, np.int32), np.ones(2))


LOOPS = {  # strategy, its hyper-parameters, (M, K, refill), weight of staleness, rule of the loop
    "fedbuff, update": ("fedbuff", fedbuff.Hyper(), (6, 3, "update"), polynomial(0.5), "fedbuff"),
    "fedbuff, arrival": ("fedbuff", fedbuff.Hyper(), (5, 2, "arrival"), constant, "fedbuff"),
    "fedbuff, FedScale": ("fedbuff", fedbuff.Hyper(0.7, "weights"), (5, 2, "arrival"), polynomial(0.5), "fedscale"),
    "fedasync": ("fedasync", fedasync.Hyper(), (4, 1, "arrival"), polynomial(0.5), "fedasync"),
    "fedasync, one client": ("fedasync", fedasync.Hyper(1.0, 0.0), (1, 1, "update"), hinge(10, 4), "sequential"),
    "gitfl": ("gitfl", gitfl.Hyper(budget=20.0), (4, 1, "update"), constant, "gitfl"),
    "fedcross": ("fedcross", fedcross.Hyper(0.9), (4, 1, "update"), constant, "fedcross"),
    "fedmr": ("fedmr", fedmr.Hyper(), (5, 2, "update"), constant, "fedmr"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[] if n == "fedbuff, arrival" else pytest.mark.slow) for n in LOOPS]
)
def test_it_equals_a_plain_event_loop(case):
    """A loop over events with a heap: every job trains alone, at its start, and each update is written by hand."""
    strategy, hyper, setting, weight, rule = LOOPS[case]
    network = "normed" if strategy == "fedbuff" else "perceptron"
    late = engine(strategy, *setting, weight=weight, hyper=hyper, network=network)
    progress, _ = late.run(late.init(), E)
    models = event_loop(
        late.constants, STRATEGIES[strategy].build(hyper, late.constants.problem), setting, weight, RULES[rule]
    )
    tree_close(late.deployed(progress), models, rtol=2e-5, atol=1e-6)


def event_loop(constants, strategy, setting, weight, rule):
    in_flight, buffer, refill = setting
    at_arrival = refill == "arrival" and buffer > 1
    train = jax.jit(
        lambda model, client, version: strategy.client_update(
            {"model": model}, None, constants.client(client), version, client_key(KEY, version, client, 0)
        )[0]["model"]
    )
    initial = jax.device_get(jax.jit(constants.problem.model.init)(jax.random.fold_in(KEY, INIT)))
    update, sent, deployed, state = rule(initial, in_flight)
    version, draws, busy, seen, now = 0, 0, set(), set(), 0.0
    queue, waiting, jobs = [], [], 0
    versions, starts, durations = (
        np.zeros(in_flight),
        np.zeros(len(SIZES)),
        {client: [] for client in range(len(SIZES))},
    )

    def choose_more(count, branches, returned):
        nonlocal draws
        blocked = np.zeros(len(SIZES), bool)
        blocked[list(busy | seen)] = True
        means = np.array([np.mean(each) if each else 0.0 for each in durations.values()])
        history = History(now, np.array(branches), versions, starts, means, np.array(returned, int))
        clients = chooser(strategy)(draws, blocked, count, history)
        waiting.extend(map(int, clients))
        seen.update(waiting)
        draws += 1

    def start(branch):
        nonlocal jobs
        client = waiting.pop(0)
        busy.add(client)
        starts[client] += 1
        before = sent(state, branch)
        trained = jax.device_get(train(before, np.int32(client), np.int32(version)))
        heapq.heappush(queue, (now + seconds(jobs, client), jobs, now, client, version, branch, before, trained))
        jobs += 1

    total = in_flight + (buffer - 1 if at_arrival else 0)
    while total > 0:
        choose_more(min(buffer, total), range(min(buffer, total)), [])
        total -= buffer
    for branch in range(in_flight):
        start(branch)
    for _ in range(E):
        arrived = []
        while len(arrived) < buffer:
            job = heapq.heappop(queue)
            now, number, began, client, its_version, branch, before, after = job
            busy.discard(client)
            durations[client].append(now - began)
            versions[branch] += 1
            arrived.append((number, client, branch, version - its_version, before, after))
            if at_arrival and len(arrived) < buffer:
                start(branch)
        arrived.sort(key=lambda each: each[0])
        branches = [each[2] for each in arrived]
        shares = [float(weight(jnp.array([each[3]]))[0]) for each in arrived]
        state = update(state, branches, shares, [each[4] for each in arrived], [each[5] for each in arrived], version)
        version += 1
        seen.clear()
        choose_more(buffer, branches, [each[1] for each in arrived])
        for branch in [0] if at_arrival else branches:
            start(branch)
    return deployed(state)


def combined(weights, models):
    return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *models)


def one_model(update):
    return lambda initial, count: (update, lambda model, branch: model, lambda model: model, initial)


def buffered(lr, *, by_weights):
    def update(model, branches, shares, before, after, version):
        rows = []
        for share, old, new in zip(shares, before, after, strict=True):
            change = jax.tree.map(lambda a, b: a - b, new["params"], old["params"])
            moved = jax.tree.map(lambda now, d, share=share: now + share * d, model["params"], change)
            rows.append(
                {"params": moved, "batch_stats": trees.interpolate(new["batch_stats"], model["batch_stats"], share)}
            )
        mean = combined([1 / len(rows)] * len(rows), rows)
        rate = lr / np.mean(shares) if by_weights else lr
        return mean | {"params": combined([1 - rate, rate], [model["params"], mean["params"]])}

    return one_model(update)


def mixed(model, branches, shares, before, after, version):
    for share, new in zip(shares, after, strict=True):
        model = combined([1 - 0.6 * share, 0.6 * share], [model, new])
    return model


def git(initial, count):
    """State: branches and versions."""
    master = lambda state: combined(np.array(state[1]) / max(sum(state[1]), 1), state[0])

    def update(state, branches, shares, before, after, version):
        models, versions = list(state[0]), list(state[1])
        for branch, new in zip(branches, after, strict=True):
            models[branch], versions[branch] = new, versions[branch] + 1
        return models, versions

    def sent(state, branch):
        if not sum(state[1]):
            return initial
        weight = min(50, max(2, 10 + state[1][branch] - np.mean(state[1])))
        return combined([weight / (weight + 1), 1 / (weight + 1)], [state[0][branch], master(state)])

    return update, sent, master, ([initial] * count, [0] * count)


def several(update):
    """State: the newest uploads, and the models that are sent."""
    mean = lambda state: combined([1 / len(state[1])] * len(state[1]), state[1])
    return lambda initial, count: (update, lambda state, branch: state[1][branch], mean, ([initial] * count,) * 2)


def crossed(state, branches, shares, before, after, version):
    newest, models = list(state[0]), list(state[1])
    for branch, new in zip(branches, after, strict=True):
        newest[branch] = new
        flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)]) for model in newest]
        cosines = [np.dot(each, flat[branch]) / np.linalg.norm(each) for each in flat]
        cosines[branch] = np.inf
        models[branch] = combined([0.9, 0.1], [new, newest[int(np.argmin(cosines))]])
    return newest, models


def recombined(state, branches, shares, before, after, version):
    units = fedmr.recombination_units(fedmr.Hyper(), testing.network_of("perceptron").layers())
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *after)
    new, models = jax.device_get(fedmr.recombine(stacked, units, round_key(KEY, SERVER, version))), list(state[1])
    for row, branch in enumerate(branches):
        models[branch] = trees.take(new, row)
    return state[0], models


RULES = {
    "fedbuff": buffered(1.0, by_weights=False),
    "fedscale": buffered(0.7, by_weights=True),
    "fedasync": one_model(mixed),
    "sequential": one_model(lambda model, branches, shares, before, after, version: after[0]),
    "gitfl": git,
    "fedcross": several(crossed),
    "fedmr": several(recombined),
}


@pytest.mark.slow  # quick: experiment/test_channel_and_clock.py
@pytest.mark.parametrize(
    "setting",
    [
        ("scaffold", 5, 2, "arrival"),
        *(pytest.param((n, 5, 1, "update"), marks=pytest.mark.slow) for n in ("gitfl", "fedcross")),
    ],
    ids=str,
)
def test_calls_layouts_and_checkpoints_in_the_middle_of_waves_change_nothing(setting):
    one = engine(*setting, weight=polynomial(0.5))
    whole, _ = one.run(one.init(), E)
    parts = one.init()
    for count in (1, 2, 3):
        parts = one.place(jax.device_get(parts))  # as a checkpoint does
        parts, _ = one.run(parts, count)
    tree_equal(whole, parts)
    other = engine(*setting, weight=polynomial(0.5), devices=2, lanes=2)
    laid_out, _ = other.run(other.place(one.init()), E)
    tree_close(jax.device_get(whole), jax.device_get(laid_out))


def test_fresh_uploads_count_and_old_ones_fade():
    tau = np.array([0, 1, 4, 5, 14], np.int32)
    ours = jax.jit(lambda tau: [weight(tau) for weight in (constant, polynomial(0.5), hinge(10.0, 4.0))])(tau)
    for weights, expected in zip(ours, (np.ones(5), (1.0 + tau) ** -0.5, [1, 1, 1, 1 / 11, 1 / 101]), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_a_round_sends_k_models_and_the_first_one_also_those_of_the_first_jobs():
    """M = 6 jobs, K = 3, and models of five numbers."""
    schedule = events(6, 3, "update").schedule
    problem = testing.constants("linear", sizes=SIZES).problem
    build = functools.partial(STRATEGIES["fedavg"].build, default_hyper("fedavg"))
    late, rows = (
        asynchronous(build, problem, schedule, keys()),
        {"model": np.zeros((schedule.num_slots, 5), np.float32)},
    )
    for round, sent in ((0, 9), (1, 3)):
        traffic = late.traffic(Traffic(), State(None, rows, rows, round), None, None, jnp.int32(round))
        assert traffic.num_bytes() == (sent * 20, 3 * 20, 0)


@pytest.mark.parametrize(("round", "sent"), [(0, 4), (7, 1)])
def test_with_online_choice_the_model_that_is_due_first_returns_and_starts_a_new_job(round, sent):
    """Jobs 0, 1, 2 of clients 2, 0, 1 take 5, 3 and 9 seconds, and the first one has run for one of them."""
    ids = jnp.array([2, 0, 1], jnp.int32)
    inner = Strategy(
        init=lambda key: None,
        dispatch=lambda state, cohort, key: {"model": jnp.zeros((3, 5))},
        client_update=lambda payload, memory, data, round, key: (payload, memory, None),
        server_update=lambda state, uploads, cohort, round, key: (state, {"of": cohort.ids[0]}),
        select=lambda state, round, key: Cohort(ids, ids),
        stale="branches",
    )
    problem = testing.constants("linear", cohort=3).problem
    table = np.zeros((12, 6))
    table[[0, 1, 2], [2, 0, 1]] = 5, 3, 9
    late = online(lambda problem: inner, problem, table, keys())
    elapsed = jnp.array([1.0, 0.0, 0.0])
    start = OnlineState(
        None,
        {"model": jnp.zeros((3, 5))},
        jnp.ones(3, bool),
        jnp.zeros(3, jnp.int32),
        jnp.arange(3),
        elapsed,
        jnp.float32(2),
    )
    state, info = jax.jit(lambda start, round: late.server_update(start, None, None, round, None))(start, round)
    assert (int(info["of"]), float(info["clock"]), float(state.time)) == (0, 5, 5)
    np.testing.assert_array_equal(state.trained, [True, False, True])
    np.testing.assert_array_equal(state.version, [0, round + 1, 0])
    np.testing.assert_array_equal(state.job, [0, 3 + round, 2])
    np.testing.assert_array_equal(state.elapsed, [4, 0, 3])
    assert late.traffic(Traffic(), start, None, None, jnp.int32(round)).num_bytes() == (sent * 20, 20, 0)


@pytest.mark.slow
def test_traffic_counts_starts_and_arrivals():
    """M + E K models are sent by the end of E versions, except those that start after the last one."""
    late = engine("fedavg", 6, 3, "update")
    _, report = late.run(late.init(), E)
    size = trees.num_bytes(late.constants.problem.model.shapes())
    down, up, _ = report.traffic.num_bytes()
    assert (down, up) == ((6 + E * 3) * size, E * 3 * size)
