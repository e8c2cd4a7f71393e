"""FedSWA and FedMoSWA against their equations, and their special cases."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, fedswa
from fedjax_mr.strategies.fedswa import Hyper, MomentumHyper

LR, MOMENTUM, STEPS = 0.1, 0.5, 3  # full batches: one step per epoch


def train(by_hand, weights, client, *, rho, correction=None):
    """The weights after steps whose rate falls from LR towards rho LR."""
    velocity = [0 * leaf for leaf in weights]
    correction = correction or velocity
    for k in range(STEPS):
        gradient = by_hand.gradient(lambda w: by_hand.cross_entropy(w, client), weights)
        velocity = [MOMENTUM * v + g + c for v, g, c in zip(velocity, gradient, correction, strict=True)]
        rate = LR * ((1 - k / STEPS) + rho * k / STEPS)
        weights = [w - rate * v for w, v in zip(weights, velocity, strict=True)]
    return weights


@pytest.mark.slow  # FedMoSWA's holds all of it
def test_two_rounds_of_fedswa_equal_the_equations(transcription):
    rho, alpha = 0.3, 1.7
    by_hand = transcription("fedswa", Hyper(rho=rho, alpha=alpha))
    model = by_hand.read(by_hand.progress.server.model)
    for clients in by_hand.rounds(2):
        trained = [train(by_hand, model, i, rho=rho) for i in clients]
        mean = by_hand.mean(trained, by_hand.sizes_of(clients))
        model = [old + alpha * (new - old) for old, new in zip(model, mean, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)


@pytest.mark.slow  # quick: the tests by hand
def test_three_rounds_of_fedmoswa_equal_the_equations(transcription):
    rho, alpha, gamma, total = 0.3, 1.7, 0.4, 4
    by_hand = transcription("fedmoswa", MomentumHyper(rho=rho, alpha=alpha, gamma=gamma))
    model = by_hand.read(by_hand.progress.server.model)
    momentum = [0 * leaf for leaf in model]
    controls = [momentum] * total
    rates = sum(LR / (1 - MOMENTUM) * ((1 - k / STEPS) + rho * k / STEPS) for k in range(STEPS))
    for clients in by_hand.rounds(3):
        trained = []
        for i in clients:
            correction = [m - c for m, c in zip(momentum, controls[i], strict=True)]
            trained.append(train(by_hand, model, i, rho=rho, correction=correction))
            parts = zip(controls[i], momentum, model, trained[-1], strict=True)
            controls[i] = [c - m + (old - new) / rates for c, m, old, new in parts]
        mean = by_hand.mean(trained, by_hand.sizes_of(clients))
        model = [old + alpha * (new - old) for old, new in zip(model, mean, strict=True)]
        target = by_hand.mean([controls[i] for i in clients])
        momentum = [m + gamma * (c - m) for m, c in zip(momentum, target, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.momentum, momentum)
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory, i), controls[i])


@pytest.mark.slow
def test_with_a_constant_rate_and_the_mean_it_is_fedavg(engine, close):
    constant, average = engine("fedswa", hyper=Hyper(rho=1.0, alpha=1.0)), engine("fedavg")
    close(constant.run(constant.init(), 3)[0].server.model, average.run(average.init(), 3)[0].server.model)


@pytest.mark.slow
def test_with_variates_held_at_zero_fedmoswa_is_fedswa(engine, close):
    frozen, plain = engine("fedmoswa", hyper=MomentumHyper(gamma=0.0)), engine("fedswa")
    progress = frozen.init()
    for _ in range(3):
        progress, _ = frozen.run(progress, 1)
        memory = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), progress.memory)
        progress = frozen.place(progress._replace(memory=memory))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(progress.server.momentum))
    close(progress.server.model, plain.run(plain.init(), 3)[0].server.model)


def test_the_sum_of_the_rates_is_that_of_the_steps():
    for steps, done in ((1, 1), (2, 2), (7, 7), (7, 3), (7, 1)):  # fewer if a client stops for the deadline
        expected = sum((1 - k / steps) + 0.3 * k / steps for k in range(done))
        np.testing.assert_allclose(fedswa.sum_of_shares(0.3, jnp.int32(done), jnp.int32(steps)), expected, rtol=1e-6)
    assert float(fedswa.sum_of_shares(0.3, jnp.int32(0), jnp.int32(0))) == 1  # a padded client divides by it


CORRECTION = np.array([[3.0, 1.0], [0.0, 2.0]])


def test_the_rate_falls_within_a_round_from_lr_towards_rho_lr(tiny):
    """On samples whose inputs are 0, the momentum m - c_i alone moves the model, with the rates 1, 3/4 and 1/2."""
    strategy = fedswa.build_momentum(MomentumHyper(rho=0.25), tiny.problem(steps=3, lr=0.5))
    own = 2 * CORRECTION
    payload = {"model": tiny.model(np.ones((2, 2))), "momentum": tiny.params(3 * CORRECTION)}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(own), data=tiny.client(x=[[0.0, 0.0]]))
    np.testing.assert_allclose(tiny.head(upload["model"]), 1 - 0.5 * (1 + 0.75 + 0.5) * CORRECTION, rtol=1e-5)
    # The mean step is m - c_i, whose subtraction leaves the mean gradient, 0.
    np.testing.assert_allclose(tiny.head(memory), np.zeros((2, 2)), atol=1e-5)
    np.testing.assert_array_equal(tiny.head(upload["control"]), tiny.head(memory))


def test_after_one_step_the_variate_of_fedmoswa_is_the_gradient(tiny):
    strategy = fedswa.build_momentum(MomentumHyper(), tiny.problem(lr=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "momentum": tiny.params(CORRECTION)}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(3 * CORRECTION))
    gradient = np.array([[-0.5, 0.5], [0.0, 0.0]])
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * (gradient - 2 * CORRECTION), rtol=1e-5)
    np.testing.assert_allclose(tiny.head(memory), gradient, atol=1e-5)


def test_a_client_of_fedswa_takes_its_second_step_at_the_rate_between(tiny):
    """From a zero head: one step of 1/2, then sigmoid(-1) at (1 + rho) / 2 of the rate."""
    strategy = fedswa.build(Hyper(rho=0.5), tiny.problem(steps=2))
    upload, _, _ = tiny.train(strategy, {"model": tiny.model(np.zeros((2, 2)))})
    reached = 0.5 + 0.75 / (1 + np.e)
    np.testing.assert_allclose(tiny.head(upload["model"]), [[reached, -reached], [0, 0]], rtol=1e-5)


def test_the_server_steps_alpha_times_towards_the_mean_weighted_by_samples(tiny):
    """The mean is 7, and 1.5 steps from 2 towards it reach 9.5; the statistics are those of the mean."""
    uploads = {"params": {"w": jnp.array([4.0, 8.0])}, "batch_stats": {"var": jnp.array([1.0, 3.0])}}
    model = {"params": {"w": jnp.array(2.0)}, "batch_stats": {"var": jnp.array(5.0)}}
    cohort = Cohort(jnp.array([2, 1]), jnp.array([1, 3]))
    controls = {"w": jnp.array([3.0, -1.0])}  # their plain mean is 1, towards which m goes from 6 by gamma = 0.2
    plain = fedswa.build(Hyper(), tiny.problem())
    own = fedswa.build_momentum(MomentumHyper(), tiny.problem())
    state, _ = plain.server_update(fedswa.State(model, None), {"model": uploads}, cohort, 0, None)
    start = fedswa.State(model, {"w": jnp.array(6.0)})
    second, _ = own.server_update(start, {"model": uploads, "control": controls}, cohort, 0, None)
    for each in (state, second):
        assert (float(each.model["params"]["w"]), float(each.model["batch_stats"]["var"])) == (9.5, 2.5)
    assert float(second.momentum["w"]) == pytest.approx(5.0) and state.momentum is None
    assert (sorted(plain.dispatch(state, None, None)), sorted(own.dispatch(second, None, None))) == (
        ["model"],
        ["model", "momentum"],
    )


def test_the_variate_of_fedmoswa_starts_at_zero(tiny):
    problem = tiny.problem()
    model = {"params": {"w": jnp.array([1.0, 2.0])}}
    problem = dataclasses.replace(problem, model=types.SimpleNamespace(init=lambda key: model))
    state = fedswa.build_momentum(MomentumHyper(), problem).init(jax.random.key(0))
    np.testing.assert_array_equal(state.momentum["w"], [0, 0])
