"""FedMuon against its equations in float64."""

import jax.numpy as jnp
import numpy as np

from fedjax_mr.client import local
from fedjax_mr.strategies.fedmuon import Hyper, optimizer, orthogonal


def test_singular_values_come_near_to_one_in_the_same_directions():
    matrix = np.random.default_rng(0).normal(size=(3, 3, 2, 5)).astype(np.float32)
    found = np.asarray(orthogonal(jnp.asarray(matrix), 5)).reshape(18, 5)
    u, _, v = np.linalg.svd(matrix.reshape(18, 5), full_matrices=False)
    values = np.diag(u.T @ found @ v.T)
    assert 0.6 < values.min() <= values.max() < 1.25
    np.testing.assert_allclose(found, u * values @ v, atol=1e-4)
    np.testing.assert_allclose(orthogonal(jnp.array([3.0, 4.0]), 0), [0.6, 0.8], rtol=1e-5)
    assert not np.any(orthogonal(jnp.zeros((2, 3)), 5))


def test_the_gradient_is_clipped_before_the_momentum_and_the_weights_decay_beside_it():
    setting = local.setting(lr=0.5, momentum=0.5, clip_norm=1.0, weight_decay=0.1)
    params = {"w": jnp.array([[4.0, 0.0]])}
    zeros = {"w": jnp.zeros((1, 2))}
    muon = optimizer(setting, zeros, zeros, 0)
    moves, state = muon.update({"w": jnp.array([[0.0, 10.0]])}, muon.init(params), params)
    np.testing.assert_allclose(state.momentum["w"], [[0.0, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(moves["w"], [[-0.5 * 0.1 * 4, -0.5 * 1.0]], rtol=1e-5)


def orthogonal_by_hand(torch, tensor, iterations):
    x = tensor.reshape(-1, tensor.shape[-1])
    x = x / x.norm()
    for _ in range(iterations):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x.reshape(tensor.shape)


def test_three_rounds_equal_the_equations(transcription):
    by_hand = transcription("fedmuon", Hyper(iterations=2))
    torch, model = by_hand.torch, by_hand.read(by_hand.progress.server.model)
    zeros = [torch.zeros_like(leaf) for leaf in model]
    control, own = zeros, [zeros] * 4
    alpha, lr, epochs = 1 - by_hand.settings["momentum"], by_hand.settings["lr"], by_hand.settings["epochs"]
    for clients in by_hand.rounds(3):
        trained, momenta = [], []
        for client in clients:
            x, m = model, own[client]
            for _ in range(epochs):
                gradient = by_hand.gradient(lambda weights, client=client: by_hand.cross_entropy(weights, client), x)
                m = [(1 - alpha) * a + alpha * g for a, g in zip(m, gradient, strict=True)]
                corrected = [a - b + c for a, b, c in zip(m, own[client], control, strict=True)]
                x = [w - lr * orthogonal_by_hand(torch, each, 2) for w, each in zip(x, corrected, strict=True)]
            trained.append(x)
            momenta.append(m)
        share, old = len(clients) / 4, [own[client] for client in clients]
        changes = [[a - b for a, b in zip(m, before, strict=True)] for m, before in zip(momenta, old, strict=True)]
        control = [c + share * change for c, change in zip(control, by_hand.mean(changes), strict=True)]
        model = [(1 - share) * w + share * new for w, new in zip(model, by_hand.mean(trained), strict=True)]
        for client, m in zip(clients, momenta, strict=True):
            own[client] = m
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.control, control)
