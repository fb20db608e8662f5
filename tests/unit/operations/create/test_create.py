from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import safetensors

import blobstore
from blobstore.errors import (
    DamagedSource,
    InvalidReference,
    NameConflict,
    NameTaken,
    SourceNotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.reference import Reference
from blobstore.models.published import published_scheme
from blobstore.models.source_layers import read_source_record
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.sources.versions import SourceVersions
from blobstore.store import verified_cache
from blobstore.store.local import LocalStore
from blobstore.store.names import ABSENT, Names, NameUpdate, replace_any
from tests.support.damage import blob_path, flip, flip_header, truncate
from tests.support.descriptors import ANYWHERE, open_files
from tests.support.folders import contents
from tests.support.models import Arrays, blob, dense_tensors, moe_tensors, write_folder
from tests.support.options import grouped
from tests.support.published import LAYER, SCHEMES, write_published
from tests.unit.operations.export.folders import raw_tensors

NAME = Reference.parse("m")
TENSORS = dense_tensors() | moe_tensors()
EXPERTS = "model.layers.0.mlp"
FILES = {"tokenizer.model": b"\0\xff", "LICENSE": b"MIT", "generation_config.json": b"not json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", TENSORS, files=FILES)


def is_clean(store: LocalStore) -> bool:
    """Return whether the store has neither names nor temporary files."""
    return not list(store.references()) and not list(store.folder("temporary").glob("*"))


def blob_times(store: LocalStore) -> dict[str, tuple[int, int]]:
    found = {path.name: path.stat() for path in store.folder("blobs").iterdir()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def test_every_blob_is_a_safetensors_file_with_tensors_of_the_source(
    folder: Path, store: LocalStore
) -> None:
    created = blobstore.create(folder, "m", store=store)
    found: dict[str, bytes] = {}
    for layer in store.resolve(NAME).layers_of(media_types.TENSOR):
        data = Path(store.blob_path(layer.digest)).read_bytes()
        found |= {name: bytes(value["data"]) for name, value in safetensors.deserialize(data)}
    assert found == {name: array.tobytes() for name, array in TENSORS.items()}
    assert created.tensors == len(TENSORS)
    assert created.reference == NAME


def test_layers_are_tensors_then_groups_then_files_then_the_record_of_the_source(
    folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store)
    grouped = (f"{EXPERTS}.experts.", f"{EXPERTS}.shared_experts.")
    plain = sorted(name for name in TENSORS if not name.startswith(grouped))
    assert [(item.media_type, item.name) for item in store.resolve(NAME).layers] == [
        *((media_types.TENSOR, name) for name in plain),
        (media_types.TENSOR, f"{EXPERTS}.experts"),
        (media_types.TENSOR, f"{EXPERTS}.shared_experts"),
        (media_types.FILE, "LICENSE"),
        (media_types.JSON, "config.json"),
        (media_types.JSON, "generation_config.json"),
        (media_types.FILE, "tokenizer.model"),
        (media_types.SOURCE, ""),
    ]


def test_keeps_files_unchanged(folder: Path, store: LocalStore) -> None:
    blobstore.create(folder, "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert {name: model.read_file(name) for name in FILES} == FILES


@pytest.mark.parametrize(
    ("config", "capabilities"),
    [
        (b"{}", ["completion"]),
        (b'{"vision_config":{}}', ["completion", "vision"]),
        (b'{"has_vision":true,"audio_config":{}}', ["completion", "vision", "audio"]),
        (b'{"has_vision":false,"sound_config":null}', ["completion", "audio"]),
        (b'{"vision_config": {}, "audio_config": {}}', ["completion", "vision", "audio"]),
        (b'{"has_vision": true, "sound_config": {}}', ["completion", "vision", "audio"]),
        (b'{"has_vision": false}', ["completion"]),
    ],
)
def test_the_config_blob_lists_the_capabilities_of_the_model(
    tmp_path: Path, store: LocalStore, config: bytes, capabilities: list[str]
) -> None:
    model = write_folder(tmp_path / "model", {"a": np.zeros(1)}, files={"config.json": config})
    blobstore.create(model, "m", store=store)
    manifest = store.resolve(NAME)
    data = store.read_blob(manifest.config.digest, manifest.config.size)
    assert data == (
        b'{"model_format":"safetensors","model_family":"","model_families":null,"model_type":"",'
        b'"file_type":"","requires":"0.19.0","capabilities":'
        + json.dumps(capabilities, separators=(",", ":")).encode()
        + b',"architecture":"","os":"","layers_digest":"'
        + str(layers_digest(manifest.layers)).encode()
        + b'"}'
    )


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_shards_order_and_threads_do_not_change_the_result(
    tmp_path: Path, experts: ExpertForm
) -> None:
    backwards = dict(reversed(TENSORS.items()))
    manifests = set()
    for number, (tensors, shards, jobs) in enumerate(
        [(TENSORS, 1, None), (TENSORS, 3, 1), (backwards, 2, 16), (backwards, 7, 2)]
    ):
        model = write_folder(tmp_path / f"model-{number}", tensors, shards=shards)
        store = LocalStore(tmp_path / f"store-{number}")
        blobstore.create(model, "m", store=store, jobs=jobs, experts=experts)
        *layers, source_layer = store.resolve(NAME).layers
        assert source_layer.media_type == media_types.SOURCE  # which records the files
        manifests.add(tuple(map(str, layers)))
    assert len(manifests) == 1


def test_a_second_import_writes_nothing(folder: Path, store: LocalStore) -> None:
    first = blobstore.create(folder, "m", store=store)
    times, manifest = blob_times(store), store.read_manifest(NAME)
    second = blobstore.create(folder, "m", store=store)
    assert blob_times(store) == times
    assert store.read_manifest(NAME) == manifest
    assert first.bytes_written == second.bytes_present > 0
    assert first.bytes_present == second.bytes_written == 0
    assert first.blobs == second.blobs == len(store.resolve(NAME).blobs)


def test_a_second_name_shares_the_blobs(folder: Path, store: LocalStore) -> None:
    blobstore.create(folder, "m", store=store)
    times = blob_times(store)
    blobstore.create(folder, "n/other:x", store=store)
    assert blob_times(store) == times
    assert list(map(str, store.references())) == ["m:latest", "n/other:x"]


def test_equal_tensors_with_different_names_have_different_blobs(
    tmp_path: Path, store: LocalStore
) -> None:
    same = np.arange(4.0)
    blobstore.create(write_folder(tmp_path / "m", {"a": same, "b": same}), "m", store=store)
    tensors = store.resolve(NAME).layers_of(media_types.TENSOR)
    assert len({layer.digest for layer in tensors}) == 2


def test_imports_a_model_without_tensors(tmp_path: Path, store: LocalStore) -> None:
    assert blobstore.create(write_folder(tmp_path / "m", {}), "m", store=store).tensors == 0
    with blobstore.open("m", store=store) as model:
        assert model.state_dict() == {}


def test_stacked_experts_are_the_bytes_of_the_source_in_order(
    folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store, experts="stacked")
    (stacks,) = store.resolve(NAME).layers_of(media_types.STACKS)
    listed = json.loads(store.read_blob(stacks.digest, stacks.size))
    prefix = f"{EXPERTS}.experts"
    assert set(listed) == {f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert listed[f"{prefix}.up_proj.weight"] == [
        f"{prefix}.{number}.up_proj.weight" for number in range(12)
    ]
    with blobstore.open("m", store=store) as model:
        for name, sources in listed.items():
            joined = b"".join(TENSORS[source].tobytes() for source in sources)
            assert bytes(model.view(name).data) == joined


def test_rejects_stacking_unequal_experts(tmp_path: Path, store: LocalStore) -> None:
    tensors = moe_tensors(3)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = np.zeros((5, 4), np.float32)
    model = write_folder(tmp_path / "model", tensors)
    with pytest.raises(UnsupportedSource, match="differ in dtype or shape and cannot be stacked"):
        blobstore.create(model, "m", store=store, experts="stacked")
    assert not store.root.exists()
    blobstore.create(model, "m", store=store)


def test_a_dry_run_returns_the_plan_and_writes_nothing(folder: Path, store: LocalStore) -> None:
    planned = blobstore.create(folder, "m", store=store, dry_run=True)
    assert not store.root.exists()
    blobstore.create(folder, "m", store=store)
    tensors = store.resolve(NAME).layers_of(media_types.TENSOR)
    assert [(blob.name, blob.size) for blob in planned.blobs] == [
        (layer.name, layer.size) for layer in tensors
    ]
    assert planned.size == sum(layer.size for layer in tensors)
    assert (
        planned.tensors
        == len([*planned.decisions()])
        == len(blobstore.show("m", store=store).tensors)
    )
    assert set(planned.files) == {"config.json", *FILES}


def test_progress_ends_with_all_bytes(folder: Path, store: LocalStore) -> None:
    calls: list[tuple[str, int, int]] = []
    blobstore.create(folder, "m", store=store, progress=lambda *call: calls.append(call))
    sizes = [layer.size for layer in store.resolve(NAME).layers_of(media_types.TENSOR)]
    done = [count for _, count, _ in calls]
    assert done == sorted(done)
    assert done[-1] == sum(sizes)
    assert {total for *_, total in calls} == {sum(sizes)}
    assert {what for what, *_ in calls} >= {"scalar", "model.layers.0.mlp.experts"}


def test_passes_on_the_notices_of_the_source(folder: Path, store: LocalStore) -> None:
    (folder / "pytorch_model.bin").touch()
    (notice,) = blobstore.create(folder, "m", store=store).notices
    assert "pytorch_model.bin" in notice


# Errors leave nothing


@pytest.mark.parametrize("cut", ["data", "header"])
def test_a_truncated_source_writes_nothing(tmp_path: Path, store: LocalStore, cut: str) -> None:
    model = write_folder(tmp_path / "model", TENSORS, shards=3)
    shard = model / "model-00003-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1 if cut == "data" else 50)
    with pytest.raises(DamagedSource):
        blobstore.create(model, "m", store=store)
    assert not store.root.exists()


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_source_that_shrinks_while_it_is_read_is_an_error(
    tmp_path: Path, store: LocalStore, jobs: int
) -> None:
    tensors = {f"t{number}": np.ones(2**18) for number in range(6)}
    model = write_folder(tmp_path / "model", tensors)

    def shrink(what: str, done: int, total: int) -> None:
        os.truncate(model / "model.safetensors", 2**20)

    with pytest.raises(DamagedSource, match="ended at byte .*the file was truncated while it was"):
        blobstore.create(model, "m", store=store, jobs=jobs, progress=shrink)
    assert is_clean(store)


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_in_the_middle_leaves_neither_name_nor_files(
    folder: Path, store: LocalStore, jobs: int, error: type[BaseException]
) -> None:
    def fail(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises((error, blobstore.BlobstoreError)):
        blobstore.create(folder, "m", store=store, jobs=jobs, progress=fail)
    assert is_clean(store)
    assert list(store.folder("blobs").iterdir()) == []
    blobstore.create(folder, "m", store=store)


def test_a_failed_replacement_keeps_the_old_model(
    folder: Path, tmp_path: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store)
    manifest = store.read_manifest(NAME)
    broken = write_folder(tmp_path / "broken", dense_tensors())
    os.truncate(broken / "model.safetensors", 100)
    with pytest.raises(DamagedSource):
        blobstore.create(broken, "m", store=store)
    assert store.read_manifest(NAME) == manifest


def quarantined(store: LocalStore) -> list[bytes]:
    folder = store.folder("quarantine")
    return [path.read_bytes() for path in folder.iterdir()] if folder.exists() else []


def test_an_unreadable_small_file_is_an_error(folder: Path, store: LocalStore) -> None:
    source = folder / "tokenizer.model"

    def remove(what: str, done: int, total: int) -> None:
        source.unlink(missing_ok=True)

    with pytest.raises(DamagedSource, match="cannot read '.*tokenizer.model': No such file"):
        blobstore.create(folder, "m", store=store, progress=remove)
    assert is_clean(store)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"jobs": 0}, UsageError),
        ({"jobs": -1}, UsageError),
        ({"experts": "x"}, UsageError),
        ({"reference": "../m"}, InvalidReference),
        ({"reference": "x" * 81}, InvalidReference),
        ({"source": "/none"}, SourceNotFound),
    ],
)
def test_invalid_arguments_leave_the_store_untouched(
    folder: Path, store: LocalStore, options: dict[str, Any], error: type[Exception]
) -> None:
    arguments: dict[str, Any] = {"source": folder, "reference": "m", "store": store} | options
    with pytest.raises(error):
        blobstore.create(**grouped(arguments))
    assert not store.root.exists()


def test_rejects_a_name_that_differs_only_in_case_before_opening_the_source(
    folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store)
    with pytest.raises(NameConflict):
        blobstore.create("/none", "M", store=store)
    update = NameUpdate(Reference.parse("M"), ABSENT)
    with pytest.raises(NameConflict):
        blobstore.create(folder, update, store=store)


def test_rejects_a_source_with_unclear_quantization(tmp_path: Path, store: LocalStore) -> None:
    tensors: Arrays = {
        "a.weight": np.zeros((4, 4), np.uint32),
        "a.scales": np.zeros((4, 1), np.float16),
    }
    with pytest.raises(UnsupportedSource, match=r"a\.weight"):
        blobstore.create(write_folder(tmp_path / "model", tensors), "m", store=store)  # type: ignore[arg-type]
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["../../../x", "/etc/passwd", "x" * 70_000, "\0", "a\nb", ""])
def test_tensor_names_never_become_paths(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path / "in" / "store")
    model = write_folder(tmp_path / "model", {name: np.arange(3.0), "other": np.zeros(1)})
    before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    blobstore.create(model, "m", store=store)
    with blobstore.open("m", store=store) as opened:
        assert opened[name].tolist() == [0, 1, 2]
    after = {path for path in tmp_path.rglob("*") if not path.is_relative_to(store.root)}
    assert after - before == {tmp_path / "in"}
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert all(len(path.name) < 100 for path in files)


