"""Blobs from peers: servers on loopback, of which some are gone, slow, or send wrong bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import RemoteError, UsageError
from blobstore.http.retry import Patience
from blobstore.manifests.reference import Reference
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create, import_source
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.transfer.pull import pull_model
from blobstore.planning.import_options import ImportOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.store import RemoteSource
from blobstore.serve import peers
from blobstore.serve.messages import BlobPart, Content
from blobstore.serve.model_files import commit_of, model_files
from blobstore.serve.peers import Peer, PeerFiles, Peers
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support import frozen
from tests.support.altered_server import altered, is_marked
from tests.support.hub_server import HubServer
from tests.support.models import Arrays, add_blobs, write_folder
from tests.support.ports import free_port
from tests.support.raw_server import Answer, Received
from tests.support.serve import read_parts
from tests.support.serve_process import SECONDS, Serving, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

COUNT = 1 << 19
SIZE = 8 << 20
"""More bytes than the files of the models here have."""


NAME = "org/model"


class Wanted(NamedTuple):
    reference: Reference
    commit: str


class Log(list[dict[str, Any]]):
    """What was noted."""

    def __call__(self, **fields: Any) -> None:
        self.append(fields)

    def errors_of(self, peer: Peer) -> str:
        return " ".join(str(one["error"]) for one in self if one.get("peer") == peer.name)


@pytest.fixture
def one(store: LocalStore) -> LocalStore:
    """A store that has the model ``org/one``."""
    frozen.put(store, "org/one", {"a": 1, "b": 2, "c": 3}, COUNT)
    return store


@pytest.fixture
def other(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "other")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def dead() -> Peer:
    """A peer at a port that nobody listens at."""
    return Peer.parse(f"http://127.0.0.1:{free_port()}")


def wanted(store: LocalStore, name: str = "org/one") -> Wanted:
    commit = commit_of(Digest.of(store.read_manifest(name)))
    return Wanted(Reference.parse(name), commit)


def copy_of(store: LocalStore, folder: Path, name: str) -> LocalStore:
    """Return another store with the model ``org/one``."""
    other = LocalStore(folder / name)
    frozen.put(other, "org/one", {"a": 1, "b": 2, "c": 3}, COUNT)
    assert other.read_manifest("org/one") == store.read_manifest("org/one")
    return other


def fetched(one: LocalStore, other: LocalStore, *several: Peer, log: Log) -> Peers:
    """Check that peers give the files of ``org/one``."""
    found = Peers(other, several, log)
    expected = model_files(one, one.resolve("org/one"))
    with found.files(wanted(one), SIZE) as answers:
        assert bytes_of(other, next(answers).files) == bytes_of(one, expected)
    return found


def bytes_of(store: LocalStore, files: Mapping[str, Content]) -> dict[str, bytes]:
    return {name: read_parts(store, content.parts) for name, content in files.items()}


@pytest.mark.parametrize(
    "url",
    ["node:8080", "oci://node", "ftp://node", "http://node/x/y", "http://", "http://u:p@node"],
)
def test_other_text_than_the_url_of_a_peer_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of a peer"):
        Peer.parse(url)


def test_a_model_comes_from_a_peer_blob_by_blob(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    frozen.put(other, "org/base", {"a": 1}, COUNT)
    with serving(one, tmp_path) as server:
        found = fetched(one, other, Peer.parse(server.url), log=log)
        sent = server.metric("sent_bytes_total")
    size = sum(layer.size for layer in frozen.layers(one, "org/one").values())
    assert found.fetched < 0.7 * size, "a blob that is here was fetched"
    assert sent < 1.01 * found.fetched + 20_000
    assert not log


def test_blobs_of_a_model_that_was_imported_need_no_collection(
    one: LocalStore,
    other: LocalStore,
    tmp_path: Path,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[object] = []
    monkeypatch.setattr(peers, "remove_blobs", lambda _, blobs: removed.append(blobs))
    with serving(one, tmp_path) as server:
        found = Peers(other, [Peer.parse(server.url)], log)
        with found.files(wanted(one), SIZE) as answers:
            bytes_of(other, next(answers).files)
            copy_of(one, tmp_path, "other")  # the store ``other``
    assert found.fetched > 0
    assert removed == [], "all manifests would be looked at for each model"


def test_a_frozen_model_moves_as_deltas(
    store: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    frozen.put(store, "org/base", {"a": 1, "b": 2}, COUNT)
    tuned = {
        name: frozen.layer(name, frozen.tuned(seed + 7, of=seed, count=COUNT))
        for name, seed in (("a", 1), ("b", 2))
    }
    add_blobs(store, "org/tuned", tuned)
    freeze_models(["org/base", "org/tuned"], store=store)
    layers = frozen.layers(store, "org/tuned").values()
    cold_size = sum(store.open_cold(*layer.id).stored for layer in layers)
    with serving(store, tmp_path) as server:
        pull_model(f"{server.url}/org/base", "org/base", store=other)
        before = server.metric("sent_bytes_total")
        found = Peers(other, [Peer.parse(server.url)], log)
        with found.files(wanted(store, "org/tuned"), SIZE) as answers:
            files = bytes_of(other, next(answers).files)
        assert server.metric("sent_bytes_total") - before < 1.05 * cold_size
        another = LocalStore(tmp_path / "another")
        pull_model(f"{server.url}/org/base", "org/base", store=another)
        before = server.metric("sent_bytes_total")
        hidden = Peers(another, [Peer.parse(server.url)], log)
        with hidden.files(wanted(store, "org/tuned"), SIZE, shared=lambda _: ()) as answers:
            assert bytes_of(another, next(answers).files) == files
        assert server.metric("sent_bytes_total") - before > 2 * cold_size, "it shows what is here"
    assert files == bytes_of(store, model_files(store, store.resolve("org/tuned")))


def test_a_dead_peer_is_skipped_for_a_while(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log, dead: Peer
) -> None:
    with serving(one, tmp_path) as server:
        found = fetched(one, other, dead, Peer.parse(server.url), log=log)
        assert "cannot connect" in log.errors_of(dead)
        log.clear()
        with found.files(wanted(one), SIZE) as answers:
            assert next(answers)
        assert not log, "a dead peer was asked again"


@pytest.mark.parametrize("how", ["bytes", "size"])
def test_a_lying_peer_is_named_and_the_next_is_asked(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log, how: str
) -> None:
    def lie(request: Received, answer: bytes) -> bytes:
        assert is_marked(request)
        if "/blobs/" not in request.path or len(answer) < COUNT:
            return answer
        if how == "bytes":
            return answer[:-9] + bytes(9)
        return answer.replace(b"content_length", b"x").replace(
            b"content-length: ", b"content-length: 1"
        )

    with altered(one, lie) as liar, serving(copy_of(one, tmp_path, "b"), tmp_path) as server:
        lying = Peer.parse(f"http://{liar.host}")
        fetched(one, other, lying, Peer.parse(server.url), log=log)
    assert log.errors_of(lying)


def test_two_liars_do_not_keep_the_third_from_being_asked(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    def lie(request: Received, answer: bytes) -> bytes:
        is_large = "/blobs/" in request.path and len(answer) > COUNT
        return answer[:-9] + bytes(9) if is_large else answer

    with (
        altered(one, lie) as first,
        altered(one, lie) as second,
        serving(copy_of(one, tmp_path, "b"), tmp_path) as server,
    ):
        several = [Peer.parse(f"http://{liar.host}") for liar in (first, second)]
        fetched(one, other, *several, Peer.parse(server.url), log=log)


class ImpatientPeer(Peer):
    """A peer that is not waited for long, as others must be on a busy machine."""

    def client(self) -> RegistryClient:
        client = super().client()
        # Less than a registry is waited for.
        assert client._transport.patience.stall < Patience().stall / 2
        client._transport.patience = Patience(stall=0.5, attempts=1)
        return client


def test_a_slow_peer_is_left(one: LocalStore, other: LocalStore, tmp_path: Path, log: Log) -> None:
    release = threading.Event()

    def block(request: Received, answer: bytes) -> Answer:
        if "/blobs/" not in request.path or len(answer) < COUNT:
            return answer

        def pieces() -> Iterator[bytes]:
            yield answer[:1000]
            release.wait(60)

        return pieces()

    with altered(one, block) as blocked, serving(copy_of(one, tmp_path, "b"), tmp_path) as server:
        slow = ImpatientPeer.parse(f"http://{blocked.host}")
        try:
            fetched(one, other, slow, Peer.parse(server.url), log=log)
        finally:
            release.set()
    assert log.errors_of(slow)


def test_a_peer_that_is_killed_in_the_middle_is_replaced_by_the_next(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    second = copy_of(one, tmp_path, "copy")
    with (
        serving(one, tmp_path / "a") as first,
        serving(second, tmp_path / "b") as last,
    ):
        victim, rest = Peer.parse(first.url), Peer.parse(last.url)
        found = Peers(other, [victim, rest], log)
        with found.files(wanted(one), SIZE) as answers:
            # Both have said that they have the model; then one of them is gone.
            first.process.kill()
            first.process.wait()
            files = bytes_of(other, next(answers).files)
    assert files == bytes_of(one, model_files(one, one.resolve("org/one")))
    assert log.errors_of(victim)


def test_what_a_peer_has_not_sent_of_a_blob_when_it_is_killed_comes_from_the_next(
    tmp_path: Path, other: LocalStore, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A blob of more bytes than the buffers of a connection hold.
    stores = [LocalStore(tmp_path / name / "store") for name in "ab"]
    for store in stores:
        frozen.put(store, "org/one", {"a": 1}, 24 << 20)
    size = frozen.layers(stores[0], "org/one")["a"].size
    real = RemoteSource.read
    killed: list[Serving] = []

    def read(
        self: RemoteSource, digest: Digest, blob_size: int, begin: int, end: int
    ) -> Generator[bytes, None, None]:
        with contextlib.closing(real(self, digest, blob_size, begin, end)) as pieces:
            for piece in pieces:
                yield piece
                begin += len(piece)
                if blob_size == size and begin > size // 4 and not killed:
                    killed.append(servers.pop(self.address.host))
                    killed[0].process.kill()
                    killed[0].process.wait()

    monkeypatch.setattr(RemoteSource, "read", read)
    with (
        serving(stores[0], tmp_path / "a") as first,
        serving(stores[1], tmp_path / "b") as second,
    ):
        servers = {server.host: server for server in (first, second)}
        found = Peers(other, [Peer.parse(first.url), Peer.parse(second.url)], log)
        with found.files(wanted(stores[0]), size) as answers:
            files = bytes_of(other, next(answers).files)
        (survivor,) = servers.values()
        sent = survivor.metric("sent_bytes_total")
    assert files == bytes_of(stores[0], model_files(stores[0], stores[0].resolve("org/one")))
    assert log.errors_of(Peer.parse(killed[0].url))
    assert 0 < sent < 0.8 * size, "it was not killed in the middle"
    assert found.fetched < size + (1 << 16), "bytes came twice"


def test_a_peer_that_collects_garbage_in_between_sends_what_it_has_begun(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    with serving(one, tmp_path) as server:
        found = Peers(other, [Peer.parse(server.url)], log)
        expected = bytes_of(one, model_files(one, one.resolve("org/one")))
        with found.files(wanted(one), SIZE) as answers:
            frozen.put(one, "org/one", {"a": 4}, COUNT)
            collect_garbage(store=one, older_than=0, force=True)
            assert bytes_of(other, next(answers).files) == expected


def test_another_version_is_not_fetched(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    with serving(one, tmp_path) as server:
        found = Peers(other, [Peer.parse(server.url)], log)
        with found.files(Wanted(Reference.parse("org/one"), "0" * 40), SIZE) as answers:
            assert list(answers) == []
        for name in ("org/none", "org/a___b"):  # no registry allows the latter
            with found.files(Wanted(Reference.parse(name), "0" * 40), SIZE) as answers:
                assert list(answers) == []
        assert found.fetched == 0


def test_a_model_of_far_more_bytes_than_its_files_is_not_fetched(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SPARE", 0)
    with serving(one, tmp_path) as server:
        peer = Peer.parse(server.url)
        with Peers(other, [peer], log).files(wanted(one), COUNT) as answers:
            assert list(answers) == []
    assert log.errors_of(peer) == "too large"


def test_blobs_stay_until_they_were_used(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    layer = frozen.layers(one, "org/one")["a"]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(one, tmp_path))
        found = Peers(other, [Peer.parse(server.url)], log)
        answers = stack.enter_context(found.files(wanted(one), SIZE))
        assert next(answers)
        collect_garbage(store=other, older_than=0, force=True)
        assert other.has(layer.digest)
    collect_garbage(store=other, older_than=0, force=True)
    assert not other.has(layer.digest)


def test_all_versions_of_peers_together_have_the_bytes_of_one(
    tmp_path: Path, other: LocalStore, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_SPARE", 1 << 18)
    commit = "c" * 40
    stores = []
    for number in range(2):
        weights = {name: data + number for name, data in tensors().items()}
        source = write_folder(tmp_path / f"source{number}", weights)
        (tmp_path / f"log{number}").mkdir()
        stores.append(tmp_path / f"peer{number}")
        forge(stores[-1], source, commit)
    size = size_of(tmp_path / "source0")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(LocalStore(root), tmp_path / f"log{number}"))
            for number, root in enumerate(stores)
        ]
        found = Peers(other, [Peer.parse(server.url) for server in servers], log)
        with found.files(Wanted(Reference.parse(NAME), commit), size) as answers:
            (answer,) = answers
            assert all(other.has(digest) for digest in blobs_of(answer))
    assert [one["error"] for one in log] == ["too large"]
    assert found.fetched < 1.1 * size + (1 << 18)


def blobs_of(answer: PeerFiles) -> set[Digest]:
    parts = [part for content in answer.files.values() for part in content.parts]
    return {part.digest for part in parts if isinstance(part, BlobPart)}


def test_blobs_of_a_model_that_did_not_come_are_removed(
    one: LocalStore, other: LocalStore, tmp_path: Path, log: Log
) -> None:
    with serving(one, tmp_path) as server:
        found = Peers(other, [Peer.parse(server.url)], log)
        with (
            pytest.raises(RemoteError, match="lost"),
            found.files(wanted(one), SIZE) as answers,
        ):
            blobs = blobs_of(next(answers))
            raise RemoteError("the upstream was lost")
        assert blobs
        assert not any(other.has(digest) for digest in blobs)
        with found.files(wanted(one), SIZE) as answers:
            assert blobs_of(next(answers)) == blobs
            assert all(other.has(digest) for digest in blobs)
        assert not any(other.has(digest) for digest in blobs)  # no model has got them


# What `serve --peers` makes of them.


def tensors() -> Arrays:
    random = np.random.default_rng(3)
    return {name: random.standard_normal((256, 512), dtype=np.float32) for name in "abcdef"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", tensors(), shards=2, files={"README.md": b"# A\n"})


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, folder)
        yield server


@contextlib.contextmanager
def node(folder: Path, name: str, *options: str) -> Iterator[Serving]:
    """Run a server with a store of its own."""
    (folder / name).mkdir()
    store = LocalStore(folder / name / "store")
    # What fails is asked for again soon, not after some seconds.
    limits = {"pull_through._REFUSED_SECONDS": 0.5}
    with serving(store, folder / name, *options, limits=limits) as server:
        yield server


def weights_of(server: Serving, folder: Path, revision: str = "main") -> None:
    """Check that a server has the files of a folder, as a client gets them that asks again if it is asked to."""
    for path in sorted(folder.iterdir()):
        deadline = time.monotonic() + SECONDS
        while True:
            status, _, data = server.request(f"/{NAME}/resolve/{revision}/{path.name}")
            if status != 503 or time.monotonic() > deadline:
                break
        assert (status, data == path.read_bytes()) == (200, True), (path.name, data[:200])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_node_asks_its_peers_before_the_upstream(
    hub: HubServer, folder: Path, tmp_path: Path, dead: Peer
) -> None:
    with node(tmp_path, "a", "--upstream", hub.url) as first:
        weights_of(first, folder)
        first.wait_for_log("written")
        before = hub.sent
        peers_of = f"--peers={dead.name},{first.url}"
        with node(tmp_path, "b", "--upstream", hub.url, peers_of) as second:
            weights_of(second, folder)
            second.wait_for_log("written")
            assert second.metric("peer_bytes_total") >= size_of(folder)
            assert hub.sent - before < 0.02 * size_of(folder), "weights came from the upstream"
    assert not verify_models(NAME, store=tmp_path / "b" / "store").faults
    stores = [LocalStore(tmp_path / name / "store") for name in "ab"]
    assert stores[0].read_manifest(NAME) == stores[1].read_manifest(NAME)


def test_files_that_peers_make_up_come_from_the_upstream_and_no_client_gets_them(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    with node(tmp_path, "a", "--upstream", hub.url) as first:
        weights_of(first, folder)
        first.wait_for_log("written")
    # The peer has other weights, and says that they are of this commit.
    store = LocalStore(tmp_path / "a" / "store")
    commit = read_commit(store)
    other = write_folder(
        tmp_path / "forged",
        {name: data + 1 for name, data in tensors().items()},
        shards=2,
        files={"README.md": b"# A\n"},
    )
    forge(tmp_path / "liar", other, commit)
    with (
        serving(LocalStore(tmp_path / "liar"), tmp_path) as liar,
        node(tmp_path, "b", "--upstream", hub.url, f"--peers={liar.url}") as second,
    ):
        weights_of(second, folder)
        line = second.wait_for_log("error", "other bytes of file")
        assert liar.url in str(line), "the log does not name the peer"
        assert second.metric("peer_bytes_total") >= size_of(folder)


def read_commit(store: LocalStore) -> str:
    record = read_source_record(store, store.resolve(NAME))
    assert record is not None
    return record.commit


def forge(root: Path, folder: Path, commit: str) -> None:
    """Make a store with a model whose record says that it is a commit that it is not."""
    source: Any = open_source(folder)
    source.repository, source.commit = NAME, commit
    with contextlib.closing(source):
        import_source(source, replace_any(NAME), LocalStore(root), ImportOptions())


def test_peers_alone_are_enough(folder: Path, tmp_path: Path, dead: Peer) -> None:
    own = LocalStore(tmp_path / "own")
    create(folder, NAME, store=own)
    with serving(own, tmp_path) as first:
        peers_of = f"--peers={dead.name},{first.url}"
        with node(tmp_path, "b", peers_of) as second:
            weights_of(second, folder)
            second.wait_for_log("written")
            # What was fetched is the node's own from now on, and given to others.
            with node(tmp_path, "c", f"--peers={second.url}") as third:
                first.stop()
                weights_of(third, folder)
            status, _, _ = second.request("/org/none/resolve/main/README.md")
            assert status == 404
    assert not verify_models(NAME, store=tmp_path / "b" / "store").faults


def test_peers_that_name_each_other_do_not_wait_for_each_other(
    folder: Path, tmp_path: Path
) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with (
        node(tmp_path, "a", f"--port={ports[0]}", f"--peers={urls[1]}") as first,
        node(tmp_path, "b", f"--port={ports[1]}", f"--peers={urls[0]}") as second,
    ):
        for server in (first, second):
            status, headers, _ = server.request("/org/model/resolve/main/README.md")
            assert (status, headers["x-error-code"]) == (404, "RepoNotFound")
        create(folder, NAME, store=tmp_path / "a" / "store")
        time_out = time.monotonic() + SECONDS
        while second.request(f"/{NAME}/resolve/main/README.md")[0] != 200:
            assert time.monotonic() < time_out
        weights_of(second, folder)


def test_a_server_behind_a_server_moves_deltas(tmp_path: Path) -> None:
    first = LocalStore(tmp_path / "first")
    random = np.random.default_rng(5)
    base = {name: random.standard_normal((512, 1024), dtype=np.float32) * 0.02 for name in "abc"}
    base = {name: data.astype(ml_dtypes.bfloat16) for name, data in base.items()}
    tuned = {
        name: (
            data.astype(np.float32)
            + random.standard_normal(data.shape, dtype=np.float32) * np.float32(2e-5)
        ).astype(ml_dtypes.bfloat16)
        for name, data in base.items()
    }
    folders = {
        "base": write_folder(tmp_path / "base", base),
        "model": write_folder(tmp_path / "model", tuned),
    }
    for name, source in folders.items():
        create(source, f"org/{name}", store=first)
    freeze_models(["org/base", "org/model"], store=first)
    blobs = [blob for blob in first.resolve(NAME).blobs if first.has_cold(blob.digest)]
    cold_size = sum(first.open_cold(*blob.id).stored for blob in blobs)
    whole = sum(blob.size for blob in first.resolve(NAME).blobs)
    assert cold_size < 0.5 * whole
    with serving(first, tmp_path) as upstream, node(tmp_path, "b", "--upstream", upstream.url) as b:
        for path in folders["base"].iterdir():
            while b.request(f"/org/base/resolve/main/{path.name}")[0] == 503:
                pass
        b.wait_for_log("written")
        before = upstream.metric("sent_bytes_total")
        weights_of(b, folders["model"])
        moved = upstream.metric("sent_bytes_total") - before
    assert moved < 1.05 * cold_size
