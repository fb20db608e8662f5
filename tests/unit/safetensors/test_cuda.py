from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobstoreError, UnsupportedDType, UsageError
from blobstore.models.device import transfer
from blobstore.models.header_index import TensorLocation
from blobstore.safetensors import prefetch, safe_open
from blobstore.safetensors.cuda import CallerStream, TorchDeviceStream, host_buffer
from blobstore.safetensors.torch import copy_to, empty_tensor, save_file
from tests.support import fake_cuda
from tests.support.dtypes import NAMES
from tests.support.fake_cuda import FakeCuda, Stream

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

delay: Any = partial(torch.cuda._sleep, 200_000_000)
"""Keeps the current stream busy."""
IN_TORCH = [dtype for dtype, name in NAMES.items() if hasattr(torch, name)]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
LARGE = TensorSpec("large", DType.U8, (1 << 55,))


def reader(data: bytes) -> Callable[[int, int, memoryview], None]:
    def read(_: int, begin: int, buffer: memoryview) -> None:
        buffer[:] = data[begin : begin + len(buffer)]

    return read


def load(
    specs: list[TensorSpec], data: bytes, device: str, buffer: int = 1 << 20
) -> dict[str, torch.Tensor]:
    parts = []
    begin = 0
    for spec in specs:
        parts.append(TensorLocation(spec, 0, begin))
        begin += spec.nbytes
    return dict(transfer(parts, TorchDeviceStream(device), reader(data), buffer=buffer))


def send(
    stream: TorchDeviceStream, tensor: torch.Tensor, data: bytes, *, is_waited_for: bool = False
) -> Any:
    """Copy bytes from another thread, as a load does: it makes the stream of copies current."""
    mark = stream.mark()

    def work() -> Any:
        staging = stream.staging(len(data))
        staging.memory[:] = data
        sent = staging.send([(tensor, 0, 0, len(data))], mark)
        if is_waited_for:
            staging.wait()
        return sent

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


# Any device


@pytest.mark.parametrize("device", DEVICES)
def test_sends_bytes_to_the_given_places(device: str) -> None:
    stream = TorchDeviceStream(device)
    tensor = stream.empty(TensorSpec("a", DType.I16, (2, 2)))
    other = stream.empty(TensorSpec("b", DType.U8, ()))
    staging = stream.staging(16)
    staging.memory[:] = bytes(range(16))
    stream.receive(
        staging.send([(tensor, 0, 4, 2), (tensor, 2, 8, 6), (other, 0, 1, 1)], stream.mark())
    )
    assert tensor.view(torch.uint8).tolist() == [[4, 5, 8, 9], [10, 11, 12, 13]]
    assert other.item() == 1
    staging.wait()
    stream.drain()


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_on_the_device_and_own_their_memory(device: str) -> None:
    found = load(
        [TensorSpec("a", DType.F32, (2,)), TensorSpec("b", DType.F32, ())], bytes(12), device
    )
    for tensor in found.values():
        assert tensor.device.type == device
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor._base is None
        assert tensor.requires_grad_().is_leaf


@pytest.mark.parametrize("device", DEVICES)
def test_reports_exhausted_memory_in_one_line(device: str) -> None:
    with pytest.raises(BlobstoreError) as caught:
        TorchDeviceStream(device).empty(LARGE)
    assert "\n" not in str(caught.value)
    with pytest.raises(BlobstoreError, match="memory"):
        TorchDeviceStream(device).staging(1 << 55)


def test_reports_the_tensor_when_device_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    text = "cpu has no memory left for tensor 'a' of 8 bytes; use another device, or load fewer"
    spec = TensorSpec("a", DType.F32, (2,))
    stream = TorchDeviceStream("cpu")
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BlobstoreError, match=text):
        stream.empty(spec)
    monkeypatch.setattr(torch.Tensor, "to", refuse)
    with pytest.raises(BlobstoreError, match=text):
        copy_to("cpu", torch.zeros(2), spec)


def test_rejects_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="torch has no device 'cuda:99' here: "):
        TorchDeviceStream("cuda:99")


# Empty tensors


