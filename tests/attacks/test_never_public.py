"""Bytes that were never public, and names that were: no way around the upstream opens them, or closes them for others."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import remove_models, rename_model
from blobstore.serve.model_files import commit_of
from blobstore.store.fetched import record_name
from blobstore.store.local import LocalStore
from tests.attacks.test_clients_of_upstreams import FILE, NAME, RIGHT, fetch, made, until, weights
from tests.support.hub_server import HubServer, Repo
from tests.support.models import write_folder
from tests.support.raw_server import RawServer, Received, reply
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def assert_stays_secret(
    secret: bytes, server: Serving, store: LocalStore, place: Path, targets: list[str]
) -> None:
    """Check what clients without a token get: from the server, as its peer, and from one without an upstream."""
    place.mkdir()
    with serving(store, place) as plain:
        for target in targets:
            found = [server.request(target)[2], server.request(target, X_Blobstore_Peer="1")[2]]
            assert secret not in [*found, plain.request(target)[2]]


@pytest.mark.parametrize("is_new_asked_first", [False, True])
def test_a_repository_that_was_renamed_and_published_opens_no_former_commit(
    hub: HubServer, store: LocalStore, tmp_path: Path, is_new_asked_first: bool
) -> None:
    hub.add(NAME, made(tmp_path / "secret", 1), token="hf_right")
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        commit = fetch(server, RIGHT)
        del hub.repos[NAME]
        hub.renamed[NAME] = "org/new"
        hub.add("org/new", made(tmp_path / "clean", 2))
        new = FILE.replace(NAME, "org/new")
        if is_new_asked_first:
            until(lambda: server.request(new)[0] == 200)
        until(lambda: server.request(FILE)[0] == server.request(new)[0] == 200)
        until(lambda: store.has_model("org/new"))
        targets = [one.replace("main", it) for one in (FILE, new) for it in ("main", commit)]
        secret = weights(tmp_path / "secret")
        assert_stays_secret(secret, server, store, tmp_path / "plain", targets)


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_repository_with_the_former_name_of_another_opens_nothing_of_that(
    hub: HubServer, store: LocalStore, tmp_path: Path, has_weights: bool
) -> None:
    hub.add(NAME, made(tmp_path / "secret", 1), token="hf_right")
    config = FILE.replace("model.safetensors", "config.json")
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        commit = fetch(server, RIGHT)
        hub.repos["org/new"] = hub.repos.pop(NAME)
        hub.renamed[NAME] = "org/new"
        record = store.folder("pulled") / record_name(NAME)
        until(
            lambda: (
                server.request(FILE, Authorization=RIGHT)[0] == 200
                and b"org/new" in record.read_bytes()
            )
        )
        del hub.renamed[NAME]
        source = made(tmp_path / "clean", 2)
        if not has_weights:
            (source / "model.safetensors").unlink()
        (source / "config.json").write_text('{"another": 1}')
        hub.add(NAME, source).commit = "c" * 40
        until(lambda: server.request(config)[2] == (source / "config.json").read_bytes())
        new = FILE.replace(NAME, "org/new")
        targets = [one.replace("main", it) for one in (FILE, new) for it in ("main", commit)]
        secret = weights(tmp_path / "secret")
        assert_stays_secret(secret, server, store, tmp_path / "plain", targets)


def test_an_archive_of_a_private_commit_is_not_opened_by_the_public_repository(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.add(NAME, made(tmp_path / "secret", 1), token="hf_right")
    hub.branch(NAME, "old", repo.folder)
    old, other = FILE.replace("main", "old"), LocalStore(tmp_path / "other")
    with serving(other, tmp_path, "--upstream", hub.url) as node:
        assert node.request(old, Authorization=RIGHT)[0] == 200
        node.wait_for_log("written")
    pack_models([f"{NAME}:old"], tmp_path / "archive.bsar", store=other)
    repo.folder, repo.commit, secret = made(tmp_path / "clean", 2), "a" * 40, weights(repo.folder)
    repo.branches.clear()
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server, RIGHT)
        unpack_archive(tmp_path / "archive.bsar", store=store)
        repo.token = ""
        until(
            lambda: server.request(FILE, X_Blobstore_Peer="1")[0] == server.request(FILE)[0] == 200
        )
        assert_stays_secret(secret, server, store, tmp_path / "plain", [old])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_commit_that_is_newer_than_the_upstreams_word_is_for_its_readers(
    name: str, hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo, secret = hub.add(NAME, made(tmp_path / "clean", 2)), made(tmp_path / "secret", 1)
    (secret / "config.json").write_text('{"secret": true}')
    if name == "config.json":
        (secret / "model.safetensors").unlink()  # no file shows whether it is gated
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=600") as server:
        fetch(server)
        repo.token, repo.is_listed = "hf_right", False
        branch = hub.branch(NAME, "v2", secret)
        target = f"/{NAME}/resolve/v2/{name}"
        assert server.request(target, Authorization=RIGHT)[0] == 200
        until(lambda: store.has_model(f"{NAME}:v2"))
        targets = [target, target.replace("v2", branch.commit)]
        data = (secret / name).read_bytes()
        assert_stays_secret(data, server, store, tmp_path / "plain", targets)


def test_a_page_where_people_log_in_is_no_right(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.add(NAME, made(tmp_path / "secret", 1))

    def answer(received: Received) -> bytes:
        """Answer as the Hub, but send clients without a token to another host for each file."""
        if received.headers.get("authorization") != RIGHT and "/resolve/" in received.path:
            return reply(302, location="https://login.example/")
        return reply(307, location=hub.url + received.path, x_repo_commit=repo.commit)

    with (
        RawServer(answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}") as server,
    ):
        assert server.request(FILE)[0] == 502
        fetch(server, RIGHT)
        assert server.request(FILE)[0] == 502


def test_the_delta_of_a_public_model_against_a_restricted_one_is_for_readers_of_both(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    values = np.random.default_rng(1).standard_normal((512, 256)).astype(np.float32)
    tuned = values.copy()
    tuned[::50] += 1e-3
    gated = hub.add(NAME, write_folder(tmp_path / "gated", {"weight": values}), token="hf_right")
    hub.add("fan/tuned", write_folder(tmp_path / "tuned", {"weight": tuned}))
    tune = FILE.replace(NAME, "fan/tuned")
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        for target in (FILE, tune):
            assert server.request(target, Authorization=RIGHT)[0] == 200
        until(lambda: store.has_model("fan/tuned") and store.has_model(NAME))
        freeze_models(["fan/tuned"], store=store)
        digest = server.request("/v2/fan/tuned/manifests/latest")[1]["docker-content-digest"]

        def listed(token: str = "") -> list[str]:
            target = f"/v2/fan/tuned/referrers/{digest}"
            found = json.loads(server.request(target, Authorization=token)[2])["manifests"]
            return [f"/v2/fan/tuned/manifests/{one['digest']}" for one in found]

        assert listed() == []
        assert server.request(tune)[2] == weights(tmp_path / "tuned")
        gated.token = ""
        until(lambda: server.request(FILE)[0] == 200 and bool(listed()))
        (manifest,) = listed()
        layers = json.loads(server.request(manifest)[2])["layers"]
        blobs = [f"/v2/fan/tuned/blobs/{one['digest']}" for one in layers]
        assert {server.request(one)[0] for one in blobs} == {200}
        gated.token = "hf_right"
        until(lambda: server.request(FILE)[0] == 401)
        until(lambda: {server.request(one)[0] for one in (*blobs, manifest)} == {404})


def test_a_model_that_was_brought_and_is_fetched_by_now_is_for_its_readers(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add(NAME, made(tmp_path / "secret", 1), token="hf_right")
    other = LocalStore(tmp_path / "other")
    with serving(other, tmp_path, "--upstream", hub.url) as node:
        fetch(node, RIGHT)
    pack_models([NAME], tmp_path / "archive.bsar", store=other)
    create(made(tmp_path / "own", 2), f"{NAME}:mine", store=store)
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        unpack_archive(tmp_path / "archive.bsar", store=store)
        found = server.request(f"/v2/{NAME}/manifests/latest")[1]["docker-content-digest"]
        blob = store.resolve(NAME).layers[0].digest
        targets = [FILE, f"/v2/{NAME}/manifests/{found}", f"/v2/{NAME}/blobs/{blob}"]
        assert {server.request(one)[0] for one in targets} == {200}
        remove_models([NAME], store=store)
        fetch(server, RIGHT)
        assert not {server.request(one)[0] for one in targets} & {200, 206}


@pytest.mark.parametrize(
    ("hidden", "by"),
    [
        ("gated", "--peers"),
        ("commit", "--peers"),
        ("--allow", "--peers"),
        ("--allow", "--upstream"),
        ("token", "--upstream"),
    ],
)
def test_a_server_gives_nothing_by_its_digest_alone(
    hidden: str, by: str, hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    """A lying server lists the digest of a file that its client may not read, under another name, and sends no byte."""
    is_own = hidden in ("--allow", "token")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "model.bin").write_bytes(secret := random.Random(1).randbytes(50_000))
    repo = hub.add(NAME, tmp_path / "secret", token="hf_right")
    config, blob = Digest.of(b"{}"), Digest.of(secret)
    layer = Descriptor(media_types.FILE, blob, len(secret), "model.bin")
    manifest = Manifest(
        config=Descriptor(media_types.CONFIG, config, 2), layers=(layer,)
    ).to_bytes()
    commit = repo.commit if hidden == "commit" else commit_of(Digest.of(manifest))
    info = {"id": "evil/m", "sha": commit, "siblings": [{"rfilename": "model.bin"}]}
    answers = {
        "/api/models/evil/m/revision/main": json.dumps(info).encode(),
        f"/api/models/evil/m/tree/{commit}": json.dumps(repo.tree()).encode(),
        "/v2/evil/m/manifests/latest": manifest,
        f"/v2/evil/m/blobs/{config}": b"{}",
    }

    def answer(received: Received) -> bytes:
        data = answers.get(received.path.partition("?")[0])
        kind = {"content_type": media_types.MANIFEST} if data == manifest else {}
        if received.method == "HEAD":
            return reply(200, server="blobstore", x_repo_commit=commit)
        return reply(404) if data is None else reply(200, data, server="blobstore", **kind)

    target = FILE.replace("model.safetensors", "model.bin")
    options = {"--allow": ["--allow", "evil/*"], "token": [f"--token-file={tmp_path / 'tokens'}"]}
    (tmp_path / "tokens").write_text("models=evil/* a-limited-token\n")
    right = "Bearer a-limited-token" if hidden == "token" else ""
    if is_own:
        (made(tmp_path / "own", 1) / "vocab.txt").write_bytes(secret)
        create(tmp_path / "own", NAME, store=store)
        assert blob in [one.digest for one in store.resolve(NAME).blobs]
    else:
        with serving(store, tmp_path, "--upstream", hub.url) as server:
            assert server.request(target, Authorization=RIGHT)[0] == 200
            server.wait_for_log("written")
    with (
        RawServer(answer) as liar,
        serving(store, tmp_path, by, f"http://{liar.host}", *options.get(hidden, [])) as server,
    ):
        with contextlib.suppress(http.client.IncompleteRead):
            assert server.request(target.replace(NAME, "evil/m"), Authorization=right)[2] != secret
        server.wait_for_log("error")
        assert not store.has_model("evil/m")


def test_a_blob_that_comes_into_the_store_during_a_fetch_has_to_be_sent_too(
    store: LocalStore, tmp_path: Path
) -> None:
    """A lying peer has one blob of a hidden model. While it sends that, another such model gets the other blob."""
    known, secret = (random.Random(seed).randbytes(50_000) for seed in (1, 2))
    for name, data in (("first", known), ("second", secret)):
        (made(tmp_path / name, 1) / "vocab.txt").write_bytes(data)
    create(tmp_path / "first", "private/first", store=store)
    names, config = {"vocab.txt": known, "model.bin": secret}, Digest.of(b"{}")
    layers = tuple(
        Descriptor(media_types.FILE, Digest.of(data), len(data), name)
        for name, data in names.items()
    )
    manifest = Manifest(config=Descriptor(media_types.CONFIG, config, 2), layers=layers).to_bytes()
    commit = commit_of(Digest.of(manifest))
    (tmp_path / "listed").mkdir()
    for name, data in names.items():
        (tmp_path / "listed" / name).write_bytes(data)
    info = {"id": "evil/m", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
    tree = Repo(tmp_path / "listed", commit).tree()
    answers = {
        "/api/models/evil/m/revision/main": json.dumps(info).encode(),
        f"/api/models/evil/m/tree/{commit}": json.dumps(tree).encode(),
        "/v2/evil/m/manifests/latest": manifest,
        f"/v2/evil/m/blobs/{config}": b"{}",
        f"/v2/evil/m/blobs/{Digest.of(known)}": known,
    }

    def answer(received: Received) -> bytes:
        path = received.path.partition("?")[0]
        data = answers.get(path)
        if data == known and not store.has_model("private/second"):
            create(tmp_path / "second", "private/second", store=store)
        kind = {"content_type": media_types.MANIFEST} if data == manifest else {}
        return reply(404) if data is None else reply(200, data, server="blobstore", **kind)

    with (
        RawServer(answer) as liar,
        serving(store, tmp_path, "--peers", f"http://{liar.host}", "--allow", "evil/*") as server,
    ):
        with contextlib.suppress(http.client.IncompleteRead):
            assert server.request("/evil/m/resolve/main/model.bin")[2] != secret
        server.wait_for_log("error")
        assert store.has_model("private/second")
        assert not store.has_model("evil/m")


@pytest.mark.parametrize("name", [NAME, "my/copy"])
def test_a_peer_that_names_the_commit_of_a_restricted_model_opens_it_under_no_name(
    name: str, hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    """The records of fetches are lost. The peer has other files, and the commit is no secret."""
    repo = hub.add(NAME, made(tmp_path / "source", 1), token="hf_right")
    hub.branch(NAME, "v1", repo.folder).commit = repo.commit
    fetched, secret = FILE.replace("main", "v1"), weights(tmp_path / "source")
    with serving(store, tmp_path, "--upstream", hub.url) as server:
        assert server.request(fetched, Authorization=RIGHT)[2] == secret
        server.wait_for_log("written")
    if name != NAME:
        rename_model(f"{NAME}:v1", f"{name}:v1", store=store)
    shutil.rmtree(store.folder("pulled"))
    junk = b'{"junk": 1}'
    oid = hashlib.sha1(b"blob %d\0" % len(junk) + junk).hexdigest()
    answers = {
        f"/api/models/{NAME}/revision/main": {
            "id": NAME,
            "sha": repo.commit,
            "siblings": [{"rfilename": "config.json"}],
        },
        f"/api/models/{NAME}/tree/{repo.commit}": [
            {"type": "file", "path": "config.json", "size": len(junk), "oid": oid}
        ],
    }

    def answer(received: Received) -> bytes:
        path = received.path.partition("?")[0]
        commit = {"x_repo_commit": repo.commit, "server": "blobstore"}
        if "/resolve/" in path:
            data = junk if received.method == "GET" else b""
            return reply(200, data, content_length=len(junk), **commit)
        found = answers.get(path)
        return reply(404) if found is None else reply(200, json.dumps(found).encode(), **commit)

    with (
        RawServer(answer) as liar,
        serving(store, tmp_path, "--peers", f"http://{liar.host}") as server,
    ):
        assert server.request(f"/{NAME}/resolve/main/config.json")[2] == junk  # the peer's own
        assert server.request(FILE.replace("main", repo.commit))[2] != secret
    with serving(store, tmp_path) as plain:
        for revision in ("v1", repo.commit):
            target = FILE.replace(NAME, name).replace("main", revision)
            assert plain.request(target)[0] == 404


def test_no_peer_hears_of_a_restricted_model(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add(NAME, made(tmp_path / "secret", 1), token="hf_right")
    asked: list[str] = []

    def answer(received: Received) -> bytes:
        asked.append(received.path)
        return reply(404)

    with RawServer(answer) as peer:
        options = ("--upstream", hub.url, "--peers", f"http://{peer.host}")
        with serving(store, tmp_path, *options) as server:
            fetch(server, RIGHT)
    assert asked == []


def test_a_wrong_token_does_not_keep_a_damaged_model_from_others(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.add(NAME, made(tmp_path / "source", 1))

    def answer(received: Received) -> bytes:
        """Answer as the Hub, which refuses wrong tokens for public models, too."""
        if "wrong" in received.headers.get("authorization", ""):
            return reply(401)
        return reply(307, location=hub.url + received.path, x_repo_commit=repo.commit)

    with (
        RawServer(answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}", "--fresh=0") as server,
    ):
        fetch(server)
        blob = max(store.resolve(NAME).layers, key=lambda one: one.size)
        Path(store.blob_path(blob.digest)).unlink()
        server.request(FILE, Authorization="Bearer wrong_token")
        assert server.request(FILE)[::2] == (200, weights(repo.folder))


def test_what_everyone_may_read_is_fetched_with_no_clients_token(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.add(NAME, made(tmp_path / "source", 1))
    shown: set[str | None] = set()

    def answer(received: Received) -> bytes:
        if received.method == "GET" and "/resolve/" in received.path:
            shown.add(received.headers.get("authorization"))
        return reply(307, location=hub.url + received.path, x_repo_commit=repo.commit)

    with (
        RawServer(answer) as upstream,
        serving(store, tmp_path, "--upstream", f"http://{upstream.host}") as server,
    ):
        fetch(server, RIGHT)
    assert shown == {None}


def test_a_repository_that_was_renamed_answers_for_the_operators_models_in_it(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add(NAME, made(tmp_path / "source", 1))
    create(made(tmp_path / "own", 2), f"{NAME}:mine", store=store)
    blob = store.resolve(f"{NAME}:mine").layers[0].digest
    targets = [f"/api/models/{NAME}/refs", f"/v2/{NAME}/tags/list", f"/v2/{NAME}/blobs/{blob}"]
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        fetch(server)
        hub.repos["org/new"] = hub.repos.pop(NAME)
        hub.renamed[NAME] = "org/new"
        assert [server.request(one)[0] for one in targets] == [200] * 3


def test_a_former_name_is_answered_while_the_upstream_is_away(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    hub.add(NAME, made(tmp_path / "source", 1))
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0") as server:
        commit = fetch(server)
        hub.repos["org/new"] = hub.repos.pop(NAME)
        hub.renamed[NAME] = "org/new"
        record = store.folder("pulled") / record_name(NAME)
        until(lambda: server.request(FILE)[0] == 200 and b"org/new" in record.read_bytes())
        hub.repos["org/new"].status = 502
        for target in (FILE, FILE.replace("main", commit), f"/v2/{NAME}/tags/list"):
            assert server.request(target)[0] == 200


def test_a_commit_that_the_operator_removed_is_refused_while_the_upstream_is_away(
    hub: HubServer, store: LocalStore, tmp_path: Path
) -> None:
    repo = hub.add(NAME, made(tmp_path / "source", 1))
    limits = {"pull_through._MAX_PATIENT": 0}
    with serving(store, tmp_path, "--upstream", hub.url, "--fresh=0", limits=limits) as server:
        commit = fetch(server)
        remove_models([NAME], store=store)
        repo.status = 502
        assert server.request(FILE.replace("main", commit))[0] == 502
