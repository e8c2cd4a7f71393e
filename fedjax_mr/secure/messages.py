"""Secure recombination with real messages: clients exchange layers that only the server can read.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Appendix B. exchange.py tells the four stages and simulates them inside the compiled round.
Here each client is a `Party` and each message an object; there is no network: a deployment carries the messages. Needs
the extra ``secure``.

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

Layers of Flax models become bytes and back with `pack` and `unpack`.

Before the upload only. A client cannot train on a layer that is sealed for the server, so an exchange before the
training has to be in clear, and there is nothing to encrypt: parties here have no way to open a layer.

Encryption. One HPKE message per layer (RFC 9180: X25519, HKDF-SHA256, ChaCha20-Poly1305; the package cryptography
implements it): a fresh ephemeral key each, 48 bytes more than the layer. The server has a new key pair in every round
and forgets it after opening. Round, name and length of the layer are authenticated; nothing in a sealed layer names its
owner.

What is assumed. Everybody is curious but follows the protocol. The channels are encrypted and tell truly who is at the
other end (such as TLS with certificates on both sides), and the announcement comes from the server. All clients of the
round finish a stage before the next one begins. A client that drops out takes layers with it, and the round has to
start again.

What a client learns. Names and lengths of the layers, which are public anyway; from whom it got a sealed layer and to
whom it returned which. In the first exchange a layer comes from its owner. It recognises a sealed layer that it meets
again. It reads none of them.

What the server learns. The K models that were uploaded, in clear, and from whom they came. By position it tells who
owns a layer with the probability that `exchange.expected_unmoved` gives, at least 0.63 after one exchange. By comparing
it does better: it knows which model it sent to whom, and a trained layer is mostly still closest to the one that its
owner started from; against that, the clients need to exchange what they start from, too. Clients that remember what
passed through their hands in the first exchange, and tell the server, give the owners of those layers away.

What is noticed. The server notices changed layers, layers of other rounds, missing ones and ones that come twice;
clients notice messages of another round, repeated ones, and returns that no client owes them. Not noticed is a client
that puts a layer of its own making in the place of another's: every client can seal for the server, and none signs,
because owners are not to be named.
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
    is_whole,
)
from fedjax_mr.secure.primitives import primitives

_PURPOSE = b"fedjax_mr secure recombination"


# --- Clients ---------------------------------------------------------------------------------------------------------


class Choices(Protocol):
    """The source of a party's random choices."""

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> Mapping[str, int]:
        """Return to which of the other clients each picked layer goes (stage 1)."""
        ...

    def order(self, name: str, count: int) -> Sequence[int]:
        """Return a random order of a buffer's ``count`` places (stage 3)."""
        ...


@dataclasses.dataclass(frozen=True)
class RandomChoices:
    """The operating system's randomness; each layer is picked with probability ``share``."""

    share: float = 0.5

    def receivers(self, names: Sequence[str], others: Sequence[int]) -> Mapping[str, int]:
        """Pick each layer independently and a uniformly random receiver for it."""
        random = secrets.SystemRandom()
        return {name: random.choice(others) for name in names if others and random.random() < self.share}

    def order(self, name: str, count: int) -> Sequence[int]:
        """Return a uniformly random order."""
        return secrets.SystemRandom().sample(range(count), count)


