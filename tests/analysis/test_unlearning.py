"""The study of unlearning: steps by hand, and rules in cases whose answer is known."""

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
import unlearning
from fedjax_mr import trees
from fedjax_mr.client import local


def test_a_change_keeps_its_direction_and_gets_the_norm_of_the_old_one():
    found = unlearning.rescaled(
        {"a": np.array([3.0]), "b": np.array([4.0])}, {"a": np.array([-10.0]), "b": np.zeros(1)}
    )
    np.testing.assert_allclose([found["a"][0], found["b"][0]], [6, 8])


def test_the_mean_is_that_of_the_remaining_clients():
    changes = {client: {"a": np.array([float(client)])} for client in range(unlearning.CLIENTS)}
    np.testing.assert_allclose(unlearning.mean_of(changes, np.array([9.0, 1, 2, 3, 4]))["a"], [(1 + 4 + 9 + 16) / 10])


@pytest.fixture(scope="module")
def federation():
    return unlearning.simulator()


@pytest.mark.slow
def test_half_of_the_forgotten_clients_samples_have_the_backdoor(federation):
    clean = fmr.data.load("digits")
    changed = (federation.federated.dataset.x != clean.x).any(axis=(1, 2, 3))
    rows = federation.federated.train.rows(unlearning.FORGOTTEN)
    assert set(np.flatnonzero(changed)) <= set(rows[::2]) and changed[rows[::2]].mean() > 0.5
    assert (federation.federated.dataset.y[rows[::2]] == unlearning.TARGET).all()


@pytest.mark.slow
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_replay_with_all_epochs_of_a_history_without_the_client_is_this_history(federation, monkeypatch, by_layer):
    monkeypatch.setattr(unlearning, "ROUNDS", 3)
    monkeypatch.setattr(unlearning, "INTERVAL", 1)
    monkeypatch.setattr(unlearning, "RATIO", 1.0)
    constants = federation.rounds.constants
    without = unlearning.of_coalition(constants, unlearning.OTHERS)
    history = unlearning.History(unlearning.rounds_of(federation, without))
    found = unlearning.federaser(federation, constants, history, by_layer=by_layer)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(history.final), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-3)  # changes are subtracted and added again


@pytest.mark.slow
def test_the_ascent_raises_the_clients_loss_and_stays_in_the_ball(federation, monkeypatch):
    monkeypatch.setattr(unlearning, "ROUNDS", 3)
    history = unlearning.History(unlearning.rounds_of(federation, federation.rounds.constants))
    sizes = np.asarray(federation.federated.sizes, float)
    centre = unlearning.mean_of({client: model["params"] for client, model in history.last.items()}, sizes)
    data = federation.client(unlearning.FORGOTTEN)
    loss = lambda model: float(local.score(federation.model, model, data, batch_size=64).loss)
    found = unlearning.ascent(federation, history, 0)
    assert loss(found) > 2 * loss(found | {"params": centre})
    distances, keys = [], jax.random.split(jax.random.key(0), 10)
    for number in range(10):
        random = federation.model.init(keys[number])["params"]
        distances.append(float(trees.squared_norm(trees.subtract(centre, random))))
    moved = float(trees.squared_norm(trees.subtract(found["params"], centre)))
    assert moved <= np.mean(distances) / 3 * 1.001
