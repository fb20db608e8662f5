from __future__ import annotations

import pytest

from blobstore.core.trailer import FOOTER_SIZE, TrailerFormat
from blobstore.errors import ArchiveDamaged

TABLE = b"the table"
FORMAT = TrailerFormat(
    magic=b"MAGIC",
    version=1,
    end=b"THE END!",
    min_table=len(TABLE),
    what="a file",
    error=ArchiveDamaged,
)
FILE = FORMAT.prefix + b"contents" + FORMAT.trailer(TABLE)


def refused(data: bytes | bytearray) -> str:
    with pytest.raises(ArchiveDamaged) as caught:
        FORMAT.find_table(memoryview(data))
    return str(caught.value)


def test_a_table_is_found_behind_the_contents() -> None:
    table, begin = FORMAT.find_table(memoryview(FILE))
    assert bytes(table) == TABLE
    assert FILE[:begin] == b"MAGIC\x01contents"


def test_a_file_without_contents_has_the_minimum_size() -> None:
    data = FORMAT.prefix + FORMAT.trailer(TABLE)
    assert len(data) == FORMAT.min_size
    assert FORMAT.find_table(memoryview(data))[1] == len(FORMAT.prefix)


def test_rejects_another_prefix() -> None:
    assert refused(b"m" + FILE[1:]) == "not a file: the prefix is different"


@pytest.mark.parametrize("size", range(FORMAT.min_size))
def test_rejects_less_than_the_minimum_size(size: int) -> None:
    assert refused(FILE[:size]) == (
        f"a file of {size} bytes is truncated: it needs at least {FORMAT.min_size}"
    )


@pytest.mark.parametrize("version", [0, 2, 255])
def test_rejects_other_versions(version: int) -> None:
    data = bytearray(FILE)
    data[len(FORMAT.magic)] = version
    assert refused(data) == f"a file of version {version}; this program reads version 1"


@pytest.mark.parametrize("data", [FILE + b"\0", FILE[:-1] + b"?"])
def test_rejects_another_end(data: bytes) -> None:
    assert refused(data) == "a file has no footer: it is truncated or altered"


@pytest.mark.parametrize("size", [0, len(TABLE) - 1, len(FILE) - FOOTER_SIZE - 5, 2**63])
def test_rejects_a_table_of_an_impossible_size(size: int) -> None:
    data = bytearray(FILE)
    data[-FOOTER_SIZE : -FOOTER_SIZE + 8] = size.to_bytes(8, "little")
    assert refused(data) == f"a file of {len(FILE)} bytes cannot have a table of {size} bytes"


@pytest.mark.parametrize("place", [-1, 8])
def test_rejects_a_table_without_its_digest(place: int) -> None:
    data = bytearray(FILE)
    data[-FOOTER_SIZE + place] ^= 1
    assert refused(data) == "the table of a file does not match its digest: it is altered"
