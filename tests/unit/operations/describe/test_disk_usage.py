from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import allocated
from blobstore.errors import BlobDamaged, BlobMissing, InvalidManifest, ModelNotFound, StoreError
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.describe.disk_usage import (
    ModelUsage,
    Space,
    StoreUsage,
    measure_models,
    measure_usage,
)
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.store.cold import ColdShelf
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.frozen import layer, layers, put, tuned, weights
from tests.support.models import add_blobs, blob
from tests.support.ollama_store import add_gguf_model

A, B = map(Reference.parse, "ab")


def content(name: str) -> bytes:
    """Return a blob whose size tells it from others."""
    size = 100 * (ord(name) - ord("a"))
    return blob((name, "U8", (size,), bytes(size)))


def make(store: LocalStore, name: str, parts: str) -> None:
    add_blobs(store, name, {part: content(part) for part in parts})


def sizes(parts: str) -> int:
    return sum(len(content(part)) for part in parts)


def by_name(usage: StoreUsage) -> dict[str, ModelUsage]:
    return {str(model.reference): model for model in usage.models}


def on_disk(store: LocalStore) -> int:
    found = [path.stat() for path in store.root.rglob("*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in found}.values())


def test_an_absent_store_takes_nothing(store: LocalStore) -> None:
    usage = measure_usage(store=store)
    assert (usage.models, usage.size, usage.names) == ((), 0, 0)
    assert usage.dedup_ratio is None
    assert not store.root.exists()


def test_reports_unique_and_shared_bytes(store: LocalStore) -> None:
    make(store, "a", "bcd")
    make(store, "b", "cde")
    make(store, "c", "df")
    config = store.resolve(A).config.size
    usage = measure_usage(store=store)
    models = by_name(usage)

    expected = {"a:latest": ("bcd", "b"), "b:latest": ("cde", "e"), "c:latest": ("df", "f")}
    assert list(models) == list(expected)
    for name, (all_parts, unique) in expected.items():
        model = models[name]
        assert model.size == sizes(all_parts) + config
        assert model.unique == sizes(unique)
        assert model.shared == model.size - model.unique
        assert model.blobs == len(all_parts) + 1
        assert (model.faults, model.error) == ((), None)
    assert usage.referenced == Space(6, sizes("bcdef") + config)
    assert usage.without_sharing == sizes("bcdcdedf") + 3 * config
    assert usage.dedup_ratio == usage.without_sharing / usage.referenced.size
    assert usage.names == 3
    assert usage.size == on_disk(store)


def test_two_names_of_one_model_have_nothing_unique(store: LocalStore) -> None:
    make(store, "a", "b")
    copy_model(A, B, store=store)
    usage = measure_usage(store=store)
    assert [model.unique for model in usage.models] == [0, 0]
    assert usage.dedup_ratio == 2
    assert usage.together == usage.together_unique == usage.referenced


def test_adds_up_the_requested_models(store: LocalStore) -> None:
    make(store, "a", "bc")
    make(store, "b", "cd")
    make(store, "c", "de")
    config = store.resolve(A).config.size
    usage = measure_usage(["b", "a", B], store=store)
    assert [str(model.reference) for model in usage.models] == ["b:latest", "a:latest"]
    assert usage.together == Space(4, sizes("bcd") + config)
    assert usage.together_unique == Space(2, sizes("bc"))
    told = remove_models(["a", "b"], store=store, dry_run=True)
    assert (told.blobs, told.size) == usage.together_unique
    assert usage.referenced == measure_usage(store=store).referenced
    assert usage.names == 3
    with pytest.raises(ModelNotFound, match="'none:latest'"):
        measure_usage([A, "none"], store=store)


def test_locks_of_downloads_are_no_downloads(store: LocalStore) -> None:
    digest = Digest.of(b"x" * 1000)
    with store.ingest() as ingest:
        file = ingest.open_partial(BlobId(digest, 1000))
        assert file is not None
        with file:
            file.write(0, b"x")
    usage = measure_usage(store=store)
    (path,) = store.folder("partial").glob("*-*-*")
    assert usage.partial == Space(1, allocated(path.stat()))
    assert usage.size >= usage.partial.size + 17


def test_reports_unreferenced_files(store: LocalStore) -> None:
    make(store, "a", "bc")
    make(store, "b", "cd")
    remove_models([A], store=store)
    (store.folder("blobs") / f"sha256-{'a' * 64}-partial").write_bytes(b"12345")
    (store.folder("blobs") / f"sha256-{'b' * 64}").symlink_to("elsewhere")
    (store.folder("temporary") / "1-a-0").write_bytes(b"123")
    (former,) = store.folder("history").iterdir()
    (journal,) = store.folder("headers").parent.glob("references-*")
    store.folder("quarantine").mkdir()
    store.folder("partial").mkdir()
    (store.folder("partial") / "unfinished").write_bytes(b"123")
    (store.folder("quarantine") / "bad").write_bytes(b"12")
    (store.folder("headers") / "x").write_bytes(b"1")
    usage = measure_usage(store=store)

    assert usage.unreferenced == Space(1, sizes("b"))
    assert usage.foreign == Space(2, 5 + len("elsewhere"))
    assert usage.temporary == Space(1, 3)
    assert usage.quarantine == Space(1, 2)
    assert usage.partial == Space(1, 3)
    assert usage.caches.size == 1 + former.stat().st_size + journal.stat().st_size
    assert usage.manifests == Space(1, len(store.read_manifest(B)))
    assert usage.size == on_disk(store) + len("elsewhere")


def test_reports_sizes_on_disk_and_wrong_sizes(store: LocalStore) -> None:
    make(store, "a", "bcd")
    manifest = store.resolve(A)
    missing, short, link = (Path(store.blob_path(layer.digest)) for layer in manifest.layers)
    missing.unlink()
    short.write_bytes(b"12")
    link.unlink()
    link.symlink_to(short)
    usage = measure_usage(store=store)
    (model,) = usage.models
    assert usage.foreign == Space(1, len(str(short)))
    assert model.size == model.unique == 2 + manifest.config.size
    assert model.blobs == 4
    assert [type(fault) for fault in model.faults] == [BlobMissing, BlobDamaged, BlobDamaged]
    assert str(missing) in str(model.faults[0])
    assert "has 2 bytes" in str(model.faults[1])


def test_reports_an_unreadable_manifest(store: LocalStore) -> None:
    make(store, "a", "b")
    make(store, "b", "c")
    store.manifest_path(A).write_bytes(b"{")
    usage = measure_usage(store=store)
    assert [type(model.error) for model in usage.models] == [InvalidManifest, type(None)]
    assert (usage.models[0].size, usage.models[0].blobs) == (0, 0)
    assert usage.unreferenced == Space(1, sizes("b"))
    assert len(measure_usage([B], store=store).unreadable) == 1
    assert usage.size == on_disk(store)


def test_knows_models_of_ollama_s_own(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "llama3:8b")
    (model,) = measure_usage(store=store).models
    assert model.size == model.unique == sum(item.size for item in manifest.blobs)


def test_a_folder_that_is_closed_is_an_error() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        make(store, "a", "b")
        store.folder("blobs").chmod(0o700)
        outcome = sandbox.call(lambda: measure_usage(store=store), unprivileged=True)
        store.folder("blobs").chmod(0o755)
    assert outcome == f"StoreError: cannot list '{store.folder('blobs')}': Permission denied"


def test_a_file_is_no_store(store: LocalStore) -> None:
    store.root.write_bytes(b"")
    with pytest.raises(StoreError, match="is not a folder"):
        measure_usage(store=store)


@pytest.fixture
def frozen(store: LocalStore) -> LocalStore:
    """A store with a frozen model, one of whose blobs is a delta against another model."""
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1)), "y": layer("y", weights(2))})
    freeze_models(["child"], store=store, base="base")
    return store


