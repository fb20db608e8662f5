from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import blobstore
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify, check_level, reads_headers
from blobstore.models.read_strategy import Read
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.safetensors.header import encode_header
from blobstore.store import verified_cache as verified
from blobstore.store.local import LocalStore
from blobstore.store.verified_cache import VerifiedBlobs
from tests.support.damage import blob_path, flip, forge_index, index_file
from tests.support.frozen import put
from tests.support.models import (
    add_blobs,
    blob,
    moe_tensors,
    quantizable_tensors,
    with_layers,
    write_folder,
)

NAME = Reference.parse("m")
NORM = "norm.weight"
TENSORS = {
    NORM: np.arange(6, dtype=np.float32).reshape(2, 3),
    "embed.weight": np.arange(8, dtype=np.float32),
    **moe_tensors(4),
}
ABOVE_SIZE = ("header", "digest", "rehash")


@pytest.fixture
def store(store: LocalStore, tmp_path: Path) -> LocalStore:
    blobstore.create(write_folder(tmp_path / "model", TENSORS), "m", store=store)
    return store


@pytest.fixture
def settled(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store whose blobs are old enough for the verified cache."""
    monkeypatch.setattr(verified, "_MARGIN_NS", 0)
    return store


def rewrite(path: Path, data: bytes) -> None:
    assert len(data) == path.stat().st_size
    path.chmod(0o600)
    path.write_bytes(data)


def give_another_header(path: Path, *specs: TensorSpec) -> None:
    """Replace a blob's header by a valid one of the same length, and keep its data."""
    old = path.read_bytes()
    new = encode_header(specs)
    rewrite(path, new + old[len(new) :])


def hashed(store: LocalStore, level: Verify, **options: Any) -> set[str]:
    """Open a model, and return the layers that were hashed."""
    reported: set[str] = set()

    def progress(what: str, done: int, total: int) -> None:
        assert 0 < done <= total
        reported.add(what)

    blobstore.open("m", store=store, verify=level, progress=progress, **options).close()
    return reported


def all_layers(store: LocalStore) -> set[str]:
    manifest = store.resolve(NAME)
    return {blob.name or str(blob.digest) for blob in manifest.blobs}


# Levels


def test_some_levels_read_headers() -> None:
    for level in get_args(Verify):
        check_level(level)
    assert [level for level in get_args(Verify) if reads_headers(level)] == list(ABOVE_SIZE)


def test_rejects_an_unknown_level_before_opening_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="verify must be none, size, header, digest or rehash"):
        blobstore.open("none", store=LocalStore(tmp_path), verify="sizes")  # type: ignore[call-overload]


def test_every_level_finds_what_the_levels_before_it_find(store: LocalStore) -> None:
    path = blob_path(store, NORM)
    whole = path.read_bytes()

    def finds(level: Verify) -> bool:
        try:
            blobstore.open("m", store=store, verify=level).close()
        except BlobstoreError:
            return True
        return False

    def found() -> list[str]:
        return [level for level in get_args(Verify) if finds(level)]

    assert found() == []
    rewrite(path, whole[:-1] + b"x")
    assert found() == ["digest", "rehash"]
    rewrite(path, whole)
    give_another_header(path, TensorSpec(NORM, DType.F32, (3, 2)))
    assert found() == ["header", "digest", "rehash"]
    os.truncate(path, len(whole) - 1)
    assert found() == ["size", "header", "digest", "rehash"]
    path.unlink()
    assert found() == ["size", "header", "digest", "rehash"]


@pytest.mark.slow
@pytest.mark.parametrize("level", get_args(Verify))
@pytest.mark.parametrize("read", ["mmap", "pread"])
@pytest.mark.parametrize("index", [True, False])
def test_an_intact_model_passes_every_level(
    store: LocalStore, level: Verify, read: Any, *, index: bool
) -> None:
    if not index:
        index_file(store).unlink()
    for _ in range(2):
        with blobstore.open("m", store=store, verify=level, read=read) as model:
            for name, expected in TENSORS.items():
                np.testing.assert_array_equal(model[name], expected, strict=True)
    index_file(store)


# Headers


def test_a_changed_header_is_reported_with_layer_and_digest(store: LocalStore) -> None:
    give_another_header(blob_path(store, NORM), TensorSpec(NORM, DType.I32, (2, 3)))
    with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{NORM}': .* its bytes have digest"):
        blobstore.open("m", store=store, verify="header")


def test_swapped_tensors_are_found(store: LocalStore) -> None:
    layer = "model.layers.0.mlp.experts"
    path = blob_path(store, layer)
    data = path.read_bytes()
    first, other = b"experts.0.up_proj", b"experts.1.up_proj"
    free = b"@" * len(first)
    swapped = data.replace(first, free).replace(other, first).replace(free, other)
    rewrite(path, swapped)
    with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{layer}': .* its bytes have digest"):
        blobstore.open("m", store=store, verify="header")


