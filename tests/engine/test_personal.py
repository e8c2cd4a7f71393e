"""Every client's own model on the client's own test samples, and fine-tuned."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import config as configuration
from fedjax_mr import trees
from fedjax_mr.data import Dataset, FederatedData, Split
from fedjax_mr.engine import local, personal, rounds
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import run
from fedjax_mr.experiment.build import architectures


def federated(given):
    """Return the tests' federation; clients 0 and 2 have test samples of their own."""
    samples, index, offsets = given.federation
    rng, classes = np.random.default_rng(1), given.problem.num_classes
    test_x, test_y = rng.normal(size=(9, 4, 4, 1)).astype(np.float32), rng.integers(0, classes, 9)
    dataset = Dataset("made", samples.x, samples.y, test_x, test_y.astype(np.int32), classes)
    test = Split.of([np.arange(5), np.arange(0), np.array([7, 8]), *[np.arange(0)] * 3])
    split = Split(np.asarray(index), np.asarray(offsets))
    return FederatedData(dataset, split, test=test), samples._replace(x=test_x, y=test_y.astype(np.int32))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("strategy", ["local", "fedavg"])
def test_it_equals_a_loop_over_the_clients(engine, strategy, devices):
    engine = engine(strategy, "linear,perceptron" if strategy == "local" else "perceptron", devices=devices, cohort=6)
    data, test = federated(engine.given)
    clients = personal.PersonalEvaluation(engine, data, test)
    progress, _ = engine.run(engine.init(), 2)
    tested, tuned = clients.test(progress), clients.finetuned(progress, 3)
    given, progress, deployed = jax.device_get((engine.given, progress, engine.deployed(progress)))
    problem, (samples, index, offsets) = given.problem, given.federation
    key = jax.random.fold_in(jax.random.fold_in(given.key, rounds.PERSONAL), 2)
    for client, rows in enumerate(data.test.parts()):
        if not len(rows):
            assert np.isnan(tested.accuracy[client]) and tested.count[client] == 0
            continue
        model = trees.take(progress.memory.model, client) if strategy == "local" else deployed
        own = local.ClientData(samples, jnp.asarray(index), offsets[client], problem.sizes[client], jnp.int32(client))
        _, tune_key = jax.random.split(jax.random.fold_in(key, client))
        setting = dataclasses.replace(problem.local, epochs=3)
        for result, variables in (
            (tested, model),
            (tuned, local.train(problem.model, setting, model, own, tune_key)[0]),
        ):
            logits = np.asarray(problem.model.apply(variables, jnp.asarray(test.x[rows])), np.float64)
            losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), test.y[rows]]
            np.testing.assert_allclose(result.accuracy[client], (logits.argmax(1) == test.y[rows]).mean(), rtol=1e-6)
            np.testing.assert_allclose(result.loss[client], losses.mean(), rtol=1e-4)
    assert {program.traces for program in clients.programs.values()} == {1}


def test_the_columns_count_clients_or_samples():
    nan = np.nan
    clients = personal.Clients(
        accuracy=np.array([1.0, 0.5, nan, 0.0]),
        loss=np.array([1.0, 2.0, nan, 3.0]),
        count=np.array([8.0, 1, 0, 1]),
        validation=np.array([nan, 0.5, 1.0, nan]),
        architecture=np.zeros(4, int),
    )
    columns = clients.columns()
    assert columns["personal_accuracy"] == 0.5 and columns["personal_loss"] == 2.0
    assert columns["personal_weighted"] == pytest.approx(0.85) and columns["personal_worst10"] == 0.0
    assert columns["personal_std"] == pytest.approx(np.std([1, 0.5, 0])) and columns["validation_accuracy"] == 0.75


