"""The layout ``image``: tar layers that every container runtime mounts as a folder, below ``/models``.

The files are those of the layout ``oci``, each blob unchanged. The tensors of one transformer block share a
layer, so that models with equal blocks share layers. Nothing is compressed, and a tar holds no time or
user, so equal blobs give equal layers. The first layer is small: it has the local manifest and the place
of every blob, so that a pull reads blobs as byte ranges of layers.

Runtimes accept an image only for their own processor, so an index lists one manifest for each, with the
same layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST
from blobstore.registry.shapes.plan import (
    FOLDER,
    LOCAL_MANIFEST,
    RemotePlan,
    folder_files,
    remote_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.registry.manifest import RemoteManifest
    from blobstore.registry.shapes.plan import FolderFile, ModelFacts

IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
TAR_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
ROOT: Final = "models"
MAX_TARS: Final = 100
"""Layers of an image. Docker stops at 125."""
MAX_CATALOG: Final = limits.CATALOG.one
"""Bytes of the first layer; a larger one is refused before it is read."""
ARCHITECTURES: Final = ("amd64", "arm64")
_BLOCK = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""The start of a tensor's name up to its first number, such as ``model.layers.12``."""
_MANIFEST: Final = f"{FOLDER}/manifest.json"
_PLACES: Final = f"{FOLDER}/places.json"
_TAR_BLOCK: Final = 512
_OCTAL: Final = re.compile(rb"[0-7]{11}")
_TAR_END: Final = bytes(2 * _TAR_BLOCK)
_TAR_FILE: Final = b"0"
_TAR_KINDS: Final = (_TAR_FILE, b"5", b"x")
"""Files, folders, and the long name of the entry that follows."""

ReadPieces = Callable[[Digest, int], Iterable[bytes | memoryview]]
"""Returns the bytes of a blob, given its digest and size."""


