from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.cold_blobs import searched_models
from blobstore.cold_blobs.searched_models import SearchedModels
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from blobstore.store.reachability import ReachableBlobs
from tests.support.frozen import put
from tests.support.models import add_blob

ONE = Reference.parse("run:15")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store of a large family, the oldest of which is step 9, and models of other layouts."""
    monkeypatch.setattr(searched_models, "_FAMILY", 4)
    monkeypatch.setattr(searched_models, "_CHOSEN", 1)
    store = LocalStore(tmp_path / "store")
    for step in range(20):
        put(store, f"run:{step}", {"x": step, "y": 100 if step in (5, 6) else 200 + step})
        os.utime(store.manifest_path(f"run:{step}"), (2**30 + step + 50 * (step != 9),) * 2)
    put(store, "similar", {"x": 500, "y": 501, "z": 502})
    put(store, "unlike", {"a": 1, "b": 2})
    return store


def found(store: LocalStore, *, is_useful: bool = False, with_similar: bool = True) -> set[str]:
    reachable = ReachableBlobs(store)
    reachable.update()
    chosen = {ONE: store.resolve(ONE)}
    models = SearchedModels(store, reachable).find(
        chosen, lambda blob: is_useful and blob.name == "a", with_similar=with_similar
    )
    assert all(models[name] == store.resolve(name) for name in models)
    return {f"{name.model}:{name.tag}" for name in models}


def test_of_a_large_family_the_oldest_the_next_and_the_most_shared_are_considered(
    store: LocalStore,
) -> None:
    some = {"run:9", "run:5", "run:14", "run:15", "run:16"}
    assert found(store) >= some | {"similar:latest"}
    assert len(found(store)) <= len(some) + 3


def test_models_with_blobs_that_may_be_of_use_are_all_considered(store: LocalStore) -> None:
    assert "unlike:latest" not in found(store)
    assert "unlike:latest" in found(store, is_useful=True)


def test_models_that_are_only_similar_need_not_be_considered(store: LocalStore) -> None:
    assert found(store, with_similar=False) == {"run:15"}


def test_a_model_that_a_card_names_is_considered(store: LocalStore) -> None:
    assert "run:17" not in found(store)
    blob = add_blob(store, b"---\nbase_model: org/Run-17\n---\n")
    manifest = store.resolve(ONE)
    card = Descriptor(media_types.FILE, blob.digest, blob.size, "README.md")
    store.names.publish(replace_any(ONE), replace(manifest, layers=(*manifest.layers, card)))
    assert "run:17" in found(store)


def test_freeze_of_one_model_reads_few_manifests(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze_models(["similar"], store=store, dry_run=True)  # so that the file of references has all
    read = set()
    real = LocalStore.read_manifest

    def counted(self: LocalStore, reference: str | Reference) -> bytes:
        read.add(str(reference))
        return real(self, reference)

    monkeypatch.setattr(LocalStore, "read_manifest", counted)
    freeze_models([ONE], store=store)
    assert len(read) < 10
