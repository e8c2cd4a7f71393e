"""MOON against its equations, and its special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import moon
from fedjax_mr.strategies.moon import Hyper


def test_three_rounds_equal_the_equations(transcription):
    mu, temperature = 3.0, 0.4
    by_hand = transcription("moon", Hyper(mu=mu, temperature=temperature))
    functional = by_hand.torch.nn.functional
    model, before = by_hand.read(by_hand.progress.server.model), {}
    returned = 0

    def loss(weights, i, anchor):
        value = by_hand.cross_entropy(weights, i)
        if i not in before:
            return value
        z, near, far = (by_hand.features(each, by_hand.x[i]) for each in (weights, anchor, before[i]))
        similarities = [functional.cosine_similarity(z, teacher, dim=1) for teacher in (near, far)]
        logits = by_hand.torch.stack(similarities, dim=1) / temperature
        first = by_hand.torch.zeros(len(z), dtype=by_hand.torch.int64)
        return value + mu * functional.cross_entropy(logits, first)

    for clients in by_hand.rounds(3):
        trained = [by_hand.train(model, i, loss=lambda w, i=i, a=model: loss(w, i, a)) for i in clients]
        returned += sum(i in before for i in clients)
        before.update(zip(clients, trained, strict=True))
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
        for i, weights in before.items():
            by_hand.check(trees.take(by_hand.progress.memory.model, i), weights)
        assert np.flatnonzero(by_hand.progress.memory.trained).tolist() == sorted(before)
    assert returned > 0  # somebody had a previous model


@pytest.mark.slow
@pytest.mark.parametrize("network", ["perceptron", "thin"])
def test_without_the_contrastive_term_it_is_fedavg(engine, close, network):
    free, average = engine("moon", network, hyper=Hyper(mu=0.0)), engine("fedavg", network)
    close(free.run(free.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


def test_representations_of_zeros_have_a_gradient():
    gradient = jax.jit(jax.grad(lambda z: jnp.sum(moon.cosine(z, jnp.ones((2, 3))))))(jnp.zeros((2, 3)))
    assert np.isfinite(gradient).all()
    assert float(moon.cosine(jnp.zeros((1, 3)), jnp.ones((1, 3)))[0]) == 0
    assert float(moon.cosine(jnp.ones((1, 3)), 2 * jnp.ones((1, 3)))[0]) == pytest.approx(1)
