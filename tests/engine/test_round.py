"""One round as pure functions: keys, rows and slots, reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.client.local import Metrics
from fedjax_mr.engine import round as rounds
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.round import Report, begin, finish, ids_by_slot, join, round_key, start, train_client
from fedjax_mr.models import precision
from fedjax_mr.strategies.interface import Cohort, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic


def begun(rounds):
    """Return what is given, the first progress, and the first round's plan and rows."""

    @jax.jit
    def begin_first(constants):
        progress = start(constants)
        return progress, *begin(rounds.axis, constants, progress)

    return rounds.constants, *begin_first(rounds.constants)


def test_rows_carry_each_client_with_its_own_payload_and_data(engine):
    """Padding rows repeat the first of the cohort and have no samples."""
    rounds = engine("indep", "linear", lanes=2)
    axis = rounds.axis
    constants, progress, plan, rows = jax.device_get(begun(rounds))
    slots, ids, count = np.asarray(plan.slots), np.asarray(plan.cohort.ids), constants.problem.cohort_size
    assert len(slots) == axis.padded(count) == 4
    slot_ids = jax.jit(ids_by_slot)(constants, plan)
    for slot, row in enumerate(slots):
        client = ids[row if row < count else 0]
        assert rows.client_id[slot] == slot_ids[slot] == client
        assert constants.client(int(rows.client_id[slot])).offset == constants.federation.offsets[client]
        assert rows.size[slot] == (constants.problem.sizes[client] if row < count else 0)
        for sent, kept in zip(
            jax.tree.leaves(rows.payload["model"]), jax.tree.leaves(progress.server.models), strict=True
        ):
            np.testing.assert_array_equal(sent[slot], kept[row if row < count else 0])


@pytest.mark.parametrize("strategy", ["fedavg", "fedsa", "fedproto", "hetlora", "fedexlora"])
def test_servers_average_in_full_precision(engine, strategy):
    """On accelerators, a product of another precision would round the models."""
    rounds = engine(strategy, "linear")

    def arguments(constants):
        progress = start(constants)
        plan, rows = begin(rounds.axis, constants, progress)
        return progress, plan, jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)

    closed = jax.make_jaxpr(finish)(rounds.constants, *jax.eval_shape(arguments, rounds.constants))
    products = [each for each in precision.equations(closed.jaxpr) if each.primitive.name == "dot_general"]
    assert products and {each.params["precision"] for each in products} == {(jax.lax.Precision.HIGHEST,) * 2}


def test_a_client_drawn_twice_trains_with_two_keys(engine):
    rounds = engine("fedavg", "linear")
    constants, progress, _, rows = begun(rounds)
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[0], rows)
    train = jax.jit(train_client)
    uploads = [
        jax.device_get(train(constants, progress.round, row._replace(occurrence=np.int32(number)))[0])
        for number in (0, 0, 1)
    ]
    first, same, other = (np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(upload)]) for upload in uploads)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_a_report_adds_up_counts_and_keeps_the_last_of_all_else():
    def report(number):
        traffic = Traffic(down=(Parcels.of(number, 8),))
        return Report(10 * number, number, 0.5 * number, 0.0, -1, -1, traffic, {"column": number})

    total = join(report(1), report(2))
    assert (total.images, total.steps, total.train_loss, total.info) == (30, 3, 1.0, {"column": 2})
    assert total.traffic.num_bytes() == (24, 0, 0)


@pytest.mark.parametrize("other", [(1, 0), (0, 1)])
def test_streams_and_rounds_have_keys_of_their_own(other):
    key = jax.random.key(0)
    assert not np.array_equal(*(jax.random.key_data(round_key(key, *each)) for each in ((0, 0), other)))


COHORT = (4, 1, 4, 0)  # client 4 twice; sizes 9, 12, 9, 7
LOSSES = {0: 7.0, 1: 24.0, 4: 9.0}


