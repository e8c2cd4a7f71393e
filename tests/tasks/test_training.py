"""The task in training and tests: the loss of every method, runs of a regression, and what the first metric decides."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import tasks
from fedjax_mr.channel import base
from fedjax_mr.config import config as configuration
from fedjax_mr.data.facts import Facts
from fedjax_mr.engine.personal import Clients
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.processes import ALONE
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import set_up
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.tasks.losses import with_loss
from fedjax_mr.testing import tasks as small

TRAINED_BY_THEMSELVES = (  # methods that write down their own loss or step, to which the task's loss must come
    "fedprox", "moon", "fedgen", "fedntd", "fedlc", "feddyn", "perfedavg", "pfedme", "pfedbayes", "fml", "fedmd",
    "fedkemf", "fccl", "fedproto", "fedgh", "heterofl", "adaptivefl", "fedsmoo", "mapper", "pfedhr",
)  # fmt: skip


def is_slow(strategy):
    return () if strategy in TRAINED_BY_THEMSELVES else pytest.mark.slow


@pytest.mark.parametrize("strategy", [pytest.param(each, marks=is_slow(each)) for each in STRATEGIES])
def test_a_loss_of_ones_own_reaches_every_method(strategy):
    """It is traced in place of the cross-entropy, which the methods' own terms do not replace."""
    seen = []

    def mine(outputs, targets, mask):
        seen.append(outputs.shape)
        return jnp.sum(jnp.square(outputs), axis=-1)

    engine = small.simulator(strategy, "classification", loss=mine).rounds
    jax.eval_shape(small.one_round(engine), engine.constants)
    assert seen


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_links_of_a_channel_know_the_upload_of_every_task(task):
    """Compression with memory, privacy, robust means and clocks need its shapes before anybody trains."""
    simulator = small.simulator("fedavg", task)
    upload = base.upload_shapes(simulator.rounds.strategy, simulator.problem)
    assert jax.tree.map(np.shape, upload["model"]) == jax.tree.map(np.shape, simulator.model.shapes())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "segmentation", "language"])
@pytest.mark.parametrize(
    "flags", [{"compress": "topk", "error_feedback": "ef"}, {"robust": "median"}, {"mode": "async", "in_flight": 4}],
    ids=["compressed", "robust", "asynchronous"],
)  # fmt: skip
def test_a_channel_and_late_clients_train_every_task(task, flags, tmp_path):
    """The loss of the training falls."""
    family = small.OfVectors if task == "regression" else small.OfPositions
    config = fmr.Config(
        partition="iid", clients=6, cohort=4, local_epochs=1, rounds=6, eval_every=2, lr=0.1, devices=1,
        progress=False, run_dir=str(tmp_path / "run"), **flags,
    )  # fmt: skip
    dataset = small.federated(task).dataset
    result = fmr.run(config, dataset=dataset, model=family(num_classes=dataset.task.width), record=False)
    first, last = result.rows[0], result.rows[-1]
    assert last["loss"] < first["loss"] and np.isfinite(last[dataset.task.default_metrics[0]])


def test_the_own_task_of_a_simulator():
    """The task of the arguments takes the place of that of the dataset: the same targets as another kind of number."""
    federated, task = small.federated("regression"), tasks.Regression(width=2, mean=(0.5,), std=(0.25,), unit="mg")
    options = {"cohort": 5, "layout": fmr.Layout(devices=1), "task": task, "metrics": ["mae"]}
    simulator = fmr.Simulator("fedavg", small.OfVectors(num_classes=2), federated, **options)
    assert simulator.model.task == dataclasses.replace(task, metrics=(tasks.METRICS["mae"],))
    with pytest.raises(UserError, match="the training set needs one integer label per sample"):
        fmr.Simulator("fedavg", "mlp", federated, cohort=5, task=tasks.Classification(width=3))


