"""FML against its equations, and its special cases."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.strategies import fedavg, fml
from fedjax_mr.strategies.fml import Hyper
from fedjax_mr.strategies.parts import GlobalModel


@pytest.mark.slow  # quick: the tests by hand
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


@pytest.mark.parametrize("variant, mean", [("original", 6.0), ("authors", 8.0)])
def test_the_own_network_and_the_meme_learn_from_each_other_and_only_the_meme_is_sent(
    tokens, federation, monkeypatch, variant, mean
):
    """Training turns the own network 2 into 5 and the meme 3 into 7. Clients with 3 and 1 samples send 10 and 2."""
    problem, seen = federation("linear,perceptron").problem, {}

    def train_pair(models, setting, pair, data, key, *, weights):
        seen.update(models=models, pair=pair, weights=weights)
        return Pair(tokens.point(5), tokens.point(7)), None

    monkeypatch.setattr(mutual, "train_pair", train_pair)
    strategy = fml.build(Hyper(alpha=0.25, beta=0.875, variant=variant), problem)
    upload, memory, _ = strategy.client_update({"model": tokens.point(3)}, tokens.point(2), None, 0, None)
    assert upload == {"model": tokens.point(7)} and memory == tokens.point(5)
    assert seen["pair"] == (tokens.point(2), tokens.point(3))
    assert seen["models"].first is problem.model and seen["models"].second is problem.model.networks[0]
    expected = Pair(Weights(0.25, 0.75), Weights(0.875, 0.125))
    assert seen["weights"] == (Pair(Weights(1, 1), Weights(1, 1)) if variant == "authors" else expected)
    uploads = {"model": {"params": {"w": np.array([10, 2], np.float32)}}}
    state, _ = strategy.server_update(GlobalModel(None), uploads, tokens([[0, 1, 1], [1]]).cohort, 0, None)
    assert float(state.model["params"]["w"]) == pytest.approx(mean)
    assert strategy.personal_model(strategy.personal_part(state, 0), memory, None, None) == memory


def test_the_deployed_model_is_the_meme_which_is_network_0(federation):
    network = federation("linear,perceptron").problem.model
    strategy = fml.build(Hyper(), federation("linear,perceptron").problem)
    meme = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), network.networks[0].shapes())
    deployed = strategy.global_model(GlobalModel(meme))
    assert int(network.architecture(deployed)) == 0
    assert float(np.sum(deployed["params"]["vector"])) == network.networks[0].num_parameters()


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
