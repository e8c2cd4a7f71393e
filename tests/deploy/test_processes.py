"""Federations of Flower's own processes, on loopback addresses alone: the simulator's weights, whatever is killed.

A killed ServerApp is in test_federation.py.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import ssl
import sys
from pathlib import Path

import numpy as np
import pytest

import deployment
import fedjax_mr as fmr
from fedjax_mr.deploy.__main__ import main
from fedjax_mr.testing.federations import tree_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed (the extra deploy)"),
]
needs_proxy = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")

FLAGS = (
    "--dataset=digits --model=mlp --strategy=fedmr --clients=2 --cohort=2 --rounds=2 --batch_size=50 "
    "--local_epochs=1 --devices=1 --lanes=1 --eval_every=1 --seed=3"
)


class Trial(deployment.Federation):
    """A federation of two clients with the digits, and what the simulator makes of them."""

    def __init__(self, folder: Path, *, flags: str = "", **options: bool) -> None:
        super().__init__(folder, **options)
        told = f"{FLAGS} {flags}".split()
        for command in (["new", f"{folder}/fed", *told], ["divide", f"{folder}/fed/data", *told]):
            assert main(command) == 0
        self.python("fedjax_mr.main", *told, f"--run_dir={folder}/simulated")

    def settings(self, client: int) -> dict[str, object]:
        """The settings of a client's node."""
        own = {"client-id": client, "data": f"{self.folder}/fed/data/client-{client}.npz"}
        return own | {"state": f"{self.folder}/fed/state-{client}"}

    def supernodes(self) -> None:
        """Start both SuperNodes."""
        for client in range(2):
            self.supernode(client, self.settings(client))

    def go(self, name: str = "run") -> str:
        """Start the run."""
        return self.run("fed", name=name)

    def rounds(self) -> int:
        """The number of rounds in the run folder."""
        path = self.folder / "fed" / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def check(self, run: str, *, seconds: float = 1500, name: str = "run", rtol: float = 0) -> None:
        """Wait for the end of a run, and compare weights and columns with the simulator's: bit for bit if rtol is 0."""
        logs = lambda: "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))
        assert self.finish(run, seconds, name=name) == "finished:completed", logs()
        real, simulated = (fmr.load(self.folder / each) for each in ("fed/run", "simulated"))
        tree_close(real.variables, simulated.variables, rtol=rtol, atol=rtol / 10)
        for ours, theirs in zip(real.rows, simulated.rows, strict=True):
            assert list(ours) == list(theirs)
            names = [name for name in ours if name != "seconds"]
            np.testing.assert_allclose([ours[name] for name in names], [theirs[name] for name in names], rtol=rtol)


@pytest.fixture
def trial(tmp_path):
    """A function that starts a federation, which is stopped after the test."""
    started = []

    def start(**options):
        started.append(Trial(tmp_path, **options))
        return started[0]

    yield start
    for each in started:
        each.stop()


OF_CLIENTS = "--eval_clients --client_test_share=0.2"


@pytest.mark.parametrize(
    ("flags", "columns", "rtol"),
    [
        pytest.param("", ["accuracy"], 0, id="digits"),
        pytest.param(
            f"--metrics=macro_f1,accuracy {OF_CLIENTS}", ["macro_f1", "accuracy", "personal_macro_f1"], 0, id="macro_f1"
        ),
        pytest.param(
            f"--dataset=diabetes --model=mlp_table {OF_CLIENTS}",
            ["rmse", "mae", "r2", "personal_rmse", "personal_mae", "personal_r2"],
            1e-5,  # XLA joins the few numbers of this loss with others, in another way in the simulator's program
            id="regression",
        ),
    ],
)
def test_two_nodes(flags, columns, rtol, trial):
    """The metrics are those of the task or of --metrics, and the first column is the first of them."""
    one = trial(flags=flags)
    one.superlink()
    one.supernodes()
    one.check(one.go(), rtol=rtol)
    rows = fmr.load(one.folder / "fed" / "run").rows
    assert [name for name in rows[-1] if name in columns] == columns
    assert all(np.isfinite(rows[-1][name]) for name in columns)


