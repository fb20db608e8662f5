"""Space for arriving models is made as they arrive."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core import capacity
from blobstore.errors import StoreError
from blobstore.manifests.media_types import SOURCE
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import import_source
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.history import restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.planning.import_options import ImportOptions
from blobstore.serve import cache_limit
from blobstore.serve.arriving_file import Claim, max_files
from blobstore.serve.cache_limit import CacheLimit
from blobstore.serve.commits import Commits
from blobstore.serve.library import Library
from blobstore.serve.pulled import Origin
from blobstore.serve.refusal import Refusal
from blobstore.sources.open import open_source
from blobstore.store.eviction import choose_evicted
from blobstore.store.fetched import mark_of
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import write_folder
from tests.support.serve import ask

COUNT = 10_000
SIZE = 4 * COUNT
"""Bytes of the weights of a model; the other files have far fewer."""
MOST = 3 * SIZE


@pytest.fixture
def limit(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheLimit:
    """A limit for a store with two fetched models, of which ``org/b`` was used last."""
    monkeypatch.setattr(cache_limit, "_STEP", 1)
    library = Library(store)
    for number, name in enumerate("ab"):
        weights = np.full(COUNT, number, np.float32)
        source: Any = open_source(write_folder(tmp_path / name, {"weight": weights}))
        source.repository, source.commit = f"org/{name}", str(number) * 40
        library.pulled.keep(Origin(source.repository, source.commit), is_public=True)
        with contextlib.closing(source):
            mark = mark_of((source.repository, source.commit))
            import_source(source, replace_any(source.repository), store, ImportOptions(), mark=mark)
        library.pulled.names.giving(Reference.parse(source.repository))
    library.pulled.touch(Origin("org/b", "1" * 40))
    return CacheLimit(library, MOST)


def names(store: LocalStore) -> list[str]:
    return [reference.model for reference in store.references()]


def claimed(limit: CacheLimit, size: int, name: str = "new") -> Claim:
    claim = limit.claim(name)
    claim.extend(size)
    return claim


def test_nothing_is_removed_for_bytes_that_are_only_listed(
    limit: CacheLimit, store: LocalStore
) -> None:
    claim = claimed(limit, MOST)
    assert names(store) == ["a", "b"]
    claim.spend(100)
    assert names(store) == ["a", "b"], "there is space for so few"
    claim.spend(SIZE // 2)
    assert names(store) == ["b"]
    claim.spend(SIZE // 2 - 10_000)
    assert names(store) == ["b"]
    claim.spend(SIZE)
    assert names(store) == []


def test_a_model_that_ends_early_gives_its_space_back(limit: CacheLimit, store: LocalStore) -> None:
    claim = claimed(limit, MOST)
    claim.spend(SIZE // 4)
    claim.release()
    claimed(limit, SIZE // 2).spend(SIZE // 2)
    assert names(store) == ["a", "b"]


def test_no_more_bytes_are_spent_than_were_claimed(limit: CacheLimit) -> None:
    claim = limit.claim("new")
    with pytest.raises(StoreError, match="more bytes arrive"):
        claim.spend(1)
    claim.extend(10)
    claim.extend(10)
    claim.spend(20)
    with pytest.raises(StoreError, match="more bytes arrive"):
        claim.spend(1)


def test_models_that_nobody_reads_any_more_make_space_for_the_first_who_needs_it(
    limit: CacheLimit, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_limit, "IDLE_SECONDS", 0)
    for name in names(store):  # from then on, this process has a lease of their blobs
        assert ask(limit._library, f"/org/{name}/resolve/main/config.json").status == 200
    claimed(limit, MOST).spend(MOST)
    assert names(store) == []


def test_models_that_are_in_use_by_then_stay_until_the_next_arrives(
    limit: CacheLimit, store: LocalStore
) -> None:
    claim = claimed(limit, MOST)
    ask(limit._library, "/org/a/resolve/main/config.json")
    claim.spend(MOST)
    assert names(store) == ["a"]


def test_a_model_makes_space_for_another_that_has_some_of_its_blobs(
    limit: CacheLimit, store: LocalStore
) -> None:
    """The rest goes when that has arrived, and does not need it."""
    claim = claimed(limit, MOST)
    blobs = {one.digest for one in store.resolve("org/a").blobs}
    weights = max(blobs, key=lambda one: Path(store.blob_path(one)).stat().st_size)
    with store.lease() as lease:
        lease.hold(blobs)
        claim.spend(MOST)
        assert names(store) == ["a"], "another process uses it"
    claim.release()
    claim = claimed(limit, MOST)
    with store.lease() as lease:
        lease.hold(blobs - {weights})
        claim.spend(MOST)
        assert names(store) == []
        left = {one for one in blobs if Path(store.blob_path(one)).exists()}
        assert left == blobs - {weights}
    claim.release()
    assert not any(Path(store.blob_path(one)).exists() for one in blobs), "nobody needs them now"


def test_what_is_claimed_counts_for_the_next_model(limit: CacheLimit, store: LocalStore) -> None:
    claimed(limit, 2 * SIZE)
    with pytest.raises(Refusal) as caught:
        claimed(limit, 2 * SIZE, "other")
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert names(store) == ["a", "b"]


def test_what_is_claimed_counts_for_the_free_space_of_the_next_model(
    limit: CacheLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = CacheLimit(limit._library, None)
    free = shutil.disk_usage(limit._store.root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    claim = claimed(limit, 600)
    with pytest.raises(StoreError, match="not enough space"):
        claimed(limit, 600, "other")
    claim.spend(300)  # which are no longer free
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=700))
    claimed(limit, 400, "other")
    limit.claim("third").extend(300, 300)  # they lie there
    claim.release()
    claimed(limit, 300, "fourth")


@pytest.mark.parametrize("more", [1, 40])
def test_files_beyond_those_that_may_be_open_are_refused(limit: CacheLimit, more: int) -> None:
    most = max_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    first = limit.claim("first")
    first.extend(0, files=most - 1)
    limit.claim("last").extend(0)
    for number in range(more):
        with pytest.raises(Refusal) as caught:
            limit.claim(f"{number}").extend(0)
        assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    with pytest.raises(Refusal) as caught:
        first.extend(0, files=2)
    assert caught.value.status == HTTPStatus.INSUFFICIENT_STORAGE, "it alone has too many"
    first.release()
    limit.claim("another").extend(0, files=most - 1)


def test_a_process_that_may_open_few_files_fetches_few() -> None:
    assert max_files(-1) == capacity.ARRIVING_FILES.most
    assert max_files(1 << 20) == capacity.ARRIVING_FILES.most
    assert max_files(1024) == 256


def test_a_model_that_cannot_get_space_is_refused_before_it_arrives(
    limit: CacheLimit, store: LocalStore
) -> None:
    with pytest.raises(Refusal) as caught:
        claimed(limit, MOST + 1)
    assert caught.value.status == HTTPStatus.INSUFFICIENT_STORAGE
    claim = claimed(limit, MOST)
    with pytest.raises(Refusal) as caught:
        claim.extend(1)
    assert caught.value.status == HTTPStatus.INSUFFICIENT_STORAGE
    claim.release()
    ask(limit._library, "/org/b/resolve/main/config.json")
    with pytest.raises(Refusal) as caught:
        claimed(limit, MOST)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert names(store) == ["a", "b"]


# Many models


class OneSet(set[str]):
    """A set that is known from its copies."""


def test_the_blobs_of_the_stores_own_models_are_collected_in_one_set(
    limit: CacheLimit, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "mine:v2", "other"):
        blobstore.save({"w": np.zeros(len(name))}, name, store=store)
    monkeypatch.setattr(cache_limit, "set", OneSet, raising=False)
    _, own = limit._versions()
    assert type(own) is OneSet, "it is not copied for each model"
    own_names = [name for name in store.references() if not str(name).startswith("org/")]
    assert own == {blob.digest.hex for name in own_names for blob in store.resolve(name).blobs}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is done with all manifests, and how often one is read for the commit that it was fetched from."""
    counts = Counter[str]()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: object, **options: object) -> Any:
            counts[name] += 1
            return call(*arguments, **options)

        return counted

    for name in ("read_catalog", "remove_blobs"):
        monkeypatch.setattr(cache_limit, name, counting(name, getattr(cache_limit, name)))
    monkeypatch.setattr(Commits, "_source", counting("parsed", Commits._source))
    return counts


