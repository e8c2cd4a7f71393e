"""Clients that join or are lost, with nodes that are plain functions: who joins, what is printed, what follows."""

import itertools
import json
import re

import numpy as np
import pytest

from fedjax_mr.data.facts import Facts
from fedjax_mr.deploy.client_manager import ClientManager
from fedjax_mr.deploy.client_manager import ClientPolicy as Policy
from fedjax_mr.deploy.protocol import Member, RunManifest, disagreement
from fedjax_mr.errors import UserError
from fedjax_mr.testing.messages import fake_messenger

FACTS = Facts("toy", (2,), "float32", 3, (0.0,), (1.0,), 0.0, 1.0)
MANIFEST = RunManifest("ab" * 8, FACTS, {"jax": "1"}, label_counts=False)


def node(client, *, size=5, answer=None):
    """A node's function that answers messages: it joins as a client, then answers with ``answer`` or a number."""

    def handle(message):
        if message.kind == "join":
            return {"member": Member(client, size, 0, 0, ()).record()}
        return {"said": {"number": 10 * client}} if answer is None else answer(message)

    return handle


def manager_of(nodes, *, faults=None, lost="wait", clients=3):
    messenger = fake_messenger(dict(enumerate(nodes, 100)), faults)
    return ClientManager(
        messenger, MANIFEST, num_clients=clients, policy=Policy(lost, reply_timeout=5.0, join_timeout=9.0)
    )


def read(client, reply):
    number = reply["said"]["number"]
    if number < 0:
        raise UserError("its upload is malformed")
    return number


@pytest.mark.parametrize("kind", ["join", "begin"])
def test_a_client_that_dies_while_it_joins_is_asked_again_in_time(kind, capsys):
    """However long a reply may take in a round: Flower never tells that a half-sent one will not come."""
    left = [kind]

    def lose(message, before):
        if message.node == 102 and message.kind in left:
            left.remove(message.kind)
            return "lose"
        return None

    messenger = fake_messenger({100 + client: node(client) for client in range(3)}, lose)
    manager = ClientManager(messenger, MANIFEST, num_clients=3, policy=Policy(reply_timeout=600.0, join_timeout=90.0))
    assert asked(manager) == {0: 0, 2: 20}
    assert "no reply within 30 s" in capsys.readouterr().err


def asked(manager):
    manager.wait_for_all()
    manager.begin({})
    return manager.ask("train", 4, {0: {}, 2: {}}, read)


def test_everybody_joins_and_answers():
    manager = manager_of([node(2), node(0, size=7), node(1)])
    assert [member.size for member in manager.wait_for_all()] == [7, 5, 5]
    assert asked(manager) == {0: 0, 2: 20}


def test_slow_answers_do_not_hold_the_others(capsys):
    """A slow client keeps its message until a later call; a lost one is asked again; invalid replies end the run."""
    late, sent = {100: 1.0, 101: 20.0, 102: 2.0}, []

    def slow(message, before):
        if message.kind != "train":
            return None
        sent.append((message.node, message.round))
        return "lose" if (message.node, message.round, message.attempt) == (102, 1, 0) else late[message.node]

    nodes = {100 + client: node(client) for client in range(3)}
    messenger = fake_messenger(nodes, slow)
    manager = ClientManager(messenger, MANIFEST, num_clients=3, policy=Policy(reply_timeout=30.0, join_timeout=90.0))
    manager.wait_for_all()
    manager.begin({})
    assert manager.ask_some("train", {0: (0, {}), 1: (0, {}), 2: (0, {})}, read, 2) == {0: 0, 2: 20}
    assert manager.now() < 3
    assert manager.ask_some("train", {1: (0, {}), 2: (1, {})}, read, 1) == {1: 10}
    assert 19 < manager.now() < 22 and capsys.readouterr().err == ""
    assert manager.ask_some("train", {2: (1, {})}, read, 1) == {2: 20}  # asked again after 30 s
    assert "version 1: lost client 2: no reply within 30 s" in capsys.readouterr().err
    assert sent == [(100, 0), (101, 0), (102, 0), (102, 1), (102, 1)]
    with pytest.raises(UserError, match="version 2: lost client 0: its upload is malformed"):
        nodes[100] = node(0, answer=lambda message: {"said": {"number": -1}})
        manager.ask_some("train", {0: (2, {})}, read, 1)


