"""A client and a server that is hostile or broken: one clear line, no file of the client's read, no code run."""

import json
import os
import shlex
import stat

import jax
import numpy as np
import pytest

from fedjax_mr.config import config as configuration
from fedjax_mr.deploy import client, protocol, transport
from fedjax_mr.deploy.samples import ServerSamples, divide
from fedjax_mr.deploy.storage import ClientStorage
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.resolve import resolve

FLAGS = (
    "--dataset=digits --model=mlp --strategy=scaffold --clients=4 --cohort=3 --rounds=2 --local_epochs=1 "
    "--batch_size=64 --validation_share=0.1 --public_share=0.1 --public_max=20 --devices=1 --lanes=1 --import=none"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all samples, the run's record in every message, and the content of `begin`."""
    folder = tmp_path_factory.mktemp("client")
    config = resolve(configuration.parse(shlex.split(FLAGS))).config
    federated = federated_data(config)
    divide(federated, folder)
    samples = ServerSamples.read(folder / "server.npz")
    agreement = protocol.agreement(config, protocol.network_of(config, samples.facts))
    federation = {
        "sizes": federated.sizes.astype(np.int32),
        "validation_sizes": federated.validation.sizes.astype(np.int32),
        "architectures": np.zeros(4, np.int32),
        "memory_key": np.zeros(2, np.uint32),
    }
    public = {"x": samples.public.x, "y": samples.public.y}
    run = protocol.RunManifest("ab" * 8, samples.facts, agreement, label_counts=False).record()
    return folder, run, federation, public


def ask(place, kind, content, *, flags=FLAGS, **settings):
    folder = place[0]
    node = {"client-id": 0, "data": str(folder / "client-0.npz"), "state": str(folder / "state")} | settings
    return client.answer(transport.Message(kind, 100, 0, 0, content), node, {"flags": flags})


def test_an_honest_server_is_answered(place):
    _, run, federation, public = place
    assert ask(place, "join", {"run": run})["member"]["size"] == federation["sizes"][0]
    told = {"run": run, "federation": federation, "public": public}
    assert ask(place, "begin", told) == {"ready": {"client": 0}}
    for path in (place[0] / "state").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def with_facts(run, **changed):
    return {"run": run | {"facts": json.dumps(json.loads(run["facts"]) | changed)}}


REQUESTS = {
    "nothing": lambda run: {},
    "no record": lambda run: {"run": 5},
    "list": lambda run: {"run": run | {"facts": "[]"}},
    "name": lambda run: with_facts(run, name=[1]),
    "shape": lambda run: with_facts(run, shape="ab"),
    "negative": lambda run: with_facts(run, shape=[-1]),
    "mean": lambda run: with_facts(run, mean=["x"]),
    "std": lambda run: with_facts(run, std=[0.0]),
    "no classes": lambda run: with_facts(run, num_classes=0),
    "low": lambda run: with_facts(run, low="x"),
    "another width": lambda run: with_facts(run, task={"name": "regression", "width": 2}, num_classes=1),
    "mean of targets": lambda run: with_facts(
        run, task={"name": "regression", "width": 1, "mean": ["x"]}, num_classes=1
    ),
    "std of targets": lambda run: with_facts(run, task={"name": "regression", "width": 1, "std": [0.0]}, num_classes=1),
    "unknown task": lambda run: with_facts(run, task={"name": "x", "width": 1}),
    "width": lambda run: with_facts(run, task={"name": "regression", "width": -1}, num_classes=-1),
    "vocabulary": lambda run: with_facts(run, vocabulary="x"),
    "agreement": lambda run: {"run": run | {"agreement": "[1]"}},
    "deep": lambda run: {"run": run | {"agreement": "[" * 100_000}},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_malformed_request_is_one_line(place, name):
    with pytest.raises(UserError, match="client 0: a request of the server is malformed"):
        ask(place, "join", REQUESTS[name](place[1]))


FEDERATIONS = [
    ("sizes", None, "not of this version"),
    ("file", np.zeros(1), "not of this version"),
    ("sizes", "x", r"malformed \(sizes"),
    ("sizes", np.zeros((2, 2), np.int32), r"malformed \(sizes"),
    ("sizes", np.full(4, np.nan), r"malformed \(sizes"),
    ("sizes", -np.ones(4, np.int32), r"malformed \(sizes"),
    ("sizes", np.zeros(0, np.int32), "their lengths differ"),
    ("architectures", np.zeros(9, np.int32), "their lengths differ"),
    ("memory_key", np.zeros(3, np.uint32), "their lengths differ"),
    ("memory_key", -np.ones(2, np.int64), r"malformed \(memory_key"),
    ("sizes", np.full(4, 5, np.int32), r"this client has 5 \+ .* samples; it has"),
    ("sizes", np.full(4, 2**31 - 1, np.int32), "or with more than 16,777,216"),
    ("architectures", np.full(4, 7, np.int32), "the setting architectures lists 4 networks up to number 7"),
]


@pytest.mark.parametrize(("name", "value", "line"), FEDERATIONS)
def test_malformed_facts_of_the_federation_are_one_line(place, name, value, line):
    _, run, federation, public = place
    federation = {each: kept for each, kept in (federation | {name: value}).items() if kept is not None}
    with pytest.raises(UserError, match=line):
        ask(place, "begin", {"run": run, "federation": federation, "public": public})


@pytest.mark.parametrize(
    "public", [3, {"x": np.zeros(3)}, {"x": np.array(["a"])}, {"x": [1]}, {"y": np.zeros(3, np.int32)}, {"z": 1}]
)
def test_a_malformed_public_set_is_one_line(place, public):
    _, run, federation, _ = place
    with pytest.raises(UserError, match=r"client 0: (the server's public set is malformed|samples of digits are)"):
        ask(place, "begin", {"run": run, "federation": federation, "public": public})


@pytest.mark.parametrize("numbers", [3, {}, {"last": 2**40}, {"last": -2}, {"last": True}, {"last": np.zeros(2)}])
def test_a_malformed_order_is_one_line(place, numbers):
    _, run, federation, public = place
    ask(place, "begin", {"run": run, "federation": federation, "public": public})
    with pytest.raises(UserError, match="client 0: "):
        ask(place, "train", {"run": run, "payload": {}, "key": {}, "numbers": numbers})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"data": "gone.npz"}, "client 0: there is no file gone.npz: correct data in --node-config and"),
        ({"client-id": "0"}, "client 0: the node settings need client-id, a whole number: flower-supernode --node-con"),
        ({"state": 5}, "client 0: the node settings need state, a text: flower-supernode --node-config 'client-id=3 d"),
    ],
)
def test_wrong_settings_of_a_node_are_one_line_of_its_own_log(place, capsys, settings, line):
    with pytest.raises(UserError) as error:
        ask(place, "join", {"run": place[1]}, **settings)
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"fedjax-mr: {error.value}" and str(error.value).startswith(line)


