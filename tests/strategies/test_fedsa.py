"""FedSA: its server and its learning rates by hand, and FedAvg as a special case."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.client import local
from fedjax_mr.strategies import Cohort, fedsa
from fedjax_mr.testing.federations import SIZES

N = len(SIZES)
OLD, UPLOADS = np.array([1.0, -2.0], np.float32), np.array([[3.0, 5.0], [-1.0, 0.5]], np.float32)


def built(federation, in_flight):
    problem = dataclasses.replace(federation().problem, cohort_size=2, in_flight=in_flight)
    return fedsa.build(fedsa.Hyper(), problem)


@pytest.mark.parametrize("in_flight, sizes", [(N, (7, 1)), (4, (7, 1)), (2, (7, 1)), (N, (7, 0))])
def test_the_model_keeps_the_share_of_the_clients_that_are_still_training(federation, in_flight, sizes):
    cohort = Cohort(jnp.array([0, 2]), jnp.array(sizes))
    state = fedsa.State({"w": jnp.asarray(OLD)}, jnp.zeros(N))
    new, _ = built(federation, in_flight).server_update(state, {"model": {"w": jnp.asarray(UPLOADS)}}, cohort, 0, None)
    q = np.array(sizes) / (sum(SIZES) if in_flight == N else 8 * in_flight / 2)
    np.testing.assert_allclose(new.model["w"], q @ UPLOADS + (1 - q.sum()) * OLD, rtol=1e-6)
    assert new.arrivals.tolist() == [1, 0, float(sizes[1] > 0), 0, 0, 0]


def test_rare_clients_have_larger_learning_rates(federation):
    arrivals = np.array([4, 0, 1, 1, 2, 2])
    state = fedsa.State({"w": jnp.asarray(OLD)}, jnp.asarray(arrivals, jnp.float32))
    sent = built(federation, N).dispatch(state, Cohort(jnp.array([0, 1]), jnp.array([7, 12])), None)
    shares = (arrivals + 1) / (arrivals + 1).sum()
    np.testing.assert_allclose(sent["lr_factor"], 1 / (N * shares[:2]), rtol=1e-6)


@pytest.mark.slow
def test_a_client_trains_with_its_factor(federation, close):
    constants = federation("linear")
    problem, data = constants.problem, constants.client(1)
    model, key = problem.model.init(jax.random.key(0)), jax.random.key(1)
    payload = {"model": model, "lr_factor": jnp.float32(0.25)}
    upload, _, _ = jax.jit(lambda: fedsa.build(fedsa.Hyper(), problem).client_update(payload, None, data, 0, key))()
    setting = dataclasses.replace(problem.local, lr=problem.local.lr / 4)
    close(upload["model"], jax.jit(lambda: local.train(problem.model, setting, model, data, key)[0])())


@pytest.mark.slow
def test_if_all_arrive_at_one_learning_rate_it_is_fedavg(engine, close):
    semi, average = engine("fedsa", "linear", hyper=fedsa.Hyper(adapt_lr=False)), engine("fedavg", "linear")
    close(semi.run(semi.init(), 2)[0].server.model, average.run(average.init(), 2)[0].server.model)


def test_a_clients_step_is_scaled_by_the_factor_it_receives(tiny):
    strategy = fedsa.build(fedsa.Hyper(), tiny.problem(lr=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "lr_factor": jnp.float32(3.0)}
    upload, _, _ = tiny.train_in_one_program(strategy, payload)
    np.testing.assert_allclose(tiny.head(upload["model"]), [[0.5 * 3 / 2, -0.5 * 3 / 2], [0, 0]], rtol=1e-6)


@jax.numpy_dtype_promotion("standard")  # optax's Adam divides by 1 - decay**count, a float to an integer power
def test_the_factor_scales_the_step_and_not_the_gradient(tiny):
    """Adam's first step is that of the learning rate, whatever the scale of the gradient is."""
    problem = tiny.problem()
    adam = dataclasses.replace(local.setting(lr=0.5, optimizer="adam", epochs=1, batch_size=8), max_size=8)
    strategy = fedsa.build(fedsa.Hyper(), dataclasses.replace(problem, local=adam))
    payload = {"model": tiny.model(np.zeros((2, 2))), "lr_factor": jnp.float32(3.0)}
    upload, _, _ = tiny.train_in_one_program(strategy, payload)
    np.testing.assert_allclose(tiny.head(upload["model"]), [[1.5, -1.5], [0, 0]], rtol=1e-5)


@pytest.mark.parametrize("adapt, factors", [(True, [6 / 3, 6 / 12]), (False, [1, 1])])
def test_the_factor_is_one_over_n_times_the_clients_own_share_of_arrivals(tiny, adapt, factors):
    """With one arrival more than it had, each of three clients has had 4, 1 and 1 of 6: N f is 2, 1/2 and 1/2."""
    strategy = fedsa.build(fedsa.Hyper(adapt), tiny.problem())
    state = fedsa.State({"params": {"w": jnp.array(2.0)}}, jnp.array([3.0, 0.0, 0.0]))
    sent = strategy.dispatch(state, Cohort(jnp.array([2, 0]), jnp.array([2, 1])), None)
    np.testing.assert_allclose(sent["lr_factor"], factors, rtol=1e-6)
    assert sent["model"]["params"]["w"].tolist() == [2, 2]
    assert strategy.stale == "uploaded"
