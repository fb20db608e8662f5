"""A second, simple reader of archives, written from docs/reference/archive-format.md alone.

It expects intact archives, and reads cold blobs with the second reader of cold blobs.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from tests.readers.cold_blobs import read_cold


class Read(NamedTuple):
    """The content of an archive, by hex digests."""

    names: dict[str, str]
    """The digest of each name's manifest."""
    manifests: dict[str, bytes]
    blobs: dict[str, bytes]
    """The blobs; for deltas, as cold blobs."""
    bases: dict[str, str]
    """The base of each delta."""
    signatures: dict[str, str]
    """The digest of the manifest that each signs, by the digest of the signature."""


def read_archive(data: bytes) -> Read:
    """Return the content of an archive."""
    assert data[:8] == b"\x8fBSARCH\x01"
    size, table_digest, end = struct.unpack("<Q32s8s", data[-48:])
    assert end == b"BSARCHE\x8f"
    table = data[-48 - size : -48]
    assert hashlib.sha256(data[:8] + table).digest() == table_digest
    members = data[8 : -48 - size]
    count, name_count = struct.unpack_from("<II", table)
    read = Read({}, {}, {}, {}, {})
    digests = []
    for number in range(count):
        entry = struct.unpack_from("<B3sIQQ32s32s", table, 8 + 88 * number)
        kind, reserved, base, stored_size, content_size, stored_digest, digest = entry
        assert reserved == bytes(3)
        stored, members = members[:stored_size], members[stored_size:]
        assert hashlib.sha256(stored).digest() == stored_digest
        content = read_cold(stored) if kind == 2 else stored
        digests.append(digest.hex())
        if kind == 3:
            assert base < number
            read.bases[digest.hex()] = digests[base]
        else:
            assert kind == 4 or base == 0
            assert len(content) == content_size
            assert hashlib.sha256(content).digest() == digest
        if kind == 4:
            assert base < number
            read.signatures[digest.hex()] = digests[base]
        else:
            (read.blobs if kind else read.manifests)[digest.hex()] = content
    assert members == b""
    at = 8 + 88 * count
    for _ in range(name_count):
        number, length = struct.unpack_from("<IH", table, at)
        read.names[table[at + 6 : at + 6 + length].decode()] = digests[number]
        at += 6 + length
    assert at == len(table)
    return read
