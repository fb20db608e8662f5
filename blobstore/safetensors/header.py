"""The header of a safetensors file: bytes to values and back. Pure: no file is touched here.

Layout of a file: 8 bytes little-endian N, N bytes of JSON, the data. The JSON maps tensor names to
``dtype``, ``shape`` and ``data_offsets`` (relative to the end of the header), and ``__metadata__`` to
a map of strings. Reading is strict where the format's text is: the header begins with ``{``, ends
in ``}`` and 0x20 padding, no key occurs twice, and the ranges cover the data exactly once. It is
liberal where the bytes stay unambiguous: any alignment, ``"__metadata__":null``, unknown fields.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import strict_json
from blobstore.core.escape import escape, quote
from blobstore.core.file_kinds import CHECKPOINT, kind_of
from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import InvalidHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PREFIX_SIZE = 8
MAX_HEADER_SIZE = 100_000_000
"""Largest N that is read or written, the reference library's bound."""
_MIN_MEMORY = 16 * 2**20
"""Estimated bytes that any header may take while it is parsed."""
_MEMORY_PER_BYTE = 30
"""Estimated bytes for each of a long header; the shortest entries of tensors take 24, real ones about 12."""
METADATA_KEY = "__metadata__"
SUB_BYTE_RULE = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
    "this is invalid."
)
HEADER_ALIGNMENT = 8
_DTYPES = {code.encode(): dtype for code, dtype in DTYPES.items()}
_MAX_U64 = 2**64 - 1
_INVALID_JSON = "invalid JSON in header"
_OVERFLOW = "overflow computing buffer size from shape and/or element type"
_POSITIVE = rb"[1-9][0-9]{0,18}"
_PLAIN = re.compile(rb'\{"([^"\\\x00-\x1f]+)":(\{[^{}]*\})\} *')
_PLAIN_FIELDS = re.compile(
    rb'\{"dtype":"([A-Z0-9_]+)","shape":\[((?:%s(?:,%s)*)?)\],"data_offsets":\[0,(%s)\]\}'
    % (_POSITIVE, _POSITIVE, _POSITIVE)
)


class TensorEntry(NamedTuple):
    """A tensor's spec and the bytes that it has, relative to the start of the data."""

    spec: TensorSpec
    begin: int
    end: int


