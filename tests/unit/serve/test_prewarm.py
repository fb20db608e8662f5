"""A server that is not ready until the models of a lock file are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import NotFound, UsageError
from blobstore.manifests.lock_file import LockedModel, format_lock
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.serve.serve import serve
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import write_folder
from tests.support.serve_process import SECONDS, Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")
pytest.importorskip("httpx2", reason="it is in the extra [registry]")
FILE = "/org/model/resolve/main/model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    weight = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    with HubServer() as server:
        server.add("org/model", write_folder(tmp_path / "source", {"weight": weight}))
        yield server


def locked(hub: HubServer, folder: Path, repository: str = "org/model") -> str:
    """Return the option with a lock file of the model at the Hub."""
    model = LockedModel(
        reference=Reference.parse("org/model"),
        manifest=Digest.of(b"of another import"),
        repository=repository,
        commit=hub.repos["org/model"].commit,
    )
    (folder / "models.lock").write_text(format_lock([model]))
    return f"--prewarm={folder / 'models.lock'}"


def until_ready(server: Serving) -> None:
    deadline = time.monotonic() + SECONDS
    while server.request("/readyz")[0] != 200:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.02)


def test_a_cache_is_ready_when_the_upstream_has_sent_all(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    gate = hub.repos["org/model"].gates["model.safetensors"] = (100, threading.Event())
    option = locked(hub, tmp_path)
    with serving(store, tmp_path, "--upstream", hub.url, option) as server:
        try:
            while server.metric("arriving_models") != 1:
                time.sleep(0.02)
            status, _, body = server.request("/readyz")
            assert (status, b"1 models" in body) == (503, True)
            assert server.request("/healthz")[0] == 200
        finally:
            gate[1].set()
        until_ready(server)
        assert server.wait_for_log("prewarm")["prewarm"] == "org/model:latest"
        sent = hub.sent
        assert server.request(FILE)[2] == (tmp_path / "source/model.safetensors").read_bytes()
        assert hub.sent == sent, "nothing is fetched again"
        # It is a part of the cache, for those whom the upstream lets read it.
        hub.repos["org/model"].token = "hf_right"
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        deadline = time.monotonic() + SECONDS
        while server.request(FILE)[0] != 401:
            assert time.monotonic() < deadline


def test_what_cannot_be_fetched_is_asked_for_again(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.repos["org/model"].status = 404
    option, limits = locked(hub, tmp_path), {"prewarm._RETRY_SECONDS": 0.1}
    limits["pull_through._REFUSED_SECONDS"] = 0.1
    with serving(store, tmp_path, "--upstream", hub.url, option, limits=limits) as server:
        assert server.wait_for_log("prewarm")["error"]
        assert server.request("/readyz")[0] == 503
        hub.repos["org/model"].status = 0
        until_ready(server)


@pytest.mark.parametrize(
    "repository",
    ["org/mo del", "org/..", "org/model/manifests/x?", "é", "my.org/model", f"org/{'long-' * 17}"],
)
def test_a_repository_that_no_client_can_ask_for_is_named_in_the_log(
    hub: HubServer, store: LocalStore, tmp_path: Path, repository: str
) -> None:
    """It does not become the store's own, which everyone may read."""
    with serving(
        store, tmp_path, "--upstream", hub.url, locked(hub, tmp_path, repository)
    ) as server:
        error = server.wait_for_log("prewarm", "org/model")["error"]
        assert error.startswith("clients cannot ask a cache for")
        assert server.request("/readyz")[0] == 503


def test_models_of_another_server_become_those_of_the_store(
    store: LocalStore, tmp_path: Path
) -> None:
    weight = np.ones((64, 64), dtype=np.float32)
    origin, file = LocalStore(tmp_path / "origin"), tmp_path / "models.lock"
    create(write_folder(tmp_path / "own", {"weight": weight}), "team/own", store=origin)
    (tmp_path / "other").mkdir()
    with serving(origin, tmp_path / "other") as other:
        name = Reference.parse("team/own")
        digest = Digest.of(origin.read_manifest(name))
        there = LockedModel(reference=name, manifest=digest, remote=f"{other.url}/team/own")
        file.write_text(format_lock([there]))
        with serving(store, tmp_path, f"--prewarm={file}") as server:
            until_ready(server)
            assert Digest.of(store.read_manifest(name)) == digest
            assert server.request("/team/own/resolve/main/model.safetensors")[0] == 200


def test_a_lock_file_must_be_one(store: LocalStore, tmp_path: Path) -> None:
    file = tmp_path / "models.lock"
    with pytest.raises(NotFound, match="there is no lock file"):
        serve(store, prewarm=file, port=0, on_ready=pytest.fail)
    file.write_text("version = 99\n")
    with pytest.raises(UsageError, match="models.lock"):
        serve(store, prewarm=file, port=0, on_ready=pytest.fail)
