"""Recognises the kind of a checkpoint file by its content, never by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.files import read_exactly
from blobstore.errors import CheckpointDamaged, CheckpointUnsupported
from blobstore.sources.formats import JOBLIB, format_of_content
from blobstore.sources.pytorch.legacy import LegacyStream, is_legacy
from blobstore.sources.pytorch.zip import ZipCheckpoint

if TYPE_CHECKING:
    from typing import Final

    from blobstore.sources.pytorch.storages import Container

_HEAD = 1 << 12
ZIP_STARTS: Final = (b"PK\3\4", b"PK\5\6")
"""The first bytes of a zip archive; the second, of one without entries."""
_MARKUP = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_JOBLIB_PICKLE = re.compile(rb"joblib[._]")


class UnknownFormat(CheckpointDamaged):
    """The content of a file is neither a checkpoint nor anything else that is known."""


def open_container(descriptor: int, size: int) -> Container:
    """Read the pickle of an open checkpoint of ``size`` bytes.

    Raises:
        CheckpointDamaged: it is damaged, or of no known format.
        CheckpointUnsupported: it is of a format that is not read.
        OSError: it cannot be read.
    """
    head = read_exactly(descriptor, _HEAD, 0)
    if other := format_of_content(head):
        raise CheckpointUnsupported(f"this is {other}")
    if head.startswith(ZIP_STARTS):
        return ZipCheckpoint(descriptor, size)
    if instead := _incomplete(head):
        raise CheckpointDamaged(f"this is {instead}")
    other = other_kind(head)
    if other is None and is_legacy(head):
        return LegacyStream(descriptor, size)
    if other is None and _JOBLIB_PICKLE.search(head):
        other = JOBLIB
    if other is None and head[:1] == b"\x80":
        other = (
            "a pickle of Python objects that torch.save did not write; show its contents with "
            "'blobstore inspect'"
        )
    if other is None:
        raise UnknownFormat(
            "this is not a PyTorch checkpoint, nor any other format that blobstore knows"
        )
    raise CheckpointUnsupported(f"this is {other}")


def other_kind(head: bytes) -> str | None:
    """Return a description of a file by its first bytes, if its format is known and not a pickle."""
    if instead := _incomplete(head):
        return instead
    if head[8:10] in (b'{"', b"{}", b"{ ") and not any(head[5:8]):
        return "a safetensors file; give it the ending .safetensors"
    return format_of_content(head)


def _incomplete(head: bytes) -> str | None:
    """Return a description of the file that a failed download left, by its first bytes."""
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs, not the file itself; run git lfs pull"
    if _MARKUP.match(head):
        return "a web page, probably an error or a login page; download the file again"
    return None
