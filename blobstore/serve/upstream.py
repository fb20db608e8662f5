"""Asks an upstream that speaks the Hub's protocol: the Hub, a mirror of it, or another ``blobstore serve``.

A token goes to the upstream alone, and not to where it redirects. Nothing that it says is believed: sizes are
limits, and digests are compared. Redirects lead to http and https only, and never from https to http.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote as percent_encoded
from urllib.parse import unquote, urlsplit

from blobstore.core import limits, strict_json
from blobstore.core.escape import escape, quote, quote_place
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobDamaged, DamagedSource, RemoteError, UsageError
from blobstore.http import protocol
from blobstore.http.protocol import Request, TransientError
from blobstore.http.retry import Patience
from blobstore.http.rules import Rule
from blobstore.serve.description import NOTHING, Description
from blobstore.serve.names import is_name
from blobstore.serve.refusal import REFUSALS, Refusal
from blobstore.sources.hub_listing import COMMIT, Listing, entries_of, listing_of, pages_of
from blobstore.sources.sharded import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.http.retry import Retry

PATIENT: Final = Patience(attempts=8, longest=120)
"""How long a fetch waits for an upstream that is busy or gone."""
IMPATIENT: Final = Patience(attempts=1, stall=4)
"""The same if the store has an older answer, which clients get while they still wait."""
_ANSWER: Final = Rule(is_hint=False, success=(200,), absent=REFUSALS)
_FILE: Final = Rule(is_hint=False, success=(200, 206), absent=REFUSALS)
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_LOOK: Final = Rule(is_hint=False, success=(200, *_REDIRECTS), absent=REFUSALS)
_MAIN: Final = "main"
"""The branch that each repository of the Hub has."""
_MAX_REDIRECTS: Final = 5
_LIST_SECONDS: Final = 300.0
"""Seconds after which no further page of a list is asked for, since other fetches wait for the place of this one."""
_OPEN: Final = (".md", ".gitattributes")
"""Endings of the files of a gated repository that the Hub may give to everyone."""


class Revision(NamedTuple):
    """The commit of a revision of a repository now, and its files."""

    commit: str
    names: Sequence[str]
    """Those of its files."""
    repository: str
    """The upstream's name of the repository, which may be asked for by another name."""
    description: Description = NOTHING

    @property
    def probe(self) -> str:
        """The name of a file of weights, which shows whether a client may read the model; empty if the model has no such file."""
        return next((name for name in self.names if name.endswith(WEIGHTS)), "")


