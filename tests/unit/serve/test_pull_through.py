"""What a server that asks an upstream keeps in memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

import pytest

from blobstore.core import capacity
from blobstore.errors import BlobstoreError, RemoteError, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import copy_model
from blobstore.serve import hub, other_files, registry
from blobstore.serve.access import Access
from blobstore.serve.asked import Asked
from blobstore.serve.library import Library
from blobstore.serve.messages import Request, Response
from blobstore.serve.model_files import commit_of
from blobstore.serve.peers import Peer
from blobstore.serve.pull_through import PullThrough
from blobstore.serve.refusal import Refusal
from blobstore.serve.routes import answer
from blobstore.serve.unprepared import NotFetched, NotPrepared, OnlyHere, prepared
from blobstore.serve.upstream import Upstream
from blobstore.store.fetched import given_name
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.support.models import dense_tensors, write_folder
from tests.support.serve import json_of


@pytest.fixture
def through(store: LocalStore, tmp_path: Path) -> Iterator[PullThrough]:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        made = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        yield made
        made.close()


def answer_of(
    through: PullThrough, target: str, headers: Mapping[str, str] | None = None
) -> Response:
    request = Request("GET", target, headers or {})
    return prepared(lambda: answer(request, through._library, Access(), pull_through=through))


def ask(through: PullThrough, target: str) -> int:
    return answer_of(through, target).status


def test_questions_for_absent_models_share_what_connections_trust(through: PullThrough) -> None:
    """A context has a MiB of certificates, and is in a circle that the collector finds late."""
    ask(through, "/org/none/resolve/main/f")
    gc.collect()
    gc.disable()
    try:
        before = contexts()
        for number in range(20):
            assert ask(through, f"/org/m{number}/resolve/main/f") == 401
        assert contexts() <= before
    finally:
        gc.enable()


def contexts() -> int:
    # Objects of some libraries warn if they are asked for their class.
    return sum(issubclass(type(one), ssl.SSLContext) for one in gc.get_objects())


@pytest.fixture
def fetched(through: PullThrough) -> Asked:
    """Return a version that is in the store."""
    assert ask(through, "/org/model/resolve/main/config.json") == 200
    for fetch in list(through._fetches.running.values()):
        assert fetch.ended.wait(60)
    ((repository, commit),) = through._library.pulled.records()
    return Asked(Reference.parse(repository), repository, commit)


def test_the_store_answers_for_an_upstream_however_long_that_was_silent(
    through: PullThrough, fetched: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, clock = [400.0], time.monotonic  # longer than answers hold
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(waited))

    def silent(*_: object, **__: object) -> None:
        waited.append(60)
        assert len(waited) == 2, "the store's answer held only until before the question"
        raise RemoteError("it is silent")

    monkeypatch.setattr(through._upstreams, "find", silent)
    assert ask(through, f"/{fetched.repository}/resolve/main/config.json") == 200
    assert len(waited) == 2


def test_metrics_do_not_wait_for_the_lock_of_the_store(
    through: PullThrough, fetched: Asked, store: LocalStore
) -> None:
    name = fetched._replace(reference=Reference.parse("org/model:v2"), revision="v2")
    naming = threading.Thread(target=through._fetches.begin, args=(name, fetched.revision))
    with store.exclusive_lock():
        naming.start()
        while not through._fetches._lock.locked():
            time.sleep(0.001)
        assert "blobstore_upstream_models_total 1" in through.metrics()
        assert through._fetches._lock.locked()
    naming.join()
    assert store.has_model("org/model:v2")


HUB_ROUTES = {
    (True, ""): "/api/models/org/model",
    (True, "revision"): "/api/models/org/model/revision/main",
    (True, "tree"): "/api/models/org/model/tree/main",
    (True, "paths-info"): "/api/models/org/model/paths-info/main",
    (True, "commits"): "/api/models/org/model/commits/main",
    (True, "refs"): "/api/models/org/model/refs",
    (True, "auth-check"): "/api/models/org/model/auth-check",
    (False, "resolve"): "/org/model/resolve/main/config.json",
    (False, "raw"): "/org/model/raw/main/config.json",
}
REGISTRY_ROUTES = {
    "manifests": ("/v2/org/model/manifests/latest", "/v2/org/model/manifests/DIGEST"),
    "blobs": ("/v2/org/model/blobs/DIGEST",),
    "tags": ("/v2/org/model/tags/list",),
    "referrers": ("/v2/org/model/referrers/DIGEST",),
}
ROUTES = [*HUB_ROUTES.values(), *chain.from_iterable(REGISTRY_ROUTES.values())]


def test_the_routes_of_these_tests_are_all_that_name_a_repository() -> None:
    assert HUB_ROUTES.keys() == {*hub.ROUTES._words, (True, "")}
    assert sorted(REGISTRY_ROUTES) == sorted(registry._ACTIONS)


def asked(through: PullThrough, route: str, digests: Mapping[str, str] = {}) -> tuple[int, object]:
    """Return the status, and what the answer says besides times."""
    what = route.split("/")[-2]
    request = Request("GET", route.replace("DIGEST", digests.get(what, f"sha256:{'0' * 64}")))
    if what == "paths-info":
        kind = {"content-type": "application/x-www-form-urlencoded"}
        request = replace(request, method="POST", headers=kind, body=b"paths=config.json")
    found = prepared(lambda: answer(request, through._library, Access(), pull_through=through))
    is_dated = what in ("models", "org", "revision", "commits")
    return found.status, () if is_dated else [one for one in found.parts if isinstance(one, bytes)]


@contextlib.contextmanager
def cache(folder: Path, url: str) -> Iterator[PullThrough]:
    """Give a block a cache with the store in a folder."""
    through = PullThrough(Library(LocalStore(folder)), Upstream.parse(url), fresh=300)
    with contextlib.closing(through):
        yield through
        for fetch in list(through._fetches.running.values()):
            assert fetch.ended.wait(60)


def test_each_route_answers_before_a_model_is_fetched_as_it_does_afterwards(
    tmp_path: Path,
) -> None:
    with HubServer() as server:
        server.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        warm, away, url = {}, tmp_path / "warm", server.url
        with cache(away, url) as through:
            head = answer_of(through, "/v2/org/model/manifests/latest").headers
            digest = head["Docker-Content-Digest"]
            (found,) = through._library.prepared_artifacts(Reference.parse("org/model"))
            digests = dict.fromkeys(("manifests", "referrers"), digest)
            digests["blobs"] = str(next(iter(found.blobs)))
            for route in ROUTES:
                warm[route] = asked(through, route, digests)
                assert warm[route][0] == 200
        for number, route in enumerate(ROUTES):
            with cache(tmp_path / f"cold{number}", url) as through:
                assert asked(through, route, digests) == warm[route], route
    with cache(away, url) as through:
        for route in ROUTES:
            assert asked(through, route, digests) == warm[route], route
    with cache(tmp_path / "empty", url) as through:
        for route in ROUTES:
            assert asked(through, route)[0] == 502, "an upstream that is away says nothing"


def test_each_route_answers_alike_for_models_that_the_upstream_lacks(through: PullThrough) -> None:
    answers = {asked(through, route.replace("org/model", "org/none"))[0] for route in ROUTES}
    assert answers == {401}
    assert not through._fetches.running


@pytest.mark.parametrize("what", ["blobs", "manifests", "referrers"])
def test_a_question_about_a_digest_fetches_nothing_if_a_version_is_here(
    tmp_path: Path, what: str
) -> None:
    with HubServer() as server, cache(tmp_path / "store", server.url) as through:
        folder = write_folder(tmp_path / "model", dense_tensors())
        server.add("org/model", folder)
        server.branch("org/model", "v1", folder)
        assert ask(through, "/v2/org/model/manifests/v1") == 200
        assert ask(through, f"/v2/org/model/{what}/sha256:{'0' * 64}") in (200, 404)
        assert not through._fetches.running
        assert [str(one) for one in through._store.references()] == ["org/model:v1"]


def test_main_is_listed_although_another_revision_was_fetched_first(tmp_path: Path) -> None:
    """llama.cpp begins with the list of references, and goes on with the commit of ``main``."""
    with HubServer() as server, cache(tmp_path / "store", server.url) as through:
        folder = write_folder(tmp_path / "model", dense_tensors())
        commit = server.add("org/model", folder).commit
        server.branch("org/model", "v1", folder)
        assert ask(through, "/org/model/resolve/v1/config.json") == 200
        refs = json_of(answer_of(through, "/api/models/org/model/refs"))
        assert [one["targetCommit"] for one in refs["branches"]] == [commit]
        assert [one["name"] for one in refs["tags"]] == ["v1"]


def test_the_upstream_is_not_asked_for_models_of_other_hosts(store: LocalStore) -> None:
    with HubServer() as hub:
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            ask(through, "/v2/ghcr.io/team/llama/manifests/latest")
            ask(through, "/ghcr.io.team/llama/resolve/main/config.json")
            assert not hub.requests
            ask(through, "/v2/team/llama/manifests/latest")
            assert hub.requests


@pytest.mark.parametrize("number", range(6))
def test_an_own_model_is_not_absent_because_a_look_at_it_fails_once(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    own = create(write_folder(tmp_path / "own", dense_tensors()), "org/model", store=store)
    path, looks, actual = store.manifest_path("org/model"), count(), os.stat

    def stat(name: object, **options: Any) -> os.stat_result:
        if str(name) == str(path) and next(looks) == number:
            raise OSError(errno.EIO, "the disk does not answer")
        return actual(cast("Any", name), **options)

    with HubServer() as server, cache(store.root, server.url) as through:
        server.add("org/model", write_folder(tmp_path / "other", dense_tensors()))
        with monkeypatch.context() as patch, contextlib.suppress(StoreError):
            patch.setattr(os, "stat", stat)
            found = answer_of(through, "/org/model/resolve/main/config.json")
            assert found.headers["X-Repo-Commit"] == commit_of(own.digest)
        assert not server.requests
        found = answer_of(through, "/org/model/resolve/main/config.json")
        assert found.headers["X-Repo-Commit"] == commit_of(own.digest)


@pytest.mark.parametrize(
    "name", ["localhost:5000/llama", "localhost/llama", "my-host:80/Q", "a.b/c"]
)
@pytest.mark.parametrize("tag", ["latest", "none"])
def test_a_name_of_an_own_model_of_a_host_is_no_name_of_the_upstream(
    name: str, tag: str, store: LocalStore, tmp_path: Path
) -> None:
    create(write_folder(tmp_path / "own", dense_tensors()), name, store=store)
    with HubServer() as hub:
        listed = name.replace(":", "_").lower()
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            catalog = json_of(answer_of(through, "/v2/_catalog"))
            assert catalog["repositories"] == [listed]
            expected = 200 if tag == "latest" else 404
            assert ask(through, f"/v2/{listed}/manifests/{tag}") == expected
            assert ask(through, f"/v2/{listed}/tags/list") == 200
            assert not hub.requests


def test_a_name_like_a_host_is_one_of_the_upstream_unless_the_store_has_it(
    store: LocalStore,
) -> None:
    with HubServer() as hub:
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/v2/team_1/llama/manifests/latest") == 401
            assert hub.requests


@pytest.mark.parametrize("more", [1, 40])
def test_models_beyond_those_that_arrive_are_refused(
    through: PullThrough, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    assert capacity.ARRIVALS.most == other_files._MOST
    monkeypatch.setattr(other_files, "_MOST", 0)
    for _ in range(more):
        assert ask(through, "/org/model/resolve/main/config.json") == 503
    assert not through._fetches.running


@pytest.mark.parametrize("more", [1, 40])
def test_questions_beyond_the_patient_ones_are_asked_all_the_same(
    through: PullThrough, more: int
) -> None:
    for _ in range(capacity.PATIENT.most):
        assert through._patient.acquire(blocking=False)
    for number in range(more):
        assert ask(through, f"/org/m{number}/resolve/main/f") == 401
    assert not through._patient.acquire(blocking=False)  # as many are left as before


def test_questions_about_what_was_never_fetched_have_threads_of_their_own(
    through: PullThrough, fetched: Asked
) -> None:
    here, (commit,) = fetched.repository, through._library.pulled.records().values()
    rows = {
        f"{here}:latest": capacity.FETCH,
        f"{here}:{commit.commit}": capacity.FETCH,
        f"{here}:v2": capacity.ASK,
        f"{here}:{'d' * 40}": capacity.ASK,
        "org/other": capacity.ASK,
    }
    for name, threads in rows.items():
        asked = Asked.named(Reference.parse(name))
        assert through._question(through._ask, asked, "").threads is threads, name
    with pytest.raises(NotFetched) as first:
        prepared_here(through, f"/{here}/resolve/v2/f")
    assert first.value.threads is capacity.ASK


def test_made_up_tokens_hold_nothing_up(store: LocalStore, tmp_path: Path) -> None:
    with HubServer() as hub:
        folder = write_folder(tmp_path / "model", dense_tensors())
        hub.add("org/gated", folder, token="hf_reader", gated=True)
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        asked = Asked.named(Reference.parse("org/gated:latest"))

        def threads(token: str) -> capacity.Capacity:
            return through._question(through._ask, asked, token).threads

        assert threads("hf_reader") is capacity.TRY
        assert threads("") is capacity.ASK
        through._ask(asked, "hf_reader")
        assert threads("hf_reader") is capacity.FETCH, "the token has shown a right"
        assert threads("hf_made_up") is capacity.TRY
        assert hub.tokens[0] == "hf_reader"
        through.close()


def prepared_here(through: PullThrough, target: str, token: str = "") -> None:
    """Ask until another server has to be asked."""
    request = Request("GET", target, {"authorization": f"Bearer {token}"} if token else {})
    for _ in range(20):
        try:
            answer(request, through._library, Access(), pull_through=through)
        except NotFetched:
            raise
        except NotPrepared as first:
            first.prepare()


def test_a_model_whose_record_is_damaged_is_fetched_again(
    store: LocalStore, tmp_path: Path
) -> None:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        for _ in range(2):
            library = Library(store)
            through = PullThrough(library, Upstream.parse(hub.url), fresh=300)
            with contextlib.closing(through):
                assert ask(through, "/org/model/resolve/main/config.json") == 200
                for fetch in list(through._fetches.running.values()):
                    assert fetch.ended.wait(60)
                assert library.pulled.is_public("org/model")
                assert not library.pulled.incomplete
            for record in library.pulled._folder.glob("[!.]*"):
                record.write_bytes(b"damaged")
        assert [str(one) for one in store.references()] == ["org/model:latest"]


def test_a_branch_is_the_commit_to_which_it_has_moved_while_that_arrives(
    store: LocalStore, tmp_path: Path
) -> None:
    with HubServer() as hub:
        repo = hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/org/model/resolve/main/config.json") == 200
            for fetch in list(through._fetches.running.values()):
                assert fetch.ended.wait(60)
            repo.commit = "e" * 40
            repo.gates["model.safetensors"] = 10, threading.Event()
            try:
                assert ask(through, f"/org/model/resolve/{repo.commit}/config.json") == 200
                assert through._tags.pop(Reference.parse("org/model"))
                found = answer_of(through, "/org/model/resolve/main/config.json")
                assert found.headers["X-Repo-Commit"] == repo.commit
            finally:
                repo.gates["model.safetensors"][1].set()


def test_a_public_model_is_served_after_a_restart_while_the_upstream_is_gone(
    store: LocalStore, tmp_path: Path
) -> None:
    """No right is known by then, but that everyone may read it is."""
    with HubServer() as hub:
        repo = hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            token = {
                "authorization": "Bearer hf_any"
            }  # the first client has one, the next has none
            assert answer_of(through, "/org/model/resolve/main/config.json", token).status == 200
            for fetch in list(through._fetches.running.values()):
                assert fetch.ended.wait(60)
    through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
    with contextlib.closing(through):
        for revision in (repo.commit, "main"):
            assert ask(through, f"/org/model/resolve/{revision}/config.json") == 200
        assert ask(through, "/org/other/resolve/main/config.json") == 502


def test_an_absent_revision_takes_back_no_right_to_the_others(
    store: LocalStore, tmp_path: Path
) -> None:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/org/model/resolve/main/config.json") == 200
            for fetch in list(through._fetches.running.values()):
                assert fetch.ended.wait(60)
            assert ask(through, "/org/model/resolve/none/config.json") == 404
            asked = hub.requests.total()
            assert ask(through, "/org/model/resolve/main/config.json") == 200
            assert hub.requests.total() == asked


def test_only_a_model_that_was_fetched_is_fetched_again_if_it_is_damaged(
    store: LocalStore, tmp_path: Path
) -> None:
    def found_damaged(through: PullThrough, model: str, revision: str) -> int:
        target = f"/org/{model}/resolve/{revision}/config.json"
        request = Request("GET", target, damaged=time.monotonic())
        return prepared(
            lambda: answer(request, through._library, Access(), pull_through=through)
        ).status

    with HubServer() as hub:
        folder = write_folder(tmp_path / "model", dense_tensors())
        repo = hub.add("org/model", folder)
        own = create(folder, "org/own", store=store)
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/org/model/resolve/main/config.json") == 200
            for revision in ("main", repo.commit):
                for fetch in list(through._fetches.running.values()):
                    assert fetch.ended.wait(60)
                assert found_damaged(through, "model", revision) == 200
            for revision in ("main", commit_of(own.digest)):
                with pytest.raises(OnlyHere):
                    found_damaged(through, "own", revision)


def test_a_name_that_nothing_says_a_fetch_has_given_gets_its_blobs_again(
    through: PullThrough, fetched: Asked, store: LocalStore
) -> None:
    copy_model("org/model", "my/copy", store=store)
    data, manifest = store.parse("org/model")
    lost = Path(store.blob_path(max(manifest.blobs, key=lambda one: one.size).digest))
    (store.folder("pulled") / given_name(Reference.parse("org/model"))).unlink()
    lost.unlink()

    def found_damaged(model: str) -> int:
        target = f"/{model}/resolve/main/config.json"
        request = Request("GET", target, damaged=time.monotonic())
        return prepared(
            lambda: answer(request, through._library, Access(), pull_through=through)
        ).status

    with pytest.raises(OnlyHere):
        found_damaged("my/copy")
    with contextlib.suppress(BlobstoreError):
        found_damaged("org/model")
    for fetch in list(through._fetches.running.values()):
        assert fetch.ended.wait(60)
    assert lost.exists()
    assert store.read_manifest("org/model") == data
    assert through._library.is_own(Reference.parse("org/model"))


@pytest.mark.parametrize("asks", ["an upstream", "peers"])
def test_own_models_are_served_without_a_question(
    asks: str, store: LocalStore, tmp_path: Path
) -> None:
    own = create(write_folder(tmp_path / "own", dense_tensors()), "org/own", store=store)
    with HubServer() as hub:
        upstream = Upstream.parse(hub.url) if asks == "an upstream" else None
        peers = [] if upstream else [Peer.parse(hub.url)]
        through = PullThrough(Library(store), upstream, peers=peers, fresh=300)
        with contextlib.closing(through):
            for revision in ("main", commit_of(own.digest)):
                assert ask(through, f"/org/own/resolve/{revision}/config.json") == 200
            assert ask(through, "/api/models/org/own/refs") == 200
            assert not hub.requests


@pytest.mark.parametrize("has_own", [False, True])
def test_a_repository_is_asked_for_by_its_former_name_once(
    has_own: bool, store: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", dense_tensors())
    if has_own:  # under the former name, of which all tags are asked for then
        create(folder, "org/old:own", store=store)
    with HubServer() as hub:
        hub.add("org/model", folder)
        hub.renamed["org/old"] = "org/model"
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/org/old/resolve/main/config.json") == 200
            for fetch in list(through._fetches.running.values()):
                assert fetch.ended.wait(60)
            asked = hub.requests.total()
            for name in ("old", "model"):
                assert ask(through, f"/org/{name}/resolve/main/config.json") == 200
                if not has_own:
                    assert ask(through, f"/api/models/org/{name}/refs") == 200
            assert hub.requests.total() == asked
        names = {"org/model:latest", *(["org/old:own"] if has_own else [])}
        assert set(map(str, store.references())) == names


@pytest.mark.parametrize("target", ["/org/none/resolve/main/f", "/api/models/org/none/refs"])
def test_a_refusal_is_repeated_without_a_question(target: str, store: LocalStore) -> None:
    with HubServer() as hub:
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, target) == 401
            asked = hub.requests.total()
            assert ask(through, target) == 401
            assert hub.requests.total() == asked > 0


def test_a_refused_commit_is_no_other_revision(store: LocalStore) -> None:
    """A branch that no name can have is kept under a stand-in, which looks like a commit."""
    with HubServer() as hub:
        through = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            repository = Reference.parse("org/model")
            branch = Asked.of(repository, "feature/x")
            assert branch is not None
            commit = Asked.of(repository, branch.reference.tag)
            assert commit is not None
            assert commit.reference == branch.reference
            through._refuse(commit, "client", Refusal(404))
            assert through._refused_lately(branch, "client") is None
            assert through._refused_lately(commit, "client") is not None


def test_a_tag_that_may_not_be_served_is_not_fetched(store: LocalStore, tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add("org/model", write_folder(tmp_path / "model", dense_tensors()))
        library = Library(store, ["org/model:v1"])
        through = PullThrough(library, Upstream.parse(hub.url), fresh=300)
        with contextlib.closing(through):
            assert ask(through, "/org/model/resolve/main/config.json") == 401
            assert not through._fetches.running
        assert not list(store.references())


@pytest.mark.parametrize("name", ["", "manifests", "blobs"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_asked_or_written_once_a_folder_of_the_store_is_gone(
    through: PullThrough, store: LocalStore, tmp_path: Path, name: str, *, is_replaced: bool
) -> None:
    weights = "/org/{}/resolve/main/model.safetensors"
    create(write_folder(tmp_path / "own", dense_tensors()), "org/own", store=store)
    assert ask(through, weights.format("own")) == 200
    folder = store.root / name
    folder.rename(tmp_path / "unmounted")
    if is_replaced:
        folder.mkdir()  # the mount point
    for one in ("own", "model"):
        with pytest.raises(StoreError, match=f"'{folder}' is no longer"):
            ask(through, weights.format(one))
    with pytest.raises(StoreError), store.writing():
        pytest.fail("it is written")
    assert ask(through, "/readyz") == 503
    assert folder.exists() == is_replaced
    if is_replaced:
        assert not list(folder.iterdir())
        folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    assert ask(through, weights.format("own")) == 200
    assert ask(through, "/readyz") == 200
