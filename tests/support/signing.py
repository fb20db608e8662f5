"""Keys of elliptic curves, and signed models."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cryptography", reason="it is in the test group, and in the extra [sign]")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from blobstore.signatures.keys import PrivateKey, PublicKey
from blobstore.store.local import LocalStore

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


class KeyFiles(NamedTuple):
    """The files of a key."""

    private: Path
    public: Path


def key_files(
    folder: Path, name: str = "key", curve: str = "P-256", passphrase: bytes | None = None
) -> KeyFiles:
    """Write a new key to a folder."""
    key = ec.generate_private_key(CURVES[curve])
    encryption = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    files = KeyFiles(folder / f"{name}.pem", folder / f"{name}.pub")
    files.private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    files.public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return files


def policy(
    store: LocalStore, files: KeyFiles, action: str = "enforce", pattern: str = "*", more: str = ""
) -> None:
    """Write the policy of a store: models that match a pattern need a signature by a key."""
    store.policy_path.parent.mkdir(parents=True, exist_ok=True)
    store.policy_path.write_text(
        f"""
        version = 1
        default = "off"
        [keys]
        ours = "{files.public}"
        [[rules]]
        match = "{pattern}"
        action = "{action}"
        keys = ["ours"]
        {more}
        """
    )


def private_key(curve: str = "P-256") -> PrivateKey:
    """Return a new private key."""
    pem = ec.generate_private_key(CURVES[curve]).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    return PrivateKey.from_pem(pem, "key")


def public_key(files: KeyFiles, name: str = "key") -> PublicKey:
    """Return the public key of files."""
    return PublicKey.from_pem(files.public.read_bytes(), name)
