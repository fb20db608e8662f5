from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import safetensors

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import InvalidHeader
from blobstore.layerfile import blob_buffers, blob_header, blob_size
from blobstore.plan import BlobPlan
from blobstore.quantization.recipes import Copied, Recipe

SOURCES = {name: bytes([number] * 6) for number, name in enumerate("abc")}


def planned(name: str, *sources: str) -> Copied:
    return Copied(TensorSpec(name, DType.U8, (len(sources), 6)), sources)


def test_a_blob_is_its_header_and_the_sources_bytes_in_order() -> None:
    blob = BlobPlan("g", (planned("z", "b", "a"), planned("m", "c")), metadata={"k": "v"})
    data = b"".join(blob_buffers(blob, lambda recipe: [SOURCES[name] for name in recipe.sources]))
    assert data == blob_header(blob) + SOURCES["b"] + SOURCES["a"] + SOURCES["c"]
    assert len(data) == blob_size(blob)
    theirs = {name: bytes(value["data"]) for name, value in safetensors.deserialize(data)}
    assert theirs == {"z": SOURCES["b"] + SOURCES["a"], "m": SOURCES["c"]}


def test_a_buffer_may_be_reused_for_the_next() -> None:
    buffer = bytearray(6)

    def make(recipe: Recipe) -> Iterator[bytearray]:
        for name in recipe.sources:
            buffer[:] = SOURCES[name]
            yield buffer

    blob = BlobPlan("g", (planned("x", "a", "b", "c"),))
    data = b"".join(bytes(np.frombuffer(part, np.uint8)) for part in blob_buffers(blob, make))  # type: ignore[call-overload]
    assert data.endswith(SOURCES["a"] + SOURCES["b"] + SOURCES["c"])


def test_nothing_is_read_before_it_is_asked_for() -> None:
    asked: list[str] = []

    def make(recipe: Recipe) -> Iterator[bytes]:
        for name in recipe.sources:
            asked.append(name)
            yield SOURCES[name]

    buffers = blob_buffers(BlobPlan("g", (planned("x", "a", "b"),)), make)
    next(buffers)
    assert asked == []
    next(buffers)
    assert asked == ["a"]


def test_a_name_that_no_header_can_hold_is_refused() -> None:
    blob = BlobPlan("__metadata__", (planned("__metadata__", "a"),))
    with pytest.raises(InvalidHeader, match="reserved"):
        blob_size(blob)
