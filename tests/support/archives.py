"""Archives for the tests: a small family of models, and forged archives with valid digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from blobstore.archives.table import PREFIX, ArchiveTable, Kind, Member
from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.operations.archive.pack import pack_models
from blobstore.signatures.cosign import write_signature
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, tuned, weights
from tests.support.models import add_blobs

SMALL = 10_000
"""Elements of each layer in the family; enough that freezing compresses it."""
FAMILY = ("base", "tuned")


def put_family(
    store: LocalStore, *, count: int = SMALL, children: Iterable[str] = ("tuned",)
) -> None:
    """Add a base model and its fine-tunes to a store. All share a layer."""
    shared = layer("shared", weights(7, count))
    own = {f"l{seed}": layer(f"l{seed}", weights(seed, count)) for seed in range(3)}
    add_blobs(store, "base", {**own, "shared": shared})
    for number, child in enumerate(children, start=1):
        blobs = {key: layer(key, tuned(10 * number, seed, count)) for seed, key in enumerate(own)}
        add_blobs(store, child, {**blobs, "shared": shared})


def packed_family(store: LocalStore, path: Path) -> bytes:
    """Pack the family, and return the archive, which has members of every kind."""
    put_family(store)
    signature = write_signature(b"what is signed", b"by nobody")
    store.keep_signature(Digest.of(store.read_manifest("base")), signature, is_verified=True)
    pack_models(FAMILY, path, store=store, jobs=1)
    return path.read_bytes()


class Parts:
    """The parts of an archive, which can be changed and joined again with valid digests."""

    def __init__(self, data: bytes) -> None:
        table = ArchiveTable.parse(memoryview(data))
        self.members: list[Member] = list(table.members)
        self.names: list[tuple[str, int]] = list(table.names)
        self.places = list(pairwise(table.offsets()))
        """Where in the archive each member begins and ends."""
        self.stored = [data[begin:end] for begin, end in self.places]

    def number(self, kind: Kind) -> int:
        """Return the number of the first member of a kind."""
        return next(number for number, item in enumerate(self.members) if item.kind == kind)

    def change(self, number: int, **fields: object) -> None:
        """Change the table entry of a member."""
        self.members[number] = self.members[number]._replace(**fields)  # type: ignore[arg-type]

    def put(self, number: int, data: bytes) -> None:
        """Replace the stored bytes of a member, and their size and digest in the table."""
        self.stored[number] = data
        self.change(number, stored_size=len(data), stored_digest=Digest.of(data))

    def add(self, member: Member, data: bytes) -> None:
        """Add a member at the end."""
        self.members.append(member)
        self.stored.append(data)

    def data(self) -> bytes:
        """Return the archive."""
        return archive(self.members, self.stored, self.names)


def archive(
    members: Sequence[Member], stored: Sequence[bytes], names: Sequence[tuple[str, int]]
) -> bytes:
    """Return an archive with a valid footer."""
    return PREFIX + b"".join(stored) + ArchiveTable(members, names).to_bytes()


def raw(data: bytes, kind: Kind = Kind.RAW) -> Member:
    """Return the table entry of bytes that are stored uncompressed."""
    return Member(kind, len(data), Digest.of(data), len(data), Digest.of(data))


def model_archive(
    blobs: Mapping[str, bytes], name: str = "registry.ollama.ai/library/m:latest"
) -> bytes:
    """Return an archive of one model with uncompressed blobs."""
    layers = [
        Descriptor(media_types.TENSOR, Digest.of(data), len(data), key)
        for key, data in blobs.items()
    ]
    config = ModelConfig(layers_digest=layers_digest(layers)).to_bytes()
    described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
    manifest = Manifest(config=described, layers=tuple(layers)).to_bytes()
    contents = list(dict.fromkeys([config, *blobs.values()]))
    members = [raw(manifest, Kind.MANIFEST), *map(raw, contents)]
    return archive(members, [manifest, *contents], [(name, 0)])