def test_wrong_samples_of_a_node_are_one_line_of_its_own_log(place, capsys, tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((2, 8, 8, 1), np.float32), y=np.array([0, 10]))
    with pytest.raises(UserError):
        ask(place, "join", {"run": place[1]}, data=str(tmp_path / "mine.npz"))
    said = capsys.readouterr().err
    assert said == f"fedjax-mr: client 0: y in {tmp_path}/mine.npz must be 2 labels from 0 to 9, one per sample\n"


def test_the_line_in_a_nodes_own_log_keeps_the_remedy_of_a_long_path(place, capsys):
    path = "/".join(["a_long_name"] * 20)
    with pytest.raises(UserError):
        ask(place, "join", {"run": place[1]}, data=path)
    assert capsys.readouterr().err.endswith("correct data in --node-config and restart the SuperNode\n")


@pytest.mark.parametrize("why", [{}, {"why": 5}, {"why": {"line": "\x1b[2J\nfedjax-mr: all is well" + "x" * 10**6}}])
def test_a_client_that_is_not_admitted_says_why(place, capsys, why):
    with pytest.raises(UserError, match="client 0: the server does not admit it: "):
        ask(place, "rejected", {"run": place[1], **why})
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("fedjax-mr: client 0: the server does not admit it") and said.isprintable()


def test_what_nobody_thought_of_is_one_line_too(place, monkeypatch, capsys):
    """The server gets one line; the place is in the node's own log, without the words of the server."""

    def fail(self, message):
        raise IndexError("\x1b[2J\n" + "x" * 10**6)

    monkeypatch.setattr(client.Client, "join", fail)
    with pytest.raises(UserError) as error:
        ask(place, "join", {"run": place[1]})
    assert str(error.value).startswith("client 0 cannot answer the request to join: IndexError: ?[2J xxx")
    assert len(str(error.value)) == 200
    said = capsys.readouterr().err
    assert "in fail" in said and "\x1b" not in said and len(said) < 2000


