"""The table of a cold blob: encoding, and checked decoding. Planes are not read here.

The format is specified in docs/reference/cold-format.md. Planes lie in the file in the order of the
table, without gaps. The table has their sizes but no offsets, so planes cannot overlap and must fill the
file.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.compression.entropy import Method
from blobstore.compression.quant_rule import RULE_SIZE, QuantRule
from blobstore.compression.scaled_rules import Float8Rule, rule_of
from blobstore.compression.transforms import FIRST_BLOCKS, FIRST_CODED, WIDTHS, transform_of
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.core.trailer import TrailerFormat
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.file_view import FileBytes
    from blobstore.compression.quant_rule import Rule

MAX_CHUNK: Final = 1 << 20
"""Maximum size of a chunk in bytes."""
_HEAD: Final = struct.Struct("<Q32sBI")
_BASE: Final = struct.Struct("<Q32s")
_PART: Final = struct.Struct("<QIBBHQ")
_CHUNK: Final = struct.Struct("<IBB")
_SIZE: Final = struct.Struct("<I")
_METHOD_BITS: Final = 2
_FACTORS: Final = struct.Struct("<II")
_RULE: Final = struct.Struct(f"{RULE_SIZE}s")
_FORMATS: Final = [
    TrailerFormat(
        magic=b"\x8fBSCOLD",
        version=version,
        end=b"BSCOLDE\x8f",
        min_table=_HEAD.size,
        what="a cold blob",
        error=ColdDamaged,
    )
    for version in (1, 2)
]
PREFIXES: Final = [item.prefix for item in _FORMATS]
"""The bytes that start a file: without what is for blocks of GGUF only, and with it."""
PREFIX: Final = PREFIXES[0]
_PLAIN, _SAME, _DELTA, _PREDICTED, _QUANTIZED = range(5)
_UNREAD: Final = QuantRule("", DType.F32)
"""Stands for a rule until those of all parts are read."""
MAX_FACTORS: Final = 1 << 27
"""Limit for the stored size of a part's factors in bytes."""


class StoredFactors(NamedTuple):
    """Low-rank factors in the file, or scales."""

    checksum: int
    """CRC-32 of their stored bytes."""
    size: int


