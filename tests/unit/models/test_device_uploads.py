"""Models on their way to a device, which here is the processor by the same way."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

import blobstore
from blobstore import frameworks, opened
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, UnsupportedDType
from blobstore.freezing import freeze_models
from blobstore.manifests.reference import Reference
from blobstore.models.device import uploaded
from blobstore.safetensors.cuda import TorchLane
from blobstore.store.local import LocalStore
from tests.frozen import forms_of, layer, weights
from tests.models import (
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)

if TYPE_CHECKING:
    from collections.abc import Generator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

TENSORS = dense_tensors() | moe_tensors()
PACKED = quantizable_tensors()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a device that is reached by a lane, if need be the processor."""
    if request.param == "cpu":
        for module in (frameworks, opened):
            monkeypatch.setattr(module, "has_lane", lambda framework, _: framework == "torch")
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store)
    return store


@pytest.fixture
def packed(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "packed")
    source = write_folder(tmp_path / "plain", PACKED)
    for name in ("int4", "nvfp4", "mxfp8"):
        blobstore.create(source, name, store=store, quantize=name)
    return store


def open_on(device: str, store: LocalStore, name: str = "m", **how: Any) -> blobstore.Model:
    return blobstore.open(name, store=store, framework="torch", device=device, **how)


def path_of(store: LocalStore, layer: str) -> Path:
    layers = store.resolve(Reference.parse("m")).layers
    (found,) = [item for item in layers if item.name == layer]
    return Path(store.layout.blob(found.digest))


def of_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def check(found: dict[str, torch.Tensor], device: str) -> None:
    assert set(found) == set(TENSORS)
    for name, tensor in found.items():
        assert tensor.device.type == device
        assert torch.equal(tensor.cpu(), of_numpy(TENSORS[name]))


@pytest.mark.parametrize("verify", ["none", "size", "digest"])
@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_all_tensors_arrive(device: str, store: LocalStore, read: str, verify: str) -> None:
    with open_on(device, store, read=read, verify=verify) as model:
        check(model.state_dict(), device)
        assert list(model.state_dict()) == list(model)


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_frozen_tensors_are_decoded_on_their_way(device: str, tmp_path: Path, read: str) -> None:
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


def test_tensors_are_memory_of_their_own(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        model.state_dict()["scalar"] += 1
        assert model.state_dict()["scalar"].item() == 7


@pytest.mark.parametrize("order", ["file", "name"])
def test_they_come_one_at_a_time_in_the_order_that_is_asked_for(
    device: str, store: LocalStore, order: Any
) -> None:
    with (
        open_on(device, store) as model,
        blobstore.open("m", store=store) as plain,
    ):
        names = [name for name, _ in plain.iter_tensors(order=order)]
        assert [name for name, _ in model.iter_tensors(order=order)] == names
        check(dict(model.iter_tensors(order=order)), device)
        ranks = [dict(model.iter_tensors(order=order, shard=(rank, 2))) for rank in (0, 1)]
        assert all(ranks)
        check(ranks[0] | ranks[1], device)


def test_whoever_has_enough_may_stop(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        found = cast("Generator[tuple[str, torch.Tensor], None, None]", model.iter_tensors())
        with contextlib.closing(found):
            name, tensor = next(found)
        assert torch.equal(tensor.cpu(), of_numpy(TENSORS[name]))


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "mxfp8"])
def test_packed_weights_arrive_as_they_are(device: str, packed: LocalStore, kind: str) -> None:
    with (
        open_on(device, packed, kind) as model,
        blobstore.open(kind, store=packed) as plain,
    ):
        found = model.state_dict()
        assert list(found) == list(plain)
        assert any(name.endswith("_scale") for name in found)
        for name, tensor in found.items():
            data = bytes(plain.view(name).data)
            assert bytes(tensor.cpu().view(-1).view(torch.uint8).numpy().data) == data


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "mxfp8"])
def test_packed_weights_are_made_plain_on_the_device(
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


def test_tells_of_the_bytes(device: str, store: LocalStore) -> None:
    steps: list[tuple[str, int, int]] = []
    total = sum(array.nbytes for array in TENSORS.values())
    with open_on(device, store, progress=lambda *step: steps.append(step)) as model:
        model.state_dict()
    assert steps[-1] == ("loading", total, total)


# What becomes of the store


@pytest.mark.parametrize("verify", ["size", "none"])
def test_a_blob_that_is_gone_is_had_from_its_map(
    device: str, store: LocalStore, verify: str
) -> None:
    path = path_of(store, "model.layers.0.norm.weight")
    with open_on(device, store, verify=verify) as model:
        if verify == "none":
            model.view("model.layers.0.norm.weight")
        path.unlink()
        check(model.state_dict(), device)


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_blob_that_is_gone_is_told_with_its_layer(
    device: str, store: LocalStore, read: str
) -> None:
    with open_on(device, store, read=read, verify="none") as model:
        path_of(store, "position_ids").unlink()
        with pytest.raises(BlobMissing, match="layer 'position_ids': blob '.*' is missing"):
            model.state_dict()


@pytest.mark.parametrize("how", ["tensors", "iter_tensors"])
def test_a_blob_that_was_cut_short_is_an_error(device: str, store: LocalStore, how: str) -> None:
    path = path_of(store, "position_ids")
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
        assert not any(model._residence.holds(slot) for slot in range(len(model._blobs)))
        check(model.state_dict(), device)
        assert not any(model._residence.holds(slot) for slot in range(len(model._blobs)))


def test_sizes_are_checked_when_nothing_is_mapped(device: str, store: LocalStore) -> None:
    path_of(store, "position_ids").unlink()
    with pytest.raises(BlobMissing, match="layer 'position_ids'"):
        open_on(device, store, read="pread")


def test_a_closed_model_gives_no_more(device: str, store: LocalStore) -> None:
    model = open_on(device, store)
    names = model.iter_tensors()
    model.close()
    for load in (model.state_dict, lambda: next(names)):
        with pytest.raises(BlobstoreError, match=r"model .*m.* is closed"):
            load()


def test_a_type_that_torch_has_not_is_told(device: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"s": blob(("s", "F6_E2M3", (4,), bytes(3)))})
    with open_on(device, store) as model, pytest.raises(UnsupportedDType, match="tensor 's'"):
        model.state_dict()


class FailingLane(TorchLane):
    """A device that fails when all seems to be done."""

    drained = 0

    def drain(self) -> None:
        self.drained += 1
        message = "device is lost"
        raise BlobstoreError(message)


def test_a_device_that_fails_in_the_end_is_told(device: str, store: LocalStore) -> None:
    with open_on(device, store) as model:
        found = model._uploaded(list(model), FailingLane(device))
        with pytest.raises(BlobstoreError, match="device is lost"):
            dict(found)


def test_nothing_is_under_way_after_an_error_of_the_arithmetic(
    device: str, packed: LocalStore
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        message = "cannot be computed"
        raise UnsupportedDType(message)

    with open_on(device, packed, "int4", dequantize=True) as model:
        lane = FailingLane(device)
        read = model._read_into
        found = uploaded(list(model), model._places, model._packed, lane, read, dequantize=fail)
        with pytest.raises(UnsupportedDType, match="cannot be computed") as caught:
            dict(found)
        assert lane.drained == 1
        assert caught.value.__traceback__ is not None


def test_the_lane_is_what_the_tests_run(device: str) -> None:
    assert isinstance(frameworks.lane_to("torch", device), TorchLane)
