"""The routes of a registry, asked without a socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.registry.manifest import ACCEPTED, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST
from blobstore.remotes.cold_layers import BLOB_DIGEST, COLD
from blobstore.serve.access import Access
from blobstore.serve.library import Library
from blobstore.serve.messages import Request, Response, StoredPart
from blobstore.serve.routes import answer
from blobstore.serve.unprepared import NotPrepared
from blobstore.signatures import cosign
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.support.serve import ask, body_of, json_of

ALL = {"accept": ", ".join(ACCEPTED)}


def code_of(library: Library, target: str, **headers: str) -> tuple[int, str]:
    response = ask(library, target, headers=headers)
    (error,) = json_of(response)["errors"]
    return response.status, error["code"]


def test_a_registry_says_what_it_speaks(library: Library) -> None:
    for target in ("/v2/", "/v2"):
        response = ask(library, target)
        assert response.status == 200
        assert response.headers["Docker-Distribution-API-Version"] == "registry/2.0"
        assert json_of(response) == {}


def test_a_manifest_has_exact_bytes_by_its_tag_and_its_digest(library: Library) -> None:
    response = ask(library, "/v2/org/model/manifests/latest", headers=ALL)
    data = body_of(library.store, response)
    digest = response.headers["Docker-Content-Digest"]
    assert response.status == 200
    assert response.headers["Content-Type"] == OCI_MANIFEST == json_of(response)["mediaType"]
    assert digest == str(Digest.of(data))
    again = ask(library, f"/v2/org/model/manifests/{digest}")
    assert body_of(library.store, again) == data
    head = ask(library, "/v2/org/model/manifests/latest", "HEAD", headers=ALL)
    assert head == response  # the server leaves the body out


def test_every_blob_of_a_manifest_is_there(library: Library) -> None:
    manifest = json_of(ask(library, "/v2/org/model/manifests/latest", headers=ALL))
    for layer in (manifest["config"], *manifest["layers"]):
        target = f"/v2/org/model/blobs/{layer['digest']}"
        response = ask(library, target)
        data = body_of(library.store, response)
        assert (str(Digest.of(data)), len(data)) == (layer["digest"], layer["size"])
        assert response.headers["Docker-Content-Digest"] == layer["digest"]
        if len(data) > 5:
            part = ask(library, target, headers={"range": "bytes=1-4"})
            assert (part.status, body_of(library.store, part)) == (206, data[1:5])


def test_a_client_gets_the_type_that_it_accepts(library: Library) -> None:
    local = library.store.read_manifest("org/model")
    docker = ask(library, "/v2/org/model/manifests/latest", headers={"accept": DOCKER_MANIFEST})
    assert docker.headers["Content-Type"] == DOCKER_MANIFEST == media_types.MANIFEST
    assert body_of(library.store, docker) == local
    by_digest = ask(library, f"/v2/org/model/manifests/{Digest.of(local)}", headers=ALL)
    assert body_of(library.store, by_digest) == local
    any_type = ask(library, "/v2/org/model/manifests/latest", headers={"accept": "*/*"})
    assert any_type.headers["Content-Type"] == OCI_MANIFEST
    other = ask(library, "/v2/org/model/manifests/latest", headers={"accept": OCI_INDEX})
    assert other.status == 404
    assert OCI_MANIFEST in json_of(other)["errors"][0]["message"]


def test_names_may_have_small_letters_alone(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "m", moe_tensors()), "Org/Model-7B", store=store)
    library = Library(store)
    assert ask(library, "/v2/org/model-7b/manifests/latest", headers=ALL).status == 200
    assert json_of(ask(library, "/v2/org/model-7b/tags/list"))["tags"] == ["latest"]


def test_a_model_of_another_host_has_it_in_its_name(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "m", dense_tensors()), "ghcr.io/team/llama", store=store)
    library = Library(store)
    for name in ("ghcr.io/team/llama", "ghcr.io.team/llama"):
        assert ask(library, f"/v2/{name}/manifests/latest").status == 200
    for name in ("team/llama", "other.io/team/llama", "a/ghcr.io/team/llama"):
        assert ask(library, f"/v2/{name}/manifests/latest").status == 404


@pytest.mark.parametrize(
    ("listed", "namespace", "host"),
    [("localhost_5000/m", "localhost_5000/m", "localhost:5000/m"), ("a.b/m", "a/b/m", "a.b/m")],
)
def test_a_name_is_one_with_a_host_before_it_is_one_with_a_namespace(
    store: LocalStore, tmp_path: Path, listed: str, namespace: str, host: str
) -> None:
    folder, library = write_folder(tmp_path / "m", dense_tensors()), Library(store)
    for name in (f"{namespace}:namespace", f"{host}:host"):
        create(folder, name, store=store)
        tags = json_of(ask(library, f"/v2/{listed}/tags/list"))["tags"]
        assert tags == [name.rpartition(":")[2]]


def test_a_mirror_has_only_models_of_the_host_that_it_stands_for(
    library: Library, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "m", dense_tensors())
    create(source, "ghcr.io/team/llama", store=library.store)
    create(source, "ghcr.io/library/llama", store=library.store)
    for name, status in (("team/llama", 200), ("llama", 200), ("org/model", 404)):
        assert ask(library, f"/v2/{name}/manifests/latest?ns=ghcr.io").status == status
    assert ask(library, "/v2/team/llama/manifests/latest?ns=docker.io").status == 404
    create(source, "ghcr.io/team/llama:v1", store=library.store)
    create(source, "team/llama:other", store=library.store)
    page = ask(library, "/v2/team/llama/tags/list?ns=ghcr.io&n=1")
    target = page.headers["Link"].partition("<")[2].partition(">")[0]
    assert json_of(ask(library, target))["tags"] == ["v1"]
    assert ask(library, "/v2/org/model/manifests/latest").status == 200


def test_repositories_are_listed_in_pages(library: Library, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", dense_tensors())
    hosts = (
        "ghcr.io/team/llama",
        "localhost:5000/a/b",
        "a.b.c/d",
        "localhost:1/e",
        "host/library/f",
    )
    for name in (*hosts, "Alone", "Alone:other"):
        create(source, name, store=library.store)
    listed, target = [], "/v2/_catalog?n=2"
    while target:
        response = ask(library, target)
        listed += json_of(response)["repositories"]
        target = response.headers.get("Link", "").partition("<")[2].partition(">")[0]
    alone = ["a.b.c/d", "alone", "ghcr.io/team/llama", "host/library/f", "localhost_1/e"]
    assert listed == [*alone, "localhost_5000/a/b", "org/model"]
    assert ask(library, "/v2/host/f/tags/list").status == 404  # no host by its name alone
    for name in listed:
        assert json_of(ask(library, f"/v2/{name}/tags/list"))["tags"]
    allowed = Library(library.store, ["org/*"])
    assert json_of(ask(allowed, "/v2/_catalog"))["repositories"] == ["org/model"]


def test_tags_are_listed_in_pages(library: Library) -> None:
    for tag in ("a", "b", "v1"):
        copy_model("org/model", f"org/model:{tag}", store=library.store)
    value = json_of(ask(library, "/v2/org/model/tags/list"))
    assert value == {"name": "org/model", "tags": ["a", "b", "latest", "v1"]}
    first = ask(library, "/v2/org/model/tags/list?n=3")
    assert json_of(first)["tags"] == ["a", "b", "latest"]
    assert first.headers["Link"] == '</v2/org/model/tags/list?n=3&last=latest>; rel="next"'
    assert json_of(ask(library, "/v2/org/model/tags/list?n=3&last=latest"))["tags"] == ["v1"]
    assert json_of(ask(library, "/v2/org/model/tags/list?n=0"))["tags"] == []


def test_repositories_are_listed_in_small_letters_and_pages(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", moe_tensors())
    for name in ("Org/Model-7B", "llama", "Org/b", "ghcr.io/org/foreign"):
        create(folder, name, store=store)
    library = Library(store)
    assert json_of(ask(library, "/v2/_catalog")) == {
        "repositories": ["ghcr.io/org/foreign", "llama", "org/b", "org/model-7b"]
    }
    first = ask(library, "/v2/_catalog?n=3")
    assert json_of(first)["repositories"] == ["ghcr.io/org/foreign", "llama", "org/b"]
    assert first.headers["Link"] == '</v2/_catalog?n=3&last=org%2Fb>; rel="next"'
    last = ask(library, "/v2/_catalog?n=3&last=org%2Fb")
    assert json_of(last)["repositories"] == ["org/model-7b"]
    assert "Link" not in last.headers


def test_repositories_that_are_not_allowed_are_not_listed(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "m", moe_tensors())
    for name in ("org/public", "org/secret"):
        create(folder, name, store=store)
    library = Library(store, ["*/public"])
    assert json_of(ask(library, "/v2/_catalog"))["repositories"] == ["org/public"]


def test_compressed_forms_refer_to_their_model_as_long_as_they_are_there(
    store: LocalStore, tmp_path: Path
) -> None:
    frozen.put(store, "org/one", {"a": 1, "b": 2})
    library = Library(store)
    digest = ask(library, "/v2/org/one/manifests/latest", headers=ALL).headers[
        "Docker-Content-Digest"
    ]
    target = f"/v2/org/one/referrers/{digest}"
    assert json_of(ask(library, target))["manifests"] == []
    freeze_models(["org/one"], store=store, keep_hot=True)
    (listed,) = json_of(ask(library, target))["manifests"]
    assert listed["artifactType"] == COLD
    layers = json_of(ask(library, f"/v2/org/one/manifests/{listed['digest']}"))["layers"]
    assert len(layers) == 2
    for one in layers:
        found = ask(library, f"/v2/org/one/blobs/{one['digest']}")
        data = stored_bytes(store, found)
        assert (Digest.of(data), len(data)) == (Digest.parse(one["digest"]), one["size"])
        part = ask(library, f"/v2/org/one/blobs/{one['digest']}", headers={"range": "bytes=9-20"})
        assert stored_bytes(store, part) == data[9:21]
    for one in layers:
        digest = one["annotations"][BLOB_DIGEST]
        Path(store.cold_path(Digest.parse(digest))).unlink()
    assert json_of(ask(library, target))["manifests"] == []
    assert code_of(library, f"/v2/org/one/blobs/{layers[0]['digest']}") == (404, "BLOB_UNKNOWN")


def stored_bytes(store: LocalStore, response: Response) -> bytes:
    (part,) = response.parts
    assert isinstance(part, StoredPart)
    data = Path(part.path).read_bytes()
    return data[part.begin : part.begin + part.length]


def test_nothing_refers_to_a_model_without_signatures(library: Library) -> None:
    response = ask(library, f"/v2/org/model/referrers/sha256:{'0' * 64}")
    assert (response.status, response.headers["Content-Type"]) == (200, OCI_INDEX)
    assert json_of(response)["manifests"] == []


def test_a_signature_refers_to_its_model(library: Library, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from blobstore.operations.sign.sign import sign_model
    from tests.support.signing import key_files

    before = ask(library, "/v2/org/model/manifests/latest", headers=ALL)
    digest = before.headers["Docker-Content-Digest"]
    target = f"/v2/org/model/referrers/{digest}"
    assert json_of(ask(library, target))["manifests"] == []
    sign_model("org/model", key_files(tmp_path).private, store=library.store)
    (item,) = json_of(ask(library, target))["manifests"]
    manifest = json_of(ask(library, f"/v2/org/model/manifests/{item['digest']}", headers=ALL))
    assert manifest["subject"]["digest"] == digest
    (layer,) = manifest["layers"]
    bundle = ask(library, f"/v2/org/model/blobs/{layer['digest']}")
    stored = library.store.signatures(Digest.of(library.store.read_manifest("org/model")))
    assert body_of(library.store, bundle) in list(stored)
    none = ask(library, f"{target}?artifactType=none")
    assert json_of(none)["manifests"] == []
    assert none.headers["OCI-Filters-Applied"] == "artifactType"


def test_signatures_for_cosign_have_a_tag_of_the_digest(library: Library) -> None:
    before = ask(library, "/v2/org/model/manifests/latest", headers=ALL)
    digest = Digest.parse(before.headers["Docker-Content-Digest"])
    target = f"/v2/org/model/manifests/sha256-{digest.hex}.sig"
    assert ask(library, target, headers=ALL).status == 404
    key = Digest.of(library.store.read_manifest("org/model"))
    signature = cosign.write_signature(cosign.payload("host/model", digest, 1), b"signed")
    library.store.keep_signature(key, signature, is_verified=True)
    (layer,) = json_of(ask(library, target, headers=ALL))["layers"]
    blob = ask(library, f"/v2/org/model/blobs/{layer['digest']}")
    assert digest.hex.encode() in body_of(library.store, blob)
    for other in (f"sha256-{'0' * 64}.sig", f"sha256-{digest.hex}.att", f"{digest.hex}.sig"):
        none = ask(library, f"/v2/org/model/manifests/{other}", headers=ALL)
        assert none.status == 404, other


def test_errors_are_those_of_registries(library: Library) -> None:
    zeros = f"sha256:{'0' * 64}"
    for target, expected in {
        "/v2/org/none/manifests/latest": (404, "NAME_UNKNOWN"),
        "/v2/a/b/c/manifests/latest": (404, "NAME_UNKNOWN"),
        "/v2/..%2F../x/manifests/latest": (404, "NAME_UNKNOWN"),
        "/v2/org/_catalog": (404, "UNSUPPORTED"),
        "/v2/org/model/none": (404, "UNSUPPORTED"),
        "/v2/org/model/tags/list?n=all": (400, "PAGINATION_NUMBER_INVALID"),
        "/v2/org/model/manifests/none": (404, "MANIFEST_UNKNOWN"),
        "/v2/org/model/manifests/..%2F..": (404, "MANIFEST_UNKNOWN"),
        f"/v2/org/model/manifests/{zeros}": (404, "MANIFEST_UNKNOWN"),
        "/v2/org/model/manifests/sha512:00": (404, "MANIFEST_UNKNOWN"),
        f"/v2/org/model/manifests/sha256-{'0' * 64}.sig": (404, "MANIFEST_UNKNOWN"),
        f"/v2/org/model/blobs/{zeros}": (404, "BLOB_UNKNOWN"),
        "/v2/org/model/blobs/..%2F..%2Fmanifests": (404, "DIGEST_INVALID"),
        "/v2/org/model/tags/other": (404, "UNSUPPORTED"),
        "/v2/org/none/tags/other": (404, "UNSUPPORTED"),
    }.items():
        assert code_of(library, target) == expected, target


def test_blobs_of_other_models_are_not_those_of_a_repository(
    library: Library, tmp_path: Path
) -> None:
    create(write_folder(tmp_path / "m", moe_tensors()), "org/secret", store=library.store)
    secret = library.store.resolve("org/secret").layers[0].digest
    assert ask(library, f"/v2/org/secret/blobs/{secret}").status == 200
    assert ask(library, f"/v2/org/model/blobs/{secret}").status == 404
    some = Library(library.store, allow=["org/model"])
    assert ask(some, f"/v2/org/secret/blobs/{secret}").status == 404
    assert ask(some, f"/v2/org/model/blobs/{secret}").status == 404


def test_a_manifest_stays_while_it_is_pulled(library: Library, tmp_path: Path) -> None:
    response = ask(library, "/v2/org/model/manifests/latest", headers=ALL)
    digest = response.headers["Docker-Content-Digest"]
    create(write_folder(tmp_path / "m", moe_tensors()), "org/model", store=library.store)
    assert ask(library, "/v2/org/model/manifests/latest", headers=ALL).headers != response.headers
    assert ask(library, f"/v2/org/model/manifests/{digest}").status == 200
    remove_models(["org/model"], store=library.store)
    assert ask(library, "/v2/org/model/manifests/latest").status == 404


def test_a_client_that_has_the_manifest_may_wait_for_another_one(library: Library) -> None:
    target = "/v2/org/model/manifests/latest"
    tag = ask(library, target, headers=ALL).headers["ETag"]
    known = {**ALL, "if-none-match": f'"x", {tag}'}
    unchanged = ask(library, target, "HEAD", headers=known)
    assert (unchanged.status, unchanged.parts, unchanged.wait) == (304, (), None)
    for text, seconds in (("respond-async, wait=7", 7), ("wait=999999999", 60)):
        waiting = ask(library, target, "HEAD", headers={**known, "prefer": text})
        assert waiting.headers["Preference-Applied"] == f"wait={seconds}"
        assert waiting.wait is not None
        assert waiting.wait.seconds == seconds
        assert not waiting.wait.is_over()
    for text in ("wait=x", "awaits", "wait=-1", "wait=" + "1" * 30):
        assert ask(library, target, headers={**known, "prefer": text}).wait is None
    copy_model("org/model", "org/other", store=library.store)
    remove_models(["org/model"], store=library.store)
    assert waiting.wait is not None
    assert waiting.wait.is_over()


def test_nobody_waits_for_a_digest_which_never_changes(library: Library) -> None:
    first = ask(library, "/v2/org/model/manifests/latest", headers=ALL)
    target = f"/v2/org/model/manifests/{first.headers['Docker-Content-Digest']}"
    headers = {"if-none-match": first.headers["ETag"], "prefer": "wait=9"}
    response = ask(library, target, headers=headers)
    assert (response.status, response.wait) == (304, None)


@pytest.fixture
def versions(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Four versions of a repository that share their weights, under two tags each; two are kept in memory."""
    monkeypatch.setattr("blobstore.serve.library.MAX_MODELS", 2)
    for number in range(4):
        files = {"README.md": f"version {number}".encode()}
        folder = write_folder(tmp_path / str(number), dense_tensors(), files=files)
        create(folder, f"org/model:v{number}", store=store)
        copy_model(f"org/model:v{number}", f"org/model:same{number}", store=store)
    return Library(store)


def test_a_question_about_a_digest_needs_no_more_versions_than_are_kept(versions: Library) -> None:
    response = ask(versions, "/v2/org/model/manifests/v3", headers=ALL)
    manifest, own = json_of(response), response.headers["Docker-Content-Digest"]
    for digest in (own, *(layer["digest"] for layer in manifest["layers"])):
        for path in (
            f"referrers/{digest}",
            f"manifests/{digest}",
            f"manifests/{digest.replace(':', '-')}.sig",
            f"blobs/{digest}",
        ):
            request, looks = Request("GET", f"/v2/org/model/{path}"), 0
            while True:
                try:
                    answer(request, versions, Access())
                    break
                except NotPrepared as first:
                    first.prepare()
                    looks += 1
                    assert looks < 20, path
