"""Lists the files of a Hub repository at one commit, with sizes and digests.

The listing comes from the Hub's API, from the copy of it in the client's cache, or from the cached files:
the client names each one by its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import limits, strict_json
from blobstore.core.digest import git_digester
from blobstore.core.escape import quote
from blobstore.core.files import read_regular, write_file
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
REVISION = re.compile(r"(?!.*\.\.)[^\s/~^:?*\[\\-][^\s~^:?*\[\\]*")
"""The references that git allows, so that a revision cannot lead out of a cache, or to another address."""
DIGESTS = {"sha256": re.compile(r"[0-9a-f]{64}", re.ASCII), "sha1": COMMIT}
"""The form of digests by algorithms."""
_MAX_CACHED_LISTING = limits.HUB_LISTING.all
_TREE_VERSION = 1
"""Version of the client's cached listings."""


class ListedFile(NamedTuple):
    """A file as the Hub lists it.

    ``algorithm`` is ``sha256``, or ``sha1`` of a git blob. It is empty if the digest is not known.
    """

    name: str
    size: int
    algorithm: str
    digest: str


Listing = dict[str, ListedFile]
"""Files by name."""
_Entry = dict[str, Any]
"""A file in the form of the client's cache."""
Entries = dict[str, _Entry]
"""Files by name."""


def entries_of(pages: Iterable[bytes], budget: limits.Budget) -> Iterator[tuple[str, _Entry]]:
    """Yield the files that the pages of a tree list, in the form of the client's cache.

    Raises:
        RemoteError: there are more bytes or entries than ``budget`` has. Those beyond are not parsed.
        AttributeError, KeyError, TypeError, ValueError: a page is malformed.
    """
    for page in pages:
        budget.spend(len(page), 0)
        for file in strict_json.elements(page):
            budget.spend(0)
            if file["type"] != "file":
                continue
            entry = {"size": file["size"], "blob_id": file["oid"]}
            if large := file.get("lfs"):
                known = {"lfs_sha256": large["oid"], "lfs_size": file["size"]}
                entry |= known | {"xet_hash": file.get("xetHash")}
            yield file["path"], entry
        del page  # before the next one is fetched


def digester_of(file: ListedFile) -> hashlib._Hash:
    """Return a hasher for the kind of digest that the Hub lists for a file."""
    return git_digester(file.size) if file.algorithm == "sha1" else hashlib.new(file.algorithm)


def cached_snapshot(storage: Path, revision: str | None) -> Path | None:
    """Return the snapshot that a repository's folder in the cache has of a revision."""
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        try:
            commit = read_regular(storage / "refs" / commit, 100).decode().strip()
        except (OSError, ValueError, BlobstoreError):
            return None
    folder = storage / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def cached_listing(snapshot: Path) -> Listing | None:
    """Return the listing that the cache has for a snapshot; None if there is none."""
    try:
        value = strict_json.loads_any(read_regular(_tree_path(snapshot), _MAX_CACHED_LISTING))
        return (
            listing_of(value["files"].items()) if value["format_version"] == _TREE_VERSION else None
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return None
    except BlobstoreError:
        return None


def cache_listing(snapshot: Path, revision: str | None, entries: Entries) -> None:
    """Write a listing and the commit of a branch to the cache, as the client does, for offline use.

    The client would ask the Hub for both once more.

    Raises:
        OSError: the cache cannot be written.
    """
    storage = snapshot.parents[1]
    tree = {"format_version": _TREE_VERSION, "files": entries}
    files = {_tree_path(snapshot): json.dumps(tree)}
    if not COMMIT.fullmatch(revision or ""):
        files[storage / "refs" / (revision or "main")] = snapshot.name
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [content.encode()], durable=False)


def _tree_path(snapshot: Path) -> Path:
    return snapshot.parents[1] / "trees" / f"{snapshot.name}.json"


def files_in_snapshot(snapshot: Path) -> Listing:
    """Return the files of a snapshot with the digests by which the client named them.

    Without links, as on file systems that have none, the digests are not known. A broken link is listed as an
    empty file, and checking it fails.
    """
    found = {}
    for path in sorted(snapshot.rglob("*")):
        target = Path(os.path.realpath(path))
        name, digest = path.relative_to(snapshot).as_posix(), target.name
        algorithm = next((a for a, form in DIGESTS.items() if form.fullmatch(digest)), "")
        if not target.is_dir():
            size = target.stat().st_size if target.is_file() else 0
            found[name] = ListedFile(name, size, algorithm, digest)
    return found


def listing_of(entries: Iterable[tuple[str, _Entry]]) -> Listing:
    """Return the listing of files by their names and entries.

    Raises AttributeError, KeyError, TypeError or ValueError if an entry is malformed.
    """
    listing = {}
    for name, entry in entries:
        sha256, size = entry.get("lfs_sha256"), entry["size"]
        algorithm, digest = ("sha256", sha256) if sha256 else ("sha1", entry["blob_id"])
        if type(size) is not int or size < 0 or not DIGESTS[algorithm].fullmatch(digest):
            raise ValueError(f"no size or digest of {quote(name)}")
        if "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/")):
            listing[name] = ListedFile(name, size, algorithm, digest)
    return listing
