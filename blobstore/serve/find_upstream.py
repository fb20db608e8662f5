"""Chooses the server to ask for a model that the store lacks: the upstream, or else a peer that has it.

The upstream decides which commit a revision is and which clients may read it. Without an upstream, or while it cannot
be reached, the first peer that has the model decides which commit it is. A token of a client never goes to a peer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core import capacity
from blobstore.core.escape import quote
from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import RemoteError, UsageError
from blobstore.http.protocol import TransientError
from blobstore.serve.description import NOTHING, Description
from blobstore.serve.messages import PEER
from blobstore.serve.peers import PATIENCE, Peer
from blobstore.serve.refusal import Refusal
from blobstore.serve.rights import EVERYONE, UPSTREAM, client_of
from blobstore.serve.upstream import IMPATIENT, PATIENT, Upstream, UpstreamClient

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from blobstore.http.retry import Patience
    from blobstore.serve.peers import Peers
    from blobstore.serve.rights import Rights

_SILENT_SECONDS: Final = 5.0
"""Seconds until an upstream that was silent is asked again: more than an impatient request waits."""


class FoundAt(NamedTuple):
    """A commit, and the server that has it."""

    repository: str
    """Its name there, which may be another than the one that was asked for."""
    commit: str
    upstream: Upstream
    token: str
    """The token for the server; empty for none."""
    peer: Peer | None
    """The server as a peer, if it is ``blobstore serve``, which has blobs."""
    is_peer: bool = False
    """Whether it is in the list of peers."""
    description: Description = NOTHING
    is_whole: bool = True
    """Whether the upstream has shown that the client may read all of the repository."""
    proven: tuple[str, ...] = ()
    """Other commits that the store has, and the upstream lets the client read."""

    @property
    def giver(self) -> str:
        """The source of this answer: the upstream, or the URL of a peer."""
        return self.peer.name if self.is_peer and self.peer else UPSTREAM

    def client(self, patience: Patience | None = None) -> UpstreamClient:
        """Return a client of the server. It is connected to nothing yet."""
        headers = {PEER: "1"} if self.is_peer else {}
        patience = patience or (PATIENCE if self.is_peer else PATIENT)
        return UpstreamClient(self.upstream, self.token, patience, headers)


class Upstreams:
    """An upstream, peers, or both. Threads may share it."""

    def __init__(self, upstream: Upstream | None, token: str, peers: Peers, rights: Rights) -> None:
        """Ask nothing yet. ``token`` asks the upstream for clients that have none of their own."""
        self._upstream, self.token, self._rights = upstream, token, rights
        self.peers = peers
        self.has_upstream = upstream is not None
        """Whether an upstream decides what a tag is even if the store has a model of that name."""
        self._lock = threading.Lock()
        self._clients: set[UpstreamClient] = set()
        self._is_closed = False
        self._answered = self._silent_until = 0.0
        """When the upstream last answered, and until when it counts as silent; 0 if it does not."""

    def close(self) -> None:
        """End the requests of other threads: they raise Cancelled."""
        with self._lock:
            self._is_closed = True
            clients = list(self._clients)
        for client in clients:
            client.abort()

    @contextlib.contextmanager
    def _client(self, found: FoundAt, patience: Patience | None = None) -> Iterator[UpstreamClient]:
        """Yield a client of a server, until :meth:`close`."""
        with found.client(patience) as client:
            with self._lock:
                # Under the lock of `close`: either that aborts this client, or this fails.
                if self._is_closed:
                    raise Cancelled("stopped")
                self._clients.add(client)
            try:
                with contextlib.nullcontext() if found.is_peer else self._heard(patience):
                    yield client
            finally:
                with self._lock:
                    self._clients.discard(client)

    @contextlib.contextmanager
    def _heard(self, patience: Patience | None) -> Iterator[None]:
        """Note whether the upstream answers the question of the block.

        It is silent if it has answered nothing since it was asked. Then only patient questions wait for it, of which
        there are few, and one other from time to time. All others raise RemoteError at once.
        """
        begun = time.monotonic()
        with self._lock:
            if self._silent_until:
                if patience is IMPATIENT and begun < self._silent_until:
                    raise RemoteError("the upstream was silent a moment ago")
                self._silent_until = begun + _SILENT_SECONDS
        is_silence = False
        try:
            yield
        except RemoteError as error:
            is_silence = isinstance(error.__cause__, TransientError) and not error.status
            raise
        finally:
            with self._lock:
                if not is_silence:
                    self._answered, self._silent_until = time.monotonic(), 0.0
                elif self._answered < begun:
                    self._silent_until = time.monotonic() + _SILENT_SECONDS

    def find(
        self,
        repository: str,
        revision: str,
        token: str,
        patience: Patience,
        *,
        with_peers: bool = True,
    ) -> FoundAt:
        """Find the commit of a revision, and check that the client with ``token`` may read it.

        Raises:
            Refusal: there is no such revision, or this client may not read it.
            RemoteError: no server can be reached, or none is a Hub.
        """
        failure: RemoteError | None = None
        if self._upstream is not None:
            try:
                return self._ask(
                    self._upstream, repository, revision, token or self.token, patience
                )
            except RemoteError as error:
                failure = error
        peers = self.peers.alive() if with_peers else []
        # All at once, so that all that are silent together cost one timeout, which a client waits for.
        pool = WorkerPool(min(len(peers), capacity.PROBES.most) or 1, None, 0)
        for one in pool.run(peers, lambda peer: self._ask_peer(peer, repository, revision)):
            if one is not None:
                return one
        raise failure or Refusal(404, "RepoNotFound")

    def _ask_peer(self, peer: Peer, repository: str, revision: str) -> FoundAt | None:
        """Return the commit of a revision at a peer; None if it has none, or does not answer."""
        place = Upstream(peer.name)
        one = FoundAt(repository, revision, place, peer.token(), peer, is_peer=True)
        try:
            with self._client(one, replace(PATIENCE, attempts=1)) as client:
                there = client.revision(repository, revision)
        except Refusal:
            return None
        except RemoteError as error:
            self.peers.failed(peer, error)
            return None
        # Any other name may be that of a model of the upstream.
        is_spelling = there.repository.casefold() == repository.casefold()
        one = one._replace(repository=there.repository if is_spelling else repository)
        return one._replace(commit=there.commit, description=there.description)

    def user(self, token: str) -> str:
        """Return the name of a client at the upstream, which there is. Raises as :meth:`find`."""
        if self._upstream is None:
            raise Refusal(404)
        with self._client(FoundAt("", "", self._upstream, token, None), IMPATIENT) as client:
            return client.user()

    def check_public(self, found: FoundAt) -> Collection[str]:
        """Check that the upstream gives a commit to everyone, also without the server's token.

        Return the commits that it gives, if these show that the repository is for everyone; otherwise none.

        Raises as :meth:`find`.
        """
        with self._client(found._replace(token=""), IMPATIENT) as client:
            there = client.revision(found.repository, found.commit)
            stored = self._rights.unproven(found.repository, self._rights.public)
            is_whole = client.check_access(found.repository, there)
            if not is_whole or not all(client.has(found.repository, one) for one in stored):
                return ()
            return {found.commit, *stored}

    def _ask(
        self, upstream: Upstream, repository: str, revision: str, token: str, patience: Patience
    ) -> FoundAt:
        found = FoundAt(repository, revision, upstream, token, None)
        with self._client(found, patience) as client:
            try:
                there = client.revision(repository, revision)
            except Refusal as refusal:
                if not refusal.is_of_repository:
                    client.check_repository(repository)
                raise
            asked = repository
            if there.repository != repository:
                # It was renamed, or has another case. Only the answer about the name that the upstream gives counts.
                repository, there = there.repository, client.revision(there.repository, revision)
                if there.repository != repository:
                    raise RemoteError(f"{quote(repository)}: the upstream calls it by other names")
            # Before rights are given: what the store has by a former name is of this repository.
            self._rights.note_called(asked, repository)
            is_whole = client.check_access(repository, there)
            asker = EVERYONE if token == self.token else client_of(token)
            stored = self._rights.unproven(repository, asker) if is_whole else []
            proven = tuple(commit for commit in stored if client.has(repository, commit))
            is_whole = is_whole and len(proven) == len(stored)
            peer = None
            if client.is_blobstore:
                with contextlib.suppress(UsageError):  # it has a path
                    peer = Peer.parse(upstream.url, token)
        found = found._replace(repository=repository, commit=there.commit)
        return found._replace(
            peer=peer, description=there.description, is_whole=is_whole, proven=proven
        )
