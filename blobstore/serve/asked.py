"""A version of a repository as clients of the Hub and of registries ask for it, and its model in the store."""

from __future__ import annotations

import contextlib
import hashlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.errors import BlobstoreError, InvalidReference, NameTaken
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.serve.hub_calls import tags_of
from blobstore.serve.names import HEAD, MAIN, any_tag, name_of, repository_of
from blobstore.serve.refusal import Refusal
from blobstore.serve.unprepared import OnlyHere, prepared
from blobstore.sources.hub_listing import COMMIT, REVISION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.manifests.model import Manifest
    from blobstore.serve.library import Library, ServedModel
    from blobstore.serve.pulled import Origin
    from blobstore.serve.visible import Visible
    from blobstore.store.fetched import Commit

_MAX_REVISION: Final = 255


class Asked(NamedTuple):
    """A model that a client asks for."""

    reference: Reference
    """The name that it has in the store, or would have."""
    repository: str
    revision: str
    has_name: bool = True
    """Whether a model of the store can have that name; otherwise, another one stands for it."""

    @classmethod
    def of(cls, repository: Reference, revision: str) -> Asked | None:
        """Return the version that a revision names; None if git allows no such revision."""
        tag, *others = tags_of(revision)
        # Otherwise one name would stand for two revisions of the upstream.
        if others or tag not in (DEFAULT_TAG, MAIN, HEAD):
            with contextlib.suppress(InvalidReference):
                return cls.named(Reference(*repository.parts[:3], tag))
        return cls.unnamed(repository, revision)

    @classmethod
    def named(cls, reference: Reference) -> Asked:
        """Return the version that a name stands for."""
        tag = reference.tag
        return cls(reference, name_of(reference), MAIN if tag == DEFAULT_TAG else tag)

    @classmethod
    def unnamed(cls, repository: Reference, revision: str) -> Asked | None:
        """Return the version of a revision that no name here stands for; None if git, or a request, can have no such revision."""
        is_short = len(revision) <= _MAX_REVISION and revision.isprintable()
        if not (is_short and REVISION.fullmatch(revision)):
            return None
        tag = hashlib.sha1(revision.encode(), usedforsecurity=False).hexdigest()
        stand_in = Reference(*repository.parts[:3], tag)
        return cls(stand_in, name_of(repository), revision, has_name=False)

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which is the same for ever."""
        return COMMIT.fullmatch(self.revision) is not None

    def called(self, repository: str, library: Library) -> Asked:
        """Return the same version of the repository under another name of the upstream. Call it on a thread."""
        name = repository_of(*repository.split("/")) or self.reference
        here = prepared(lambda: library.placed(name))
        reference = Reference(*here.parts[:3], self.reference.tag)
        return self._replace(reference=reference, repository=repository)

    def at(self, commit: str) -> Asked:
        """Return the same repository at a commit."""
        return Asked(Reference(*self.reference.parts[:3], commit), self.repository, commit)

    def healed(self, library: Library) -> Asked | None:
        """Return what to fetch again of a version that is damaged here; None if that is the operator's alone.

        A name of the operator's, or one of which it is not known any more that a fetch has given it, keeps its
        manifest. If that is of a commit of the same repository, the commit is fetched again: it has the same blobs.
        """
        if self.is_commit:
            key = self.repository, self.revision
            pulled = library.pulled
            return self if key in pulled.records() or key in pulled.incomplete else None
        if not library.is_own(self.reference):
            return self
        origin = stored_origin(library, self)
        if origin is None or origin.brought or origin.repository != self.repository:
            return None
        return self.at(origin.commit)

    def held(self, visible: Visible) -> ServedModel | None:
        """Return the model that the name or the commit is now. Raises NotPrepared."""
        if self.is_commit:
            return visible.at_commit(any_tag(self.reference), self.revision)
        return visible.model(self.reference)


class Known(NamedTuple):
    """The commit of a revision."""

    commit: str
    giver: str
    """Who said so: the upstream, or a peer; see :class:`Right`."""


def stored_origin(library: Library, asked: Asked) -> Origin | None:
    """Return the origin of the store's model of a revision, if it was fetched."""
    with contextlib.suppress(BlobstoreError):
        if asked.is_commit:
            several = prepared(lambda: library.at_commit(any_tag(asked.reference), asked.revision))
            commit = asked.repository, asked.revision
            origins = (one.origin for one in several if one.origin)
            return next((one for one in origins if (one.repository, one.commit) == commit), None)
        return library.pulled.origin(library.store.resolve(asked.reference))
    return None


