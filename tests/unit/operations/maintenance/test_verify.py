from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.rate_limit import RateLimiter
from blobstore.core.sample import NONE
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import ModelNotFound, NotFound, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.verify import Fault, _BlobCheck, verify_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support import sandbox
from tests.support.damage import blob_path, empty, flip, truncate, write_manifest
from tests.support.gguf_files import gguf_file
from tests.support.models import (
    add_blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    replace_file,
    with_layers,
    write_folder,
)

NAME = Reference.parse("m")
EXPERTS = "model.layers.0.mlp.experts"
PLAIN = "model.embed_tokens.weight"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return a store with model ``m``: dense tensors and packed experts."""
    store = LocalStore(tmp_path / "store")
    tensors = dense_tensors() | moe_tensors()
    folder = write_folder(tmp_path / "source", tensors, files={"merges.txt": b"a b\n"})
    create(folder, NAME, store=store)
    return store


def layer_of(store: LocalStore, name: str) -> Descriptor:
    return next(layer for layer in store.resolve(NAME).layers if layer.name == name)


def add(
    store: LocalStore, content: bytes, *, name: str = "", media_type: str = media_types.TENSOR
) -> Descriptor:
    return Descriptor(media_type, *add_blob(store, content), name)


def publish_with(store: LocalStore, *layers: Descriptor) -> None:
    """Add layers to model ``m``, whose record of the source they do not fit."""
    manifest = store.resolve(NAME)
    others = (layer for layer in manifest.layers if layer.media_type != media_types.SOURCE)
    store.names.publish(replace_any(NAME), with_layers(store, manifest, (*others, *layers)))


def blob(*names: str) -> bytes:
    specs = [TensorSpec(name, DType.U8, (1,)) for name in names]
    return encode_header(specs) + bytes(len(names))


def only_fault(store: LocalStore) -> Fault:
    verified = verify_models(store=store)
    assert not verified.ok
    (fault,) = verified.faults
    assert fault.reference == "m:latest"
    return fault


# Whole models


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_finds_no_fault_in_an_intact_model(experts: ExpertForm, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "source", dense_tensors() | moe_tensors())
    create(folder, NAME, store=store, experts=experts)
    verified = verify_models([NAME], store=store)
    blobs = list((tmp_path / "store" / "blobs").iterdir())
    assert verified.ok
    assert verified.models == 1
    assert verified.blobs == len(blobs)
    assert verified.bytes_read == sum(path.stat().st_size for path in blobs)


def test_accepts_json_files_that_are_not_json(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    files = {"config.json": b"{}", "tokenizer.json": b"\xff"}
    create(write_folder(tmp_path / "source", dense_tensors(), files=files), NAME, store=store)
    replace_file(store, "m", "config.json", b"{")  # as earlier versions imported it
    assert verify_models(store=store).faults == ()


def test_accepts_models_in_gguf_files(store: LocalStore) -> None:
    manifest = store.resolve(NAME)
    layer = add(store, gguf_file(), media_type=media_types.MODEL)
    store.names.publish(replace_any("gguf"), with_layers(store, manifest, [layer]))
    assert verify_models([Reference.parse("gguf")], store=store).faults == ()


QUANTIZED = [TensorSpec("x", DType.U32, (1,)), TensorSpec("x.scale", DType.F32, (1,))]


@pytest.mark.parametrize("content", [blob("data"), encode_header(QUANTIZED) + bytes(8)])
def test_accepts_a_tensor_named_data_or_with_qparams(store: LocalStore, content: bytes) -> None:
    publish_with(store, add(store, content, name="x"))
    assert verify_models(store=store).faults == ()


@pytest.mark.parametrize("name", ["", "none"], ids=["empty folder", "no folder"])
def test_a_store_that_is_not_there_is_not_intact(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match="there is no store at"):
        verify_models(store=tmp_path / name)


def test_verifies_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    verified = verify_models(store=tmp_path)
    assert (verified.models, verified.blobs, verified.faults) == (0, 0, ())


def test_reads_a_blob_once_however_many_models_share_it(store: LocalStore, tmp_path: Path) -> None:
    alone = verify_models(store=store)
    create(tmp_path / "source", "other", store=store)
    both = verify_models(store=store, jobs=1)
    assert both.models == 2
    assert (both.blobs, both.bytes_read) == (alone.blobs, alone.bytes_read)


def test_the_blobs_of_models_are_collected_in_one_set(store: LocalStore, tmp_path: Path) -> None:
    tensors = {"w": np.zeros(3, np.uint8)}
    create(write_folder(tmp_path / "small", tensors), "small", store=store)
    check = _BlobCheck(store, 1, None, None, NONE)
    collected = check.of_models
    manifests = list(map(store.resolve, store.references()))
    for manifest in manifests:
        check.add([manifest])
        assert check.of_models is collected, "it is not copied for each model"
    assert collected == {blob.id for manifest in manifests for blob in manifest.blobs}


def test_reads_only_what_the_named_models_need(store: LocalStore, tmp_path: Path) -> None:
    tensors = {"w": np.zeros(3, np.uint8)}
    create(write_folder(tmp_path / "small", tensors), "small", store=store)
    flip(blob_path(store, PLAIN))
    small = Reference.parse("small")
    verified = verify_models([small, small], store=store)
    assert verified.faults == ()
    assert (verified.models, verified.blobs) == (1, 4)


def test_reports_progress_up_to_the_total(store: LocalStore) -> None:
    reports: list[tuple[int, int]] = []
    verified = verify_models(
        store=store, progress=lambda _, done, total: reports.append((done, total))
    )
    assert reports[-1] == (verified.bytes_read, verified.bytes_read)


# Damaged blobs


def test_names_the_tensor_of_a_changed_byte(store: LocalStore) -> None:
    flip(blob_path(store, PLAIN))
    fault = only_fault(store)
    assert (fault.layer, fault.tensor) == (PLAIN, PLAIN)
    assert "is damaged: its bytes have digest" in fault.message


def test_names_the_layer_of_a_changed_byte_in_a_group(store: LocalStore) -> None:
    flip(blob_path(store, EXPERTS))
    fault = only_fault(store)
    assert (fault.layer, fault.tensor) == (EXPERTS, "")
    assert fault.message.endswith("; it holds 36 tensors, any of which may be damaged")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: flip(path, 0), lambda p: flip(p, 12)])
def test_names_the_tensor_of_a_blob_whose_header_is_lost(
    damage: Callable[[Path], object], store: LocalStore
) -> None:
    damage(blob_path(store, PLAIN))
    fault = only_fault(store)
    assert (fault.layer, fault.tensor) == (PLAIN, PLAIN)


def test_names_a_quantized_tensor_and_not_its_qparams(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    create(
        write_folder(tmp_path / "s", quantizable_tensors()),
        NAME,
        store=store,
        quantize=QuantizeOptions("int4"),
    )
    for layer in ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight"):
        flip(blob_path(store, layer))
        flip(blob_path(store, layer), 0)
    faults = verify_models(store=store).faults
    assert [fault.tensor for fault in faults] == [fault.layer for fault in faults]
    assert len(faults) == 2


def test_says_what_a_changed_byte_broke_in_the_header(store: LocalStore) -> None:
    path = blob_path(store, EXPERTS)
    flip(path, path.read_bytes().index(b'"F32"') + 3)
    fault = only_fault(store)
    assert (fault.layer, fault.tensor) == (EXPERTS, "")
    assert "have digest" in fault.message
    assert f"tensor '{EXPERTS}.0.down_proj.weight': unknown dtype 'F33'" in fault.message
    assert fault.message.count(fault.blob.removeprefix("sha256:")) == 1


def test_names_the_layer_of_a_missing_blob(store: LocalStore) -> None:
    blob_path(store, EXPERTS).unlink()
    fault = only_fault(store)
    assert fault.layer == EXPERTS
    assert fault.message.count("missing") == 1


def test_names_the_layer_of_a_blob_of_another_size(store: LocalStore) -> None:
    path = blob_path(store, PLAIN)
    size = path.stat().st_size
    truncate(path)
    fault = only_fault(store)
    assert fault.layer == PLAIN
    assert fault.message.count(f"has {size - 1} bytes, expected {size}") == 1


def test_names_a_damaged_file(store: LocalStore) -> None:
    flip(blob_path(store, "config.json"), 0)
    fault = only_fault(store)
    digest = layer_of(store, "config.json").digest
    assert (fault.layer, fault.blob) == ("config.json", str(digest))


def test_names_a_layer_without_a_name_by_its_media_type(store: LocalStore) -> None:
    license_ = add(store, b"terms", media_type=media_types.LICENSE)
    publish_with(store, license_)
    Path(store.blob_path(license_.digest)).unlink()
    assert only_fault(store).layer == media_types.LICENSE


def test_reports_every_fault_of_every_model_in_order(store: LocalStore, tmp_path: Path) -> None:
    create(tmp_path / "source", "a-copy", store=store)
    flip(blob_path(store, PLAIN))
    blob_path(store, "scalar").unlink()
    flip(blob_path(store, "config.json"), 0)
    faults = verify_models(store=store).faults
    assert [(fault.reference, fault.layer) for fault in faults] == [
        (reference, layer)
        for reference in ("a-copy:latest", "m:latest")
        for layer in (PLAIN, "scalar", "config.json")
    ]


def test_finds_a_blob_whose_size_two_manifests_dispute(store: LocalStore) -> None:
    manifest = store.resolve(NAME)
    *others, last = manifest.layers
    wrong = with_layers(store, manifest, (*others, last._replace(size=last.size + 1)))
    write_manifest(store, "wrong", wrong.to_bytes())
    (fault,) = verify_models(store=store).faults
    assert (fault.reference, fault.layer) == ("wrong:latest", last.media_type)


# Manifests, and what they state


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"image.json", b"image.jsoo"),
        (b'"name":"config.json"', b'"nbme":"config.json"'),
        (b"merges.txt", b"merges.tyt"),
        (b"docker.container", b"docker.containes"),
        (b"manifest.v2", b"manifest.v3"),
    ],
)
def test_finds_a_manifest_that_was_changed(
    old: bytes, new: bytes, quick: bool, store: LocalStore
) -> None:
    path = store.manifest_path(NAME)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    (fault,) = verify_models(store=store, quick=quick).faults
    assert (fault.reference, fault.layer, fault.blob) == ("m:latest", "", "")
    assert fault.message.startswith(f"'{path}': the manifest was changed since it was written")


def test_a_manifest_that_was_changed_hides_no_damage(store: LocalStore) -> None:
    blob_path(store, PLAIN).unlink()
    path = store.manifest_path(NAME)
    path.write_bytes(path.read_bytes().replace(b"merges.txt", b"merges.tyt"))
    layers = [fault.layer for fault in verify_models(store=store).faults]
    assert layers == ["", PLAIN]


def test_reports_a_missing_config_once(store: LocalStore) -> None:
    blob_path(store, "").unlink()
    (fault,) = verify_models(store=store).faults
    assert fault.layer == media_types.CONFIG


def test_goes_on_after_a_manifest_that_cannot_be_read(store: LocalStore) -> None:
    write_manifest(store, "broken", b"{}")
    flip(blob_path(store, PLAIN))
    verified = verify_models(store=store)
    assert [fault.reference for fault in verified.faults] == ["broken:latest", "m:latest"]
    assert "$.schemaVersion" in verified.faults[0].message
    assert verified.models == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"{", "not valid JSON"), (b"\xff", "not valid UTF-8"), (b"[]", "is not a JSON object")],
)
def test_finds_a_config_that_is_not_a_json_object(
    content: bytes, complaint: str, store: LocalStore
) -> None:
    config = add(store, content, media_type=media_types.CONFIG)
    store.names.publish(replace_any(NAME), replace(store.resolve(NAME), config=config))
    fault = only_fault(store)
    assert fault.layer == media_types.CONFIG
    assert complaint in fault.message


def test_finds_a_damaged_config(store: LocalStore) -> None:
    flip(blob_path(store, ""), 0)
    fault = only_fault(store)
    assert fault.layer == media_types.CONFIG
    assert "have digest" in fault.message


@pytest.mark.parametrize(
    ("content", "tensor", "message"),
    [
        (blob("x") + b"?", "", "trailing bytes"),
        (encode_header([]), "", "holds no tensor"),
        (blob("y"), "y", "which is not of this layer"),
        (blob("x.a", "xb"), "xb", "which is not of this layer"),
    ],
    ids=["broken", "no tensor", "another tensor", "outside the group"],
)
def test_finds_a_blob_that_does_not_fit_its_layer(
    store: LocalStore, content: bytes, tensor: str, message: str
) -> None:
    publish_with(store, add(store, content, name="x"))
    fault = only_fault(store)
    assert (fault.layer, fault.tensor) == ("x", tensor)
    assert message in fault.message


def test_finds_a_tensor_that_is_in_two_layers(store: LocalStore) -> None:
    layers = [add(store, blob("x.a", "x.b"), name="x"), add(store, blob("x.a"), name="x.a")]
    publish_with(store, *layers)
    fault = only_fault(store)
    assert "'x.a' is in two layers" in fault.message


def test_finds_a_size_that_another_layer_of_the_same_blob_contradicts(store: LocalStore) -> None:
    right = add(store, b"{}", media_type=media_types.JSON, name="right.json")
    path = store.manifest_path(NAME)
    manifest = store.resolve(NAME)
    wrong = right._replace(size=7, name="wrong.json")
    path.write_bytes(with_layers(store, manifest, (*manifest.layers, wrong, right)).to_bytes())
    fault = only_fault(store)
    assert fault.layer == "wrong.json"
    assert "it has 2 bytes, expected 7" in fault.message


def test_finds_runtime_names_that_collide(store: LocalStore) -> None:
    specs = [
        TensorSpec("w", DType.U32, (1,)),
        TensorSpec("w.scale", DType.U8, (1,)),
        TensorSpec("w_scale", DType.U8, (1,)),
    ]
    publish_with(store, add(store, encode_header(specs) + bytes(6), name="w"))
    # The quantization parameter w.scale is called w_scale at run time.
    messages = [fault.message for fault in verify_models(store=store).faults]
    assert "two tensors of the model would both be called 'w_scale'" in messages


def test_a_name_that_vanishes_is_not_a_fault(store: LocalStore) -> None:
    class Racing(LocalStore):
        def references(self, **_: object) -> Iterator[Reference]:
            yield from super().references()
            yield Reference.parse("gone")

    racing = Racing(store.root)
    verified = verify_models(store=racing)
    assert (verified.models, verified.faults) == (1, ())
    with pytest.raises(ModelNotFound):
        verify_models([Reference.parse("gone")], store=racing)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"x": "y"}', b'{"x": []}'])
def test_finds_an_invalid_list_of_stacked_tensors(store: LocalStore, content: bytes) -> None:
    publish_with(store, add(store, content, media_type=media_types.STACKS, name=""))
    assert "the list of stacked tensors" in only_fault(store).message


# Quick, and slow


def test_a_quick_check_finds_wrong_sizes_and_headers(store: LocalStore) -> None:
    empty(blob_path(store, "merges.txt"))
    blob_path(store, "scalar").unlink()
    flip(blob_path(store, "mask"), 0)
    flip(blob_path(store, PLAIN))  # the data, which is not read
    verified = verify_models(store=store, quick=True)
    assert [fault.layer for fault in verified.faults] == ["mask", "scalar", "merges.txt"]
    assert verified.bytes_read == 0
    assert verified.blobs == verify_models(store=store).blobs


def test_a_quick_check_finds_no_fault_in_an_intact_model(store: LocalStore) -> None:
    assert verify_models(store=store, quick=True).faults == ()


def test_a_quick_check_does_not_mark_blobs_as_verified(store: LocalStore) -> None:
    verify_models(store=store, quick=True)
    assert not store._layout.verified(os.geteuid()).exists()


def test_a_rate_slows_all_threads_together(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []

    class Noting(RateLimiter):
        def spend(self, count: int, wait: Callable[[float], object]) -> None:
            spent.append(count)

    monkeypatch.setattr("blobstore.operations.maintenance.verify.RateLimiter", Noting)
    verified = verify_models(store=store, rate=1e6, jobs=4)
    assert sum(spent) == verified.bytes_read > 0


def test_the_parts_of_a_store_are_hashed_each_once(store: LocalStore) -> None:
    whole = verify_models(store=store)
    parts = [verify_models(store=store, sample=f"{part}/3") for part in (1, 2, 3)]
    assert {one.blobs for one in parts} == {whole.blobs}
    assert all(0 < one.hashed < whole.blobs for one in parts)
    assert sum(one.hashed for one in parts) == whole.hashed == whole.blobs
    assert sum(one.bytes_read for one in parts) == whole.bytes_read


def test_a_blob_is_at_fault_in_its_own_part_alone_and_a_missing_one_in_each(
    store: LocalStore,
) -> None:
    flip(blob_path(store, PLAIN))
    blob_path(store, "mask").unlink()
    found = [verify_models(store=store, sample=f"{part}/3").faults for part in (1, 2, 3)]
    layers = sorted(fault.layer for faults in found for fault in faults)
    assert layers == ["mask", "mask", "mask", PLAIN]


def test_a_sample_of_all_blobs_is_the_whole_check(store: LocalStore) -> None:
    flip(blob_path(store, PLAIN))
    whole, sampled = verify_models(store=store), verify_models(store=store, sample="100%")
    assert (sampled.faults, sampled.hashed) == (whole.faults, whole.hashed)


def test_refuses_a_sample_without_hashing(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="a sample cannot be combined with a quick check"):
        verify_models(store=store, quick=True, sample="5%")


def test_refuses_a_rate_without_hashing(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="a rate cannot be combined with a quick check"):
        verify_models(store=store, quick=True, rate=1e6)
    with pytest.raises(UsageError, match="at least 1 byte"):
        verify_models(store=store, rate=0)


# Models that change during the run


@pytest.fixture
def changing(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that schedules changes, each by the number of blobs hashed before it."""

    def before_hashing(changes: Mapping[int, Callable[[], object]]) -> None:
        check_digest = LocalStore.check_digest
        lock = threading.Lock()
        calls = itertools.count()

        def racing(self: LocalStore, *arguments: Any) -> None:
            with lock:
                changes.get(next(calls), lambda: None)()
            check_digest(self, *arguments)

        monkeypatch.setattr(LocalStore, "check_digest", racing)

    return before_hashing


