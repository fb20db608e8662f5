from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from blobstore.store.used_remotes import remember_remotes, used_remotes


def test_the_latest_come_first_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(250):
        remember_remotes(store, f"s3://bucket/{number}")
    remember_remotes(store, "s3://bucket/100", "s3://" + "x" * 5000, "file:///\udcff")

    found = used_remotes(store)
    assert found[:2] == ["s3://bucket/100", "s3://bucket/249"]
    assert len(found) == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1}', b'[1, null, "a\\u001b[1mb", ["x"]]', b"\xff" * 9, b"[" * 99_999],
)
def test_a_damaged_file_is_no_error_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    remember_remotes(store, "s3://bucket")
    (tmp_path / ".blobstore/remotes/used").write_bytes(content)

    assert used_remotes(store) == []
    remember_remotes(store, "s3://other")
    assert used_remotes(store) == ["s3://other"]


def test_a_store_that_cannot_be_written_remembers_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(tmp_path / "file")
    remember_remotes(store, "s3://bucket")
    assert used_remotes(store) == []
