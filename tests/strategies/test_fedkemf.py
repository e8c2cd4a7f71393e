"""FedKEMF: only the knowledge network travels, and the server distils the ensemble."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from fedjax_mr.client import local, mutual
from fedjax_mr.client.mutual import Pair, Weights
from fedjax_mr.client.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedkemf
from fedjax_mr.strategies.fedkemf import Hyper, Memory, State


def test_only_knowledge_networks_travel(engine, sent):
    assert sent(engine("fedkemf", "linear,thin")) == (3 * 4 * (16 * 3 + 3), 3 * 4 * (16 * 3 + 3), 0)


@pytest.mark.slow  # quick: the tests by hand
@pytest.mark.parametrize("variant", ["original", pytest.param("authors", marks=pytest.mark.slow)])
def test_the_server_learns_the_ensemble(engine, variant):
    """Outputs after distillation are nearer to the mean of the clients' probabilities than the network before."""
    one = engine("fedkemf", "linear,perceptron", hyper=Hyper(server_epochs=40, server_lr=0.02, variant=variant))
    public, small = one.constants.problem.public, one.constants.problem.model.networks[0]
    x = gather(public, np.arange(10))
    softmax = jax.jit(lambda variables: jax.nn.softmax(small.apply(variables, x)))
    probabilities = lambda variables: np.asarray(softmax(variables))
    state = jax.tree.map(np.array, one.init().server)
    uploads = {"knowledge": jax.jit(jax.vmap(small.init))(jax.random.split(jax.random.key(1), 3))}
    uploads = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), uploads)
    update = jax.jit(lambda state, uploads: one.strategy.server_update(state, uploads, None, 0, jax.random.key(2))[0])
    after = update(state, uploads)
    if variant == "original":
        target = np.mean(
            [probabilities(jax.tree.map(lambda leaf, i=i: leaf[i], uploads["knowledge"])) for i in range(3)], axis=0
        )
        far = lambda variables: float((target * np.log(target / probabilities(variables))).sum(axis=1).mean())
        assert far(after.knowledge) < 0.3 * far(state.knowledge)
    else:
        right = lambda variables: probabilities(variables)[np.arange(10), public.y].mean()
        assert right(after.knowledge) > right(state.knowledge) + 0.05


def test_the_clients_differences_are_divergences_or_mean_squares():
    assert fedkemf.squared_difference(np.array([[4.0, 1.0]]), np.array([[1.0, 2.0]])).tolist() == [(9 + 1) / 2]


@pytest.mark.parametrize("variant", ["original", "authors"])
def test_a_client_trains_its_network_and_the_knowledge_network_which_learn_from_each_other(
    tokens, monkeypatch, variant
):
    federation, seen = tokens([[0, 1], [1]], public=[0, 1]), types.SimpleNamespace()

    def train_pair(models, setting, pair, data, key, **options):
        seen.models, seen.pair, seen.options = models, pair, options
        return Pair(tokens.point(5), tokens.point(7)), None

    monkeypatch.setattr(mutual, "train_pair", train_pair)
    strategy = fedkemf.build(Hyper(variant=variant), federation.problem)
    memory = Memory(tokens.point(2))
    upload, kept, _ = strategy.client_update({"knowledge": tokens.point(3)}, memory, None, 0, None)
    assert seen.pair == (tokens.point(2), tokens.point(3))
    assert upload == {"knowledge": tokens.point(7)} and kept.model == tokens.point(5)
    assert seen.options["weights"] == Pair(Weights(1, 1), Weights(1, 1))
    expected = fedkemf.squared_difference if variant == "authors" else None  # that of the task
    assert seen.options["difference"] is expected


def test_the_knowledge_network_is_the_chosen_one(federation):
    problem = federation("linear,perceptron").problem
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(strategy.init, jax.random.key(0))))
        for strategy in (fedkemf.build(Hyper(knowledge=number), problem) for number in range(2))
    ]
    assert sizes == [network.num_parameters() for network in problem.model.networks]


@pytest.mark.parametrize("variant", ["original", "authors"])
def test_the_server_distils_the_mean_probabilities_into_its_own_network(tokens, trainings, monkeypatch, variant):
    """For the second public sample, clients with probabilities 3/4 and 1/4 of class 0 make (1/2, 1/2)."""
    federation = tokens([[0, 1], [1]], public=[0, 1, 1])
    strategy = fedkemf.build(
        Hyper(variant=variant, server_epochs=4, server_lr=0.25, server_batch=2), federation.problem
    )
    table = np.zeros((2, 3, 2), np.float32)
    table[:, 1, 0] = np.log(3), -np.log(3)
    table[:, 2, 0] = np.log(9), 0  # probabilities 9/10 and 1/2
    monkeypatch.setattr(local, "outputs", lambda model, knowledge, public, rows: knowledge["params"]["w"][rows])
    uploads = {"knowledge": {"params": {"w": table}}}
    with jax.disable_jit():
        state, _ = strategy.server_update(State(tokens.point(2)), uploads, None, 0, None)
    (training,) = trainings
    assert training.start == tokens.point(2) and state.knowledge == tokens.point(3)
    setting = training.setting
    assert (setting.rule, setting.epochs, setting.batch_size, float(setting.lr)) == ("adam", 4, 2, 0.25)
    student = federation.model([[np.log(3), 0], [np.log(3), 0]])["params"]
    batch = federation.batch(0, 1, labels=[1, 0], position=[1, 2])
    value = float(training.loss(student, {}, batch, jax.random.key(0))[0])
    targets = np.array([[0.5, 0.5], [0.7, 0.3]])
    if variant == "original":
        expected = (targets * np.log(targets / [0.75, 0.25])).sum(axis=1).mean()
    else:
        warm = np.exp(np.log(3) / 20) / (1 + np.exp(np.log(3) / 20))
        gaps = np.square([warm, 1 - warm] - targets).mean(axis=1)
        expected = (0.5 * -np.log([0.25, 0.75]) + 0.5 * 20**2 * gaps).mean()
    assert value == pytest.approx(expected, rel=1e-4)


def test_bad_input(federation):
    problem = federation("thin").problem
    with pytest.raises(UserError, match="public_share"):
        fedkemf.build(Hyper(), dataclasses.replace(problem, public=None))
    with pytest.raises(UserError, match="labelled"):
        fedkemf.build(Hyper(variant="authors"), dataclasses.replace(problem, public=problem.public._replace(y=None)))
    with pytest.raises(UserError, match=r"hyper.knowledge=.* must be below the number of networks"):
        fedkemf.build(Hyper(knowledge=1), problem)
