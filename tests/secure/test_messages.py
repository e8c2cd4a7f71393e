"""Secure recombination with real messages: the same models as in the simulation, and refused messages."""

import builtins
import dataclasses
import doctest
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.secure import messages as secure
from fedjax_mr.secure.exchange import Repetition, draw
from fedjax_mr.strategies.parts import independent_starts

pytest.importorskip("cryptography", reason="the messages are encrypted: pip install 'fedjax_mr[secure]'")

SIZES = {"conv": 12, "dense": 5}
few = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)


def layers_of(client):
    """Layers in which every byte is the owner's id."""
    return {name: bytes([client]) * size for name, size in SIZES.items()}


@dataclasses.dataclass
class Scripted:
    """The choices of one client in the exchanges [U, K] of a simulation, in which its id is its row."""

    client: int
    names: tuple
    steps: list
    begun: int = 0

    def receivers(self, names, others):
        self.step, self.begun = self.steps[self.begun], self.begun + 1
        holders = self.step.holders[:, self.client]
        return {name: int(holders[unit]) for unit, name in enumerate(self.names) if holders[unit] != self.client}

    def order(self, name, count):
        unit = self.names.index(name)
        met = np.flatnonzero(self.step.holders[unit] == self.client).tolist()
        senders = [client for client in met if client != self.client]
        own = [self.client] if self.client in met else []
        places = own + senders  # the buffer: first what was kept, then what came, in the order of the clients
        return [places.index(self.step.permutations[unit, client]) for client in senders + own]


def started(clients=(0, 1, 2), share=0.5, round=4):
    server = secure.SecureServer(SIZES, clients)
    announcement = server.announce(round=round)
    choices = secure.RandomChoices(share)
    return server, {client: secure.Party(client, layers_of(client), announcement, choices) for client in clients}


def everything_to(receiver):
    """Choices that send all layers to one client, and return layers in the order of arrival."""

    class Choices:
        def receivers(self, names, others):
            return dict.fromkeys(names, receiver) if receiver in others else {}

        def order(self, name, count):
            return sorted(range(count), key=lambda place: place == 0)  # the holder's own, if kept, is the first

    return Choices()


@functools.cache
def program(count):
    return jax.jit(lambda key: draw(key, num_units=2, count=count, share=0.6))


@few
@hypothesis.given(st.sampled_from([1, 2, 5]), st.integers(1, 3), st.integers(0, 2**31 - 1))
def test_the_same_choices_give_the_same_models_as_the_simulation(count, repetitions, seed):
    keys = jax.random.split(jax.random.key(seed), repetitions)
    steps = [Repetition(*map(np.asarray, program(count)(key))) for key in keys]
    names, owners = tuple(SIZES), np.broadcast_to(np.arange(count), (2, count))
    for step in steps:
        owners = np.take_along_axis(owners, step.permutations, axis=1)

    server = secure.SecureServer(SIZES, range(count))
    announcement = server.announce(round=0)
    parties = {
        client: secure.Party(client, layers_of(client), announcement, Scripted(client, names, steps))
        for client in range(count)
    }
    secure.exchange_layers(parties, repetitions=repetitions)
    for party in parties.values():
        server.receive(party.upload())
    opened = server.open()
    for unit, name in enumerate(names):
        assert [opened[client][name] for client in range(count)] == [bytes([o]) * SIZES[name] for o in owners[unit]]


@few
@hypothesis.given(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3))
def test_each_layers_copies_arrive_once(count, share, repetitions):
    server, parties = started(tuple(range(10, 10 + count)), share)
    secure.exchange_layers(parties, repetitions=repetitions)
    for client in reversed(parties):
        server.receive(parties[client].upload())
    opened = server.open()
    assert list(opened) == list(parties)
    for name, size in SIZES.items():
        assert sorted(model[name] for model in opened.values()) == [bytes([client]) * size for client in parties]
    if share == 0 or count == 1 or repetitions == 0:
        assert opened == {client: layers_of(client) for client in parties}


def test_models_survive_the_way_through_bytes(federation):
    problem = federation("perceptron").problem
    stacked = jax.device_get(jax.jit(lambda key: independent_starts(problem, key))(jax.random.key(0)))
    models = [trees.take(stacked, row) for row in range(problem.cohort_size)]
    packed = [secure.pack(model, problem.layers) for model in models]
    sizes = {name: len(layer) for name, layer in packed[0].items()}
    assert sum(sizes.values()) == trees.num_bytes(models[0])
    server = secure.SecureServer(sizes, range(3))
    announcement = server.announce(round=1)
    parties = {client: secure.Party(client, packed[client], announcement) for client in range(3)}
    secure.exchange_layers(parties, repetitions=3)
    for party in parties.values():
        server.receive(party.upload())
    back = [secure.unpack(each, problem.layers, problem.model.shapes()) for each in server.open().values()]
    rows = lambda trees: sorted(tuple(np.asarray(leaf).tobytes() for leaf in leaves) for leaves in trees)
    for layer in problem.layers:
        pick = lambda tree, layer=layer: [jax.tree.leaves(tree)[leaf] for leaf in layer.leaves]
        assert rows(map(pick, models)) == rows(map(pick, back))
    described = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert described(back[0]) == described(problem.model.shapes())


