"""The messages of secure recombination, their errors, and the checks that need no key."""

import dataclasses
import numbers
import reprlib
import typing
from collections.abc import Collection, Mapping
from typing import Any

OVERHEAD = 48  # bytes added by sealing: an X25519 public key (32) and the tag of ChaCha20-Poly1305 (16)
MOST_ENTRIES = 2**16  # limit for layers of a model and clients of a round: longer lists are refused before reading


class SecureError(Exception):
    """A message violates the protocol. Its receiver ignores it and keeps its state."""


class MalformedMessage(SecureError):
    """A message has wrong types, numbers out of range, an invalid key, or too many entries."""


class TamperedLayer(SecureError):
    """A sealed layer was changed or truncated, or belongs to another layer or round."""


class ReplayedMessage(SecureError):
    """A message or sealed layer was received before."""


class WrongRound(SecureError):
    """A message belongs to another round."""


class UnexpectedMessage(SecureError):
    """A message is for another receiver or another stage."""


class MissingLayer(SecureError):
    """A layer or upload that the next step needs has not arrived."""


# --- Messages --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Announcement:
    """The server's announcement before the exchange."""

    round: int
    public_key: bytes  # X25519, for this round only
    clients: tuple[int, ...]  # ids of the clients of the round
    sizes: tuple[tuple[str, int], ...]  # name and bytes of every layer


@dataclasses.dataclass(frozen=True)
class SealedLayer:
    """A layer that only the server can read. It does not reveal its owner."""

    round: int
    name: str
    sealed: bytes


@dataclasses.dataclass(frozen=True)
class _BetweenClients:
    round: int
    repetition: int
    sender: int
    receiver: int
    layer: SealedLayer


class Sent(_BetweenClients):
    """Stage 1: the receiver keeps this layer and returns one of the same name."""


class Returned(_BetweenClients):
    """Stage 3: a layer in return for the one that the receiver sent."""


@dataclasses.dataclass(frozen=True)
class Upload:
    """The message to the server: one layer of each name."""

    round: int
    sender: int
    layers: tuple[SealedLayer, ...]


# --- Checks ----------------------------------------------------------------------------------------------------------


def is_integer(value: object) -> typing.TypeGuard[int]:
    """Whether a value from the caller is an integer, of Python or NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_form(value: Any, kind: Any, place: str = "") -> None:
    """Check that a received object has exactly the declared types, before any other code reads it.

    Raises:
      UnexpectedMessage: the object is a message of another kind, or not a message.
      MalformedMessage: a field has another type, is an integer of more than 64 bits, or is too long.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if type(value) is not kind:
            raise UnexpectedMessage(f"expected a message {kind.__name__}, not {type(value).__name__}")
        for field in dataclasses.fields(kind):
            check_form(getattr(value, field.name, None), field.type, f"{kind.__name__}.{field.name}")
        return
    of = typing.get_args(kind)
    if type(value) is not (typing.get_origin(kind) or kind):
        raise MalformedMessage(f"{place} is of type {type(value).__name__}")
    if of:
        open_ended = of[-1] is Ellipsis
        if len(value) > MOST_ENTRIES or (not open_ended and len(value) != len(of)):
            raise MalformedMessage(f"{place} has {len(value)} entries")
        for entry, each in zip(value, of[:1] * len(value) if open_ended else of, strict=True):
            check_form(entry, each, place)
    elif kind is int and not -(2**63) <= value < 2**63:
        raise MalformedMessage(f"{place} is a number of more than 64 bits")


def check_announcement(announcement: Announcement) -> None:
    """Check an announcement on behalf of a client.

    Raises:
      SecureError: the object is not an announcement, or its clients or layers are not distinct or have invalid values.
    """
    check_form(announcement, Announcement)
    names = [name for name, _ in announcement.sizes]
    if announcement.round < 0 or len(announcement.public_key) != 32:
        raise MalformedMessage("an announcement needs a round of at least 0 and a public key of 32 bytes")
    if not _are_distinct(announcement.clients):
        raise MalformedMessage("the clients of the round are not distinct numbers")
    if not _are_distinct(names) or any(size < 0 for _, size in announcement.sizes):
        raise MalformedMessage("the names of the layers are not distinct, or a size is below 0")
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise MalformedMessage("the name of a layer cannot be encoded in UTF-8") from None


def _are_distinct(values: Collection[Any]) -> bool:
    return len(set(values)) == len(values) > 0


def check_round(actual: int, expected: int) -> None:
    """Check that a message belongs to the expected round.

    Raises:
      WrongRound: the message belongs to another round.
    """
    if actual != expected:
        raise WrongRound(f"a message of round {actual} arrived in round {expected}")


def check_sealed(layer: SealedLayer, round: int, sizes: Mapping[str, int]) -> None:
    """Check the public part of a sealed layer.

    Raises:
      SecureError: the layer has another round, name or length.
    """
    check_round(layer.round, round)
    if layer.name not in sizes:
        raise UnexpectedMessage(f"there is no layer {reprlib.repr(layer.name)}")
    if len(layer.sealed) != sizes[layer.name] + OVERHEAD:
        raise TamperedLayer(
            f"{layer.name!r} has {len(layer.sealed)} sealed bytes; it should have {sizes[layer.name] + OVERHEAD}"
        )