@pytest.mark.parametrize("mu", [0.0, 5.0])
def test_fedprox_with_class_weights_keeps_its_own_term(mu):
    def trained(strategy, hyper, **options):
        federated, network = small.federated("classification"), small.network("classification")
        simulator = fmr.Simulator(
            strategy, network, federated, cohort=6, seed=1, hyper=hyper, layout=fmr.Layout(devices=1), **options
        )
        state, _ = simulator.run(simulator.init(), 2)
        return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.device_get(simulator.deployed(state)))])

    plain, weighted = trained("fedavg", None), trained("fedavg", None, loss="weighted")
    proximal = trained("fedprox", fmr.strategies.fedprox.Hyper(mu=mu), loss="weighted")
    assert not np.allclose(plain, weighted, atol=1e-3)
    assert np.allclose(weighted, proximal, atol=1e-6) == (mu == 0)


def test_one_full_batch_of_fedavg_is_a_gradient_step_of_pooled_least_squares():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.normal(3, 2, size=60).astype(np.float32)
    owner = np.repeat([0, 1, 2], [10, 20, 30])
    dataset = fmr.from_arrays(x, y, task="regression", client=owner, x_test=x, y_test=y, client_test=owner)
    federated = fmr.data.federate(dataset, partition="natural", num_clients=0)
    setting = fmr.local.setting(lr=0.1, momentum=0.0, epochs=1, batch_size=30)
    simulator = fmr.Simulator("fedavg", "logistic", federated, cohort=3, local=setting, layout=fmr.Layout(devices=1))
    before = simulator.init()
    flat = lambda tree: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(jax.device_get(tree))]
    bias, weights = flat(simulator.deployed(before))
    state, _ = simulator.run(before, 1)
    target = (y.astype(np.float64) - y.mean()) / y.std()
    error = x @ weights[:, 0] + bias[0] - target  # the weighted mean of the clients' gradients is that of all samples
    expected = bias - 0.1 * 2 * error.mean(), weights[:, 0] - 0.1 * 2 * x.T.astype(np.float64) @ error / 60
    new_bias, new_weights = flat(simulator.deployed(state))
    np.testing.assert_allclose(new_bias, expected[0], rtol=1e-5)
    np.testing.assert_allclose(new_weights[:, 0], expected[1], rtol=1e-4, atol=1e-6)
    tested = simulator.test(state).metrics
    prediction = (x @ new_weights[:, 0] + new_bias[0]) * y.std() + y.mean()
    np.testing.assert_allclose(tested["rmse"], np.sqrt(np.mean((prediction - y) ** 2)), rtol=1e-5)


@pytest.fixture(scope="module")
def dose(tmp_path_factory):
    """A finished run of a regression with its folder; errors are judged, so less is better."""
    folder = tmp_path_factory.mktemp("dose")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    np.savez(folder / "dose.npz", x=x, y=100 + 20 * x[:, 0], client=np.arange(300) % 6)
    config = fmr.Config(
        dataset=str(folder / "dose.npz"), task="regression", partition="natural", clients=0, cohort=3, model="logistic",
        rounds=4, eval_every=1, validation_share=0.2, eval_clients=True, keep_best=True, target_accuracy=15.0,
        run_dir=str(folder / "run"), progress=False, devices=1,
    )  # fmt: skip
    return fmr.run(config), x, folder


def test_a_run_is_judged_by_its_error(dose):
    result, _, folder = dose
    errors = [row["rmse"] for row in result.rows]
    assert errors[-1] < errors[0] and list(result.rows[0])[:5] == ["round", "rmse", "mae", "r2", "loss"]
    assert result.summary["rmse_best"] == min(errors) and result.summary["rmse_last"] == errors[-1]
    assert result.summary["rounds_to_target"] == next(row["round"] for row in result.rows if row["rmse"] <= 15)
    best = min(result.rows, key=lambda row: row["validation_rmse"])
    assert result.summary["best_checkpoint"] == best["round"]
    assert result.rows[-1]["personal_worst10"] > result.rows[-1]["personal_rmse"]  # the worst have the largest errors
    first = (folder / "run" / "clients.csv").read_text().splitlines()[0]
    assert first.endswith("validation_rmse,validation_mae,validation_r2,rmse,mae,r2")


