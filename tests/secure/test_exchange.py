"""The exchange of layers among clients: properties in random federations, and the expected shares."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel import channel, links
from fedjax_mr.engine.round import dispatch
from fedjax_mr.errors import UserError
from fedjax_mr.secure.exchange import draw, exchange, expected_unmoved
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import Models
from fedjax_mr.testing.federations import simulator

UNITS = 4000  # many units are many independent trials
few = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
federations = st.fixed_dictionaries(
    {
        "count": st.sampled_from([1, 2, 5]),
        "share": st.sampled_from([0.0, 0.3, 1.0]),
        "repetitions": st.sampled_from([1, 3]),
    }
)


@functools.cache
def program(num_units, count, repetitions):
    return jax.jit(
        lambda key, share: exchange(key, num_units=num_units, count=count, share=share, repetitions=repetitions)
    )


def exchanged(seed, *, count, share, repetitions, num_units=3):
    outcome = program(num_units, count, repetitions)(jax.random.key(seed), share)
    return jax.tree.map(np.asarray, outcome)


@functools.cache
def one_step(num_units, count):
    return jax.jit(lambda key, share: draw(key, num_units=num_units, count=count, share=share))


def close_to(samples, expected):
    """Compare a mean with its expectation, within five standard errors of independent units."""
    per_unit = np.asarray(samples, np.float64)
    error = per_unit.std() / math.sqrt(len(per_unit))
    assert abs(per_unit.mean() - expected) <= 5 * error + 1e-6


@few
@hypothesis.given(federations, st.integers(0, 2**31 - 1))
def test_every_layers_copies_are_permuted_and_every_sum_stays(federation, seed):
    outcome = exchanged(seed, **federation)
    count, permutations = federation["count"], outcome.permutations
    np.testing.assert_array_equal(np.sort(permutations, axis=1), np.broadcast_to(np.arange(count), permutations.shape))
    if federation["share"] == 0 or count == 1:
        np.testing.assert_array_equal(permutations, np.broadcast_to(np.arange(count), permutations.shape))
        assert not outcome.sent.any()
    if federation["share"] == 1 and count > 1:
        assert (outcome.sent == count * federation["repetitions"]).all()

    rng = np.random.default_rng(seed)
    models = [rng.normal(size=(count, 2)) for _ in range(3)]
    new = trees.mix(models, outcome.permutations, units=((0,), (1,), (2,)))
    for before, after in zip(models, new, strict=True):
        np.testing.assert_allclose(before.sum(0), after.sum(0), atol=1e-9)
        np.testing.assert_allclose(((before - 0.3) ** 2).sum(), ((after - 0.3) ** 2).sum(), atol=1e-9)


@few
@hypothesis.given(federations, st.integers(0, 2**31 - 1))
def test_who_held_what(federation, seed):
    """A client held its own layers and its final ones. Without exchange, or alone, it held no others."""
    outcome = exchanged(seed, **federation)
    held, permutations = outcome.held, outcome.permutations
    clients = np.arange(federation["count"])
    assert held[:, clients, clients].all()
    for unit, owners in enumerate(permutations):
        assert held[unit, clients, owners].all()
    if federation["share"] == 0:
        assert held.sum() == held.shape[0] * federation["count"]


@few
@hypothesis.given(st.sampled_from([2, 5]), st.sampled_from([0.2, 0.6, 1.0]), st.integers(0, 2**31 - 1))
def test_what_comes_back_comes_out_of_the_holders_buffer(count, share, seed):
    """The new copy of client j was in the buffer of the client that received its old copy."""
    step = jax.tree.map(np.asarray, one_step(3, count)(jax.random.key(seed), share))
    np.testing.assert_array_equal(np.take_along_axis(step.holders, step.permutations, axis=1), step.holders)


def test_receivers_are_uniform_among_the_others_and_orders_among_those_who_met():
    step = one_step(UNITS, 3)(jax.random.key(1), 0.7)
    holders, permutations = np.asarray(step.holders), np.asarray(step.permutations)
    for client in range(3):
        close_to(holders[:, client] != client, 0.7)
        for other in {0, 1, 2} - {client}:
            close_to(holders[:, client] == other, 0.35)
    together = permutations[(holders[:, :1] == holders).all(axis=1)]  # all three copies in one buffer
    codes, counts = np.unique(together @ np.array([9, 3, 1]), return_counts=True)
    assert len(codes) == 6
    assert (abs(counts - len(together) / 6) <= 5 * np.sqrt(len(together) * 5 / 36)).all()


@pytest.mark.parametrize(
    "count, share, repetitions",
    [(10, 0.8, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0.5, 1), (5, 0.5, 1), (5, 1.0, 1)))],
)
def test_shares_are_the_derived_ones(count, share, repetitions):
    """The share of layers that are sent, and the share that is unmoved."""
    outcome = exchanged(7, num_units=UNITS, count=count, share=share, repetitions=repetitions)
    close_to(outcome.sent / (count * repetitions), share)
    unmoved = outcome.permutations == np.arange(count)
    close_to(unmoved.mean(axis=1), expected_unmoved(count, share=share, repetitions=repetitions))


def test_one_exchange_leaves_two_thirds_where_they_were():
    """With q = 1 - 1/K, the optimum, a share of 1 - (1 - 1/K)^K is unmoved."""
    for count in (2, 3, 5, 20):
        best = expected_unmoved(count, share=1 - 1 / count)
        assert best == pytest.approx(1 - (1 - 1 / count) ** count)
        assert best > 1 - 1 / math.e
        assert all(expected_unmoved(count, share=q) >= best - 1e-12 for q in np.linspace(0, 1, 21))
    assert expected_unmoved(5, share=0.5, repetitions=30) == pytest.approx(1 / 5, abs=1e-4)


# --- FedMR with secure recombination --------------------------------------------------------------------------------


FEDMR = fedmr.Hyper()


@functools.cache
def with_link(**link):
    """FedMR with an exchange of layers; one function for each link, so that equal simulators are shared."""
    return lambda hyper, problem: channel(fedmr.build(hyper, problem), problem, [links.exchange(problem, **link)])


def exchanging(network, *, hyper=FEDMR, cohort=3, devices=1, **link):
    """The rounds of FedMR whose clients exchange layers."""
    return simulator((with_link(**link), hyper), network, cohort=cohort, devices=devices, lanes=1, seed=0).rounds


def after(engine, count=2):
    return engine.run(engine.init(), count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", ["both", *(pytest.param(each, marks=pytest.mark.slow) for each in ("before_upload", "before_training"))]
)
def test_fedmr_that_only_exchanges_nothing_is_indep(engine, equal, when):
    silent = exchanging("linear", hyper=fedmr.Hyper(server_recombines=False), when=when, share=0.0)
    ours = after(silent)[0].server.models
    equal(ours, after(engine("indep", "linear"))[0].server.models)


def test_a_server_that_compares_finds_the_owners(engine):
    """A limitation of the exchange: a trained layer is still closest to the copy that its owner started from."""
    separate = engine("indep", "linear")  # row j starts from row j of the round before
    progress, _ = after(separate, 2)
    start, (layer,) = jax.device_get(progress.server.models), separate.constants.problem.layers
    trained = jax.device_get(separate.run(progress, 1)[0].server.models)
    rows = lambda models: np.concatenate(
        [np.asarray(leaf).reshape(3, -1) for leaf in map(jax.tree.leaves(models).__getitem__, layer.leaves)], axis=1
    )
    owners = np.array([2, 0, 1])  # after some exchange
    distances = ((rows(trained)[owners][:, None] - rows(start)[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), owners)


def test_the_deployed_model_never_sees_the_exchange(engine, close):
    """One round: a permutation of the uploaded layers preserves their mean."""
    plain, secure = engine("fedmr", "perceptron"), exchanging("perceptron")
    progress, report = after(secure, 1)
    close(secure.deployed(progress), plain.deployed(after(plain, 1)[0]))
    assert 0 <= float(report.info["layers_unmoved"]) <= 1
    assert 0 < float(report.info["layers_held_by_others"]) <= 1


def test_whole_layers_move_before_the_training():
    """The dispatched rows are those of the server, permuted layer by layer, with all tensors of a layer together."""
    independent = fedmr.Hyper(start="independent")
    secure = exchanging("perceptron", hyper=independent, when="before_training", share=0.8)
    problem, models = secure.constants.problem, secure.init().server.models
    strategy = secure.constants.strategy
    ids = jnp.arange(problem.cohort_size, dtype=jnp.int32)
    cohort = Cohort(ids, ids)  # FedMR sends row j to the j-th client of any cohort
    sent = jax.jit(lambda models, key: dispatch(strategy, Models(models), cohort, key)["model"])
    leaves = lambda tree: [np.asarray(leaf).reshape(problem.cohort_size, -1) for leaf in jax.tree.leaves(tree)]
    old, moved = leaves(models), 0
    for seed in range(5):
        new = leaves(sent(models, jax.random.key(seed)))
        for layer in problem.layers:
            rows = lambda tables, layer=layer: np.concatenate([tables[leaf] for leaf in layer.leaves], axis=1)
            matches = (rows(new)[:, None] == rows(old)[None]).all(axis=2)
            assert (matches.sum(0) >= 1).all()
            assert (matches.sum(1) >= 1).all()
            moved += int(not matches.diagonal().all())
    assert moved


@pytest.mark.slow
def test_layouts_and_calls_change_nothing_with_secure_recombination(equal, close):
    one = exchanging("perceptron")
    whole, _ = after(one, 3)
    parts, _ = one.run(after(one, 1)[0], 2)
    equal(whole, parts)
    close(whole, after(exchanging("perceptron", devices=2), 3)[0])


@pytest.mark.parametrize(
    "share, repetitions, factor",
    [(0.25, 4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.5, 1, 1), (0.0, 1, 0)))],
)
def test_traffic_among_clients_is_counted_apart(engine, sent, share, repetitions, factor):
    """The expected traffic is 2 q K S for each exchange."""
    down, up, _ = sent(engine("fedmr", "linear"))
    once = exchanging("linear", share=share, repetitions=repetitions)
    assert sent(once) == (down, up, factor * up)
    twice = exchanging("linear", when="both", share=share, repetitions=repetitions)
    assert sent(twice) == (down, up, 2 * factor * up)
    with pytest.raises(UserError, match="cohort= must be at least 2"):
        exchanging("linear", cohort=1)


def test_expected_traffic_is_the_mean_of_what_is_sent(sent):
    """Layers differ in size, but all are equally likely to be sent, so the mean is still 2 q K S."""
    secure = exchanging("perceptron", share=0.3, repetitions=2)
    problem = secure.constants.problem
    leaves = jax.tree.leaves(problem.model.shapes())
    sizes = np.array([trees.num_bytes([leaves[leaf] for leaf in layer.leaves]) for layer in problem.layers])
    keys = jax.random.split(jax.random.key(0), UNITS)
    setting = dict(num_units=len(sizes), count=problem.cohort_size, share=0.3, repetitions=2)
    moved = jax.jit(jax.vmap(lambda key: exchange(key, **setting).sent))(keys)
    close_to(2 * (np.asarray(moved) * sizes).sum(axis=1), sent(secure)[2])


def test_the_models_of_the_next_round_have_the_same_distribution_as_without_the_exchange():
    """A uniform permutation after any permutation is uniform."""
    keys = jax.random.split(jax.random.key(3), UNITS)
    models = {"leaf": jnp.arange(3.0)[:, None]}

    @jax.jit
    @jax.vmap
    def both(key):
        first, second = jax.random.split(key)
        outcome = exchange(first, num_units=1, count=3, share=0.5, repetitions=1)
        exchanged = trees.mix(models, outcome.permutations, units=((0,),))
        return fedmr.recombine(exchanged, ((0,),), second)["leaf"][:, 0]

    codes, counts = np.unique(np.asarray(both(keys)) @ np.array([9.0, 3.0, 1.0]), return_counts=True)
    assert len(codes) == 6
    assert (abs(counts - UNITS / 6) <= 5 * np.sqrt(UNITS * 5 / 36)).all()
