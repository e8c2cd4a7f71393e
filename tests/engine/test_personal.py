"""Every client's own model on the client's own test samples, and fine-tuned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Score
from fedjax_mr.client.samples import ClientData, validation
from fedjax_mr.data import Dataset, FederatedData, Split
from fedjax_mr.engine import personal
from fedjax_mr.engine.round import PERSONAL
from fedjax_mr.strategies.interface import Strategy
from fedjax_mr.tasks import Classification, with_metrics

TASK = with_metrics(Classification(width=3))


def federated(constants):
    """Return the tests' federation; clients 0 and 2 have test samples of their own."""
    samples, index, offsets = constants.federation
    rng, classes = np.random.default_rng(1), constants.problem.num_classes
    test_x, test_y = rng.normal(size=(9, 4, 4, 1)).astype(np.float32), rng.integers(0, classes, 9)
    dataset = Dataset("made", samples.x, samples.y, test_x, test_y.astype(np.int32), classes)
    test = Split.of([np.arange(5), np.arange(0), np.array([7, 8]), *[np.arange(0)] * 3])
    split = Split(np.asarray(index), np.asarray(offsets))
    return FederatedData(dataset, split, test=test), samples._replace(x=test_x, y=test_y.astype(np.int32), shape=None)


@functools.cache
def tuning(model):
    """Return a compiled function: what a client's model says of samples before and after three more epochs."""

    @jax.jit
    def tune_and_apply(setting, variables, own, key, x):
        tuned, _ = local.train(model, dataclasses.replace(setting, epochs=3), variables, own, key)
        return model.apply(variables, x), model.apply(tuned, x)

    return tune_and_apply


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("local", 2),
        pytest.param("fedavg", 1, marks=pytest.mark.slow),
        pytest.param("local", 1, marks=pytest.mark.slow),
        pytest.param("fedavg", 2, marks=pytest.mark.slow),
    ],
)
def test_it_equals_a_loop_over_the_clients(engine, strategy, devices):
    engine = engine(strategy, "linear,perceptron" if strategy == "local" else "perceptron", devices=devices, cohort=6)
    data, test = federated(engine.constants)
    clients = personal.PersonalEvaluation(engine, data, test)
    progress, _ = engine.run(engine.init(), 2)
    tested, tuned = clients.test(progress), clients.finetuned(progress, 3)
    constants, progress, deployed = jax.device_get((engine.constants, progress, engine.deployed(progress)))
    tune_and_apply = tuning(engine.constants.problem.model)
    problem, (samples, index, offsets) = constants.problem, constants.federation
    key = jax.random.fold_in(jax.random.fold_in(constants.key, PERSONAL), 2)
    for client, rows in enumerate(data.test.parts()):
        if not len(rows):
            assert np.isnan(tested.accuracy[client]) and tested.count[client] == 0
            continue
        model = trees.take(progress.memory.model, client) if strategy == "local" else deployed
        own = ClientData(samples, index, offsets[client], problem.sizes[client], np.int32(client))
        _, tune_key = jax.random.split(jax.random.fold_in(key, client))
        for result, logits in zip(
            (tested, tuned), tune_and_apply(problem.local, model, own, tune_key, test.x), strict=True
        ):
            logits = np.asarray(logits, np.float64)[rows]
            losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), test.y[rows]]
            np.testing.assert_allclose(result.accuracy[client], (logits.argmax(1) == test.y[rows]).mean(), rtol=1e-6)
            np.testing.assert_allclose(result.loss[client], losses.mean(), rtol=1e-4)
    assert {program.traces for programs in clients.programs.values() for program in programs.values()} == {1}


def test_clients_with_few_samples_are_not_padded_to_a_large_batch(engine):
    engine = engine("fedavg", "perceptron", cohort=6)
    data, test = federated(engine.constants)
    clients = personal.PersonalEvaluation(engine, data, test)
    clients.test(engine.init())
    [(_, rows)] = {(name, owner._owner.together) for owner in clients.programs.values() for name in owner}
    assert rows == 8  # of the client with 5
    sizes = lambda *sizes: Split.of([np.arange(size) for size in sizes])
    assert personal.samples_together(sizes(3, 4), None) == 4 and personal.samples_together(sizes(0), sizes(1)) == 1
    assert personal.samples_together(sizes(3), sizes(9)) == 16 and personal.samples_together(sizes(5000)) == 64


