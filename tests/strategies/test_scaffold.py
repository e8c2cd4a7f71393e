"""SCAFFOLD against its equations, its special case, and what its control variates add up to."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedavg, scaffold
from fedjax_mr.strategies.base import Cohort
from fedjax_mr.strategies.scaffold import Hyper


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
