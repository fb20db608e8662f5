"""Says what a file is by its first bytes, whatever its name is; for formats without a mark, by its name.

There are three uses. Some kinds have tensors that can be read. Others are intact, but of a format that is only
stored as it is. The rest are absent: what a download left in place of the file itself. Nobody wants these, so
no option accepts them.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Final, Literal, NamedTuple

from blobstore.errors import DamagedSource, UnsupportedSource

HEAD: Final = 1 << 12
"""Bytes that are looked at."""


class FileKind(NamedTuple):
    """What a file is."""

    what: str
    """A noun with its article, for messages."""
    advice: str = ""
    """What to do with such a file, besides storing it as it is."""
    use: Literal["read", "stored", "absent"] = "stored"
    """Whether its tensors can be read; or it is not the file itself."""

    def error(self, where: str, *, advice: str = "") -> DamagedSource | UnsupportedSource:
        """Return the error of a file of this kind, which cannot be read."""
        error = DamagedSource if self.use == "absent" else UnsupportedSource
        return error(f"{where}: this is {self.what}", advice=advice or self.advice)


SAFETENSORS: Final = FileKind("a safetensors file", "give it the ending .safetensors", "read")
GGUF: Final = FileKind("a GGUF file", "give it the ending .gguf", "read")
CHECKPOINT: Final = FileKind("a PyTorch checkpoint", "give it the ending .pt", "read")
EMPTY: Final = FileKind("an empty file", "download it again", "absent")
ZEROS: Final = FileKind(
    "an unfinished download: it begins with zeros",
    "finish the download, or download it again",
    "absent",
)
PAGE: Final = FileKind(
    "a web page, probably an error or a login page", "download the file again", "absent"
)
ERROR: Final = FileKind("an error message of a server", "download the file again", "absent")
JOBLIB: Final = FileKind("a joblib file: a pickle of Python objects, not a checkpoint")
PICKLE: Final = FileKind(
    "a pickle of Python objects that torch.save did not write",
    "show its contents with 'blobstore inspect'",
)
_NPZ: Final = FileKind("a NumPy archive")
ZIP: Final = FileKind("a zip archive", "unpack it first")
_TAR: Final = FileKind(
    "a tar archive: a checkpoint of torch before 0.2, or a packed folder",
    "unpack it, or load it with torch and save it again",
)


def _compressed(program: str) -> FileKind:
    return FileKind(f"compressed with {program}", "decompress it first")


def _archive(kind: str) -> FileKind:
    return FileKind(f"a {kind} archive", "unpack it first")


def _pointer(program: str, command: str) -> FileKind:
    return FileKind(f"a pointer of {program}, not the file itself", f"run {command}", "absent")


_MARKS: Final = (
    (0, b"GGUF", GGUF),
    (0, b"\0\x05\x16\x07", FileKind("what macOS notes about a file, not the file itself", "take the file without '._'", "absent")),
    (0, b"\x89HDF\r\n", FileKind("an HDF5 file, as Keras writes it")),
    (0, b"\x93NUMPY", FileKind("a numpy array")),
    (4, b"TFL3", FileKind("a TensorFlow Lite file")),
    (4, b"ET12", FileKind("an ExecuTorch program")),
    (64, b"\xef\xbe\xad\xde", FileKind("the weights of a Core ML package")),
    (0, b"ftrt", FileKind("a TensorRT engine")),
    (0, b"ptrt", FileKind("a TensorRT engine")),
    (0, b"\x1f\x8b", _compressed("gzip")),
    (0, b"BZh", _compressed("bzip2")),
    (0, b"\xfd7zXZ\0", _compressed("xz")),
    (0, b"\x28\xb5\x2f\xfd", _compressed("zstd")),
    (0, b"\x04\x22\x4d\x18", _compressed("lz4")),
    (0, b"\x8fBSARCH", FileKind("an archive of models", "import them with 'blobstore unpack'")),
    (0, b"7z\xbc\xaf\x27\x1c", _archive("7z")),
    (0, b"Rar!\x1a\x07", _archive("RAR")),
    (257, b"ustar", _TAR),
    (0, b"ZF", JOBLIB),
    (0, b"lmgg", FileKind("a ggml file of whisper.cpp or of llama.cpp before 2023", "convert the model to GGUF")),
    (0, b"fmgg", FileKind("a ggmf file of llama.cpp before GGUF", "convert the model to GGUF")),
    (0, b"tjgg", FileKind("a ggjt file of llama.cpp before GGUF", "convert the model to GGUF")),
    (0, b"algg", FileKind("an adapter of llama.cpp before GGUF", "convert the adapter to GGUF")),
    (0, b"MZqFpD", FileKind("a llamafile: a program that has a model in it", "download the GGUF file")),
    (0, b"SQLite format 3\0", FileKind("an SQLite database")),
    (0, b"PAR1", FileKind("a Parquet file")),
    (0, b"ARROW1", FileKind("an Arrow file")),
)  # fmt: skip
"""Offset and first bytes of formats."""
_PATTERNS: Final = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), kind)
    for pattern, kind in (
        (rb"version https://(git-lfs|hawser)", _pointer("git-lfs", "git lfs pull")),
        (rb"# xet version ", _pointer("Xet", "git xet checkout, or download it with hf download")),
        (rb"(\.\.?/)*+(\.git/|/)annex/objects/", _pointer("git-annex", "git annex get")),
        (
            rb"(\.\./)++blobs/[0-9a-f]{40,64}\s*\Z",
            FileKind("the text of a link, not the file itself", "download it again", "absent"),
        ),
        (
            rb"\s*+(<\?xml[^>]*>\s*)?+<(!doctype html|html|head\b|body|error\b)",
            PAGE,
        ),
        (
            (
                rb"(error: |\d{3}:? )?(entry|repository|revision|file|page|404)?:? ?not found\W*\Z"
                rb"|(access to (model|dataset)|access denied|invalid (username|credentials)|unauthorized"
                rb"|forbidden|too many requests|error code: \d|internal (server )?error|bad gateway"
                rb"|service (temporarily )?unavailable|gateway time-?out)[^\n]{0,400}\s*\Z"
            ),
            ERROR,
        ),
        (rb"<\?xml[^>]*>.*<net ", FileKind("a model of OpenVINO")),
        (rb"<\?xml", FileKind("an XML file")),
        # The version of the format, the length of a name, and the name.
        (rb"[\x01-\x20]\0\0\0[\x05-\x40]\0[a-z0-9_]+Spec\0", FileKind("a model of CTranslate2")),
        (
            rb"0[0-6]\x03\x04",
            FileKind(
                "a PyTorch checkpoint in which GPT-SoVITS has replaced the first two bytes",
                "write 'PK' over them to read it",
            ),
        ),
        # Protobufs: fields and lengths, and a text that only one format has at this place.
        (rb"\x08\x01\x12[\x80-\xff]*[\0-\x7f]\n", FileKind("a SavedModel of TensorFlow")),
        (rb"\x08[\x01-\x1f]\x12[\x80-\xff]*[\0-\x7f]\n", FileKind("a Core ML file")),
        (rb"\x08[\x01-\x1f]\x12[\x01-\x7f][a-z]", FileKind("an ONNX file")),
        (
            rb"\n[\x80-\xff]*[\0-\x7f]\n[\x01-\x7f][\w/.]+\x12.[A-Z]\w+",
            FileKind("a TensorFlow graph"),
        ),
    )
)
_ERROR_KEYS: Final = {
    *("error", "errors", "error_description", "message", "msg", "detail", "details", "title"),
    *("status", "statusCode", "status_code", "code", "success", "type", "timestamp", "path", "url"),
    *("request_id", "requestId", "documentation_url"),
}
_ERRORS: Final = ("error", "errors", "message", "detail", "msg")
_ZIP_ENTRY: Final = re.compile(rb"PK\x03\x04.{22}(?P<length>..)", re.DOTALL)
_OF_MODEL_FOLDER: Final = re.compile(
    rb"(?!.*/extra/).*\.(safetensors|gguf|bin|pth?|ckpt|onnx|json|txt|md|model|jinja)", re.DOTALL
)
"""Matches the first names in zip archives of model folders. TorchScript has files of any name in ``extra``."""
_DOCUMENTS: Final = (".html", ".htm", ".xhtml", ".md", ".svg")
"""Endings of files that may be pages."""
_FILLED: Final = (
    *(".safetensors", ".gguf", ".pt", ".pth", ".ckpt", ".json", ".model", ".tiktoken", ".spm"),
    *(".onnx", ".h5", ".npz", ".npy", ".msgpack", ".keras", ".tflite", ".jinja"),
)
"""Endings of formats whose files are never empty, and begin with something else than zeros."""
_BY_NAME: Final = (
    (r"\.onnx(_data|\.data)?", FileKind("an ONNX file")),
    (r"\.ggml", FileKind("a GGML file")),
    (r"\.(h5|hdf5)", FileKind("an HDF5 file")),
    (r"\.keras", FileKind("a Keras file")),
    (r"\.npz", _NPZ),
    (r"\.npy", FileKind("a numpy array")),
    (r"\.msgpack", FileKind("a msgpack file of Flax")),
    (r"\.ot", FileKind("a weight file of tch")),
    (r"\.tflite", FileKind("a TensorFlow Lite file")),
    (r"\.pb", FileKind("a TensorFlow graph")),
    (r"\.data-\d{5}-of-\d{5}", FileKind("the data of a TensorFlow checkpoint")),
    (r"\.mlmodel", FileKind("a Core ML file")),
    (r"\.mlpackage", FileKind("a Core ML package")),
    (r"\.pte", FileKind("an ExecuTorch program")),
    (r"\.(engine|plan|trt)", FileKind("a TensorRT engine")),
    (r"\.nemo", _archive("NeMo")),
    (r"\.dvc", _pointer("DVC", "dvc pull")),
    (r"\.pdi?(params|model)", FileKind("a file of PaddlePaddle")),
    (r"\.(caffemodel|mnn|ncnn|rknn|dlc)", FileKind("a file of another runtime")),
)
_ENDINGS: Final = tuple(
    (re.compile(rf".*{ending}", re.IGNORECASE), kind) for ending, kind in _BY_NAME
)


def kind_of(head: bytes) -> FileKind | None:
    """Return what a file is that begins with ``head``, :data:`HEAD` bytes or all of it; None if unknown.

    A zip archive or a pickle is taken for a checkpoint: its own reader says more.
    """
    if not head:
        return EMPTY
    if entry := _ZIP_ENTRY.match(head):
        return _kind_of_zip(head[30 : 30 + int.from_bytes(entry["length"], "little")])
    if head[8:10] in (b'{"', b"{}", b"{ ") and not any(head[5:8]):
        return SAFETENSORS
    for offset, mark, kind in _MARKS:
        if head[offset : offset + len(mark)] == mark:
            return kind
    if head[:1] == b"\x80" or head.startswith((b"PK\3\4", b"PK\5\6")):
        return CHECKPOINT
    if not any(head):
        return ZEROS
    text = _as_utf8(head)
    for pattern, kind in _PATTERNS:
        if pattern.match(text):
            return kind
    return _kind_of_error(text)


def _kind_of_zip(name: bytes) -> FileKind:
    """Return the kind of a zip archive by the name of its first entry."""
    if name.endswith(b".npy"):
        return _NPZ
    return ZIP if _OF_MODEL_FOLDER.fullmatch(name) else CHECKPOINT


def _as_utf8(head: bytes) -> bytes:
    """Return a text as UTF-8 without a mark of its byte order, which editors of Windows add."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return head.decode("utf-16", "replace").encode()
    return head.removeprefix(b"\xef\xbb\xbf")


def kind_of_name(name: str) -> FileKind | None:
    """Return what a file is by the ending of its name; None if that says nothing."""
    last = PurePath(name).name
    return next((kind for pattern, kind in _ENDINGS if pattern.fullmatch(last)), None)


def absence(name: str, head: bytes) -> FileKind | None:
    """Return what is in the place of a file that begins with ``head``; None if it can be the file itself.

    Only files of some formats cannot be empty, and documents can be pages.
    """
    kind = kind_of(head)
    if kind is None or kind.use != "absent":
        return None
    ending = PurePath(name).suffix.lower()
    if (kind in (EMPTY, ZEROS) and ending not in _FILLED) or (
        kind in (PAGE, ERROR) and ending in _DOCUMENTS
    ):
        return None
    return kind


def _kind_of_error(head: bytes) -> FileKind | None:
    """Return the kind of a JSON object that is the answer of a server to a request that failed."""
    if len(head) == HEAD or not head.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(head)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= _ERROR_KEYS:
        return None
    return ERROR if any(map(value.get, _ERRORS)) else None
