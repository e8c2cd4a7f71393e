"""FedDyn against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, feddyn, fedprox
from fedjax_mr.strategies.feddyn import Hyper


@pytest.mark.slow  # quick: the tests by hand
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


def test_a_gradient_has_alpha_times_the_distance_from_the_received_model_plus_the_drift(tiny):
    """On samples whose inputs are 0, only the dynamic term moves the model: first alpha h, then alpha (w1 - w0 + h)."""
    alpha, lr, drift = 0.5, 0.5, np.array([[4.0, 0.0], [0.0, -8.0]])
    strategy = feddyn.build(Hyper(alpha), tiny.problem(steps=2, lr=lr))
    payload = {"model": tiny.model(np.full((2, 2), 3.0))}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(drift), data=tiny.client(x=[[0.0, 0.0]]))
    change = -lr * alpha * drift - lr * alpha * (drift - lr * alpha * drift)
    np.testing.assert_allclose(tiny.head(upload["model"]), 3 + change, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(memory), drift + change, rtol=1e-6)  # the sum of the client's changes


@pytest.mark.parametrize("sizes, share", [((1, 3), 2 / 4), ((0, 3), 1 / 4)])
def test_the_server_adds_the_mean_drift_of_all_clients_to_the_plain_mean(tiny, sizes, share):
    strategy = feddyn.build(Hyper(), tiny.problem((1, 3, 2, 2)))
    model = {"params": {"w": jnp.array(2.0)}, "batch_stats": {"var": jnp.array(5.0)}}
    uploads = {"params": {"w": jnp.array([4.0, 8.0])}, "batch_stats": {"var": jnp.array([1.0, 3.0])}}
    start = feddyn.State(model, {"w": jnp.array(7.0)})
    cohort = Cohort(jnp.array([2, 1]), jnp.array(sizes))
    state, _ = strategy.server_update(start, {"model": uploads}, cohort, 0, None)
    drift = 7 + share * (6 - 2)
    assert (float(state.drift["w"]), float(state.model["params"]["w"])) == (drift, 6 + drift)
    assert float(state.model["batch_stats"]["var"]) == 2
