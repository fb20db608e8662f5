from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import ArchiveDamaged, BlobstoreError, ModelNotFound, NotFound
from blobstore.manifests import media_types
from blobstore.manifests.check import MAX_CONFIG_SIZE
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.format import Kind
from blobstore.operations.archive.reader import layers_by_blob, open_archive
from blobstore.store.local import LocalStore
from tests.support.archives import Parts, archive, model_archive, packed_family, raw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE, TUNED = Reference.parse("base"), Reference.parse("tuned")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("family")
    return packed_family(LocalStore(folder / "store"), folder / "family.bsar")


@pytest.fixture
def path(tmp_path: Path, family: bytes) -> Path:
    path = tmp_path / "family.bsar"
    path.write_bytes(family)
    return path


def refused(path: Path, data: bytes, *names: Reference) -> str:
    path.write_bytes(data)
    with pytest.raises(ArchiveDamaged) as caught, open_archive(path) as bundle:
        bundle.models(names)
    message = str(caught.value)
    assert message.startswith(f"archive '{path}': ")
    return message


def test_tells_names_and_models(path: Path) -> None:
    with open_archive(path) as bundle:
        assert bundle.references == (BASE, TUNED)
        models = bundle.models()
        assert [model.reference for model in models] == [BASE, TUNED]
        assert all(Manifest.from_bytes(model.data) == model.manifest for model in models)
        assert bundle.models([TUNED]) == models[1:]


def test_tells_which_blobs_models_need(path: Path) -> None:
    with open_archive(path) as bundle:
        members = bundle.bundle.members
        for model in bundle.models():
            numbers = bundle.needed([model])
            assert {members[number].digest for number in numbers} == {
                blob.digest for blob in model.manifest.blobs
            }
        everything = bundle.needed(bundle.models())
        assert everything == [
            number for number, item in enumerate(members) if item.kind != Kind.MANIFEST
        ]
        assert [Digest.of(bundle.read(number)) for number in everything] == [
            members[number].digest for number in everything
        ]


def test_messages_name_model_and_layer(path: Path) -> None:
    with open_archive(path) as bundle:
        models = bundle.models([TUNED])
        layers = layers_by_blob(models, bundle.bundle)
        layer = models[0].manifest.layers[0]
        assert layers(bundle.bundle.blobs[layer.digest]) == "tuned:latest: layer 'l0'"
        others = set(bundle.bundle.blobs.values()) - set(bundle.needed(models))
        assert {layers(number) for number in others} == {"a blob that others are coded by"}


def test_rejects_a_name_that_is_not_there(path: Path) -> None:
    with (
        open_archive(path) as bundle,
        pytest.raises(ModelNotFound, match="no model 'other:latest' in the archive"),
    ):
        bundle.models([Reference.parse("other")])


