"""Who may read what of an upstream, cell by cell: the table of docs/concepts/security-model.md.

For each state, one server runs, and every client asks for every version in every way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.names import copy_model
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer, Repo
from tests.support.models import write_folder
from tests.support.serve_process import Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

NAME, COPY = "org/model", "own/copy"
CLIENTS: dict[str, dict[str, Any]] = {
    "nobody": {},
    "reader": {"Authorization": "Bearer hf_right"},
    "stranger": {"Authorization": "Bearer hf_wrong"},
    "peer": {"X_Blobstore_Peer": "1"},
    "plain": {},  # of another server on the same store, without an upstream
    "limited": {"Authorization": "Bearer a-limited-token"},  # of one whose token opens other models
}
LIMITS = {"pull_through._MAX_PATIENT": 0, "pull_through._REFUSED_SECONDS": 0.1}
FETCHED = ("main", "v1", "former")
"""Versions of the upstream: two tags, and one that no tag names any more."""
ALL = ("name", "commit", "manifest", "digest", "tags", "refs", "referrers")
LISTS = ("models", "catalog")
"""Those of all models have what one can read without a token, for all clients."""
WAYS = {
    "main": ALL,
    "v1": ALL,
    "former": ("commit", "digest"),
    "theirs": ALL,  # of a peer
    "gone": ("digest", "referrers"),  # of a peer, and named by the upstream since
    # Of the store's own. The lists of tags are for those who may read the main version.
    "mine": ("name", "manifest", "digest", "referrers"),
    "copy": (
        *LISTS,
        "copied",
        "copied commit",
    ),  # of ``main`` or ``theirs``, by a user of the store
}


OF_PEERS = (("theirs", "commit"), ("copy", "copied"), ("copy", "copied commit"))
"""Ways to ask for a version of a peer by a commit, as which a copy is judged."""


@dataclass
class Version:
    """A version of the model, as it is asked for."""

    tag: str
    commit: str = ""
    manifest: str = ""
    blob: str = ""


@dataclass
class World:
    """A server with an upstream and a peer, and another one without on the same store."""

    hub: HubServer
    store: LocalStore
    server: Serving
    plain: Serving
    limited: Serving
    folder: Path
    versions: dict[str, Version] = field(default_factory=dict)

    def ask(self, client: str, target: str) -> tuple[int, dict[str, str], bytes]:
        others = {"plain": self.plain, "limited": self.limited}
        server = others.get(client, self.server)
        return server.request(target, **CLIENTS[client])

    def fetch(self, name: str, revision: str, client: str) -> None:
        """Let the server fetch a revision, and prepare what a registry has of it."""
        target = f"/{NAME}/resolve/{revision}/model.safetensors"
        until(lambda: self.ask(client, target)[0] == 200)
        commit = self.ask(client, target)[1]["x-repo-commit"]
        tag = "latest" if revision == "main" else revision
        self.note(name, tag, commit, client)

    def note(self, name: str, tag: str, commit: str, client: str) -> None:
        """Remember a version that a client may read."""
        target = f"/v2/{NAME}/manifests/{tag}"
        until(lambda: self.ask(client, target)[0] == 200)
        digest = self.ask(client, target)[1]["docker-content-digest"]
        blob = str(self.store.resolve(f"{NAME}:{tag}").layers[0].digest)
        self.versions[name] = Version(tag, commit, digest, blob)

    def sees(self, client: str, name: str, way: str) -> bool:
        """Return whether a client sees a version."""
        one = self.versions[name]
        revision = "main" if one.tag == "latest" else one.tag
        places = {
            "name": f"/{NAME}/resolve/{revision}/model.safetensors",
            "commit": f"/{NAME}/resolve/{one.commit}/model.safetensors",
            "manifest": f"/v2/{NAME}/manifests/{one.tag}",
            "digest": f"/v2/{NAME}/blobs/{one.blob}",
            "tags": f"/v2/{NAME}/tags/list",
            "refs": f"/api/models/{NAME}/refs",
            "referrers": f"/v2/{NAME}/referrers/{one.manifest}",
            "copied": f"/{COPY}/resolve/main/model.safetensors",
            "copied commit": f"/{COPY}/resolve/{one.commit}/model.safetensors",
            "models": "/api/models",
            "catalog": "/v2/_catalog",
        }
        found: list[tuple[int, dict[str, str], bytes]] = []

        def is_prepared() -> bool:
            found.append(self.ask(client, places[way]))
            return found[-1][0] != 503

        until(is_prepared)
        status, _, data = found[-1]
        shown = {"tags": one.tag, "refs": revision, "models": COPY, "catalog": COPY}
        if way == "referrers":
            return status == 200 and b'"digest"' in data
        return status == 200 and shown.get(way, "").encode() in data


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def made(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    weight = random.integers(0, 9, (256, 256)).astype(np.float32)  # compressible
    return write_folder(folder, {"weight": weight})


def fetched(world: World, client: str) -> None:
    """Fetch all versions of the upstream."""
    repo = world.hub.repos[NAME]
    world.hub.branch(NAME, "v1", made(world.folder / "v1", 1))
    world.fetch("former", "main", client)
    repo.branches["former"] = Repo(repo.folder, repo.commit)  # it still has the commit, as the Hub
    repo.folder, repo.commit = made(world.folder / "main", 2), "1" * 40
    target = f"/{NAME}/resolve/main/model.safetensors"
    until(lambda: world.ask(client, target)[1].get("x-repo-commit") == repo.commit)
    until(
        lambda: world.store.resolve(NAME).layers[0].digest.hex not in world.versions["former"].blob
    )
    world.fetch("main", "main", client)
    world.fetch("v1", "v1", client)


def restrict(world: World) -> None:
    world.hub.repos[NAME].token, world.hub.repos[NAME].gated = "hf_right", True


def refuse(world: World) -> None:
    """Restrict the repository, and let the server hear of that."""
    restrict(world)
    until(lambda: world.ask("nobody", f"/{NAME}/resolve/main/config.json")[0] == 401)


def leave(world: World) -> None:
    """Let the upstream go away, and what it has said become old."""
    repo = world.hub.repos[NAME]
    for one in (repo, *repo.branches.values()):
        one.status = 502
    target = f"/{NAME}/resolve/v2/config.json"
    until(lambda: world.ask("reader", target)[0] == 502)


def public(world: World) -> None:
    fetched(world, "nobody")


def restricted(world: World) -> None:
    restrict(world)
    fetched(world, "reader")


def public_no_more(world: World) -> None:
    public(world)
    refuse(world)


def public_again(world: World) -> None:
    restricted(world)
    world.hub.repos[NAME].token = ""
    until(lambda: world.ask("nobody", f"/{NAME}/resolve/main/config.json")[0] == 200)


def public_and_away(world: World) -> None:
    public(world)
    leave(world)


def restricted_and_away(world: World) -> None:
    restricted(world)
    leave(world)
    # A reader was let in a moment ago, and that holds for as long as answers do.
    until(lambda: world.ask("reader", f"/{NAME}/resolve/main/config.json")[0] == 502)


def never_asked(world: World) -> None:
    world.hub.repos[NAME].status = 502
    world.fetch("theirs", "main", "nobody")


def asked_later(world: World) -> None:
    """The upstream was away first, and a peer was asked; then it is back, and restricts the repository."""
    never_asked(world)
    world.hub.repos[NAME].status = 0
    restrict(world)
    world.hub.branch(NAME, "v1", made(world.folder / "v1", 1))
    world.fetch("v1", "v1", "reader")


def named_later(world: World) -> None:
    """The upstream was away first, and a peer was asked; then it names the peer's commit, with other files."""
    never_asked(world)
    gone = world.versions["gone"] = world.versions.pop("theirs")
    world.hub.repos[NAME].status, world.hub.repos[NAME].commit = 0, gone.commit
    main = f"/{NAME}/resolve/main/model.safetensors"
    data = (world.hub.repos[NAME].folder / "model.safetensors").read_bytes()
    until(lambda: world.ask("nobody", main)[2] == data)
    until(lambda: world.server.metric("arriving_models") == 0)
    world.fetch("main", "main", "nobody")


