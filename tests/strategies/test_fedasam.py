"""FedASAM against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedasam
from fedjax_mr.strategies.fedasam import Hyper


def sharp_gradient(by_hand, weights, client, *, rho, eta):
    """The gradient at the worst neighbour; the weights alternate between biases and kernels."""
    loss = lambda w: by_hand.cross_entropy(w, client)
    scales = [w.abs() + eta if w.ndim == 2 else w * 0 + 1 for w in weights]
    gradient = by_hand.gradient(loss, weights)
    norm = sum(((t * g) ** 2).sum() for t, g in zip(scales, gradient, strict=True)).sqrt()
    worst = [w + rho * t**2 * g / norm for w, t, g in zip(weights, scales, gradient, strict=True)]
    return by_hand.gradient(loss, worst)


@pytest.mark.slow  # quick: the tests by hand
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


def test_the_worst_neighbour_lies_along_the_gradient_scaled_twice():
    """Of (a^2 + b^2) / 2 with a kernel a = -3 and a bias b = 4: T = (3 + 1, 1) and T g = (-12, 4)."""
    loss = lambda params, state, batch, key: (sum(jnp.sum(w**2) for w in params["layer"].values()) / 2, state)
    params = {"layer": {"kernel": jnp.array([-3.0]), "bias": jnp.array([4.0])}}
    (value, _), gradient = fedasam.sharpness_aware(loss, rho=0.5, eta=1.0)(params, {}, None, None)
    length = 0.5 / np.sqrt(12**2 + 4**2)
    np.testing.assert_allclose(gradient["layer"]["kernel"], [-3 - length * 4 * 12], rtol=1e-6)
    np.testing.assert_allclose(gradient["layer"]["bias"], [4 + length * 4], rtol=1e-6)
    assert float(value) == 12.5  # the loss at the weights themselves


def test_the_gradient_of_zero_weights_is_taken_at_the_worst_neighbour(tiny):
    """With eta = 2 all scales are 2, and g = (-1/2, 1/2): 4 rho g / |2 g| = ln 3 (-1/2, 1/2), where p is 1/4."""
    hyper = Hyper(rho=np.log(3) / (2 * np.sqrt(2)), eta=2.0)
    upload, _, _ = tiny.train(fedasam.build(hyper, tiny.problem()), {"model": tiny.model(np.zeros((2, 2)))})
    np.testing.assert_allclose(tiny.head(upload["model"]), [[3 / 4, -3 / 4], [0, 0]], rtol=1e-5)


@pytest.mark.parametrize(
    "hyper, rates",
    [
        (Hyper(rho=0.0), [1, 1, 1, 1, 1]),
        # From the start on, the rate falls within each cycle of rounds 0, 1 | 2, 3 | 4 to a tenth.
        (Hyper(rho=0.0, swa_start=1, swa_cycle=2, swa_lr=0.1), [1, 0.1, 0.55, 0.1, 0.55]),
        (Hyper(rho=0.0, swa_start=1, swa_cycle=1, swa_lr=0.1), [1, 0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_the_rate_falls_to_its_lowest_in_the_last_round_of_a_cycle(tiny, hyper, rates):
    strategy, start = fedasam.build(hyper, tiny.problem()), {"model": tiny.model(np.zeros((2, 2)))}
    for round, rate in enumerate(rates):
        upload, _, _ = tiny.train(strategy, start, round=round)
        np.testing.assert_allclose(tiny.head(upload["model"])[0], [rate / 2, -rate / 2], rtol=1e-6)


@pytest.mark.parametrize(
    "when, start, cycle, deployed",
    [
        # The server's model after round r is r + 1. The mean of those after rounds 3, 5 and 7 is 4, 5, 6.
        ("cycle_end", 2, 2, [1, 2, 3, 4, 4, 5, 5, 6]),
        ("cycle_end", 3, 2, [1, 2, 3, 4, 4, 5, 5, 6]),  # cycles are counted from round 0
        ("cycle_end", 0, 4, [1, 2, 3, 4, 4, 4, 4, 6]),
        # As released: the model at the start (that after round 1) until those after rounds 4 and 6 enter the mean.
        ("released", 2, 2, [1, 2, 2, 2, 5, 5, 6, 6]),
        (None, None, 2, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_mean_takes_the_models_at_the_ends_of_cycles(tiny, when, start, cycle, deployed):
    hyper = Hyper(swa_start=start, swa_cycle=cycle, **({} if when is None else {"swa_when": when}))
    strategy = fedasam.build(hyper, tiny.problem())
    zero = {"params": {"w": jnp.array(0.0)}}
    averages = start is not None
    state = fedasam.State(zero, zero if averages else None, jnp.int32(0) if averages else None)
    for round, expected in enumerate(deployed):
        uploads = {"model": {"params": {"w": jnp.array([round - 2.0, round + 2.0])}}}  # weighted: round + 1
        cohort = Cohort(jnp.array([2, 1]), jnp.array([1, 3]))
        state, _ = strategy.server_update(state, uploads, cohort, jnp.int32(round), None)
        assert float(state.model["params"]["w"]) == round + 1
        assert float(strategy.global_model(state)["params"]["w"]) == pytest.approx(expected), round