@pytest.mark.parametrize("dtype", IN_TORCH)
def test_an_empty_tensor_has_type_and_shape(dtype: DType) -> None:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 4), (0, 3)]
    for shape in shapes:
        spec = TensorSpec("a", dtype, shape)
        tensor = empty_tensor(spec, torch.device("cpu"))
        assert tensor.shape == shape
        assert tensor.nbytes == spec.nbytes


def test_an_empty_tensor_of_four_bit_floats_holds_pairs() -> None:
    tensor = empty_tensor(TensorSpec("a", DType.F4, (2, 6)), torch.device("cpu"))
    assert (tensor.dtype, tensor.shape) == (torch.float4_e2m1fn_x2, (2, 3))
    with pytest.raises(UnsupportedDType, match="torch has no type for F4 of shape"):
        empty_tensor(TensorSpec("a", DType.F4, (2, 5)), torch.device("cpu"))


def test_reports_an_empty_tensor_whose_shape_torch_cannot_hold() -> None:
    spec = TensorSpec("a", DType.F32, (0, 2**63, 2**63))
    with pytest.raises(UnsupportedDType, match="tensor 'a': torch cannot hold its shape"):
        empty_tensor(spec, torch.device("cpu"))


# CUDA


def test_a_buffer_need_not_be_pinned_where_the_system_refuses_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(nbytes: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(nbytes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    assert host_buffer(5, is_pinned=True).tolist() == [0] * 5
    assert host_buffer(5, is_pinned=False).tolist() == [0] * 5


@needs_cuda
def test_a_buffer_for_cuda_is_pinned() -> None:
    assert TorchDeviceStream("cuda").staging(64)._bytes.is_pinned()


@needs_cuda
@pytest.mark.parametrize("buffer", [64, 4096, 1 << 20])
def test_copies_through_many_buffers_to_cuda(buffer: int) -> None:
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    sizes = [1, 0, 63, 65, 4096, 200_000, 7, 50_000]
    specs = [TensorSpec(str(i), DType.U8, (size,)) for i, size in enumerate(sizes)]
    found = load(specs, bytes(data.numpy().data), "cuda", buffer)
    joined = torch.cat([found[str(i)] for i in range(len(sizes))])
    assert torch.equal(joined.cpu(), data[: sum(sizes)])


@needs_cuda
@pytest.mark.parametrize("dtype", [*IN_TORCH, DType.F4])
def test_copies_every_type_to_cuda_bit_for_bit(dtype: DType) -> None:
    spec = TensorSpec("a", dtype, (3, 14))
    data = bytes(i % 2 for i in range(spec.nbytes))
    tensor = load([spec], data, "cuda")["a"]
    assert tensor.view(torch.uint8).cpu().flatten().tolist() == list(data)


@needs_cuda
def test_loads_onto_any_cuda_device() -> None:
    last = torch.cuda.device_count() - 1
    tensor = load([TensorSpec("a", DType.U8, (3,))], b"\1\2\3", f"cuda:{last}")["a"]
    assert tensor.device == torch.device("cuda", last)
    assert tensor.tolist() == [1, 2, 3]
    with torch.cuda.device(last):
        assert load([TensorSpec("a", DType.U8, (3,))], b"\1\2\3", "cuda")["a"].device.index == last


@needs_cuda
def test_does_not_touch_memory_that_the_caller_s_stream_still_writes() -> None:
    spec = TensorSpec("a", DType.U8, (32 << 20,))
    data = b"\1" * spec.nbytes
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        used = torch.empty(spec.nbytes, dtype=torch.uint8, device="cuda")
        address = used.data_ptr()
        delay()
        used.fill_(2)
        del used  # free for this stream, which still has to write to it
        tensor = load([spec], data, "cuda")["a"]
        assert tensor.data_ptr() == address
        assert tensor.min().item() == tensor.max().item() == 1


@needs_cuda
def test_makes_the_caller_s_stream_wait_for_copies() -> None:
    spec = TensorSpec("a", DType.U8, (64 << 20,))
    data = b"\1" * spec.nbytes
    for current in (torch.cuda.current_stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        with torch.cuda.stream(current):
            stream = TorchDeviceStream("cuda")
            tensor = stream.empty(spec)
            tensor.zero_()
            with torch.cuda.stream(stream._stream):
                delay()
            stream.receive(send(stream, tensor, data))
            assert torch.cuda.current_stream() == current
            total = tensor.sum(dtype=torch.int64)  # not the host, but the stream has waited
        assert total.item() == spec.nbytes


@needs_cuda
def test_frees_all_tensors_when_device_memory_runs_out() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    spec = TensorSpec("small", DType.U8, (1 << 20,))
    with pytest.raises(
        BlobstoreError, match=r"cuda:\d+ has no memory left for tensor 'large' of \d+ bytes"
    ) as caught:
        load([spec, LARGE], bytes(1 << 20), "cuda")
    assert torch.cuda.memory_allocated() == before
    assert caught.value.__traceback__ is not None


# CUDA's rules, without a GPU


def test_the_caller_s_stream_waits_for_copies(cuda: FakeCuda) -> None:
    for current in (cuda.current_stream(), Stream(0)):
        with cuda.on(current):
            stream = TorchDeviceStream("cuda")
            tensor = stream.empty(TensorSpec("a", DType.U8, (3,)))
            sent = send(stream, tensor, b"\1\2\3")
            assert tensor.tolist() == [0, 0, 0]
            stream.receive(sent)
            assert cuda.values(tensor) == [1, 2, 3]


def test_copies_wait_for_what_the_caller_s_stream_had_to_do(cuda: FakeCuda) -> None:
    with cuda.on(Stream(1)) as current, cuda.on(Stream(0)):  # the current device is another one
        stream = TorchDeviceStream("cuda:1")
        tensor = stream.empty(TensorSpec("a", DType.U8, (3,)))
        current.request(lambda: tensor.fill_(9))  # of memory that was used before
        stream.receive(send(stream, tensor, b"\1\2\3", is_waited_for=True))
        assert cuda.values(tensor) == [1, 2, 3]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_loads_on_a_stream_of_another_device(device: str, cuda: FakeCuda) -> None:
    data = bytes(number % 251 for number in range(9000))
    specs = [TensorSpec(str(size), DType.U8, (size,)) for size in (5000, 1, 300, 3699)]
    with cuda.on(Stream(1)) as current:
        found = load(specs, data, device, buffer=64)
        assert b"".join(bytes(cuda.values(tensor)) for tensor in found.values()) == data
        assert {cuda.stream_of(tensor) for tensor in found.values()} == {current}


def test_a_thread_takes_the_place_of_its_caller(cuda: FakeCuda) -> None:
    made: list[torch.Tensor] = []

    def work(stream: CallerStream) -> None:
        stream.enter()
        made.append(tensor := torch.empty(2, device="cuda"))
        cuda.current_stream().request(lambda: tensor.fill_(7))

    with cuda.on(Stream(1)) as current:
        stream = CallerStream.of("cuda")
        assert stream is not None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work, stream).result()
    (tensor,) = made
    assert cuda.stream_of(tensor) is current
    with cuda.on(Stream(1)) as other:
        stream.hand_over(tensor)
        assert cuda.values(tensor) == [7, 7]
    with cuda.on(current):
        stream.hand_over(tensor)  # its own memory
    assert cuda.used_on[tensor.data_ptr()] == {other}


@pytest.mark.parametrize("device", ["cpu", "mps:0", "meta"])
def test_other_devices_have_no_streams(device: str, cuda: FakeCuda) -> None:
    assert CallerStream.of(device) is None
    assert CallerStream.of("1") is not None


def test_there_is_no_stream_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CallerStream.of("cuda:0") is None


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_files_are_prefetched_onto_the_streams_of_their_devices(
    tmp_path: Path, cuda: FakeCuda, backend: str
) -> None:
    files = []
    for number in range(2):
        save_file({str(number): torch.arange(number, 9)}, tmp_path / str(number))
        files.append(safe_open(tmp_path / str(number), "pt", f"cuda:{number}", backend=backend))
    with cuda.on(Stream(0)) as first, cuda.on(Stream(1)) as second:
        own = prefetch(files)
        moved = prefetch(files, device=1)
        found = [own.take("0"), own.take("1"), moved.take("0"), moved.take("1")]
        assert [cuda.stream_of(tensor) for tensor in found] == [first, second, second, second]
    assert [cuda.values(tensor) for tensor in found] == 2 * [list(range(9)), list(range(1, 9))]
