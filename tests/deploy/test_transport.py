"""Messages that are lost, late, doubled and spoiled; with flwr, that its records hold what was put in."""

import importlib.util
import logging
import resource
import struct
import subprocess
import sys
import types

import numpy as np
import pytest

from fedjax_mr.deploy import flower, transport
from fedjax_mr.errors import UserError
from fedjax_mr.testing.messages import fake_messenger


class NodeSettings:
    """A node that counts how often it was asked."""

    def __init__(self, number):
        self.number, self.times = number, 0

    def __call__(self, message):
        self.times += 1
        if message.kind == "refuse":
            raise UserError(f"client {self.number} has no data")
        return {"arrays": {"x": message.content["arrays"]["x"] + self.number}, "facts": {"round": message.round}}


def ask(*, faults=None, kind="train", timeout=30.0):
    nodes = {7: NodeSettings(7), 9: NodeSettings(9)}
    messenger = fake_messenger(nodes, faults)
    content = {"arrays": {"x": np.zeros(2, np.float32)}}
    found = messenger.ask([transport.Message(kind, node, 3, 0, content) for node in messenger.nodes()], timeout)
    return nodes, found


def test_every_node_answers():
    nodes, found = ask()
    assert {node: float(each["arrays"]["x"][0]) for node, each in found.items()} == {7: 7.0, 9: 9.0}
    assert found[7]["facts"] == {"round": 3} and nodes[7].times == 1


@pytest.mark.parametrize(
    ("fault", "lost", "times"),
    [
        (lambda message, before: "lose" if message.node == 7 else None, "no reply within 30 s", 0),
        (lambda message, before: "crash" if message.node == 7 and before < 2 else None, None, 3),
        (
            lambda message, before: "crash" if message.node == 7 else None,
            "no reply within 30 s (client app crashed)",
            15,
        ),
        (lambda message, before: "double" if message.node == 7 else None, None, 2),
        (lambda message, before: (lambda content: {}) if message.node == 7 else None, "answers another message", 1),
        (
            lambda message, before: (
                (lambda content: {**content, "fedjax_mr": {"kind": "train", "round": 2, "attempt": 0}})
                if message.node == 7
                else None
            ),
            "its reply answers another message",
            1,
        ),
    ],
)
def test_what_goes_wrong_with_one_node_leaves_the_other_alone(fault, lost, times):
    nodes, found = ask(faults=fault)
    assert nodes[7].times == times and nodes[9].times == 1 and found[9]["arrays"]["x"][0] == 9
    if lost:
        assert lost in found[7].reason and found[7].refused == ("another message" in lost)
    else:
        assert found[7]["arrays"]["x"][0] == 7


def test_a_node_that_comes_back_with_another_number_is_not_waited_for():
    nodes = {7: NodeSettings(7), 9: NodeSettings(9)}

    def faults(message, before):
        if message.node == 7:
            nodes.pop(7)
            nodes[8] = NodeSettings(7)
            return "gone"
        return None

    messenger = fake_messenger(nodes, faults)
    found = messenger.ask([transport.Message("refuse", node, 3, 0, {}) for node in (7, 9)], 600.0)
    assert found[7].moved and not found[9].moved and messenger.now() < 10 and messenger.nodes() == [9, 8]


def test_a_node_that_was_stopped_and_comes_back_with_another_number_is_not_waited_for():
    """By Ctrl-C: the first error comes before the restart, and from then on no message can be sent to it."""
    nodes, times, unsent = {7: NodeSettings(7), 9: NodeSettings(9)}, [], []

    def faults(message, before):
        if message.node != 7:
            return None
        times.append(before)
        nodes.pop(7, None)
        if before == 3:
            nodes[8] = NodeSettings(7)
        return "unsent" if before else "gone"

    messenger = fake_messenger(nodes, faults)
    messenger.on_failure = lambda message, reason: unsent.append((message, reason))
    messages = [transport.Message("train", node, 3, 0, {"arrays": {"x": np.zeros(2)}}) for node in (7, 9)]
    found = messenger.ask(messages, 600.0)
    assert found[7].moved and "the message could not be sent" in found[7].reason and found[9]["facts"] == {"round": 3}
    assert times == [0, 1, 2, 3] and messenger.now() < 10 and unsent == [(messages[0], "node unavailable")]


