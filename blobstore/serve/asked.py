"""A version of a repository as clients of the Hub and of registries ask for it, and what the store has of it."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.errors import BlobstoreError, InvalidReference, ModelNotFound
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.serve.hub_routes import tag_of
from blobstore.serve.names import MAIN, any_tag, name_of, repository_of
from blobstore.sources.hub_listing import COMMIT, REVISION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.model import Manifest
    from blobstore.serve.library import Library, ServedModel
    from blobstore.serve.visible import Visible

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
        """Return what is asked for; None if git allows no such revision."""
        tag = revision if COMMIT.fullmatch(revision) else tag_of(revision)
        try:
            reference = Reference(*repository.parts[:3], tag)
        except InvalidReference:
            if not _is_revision(revision):
                return None
            tag = hashlib.sha1(revision.encode(), usedforsecurity=False).hexdigest()
            stand_in = Reference(*repository.parts[:3], tag)
            return cls(stand_in, name_of(repository), revision, has_name=False)
        # Branches and tags that are one name here have to be one there too: the first to ask decides for all.
        return cls(reference, name_of(repository), MAIN if tag == DEFAULT_TAG else tag)

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which is the same for ever."""
        return COMMIT.fullmatch(self.revision) is not None

    def called(self, repository: str) -> Asked:
        """Return the same of a repository by another name."""
        name = repository_of(*repository.split("/")) or self.reference
        reference = Reference(*name.parts[:3], self.reference.tag)
        return self._replace(reference=reference, repository=repository)

    def at(self, commit: str) -> Asked:
        """Return the same repository at a commit."""
        return Asked(Reference(*self.reference.parts[:3], commit), self.repository, commit)

    def held(self, visible: Visible) -> ServedModel | None:
        """Return the model that the name or the commit is now. Raises NotPrepared."""
        if self.is_commit:
            return visible.at_commit(any_tag(self.reference), self.revision)
        return visible.model(self.reference)


def names_of(library: Library, asked: Asked, commit: str) -> Iterator[tuple[Reference, Manifest]]:
    """Yield the names that a fetched commit has in the store, and their manifest."""
    for reference in library.listed_tags(any_tag(asked.reference)):
        with contextlib.suppress(BlobstoreError):
            manifest = library.store.resolve(reference)
            origin = library.pulled.origin(manifest)
            if origin is not None and origin.commit == commit:
                yield reference, manifest


def is_own(library: Library, reference: Reference) -> bool:
    """Return whether a name is that of a model of the store's own, which may be damaged."""
    try:
        origin = library.pulled.origin(library.store.resolve(reference))
        # What was fetched may have got other names of the operator's since.
        return origin is None or origin.repository.lower() != name_of(reference).lower()
    except ModelNotFound:
        return False
    except BlobstoreError:  # it cannot be read
        return not library.pulled.has_given(reference)


def _is_revision(text: str) -> bool:
    """Return whether git allows a revision, and a request to the upstream can have it."""
    is_short = len(text) <= _MAX_REVISION and text.isprintable()
    return is_short and REVISION.fullmatch(text) is not None
