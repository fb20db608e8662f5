from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, UnsupportedDType
from blobstore.models import frameworks
from blobstore.models.device import _Ring, transfer
from blobstore.models.header_index import TensorLocation
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import dequantize_torch as torch_quantization
from blobstore.safetensors.cuda import TorchDeviceStream
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.frozen import forms_of, layer, weights
from tests.support.models import (
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from blobstore.models.frameworks import Move

    Read = Callable[[int, int, memoryview], None]


BUFFERS = 10


class Clock:
    """A stream that copies as late as possible: only when something waits for a copy."""

    def __init__(self) -> None:
        self._asked: deque[Callable[[], None]] = deque()
        self._done = 0
        self._lock = threading.Lock()

    def ask(self, copies: Callable[[], None]) -> int:
        with self._lock:
            self._asked.append(copies)
            return self._done + len(self._asked)

    def reach(self, point: int | None) -> None:
        with self._lock:
            while self._asked and (point is None or self._done < point):
                self._asked.popleft()()
                self._done += 1


class LateStaging:
    def __init__(self, nbytes: int, stream: LateStream) -> None:
        self.memory = memoryview(bytearray(nbytes))
        self._stream = stream
        self._sent = 0

    def send(self, moves: Sequence[Move], after: int) -> int:
        moves = list(moves)
        assert all(self._stream.taken[id(tensor)] <= after for tensor, *_ in moves)

        def copies() -> None:
            for tensor, start, at, count in moves:
                assert start + count <= len(tensor)
                assert at + count <= len(self.memory)
                tensor[start : start + count] = self.memory[at : at + count]

        self._sent = self._stream.clock.ask(copies)
        return self._sent

    def wait(self) -> None:
        self._stream.clock.reach(self._sent)


class Memory(bytearray):
    """Device memory that supports weak references."""

    __slots__ = ("__weakref__",)


class LateStream:
    """A stream to a device that copies as late as possible."""

    def __init__(self, *, space: int = 10**9, buffers: int = BUFFERS) -> None:
        self.clock = Clock()
        self.taken: dict[int, int] = {}
        self.tensors: list[weakref.ref[Memory]] = []
        self.buffers = 0
        self.is_drained = False
        self._left = space
        self._may_make = buffers
        self._awaited = 0

    def empty(self, spec: TensorSpec) -> Memory:
        self._left -= spec.nbytes
        if self._left < 0:
            raise BlobstoreError(f"no memory for {spec.name}")
        memory = Memory(spec.nbytes)
        self.tensors.append(weakref.ref(memory))
        self.taken[id(memory)] = len(self.tensors)
        return memory

    def mark(self) -> int:
        return len(self.tensors)

    def staging(self, nbytes: int) -> LateStaging:
        self.buffers += 1
        if self.buffers > self._may_make:
            raise BlobstoreError("no memory to pin")
        return LateStaging(nbytes, self)

    def receive(self, sent: int) -> None:
        self._awaited = max(self._awaited, sent)

    def drain(self) -> None:
        self.is_drained = True
        self.clock.reach(None)

    def use(self, tensor: Memory) -> bytes:
        """Read a tensor after the copies that the caller's stream waits for."""
        self.clock.reach(self._awaited)
        return bytes(tensor)

    def alive(self) -> int:
        return sum(tensor() is not None for tensor in self.tensors)


class Blobs:
    """Blobs in memory, and a record of the reads."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.contents = contents
        self.reads: list[tuple[int, int, int]] = []

    def __call__(self, slot: int, begin: int, buffer: memoryview) -> None:
        assert len(buffer)
        self.reads.append((slot, begin, len(buffer)))
        buffer[:] = self.contents[slot][begin : begin + len(buffer)]


def of_bytes(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, DType.U8, (nbytes,))


def one_each(sizes: Sequence[int]) -> tuple[list[TensorLocation], Blobs]:
    parts = [TensorLocation(of_bytes(str(i), size), i, 8) for i, size in enumerate(sizes)]
    return parts, Blobs([os.urandom(size + 8) for size in sizes])


def one_blob(sizes: Sequence[int]) -> tuple[list[TensorLocation], Blobs]:
    begins = itertools.accumulate(sizes, initial=8)
    parts = [
        TensorLocation(of_bytes(str(i), size), 0, begin)
        for i, (size, begin) in enumerate(zip(sizes, begins, strict=False))
    ]
    return parts, Blobs([os.urandom(sum(sizes) + 8)])


def expected(part: TensorLocation, blobs: Blobs) -> bytes:
    return blobs.contents[part.slot][part.begin : part.begin + part.spec.nbytes]


def check(parts: list[TensorLocation], blobs: Blobs, buffer: int) -> LateStream:
    stream = LateStream()
    found = transfer(parts, stream, blobs, buffer=buffer)
    for part, (name, tensor) in zip(parts, found, strict=True):
        assert name == part.spec.name
        assert stream.use(tensor) == expected(part, blobs)
    return stream


# The bytes


@pytest.mark.slow
@given(
    groups=st.lists(st.lists(st.integers(0, 700), max_size=12), max_size=8),
    buffer=st.integers(1, 900),
    order=st.randoms(use_true_random=False),
)
def test_all_bytes_arrive_in_the_order_of_the_parts(
    groups: list[list[int]], buffer: int, order: Any
) -> None:
    parts: list[TensorLocation] = []
    for slot, sizes in enumerate(groups):
        begin = 3
        for number, size in enumerate(sizes):
            parts.append(TensorLocation(of_bytes(f"{slot}.{number}", size), slot, begin))
            begin += size
    order.shuffle(parts)
    blobs = Blobs([os.urandom(sum(sizes) + 3) for sizes in groups])
    check(parts, blobs, buffer)
    assert all(0 < count <= buffer for _, _, count in blobs.reads)
    assert sum(count for _, _, count in blobs.reads) == sum(part.spec.nbytes for part in parts)


def test_a_buffer_is_not_reused_before_its_copies_are_done() -> None:
    parts, blobs = one_each([64] * 500)
    stream = check(parts, blobs, 64)
    assert stream.buffers == BUFFERS


def test_a_tensor_larger_than_all_buffers_goes_through_them_in_pieces() -> None:
    parts, blobs = one_blob([1000 * 64 + 5])
    check(parts, blobs, 64)
    assert sorted(blobs.reads) == [
        *((0, 8 + begin, 64) for begin in range(0, 1000 * 64, 64)),
        (0, 8 + 64_000, 5),
    ]


def test_adjacent_tensors_are_read_together() -> None:
    parts, blobs = one_blob([64, 128, 640, 64])
    stream = check(parts, blobs, 1024)
    assert blobs.reads == [(0, 8, 896)]
    assert stream.buffers == 1


def test_tensors_of_different_blobs_share_a_buffer() -> None:
    parts, blobs = one_each([64, 128, 640, 64])
    stream = check(parts, blobs, 1024)
    assert blobs.reads == [(0, 8, 64), (1, 8, 128), (2, 8, 640), (3, 8, 64)]
    assert stream.buffers == 1


def test_the_same_bytes_can_be_two_tensors() -> None:
    _, blobs = one_each([64])
    check([TensorLocation(of_bytes(name, 64), 0, 8) for name in "ab"], blobs, 1024)


def test_empty_tensors_keep_their_positions() -> None:
    parts, blobs = one_each([0, 64, 0, 0, 64, 0])
    check(parts, blobs, 64)
    parts, blobs = one_each([0, 0])
    check(parts, blobs, 64)
    assert blobs.reads == []


def test_transfers_an_empty_list() -> None:
    assert list(transfer([], LateStream(), Blobs([]))) == []


def test_the_buffer_is_no_larger_than_the_tensors() -> None:
    sizes: list[int] = []

    class Stream(LateStream):
        def staging(self, nbytes: int) -> LateStaging:
            sizes.append(nbytes)
            return super().staging(nbytes)

    parts, blobs = one_blob([64, 36])
    list(transfer(parts, Stream(), blobs))
    assert sizes == [128]


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.bits != 6])
@pytest.mark.parametrize("shape", [(3, 14), (0, 2), (2,)])
def test_torch_gets_the_bits_of_every_type(dtype: DType, shape: tuple[int, ...]) -> None:
    specs = [TensorSpec(name, dtype, shape) for name in "abc"]
    nbytes = specs[0].nbytes
    data = bytes(i % 2 for i in range(3 * nbytes))
    parts = [TensorLocation(spec, 0, number * nbytes) for number, spec in enumerate(specs)]
    found = dict(transfer(parts, TorchDeviceStream("cpu"), Blobs([data]), buffer=100))
    for name, tensor in found.items():
        begin = "abc".index(name) * nbytes
        assert tensor.view(torch.uint8).flatten().tolist() == list(data[begin : begin + nbytes])
        assert tensor.dtype.itemsize * tensor.numel() == nbytes
        assert tensor._base is None or dtype is DType.F4


def test_reports_a_type_that_torch_does_not_have() -> None:
    part = TensorLocation(TensorSpec("a", DType.F6_E2M3, (4,)), 0, 0)
    with pytest.raises(UnsupportedDType, match="tensor 'a': torch has no type for F6_E2M3"):
        list(transfer([part], TorchDeviceStream("cpu"), Blobs([bytes(3)])))


def test_works_in_inference_mode() -> None:
    part = TensorLocation(TensorSpec("a", DType.F32, ()), 0, 0)
    with torch.inference_mode():
        ((_, tensor),) = transfer([part], TorchDeviceStream("cpu"), Blobs([b"\0\0\x80\x3f"]))
    assert tensor.is_inference()
    assert tensor.item() == 1


# The order of events


def test_keeps_the_order_whatever_is_read_first() -> None:
    parts, blobs = one_each([64] * 30)
    last = threading.Event()

    def read(slot: int, begin: int, buffer: memoryview) -> None:
        if slot == 0:
            assert last.wait(60)
        blobs(slot, begin, buffer)
        if slot == 7:
            last.set()

    stream = LateStream()
    found = transfer(parts, stream, read, buffer=64)
    assert [stream.use(tensor) for _, tensor in found] == [expected(part, blobs) for part in parts]


def test_allocates_only_a_few_tensors_ahead() -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream()
    for number, _ in enumerate(transfer(parts, stream, blobs, buffer=64)):
        assert len(stream.tensors) <= number + BUFFERS + 1


def test_does_not_keep_a_tensor_after_it_was_yielded() -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream()
    for _, tensor in transfer(parts, stream, blobs, buffer=64):
        stream.use(tensor)
        assert stream.alive() <= BUFFERS + 2


def test_does_not_keep_a_batch_until_its_last_tensor() -> None:
    parts, blobs = one_each([64] * 4)
    stream = LateStream()
    alive = []
    for _, tensor in transfer(parts, stream, blobs, buffer=1024):
        stream.use(tensor)
        del tensor
        alive.append(stream.alive())
    assert alive == [3, 2, 1, 0]


def test_reports_the_bytes() -> None:
    steps: list[tuple[str, int, int]] = []
    parts, blobs = one_each([100, 0, 28])
    found = transfer(
        parts, LateStream(), blobs, buffer=64, progress=lambda *step: steps.append(step)
    )
    assert len(list(found)) == 3
    assert steps == [("loading", done, 128) for done in (64, 100, 128)]


# The ring


def test_buffers_are_reused_in_the_order_of_their_return() -> None:
    ring = _Ring(LateStream(), 64, 2)
    one, two = ring.take(), ring.take()
    ring.give(two)
    ring.give(one)
    assert [ring.take(), ring.take()] == [two, one]


def test_a_buffer_that_could_not_be_allocated_is_not_counted() -> None:
    stream = LateStream(buffers=0)
    ring = _Ring(stream, 64, 1)
    with pytest.raises(BlobstoreError, match="no memory to pin"):
        ring.take()
    stream.buffers -= 2
    assert ring.take().memory.nbytes == 64


# Errors


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def failing_at(number: int, blobs: Blobs) -> Read:
    def read(slot: int, begin: int, buffer: memoryview) -> None:
        if slot == number:
            raise BlobMissing("blob is gone")
        blobs(slot, begin, buffer)

    return read


@pytest.mark.parametrize("number", [0, 1, 50, 99])
def test_a_read_error_ends_the_transfer_and_keeps_nothing(number: int) -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream()
    with pytest.raises(BlobMissing, match="blob is gone") as caught:
        dict(transfer(parts, stream, failing_at(number, blobs), buffer=64))
    assert stream.is_drained
    assert len(blobs.reads) < number + 2 * BUFFERS
    assert stream.alive() == 0
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"space": 64 * 50}, "no memory for 50"),
        *(({"buffers": count}, "no memory to pin") for count in (0, 1, 5)),
    ],
)
@pytest.mark.parametrize("buffer", [64, 96])
def test_a_full_device_or_host_ends_the_transfer_and_keeps_nothing(
    limits: dict[str, int], message: str, buffer: int
) -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream(**limits)
    with pytest.raises(BlobstoreError, match=message) as caught:
        dict(transfer(parts, stream, blobs, buffer=buffer))
    assert stream.is_drained
    assert stream.alive() == 0
    assert caught.value.__traceback__ is not None


def test_reports_a_device_that_fails_at_the_end() -> None:
    class Stream(LateStream):
        def drain(self) -> None:
            super().drain()
            raise BlobstoreError("device is lost")

    parts, blobs = one_each([64])
    with pytest.raises(BlobstoreError, match="device is lost"):
        dict(transfer(parts, Stream(), blobs))
    with pytest.raises(BlobMissing, match="blob is gone"):  # the first cause goes first
        dict(transfer(parts, Stream(), failing_at(0, blobs)))


def test_progress_may_end_the_transfer() -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream()

    def stop(_what: str, done: int, _total: int) -> None:
        if done > 640:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dict(transfer(parts, stream, blobs, buffer=64, progress=stop))
    assert stream.is_drained
    assert stream.alive() == 0


def test_the_caller_may_stop_early() -> None:
    parts, blobs = one_each([64] * 100)
    stream = LateStream()
    found = transfer(parts, stream, blobs, buffer=64)
    _, tensor = next(found)
    found.close()
    assert stream.is_drained
    assert stream.use(tensor) == expected(parts[0], blobs)
    assert stream.alive() == 1
    assert len(blobs.reads) <= BUFFERS


def test_a_blob_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.folder("blobs").mkdir(parents=True)
    data = os.urandom(100 * 64)
    digest = Digest.of(data)
    path = tmp_path / "blobs" / f"sha256-{digest.hex}"
    path.write_bytes(data)

    def read(_: int, begin: int, buffer: memoryview) -> None:
        store.read_into(digest, len(data), begin, buffer)

    found = transfer(
        [TensorLocation(of_bytes("a", 64), 0, 0), TensorLocation(of_bytes("b", 99 * 64), 0, 64)],
        TorchDeviceStream("cpu"),
        read,
        buffer=64,
    )
    name, tensor = next(found)
    assert (name, bytes(tensor.tolist())) == ("a", data[:64])
    os.truncate(path, 64)
    # Found when it is opened, or by a thread that had opened it before.
    message = r"it has 64 bytes, expected 6400|ended at byte \d+ of 6400 while it was read"
    with pytest.raises(BlobDamaged, match=message):
        next(found)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

TENSORS = dense_tensors() | moe_tensors()
PACKED = quantizable_tensors()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a device. The CPU acts as if it had a stream."""
    if request.param == "cpu":
        is_torch = property(lambda target: target.framework == "torch")
        monkeypatch.setattr(frameworks.ArrayTarget, "has_stream", is_torch)
    return str(request.param)


@pytest.fixture
def store(store: LocalStore, tmp_path: Path) -> LocalStore:
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store)
    return store


