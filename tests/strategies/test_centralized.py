"""Centralized training is that of one client who owns all samples; the clients stay for the tests."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import Config
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.run import run
from fedjax_mr.strategies import centralized
from fedjax_mr.strategies.parts import GlobalModel
from fedjax_mr.strategies.traffic import Traffic


@pytest.mark.parametrize("cohort", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_it_is_the_training_of_one_client_who_owns_all_samples(engine, close, cohort):
    together = engine("centralized", "perceptron", cohort=cohort)
    one = engine("fedavg", "perceptron", sizes=(38,), cohort=1)  # the same samples in the same order
    progress, report = together.run(together.init(), 3)
    expected, expected_report = one.run(one.init(), 3)
    close(progress.server.model, expected.server.model)
    assert (report.images, report.steps) == (expected_report.images, expected_report.steps)
    assert report.traffic.num_bytes() == (0, 0, 0)


def test_what_clients_keep_for_validation_is_not_trained_on():
    index = np.array([10, 11, 12, 13, 14, 15, 16, 17], np.int32)  # 2 + 1, 3 + 0, 1 + 1
    sizes, validation_sizes = jnp.array([2, 3, 1], jnp.int32), jnp.array([1, 0, 1], jnp.int32)
    nothing = Samples(*(np.zeros(1, np.float32),) * 4)
    data = ClientData(nothing, index, jnp.int32(3), jnp.int32(6), jnp.int32(1))
    pooled = centralized.pool(data, sizes, validation_sizes)
    assert pooled.index.tolist() == [10, 11, 13, 14, 15, 16, 12, 17]
    assert (int(pooled.offset), int(pooled.size), int(pooled.validation_size)) == (0, 6, 2)


def test_samples_on_the_host_are_an_error(engine):
    with pytest.raises(UserError, match="data_placement='device'"):
        apart = engine("centralized", "linear", data_on_host=True)
        apart.run(apart.init(), 1)


@pytest.mark.slow
def test_clients_are_tested_and_fine_tuned_one_by_one(tmp_path):
    config = Config(
        strategy="centralized",
        model="logistic",
        clients=5,
        cohort=1,
        rounds=2,
        validation_share=0.2,
        eval_clients=True,
        finetune_epochs=1,
        run_dir=str(tmp_path / "run"),
        progress=False,
    )
    result = run(config)
    table = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    assert len(table) == 1 + 5
    assert result.rows[-1]["images"] == 2 * config.local_epochs * sum(int(line.split(",")[4]) for line in table[1:])
    assert result.rows[-1]["bytes_down"] == result.rows[-1]["bytes_up"] == 0
    assert 0.5 < result.summary["personal_accuracy"] <= 1
    assert result.summary["finetuned_accuracy"] != result.summary["personal_accuracy"]


def test_samples_on_the_host_are_refused_before_a_folder_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(strategy="centralized", model="logistic", data_placement="host", rounds=1, progress=False)
    with pytest.raises(UserError, match="needs the samples of all clients at once: pass data_placement='device'"):
        run(config)
    assert not list(tmp_path.rglob("*"))


def test_the_first_row_trains_on_the_samples_of_all_clients_and_its_model_is_the_servers(tiny, monkeypatch):
    strategy = centralized.build(None, tiny.problem((1, 3, 2), validation_sizes=jnp.array([0, 1, 0])))
    cohort = strategy.select(None, None, None)
    assert (cohort.ids.tolist(), cohort.sizes.tolist()) == ([0, 1], [6, 0])

    def train(model, setting, variables, data, key):
        return (variables, setting.max_size, data.index.tolist(), int(data.offset), key), "metrics"

    monkeypatch.setattr(local, "train", train)
    samples = Samples(*(np.zeros(1, np.float32),) * 4)
    data = ClientData(samples, np.arange(10, 17, dtype=np.int32), jnp.int32(4), jnp.int32(6), jnp.int32(1))
    upload, _, _ = strategy.client_update({"model": "received"}, None, data, 0, "key")
    assert upload == {"trained": ("received", 7, [10, 11, 12, 13, 15, 16, 14], 0, "key")}

    trained = {"params": {"w": jnp.array([4.0, 8.0])}}
    state, _ = strategy.server_update(GlobalModel({"params": {"w": 0.0}}), {"trained": trained}, cohort, 0, None)
    assert float(state.model["params"]["w"]) == 4
    assert strategy.traffic("usual", state, trained, cohort, 0) == Traffic()
