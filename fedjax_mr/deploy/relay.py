"""Secure recombination among real clients: the server carries what they exchange, and opens only what they upload.

The clients of a round are `messages.Party`s. A client reaches another one through the server alone, so what it sends is
in an envelope (envelopes.py) that only its receiver opens: the layers inside are sealed for the server, which would
otherwise see each with its owner. Everybody sends everybody one bundle of the same length at every stage, full or
empty, or lengths would betray who sent which layer where.

A round with R repetitions takes 1 + 2 R messages to each client, the steps 0 to 2 R: send; give back; take back, and
send again or, in the last step, upload. A bundle is as long as a sealed model, so a step moves K (K - 1) models.

An envelope names run, round, attempt, the server's announcement, step, sender and receiver. If a client drops out, the
attempt is over: the next one has another key of the server and other parties, and the server never opens what was
sealed for the old one. A client stores what it has to answer before it answers, so a repeated message has the same
reply, and it goes on where it was after its process died.

Protected is whose layer is whose from a curious but honest server, with no client in league with it, at the odds of
messages.py. Not protected is anything from a server that breaks the rules (that takes up again an attempt which was
over, with another key, or invents clients; it cannot invent lines of the roster).
"""

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.data.files import atomic_write
from fedjax_mr.deploy import wire
from fedjax_mr.deploy.mail import Lost, Message, Post
from fedjax_mr.deploy.wire import Content, Record
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.secure import envelopes, messages
from fedjax_mr.secure.envelopes import Identity, PublicKeys, read_roster
from fedjax_mr.secure.exchange import Repetition, draw
from fedjax_mr.secure.forms import OVERHEAD, MalformedMessage, Returned, SealedLayer, SecureError, Sent, Upload

KIND = "relay"
_FILE = "relay.npz"


class Broken(Exception):
    """An attempt that is over because clients were lost; ``lost`` says whom and why."""

    def __init__(self, lost: Mapping[int, Lost]) -> None:
        super().__init__("; ".join(f"client {client}: {each.reason}" for client, each in lost.items()))
        self.lost = dict(lost)


# --- The server ------------------------------------------------------------------------------------------------------


def recombine(
    post: Post,
    nodes: Mapping[int, int],
    *,
    run: str,
    round: int,
    attempt: int,
    shapes: Variables,
    layers: Sequence[Layer],
    repetitions: int,
    key: jax.Array,
    timeout: float,
    beside: Content | None = None,
) -> list[Variables]:
    """Let the clients of a round exchange the layers of their trained models, and return the models that they upload.

    Args:
      post: to the nodes.
      nodes: the node of every client, in the order of the cohort.
      run: a name of this run that no other has.
      round: the round, from 0.
      attempt: how often the round was tried before.
      shapes: of one model.
      layers: of the model.
      repetitions: exchanges.
      key: for clients whose operator chose to simulate the choices; the others draw their own.
      timeout: seconds for every message.
      beside: further records of every message.

    Raises:
      Broken: clients were lost, or sent what they should not have.
    """
    clients = tuple(nodes)
    leaves = jax.tree.leaves(shapes)
    sizes = {layer.name: sum(trees.num_bytes(leaves[leaf]) for leaf in layer.leaves) for layer in layers}
    server = messages.SecureServer(sizes, clients)
    announcement = server.announce(round)
    opening: dict[str, Record] = {
        "announcement": {
            "public_key": announcement.public_key,
            "clients": list(clients),
            "names": [name for name, _ in announcement.sizes],
            "sizes": [size for _, size in announcement.sizes],
        },
        "choices": {"key": np.asarray(jax.random.key_data(key))},
    }
    bundle = jax.ShapeDtypeStruct((_bundle_length(announcement),), np.uint8)
    most = wire.room([bundle] * len(clients) + [np.uint8(0)] * len(layers))  # a reply has bundles, or one of each layer
    boxes: dict[int, dict[str, np.ndarray]] = {client: {} for client in clients}  # what is to be carried to whom
    for step in range(2 * repetitions + 1):
        same = {**(beside or {}), "relay": {"run": run, "step": step}, **opening}
        asked = [Message(KIND, nodes[client], round, attempt, {**same, "bundles": boxes[client]}) for client in clients]
        found = post.ask(asked, timeout, most)
        answers: dict[int, Content] = {}
        lost: dict[int, Lost] = {}
        for client in clients:
            reply = found[nodes[client]]
            if isinstance(reply, Lost):
                lost[client] = reply
            else:
                answers[client] = reply
        if lost:
            raise Broken(lost)
        opening = {}
        if step < 2 * repetitions:
            boxes = _carry(answers, announcement)
            continue
        wrong = {}
        for client, reply in answers.items():
            try:
                server.receive(_upload(client, reply, round))
            except Exception as error:  # broad: a client chooses what it uploads, and must not end the server with it
                wrong[client] = Lost(wire.one_line(str(error)), refused=True)
        if wrong:
            raise Broken(wrong)
        try:
            models = server.open()
            return [messages.unpack(models[client], layers, shapes) for client in clients]
        except SecureError as error:  # a layer may be another client's than the one that uploads it
            raise Broken(dict.fromkeys(clients, Lost(str(error), refused=True))) from None
    raise ValueError("a round has at least one exchange")


