"""What is damaged in the store of ``blobstore serve --upstream``, and what clients see of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.real.test_pull_through import snapshot
from tests.support.damage import blob_path, flip, flip_header
from tests.support.hub_server import HubServer
from tests.support.models import Arrays, dense_tensors, write_folder
from tests.support.serve_process import SECONDS, Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME = "org/model"
MAIN = Reference.parse(f"{NAME}:latest")


def tensors() -> Arrays:
    random = np.random.default_rng(3)
    large = {name: random.standard_normal((64, 128), dtype=np.float32) for name in ("a", "z")}
    return dense_tensors() | large


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path / "source",
        tensors(),
        files={"tokenizer.json": b"{}" * 1000, "README.md": b"# A\n"},
    )


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, folder)
        yield server


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def get(server: Serving, path: str) -> tuple[int, bytes]:
    """Return the status and the bytes of a response; 0 if the connection breaks."""
    try:
        status, _, data = server.request(path)
    except (http.client.HTTPException, OSError):
        return 0, b""
    return status, data


def fetched(server: Serving, folder: Path) -> bool:
    """Fetch all files, and return whether all are right. No status says that the server has failed."""
    found = [get(server, f"/{NAME}/resolve/main/{name}") for name in names(folder)]
    assert all(status in (200, 0, 503) for status, _ in found), found
    expected = [(folder / name).read_bytes() for name in names(folder)]
    is_right = [data == right for (_, data), right in zip(found, expected, strict=True)]
    assert all(one or status != 200 for one, (status, _) in zip(is_right, found, strict=True))
    return all(is_right)


@pytest.fixture
def cache(hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path) -> LocalStore:
    """Return a store with the fetched model, which no server has open."""
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        until(lambda: fetched(server, folder))
        until(lambda: not server.metric("arriving_models"))
    return store


def _source_layer(store: LocalStore) -> Path:
    manifest = store.resolve(MAIN)
    (layer,) = (one for one in manifest.layers if "source" in one.media_type)
    return Path(store.blob_path(layer.digest))


DAMAGE: dict[str, Callable[[LocalStore], object]] = {
    "the first tensor": lambda store: flip(blob_path(store, "a", NAME)),
    "the last tensor": lambda store: flip(blob_path(store, "z", NAME)),
    "a header": lambda store: flip_header(blob_path(store, "z", NAME)),
    "a missing tensor": lambda store: blob_path(store, "z", NAME).unlink(),
    "a small file": lambda store: flip(blob_path(store, "tokenizer.json", NAME)),
    "a missing small file": lambda store: blob_path(store, "README.md", NAME).unlink(),
    "the config of the model": lambda store: flip(blob_path(store, "config.json", NAME)),
    "the source": lambda store: flip_header(_source_layer(store)),
    "a missing source": lambda store: _source_layer(store).unlink(),
    "the manifest": lambda store: os.truncate(store.manifest_path(MAIN), 100),
    "an empty manifest": lambda store: os.truncate(store.manifest_path(MAIN), 0),
    "a broken link as manifest": lambda store: _link(store, "nothing"),
    "a circular link as manifest": lambda store: _link(store, MAIN.tag),
}


def _link(store: LocalStore, target: str) -> None:
    path = store.manifest_path(MAIN)
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_fetched_model_that_is_damaged_is_fetched_again(
    hub: HubServer, folder: Path, cache: LocalStore, tmp_path: Path, what: str
) -> None:
    sent = hub.sent
    with serving(cache, tmp_path, "--upstream", hub.url) as server:
        if "tensor" in what:  # it was served before
            assert fetched(server, folder)
        DAMAGE[what](cache)
        until(lambda: fetched(server, folder))
        until(lambda: not server.metric("arriving_models"))
        assert fetched(server, folder)
    assert hub.sent > sent
    assert not verify_models(NAME, store=cache).faults
    assert [str(one) for one in cache.references()] == [str(MAIN)]
    is_blob = "missing" not in what and "manifest" not in what
    quarantine = cache.folder("quarantine")
    assert (quarantine.exists() and any(quarantine.iterdir())) == is_blob


def test_a_cache_of_another_server_heals_while_the_hubs_client_downloads(
    folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    """From a server by way of a cache to a client, each a real program; then a sector of the cache fails."""
    origin, right = (
        tmp_path / "origin",
        {name: (folder / name).read_bytes() for name in names(folder)},
    )
    create(folder, NAME, store=origin)
    logs = [tmp_path / "upstream", tmp_path / "cache"]
    for log in logs:
        log.mkdir()
    with (
        serving(LocalStore(origin), logs[0]) as upstream,
        serving(store, logs[1], "--upstream", upstream.url) as cache,
    ):
        assert snapshot(cache, tmp_path / "first") == right
        until(lambda: not cache.metric("arriving_models"))
        flip(blob_path(store, "z", NAME))
        until(lambda: fetched(cache, folder))
        until(lambda: not cache.metric("arriving_models"))
        assert snapshot(cache, tmp_path / "second") == right
        assert not verify_models(store=store).faults


def test_a_client_gets_the_right_bytes_of_a_damaged_file_at_once(
    hub: HubServer, folder: Path, cache: LocalStore, tmp_path: Path
) -> None:
    flip(blob_path(cache, "tokenizer.json", NAME))
    flip(blob_path(cache, "README.md", NAME))
    commit = hub.repos[NAME].commit
    with serving(cache, tmp_path, "--upstream", hub.url) as server:
        for revision, name in (("main", "tokenizer.json"), (commit, "README.md")):
            found = get(server, f"/{NAME}/resolve/{revision}/{name}")
            assert found == (200, (folder / name).read_bytes())
        until(lambda: not server.metric("arriving_models"))
        server.wait_for_log("error", "is damaged")
        assert server.metric("healed_total") >= 1
    assert not verify_models(NAME, store=cache).faults
    assert [str(one) for one in cache.references()] == [str(MAIN)]  # none named by the commit


@pytest.mark.parametrize("layer", ["z", "README.md", ""])  # the last one is the config
def test_a_registry_gives_a_damaged_blob_when_it_was_fetched_again(
    hub: HubServer, cache: LocalStore, tmp_path: Path, layer: str
) -> None:
    path = blob_path(cache, layer, NAME)
    data, digest = path.read_bytes(), path.name.replace("-", ":")
    with serving(cache, tmp_path, "--upstream", hub.url) as server:
        assert get(server, f"/v2/{NAME}/manifests/latest")[0] == 200
        flip(path)
        until(lambda: get(server, f"/v2/{NAME}/blobs/{digest}") == (200, data))
        statuses = {one.get("status") for one in server.log() if "blobs" in one.get("path", "")}
        assert not statuses & {500, 404}


@pytest.mark.parametrize("asks_for", ["blob", "config"])
def test_a_registry_gives_each_blob_by_its_digest_after_a_restart_though_another_is_missing(
    hub: HubServer, cache: LocalStore, tmp_path: Path, asks_for: str
) -> None:
    options = ("--upstream", hub.url)
    with serving(cache, tmp_path, *options) as server:
        manifest = json.loads(get(server, f"/v2/{NAME}/manifests/latest")[1])
    # No manifest of the store names the config that registries have, which is made of blobs.
    digest = manifest["config"]["digest"]
    if asks_for == "blob":
        digest = blob_path(cache, "a", NAME).name.replace("-", ":")
    blob_path(cache, "z", NAME).unlink()
    target = f"/v2/{NAME}/blobs/{digest}"
    with serving(cache, tmp_path, *options) as server:
        if asks_for == "config":  # one that nothing has, so that the damage is found
            assert get(server, f"/v2/{NAME}/blobs/sha256:{'0' * 64}")[0] == 404
        until(lambda: get(server, target)[0] == 200)
        statuses = {one.get("status") for one in server.log() if one.get("path") == target}
        assert not statuses & {404, 500}
    assert not verify_models(NAME, store=cache).faults


def test_intact_files_are_served_while_the_upstream_is_away(
    hub: HubServer, folder: Path, cache: LocalStore, tmp_path: Path
) -> None:
    path, right = f"/{NAME}/resolve/main", (folder / "README.md").read_bytes()
    flip(blob_path(cache, "tokenizer.json", NAME))
    options = ("--upstream", hub.url, "--fresh", "0")
    with serving(cache, tmp_path, *options) as server:
        assert get(server, f"{path}/README.md") == (200, right)
        hub.repos[NAME].status = 500
        assert get(server, f"{path}/tokenizer.json")[0] in (502, 503)
        assert get(server, f"{path}/README.md") == (200, right)
        hub.repos[NAME].status = 0
        until(lambda: get(server, f"{path}/tokenizer.json")[0] == 200)
        until(lambda: fetched(server, folder))


@pytest.mark.parametrize("what", ["a small file", "the source", "the manifest", "the last tensor"])
def test_a_damaged_model_of_the_stores_own_is_never_replaced(
    hub: HubServer, cache: LocalStore, tmp_path: Path, what: str
) -> None:
    """The repository has fetched versions, and the upstream one of the same name."""
    own = write_folder(
        tmp_path / "own",
        tensors() | {name: tensors()[name] + 1 for name in ("a", "z")},
        files={"tokenizer.json": b"[]"},
    )
    create(own, MAIN, store=cache)  # after it was fetched
    DAMAGE[what](cache)
    before, sent = cache.manifest_path(MAIN).read_bytes(), hub.sent
    statuses = set()
    with serving(cache, tmp_path, "--upstream", hub.url) as server:
        for _ in range(2):
            for name in ("tokenizer.json", "model.safetensors"):
                status, data = get(server, f"/{NAME}/resolve/main/{name}")
                assert status in (0, 500) or data == (own / name).read_bytes()
                statuses.add(status)
        server.wait_for_log("error")
    assert {0, 500} & statuses
    assert cache.manifest_path(MAIN).read_bytes() == before
    assert hub.sent == sent


@pytest.mark.parametrize("which", ["commit", "repository", "both"])
def test_a_damaged_record_of_a_fetch_is_written_again(
    hub: HubServer, folder: Path, cache: LocalStore, tmp_path: Path, which: str
) -> None:
    for path in cache.folder("pulled").iterdir():
        is_commit = b'"commit"' in path.read_bytes()
        if not path.name.startswith(".") and which in (
            "both",
            "commit" if is_commit else "repository",
        ):
            path.write_bytes(b"{")
    with serving(cache, tmp_path, "--upstream", hub.url) as server:
        until(lambda: fetched(server, folder))
        until(lambda: not server.metric("arriving_models"))
    for path in cache.folder("pulled").iterdir():
        assert path.name.startswith(".") or path.read_bytes() != b"{"


def test_a_model_whose_record_is_damaged_is_for_nobody_without_the_upstream(
    cache: LocalStore, tmp_path: Path
) -> None:
    for path in cache.folder("pulled").iterdir():
        if not path.name.startswith("."):
            path.write_bytes(b"{")
    with (
        serving(cache, tmp_path) as server,
        contextlib.closing(http.client.HTTPConnection(server.host, timeout=SECONDS)),
    ):
        assert get(server, f"/{NAME}/resolve/main/README.md")[0] == 404
        assert get(server, "/api/models")[1] == b"[]"