def test_a_sealed_layer_shows_neither_content_nor_owner():
    server, parties = started()
    sealed = {client: parties[client].upload().layers for client in parties}
    for client, layers in sealed.items():
        for layer in layers:
            assert [field.name for field in dataclasses.fields(layer)] == ["round", "name", "sealed"]
            assert len(layer.sealed) == SIZES[layer.name] + secure.OVERHEAD
            assert layers_of(client)[layer.name] not in layer.sealed
    # Equal layers of equal owners are sealed differently, with another ephemeral key each.
    again = secure.Party(0, layers_of(0), server.announce(round=4)).upload().layers
    everything = [layer.sealed for layers in [*sealed.values(), again] for layer in layers]
    assert len({each[:32] for each in everything}) == len(everything) == 8


# --- What the server refuses ----------------------------------------------------------------------------------------


def uploads_of(parties):
    return [party.upload() for party in parties.values()]


def changed(upload, layer):
    """An upload with its first layer replaced."""
    return dataclasses.replace(upload, layers=(layer, *upload.layers[1:]))


@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_the_server_notices_a_changed_layer(place):
    server, parties = started()
    first, *others = uploads_of(parties)
    sealed = bytearray(first.layers[0].sealed)
    sealed[place] ^= 1
    for upload in (changed(first, dataclasses.replace(first.layers[0], sealed=bytes(sealed))), *others):
        server.receive(upload)
    with pytest.raises(secure.TamperedLayer, match="'conv' uploaded by client 0"):
        server.open()


def test_the_server_notices_a_layer_of_another_round_or_place():
    server, parties = started(round=4)
    old = uploads_of(parties)
    announcement = server.announce(round=5)
    parties = {client: secure.Party(client, layers_of(client), announcement) for client in parties}
    new = uploads_of(parties)
    with pytest.raises(secure.WrongRound, match="round 4 arrived in round 5"):
        server.receive(old[0])
    with pytest.raises(secure.WrongRound):
        server.receive(dataclasses.replace(old[0], round=5))  # the layers say it too
    relabelled = dataclasses.replace(old[0].layers[0], round=5)
    for upload in (changed(new[0], relabelled), *new[1:]):
        server.receive(upload)
    with pytest.raises(secure.TamperedLayer):
        server.open()


def test_the_round_and_the_name_are_authenticated_under_one_key():
    """Another round, name or length is refused even if the key is unchanged."""
    server = secure.SecureServer({"a": 4, "b": 4}, (0,))
    announcement = server.announce(round=1)
    upload = secure.Party(0, {"a": b"aaaa", "b": b"bbbb"}, announcement).upload()
    a, b = upload.layers
    swapped = (dataclasses.replace(b, name="a"), dataclasses.replace(a, name="b"))
    server.receive(dataclasses.replace(upload, layers=swapped))
    with pytest.raises(secure.TamperedLayer):
        server.open()
    server._announcement = dataclasses.replace(announcement, round=2)
    server._uploads = {0: upload}
    with pytest.raises(secure.TamperedLayer):
        server.open()
    server._announcement = announcement
    server._uploads = {0: upload}
    assert server.open() == {0: {"a": b"aaaa", "b": b"bbbb"}}


def test_the_server_refuses_repeated_foreign_and_incomplete_uploads():
    server, parties = started()
    first, second, third = uploads_of(parties)
    server.receive(first)
    with pytest.raises(secure.ReplayedMessage, match="client 0 has already uploaded"):
        server.receive(first)
    with pytest.raises(secure.UnexpectedMessage, match="client 9"):
        server.receive(dataclasses.replace(second, sender=9))
    with pytest.raises(secure.MissingLayer, match="client 1"):
        server.receive(dataclasses.replace(second, layers=second.layers[:1]))
    with pytest.raises(secure.TamperedLayer, match="59 sealed bytes"):
        cut = dataclasses.replace(second.layers[0], sealed=second.layers[0].sealed[:-1])
        server.receive(changed(second, cut))
    with pytest.raises(secure.MissingLayer, match=r"clients \[1, 2\]"):
        server.open()
    server.receive(changed(second, first.layers[0]))
    server.receive(third)
    with pytest.raises(secure.ReplayedMessage, match="clients 0 and 1 uploaded the same sealed 'conv'"):
        server.open()


