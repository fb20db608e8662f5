from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import BlobId
from blobstore.errors import BlobMissing, InvalidManifest
from blobstore.manifests.reference import Reference
from blobstore.operations.describe.find import FoundPlace
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore
from tests.support.frozen import layers, put


@pytest.fixture
def store(store: LocalStore) -> LocalStore:
    """A store with two models that share a blob."""
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    return store


def found(store: LocalStore, text: str) -> list[tuple[str, str, str]]:
    places = blobstore.find(text, store=store).places
    return [(str(place.reference), place.kind, place.name) for place in places]


def test_finds_tensors_by_name_and_glob(store: LocalStore) -> None:
    assert found(store, "x") == [("a:latest", "tensor", "x"), ("b:latest", "tensor", "x")]
    assert found(store, "[yz]") == [("a:latest", "tensor", "y"), ("b:latest", "tensor", "z")]
    assert found(store, "absent") == []


def test_finds_blobs_and_models_by_the_start_of_a_digest(store: LocalStore) -> None:
    blob = layers(store, "a")["x"].digest
    expected = [("a:latest", "blob", "x"), ("b:latest", "blob", "x")]
    assert found(store, blob.hex[:12]) == found(store, str(blob)) == expected
    ident = copy_model("a", "c", store=store).digest
    expected = [("a:latest", "model", ""), ("c:latest", "model", "")]
    assert found(store, ident.short) == expected


def test_finds_models_by_a_part_of_their_names_in_any_case(store: LocalStore) -> None:
    copy_model("a", "team/Tiny-Chat:v1", store=store)
    assert found(store, "tiny") == [("team/Tiny-Chat:v1", "model", "")]
    assert found(store, "TEAM/") == [("team/Tiny-Chat:v1", "model", "")]
    assert found(store, "*-Chat:*") == [("team/Tiny-Chat:v1", "model", "")]
    assert found(store, "*-chat:v2") == []


def test_reports_manifests_that_cannot_be_read(store: LocalStore) -> None:
    store.manifest_path(Reference.parse("a")).write_bytes(b"{")
    result = blobstore.find("x", store=store)
    assert [str(place.reference) for place in result.places] == ["b:latest"]
    assert [type(error) for error in result.errors] == [InvalidManifest]


def test_reads_the_header_of_a_blob_that_models_share_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("c", "d", "e"):
        copy_model("a", name, store=store)
    read: list[object] = []
    headers = store.read_headers

    def noted(blobs: Iterable[BlobId]) -> object:
        read.extend(blobs := list(blobs))
        return headers(blobs)

    monkeypatch.setattr(store, "read_headers", noted)
    assert found(store, "y") == [(f"{name}:latest", "tensor", "y") for name in "acde"]
    assert len(read) == 1
    assert found(store, "[xyz]")[:2] == [("a:latest", "tensor", "x"), ("a:latest", "tensor", "y")]
    assert len(read) == 1 + 3


def test_reports_a_missing_blob_for_each_model_that_needs_it(store: LocalStore) -> None:
    Path(store.blob_path(layers(store, "a")["x"].digest)).unlink()
    result = blobstore.find("[xz]", store=store)
    assert [str(place.reference) for place in result.places] == ["b:latest"]
    assert [type(error) for error in result.errors] == [BlobMissing] * 2
    assert [str(error).partition(": ")[0] for error in result.errors] == [
        "model a:latest",
        "model b:latest",
    ]


def test_parses_only_manifests_that_have_a_blob(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.list(store=store)
    parsed: list[str] = []
    parse = store.parse

    def noted(reference: Reference) -> object:
        parsed.append(str(reference))
        return parse(reference)

    monkeypatch.setattr(store, "parse", noted)
    assert found(store, layers(store, "b")["z"].digest.hex[:16]) == [("b:latest", "blob", "z")]
    assert set(parsed) == {"b:latest"}


@pytest.mark.parametrize("text", ["x", "digest"])
def test_searches_a_model_before_the_next_is_read(store: LocalStore, text: str) -> None:
    if text == "digest":
        text = layers(store, "a")["x"].digest.hex[:16]
    broken = store.manifest_path(Reference.parse("b"))
    seen: list[str] = []

    def add(places: Sequence[FoundPlace]) -> None:
        seen.extend(str(place.reference) for place in places)
        broken.write_bytes(b"{")

    result = blobstore.find(text, store=store, on_found=add)
    assert seen == ["a:latest"]
    assert [type(error) for error in result.errors] == [InvalidManifest]


def test_says_whether_names_have_the_text_in_them(store: LocalStore) -> None:
    put(store, "layered", {"model.norm": 1, "norm": 2})
    absent = blobstore.find("odel.nor", store=store)
    assert (absent.places, absent.has_near) == ((), True)
    assert not blobstore.find("absent", store=store).has_near


def test_parses_only_manifests_that_name_a_layer_of_use(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "c", {"moe.experts.0.up": 1})
    blobstore.list(store=store)
    escaped = store.manifest_path("b")
    escaped.write_bytes(escaped.read_bytes().replace(b'"z"', b'"\\u007a"'))
    parsed: list[str] = []
    parse = store.parse

    def noted(reference: Reference) -> object:
        parsed.append(str(reference))
        return parse(reference)

    monkeypatch.setattr(store, "parse", noted)
    assert found(store, "z") == [("b:latest", "tensor", "z")]
    assert set(parsed) == {"b:latest"}, "its names have escapes"
    assert found(store, "moe.experts.[0-3].up") == [("c:latest", "tensor", "moe.experts.0.up")]
    assert set(parsed) == {"b:latest", "c:latest"}
