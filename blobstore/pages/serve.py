"""Serves the page of a store on this machine, with its verification and the work that is going on.

The server listens on the loopback interface alone, which all users and programs of the machine reach. So
its address has a random token, and requests without it are refused. So are requests for another host, as
DNS rebinding makes them, and requests that browsers say another site has caused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, NotFound
from blobstore.operations.describe.disk_usage import read_disk
from blobstore.pages.measure import measure_model
from blobstore.pages.model_view import model_views
from blobstore.pages.parents import find_parents
from blobstore.pages.shell import render_page
from blobstore.pages.text import shown
from blobstore.pages.write import page_data
from blobstore.store.scan import scan_folder
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

HOST = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost")
_OWN_SITE = {"same-origin", "none"}
"""What browsers say of requests that this page makes, and of addresses that a person types."""
_TOKEN_BYTES = 24


def serve_page(
    store: LocalStore,
    references: Sequence[Reference] = (),
    *,
    port: int,
    on_ready: Callable[[str], object],
) -> None:
    """Serve the page until the process is asked to stop.

    Args:
        store: the store.
        references: the models whose tensors are shown; none means all that fit.
        port: 0 for any free one.
        on_ready: called with the address, which has the token, once the port is open.

    Raises:
        MissingLibrary: starlette or uvicorn is not installed.
        BlobstoreError: the port is taken.
    """
    import socket

    with optional_libraries():
        import uvicorn

        token = secrets.token_urlsafe(_TOKEN_BYTES)
        app = page_app(store, references, token=token)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise BlobstoreError(f"cannot listen on {HOST}:{port}: {error.strerror}") from error
        listener.listen()
        config = uvicorn.Config(app, log_level="error", access_log=False)
        on_ready(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")

        class Server(uvicorn.Server):
            # A request to stop that came before the server had its own handlers.
            async def on_tick(self, counter: int) -> bool:
                return interrupts.is_requested() or await super().on_tick(counter)

        Server(config).run(sockets=[listener])
        interrupts.check()


def page_app(store: LocalStore, references: Sequence[Reference] = (), *, token: str) -> Starlette:
    """Return the server's application, whose paths begin with ``token``."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    # One at a time: each reads the whole store, or whole models, on all processors.
    reading, measuring = threading.Lock(), threading.Lock()
    headers = {
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
    }

    def answered(
        act: Callable[[Request], Response],
    ) -> Callable[[Request], Response]:
        @functools.wraps(act)
        def answer(request: Request) -> Response:
            try:
                response = _refusal(request, token) or act(request)
            except BlobstoreError as error:
                status = 404 if isinstance(error, NotFound) else 500
                response = JSONResponse({"error": shown(error)}, status_code=status)
            response.headers.update(headers)
            return response

        return answer

    def read() -> dict[str, Any]:
        with reading:
            return page_data(store, references) | {"live": live_state(store)}

    @answered
    def page(request: Request) -> Response:  # noqa: ARG001 - starlette's signature
        data = read()
        return HTMLResponse(render_page(f"{data['root']} \u2013 blobstore", data, is_live=True))

    @answered
    def data(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse(read())

    @answered
    def state(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse(live_state(store))

    @answered
    def measure(request: Request) -> Response:
        name = request.query_params.get("model", "")
        disk = read_disk(store)
        found = next((item for item in disk.entries if shown(item) == name), None)
        if found is None:
            raise NotFound(f"the store has no model {quote(name)}")
        parents = find_parents(disk)
        base = parents[found].reference if found in parents else None
        with measuring:
            measured = {found: measure_model(store, found, base)}
        return JSONResponse(model_views(disk, [found], parents, measured, disk.owners())[name])

    return Starlette(
        routes=[
            Route("/{token}/", page),
            Route("/{token}/data", data),
            Route("/{token}/state", state),
            Route("/{token}/measure", measure, methods=["POST"]),
            Route("/{other:path}", state),  # has no token, so it is refused
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(_HOSTS), www_redirect=False)
        ],
    )


def _refusal(request: Request, token: str) -> Response | None:
    """Return the answer to a request that must not be served, before anything is read for it."""
    from starlette.responses import JSONResponse

    if request.headers.get("sec-fetch-site", "none") not in _OWN_SITE:
        return JSONResponse({"error": "another site has caused this request"}, 403)
    given = request.path_params.get("token", "")
    if hmac.compare_digest(given.encode(), token.encode()):
        return None
    message = "the address has no valid token; open the one that 'blobstore page --serve' printed"
    return JSONResponse({"error": message}, 403)


def live_state(store: LocalStore) -> dict[str, Any]:
    """Return a stamp that changes with the store, and the work that processes do in it now."""
    parts: list[Any] = [VerifiedBlobs(store).saved_at]
    for reference in store.references():
        version = store.manifest_version(reference)
        parts.append([str(reference), version and list(version)])
    for path in (store.folder("blobs"), store.folder("cold")):
        with contextlib.suppress(OSError):
            parts.append(path.stat().st_mtime_ns)
    written = 0
    for entry in scan_folder(store.folder("temporary")):
        with contextlib.suppress(OSError):
            written += entry.stat(follow_symlinks=False).st_size
    work = [
        {"process": int(start), "blobs": len(digests)}
        for name, digests in store.read_leases().held.items()
        if (start := name.partition("-")[0]).isdecimal() and int(start) != os.getpid()
    ]
    stamp = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return {"stamp": stamp, "work": work, "unfinished": written}
