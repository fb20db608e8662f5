"""Upstreams that lie to ``blobstore serve --upstream``: nothing wrong is published, and no client gets a whole file of it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.operations.maintenance.verify import verify_models
from blobstore.serve.model_files import model_files
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.raw_server import Answer, RawServer, Received, reply
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

COMMIT = "a" * 40
WEIGHTS = "/org/model/resolve/main/model.safetensors"
INFO = "/api/models/org/model/revision/main"
TREE = f"/api/models/org/model/tree/{COMMIT}?recursive=true"
FILE = f"/org/model/resolve/{COMMIT}/model.safetensors"


class Hub:
    """The answers of an upstream with one model, which tests replace by others."""

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.info: dict[str, Any] = {
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in self.files],
        }
        self.tree = [self.entry(name, data) for name, data in self.files.items()]
        self.others: dict[str, Callable[[Received], Answer] | bytes] = {}
        """Answers by paths."""

    @staticmethod
    def entry(name: str, data: bytes, **changes: Any) -> dict[str, Any]:
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
        return {
            "type": "file",
            "path": name,
            "size": len(data),
            "oid": "b" * 40,
            "lfs": large,
        } | changes

    def weights(self, **changes: Any) -> None:
        """Change what is listed of the weights."""
        self.tree = [
            entry | changes if entry["path"] == "model.safetensors" else entry
            for entry in self.tree
        ]

    def answer(self, received: Received) -> Answer:
        if received.path in self.others:
            other = self.others[received.path]
            return other if isinstance(other, bytes) else other(received)
        if received.path == INFO or received.path.endswith(f"/revision/{COMMIT}"):
            return reply(200, json.dumps(self.info).encode())
        if received.path == TREE:
            return reply(200, json.dumps(self.tree).encode())
        data = self.files.get(received.path.rpartition("/")[2])
        if data is None:
            return reply(404)
        if received.method == "HEAD":
            return reply(200, content_length=len(data))  # with no commit, as some mirrors
        return reply(200, data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(7)
    return write_folder(
        tmp_path / "source", {"weight": random.standard_normal((256, 256), dtype=np.float32)}
    )


@pytest.fixture
def hub(folder: Path) -> Hub:
    return Hub(folder)


@pytest.fixture
def server(hub: Hub, store: LocalStore, tmp_path: Path) -> Iterator[Serving]:
    with (
        RawServer(hub.answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}") as running,
    ):
        yield running


def fetched(server: Serving) -> tuple[int, bytes]:
    """Return the status of the weights, and what a client gets of them."""
    connection = http.client.HTTPConnection(server.host, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", WEIGHTS)
        response = connection.getresponse()
        try:
            return response.status, response.read()
        except http.client.IncompleteRead as error:
            return response.status, error.partial


def assert_nothing_is_published(server: Serving, store: LocalStore) -> None:
    server.wait_for_log("error")
    assert not list(store.references())
    assert not verify_models(store=store).faults
    assert server.request("/healthz")[0] == 200


def test_a_server_serves_what_the_upstream_has(hub: Hub, server: Serving) -> None:
    assert fetched(server) == (200, hub.files["model.safetensors"])


def test_a_wrong_digest(hub: Hub, server: Serving, store: LocalStore) -> None:
    hub.weights(lfs={"oid": "0" * 64, "size": 1})
    status, data = fetched(server)
    assert status in (200, 502)
    assert len(data) < len(hub.files["model.safetensors"])
    assert_nothing_is_published(server, store)


def test_who_got_wrong_bytes_does_not_go_on_after_them(
    hub: Hub, store: LocalStore, tmp_path: Path
) -> None:
    right = hub.files["model.safetensors"]
    hub.files["model.safetensors"] = bytes(len(right))
    limits = {"pull_through._REFUSED_SECONDS": 1}
    with (
        RawServer(hub.answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}", limits=limits) as server,
    ):
        fetched(server)
        server.wait_for_log("error")
        hub.files["model.safetensors"] = right
        status = 502
        while status == 502:  # the failure is repeated to others for a while
            status, headers, data = server.request(WEIGHTS, Range="bytes=1000-")
    assert (status, data) == (200, right)
    assert "content-range" not in headers


@pytest.mark.parametrize("size", [1, 1000])
def test_a_size_that_is_too_small(hub: Hub, server: Serving, store: LocalStore, size: int) -> None:
    hub.weights(size=size)
    assert len(fetched(server)[1]) < max(size, 100)
    assert_nothing_is_published(server, store)


def test_a_size_that_is_too_large(hub: Hub, server: Serving, store: LocalStore) -> None:
    hub.weights(size=10**9)
    fetched(server)
    assert_nothing_is_published(server, store)


@pytest.mark.parametrize("size", [-1, 10**18, 10**30, "1", None, 1.5, True])
def test_a_size_that_no_file_has(
    hub: Hub, server: Serving, store: LocalStore, size: object
) -> None:
    hub.weights(size=size)
    assert fetched(server)[0] in (502, 507)
    assert_nothing_is_published(server, store)


def test_a_body_without_an_end(hub: Hub, server: Serving, store: LocalStore) -> None:
    head = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n"
    hub.others[FILE] = lambda _: itertools.chain([head], itertools.repeat(bytes(1 << 16)))
    status, data = fetched(server)
    assert status in (200, 502)
    assert len(data) < len(hub.files["model.safetensors"])
    assert_nothing_is_published(server, store)


@pytest.mark.parametrize("path", [INFO, TREE])
def test_a_document_without_an_end(hub: Hub, server: Serving, store: LocalStore, path: str) -> None:
    head = b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n["
    hub.others[path] = lambda _: itertools.chain([head], itertools.repeat(b"[" * (1 << 20)))
    assert fetched(server)[0] == 502
    assert_nothing_is_published(server, store)


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ({"blobstore.sources.hub_client._MAX_PAGES": 5}, 5),
        ({"upstream._LIST_SECONDS": 0.0}, 1),  # a page at a time, for hours
    ],
)
def test_a_list_without_an_end(
    hub: Hub, store: LocalStore, tmp_path: Path, limit: dict[str, float], most: int
) -> None:
    pages = itertools.count()

    def page(received: Received) -> Answer:
        del received
        following = f"{TREE}&cursor={next(pages)}"
        hub.others[following] = page
        return reply(200, b"[]", link=f'<{following}>; rel="next"')

    hub.others[TREE] = page
    with (
        RawServer(hub.answer) as upstream,
        serving(
            store,
            tmp_path,
            *("--upstream", f"http://{upstream.host}"),
            limits=limit,
        ) as server,
    ):
        assert fetched(server)[0] == 502
        assert_nothing_is_published(server, store)
    assert next(pages) <= most


def test_a_list_of_too_many_files(hub: Hub, server: Serving, store: LocalStore) -> None:
    one = json.dumps(hub.entry("d/f.json", b"{}")).encode()
    # What is beyond the limit is not looked at.
    hub.others[TREE] = reply(200, b"[" + one + (b"," + one) * 20_000 + b",x")
    assert fetched(server)[0] == 502
    assert "more than 20000 entries" in server.wait_for_log("error")["error"]
    assert_nothing_is_published(server, store)


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model_index.json", "modules.json"]
)
def test_a_file_that_decides_and_is_too_large_is_not_fetched(
    hub: Hub, server: Serving, store: LocalStore, name: str
) -> None:
    asked: list[Received] = []

    def refuse(received: Received) -> Answer:
        asked.append(received)
        return reply(404)

    hub.others[f"/org/model/resolve/{COMMIT}/{name}"] = refuse
    hub.tree.append(hub.entry(name, b"{}", size=65 << 20))
    # Without it, nobody knows what the weights are: they are a file like others.
    assert fetched(server) == (200, hub.files["model.safetensors"])
    server.wait_for_log("file", "model.safetensors")
    assert not asked
    files = model_files(store, store.resolve("org/model"))
    assert files.keys() == hub.files.keys()
    assert not verify_models(store=store).faults


@pytest.mark.parametrize(
    "name",
    ["../../../../evil.json", "/tmp/evil.json", "a/../../evil.json", "..", "", "a//evil.json"],
)
def test_names_that_lead_out_of_the_folder(
    hub: Hub, server: Serving, store: LocalStore, tmp_path: Path, name: str
) -> None:
    hub.files["evil.json"] = b"{}"
    hub.tree.append(hub.entry(name, b"{}"))
    hub.info["siblings"].append({"rfilename": name})
    assert fetched(server) == (200, hub.files["model.safetensors"])
    server.wait_for_log("written")
    assert not [path for path in tmp_path.rglob("*evil*") if "resolve" not in path.name]
    assert not Path("/tmp/evil.json").exists()
    del store


@pytest.mark.parametrize("names", [("a.json", "a.json/b.json"), ("config.json/x.json",)])
def test_files_that_are_folders_too(
    hub: Hub, server: Serving, store: LocalStore, names: tuple[str, ...]
) -> None:
    for name in names:
        hub.tree.append(hub.entry(name, b"{}"))
    assert fetched(server)[0] in (200, 502, 507)
    assert server.request("/healthz")[0] == 200
    assert not verify_models(store=store).faults


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"sha": "main", "siblings": [{"rfilename": "a"}]},
        {"sha": "../" * 13 + "a", "siblings": [{"rfilename": "a"}]},
        {"sha": COMMIT},
        {"sha": COMMIT, "siblings": []},
        {"sha": COMMIT, "siblings": [{"rfilename": 1}]},
        {"sha": COMMIT, "siblings": "abc"},
        {"sha": ["a"], "siblings": [{"rfilename": "a"}]},
        [],
        "text",
        None,
    ],
)
def test_an_answer_that_is_not_the_hubs(
    hub: Hub, server: Serving, store: LocalStore, info: Any
) -> None:
    hub.info = info
    assert fetched(server)[0] in (404, 502)
    assert not list(store.references())


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b"\xff", b'{"sha": NaN}', b'{"sha":' + b"1" * 10_000 + b"}"]
)
@pytest.mark.parametrize("path", [INFO, TREE])
def test_an_answer_that_is_not_json(hub: Hub, server: Serving, path: str, text: bytes) -> None:
    hub.others[path] = reply(200, text)
    assert fetched(server)[0] == 502


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "gopher://127.0.0.1/x",
        "http://user:password@127.0.0.1/x",
        "//",
        "http://[::1",
        "",
    ],
)
@pytest.mark.parametrize("path", [INFO, FILE])
def test_redirects_to_what_is_not_a_server(
    hub: Hub, server: Serving, store: LocalStore, location: str, path: str
) -> None:
    hub.others[path] = reply(302, location=location)
    status, data = fetched(server)
    assert status in (200, 502)
    assert b"root:" not in data
    assert len(data) < len(hub.files["model.safetensors"])
    assert_nothing_is_published(server, store)


def test_redirects_in_a_circle(hub: Hub, server: Serving, store: LocalStore) -> None:
    hub.others[INFO] = reply(302, location=INFO)
    assert fetched(server)[0] == 502
    assert_nothing_is_published(server, store)


def test_tokens_do_not_follow_redirects(hub: Hub, server: Serving) -> None:
    seen: list[Received] = []

    def elsewhere(received: Received) -> Answer:
        seen.append(received)
        return reply(200, hub.files["model.safetensors"])

    with RawServer(elsewhere) as other:
        target = f"http://localhost:{other.host.rpartition(':')[2]}/x"
        hub.others[FILE] = reply(302, location=target, x_repo_commit=COMMIT)
        status, _, data = server.request(WEIGHTS, Authorization="Bearer hf_secret")
    assert (status, data) == (200, hub.files["model.safetensors"])
    assert seen
    assert not any("authorization" in one.headers or "hf_secret" in str(one) for one in seen)


@pytest.mark.parametrize("code", ["Evil", "RepoNotFound\x7f", "x" * 5000, "GatedRepo, Evil"])
def test_error_codes_that_the_hub_does_not_have(hub: Hub, server: Serving, code: str) -> None:
    hub.others[INFO] = reply(403, x_error_code=code, x_error_message="<script>")
    status, headers, data = server.request(WEIGHTS)
    assert (status, headers["x-error-code"]) == (401, "RepoNotFound")
    assert b"script" not in data


def test_control_characters_of_an_upstream_do_not_reach_the_log(
    hub: Hub, server: Serving, store: LocalStore
) -> None:
    hub.tree.append(hub.entry("\x1b[2J\n.json", b"{}"))
    hub.weights(lfs={"oid": "0" * 64})
    fetched(server)
    assert_nothing_is_published(server, store)
    assert "\x1b" not in server.log_file.read_text()


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer a b",
        "Basic dTpoZl94DQpYLUV2aWw6IHg=",  # a password with a line break and a header
        "Basic ////",
        "Bearer " + "x" * 8000,
    ],
)
def test_malformed_tokens_of_clients_do_not_reach_the_upstream(
    hub: Hub, server: Serving, authorization: str
) -> None:
    seen: list[Received] = []

    def refuse(received: Received) -> Answer:
        seen.append(received)
        return reply(404)

    hub.others[INFO] = refuse
    assert server.request(WEIGHTS, Authorization=authorization)[0] == 401
    assert seen
    assert not any("authorization" in one.headers or "x-evil" in one.headers for one in seen)
