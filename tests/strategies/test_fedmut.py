"""FedMut: what the mutants are, and what comes of them."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import Cohort, fedavg, fedmut
from fedjax_mr.strategies.fedmut import Hyper


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_tensor_goes_forth_and_back_equally_often(count):
    signs = jax.jit(lambda key, beta: fedmut.signs(key, num_units=50, count=count, beta=beta))
    moves = np.asarray(signs(jax.random.key(0), jnp.asarray(0.25)))
    assert moves.shape == (50, count)
    pairs = count // 2
    np.testing.assert_array_equal(np.sort(moves[:, : 2 * pairs]), [[-0.75] * pairs + [1.0] * pairs] * 50)
    np.testing.assert_array_equal(moves[:, 2 * pairs :], 0)
    if pairs:
        assert 0.3 < np.mean(moves[:, 0] > 0) < 0.7  # and which mutant does which is drawn for every tensor


ONE = {"params": {"a": np.float32(1), "b": np.float32(10)}}
LAST = {"params": {"a": np.float32(1), "b": np.float32(-100)}}


def test_mutants_lie_a_radius_of_the_last_update_before_and_behind_the_model(federation):
    """Radius 2 and b_t = 1/4: displacements of 2, -3/2 and, for the odd client, 0. The halves differ by tensor."""
    strategy = fedmut.build(Hyper(radius=2.0), federation("linear").problem)
    state, drawn = fedmut.State(ONE, LAST, np.float32(0.25)), set()
    dispatch = jax.jit(strategy.dispatch)
    for seed in range(6):
        sent = dispatch(state, None, jax.random.key(seed))["model"]["params"]
        moves = (np.asarray(sent["a"]) - 1) / 1, (np.asarray(sent["b"]) - 10) / -100
        for each in moves:
            np.testing.assert_allclose(sorted(each[:2]), [-1.5, 2], rtol=1e-6)
            assert each[2] == 0
        drawn.add((moves[0][0] > 0, moves[1][0] > 0))
    assert len(drawn) > 2


def test_the_first_mutants_are_the_initial_model(federation):
    network = SimpleNamespace(init=lambda key: {"params": {"a": jax.random.uniform(key)}})
    strategy = fedmut.build(Hyper(), dataclasses.replace(federation("linear").problem, model=network))
    first, other = (strategy.init(jax.random.key(seed)) for seed in (0, 1))
    assert first.model["params"]["a"] != other.model["params"]["a"]
    assert float(first.change["params"]["a"]) == float(first.beta) == 0


def test_the_server_keeps_the_uniform_mean_and_its_distance_from_the_last_model(federation):
    """beta_0 (1 - t / T_b): from 0.4 down to 0 at round 4."""
    strategy = fedmut.build(Hyper(beta=0.4, bound=4), federation("linear").problem)
    uploads = {"model": {"params": {"a": jnp.array([1.0, 2, 6]), "b": jnp.array([0.0, 0, 9])}}}
    cohort, state = Cohort(np.arange(3), np.array([1, 2, 99])), fedmut.State(ONE, LAST, np.float32(0.25))
    for round, beta in ((0, 0.4), (1, 0.3), (4, 0.0), (9, 0.0)):
        new, _ = strategy.server_update(state, uploads, cohort, jnp.int32(round), None)
        assert [float(new.model["params"][name]) for name in "ab"] == [3, 3]
        assert [float(new.change["params"][name]) for name in "ab"] == [2, -7]
        assert float(new.beta) == pytest.approx(beta)


@pytest.mark.slow
def test_three_rounds_equal_the_equations(transcription):
    hyper = Hyper(radius=2.0, beta=0.4, bound=4)
    by_hand = transcription("fedmut", hyper)
    model = by_hand.read(by_hand.progress.server.model)
    change, beta = [0 * leaf for leaf in model], 0.0
    for number, clients in enumerate(by_hand.rounds(3, payloads=True)):
        mutants = [by_hand.read(payload["model"]) for payload in by_hand.received]
        for position, (w, d) in enumerate(zip(model, change, strict=True)):
            moves = [float(((each[position] - w) * d).sum() / (d**2).sum().clip(1e-30)) for each in mutants]
            signs = [0.0, 0.0, 0.0] if number == 0 else [beta - 1, 1.0, 0.0]  # K = 3: a pair, and one left alone
            np.testing.assert_allclose([*sorted(moves[:2]), moves[2]], 2.0 * np.array(signs), atol=1e-3)
            for move, each in zip(moves, mutants, strict=True):
                np.testing.assert_allclose(each[position], w + move * d, atol=1e-5)
        new = by_hand.mean([by_hand.train(each, i) for each, i in zip(mutants, clients, strict=True)])
        change, model = [a - b for a, b in zip(new, model, strict=True)], new
        beta = 0.4 * (1 - number / 4)
        by_hand.check(by_hand.progress.server.model, model)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_radius_zero_is_uniform_fedavg(engine, close, network):
    still = engine("fedmut", network, hyper=Hyper(radius=0.0))
    average = engine("fedavg", network, hyper=fedavg.Hyper(weights="uniform"))
    close(still.run(still.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


@pytest.mark.parametrize(
    "variant, mutated",
    [("paper", ["params"]), pytest.param("authors", ["batch_stats", "params"], marks=pytest.mark.slow)],
)
def test_statistics_are_mutated_only_by_the_authors(federation, variant, mutated):
    problem = federation().problem
    strategy = fedmut.build(Hyper(variant=variant), problem)
    state = jax.jit(strategy.init)(jax.random.key(0))
    state = state._replace(change=jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), state.change))
    sent = jax.jit(lambda state, key: strategy.dispatch(state, None, key)["model"])(state, jax.random.key(1))
    equal = lambda rows, leaf: bool(np.all(np.asarray(rows) == np.asarray(leaf)))
    same = {name: all(jax.tree.leaves(jax.tree.map(equal, sent[name], state.model[name]))) for name in sent}
    assert [name for name in sorted(same) if not same[name]] == mutated