class Part(NamedTuple):
    """Consecutive bytes of the blob with elements of one width, divided into chunks of one size."""

    size: int
    width: int = 1
    chunk_size: int = MAX_CHUNK >> 2
    same_as: int | None = None
    """Index of an earlier part with the same bytes; this part then has no chunks of its own."""
    base_begin: int | None = None
    """Offset in the base of the bytes that its delta chunks are encoded against."""
    factors: StoredFactors | None = None
    """Factors that correct the prediction, or scales of its rule; they are stored before its planes."""
    rule: Rule | None = None
    """The rule that quantizes the base's elements from ``base_begin`` on to the prediction."""

    @property
    def chunks(self) -> int:
        """Number of chunks that the file has for it."""
        return 0 if self.same_as is not None else -(-self.size // self.chunk_size)


class StoredPlane(NamedTuple):
    """A plane in the file."""

    method: int
    size: int


class Chunk(NamedTuple):
    """The table's entry for a chunk."""

    checksum: int
    """CRC-32 of its bytes, followed by its stored planes except raw ones of a fixed size."""
    transform: int
    planes: Sequence[StoredPlane]

    @property
    def stored_size(self) -> int:
        """Size of its stored planes in bytes."""
        return sum(plane.size for plane in self.planes)


class Table(NamedTuple):
    """The content of a file apart from its planes; digest and size are those of the blob."""

    digest: Digest
    size: int
    base: BlobId | None
    parts: Sequence[Part]
    chunks: Sequence[Chunk]
    has_blocks: bool = False
    """Whether it may have what is for blocks of GGUF only: rules of parts, and transforms to fields."""


def encode_table(table: Table) -> bytes:
    """Return the bytes that end a file: the table, and the footer that locates it."""
    head = _HEAD.pack(
        table.size, bytes.fromhex(table.digest.hex), table.base is not None, len(table.parts)
    )
    pieces = [head]
    if table.base is not None:
        pieces.append(_BASE.pack(table.base.size, bytes.fromhex(table.base.digest.hex)))
    for part in table.parts:
        kind, argument = _PLAIN, 0
        if part.same_as is not None:
            kind, argument = _SAME, part.same_as
        elif part.base_begin is not None:
            kind = _DELTA if part.factors is None else _PREDICTED
            kind = kind if part.rule is None else _QUANTIZED
            argument = part.base_begin
        pieces.append(_PART.pack(part.size, part.chunk_size, part.width, kind, 0, argument))
    factors = [part.factors and _FACTORS.pack(*part.factors) for part in table.parts]
    for part, stored in zip(table.parts, factors, strict=True):
        pieces += [stored] if stored and part.rule is None else []
    for part, stored in zip(table.parts, factors, strict=True):
        pieces += [part.rule.pack(), stored or b""] if part.rule is not None else []
    for chunk in table.chunks:
        pieces.append(_CHUNK.pack(chunk.checksum, chunk.transform, len(chunk.planes)))
        pieces += (_SIZE.pack(size << _METHOD_BITS | method) for method, size in chunk.planes)
    return _FORMATS[table.has_blocks].trailer(b"".join(pieces))


def decode_table(data: FileBytes) -> Table:
    """Return the table of a file.

    Raises:
        ColdDamaged: the file is truncated or altered, or violates the format.
    """
    has_blocks = bytes(data[: len(PREFIX)]) != PREFIX
    content, begin = _FORMATS[has_blocks].find_table(data)
    reader = _Reader(content)
    size, digest, has_base, count = reader.take(_HEAD)
    if has_base > 1:
        raise ColdDamaged(f"the table has {has_base} where 0 or 1 is expected")
    base = None
    if has_base:
        base_size, base_digest = reader.take(_BASE)
        base = BlobId(Digest(base_digest.hex()), base_size)
    if count * _PART.size > len(content):
        raise ColdDamaged(f"{count} parts do not fit in a table of {len(content)} bytes")
    parts: list[Part] = []
    for _ in range(count):
        parts.append(_decode_part(reader.take(_PART), parts, base, has_blocks))
    parts = [_with_factors(part, reader) for part in parts]
    parts = [_with_rule(part, reader, base) for part in parts]
    if sum(part.size for part in parts) != size:
        raise ColdDamaged(f"the sizes of the parts do not add up to the {size} bytes of the blob")
    least = sum(part.chunks for part in parts) * (_CHUNK.size + _SIZE.size)
    if least > len(content):
        raise ColdDamaged(f"the chunks of {size} bytes do not fit in the table")
    chunks = [
        _decode_chunk(reader, part, number, has_blocks)
        for part in parts
        for number in range(part.chunks)
    ]
    if reader.rest:
        raise ColdDamaged(f"the table goes on for {reader.rest} bytes after its last chunk")
    stored = sum(chunk.stored_size for chunk in chunks)
    stored += sum(part.factors.size for part in parts if part.factors is not None)
    if len(PREFIX) + stored != begin:
        raise ColdDamaged(
            f"the table lists {stored} bytes of planes, the file has {begin - len(PREFIX)}"
        )
    return Table(Digest(digest.hex()), size, base, parts, chunks, has_blocks)


def _decode_part(
    fields: tuple[int, int, int, int, int, int],
    before: Sequence[Part],
    base: BlobId | None,
    has_blocks: bool,
) -> Part:
    size, chunk_size, width, kind, reserved, argument = fields
    where = f"part {len(before)}"
    if width not in WIDTHS or not size or size % width:
        raise ColdDamaged(f"{where}: {size} bytes of elements of {width} bytes are not possible")
    if not 0 < chunk_size <= MAX_CHUNK or chunk_size % width:
        raise ColdDamaged(f"{where}: chunks of {chunk_size} bytes are not possible")
    part = Part(size, width, chunk_size)
    if reserved:
        raise ColdDamaged(f"{where}: {reserved} where 0 is reserved")
    if kind == _SAME and argument < len(before):
        same = before[argument]
        if same.same_as is None and same[:3] == part[:3]:
            return part._replace(same_as=argument)
    elif kind in {_DELTA, _PREDICTED} and base is not None and argument + size <= base.size:
        # The sizes of the factors follow after all parts.
        factors = StoredFactors(0, 0) if kind == _PREDICTED else None
        return part._replace(base_begin=argument, factors=factors)
    elif kind == _QUANTIZED and has_blocks and base is not None and width == 1:
        return part._replace(base_begin=argument, rule=_UNREAD)
    elif kind == _PLAIN and not argument:
        return part
    raise ColdDamaged(f"{where}: kind {kind} with {argument} is not possible")


def _with_factors(part: Part, reader: _Reader) -> Part:
    if part.factors is None:
        return part
    factors = StoredFactors(*reader.take(_FACTORS))
    if not 0 < factors.size < min(part.size, MAX_FACTORS):
        raise ColdDamaged(f"factors of {factors.size} bytes for {part.size} are not possible")
    return part._replace(factors=factors)


def _with_rule(part: Part, reader: _Reader, base: BlobId | None) -> Part:
    if part.rule is None or part.base_begin is None or base is None:
        return part
    (record,) = reader.take(_RULE)
    rule = rule_of(record)
    factors = StoredFactors(*reader.take(_FACTORS)) if isinstance(rule, Float8Rule) else None
    is_possible = rule.is_possible(part.size, part.chunk_size)
    if is_possible and isinstance(rule, Float8Rule) and factors is not None:
        is_possible = factors.size == rule.scales_size(part.size)
    if not is_possible or part.base_begin + rule.source_size(part.size) > base.size:
        raise ColdDamaged(
            f"{part.size} bytes in chunks of {part.chunk_size} cannot be quantized from byte "
            f"{part.base_begin} of a base of {base.size} by {rule}"
        )
    return part._replace(rule=rule, factors=factors)


def _decode_chunk(reader: _Reader, part: Part, number: int, has_blocks: bool) -> Chunk:
    checksum, code, count = reader.take(_CHUNK)
    transform = transform_of(code, part.width)
    if transform is None or (code >= FIRST_BLOCKS and not has_blocks):
        raise ColdDamaged(f"transform {code} of elements of {part.width} bytes is unknown")
    if transform.needs_base and part.base_begin is None:
        raise ColdDamaged(f"transform {code} needs a base, but its part has none")
    coded = FIRST_CODED + part.rule.number if part.rule and part.rule.keeps_scales else None
    if transform.needs_base and coded != (code if code >= FIRST_CODED else None):
        raise ColdDamaged(f"transform {code} does not suit the rule of its part")
    chunk_size = min(part.chunk_size, part.size - number * part.chunk_size)  # the last is shorter
    sizes = transform.sizes(chunk_size // part.width)
    if count != len(sizes) or not sizes:
        raise ColdDamaged(f"a chunk of transform {code} cannot have {count} planes")
    planes = []
    for limit in sizes:
        (value,) = reader.take(_SIZE)
        size, method = value >> _METHOD_BITS, value & ((1 << _METHOD_BITS) - 1)
        is_fixed = limit >= 0
        fits = 0 < size < abs(limit)
        if method == Method.RAW:
            fits = size == limit if is_fixed else size <= -limit
        elif method != Method.ZSTD and (method != Method.BITS or not is_fixed):
            raise ColdDamaged(f"a plane has the unknown method {method}")
        if not fits:
            raise ColdDamaged(f"a plane of {abs(limit)} bytes cannot be stored in {size}")
        planes.append(StoredPlane(method, size))
    return Chunk(checksum, code, tuple(planes))


class _Reader:
    """Reads structures from bytes, one after the other."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    @property
    def rest(self) -> int:
        return len(self._content) - self._at

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        if self.rest < layout.size:
            raise ColdDamaged(f"the table ends after {len(self._content)} bytes, within an entry")
        values = layout.unpack_from(self._content, self._at)
        self._at += layout.size
        return values