def _carry(answers: Mapping[int, Content], announcement: messages.Announcement) -> dict[int, dict[str, np.ndarray]]:
    """Return by receiver, and sender as text, the bundles that clients sent.

    Raises:
      Broken: somebody sent not exactly one bundle of the right length to each other client.
    """
    length, clients = _bundle_length(announcement), tuple(answers)
    wrong = {}
    for client, answer in answers.items():
        bundles = answer.get("bundles", {})
        expected = {str(other) for other in clients if other != client}
        if (
            not isinstance(bundles, Mapping)
            or set(bundles) != expected
            or any(
                not isinstance(each, np.ndarray) or (each.dtype, each.shape) != (np.uint8, (length,))
                for each in bundles.values()
            )
        ):
            wrong[client] = Lost("it sent not one bundle of the agreed length to each other client", refused=True)
    if wrong:
        raise Broken(wrong)
    return {
        receiver: {str(sender): answers[sender]["bundles"][str(receiver)] for sender in clients if sender != receiver}
        for receiver in clients
    }


def _upload(client: int, reply: Content, round: int) -> Upload:
    """Return what a client uploaded in the form that `messages.SecureServer` checks.

    Raises:
      SecureError: it is no record of bytes.
    """
    sealed = reply.get("upload", {})
    if not isinstance(sealed, Mapping) or not all(
        isinstance(each, np.ndarray) and each.dtype == np.uint8 for each in sealed.values()
    ):
        raise MalformedMessage(f"client {client} uploaded something that is no bytes")
    return Upload(round, client, tuple(SealedLayer(round, name, each.tobytes()) for name, each in sealed.items()))


# --- A client --------------------------------------------------------------------------------------------------------


def answer(
    message: Message,
    node: Mapping[str, Any],
    folder: Path | str,
    *,
    client: int,
    model: Callable[[], Variables],
    layers: Sequence[Layer],
    share: float,
    repetitions: int,
) -> Content:
    """Return a client's reply to one message of an exchange.

    Args:
      message: of the kind `KIND`.
      node: the node's settings: the files ``key`` and ``roster``; and ``choices``, "simulated" in tests alone.
      folder: the client's own folder, where it keeps the attempt that it is in.
      client: its number.
      model: returns its trained model of the round.
      layers: of the model.
      share: the probability with which a layer is sent.
      repetitions: exchanges.

    Raises:
      UserError: the message is malformed, not for this step or of an attempt that is over; somebody has tampered with a
        bundle; a key or the roster is wrong; the model has numbers that are not finite.
    """
    path = Path(folder) / _FILE
    try:
        run, step = str(message.content["relay"]["run"]), int(message.content["relay"]["step"])
        bundles = {int(sender): each.tobytes() for sender, each in message.content.get("bundles", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"client {client} received a malformed message of an exchange") from None
    attempt, stored = (run, message.round, message.attempt), _read(path)
    if stored is not None and (stored.attempt, stored.step) == (attempt, step):
        return stored.reply
    if step == 0:
        known = stored is None or stored.attempt[0] != run or stored.attempt < attempt
    else:
        known = stored is not None and (stored.attempt, stored.step) == (attempt, step - 1)
    if not known:
        raise UserError(
            f"client {client} is not at step {step} of round {message.round}, attempt {message.attempt}, of an exchange"
        )
    try:
        me, roster = Identity.read(str(node["key"])), read_roster(str(node["roster"]))
    except KeyError as error:
        raise UserError(f"client {client} has no {error} among its node's settings, a file for the exchange") from None
    try:
        if stored is None or step == 0:
            announcement, secret = _announced(message)
            party = messages.Party(client, _packed(model(), layers, client), announcement)
        else:
            secret, party = stored.secret, messages.Party.restored(*stored.party)
        _check_keys(me, roster, party)
        party.choices = _choices(node, secret, party, step, share=share, repetitions=repetitions)
        about = _About(attempt, party.announcement)
        if step > 0:
            _take(party, step, bundles, me, roster, about)
        if step == 2 * repetitions:
            reply = {"upload": {layer.name: _as_array(layer.sealed) for layer in party.upload().layers}}
        else:
            reply = {"bundles": _bundles(party, step, me, roster, about)}
    except SecureError as error:
        raise UserError(f"client {client}: {error}") from None
    stored = _Stored(attempt, step, secret, party.saved(), reply)
    _write(path, stored)
    return reply


def _packed(model: Variables, layers: Sequence[Layer], client: int) -> dict[str, bytes]:
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model)):
        raise UserError(f"the trained model of client {client} has numbers that are not finite")
    return messages.pack(model, layers)


