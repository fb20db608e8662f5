"""A second, simple reader of delta chunks, written from docs/reference/cold-format.md alone.

It expects intact chunks.
"""

from __future__ import annotations

import struct

import zstandard

_EXPONENTS = {33: (3, 4), 34: (2, 5), 36: (10, 5), 37: (7, 8), 39: (23, 8)}
_WIDTHS = {32: 1, 33: 1, 34: 1, 35: 2, 36: 2, 37: 2, 38: 4, 39: 4, 40: 8}


def read_differences(data: bytes, start: bytes, layout: int) -> bytes:
    """Return the chunk that ``data`` encodes against ``start``."""
    width = _WIDTHS[layout]
    elements = [
        int.from_bytes(start[at : at + width], "little") for at in range(0, len(start), width)
    ]
    decoded = _chunk(data, elements, layout)
    return b"".join(element.to_bytes(width, "little") for element in decoded)


def _chunk(data: bytes, start: list[int], layout: int) -> list[int]:
    if data[1] == 0:
        return _blocks(data, start, layout)
    first, classes, segments = data[:3]
    heads = [struct.unpack_from("<BBI", data, 3 + 6 * number) for number in range(segments)]
    at = 3 + 6 * segments
    counts = [_plane_count(form, escapes) for _, form, escapes in heads]
    tables = [struct.unpack_from("<BI", data, at + 5 * number) for number in range(sum(counts))]
    at += 5 * sum(counts)
    order = _order(start, layout, first, classes)
    result, decoded, number = list(start), 0, 0
    for (many, form, escapes), count in zip(heads, counts, strict=True):
        groups = order[decoded : decoded + many]
        decoded += many
        planes = []
        for method, size in tables[number : number + count]:
            planes.append((method, data[at : at + size]))
            at += size
        number += count
        width = _WIDTHS[layout]
        places = [place for group in groups for place in group]
        if form > 16:
            found = _listed(form, [len(group) for group in groups], planes, escapes, width)
            for place, difference in zip(places, found, strict=True):
                result[place] = (start[place] + difference) % (1 << 8 * width)
            continue
        end = at + escapes * width
        escaped = [
            int.from_bytes(data[place : place + width], "little") for place in range(at, end, width)
        ]
        at = end
        for place, difference in zip(
            places, _segment(form, len(places), planes, escaped), strict=True
        ):
            result[place] = (start[place] + difference) % (1 << 8 * width)
    assert decoded == classes
    assert at == len(data)
    return result


def _blocks(data: bytes, start: list[int], layout: int) -> list[int]:
    method, size = struct.unpack_from("<BI", data, 3)
    plane = data[8 : 8 + size]
    bits = zstandard.decompress(plane) if method else plane
    behind = len(start) // 64 * 64
    places = [
        place
        for place in range(len(start))
        if place >= behind or bits[place // 512] >> (7 - place // 64 % 8) & 1
    ]
    inner = _chunk(data[8 + size :], [start[place] for place in places], layout)
    result = list(start)
    for place, element in zip(places, inner, strict=True):
        result[place] = element
    return result


def _order(start: list[int], layout: int, first: int, classes: int) -> list[list[int]]:
    if classes == 1:
        return [list(range(len(start)))]
    low, bits = _EXPONENTS[layout]
    exponents = [element >> low & ((1 << bits) - 1) for element in start]
    found = [min(max(exponent, first), first + classes - 1) - first for exponent in exponents]
    pairs = sorted(range(len(start) // 2), key=lambda pair: found[2 * pair : 2 * pair + 2])
    order = [
        [2 * pair + side for side in (0, 1) for pair in pairs if found[2 * pair + side] == number]
        for number in range(classes)
    ]
    order[-1] += range(len(start) // 2 * 2, len(start))
    return order


def _plane_count(form: int, escapes: int) -> int:
    if form > 16:
        return 1 + _plane_count(form - 16, 0) + (escapes > 0)
    return form - 3 if form > 3 else min(form, 1)


def _plane(method: int, stored: bytes, size: int) -> bytes:
    if method == 2:
        bits = "".join(f"{byte:08b}" for byte in stored[2:])[:size]
        return bytes(stored[int(bit)] for bit in bits)
    return zstandard.decompress(stored) if method else stored


def _segment(
    form: int, size: int, planes: list[tuple[int, bytes]], escaped: list[int]
) -> list[int]:
    if form == 0:
        return [0] * size
    if form > 3:
        bytewise = [_plane(*plane, size) for plane in planes]
        return [
            sum(_signed(plane[place], 8) << 8 * number for number, plane in enumerate(bytewise))
            for place in range(size)
        ]
    bits = 1 << form
    part = -(-size * bits // 8)
    packed = _plane(*planes[0], part)
    assert len(packed) == part
    codes = [_signed(packed[place % part] >> bits * (place // part), bits) for place in range(size)]
    rest = iter(escaped)
    found = [next(rest) if escaped and code == -(1 << bits - 1) else code for code in codes]
    assert not list(rest)
    return found


def _listed(
    form: int, sizes: list[int], planes: list[tuple[int, bytes]], escapes: int, width: int
) -> list[int]:
    (method, stored), *planes = planes
    assert method == 0
    fields = [int.from_bytes(stored[at : at + 3], "little") for at in range(0, 3 * len(sizes), 3)]
    at = 3 * len(sizes)
    method, high_size = struct.unpack_from("<BI", stored, at)
    at += 5
    highs = iter(_plane(method, stored[at : at + high_size], 0))
    at += high_size
    places, begin = [], 0
    for field, size in zip(fields, sizes, strict=True):
        count, low = field >> 3, field & 7
        end = at + -(-count * low // 8)
        bits = int.from_bytes(stored[at:end], "little")
        at, place = end, -1
        for number in range(count):
            high = byte = next(highs)
            while byte == 255:
                byte = next(highs)
                high += byte
            place += 1 + (high << low) + (bits >> low * number & ((1 << low) - 1))
            assert place < size
            places.append(begin + place)
        begin += size
    assert at == len(stored)
    assert not list(highs)
    escaped = []
    if escapes:
        split = _plane(*planes.pop(), escapes * width)
        escaped = [int.from_bytes(split[number::escapes], "little") for number in range(escapes)]
    found = [0] * begin
    listed = _segment(form - 16, len(places), planes, escaped)
    for place, difference in zip(places, listed, strict=True):
        found[place] = difference
    return found


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)