@pytest.mark.parametrize("flag", ["--flagfile={}", "-flagfile={}", "--flagfile {}", "--lr 0.1 ---flagfile={}"])
def test_no_flag_file_of_a_client_is_read(place, flag, tmp_path):
    (tmp_path / "secret").write_text("a line of a secret\n")
    with pytest.raises(UserError, match="which clients do not accept") as error:
        ask(place, "join", {"run": place[1]}, flags=f"{FLAGS} {flag.format(tmp_path / 'secret')}")
    assert "line of a secret" not in str(error.value)


@pytest.mark.parametrize("flag", ["--import={}", "-import={}", "--import {}", "--lr=0.1 --import={}#0123456789ab"])
def test_no_code_of_the_servers_choice_runs(place, flag, tmp_path):
    code, ran = tmp_path / "code.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(
        UserError, match=r"a client only runs code named in its node settings|which clients do not accept"
    ):
        ask(place, "join", {"run": place[1]}, flags=f"{FLAGS} {flag.format(code)}")
    assert not ran.exists()


@pytest.mark.parametrize("flag", ["--pretrained={}", "-pretrained={}", "--pretrained {}"])
def test_no_weights_of_the_servers_choice_are_read(place, flag, tmp_path):
    """The client does not say what it has there either, unless its own settings name the folder."""
    (tmp_path / "here").mkdir()
    refused = []
    for name in ("here", "away"):
        with pytest.raises(UserError, match="a client only reads files that its node settings name: add pret") as error:
            ask(place, "join", {"run": place[1]}, flags=f"{FLAGS} {flag.format(tmp_path / name)}")
        refused.append(str(error.value).replace(name, ""))
    assert refused[0] == refused[1]
    own = {"pretrained": str(tmp_path / "here")}
    with pytest.raises(UserError, match="here was not written by"):
        ask(place, "join", {"run": place[1]}, flags=f"{FLAGS} {flag.format(own['pretrained'])}", **own)


def test_the_code_of_the_nodes_own_settings_runs(place, tmp_path, registries):
    """With other code than the server's, the client does not join; with the same, it does."""
    code = tmp_path / "own_network.py"
    code.write_text("import fedjax_mr as fmr\nfmr.MODELS['mlp_of_deploy'] = fmr.MODELS['mlp']\n")
    folder, run, _, _ = place
    flags = FLAGS.replace("--model=mlp", "--model=mlp_of_deploy").replace("--import=none", f"--import={code}")
    config = resolve(configuration.parse(shlex.split(flags))).config
    flags = flags.replace(str(code), config.imports[0].replace(str(tmp_path), "/of/the/server"))
    samples = ServerSamples.read(folder / "server.npz")
    agreed = protocol.agreement(config, protocol.network_of(config, samples.facts))
    own = run | {"agreement": json.dumps(agreed)}
    assert "member" in ask(place, "join", {"run": own}, flags=flags, **{"import": str(code)})
    other = run | {"agreement": json.dumps(agreed | {"settings": "0" * 16})}
    with pytest.raises(UserError, match="install the same versions and code: settings"):
        ask(place, "join", {"run": other}, flags=flags, **{"import": str(code)})
    with (
        jax.threefry_partitionable(False),  # it would draw other numbers than the server
        pytest.raises(UserError, match="jax_threefry_partitionable False here and True at the server"),
    ):
        ask(place, "join", {"run": own}, flags=flags, **{"import": str(code)})
    with pytest.raises(UserError, match="import in the node settings must be a text"):
        ask(place, "join", {"run": own}, flags=flags, **{"import": 3})


def test_the_task_of_the_nodes_own_code_is_known_when_the_facts_are_read(place, tmp_path, registries):
    """The server's own code has it, too; here the server is another one, so the client reads the facts and refuses."""
    code = tmp_path / "own_task.py"
    code.write_text(
        "import fedjax_mr as fmr\nclass Dose(fmr.tasks.Regression):\n    name = 'dose'\nfmr.TASKS['dose'] = Dose\n"
    )
    run = with_facts(place[1], task={"name": "dose", "width": 1}, num_classes=1)
    with pytest.raises(UserError, match="the task 'dose' is not registered: import its file"):
        ask(place, "join", run)
    with pytest.raises(UserError, match="it does not match the server"):
        ask(place, "join", run, flags=FLAGS.replace("none", str(code)), **{"import": str(code)})


def test_a_state_folder_of_before_is_closed_to_others(tmp_path):
    (tmp_path / "state" / "ab").mkdir(parents=True)
    os.chmod(tmp_path / "state" / "ab", 0o755)
    with ClientStorage(tmp_path / "state", "ab") as storage:
        storage.write("memory-1", {"x": np.zeros(1)})
    assert stat.S_IMODE((tmp_path / "state" / "ab").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "state" / "ab" / "memory-1.npz").stat().st_mode) == 0o600
