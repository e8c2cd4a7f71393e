"""Secure recombination among real clients: the server forwards their exchanged layers and opens only their uploads.

Each client of a round is a `messages.Party`. Clients reach each other only through the server. Therefore a client puts
the sealed layers that it sends into an envelope (envelopes.py) that only the receiver can open; otherwise the server
would see which layer is whose. In every step, each client sends each other client one bundle of the same length,
whether it is full or empty, because lengths would reveal who sent which layer to whom.

A round with R repetitions takes 1 + 2 R messages to each client, the steps 0 to 2 R: send; give back; take back, then
send again or, in the last step, upload. A bundle is as long as a sealed model, so a step transfers K (K - 1) models.

An envelope authenticates run, round, attempt, the server's announcement, step, sender and receiver. If a client drops
out, the attempt fails. The next attempt has a new server key and new parties, and the server never opens layers that
were sealed for the old one. A client stores its reply before it sends it. Therefore a repeated message gets the same
reply, and a client whose process died continues where it was.

Protected: which layer is whose, against a server that is curious but follows the protocol and colludes with no client,
with the probabilities of messages.py. Not protected: anything against a server that breaks the protocol, for example by
resuming a failed attempt with another key, or by inventing clients. It cannot invent lines of the roster.
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
from fedjax_mr.deploy import wire
from fedjax_mr.deploy.transport import Message, Messenger, NoReply
from fedjax_mr.deploy.wire import Content, Record
from fedjax_mr.errors import UserError
from fedjax_mr.files import atomic_write
from fedjax_mr.keys import key_from_data
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.secure import envelopes, messages
from fedjax_mr.secure.envelopes import Identity, PublicKeys, read_roster
from fedjax_mr.secure.exchange import Repetition, draw
from fedjax_mr.secure.forms import OVERHEAD, MalformedMessage, Returned, SealedLayer, SecureError, Sent, Upload

KIND = "relay"
_FILE = "relay.npz"


class ExchangeFailed(Exception):
    """An attempt failed because clients were lost; ``lost`` maps them to the reasons."""

    def __init__(self, lost: Mapping[int, NoReply]) -> None:
        super().__init__("; ".join(f"client {client}: {each.reason}" for client, each in lost.items()))
        self.lost = dict(lost)


# --- The server ------------------------------------------------------------------------------------------------------


def recombine(
    messenger: Messenger,
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
    """Let the clients of a round exchange layers of their trained models, and return the uploaded models.

    Args:
      messenger: sends messages to the nodes.
      nodes: the node of each client, in the order of the cohort.
      run: unique name of the run.
      round: the round, from 0.
      attempt: number of the attempt, larger than those before it.
      shapes: shapes and dtypes of one model.
      layers: layers of the model.
      repetitions: number of exchanges.
      key: key for the clients whose operator chose simulated choices; the others draw their own.
      timeout: seconds allowed for each reply.
      beside: further records for every message.

    Raises:
      ExchangeFailed: clients were lost, or sent invalid bundles or uploads.
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
    max_bytes = wire.size_limit(
        [bundle] * len(clients) + [np.uint8(0)] * len(layers)
    )  # a reply has bundles, or one of each layer
    boxes: dict[int, dict[str, np.ndarray]] = {client: {} for client in clients}  # the bundles to forward, by receiver
    for step in range(2 * repetitions + 1):
        same = {**(beside or {}), "relay": {"run": run, "step": step}, **opening}
        asked = [Message(KIND, nodes[client], round, attempt, {**same, "bundles": boxes[client]}) for client in clients]
        found = messenger.ask(asked, timeout, max_bytes)
        answers: dict[int, Content] = {}
        lost: dict[int, NoReply] = {}
        for client in clients:
            reply = found[nodes[client]]
            if isinstance(reply, NoReply):
                lost[client] = reply
            else:
                answers[client] = reply
        if lost:
            raise ExchangeFailed(lost)
        opening = {}
        if step < 2 * repetitions:
            boxes = _carry(answers, announcement)
            continue
        wrong = {}
        for client, reply in answers.items():
            try:
                server.receive(_upload(client, reply, round))
            except Exception as error:  # broad: a client chooses what it uploads, and must not end the server with it
                wrong[client] = NoReply(wire.one_line(str(error)), refused=True)
        if wrong:
            raise ExchangeFailed(wrong)
        try:
            models = server.open()
            return [messages.unpack(models[client], layers, shapes) for client in clients]
        except SecureError as error:  # a layer may be another client's than the one that uploads it
            raise ExchangeFailed(dict.fromkeys(clients, NoReply(str(error), refused=True))) from None
    raise ValueError("a round has at least one exchange")


