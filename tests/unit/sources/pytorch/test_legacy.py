from __future__ import annotations

import io
import os
import pickle as pickles
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from blobstore.core.tensor import DType
from blobstore.errors import CheckpointRefused
from blobstore.sources.pytorch import legacy as torch_legacy
from blobstore.sources.pytorch.legacy import LEGACY_PICKLES, MAGIC, LegacyStream, is_legacy
from blobstore.sources.pytorch.tensors import Storage, TensorReader
from blobstore.sources.pytorch.zip_entries import ZipEntry
from blobstore.unpickler.machine import run
from blobstore.unpickler.state import CutShort
from tests.support.checkpoints import (
    VALUES,
    call,
    legacy_file,
    mapping,
    named,
    pickled,
    several,
    tensor,
    text,
)
from tests.support.zip_files import opened

PICKLE = pickled(mapping(a=tensor()))
HEAD = pickled(b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19")
FLOATS = Storage("0", "FloatStorage", DType.F32, 4, 4)
BYTES = Storage("0", "ByteStorage", DType.U8, 1, 16)


def parsed(data: bytes) -> LegacyStream:
    with opened(data) as (descriptor, size):
        return LegacyStream(descriptor, size)


def located(data: bytes, storages: Mapping[str, Storage] | None = None) -> dict[str, ZipEntry]:
    with opened(data) as (descriptor, size):
        stream = LegacyStream(descriptor, size)
        return stream.locate({"0": FLOATS} if storages is None else storages)


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        function(*arguments)
    return str(caught.value)


def torch_file(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False, **options)
    return file.getvalue()


def test_reads_a_stream() -> None:
    data = legacy_file(PICKLE)
    found = parsed(data)
    assert (found.kind, found.is_swapped) == ("legacy stream", False)
    assert found.pickle_size == len(PICKLE)
    assert list(found.result.value) == ["a"]
    assert found.notices() == []
    place = located(data)["0"]
    assert data[place.offset : place.offset + place.size] == VALUES
    assert (place.stored_size, place.crc, place.is_deflated) == (16, 0, False)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_reads_what_torch_writes(protocol: int) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5, dtype=torch.int16)}
    data = torch_file(tensors, pickle_protocol=protocol)
    with opened(data) as (descriptor, size):
        stream = LegacyStream(descriptor, size)
        reader = TensorReader(stream.result.persistents, stream.locate)
        for name, value in stream.result.value.items():
            found = reader.read(name, value)
            content = data[found.offset : found.offset + found.nbytes]
            assert content == tensors[name].numpy().tobytes()


# The header


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_recognizes_the_start_of_a_legacy_stream(protocol: int) -> None:
    assert is_legacy(pickles.dumps(MAGIC, protocol))
    assert not is_legacy(pickles.dumps(MAGIC + 1, protocol))
    assert not is_legacy(pickles.dumps(str(MAGIC), protocol))


@pytest.mark.parametrize(
    "head", [b"", b"\x80", b"\x80\x02.", b"hello", HEAD[:-1], b"cos\nsystem\n."]
)
def test_rejects_other_starts_of_a_file(head: bytes) -> None:
    assert not is_legacy(head)


def test_searches_the_magic_number_only_at_the_start() -> None:
    late = b"\x80\x02" + b"N0" * 4000 + HEAD[2:]
    assert not is_legacy(late)


def test_there_are_five_pickles_before_the_storages() -> None:
    data, end = legacy_file(PICKLE), 0
    for _ in range(LEGACY_PICKLES):
        end = run(data, start=end).end
    assert data[end:] == struct.pack("<q", 4) + VALUES


def test_rejects_another_magic_number() -> None:
    data = legacy_file(PICKLE).replace(b"\x6c\xfc", b"\x6d\xfc", 1)
    assert refusal(parsed, data) == "this is not a stream of torch's protocol 1001"


@pytest.mark.parametrize(("flag", "is_swapped"), [(b"\x88", False), (b"\x89", True)])
def test_reads_the_byte_order(flag: bytes, is_swapped: bool) -> None:
    assert parsed(legacy_file(PICKLE, facts=mapping(little_endian=flag))).is_swapped is is_swapped


def test_records_globals_next_to_tensors() -> None:
    value = mapping(a=tensor(), b=call(named("posix", "system"), text("id")))
    assert [str(item) for item in parsed(legacy_file(pickled(value))).result.refused] == [
        "posix.system"
    ]


