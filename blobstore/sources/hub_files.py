"""Fetches files of the Hub to places that their listing names.

The Hub's own library makes paths of what the server says of a file: of its ``ETag``, of the commit in
``X-Repo-Commit``, and of its Xet hash. A hostile server could write to any place. Here a place follows from the listing
of the commit alone, whose digests are checked, and the layout is that of the library's cache.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from blobstore.core.escape import escape, quote
from blobstore.core.files import open_to_append
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from blobstore.core.workers import WorkerPool
    from blobstore.sources.hub_client import HubClient
    from blobstore.sources.hub_listing import ListedFile


def fetch(
    client: HubClient,
    repository: str,
    commit: str,
    file: ListedFile,
    part: Path,
    path: Path,
    pool: WorkerPool,
) -> None:
    """Download a file to ``part``, after the bytes that are there, and rename it to ``path``: a job of ``pool``.

    The bytes are not compared with the digest.

    Raises:
        DamagedSource: the Hub sends more or less than it lists.
        RemoteError: it refuses, fails or cannot be reached.
    """
    what = f"fetching {escape(file.name)}"
    for parent in (part.parent, path.parent):
        parent.mkdir(parents=True, exist_ok=True)

    def read(begin: int) -> Generator[bytes, None, None]:
        return client.pieces(repository, commit, file.name, begin, file.size)

    with os.fdopen(open_to_append(part), "ab") as stream:
        if (count := stream.tell()) > file.size:
            count = stream.truncate(0)
        pool.report(count, what)
        if count < file.size:
            for piece in client.retry().resumed(count, file.size, read):
                count += len(piece)
                if count > file.size:
                    raise DamagedSource(
                        f"file {quote(file.name)}: the Hub sends more than the {file.size} bytes that it lists",
                        advice="try again",
                    )
                pool.report(len(piece), what)
                stream.write(piece)
    part.replace(path)


def link(path: Path, place: Path) -> None:
    """Make a link to a file. Other processes read a cache, so a link that is there already stays. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.symlink_to(path)
    except FileExistsError:
        if not place.is_symlink() or place.readlink() != path:
            new = place.with_name(f".{secrets.token_hex(8)}.link")
            new.symlink_to(path)
            new.replace(place)
