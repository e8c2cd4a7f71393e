"""FedNTD against its equations, and its special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.strategies import fedntd
from fedjax_mr.strategies.fedntd import Hyper


@pytest.mark.slow  # quick: the tests by hand
def test_two_rounds_equal_the_equations(transcription):
    beta, temperature = 0.7, 2.0
    by_hand = transcription("fedntd", Hyper(beta=beta, temperature=temperature))
    functional = by_hand.torch.nn.functional
    model = by_hand.read(by_hand.progress.server.model)

    def without_label(weights, i):
        logits = by_hand.head(weights, by_hand.features(weights, by_hand.x[i]))
        rows = [[c for c in range(logits.shape[1]) if c != y] for y in by_hand.y[i].tolist()]
        return logits.gather(1, by_hand.torch.tensor(rows)) / temperature

    def loss(weights, i, received):
        teacher = functional.softmax(without_label(received, i), dim=1)
        student = functional.log_softmax(without_label(weights, i), dim=1)
        divergence = functional.kl_div(student, teacher, reduction="batchmean")
        return by_hand.cross_entropy(weights, i) + beta * temperature**2 * divergence

    for clients in by_hand.rounds(2):
        trained = [by_hand.train(model, i, loss=lambda w, i=i, r=model: loss(w, i, r)) for i in clients]
        model = by_hand.mean(trained, by_hand.sizes_of(clients))
        by_hand.check(by_hand.progress.server.model, model)


@pytest.mark.slow
def test_without_distillation_it_is_fedavg(engine, close):
    free, average = engine("fedntd", hyper=Hyper(beta=0.0)), engine("fedavg")
    close(free.run(free.init(), 4)[0].server.model, average.run(average.init(), 4)[0].server.model)


def test_the_labels_logit_says_nothing_and_two_classes_leave_nothing():
    rng = np.random.default_rng(0)
    teacher, student = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    labels = np.array([0, 1, 2, 0], np.int32)

    @jax.jit
    def of(teacher, student, labels):
        total = lambda student: jnp.sum(fedntd.not_true_divergence(teacher, student, labels, 2.0))
        return *jax.value_and_grad(total)(student), fedntd.not_true_divergence(teacher, student, labels, 2.0)

    value, gradient, rows = jax.device_get(of(teacher, student, labels))
    assert rows.shape == (4,) and rows.min() > 0
    np.testing.assert_array_equal(gradient[np.arange(4), labels], 0)
    other = teacher + 5 * np.eye(3, dtype=np.float32)[labels]
    np.testing.assert_allclose(of(other, student, labels)[0], value, rtol=1e-6)
    value, gradient, _ = of(teacher, teacher, labels)  # the first step of a round
    assert float(value) == 0 and float(jnp.abs(gradient).max()) < 1e-7
    two = fedntd.not_true_divergence(teacher[:, :2], student[:, :2], labels % 2, 2.0)
    np.testing.assert_array_equal(two, 0)


def test_the_loss_compares_the_other_classes_of_the_received_and_the_trained_network(tiny):
    """In the first step both are equal; in the second one the others' logits of x = (1, 0) differ by the first step."""
    beta, tau, lr = 2.0, 0.5, 3.0
    start = np.array([[0.0, np.log(2), 0.0], [0.0, 0.0, 0.0]])  # shares 1/4, 2/4, 1/4
    once, twice = (
        tiny.train_in_one_program(
            fedntd.build(Hyper(beta, tau), tiny.problem(steps=steps, lr=lr, classes=3)), {"model": tiny.model(start)}
        )
        for steps in (1, 2)
    )
    assert float(once[2].loss) == pytest.approx(np.log(4))
    logits = tiny.head(once[0]["model"])[0]
    np.testing.assert_allclose(logits, start[0] + lr * np.array([3 / 4, -2 / 4, -1 / 4]), rtol=1e-5)
    shares = lambda z: np.exp(z / tau) / np.exp(z / tau).sum()
    teacher, student = shares(start[0, 1:]), shares(logits[1:])
    divergence = np.sum(teacher * np.log(teacher / student))
    second = -logits[0] + np.log(np.exp(logits).sum()) + beta * tau**2 * divergence
    assert float(twice[2].loss) == pytest.approx(np.log(4) + second, rel=1e-5)
    assert divergence > 0.1