@pytest.fixture
def packed(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "packed")
    source = write_folder(tmp_path / "plain", PACKED)
    for name in ("int4", "nvfp4", "mxfp8"):
        blobstore.create(source, name, store=store, quantize=QuantizeOptions(name))
    return store


def open_on(device: str, store: LocalStore, name: str = "m", **how: Any) -> blobstore.Model:
    return blobstore.open(name, store=store, framework="torch", device=device, **how)


def of_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def check_of_model(found: dict[str, torch.Tensor], device: str) -> None:
    assert set(found) == set(TENSORS)
    for name, tensor in found.items():
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), of_numpy(TENSORS[name]))


@pytest.mark.parametrize("verify", ["none", "size", "digest"])
@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_all_tensors_arrive(device: str, store: LocalStore, read: str, verify: str) -> None:
    with open_on(device, store, read=read, verify=verify) as model:
        check_of_model(model.state_dict(), device)
        assert list(model.state_dict()) == list(model)


@pytest.mark.slow
@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_cold_tensors_are_decoded_on_their_way(device: str, tmp_path: Path, read: str) -> None:
    store = LocalStore(tmp_path / "store")
    data = {"small": weights(1), "large": weights(2, 5 << 20)}
    add_blobs(store, "m", {name: layer(name, numbers) for name, numbers in data.items()})
    freeze_models(["m"], store=store)
    with open_on(device, store, read=read) as model:
        found = model.state_dict()
    for name, tensor in found.items():
        assert tensor.device.type == device
        assert tensor.cpu().view(torch.uint8).numpy().tobytes() == data[name]
    assert set(forms_of(store, "m").values()) == {"cold"}