def test_rejects_what_is_no_file(tmp_path: Path) -> None:
    for path, error in (
        (tmp_path / "none.bsar", NotFound),
        (tmp_path, BlobstoreError),
        (tmp_path / "none" / "x.bsar", NotFound),
    ):
        with pytest.raises(error), open_archive(path):
            pass
    os.mkfifo(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with (
        pytest.raises(BlobstoreError, match="is not a regular file"),
        open_archive(tmp_path / "pipe"),
    ):
        pass


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04" + bytes(100)])
def test_rejects_other_files(tmp_path: Path, data: bytes) -> None:
    refused(tmp_path / "x.bsar", data)


@pytest.mark.parametrize(
    "name",
    [
        "m",
        "library/m:latest",
        "registry.ollama.ai/library/m",
        "registry.ollama.ai/library/..:latest",
        "../../../etc:latest",
        "/a/b:c",
        "a//b:c",
        "a/b/c/d:e",
        "h/n/m:t\n",
        "h/n/-m:t",
    ],
)
def test_rejects_names_that_are_not_full_or_lead_elsewhere(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path / "x.bsar", model_archive({"a": b"blob"}, name))
    assert "is not the full name of a model" in message
    assert message.isprintable()


def test_rejects_names_that_differ_in_case_only(path: Path, family: bytes) -> None:
    parts = Parts(family)
    parts.names = [("registry.ollama.ai/library/M:t", 0), ("registry.ollama.ai/library/m:t", 1)]
    assert "two names differ in case only" in refused(path, parts.data())


def changed_manifest(family: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    parts = Parts(family)
    number = parts.number(Kind.MANIFEST)
    value = json.loads(parts.stored[number])
    change(value)
    data = json.dumps(value, separators=(",", ":")).encode()
    parts.put(number, data)
    parts.change(number, size=len(data), digest=Digest.of(data))
    return parts.data()


def test_rejects_a_manifest_that_breaks_its_format(path: Path, family: bytes) -> None:
    message = refused(path, changed_manifest(family, lambda value: value.pop("layers")))
    assert "model 'base:latest': $.layers" in message


def test_rejects_a_model_whose_blob_is_not_there(path: Path, family: bytes) -> None:
    def change(value: dict[str, Any]) -> None:
        value["layers"][1]["digest"] = f"sha256:{'0' * 64}"

    message = refused(path, changed_manifest(family, change))
    assert f"layer 'l1': blob sha256:{'0' * 64} is not in the archive" in message


def test_rejects_a_model_whose_blob_has_another_size(path: Path, family: bytes) -> None:
    def change(value: dict[str, Any]) -> None:
        value["layers"][1]["size"] += 1

    assert "layer 'l1': blob sha256:" in refused(path, changed_manifest(family, change))


def test_rejects_a_manifest_that_its_config_does_not_know(tmp_path: Path) -> None:
    data = model_archive({"a": b"blob", "b": b"other"})

    def change(value: dict[str, Any]) -> None:
        value["layers"].reverse()

    message = refused(tmp_path / "x.bsar", changed_manifest(data, change))
    assert "the manifest was changed since it was written" in message


def test_rejects_blobs_that_no_model_needs_where_all_is_read(path: Path, family: bytes) -> None:
    parts = Parts(family)
    parts.add(raw(b"stowaway"), b"stowaway")
    assert "no model needs blob sha256:" in refused(path, parts.data())
    with open_archive(path) as bundle:
        bundle.models([BASE])


def test_what_is_stored_is_hashed_before_it_is_decoded(path: Path, family: bytes) -> None:
    with open_archive(path) as bundle:
        deltas = [n for n, item in enumerate(bundle.bundle.members) if item.kind == Kind.DELTA]
        base = bundle.bundle.members[deltas[0]].base
        assert base is not None
        begin, end = bundle.bundle.place(base)
    data = bytearray(family)
    data[(begin + end) // 2] ^= 1
    path.write_bytes(data)
    for number in (base, deltas[0]):
        with (
            pytest.raises(ArchiveDamaged, match=f"member {base}\\) is altered"),
            open_archive(path) as bundle,
        ):
            bundle.read(number)


def test_a_file_that_is_cut_short_while_it_is_read_is_told(path: Path) -> None:
    with pytest.raises(ArchiveDamaged, match="cut short at byte"), open_archive(path) as bundle:
        numbers = bundle.needed(bundle.models())
        os.truncate(path, bundle.bundle.place(numbers[-1])[0] + 5)
        bundle.read(numbers[-1])


def test_a_disk_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_archive(path) as bundle:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(BlobstoreError, match="at byte 8: Input/output error"):
            bundle.models()


def test_a_path_through_a_file_is_told(path: Path) -> None:
    with (
        pytest.raises(BlobstoreError, match="cannot read .*: Not a directory"),
        open_archive(path / "x"),
    ):
        pass


def test_a_config_that_is_too_large_says_nothing_of_layers(tmp_path: Path) -> None:
    config = b"{" + b" " * MAX_CONFIG_SIZE + b"}"
    described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
    manifest = Manifest(config=described, layers=()).to_bytes()
    members = [raw(manifest, Kind.MANIFEST), raw(config)]
    path = tmp_path / "x.bsar"
    path.write_bytes(archive(members, [manifest, config], [("h/n/m:t", 0)]))
    with open_archive(path) as bundle:
        assert [model.data for model in bundle.models()] == [manifest]
