from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, BlobMissing, ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.compare import diff as difference
from blobstore.operations.compare.diff import Difference, diff_models
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import (
    Arrays,
    add_blobs,
    blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)
from tests.support.ollama_store import add_gguf_model
from tests.support.options import grouped

LAYER = "model.layers.0.mlp"


def make(
    store: LocalStore,
    name: str,
    tensors: Arrays,
    files: Mapping[str, bytes] | None = None,
    **options: str,
) -> None:
    folder = write_folder(store.root.parent / name, tensors, files=files)
    create(folder, name, store=store, **grouped(options))  # type: ignore[call-overload]


def changes(found: Difference) -> dict[str, tuple[str, ...]]:
    """Return the changes of tensors that both models have."""
    both = [item for item in found.tensors if item.ours and item.theirs]
    return {item.name: item.changes for item in both if not item.is_same}


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "read_into", None)


def test_a_copy_is_equal_and_is_not_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, "a", dense_tensors())
    copy_model("a", "b", store=store)
    forbid_reading(monkeypatch)
    found = diff_models("a", "b", store=store)
    assert found.is_same
    assert {item.name for item in found.tensors} == set(dense_tensors())
    assert all(item.is_shared and item.is_same and not item.changes for item in found.tensors)
    assert [item.name for item in found.files] == ["", "config.json"]
    assert all(item.is_same for item in found.files)


def test_lists_changes(store: LocalStore) -> None:
    tensors = dense_tensors()
    make(store, "a", tensors)
    tensors["mask"] = ~tensors["mask"]
    tensors["scalar"] = tensors["scalar"].astype(np.int32)
    tensors["position_ids"] = tensors["position_ids"].reshape(5, 1)
    tensors["model.layers.0.norm.weight"] = np.zeros((2, 2), np.float16)
    tensors["new"] = tensors.pop("empty")
    make(store, "b", tensors)
    found = diff_models("a", Reference.parse("b"), store=store)

    assert not found.is_same
    assert changes(found) == {
        "mask": ("bytes",),
        "scalar": ("type",),
        "position_ids": ("shape",),
        "model.layers.0.norm.weight": ("type", "shape"),
    }
    by_name = {item.name: item for item in found.tensors}
    assert by_name["empty"].theirs is None
    assert by_name["new"].ours is None
    assert not by_name["new"].is_same
    ours, theirs = by_name["scalar"].ours, by_name["scalar"].theirs
    assert ours
    assert theirs
    assert (ours.type, ours.shape, ours.nbytes, theirs.type, theirs.nbytes) == (
        "U8",
        (),
        1,
        "I32",
        4,
    )
    assert ours.blob in {layer.digest for layer in store.resolve(Reference.parse("a")).layers}
    back = diff_models("b", "a", store=store)
    assert changes(back) == changes(found)


def test_compares_bytes_and_not_values(store: LocalStore) -> None:
    make(store, "a", {"x": np.zeros(3), "y": np.full(3, np.nan)})
    make(store, "b", {"x": -np.zeros(3), "y": np.full(3, np.nan)})
    assert changes(diff_models("a", "b", store=store)) == {"x": ("bytes",)}


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, 1 << 20, (5 << 19) - 1])
def test_finds_one_byte_wherever_it_is(store: LocalStore, place: int) -> None:
    data = np.zeros(5 << 19, np.uint8)
    other = data.copy()
    other[place] = 1
    for name, array in (("a", data), ("b", other)):
        raw = blob(
            ("x", "U8", array.shape, array.tobytes()), ("y", "U8", data.shape, data.tobytes())
        )
        add_blobs(store, name, {"group": raw})
    done = []
    found = diff_models(
        "a", "b", store=store, jobs=1, progress=lambda _, count, total: done.append((count, total))
    )
    assert changes(found) == {"x": ("bytes",)}
    assert not any(item.is_shared for item in found.tensors)
    assert done[-1] == (2 * (5 << 19), 2 * (5 << 19))


