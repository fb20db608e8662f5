"""Signatures, kept with the digests of the manifests that they sign.

They belong to the digest of a manifest, so they apply to all of its names, and a model that is renamed
keeps them. Each is a file named by its own digest, in a folder named by the manifest's. The store does not
read what is in them.

Those that a remote sent, and that no key has verified, have another ending and are few: they take the place
of each other only, never of those that were made here or verified.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError, InvalidDigest
from blobstore.store.scan import list_names, walk_files

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from blobstore.store.layout import Layout

MAX_SIGNATURE_SIZE: Final = limits.SIGNATURES.one
"""Bytes. A bundle lists the files of a folder, of which a model may have tens of thousands."""
MAX_SIGNATURES: Final = 10_000
"""Signatures of one manifest that are read, the newest first."""
_VERIFIED = ".sig"
_UNVERIFIED = ".unverified"


class KeptSignature(NamedTuple):
    """A signature that is kept."""

    path: Path
    data: bytes | None
    """None if the file is damaged or cannot be read."""
    is_damaged: bool = False
    """Whether it was read, and does not match its name."""

    @property
    def is_verified(self) -> bool:
        """Whether it was made here or verified when it was kept, which proves nothing later."""
        return self.path.suffix == _VERIFIED


class Signatures:
    """The signatures of a store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def folder(self, manifest: Digest) -> Path:
        """Return the folder of the signatures of a manifest."""
        return self._layout.signatures / manifest.hex

    def keep(self, manifest: Digest, data: bytes, *, is_verified: bool) -> None:
        """Store a signature of a manifest durably; a damaged file of it is replaced.

        Raises:
            OSError: the store cannot be written.
        """
        folder, name = self.folder(manifest), Digest.of(data).hex
        verified, unverified = folder / f"{name}{_VERIFIED}", folder / f"{name}{_UNVERIFIED}"
        if is_verified:
            self._write(verified, data)
            # Only after the verified one is durable, so that a crash leaves at least one of them.
            unverified.unlink(missing_ok=True)
        elif _kept(verified).data is None and len(data) <= limits.UNVERIFIED.one:
            self._write(unverified, data)
            count = size = 0
            # From newest to oldest, so the oldest are beyond the limits. The new one stays even if
            # the clock was set back.
            for path, status in _files(folder, _UNVERIFIED):
                count, size = count + 1, size + status.st_size
                is_over = count > limits.UNVERIFIED.count or size > limits.UNVERIFIED.all
                if is_over and path != unverified:
                    path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        while _kept(path).data is None:
            for missing in (path.parent, self._layout.temporary):
                make_folders(missing, self._layout.root)
            with contextlib.suppress(FileNotFoundError):  # gc has removed the folder, still empty
                write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
                return

    def of(self, manifest: Digest) -> Iterator[KeptSignature]:
        """Yield the signatures of a manifest, one at a time: unverified ones last, the newest first.

        The order is that of their times, because the sender can choose digests.
        """
        folder = self.folder(manifest)
        for ending in (_VERIFIED, _UNVERIFIED):
            for path, _ in _files(folder, ending)[:MAX_SIGNATURES]:
                yield _kept(path)

    def manifests(self) -> Iterator[Digest]:
        """Yield the digests of the manifests that have signatures."""
        for name in list_names(self._layout.signatures):
            with contextlib.suppress(InvalidDigest):
                yield Digest.parse(f"sha256:{name}")

    def without(self, manifests: set[Digest]) -> Iterator[Path]:
        """Yield the files of the signatures of all other manifests."""
        known = {digest.hex for digest in manifests}
        for folder in list_names(self._layout.signatures):
            if folder not in known:
                for entry in walk_files(self._layout.signatures / folder):
                    yield Path(entry.path)

    def remove_empty_folders(self) -> None:
        """Remove the folders of manifests that have no signatures."""
        for folder in list_names(self._layout.signatures):
            with contextlib.suppress(OSError):  # it has files
                (self._layout.signatures / folder).rmdir()


def _files(folder: Path, ending: str) -> list[tuple[Path, os.stat_result]]:
    """Return the entries of a folder whose names have an ending, the newest first."""
    found = []
    for name in list_names(folder):
        if name.endswith(ending):
            with contextlib.suppress(FileNotFoundError):  # removed since
                found.append((folder / name, (folder / name).lstat()))
    return sorted(found, key=lambda item: item[1].st_mtime_ns, reverse=True)


def _kept(path: Path) -> KeptSignature:
    """Read and hash a signature."""
    try:
        data = read_regular(path, MAX_SIGNATURE_SIZE)
    except (OSError, BlobstoreError):
        return KeptSignature(path, None)
    is_damaged = Digest.of(data).hex != path.stem
    return KeptSignature(path, None if is_damaged else data, is_damaged=is_damaged)
