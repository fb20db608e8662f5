from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from blobstore.core import files
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobMissing, NameConflict, NameTaken, StoreError
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store import names
from blobstore.store.fetched import given_name
from blobstore.store.local import LocalStore
from blobstore.store.names import (
    ABSENT,
    UNREADABLE,
    NameUpdate,
    NewModel,
    NewSignature,
    replace_any,
)
from blobstore.store.spellings import Spellings
from tests.support import frozen

NAME = Reference.parse("m")


def model(store: LocalStore, number: int) -> tuple[Digest, NewModel]:
    """Return a model whose blobs are in the store, and which gets the name."""
    frozen.put(store, f"source-{number}", {"own": number})
    data, manifest = store.parse(f"source-{number}")
    return Digest.of(data), NewModel(replace_any(NAME), data, manifest.blobs)


@pytest.mark.parametrize("old", [ABSENT, UNREADABLE, "other", "before", "new"])
@pytest.mark.parametrize("now", [ABSENT, UNREADABLE, "before", "new"])
def test_a_name_is_given_if_it_is_what_was_seen_or_free_or_right_already(
    store: LocalStore, old: Any, now: Any
) -> None:
    digests = {}
    for number, key in enumerate(("other", "before", "new")):
        digests[key], found = model(store, number)
        if key == now:
            store.names.install([found])
    if now is UNREADABLE:
        store.manifest_path(NAME).parent.mkdir()
        store.manifest_path(NAME).symlink_to("nowhere")
    before = store.names.version(NAME)
    assert before == digests.get(now, now)
    update = NameUpdate(NAME, digests.get(old, old))
    if now in (ABSENT, "new", old):
        store.names.install([found._replace(update=update)])
        assert store.names.version(NAME) == digests["new"]
    else:
        with pytest.raises(NameTaken, match="'m:latest' was given to another model in the mean"):
            store.names.install([found._replace(update=update)])
        assert store.names.version(NAME) == before


def test_the_error_says_both_models_and_what_to_do(store: LocalStore) -> None:
    first, new = model(store, 1)
    store.names.install([new])
    _, other = model(store, 2)
    with pytest.raises(NameTaken) as error:
        store.names.install([other._replace(update=NameUpdate(NAME, ABSENT))])
    assert f"it was free and is {first.short} now; look at that model" in str(error.value)


def test_a_model_that_is_not_the_expected_one_gets_no_name(store: LocalStore) -> None:
    first, _ = model(store, 1)
    _, other = model(store, 2)
    update = replace_any(NAME).to(first)
    assert update.to(first) == update.to(None) == update
    with pytest.raises(BlobDamaged, match=f"{first.short} was expected"):
        store.names.install([other._replace(update=update)])
    assert not store.has_model(NAME)


def test_of_several_models_none_is_named_if_one_cannot_be(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old = model(store, 1)
    store.names.install([old])
    _, new = model(store, 2)
    added = new._replace(update=replace_any("added"))
    absent = new.blobs[0]._replace(digest=Digest.of(b"in no store"))
    missing = new._replace(update=replace_any("x"), blobs=[absent])
    with pytest.raises(BlobMissing):
        store.names.install([new, added, missing])
    write, written = files.write_file, []

    def full(path: Any, *rest: Any, **options: Any) -> None:
        written.append(path.name)
        if len(written) == 4:  # of the fourth name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest, **options)

    note = store.folder("pulled") / given_name(NAME)
    note.parent.mkdir()
    note.touch()
    monkeypatch.setattr(names, "write_file", full)
    last = new._replace(update=replace_any("z"))
    with pytest.raises(StoreError, match="no space left"):
        store.names.install([new, added, last, last._replace(update=replace_any("zz"))])
    assert len(written) > 3
    assert store.names.version(NAME) == before
    assert not any(store.has_model(name) for name in ("added", "z", "zz"))
    assert note.exists(), "it is still the server's"
    monkeypatch.undo()
    store.names.install([new])
    assert not note.exists()


def test_signatures_are_kept_before_the_first_name(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, new = model(store, 1)
    seen = []

    def check(reference: Reference) -> None:
        seen.append((store.has_model(NAME), list(store.signatures(digest))))

    monkeypatch.setattr(store.names, "check_name", check)
    store.names.install([new], [NewSignature(digest, b"signature", is_verified=True)])
    assert seen == [(False, [b"signature"])]


def test_a_name_that_has_the_model_is_synced_and_not_written_again(store: LocalStore) -> None:
    _, new = model(store, 1)
    store.names.install([new])
    before = os.stat(store.manifest_path(NAME))
    assert store.names.install([new]) == [None]
    assert os.stat(store.manifest_path(NAME)) == before
    assert not list(store.names.former(NAME))


@pytest.mark.parametrize(
    ("existing", "name"),
    [("org/a", "Org/b"), ("h/org/a:v", "H/Org/b:v"), ("org/a", "org/b"), ("a:v", "a:w")],
)
def test_names_with_parents_that_differ_in_case_are_two_names(
    store: LocalStore, existing: str, name: str
) -> None:
    frozen.put(store, existing, {"own": 1})
    frozen.put(store, name, {"own": 2})
    assert store.read_manifest(existing) != store.read_manifest(name)


@pytest.mark.parametrize("name", ["Org/m", "org/M", "Org/M:w", "org/m:V", "ORG/M:v"])
def test_a_repository_has_one_spelling_and_so_has_a_tag_in_it(store: LocalStore, name: str) -> None:
    frozen.put(store, "org/m:v", {"own": 1})
    frozen.put(store, "ORG/other", {"own": 2})
    with pytest.raises(NameConflict, match="differs only in case from the existing '"):
        frozen.put(store, name, {"own": 3})
    frozen.put(store, "org/m:v", {"own": 3})


def test_the_first_tag_that_comes_during_the_check_is_in_nobodys_way(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen.put(store, "org/m:v", {"own": 1})
    monkeypatch.setattr(Spellings, "has_tags", lambda *_: False)  # what it was a moment before
    store.names.check_name("org/m:w")


def test_a_folder_without_names_is_in_nobodys_way(store: LocalStore) -> None:
    store.manifest_path("Org/M").parent.mkdir(parents=True)
    frozen.put(store, "org/m", {"own": 1})


def test_a_name_that_exists_stays_usable_next_to_one_that_differs_in_case(
    store: LocalStore,
) -> None:
    """Other programs may have given both."""
    frozen.put(store, "org/m", {"own": 1})
    other = store.manifest_path("Org/M")
    other.parent.mkdir(parents=True)
    other.write_bytes(store.read_manifest("org/m"))
    frozen.put(store, "org/m", {"own": 2})
    assert store.read_manifest("org/m") != other.read_bytes()
    assert isinstance(store.resolve("Org/M"), Manifest)
