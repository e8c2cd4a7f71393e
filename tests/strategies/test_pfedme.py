"""pFedMe against its equations, and its limits."""

import dataclasses

import jax
import numpy as np
import pytest
from absl import logging

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import pfedme
from fedjax_mr.strategies.parts import GlobalModel, LastModel
from fedjax_mr.strategies.pfedme import Hyper

SETTING = Hyper(strength=4.0, inner_steps=3, eta=0.05, personal_lr=0.1, beta=0.5)


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize("evaluate", ["theta", pytest.param("w_local", marks=pytest.mark.slow)])
def test_three_rounds_equal_the_equations(transcription, evaluate):
    strength, steps, eta, lr, beta = (
        getattr(SETTING, name) for name in ("strength", "inner_steps", "eta", "personal_lr", "beta")
    )
    by_hand = transcription("pfedme", dataclasses.replace(SETTING, evaluate=evaluate))
    personal = jax.jit(lambda server, memory: by_hand.engine.strategy.personal_model(server, memory, None, None))
    model, kept = by_hand.read(by_hand.progress.server.model), {}

    def train(start, client):
        theta, w = start, start
        for _ in range(by_hand.settings["epochs"]):  # one mini-batch each
            for _ in range(steps):
                slope = by_hand.gradient(lambda weights: by_hand.cross_entropy(weights, client), theta)
                theta = [t - lr * (g + strength * (t - a)) for t, g, a in zip(theta, slope, w, strict=True)]
            w = [a - eta * strength * (a - t) for a, t in zip(w, theta, strict=True)]
        return theta, w

    for clients in by_hand.rounds(3):
        trained = {client: train(model, client) for client in clients}
        kept |= {client: theta if evaluate == "theta" else w for client, (theta, w) in trained.items()}
        mean = by_hand.mean([trained[client][1] for client in clients], by_hand.sizes_of(clients))
        model = [(1 - beta) * old + beta * new for old, new in zip(model, mean, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)
        for client in range(4):  # those that have not yet trained are tested with the global model
            memory = trees.take(by_hand.progress.memory, client)
            by_hand.check(personal(by_hand.progress.server, memory), kept.get(client, model))


def test_theta_takes_its_steps_on_the_loss_and_the_pull_and_then_w_moves_once_towards_theta():
    """f = theta^2 / 2, lambda 2, step 0.1: from 10, theta is 10 - 0.1 (10 + 0) = 9, then 9 - 0.1 (9 - 2) = 8.3."""
    keys = []

    def loss(params, state, batch, key):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return params["w"] ** 2 / 2, state

    step = pfedme.local_round(loss, strength=2.0, steps=2, eta=0.25, personal_lr=0.1)
    with jax.disable_jit():
        carry, value = step.step(step.init({"params": {"w": np.float32(10)}}), None, jax.random.key(5))
    theta, w = step.result(carry)
    assert float(theta["params"]["w"]) == pytest.approx(8.3)
    assert float(w["params"]["w"]) == pytest.approx(10 - 0.25 * 2 * (10 - 8.3))
    assert float(value) == pytest.approx(9**2 / 2)  # of theta, before its last step
    own = [jax.random.fold_in(jax.random.key(5), number) for number in (0, 1)]  # each step has its own dropout
    assert keys == [tuple(jax.random.key_data(key).tolist()) for key in own]


def test_w_is_sent_and_the_chosen_model_is_tested(tokens, monkeypatch):
    federation, point = tokens([[0, 1], [1]]), tokens.point
    monkeypatch.setattr(local, "run", lambda step, setting, start, data, key: ((point(7), point(8)), start))
    for evaluate, tested in (("theta", 7), ("w_local", 8), ("global", 2)):
        strategy = pfedme.build(Hyper(evaluate=evaluate), federation.problem)
        upload, memory, start = strategy.client_update({"model": point(2)}, None, federation.client(0), 0, None)
        assert upload == {"model": point(8)} and start == point(2)  # theta starts at the received model
        assert strategy.personal_model(GlobalModel(point(2)), memory, None, None) == point(tested)
        fresh = LastModel(point(0), np.bool_(False))
        assert strategy.personal_model(GlobalModel(point(2)), fresh, None, None) == point(2)


def test_the_server_moves_by_beta_towards_the_mean_by_samples(tokens):
    """Clients with 3 and 1 samples send 10 and 2, so the mean is 8; from 4, beta = 1.5 gives 4 + 1.5 x 4 = 10."""
    federation = tokens([[0, 1, 1], [1]])
    strategy = pfedme.build(Hyper(beta=1.5), federation.problem)
    uploads = {"model": {"params": {"w": np.array([10, 2], np.float32)}}}
    state, _ = strategy.server_update(GlobalModel(tokens.point(4)), uploads, federation.cohort, 0, None)
    assert float(state.model["params"]["w"]) == pytest.approx(10)


def test_the_two_learning_rates_are_not_mixed_up(tokens, monkeypatch):
    federation, seen = tokens([[0, 1], [1]], lr=0.5), []
    monkeypatch.setattr(pfedme, "local_round", lambda loss, **numbers: seen.append(numbers))
    monkeypatch.setattr(local, "run", lambda step, setting, start, data, key: ((start, start), None))
    for hyper in (Hyper(eta=0.01, strength=2.0), Hyper(personal_lr=0.02, inner_steps=3, strength=2.0)):
        pfedme.build(hyper, federation.problem).client_update({"model": tokens.point(2)}, None, None, 0, None)
    assert seen[0] == {"strength": 2.0, "steps": 5, "eta": 0.01, "personal_lr": 0.5}
    assert seen[1] == {"strength": 2.0, "steps": 3, "eta": 0.5, "personal_lr": 0.02}


def own_models(engine, **hyper):
    """The clients' own models and the global one after a round of everybody, and where they started."""
    one = engine("pfedme", "linear", hyper=Hyper(**hyper), cohort=6)
    start = jax.tree.map(np.array, one.init().server.model)
    progress, _ = one.run(one.init(), 1)
    return progress.memory.model, progress.server.model, start


def distance(models, other):
    return max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.slow
def test_a_strong_pull_leaves_theta_at_w(engine):
    """|theta - w| = |gradient| / lambda, and w moves by eta times the gradient: here by very little."""
    free, _, start = own_models(engine, strength=1.0, personal_lr=0.05, eta=1e-6)
    held, _, _ = own_models(engine, strength=1000.0, personal_lr=1e-3, eta=1e-6)
    assert distance(held, start) < 0.05 * distance(free, start)
    assert distance(free, start) > 0.01


@pytest.mark.slow
def test_without_the_pull_and_with_one_inner_step_theta_is_trained_by_plain_sgd(engine, close):
    theta, model, start = own_models(engine, strength=0.0, inner_steps=1, personal_lr=0.05)
    plain = engine("local", "linear", cohort=6, momentum=0.0)
    progress = plain.init()
    same = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], 6, axis=0), start)
    progress, _ = plain.run(plain.place(progress._replace(memory=progress.memory._replace(model=same))), 1)
    close(theta, progress.memory.model)
    close(model, start)  # w is not drawn anywhere


