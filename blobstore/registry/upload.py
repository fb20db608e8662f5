"""The upload of one blob, which goes on where the server says that it is.

A blob of up to 64 MiB is one PUT. A larger one is sent in parts, so that it can be resumed after the
process was killed. Where a proxy limits the size of a request, the user chooses smaller parts. Only the newest
``Location`` of an upload is valid, and only the ``Range`` of its status says what the server has: distribution
2.8 ignores the ``Content-Range`` of a part and appends it.
"""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from blobstore.errors import BlobDamaged, RemoteError, RemoteRefused
from blobstore.http import protocol
from blobstore.http.protocol import Reply, Request, TransientError
from blobstore.registry import response_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.http.rules import Rule
    from blobstore.http.transport import Transport

PART: Final = 64 * 2**20
_MAX_FAILURES: Final = 2
"""Failures in a row after which an upload begins again."""
_HASHED: Final = 20 * 10**6
"""Bytes per second at which a server is assumed to hash a blob before it answers."""


class UploadSession(NamedTuple):
    """The place at which an upload continues."""

    url: str
    offset: int
    """Bytes that the server has."""


class Upload:
    """One blob on its way into a repository."""

    def __init__(
        self,
        transport: Transport,
        blobs: str,
        scopes: frozenset[str],
        digest: Digest,
        size: int,
        pieces: Callable[[int], Iterable[bytes | memoryview]],
        on_session: Callable[[UploadSession], object],
        part_size: int | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            transport: sends the requests.
            blobs: the URL of the repository's blobs.
            scopes: what the upload needs access to.
            digest: the digest of the blob.
            size: its bytes.
            pieces: yields its bytes from an offset on.
            on_session: called after each part.
            part_size: bytes of one request at most; by default 64 MiB, unless the server takes no parts.
        """
        self._transport = transport
        self._blobs = blobs
        self._scopes = scopes
        self._digest = digest
        self._size = size
        self._pieces = pieces
        self._on_session = on_session
        self._part_size = part_size or PART
        self._has_parts = size > self._part_size
        self._must_have_parts = part_size is not None and self._has_parts
        self._restarts = transport.patience.attempts
        self._what = f"upload of blob {digest.short}"

    def run(self, session: UploadSession | None) -> int:
        """Upload the blob; go on with ``session`` if the server still knows it.

        Returns:
            The bytes that did not have to be sent, because of ``session``.

        Raises:
            RemoteRefused: the registry refuses it.
            RemoteError: the registry cannot be reached, or fails.
            BlobDamaged: the pieces end early.
        """
        is_resumed = session is not None
        # Not known until the server has said how much it has.
        resumed = None if is_resumed else 0
        furthest = 0
        retry = self._transport.retry()
        for attempt in retry:
            with attempt:
                if retry.failures == _MAX_FAILURES:  # a full disk, for one, may have damaged it
                    session, resumed = None, 0
                if is_resumed and session is not None:
                    session = self._status(session)
                    offset = session.offset if session is not None else 0
                    resumed = offset if resumed is None else resumed
                    # A server that has the complete blob has forgotten its upload.
                    if session is None and self._is_there():
                        return resumed
                if session is None:
                    begun = self._request(
                        "POST", f"{self._blobs}/uploads/", response_rules.UPLOAD_START
                    )
                    session = UploadSession(self._location(begun), 0)
                # A refusal from now on may be due to bytes that the server has lost.
                is_resumed = is_resumed or session.offset > 0
                try:
                    while self._has_parts and session.offset < self._size:
                        session = self._send_part(session)
                        self._on_session(session)
                        # Parts that are sent again after a restart are no progress, or this might never end.
                        if session.offset > furthest:
                            furthest = session.offset
                            retry.progress()
                    self._finish(session)
                except TransientError:
                    # So the next attempt asks how much has arrived.
                    is_resumed = True
                    raise
                except RemoteRefused as error:
                    session, resumed = None, 0
                    self._begin_again(error, is_resumed=is_resumed)
                    # This happens once: without parts, the next refusal is final.
                    is_resumed = False
                    continue
                return resumed or 0
        raise AssertionError("unreachable")

    def _begin_again(self, error: RemoteRefused, *, is_resumed: bool) -> None:
        """Choose how to go on after a refusal, or raise it."""
        if response_rules.is_gone(error) and self._restarts:
            # A server that forgets each upload after some parts makes progress for ever.
            self._restarts -= 1
            raise TransientError(error.message, status=error.status, code=error.code) from error
        is_too_large = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        must_have_parts = self._must_have_parts or is_too_large
        if must_have_parts or not (is_resumed or self._has_parts):
            raise error
        self._has_parts = False  # the server takes no parts, or lost some of what it had

    def _status(self, session: UploadSession) -> UploadSession | None:
        """Return the place at which the upload continues, or None if the server has forgotten it."""
        try:
            # The address was noted when the registry may have had another one.
            url = protocol.resolve_upload(session.url, self._transport.base)
            reply = self._request("GET", url, response_rules.UPLOAD_STATUS)
            offset = protocol.bytes_received(reply.headers.get("range"))
            if not 0 < offset <= self._size or reply.status in response_rules.UPLOAD_STATUS.absent:
                return None
            location = reply.headers.get("location")
            new = protocol.resolve_upload(location, url) if location else url
            return UploadSession(new, offset)
        except TransientError:
            raise
        except RemoteError:
            return None

    def _is_there(self) -> bool:
        """Return whether the blob has arrived, although the response to its last byte was lost."""
        request = Request(
            what=self._what,
            method="HEAD",
            url=f"{self._blobs}/{self._digest}",
            rule=response_rules.BLOB_LOOK,
            scopes=self._scopes,
        )
        return self._transport.ask(request) is not None

    def _send_part(self, session: UploadSession) -> UploadSession:
        length = min(self._part_size, self._size - session.offset)
        reply = self._request(
            "PATCH",
            session.url,
            response_rules.UPLOAD_PART,
            body=(session.offset, length),
        )
        # The header may be missing; then all bytes count as received.
        received = reply.headers.get("range")
        offset = protocol.bytes_received(received) if received else session.offset + length
        if offset != session.offset + length:
            raise RemoteError(f"{self._what}: the server says that it has {offset} bytes")
        return UploadSession(self._location(reply), offset)

    def _finish(self, session: UploadSession) -> None:
        self._request(
            "PUT",
            protocol.with_query(session.url, f"digest={self._digest}"),
            response_rules.UPLOAD_END,
            body=(session.offset, self._size - session.offset),
        )

    def _location(self, reply: Reply) -> str:
        return protocol.resolve_upload(reply.headers.get("location"), reply.url)

    def _request(
        self, method: str, url: str, rule: Rule, *, body: tuple[int, int] = (0, 0)
    ) -> Reply:
        """Send a request once, with the bytes of the blob from an offset, so many of them."""
        offset, length = body
        headers = {"content-type": "application/octet-stream"}
        # A PUT with all bytes needs no Content-Range.
        if length and (offset or method == "PATCH"):
            headers["content-range"] = f"{offset}-{offset + length - 1}"
        request = Request(
            what=self._what,
            method=method,
            url=url,
            rule=rule,
            headers=headers if method != "GET" else {},
            body=None if method == "GET" else lambda: self._bytes(offset, length),
            size=length,
            scopes=self._scopes,
            # The server may hash all of the blob before it answers.
            timeout=self._size / _HASHED,
        )
        return self._transport.exchange(request)

    def _bytes(self, offset: int, length: int) -> Iterator[bytes]:
        if not length:
            return
        left = length
        pieces = self._pieces(offset)
        with contextlib.ExitStack() as stack:
            if hasattr(pieces, "close"):
                stack.callback(pieces.close)
            for piece in pieces:
                view = memoryview(piece).cast("B")[:left]
                self._transport.limit(len(view))
                yield cast("bytes", view)  # the types of httpx2 are narrower than what it takes
                left -= len(view)
                if not left:
                    return
        raise BlobDamaged(f"blob {self._digest.short} ends {left} bytes early")
