"""Secure recombination with real messages: clients exchange layers that only the server can read.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Appendix B. exchange.py describes the four stages and simulates them inside the compiled round.
Here each client is a `Party` and each message an object. This module has no network: a deployment transports the
messages. It needs the extra ``secure``.

>>> from fedjax_mr.secure import messages
>>> server = messages.SecureServer({"conv": 4, "dense": 2}, clients=(3, 8))  # bytes per layer
>>> announcement = server.announce(round=0)
>>> trained = {3: {"conv": b"cccc", "dense": b"dd"}, 8: {"conv": b"CCCC", "dense": b"DD"}}
>>> parties = {client: messages.Party(client, layers, announcement) for client, layers in trained.items()}
>>> messages.exchange_layers(parties, repetitions=2)
>>> for party in parties.values():
...     server.receive(party.upload())
>>> models = server.open()
>>> sorted(model["conv"] for model in models.values())
[b'CCCC', b'cccc']

`pack` and `unpack` convert layers of Flax models to bytes and back.

Scope. Only the exchange before the upload. An exchange before the training cannot be encrypted, because a client cannot
train on a layer that is sealed for the server. Parties cannot open layers.

Encryption. One HPKE message per layer (RFC 9180: X25519, HKDF-SHA256, ChaCha20-Poly1305; implemented by the package
cryptography), each with a new ephemeral key and 48 bytes larger than the layer. The server generates a key pair for
every round and deletes it after opening. Round, name and length of the layer are authenticated. A sealed layer does not
contain its owner.

Assumptions. All participants are honest but curious. Channels are encrypted and authenticate both ends (such as TLS
with certificates on both sides), and the announcement comes from the server. All clients of the round finish a stage
before the next one begins. If a client drops out, its layers are lost and the round must start again.

Knowledge of a client. It knows the names and lengths of the layers, which are public, and the sender and the receiver
of each sealed layer that it handles. In the first exchange a layer comes from its owner. A client recognises a sealed
layer that it receives again. It cannot read any.

Knowledge of the server. It knows the K uploaded models in plain text and their senders. By position it can guess the
owner of a layer with the probability of `exchange.expected_unmoved`, at least 0.63 after one exchange. By comparison it
can guess better: it knows which model it sent to which client, and a trained layer is usually still closest to the
layer that its training started from. To prevent this, the clients must also exchange the models that they start from.
Clients that record the first exchange and report it to the server reveal the owners of these layers.

Detection. The server detects changed, missing and repeated layers and layers of other rounds. Clients detect repeated
messages, messages of another round, and returns that no client owes them. It is not detected if a client replaces the
layer of another client by a layer of its own: every client can seal for the server, and layers are not signed, because
a signature would reveal the owner.
"""

import dataclasses
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.secure.forms import (
    OVERHEAD as OVERHEAD,
)
from fedjax_mr.secure.forms import (
    Announcement,
    MalformedMessage,
    MissingLayer,
    ReplayedMessage,
    Returned,
    SealedLayer,
    SecureError,
    Sent,
    TamperedLayer,
    UnexpectedMessage,
    Upload,
    WrongRound,
    check_announcement,
    check_form,
    check_round,
    check_sealed,
    is_integer,
)
from fedjax_mr.secure.primitives import primitives

_PURPOSE = b"fedjax_mr secure recombination"


# --- Clients ---------------------------------------------------------------------------------------------------------


class Choices(Protocol):
    """The source of the random choices of a party."""

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> Mapping[str, int]:
        """Select layers, and one of the other clients as the receiver of each (stage 1)."""
        ...

    def order(self, name: str, count: int) -> Sequence[int]:
        """Draw a random order of the ``count`` entries of a buffer (stage 3)."""
        ...


