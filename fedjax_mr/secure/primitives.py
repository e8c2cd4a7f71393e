"""The cryptographic primitives of secure recombination: HPKE (RFC 9180) and Ed25519 signatures."""

from types import SimpleNamespace
from typing import Any

from fedjax_mr.errors import UserError


def primitives() -> Any:
    """The used part of the package cryptography, imported on first use because it is optional (extra ``secure``).

    Raises:
      UserError: the package is missing or too old.
    """
    try:
        from cryptography.exceptions import InvalidSignature, InvalidTag
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
    except ImportError:
        raise UserError(
            "secure recombination needs the package cryptography, version 50 or newer: pip install 'fedjax_mr[secure]'"
        ) from None
    return SimpleNamespace(
        suite=Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305),
        Ed25519PrivateKey=Ed25519PrivateKey,
        Ed25519PublicKey=Ed25519PublicKey,
        X25519PrivateKey=X25519PrivateKey,
        X25519PublicKey=X25519PublicKey,
        InvalidSignature=InvalidSignature,
        InvalidTag=InvalidTag,
    )