def test_the_order_of_tensors_in_the_file_does_not_change_the_result(tmp_path: Path) -> None:
    tensors = [(f"t{number}", "U8", (number,), bytes([number] * number)) for number in range(12)]
    tensors += [
        (f"model.layers.0.mlp.experts.{number}.w.weight", "U8", (1,), bytes([number]))
        for number in range(12)
    ]
    manifests = set()
    for number, order in enumerate((tensors, tensors[::-1], tensors[5:] + tensors[:5])):
        source = tmp_path / f"{number}.safetensors"
        source.write_bytes(blob(*order))
        store = LocalStore(tmp_path / f"store-{number}")
        blobstore.create(source, "m", store=store)
        *layers, source_layer = store.resolve(NAME).layers
        assert source_layer.media_type == media_types.SOURCE  # which records the files
        manifests.add(tuple(map(str, layers)))
    assert len(manifests) == 1


def test_the_default_store_is_that_of_the_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "usual"))
    blobstore.create(folder, "m")
    assert list(map(str, LocalStore(tmp_path / "usual").references())) == ["m:latest"]
    with blobstore.open("m") as model:
        assert set(model) == set(TENSORS)


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_source_is_closed(folder: Path, store: LocalStore, is_valid: bool) -> None:
    before = open_files(ANYWHERE)
    if is_valid:
        blobstore.create(folder, "m", store=store)
    else:
        with pytest.raises(UsageError):
            blobstore.create(folder, "m", store=store, experts="x")  # type: ignore[call-overload]
    assert open_files(ANYWHERE) == before


