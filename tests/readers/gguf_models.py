"""A second, simple reader of GGUF files and of models that were made of them.

It was written from the description of GGUF in ggml (``docs/gguf.md``) and from docs/reference/format.md alone, and
expects intact models without small tensors that are packed in one blob.
"""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_SOURCE = "application/vnd.blobstore.source.v1+json"


class Tensor(NamedTuple):
    """A tensor as the header describes it: dimensions as they are written, the fastest first."""

    dimensions: tuple[int, ...]
    number: int
    offset: int


class Header(NamedTuple):
    """A header."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    end: int
    """Where the data begins, or would."""


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, code: str) -> Any:
        found = struct.unpack_from(f"<{code}", self.data, self.at)[0]
        self.at += struct.calcsize(f"<{code}")
        return found

    def text(self) -> str:
        size = self.take("Q")
        found = self.data[self.at : self.at + size]
        assert len(found) == size
        self.at += size
        return found.decode(errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            element, count = self.take("I"), self.take("Q")
            return [self.value(element) for _ in range(count)]
        return self.take(_SCALARS[kind])


def read_header(data: bytes) -> Header:
    """Return the header of a file that begins with ``data``."""
    cursor = _Cursor(data)
    assert cursor.take("4s") == b"GGUF"
    assert cursor.take("I") in {2, 3}
    tensor_count, value_count = cursor.take("Q"), cursor.take("Q")
    values = {cursor.text(): cursor.value(cursor.take("I")) for _ in range(value_count)}
    tensors = {}
    for _ in range(tensor_count):
        name = cursor.text()
        dimensions = tuple(cursor.take("Q") for _ in range(cursor.take("I")))
        tensors[name] = Tensor(dimensions, cursor.take("I"), cursor.take("Q"))
    alignment = values.get("general.alignment", 32)
    end = -(-cursor.at // alignment) * alignment if tensors else cursor.at
    return Header(values, tensors, end)


def read_files(store: Path, manifest: bytes) -> dict[str, bytes]:
    """Return the GGUF files that a model was made of, by name."""
    layers = json.loads(manifest)["layers"]
    (source,) = (layer for layer in layers if layer["mediaType"] == _SOURCE)
    record = json.loads(_blob(store, source["digest"]))
    held = zstandard.ZstdDecompressor().decompress(base64.b64decode(record["data"]))
    rest = json.loads(held[sum(file["held"] for file in record["files"]) :] or b"{}")
    tensors: dict[str, bytes] = {}
    for layer in layers:
        if layer["mediaType"].endswith(".tensor"):
            tensors |= _tensors(_blob(store, layer["digest"]))
    files, at = {}, 0
    for file in record["files"]:
        start = held[at : at + file["held"]]
        at += file["held"]
        header = read_header(start)
        assert header.end == len(start)
        data = bytearray(start.ljust(file["size"], b"\0"))
        for name, tensor in header.tensors.items():
            begin = header.end + tensor.offset
            data[begin : begin + len(tensors[name])] = tensors[name]
        for offset, gap in rest.get("gaps", {}).get(file["name"], {}).items():
            content = base64.b64decode(gap)
            data[int(offset) : int(offset) + len(content)] = content
        files[file["name"]] = bytes(data)
    return files


def _blob(store: Path, digest: str) -> bytes:
    return (store / "blobs" / digest.replace(":", "-")).read_bytes()


def _tensors(blob: bytes) -> dict[str, bytes]:
    (size,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + size])
    header.pop("__metadata__", None)
    data = blob[8 + size :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
