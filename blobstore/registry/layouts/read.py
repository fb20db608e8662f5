"""Recognizes the layout of a model in a registry, and rebuilds its local manifest.

What a registry returns is not trusted: a manifest whose blobs the registry does not list, or lists with
other sizes, is refused before anything is transferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, InvalidDigest, InvalidManifest, UnsupportedSource
from blobstore.manifests import media_types
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.registry.layouts import image, ollama
from blobstore.registry.layouts.plan import MODEL_CONFIG
from blobstore.registry.manifest import DOCKER_MANIFEST, OCI_MANIFEST, ImageManifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest

FILE_CONFIGS: Final = ("application/vnd.docker.ai.model.config.", MODEL_CONFIG)
"""Starts of the media types of configs that other tools push with the files of a model."""

GetManifest = Callable[[Digest], "RemoteManifest"]
ReadBlob = Callable[[Digest, int], bytes]
"""Returns all bytes of a blob, given its digest and size."""


class Place(NamedTuple):
    """The place of a blob's bytes in a registry: in a larger blob, from an offset on."""

    digest: Digest
    size: int
    """Of the larger blob."""
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model in a registry."""

    layout: Literal["oci", "ollama", "image", "files"]
    manifest: bytes = field(repr=False)
    """The bytes of the local manifest."""
    blobs: tuple[Descriptor, ...] = field(repr=False)
    """The blobs of the local manifest, each once."""
    places: Mapping[Digest, Place] = field(default_factory=dict, repr=False)
    """Of the blobs that are parts of larger ones; the others are blobs of the registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFiles:
    """A model that another tool has pushed as files. It has to be imported."""

    config: RemoteDescriptor
    layers: tuple[RemoteDescriptor, ...] = field(repr=False)


def read_model(
    root: RemoteManifest, get_manifest: GetManifest, read_blob: ReadBlob
) -> RemoteModel | RemoteFiles:
    """Return the model that a manifest of a registry describes.

    Args:
        root: the manifest of the tag.
        get_manifest: returns a manifest of the same repository.
        read_blob: returns a small blob of the same repository.

    Raises:
        InvalidManifest: a manifest breaks its format, or contradicts the model.
        UnsupportedSource: the manifest is not that of a model.
        BlobDamaged: the registry has other bytes than the manifest lists.
    """
    content = root.parse()
    others: Iterator[ImageManifest] = iter(())
    if root.media_type == DOCKER_MANIFEST and isinstance(content, ImageManifest):
        return _from_docker(root.data, content)
    spelled = content.annotations.get(media_types.LOCAL_MANIFEST)
    if isinstance(content, ImageManifest):
        first = content
    elif spelled is None:
        raise _not_a_model()
    else:
        others = _parts(content.manifests, get_manifest)
        first = next(others)
    config = first.config
    if spelled is None:
        if config.media_type.startswith(FILE_CONFIGS):
            return RemoteFiles(config=config, layers=first.layers)
        raise _not_a_model()
    try:
        digest = Digest.parse(spelled)
    except InvalidDigest as error:
        raise InvalidManifest(f"$.annotations.{media_types.LOCAL_MANIFEST}: {error}") from None
    if config.media_type == image.IMAGE_CONFIG:
        # The other parts are for other processors, and have the same layers.
        return _from_tars(digest, first.layers, read_blob)
    sizes = {layer.digest: layer.size for part in chain((first,), others) for layer in part.layers}
    return _from_layers(digest, sizes, read_blob)


def _parts(
    entries: Sequence[RemoteDescriptor], get_manifest: GetManifest
) -> Iterator[ImageManifest]:
    """Yield the manifests that an index lists, one at a time."""
    limit = limits.REGISTRY_MANIFEST
    if not 0 < len(entries) <= limit.count:
        raise InvalidManifest(f"$.manifests: expected a list of 1 to {limit.count} parts")
    budget = limits.Budget(limit, "the parts of the index")
    for entry in entries:
        yield _part(entry, get_manifest, budget)


