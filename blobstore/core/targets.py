"""Checks that a file or folder of a user is written outside of stores, whose files only the store writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError

_BLOB_NAME = re.compile(r"sha256-[0-9a-f]{64}")
_PARTS = ("blobs", "manifests", ".blobstore")


def check_target(target: str | os.PathLike[str]) -> None:
    """Check that a file or folder may be written at a path. If there is a link, that is replaced.

    Raises:
        BlobstoreError: the path is that of a blob, or inside a store.
        OSError: a part of the path cannot be read.
    """
    path = Path(target)
    # The last part may be a link, which is replaced.
    real = Path(os.path.realpath(path.parent), path.name)
    if any(_is_store(Path(*real.parts[:at]), part) for at, part in enumerate(real.parts)):
        raise BlobstoreError(
            f"{quote(target)} is inside a store, whose files models share",
            advice="choose a path outside of it; to change a model, export it, and import the result",
        )
    if _BLOB_NAME.fullmatch(real.name):
        raise BlobstoreError(
            f"{quote(target)} has the name of a blob, which models may share",
            advice="choose another name; to change a model, export it, and import the result",
        )


def check_new_file(target: str | os.PathLike[str], *, force: bool) -> None:
    """Check that a file may be written at a path: as :func:`check_target`, and nothing is lost there.

    Raises:
        BlobstoreError: as :func:`check_target`. Or there is something else than a file, or a file and not
            ``force``.
        OSError: a part of the path cannot be read.
    """
    check_target(target)
    if os.path.lexists(target) and not (force and Path(target).is_file()):
        raise BlobstoreError(
            f"{quote(target)} exists already" + (", and is not a regular file" if force else ""),
            advice="" if force else "replace it with force=True",
        )


def _is_store(root: Path, part: str) -> bool:
    """Return whether a part of a path below ``root`` belongs to a store."""
    return (
        part in _PARTS
        and (root / "blobs").is_dir()
        and any((root / other).is_dir() for other in _PARTS[1:])
    )
