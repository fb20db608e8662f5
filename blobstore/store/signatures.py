"""Signatures, kept with the digests of the manifests that they sign.

They belong to the digest of a manifest, so they apply to all of its names, and a model that is renamed
keeps them. Each is a file named by its own digest, in a folder named by the manifest's. The store does not
read what is in them. :mod:`gc` removes the signatures of manifests that are gone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError
from blobstore.store.scan import list_names, walk_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.store.layout import Layout

MAX_SIGNATURE_SIZE: Final = 32 * 2**20
"""Bytes. A bundle lists the files of a folder, of which a model may have tens of thousands."""
MAX_SIGNATURES: Final = 100
"""Signatures of one manifest that are read."""
_ENDING = ".sig"


class Signatures:
    """The signatures of a store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def keep(self, manifest: Digest, data: bytes) -> Path:
        """Store a signature of a manifest durably, and return its path; it may exist already.

        Raises:
            OSError: the store cannot be written.
        """
        folder = self._layout.signatures / manifest.hex
        path = folder / f"{Digest.of(data).hex}{_ENDING}"
        while not path.exists():
            for missing in (folder, self._layout.temporary):
                make_folders(missing, self._layout.root)
            with contextlib.suppress(FileNotFoundError):  # gc has removed the folder, still empty
                write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
        return path

    def of(self, manifest: Digest) -> Iterator[bytes]:
        """Yield the signatures of a manifest that can be read, in the order of their digests.

        A file whose content does not match its name is damaged, and left out.
        """
        folder = self._layout.signatures / manifest.hex
        names = sorted(name for name in list_names(folder) if name.endswith(_ENDING))
        for name in names[:MAX_SIGNATURES]:
            with contextlib.suppress(
                OSError, BlobstoreError
            ):  # removed since, or not a file of ours
                data = read_regular(folder / name, MAX_SIGNATURE_SIZE)
                if name == f"{Digest.of(data).hex}{_ENDING}":
                    yield data

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
