"""The manifests of a store, read and checked. Names are given by :mod:`blobstore.store.names`."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.escape import cli_command, quote
from blobstore.core.files import FileVersion, is_absence, is_there, read_regular
from blobstore.errors import (
    BlobstoreError,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    StoreError,
)
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE, check_layers
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.manifests.reference import (
    DEFAULT_HOST,
    DEFAULT_TAG,
    Reference,
    similar_names,
)
from blobstore.store.blobs import BlobReader
from blobstore.store.scan import folders_and_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from blobstore.manifests.descriptor import Descriptor, PlainDescriptors
    from blobstore.store.listings import Listings

NO_STORE: Final = "'blobstore create' makes a store, and --store or BLOBSTORE_HOME names another"
"""What to do without a store."""


class ManifestReader(BlobReader):
    """The models of a store, for reading. Methods take references as strings too."""

    def manifest_path(self, reference: str | Reference) -> Path:
        """Return the path of a manifest."""
        return self._layout.manifest(Reference.of(reference))

    def reference_of(self, path: Path) -> Reference | None:
        """Return the reference that a manifest's path spells, or None."""
        return self._layout.reference(path)

    def manifest_version(self, reference: str | Reference) -> FileVersion | None:
        """Return the version of a manifest's file; None if it is missing. Raises StoreError.

        A reader that misses a blob may have read a manifest that was removed or replaced in the meantime.
        """
        return FileVersion.of(self._layout.manifest_file(Reference.of(reference)))

    def resolve(self, reference: str | Reference) -> Manifest:
        """Return the manifest of a model, checked against its config if that can be read.

        Raises:
            InvalidReference: ``reference`` is malformed.
            ModelNotFound: the store has no such model.
            InvalidManifest: the manifest breaks the format, or has changed since it was written; the
                message begins with its path.
            StoreError: the manifest or the store cannot be read.
        """
        data, manifest = self.parse(reference)
        try:
            self.check_manifest(data, manifest)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None
        return manifest

    def blobs_of(self, reference: str | Reference) -> Sequence[Descriptor]:
        """Return the blobs of a model; none if its manifest is gone or cannot be read, which using it reports."""
        with contextlib.suppress(BlobstoreError):
            return self.resolve(reference).blobs
        return ()

    def parse(
        self, reference: str | Reference, known: PlainDescriptors | None = None
    ) -> tuple[bytes, Manifest]:
        """Return the bytes of a manifest and the parsed manifest, not checked against the config.

        ``known`` is as for :meth:`Manifest.from_bytes`. Raises as :meth:`resolve`.
        """
        data = self.read_manifest(reference)
        try:
            return data, Manifest.from_bytes(data, known)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Check against the config that ``data``, the bytes of ``manifest``, has not changed.

        Returns:
            Whether the config could be read. If it could not, either the config is lost or its digest
            in the manifest has changed; the layers cannot be checked.

        Raises:
            InvalidManifest: it has changed.
        """
        return self.checked_config(data, manifest) is not None

    def checked_config(self, data: bytes, manifest: Manifest) -> bytes | None:
        """Return the config that :meth:`check_manifest` compares with; None if it cannot be read.

        Raises:
            InvalidManifest: it has changed.
        """
        config = manifest.config
        try:
            # With the size of the file, because the size in the manifest may be what has changed.
            size = os.lstat(self.readable_path(config.digest)).st_size
            content = self.read_blob(config.digest, size, MAX_CONFIG_SIZE)
        except (BlobstoreError, OSError):
            return None
        check_layers(data, content)
        return content

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest, at most 64 MiB, unparsed.

        Raises:
            ModelNotFound: the store has no such model.
            InvalidManifest: the file is too large or not a regular file.
            StoreError: the manifest or the store cannot be read.
        """
        interrupts.check()
        path = self.manifest_path(reference)
        try:
            return read_regular(path, MAX_MANIFEST_SIZE)
        except OSError as error:
            if not is_absence(error):
                message = f"cannot read manifest {quote(path)}: {error.strerror}"
                raise StoreError(message) from error
            # If the store itself is unusable, that is the error, and not a missing model.
            self.check_root()
            if path.is_symlink():
                raise InvalidManifest(f"{quote(path)} is a broken symbolic link") from None
            raise self.not_found(Reference.of(reference)) from None
        except BlobstoreError as error:
            raise InvalidManifest(str(error)) from None

    def not_found(self, reference: Reference) -> ModelNotFound:
        """Return the error that the store has no such model."""
        return ModelNotFound(
            f"no model {quote(reference)} in the store {quote(self.root)}",
            advice=partial(self._similar_names, reference),
        )

    def _similar_names(self, reference: Reference) -> str:
        if isinstance(self._shared, ManifestReader) and self._shared.has_model(reference):
            shared = quote(self._shared.root)
            return (
                f"the shared store {shared} has it: give that as the store, or give the model a name of "
                f"yours with {cli_command('cp', reference, 'NAME')}"
            )
        if not is_there(self.root):
            return f"there is no store there; {NO_STORE}"
        try:
            similar = similar_names(reference, self.references())
        except BlobstoreError:
            similar = ""
        if self.is_gone(reference):
            return (
                f"its manifest was lost, or removed by another program; {cli_command('repair', reference)} "
                f"restores it if its blobs are there, and {cli_command('rm', reference)} forgets the name"
            )
        text = str(reference)
        for path in (text, text.removesuffix(f":{DEFAULT_TAG}")):
            if not similar and os.path.lexists(path):
                return f"{cli_command('create', path)} imports what is there"
        if similar or reference.host == DEFAULT_HOST:
            return similar
        return f"{cli_command('pull', reference)} fetches it if a registry has it"

    def is_gone(self, reference: Reference) -> bool:
        """Return whether a name was given and not removed by this program, but has no manifest; see :mod:`blobstore.store.published`."""
        there = is_there(self._layout.published.joinpath(*reference.parts))
        return there and not self.has_model(reference)

    def references(
        self, *, on_error: Callable[[StoreError], object] | None = None
    ) -> Iterator[Reference]:
        """Yield the name of every model in the store, sorted. Files with other names are skipped.

        Args:
            on_error: called with the error of each folder of manifests that cannot be read, which is
                then skipped; by default the first of these errors is raised.

        Raises:
            StoreError: the store is not a folder or cannot be read.
        """
        for (host, namespace, model), tags in self.repositories(on_error=on_error):
            for tag in tags:
                with contextlib.suppress(InvalidReference):  # a file of something else
                    yield Reference(host, namespace, model, tag)

    def tags(self, repository: Reference) -> Iterator[Reference]:
        """Yield the names of a repository, sorted. Raises StoreError."""
        for tag in folders_and_files(str(self.manifest_path(repository).parent))[1]:
            with contextlib.suppress(InvalidReference):  # a file of something else
                yield Reference(*repository.parts[:-1], tag)

    def repositories(
        self,
        *,
        on_error: Callable[[StoreError], object] | None = None,
        listings: Listings | None = None,
    ) -> Iterator[tuple[tuple[str, str, str], list[str]]]:
        """Yield host, namespace and model of each repository with the names of its files, sorted; all may be malformed.

        Folders are listed again only if they are not among ``listings``. Raises as :meth:`references`, with the same
        ``on_error``.
        """
        list_one = folders_and_files if listings is None else listings.folders_and_files
        self.check_root()

        def inside(folder: str) -> tuple[list[str], list[str]]:
            try:
                return list_one(folder)
            except StoreError as error:
                if on_error is None:
                    raise
                on_error(error)
                return [], []

        root = str(self._layout.manifests)
        for host in inside(root)[0]:
            for namespace in inside(f"{root}/{host}")[0]:
                for model in inside(f"{root}/{host}/{namespace}")[0]:
                    if files := inside(f"{root}/{host}/{namespace}/{model}")[1]:
                        yield (host, namespace, model), files

    def has_model(self, reference: str | Reference) -> bool:
        """Return whether the name ``reference`` exists, whether its manifest can be read or not.

        Raises:
            InvalidReference: it is malformed.
        """
        return is_there(self.manifest_path(reference))
