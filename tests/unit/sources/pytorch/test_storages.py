from __future__ import annotations

import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import DamagedSource
from blobstore.sources.pytorch import storages as torch_storages
from blobstore.sources.pytorch.gather import gathered, swapped
from blobstore.sources.pytorch.legacy import LegacyStream
from blobstore.sources.pytorch.storages import Container, StorageReader
from blobstore.sources.pytorch.tensors import Storage, StridedTensor, extent_of
from blobstore.sources.pytorch.zip import ZipCheckpoint
from blobstore.sources.pytorch.zip_entries import ZipEntry, read_entry
from tests.support.checkpoints import legacy_file, mapping, pickled, tensor, zip_file
from tests.support.torch_files import TYPES, of_type, raw
from tests.support.zip_files import deflated, opened

CONTENT = random.Random(1).randbytes(3 << 20)
"""More than the reader takes at once."""
BEFORE = b"before it"


class File:
    """A file with one storage in it, and a reader of it."""

    def __init__(self, descriptor: int, entry: ZipEntry) -> None:
        self.descriptor = descriptor
        self.entry = entry
        self.reader = StorageReader(descriptor)

    def read(self, begin: int, end: int, size: int = 1 << 16) -> bytes:
        buffer = memoryview(bytearray(size))
        return b"".join(map(bytes, self.reader.read(self.entry, begin, end, buffer)))

    def copy(self, begin: int, end: int) -> bytes:
        return bytes(self.reader.copy(self.entry, begin, end))


