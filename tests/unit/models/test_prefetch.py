"""Tensors of a stored model, loaded in the background: here, cold, or in object storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobMissing, TensorNotFound, UsageError
from blobstore.models.prefetch import Following
from blobstore.objects.store import ObjectStore, blob_key
from blobstore.operations.open import Model
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.support import fake_cuda
from tests.support.damage import blob_path
from tests.support.fake_cuda import Stream
from tests.support.models import write_folder

WEIGHTS: dict[str, Any] = {
    f"model.layers.{number}.mlp.up_proj.weight": np.random.default_rng(number).standard_normal(
        (128, 256), np.float32
    )
    for number in range(6)
}
PARTS: tuple[Any, ...] = (None, slice(3, 9), (slice(None), slice(64, 128)), 5, (..., 7))
PLAN: dict[str, Any] = dict(zip(WEIGHTS, PARTS, strict=False))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    found = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "source", WEIGHTS), "m", store=found)
    return found


def frozen(store: LocalStore) -> None:
    blobstore.freeze("m", store=store)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("read", ["mmap", "pread"])
@pytest.mark.parametrize("prepare", [None, frozen])
def test_all_tensors_or_parts_are_loaded(
    store: LocalStore, framework: Any, read: Any, prepare: Callable[[LocalStore], None] | None
) -> None:
    if prepare is not None:
        prepare(store)
    with blobstore.open("m", store=store, framework=framework, read=read) as model:
        check(model)


def check(model: Model[Any]) -> None:
    found = {name: np.asarray(array) for name, array in model.prefetch(threads=3)}
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in WEIGHTS.items()
    }
    with model.prefetch(PLAN, bytes_in_flight=1) as loader:
        for name, part in PLAN.items():
            expected = WEIGHTS[name] if part is None else WEIGHTS[name][part]
            assert np.array_equal(np.asarray(loader.take(name)), expected)


@pytest.mark.parametrize("cache", ["keep", "none"])
def test_a_model_in_object_storage_is_loaded(
    store: LocalStore, objects: ObjectStore, tmp_path: Path, cache: Any
) -> None:
    blobstore.push("m", str(objects.address), store=store)
    with blobstore.open(f"{objects.address}/m", store=tmp_path / "other", cache=cache) as model:
        check(model)


def test_quantized_weights_are_dequantized(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(tmp_path / "source", "q", store=store, quantize=QuantizeOptions("int4"))
    with blobstore.open("q", store=store, framework="torch", dequantize=True) as model:
        name = next(iter(WEIGHTS))
        found = dict(model.prefetch({name: (slice(3, 9), slice(64))}))
        assert torch.equal(found[name], model[name][3:9, :64])
        assert torch.equal(dict(model.prefetch())[name], model[name])


@pytest.mark.parametrize(
    ("plan", "error"),
    [({"absent": None}, TensorNotFound), ({next(iter(WEIGHTS)): 999}, UsageError)],
)
def test_plans_that_cannot_be_met_are_refused(
    store: LocalStore, plan: Any, error: type[Exception]
) -> None:
    with blobstore.open("m", store=store) as model, pytest.raises(error):
        model.prefetch(plan)


def test_a_missing_blob_is_reported_where_the_tensor_is_taken(
    store: LocalStore, objects: ObjectStore, tmp_path: Path
) -> None:
    blobstore.push("m", str(objects.address), store=store)
    name, other = list(WEIGHTS)[:2]
    with blobstore.open(f"{objects.address}/m", store=tmp_path / "other") as model:
        objects.client.delete(
            [blob_key(Digest.parse(blob_path(store, name).name.replace("-", ":")))]
        )
        with model.prefetch({name: None, other: slice(2)}) as loader, pytest.raises(BlobMissing):
            loader.take(name)


def read_ahead(sizes: list[int], *slots: int) -> list[list[int]]:
    following = Following([size << 20 for size in sizes])
    return [list(following.after(slot)) for slot in slots]


def test_ever_more_is_read_ahead_of_a_program_that_reads_in_order() -> None:
    found = read_ahead([8] * 99, *range(7, 99))
    assert [number for slots in found for number in slots] == list(range(10, 99))
    assert [len(slots) for slots in found if slots] == [2, 4, 8, 16, 32, 27]
    assert [7 + step for step, slots in enumerate(found) if slots] == [9, 10, 12, 16, 24, 40]


@pytest.mark.parametrize("slots", [(5,), (4, 5), (0, 2, 4, 6), (5, 4, 3, 2), (3, 3, 3, 3)])
def test_nothing_is_read_ahead_of_others(slots: tuple[int, ...]) -> None:
    assert not any(read_ahead([1] * 9, *slots))


def test_reading_ahead_begins_again_elsewhere() -> None:
    assert read_ahead([16] * 99, 1, 2, 3, 50, 51, 52, 1, 2, 3) == [
        *([], [], [4]),
        *([], [], [53]),
        *([], [], [4]),
    ]


def test_tensors_are_made_on_the_stream_and_device_of_the_caller(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake_cuda.install(monkeypatch)
    with (
        cuda.on(Stream(1)) as current,
        blobstore.open("m", store=store, framework="torch", device="cuda") as model,
    ):
        loader = model.prefetch()
        with cuda.on(Stream(1)) as other:
            found = dict(loader)
            assert {name: cuda.values(tensor) for name, tensor in found.items()} == {
                name: array.tolist() for name, array in WEIGHTS.items()
            }
    assert {cuda.stream_of(tensor) for tensor in found.values()} == {current}
    assert all(cuda.used_on[tensor.data_ptr()] == {other} for tensor in found.values())