def _announced(message: Message) -> tuple[messages.Announcement, np.ndarray]:
    """Return the server's announcement, which `messages.Party` checks, and its key for simulated choices.

    Raises:
      MalformedMessage: it is none.
    """
    try:
        about = message.content["announcement"]
        sizes = tuple(zip(about["names"], about["sizes"], strict=True))
        announcement = messages.Announcement(message.round, about["public_key"], tuple(about["clients"]), sizes)
        return announcement, np.asarray(message.content["choices"]["key"], np.uint32)
    except (KeyError, TypeError, ValueError):
        raise MalformedMessage("the server announced no exchange") from None


def _check_keys(me: Identity, roster: Mapping[int, PublicKeys], party: messages.Party) -> None:
    if roster.get(party.client) != me.public or me.client != party.client:
        raise UserError(f"client {party.client} has other keys of its own than its line of the roster says")
    if missing := [other for other in party.announcement.clients if other not in roster]:
        raise UserError(f"the roster of client {party.client} has no line for client {missing[0]}")


# --- Bundles ---------------------------------------------------------------------------------------------------------


class _About:
    """What the envelopes of an attempt authenticate; everybody who agreed to the same announcement has the same."""

    def __init__(self, attempt: tuple[str, int, int], announcement: messages.Announcement) -> None:
        told = dataclasses.asdict(announcement) | {"public_key": announcement.public_key.hex()}
        self._digest = hashlib.sha256(json.dumps([attempt, told], sort_keys=True).encode()).digest()

    def __call__(self, step: int, sender: int, receiver: int) -> bytes:
        return self._digest + b"".join(number.to_bytes(8, "big") for number in (step, sender, receiver))


def _bundles(
    party: messages.Party, step: int, me: Identity, roster: Mapping[int, PublicKeys], about: _About
) -> dict[str, np.ndarray]:
    """Return by receiver the bundle of what this client sends in a step."""
    names = [name for name, _ in party.announcement.sizes]
    by_receiver: dict[int, list[SealedLayer]] = {
        other: [] for other in party.announcement.clients if other != party.client
    }
    for each in party.send() if step % 2 == 0 else party.give_back():
        by_receiver[each.receiver].append(each.layer)
    bundles = {}
    for other, layers in by_receiver.items():
        entries = [len(layers).to_bytes(4, "big")]
        entries += [names.index(layer.name).to_bytes(4, "big") + layer.sealed for layer in layers]
        padded = b"".join(entries).ljust(_bundle_bytes(party.announcement), b"\0")
        bundles[str(other)] = _as_array(me.seal(padded, roster[other], about(step, party.client, other)))
    return bundles


