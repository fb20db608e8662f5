"""The compressed forms that a server lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.serve import cold_files
from blobstore.serve.cold_files import ColdFiles, cold_version, find_cold_files, is_current
from blobstore.serve.messages import StoredPart
from blobstore.store.local import LocalStore
from tests.support import frozen

KEY = Digest.of(b"the model")


def find(store: LocalStore) -> ColdFiles:
    return find_cold_files(store, store.resolve("one").blobs, KEY)


@pytest.fixture
def cold(store: LocalStore) -> LocalStore:
    frozen.put(store, "one", {"a": 1, "b": 2})
    freeze_models(["one"], store=store)
    return store


def parts(files: ColdFiles) -> list[StoredPart]:
    every = (part for content in files.contents for part in content.parts)
    return [part for part in every if isinstance(part, StoredPart)]


def test_a_store_without_cold_blobs_lists_none(store: LocalStore) -> None:
    frozen.put(store, "one", {"a": 1})
    assert cold_version(store) is None
    assert find(store) == ColdFiles(None)


def test_every_file_is_listed_with_its_digest(cold: LocalStore) -> None:
    files = find(cold)
    assert files.version == cold_version(cold)
    assert {layer.blob for layer in files.layers} == {
        blob.id for blob in frozen.layers(cold, "one").values()
    }
    for layer in files.layers:
        data = Path(cold.cold_path(layer.blob.digest)).read_bytes()
        assert layer.stored == (Digest.of(data), len(data))


def test_a_file_is_hashed_once(cold: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find(cold)

    def fail(*_: object) -> Digest:
        raise AssertionError("hashed again")

    monkeypatch.setattr(Digest, "of_pieces", fail)
    assert find(cold).layers == files.layers


def test_a_damaged_note_is_made_again(cold: LocalStore) -> None:
    files = find(cold)
    cold.write_note(cold_files._NOTE, KEY, b'{"a": [[1], "x"]}')
    assert find(cold).layers == files.layers


def test_a_file_that_was_replaced_is_another(cold: LocalStore) -> None:
    before = find(cold)
    assert all(is_current(part) for part in parts(before))
    thaw_models(["one"], store=cold)
    freeze_models(["one"], store=cold)
    after = find(cold)
    assert len(after.layers) == len(before.layers)
    assert before.version != after.version
    assert not any(is_current(part) for part in parts(before))


def test_a_damaged_file_is_left_out(cold: LocalStore) -> None:
    one = frozen.layers(cold, "one")["a"]
    path = Path(cold.cold_path(one.digest))
    path.chmod(0o600)
    path.write_bytes(b"?" * 99)
    assert {layer.blob for layer in find(cold).layers} == {frozen.layers(cold, "one")["b"].id}
