"""Recognises the kind of a checkpoint file by its content, never by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.file_kinds import CHECKPOINT, HEAD, JOBLIB, PICKLE, kind_of
from blobstore.core.files import read_exactly
from blobstore.errors import CheckpointDamaged, CheckpointUnsupported
from blobstore.sources.pytorch.legacy import LegacyStream, is_legacy
from blobstore.sources.pytorch.zip import ZipCheckpoint

if TYPE_CHECKING:
    from typing import Final

    from blobstore.sources.pytorch.storages import Container

ZIP_STARTS: Final = (b"PK\3\4", b"PK\5\6")
"""The first bytes of a zip archive; the second, of one without entries."""
_JOBLIB_PICKLE = re.compile(rb"joblib[._]")


class UnknownFormat(CheckpointUnsupported):
    """The content of a file is neither a checkpoint nor anything else that is known."""


def is_checkpoint(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` may be a checkpoint, or another file whose tensors are read."""
    kind = kind_of(head)
    return is_legacy(head) if kind is None else kind.use == "read"


def open_container(descriptor: int, size: int) -> Container:
    """Read the pickle of an open checkpoint of ``size`` bytes.

    Raises:
        CheckpointDamaged: it is damaged, or something else is in its place.
        CheckpointUnsupported: it is of a format that is not read, or not known.
        OSError: it cannot be read.
    """
    head = read_exactly(descriptor, HEAD, 0)
    kind = kind_of(head)
    if kind is CHECKPOINT and head.startswith(ZIP_STARTS):
        return ZipCheckpoint(descriptor, size)
    if kind in (None, CHECKPOINT):
        if is_legacy(head):
            return LegacyStream(descriptor, size)
        if _JOBLIB_PICKLE.search(head):
            kind = JOBLIB
        elif kind is not None:
            kind = PICKLE
    if kind is None:
        raise UnknownFormat(
            "this is not a PyTorch checkpoint, nor any other format that blobstore knows"
        )
    error = CheckpointDamaged if kind.use == "absent" else CheckpointUnsupported
    raise error(f"this is {kind.what}", advice=kind.advice)
