"""Approximations of contributions: the rules on rounds that a hand can follow, and the uploads of a real run."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.trials import OneTrial
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.testing import federations
from fedjax_mr.whatif import uploads
from fedjax_mr.whatif.approximations import RULES, Round, guided
from fedjax_mr.whatif.coalitions import random_orders, rotations

ROUNDS, COHORT = 2, 3


def round_of(value, cohort, **numbers):
    """A round in which each subset of the cohort has a value."""
    every = (frozenset(each) for size in range(len(cohort) + 1) for each in itertools.combinations(cohort, size))
    zeros = dict.fromkeys(cohort, 0.0)
    numbers = {"influence": zeros, "cosine": zeros, "local_loss": zeros} | numbers
    return Round({each: float(value(each)) for each in every}, **numbers)


GLOVES = round_of(lambda each: 3 in each and len(each) > 1, (0, 1, 3))  # of clients 0, 1: left ones, of 3 a right one
ADDED = round_of(lambda each: 5 + sum(each), (1, 2, 3))


def test_fedsv_is_the_sum_of_the_rounds_shapley_values():
    np.testing.assert_allclose(RULES["fedsv"]([GLOVES, ADDED], 4), [1 / 6, 1 / 6 + 1, 2, 2 / 3 + 3])


def test_leave_one_out_of_each_round():
    np.testing.assert_allclose(RULES["round_leave_one_out"]([GLOVES, ADDED], 4), [0, 1, 2, 1 + 3])


def test_numbers_of_clients():
    """Inner products are added. Cosines and losses are means over the rounds of a client."""
    one, two = {0: 1.0, 1: -2.0}, {1: 4.0, 2: 0.5}
    rounds = [round_of(len, (0, 1), influence=one, cosine=one, local_loss=one)]
    rounds.append(round_of(len, (1, 2), influence=two, cosine=two, local_loss=two))
    np.testing.assert_allclose(RULES["influence"](rounds, 4), [1, 2, 0.5, 0])
    for rule in ("cosine", "local_loss"):
        np.testing.assert_allclose(RULES[rule](rounds, 4), [1, 1, 0.5, 0])


def test_gtg_shapley_leaves_out_rounds_and_ends_of_orders_that_change_little():
    still = round_of(lambda each: 0.009 * len(each) / 3, (0, 1, 2))
    np.testing.assert_array_equal(RULES["gtg_shapley"]([still], 3), [0, 0, 0])
    # Client 0 brings all but 0.0005 of the gain, so an order ends with it.
    first = round_of(lambda each: 1.0 * (0 in each) + 0.0005 * (len(each) == 3), (0, 1, 2))
    found = guided(first.values, [0, 1, 2], 3, np.random.default_rng(0))
    np.testing.assert_array_equal(found[1:], [0, 0])
    assert 1 <= found[0] <= 1.0005


def test_gtg_shapley_is_a_mean_of_orders_that_each_client_begins_equally_often():
    """A transcription with the same random orders, without truncation: the values are far apart."""
    random = np.random.default_rng(5)
    each = round_of(lambda some: random.normal(), (0, 2, 3))
    generator, gains = np.random.default_rng(0), []
    while True:
        for first in (0, 2, 3):
            order = [first, *generator.permutation([client for client in (0, 2, 3) if client != first])]
            gain = np.zeros(4)
            for size, client in enumerate(order, 1):
                gain[client] = each.values[frozenset(order[:size])] - each.values[frozenset(order[: size - 1])]
            gains.append(gain)
        means = [np.mean(gains[: number + 1], axis=0) for number in range(len(gains))]
        errors = [np.mean(abs(mean - means[-1]) / (abs(means[-1]) + 1e-12)) for mean in means[-10:]]
        if len(gains) > 30 and max(errors) <= 0.05:
            break
    np.testing.assert_allclose(RULES["gtg_shapley"]([each], 4), means[-1])


def test_gtg_shapley_draws_more_than_thirty_orders_even_if_all_agree():
    each, generator, other = round_of(sum, (1, 2, 3)), np.random.default_rng(0), np.random.default_rng(0)
    np.testing.assert_allclose(guided(each.values, [1, 2, 3], 4, generator), [0, 1, 2, 3])
    for _ in range(11):
        for first in (1, 2, 3):
            other.permutation([client for client in (1, 2, 3) if client != first])
    assert generator.random() == other.random()


def test_rotations_give_each_client_each_place():
    found = rotations(random_orders(4, 6))
    assert found.shape == (8, 4)
    for place in range(4):
        np.testing.assert_array_equal(np.bincount(found[:, place]), [2, 2, 2, 2])


# --- from the uploads of a run


@pytest.fixture(scope="module")
def simulator():
    federated = dataclasses.replace(federations.federated(), public=None)
    return federations.SharingSimulator(
        STRATEGIES["fedavg"].build,
        federations.network_of("linear"),
        federated,
        cohort=COHORT,
        local=fmr.local.setting(lr=0.05, batch_size=4, epochs=2),
        layout=fmr.Layout(devices=1),
    )


@pytest.fixture(scope="module")
def result(simulator, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whatif")
    options = {"coalitions": [], "rounds": ROUNDS, "metric": "loss", "approximations": True, "folder": folder}
    found = fmr.what_if(simulator, **options)
    with pytest.MonkeyPatch.context() as patch:  # a second call reads the files
        patch.setattr(uploads, "_run", None)
        again = fmr.what_if(simulator, **options)
    assert again.rebuilt.keys() == found.rebuilt.keys() and len(found.rebuilt) == ROUNDS * 2**COHORT
    assert again.table() == found.table() and "fedsv" in found.table()
    return found


def test_the_numbers_follow_from_the_uploads_as_a_hand_computes_them(simulator, result):
    """With FedAvg: means weighted by the numbers of samples, and the gradient of a softmax of a linear map."""
    federated = simulator.federated
    rounds = Rounds(simulator.rounds.constants, simulator.axis, trial=OneTrial(simulator.axis, code=simulator.code))
    progress = rounds.init()
    test = (federated.dataset.test_x - federated.dataset.mean) / federated.dataset.std
    test, labels = test.reshape(len(test), -1), federated.dataset.test_y

    def loss(params, x, y):
        logits = x @ params["kernel"] + params["bias"]
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return -np.log(chances[np.arange(len(y)), y]).mean(), chances

    parameters = lambda model: next(each for each in jax.tree.leaves(model["params"], is_leaf=lambda t: "bias" in t))
    flat = lambda params: np.concatenate([np.ravel(params["bias"]), np.ravel(params["kernel"])])
    for number in range(ROUNDS):
        before = jax.device_get(parameters(progress.server.model))
        progress, _, cohort, sent = rounds.observed(progress)
        sent, sizes = parameters(sent["model"]), np.asarray(cohort.sizes, float)
        rows = {each: row for (_, round, each), row in result.rebuilt.items() if round == number}
        assert len(rows) == 2**COHORT
        for subset in itertools.product([0, 1], repeat=COHORT):
            weights = sizes * subset
            mean = lambda leaf, weights=weights: np.tensordot(weights / weights.sum(), leaf, axes=1)
            params = {name: mean(leaf) for name, leaf in sent.items()} if any(subset) else before
            row = rows[frozenset(cohort.ids[np.array(subset, bool)].tolist())]
            assert row["loss"] == pytest.approx(loss(params, test, labels)[0], rel=1e-4)
        error = loss(before, test, labels)[1] - np.eye(federated.dataset.num_classes)[labels]
        slope = flat({"bias": error.mean(axis=0), "kernel": test.T @ error / len(test)})
        changes = np.stack(
            [flat({name: leaf[place] for name, leaf in sent.items()}) - flat(before) for place in range(3)]
        )
        step = sizes / sizes.sum() @ changes
        for place, client in enumerate(cohort.ids.tolist()):
            row, change = rows[frozenset({client})], changes[place]
            assert row["influence"] == pytest.approx(-slope @ change * sizes[place] / sizes.sum(), rel=1e-3, abs=1e-6)
            assert row["cosine"] == pytest.approx(
                change @ step / np.linalg.norm(change) / np.linalg.norm(step), rel=1e-3, abs=1e-5
            )
            own = federated.train.rows(client)
            x, y = (federated.dataset.x[own] - federated.dataset.mean) / federated.dataset.std, federated.dataset.y[own]
            of_client = loss(before, x.reshape(len(x), -1), y)[0] * np.sqrt(len(x))
            assert row["local_loss"] == pytest.approx(of_client, rel=1e-4)


def test_the_sum_over_the_clients_is_the_gain_of_the_run(result):
    everyone = range(len(result.names))
    gain = result.value((), "loss") - result.value(everyone, "loss")
    assert gain > 0
    np.testing.assert_allclose(result.contributions("loss")["fedsv"].sum(axis=1), gain, rtol=1e-4)


def test_who_cannot_be_approximated(simulator, monkeypatch):
    hyper = federations.default_hyper("fedmr")
    several = federations.SharingSimulator(
        STRATEGIES["fedmr"].build,
        federations.network_of("linear"),
        simulator.federated,
        cohort=COHORT,
        hyper=hyper,
        layout=fmr.Layout(devices=1),
    )
    with pytest.raises(UserError, match="needs a method with one global model, such as fedavg"):
        fmr.what_if(several, coalitions=[], rounds=1, approximations=True)
    monkeypatch.setattr(uploads, "MOST_CLIENTS", 2)
    with pytest.raises(UserError, match="3 clients have too many: at most 2"):
        fmr.what_if(simulator, coalitions=[], rounds=1, approximations=True)
