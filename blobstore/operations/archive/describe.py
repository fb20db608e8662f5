"""The operation ``show`` for archives: their models, from the table and the manifests alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.archives.reader import open_archive
from blobstore.archives.table import Kind
from blobstore.core.digest import Digest
from blobstore.operations.sign.report import check_unkept
from blobstore.operations.sign.require_trust import policy_keys
from blobstore.store.local import LocalStore
from blobstore.store.name_patterns import select_references

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from blobstore.manifests.reference import Reference
    from blobstore.operations.sign.report import CheckedSignature
    from blobstore.store.local import StoreLike


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedModelDescription:
    """A model of an archive."""

    reference: Reference
    digest: Digest
    """The digest of the manifest's bytes."""
    blobs: int
    size: int
    """Bytes of the blobs, after decompression."""
    stored: int
    """Bytes that they take in the archive; models may share blobs."""
    signatures: tuple[CheckedSignature, ...]
    """The signatures in the archive, checked with the keys of a policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveDescription:
    """An archive, as far as its table and manifests describe it."""

    path: Path
    size: int
    """Bytes of the file."""
    blobs: int
    """Blobs of all models, each counted once, and of bases that are in no model."""
    deltas: int
    """Blobs among them that are stored as deltas."""
    models: tuple[ArchivedModelDescription, ...]


def describe_archive(
    path: str | os.PathLike[str], patterns: Iterable[str] = (), *, store: StoreLike = None
) -> ArchiveDescription:
    """List the models of an archive. No blob is read; :func:`check_archive` verifies them.

    Args:
        path: the archive.
        patterns: names, globs or starts of IDs; by default all models are listed.
        store: the store whose policy has the keys for the signatures, or its path.

    Raises:
        NotFound: there is no such file.
        ArchiveDamaged: the table or a manifest is truncated or altered.
        ModelNotFound: no model matches a pattern.
        UsageError: a pattern is ambiguous.
    """
    with open_archive(path) as archive:
        members, keys = archive.members, policy_keys(LocalStore.of(store))
        models = []
        for model in archive.models(select_references(archive, patterns)):
            digest = Digest.of(model.data)
            numbers = [archive.blobs[blob.digest] for blob in model.manifest.blobs]
            models.append(
                ArchivedModelDescription(
                    reference=model.reference,
                    digest=digest,
                    blobs=len(numbers),
                    size=sum(members[number].size for number in numbers),
                    stored=sum(members[number].stored_size for number in numbers),
                    signatures=check_unkept(archive.signatures(digest), digest, keys),
                )
            )
        return ArchiveDescription(
            path=Path(path),
            size=Path(path).stat().st_size,
            blobs=len(archive.blobs),
            deltas=sum(member.kind == Kind.DELTA for member in members),
            models=tuple(models),
        )
