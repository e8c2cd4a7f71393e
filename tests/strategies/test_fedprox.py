"""FedProx against its equations, and its special case."""

import numpy as np
import pytest

from fedjax_mr.strategies import fedavg, fedprox


@pytest.mark.slow  # quick: the tests by hand
def test_three_rounds_equal_the_equations(transcription):
    mu = 0.7
    by_hand = transcription("fedprox", fedprox.Hyper(mu=mu))
    model = by_hand.read(by_hand.progress.server.model)
    for clients in by_hand.rounds(3):

        def proximal(weights, client, anchor):
            distance = sum(((w - a) ** 2).sum() for w, a in zip(weights, anchor, strict=True))
            return by_hand.cross_entropy(weights, client) + mu / 2 * distance

        trained = [by_hand.train(model, i, loss=lambda w, i=i, a=model: proximal(w, i, a)) for i in clients]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_without_the_proximal_term_it_is_fedavg(engine, close, network):
    free, average = engine("fedprox", network, hyper=fedprox.Hyper(mu=0.0)), engine("fedavg", network)
    close(free.run(free.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


def test_each_step_differs_from_fedavg_by_mu_times_the_distance_from_the_received_model(tiny):
    """The distance is 0 in the first step, which starts at the received model, and its change in the second."""
    lr, mu, start = 0.5, 0.25, tiny.model([[2.0, 1.0], [0.0, 3.0]])

    def trained(module, hyper, steps):
        strategy = module.build(hyper, tiny.problem(steps=steps, lr=lr))
        return tiny.head(tiny.train(strategy, {"model": start})[0]["model"])

    first, second = (trained(fedavg, fedavg.Hyper(), steps) for steps in (1, 2))
    np.testing.assert_array_equal(trained(fedprox, fedprox.Hyper(mu), 1), first)
    pulled = second - lr * mu * (first - tiny.head(start))
    np.testing.assert_allclose(trained(fedprox, fedprox.Hyper(mu), 2), pulled, rtol=1e-6)
    assert np.abs(pulled - second).max() > 0.01
