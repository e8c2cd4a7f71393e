"""FCCL: the loss on public data, and the two frozen teachers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.client import local
from fedjax_mr.strategies import fccl
from fedjax_mr.strategies.fccl import Hyper, Memory


def test_the_loss_is_the_formula_and_ignores_padding():
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=(2, 7, 3)).astype(np.float32)
    hats = [(each - each.mean(axis=0)) / each.std(axis=0) for each in (z[:5], target[:5])]
    table = hats[0].T @ hats[1] / 5
    same = np.diag(table)
    expected = ((1 - same) ** 2).sum() + 0.3 * (((1 + table) ** 2).sum() - ((1 + same) ** 2).sum())
    mask = jnp.array([1, 1, 1, 1, 1, 0, 0], jnp.float32)
    loss = jax.jit(functools.partial(fccl.correlation_loss, off_diagonal=0.3))(z, target, mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_constant_columns_do_no_harm():
    z = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    z[:, 1] = 2.0
    target, mask = jnp.ones((6, 3)), jnp.ones(6)
    for logits in (z, target):
        both = jax.jit(jax.value_and_grad(functools.partial(fccl.correlation_loss, off_diagonal=0.1)))
        loss, slope = both(logits, target, mask)
        assert np.isfinite(loss) and np.isfinite(slope).all()


def test_decorrelated_columns_that_agree_leave_the_off_diagonal_only():
    z = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], np.float32)
    loss = jax.jit(functools.partial(fccl.correlation_loss, off_diagonal=0.5))(z, 3 * z + 5, jnp.ones(4))
    assert float(loss) == pytest.approx(0.5 * 2, abs=1e-4)  # the diagonal is 1; (1 + 0)^2 beside it


def test_a_client_aligns_with_the_consensus_and_then_learns_from_its_labels_and_two_teachers(
    tokens, trainings, monkeypatch
):
    """The frozen network says (3/4, 1/4) of each sample, and the last one (1/4, 3/4) of the second."""
    federation = tokens([[0, 1], [1]], public=[0, 1, 0], epochs=2)
    strategy = fccl.build(
        Hyper(public_epochs=3, private_epochs=7, public_batch=2, teachers=0.5, off_diagonal=0.25), federation.problem
    )
    said = {20.0: [[np.log(3), 0], [np.log(3), 0]], 10.0: [[0, 0], [0, np.log(3)]]}
    client_outputs = lambda model, variables, data, max_size: np.array(
        said[float(variables["params"]["w"])], np.float32
    )
    monkeypatch.setattr(local, "client_outputs", client_outputs)
    monkeypatch.setattr(local, "outputs", lambda model, variables, public, rows: (variables, rows.tolist()))
    consensus = np.array([[1, 0], [0, 1], [2, 0]], np.float32)
    batch = federation.batch(0, 1, labels=[0, 0])
    logits, key = federation.model([[0, 0], [np.log(3), 0]])["params"], jax.random.key(0)
    for trained in (True, False):
        trainings.clear()
        memory = Memory(tokens.point(10), tokens.point(20), np.bool_(trained))
        upload, kept, _ = strategy.client_update(
            {"consensus": consensus}, memory, federation.client(0), 0, jax.random.key(0)
        )
        public, private = trainings
        assert public.start == tokens.point(10) and private.start == tokens.point(11)
        assert upload["logits"] == (tokens.point(12), [0, 1, 2])
        assert kept == Memory(tokens.point(12), tokens.point(20 if trained else 12), np.bool_(True))
        assert int(public.setting.epochs) == (3 if trained else 0) and public.setting.batch_size == 2
        assert int(private.setting.epochs) == (2 if trained else 7)
        loss = float(private.loss(logits, {}, batch, key)[0])
        # The student says 1/2 and 3/4 of class 0. A teacher that says the same adds nothing.
        divergence = lambda p, q: p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        pulls = divergence(0.75, 0.5), divergence(0.25, 0.75)
        expected = np.mean(np.log([2, 4 / 3])) + (0.5 * np.mean(pulls) if trained else 0)
        assert loss == pytest.approx(expected, rel=1e-4)
    table = federation.model([[0, 2], [1, 0]])["params"]
    batch = federation.batch(0, 1, labels=[0, 0], position=[2, 1])
    found = float(public.loss(table, {}, batch, key)[0])
    expected = fccl.correlation_loss(table["body"]["z"][:2], consensus[[2, 1]], batch.mask, off_diagonal=0.25)
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_the_consensus_is_the_mean_of_the_rounds_logits_and_everybody_receives_it(tokens):
    federation = tokens([[0, 1, 1], [1]], public=[0, 1, 0])
    strategy = fccl.build(Hyper(), federation.problem)
    uploads = {"logits": np.array([[[8, 2]] * 3, [[0, 4]] * 3], np.float32)}
    state, _ = strategy.server_update(None, uploads, federation.cohort, 0, None)
    np.testing.assert_array_equal(state.consensus, [[4, 3]] * 3)
    np.testing.assert_array_equal(strategy.dispatch(state, None, None)["consensus"], [[[4, 3]] * 3] * 2)


@pytest.mark.parametrize("zoo", ["perceptron,linear", pytest.param("thin,linear", marks=pytest.mark.slow)])
def test_the_frozen_teacher_is_the_client_after_its_first_round(engine, zoo):
    one = engine("fccl", zoo, hyper=Hyper(private_epochs=3))
    progress, frozen = one.init(), {}
    for _ in range(3):
        before = set(np.flatnonzero(np.asarray(progress.memory.trained)))
        progress, _ = one.run(progress, 1)
        memory = jax.tree.map(np.array, progress.memory)
        take = lambda tree, client: jax.tree.map(lambda leaf: leaf[client], tree)
        for client in np.flatnonzero(memory.trained):
            if client not in before:
                frozen[client] = take(memory.model, client)
            jax.tree.map(np.testing.assert_array_equal, take(memory.frozen, client), frozen[client])
    assert np.isfinite(np.asarray(progress.server.consensus)).all()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_without_its_terms_it_is_local_only(engine, close, network):
    without = Hyper(public_epochs=0, teachers=0.0, private_epochs=2)
    alone, one = engine("local", network), engine("fccl", network, hyper=without)
    expected, _ = alone.run(alone.init(), 2)
    progress, _ = one.run(one.init(), 2)
    close(progress.memory.model, expected.memory.model)
