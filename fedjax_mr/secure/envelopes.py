"""Sealed and signed envelopes between clients. The server transports them, but cannot read or change them.

A client has two long-term key pairs: X25519, to receive sealed messages (HPKE, RFC 9180, as in messages.py), and
Ed25519, to sign. The operator of the client generates them, keeps the private file and sends the public line to the
other operators. The lines of all clients form the roster. The author of the roster can read all envelopes, so the
roster must not come from the server.

The context of an envelope (``about``: round, stage, sender, receiver, ...) is authenticated but not sent. The receiver
supplies the context that it expects, and an envelope with another context does not open. There is no forward secrecy:
an attacker who records envelopes and later steals a private key can read them (and obtains layers that are sealed for
a server that has deleted its key).
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from fedjax_mr.errors import UserError
from fedjax_mr.files import atomic_write
from fedjax_mr.secure.forms import MalformedMessage, TamperedLayer
from fedjax_mr.secure.primitives import primitives

OVERHEAD = 112  # bytes added by an envelope: a signature (64), a public key (32) and a tag (16)
_SIGNATURE = 64
_PURPOSE = b"fedjax_mr envelope"
_LINE = re.compile(r"(\d{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True)
class PublicKeys:
    """The public keys of a client."""

    client: int
    sealing: bytes  # X25519
    signing: bytes  # Ed25519

    def line(self) -> str:
        """The line of this client in a roster."""
        return f"{self.client} {self.sealing.hex()} {self.signing.hex()}"


class Identity:
    """The private keys of a client."""

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
        """Generate new keys."""
        return cls(client, os.urandom(32), os.urandom(32))

    @classmethod
    def read(cls, path: Path | str) -> "Identity":
        """Read keys from a file written by `write`.

        Raises:
          UserError: the file is missing, or does not contain the keys of one client.
        """
        lines = _lines(path, "private keys of a client")
        if len(lines) != 1:
            raise UserError(f"{path} contains the keys of {len(lines)} clients, not of one")
        return cls(*lines[0])

    def write(self, path: Path | str) -> None:
        """Write the private keys to a new file that only its owner can read.

        Raises:
          UserError: the file exists or cannot be written.
        """
        if os.path.lexists(path):
            raise UserError(f"{path} already exists; the keys of a client are not replaced")
        line = f"{self.client} {self._sealing.private_bytes_raw().hex()} {self._signing.private_bytes_raw().hex()}\n"
        with atomic_write(path) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(line)

    def seal(self, content: bytes, receiver: PublicKeys, about: bytes) -> bytes:
        """Sign content and seal it in an envelope that only the receiver can open."""
        crypto = primitives()
        try:
            sealed = crypto.suite.encrypt(
                content, crypto.X25519PublicKey.from_public_bytes(receiver.sealing), info=_PURPOSE + about
            )
        except ValueError:
            raise MalformedMessage(f"the roster has an invalid X25519 key for client {receiver.client}") from None
        return self._signing.sign(_PURPOSE + about + sealed) + sealed

    def open(self, envelope: bytes, sender: PublicKeys, about: bytes) -> bytes:
        """Open an envelope and return its content.

        Raises:
          TamperedLayer: the envelope was not signed by this sender and sealed for this client and ``about``.
        """
        crypto = primitives()
        signature, sealed = envelope[:_SIGNATURE], envelope[_SIGNATURE:]
        try:
            crypto.Ed25519PublicKey.from_public_bytes(sender.signing).verify(signature, _PURPOSE + about + sealed)
            return crypto.suite.decrypt(sealed, self._sealing, info=_PURPOSE + about)
        except (crypto.InvalidSignature, crypto.InvalidTag, ValueError):
            raise TamperedLayer(
                f"client {self.client} received an envelope that client {sender.client} did not seal for it at this "
                "stage"
            ) from None


def read_roster(path: Path | str) -> Mapping[int, PublicKeys]:
    """Read the public keys of all clients.

    Raises:
      UserError: the file is missing, a line is malformed, or two lines have the same client or key.
    """
    roster: dict[int, PublicKeys] = {}
    seen: set[bytes] = set()
    for client, sealing, signing in _lines(path, "roster"):
        if client in roster or {sealing, signing} & seen:
            raise UserError(f"{path} has two lines for client {client}, or repeats one of its keys")
        roster[client] = PublicKeys(client, sealing, signing)
        seen |= {sealing, signing}
    return roster


def _lines(path: Path | str, description: str) -> list[tuple[int, bytes, bytes]]:
    try:
        text = Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}, the {description} ({reason})") from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line.strip())):
            raise UserError(
                f"{path}:{number} is not a line of the {description}: it needs the number of the client and two keys "
                "of 64 digits"
            )
        lines.append((int(match[1]), bytes.fromhex(match[2]), bytes.fromhex(match[3])))
    return lines
