"""``blobstore serve --upstream`` between real clients and an upstream that speaks the Hub's protocol."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.create.save import save
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.transfer.pull import pull_model
from blobstore.store.local import LocalStore
from tests.support.clients import run_client
from tests.support.hub_server import HubServer, Repo
from tests.support.models import Arrays, dense_tensors, write_folder
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME = "org/model"
FILE = f"/{NAME}/resolve/main/model-00001-of-00002.safetensors"
RIGHT = "Bearer hf_right"
COMMAND = (sys.executable, "-m", "blobstore", "serve", "--port=0")
SNAPSHOT = """
import json, sys
from huggingface_hub import snapshot_download
print(json.dumps(snapshot_download(sys.argv[1])))
"""


def tensors() -> Arrays:
    random = np.random.default_rng(3)
    large = {
        name: random.standard_normal((64, 128), dtype=np.float32) for name in ("first", "second")
    }
    return dense_tensors() | large


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(
        tmp_path / "source",
        tensors(),
        shards=2,
        files={"tokenizer.json": b"{}" * 1000, "README.md": b"# A model\n"},
    )


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, folder)
        yield server


def snapshot(server: Serving, cache: Path, name: str = NAME) -> dict[str, bytes]:
    """Return the files that the Hub's own client downloads, in a process of its own with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache)}
    result = run_client(SNAPSHOT, name, environment=environment)
    assert result.code == 0, result.stderr
    return contents(Path(json.loads(result.stdout.splitlines()[-1])))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_model_that_is_absent_is_fetched_once_for_ten_clients(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        with ThreadPoolExecutor(10) as pool:
            found = list(
                pool.map(lambda number: snapshot(server, tmp_path / f"{number}"), range(10))
            )
        fetched = server.metric("upstream_bytes_total")
    assert all(one == contents(folder) for one in found)
    assert fetched == hub.sent == sum(map(len, contents(folder).values()))
    assert contents(exported(store, tmp_path)) == contents(folder)


def test_a_fine_tune_costs_its_own_tensors_on_disk(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    tuned = dict(tensors(), first=tensors()["first"] + 1)
    tune = write_folder(tmp_path / "tune", tuned, shards=2)
    hub.add("org/tune", tune)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        snapshot(server, tmp_path / "first")
        wait_for_arrival(server, "org/model:latest")
        before, sent = used(store), hub.sent
        assert snapshot(server, tmp_path / "second", "org/tune") == contents(tune)
        entry = wait_for_arrival(server, "org/tune:latest")
        assert hub.sent - sent == sum(map(len, contents(tune).values()))
    blob = tuned["first"].nbytes + 8192  # with its header, the source record, config and index
    assert entry["written"] == used(store) - before < blob
    assert not any(store.folder("arrivals").iterdir())


def test_the_first_client_gets_bytes_before_the_upstream_has_sent_the_file(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    half = len(data) // 2
    gate = hub.repos[NAME].gates["model-00001-of-00002.safetensors"] = (half, threading.Event())
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        connection = http.client.HTTPConnection(server.host, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", FILE)
            response = connection.getresponse()
            assert response.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'
            first = response.read(half)
            assert first == data[:half]
            assert not store.has_model(NAME)
            gate[1].set()
            assert first + response.read() == data
        wait_for_arrival(server, "org/model:latest")
    assert store.has_model(NAME)


def test_a_client_that_leaves_does_not_end_the_import(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    gate = hub.repos[NAME].gates["model-00001-of-00002.safetensors"] = (100, threading.Event())
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        connection = http.client.HTTPConnection(server.host, timeout=60)
        connection.request("GET", FILE)
        assert connection.getresponse().read(100)
        connection.close()
        gate[1].set()
        wait_for_arrival(server, "org/model:latest")
        assert snapshot(server, tmp_path / "cache") == contents(folder)
    assert hub.sent == sum(map(len, contents(folder).values()))


@pytest.mark.parametrize("tag", ["latest", "v1"])
def test_a_name_that_the_operator_gives_while_a_model_arrives_stays_the_operators(
    tag: str, hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.repos[NAME]
    repo.branches["v1"] = Repo(folder, repo.commit)  # the same commit, so that it is one arrival
    gate = repo.gates["model-00001-of-00002.safetensors"] = (100, threading.Event())
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        connection = http.client.HTTPConnection(server.host, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", FILE)
            assert connection.getresponse().read(100)
            assert server.request(f"/api/models/{NAME}/revision/v1")[0] == 200
            own = save({"mine": np.ones(3, np.float32)}, f"{NAME}:{tag}", store=store)
            gate[1].set()
            until(lambda: any("written" in entry for entry in server.log()))
    assert store.names.version(f"{NAME}:{tag}") == own.digest
    assert (f"{NAME}:latest is a model of the store's own by now" in str(server.log())) == (
        tag == "latest"
    )
    assert store.has_model(NAME)  # it is fetched unless it is the operator's


def test_an_upstream_that_is_gone_is_answered_for_by_the_store(
    folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    with HubServer() as hub:
        hub.add(NAME, folder)
        with serving(store, tmp_path, "--upstream", hub.url) as server:
            first = server.request(FILE)
            wait_for_arrival(server, "org/model:latest")
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        assert snapshot(server, tmp_path / "cache") == contents(folder)
        again = server.request(FILE)
        assert again[0] == first[0] == 200
        assert again[2] == first[2]
        assert again[1]["etag"] == first[1]["etag"]
        assert again[1]["x-repo-commit"] == first[1]["x-repo-commit"]
        assert server.request("/org/other/resolve/main/config.json")[0] == 502


@pytest.mark.parametrize(("status", "seconds"), [(429, "1"), (500, "0"), (503, "0")])
def test_a_busy_upstream_is_waited_for(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path, status: int, seconds: str
) -> None:
    repo = hub.repos[NAME]
    repo.retry_after = seconds
    for what in ("info", "tree", "model-00001-of-00002.safetensors"):
        repo.statuses[what] = [status]
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert snapshot(server, tmp_path / "cache") == contents(folder)


def test_a_busy_upstream_is_not_waited_for_if_the_store_has_the_model(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        snapshot(server, tmp_path / "first")
        wait_for_arrival(server, "org/model:latest")
        hub.repos[NAME].status, hub.repos[NAME].retry_after = 429, "100"
        assert snapshot(server, tmp_path / "second") == contents(folder)


def test_a_tag_that_has_moved_is_noticed_when_it_is_no_longer_fresh(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        old = server.request(FILE)
        wait_for_arrival(server, "org/model:latest")
        changed = dict(tensors(), first=tensors()["first"] + 1)
        hub.add(NAME, write_folder(tmp_path / "new", changed, shards=2)).commit = "c" * 40
        until(lambda: server.request(FILE, "HEAD")[1].get("x-repo-commit") == "c" * 40)
        new = snapshot(server, tmp_path / "cache")
        assert new == contents(tmp_path / "new")
        # The version before has a name of its own until gc removes it.
        pinned = f"/{NAME}/resolve/{old[1]['x-repo-commit']}/model-00001-of-00002.safetensors"
        hub.branch(NAME, "old", tmp_path / "source").commit = old[1]["x-repo-commit"]
        assert server.request(pinned)[2] == old[2]


def test_a_tag_is_not_asked_about_while_it_is_fresh(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        server.request(FILE)
        wait_for_arrival(server, "org/model:latest")
        before = hub.requests.total()
        snapshot(server, tmp_path / "cache")
        assert hub.requests.total() == before


def test_what_the_upstream_does_not_have_is_answered_as_by_the_hub(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        status, headers, _ = server.request("/api/models/org/none/revision/main")
        assert (status, headers["x-error-code"]) == (401, "RepoNotFound")
        status, headers, _ = server.request(f"/api/models/{NAME}/revision/none")
        assert (status, headers["x-error-code"]) == (404, "RevisionNotFound")
        server.request(FILE)
        wait_for_arrival(server, "org/model:latest")
        status, headers, _ = server.request(f"/{NAME}/resolve/main/none.json")
        assert (status, headers["x-error-code"]) == (404, "EntryNotFound")
        del hub.repos[NAME]
        until(lambda: server.request(FILE)[1].get("x-error-code") == "RepoNotFound")


def test_models_of_the_stores_own_are_none_of_the_upstreams_business(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    own = write_folder(tmp_path / "own", {"only": dense_tensors()["scalar"]})
    create(own, NAME, store=store)
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        assert snapshot(server, tmp_path / "cache") == contents(own)
    assert not hub.requests


def is_given(server: Serving, target: str) -> bool:
    return server.request(target, Authorization=RIGHT)[0] == 200


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_copy_of_the_operators_is_for_those_who_may_read_the_fetched_model(
    is_gated: bool, hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.repos[NAME]
    repo.token, repo.gated = ("hf_right", True) if is_gated else (repo.token, repo.gated)
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        server.request(FILE, Authorization=RIGHT)
        wait_for_arrival(server, "org/model:latest")
        copy_model(NAME, "my/kept", store=store)
        targets = (
            FILE.replace(NAME, "my/kept"),
            "/api/models/my/kept/refs",
            "/v2/my/kept/tags/list",
        )
        for target in targets:
            until(partial(is_given, server, target))
        assert not [one for one in hub.requests if "my/kept" in one]
        # Others hear of it what they would hear of an absent model.
        for target in targets:
            assert server.request(target)[0] == (401 if is_gated else 200), target


def test_questions_without_a_revision_about_own_models_ask_and_fetch_nothing(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    create(folder, "org/own:v1", store=store)
    hub.add("org/own", folder)
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        for target in ("/api/models/org/own/refs", "/v2/org/own/tags/list"):
            assert server.request(target)[0] == 200
        assert not hub.requests
    assert [str(one) for one in store.references()] == ["org/own:v1"]


def test_what_the_operator_imports_stays_though_clients_have_its_commit_fetched(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    first = LocalStore(tmp_path / "first")
    (tmp_path / "log").mkdir()
    with serving(first, tmp_path / "log", "--upstream", hub.url) as server:
        server.request(FILE)
        wait_for_arrival(server, "org/model:latest")
        for name in (NAME, f"{NAME}:mine"):  # their sources name the upstream's commit
            pull_model(f"{server.host}/{NAME}", name, store=store, plain_http=True)
    commit = hub.repos[NAME].commit
    given = f"/{NAME}/resolve/{commit}/config.json"
    mine = f"/{NAME}/resolve/mine/config.json"
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        expected = server.request(FILE)
        assert server.request(given)[0] == 200
        wait_for_arrival(server, f"{NAME}:{commit}")
        hub.add(NAME, write_folder(tmp_path / "new", dense_tensors())).commit = "c" * 40
        hub.requests.clear()
        assert server.request(FILE)[2] == expected[2]
        assert server.request(mine)[0] == 200
        assert not hub.requests
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0", "--max-size=1kB") as server:
        hub.add("org/other", tmp_path / "new")
        server.request("/org/other/resolve/main/config.json")
        assert server.request(FILE)[2] == expected[2]
        assert server.request(mine)[0] == 200


def test_an_upstream_may_be_another_server(folder: Path, store: LocalStore, tmp_path: Path) -> None:
    first = LocalStore(tmp_path / "first")
    create(folder, NAME, store=first)
    (tmp_path / "second").mkdir()
    with (
        serving(first, tmp_path) as upstream,
        serving(store, tmp_path / "second", "--upstream", upstream.url) as server,
    ):
        assert snapshot(server, tmp_path / "cache") == contents(folder)
        assert server.request(FILE)[1]["etag"] == upstream.request(FILE)[1]["etag"]


def test_a_registrys_client_gets_a_model_when_all_of_it_is_there(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        pull_model(f"{server.host}/{NAME}:latest", "copy", store=other, plain_http=True)
    assert contents(exported(other, tmp_path, "copy")) == contents(folder)


def test_the_least_recently_used_models_make_space(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    own = write_folder(tmp_path / "own", other_tensors(9))
    create(own, "org/own", store=store)
    for number in range(3):
        hub.add(f"org/m{number}", write_folder(tmp_path / f"m{number}", other_tensors(number)))
    options = ("--upstream", hub.url, "--max-size=150kB")  # of which each model has 66 kB
    limits = {"cache_limit.IDLE_SECONDS": 0}
    with serving(store, tmp_path, *options, limits=limits) as server:
        for number in (0, 1):
            server.request(f"/org/m{number}/resolve/main/model.safetensors")
            wait_for_arrival(server, f"org/m{number}:latest")
    # What was used last survives the process.
    with serving(store, tmp_path, *options, limits=limits) as server:
        server.request("/org/m0/resolve/main/model.safetensors")
        server.request("/org/m2/resolve/main/model.safetensors")
        wait_for_arrival(server, "org/m2:latest")
        assert server.wait_for_log("removed", "org/m1")["freed"] > 66_000
    assert [one.model for one in store.references()] == ["m0", "m2", "own"]
    assert used(store) < 3 * 80_000
    assert not verify_models(store=store).faults


def test_a_model_that_is_too_large_is_refused_and_removes_none(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add("org/m1", write_folder(tmp_path / "m1", other_tensors(1)))
    with serving(store, tmp_path, "--upstream", hub.url, "--max-size=69kB") as server:
        server.request("/org/m1/resolve/main/model.safetensors")
        wait_for_arrival(server, "org/m1:latest")
        status, headers, _ = server.request(FILE)
        assert status == 507
        assert "this server keeps 69000 at most" in headers["x-error-message"]
    assert store.has_model("org/m1")


def test_models_in_use_are_not_removed(hub: HubServer, store: LocalStore, tmp_path: Path) -> None:
    for number in (1, 2):
        hub.add(f"org/m{number}", write_folder(tmp_path / f"m{number}", other_tensors(number)))
    limits = {"cache_limit.IDLE_SECONDS": 0, "pull_through._REFUSED_SECONDS": 0.1}
    options = ("--upstream", hub.url, "--max-size=100kB")
    with serving(store, tmp_path, *options, limits=limits) as server:
        server.request("/org/m1/resolve/main/model.safetensors")
        wait_for_arrival(server, "org/m1:latest")
        with store.lease() as lease:
            lease.hold(blob.digest for blob in store.resolve("org/m1").blobs)
            assert server.request("/org/m2/resolve/main/model.safetensors")[0] == 503
        until(lambda: server.request("/org/m2/resolve/main/model.safetensors")[0] == 200)
        wait_for_arrival(server, "org/m2:latest")
    assert not store.has_model("org/m1")


def test_a_model_that_was_removed_leaves_its_name_to_the_stores_own(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        server.request(FILE)
        wait_for_arrival(server, "org/model:latest")
    remove_models([NAME], store=store)
    own = write_folder(tmp_path / "own", {"own": np.ones((4, 4), np.float32)})
    create(own, NAME, store=store)
    sent = hub.sent
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        found = server.request(f"/{NAME}/resolve/main/model.safetensors")
        assert found[2] == (own / "model.safetensors").read_bytes()
    assert hub.sent == sent


def test_only_one_server_fetches_into_a_store(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url):
        result = subprocess.run(
            [*COMMAND, "--upstream", hub.url, "--store", str(store.root)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 1
    assert "another server fetches models into the store" in result.stderr


# Gated models


def test_a_gated_model_is_for_those_whom_the_upstream_lets_in(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.repos[NAME]
    repo.token, repo.gated = "hf_right", True
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for wrong in ("", "Bearer hf_wrong"):
            assert server.request(FILE, Authorization=wrong)[0] == 401
        status, headers, data = server.request(FILE, Authorization=RIGHT)
        assert (status, data) == (200, (folder / Path(FILE).name).read_bytes())
        wait_for_arrival(server, "org/model:latest")
        commit = headers["x-repo-commit"]
        (blob,) = store.resolve(NAME).layers[:1]
        targets = (
            FILE,
            FILE.replace("main", commit),
            f"/api/models/{NAME}",
            f"/api/models/{NAME}/refs",
            f"/api/models/{NAME}/tree/main",
            f"/api/models/{NAME}/revision/{commit}",
            f"/v2/{NAME}/tags/list",
            f"/v2/{NAME}/manifests/latest",
            f"/v2/{NAME}/blobs/{blob.digest}",
        )
        for target in targets:
            assert server.request(target, Authorization=RIGHT)[0] == 200, target
            for wrong in ("", "Bearer hf_wrong"):
                status, headers, _ = server.request(target, Authorization=wrong)
                assert status == 401, target
                if not target.startswith("/v2"):
                    assert headers["x-error-code"] == "RepoNotFound"
        form = f"/api/models/{NAME}/paths-info/main"
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        assert server.request(form, "POST", b"paths=config.json", **kind)[0] == 401
        assert json.loads(server.request("/api/models")[2]) == []
        log = server.log_file.read_text()
    assert not hub.leaks
    assert "hf_right" not in log
    assert "hf_wrong" not in log
    # After a restart, and without the upstream, nobody has been let in.
    with serving(store, tmp_path, "--upstream", "http://127.0.0.1:9") as server:
        assert server.request(FILE, Authorization=RIGHT)[0] in {502, 503}
        assert server.request(FILE)[0] in {502, 503}


def test_the_tokens_of_the_server_never_go_upstream(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.repos[NAME].token = "hf_right"
    (tmp_path / "tokens").write_text("token-of-the-rack\n")
    options = ("--upstream", hub.url, "--token-file", str(tmp_path / "tokens"))
    with serving(store, tmp_path, *options) as server:
        assert server.request(FILE, Authorization="Bearer hf_right")[0] == 401
        assert server.request(FILE, Authorization="Bearer token-of-the-rack")[0] == 401
        both = "token-of-the-rack:hf_right"
        assert server.request(FILE, Authorization=f"Bearer {both}")[0] == 200
        wait_for_arrival(server, "org/model:latest")
        basic = base64.b64encode(f"user:{both}".encode()).decode()
        found = server.request(f"/v2/{NAME}/tags/list", Authorization=f"Basic {basic}")
        assert found[0] == 200
    assert set(hub.tokens) == {"hf_right"}


def test_the_servers_own_upstream_token_is_for_clients_without_one(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    hub.repos[NAME].token = "hf_right"
    (tmp_path / "upstream").write_text("hf_right\n")
    options = ("--upstream", hub.url, "--upstream-token-file", str(tmp_path / "upstream"))
    with serving(store, tmp_path, *options) as server:
        assert snapshot(server, tmp_path / "cache") == contents(folder)
    assert set(hub.tokens) == {"hf_right"}


def test_access_that_was_taken_back_ends_when_the_answer_is_no_longer_fresh(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.repos[NAME]
    repo.token, repo.gated = "hf_right", True
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        assert server.request(FILE, Authorization=RIGHT)[0] == 200
        wait_for_arrival(server, "org/model:latest")
        repo.token = "hf_other"
        until(lambda: server.request(FILE, Authorization=RIGHT)[0] == 401)


def other_tensors(seed: int) -> Arrays:
    random = np.random.default_rng(100 + seed)
    return {"weight": random.standard_normal((128, 128), dtype=np.float32)}


def exported(store: LocalStore, folder: Path, name: str = NAME) -> Path:
    export_model(name, folder / "exported", store=store)
    return folder / "exported"


def wait_for_arrival(server: Serving, name: str) -> dict[str, Any]:
    """Return the entry of the log that says that a model is in the store."""
    server.wait_for_log("written")
    until(
        lambda: any(entry.get("model") == name and "error" not in entry for entry in server.log())
    )
    found = (entry for entry in server.log() if entry.get("model") == name)
    return next(entry for entry in found if "error" not in entry)


def until(is_reached: Callable[[], bool]) -> None:
    """Wait for what happens when an answer of the upstream does not hold any more."""
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def used(store: LocalStore) -> int:
    """Return the bytes of the blobs of a store."""
    return sum(path.stat().st_size for path in store.folder("blobs").iterdir())
