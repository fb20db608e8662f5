from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.rate_limit import RateLimiter
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.manifests.descriptor import Descriptor
from blobstore.store import verified_cache as verified
from blobstore.store.local import LocalStore
from blobstore.store.verified_cache import VerifiedBlobs
from blobstore.store.verify_blobs import damaged_blobs


def put(store: LocalStore, *contents: bytes) -> list[Descriptor]:
    store.folder("blobs").mkdir(parents=True)
    found = []
    for data in contents:
        digest = Digest.of(data)
        Path(store.blob_path(digest)).write_bytes(data)
        found.append(Descriptor(media_type="x", digest=digest, size=len(data), name=data.decode()))
    return found


@pytest.mark.parametrize("jobs", [None, 1, 8])
def test_finds_every_missing_and_damaged_blob(store: LocalStore, jobs: int | None) -> None:
    blobs = put(store, b"intact", b"gone", b"short", b"changed", b"")
    paths = {blob.name: Path(store.blob_path(blob.digest)) for blob in blobs}
    paths["gone"].unlink()
    os.truncate(paths["short"], 2)
    paths["changed"].write_bytes(b"Changed")
    found = {blob.name: type(error) for blob, error in damaged_blobs(store, blobs, jobs=jobs)}
    assert found == {"gone": BlobMissing, "short": BlobDamaged, "changed": BlobDamaged}


def test_reports_the_bytes_of_intact_blobs(store: LocalStore) -> None:
    calls: list[tuple[str, int, int]] = []
    blobs = put(store, b"ab", b"cde")
    assert list(damaged_blobs(store, blobs, progress=lambda *call: calls.append(call))) == []
    assert [done for _, done, _ in calls][-1] == 5
    assert {what for what, *_ in calls} == {"ab", "cde"}
    assert {total for *_, total in calls} == {5}


def test_the_largest_blobs_come_first(store: LocalStore) -> None:
    reported: list[str] = []
    blobs = put(store, b"ab", b"abcd", b"a", b"abc")
    list(damaged_blobs(store, blobs, jobs=1, progress=lambda what, *_: reported.append(what)))
    assert reported == ["abcd", "abc", "ab", "a"]


def test_other_errors_are_not_swallowed(store: LocalStore) -> None:
    def fail(what: str, done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        list(damaged_blobs(store, put(store, b"ab"), progress=fail))


def test_closing_the_iterator_ends_all_threads(store: LocalStore) -> None:
    before = threading.active_count()
    missing = [
        Descriptor(media_type="x", digest=Digest.of(bytes([number])), size=1)
        for number in range(50)
    ]
    found = damaged_blobs(store, missing)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


class Meeting(LocalStore):
    """A store in which a blob is checked only together with another one."""

    barrier = threading.Barrier(2)

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        self.barrier.wait(30)
        super().check_digest(digest, size, progress)


def test_blobs_are_checked_at_the_same_time(tmp_path: Path) -> None:
    store = Meeting(tmp_path)
    blobs = put(store, b"a", b"b", b"c", b"d")
    os.truncate(store.blob_path(blobs[3].digest), 0)
    ((found, _),) = damaged_blobs(store, blobs, jobs=2)
    assert found == blobs[3]


def test_the_progress_of_many_threads_only_grows_and_ends_at_the_total(store: LocalStore) -> None:
    blobs = put(store, *(str(number).encode() for number in range(200)))
    done: list[int] = []
    assert list(damaged_blobs(store, blobs, jobs=8, progress=lambda _, n, __: done.append(n))) == []
    assert done == sorted(done)
    assert done[-1] == sum(blob.size for blob in blobs)


def test_results_are_recorded(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_MARGIN_NS", 0)
    store.folder("headers").mkdir(parents=True)
    blobs = put(store, b"intact", b"changed")
    list(damaged_blobs(store, blobs, verified=VerifiedBlobs(store)))
    Path(store.blob_path(blobs[1].digest)).write_bytes(b"Changed")
    noted = VerifiedBlobs(store)
    assert [noted.has(blob.digest, blob.size) for blob in blobs] == [True, False]
    ((found, _),) = damaged_blobs(store, blobs, verified=noted)
    assert found == blobs[1]


def test_results_are_kept_when_the_check_is_interrupted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_MARGIN_NS", 0)
    store.folder("headers").mkdir(parents=True)
    blobs = put(store, b"the larger one comes first", b"small")
    Path(store.blob_path(blobs[1].digest)).unlink()
    found = damaged_blobs(store, blobs, jobs=1, verified=VerifiedBlobs(store))
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert VerifiedBlobs(store).has(blobs[0].digest, blobs[0].size)


def test_a_rate_is_spent_byte_by_byte(store: LocalStore) -> None:
    spent: list[int] = []

    class Noting(RateLimiter):
        def spend(self, count: int, wait: Callable[[float], object]) -> None:
            assert not wait(0)
            spent.append(count)

    blobs = put(store, b"ab", b"cde", b"")
    assert list(damaged_blobs(store, blobs, pace=Noting(1))) == []
    assert sorted(spent) == [2, 3]


def test_interrupting_does_not_wait_for_the_rate_limit(store: LocalStore) -> None:
    blobs = put(store, b"gone", b"slow" * 1000, b"slower" * 1000)
    Path(store.blob_path(blobs[0].digest)).unlink()
    verified = VerifiedBlobs(store)
    found = damaged_blobs(store, blobs, jobs=3, verified=verified, pace=RateLimiter(1))
    assert next(found)[0].name == "gone"
    found.close()  # type: ignore[attr-defined]
    assert not any(verified.has(blob.digest, blob.size) for blob in blobs)