def test_listed_cold_blobs_are_measured_without_opening_them(
    frozen: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = layers(frozen, "child").values()
    stored = sum(frozen.open_cold(blob.digest).stored for blob in blobs)
    monkeypatch.setattr(ColdShelf, "open", None)
    usage = measure_usage(store=frozen)
    assert usage.cold == Space(2, stored)
    assert usage.saved == sum(blob.size for blob in blobs) - stored
    assert [model.faults for model in usage.models] == [(), ()]


def test_cold_blobs_that_are_not_listed_are_opened(frozen: LocalStore) -> None:
    expected = measure_usage(store=frozen)
    frozen.cold_index.path.unlink()
    found = measure_usage(store=LocalStore(frozen.root))
    assert (found.cold, found.saved, found.bases) == (expected.cold, expected.saved, expected.bases)
    assert [model.faults for model in found.models] == [(), ()]


def test_reports_cold_blobs_that_are_cut_short_or_lack_their_base(frozen: LocalStore) -> None:
    blobs = layers(frozen, "child")
    cut = Path(frozen.cold_path(blobs["y"].digest))
    cut.chmod(0o600)
    os.truncate(cut, 100)
    (base,) = frozen.cold_bases().values()
    Path(frozen.blob_path(base)).unlink()
    Path(frozen.base_path(base)).unlink()
    faults = by_name(measure_usage(store=LocalStore(frozen.root)))["child:latest"].faults
    assert [type(fault) for fault in faults] == [BlobDamaged, BlobDamaged]
    assert f"its base {base} is missing" in str(faults[0])
    assert str(cut) in str(faults[1])


def test_a_wrong_size_in_one_of_two_manifests_is_reported_for_a_cold_blob(
    frozen: LocalStore,
) -> None:
    manifest = frozen.resolve(Reference.parse("child"))
    wrong = tuple(blob._replace(size=blob.size + 1) for blob in manifest.layers)
    path = frozen.manifest_path(Reference.parse("other"))
    path.parent.mkdir(parents=True)
    path.write_bytes(Manifest(config=manifest.config, layers=wrong).to_bytes())
    models = by_name(measure_usage(store=frozen))
    assert models["child:latest"].faults == ()
    assert len(models["other:latest"].faults) == 2


@pytest.mark.parametrize("is_damaged", [False, True])
def test_models_alone_are_measured_as_with_the_store(
    frozen: LocalStore, *, is_damaged: bool
) -> None:
    copy_model("child", "copy", store=frozen)
    blobs = layers(frozen, "child")
    if is_damaged:
        Path(frozen.cold_path(blobs["y"].digest)).unlink()
        (base,) = frozen.cold_bases().values()
        Path(frozen.blob_path(base)).unlink()
        Path(frozen.base_path(base)).unlink()
        frozen.manifest_path("unreadable").parent.mkdir()
        frozen.manifest_path("unreadable").write_bytes(b"{")
    for names in (["child"], ["child", "copy"], ["base", "child", "copy"]):
        found = measure_models(names, store=LocalStore(frozen.root))
        usage = measure_usage(names, store=LocalStore(frozen.root))
        assert (found.together, found.together_unique) == (usage.together, usage.together_unique)
        for one, other in zip(found.models, usage.models, strict=True):
            assert list(map(str, one.faults)) == list(map(str, other.faults))
            assert (one.reference, one.size, one.unique) == (
                other.reference,
                other.size,
                other.unique,
            )
        assert list(map(str, found.unreadable)) == list(map(str, usage.unreadable))
