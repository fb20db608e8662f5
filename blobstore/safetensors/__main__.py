"""``python -m blobstore.safetensors FILE``: what a file contains, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import escape
from blobstore.errors import SafetensorError
from blobstore.safetensors.reader import digest, open_reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.safetensors.reader import Reader

_DAMAGED = 4
_UNREADABLE = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a file contains, and return the exit status: 4 if it breaks the format."""
    parser = argparse.ArgumentParser(
        prog="python -m blobstore.safetensors", description="Show what a safetensors file contains."
    )
    parser.add_argument("file", help="the file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="check the file, and print nothing")
    parser.add_argument("--sha256", action="store_true", help="add the sha256 of each tensor")
    options = parser.parse_args(arguments)
    try:
        reader = open_reader(options.file, "pread")
        if not options.check:
            tensors = list(describe(reader, has_digests=options.sha256))
            show = _as_json if options.json else _as_table
            sys.stdout.write(show(reader.table.metadata, tensors))
    except SafetensorError as error:
        sys.stderr.write(f"{escape(options.file)}: {error}\n")
        return _DAMAGED
    except OSError as error:
        sys.stderr.write(f"{escape(str(error))}\n")
        return _UNREADABLE
    return 0


def describe(reader: Reader, *, has_digests: bool) -> Iterator[dict[str, Any]]:
    """Yield the entry of each tensor, in the order of the data."""
    table = reader.table
    for name, row in table.names.items():
        dtype, shape = table.kinds[row]
        begin, end = table.begins[row], table.begins[row + 1]
        entry = {"name": name, "dtype": dtype.value, "shape": shape, "data_offsets": [begin, end]}
        if has_digests:
            entry["sha256"] = digest(reader, table.data_start + begin, table.data_start + end)
        yield entry


def _as_json(metadata: dict[str, str] | None, tensors: list[dict[str, Any]]) -> str:
    return json.dumps({"metadata": metadata, "tensors": tensors}) + "\n"


def _as_table(metadata: dict[str, str] | None, tensors: list[dict[str, Any]]) -> str:
    lines = [
        f"{escape(key)}: {escape(text, 200)}" for key, text in sorted((metadata or {}).items())
    ]
    rows = [_cells(entry) for entry in tensors]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    total = tensors[-1]["data_offsets"][1] if tensors else 0
    count = f"{len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    lines.append(f"{count}, {total} byte{'s' * (total != 1)}")
    return "\n".join(lines) + "\n"


def _cells(entry: dict[str, Any]) -> list[str]:
    begin, end = entry["data_offsets"]
    shape = "x".join(map(str, entry["shape"])) or "scalar"
    cells = [escape(entry["name"], 100), entry["dtype"], shape, str(end - begin)]
    return [*cells, entry["sha256"]] if "sha256" in entry else cells


if __name__ == "__main__":
    sys.exit(main())
