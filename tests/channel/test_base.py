"""The channel itself, with clients that train nothing: the order of links, their keys, references and memories."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.channel import Link, Sent, channel
from fedjax_mr.channel.privacy import poisson
from fedjax_mr.channel.robust import robust
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, one_client
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.testing.federations import constants

COUNT = 3  # clients of a round
REPORT = local.Metrics(jnp.zeros(()), jnp.int32(0), jnp.int32(0), jnp.int32(-1))


@pytest.fixture(scope="module")
def problem():
    return constants("linear", cohort=COUNT).problem


def adding(amount, problem):
    """FedAvg whose clients add a number to what they received, whatever their samples are."""

    def client_update(payload, memory, data, round, key):
        return jax.tree.map(lambda leaf: leaf + amount, payload), memory, REPORT

    return averaging(problem)._replace(client_update=client_update)


def client_of(number, size=4):
    samples = Samples(jnp.zeros((4, 1)), jnp.zeros(4, jnp.int32), jnp.ones(1), jnp.zeros(1))
    return one_client(samples, client_id=jnp.int32(number))._replace(size=jnp.int32(size))


def test_clients_sides_run_from_the_server_to_the_network_and_servers_sides_back(problem):
    """In whatever order the links are passed: x becomes 2 (x + 1) at the client, and 10 (x + 100) at the server."""
    outer = Link(
        "privacy",
        client=lambda values, reference, memory, context: Sent(jax.tree.map(lambda x: x + 1, values)),
        server=lambda state, values, reference, context: (state, jax.tree.map(lambda x: 10 * x, values), {}),
    )
    inner = Link(
        "compression",
        client=lambda values, reference, memory, context: Sent(jax.tree.map(lambda x: 2 * x, values)),
        server=lambda state, values, reference, context: (state, jax.tree.map(lambda x: x + 100, values), {}),
    )
    for links in ([outer, inner], [inner, outer]):
        strategy = channel(adding(0.0, problem), problem, links)

        @jax.jit
        def messages(key, strategy=strategy):
            state = strategy.init(key)
            payload = {"model": jax.tree.map(jnp.zeros_like, state.inner.model)}
            sent = strategy.client_update(payload, None, client_of(0), jnp.int32(0), key)[0]
            cohort = Cohort(jnp.arange(COUNT, dtype=jnp.int32), jnp.ones(COUNT, jnp.int32))
            payloads, sent_by_all = (trees.broadcast(each, COUNT) for each in (payload, sent))
            return sent, strategy.receive(state, sent_by_all, payloads, cohort, jnp.int32(0), key)[1]

        sent, uploads = messages(jax.random.key(0))
        assert {float(np.max(leaf)) for leaf in jax.tree.leaves(sent)} == {2}
        assert {float(np.max(leaf)) for leaf in jax.tree.leaves(uploads)} == {1020}


def test_every_link_has_a_key_of_its_own_and_downloads_have_one_for_each_client(problem):
    """And none is the key of the strategy. What one link adds to the downloads, another one does not take away."""
    seen = {}

    def client(name):
        def side(values, reference, memory, context):
            seen[name] = context.key
            return Sent(values)

        return side

    def down(payload, key):
        return jax.tree.map(lambda leaf: leaf + jax.random.uniform(key), payload)

    minus = lambda payload, key: jax.tree.map(lambda leaf: leaf - jax.random.uniform(key), payload)
    links = [Link("attack", client=client("attack"), down=minus), Link("privacy", client=client("privacy"), down=down)]
    strategy = channel(adding(0.0, problem), problem, links)

    @jax.jit
    def keys(key):
        state = strategy.init(key)
        cohort = Cohort(jnp.arange(COUNT, dtype=jnp.int32), jnp.ones(COUNT, jnp.int32))
        state = jax.tree.map(jnp.zeros_like, state)
        payloads = strategy.dispatch(state, cohort, key)
        strategy.client_update(trees.take(payloads, 0), None, client_of(0), jnp.int32(0), key)
        number = jax.tree.leaves(payloads)[0].reshape(COUNT, -1)[:, 0]
        return [jax.random.key_data(each) for each in (key, seen["attack"], seen["privacy"])], number

    found, numbers = keys(jax.random.key(3))
    assert len({tuple(map(int, each)) for each in found}) == 3
    assert len(set(map(float, numbers))) == COUNT


def test_increments_of_refused_messages_are_zero_and_the_memory_goes_back(problem):
    """Five clients whose numbers are 1, 1, 1, 1 and 50: Multi-Krum refuses the last one."""
    five = dataclasses.replace(problem, cohort_size=5)
    inner = averaging(five)
    link = robust(five, "multi_krum", outliers=1, stacked=False)
    inner = inner._replace(
        client_update=lambda payload, memory, data, round, key: (
            payload | {"control": memory + 1}, memory + 1, REPORT
        ),
        init_memory=lambda key, client: jnp.zeros(2),
        increments=("control",),
    )  # fmt: skip
    strategy = channel(inner, five, [link])

    @jax.jit
    def received(key):
        state = strategy.init(key)
        cohort = Cohort(jnp.asarray([4, 2, 0, 1, 3], jnp.int32), jnp.ones(5, jnp.int32))
        payloads = strategy.dispatch(state, cohort, key)
        uploads = {"model": payloads["model"], "control": jnp.asarray([1.0, 1, 1, 1, 50])[:, None] * jnp.ones((1, 2))}
        state, uploads, _ = strategy.receive(state, uploads, payloads, cohort, jnp.int32(0), key)
        payload = {"model": trees.take(payloads["model"], 0)}
        memory = strategy.init_memory(key, jnp.int32(3))._replace(inner=jnp.full(2, 7.0), before=jnp.full(2, 4.0))
        kept = [
            strategy.client_update(
                payload | {"channel": {"robust": state.links[0][client]}}, memory, client_of(client), jnp.int32(1), key
            )[1]
            for client in (3, 1)
        ]
        return state.links[0], uploads["control"], [(each.inner[0], each.before[0]) for each in kept]

    refused, control, kept = received(jax.random.key(0))
    np.testing.assert_array_equal(refused, np.arange(len(refused)) == 3)
    np.testing.assert_array_equal(control, [[1, 1]] * 4 + [[0, 0]])
    assert kept == [(5, 4), (8, 7)]


def test_an_absent_client_of_poisson_sampling_sends_back_what_it_received(problem):
    strategy = poisson(adding(1.0, problem), problem, 0.1)

    @functools.partial(jax.jit, static_argnums=0)
    def change(size):
        payload = {"model": problem.model.init(jax.random.key(0))}
        upload = strategy.client_update(payload, None, client_of(0, size), jnp.int32(0), jax.random.key(0))[0]
        return trees.subtract(upload["model"]["params"], payload["model"]["params"])

    assert {float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(change(0))} == {0}
    assert {round(float(np.max(leaf)), 5) for leaf in jax.tree.leaves(change(1))} == {1}
