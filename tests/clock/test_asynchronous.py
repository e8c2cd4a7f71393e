"""Asynchronous clients: the synchronous method as a special case, and a plain event loop as the reference."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.clock import asynchronous, choice, constant, hinge, polynomial, simulate
from fedjax_mr.clock.asynchronous import Keys
from fedjax_mr.engine.round import CLIENT, DISPATCH, INIT, SELECT, client_key, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, fedavg
from fedjax_mr.testing.federations import default_hyper, make_engine, simulator, tree_close, tree_equal

SIZES = (7, 12, 1, 5, 9, 4, 3, 8, 6, 2, 5, 7)
FEDERATION = {"network": "normed", "sizes": SIZES, "seed": 1, "devices": 1, "lanes": 1}
KEY, E = jax.random.key(1), 6
QUICK = ("fedavg", "fedmr", "fedcross", "scaffold")
IMPOSSIBLE = {"centralized", "adaptivefl", "clusamp", "pfedhr", "hypcluster", "fedme"}


def seconds(job, client):
    return 1 + client % 3 + (job * 0.37) % 1


def events(in_flight, buffer, refill, duration=seconds):
    choose = choice.uniformly(lambda number: round_key(KEY, SELECT, number))
    return simulate(
        E, num_clients=len(SIZES), in_flight=in_flight, cohort=buffer, refill=refill, choose=choose, duration=duration
    )


def keys():
    versions = np.arange(E + 1)
    return Keys(*(jax.vmap(functools.partial(round_key, KEY, stream))(versions) for stream in (DISPATCH, CLIENT)))


def engine(strategy, in_flight, buffer, refill, *, weight=constant, hyper=None, duration=seconds, **options):
    found = events(in_flight, buffer, refill, duration)
    row, hyper = STRATEGIES[strategy], default_hyper(strategy) if hyper is None else hyper

    def build(hyper, problem):
        return asynchronous(functools.partial(row.build, hyper), problem, found.schedule, keys(), weight=weight)

    cohort = found.schedule.train_clients.shape[1]
    return simulator((build, hyper), cohort=cohort, **FEDERATION | options).rounds


@pytest.mark.parametrize(
    "strategy", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in STRATEGIES]
)
def test_with_as_many_jobs_as_arrivals_it_is_the_synchronous_method(strategy):
    """Whatever the durations: no upload is stale. Bit for bit, with BatchNorm, dropout and memories."""
    if strategy in IMPOSSIBLE:
        with pytest.raises(UserError, match=r"asynchronous clients are not possible|upload"):
            engine(strategy, 3, 3, "update").init()
        return
    plain = make_engine(strategy, cohort=3, **FEDERATION)
    expected, plain_report = plain.run(plain.init(), E)
    late = engine(strategy, 3, 3, "update", weight=polynomial(0.5))
    progress, report = late.run(late.init(), E)
    tree_equal(progress.server.inner, expected.server)
    tree_equal(progress.memory, expected.memory)
    assert report.info["staleness_max"] == 0
    if STRATEGIES[strategy].hyper is None or plain.strategy.traffic is None:
        assert report.traffic.num_bytes()[1] == plain_report.traffic.num_bytes()[1]


@pytest.mark.parametrize("setting", [(6, 3, "update"), (5, 2, "arrival"), (4, 1, "arrival")], ids=str)
@pytest.mark.parametrize("weight", [constant, polynomial(0.5)], ids=["constant", "polynomial"])
def test_it_equals_a_plain_event_loop(setting, weight):
    """FedBuff as a loop over events with a heap: every job trains alone, at its start."""
    in_flight, buffer, refill = setting
    late = engine("fedavg", *setting, weight=weight, hyper=fedavg.Hyper(weights="uniform"))
    progress, _ = late.run(late.init(), E)
    model = serial(late.constants, in_flight, buffer, refill, weight)
    tree_close(late.deployed(progress), model, rtol=2e-5, atol=1e-6)


def serial(constants, in_flight, buffer, refill, weight):
    problem = constants.problem
    strategy = fedavg.build(fedavg.Hyper(weights="uniform"), problem)
    choose = choice.uniformly(lambda number: round_key(KEY, SELECT, number))
    train = jax.jit(
        lambda model, client, version: strategy.client_update(
            {"model": model}, None, constants.client(client), version, client_key(KEY, version, client, 0)
        )[0]["model"]
    )
    model, version, draws, busy, seen = strategy.init(jax.random.fold_in(KEY, INIT)).model, 0, 0, set(), set()
    queue, waiting, jobs = [], [], 0

    def choose_more(count):
        nonlocal draws
        blocked = np.zeros(len(SIZES), bool)
        blocked[list(busy | seen)] = True
        waiting.extend(map(int, choose(draws, blocked, count)))
        seen.update(waiting)
        draws += 1

    def start(now):
        nonlocal jobs
        client = waiting.pop(0)
        busy.add(client)
        trained = train(model, jnp.int32(client), jnp.int32(version))
        heapq.heappush(queue, (now + seconds(jobs, client), jobs, client, version, model, trained))
        jobs += 1

    total = in_flight + (buffer - 1 if refill == "arrival" else 0)
    while total > 0:
        choose_more(min(buffer, total))
        total -= buffer
    for _ in range(in_flight):
        start(0.0)
    for _ in range(E):
        arrived = []
        while len(arrived) < buffer:
            now, number, client, its_version, before, after = heapq.heappop(queue)
            busy.discard(client)
            arrived.append((number, version - its_version, before, after))
            if refill == "arrival" and len(arrived) < buffer:
                start(now)
        rows = []
        for _, tau, before, after in sorted(arrived, key=lambda each: each[0]):
            share = weight(jnp.array([tau]))[0]
            change = jax.tree.map(lambda a, b: a - b, after["params"], before["params"])
            moved = jax.tree.map(lambda now, d, share=share: now + share * d, model["params"], change)
            others = trees.interpolate(after["batch_stats"], model["batch_stats"], share)
            rows.append({"params": moved, "batch_stats": others})
        model = trees.mean(jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
        version += 1
        seen.clear()
        choose_more(buffer)
        for _ in range(1 if refill == "arrival" else buffer):
            start(now)
    return model


def test_calls_layouts_and_checkpoints_in_the_middle_of_waves_change_nothing():
    one = engine("scaffold", 5, 2, "arrival", weight=polynomial(0.5))
    whole, _ = one.run(one.init(), E)
    parts = one.init()
    for count in (1, 2, 3):
        parts = one.place(jax.device_get(parts))  # as a checkpoint does
        parts, _ = one.run(parts, count)
    tree_equal(whole, parts)
    other = engine("scaffold", 5, 2, "arrival", weight=polynomial(0.5), devices=2, lanes=2)
    laid_out, _ = other.run(other.place(one.init()), E)
    tree_close(jax.device_get(whole), jax.device_get(laid_out))


def test_fresh_uploads_count_and_old_ones_fade():
    tau = jnp.array([0, 1, 4, 5, 14])
    np.testing.assert_allclose(constant(tau), 1)
    np.testing.assert_allclose(polynomial(0.5)(tau), (1 + np.arange(15)[[0, 1, 4, 5, 14]]) ** -0.5, rtol=1e-6)
    np.testing.assert_allclose(hinge(10.0, 4.0)(tau), [1, 1, 1, 1 / 11, 1 / 101], rtol=1e-6)


def test_traffic_counts_starts_and_arrivals():
    """M + E K models are sent by the end of E versions, except those that start after the last one."""
    late = engine("fedavg", 6, 3, "update")
    _, report = late.run(late.init(), E)
    size = trees.num_bytes(late.constants.problem.model.shapes())
    down, up, _ = report.traffic.num_bytes()
    assert (down, up) == ((6 + E * 3) * size, E * 3 * size)