def test_int8_uploads_are_a_quarter_of_the_bytes_on_the_wire(tmp_path):
    """Bytes that the nodes send to the SuperLink, of a run without and of one with --compress=int8."""
    settings, sent, counted = [*FLAGS.split(), "--model=mlp", "--rounds=1"], {}, {}
    with deployment.federation(tmp_path) as one, deployment.Forwarder(one.port) as forwarder:
        one.superlink()
        for client in range(2):
            own = {"data": f"{tmp_path}/plain/data/client-{client}.npz", "state": f"{tmp_path}/state-{client}"}
            one.supernode(client, {"client-id": client, **own}, port=forwarder.port)
        for name, flags in {"plain": [], "int8": ["--compress=int8"]}.items():
            for command in (["new", f"{tmp_path}/{name}"], ["divide", f"{tmp_path}/{name}/data"]):
                assert main([*command, *settings, *flags]) == 0
            before = forwarder.sent
            assert one.finish(one.run(name, name=name), 1500, name=name) == "finished:completed", one.log(name)
            sent[name] = forwarder.sent - before
            counted[name] = deployment.metrics(tmp_path / name / "run")[-1]["bytes_up"]
            assert sent[name] > counted[name]  # there are also gRPC's headers, answers without a model, and polling
    print(sent, counted)
    assert 0.25 < counted["int8"] / counted["plain"] < 0.251  # one byte per number, and four per array
    assert abs((sent["plain"] - sent["int8"]) / (counted["plain"] - counted["int8"]) - 1) < 0.3  # polling differs


LOST_LINE = "trying again: start its SuperNode again if it has ended"


def test_killed_clients(trial):
    """A ClientApp dies at its work, and then a SuperNode, which comes back with another number."""
    one = trial()
    one.superlink()
    one.supernodes()
    run = one.go()
    at_work = lambda: one.children("node-1", "flwr-clientapp")
    deployment.wait_for(
        lambda: (one.folder / "fed" / "state-1").exists() and at_work(), 1000, "a client at work", pause=0.05
    )
    for pid in at_work():
        os.kill(pid, signal.SIGKILL)
    deployment.wait_for(lambda: one.rounds() >= 1, 1000, "round 1", pause=0.05)
    one.kill("node-0")
    deployment.wait_for(lambda: f"client 0: node unavailable; {LOST_LINE}" in one.log("run"), 100, "the line about it")
    one.supernode(0, one.settings(0))
    one.check(run)


def test_a_supernode_that_is_stopped_by_ctrl_c(trial):
    """The SuperLink removes it, so no message can be sent until it comes back, with another number."""
    one = trial()
    one.superlink()
    one.supernodes()
    run = one.go()
    deployment.wait_for(lambda: one.rounds() >= 1, 1000, "round 1", pause=0.05)
    deployment.wait_for(lambda: one.children("node-0", "flwr-clientapp"), 100, "client 0 at work", pause=0.05)
    one.interrupt("node-0")
    deployment.wait_for(lambda: LOST_LINE in one.log("run"), 100, "the line about it")
    one.supernode(0, one.settings(0))
    one.check(run, seconds=500)  # less than --reply_timeout
    assert "lost client" not in one.log("run")


def test_a_killed_superlink_on_a_database(trial):
    """It dies with its ServerApp, as when its host does, and comes back to the same nodes."""
    one = trial(database=True)
    one.superlink()
    one.supernodes()
    one.go()
    deployment.wait_for(lambda: one.rounds() >= 1, 1000, "round 1", pause=0.05)
    one.kill("superlink")
    one.superlink()
    one.check(one.go("again"), name="again")


RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
PAGE = RECIPES / "real_clients.md"


