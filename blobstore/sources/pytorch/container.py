"""What kind of file a checkpoint is, told by its content and never by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.files import read_exactly
from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch.legacy import LegacyStream, is_legacy
from blobstore.sources.pytorch.zip import ZipCheckpoint

if TYPE_CHECKING:
    from typing import Final

    from blobstore.sources.pytorch.storages import Container

_HEAD = 1 << 12
ZIP_STARTS: Final = (b"PK\3\4", b"PK\5\6")
"""What a zip archive begins with; the second, one without entries."""
_MARKUP = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_OTHERS: Final = (
    (b"GGUF", "a GGUF file; import it with Ollama, or the model's safetensors files here"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file itself; run git lfs pull"),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes it"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x1f\x8b", "compressed with gzip; unpack it first"),
    (b"BZh", "compressed with bzip2; unpack it first"),
    (b"\xfd7zXZ\0", "compressed with xz; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"ZF", "a file of joblib, which is a pickle of Python objects and no checkpoint"),
)
"""Beginnings of files that are called checkpoints and are none, with what they are."""
_JOBLIB = re.compile(rb"joblib[._]")
_TAR_MAGIC = slice(257, 262)


def open_container(descriptor: int, size: int) -> Container:
    """Read the pickle of an open checkpoint of ``size`` bytes.

    Raises:
        CheckpointRefused: it is damaged, or of a kind that is not read; the message says which.
        OSError: it cannot be read.
    """
    head = read_exactly(descriptor, _HEAD, 0)
    if head.startswith(ZIP_STARTS):
        return ZipCheckpoint(descriptor, size)
    other = other_kind(head)
    if other is None and is_legacy(head):
        return LegacyStream(descriptor, size)
    raise CheckpointRefused(f"this is {other or _pickle_or_nothing(head)}")


def other_kind(head: bytes) -> str | None:
    """Return what a file is that begins with ``head``, if it is something known and no pickle."""
    if not head:
        return "an empty file"
    for magic, what in _OTHERS:
        if head.startswith(magic):
            return what
    if _MARKUP.match(head):
        return "a web page, most likely an error or a login page; fetch the file again"
    if head[_TAR_MAGIC] == b"ustar":
        return (
            "a tar archive: a checkpoint of torch before 0.2, or a packed folder; unpack it, or "
            "load it with torch and save it again"
        )
    if head[8:10] in (b'{"', b"{}", b"{ ") and not any(head[5:8]):
        return "a safetensors file; give it the ending .safetensors"
    return None


def _pickle_or_nothing(head: bytes) -> str:
    if _JOBLIB.search(head):
        return "a file of joblib, which is a pickle of Python objects and no checkpoint"
    if head[:1] == b"\x80":
        return (
            "a bare pickle of Python objects and no checkpoint of torch.save; see what is in it "
            "with blobstore inspect"
        )
    return "no PyTorch checkpoint, nor any other file that blobstore knows"