@pytest.mark.parametrize("lost", ["wait", "stop"])
def test_an_asynchronous_client_that_is_not_there_is_named_in_time(lost, capsys):
    nodes = {100 + client: node(client) for client in range(3)}
    manager = ClientManager(fake_messenger(nodes, None), MANIFEST, num_clients=3, policy=Policy(lost, 30.0, 90.0))
    manager.wait_for_all()
    manager.begin({})
    left = nodes.pop(101)
    messenger, wait = manager._messenger, manager._messenger.wait

    def comes_back(seconds):
        wait(seconds)
        if manager.now() > 100:
            nodes[101] = left

    messenger.wait = comes_back
    if lost == "stop":
        with pytest.raises(UserError, match="version 5: lost client 1: its node is not connected"):
            manager.ask_some("train", {1: (5, {})}, read, 1)
        assert 30 <= manager.now() < 40
        return
    assert manager.ask_some("train", {1: (5, {})}, read, 1) == {1: 10}
    assert capsys.readouterr().err.count("version 5: lost client 1: its node is not connected") == 3  # every 30 s


def test_invalid_replies_between_valid_ones_do_not_end_a_long_run(capsys):
    """Such as those of a client that was restarted three times in a thousand asynchronous versions."""
    numbers = itertools.cycle((-1, -1, 10))
    restarted = lambda message: {"said": {"number": next(numbers) if message.kind == "train" else 0}}
    manager = manager_of([node(0), node(1, answer=restarted), node(2)])
    manager.wait_for_all()
    for version in range(5):
        assert manager.ask_some("train", {1: (version, {})}, read, 1) == {1: 10}
    assert capsys.readouterr().err.count("lost client 1: its upload is malformed") == 10


@pytest.mark.parametrize("lost", ["wait", "untrained"])
def test_a_silent_stranger_delays_no_round(lost):
    """All clients are there, so nobody asks a node that never answers; one of version 0.2.0 cost 100 s a round."""
    nodes = {100 + client: node(client) for client in range(3)} | {200: node(9)}
    asked_of = []

    def silent(message, before):
        asked_of.append(message.node)
        return "lose" if message.node == 200 else None

    messenger = fake_messenger(nodes, silent)
    manager = ClientManager(
        messenger, MANIFEST, num_clients=3, policy=Policy(lost, reply_timeout=600.0, join_timeout=300.0)
    )
    manager.wait_for_all()
    manager.begin({})
    for round in range(8):
        before = messenger.now()
        assert manager.ask("train", round, {0: {}, 2: {}}, read) == {0: 0, 2: 20}
        assert messenger.now() - before < 1
        messenger.wait(31)
    assert asked_of.count(200) == 1


def test_while_a_client_is_missing_a_stranger_is_asked_with_growing_pauses(capsys):
    nodes = {100: node(0), 101: node(1), 200: node(9)}
    times = []

    def silent(message, before):
        if message.node == 200:
            times.append(messenger.now())
        return "lose" if message.node == 200 else None

    messenger = fake_messenger(nodes, silent)
    manager = ClientManager(messenger, MANIFEST, num_clients=3, policy=Policy(reply_timeout=20.0, join_timeout=1000.0))
    with pytest.raises(UserError, match="missing: 2"):
        manager.wait_for_all()
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(times)]
    assert pauses == [50, 80, 140, 260]  # 20 s without an answer, and 30, 60, 120, 240 s
    assert capsys.readouterr().err.count("node 200 does not join: no reply within 20 s") == 1


def test_a_client_that_begins_late_is_waited_for_once(capsys):
    """A client that no longer answers is lost without a new delay in every round."""
    nodes = {100 + client: node(client) for client in range(3)}
    deaf = []
    messenger = fake_messenger(nodes, lambda message, before: "lose" if message.node in deaf else None)
    manager = ClientManager(
        messenger, MANIFEST, num_clients=3, policy=Policy("untrained", reply_timeout=50.0, join_timeout=300.0)
    )
    asked(manager)
    nodes[300] = nodes.pop(102)  # comes back with another number, and never answers
    deaf.append(300)
    spent = []
    for round in range(3):
        before = messenger.now()
        assert manager.ask("train", round, {0: {}, 2: {}}, read) == {0: 0}
        spent.append(messenger.now() - before)
    assert 50 <= spent[0] < 52 and spent[1:] == [0, 0]


