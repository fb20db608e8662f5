"""A version of a repository as clients of the Hub and of registries ask for it, and what the store has of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import BlobstoreError, InvalidReference, ModelNotFound
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.serve.hub_routes import tag_of
from blobstore.serve.names import MAIN, any_tag, name_of, repository_of
from blobstore.sources.hub_listing import COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.model import Manifest
    from blobstore.serve.library import Library, ServedModel
    from blobstore.serve.visible import Visible


class Asked(NamedTuple):
    """A model that a client asks for."""

    reference: Reference
    """The name that it has in the store, or would have."""
    repository: str
    revision: str

    @classmethod
    def of(cls, repository: Reference, revision: str) -> Asked | None:
        """Return what is asked for; None if no model of a store can have that name."""
        tag = revision if COMMIT.fullmatch(revision) else tag_of(revision)
        try:
            reference = Reference(*repository.parts[:3], tag)
        except InvalidReference:
            return None
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
        return Asked(reference, repository, self.revision)

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