def test_validation_rows_follow_the_training_rows(federation):
    given = federation()
    parts = [np.array([4, 5]), np.array([9])]
    kept = [np.array([7]), np.array([1, 2])]
    data = FederatedData(
        Dataset("made", given.federation.samples.x, given.federation.samples.y, None, None, 3),
        Split.of(parts), validation=Split.of(kept),
    )  # fmt: skip
    split = data.train_and_validation()
    assert split.index.tolist() == [4, 5, 7, 9, 1, 2] and split.offsets.tolist() == [0, 3, 6]
    zero = jnp.int32(0)
    client = local.ClientData(given.federation.samples, split.index, zero + 3, zero + 1, zero + 1, zero + 2)
    held = local.validation(client)
    assert (int(held.offset), int(held.size)) == (4, 2)
    alone = local.validation(client._replace(validation_size=zero))
    assert (int(alone.offset), int(alone.size)) == (3, 1)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """Two networks of clients that train alone, with validation and fine-tuning, through the front door."""
    folder = tmp_path_factory.mktemp("personal") / "run"
    flags = (
        "--strategy=local --model=logistic,mlp --architectures=cyclic --clients=4 --cohort=4 --rounds=2 --eval_every=1"
    )
    flags += " --local_epochs=1 --validation_share=0.2 --client_test_share=0.2 --finetune_epochs=1"
    flags += " --holdout_clients=1 --noprogress --devices=1"
    config = configuration.parse([*flags.split(), f"--run_dir={folder}"])
    return run(config), config


def test_a_run_keeps_every_clients_result(digits_run):
    result, _ = digits_run
    with (result.folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["network"] for row in rows] == ["logistic", "mlp"] * 2
    mean = np.mean([float(row["accuracy"]) for row in rows])
    assert result.summary["personal_accuracy"] == pytest.approx(mean) == result.rows[-1]["accuracy"]
    tuned = np.mean([float(row["finetuned_accuracy"]) for row in rows])
    assert result.summary["finetuned_accuracy"] == pytest.approx(tuned)
    assert result.summary["validation_accuracy"] == result.rows[-1]["validation_accuracy"]  # not the fine-tuned one's
    assert 0 <= result.summary["finetuned_validation_accuracy"] <= 1
    assert result.rows[-1]["network_1_mlp"] == 2 and result.rows[-1]["bytes_up"] == 0
    assert (result.folder / "personal.png").stat().st_size > 10_000


def test_each_client_starts_with_its_best_network(digits_run, tmp_path):

    result, config = digits_run
    other = tmp_path / "other"
    other.mkdir()
    lines = (result.folder / "clients.csv").read_text().splitlines()
    header = lines[0].split(",")
    best = [line.split(",") for line in lines[1:]]
    for number, row in enumerate(best):  # better for clients 1 and 3, worse for the others
        row[header.index("validation_accuracy")] = str(number % 2 * 2 - 0.5)
    (other / "clients.csv").write_text("\n".join([lines[0], *map(",".join, best)]) + "\n")
    chosen = dataclasses.replace(config, architectures_from=(str(result.folder), str(other)))
    assert architectures(chosen, 4).tolist() == [0, 1, 0, 1]
    with pytest.raises(UserError, match="about 4 clients, not 5"):
        architectures(chosen, 5)
    with pytest.raises(UserError, match="no results per client"):
        architectures(dataclasses.replace(chosen, architectures_from=("nowhere", "here")), 4)


@pytest.mark.parametrize(
    "value, expected",
    [("blocks", [0, 0, 1, 1]), ("cyclic", [0, 1, 0, 1]), ("1,1,0,1", [1, 1, 0, 1])],
)
def test_architectures(value, expected):

    config = configuration.Config(model="logistic,mlp", architectures=value)
    assert architectures(config, 4).tolist() == expected


@pytest.mark.parametrize(
    "value, message", [("0,1", "lists 2 networks up to number 1, but there are 4"), ("cyclc", "did you mean 'cyclic'")]
)
def test_wrong_architectures(value, message):

    with pytest.raises(UserError, match=message):
        architectures(configuration.Config(model="logistic,mlp", architectures=value), 4)


def test_methods_of_one_network_refuse_several():
    with pytest.raises(UserError, match=r"fedmr needs the same network for all clients, but --model names 2; .* local"):
        configuration.validate(configuration.Config(strategy="fedmr", model="logistic,mlp"))
