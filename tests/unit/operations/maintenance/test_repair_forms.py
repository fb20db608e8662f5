"""Blobs that are damaged in one form and intact in another."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import BlobDamaged
from blobstore.manifests.descriptor import Descriptor
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import flip, forms_of, layer, layers, put, weights

SEEDS = {"x": 1, "y": 2}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose model is hot and cold."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "a", SEEDS)
    freeze_models(["a"], store=store, keep_hot=True)
    return store


@pytest.fixture
def item(store: LocalStore) -> Descriptor:
    return layers(store, "a")["x"]


def quarantined(store: LocalStore) -> int:
    folder = store.folder("quarantine")
    return len(list(folder.iterdir())) if folder.exists() else 0


def assert_whole(store: LocalStore) -> None:
    assert verify_models(store=store).faults == ()
    with blobstore.open("a", store=store, verify="rehash") as model:
        assert {name: model[name].tobytes() for name in model} == {
            name: weights(seed) for name, seed in SEEDS.items()
        }


def test_reports_a_damaged_file_even_if_it_has_a_cold_form(
    store: LocalStore, item: Descriptor
) -> None:
    flip(store.blob_path(item.digest))
    (fault,) = verify_models(store=store).faults
    assert (fault.layer, fault.tensor) == ("x", "x")
    assert f"'{store.blob_path(item.digest)}' is damaged" in fault.message
    with pytest.raises(BlobDamaged, match="repair"):
        blobstore.open("a", store=store, verify="digest")


def test_repairs_a_damaged_file_from_its_cold_form(store: LocalStore, item: Descriptor) -> None:
    flip(store.blob_path(item.digest))
    would = repair_models(store=store, dry_run=True)
    assert [blob.digest for blob in would.repaired] == [item.digest]
    assert verify_models(store=store).faults
    repaired = repair_models(store=store)
    assert [blob.digest for blob in repaired.repaired] == [item.digest]
    assert repaired.faults == ()
    assert quarantined(store) == 1
    assert_whole(store)
    assert set(forms_of(store, "a").values()) == {"both"}


def test_a_damaged_cold_form_of_an_intact_file_is_quarantined(
    store: LocalStore, item: Descriptor
) -> None:
    flip(store.cold_path(item.digest))
    repaired = repair_models(store=store)
    assert [blob.digest for blob in repaired.repaired] == [item.digest]
    assert repaired.faults == ()
    assert quarantined(store) == 1
    assert_whole(store)
    assert forms_of(store, "a") == {"x": "hot", "y": "both"}


def test_a_cold_form_that_another_process_has_replaced_in_the_meantime_stays(
    store: LocalStore, item: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = Path(store.cold_path(item.digest))
    intact = cold.read_bytes()
    flip(str(cold))
    exclusive_lock = LocalStore.exclusive_lock

    def late(self: LocalStore) -> contextlib.AbstractContextManager[None]:
        cold.unlink()
        cold.write_bytes(intact)
        return exclusive_lock(self)

    monkeypatch.setattr(LocalStore, "exclusive_lock", late)
    repair_models(store=store)
    assert cold.read_bytes() == intact
    assert quarantined(store) == 0


def test_reports_a_blob_that_is_damaged_in_both_forms_and_keeps_it(
    store: LocalStore, item: Descriptor
) -> None:
    flip(store.blob_path(item.digest))
    flip(store.cold_path(item.digest))
    before = verify_models(store=store).faults
    repaired = repair_models(store=store)
    assert repaired.repaired == ()
    assert repaired.faults == before != ()
    assert quarantined(store) == 0


def test_a_fault_of_a_cold_form_is_not_reported_for_the_source(
    store: LocalStore, item: Descriptor, tmp_path: Path
) -> None:
    flip(store.blob_path(item.digest))
    flip(store.cold_path(item.digest))
    other = LocalStore(tmp_path / "other")
    put(other, "b", {"y": 2})
    (fault,) = repair_models(source=tmp_path / "other", store=store).faults
    assert fault.message.endswith("has its name and size")
    put(other, "b", SEEDS)
    assert repair_models(source=tmp_path / "other", store=store).faults == ()
    assert_whole(store)


@pytest.mark.parametrize("way", ["thaw", "freeze"])
def test_freeze_and_thaw_use_the_intact_form(store: LocalStore, item: Descriptor, way: str) -> None:
    flip(store.blob_path(item.digest))
    if way == "thaw":
        assert thaw_models(["a"], store=store).faults == ()
        assert Path(store.blob_path(item.digest)).read_bytes() == layer("x", weights(1))
        assert quarantined(store) == 1
    else:
        assert freeze_models(["a"], store=store).faults == ()
        assert set(forms_of(store, "a").values()) == {"cold"}
    assert_whole(store)
