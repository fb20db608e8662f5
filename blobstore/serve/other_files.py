"""Fetches files of a fetched model that its import left out, each when a client asks for it.

The import takes small files, and weights that it can split into tensors. Other files of the upstream are stored as
they are: one of several quantizations, weights for another library, or a format that is not known.
"""

from __future__ import annotations

import contextlib
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core import capacity
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, RemoteError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.add_file import add_file
from blobstore.serve.arriving_file import ArrivingFile
from blobstore.serve.expiring import Expiring
from blobstore.serve.fetch import Fetch
from blobstore.serve.messages import Content, FilePart
from blobstore.serve.names import any_tag
from blobstore.serve.refusal import Refusal, as_refusal
from blobstore.serve.rights import EVERYONE, client_of
from blobstore.serve.unprepared import NotFetched, prepared, wait_for
from blobstore.store.fetched import fetched_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from blobstore.manifests.model import Manifest
    from blobstore.serve.arriving_file import Claim
    from blobstore.serve.asked import Asked
    from blobstore.serve.cache_limit import CacheLimit
    from blobstore.serve.find_upstream import FoundAt
    from blobstore.serve.library import Library, ServedModel
    from blobstore.sources.hub_listing import ListedFile
    from blobstore.store.fetched import Commit


_Key = tuple[str, str, str]
"""A repository, a commit, and the name of a file."""
_REFUSED_SECONDS: Final = 5.0
"""How long a failure is repeated to clients that ask for the same file."""
_MAX_FAILURES: Final = 4096
_MOST: Final = capacity.ARRIVALS.most
_FULL: Final = "the server fetches many other models; ask again later"
_NOT_HERE: Final = "this server lacks the file, and the upstream does not give it now"


class OtherFile(Fetch):
    """A file that is being fetched, and added to the models of its commit."""

    def __init__(
        self,
        library: Library,
        repository: Reference,
        name: str,
        listed: ListedFile,
        found: FoundAt,
        claim: Claim,
        turn: threading.Lock,
        host: OtherFiles,
    ) -> None:
        """Fetch nothing yet.

        Args:
            library: has the models.
            repository: their repository in the store, with any tag.
            name: that of the repository at the upstream.
            listed: the file.
            found: the version, and the server that has it.
            claim: where the file is written to, and how many bytes.
            turn: held while the models of the repository get a file, each with those of the others.
            host: gets a report of the end.
        """
        super().__init__(library.store, name, found, claim)
        self.name = listed.name
        self.begun = time.monotonic()
        self._library, self._host = library, host
        self.at, self._listed, self.turn = repository, listed, turn
        self._file: ArrivingFile | None = None

    def content(self) -> Content | None:
        """Return the file as it arrives; None before it is listed, and after the fetch has ended."""
        file = self._file
        return None if file is None else Content((FilePart(file, 0, file.size),))

    def work(self) -> None:
        """See :class:`Fetch`."""
        self.make_folder()
        file = ArrivingFile(self._listed, self._claim)
        self._claim.extend(file.size, file.find())
        self.files[self.name] = self._file = file
        # After the file is in the table, because clients that wait for this ask for it at once.
        self.listed.set()
        self.fetch(file)
        # Before the tags are listed, because a model that is arriving gets them only in the end.
        self._host.wait_for_model(self)
        with self.turn:
            if self._add(file.path):
                return
            self._host.name_again(self)
            if not self._add(file.path):
                # The file stays for the next attempt.
                message = f"{self.repository}, which file {quote(self.name)} is of, is not there"
                raise RemoteError(message)

    def _add(self, path: Path) -> list[Reference]:
        names = self._library.listed_tags(self.at)
        return add_file(self._store, names, self._is_wanted, self.name, path)

    def report(self) -> None:
        """See :class:`Fetch`."""
        self._file = None
        self._host.ended(self)

    def _is_wanted(self, reference: Reference, manifest: Manifest) -> bool:
        with contextlib.suppress(BlobstoreError):  # another one is damaged
            return self._library.pulled.names.has_given(reference) and (
                fetched_from(manifest) == (self.repository, self.commit)
            )
        return False


