"""Archives for the tests: of a small family of models, and forged ones with right digests."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest, ModelConfig, layers_digest
from blobstore.operations.archive.format import PREFIX, ArchiveTable, Kind, Member
from blobstore.operations.archive.pack import pack_models
from tests.support.frozen import layer, tuned, weights
from tests.support.models import add_blobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from blobstore.store.local import LocalStore

SMALL = 10_000
"""Numbers in a layer of a family's model; enough that it is coded, and frozen."""
FAMILY = ("base", "tuned")


def put_family(
    store: LocalStore, *, count: int = SMALL, children: Iterable[str] = ("tuned",)
) -> None:
    """Give a store a model, and what was trained from it; all share a layer."""
    shared = layer("shared", weights(7, count))
    own = {f"l{seed}": layer(f"l{seed}", weights(seed, count)) for seed in range(3)}
    add_blobs(store, "base", {**own, "shared": shared})
    for number, child in enumerate(children, start=1):
        blobs = {key: layer(key, tuned(10 * number, seed, count)) for seed, key in enumerate(own)}
        add_blobs(store, child, {**blobs, "shared": shared})


def packed_family(store: LocalStore, path: Path) -> bytes:
    """Return an archive of the family, with members of every kind."""
    put_family(store)
    pack_models(FAMILY, path, store=store, jobs=1)
    return path.read_bytes()


class Parts:
    """An archive taken apart, to be changed and put together again with right digests."""

    def __init__(self, data: bytes) -> None:
        table = ArchiveTable.parse(memoryview(data))
        self.members: list[Member] = list(table.members)
        self.names: list[tuple[str, int]] = list(table.names)
        self.places = list(pairwise(table.offsets()))
        """Where in the archive each member begins and ends."""
        self.stored = [data[begin:end] for begin, end in self.places]

    def number(self, kind: Kind) -> int:
        """Return the first member of a kind."""
        return next(number for number, item in enumerate(self.members) if item.kind == kind)

    def change(self, number: int, **fields: object) -> None:
        """Change what the table says of a member."""
        self.members[number] = self.members[number]._replace(**fields)  # type: ignore[arg-type]

    def put(self, number: int, data: bytes) -> None:
        """Change what is stored of a member, and its stored digest."""
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
    """Return an archive with a right footer."""
    return PREFIX + b"".join(stored) + ArchiveTable(members, names).to_bytes()


def raw(data: bytes, kind: Kind = Kind.RAW) -> Member:
    """Return the member of bytes that are stored as they are."""
    return Member(kind, len(data), Digest.of(data), len(data), Digest.of(data))


def model_archive(
    blobs: Mapping[str, bytes], name: str = "registry.ollama.ai/library/m:latest"
) -> bytes:
    """Return an archive of one model of blobs that are stored as they are."""
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