def _part(
    entry: RemoteDescriptor, get_manifest: GetManifest, budget: limits.Budget
) -> ImageManifest:
    """Return a manifest that an index lists."""
    manifest = get_manifest(entry.digest)
    budget.spend(len(manifest.data))
    if Digest.of(manifest.data) != entry.digest:
        raise BlobDamaged(f"the registry returned another manifest than {entry.digest}")
    content = manifest.parse()
    if manifest.media_type != OCI_MANIFEST or not isinstance(content, ImageManifest):
        raise InvalidManifest(f"part {entry.digest} of the index is not an OCI image manifest")
    return content


def _from_docker(data: bytes, content: ImageManifest) -> RemoteModel | RemoteFiles:
    """Return a model with a manifest of Docker's type: Ollama's layout, or files."""
    if content.config.media_type.startswith(FILE_CONFIGS):
        return RemoteFiles(config=content.config, layers=content.layers)
    manifest = Manifest.from_bytes(data)
    if not ollama.is_model(manifest.layers):
        raise _not_a_model()
    return RemoteModel(layout="ollama", manifest=data, blobs=manifest.blobs)


def _from_layers(digest: Digest, sizes: Mapping[Digest, int], read_blob: ReadBlob) -> RemoteModel:
    """Return a model whose blobs are layers of these sizes, and its local manifest, named ``digest``, too."""
    data = _read_small(digest, sizes.get(digest), read_blob, MAX_MANIFEST_SIZE)
    manifest = Manifest.from_bytes(data)
    for blob in manifest.blobs:
        if sizes.get(blob.digest) != blob.size:
            raise InvalidManifest(
                f"blob {blob.digest} of {blob.size} bytes is not a layer of the manifest in the registry"
            )
    return RemoteModel(layout="oci", manifest=data, blobs=manifest.blobs)


def _from_tars(
    digest: Digest, layers: Sequence[RemoteDescriptor], read_blob: ReadBlob
) -> RemoteModel:
    """Return a model whose blobs are files in tar layers; the first layer says where."""
    if not layers:
        raise _not_a_model()
    if any(layer.media_type != image.TAR_LAYER for layer in layers):
        raise UnsupportedSource(
            "the layers of this image were compressed when it was copied",
            advice="copy it from its first registry with 'skopeo copy --preserve-digests'",
        )
    first = layers[0]
    catalog = _read_small(first.digest, first.size, read_blob, image.MAX_CATALOG)
    data, listed = image.read_catalog(catalog)
    if Digest.of(data) != digest:
        raise InvalidManifest("the first layer has another local manifest than the annotation says")
    manifest = Manifest.from_bytes(data)
    places = {}
    for blob in manifest.blobs:
        place = listed.get(blob.digest.hex) if isinstance(listed, dict) else None
        # `isinstance` would take booleans for numbers.
        if not (isinstance(place, list) and [type(part) for part in place] == [int, int]):
            raise InvalidManifest(f"the first layer does not say where blob {blob.digest} is")
        number, offset = place
        layer = layers[number] if 0 <= number < len(layers) else None
        if layer is None or not 0 <= offset <= layer.size - blob.size:
            raise InvalidManifest(f"the place of blob {blob.digest} is not in a layer")
        places[blob.digest] = Place(layer.digest, layer.size, offset)
    return RemoteModel(layout="image", manifest=data, blobs=manifest.blobs, places=places)


def _read_small(digest: Digest, size: int | None, read_blob: ReadBlob, limit: int) -> bytes:
    """Return the bytes of a layer that has a manifest, after checking them."""
    if size is None:
        raise InvalidManifest(f"the local manifest {digest} is not a layer")
    if size > limit:
        raise InvalidManifest(f"a layer of {size} bytes is too large for a manifest")
    data = read_blob(digest, size)
    if (found := Digest.of(data)) != digest:
        raise BlobDamaged(f"the registry returned bytes with digest {found} for blob {digest}")
    return data


def _not_a_model() -> UnsupportedSource:
    return UnsupportedSource(
        "this is a container image or another artifact, not a model",
        advice="models are pushed by blobstore, Ollama, modctl and Docker Model Runner",
    )