# The storages


def test_finds_storages_of_several_types_in_the_order_of_the_list() -> None:
    kinds = {
        "10": Storage("10", "HalfStorage", DType.F16, 2, 3),
        "2": Storage("2", "ComplexDoubleStorage", None, 16, 1),
        "1": Storage("1", "LongStorage", DType.I64, 8, 0),
        "9": Storage("9", "BoolStorage", DType.BOOL, 1, 5),
    }
    contents = {
        key: bytes([len(key) + n]) * kind.nbytes for n, (key, kind) in enumerate(kinds.items())
    }
    data = legacy_file(PICKLE, contents, counts={key: kind.elements for key, kind in kinds.items()})
    places = located(data, dict(reversed(kinds.items())))
    assert {
        key: data[place.offset : place.offset + place.size] for key, place in places.items()
    } == contents


def test_a_count_counts_elements_and_not_bytes() -> None:
    data = legacy_file(PICKLE, itemsize=1)
    assert located(data, {"0": BYTES})["0"].size == 16
    assert "has 16 elements, but its tensors say 4" in refusal(located, data)


def test_reports_the_offset_of_a_count() -> None:
    data = legacy_file(PICKLE, counts={"0": 7})
    at = data.index(struct.pack("<q", 7))
    assert refusal(located, data).startswith(f"byte {at}: storage '0' has 7 elements")


def test_rejects_a_storage_of_unknown_size() -> None:
    kind = Storage("0", "QUInt4x2Storage", None, 0, 4)
    message = refusal(located, legacy_file(PICKLE), {"0": kind})
    assert message == "the size of torch.QUInt4x2Storage '0' is unknown"


@pytest.mark.parametrize("missing", [1, 15, 16])
def test_rejects_a_storage_that_is_truncated(missing: int) -> None:
    data = legacy_file(PICKLE)
    assert refusal(located, data[:-missing]) == (
        f"storage '0' ends at byte {len(data)}, but the file at {len(data) - missing}: "
        "it was truncated"
    )


@pytest.mark.parametrize("missing", [17, 24])
def test_rejects_a_count_that_is_truncated(missing: int) -> None:
    assert "has -1 elements" in refusal(located, legacy_file(PICKLE)[:-missing])


def test_a_stream_can_have_no_storages() -> None:
    assert located(legacy_file(pickled(b"}"), {}), {}) == {}


# The pickles


def test_rejects_a_stream_that_is_truncated_anywhere() -> None:
    data = legacy_file(PICKLE)
    for end in range(len(data) - len(VALUES) - 8):
        with pytest.raises(CutShort):
            parsed(data[:end])


def test_reads_pickles_larger_than_what_it_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_legacy, "_WINDOW", 64)
    value = pickled(mapping(a=tensor(), b=text("x" * 10_000)))
    data = legacy_file(value)
    assert parsed(data).pickle_size == len(value)
    assert located(data)["0"].offset == len(data) - 16


def test_reads_no_more_of_a_pickle_than_pickles_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_legacy, "_WINDOW", 64)
    monkeypatch.setattr(torch_legacy, "MAX_PICKLE_SIZE", 1000)
    data = legacy_file(pickled(mapping(a=tensor(), b=text("x" * 10_000))))
    asked = 0
    pread = os.pread

    def counted(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal asked
        asked = max(asked, offset + count)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    with pytest.raises(CutShort):
        parsed(data)
    assert asked == 1000


def test_rejects_a_stream_that_became_shorter() -> None:
    data = legacy_file(PICKLE)[:200]
    with opened(data) as (descriptor, size), pytest.raises(CutShort):
        LegacyStream(descriptor, size + 1000)


def test_rejects_a_module_saved_whole() -> None:
    message = refusal(parsed, torch_file(nn.Sequential(nn.Linear(2, 2))))
    assert message.endswith(
        "NEWOBJ: it holds a complete model object, with its class; save its state_dict() instead"
    )


def test_rejects_the_class_of_a_module() -> None:
    cls = several(*map(text, ("module", "Linear", "linear.py", "class Linear: ..."))) + b"Q"
    with opened(legacy_file(pickled(mapping(a=tensor(), b=cls)))) as (descriptor, size):
        stream = LegacyStream(descriptor, size)
        message = refusal(TensorReader, stream.result.persistents, stream.locate)
    assert message.startswith("pickle byte ")
    assert message.endswith("a reference to outside data is not of the form that torch writes")
