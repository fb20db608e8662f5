"""Fetches models that the store lacks from an upstream, once for all clients, and asks who may read them.

:meth:`PullThrough.visible` looks at each request before it is answered. It does not judge the store's own models.
Of any other model, three things have to be known, and each is known for a while:

- which commit the revision is at the upstream now;
- whether the upstream lets this client read it, judged by a request for a file with the client's own token; the
  answers are in :mod:`blobstore.serve.rights`;
- whether the store has it, or it is arriving.

Finding out takes work on a thread, as in :mod:`blobstore.serve.library`. The token of a client goes to the
upstream alone, and is kept as a digest.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core import capacity
from blobstore.errors import InvalidReference, RemoteError
from blobstore.manifests.reference import DEFAULT_HOST, Reference
from blobstore.serve.arrivals import lock_arrivals
from blobstore.serve.asked import (
    Asked,
    Known,
    damaged_versions,
    hidden_copies,
    hidden_versions,
    stored_origin,
    to_heal,
)
from blobstore.serve.cache_limit import CacheLimit
from blobstore.serve.expiring import MAX_KNOWN, Expiring, narrowed
from blobstore.serve.find_upstream import Upstreams
from blobstore.serve.gguf_choice import wants_gguf
from blobstore.serve.hub import asked_for, is_exact
from blobstore.serve.hub_calls import tags_of
from blobstore.serve.messages import PEER
from blobstore.serve.metrics import plain_families
from blobstore.serve.model_fetches import ModelFetches
from blobstore.serve.names import MAIN, any_tag, name_of, repository_of
from blobstore.serve.other_files import OtherFiles
from blobstore.serve.peers import Peers
from blobstore.serve.refusal import Refusal, no_model
from blobstore.serve.registry import asked_of_registry
from blobstore.serve.rights import EVERYONE, UPSTREAM, Right, Rights, client_of
from blobstore.serve.token_owners import TokenOwners
from blobstore.serve.unprepared import NotFetched, wait_for
from blobstore.serve.upstream import IMPATIENT, PATIENT
from blobstore.serve.visible import Visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from blobstore.serve.find_upstream import FoundAt
    from blobstore.serve.library import Library
    from blobstore.serve.messages import Request
    from blobstore.serve.peers import Peer
    from blobstore.serve.pulled import Origin
    from blobstore.serve.targets import Target
    from blobstore.serve.upstream import Upstream
    from blobstore.store.fetched import Commit

_RETRY_SECONDS: Final = 15.0
"""Seconds until an upstream that is gone is asked again; until then, the store answers."""
_REFUSED_SECONDS: Final = 5.0
"""Seconds that a refusal or a failure is repeated for the same request."""
_MAX_REFUSALS: Final = 4096
"""Any client can cause them, by any name. Each takes about a KiB."""
_MAX_PATIENT: Final = capacity.PATIENT.most


class PullThrough:
    """Adds models of an upstream to a library. Threads may share it; close it."""

    def __init__(
        self,
        library: Library,
        upstream: Upstream | None,
        *,
        peers: Sequence[Peer] = (),
        fresh: float,
        token: str = "",
        max_size: int | None = None,
        note: Callable[..., object] = lambda **_: None,
    ) -> None:
        """Lock the folder of arriving files, and fetch nothing yet.

        Args:
            library: the models of the store.
            upstream: has the other models; None for peers alone.
            peers: are asked for the blobs of these before the upstream is.
            fresh: seconds for which an answer of the upstream holds.
            token: asks the upstream for clients that have no token of their own.
            max_size: bytes that fetched models may have in all; None for no limit.
            note: called with the fields of a line for the log. It must not wait.

        Raises:
            StoreBusy: another process fetches models into the store.
            StoreError: the store cannot be written.
        """
        self._library, self._store = library, library.store
        self._narrowed: dict[tuple[str, ...], PullThrough] = {}
        self._holds = max(fresh, 1)  # long enough for the next request to use the answer
        self._note = note
        self.peers = Peers(self._store, peers, self._note)
        self._rights = Rights(library.pulled, has_token=bool(token))
        self._upstreams = Upstreams(upstream, token, self.peers, self._rights)
        self.owners = TokenOwners(self._upstreams, self._note)
        self._tags = Expiring[Reference, Known](MAX_KNOWN)
        self._renamed = Expiring[Reference, Reference](MAX_KNOWN)
        """The upstream's names of repositories that were asked for by other names."""
        self._refusals = Expiring[tuple[str, str, str], Refusal](_MAX_REFUSALS)
        """By repository, revision and client: two revisions may have one reference."""
        self._patient = threading.Semaphore(_MAX_PATIENT)
        self._limit = CacheLimit(library, max_size, self._note)
        self._fetches = ModelFetches(library, self.peers, self._limit, self._record, self._note)
        running = self._fetches.running
        self._others = OtherFiles(
            library, self._limit, running, self._find, self._fetches.name, self._note
        )
        self._fetches.is_full = self._others.is_full
        self._folder = lock_arrivals(self._store)
        library.pulled.own()
        self._limit.forget_removed()

    def close(self) -> None:
        """End all arrivals. Fetched files stay for the next server."""
        fetches = [*self._fetches.close(), *self._others.close()]
        self._upstreams.close()
        self.peers.close()
        for fetch in fetches:
            fetch.stop()
        os.close(self._folder)

    def metrics(self) -> str:
        """Return the numbers in Prometheus' text format."""
        fetches = self._fetches
        fetched = fetches.fetched + self._others.fetched
        return plain_families(
            ("upstream_bytes_total", "Bytes fetched from the upstream.", fetched),
            ("upstream_models_total", "Models fetched for clients.", fetches.models),
            ("peer_bytes_total", "Bytes of blobs fetched from peers.", self.peers.fetched),
            ("upstream_errors_total", "Questions and fetches that have failed.", fetches.errors),
            ("arriving_models", "Models that are being fetched.", len(fetches.running)),
        )

    # Called for each request

    def only(self, patterns: tuple[str, ...]) -> PullThrough:
        """See :meth:`Library.only`."""
        if not patterns:
            return self
        library = self._library.only(patterns)
        return narrowed(self._narrowed, patterns, self, _library=library)

    @property
    def has_upstream(self) -> bool:
        """Whether there is an upstream, and not peers alone."""
        return self._upstreams.has_upstream

    def reads_tokens(self, request: Request) -> bool:
        """Return whether the token of a request decides which models there are for it."""
        return self.has_upstream and PEER not in request.headers

    def visible(self, request: Request, target: Target, token: str) -> Visible:
        """Return the models that the client may read among those that it asks for.

        Until it is known that the client may read a model, nothing here depends on whether the store has it.

        Raises:
            Refusal: there is no such model, or not for this client.
            NotPrepared: the upstream has to be asked first, or the model has to arrive.
            BlobstoreError: the model in the store is damaged.
        """
        if PEER in request.headers:
            return Visible.of(self._library)
        if target.is_of_registry:
            found = asked_of_registry(target, self._library)
        else:
            found = asked_for(target.segments)
        if found is None or found[0].host != DEFAULT_HOST:
            return Visible.of(self._library)
        requested, revision = found
        is_tag = target.is_of_registry
        if is_tag and target.segments[-2] != "tags" and wants_gguf(request):
            revision, is_tag = MAIN, False
        repository = self._library.spelled(requested)
        asked = self._asked(repository, revision, is_tag=is_tag)
        is_named = target.is_of_registry or is_exact(target.segments, requested)
        visible = self._settled(request, repository, asked, token, is_named=is_named)
        if visible is None and not is_named:
            raise no_model()
        if visible is None:
            name = self._called(repository, is_whole=revision is None)
            if name != repository:
                repository = self._library.placed(name)
                asked = self._asked(repository, revision, name, is_tag=is_tag)
                visible = self._settled(request, repository, asked, token, is_named=True)
        if visible is None and request.damaged:
            digest, is_possible = target.segments[-1], self._upstreams.has_upstream
            asked = to_heal(self._library, repository, asked, digest, is_possible=is_possible)
        if visible is None:
            visible = (
                self._repository(repository, name, token, target, request.damaged)
                if asked is None
                else self._revision(asked, token, request.damaged, needs_all=is_tag)
            )
        return visible.named(requested, repository)

    def _asked(
        self,
        repository: Reference,
        revision: str | None,
        name: Reference | None = None,
        *,
        is_tag: bool = False,
    ) -> Asked | None:
        """Return what is asked for; None if that is not a version, or one that no served model can have.

        ``name`` is the upstream's, if that differs from the name of the repository here.
        If it ``is_tag`` of a registry, it names a model of the store's own as it is, and others as at the upstream.
        """
        if revision is None:
            return None
        asked = None if is_tag else Asked.of(repository, revision)
        with contextlib.suppress(InvalidReference):
            names = [Reference(*repository.parts[:3], tag) for tag in tags_of(revision)]
            if is_tag:
                names = [self._library.named_by(Reference(*repository.parts[:3], revision))]
            stored = [one for one in names if self._store.manifest_version(one) is not None]
            # A name of the store's own stands for itself, also where it stands for nothing of the upstream.
            if is_tag or (stored and self._library.is_own(stored[0])):
                asked = Asked.named((*stored, *names)[0])
        if asked is not None and asked.has_name:
            other, reserved = self._library.is_other_case, self._library.is_reserved
            if other(asked.reference) or reserved(asked.reference):
                asked = Asked.unnamed(repository, revision)
        if asked is None or not self._library.is_allowed(asked.reference):
            return None
        return asked if name is None else asked._replace(repository=name_of(name))

    def _called(self, repository: Reference, *, is_whole: bool) -> Reference:
        """Return the recent upstream name of a repository, of which no version is requested if ``is_whole``."""
        known = self._library.pulled.spelled(name_of(repository))
        name = self._renamed.get(any_tag(repository)) or repository_of(*known.split("/"))
        if name is None or name == repository or self._library.placed(name) == repository:
            return name or repository
        return repository if is_whole and self._library.ownership(repository).has_own else name

    def _revision(self, asked: Asked, token: str, damaged: float, *, needs_all: bool) -> Visible:
        """Return the same as :meth:`_version`, also of a revision that can be no name here: of that, its commit is asked."""
        named = asked.revision
        # A model of the operator's that the client may not see has the name, which stands for nothing else then.
        if not asked.has_name or self._library.is_own(asked.reference):
            asked = asked.at(self._judged(asked, token, self._ask)[0].commit)
        visible = self._version(asked, token, damaged, needs_all=needs_all)
        return replace(visible, _revision=(named, asked.revision))

    def _version(
        self, asked: Asked, token: str, damaged: float = 0.0, *, needs_all: bool
    ) -> Visible:
        """Return the models that a client may read at a version, which is there. Raises as :meth:`visible`.

        The version that the store has does not count if it was found ``damaged`` since it was last fetched, nor if
        only a peer has given it, and the upstream has named this commit since.
        """
        (commit, giver), right = self._judged(asked, token, self._look_up)
        token = token if right.client else ""  # what everyone may read is asked for once
        visible = Visible.of(self._library, right.opens)
        if right.giver == UPSTREAM and not needs_all:
            visible = replace(
                visible, _fetch=partial(self._others.content, asked.at(commit), token)
            )
        key = (asked.repository, commit)
        failure = self._fetches.failures.get(key)
        is_damaged = damaged > self._fetches.ended_at.get(key, 0.0) or (
            key in self._library.pulled.incomplete and failure is None
        )
        arrival = self._fetches.running.get(key)
        if arrival is not None and arrival.found.giver != giver == UPSTREAM:
            raise NotFetched(wait_for, arrival.ended)
        is_replaced = giver == UPSTREAM and self._library.pulled.has_of_peer(key)
        held = None if is_damaged or is_replaced else asked.held(visible)
        if is_damaged and arrival is not None:
            is_named = asked.is_commit or asked.reference in self._library.arriving
            held = arrival.model if is_named else None
        if arrival is not None:
            if needs_all:
                raise NotFetched(wait_for, arrival.ended)
            if not arrival.listed.is_set():
                raise NotFetched(wait_for, arrival.listed)
            if held is None or held.commit != commit:  # it lacks this name, or has just ended
                raise NotFetched(self._fetches.begin, asked, commit)
        elif held and held.origin and (held.origin.repository, held.origin.commit) == key:
            self._library.pulled.touch(held.origin)
        else:
            if failure is not None:
                raise failure.again()
            raise NotFetched(self._look_up, asked, token, is_damaged)
        return visible

    def _judged(self, asked: Asked, token: str, ask: Callable[..., object]) -> tuple[Known, Right]:
        """Return the commit of a revision, and the right to read it. Raises NotFetched if unknown, and Refusal."""
        client = client_of(token)
        if (refusal := self._refused_lately(asked, client)) is not None:
            raise refusal.again()
        known, right = self._known(asked), self._right(asked, client)
        if known is None or right is None:
            raise self._question(ask, asked, token)
        return known, right

    def _question(self, ask: Callable[..., object], asked: Asked, token: str) -> NotFetched:
        """Return the work of asking the upstream. Anyone can make up tokens, and may know which public revisions are here."""
        pulled = self._library.pulled
        if token:
            has_right = self._rights.has_had(client_of(token), asked.repository, asked.revision)
            return NotFetched(ask, asked, token, threads=None if has_right else capacity.TRY)
        is_known = pulled.is_public(asked.repository) and (
            (asked.repository, asked.revision) in pulled.records()
            if asked.is_commit
            else self._store.manifest_version(asked.reference) is not None
        )
        return NotFetched(ask, asked, "", threads=None if is_known else capacity.ASK)

    def _known(self, asked: Asked) -> Known | None:
        """Return the commit that a revision is; None if the upstream has to be asked.

        A commit is itself, unless only a peer has given what the store has of it: the upstream may have another one.
        """
        known = self._tags.get(asked.reference)
        if not asked.is_commit:
            return known
        if known is None and self._library.pulled.has_of_peer((asked.repository, asked.revision)):
            return None
        return Known(asked.revision, known.giver if known else UPSTREAM)

    def _right(self, asked: Asked, client: str) -> Right | None:
        """Return the right by which a client may read a revision now."""
        known = self._known(asked)
        return self._rights.of(client, asked.repository, known.commit if known else "")

    def _refused_lately(self, asked: Asked, client: str) -> Refusal | None:
        return self._refusals.get((asked.repository, asked.revision, client))

    def _settled(
        self,
        request: Request,
        repository: Reference,
        asked: Asked | None,
        token: str,
        *,
        is_named: bool,
    ) -> Visible | None:
        """Return the models that a client may read if the store alone decides about a repository or version.

        It does not if what it has was found damaged. Unless the repository ``is_named`` as the upstream would name it,
        the upstream is not asked about copies either, so that they are answered as absent names are. Raises as
        :meth:`visible`.
        """
        if request.damaged:
            return None
        everyone = Visible.of(self._library)
        if not self._library.may_have(repository):
            raise no_model()
        has_upstream = self._upstreams.has_upstream
        if has_upstream and (asked is None or not asked.is_commit):
            # They are not read here: an error about a damaged one would reveal it.
            names, fetched, origins = self._library.ownership(
                asked.reference if asked else repository, is_one=bool(asked)
            )
            if not is_named:
                return everyone if everyone(set(names).difference(fetched)) else None
            if fetched or not names:
                return None
            copies = hidden_copies(origins.values(), everyone)
            # Clients without a token may read no restricted model, and need not wait for what the upstream says of it.
            if not copies or (not token and everyone(names)):
                return everyone
            visible = self._with_copied(copies, token)
            return visible if visible(names) else None
        if asked is None:
            return everyone if everyone.has(repository) else None
        held = asked.held(everyone)
        if held is not None:
            origin = held.origin  # of another repository, if it is a copy
            is_own = not origin or origin.brought or origin.repository != asked.repository
            # Peers do not decide what the store has: each would give its version to the others.
            return everyone if is_own or (held.manifest and not has_upstream) else None
        if not (has_upstream and is_named):
            return None
        copies = hidden_versions(self._library, repository, asked, everyone)
        visible = self._with_copied(copies, token)
        return visible if asked.held(visible) else None

    def _with_copied(self, copies: Iterable[Asked], token: str) -> Visible:
        """Return the models that everyone may read, with those versions that the operator has copied and the client may read.

        The upstream hears nothing of the copy's name. If the client may not read it, that is asked for as an absent one.
        Raises NotFetched.
        """
        opened: frozenset[Commit] = frozenset()
        for one in copies:
            with contextlib.suppress(Refusal):
                opened |= self._judged(one, token, self._ask)[1].opens
        return Visible.of(self._library, opened)

    def _repository(
        self, repository: Reference, name: Reference, token: str, target: Target, damaged: float
    ) -> Visible:
        """Return the models that a client may read in a repository without a version. Raises as :meth:`visible`.

        What is asked of a repository as a whole is asked of its ``main``, which is fetched if it is not here. So is what
        is asked by a digest if nothing of the repository is here. Otherwise a cache would answer that what it has not
        fetched yet is absent.
        """
        visible = self._readable(repository, name_of(name), token)
        is_digest = target.is_of_registry and target.segments[-2] != "tags"
        if is_digest and visible.has(repository):
            for one, since in damaged_versions(self._library, repository):
                with contextlib.suppress(Refusal):  # other versions may have what is asked for
                    self._version(one, token, since, needs_all=True)
            return visible
        main = self._asked(repository, MAIN, name)
        if main is not None and not self._library.is_own(main.reference):
            try:
                visible = self._version(main, token, damaged, needs_all=is_digest)
            except Refusal:
                if not visible.has(repository):  # otherwise it is about what is here
                    raise
        return replace(visible, _fetch=None)

    def _readable(self, repository: Reference, name: str, token: str) -> Visible:
        """Return the models that a client may read of those that are here of a repository. Raises as :meth:`visible`.

        The upstream is asked about absent repositories, too, so that the answers do not differ.
        """
        client = client_of(token)
        recorded = [one.commit for one in self._library.pulled.of_repository(name) if not one.peer]
        if opened := self._rights.opened(client, name, recorded):
            return Visible.of(self._library, opened)
        refused = no_model()
        # The upstream may have dropped the version that the store has: then it is asked for what it has now.
        for revision in (*recorded[:1], MAIN):
            asked = Asked(Reference(*repository.parts[:3], tags_of(revision)[0]), name, revision)
            if (right := self._right(asked, client)) is not None:
                return Visible.of(self._library, right.opens)
            refusal = self._refused_lately(asked, client)
            if refusal is None:
                raise self._question(self._ask, asked, token)
            refused = refusal.again()
            if refused.code != "RevisionNotFound":
                break
        everyone = Visible.of(self._library)
        if everyone.tags(repository):  # others than those that were fetched
            return everyone
        raise refused

    # Work on threads

    def _look_up(self, asked: Asked, token: str, is_damaged: bool = False) -> None:
        """Ask the upstream for a revision and whether this client may read it, and fetch it.

        If it ``is_damaged`` here, it is fetched although the store has it: an import replaces damaged blobs. If it cannot
        be fetched, all clients hear it, unless the upstream has refused this one.
        """
        found = self._find(asked, token)
        if found is not None:
            asked = asked.called(found.repository, self._library)
            if asked.is_commit or not self._library.is_own(asked.reference):
                self._fetches.begin(asked, found.commit, found, is_damaged=is_damaged)
        elif is_damaged and (known := self._known(asked)) is not None:
            if self._refused_lately(asked, client_of(token)) is not None:
                return
            message = "the model is damaged here, and the upstream cannot be reached"
            refusal = Refusal(HTTPStatus.BAD_GATEWAY, message=message)
            self._fetches.fail((asked.repository, known.commit), refusal)

    def _find(self, asked: Asked, token: str) -> FoundAt | None:
        """Return the same as :meth:`_ask`, to fetch it: what everyone may read needs no client's token, which may end."""
        found = self._ask(asked, token)
        is_open = found is not None and found.giver == UPSTREAM and self._judge(found)
        return found._replace(token=self._upstreams.token) if found and is_open else found

    def _ask(self, asked: Asked, token: str) -> FoundAt | None:
        """Ask the upstream for a revision, and whether this client may read it; None if it cannot be fetched."""
        is_own = self._library.is_own(asked.reference)  # then it says nothing about the upstream
        origin = None if is_own else stored_origin(self._library, asked)
        client, now = client_of(token), time.monotonic()
        is_public = self._library.pulled.is_public(asked.repository)
        # A client without access must not learn that the store has the model.
        has_answer = origin is not None and (
            is_public or self._rights.of(client, asked.repository, origin.commit) is not None
        )
        is_patient = not has_answer and self._patient.acquire(blocking=False)
        try:
            patience = PATIENT if is_patient else IMPATIENT
            # A peer knows neither the rights that the upstream gives nor the commits of its tags.
            found = self._upstreams.find(
                asked.repository,
                asked.revision,
                token,
                patience,
                with_peers=self._rights.lets_peers(asked.repository) and not has_answer,
            )
        except Refusal as refusal:
            self._note(model=asked.repository, refused=refusal.status, reason=refusal.code)
            self._refuse(asked, client, refusal)
            if refusal.is_of_repository and self._upstreams.has_upstream:
                self._refused(asked, client, refusal.repository)
        except RemoteError as error:
            self._note(model=asked.repository, error=str(error))
            self._fetches.count_error()
            if origin is not None and has_answer:
                holds = min(self._holds, _RETRY_SECONDS)
                self._tags.set(asked.reference, Known(origin.commit, origin.peer), holds)
                if is_public:
                    only = origin.commit if origin.peer else ""
                    # From now on: the upstream may have been silent for longer than that.
                    until = time.monotonic() + holds
                    right = Right(origin.peer, EVERYONE, asked.repository, only, now, until)
                    self._rights.give(right, {origin.commit})
            else:
                message = "the upstream cannot be reached, or does not answer as a Hub"
                self._refuse(asked, client, Refusal(HTTPStatus.BAD_GATEWAY, message=message))
        else:
            self._found(asked, found, client, now)
            return found
        finally:
            if is_patient:
                self._patient.release()
        return None

    def _found(self, asked: Asked, found: FoundAt, client: str, now: float) -> None:
        """Remember the commit of a revision, and the right to it: of this client, or of everyone."""
        if found.repository != asked.repository:
            requested, asked = asked.reference, asked.called(found.repository, self._library)
            name = repository_of(*found.repository.split("/")) or asked.reference
            self._renamed.set(any_tag(requested), any_tag(name), self._holds)
            self._tags.set(requested, Known(found.commit, found.giver), self._holds)
        client = EVERYONE if found.is_peer else client
        only = "" if found.giver == UPSTREAM and found.is_whole else found.commit
        until = time.monotonic() + self._holds
        right = Right(found.giver, client, asked.repository, only, now, until)
        self._rights.give(right, {found.commit, *found.proven})
        self._tags.set(asked.reference, Known(found.commit, found.giver), self._holds)
        is_judged = found.giver == UPSTREAM and found.is_whole
        if is_judged and self._library.pulled.of_repository(asked.repository):
            self._judge(found)
            self._rights.note_public(asked.repository)

    def _refused(self, asked: Asked, client: str, named: str) -> None:
        """Take back rights to a repository that the upstream refuses, also under its present and former names."""
        name = self._renamed.pop(any_tag(asked.reference)) or asked.reference
        for repository in {asked.repository, name_of(name), named or asked.repository}:
            self._rights.take_back(repository, client)
            if client == EVERYONE:
                self._rights.note_public(repository)

    def _judge(self, found: FoundAt) -> bool:
        """Ask whether everyone may read a commit and its repository, unless that is known; return whether the commit is."""
        repository = found.repository
        if self._rights.is_public(repository, found.commit) or not (found.is_whole or found.token):
            return True
        now = time.monotonic()
        try:
            proven = self._upstreams.check_public(found)
        except Refusal:
            self._rights.take_back(repository, self._rights.public)
            return False
        except RemoteError:  # it stays unknown
            return False
        if proven:
            until = time.monotonic() + self._holds
            right = Right(UPSTREAM, self._rights.public, repository, "", now, until)
            self._rights.give(right, proven)
        return True

    def _refuse(self, asked: Asked, client: str, refusal: Refusal) -> None:
        key = asked.repository, asked.revision, client
        self._refusals.set(key, refusal.again(), _REFUSED_SECONDS)

    def _record(self, found: FoundAt, origin: Origin) -> None:
        """Note durably what is being fetched, and whether everyone may read its repository. Raises BlobstoreError."""
        # If everyone gets this commit, and nothing shows who gets others, what is noted stays.
        is_shown = bool(origin.peer) or self._judge(found)
        is_judged = not origin.peer and (found.is_whole or not is_shown)
        self._rights.note_public(origin.repository, origin, is_judged=is_judged)
