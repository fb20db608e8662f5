"""The Hub's routes, asked without a socket."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.serve.hub_files import date_of
from blobstore.serve.library import Library
from blobstore.serve.visible import Visible
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
    for revision in ("main", "HEAD", "latest", info["sha"], "refs%2Fheads%2Fmain"):
        response = ask(library, f"/api/models/org/model/revision/{revision}")
        assert json_of(response)["sha"] == info["sha"]
        assert response.headers["X-Repo-Commit"] == info["sha"]


def test_a_tag_main_is_a_tag_and_the_branch_only_where_there_is_no_other(
    library: Library, tmp_path: Path
) -> None:
    for number, name in enumerate(("org/model:main", "org/only:main")):
        arrays = {"x": np.full(3, number, np.float32)}
        create(write_folder(tmp_path / str(number), arrays), name, store=library.store)

    def sha(name: str, revision: str) -> str:
        info = json_of(ask(library, f"/api/models/{name}/revision/{revision}"))
        assert json_of(ask(library, f"/api/models/{name}/commits/{revision}"))[0]["id"]
        return str(info["sha"])

    assert sha("org/model", "main") == sha("org/model", "latest")
    assert sha("org/model", "refs%2Fheads%2Fmain") == sha("org/model", "HEAD")
    assert sha("org/model", "refs%2Ftags%2Fmain") != sha("org/model", "main")
    assert sha("org/only", "main") == sha("org/only", "refs%2Ftags%2Fmain")
    assert ask(library, "/api/models/org/only/revision/HEAD").status == 404


def test_a_model_whose_name_is_the_word_of_a_route_has_an_info(
    library: Library, folder: Path
) -> None:
    create(folder, "team/tree", store=library.store)
    for target in ("/api/models/team/tree", "/api/models/team/tree/revision/main"):
        assert json_of(ask(library, target))["id"] == "team/tree"


def test_a_name_that_is_too_long_for_a_store_says_so(library: Library) -> None:
    response = ask(library, f"/org/{'a' * 81}/resolve/main/config.json")
    assert response.status == 400
    assert "80 characters" in str(json_of(response)["error"])


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
        assert 1 <= len(json_of(response)) <= 2
        if "Link" not in response.headers:
            break
        match = re.fullmatch(
            r'<http://127\.0\.0\.1:8080(/.*)>; rel="next"', response.headers["Link"]
        )
        assert match is not None
        target = match[1]
    assert found == everything


FORM = {"content-type": "application/x-www-form-urlencoded"}
JSON = {"content-type": "application/json; charset=utf-8"}
PATHS_INFO = "/api/models/org/model/paths-info/main"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (FORM, b"paths=config.json&paths=extra&paths=none&paths=..%2Fconfig.json&expand=False"),
        (JSON, b'{"paths": ["config.json", "/extra/", "none", "../config.json"], "expand": false}'),
    ],
    ids=["form", "JSON"],
)
def test_paths_are_described(library: Library, headers: dict[str, str], body: bytes) -> None:
    response = ask(library, PATHS_INFO, "POST", headers=headers, body=body)
    assert [entry["path"] for entry in json_of(response)] == ["config.json", "extra"]
    assert all("lastCommit" not in entry for entry in json_of(response))


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"paths=config.json", 415),
        ({"content-type": "text/plain"}, b"paths=config.json", 415),
        ({"content-type": "multipart/form-data; boundary=x"}, b"--x--", 415),
        (FORM, b'{"paths": ["config.json"]}', 400),
        (FORM, b"path=config.json", 400),
        (FORM, "paths=é".encode(), 400),
        (JSON, b"paths=config.json", 400),
        (JSON, b'["config.json"]', 400),
        (JSON, b'{"paths": "config.json"}', 400),
        (JSON, b'{"paths": [1]}', 400),
        (JSON, b'{"path": ["config.json"]}', 400),
        (JSON, b'{"paths": ["config.json"], "depth": 1}', 400),
        (JSON, b'{"paths": ["config.json"], "expand": "perhaps"}', 400),
        (FORM, b"paths=config.json&expand=perhaps", 400),
        (JSON, b"[" * 10**5, 400),
        (JSON, b'{"paths": [%s]}' % b",".join([b'"a"'] * 10_001), 400),
    ],
)
def test_a_body_that_is_not_understood_is_refused(
    library: Library, headers: dict[str, str], body: bytes, status: int
) -> None:
    response = ask(library, PATHS_INFO, "POST", headers=headers, body=body)
    assert response.status == status
    assert "X-Error-Code" not in response.headers


def test_an_address_is_read_or_written_to_as_its_route_says(library: Library) -> None:
    response = ask(library, PATHS_INFO)
    assert (response.status, response.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("name", ["org/model", "org/none"])
def test_an_address_without_a_route_says_nothing_of_models(library: Library, name: str) -> None:
    for target in (
        f"/api/models/{name}/discussions",
        f"/api/models/{name}/treesize/main",
        f"/api/models/{name}/xet-read-token/main",
        f"/api/models/{name}/auth-check/write",
        f"/api/models/{name}/tree",
        f"/api/models/{name}/refs/heads",
        f"/{name}/blob/main/config.json",
        f"/{name}",
    ):
        response = ask(library, target)
        assert response.status == 404
        assert "X-Error-Code" not in response.headers, target
        assert "does not offer" in response.headers["X-Error-Message"]


def test_fields_of_a_query_that_would_change_the_answer_are_understood_or_refused(
    library: Library,
) -> None:
    for target in (
        "/api/models?apps=vllm",
        "/api/models?num_parameters=min:6B",
        "/api/models?limit=all",
        "/api/models?limit=0",
        "/api/models?sort=color",
        "/api/models?gated=perhaps",
        "/api/models/org/model?revision=int8",
        "/api/models/org/model?blobs=maybe",
        "/api/models/org/model/tree/main?depth=2",
        "/api/models/org/model/tree/main?recursive=yes",
        "/api/models/org/model/refs?kind=tags",
        "/api/models/org/model/commits/main?author=me",
        f"/api/models/org/model?{'x' * 500}",
        "/api/models/org/model?%C3%A9=1",
        f"/api/models?sort={'%F0%9F%98%80' * 300}",
    ):
        assert ask(library, target).status == 400, target
    assert ask(library, "/org/model/resolve/main/config.json?download=true").status == 200


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
    info = json_of(ask(library, "/api/models/alone"))
    assert (info["id"], info["author"]) == ("alone", None)
    assert ask(library, "/alone/resolve/main/config.json").status == 200
    listed = json_of(ask(library, "/api/models?search=ALO&limit=5"))
    assert [item["id"] for item in listed] == ["alone"]


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("ghcr.io/team/llama", "ghcr.io.team/llama"),
        ("localhost:5000/team/llama", "localhost_5000.team/llama"),
        ("ghcr.io/llama", "ghcr.io._/llama"),
        ("localhost:5000/llama", "localhost_5000._/llama"),
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
    whole = Reference.parse(name).full.rpartition(":")[0].replace(":", "_")
    assert ask(library, f"/{whole}/resolve/main/config.json").status == 200
    for other in ("team/llama", "llama", f".{served}", "other.io.team/llama"):
        assert ask(library, f"/{other}/resolve/main/config.json").status == 404


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_quantized_model_has_the_files_of_an_export(
    store: LocalStore, tmp_path: Path, quantize: str
) -> None:
    from blobstore.operations.export.export import export_model
    from tests.support.models import quantizable_tensors

    source = write_folder(tmp_path / "m", quantizable_tensors())
    create(source, "quantized", store=store, quantize=QuantizeOptions(quantize))
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


# What clients decide by


@pytest.fixture
def described(library: Library, tmp_path: Path) -> Library:
    """A library with ``org/model``, which has no card, and two models that have one."""
    for name, card in {
        "team/chat": "pipeline_tag: text-generation\ntags: [tiny]\nlicense: mit",
        "team/embed": "pipeline_tag: feature-extraction\nlibrary_name: sentence-transformers\ntags: [tiny]",
    }.items():
        files = {
            "README.md": f"---\n{card}\n---\n".encode(),
            "config.json": b'{"model_type": "bert"}',
        }
        create(
            write_folder(tmp_path / name, dense_tensors(), files=files), name, store=library.store
        )
    return library


def listed(library: Library, query: str) -> list[str]:
    return [item["id"] for item in json_of(ask(library, f"/api/models?{query}"))]


def test_a_model_is_described_as_its_card_says(described: Library) -> None:
    info = json_of(ask(described, "/api/models/team/chat"))
    assert (info["pipeline_tag"], info["library_name"]) == ("text-generation", "transformers")
    assert {"safetensors", "tiny", "license:mit", "bert"} <= {*info["tags"]}
    assert info["config"] == {"model_type": "bert"}
    total = sum(tensor.size for tensor in dense_tensors().values())
    assert info["safetensors"]["total"] == sum(info["safetensors"]["parameters"].values()) == total
    assert info["usedStorage"] > total
    by_list = next(one for one in json_of(ask(described, "/api/models")) if one["id"] == info["id"])
    for name in (
        "pipeline_tag",
        "library_name",
        "tags",
        "downloads",
        "likes",
        "lastModified",
        "author",
    ):
        assert by_list[name] == info[name]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["org/model", "team/chat", "team/embed"]),
        ("author=team", ["team/chat", "team/embed"]),
        ("filter=tiny&filter=license:mit", ["team/chat"]),
        ("filter=tiny,feature-extraction", ["team/embed"]),
        ("filter=none", []),
        ("filter=", ["org/model", "team/chat", "team/embed"]),
        ("pipeline_tag=text-generation", ["team/chat"]),
        ("search=CHAT&full=True&cardData=True&config=True", ["team/chat"]),
        ("gated=true", []),
        (
            "gated=false&sort=downloads&direction=-1&expand=gguf",
            ["org/model", "team/chat", "team/embed"],
        ),
    ],
)
def test_lists_have_what_a_query_is_for(described: Library, query: str, found: list[str]) -> None:
    assert listed(described, query) == found


def test_a_list_is_sorted_by_time_as_asked(described: Library) -> None:
    for seconds, name in enumerate(("team/embed", "org/model", "team/chat")):
        moment = 1_700_000_000 + seconds
        os.utime(described.store.manifest_path(name), (moment, moment))
    newest = ["team/chat", "org/model", "team/embed"]
    assert listed(described, "sort=lastModified&direction=-1") == newest
    assert listed(described, "sort=createdAt&direction=1&limit=2") == newest[:0:-1]


def test_pages_of_a_list_are_all_of_it(described: Library) -> None:
    target, found = "/api/models?limit=1&filter=safetensors&author=", []
    for _ in range(9):
        response = ask(described, target, headers={"host": "cache:8080"})
        found += [item["id"] for item in json_of(response)]
        if "Link" not in response.headers:
            break
        target = response.headers["Link"][1:].partition(">")[0].removeprefix("http://cache:8080")
    assert found == ["org/model", "team/chat", "team/embed"]


def test_a_commit_and_its_files_have_a_date(library: Library) -> None:
    (commit,) = json_of(ask(library, "/api/models/org/model/commits/main?p=0"))
    assert COMMIT.fullmatch(commit["id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.000Z", commit["date"])
    assert commit["authors"] == []
    assert json_of(ask(library, "/api/models/org/model/commits/main?p=1")) == []
    assert ask(library, "/api/models/org/model/commits/none").status == 404
    tree = json_of(ask(library, "/api/models/org/model/tree/main?expand=True"))
    assert {entry["lastCommit"]["id"] for entry in tree} == {commit["id"]}
    assert {entry["lastCommit"]["date"] for entry in tree} == {commit["date"]}


def test_a_version_has_the_date_of_its_own_name(library: Library, store: LocalStore) -> None:
    copy_model("org/model", "org/tags:v1", store=store)
    create(
        write_folder(Path(store.root).parent / "other", moe_tensors()),
        "org/tags:v2",
        store=store,
    )
    for seconds, tag in enumerate(("v1", "v2")):
        moment = 1_700_000_000 + seconds
        os.utime(store.manifest_path(f"org/tags:{tag}"), (moment, moment))
    for number, tag in enumerate(("v1", "v2")):
        date = f"2023-11-14T22:13:2{number}.000Z"
        sha = json_of(ask(library, f"/api/models/org/tags/revision/{tag}"))["sha"]
        for revision in (tag, sha, f"refs%2Ftags%2F{tag}"):
            info = json_of(ask(library, f"/api/models/org/tags/revision/{revision}"))
            assert (info["lastModified"], info["createdAt"]) == (date, date)
            (commit,) = json_of(ask(library, f"/api/models/org/tags/commits/{revision}"))
            assert (commit["title"], commit["date"]) == (f"Store org/tags:{tag}", date)
            tree = json_of(ask(library, f"/api/models/org/tags/tree/{revision}?expand=true"))
            assert {entry["lastCommit"]["date"] for entry in tree} == {date}
    assert {one["lastModified"] for one in json_of(ask(library, "/api/models?search=tags"))} == {
        "2023-11-14T22:13:20.000Z"
    }


def test_a_damaged_model_is_listed_without_a_description(library: Library) -> None:
    create(library.store.root.parent / "source", "org/sound", store=library.store)
    path = library.store.manifest_path("org/model")
    path.chmod(0o600)
    path.write_bytes(b"{}")
    found = {one["id"]: one for one in json_of(ask(library, "/api/models"))}
    assert (found["org/model"]["tags"], found["org/sound"]["tags"] != []) == ([], True)


@pytest.mark.parametrize("query", ["", "filter=text-generation", "sort=lastModified"])
def test_a_list_leaves_out_a_name_that_leads_nowhere(described: Library, query: str) -> None:
    before = listed(described, query)
    path = described.store.manifest_path(before[0])
    path.unlink()
    path.symlink_to("nowhere")  # as if it was removed after its folder was listed
    assert sorted(listed(described, query)) == sorted(before[1:])


def test_a_model_that_is_not_in_the_store_has_the_first_date(library: Library) -> None:
    none = Reference.parse("org/none:v1")
    assert date_of(none, Visible.of(library)) == "1970-01-01T00:00:00.000Z"


def test_access_is_checked_without_a_file(library: Library) -> None:
    assert ask(library, "/api/models/org/model/auth-check").status == 200
    response = ask(library, "/api/models/org/none/auth-check")
    assert (response.status, response.headers["X-Error-Code"]) == (404, "RepoNotFound")


def test_raw_files_are_those_of_git(library: Library, folder: Path) -> None:
    for name, data in contents(folder).items():
        body = body_of(library.store, ask(library, f"/org/model/raw/main/{name}"))
        if name.endswith(".safetensors"):
            assert f"oid sha256:{Digest.of(data).hex}\nsize {len(data)}\n".encode() in body
        else:
            assert body == data
    response = ask(library, "/org/model/raw/main/none")
    assert (response.status, response.headers["X-Error-Code"]) == (404, "EntryNotFound")