def test_a_changed_quantization_type_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "model", quantizable_tensors())
    blobstore.create(folder, "m", store=store, quantize=QuantizeOptions("int4"))
    layer = "model.layers.0.self_attn.q_proj.weight"
    path = blob_path(store, layer)
    stated, other = (
        b'"group_size":"32","quant_type":"int4"',
        b'"group_size":"64","quant_type":"int2"',
    )
    data = path.read_bytes()
    assert stated in data
    rewrite(path, data.replace(stated, other))  # which has words and scales of the same shapes
    blobstore.open("m", store=store).close()
    with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{layer}': .* bytes have digest"):
        blobstore.open("m", store=store, verify="header")


@pytest.mark.parametrize("index", [True, False])
def test_a_renamed_tensor_is_found_without_an_index(store: LocalStore, *, index: bool) -> None:
    if not index:
        index_file(store).unlink()
    give_another_header(blob_path(store, NORM), TensorSpec("norm.height", DType.F32, (2, 3)))
    with pytest.raises(
        BlobDamaged, match=f"^m:latest: layer '{NORM}': .* holds tensor 'norm.height', which is not"
    ):
        blobstore.open("m", store=store, verify="header")


def test_a_blob_without_tensors_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"a": blob()})
    blobstore.open("m", store=store).close()
    with pytest.raises(BlobDamaged, match="m:latest: layer 'a': blob .* holds no tensor"):
        blobstore.open("m", store=store, verify="header")


def test_no_data_is_read_for_headers(store: LocalStore) -> None:
    path = blob_path(store, NORM)
    rewrite(path, path.read_bytes()[:-4] + b"else")
    assert hashed(store, "header") == set()


def take_the_type_of_another(value: Any) -> None:
    value[0][NORM][0] = "I32"


def take_the_place_of_another(value: Any) -> None:
    value[0][NORM][2:] = value[0]["embed.weight"][2:]


def forget_a_tensor(value: Any) -> None:
    del value[0][NORM]


def invent_a_tensor(value: Any) -> None:
    value[0]["more"] = value[0][NORM]


def name_another_blob(value: Any) -> None:
    value[1][0][0] = "0" * 64


@pytest.mark.parametrize(
    "change",
    [
        *(take_the_type_of_another, take_the_place_of_another, forget_a_tensor),
        *(invent_a_tensor, name_another_blob),
    ],
)
@pytest.mark.parametrize("level", ABOVE_SIZE)
def test_a_wrong_index_is_rebuilt_from_the_blobs(
    store: LocalStore, change: Callable[[Any], None], level: Verify
) -> None:
    whole = index_file(store).read_bytes()
    forge_index(store, change)
    with blobstore.open("m", store=store, verify=level) as model:
        np.testing.assert_array_equal(model[NORM], TENSORS[NORM], strict=True)
        assert set(model) == set(TENSORS)
    assert index_file(store).read_bytes() == whole


def test_an_open_model_can_be_checked_at_every_level(store: LocalStore) -> None:
    path = blob_path(store, NORM)
    whole = path.read_bytes()
    with blobstore.open("m", store=store) as model:
        for level in get_args(Verify):
            model.check(level)
        rewrite(path, whole[:-1] + b"x")
        model.check("header")
        for level in ("digest", "rehash"):
            with pytest.raises(BlobDamaged, match=f"m:latest: layer '{NORM}'"):
                model.check(level)
        rewrite(path, whole)
        give_another_header(path, TensorSpec(NORM, DType.F32, (3, 2)))
        with pytest.raises(BlobDamaged, match=f"m:latest: layer '{NORM}'"):
            model.check("header")
        path.unlink()
        with pytest.raises(BlobMissing, match=f"m:latest: layer '{NORM}'"):
            model.check("header")


@pytest.mark.parametrize("change", [take_the_type_of_another, name_another_blob])
def test_reports_that_a_model_was_opened_by_a_wrong_index(
    store: LocalStore, change: Callable[[Any], None]
) -> None:
    forge_index(store, change)
    with (
        blobstore.open("m", store=store, verify="none") as model,
        pytest.raises(BlobDamaged, match="m:latest: the header index is wrong; open the model"),
    ):
        model.check("header")


def test_a_correct_index_is_not_written_again(store: LocalStore) -> None:
    before = index_file(store).stat().st_mtime_ns, index_file(store).stat().st_ino
    blobstore.open("m", store=store, verify="header").close()
    assert (index_file(store).stat().st_mtime_ns, index_file(store).stat().st_ino) == before


def test_verify_names_the_tensor_of_a_broken_header_in_a_manifest_of_another_program(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"w": blob(("w", "U8", (3,), b"abc"))})
    manifest = store.manifest_path(NAME)
    ours = manifest.read_bytes()
    manifest.write_bytes(json.dumps(json.loads(ours), indent=2).encode())
    assert store.resolve(NAME).to_bytes() == ours != manifest.read_bytes()
    blobstore.open("m", store=store).close()
    path = blob_path(store, "w")
    rewrite(path, bytes(path.stat().st_size))
    (fault,) = verify_models(store=store).faults
    assert (fault.layer, fault.tensor) == ("w", "w")


