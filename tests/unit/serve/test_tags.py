"""The names in a store, and what each tag has, with repositories of any size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.pages.write import page_data
from blobstore.serve.library import Library
from blobstore.serve.tags import MANY, Tags
from blobstore.serve.unprepared import NotListed, prepared
from blobstore.serve.visible import Visible
from blobstore.store import references
from blobstore.store.local import LocalStore
from blobstore.store.scan import folders_and_files
from tests.support.serve import ask, body_of, json_of

REPOSITORY = Reference.parse("org/model")


@pytest.fixture
def described() -> list[Reference]:
    return []


@pytest.fixture
def tags(library: Library, described: list[Reference]) -> Tags:
    return Tags(library.store, describer(described))


def describer(described: list[Reference]) -> Callable[[Reference], Iterable[Digest]]:
    def describe(tag: Reference) -> Iterable[Digest]:
        described.append(tag)
        return [made(tag)]

    return describe


def made(tag: Reference) -> Digest:
    return Digest.of(str(tag).encode())


def add_tags(library: Library, count: int) -> list[Reference]:
    """Give ``org/model`` more tags, each of another manifest, with a config that says nothing of the layers."""
    store = library.store
    manifest = store.resolve(REPOSITORY)
    folder = store.manifest_path(REPOSITORY).parent
    added = []
    for number in range(count):
        data = json.dumps({"number": number}).encode()
        config = manifest.config._replace(digest=Digest.of(data), size=len(data))
        Path(store.blob_path(config.digest)).write_bytes(data)
        (folder / f"v{number:05}").write_bytes(replace(manifest, config=config).to_bytes())
        added.append(Reference.parse(f"org/model:v{number:05}"))
    return added


def having(tags: Tags, digest: Digest) -> Sequence[Reference]:
    return prepared(lambda: tags.having(REPOSITORY, digest))


def test_names_are_listed_again_when_their_folder_has_changed(library: Library, tags: Tags) -> None:
    assert prepared(lambda: tags.of(REPOSITORY)) == (REPOSITORY,)
    assert tags.of(REPOSITORY) == (REPOSITORY,)
    copy_model("org/model", "org/model:v2", store=library.store)
    with pytest.raises(NotListed):
        tags.of(REPOSITORY)
    other = Reference.parse("org/model:v2")
    assert prepared(lambda: tags.of(REPOSITORY)) == (REPOSITORY, other)
    assert list(tags.all()) == [REPOSITORY, other]
    remove_models(["org/model", "org/model:v2"], store=library.store)
    assert prepared(lambda: tags.of(REPOSITORY)) == ()
    assert list(tags.all()) == []


def test_an_absent_repository_needs_no_work(tags: Tags) -> None:
    assert tags.of(Reference.parse("nobody/nothing")) == ()
    assert tags.keys(Reference.parse("nobody/nothing")) == {}
    assert tags.having(Reference.parse("nobody/nothing"), Digest.of(b"")) == ()


def test_names_are_found_in_any_case(library: Library, tags: Tags) -> None:
    copy_model("org/model", "Org2/Model-B", store=library.store)
    spelled = prepared(lambda: tags.spelled(Reference.parse("org2/model-b")))
    assert spelled == Reference.parse("Org2/Model-B")
    assert prepared(lambda: tags.spelled(REPOSITORY)) == REPOSITORY
    absent = Reference.parse("nobody/nothing")
    assert prepared(lambda: tags.spelled(absent)) is None


def test_tags_that_differ_in_case_only_are_two_on_each_face(library: Library) -> None:
    """The store refuses to make the second, but another program may."""
    store = library.store
    blobstore.save({"w": np.ones(4, np.float32)}, "org/model:q4", store=store)
    blobstore.save({"w": np.zeros(4, np.float32)}, "org/other", store=store)
    other = store.read_manifest(Reference.parse("org/other"))
    store.manifest_path(Reference.parse("org/model:q4")).with_name("Q4").write_bytes(other)

    tags = ["Q4", "latest", "q4"]
    assert json_of(ask(library, "/v2/org/model/tags/list"))["tags"] == tags
    refs = json_of(ask(library, "/api/models/org/model/refs"))
    commits = {one["name"]: one["targetCommit"] for one in refs["branches"] + refs["tags"]}
    for tag, value in (("q4", 1.0), ("Q4", 0.0)):
        assert json_of(ask(library, f"/api/models/ORG/Model/revision/{tag}"))["sha"] == commits[tag]
        file = body_of(store, ask(library, f"/org/model/resolve/{tag}/model.safetensors"))
        assert file.endswith(np.full(4, value, np.float32).tobytes())
        manifest = ask(library, f"/v2/org/model/manifests/{tag}")
        digest = manifest.headers["Docker-Content-Digest"]
        by_digest = ask(library, f"/v2/org/model/manifests/{digest}")
        assert body_of(store, manifest) == body_of(store, by_digest)
    assert ask(library, "/v2/org/model/manifests/qQ4").status == 404
    names = {one["name"] for one in page_data(store)["store"]["models"]}
    assert names == {*(f"org/model:{tag}" for tag in tags), "org/other:latest"}


def test_a_manifest_that_is_replaced_is_read_again(library: Library, tags: Tags) -> None:
    (first,) = add_tags(library, 1)
    before = prepared(lambda: tags.keys(REPOSITORY))
    assert before[REPOSITORY] != before[first]
    copy_model("org/model", str(first), store=library.store, force=True)
    after = prepared(lambda: tags.keys(REPOSITORY))
    assert after[first] == after[REPOSITORY] == before[REPOSITORY]


def test_blobs_of_manifests_are_found_without_a_look_at_what_is_made(
    library: Library, tags: Tags, described: list[Reference]
) -> None:
    added = add_tags(library, 3)
    blob = library.store.resolve("org/model").layers[0].digest
    assert having(tags, blob) == [REPOSITORY, *added]
    assert described == []


def test_what_is_made_is_described_once_for_each_manifest(
    library: Library, tags: Tags, described: list[Reference]
) -> None:
    added = add_tags(library, 3)
    assert having(tags, made(added[1])) == [added[1]]
    assert having(tags, made(added[2])) == [added[2]]
    assert having(tags, Digest.of(b"absent")) == []
    assert described == [REPOSITORY, *added]
    copy_model("org/model", "org/model:again", store=library.store)
    assert having(tags, Digest.of(b"absent")) == []
    assert described == [REPOSITORY, *added]


def test_what_was_prepared_is_remembered(
    library: Library, tags: Tags, described: list[Reference]
) -> None:
    key = prepared(lambda: tags.keys(REPOSITORY))[REPOSITORY]
    tags.note(REPOSITORY, key, [made(REPOSITORY)])
    tags.note(REPOSITORY, key, [Digest.of(b"a layer")], ".image")
    assert having(tags, made(REPOSITORY)) == [REPOSITORY]
    assert having(tags, Digest.of(b"a layer")) == [Reference.parse("org/model:latest.image")]
    assert described == []


def test_a_damaged_manifest_hides_no_other(library: Library, tags: Tags) -> None:
    (first,) = add_tags(library, 1)
    library.store.manifest_path(first).write_bytes(b"{")
    blob = library.store.resolve("org/model").layers[0].digest
    assert having(tags, blob) == [REPOSITORY]
    assert list(tags.all()) == [REPOSITORY, first]


def test_a_repository_of_more_tags_than_are_kept_is_served(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.serve.library.MAX_MODELS", 2)
    library = Library(store)
    names = [f"v{number}" for number in range(6)]
    for number, name in enumerate(names):
        tensors = {"w": np.full(8, number, np.float32)}
        blobstore.save(tensors, f"org/model:{name}", store=store)
    refs = json_of(ask(library, "/api/models/org/model/refs"))
    commits = {one["name"]: one["targetCommit"] for one in refs["tags"]}
    assert list(commits) == names
    assert len(set(commits.values())) == len(names)
    listed = json_of(ask(library, "/v2/org/model/tags/list?n=2&last=v1"))
    assert listed["tags"] == ["v2", "v3"]
    absent = Digest.of(b"absent")
    assert ask(library, f"/v2/org/model/blobs/{absent}").status == 404
    assert ask(library, f"/v2/org/model/manifests/{absent}").status == 404
    assert json_of(ask(library, f"/v2/org/model/referrers/{absent}"))["manifests"] == []
    for name in (names[0], names[-1]):
        manifest = ask(library, f"/v2/org/model/manifests/{name}")
        digest = manifest.headers["Docker-Content-Digest"]
        for other in names[1:-1]:  # which push it out of the cache
            ask(library, f"/v2/org/model/manifests/{other}")
        assert ask(library, f"/v2/org/model/manifests/{digest}").parts == manifest.parts
        (data,) = manifest.parts
        assert isinstance(data, bytes)
        content = json.loads(data)
        for layer in (content["config"], *content["layers"]):
            assert ask(library, f"/v2/org/model/blobs/{layer['digest']}").status == 200
        info = json_of(ask(library, f"/api/models/org/model/revision/{name}"))
        assert info["sha"] == commits[name]
        image = ask(library, f"/v2/org/model/manifests/{name}.image")
        (data,) = image.parts
        for other in names[1:-1]:
            ask(library, f"/v2/org/model/manifests/{other}")
        assert isinstance(data, bytes)
        for one in json.loads(data)["manifests"]:
            assert ask(library, f"/v2/org/model/manifests/{one['digest']}").status == 200


def test_a_list_is_never_of_before_it_was_asked_for(library: Library) -> None:
    for number in range(3):
        copy_model("org/model", f"org/other{number}", store=library.store)
        names = {one["id"] for one in json_of(ask(library, "/api/models"))}
        assert names == {"org/model", *(f"org/other{one}" for one in range(number + 1))}


def test_what_is_made_is_noted_for_the_next_server(
    library: Library, tags: Tags, described: list[Reference]
) -> None:
    added = add_tags(library, MANY)
    tags.describe_all(REPOSITORY, list)
    assert described == [REPOSITORY, *added]
    described.clear()
    library.store.keep_signature(tags.keys(REPOSITORY)[added[3]], b"{}", is_verified=False)
    later = Tags(library.store, describer(described))
    assert having(later, made(added[1])) == [added[1]]
    assert having(later, Digest.of(b"absent")) == []
    assert described == [added[3]]  # which has more since
    copy_model("org/model", "org/other", store=library.store)
    other = Reference.parse("org/other")
    assert prepared(lambda: later.having(other, made(REPOSITORY))) == []
    assert described == [added[3], other]  # its name is another


def test_manifests_are_not_read_again_by_the_next_server(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    added = add_tags(library, MANY)
    (library.store.manifest_path(REPOSITORY).parent / "damaged").write_bytes(b"{")
    read: list[Reference] = []
    read_manifest = LocalStore.read_manifest

    def noted(store: LocalStore, name: Reference) -> bytes:
        read.append(name)
        return read_manifest(store, name)

    monkeypatch.setattr(LocalStore, "read_manifest", noted)
    first, later = (Tags(library.store, describer([])) for _ in range(2))
    keys = prepared(lambda: first.keys(REPOSITORY))
    damaged = Reference.parse("org/model:damaged")
    assert set(keys) == set(read) == {REPOSITORY, damaged, *added}
    read.clear()
    assert prepared(lambda: later.keys(REPOSITORY)) == keys
    assert set(read) == {damaged}
    blob = library.store.resolve(added[3]).config.digest
    assert having(later, blob) == having(first, blob) == [added[3]]


def test_a_tag_that_is_added_while_its_repository_is_listed_is_there_at_once(
    library: Library, tags: Tags, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Reference.parse("org/model:v2")

    def overtaken(path: str) -> tuple[list[str], list[str]]:
        listed = folders_and_files(path)
        if not library.store.has_model(str(other)):
            copy_model("org/model", str(other), store=library.store)
            tags.list_again(other)
        return listed

    # As if the clock of the file system had not moved.
    version = FileVersion(1, 1, 1, 1, 1)
    monkeypatch.setattr(FileVersion, "of", lambda path: version if Path(path).exists() else None)
    monkeypatch.setattr("blobstore.serve.tags.folders_and_files", overtaken)
    assert prepared(lambda: tags.of(REPOSITORY)) == (REPOSITORY, other)


def test_a_question_describes_a_few_and_lets_others_have_their_turn(
    library: Library, tags: Tags, described: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.serve.tags.MANY", 2)
    add_tags(library, 5)
    prepared(lambda: tags.keys(REPOSITORY))
    keys = []
    for count in (2, 4, 6):
        with pytest.raises(NotListed) as caught:
            tags.having(REPOSITORY, Digest.of(b"absent"))
        caught.value.prepare()
        keys.append(caught.value.key)
        assert len(described) == count
    assert len(set(keys)) == 3, "each is other work, which nobody has waited for"
    assert having(tags, Digest.of(b"absent")) == []
    with pytest.raises(NotListed):  # another digest is looked for, and nothing is described
        tags.having(REPOSITORY, Digest.of(b"another"))
    assert having(tags, Digest.of(b"another")) == []
    assert len(described) == 6


def test_a_question_describes_what_its_client_sees_alone(
    library: Library, tags: Tags, described: list[Reference]
) -> None:
    added = add_tags(library, 3)

    def seen(several: Iterable[Reference]) -> Sequence[Reference]:
        return [one for one in several if one != added[1]]

    def found(digest: Digest) -> Sequence[Reference]:
        return prepared(lambda: tags.having(REPOSITORY, digest, seen))

    assert found(made(added[1])) == []
    assert described == [REPOSITORY, added[0], added[2]]
    blob = library.store.resolve("org/model").layers[0].digest
    assert found(blob) == described
    assert having(tags, made(added[1])) == [added[1]]


def test_nothing_is_kept_of_manifests_that_were_replaced_or_removed(
    library: Library, tags: Tags
) -> None:
    first, second = add_tags(library, 2)
    assert having(tags, made(first)) == [first]
    assert having(tags, made(second)) == [second]
    copy_model("org/model", str(first), store=library.store, force=True)
    remove_models([str(second)], store=library.store)
    tags.list_again(REPOSITORY)
    assert having(tags, made(first)) == having(tags, made(second)) == []
    (manifests,) = tags._manifests.values()
    assert manifests.known.keys() == {REPOSITORY, first}
    assert len({id(one) for one in manifests.known.values()}) == 1
    remove_models(["org/model", str(first)], store=library.store)
    tags.tidy()
    assert not tags._manifests


def test_what_clients_were_given_is_noted_from_time_to_time(
    library: Library, tags: Tags, described: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in [REPOSITORY, *add_tags(library, 1)]:
        tags.note(tag, prepared(lambda: tags.keys(REPOSITORY))[tag], [made(tag)])
    monkeypatch.setattr("blobstore.serve.tags.MANY", 2)
    tags.tidy()
    later = Tags(library.store, describer(described))
    assert having(later, made(REPOSITORY)) == [REPOSITORY]
    assert described == []


def test_an_absent_digest_opens_no_blob_after_a_look_ahead(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    add_tags(library, MANY)
    opened: list[Digest] = []
    read = LocalStore.read_blob

    def counted(store: LocalStore, digest: Digest, *rest: int) -> bytes:
        opened.append(digest)
        return read(store, digest, *rest)

    Visible.of(library).look_ahead()
    monkeypatch.setattr(LocalStore, "read_blob", counted)
    for one in (library, Library(library.store)):  # as after a restart
        for digest in (Digest.of(b"absent"), Digest.of(b"another")):
            assert ask(one, f"/v2/org/model/blobs/{digest}").status == 404
            assert ask(one, f"/v2/org/model/manifests/{digest}").status == 404
    assert opened == []
    assert ask(library, "/v2/org/model/manifests/latest").status == 200
    assert opened
