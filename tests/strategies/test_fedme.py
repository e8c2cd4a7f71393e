"""FedMe: the running example of two rounds and five clients, and what can go wrong in its parts."""

import dataclasses

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.mutual import Weights
from fedjax_mr.client.samples import Samples, one_client
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, Zoo
from fedjax_mr.strategies import Cohort, fedme


class Number(nn.Module):
    """A network that is one number, kept ``count`` times: five of them differ in their size alone."""

    count: int

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        theta = self.param("theta", nn.initializers.zeros, (self.count,))
        return jnp.broadcast_to(theta[:1], (x.shape[0], 3))


ZOO = Zoo.of([Model(Number(count), (4, 4, 1), name=f"size{count}") for count in range(1, 6)])


draw_partners = jax.jit(fedme.draw_partners)
pack = jax.jit(ZOO.pack, static_argnums=1)


def stacked(values, architectures):
    """Models whose number of parameters follows from the architecture."""
    each = [
        pack({"params": {"theta": np.full(a + 1, v, np.float32)}}, int(a))
        for v, a in zip(values, architectures, strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


@pytest.fixture(scope="module")
def problem(federation):
    """Five clients, all in every round, that start with the five networks."""
    problem = federation(sizes=(2, 2, 2, 2, 2), cohort=5).problem
    return dataclasses.replace(problem, model=ZOO, architectures=jnp.arange(5, dtype=jnp.int32))


def test_the_running_example(problem):
    """Every number of the table: two rounds in which clients train by adding their number (from 1) to a model."""
    strategy = fedme.build(fedme.Hyper(upload_first=True), problem)
    targets, steps = np.array([10, 25, 20, 60, 55.0]), np.arange(1, 6.0)
    start = jax.jit(strategy.init)(jax.random.key(0))
    update, aggregate = jax.jit(strategy.server_update), jax.jit(fedme.aggregate)
    state = start._replace(models=stacked([10, 20, 30, 40, 50.0], range(5)))
    cohort = Cohort(np.arange(5), np.full(5, 2))
    traffic = jax.jit(lambda *sent: strategy.traffic(None, *sent))
    expected = [
        dict(
            partners=[2, 1, 2, 5, 4], own=[11, 22, 33, 44, 55], received=[21, 12, 23, 54, 45],
            means=[11.5, 22, 33, 44.5, 54.5], chosen=[1, 2, 2, 5, 5],
            models=[11.5, 22, 22, 54.5, 54.5], up=15 + 29, down=14 + 15,
        ),
        dict(
            partners=[3, 1, 2, 5, 4], own=[12.5, 24, 25, 58.5, 59.5], received=[23, 13.5, 25, 58.5, 59.5],
            means=[13, 24.5, 24, 59, 59], chosen=[1, 2, 3, 4, 5],
            models=[13, 24.5, 24, 59, 59], up=15 + 30, down=15 + 15,
        ),
    ]  # fmt: skip
    for number, want in enumerate(expected):
        partners = np.array(want["partners"]) - 1
        values, kinds = value(state.models), np.asarray(state.models["architecture"])
        own, received = values + steps, values[partners] + steps
        np.testing.assert_array_equal(own, want["own"])
        np.testing.assert_array_equal(received, want["received"])
        takes = np.abs(received - targets) < np.abs(own - targets)
        np.testing.assert_array_equal(np.where(takes, partners, np.arange(5)) + 1, want["chosen"])
        uploads = {
            "model": stacked(own, kinds),
            "received": stacked(received, kinds[partners]),
            "partner": partners,
            "takes": takes,
        }
        means = aggregate(uploads["model"], uploads["received"], uploads["partner"])
        np.testing.assert_array_equal(value(means), want["means"])
        down, up, _ = traffic(state, uploads, cohort, jnp.int32(number)).num_bytes()
        assert (up, down) == (4 * want["up"] + 25, 4 * want["down"] + 20)
        state, metrics = update(state, uploads, cohort, jnp.int32(number), jax.random.key(1))
        np.testing.assert_array_equal(value(state.models), want["models"])
        np.testing.assert_array_equal(state.models["architecture"], [0, 1, 1, 4, 4])  # two networks are extinct
        assert float(metrics["clients_that_switched"]) == (2, 0)[number]


def value(models):
    return np.asarray(models["params"]["vector"])[:, 0]


def of_logits(*theta):
    """A network whose logits are the same for every sample."""
    return {"params": {"classifier": {"theta": jnp.asarray(theta, jnp.float32)}}}


def logits_of(models):
    return np.asarray(models["params"]["classifier"]["theta"])


@pytest.fixture(scope="module")
def client(federation):
    """(lr, own logits, received logits, validation label) -> the upload of a client with training labels 0."""
    problem = federation("constant").problem
    x, key = np.zeros((4, 4, 4, 1), np.float32), jax.random.key(0)

    @jax.jit
    def update(lr, own, received, y):
        once = local.LocalSetting("sgd", epochs=1, batch_size=2, max_size=2, lr=lr)
        strategy = fedme.build(fedme.Hyper(clustering=False), dataclasses.replace(problem, local=once))
        data = one_client(Samples(x, y, np.ones(1, np.float32), np.zeros(1, np.float32)), size=2, validation_size=2)
        payload = {"model": own, "received": received, "partner": jnp.int32(7)}
        return strategy.client_update(payload, None, data, 0, key)[0]

    return lambda lr, own, received, label: update(
        lr, of_logits(*own), of_logits(*received), jnp.array([0, 0, label, label])
    )


def test_the_own_and_the_received_model_learn_from_the_labels_and_from_each_other(client):
    """One step with rate 1: p = 1/3 each and q = 1/2, 1/4, 1/4; the gradients are (p - e_0) + (p - q), and reversed."""
    upload = client(1.0, (0, 0, 0), np.log([2, 1, 1]), 0)
    np.testing.assert_allclose(logits_of(upload["model"]), [5 / 6, -5 / 12, -5 / 12], rtol=1e-5)
    np.testing.assert_allclose(logits_of(upload["received"]), np.log([2, 1, 1]) + np.array([2, -1, -1]) / 6, rtol=1e-5)
    assert int(upload["partner"]) == 7


@pytest.mark.parametrize(
    "own, received, label, takes",
    [
        ((0, 0, 0), (1, 0, 0), 0, True),
        ((1, 0, 0), (0, 0, 0), 0, False),
        ((1, 0, 0), (1, 0, 0), 0, False),  # strictly lower
        ((1, 0, 0), (0, 1, 0), 1, True),  # better on the validation samples, worse on the training samples
        ((0, 1, 0), (1, 0, 0), 1, False),
    ],
)
def test_a_client_switches_to_a_received_model_that_is_better_on_its_validation_samples(
    client, own, received, label, takes
):
    assert bool(client(0.0, own, received, label)["takes"]) == takes


def test_models_are_compared_after_the_training(client):
    """At first the received model is worse. It has the larger gradient, so a large step makes it the better one."""
    own, received = (np.log(2), 0, 0), (np.log(2) - 0.1, 0, 0)
    assert not client(0.0, own, received, 0)["takes"]
    assert client(4.0, own, received, 0)["takes"]


def test_a_client_receives_the_model_of_another_client_of_its_own_cluster(federation):
    """Clients 4 and 0 are the cluster 1 of this round, clients 2 and 3 the cluster 2."""
    strategy = fedme.build(fedme.Hyper(), federation("constant", sizes=(2,) * 5, cohort=4).problem)
    state = fedme.State({"theta": jnp.arange(5.0) * 10}, jnp.array([1, 0, 2, 2, 1]))
    cohort = Cohort(jnp.array([4, 0, 2, 3]), jnp.full(4, 2))
    dispatch = jax.jit(strategy.dispatch)
    for seed in range(3):
        payload = dispatch(state, cohort, jax.random.key(seed))
        assert payload["partner"].tolist() == [1, 0, 3, 2]
        assert payload["model"]["theta"].tolist() == [40, 0, 20, 30]
        assert payload["received"]["theta"].tolist() == [0, 40, 30, 20]


def test_the_partner_is_drawn_anew_in_every_round(federation):
    strategy = fedme.build(fedme.Hyper(), federation("constant", sizes=(2,) * 5, cohort=5).problem)
    state = fedme.State({"theta": jnp.arange(5.0)}, jnp.zeros(5, jnp.int32))
    dispatch = jax.jit(lambda key: strategy.dispatch(state, Cohort(jnp.arange(5), jnp.full(5, 2)), key)["partner"])
    assert len({tuple(dispatch(jax.random.key(seed)).tolist()) for seed in range(4)}) == 4


@pytest.mark.parametrize("mutual", [True, False])
def test_a_client_trains_both_models_together_with_its_key_and_may_be_told_not_to_switch(
    federation, monkeypatch, mutual
):
    """Without mutual learning, neither model learns from the other one. Without tuning, no loss is compared."""
    seen = []

    def train_pair(models, setting, pair, data, key, *, weights):
        seen.append((tuple(pair), data, key, weights))
        return ("own", "received"), "metrics"

    monkeypatch.setattr(fedme.mutual, "train_pair", train_pair)
    hyper = fedme.Hyper(clustering=False, tuning=False, mutual=mutual)
    strategy = fedme.build(hyper, federation("constant").problem)
    payload = {"model": "a", "received": "b", "partner": 1}
    upload, memory, metrics = strategy.client_update(payload, "memory", "data", 0, "key")
    weight = Weights(supervised=1.0, mutual=float(mutual))
    assert seen == [(("a", "b"), "data", "key", (weight, weight))] and (memory, metrics) == ("memory", "metrics")
    assert not upload.pop("takes") and upload == {"model": "own", "received": "received", "partner": 1}


def test_a_client_continues_with_the_mean_of_the_copies_of_the_model_that_it_selected(federation):
    """Row 0 switched to the model of row 1, which rows 0 and 2 trained, too. Clients 1, 3 and 5 keep theirs."""
    strategy = fedme.build(fedme.Hyper(), federation("constant").problem)
    state = fedme.State({"theta": jnp.arange(-6.0, 0)}, jnp.array([0, 1, 1, 0, 0, 1]))
    uploads = {
        "model": {"theta": jnp.array([1.0, 2.0, 3.0])},
        "received": {"theta": jnp.array([10.0, 20.0, 30.0])},
        "partner": jnp.array([1, 2, 1]),
        "takes": jnp.array([True, False, False]),
    }
    cohort = Cohort(jnp.array([4, 0, 2]), jnp.array([9, 1, 5]))
    state, info = jax.jit(strategy.server_update)(state, uploads, cohort, 0, None)
    np.testing.assert_allclose(state.models["theta"], [14, -5, 11.5, -3, 14, -1], rtol=1e-6)  # (2 + 10 + 30) / 3
    assert state.clusters.tolist() == [0, 1, 1, 0, 0, 1] and float(info["clients_that_switched"]) == 1
    part = strategy.personal_part(state, 2)
    assert float(part["theta"]) == 11.5 and strategy.personal_model(part, None, None, None) is part


def test_from_each_cluster_round_on_there_is_one_cluster_more(federation):
    """Six clients whose outputs are in three places."""
    strategy = fedme.build(fedme.Hyper(cluster_rounds=(2, 4)), federation("constant").problem)
    rows = np.array([[0, 0, 0], [5, 0, 0], [0, 9, 0], [0, 0, 0.1], [0, 0.1, 0], [5, 0, 0.1]], np.float32)
    state, clusters = fedme.State(of_logits(*rows), jnp.zeros(6, jnp.int32)), {}
    for done in (1, 2, 3, 4, 5):
        clusters[done] = np.asarray(strategy.between_rounds(state, done, jax.random.key(done), None)[0].clusters)
    assert [len(set(clusters[done].tolist())) for done in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]
    a, b, c, *rest = clusters[4].tolist()
    assert rest == [a, a, b] and len({a, b, c}) == 3


def test_the_seed_of_the_clusters_comes_from_the_key(federation, monkeypatch):
    seeds = []
    monkeypatch.setattr(fedme, "cluster", lambda rows, count, *, seed: seeds.append(seed) or np.arange(3))
    problem = federation("constant", sizes=(2, 2, 2), cohort=3).problem
    strategy = fedme.build(fedme.Hyper(cluster_rounds=(1,)), problem)
    state = fedme.State(of_logits((0, 0, 0), (1, 0, 0), (2, 0, 0)), jnp.zeros(3, jnp.int32))
    for seed in (0, 1, 0):
        assert strategy.between_rounds(state, 1, jax.random.key(seed), None)[0].clusters.tolist() == [0, 1, 2]
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize("outputs, alike", [("logits", 0), ("probabilities", 1)])
def test_clusters_are_of_logits_or_of_probabilities(federation, outputs, alike):
    """The first logits are 0, 100 and 10, and the probabilities of the first class 1/3, 1 and almost 1."""
    problem = federation("constant", sizes=(2, 2, 2), cohort=3).problem
    strategy = fedme.build(fedme.Hyper(cluster_rounds=(1,), outputs=outputs), problem)
    state = fedme.State(of_logits((0, 0, 0), (100, 0, 0), (10, 0, 0)), jnp.zeros(3, jnp.int32))
    clusters = strategy.between_rounds(state, 1, jax.random.key(0), None)[0].clusters.tolist()
    assert clusters[2] == clusters[alike] != clusters[1 - alike]


def test_every_client_starts_with_a_network_of_its_own_in_a_common_cluster(federation):
    state = jax.jit(fedme.build(fedme.Hyper(), federation("linear").problem).init)(jax.random.key(0))
    kernels = np.asarray(state.models["params"]["classifier"]["dense"]["kernel"])
    assert len(np.unique(kernels, axis=0)) == 6 and state.clusters.tolist() == [0] * 6


@pytest.mark.parametrize("seed", range(20))
def test_clusters_do_not_collapse_on_equal_models(seed):
    """The second round of the running example: clients 2 and 3 hold one model, 4 and 5 another."""
    labels = fedme.cluster(np.array([[11.5], [22], [22], [54.5], [54.5]]), 2, seed=seed)
    assert labels[0] == labels[1] == labels[2] != labels[3] == labels[4]
    assert len(set(fedme.cluster(np.ones((5, 3)), 4, seed=seed))) == 1
    assert len(set(fedme.cluster(np.array([[1.0], [1], [2], [3]]), 4, seed=seed))) == 3


def test_the_authors_clusters_collapse_when_equal_models_are_the_first_centres():
    """The second round of the running example: of ten pairs of first centres, (2, 3) and (4, 5) put all into one."""
    outputs = np.array([[11.5], [22], [22], [54.5], [54.5]], np.float32)
    seen = set()
    for seed in range(60):
        first = tuple(sorted(np.random.default_rng(seed).choice(5, 2, replace=False).tolist()))
        labels = fedme.cluster_as_authors(outputs, 2, seed=seed)
        if first in ((1, 2), (3, 4)):
            assert len(set(labels)) == 1
        else:
            assert labels[0] == labels[1] == labels[2] != labels[3] == labels[4]
        seen.add(first)
    assert len(seen) == 10
    apart = fedme.cluster_as_authors(np.array([[0.0], [1], [10], [11]]), 2, seed=0)
    assert apart[0] == apart[1] != apart[2] == apart[3]
    assert sorted(fedme.cluster_as_authors(outputs[1:4:2], 4, seed=0)) == [0, 1]  # fewer clients than clusters


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(clusters=st.lists(st.integers(0, 3), min_size=5, max_size=5), seed=st.integers(0, 2**31 - 1))
def test_partners_come_from_the_cluster(clusters, seed):
    clusters = np.array(clusters)
    partners = np.asarray(draw_partners(jax.random.key(seed), jnp.asarray(clusters)))
    for client, partner in enumerate(partners):
        assert partner != client
        if (clusters == clusters[client]).sum() > 1:
            assert clusters[partner] == clusters[client]


def test_a_client_alone_in_its_cluster_receives_any_other_model():
    clusters = jnp.array([0, 1, 1, 2, 2])
    drawn = {int(draw_partners(jax.random.key(seed), clusters)[0]) for seed in range(60)}
    assert drawn == {1, 2, 3, 4}


def test_a_permutation_shares_the_sum(close):
    """Every model trained by its owner and by one other: the means add up to half of all that was uploaded."""
    rng = np.random.default_rng(0)
    models, received = ({"w": rng.normal(size=(5, 7)).astype(np.float32)} for _ in range(2))
    means = jax.tree.map(np.asarray, jax.jit(fedme.aggregate)(models, received, jnp.array([1, 2, 3, 4, 0])))
    close(means["w"].sum(0), (models["w"].sum(0) + received["w"].sum(0)) / 2)


def test_two_clients_exchange_with_each_other():
    assert draw_partners(jax.random.key(3), jnp.zeros(2, jnp.int32)).tolist() == [1, 0]


@pytest.mark.slow
def test_without_tuning_no_client_switches_its_network(engine):
    engine = engine("fedme", "linear,perceptron", hyper=fedme.Hyper(tuning=False, clustering=False), cohort=6)
    progress, report = engine.run(engine.init(), 2)
    assert float(report.info["clients_that_switched"]) == 0
    np.testing.assert_array_equal(progress.server.models["architecture"], [0, 1, 0, 1, 0, 1])


def test_networks_spread_in_one_trace_with_clusters(engine):
    """All of FedMe with two networks; the clients' networks change, and nothing is compiled anew."""
    engine = engine("fedme", "linear,perceptron", hyper=fedme.Hyper(cluster_rounds=(1, 2)), cohort=6)
    progress, _ = engine.run(engine.init(), 1)
    before = np.asarray(progress.server.models["architecture"])
    progress, report = engine.run(progress, 5)
    assert {program.traces for program in engine.programs.values()} == {1}
    assert set(progress.server.models["architecture"].tolist()) <= set(before.tolist())
    assert np.isfinite(float(report.train_loss)) and np.isnan(float(report.similarity))
    assert len(set(np.asarray(progress.server.clusters).tolist())) > 1


@pytest.mark.slow
def test_equal_networks_count_the_traffic_of_what_is_sent(engine):
    engine = engine("fedme", "perceptron")
    _, report = engine.run(engine.init(), 2)
    model = trees.num_bytes(engine.constants.problem.model.shapes())
    # Down the received model and the one to go on with, and a number; up both models, the number and a truth value.
    assert report.traffic.num_bytes() == (2 * 3 * (2 * model + 4), 2 * 3 * (2 * model + 5), 0)


def test_what_the_server_does_besides_depends_on_the_settings(federation, problem):
    """It counts traffic if networks differ or the first upload counts, and clusters if there are rounds for it."""
    equal = federation("constant").problem
    built = lambda problem=equal, **hyper: fedme.build(fedme.Hyper(**hyper), problem)
    assert built().traffic is None and built(upload_first=True).traffic and built(problem).traffic
    assert built().between_rounds
    assert built(clustering=False).between_rounds is built(cluster_rounds=()).between_rounds is None


def test_what_cannot_be_exchanged_is_said(problem):
    with pytest.raises(UserError, match="cohort= must be at least 2"):
        fedme.build(fedme.Hyper(), dataclasses.replace(problem, cohort_size=1))
    with pytest.raises(UserError, match=r"public_share=0.1"):
        fedme.build(fedme.Hyper(), dataclasses.replace(problem, public=None))
