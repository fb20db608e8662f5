"""What a push promises for every target: a registry, and object storage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.rate_limit import RateLimiter
from blobstore.errors import BlobDamaged, ModelNotFound
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip
from tests.support.frozen import put
from tests.support.models import add_blobs, blob

FAST = 1e15
"""Bytes per second that nothing reaches."""


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store with a model of weights, which compress, and of random bytes, which do not."""
    store = LocalStore(tmp_path / "origin")
    put(store, "m", {"a": 1, "b": 2})
    add_blobs(store, "random", {"x": blob(("x", "U8", (90_000,), os.urandom(90_000)))})
    return store


@pytest.fixture(params=["registry", "objects"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a target, which has nothing yet."""
    if request.param == "objects":
        return f"file://{tmp_path}/objects"
    remote: str = request.getfixturevalue("remote")
    return remote


@pytest.mark.slow
def test_an_unchanged_model_is_not_sent_again(origin: LocalStore, target: str) -> None:
    first = blobstore.push("m", target, store=origin, cold=True)
    assert (first.is_unchanged, first.cold_blobs) == (False, 2)
    again = blobstore.push("m", target, store=origin, cold=True)
    assert again.is_unchanged
    assert (again.digest, again.cold_blobs, again.bytes_cold) == (first.digest, 2, first.bytes_cold)
    verified = blobstore.push("m", target, store=origin, cold=True, verify=True)
    assert verified.is_unchanged
    assert verified.bytes_present == verified.bytes_verified == first.bytes_sent


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(
    origin: LocalStore, target: str
) -> None:
    for name in ("m", "random"):
        planned = [
            blobstore.push(name, target, store=origin, cold=True, dry_run=True) for _ in range(2)
        ]
        pushed = blobstore.push(name, target, store=origin, cold=True)
        for plan in planned:
            assert plan.cold_blobs == pushed.cold_blobs
            assert plan.bytes_cold == pytest.approx(pushed.bytes_cold, rel=0.1)
            assert plan.bytes_sent - plan.bytes_cold == pushed.bytes_sent - pushed.bytes_cold


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
def test_progress_only_grows_and_ends_at_the_total(
    origin: LocalStore, target: str, dry_run: bool
) -> None:
    reports: list[tuple[int, int]] = []
    blobstore.push(
        "m",
        target,
        store=origin,
        cold=True,
        verify=True,
        dry_run=dry_run,
        progress=lambda _, done, total: reports.append((done, total)),
    )
    # Blobs that are compressed are counted apart from those that are sent.
    for total in {total for _, total in reports}:
        done = [count for count, of in reports if of == total]
        assert done == sorted(done)
        assert done[-1] == total


@pytest.mark.slow
def test_the_rate_limit_counts_every_byte_of_blobs(
    origin: LocalStore, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[int] = []
    spend = RateLimiter.spend

    def counted(self: RateLimiter, count: int, wait: Any) -> None:
        spent.append(count)
        spend(self, count, wait)

    monkeypatch.setattr(RateLimiter, "spend", counted)
    pushed = blobstore.push("m", target, store=origin, cold=True, verify=True, limit_rate=FAST)
    sent = pushed.bytes_sent + pushed.bytes_mounted + pushed.bytes_present  # of earlier tests
    assert pushed.bytes_verified == sent
    assert sum(spent) >= pushed.bytes_sent + pushed.bytes_verified


@pytest.mark.slow
def test_a_damaged_blob_is_named_and_not_published(
    origin: LocalStore, target: str, tmp_path: Path
) -> None:
    flip(blob_path(origin, "a"))
    with pytest.raises(BlobDamaged, match="layer 'a': .*sha256:"):
        blobstore.push("m", target, store=origin)
    address = f"{target}/m" if target.startswith("file:") else target
    with pytest.raises(ModelNotFound):
        blobstore.pull(address, store=tmp_path / "other")


def test_a_lost_compressed_form_is_sent_again_if_the_model_is_verified(
    origin: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "objects"
    blobstore.push("m", f"file://{folder}", store=origin)
    before = set((folder / "blobs").iterdir())
    first = blobstore.push("m", f"file://{folder}", store=origin, cold=True)
    forms = sorted(set((folder / "blobs").iterdir()) - before)
    size = forms[0].stat().st_size
    forms[0].unlink()
    forms[1].write_bytes(bytes(forms[1].stat().st_size))
    again = blobstore.push("m", f"file://{folder}", store=origin, cold=True, verify=True)
    assert again.bytes_sent == first.bytes_cold > size
    assert blobstore.push("m", f"file://{folder}", store=origin, verify=True).is_unchanged
