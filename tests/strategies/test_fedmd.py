"""FedMD: the consensus, the digest, and a client's first round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedmd
from fedjax_mr.strategies.fedmd import Hyper


@pytest.mark.parametrize("kind", ["mae", "mse", "kl"])
def test_where_all_agree_nothing_moves(kind):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    far = lambda z: jnp.sum(fedmd.difference(z, logits, kind=kind))
    assert far(logits) == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(far))(logits), 0.0, atol=1e-6)
    assert float(far(logits + jnp.array([[0.0, 1.0, 0.0]]))) > 0.01


@pytest.mark.parametrize("zoo", ["linear,perceptron", pytest.param("thin,perceptron", marks=pytest.mark.slow)])
def test_the_consensus_is_the_mean_of_the_rounds_clients(engine, zoo):
    one = engine("fedmd", zoo, hyper=Hyper(subset=6, public_epochs=1, private_epochs=2))
    problem, progress = one.constants.problem, one.init()
    rows = np.asarray(progress.server.next_rows)
    before = jax.tree.map(np.array, progress.memory)
    progress, _ = one.run(progress, 1)
    server, memory = progress.server, progress.memory
    clients = np.flatnonzero(np.asarray(memory.trained))
    assert len(clients) == problem.cohort_size and not before.trained.any()
    np.testing.assert_array_equal(server.rows, rows)
    assert len(set(rows.tolist())) == 6
    x = gather(problem.public, rows)
    apply, models = jax.jit(problem.model.apply), jax.device_get(memory.model)
    logits = [apply(trees.take(models, client), x) for client in clients]
    np.testing.assert_allclose(server.consensus, np.mean(logits, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_digest_of_a_far_consensus_pulls(engine):
    """The same round with two consensuses: each pulls the clients' outputs to its side."""
    one = engine("fedmd", "perceptron", cohort=6, hyper=Hyper(digest_epochs=5, digest_loss="mse"))
    start, _ = one.run(one.init(), 1)
    start = jax.tree.map(np.array, start)

    def outputs(shift):
        consensus = start.server.consensus + shift * np.array([1.0, -1.0, 0.0], np.float32)
        progress = one.place(start._replace(server=start.server._replace(consensus=consensus)))
        return np.asarray(one.run(progress, 1)[0].server.consensus)

    gap = (outputs(9.0) - outputs(-9.0)).mean(axis=0)
    assert gap[0] > 0.1 and gap[1] < -0.1


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "thin"])
def test_without_public_epochs_it_is_local_only(engine, close, network):
    alone, one = (
        engine("local", network),
        engine("fedmd", network, hyper=Hyper(public_epochs=0, digest_epochs=0, private_epochs=2)),
    )
    expected, _ = alone.run(alone.init(), 2)
    progress, _ = one.run(one.init(), 2)
    close(progress.memory.model, expected.memory.model)


def test_labels_are_needed(federation):
    problem = federation("thin").problem
    for public in (None, problem.public._replace(y=None)):
        with pytest.raises(UserError, match="labelled public data"):
            fedmd.build(Hyper(), dataclasses.replace(problem, public=public))