def test_a_message_that_cannot_be_sent_for_a_while_is_sent_again():
    nodes, found = ask(faults=lambda message, before: "unsent" if message.node == 7 and before < 3 else None)
    assert found[7]["arrays"]["x"][0] == 7 and nodes[7].times == nodes[9].times == 1
    _, found = ask(faults=lambda message, before: "unsent" if message.node == 7 else None)
    assert found[7] == transport.NoReply("no reply within 30 s (the message could not be sent)")


def test_a_refusal_is_not_asked_again():
    nodes, found = ask(kind="refuse")
    assert found[9] == transport.NoReply("client 9 has no data", refused=True) and nodes[9].times == 1


def test_one_message_per_node():
    message = transport.Message("train", 7, 0, 0, {})
    with pytest.raises(ValueError, match="one message per node"):
        fake_messenger({7: NodeSettings(7)}).ask([message, message], 1.0)


def test_a_users_mistake_is_one_line_of_the_log():
    try:
        raise UserError("no client 3")
    except UserError as error:
        record = logging.LogRecord("flwr", 40, "", 0, "%s raised", ("ServerApp",), (UserError, error, None))
    assert flower._without_traceback(record) and record.getMessage() == "no client 3" and not record.exc_info


def test_without_flwr_the_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr.app", None)
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(UserError, match=r"pip install -c constraints-deploy.txt 'fedjax_mr\[deploy\]'"):
        flower.client_app(lambda message, node, run: {})


# flwr 1.42 imports typer 0.20, which uses a name that click 8.5 deprecates (2026-11).
pytestmark = pytest.mark.filterwarnings("ignore:'click.utils:DeprecationWarning")
needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


@needs_flower
def test_flowers_records_hold_what_was_put_in():
    arrays = {
        "float": np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32),
        "scalar": np.asarray(np.int32(-3)),
        "key": np.arange(2, dtype=np.uint32),
        "bools": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
    }
    content = {"a": arrays, "b": {"one": 1, "two": "zwei", "three": b"\x00", "four": [0.5], "five": True}, "c": {}}
    back = flower._content(flower._records(content))
    assert back["b"] == content["b"] and back["c"] == {} and set(back["a"]) == set(arrays)
    for name, array in arrays.items():
        assert back["a"][name].dtype == array.dtype and back["a"][name].shape == array.shape
        np.testing.assert_array_equal(back["a"][name], array)


def npy(shape, descr="'<f4'", data=b""):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


FORGED = {
    "huge": (npy(f"({10**14},)"), "but has 0 bytes"),
    "overflow": (npy(f"({10**30},)"), "but has 0 bytes"),
    "tokens": (npy("(1,"), "a damaged header"),
    "index": (npy("(1,)", "[()]"), "a damaged header"),
    "zip": (b"PK\x03\x04" + bytes(60), "is damaged"),
    "none": (b"", "is damaged"),
    "objects": (npy("(1,)", "'|O'", bytes(8)), "Python objects"),
    "text": (npy("(1,)", "'<U2'", bytes(8)), "instead of numbers"),
    "endless and empty": (npy(f"({10**30}, 0)"), "is damaged"),
    "negative": (npy("(-1, -4)", "'<f4'", bytes(16)), ""),
    "whole": (npy("(4,)", "'<f4'", bytes(16)), None),
}


@needs_flower
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_array_is_a_malformed_answer_of_its_client(name, grid):
    """No memory is taken for what a header says, and the server gets the other clients' answers."""
    data, line = FORGED[name]
    grid.spoil[7] = lambda records: setattr(records["arrays"]["x"], "data", data)
    found = grid.ask()
    assert found[9]["arrays"]["x"][0] == 9
    if line is None:
        assert found[7]["arrays"]["x"].shape == (4,)
    else:
        assert found[7].refused and "its reply cannot be read (" in found[7].reason and line in found[7].reason


