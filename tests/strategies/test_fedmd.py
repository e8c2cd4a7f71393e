"""FedMD: the consensus, the digest, and a client's first round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedmd
from fedjax_mr.strategies.fedmd import Hyper, State
from fedjax_mr.strategies.parts import LastModel
from fedjax_mr.tasks import Classification

TASK = Classification(width=3)


@pytest.mark.parametrize("kind", ["mae", "mse", "kl"])
def test_where_all_agree_nothing_moves(kind):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    far = lambda z: jnp.sum(fedmd.difference(TASK, z, logits, kind=kind))
    assert far(logits) == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(far))(logits), 0.0, atol=1e-6)
    assert float(far(logits + jnp.array([[0.0, 1.0, 0.0]]))) > 0.01


@pytest.mark.slow  # quick: the tests by hand
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


def test_the_digests_losses_are_means_over_classes_or_the_divergence_of_the_consensus():
    """Differences of (3, -1); and KL of (3/4, 1/4) from (1/2, 1/2) is 3/4 log 3/2 + 1/4 log 1/2."""
    logits, target = jnp.array([[4.0, 1.0]]), jnp.array([[1.0, 2.0]])
    assert float(fedmd.difference(TASK, logits, target, kind="mae")[0]) == (3 + 1) / 2
    assert float(fedmd.difference(TASK, logits, target, kind="mse")[0]) == (9 + 1) / 2
    far = fedmd.difference(TASK, jnp.zeros((1, 2)), jnp.array([[np.log(3), 0.0]], jnp.float32), kind="kl")
    assert float(far[0]) == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5), rel=1e-5)


def test_a_client_first_learns_public_labels_and_later_digests_the_consensus_before_its_own_samples(
    tokens, trainings, monkeypatch
):
    """Five public samples, of which two are drawn: rows 3 and 1 in this round, rows 0 and 4 in the next."""
    federation = tokens([[0, 1], [1]], public=[0, 1, 0, 1, 1], epochs=2)
    hyper = Hyper(subset=2, public_epochs=7, private_epochs=8, digest_epochs=9, digest_batch=4)
    strategy, asked = fedmd.build(hyper, federation.problem), []
    monkeypatch.setattr(local, "outputs", lambda model, variables, public, rows: asked.append((variables, rows)) or 5)
    payload = {"rows": np.array([3, 1]), "next_rows": np.array([0, 4])}
    payload |= {"consensus": np.array([[3, 5], [-2, 0]], np.float32)}
    found = {}
    for trained in (False, True):
        trainings.clear()
        memory = LastModel(tokens.point(0), np.bool_(trained))
        upload, kept, _ = strategy.client_update(payload, memory, federation.client(0), 0, jax.random.key(0))
        public, private = trainings
        assert upload == {"logits": 5} and kept.model == tokens.point(2) and bool(kept.trained)
        assert public.start == tokens.point(0) and private.start == tokens.point(1)
        assert asked[-1][0] == kept.model and asked[-1][1].tolist() == [0, 4]
        rows = public.data.index[: int(public.data.size)].tolist()
        found[trained] = rows, int(public.setting.epochs), int(private.setting.epochs), public.setting.batch_size
        batch = federation.batch(3, 4, labels=[1, 0], position=[1, 0])
        logits = federation.model([[0, 0]] * 3 + [[np.log(3), 0], [1, 1]])
        found[trained] += (float(public.loss(logits["params"], {}, batch, jax.random.key(0))[0]),)
    assert found[False][:4] == ([0, 1, 2, 3, 4], 7, 8, 4) and found[True][:4] == ([3, 1], 9, 2, 4)
    assert found[False][4] == pytest.approx((np.log(4) + np.log(2)) / 2, rel=1e-5)  # of the labels
    # The second row (-2, 0) belongs to position 1, which has logits (log 3, 0); the first to (1, 1).
    assert found[True][4] == pytest.approx(((np.log(3) + 2) / 2 + (2 + 4) / 2) / 2, rel=1e-5)


def test_the_consensus_is_the_mean_of_the_logits_and_every_round_has_other_public_samples(tokens):
    federation = tokens([[0, 1], [1]], public=[0, 1] * 20)
    strategy = fedmd.build(Hyper(subset=8), federation.problem)
    rows, later = np.arange(8, dtype=np.int32), np.arange(8, 16, dtype=np.int32)
    logits = np.stack([np.full((8, 2), number, np.float32) for number in (2, 8)])
    update = lambda key: strategy.server_update(
        State(rows, later, None), {"logits": logits}, federation.cohort, 0, jax.random.key(key)
    )[0]
    one, other = update(0), update(1)
    np.testing.assert_array_equal(one.consensus, np.full((8, 2), 5))  # not weighted by samples
    np.testing.assert_array_equal(one.rows, later)
    assert len(set(one.next_rows.tolist())) == 8 and one.next_rows.tolist() != other.next_rows.tolist()
    assert set(one.next_rows.tolist()) != set(later.tolist())


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
