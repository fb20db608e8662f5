"""Asks a server that speaks the Hub's protocol: the Hub, a mirror of it, or ``blobstore serve``.

``create`` and ``serve --upstream`` ask for everything by this client. The Hub's own library reads bodies without an
end, and waits as long as a server asks it to, which a request to stop does not end.

A token goes to the server alone, and not to where it redirects. Nothing that it says is believed: sizes are
limits, and digests are compared. Redirects lead to http and https only, and never from https to http.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote as percent_encoded
from urllib.parse import urlsplit

from blobstore.core import interrupts, limits, strict_json
from blobstore.core.escape import quote, quote_place
from blobstore.core.file_kinds import HEAD
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobDamaged, DamagedSource, RemoteError, RemoteRefused
from blobstore.http import protocol
from blobstore.http.protocol import Request, TransientError
from blobstore.http.rules import Rule
from blobstore.sources.hub_listing import COMMIT, Entries, entries_of, listing_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from blobstore.http.protocol import Reply
    from blobstore.http.retry import Patience, Retry

REFUSALS: Final = (401, 403, 404, 410, 451)
"""Statuses for something that does not exist, or that this client may not have."""
ANSWER: Final = Rule(is_hint=False, success=(200,), absent=REFUSALS)
_FILE: Final = Rule(is_hint=False, success=(200, 206), absent=REFUSALS)
_MAX_PAGES: Final = 2000
"""Pages of a list; each page of the Hub has a thousand files."""
_LIST_SECONDS: Final = 3600.0
"""Seconds after which no further page of a list is asked for."""


def is_server_url(text: str) -> bool:
    """Return whether a text is an http or https URL without a login, a query or a fragment."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.username is None
            and not (parts.query or parts.fragment)
            and text.isascii()
            and text.isprintable()
            and " " not in text
        )
    except ValueError:
        return False


