"""FedExP against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedexp
from fedjax_mr.strategies.fedexp import Hyper

EPSILON = 1e-4


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize(
    "hyper",
    [
        pytest.param(Hyper(EPSILON), id="paper"),
        pytest.param(Hyper(EPSILON, weights="uniform", variant="authors"), id="authors", marks=pytest.mark.slow),
    ],
)
def test_three_rounds_equal_the_equations(transcription, hyper):
    by_hand = transcription("fedexp", hyper)
    model = by_hand.read(by_hand.progress.server.model)
    previous, steps = None, []
    for clients in by_hand.rounds(3):
        weights = by_hand.sizes_of(clients) if hyper.weights == "samples" else [1] * len(clients)
        changes = [[a - b for a, b in zip(by_hand.train(model, i), model, strict=True)] for i in clients]
        change = by_hand.mean(changes, weights)
        squares = [sum(float((leaf**2).sum()) for leaf in each) for each in (*changes, change)]
        epsilon = EPSILON * (len(clients) if hyper.variant == "authors" else 1)
        step = max(1.0, np.average(squares[:-1], weights=weights) / (2 * (squares[-1] + epsilon)))
        steps.append(step)
        previous, model = model, [w + step * d for w, d in zip(model, change, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)
        np.testing.assert_allclose(float(by_hand.report.info["server_lr"]), step, rtol=1e-4)
        first = len(steps) == 1
        deployed = model if first else by_hand.mean([model, previous])
        by_hand.check(by_hand.engine.deployed(by_hand.progress), deployed)
    assert max(steps) > 1.01  # else this would have tested FedAvg


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_an_infinite_epsilon_gives_fedavg(engine, close, network):
    exp, average = engine("fedexp", network, hyper=Hyper(1e30)), engine("fedavg", network)
    close(exp.run(exp.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


@pytest.mark.parametrize("variant", ["paper", "authors"])
def test_statistics_are_averaged_and_only_the_authors_extrapolate_them(federation, close, variant):
    problem = federation().problem
    strategy = fedexp.build(Hyper(0.0, weights="uniform", variant=variant), problem)
    start = jax.device_get(jax.jit(strategy.init)(jax.random.key(0)).model)
    rng = np.random.default_rng(1)
    models = jax.tree.map(lambda leaf: leaf + rng.normal(size=(3, *leaf.shape)).astype(np.float32), start)
    cohort = Cohort(jnp.arange(3), problem.sizes[:3])
    update = jax.jit(lambda *arguments: strategy.server_update(*arguments, jnp.asarray(5), None))
    state, report = update(fedexp.State(start, start), {"model": models}, cohort)
    step = float(report["server_lr"])
    assert step > 1.2
    averaged = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
    further = jax.tree.map(lambda mean, start: start + step * (mean - start), averaged, start)
    close(state.model["params"], further["params"])
    close(state.model["batch_stats"], (averaged if variant == "paper" else further)["batch_stats"])


OLD, CHANGES, SIZES = np.array([1.0, -1.0], np.float32), np.array([[6.0, 2.0], [-2.0, 2.0]], np.float32), (1, 3)


def stepped(tiny, hyper, *, round=1, changes=CHANGES, sizes=SIZES):
    """The state and the server's learning rate after uploads with some changes from OLD."""
    strategy = fedexp.build(hyper, tiny.problem())
    model = {"params": {"w": jnp.asarray(OLD)}, "batch_stats": {"var": jnp.array(5.0)}}
    uploads = {"params": {"w": jnp.asarray(OLD + changes)}, "batch_stats": {"var": jnp.array([1.0, 9.0])}}
    cohort = Cohort(jnp.array([2, 1]), jnp.array(sizes))
    before = fedexp.State(model, {"params": {"w": jnp.array([70.0, 70.0])}, "batch_stats": {"var": jnp.array(70.0)}})
    state, info = strategy.server_update(before, {"model": uploads}, cohort, jnp.int32(round), None)
    return strategy, state, float(info["server_lr"])


@pytest.mark.parametrize(
    "hyper, rate, change, var",
    [
        # With weights 1/4 and 3/4: the mean change is (0, 2), and the mean of the squares 40 and 8 is 16.
        (Hyper(1.0), 16 / (2 * (4 + 1)), (0, 2), 7),
        # With weights 1/2: (2, 2) and 24.
        (Hyper(1.0, weights="uniform"), 24 / (2 * (8 + 1)), (2, 2), 5),
        # The authors add epsilon once for each of the two clients, and extrapolate the variance from 5 beyond 7.
        (Hyper(1.0, variant="authors"), 16 / (2 * (4 + 2)), (0, 2), 5 + 4 / 3 * (7 - 5)),
        # Never less than the mean.
        (Hyper(100.0), 1.0, (0, 2), 7),
    ],
)
def test_the_server_steps_by_half_the_mean_square_over_the_square_of_the_mean(tiny, hyper, rate, change, var):
    _, state, server_lr = stepped(tiny, hyper)
    assert server_lr == pytest.approx(rate)
    np.testing.assert_allclose(state.model["params"]["w"], OLD + rate * np.array(change), rtol=1e-6)
    assert float(state.model["batch_stats"]["var"]) == pytest.approx(var)


def test_late_clients_have_no_weight_under_uniform_weights(tiny):
    _, state, server_lr = stepped(tiny, Hyper(1.0, weights="uniform"), sizes=(0, 3))
    assert server_lr == 1.0
    np.testing.assert_allclose(state.model["params"]["w"], OLD + CHANGES[1])


def test_the_mean_of_the_last_two_iterates_is_deployed_and_the_first_one_alone(tiny):
    strategy, state, _ = stepped(tiny, Hyper(100.0))
    np.testing.assert_array_equal(
        strategy.global_model(state)["params"]["w"], OLD + np.array([0, 1])
    )  # of OLD and OLD + (0, 2)
    _, state, _ = stepped(tiny, Hyper(100.0), round=0)
    np.testing.assert_array_equal(strategy.global_model(state)["params"]["w"], OLD + np.array([0, 2]))
