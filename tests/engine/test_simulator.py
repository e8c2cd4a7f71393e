"""The simulator as users hold it: names, functions and Flax modules in; accuracies, reports and one-line errors out."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import Layout
from fedjax_mr.engine import simulator as engine_simulator
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import usable_cores
from fedjax_mr.strategies import fedavg, fedmr, fedprox
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

SEVERAL = {"strategy": "local", "model": ["logistic", "mlp"]}
SMALL = fmr.local.setting(epochs=1, batch_size=4)


class Network(nn.Module):
    """A Flax module that knows nothing of this package."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(len(x), -1))


def given(name, num_classes=3):
    return fmr.models.build(name, input_shape=(4, 4, 1), num_classes=num_classes)


def simulator(strategy="fedavg", model="logistic", **options):
    return fmr.Simulator(
        strategy, model, federated(), **{"cohort": 3, "local": SMALL, "layout": Layout(devices=1)} | options
    )


def test_it_learns_and_any_division_into_calls_gives_the_same_bits():
    one = simulator("fedmr")
    state, report = one.run(one.init(), 12)
    assert int(state.round) == 12 and report.images > 0 and isinstance(report.train_loss, np.ndarray | np.generic)
    again, _ = one.run(one.init(), 2)
    again, _ = one.run(again, 10)
    tree_equal(state.server, again.server)
    assert float(one.test(state).accuracy) > 0.7 > float(one.test(one.init()).accuracy)


def test_a_run_is_the_simulator_with_a_folder(tmp_path):
    config = fmr.Config(rounds=3, clients=6, cohort=3, model="logistic", progress=False, run_dir=str(tmp_path / "run"))
    result = fmr.run(config, record=False)
    divided = fmr.data.federate(fmr.data.load("digits"), num_clients=6, partition="dirichlet", alpha=0.5, seed=0)
    alone = fmr.Simulator("fedmr", "logistic", divided, cohort=3)
    state, _ = alone.run(alone.init(), 3)
    tree_close(alone.deployed(state), result.variables, rtol=1e-5, atol=1e-6)
    assert float(alone.test(state).accuracy) == pytest.approx(result.summary["accuracy_last"])


def test_a_strategy_is_a_name_or_a_function_of_settings_and_problem():
    by_name = simulator("fedprox", hyper=fedprox.Hyper(mu=0.5))
    by_function = simulator(lambda hyper, problem: fedprox.build(fedprox.Hyper(mu=0.5), problem))
    by_both = simulator(fedprox.build, hyper=fedprox.Hyper(mu=0.5))
    other = simulator("fedprox", hyper=fedprox.Hyper(mu=50.0))
    simulator(fedprox.build)  # with its default settings
    models = [one.deployed(one.run(one.init(), 2)[0]) for one in (by_name, by_function, by_both, other)]
    tree_equal(models[0], models[1])
    tree_equal(models[0], models[2])
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (models[0], models[3])), strict=True))


def test_several_flax_modules_of_which_each_client_has_one():
    one = simulator("local", [Network(), "logistic"], architectures=[0, 0, 0, 1, 1, 1])
    state, _ = one.run(one.init(), 1)
    assert np.asarray(one.problem.architectures).tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(fmr.UserError, match="local deploys no model"):
        one.test(state)


TRACED = []


class Counting(nn.Module):
    """A network that notes its traces."""

    @nn.compact
    def __call__(self, x, *, train=False):
        TRACED.append(train)
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


def test_the_check_of_ones_own_network_is_the_trace_of_its_program():
    one = simulator(model=Counting())
    traced = TRACED.count(True)
    one.run(one.init(), 2)
    assert TRACED.count(True) == traced > 0


def test_personal_tests_of_all_clients():
    divided = fmr.data.federate(fmr.data.load("digits"), num_clients=6, client_test_share=0.2, seed=0)
    one = fmr.Simulator("fedper", "logistic", divided, cohort=3, local=SMALL, layout=fmr.Layout(devices=1))
    state, _ = one.run(one.init(), 2)
    personal, tuned = one.personal(state), one.personal(state, finetune_epochs=2)
    assert personal.accuracy.shape == (6,) and personal.count.sum() == len(divided.client_test.split.index)
    assert not np.array_equal(personal.accuracy, tuned.accuracy)


