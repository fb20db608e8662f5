"""Fuzz the cold blob decoder: it may refuse an input, but not crash, hang, grow or read wrong bytes.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_cold_blobs.py

runs for five minutes, starting from the golden vectors. Options of libFuzzer and folders with more
inputs may follow; new inputs are kept in the first folder. An input that fails is written to
``crash-*``, ``timeout-*`` or ``oom-*``, and is run again if it is given as the only argument.

An input is planes, a table, and two bytes with the size of the table. The target adds a valid prefix
and footer, and skips the comparison of checksums, so that the code behind them is reached.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from unittest import mock

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.compression import chunks
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.decoder import ColdBlobDecoder
    from blobstore.compression.table import PREFIXES
    from blobstore.core.trailer import FOOTER_SIZE
    from blobstore.errors import ColdDamaged

from tests.fuzz.harness import run

PREFIX = PREFIXES[-1]

ROOT = Path(__file__).parents[2]

_LARGEST = 1 << 24
_END = b"BSCOLDE\x8f"
_BASE = bytes(range(256)) * 64


class _Any:
    """Equal to every checksum."""

    def __eq__(self, _: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def read_one(data: bytes) -> None:
    """Read an input, and ranges of it, which must be equal."""
    size = int.from_bytes(data[-2:], "little")
    body = data[:-2]
    planes, table = body[: max(len(body) - size, 0)], body[max(len(body) - size, 0) :]
    digest = hashlib.sha256(PREFIX + table).digest()
    file = PREFIX + planes + table + len(table).to_bytes(8, "little") + digest + _END
    try:
        blob = ColdBlobDecoder(file)
        base = blob.table.base
        if base is not None and base.size <= len(_BASE):
            blob.give_base(BaseBlob.hot(_BASE[: base.size], base.digest))
        if blob.size > _LARGEST:
            return
        content = bytearray(blob.size)
        with mock.patch.object(chunks, "crc32", return_value=_Any()):
            blob.read_into(content)
            for begin in range(0, blob.size, max(blob.size // 3, 1)):
                part = bytearray(min(1000, blob.size - begin))
                blob.read_into(part, begin)
                assert part == content[begin : begin + len(part)], begin
    except ColdDamaged as error:
        assert str(error).isprintable(), str(error)
        assert len(str(error)) < 4000, str(error)


def write_seeds(folder: Path) -> None:
    """Write the golden vectors as inputs, without prefix and footer."""
    vectors = json.loads((ROOT / "tests" / "vectors" / "cold.json").read_text())
    for number, vector in enumerate(vectors):
        file = base64.b64decode(vector["cold"])
        size = int.from_bytes(file[-FOOTER_SIZE : -FOOTER_SIZE + 8], "little")
        body = file[len(PREFIX) : -FOOTER_SIZE]
        (folder / str(number)).write_bytes(body + size.to_bytes(2, "little"))


def main() -> None:
    """Run libFuzzer; it ends the process."""
    run(read_one, write_seeds, "-max_len=6000")


if __name__ == "__main__":
    main()
