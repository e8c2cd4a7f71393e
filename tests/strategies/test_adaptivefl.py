"""AdaptiveFL against its equations: the tables by the released loops, the mean of slices by hand, what it sends."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.errors import UserError
from fedjax_mr.strategies import adaptivefl
from fedjax_mr.strategies.adaptivefl import Hyper

UNITS = (2, 2, 2, 3, 3, 3, 5)  # of the perceptron's five hidden units, in S, M and L


def tables_by_hand(records, counts, sent, back):
    """The released updates of a client's tables, transcribed."""
    if sent == back:
        for slice in range(sent, 7):
            records[slice] += 1
        if sent == 6:
            records[6] += 3
    else:
        records[back] += 3
        for punishment, slice in enumerate(range(back + 1, 7), start=1):
            records[slice] = max(records[slice] - punishment, 0)
    counts[int(back / 3)] += 1
    counts[int(sent / 3)] += 1


def rewards_by_hand(records, counts):
    """The released weights of a client for slices of S, M and L, transcribed."""
    total = sum(records)
    success = [
        (sum(records[0:]) + sum(records[1:]) + sum(records[2:])) / (3 * total),
        (sum(records[3:]) + sum(records[4:]) + sum(records[5:])) / (3 * total),
        sum(records[6:]) / total,
    ]
    return [min(each, 0.5) / math.sqrt(count) for each, count in zip(success, counts, strict=True)]


def test_tables_and_weights_are_the_released_ones():
    rng = np.random.default_rng(0)
    records, counts = np.ones((40, 7)), np.ones((40, 3))
    update, ours = jax.jit(jax.vmap(adaptivefl.update_records)), (jnp.ones((40, 7)), jnp.ones((40, 3)))
    for _ in range(5):
        sent = rng.integers(0, 7, 40)
        back = np.minimum(sent, rng.integers(0, 7, 40))
        for client in range(40):
            tables_by_hand(records[client], counts[client], sent[client], back[client])
        ours = update(*ours, jnp.asarray(sent, jnp.int32), jnp.asarray(back, jnp.int32))
    np.testing.assert_array_equal(ours[0], records)
    np.testing.assert_array_equal(ours[1], counts)
    expected = [rewards_by_hand(*tables) for tables in zip(records, counts, strict=True)]
    np.testing.assert_allclose(jax.jit(adaptivefl.rewards)(*ours), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def six(federation):
    """The strategy for six clients of equal strengths by pairs: weak, medium and strong."""
    problem = federation("perceptron").problem
    return problem, adaptivefl.build(Hyper(weak_share=1 / 3, medium_share=1 / 3), problem)


def test_a_client_trains_the_largest_slice_inside_the_received_one_that_it_can_hold(six, monkeypatch):
    """S, M and L have 0.42, 0.61 and 1 of the parameters; weak clients hold 0.18 to 0.33, medium ones 0.39 to 0.56."""
    problem, strategy = six
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), problem.model.shapes())
    monkeypatch.setattr(
        adaptivefl.local, "train", lambda model, setting, start, data, key, *, loss: (start, jax.random.key_data(key))
    )

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, 0))
    def returned(client, sent, key):
        data = SimpleNamespace(client_id=client)
        upload, _, used = strategy.client_update({"model": ones, "level": sent}, None, data, 0, key)
        return upload["level"], upload["model"]["params"]["hidden"]["dense"]["bias"], used

    clients, sent = (each.ravel() for each in np.meshgrid(range(6), range(7), indexing="ij"))
    keys = jax.random.split(jax.random.key(0), 42)
    levels, hidden, used = map(np.asarray, returned(clients.astype(np.int32), sent.astype(np.int32), keys))
    np.testing.assert_array_equal(used, jax.random.key_data(keys))
    np.testing.assert_array_equal(hidden.sum(axis=1), np.array(UNITS)[levels])
    levels = levels.reshape(6, 7)
    assert np.all(levels[:2] == 0)
    assert np.all((levels[2:4, :3] == range(3)) | (levels[2:4, :3] == 0)) and np.all(levels[2:4, 3:] <= 2)
    assert np.all(levels[4:, :6] == range(6))
    often, _, _ = returned(np.full(42, 5, np.int32), np.full(42, 6, np.int32), keys)
    assert set(often.tolist()) == {3, 6}  # strong clients hold 0.74 to 1.19; M1 is the largest inside L


