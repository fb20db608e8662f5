"""A certificate authority of the tests, and certificates for this machine."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cryptography", reason="it is in the test group, and in the extra [sign]")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    chain: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Those of ``blobstore serve``."""
        return f"--tls-cert={self.chain}", f"--tls-key={self.key}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(_name("authority of the tests"), _name(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


class Authority:
    """Signs certificates for ``localhost`` and 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        own = (
            _builder("authority of the tests", self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, SHA256())
        )
        self.file = folder / "ca.crt"
        self.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def context(self) -> ssl.SSLContext:
        """Return the settings of a client that trusts it."""
        return ssl.create_default_context(cafile=self.file)

    def pair(self, name: str = "server", password: bytes = b"") -> Pair:
        """Write the files of a new certificate, whose subject has a name."""
        key = ec.generate_private_key(ec.SECP256R1())
        places = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        signed = (
            _builder(name, key)
            .add_extension(x509.SubjectAlternativeName(places), critical=False)
            .sign(self._key, SHA256())
        )
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.chain.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        hidden = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        form = serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, hidden))
        return pair
