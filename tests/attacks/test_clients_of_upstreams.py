"""Clients of ``blobstore serve --upstream`` that want what is not theirs, or more than there is."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer, Repo
from tests.support.models import write_folder
from tests.support.raw_server import RawServer, Received, reply
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME = "org/model"
FILE = f"/{NAME}/resolve/main/model.safetensors"
RIGHT = "Bearer hf_right"
IMPATIENT = {
    "pull_through._MAX_PATIENT": 0,
    "pull_through._REFUSED_SECONDS": 0.1,
    "peers.SKIP_SECONDS": 0.1,
}
"""Limits of a server that does not wait for an upstream that is gone, and asks a peer again at once."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "source", 1)


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, folder)
        yield server


def made(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    return write_folder(folder, {"weight": random.standard_normal((64, 64), dtype=np.float32)})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def fetch(server: Serving, token: str = "") -> str:
    """Let the server fetch the model, and return its commit."""
    status, found, _ = server.request(FILE, Authorization=token)
    assert status == 200
    server.wait_for_log("written")
    return found["x-repo-commit"]


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def restrict(hub: HubServer) -> None:
    hub.repos[NAME].token, hub.repos[NAME].gated = "hf_right", True


# Restricted models


def test_a_commit_of_a_restricted_model_whose_tag_is_allowed_is_for_its_readers(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url, "--allow", "org/model:latest") as server:
        commit = fetch(server, RIGHT)
        assert server.request(FILE.replace("main", commit))[0] == 401
        assert server.request(FILE.replace("main", commit), Authorization=RIGHT)[0] == 200


def test_a_revision_that_has_only_a_card_opens_no_gated_repository(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    (folder / "README.md").write_text("# A card")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "README.md").write_text("# A card")
    first = hub.branch(NAME, "refs/pr/7", tmp_path / "first").commit
    restrict(hub)
    hub.repos[NAME].is_listed, hub.repos[NAME].open_files = True, {"README.md"}
    with serving(store, tmp_path, "--upstream", hub.url, limits=IMPATIENT) as server:
        fetch(server, RIGHT)
        for revision in (first, "refs%2Fpr%2F7"):
            server.request(f"/{NAME}/resolve/{revision}/README.md")
            assert hub.requests[f"HEAD /{NAME}/resolve/{first}/README.md"] > 0
            until(lambda: server.request(FILE)[0] != 503)
            assert server.request(FILE)[0] == 401
            assert server.request(FILE, X_Blobstore_Peer="1")[0] == 404
        assert NAME.encode() not in server.request("/api/models")[2]
    with serving(store, tmp_path) as server:
        assert server.request(FILE)[0] == 404


@pytest.mark.parametrize("options", [["--peers", "http://127.0.0.1:9"], []])
def test_a_restricted_model_stays_restricted_when_the_server_has_no_upstream(
    options: list[str], hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        commit = fetch(server, RIGHT)
    (blob,) = store.resolve(NAME).layers[:1]
    create(made(tmp_path / "own", 2), "org/own", store=store)
    with serving(store, tmp_path, *options) as server:
        for target in (
            FILE,
            FILE.replace("main", commit),
            f"/api/models/{NAME}/tree/{commit}",
            f"/v2/{NAME}/manifests/latest",
            f"/v2/{NAME}/blobs/{blob.digest}",
        ):
            assert server.request(target)[0] == 404, target
        assert server.request("/org/own/resolve/main/model.safetensors")[0] == 200
        assert server.request("/org/absent/resolve/main/model.safetensors")[0] in {404, 502}


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_refusal_by_an_old_name_is_one_of_the_repository(
    is_listed: bool, hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.renamed["org/old"] = NAME
    old = FILE.replace(NAME, "org/old")
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert server.request(old)[0] == 200
        server.wait_for_log("written")
    restrict(hub)
    hub.repos[NAME].is_listed = is_listed
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 200, "nobody was refused yet"
        assert server.request(old)[0] == 401
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 404
    with serving(store, tmp_path) as server:
        assert server.request(FILE)[0] == 404


def test_a_repository_that_was_renamed_and_made_private_is_public_under_no_name(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server)
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 200
        hub.repos["org/new"] = hub.repos.pop(NAME)
        hub.renamed[NAME], hub.repos["org/new"].token = "org/new", "hf_right"
        by_name = "GET /api/models/org/new/revision/main"
        until(lambda: bool(hub.requests[by_name]) or not server.request(FILE, Authorization=RIGHT))
        until(lambda: server.request(FILE, X_Blobstore_Peer="1")[0] == 404)
        assert NAME.encode() not in server.request("/api/models")[2]
    for options in ((), ("--upstream", "http://127.0.0.1:9")):
        with serving(store, tmp_path, *options) as server:
            assert server.request(FILE)[0] in {404, 502, 503}


@pytest.mark.parametrize("is_restricted", [True, False])
def test_a_reader_of_a_fetched_model_reads_its_copy_by_commit_too(
    hub: HubServer, store: LocalStore, tmp_path: Path, *, is_restricted: bool
) -> None:
    if is_restricted:
        restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        commit = fetch(server, RIGHT)
        copy_model(NAME, "my/copy", store=store)
        for revision in ("main", commit):
            target = f"/my/copy/resolve/{revision}/model.safetensors"
            assert server.request(target)[0] == (401 if is_restricted else 200)
            status, headers, _ = server.request(target, Authorization=RIGHT)
            assert (status, headers["x-repo-commit"]) == (200, commit)


def test_models_of_one_repository_that_are_copies_of_several_are_each_for_their_readers(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    second = hub.repos["org/second"] = Repo(made(tmp_path / "second", 2), "e" * 40)
    second.token, second.gated = "hf_second", True
    create(made(tmp_path / "own", 3), "my/copy:own", store=store)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        fetch(server, RIGHT)
        server.request(FILE.replace(NAME, "org/second"), Authorization="Bearer hf_second")
        server.wait_for_log("model", "org/second:latest")
        copy_model(NAME, "my/copy:a", store=store)
        copy_model("org/second", "my/copy:b", store=store)
        blobs = {tag: store.resolve(f"my/copy:{tag}").layers[0].digest for tag in "ab"}
        for token, tag in (("hf_right", "a"), ("hf_second", "b"), ("hf_wrong", "")):
            bearer = f"Bearer {token}"
            listed = json.loads(server.request("/v2/my/copy/tags/list", Authorization=bearer)[2])[
                "tags"
            ]
            assert listed == sorted({tag, "own"} - {""})
            for other, digest in blobs.items():
                status = server.request(f"/v2/my/copy/blobs/{digest}", Authorization=bearer)[0]
                assert (status == 200) is (other == tag)
        assert json.loads(server.request("/v2/my/copy/tags/list")[2])["tags"] == ["own"]


def test_a_copy_whose_original_was_replaced_by_a_public_one_is_answered_as_an_absent_model(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0", limits=IMPATIENT) as server:
        commit = fetch(server, RIGHT)
        copy_model(NAME, "my/copy", store=store)
        hub.repos[NAME] = Repo(made(tmp_path / "squashed", 2), "e" * 40)
        for target in (
            "/api/models/{}",
            f"/api/models/{{}}/revision/{commit}",
            "/{}/resolve/main/config.json",
            "/v2/{}/tags/list",
            "/v2/{}/manifests/latest",
        ):
            copied, absent = (server.request(target.format(f"my/{it}")) for it in ("copy", "none"))
            assert copied[0] == absent[0] == 401, target
            assert copied[2] == absent[2], target


def test_a_reader_gets_blobs_of_a_repository_whose_history_was_rewritten(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        former = fetch(server, RIGHT)
    old = str(store.resolve(NAME).layers[0].digest)
    hub.repos[NAME] = Repo(made(tmp_path / "squashed", 2), "e" * 40)
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        fetch(server, RIGHT)
        target = f"/v2/{NAME}/manifests/latest"
        until(lambda: server.request(target, Authorization=RIGHT)[0] == 200)
        new = str(store.resolve(NAME).layers[0].digest)
        assert server.request(f"/v2/{NAME}/blobs/{new}", Authorization=RIGHT)[0] == 200
        # What the upstream does not give any more, nobody gets.
        assert server.request(f"/v2/{NAME}/blobs/{old}", Authorization=RIGHT)[0] == 404
        assert server.request(FILE.replace("main", former), Authorization=RIGHT)[0] == 404
    with serving(store, tmp_path, "--upstream", hub.url) as server:  # without a right at first
        until(lambda: server.request(f"/v2/{NAME}/blobs/{new}", Authorization=RIGHT)[0] != 503)
        assert server.request(f"/v2/{NAME}/blobs/{new}", Authorization=RIGHT)[0] == 200
        assert server.request(f"/v2/{NAME}/tags/list")[0] == 401


def test_a_public_repository_of_the_same_name_opens_no_commit_of_the_private_one(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    restrict(hub)
    hub.branch(NAME, "v1", made(tmp_path / "v1", 2))
    v1 = FILE.replace("main", "v1")
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=20") as server:
        commit = fetch(server, RIGHT)
        assert server.request(v1, Authorization=RIGHT)[0] == 200
        server.wait_for_log("model", f"{NAME}:v1")
        (blob,) = store.resolve(f"{NAME}:v1").layers[:1]
        hub.repos[NAME] = Repo(made(tmp_path / "other", 3), "e" * 40)
        until(lambda: server.request(FILE)[0] == 200)
        for target in (v1, FILE.replace("main", commit), f"/v2/{NAME}/blobs/{blob.digest}"):
            until(lambda target=target: server.request(target)[0] != 503)  # type: ignore[misc]
            assert server.request(target)[0] in {401, 404}, target
            assert server.request(target, X_Blobstore_Peer="1")[0] == 404, target
        assert b"v1" not in server.request(f"/v2/{NAME}/tags/list")[2]


def test_what_the_servers_own_token_has_fetched_is_not_for_a_server_without_it(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    hub.add("org/open", folder)
    restrict(hub)
    (tmp_path / "token").write_text("hf_right\n")
    upstream = ("--upstream", hub.url)
    with serving(
        store, tmp_path, *upstream, "--upstream-token-file", str(tmp_path / "token")
    ) as server:
        fetch(server)
        assert server.request(FILE)[0] == 200
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 404
        assert server.request(FILE.replace(NAME, "org/open"))[0] == 200
        server.wait_for_log("model", "org/open:latest")
    for options in ((), upstream):
        with serving(store, tmp_path, *options) as server:
            assert server.request(FILE, X_Blobstore_Peer="1")[0] == 404
            assert server.request(FILE)[0] == (401 if options else 404)
            assert server.request(FILE.replace(NAME, "org/open"), X_Blobstore_Peer="1")[0] == 200


def test_a_model_that_is_no_longer_public_is_given_to_no_peer_either(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        commit = fetch(server)
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 200
        restrict(hub)
        until(lambda: server.request(FILE)[0] == 401)
        assert server.request(FILE, X_Blobstore_Peer="1")[0] == 404
        assert server.request(f"/v2/{NAME}/manifests/latest", X_Blobstore_Peer="1")[0] == 404
    # Neither when the upstream is gone.
    with serving(store, tmp_path, "--upstream", "http://127.0.0.1:9") as server:
        assert server.request(FILE)[0] in {502, 503}
        assert server.request(FILE.replace("main", commit))[0] in {502, 503}


def test_a_peer_with_a_model_of_the_same_name_opens_no_restricted_one(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    create(made(tmp_path / "made", 2), NAME, store=other)
    (tmp_path / "log").mkdir()
    restrict(hub)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        commit = fetch(server, RIGHT)
    with (
        serving(other, tmp_path / "log") as peer,
        serving(store, tmp_path, "--upstream", "http://127.0.0.1:9", "--peers", peer.url) as server,
    ):
        server.request(FILE)
        assert server.request(FILE.replace("main", commit))[0] in {403, 404, 502, 503}


def test_a_model_that_the_upstream_has_refused_does_not_come_from_a_peer_while_it_is_away(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    create(folder, NAME, store=other)
    hub.add("org/new", folder)
    create(folder, "org/new", store=other)
    (tmp_path / "log").mkdir()
    restrict(hub)
    options = ("--upstream", hub.url, "--fresh=0", "--peers")
    with (
        serving(other, tmp_path / "log") as peer,
        serving(store, tmp_path, *options, peer.url, limits=IMPATIENT) as server,
    ):
        assert server.request(FILE)[0] == 401
        hub.repos[NAME].token, hub.repos[NAME].status = "", 502  # away
        hub.repos["org/new"].status = 502
        # A repository that the upstream was not asked about comes from the peer.
        until(lambda: server.request(FILE.replace(NAME, "org/new"))[0] == 200)
        until(lambda: server.request(FILE)[0] != 401)
        assert server.request(FILE)[0] == 502
        hub.repos[NAME].status = 0
        until(lambda: server.request(FILE)[0] == 200)


def test_a_peer_that_was_asked_first_opens_nothing_of_the_upstreams(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    create(made(tmp_path / "made", 2), NAME, store=other)
    (tmp_path / "log").mkdir()
    hub.branch(NAME, "v1", made(tmp_path / "branch", 3))
    hub.repos[NAME].status = 502  # away
    options = ("--upstream", hub.url, "--peers")
    with (
        serving(other, tmp_path / "log") as peer,
        serving(store, tmp_path, *options, peer.url, limits=IMPATIENT) as server,
    ):
        until(lambda: server.request(FILE)[0] == 200)
        server.wait_for_log("written")
        hub.repos[NAME].status = 0
        restrict(hub)
        second = FILE.replace("main", "v1")
        until(lambda: server.request(second, Authorization=RIGHT)[0] == 200)
        server.wait_for_log("model", f"{NAME}:v1")
        (blob,) = store.resolve(f"{NAME}:v1").layers[:1]
        for target in (
            second,
            FILE,  # of the peer: the upstream has refused the repository since
            FILE.replace("main", hub.repos[NAME].branches["v1"].commit),
            f"/v2/{NAME}/manifests/v1",
            f"/v2/{NAME}/blobs/{blob.digest}",
            f"/v2/{NAME}/tags/list",
            f"/api/models/{NAME}",
        ):
            assert server.request(target)[0] == 401, target
        assert server.request(second, X_Blobstore_Peer="1")[0] == 404


def test_a_peer_replaces_nothing_that_the_upstream_has_named(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    create(made(tmp_path / "made", 2), NAME, store=other)
    (tmp_path / "log").mkdir()
    options = ("--upstream", hub.url, "--fresh=0", "--peers")
    with (
        serving(other, tmp_path / "log") as peer,
        serving(store, tmp_path, *options, peer.url, limits=IMPATIENT) as server,
    ):
        fetch(server)
        hub.repos[NAME].status = 502  # away
        asked = hub.requests[f"GET /api/models/{NAME}/revision/main"]
        # Each answer holds for a second.
        until(lambda: server.request(FILE)[2] != weights(folder) or is_asked(hub, asked + 2))
        assert server.request(FILE)[2] == weights(folder)


@pytest.mark.parametrize("asks_by", ["main", "commit", "manifests"])
def test_what_a_peer_has_given_of_a_commit_goes_once_the_upstream_names_it(
    hub: HubServer,
    folder: Path,
    store: LocalStore,
    other: LocalStore,
    tmp_path: Path,
    asks_by: str,
) -> None:
    commit = hub.repos[NAME].commit
    by_commit = FILE.replace("main", commit)
    hub.repos[NAME].branches["v1"] = Repo(folder, commit)  # another name of the commit
    for one in (hub.repos[NAME], hub.repos[NAME].branches["v1"]):
        one.status = 502  # away
    with HubServer() as liar:
        false = liar.add(NAME, made(tmp_path / "false", 2)).folder
        liar.repos[NAME].branches["v1"] = Repo(false, commit)
        assert liar.repos[NAME].commit == commit
        options = ("--upstream", hub.url, "--fresh=0", "--peers", liar.url)
        with serving(store, tmp_path, *options, limits=IMPATIENT) as server:
            until(lambda: server.request(FILE)[2] == weights(false))
            server.wait_for_log("written")
            until(lambda: server.request(FILE.replace("main", "v1"))[2] == weights(false))
            until(lambda: store.names.version(f"{NAME}:v1") == store.names.version(NAME))
            until(lambda: server.request(by_commit)[2] == weights(false))
            hub.repos[NAME].branches.clear()
            hub.repos[NAME].status = 0
            if asks_by == "manifests":
                create(folder, NAME, store=other)
                layer = str(other.resolve(NAME).layers[0].digest).encode()
                until(lambda: layer in server.request(f"/v2/{NAME}/manifests/latest")[2])
            else:
                target = FILE if asks_by == "main" else by_commit
                until(lambda: server.request(target)[2] == weights(folder))
            for target in (FILE, by_commit):
                until(lambda target=target: server.request(target)[0] == 200)  # type: ignore[misc]
                assert server.request(target)[2] == weights(folder)
            until(lambda: server.metric("arriving_models") == 0)
    with serving(store, tmp_path) as plain:
        assert plain.request(FILE.replace("main", "v1"))[0] == 404
        assert plain.request(by_commit)[2] == weights(folder)
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        for target in (FILE, by_commit):
            assert server.request(target)[2] == weights(folder)


def test_an_honest_peers_model_is_not_fetched_again_for_the_upstreams_word(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    hub.repos[NAME].status = 502  # away
    with HubServer() as peer:
        peer.add(NAME, folder)
        options = ("--upstream", hub.url, "--fresh=0", "--peers", peer.url)
        with serving(store, tmp_path, *options, limits=IMPATIENT) as server:
            until(lambda: server.request(FILE)[0] == 200)
            server.wait_for_log("written")
            hub.repos[NAME].status = 0
            until(lambda: server.metric("upstream_models_total") == 2 or not server.request(FILE))
            assert server.request(FILE)[2] == weights(folder)
    assert hub.sent == 0


def is_asked(hub: HubServer, count: int) -> bool:
    """Return whether a server has asked so often what the model is."""
    return hub.requests[f"GET /api/models/{NAME}/revision/main"] >= count


# Other versions than those that were asked for


@pytest.mark.parametrize(
    ("first", "second"), [("latest", "main"), ("refs%2Fheads%2Flatest", "main")]
)
def test_a_branch_that_is_spelled_as_the_default_one_is_here_is_not_sent_for_it(
    hub: HubServer,
    folder: Path,
    store: LocalStore,
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    hub.branch(NAME, "latest", made(tmp_path / "branch", 3))
    hub.branch(NAME, "refs/heads/latest", made(tmp_path / "branch2", 4))
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        server.request(FILE.replace("main", first))
        status, _, data = server.request(FILE.replace("main", second))
    assert (status, data) == (200, weights(folder))


# More than there is


def test_questions_to_a_silent_upstream_do_not_keep_the_stores_own_models_waiting(
    folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    create(folder, "own", store=store)

    ends = Event()

    def silent(_: Received) -> bytes:
        ends.wait(300)
        return reply(404)

    patience = {"server.PATIENCE_SECONDS": 1}
    with (
        RawServer(silent) as upstream,
        serving(
            store, tmp_path, "--upstream", f"http://{upstream.host}", limits=patience
        ) as server,
        ThreadPoolExecutor(12) as pool,
    ):
        asked = [pool.submit(server.request, f"/org/m{n}/resolve/main/f") for n in range(12)]
        try:
            until(lambda: len(upstream.requests) >= 12)
            assert server.request("/own/resolve/main/model.safetensors")[0] == 200
            for one in asked:
                assert one.result()[0] == 503
        finally:
            ends.set()


def test_names_asked_of_a_silent_upstream_do_not_delay_what_is_here(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    absent = [f"/org/m{number}/resolve/main/f" for number in range(100)]
    limits = {"pull_through._MAX_PATIENT": 2, "find_upstream._SILENT_SECONDS": 600}
    with (
        serving(store, tmp_path, "--upstream", hub.url, "--fresh=0", limits=limits) as server,
        ThreadPoolExecutor(len(absent)) as pool,
    ):
        assert server.request(FILE)[0] == 200
        server.wait_for_log("written")
        for name in (NAME, *(target.split("/resolve")[0][1:] for target in absent)):
            hub.repos.setdefault(name, hub.repos[NAME]).is_silent = True
        asked = [pool.submit(server.request, target) for target in absent]
        until(lambda: sum(one.done() and one.result()[0] == 502 for one in asked) == 98)
        info = "GET /api/models/{}/revision/main"
        before = hub.requests[info.format(NAME)]
        # Two still wait, and no other question reaches the upstream.
        assert server.request("/org/other/resolve/main/f")[0] == 502
        until(lambda: server.request(FILE)[0] == 200)
        assert hub.requests[info.format("org/other")] == 0
        assert hub.requests[info.format(NAME)] == before
        hub.closing.set()


def test_refused_models_leave_no_file_open(
    hub: HubServer, folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    names = [f"org/m{number}" for number in range(20)]
    for name in names:
        hub.add(name, folder, gone={"config.json"})
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        files = Path(f"/proc/{server.process.pid}/fd")
        server.request("/org/none/resolve/main/f")
        before = len(list(files.iterdir()))
        for name in names:
            with contextlib.suppress(http.client.IncompleteRead):
                server.request(f"/{name}/resolve/main/model.safetensors")
        until(lambda: server.metric("arriving_models") == 0)
        # Each has had two of its own. Connections may take a moment more to close.
        until(lambda: len(list(files.iterdir())) < before + len(names))
