"""SCAFFOLD against its equations, its special case, and what its control variates add up to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, scaffold
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.scaffold import Hyper


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize("variant", ["paper", pytest.param("authors", marks=pytest.mark.slow)])
def test_three_rounds_equal_the_equations(transcription, monkeypatch, variant):
    authors, longest = variant == "authors", 0.2
    monkeypatch.setattr(scaffold, "AUTHORS_CLIP_NORM", longest)  # so that it matters
    by_hand = transcription("scaffold", Hyper(variant=variant), seed=1)
    lr, momentum, steps, total = 0.1, 0.5, 3, 4  # full batches: one step per epoch
    model = by_hand.read(by_hand.progress.server.model)
    control = [0 * leaf for leaf in model]
    own = [control] * total
    mean_size = sum(by_hand.sizes) / total

    for clients in by_hand.rounds(3):
        trained, changes = [], []
        for i in clients:
            relative = by_hand.sizes[i] / mean_size if authors else 1.0

            def corrected(weights, i=i, relative=relative, control=control):
                plain = by_hand.gradient(lambda w: by_hand.cross_entropy(w, i), weights)
                gradient = [g - ci + c / relative for g, ci, c in zip(plain, own[i], control, strict=True)]
                length = sum(float((g**2).sum()) for g in gradient) ** 0.5
                return [g * min(1.0, longest / length) for g in gradient] if authors else gradient

            local = by_hand.train(model, i, gradient=corrected)
            step_size = lr if authors else lr / (1 - momentum)
            new = [
                ci - c + (x - y) / (steps * step_size)
                for ci, c, x, y in zip(own[i], control, model, local, strict=True)
            ]
            trained.append(local)
            changes.append([relative * (a - b) for a, b in zip(new, own[i], strict=True)])
            own[i] = new
        model = by_hand.mean(trained, by_hand.sizes_of(clients) if authors else None)
        control = [c + sum(each) / total for c, *each in zip(control, *changes, strict=True)]
        by_hand.check(by_hand.progress.server.model, model)
        by_hand.check(by_hand.progress.server.control, control)
        for i in range(total):
            by_hand.check(trees.take(by_hand.progress.memory, i), own[i])


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_the_clients_variates_sum_to_n_times_the_servers(engine, close, network):
    """Whoever takes part: the server moves by 1/N of what its clients move by."""
    trained = engine("scaffold", network)
    progress, _ = trained.run(trained.init(), 4)
    control = jax.device_get(progress.server.control)
    close(jax.tree.map(lambda leaf: np.asarray(leaf).mean(axis=0), progress.memory), control)
    assert sum(np.sum(leaf**2) for leaf in jax.tree.leaves(control)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_with_variates_held_at_zero_it_is_uniform_fedavg(engine, close, network):
    frozen, average = engine("scaffold", network), engine("fedavg", network, hyper=fedavg.Hyper(weights="uniform"))
    progress = frozen.init()
    for _ in range(3):
        progress, _ = frozen.run(progress, 1)
        zeros = lambda tree: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
        server = progress.server._replace(control=zeros(progress.server.control))
        progress = frozen.place(progress._replace(server=server, memory=zeros(progress.memory)))
    close(progress.server.model, average.run(average.init(), 3)[0].server.model)


def test_a_server_lr_goes_further_and_leaves_statistics_alone(federation, close):
    problem = federation().problem
    updated = {}
    cohort = Cohort(np.arange(3, dtype=np.int32), np.ones(3, np.int32))
    for lr in (1.0, 2.0):
        strategy = scaffold.build(Hyper(server_lr=lr), problem)
        state = jax.device_get(jax.jit(strategy.init)(jax.random.key(0)))
        rng = np.random.default_rng(1)
        near = lambda leaf, rng=rng: leaf + rng.normal(size=(3, *leaf.shape)).astype(np.float32)
        models = jax.tree.map(near, state.model)
        control = jax.tree.map(lambda leaf: np.repeat(leaf[None], 3, axis=0), state.control)
        update = jax.jit(lambda state, uploads, each=strategy: each.server_update(state, uploads, cohort, 0, None)[0])
        updated[lr] = jax.device_get(update(state, {"model": models, "control": control}).model)
    close(updated[1.0], jax.tree.map(lambda leaf: leaf.mean(axis=0), models))
    close(updated[2.0]["batch_stats"], updated[1.0]["batch_stats"])
    further = jax.tree.map(lambda new, old: old + 2.0 * (new - old), updated[1.0]["params"], state.model["params"])
    close(updated[2.0]["params"], further)


@pytest.mark.parametrize("setting", [dict(rule="adam"), dict(rule=optax.sgd(0.1)), dict(momentum=1.0)])
def test_an_optimizer_whose_steps_tell_no_gradients_is_refused(federation, setting):
    problem = federation().problem
    problem = dataclasses.replace(problem, local=dataclasses.replace(problem.local, **setting))
    with pytest.raises(UserError, match="optimizer=sgd"):
        scaffold.build(Hyper(), problem)


GRADIENT = np.array([[-0.5, 0.5], [0.0, 0.0]])  # of a zero head with x = (1, 0) and label 0


@pytest.mark.parametrize(
    "momentum, steps, moved, mean",
    [
        (0.0, 1, [1.0], 1.0),
        # Two steps along a constant correction move by 1 + 1.5, which is 2 / (1 - 0.5) - 1.5 in the steady state.
        (0.5, 2, [1.0, 1.5], 2.5 / (2 * 2)),
    ],
)
def test_a_client_adds_c_minus_its_own_to_each_gradient_and_keeps_its_mean_gradient(tiny, momentum, steps, moved, mean):
    """On samples whose inputs are 0, all gradients are 0, and only the correction moves the model."""
    control, own = np.array([[3.0, 1.0], [0.0, 2.0]]), np.array([[1.0, 2.0], [0.0, 0.0]])
    strategy = scaffold.build(Hyper(), tiny.problem(steps=steps, lr=0.5, momentum=momentum))
    payload = {"model": tiny.model(np.ones((2, 2))), "control": tiny.params(control)}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(own), data=tiny.client(x=[[0.0, 0.0]]))
    np.testing.assert_allclose(tiny.head(upload["model"]), 1 - 0.5 * sum(moved) * (control - own), rtol=1e-6)
    change = mean * (control - own) - control
    np.testing.assert_allclose(tiny.head(upload["control"]), change, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(memory), own + change, rtol=1e-6)


def test_after_one_step_the_own_variate_is_the_gradient(tiny):
    strategy = scaffold.build(Hyper(), tiny.problem(lr=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "control": tiny.params([[3.0, 1.0], [0.0, 2.0]])}
    own = tiny.params([[1.0, 2.0], [0.0, 0.0]])
    upload, memory, _ = tiny.train(strategy, payload, own)
    np.testing.assert_allclose(tiny.head(memory), GRADIENT, atol=1e-6)
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * (GRADIENT + np.array([[2, -1], [0, 2]])), atol=1e-6)


def test_the_authors_divide_c_by_the_relative_size_clip_the_sum_and_divide_by_lr_alone(tiny):
    """The client with one of four samples of two clients has the relative size 1/2; the gradient is longer than 10."""
    control, own = np.array([[10.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 15.0], [0.0, 0.0]])
    strategy = scaffold.build(Hyper(variant="authors"), tiny.problem((1, 3), lr=0.5, momentum=0.5))
    payload = {"model": tiny.model(np.zeros((2, 2))), "control": tiny.params(control)}
    upload, memory, _ = tiny.train(strategy, payload, tiny.params(own), data=tiny.client(x=[[0.0, 0.0]]))
    step = (2 * control - own) * 10 / 25  # (20, -15) has length 25
    np.testing.assert_allclose(tiny.head(upload["model"]), -0.5 * step, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(upload["control"]), step - control, rtol=1e-6)
    np.testing.assert_allclose(tiny.head(memory), own + step - control, rtol=1e-6)


UPLOADS = {"model": {"params": {"w": jnp.array([4.0, 8.0])}}, "control": {"w": jnp.array([1.0, 5.0])}}


def served(tiny, hyper, sizes):
    strategy = scaffold.build(hyper, tiny.problem((1, 3, 2, 2)))
    start = scaffold.State({"params": {"w": jnp.array(2.0)}}, {"w": jnp.array(7.0)})
    state, _ = strategy.server_update(start, UPLOADS, Cohort(jnp.array([2, 1]), jnp.array(sizes)), 0, None)
    return float(state.model["params"]["w"]), float(state.control["w"])


def test_the_server_takes_plain_means_and_k_of_n_of_the_change_of_c(tiny):
    assert served(tiny, Hyper(), (1, 3)) == (6.0, 7 + 2 / 4 * 3)
    assert served(tiny, Hyper(server_lr=0.5), (1, 3)) == (4.0, 7 + 2 / 4 * 3)  # half way from 2 to 6
    assert served(tiny, Hyper(), (0, 3)) == (6.0, 7 + 1 / 4 * 3)  # `channel` fills a late client's upload


def test_the_authors_weight_models_and_changes_by_samples(tiny):
    """The mean size of the four clients is 2, so the relative sizes are 1/2 and 3/2."""
    assert served(tiny, Hyper(variant="authors"), (1, 3)) == (7.0, 7 + 2 / 4 * (0.5 * 1 + 1.5 * 5) / 2)
    assert served(tiny, Hyper(variant="authors"), (0, 3)) == (8.0, 7 + 2 / 4 * (1.5 * 5) / 2)


def test_clients_receive_the_model_and_c_and_upload_an_increment(tiny):
    strategy = scaffold.build(Hyper(), tiny.problem())
    sent = strategy.dispatch(scaffold.State({"params": {"w": jnp.array(2.0)}}, {"w": jnp.array(7.0)}), None, None)
    assert sent["model"]["params"]["w"].tolist() == [2, 2] and sent["control"]["w"].tolist() == [7, 7]
    assert strategy.increments == ("control",)  # a refused upload then counts as no change, see `channel`
