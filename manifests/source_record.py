"""The source layer of a manifest: the files that a model was imported from, and the bytes that its blobs do not hold.

With it, an export writes the weight files of the source byte for byte: the layer holds their headers, and
the blobs hold their tensors. The layer is a JSON object, described in docs/reference/format.md. It names no
path, machine, user, time or version, so equal sources with equal options have equal layers.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, InvalidDigest
from blobstore.manifests.descriptor import MAX_SIZE
from blobstore.manifests.file_names import is_safe_name

if TYPE_CHECKING:
    from collections.abc import Mapping

Format = Literal["safetensors", "pytorch", "gguf", "index"]
_FORMATS = get_args(Format)
_KEYS = frozenset({"kind", "repository", "commit", "options", "converted", "files", "data"})
_LEVEL: Final = 9
"""Higher levels of zstd save a quarter of the layer, and take fifty times as long."""
MAX_RECORD_SIZE: Final = 256 * 2**20
"""Bytes; a larger layer is refused before it is read."""
MAX_NEW_SIZE: Final = 128 * 2**20
"""Bytes of the data, decompressed, that every reader accepts, whatever its compressed size."""
_MAX_DATA_SIZE: Final = 2**30
_MAX_RATIO: Final = 256
"""Limit of the decompressed data, in sizes of the compressed data; headers reach about 30."""


class Gap(NamedTuple):
    """Bytes of a weight file that belong to no tensor."""

    begin: int
    """Offset in the file."""
    data: bytes


class RecordedFile(NamedTuple):
    """A weight file of the source, or an index of weight files."""

    name: str
    """Relative to the folder of the source."""
    format: Format
    size: int
    start: bytes
    """The first bytes of the file: the header of a safetensors or GGUF file, all of an index, else none."""
    sha256: Digest | None = None
    """The digest of the whole file, if the Hub lists it."""
    gaps: tuple[Gap, ...] = ()
    """Bytes of a GGUF file between and behind its tensors; zeros between them are left out."""
    role: str = ""
    """What a GGUF file is for, such as ``model`` or ``projector``; empty for other files."""

    def __repr__(self) -> str:
        return f"<RecordedFile {quote(self.name)}: {self.format}, {self.size} bytes>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """The source of a model."""

    kind: str
    """``folder``, ``file``, ``hub``, ``meta-llama``, ``memory``, or ``ollama://`` and a name."""
    files: tuple[RecordedFile, ...]
    """Sorted by name."""
    repository: str = ""
    commit: str = ""
    """Both are empty unless the source is a repository of the Hub."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the import that differ from their defaults."""
    is_converted: bool = False
    """Whether bytes of the weight files are neither in the blobs nor here."""
    stored_names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The names in the blobs of source tensors that have other names there; not those of stacks."""
    left_out: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The bytes of source tensors that no blob holds unchanged, by name."""

    def data(self) -> bytes:
        """Return the bytes of the source that the layer holds, not compressed."""
        rest: dict[str, Any] = {
            "stored_names": dict(self.stored_names),
            "left_out": {
                name: base64.b64encode(data).decode() for name, data in self.left_out.items()
            },
        }
        gaps = {
            file.name: {str(begin): base64.b64encode(data).decode() for begin, data in file.gaps}
            for file in self.files
            if file.gaps
        }
        if gaps:
            rest["gaps"] = gaps
        return b"".join(file.start for file in self.files) + strict_json.dumps(rest).encode()

    def to_bytes(self) -> bytes:
        """Return the content of the layer: JSON, with :meth:`data` compressed."""
        import zstandard

        packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(self.data())
        hub = {"repository": self.repository, "commit": self.commit} if self.repository else {}
        files = [
            {"name": file.name, "format": file.format, "size": file.size, "held": len(file.start)}
            | ({"sha256": file.sha256.hex} if file.sha256 else {})
            | ({"role": file.role} if file.role else {})
            for file in self.files
        ]
        value = {
            "kind": self.kind,
            **hub,
            "options": dict(self.options),
            **({"converted": True} if self.is_converted else {}),
            "files": files,
            "data": base64.b64encode(packed).decode(),
        }
        return strict_json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> SourceRecord:
        """Return the record in the ``content`` of a layer, which is not trusted.

        Raises:
            BlobDamaged: it is malformed, too large, or names files that must not be written. The
                message begins with the JSON path.
        """
        try:
            value = strict_json.loads(content)
        except ValueError as error:
            raise BlobDamaged(str(error)) from None
        if not isinstance(value, dict):
            raise BlobDamaged("not a JSON object")
        texts = {key: value.get(key, "") for key in ("kind", "repository", "commit")}
        options, listed, packed = value.get("options"), value.get("files"), value.get("data")
        for key, text in texts.items():
            if not isinstance(text, str) or len(text) > 255 or not text.isprintable():
                raise BlobDamaged(f"$.{key}: expected a short text, got {quote(text)}")
        if not isinstance(options, dict) or not isinstance(listed, list):
            raise BlobDamaged("$: expected an object 'options' and a list 'files'")
        sizes = [_checked_file(index, file) for index, file in enumerate(listed)]
        data = _unpacked(packed, sum(sizes))
        files: dict[str, RecordedFile] = {}
        offset = 0
        for file, held in zip(listed, sizes, strict=True):
            start = data[offset : offset + held]
            offset += held
            digest = Digest.parse(f"sha256:{file['sha256']}") if "sha256" in file else None
            recorded = RecordedFile(
                file["name"], file["format"], file["size"], start, digest, role=file.get("role", "")
            )
            if files.setdefault(recorded.name, recorded) is not recorded:
                raise BlobDamaged(f"$.files: {quote(recorded.name)} occurs twice")
        stored_names, left_out, gaps = _parsed_rest(data[offset:])
        for name, found in gaps.items():
            if name not in files or files[name].format != "gguf":
                raise BlobDamaged(f"$.data: no GGUF file is named {quote(name)}")
            files[name] = files[name]._replace(gaps=found)
        return cls(
            **texts,
            options=options,
            is_converted=value.get("converted") is True,
            files=tuple(files.values()),
            stored_names=stored_names,
            left_out=left_out,
        )


