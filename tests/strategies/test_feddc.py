"""FedDC against its equations, and its special case."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import feddyn
from fedjax_mr.strategies.feddc import Hyper


@pytest.mark.slow  # FedDyn and SCAFFOLD at once, whose transcriptions are quick
def test_three_rounds_equal_the_equations(transcription):
    alpha, total, step_size, steps = 0.3, 4, 0.1 / (1 - 0.5), 3  # full batches: one step per epoch
    by_hand = transcription("feddc", Hyper(alpha=alpha))
    model = by_hand.read(by_hand.progress.server.model)
    zeros = [0 * leaf for leaf in model]
    control, controls, drifts = zeros, [zeros] * total, [zeros] * total
    for clients in by_hand.rounds(3):

        def corrected(weights, i, received, control):
            plain = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            parts = zip(plain, weights, received, drifts[i], control, controls[i], strict=True)
            return [g + alpha * (w - r + h) + c - ci for g, w, r, h, c, ci in parts]

        trained = [
            by_hand.train(model, i, gradient=lambda w, i=i, r=model, c=control: corrected(w, i, r, c)) for i in clients
        ]
        for i, local in zip(clients, trained, strict=True):
            change = [new - old for new, old in zip(local, model, strict=True)]
            drifts[i] = [h + each for h, each in zip(drifts[i], change, strict=True)]
            parts = zip(controls[i], control, change, strict=True)
            controls[i] = [ci - c - each / (steps * step_size) for ci, c, each in parts]
        model = [new + h for new, h in zip(by_hand.mean(trained), by_hand.mean(drifts), strict=True)]
        control = by_hand.mean(controls)  # both start at zero
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.control, control)
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory.drift, i), drifts[i])
            by_hand.check(trees.take(by_hand.progress.memory.control, i), controls[i])


@pytest.mark.slow
def test_with_variates_held_at_zero_it_is_feddyn(engine, close):
    frozen, dynamic = engine("feddc", hyper=Hyper(alpha=0.2)), engine("feddyn", hyper=feddyn.Hyper(alpha=0.2))
    zeros = lambda tree: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    progress = frozen.init()
    for _ in range(3):
        progress, _ = frozen.run(progress, 1)
        server, memory = progress.server, progress.memory
        server, memory = (each._replace(control=zeros(each.control)) for each in (server, memory))
        progress = frozen.place(progress._replace(server=server, memory=memory))
    expected, _ = dynamic.run(dynamic.init(), 3)
    close(progress.server.model, expected.server.model)
    close(progress.memory.drift, expected.memory)
