"""Asks an upstream that speaks the Hub's protocol: the Hub, a mirror of it, or another ``blobstore serve``.

``sources/hub_client`` has what ``create`` asks, too. Here is who may read what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote as percent_encoded
from urllib.parse import unquote

from blobstore.core import limits, strict_json
from blobstore.core.escape import escape, quote, quote_place
from blobstore.errors import RemoteError, UsageError
from blobstore.http import protocol
from blobstore.http.protocol import Request
from blobstore.http.retry import Patience
from blobstore.http.rules import Rule
from blobstore.serve.description import NOTHING, Description
from blobstore.serve.names import is_name
from blobstore.serve.refusal import Refusal
from blobstore.sources.hub_client import ANSWER, REFUSALS, HubClient, is_server_url
from blobstore.sources.hub_listing import COMMIT, Listing, entries_of, listing_of
from blobstore.sources.sharded import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.http.protocol import Reply

PATIENT: Final = Patience(attempts=8, longest=120)
"""How long a fetch waits for an upstream that is busy or gone."""
IMPATIENT: Final = Patience(attempts=1, stall=4)
"""The same if the store has an older answer, which clients get while they still wait."""
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
        if not is_server_url(text):
            raise UsageError(
                f"not the URL of an upstream: {quote_place(text)}",
                advice="give https://HOST or http://HOST",
            )
        return cls(text.rstrip("/"))


class UpstreamClient(HubClient):
    """Asks an upstream for one client."""

    def __init__(
        self,
        upstream: Upstream,
        token: str,
        patience: Patience = PATIENT,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect to nothing yet. ``token`` is empty for an anonymous client; each request has ``headers``."""
        super().__init__(upstream.url, f"Bearer {token}" if token else "", patience, headers)
        self.is_blobstore = False
        """Whether the last answer came from a server of our kind."""
        self._answered = upstream.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def revision(self, repository: str, revision: str) -> Revision:
        """Ask for the commit of a revision.

        Raises:
            Refusal: there is no such revision, or this client may not read it.
            RemoteError: the upstream cannot be reached, or is not a Hub.
        """
        path = f"{repository}/revision/{percent_encoded(revision, safe='')}"
        page = next(self._pages(path, _LIST_SECONDS))
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
            Request(what="the token", method="GET", url=url, rule=ANSWER), limits.ERROR.one
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
            pages = self._pages(f"{repository}/tree/{commit}?recursive=true", _LIST_SECONDS)
            budget = limits.Budget(limits.UPSTREAM_LISTING, "the upstream's list of files")
            return listing_of(entries_of(pages, budget))
        except (AttributeError, LookupError, TypeError, ValueError):
            raise self._malformed(repository) from None

    def _judge(self, reply: Reply) -> None:
        # Before the status is judged, because a refusal has the name to which it was redirected.
        self._answered = reply.url
        self._check(reply.status, reply.headers, self._name_of({}, ""))
        self.is_blobstore = reply.headers.get("server") == "blobstore"

    def _name_of(self, info: Mapping[str, Any], asked: str) -> str:
        """Return the upstream's name of a repository: as it states, or else as in its redirect.

        If neither is valid, return the name that was asked for.
        """
        base = f"{self._url}/api/models/"
        place = self._answered if self._answered.startswith(base) else base + asked
        target = unquote(place.removeprefix(base).partition("/revision/")[0])
        return next((one for one in (info.get("id"), target) if is_name(one)), asked)

    def _check(self, status: int, headers: Any, repository: str = "") -> None:
        if status in REFUSALS:
            refusal = Refusal(status, headers.get("x-error-code", ""))
            refusal.repository = repository
            raise refusal
