"""Messages that are lost, late, doubled and spoiled; with flwr, that its records hold what was put in."""

import importlib.util
import logging

import numpy as np
import pytest

from fedjax_mr.deploy import mail
from fedjax_mr.errors import UserError


class Node:
    """A node that counts how often it was asked."""

    def __init__(self, number):
        self.number, self.times = number, 0

    def __call__(self, message):
        self.times += 1
        if message.kind == "refuse":
            raise UserError(f"client {self.number} has no data")
        return {"arrays": {"x": message.content["arrays"]["x"] + self.number}, "facts": {"round": message.round}}


def ask(*, faults=None, kind="train", timeout=30.0):
    nodes = {7: Node(7), 9: Node(9)}
    post = mail.FakePost(nodes, faults)
    content = {"arrays": {"x": np.zeros(2, np.float32)}}
    found = post.ask([mail.Message(kind, node, 3, 0, content) for node in post.nodes()], timeout)
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
        (lambda message, before: (lambda content: {}) if message.node == 7 else None, "to another message", 1),
        (
            lambda message, before: (
                (lambda content: {**content, "fedjax_mr": {"kind": "train", "round": 2, "attempt": 0}})
                if message.node == 7
                else None
            ),
            "its reply is to another message",
            1,
        ),
    ],
)
def test_what_goes_wrong_with_one_node_leaves_the_other_alone(fault, lost, times):
    nodes, found = ask(faults=fault)
    assert nodes[7].times == times and nodes[9].times == 1 and found[9]["arrays"]["x"][0] == 9
    if lost:
        assert lost in found[7].reason and not found[7].refused
    else:
        assert found[7]["arrays"]["x"][0] == 7


def test_a_node_that_comes_back_with_another_number_is_not_waited_for():
    nodes = {7: Node(7), 9: Node(9)}

    def faults(message, before):
        if message.node == 7:
            nodes.pop(7)
            nodes[8] = Node(7)
            return "gone"
        return None

    post = mail.FakePost(nodes, faults)
    found = post.ask([mail.Message("refuse", node, 3, 0, {}) for node in (7, 9)], 600.0)
    assert found[7].moved and not found[9].moved and post.now() < 10 and post.nodes() == [9, 8]


def test_a_refusal_is_not_asked_again():
    nodes, found = ask(kind="refuse")
    assert found[9] == mail.Lost("client 9 has no data", refused=True) and nodes[9].times == 1


def test_one_message_per_node():
    message = mail.Message("train", 7, 0, 0, {})
    with pytest.raises(ValueError, match="one message per node"):
        mail.FakePost({7: Node(7)}).ask([message, message], 1.0)


def test_a_users_mistake_is_one_line_of_the_log():
    try:
        raise UserError("no client 3")
    except UserError as error:
        record = logging.LogRecord("flwr", 40, "", 0, "%s raised", ("ServerApp",), (UserError, error, None))
    assert mail._without_traceback(record) and record.getMessage() == "no client 3" and not record.exc_info


def test_without_flwr_the_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr.app", None)
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(UserError, match=r"pip install -c constraints-deploy.txt 'fedjax_mr\[deploy\]'"):
        mail.client_app(lambda message, node, run: {})


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
    back = mail._content(mail._records(content))
    assert back["b"] == content["b"] and back["c"] == {} and set(back["a"]) == set(arrays)
    for name, array in arrays.items():
        assert back["a"][name].dtype == array.dtype and back["a"][name].shape == array.shape
        np.testing.assert_array_equal(back["a"][name], array)


@needs_flower
def test_a_malformed_array_is_left_out():
    flower = mail._flower()
    records = mail._records({"good": {"x": np.zeros(1)}, "bad": {"x": np.zeros(1)}})
    records["bad"]["x"].__dict__["data"] = b"no array"
    assert isinstance(records["bad"], flower.ArrayRecord) and set(mail._content(records)) == {"good"}


@needs_flower
def test_a_client_app_answers_and_refuses(monkeypatch):
    flower = mail._flower()
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):  # of the process that a node would start
        monkeypatch.setattr(identity, name, 1)
    app = mail.client_app(lambda message, node, run: Node(node["client-id"])(message))
    context = type("Context", (), {"node_config": {"client-id": 4}, "run_config": {}})()
    for kind, expected in (("train", "arrays"), ("refuse", "fedjax_mr")):
        envelope = {"kind": kind, "round": 1, "attempt": 0}
        records = mail._records({"arrays": {"x": np.zeros(2)}, "fedjax_mr": envelope})
        asked = flower.Message(records, 5, "query")
        answer = mail._content(app(asked, context).content)
        assert expected in answer
    assert answer["fedjax_mr"] == {**envelope, "refused": "client 4 has no data"}
