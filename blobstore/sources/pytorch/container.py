"""Recognises the kind of a checkpoint file by its content, never by its name."""

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
"""The first bytes of a zip archive; the second, of one without entries."""
_MARKUP = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_JOBLIB_FILE = "a joblib file: a pickle of Python objects, not a checkpoint"
_OTHERS: Final = (
    (b"GGUF", "a GGUF file; import it with Ollama, or the model's safetensors files here"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file itself; run git lfs pull"),
    (b"\x89HDF\r\n", "an HDF5 file, as Keras writes it"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x1f\x8b", "compressed with gzip; decompress it first"),
    (b"BZh", "compressed with bzip2; decompress it first"),
    (b"\xfd7zXZ\0", "compressed with xz; decompress it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"ZF", _JOBLIB_FILE),
)
"""First bytes of files that are not checkpoints, but may have such a name."""
_JOBLIB = re.compile(rb"joblib[._]")
_TAR_MAGIC = slice(257, 262)


def open_container(descriptor: int, size: int) -> Container:
    """Read the pickle of an open checkpoint of ``size`` bytes.

    Raises:
        CheckpointRefused: it is damaged, or of another format, which the message names.
        OSError: it cannot be read.
    """
    head = read_exactly(descriptor, _HEAD, 0)
    if head.startswith(ZIP_STARTS):
        return ZipCheckpoint(descriptor, size)
    other = other_kind(head)
    if other is None and is_legacy(head):
        return LegacyStream(descriptor, size)
    if other is None:
        if _JOBLIB.search(head):
            other = _JOBLIB_FILE
        elif head[:1] == b"\x80":
            other = (
                "a pickle of Python objects that torch.save did not write; show its contents with "
                "'blobstore inspect'"
            )
        else:
            other = "not a PyTorch checkpoint, nor any other format that blobstore knows"
    raise CheckpointRefused(f"this is {other}")


def other_kind(head: bytes) -> str | None:
    """Return a description of a file by its first bytes, if its format is known and not a pickle."""
    if not head:
        return "an empty file"
    for magic, what in _OTHERS:
        if head.startswith(magic):
            return what
    if _MARKUP.match(head):
        return "a web page, probably an error or a login page; download the file again"
    if head[_TAR_MAGIC] == b"ustar":
        return (
            "a tar archive: a checkpoint of torch before 0.2, or a packed folder; unpack it, or "
            "load it with torch and save it again"
        )
    if head[8:10] in (b'{"', b"{}", b"{ ") and not any(head[5:8]):
        return "a safetensors file; give it the ending .safetensors"
    return None
