"""A second, simple reader of cold blobs, written from docs/reference/cold-format.md alone.

It cannot read parts with factors (section 6.4), and expects intact cold blobs.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import zstandard

from tests.readers.block_fields import field_sizes, read_fields
from tests.readers.coded import fill_blocks, kept_sizes
from tests.readers.deltas import read_differences
from tests.readers.quantized import read_blocks
from tests.readers.scaled import read_affine, read_float8


def read_cold(data: bytes, base: bytes = b"") -> bytes:
    """Return the blob that a cold blob decodes to, with its base if it has one."""
    assert data[:8] in {b"\x8fBSCOLD\x01", b"\x8fBSCOLD\x02"}
    size, table_digest, end = struct.unpack("<Q32s8s", data[-48:])
    assert end == b"BSCOLDE\x8f"
    table = data[-48 - size : -48]
    assert hashlib.sha256(data[:8] + table).digest() == table_digest
    planes = data[8 : -48 - size]
    blob_size, digest, has_base, part_count = struct.unpack_from("<Q32sBI", table)
    at = 45
    if has_base:
        assert table[at : at + 40] == struct.pack("<Q", len(base)) + hashlib.sha256(base).digest()
        at += 40
    parts = [struct.unpack_from("<QIBBHQ", table, at + 24 * number) for number in range(part_count)]
    at += 24 * part_count
    rules: list[tuple[bytes, tuple[int, int]]] = []
    for _, _, _, kind, _, _ in parts:
        assert kind in {0, 1, 2, 4} if data[7] == 2 else kind < 3
        rule = table[at : at + 12] if kind == 4 else b""
        at += len(rule)
        stated = (0, 0)
        if rule[1:2] == b"\4":
            stated = struct.unpack_from("<II", table, at)
            at += 8
        rules.append((rule, stated))
    decoded: list[bytes] = []
    for index, (part_size, chunk_size, width, kind, _, argument) in enumerate(parts):
        part = decoded[argument] if kind == 1 else b""
        own_rule, (scales_check, scales_size) = rules[index]
        scales, planes = planes[:scales_size], planes[scales_size:]
        assert zlib.crc32(scales) == scales_check
        start = _start(own_rule, scales, base, argument, part_size)
        while len(part) < part_size:
            count = min(chunk_size, part_size - len(part)) // width
            check, layout, plane_count = struct.unpack_from("<IBB", table, at)
            values = struct.unpack_from(f"<{plane_count}I", table, at + 6)
            at += 6 + 4 * plane_count
            stored, contents = [], []
            for number, value in enumerate(values):
                plane, planes = planes[: value >> 2], planes[value >> 2 :]
                size = _size(layout, width, count, number)
                contents.append(_plane(value & 3, plane, size))
                if value & 3 or size < 0 or 32 <= layout <= 40:
                    stored.append(plane)
            layout, contents, predicted = _against(
                start, own_rule, layout, contents, len(part), count * width
            )
            chunk = _merge(layout, width, count, contents, predicted)
            assert zlib.crc32(chunk + b"".join(stored)) == check
            part += chunk
        decoded.append(part)
    assert at == len(table)
    assert planes == b""
    blob = b"".join(decoded)
    assert len(blob) == blob_size
    assert hashlib.sha256(blob).digest() == digest
    return blob


def _start(rule: bytes, scales: bytes, base: bytes, argument: int, size: int) -> bytes:
    """Return what the elements of a part are differences from; the weights if it keeps scales of blocks."""
    if rule[1:2] == b"\3":
        return read_affine(rule, base[argument:], size)
    if rule[1:2] == b"\4":
        return read_float8(rule, scales, base[argument:], size)
    if rule[1:2] == b"\1":
        return read_blocks(rule, base[argument:], size)
    return base[argument:] if rule else base[argument : argument + size]


def _against(
    start: bytes, rule: bytes, layout: int, planes: list[bytes], begin: int, size: int
) -> tuple[int, list[bytes], bytes]:
    """Return the transform and the planes of a chunk, and what it is merged with."""
    if layout >= 128:
        assert rule[:2] == bytes([layout - 128, 2])
        return 32, planes[-1:], fill_blocks(rule, start, planes[:-1], begin, size)
    if rule[1:2] == b"\2":
        assert not 32 <= layout <= 40
        return layout, planes, b""
    return layout, planes, start[begin : begin + size]


def _size(layout: int, width: int, count: int, number: int) -> int:
    """Return the size of a plane that has a fixed size."""
    if layout >= 128:
        return [*kept_sizes(layout - 128, count), -1][number]
    if layout >= 64:
        return field_sizes(layout, count)[number]
    whole, half, double = count * width, count // 2, count * 2
    sizes = {
        0: (whole,),
        5: (-1, half, count),
        6: (count, count, double),
        7: (-1, half, count, double),
        9: (half, half),
        10: (-1, half, count, count, count),
    }
    return sizes.get(layout, (count,) * 8)[number]


def _plane(method: int, stored: bytes, size: int) -> bytes:
    if method == 2:
        bits = "".join(f"{byte:08b}" for byte in stored[2:])[:size]
        return bytes(stored[int(bit)] for bit in bits)
    return zstandard.decompress(stored) if method else stored


def _merge(layout: int, width: int, count: int, planes: list[bytes], start: bytes) -> bytes:
    if layout == 0:
        return planes[0]
    if layout >= 64:
        return read_fields(layout, planes)
    if layout >= 32:
        return read_differences(planes[0], start, layout)
    if layout in {1, 2, 3}:
        return bytes(planes[place][number] for number in range(count) for place in range(width))
    if layout == 9:
        return _small_floats(count, *planes)
    if layout in {5, 7, 10}:
        planes = [_unpaired(count, planes[0], planes[1]), *planes[2:]]
    elements = []
    for number in range(count):
        exponent, noise = planes[0][number], planes[1][number]
        value = (noise >> 7) << 15 | exponent << 7 | noise & 127
        if layout in {6, 7}:
            value = value << 16 | int.from_bytes(planes[2][2 * number : 2 * number + 2], "little")
        if layout in {8, 10}:
            value = value << 16 | planes[2][number] << 8 | planes[3][number]
        elements.append(value.to_bytes(width, "little"))
    return b"".join(elements)


def _unpaired(count: int, listed: bytes, pairs: bytes) -> bytes:
    base = listed[0]
    nibbles = [byte % 16 for byte in pairs] + [byte // 16 for byte in pairs]
    exponents = [(base + nibble) % 256 for nibble in nibbles]
    many = (len(listed) - 1) // 3
    place = 0
    for number in range(many):
        place += int.from_bytes(listed[1 + 2 * number : 3 + 2 * number], "little")
        exponents[place] = listed[1 + 2 * many + number]
    assert len(exponents) == count
    return bytes(exponents)


def _small_floats(count: int, powers: bytes, rests: bytes) -> bytes:
    first, second = [], []
    for power, rest in zip(powers, rests, strict=True):
        first.append((rest >> 7) << 7 | (power & 15) << 3 | rest & 7)
        second.append((rest >> 6 & 1) << 7 | (power >> 4) << 3 | rest >> 3 & 7)
    assert 2 * len(first) == count
    return bytes(first + second)
