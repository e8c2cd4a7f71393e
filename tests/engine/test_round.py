"""One round as pure functions: keys, rows and slots, reports."""

import jax
import numpy as np
import pytest

from fedjax_mr.engine.round import Report, begin, finish, ids_by_slot, join, round_key, start, train_client
from fedjax_mr.models import precision
from fedjax_mr.strategies.base import Parcels, Traffic


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
