"""Parses the header of a GGUF file: its metadata, and where its tensors lie.

The format is described in ``docs/gguf.md`` of ggml. This parser accepts what llama.cpp loads, of versions 2
and 3: little-endian files whose tensors follow each other in the order of the header. A tensor whose type is
not known, or has another size here than in llama.cpp, is opaque: its size follows from the next offset.

Nothing is allocated for a number in the file. Arrays are decoded when they are asked for: a tokenizer has
100,000 and more texts.
"""

from __future__ import annotations

import contextlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import Damaged
from blobstore.gguf.types import TYPES, GgufType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_FIRST_READ: Final = 1 << 20
"""Bytes that contain the header of a model without a tokenizer."""
MAX_HEADER: Final = 256 << 20
"""Bytes; the largest headers known have 20 MiB."""
_MAX_KEY: Final = 65_535
_MAX_NAME: Final = 1024
"""Bytes of the name of a tensor; llama.cpp accepts 63."""
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 20
_MAX_ELEMENTS: Final = 2**60 - 1
"""Numpy counts the bytes of an array in 63 bits, and an element has up to 8."""
_MAX_VALUES: Final = 100_000
_MAX_TENSORS: Final = 200_000
"""Models have some thousands; experts of a layer are one tensor."""
_SETTLED: Final = 39
"""Types up to this number have one meaning everywhere."""
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
"""Numbers of types of values, and how they are decoded. A bool is true unless it is 0, as in llama.cpp."""
_NAMES: Final = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", "string", "array"),
    *("uint64", "int64", "float64"),
)
"""The names of types of values, by number."""
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ALIGNMENT: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32


class InvalidGguf(Damaged):
    """A GGUF file breaks the format, or ends too early."""


class GgufTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    number: int
    """Of its type."""
    type: GgufType | None
    """None if the tensor is opaque."""
    shape: tuple[int, ...]
    """As torch has it: the last dimension varies fastest."""
    begin: int
    """Where its bytes begin in the file."""
    size: int
    """Bytes; those of an opaque tensor may include padding."""

    @property
    def type_name(self) -> str:
        """The name of the type; that of an opaque tensor is ``type N``."""
        return f"type {self.number}" if self.type is None else self.type.name


