"""Fuzz the reader of archives: nothing but refusals, no hang, no growth, and what is read is right.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_archives.py

runs for five minutes on the golden vectors. Options of libFuzzer and folders with more inputs may
follow; the first folder is where new inputs are kept. An input that ends it is written to
``crash-*``, ``timeout-*`` or ``oom-*``, and is run again if it is given as the only argument.

An input is members, a table, and three bytes with the table's size; the target puts what belongs in
front and behind, and leaves out the comparison of stored digests, so that what lies behind those is
reached. The digests of what comes out stay.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.core.digest import Digest
    from blobstore.errors import ArchiveDamaged
    from blobstore.operations.archive.bundle import Bundle
    from blobstore.operations.archive.format import PREFIX
    from blobstore.operations.archive.reader import open_archive

DEFAULTS = ["-max_total_time=300", "-timeout=30", "-rss_limit_mb=1024", "-max_len=20000"]
_LARGEST = 1 << 24
_END = b"BSARCHE\x8f"
_FOOTER = 48
_SIZE = 3


def read_one(data: bytes, path: Path) -> None:
    """Read an archive as a file, with all of its models and members."""
    size = int.from_bytes(data[-_SIZE:], "little")
    body = data[:-_SIZE]
    members, table = body[: max(len(body) - size, 0)], body[max(len(body) - size, 0) :]
    seal = hashlib.sha256(PREFIX + table).digest()
    path.write_bytes(PREFIX + members + table + len(table).to_bytes(8, "little") + seal + _END)
    try:
        with mock.patch.object(Bundle, "judge_stored"), open_archive(path) as bundle:
            for number, member in enumerate(bundle.bundle.members):
                if member.size <= _LARGEST and member.base is None:
                    _read(bundle.bundle, number)
            bundle.models()
    except ArchiveDamaged as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)


def _read(bundle: Bundle, number: int) -> None:
    member = bundle.members[number]
    try:
        found = bundle.read(number)
    except ArchiveDamaged:
        return
    if member.stored != member.size:  # what is raw is judged by its stored bytes
        assert Digest.of(found) == member.digest


def write_seeds(folder: Path) -> None:
    """Write the golden vectors, without what the target puts around them, as inputs."""
    vectors = json.loads((ROOT / "tests" / "vectors" / "archive.json").read_text())
    for number, vector in enumerate(vectors):
        file = base64.b64decode(vector["archive"])
        size = int.from_bytes(file[-_FOOTER : -_FOOTER + 8], "little")
        body = file[len(PREFIX) : -_FOOTER]
        (folder / str(number)).write_bytes(body + size.to_bytes(_SIZE, "little"))


def main() -> None:
    """Run libFuzzer; it ends the process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeds, new = folder / "seeds", folder / "new"
        seeds.mkdir()
        new.mkdir()
        write_seeds(seeds)
        given = sys.argv[1:]
        paths = [item for item in given if not item.startswith("-")]
        file = folder / "x.bsar"
        if len(given) == len(paths) == 1 and os.path.isfile(paths[0]):  # noqa: PTH113
            read_one(Path(paths[0]).read_bytes(), file)
            return
        options = [*DEFAULTS, *(set(given) - set(paths))]
        arguments = [sys.argv[0], *options, *(paths or [str(new)]), str(seeds)]
        atheris.Setup(arguments, lambda data: read_one(data, file))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