@dataclasses.dataclass(frozen=True)
class RandomChoices:
    """Choices by the random numbers of the operating system. Each layer is selected with probability ``share``."""

    share: float = 0.5

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> Mapping[str, int]:
        """Select each layer independently, and a uniformly random receiver for it."""
        random = secrets.SystemRandom()
        return {name: random.choice(others) for name in names if others and random.random() < self.share}

    def order(self, name: str, count: int) -> Sequence[int]:
        """Draw a uniformly random order."""
        return secrets.SystemRandom().sample(range(count), count)


class Party:
    """One client in one round: it seals its layers, exchanges them with others, and uploads the resulting layers.

    Every exchange consists of `send`, `receive` for each message that arrives, `give_back`, and `take_back` for each
    message that arrives.
    """

    def __init__(
        self, client: int, layers: Mapping[str, bytes], announcement: Announcement, choices: Choices | None = None
    ) -> None:
        """Seal the client's trained layers.

        Args:
          client: id of the client.
          layers: the layers as bytes, by name.
          announcement: the server's announcement of the round.
          choices: the random choices. Default: `RandomChoices`.

        Raises:
          SecureError: the announcement is malformed.
          UserError: the client or its layers do not match the announcement, or cryptography is missing.
        """
        check_announcement(announcement)
        if not is_integer(client) or client not in announcement.clients:
            raise UserError(
                f"client {reprlib.repr(client)} is not one of the round's clients {reprlib.repr(announcement.clients)}"
            )
        if not isinstance(layers, Mapping) or not all(isinstance(layer, bytes) for layer in layers.values()):
            raise UserError(f"the layers of client {client} must be bytes by name")
        sizes, announced = {name: len(layer) for name, layer in layers.items()}, dict(announcement.sizes)
        if sizes != announced:
            raise UserError(
                f"client {client} has layers {reprlib.repr(sizes)} (bytes), but the server announced "
                f"{reprlib.repr(announced)}"
            )
        self.client = int(client)
        self.announcement = announcement
        self.choices = choices or RandomChoices()
        self._sizes = announced
        self._others = tuple(other for other in announcement.clients if other != client)
        self._repetition = -1
        self._collecting = False  # between stages 1 and 3
        self._buffers: dict[str, list[SealedLayer]] = {
            name: [_seal(announcement, name, layers[name])] for name in announced
        }
        self._senders: dict[str, list[int]] = {}  # by name of a layer, the clients to whom this client owes one
        self._awaited: dict[str, int] = {}  # by name of a layer, the client that owes one to this client

    def send(self) -> list[Sent]:
        """Stage 1: select layers and create their messages. The other layers stay in the buffers.

        Raises:
          MissingLayer: the previous exchange is not complete.
        """
        self._check_over()
        self._repetition += 1
        self._collecting = True
        self._senders = {name: [] for name in self._buffers}
        self._awaited = dict(self.choices.receivers(tuple(self._buffers), self._others))
        return [self._message(Sent, other, self._buffers[name].pop()) for name, other in self._awaited.items()]

    def receive(self, message: Sent) -> None:
        """Stage 2: put a layer into its buffer and remember its sender.

        Raises:
          SecureError: the message is for another client, round or stage, is repeated, or its layer has a wrong length.
        """
        self._check(message, Sent)
        name = message.layer.name
        if message.sender in self._senders.get(name, ()):
            raise ReplayedMessage(f"client {message.sender} has already sent its {name!r}")
        if not self._collecting:
            raise UnexpectedMessage(f"client {message.sender} sent {name!r} too late: stage 2 is over")
        if message.layer in self._buffers[name]:
            raise ReplayedMessage(f"this {name!r} is already in the buffer of client {self.client}")
        self._buffers[name].append(message.layer)
        self._senders[name].append(message.sender)

    def give_back(self) -> list[Returned]:
        """Stage 3: for each sender of a layer, create a message with a random layer of the same buffer.

        Raises:
          UnexpectedMessage: `send` was not called since the last call.
        """
        if not self._collecting:
            raise UnexpectedMessage(f"client {self.client} can give back only once after each send")
        self._collecting = False
        messages = []
        for name, senders in self._senders.items():
            buffer = self._buffers[name]
            shuffled = [buffer[place] for place in self.choices.order(name, len(buffer))]
            messages += [
                self._message(Returned, sender, layer) for sender, layer in zip(senders, shuffled, strict=False)
            ]
            self._buffers[name] = shuffled[len(senders) :]
        return messages

    def take_back(self, message: Returned) -> None:
        """Stage 4: receive a layer in return for one that this client sent.

        Raises:
          SecureError: the message is for another client, round or stage, or its sender owes no such layer.
        """
        self._check(message, Returned)
        name = message.layer.name
        if self._collecting or self._awaited.get(name) != message.sender:
            raise UnexpectedMessage(f"client {message.sender} owes client {self.client} no {name!r}")
        if self._buffers[name]:
            raise ReplayedMessage(f"client {message.sender} has already returned {name!r}")
        self._buffers[name].append(message.layer)

    def upload(self) -> Upload:
        """Create the message to the server.

        Raises:
          MissingLayer: an exchange is not complete.
        """
        self._check_over()
        return Upload(self.announcement.round, self.client, tuple(layer for (layer,) in self._buffers.values()))

    def saved(self) -> tuple[dict[str, Any], list[bytes]]:
        """The state of this party as JSON values and sealed layers, so that another process can continue."""
        facts = {
            "client": self.client,
            "announcement": dataclasses.asdict(self.announcement) | {"public_key": self.announcement.public_key.hex()},
            "repetition": self._repetition,
            "collecting": self._collecting,
            "lengths": {name: len(buffer) for name, buffer in self._buffers.items()},
            "senders": self._senders,
            "awaited": self._awaited,
        }
        return facts, [layer.sealed for buffer in self._buffers.values() for layer in buffer]

    @classmethod
    def restored(cls, facts: Mapping[str, Any], sealed: Sequence[bytes], choices: Choices | None = None) -> "Party":
        """Restore a party from the state of `saved`."""
        about, party, layers = facts["announcement"], cls.__new__(cls), iter(sealed)
        clients, sizes = tuple(about["clients"]), tuple((name, size) for name, size in about["sizes"])
        party.client, party.choices = facts["client"], choices or RandomChoices()
        party.announcement = Announcement(about["round"], bytes.fromhex(about["public_key"]), clients, sizes)
        party._sizes, party._others = dict(sizes), tuple(other for other in clients if other != party.client)
        party._repetition, party._collecting = facts["repetition"], facts["collecting"]
        party._buffers = {
            name: [SealedLayer(about["round"], name, next(layers)) for _ in range(length)]
            for name, length in facts["lengths"].items()
        }
        party._senders, party._awaited = facts["senders"], facts["awaited"]
        return party

    def _message(self, kind: Callable[..., Any], receiver: int, layer: SealedLayer) -> Any:
        return kind(self.announcement.round, self._repetition, self.client, receiver, layer)

    def _check(self, message: Sent | Returned, kind: type) -> None:
        check_form(message, kind)
        check_round(message.round, self.announcement.round)
        if message.receiver != self.client or message.sender not in self._others:
            raise UnexpectedMessage(
                f"a message from client {message.sender} to client {message.receiver} reached client {self.client}"
            )
        check_sealed(message.layer, self.announcement.round, self._sizes)
        if message.repetition != self._repetition:
            error = ReplayedMessage if message.repetition < self._repetition else UnexpectedMessage
            raise error(f"a message of exchange {message.repetition} arrived in exchange {self._repetition}")

    def _check_over(self) -> None:
        missing = [name for name, buffer in self._buffers.items() if len(buffer) != 1]
        if missing or self._collecting:
            raise MissingLayer(f"client {self.client} is in the middle of an exchange and waits for {missing}")