def test_the_data_of_one_client():
    one, data = simulator(), federated()
    for client in range(data.num_clients):
        found = one.client(client)
        rows = np.asarray(found.index)[int(found.offset) : int(found.offset + found.size)]
        np.testing.assert_array_equal(rows, data.train.rows(client))
        assert int(found.client_id) == client


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fedmrr"}, "did you mean 'fedmr'"),
        ({"strategy": "FedMR"}, "did you mean 'fedmr'"),
        ({"model": "logistics"}, "did you mean 'logistic'"),
        ({"strategy": lambda problem: None}, "build(hyper, problem)"),
        ({"strategy": fedprox}, "a name or a function build(hyper, problem), not a module"),
        ({"model": Network}, "instance of flax.linen.Module or flax.nnx.Module"),
        ({"cohort": 7}, "cohort=7 is out of range: it must be from 1 to the number of clients, 6"),
        ({"cohort": 0}, "cohort=0 is out of range"),
        ({"layout": Layout(devices=99)}, "devices=99"),
        (
            {"strategy": "local", "model": ["logistic", "mlp"], "architectures": [0, 1]},
            "architectures must be 6 numbers from 0 to 1",
        ),
        (
            {"strategy": "local", "model": ["logistic", "mlp"], "architectures": [0, 1, 2, 0, 1, 0]},
            "architectures must be 6 numbers",
        ),
        ({"architectures": [0.0] * 6}, "architectures must be 6 numbers from 0 to 0"),
        ({"model": fmr.models.Zoo.of([given("logistic"), given("mlp")])}, "fedavg needs the same network"),
        ({"cohort": 2.5}, "cohort=2.5 is out of range"),
        ({"layout": Layout(devices=0)}, "layout.devices=0 is out of range (allowed: >= 1 and <= 65,536)"),
        ({"layout": Layout(lanes=1.5)}, "layout.lanes=1.5 must be a whole number"),
        ({"layout": Layout(lanes="2")}, "layout.lanes='2' must be a whole number"),
        ({"layout": {"lanes": 2}}, "layout= is an fmr.Layout, not a dict"),
        ({"seed": 2**32}, "seed=4294967296 must be a whole number from 0 to 2147483647"),
        ({"local": {"lr": 0.1}}, "local= is what local.setting(...) returns, not a dict"),
        (
            {"strategy": "fedmr", "hyper": {"unit": "leaf"}},
            "hyper= of fedmr is a fedjax_mr.strategies.fedmr.Hyper, not a",
        ),
        ({"strategy": "fedmr", "hyper": fedmr.Hyper(unit="layers")}, "hyper.unit 'layers'; did you mean 'layer'?"),
        ({"strategy": "fedprox", "hyper": fedprox.Hyper(mu=-1.0)}, "hyper.mu=-1.0 is out of range (allowed: >= 0)"),
        ({"layout": Layout(memory="hots")}, "did you mean 'host'"),
        ({"layout": Layout(data_placement="devices")}, "did you mean 'device'"),
        ({"model": given("logistic", num_classes=2)}, "returns 2 logits"),
    ],
)
def test_bad_arguments_are_one_line_about_arguments(options, message):
    with pytest.raises(fmr.UserError) as error:
        simulator(**options)
    assert message in str(error.value) and "--" not in str(error.value) and "\n" not in str(error.value)


def test_a_given_layout_keeps_its_lanes_whatever_the_memory(monkeypatch):
    monkeypatch.setattr(engine_simulator, "memory_limit", lambda axis: 1.0)
    layout = client_axis(devices=1, lanes=3, cohort_size=3)
    assert simulator(layout=layout).axis is layout


@pytest.mark.slow  # quick: test_a_simulator_is_the_first_that_starts_jax
def test_cpu_cores_are_devices_without_further_setup(tmp_path):
    program = (
        "import fedjax_mr as fmr; data = fmr.data.federate(fmr.data.load('digits'));"
        "print(fmr.Simulator('fedmr', 'logistic', data, cohort=5).axis.num_devices)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{min(usable_cores(), 5)}\n", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"lr": -0.1}, "lr=-0.1 is out of range (allowed: > 0)"),
        ({"momentum": 1.5}, "momentum=1.5 is out of range"),
        ({"epochs": 0}, "epochs=0 is out of range (allowed: >= 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
    ],
)
def test_local_settings_are_checked(options, message):
    with pytest.raises(fmr.UserError) as error:
        fmr.local.setting(**options)
    assert message in str(error.value)


def test_calls_with_wrong_arguments_are_one_line():
    one = simulator()
    state, report = one.run(one.init())
    for call, message in (
        (lambda: one.run(state, 0), "rounds=0 must be a whole number of at least 1"),
        (lambda: one.run((state, report)), "a state comes from init(), or is the first of the two results of run"),
        (lambda: one.client(-1), "client_id=-1 must be a whole number from 0 to 5"),
        (lambda: one.attacked(state, 9), "attack_target=9 is the label of no test sample: choose one of 0..2"),
    ):
        with pytest.raises(fmr.UserError) as error:
            call()
        assert message in str(error.value)


def test_a_simulator_is_the_first_that_starts_jax(tmp_path):
    """Tracing the shapes of a convolution would start it with one device."""
    program = (
        "import fedjax_mr as fmr; data = fmr.data.federate(fmr.data.load('digits'));"
        "print(fmr.Simulator('fedavg', 'cnn_digits', data, cohort=2).axis.num_devices)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    run = [sys.executable, "-W", "error::UserWarning", "-c", program]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{min(usable_cores(), 2)}\n", done.stderr


def test_a_state_that_was_consumed_is_refused():
    one = simulator()
    first = one.init()
    state, _ = one.run(first, 1)
    for use in (one.run, one.test, one.deployed):
        with pytest.raises(fmr.UserError, match="consumed by an earlier run"):
            use(first)
    one.test(state)


def test_divergence_says_who_when_and_what_to_do():
    one = simulator(local=fmr.local.setting(lr=1e38, batch_size=4))
    with pytest.raises(fmr.DivergedError, match=r"round 1 diverged: client \d met a loss .* smaller lr"):
        one.run(one.init(), 3)


def test_it_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = simulator(fedavg.build, hyper=fedavg.Hyper())
    one.test(one.run(one.init(), 1)[0])
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_must_be_divided():
    with pytest.raises(fmr.UserError, match=r"not Dataset: divide a dataset with data\.federate\(\)"):
        fmr.Simulator("fedmr", "mlp", fmr.data.load("digits"), cohort=5)