def test_progress_never_decreases_for_a_blob_that_is_read_twice(
    tmp_path: Path, store: LocalStore
) -> None:
    for number in range(2):  # of equal size, so that the second one is hashed before it is written
        calls: list[tuple[str, int, int]] = []
        model = write_folder(tmp_path / str(number), {"a": np.full(9, number)})
        blobstore.create(model, "m", store=store, progress=lambda *call: calls.append(call))  # noqa: B023 - called in this round only
    done = [count for _, count, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == calls[-1][2]


# Damaged blobs in the store


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, flip_header, truncate])
@pytest.mark.parametrize("layer", ["mask", "LICENSE", f"{EXPERTS}.experts", ""])
def test_an_import_replaces_a_damaged_blob(
    layer: str, damage: Callable[[Path], object], folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store)
    path = blob_path(store, layer)
    damage(path)
    wrong = path.read_bytes()
    created = blobstore.create(folder, "other", store=store)
    assert created.blobs_repaired == 1
    assert created.bytes_written == path.stat().st_size
    (notice,) = created.notices
    assert notice.startswith(
        f"replaced blob sha256:{path.name[7:]}, which was damaged; the damaged"
    )
    assert quarantined(store) == [wrong]
    assert not list(store.folder("temporary").iterdir())
    for name in ("m", "other"):
        blobstore.open(name, store=store, verify="digest").close()
    assert blobstore.create(folder, "other", store=store).blobs_repaired == 0


