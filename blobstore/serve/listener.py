"""The port of a server, and the certificate that it shows."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_PEM: Final = 1 << 20
"""Bytes of a chain of certificates, or of a key."""


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a port.

    Raises:
        BlobstoreError: it is taken, or this machine has no such address.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise BlobstoreError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise BlobstoreError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield listener


def read_certificate(chain: Path, key: Path) -> ssl.SSLContext:
    """Return the settings of TLS with a chain of certificates and its key, both in PEM.

    Raises:
        UsageError: they do not belong together, or one is malformed or has a password.
        BlobstoreError: they cannot be read.
    """
    _check_pem(chain, "certificate", b"-----BEGIN CERTIFICATE-----")
    _check_pem(key, "private key", b"PRIVATE KEY-----")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Clients could make the server compute again and again.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # OpenSSL would ask the terminal for a password.
        context.load_cert_chain(chain, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        fault = (
            f"the key {quote(key)} is not that of the certificate"
            if reason == "KEY_VALUES_MISMATCH"
            else f"the certificate, or its key {quote(key)}, is malformed or has a password"
        )
        raise UsageError(f"cannot use the certificate {quote(chain)}: {fault}") from error
    return context


def _check_pem(path: Path, what: str, mark: bytes) -> None:
    try:
        data = read_regular(path, _MAX_PEM)
    except OSError as error:
        raise BlobstoreError(f"cannot read the {what} {quote(path)}: {error.strerror}") from error
    if mark not in data:
        raise UsageError(f"{quote(path)} has no {what} in PEM")