def by_numbers(problem, *, diverging=()):
    """A strategy of whole numbers: its clients upload what they received, and the server keeps it.

    A key is kept as the first word of its data.
    """
    word = lambda key: jax.random.key_data(key)[..., 0]
    ids = jnp.array(COHORT, jnp.int32)

    def client_update(payload, memory, data, round, key):
        client, steps = data.client_id, (data.size + 9) // 10
        loss = sum(jnp.where(client == each, value, 0.0) for each, value in LOSSES.items())
        bad = jnp.where(jnp.isin(client, jnp.array(diverging, jnp.int32)), client, -1) if diverging else jnp.int32(-1)
        upload = {"sent": payload["sent"], "client": client, "size": data.size, "round": round, "key": word(key)}
        upload["dispatched"] = payload["word"]
        return upload, memory + data.size, Metrics(loss, data.size, steps, bad, {"size": data.size.astype(jnp.float32)})

    def server_update(state, uploads, cohort, round, key):
        return {**uploads, "ids": cohort.ids, "now": round, "word": word(key), "select": state["select"]}, {
            "seen": round
        }

    def select(state, round, key):
        chosen = ids + round - 5  # those of `COHORT` in round 5
        return Cohort(chosen, problem.sizes[chosen])

    zeros = {name: jnp.zeros(4, jnp.int32) for name in ("sent", "client", "size", "round", "ids")}
    words = {name: jnp.zeros(4, jnp.uint32) for name in ("key", "dispatched")}
    start = {**zeros, **words, "now": jnp.int32(0), "word": jnp.uint32(0)}
    return Strategy(
        init=lambda key: {**start, "select": word(key)},
        select=select,
        dispatch=lambda state, cohort, key: {
            "sent": 10 * cohort.ids + jnp.arange(4),
            "word": jnp.broadcast_to(word(key), 4),
        },
        client_update=client_update,
        server_update=server_update,
        init_memory=lambda key, client_id: 100 * client_id,
    )


@functools.cache
def round_by_numbers(federation, *, lanes=1, diverging=()):
    """One round of `by_numbers`, as the engine makes it: -> (progress, report, constants)."""
    known = federation("linear")
    problem = dataclasses.replace(known.problem, cohort_size=4)
    constants = known._replace(build=lambda problem: by_numbers(problem, diverging=diverging), problem=problem)
    axis = client_axis(devices=1, lanes=lanes, cohort_size=4)

    @jax.jit
    def one_round():
        progress = start(constants)._replace(round=jnp.int32(5))
        plan, rows = begin(axis, constants, progress)
        trained = jax.vmap(lambda row: train_client(constants, progress.round, row))(rows)
        return finish(constants, progress, plan, trained)

    return *one_round(), constants


@pytest.mark.parametrize("lanes", [1, 3])  # 3: two of six slots are empty
def test_a_round_brings_every_upload_back_to_its_row_of_the_cohort(federation, lanes):
    progress, report, constants = round_by_numbers(federation, lanes=lanes)
    server = progress.server
    np.testing.assert_array_equal(server["ids"], COHORT)
    np.testing.assert_array_equal(server["client"], COHORT)
    np.testing.assert_array_equal(server["sent"], [40, 11, 42, 3])  # row j was sent to the client of row j
    np.testing.assert_array_equal(server["size"], [9, 12, 9, 7])
    np.testing.assert_array_equal(server["round"], 5)
    assert (int(server["now"]), int(progress.round), int(report.info["seen"])) == (5, 6, 5)
    # 100 times the number, and the training samples of those that trained; client 4 adds them once for each row.
    np.testing.assert_array_equal(progress.memory, [7, 112, 200, 300, 409, 500])
    key = constants.key
    clients = [rounds.client_key(key, 5, client, occurrence) for client, occurrence in ((4, 0), (1, 0), (4, 1), (0, 0))]
    word = lambda each: int(jax.random.key_data(each)[0])
    assert [int(each) for each in server["key"]] == [word(each) for each in clients]
    assert int(server["word"]) == word(round_key(key, rounds.SERVER, 5))
    assert [int(each) for each in server["dispatched"]] == [word(round_key(key, rounds.DISPATCH, 5))] * 4
    assert int(server["select"]) == word(jax.random.fold_in(key, rounds.INIT))


def test_the_report_of_a_round_by_hand(federation):
    """Client 4 counts twice: 9 + 12 + 9 + 7 samples, 1 + 2 + 1 + 1 steps, losses 9 + 24 + 9 + 7."""
    _, report, _ = round_by_numbers(federation)
    assert (int(report.images), int(report.steps), int(report.bad_client), int(report.bad_step)) == (37, 5, -1, -1)
    assert float(report.train_loss) == pytest.approx(49 / 37)
    assert float(report.info["size"]) == pytest.approx(37 / 4)
    assert np.isnan(report.similarity)  # there is no model
    assert report.traffic.num_bytes() == (4 * 8, 4 * 24, 0)  # two numbers down, six up


def test_the_first_diverged_row_of_the_cohort_is_named(federation):
    _, report, _ = round_by_numbers(federation, diverging=(1, 0))
    assert (int(report.bad_client), int(report.bad_step)) == (1, 1)


def test_streams_of_keys_are_never_reused():
    streams = (rounds.INIT, rounds.SELECT, rounds.DISPATCH, rounds.CLIENT, rounds.SERVER, rounds.HOST, rounds.MEMORY)
    assert streams == tuple(range(7))  # fixed: another number would change every kept result
