"""Keys of elliptic curves: the only module that imports ``cryptography``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_KEY_SIZE: Final = 16 * 2**10
"""Bytes of a PEM file."""
_CURVES: Final = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The curves of model signatures, P-256, P-384 and P-521, and the hash that OMS pairs with each."""
_COSIGN: Final = b"-----BEGIN ENCRYPTED COSIGN PRIVATE KEY-----"
_SIGSTORE: Final = b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----"

Passphrase = str | bytes
"""What an encrypted private key is decrypted with."""


@dataclass(frozen=True, slots=True, eq=False)
class PublicKey:
    """A public key of a supported curve."""

    name: str
    """The name of the key in reports."""
    fingerprint: str
    """The SHA-256 of its PEM form, in hexadecimal digits: the ``hint`` of OMS bundles."""
    curve: str
    _key: Any

    @classmethod
    def from_pem(cls, data: bytes, name: str) -> PublicKey:
        """Parse a public key.

        Raises:
            UsageError: it is malformed, private, or of another kind.
            MissingLibrary: ``cryptography`` is not installed.
        """
        with optional_libraries():
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
        if b"PRIVATE KEY" in data:
            raise UsageError(f"{quote(name)}: this is a private key; the public one is needed")
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(
                f"{quote(name)}: not a public key in PEM: {_first_line(error)}"
            ) from None
        return cls._of(key, name)

    @classmethod
    def _of(cls, key: Any, name: str) -> PublicKey:
        with optional_libraries():
            from cryptography.hazmat.primitives import serialization
        curve = _curve(key, name)
        pem = key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(name, hashlib.sha256(pem).hexdigest(), curve, key)

    def has_signed(self, signed: bytes, signature: bytes, *, is_sha256: bool = False) -> bool:
        """Return whether ``signature`` is the ECDSA signature of the bytes ``signed`` by this key.

        With ``is_sha256``, the bytes are hashed with SHA-256 for every curve, as cosign does.
        """
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, signed, _ecdsa(self.curve, is_sha256=is_sha256))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class PrivateKey:
    """A private key of a supported curve, and its public key."""

    public: PublicKey
    _key: Any

    @classmethod
    def from_pem(
        cls, data: bytes, name: str, passphrase: Callable[[], Passphrase] | None = None
    ) -> PrivateKey:
        """Parse a private key; ``passphrase`` is called if it is encrypted.

        Raises:
            UsageError: it is malformed, public, of another kind, or needs another passphrase.
            MissingLibrary: ``cryptography`` is not installed.
        """
        with optional_libraries():
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
        if _COSIGN in data or _SIGSTORE in data:
            raise UsageError(
                f"{quote(name)}: cosign's own format of encrypted keys is not supported; use a key in PKCS#8, "
                "which 'cosign import-key-pair' accepts too"
            )
        secret = None
        if b"ENCRYPTED" in data:
            if passphrase is None:
                raise UsageError(f"{quote(name)}: the key is encrypted, and no passphrase is given")
            given = passphrase()
            secret = given.encode() if isinstance(given, str) else given
        try:
            key = serialization.load_pem_private_key(data, secret)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            reason = "wrong passphrase, or damaged" if secret is not None else _first_line(error)
            raise UsageError(f"{quote(name)}: not a private key in PEM: {reason}") from None
        _curve(key, name)
        return cls(PublicKey._of(key.public_key(), name), key)  # noqa: SLF001 - its own module

    def sign(self, data: bytes, *, is_sha256: bool = False) -> bytes:
        """Return the ECDSA signature of ``data`` in DER; see :meth:`PublicKey.has_signed`."""
        signature: bytes = self._key.sign(data, _ecdsa(self.public.curve, is_sha256=is_sha256))
        return signature


def read_key(path: Path) -> bytes:
    """Return the content of a key file.

    Raises:
        NotFound: there is no such file.
        BlobstoreError: it cannot be read, or is too large for a key.
    """
    try:
        return read_regular(path, MAX_KEY_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no key file {quote(path)}") from None
    except OSError as error:
        raise BlobstoreError(f"cannot read the key {quote(path)}: {error.strerror}") from error


def _curve(key: Any, name: str) -> str:
    curve = getattr(getattr(key, "curve", None), "name", "")
    if curve not in _CURVES:
        found = f"curve {curve}" if curve else "no elliptic curve"
        raise UsageError(
            f"{quote(name)}: the key has {found}; P-256, P-384 and P-521 are supported"
        )
    return str(curve)


def _ecdsa(curve: str, *, is_sha256: bool) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(getattr(hashes, "SHA256" if is_sha256 else _CURVES[curve])())


def _first_line(error: Exception) -> str:
    return quote((str(error) or type(error).__name__).splitlines()[0])
