"""The certificate authorities that a registry is verified against, and the client certificate.

The authorities come from the environment, as with curl, or from the system. As with Docker and Podman, the folder
``certs.d/HOST[:PORT]`` of a registry adds to it: ``*.crt`` are authorities, and ``NAME.cert`` with ``NAME.key``
is what the client shows to a server that asks for a certificate.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion
from blobstore.errors import RemoteError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VARIABLES: Final = ("CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables that name a file of certificates; the first that is set counts."""
_TLS_ANSWERS: Final = (b"\x16\x03", b"\x15\x03")
"""The first bytes of the records of a handshake and of an alert."""
_SYSTEM_FOLDERS: Final = (Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d"))


def tls_context(host: str) -> ssl.SSLContext:
    """Return the TLS context for a registry, ``host[:port]``, with the certificates to trust and to present.

    All callers get the same object, until one of the files is replaced: a new one takes 50 ms, and a MiB of memory
    that only the cyclic garbage collector frees.

    Raises:
        RemoteError: a file of certificates cannot be used.
    """
    paths: list[Path] = []
    if (folder := _folder_of(host)) is not None:
        with _errors_of(folder):
            paths = sorted(folder.iterdir())
    variables = tuple(os.environ.get(name) for name in (*VARIABLES, "SSL_CERT_DIR"))
    named = [Path(value) for value in variables if value]
    versions = tuple(map(_version, (*named, *paths)))
    return _made(variables, tuple(paths), versions)


def _version(path: Path) -> FileVersion | None:
    with contextlib.suppress(StoreError):  # loading it says what is wrong
        return FileVersion.of(path)
    return None


@functools.lru_cache(maxsize=16)
def _made(_: object, paths: Sequence[Path], __: object) -> ssl.SSLContext:
    """Return a new context. The other arguments say which environment and which files it is made from."""
    context = _trusted()
    for path in paths:
        if path.suffix == ".crt":
            with _errors_of(path):
                context.load_verify_locations(cafile=path)
        elif path.suffix == ".cert":
            key = path.with_suffix(".key")
            with _errors_of(key):
                key.stat()
            with _errors_of(path):
                # Without the function, OpenSSL asks for the password of a key at the terminal.
                context.load_cert_chain(path, key, password=lambda: "")
    return context


def speaks_tls(address: tuple[str, int], seconds: float) -> bool:
    """Return whether a server answers to the first message of a TLS handshake. Each step may take so many seconds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no other message is sent
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    try:
        with socket.create_connection(address, seconds) as connection:
            # A server of HTTP refuses the line at once, instead of waiting for its end.
            connection.sendall(hello.read() + b"\r\n\r\n")
            return connection.recv(2) in _TLS_ANSWERS
    except OSError:
        return False


def certificates_in_use() -> str:
    """Return which variable names the certificates that are trusted, or which one may."""
    for variable in (*VARIABLES, "SSL_CERT_DIR"):
        if path := os.environ.get(variable):
            return f"{variable} names the certificates to trust: {quote(path)}"
    return f"{VARIABLES[-1]} names the certificates to trust"


def _trusted() -> ssl.SSLContext:
    """Return the certificates that the environment names, or those of the client."""
    for variable in VARIABLES:
        path = os.environ.get(variable)
        if not path:
            continue
        try:
            return ssl.create_default_context(cafile=path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RemoteError(f"{variable}: {quote(path)}: {reason}") from None
    folder = os.environ.get("SSL_CERT_DIR")
    if folder and not Path(folder).is_dir():  # OpenSSL would trust nobody, and not say why
        raise RemoteError(f"SSL_CERT_DIR: {quote(folder)} is not a folder")
    return httpx2.create_ssl_context()


def _folder_of(host: str) -> Path | None:
    """Return the first folder for a registry: that of the user, or one of the system."""
    folders = list(_SYSTEM_FOLDERS)
    with contextlib.suppress(RuntimeError):  # there is no home folder
        folders.insert(0, Path.home() / ".config/containers/certs.d")
    for folder in folders:
        with contextlib.suppress(PermissionError):  # /etc/docker may be for root alone
            if (folder / host).is_dir():
                return folder / host
    return None


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # as SSLError is
        reason = getattr(error, "strerror", None) or str(error)
        raise RemoteError(f"{quote(path)} cannot be used for TLS: {quote(reason)}") from None
