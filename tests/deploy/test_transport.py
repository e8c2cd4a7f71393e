"""Messages that are lost, late, doubled and spoiled; with flwr, that its records hold what was put in."""

import importlib.util
import logging
import struct
import time
import types

import numpy as np
import pytest

from fedjax_mr.deploy import flower, transport
from fedjax_mr.errors import UserError


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
    messenger = transport.fake_messenger(nodes, faults)
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

    messenger = transport.fake_messenger(nodes, faults)
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

    messenger = transport.fake_messenger(nodes, faults)
    messenger.on_unsent = unsent.append
    messages = [transport.Message("train", node, 3, 0, {"arrays": {"x": np.zeros(2)}}) for node in (7, 9)]
    found = messenger.ask(messages, 600.0)
    assert found[7].moved and "the message could not be sent" in found[7].reason and found[9]["facts"] == {"round": 3}
    assert times == [0, 1, 2, 3] and messenger.now() < 10 and unsent == messages[:1]


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
        transport.fake_messenger({7: NodeSettings(7)}).ask([message, message], 1.0)


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


# flwr 1.41 imports typer 0.20, which uses a name that click 8.5 deprecates (2026-11).
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
    grid.spoil[7] = lambda records: records["arrays"]["x"].__dict__.update(data=data)
    found = grid.ask()
    assert found[9]["arrays"]["x"][0] == 9
    if line is None:
        assert found[7]["arrays"]["x"].shape == (4,)
    else:
        assert found[7].refused and "its reply cannot be read (" in found[7].reason and line in found[7].reason


class Grid:
    """Flower's Grid with a SuperLink that answers by itself: node 7 and 9 add their number to what they get."""

    def __init__(self, names):
        self.flower, self.node, self.run = names, names.node, types.SimpleNamespace(run_id=1)
        self.spoil, self.pulled, self.hidden, self.objects, self.replies = {}, 0, set(), {}, []
        self._runtime_client = self
        self._client = types.SimpleNamespace(event_hooks={"response": []})

    def ask(self, most=2**20, timeout=3.0):
        content = {"arrays": {"x": np.zeros(2, np.float32)}}
        return flower.flower_messenger(self).ask(
            [transport.Message("train", node, 3, 0, content) for node in (7, 9)], timeout, most
        )

    def get_nodes(self):
        key = b"-----BEGIN\nkey\n-----END"
        return [types.SimpleNamespace(node_id=node, public_key=key) for node in (7, 9)]

    def push_messages(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id
            records = flower._records(transport.reply(flower._received(message), NodeSettings(node)))
            self.spoil.get(node, lambda records: None)(records)
            message.metadata.__dict__["_message_id"] = f"asked {node}"
            reply = self.flower.Message(records, reply_to=message)
            objects = {name: each.deflate() for name, each in self.flower.get_all_nested_objects(reply).items()}
            self.objects |= objects
            tree = self.flower.get_object_tree(reply)
            about = types.SimpleNamespace(message_id=tree.object_id, reply_to_message_id=f"asked {node}")
            self.replies.append((types.SimpleNamespace(metadata=about), tree))
        return [f"asked {message.metadata.dst_node_id}" for message in messages]

    def PullMessages(self, request):
        replies, self.replies = self.replies, []
        stray = types.SimpleNamespace(metadata=types.SimpleNamespace(message_id="?", reply_to_message_id=""))
        messages, trees = zip(*replies, (stray, None), strict=True)
        return types.SimpleNamespace(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        content = self.objects[request.object_id]
        for hook in self._client.event_hooks["response"]:
            hook(types.SimpleNamespace(headers={"content-length": str(len(content))}))
        self.pulled += len(content)
        there = request.object_id not in self.hidden
        return types.SimpleNamespace(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):
        pass


@pytest.fixture
def grid(monkeypatch):
    names = flower._flower()
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that a node would start
        monkeypatch.setattr(identity, name, 1)
    inflatable = importlib.import_module("flwr.supercore.inflatable.inflatable_object")
    names.get_all_nested_objects, names.get_object_tree = (
        inflatable.get_all_nested_objects,
        inflatable.get_object_tree,
    )
    names.node = importlib.import_module("flwr.proto.node_pb2").Node(node_id=1)
    monkeypatch.setattr(transport, "POLL_SECONDS", 0.05)
    return Grid(names)


@needs_flower
def test_an_upload_is_refused_by_its_announced_size_before_it_is_read(grid):
    large = np.random.default_rng(0).integers(0, 2**32, 30 * 2**18, np.uint32)  # 30 MB
    for most, read in ((2**20, 2**16), (8 * 2**20, 8 * 2**20)):
        grid.pulled = 0
        grid.spoil[7] = lambda records: records["arrays"].update(x=grid.flower.Array(large))
        found = grid.ask(most)
        assert found[7].refused and f"larger than the {most:,} bytes" in found[7].reason
        assert found[9]["arrays"]["x"][0] == 9 and grid.pulled < read


@needs_flower
def test_a_chunk_that_is_named_a_million_times_takes_no_memory(grid):
    def repeat(records):
        array = records["arrays"]["x"]
        array.__dict__["_chunks"] = array.slice_array() * 10**5

    grid.spoil[7] = repeat
    found = grid.ask()
    assert found[7].refused and "larger than" in found[7].reason and found[9]["arrays"]["x"][0] == 9


@needs_flower
def test_a_reply_that_stops_in_the_middle_holds_nobody_up(grid):
    def hide(records):
        grid.hidden.add(records["arrays"]["x"].slice_array()[0][0])

    grid.spoil[7] = hide
    messenger = flower.flower_messenger(grid)
    content = {"arrays": {"x": np.zeros(2, np.float32)}}
    asking = messenger.send([transport.Message("train", node, 3, 0, content) for node in (7, 9)], 0.5)
    assert set(asking.poll()) == {9} and asking.nodes == {7}
    time.sleep(0.6)
    assert "no reply within 0.5 s" in asking.poll()[7].reason and not messenger._transport._coming


@needs_flower
def test_many_records_or_names_are_no_reply(grid):
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

    messenger = transport.fake_messenger({7: refuse})
    reason = messenger.ask([transport.Message("train", 7, 3, 0, {})], 1.0)[7].reason
    assert reason.startswith("?[2Jno data fedjax-mr: round 9: accuracy 1.0?xxx") and len(reason) == 200
    assert reason.isprintable()


@needs_flower
def test_a_client_app_answers_and_refuses(monkeypatch):
    names = flower._flower()
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that a node would start
        monkeypatch.setattr(identity, name, 1)
    app = flower.client_app(lambda message, node, run: NodeSettings(node["client-id"])(message))
    context = type("Context", (), {"node_config": {"client-id": 4}, "run_config": {}})()
    for kind, expected in (("train", "arrays"), ("refuse", "fedjax_mr")):
        envelope = {"kind": kind, "round": 1, "attempt": 0}
        records = flower._records({"arrays": {"x": np.zeros(2)}, "fedjax_mr": envelope})
        asked = names.Message(records, 5, "query")
        answer = flower._content(app(asked, context).content)
        assert expected in answer
    assert answer["fedjax_mr"] == {**envelope, "refused": "client 4 has no data"}