# Digests


def test_hashed_blobs_are_not_hashed_again(settled: LocalStore) -> None:
    assert hashed(settled, "digest") == all_layers(settled)
    assert hashed(settled, "digest") == set()
    assert hashed(settled, "rehash") == all_layers(settled)


@pytest.mark.parametrize("read", ["mmap", "populate", "pread"])
def test_blobs_are_remembered_however_they_are_read(settled: LocalStore, read: Read) -> None:
    put(settled, "cold", {"x": 1})
    freeze_models(["cold"], store=settled)
    levels: list[Verify] = ["digest", "digest", "rehash"]
    for name in ("m", "cold"):
        for level in levels:
            blobstore.open(name, store=settled, verify=level, read=read).close()
    known = settled.verified_blobs()
    (frozen,) = settled.resolve("cold").layers_of(*media_types.WEIGHTS)
    assert known.has_cold(*frozen.id)
    weights = settled.resolve("m").layers_of(*media_types.WEIGHTS)
    assert all(known.has(*layer.id) for layer in weights)
    assert hashed(settled, "digest") == set()


@pytest.mark.parametrize("read", ["mmap", "populate", "pread"])
def test_a_blob_that_is_damaged_is_forgotten(settled: LocalStore, read: Read) -> None:
    blobstore.open("m", store=settled, verify="digest", read=read).close()
    path = blob_path(settled, NORM)
    flip(path)
    for _ in range(2):
        with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{NORM}': .* bytes have digest"):
            blobstore.open("m", store=settled, verify="digest", read=read)
    flip(path)
    with blobstore.open("m", store=settled, verify="digest", read=read) as model:
        np.testing.assert_array_equal(model[NORM], TENSORS[NORM])


def test_only_changed_blobs_are_hashed_again(settled: LocalStore) -> None:
    assert hashed(settled, "digest") == all_layers(settled)
    path = blob_path(settled, NORM)
    whole, before = path.read_bytes(), path.stat()
    rewrite(path, whole)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashed(settled, "digest") == {NORM}
    rewrite(path, whole[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(BlobDamaged, match=f"^m:latest: layer '{NORM}': .* have digest"):
            blobstore.open("m", store=settled, verify="digest")


def test_rehash_finds_bit_rot_and_records_it(
    settled: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed(settled, "digest")
    path = blob_path(settled, NORM)
    stamp = verified._version(str(path))
    rewrite(path, path.read_bytes()[:-1] + b"x")

    def stamped(name: str, real: Any = verified._version) -> Any:  # what rots changes no time
        return stamp if name == str(path) else real(name)

    monkeypatch.setattr(verified, "_version", stamped)
    assert hashed(settled, "digest") == set()
    with pytest.raises(BlobDamaged):
        blobstore.open("m", store=settled, verify="rehash")
    with pytest.raises(BlobDamaged):
        blobstore.open("m", store=settled, verify="digest")


def test_a_new_model_is_hashed_each_time(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_MARGIN_NS", 3600 * 10**9)
    assert hashed(store, "digest") == all_layers(store)
    assert hashed(store, "digest") == all_layers(store)


def test_verify_models_hashes_all_blobs_and_records_that(settled: LocalStore) -> None:
    hashed(settled, "digest")
    found = verify_models(store=settled)
    assert found.faults == ()
    assert found.bytes_read == sum(blob.size for blob in settled.resolve(NAME).blobs)
    settled._layout.verified(os.geteuid()).unlink()
    verify_models(store=settled)
    assert hashed(settled, "digest") == set()


def test_two_models_share_the_records_of_a_blob(settled: LocalStore, tmp_path: Path) -> None:
    hashed(settled, "digest")
    more = TENSORS | {"another": np.zeros(3)}
    blobstore.create(write_folder(tmp_path / "more", more), "more", store=settled)
    reported: set[str] = set()
    blobstore.open(
        "more", store=settled, verify="digest", progress=lambda what, *_: reported.add(what)
    ).close()
    assert "another" in reported
    assert not reported & set(TENSORS)


def test_a_wrong_size_is_reported_for_a_recorded_blob(settled: LocalStore) -> None:
    hashed(settled, "digest")
    manifest = settled.resolve(NAME)
    (layer,) = [item for item in manifest.layers if item.name == NORM]
    assert VerifiedBlobs(settled).has(layer.digest, layer.size)
    wrong = layer._replace(size=layer.size + 1)
    layers = [wrong if item == layer else item for item in manifest.layers]
    changed = with_layers(settled, manifest, layers)
    settled.manifest_path(NAME).write_bytes(changed.to_bytes())
    with pytest.raises(BlobDamaged, match="expected"):
        blobstore.open("m", store=settled, verify="digest")
