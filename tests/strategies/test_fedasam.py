"""FedASAM against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import fedasam
from fedjax_mr.strategies.fedasam import Hyper


def sharp_gradient(by_hand, weights, client, *, rho, eta):
    """The gradient at the worst neighbour; the weights alternate between biases and kernels."""
    loss = lambda w: by_hand.cross_entropy(w, client)
    scales = [w.abs() + eta if w.ndim == 2 else w * 0 + 1 for w in weights]
    gradient = by_hand.gradient(loss, weights)
    norm = sum(((t * g) ** 2).sum() for t, g in zip(scales, gradient, strict=True)).sqrt()
    worst = [w + rho * t**2 * g / norm for w, t, g in zip(weights, scales, gradient, strict=True)]
    return by_hand.gradient(loss, worst)


def test_five_rounds_with_swa_equal_the_equations(transcription):
    rho, eta, lr, floor = 0.7, 0.2, 0.1, 0.1
    by_hand = transcription("fedasam", Hyper(rho=rho, eta=eta, swa_start=1, swa_cycle=2, swa_lr=floor))
    model = by_hand.read(by_hand.progress.server.model)
    kept = []
    for number, clients in enumerate(by_hand.rounds(5)):
        in_cycle = (number % 2 + 1) / 2
        rate = lr * (1 - in_cycle) + lr * floor * in_cycle if number >= 1 else lr
        trained = [
            by_hand.train(model, i, lr=rate, gradient=lambda w, i=i: sharp_gradient(by_hand, w, i, rho=rho, eta=eta))
            for i in clients
        ]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        if number in (1, 3):
            kept.append(model)
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.engine.deployed(by_hand.progress), by_hand.mean(kept) if kept else model)
    assert int(by_hand.progress.server.cycles) == 2


@pytest.mark.slow
@pytest.mark.parametrize("start, cycle, rounds", [(2, 2, 7), pytest.param(0, 3, 5, marks=pytest.mark.slow)])
def test_released_swa_equals_the_released_loop(transcription, start, cycle, rounds):
    """As released: the rate cycles from round 0 on, the mean from the start; until its first model a copy is tested."""
    lr, floor = 0.1, 0.1
    settings = dict(swa_start=start, swa_cycle=cycle, swa_lr=floor, swa_when="released")
    by_hand = transcription("fedasam", Hyper(rho=0.0, **settings))
    model = by_hand.read(by_hand.progress.server.model)
    tested, averaged = None, 0
    for number, clients in enumerate(by_hand.rounds(rounds)):
        rate = lr
        if number >= start:
            tested = model if number == start else tested
            in_cycle = (number % cycle + 1) / cycle
            rate = (1 - in_cycle) * lr + in_cycle * lr * floor
        model = by_hand.mean([by_hand.train(model, i, lr=rate) for i in clients], by_hand.sizes_of(clients))
        if number > start and (number - start) % cycle == 0:
            share = 1 / (averaged + 1)
            tested = [(1 - share) * old + share * new for old, new in zip(tested, model, strict=True)]
            averaged += 1
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.engine.deployed(by_hand.progress), tested or model)
    assert int(by_hand.progress.server.cycles) == averaged == (rounds - 1 - start) // cycle


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_radius_zero_is_fedavg(engine, close, network):
    flat, average = engine("fedasam", network, hyper=Hyper(rho=0.0)), engine("fedavg", network)
    close(flat.run(flat.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


def test_only_weights_scale_their_neighbourhood(federation):
    """As in PyTorch's names: convolutions, dense layers and BatchNorm's scale have a weight, and all have a bias."""
    model = federation().problem.model

    @jax.jit
    def scales_of(key):
        params = model.init(key)["params"]
        return jax.tree_util.tree_map_with_path(lambda path, leaf: fedasam.scale_of(path, leaf, 0.2), params)

    scales = jax.device_get(scales_of(jax.random.key(0)))
    constant = {path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(scales) if np.all(leaf == 1)}
    assert constant == {"bias"}
    np.testing.assert_allclose(scales["body"]["norm"]["scale"], 1.2)


def test_a_gradient_of_zero_stays_where_it_is():
    loss = lambda params, state, batch, key: (0.0 * jnp.sum(params["w"]["kernel"]), state)
    _, gradient = fedasam.sharpness_aware(loss, rho=0.7, eta=0.2)({"w": {"kernel": jnp.ones(3)}}, {}, None, None)
    assert float(jnp.sum(jnp.abs(gradient["w"]["kernel"]))) == 0
