"""Names formats of weight files that blobstore does not read, by content or by the ending of a name."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

JOBLIB: Final = "a joblib file: a pickle of Python objects, not a checkpoint"
INSTEAD: Final = "use the model's safetensors files, or store it as it is with --keep"
"""Advice for files that cannot be read."""
_TAR = (
    "a tar archive: a checkpoint of torch before 0.2, or a packed folder; unpack it, or load it with "
    "torch and save it again"
)
_BY_MAGIC: Final = (
    (0, b"\x89HDF\r\n", f"an HDF5 file, as Keras writes it; {INSTEAD}"),
    (0, b"\x93NUMPY", f"a numpy array; {INSTEAD}"),
    (4, b"TFL3", f"a TensorFlow Lite file; {INSTEAD}"),
    (4, b"ET12", f"an ExecuTorch program; {INSTEAD}"),
    (0, b"\x1f\x8b", "compressed with gzip; decompress it first"),
    (0, b"BZh", "compressed with bzip2; decompress it first"),
    (0, b"\xfd7zXZ\0", "compressed with xz; decompress it first"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd; decompress it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (0, b"ZF", JOBLIB),
    (257, b"ustar", _TAR),
)
"""Offset and first bytes of formats."""
# A protobuf: the version of the format, then the name of the program that wrote it.
_ONNX = re.compile(rb"\x08[\x01-\x1f]\x12[\x01-\x7f][A-Za-z]")
_ZIP_ENTRY = re.compile(rb"PK\x03\x04.{22}(?P<length>..)", re.DOTALL)
_BY_ENDING: Final = {
    ".onnx": "an ONNX file",
    ".ggml": "a GGML file",
    ".h5": "an HDF5 file",
    ".hdf5": "an HDF5 file",
    ".keras": "a Keras file",
    ".npz": "a NumPy archive",
    ".npy": "a numpy array",
    ".msgpack": "a msgpack file of Flax",
    ".ot": "a weight file of tch",
    ".tflite": "a TensorFlow Lite file",
    ".pb": "a TensorFlow graph",
    ".mlmodel": "a Core ML file",
    ".mlpackage": "a Core ML package",
    ".pte": "an ExecuTorch program",
    ".engine": "a TensorRT engine",
    ".nemo": "a NeMo archive; unpack it first",
}


def format_of_content(head: bytes) -> str | None:
    """Return a description of a file that begins with ``head``; None if the format is not known."""
    if entry := _ZIP_ENTRY.match(head):
        end = 30 + int.from_bytes(entry["length"], "little")
        return f"a NumPy archive; {INSTEAD}" if head[30:end].endswith(b".npy") else None
    for offset, magic, what in _BY_MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return what
    return f"an ONNX file; {INSTEAD}" if _ONNX.match(head) else None


def format_of_name(name: str) -> str | None:
    """Return a description of a file by the ending of its name; None if it says nothing."""
    return _BY_ENDING.get(PurePath(name).suffix.lower())
