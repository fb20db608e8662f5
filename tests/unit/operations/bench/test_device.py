from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.errors import BlobstoreError, UsageError
from blobstore.models.frameworks import ArrayTarget
from blobstore.operations.bench import bench, device
from blobstore.operations.bench.bench import measure_reading
from blobstore.operations.bench.measurements import Measurement
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.safetensors import copies
from blobstore.store.local import LocalStore
from tests.gpu.lane import processor_as_gpu
from tests.support.gguf_files import gguf_file
from tests.support.models import dense_tensors, write_folder

COUNT, SIZE = 40, 64 << 10
LOADS = [
    'open(device="{}")',
    'open(device="{}", read="populate")',
    'open(device="{}", read="pread")',
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a store with a model of 40 tensors, each of 64 KiB."""
    store = LocalStore(tmp_path / "store")
    random = np.random.default_rng(0)
    tensors = {f"t{i:02}": random.integers(0, 256, SIZE, np.uint8) for i in range(COUNT)}
    create(write_folder(tmp_path / "m", tensors), "m", store=store)
    return store


@pytest.fixture
def gpu() -> Iterator[str]:
    with processor_as_gpu() as name:
        yield name


def on_device(found: Any) -> list[Measurement]:
    return [one for one in found.measurements if one.device is not None]


def loads(name: str) -> list[str]:
    return [way.format(name) for way in LOADS]


def test_a_model_is_copied_and_loaded_to_memory_of_the_process(store: LocalStore) -> None:
    reports: list[tuple[int, int]] = []
    found = measure_reading(
        "m", store=store, device="cpu", progress=lambda _, *done: reports.append(done)
    )

    assert [(one.place, one.how) for one in on_device(found)] == [
        ("host memory", "pageable, one by one"),
        ("host memory", "large pages, 8 threads"),
        *(("disk", how) for how in loads("cpu")),
        *(("page cache", how) for how in loads("cpu")),
    ]
    assert len(found.measurements) == 18
    assert {one.size for one in on_device(found)} == {COUNT * SIZE}
    assert all(0 < one.rate < 1e12 for one in found.measurements)
    assert any(line.startswith("page cache to cpu: open(") for line in found.advice)
    assert found.notices == ()
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1]


def test_a_device_with_buffers_is_also_reached_by_bare_copies_through_them(
    store: LocalStore, gpu: str
) -> None:
    found = measure_reading("m", store=store, device=gpu)

    assert [(one.place, one.how) for one in on_device(found)] == [
        ("host memory", "pageable, one by one"),
        ("host memory", "in the buffers of open"),
        *(("disk", how) for how in loads(gpu)),
        *(("page cache", how) for how in loads(gpu)),
    ]
    assert {one.size for one in on_device(found)} == {COUNT * SIZE}
    # The processor has no pinned memory.
    assert found.notices == (
        f"this system refuses pinned memory, from which copies to {gpu} are faster",
    )


def test_a_file_and_a_frozen_model_are_loaded(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_file([], [("a", 0, [4], bytes(16))]))
    zeros = {"a": np.zeros(100_000, np.float32), **dense_tensors()}
    create(write_folder(tmp_path / "zeros", zeros), "zeros", store=store)
    freeze_models(["zeros"], store=store)

    file = measure_reading(tmp_path / "m.gguf", device="cpu")
    frozen = measure_reading("zeros", store=store, device="cpu")

    assert {one.size for one in on_device(file)} == {16}
    nbytes = sum(array.nbytes for array in zeros.values())
    assert {one.size for one in on_device(frozen)} == {nbytes}
    assert len(frozen.measurements) == 18


# Memory


def test_a_part_of_a_model_that_does_not_fit_is_loaded(
    store: LocalStore, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "free_memory", lambda _: 20 * SIZE)
    found = measure_reading("m", store=store, device=gpu)

    assert {one.size for one in on_device(found)} == {10 * SIZE}
    # What reads the model ahead would read all of it.
    assert [one.how for one in on_device(found)][2:4] == [loads(gpu)[0], loads(gpu)[2]]
    assert f"{gpu} has 1 MB of free memory, so about 1 of 3 MB were loaded" == found.notices[0]


def test_memory_of_the_process_is_bounded_too(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bench, device):
        monkeypatch.setattr(module, "available_memory", lambda: 20 * SIZE)
    found = measure_reading("m", store=store, device="cpu")

    assert [one.how for one in on_device(found)][2:] == [loads("cpu")[0]] * 2
    assert {one.size for one in on_device(found)} == {10 * SIZE}
    assert 'open(read="pread")' not in [one.how for one in found.measurements]
    assert found.notices[0] == (
        'too little memory is left for the model, so open was not measured with read="pread"'
    )


def test_a_frozen_model_that_does_not_fit_is_not_opened(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"z{i}": np.full(100_000, i, np.float32) for i in range(5)}
    create(write_folder(tmp_path / "zeros", tensors), "zeros", store=store)
    freeze_models(["zeros"], store=store)
    for module in (bench, device):
        monkeypatch.setattr(module, "available_memory", lambda: 1_000_000)

    found = measure_reading("zeros", store=store, device="cpu")

    assert {one.reader for one in found.measurements} == {"bare"}
    assert "too little memory is left for the model, so open was not measured" in found.notices


@pytest.mark.parametrize("free", [SIZE, 0])
def test_a_tensor_that_does_not_fit_is_an_error_of_a_device_that_was_named(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, gpu: str, free: int
) -> None:
    text = f"{gpu} has 0 MB of free memory, too little for a tensor of 0 MB"
    monkeypatch.setattr(copies, "free_memory", lambda _: free)
    with pytest.raises(BlobstoreError, match=text):
        measure_reading("m", store=store, device=gpu)


def test_a_device_that_was_not_named_may_fail(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    target = device.target_of(gpu)
    monkeypatch.setattr(bench, "target_of", lambda _: target)
    monkeypatch.setattr(copies, "free_memory", lambda _: 0)
    found = measure_reading("m", store=store, device="auto")

    assert on_device(found) == []
    assert len(found.measurements) == 10
    assert found.notices[0].startswith(f"{gpu} was not measured: {gpu} has 0 MB of free memory")


def test_an_exhausted_device_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    empty: Any = torch.empty

    def refuse(*sizes: Any, **options: Any) -> Any:
        if options.get("device") == torch.device("cpu") and sizes != (COUNT * SIZE,):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(BlobstoreError, match="cpu has no memory left for tensor"):
        measure_reading("m", store=store, device="cpu")


# Names


@pytest.mark.parametrize("name", ["", "gpu", "mps", "meta", "cpu:1", "\x1b[31m", "none "])
def test_other_devices_are_refused(store: LocalStore, name: str) -> None:
    with pytest.raises(UsageError, match=r"device must be auto, none, cpu, cuda or cuda:N, got '"):
        measure_reading("m", store=store, device=name)


@pytest.mark.parametrize("name", ["cuda:999", "cuda:x", "cuda:-1"])
def test_a_device_that_torch_lacks_is_refused(store: LocalStore, name: str) -> None:
    with pytest.raises(UsageError, match=f"torch has no device '{name}' here"):
        measure_reading("m", store=store, device=name)


def test_a_device_needs_a_model_that_can_be_loaded_from_here(
    store: LocalStore, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is no model of a store and no GGUF file") as caught:
        measure_reading(tmp_path / "m", device="cpu")
    assert "blobstore create" in str(caught.value)
    with pytest.raises(UsageError, match="is not on this machine") as caught:
        measure_reading("s3://bucket/store/m", device="cpu")
    assert "'blobstore pull s3://bucket/store/m' fetches it" in str(caught.value)


def test_the_first_cuda_device_is_chosen_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(copies, "has_cuda", lambda: True)
    monkeypatch.setattr(ArrayTarget, "of", lambda _, name: chosen.append(name))
    with pytest.raises(UsageError):
        device.target_of("auto")
    assert chosen == ["cuda:0"]
    monkeypatch.setattr(copies, "has_cuda", lambda: False)
    assert device.target_of("auto") is None
    assert device.target_of("none") is None