def follow(text, folder):
    """Run what a new user reads, in order: long-lived commands each in a terminal of its own, on ports that are free.

    Return the logs of all blocks.
    """
    with deployment.federation(folder) as one:
        one.environment["HOME"] = one.environment.pop("FLWR_HOME")
        ports = {"8000": one.port, "9094": deployment.free_port(), "9095": deployment.free_port()}
        blocks = re.findall(r"```(console|sh|python)(?: title=\"(.*?)\")?\n(.*?)```", text, flags=re.DOTALL)
        for number, (language, file, code) in enumerate(blocks):
            if file:
                (folder / file).write_text(code)
                continue
            for printed, own in ports.items():
                code = code.replace(printed, str(own))
            code = re.sub(r"(?m)^\$ ", "", code)
            command = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
            process = one.start(f"block {number}", *command, code)
            if code.startswith("flower-superlink"):
                deployment.wait_for(lambda: deployment.answers(one.port), 120, "the SuperLink")
            elif not code.startswith("flower-"):
                assert process.wait(900) == 0, one.log(f"block {number}")
        return "".join(one.log(f"block {number}") for number in range(len(blocks)))


def test_the_pages_three_terminals(tmp_path):
    """The simulator's weights but for the last digits, because the network has convolutions."""
    section = PAGE.read_text(encoding="utf-8").split("## Three terminals on one laptop")[1].split("\n## ")[0]
    follow(section, tmp_path)
    real, simulated = (fmr.load(tmp_path / each) for each in ("fed/run", "simulated"))
    tree_close(real.variables, simulated.variables, rtol=1e-5, atol=1e-6)


def test_the_page_of_two_hospitals(tmp_path):
    """All pixels together have the mean and the standard deviation by which the server and both clients divide."""
    logs = follow((RECIPES / "two_hospitals.md").read_text(encoding="utf-8"), tmp_path)
    assert logs.count("no problems found") == 3 and "client-id 0, 1; connected nodes" in logs
    assert int(re.search(r"(\d+) of 60 images of the server are classified correctly", logs)[1]) > 48, logs
    pixels = np.concatenate([np.load(tmp_path / f"hospital-{client}" / "scans.npz")["x"] for client in range(2)]) / 255
    saved = fmr.load(tmp_path / "scans" / "run")
    np.testing.assert_allclose([saved.samples.mean[0], saved.samples.std[0]], [pixels.mean(), pixels.std()], rtol=1e-6)
    assert saved.config.dataset == str(tmp_path / "server" / "scans.npz")


def test_a_client_with_a_wrong_path_says_so_in_its_own_terminal(tmp_path):
    """The server says meanwhile for which client it waits, and continues when the path is right."""
    flags = [*FLAGS.split(), "--model=logistic", "--rounds=1"]
    for command in (["new", f"{tmp_path}/fed", *flags], ["divide", f"{tmp_path}/fed/data", *flags]):
        assert main(command) == 0
    own = {
        client: {
            "client-id": client,
            "data": f"{tmp_path}/fed/data/client-{client}.npz",
            "state": f"{tmp_path}/{client}",
        }
        for client in range(2)
    }
    with deployment.federation(tmp_path) as one:
        one.superlink()
        one.supernode(0, own[0])
        one.supernode(1, own[1] | {"data": "gone.npz"})
        run = one.run("fed")
        line = "fedjax-mr: client 1: there is no file gone.npz: correct data in --node-config"
        deployment.wait_for(lambda: line in one.log("node-1"), 300, "the client's line")
        deployment.wait_for(lambda: "1 of 2 clients have joined; waiting for client-id 1" in one.log("run"), 100, "it")
        one.kill("node-1")
        one.supernode(1, own[1])
        assert one.finish(run, 600) == "finished:completed", one.log("run")


