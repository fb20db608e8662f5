"""Names of models that ``serve --upstream`` fetches: the upstream gives them, and a client may ask by others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import write_folder
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME, OTHER = "Org/Model", "org/model"
FILE = "/{}/resolve/main/model.safetensors"
RIGHT = "Bearer hf_right"
REVISIONS = ("main", "latest", "v1", "V1")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, made(tmp_path / "model", 1))
        server.renamed[OTHER] = NAME
        yield server


def made(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    return write_folder(folder, {"weight": random.standard_normal((64, 64), dtype=np.float32)})


def weights(hub: HubServer, name: str = NAME) -> bytes:
    return (hub.repos[name].folder / "model.safetensors").read_bytes()


def fetch(server: Serving, name: str) -> bytes:
    status, _, data = server.request(FILE.format(name))
    assert status == 200
    server.wait_for_log("written")
    return data


def names(store: LocalStore) -> list[str]:
    return [str(reference) for reference in store.references()]


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_named(store: LocalStore, *tags: str) -> None:
    until(lambda: names(store) == [f"{OTHER}:{tag}" for tag in tags])


@pytest.mark.parametrize("has_id", [True, False])
def test_the_upstream_names_a_model_and_both_spellings_find_it(
    hub: HubServer, store: LocalStore, tmp_path: Path, *, has_id: bool
) -> None:
    if not has_id:
        hub.ids[NAME] = None  # where it redirects says it
    hub.add("Org/Next", made(tmp_path / "next", 2))
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert fetch(server, OTHER) == weights(hub)
        assert names(store) == [f"{NAME}:latest"]
        for name in (NAME, OTHER, "oRG/mODEL"):
            assert server.request(FILE.format(name))[2] == weights(hub)
            assert server.request(f"/v2/{name}/manifests/latest")[0] == 200
            assert b'"id":"Org/Model"' in server.request(f"/api/models/{name}")[2]
        assert server.request(FILE.format("Org/Next"))[2] == weights(hub, "Org/Next")
        assert server.request(FILE.format("org/none"))[0] == 401
        until(lambda: server.metric("upstream_models_total") == 2)


def test_two_spellings_at_the_same_time_are_one_model(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url) as server, ThreadPoolExecutor(8) as pool:
        several = [FILE.format(name) for name in (OTHER, NAME) * 4]
        for status, _, data in pool.map(server.request, several):
            assert (status, data) == (200, weights(hub))
        server.wait_for_log("written")
        assert server.metric("upstream_models_total") == 1
        assert hub.sent == sum(path.stat().st_size for path in hub.repos[NAME].folder.iterdir())
    assert names(store) == [f"{NAME}:latest"]


def test_a_renamed_repository_is_fetched_once_and_found_under_both_names(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.renamed["Org/Old"] = NAME
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        fetch(server, NAME)
        sent = hub.sent
        status, headers, data = server.request(FILE.format("Org/Old"))
        assert (status, data) == (200, weights(hub))
        commit = headers["x-repo-commit"]
        assert server.request(f"/Org/Old/resolve/{commit}/model.safetensors")[2] == weights(hub)
        hub.renamed["org/old"] = NAME
        assert server.request("/v2/org/old/tags/list")[0] == 200
        assert hub.sent == sent
    assert names(store) == [f"{NAME}:latest"]


def test_another_name_is_believed_for_as_long_as_answers_hold(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add("Org/New", made(tmp_path / "new", 2))
    hub.renamed["Org/Old"] = NAME
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server, "Org/Old")
        hub.renamed["Org/Old"] = "Org/New"
        until(lambda: server.request(FILE.format("Org/Old"))[2] == weights(hub, "Org/New"))
        assert server.request(FILE.format(NAME))[2] == weights(hub)
        del hub.renamed["Org/Old"]
        until(lambda: server.request(FILE.format("Org/Old"))[0] == 401)


@pytest.mark.parametrize(
    "name", ["../x", "a/b/c", "", "a b", "ghcr.io.x/y", 5, None, ["Org/Model"]]
)
def test_a_name_that_no_repository_can_have_is_not_taken(
    hub: HubServer, store: LocalStore, tmp_path: Path, name: object
) -> None:
    hub.ids[NAME] = name
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        fetch(server, NAME)
    assert names(store) == [f"{NAME}:latest"]


def test_a_name_opens_no_other_repository(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add("Org/Open", made(tmp_path / "open", 2))
    hub.repos[NAME].token, hub.ids["Org/Open"] = "hf_right", NAME
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert server.request(FILE.format(NAME), Authorization=RIGHT)[0] == 200
        server.wait_for_log("written")
        for name in ("Org/Open", NAME, OTHER):
            assert server.request(FILE.format(name))[0] == 401, name
            assert server.request(f"/v2/{name}/tags/list")[0] == 401, name
        hub.ids[NAME] = "Org/Open"  # in a circle
        hub.repos[NAME].token = ""
        assert server.request(FILE.format("Org/Open").replace("main", "v1"))[0] in {404, 502}


def test_a_refusal_of_another_name_is_one_of_the_repository(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.renamed["Org/Old"] = NAME
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        fetch(server, "Org/Old")
        hub.repos[NAME].token = "hf_right"
        assert server.request(FILE.format("Org/Old").replace("main", "v1"))[0] == 401
        assert server.request(FILE.format(NAME), X_Blobstore_Peer="1")[0] == 404
        assert server.request(FILE.format(NAME))[0] == 401


def test_a_model_of_the_stores_own_stays_what_its_name_is(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.renamed["Org/Old"] = NAME
    create(made(tmp_path / "mine", 3), NAME, store=store)
    create(made(tmp_path / "mine2", 4), "Org/Old:mine", store=store)
    before = store.read_manifest(NAME)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        (blob,) = store.resolve("Org/Old:mine").layers[:1]
        for _ in range(2):  # before and after the upstream has said how the repository is called
            assert server.request(FILE.format("Org/Old"))[2] == server.request(FILE.format(NAME))[2]
            assert server.request("/Org/Old/resolve/mine/model.safetensors")[0] == 200
            assert server.request(f"/v2/org/old/blobs/{blob.digest}")[0] == 200
        assert server.metric("upstream_models_total") == 0
    assert store.read_manifest(NAME) == before


def test_a_model_of_the_stores_own_keeps_no_other_revision_of_another_spelling_away(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    folders = {one: made(tmp_path / one, seed) for seed, one in enumerate(("v2", "v3"), 5)}
    for revision, folder in folders.items():
        hub.branch(NAME, revision, folder)
    mine = create(made(tmp_path / "mine", 3), f"{OTHER}:v1", store=store)
    folders |= {"v1": tmp_path / "mine", "main": hub.repos[NAME].folder}
    for _ in range(2):
        with serving(store, tmp_path, "--upstream", hub.url) as server:
            for revision, folder in folders.items():
                for name in (NAME, OTHER):
                    target = f"/{name}/resolve/{revision}/model.safetensors"
                    until(partial(is_given, server, target))
                    assert server.request(target)[2] == (folder / "model.safetensors").read_bytes()
                    tag = "latest" if revision == "main" else revision
                    until(partial(is_given, server, f"/v2/{name}/manifests/{tag}"))
                    assert server.request(f"/v2/{name}/tags/list")[0] == 200
                    assert server.request(f"/api/models/{name}/refs")[0] == 200
            commit = hub.repos[NAME].commit
            assert server.request(f"/{NAME}/resolve/{commit}/model.safetensors")[2] == weights(hub)
            until(lambda: server.metric("arriving_models") == 0)
        collect_garbage(store=store)
        assert names(store) == [f"{OTHER}:{tag}" for tag in ("latest", "v1", "v2", "v3")]
        sent = hub.sent  # the second server has all
    assert hub.sent == sent
    hub.repos[NAME].status = 502
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for revision, folder in folders.items():
            target = f"/{NAME}/resolve/{revision}/model.safetensors"
            assert server.request(target)[2] == (folder / "model.safetensors").read_bytes()
    assert store.names.version(f"{OTHER}:v1") == mine.digest


def test_what_is_fetched_next_to_a_model_of_the_stores_own_stays_restricted_and_makes_space(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    create(made(tmp_path / "mine", 3), f"{OTHER}:v1", store=store)
    hub.branch(NAME, "v2", made(tmp_path / "v2", 5))
    hub.repos[NAME].token = "hf_right"
    size = sum(path.stat().st_size for path in hub.repos[NAME].folder.iterdir())
    limits = {"cache_limit.IDLE_SECONDS": 0}
    options = ("--upstream", hub.url, f"--max-size={size * 3 // 2}")
    with serving(store, tmp_path, *options, limits=limits) as server:
        for revision, tags in (("main", ["latest", "v1"]), ("v2", ["v1", "v2"])):
            target = f"/{NAME}/resolve/{revision}/model.safetensors"
            assert server.request(target, Authorization=RIGHT)[0] == 200
            until_named(store, *tags)
            for name in (NAME, OTHER):
                path = f"/{name}/resolve/{revision}/model.safetensors"
                assert server.request(path)[0] == 401, path
                tag = "latest" if revision == "main" else revision
                assert server.request(f"/v2/{name}/manifests/{tag}")[0] == 401
                assert server.request(f"/v2/{name}/manifests/v1")[0] == 200


@pytest.mark.parametrize("is_same", [True, False])
def test_a_repository_whose_name_changes_its_case_stays_one(
    hub: HubServer, store: LocalStore, tmp_path: Path, *, is_same: bool
) -> None:
    hub.branch(NAME, "v1", made(tmp_path / "v1", 2))
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server, NAME)
        assert server.request(f"/{NAME}/resolve/v1/model.safetensors")[0] == 200
        until(lambda: names(store) == [f"{NAME}:latest", f"{NAME}:v1"])
        hub.repos[OTHER] = hub.repos.pop(NAME)
        if not is_same:
            hub.add(OTHER, made(tmp_path / "new", 3))
        hub.renamed = {NAME: OTHER}
        sent = hub.sent
        for name in (OTHER, NAME):
            until(lambda name=name: server.request(FILE.format(name))[2] == weights(hub, OTHER))  # type: ignore[misc]
        # Both tags go with the name that the upstream has no more; one was asked for since.
        until(
            lambda: (
                server.request(FILE.format(NAME))[0] == 200 and names(store) == [f"{OTHER}:latest"]
            )
        )
        assert (hub.sent == sent) == is_same


def test_the_upstreams_spelling_replaces_that_of_a_peer(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    create(made(tmp_path / "theirs", 2), OTHER, store=other)
    hub.repos[NAME].status = 502  # away
    (tmp_path / "log").mkdir()
    with serving(other, tmp_path / "log") as peer:
        options = ("--upstream", hub.url, "--peers", peer.url, "--fresh=0")
        limits = {"pull_through._MAX_PATIENT": 0, "pull_through._REFUSED_SECONDS": 0.1}
        with serving(store, tmp_path, *options, limits=limits) as server:
            until(lambda: server.request(FILE.format(NAME))[0] == 200)
            until(lambda: names(store) == [f"{OTHER}:latest"])
            hub.repos[NAME].status = 0
            until(lambda: server.request(FILE.format(NAME))[2] == weights(hub))
            until(lambda: names(store) == [f"{NAME}:latest"])


def test_a_renamed_repository_costs_no_bytes_again(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server, NAME)
        hub.repos["Org/New"] = hub.repos.pop(NAME)
        hub.renamed = {NAME: "Org/New"}
        sent = hub.sent
        for name in ("Org/New", NAME):
            assert server.request(FILE.format(name))[2] == weights(hub, "Org/New")
        server.wait_for_log("model", "Org/New")
        assert hub.sent == sent


def test_each_revision_of_the_upstream_is_itself_also_where_names_of_a_store_are_one(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    folders = {one: made(tmp_path / f"r{number}", number) for number, one in enumerate(REVISIONS)}
    hub.repos[NAME].folder = folders["main"]
    for revision in REVISIONS[1:]:
        hub.branch(NAME, revision, folders[revision])
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for _ in range(2):
            for revision in REVISIONS:
                target = f"/{NAME}/resolve/{revision}/model.safetensors"
                until(partial(is_given, server, target))
                data = (folders[revision] / "model.safetensors").read_bytes()
                status, headers, found = server.request(target)
                assert (status, found) == (200, data), revision
                if revision.lower() == "v1":  # registries tell them apart, too
                    target = f"/v2/{NAME}/manifests/{revision}"
                    until(partial(is_given, server, target))
                    tag = "v1" if revision == "v1" else headers["x-repo-commit"]
                    blob = store.resolve(f"{NAME}:{tag}").layers[0].digest
                    assert str(blob).encode() in server.request(target)[2]
        mine = made(tmp_path / "mine", 9)
        create(mine, "own/model", store=store)
        target = "/own/model/resolve/latest/model.safetensors"
        assert server.request(target)[2] == (mine / "model.safetensors").read_bytes()
    assert not [one for one in hub.requests if "own" in one]


def is_given(server: Serving, target: str) -> bool:
    return server.request(target)[0] == 200


def test_a_repository_is_asked_for_by_the_name_that_the_hub_has(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add("plain", made(tmp_path / "plain", 2))
    create(made(tmp_path / "mine", 3), "mine", store=store)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert fetch(server, "plain") == weights(hub, "plain")
        for name in ("library/plain", "registry.ollama.ai.library/plain"):
            assert server.request(FILE.format(name))[0] == 401, "the Hub's is another one"
        assert server.request("/v2/library/plain/manifests/latest")[0] == 200
        assert server.request(FILE.format("library/mine"))[0] == 200


def test_a_tag_of_the_stores_own_is_never_asked_for(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    for tag in ("main", "v1.image"):
        create(made(tmp_path / tag, 3), f"own/model:{tag}", store=store)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for tag in ("main", "v1.image", "main.image"):
            assert server.request(f"/v2/own/model/manifests/{tag}")[0] == 200, tag
    assert not hub.requests


def test_no_branch_of_the_upstream_takes_the_place_of_what_an_own_model_is_known_by(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    own = {tag: made(tmp_path / tag, number) for number, tag in enumerate(("v1", "main"), 3)}
    for tag, folder in own.items():
        create(folder, f"{NAME}:{tag}", store=store)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        signed = server.request(f"/v2/{NAME}/manifests/v1")[1]["docker-content-digest"]
        for number, tag in enumerate(("v1.image", signed.replace(":", "-"))):
            before = server.request(f"/v2/{NAME}/manifests/{tag}")
            theirs = made(tmp_path / f"theirs{number}", 7 + number)
            hub.branch(NAME, tag, theirs)
            data = (theirs / "model.safetensors").read_bytes()
            assert server.request(f"/{NAME}/resolve/{tag}/model.safetensors")[2] == data
            until(lambda: server.metric("arriving_models") == 0)
            after = server.request(f"/v2/{NAME}/manifests/{tag}")
            assert (after[0], after[2]) == (before[0], before[2])
        # The upstream has no branch "latest", and its "main" is not the operator's.
        assert server.request(f"/v2/{NAME}/manifests/latest")[0] == 404
        mine = (own["main"] / "model.safetensors").read_bytes()
        assert server.request(FILE.format(NAME))[2] == mine
    commits = [hub.repos[NAME].branches[tag].commit for tag in hub.repos[NAME].branches]
    assert names(store) == sorted(f"{NAME}:{tag}" for tag in (*own, *commits))


def test_a_model_of_the_stores_own_is_served_while_its_name_arrives(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    gate = hub.repos[NAME].gates["model.safetensors"] = (100, Event())
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        try:
            assert server.request(f"/{NAME}/resolve/main/config.json")[0] == 200
            mine = create(made(tmp_path / "mine", 3), NAME, store=store)
            data = (tmp_path / "mine" / "model.safetensors").read_bytes()
            until(lambda: server.request(FILE.format(NAME))[2] == data)
            refs = json.loads(server.request(f"/api/models/{NAME}/refs")[2])
            assert refs["branches"][0]["targetCommit"] != hub.repos[NAME].commit
            assert server.metric("arriving_models") == 1
        finally:
            gate[1].set()
        until(lambda: server.metric("arriving_models") == 0)
        assert store.names.version(NAME) == mine.digest
