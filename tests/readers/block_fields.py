"""A second, simple reader of the fields of blocks, written from docs/reference/cold-format.md alone."""

from __future__ import annotations

_FIELDS = {
    66: (1, 1, 16),
    67: (1, 1, 1, 1, 16),
    70: (1, 1, 4, 16),
    71: (1, 1, 1, 1, 4, 16),
    72: (1, 1, 32),
    74: (16, 64, 1, 1, 1, 1),
    75: (32, 64, 8, 4, 1, 1),
    76: (1, 1, 1, 1, 4, 4, 4, 128),
    77: (1, 1, 1, 1, 4, 4, 4, 32, 128),
    78: (128, 64, 16, 1, 1),
    84: (1, 1, 16),
    85: (1, 1, 64, 8, 32, 4),
    86: (1, 1, 32, 32, 8, 8),
    87: (1, 1, 1, 1, 4, 128),
    103: (1, 16),
    104: (4, 32),
}
_LOW_AND_HIGH = {75: (1, 0), 77: (8, 7), 78: (0, 1)}


def field_sizes(layout: int, size: int) -> list[int]:
    """Return the sizes of the planes of ``size`` bytes of blocks."""
    fields = _FIELDS[layout]
    assert size % sum(fields) == 0
    blocks = size // sum(fields)
    joined = _LOW_AND_HIGH.get(layout, ())
    found = [blocks * field for number, field in enumerate(fields) if number not in joined]
    return found + ([blocks * (128 if layout == 75 else 256)] if joined else [])


def read_fields(layout: int, planes: list[bytes]) -> bytes:
    """Return the blocks whose fields are the planes."""
    fields, joined = _FIELDS[layout], _LOW_AND_HIGH.get(layout, ())
    single = [number for number in range(len(fields)) if number not in joined]
    blocks = len(planes[0]) // fields[single[0]]
    found = []
    for block in range(blocks):
        parts = {}
        for number, plane in zip(single, planes, strict=False):
            size = fields[number]
            parts[number] = plane[block * size : (block + 1) * size]
        if joined:
            size = len(planes[-1]) // blocks
            codes = planes[-1][block * size : (block + 1) * size]
            low, high = _unjoined(layout, codes)
            parts[joined[0]], parts[joined[1]] = bytes(low), bytes(high)
        found += [parts[number] for number in range(len(fields))]
    return b"".join(found)


def _unjoined(layout: int, codes: bytes) -> tuple[list[int], list[int]]:
    low, high = [0] * 128, [0] * 64
    if layout == 75:
        codes = bytes([byte % 16 for byte in codes] + [byte // 16 for byte in codes])
    for i, code in enumerate(codes):
        if layout == 75:
            low[32 * (i // 128) + i % 32] |= (code & 3) << 2 * (i // 32 % 4)
            high[i % 32] |= (code >> 2) << i // 32
        if layout == 77:
            low[32 * (i // 64) + i % 32] |= (code & 15) << 4 * (i // 32 % 2)
            high[i % 32] |= (code >> 4) << i // 32
        if layout == 78:
            low[64 * (i // 128) + i % 64] |= (code & 15) << 4 * (i // 64 % 2)
            high[32 * (i // 128) + i % 32] |= (code >> 4) << 2 * (i // 32 % 4)
    return low[: 64 if layout == 75 else 128], high[: 64 if layout == 78 else 32]
