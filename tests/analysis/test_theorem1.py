"""FedMR on strongly convex problems stays under the bound of its Theorem 1 and falls at least like 1/T."""

import jax
import numpy as np
import pytest

import theorem1
from fedjax_mr.analysis.command import script
from fedjax_mr.testing import threefry

PROBLEMS = {"quadratic": theorem1.quadratic, "logistic": theorem1.logistic}


@pytest.fixture(scope="module", params=["quadratic", pytest.param("logistic", marks=pytest.mark.slow)])
def problem(request):
    return PROBLEMS[request.param](4, seed=1, samples=12, dimension=5)


@pytest.fixture(scope="module")
def known(problem):
    return theorem1.constants(problem, steps=3)


def test_losses_and_gradients_are_those_of_the_engine(problem):
    """The analysis in double precision and the engine's loss are written separately."""
    engine = theorem1.rounds_of("fedmr", problem, theorem1.constants(problem, steps=3), seed=0)
    model = engine.constants.problem.model
    loss = theorem1.regularised(problem, model)
    w = np.random.default_rng(0).normal(size=5).astype(np.float32)
    structure = jax.tree.structure(model.shapes()["params"])
    params = jax.tree.unflatten(structure, [part[:, None] for part in w.reshape(theorem1.BLOCKS, -1)])
    losses, gradients = problem.losses(w.astype(float)), problem.gradients(w.astype(float))
    both = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, {}, batch, None)[0]))
    for client in range(4):
        rows = np.concatenate([problem.x[client], problem.y[client][:, None]], axis=1).astype(np.float32)
        batch = theorem1.local.Batch(rows, np.zeros(12, np.int32), np.ones(12, np.float32))
        value, gradient = both(params, batch)
        np.testing.assert_allclose(value, losses[client], rtol=1e-5)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])
        np.testing.assert_allclose(flat, gradients[client], rtol=1e-4, atol=1e-5)


def test_constants_are_what_they_claim(problem, known):
    np.testing.assert_allclose(problem.gradients(known.optimum).mean(axis=0), 0, atol=1e-7)
    assert known.heterogeneity > 0
    rng = np.random.default_rng(2)
    for _ in range(50):
        a, b = rng.normal(size=(2, 5)) * 3
        assert problem.losses(a).mean() >= known.minimum
        change = problem.gradients(a) - problem.gradients(b)
        assert np.all(np.linalg.norm(change, axis=1) <= known.smoothness * np.linalg.norm(a - b) * (1 + 1e-9))
        assert np.all(change @ (a - b) >= known.convexity * np.sum((a - b) ** 2) * (1 - 1e-9))
    rates = known.lr(np.arange(1, 1000))
    assert rates[0] <= 1 / (4 * known.smoothness) and np.all(rates[:-3] <= 2 * rates[3:])


@pytest.mark.slow
def test_the_bound_holds_and_the_gap_falls_like_1_over_t(problem, known, monkeypatch):
    # In thousands of rounds, calls of the hash in Python would take longer than compiling it.
    monkeypatch.setattr(threefry, "call", lambda *words: threefry.threefry(words[:2], words[2:]))
    looks = np.unique(np.geomspace(1, 3000, 25).astype(int)).tolist()
    fedmr, fedavg = (theorem1.history_of(name, problem, known, looks=looks, seed=0) for name in ("fedmr", "fedavg"))
    for history in (fedmr, fedavg):
        assert history.steps[-1] == 9000
        assert np.all(history.gap > 0) and np.all(history.gap <= known.bound(history.steps))
        assert np.all(history.models_gap <= known.bound(history.steps))
        assert np.all(history.squared_gradient <= known.gradient**2)
        assert theorem1.slope(history.steps, history.gap) < -0.8
    assert fedmr.gap[-1] < 1e-3 * fedmr.gap[0]
    assert np.all(fedmr.models_gap >= fedmr.gap)  # f is convex
    np.testing.assert_allclose(fedavg.models_gap, fedavg.gap, atol=1e-14)  # FedAvg has one model


def test_a_fitted_slope():
    steps = np.geomspace(1, 1e4, 30)
    assert theorem1.slope(steps, 3 / steps) == pytest.approx(-1)


@pytest.mark.parametrize("option", ["--clients=1", "--rounds=3", "--steps=0", "--seed=-1", "--rounds=x"])
def test_bad_options(option, capsys):
    assert script(theorem1, [option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
