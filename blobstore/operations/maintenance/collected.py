"""The result of ``gc``: what it removed, and what it kept and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

Reason = Literal["young", "in use", "base", "damaged manifest", "lost manifest", "partial"]


class Removed(NamedTuple):
    """A file that was removed, or would be."""

    path: Path
    """Below the root of the store; absolute if it is elsewhere."""
    size: int
    """Bytes."""


class KeptBlob(NamedTuple):
    """A blob that no manifest references, but that was kept."""

    path: Path
    """Below the root of the store."""
    size: int
    """Bytes."""
    reason: Reason
    """Too young; leased; the base of a delta-encoded blob; perhaps the config of a damaged manifest; of a
    name whose manifest is lost; or a young unfinished download."""
    processes: tuple[int, ...]
    """The IDs of the processes that have leased it."""
    removable: float
    """When it is old enough, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of :func:`blobstore.gc`."""

    blobs: tuple[Removed, ...] = field(default=(), repr=False)
    """Blobs that no manifest references, hot and cold."""
    leftovers: tuple[Removed, ...] = field(default=(), repr=False)
    """Temporary files and leases of dead processes, caches of removed models, old unfinished downloads
    and uploads, and copies that ``run`` has made."""
    folders: tuple[Path, ...] = ()
    """Empty folders of manifests, below the root."""
    kept_blobs: tuple[KeptBlob, ...] = field(default=(), repr=False)
    """Blobs that no manifest references, but that were kept."""
    refusal: str = ""
    """Why the same collection fails without ``force``; only a dry run returns this."""

    @property
    def size(self) -> int:
        """Bytes that were freed, or would be."""
        return sum(item.size for item in (*self.blobs, *self.leftovers))

    @property
    def kept(self) -> int:
        """The number of kept blobs that are not bases."""
        return sum(item.reason != "base" for item in self.kept_blobs)

    @property
    def kept_size(self) -> int:
        """Bytes of these."""
        return sum(item.size for item in self.kept_blobs if item.reason != "base")

    @property
    def bases(self) -> int:
        """The number of kept blobs that are bases of delta-encoded blobs."""
        return len(self.kept_blobs) - self.kept

    @property
    def bases_size(self) -> int:
        """Bytes of these."""
        return sum(item.size for item in self.kept_blobs) - self.kept_size