@contextmanager
def stored(
    content: bytes = CONTENT, *, crc: int | None = None, is_deflated: bool = False
) -> Iterator[File]:
    """Give a file of a storage; ``crc`` replaces its checksum."""
    data = deflated(content) if is_deflated else content
    found = zlib.crc32(content) if crc is None else crc
    with opened(BEFORE + data + b"behind it") as (descriptor, _):
        entry = ZipEntry("0", len(BEFORE), len(data), len(content), found, is_deflated)
        yield File(descriptor, entry)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return where the reader has read, and how much, as it goes on."""
    found: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        found.append((offset - len(BEFORE), count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    return found


PARTS = [(0, 1), (0, 0), (1, 1), (5, 6), (1000, 2_000_001), (1, len(CONTENT)), (0, len(CONTENT))]


@pytest.mark.slow
@pytest.mark.parametrize("is_deflated", [False, True])
@pytest.mark.parametrize(("begin", "end"), PARTS)
def test_reads_parts(begin: int, end: int, is_deflated: bool) -> None:
    with stored(is_deflated=is_deflated) as file:
        assert file.read(begin, end) == CONTENT[begin:end]
        assert file.copy(begin, end) == CONTENT[begin:end]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_reads_by_way_of_buffers_of_any_size(size: int) -> None:
    with stored(CONTENT[:1000]) as file:
        for begin, end in ((0, 1000), (3, 990)):
            assert file.read(begin, end, size) == CONTENT[begin:end]


def test_pieces_are_in_the_buffer() -> None:
    with stored() as file:
        for begin, end in ((0, len(CONTENT)), (7, 100_000)):
            buffer = memoryview(bytearray(1 << 14))
            for piece in file.reader.read(file.entry, begin, end, buffer):
                assert piece.obj is buffer.obj
                assert len(piece) <= len(buffer)


@pytest.mark.parametrize("is_deflated", [False, True])
def test_an_empty_storage_has_no_bytes(is_deflated: bool) -> None:
    with stored(b"", is_deflated=is_deflated) as file:
        assert file.read(0, 0) == file.copy(0, 0) == b""


# Checksums


@pytest.mark.slow
@pytest.mark.parametrize("is_deflated", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, len(CONTENT)), (5, 9), (0, 4), (9, len(CONTENT))])
def test_rejects_a_wrong_checksum(begin: int, end: int, is_deflated: bool) -> None:
    with stored(crc=1, is_deflated=is_deflated) as file:
        for _ in range(2):  # the first time teaches it nothing
            with pytest.raises(DamagedSource, match=r"has the CRC [0-9a-f]{8}, not 00000001"):
                file.read(begin, end)
            with pytest.raises(DamagedSource, match="its bytes have been changed"):
                file.copy(begin, end)


def test_checks_a_part_before_it_returns_bytes() -> None:
    with stored(crc=1) as file:
        pieces = file.reader.read(file.entry, 5, 9, memoryview(bytearray(4)))
        with pytest.raises(DamagedSource):
            next(pieces)


def test_a_missing_checksum_is_not_verified(asked: list[tuple[int, int]]) -> None:
    with stored(crc=0) as file:
        assert file.read(10, 20) == CONTENT[10:20]
    assert asked == [(10, 10)]


def read_part(file: File) -> None:
    assert file.read(10, 20) == CONTENT[10:20]


def read_all(file: File) -> None:
    assert file.read(0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("first", [read_part, read_all])
def test_reads_a_storage_for_its_checksum_once(
    first: Callable[[File], None], asked: list[tuple[int, int]]
) -> None:
    with stored() as file:
        first(file)
        before = sum(count for _, count in asked)
        assert before >= len(CONTENT)
        for begin in range(0, 1000, 100):
            assert file.read(begin, begin + 50) == CONTENT[begin : begin + 50]
        assert sum(count for _, count in asked) == before + 10 * 50


def test_a_storage_that_was_not_read_to_its_end_is_not_checked() -> None:
    with stored(crc=1) as file:
        pieces = file.reader.read(file.entry, 0, len(CONTENT), memoryview(bytearray(100)))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        with pytest.raises(DamagedSource):
            file.read(10, 20)


def test_storages_are_checked_one_by_one() -> None:
    with stored() as file:
        read_all(file)
        file.entry = file.entry._replace(name="1", crc=1)
        with pytest.raises(DamagedSource):
            file.read(10, 20)


# Compressed storages


@pytest.mark.slow
def test_unpacks_a_storage_for_all_its_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def noted(descriptor: int, place: ZipEntry, buffer: memoryview) -> Iterator[memoryview]:
        unpacked.append(place.name)
        return read_entry(descriptor, place, buffer)

    monkeypatch.setattr(torch_storages, "read_entry", noted)
    with stored(is_deflated=True) as file:
        other = file.entry._replace(name="1")
        for place in (file.entry, file.entry, other, other, file.entry):
            piece = memoryview(bytearray(5))
            assert b"".join(file.reader.read(place, 5, 10, piece)) == CONTENT[5:10]
    assert unpacked == ["0", "1", "0"]


def test_reports_a_truncated_compressed_storage() -> None:
    with stored(is_deflated=True) as file:
        file.entry = file.entry._replace(stored_size=file.entry.stored_size - 100)
        for begin, end in ((0, len(CONTENT)), (5, 9)):
            with pytest.raises(DamagedSource, match="entry '0' at byte 9 is truncated"):
                file.read(begin, end)


# Files that change


@pytest.mark.parametrize("crc", [None, 0])
def test_reports_a_truncated_file(crc: int | None) -> None:
    with stored(crc=crc) as file:
        os.truncate(file.descriptor, 1000)
        for begin, end in ((0, len(CONTENT)), (500, 1500), (5000, 5001)):
            with pytest.raises(DamagedSource, match=r"truncated"):
                file.read(begin, end)
            with pytest.raises(DamagedSource):
                file.copy(begin, end)


def test_reports_a_file_that_is_truncated_after_its_checksum() -> None:
    with stored() as file:
        read_part(file)
        os.truncate(file.descriptor, 1000)
        assert file.read(0, 900) == CONTENT[:900]
        with pytest.raises(DamagedSource, match="is truncated: the file ended at byte 1000"):
            file.read(900, 1100)


def test_continues_after_short_reads_of_a_storage() -> None:
    with stored(CONTENT[:1000]) as file, pytest.MonkeyPatch.context() as patch:
        preadv = os.preadv
        patch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:3]], at))
        assert file.read(10, 900) == CONTENT[10:900]
        assert file.copy(0, 1000) == CONTENT[:1000]


# Threads


@pytest.mark.parametrize("is_deflated", [False, True])
def test_any_number_of_threads_can_read(is_deflated: bool) -> None:
    start = threading.Barrier(8)

    def part(number: int) -> bool:
        start.wait()
        begin = number * 1000
        return file.read(begin, begin + 70_000, 999) == CONTENT[begin : begin + 70_000]

    with stored(is_deflated=is_deflated) as file, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(part, range(8)))


def test_threads_check_a_storage_once(asked: list[tuple[int, int]]) -> None:
    start = threading.Barrier(6)

    def part(number: int) -> None:
        start.wait()
        file.read(number * 10, number * 10 + 10)

    with stored() as file, ThreadPoolExecutor(6) as pool:
        list(pool.map(part, range(6)))
    assert sum(count for _, count in asked) == len(CONTENT) + 60


# Containers


@pytest.mark.parametrize(("kind", "form"), [(ZipCheckpoint, zip_file), (LegacyStream, legacy_file)])
def test_both_containers_are_containers(
    kind: Callable[[int, int], Container], form: Callable[[bytes], bytes]
) -> None:
    with opened(form(pickled(mapping(a=tensor())))) as (descriptor, size):
        container = kind(descriptor, size)
    assert container.kind
    assert container.pickle_size < torch_storages.MAX_PICKLE_SIZE
    assert not container.is_swapped
    assert [item.identifier[2] for item in container.result.persistents] == ["0"]


DTYPES = {name: dtype for dtype, name in TYPES.items()}


def strided(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: DType = DType.F32,
    *,
    conj: bool = False,
    neg: bool = False,
) -> StridedTensor:
    """Return a tensor whose first element is that of its storage; a pair of F4 is an element."""
    size = dtype.bits // 8 or 1
    extent = extent_of(tuple(shape), tuple(stride))
    given_shape = (*shape[:-1], shape[-1] * 2) if dtype is DType.F4 else tuple(shape)
    nbytes = extent.span * size
    return StridedTensor(
        TensorSpec("a", dtype, given_shape),
        Storage("0", "UntypedStorage", DType.U8, 1, nbytes),
        ZipEntry("0", 0, nbytes, nbytes, 0, is_deflated=False),
        begin=0,
        offset=0,
        nbytes=extent.elements * size,
        stride=tuple(stride),
        extent=extent,
        is_direct=False,
        is_mapped=False,
        is_conjugated=conj,
        is_negated=neg,
    )


# Byte order


@pytest.mark.parametrize(
    ("kind", "size", "data", "turned"),
    [
        ("HalfStorage", 2, "0102 0304", "0201 0403"),
        ("FloatStorage", 4, "01020304 05060708", "04030201 08070605"),
        ("LongStorage", 8, "0102030405060708", "0807060504030201"),
        ("ComplexFloatStorage", 8, "01020304 05060708", "04030201 08070605"),
        (
            "ComplexDoubleStorage",
            16,
            "01" * 7 + "00" + "02" * 7 + "03",
            "0001010101010101 0302020202020202",
        ),
        ("DoubleStorage", 8, "", ""),
    ],
)
def test_swaps_bytes(kind: str, size: int, data: str, turned: str) -> None:
    content = bytes.fromhex(data)
    storage = Storage("0", kind, None, size, len(content) // size)
    assert swapped(bytearray(content), storage) == bytes.fromhex(turned)


# Order of elements


@pytest.mark.parametrize("name", DTYPES)
def test_puts_elements_of_every_type_in_order(name: str) -> None:
    values = of_type(DTYPES[name], 4, 5)
    found = gathered(strided((5, 4), (1, 5), DType[name]), bytearray(raw(values)))
    size = values.itemsize
    columns = values.view(torch.uint8).reshape(4, 5, size).transpose(0, 1)
    assert bytes(found) == columns.contiguous().numpy().tobytes()


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=5), st.data())
def test_puts_elements_in_the_order_that_torch_does(
    dims: list[tuple[int, int]], data: st.DataObject
) -> None:
    shape, stride = [dim[0] for dim in dims], [dim[1] for dim in dims]
    tensor = strided(shape, stride)
    content = data.draw(st.binary(min_size=tensor.extent.span * 4, max_size=tensor.extent.span * 4))
    elements = torch.frombuffer(bytearray(content or bytes(4)), dtype=torch.int32)
    expected = elements.as_strided(shape, stride).contiguous()
    assert bytes(gathered(tensor, bytearray(content))) == expected.numpy().tobytes()


def test_a_dimension_of_one_element_can_have_any_stride() -> None:
    largest = 2**63 - 1
    found = gathered(strided((1, 2, 1), (largest, 3, largest)), bytearray(range(16)))
    assert bytes(found) == bytes([0, 1, 2, 3, 12, 13, 14, 15])
    assert gathered(strided((1, 1), (largest, largest)), bytearray(4)).nbytes == 4


def test_repeats_elements() -> None:
    found = gathered(strided((2, 3), (0, 1)), bytearray(range(12)))
    assert bytes(found) == bytes(range(12)) * 2


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 3), (2**40, 0)])
@pytest.mark.parametrize("neg", [False, True])
def test_a_tensor_can_have_no_elements(shape: Sequence[int], neg: bool) -> None:
    stride = (7,) * len(shape)
    assert bytes(gathered(strided(shape, stride, neg=neg), bytearray())) == b""


def test_gathered_elements_are_bytes() -> None:
    found = gathered(strided((2, 2), (1, 2)), bytearray(16))
    assert (found.format, found.itemsize, found.ndim, found.nbytes) == ("B", 1, 1, 16)


def test_takes_sixty_four_dimensions() -> None:
    shape = (1,) * 62 + (2, 2)
    found = gathered(strided(shape, (0,) * 62 + (1, 2)), bytearray(range(16)))
    assert bytes(found) == bytes([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])


# Conjugation and negation


COMPLEX = np.array([[1 + 2j, -3 - 0j], [0 - 4j, np.inf + 1j]], np.complex64)


@pytest.mark.parametrize(("conj", "neg"), [(True, False), (False, True), (True, True)])
def test_conjugates_and_negates(conj: bool, neg: bool) -> None:
    expected = torch.from_numpy(COMPLEX.T)
    expected = expected.conj() if conj else expected
    expected = torch._neg_view(expected) if neg else expected
    tensor = strided((2, 2), (1, 2), DType.C64, conj=conj, neg=neg)
    assert bytes(gathered(tensor, bytearray(COMPLEX.tobytes()))) == raw(expected)


def some_values() -> list[Any]:
    return [np.array([0.0, -0.0, 1.5, -np.inf, np.nan], dtype) for dtype in ("f2", "f4", "f8")] + [
        np.array([0, 1, 2**7 - 1, -(2**7)], dtype) for dtype in ("i1", "i2", "i4", "i8")
    ]


@pytest.mark.parametrize("values", some_values(), ids=lambda values: str(values.dtype))
def test_negates_as_torch_does(values: Any) -> None:
    tensor = torch.from_numpy(values)
    dtype = DType[TYPES[tensor.dtype]]
    found = gathered(strided(values.shape, (1,), dtype, neg=True), bytearray(values.tobytes()))
    assert bytes(found) == raw(torch._neg_view(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_negates_types_that_numpy_lacks_or_negates_differently(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 2.5, 96.0]).to(dtype)
    tensor = strided((4,), (1,), DType[TYPES[dtype]], neg=True)
    assert bytes(gathered(tensor, bytearray(raw(values)))) == raw(-values)