ECHO = """\
import time
import jax
import numpy as np
from fedjax_mr import models
from fedjax_mr.deploy import flower, transport, wire

def serve(messenger, run):
    while len(messenger.nodes()) < 2:
        messenger.wait(0.3)
    random = np.random.default_rng(0)
    model = models.build("vgg16", input_shape=(32, 32, 3), num_classes=10).shapes()
    model = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), model)
    for round in range(2):
        began = time.monotonic()
        asked = [transport.Message("train", node, round, 0, {"model": wire.pack(model)}) for node in messenger.nodes()]
        for node, reply in messenger.ask(asked, 600, wire.size_limit(model)).items():
            back = wire.unpack(reply["model"], model, who=f"node {node}")
            jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(lambda leaf: leaf + round, model))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        print(f"{size} bytes in {time.monotonic() - began:.1f} s", flush=True)

def answer(message, node, run):
    return {"model": {name: leaf + np.float32(message.round) for name, leaf in message.content["model"].items()}}

server = flower.server_app(serve)
client = flower.client_app(answer)
"""


def test_states_of_vgg16_pass(tmp_path):
    """134 MB to two nodes and 134 MB of each back, twice."""
    app_of(tmp_path / "echo", ECHO)
    with deployment.federation(tmp_path) as one:
        one.superlink()
        for client in range(2):
            one.supernode(client, {"client-id": client})
        assert one.finish(one.run("echo"), 1500) == "finished:completed", one.log("run")
        found = re.findall(r"(\d+) bytes in ([\d.]+) s", one.log("run"))
        assert [int(size) for size, _ in found] == [134_620_456] * 2
        print(found)


HOSTILE = """\
import numpy as np
from fedjax_mr.deploy import flower, transport

KINDS = ("header", "large", "chunks", "records", "honest")

def serve(messenger, run):
    while len(messenger.nodes()) < 2:
        messenger.wait(0.3)
    for round, kind in enumerate(KINDS):
        content = {"x": {"x": np.zeros(2, np.float32)}}
        asked = [transport.Message(kind, node, round, 0, content) for node in messenger.nodes()]
        for reply in messenger.ask(asked, 120).values():
            print(kind, "->", reply.reason if isinstance(reply, transport.NoReply) else reply["x"]["x"], flush=True)

made = flower._records

def answer(message, node, run):
    def forged(content):
        records = made(content)
        array = records["x"]["x"]
        if message.kind == "header":
            array.data = array.data.replace(b"(2,)", b"(99999999999999,)")[: len(array.data)]
        elif message.kind == "large":
            records["x"]["x"] = type(array)(np.random.default_rng(0).integers(0, 9, 30 * 2**17))
        elif message.kind == "chunks":
            array.data = array.data * 10**5
            array.__dict__["_chunks"] = array.slice_array() * 200  # 2.7 GB, of 14 MB that are sent
        elif message.kind == "records":
            for number in range(50):
                records[f"more{number}"] = records["x"]
        return records

    flower._records = forged if node["client-id"] else made
    return message.content

server = flower.server_app(serve)
client = flower.client_app(answer)
"""


def app_of(folder: Path, code: str) -> None:
    """Write an app of Flower that holds code of its own."""
    (folder / f"{folder.name}_app").mkdir(parents=True)
    (folder / f"{folder.name}_app" / "__init__.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{folder.name}"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = []\n'
        f'[tool.flwr.app]\npublisher = "us"\n[tool.flwr.app.components]\nserverapp = "{folder.name}_app:server"\n'
        f'clientapp = "{folder.name}_app:client"\n'
    )


def test_forged_replies_of_a_real_node(tmp_path):
    """Every forged reply is a malformed answer of its node alone; the other node's answers come."""
    app_of(tmp_path / "hostile", HOSTILE)
    with deployment.federation(tmp_path) as one:
        one.superlink()
        for client in range(2):
            one.supernode(client, {"client-id": client})
        assert one.finish(one.run("hostile"), 1000) == "finished:completed", one.log("run")
        said = re.findall(r"(\w+) -> (.*)", one.log("run"))
    for kind, words in {
        "header": "damaged",
        "large": "larger",
        "chunks": "MemoryError",
        "records": "it has 52 rec",
    }.items():
        answers = sorted(line for each, line in said if each == kind)
        assert len(answers) == 2 and answers[0] == "[0. 0.]" and words in answers[1], said
    assert [line for each, line in said if each == "honest"] == ["[0. 0.]"] * 2