class OtherFiles:
    """The files that are being fetched. Threads may share them."""

    def __init__(
        self,
        library: Library,
        limit: CacheLimit,
        arrivals: Mapping[tuple[str, str], Fetch],
        ask: Callable[[Asked, str], FoundAt | None],
        name: Callable[[Reference, Manifest, Commit], object],
        note: Callable[..., object],
    ) -> None:
        """Fetch nothing yet.

        Args:
            library: has the models.
            limit: gives space for the files.
            arrivals: the models that arrive now, by repository and commit.
            ask: finds a server with a commit, if the client with this token may read it now.
            name: gives a fetched model one more name.
            note: called with the fields of a line for the log.
        """
        self._library, self._limit, self._arrivals = library, limit, arrivals
        self._ask, self._name, self._note = ask, name, note
        self._fetched, self._is_closed = 0, False
        self._lock, self._counting = threading.Lock(), threading.Lock()
        """As those of :class:`ModelFetches`."""
        self._running: dict[_Key, OtherFile] = {}
        self._failures = Expiring[tuple[_Key, str], Refusal](_MAX_FAILURES)
        """By the client that it is about; everyone's are of fetches."""

    def close(self) -> list[OtherFile]:
        """Begin no more. Return those that have to be stopped."""
        with self._lock:
            self._is_closed = True
            return list(self._running.values())

    def is_full(self) -> bool:
        """Return whether as many models and files arrive as may at once."""
        return len(self._arrivals) + len(self._running) >= _MOST

    @property
    def fetched(self) -> int:
        """Bytes that the upstream has sent."""
        with self._counting:
            return self._fetched + sum(one.fetched for one in list(self._running.values()))

    def content(self, asked: Asked, token: str, model: ServedModel, listed: ListedFile) -> Content:
        """Return a file of a model that the store lacks, as it arrives.

        Raises:
            Refusal: it cannot be fetched.
            NotFetched: it has to be.
        """
        key = asked.repository, model.commit, listed.name
        fetch = self._running.get(key)
        if fetch is None:
            for client in (EVERYONE, client_of(token)):
                if (failure := self._failures.get((key, client))) is not None:
                    raise failure.again()
            raise NotFetched(self._begin, asked, token, listed)
        content = fetch.content()
        if content is None:
            raise NotFetched(wait_for, fetch.ended if fetch.listed.is_set() else fetch.listed)
        return content

    def _begin(self, asked: Asked, token: str, listed: ListedFile) -> None:
        key = asked.repository, asked.revision, listed.name
        found = self._ask(asked, token)
        if found is None:
            # The upstream may know another client's token.
            self._fail(key, Refusal(HTTPStatus.BAD_GATEWAY, message=_NOT_HERE), client_of(token))
            return
        if self.is_full():
            self._fail(key, Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message=_FULL))
            return
        at = any_tag(asked.reference)
        with self._lock:
            if self._is_closed or key in self._running:
                return
            claim = self._limit.claim("@".join(key))
            turns = (one.turn for one in self._running.values() if one.at == at)
            turn = next(turns, None) or threading.Lock()
            fetch = OtherFile(self._library, at, asked.repository, listed, found, claim, turn, self)
            self._running[key] = fetch
            # Under the lock, because `close` joins the threads of all fetches that it finds.
            fetch.start()

    def wait_for_model(self, fetch: OtherFile) -> None:
        """Wait until the model of a file has arrived, if it is arriving. Called on the thread of the fetch."""
        arrival = self._arrivals.get((fetch.repository, fetch.commit))
        if arrival is not None:
            arrival.ended.wait()

    def name_again(self, fetch: OtherFile) -> None:
        """Give the commit of a file a name of its own, because others have got its names while the file arrived."""
        at, commit = fetch.at, fetch.commit
        key = fetch.repository, commit

        def manifests() -> list[Manifest | None]:
            several = self._library.at_commit(at, commit)
            return [self._library.version(one).manifest for one in several]

        for manifest in prepared(manifests):
            if manifest is not None and fetched_from(manifest) == key:
                self._name(Reference(*at.parts[:3], commit), manifest, key)

    def ended(self, fetch: OtherFile) -> None:
        """Serve the file from the store, or repeat its failure, from now on. Called on the thread of the fetch."""
        key = fetch.repository, fetch.commit, fetch.name
        # Before the fetch is forgotten: a client that asks then must get the new model.
        self._library.distrust(fetch.repository, fetch.wrong_etags)
        self._library.tags.list_again(fetch.at)
        if fetch.error is not None:
            self._fail(key, as_refusal(fetch.error))
        # Last: until here, clients find this fetch, or its failure, and begin no other.
        with self._lock, self._counting:
            del self._running[key]
            self._fetched += fetch.fetched
        self._note(
            model=fetch.repository,
            commit=fetch.commit,
            file=fetch.name,
            fetched=fetch.fetched,
            seconds=round(time.monotonic() - fetch.begun, 3),
            error=str(fetch.error or ""),
        )

    def _fail(self, key: _Key, refusal: Refusal, client: str = EVERYONE) -> None:
        self._failures.set((key, client), refusal.again(), _REFUSED_SECONDS)
