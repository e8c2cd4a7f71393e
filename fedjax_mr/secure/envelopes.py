"""Sealed and signed envelopes from one client to another, which a server carries and cannot read or change.

A client has two long-term keys of its own: X25519, for which others seal (HPKE, RFC 9180, as in messages.py), and
Ed25519, with which it signs. Its operator makes them, keeps the private file and hands the public line to the other
operators; everybody's lines together are the roster. Whoever writes the roster can read everything, so it must not
come from the server.

What an envelope is about (`about`: round, stage, sender, receiver, ...) is authenticated and not sent: a receiver puts
in what it expects, and an envelope for anything else does not open. There is no forward secrecy: whoever records
envelopes and steals a private key later can read them (and finds layers that are sealed for a server that has forgotten
its key).
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from fedjax_mr.data.files import atomic_write
from fedjax_mr.errors import UserError
from fedjax_mr.secure.forms import MalformedMessage, TamperedLayer
from fedjax_mr.secure.primitives import primitives

OVERHEAD = 112  # bytes that an envelope adds: a signature (64), a public key (32) and a tag (16)
_SIGNATURE = 64
_PURPOSE = b"fedjax_mr envelope"
_LINE = re.compile(r"(\d{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True)
class PublicKeys:
    """What the others know of a client."""

    client: int
    sealing: bytes  # X25519
    signing: bytes  # Ed25519

    def line(self) -> str:
        """Return the client's line of a roster."""
        return f"{self.client} {self.sealing.hex()} {self.signing.hex()}"


class Identity:
    """A client's own private keys."""

    def __init__(self, client: int, sealing: bytes, signing: bytes) -> None:
        crypto = primitives()
        self.client = client
        self._sealing = crypto.X25519PrivateKey.from_private_bytes(sealing)
        self._signing = crypto.Ed25519PrivateKey.from_private_bytes(signing)
        self.public = PublicKeys(
            client,
            self._sealing.public_key().public_bytes_raw(),
            self._signing.public_key().public_bytes_raw(),
        )

    @classmethod
    def new(cls, client: int) -> "Identity":
        """Return fresh keys."""
        return cls(client, os.urandom(32), os.urandom(32))

    @classmethod
    def read(cls, path: Path | str) -> "Identity":
        """Return the keys of a file that `write` made.

        Raises:
          UserError: there is no such file, or it holds something else.
        """
        lines = _lines(path, "private keys of a client")
        if len(lines) != 1:
            raise UserError(f"{path} holds the keys of {len(lines)} clients, not of one")
        return cls(*lines[0])

    def write(self, path: Path | str) -> None:
        """Write the private keys to a new file that only its owner can read.

        Raises:
          UserError: the file is there already, or cannot be written.
        """
        if os.path.lexists(path):
            raise UserError(f"{path} is there already; the keys of a client are not replaced")
        line = f"{self.client} {self._sealing.private_bytes_raw().hex()} {self._signing.private_bytes_raw().hex()}\n"
        with atomic_write(path) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(line)

    def seal(self, content: bytes, receiver: PublicKeys, about: bytes) -> bytes:
        """Return an envelope that only the receiver can open, signed."""
        crypto = primitives()
        try:
            sealed = crypto.suite.encrypt(
                content, crypto.X25519PublicKey.from_public_bytes(receiver.sealing), info=_PURPOSE + about
            )
        except ValueError:
            raise MalformedMessage(f"the roster's key of client {receiver.client} is no key of X25519") from None
        return self._signing.sign(_PURPOSE + about + sealed) + sealed

    def open(self, envelope: bytes, sender: PublicKeys, about: bytes) -> bytes:
        """Return what a client put into an envelope.

        Raises:
          TamperedLayer: it is not what this sender signed and sealed for this client and ``about``.
        """
        crypto = primitives()
        signature, sealed = envelope[:_SIGNATURE], envelope[_SIGNATURE:]
        try:
            crypto.Ed25519PublicKey.from_public_bytes(sender.signing).verify(signature, _PURPOSE + about + sealed)
            return crypto.suite.decrypt(sealed, self._sealing, info=_PURPOSE + about)
        except (crypto.InvalidSignature, crypto.InvalidTag, ValueError):
            raise TamperedLayer(
                f"client {self.client} received something that client {sender.client} did not seal for it at this stage"
            ) from None


def read_roster(path: Path | str) -> Mapping[int, PublicKeys]:
    """Return everybody's public keys by client.

    Raises:
      UserError: there is no such file, a line is malformed, or two lines are about one client or share a key.
    """
    roster: dict[int, PublicKeys] = {}
    seen: set[bytes] = set()
    for client, sealing, signing in _lines(path, "roster"):
        if client in roster or {sealing, signing} & seen:
            raise UserError(f"{path} has two lines for client {client}, or a key of it twice")
        roster[client] = PublicKeys(client, sealing, signing)
        seen |= {sealing, signing}
    return roster


def _lines(path: Path | str, what: str) -> list[tuple[int, bytes, bytes]]:
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}, the {what} ({getattr(error, 'strerror', None) or error})") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line.strip())):
            raise UserError(f"{path}:{number} is no line of a {what}: the client's number and two keys of 64 digits")
        found.append((int(match[1]), bytes.fromhex(match[2]), bytes.fromhex(match[3])))
    return found
