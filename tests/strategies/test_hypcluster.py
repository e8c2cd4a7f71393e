"""HypCluster: choice, averages within clusters, both starts, and its special case."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.strategies import hypcluster
from fedjax_mr.strategies.hypcluster import Hyper
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models


def one_round(by_hand, models, clients):
    """The models after a round of these clients, by the equations; check what is reported of it."""
    losses = [[float(by_hand.cross_entropy(model, client)) for model in models] for client in clients]
    chosen, sizes = np.argmin(losses, axis=1), np.array(by_hand.sizes_of(clients))
    trained = [by_hand.train(models[number], client) for client, number in zip(clients, chosen, strict=True)]
    for number in range(len(models)):
        members = np.flatnonzero(chosen == number)
        assert float(by_hand.report.info[f"clients_of_cluster_{number}"]) == len(members)
        if len(members):
            models[number] = by_hand.mean([trained[row] for row in members], sizes[members])
    return models


@pytest.mark.slow
def test_three_rounds_equal_the_equations(transcription):
    by_hand = transcription("hypcluster", Hyper(clusters=3))
    models = [by_hand.read(trees.take(by_hand.progress.server.models, number)) for number in range(3)]
    for clients in by_hand.rounds(3):
        models = one_round(by_hand, models, clients)
        for number, model in enumerate(models):  # including models that no client selected
            by_hand.check(trees.take(by_hand.progress.server.models, number), model)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_one_cluster_is_fedavg(engine, close, network):
    one, average = engine("hypcluster", network, hyper=Hyper(clusters=1)), engine("fedavg", network)
    progress, expected = one.init(), average.init()
    same = Models(jax.tree.map(lambda leaf: np.asarray(leaf)[None], expected.server.model))
    progress, _ = one.run(one.place(progress._replace(server=same)), 3)
    expected, _ = average.run(expected, 3)
    close(trees.take(progress.server.models, 0), expected.server.model)


@pytest.fixture
def problem(federation):
    return federation("linear").problem


def tagged(problem, numbers):
    """Stacked models full of these numbers."""
    shapes = problem.model.shapes()
    return jax.tree.map(lambda leaf: np.stack([np.full(leaf.shape, n, np.float32) for n in numbers]), shapes)


def test_a_cluster_that_nobody_chose_stays_and_the_mean_is_weighted_by_samples(problem, equal):
    strategy = hypcluster.build(Hyper(clusters=3), problem)
    uploads = {"model": tagged(problem, [1, 4, 9]), "cluster": jnp.array([2, 2, 0], jnp.int32)}
    cohort = Cohort(jnp.arange(3, dtype=jnp.int32), jnp.array([1, 2, 5], jnp.int32))
    update = jax.jit(lambda state, uploads: strategy.server_update(state, uploads, cohort, 0, None))
    state, metrics = update(Models(tagged(problem, [10, 20, 30])), uploads)
    equal(state.models, tagged(problem, [9, 20, 3]))
    assert {name: float(value) for name, value in metrics.items()} == {
        "clients_of_cluster_0": 1,
        "clients_of_cluster_1": 0,
        "clients_of_cluster_2": 2,
    }


@pytest.mark.slow
def test_equal_losses_are_decided_for_the_lowest_number(engine, equal):
    one = engine("hypcluster", "linear", hyper=Hyper(clusters=2))
    progress = one.init()
    same = trees.take(progress.server.models, jnp.array([1, 1]))
    before = jax.tree.map(np.array, same)
    progress, report = one.run(one.place(progress._replace(server=Models(same))), 1)
    assert float(report.info["clients_of_cluster_0"]) == 3 and float(report.info["clients_of_cluster_1"]) == 0
    equal(trees.take(progress.server.models, 1), trees.take(before, 1))


@pytest.mark.slow
def test_farthest_first_opens_one_cluster_in_each_of_the_first_rounds(transcription):
    """Each is the model, trained from the common start, of the client that the clusters so far serve worst."""
    by_hand = transcription("hypcluster", Hyper(clusters=2, start="farthest"))
    start = by_hand.read(trees.take(by_hand.progress.server.models, 0))
    by_hand.check(trees.take(by_hand.progress.server.models, 1), start)
    opened = []
    for clients in by_hand.rounds(2):
        losses = [min([float(by_hand.cross_entropy(model, i)) for model in opened], default=0.0) for i in clients]
        opened.append(by_hand.train(start, clients[int(np.argmax(losses))]))
        for number, model in enumerate([*opened, start][:2]):
            by_hand.check(trees.take(by_hand.progress.server.models, number), model)
    for clients in by_hand.rounds(1):  # from here on, each trains the one that fits
        opened = one_round(by_hand, opened, clients)
        for number, model in enumerate(opened):
            by_hand.check(trees.take(by_hand.progress.server.models, number), model)


def test_farthest_first_sends_a_finite_loss_in_the_first_round(federation, monkeypatch):
    """No cluster exists yet. Links add up and clip what clients send, and a server of real clients refuses infinity."""
    problem, one = federation("linear").problem, np.float32(1)
    monkeypatch.setattr(local, "score", lambda model, number, data, batch_size: local.Score(one, number, one))
    monkeypatch.setattr(local, "train", lambda model, setting, variables, data, key: (variables, None))
    strategy = hypcluster.build(Hyper(clusters=3, start="farthest"), problem)
    payload = {"models": np.array([5, 4, 3], np.float32)}
    with jax.disable_jit():
        sent = [strategy.client_update(payload, None, None, jnp.int32(round), None)[0] for round in range(4)]
    assert [float(each["loss"]) for each in sent] == [0, 5, 4, 3]  # the best of the clusters that exist
    assert [int(each["cluster"]) for each in sent] == [0, 1, 2, 2]


def test_farthest_first_opens_a_cluster_with_the_worst_served_client(problem):
    """While fewer than k rounds are completed. Then clusters are means, weighted by samples."""
    strategy = hypcluster.build(Hyper(clusters=2, start="farthest"), problem)
    state = Models({"w": jnp.array([10.0, 20.0])})
    cohort = Cohort(np.arange(3), jnp.array([1, 2, 5]))
    uploads = {
        "model": {"w": jnp.array([1.0, 4.0, 9.0])},
        "cluster": jnp.array([1, 1, 1]),
        "loss": jnp.array([2, 3, 1]),
    }
    expected = {1: 4.0, 2: (1 + 8 + 45) / 8}
    for round, mean in expected.items():
        new, _ = strategy.server_update(state, uploads, cohort, round, None)
        assert new.models["w"].tolist() == pytest.approx([10, mean])


def test_models_start_independently_or_with_farthest_first_as_copies(problem):
    drawing = dataclasses.replace(problem, model=SimpleNamespace(init=lambda key: {"w": jax.random.uniform(key)}))
    starts = [hypcluster.build(Hyper(clusters=3, start=start), drawing).init for start in ("random", "farthest")]
    for init, different in zip(starts, (3, 1), strict=True):
        values = np.concatenate([init(jax.random.key(seed)).models["w"] for seed in (0, 1)])
        assert len(values) == 6 and len(np.unique(values)) == 2 * different


def test_a_client_trains_the_model_of_the_lowest_mean_loss(problem, monkeypatch):
    """The spy's losses are sums over ten samples: 3, 1 and 2 for the three models."""
    monkeypatch.setattr(
        local, "score", lambda model, number, data, batch_size: local.Score(number, number, jnp.float32(10))
    )
    monkeypatch.setattr(local, "train", lambda model, setting, variables, *own: (variables + 0.5, own))
    strategy = hypcluster.build(Hyper(clusters=3), problem)
    with jax.disable_jit():
        payload = {"models": np.array([3, 1, 2], np.float32)}
        upload, memory, own = strategy.client_update(payload, "memory", "data", 0, "key")
        assert (memory, own) == ("memory", ("data", "key"))
        assert (float(upload["model"]), int(upload["cluster"])) == (1.5, 1)
        assert float(strategy.personal_model(Models(np.array([3, 2, 1], np.float32)), None, None, None)) == 1


def test_a_clients_own_model_is_the_one_that_fits_its_training_samples_best(transcription):
    by_hand = transcription("hypcluster", Hyper(clusters=3))
    models = [by_hand.read(trees.take(by_hand.progress.server.models, number)) for number in range(3)]
    _, problem, federation, key, _ = by_hand.engine.constants
    personal = jax.jit(lambda server, data: by_hand.engine.strategy.personal_model(server, None, data, key))
    for client in range(problem.num_clients):
        best = np.argmin([float(by_hand.cross_entropy(model, client)) for model in models])
        offset, size = jnp.asarray(federation.offsets)[client], problem.sizes[client]
        data = ClientData(federation.samples, federation.index, offset, size, jnp.int32(client))
        by_hand.check(personal(by_hand.progress.server, data), models[best])