class HubClient:
    """Asks one server for one user. Threads may share it. Its connections end with it."""

    def __init__(
        self,
        url: str,
        authorization: str,
        patience: Patience,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect to nothing yet. ``authorization`` is a header; empty for none. Each request has ``headers``."""
        parts = urlsplit(url)
        self._url = url
        # Not above: a server without an upstream needs no HTTP client.
        with optional_libraries():
            from blobstore.http.transport import Transport
        self._transport = Transport(
            parts.netloc,
            plain_http=parts.scheme == "http",
            find_login=lambda _: None,
            limiter=None,
            patience=patience,
            authorization=authorization,
            headers=headers,
        )
        self.close = weakref.finalize(self, self._transport.close)

    def abort(self) -> None:
        """End all requests now, from any thread: they raise Cancelled."""
        self._transport.abort()

    def retry(self) -> Retry:
        """Return an iterator over attempts; see :class:`Retry`."""
        return self._transport.retry()

    @property
    def has_answered(self) -> bool:
        """Whether the server has answered anything."""
        return self._transport.has_answered

    def commit(self, repository: str, revision: str | None) -> str:
        """Ask for the commit that a revision is now.

        Raises:
            RemoteRefused: there is no such revision, or this user may not read it.
            RemoteError: the server cannot be reached, sends too much, or is not a Hub.
        """
        at = f"/revision/{percent_encoded(revision, safe='')}" if revision else ""
        page = next(self._pages(f"{repository}{at}", _LIST_SECONDS))
        try:
            commit: str = strict_json.loads_any(page)["sha"]
            if COMMIT.fullmatch(commit):
                return commit
        except (LookupError, TypeError, ValueError):
            pass
        raise self._malformed(repository)

    def entries(self, repository: str, commit: str) -> Entries:
        """Return the files of a commit, in the form of the cache of the Hub's library. Raises as :meth:`commit`."""
        path = f"{repository}/tree/{commit}?recursive=true"
        pages = self._pages(path, _LIST_SECONDS)
        budget = limits.Budget(limits.HUB_LISTING, "the list of files of the Hub")
        try:
            entries = dict(entries_of(pages, budget))
            listing_of(entries.items())  # whether they are sound
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._malformed(repository) from None
        return entries

    def pieces(
        self, repository: str, commit: str, name: str, begin: int, size: int
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of a file from ``begin`` on, which is before its end at ``size``, and at most one piece beyond it.

        Raises:
            TransientError: the connection was lost, or the server is busy.
            DamagedSource: the file has another size. Otherwise as :meth:`commit`.
        """
        headers = {"range": protocol.range_of(begin, size)} if begin else {}
        request = self._file_request(repository, commit, name, headers)
        with self._transport.send(request) as response:
            self._check(response.status_code, response.headers)
            try:
                span = protocol.span_of(response.status_code, response.headers, begin, size, size)
            except BlobDamaged as error:
                raise DamagedSource(
                    f"{request.what}: {error.message}", advice="try again"
                ) from None
            yield from _expected(self._transport.pieces(response), span, request.what)

    def first_bytes(self, repository: str, commit: str, name: str, size: int) -> bytes:
        """Return as many first bytes of a file as say what it is.

        They are not verified, so they may only decide what is not fetched. Raises as :meth:`pieces`.
        """
        end = min(size, HEAD)
        request = self._file_request(repository, commit, name, {"range": protocol.range_of(0, end)})

        def read() -> bytes:
            with self._transport.send(request) as response:
                self._check(response.status_code, response.headers)
                return b"".join(self._transport.span(request, response, 0, end, size))

        return interrupts.call(read)

    def _pages(self, path: str, seconds: float) -> Iterator[bytes]:
        """Yield the pages of an answer. A caller drops one before it asks for the next."""
        following: str | None = f"{self._url}/api/models/{path}"
        until = time.monotonic() + seconds
        for _ in range(_MAX_PAGES):
            if following is None:
                return
            if time.monotonic() > until:
                raise RemoteError(f"{quote(path)}: {quote(self._url)} sends the list too slowly")
            request = Request(what=quote(path), method="GET", url=following, rule=ANSWER)
            reply = self._transport.fetch(request, limits.HUB_LISTING.one)
            self._judge(reply)
            following = protocol.next_page(reply.headers.get("link"), reply.url)
            pages = [reply.body]
            del reply  # else it would stay in memory while the next one is fetched
            yield pages.pop()
        raise RemoteError(f"{quote_place(f'{self._url}/{path}')} has more than {_MAX_PAGES} pages")

    def _judge(self, reply: Reply) -> None:
        """Look at each answer of the API. Raises as :meth:`_check`."""
        self._check(reply.status, reply.headers)

    def _check(self, status: int, headers: Any) -> None:
        """Raise RemoteRefused for an answer that refuses."""
        if status in REFUSALS:
            code = headers.get("x-error-code", "")
            raise RemoteRefused(f"{quote(self._url)} refuses", status=status, code=code)

    def _malformed(self, what: str) -> RemoteError:
        return RemoteError(
            f"{quote(what)}: {quote(self._url)} is not a Hub, or its answer is malformed",
            advice="check its address",
        )

    def _file_request(
        self, repository: str, commit: str, name: str, headers: Mapping[str, str]
    ) -> Request:
        url = self._file_url(repository, commit, name)
        return Request(
            what=f"file {quote(name)}", method="GET", url=url, rule=_FILE, headers=headers
        )

    def _file_url(self, repository: str, commit: str, name: str) -> str:
        return f"{self._url}/{repository}/resolve/{commit}/{percent_encoded(name)}"


def _expected(received: Iterator[bytes], span: protocol.Span, what: str) -> Iterator[bytes]:
    """Yield the bytes of a span of a body, and at most one piece beyond it: the caller counts them and rejects the excess."""
    skip, left = span
    for whole in received:
        piece = whole[skip:]
        skip -= len(whole) - len(piece)
        left -= len(piece)
        if piece:
            yield piece
        if left < 0:
            return
    if left > 0:
        raise TransientError(f"{what}: the response ended early")