def test_the_server_averages_what_each_client_held_and_records_whose_it_was(six):
    """Clients 5, 0 and 3 return 6, 0 and 4 of the slices 6, 3 and 4; they have 1, 2 and 5 samples."""
    problem, strategy = six
    shapes = problem.model.shapes()
    full = lambda *values: jax.tree.map(
        lambda leaf: np.stack([np.full(leaf.shape, v, np.float32) for v in values]), shapes
    )
    state = adaptivefl.State(
        jax.tree.map(lambda leaf: leaf[0], full(-1)), jnp.array([6, 3, 4]), jnp.ones((6, 7)), jnp.ones((6, 3))
    )
    cohort = adaptivefl.Cohort(jnp.array([5, 0, 3]), jnp.array([1, 2, 5]))

    @jax.jit
    def update(uploads, key):
        new, info = strategy.server_update(state, uploads, cohort, 0, key)
        return new, info, strategy.individual_models(new)

    uploads = {"model": full(10, 20, 30), "level": jnp.array([6, 0, 4])}
    new, info, individual = update(uploads, jax.random.key(0))
    all_three, two = (10 + 40 + 150) / 8, (10 + 150) / 6
    np.testing.assert_allclose(new.model["params"]["hidden"]["dense"]["bias"], [all_three] * 2 + [two] + [10] * 2)
    np.testing.assert_allclose(new.model["params"]["classifier"]["dense"]["bias"], [all_three] * 3)
    records, counts = np.ones((6, 7)), np.ones((6, 3))
    for client, sent, back in ((5, 6, 6), (0, 3, 0), (3, 4, 4)):
        tables_by_hand(records[client], counts[client], sent, back)
    np.testing.assert_array_equal(new.records, records)
    np.testing.assert_array_equal(new.counts, counts)
    assert float(info["cut"]) == pytest.approx(1 / 3)
    assert float(info["slice_multiply_adds"]) == pytest.approx((5 + 2 + 3) / 15)
    assert len({tuple(update(uploads, jax.random.key(seed))[0].drawn.tolist()) for seed in range(3)}) == 3
    individual = individual["params"]["hidden"]["dense"]["bias"]  # of S1, M1 and L
    assert np.count_nonzero(individual, axis=1).tolist() == [2, 3, 5]


def test_a_place_sends_its_slice_to_a_client_with_a_good_record_of_its_size(six):
    """Client 4 always held L, all others never; so it gets L in almost every round. S goes to any of the others."""
    _, strategy = six
    records = jnp.ones((6, 7)).at[:, 6].set(0.0).at[4].set(jnp.array([0.0] * 6 + [9.0]))
    model = {"w": jnp.ones(())}
    state = adaptivefl.State(model, jnp.array([6, 0, 0]), records, jnp.ones((6, 3)))
    select = jax.jit(lambda state, key: strategy.select(state, 0, key).ids)
    ids = np.array([select(state, jax.random.key(seed)) for seed in range(20)])
    assert np.all(ids[:, 0] == 4) and set(ids[:, 1:].ravel().tolist()) == {0, 1, 2, 3, 5}
    often = state._replace(counts=state.counts.at[1:].set(1e6), drawn=jnp.array([0, 6, 6]))
    assert [int(select(often, jax.random.key(seed))[0]) for seed in range(5)] == [0] * 5  # rarely chosen before


def test_nobody_is_drawn_twice_and_weights_decide():
    weights = np.array([[1, 0, 3, 0], [0, 0, 1, 1], [0, 0, 0, 0]], np.float32)
    keys = jax.random.split(jax.random.key(0), 3000)
    draws = np.asarray(jax.jit(jax.vmap(adaptivefl.draw, in_axes=(0, None)))(keys, weights))
    assert all(len(set(row)) == 3 for row in draws.tolist())
    np.testing.assert_allclose(np.bincount(draws[:, 0], minlength=4) / 3000, [0.25, 0, 0.75, 0], atol=0.03)
    after_two = draws[draws[:, 0] == 2]
    assert set(after_two[:, 1].tolist()) == {3}  # the only one of positive weight that is left
    assert set(after_two[:, 2].tolist()) == {0, 1}  # none is: all who are left


