"""Tars of the shape ``image`` from a hostile registry: read as plain ones, or refused in one line."""

from __future__ import annotations

import tarfile
import tracemalloc

import pytest

from blobstore.errors import InvalidManifest
from blobstore.registry.layouts.image import read_catalog
from tests.support.tars import entry

MANIFEST, PLACES = "models/blobstore/manifest.json", "models/blobstore/places.json"
END = bytes(1024)
WHOLE = b"{}"


def rewritten(header: bytes, begin: int, text: bytes) -> bytes:
    """Return a header with some other bytes, and the checksum of these."""
    data = bytearray(header)
    data[begin : begin + len(text)] = text
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def sparse(size: int) -> bytes:
    """Return a manifest of GNU's old sparse format: no byte in the tar, and ``size`` zeros when it is read."""
    return rewritten(entry(MANIFEST, type=tarfile.GNUTYPE_SPARSE), 483, b"%011o\0" % size)


FILES = entry(MANIFEST, WHOLE) + entry(PLACES, WHOLE)
HOSTILE = {
    "a sparse file": sparse(2**32) + FILES,
    "a link to itself": entry(MANIFEST, type=b"2", linkname="manifest.json") + FILES,
    "a hard link to itself": entry(MANIFEST, type=b"1", linkname=MANIFEST) + FILES,
    "a link to a file of this machine": entry(MANIFEST, type=b"2", linkname="/etc/passwd") + FILES,
    "a device": entry(MANIFEST, type=b"3") + FILES,
    "a pipe": entry(MANIFEST, type=b"6") + FILES,
    "a GNU long name": entry("././@LongLink", MANIFEST.encode(), type=b"L") + FILES,
    "global pax headers": entry("x", b"11 path=abc\n"[:11], type=b"g") + FILES,
    "two manifests": FILES + entry(MANIFEST, b"[]"),
    "a size beyond the end": entry(MANIFEST, WHOLE, size=10**9) + FILES,
    "a negative size": rewritten(entry(MANIFEST), 124, b"\xff" * 10 + b"\xfe\0") + FILES,
    "a size in base 256": rewritten(entry(MANIFEST), 124, b"\x80" + bytes(10) + b"\1") + FILES,
    "a size of letters": rewritten(entry(MANIFEST), 124, b"-0000000002\0") + FILES,
    "no places": entry(MANIFEST, WHOLE),
    "places in a file of another folder": entry(MANIFEST, WHOLE) + entry(f"../{PLACES}", WHOLE),
    "places that are not JSON": entry(MANIFEST, WHOLE) + entry(PLACES, b"["),
    "places of millions of values": entry(MANIFEST, WHOLE)
    + entry(PLACES, b"[" + b"{}," * 4_000_000 + b"{}]"),
    "a chain of pax headers": entry("x", b"0" * 11, type=b"x") * 10_000,
    "other bytes": b"\x1b[2J" * 300,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_tar_is_refused_in_one_line(what: str) -> None:
    with pytest.raises(InvalidManifest, match=r"^the first layer is not that of a model: [ -~]+$"):
        read_catalog(HOSTILE[what] + END)


def test_a_tar_that_is_cut_off_anywhere_is_refused() -> None:
    for size in range(len(FILES) - 512 + len(WHOLE)):
        with pytest.raises(InvalidManifest):
            read_catalog(FILES[:size])


def test_many_small_entries_take_no_memory() -> None:
    tar = FILES + entry("models/x") * 100_000 + END
    tracemalloc.start()
    try:
        assert read_catalog(tar) == (WHOLE, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_names_that_point_elsewhere_are_not_looked_at() -> None:
    others = map(entry, ("/etc/passwd", "../../x", f"../{MANIFEST}", "\x1b[2J", f"/{PLACES}"))
    assert read_catalog(b"".join(others) + FILES) == (WHOLE, {})