def test_a_refused_upload_is_forgotten_and_the_honest_one_can_follow():
    server, parties = started()
    first, second, third = uploads_of(parties)
    swapped = dataclasses.replace(first.layers[0], sealed=second.layers[0].sealed[:-1] + b"!")
    for upload in (changed(first, swapped), second, third):
        server.receive(upload)
    with pytest.raises(secure.TamperedLayer, match="client 0"):
        server.open()
    server.receive(changed(first, second.layers[0]))
    with pytest.raises(secure.ReplayedMessage, match="clients 0 and 1"):
        server.open()
    server.receive(first)
    server.receive(second)
    assert server.open() == {client: layers_of(client) for client in parties}


def test_a_round_is_opened_once():
    server, parties = started()
    for upload in uploads_of(parties):
        server.receive(upload)
    server.open()
    with pytest.raises(secure.WrongRound, match="announce"):
        server.open()


# --- Malformed objects, at whatever entry --------------------------------------------------------------------------

OTHER_TYPES = (
    None, True, 1.5, 1j, -1, 2**63, 10**5000, "x", "\ud800", "y" * 10**6, b"", b"x", bytearray(5), (), [], {}
)  # fmt: skip


def malformed(message):
    """Yield objects that are not a message of this kind: others, and the message with one field of another type."""
    yield from (*OTHER_TYPES, type(message))
    for field in dataclasses.fields(message):
        for value in (*OTHER_TYPES, type(getattr(message, field.name))):
            yield dataclasses.replace(message, **{field.name: value})
        without = dataclasses.replace(message)
        object.__delattr__(without, field.name)
        yield without


def malformed_layers(upload):
    """Yield uploads with a wrong layer or a wrong list of layers."""
    first, second = upload.layers
    for layer in malformed(first):
        yield dataclasses.replace(upload, layers=(layer, second))
    for layers in (first, list(upload.layers), (first, first), (first,) * 10**6, iter(upload.layers)):
        yield dataclasses.replace(upload, layers=layers)
    yield changed(upload, dataclasses.replace(first, sealed=bytearray(first.sealed)))


def malformed_announcements(announcement):
    yield from malformed(announcement)
    for change in (
        dict(clients=(0, 0, 1)), dict(clients=(0, 1.0, 2)), dict(clients=(0,) * 10**6), dict(public_key=bytes(32)),
        dict(public_key=bytearray(32)), dict(sizes=(("conv", 12), ("conv", 12))), dict(sizes=(("conv", -1),)),
        dict(sizes=(("conv",),)), dict(sizes=(("\ud800", 1),)), dict(sizes=((1, "conv"),)), dict(sizes=SIZES),
    ):  # fmt: skip
        yield dataclasses.replace(announcement, **change)


def assert_refused(entry, messages, *, changing=None):
    """Every message raises a SecureError of one short line and leaves the object ``changing`` as it was."""
    messages, before = list(messages), repr(vars(changing)) if changing else ""
    for message in messages:
        with pytest.raises(secure.SecureError) as caught:
            entry(message)
        assert 0 < len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    assert messages and (not changing or repr(vars(changing)) == before)


def test_malformed_uploads_are_refused():
    server, parties = started()
    upload = parties[0].upload()
    assert_refused(server.receive, [*malformed(upload), *malformed_layers(upload)], changing=server)
    server.receive(upload)


def test_malformed_messages_of_clients_are_refused():
    _, parties = started()
    for party in parties.values():
        party.choices = everything_to(2)
    not_begun = secure.Sent(4, -1, 0, 2, parties[0]._buffers["conv"][0])
    assert_refused(parties[2].receive, [not_begun], changing=parties[2])
    sent = [message for party in parties.values() for message in party.send()]
    broken_layers = lambda message: [dataclasses.replace(message, layer=each) for each in malformed(message.layer)]
    assert_refused(parties[2].receive, [*malformed(sent[0]), *broken_layers(sent[0])], changing=parties[2])
    for message in sent:
        parties[2].receive(message)
    parties[0].give_back()
    back = next(message for message in parties[2].give_back() if message.receiver == 0)
    assert_refused(parties[0].take_back, [*malformed(back), *broken_layers(back)], changing=parties[0])
    parties[0].take_back(back)


def test_malformed_announcements_are_refused():
    server, _ = started()
    announcements = malformed_announcements(server.announce(round=4))
    assert_refused(lambda announcement: secure.Party(0, layers_of(0), announcement), announcements)


