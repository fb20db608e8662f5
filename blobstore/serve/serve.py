"""Workflow: serve the models of a store over HTTP."""

from __future__ import annotations

import ipaddress
import time
from functools import partial
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, read_regular
from blobstore.errors import BlobstoreError, UsageError
from blobstore.serve.access import Access, parse_tokens
from blobstore.serve.answer import answer
from blobstore.serve.library import Library
from blobstore.serve.server import run_server
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from blobstore.serve.messages import Request, Response

_MAX_TOKEN_FILE = 1 << 20
_LOOK_SECONDS = 1.0


def serve(
    store: StoreLike = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    allow: Sequence[str] = (),
    token_file: str | os.PathLike[str] | None = None,
    anonymous: bool = False,
    on_ready: Callable[[str], object] = lambda _: None,
    log: Callable[[str], object] | None = None,
) -> None:
    """Serve the models of a store to clients of the Hub and of registries until the process is asked to stop.

    Args:
        store: the store or its folder; by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        host: the address to listen on. All programs of this machine reach a loopback address, others do not.
        port: 0 for any free one.
        allow: globs of the names that are served; none means all.
        token_file: a file of tokens, one on each line, of which a request must have one. It is read again
            when it changes.
        anonymous: serve everyone, under any host name: a proxy that asks for tokens, for example.
        on_ready: called with the server's address, once the port is open.
        log: called with lines of JSON for requests and errors.

    Raises:
        UsageError: other machines would reach the server, and neither ``token_file`` nor ``anonymous`` is
            given; or the token file has no tokens, or a pattern is too long.
        MissingLibrary: aiohttp is not installed.
        BlobstoreError: the port is taken, or the token file cannot be read.
    """
    is_local = _is_loopback(host)
    if not is_local and token_file is None and not anonymous:
        raise UsageError(
            f"other machines reach the address {quote(host)}",
            advice="give --token-file, or --anonymous to serve everyone",
        )
    if token_file is not None and anonymous:
        raise UsageError("tokens are for servers that are not anonymous; leave one of both out")
    library = Library(LocalStore.of(store), allow)
    if token_file is not None:
        access: Callable[[], Access] = _TokenFile(token_file, log)
    else:
        fixed = Access(hosts=(host.lower(),) if is_local and not anonymous else None)
        access = lambda: fixed  # noqa: E731
    access()

    def respond(request: Request, metrics: Callable[[], str]) -> Response:
        return answer(request, library, access(), metrics)

    run_server(
        respond,
        library.store,
        host=host,
        port=port,
        on_ready=on_ready,
        tidy=partial(library.release_idle),
        log=log,
    )


class _TokenFile:
    """The access that a file of tokens gives, looked at again about once in a second."""

    def __init__(self, path: str | os.PathLike[str], log: Callable[[str], object] | None) -> None:
        from pathlib import Path

        self._path = Path(path)
        self._log = log
        self._looked = 0.0
        self._version: FileVersion | None = None
        self._access: Access | None = None

    def __call__(self) -> Access:
        """Return the access. Raises BlobstoreError or UsageError if the file was never valid."""
        now = time.monotonic()
        if self._access is None or now - self._looked > _LOOK_SECONDS:
            self._looked = now
            try:
                version = FileVersion.of_status(self._path.stat())
                if version != self._version:
                    self._version = version
                    data = read_regular(self._path, _MAX_TOKEN_FILE)
                    self._access = Access(tokens=parse_tokens(data))
            except (OSError, BlobstoreError) as error:
                # A file that is being replaced must not let everybody in, nor end the server.
                if self._access is None:
                    if isinstance(error, BlobstoreError):
                        raise
                    raise BlobstoreError(
                        f"cannot read the token file {quote(self._path)}: {error.strerror}"
                    ) from error
        assert self._access is not None  # noqa: S101
        return self._access


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