@dataclass(frozen=True)
class TarLayer:
    """The files of a layer, in order. Its bytes follow from them."""

    files: tuple[FolderFile, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the content of each file begins."""
        offsets, end = [], 0
        for file in self.files:
            begin = end + len(_header(file.path, file.size))
            offsets.append(begin)
            end = begin + file.size + _padding(file.size)
        return tuple(offsets)

    @property
    def size(self) -> int:
        """Bytes of the layer."""
        last = self.files[-1]
        return self.offsets[-1] + last.size + _padding(last.size) + len(_TAR_END)

    @property
    def key(self) -> Digest:
        """The digest of what the bytes follow from, which is known before the bytes are read."""
        listed = [(file.path, file.digest.hex, file.size) for file in self.files]
        return Digest.of(strict_json.dumps(["tar layer 1", listed]).encode())

    def pieces(self, read: ReadPieces) -> Generator[bytes | memoryview, None, None]:
        """Yield the bytes of the layer in order."""
        for file in self.files:
            yield _header(file.path, file.size)
            yield from read(file.digest, file.size)
            yield bytes(_padding(file.size))
        yield _TAR_END


@dataclass(frozen=True, slots=True)
class ImageLayers:
    """The layers of an image, before the digests of the tars are known."""

    catalog: bytes
    """The first layer."""
    tars: tuple[TarLayer, ...]
    """The other layers."""


def image_layers(data: bytes, facts: ModelFacts) -> ImageLayers:
    """Return the layers of the model with the local manifest ``data``.

    Raises:
        InvalidManifest: the manifest breaks the format.
    """
    manifest = Manifest.from_bytes(data)
    _, config, *files = folder_files(data, manifest, facts)
    stored, generated = files[: len(manifest.layers)], files[len(manifest.layers) :]
    groups: dict[str, list[FolderFile]] = {"files": [config]}
    for layer, file in zip(manifest.layers, stored, strict=True):
        if layer.media_type in (media_types.JSON, media_types.FILE, media_types.SOURCE):
            group = "files"
        else:
            block = _BLOCK.match(layer.name)
            group = f"block {block[0]}" if block else f"{layer.media_type} {layer.name}"
        groups.setdefault(group, []).append(file)
    units = list(groups.values())
    merged = -(-len(units) // (MAX_TARS - 1))  # rounded up
    tars = tuple(
        TarLayer(tuple(file for unit in units[begin : begin + merged] for file in unit))
        for begin in range(0, len(units), merged)
    )
    places = {
        file.digest.hex: [number, offset]
        for number, tar in enumerate(tars, 1)
        for file, offset in zip(tar.files, tar.offsets, strict=True)
    }
    made = {_MANIFEST: data, _PLACES: strict_json.dumps(places).encode()}
    contents = dict(zip((file.path for file in generated), facts.generated.values(), strict=True))
    return ImageLayers(_catalog(made | contents, files), tars)


def plan_image(
    data: bytes, layers: ImageLayers, digests: Sequence[Digest], facts: ModelFacts
) -> RemotePlan:
    """Return what a registry needs for an image.

    Args:
        data: the local manifest.
        layers: what :func:`image_layers` returned for it.
        digests: the digests of the tars.
        facts: what the labels of the image say.
    """
    listed = [(Digest.of(layers.catalog), len(layers.catalog))]
    listed += [(digest, tar.size) for digest, tar in zip(digests, layers.tars, strict=True)]
    annotations = {LOCAL_MANIFEST: str(Digest.of(data))}
    configs = [_config(name, [digest for digest, _ in listed], facts) for name in ARCHITECTURES]
    images = [_image(config, listed, annotations) for config in configs]
    entries = [
        {
            "mediaType": OCI_MANIFEST,
            "digest": str(image.digest),
            "size": len(image.data),
            "platform": {"architecture": name, "os": "linux"},
        }
        for name, image in zip(ARCHITECTURES, images, strict=True)
    ]
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": entries,
        "annotations": annotations,
    }
    made = [layers.catalog, *configs]
    return RemotePlan(
        manifests=(*images, remote_manifest(OCI_INDEX, index)),
        blobs=Manifest.from_bytes(data).blobs,
        made={Digest.of(content): content for content in made},
        tars=dict(zip(digests, layers.tars, strict=True)),
    )


def _config(architecture: str, layers: Sequence[Digest], facts: ModelFacts) -> bytes:
    labels = {
        "org.opencontainers.image.title": facts.name,
        "org.opencontainers.image.source": facts.source_url,
        "org.opencontainers.image.revision": facts.revision,
        "org.opencontainers.image.licenses": " AND ".join(facts.licenses),
    }
    value = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": {key: text for key, text in labels.items() if text}},
        "rootfs": {"type": "layers", "diff_ids": [str(digest) for digest in layers]},
    }
    return strict_json.dumps(value).encode()


def _image(
    config: bytes, layers: Iterable[tuple[Digest, int]], annotations: Mapping[str, str]
) -> RemoteManifest:
    described = {
        "mediaType": IMAGE_CONFIG,
        "digest": str(Digest.of(config)),
        "size": len(config),
    }
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": described,
        "layers": [
            {"mediaType": TAR_LAYER, "digest": str(digest), "size": size} for digest, size in layers
        ],
        "annotations": dict(annotations),
    }
    return remote_manifest(OCI_MANIFEST, value)


# Tar files


def _header(path: str, size: int, *, is_folder: bool = False) -> bytes:
    import tarfile

    info = tarfile.TarInfo(f"{ROOT}/{path}" if path else ROOT)
    info.size, info.mode, info.mtime = size, 0o644, 0
    if is_folder:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % _TAR_BLOCK


def _catalog(made: Mapping[str, bytes], files: Iterable[FolderFile]) -> bytes:
    """Return the first layer: all folders, and the files that no blob holds."""
    folders = {""}
    for path in (*made, *(file.path for file in files)):
        parts = path.split("/")[:-1]
        folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    headers = [_header(folder, 0, is_folder=True) for folder in sorted(folders)]
    contents = [
        _header(path, len(content)) + content + bytes(_padding(len(content)))
        for path, content in made.items()
    ]
    return b"".join([*headers, *contents, _TAR_END])


def read_catalog(catalog: bytes) -> tuple[bytes, Any]:
    """Return the local manifest and the decoded places of blobs from the first layer.

    Only the plain tars that :func:`_catalog` writes are read: ``tarfile`` follows links within a tar, and
    gives a sparse file of one block any number of zeros.

    Raises:
        InvalidManifest: it has neither, or an entry that such a tar does not have.
    """
    contents: dict[str, bytes] = {}
    for name, begin, size in _entries(catalog):
        if name in (f"{ROOT}/{_MANIFEST}", f"{ROOT}/{_PLACES}"):
            if name in contents:
                raise _not_a_catalog(f"it has two files {name}")
            contents[name] = catalog[begin : begin + size]
    try:
        places = strict_json.loads(contents[f"{ROOT}/{_PLACES}"])
        return contents[f"{ROOT}/{_MANIFEST}"], places
    except KeyError as error:
        raise _not_a_catalog(f"it has no file {error.args[0]}") from None
    except ValueError as error:
        raise _not_a_catalog(f"its file {_PLACES}: {error}") from None


def _entries(tar: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each file of a tar, where its content begins, and its bytes."""
    begin = 0
    while block := tar[begin : begin + _TAR_BLOCK].rstrip(b"\0"):
        name, octal, kind = block[:100].rstrip(b"\0"), block[124:135], block[156:157]
        if _OCTAL.fullmatch(octal) is None:
            raise _not_a_catalog(f"no entry starts at byte {begin}")
        size = int(octal, 8)
        begin += _TAR_BLOCK
        if kind not in _TAR_KINDS or begin + size > len(tar):
            raise _not_a_catalog(f"the entry before byte {begin} is cut off, or of an unusual kind")
        if kind == _TAR_FILE:
            yield name.decode("ascii", "replace"), begin, size
        begin += size + _padding(size)


def _not_a_catalog(reason: str) -> InvalidManifest:
    return InvalidManifest(f"the first layer is not that of a model: {reason}")