def exchange_layers(parties: Mapping[int, Party], *, repetitions: int = 1) -> None:
    """Transport the messages of complete exchanges among parties in one process.

    Raises:
      UserError: the party of a client of the round is missing.
    """
    for party in parties.values():
        if missing := [client for client in party.announcement.clients if client not in parties]:
            raise UserError(f"an exchange needs all clients of the round, but {reprlib.repr(missing)} are missing")
    for _ in range(repetitions):
        for message in [message for party in parties.values() for message in party.send()]:
            parties[message.receiver].receive(message)
        for message in [message for party in parties.values() for message in party.give_back()]:
            parties[message.receiver].take_back(message)


# --- The server ------------------------------------------------------------------------------------------------------


class SecureServer:
    """The server: in each round it announces a key, collects the uploads and opens them together."""

    def __init__(self, sizes: Mapping[str, int], clients: Sequence[int]) -> None:
        """Create a server for the clients of a round.

        Args:
          sizes: the bytes of every layer by name.
          clients: the ids of the clients.

        Raises:
          UserError: sizes are not numbers of bytes by name, or clients are not distinct integers.
        """
        if not isinstance(sizes, Mapping) or not isinstance(clients, Iterable):
            raise UserError("a server needs the bytes of every layer by name, and the ids of the clients")
        self._sizes, self._clients = (
            {name: int(size) if is_integer(size) else size for name, size in sizes.items()},
            tuple(int(client) if is_integer(client) else client for client in clients),
        )
        try:
            check_announcement(Announcement(0, bytes(32), self._clients, tuple(self._sizes.items())))
        except SecureError as error:
            raise UserError(str(error)) from None
        self._private_key: Any = None
        self._announcement: Announcement | None = None
        self._uploads: dict[int, Upload] = {}

    def announce(self, round: int) -> Announcement:
        """Begin a round: generate a key pair and create the message to all clients.

        Raises:
          UserError: the round is not an integer from 0, or cryptography is missing.
        """
        if not is_integer(round) or not 0 <= round < 2**63:
            raise UserError(f"a round must be an integer from 0, not {reprlib.repr(round)}")
        self._private_key = primitives().X25519PrivateKey.generate()
        public_key = self._private_key.public_key().public_bytes_raw()
        self._announcement = Announcement(int(round), public_key, self._clients, tuple(self._sizes.items()))
        self._uploads = {}
        return self._announcement

    def receive(self, upload: Upload) -> None:
        """Receive the upload of a client.

        Raises:
          SecureError: the upload has another round, is from an unknown client, is repeated, or does not have one layer
            of each name.
        """
        check_form(upload, Upload)
        announcement = self._open_round()
        check_round(upload.round, announcement.round)
        if upload.sender not in announcement.clients:
            raise UnexpectedMessage(f"client {upload.sender} does not take part in round {announcement.round}")
        if upload.sender in self._uploads:
            raise ReplayedMessage(f"client {upload.sender} has already uploaded")
        if len(upload.layers) != len(self._sizes):
            raise MissingLayer(f"client {upload.sender} uploaded {len(upload.layers)} layers, not {len(self._sizes)}")
        for layer in upload.layers:
            check_sealed(layer, announcement.round, self._sizes)
        if missing := self._sizes.keys() - {layer.name for layer in upload.layers}:
            raise MissingLayer(f"client {upload.sender} uploaded no {min(missing)!r}")
        self._uploads[upload.sender] = upload

    def open(self) -> dict[int, dict[str, bytes]]:
        """Open all layers and delete the private key of the round. Return the layers by client and name.

        If an error names an upload, this upload is deleted and its client can upload again. All others are kept.

        Raises:
          MissingLayer: a client has not uploaded.
          ReplayedMessage: two clients uploaded the same sealed layer. Both uploads are deleted.
          TamperedLayer: a layer was not sealed for this round and name.
        """
        announcement = self._open_round()
        missing = [client for client in announcement.clients if client not in self._uploads]
        if missing:
            raise MissingLayer(f"the uploads of clients {reprlib.repr(missing)} are missing")
        seen: dict[bytes, int] = {}
        for client, upload in self._uploads.items():
            for layer in upload.layers:
                first = seen.setdefault(layer.sealed, client)
                if first != client:
                    del self._uploads[first], self._uploads[client]
                    one, other = sorted((first, client))
                    raise ReplayedMessage(f"clients {one} and {other} uploaded the same sealed {layer.name!r}")
        models = {
            client: {layer.name: self._unseal(announcement, client, layer) for layer in self._uploads[client].layers}
            for client in announcement.clients
        }
        self._private_key = self._announcement = None
        return models

    def _open_round(self) -> Announcement:
        if self._announcement is None:
            raise WrongRound("no round is open: call announce first")
        return self._announcement

    def _unseal(self, announcement: Announcement, client: int, layer: SealedLayer) -> bytes:
        crypto = primitives()
        try:
            info = _context(announcement, layer.name)
            return crypto.suite.decrypt(layer.sealed, self._private_key, info=info)
        except (crypto.InvalidTag, ValueError):  # ValueError: its ephemeral key is not a safe point
            del self._uploads[client]
            raise TamperedLayer(
                f"{layer.name!r} uploaded by client {client} was not sealed for round {announcement.round}, or changed"
            ) from None