PROXY = """\
daemon off; pid nginx.pid; error_log stderr; worker_processes 1;
events {{}}
http {{
  access_log off; client_body_temp_path bodies; proxy_temp_path answers;
  fastcgi_temp_path no1; uwsgi_temp_path no2; scgi_temp_path no3;
  {server}
}}
"""


def server_block() -> str:
    """The proxy's configuration printed on the page."""
    return PAGE.read_text(encoding="utf-8").split("```nginx\n")[1].split("```")[0]


@needs_proxy
def test_secure_fedmr_behind_a_proxy(trial):
    """TLS, node keys and the page's proxy: the simulator's weights; strangers and runs from outside are refused."""
    one = trial(tls=True, flags="--fedmr_secure")
    one.superlink()
    outside = deployment.free_port()
    names = {"443": f"127.0.0.1:{outside}", "/etc/fed/": f"{one.folder}/", "127.0.0.1:8000": f"127.0.0.1:{one.port}"}
    block = server_block().replace("fed.example.org", "127.0.0.1")
    for name, own in names.items():
        block = block.replace(name, own)
    (one.folder / "nginx.conf").write_text(PROXY.format(server=block))
    one.start("nginx", "nginx", "-p", str(one.folder), "-c", "nginx.conf")
    deployment.wait_for(lambda: deployment.answers(outside), 20, "the proxy")

    making = [["fedjax_mr.deploy", "keys", f"--client={client}", f"--out={client}.key"] for client in range(2)]
    (one.folder / "roster").write_text("".join(one.python(*command) for command in making))
    for client in range(2):
        one.register(client)
        secret = {"key": f"{one.folder}/{client}.key", "roster": f"{one.folder}/roster", "choices": "simulated"}
        one.supernode(client, one.settings(client) | secret, port=outside)
    one.node_key(7)
    one.supernode(7, one.settings(1), port=outside)

    one.connect(outside)
    for command in (["run", "fed", deployment.NAME], ["supernode", "register", "node-7.pub", deployment.NAME]):
        refused = one.flwr(*command, check=False)
        assert refused.returncode != 0 and "403 Forbidden" in refused.stdout + refused.stderr
    for path in ("/v1/fleet/../control/list-runs", "/v1/fleet/..%2fcontrol/list-runs", "/v1/fleet//%2e%2e/control/x"):
        assert posted(one, outside, path).startswith("HTTP/1.1 403")
    one.connect(one.port)
    one.check(one.go())
    deployment.wait_for(lambda: "Exit Code: 305" in one.log("node-7"), 100, "the stranger's refusal")


def posted(one: Trial, port: int, path: str) -> str:
    """The response to a request for a path that no client library would send."""
    context = ssl.create_default_context(cafile=one.folder / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        return secured.recv(4096).decode(errors="replace")


def test_hospitals_with_tables(tmp_path):
    """CSV files of two clients, prepared as the server's."""
    random = np.random.default_rng(0)
    for name in ("agreed", "hospital-0", "hospital-1"):
        ages = random.normal(60, 9, 60)
        rows = [f"{age:.0f},{random.choice(['f', 'm'])},{'ill' if age > 60 else 'well'}" for age in ages]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,sex,outcome", *rows]) + "\n")
    told = "--model=mlp_table --strategy=fedmr --clients=2 --cohort=2 --rounds=3 --target=outcome"
    assert main(["new", f"{tmp_path}/fed", f"--server_data={tmp_path}/agreed.csv", *told.split()]) == 0
    with deployment.federation(tmp_path) as one:
        one.superlink()
        for client in range(2):
            own = {"data": f"{tmp_path}/hospital-{client}.csv", "state": f"{tmp_path}/state-{client}"}
            one.supernode(client, {"client-id": client, **own})
        assert one.finish(one.run("fed", name="run"), 1500, name="run") == "finished:completed", one.log("run")
    saved = fmr.load(tmp_path / "fed" / "run")
    assert saved.samples.preparation.class_names == ("ill", "well") and saved.rows[-1]["accuracy"] > 0.6
