"""MOON against its equations, and its special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import moon
from fedjax_mr.strategies.moon import Hyper
from fedjax_mr.strategies.parts import LastModel


@pytest.mark.slow  # quick: the tests by hand
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


IDENTITY, TURNED = [[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]  # x = (1, 0) has the representation x, or (0, 1)


def trained_once(tiny, *, before, hidden=IDENTITY, trained=True, mu=3.0, lr=0.1, steps=1):
    """Steps of a client with a zero head, whose gradient with respect to the hidden layer is the contrastive one."""
    strategy = moon.build(Hyper(mu, 0.5), tiny.problem(steps=steps, lr=lr, width=2))
    received, memory = (tiny.model(np.zeros((2, 2)), each) for each in (hidden, before))
    data = tiny.client(x=[[1.0, 0.0], [0.0, 5.0]], y=[0, 1], size=1)  # the second row is padding
    return tiny.train_in_one_program(strategy, {"model": received}, LastModel(memory, np.asarray(trained)), data=data)


def test_a_step_turns_the_representation_away_from_that_of_the_clients_last_model(tiny):
    """At the received model, the cosine with itself is 1 and that with the last model 0; the temperature is 1/2."""
    upload, memory, metrics = trained_once(tiny, before=TURNED)
    assert float(metrics.loss) == pytest.approx(np.log(2) + 3 * np.log(1 + np.exp(-2)))
    slope = 3 * 2 / (1 + np.exp(2))  # of mu softplus(2 (far - near)) along the representation's second coordinate
    np.testing.assert_allclose(tiny.hidden(upload["model"]), [[1, -0.1 * slope], [0, 1]], rtol=1e-5)
    np.testing.assert_array_equal(tiny.hidden(memory.model), tiny.hidden(upload["model"]))  # the trained model
    assert memory.trained.dtype == bool and memory.trained

    turned = 0.1 * slope  # the second step begins at the representation (1, -turned), with the logits (1, -1) / 20
    length = np.sqrt(1 + turned**2)
    second = np.log(1 + np.exp(-0.1)) + 3 * np.log(1 + np.exp(2 * (-turned - 1) / length))
    _, _, metrics = trained_once(tiny, before=TURNED, steps=2)
    assert float(metrics.loss) == pytest.approx(np.log(2) + 3 * np.log(1 + np.exp(-2)) + second, rel=1e-5)


def test_a_last_model_with_the_same_representation_teaches_nothing(tiny):
    upload, _, metrics = trained_once(tiny, before=[[3.0, 0.0], [1.0, 1.0]])
    assert float(metrics.loss) == pytest.approx(np.log(2) + 3 * np.log(2))
    np.testing.assert_allclose(tiny.hidden(upload["model"]), IDENTITY, atol=1e-6)


def test_a_client_without_a_last_model_trains_on_the_cross_entropy_alone(tiny):
    upload, memory, metrics = trained_once(tiny, before=TURNED, trained=False)
    assert float(metrics.loss) == pytest.approx(np.log(2)) and memory.trained
    np.testing.assert_array_equal(tiny.hidden(upload["model"]), IDENTITY)


def test_the_cosine_does_not_depend_on_lengths():
    a, b = jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 2.0]])
    assert float(moon.cosine(a, b)[0]) == pytest.approx(0.8)