def _carry(answers: Mapping[int, Content], announcement: messages.Announcement) -> dict[int, dict[str, np.ndarray]]:
    """The bundles that clients sent, by receiver and then by sender (as text).

    Raises:
      ExchangeFailed: a client did not send exactly one bundle of the right length to each other client.
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
            wrong[client] = NoReply(
                "it did not send one bundle of the agreed length to each other client", refused=True
            )
    if wrong:
        raise ExchangeFailed(wrong)
    return {
        receiver: {str(sender): answers[sender]["bundles"][str(receiver)] for sender in clients if sender != receiver}
        for receiver in clients
    }


def _upload(client: int, reply: Content, round: int) -> Upload:
    """A client's upload in the form that `messages.SecureServer` checks.

    Raises:
      SecureError: the upload is not a record of bytes.
    """
    sealed = reply.get("upload", {})
    if not isinstance(sealed, Mapping) or not all(
        isinstance(each, np.ndarray) and each.dtype == np.uint8 for each in sealed.values()
    ):
        raise MalformedMessage(f"client {client} uploaded something other than bytes")
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
    """A client's reply to one message of an exchange.

    Args:
      message: message of the kind `KIND`.
      node: settings of the node: the files ``key`` and ``roster``, and ``choices``, which is "simulated" only in tests.
      folder: the client's folder, which holds the state of its current attempt.
      client: the client's number.
      model: returns the client's trained model of the round.
      layers: layers of the model.
      share: probability with which a layer is sent.
      repetitions: number of exchanges.

    Raises:
      UserError: the message is malformed, or belongs to another step or to a failed attempt; a bundle was tampered
        with; a key or the roster is wrong; the model has numbers that are not finite.
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
        raise UserError(
            f"the node settings of client {client} have no {error}, a file that the exchange needs"
        ) from None
    try:
        if stored is None or step == 0:
            announcement, secret = _announced(message)
            party = messages.Party(client, _packed(model(), layers, client), announcement)
        else:
            secret, party = stored.secret, messages.Party.restored(*stored.party)
        _check_keys(me, roster, party)
        party.choices = _choices(node, secret, party, step, share=share, repetitions=repetitions)
        context = _Context(attempt, party.announcement)
        if step > 0:
            _take(party, step, bundles, me, roster, context)
        if step == 2 * repetitions:
            reply = {"upload": {layer.name: _as_array(layer.sealed) for layer in party.upload().layers}}
        else:
            reply = {"bundles": _bundles(party, step, me, roster, context)}
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
    """The server's announcement, which `messages.Party` checks, and its key for simulated choices.

    Raises:
      MalformedMessage: the message has no valid announcement.
    """
    try:
        about = message.content["announcement"]
        sizes = tuple(zip(about["names"], about["sizes"], strict=True))
        announcement = messages.Announcement(message.round, about["public_key"], tuple(about["clients"]), sizes)
        return announcement, np.asarray(message.content["choices"]["key"], np.uint32)
    except (KeyError, TypeError, ValueError):
        raise MalformedMessage("the server's announcement of the exchange is malformed") from None


def _check_keys(me: Identity, roster: Mapping[int, PublicKeys], party: messages.Party) -> None:
    if roster.get(party.client) != me.public or me.client != party.client:
        raise UserError(f"the keys of client {party.client} are not those in its line of the roster")
    if missing := [other for other in party.announcement.clients if other not in roster]:
        raise UserError(f"the roster of client {party.client} has no line for client {missing[0]}")


# --- Bundles ---------------------------------------------------------------------------------------------------------


class _Context:
    """The context that the envelopes of an attempt authenticate; equal for all clients with the same announcement."""

    def __init__(self, attempt: tuple[str, int, int], announcement: messages.Announcement) -> None:
        fields = dataclasses.asdict(announcement) | {"public_key": announcement.public_key.hex()}
        self._digest = hashlib.sha256(json.dumps([attempt, fields], sort_keys=True).encode()).digest()

    def __call__(self, step: int, sender: int, receiver: int) -> bytes:
        return self._digest + b"".join(number.to_bytes(8, "big") for number in (step, sender, receiver))