def _take(
    party: messages.Party,
    step: int,
    bundles: Mapping[int, bytes],
    me: Identity,
    roster: Mapping[int, PublicKeys],
    about: _About,
) -> None:
    """Open everybody's bundles of the step before, in the order of the clients, and give the party what is inside.

    Raises:
      SecureError: a bundle is missing or not what its sender made for this client and step.
    """
    announcement, sizes = party.announcement, party.announcement.sizes
    kind: Any
    accept: Callable[[Any], None]
    kind, accept = (Sent, party.receive) if step % 2 == 1 else (Returned, party.take_back)  # of the step before
    if set(bundles) != set(announcement.clients) - {party.client}:
        raise MalformedMessage("the server carried not one bundle from each other client")
    for sender in (other for other in announcement.clients if other != party.client):
        rest = io.BytesIO(me.open(bundles[sender], roster[sender], about(step - 1, sender, party.client)))
        for _ in range(int.from_bytes(rest.read(4), "big")):
            number = int.from_bytes(rest.read(4), "big")
            if number >= len(sizes):
                raise MalformedMessage(f"the bundle of client {sender} holds no layers")
            name, size = sizes[number]
            layer = SealedLayer(announcement.round, name, rest.read(size + OVERHEAD))
            accept(kind(announcement.round, (step - 1) // 2, sender, party.client, layer))


def _bundle_bytes(announcement: messages.Announcement) -> int:
    """Return the bytes of a bundle that holds every layer."""
    return 4 + sum(4 + size + OVERHEAD for _, size in announcement.sizes)


def _bundle_length(announcement: messages.Announcement) -> int:
    """Return the bytes of such a bundle in its envelope."""
    return envelopes.OVERHEAD + _bundle_bytes(announcement)


def _as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


# --- Choices ---------------------------------------------------------------------------------------------------------


def _choices(
    node: Mapping[str, Any], secret: np.ndarray, party: messages.Party, step: int, *, share: float, repetitions: int
) -> messages.Choices:
    kind = node.get("choices", "random")
    if kind == "random":
        return messages.RandomChoices(share)
    if kind != "simulated":
        raise UserError(f"choices={kind!r} among the node's settings of client {party.client}: random or simulated")
    keys = jax.random.split(jax.random.wrap_key_data(jnp.asarray(secret)), repetitions)
    clients, names = party.announcement.clients, tuple(name for name, _ in party.announcement.sizes)
    key = keys[min(step // 2, repetitions - 1)]  # in the last step nothing is drawn
    exchange = jax.device_get(draw(key, num_units=len(names), count=len(clients), share=share))
    return Simulated(clients.index(party.client), clients, names, exchange)


class Simulated(NamedTuple):
    """The choices of one client in an exchange that was drawn for all: for tests, because the server could draw it."""

    row: int
    clients: tuple[int, ...]
    names: tuple[str, ...]
    exchange: Repetition

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> dict[str, int]:
        """Return the drawn receivers."""
        holders = self.exchange.holders[:, self.row].tolist()
        return {name: self.clients[row] for name, row in zip(self.names, holders, strict=True) if row != self.row}

    def order(self, name: str, count: int) -> list[int]:
        """Return the order that gives everybody the drawn copy; a buffer holds the client's own before the others'."""
        unit = self.names.index(name)
        met = np.flatnonzero(self.exchange.holders[unit] == self.row).tolist()
        senders, own = [row for row in met if row != self.row], [row for row in met if row == self.row]
        places = own + senders
        return [places.index(int(self.exchange.permutations[unit, row])) for row in senders + own]


# --- A client's disk -------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """Where a client is in an exchange, and the reply that it gave there."""

    attempt: tuple[str, int, int]  # run, round, attempt
    step: int
    secret: np.ndarray
    party: tuple[dict[str, Any], list[bytes]]
    reply: dict[str, dict[str, np.ndarray]]


def _write(path: Path, stored: _Stored) -> None:
    facts, sealed = stored.party
    ((kind, record),) = stored.reply.items()
    told = [stored.attempt, stored.step, facts, kind, list(record)]
    arrays = {"told": _as_array(json.dumps(told).encode()), "secret": stored.secret}
    arrays |= {f"sealed{place}": _as_array(each) for place, each in enumerate(sealed)}
    arrays |= {f"reply{place}": each for place, each in enumerate(record.values())}
    with atomic_write(path) as temporary:
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.chmod(0o600)


def _read(path: Path) -> _Stored | None:
    """Return what `_write` wrote last, if anything.

    Raises:
      UserError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            attempt, step, facts, kind, names = json.loads(file["told"].tobytes())
            sealed = [file[f"sealed{place}"].tobytes() for place in range(sum(facts["lengths"].values()))]
            reply = {kind: {name: file[f"reply{place}"] for place, name in enumerate(names)}}
            return _Stored((attempt[0], attempt[1], attempt[2]), step, file["secret"], (facts, sealed), reply)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path}, what a client keeps of an exchange ({error})") from None