def test_a_damaged_frozen_blob_is_replaced_by_a_plain_file(folder: Path, store: LocalStore) -> None:
    tensors = {"x": np.arange(1 << 18, dtype=np.float32)}
    folder = write_folder(folder.parent / "large", tensors)
    blobstore.create(folder, "m", store=store)
    freeze_models(["m"], store=store)
    (layer,) = store.resolve(NAME).layers_of(media_types.TENSOR)
    assert store.is_cold(layer.digest)
    flip(Path(store.cold_path(layer.digest)))
    created = blobstore.create(folder, "m", store=store)
    assert (created.blobs_repaired, len(quarantined(store))) == (1, 1)
    assert store.has_hot(layer.digest)
    assert not store.has_cold(layer.digest)
    blobstore.open("m", store=store, verify="digest").close()


def test_an_import_that_fails_leaves_a_damaged_blob(
    folder: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.create(folder, "m", store=store)
    path = blob_path(store, "mask")
    flip(path)
    wrong = path.read_bytes()
    monkeypatch.setattr(SourceVersions, "check", Mock(side_effect=DamagedSource("changed")))
    with pytest.raises(DamagedSource):
        blobstore.create(folder, "other", store=store)
    assert path.read_bytes() == wrong
    assert not quarantined(store)
    assert not list(store.folder("temporary").iterdir())


@pytest.mark.slow
def test_blobs_that_were_verified_are_not_read_again(
    folder: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_cache, "_MARGIN_NS", 0)
    blobstore.create(folder, "m", store=store)
    blobs = len(store.resolve(NAME).layers) + 1
    check = create_autospec(LocalStore.check_digest, side_effect=LocalStore.check_digest)
    monkeypatch.setattr(LocalStore, "check_digest", check)
    time.sleep(0.05)
    for paranoid, count in ((False, blobs), (False, 0), (True, blobs)):
        check.reset_mock()
        created = blobstore.create(folder, "m", store=store, paranoid=paranoid)
        assert check.call_count == count
        assert created.bytes_written == 0
    flip(blob_path(store, "mask"))
    assert blobstore.create(folder, "m", store=store).blobs_repaired == 1


def test_a_paranoid_import_accepts_intact_blobs(folder: Path, store: LocalStore) -> None:
    before = blobstore.create(folder, "m", store=store)
    again = blobstore.create(folder, "m", store=store, paranoid=True)
    assert (again.bytes_written, again.bytes_present) == (0, before.bytes_written)


@pytest.mark.parametrize(
    ("quantize", "value"), [("mxfp4", 1e-38), ("mxfp8", 1e-38), ("int4", 60_000)]
)
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_tensor_that_cannot_be_quantized_is_kept_with_a_notice(
    tmp_path: Path, store: LocalStore, quantize: str, value: float, experts: ExpertForm
) -> None:
    random = np.random.default_rng(0)
    names = [
        "model.layers.0.self_attn.q[0]_proj.weight",
        "model.layers.0.self_attn.q0_proj.weight",
        *(f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(2)),
    ]
    dtype = np.float16 if quantize == "int4" else np.float32
    tensors = {name: random.standard_normal((64, 64)).astype(dtype) for name in names}
    for name in (names[0], names[2]):
        tensors[name][7] = value * np.resize([1, -1], 64)
    folder = write_folder(tmp_path / "model", tensors)
    created = blobstore.create(
        folder, "m", store=store, quantize=QuantizeOptions(quantize), experts=experts
    )
    (notice,) = (notice for notice in created.notices if "unquantized" in notice)
    assert "and 1 more" in notice
    with blobstore.open("m", store=store, dequantize=False) as model:
        assert names[1] in model.quantized
        assert np.array_equal(model[names[0]], tensors[names[0]])
        if experts == "packed":
            assert names[3] in model.quantized
            assert np.array_equal(model[names[2]], tensors[names[2]])
    assert blobstore.verify("m", store=store).faults == ()
    # The record has what it takes to import the same blobs again.
    again = blobstore.create(folder, "again", store=store, quantize=quantize, experts=experts)
    assert again.bytes_written < 2000
    path = next(path for path in store.folder("blobs").iterdir() if path.stat().st_size > 8000)
    flip(path)
    assert blobstore.repair(source=folder, store=store).faults == ()


def test_a_name_that_another_import_gave_in_the_meantime_is_not_taken_from_it(
    folder: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.create(folder, "other", store=store, experts="stacked")
    other = store.resolve("other")
    publish = Names.publish

    def after_another(self: Names, update: NameUpdate, *args: Any) -> object:
        publish(self, replace_any("m"), other)
        return publish(self, update, *args)

    monkeypatch.setattr(Names, "publish", after_another)
    with pytest.raises(NameTaken, match="'m:latest' was given to another model in the meantime"):
        blobstore.create(folder, "m", store=store)
    assert store.resolve("m") == other
    monkeypatch.undo()
    created = blobstore.create(folder, "m", store=store)  # what the error advises
    assert created.replaced
    assert any("was the name of another model" in notice for notice in created.notices)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_keeps_what_is_not_understood_as_published(
    scheme: str, tmp_path: Path, store: LocalStore
) -> None:
    source = write_published(tmp_path / "model", scheme, experts=3)
    created = blobstore.create(source, "m", store=store)
    assert any(
        note.startswith(f"{scheme}, kept as published: tensor '") for note in created.notices
    )
    manifest = store.resolve(NAME)
    names = {layer.name for layer in manifest.layers_of(media_types.TENSOR)}
    parts = {f"{LAYER}.{end}" for end in SCHEMES[scheme]}
    assert names == {"model.norm.weight", f"{EXPERTS}.experts", *parts}
    assert published_scheme(store, manifest) == scheme
    blobstore.export("m", tmp_path / "exported", store=store)
    blobstore.link("m", tmp_path / "linked", store=store)
    assert contents(tmp_path / "exported") == contents(source)
    assert raw_tensors(tmp_path / "linked") == raw_tensors(source)
    config = (tmp_path / "linked" / "config.json").read_bytes()
    assert config == (source / "config.json").read_bytes()
    for options in ({"quantize": "int4"}, {"decode": True}):
        with pytest.raises(UnsupportedSource, match=r"^the source cannot be .*: tensor '"):
            blobstore.create(source, "other", store=store, **grouped(options))
    with pytest.raises(UsageError, match="neither decoded nor quantized"):
        blobstore.create(source, "other", store=store, decode=True, as_is=True)
    assert list(store.references()) == [NAME]


def test_experts_that_are_not_understood_are_never_stacked(
    tmp_path: Path, store: LocalStore
) -> None:
    source = write_published(tmp_path / "model", "llm_int8", experts=3)
    blobstore.create(source, "m", store=store, experts="stacked")
    names = {layer.name for layer in store.resolve(NAME).layers_of(media_types.TENSOR)}
    assert {f"{EXPERTS}.experts.{n}.up_proj.weight" for n in range(3)} <= names
    assert not store.resolve(NAME).layers_of(media_types.STACKS)


def test_keeps_any_source_as_published_on_request(
    folder: Path, tmp_path: Path, store: LocalStore
) -> None:
    data = Path(__file__).parents[3] / "data" / "ollama" / "hf" / "ct-nvfp4"
    blobstore.create(data, "m", store=store)
    assert published_scheme(store, store.resolve(NAME)) == ""
    created = blobstore.create(data, "m", store=store, as_is=True)
    assert "compressed-tensors, kept as published" in created.notices
    manifest = store.resolve(NAME)
    assert published_scheme(store, manifest) == "compressed-tensors"
    record = read_source_record(store, manifest)
    assert record is not None
    assert record.options == {"as_is": True}
    with blobstore.open("m", store=store) as model:
        assert not model.quantized
    blobstore.export("m", tmp_path / "back", store=store)
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (data / file).read_bytes()
    plain = blobstore.create(folder, "plain", store=store)
    as_is = blobstore.create(folder, "as-is", store=store, as_is=True)
    assert plain.notices == as_is.notices
    layers = [store.resolve(Reference.parse(name)).layers[:-1] for name in ("plain", "as-is")]
    assert layers[0] == layers[1]  # all but the record with the option