@pytest.mark.slow
def test_what_is_tested_is_theta_and_not_w(transcription):
    """In the released code the former is overwritten with the latter."""
    result = []
    for evaluate in ("theta", "w_local"):
        by_hand = transcription("pfedme", dataclasses.replace(SETTING, evaluate=evaluate))
        (clients,) = by_hand.rounds(1)
        result.append(trees.take(by_hand.progress.memory.model, np.array(clients)))
    assert distance(*result) > 1e-3


@pytest.mark.slow
def test_the_global_model_can_be_tested(engine):
    one = engine("pfedme", "linear", hyper=Hyper(evaluate="global"))
    progress, _ = one.run(one.init(), 1)
    assert progress.memory is None
    assert one.strategy.personal_model(progress.server, None, None, None) is progress.server.model


def test_steps_that_are_too_large_are_told(federation, monkeypatch):
    lines = []
    monkeypatch.setattr(logging, "log_first_n", lambda level, text, count, *values: lines.append(text % values))
    problem = federation("linear").problem
    pfedme.build(Hyper(), problem)
    pfedme.build(Hyper(strength=20.0), problem)  # eta x lambda = 1
    assert lines == []
    pfedme.build(Hyper(personal_lr=0.2), problem)
    pfedme.build(Hyper(eta=0.1), problem)
    assert "personal_lr x lambda = 3 is not below 2" in lines[0] and "eta" not in lines[0]
    assert "eta x lambda = 1.5 is above 1" in lines[1] and "personal_lr" not in lines[1]


def test_without_a_plain_learning_rate_both_must_be_given(federation):
    problem = federation("linear").problem
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, lr=None))
    with pytest.raises(UserError, match=r"hyper.eta="):
        pfedme.build(Hyper(eta=0.1), problem)
    pfedme.build(Hyper(eta=0.01, personal_lr=0.01), problem)