class Grid:
    """Flower's Grid with a SuperLink that answers by itself: node 7 and 9 add their number to what they get.

    Attributes:
      spoil: by node, what changes the records of its reply, or raises as Flower does at a reply that it cannot read.
      errors: by node, the error of Flower in place of its reply.
      down: whether the SuperLink is out of reach.
    """

    def __init__(self, app):
        self.app, self.spoil, self.errors, self.down, self._asked = app, {}, {}, False, {}

    def ask(self, most=2**20, timeout=3.0):
        content = {"arrays": {"x": np.zeros(2, np.float32)}}
        return flower.flower_messenger(self).ask(
            [transport.Message("train", node, 3, 0, content) for node in (7, 9)], timeout, most
        )

    def get_nodes(self):
        key = b"-----BEGIN\nkey\n-----END"
        return [types.SimpleNamespace(node_id=node, public_key=key) for node in (7, 9)]

    def get_node_ids(self):
        if self.down:
            raise ConnectionError("no route to the SuperLink")
        return [7, 9]

    def push_messages(self, messages):
        for message in messages:
            self._asked[f"asked {message.metadata.dst_node_id}"] = message
        return [f"asked {message.metadata.dst_node_id}" for message in messages]

    def pull_messages(self, names):
        if self.down:
            raise ConnectionError("no route to the SuperLink")
        replies = []
        for message in [self._asked.pop(name) for name in names if name in self._asked]:
            node = message.metadata.dst_node_id
            if node in self.errors:
                replies.append(self.app.Message(self.errors[node], reply_to=message))
                continue
            records = flower._records(transport.reply(flower._received(message), NodeSettings(node)))
            self.spoil.get(node, lambda records: None)(records)
            replies.append(self.app.Message(records, reply_to=message))
        return replies


