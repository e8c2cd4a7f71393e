"""Synchronous rounds with a deadline and with more clients than needed, against hand computations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.clock import Cohorts, simulate, synchronous, with_late_clients
from fedjax_mr.clock.deadline import asked
from fedjax_mr.clock.fleet import Seconds
from fedjax_mr.engine.round import SELECT, client_key, round_key
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES, Cohort, fedavg, fedexp, fedswa, flatness, on_any_network
from fedjax_mr.strategies.parts import select_uniformly
from fedjax_mr.testing.federations import (
    default_hyper,
    make_engine,
    random_like,
    simulator,
    tree_close,
    tree_equal,
)

SIZES = (7, 12, 1, 5, 9, 4)
FEDERATION = {"network": "normed", "sizes": SIZES, "cohort": 3, "devices": 1, "lanes": 1}
E, K = 3, 3
KEY = jax.random.key(0)
QUICK = ("fedmr", "clusamp", "heterofl")
IMPOSSIBLE = {
    "centralized", "adaptivefl", "clusamp", "heterofl", "hypcluster", "ifca", "fedme", "pfedhr", "fedmerge",
    "pfedbayes", "fedmd", "fedgh", "fedproto", "fedtgp", "fedkemf", "fccl", "local", "gitfl",
    "dpsgd", "gossipmr", "kgt",
}  # fmt: skip


def test_rounds_by_hand():
    clients = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    compute = np.array([[1.0, 2.0, 4.0, 8.0], [3.0, 3.0, 9.0, 9.0]])
    seconds = Seconds(np.ones((2, 4)), compute, np.ones((2, 4)))  # totals 3, 4, 6, 10 and 5, 5, 11, 11
    work = lambda events: events.cohorts.work.tolist()

    all_wait = synchronous(clients, seconds, cohort=4)
    assert all_wait.times.tolist() == [10, 21] and work(all_wait) == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert all_wait.jobs["used"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert all_wait.jobs["arrival"].tolist() == [3, 4, 6, 10, 15, 15, 21, 21]

    dropped = synchronous(clients, seconds, cohort=4, deadline=6)
    assert dropped.times.tolist() == [6, 12] and work(dropped) == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert dropped.jobs["used"].tolist() == [1, 1, 1, 0, 2, 2, 0, 0]

    first = synchronous(clients, seconds, cohort=2, deadline=6)  # the deadline comes after the second upload
    assert first.times.tolist() == [4, 9] and work(first) == [[1, 1, 0, 0], [1, 1, 0, 0]]

    # By second 6, 4 of 8 seconds of training leave time for the transfers: half of 10 steps; 4 of 9 s: 4 of 10 steps.
    partial = synchronous(clients, seconds, cohort=4, steps=np.full((2, 4), 10), deadline=6)
    assert partial.times.tolist() == [6, 12]
    np.testing.assert_allclose(work(partial), [[1, 1, 1, 0.5], [1, 1, 0.4, 0.4]])

    nothing = synchronous(clients, seconds, cohort=4, steps=np.full((2, 4), 1), deadline=3.5)
    assert work(nothing) == [[1, 0, 0, 0], [0, 0, 0, 0]] and nothing.times.tolist() == [3.5, 7]
    with pytest.raises(UserError, match=r"deadline=2 is met by no client in any round: the fastest takes 3 s"):
        synchronous(clients, seconds, cohort=4, deadline=2)
    assert [asked(10, each) for each in (1.0, 1.1, 1.3, 1.25)] == [10, 11, 13, 13]


def test_without_a_deadline_it_is_the_schedule_of_as_many_jobs_as_arrivals():
    totals = np.random.default_rng(0).exponential(size=(E, K))
    clients = np.array([[0, 1, 2], [2, 3, 4], [5, 0, 1]])
    expected = simulate(
        E, num_clients=6, in_flight=K, cohort=K, refill="update",
        choose=lambda number, busy, count, history: clients[min(number, E - 1)],
        duration=lambda job, client: totals.reshape(-1)[job] if job < totals.size else 1.0,
    )  # fmt: skip
    found = synchronous(clients, Seconds(totals * 0, totals, totals * 0), cohort=K)
    np.testing.assert_array_equal(found.times, expected.times)
    np.testing.assert_array_equal(found.jobs, expected.jobs[: E * K])


@functools.cache
def clients():
    problem = make_engine("fedavg", **FEDERATION).constants.problem
    select = jax.jit(lambda number: select_uniformly(problem, round_key(KEY, SELECT, number)).ids)
    return np.array([select(number) for number in range(E)], np.int32)


def engine(strategy, work, *, hyper=None, **options):
    row, hyper = STRATEGIES[strategy], default_hyper(strategy) if hyper is None else hyper
    cohorts = Cohorts(clients(), np.asarray(work, np.float32))

    def build(hyper, problem):
        return with_late_clients(row.build(hyper, problem), problem, cohorts)

    return simulator((build, hyper), **FEDERATION | options).rounds


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in on_any_network()],
)
def test_if_all_are_in_time_it_is_the_plain_method_bit_for_bit(strategy):
    if strategy in IMPOSSIBLE:
        with pytest.raises(UserError, match=r"leave out deadline= and over_select="):
            engine(strategy, np.ones((E, K)))
        return
    plain, timed = make_engine(strategy, **FEDERATION), engine(strategy, np.ones((E, K)))
    expected, plain_report = plain.run(plain.init(), E)
    progress, report = timed.run(timed.init(), E)
    tree_equal((progress.server, progress.memory), (expected.server, expected.memory))
    assert report.traffic.num_bytes() == plain_report.traffic.num_bytes()
    assert report.info.pop("late") == 0
    tree_equal(report.info, plain_report.info)


def alone(rounds, strategy, state):
    """The upload of one client of the first round, trained by itself: a function of its row and its share of work."""
    inner = strategy.build(default_hyper("fedavg"), rounds.constants.problem)

    @jax.jit
    def train(data, key):
        return inner.client_update({"model": state.model}, None, data, jnp.int32(0), key)

    def trained(row, work):
        client = clients()[0, row]
        return train(rounds.constants.client(client)._replace(work=np.float32(work)), client_key(KEY, 0, client, 0))

    return trained


@pytest.mark.parametrize("weights", ["uniform", pytest.param("samples", marks=pytest.mark.slow)])
def test_a_mean_is_over_those_in_time_and_the_steps_done_count(weights):
    late = engine("fedavg", [[1, 0, 0.5]] + [[0, 0, 0]] * 2, hyper=fedavg.Hyper(weights=weights))
    start = jax.device_get(late.init().server)
    progress, report = late.run(late.init(), 1)
    trained = alone(late, fedavg, start)
    (whole, _, _), (half, _, metrics) = jax.device_get((trained(0, 1.0), trained(2, 0.5)))
    sizes = [SIZES[clients()[0, row]] for row in (0, 2)] if weights == "samples" else [1, 1]
    expected = jax.tree.map(lambda a, b: (sizes[0] * a + sizes[1] * b) / sum(sizes), whole["model"], half["model"])
    tree_close(progress.server.model, expected, rtol=1e-5, atol=1e-6)
    assert int(metrics.steps) == round(0.5 * 2 * -(-SIZES[clients()[0, 2]] // 4))
    one = trees.num_bytes(late.constants.problem.model.shapes())
    assert report.traffic.num_bytes()[:2] == (3 * one, 2 * one)
    assert report.info["late"] == 1
    before = jax.device_get(progress.server)
    after, report = late.run(progress, 2)  # all uploads are late
    tree_equal(after.server, before)
    assert report.info["late"] == 3 and report.traffic.num_bytes()[1] == 0


@pytest.mark.parametrize(
    "strategy, hyper", [("fedexp", fedexp.Hyper(0.0, weights="uniform")), ("fedgen", None), ("hetlora", None)]
)
def test_a_late_client_does_not_change_a_server_that_takes_no_plain_mean(strategy, hyper):
    """The server's update with three clients, the last one late, is that with the first two alone."""
    rounds = make_engine(strategy, hyper=hyper, **FEDERATION)
    problem, state = rounds.constants.problem, jax.device_get(rounds.init().server)
    models = random_like(jax.tree.map(lambda leaf: np.stack([leaf, leaf]), state.model))
    late = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf.mean(axis=0, keepdims=True)]), models)

    def update(models, ids, sizes):
        own = dataclasses.replace(problem, cohort_size=len(ids))
        server = STRATEGIES[strategy].build(default_hyper(strategy) if hyper is None else hyper, own).server_update
        cohort = Cohort(jnp.asarray(ids), jnp.asarray(sizes))
        return jax.jit(server)(state, {"model": models}, cohort, jnp.int32(1), KEY)

    tree_close(update(late, [0, 1, 4], [7, 12, 0]), update(models, [0, 1], [7, 12]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, hyper, gradients",
    [
        ("fedmoswa", fedswa.MomentumHyper(rho=1.0), lambda progress: progress.memory),
        ("mofedsam", flatness.MoFedSAM(rho=0.0, beta=1.0), lambda progress: progress.server.gradient),
    ],
)
def test_a_change_is_divided_by_the_steps_done(strategy, hyper, gradients):
    """In the first round these are the gradients of SCAFFOLD's clients, and their mean."""
    work = [[1, 0.5, 0.25]] + [[1, 1, 1]] * 2
    late, scaffold = engine(strategy, work, hyper=hyper), engine("scaffold", work)
    own, controls = gradients(late.run(late.init(), 1)[0]), scaffold.run(scaffold.init(), 1)[0].memory
    if strategy == "mofedsam":
        first = clients()[0]
        weights = np.array(SIZES, np.float32)[first]
        controls = jax.tree.map(lambda leaf: np.average(np.asarray(leaf)[first], axis=0, weights=weights), controls)
    tree_close(own, controls, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_late_model_stays_as_it_was_sent():
    late = engine("indep", [[1, 0, 1]] * E)
    start = jax.device_get(late.init().server.models)
    progress, _ = late.run(late.init(), E)
    same = jax.tree.map(
        lambda now, before: jnp.all(now == before, axis=range(1, now.ndim)), progress.server.models, start
    )
    assert jnp.array(jax.tree.leaves(same)).all(axis=0).tolist() == [False, True, False]


@pytest.mark.slow
def test_late_clients_change_neither_their_memory_nor_the_control_of_scaffold():
    """The server's control variate is the mean of the clients', as without late clients."""
    late = engine("scaffold", [[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    progress, _ = late.run(late.init(), E)
    tree_close(progress.server.control, jax.tree.map(functools.partial(jnp.mean, axis=0), progress.memory), atol=1e-6)
    never = sorted(set(range(6)) - set(clients()[np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]]) > 0]))
    assert all(not np.any(leaf[np.array(never)]) for leaf in jax.tree.leaves(progress.memory))
