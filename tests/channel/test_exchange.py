"""The exchange of layers among clients: every layer keeps its copies, and other links know of it."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel import channel, links
from fedjax_mr.channel.links import exchange
from fedjax_mr.engine.round import dispatch, receive
from fedjax_mr.errors import UserError
from fedjax_mr.secure import exchange as secure
from fedjax_mr.strategies import STRATEGIES, fedavg, fedcross, fedmr
from fedjax_mr.strategies.traffic import Parcels, Traffic
from fedjax_mr.testing.federations import first_cohort, random_like


def inner_strategy(name, problem, hyper=None):
    row = STRATEGIES[name]
    return row.build(hyper or (row.hyper() if row.hyper else None), problem)


@pytest.fixture
def problem(federation):
    """A federation whose network has BatchNorm."""
    return federation().problem


def rows_of_layers(models, problem):
    """Each layer's copies as rows of numbers: arrays [K, numbers]."""
    leaves = [np.asarray(leaf, np.float64).reshape(problem.cohort_size, -1) for leaf in jax.tree.leaves(models)]
    return [np.concatenate([leaves[leaf] for leaf in layer.leaves], axis=1) for layer in problem.layers]


def server_update(strategy, state, messages, cohort, round, key):
    """The server's part of a round: the clients' exchange, then the update."""
    state, uploads, exchanged, key = receive(strategy, state, messages, {}, cohort, round, key)
    state, info = strategy.server_update(state, uploads, cohort, round, key)
    return state, info | exchanged


@pytest.fixture(scope="module")
def crossing(federation):
    """FedCross without and with an exchange of layers; its programs, compiled once for all seeds."""
    problem = federation().problem
    crossed = inner_strategy("fedcross", problem, fedcross.Hyper(selection="in_order"))
    secure = channel(crossed, problem, [exchange(problem, when="both", share=0.9, repetitions=2)])
    compiled = lambda one: one._replace(
        init=jax.jit(one.init),
        dispatch=jax.jit(functools.partial(dispatch, one)),
        server_update=jax.jit(functools.partial(server_update, one)),
    )
    return compiled(crossed), compiled(secure)


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_around_fedcross_keeps_every_sum_and_whole_layers(problem, crossing, close, seed):
    crossed, secure = crossing
    state, key = crossed.init(jax.random.key(seed)), jax.random.key(100 + seed)
    state = state._replace(models=random_like(state.models, seed))
    sent = secure.dispatch(state, first_cohort(problem), key)["model"]
    for before, after in zip(rows_of_layers(state.models, problem), rows_of_layers(sent, problem), strict=True):
        assert sorted(map(tuple, before)) == sorted(map(tuple, after))
    arguments = {"model": sent}, first_cohort(problem), jnp.int32(seed), key
    ours, info = secure.server_update(state, *arguments)
    theirs, _ = crossed.server_update(state, *arguments)
    close(crossed.global_model(ours), crossed.global_model(theirs))  # mixing in order keeps the sums, too
    assert 0 <= float(info["layers_unmoved"]) <= 1 and 0 <= float(info["layers_held_by_others"]) <= 1


def test_an_exchange_by_hand(federation, monkeypatch):
    """Three clients. 0 and 1 swap the first of two layers. The second stays, though 0 has held that of 1."""
    owners = jnp.asarray([[1, 0, 2], [0, 1, 2]])
    held = jnp.zeros((2, 3, 3), bool).at[:, jnp.arange(3), jnp.arange(3)].set(True).at[1, 0, 1].set(True)
    drawn = []
    outcome = lambda key, **about: drawn.append(about) or secure.Outcome(owners, held, jnp.zeros(2, jnp.int32))
    monkeypatch.setattr(secure, "exchange", outcome)
    layers = tuple(SimpleNamespace(leaves=(leaf,)) for leaf in range(2))
    link = exchange(SimpleNamespace(cohort_size=3, layers=layers), share=0.3, repetitions=4)
    numbers = np.arange(6.0).reshape(3, 2)
    sent, info = link.exchange.mix({"model": {"a": numbers[:, 0], "b": numbers[:, 1]}, "n": 5}, jax.random.key(0))
    np.testing.assert_array_equal(sent["model"]["a"], [2, 0, 4])
    np.testing.assert_array_equal(sent["model"]["b"], [1, 3, 5])
    assert sent["n"] == 5 and drawn == [{"num_units": 2, "count": 3, "share": 0.3, "repetitions": 4}]
    np.testing.assert_allclose(info["layers_unmoved"], 4 / 6)
    np.testing.assert_allclose(info["layers_held_by_others"], 1 / 6)


