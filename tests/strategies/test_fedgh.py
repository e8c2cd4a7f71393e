"""FedGH: the shared header really moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedgh
from fedjax_mr.strategies.fedgh import Hyper, Memory, State

WIDTH, CLASSES = 16, 3


@pytest.fixture(scope="module")
def trained(engine):
    """An engine with clients of two networks and the progress before and after a round."""
    one = engine("fedgh", "thin,linear")
    before = jax.tree.map(np.array, one.init())
    after, report = one.run(one.place(before), 1)
    return one, before, jax.tree.map(np.array, after), report


def means_of(one, memory, client):
    """A client's class means and counts, one sample after another."""
    problem, (samples, index, offsets) = one.constants.problem, one.constants.federation
    rows = np.asarray(index)[offsets[client] : offsets[client + 1]]
    model = jax.tree.map(lambda leaf: leaf[client], memory.model)
    features = jax.jit(lambda model, rows: problem.model.features(model, gather(samples, rows)))
    z = np.asarray(features(model, rows))
    y = np.asarray(samples.y)[rows]
    return [(z[y == label].mean(axis=0), label) for label in range(CLASSES) if (y == label).any()]


@pytest.mark.slow  # quick: the tests by hand
def test_the_header_moves_by_sgd_on_the_clients_class_means(trained):
    one, before, after, report = trained
    clients = [
        c for c in range(6) if not np.array_equal(*(p.memory.model["params"]["vector"][c] for p in (before, after)))
    ]
    pairs = [pair for client in clients for pair in means_of(one, after.memory, client)]
    header = before.server.header["dense"]
    kernel, bias = (np.float64(header[name]) for name in ("kernel", "bias"))
    moved = after.server.header["dense"]
    # One step of 0.01 per pair in an unknown order: to first order all steps are taken from the same header.
    step_kernel, step_bias = np.zeros_like(kernel), np.zeros_like(bias)
    for z, label in pairs:
        logits = z @ kernel + bias
        slope = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum() - np.eye(CLASSES)[label]
        step_kernel -= 0.01 * np.outer(z, slope)
        step_bias -= 0.01 * slope
    assert np.abs(step_kernel).max() > 1e-3
    np.testing.assert_allclose(moved["kernel"] - kernel, step_kernel, atol=0.15 * np.abs(step_kernel).max())
    np.testing.assert_allclose(moved["bias"] - bias, step_bias, atol=0.15 * np.abs(step_bias).max())
    assert report.traffic.num_bytes() == (0, 4 * len(pairs) * (WIDTH + 1), 0)


def test_a_header_is_put_into_any_network(trained):
    one, _, after, _ = trained
    zoo = one.constants.problem.model
    header = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(1), after.server.header)
    for client in (0, 1):
        model = trees.take(after.memory.model, client)
        number = int(model["architecture"])
        new = jax.jit(lambda model, header: fedgh.with_header(zoo, model, header))(model, header)
        unpack = jax.jit(zoo.unpack, static_argnums=1)
        old, new = unpack(model, number), unpack(new, number)
        jax.tree.map(np.testing.assert_array_equal, new["params"]["classifier"], header)
        kept = lambda variables: {name: tree for name, tree in variables["params"].items() if name != "classifier"}
        jax.tree.map(np.testing.assert_array_equal, kept(old), kept(new))


def test_headers_are_sent_from_the_second_round_on(trained):
    one, _, after, report = trained
    header = 4 * (WIDTH * CLASSES + CLASSES)
    assert report.traffic.num_bytes()[0] == 0
    _, later = one.run(one.place(after), 2)
    assert later.traffic.num_bytes()[0] == 2 * 3 * header


def test_representations_must_be_of_one_width(federation):
    with pytest.raises(UserError, match="thin 16, perceptron 5: pass projection=64"):
        fedgh.build(Hyper(), federation("thin,perceptron").problem)


def test_class_means_are_over_all_samples_of_the_class_and_nothing_else(tokens):
    """Five samples in batches of two, the last of which is half padding: class 0 has (1, 2), (3, 4) and (5, 9)."""
    federation = tokens([[0, 1, 0, 1, 0], [1]])
    model = federation.model([[1, 2], [10, 10], [3, 4], [20, 30], [5, 9], [7, 7]])
    network, options = federation.problem.model, {"num_classes": 3, "width": 2, "batch_size": 2}
    means, counts = jax.jit(lambda model, data: fedgh.class_means(network, model, data, **options))(
        model, federation.client(0)
    )
    np.testing.assert_allclose(means, [[3, 5], [15, 20], [0, 0]])
    assert counts.tolist() == [3, 2, 0]


def test_a_client_starts_with_the_header_once_it_is_trained_and_sends_the_means_of_its_trained_network(
    tokens, trainings, monkeypatch
):
    federation = tokens([[0, 1], [1]])
    strategy = fedgh.build(Hyper(), federation.problem)
    own, asked = federation.model([[1, 2]]), []
    header = {"dense": {"kernel": np.full((2, 2), 5, np.float32), "bias": np.full(2, 6, np.float32)}}

    def class_means(network, variables, data, **sizes):
        asked.append(variables)
        return np.zeros((2, 2), np.float32), np.array([3, 0])

    monkeypatch.setattr(fedgh, "class_means", class_means)
    for trained, first in ((False, 1), (True, 5)):
        payload = {"header": header, "trained": np.bool_(trained)}
        upload, memory, _ = strategy.client_update(payload, Memory(own), federation.client(0), 0, None)
        start = trainings[-1].start["params"]
        assert float(start["classifier"]["dense"]["kernel"][0, 0]) == first and float(start["body"]["z"][0, 1]) == 2
        after = memory.model["params"]
        assert float(after["classifier"]["dense"]["kernel"][0, 0]) == first + 1 and float(after["body"]["z"][0, 1]) == 3
        assert asked[-1] is memory.model and upload["owned"].tolist() == [True, False]
        assert strategy.personal_model((), memory, None, None) is memory.model


def test_the_header_takes_one_step_per_pair_that_a_client_owns_in_a_new_order_in_every_epoch(tokens):
    """Client 0 owns class 1 with the mean (1, 0), client 1 class 0 with (0, 2)."""
    federation, key = tokens([[0, 1], [1]]), jax.random.key(2)
    kernel, bias = np.zeros((2, 2)), np.zeros(2)
    header = {"dense": {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}}
    uploads = {
        "means": jnp.array([[[9.0, 9], [1, 0]], [[0, 2], [9, 9]]]),
        "owned": jnp.array([[False, True], [True, False]]),
    }
    strategy = fedgh.build(Hyper(server_lr=0.5, server_epochs=2), federation.problem)
    state, _ = strategy.server_update(State(header, np.bool_(False)), uploads, None, 0, key)
    orders, pairs = [], {1: ([1, 0], 1), 2: ([0, 2], 0)}
    for epoch in range(2):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), 4)).tolist()
        orders.append([row for row in order if row in pairs])
        for row in orders[-1]:
            z, label = pairs[row]
            shares = np.exp(np.dot(z, kernel) + bias)
            slope = shares / shares.sum() - np.eye(2)[label]
            kernel, bias = kernel - 0.5 * np.outer(z, slope), bias - 0.5 * slope
    np.testing.assert_allclose(state.header["dense"]["kernel"], kernel, rtol=1e-4)
    np.testing.assert_allclose(state.header["dense"]["bias"], bias, rtol=1e-4)
    assert bool(state.trained) and orders[0] != orders[1]
