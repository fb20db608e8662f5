"""Starts the server of ``blobstore serve`` in a thread of a program."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from blobstore.serve.serve import serve
from blobstore.serve.server import DRAIN_SECONDS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from blobstore.store.local import StoreLike


class RunningServer:
    """A server that a program has started. It ends with :meth:`close`, or at the end of a ``with`` block."""

    def __init__(self, url: str, close: Callable[[], None]) -> None:
        self.url = url
        """Its address, such as ``http://127.0.0.1:8080``."""
        self._close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunningServer({self.url!r})"

    def close(self) -> None:
        """Stop the server, and wait until it has ended. That of :func:`start_server` finishes its responses first.

        Raises:
            Exception: the one that has ended the server before.
        """
        self._close()


def start_server(
    *,
    store: StoreLike = None,
    host: str = "127.0.0.1",
    port: int = 0,
    allow: Sequence[str] = (),
    token_file: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    anonymous: bool = False,
    upstream: str | None = None,
    upstream_token_file: str | os.PathLike[str] | None = None,
    drain: float = DRAIN_SECONDS,
    log: Callable[[str], object] | None = None,
) -> RunningServer:
    """Serve the models of a store over HTTP in a thread, as ``blobstore serve`` does, and return once the port is open.

    Args:
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        host: the address to listen on; one that other machines reach needs ``token_file`` or ``anonymous``.
        port: 0 for any free one.
        allow: globs of the names that are served; by default all.
        token_file: a file of tokens, one on each line, of which a request must have one.
        tls_cert: a file with the certificate of the server, in PEM, for TLS. It is read again when it changes.
        tls_key: a file with its key.
        anonymous: serve everyone who reaches the address.
        upstream: the URL of a Hub that has the models that the store lacks.
        upstream_token_file: a file with the token for ``upstream``.
        drain: seconds that responses may take after the server was closed.
        log: called on another thread with lines of JSON for requests and errors.

    Returns:
        the server, with its ``url``.

    Raises:
        MissingLibrary: aiohttp is not installed.
        UsageError: others reach the address, and neither ``token_file`` nor ``anonymous`` is given.
        BlobstoreError: the port is taken, or a token file, a certificate or a key cannot be read.
    """
    stop, started, ended = threading.Event(), Future[str](), Future[None]()

    def run() -> None:
        try:
            serve(
                store,
                host=host,
                port=port,
                allow=allow,
                token_file=token_file,
                tls_cert=tls_cert,
                tls_key=tls_key,
                anonymous=anonymous,
                upstream=upstream,
                upstream_token_file=upstream_token_file,
                drain=drain,
                on_ready=started.set_result,
                stop=stop.is_set,
                log=log,
            )
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            (ended if started.done() else started).set_exception(error)
        else:
            ended.set_result(None)

    def close() -> None:
        stop.set()
        ended.result()

    threading.Thread(target=run, name="blobstore-server", daemon=True).start()
    try:
        return RunningServer(started.result(), close)
    except BaseException:  # as by Ctrl-C
        stop.set()
        raise
