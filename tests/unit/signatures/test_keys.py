from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from blobstore.errors import BlobstoreError, NotFound, UsageError
from blobstore.signatures.keys import PrivateKey, PublicKey, read_key
from tests.support.signing import CURVES, key_files, private_key, public_key

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


def pem(key: object) -> bytes:
    content: bytes = key.private_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return content


@pytest.mark.parametrize("curve", CURVES)
def test_the_fingerprint_is_the_digest_of_the_public_key_in_pem(tmp_path: Path, curve: str) -> None:
    files = key_files(tmp_path, curve=curve)

    private = PrivateKey.from_pem(files.private.read_bytes(), "key")

    assert private.public.fingerprint == hashlib.sha256(files.public.read_bytes()).hexdigest()
    assert private.public.fingerprint == public_key(files).fingerprint


@pytest.mark.parametrize("is_sha256", [False, True])
@pytest.mark.parametrize("curve", CURVES)
def test_verifies_what_it_signs_and_nothing_else(curve: str, is_sha256: bool) -> None:
    key = private_key(curve)

    signature = key.sign(b"data", is_sha256=is_sha256)

    assert key.public.has_signed(b"data", signature, is_sha256=is_sha256)
    assert not key.public.has_signed(b"date", signature, is_sha256=is_sha256)
    for wrong in (b"", b"\x30\x00", signature[:-1], signature + b"\0", bytes(len(signature))):
        assert not key.public.has_signed(b"data", wrong, is_sha256=is_sha256)


@pytest.mark.parametrize("passphrase", ["open sesame", b"open sesame"])
def test_decrypts_a_key_with_its_passphrase_alone(tmp_path: Path, passphrase: str | bytes) -> None:
    content = key_files(tmp_path, passphrase=b"open sesame").private.read_bytes()

    key = PrivateKey.from_pem(content, "key", lambda: passphrase)

    assert key.public.has_signed(b"data", key.sign(b"data"))
    with pytest.raises(UsageError, match="wrong passphrase"):
        PrivateKey.from_pem(content, "key", lambda: "open barley")
    with pytest.raises(UsageError, match="no passphrase is given"):
        PrivateKey.from_pem(content, "key")


def test_asks_for_no_passphrase_if_the_key_is_not_encrypted(tmp_path: Path) -> None:
    def ask() -> str:
        raise AssertionError

    PrivateKey.from_pem(key_files(tmp_path).private.read_bytes(), "key", ask)


def test_rejects_other_kinds_of_keys(tmp_path: Path) -> None:
    files = key_files(tmp_path)
    with pytest.raises(UsageError, match="no elliptic curve"):
        PrivateKey.from_pem(pem(ed25519.Ed25519PrivateKey.generate()), "key")
    with pytest.raises(UsageError, match="curve secp256k1"):
        PrivateKey.from_pem(pem(ec.generate_private_key(ec.SECP256K1())), "key")
    with pytest.raises(UsageError, match="the public one is needed"):
        PublicKey.from_pem(files.private.read_bytes(), "key")
    with pytest.raises(UsageError, match="not a private key"):
        PrivateKey.from_pem(files.public.read_bytes(), "key")
    with pytest.raises(UsageError, match="cosign import-key-pair"):
        PrivateKey.from_pem(b"-----BEGIN ENCRYPTED COSIGN PRIVATE KEY-----", "key")


@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 99, b"-----BEGIN PUBLIC KEY-----\nAA\n"])
def test_rejects_files_of_other_kinds(data: bytes) -> None:
    with pytest.raises(UsageError, match="not a public key"):
        PublicKey.from_pem(data, "key")
    with pytest.raises(UsageError, match="not a private key"):
        PrivateKey.from_pem(data, "key")


def test_reads_no_file_that_is_too_large_missing_or_a_folder(tmp_path: Path) -> None:
    large = tmp_path / "large.pem"
    large.write_bytes(bytes(20_000))
    with pytest.raises(NotFound, match=r"no key file '.*none.pem'"):
        read_key(tmp_path / "none.pem")
    for path, why in ((large, "large"), (tmp_path, "regular file")):
        with pytest.raises(BlobstoreError, match=why):
            read_key(path)


def test_says_what_to_install_without_cryptography() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
from blobstore.errors import MissingLibrary
from blobstore.signatures.keys import PublicKey
try:
    PublicKey.from_pem(b"", "key")
except MissingLibrary as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tensor-blobstore[sign]'" in done.stdout
