"""FedDyn against its equations, and its special case."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import fedprox
from fedjax_mr.strategies.feddyn import Hyper


def test_three_rounds_equal_the_equations(transcription):
    alpha, total = 0.3, 4
    by_hand = transcription("feddyn", Hyper(alpha=alpha))
    model = by_hand.read(by_hand.progress.server.model)
    drifts = [[0 * leaf for leaf in model]] * total
    for number, clients in enumerate(by_hand.rounds(3)):

        def dynamic(weights, i, received):
            plain = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            parts = zip(plain, weights, received, drifts[i], strict=True)
            return [g + alpha * (w - r + h) for g, w, r, h in parts]

        trained = [by_hand.train(model, i, gradient=lambda w, i=i, r=model: dynamic(w, i, r)) for i in clients]
        for i, local in zip(clients, trained, strict=True):
            drifts[i] = [h + new - old for h, new, old in zip(drifts[i], local, model, strict=True)]
        averaged, before = by_hand.mean(trained), model
        model = [new + h for new, h in zip(averaged, by_hand.mean(drifts), strict=True)]
        if number == 0:  # K of N clients have a drift, which is their change
            share = 1 + len(clients) / total
            expected = [old + share * (new - old) for old, new in zip(before, averaged, strict=True)]
            by_hand.check(by_hand.progress.server.model, expected)
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.drift, by_hand.mean(drifts))
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory, i), drifts[i])


@pytest.mark.slow
def test_in_its_first_round_it_is_fedprox_but_for_the_server(engine, close):
    """Without drifts the dynamic term is the proximal one; 3 of 4 clients then have one, which is their change."""
    settings = dict(sizes=(8, 8, 8, 8), lr=0.1)
    dynamic = engine("feddyn", hyper=Hyper(alpha=0.5), **settings)
    proximal = engine("fedprox", hyper=fedprox.Hyper(mu=0.5), **settings)
    old = jax.device_get(proximal.init().server.model["params"])
    mean = jax.device_get(proximal.run(proximal.init(), 1)[0].server.model)
    further = jax.tree.map(lambda new, old: new + np.float32(3 / 4) * (new - old), mean["params"], old)
    close(dynamic.run(dynamic.init(), 1)[0].server.model, mean | {"params": further})
