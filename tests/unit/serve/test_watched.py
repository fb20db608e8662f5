"""Files that change while a server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import BlobstoreError, UsageError
from blobstore.serve.watched import Watched


def read(path: Path) -> tuple[str, str]:
    """Return a text and its fault. Raises BlobstoreError without a file."""
    if not path.exists():
        raise BlobstoreError("it is gone")
    text = path.read_text()
    return text, "it is empty" if not text else ""


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path, notes, reads = tmp_path / "file", list[Any](), list[str | None]()
    path.write_text("one")

    def counted(before: str | None) -> tuple[str, str]:
        reads.append(before)
        return read(path)

    watched = Watched([path], counted, lambda **fields: notes.append(fields["error"]))
    watched.look()
    assert (watched.value, reads) == ("one", [None])
    path.write_text("three")
    watched.look()
    assert (watched.value, reads) == ("three", [None, "one"])
    assert not notes


def test_a_fault_is_noted_once_and_looked_at_until_it_is_gone(tmp_path: Path) -> None:
    path, notes = tmp_path / "file", list[str]()
    path.write_text("one")
    watched = Watched([path], lambda _: read(path), lambda **fields: notes.append(fields["error"]))
    path.unlink()
    for _ in range(3):
        watched.look()
    assert (watched.value, notes) == ("one", ["it is gone"]), "what it said before holds"
    path.write_text("")
    watched.look()
    assert (watched.value, notes) == ("", ["it is gone", "it is empty"])
    path.write_text("two")
    watched.look()
    assert (watched.value, len(notes)) == ("two", 2)


def test_a_fault_at_the_start_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(BlobstoreError, match="gone"):
        Watched([path], lambda _: read(path), print)
    path.touch()
    with pytest.raises(UsageError, match="empty"):
        Watched([path], lambda _: read(path), print)
