"""How a model's blobs are best read, chosen by what they lie on.

Nothing is timed: equal facts give equal choices. `docs/internals/decisions/0018-the-file-system-says-how-to-read.md` says why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast, get_args

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.mounts import FileSystem, file_system_of
from blobstore.core.system import available_memory, is_in_page_cache
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blobstore.store.protocols import BlobAccess

Read = Literal["auto", "mmap", "populate", "pread"]

_SAMPLES: Final = 3
"""Blobs of which is asked whether they are in the page cache."""
_RANKS: Final = "LOCAL_WORLD_SIZE"
"""What torchrun and others call the number of processes of one program on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFacts:
    """What the choice depends on."""

    file_system: FileSystem
    size: int = 0
    """Bytes of the blobs."""
    available: int = 0
    """Bytes of memory that processes may still take."""
    is_cached: bool | None = None
    """Whether the blobs are in the page cache; None while not all of them are wanted."""
    ranks: int = 1
    """Processes of this machine that load the model together."""


class ReadStrategy(NamedTuple):
    """A way to read, and why."""

    how: Read
    """``mmap`` reads pages when they are used, ``populate`` also ahead of that; ``pread`` copies."""
    reason: str


def choose(facts: ReadFacts) -> ReadStrategy:
    """Return how to read blobs of which these facts hold."""
    kind = facts.file_system.kind or "an unknown file system"
    if facts.file_system.is_remote:
        copies = f"{facts.ranks} copies" if facts.ranks > 1 else "a copy"
        if facts.size * facts.ranks > facts.available:
            return ReadStrategy("mmap", f"memory is too small for {copies} of what lies on {kind}")
        return ReadStrategy("pread", f"maps are slow on {kind}, so large requests are made of it")
    if facts.file_system.is_memory:
        return ReadStrategy("mmap", f"{kind} is memory")
    if facts.is_cached is None:
        return ReadStrategy("mmap", f"{kind} is local, and not all tensors are wanted yet")
    if facts.is_cached:
        return ReadStrategy("mmap", f"the blobs on {kind} are in the page cache")
    if facts.size > facts.available:
        return ReadStrategy("mmap", f"memory is too small for all that lies on {kind}")
    return ReadStrategy("populate", f"{kind} is local, and the page cache lacks blobs")


class ReadChooser:
    """Chooses how the blobs of a model are read, at first and when all of them are wanted.

    Args:
        store: the store that holds the model.
        read: what the user wants; anything but ``auto`` is the choice.

    Raises:
        UsageError: ``read`` is unknown.
    """

    def __init__(self, store: BlobAccess, read: str = "auto") -> None:
        if read not in get_args(Read):
            raise UsageError(f"read must be auto, mmap, populate or pread, got {quote(read)}")
        self._store = store
        self.is_auto = read == "auto"
        """Whether the user left the choice."""
        self._given = ReadStrategy(cast("Read", read), "it was asked for")
        # Where any blob is, so are the others.
        path = store.blob_path(Digest.of(b"")) if self.is_auto else ""
        self._file_system = file_system_of(path) if path else FileSystem("")

    def first(self, sizes: Iterable[int]) -> ReadStrategy:
        """Return the choice as long as not all blobs are wanted, given their sizes."""
        if not self.is_auto:
            return self._given
        if not self._file_system.is_remote:
            return choose(ReadFacts(file_system=self._file_system))
        ranks = os.environ.get(_RANKS, "")
        return choose(
            ReadFacts(
                file_system=self._file_system,
                size=sum(sizes),
                available=available_memory(),
                ranks=int(ranks) if ranks.isdecimal() else 1,
            )
        )

    def for_all(self, blobs: Sequence[tuple[Digest, int]]) -> ReadStrategy:
        """Return the choice if all blobs are wanted."""
        sizes = (size for _, size in blobs)
        if not self.is_auto or self._file_system.is_remote or self._file_system.is_memory:
            return self.first(sizes)
        is_cached = self._is_cached(blobs)
        return choose(
            ReadFacts(
                file_system=self._file_system,
                is_cached=is_cached,
                size=sum(sizes),
                available=0 if is_cached else available_memory(),
            )
        )

    def _is_cached(self, blobs: Sequence[tuple[Digest, int]]) -> bool:
        """Return whether samples of the blobs are in the page cache. Cold blobs and remote ones do not count."""
        last = len(blobs) - 1
        for slot in {last * part // (_SAMPLES - 1) for part in range(_SAMPLES if blobs else 0)}:
            digest, size = blobs[slot]
            try:
                descriptor = self._store.open_hot(digest, size)
            except BlobstoreError:
                continue
            try:
                if not is_in_page_cache(descriptor, 0, size):
                    return False
            finally:
                os.close(descriptor)
        return True
