"""Valid checkpoints with random changes, thousands of them, the same in every run."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import FOLDER, Reader
from tests.support.zip_files import Member, make_zip

COUNT = 120
LOAD = [
    FOLDER / case["file"]
    for case in json.loads((FOLDER / "index.json").read_bytes())
    if case["expect"] == "load"
]
ZIPS = [path for path in LOAD if path.read_bytes()[:2] == b"PK"]
STREAMS = [path for path in LOAD if path not in ZIPS]
UNCHECKED = {"ok_nocrc.pt", "zip_crc0.pt"}
"""Files without checksums, in which changed tensor bytes cannot be detected."""
OPCODES = b"(.012FIJKLMNRQSTUVX]abcdeghijlopqrstu})\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8f\x90\x93\x94"
EXTREMES = [*(bytes([value]) for value in (0, 1, 0x7F, 0x80, 0xFF)), b"\xff\xff\xff\x7f"]
EXTREMES += [b"\xff" * 8, b"\0" * 8]


def name(path: Path) -> str:
    return path.stem


def mutate(data: bytes, chance: random.Random, begin: int = 0) -> bytes:
    """Make one to four changes to ``data`` from byte ``begin`` on."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(begin, len(changed))
        end = min(len(changed), at + chance.choice((1, 1, 2, 4, 8, 30)))
        way = chance.randrange(7)
        if way == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            changed[at] = chance.randrange(256)
        elif way == 2:
            changed[at] = chance.choice(OPCODES)
        elif way == 3:
            extreme = chance.choice(EXTREMES)
            changed[at : at + len(extreme)] = extreme
        elif way == 4 and len(changed) > begin + 60:
            del changed[at:end]
        elif way == 5:
            changed[at:at] = changed[at:end] * chance.choice((1, 2, 50))
        else:
            other = chance.randrange(begin, len(changed))
            changed[at:end] = changed[other : other + end - at]
    return bytes(changed)


def mutations(data: bytes, seed: str, begin: int = 0) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(COUNT):
        yield mutate(data, chance, begin)


def rebuilt(path: Path, replaced: str, content: bytes, method: int) -> bytes:
    """Return a copy of an archive with other content of one entry, and headers to match."""
    with zipfile.ZipFile(path) as archive:
        parts = []
        for item in archive.infolist():
            is_replaced = item.filename == replaced
            old = b"" if is_replaced else archive.open(item).read()
            parts.append(Member(item.filename.encode(), content if is_replaced else old, method))
    return make_zip(parts)


@pytest.mark.parametrize("path", [path for path in ZIPS if path.name not in UNCHECKED], ids=name)
def test_changed_pickles_in_zips_raise_no_other_error(path: Path, reader: Reader) -> None:
    with zipfile.ZipFile(path) as archive:
        entry = next(item for item in archive.namelist() if item.endswith("/data.pkl"))
        pickle = archive.read(entry)
    good = reader.read(path).tensors
    assert reader.take(rebuilt(path, entry, pickle, 8)).tensors == good
    for index, changed in enumerate(mutations(pickle, path.name)):
        outcome = reader.take(rebuilt(path, entry, changed, 8 * (index % 2)))
        assert not outcome.error, f"mutation {index}: {changed!r}"


@pytest.mark.parametrize("path", ZIPS, ids=name)
@pytest.mark.parametrize("begin", [b"PK\1\2", b""], ids=["directory", "anywhere"])
def test_changed_archives_never_give_other_tensors(
    path: Path, begin: bytes, reader: Reader
) -> None:
    data = path.read_bytes()
    good = reader.read(path)
    for index, changed in enumerate(mutations(data, path.name, data.index(begin))):
        outcome = reader.take(changed)
        assert not outcome.error, f"mutation {index}"
        if not outcome.refusal and path.name not in UNCHECKED:
            assert outcome.tensors == good.tensors, f"mutation {index}"


@pytest.mark.parametrize("path", STREAMS, ids=name)
def test_changed_legacy_streams_raise_no_other_error(path: Path, reader: Reader) -> None:
    for index, changed in enumerate(mutations(path.read_bytes(), path.name)):
        assert not reader.take(changed).error, f"mutation {index}: {changed!r}"


@pytest.mark.parametrize("path", STREAMS, ids=name)
def test_changed_headers_of_legacy_streams_raise_no_other_error(path: Path, reader: Reader) -> None:
    data = path.read_bytes()
    head, rest = data[:60], data[60:]
    for index, changed in enumerate(mutations(head, path.name, 10)):
        assert not reader.take(changed + rest).error, f"mutation {index}: {changed!r}"
