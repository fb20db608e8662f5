from __future__ import annotations

from functools import partial

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UsageError
from blobstore.sources.memory import MemorySource


def source(data: bytes = b"0123456789") -> MemorySource:
    """Return a source with one tensor."""
    spec = TensorSpec("x", DType.U8, (len(data),))
    return MemorySource({spec: partial(bytes, data)}, {}, {"b": b"", "a": b""})


def test_yields_pieces_of_the_size_of_the_buffer() -> None:
    pieces = [bytes(piece) for piece in source().read("x", memoryview(bytearray(4)))]
    assert pieces == [b"0123", b"4567", b"89"]


def test_records_the_file_that_the_library_would_write() -> None:
    opened = source()
    (file,) = opened.record().files
    assert (file.name, file.size) == ("model.safetensors", len(file.start) + 10)
    assert [kept.name for kept in opened.files] == ["a", "b"]


def test_a_name_that_a_store_cannot_hold_is_refused() -> None:
    tensors = {TensorSpec("x", DType.U8, (1,)): partial(bytes, 1)}
    MemorySource(tensors, {}, {"a/b/c.json": b""})
    for name in ("a/b/c/d.json", "a b"):
        with pytest.raises(UsageError, match=f"a file '{name}': names have at most 3 parts of"):
            MemorySource(tensors, {}, {name: b""})


def test_other_processes_cannot_open_it() -> None:
    with pytest.raises(UsageError, match="only by threads"):
        _ = source().reopen