def test_malformed_packed_models_are_refused(federation):
    problem = federation("perceptron").problem
    shapes = problem.model.shapes()
    packed = secure.pack(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes), problem.layers)
    name, content = next(iter(packed.items()))
    wrong = [packed | {name: each} for each in (*OTHER_TYPES, content + b"x", content[:-1], bytearray(content))]
    wrong += [*OTHER_TYPES, packed | {"more": b""}, {name: content}]
    assert_refused(lambda each: secure.unpack(each, problem.layers, shapes), wrong)


# --- What a client refuses ------------------------------------------------------------------------------------------


def test_a_client_refuses_what_is_not_for_it_now():
    _, parties = started()
    for party in parties.values():
        party.choices = everything_to(2)
    sent = {client: party.send() for client, party in parties.items()}
    message, holder = sent[0][0], parties[2]
    change = dataclasses.replace
    refused = [
        (change(message, round=3), secure.WrongRound),
        (change(message, layer=change(message.layer, round=3)), secure.WrongRound),
        (change(message, repetition=1), secure.UnexpectedMessage),
        (change(message, repetition=-1), secure.ReplayedMessage),
        (change(message, receiver=1), secure.UnexpectedMessage),
        (change(message, sender=7), secure.UnexpectedMessage),
        (change(message, sender=2), secure.UnexpectedMessage),
        (change(message, layer=change(message.layer, name="pool")), secure.UnexpectedMessage),
        (change(message, layer=change(message.layer, sealed=b"")), secure.TamperedLayer),
        (secure.Returned(**dataclasses.asdict(message) | {"layer": message.layer}), secure.UnexpectedMessage),
    ]
    for wrong, error in refused:
        with pytest.raises(error) as caught:
            holder.receive(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(secure.MissingLayer, match="client 0 is in the middle"):
        parties[0].upload()
    holder.receive(message)
    with pytest.raises(secure.ReplayedMessage, match="client 0 has already sent its 'conv'"):
        holder.receive(message)
    with pytest.raises(secure.ReplayedMessage, match="in the buffer"):
        holder.receive(change(sent[1][0], layer=message.layer))
    for late in (*sent[0][1:], *sent[1]):
        holder.receive(late)

    returned = {message.receiver: message for message in holder.give_back() if message.layer.name == "conv"}
    with pytest.raises(secure.UnexpectedMessage, match="once"):
        holder.give_back()
    with pytest.raises(secure.UnexpectedMessage, match="owes"):
        parties[0].take_back(returned[0])  # before its own stage 3
    for client in (0, 1):
        assert parties[client].give_back() == []
    with pytest.raises(secure.UnexpectedMessage, match="too late"):
        parties[0].receive(change(message, sender=1, receiver=0))
    with pytest.raises(secure.UnexpectedMessage, match="owes"):
        parties[0].take_back(change(returned[0], sender=1))
    parties[0].take_back(returned[0])
    with pytest.raises(secure.ReplayedMessage, match="has already returned 'conv'"):
        parties[0].take_back(returned[0])


def test_a_client_refuses_a_second_exchange_before_the_first_is_over():
    _, parties = started(share=1.0)
    parties[0].send()
    with pytest.raises(secure.MissingLayer):
        parties[0].send()


def test_what_one_passes_in_is_checked():
    server, _ = started()
    announcement = server.announce(round=0)
    with pytest.raises(UserError, match="client 5 is not one of"):
        secure.Party(5, layers_of(5), announcement)
    with pytest.raises(UserError, match="the server announced"):
        secure.Party(0, {"conv": b""}, announcement)
    for layers in (None, 1, {"conv": bytearray(12), "dense": bytes(5)}, {"conv": 12, "dense": 5}):
        with pytest.raises(UserError, match="bytes by name"):
            secure.Party(0, layers, announcement)
    for round in (-1, 2**63, 1.5, True, None, "1"):
        with pytest.raises(UserError, match="a round must be an integer"):
            server.announce(round)
    for sizes, clients in (
        (None, (0,)), ({}, (0,)), ({"a": -1}, (0,)), ({"a": 1.5}, (0,)), ({1: 1}, (0,)), ({"\ud800": 1}, (0,)),
        (SIZES, 3), (SIZES, ()), (SIZES, (1, 1)), (SIZES, ("a",)), (SIZES, (2**64,)), (SIZES, range(10**5)),
    ):  # fmt: skip
        with pytest.raises(UserError):
            secure.SecureServer(sizes, clients)
    party = secure.Party(np.int64(1), layers_of(1), announcement)
    with pytest.raises(UserError, match=r"\[0, 2\] are missing"):
        secure.exchange_layers({1: party})


def test_without_cryptography_one_line_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'fedjax_mr\[secure\]'") as caught:
        secure.SecureServer(SIZES, (0, 1)).announce(round=0)
    assert caught.value.exit_code == 2


def test_the_example_of_the_docstring_runs():
    assert doctest.testmod(secure).failed == 0
    assert doctest.testmod(secure).attempted > 5