def _bundles(
    party: messages.Party, step: int, me: Identity, roster: Mapping[int, PublicKeys], context: _Context
) -> dict[str, np.ndarray]:
    """The bundles that this client sends in a step, by receiver."""
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
        bundles[str(other)] = _as_array(me.seal(padded, roster[other], context(step, party.client, other)))
    return bundles


def _take(
    party: messages.Party,
    step: int,
    bundles: Mapping[int, bytes],
    me: Identity,
    roster: Mapping[int, PublicKeys],
    context: _Context,
) -> None:
    """Open the other clients' bundles of the previous step, in the order of the clients, and pass on their layers.

    Raises:
      SecureError: a bundle is missing, or was not made by its sender for this client and step.
    """
    announcement, sizes = party.announcement, party.announcement.sizes
    kind: Any
    accept: Callable[[Any], None]
    kind, accept = (Sent, party.receive) if step % 2 == 1 else (Returned, party.take_back)  # the previous step
    if set(bundles) != set(announcement.clients) - {party.client}:
        raise MalformedMessage("the server did not forward one bundle from each other client")
    for sender in (other for other in announcement.clients if other != party.client):
        rest = io.BytesIO(me.open(bundles[sender], roster[sender], context(step - 1, sender, party.client)))
        for _ in range(int.from_bytes(rest.read(4), "big")):
            number = int.from_bytes(rest.read(4), "big")
            if number >= len(sizes):
                raise MalformedMessage(f"the bundle of client {sender} is malformed")
            name, size = sizes[number]
            layer = SealedLayer(announcement.round, name, rest.read(size + OVERHEAD))
            accept(kind(announcement.round, (step - 1) // 2, sender, party.client, layer))


def _bundle_bytes(announcement: messages.Announcement) -> int:
    """The bytes of a bundle that holds every layer."""
    return 4 + sum(4 + size + OVERHEAD for _, size in announcement.sizes)


def _bundle_length(announcement: messages.Announcement) -> int:
    """The bytes of such a bundle in its envelope."""
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
        raise UserError(f"choices={kind!r} in the node settings of client {party.client}: must be random or simulated")
    keys = jax.random.split(key_from_data(jnp.asarray(secret)), repetitions)
    clients, names = party.announcement.clients, tuple(name for name, _ in party.announcement.sizes)
    key = keys[min(step // 2, repetitions - 1)]  # in the last step nothing is drawn
    exchange = jax.device_get(draw(key, num_units=len(names), count=len(clients), share=share))
    return SimulatedChoices(clients.index(party.client), clients, names, exchange)


class SimulatedChoices(NamedTuple):
    """The choices of one client in an exchange drawn for all clients. For tests only: the server can draw it too."""

    row: int
    clients: tuple[int, ...]
    names: tuple[str, ...]
    exchange: Repetition

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> dict[str, int]:
        """The drawn receivers, by layer."""
        holders = self.exchange.holders[:, self.row].tolist()
        return {name: self.clients[row] for name, row in zip(self.names, holders, strict=True) if row != self.row}

    def order(self, name: str, count: int) -> list[int]:
        """The order in which each client gets its drawn copy; a buffer has the client's own copy before the others'."""
        unit = self.names.index(name)
        met = np.flatnonzero(self.exchange.holders[unit] == self.row).tolist()
        senders, own = [row for row in met if row != self.row], [row for row in met if row == self.row]
        places = own + senders
        return [places.index(int(self.exchange.permutations[unit, row])) for row in senders + own]


# --- A client's disk -------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """The state of a client in an exchange, and its last reply."""

    attempt: tuple[str, int, int]  # run, round, attempt
    step: int
    secret: np.ndarray
    party: tuple[dict[str, Any], list[bytes]]
    reply: dict[str, dict[str, np.ndarray]]


def _write(path: Path, stored: _Stored) -> None:
    facts, sealed = stored.party
    ((kind, record),) = stored.reply.items()
    state = [stored.attempt, stored.step, facts, kind, list(record)]
    arrays = {"told": _as_array(json.dumps(state).encode()), "secret": stored.secret}
    arrays |= {f"sealed{place}": _as_array(each) for place, each in enumerate(sealed)}
    arrays |= {f"reply{place}": each for place, each in enumerate(record.values())}
    with atomic_write(path) as temporary:
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.chmod(0o600)


def _read(path: Path) -> _Stored | None:
    """Read the state that `_write` wrote, or return None if there is none.

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
        raise UserError(f"cannot read {path}, the client's state of an exchange ({error})") from None