def _checked_file(index: int, value: Any) -> int:
    """Check an entry of ``files``; return the number of bytes that the layer holds of it."""
    place = f"$.files[{index}]"
    if not isinstance(value, dict):
        raise BlobDamaged(f"{place}: expected an object, got {quote(value)}")
    name, size, held = value.get("name"), value.get("size"), value.get("held")
    if not isinstance(name, str) or not is_safe_name(name):
        raise BlobDamaged(f"{place}.name: {quote(name)} must not be the name of a file")
    if value.get("format") not in _FORMATS:
        raise BlobDamaged(f"{place}.format: expected one of {', '.join(_FORMATS)}")
    if not (type(size) is type(held) is int and 0 <= held <= size <= MAX_SIZE):
        raise BlobDamaged(f"{place}: expected sizes in bytes with held <= size")
    role = value.get("role", "")
    if not isinstance(role, str) or len(role) > 255 or not role.isprintable():
        raise BlobDamaged(f"{place}.role: expected a short text, got {quote(role)}")
    if {"index": held != size, "pytorch": held != 0}.get(value["format"]):
        raise BlobDamaged(f"{place}.held: {held} of {size} bytes do not fit the format")
    try:
        if "sha256" in value:
            Digest.parse(f"sha256:{value['sha256']}")
    except InvalidDigest as error:
        raise BlobDamaged(f"{place}.sha256: {error}") from None
    return held


def _unpacked(packed: Any, held: int) -> bytes:
    """Return the decompressed data, which begins with ``held`` bytes of the files.

    Raises BlobDamaged unless it is one zstd frame of a fair size.
    """
    import zstandard

    if not isinstance(packed, str):
        raise BlobDamaged("$.data: expected a text")
    try:
        frame = base64.b64decode(packed, validate=True)
        size = zstandard.frame_content_size(frame)
        # Names of tensors are in the headers too, so the rest is no larger than a few headers.
        limit = min(MAX_NEW_SIZE + 4 * held, MAX_NEW_SIZE + _MAX_RATIO * len(frame), _MAX_DATA_SIZE)
        if not held <= size <= limit:
            raise BlobDamaged(
                f"$.data: declares {size} bytes, for {held} bytes of files in {len(frame)} bytes"
            )
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except (binascii.Error, ValueError, zstandard.ZstdError) as error:
        raise BlobDamaged(f"$.data: {error}") from None


def _parsed_rest(
    text: bytes,
) -> tuple[dict[str, str], dict[str, bytes], dict[str, tuple[Gap, ...]]]:
    """Return the stored names, the tensors left out and the gaps, which follow the starts of the files."""
    try:
        value = strict_json.loads(text)
    except ValueError as error:
        raise BlobDamaged(f"$.data: the names of the stored tensors: {error}") from None
    try:
        stored_names, encoded = value["stored_names"], value["left_out"]
        left_out = {name: base64.b64decode(data, validate=True) for name, data in encoded.items()}
        gaps = {
            file: tuple(
                Gap(int(begin), base64.b64decode(data, validate=True))
                for begin, data in listed.items()
            )
            for file, listed in value.get("gaps", {}).items()
        }
        is_sound = all(isinstance(name, str) for name in stored_names.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise BlobDamaged("$.data: does not end with the names of the stored tensors")
    return stored_names, left_out, gaps
