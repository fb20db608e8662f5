"""The operation ``serve``: offers the models of a store over HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.core.files import FileState, read_regular
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, UsageError
from blobstore.serve.access import Access, parse_tokens
from blobstore.serve.library import Library
from blobstore.serve.listener import read_certificate
from blobstore.serve.log import Log
from blobstore.serve.routes import answer
from blobstore.serve.server import DRAIN_SECONDS, run_server
from blobstore.serve.visible import Visible
from blobstore.serve.watched import Watched
from blobstore.store.cold import load_decoder
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from blobstore.serve.messages import Request, Response
    from blobstore.serve.pull_through import PullThrough

_MAX_TOKEN_FILE = 1 << 20
_WRITING_SECONDS = 10
"""How long a token file without a newline at its end may still be being written."""
FRESH_SECONDS = 300.0
"""An answer of the upstream holds for this time, in seconds."""


def serve(
    store: StoreLike = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    allow: Sequence[str] = (),
    token_file: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    anonymous: bool = False,
    upstream: str | None = None,
    upstream_token_file: str | os.PathLike[str] | None = None,
    peers: Sequence[str] = (),
    fresh: float = FRESH_SECONDS,
    max_size: int | None = None,
    prewarm: str | os.PathLike[str] | None = None,
    drain: float = DRAIN_SECONDS,
    on_ready: Callable[[str], object] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], object] | None = None,
) -> None:
    """Serve the models of a store to clients of the Hub and of registries until the process is asked to stop.

    Args:
        store: the store or its folder; by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        host: the address to listen on. All programs of this machine reach a loopback address, others do not.
        port: 0 for any free one.
        allow: globs of the names that are served; none means all.
        token_file: a file of tokens, one on each line, of which a request must have one. Before it, the line may have
            ``name=NAME`` for the log, and ``models=GLOB,...`` for the models that it opens. The file is read again when
            it changes; faults by then are reported to ``log``.
        tls_cert: a file with the server's certificate and those that lead to its issuer, in PEM. The server speaks
            TLS then. It is read again when it or ``tls_key`` changes; faults by then are reported to ``log``.
        tls_key: a file with the key of the certificate, in PEM and without a password.
        anonymous: serve everyone, under any host name: a proxy that asks for tokens, for example.
        upstream: the URL of a Hub, or of another server, that has the models that the store lacks. They are
            fetched when a client first asks for them, and stay in the store.
        upstream_token_file: a file with the token that ``upstream`` is asked with for clients that have
            none of their own.
        peers: URLs of other servers, which are asked for blobs before ``upstream`` is; without one, for models
            that the store lacks.
        fresh: seconds after which ``upstream`` is asked again what a tag is, and whether a client may read it.
        max_size: bytes that the models of ``upstream`` may have in the store; those that were not used for
            the longest time are removed. None for no limit.
        prewarm: a lock file of :func:`lock_models`, whose models are fetched at the start. The server is not ready
            before they are there. What ``upstream`` has comes from it, and everything else as by :func:`sync_models`.
        drain: seconds that responses may still take after the process was asked to stop. It has ended then.
        on_ready: called with the server's address, once the port is open.
        stop: called from time to time; True ends the server as a signal does.
        log: called with lines of JSON for requests and errors.

    Raises:
        UsageError: other machines would reach the server, and neither ``token_file`` nor ``anonymous`` is
            given; or a token file has no tokens, or a pattern is too long, or ``upstream`` or a peer is no URL;
            or a certificate and its key do not belong together.
        MissingLibrary: aiohttp is not installed, or httpx2, which an upstream or a peer needs.
        StoreBusy: another process fetches models into this store.
        BlobstoreError: the port is taken, or a token file, a certificate or a key cannot be read.
    """
    is_local = _is_loopback(host)
    if not is_local and token_file is None and not anonymous:
        raise UsageError(
            f"other machines reach the address {quote(host)}",
            advice="give token_file, or anonymous=True to serve everyone",
        )
    if token_file is not None and anonymous:
        raise UsageError("tokens are for servers that are not anonymous; leave one of both out")
    if upstream is None and (upstream_token_file is not None or max_size is not None):
        raise UsageError("a token for an upstream, and a size of its models, need an upstream")
    # What it fetches gets names, which are given in a store itself.
    fetches = upstream is not None or peers
    lines = Log(log)
    own = LocalStore.of(store)
    below = [own.shared] if own.shared is not None and not fetches else []
    library, shared = Library(own, allow), [Library(one, allow, lines.note) for one in below]
    fixed = Access(hosts=(host.lower(),) if is_local and not anonymous else None)
    tokens: Watched[Access] | None = None
    if token_file is not None:
        file = local_path(token_file, "source")
        tokens = Watched([file], partial(_read_tokens, file), lines.note)

    def access() -> Access:
        return fixed if tokens is None else tokens.value

    library.limits = lambda: {one.models for one in access().tokens or () if one.models}
    tls = _certificate(tls_cert, tls_key, lines)
    watched = [one for one in (tokens, tls) if one is not None]

    load_decoder()
    with contextlib.ExitStack() as stack:
        stack.callback(lines.flush)  # of what is noted after the server has ended
        through = None
        if fetches:
            token = _own_token(upstream_token_file, lines)
            through = _pull_through(
                library, upstream, peers, fresh=fresh, token=token, max_size=max_size, log=lines
            )
            stack.enter_context(contextlib.closing(through))

        def respond(request: Request, metrics: Callable[[], str]) -> Response:
            def all_metrics() -> str:
                return metrics() + (through.metrics() if through else "")

            return answer(request, library, access(), all_metrics, through, *shared)

        stack.callback(_prewarmed(prewarm, library, through, lines))
        threading.Thread(target=_look_ahead, args=(library, *shared), daemon=True).start()
        run_server(
            respond,
            library.store,
            host=host,
            port=port,
            on_ready=on_ready,
            stop=stop,
            tidy=lambda: [*map(Library.release_idle, (library, *shared))],
            look=lambda: [one.look() for one in watched],
            identify=lambda request: access().name(request),
            tls=lambda: None if tls is None else tls.value,
            log=lines,
            heals=upstream is not None,
            drain=drain,
        )


def _own_token(file: str | os.PathLike[str] | None, log: Log) -> str:
    """Return the first token of a file; empty without a file."""
    if file is None:
        return ""
    path = local_path(file, "source")
    own: Watched[Access] = Watched([path], partial(_read_tokens, path), log.note)
    return next(one.secret.decode() for one in own.value.tokens or ())


def _pull_through(
    library: Library,
    upstream: str | None,
    peers: Sequence[str],
    *,
    fresh: float,
    token: str,
    max_size: int | None,
    log: Log,
) -> PullThrough:
    with optional_libraries():
        import blobstore.http.transport  # noqa: F401 - httpx2 is missed here, not by the first request
        from blobstore.serve.peers import Peer
        from blobstore.serve.pull_through import PullThrough
        from blobstore.serve.upstream import Upstream
    return PullThrough(
        library,
        None if upstream is None else Upstream.parse(upstream),
        peers=[Peer.parse(url) for url in dict.fromkeys(peers)],
        fresh=fresh,
        token=token,
        max_size=max_size,
        note=log.note,
    )


def _prewarmed(
    file: str | os.PathLike[str] | None, library: Library, through: PullThrough | None, log: Log
) -> Callable[[], object]:
    """Begin to fetch the models of a lock file, if there is one, and return what ends that."""
    if file is None:
        return lambda: None
    from blobstore.serve.prewarm import Prewarm

    return Prewarm(file, library, through, log.note).close


def _look_ahead(*libraries: Library) -> None:
    for library in libraries:
        with contextlib.suppress(BlobstoreError, OSError):  # a response to a client reports it
            Visible.of(library).look_ahead()


def _certificate(
    chain: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None, log: Log
) -> Watched[ssl.SSLContext] | None:
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise UsageError(
            "TLS needs both a certificate and its key", advice="give tls_cert and tls_key"
        )
    pair = local_path(chain, "source"), local_path(key, "source")
    return Watched(pair, lambda _: (read_certificate(*pair), ""), log.note)


def _read_tokens(path: Path, before: Access | None) -> tuple[Access, str]:
    """Return the access that a file of tokens gives, and its fault. Raises BlobstoreError if nothing was read before.

    A token that is no longer in the file is refused, even if the file has faults, unless it may just be being written.
    """
    try:
        data, state = read_regular(path, _MAX_TOKEN_FILE), FileState.of(path)
    except OSError as error:
        wrong = f"cannot read the token file {quote(path)}: {error.strerror}"
    except BlobstoreError as error:
        wrong = str(error)
    else:
        age = time.time() - (state.modified / 1e9 if state else 0)
        if before is not None and not data.endswith(b"\n") and 0 <= age < _WRITING_SECONDS:
            fault = "the token file has no newline at its end; what it had before holds for"
            return before, f"{quote(path)}: {fault} {_WRITING_SECONDS} s"
        tokens, wrong = parse_tokens(data)
        return Access(tokens), wrong and f"{quote(path)}: {wrong}"
    if before is None:
        raise BlobstoreError(wrong)
    return Access(()), wrong


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