def test_a_second_node_takes_a_clients_number_if_the_first_is_silent():
    nodes = {100 + client: node(client) for client in range(3)}
    deaf = []
    messenger = fake_messenger(nodes, lambda message, before: "lose" if message.node in deaf else None)
    manager = ClientManager(messenger, MANIFEST, num_clients=3, policy=Policy(reply_timeout=5.0, join_timeout=60.0))
    asked(manager)
    nodes[105] = node(2)
    deaf.append(102)
    assert manager.ask("train", 5, {0: {}, 2: {}}, read) == {0: 0, 2: 20} and messenger.now() < 20
    assert manager._nodes[2] == 105


def test_a_second_node_does_not_take_the_number_of_a_client_that_answers(capsys):
    nodes = {100 + client: node(client) for client in range(3)}
    messenger = fake_messenger(nodes)
    manager = ClientManager(
        messenger, MANIFEST, num_clients=3, policy=Policy("untrained", reply_timeout=5.0, join_timeout=60.0)
    )
    asked(manager)
    nodes[105] = node(2)
    del nodes[101]
    assert manager.ask("train", 5, {0: {}, 1: {}, 2: {}}, read) == {0: 0, 2: 20}
    assert manager._nodes[2] == 102 and "node 102 already is client 2" in capsys.readouterr().err


class Greedy:
    """Something in a reply that takes all memory when it is looked at."""

    def __lt__(self, other):
        raise MemoryError


def once(fault):
    """Faults that happen once, to client 2 at node 102."""
    left = [fault]
    return lambda message, before: left.pop() if message.kind == "train" and message.node == 102 and left else None


def said(record):
    return lambda content: {**content, "said": record}


AT_FAULT = [
    ("lose", "no reply within 5 s"),
    (said({"number": -1}), "its upload is malformed"),
    (said(5), "its answer is malformed (TypeError"),
    (said({"number": np.zeros(2)}), "its answer is malformed (ValueError"),
    (
        lambda content: {**content, "fedjax_mr": {"kind": np.zeros(3), "round": 4, "attempt": 0}},
        "its reply cannot be read (ValueError",
    ),
    (
        lambda content: {**content, "more": {"x": np.zeros(2**19, np.float32)}},
        "its reply cannot be read (it is larger than",
    ),
    (said({"number": Greedy()}), "its answer is malformed (MemoryError"),
]
FAULTS = ["late", "malformed", "no record", "array", "envelope", "large", "memory"]


@pytest.mark.parametrize("fault", [*AT_FAULT, ("double", ""), ("crash", "")], ids=[*FAULTS, "double", "crash"])
def test_a_single_fault_changes_no_answer_where_one_waits(fault, capsys):
    assert asked(manager_of(map(node, range(3)), faults=once(fault[0]))) == {0: 0, 2: 20}
    said = capsys.readouterr().err
    assert said.count("lost client 2") == bool(fault[1]) and fault[1] in said


@pytest.mark.parametrize("lost", ["wait", "untrained", "stop"])
def test_a_node_that_comes_back_with_another_number_is_no_lost_client(lost, capsys):
    nodes = {100 + client: node(client) for client in range(3)}

    def faults(message, before):
        if message.kind == "train" and message.node == 102:
            nodes[105] = nodes.pop(102)
            return "gone"
        return None

    manager = ClientManager(fake_messenger(nodes, faults), MANIFEST, num_clients=3, policy=Policy(lost, 500.0, 9.0))
    assert asked(manager) == {0: 0, 2: 20} and "lost" not in capsys.readouterr().err


def test_a_node_that_comes_back_beside_a_silent_one_is_asked_again(capsys):
    nodes = {100 + client: node(client) for client in range(3)}

    def faults(message, before):
        if message.kind == "train" and message.node == 100:
            nodes[105] = nodes.pop(100)
            return "gone"
        return "lose" if message.kind == "train" and message.node == 101 else None

    manager = ClientManager(
        fake_messenger(nodes, faults), MANIFEST, num_clients=3, policy=Policy("untrained", 30.0, 9.0)
    )
    manager.wait_for_all()
    manager.begin({})
    assert manager.ask("train", 4, {0: {}, 1: {}, 2: {}}, read) == {0: 0, 2: 20}
    assert capsys.readouterr().err.count("lost client") == 1


