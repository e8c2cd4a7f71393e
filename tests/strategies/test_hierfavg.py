"""HierFAVG against its equations, its special case, and the bytes of both levels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, hierfavg
from fedjax_mr.strategies.hierfavg import Hyper
from fedjax_mr.strategies.parts import Models
from fedjax_mr.testing.federations import first_cohort


def test_four_rounds_equal_the_equations(transcription):
    by_hand = transcription("hierfavg", Hyper(edges=2, period=2), cohort=3)
    edge_of, sizes = [0, 0, 1, 1], by_hand.sizes
    models = [by_hand.read(trees.take(by_hand.progress.server.models, edge)) for edge in range(2)]
    lonely = 0
    for round, clients in enumerate(by_hand.rounds(4)):
        trained = {i: by_hand.train(models[edge_of[i]], i) for i in clients}
        for edge in range(2):
            here = [i for i in clients if edge_of[i] == edge]
            lonely += len(here) < 2
            if here:
                models[edge] = by_hand.mean([trained[i] for i in here], by_hand.sizes_of(here))
        if round % 2 == 1:
            models = [by_hand.mean(models, [sizes[0] + sizes[1], sizes[2] + sizes[3]])] * 2
        for edge in range(2):
            by_hand.check(trees.take(by_hand.progress.server.models, edge), models[edge])
    assert lonely > 0


def test_the_server_with_one_edge_is_that_of_fedavg(federation, close, sent_after):
    """In a round of the edge and in one of the cloud."""
    problem = federation("normed").problem
    ours, average = hierfavg.build(Hyper(edges=1, period=2), problem), fedavg.build(fedavg.Hyper(), problem)
    close(sent_after(ours, problem), sent_after(average, problem))


@pytest.mark.slow  # quick: the server
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_one_edge_is_fedavg(engine, close, network):
    ours, average = engine("hierfavg", network, hyper=Hyper(edges=1)), engine("fedavg", network)
    (found, _), (expected, _) = ours.run(ours.init(), 3), average.run(average.init(), 3)
    close(trees.take(found.server.models, 0), expected.server.model)


def test_an_edge_without_clients_in_a_round_keeps_its_model(engine):
    one = engine("hierfavg", "linear", hyper=Hyper(edges=6, period=2))
    progress = one.init()
    before = jax.device_get(progress.server.models)
    progress, _ = one.run(progress, 1)
    after = jax.device_get(progress.server.models)
    changed = [
        any(np.any(a[i] != b[i]) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)) for i in range(6)
    ]
    assert sum(changed) == 3


def test_the_cloud_costs_two_models_per_edge_in_its_rounds(engine):
    one = engine("hierfavg", "linear", hyper=Hyper(edges=6, period=2))
    size = trees.num_bytes(one.constants.problem.model.shapes())
    progress, seen = one.init(), []
    for _ in range(4):
        progress, report = one.run(progress, 1)
        seen.append(report.traffic.num_bytes())
    edge = (3 * size, 3 * size)
    assert seen == [(*edge, 0), (*edge, 2 * 6 * size)] * 2


@pytest.mark.parametrize("cloud", ["recombine", "cross"])
def test_the_cloud_may_recombine_or_mix_and_keeps_the_mean(engine, cloud):
    one = engine("hierfavg", "linear", hyper=Hyper(edges=3, period=1, cloud=cloud, alpha=0.75), cohort=6)
    strategy, shapes = one.strategy, one.constants.problem.model.shapes()
    models = jax.tree.map(lambda leaf: np.stack([np.full(leaf.shape, n, np.float32) for n in (0, 3, 9)]), shapes)
    uploads = {"model": trees.take(models, np.array([0, 0, 1, 1, 2, 2]))}
    cohort = first_cohort(one.constants.problem)
    update = jax.jit(lambda round: strategy.server_update(Models(models), uploads, cohort, round, jax.random.key(1)))
    new, _ = update(jnp.int32(0))
    for leaf in jax.tree.leaves(jax.device_get(new.models)):
        rows = leaf.reshape(3, -1)
        np.testing.assert_allclose(rows.mean(axis=0), 4, rtol=1e-6)
        if cloud == "recombine":
            assert sorted(rows[:, 0]) == [0, 3, 9]
        else:
            np.testing.assert_allclose(rows[:, 0], [0.75 * 0 + 0.25 * 3, 0.75 * 3 + 0.25 * 9, 0.75 * 9], rtol=1e-6)


def test_more_edges_than_clients_are_refused(engine):
    with pytest.raises(UserError, match="7 edges, but 6 clients"):
        engine("hierfavg", "linear", hyper=Hyper(edges=7))