def test_a_saved_run_predicts_in_the_unit_of_the_target(dose):
    result, x, folder = dose
    saved = fmr.load(folder / "run")
    np.testing.assert_array_equal(saved.predict(x[:7]), result.predict(x[:7]))
    assert abs(saved.predict(x).mean() - 100) < 5 and saved.samples.learned.name == "regression"
    with pytest.raises(UserError, match="only probabilities are calibrated, and the task regression has none"):
        saved.calibrated()


def test_a_run_of_another_task_resumes_with_the_same_bits(dose, tmp_path):
    result, _, _ = dose
    config = configuration.load(result.folder)
    half = fmr.run(dataclasses.replace(config, rounds=2, run_dir=str(tmp_path / "half")))
    assert len(half.rows) == 2
    whole = fmr.run(dataclasses.replace(config, run_dir=str(tmp_path / "half"), resume=True))
    untimed = lambda rows: [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    assert untimed(whole.rows) == untimed(result.rows)


def test_a_stop_at_a_value_waits_for_a_low_error(dose, tmp_path):
    config = dataclasses.replace(configuration.load(dose[0].folder), run_dir=str(tmp_path / "stopped"))
    reached = dose[0].rows[1]["rmse"]
    stopped = fmr.run(dataclasses.replace(config, stop_at_accuracy=reached, keep_best=False))
    assert stopped.summary["ended_by"] == "stop_at_accuracy" and stopped.summary["rounds"] <= 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"task": "regresion"}, "unknown task 'regresion'; did you mean 'regression'"),
        ({"loss": "weighted"}, "loss=weighted needs classes, which the task regression has not"),
        ({"metrics": "accuracy"}, "metric accuracy needs classes, which regression has not: it has rmse, mae, r2"),
        ({"metrics": "rsme"}, "unknown metric 'rsme'; did you mean 'rmse'"),
        ({"strategy": "fedlc"}, "fedlc needs a class per sample, but the task is regression"),
        ({"attack": "label_flip", "attackers": 0.3}, "attack=label_flip changes classes, but the task is regression"),
        ({"model": "unet"}, "unet"),
        ({"task": None}, "task='regression' predicts numbers"),
    ],
)
def test_what_does_not_fit_the_task_is_refused_in_one_line(dose, tmp_path, changes, message):
    config = dataclasses.replace(configuration.load(dose[0].folder), run_dir=str(tmp_path / "refused"), keep_best=False)
    if "strategy" in changes:
        changes = changes | {"hyper": None}
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as error:
        fmr.run(dataclasses.replace(config, **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "refused").exists()


@pytest.mark.parametrize("flag", ["target_accuracy", "stop_at_accuracy"])
def test_no_share_of_the_samples_is_97(flag, tmp_path):
    with pytest.raises(UserError, match=rf"{flag}=97.0 is out of range \(allowed: >= 0 and <= 1\)"):
        fmr.run(fmr.Config(**{flag: 97.0}, run_dir=str(tmp_path / "run")))


def test_partitions_by_label_need_labels():
    masks = fmr.data.load("masks")
    with pytest.raises(UserError, match="partition 'dirichlet' divides samples by their labels, but the task segm"):
        fmr.data.federate(masks, partition="dirichlet")


def test_an_augmentation_does_not_move_images_away_from_their_masks(tmp_path):
    config = fmr.Config(dataset="masks", partition="natural", clients=0, model="unet", augment="crop_flip")
    with pytest.raises(UserError, match="augment=crop_flip would move the images but not their masks"):
        fmr.run(dataclasses.replace(config, run_dir=str(tmp_path / "masks"), progress=False))


def test_a_client_for_whom_a_metric_is_undefined_is_left_out_of_the_mean():
    task = tasks.with_metrics(tasks.Classification(width=2), ["auroc"])
    nan, zeros = np.nan, np.zeros(3)
    clients = Clients(
        task, {"auroc": np.array([0.5, nan, 0.7])}, zeros, zeros + 4, {"auroc": zeros * nan}, zeros * nan, zeros
    )
    columns = clients.columns()
    assert columns["personal_auroc"] == pytest.approx(0.6) and columns["personal_worst10"] == 0.5
    assert "validation_loss" not in columns


def test_the_facts_of_a_task_survive_a_run_folder():
    for kind, task in small.KINDS.items():
        dataset = small.federated(kind).dataset
        facts = Facts.of(dataset)
        again = Facts.parse(facts.text())
        assert again == facts and again.learned.facts() == task.facts()
        assert ("task" in json.loads(facts.text())) == (kind != "classification")
        placeholder = again.dataset(3)
        assert placeholder.y.shape == (3, *dataset.y.shape[1:]) and placeholder.y.dtype == dataset.y.dtype


def test_calibration_finds_the_temperature_and_keeps_the_classes():
    """Logits of a network that is three times too sure: the labels are drawn from the softmax of a third of them."""
    federated = small.federated("classification")
    simulator = fmr.Simulator(
        "fedavg", small.network("classification"), federated, cohort=5, layout=fmr.Layout(devices=1)
    )
    network = fmr.TrainedNetwork.of(
        simulator.model, jax.device_get(simulator.deployed(simulator.init())), Facts.of(federated.dataset)
    )
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(4000, 4, 4, 1)).astype(np.float32)
    sure = dataclasses.replace(network, variables=jax.tree.map(lambda leaf: np.float32(4) * leaf, network.variables))
    logits = sure.outputs(x) / 3
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (rng.random((4000, 1)) > np.cumsum(shares, axis=1)[:, :-1]).sum(1)
    calibrated = sure.calibrated(x, y)
    assert calibrated.temperature == pytest.approx(3, rel=0.15)
    np.testing.assert_array_equal(calibrated.predict(x).argmax(1), sure.predict(x).argmax(1))
    np.testing.assert_allclose(calibrated.predict(x).sum(1), 1, rtol=1e-5)
    weights = np.array([1.0, 2.0, 8.0])  # of a loss that has taught the network shares times weights
    shares = shares / weights / (shares / weights).sum(1, keepdims=True)
    y = (rng.random((4000, 1)) > np.cumsum(shares, axis=1)[:, :-1]).sum(1)
    weighted = sure.calibrated(x, y, weights=weights)
    assert weighted.temperature == pytest.approx(3, rel=0.15)
    np.testing.assert_allclose(weighted.predict(x).mean(0), np.bincount(y) / 4000, atol=0.02)
    assert abs(sure.calibrated(x, y).predict(x).mean(0) - np.bincount(y) / 4000).max() > 0.2


