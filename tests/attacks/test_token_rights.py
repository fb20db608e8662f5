"""A client whose token opens some models asks for the others in every way, and for those whose names its globs cut apart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore
from tests.attacks.test_restricted_models import (
    FILE,
    HEADERS,
    HUB_ROUTES,
    METHODS,
    REGISTRY_ROUTES,
    Known,
    made,
    response,
    until_there,
)
from tests.support.hub_server import HubServer
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

FETCHED, OWN, ABSENT, OPEN = "org/fetched", "org/own", "org/never", "team/open"
FEW, MORE, EVERY = "token-of-the-few", "token-of-the-few-more", "token-of-everything"
TOKENS = f"name=ci models=team/*,org/tagged:v1 {FEW}\nname=team models=org/* {MORE}\n{EVERY}\n"


def bearer(token: str) -> str:
    return f"Bearer {token}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(FETCHED, made(tmp_path / "fetched", 1))
        server.add("org/later", made(tmp_path / "later", 4))
        yield server


@pytest.fixture(params=[True, False], ids=["upstream", "plain"])
def server(
    request: pytest.FixtureRequest, hub: HubServer, store: LocalStore, tmp_path: Path
) -> Iterator[Serving]:
    create(made(tmp_path / "own", 2), OWN, store=store)
    create(made(tmp_path / "open", 3), OPEN, store=store)
    for tag in ("v1", "v2"):
        copy_model(OPEN, f"org/tagged:{tag}", store=store)
    upstream = ["--upstream", hub.url]
    with serving(store, tmp_path, *upstream) as filling:
        assert filling.request(FILE.format(FETCHED))[0] == 200
        until_there(filling, store, FETCHED)
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    options = upstream if request.param else []
    with serving(store, tmp_path, f"--token-file={tokens}", *options) as running:
        yield running


@pytest.mark.parametrize("routes", [HUB_ROUTES, REGISTRY_ROUTES], ids=["hub", "registry"])
def test_a_model_that_a_token_does_not_open_is_answered_as_one_that_is_absent(
    server: Serving, hub: HubServer, store: LocalStore, routes: tuple[str, ...]
) -> None:
    cases = [(route, method, HEADERS[0]) for route in routes for method in METHODS]
    others = [one for one in HEADERS[1:] if "Authorization" not in one]
    cases += [(route, "GET", headers) for route in routes for headers in others]
    for name in (FETCHED, OWN):
        _, headers, _ = server.request(FILE.format(name), Authorization=bearer(EVERY))
        blob = str(store.resolve(name).layers[0].digest)
        known = Known(headers["x-repo-commit"], blob, headers["etag"])
        before = dict(hub.requests)
        for route, method, more in cases:
            sent = {**more, "Authorization": bearer(FEW)}
            expected = response(server, route, method, sent, ABSENT, known)
            assert response(server, route, method, sent, name, known) == expected, (route, method)
            assert expected[0] in {400, 401, 404, 405}, (route, method)
        # The same digests in a repository that the token opens.
        for place in (f"blobs/{blob}", f"manifests/{blob}", f"referrers/{blob}"):
            status, _, data = server.request(f"/v2/{OPEN}/{place}", Authorization=bearer(FEW))
            assert status == 404 or b'"digest"' not in data
        target = f"/{OPEN}/resolve/{known.commit}/model.safetensors"
        assert server.request(target, Authorization=bearer(FEW))[0] in {401, 404}
        about = [one for one, count in hub.requests.items() if count != before.get(one)]
        assert all(OPEN in one for one in about), "the upstream hears nothing of it"


def test_lists_and_the_log_have_what_a_token_stands_for(server: Serving) -> None:
    everything = {OPEN, "org/tagged", OWN, FETCHED}
    several = {FEW: {OPEN, "org/tagged"}, MORE: everything - {OPEN}, EVERY: everything}
    for token, names in several.items():
        listed = json.loads(server.request("/api/models", Authorization=bearer(token))[2])
        assert {one["id"] for one in listed} == names
        catalog = json.loads(server.request("/v2/_catalog", Authorization=bearer(token))[2])
        assert set(catalog["repositories"]) == names
        for name in names - {"org/tagged"}:
            assert server.request(FILE.format(name), Authorization=bearer(token))[0] == 200
    tags = json.loads(server.request("/v2/org/tagged/tags/list", Authorization=bearer(FEW))[2])
    assert tags["tags"] == ["v1"]
    assert (
        server.request("/org/tagged/resolve/v1/model.safetensors", Authorization=bearer(FEW))[0]
        == 200
    )
    assert (
        server.request("/org/tagged/resolve/v2/model.safetensors", Authorization=bearer(FEW))[0]
        != 200
    )
    found = {line.get("token") for line in server.log() if "status" in line}
    assert server.wait_for_log("token", "ci")["path"] == "/api/models"
    assert server.wait_for_log("token", "team")
    assert found <= {"ci", "team", None}
    assert "token-of" not in server.log_file.read_text()


def test_a_model_is_not_shown_while_it_arrives_for_another_token(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    tokens, later = tmp_path / "tokens", "org/later"
    tokens.write_text(TOKENS)
    gate = hub.repos[later].gates["model.safetensors"] = (100, threading.Event())
    about = Known(hub.repos[later].commit, f"sha256:{'0' * 64}", '"0"')
    with (
        serving(store, tmp_path, f"--token-file={tokens}", "--upstream", hub.url) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        reader = pool.submit(server.request, FILE.format(later), Authorization=bearer(EVERY))
        try:
            while server.request(f"/api/models/{later}", Authorization=bearer(EVERY))[0] != 200:
                assert not reader.done()
            for route in (*HUB_ROUTES, *REGISTRY_ROUTES):
                for more in ({}, {"X_Blobstore_Peer": "1"}):
                    sent = {**more, "Authorization": bearer(FEW)}
                    expected = response(server, route, "GET", sent, ABSENT, about)
                    assert response(server, route, "GET", sent, later, about) == expected, route
        finally:
            gate[1].set()
        assert reader.result()[0] == 200
