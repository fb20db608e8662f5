"""A server whose responses are those of ``blobstore serve`` after a change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from blobstore.serve.library import Library
from blobstore.serve.messages import PEER
from blobstore.store.local import LocalStore
from tests.support.raw_server import Answer, RawServer, Received, reply
from tests.support.serve import ask, body_of

Change = Callable[[Received, bytes], Answer]


@contextlib.contextmanager
def altered(store: LocalStore, change: Change) -> Iterator[RawServer]:
    """Run a server; ``change`` gets each request and the bytes of the response to it."""
    library = Library(store)

    def answer(request: Received) -> Answer:
        found = ask(library, request.path, request.method, headers=request.headers)
        headers: dict[str, Any] = {
            name.lower().replace("-", "_"): text for name, text in found.headers.items()
        }
        return change(request, reply(found.status, body_of(store, found), **headers))

    with RawServer(answer) as server:
        yield server


def is_marked(request: Received) -> bool:
    """Return whether a request says that it comes from a peer."""
    return request.headers.get(PEER) == "1"