def damaged_versions(library: Library, repository: Reference) -> Iterator[tuple[Asked, float]]:
    """Yield the fetched versions of a repository that could not be read lately, and since when."""
    for name, since in list(library.damaged.items()):
        if any_tag(name) == any_tag(repository):
            for one in _fetched(repository, stored_origin(library, Asked.named(name))):
                yield one, since


def to_heal(
    library: Library, repository: Reference, asked: Asked | None, digest: str, *, is_possible: bool
) -> Asked:
    """Return the fetched version that is damaged: the requested one, or one with this digest.

    Raises:
        OnlyHere: it is the operator's, or no upstream can heal it.
        Refusal: it was fetched again, and no version has the digest now.
    """
    asked = asked or next(_versions_with(library, repository, digest), None)
    if asked is None and is_possible and not library.ownership(repository).has_own:
        message = "it was missing here, and what was fetched again does not have it"
        raise Refusal(HTTPStatus.BAD_GATEWAY, message=message)
    found = asked.healed(library) if asked and is_possible else None
    if found is None:
        raise OnlyHere("it is a model of the store's own")
    return found


def _versions_with(library: Library, repository: Reference, digest: str) -> Iterator[Asked]:
    """Yield the fetched versions of a repository that have a digest, or could not be read, so that they may have it."""
    for artifact in library.prepared_artifacts(repository):
        if digest in map(str, artifact.digests()):
            yield from _fetched(repository, artifact.origin)
    for one, _ in damaged_versions(library, repository):
        yield one


def _fetched(repository: Reference, origin: Origin | None) -> Iterator[Asked]:
    """Yield the version of an origin, unless the user has brought it."""
    if origin and not origin.brought and (found := Asked.of(repository, origin.commit)):
        yield found._replace(repository=origin.repository)


def names_of(
    library: Library, repository: Reference, commit: Commit
) -> Iterator[tuple[Reference, Manifest]]:
    """Yield the names of a repository that fetches have given a commit, and their manifest. Call it on a thread."""
    for reference in library.listed_tags(repository):
        with contextlib.suppress(BlobstoreError):
            manifest = library.store.resolve(reference)
            origin = library.pulled.origin(manifest)
            is_it = origin is not None and (origin.repository, origin.commit) == commit
            if is_it and not library.is_own(reference):
                yield reference, manifest


def check_given(library: Library, reference: Reference) -> None:
    """Check that a fetch may give a name. Raises NameTaken if it is the operator's, or stands for something else."""
    if library.is_own(reference):
        raise NameTaken(f"{reference} is a model of the store's own by now")
    if library.is_reserved(reference):
        raise NameTaken(f"{reference} stands for something else here")


def hidden_versions(
    library: Library, repository: Reference, asked: Asked, everyone: Visible
) -> list[Asked]:
    """Return the restricted models of other repositories that a commit of this one is a copy of.

    Raises NotPrepared.
    """
    versions = library.at_commit(any_tag(repository), asked.revision)
    hidden = hidden_copies((one.origin for one in versions), everyone)
    return [one for one in hidden if one.repository != asked.repository]


def hidden_copies(origins: Iterable[Origin | None], everyone: Visible) -> list[Asked]:
    """Return the restricted models among those that models of the operator's are copies of."""
    commits = {(one.repository, one.commit) for one in origins if one and not everyone.shows(one)}
    repositories = ((repository_of(*one.split("/")), commit) for one, commit in sorted(commits))
    several = (Asked.of(one, commit) for one, commit in repositories if one)
    return [one for one in several if one]
