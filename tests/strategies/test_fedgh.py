"""FedGH: the shared header really moves."""

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine.samples import gather
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import fedgh
from fedjax_mr.strategies.fedgh import Hyper

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
