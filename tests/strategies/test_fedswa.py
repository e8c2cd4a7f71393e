"""FedSWA and FedMoSWA against their equations, and their special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import fedswa
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
