"""The roll call and lost clients, with nodes that are plain functions: who joins, what is said, what follows."""

import pytest

from fedjax_mr.data.facts import Facts
from fedjax_mr.deploy import mail
from fedjax_mr.deploy.facts import Member, Request, disagreement
from fedjax_mr.deploy.roll import Roll, Terms
from fedjax_mr.errors import UserError

FACTS = Facts("toy", (2,), "float32", 3, (0.0,), (1.0,), 0.0, 1.0)
REQUEST = Request("ab" * 8, FACTS, {"jax": "1"}, label_counts=False)


def node(client, *, size=5, answer=None):
    """Return a node's answering function: it joins as a client, and answers ``answer`` or a number."""

    def handle(message):
        if message.kind == "join":
            return {"member": Member(client, size, 0, 0, ()).record()}
        return {"said": {"number": 10 * client}} if answer is None else answer(message)

    return handle


def roll_of(nodes, *, faults=None, lost="wait", clients=3):
    post = mail.FakePost(dict(enumerate(nodes, 100)), faults)
    return Roll(post, REQUEST, num_clients=clients, terms=Terms(lost, reply_timeout=5.0, join_timeout=9.0))


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

    post = mail.FakePost({100 + client: node(client) for client in range(3)}, lose)
    roll = Roll(post, REQUEST, num_clients=3, terms=Terms(reply_timeout=600.0, join_timeout=90.0))
    assert asked(roll) == {0: 0, 2: 20}
    assert "no reply within 30 s" in capsys.readouterr().err


def asked(roll):
    roll.everybody()
    roll.begin({})
    return roll.ask("train", 4, {0: {}, 2: {}}, read)


def test_everybody_joins_and_answers():
    roll = roll_of([node(2), node(0, size=7), node(1)])
    assert [member.size for member in roll.everybody()] == [7, 5, 5]
    assert asked(roll) == {0: 0, 2: 20}


def once(fault):
    """Return faults that meet client 2, at the node 102, once."""
    left = [fault]
    return lambda message, before: left.pop() if message.kind == "train" and message.node == 102 and left else None


spoil = lambda content: {**content, "said": {"number": -1}}
AT_FAULT = [("lose", "no reply within 5 s"), (spoil, "its upload is malformed")]


@pytest.mark.parametrize(
    "fault", [*AT_FAULT, ("double", ""), ("crash", "")], ids=["late", "malformed", "double", "crash"]
)
def test_a_single_fault_changes_no_answer_where_one_waits(fault, capsys):
    assert asked(roll_of(map(node, range(3)), faults=once(fault[0]))) == {0: 0, 2: 20}
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

    roll = Roll(mail.FakePost(nodes, faults), REQUEST, num_clients=3, terms=Terms(lost, 500.0, 9.0))
    assert asked(roll) == {0: 0, 2: 20} and "lost" not in capsys.readouterr().err


@pytest.mark.parametrize("fault", AT_FAULT, ids=["late", "malformed"])
def test_without_waiting_a_lost_client_is_named_and_left_out(fault, capsys):
    assert asked(roll_of(map(node, range(3)), faults=once(fault[0]), lost="untrained")) == {0: 0}
    assert f"round 5: lost client 2: {fault[1]}" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"round 5: client 2 is lost .*{fault[1]}"):
        asked(roll_of(map(node, range(3)), faults=once(fault[0]), lost="stop"))


def test_if_all_are_lost_there_is_nothing_to_go_on_with():
    left = [100, 102]
    faults = lambda message, before: "lose" if message.kind == "train" and message.node in left else None

    def again(message, before):
        fault = faults(message, before)
        if fault:
            left.remove(message.node)
        return fault

    assert asked(roll_of(map(node, range(3)), faults=again, lost="untrained")) == {0: 0, 2: 20}


def refuse(message):
    raise UserError("client 2: no memory of round 3 is here")


@pytest.mark.parametrize("answer", [refuse, lambda message: {"said": {"number": -1}}], ids=["refuses", "malformed"])
def test_a_client_that_answers_falsely_again_and_again_ends_the_run(answer, capsys):
    at_train = lambda message: {} if message.kind == "begin" else answer(message)
    with pytest.raises(UserError, match=r"client 2 answers falsely 3 times .*--lost=untrained"):
        asked(roll_of([node(0), node(1), node(2, answer=at_train)]))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([node(0), node(1)], ""),
        ([node(0), node(1), node(3)], "it has the client-id 3, and clients are numbered 0 to 2"),
        ([node(0), node(1), node(1)], "client 1 is already there, by node 101: each needs a client-id of its own"),
        ([node(0), node(1), node(2, size=0)], "sizes are whole numbers, of one sample at least"),
        ([node(0), node(1), lambda message: {"member": {"client": "2"}}], "its answer at the roll call is malformed"),
        ([node(0), node(1), refuse], "node 102 does not join: client 2: no memory"),
    ],
)
def test_without_all_clients_the_run_does_not_begin(nodes, said, capsys):
    with pytest.raises(UserError, match=r"2 of 3 clients are there after 9 s; missing: 2"):
        roll_of(nodes).everybody()
    assert said in capsys.readouterr().err


def test_a_client_of_other_sizes_or_another_node_is_not_the_one_of_the_run(tmp_path, capsys):
    roll = roll_of(map(node, range(3)))
    roll.everybody()
    roll.save(tmp_path)
    later = roll_of([node(0), node(1), node(2, size=6)])
    later.remember(tmp_path)
    with pytest.raises(UserError, match="missing: 2"):
        later.everybody()
    assert "client 2 tells other numbers of samples than before" in capsys.readouterr().err


def test_different_versions_are_named():
    assert disagreement({"jax": "2", "flax": "1"}, {"jax": "1", "flax": "1"}) == "jax 2 here and 1 at the server"