def test_each_manifest_is_parsed_once(
    limit: CacheLimit, store: LocalStore, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_limit, "_LOOK_SECONDS", 0.0)
    limit.forget_removed()
    assert calls["parsed"] == 2
    for number in range(3):
        claimed(limit, 1, f"{number}").spend(1)
    copy_model("org/a", "copy", store=store)
    claimed(limit, 1, "last").spend(1)
    assert calls["parsed"] == 3


def test_the_manifests_are_not_looked_at_again_far_from_the_limit(
    limit: CacheLimit, store: LocalStore, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_limit, "_LOOK_SECONDS", 3600.0)
    for number in range(8):
        claimed(limit, 1000, f"{number}").spend(1000)
    assert calls["read_catalog"] == 1
    claim = claimed(limit, 9000, "last")
    claim.spend(9000)
    assert calls["read_catalog"] == 1
    claimed(limit, MOST - 20_000, "too large").spend(SIZE)
    assert calls["read_catalog"] > 1
    assert names(store) == []


def test_the_manifests_are_looked_at_again_after_a_while(
    limit: CacheLimit, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_limit, "_LOOK_SECONDS", 0.0)
    claimed(limit, 1, "a").spend(1)
    claimed(limit, 1, "b").spend(1)
    assert calls["read_catalog"] == 4