def test_the_columns_count_clients_or_samples():
    nan = np.nan
    clients = personal.Clients(
        TASK,
        metrics={"accuracy": np.array([1.0, 0.5, nan, 0.0])},
        loss=np.array([1.0, 2.0, nan, 3.0]),
        count=np.array([8.0, 1, 0, 1]),
        validation={"accuracy": np.array([nan, 0.5, 1.0, nan])},
        validation_loss=np.array([nan, 3.0, 1.0, nan]),
        architecture=np.zeros(4, int),
    )
    columns = clients.columns()
    assert columns["personal_accuracy"] == 0.5 and columns["personal_loss"] == 2.0
    assert columns["personal_weighted"] == pytest.approx(0.85) and columns["personal_worst10"] == 0.0
    assert columns["personal_std"] == pytest.approx(np.std([1, 0.5, 0])) and columns["validation_accuracy"] == 0.75
    assert columns["validation_loss"] == 2.0
    nothing = np.full(4, nan)
    untested = clients._replace(count=np.zeros(4), metrics={"accuracy": nothing}, loss=nothing).columns()
    assert untested == {"validation_accuracy": 0.75, "validation_loss": 2.0}


def test_validation_rows_follow_the_training_rows(federation):
    constants = federation()
    parts = [np.array([4, 5]), np.array([9])]
    kept = [np.array([7]), np.array([1, 2])]
    data = FederatedData(
        Dataset("made", constants.federation.samples.x, constants.federation.samples.y, None, None, 3),
        Split.of(parts), validation=Split.of(kept),
    )  # fmt: skip
    split = data.train_and_validation()
    assert split.index.tolist() == [4, 5, 7, 9, 1, 2] and split.offsets.tolist() == [0, 3, 6]
    zero = jnp.int32(0)
    client = ClientData(constants.federation.samples, split.index, zero + 3, zero + 1, zero + 1, zero + 2)
    held = validation(client)
    assert (int(held.offset), int(held.size)) == (4, 2)
    alone = validation(client._replace(validation_size=zero))
    assert (int(alone.offset), int(alone.size)) == (3, 1)


def test_a_client_is_tested_as_it_is_or_after_fine_tuning_and_validated_on_the_rows_after_its_training_rows(
    federation, monkeypatch
):
    problem, seen = federation("linear").problem, []

    def train(model, setting, variables, data, key):
        seen.append(("train", setting.epochs, variables, data, tuple(jax.random.key_data(key).tolist())))
        return 7, None

    def score(model, variables, data, *, batch_size):
        seen.append((variables, int(data.offset), int(data.size), data))
        return variables

    def personal_model(part, memory, data, key):
        seen.append(tuple(jax.random.key_data(key).tolist()))
        return part + memory

    monkeypatch.setattr(local, "train", train)
    monkeypatch.setattr(local, "score", score)
    strategy = Strategy(None, None, None, None, personal_model=personal_model)
    data, test = ClientData(None, None, 10, 3, 0, 2), ClientData(None, None, 40, 5, 0)
    keys = {client: personal.personal_key(jax.random.key(0), 1, client) for client in (0, 1)}
    for client, epochs in ((0, 0), (0, 4), (1, 4)):
        tested, held, _ = personal.test_client(strategy, problem, 2, 3, data, test, keys[client], epochs=epochs)
        assert tested == held == (7 if epochs else 5)
        assert seen[-2][1:] == (40, 5, test) and seen[-1][1:3] == (13, 2)
    (first, _, _), (again, tuning, _, _), (other, other_tuning, _, _) = seen[:3], seen[3:7], seen[7:]
    assert tuning[:4] == ("train", 4, 5, data)
    itself = (tuple(jax.random.key_data(key).tolist()) for key in keys.values())
    assert first == again and len({again, tuning[4], other, other_tuning[4], *itself}) == 6  # independent keys


def test_the_servers_part_of_a_personal_model():
    none = Strategy(None, None, None, None)
    assert personal.part_of(none._replace(global_model=lambda state: state + 1), 5, 2) == 6
    own = none._replace(personal_model=len)
    assert personal.part_of(own, 5, 2) == 5
    assert int(personal.part_of(own._replace(personal_part=lambda state, client: state + client), 5, 2)) == 7


def test_scores_become_means_over_the_samples_of_each_kind():
    score = lambda right, losses, count: Score(
        {"accuracy": {"total": np.array(right), "count": np.array(count)}}, np.array(losses), np.array(count)
    )
    test = score([3.0, 0.0], [8.0, 0.0], [4.0, 0.0])
    validation = score([1.0, 1.0], [6.0, 4.0], [2.0, 1.0])
    found = personal.clients_of(TASK, test, validation, np.array([0, 1]))
    np.testing.assert_array_equal(found.accuracy, [0.75, np.nan])
    np.testing.assert_array_equal(found.loss, [2.0, np.nan])
    np.testing.assert_array_equal(found.validation["accuracy"], [0.5, 1.0])
    np.testing.assert_array_equal(found.validation_loss, [3.0, 4.0])
    tuned = found.columns("finetuned")
    assert tuned["finetuned_validation_accuracy"] == 0.75 and found.columns()["validation_accuracy"] == 0.75


def test_the_worst_tenth_of_eleven_clients_are_two():
    assert personal.worst_tenth(np.arange(11.0)) == 0.5 and personal.worst_tenth(np.arange(10.0)) == 0
