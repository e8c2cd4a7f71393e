"""FedSMOO against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, feddyn, fedsmoo
from fedjax_mr.strategies.fedsmoo import Hyper


@pytest.mark.slow  # quick: the tests by hand
def test_three_rounds_equal_the_equations(transcription):
    rho, strength, total, lr, momentum = 0.3, 0.2, 4, 0.1, 0.5
    by_hand = transcription("fedsmoo", Hyper(rho=rho, strength=strength))
    model = by_hand.read(by_hand.progress.server.model)
    zeros = [0 * leaf for leaf in model]
    ascent, duals, drifts = zeros, [zeros] * total, [zeros] * total
    norm = lambda tree: sum((leaf**2).sum() for leaf in tree).sqrt()

    def train(received, i, ascent):
        weights, velocity, dual = received, zeros, duals[i]
        loss = lambda w: by_hand.cross_entropy(w, i)
        for _ in range(3):  # full batches: one step per epoch
            free = [g - u - s for g, u, s in zip(by_hand.gradient(loss, weights), dual, ascent, strict=True)]
            own = [rho * leaf / norm(free) for leaf in free]
            dual = [u + e - s for u, e, s in zip(dual, own, ascent, strict=True)]
            gradient = by_hand.gradient(loss, [w + e for w, e in zip(weights, own, strict=True)])
            parts = zip(velocity, gradient, weights, received, drifts[i], strict=True)
            velocity = [momentum * v + g + strength * (w - r + h) for v, g, w, r, h in parts]
            weights = [w - lr * v for w, v in zip(weights, velocity, strict=True)]
        return weights, dual

    for clients in by_hand.rounds(3):
        trained = [train(model, i, ascent) for i in clients]
        for i, (local, dual) in zip(clients, trained, strict=True):
            drifts[i] = [h + new - old for h, new, old in zip(drifts[i], local, model, strict=True)]
            duals[i] = dual
        averaged = by_hand.mean([local for local, _ in trained])
        model = [new + h for new, h in zip(averaged, by_hand.mean(drifts), strict=True)]
        dual = by_hand.mean([dual for _, dual in trained])
        ascent = [rho * leaf / norm(dual) for leaf in dual]
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.ascent, ascent)
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory.dual, i), duals[i])
        np.testing.assert_allclose(norm(by_hand.read(by_hand.progress.server.ascent)), rho, rtol=1e-5)


@pytest.mark.slow
def test_with_ascents_of_no_length_it_is_feddyn(engine, close):
    still, dynamic = engine("fedsmoo", hyper=Hyper(rho=0.0, strength=0.2)), engine("feddyn", hyper=feddyn.Hyper(0.2))
    progress, expected = still.run(still.init(), 3)[0], dynamic.run(dynamic.init(), 3)[0]
    close(progress.server.model, expected.server.model)
    close(progress.memory.drift, expected.memory)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves((progress.server.ascent, progress.memory.dual)))


def test_a_client_ascends_along_its_gradient_minus_its_dual_minus_the_common_ascent(tiny):
    """The gradient (-1/2, 1/2) minus u minus s is (0, 4), so e = (0, rho). At e the label's share is 1/(1 + e^rho)."""
    rho, strength, lr = float(np.log(3)), 0.25, 0.5
    common, dual, drift = np.array([[1.0, 2.0], [0, 0]]), np.array([[-1.5, -5.5], [0, 0]]), np.array([[8.0, 0], [0, 4]])
    strategy = fedsmoo.build(Hyper(rho, strength), tiny.problem(lr=lr))
    payload = {"model": tiny.model(np.zeros((2, 2))), "ascent": tiny.params(common)}
    memory = fedsmoo.Memory(tiny.params(drift), tiny.params(dual))
    upload, memory, metrics = tiny.train(strategy, payload, memory)
    ascent, gradient = np.array([[0.0, rho], [0, 0]]), np.array([[-3 / 4, 3 / 4], [0, 0]])
    change = -lr * (gradient + strength * drift)
    np.testing.assert_allclose(tiny.head(upload["model"]), change, rtol=1e-5)
    np.testing.assert_allclose(tiny.head(upload["dual"]), dual + ascent - common, rtol=1e-5)
    np.testing.assert_allclose(tiny.head(memory.dual), dual + ascent - common, rtol=1e-5)
    np.testing.assert_allclose(tiny.head(memory.drift), drift + change, rtol=1e-5)
    assert float(metrics.loss) == pytest.approx(np.log(2))  # at the weights themselves


def test_the_common_ascent_is_the_mean_dual_at_length_rho_and_the_model_is_that_of_feddyn(tiny):
    strategy = fedsmoo.build(Hyper(rho=0.5), tiny.problem((1, 3, 2, 2)))
    zeros = {"w": jnp.zeros(2)}
    start = fedsmoo.State({"params": {"w": jnp.array([2.0, 0.0])}}, zeros, zeros)
    uploads = {
        "model": {"params": {"w": jnp.array([[4.0, 0.0], [8.0, 0.0]])}},
        "dual": {"w": jnp.array([[4.0, 4.0], [2.0, 4.0]])},  # the mean is (3, 4)
    }
    state, _ = strategy.server_update(start, uploads, Cohort(jnp.array([2, 1]), jnp.array([1, 3])), 0, None)
    np.testing.assert_allclose(state.ascent["w"], [0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(state.drift["w"], [2 / 4 * 4, 0])
    np.testing.assert_allclose(state.model["params"]["w"], [6 + 2, 0])
    assert sorted(strategy.dispatch(state, None, None)) == ["ascent", "model"]
