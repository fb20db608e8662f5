"""A name that follows tags, names and revisions of real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.interrupts import Stopped
from blobstore.errors import BlobstoreError, ModelNotFound, RemoteError, UsageError
from blobstore.objects.address import StoreAddress
from blobstore.operations.follow.follow import Followed, _sleep
from blobstore.store.local import LocalStore
from blobstore.store.names import Names
from tests.support.registry import Server, running_registry
from tests.support.serve_process import serving
from tests.support.training import Weights, first_weights, steps

STEPS = 5


class Trainer:
    """A store with a model that is trained, and a place where each step is published."""

    def __init__(self, folder: Path, place: str = "") -> None:
        """Publish the first model at ``place``, if that is an address."""
        self.store = LocalStore(folder / "trainer")
        self.size = sum(array.nbytes for array in first_weights().values())
        self._place = place
        self._count = 0
        self._steps = steps(first_weights(), STEPS)
        self._publish(first_weights())

    def _publish(self, weights: Weights) -> Digest:
        """Publish a version, and return the digest of its manifest."""
        store = self.store
        created = blobstore.save(weights, "policy", store=store)
        blobstore.copy("policy", f"policy:{self._count}", store=store)
        if self._place:
            base = f"policy:{self._count - 1}" if self._count else None
            blobstore.push("policy", self._place, store=store, cold=True, base=base)
        self._count += 1
        return created.digest

    def step(self) -> Digest:
        return self._publish(next(self._steps))


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def replica(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "replica")


def digest_of(store: LocalStore, name: str = "policy") -> Digest:
    return Digest.of(store.read_manifest(name))


def take_steps(trainer: Trainer, found: Iterator[Followed]) -> list[Followed]:
    """Return the versions that a replica gets of the first model and of each step."""
    got = [next(found)]
    for _ in range(STEPS):
        digest = trainer.step()
        got.append(next(found))
        assert (got[-1].digest, got[-1].previous) == (digest, got[-2].digest)
    return got


def check_deltas(trainer: Trainer, got: list[Followed]) -> None:
    """Check that all but the first version came as deltas: 0.5 % of the weights change in a step."""
    assert got[0].previous is None
    for followed in got[1:]:
        assert 0 < followed.bytes_fetched < 0.015 * trainer.size, followed


def test_each_step_of_a_training_comes_from_a_registry_as_a_delta(
    tmp_path: Path, registry: Server, replica: LocalStore
) -> None:
    place = f"oci://{registry.host}/tests/policy:run"
    trainer = Trainer(tmp_path, place)
    found = blobstore.follow("policy", place, store=replica, interval=0.01)
    check_deltas(trainer, take_steps(trainer, found))
    assert not blobstore.verify("policy", store=replica).faults


def test_each_step_of_a_training_comes_from_object_storage_as_a_delta(
    tmp_path: Path, replica: LocalStore, object_address: StoreAddress
) -> None:
    trainer = Trainer(tmp_path, str(object_address))
    found = blobstore.follow("policy", f"{object_address}/policy", store=replica, interval=0.01)
    check_deltas(trainer, take_steps(trainer, found))


def test_a_name_follows_a_folder_as_object_storage(tmp_path: Path, replica: LocalStore) -> None:
    place = f"file://{tmp_path}/shared"
    trainer = Trainer(tmp_path, place)
    found = blobstore.follow("policy", f"{place}/policy", store=replica, interval=0.01)
    check_deltas(trainer, take_steps(trainer, found))


def test_a_name_follows_the_same_name_of_another_store(tmp_path: Path, replica: LocalStore) -> None:
    trainer = Trainer(tmp_path)
    found = blobstore.follow("policy", str(trainer.store.root), store=replica, interval=0.01)
    got = take_steps(trainer, found)
    assert all(followed.version == str(followed.digest) for followed in got)


def test_a_replica_hears_of_a_version_from_a_server_that_waits(
    tmp_path: Path, replica: LocalStore
) -> None:
    trainer = Trainer(tmp_path)
    with serving(trainer.store, tmp_path) as server:
        # Only a server that waits is asked again at once, and without that this takes hours.
        found = blobstore.follow("policy", f"{server.url}/policy", store=replica, interval=3600)
        first = next(found)
        published: list[Digest] = []
        thread = threading.Thread(target=lambda: published.append(trainer.step()))
        thread.start()
        second = next(found)
        thread.join()
    assert (second.digest, second.previous) == (published[0], first.digest)


def test_replicas_follow_one_another_with_deltas(tmp_path: Path, replica: LocalStore) -> None:
    """A server gives the compressed forms of models that are frozen, and a replica is a server too."""
    trainer = Trainer(tmp_path)
    last = LocalStore(tmp_path / "last")
    (tmp_path / "middle").mkdir()
    replica.root.mkdir()
    with (
        serving(trainer.store, tmp_path) as server,
        serving(replica, tmp_path / "middle") as second,
    ):
        sent = 0.0
        for number in range(STEPS):
            if number:
                trainer.step()
                names = ["policy", f"policy:{number}"]
                blobstore.freeze(names, store=trainer.store)
            for url, store in ((server.url, replica), (second.url, last)):
                (got,) = blobstore.follow("policy", f"{url}/policy", store=store, once=True)
                assert got.digest == digest_of(trainer.store)
            if number:
                moved = server.metric("sent_bytes_total") - sent
                assert moved < 0.02 * trainer.size
            sent = server.metric("sent_bytes_total")


def test_nothing_is_fetched_again_after_a_restart(
    tmp_path: Path, registry: Server, replica: LocalStore
) -> None:
    place = f"oci://{registry.host}/tests/again"
    trainer = Trainer(tmp_path, place)
    assert len(list(blobstore.follow("policy", place, store=replica, once=True))) == 1
    assert list(blobstore.follow("policy", place, store=replica, once=True)) == []
    blobstore.save({"a": first_weights(1)["model.norm.weight"]}, "policy", store=replica)
    (back,) = blobstore.follow("policy", place, store=replica, once=True)
    assert (back.digest, back.bytes_fetched) == (digest_of(trainer.store), 0)


def test_a_name_that_another_process_has_changed_gets_the_version_again(
    tmp_path: Path, replica: LocalStore
) -> None:
    trainer, stop = Trainer(tmp_path), threading.Event()
    found = blobstore.follow(
        "policy", str(trainer.store.root), store=replica, interval=0.01, stop=stop
    )
    first = next(found)
    blobstore.save({"a": first_weights(1)["model.norm.weight"]}, "policy", store=replica)
    timer = threading.Timer(60, stop.set)  # it would wait for another version
    timer.daemon = True
    timer.start()
    assert next(found).digest == first.digest == digest_of(replica)
    timer.cancel()


def test_the_last_versions_keep_tags_of_their_own(tmp_path: Path, replica: LocalStore) -> None:
    trainer = Trainer(tmp_path)
    blobstore.save(first_weights(1), "policy:latest-mine", store=replica)
    found = blobstore.follow(
        "policy", str(trainer.store.root), store=replica, interval=0.01, keep_last=2
    )
    got = take_steps(trainer, found)
    names = {str(reference) for reference in replica.references()}
    kept = {f"policy:latest-{followed.digest.short}" for followed in got[-2:]}
    assert names == {"policy:latest", "policy:latest-mine", *kept}
    assert {str(followed.kept) for followed in got[-2:]} == kept
    assert digest_of(replica, f"policy:latest-{got[-2].digest.short}") == got[-2].digest


def test_a_version_of_a_registry_keeps_a_tag_with_the_id_of_the_model(
    tmp_path: Path, registry: Server, replica: LocalStore
) -> None:
    place = f"oci://{registry.host}/tests/kept"
    Trainer(tmp_path, place)

    (got,) = blobstore.follow("policy", place, store=replica, keep_last=1, once=True)

    assert got.version != str(got.digest)
    assert str(got.kept) == f"policy:latest-{got.digest.short}"


def test_errors_are_reported_and_the_place_is_asked_again(
    tmp_path: Path, replica: LocalStore
) -> None:
    other = LocalStore(tmp_path / "trainer")
    other.root.mkdir()
    errors: list[tuple[BlobstoreError, float]] = []
    stop = threading.Event()

    def on_error(error: BlobstoreError, seconds: float) -> None:
        errors.append((error, seconds))
        Trainer(tmp_path)

    found = blobstore.follow(
        "policy", str(other.root), store=replica, interval=0.01, on_error=on_error, stop=stop
    )
    assert next(found).digest == digest_of(other)
    ((error, seconds),) = errors
    assert isinstance(error, ModelNotFound)
    assert 0 < seconds <= 1
    stop.set()
    assert list(found) == []


def test_a_server_that_is_gone_is_an_error_of_one_question(replica: LocalStore) -> None:
    errors: list[BlobstoreError] = []
    stop = threading.Event()

    def on_error(error: BlobstoreError, _: float) -> None:
        errors.append(error)
        stop.set()

    address = "file:///no/such/folder/policy"
    assert (
        list(blobstore.follow("policy", address, store=replica, on_error=on_error, stop=stop)) == []
    )
    assert isinstance(errors[0], ModelNotFound | RemoteError)
    with pytest.raises(type(errors[0])):
        list(blobstore.follow("policy", address, store=replica, once=True))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("127.0.0.1:1/a", {"interval": 0}),
        ("127.0.0.1:1/a", {"interval": float("nan")}),
        ("127.0.0.1:1/a", {"keep_last": 0}),
        (f"127.0.0.1:1/a@sha256:{'0' * 64}", {}),
        ("hf://", {}),
        ("no place at all", {}),
    ],
)
def test_arguments_are_checked_at_once(
    replica: LocalStore, source: str, options: dict[str, float]
) -> None:
    with pytest.raises(UsageError):
        blobstore.follow("policy", source, store=replica, **options)  # type: ignore[arg-type]


def test_the_former_version_is_there_until_the_new_one_is_complete(
    tmp_path: Path, replica: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path)
    found = blobstore.follow("policy", str(trainer.store.root), store=replica, interval=0.01)
    first = next(found)
    seen: list[Digest] = []
    install = Names.install

    def installed(names: Names, *rest: object, **options: object) -> list[bytes | None]:
        if names is replica.names:
            seen.append(digest_of(replica))
        return install(names, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Names, "install", installed)
    trainer.step()
    next(found)
    assert seen == [first.digest]


@pytest.mark.usefixtures("requested")
def test_a_wait_for_the_next_version_ends_when_the_process_is_asked_to_stop() -> None:
    with pytest.raises(Stopped):
        _sleep(0.1, threading.Event())