class Upstream(NamedTuple):
    """The address of an upstream."""

    url: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the upstream at a URL.

        Raises:
            UsageError: it is not an http or https URL, or has a login, a query or a fragment.
        """
        try:
            parts = urlsplit(text)
            is_sound = (
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
            is_sound = False
        if not is_sound:
            raise UsageError(
                f"not the URL of an upstream: {quote_place(text)}",
                advice="give https://HOST or http://HOST",
            )
        return cls(text.rstrip("/"))


class UpstreamClient:
    """Asks an upstream for one client. Threads may share it; close it."""

    def __init__(
        self,
        upstream: Upstream,
        token: str,
        patience: Patience = PATIENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect to nothing yet. ``token`` is empty for an anonymous client; each request has ``headers``."""
        self.is_blobstore = False
        """Whether the last answer came from a server of our kind."""
        parts = urlsplit(upstream.url)
        self._url = self._answered = upstream.url
        # Not above: a server without an upstream needs no HTTP client.
        with optional_libraries():
            from blobstore.http.transport import Transport
        self._transport = Transport(
            parts.netloc,
            plain_http=parts.scheme == "http",
            find_login=lambda _: None,
            limiter=None,
            patience=patience,
            authorization=f"Bearer {token}" if token else "",
            headers=headers,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def abort(self) -> None:
        """End all requests now, from any thread: they raise Cancelled."""
        self._transport.abort()

    def retry(self) -> Retry:
        """Return an iterator over attempts; see :class:`Retry`."""
        return self._transport.retry()

    def revision(self, repository: str, revision: str) -> Revision:
        """Ask for the commit of a revision.

        Raises:
            Refusal: there is no such revision, or this client may not read it.
            RemoteError: the upstream cannot be reached, or is not a Hub.
        """
        (page,) = islice(
            self._pages(f"{repository}/revision/{percent_encoded(revision, safe='')}"), 1
        )
        try:
            info = strict_json.loads_any(page)
            commit, names = info["sha"], [one["rfilename"] for one in info["siblings"]]
            is_sound = COMMIT.fullmatch(commit) and all(isinstance(name, str) for name in names)
        except (LookupError, TypeError, ValueError):
            raise self._malformed(repository) from None
        if not is_sound:
            raise self._malformed(repository)
        # A branch may be called like a commit.
        if COMMIT.fullmatch(revision) and commit != revision:
            raise Refusal(404, "RevisionNotFound")
        if not names:
            raise Refusal(404, "EntryNotFound", "the model has no files")
        name = self._name_of(info, repository)
        return Revision(commit, names, name, Description.from_info(info))

    def check_access(self, repository: str, revision: Revision) -> bool:
        """Return whether this client may read a whole repository, and not only this revision of it.

        The Hub gives the card of a gated repository to everyone. Only a large file shows who may read the others.

        Raises as :meth:`revision`, also if the client may not read the files of the revision.
        """
        probe = revision.probe or self._large_file(repository, revision.commit)
        self._check_file(repository, revision.commit, probe or revision.names[0])
        return bool(probe)

    def has(self, repository: str, commit: str) -> bool:
        """Return whether the upstream gives a commit to this client. Raises RemoteError."""
        try:
            return self.revision(repository, commit).commit == commit
        except Refusal:
            return False

    def _large_file(self, repository: str, commit: str) -> str:
        """Return the name of the largest file that may be gated; empty if the model has no such file."""
        large = [
            one
            for name, one in self.listing(repository, commit).items()
            if one.algorithm == "sha256" and not name.lower().endswith(_OPEN)
        ]
        return max(large, key=lambda one: one.size).name if large else ""

    def _check_file(self, repository: str, commit: str, name: str) -> None:
        url = self._file_url(repository, commit, name)
        for redirects in range(_MAX_REDIRECTS):
            request = Request(what=repository, method="HEAD", url=url, rule=_LOOK)
            reply = self._transport.fetch(request)
            self._check(reply.status, reply.headers, repository)
            is_answer = reply.status not in _REDIRECTS
            # Some mirrors state no commit. After a redirect, such an answer may be a page where people log in.
            if reply.headers.get("x-repo-commit") == commit or (is_answer and not redirects):
                return
            if is_answer:
                break
            url = protocol.resolve(reply.headers.get("location"), url)
            if not protocol.has_same_origin(url, self._url):
                break
        raise RemoteError(
            f"{quote(repository)}: {quote(self._url)} does not send its files as a Hub"
        )

    def user(self) -> str:
        """Return the name of the client at the upstream. Raises as :meth:`revision`."""
        url = f"{self._url}/api/whoami-v2"
        reply = self._transport.fetch(
            Request(what="the token", method="GET", url=url, rule=_ANSWER), limits.ERROR.one
        )
        self._check(reply.status, reply.headers)
        try:
            name = strict_json.loads_any(reply.body)["name"]
        except (ValueError, LookupError, TypeError):
            raise self._malformed("the owner of a token") from None
        return escape(name, 100) if isinstance(name, str) else ""

    def check_repository(self, repository: str) -> None:
        """Raise Refusal if this client may not read a repository, so that it learns nothing about its revisions."""
        try:
            there = self.revision(repository, _MAIN)
            self.check_access(there.repository, there)
        except Refusal as refusal:
            if refusal.is_of_repository:
                raise

    def listing(self, repository: str, commit: str) -> Listing:
        """Return the files of a commit. Raises as :meth:`revision`."""
        try:
            pages = self._pages(f"{repository}/tree/{commit}?recursive=true")
            budget = limits.Budget(limits.UPSTREAM_LISTING, "the upstream's list of files")
            return listing_of(entries_of(pages, budget))
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._malformed(repository) from None

    def pieces(
        self, repository: str, commit: str, name: str, begin: int, size: int
    ) -> Iterator[bytes]:
        """Yield the bytes of a file from ``begin`` on, which is before its end at ``size``.

        Raises:
            TransientError: the connection was lost, or the upstream is busy.
            DamagedSource: the file has another size. Otherwise as :meth:`revision`.
        """
        headers = {"range": protocol.range_of(begin, size)} if begin else {}
        url = self._file_url(repository, commit, name)
        what = f"file {quote(name)}"
        request = Request(what=what, method="GET", url=url, rule=_FILE, headers=headers)
        with self._transport.send(request) as response:
            self._check(response.status_code, response.headers)
            try:
                span = protocol.span_of(response.status_code, response.headers, begin, size, size)
            except BlobDamaged as error:
                raise DamagedSource(f"{what}: {error.message}") from None
            yield from _expected(self._transport.pieces(response), span, what)

    def _pages(self, path: str) -> Iterator[bytes]:
        """Yield the pages of an answer."""
        url = f"{self._url}/api/models/{path}"
        until = time.monotonic() + _LIST_SECONDS

        def ask(url: str) -> tuple[bytes, str | None]:
            if time.monotonic() > until:
                raise RemoteError(f"{quote(path)}: {quote(self._url)} sends the list too slowly")
            request = Request(what=quote(path), method="GET", url=url, rule=_ANSWER)
            reply = self._transport.fetch(request, limits.UPSTREAM_LISTING.one)
            # Before the status is judged, because a refusal has the name to which it was redirected.
            self._answered = reply.url
            self._check(reply.status, reply.headers, self._name_of({}, ""))
            self.is_blobstore = reply.headers.get("server") == "blobstore"
            return reply.body, protocol.next_page(reply.headers.get("link"), reply.url)

        return pages_of(url, ask)

    def _name_of(self, info: Mapping[str, Any], asked: str) -> str:
        """Return the upstream's name of a repository: as it states, or else as in its redirect.

        If neither is valid, return the name that was asked for.
        """
        base = f"{self._url}/api/models/"
        place = self._answered if self._answered.startswith(base) else base + asked
        target = unquote(place.removeprefix(base).partition("/revision/")[0])
        return next((one for one in (info.get("id"), target) if is_name(one)), asked)

    @staticmethod
    def _check(status: int, headers: Any, repository: str = "") -> None:
        if status in REFUSALS:
            refusal = Refusal(status, headers.get("x-error-code", ""))
            refusal.repository = repository
            raise refusal

    def _malformed(self, what: str) -> RemoteError:
        return RemoteError(
            f"{quote(what)}: {quote(self._url)} is not a Hub, or its answer is malformed",
            status=HTTPStatus.BAD_GATEWAY,
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