@pytest.mark.slow  # HeteroFL's has the slices, and the tables are above
def test_three_rounds_equal_the_equations(transcription):
    """Slices as networks of their own size; who cut what is read from the run, everything else is computed."""
    by_hand = transcription("adaptivefl", Hyper())
    torch, server = by_hand.torch, by_hand.progress.server
    model, cuts = by_hand.read(server.model), 0
    records, counts = np.ones((4, 7)), np.ones((4, 3))
    for clients in by_hand.rounds(3, payloads=True):
        sent, returns = np.asarray(server.drawn).tolist(), []
        assert sent == [int(each["level"]) for each in by_hand.received]
        server = by_hand.progress.server
        assert len(set(clients)) == 3
        totals, weights = [torch.zeros_like(leaf) for leaf in model], [torch.zeros_like(leaf) for leaf in model]
        for place, i in enumerate(clients):
            received = by_hand.read(by_hand.received[place]["model"])
            units = UNITS[sent[place]]
            np.testing.assert_allclose(received[3][:, :units], model[3][:, :units], rtol=1e-4, atol=1e-5)
            assert not received[3][:, units:].any() and not received[1][units:].any()
            back = returned(server, i, sent[place], records[i], counts[i])
            returns.append(back)
            tables_by_hand(records[i], counts[i], sent[place], back)
            units = UNITS[back]
            cut = [model[0], model[1][:units], model[2][:units], model[3][:, :units]]
            size = by_hand.sizes[i]
            for total, weight, new, index in zip(
                totals, weights, by_hand.train(cut, i), (..., slice(units), slice(units), (slice(None), slice(units))),
                strict=True,
            ):  # fmt: skip
                total[index] += size * new
                weight[index] += size
        pairs = zip(model, totals, weights, strict=True)
        model = [torch.where(weight > 0, total / weight.clamp(min=1), old) for old, total, weight in pairs]
        by_hand.check(server.model, model)
        np.testing.assert_array_equal(server.records, records)
        np.testing.assert_array_equal(server.counts, counts)
        # Of 4 bytes each: 16 numbers and a bias into each hidden unit, 3 out of it, 3 biases.
        down, up = (4 * sum(20 * UNITS[each] + 3 for each in slices) for slices in (sent, returns))
        assert by_hand.report.traffic.num_bytes() == (down, up, 0)
        share, cut = np.mean([UNITS[each] for each in returns]) / 5, np.mean(np.not_equal(sent, returns))
        assert [float(by_hand.report.info[name]) for name in ("slice_multiply_adds", "cut")] == pytest.approx(
            [share, cut]
        )
        cuts += cut
    assert cuts  # some client cut what it was sent


def returned(server, client, sent, records, counts):
    """The slice that explains the table of a client after a round."""
    now = np.asarray(server.records)[client].tolist()
    for back in range(sent + 1):
        table = records.copy()
        tables_by_hand(table, counts.copy(), sent, back)
        if table.tolist() == now:
            return back
    raise AssertionError(f"no slice explains {now}")


@pytest.mark.slow
def test_whole_slices_are_fedavg(engine, close):
    """Where every slice is the network, all clients in each round make it FedAvg."""
    everyone = {"cohort": 6, "epochs": 1, "batch_size": 12}
    nested = engine("adaptivefl", "perceptron", hyper=Hyper(small=1.0, medium=1.0, selection="available"), **everyone)
    average = engine("fedavg", "perceptron", **everyone)
    progress, report = nested.run(nested.init(), 3)
    expected, usual = average.run(average.init(), 3)
    close(progress.server.model, expected.server.model)
    assert report.traffic.num_bytes() == usual.traffic.num_bytes() and float(report.info["cut"]) == 0


@pytest.mark.slow
def test_available_clients_are_those_of_a_class_that_holds_the_slice(federation):
    problem = federation("perceptron").problem
    strategy = adaptivefl.build(Hyper(selection="available", weak_share=0.5, medium_share=0.17), problem)
    state = strategy.init(jax.random.key(0))._replace(drawn=jnp.array([6, 3, 0], jnp.int32))
    keys = jax.random.split(jax.random.key(1), 400)
    ids = np.asarray(jax.jit(jax.vmap(lambda key: strategy.select(state, 0, key).ids))(keys))
    result = [set(column.tolist()) for column in ids.T]
    assert result == [{4, 5}, {3, 4, 5}, set(range(6))]


def test_two_shares_of_whole_blocks_are_refused(federation):
    with pytest.raises(UserError, match=r"hyper.whole needs 3 values, not 2"):
        adaptivefl.build(Hyper(whole=(0.2, 0.4)), federation("perceptron").problem)