def test_the_weights_of_a_loss_are_those_of_the_training_samples():
    task = tasks.Classification(width=3)
    weighted = with_loss(task, "weighted", None, np.array([1, 2, 3]))
    batch = np.zeros((3, 3), np.float32), np.arange(3), np.ones(3, np.float32)
    in_training, in_tests = jax.jit(lambda *batch: (weighted.objective(*batch), weighted.loss(*batch)))(*batch)
    np.testing.assert_allclose(in_training / np.log(3), [2, 1, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(in_tests, np.log(3), rtol=1e-6)


@pytest.mark.parametrize("model", ["mlp", "mlp_table"])
def test_a_network_that_does_not_know_categories_is_named(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"{row % 3},{'abc'[row % 3]},{row / 40}" for row in range(40)]
    (tmp_path / "doses.csv").write_text("\n".join(["site,drug,dose", *rows]))
    config = fmr.Config(
        dataset="doses.csv", target="dose", task="regression", client_column="site", partition="natural", clients=0,
        cohort=2, rounds=1, model=model, run_dir="run", devices=1,
    )  # fmt: skip
    config, user_objects, _ = resolve(config)
    federated = federated_data(config)
    config, network = user_objects.build(config, federated)
    with contextlib.ExitStack() as cleanup:  # a run until before its first round
        set_up(config, federated, network, ALONE, cleanup, record=False)
    assert ("mlp reads the numbers of categories in doses" in capsys.readouterr().err) == (model == "mlp")
