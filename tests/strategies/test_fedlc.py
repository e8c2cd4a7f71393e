"""FedLC against its equations, and its special cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import fedavg, fedlc
from fedjax_mr.strategies.fedlc import Hyper


@pytest.mark.slow  # quick: the tests by hand
def test_two_rounds_equal_the_equations(transcription):
    tau = 0.8
    by_hand = transcription("fedlc", Hyper(tau=tau))
    model = by_hand.read(by_hand.progress.server.model)
    absent = 0

    def loss(weights, i):
        labels = by_hand.y[i].tolist()
        present = sorted(set(labels))
        logits = by_hand.head(weights, by_hand.features(weights, by_hand.x[i]))[:, present]
        lowered = logits - by_hand.torch.tensor([tau * labels.count(c) ** -0.25 for c in present])
        within = by_hand.torch.tensor([present.index(label) for label in labels])
        return by_hand.torch.nn.functional.cross_entropy(lowered, within)

    for clients in by_hand.rounds(2):
        absent += sum(len(set(by_hand.y[i].tolist())) < 3 for i in clients)
        trained = [by_hand.train(model, i, loss=lambda w, i=i: loss(w, i)) for i in clients]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)
    assert absent > 0  # somebody lacked a class


def test_margins_are_alike_where_counts_are_and_absent_classes_leave_at_every_tau():
    @jax.jit
    def of(tau):
        margins = fedlc.margins(jnp.array([16, 1, 0, 16]), tau)
        log_total, shares = jax.value_and_grad(jax.nn.logsumexp)(jnp.array([1.0, 2.0, 3.0, 4.0]) - margins)
        return margins, log_total, shares

    for tau in (0.5, 0.0):
        margins, log_total, shares = jax.device_get(of(tau))
        np.testing.assert_allclose(margins[[0, 1, 3]], [tau / 2, tau, tau / 2])
        assert shares[2] == 0 and np.isfinite(log_total) and shares.sum() == pytest.approx(1)


def test_a_flipped_label_of_an_absent_class_costs_a_usual_loss():
    """Two samples of a client without class 2; an attack has changed the second label to 2."""
    logits, labels = jnp.array([[1.0, 2.0, 3.0]] * 2), jnp.array([0, 2])
    margin = fedlc.margins(jnp.array([16, 1, 0]), 0.8)
    lowered = np.asarray(fedlc.calibrated(logits, labels, margin=margin, tau=0.8))
    np.testing.assert_allclose(lowered[:, :2], [[1 - 0.4, 2 - 0.8]] * 2, rtol=1e-6)
    assert lowered[0, 2] < -1e20  # excluded from the softmax of the other sample
    assert lowered[1, 2] == pytest.approx(3 - 0.8)  # the margin of one sample


@pytest.mark.slow
def test_with_equal_counts_it_is_fedavg(federation, close):
    """A shift of all logits changes nothing."""
    known = federation("linear")
    problem, data = known.problem, known.client(1)
    equal = dataclasses.replace(problem, label_counts=jnp.full_like(problem.label_counts, 4))

    @jax.jit
    def trained(key):
        strategies = fedlc.build(Hyper(tau=0.8), equal), fedavg.build(fedavg.Hyper(), problem)
        sent = {"model": problem.model.init(key)}
        return [each.client_update(sent, None, data, jnp.int32(0), key)[0]["model"] for each in strategies]

    close(*trained(known.key))


def test_a_client_lowers_each_logit_by_tau_over_the_fourth_root_of_its_own_count(tiny):
    """Client 1 has 16 samples of class 0, one of class 1, and none of class 2, which leaves the softmax."""
    problem = tiny.problem(classes=3, counts=[[1, 1, 1], [16, 1, 0], [9, 9, 9]])
    data, start = tiny.client(client_id=1), {"model": tiny.model(np.zeros((2, 3)))}
    upload, _, metrics = tiny.train_in_one_program(fedlc.build(Hyper(0.8), problem), start, data=data)
    share = 1 / (1 + np.exp(0.4 - 0.8))  # of the label, class 0
    assert float(metrics.loss) == pytest.approx(-np.log(share))
    np.testing.assert_allclose(tiny.head(upload["model"]), [[1 - share, share - 1, 0], [0, 0, 0]], rtol=1e-5)
