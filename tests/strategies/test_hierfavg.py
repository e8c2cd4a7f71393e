"""HierFAVG against its equations, its special case, and the bytes of both levels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, fedcross, fedmr, hierfavg
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


def test_the_cloud_takes_turns_in_its_own_rounds(tiny):
    """Its third round is the sixth of the edges, and it mixes each model with the next one again, as in its first."""
    problem = tiny.problem((3,) * 6, cohort=6)
    strategy = hierfavg.build(Hyper(edges=3, period=2, cloud="cross", alpha=0.75), problem)
    filled = lambda numbers: jax.vmap(tiny.model)(jnp.stack([jnp.full((2, 2), number) for number in numbers]))
    state, uploads = Models(filled([0.0] * 3)), {"model": filled([0.0, 0.0, 3.0, 3.0, 9.0, 9.0])}
    update = jax.jit(lambda round: strategy.server_update(state, uploads, first_cohort(problem), round, None)[0])
    for round, others in ((1, (3, 9, 0)), (3, (9, 0, 3)), (5, (3, 9, 0))):
        models = update(jnp.int32(round)).models
        for edge, (own, other) in enumerate(zip((0, 3, 9), others, strict=True)):
            np.testing.assert_allclose(tiny.head(trees.take(models, edge)), 0.75 * own + 0.25 * other, rtol=1e-6)


@pytest.mark.parametrize("edge", ["recombine", "cross"])
def test_an_edge_may_recombine_or_mix_among_its_own_clients(engine, edge):
    """Models 0, 1, 2 belong to the first edge, the others to the second. The third round is the cloud's."""
    hyper = Hyper(edges=2, period=3, edge=edge, cloud="recombine", alpha=0.75)
    one = engine("hierfavg", "linear", hyper=hyper, cohort=6)
    strategy, problem = one.strategy, one.constants.problem
    numbers = np.array([0, 3, 9, 100, 103, 109], np.float32)
    models = jax.tree.map(
        lambda leaf: np.broadcast_to(numbers.reshape(-1, *[1] * len(leaf.shape)), (6, *leaf.shape)),
        problem.model.shapes(),
    )
    update = jax.jit(strategy.server_update)
    new, _ = update(Models(models), {"model": models}, first_cohort(problem), jnp.int32(0), jax.random.key(1))
    for leaf in jax.tree.leaves(jax.device_get(new.models)):
        rows = leaf.reshape(6, -1)[:, 0]
        if edge == "recombine":
            assert sorted(rows[:3]) == [0, 3, 9] and sorted(rows[3:]) == [100, 103, 109]
        else:
            here = [0.75 * 0 + 0.25 * 3, 0.75 * 3 + 0.25 * 9, 0.75 * 9 + 0.25 * 0]
            np.testing.assert_allclose(rows, [*here, *(100 + each for each in here)], rtol=1e-6)
    new, _ = update(Models(models), {"model": models}, first_cohort(problem), jnp.int32(2), jax.random.key(1))
    leaves = [leaf.reshape(6, -1)[:3, 0] for leaf in jax.tree.leaves(jax.device_get(new.models))]
    assert any(leaf.max() >= 100 for leaf in leaves)  # from the other edge


@pytest.mark.parametrize("edge", ["recombine", "cross"])
def test_one_edge_that_keeps_its_models_is_fedmr_or_fedcross(federation, close, sent_after, edge):
    """With the same random numbers: each edge has a key of its own."""
    problem = federation("normed").problem
    ours = hierfavg.build(Hyper(edges=1, period=1000, edge=edge, alpha=0.75), problem)
    if edge == "cross":
        other = fedcross.build(fedcross.Hyper(alpha=0.75, selection="in_order"), problem)
        close(sent_after(ours, problem), sent_after(other, problem))
    else:
        of_edge = lambda key: jax.random.split(jax.random.fold_in(key, 1), 1)[0]
        other = fedmr.build(fedmr.Hyper(), problem)
        keyed = other._replace(server_update=lambda *args: other.server_update(*args[:-1], of_edge(args[-1])))
        close(sent_after(ours, problem), sent_after(keyed, problem))


def test_an_edge_that_keeps_models_selects_as_many_clients_as_the_others(engine):
    one = engine("hierfavg", "linear", hyper=Hyper(edges=2, edge="recombine"), cohort=4)
    select, seen = jax.jit(one.strategy.select), set()
    for round in range(20):
        cohort = select(one.init().server, jnp.int32(round), jax.random.key(round))
        ids = np.asarray(cohort.ids)
        assert len(set(ids)) == 4 and all(ids[:2] < 3) and all(ids[2:] >= 3)
        np.testing.assert_array_equal(cohort.sizes, np.asarray(one.constants.problem.sizes)[ids])
        seen.add(tuple(ids))
    assert len(seen) > 10
    _, report = one.run(one.init(), 2)
    size = trees.num_bytes(one.constants.problem.model.shapes())
    assert report.traffic.num_bytes() == (8 * size, 8 * size, 2 * 4 * size)  # the second round is the cloud's


def test_edges_without_clients_are_refused(engine):
    with pytest.raises(UserError, match="7 edges, but 6 clients"):
        engine("hierfavg", "linear", hyper=Hyper(edges=7))
    with pytest.raises(UserError, match="5 of 6 clients cannot be divided equally among 2 edges"):
        engine("hierfavg", "linear", hyper=Hyper(edges=2, edge="cross"), cohort=5)
