"""Fuzz safetensors files: they may be refused, but not crash, hang, grow, or be read in two ways.

In an environment with this package and ``atheris``, from the root of the repository::

    python tests/fuzz/fuzz_safetensors.py

runs for five minutes. Options of libFuzzer and folders with more inputs may follow; new inputs are kept
in the first folder. An input that fails is written to ``crash-*``, ``timeout-*`` or ``oom-*``, and is run
again if it is given as the only argument.

An input is the header of a file and its data; the length before the header is computed, so that the code
behind it is reached. The target opens it in every way, compares the two parsers of headers, and reads each
tensor and a slice of it.
"""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["blobstore"]):
    from blobstore.errors import SafetensorError
    from blobstore.safetensors import safe_open
    from blobstore.safetensors.header import PREFIX_SIZE, parse_header
    from blobstore.safetensors.table import parse_table

from tests.fuzz.harness import run

ROOT = Path(__file__).parents[2]


def compose(data: bytes) -> bytes:
    """Return the file that an input stands for: its header ends with the last brace and spaces after it."""
    end = data.rfind(b"}") + 1
    while data[end : end + 1] == b" ":
        end += 1
    return struct.pack("<Q", end) + data


def check_parsers(data: bytes) -> None:
    """Compare what the two parsers make of a header."""
    (size,) = struct.unpack("<Q", data[:PREFIX_SIZE])
    text = data[PREFIX_SIZE : PREFIX_SIZE + size]
    found: list[object] = []
    for parse in (parse_header, parse_table):
        try:
            header = parse(text, len(data))
        except SafetensorError as error:
            assert str(error).isprintable(), str(error)
            found.append(None)
        else:
            tensors = getattr(header, "tensors", None)
            if tensors is None:
                tensors = {name: header.entry(name) for name in header.names}  # type: ignore[union-attr]
            found.append((header.data_start, list(tensors.items())))
    assert found[0] == found[1], found


def read_one(data: bytes) -> None:
    """Open an input in every way, and read everything."""
    file = compose(data)
    check_parsers(file)
    results: list[dict[str, bytes | None] | None] = []
    for source in (file, io.BytesIO(file)):
        try:
            with safe_open(source, "np") as opened:
                results.append(values(opened))
        except SafetensorError as error:
            assert str(error).isprintable(), str(error)
            results.append(None)
    assert results[0] == results[1], results


def values(opened: safe_open) -> dict[str, bytes | None]:
    """Return the bytes of all tensors; None for those that numpy cannot hold."""
    found: dict[str, bytes | None] = {}
    for name in opened:
        try:
            array = opened.get_tensor(name)
            part = opened.get_slice(name)[(slice(None, None, -2),) * min(array.ndim, 1)]
            loaded = opened.prefetch({name: None}).take(name)
        except SafetensorError as error:
            assert str(error).isprintable(), str(error)
            found[name] = None
            continue
        assert np.array_equal(
            np.ascontiguousarray(array).view(np.uint8), np.ascontiguousarray(loaded).view(np.uint8)
        ), name
        if array.ndim:
            assert part.shape == array[::-2].shape, name
        found[name] = array.tobytes()
    return found


def write_seeds(folder: Path) -> None:
    """Write inputs that are parsed."""
    for path in (ROOT / "tests" / "data" / "hostile" / "safetensors").glob("*.safetensors"):
        if path.stat().st_size < 20_000:
            (folder / path.name).write_bytes(path.read_bytes()[PREFIX_SIZE:])


def main() -> None:
    """Run libFuzzer; it ends the process."""
    run(read_one, write_seeds)


if __name__ == "__main__":
    main()