class Party:
    """One client in one round: it seals its layers, exchanges them with others, and uploads what it ends with.

    Every exchange is `send`, `receive` for each message that came, `give_back`, and `take_back` for each that came.
    """

    def __init__(
        self, client: int, layers: Mapping[str, bytes], announcement: Announcement, choices: Choices | None = None
    ) -> None:
        """Seal the client's own trained layers, given as bytes by name.

        Raises:
          SecureError: the announcement is malformed.
          UserError: the layers or the client are not those of the announcement, or cryptography is missing.
        """
        check_announcement(announcement)
        if not is_whole(client) or client not in announcement.clients:
            raise UserError(
                f"client {reprlib.repr(client)} is none of the round's clients {reprlib.repr(announcement.clients)}"
            )
        if not isinstance(layers, Mapping) or not all(isinstance(layer, bytes) for layer in layers.values()):
            raise UserError(f"the layers of client {client} have to be bytes by name")
        found, wanted = {name: len(layer) for name, layer in layers.items()}, dict(announcement.sizes)
        if found != wanted:
            raise UserError(
                f"client {client} has layers {reprlib.repr(found)} (bytes), but the server announced "
                f"{reprlib.repr(wanted)}"
            )
        self.client = int(client)
        self.announcement = announcement
        self.choices = choices or RandomChoices()
        self._sizes = wanted
        self._others = tuple(other for other in announcement.clients if other != client)
        self._repetition = -1
        self._collecting = False  # between stages 1 and 3
        self._buffers: dict[str, list[SealedLayer]] = {
            name: [_seal(announcement, name, layers[name])] for name in wanted
        }
        self._senders: dict[str, list[int]] = {}  # stage 2: to whom a layer of this name is owed
        self._awaited: dict[str, int] = {}  # who owes this client a layer of this name

    def send(self) -> list[Sent]:
        """Stage 1: return the messages with the picked layers; the others stay in this client's buffers.

        Raises:
          MissingLayer: the exchange before is not over.
        """
        self._check_over()
        self._repetition += 1
        self._collecting = True
        self._senders = {name: [] for name in self._buffers}
        self._awaited = dict(self.choices.receivers(tuple(self._buffers), self._others))
        return [self._message(Sent, other, self._buffers[name].pop()) for name, other in self._awaited.items()]

    def receive(self, message: Sent) -> None:
        """Stage 2: put a layer into its buffer and remember who sent it.

        Raises:
          SecureError: the message is not for this client, round or stage, came before, or holds no layer of its length.
        """
        self._check(message, Sent)
        name = message.layer.name
        if message.sender in self._senders.get(name, ()):
            raise ReplayedMessage(f"client {message.sender} has sent its {name!r} before")
        if not self._collecting:
            raise UnexpectedMessage(f"client {message.sender} sent {name!r} too late: the buffers are given back")
        if message.layer in self._buffers[name]:
            raise ReplayedMessage(f"this {name!r} is in the buffer of client {self.client} already")
        self._buffers[name].append(message.layer)
        self._senders[name].append(message.sender)

    def give_back(self) -> list[Returned]:
        """Stage 3: return the messages with a random layer of the same buffer for everybody who sent one.

        Raises:
          UnexpectedMessage: nothing was sent since the last time.
        """
        if not self._collecting:
            raise UnexpectedMessage(f"client {self.client} can only give back once after it sent")
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
        """Stage 4: take a layer in return for the one that was sent.

        Raises:
          SecureError: the message is not for this client, round or stage, or nothing is owed.
        """
        self._check(message, Returned)
        name = message.layer.name
        if self._collecting or self._awaited.get(name) != message.sender:
            raise UnexpectedMessage(f"client {message.sender} owes client {self.client} no {name!r}")
        if self._buffers[name]:
            raise ReplayedMessage(f"client {message.sender} has returned {name!r} before")
        self._buffers[name].append(message.layer)

    def upload(self) -> Upload:
        """Return the message to the server.

        Raises:
          MissingLayer: an exchange is not over.
        """
        self._check_over()
        return Upload(self.announcement.round, self.client, tuple(layer for (layer,) in self._buffers.values()))

    def saved(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return all that this party knows, as values of JSON and sealed layers, so that another process can go on."""
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
        """Return the party that `saved` described, with choices to go on with."""
        about, party, rest = facts["announcement"], cls.__new__(cls), iter(sealed)
        clients, sizes = tuple(about["clients"]), tuple((name, size) for name, size in about["sizes"])
        party.client, party.choices = facts["client"], choices or RandomChoices()
        party.announcement = Announcement(about["round"], bytes.fromhex(about["public_key"]), clients, sizes)
        party._sizes, party._others = dict(sizes), tuple(other for other in clients if other != party.client)
        party._repetition, party._collecting = facts["repetition"], facts["collecting"]
        party._buffers = {
            name: [SealedLayer(about["round"], name, next(rest)) for _ in range(length)]
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
        if message.repetition < self._repetition:
            raise ReplayedMessage(f"a message of exchange {message.repetition} came in exchange {self._repetition}")
        if message.repetition > self._repetition:
            raise UnexpectedMessage(f"a message of exchange {message.repetition} came in exchange {self._repetition}")

    def _check_over(self) -> None:
        missing = [name for name, buffer in self._buffers.items() if len(buffer) != 1]
        if missing or self._collecting:
            raise MissingLayer(f"client {self.client} is in the middle of an exchange; it waits for {missing}")


def exchange_layers(parties: Mapping[int, Party], *, repetitions: int = 1) -> None:
    """Carry the messages of whole exchanges among parties of one process.

    Raises:
      UserError: a client of the round is missing among the parties.
    """
    for party in parties.values():
        if missing := [client for client in party.announcement.clients if client not in parties]:
            raise UserError(f"an exchange needs all clients of the round; missing are {reprlib.repr(missing)}")
    for _ in range(repetitions):
        for message in [message for party in parties.values() for message in party.send()]:
            parties[message.receiver].receive(message)
        for message in [message for party in parties.values() for message in party.give_back()]:
            parties[message.receiver].take_back(message)


# --- The server ------------------------------------------------------------------------------------------------------


class SecureServer:
    """The server in one round after the other: it announces a key, collects uploads and opens them together."""

    def __init__(self, sizes: Mapping[str, int], clients: Sequence[int]) -> None:
        """Keep what is public: the bytes of every layer by name, and the ids of the round's clients.

        Raises:
          UserError: no bytes by name, or no distinct whole numbers.
        """
        if not isinstance(sizes, Mapping) or not isinstance(clients, Iterable):
            raise UserError("a server takes the bytes of every layer by name, and the ids of the round's clients")
        self._sizes, self._clients = (
            {name: int(size) if is_whole(size) else size for name, size in sizes.items()},
            tuple(int(client) if is_whole(client) else client for client in clients),
        )
        try:
            check_announcement(Announcement(0, bytes(32), self._clients, tuple(self._sizes.items())))
        except SecureError as error:
            raise UserError(str(error)) from None
        self._private_key: Any = None
        self._announcement: Announcement | None = None
        self._uploads: dict[int, Upload] = {}

    def announce(self, round: int) -> Announcement:
        """Begin a round: make a new key pair and return the message to all clients.

        Raises:
          UserError: the round is no whole number from 0, or cryptography is missing.
        """
        if not is_whole(round) or not 0 <= round < 2**63:
            raise UserError(f"a round is a whole number from 0, not {reprlib.repr(round)}")
        self._private_key = primitives().X25519PrivateKey.generate()
        public_key = self._private_key.public_key().public_bytes_raw()
        self._announcement = Announcement(int(round), public_key, self._clients, tuple(self._sizes.items()))
        self._uploads = {}
        return self._announcement

    def receive(self, upload: Upload) -> None:
        """Take a client's upload.

        Raises:
          SecureError: it is of another round, a stranger's, a second one, or not one layer of each name.
        """
        check_form(upload, Upload)
        announcement = self._open_round()
        check_round(upload.round, announcement.round)
        if upload.sender not in announcement.clients:
            raise UnexpectedMessage(f"client {upload.sender} does not take part in round {announcement.round}")
        if upload.sender in self._uploads:
            raise ReplayedMessage(f"client {upload.sender} has uploaded before")
        if len(upload.layers) != len(self._sizes):
            raise MissingLayer(f"client {upload.sender} uploaded {len(upload.layers)} layers, not {len(self._sizes)}")
        for layer in upload.layers:
            check_sealed(layer, announcement.round, self._sizes)
        if missing := self._sizes.keys() - {layer.name for layer in upload.layers}:
            raise MissingLayer(f"client {upload.sender} uploaded no {min(missing)!r}")
        self._uploads[upload.sender] = upload

    def open(self) -> dict[int, dict[str, bytes]]:
        """Return the opened layers by client and name, and forget the round's private key.

        An upload that an error names is forgotten, so that its client can upload again; all others are kept.

        Raises:
          MissingLayer: a client has not uploaded.
          ReplayedMessage: a sealed layer came from two clients; both uploads are forgotten.
          TamperedLayer: a layer is not what was sealed for this round and name.
        """
        announcement = self._open_round()
        missing = [client for client in announcement.clients if client not in self._uploads]
        if missing:
            raise MissingLayer(f"no upload from clients {reprlib.repr(missing)}")
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
            raise WrongRound("no round is open: announce one first")
        return self._announcement

    def _unseal(self, announcement: Announcement, client: int, layer: SealedLayer) -> bytes:
        crypto = primitives()
        try:
            info = _context(announcement, layer.name)
            return crypto.suite.decrypt(layer.sealed, self._private_key, info=info)
        except (crypto.InvalidTag, ValueError):  # ValueError: its ephemeral key is no point that is safe to use
            del self._uploads[client]
            raise TamperedLayer(
                f"{layer.name!r} uploaded by client {client} is not what was sealed for round {announcement.round}"
            ) from None


# --- Models as bytes -------------------------------------------------------------------------------------------------


def pack(model: Variables, layers: Sequence[Layer]) -> dict[str, bytes]:
    """Return one model's layers as bytes by name: the numbers of their tensors, least byte first."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    return {layer.name: b"".join(map(_to_bytes, (leaves[leaf] for leaf in layer.leaves))) for layer in layers}


def unpack(packed: Mapping[str, bytes], layers: Sequence[Layer], shapes: Variables) -> Variables:
    """Return the model that `pack` made bytes of; ``shapes`` are those of ``Model.shapes()``.

    Raises:
      SecureError: a layer is missing or unknown, or has not as many bytes as its tensors.
    """
    leaves, structure = jax.tree.flatten(shapes)
    if not isinstance(packed, Mapping) or set(packed) != {layer.name for layer in layers}:
        raise MissingLayer(f"a packed model holds exactly the layers {reprlib.repr([layer.name for layer in layers])}")
    for layer in layers:
        start, size = 0, sum(leaves[leaf].size * np.dtype(leaves[leaf].dtype).itemsize for leaf in layer.leaves)
        if type(packed[layer.name]) is not bytes or len(packed[layer.name]) != size:
            raise MalformedMessage(f"{layer.name!r} has to be {size} bytes")
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
    """Return what is authenticated with a layer: round, name and length, none of which tells the owner."""
    text = name.encode()
    numbers = (announcement.round, dict(announcement.sizes)[name], len(text))
    return _PURPOSE + b"".join(number.to_bytes(8, "big") for number in numbers) + text


def _seal(announcement: Announcement, name: str, layer: bytes) -> SealedLayer:
    crypto = primitives()
    try:
        public_key = crypto.X25519PublicKey.from_public_bytes(announcement.public_key)
        sealed = crypto.suite.encrypt(layer, public_key, info=_context(announcement, name))
    except ValueError:
        raise MalformedMessage("the announced public key is no key of X25519 that is safe to use") from None
    return SealedLayer(announcement.round, name, sealed)