def test_tensors_are_chosen_by_prefix(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        found = model.tensors("model.layers.0.mlp.experts.1")
        assert set(found) == {name for name in TENSORS if ".experts.1" in name}
        assert model.tensors("none") == {}


def test_tensors_do_not_share_memory(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        model.state_dict()["scalar"] += 1
        assert model.state_dict()["scalar"].item() == 7


@pytest.mark.parametrize("order", ["file", "name"])
def test_iterates_in_the_requested_order(device: str, store: LocalStore, order: Any) -> None:
    with open_on(device, store) as model, blobstore.open("m", store=store) as plain:
        names = [name for name, _ in plain.iter_tensors(order=order)]
        assert [name for name, _ in model.iter_tensors(order=order)] == names
        check_of_model(dict(model.iter_tensors(order=order)), device)
        ranks = [dict(model.iter_tensors(order=order, shard=(rank, 2))) for rank in (0, 1)]
        assert all(ranks)
        check_of_model(ranks[0] | ranks[1], device)


def test_the_caller_of_a_model_may_stop_early(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        found = cast("Generator[tuple[str, torch.Tensor], None, None]", model.iter_tensors())
        with contextlib.closing(found):
            name, tensor = next(found)
        assert torch.equal(tensor.cpu(), of_numpy(TENSORS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "nvfp4", "mxfp8"])
def test_packed_weights_arrive_unchanged(device: str, packed: LocalStore, kind: str) -> None:
    with open_on(device, packed, kind) as model, blobstore.open(kind, store=packed) as plain:
        found = model.state_dict()
        assert list(found) == list(plain)
        assert any(name.endswith("_scale") for name in found)
        for name, tensor in found.items():
            data = bytes(plain.view(name).data)
            assert bytes(tensor.cpu().view(-1).view(torch.uint8).numpy().data) == data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "nvfp4", "mxfp8"])
def test_packed_weights_are_dequantized_on_the_device(
    device: str, packed: LocalStore, kind: str
) -> None:
    with (
        open_on(device, packed, kind, dequantize=True) as model,
        blobstore.open(kind, store=packed, dequantize=True) as plain,
    ):
        for found in (model.state_dict(), dict(model.iter_tensors())):
            assert set(found) == set(plain)
            for name, tensor in found.items():
                assert tensor.device.type == device
                assert torch.equal(tensor.cpu(), of_numpy(plain[name]))


def test_a_model_reports_the_bytes(device: str, store: LocalStore) -> None:
    steps: list[tuple[str, int, int]] = []
    total = sum(array.nbytes for array in TENSORS.values())
    with open_on(device, store, progress=lambda *step: steps.append(step)) as model:
        model.state_dict()
    assert steps[-1] == ("loading", total, total)


# Changes of the store


@pytest.mark.parametrize("verify", ["size", "none"])
def test_a_removed_blob_is_read_from_its_map(device: str, store: LocalStore, verify: str) -> None:
    path = blob_path(store, "model.layers.0.norm.weight")
    with open_on(device, store, verify=verify) as model:
        if verify == "none":
            model.view("model.layers.0.norm.weight")
        path.unlink()
        check_of_model(model.state_dict(), device)


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_missing_blob_is_reported_with_its_layer(
    device: str, store: LocalStore, read: str
) -> None:
    with open_on(device, store, read=read, verify="none") as model:
        blob_path(store, "position_ids").unlink()
        with pytest.raises(BlobMissing, match="layer 'position_ids': blob '.*' is missing"):
            model.state_dict()


@pytest.mark.parametrize("how", ["tensors", "iter_tensors"])
def test_a_truncated_blob_is_an_error(device: str, store: LocalStore, how: str) -> None:
    path = blob_path(store, "position_ids")
    with open_on(device, store) as model:
        size = path.stat().st_size
        path.chmod(0o600)
        with path.open("r+b") as stream:
            stream.truncate(size - 8)
        message = f"layer 'position_ids': .* it has {size - 8} bytes, expected {size}"
        with pytest.raises(BlobDamaged, match=message):
            dict(getattr(model, how)())


def test_reading_for_a_device_takes_no_memory_of_the_host(device: str, store: LocalStore) -> None:
    with open_on(device, store, read="pread") as model:
        slots = set(range(len(model._index.blobs)))
        assert model._memory._absent == slots
        check_of_model(model.state_dict(), device)
        assert model._memory._absent == slots


def test_sizes_are_checked_when_nothing_is_mapped(device: str, store: LocalStore) -> None:
    blob_path(store, "position_ids").unlink()
    with pytest.raises(BlobMissing, match="layer 'position_ids'"):
        open_on(device, store, read="pread")


def test_a_closed_model_returns_nothing(device: str, store: LocalStore) -> None:
    model = open_on(device, store)
    names = model.iter_tensors()
    model.close()
    for load in (model.state_dict, lambda: next(names)):
        with pytest.raises(BlobstoreError, match=r"model .*m.* is closed"):
            load()


def test_a_model_reports_a_type_that_torch_does_not_have(device: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"s": blob(("s", "F6_E2M3", (4,), bytes(3)))})
    with open_on(device, store) as model, pytest.raises(UnsupportedDType, match="tensor 's'"):
        model.state_dict()


class FailingStream(TorchDeviceStream):
    """A device that fails when it is drained."""

    drained = 0

    def drain(self) -> None:
        self.drained += 1
        raise BlobstoreError("device is lost")


def test_a_model_reports_a_device_that_fails_at_the_end(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        found = model._upload(list(model), FailingStream(device))
        with pytest.raises(BlobstoreError, match="device is lost"):
            dict(found)


@pytest.mark.slow
def test_no_copy_is_in_progress_after_an_error_of_dequantization(
    device: str, packed: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise UnsupportedDType("cannot be computed")

    with open_on(device, packed, "int4", dequantize=True) as model:
        stream = FailingStream(device)
        monkeypatch.setattr(torch_quantization, "dequantize", fail)
        found = model._upload(list(model), stream)
        with pytest.raises(UnsupportedDType, match="cannot be computed") as caught:
            dict(found)
        assert stream.drained == 1
        assert caught.value.__traceback__ is not None


def test_these_tests_run_the_real_stream(device: str) -> None:
    assert isinstance(frameworks.ArrayTarget.of("torch", device).stream(), TorchDeviceStream)
