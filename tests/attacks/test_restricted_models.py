"""Strangers who want to know which restricted models a server has: every route, with and without an upstream."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.serve.library import Library
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import write_folder
from tests.support.serve import ask, json_of
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

RIGHT = "Bearer hf_right"
GATED, LISTED, PRIVATE = "org/gated", "org/files", "org/Priv8"
UNPUBLISHED, ABSENT = "org/close", "org/never"
HIDDEN = (GATED, LISTED, PRIVATE, UNPUBLISHED)
ALLOWED = [option for name in (GATED, LISTED, PRIVATE, ABSENT) for option in ("--allow", name)]
FILE = "/{}/resolve/main/model.safetensors"


class Known(NamedTuple):
    """What a stranger may know of a model from elsewhere."""

    commit: str
    digest: str
    etag: str


HUB_ROUTES = (
    FILE,
    FILE + "?download=true",
    "/{}/resolve/main/",
    "/{}/resolve/main/none.json",
    "/{}/resolve/main/..%2Fconfig.json",
    "/{}/resolve/COMMIT/model.safetensors",
    "/{}/resolve/none/model.safetensors",
    "/{}/resolve/no%20tag/model.safetensors",
    "/{}/resolve/..%2F../model.safetensors",
    "/{}/resolve/refs%2Fheads%2Fmain/model.safetensors",
    "/{}/resolve/refs%2Fpr%2F1/model.safetensors",
    "/{}/resolve/" + "0" * 40 + "/model.safetensors",
    "/{}/resolve",
    "/registry.ollama.ai/{}/resolve/main/model.safetensors",
    "/registry.ollama.ai.{}/resolve/main/model.safetensors",
    "/{lower}/resolve/main/model.safetensors",
    "/{upper}/resolve/main/model.safetensors",
    "/{quoted}/resolve/main/model.safetensors",
    "/{encoded}/resolve/main/model.safetensors",
    "/{parts}/resolve/main/model.safetensors",
    "//{}/resolve/main/model.safetensors",
    "/./{}/resolve/main/model.safetensors",
    "/x/../{}/resolve/main/model.safetensors",
    "/{}/../{}/resolve/main/model.safetensors",
    "/{}/resolve/HEAD/model.safetensors",
    "/{}/raw/main/config.json",
    "/{}/raw/COMMIT/model.safetensors",
    "/{}/tree/main",
    "/{}",
    "/api/models/{}",
    "/api/models/{}?blobs=true",
    "/api/models/{}/",
    "/api/models/{}/refs",
    "/api/models/{}/refs/x",
    "/api/models/{}/revision/main",
    "/api/models/{}/revision/COMMIT",
    "/api/models/{}/revision/none",
    "/api/models/{}/revision/..%2F..",
    "/api/models/{}/revision",
    "/api/models/{}/tree/main?recursive=true",
    "/api/models/{}/tree/COMMIT",
    "/api/models/{}/tree/none/folder",
    "/api/models/{}/tree",
    "/api/models/{}/paths-info/main",
    "/api/models/{}/paths-info/none",
    "/api/models/{}/paths-info",
    "/api/models/{}/xet-read-token/main",
    "/api/models/{}/commits/main",
    "/api/models/{}/commits/COMMIT",
    "/api/models/{}/commits/none",
    "/api/models/{}/auth-check",
    "/api/models/{}/tree/main?expand=true",
    "/api/models/{}/tree/main?odd=true",
    "/api/resolve-cache/models/{}/COMMIT/config.json",
)
REGISTRY_ROUTES = (
    "/v2/{}/tags/list",
    "/v2/{}/tags/list?n=1",
    "/v2/{}/tags/none",
    "/v2/{}/manifests/latest",
    "/v2/{}/manifests/none",
    "/v2/{}/manifests/Q8_0",
    "/v2/{}/manifests/latest.image",
    "/v2/{}/manifests/no%20tag",
    "/v2/{}/manifests/DIGEST",
    "/v2/{}/manifests/sha256:0",
    "/v2/{}/manifests/sha256-00.sig",
    "/v2/{}/blobs/DIGEST",
    "/v2/{}/blobs/none",
    "/v2/{}/referrers/DIGEST",
    "/v2/{}/referrers/DIGEST?artifactType=x",
    "/v2/{}/manifests/latest?ns=registry.ollama.ai",
    "/v2/registry.ollama.ai/{}/blobs/DIGEST",
    "/v2/{lower}/blobs/DIGEST",
    "/v2/{lower}/manifests/latest",
    "/v2/{upper}/blobs/DIGEST",
    "/v2/{parts}/blobs/DIGEST",
    "/v2/{quoted}/blobs/DIGEST",
    "/v2/x/../{}/blobs/DIGEST",
    "/v2/{}/blobs/uploads/",
    "/v2/{}/none",
)
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"Range": "bytes=0-9"},
    {"Range": "bytes=999999999-"},
    {"If_None_Match": "ETAG"},
    {"If_None_Match": "*", "Prefer": "wait=1"},
    {"If_Range": "ETAG", "Range": "bytes=0-9"},
    {"Accept": "application/vnd.docker.distribution.manifest.v2+json"},
    {"Accept": "application/json"},
    {"Authorization": "Bearer hf_wrong"},
    {"Authorization": "Basic " + base64.b64encode(b"user:hf_wrong").decode()},
    {"X_Blobstore_Peer": "1"},
)
METHODS = ("GET", "HEAD", "POST", "PUT")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        for seed, name in enumerate((GATED, LISTED, PRIVATE)):
            repo = server.add(name, made(tmp_path / name, seed))
            repo.token, repo.gated = "hf_right", name != PRIVATE
            repo.is_listed = name == LISTED
        yield server


@pytest.fixture(params=[True, False], ids=["upstream", "plain"])
def upstream(request: pytest.FixtureRequest, hub: HubServer) -> list[str]:
    """Options of a server with an upstream, and of one without."""
    return ["--upstream", hub.url] if request.param else []


def made(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    return write_folder(folder, {"weight": random.standard_normal((64, 64), dtype=np.float32)})


@pytest.fixture
def known(hub: HubServer, store: LocalStore, tmp_path: Path) -> dict[str, Known]:
    """What is known of the models that are hidden, which the store has."""
    create(made(tmp_path / "own", 9), UNPUBLISHED, store=store)
    found = {}
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for name in HIDDEN:
            status, headers, _ = server.request(FILE.format(name), Authorization=RIGHT)
            assert status == 200
            if name != UNPUBLISHED:
                server.wait_for_log("written")
                until_there(server, store, name)
            blob = store.resolve(name).layers[0].digest
            found[name] = Known(headers["x-repo-commit"], str(blob), headers["etag"])
    return found


def until_there(server: Serving, store: LocalStore, name: str) -> None:
    server.wait_for_log("model", f"{name}:latest")
    assert store.has_model(name)


def counters(server: Serving) -> list[str]:
    """Return the metrics that do not count or time requests, or measure the disk or the store."""
    lines = server.request("/metrics")[2].decode().splitlines()
    others = (
        "requests",
        "request_seconds",
        "sent",
        "disk_",
        "store_blobs",
        "store_cold",
        "store_bytes",
    )
    return [line for line in lines if not any(word in line for word in others)]


def response(
    server: Serving, route: str, method: str, headers: dict[str, str], name: str, about: Known
) -> tuple[int, dict[str, str], bytes]:
    """Return the response to a request for a model, without its date."""

    def filled(text: str) -> str:
        text = text.replace("{}", name).replace("{lower}", name.lower())
        text = text.replace("{upper}", name.upper()).replace("{quoted}", name.replace("/", "%2F"))
        text = text.replace("{encoded}", "".join(f"%{ord(one):02x}" for one in name))
        text = text.replace("{parts}", name.replace("o", "%6F")).replace("COMMIT", about.commit)
        return text.replace("DIGEST", about.digest).replace("ETAG", about.etag)

    sent = {key: filled(value) for key, value in headers.items()}
    body = b"paths=config.json" if method == "POST" else None
    if body:
        sent["Content_Type"] = "application/x-www-form-urlencoded"
    status, found, data = server.request(filled(route), method, body, **sent)
    found.pop("date", None)
    return status, found, data


@pytest.mark.parametrize("routes", [HUB_ROUTES, REGISTRY_ROUTES], ids=["hub", "registry"])
def test_a_model_that_is_not_for_a_client_is_answered_as_one_that_is_absent(
    upstream: list[str],
    routes: tuple[str, ...],
    known: dict[str, Known],
    store: LocalStore,
    tmp_path: Path,
) -> None:
    with serving(store, tmp_path, *upstream, *ALLOWED) as server:
        cases = [(route, method, HEADERS[0]) for route in routes for method in METHODS]
        cases += [(route, "GET", headers) for route in routes for headers in HEADERS[1:]]
        for number, (route, method, headers) in enumerate(cases):
            is_plain = (method, headers) == ("GET", HEADERS[0])
            # Each model by each plain route, and by its turn in every other way.
            for name in HIDDEN if is_plain else (HIDDEN[number % len(HIDDEN)],):
                expected = response(server, route, method, headers, ABSENT, known[name])
                found = response(server, route, method, headers, name, known[name])
                assert found == expected, (route, method, headers, name)
                assert found[0] in {400, 401, 404, 405}, (route, method, headers, name)
        for listing in (
            "/api/models",
            "/api/models?author=org",
            "/api/models?filter=safetensors&sort=lastModified",
            "/v2/_catalog",
        ):
            assert b"org/" not in server.request(listing, Authorization=RIGHT)[2]
        status = 200 if upstream else 404
        assert server.request(FILE.format(GATED), Authorization=RIGHT)[0] == status


def test_no_metric_says_that_a_restricted_model_is_there(
    upstream: list[str], known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    changes = []
    for name in (ABSENT, GATED, PRIVATE):
        with serving(store, tmp_path, *upstream) as server:
            by_commit = FILE.replace("main", "COMMIT")
            for route in (FILE, by_commit, by_commit, "/v2/{}/blobs/DIGEST", "/v2/{}/tags/list"):
                response(server, route, "GET", {}, name, known[GATED])
            changes.append(counters(server))
    assert changes[1:] == changes[:1] * 2


def test_a_restricted_model_is_not_shown_while_it_arrives(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    create(made(tmp_path / "own", 9), UNPUBLISHED, store=store)
    gate = hub.repos[GATED].gates["model.safetensors"] = (100, threading.Event())
    about = Known(hub.repos[GATED].commit, f"sha256:{'0' * 64}", '"0"')
    with (
        serving(store, tmp_path, "--upstream", hub.url) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        reader = pool.submit(server.request, FILE.format(GATED), Authorization=RIGHT)
        try:
            target = f"/api/models/{GATED}"
            while server.request(target, Authorization=RIGHT)[0] != 200:
                assert not reader.done()
            for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
                for headers in ({}, {"X_Blobstore_Peer": "1"}):
                    expected = response(server, route, "GET", headers, ABSENT, about)
                    found = response(server, route, "GET", headers, GATED, about)
                    assert found == expected, (route, headers)
            assert b"org/gated" not in server.request("/api/models")[2]
        finally:
            gate[1].set()
        assert reader.result()[0] == 200
        assert server.metric("cache_misses_total") == 1


def test_the_answer_is_the_same_if_the_upstream_is_gone(
    known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    copy_model(GATED, "plain", store=store)
    with serving(store, tmp_path, "--upstream", "http://127.0.0.1:9") as server:
        assert server.metric("upstream_errors_total") == 0
        for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
            for headers in ({}, {"Authorization": RIGHT}):
                for absent, names in (
                    (ABSENT, (GATED, PRIVATE)),
                    ("library/never", ("library/plain",)),
                ):
                    expected = response(server, route, "GET", headers, absent, known[GATED])
                    for name in names:
                        found = response(server, route, "GET", headers, name, known[GATED])
                        assert found == expected, (route, headers, name)
        assert server.metric("upstream_errors_total") > 0


def test_a_copy_of_a_restricted_model_is_for_nobody_else_either(
    upstream: list[str], known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    copy_model(GATED, "own/copy1", store=store)
    copy_model(GATED, "ghcr.io/own/copy2", store=store)
    with serving(store, tmp_path, *upstream) as server:
        for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
            for name, absent in (
                ("own/copy1", "own/never"),
                ("ghcr.io/own/copy2", "ghcr.io/own/never"),
                ("ghcr.io.own/copy2", "ghcr.io.own/never"),
            ):
                for headers in ({}, {"X_Blobstore_Peer": "1"}):
                    expected = response(server, route, "GET", headers, absent, known[GATED])
                    found = response(server, route, "GET", headers, name, known[GATED])
                    assert found == expected, (route, headers, name)
        assert b"copy" not in server.request("/api/models")[2] + server.request("/v2/_catalog")[2]


def test_a_copy_stays_hidden_after_its_source_could_not_be_read(
    known: dict[str, Known], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_model(GATED, "own/copy", store=store)
    (layer,) = store.resolve(GATED).layers_of(media_types.SOURCE)
    source = Path(store.blob_path(layer.digest))
    hidden, library = source.with_suffix(".away"), Library(store)
    source.rename(hidden)
    for target in (FILE.format("own/copy"), "/v2/own/copy/manifests/latest"):
        assert ask(library, target).status == 404
    hidden.rename(source)
    for target in (FILE.format("own/copy"), "/v2/own/copy/manifests/latest"):
        assert ask(library, target).status == 404
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr("blobstore.serve.commits.time", later)
    assert json_of(ask(library, "/v2/_catalog")) == {"repositories": [UNPUBLISHED]}


def test_a_copy_whose_source_is_damaged_is_answered_as_an_absent_model(
    upstream: list[str], known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    copy_model(GATED, "own/copy1", store=store)
    (layer,) = store.resolve(GATED).layers_of(media_types.SOURCE)
    damaged = Path(store.blob_path(layer.digest))
    damaged.chmod(0o600)
    damaged.write_bytes(b"damaged")
    with serving(store, tmp_path, *upstream) as server:
        for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
            expected = response(server, route, "GET", {}, "own/never", known[GATED])
            assert response(server, route, "GET", {}, "own/copy1", known[GATED]) == expected, route
        assert b"copy" not in server.request("/api/models")[2] + server.request("/v2/_catalog")[2]


def test_a_model_of_the_stores_own_has_none_of_the_restricted_versions_of_its_repository(
    upstream: list[str], known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    create(made(tmp_path / "mine", 5), f"{GATED}:mine", store=store)
    (blob,) = store.resolve(f"{GATED}:mine").layers[:1]
    with serving(store, tmp_path, *upstream) as server:
        assert server.request(FILE.format(GATED).replace("main", "mine"))[0] == 200
        assert server.request(f"/v2/{GATED}/manifests/mine")[0] == 200
        assert server.request(f"/v2/{GATED}/blobs/{blob.digest}")[0] == 200
        for route in (
            FILE,
            "/{}/resolve/COMMIT/model.safetensors",
            "/v2/{}/manifests/latest",
            "/v2/{}/blobs/DIGEST",
        ):
            assert response(server, route, "GET", {}, GATED, known[GATED])[0] in {401, 404}, route
        for listing in (f"/v2/{GATED}/tags/list", f"/api/models/{GATED}/refs"):
            assert b"latest" not in server.request(listing)[2]


def test_what_is_hidden_in_a_repository_is_as_absent_there_as_in_a_store_without_it(
    hub: HubServer, known: dict[str, Known], store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    """A copy is a tag of a public repository, and restricted versions are next to a tag of the operator's."""
    hub.add("org/open", made(tmp_path / "open", 7))
    copy_model(GATED, "org/open:copy", store=store)
    asked = [
        ("/{}/resolve/copy/config.json", "org/open"),
        ("/{}/resolve/COMMIT/config.json", "org/open"),
        ("/v2/{}/manifests/copy", "org/open"),
        ("/api/models/registry.ollama.ai/{}/refs", GATED),
        ("/api/models/registry.ollama.ai/{}/auth-check", GATED),
        ("/registry.ollama.ai/{}/resolve/main/config.json", GATED),
    ]
    found = []
    for one in (store, other):
        create(made(tmp_path / "mine", 5), f"{GATED}:mine", store=one)
        with serving(one, tmp_path, "--upstream", hub.url) as server:
            found.append(
                [response(server, it, "GET", {}, name, known[GATED]) for it, name in asked]
            )
            right = {"Authorization": RIGHT}
            copies = [response(server, it, "GET", right, name, known[GATED]) for it, name in asked]
            assert [one[0] for one in copies[:3]] == [200 if one == store else 404] * 3
    assert found[0] == found[1]