def test_blobs_of_several_tensors_are_compared_by_tensor(store: LocalStore) -> None:
    make(store, "a", moe_tensors())
    tensors = moe_tensors()
    name = f"{LAYER}.experts.7.up_proj.weight"
    tensors[name] = tensors[name] + 1
    make(store, "b", tensors)
    found = diff_models("a", "b", store=store)
    assert changes(found) == {name: ("bytes",)}
    assert {item.name for item in found.tensors} == set(tensors)
    same = [item for item in found.tensors if ".experts." in item.name and item.is_same]
    assert len(same) == 35
    assert not any(item.is_shared for item in same)


@pytest.mark.parametrize("forms", [("packed", "stacked"), ("stacked", "packed"), ("stacked",) * 2])
def test_experts_are_equal_in_either_form(store: LocalStore, forms: tuple[str, str]) -> None:
    changed = moe_tensors()
    name = f"{LAYER}.experts.10.down_proj.weight"
    changed[name] = changed[name] + 1
    make(store, "a", moe_tensors(), experts=forms[0])
    make(store, "b", moe_tensors(), experts=forms[1])
    make(store, "c", changed, experts=forms[1])
    assert diff_models("a", "b", store=store).is_same
    found = diff_models("a", "c", store=store)
    assert changes(found) == {name: ("bytes",)}
    assert all(item.is_same for item in found.files)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "nvfp4", "mxfp8"])
def test_quantized_experts_are_equal_in_either_form(store: LocalStore, quantize: str) -> None:
    changed = quantizable_tensors()
    name = f"{LAYER}.experts.11.up_proj.weight"
    changed[name] = (changed[name] * 2).astype(ml_dtypes.bfloat16)
    make(store, "a", quantizable_tensors(), quantize=quantize)
    make(store, "b", quantizable_tensors(), quantize=quantize, experts="stacked")
    make(store, "c", changed, quantize=quantize, experts="stacked")
    assert diff_models("a", "b", store=store).is_same
    assert changes(diff_models("a", "c", store=store)) == {name: ("bytes",)}


def test_a_quantized_tensor_has_another_type(store: LocalStore) -> None:
    tensors: Arrays = {"w.weight": np.ones((64, 64), np.float32)}
    make(store, "a", tensors)
    make(store, "b", tensors, quantize="int4")
    make(store, "c", tensors, quantize="int8")
    found = diff_models("a", "b", store=store)
    assert changes(found) == {"w.weight": ("type",)}
    (item,) = found.tensors
    assert item.ours
    assert item.theirs
    assert item.ours.shape == item.theirs.shape == (64, 64)
    assert (item.theirs.type, item.theirs.group_size) == ("int4", 32)
    assert changes(diff_models("b", "c", store=store)) == {"w.weight": ("type",)}


