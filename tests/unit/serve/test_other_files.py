"""Files that no import takes come when a client asks for them: with a real upstream."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.transfer.pull import pull_model
from blobstore.serve.asked import Asked
from blobstore.serve.library import Library
from blobstore.serve.other_files import OtherFiles
from blobstore.serve.pulled import PulledModels
from blobstore.sources.hub_listing import ListedFile
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer, Repo
from tests.support.models import dense_tensors, write_folder
from tests.support.raw_server import RawServer, Received, reply
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME = "org/model"
ONNX = "onnx/model.onnx"
QUANTS = {f"m-{kind}.gguf": kind.encode() * 3000 for kind in ("Q4_K_M", "Q8_0")}
AT = f"/{NAME}/resolve/main"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def repo(hub: HubServer, tmp_path: Path) -> Repo:
    """A model with a file that an import leaves out."""
    folder = write_folder(tmp_path / "model", dense_tensors(), files={"README.md": b"# M\n"})
    (folder / "onnx").mkdir()
    (folder / ONNX).write_bytes(b"onnx" * 1000)
    (folder / "onnx" / "small.txt").write_bytes(b"in git")
    return hub.add(NAME, folder)


@pytest.fixture
def quants(hub: HubServer, tmp_path: Path) -> Repo:
    """One file for each of several quantizations."""
    folder = tmp_path / "quants"
    folder.mkdir()
    for name, data in QUANTS.items():
        (folder / name).write_bytes(data)
    return hub.add(NAME, folder)


def got(server: Serving, path: str, **headers: str) -> tuple[int, bytes]:
    """Return the answer for a file, once it is no longer on its way."""
    status, data = 503, b""
    while status == 503:
        status, _, data = server.request(f"{AT}/{path}", "GET", None, **headers)
    return status, data


def listed(server: Serving) -> dict[str, int]:
    """Return the sizes of the files that a client sees."""
    status, data = 503, b""
    while status == 503:
        status, _, data = server.request(f"/api/models/{NAME}/tree/main?recursive=true")
    entries: list[dict[str, Any]] = json.loads(data)
    return {entry["path"]: entry["size"] for entry in entries if entry["type"] == "file"}


def arrived(server: Serving) -> None:
    """Wait until the model itself is in the store."""
    got(server, "README.md")
    server.wait_for_log("written")


def files_of(repo: Repo) -> dict[str, int]:
    return {name: (repo.folder / name).stat().st_size for name in repo.files()}


def test_a_file_that_the_import_left_out_is_fetched_once_and_kept(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    right = (repo.folder / ONNX).read_bytes()
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh", "0") as server:
        assert listed(server) == files_of(repo)
        status, headers, _ = server.request(f"{AT}/{ONNX}", "HEAD")
        assert (status, int(headers["content-length"])) == (200, len(right))
        assert headers["x-linked-etag"] == f'"{repo.entry(ONNX)["lfs"]["oid"]}"'
        asked = f"GET /{NAME}/resolve/{repo.commit}/{ONNX}"
        assert hub.requests[asked] == 0, "nobody has asked for its bytes"
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: got(server, ONNX), range(8)))
        assert found == {(200, right)}
        server.wait_for_log("file", ONNX)
        assert got(server, ONNX, Range="bytes=4-7") == (206, b"onnx")
        assert got(server, "onnx/small.txt") == (200, b"in git")
        server.wait_for_log("file", "onnx/small.txt")
        assert listed(server) == files_of(repo)
        assert server.metric("upstream_bytes_total") == sum(files_of(repo).values())
    assert not verify_models(store=store).faults
    with serving(store, tmp_path) as server:  # for whom the store alone decides
        assert got(server, ONNX) == (200, right)
        assert got(server, "onnx/small.txt") == (200, b"in git")
        pulled = LocalStore(tmp_path / "pulled")
        pull_model(f"{server.url}/{NAME}", "copy", store=pulled)
    assert any(layer.name == ONNX for layer in pulled.resolve("copy").layers)


def test_a_file_that_was_left_out_and_is_lost_comes_again_when_a_client_asks_for_it(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    right = (repo.folder / ONNX).read_bytes()
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        arrived(server)
        assert got(server, ONNX) == (200, right)
        server.wait_for_log("file", ONNX)
        assert server.request(f"/v2/{NAME}/manifests/latest")[0] == 200
        Path(store.blob_path(Digest.of(right))).unlink()
        for _ in range(2):
            assert server.request(f"/v2/{NAME}/blobs/{Digest.of(right)}")[0] in {404, 502, 503}
        assert got(server, ONNX) == (200, right)
    assert not verify_models(store=store).faults


def test_no_file_is_begun_after_the_end(store: LocalStore) -> None:
    nothing: Any = None  # no space is claimed
    found: Any = object()
    others = OtherFiles(Library(store), nothing, {}, lambda *_: found, print, print)
    assert others.close() == []
    asked = Asked.named(Reference.parse(NAME))
    others._begin(asked, "", ListedFile(ONNX, 1, "sha1", "a" * 40))
    assert others.close() == []


def test_one_of_several_quantizations_comes_without_the_others(
    hub: HubServer, quants: Repo, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert listed(server) == files_of(quants)
        server.wait_for_log("model", NAME)
        assert listed(server) == files_of(quants), "none of them is here"
        assert not verify_models(store=store).faults
        assert got(server, "m-Q8_0.gguf") == (200, QUANTS["m-Q8_0.gguf"])
        server.wait_for_log("file", "m-Q8_0.gguf")
        assert server.metric("upstream_bytes_total") == len(QUANTS["m-Q8_0.gguf"])
        assert listed(server) == files_of(quants)
        assert got(server, "m-Q4_K_M.gguf") == (200, QUANTS["m-Q4_K_M.gguf"])
        server.wait_for_log("file", "m-Q4_K_M.gguf")
    assert {layer.name for layer in store.resolve(NAME).layers} >= QUANTS.keys()
    assert not verify_models(store=store).faults


def test_all_files_that_end_at_once_are_kept(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    right = {f"onnx/{number}.onnx": bytes([number]) * 1000 for number in range(6)}
    may_end = threading.Event()
    for name, data in right.items():
        (repo.folder / name).write_bytes(data)
        repo.gates[name] = (100, may_end)
    with (
        serving(store, tmp_path, "--upstream", hub.url) as server,
        ThreadPoolExecutor(len(right)) as pool,
    ):
        arrived(server)
        clients = {name: pool.submit(got, server, name) for name in right}
        try:
            for name in right:
                while server.request(f"{AT}/{name}", Range="bytes=0-9")[0] == 503:
                    assert not clients[name].done()
        finally:
            may_end.set()
        for name, data in right.items():
            assert clients[name].result() == (200, data)
            assert "error" not in server.wait_for_log("file", name)
        assert listed(server) == files_of(repo)
    assert {layer.name for layer in store.resolve(NAME).layers} >= right.keys()
    assert PulledModels(store).names.has_given(Reference.parse(NAME))
    assert not verify_models(store=store).faults


def test_bytes_of_such_a_file_come_before_the_upstream_has_sent_it(
    hub: HubServer, quants: Repo, store: LocalStore, tmp_path: Path
) -> None:
    name, data = "m-Q8_0.gguf", QUANTS["m-Q8_0.gguf"]
    gate = quants.gates[name] = (1000, threading.Event())
    with (
        serving(store, tmp_path, "--upstream", hub.url) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(got, server, name)
        try:
            status, _, part = server.request(f"{AT}/{name}", Range="bytes=0-999")
            while status == 503:
                status, _, part = server.request(f"{AT}/{name}", Range="bytes=0-999")
            assert (status, part) == (206, data[:1000])
            assert server.metric("upstream_bytes_total") >= 1000
            assert not whole.done()
        finally:
            gate[1].set()
        assert whole.result() == (200, data)


def test_no_client_gets_a_wrong_file_and_the_right_one_comes_later(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    repo.corrupt.add(ONNX)
    limits = {"other_files._REFUSED_SECONDS": 0.1}
    with serving(store, tmp_path, "--upstream", hub.url, limits=limits) as server:
        arrived(server)
        with contextlib.suppress(http.client.IncompleteRead):
            status, data = got(server, ONNX)
            assert status == 502, data
        server.wait_for_log("error", "the upstream lists")
        assert all(layer.name != ONNX for layer in store.resolve(NAME).layers)
        repo.corrupt.clear()
        status = 502
        while status == 502:
            status, data = got(server, ONNX)
        right = (repo.folder / ONNX).read_bytes()
        assert (status, data) == (200, right)
        # A client that has the beginning of the wrong file must not go on after it.
        etag = f'"{repo.entry(ONNX)["lfs"]["oid"]}"'
        assert got(server, ONNX, Range="bytes=4-7", If_Range=etag) == (200, right)


def test_a_file_larger_than_the_limit_is_refused_and_the_model_stays(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    (repo.folder / ONNX).write_bytes(bytes(600_000))
    with serving(store, tmp_path, "--upstream", hub.url, "--max-size", "500kB") as server:
        assert got(server, "README.md") == (200, b"# M\n")
        assert got(server, ONNX)[0] == 507
        assert got(server, "README.md") == (200, b"# M\n")


def test_a_lost_upstream_says_that_it_is_lost(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh", "0") as server:
        arrived(server)
        repo.status = 500
        assert got(server, ONNX)[0] == 502
        assert got(server, "README.md") == (200, b"# M\n")


def test_a_file_whose_tag_moves_while_it_arrives_is_that_of_its_commit(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    gate = repo.gates[ONNX] = (100, threading.Event())
    later = write_folder(tmp_path / "later", dense_tensors(), files={"README.md": b"# Later\n"})
    with (
        serving(store, tmp_path, "--upstream", hub.url, "--fresh", "0") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        arrived(server)
        client = pool.submit(got, server, ONNX)
        try:
            while server.request(f"{AT}/{ONNX}", Range="bytes=0-9")[0] == 503:
                assert not client.done()
            hub.repos[NAME] = Repo(later, "b" * 40, branches={"former": repo})
            while b"later" not in got(server, "README.md")[1].lower():
                assert not client.done()
            server.wait_for_log("commit", "b" * 40)
        finally:
            gate[1].set()
        right = (repo.folder / ONNX).read_bytes()
        assert client.result() == (200, right)
        assert "error" not in server.wait_for_log("file", ONNX)
        by_commit = f"/{NAME}/resolve/{repo.commit}/{ONNX}"
        assert server.request(by_commit)[2] == right
        assert got(server, "README.md") == (200, b"# Later\n")
    assert hub.requests[f"GET /store/{NAME}/resolve/{repo.commit}/{ONNX}"] == 1


def test_a_name_that_was_given_to_another_model_keeps_it(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    gate = repo.gates[ONNX] = (100, threading.Event())
    own = write_folder(tmp_path / "own", dense_tensors())
    with (
        serving(store, tmp_path, "--upstream", hub.url) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        arrived(server)
        client = pool.submit(got, server, ONNX)
        try:
            while server.request(f"{AT}/{ONNX}", Range="bytes=0-9")[0] == 503:
                assert not client.done()
            made = create(own, NAME, store=store)
        finally:
            gate[1].set()
        server.wait_for_log("file", ONNX)
    assert Digest.of(store.read_manifest(NAME)) == made.digest
    assert any(layer.name == ONNX for layer in store.resolve(f"{NAME}:{repo.commit}").layers)


def test_a_file_that_no_store_can_have_is_refused_by_its_name(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    (repo.folder / "with space.onnx").write_bytes(b"onnx")
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        arrived(server)
        assert "with space.onnx" not in listed(server)
        status, headers, _ = server.request(f"{AT}/with%20space.onnx")
        assert status == 404
        assert headers["x-error-code"] == "EntryNotFound"
        assert "keeps no file of that name" in headers["x-error-message"]
        _, headers, _ = server.request(f"{AT}/none.onnx")
        assert headers["x-error-message"] == "the model has no such file"


def test_a_file_of_too_many_is_not_said_to_be_absent(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    for number in range(2000):
        (repo.folder / f"{number}.onnx").touch()
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        arrived(server)
        status, headers, _ = server.request(f"{AT}/7.onnx")
        assert (status, headers["x-error-code"]) == (404, "EntryNotFound")
        assert "over 2,000 files" in headers["x-error-message"]


def test_a_token_that_the_upstream_does_not_know_refuses_nothing_that_is_public(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    def answer(received: Received) -> bytes:
        """Answer as the Hub, which refuses wrong tokens for public models, too."""
        if "wrong" in received.headers.get("authorization", ""):
            return reply(401)
        return reply(307, location=hub.url + received.path, x_repo_commit=repo.commit)

    right = (repo.folder / ONNX).read_bytes()
    with (
        RawServer(answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}", "--fresh=0") as server,
    ):
        assert got(server, "config.json")[0] == 200
        server.wait_for_log("written")
        assert got(server, ONNX, Authorization="Bearer wrong_token") == (200, right)
        assert got(server, ONNX) == (200, right)


def test_a_gated_file_is_for_those_whom_the_upstream_lets_in(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path
) -> None:
    repo.token = "hf_right"
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        right = (repo.folder / ONNX).read_bytes()
        assert got(server, ONNX)[0] == 401
        assert got(server, ONNX, Authorization="Bearer hf_right") == (200, right)
        assert got(server, ONNX)[0] == 401
        assert got(server, ONNX, Authorization="Bearer hf_wrong")[0] == 401
        server.wait_for_log("file", ONNX)
        assert got(server, ONNX)[0] == 401
        assert got(server, ONNX, X_Blobstore_Peer="1")[0] == 404


@pytest.mark.parametrize("revision", ["refs/pr/1", "feature/x"])
def test_a_revision_that_no_tag_can_be_is_the_commit_that_the_upstream_says(
    hub: HubServer, repo: Repo, store: LocalStore, tmp_path: Path, revision: str
) -> None:
    other = write_folder(tmp_path / "other", dense_tensors(), files={"README.md": b"# Other\n"})
    branch = hub.branch(NAME, revision, other)
    coded = revision.replace("/", "%2F")
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        status, data = 503, b""
        while status == 503:
            status, headers, data = server.request(f"/{NAME}/resolve/{coded}/README.md")
        assert (status, data) == (200, b"# Other\n")
        assert headers["x-repo-commit"] == branch.commit
        for path in ("", "/tree"):
            what = (
                f"/api/models/{NAME}{path}/{coded}"
                if path
                else f"/api/models/{NAME}/revision/{coded}"
            )
            assert server.request(what)[0] == 200, what
        assert server.request(f"/{NAME}/resolve/nothing%2Fsuch/README.md")[0] == 404
        assert got(server, "README.md") == (200, b"# M\n")


@pytest.mark.parametrize("kind", ["datasets", "spaces"])
def test_other_kinds_of_repositories_are_refused_by_name(
    store: LocalStore, tmp_path: Path, kind: str
) -> None:
    store.root.mkdir()
    with serving(store, tmp_path) as server:
        for target in (f"/api/{kind}/org/x", f"/{kind}/org/x/resolve/main/f"):
            status, headers, data = server.request(target)
            assert status == 404
            assert "this server has models only" in headers["x-error-message"]
            assert b"this server has models only" in data
