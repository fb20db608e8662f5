"""Space for arriving models is made as they arrive."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.manifests.media_types import SOURCE
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import import_source
from blobstore.operations.create.import_options import ImportOptions
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.history import restore_model
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.serve import cache_limit
from blobstore.serve.cache_limit import CacheLimit
from blobstore.serve.library import Library
from blobstore.serve.pulled import Origin
from blobstore.serve.refusal import Refusal
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
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
            reference = Reference.parse(source.repository)
            import_source(source, reference, store, ImportOptions(), started=0.0)
    library.pulled.touch(Origin("org/b", "1" * 40))
    return CacheLimit(library, MOST)


def names(store: LocalStore) -> list[str]:
    return [reference.model for reference in store.references()]


def test_nothing_is_removed_for_bytes_that_are_only_listed(
    limit: CacheLimit, store: LocalStore
) -> None:
    limit.reserve("new", MOST)
    assert names(store) == ["a", "b"]
    limit.arrived("new", 100)
    assert names(store) == ["a", "b"], "there is space for so few"
    limit.arrived("new", SIZE // 2)
    assert names(store) == ["b"]
    limit.arrived("new", SIZE - 10_000)
    assert names(store) == ["b"]
    limit.arrived("new", 2 * SIZE)
    assert names(store) == []


def test_a_model_that_ends_early_gives_its_space_back(limit: CacheLimit, store: LocalStore) -> None:
    limit.reserve("liar", MOST)
    limit.arrived("liar", SIZE // 4)
    limit.release("liar")
    limit.arrived("liar", MOST)
    limit.reserve("new", SIZE // 2)
    limit.arrived("new", SIZE // 2)
    assert names(store) == ["a", "b"]


def test_models_that_are_in_use_by_then_stay_until_the_next_arrives(
    limit: CacheLimit, store: LocalStore
) -> None:
    limit.reserve("new", MOST)
    ask(limit._library, "/org/a/resolve/main/config.json")
    limit.arrived("new", MOST)
    assert names(store) == ["a"]
    limit.release("new")


def test_what_is_listed_counts_for_the_next_model(limit: CacheLimit, store: LocalStore) -> None:
    limit.reserve("new", 2 * SIZE)
    with pytest.raises(Refusal) as caught:
        limit.reserve("other", 2 * SIZE)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert names(store) == ["a", "b"]


def test_a_model_that_cannot_get_space_is_refused_before_it_arrives(
    limit: CacheLimit, store: LocalStore
) -> None:
    with pytest.raises(Refusal) as caught:
        limit.reserve("new", MOST + 1)
    assert caught.value.status == HTTPStatus.INSUFFICIENT_STORAGE
    ask(limit._library, "/org/b/resolve/main/config.json")
    with pytest.raises(Refusal) as caught:
        limit.reserve("new", MOST)
    assert caught.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert names(store) == ["a", "b"]


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


def test_a_copy_of_a_restricted_model_keeps_the_record(
    limit: CacheLimit, store: LocalStore
) -> None:
    for name in "ab":
        copy_model(f"org/{name}", f"copy/{name}", store=store)
        remove_models([f"org/{name}"], store=store)
    limit._pulled.note_public("org/a", is_public=False)
    limit.forget_removed()
    assert [origin.repository for origin in limit._pulled.all()] == ["org/a"]
    remove_models(["copy/a"], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    limit.forget_removed()
    assert limit._pulled.all() == []


def test_a_restricted_model_that_can_be_restored_keeps_its_record(
    limit: CacheLimit, store: LocalStore
) -> None:
    limit._pulled.note_public("org/a", is_public=False)
    remove_models(["org/a", "org/b"], store=store)
    limit.forget_removed()
    restore_model("org/a", store=store)
    assert [origin.repository for origin in limit._pulled.all()] == ["org/a"]
    assert ask(limit._library, "/org/a/resolve/main/config.json").status == HTTPStatus.NOT_FOUND


def test_a_model_that_became_restricted_before_it_is_removed_keeps_the_record_of_its_copy(
    limit: CacheLimit, store: LocalStore
) -> None:
    copy_model("org/a", "copy/a", store=store)
    removed = limit._oldest(0)[0][0]
    limit._pulled.note_public("org/a", is_public=False)
    limit._remove(*removed)
    assert names(store) == ["a", "b"]
    assert limit._pulled.restricted() == {"org/a"}
