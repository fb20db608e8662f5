"""A second, simple reader of delta chunks, written from docs/cold-format.md alone.

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
    counts = [{0: 0, 1: 1, 2: 1, 3: 1}.get(form, form - 3) for _, form, _ in heads]
    tables = [struct.unpack_from("<BI", data, at + 5 * number) for number in range(sum(counts))]
    at += 5 * sum(counts)
    order = _order(start, layout, first, classes)
    result, decoded, number = list(start), 0, 0
    for (many, form, escapes), count in zip(heads, counts, strict=True):
        places = [place for group in order[decoded : decoded + many] for place in group]
        decoded += many
        planes = []
        for method, size in tables[number : number + count]:
            plane = data[at : at + size]
            planes.append(zstandard.decompress(plane) if method else plane)
            at += size
        number += count
        width = _WIDTHS[layout]
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


def _segment(form: int, size: int, planes: list[bytes], escaped: list[int]) -> list[int]:
    if form == 0:
        return [0] * size
    if form > 3:
        return [
            sum(_signed(plane[place], 8) << 8 * number for number, plane in enumerate(planes))
            for place in range(size)
        ]
    bits = 1 << form
    part = len(planes[0])
    codes = [
        _signed(planes[0][place % part] >> bits * (place // part), bits) for place in range(size)
    ]
    rest = iter(escaped)
    found = [next(rest) if escaped and code == -(1 << bits - 1) else code for code in codes]
    assert not list(rest)
    return found


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (value >> (bits - 1) << bits)