def test_a_client_whose_message_cannot_be_sent_is_named_once(capsys):
    nodes = {100 + client: node(client) for client in range(3)}

    def faults(message, before):
        if message.kind != "train" or message.node != 102:
            return None
        nodes.pop(102, None)
        if before == 2:
            nodes[105] = node(2)
        return "unsent"

    manager = ClientManager(fake_messenger(nodes, faults), MANIFEST, num_clients=3, policy=Policy("wait", 500.0, 9.0))
    assert asked(manager) == {0: 0, 2: 20} and manager.now() < 30
    said = capsys.readouterr().err
    assert said.count("client 2: the message could not be sent; trying again: start") == 1 and "lost" not in said


@pytest.mark.parametrize("fault", AT_FAULT, ids=FAULTS)
def test_without_waiting_a_lost_client_is_named_and_left_out(fault, capsys):
    assert asked(manager_of(map(node, range(3)), faults=once(fault[0]), lost="untrained")) == {0: 0}
    assert f"round 5: lost client 2: {fault[1]}" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"round 5: client 2 is lost .*{re.escape(fault[1])}"):
        asked(manager_of(map(node, range(3)), faults=once(fault[0]), lost="stop"))


def test_if_all_are_lost_there_is_nothing_to_go_on_with():
    left = [100, 102]
    faults = lambda message, before: "lose" if message.kind == "train" and message.node in left else None

    def again(message, before):
        fault = faults(message, before)
        if fault:
            left.remove(message.node)
        return fault

    assert asked(manager_of(map(node, range(3)), faults=again, lost="untrained")) == {0: 0, 2: 20}


def refuse(message):
    raise UserError("client 2: no memory of round 3 is here")


@pytest.mark.parametrize("answer", [refuse, lambda message: {"said": {"number": -1}}], ids=["refuses", "malformed"])
def test_a_client_that_answers_falsely_again_and_again_ends_the_run(answer, capsys):
    at_train = lambda message: {} if message.kind == "begin" else answer(message)
    with pytest.raises(UserError, match=r"client 2 sent 3 invalid replies .*--lost=untrained"):
        asked(manager_of([node(0), node(1), node(2, answer=at_train)]))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node(0), node(1)], ""),
        ([node(0), node(1), node(3)], "it has the client-id 3; clients are numbered 0 to 2"),
        ([node(0), node(1), node(1)], "node 101 already is client 1; each node needs a client-id of its own"),
        ([node(0), node(1), node(2, size=0)], "sizes must be whole numbers, and at least one sample"),
        ([node(0), node(1), lambda message: {"member": {"client": "2"}}], "its reply to join is malformed"),
        (
            [node(0), node(1), node(2, size=2**31)],
            "it reports 2,147,483,648 samples; a client has at most 16,777,216",
        ),
        ([node(0), node(1), node(2, size=10**5000)], "its answer is malformed"),
        ([node(0), node(1), lambda message: {"member": {"client": [1]}}], "malformed"),
        ([node(0), node(1), refuse], "node 102 does not join: client 2: no memory"),
    ],
)
def test_without_all_clients_the_run_does_not_begin(nodes, said, capsys):
    with pytest.raises(UserError, match=r"2 of 3 clients have joined after 9 s; missing: 2"):
        manager_of(nodes).wait_for_all()
    assert said in capsys.readouterr().err


def test_while_clients_are_missing_the_server_says_how_many_are_there(capsys):
    """A line when the number changes, at most one in five seconds."""
    seconds = {0: 20.0, 1: 21.0, 2: 22.0, **dict.fromkeys(range(3, 12), 40.0)}
    messenger = fake_messenger(
        {client: node(client) for client in seconds},
        lambda message, before: seconds[message.node] if message.kind == "join" else None,
    )
    policy = Policy(reply_timeout=90.0, join_timeout=270.0)
    ClientManager(messenger, MANIFEST, num_clients=12, policy=policy).wait_for_all()
    assert capsys.readouterr().err.splitlines() == [
        "fedjax-mr: 0 of 12 clients have joined; waiting for client-id 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more; "
        "connected nodes: 12",
        "fedjax-mr: 1 of 12 clients have joined; waiting for client-id 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 1 more; "
        "connected nodes: 12",
        "fedjax-mr: 3 of 12 clients have joined; waiting for client-id 3, 4, 5, 6, 7, 8, 9, 10, 11; connected nodes: "
        "12",
        "fedjax-mr: all 12 clients have joined",
    ]