class GgufArray:
    """An array of the metadata, which is decoded each time that it is iterated over."""

    def __init__(self, data: memoryview, number: int, count: int) -> None:
        """Take the checked bytes of ``count`` elements whose type has a number."""
        self._data = data
        self._number = number
        self._count = count

    @property
    def type(self) -> str:
        """The name of the elements' type, such as ``string``."""
        return _NAMES[self._number]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        if self._number != _STRING:
            scalar = _SCALARS[self._number]
            return (value for (value,) in scalar.iter_unpack(self._data))
        return self._texts()

    def _texts(self) -> Any:
        at = 0
        for _ in range(self._count):
            begin = at + _U64.size
            at = begin + _U64.unpack_from(self._data, at)[0]
            # Tokenizers have tokens that are parts of characters.
            yield str(self._data[begin:at], "utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return f"<GgufArray of {self._count} {self.type}>"


Value = bool | int | float | str | GgufArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a file except its tensors."""

    version: int
    metadata: Mapping[str, Value]
    """In the order of the file."""
    tensors: Mapping[str, GgufTensor]
    """In the order of their bytes."""
    alignment: int
    data_start: int
    """Where the tensors begin. In a file without tensors, the size of the header."""

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``, or an empty text."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""


def read_header(read: Callable[[int, int], Buffer], size: int) -> GgufHeader:
    """Read and check the header of a file.

    Args:
        read: returns the bytes of the file from one offset to another; fewer at its end.
        size: bytes of the file.

    Raises:
        InvalidGguf: the file breaks the format, or ends too early.
    """
    data, wanted = b"", min(size, _FIRST_READ)
    while True:
        data += bytes(read(len(data), wanted))
        try:
            return _Parser(data, size).header()
        except _Short as short:
            if len(data) < wanted or short.end > size:
                raise InvalidGguf(
                    f"the file ends at byte {min(size, len(data))}, in its header: {short.what} ends at byte "
                    f"{short.end}; download the complete file"
                ) from None
            if short.end > MAX_HEADER:
                raise InvalidGguf(
                    f"the header has more than {MAX_HEADER >> 20} MiB: {short.what} ends at byte {short.end}"
                ) from None
            # Twice as much, so that all of the passes take no longer than the last one does.
            wanted = min(size, max(2 * len(data), short.end), MAX_HEADER)


def parse_start(data: bytes) -> tuple[dict[str, Value], int]:
    """Return the metadata that the first bytes of a file have, and the number of its tensors.

    Raises:
        InvalidGguf: the file breaks the format before ``data`` ends.
    """
    metadata: dict[str, Value] = {}
    tensors = 0
    parser = _Parser(data, len(data))
    with contextlib.suppress(_Short):
        _, tensors, count = parser.counts()
        for _ in range(count):
            key, value = parser.pair()
            metadata[key] = value
    return metadata, tensors


def parse_header(data: bytes, size: int) -> GgufHeader:
    """Return the header of a file of ``size`` bytes that begins with ``data``.

    Raises:
        InvalidGguf: the file breaks the format, or ``data`` ends within the header.
    """
    return read_header(lambda begin, end: data[begin:end], size)


class _Short(Exception):
    """More bytes of the file are needed."""

    def __init__(self, end: int, what: str) -> None:
        self.end = end
        self.what = what


class _Parser:
    """Parses the first bytes of a file. Raises _Short if they do not contain the header."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._view = memoryview(data)
        self._size = size
        self._at = 0

    def header(self) -> GgufHeader:
        version, tensor_count, value_count = self.counts()
        metadata: dict[str, Value] = {}
        for _ in range(value_count):
            key, value = self.pair()
            if key in metadata:
                raise InvalidGguf(f"the key {quote(key)} occurs twice")
            metadata[key] = value
        alignment = _alignment(metadata)
        listed: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(tensor_count):
            name, tensor = self._tensor()
            if name in listed:
                raise InvalidGguf(f"tensor {quote(name)} occurs twice")
            listed[name] = tensor
        end = self._at
        start = _padded(end, alignment) if listed else end
        tensors = _placed(listed, start, alignment, self._size)
        return GgufHeader(version, metadata, tensors, alignment, start)

    def pair(self) -> tuple[str, Value]:
        """Return the next key and its value."""
        key = self._text(_MAX_KEY, "a key")
        return key, self._value(key)

    def counts(self) -> tuple[int, int, int]:
        """Return the version, and the numbers of tensors and of values."""
        start = self._take(8, "the version")
        if bytes(start[:4]) != MAGIC:
            raise InvalidGguf("not a GGUF file: it does not begin with 'GGUF'")
        version = _U32.unpack(start[4:])[0]
        if not version & 0xFFFF:
            raise InvalidGguf(
                "the file is big-endian; convert it with gguf_convert_endian.py of llama.cpp"
            )
        if version not in _VERSIONS:
            raise InvalidGguf(
                f"version {version} of GGUF is not read, only {' and '.join(map(str, _VERSIONS))}",
                advice="convert the model again with a current llama.cpp"
                if version < min(_VERSIONS)
                else "a newer blobstore may read it; 'create --keep' stores the file as it is",
            )
        tensor_count = self._u64("the number of tensors")
        value_count = self._u64("the number of values")
        for count, limit, what in (
            (tensor_count, _MAX_TENSORS, "tensors"),
            (value_count, _MAX_VALUES, "values"),
        ):
            if count > limit:
                raise InvalidGguf(
                    f"the file says that it has {count} {what}, expected at most {limit}"
                )
        return version, tensor_count, value_count

    def _take(self, count: int, what: str) -> memoryview:
        begin, end = self._at, self._at + count
        if end > len(self._data):
            raise _Short(end, what)
        self._at = end
        return self._view[begin:end]

    def _u32(self, what: str) -> int:
        found: int = _U32.unpack(self._take(4, what))[0]
        return found

    def _u64(self, what: str) -> int:
        found: int = _U64.unpack(self._take(8, what))[0]
        return found

    def _text(self, limit: int, what: str) -> str:
        begin = self._at
        size = self._u64(what)
        if not 0 < size <= limit:
            raise InvalidGguf(f"{what} at byte {begin} has {size} bytes, expected 1 to {limit}")
        try:
            return str(self._take(size, what), "utf-8")
        except UnicodeDecodeError:
            raise InvalidGguf(f"{what} at byte {begin} is not UTF-8") from None

    def _value(self, key: str) -> Value:
        what = f"the value of {quote(key)}"
        number = self._u32(what)
        if number == _STRING:
            size = self._u64(what)
            return str(self._take(size, what), "utf-8", "surrogateescape")
        if number == _ARRAY:
            return self._array(what)
        scalar = _SCALARS.get(number)
        if scalar is None:
            raise InvalidGguf(f"{what} is of the unknown type {number}")
        value: bool | float = scalar.unpack(self._take(scalar.size, what))[0]
        return value

    def _array(self, what: str) -> GgufArray:
        number, count = self._u32(what), self._u64(what)
        begin = self._at
        if number == _STRING:
            self._skip_texts(count, what)
        elif number in _SCALARS:
            self._take(count * _SCALARS[number].size, what)
        elif number == _ARRAY:
            raise InvalidGguf(f"{what} is an array of arrays, which llama.cpp does not read")
        else:
            raise InvalidGguf(f"{what} is an array of the unknown type {number}")
        return GgufArray(self._view[begin : self._at], number, count)

    def _skip_texts(self, count: int, what: str) -> None:
        if self._at + count * _U64.size > self._size:
            raise _Short(self._at + count * _U64.size, what)
        data, at, end = self._data, self._at, len(self._data)
        unpack = _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise _Short(at + 8, what)
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise _Short(at, what)
        self._at = at

    def _tensor(self) -> tuple[str, tuple[int, tuple[int, ...], int]]:
        name = self._text(_MAX_NAME, "the name of a tensor")
        what = f"the description of tensor {quote(name)}"
        count = self._u32(what)
        if count > _MAX_DIMENSIONS:
            raise InvalidGguf(
                f"tensor {quote(name)} has {count} dimensions, expected at most {_MAX_DIMENSIONS}"
            )
        shape = tuple(self._u64(what) for _ in range(count))[::-1]
        if math.prod(filter(None, shape)) > _MAX_ELEMENTS:  # also next to a dimension of 0
            raise InvalidGguf(f"tensor {quote(name)} has too many elements: {list(shape)}")
        return name, (self._u32(what), shape, self._u64(what))


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    # A bool is an int too.
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise InvalidGguf(f"{_ALIGNMENT} is {quote(str(value))}, expected a power of two")
    return value


def _padded(end: int, alignment: int) -> int:
    return -(-end // alignment) * alignment


def _placed(
    listed: Mapping[str, tuple[int, tuple[int, ...], int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Return the tensors with their places. Raises InvalidGguf if they overlap, or are not in the file."""
    begins = [start + offset for _, _, offset in listed.values()]
    found: dict[str, GgufTensor] = {}
    expected = start
    for (name, (number, shape, offset)), begin, following in zip(
        listed.items(), begins, (*begins, None)[1:], strict=True
    ):
        if begin < expected or offset % alignment or (not found and offset):
            raise InvalidGguf(
                f"tensor {quote(name)} has offset {offset}, expected {expected - start}"
            )
        kind = TYPES.get(number)
        nbytes = None if kind is None else _size(name, kind, shape)
        if nbytes is not None and following not in (None, _padded(begin + nbytes, alignment)):
            if number <= _SETTLED:
                raise InvalidGguf(
                    f"the tensor after {quote(name)} has offset {following - start}, expected "
                    f"{_padded(begin + nbytes, alignment) - start}"
                )
            kind = nbytes = None  # a fork uses the number for another layout
        if nbytes is None:
            nbytes = (size if following is None else following) - begin
        end = begin + max(nbytes, 0)
        if end > size:
            raise InvalidGguf(
                f"the file ends at byte {size}, in tensor {quote(name)}, which ends at byte {end}; download "
                "the complete file"
            )
        found[name] = GgufTensor(name, number, kind, shape, begin, end - begin)
        expected = end
    return found


def _size(name: str, kind: GgufType, shape: tuple[int, ...]) -> int:
    columns = shape[-1] if shape else 1
    if columns % kind.weights:
        raise InvalidGguf(
            f"tensor {quote(name)} has rows of {columns} elements, which {kind.name} does not divide: its "
            f"blocks have {kind.weights}"
        )
    return math.prod(shape) // kind.weights * kind.size
