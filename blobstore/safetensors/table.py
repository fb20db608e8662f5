"""The tensors of a file as columns: for files of many tensors, much faster than one object per tensor.

Headers as the reference library writes them are parsed column by column. Without escapes, their quotation
marks split them into 10 texts per tensor::

    {  "name"  :{  "dtype"  :  "F32"  ,  "shape"  :[2,3],  "data_offsets"  :[0,24]},  "name"  ...

Each column is then compared as a whole. Whatever differs from this form is left to
:func:`blobstore.safetensors.header.parse_header`, which also finds what is wrong.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import strict_json
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import InvalidHeader
from blobstore.safetensors.header import (
    METADATA_KEY,
    PREFIX_SIZE,
    TensorEntry,
    header_size,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Kind = tuple[DType, tuple[int, ...]]
"""Type and shape of a tensor."""

_WIDTH = 10
_CONSTANTS = {2: ":{", 3: "dtype", 4: ":", 6: ",", 7: "shape", 9: "data_offsets"}
_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_SHAPE = re.compile(rf":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],")
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_METADATA = re.compile(rf'\{{"{METADATA_KEY}":(\{{(?:{_STRING}:{_STRING},?)*+\}}),', re.DOTALL)
"""The start of a header with metadata, without spaces. Its end is found without a parser, which needs memory."""
_CONTROLS = bytes(range(32))
_FIRST_READ = 1 << 14

_REMEMBERED = 8 << 20
_SMALL = 8 << 10

_recent: dict[bytes, Table] = {}
"""Headers that were read last, by their bytes: up to ``_REMEMBERED`` bytes, the oldest first.

Programs open a file again for each tensor or rank. Small headers are not kept, as they are parsed in little
time and would fill this with thousands of blobs. The tables take about twice the memory of their headers.
They are shared by all who open the file, so nobody may change them.
"""


class Table(NamedTuple):
    """A checked header. The columns have the order of the data."""

    names: Mapping[str, int]
    """The row of each tensor."""
    kinds: Sequence[Kind]
    begins: Sequence[int]
    """Where the bytes of each tensor begin, relative to the start of the data, and where the last ends."""
    data_start: int
    metadata: dict[str, str] | None

    def entry(self, name: str) -> TensorEntry | None:
        """Return what the header says about a tensor; None if there is none of that name."""
        row = self.names.get(name)
        if row is None:
            return None
        return TensorEntry(
            TensorSpec(name, *self.kinds[row]), self.begins[row], self.begins[row + 1]
        )

    def rows(self) -> Iterator[tuple[str, Kind, int]]:
        """Return name, kind, and the offset in the file of each tensor's bytes."""
        start = self.data_start
        return zip(self.names, self.kinds, (start + begin for begin in self.begins), strict=False)


def read_table(read: Callable[[int, int], bytes], size: int) -> Table:
    """Read and check the header of a file of ``size`` bytes.

    Args:
        read: returns the bytes of the file from one offset to before another.
        size: the bytes of the file.

    Raises:
        InvalidHeader: the file violates the format.
        OSError: the file cannot be read.
    """
    start = read(0, min(_FIRST_READ, size))
    end = PREFIX_SIZE + header_size(start, size)
    text = start[PREFIX_SIZE:end] if end <= len(start) else read(PREFIX_SIZE, end)
    if PREFIX_SIZE + len(text) != end:
        raise InvalidHeader(
            f"header of {end - PREFIX_SIZE} bytes ends after {len(text)}: the file has shrunk"
        )
    return parse_table(text, size)


@gc_paused()
def parse_table(text: bytes, file_size: int) -> Table:
    """Check and return the header whose JSON bytes are ``text`` in a file of ``file_size`` bytes.

    Raises:
        InvalidHeader: any rule of the format is broken.
    """
    table = _recent.pop(text, None)
    if table is None or table.data_start + table.begins[-1] != file_size:
        table = _parse_columns(text, file_size) or _parse_values(text, file_size)
    if _SMALL <= len(text) <= _REMEMBERED:
        _recent[text] = table
        _forget_oldest()
    return table


def _forget_oldest() -> None:
    # Copies, because other threads add and remove headers at the same time.
    excess = sum(map(len, tuple(_recent))) - _REMEMBERED
    for text in tuple(_recent):
        if excess <= 0:
            break
        _recent.pop(text, None)
        excess -= len(text)


def _parse_values(text: bytes, file_size: int) -> Table:
    header = parse_header(text, file_size)
    entries = header.tensors.values()
    return Table(
        {name: row for row, name in enumerate(header.tensors)},
        [(spec.dtype, spec.shape) for spec, _, _ in entries],
        [*(entry.begin for entry in entries), file_size - header.data_start],
        header.data_start,
        dict(header.metadata) if header.has_metadata else None,
    )


def _parse_columns(raw: bytes, file_size: int) -> Table | None:
    """Return the header, if it is as the reference library writes it, and sound."""
    try:
        text = raw.decode().rstrip(" ")
        metadata, text = _split_metadata(text)
    except ValueError:
        return None
    if "\\" in text or len(raw.translate(None, _CONTROLS)) != len(raw):
        return None
    texts = text.split('"')
    count, rest = divmod(len(texts), _WIDTH)
    if rest != 1 or not count or texts[0] != "{":
        return None
    names = dict(zip(texts[1::_WIDTH], range(count), strict=True))
    if len(names) != count or METADATA_KEY in names:
        return None
    if any(texts[column::_WIDTH].count(text) != count for column, text in _CONSTANTS.items()):
        return None
    known = _Kinds()
    try:
        kinds = list(map(known.__getitem__, zip(texts[5::_WIDTH], texts[8::_WIDTH], strict=True)))
    except ValueError:
        return None
    begins = [0, *itertools.accumulate(nbytes for _, nbytes in kinds)]
    data_start = PREFIX_SIZE + len(raw)
    if data_start + begins[-1] != file_size or texts[10::_WIDTH] != _offset_texts(begins):
        return None
    return Table(names, [kind for kind, _ in kinds], begins, data_start, metadata)


def _offset_texts(begins: Sequence[int]) -> list[str]:
    """Return the text of each tensor after ``"data_offsets"``."""
    numbers = list(map(str, begins))
    texts = [f":[{begin},{end}]}}," for begin, end in itertools.pairwise(numbers)]
    texts[-1] = texts[-1][:-1] + "}"
    return texts


def _split_metadata(text: str) -> tuple[dict[str, str] | None, str]:
    """Return the metadata at the start of a header, and the header without it.

    Raises:
        ValueError: it is not valid.
    """
    found = _METADATA.match(text)
    if found is None:
        return None, text
    return strict_json.loads(found[1].encode()), "{" + text[found.end() :]


class _Kinds(dict[tuple[str, str], tuple[Kind, int]]):
    """The kinds that texts describe, with their sizes in bytes; a model has few of them."""

    def __missing__(self, texts: tuple[str, str]) -> tuple[Kind, int]:
        dtype, found = DTYPES.get(texts[0]), _SHAPE.fullmatch(texts[1])
        if dtype is None or found is None:
            raise ValueError("not plain")
        shape = tuple(map(int, found[1].split(","))) if found[1] else ()
        nbits = dtype.bits
        for dim in shape:
            nbits *= dim
            if nbits >> 64:
                raise ValueError("too large")
        if nbits & 7:
            raise ValueError("not whole bytes")
        self[texts] = (dtype, shape), nbits >> 3
        return self[texts]
