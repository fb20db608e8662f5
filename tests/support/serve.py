"""Asks the core of ``blobstore serve`` without a socket, and reads the parts of its responses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from blobstore.serve.access import Access
from blobstore.serve.library import Library
from blobstore.serve.messages import BlobPart, Part, Request, Response
from blobstore.serve.routes import answer
from blobstore.serve.unprepared import prepared
from blobstore.store.local import LocalStore


def ask(
    library: Library,
    target: str,
    method: str = "GET",
    *,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    access: Access | None = None,
    shared: Library | None = None,
) -> Response:
    """Return the response, after doing what has to be done first."""
    request = Request(method, target, headers or {}, body)
    return prepared(lambda: answer(request, library, access or Access(), shared=shared))


def body_of(store: LocalStore, response: Response) -> bytes:
    """Return the bytes that a response would send."""
    return read_parts(store, response.parts)


def read_parts(store: LocalStore, parts: Iterable[Part]) -> bytes:
    """Return the bytes of parts."""
    found = []
    for part in parts:
        if isinstance(part, bytes):
            found.append(part)
            continue
        assert isinstance(part, BlobPart)
        buffer = bytearray(part.length)
        store.read_into(part.digest, part.size, part.begin, memoryview(buffer))
        found.append(bytes(buffer))
    return b"".join(found)


def json_of(response: Response) -> Any:
    """Return the decoded body of a response that has only bytes."""
    return json.loads(b"".join(part for part in response.parts if isinstance(part, bytes)))
