"""FML against its equations, and its special cases."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies import fedavg
from fedjax_mr.strategies.fml import Hyper


@pytest.mark.parametrize("variant", ["original", pytest.param("authors", marks=pytest.mark.slow)])
def test_two_rounds_equal_the_equations(transcription, variant):
    """Both networks are written as one list of weights, whose halves move at once."""
    by_hand = transcription("fml", Hyper(alpha=0.3, beta=0.8, variant=variant))
    functional = by_hand.torch.nn.functional
    supervised, mutual = ((1.0, 1.0), (1.0, 1.0)) if variant == "authors" else ((0.3, 0.8), (0.7, 0.2))
    model = by_hand.read(by_hand.progress.server.model)
    personal = {i: by_hand.read(trees.take(by_hand.progress.memory, i)) for i in range(4)}

    def logs(weights, client):
        logits = by_hand.head(weights, by_hand.features(weights, by_hand.x[client]))
        return functional.log_softmax(logits, dim=1)

    def loss(weights, client):
        p, q = logs(weights[:4], client), logs(weights[4:], client)
        divergence = lambda own, other: (other.exp().detach() * (other.detach() - own)).sum(dim=1).mean()
        return (
            supervised[0] * functional.nll_loss(p, by_hand.y[client])
            + mutual[0] * divergence(p, q)
            + supervised[1] * functional.nll_loss(q, by_hand.y[client])
            + mutual[1] * divergence(q, p)
        )

    for clients in by_hand.rounds(2):
        memes = []
        for i in clients:
            trained = by_hand.train([*personal[i], *model], i, loss=lambda w, i=i: loss(w, i))
            personal[i] = trained[:4]
            memes.append(trained[4:])
        model = by_hand.mean(memes, by_hand.sizes_of(clients) if variant == "authors" else None)
        by_hand.check(by_hand.progress.server.model, model)
        for i, weights in personal.items():
            by_hand.check(trees.take(by_hand.progress.memory, i), weights)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["linear", "perceptron"])
def test_without_mutual_terms_it_is_local_and_fedavg_side_by_side(engine, close, network):
    federation = {"cohort": 6}  # everybody, so that all three train the same clients
    both = engine("fml", network, hyper=Hyper(alpha=1.0, beta=1.0), **federation)
    alone = engine("local", network, **federation)
    average = engine("fedavg", network, hyper=fedavg.Hyper(weights="uniform"), **federation)
    progress, _ = both.run(both.init(), 3)
    close(progress.memory, alone.run(alone.init(), 3)[0].memory.model)
    close(progress.server.model, average.run(average.init(), 3)[0].server.model)


@pytest.mark.slow
def test_personal_networks_of_different_architectures_and_one_that_is_sent(engine, sent):
    zoo = engine("fml", "linear,perceptron")
    progress, report = zoo.run(zoo.init(), 3)
    problem = zoo.constants.problem
    first = problem.model.networks[0]
    assert jax.tree.map(np.shape, progress.server.model) == jax.tree.map(lambda leaf: leaf.shape, first.shapes())
    assert progress.memory["architecture"].tolist() == problem.architectures.tolist() == [0, 1] * 3
    assert np.isfinite(float(report.train_loss))
    memes = problem.cohort_size * trees.num_bytes(first.shapes())
    assert sent(zoo) == (memes, memes, 0)
    deployed = zoo.deployed(progress)
    jax.tree.map(np.testing.assert_array_equal, problem.model.unpack(deployed, 0), progress.server.model)
