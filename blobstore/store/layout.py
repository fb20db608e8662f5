"""Where things lie in a store. Pure: digests and references to paths, nothing is touched.

Only checked values become paths, so that nothing from a file or a command line can leave the root.
``blobs/`` and ``manifests/`` are Ollama's and hold nothing else: it deletes foreign names from the one
and stops pruning at a foreign file in the other. Everything of ours is in ``.blobstore/``, cold blobs
among it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from blobstore.core.digest import Digest
from blobstore.errors import InvalidReference
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from pathlib import Path

Folder = Literal[
    "blobs", "manifests", "temporary", "leases", "quarantine", "cold", "bases", "headers"
]
"""The folders of a store."""


class Layout:
    """The paths of a store below its root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs"
        """The folder of blobs."""
        self.manifests = root / "manifests"
        """The folder of manifests."""
        self.temporary = root / ".blobstore" / "tmp"
        """The folder of files that have no name yet."""
        self.lock = root / ".blobstore" / "lock"
        """The file whose lock all take who use the store; see :mod:`blobstore.store.locks`."""
        self.leases = root / ".blobstore" / "leases"
        """The folder of leases."""
        self.quarantine = root / ".blobstore" / "quarantine"
        """The folder of damaged files that repair has put aside."""
        self.cold = root / ".blobstore" / "cold"
        """The folder of cold blobs: models need them as they need those of :attr:`blobs`."""
        self.bases = root / ".blobstore" / "bases"
        """The folder of second names for hot blobs by which cold ones are coded."""
        self.headers = root / ".blobstore" / "headers"
        """The folder of the header index, a cache."""
        self._blob = str(self.blobs / Digest("").file_name)
        self._base = str(self.bases / Digest("").file_name)
        self._cold = str(self.cold / Digest("").file_name)

    def blob(self, digest: Digest) -> str:
        """Return the path of a blob; a text, because a model has thousands."""
        return self._blob + digest.hex

    def cold_blob(self, digest: Digest) -> str:
        """Return the path of a cold blob, which has the digest of what it decodes to in its name."""
        return self._cold + digest.hex

    def base_blob(self, digest: Digest) -> str:
        """Return the path of the second name of a hot blob by which cold ones are coded."""
        return self._base + digest.hex

    def verified(self, user: int) -> Path:
        """Return the path of what a user's processes found whole, a cache."""
        return self.headers.parent / f"verified-{user}"

    def manifest(self, reference: Reference) -> Path:
        """Return the path of a manifest."""
        return self.manifests.joinpath(*reference.parts)

    def reference(self, manifest: Path) -> Reference | None:
        """Return the reference of a manifest's path, None where the path spells no name."""
        try:
            return Reference(*manifest.relative_to(self.manifests).parts)
        except (InvalidReference, TypeError, ValueError):
            return None