def test_a_node_that_is_not_admitted_is_told_why():
    """The server alone knows that a client-id is too large or taken."""
    told = []

    def listening(client):
        def handle(message):
            if message.kind == "rejected":
                told.append((message.node, message.content["why"]["line"]))
            return node(client)(message)

        return handle

    manager = manager_of([listening(0), listening(0), listening(7)], lost="wait")
    with pytest.raises(UserError, match="1 of 3 clients have joined"):
        manager.wait_for_all()
    assert sorted(told) == [
        (101, "node 100 already is client 0; each node needs a client-id of its own"),
        (102, "it has the client-id 7; clients are numbered 0 to 2"),
    ]


def test_a_client_of_other_sizes_or_another_node_is_not_the_one_of_the_run(tmp_path, capsys):
    manager = manager_of(map(node, range(3)))
    manager.wait_for_all()
    manager.save(tmp_path)
    later = manager_of([node(0), node(1), node(2, size=6)])
    later.load(tmp_path)
    with pytest.raises(UserError, match="missing: 2"):
        later.wait_for_all()
    assert "client 2 reports other numbers of samples than before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda content: [], "it is a list, not an object"),
        (lambda content: content | {"clients": [1]}, "clients is a list, not an object"),
        (lambda content: content | {"run": None}, "run is None, not a text"),
        (lambda content: content | {"clients": {"0": 3}}, "clients.0 is 3, not an object"),
        (lambda content: content | {"clients": {"0": content["clients"]["0"] | {"size": "x"}}}, "client 0: its reply"),
        (
            lambda content: content | {"clients": {"0": content["clients"]["0"] | {"size": 2**40}}},
            "client 0: it reports",
        ),
        (lambda content: content | {"clients": {"0": content["clients"]["0"] | {"client": 9}}}, "client 0: it has"),
        (lambda content: content | {"clients": {"0": content["clients"]["0"] | {"label_counts": 1}}}, "client 0: its"),
    ],
)
def test_damaged_facts_about_the_clients_are_one_line(change, part, tmp_path):
    manager = manager_of(map(node, range(3)))
    manager.wait_for_all()
    manager.save(tmp_path)
    path = tmp_path / "clients.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    later = manager_of(map(node, range(3)))
    with pytest.raises(UserError) as caught:
        later.load(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged (") and part in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"it has no clients.json"):
        later.load(tmp_path)


def test_all_clients_together_have_at_most_as_many_samples_as_32_bits_count(capsys):
    clients = [node(client, size=2**24) for client in range(129)]
    manager = ClientManager(
        fake_messenger(dict(enumerate(clients))),
        MANIFEST,
        num_clients=129,
        policy=Policy(join_timeout=9.0),
    )
    with pytest.raises(UserError, match=r"127 of 129 clients have joined"):
        manager.wait_for_all()
    assert (
        "client 127 reports 16,777,216 samples; all clients together have at most 2^31 - 1" in capsys.readouterr().err
    )


def test_a_clients_words_cannot_forge_the_servers_lines(capsys):
    def forge(message):
        if message.kind in ("join", "begin"):
            return node(2)(message) if message.kind == "join" else {}
        raise UserError("\x1b[2J\nfedjax-mr: round 9: accuracy 1.0" + 1000 * "x")

    manager = manager_of([node(0), node(1), forge], lost="untrained")
    assert asked(manager) == {0: 0}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable() and line.startswith("fedjax-mr: round 5: lost client 2: ?[2J") and len(line) < 250


def test_different_versions_are_named():
    assert disagreement({"jax": "2", "flax": "1"}, {"jax": "1", "flax": "1"}) == "jax 2 here and 1 at the server"