def remove(store: LocalStore) -> None:
    store.manifest_path(NAME).unlink()
    collect_garbage(store=store, older_than=0, force=True)


@pytest.mark.parametrize("names", [(), (NAME,)], ids=["all", "named"])
def test_a_model_that_is_removed_during_the_run_is_not_a_fault(
    names: tuple[Reference, ...], store: LocalStore, changing: Callable[..., None]
) -> None:
    changing({0: lambda: remove(store)})
    verified = verify_models(names, store=store)
    assert (verified.models, verified.faults, verified.damaged) == (0, (), ())


def test_a_model_that_is_replaced_during_the_run_is_checked_again(
    store: LocalStore, changing: Callable[..., None], tmp_path: Path
) -> None:
    tensors = {"w": np.zeros(3, np.uint8), "v": np.ones(3, np.uint8)}
    folder = write_folder(tmp_path / "new", tensors)

    def replace_it() -> None:
        remove(store)
        create(folder, NAME, store=store)
        flip(blob_path(store, "w"))

    changing({0: replace_it})
    verified = verify_models([NAME], store=store)
    assert [fault.layer for fault in verified.faults] == ["w"]
    assert [item.name for item in verified.damaged] == ["w"]
    assert verified.models == 1


def test_a_blob_that_was_missing_for_a_moment_is_checked_again(
    store: LocalStore, changing: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    (folder / "merges.txt").unlink()
    count = len(store.resolve(NAME).blobs)
    changing({1: lambda: remove(store), count - 1: lambda: create(folder, NAME, store=store)})
    verified = verify_models([NAME], store=store, jobs=1)
    assert verified.faults == ()
    assert verified.damaged == ()
    # The first and the last were hashed before, and are not hashed twice.
    assert verified.bytes_read == sum(blob.size for blob in store.resolve(NAME).blobs)


def test_a_blob_that_changes_its_form_is_not_a_fault(
    store: LocalStore, changing: Callable[..., None], tmp_path: Path
) -> None:
    path, away = blob_path(store, PLAIN), tmp_path / "away"
    count = len(store.resolve(NAME).blobs)
    changing({0: lambda: path.rename(away), count: lambda: away.rename(path)})
    verified = verify_models(store=store, jobs=1)
    assert (verified.faults, verified.damaged) == ((), ())


def test_reports_damage_of_a_model_while_another_one_is_removed(
    store: LocalStore, changing: Callable[..., None], tmp_path: Path
) -> None:
    tensors = {"w": np.zeros(3, np.uint8)}
    create(write_folder(tmp_path / "stays", tensors), "stays", store=store)
    stays = store.resolve(Reference.parse("stays"))
    flip(Path(store.blob_path(stays.layers[0].digest)))
    changing({0: lambda: remove(store)})
    verified = verify_models(store=store)
    assert [(fault.reference, fault.layer) for fault in verified.faults] == [("stays:latest", "w")]


def test_reports_which_blobs_are_damaged(store: LocalStore, tmp_path: Path) -> None:
    create(tmp_path / "source", "other", store=store)
    publish_with(store, add(store, b"no header", name="x"))  # as its digest says
    flip(blob_path(store, PLAIN))
    blob_path(store, "scalar").unlink()
    verified = verify_models(store=store)
    assert sorted(item.name for item in verified.damaged) == [PLAIN, "scalar"]
    assert len(verified.faults) == 5


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_hot_blobs_are_intact_if_the_folder_of_cold_ones_cannot_be_read(quick: bool) -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        create(write_folder(folder / "model", dense_tensors()), "m", store=store)
        (store.root / ".blobstore").chmod(0o700)
        found = sandbox.call(
            lambda: verify_models(store=store, quick=quick).faults, unprivileged=True
        )
        assert found == "()"
