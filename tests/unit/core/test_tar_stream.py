"""Tars that ``tarfile`` writes are read as they are, and hostile ones are refused in one line."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc

import pytest

from blobstore.core.tar_stream import InvalidTar, TarStream
from tests.support.tars import entry

END = bytes(1024)
LIMIT = 1 << 30
NAMES = ["a", "b/c.json", "é/x", "n" * 100, "d" * 90 + "/" + "e" * 90, "l/" * 150 + "x"]


def tar_of(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5
            tar.addfile(info, io.BytesIO(data))
            folder = tarfile.TarInfo(f"{name}.d")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
    return target.getvalue()


def read(data: bytes, limit: int = LIMIT) -> dict[str, bytes]:
    found = {}
    for file in TarStream(io.BytesIO(data).read, limit).files():
        assert file.is_regular
        found[file.name] = b"".join(file.pieces)
    return found


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_files_are_those_that_were_written(form: int) -> None:
    names = NAMES[:-1] if form == tarfile.USTAR_FORMAT else NAMES
    files = {name: bytes([number]) * (number * 700) for number, name in enumerate(names)}
    data = tar_of(files, form)
    assert read(data) == files
    assert read(data.rstrip(b"\0") + bytes(512)) == files
    assert [
        file.name for file in TarStream(io.BytesIO(data).read, LIMIT).files()
    ] == names  # unread


def test_large_sizes_are_read_in_both_forms() -> None:
    info = tarfile.TarInfo("a")
    info.size = 2**40
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with pytest.raises(InvalidTar, match="too much"):
            read(info.tobuf(form), limit=3 * 512 + 1024)
        with pytest.raises(InvalidTar, match="cut off"):
            read(info.tobuf(form))


def test_links_are_not_regular() -> None:
    info = tarfile.TarInfo("a")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    assert [
        file.is_regular for file in TarStream(io.BytesIO(info.tobuf()).read, LIMIT).files()
    ] == [False]


def pax(body: bytes, kind: bytes = b"x") -> bytes:
    return entry("pax", body, type=kind)


def rewritten(header: bytes, begin: int, text: bytes) -> bytes:
    """Return a header with some other bytes, and the checksum of these."""
    data = bytearray(header)
    data[begin : begin + len(text)] = text
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


FILE = entry("config.json", b"{}")
HOSTILE = {
    "nothing": b"",
    "other bytes": b"\x1b[2J" * 300,
    "a wrong checksum": FILE.replace(b"config", b"xonfig"),
    "a negative size": rewritten(entry("a"), 124, b"\xff" * 11 + b"\xfe") + FILE,
    "a size of letters": rewritten(entry("a"), 124, b"-0000000002\0") + FILE,
    "a negative size before it": pax(b"13 size=-100\n") + FILE,
    "a size of many digits": pax(b"9" * 5000 + b" size=1\n") + FILE,
    "a size of a letter": pax(b"10 size=x\n") + FILE,
    "a header without a length": pax(b"0" * 11) + FILE,
    "a header that is cut": pax(b"50 path=a\n") + FILE,
    "a header without end": pax(b"6 a=b\n"[:5] + b"c") + FILE,
    "a header of gigabytes": rewritten(entry("pax", type=b"x"), 124, b"77777777777\0"),
    "a name of gigabytes": rewritten(entry("name", type=b"L"), 124, b"77777777777\0"),
    "a sparse file": pax(b"22 GNU.sparse.major=1\n") + FILE,
    "a size for all": pax(b"9 size=5\n", b"g") + FILE,
    "content that is cut off": entry("a", b"x" * 5000)[:2000],
    "a header that is cut off": FILE + FILE[:300],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_tar_is_refused_in_one_line(what: str) -> None:
    with pytest.raises(InvalidTar, match=r"^it [ -~]+$"):
        read(HOSTILE[what])


def test_a_chain_of_headers_is_no_recursion() -> None:
    assert read(pax(b"6 a=b\n") * 5000 + FILE) == {"config.json": b"{}"}


def test_a_header_that_unpacks_to_much_takes_no_memory() -> None:
    bomb = gzip.compress(pax(b"0" * 2**24), compresslevel=1)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidTar, match="a header of 16777216 bytes"):
            for _ in TarStream(gzip.GzipFile(fileobj=io.BytesIO(bomb)).read, LIMIT).files():
                pass
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
