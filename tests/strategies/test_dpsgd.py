"""D-PSGD against its equations in float64, its special cases, and what is sent."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from fedjax_mr import trees
from fedjax_mr.engine.clients import CLIENTS, ClientAxis
from fedjax_mr.strategies import dpsgd, fedavg
from fedjax_mr.strategies.dpsgd import Hyper
from fedjax_mr.strategies.graphs import graph_of
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models


def mixed(models, weights):
    """The models of all clients after an average with weights [N, N], in float64."""
    return [
        [sum(w * leaf for w, leaf in zip(row, leaves, strict=True)) for leaves in zip(*models, strict=True)]
        for row in weights
    ]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("one_peer", "train"),  # the graph turns
        ("one_peer", "mix"),
        *(pytest.param("ring", order, marks=pytest.mark.slow) for order in ("train", "mix")),
    ],
)
def test_three_rounds_equal_the_equations(transcription, name, order):
    hyper = Hyper(graph=name, order=order)
    by_hand = transcription("dpsgd", hyper, cohort=4)
    models = [by_hand.read(trees.take(by_hand.progress.server.models, i)) for i in range(4)]
    graph = graph_of(hyper, 4, 4)
    for round, _ in enumerate(by_hand.rounds(3)):
        weights = graph.weights[round % len(graph.weights)]
        trained = [by_hand.train(model, i) for i, model in enumerate(models)]
        if order == "train":
            models = mixed(trained, weights)
        else:
            changes = [[y - x for x, y in zip(*pair, strict=True)] for pair in zip(models, trained, strict=True)]
            averages = mixed(models, weights)
            models = [[x + d for x, d in zip(*pair, strict=True)] for pair in zip(averages, changes, strict=True)]
        for i, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.models, i), model)
        mean = by_hand.mean(models)
        apart = [sum(float(((a - b) ** 2).sum()) for a, b in zip(model, mean, strict=True)) for model in models]
        np.testing.assert_allclose(by_hand.report.info["consensus"], np.mean(apart) ** 0.5, rtol=1e-4, atol=1e-6)


def test_with_some_clients_only_these_average(transcription):
    by_hand = transcription("dpsgd", Hyper(graph="ring"), cohort=2)
    models = [by_hand.read(trees.take(by_hand.progress.server.models, i)) for i in range(4)]
    apart = 0
    for clients in by_hand.rounds(8):
        one, other = clients
        for i in clients:
            models[i] = by_hand.train(models[i], i)
        if (one - other) % 4 in (1, 3):  # neighbours: of three thirds, that of the absent neighbour stays at home
            weights = np.eye(4)
            weights[[one, other], [one, other]], weights[[one, other], [other, one]] = 2 / 3, 1 / 3
            models = mixed(models, weights)
        apart += (one - other) % 4 == 2
        for i, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.models, i), model)
    assert 0 < apart < 8  # both cases


@pytest.fixture
def late(tiny):
    """(problem, state, uploads, cohort) of a ring of clients 0..3 with models full of 0..3, of which client 1 is late.

    The uploads are full of 10..13.
    """
    filled = lambda numbers: jax.vmap(tiny.model)(jnp.stack([jnp.full((2, 2), number) for number in numbers]))
    state, uploads = Models(filled(range(4))), {"model": filled(range(10, 14))}
    cohort = Cohort(np.arange(4, dtype=np.int32), np.int32([3, 0, 3, 3]))
    return tiny.problem((3, 3, 3, 3), cohort=4), state, uploads, cohort


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("train", [(2 * 10 + 13) / 3, 1, (2 * 12 + 13) / 3, (10 + 12 + 13) / 3]),
        ("mix", [(0 + 0 + 3) / 3 + 10, 1, (2 + 2 + 3) / 3 + 10, (0 + 2 + 3) / 3 + 10]),
    ],
)
def test_a_late_client_keeps_its_model_and_its_neighbours_the_weight_of_it(tiny, late, order, expected):
    problem, state, uploads, cohort = late
    strategy = dpsgd.build(Hyper(order=order), problem)
    new, _ = jax.jit(strategy.server_update)(state, uploads, cohort, jnp.int32(0), jax.random.key(0))
    for client, number in enumerate(expected):
        np.testing.assert_allclose(tiny.head(trees.take(new.models, client)), number, rtol=1e-6)


def test_a_robust_rule_sees_the_models_of_the_neighbours_that_take_part(late):
    problem, state, uploads, cohort = late
    seen = []
    combine = lambda params, received: (seen.append(received), (jax.tree.map(lambda leaf: leaf + 1, params), {}))[1]
    new, _ = dpsgd.build(Hyper(), problem).neighbours(combine)(state, uploads, cohort, jnp.int32(0), None)
    senders = [set(np.asarray(seen[0].ids)[i][np.asarray(seen[0].shares)[i] > 0]) for i in range(4)]
    assert senders == [{3}, set(), {3}, {0, 2}]
    leaf = jax.tree.leaves(new.models)[0]
    np.testing.assert_array_equal(leaf[:, 0, 0], [11, 2, 13, 14])  # what the rule made of the trained models


def test_the_personal_model_of_a_client_is_its_own(tiny, late):
    problem, state, _, _ = late
    strategy = dpsgd.build(Hyper(), problem)
    own = strategy.personal_model(strategy.personal_part(state, 2), None, None, None)
    np.testing.assert_array_equal(tiny.head(own), 2)


def test_the_exchange_on_the_complete_graph_is_the_mean_of_fedavg(federation, close, sent_after):
    problem = federation("normed", cohort=6).problem
    ours, average = (
        each.build(hyper, problem)
        for each, hyper in ((dpsgd, Hyper(graph="complete")), (fedavg, fedavg.Hyper(weights="uniform")))
    )
    close(sent_after(ours, problem), sent_after(average, problem))


def test_both_orders_average_the_statistics(federation, close, sent_after):
    problem = federation("normed", cohort=6).problem
    sent = [
        sent_after(dpsgd.build(Hyper(graph="complete", order=order), problem), problem) for order in ("train", "mix")
    ]
    close(*(model["batch_stats"] for model in sent))


def test_the_mean_of_all_models_is_deployed(federation, close):
    problem = federation("normed", cohort=3).problem
    rng, shapes = np.random.default_rng(0), problem.model.shapes()
    models = jax.tree.map(lambda leaf: rng.random((6, *leaf.shape), np.float32), shapes)
    deployed = jax.jit(dpsgd.build(Hyper(), problem).global_model)(Models(models))
    close(deployed, jax.tree.map(lambda leaf: leaf.mean(axis=0), models))


@pytest.mark.slow  # quick: the exchange
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_on_the_complete_graph_it_is_fedavg_with_all_clients(engine, close, network):
    ours = engine("dpsgd", network, hyper=Hyper(graph="complete"), cohort=6)
    average = engine("fedavg", network, hyper=fedavg.Hyper(weights="uniform"), cohort=6)
    (found, report), (expected, _) = ours.run(ours.init(), 3), average.run(average.init(), 3)
    for client in range(6):
        close(trees.take(found.server.models, client), expected.server.model)
    assert float(report.info["consensus"]) < 1e-5
    close(ours.deployed(found), expected.server.model)


def test_every_client_sends_its_model_to_its_neighbours_that_take_part(engine):
    size = trees.num_bytes(engine("fedavg", "linear").constants.problem.model.shapes())
    everybody = engine("dpsgd", "linear", cohort=6)
    _, report = everybody.run(everybody.init(), 2)
    assert report.traffic.num_bytes() == (0, 0, 2 * 6 * 2 * size)
    some = engine("dpsgd", "linear", cohort=3)
    start, total = some.init(), 0
    for _ in range(4):
        before = jax.device_get(start.server.models)
        start, report = some.run(start, 1)
        after = jax.device_get(start.server.models)
        there = [
            any(np.any(a[i] != b[i]) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True))
            for i in range(6)
        ]
        edges = 2 * sum(a and b for a, b in zip(there, np.roll(there, 1), strict=True))
        assert sum(there) == 3 and report.traffic.num_bytes() == (0, 0, edges * size)
        total += edges
    assert total > 0


def test_the_exchange_on_two_devices_gathers_no_models():
    """The stack is divided over the parameters, so the exchange is local to a device, whatever the graph."""
    axis = ClientAxis(Mesh(np.array(jax.devices()[:2]), (CLIENTS,)), lanes=1, fused=True)
    graph = graph_of(Hyper(), 8, 8)

    def exchange(models):
        models = axis.by_parameters(models, rows=(8,))
        mixed = trees.mix(models, graph.map(jnp.int32(0), jnp.ones(8, bool)))
        return jax.lax.with_sharding_constraint(mixed, axis.sharded)

    models = {"w": jax.ShapeDtypeStruct((8, 64, 32), jnp.float32, sharding=axis.sharded)}
    text = jax.jit(exchange).lower(models).compile().as_text()
    assert re.search(r"f32\S* all-to-all", text)
    assert not re.search(r"f32\[[\d,]{6,}\]\S* (all-gather|all-reduce)", text)  # of models, not of their numbers
