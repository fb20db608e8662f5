"""Serves the page of a store on this machine, with its verification and the work that is going on.

The server listens on the loopback interface alone, which all users and programs of the machine reach. So
its address has a random token, and requests without it are refused. So are requests for another host, as
DNS rebinding makes them, and requests that browsers say another site has caused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, NotFound
from blobstore.pages.ancestry import find_parents
from blobstore.pages.largest_models import read_largest
from blobstore.pages.model_view import model_views
from blobstore.pages.shell import render_page
from blobstore.pages.text import shown
from blobstore.pages.weight_statistics import measure_model
from blobstore.pages.write import page_data, page_title
from blobstore.serve.access import Access
from blobstore.serve.messages import Response, bytes_response, json_response
from blobstore.serve.refusal import Refused
from blobstore.serve.server import run_server
from blobstore.serve.targets import InvalidTarget, parse_target
from blobstore.store.scan import scan_folder
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.messages import Request
    from blobstore.serve.targets import Target
    from blobstore.store.local import LocalStore

HOST = "127.0.0.1"
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}
_TOKEN_BYTES = 24


def serve_page(
    store: LocalStore,
    references: Sequence[Reference],
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
        MissingLibrary: aiohttp is not installed.
        BlobstoreError: the port is taken.
    """
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    store = store.holder(*references)
    run_server(
        LivePage(store, references, token=token).answer,
        store,
        host=HOST,
        port=port,
        on_ready=lambda address: on_ready(f"{address}/{token}/"),
        in_threads=True,
    )


class LivePage:
    """Answers the requests of the page, whose paths begin with ``token``. Threads may share it."""

    def __init__(self, store: LocalStore, references: Sequence[Reference], *, token: str) -> None:
        self._store = store
        self._references = references
        self._token = token
        self._access = Access(hosts=())
        # One at a time: each reads the whole store, or whole models, on all processors.
        self._reading, self._measuring = threading.Lock(), threading.Lock()
        self._routes: dict[tuple[str, str], Callable[[Target], Response]] = {
            ("GET", ""): self._page,
            ("GET", "data"): lambda _: json_response(self._data()),
            ("GET", "state"): lambda _: json_response(live_state(store)),
            ("POST", "measure"): self._measure,
        }

    def answer(self, request: Request, metrics: Callable[[], str]) -> Response:
        """Return the response to a request."""
        del metrics
        try:
            response = self._response(request, parse_target(request.target))
        except Refused as refused:
            response = refused.response
        except InvalidTarget as error:
            response = json_response({"error": str(error)}, 400)
        except BlobstoreError as error:
            status = 404 if isinstance(error, NotFound) else 500
            response = json_response({"error": shown(error)}, status)
        return Response(response.status, {**response.headers, **_HEADERS}, response.parts)

    def _response(self, request: Request, target: Target) -> Response:
        self._access.client(request, target)
        _check(target, self._token)
        path = "/".join(target.segments[1:])
        act = self._routes.get((request.method, path))
        if act is not None:
            return act(target)
        status = 405 if any(known == path for _, known in self._routes) else 404
        return json_response({"error": "the page has nothing at this address"}, status)

    def _data(self) -> dict[str, Any]:
        with self._reading:
            return page_data(self._store, self._references) | {"live": live_state(self._store)}

    def _page(self, target: Target) -> Response:
        del target
        data = self._data()
        text = render_page(page_title(data), data, is_live=True)
        return bytes_response(text.encode(), media_type="text/html; charset=utf-8")

    def _measure(self, target: Target) -> Response:
        name = target.first("model")
        disk, _, _ = read_largest(self._store, self._references)
        found = next((item for item in disk.entries if shown(item) == name), None)
        if found is None:
            raise NotFound(f"the store has no model {quote(name)}")
        parents = find_parents(disk)
        base = parents[found].reference if found in parents else None
        with self._measuring:
            measured = {found: measure_model(self._store, found, base)}
        views = model_views(disk, [found], parents, measured)
        return json_response(views[name])


def _check(target: Target, token: str) -> None:
    """Raise Refused for a request without the token, before anything is read for it."""
    if not hmac.compare_digest(target.segments[0].encode(), token.encode()):
        message = (
            "the address has no valid token; open the one that 'blobstore page --serve' printed"
        )
        raise Refused(json_response({"error": message}, 403))


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
