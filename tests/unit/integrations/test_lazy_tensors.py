from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blobstore.errors import BlobDamaged
from blobstore.integrations.lazy_tensors import TensorQueue
from blobstore.safetensors.cuda import CallerStream
from tests.support import fake_cuda
from tests.support.fake_cuda import Stream

NAMES = [f"layer {number}" for number in range(20)]


def value(name: str) -> torch.Tensor:
    return torch.full((2, 3), float(NAMES.index(name)))


def arriving(made: list[str], fail_at: str = "") -> Generator[tuple[str, torch.Tensor], None, None]:
    for name in NAMES:
        if name == fail_at:
            raise BlobDamaged("a blob is damaged")
        made.append(name)
        yield name, value(name)


def unchanged(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return tensors


def lazy(queue: TensorQueue) -> dict[str, torch.Tensor]:
    return queue.lazy({name: torch.empty((2, 3), device="meta") for name in NAMES})


def test_a_tensor_has_no_memory_until_it_is_taken() -> None:
    made: list[str] = []
    tensor = lazy(TensorQueue(arriving(made), unchanged))["layer 2"]
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.float32, "meta")
    assert tensor.is_floating_point()
    assert tensor[...] is tensor
    assert made == []
    taken = tensor[...].to(device="cpu", dtype=torch.float64)
    assert made == NAMES[:3]
    assert type(taken) is torch.Tensor
    assert torch.equal(taken, value("layer 2").double())


def test_tensors_are_taken_in_any_order_by_many_threads() -> None:
    tensors = lazy(TensorQueue(arriving([]), unchanged))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda name: tensors[name][...].to("cpu"), reversed(NAMES)))
    assert all(map(torch.equal, taken, map(value, reversed(NAMES))))


def test_a_part_is_read_from_the_values() -> None:
    tensors = lazy(TensorQueue(arriving([]), unchanged))
    assert torch.equal(tensors["layer 3"][:1], value("layer 3")[:1])


def test_the_parts_of_a_stack_are_taken_one_by_one() -> None:
    stack = torch.arange(6).view(2, 3)
    queue = TensorQueue(
        (item for item in [("stack", stack)]),
        lambda tensors: dict(zip("ab", tensors["stack"].unbind(0), strict=True)),
    )
    parts = queue.lazy({name: torch.empty(3, dtype=torch.int64, device="meta") for name in "ab"})
    assert torch.equal(parts["b"].to(), stack[1])
    assert torch.equal(parts["a"].to(), stack[0])


def test_an_error_reaches_every_thread() -> None:
    tensors = lazy(TensorQueue(arriving([], fail_at="layer 5"), unchanged))
    for name in ("layer 9", "layer 7"):
        with pytest.raises(BlobDamaged, match="a blob is damaged"):
            tensors[name].to()
    assert torch.equal(tensors["layer 1"].to(), value("layer 1"))  # had arrived before


def test_a_tensor_can_be_taken_once() -> None:
    tensor = lazy(TensorQueue(arriving([]), unchanged))["layer 0"]
    tensor.to()
    with pytest.raises(LookupError, match="tensor 'layer 0' was taken already"):
        tensor.to()


def test_closing_frees_what_nobody_took() -> None:
    arrivals = arriving([])
    queue = TensorQueue(arrivals, unchanged)
    tensors = lazy(queue)
    tensors["layer 4"].to()
    queue.close()
    assert next(arrivals, None) is None
    with pytest.raises(RuntimeError, match="its tensors are closed"):
        tensors["layer 1"].to()


def test_threads_take_tensors_on_the_stream_and_device_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = fake_cuda.install(monkeypatch)
    made = ((name, value(name).to("cuda")) for name in NAMES)
    with cuda.on(Stream(1)) as current:
        tensors = lazy(TensorQueue(made, unchanged, CallerStream.of("cuda")))
        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(lambda name: tensors[name].to("cuda"), NAMES))
    assert {cuda.stream_of(tensor) for tensor in taken} == {current}
