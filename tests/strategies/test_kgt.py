"""K-GT against its equations in float64, gradient tracking as a special case, and the sum of the corrections."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies.graphs import graph_of
from fedjax_mr.strategies.kgt import Hyper


def mixed(models, weights):
    return [
        [sum(w * leaf for w, leaf in zip(row, leaves, strict=True)) for leaves in zip(*models, strict=True)]
        for row in weights
    ]


def combined(a, x, b, y):
    """The sum a x + b y of two lists of tensors."""
    return [a * one + b * other for one, other in zip(x, y, strict=True)]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_three_rounds_equal_the_equations(transcription, rate):
    hyper = Hyper(rate=rate)
    by_hand = transcription("kgt", hyper, cohort=4)
    models = [by_hand.read(trees.take(by_hand.progress.server.models, i)) for i in range(4)]
    weights, corrections = graph_of(hyper, 4, 4).weights[0], [[0 * leaf for leaf in model] for model in models]
    length = 3 * 0.1 / (1 - 0.5)  # K eta, with the momentum in eta
    for _ in by_hand.rounds(3):
        gradients = []
        for i, (model, correction) in enumerate(zip(models, corrections, strict=True)):
            plain = lambda weights, i=i: by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            trained = by_hand.train(model, i, gradient=lambda w, c=correction, plain=plain: combined(1, plain(w), 1, c))
            gradients.append(combined(1 / length, model, -1 / length, trained))
        averages = mixed(gradients, weights)
        corrections = [
            combined(1, c, 1, combined(-1, z, 1, mean))
            for c, z, mean in zip(corrections, gradients, averages, strict=True)
        ]
        models = mixed([combined(1, x, -rate * length, z) for x, z in zip(models, gradients, strict=True)], weights)
        for i in range(4):
            by_hand.check(trees.take(by_hand.progress.server.models, i), models[i])
            by_hand.check(trees.take(by_hand.progress.server.corrections, i), corrections[i])


@pytest.mark.slow
def test_with_one_step_it_is_gradient_tracking(transcription):
    """The tracked gradient becomes its average plus the change of the client's gradient, as in DIGing."""
    by_hand = transcription("kgt", Hyper(), cohort=4, epochs=1, momentum=0.0)
    models = [by_hand.read(trees.take(by_hand.progress.server.models, i)) for i in range(4)]
    weights = graph_of(Hyper(), 4, 4).weights[0]
    gradient = lambda model, i: by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), model)
    tracked = [gradient(model, i) for i, model in enumerate(models)]
    for _ in by_hand.rounds(4):
        before = [gradient(model, i) for i, model in enumerate(models)]
        models = mixed([combined(1, x, -0.1, y) for x, y in zip(models, tracked, strict=True)], weights)
        averages = mixed(tracked, weights)
        after = [gradient(model, i) for i, model in enumerate(models)]
        tracked = [
            combined(1, y, 1, combined(1, new, -1, old)) for y, new, old in zip(averages, after, before, strict=True)
        ]
        for i, model in enumerate(models):
            by_hand.check(trees.take(by_hand.progress.server.models, i), model)


def test_the_corrections_sum_to_zero_in_every_cohort(engine):
    one = engine("kgt", "linear", cohort=3)
    progress, _ = one.run(one.init(), 5)
    corrections = jax.tree.leaves(jax.device_get(progress.server.corrections))
    for leaf in corrections:
        np.testing.assert_allclose(leaf.sum(axis=0), 0, atol=1e-5)
    assert max(np.abs(leaf).max() for leaf in corrections) > 1e-2
