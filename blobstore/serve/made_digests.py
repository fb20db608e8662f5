"""The digests of manifests and configs that a registry adds to the blobs of a repository, kept across restarts.

Computing them reads headers and small files, which takes a millisecond or more per manifest. Each repository has one
note, because reading 10,000 files would take as long as a client waits.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.files import status_of
from blobstore.store.notes import NoteKind, parsed, repository_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

_NOTE: Final = NoteKind("made digests 2", ".made")
"""Changes with the bytes of the manifests and configs that are made."""
_DIGITS: Final = 16


class MadeDigests(NamedTuple):
    """The digests that a registry has for one manifest."""

    signed: int
    """When the manifest got its last signature, which a registry has too."""
    numbers: array[int]
    """The beginnings of the digests, sorted."""


def signed_at(store: LocalStore, manifest: Digest) -> int:
    """Return when a model got its last signature; 0 if it has none."""
    status = status_of(store.signature_folder(manifest), follow=True)
    return status.st_mtime_ns if status else 0


def number_of(digest: Digest) -> int:
    """Return the beginning of a digest."""
    return int(digest.hex[:_DIGITS], 16)


def numbers_of(digests: Iterable[Digest]) -> array[int]:
    """Return the beginnings of digests, sorted."""
    return array("Q", sorted(_parsed_numbers("".join(one.hex[:_DIGITS] for one in digests))))


def read_made(store: LocalStore, repository: Reference) -> dict[Digest, MadeDigests]:
    """Return the noted digests by manifest. Some manifests may be missing from the note, and others be gone."""
    return parsed(store.read_note(_NOTE, repository_key(repository)), _parsed) or {}


def write_made(
    store: LocalStore, repository: Reference, made: Mapping[Digest, MadeDigests]
) -> None:
    """Write the note of a repository, unless the store cannot be written."""
    value = {
        key.hex: [one.signed, "".join(f"{number:0{_DIGITS}x}" for number in one.numbers)]
        for key, one in made.items()
    }
    store.write_note(_NOTE, repository_key(repository), strict_json.dumps(value).encode())


def _parsed(value: Any) -> dict[Digest, MadeDigests]:
    return {
        Digest(key): MadeDigests(int(signed), _parsed_numbers(text))
        for key, (signed, text) in value.items()
    }


def _parsed_numbers(text: str) -> array[int]:
    """Return numbers of :func:`number_of` that are written one after the other. A repository may have millions."""
    numbers = array("Q", bytes.fromhex(text))
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