@pytest.mark.slow
def test_equal_clients_exchange_and_average_to_the_same_model(engine, problem, close, sent):
    """And the traffic among clients comes beside what the inner strategy counts."""
    average = inner_strategy("fedavg", problem, fedavg.Hyper(weights="uniform"))
    counts = average._replace(traffic=lambda usual, state, uploads, cohort, round: Traffic(peer=(Parcels.of(1, 5),)))
    secure = channel(counts, problem, [exchange(problem, share=0.5, repetitions=3)])
    state, key = jax.jit(average.init)(jax.random.key(0)), jax.random.key(1)
    equal = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], 3, axis=0), state.model)
    arguments = {"model": random_like(equal)}, first_cohort(problem), jnp.int32(0), key
    update = lambda each: jax.jit(functools.partial(server_update, each))
    ours, theirs = (update(each)(state, *arguments)[0] for each in (secure, average))
    close(ours, theirs)
    peer = 3 * 3 * trees.num_bytes(state.model)  # half of the layers of 3 clients go and come, 3 times
    assert secure.traffic(Traffic(), state, *arguments[:3]).num_bytes() == (0, 0, peer + 5)


def test_what_holds_no_model_of_each_client_has_no_layers_to_exchange(federation, problem):
    for name in ("fccl", "hypcluster"):  # logits; k models for every client
        secure = channel(inner_strategy(name, problem), problem, [exchange(problem, when="both")])
        with pytest.raises(UserError, match=r"a model for each client.*this strategy sends"):
            jax.eval_shape(
                lambda key, secure=secure: dispatch(secure, secure.init(key), first_cohort(problem), key),
                jax.random.key(0),
            )
    with pytest.raises(UserError, match="whole models"):
        adapted = federation("adapted").problem  # FFA-LoRA sends one factor of each adapter
        half = channel(inner_strategy("ffalora", adapted), adapted, [exchange(adapted, when="before_training")])
        jax.eval_shape(lambda key: dispatch(half, half.init(key), first_cohort(adapted), key), jax.random.key(0))
    several = federation("thin,perceptron").problem
    with pytest.raises(UserError, match="different networks"):
        exchange(several)


# --- With other links -------------------------------------------------------------------------------------------------


def test_other_links_and_a_second_exchange_are_refused(problem):
    """In one channel or in two."""
    plain = fedmr.build(fedmr.Hyper(), problem)
    secure = channel(plain, problem, [exchange(problem)])
    for other, reason in (
        (links.compression(problem, "topk", ratio=0.1), "cannot compress"),
        (links.robust(problem, "median", outliers=1, stacked=True), "mixes the layers"),
        (links.attack(problem, "label_flip", attackers=0.2, seed=0), "which an attacker would forge"),
    ):
        with pytest.raises(UserError, match=reason):
            channel(plain, problem, [other, exchange(problem)])
        with pytest.raises(UserError, match=reason):
            channel(secure, problem, [other])
    ahead = [exchange(problem, when="before_training"), links.attack(problem, "ipm", attackers=0.2, seed=0)]
    assert channel(plain, problem, ahead).exchange.before_training
    with pytest.raises(UserError, match="increase repetitions"):
        channel(secure, problem, [exchange(problem)])
    with pytest.raises(UserError, match="at most one link of each kind"):
        channel(plain, problem, [exchange(problem), exchange(problem)])


def test_noise_and_an_exchange_go_together(federation):
    problem = federation("linear").problem
    noise = links.privacy(problem, clip=1.0, noise=1.0)
    both = channel(fedmr.build(fedmr.Hyper(), problem), problem, [noise, exchange(problem, share=0.5)])
    assert both.exchange is not None and both.exchange.before_upload
