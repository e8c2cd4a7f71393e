"""The messages of secure recombination, the errors that refuse them, and what everybody can check without a key."""

import dataclasses
import numbers
import reprlib
import typing
from collections.abc import Collection, Mapping
from typing import Any

OVERHEAD = 48  # bytes that sealing adds: an X25519 public key (32) and the tag of ChaCha20-Poly1305 (16)
MOST_ENTRIES = 2**16  # layers of a model, and clients of a round: a longer list is refused before anybody reads it


class SecureError(Exception):
    """A message that the protocol does not allow; its receiver is as if it had not come."""


class MalformedMessage(SecureError):
    """A message is not built as its kind is: other types, numbers out of range, a key that is none, too long."""


class TamperedLayer(SecureError):
    """A sealed layer is not what was sealed for this place: changed, cut, or of another layer or round."""


class ReplayedMessage(SecureError):
    """A message or sealed layer came before."""


class WrongRound(SecureError):
    """A message belongs to another round."""


class UnexpectedMessage(SecureError):
    """A message is not for its receiver, or not for this stage."""


class MissingLayer(SecureError):
    """Something has not arrived that the next step needs."""


# --- Messages --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Announcement:
    """The server's announcement before the exchange."""

    round: int
    public_key: bytes  # X25519, of this round only
    clients: tuple[int, ...]  # ids of the round's clients
    sizes: tuple[tuple[str, int], ...]  # name and bytes of every layer


@dataclasses.dataclass(frozen=True)
class SealedLayer:
    """A layer that only the server can read; it does not say whose it is."""

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
    """To the server: one layer of each name."""

    round: int
    sender: int
    layers: tuple[SealedLayer, ...]


# --- Checks ----------------------------------------------------------------------------------------------------------


def is_whole(value: object) -> typing.TypeGuard[int]:
    """Return whether a value of the caller's own is a whole number, also one of NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_form(value: Any, kind: Any, place: str = "") -> None:
    """Check that a received object is built of exactly the types that its kind declares, before anything reads it.

    Raises:
      UnexpectedMessage: it is a message of another kind, or no message.
      MalformedMessage: one of its fields is of another type, a number of over 64 bits, or too long a list.
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
        raise MalformedMessage(f"{place} is a number of over 64 bits")


def check_announcement(announcement: Announcement) -> None:
    """Check what a client can see of an announcement.

    Raises:
      SecureError: it is no announcement, or its clients or layers are not distinct, or have impossible values.
    """
    check_form(announcement, Announcement)
    names = [name for name, _ in announcement.sizes]
    if announcement.round < 0 or len(announcement.public_key) != 32:
        raise MalformedMessage("an announcement has a round from 0 and a public key of 32 bytes")
    if not _are_distinct(announcement.clients):
        raise MalformedMessage("the round's clients are no distinct numbers")
    if not _are_distinct(names) or any(size < 0 for _, size in announcement.sizes):
        raise MalformedMessage("the layers have no distinct names, or sizes below 0")
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise MalformedMessage("the name of a layer is no text that UTF-8 can hold") from None


def _are_distinct(values: Collection[Any]) -> bool:
    return len(set(values)) == len(values) > 0


def check_round(found: int, expected: int) -> None:
    """Raise WrongRound unless a message is of the round that is expected."""
    if found != expected:
        raise WrongRound(f"a message of round {found} came in round {expected}")


def check_sealed(layer: SealedLayer, round: int, sizes: Mapping[str, int]) -> None:
    """Check what everybody can see of a sealed layer.

    Raises:
      SecureError: it is of another round, name or length.
    """
    check_round(layer.round, round)
    if layer.name not in sizes:
        raise UnexpectedMessage(f"no layer is called {reprlib.repr(layer.name)}")
    if len(layer.sealed) != sizes[layer.name] + OVERHEAD:
        raise TamperedLayer(
            f"{layer.name!r} has {len(layer.sealed)} sealed bytes; it should have {sizes[layer.name] + OVERHEAD}"
        )