class Header(NamedTuple):
    """A checked header. ``tensors`` is in the order of the data."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    """Offset in the file of the first byte of data."""
    has_metadata: bool = False
    """Whether the file has metadata, which may be empty."""


@contextlib.contextmanager
def errors_during(action: str) -> Iterator[None]:
    """Let errors begin with ``action`` and the rule, as those of the reference library do."""
    try:
        yield
    except InvalidHeader as error:
        raise error.at(f"{action}: {error.rule}" if error.rule else action) from None


def header_size(prefix: bytes | memoryview, file_size: int) -> int:
    """Return N, the length of the JSON, from the first 8 bytes of a file of ``file_size`` bytes.

    Raises:
        InvalidHeader: the file is too short for it, or N is beyond the bound.
    """
    if file_size < PREFIX_SIZE or len(prefix) < PREFIX_SIZE:
        raise InvalidHeader(
            f"too short for a safetensors file: {file_size} bytes, expected at least 8",
            rule="header too small",
        )
    size = int.from_bytes(prefix[:PREFIX_SIZE], "little")
    if size > MAX_HEADER_SIZE:
        what = "the file is damaged, or of another format"
        if kind := kind_of(bytes(prefix)):
            what = f"this is {kind.what}"
            if kind is CHECKPOINT:
                what += ", which 'blobstore convert' makes a safetensors file of"
        raise InvalidHeader(
            f"header of {size} bytes is over the limit of {MAX_HEADER_SIZE}: {what}",
            rule="header too large",
        )
    if PREFIX_SIZE + size > file_size:
        raise InvalidHeader(
            f"header of {size} bytes does not fit in a file of {file_size} bytes",
            rule="invalid header length",
        )
    return size


def parse_header(text: bytes | memoryview, file_size: int) -> Header:
    """Check and return the header whose JSON bytes are ``text`` in a file of ``file_size`` bytes.

    Raises:
        InvalidHeader: any rule of the format is broken; the message names the tensor.
    """
    text = bytes(text)
    data_start = PREFIX_SIZE + len(text)
    if not text.startswith(b"{"):
        raise InvalidHeader("header does not begin with '{'", rule=_INVALID_JSON)
    unpadded = text.rstrip(b" ")
    if not unpadded.endswith(b"}"):
        raise InvalidHeader("header does not end with '}' and spaces", rule=_INVALID_JSON)
    try:
        # "{...}" can only be an object
        top: dict[str, Any] = strict_json.loads(
            unpadded, max(_MIN_MEMORY, _MEMORY_PER_BYTE * len(unpadded))
        )
    except ValueError as error:
        reason = str(error)
        raise InvalidHeader(
            f"header is {reason}" if reason.startswith("not") else f"header: {reason}",
            rule="invalid UTF-8 in header" if "UTF-8" in reason else _INVALID_JSON,
        ) from None
    metadata = top.pop(METADATA_KEY, None)
    has_metadata = metadata is not None
    if not has_metadata:  # MLX writes null for "none"
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise InvalidHeader(f"{METADATA_KEY} is not a map of strings", rule=_INVALID_JSON)
    entries = [_entry(name, fields) for name, fields in top.items()]
    entries.sort(key=_BY_RANGE)
    _check_cover(entries, file_size - data_start)
    return Header(
        tensors={entry.spec.name: entry for entry in entries},
        metadata=metadata,
        data_start=data_start,
        has_metadata=has_metadata,
    )


def parse_start(start: bytes, file_size: int) -> Header | None:
    """Return the header that the first bytes of a file hold, if it is of the plain form.

    That is the canonical header of one sound tensor, which most blobs of a store have. It takes
    about a third of the time of :func:`parse_header`, which remains the judge of all else.
    """
    data_start = PREFIX_SIZE + int.from_bytes(start[:PREFIX_SIZE], "little")
    if data_start > len(start):
        return None
    match = _PLAIN.fullmatch(start, PREFIX_SIZE, data_start)
    fields = _plain_fields(match[2]) if match else None
    if not match or not fields:
        return None
    dtype, shape, nbytes = fields
    try:
        name = match[1].decode()
    except UnicodeDecodeError:
        return None
    if nbytes != file_size - data_start or name == METADATA_KEY:
        return None
    return Header({name: TensorEntry(TensorSpec(name, dtype, shape), 0, nbytes)}, {}, data_start)


@functools.lru_cache(maxsize=1024)  # a model repeats a few shapes from layer to layer
def _plain_fields(text: bytes) -> tuple[DType, tuple[int, ...], int] | None:
    """Return type, shape and bytes of the tensor whose header has the fields ``text``, if plain."""
    match = _PLAIN_FIELDS.fullmatch(text)
    dtype = _DTYPES.get(match[1]) if match else None
    if not match or not dtype:
        return None
    shape = tuple(map(int, match[2].split(b","))) if match[2] else ()
    nbytes = int(match[3])
    # Nothing overflows on the way to a size whose bits do not, as no dimension is 0.
    is_sound = math.prod(shape) * dtype.bits == nbytes << 3 <= _MAX_U64
    return (dtype, shape, nbytes) if is_sound else None


def in_file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return specs in the order of the reference library: descending alignment, then names.

    Element sizes never increase within the file, so every tensor of complete bytes is aligned.
    """
    return sorted(specs, key=lambda spec: (-spec.dtype.rank, spec.name))


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the 8-byte prefix and the canonical JSON for tensors laid out in the order given.

    Canonical means: compact, top-level keys sorted by their UTF-8 bytes (``__metadata__`` among
    them), entry keys in the order ``dtype``, ``shape``, ``data_offsets``, strings escaped as Go's
    ``encoding/json`` does, spaces until N is a multiple of 8. These are the bytes that Ollama's
    importer writes for the same tensors.

    Raises:
        InvalidHeader: two tensors of one name, a tensor named ``__metadata__``, a tensor that does
            not fill whole bytes, or a header over the size limit.
    """
    top: dict[str, Any] = {}
    offset = 0
    for spec in specs:
        if spec.name == METADATA_KEY or spec.name in top:
            raise InvalidHeader(f"tensor name {quote(spec.name)} is reserved or occurs twice")
        end = offset + _checked_nbytes(spec)
        top[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": spec.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    if metadata:
        top[METADATA_KEY] = dict(sorted(metadata.items()))
    # Code point order is UTF-8 byte order.
    return _padded(strict_json.dumps({key: top[key] for key in sorted(top)}))


def encode_file_header(
    specs: Iterable[TensorSpec],
    metadata: Mapping[str, str] | None,
    alignment: int = HEADER_ALIGNMENT,
) -> bytes:
    """Return the 8-byte prefix and the JSON that the reference library writes, with sorted metadata.

    The tensors are listed in the order given, after the metadata, and no character is escaped that
    JSON allows. The data begin at a multiple of ``alignment``.

    Raises:
        InvalidHeader: as in :func:`encode_header`.
        UnicodeEncodeError: a name or the metadata has a lone surrogate.
    """
    entries = []
    if metadata is not None:
        text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        entries.append(f'"{METADATA_KEY}":{text}')
    offset = 0
    for spec in specs:
        if spec.name == METADATA_KEY:
            raise InvalidHeader(f"a tensor cannot have the name {METADATA_KEY!r}: it is reserved")
        end = offset + _checked_nbytes(spec)
        shape = ",".join(map(str, spec.shape))
        entries.append(
            f'{_json_string(spec.name)}:{{"dtype":"{spec.dtype.value}","shape":[{shape}],'
            f'"data_offsets":[{offset},{end}]}}'
        )
        offset = end
    return _padded("{" + ",".join(entries) + "}", alignment)


def _padded(json_text: str, alignment: int = HEADER_ALIGNMENT) -> bytes:
    text = json_text.encode()
    text += b" " * (-(PREFIX_SIZE + len(text)) % alignment)
    if len(text) > MAX_HEADER_SIZE:
        raise InvalidHeader(
            f"header of {len(text)} bytes is over the limit of {MAX_HEADER_SIZE}",
            rule="header too large",
        )
    return len(text).to_bytes(PREFIX_SIZE, "little") + text


_BY_RANGE = attrgetter("begin", "end")
_json_string = json.encoder.encode_basestring


def _entry(name: str, fields: Any) -> TensorEntry:
    try:
        code, dims, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        dtype = DTYPES[code]
        begin, end = offsets
    except (KeyError, TypeError, ValueError):
        raise InvalidHeader(_what_is_wrong(name, fields), rule=_INVALID_JSON) from None
    if not (type(dims) is type(offsets) is list and _are_u64(dims) and _are_u64(offsets)):
        raise InvalidHeader(_what_is_wrong(name, fields), rule=_INVALID_JSON)
    spec = TensorSpec(name, dtype, tuple(dims))
    nbytes = _checked_nbytes(spec)
    if end - begin != nbytes:
        raise InvalidHeader(
            f"tensor {quote(name)}: {code} {escape(str(dims), 200)} takes {nbytes} bytes, "
            f"but data_offsets [{begin}, {end}] span {end - begin}",
            rule="invalid shape, data type, or offset for tensor",
        )
    return TensorEntry(spec, begin, end)


def _are_u64(values: list[Any]) -> bool:
    for value in values:  # noqa: SIM110 - all() with a generator takes twice as long
        if type(value) is not int or not 0 <= value <= _MAX_U64:  # a bool is not a number here
            return False
    return True


def _what_is_wrong(name: str, fields: Any) -> str:
    tensor = f"tensor {quote(name)}"
    wanted = ("dtype", "shape", "data_offsets")
    if not isinstance(fields, dict) or not all(key in fields for key in wanted):
        return f"{tensor}: expected an object with dtype, shape and data_offsets"
    code, dims, offsets = (fields[key] for key in wanted)
    if not isinstance(code, str) or code not in DTYPES:
        return f"{tensor}: unknown dtype {quote(code)}; a newer release of blobstore may know it"
    if not isinstance(dims, list) or not _are_u64(dims):
        return f"{tensor}: shape {quote(dims)} is not a list of whole numbers"
    return f"{tensor}: data_offsets {quote(offsets)} is not a [begin, end] of whole numbers"


def _checked_nbytes(spec: TensorSpec) -> int:
    # Multiplied left to right with a bound at every step, as the reference library does; the
    # bound also keeps a hostile shape of many huge dimensions from growing a huge integer.
    bits = spec.dtype.bits
    elements = 1
    for dim in spec.shape:
        elements *= dim
        if elements > _MAX_U64:
            raise InvalidHeader(
                f"tensor {quote(spec.name)}: the number of elements overflows 64 bits",
                rule=_OVERFLOW,
            )
    total = elements * bits
    if total > _MAX_U64:
        raise InvalidHeader(
            f"tensor {quote(spec.name)}: the number of bits overflows 64 bits", rule=_OVERFLOW
        )
    if total & 7:
        raise InvalidHeader(
            f"tensor {quote(spec.name)}: {elements} elements of {bits} bits are not whole bytes",
            rule=SUB_BYTE_RULE,
        )
    return total >> 3


def _check_cover(entries: Iterable[TensorEntry], data_size: int) -> None:
    expected = 0
    for spec, begin, end in entries:
        if begin != expected:
            kind = "overlaps the tensor before it" if begin < expected else "leaves a hole"
            raise InvalidHeader(
                f"tensor {quote(spec.name)}: begins at byte {begin} of the data, {kind}; "
                f"expected {expected}",
                rule=f"invalid offset for tensor `{escape(spec.name, 200)}`",
            )
        expected = end
    if expected != data_size:
        kind = "is cut short" if data_size < expected else "has trailing bytes"
        raise InvalidHeader(
            f"data {kind}: the header describes {expected} bytes, the file has {data_size}",
            rule="incomplete metadata, file not fully covered",
        )
