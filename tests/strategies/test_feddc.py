"""FedDC against its equations, and its special case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import Cohort, feddc, feddyn
from fedjax_mr.strategies.feddc import Hyper


@pytest.mark.slow  # FedDyn and SCAFFOLD at once, whose transcriptions are quick
def test_three_rounds_equal_the_equations(transcription):
    alpha, total, step_size, steps = 0.3, 4, 0.1 / (1 - 0.5), 3  # full batches: one step per epoch
    by_hand = transcription("feddc", Hyper(alpha=alpha))
    model = by_hand.read(by_hand.progress.server.model)
    zeros = [0 * leaf for leaf in model]
    control, controls, drifts = zeros, [zeros] * total, [zeros] * total
    for clients in by_hand.rounds(3):

        def corrected(weights, i, received, control):
            plain = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
            parts = zip(plain, weights, received, drifts[i], control, controls[i], strict=True)
            return [g + alpha * (w - r + h) + c - ci for g, w, r, h, c, ci in parts]

        trained = [
            by_hand.train(model, i, gradient=lambda w, i=i, r=model, c=control: corrected(w, i, r, c)) for i in clients
        ]
        for i, local in zip(clients, trained, strict=True):
            change = [new - old for new, old in zip(local, model, strict=True)]
            drifts[i] = [h + each for h, each in zip(drifts[i], change, strict=True)]
            parts = zip(controls[i], control, change, strict=True)
            controls[i] = [ci - c - each / (steps * step_size) for ci, c, each in parts]
        model = [new + h for new, h in zip(by_hand.mean(trained), by_hand.mean(drifts), strict=True)]
        control = by_hand.mean(controls)  # both start at zero
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.control, control)
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory.drift, i), drifts[i])
            by_hand.check(trees.take(by_hand.progress.memory.control, i), controls[i])


@pytest.mark.slow
def test_with_variates_held_at_zero_it_is_feddyn(engine, close):
    frozen, dynamic = engine("feddc", hyper=Hyper(alpha=0.2)), engine("feddyn", hyper=feddyn.Hyper(alpha=0.2))
    zeros = lambda tree: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    progress = frozen.init()
    for _ in range(3):
        progress, _ = frozen.run(progress, 1)
        server, memory = progress.server, progress.memory
        server, memory = (each._replace(control=zeros(each.control)) for each in (server, memory))
        progress = frozen.place(progress._replace(server=server, memory=memory))
    expected, _ = dynamic.run(dynamic.init(), 3)
    close(progress.server.model, expected.server.model)
    close(progress.memory.drift, expected.memory)


def test_a_gradient_has_the_pull_of_feddyn_and_the_correction_of_scaffold(tiny):
    """On samples whose inputs are 0, each step is along alpha (w - w0 + h) + c - c_i alone."""
    alpha, lr = 0.5, 0.5
    drift, control, own = (
        np.array(each) for each in ([[4.0, 0.0], [0.0, -8.0]], [[1.0, 2.0], [0.0, 0.0]], [[0.0, 5.0], [0.0, 2.0]])
    )
    strategy = feddc.build(Hyper(alpha), tiny.problem(steps=2, lr=lr))
    payload = {"model": tiny.model(np.full((2, 2), 3.0)), "control": tiny.params(control)}
    memory = feddc.Memory(tiny.params(drift), tiny.params(own))
    upload, memory, _ = tiny.train(strategy, payload, memory, data=tiny.client(x=[[0.0, 0.0]]))
    first = -lr * (alpha * drift + control - own)
    change = first - lr * (alpha * (first + drift) + control - own)
    np.testing.assert_allclose(tiny.head(upload["model"]), 3 + change, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(memory.drift), drift + change, rtol=1e-6)
    variate = -change / (2 * lr) - control  # the mean gradient of two steps, minus c
    np.testing.assert_allclose(tiny.head(upload["control"]), variate, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(memory.control), own + variate, rtol=1e-6)


def test_momentum_lengthens_the_step_by_which_the_change_is_divided(tiny):
    strategy = feddc.build(Hyper(0.0), tiny.problem(lr=0.5, momentum=0.75))
    payload = {"model": tiny.model(np.zeros((2, 2))), "control": tiny.params(np.zeros((2, 2)))}
    zeros = tiny.params(np.zeros((2, 2)))
    upload, _, _ = tiny.train(strategy, payload, feddc.Memory(zeros, zeros))
    np.testing.assert_allclose(tiny.head(upload["control"]), [[-0.5 / 4, 0.5 / 4], [0, 0]], atol=1e-7)


@pytest.mark.parametrize("sizes, share", [((1, 3), 2 / 4), ((0, 3), 1 / 4)])
def test_the_server_adds_up_drifts_and_variates_of_all_clients(tiny, sizes, share):
    strategy = feddc.build(Hyper(), tiny.problem((1, 3, 2, 2)))
    start = feddc.State({"params": {"w": jnp.array(2.0)}}, {"w": jnp.array(7.0)}, {"w": jnp.array(1.0)})
    uploads = {"model": {"params": {"w": jnp.array([4.0, 8.0])}}, "control": {"w": jnp.array([3.0, -1.0])}}
    state, _ = strategy.server_update(start, uploads, Cohort(jnp.array([2, 1]), jnp.array(sizes)), 0, None)
    drift = 7 + share * (6 - 2)
    assert (float(state.drift["w"]), float(state.control["w"])) == (drift, 1 + share * 1)
    assert float(state.model["params"]["w"]) == 6 + drift
    sent = strategy.dispatch(state, None, None)
    assert sorted(sent) == ["control", "model"] and sent["control"]["w"].tolist() == [1 + share] * 2
    assert strategy.increments == ("control",)  # a refused upload then counts as no change, see `channel`
