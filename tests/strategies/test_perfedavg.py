"""Per-FedAvg against its equations, and its special case."""

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import perfedavg
from fedjax_mr.strategies.parts import GlobalModel
from fedjax_mr.strategies.perfedavg import Hyper

ALPHA = 0.3


def own_step(by_hand, weights, client, direction=None):
    """Weights (or a direction) after a step of alpha along the gradient (or along another direction)."""
    along = by_hand.gradient(lambda w: by_hand.cross_entropy(w, client), weights) if direction is None else direction
    return [w - ALPHA * g for w, g in zip(weights, along, strict=True)]


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize(
    "gradient, delta",
    [
        ("first_order", 1e-3),
        pytest.param("hessian_free", 0.1, marks=pytest.mark.slow),
        pytest.param("hessian_free", 3e-3, marks=pytest.mark.slow),  # near the Hessian itself
    ],
)
def test_three_rounds_equal_the_equations(transcription, gradient, delta):
    by_hand = transcription("perfedavg", Hyper(adapt_lr=ALPHA, gradient=gradient, delta=delta))
    torch, model = by_hand.torch, by_hand.read(by_hand.progress.server.model)

    def meta_gradient(weights, i):
        loss = lambda w: by_hand.cross_entropy(w, i)
        outer = by_hand.gradient(loss, own_step(by_hand, weights, i))
        if gradient == "first_order":
            return outer
        if delta < 0.01:
            weights = [w.detach().clone().requires_grad_() for w in weights]
            slope = torch.autograd.grad(loss(weights), weights, create_graph=True)
            product = torch.autograd.grad(slope, weights, grad_outputs=outer)
        else:
            shifted = lambda sign: [w + sign * delta * v for w, v in zip(weights, outer, strict=True)]
            above, below = (by_hand.gradient(loss, shifted(sign)) for sign in (1, -1))
            product = [(a - b) / (2 * delta) for a, b in zip(above, below, strict=True)]
        return own_step(by_hand, outer, i, product)

    for clients in by_hand.rounds(3):
        trained = [by_hand.train(model, i, gradient=lambda w, i=i: meta_gradient(w, i)) for i in clients]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        for ours, theirs in zip(by_hand.read(by_hand.progress.server.model), model, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 if delta != 3e-3 else 2e-4)
    if gradient == "first_order":
        check_own_models(by_hand, model)


def check_own_models(by_hand, model):
    """A client's own model is a step away from the global one, on its training samples (here all of them)."""
    constants = by_hand.engine.constants
    samples, index, offsets = constants.federation
    adapt = jax.jit(lambda server, data, key: by_hand.engine.strategy.personal_model(server, None, data, key))
    for i in range(4):
        data = ClientData(samples, index, offsets[i], np.int32(by_hand.sizes[i]), np.int32(i))
        own = adapt(by_hand.progress.server, data, jax.random.key(i))
        by_hand.check(own, own_step(by_hand, model, i))


def parabola(params, state, batch, key):
    """f = a (w - c)^2 / 2 for a batch (a, c); the state counts the passes."""
    curvature, centre = batch
    return curvature * (params["w"] - centre) ** 2 / 2, {"passes": state["passes"] + 1}


@pytest.mark.parametrize("gradient, expected", [("first_order", 2.0), ("hessian_free", 2.0 * (1 - 0.5 * 3))])
def test_the_gradient_is_taken_after_a_step_on_another_batch(tokens, trainings, monkeypatch, gradient, expected):
    """From w = 4, D = (1, 0) and alpha = 0.5 give u = 2. D' = (2, 1) has the slope 2 there. D'' has the Hessian 3."""
    federation, drawn = tokens([[0, 1], [1]]), []

    def draw(setting, data, key):
        drawn.append(tuple(jax.random.key_data(key).tolist()))
        return (np.float32(1), np.float32(0)) if len(drawn) == 1 else (np.float32(3), np.float32(7))

    monkeypatch.setattr(local, "draw", draw)
    strategy = perfedavg.build(Hyper(adapt_lr=0.5, gradient=gradient, delta=0.125), federation.problem)
    strategy.client_update({"model": tokens.point(4)}, None, federation.client(0), 0, jax.random.key(0))
    meta_gradient = trainings[0].gradient(parabola)
    batch, state = (np.float32(2), np.float32(1)), {"passes": np.int32(0)}
    (value, _), slope = meta_gradient(tokens.point(4)["params"], state, batch, jax.random.key(1))
    assert float(value) == pytest.approx(1.0)  # the loss of D' at u
    assert float(slope["w"]) == pytest.approx(expected)
    assert len(set(drawn)) == len(drawn) == (1 if gradient == "first_order" else 2)  # independent batches


@pytest.mark.parametrize("alpha, step", [(0.5, 0.5), (None, 0.25)])  # by default, that of the clients
def test_a_personal_model_is_one_step_on_the_clients_own_batch(tokens, monkeypatch, alpha, step):
    federation = tokens([[0, 1], [1]], lr=0.25)
    monkeypatch.setattr(local, "draw", lambda setting, data, key: (np.float32(2), np.float32(data.client_id)))
    monkeypatch.setattr(local, "supervised", lambda model: parabola)
    strategy = perfedavg.build(Hyper(adapt_lr=alpha), federation.problem)
    state = GlobalModel(tokens.point(4) | {"passes": np.int32(0)})
    own = strategy.personal_model(state, None, federation.client(1), jax.random.key(0))
    assert float(own["params"]["w"]) == pytest.approx(4 - step * 2 * (4 - 1))
    assert int(own["passes"]) == 1  # the statistics of this pass


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["first_order", "hessian_free"])
def test_without_the_step_it_is_fedavg(engine, close, gradient):
    still, average = engine("perfedavg", hyper=Hyper(adapt_lr=0.0, gradient=gradient)), engine("fedavg")
    expected = average.run(average.init(), 3)[0].server.model
    close(still.run(still.init(), 3)[0].server.model, expected)


def test_alpha_must_be_known(federation):
    problem = federation("perceptron").problem
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, rule="adam"))
    with pytest.raises(UserError, match="perfedavg needs a constant learning rate"):
        perfedavg.build(Hyper(), problem)
    assert perfedavg.build(Hyper(adapt_lr=0.1), problem)
