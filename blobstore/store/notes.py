"""Notes: what is known of a model or of its files, and would take long to find out again.

A note is a cache: it may vanish, and may be wrong. Its first line is a checksum of its kind, of its key and of the
bytes that follow, so a torn note, one of an older version, and one of another key are no notes. The checksum is no
signature: a reader that is asked to verify uses no note.

``gc`` removes a note unless its key is the digest of a manifest that is there, or that of its repository.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from blobstore.manifests.reference import Reference

_Value = TypeVar("_Value")

_MAX_OWN: Final = 64 * 2**20
"""Bytes of a note that only its user reads."""
_MALFORMED: Final = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    BlobstoreError,
)
"""The exceptions of a parser for a value of another form."""


class NoteKind(NamedTuple):
    """A kind of notes."""

    name: str
    """With the version: a note of another version is ignored."""
    ending: str = ""
    """Of the file, if there may be several notes with one key."""


def repository_key(repository: Reference) -> Digest:
    """Return the key of notes about all tags of a repository."""
    return Digest.of("/".join(repository.parts[:3]).encode())


def pack(kind: NoteKind, key: Digest, data: bytes) -> bytes:
    """Return the bytes of a note."""
    return f"{_checksum(kind, key, data)}\n".encode() + data


def unpack(kind: NoteKind, key: Digest, note: bytes) -> bytes | None:
    """Return what :func:`pack` was given; None if the note is damaged, or of another kind or key."""
    checksum, _, data = note.partition(b"\n")
    return data if checksum == str(_checksum(kind, key, data)).encode() else None


def parsed(note: bytes | None, parse: Callable[[Any], _Value]) -> _Value | None:
    """Return the result of ``parse`` for the JSON of a note; None if there is no note, or it has another form."""
    if note is None:
        return None
    try:
        return parse(strict_json.loads_any(note))
    except _MALFORMED:
        return None


def write_own(path: Path, root: Path, kind: NoteKind, value: Mapping[str, Any]) -> None:
    """Write a note that only its user reads, unless the store cannot be written.

    Also writes nothing if a text of the value, such as a path, is not UTF-8.
    """
    with contextlib.suppress(OSError, UnicodeEncodeError):
        make_folders(path.parent, root, durable=False)
        data = strict_json.dumps(value).encode()
        write_file(path, [pack(kind, _own_key(path), data)], mode=0o600, durable=False)


def read_own(
    path: Path, kind: NoteKind, parse: Callable[[Any], _Value] = lambda value: value
) -> _Value | None:
    """Return the result of ``parse`` for a note that this user has written; None as :func:`parsed`."""
    try:
        if path.lstat().st_uid != os.geteuid():  # it could name any upload, or any repository
            return None
        note = read_regular(path, _MAX_OWN)
    except (OSError, BlobstoreError):
        return None
    return parsed(unpack(kind, _own_key(path), note), parse)


def _own_key(path: Path) -> Digest:
    return Digest.of(path.name.encode())


def _checksum(kind: NoteKind, key: Digest, data: bytes) -> Digest:
    return Digest.of(f"{kind.name} {key}\n".encode() + data)
