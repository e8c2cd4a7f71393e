"""The clients' samples and memories on the host: the same bits, and samples are sent ahead of their round."""

import jax
import numpy as np
import pytest

from fedjax_mr.engine import placement

LAYOUTS = [
    pytest.param("fedmr", 1, 1, marks=pytest.mark.slow),
    pytest.param("fedmr", 1, 3, marks=pytest.mark.slow),
    pytest.param("scaffold", 2, 1, marks=pytest.mark.slow),
    ("clusamp", 2, 1),  # who comes next depends on the round before: nothing can be sent ahead
]


@pytest.mark.parametrize(("strategy", "devices", "lanes"), LAYOUTS)
def test_host_and_device_give_the_same_bits(engine, equal, strategy, devices, lanes):
    results = []
    for on_host in (False, True):
        rounds = engine(strategy, "linear", devices=devices, lanes=lanes, data_on_host=on_host)
        progress, report = rounds.run(rounds.init(), 2)
        results.append((rounds.run(progress, 1)[0], report))
    equal(*results)


@pytest.mark.slow  # quick: test_many_clients.py
@pytest.mark.parametrize("strategy", ["scaffold", "local"])
def test_memory_may_live_on_the_host(engine, equal, strategy):
    """The contract's slow part has all strategies, and a network with more in it."""
    layout = {"devices": 2, "lanes": 2}
    on_device, on_host = (engine(strategy, "linear", **layout, memory_on_host=where) for where in (False, True))
    expected, _ = on_device.run(on_device.init(), 3)
    progress, _ = on_host.run(on_host.init(), 2)
    progress, _ = on_host.run(progress, 1)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(progress.memory))
    equal(on_device.place(progress), expected)  # with the memories of clients that have not trained


def test_the_next_cohort_is_sent_while_this_one_trains(engine, monkeypatch):
    rounds, order = engine("fedmr", "linear", devices=1, lanes=1, data_on_host=True), []

    def noting(word, function):
        def call(*arguments):
            order.append(word)
            return function(*arguments)

        return call

    monkeypatch.setattr(type(rounds), "_fused", noting("train", type(rounds)._fused))
    monkeypatch.setattr(placement.HostSamples, "send", noting("send", placement.HostSamples.send))
    progress, _ = rounds.run(rounds.init(), 2)
    rounds.run(progress, 1)
    assert order == ["send", "train", "send", "train", "send", "train", "send"]


def test_what_is_sent(federation):
    constants = federation("linear")
    samples, index, offsets = constants.federation
    device = placement.jax.sharding.SingleDeviceSharding(placement.jax.devices()[0])
    data = placement.HostSamples(samples.x, samples.y, index, offsets, sharding=device)
    sent = data.send(np.array([2, 5, 2]))
    assert sent.x.shape == (3, 12, 4, 4, 1)
    for row, client in enumerate((2, 5, 2)):
        own = index[offsets[client] : offsets[client + 1]]
        np.testing.assert_array_equal(sent.x[row, : len(own)], samples.x[own])
        np.testing.assert_array_equal(sent.y[row, : len(own)], samples.y[own])


def test_cpu_devices_share_the_constants(engine):
    rounds = engine("fedmr", "linear", devices=2)
    for leaf in (rounds.constants.federation.index, rounds.constants.problem.label_counts):
        assert len({shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}) == 1


def test_rows_of_one_device_stay_on_it(engine, monkeypatch):
    """Only between several CPU devices they go by way of the host. Of memory on the host, one device reads its part."""
    rounds = engine("scaffold", "linear", devices=1, lanes=1, memory_on_host=True)
    progress, fetched, ordinary = rounds.init(), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(type(tree).__name__) or ordinary(tree))
    rounds.run(progress, 1)
    assert "ClientRow" not in fetched
