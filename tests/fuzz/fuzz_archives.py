"""Fuzz the archive reader: it may refuse an input, but not crash, hang, grow or read wrong bytes.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_archives.py

runs for five minutes, starting from the golden vectors. Options of libFuzzer and folders with more
inputs may follow; new inputs are kept in the first folder. An input that fails is written to
``crash-*``, ``timeout-*`` or ``oom-*``, and is run again if it is given as the only argument.

An input is the members, a table, and three bytes with the size of the table. The target adds a valid
prefix and footer, and skips the comparison of stored digests, so that the code behind it is reached.
The digests of decoded blobs are still checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.archives import reader as archives
    from blobstore.archives.reader import ArchiveReader, open_archive
    from blobstore.archives.table import PREFIX
    from blobstore.core.digest import Digest
    from blobstore.errors import ArchiveDamaged

from tests.fuzz.harness import run

ROOT = Path(__file__).parents[2]

_LARGEST = 1 << 24
_END = b"BSARCHE\x8f"
_FOOTER = 48
_SIZE = 3


class Unchecked:
    """A digest of stored bytes that is always right, so that altered members are decoded."""

    def update(self, _: object) -> None:
        """Take bytes."""

    def digest(self) -> Any:
        """Return what equals every digest."""
        return mock.ANY


def read_one(data: bytes, path: Path) -> None:
    """Read all members and models of an archive."""
    size = int.from_bytes(data[-_SIZE:], "little")
    body = data[:-_SIZE]
    members, table = body[: max(len(body) - size, 0)], body[max(len(body) - size, 0) :]
    digest = hashlib.sha256(PREFIX + table).digest()
    path.write_bytes(PREFIX + members + table + len(table).to_bytes(8, "little") + digest + _END)
    try:
        with mock.patch.object(archives, "Digester", Unchecked), open_archive(path) as reader:
            for number in range(len(reader.members)):
                if all(
                    reader.members[one].size <= _LARGEST
                    for one in (number, *reader.bases_of(number))
                ):
                    _read(reader, number)
            reader.models()
    except ArchiveDamaged as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)


def _read(reader: ArchiveReader, number: int) -> None:
    member = reader.members[number]
    try:
        found = reader.read(number)
    except ArchiveDamaged:
        return
    if member.stored_size != member.size:  # a raw member has no other digest than the stored one
        assert Digest.of(found) == member.digest


def write_seeds(folder: Path) -> None:
    """Write the golden vectors as inputs, without prefix and footer."""
    vectors = json.loads((ROOT / "tests" / "vectors" / "archive.json").read_text())
    for number, vector in enumerate(vectors):
        file = base64.b64decode(vector["archive"])
        size = int.from_bytes(file[-_FOOTER : -_FOOTER + 8], "little")
        body = file[len(PREFIX) : -_FOOTER]
        (folder / str(number)).write_bytes(body + size.to_bytes(_SIZE, "little"))


def main() -> None:
    """Run libFuzzer; it ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.bsar")
        run(lambda data: read_one(data, file), write_seeds)


if __name__ == "__main__":
    main()