def test_compares_scales_too(store: LocalStore) -> None:
    def packed(scale: bytes, scale_type: str = "F32") -> dict[str, bytes]:
        size = {"F32": 4, "F16": 2}[scale_type]
        weight = ("x", "U32", (1, 8), bytes(32))
        return {"x": blob(weight, ("x.scale", scale_type, (1, len(scale) // size), scale))}

    add_blobs(store, "a", packed(bytes(4)))
    add_blobs(store, "b", packed(b"\1\0\0\0"))
    add_blobs(store, "c", packed(bytes(8)))
    add_blobs(store, "d", packed(bytes(4), "F16"))
    found = {name: changes(diff_models("a", name, store=store)) for name in "bcd"}
    assert found == {"b": {"x": ("bytes",)}, "c": {"x": ("bytes",)}, "d": {"x": ("type",)}}
    assert changes(diff_models("c", "a", store=store)) == {"x": ("bytes",)}


def test_tensors_without_elements_differ_by_type_and_shape(store: LocalStore) -> None:
    raw = blob(("x", "U8", (0, 3), b""), ("y", "F32", (0,), b""), ("z", "U8", (1,), b"1"))
    add_blobs(store, "a", {"g": raw})
    other = blob(("x", "U8", (3, 0), b""), ("y", "U8", (0,), b""), ("z", "U8", (1,), b"1"))
    add_blobs(store, "b", {"g": other})
    assert changes(diff_models("a", "b", store=store)) == {"x": ("shape",), "y": ("type",)}


def test_files_and_the_config_are_compared(store: LocalStore) -> None:
    tensors: Arrays = {"x": np.zeros(3)}
    make(store, "a", tensors, {"config.json": b"{}", "old.txt": b"old", "same.txt": b"same"})
    make(store, "b", tensors, {"config.json": b"{ }", "new.txt": b"new", "same.txt": b"same"})
    found = diff_models("a", "b", store=store)
    files = {item.name: item for item in found.files}

    assert all(item.is_same for item in found.tensors)
    assert not found.is_same
    assert list(files) == ["", "config.json", "old.txt", "same.txt", "new.txt"]
    assert [item.is_same for item in found.files] == [True, False, False, True, False]
    assert files["old.txt"].theirs is None
    assert files["new.txt"].ours is None
    assert files["new.txt"].media_type == media_types.FILE
    ours, theirs = files["config.json"].ours, files["config.json"].theirs
    assert ours
    assert theirs
    assert ours.digest != theirs.digest


def test_layers_without_names_are_matched_in_their_order(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "a")
    layers = [layer for layer in manifest.layers if layer.media_type != media_types.LICENSE]
    second = [layer for layer in manifest.layers if layer.media_type == media_types.LICENSE][1]
    store.names.publish(replace_any("b"), replace(manifest, layers=(*layers, second)))
    found = diff_models("a", "b", store=store)
    assert len(found.tensors) == 3
    assert all(item.is_same and item.is_shared for item in found.tensors)
    licenses = [item for item in found.files if item.media_type == media_types.LICENSE]
    assert [(item.ours is None, item.theirs is None) for item in licenses] == [
        (False, False),
        (False, True),
    ]
    others = [item for item in found.files if item.media_type != media_types.LICENSE]
    assert all(item.is_same for item in others)
    assert len(others) == 3


def test_the_config_of_the_store_counts(store: LocalStore) -> None:
    make(store, "a", {"x": np.zeros(3)})
    manifest = store.resolve(Reference.parse("a"))
    config = manifest.layers_of(media_types.JSON)[0]._replace(
        media_type=media_types.CONFIG, name=""
    )
    store.names.publish(replace_any("b"), replace(manifest, config=config))
    (item,) = [item for item in diff_models("a", "b", store=store).files if not item.is_same]
    assert item.media_type == media_types.CONFIG


def test_a_damaged_model_is_an_error(store: LocalStore) -> None:
    def path(digest: Digest) -> Path:
        return store.folder("blobs") / digest.file_name

    make(store, "a", {"x": np.zeros(3)})
    make(store, "b", {"x": np.ones(3)})
    digest = store.resolve(Reference.parse("b")).layers[0].digest
    content = path(digest).read_bytes()
    path(digest).unlink()
    path(digest).write_bytes(content[:-1])
    with pytest.raises(BlobDamaged, match="model b:latest"):
        diff_models("a", "b", store=store)
    path(digest).unlink()
    with pytest.raises(BlobMissing):
        diff_models("b", "a", store=store)
    with pytest.raises(ModelNotFound):
        diff_models("a", "none", store=store)


def test_an_error_in_one_thread_stops_the_others(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", 0), ("b", 1)):
        array = np.full(4, value, np.uint8).tobytes()
        tensors = [(f"x{number}", "U8", (4,), array) for number in range(20)]
        add_blobs(store, name, {"g": blob(*tensors)})
    pools: list[WorkerPool] = []

    def fail(*_: object) -> None:
        raise BlobDamaged("ended while it was read")

    def new_pool(*arguments: Any) -> WorkerPool:
        pools.append(WorkerPool(*arguments))
        return pools[0]

    monkeypatch.setattr(difference, "WorkerPool", new_pool)
    monkeypatch.setattr(LocalStore, "read_into", fail)
    with pytest.raises(BlobDamaged, match="ended while it was read"):
        diff_models("a", "b", store=store, jobs=1)
    assert pools[0].stopping.is_set()
