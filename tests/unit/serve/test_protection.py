"""What keeps the blobs of models that are sent."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.serve import protection as module
from blobstore.serve.protection import Protection
from blobstore.store.local import LocalStore

FIRST, SECOND = Digest.of(b"first"), Digest.of(b"second")
A, B, C = (Digest.of(name) for name in (b"a", b"b", b"c"))


@pytest.fixture
def protection(store: LocalStore) -> Protection:
    with store.ingest():  # the store is there
        pass
    return Protection(store)


def leased(protection: Protection) -> set[Digest]:
    return set(protection._store.read_leases().digests)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let every write to a file fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_blobs_are_leased_while_their_model_is_used(protection: Protection) -> None:
    protection.add(FIRST, [A, B])
    protection.add(SECOND, [B, C])
    assert leased(protection) == {A, B, C}
    use = protection.use(FIRST)
    assert sorted(protection.end_idle(0)) == [SECOND]
    assert leased(protection) == {A, B}
    assert not protection.is_idle(FIRST, 0)
    assert protection.is_idle(SECOND, 3600)
    del use
    assert protection.is_idle(FIRST, 0)
    assert protection.end_idle(0) == [FIRST]
    assert not leased(protection)
    assert not protection.touch(FIRST)


def test_a_model_stays_for_a_while_after_its_last_use(protection: Protection) -> None:
    protection.add(FIRST, [A])
    protection.use(FIRST)()
    assert not protection.is_idle(FIRST, 3600)
    assert protection.end_idle(3600) == []
    assert protection.touch(FIRST)
    assert leased(protection) == {A}


def test_a_model_that_is_asked_for_again_counts_as_used(protection: Protection) -> None:
    protection.add(FIRST, [A])
    protection._models[FIRST].used = float("-inf")
    assert protection.is_idle(FIRST, 3600)
    assert protection.touch(FIRST)
    assert not protection.is_idle(FIRST, 3600)


def test_blobs_stay_leased_while_the_lease_is_replaced(
    protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = protection._store
    lease, seen = store.lease_if_writable, list[set[Digest]]()

    def leasing(blobs: Iterable[Digest]) -> AbstractContextManager[Callable[..., bool]]:
        seen.append(leased(protection))
        return lease(blobs)

    protection.add(FIRST, [A])
    protection.add(SECOND, [B])
    monkeypatch.setattr(store, "lease_if_writable", leasing)
    assert protection.end_idle(0, [SECOND]) == [SECOND]
    assert seen == [{A, B}]
    assert leased(protection) == {A}


def test_only_the_models_that_are_named_lose_their_blobs(protection: Protection) -> None:
    for model, blob in ((FIRST, A), (SECOND, B)):
        protection.add(model, [blob])
        assert protection.touch(model)
    assert protection.end_idle(0, [SECOND, Digest.of(b"none")]) == [SECOND]
    assert leased(protection) == {A}


def test_all_models_have_one_file_of_a_lease(protection: Protection) -> None:
    for number in range(100):
        protection.add(Digest.of(b"%d" % number), [Digest.of(b"blob %d" % number)])
    assert len(leased(protection)) == 100
    assert len(list(protection._store.folder("leases").iterdir())) == 1


def test_a_store_that_appears_later_is_protected_from_then_on(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "later")
    protection = Protection(store)
    protection.add(FIRST, [A])  # cannot be leased, and is used all the same
    with store.ingest():
        pass
    protection.add(SECOND, [B])
    assert leased(protection) == {A, B}


def test_what_is_not_in_the_store_needs_no_protection(protection: Protection) -> None:
    use = protection.use(FIRST)
    use()
    assert protection.end_idle(0) == []


def test_a_model_that_a_full_disk_keeps_from_its_lease_is_served_for_a_moment(
    protection: Protection,
) -> None:
    with full_disk():
        protection.add(FIRST, [A])
        assert protection.touch(FIRST)
    assert not leased(protection)


def test_a_lease_that_was_not_written_is_tried_again_when_its_model_is_asked_for(
    protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0)
    with full_disk():
        protection.add(FIRST, [A])
    assert not protection.touch(FIRST)
    protection.add(FIRST, [A])
    assert leased(protection) == {A}
    assert protection.touch(FIRST)


def test_a_lease_that_was_not_written_is_tried_again_from_time_to_time(
    protection: Protection,
) -> None:
    with full_disk():
        protection.add(FIRST, [A])
        use = protection.use(FIRST)
        assert protection.end_idle(0) == []
    assert protection.end_idle(0) == []
    assert leased(protection) == {A}
    del use


def test_a_full_disk_takes_no_lease_that_is_there(protection: Protection) -> None:
    protection.add(FIRST, [A])
    with full_disk():
        protection.add(SECOND, [B])
        assert leased(protection) == {A}
        use = protection.use(FIRST)
        assert protection.end_idle(0) == [SECOND]
        assert leased(protection) == {A}
    del use


def test_no_lease_that_has_ended_is_written_to(protection: Protection) -> None:
    protection.add(FIRST, [A])
    assert protection.end_idle(0) == [FIRST]
    protection.add(SECOND, [B])
    assert leased(protection) == {B}
