"""Secure recombination by relay: the simulation's models, and what clients and the server refuse."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.deploy import keys, relay, transport
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer
from fedjax_mr.secure.envelopes import Identity, read_roster
from fedjax_mr.secure.exchange import exchange
from fedjax_mr.testing.messages import fake_messenger

pytest.importorskip("cryptography", reason="the messages are encrypted: pip install 'fedjax_mr[secure]'")

CLIENTS = (5, 2, 9)  # in the order of the cohort
LAYERS = (Layer("conv", (0, 1), ("kernel", "bias")), Layer("dense", (2,), ("kernel",)))
KEY = jax.random.key(7)


def model_of(client):
    """A model whose numbers all identify its owner."""
    return [np.full(shape, client, np.float32) for shape in ((2, 3), (3,), (4,))]


SHAPES = jax.eval_shape(lambda: model_of(0))


@dataclasses.dataclass
class Federation:
    """Clients with folders of their own, and the settings of their nodes."""

    folder: object
    nodes: dict
    repetitions: int = 1

    def answer(self, client, message):
        folder = self.folder / str(client)
        return relay.answer(
            message,
            self.nodes[client],
            folder,
            client=client,
            model=functools.partial(model_of, client),
            layers=LAYERS,
            share=0.6,
            repetitions=self.repetitions,
        )

    def recombine(self, faults=None, *, attempt=0, round=3, run="a run", change=lambda client, message: message):
        handlers = {
            100 + client: lambda message, client=client: self.answer(client, change(client, message))
            for client in CLIENTS
        }
        return relay.recombine(
            fake_messenger(handlers, faults),
            {client: 100 + client for client in CLIENTS},
            run=run,
            round=round,
            attempt=attempt,
            shapes=SHAPES,
            layers=LAYERS,
            repetitions=self.repetitions,
            key=KEY,
            timeout=30.0,
        )


@pytest.fixture
def federation(tmp_path):
    lines = []
    for client in CLIENTS:
        (tmp_path / str(client)).mkdir()
        identity = Identity.new(client)
        identity.write(tmp_path / f"{client}.key")
        lines.append(identity.public.line() + "\n")
    (tmp_path / "roster").write_text("# everybody\n" + "".join(lines))
    nodes = {client: {"key": str(tmp_path / f"{client}.key"), "roster": str(tmp_path / "roster")} for client in CLIENTS}
    return Federation(tmp_path, nodes)


def simulated(repetitions):
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[model_of(client) for client in CLIENTS])
    outcome = exchange(KEY, num_units=2, count=3, share=0.6, repetitions=repetitions)
    units = tuple(layer.leaves for layer in LAYERS)
    return trees.mix(stacked, outcome.permutations, units=units)


def same(models, expected):
    for row, model in enumerate(models):
        jax.tree.map(np.testing.assert_array_equal, model, trees.take(expected, row))


@pytest.mark.slow
@pytest.mark.parametrize("repetitions", [1, 2])
def test_the_simulations_models_whatever_comes_twice_or_crashes(federation, repetitions):
    federation.repetitions = repetitions
    for node in federation.nodes.values():
        node["choices"] = "simulated"
    same(federation.recombine(), simulated(repetitions))
    troubles = lambda message, before: ("double", "crash")[message.node % 2] if not before else None
    same(federation.recombine(troubles, attempt=1), simulated(repetitions))


def whole(models):
    """Check that every copy of every layer is there once, and that layers are in one piece."""
    for leaf in range(3):
        assert sorted(float(model[leaf].ravel()[0]) for model in models) == sorted(CLIENTS)
    assert all(model[0].ravel()[0] == model[1][0] and np.ptp(leaf) == 0 for model in models for leaf in model)


def test_clients_draw_on_their_own_and_no_layer_is_lost(federation):
    whole(federation.recombine())


def test_every_bundle_is_as_long_as_every_other(federation):
    lengths = {}

    def note(client, message):
        for bundle in message.content.get("bundles", {}).values():
            lengths.setdefault(message.content["relay"]["step"], set()).add(bundle.size)
        return message

    federation.recombine(change=note)
    assert set(lengths) == {1, 2} and len(set.union(*lengths.values())) == 1


def test_a_drop_out_ends_the_attempt_and_the_next_one_is_whole(federation):
    silent = lambda message, before: "lose" if message.node == 102 and message.content["relay"]["step"] == 1 else None
    with pytest.raises(relay.ExchangeFailed, match="client 2: no reply within 30 s") as error:
        federation.recombine(silent)
    assert set(error.value.lost) == {2}
    whole(federation.recombine(attempt=1))
    with pytest.raises(relay.ExchangeFailed, match=r"client 5 is not at step 0 of round 3, attempt 0"):
        federation.recombine(attempt=0)
    whole(federation.recombine(attempt=0, round=4))
    whole(federation.recombine(attempt=0, round=0, run="another"))


def carried(change):
    """A function that changes the bundles forwarded to client 2 for step 1."""

    def apply(client, message):
        if client != 2 or message.content["relay"]["step"] != 1:
            return message
        bundles = change(dict(message.content["bundles"]), message.content)
        return dataclasses.replace(message, content=dict(message.content) | {"bundles": bundles})

    return apply


def flipped(bundle, place):
    bundle = bundle.copy()
    bundle[place] ^= 1
    return bundle


@pytest.mark.parametrize(
    "change",
    [
        lambda bundles, content: bundles | {"5": flipped(bundles["5"], 3)},  # the signature
        lambda bundles, content: bundles | {"5": flipped(bundles["5"], 70)},  # the key inside
        lambda bundles, content: bundles | {"5": flipped(bundles["5"], -1)},  # the content
        lambda bundles, content: bundles | {"5": bundles["5"][:-1]},
        lambda bundles, content: bundles | {"5": np.zeros(0, np.uint8)},
        lambda bundles, content: bundles | {"5": bundles["9"]},  # another sender's
    ],
)
def test_a_changed_bundle_is_refused(federation, change):
    with pytest.raises(
        relay.ExchangeFailed, match="client 2 received an envelope that client 5 did not seal for it"
    ) as error:
        federation.recombine(change=carried(change))
    assert set(error.value.lost) == {2} and error.value.lost[2].refused


@pytest.mark.parametrize("bundles", [{}, {"5": np.zeros(3, np.uint8)}])
def test_a_missing_bundle_is_refused(federation, bundles):
    with pytest.raises(
        relay.ExchangeFailed, match="client 2: the server did not forward one bundle from each other client"
    ):
        federation.recombine(change=carried(lambda found, content: bundles))


def test_bundles_of_another_round_receiver_or_stage_do_not_open(federation):
    """A server that replays: what came for round 3 in round 4, for client 9 to client 2, of step 0 in step 2."""
    seen = {}

    def note(client, message):
        seen[client, message.content["relay"]["step"]] = dict(message.content.get("bundles", {}))
        return message

    federation.recombine(change=note)
    line = "client 2 received an envelope that client 5 did not seal for it at this stage"
    with pytest.raises(relay.ExchangeFailed, match=line):
        federation.recombine(round=4, change=carried(lambda bundles, content: bundles | {"5": seen[2, 1]["5"]}))
    with pytest.raises(relay.ExchangeFailed, match=line):
        federation.recombine(round=5, change=carried(lambda bundles, content: bundles | {"5": seen[9, 1]["5"]}))

    def again(client, message):
        note(client, message)
        if client == 2 and message.content["relay"]["step"] == 2:
            return dataclasses.replace(message, content=dict(message.content) | {"bundles": seen[2, 1]})
        return message

    with pytest.raises(relay.ExchangeFailed, match=line):
        federation.recombine(round=6, change=again)


def test_a_foreign_signature_is_refused(federation):
    """Client 9 signs with keys that are not those of its line in the roster of the others."""
    other = Identity.new(9)
    other.write(federation.folder / "foreign.key")
    roster = federation.folder / "other_roster"
    roster.write_text(re.sub(r"(?m)^9 .*$", other.public.line(), (federation.folder / "roster").read_text()))
    federation.nodes[9] |= {"key": str(federation.folder / "foreign.key"), "roster": str(roster)}
    with pytest.raises(relay.ExchangeFailed, match="client 5 received an envelope that client 9 did not seal for it"):
        federation.recombine()


@pytest.mark.parametrize(
    ("client", "setting", "line"),
    [
        (2, {"key": "{folder}/9.key"}, "the keys of client 2 are not those in its line of the roster"),
        (2, {"key": "{folder}/none"}, "cannot read {folder}/none, the private keys of a client"),
        (2, {"key": "{folder}/roster"}, "{folder}/roster contains the keys of 3 clients, not of one"),
        (2, {"roster": "{folder}/5.key"}, "the keys of client 2 are not those"),
        (2, {"choices": "mine"}, "choices='mine' in the node settings of client 2"),
    ],
)
def test_wrong_settings_of_a_node(federation, client, setting, line):
    federation.nodes[client] |= {name: value.format(folder=federation.folder) for name, value in setting.items()}
    with pytest.raises(relay.ExchangeFailed) as error:
        federation.recombine()
    assert line.format(folder=federation.folder) in str(error.value) and set(error.value.lost) == {client}


def test_a_node_without_settings_for_the_exchange(federation):
    del federation.nodes[5]["roster"]
    with pytest.raises(relay.ExchangeFailed, match="the node settings of client 5 have no 'roster'"):
        federation.recombine()


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda content: content | {"bundles": {}}, "it did not send one bundle of the agreed length"),
        (lambda content: content | {"bundles": content["bundles"] | {"5": np.zeros(3, np.uint8)}}, "agreed length"),
        (lambda content: content | {"upload": {"conv": np.zeros(3, np.uint8)}}, "uploaded 1 layers, not 2"),
        (lambda content: content | {"upload": {"conv": 3, "dense": 4}}, "uploaded something other than bytes"),
        (lambda content: content | {"upload": {name: flipped(each, 0) for name, each in content["upload"].items()}},
         "was not sealed for round 3"),
    ],
)  # fmt: skip
def test_a_malformed_reply_ends_the_attempt_and_names_the_client(federation, spoil, line):
    where = 2 if "upload" in line or "sealed" in line else 0
    faults = lambda message, before: spoil if (message.node, message.content["relay"]["step"]) == (102, where) else None
    with pytest.raises(relay.ExchangeFailed, match="client 2") as error:
        federation.recombine(faults)
    assert line in str(error.value)


def test_a_diverged_model_is_not_sealed(federation, monkeypatch):
    monkeypatch.setitem(globals(), "model_of", lambda client: [np.full(3, np.nan, np.float32)] * 3)
    with pytest.raises(relay.ExchangeFailed, match="the trained model of client 5 has numbers that are not finite"):
        federation.recombine()


def test_malformed_messages_are_refused(federation):
    for content, line in (
        ({}, "client 5 received a malformed message of an exchange"),
        ({"relay": {"run": "r", "step": 1}}, "client 5 is not at step 1"),
        ({"relay": {"run": "r", "step": 0}}, "client 5: the server's announcement of the exchange is malformed"),
        (
            {"relay": {"run": "r", "step": 0}, "choices": {"key": [1, 2]}},
            "client 5: the server's announcement of the exchange is malformed",
        ),
    ):
        with pytest.raises(UserError, match=line):
            federation.answer(5, transport.Message(relay.KIND, 105, 0, 0, content))


def test_a_damaged_file_of_a_client_is_named(federation):
    (federation.folder / "5" / "relay.npz").write_bytes(b"PK no archive")
    with pytest.raises(UserError, match=r"cannot read .*relay\.npz"):
        federation.answer(5, transport.Message(relay.KIND, 105, 0, 0, {"relay": {"run": "r", "step": 0}}))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("5 abc def\n", "roster:1 is not a line of the roster"),
        ("5 {0} {1}\n5 {2} {3}\n", "two lines for client 5"),
        ("5 {0} {1}\n6 {0} {3}\n", "two lines for client 6, or repeats one of its keys"),
    ],
)
def test_malformed_rosters(tmp_path, text, line):
    (tmp_path / "roster").write_text(text.format(*(f"{number:064x}" for number in range(4))))
    with pytest.raises(UserError, match=line):
        read_roster(tmp_path / "roster")


def test_private_keys_are_the_owners_and_are_not_replaced(tmp_path):
    Identity.new(3).write(tmp_path / "3.key")
    assert (tmp_path / "3.key").stat().st_mode & 0o777 == 0o600
    assert Identity.read(tmp_path / "3.key").client == 3
    with pytest.raises(UserError, match="are not replaced"):
        Identity.new(3).write(tmp_path / "3.key")


def test_the_command_makes_keys_and_prints_their_line(tmp_path, capsys):
    for client in (3, 0):
        keys.main([f"--client={client}", f"--out={tmp_path / str(client)}"])
    (tmp_path / "roster").write_text(capsys.readouterr().out)
    assert read_roster(tmp_path / "roster") == {
        client: Identity.read(tmp_path / str(client)).public for client in (0, 3)
    }
    with pytest.raises(UserError, match="--client must be 0 or larger"):
        keys.main(["--client=-1", f"--out={tmp_path / 'negative'}"])
