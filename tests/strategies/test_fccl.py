"""FCCL: the loss on public data, and the two frozen teachers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import fccl
from fedjax_mr.strategies.fccl import Hyper


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