def test_models_that_go_together_need_one_look_at_all(
    limit: CacheLimit, store: LocalStore, calls: Counter[str]
) -> None:
    claim = claimed(limit, MOST)
    calls.clear()
    claim.spend(MOST)
    assert names(store) == []
    # One look to choose the models, and one to see which of their records nobody needs any more.
    assert (calls["read_catalog"], calls["remove_blobs"]) == (2, 1)


# Damaged manifests


def damage(store: LocalStore, name: str) -> None:
    path = store.manifest_path(name)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def test_a_damaged_manifest_of_the_operators_keeps_all_blobs_and_stops_no_fetch(
    limit: CacheLimit, store: LocalStore
) -> None:
    copy_model("org/a", "own", store=store)
    damage(store, "own")
    claimed(limit, SIZE // 2).spend(SIZE // 2)
    with pytest.raises(Refusal) as caught:
        claimed(limit, SIZE, "other")
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    repair_models(["own"], store=store)
    claimed(limit, SIZE, "other").spend(SIZE)
    assert names(store) == ["own", "a", "b"], "blobs of the operator's do not count"


def test_a_fetched_model_with_a_damaged_manifest_keeps_no_other_one(
    limit: CacheLimit, store: LocalStore
) -> None:
    blobs = store.resolve("org/a").blobs
    damage(store, "org/b")
    claimed(limit, SIZE).spend(SIZE)
    assert names(store) == ["a", "b"], "there is space"
    claimed(limit, SIZE, "other").spend(SIZE)
    claimed(limit, SIZE, "more").spend(SIZE)
    assert names(store) == []
    assert not any(store.has(blob.digest) for blob in blobs if blob.size >= SIZE)


# What broken fetches have left


def left(limit: CacheLimit, name: str, size: int, used: float) -> Path:
    """Leave a file of a fetch that was broken off, last used ``used`` seconds after the epoch."""
    folder = limit.claim(name).folder
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(bytes(size))
    os.utime(folder, (used, used))
    return folder


def test_files_of_a_fetch_that_was_broken_off_count(limit: CacheLimit, store: LocalStore) -> None:
    folder = left(limit, "old", SIZE, 0)
    limit = CacheLimit(limit._library, MOST)  # after a crash
    claimed(limit, SIZE // 2).spend(SIZE // 2)
    assert names(store) == ["a", "b"], "what was not used for the longest time goes first"
    assert not folder.exists()


def test_files_of_a_fetch_go_after_models_that_were_used_before_it(
    limit: CacheLimit, store: LocalStore
) -> None:
    os.utime(limit._pulled._path("org/a", "0" * 40), (1, 1))
    folder = left(limit, "new", SIZE, 2)
    limit = CacheLimit(limit._library, MOST)
    claimed(limit, SIZE // 2, "other").spend(SIZE // 2)
    assert names(store) == ["b"]
    assert folder.exists()


def test_files_of_a_fetch_that_runs_are_not_removed(limit: CacheLimit, store: LocalStore) -> None:
    folder = left(limit, "old", SIZE, 0)
    limit = CacheLimit(limit._library, MOST)
    limit.claim("old").extend(SIZE, SIZE)
    claimed(limit, SIZE).spend(SIZE // 2)
    assert names(store) == ["b"]
    assert folder.exists()


# Records


@pytest.mark.parametrize("part", ["manifest", "source"])
def test_a_model_that_cannot_be_read_keeps_its_record(
    limit: CacheLimit, store: LocalStore, part: str
) -> None:
    manifest = store.resolve("org/a")
    path = store.manifest_path("org/a")
    if part == "source":
        (layer,) = (one for one in manifest.layers if one.media_type == SOURCE)
        path = Path(store.blob_path(layer.digest))
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    limit.forget_removed()
    path.write_bytes(whole)
    assert limit._pulled.origin(manifest) is not None


@pytest.mark.parametrize("is_public", [True, False])
def test_a_copy_of_a_model_keeps_the_record(
    limit: CacheLimit, store: LocalStore, *, is_public: bool
) -> None:
    copy_model("org/a", "copy/a", store=store)
    remove_models(["org/a", "org/b"], store=store)
    limit._pulled.note_public("org/a", is_public=is_public)
    collect_garbage(store=store, older_than=0)
    limit.forget_removed()
    assert [origin.repository for origin in limit._pulled.all()] == ["org/a"]
    found = ask(limit._library, "/copy/a/resolve/main/config.json").status
    assert found == (HTTPStatus.OK if is_public else HTTPStatus.NOT_FOUND)
    limit._library.release_idle(0)
    remove_models(["copy/a"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    limit.forget_removed()
    assert limit._pulled.all() == []


def test_a_model_that_is_restored_after_its_record_is_gone_is_for_nobody(
    limit: CacheLimit, store: LocalStore, tmp_path: Path
) -> None:
    limit._pulled.note_public("org/a", is_public=False)
    largest = max(store.resolve("org/a").blobs, key=lambda one: one.size)
    remove_models(["org/a"], store=store)
    path = Path(store.blob_path(largest.digest))
    path.rename(tmp_path / "away")
    limit.forget_removed()
    assert [origin.repository for origin in limit._pulled.all()] == ["org/b"]
    (tmp_path / "away").rename(path)
    restore_model("org/a", store=store)
    assert ask(limit._library, "/org/a/resolve/main/config.json").status == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("is_public", [True, False])
def test_a_model_whose_manifest_is_lost_keeps_its_record(
    limit: CacheLimit, store: LocalStore, *, is_public: bool
) -> None:
    limit._pulled.note_public("org/a", is_public=is_public)
    store.manifest_path("org/a").unlink()
    limit.forget_removed()
    repair_models(store=store)
    assert {origin.repository for origin in limit._pulled.all()} == {"org/a", "org/b"}


def test_a_model_that_became_restricted_before_it_is_removed_keeps_the_record_of_its_copy(
    limit: CacheLimit, store: LocalStore
) -> None:
    copy_model("org/a", "copy/a", store=store)
    (removed, *_), _ = limit._oldest(0)
    limit._pulled.note_public("org/a", is_public=False)
    limit._remove([removed])
    assert names(store) == ["a", "b"]
    assert not limit._pulled.is_public("org/a")


def test_a_name_of_the_operators_stays_though_its_commit_was_fetched_under_another(
    limit: CacheLimit, store: LocalStore
) -> None:
    mine = "org/a:mine"
    copy_model("org/a", mine, store=store)
    claimed(limit, MOST - SIZE).spend(MOST - SIZE)
    assert [str(one) for one in store.references()] == [mine]
    assert store.has_blobs(store.resolve(mine).blobs)


def test_a_name_that_the_operator_takes_while_older_models_go_stays(
    limit: CacheLimit, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*args: Any) -> Any:
        chosen = choose_evicted(*args)
        if chosen[0]:
            remove_models(["org/b"], store=store)
            restore_model("org/b", store=store)
        return chosen

    monkeypatch.setattr(cache_limit, "choose_evicted", choose)
    claimed(limit, MOST).spend(MOST)
    assert names(store) == ["b"]
    assert store.has_blobs(store.resolve("org/b").blobs)


def test_the_record_of_a_model_that_is_fetched_again_stays_when_its_space_is_taken(
    limit: CacheLimit, store: LocalStore
) -> None:
    pulled = limit._pulled
    with pulled.held(("org/a", "0" * 40)):
        claimed(limit, MOST).spend(MOST)
        assert names(store) == []
    assert [one.repository for one in pulled.all()] == ["org/a"]