def test_a_restricted_model_that_is_damaged_is_not_shown_by_the_error(
    upstream: list[str], known: dict[str, Known], store: LocalStore, tmp_path: Path
) -> None:
    for name in (GATED, PRIVATE):
        manifest = store.resolve(name)
        damaged = store.manifest_path(Reference.parse(name))
        if name == GATED:
            damaged = Path(store.blob_path(manifest.layers[0].digest))
        damaged.chmod(0o600)
        damaged.write_bytes(b"damaged")
    with serving(store, tmp_path, *upstream) as server:
        for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
            for name in (GATED, PRIVATE):
                expected = response(server, route, "GET", {}, ABSENT, known[name])
                assert response(server, route, "GET", {}, name, known[name]) == expected, route


def test_a_server_notices_restricted_models_that_another_one_fetches(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    create(made(tmp_path / "own", 9), UNPUBLISHED, store=store)
    (tmp_path / "plain").mkdir()
    with (
        serving(store, tmp_path / "plain") as plain,
        serving(store, tmp_path, "--upstream", hub.url) as server,
    ):
        assert plain.request(FILE.format(UNPUBLISHED))[0] == 200
        status, headers, _ = server.request(FILE.format(GATED), Authorization=RIGHT)
        assert status == 200
        until_there(server, store, GATED)
        blob = store.resolve(GATED).layers[0].digest
        known = Known(headers["x-repo-commit"], str(blob), headers["etag"])
        for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
            expected = response(plain, route, "GET", {}, ABSENT, known)
            assert response(plain, route, "GET", {}, GATED, known) == expected, route
        assert b"org/gated" not in plain.request("/api/models")[2]
        # A server may also start while another one fetches.
        (tmp_path / "later").mkdir()
        with serving(store, tmp_path / "later") as later:
            assert later.request(FILE.format(GATED))[0] == 404
            assert later.request(FILE.format(UNPUBLISHED))[0] == 200
