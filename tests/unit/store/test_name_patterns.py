from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidReference, ModelNotFound, UsageError
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from blobstore.store.name_patterns import named_models, select_references
from tests.support.models import add_blobs, blob

A, B = map(Reference.parse, "ab")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for name in "ba":
        add_blobs(store, name, {"x": blob(("x", "U8", (3,), name.encode() * 3))})
    return store


def test_functions_take_one_name_or_several_and_globs(store: LocalStore) -> None:
    other = Reference.parse("other")
    assert named_models(store, "other") == named_models(store, other) == (other,)
    assert named_models(store, ["other", B, "b:latest", "*"]) == (other, B, A)
    assert named_models(store, iter(["?"])) == (A, B)
    assert named_models(store, ()) == ()
    for name in ("c*", ["a", "c*"]):
        with pytest.raises(ModelNotFound, match=r"no model matches 'c\*'"):
            named_models(store, name)
    with pytest.raises(InvalidReference):
        named_models(store, "a b")


def test_selects_by_name_glob_and_start_of_the_digest(store: LocalStore) -> None:
    a = Digest.of(store.read_manifest(A)).hex

    assert select_references(store, ["b", "a", "b"]) == [B, A]
    assert select_references(store, ["*"]) == [A, B]
    assert select_references(store, ["[b]"]) == [B]
    assert select_references(store, [a[:4], f"sha256:{a}"]) == [A]
    assert select_references(store, []) == []


def test_a_name_wins_over_a_digest(store: LocalStore) -> None:
    start = Digest.of(store.read_manifest(A)).hex[:6]
    name = Reference.parse(start)
    add_blobs(store, name.model, {"x": blob(("x", "U8", (1,), b"?"))})

    assert select_references(store, [start]) == [name]


def test_an_unreadable_manifest_can_be_selected_by_name(store: LocalStore) -> None:
    name = Reference.parse("abcd")
    store.manifest_path(name).parent.mkdir()
    store.manifest_path(name).write_bytes(b"{")

    assert select_references(store, ["abcd", "abc?"]) == [name]


def test_selecting_names_that_do_not_exist_leaves_the_error_to_their_use(store: LocalStore) -> None:
    assert select_references(store, ["c", "0000"]) == [
        Reference.parse("c"),
        Reference.parse("0000"),
    ]
    with pytest.raises(ModelNotFound, match=r"no model matches 'c\*'"):
        select_references(store, ["c*"])
    with pytest.raises(InvalidReference):
        select_references(store, ["a/"])


def test_ambiguous_digests_are_refused(store: LocalStore) -> None:
    data = store.read_manifest(A)
    store.manifest_path("c").parent.mkdir()
    store.manifest_path("c").write_bytes(data)
    start = Digest.of(data).hex[:8]

    assert select_references(store, [start]) == [A]
    only = Digest.of(store.read_manifest(B)).hex[:8]
    assert select_references(store, [only], needs_name=True) == [B]
    with pytest.raises(UsageError, match="is the ID of several names: 'a:latest', 'c:latest'"):
        select_references(store, [start], needs_name=True)


def test_a_start_of_several_digests_is_refused(store: LocalStore) -> None:
    found: dict[str, bytes] = {}
    for number in count():
        data = b"%d" % number
        start = Digest.of(data).hex[:4]
        if start in found:
            break
        found[start] = data
    for name, content in (("c", data), ("d", found[start])):
        store.manifest_path(name).parent.mkdir()
        store.manifest_path(name).write_bytes(content)
    with pytest.raises(UsageError, match="is the start of several IDs: 'c:latest', 'd:latest'"):
        select_references(store, [start])
