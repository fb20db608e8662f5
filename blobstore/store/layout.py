"""Where things lie in a store. Pure: digests and references to paths, nothing is touched.

Only checked values become paths, so that nothing from a file or a command line can leave the root.
``blobs/`` and ``manifests/`` are Ollama's and hold nothing else: it deletes foreign names from the one
and stops pruning at a foreign file in the other. Everything of ours is in ``.blobstore/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import InvalidReference
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.digest import Digest


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of a store below its root."""

    root: Path

    @property
    def blobs(self) -> Path:
        """The folder of blobs."""
        return self.root / "blobs"

    @property
    def manifests(self) -> Path:
        """The folder of manifests."""
        return self.root / "manifests"

    @property
    def temporary(self) -> Path:
        """The folder of files that have no name yet."""
        return self.root / ".blobstore" / "tmp"

    @property
    def headers(self) -> Path:
        """The folder of the header index, a cache."""
        return self.root / ".blobstore" / "headers"

    def blob(self, digest: Digest) -> str:
        """Return the path of a blob; a text, because a model has thousands."""
        return f"{self.root}/blobs/{digest.file_name}"

    def manifest(self, reference: Reference) -> Path:
        """Return the path of a manifest."""
        return self.manifests.joinpath(*reference.parts)

    def reference(self, manifest: Path) -> Reference | None:
        """Return the reference of a manifest's path, None where the path spells no name."""
        try:
            return Reference(*manifest.relative_to(self.manifests).parts)
        except (InvalidReference, TypeError, ValueError):
            return None
