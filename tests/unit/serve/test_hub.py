"""The Hub's routes, asked without a socket."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.serve.library import Library
from blobstore.store.local import LocalStore
from tests.support.folders import contents
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.support.ollama_store import GGUF_FILE, add_gguf_model
from tests.support.serve import ask, body_of, json_of

COMMIT = re.compile("[0-9a-f]{40}")


def test_the_model_says_its_commit_and_its_files(library: Library, folder: Path) -> None:
    info = json_of(ask(library, "/api/models/org/model"))
    assert info["id"] == "org/model"
    assert COMMIT.fullmatch(info["sha"])
    assert [item["rfilename"] for item in info["siblings"]] == sorted(contents(folder))
    for revision in ("main", "latest", info["sha"], "refs%2Fheads%2Fmain"):
        response = ask(library, f"/api/models/org/model/revision/{revision}")
        assert json_of(response)["sha"] == info["sha"]
        assert response.headers["X-Repo-Commit"] == info["sha"]


def test_sizes_and_digests_of_files_are_listed_on_request(library: Library, folder: Path) -> None:
    info = json_of(ask(library, "/api/models/org/model?blobs=true"))
    source = contents(folder)
    assert {item["rfilename"]: item["size"] for item in info["siblings"]} == {
        name: len(data) for name, data in source.items()
    }
    for item in info["siblings"]:
        assert item["lfs"]["sha256"] == Digest.of(source[item["rfilename"]]).hex


def test_files_are_those_of_the_source_byte_for_byte(library: Library, folder: Path) -> None:
    for name, data in contents(folder).items():
        response = ask(library, f"/org/model/resolve/main/{name}")
        assert response.status == 200
        assert body_of(library.store, response) == data
        digest = Digest.of(data).hex
        assert response.headers["ETag"] == response.headers["X-Linked-Etag"] == f'"{digest}"'
        assert response.headers["X-Linked-Size"] == response.headers["Content-Length"]
        assert int(response.headers["Content-Length"]) == len(data)
        head = ask(library, f"/org/model/resolve/main/{name}", "HEAD")
        assert (head.status, head.headers, head.parts) == (200, response.headers, ())
        end = len(data) - 1
        part = ask(library, f"/org/model/resolve/main/{name}", headers={"range": f"bytes=1-{end}"})
        assert body_of(library.store, part) == data[1:]


def test_a_tree_lists_files_as_git_lfs_does(library: Library, folder: Path) -> None:
    tree = json_of(ask(library, "/api/models/org/model/tree/main?recursive=true&expand=false"))
    source = contents(folder)
    found = {entry["path"]: entry for entry in tree}
    assert found.keys() == source.keys() | {"extra"}
    assert found.pop("extra")["type"] == "directory"
    for name, entry in found.items():
        digest = Digest.of(source[name]).hex
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\n"
            f"size {len(source[name])}\n"
        ).encode()
        assert entry["oid"] == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
        assert entry["size"] == len(source[name])
        assert entry["lfs"] == {
            "oid": digest,
            "size": len(source[name]),
            "pointerSize": len(pointer),
        }


def test_a_tree_that_is_not_recursive_lists_one_folder(library: Library) -> None:
    top = json_of(ask(library, "/api/models/org/model/tree/main"))
    assert {"extra", "config.json"} <= {entry["path"] for entry in top}
    assert "extra/notes.txt" not in {entry["path"] for entry in top}
    (inside,) = json_of(ask(library, "/api/models/org/model/tree/main/extra"))
    assert inside["path"] == "extra/notes.txt"
    missing = ask(library, "/api/models/org/model/tree/main/none")
    assert (missing.status, missing.headers["X-Error-Code"]) == (404, "EntryNotFound")


def test_pages_of_a_tree_are_all_of_it(library: Library) -> None:
    everything = json_of(ask(library, "/api/models/org/model/tree/main?recursive=true"))
    target, found = "/api/models/org/model/tree/main?recursive=true&limit=2", []
    for _ in range(20):
        response = ask(library, target, headers={"host": "127.0.0.1:8080"})
        found += json_of(response)
        if "Link" not in response.headers:
            break
        match = re.fullmatch(
            r'<http://127\.0\.0\.1:8080(/.*)>; rel="next"', response.headers["Link"]
        )
        assert match is not None
        target = match[1]
    assert found == everything


def test_paths_are_described_by_a_form(library: Library) -> None:
    response = ask(
        library,
        "/api/models/org/model/paths-info/main",
        "POST",
        body=b"paths=config.json&paths=extra&paths=none&paths=..%2Fconfig.json&expand=False",
    )
    assert [entry["path"] for entry in json_of(response)] == ["config.json", "extra"]
    assert ask(library, "/api/models/org/model/paths-info/main").status == 405


def test_tags_are_revisions(library: Library, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "other", moe_tensors()), "org/model:v2", store=library.store)
    refs = json_of(ask(library, "/api/models/org/model/refs"))
    (branch,) = refs["branches"]
    (tag,) = refs["tags"]
    assert (branch["name"], branch["ref"]) == ("main", "refs/heads/main")
    assert (tag["name"], tag["ref"]) == ("v2", "refs/tags/v2")
    info = json_of(ask(library, "/api/models/org/model/revision/v2"))
    assert info["sha"] == tag["targetCommit"] != branch["targetCommit"]


def test_a_commit_stays_valid_when_its_name_gets_another_model(
    library: Library, folder: Path, tmp_path: Path
) -> None:
    before = json_of(ask(library, "/api/models/org/model"))["sha"]
    create(write_folder(tmp_path / "other", moe_tensors()), "org/model", store=library.store)
    assert json_of(ask(library, "/api/models/org/model"))["sha"] != before
    for known in (library, Library(library.store)):
        response = ask(known, f"/org/model/resolve/{before}/config.json")
        assert body_of(library.store, response) == (folder / "config.json").read_bytes()
    assert ask(library, f"/org/model/resolve/{'0' * 40}/config.json").status == 404


def test_a_commit_is_not_one_of_another_repository(library: Library, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "other", moe_tensors()), "org/other", store=library.store)
    commit = json_of(ask(library, "/api/models/org/model"))["sha"]
    assert ask(library, f"/org/other/resolve/{commit}/config.json").status == 404


def test_what_is_absent_is_named_as_clients_expect(library: Library) -> None:
    commit = json_of(ask(library, "/api/models/org/model"))["sha"]
    for target, code in {
        "/api/models/org/none": "RepoNotFound",
        "/api/models/none": "RepoNotFound",
        "/api/models/a/b/c/d": "RepoNotFound",
        "/api/models/..%2F..%2Fetc/passwd": "RepoNotFound",
        "/org/none/resolve/main/config.json": "RepoNotFound",
        "/api/models/org/model/revision/none": "RevisionNotFound",
        "/api/models/org/model/revision/..%2F..": "RevisionNotFound",
        "/org/model/resolve/none/config.json": "RevisionNotFound",
        "/org/model/resolve/main/none.json": "EntryNotFound",
        "/org/model/resolve/main/..%2Fconfig.json": "EntryNotFound",
        "/org/model/resolve/main/%2Fetc%2Fpasswd": "EntryNotFound",
        "/org/model/resolve/main/": "EntryNotFound",
    }.items():
        response = ask(library, target)
        assert (response.status, response.headers["X-Error-Code"]) == (404, code), target
        assert response.headers.get("X-Repo-Commit") == (
            commit if code == "EntryNotFound" else None
        ), target


def test_a_name_that_was_removed_is_absent(library: Library) -> None:
    assert ask(library, "/org/model/resolve/main/config.json").status == 200
    remove_models(["org/model"], store=library.store)
    response = ask(library, "/org/model/resolve/main/config.json")
    assert response.headers["X-Error-Code"] == "RepoNotFound"


def test_only_allowed_models_are_there(library: Library) -> None:
    copy_model("org/model", "org/secret", store=library.store)
    copy_model("org/model", "org/model:internal", store=library.store)
    some = Library(library.store, allow=["org/model:latest"])
    assert ask(some, "/org/model/resolve/main/config.json").status == 200
    assert ask(some, "/org/secret/resolve/main/config.json").status == 404
    assert ask(some, "/org/model/resolve/internal/config.json").status == 404
    assert json_of(ask(some, "/api/models/org/model/refs"))["tags"] == []
    assert [item["id"] for item in json_of(ask(some, "/api/models"))] == ["org/model"]


def test_models_without_a_namespace_are_found(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "m", dense_tensors()), "alone", store=store)
    library = Library(store)
    assert json_of(ask(library, "/api/models/alone"))["id"] == "alone"
    assert ask(library, "/alone/resolve/main/config.json").status == 200
    listed = json_of(ask(library, "/api/models?search=ALO&limit=5"))
    assert [item["id"] for item in listed] == ["alone"]


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("ghcr.io/team/llama", "ghcr.io.team/llama"),
        ("localhost:5000/team/llama", "localhost_5000.team/llama"),
        ("ghcr.io/library/llama", "ghcr.io.library/llama"),
    ],
)
def test_a_model_of_another_host_has_a_name_of_two_parts(
    store: LocalStore, tmp_path: Path, name: str, served: str
) -> None:
    create(write_folder(tmp_path / "model", dense_tensors()), name, store=store)
    library = Library(store)
    (listed,) = json_of(ask(library, f"/api/models?author={served.partition('/')[0]}"))
    assert listed["id"] == served
    info = json_of(ask(library, f"/api/models/{served}"))
    assert (info["id"], info["author"]) == (served, served.partition("/")[0])
    assert ask(library, f"/{served}/resolve/main/config.json").status == 200
    assert ask(library, f"/{name.replace(':', '_')}/resolve/main/config.json").status == 200
    for other in ("team/llama", "llama", f".{served}", "other.io.team/llama"):
        assert ask(library, f"/{other}/resolve/main/config.json").status == 404


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_quantized_model_has_the_files_of_an_export(
    store: LocalStore, tmp_path: Path, quantize: str
) -> None:
    from blobstore.operations.export.export import export_model
    from tests.support.models import quantizable_tensors

    source = write_folder(tmp_path / "m", quantizable_tensors())
    create(source, "quantized", store=store, quantize=quantize)
    export_model("quantized", tmp_path / "back", store=store)
    library = Library(store)
    for name, data in contents(tmp_path / "back").items():
        response = ask(library, f"/quantized/resolve/main/{name}")
        assert body_of(store, response) == data
        assert response.headers["ETag"] == f'"{Digest.of(data).hex}"'


def test_stacked_experts_are_the_files_of_the_source(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "moe", moe_tensors(), shards=3)
    create(source, "moe", store=store)
    library = Library(store)
    for name, data in contents(source).items():
        assert body_of(store, ask(library, f"/moe/resolve/main/{name}")) == data


def test_digests_that_were_computed_are_noted(library: Library) -> None:
    first = ask(library, "/org/model/resolve/main/config.json").headers
    notes = library.store.folder("headers")
    before = {path.name: path.stat().st_mtime_ns for path in notes.iterdir()}
    assert ask(Library(library.store), "/org/model/resolve/main/config.json").headers == first
    assert {path.name: path.stat().st_mtime_ns for path in notes.iterdir()} == before
    for path in notes.iterdir():
        path.write_bytes(b"[1]")
    assert ask(Library(library.store), "/org/model/resolve/main/config.json").headers == first


def test_noted_digests_stay_as_long_as_the_model(library: Library) -> None:
    ask(library, "/org/model/resolve/main/config.json")
    notes = library.store.folder("headers")
    (note,) = notes.glob("*.files")
    library.release_idle(0)
    collect_garbage(store=library.store, older_than=0)
    assert note.exists()
    remove_models(["org/model"], store=library.store)
    collect_garbage(store=library.store, older_than=0, force=True)
    assert not note.exists()


def test_models_of_ollama_are_gguf_files(store: LocalStore) -> None:
    add_gguf_model(store, "ollama", GGUF_FILE, projector=GGUF_FILE)
    library = Library(store)
    info = json_of(ask(library, "/api/models/ollama?blobs=true"))
    assert [file["rfilename"] for file in info["siblings"]] == ["mmproj.gguf", "model.gguf"]
    for file in info["siblings"]:
        response = ask(library, f"/ollama/resolve/main/{file['rfilename']}")
        assert body_of(store, response) == GGUF_FILE
        assert Digest.of(GGUF_FILE).hex == file["lfs"]["sha256"]
