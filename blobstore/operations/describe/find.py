"""The operation ``find``: which models have a name, a blob, a tensor or a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from blobstore.core import interrupts
from blobstore.core.globs import glob_matches
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.models.tensors import tensors_of
from blobstore.store.catalog import Catalog
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import id_start, is_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.models.tensors import StoredTensor
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.references import References

_NAME: Final = re.compile(rb'"name"\s*:\s*"([^"]*)"')
_UNNAMED: Final = tuple(kind.encode() for kind in media_types.GGUF)


class FoundPlace(NamedTuple):
    """A place in the store that has what was looked for."""

    reference: Reference
    kind: Literal["model", "blob", "tensor", "file"]
    name: str
    """The name of the tensor, file or layer; empty for a model, or a layer without a name."""
    size: int
    digest: Digest
    """The digest of the manifest or blob."""


class FoundPlaces(NamedTuple):
    """The result of :func:`blobstore.find`."""

    places: tuple[FoundPlace, ...]
    errors: tuple[BlobstoreError, ...]
    """Manifests and blobs that could not be read, so that they may have it too."""
    has_near: bool = False
    """Whether layers have the text in their names, if names were looked for."""


def find_content(
    text: str,
    *,
    store: StoreLike = None,
    on_found: Callable[[Sequence[FoundPlace]], object] = lambda _: None,
) -> FoundPlaces:
    """Find models by their names, and those that have a blob, a tensor or a file.

    Only manifests and headers are read.

    Args:
        text: four or more hexadecimal digits with which the digest of a manifest or blob begins; or
            the name of a tensor or file, a part of a model's name in any case, or a glob of either. Names
            are looked for if no digest begins so.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        on_found: called with the places in each model, if there are any or not, as soon as it was searched.

    Returns:
        the places: model, kind, name, size in bytes and digest.

    Raises:
        StoreError: the store cannot be read.
    """
    store = LocalStore.of(store)
    start = id_start(text)
    search = _Search(store, text)
    errors: list[BlobstoreError] = []
    places: list[FoundPlace] = []
    stores = [one for one in (store, store.shared) if one is not None]
    catalogs = [Catalog(one, one.known_references()) for one in stores]

    def look(found: Callable[[CatalogEntry], Iterable[FoundPlace]]) -> None:
        errors.clear()
        for catalog in catalogs:
            for entry in catalog.each(catalog.paths(None)):
                if entry.error is not None:
                    errors.append(entry.error)
                if catalog is catalogs[0] or not store.has_model(entry.reference):
                    places.extend(new := list(found(entry)))
                    on_found(new)

    if start:
        look(_DigestSearch(start).places)
    if not places:
        look(lambda entry: search.places(entry, errors))
    return FoundPlaces(tuple(places), tuple(errors), search.has_near)


class _DigestSearch:
    """Looks for a manifest or blob by the start of its digest."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._found: dict[References, tuple[int, set[int]]] = {}
        """How many blobs were looked at, and the numbers of those that begin so."""

    def places(self, entry: CatalogEntry) -> Iterator[FoundPlace]:
        """Yield a model whose manifest begins so, and its blobs that do."""
        if entry.digest is None or entry.known is None:
            return
        if entry.digest.hex.startswith(self._start):
            size = sum(entry.blobs.values())
            yield FoundPlace(entry.reference, "model", "", size, entry.digest)
        references = entry.known.references
        seen, numbers = self._found.get(references, (0, set()))
        if seen < len(references):  # it has read a manifest
            numbers |= references.starting_with(self._start, seen)
            self._found[references] = len(references), numbers
        manifest = None if numbers.isdisjoint(entry.known.blobs) else entry.manifest
        for blob in () if manifest is None else (manifest.config, *manifest.layers):
            if blob.digest.hex.startswith(self._start):
                yield FoundPlace(entry.reference, "blob", blob.name, blob.size, blob.digest)


class _Search:
    """Looks for a name of tensors and files. The header of a blob is read once for all models that share it.

    The names of the tensors of a group begin with that of its layer. So only manifests that name a layer of use are
    parsed, and only headers of such layers are read.
    """

    def __init__(self, store: LocalStore, text: str) -> None:
        self._store = store
        self._text = text
        self._is_pattern = is_pattern(text)
        self._head = re.split(r"[*?[]", text, maxsplit=1)[0]
        self._found: dict[tuple[BlobId, str], list[StoredTensor] | BlobstoreError] = {}
        """What blobs have by the names of their layers, or why that is unknown."""
        self._others: set[bytes] = set()
        """The names of layers that are of no use, so that each is looked at once."""
        self.has_near = False
        """Whether layers have the text in their names."""

    def _has_name(self, reference: Reference) -> bool:
        """Return whether a model's name has the text in it, whatever its case, or matches the glob."""
        name = str(reference)
        if self._is_pattern:
            return glob_matches(name, self._text)
        return self._text.casefold() in name.casefold()

    def places(self, entry: CatalogEntry, errors: list[BlobstoreError]) -> Iterator[FoundPlace]:
        """Yield a model that has the name, and its tensors and files that have it."""
        if entry.digest is not None and self._has_name(entry.reference):
            size = sum(entry.blobs.values())
            yield FoundPlace(entry.reference, "model", "", size, entry.digest)
        if not self._has_layers(entry) or entry.manifest is None:
            return
        weights = entry.manifest.layers_of(*media_types.WEIGHTS)
        layers = [layer for layer in weights if self._may_have(layer.name)]
        self._read([layer for layer in layers if (layer.id, layer.name) not in self._found])
        for layer in layers:
            found = self._found[layer.id, layer.name]
            if isinstance(found, BlobstoreError):
                errors.append(found.at(f"model {entry.reference}"))
                continue
            for tensor in found:
                size = tensor.nbytes
                yield FoundPlace(entry.reference, "tensor", tensor.name, size, layer.digest)
        for layer in entry.manifest.layers:
            if layer.media_type in (media_types.JSON, media_types.FILE) and self._fits(layer.name):
                yield FoundPlace(entry.reference, "file", layer.name, layer.size, layer.digest)

    def _has_layers(self, entry: CatalogEntry) -> bool:
        """Return whether a model may have layers of use."""
        if entry.store is None or entry.known is None:
            return False
        try:
            data = entry.store.read_manifest(entry.reference)
        except BlobstoreError:
            return False
        has_some = b"\\" in data or any(kind in data for kind in _UNNAMED)
        for name in {*_NAME.findall(data)} - self._others:
            text = name.decode(errors="replace")
            self.has_near |= self._text in text
            if self._may_have(text):
                has_some = True
            else:
                self._others.add(name)
        return has_some

    def _may_have(self, layer: str) -> bool:
        """Return whether a layer with that name may be or have what is looked for."""
        return self._head.startswith(layer) or (self._is_pattern and layer.startswith(self._head))

    def _read(self, layers: list[Descriptor]) -> None:
        blobs = list(dict.fromkeys(layer.id for layer in layers))
        headers = dict(zip(blobs, self._store.read_headers(blobs), strict=True))
        for layer in layers:
            interrupts.check()
            try:
                tensors = tensors_of(layer, headers[layer.id])
            except BlobstoreError as error:
                self._found[layer.id, layer.name] = error
            else:
                self.has_near |= any(self._text in tensor.name for tensor in tensors)
                fitting = [tensor for tensor in tensors if self._fits(tensor.name)]
                self._found[layer.id, layer.name] = fitting

    def _fits(self, name: str) -> bool:
        return glob_matches(name, self._text) if self._is_pattern else name == self._text
