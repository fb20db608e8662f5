"""The ledger of rights: which clients may read the models of an upstream or a peer, who said so, and until when.

Only the upstream gives rights to a repository, and only the upstream takes them back. A right opens the stored commits
that the upstream has given with it, and no other, because a repository of that name may be another one by now. If it
was asked about a revision without a file that can be gated, its answer opens that commit alone. A peer does not know
the rights of clients: its answer opens the commit that comes from it, unless the upstream has restricted the repository.

A refusal takes back every right that it contradicts: the client's, and if the client is everyone, also those that
peers have given. It says nothing about other clients. The refusal of a token says nothing about everyone, because the
token itself may be wrong. An answer to a request that was sent before a refusal gives no right.

Whether a repository is public outlives the process. It is noted from this ledger alone.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from blobstore.serve.expiring import MAX_KNOWN, bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.serve.pulled import Origin, PulledModels
    from blobstore.store.fetched import Commit

EVERYONE: Final = ""
"""Stands for all clients without a token for the upstream, for whom the server may use one of its own."""
PUBLIC: Final = "public"
"""Stands for clients for whom the upstream is asked without any token, if the server has one of its own."""
UPSTREAM: Final = ""
"""The giver of rights to whole repositories. Every other giver is a peer."""


@dataclass(frozen=True, slots=True)
class Right:
    """A client may read a repository, or a commit of it."""

    giver: str
    """The upstream, or the URL of a peer."""
    client: str
    """See :func:`client_of`."""
    repository: str
    commit: str
    """The only one that it is for; empty for all."""
    asked: float
    """When its giver was asked."""
    until: float
    proven: frozenset[str] = frozenset()
    """The commits that the upstream has given with it, and those of peers. Of a restricted repository, it opens no other."""

    @property
    def opens(self) -> frozenset[Commit]:
        """The restricted commits that it opens: none if a peer gave it."""
        proven = self.proven if self.giver == UPSTREAM else ()
        return frozenset((self.repository, commit) for commit in proven)


class Rights:
    """The rights of all clients. Threads may share it."""

    def __init__(self, pulled: PulledModels, *, has_token: bool = False) -> None:
        """Know no right. Whether a repository is public is noted in ``pulled``.

        ``has_token`` is whether the server asks for everyone with a token of its own.
        """
        self._pulled = pulled
        self.public: Final = PUBLIC if has_token else EVERYONE
        """The client whose rights say what is public."""
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._rights: dict[tuple[str, str, str], Right] = {}
        """By repository, client and commit."""
        self._refused: dict[tuple[str, str], float] = {}
        """When the upstream last refused a repository to a client."""

    def give(self, right: Right, proven: Iterable[str] = ()) -> None:
        """Note a right. A peer's right without a commit would open a whole repository, so it is ignored.

        Args:
            right: the right, without what it proves.
            proven: the commits that the upstream has given to the client with it.
        """
        if right.giver == UPSTREAM or right.commit:
            # The upstream may be away since it has said the present name.
            right = replace(right, repository=self._pulled.present(right.repository))
            with self._lock:
                repository, client = right.repository, right.client
                before = frozenset({right.commit})
                if not right.commit:
                    stored = self._pulled.called(repository)
                    before = self._proven_by(repository, client) | {
                        one.commit
                        for one in stored
                        if one.peer  # no upstream has them
                    }
                proving = replace(right, proven=before.union(proven))
                bounded(self._rights)[repository, client, right.commit] = proving

    def take_back(self, repository: str, client: str) -> None:
        """Note that the upstream refuses a repository to a client."""
        with self._lock:
            # Without these, rights that were taken back would be there again.
            if len(self._refused) >= MAX_KNOWN:
                self._rights.clear()
                self._refused.clear()
            # The time of now and not of the request, so that answers to earlier requests give nothing.
            self._refused[repository, client] = time.monotonic()
            if client == EVERYONE:
                self._refused[repository, self.public] = time.monotonic()

    def of(self, client: str, repository: str, commit: str = "") -> Right | None:
        """Return the right by which a client may read a commit now; without a commit, something of the repository."""
        is_public, repository = self._pulled.is_public(repository), self._pulled.present(repository)
        keys = [(repository, one, which) for which in ("", commit) for one in (EVERYONE, client)]
        return next(
            (it for it in self._valid(keys) if not commit or is_public or commit in it.proven), None
        )

    def has_had(self, client: str, repository: str, commit: str) -> bool:
        """Return whether a client had a right to a repository, or to a commit of it, which may have ended."""
        repository = self._pulled.present(repository)
        return any((repository, client, one) in self._rights for one in ("", commit))

    def opened(self, client: str, repository: str, commits: Iterable[str]) -> frozenset[Commit]:
        """Return what a client may read of a restricted repository, of which the store has some commits."""
        repository = self._pulled.present(repository)
        several = [(repository, one, it) for it in ("", *commits) for one in (EVERYONE, client)]
        return frozenset(commit for right in self._valid(several) for commit in right.opens)

    def is_public(self, repository: str, commit: str = "") -> bool:
        """Return whether the upstream gives a repository to those who show no token at all.

        With a commit, return whether it has given that one: it may be newer than the answer about the repository.
        """
        rights = self._valid([(repository, self.public, "")])
        return any(not commit or commit in right.proven for right in rights)

    def _valid(self, keys: Iterable[tuple[str, str, str]]) -> Iterator[Right]:
        """Yield the rights that hold now."""
        now = time.monotonic()
        for key in keys:
            right = self._rights.get(key)
            if (
                right is not None
                and (right.giver == UPSTREAM or self._pulled.is_public(right.repository))
                and now < right.until
                and right.asked > self._refused.get(key[:2], 0.0)
            ):
                yield right

    def unproven(self, repository: str, client: str) -> list[str]:
        """Return the stored commits that a right to the whole of a repository would open to a client for the first time.

        The upstream has to confirm each of them, because its repository of that name may be another one by now.
        """
        if self._pulled.is_public(repository):
            return []
        proven = self._proven_by(repository, client)
        stored = [one.commit for one in self._pulled.called(repository) if not one.peer]
        return [commit for commit in stored if commit not in proven]

    def _proven_by(self, repository: str, client: str) -> frozenset[str]:
        """Return the commits that the upstream has given to a client since it last refused the repository."""
        right = self._rights.get((repository, client, ""))
        if right is None or right.asked <= self._refused.get((repository, client), 0.0):
            return frozenset()
        return right.proven

    def lets_peers(self, repository: str) -> bool:
        """Return whether peers may answer for a repository: not if it is restricted, or was when last asked about."""
        repository = self._pulled.present(repository)
        given = self._rights.get((repository, EVERYONE, ""))
        refused = self._refused.get((repository, EVERYONE), 0.0)
        is_refused = refused > (given.asked if given else 0.0)
        return self._pulled.is_public(repository) and not is_refused

    def note_called(self, repository: str, name: str) -> None:
        """Note durably by which name the upstream calls a repository now. Raises StoreError."""
        if self._pulled.note_called(repository, name):
            # Answers to earlier questions did not prove the commits that were fetched by the former name.
            self.take_back(self._pulled.present(name), EVERYONE)

    def note_public(
        self, repository: str, origin: Origin | None = None, *, is_judged: bool = True
    ) -> None:
        """Note durably whether everyone may read a repository now, and that ``origin`` is being fetched from it.

        ``is_judged`` is whether the upstream was asked as everyone; if not, what is noted stays. Raises StoreError.
        """
        with self._noting:  # so that the last answer is noted last
            is_public = self.is_public(repository, origin.commit if origin else "")
            if origin is None:
                self._pulled.note_public(repository, is_public=is_public)
            else:
                self._pulled.keep(origin, is_public=is_public if is_judged else None)


def client_of(token: str) -> str:
    """Return a digest that stands for the clients with a token. The token itself is not kept."""
    return hashlib.sha256(token.encode()).hexdigest() if token else EVERYONE
