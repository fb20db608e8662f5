"""Limits of documents from untrusted remotes, and how their bytes are collected.

A number in a document allocates nothing: memory grows with the bytes that arrive. One document has a limit, and
so have all documents of a kind that one command reads from one remote. All documents that a process has at the
same time share one budget of memory, too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from typing_extensions import Buffer

_KIB: Final = 2**10
_MIB: Final = 2**20
ADVICE: Final = "no known model needs so much; check the address, and who can write there"
"""What to do about a document that is too large."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a kind of document is read."""

    one: int
    """Bytes of one."""
    all: int = 0
    """Bytes of all; 0 if a command reads one at most."""
    count: int = 0
    """Entries of a list, or documents; 0 if a command reads one at most."""


MANIFEST: Final = Limit(64 * _MIB)
"""The manifest of a model as stores have it."""
REGISTRY_MANIFEST: Final = Limit(4 * _MIB, 256 * _MIB, 1024)
"""Manifests and indexes of a registry: the parts of a model that was divided, or its cold layers."""
REFERRERS: Final = Limit(4 * _MIB, 64 * _MIB, 10_000)
"""Pages of a list of what refers to a manifest; its entries."""
TAGS: Final = Limit(4 * _MIB, 64 * _MIB, 1_000_000)
"""Pages of a list of tags; its entries."""
CATALOG: Final = Limit(128 * _MIB)
"""The first tar of an image."""
SMALL_FILES: Final = Limit(256 * _MIB, 512 * _MIB, 100_000)
"""Configs and other files of a model besides its tensors; those beyond are read when they are asked for."""
HEADERS: Final = Limit(100_000_008, 512 * _MIB, 1_000_000)
"""Headers of blobs with their prefixes."""
PACKED_HEADERS: Final = Limit(256 * _MIB)
"""The headers of a model in one object."""
COLD_INDEX: Final = Limit(64 * _MIB)
"""The list of compressed forms in object storage."""
SIGNATURES: Final = Limit(32 * _MIB, 128 * _MIB, 100)
"""Signatures that come with a model."""
UNVERIFIED: Final = Limit(32 * _MIB, 32 * _MIB, 20)
"""Signatures of a manifest that no key has verified and that are kept; the oldest ones are removed."""
LISTED: Final = 10_000_000
"""Entries of a list of objects, of which a page is kept."""
LEASE: Final = Limit(64 * _MIB, 256 * _MIB, 10_000)
"""Leases in object storage."""
HUB_LISTING: Final = Limit(32 * _MIB, 256 * _MIB, 1_000_000)
"""Pages of a list of the Hub; its entries."""
UPSTREAM_LISTING: Final = Limit(32 * _MIB, 64 * _MIB, 20_000)
"""The same for a server, whose clients choose the repositories; also for a revision's description by the Hub."""
ERROR: Final = Limit(64 * _KIB)
"""The body of a response that reports an error, or that has a token."""


class Crowded(RemoteError):
    """Others take the memory of the process now, or its open files."""


class Memory:
    """Bytes of memory that documents may take at the same time. Any number of threads may use it.

    Callers never wait for memory, because a waiting one would hold memory that others wait for.
    """

    def __init__(self, most: int) -> None:
        """Allow ``most`` bytes."""
        self.most = most
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, size: int, what: str) -> None:
        """Take memory until :meth:`give` is called with the same size. Raises Crowded, and takes none."""
        with self._lock:
            if self.taken + size > self.most:
                raise Crowded(
                    f"{what}: this process reads too many large documents now",
                    advice="try again later",
                )
            self.taken += size

    def give(self, size: int) -> None:
        """Release memory."""
        with self._lock:
            self.taken -= size


DOCUMENTS: Final = Memory(strict_json.MAX_MEMORY)
"""Memory that parsing the largest document takes. All documents of a process together get no more."""
IMPORTS: Final = Memory(2**30)
"""Memory for headers, indexes and configs of models that a server imports. It is apart, since an import takes long."""
IMPORT: Final = 640 * _MIB
"""Of that for one model. Known models have up to 210,000 tensors, whose headers and indexes take 500 MiB."""


class Held:
    """Memory that is held until it is released, or until nothing refers to this object."""

    def __init__(self, memory: Memory | None = None, most: int = 0) -> None:
        """Hold none yet.

        Args:
            memory: what to take it from, by default :data:`DOCUMENTS`.
            most: bytes that may be held; 0 for all of it.
        """
        self._memory = DOCUMENTS if memory is None else memory
        self._most = most or self._memory.most
        self._size = 0

    def add(self, size: int, what: str) -> None:
        """Hold more bytes.

        Raises:
            RemoteError: no document may take so much.
            Crowded: other documents take that memory now.
        """
        if self._size + size > self._most:
            message = f"{what}: it would take more than {self._most >> 20} MiB of memory"
            raise RemoteError(message, advice=ADVICE)
        self._memory.take(size, what)
        self._size += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Hold none from now on."""
        self._memory.give(self._size)
        self._size = 0

    __del__ = release


class Document(bytes):
    """Bytes of a stranger that hold the memory that it takes to parse them."""

    held: Held


def read_document(pieces: Iterable[bytes], most: int, what: str, advice: str = ADVICE) -> Document:
    """Return a document of ``most`` bytes at most. Its memory is held before it is read to its end.

    Raises:
        RemoteError: it has more bytes; or as :meth:`Held.add`.
    """
    found: list[bytes] = []
    size, held = 0, Held()
    try:
        for piece in pieces:
            size += len(piece)
            _check_size(size, most, what, advice)
            held.add(strict_json.memory_of(piece), what)
            found.append(bytes(piece))
        document = Document(b"".join(found))
    except BaseException:
        # The traceback keeps these as long as the error, which may be the length of a pause.
        held.release()
        raise
    finally:
        found.clear()
    document.held = held
    return document


def _check_size(size: int, most: int, what: str, advice: str) -> None:
    if size > most:
        raise RemoteError(f"{what}: more than {most} bytes", advice=advice)


class Budget:
    """The rest of a limit on documents of one kind. Any number of threads may use it."""

    def __init__(self, limit: Limit, what: str, advice: str = ADVICE) -> None:
        """Take the name of the documents for messages, and the advice if there is too much of them."""
        self._limit = limit
        self._what = what
        self._advice = advice
        self._bytes = self._count = 0
        self._lock = threading.Lock()

    def spend(self, size: int, count: int = 1) -> None:
        """Count bytes and entries. Raises RemoteError, and counts none, if they exceed the limit of all."""
        with self._lock:
            if self._bytes + size > self._limit.all:
                raise RemoteError(
                    f"{self._what}: more than {self._limit.all} bytes", advice=self._advice
                )
            if self._count + count > self._limit.count:
                raise RemoteError(
                    f"{self._what}: more than {self._limit.count} entries", advice=self._advice
                )
            self._bytes += size
            self._count += count


def gather(pieces: Iterable[Buffer]) -> bytes:
    """Return bytes that arrive in pieces, each of which is valid until the next one is asked for."""
    found = [bytes(piece) for piece in pieces]
    return found[0] if len(found) == 1 else b"".join(found)