# --- Models as bytes -------------------------------------------------------------------------------------------------


def pack(model: Variables, layers: Sequence[Layer]) -> dict[str, bytes]:
    """Convert the layers of one model to bytes by name: the values of their tensors, little-endian."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    return {layer.name: b"".join(map(_to_bytes, (leaves[leaf] for leaf in layer.leaves))) for layer in layers}


def unpack(packed: Mapping[str, bytes], layers: Sequence[Layer], shapes: Variables) -> Variables:
    """Convert the bytes of `pack` back to a model; ``shapes`` is ``Model.shapes()``.

    Raises:
      SecureError: a layer is missing or unknown, or its number of bytes does not match its tensors.
    """
    leaves, structure = jax.tree.flatten(shapes)
    if not isinstance(packed, Mapping) or set(packed) != {layer.name for layer in layers}:
        raise MissingLayer(f"a packed model must have the layers {reprlib.repr([layer.name for layer in layers])}")
    for layer in layers:
        start, size = 0, sum(leaves[leaf].size * np.dtype(leaves[leaf].dtype).itemsize for leaf in layer.leaves)
        if type(packed[layer.name]) is not bytes or len(packed[layer.name]) != size:
            raise MalformedMessage(f"{layer.name!r} must be {size} bytes")
        for position in layer.leaves:
            shape, dtype = leaves[position].shape, np.dtype(leaves[position].dtype)
            count = int(np.prod(shape))
            numbers = np.frombuffer(packed[layer.name], dtype.newbyteorder("<"), count, offset=start)
            leaves[position] = numbers.reshape(shape).astype(dtype)
            start += count * dtype.itemsize
    return jax.tree.unflatten(structure, leaves)


def _to_bytes(leaf: np.ndarray) -> bytes:
    return leaf.astype(leaf.dtype.newbyteorder("<")).tobytes()


# --- Encryption ------------------------------------------------------------------------------------------------------


def _context(announcement: Announcement, name: str) -> bytes:
    """The authenticated context of a layer: round, name and length, which do not reveal the owner."""
    text = name.encode()
    numbers = (announcement.round, dict(announcement.sizes)[name], len(text))
    return _PURPOSE + b"".join(number.to_bytes(8, "big") for number in numbers) + text


def _seal(announcement: Announcement, name: str, layer: bytes) -> SealedLayer:
    crypto = primitives()
    try:
        public_key = crypto.X25519PublicKey.from_public_bytes(announcement.public_key)
        sealed = crypto.suite.encrypt(layer, public_key, info=_context(announcement, name))
    except ValueError:
        raise MalformedMessage("the announced public key is not a safe X25519 key") from None
    return SealedLayer(announcement.round, name, sealed)
