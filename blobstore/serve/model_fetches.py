"""The models that are being fetched: each once for all clients, and under all names that they ask for.

Files that the store has of the commit, under any name, are not fetched if they have the digests that the upstream
lists. So what only a peer has given of a commit, or the upstream by another name, is compared and costs no bytes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError
from blobstore.serve.arrivals import Arrival
from blobstore.serve.asked import check_given, names_of
from blobstore.serve.cold_files import owners_of
from blobstore.serve.expiring import Expiring, bounded
from blobstore.serve.names import any_tag, repository_of
from blobstore.serve.refusal import Refusal, as_refusal
from blobstore.serve.rights import UPSTREAM
from blobstore.serve.unprepared import prepared
from blobstore.serve.visible import Visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.serve.asked import Asked
    from blobstore.serve.cache_limit import CacheLimit
    from blobstore.serve.find_upstream import FoundAt
    from blobstore.serve.library import Library
    from blobstore.serve.peers import PeerFiles, Peers
    from blobstore.serve.pulled import Origin
    from blobstore.store.fetched import Commit
    from blobstore.store.names import NameUpdate

_REFUSED_SECONDS: Final = 5.0
"""How long a failure is repeated to others who ask for the same."""
_MAX_FAILURES: Final = 4096
_FULL: Final = "the server fetches many other models; ask again later"


class ModelFetches:
    """The arrivals of a server, and what comes of them. Threads may share it."""

    def __init__(
        self,
        library: Library,
        peers: Peers,
        limit: CacheLimit,
        record: Callable[[FoundAt, Origin], object],
        note: Callable[..., object],
    ) -> None:
        """Fetch nothing yet.

        Args:
            library: gets the models.
            peers: see :class:`ArrivalHost`.
            limit: gives space for the files.
            record: notes durably what is being fetched. Raises BlobstoreError.
            note: called with the fields of a line for the log.
        """
        self._library, self._store, self.peers = library, library.store, peers
        self._limit, self._record, self._note = limit, record, note
        self._lock = threading.Lock()
        """Held while it is decided what arrives under which name, which may wait for the store's lock."""
        self._counting = threading.Lock()
        """Held for moments, because the thread of the event loop takes it."""
        self.running: dict[Commit, Arrival] = {}
        self.failures: Expiring[Commit, Refusal] = Expiring(_MAX_FAILURES)
        self.ended_at: dict[Commit, float] = {}
        """When this process has last fetched a commit."""
        self.models = 0
        """Those that have arrived."""
        self.errors = 0
        """Fetches, and questions about models, that have failed."""
        self.is_full: Callable[[], bool] = lambda: False
        """Returns whether no more may arrive."""
        self._fetched, self._is_closed = 0, False

    def close(self) -> list[Arrival]:
        """Begin no more. Return those that have to be stopped."""
        with self._lock:
            self._is_closed = True  # under the lock of `begin`, which starts no arrival after this
            return list(self.running.values())

    @property
    def fetched(self) -> int:
        """Bytes that the upstream has sent."""
        with self._counting:
            return self._fetched + sum(one.fetched for one in list(self.running.values()))

    def begin(
        self,
        asked: Asked,
        commit: str,
        found: FoundAt | None = None,
        *,
        is_damaged: bool = False,
    ) -> None:
        """Fetch a commit, unless the store has it or it is arriving. Then it only gets one more name.

        Without ``found``, it is not fetched. What the store has does not count if it ``is_damaged``, or if only a
        peer has given it and ``found`` is the upstream's.
        """
        key = (asked.repository, commit)
        with self._lock:
            if self._is_closed or not self._library.is_allowed(asked.reference):
                return
            arrival = self.running.get(key)
            if arrival is not None:
                arrival.names.add(asked.reference)
                if arrival.model is not None:
                    self._library.arriving[asked.reference] = arrival.model
                return
            is_wrong = is_damaged or (found is not None and self._is_replaced(key, found))
            if (not is_wrong and self._has_named(asked, commit)) or found is None:
                return
            if self.is_full():
                self.fail(key, Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message=_FULL))
                return
            name = asked.reference
            if is_damaged and asked.is_commit:  # it needs no other name
                name = next(iter(self._names_of(key)), name)
            stored = [] if is_damaged else self._stored(name, found)
            # Only now, because all before it may end early: nobody else would release the claim.
            claim = self._limit.claim("@".join(key))
            arrival = Arrival(self._store, name, asked.repository, found, claim, self, stored)
            self._library.pulled.hold(key)
            self.running[key] = arrival
            arrival.start()

    def _has_named(self, asked: Asked, commit: str) -> bool:
        """Return whether the store has a commit, and give it the name that is asked for."""
        key, pulled = (asked.repository, commit), self._library.pulled
        for reference, manifest in names_of(self._library, any_tag(asked.reference), key):
            with contextlib.suppress(BlobstoreError):
                if (origin := pulled.origin(manifest)) and not pulled.is_recorded(origin):
                    continue  # a peer had it otherwise
                if reference != asked.reference and not asked.is_commit:
                    self.name(asked.reference, manifest, key)
                return True
        return False

    def _is_replaced(self, key: Commit, found: FoundAt) -> bool:
        """Return whether the upstream has named a commit of which the store has only what a peer has given."""
        return found.giver == UPSTREAM and self._library.pulled.has_of_peer(key)

    def _names_of(self, commit: Commit) -> dict[Reference, Manifest]:
        """Return the names that fetches have given a commit."""
        repository = repository_of(*commit[0].split("/"))
        if repository is None:
            return {}
        here = prepared(lambda: self._library.placed(repository))
        return dict(names_of(self._library, here, commit))

    def _stored(self, reference: Reference, found: FoundAt) -> list[Manifest]:
        """Return what the store has of a commit, in all repositories: one may be another one that was renamed.

        Without what is restricted, if a peer has named the commit: it need not have the files.
        """
        names: dict[Reference, Manifest] = {}
        for one in self._fetched_commits():
            if one[1] == found.commit:
                names |= self._names_of(one)
        return [names[one] for one in self._readable(reference, found, names)]

    def _fetched_commits(self) -> Collection[Commit]:
        pulled = self._library.pulled
        return {*pulled.records(), *pulled.incomplete}

    def _remove(self, names: Iterable[Reference]) -> None:
        """Remove names that fetches have given."""
        with self._store.writing(), self._store.exclusive_lock():
            self._store.names.remove(*filter(self._library.pulled.names.has_given, names))

    def _misspelt(self, arrival: Arrival) -> Sequence[Reference]:
        """Return the names of the repository in another spelling, which the upstream uses no more; none if one is own."""
        if arrival.found.giver != UPSTREAM:
            return ()
        former = prepared(lambda: self._library.spelled(arrival.reference))
        if former.parts[:3] == arrival.reference.parts[:3]:
            return ()
        names = self._library.listed_tags(former)
        return () if any(map(self._library.is_own, names)) else names

    def name(self, reference: Reference, manifest: Manifest, commit: Commit) -> None:
        """Give a model that was fetched one more name, unless that is the store's own."""
        try:
            with self._library.pulled.held(commit) as is_recorded:
                if is_recorded:  # without a record, it would be for everyone
                    self._store.names.publish(self._update(reference), manifest)
        except BlobstoreError as error:
            self._note(model=str(reference), error=str(error))

    def fail(self, key: Commit, refusal: Refusal) -> None:
        """Repeat a refusal to those who ask for a commit, for a while."""
        self.failures.set(key, refusal.again(), _REFUSED_SECONDS)

    # What arrivals report

    def peer_files(
        self, arrival: Arrival, size: int
    ) -> AbstractContextManager[Iterator[PeerFiles]]:
        """See :class:`ArrivalHost`."""
        is_public = self._library.pulled.is_public(arrival.repository)
        first, shared = arrival.found.peer, partial(self._shared, arrival)
        return self.peers.files(arrival, size, first=first, others=is_public, shared=shared)

    def _shared(self, arrival: Arrival, blobs: Collection[Digest]) -> set[Digest]:
        """Return those of some blobs that are of models which all clients may read that may read what arrives."""
        owners = owners_of(self._store, blobs) if blobs else {}
        readable = self._readable(arrival.reference, arrival.found, set().union(*owners.values()))
        return {blob for blob, names in owners.items() if not readable.isdisjoint(names)}

    def _readable(
        self, reference: Reference, found: FoundAt, names: Iterable[Reference]
    ) -> set[Reference]:
        """Return those of some names that all clients may read that may read what arrives under another one."""
        opened: set[Commit] = set()
        for former, commit in self._fetched_commits() if found.giver == UPSTREAM else ():
            name = self._library.pulled.present(former)
            if commit == found.commit or (found.is_whole and name == found.repository):
                opened.add((name, commit))
        limited = map(self._library.only, self._library.limits())
        readers = [one for one in limited if one.may_have(any_tag(reference))]
        seen = prepared(partial(Visible.of(self._library, frozenset(opened)), list(names)))
        return {one for one in seen if all(reader.is_allowed(one) for reader in readers)}

    def starting(self, arrival: Arrival) -> None:
        """See :class:`ArrivalHost`."""
        check_given(self._library, arrival.reference)
        if not self._misspelt(arrival):
            self._store.names.check_name(arrival.reference)

    def files_selected(self, arrival: Arrival, origin: Origin) -> None:
        """See :class:`ArrivalHost`."""
        self._record(arrival.found, origin)

    def files_listed(self, arrival: Arrival) -> None:
        """See :class:`ArrivalHost`."""
        with self._lock:
            if arrival.model is not None:
                for reference in arrival.names:
                    self._library.arriving[reference] = arrival.model

    def update_of(self, arrival: Arrival) -> NameUpdate:
        """See :class:`ArrivalHost`."""
        if names := self._misspelt(arrival):
            self._remove(names)
        return self._update(arrival.reference)

    def _update(self, reference: Reference) -> NameUpdate:
        # What changes after it is not replaced.
        with self._store.writing(), self._store.exclusive_lock():
            check_given(self._library, reference)
            self._library.pulled.names.giving(reference)
            return replace(self._store.names.seen(reference), is_fetched=True)

    def count_error(self) -> None:
        """Count a question to the upstream that has failed."""
        with self._counting:
            self.errors += 1

    def ended(self, arrival: Arrival) -> None:
        """See :class:`ArrivalHost`."""
        key = (arrival.repository, arrival.commit)
        self._library.distrust(arrival.repository, arrival.wrong_etags)
        if arrival.created is not None:
            # What the commit was before may have had more files, which are missing now.
            former = self._library.prepared_artifacts(arrival.reference)
            several = [it for it in former if it.origin and it.origin.commit == arrival.commit]
            self._library.forget_all(arrival.created.digest, *(one.model for one in several))
            self._library.tags.list_again(arrival.reference)
            with contextlib.suppress(BlobstoreError):
                data, manifest = self._store.parse(arrival.reference)
                if Digest.of(data) == arrival.created.digest:  # nobody has replaced it since
                    for reference in arrival.names - {arrival.reference}:
                        self.name(reference, manifest, key)
            bounded(self.ended_at)[key] = time.monotonic()
        with self._lock:
            for reference in arrival.names:
                self._library.arriving.pop(reference, None)
            with self._counting:
                del self.running[key]
                self._fetched += arrival.fetched
                self.errors += arrival.error is not None
            self._library.pulled.release(key)
            self.models += arrival.created is not None
            if arrival.error is not None:
                self.fail(key, as_refusal(arrival.error))
        self._note(
            model=str(arrival.reference),
            commit=arrival.commit,
            fetched=arrival.fetched,
            written=arrival.created.bytes_written if arrival.created else 0,
            seconds=round(time.monotonic() - arrival.begun, 3),
            error=str(arrival.error or ""),
        )
