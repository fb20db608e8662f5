"""The models of a store that one client may see, decided once per request.

The protocols get this value instead of the library. Every model that they ask it for is judged by
:meth:`Visible.shows`, and nothing about a hidden model is prepared, read or counted before that.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from blobstore.core.digest import Digest
from blobstore.manifests.reference import DEFAULT_TAG, natural_order
from blobstore.serve.commits import served_commit
from blobstore.serve.messages import Content
from blobstore.serve.names import any_tag
from blobstore.serve.tags import MANY
from blobstore.serve.unprepared import prepared
from blobstore.store.fetched import Brought

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.artifacts import Artifact
    from blobstore.serve.description import Description
    from blobstore.serve.library import Library, ServedModel
    from blobstore.serve.protection import Use
    from blobstore.serve.pulled import Origin
    from blobstore.sources.hub_listing import ListedFile
    from blobstore.store.fetched import Commit

_Key = TypeVar("_Key")
_Served = TypeVar("_Served", "ServedModel", "Artifact")


@dataclass(frozen=True, slots=True)
class Visible:
    """The models of a library that a client may read, as of now."""

    _library: Library
    _open: Collection[str]
    """The repositories of the upstream that are for everyone."""
    _opened: frozenset[Commit] = frozenset()
    """The commits of other repositories that the client may read."""
    _asked: Reference | None = None
    """The repository that the client asks for."""
    _named: Reference | None = None
    """The name that this repository has here."""
    _revision: tuple[str, str] = ("", "")
    """A revision that no tag can have, and its commit."""
    _fetch: Callable[[ServedModel, ListedFile], Content] | None = None
    """Returns a file that the store lacks, as it arrives; None if such files cannot be fetched."""

    @classmethod
    def of(cls, library: Library, opened: frozenset[Commit] = frozenset()) -> Visible:
        """Return the models that everyone may read, and the commits ``opened``. Raises StoreError."""
        return cls(library, library.pulled.open(), opened)

    def named(self, asked: Reference, name: Reference) -> Visible:
        """Return the same for a client that asks for a repository which has another name here."""
        return replace(self, _asked=asked, _named=name)

    def joined(self, other: Visible) -> Visible:
        """Return the models that the client sees in lists of this store, and of the shared one below it."""
        return Joined(self._library, self._open, _other=other)

    def shows(self, origin: Origin | None) -> bool:
        """Return whether the client may read a model of this origin. None stands for the store's own models."""
        pulled = self._library.pulled
        origin = origin and pulled.now(origin)
        if origin is None or origin.brought is Brought.EVERYONE:
            return True
        if (pulled.present(origin.repository), origin.commit) in self._opened:
            return True
        # Nothing has shown that a public repository has a commit without a record: the user has brought it, or it was lost.
        return origin.repository in self._open and pulled.is_recorded(origin)

    def _only(self, found: _Served | None) -> _Served | None:
        return found if found is not None and self.shows(found.origin) else None

    def _seen(self, references: Iterable[Reference]) -> list[Reference]:
        """Return those of names in the store that are served and seen. Raises NotPrepared."""
        allowed = list(filter(self._library.is_allowed, references))
        origins = self._library.origins(allowed)
        # A name without a model is not the store's own: one whose model is being removed may be restricted.
        return [one for one in allowed if one in origins and self.shows(origins[one])]

    __call__ = _seen  # equal values see the same, which nobody knows of their methods

    # Names

    def models(self) -> list[Reference]:
        """Return the names of all models. Call it on a thread. Raises StoreError or NotPrepared."""
        return self._seen(self._library.names())

    def page(
        self, name_of: Callable[[Reference], str], after: str, limit: int
    ) -> dict[str, Reference]:
        """Return the first names after one with the first model of each that is seen, ``latest`` before other tags.

        Only models of these are looked at. ``name_of`` returns the name of a model in a list, or an empty one. Call it
        on a thread. Raises StoreError or NotPrepared.
        """
        groups: dict[str, list[Reference]] = {}
        for reference in self._library.names():
            if (name := name_of(reference)) > after:
                group = groups.setdefault(name, [])
                group.insert(0 if reference.tag == DEFAULT_TAG else len(group), reference)
        return self._first(((name, groups[name]) for name in sorted(groups)), limit)

    def _first(
        self, groups: Iterable[tuple[_Key, Sequence[Reference]]], limit: int
    ) -> dict[_Key, Reference]:
        """Return the first keys with a name in the store that is seen, and the first of these names."""
        found: dict[_Key, Reference] = {}
        groups, count = iter(groups), max(limit, MANY // 16)
        while len(found) < limit and (some := list(islice(groups, count))):
            count = min(2 * count, sys.maxsize)
            seen = set(self._seen(names[0] for _, names in some))
            for key, names in some:
                if one := names[:1] if names[0] in seen else self._seen(names[1:]):
                    found[key] = one[0]
        return dict(islice(found.items(), limit))

    def has(self, repository: Reference) -> bool:
        """Return whether a repository has a tag. Raises NotPrepared."""
        return bool(self.tags(repository, limit=1))

    def tags(
        self, repository: Reference, after: str = "", limit: int = sys.maxsize
    ) -> list[Reference]:
        """Return the first tags of a repository after one, sorted. Raises NotPrepared."""
        arriving = self._library.arriving_in(repository)  # first: what ends is stored
        tags = (one for one in self._library.stored_tags(repository) if one.tag > after)
        found = {
            one for one, model in arriving.items() if one.tag > after and self.shows(model.origin)
        }
        found.update(self._first(((one, (one,)) for one in tags), limit))
        return sorted(found, key=lambda one: one.tag)[:limit]

    def spelled(self, repository: Reference) -> Reference:
        """Return the name here of the repository that a client asks for."""
        if self._named is not None and repository == self._asked:
            return self._named
        return self._library.spelled(repository)

    def stores(self, repository: Reference) -> bool:
        """See :meth:`Library.stores`."""
        return self._library.stores(repository)

    def modified(self, reference: Reference) -> int | None:
        """Return when a name got its model, in nanoseconds since the epoch; None without a model."""
        version = (
            self._library.store.manifest_version(reference) if self._seen([reference]) else None
        )
        return version.modified if version else None

    def descriptions(self, references: Iterable[Reference]) -> Mapping[Reference, Description]:
        """See :meth:`Library.descriptions`."""
        found = self._library.descriptions(self._seen(references))
        # A name may have got a model that is not seen since.
        return {one: found[one] for one in self._seen(found)}

    def watch(self, reference: Reference) -> Callable[[], bool] | None:
        """See :meth:`Library.watch`."""
        return self._library.watch(reference) if self._seen([reference]) else None

    # Models as the Hub has them

    def resolved(self, revision: str) -> str:
        """Return the commit of a revision that no tag can have; other revisions unchanged."""
        named, commit = self._revision
        return commit if revision == named else revision

    def model(self, reference: Reference, *, with_digests: bool = False) -> ServedModel | None:
        """Return the model of a name; None if the name does not exist.

        Raises:
            NotPrepared: it was not asked for since it changed.
        """
        arriving = self._only(self._library.arriving_in(reference).get(reference))
        if arriving is not None or not self._seen([reference]):
            return self._complete(arriving)
        # Its origin may not have been readable when its name was looked at.
        return self._complete(self._only(self._library.model(reference, with_digests=with_digests)))

    def at_commit(
        self, repository: Reference, commit: str, *, with_digests: bool = False
    ) -> ServedModel | None:
        """Return a version of a repository, also one that no tag names any more, until gc removes it.

        Raises as :meth:`model`.
        """
        for model in self._library.arriving_in(repository).values():
            if model.commit == commit and self.shows(model.origin):
                return self._complete(model)
        for version in self._library.at_commit(any_tag(repository), commit):
            if self.shows(version.origin):
                found = self._library.version(version, with_digests=with_digests)
                return self._complete(self._only(found))
        return None

    def name_at(self, repository: Reference, commit: str) -> Reference | None:
        """Return a name of a version that :meth:`at_commit` has found; None if it has none now."""
        several = self._library.at_commit(any_tag(repository), commit)
        shown = self._seen(one.reference for one in several if self.shows(one.origin))
        return next((one for one in shown if self.modified(one) is not None), None)

    def commits(self, repository: Reference) -> Mapping[Reference, str]:
        """Return the commits of the tags of a repository, sorted. Raises NotPrepared."""
        arriving = self._library.arriving_in(repository)
        found = {one: model.commit for one, model in arriving.items() if self.shows(model.origin)}
        keys = self._library.keys(repository)
        origins = self._library.origins(keys)
        after = self._library.keys(repository)
        for one, origin in origins.items():
            # If the name has got another model since, this origin may be that of the other.
            if one not in found and keys[one] == after.get(one) and self.shows(origin):
                found[one] = served_commit(origin, keys[one])
        return _by_tag(found)

    def _complete(self, model: ServedModel | None) -> ServedModel | None:
        """Return a model with the files that can be fetched, too."""
        if model is None or model.origin is None or self._fetch is None:
            return model
        known = model.completed
        if known is not None and (known.digests is None) == (model.digests is None):
            return known
        others = model.origin.others
        absent = {name: file for name, file in others.items() if name not in model.files}
        contents = {name: Content.absent(file.size) for name, file in absent.items()}
        large = {name: file for name, file in absent.items() if file.algorithm == "sha256"}
        digests = {name: Digest(file.digest) for name, file in large.items()}
        # Two threads may do this at once, and either result is right.
        model.completed = replace(
            model,
            files=dict(sorted({**model.files, **contents}.items())),
            digests=None if model.digests is None else {**model.digests, **digests},
            absent=absent,
        )
        return model.completed

    def content(self, model: ServedModel, path: str) -> Content:
        """Return the content of a file of a model, to send it.

        Raises:
            Refusal: it cannot be fetched.
            NotPrepared: it has to be fetched.
        """
        absent = model.absent.get(path)
        if absent is None or self._fetch is None:
            return model.files[path]
        return self._fetch(model, absent)

    # Artifacts of registries

    def artifact(self, tag: Reference) -> Artifact | None:
        """Return the artifact of a name, or None if there is no such model. Raises as :meth:`model`."""
        commit = self.resolved(tag.tag)
        if commit != tag.tag:
            if (found := self.name_at(tag, commit)) is None:
                return None
            tag = found
        named = self._library.named_by(tag)
        return self._only(self._library.artifact(tag)) if self._seen([named]) else None

    def artifacts(self, repository: Reference, digest: Digest) -> Iterator[Artifact]:
        """Yield the versions of a repository with a manifest or a blob, also some that no tag names any more.

        There may be more than can be prepared at once, so a caller that asks for all of them may never get them.
        Raises as :meth:`model`, when the first that is not prepared is asked for.
        """
        for artifact in self._library.prepared_artifacts(repository):
            if self.shows(artifact.origin) and self._has(artifact, digest):
                yield artifact
        yield from self.tagged_artifacts(repository, digest)

    def tagged_artifacts(self, repository: Reference, digest: Digest) -> Iterator[Artifact]:
        """Yield those of :meth:`artifacts` that a tag names, as they are now: one for each manifest of the store."""
        for tag in self._library.tags.having(
            repository, digest, Visible(self._library, self._open, self._opened)
        ):
            found = self.artifact(tag)
            if found is not None and not found.has(digest):
                self._library.list_cold_files(found)  # it may be one of these
            if found is not None and self._has(found, digest):
                yield found

    def _has(self, artifact: Artifact, digest: Digest) -> bool:
        return artifact.has(digest) and (digest not in artifact.cold or self._shows_bases(artifact))

    def _shows_bases(self, artifact: Artifact) -> bool:
        """Return whether the client may read all blobs that those of a model are deltas against.

        Otherwise the deltas would give them away, as a delta and its blob are all that is needed to compute the base.
        """
        is_allowed = self._library.is_allowed
        return all(
            any(is_allowed(name) and self.shows(origin) for name, origin in owners.items())
            for owners in artifact.bases.values()
        )

    def referrers(self, artifact: Artifact, digest: Digest) -> list[dict[str, Any]]:
        """Return the manifests that refer to one of an artifact. Raises NotPrepared."""
        if digest == artifact.roots[0].digest:
            # Before the list is read, which this may replace.
            self._library.list_cold_files(artifact)
        listed = artifact.referrers.get(digest, ())
        return [one for one in listed if self._has(artifact, Digest.parse(one["digest"]))]

    def look_ahead(self) -> None:
        """Compute the digests of repositories with many tags, so that no client waits for them.

        No request causes it, so its duration reveals nothing to clients. Call it on a thread. Raises StoreError.
        """
        for repository, count in Counter(map(any_tag, self._library.names())).items():
            if count >= MANY and prepared(partial(self.has, repository)):
                self._library.tags.describe_all(repository, self)

    # About models and artifacts that were returned above

    def use(self, served: ServedModel | Artifact) -> Use:
        """See :meth:`Library.use`."""
        return self._library.use(served)

    def is_distrusted(self, model: ServedModel, etag: str) -> bool:
        """See :meth:`Library.is_distrusted`."""
        return self._library.is_distrusted(model, etag)


@dataclass(frozen=True, kw_only=True)
class Joined(Visible):
    """The models of a store and of the shared one below it, for lists of their names. Those of the store count."""

    _other: Visible

    def page(
        self, name_of: Callable[[Reference], str], after: str, limit: int
    ) -> dict[str, Reference]:
        """See :meth:`Visible.page`."""
        found = self._other.page(name_of, after, limit) | super().page(name_of, after, limit)
        return dict(sorted(found.items())[:limit])

    def tags(
        self, repository: Reference, after: str = "", limit: int = sys.maxsize
    ) -> list[Reference]:
        """See :meth:`Visible.tags`."""
        other = self._other.tags(self._other.spelled(repository), after, limit)
        own = super().tags(super().spelled(repository), after, limit)
        found = {one.tag: one for one in (*other, *own)}
        return [found[tag] for tag in sorted(found)][:limit]

    def spelled(self, repository: Reference) -> Reference:
        """See :meth:`Visible.spelled`."""
        own = super().spelled(repository)  # a model that the client does not see has no name
        return own if super().tags(own, limit=1) else self._other.spelled(repository)

    def stores(self, repository: Reference) -> bool:
        """See :meth:`Visible.stores`."""
        return super().stores(repository) or self._other.stores(repository)

    def modified(self, reference: Reference) -> int | None:
        """See :meth:`Visible.modified`."""
        own = super().modified(reference)
        return self._other.modified(reference) if own is None else own

    def descriptions(self, references: Iterable[Reference]) -> Mapping[Reference, Description]:
        """See :meth:`Visible.descriptions`."""
        several = list(references)
        own = super().descriptions(several)
        return {**self._other.descriptions(one for one in several if one not in own), **own}

    def commits(self, repository: Reference) -> Mapping[Reference, str]:
        """See :meth:`Visible.commits`."""
        own = super().commits(super().spelled(repository))
        other = self._other.commits(self._other.spelled(repository))
        taken = {one.tag for one in own}
        found = {one: commit for one, commit in other.items() if one.tag not in taken}
        return _by_tag({**found, **own})


def _by_tag(commits: Mapping[Reference, str]) -> dict[Reference, str]:
    # Faster than to compare references: there may be very many.
    return dict(sorted(commits.items(), key=lambda item: natural_order(item[0].tag)))
