from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.store.notes import NoteKind, pack, parsed, read_own, unpack, write_own

KIND = NoteKind("numbers 1")
KEY = Digest.of(b"key")


def test_a_note_has_the_bytes_that_were_packed() -> None:
    note = pack(KIND, KEY, b"one\ntwo")

    assert (
        note == str(Digest.of(f"numbers 1 {KEY}\n".encode() + b"one\ntwo")).encode() + b"\none\ntwo"
    )
    assert unpack(KIND, KEY, note) == b"one\ntwo"


@pytest.mark.parametrize("at", [0, 40, 71, 74])
def test_an_altered_note_is_none(at: int) -> None:
    note = bytearray(pack(KIND, KEY, b"one"))
    note[at] ^= 1

    assert unpack(KIND, KEY, bytes(note)) is None


@pytest.mark.parametrize("size", [0, 1, 70, 71, 72, 74])
def test_the_beginning_of_a_note_is_none(size: int) -> None:
    assert unpack(KIND, KEY, pack(KIND, KEY, b"one")[:size]) is None


def test_a_note_of_another_version_or_key_is_none() -> None:
    note = pack(KIND, KEY, b"one")

    assert unpack(NoteKind("numbers 2"), KEY, note) is None
    assert unpack(KIND, Digest.of(b"other"), note) is None


@pytest.mark.parametrize(
    "text", [None, b"", b"{", b"[1]", b'{"a": "x"}', b'{"a": Infinity}', b"[" * 9999]
)
def test_json_of_another_form_is_none(text: bytes | None) -> None:
    def number(value: Any) -> int:
        return int(value["a"])

    assert parsed(text, number) is None
    assert parsed(b'{"a": 7}', number) == 7


def test_a_note_of_its_user_is_read_back_and_is_for_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "note"
    write_own(path, tmp_path, KIND, {"a": 1})

    assert read_own(path, KIND) == {"a": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_own(path, NoteKind("numbers 2")) is None
    assert read_own(path.rename(path.with_name("other")), KIND) is None


def test_a_note_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "folder").write_bytes(b"in the way")
    write_own(tmp_path / "folder" / "note", tmp_path, KIND, {"a": 1})
    write_own(tmp_path / "note", tmp_path, KIND, {"path": "\udc80"})

    assert read_own(tmp_path / "folder" / "note", KIND) is None
    assert read_own(tmp_path / "note", KIND) is None
