from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.cold_blobs.builder import ColdBlobBuilder
from blobstore.core.digest import Digest
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.cold import ColdBlob
from blobstore.store.local import LocalStore
from tests.support.frozen import flip_in_place, forms_of, layer, layers, put, spoil_deltas, tuned
from tests.support.models import add_blobs

CHILD = tuned(10, 1)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": layer("x", CHILD)})
    return store


@pytest.fixture
def base(store: LocalStore) -> Digest:
    return layers(store, "base")["x"].digest


def delta_base(store: LocalStore) -> Digest | None:
    return store.open_cold(layers(store, "child")["x"].digest).base


def assert_whole(store: LocalStore) -> None:
    with blobstore.open("child", store=store, verify="rehash") as model:
        assert model["x"].tobytes() == CHILD


@pytest.mark.parametrize("moment", ["coded", "decoded", "checked"])
def test_no_delta_uses_a_base_that_changes_after_it_was_hashed(
    store: LocalStore, base: Digest, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Once the base was repaired, such a delta would be lost."""
    path = store.blob_path(base)
    whole = Path(path).read_bytes()
    done: list[object] = []

    def harm() -> None:
        if not done:
            flip_in_place(path)
        done.append(None)

    write, checked, check = BlobEncoder.write, ColdBlobBuilder._verify, ColdBlob.check

    def coded(self: BlobEncoder, *arguments: Any) -> Any:
        harm()
        return write(self, *arguments)

    def decoded(self: ColdBlobBuilder, *arguments: Any) -> Any:
        harm()
        return checked(self, *arguments)

    def then(self: ColdBlob, *arguments: Any) -> None:
        check(self, *arguments)
        harm()

    if moment == "coded":
        monkeypatch.setattr(BlobEncoder, "write", coded)
    elif moment == "decoded":
        monkeypatch.setattr(ColdBlobBuilder, "_verify", decoded)
    else:
        monkeypatch.setattr(ColdBlob, "check", then)
    (frozen,) = freeze_models(["child"], store=store, base="base").blobs
    assert done
    assert (frozen.outcome, frozen.base) == ("frozen", None)
    assert forms_of(store, "child") == {"x": "cold"}
    Path(path).write_bytes(whole)
    assert_whole(store)


def test_a_base_that_is_frozen_at_the_same_time_remains_usable(
    store: LocalStore, base: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models(["base"], store=store, keep_hot=True, find_base=False)
    check = ColdBlob.check
    checks: list[object] = []

    def then(self: ColdBlob, *arguments: Any) -> None:
        check(self, *arguments)
        if self.base is not None:
            Path(store.blob_path(base)).unlink(missing_ok=True)
            checks.append(None)

    monkeypatch.setattr(ColdBlob, "check", then)
    (frozen,) = freeze_models(["child"], store=store, base="base").blobs
    assert len(checks) == 2
    assert frozen.base == base == delta_base(store)
    assert_whole(store)


def test_a_delta_that_does_not_decode_is_replaced_and_counted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_deltas(monkeypatch)
    result = freeze_models(["child"], store=store, base="base")
    (frozen,) = result.blobs
    assert (frozen.outcome, frozen.base, result.fallbacks) == ("frozen", None, 1)
    assert list(store.folder("temporary").iterdir()) == []
    assert_whole(store)


def test_a_damaged_base_is_not_used_and_counted(store: LocalStore, base: Digest) -> None:
    flip_in_place(store.blob_path(base))
    result = freeze_models(["child"], store=store, base="base")
    assert (result.blobs[0].outcome, result.blobs[0].base, result.fallbacks) == ("frozen", None, 1)


def test_an_existing_delta_against_a_damaged_base_is_replaced(
    store: LocalStore, base: Digest
) -> None:
    freeze_models(["child"], store=store, base="base", keep_hot=True)
    assert delta_base(store) == base
    flip_in_place(store.blob_path(base))
    (frozen,) = freeze_models(["child"], store=store, base="base").blobs
    assert (frozen.outcome, frozen.base) == ("frozen", None)
    assert_whole(store)


def test_names_the_file_of_a_damaged_blob(store: LocalStore) -> None:
    path = store.blob_path(layers(store, "child")["x"].digest)
    flip_in_place(path)
    frozen = freeze_models(["child"], store=store, base="base")
    assert [item.outcome for item in frozen.blobs] == ["damaged"]
    (fault,) = frozen.faults
    assert f"'{path}' is damaged: its bytes have digest" in str(fault)
    assert list(store.folder("temporary").iterdir()) == []


def test_a_cold_blob_is_synced_before_its_state_is_noted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some file systems, a sync changes the time of the last modification."""
    really_sync, verify = os.fsync, ColdBlobBuilder._verify
    events: list[object] = []

    def sync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        really_sync(descriptor)

    def noting(self: ColdBlobBuilder, *arguments: Any) -> Any:
        encoded = verify(self, *arguments)
        assert encoded is not None
        assert encoded.state is not None
        assert encoded.state.inode in events
        events.append("verified")
        return encoded

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(ColdBlobBuilder, "_verify", noting)
    freeze_models(["child"], store=store)
    assert "verified" in events


def test_a_base_that_never_keeps_still_is_not_used(
    store: LocalStore, base: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = store.blob_path(base), ColdBlob.check
    times: list[int] = []

    def then(self: ColdBlob, *arguments: Any) -> None:
        check(self, *arguments)
        if self.base is not None:
            times.append(len(times))
            os.utime(path, ns=(times[-1], times[-1]))

    monkeypatch.setattr(ColdBlob, "check", then)
    frozen = freeze_models(["child"], store=store, base="base")
    assert [(item.outcome, item.base) for item in frozen.blobs] == [("frozen", None)]
    assert frozen.fallbacks == 1
    assert len(times) > 1
    assert_whole(store)