@pytest.fixture
def grid(monkeypatch):
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that a node would start
        monkeypatch.setattr(identity, name, 1)
    monkeypatch.setattr(transport, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(transport, "PAUSE_SECONDS", 0.1)
    return Grid(flower._flower().app)


@needs_flower
def test_a_large_upload_is_no_reply(grid):
    large = np.random.default_rng(0).integers(0, 2**32, 2**19, np.uint32)  # 2 MB
    grid.spoil[7] = lambda records: records["arrays"].update(x=grid.app.Array(large))
    found = grid.ask(2**20)
    assert found[7].refused and "larger than the 1,048,576 bytes" in found[7].reason
    assert found[9]["arrays"]["x"][0] == 9
    assert len(grid.ask(2**22)[7]["arrays"]["x"]) == 2**19


@needs_flower
def test_a_reply_that_flower_cannot_read_is_its_clients_alone(grid):
    def damaged(records):
        raise ValueError("unexpected children")

    grid.spoil[7] = damaged
    found = grid.ask()
    assert found[7].refused and "cannot be read (ValueError: unexpected children" in found[7].reason
    assert found[9]["arrays"]["x"][0] == 9


@needs_flower
def test_a_reply_that_grows_while_flower_reads_it_takes_no_memory(grid):
    limits, taken = resource.getrlimit(resource.RLIMIT_DATA), []
    grid.spoil[7] = lambda records: taken.append(bytearray(2**30))
    found = grid.ask()
    assert found[7].refused and "MemoryError" in found[7].reason and not taken and found[9]["arrays"]["x"][0] == 9
    assert len(grid.ask(2**29)[7]["arrays"]["x"]) == 2 and taken  # as large as such a reply may become
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


@needs_flower
def test_a_superlink_out_of_reach_is_no_clients_fault(grid):
    messenger = flower.flower_messenger(grid)
    asking = messenger.send([transport.Message("train", 7, 3, 0, {"arrays": {"x": np.zeros(2)}})], 3.0)
    grid.down = True
    with pytest.raises(ConnectionError, match="no route"):
        asking.poll()


def test_a_server_without_its_superlink_ends_itself():
    """Two servers: the SuperLink of the first one answers."""
    script = """
import os, sys, threading, time, types
from fedjax_mr.deploy import flower
for seconds in (0, 60):
    server = os.fork()
    if not server:
        sys.stderr = sys.stdout if seconds else sys.stderr
        grid = types.SimpleNamespace(get_node_ids=lambda: time.sleep(seconds))
        threading.Thread(target=flower._watch, args=(grid, 0.4), daemon=True).start()
        time.sleep(1.2)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]), flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    first, *lost, second = ended.stdout.splitlines()
    assert (first, second) == ("0", "4")
    assert "lost the SuperLink: start it" in "".join(lost) and "lost the SuperLink" not in ended.stderr


@needs_flower
def test_flowers_errors(grid):
    """A crash may pass, an app that cannot be loaded does not; the names are those of Flower's codes."""
    codes = importlib.import_module("flwr.common.constant").ErrorCode
    lasting = (codes.LOAD_CLIENT_APP_EXCEPTION, codes.CLIENT_APP_RAISED_EXCEPTION, codes.INVALID_FAB)
    assert set(flower._LASTING) == set(lasting)
    assert all(getattr(codes, name.upper().replace(" ", "_")) == code for code, name in flower._PASSING.items())
    grid.errors[7] = grid.app.Error(codes.LOAD_CLIENT_APP_EXCEPTION, "Traceback:\n  ...\nNo module named fedjax_mr\n")
    grid.errors[9] = grid.app.Error(codes.CLIENT_APP_CRASHED, "ClientApp stopped responding.")
    found = grid.ask(timeout=0.5)
    assert found[7] == transport.NoReply("the client's app cannot be loaded: No module named fedjax_mr")
    assert found[9] == transport.NoReply("no reply within 0.5 s (client app crashed)")
    grid.errors = {9: grid.app.Error(99)}
    assert found[7].reason and grid.ask(timeout=0.5)[9].reason == "no reply within 0.5 s (Flower's error 99)"


@needs_flower
def test_many_records_or_arrays_are_no_reply(grid):
    grid.spoil[7] = lambda records: [records.update({f"more{each}": records["facts"]}) for each in range(30)]
    grid.spoil[9] = lambda records: [records["arrays"].update({f"x{n}": records["arrays"]["x"]}) for n in range(10**4)]
    found = grid.ask()
    assert "it has 33 records" in found[7].reason and "larger than" in found[9].reason


def test_whatever_a_reply_is_the_other_clients_answers_come():
    for odd in (
        None,
        5,
        {"fedjax_mr": 3},
        {"fedjax_mr": {"kind": np.zeros(3), "round": 3, "attempt": 0}},
        {"fedjax_mr": {"kind": "train", "round": 3, "attempt": 0, "refused": {}}, 3: 4},
    ):
        _, found = ask(faults=lambda message, before, odd=odd: (lambda content: odd) if message.node == 7 else None)
        assert found[7].refused and found[9]["arrays"]["x"][0] == 9


def test_a_reply_larger_than_allowed_is_refused():
    large = lambda content: {**content, "more": {"x": np.zeros(2**18, np.float32)}}
    _, found = ask(faults=lambda message, before: large if message.node == 7 else None)
    assert found[7].refused and "larger than the 1,048,576 bytes" in found[7].reason and found[9]


def test_a_clients_words_are_one_printable_line():
    def refuse(message):
        raise UserError("\x1b[2Jno data\nfedjax-mr: round 9: accuracy 1.0\u202e" + "x" * 10**6)

    messenger = fake_messenger({7: refuse})
    reason = messenger.ask([transport.Message("train", 7, 3, 0, {})], 1.0)[7].reason
    assert reason.startswith("?[2Jno data fedjax-mr: round 9: accuracy 1.0?xxx") and len(reason) == 200
    assert reason.isprintable()


@needs_flower
def test_a_client_app_answers_and_refuses(monkeypatch):
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that a node would start
        monkeypatch.setattr(identity, name, 1)
    app = flower.client_app(lambda message, node, run: NodeSettings(node["client-id"])(message))
    context = type("Context", (), {"node_config": {"client-id": 4}, "run_config": {}})()
    for kind, expected in (("train", "arrays"), ("refuse", "fedjax_mr")):
        envelope = {"kind": kind, "round": 1, "attempt": 0}
        records = flower._records({"arrays": {"x": np.zeros(2)}, "fedjax_mr": envelope})
        asked = flower._flower().app.Message(records, 5, "query")
        answer = flower._content(app(asked, context).content)
        assert expected in answer
    assert answer["fedjax_mr"] == {**envelope, "refused": "client 4 has no data"}
