"""The paths of a store. Pure: digests and references become paths, and nothing is touched.

Only checked values become paths, so no file and no command line can refer to anything outside the root.
``blobs/`` and ``manifests/`` are Ollama's and hold nothing else: Ollama deletes unknown files from the one,
and they stop it from pruning the other. Everything else is in ``.blobstore/``, including cold blobs.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Literal

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import InvalidReference
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from pathlib import Path

Folder = Literal[
    "blobs",
    "manifests",
    "temporary",
    "leases",
    "quarantine",
    "cold",
    "bases",
    "headers",
    "history",
    "published",
    "partial",
    "remotes",
    "signatures",
    "cache",
    "pulled",
    "arrivals",
    "downloads",
]
"""The folders of a store, named as the attributes of :class:`Layout`."""


class Layout:
    """The paths of a store below its root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs"
        """Hot blobs."""
        self.manifests = root / "manifests"
        """Manifests, below host, namespace and model."""
        self.temporary = root / ".blobstore" / "tmp"
        """Files that have no name yet."""
        self.lock = root / ".blobstore" / "lock"
        """The file that processes lock; see :mod:`blobstore.store.locks`."""
        self.leases = root / ".blobstore" / "leases"
        """Leases."""
        self.quarantine = root / ".blobstore" / "quarantine"
        """Damaged files that repair has replaced."""
        self.cold = root / ".blobstore" / "cold"
        """Cold blobs, which models need as much as hot ones."""
        self.cold_index = root / ".blobstore" / "cold-index"
        """Which base each cold blob needs; see :mod:`blobstore.store.cold_index`."""
        self.bases = root / ".blobstore" / "bases"
        """Second hard links of hot blobs that are the bases of cold ones."""
        self.headers = root / ".blobstore" / "headers"
        """The header index, a cache."""
        self.history = root / ".blobstore" / "history"
        """Former manifests of names; see :mod:`blobstore.store.history`."""
        self.published = root / ".blobstore" / "published"
        """Second links of manifests, below host, namespace and model; see :mod:`blobstore.store.published`."""
        self.partial = root / ".blobstore" / "partial"
        """Unfinished downloads; see :mod:`blobstore.store.partial`."""
        self.remotes = root / ".blobstore" / "remotes"
        """Records of pushes and pulls, and unfinished uploads: a cache."""
        self.signatures = root / ".blobstore" / "signatures"
        """Signatures of manifests; see :mod:`blobstore.store.signatures`."""
        self.cache = root / ".blobstore" / "cache"
        """Manifests of remote models whose blobs are kept; see :mod:`blobstore.store.remote_cache`."""
        self.pulled = root / ".blobstore" / "pulled"
        """Which models `serve` has fetched from an upstream, and when they were last used."""
        self.arrivals = root / ".blobstore" / "arrivals"
        """Files that `serve` is fetching from an upstream."""
        self.downloads = root / ".blobstore" / "downloads"
        """Files that are being imported from elsewhere; see :mod:`blobstore.store.download_folders`."""
        self.claims = root / ".blobstore" / "claims"
        """Locks of blobs that are being read from a remote; see :mod:`blobstore.store.claims`."""
        self.policy = root / ".blobstore" / "trust.toml"
        """The policy: which signatures the models of the store need."""
        # Prefixes, built once: pathlib would take long to join thousands of paths.
        self._manifests = str(self.manifests)
        self._blob = str(self.blobs / Digest("").file_name)
        self._base = str(self.bases / Digest("").file_name)
        self._cold = str(self.cold / Digest("").file_name)

    def blob(self, digest: Digest) -> str:
        """Return the path of a hot blob; a string, because a model has thousands of blobs."""
        return self._blob + digest.hex

    def cold_blob(self, digest: Digest) -> str:
        """Return the path of a cold blob, which is named by the digest of the decoded bytes."""
        return self._cold + digest.hex

    def base_blob(self, digest: Digest) -> str:
        """Return the path of the second hard link of a hot blob that is a base."""
        return self._base + digest.hex

    def verified(self, user: int) -> Path:
        """Return the path of a user's cache of blobs that were verified."""
        return self.headers.parent / f"verified-{user}"

    def references(self, user: int, remote: str = "") -> Path:
        """Return the path of what a user has read of manifests, here or at the address of a remote.

        See :mod:`blobstore.store.references`.
        """
        ending = f"-{Digest.of(remote.encode()).hex}" if remote else ""
        return self.headers.parent / f"references-{user}{ending}"

    def given_names(self, user: int) -> Path:
        """Return the path of a user's journal of names; see :mod:`blobstore.store.spellings`."""
        return self.headers.parent / f"references-{user}-names"

    def manifest_file(self, reference: Reference) -> str:
        """Return the path of a manifest as a string, because there may be very many names."""
        return "/".join((self._manifests, *reference.parts))

    def manifest(self, reference: Reference) -> Path:
        """Return the path of a manifest."""
        return self.manifests.joinpath(*reference.parts)

    def reference(self, manifest: Path) -> Reference | None:
        """Return the reference that a manifest's path spells, or None."""
        try:
            return Reference(*manifest.relative_to(self.manifests).parts)
        except (InvalidReference, TypeError, ValueError):
            # A path with too few or too many parts raises TypeError, one outside the folder
            # ValueError.
            return None


def why_refused(root: Path, error: OSError, *, is_dry: bool = False) -> str:
    """Return why the system refused to write to a store, or in a dry run to read it."""
    store = quote(root)
    place = f" ({quote(error.filename)})" if error.filename else ""
    denied = f"no permission to {'read' if is_dry else 'write to'} the store {store}{place}"
    reasons = {
        errno.EROFS: f"the store {store} is on a read-only file system",
        errno.EACCES: denied,
        errno.EPERM: denied,
        errno.ENOSPC: f"no space left for the store {store}; free some or use another",
        errno.EDQUOT: f"the disk quota of the store {store} is used up",
        errno.EXDEV: f"the folders of the store {store} are on different file systems",
    }
    attempt = "reading" if is_dry else "writing to"
    otherwise = f"{attempt} the store {store} failed: {error.strerror}{place}"
    return reasons.get(error.errno or 0, otherwise)
