"""Models in registries: their manifests, their blobs, and the tags of a repository."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core import capacity, limits
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    NotFound,
    RemoteError,
    UnsupportedSource,
)
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.media_types import FILE
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import natural_order
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.files import RemoteFile, folder_of
from blobstore.registry.layouts.read import Place, RemoteModel, read_model
from blobstore.registry.reference import RemoteReference, split_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from blobstore.core.digest import Digest
    from blobstore.registry.manifest import RemoteManifest

_STREAMS: Final = capacity.TAGS.most
_ABOUT_A_MODEL = re.compile(r"sha256-[0-9a-f]{64}(\.|$)")
"""Tags of lists of referrers and of cosign's signatures, and not of models."""


class RemoteSource(NamedTuple):
    """A model in a registry whose manifest was checked."""

    client: RegistryClient
    address: RemoteReference
    root: RemoteManifest
    """The manifest of the address."""
    model: RemoteModel
    manifest: Manifest
    """The local manifest."""
    files: tuple[RemoteFile, ...] = ()
    """The files of a model that another tool has pushed; its blobs are these, and it has no manifest yet."""

    @classmethod
    def resolve(
        cls, client: RegistryClient, address: RemoteReference, *, with_files: bool = False
    ) -> RemoteSource:
        """Find the model at an address; ``with_files``, also one that another tool has pushed.

        Raises:
            BlobDamaged, BlobMissing: the registry does not have what its manifest lists.
            InvalidManifest: a manifest breaks its format or contradicts the model.
            ModelNotFound: the registry has no such model.
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
            UnsupportedSource: the address is that of something other than a model.
        """

        def read_blob(digest: Digest, size: int) -> bytes:
            pieces = client.read_blob(address.repository, digest, 0, size, size=size)
            with contextlib.closing(pieces):
                return limits.read_document(pieces, size, f"blob {digest.short}")

        root = client.get_manifest(address.repository, address.reference)
        try:
            model = read_model(
                root, lambda digest: client.get_manifest(address.repository, str(digest)), read_blob
            )
            if isinstance(model, RemoteModel):
                files: tuple[RemoteFile, ...] = ()
                manifest = Manifest.from_bytes(model.manifest)
            elif with_files:
                files = folder_of(model.layers)
                layers = (Descriptor(FILE, one.digest, one.size, one.path) for one in files)
                config = Descriptor(FILE, model.config.digest, model.config.size)
                manifest = Manifest(config=config, layers=tuple(layers))
                blobs = tuple({layer.digest: layer for layer in manifest.layers}.values())
                model = RemoteModel(layout="files", manifest=b"", blobs=blobs)
            else:
                raise UnsupportedSource(
                    "this model was pushed as files by another tool",
                    advice="import it with 'blobstore pull'",
                )
            _check_sizes(manifest)
        except BlobstoreError as error:
            raise error.at(quote(address)) from None
        # Both were parsed: their memory is free for the next documents.
        root = replace(root, data=bytes(root.data))
        model = replace(model, manifest=bytes(model.manifest))
        return cls(client, address, root, model, manifest, files)

    @property
    def data(self) -> bytes:
        """The bytes of the local manifest."""
        return self.model.manifest

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know about how the registry serves the model."""
        if not self.root.foreign_type:
            return ()
        sent, right = quote(self.root.foreign_type), self.root.media_type
        return (
            f"the server sends the manifest as {sent}; other tools may need the Content-Type {right}",
        )

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """The blobs of the model, each once."""
        return self.model.blobs

    def place(self, digest: Digest, size: int) -> Place:
        """Return where the registry has the bytes of a blob."""
        return self.model.places.get(digest) or Place(digest, size, 0)

    def read(self, digest: Digest, size: int, begin: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes of a blob of the model from ``begin`` to before ``end``; nothing is hashed.

        Raises:
            BlobDamaged, BlobMissing: the registry does not have it with its size.
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
        """
        place = self.place(digest, size)
        return self.client.read_blob(
            self.address.repository,
            place.digest,
            place.offset + begin,
            place.offset + end,
            size=place.size,
        )

    def headers(self) -> None:
        """Return None: a registry has the headers in the blobs alone."""

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the registry has a blob of the model, with ``size`` bytes.

        Raises:
            BlobMissing, BlobDamaged: it does not.
            RemoteError: the registry cannot be reached, refuses access or misbehaves.
        """
        place = self.place(digest, size)
        found = self.client.blob_size(self.address.repository, place.digest)
        if found is None:
            raise BlobMissing(f"{quote(self.address)}: the registry does not have blob {digest}")
        if found != place.size:
            raise BlobDamaged(
                f"{quote(self.address)}: blob {place.digest} has {found} bytes, "
                f"expected {place.size}"
            )


def _check_sizes(manifest: Manifest) -> None:
    """Check that a manifest gives each blob one size."""
    sizes = {manifest.config.digest: manifest.config.size}
    for index, layer in enumerate(manifest.layers):
        size = sizes.setdefault(layer.digest, layer.size)
        if size != layer.size:
            raise InvalidManifest(
                f"$.layers[{index}].size: blob {layer.digest} has {layer.size} bytes here and "
                f"{size} before"
            )


def list_tags(
    address: str,
    *,
    plain_http: bool | None = None,
    is_chosen: Callable[[str], bool] = lambda _: True,
) -> list[tuple[RemoteReference, Digest | None]]:
    """Return the models in a repository, by their tags in order, with the digests of their manifests.

    ``is_chosen`` gets the address of each without its scheme; the digests of others are not asked for.

    If the registry has no such repository, those of all repositories below it are returned, as far as it
    lists them. An address that ends with a slash stands for these alone, and that of a registry,
    ``oci://host``, for all of its repositories.

    Raises:
        InvalidReference: the address is not valid.
        ModelNotFound: the registry has no such repository, and lists none below it.
        NotFound: it does not list its repositories.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
    """
    path = split_scheme(address)[1].partition("/")[2]
    # Without a path, any repository will do for the parts of the address.
    place = RemoteReference.parse(address.rstrip("/") if path else f"{address.rstrip('/')}/x")
    with RegistryClient(place.host, plain_http=place.uses_plain_http(plain_http)) as client:
        if not path or path.endswith("/"):
            start = f"{place.repository}/" if path else ""
            return list(_tags_below(client, place, start, is_chosen))
        try:
            return _tags(client, place, is_chosen)
        except ModelNotFound:
            with contextlib.suppress(NotFound, RemoteError):
                if found := list(_tags_below(client, place, f"{place.repository}/", is_chosen)):
                    return found
            raise


def _tags(
    client: RegistryClient, place: RemoteReference, is_chosen: Callable[[str], bool]
) -> list[tuple[RemoteReference, Digest | None]]:
    """Return the chosen tags of the repository of ``place``."""
    tags = sorted(client.tags(place.repository), key=natural_order)
    places = [replace(place, tag=tag, digest=None) for tag in tags if not _ABOUT_A_MODEL.match(tag)]
    places = [one for one in places if is_chosen(str(one))]
    digests = WorkerPool(_STREAMS, None, 0).run(
        places, lambda one: client.head_manifest(one.repository, one.tag), client.abort
    )
    return list(zip(places, digests, strict=True))


def _tags_below(
    client: RegistryClient, place: RemoteReference, start: str, is_chosen: Callable[[str], bool]
) -> Iterator[tuple[RemoteReference, Digest | None]]:
    """Yield the chosen tags of all repositories of the registry of ``place`` that begin with ``start``."""
    for repository in sorted(client.repositories(), key=natural_order):
        if repository.startswith(start):
            with contextlib.suppress(ModelNotFound):  # all of its tags were removed
                yield from _tags(client, replace(place, repository=repository), is_chosen)
