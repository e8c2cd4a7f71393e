"""Federations of very many clients: a round costs nothing per client, and memories exist only where they are used."""

import dataclasses
import re
import tracemalloc

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.engine.placement import HostMemory
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.strategies.parts import different_numbers

MANY = 300_007  # a prime number, so that no other array has this size


def pool(count=500):
    """A small dataset, from which clients draw with replacement."""
    x = np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)
    return fmr.from_arrays(x, (x[:, 0] > 0).astype(int))


def simulator(strategy, clients=MANY, memory="host"):
    federated = fmr.data.federate(pool(), partition="bootstrap", num_clients=clients, samples_per_client=5)
    local = fmr.local.setting(lr=0.1, epochs=1, batch_size=5)
    return fmr.Simulator(
        strategy, "logistic", federated, cohort=4, local=local, layout=fmr.Layout(devices=2, memory=memory)
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedmr", "scaffold"])
def test_a_round_allocates_nothing_per_client(strategy):
    mine = simulator(strategy)
    state, _ = mine.run(mine.init(), 2)
    tracemalloc.start()
    state, _ = mine.run(state, 2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < MANY  # bytes
    for name in mine.rounds.programs:
        text = mine.rounds.programs.compiled(name).as_text()
        made = [line for line in text.splitlines() if re.search(rf"= \S*\[(\d+,)*{MANY}\b", line)]
        assert [line for line in made if " parameter(" not in line] == [], name


def test_a_cohort_of_many_clients_is_drawn_uniformly():
    draw = jax.jit(jax.vmap(lambda key: different_numbers(key, 24, 3)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 24_000)))
    assert all(len(set(each)) == 3 for each in drawn.tolist())
    for place in range(3):  # every client comes first, second and third equally often
        np.testing.assert_allclose(np.bincount(drawn[:, place], minlength=24), 1000, atol=150)
    pairs = np.bincount(drawn[:, 0] * 24 + drawn[:, 1], minlength=576).reshape(24, 24)
    assert not pairs.diagonal().any()
    assert pairs[~np.eye(24, dtype=bool)].std() < 8


def test_memory_exists_only_for_clients_that_have_trained():
    mine = simulator("scaffold")
    state = mine.init()
    assert len(state.memory) == 0
    state, _ = mine.run(state, 3)
    assert 4 < len(state.memory) <= 12
    assert {len(leaf) for leaf in jax.tree.leaves(state.memory)} == {len(state.memory)}
    trained, other = state.memory.ids[:1], np.array([int(set(range(13)).difference(state.memory.ids.tolist()).pop())])
    norms = [sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(state.memory.read(ids))) for ids in (trained, other)]
    assert norms[0] > 0 and norms[1] == 0
    assert len(state.memory) <= 12  # a client whose memory is only read gets none


def test_rows_are_read_and_written_at_the_right_place():
    first = lambda ids: {"a": np.stack([ids, -ids], axis=1).astype(np.float32)}
    memory = HostMemory(first, np.zeros(0, np.int32), {"a": np.zeros((0, 2), np.float32)})
    expected = first(np.arange(50))["a"]
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 50, 6)
        np.testing.assert_array_equal(memory.read(ids)["a"], expected[ids])
        ids = np.unique(ids)
        new = rng.normal(size=(len(ids), 2)).astype(np.float32)
        memory.write(ids, {"a": new})
        expected[ids] = new
    np.testing.assert_array_equal(memory.read(np.arange(50))["a"], expected)
    ids, rows = jax.tree.leaves(memory)
    assert len(ids) == len(set(ids.tolist())) == len(rows) == len(memory) < 50


@pytest.mark.slow
def test_models_of_clients_with_memory_on_the_host_are_tested():
    accuracies = []
    for memory in ("device", "host"):  # on the host a few clients at a time, also those without memory
        mine = simulator("fml", clients=30, memory=memory)
        state, _ = mine.run(mine.init(), 2)
        accuracies.append(mine.personal(state).accuracy)
    np.testing.assert_array_equal(*accuracies)


@pytest.mark.parametrize("later", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_a_run_is_resumed_with_its_memories(tmp_path, later):
    config = fmr.Config(
        strategy="scaffold", partition="bootstrap", samples_per_client=5, clients=40, cohort=3, batch_size=5, lr=0.1,
        local_epochs=1, model="logistic", rounds=4, eval_every=2, memory="host", devices=2, progress=False,
    )  # fmt: skip
    start = lambda name, **changes: fmr.run(
        dataclasses.replace(config, run_dir=str(tmp_path / name), **changes), dataset=pool(), record=False
    )
    straight = start("straight")
    start("resumed", rounds=2)
    kept = Checkpoints(tmp_path / "resumed" / "checkpoints")
    assert 3 < kept.kept_memories() <= 6 and kept.kept_memories(0) == 0
    resumed = start("resumed", resume=True, memory=later)
    expected = Checkpoints(straight.folder / "checkpoints").kept_memories()
    assert kept.kept_memories() == (None if later == "device" else expected)
    assert [row["loss"] for row in resumed.rows] == [row["loss"] for row in straight.rows]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_a_million_clients_with_the_picture(tmp_path, pictures, strategy):
    count = 1_000_000
    x = np.random.default_rng(0).normal(size=(3 * count, 2)).astype(np.float32)
    mine = fmr.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(3 * count) % count)
    config = fmr.Config(
        strategy=strategy, partition="natural", clients=0, cohort=4, model="logistic", rounds=2, eval_every=1,
        run_dir=str(tmp_path / "run"), progress=False,
    )  # fmt: skip
    with pictures():
        result = fmr.run(config, dataset=mine)
    assert result.summary["rounds"] == 2 and len(np.load(result.folder / "partition.npz")["train_offsets"]) >= count
    assert (result.folder / "partition.png").stat().st_size > 10_000