NOBODY: set[str] = set()
READER = {"reader"}
EVERYONE = set(CLIENTS) - {"limited"}
STATES: dict[Callable[[World], None], dict[str, set[str]]] = {
    # Who sees which version, in every way
    public: dict.fromkeys(FETCHED, EVERYONE),
    restricted: dict.fromkeys(FETCHED, READER),
    public_no_more: dict.fromkeys(FETCHED, READER),
    public_again: dict.fromkeys(FETCHED, EVERYONE),
    public_and_away: dict.fromkeys(FETCHED, EVERYONE),
    restricted_and_away: dict.fromkeys(FETCHED, NOBODY),
    never_asked: {"theirs": EVERYONE},
    asked_later: {"theirs": READER, "v1": READER},
    named_later: {"gone": NOBODY, "main": EVERYONE},
}


@pytest.fixture(scope="module", params=STATES, ids=lambda state: state.__name__)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    store, other = LocalStore(folder / "store"), LocalStore(folder / "other")
    with ExitStack() as stack:
        hub = stack.enter_context(HubServer())
        hub.add(NAME, made(folder / "former", 3))
        create(made(folder / "theirs", 4), NAME, store=other)
        create(made(folder / "mine", 5), f"{NAME}:mine", store=store)

        def serve(name: str, store: LocalStore, *options: str, **limits: Any) -> Serving:
            (folder / f"log-{name}").mkdir()
            return stack.enter_context(serving(store, folder / f"log-{name}", *options, **limits))

        peer = serve("peer", other)
        options = ("--upstream", hub.url, "--peers", peer.url, "--fresh=0")
        server = serve("server", store, *options, limits=LIMITS)
        tokens = folder / "tokens"
        tokens.write_text("name=few models=other/*,own/model a-limited-token\n")
        limited = serve("limited", store, f"--token-file={tokens}")
        made_world = World(hub, store, server, serve("plain", store), limited, folder)
        made_world.note("mine", "mine", "", "plain")
        request.param(made_world)
        copy_model(NAME, COPY, store=store)
        made_world.versions["copy"] = replace(
            made_world.versions.get("main") or made_world.versions["theirs"], tag="latest"
        )
        tags = {one.tag for one in made_world.versions.values()}
        # Each has a referrer: its compressed form. The server has leased the blobs.
        freeze_models([f"{NAME}:{tag}" for tag in sorted(tags)], store=store, keep_hot=True)
        yield made_world


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_sees_what_the_table_says(
    world: World, client: str, request: pytest.FixtureRequest
) -> None:
    readers = STATES[request.node.callspec.params["world"]] | {"mine": EVERYONE}
    readers["copy"] = readers["main" if "main" in readers else "theirs"]
    assert readers.keys() == world.versions.keys()
    for name, may_read in readers.items():
        for way in WAYS[name]:
            if (client, name, way) == ("plain", "former", "digest"):
                continue  # only a server that has sent a version before knows its digests
            is_of_all = way in LISTS and client != "limited"
            is_seen = ("nobody" if is_of_all else client) in may_read
            if "v1" in readers and "main" not in readers and (name, way) in OF_PEERS:
                is_seen = False  # the upstream is there again, and has no such commit
            assert world.sees(client, name, way) is is_seen, (name, way)
